// A product with a whole matrix of bfloat16 in the processor's tiles (amx.hpp), where it has them.
//
// Libraries choose among instructions by how many rows there are, so that a row's bits depend on its company. Here they
// depend on the row alone: y[r, n] is a chain of tiles' products over 32 columns each, in their order, then the bias,
// rounded once. The matrix is laid out as tiles want it on the way, or once beforehand: the same bits.
#pragma once

#include <cstdint>

#include "isa.hpp"

namespace iclperm {

constexpr std::int64_t TILE_COLUMNS = 32;  // that a tile's product adds up; a matrix has whole ones
constexpr std::int64_t PANEL_OUTPUTS = 32;  // laid out together, two tiles side by side; the last ones with zeros

// All numbers are bfloat16. x [num_rows, num_columns], y [num_rows, num_outputs], bias [num_outputs] or nullptr. Of the
// weight [num_outputs, num_columns] or of what lay_out made of it, one is given. Strides count numbers.
struct TileProduct {
  std::int64_t num_rows, num_columns, num_outputs;
  const std::uint16_t* x;
  std::int64_t x_stride;
  const std::uint16_t* weight;
  std::int64_t weight_stride;
  const std::uint16_t* laid_out;
  const std::uint16_t* bias;
  std::uint16_t* y;
  std::int64_t y_stride;
};

// Whether an instruction set has tiles.
bool has_tile_products(Isa isa);

// Numbers of a laid-out matrix. Throws std::invalid_argument for a size below zero, or one that no memory holds.
std::int64_t laid_out_size(std::int64_t num_outputs, std::int64_t num_columns);

// Both throw std::invalid_argument where there are no tiles or columns do not fill them, and what parallel_for throws.
void tile_product(const TileProduct& call, Isa isa, int num_threads);
// Fills laid_out_size numbers.
void lay_out(const TileProduct& call, std::uint16_t* laid_out, Isa isa, int num_threads);

// What follows is between the dispatcher and the kernel.

// Rows that are multiplied with a panel at a time; a last block of them is brought to where it can be padded.
constexpr std::int64_t BLOCK_ROWS = 32;

namespace amx_bf16 {
// Panels [begin, end) of the matrix.
void lay_out_panels(const TileProduct& call, std::int64_t begin, std::int64_t end, std::uint16_t* laid_out);
// Rows [row_begin, row_end) of y, of panels [begin, end), which lie at `panels`. Scratch: BLOCK_ROWS * num_columns.
void multiply_panels(const TileProduct& call, std::int64_t row_begin, std::int64_t row_end, std::int64_t begin,
                     std::int64_t end, const std::uint16_t* panels, std::uint16_t* scratch);
}  // namespace amx_bf16

}  // namespace iclperm
