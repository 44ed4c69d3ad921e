#include "amx.hpp"
#include "simd.hpp"
#include "tile_product.hpp"

namespace iclperm::ICLPERM_ISA {
namespace {

static_assert(LANES == TILE_ROWS && TILE_COLUMNS == 2 * TILE_PAIRS && PANEL_OUTPUTS == 2 * TILE_ROWS);
static_assert(BLOCK_ROWS == 2 * TILE_ROWS);

constexpr std::int64_t A_TILE = TILE_ROWS * TILE_COLUMNS;  // numbers
constexpr std::int64_t TILE_STRIDE = TILE_COLUMNS * sizeof(std::uint16_t);

inline std::int64_t min(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// Sums [NUM_TILES * 16, 32] of as many rows of x and a panel.
template <int NUM_TILES>
inline void multiply_panel(const std::uint16_t* x, std::int64_t x_stride, const std::uint16_t* panel,
                           std::int64_t num_columns, float* sums) {
  const std::int64_t row_bytes = x_stride * static_cast<std::int64_t>(sizeof *x);
  zero_tile<0>();
  zero_tile<1>();
  if constexpr (NUM_TILES == 2) {
    zero_tile<2>();
    zero_tile<3>();
  }
  for (std::int64_t k = 0; k < num_columns; k += TILE_COLUMNS, panel += 2 * A_TILE) {
    load_tile<4>(x + k, row_bytes);
    load_tile<6>(panel, TILE_STRIDE);
    multiply_tiles<0, 4, 6>();
    load_tile<7>(panel + A_TILE, TILE_STRIDE);
    multiply_tiles<1, 4, 7>();
    if constexpr (NUM_TILES == 2) {
      load_tile<5>(x + TILE_ROWS * x_stride + k, row_bytes);
      multiply_tiles<2, 5, 6>();
      multiply_tiles<3, 5, 7>();
    }
  }
  constexpr std::int64_t STRIDE = PANEL_OUTPUTS * sizeof(float);
  store_tile<0>(sums, STRIDE);
  store_tile<1>(sums + LANES, STRIDE);
  if constexpr (NUM_TILES == 2) {
    store_tile<2>(sums + TILE_ROWS * PANEL_OUTPUTS, STRIDE);
    store_tile<3>(sums + TILE_ROWS * PANEL_OUTPUTS + LANES, STRIDE);
  }
}

// One row of sums [32], rounded, to as many outputs as there are.
inline void finish(const float* sums, const vfloat (&bias)[2], std::int64_t num_outputs, std::uint16_t* y) {
  auto* const out = reinterpret_cast<bfloat16*>(y);
  for (std::int64_t v = 0; v * LANES < num_outputs; ++v) {
    store_some(out + v * LANES, num_outputs - v * LANES, load(sums + v * LANES) + bias[v]);
  }
}

}  // namespace

void lay_out_panels(const TileProduct& call, std::int64_t begin, std::int64_t end, std::uint16_t* laid_out) {
  for (std::int64_t panel = begin; panel < end; ++panel) {
    for (std::int64_t k = 0; k < call.num_columns; k += TILE_COLUMNS) {
      for (std::int64_t first = panel * PANEL_OUTPUTS; first < (panel + 1) * PANEL_OUTPUTS; first += TILE_ROWS) {
        vfloat x[LANES];
        for (std::int64_t lane = 0; lane < LANES; ++lane) {
          const std::uint16_t* const row = call.weight + (first + lane) * call.weight_stride + k;
          x[lane] = first + lane < call.num_outputs ? as_float(load(reinterpret_cast<const Pair*>(row))) : vfloat{};
        }
        transpose(x);
        for (const vfloat& pairs : x) {
          store(reinterpret_cast<Pair*>(laid_out), as_uint(pairs));
          laid_out += TILE_COLUMNS;
        }
      }
    }
  }
}

void multiply_panels(const TileProduct& call, std::int64_t row_begin, std::int64_t row_end, std::int64_t begin,
                     std::int64_t end, const std::uint16_t* panels, std::uint16_t* scratch) {
  const TilesInUse tiles;
  alignas(64) float sums[BLOCK_ROWS * PANEL_OUTPUTS];
  for (std::int64_t row = row_begin; row < row_end; row += BLOCK_ROWS) {
    const std::int64_t num_rows = min(BLOCK_ROWS, row_end - row);
    const std::uint16_t* x = call.x + row * call.x_stride;
    std::int64_t x_stride = call.x_stride;
    if (num_rows % TILE_ROWS != 0) {  // a tile reads 16 rows, also where x has fewer
      for (std::int64_t r = 0; r < num_rows; ++r) {
        std::memcpy(scratch + r * call.num_columns, x + r * x_stride,
                    static_cast<std::size_t>(call.num_columns) * sizeof *x);
      }
      x = scratch;
      x_stride = call.num_columns;
    }
    for (std::int64_t panel = begin; panel < end; ++panel) {
      const std::uint16_t* const laid_out = panels + (panel - begin) * PANEL_OUTPUTS * call.num_columns;
      if (num_rows > TILE_ROWS) {
        multiply_panel<2>(x, x_stride, laid_out, call.num_columns, sums);
      } else {
        multiply_panel<1>(x, x_stride, laid_out, call.num_columns, sums);
      }
      const std::int64_t first = panel * PANEL_OUTPUTS, num_outputs = min(PANEL_OUTPUTS, call.num_outputs - first);
      vfloat bias[2] = {};
      if (call.bias != nullptr) {
        const auto* const shift = reinterpret_cast<const bfloat16*>(call.bias + first);
        for (std::int64_t v = 0; v * LANES < num_outputs; ++v) {
          bias[v] = load_some(shift + v * LANES, num_outputs - v * LANES);
        }
      }
      for (std::int64_t r = 0; r < num_rows; ++r) {
        finish(sums + r * PANEL_OUTPUTS, bias, num_outputs, call.y + (row + r) * call.y_stride + first);
      }
    }
  }
}

}  // namespace iclperm::ICLPERM_ISA
