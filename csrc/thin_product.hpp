// A product of few rows with a whole matrix, read once where it lies, in the order of sums that a library's has.
//
// Libraries are made for many rows: of a few they reach a third of what the processor can do. Their sums go by one rule,
// a chain of fused multiplications and additions over a block of columns, block after block, so the same bits can be had
// faster. A row's bits depend on that row alone.
#pragma once

#include <cstdint>

#include "element.hpp"
#include "isa.hpp"

namespace iclperm {

// y[r, n] = sum over blocks b of (chain of fma over the columns k of b of x[r, k] weight[n, k]), blocks added in
// ascending order; bias[n], unless that is nullptr, comes before the first block or after the last. A column is a float32,
// or a pair of bfloat16 that one instruction multiplies and adds to a float32, which is rounded at the end. Strides of x
// and weight count columns, that of y its elements; columns lie side by side.
struct ThinProduct {
  Element element;
  std::int64_t num_rows, num_columns, num_outputs;
  const void* x;
  std::int64_t x_stride;
  const void* weight;
  std::int64_t weight_stride;
  const void* bias;
  bool bias_first;
  std::int64_t block;  // columns of a chain, 1 at least
  void* y;
  std::int64_t y_stride;
};

// Whether an instruction set has the fused products of an element, without which the order of sums is another.
bool has_fused_products(Isa isa, Element element);

// Throws std::invalid_argument for a block below 1, for bfloat16 where the instruction set does not multiply it, and what
// parallel_for throws.
void thin_product(const ThinProduct& call, Isa isa, int num_threads);

// What follows is between the dispatcher and the kernels.

// Outputs that are an item of work at most: what they need of the matrix is used while it lies in a core's own memory.
constexpr std::int64_t THIN_OUTPUTS = 96;

// Floats of the rows' columns, which all workers read, and that a worker needs beside; what fills columns [begin, end)
// of the one, and what makes outputs [begin, end), at most THIN_OUTPUTS.
#define ICLPERM_THIN_KERNELS                                                                                \
  std::int64_t thin_columns_size(const ThinProduct& call);                                                  \
  std::int64_t thin_scratch_size(const ThinProduct& call);                                                  \
  void thin_columns(const ThinProduct& call, std::int64_t begin, std::int64_t end, float* columns);         \
  void thin_outputs(const ThinProduct& call, const float* columns, std::int64_t begin, std::int64_t end,    \
                    float* scratch);
namespace baseline {
ICLPERM_THIN_KERNELS
}
namespace avx2 {
ICLPERM_THIN_KERNELS
}
namespace avx512 {
ICLPERM_THIN_KERNELS
}
namespace avx512_bf16 {
ICLPERM_THIN_KERNELS
}
#undef ICLPERM_THIN_KERNELS

}  // namespace iclperm
