#include "amx.hpp"
#include "simd.hpp"
#include "tile_product.hpp"

namespace iclperm::ICLPERM_ISA {
namespace {

static_assert(LANES == TILE_ROWS && TILE_COLUMNS == 2 * TILE_PAIRS && PANEL_OUTPUTS == 2 * TILE_ROWS);
static_assert(BLOCK_ROWS == 2 * TILE_ROWS);

constexpr std::int64_t A_TILE = TILE_ROWS * TILE_COLUMNS;  // numbers
constexpr std::int64_t FEW_X = 1 << 19;  // numbers of x that stay in a core's own memory while panels go by
constexpr std::int64_t FEW_Y = 1 << 21;  // of y, which is written in columns then; of more, only so many rows' are
constexpr std::int64_t FEW_ROWS = 64;
constexpr std::int64_t TILE_STRIDE = TILE_COLUMNS * sizeof(std::uint16_t);

inline std::int64_t min(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// Sums [rows, 32] of some rows and a panel that have still to be rounded and written. That is done some rows at a time
// between the products of the next ones, which leave the processor's other parts idle.
class Pending {
 public:
  // Where the next sums go, once all of these are written.
  float* begin(const TileProduct& call, std::int64_t row, std::int64_t num_rows, std::int64_t panel) {
    const std::int64_t first = panel * PANEL_OUTPUTS;
    num_outputs_ = min(PANEL_OUTPUTS, call.num_outputs - first);
    next_row_ = 0;
    num_rows_ = num_rows;
    y_ = reinterpret_cast<bfloat16*>(call.y) + row * call.y_stride + first;
    y_stride_ = call.y_stride;
    for (std::int64_t v = 0; v < 2; ++v) {
      const std::int64_t left = num_outputs_ - v * LANES;
      bias_[v] = call.bias == nullptr || left <= 0
                     ? vfloat{}
                     : load_some(reinterpret_cast<const bfloat16*>(call.bias) + first + v * LANES, left);
    }
    return sums_;
  }

  void write(std::int64_t most_rows) {
    for (const std::int64_t end = min(next_row_ + most_rows, num_rows_); next_row_ < end; ++next_row_) {
      const float* const sums = sums_ + next_row_ * PANEL_OUTPUTS;
      bfloat16* const y = y_ + next_row_ * y_stride_;
      for (std::int64_t v = 0; v * LANES < num_outputs_; ++v) {
        store_some(y + v * LANES, num_outputs_ - v * LANES, load(sums + v * LANES) + bias_[v]);
      }
    }
  }

 private:
  alignas(64) float sums_[BLOCK_ROWS * PANEL_OUTPUTS];
  vfloat bias_[2] = {};
  bfloat16* y_ = nullptr;
  std::int64_t y_stride_ = 0, num_outputs_ = 0, next_row_ = 0, num_rows_ = 0;
};

// Memory that is asked for, some cache lines a step, before it is read.
struct Ahead {
  const std::uint16_t* next;
  std::int64_t lines_a_step;

  void step() {
    constexpr std::int64_t LINE = 64 / sizeof *next;
    for (std::int64_t line = 0; line < lines_a_step; ++line, next += LINE) __builtin_prefetch(next, 0, 2);
  }
};

// Sums [NUM_TILES * 16, 32] of as many rows of x and a panel.
template <int NUM_TILES>
inline void multiply_panel(const std::uint16_t* x, std::int64_t x_stride, const std::uint16_t* panel,
                           std::int64_t num_columns, float* sums, Pending& before, Ahead& ahead) {
  const std::int64_t row_bytes = x_stride * static_cast<std::int64_t>(sizeof *x);
  const std::int64_t written = (BLOCK_ROWS * TILE_COLUMNS + num_columns - 1) / num_columns;  // rows a step
  zero_tile<0>();
  zero_tile<1>();
  if constexpr (NUM_TILES == 2) {
    zero_tile<2>();
    zero_tile<3>();
  }
  for (std::int64_t k = 0; k < num_columns; k += TILE_COLUMNS, panel += 2 * A_TILE) {
    ahead.step();
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
    before.write(written);
  }
  constexpr std::int64_t STRIDE = PANEL_OUTPUTS * sizeof(float);
  store_tile<0>(sums, STRIDE);
  store_tile<1>(sums + LANES, STRIDE);
  if constexpr (NUM_TILES == 2) {
    store_tile<2>(sums + TILE_ROWS * PANEL_OUTPUTS, STRIDE);
    store_tile<3>(sums + TILE_ROWS * PANEL_OUTPUTS + LANES, STRIDE);
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
  Pending pending[2];
  int turn = 0;
  // A tile reads 16 rows, also where x has fewer.
  const std::int64_t whole_end = row_begin + (row_end - row_begin) / TILE_ROWS * TILE_ROWS;
  const std::int64_t last_row = row_begin + (row_end - row_begin - 1) / BLOCK_ROWS * BLOCK_ROWS;
  if (whole_end < row_end) {
    for (std::int64_t row = last_row; row < row_end; ++row) {
      std::memcpy(scratch + (row - last_row) * call.num_columns, call.x + row * call.x_stride,
                  static_cast<std::size_t>(call.num_columns) * sizeof *call.x);
    }
  }
  const std::int64_t a_panel = PANEL_OUTPUTS * call.num_columns;
  // Few rows meet a panel one after the other, while the next one is asked for; of many, each block meets all panels.
  const std::int64_t all_rows = row_end - row_begin;
  const bool are_few = all_rows * call.num_columns <= FEW_X &&
                       (all_rows <= FEW_ROWS || all_rows * call.num_outputs <= FEW_Y);
  const std::int64_t step = are_few ? all_rows : BLOCK_ROWS;
  for (std::int64_t some = row_begin; some < row_end; some += step) {
    const std::int64_t some_end = min(row_end, some + step);
    const std::int64_t num_blocks = (some_end - some + BLOCK_ROWS - 1) / BLOCK_ROWS;
    for (std::int64_t panel = begin; panel < end; ++panel) {
      const std::uint16_t* const laid_out = panels + (panel - begin) * a_panel;
      // What was laid out before comes from memory at its first use.
      const bool is_first = call.laid_out != nullptr && some == row_begin && panel + 1 < end;
      Ahead ahead{laid_out + a_panel, is_first ? (2 * TILE_ROWS + num_blocks - 1) / num_blocks : 0};
      for (std::int64_t row = some; row < some_end; row += BLOCK_ROWS) {
        const std::int64_t num_rows = min(BLOCK_ROWS, row_end - row);
        const bool is_copied = row == last_row && whole_end < row_end;
        const std::uint16_t* const x = is_copied ? scratch : call.x + row * call.x_stride;
        Pending& before = pending[turn];
        turn = 1 - turn;
        float* const sums = pending[turn].begin(call, row, num_rows, panel);
        const auto multiply = num_rows > TILE_ROWS ? multiply_panel<2> : multiply_panel<1>;
        multiply(x, is_copied ? call.num_columns : call.x_stride, laid_out, call.num_columns, sums, before, ahead);
      }
    }
  }
  pending[turn].write(BLOCK_ROWS);
}

}  // namespace iclperm::ICLPERM_ISA
