#include <cstring>

#include "simd.hpp"
#include "thin_product.hpp"

namespace iclperm::ICLPERM_ISA {
namespace {

// Vectors of rows in a pass, and sums that are open at once: what the registers hold beside those vectors and an entry of
// the matrix.
constexpr int VECS = 4;
constexpr int SUMS = LANES == 16 ? 24 : 12;
constexpr int MOST_OUTPUTS = LANES == 16 ? 8 : 6;  // rows of 1,024 columns share their place in the nearest cache
constexpr std::int64_t CACHED = 6144;  // numbers of the rows' columns that stay in the nearest cache
constexpr int LINE = 16;               // columns of a row of the matrix that come from memory at a time

inline std::int64_t min(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t max(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

template <int NUM_VECS>
constexpr int OUTPUTS = SUMS / NUM_VECS < MOST_OUTPUTS ? SUMS / NUM_VECS : MOST_OUTPUTS;

// Some columns of a block: chains go on, or begin, and are added where their block ends.
struct Piece {
  std::int64_t begin, end;
  bool begins_block, ends_block;
};

inline Piece piece_at(std::int64_t begin, std::int64_t most, const ThinProduct& call) {
  const std::int64_t block_begin = begin / call.block * call.block;
  const std::int64_t block_end = min(block_begin + call.block, call.num_columns);
  const std::int64_t end = min(begin + most, block_end);
  return {begin, end, begin == block_begin, end == block_end};
}

// NUM outputs of NUM_VECS vectors of rows over a piece. A Column is a float, or a Pair. chains and sums
// [NUM, NUM_VECS LANES] are where the chains and the sums of whole blocks stand; what comes next from memory is asked for
// on the way.
template <typename Column, int NUM, int NUM_VECS>
void multiply(const Column* weight, std::int64_t stride, const Column* columns, std::int64_t depth,
              const Column* next, bool begins, bool ends, bool is_first, float* chains,
              float* sums) {
  constexpr int WIDTH = NUM_VECS * LANES;
  vfloat chain[NUM][NUM_VECS];
#pragma GCC unroll 12
  for (int n = 0; n < NUM; ++n) {
#pragma GCC unroll 4
    for (int v = 0; v < NUM_VECS; ++v)
      chain[n][v] = begins ? vfloat{} : load(chains + n * WIDTH + v * LANES);
  }
  for (std::int64_t first = 0; first < depth; first += LINE) {
    // By the last of these columns: where rows begin within a line of memory, the line of the first was asked for before.
#pragma GCC unroll 12
    for (int n = 0; n < NUM; ++n) __builtin_prefetch(next + n * stride + first + (LINE - 1), 0, 2);
    const std::int64_t last = min(first + LINE, depth);
    for (std::int64_t k = first; k < last; ++k) {
      decltype(load(columns)) right[NUM_VECS];
#pragma GCC unroll 4
      for (int v = 0; v < NUM_VECS; ++v) right[v] = load(columns + k * WIDTH + v * LANES);
#pragma GCC unroll 12
      for (int n = 0; n < NUM; ++n) {
        const auto left = splat(weight[n * stride + k]);
#pragma GCC unroll 4
        for (int v = 0; v < NUM_VECS; ++v) chain[n][v] = fma(left, right[v], chain[n][v]);
      }
    }
  }
#pragma GCC unroll 12
  for (int n = 0; n < NUM; ++n) {
#pragma GCC unroll 4
    for (int v = 0; v < NUM_VECS; ++v) {
      const int at = n * WIDTH + v * LANES;
      if (!ends) {
        store(chains + at, chain[n][v]);
      } else {
        store(sums + at, is_first ? chain[n][v] : load(sums + at) + chain[n][v]);
      }
    }
  }
}

template <typename Column>
using Multiply = void (*)(const Column*, std::int64_t, const Column*, std::int64_t, const Column*, bool, bool, bool,
                          float*, float*);

template <typename Column, int NUM_VECS, int... NUM>
inline Multiply<Column> multiply_of(int num_outputs, std::integer_sequence<int, NUM...>) {
  constexpr Multiply<Column> by_outputs[] = {multiply<Column, NUM + 1, NUM_VECS>...};
  return by_outputs[num_outputs - 1];
}

template <typename Column, int NUM_VECS>
inline Multiply<Column> multiply_of(int num_outputs) {
  return multiply_of<Column, NUM_VECS>(num_outputs, std::make_integer_sequence<int, OUTPUTS<NUM_VECS>>{});
}

// Some vectors of rows, multiplied together: where they begin, how many rows they have room for, and how many outputs
// they are multiplied with at most.
struct Pass {
  std::int64_t first_row, width;
  int num_vecs, most_outputs;
};

template <int NUM_VECS>
inline Pass pass_of(std::int64_t first_row) {
  return {first_row, NUM_VECS * LANES, NUM_VECS, OUTPUTS<NUM_VECS>};
}

template <typename Column>
inline Multiply<Column> multiply_of(const Pass& pass, int num_outputs) {
  switch (pass.num_vecs) {
    case 1: return multiply_of<Column, 1>(num_outputs);
    case 2: return multiply_of<Column, 2>(num_outputs);
    case 3: return multiply_of<Column, 3>(num_outputs);
    default: return multiply_of<Column, 4>(num_outputs);
  }
}

inline std::int64_t vectors(std::int64_t rows) { return (rows + LANES - 1) / LANES; }

// The pass that begins at a row: as many vectors of all that are left as the passes that are left have on average.
inline Pass pass_at(std::int64_t row, const ThinProduct& call) {
  const std::int64_t left = vectors(call.num_rows - row), passes = (left + VECS - 1) / VECS;
  switch ((left + passes - 1) / passes) {
    case 1: return pass_of<1>(row);
    case 2: return pass_of<2>(row);
    case 3: return pass_of<3>(row);
    default: return pass_of<4>(row);
  }
}

// fma chains of a piece for outputs [begin, end) of a pass's rows; chains and sums of output `begin` come first.
template <typename Column>
void multiply_piece(const ThinProduct& call, const Pass& pass, const Piece& piece, const Column* columns,
                    std::int64_t begin, std::int64_t end, bool is_first, float* chains, float* sums) {
  const auto* const weight = static_cast<const Column*>(call.weight);
  const std::int64_t stride = call.weight_stride;
  for (std::int64_t n = begin; n < end;) {
    const int num = static_cast<int>(min(pass.most_outputs, end - n));
    const std::int64_t following = n + num;
    // The last outputs are followed by the first ones of the next piece, or by the next item's.
    const bool is_last = following == end, goes_on = piece.end < call.num_columns;
    const std::int64_t row = is_last && goes_on ? begin : min(following, call.num_outputs - num);
    const std::int64_t column = !is_last ? piece.begin : goes_on ? piece.end : 0;
    multiply_of<Column>(pass, num)(weight + n * stride + piece.begin, stride, columns + piece.begin * pass.width,
                                   piece.end - piece.begin, weight + row * stride + column, piece.begins_block,
                                   piece.ends_block, is_first, chains + (n - begin) * pass.width,
                                   sums + (n - begin) * pass.width);
    n = following;
  }
}

inline float widened(float x) { return x; }

inline float widened(bfloat16 x) {
  const std::uint32_t bits = std::uint32_t{x.bits} << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// What multiply_piece left, where it belongs.
template <typename T>
void write(const ThinProduct& call, const Pass& pass, std::int64_t begin, std::int64_t end, const float* sums) {
  const auto* const bias = static_cast<const T*>(call.bias);
  const bool adds_bias = bias != nullptr && !call.bias_first;
  for (std::int64_t n = begin; n < end; n += LANES) {
    const std::int64_t count = min(LANES, end - n);
    for (std::int64_t place = 0; place < pass.width; place += LANES) {
      vfloat tile[LANES] = {};
      for (std::int64_t i = 0; i < count; ++i) {
        tile[i] = load(sums + (n - begin + i) * pass.width + place);
        if (adds_bias) tile[i] = tile[i] + widened(bias[n + i]);
      }
      transpose(tile);
      const std::int64_t row = pass.first_row + place;
      for (std::int64_t i = 0; i < LANES && row + i < call.num_rows; ++i)
        store_some(static_cast<T*>(call.y) + (row + i) * call.y_stride + n, count, tile[i]);
    }
  }
}

// Columns are moved as they are: four bytes, whatever they stand for.
template <typename Column>
void lay_out(const ThinProduct& call, std::int64_t begin, std::int64_t end, float* columns) {
  const auto* const x = static_cast<const Column*>(call.x);
  for (std::int64_t first = 0; first < call.num_rows;) {
    const std::int64_t width = pass_at(first, call).width;
    for (std::int64_t place = 0; place < width; place += LANES) {
      for (std::int64_t k = begin; k < end; k += LANES) {
        vfloat tile[LANES] = {};
        const std::int64_t row = first + place;
        for (std::int64_t i = 0; i < LANES && row + i < call.num_rows; ++i)
          tile[i] = as_float(load_some(x + (row + i) * call.x_stride + k, end - k));
        transpose(tile);
        for (std::int64_t i = 0; i < LANES && k + i < end; ++i)
          store(columns + (k + i) * width + place, tile[i]);
      }
    }
    columns += width * call.num_columns;
    first += width;
  }
}

// T as the numbers lie in memory, and what one column of them is.
template <typename T, typename Column>
void outputs_as(const ThinProduct& call, const void* all_columns, std::int64_t begin, std::int64_t end,
                float* scratch) {
  const auto* const columns = static_cast<const Column*>(all_columns);
  const auto* const bias = static_cast<const T*>(call.bias);
  const bool starts_at_bias = bias != nullptr && call.bias_first;
  const std::int64_t rows = vectors(call.num_rows) * LANES, outputs = end - begin;
  float *const chains = scratch, *const sums = scratch + outputs * rows;
  const std::int64_t most = max(LINE, CACHED / pass_at(0, call).width / LINE * LINE);
  for (Piece piece{}; piece.end < call.num_columns;) {
    piece = piece_at(piece.end, most, call);
    for (std::int64_t row = 0; row < call.num_rows;) {
      const Pass pass = pass_at(row, call);
      float* const of_pass = sums + row * outputs;
      if (starts_at_bias && piece.begin == 0) {
        for (std::int64_t i = 0; i < outputs * pass.width; i += LANES)
          store(of_pass + i, splat(widened(bias[begin + i / pass.width])));
      }
      multiply_piece(call, pass, piece, columns + row * call.num_columns, begin, end,
                     piece.begin < call.block && !starts_at_bias, chains + row * outputs, of_pass);
      row += pass.width;
    }
  }
  for (std::int64_t row = 0; row < call.num_rows;) {
    const Pass pass = pass_at(row, call);
    write<T>(call, pass, begin, end, sums + row * outputs);
    row += pass.width;
  }
}

}  // namespace

std::int64_t thin_columns_size(const ThinProduct& call) { return vectors(call.num_rows) * LANES * call.num_columns; }

std::int64_t thin_scratch_size(const ThinProduct& call) {
  return 2 * THIN_OUTPUTS * vectors(call.num_rows) * LANES;
}

void thin_columns(const ThinProduct& call, std::int64_t begin, std::int64_t end, float* columns) {
  call.element == Element::float32 ? lay_out<float>(call, begin, end, columns)
                                   : lay_out<Pair>(call, begin, end, columns);
}

void thin_outputs(const ThinProduct& call, const float* columns, std::int64_t begin, std::int64_t end,
                  float* scratch) {
#if defined(__AVX512BF16__)
  if (call.element == Element::bfloat16) return outputs_as<bfloat16, Pair>(call, columns, begin, end, scratch);
#endif
  outputs_as<float, float>(call, columns, begin, end, scratch);
}

}  // namespace iclperm::ICLPERM_ISA
