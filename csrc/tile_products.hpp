// The products of a tile's attention: queries with keys, probabilities with values, gathered or where they lie.
//
// Each is a block of sums in registers, one chain of fma per sum, in the order of what is added up, so that every way
// of reading gives the same bits. For one instruction set, as simd.hpp.
#pragma once

#include <type_traits>

#include "simd.hpp"
#include "tree_attention.hpp"
#if defined(__AMX_BF16__)
#include "amx.hpp"
#endif

namespace iclperm::ICLPERM_ISA {
namespace {

// The register block: ROWS x VECS accumulators, VECS vectors of the right side and one splat fill the registers.
constexpr int ROWS = 6;
constexpr int VECS = LANES == 16 ? 4 : 2;
constexpr int FEW = LANES == 16 ? 8 : 4;  // lines whose scores are summed up beside LANES keys in the registers
static_assert(LANES <= MAX_LANES && TILE % LANES == 0);

// What a step of a product's chain multiplies: a float, or a pair of bfloat16 where one instruction does that.
template <typename T>
struct OperandOf {
  using Type = float;
};
#if defined(__AVX512BF16__)
template <>
struct OperandOf<bfloat16> {
  using Type = Pair;
};
#endif
template <typename E>
constexpr std::int64_t WIDTH = std::is_same_v<E, Pair> ? 2 : 1;  // entries

// Whether operands are multiplied in the processor's tiles.
template <typename E>
#if defined(__AMX_BF16__)
constexpr bool IN_TILES = std::is_same_v<E, Pair>;
#else
constexpr bool IN_TILES = false;
#endif

inline std::int64_t min(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t max(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
inline std::int64_t clamp(std::int64_t x, std::int64_t low, std::int64_t high) { return min(max(x, low), high); }
inline std::int64_t vectors(std::int64_t floats) { return (floats + LANES - 1) / LANES; }

// Operands that `entries` entries make.
template <typename E>
inline std::int64_t operands(std::int64_t entries) {
  return (entries + WIDTH<E> - 1) / WIDTH<E>;
}

// Of a query or key of `entries` entries, with those that fill the last tile up.
template <typename E>
inline std::int64_t depth_of(std::int64_t entries) {
  return IN_TILES<E> ? vectors(operands<E>(entries)) * LANES : operands<E>(entries);
}

// LANES operands from the i-th on of a row of `size` entries, as bits; what lies past its end is zero.
template <typename E, typename T>
inline vfloat operands_at(const T* row, std::int64_t i, std::int64_t size) {
  if constexpr (std::is_same_v<E, Pair>) {
    if (size - 2 * i >= 2 * LANES) return as_float(load(reinterpret_cast<const Pair*>(row + 2 * i)));
    T padded[2 * LANES] = {};
    std::memcpy(padded, row + 2 * i, sizeof(T) * static_cast<std::size_t>(min(2 * LANES, size - 2 * i)));
    return as_float(load(reinterpret_cast<const Pair*>(padded)));
  } else {
    return load_some(row + i, size - i);
  }
}

// LANES whole operands of a row from the i-th on, as bits.
template <typename E, typename T>
inline vfloat whole_operands_at(const T* row, std::int64_t i) {
  if constexpr (std::is_same_v<E, Pair>) {
    return as_float(load(reinterpret_cast<const Pair*>(row) + i));
  } else {
    return load(row + i);
  }
}

// Lanes as what is multiplied.
template <typename E>
inline auto operand_lanes(vfloat bits) {
  if constexpr (std::is_same_v<E, Pair>) {
    return as_uint(bits);
  } else {
    return bits;
  }
}

// `count` columns from the first on of the values of one operand's positions.
template <typename E, typename T>
inline auto values_at(const T* const* values, std::int64_t first, std::int64_t count) {
  if constexpr (std::is_same_v<E, Pair>) {
    return zip_some(values[0] + first, values[1] + first, count);
  } else {
    return load_some(values[0] + first, count);
  }
}

// The cache line of a row that holds an entry comes from memory while others are at work.
template <typename T>
inline void ask_for(const T* row, std::int64_t entry) {
  __builtin_prefetch(row + entry, 0, 2);
}

// The scratch's floats as what they hold.
template <typename E>
inline const E* as(const float* scratch) {
  return reinterpret_cast<const E*>(scratch);
}

// c[NUM_ROWS, NUM_VECS] (+)= a[NUM_ROWS, depth] x b[depth, NUM_VECS]: one chain of fma per element.
template <typename E, int NUM_ROWS, int NUM_VECS>
void multiply_block(const E* a, std::int64_t a_stride, const E* b, std::int64_t b_stride, std::int64_t depth, float* c,
                    std::int64_t c_stride, bool accumulate) {
  vfloat sum[NUM_ROWS][NUM_VECS];
#pragma GCC unroll 6
  for (int r = 0; r < NUM_ROWS; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < NUM_VECS; ++v) sum[r][v] = accumulate ? load(c + r * c_stride + v * LANES) : vfloat{};
  }
  for (std::int64_t i = 0; i < depth; ++i) {
    decltype(load(b)) right[NUM_VECS];
#pragma GCC unroll 4
    for (int v = 0; v < NUM_VECS; ++v) right[v] = load(b + i * b_stride + v * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < NUM_ROWS; ++r) {
      const auto left = splat(a[r * a_stride + i]);
#pragma GCC unroll 4
      for (int v = 0; v < NUM_VECS; ++v) sum[r][v] = fma(left, right[v], sum[r][v]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < NUM_ROWS; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < NUM_VECS; ++v) store(c + r * c_stride + v * LANES, sum[r][v]);
  }
}

template <typename E>
using MultiplyBlock = void (*)(const E*, std::int64_t, const E*, std::int64_t, std::int64_t, float*, std::int64_t,
                               bool);

template <typename E, int NUM_VECS>
inline MultiplyBlock<E> block_of_rows(int num_rows) {
  constexpr MultiplyBlock<E> by_rows[ROWS] = {multiply_block<E, 1, NUM_VECS>, multiply_block<E, 2, NUM_VECS>,
                                              multiply_block<E, 3, NUM_VECS>, multiply_block<E, 4, NUM_VECS>,
                                              multiply_block<E, 5, NUM_VECS>, multiply_block<E, 6, NUM_VECS>};
  return by_rows[num_rows - 1];
}

template <typename E>
inline MultiplyBlock<E> block_of(int num_rows, std::int64_t num_vecs) {
  if constexpr (VECS == 4) {
    if (num_vecs == 4) return block_of_rows<E, 4>(num_rows);
    if (num_vecs == 3) return block_of_rows<E, 3>(num_rows);
  }
  return num_vecs == 2 ? block_of_rows<E, 2>(num_rows) : block_of_rows<E, 1>(num_rows);
}

#if defined(__AMX_BF16__)
// c[16, NUM_VECS] (+)= a[16, depth] x b[depth, NUM_VECS], depth a multiple of TILE_PAIRS.
template <int NUM_VECS>
void multiply_block_in_tiles(const Pair* a, std::int64_t a_stride, const Pair* b, std::int64_t b_stride,
                             std::int64_t depth, float* c, std::int64_t c_stride, bool accumulate) {
  constexpr std::int64_t SIZE = sizeof(float);
  const auto for_each = [](const auto& take) {
    take(std::integral_constant<int, 0>{});
    if constexpr (NUM_VECS > 1) take(std::integral_constant<int, 1>{});
    if constexpr (NUM_VECS > 2) take(std::integral_constant<int, 2>{});
    if constexpr (NUM_VECS > 3) take(std::integral_constant<int, 3>{});
  };
  for_each([&](auto v) {
    if (accumulate) {
      load_tile<v>(c + v * LANES, c_stride * SIZE);
    } else {
      zero_tile<v>();
    }
  });
  for (std::int64_t i = 0; i < depth; i += TILE_PAIRS) {
    load_tile<4>(a + i, a_stride * SIZE);
    for_each([&](auto v) {
      constexpr int B = 5 + v % 3;
      load_tile<B>(b + i * b_stride + v * LANES, b_stride * SIZE);
      multiply_tiles<v, 4, B>();
    });
  }
  for_each([&](auto v) { store_tile<v>(c + v * LANES, c_stride * SIZE); });
}

// The same for any number of vectors.
inline void multiply_in_tiles(std::int64_t num_vecs, const Pair* a, std::int64_t a_stride, const Pair* b,
                              std::int64_t b_stride, std::int64_t depth, float* c, std::int64_t c_stride,
                              bool accumulate) {
  static_assert(VECS == 4 && LANES == TILE_ROWS);
  constexpr decltype(&multiply_block_in_tiles<1>) by_vectors[] = {
      multiply_block_in_tiles<1>, multiply_block_in_tiles<2>, multiply_block_in_tiles<3>, multiply_block_in_tiles<4>};
  for (std::int64_t v = 0; v < num_vecs; v += VECS) {
    const auto block = by_vectors[min(VECS, num_vecs - v) - 1];
    block(a, a_stride, b + v * LANES, b_stride, depth, c + v * LANES, c_stride, accumulate);
  }
}
#endif

// c (+)= a x b for up to ROWS rows and any number of vectors.
template <typename E>
inline void multiply(int num_rows, std::int64_t num_vecs, const E* a, std::int64_t a_stride, const E* b,
                     std::int64_t b_stride, std::int64_t depth, float* c, std::int64_t c_stride, bool accumulate) {
  for (std::int64_t v = 0; v < num_vecs; v += VECS) {
    const MultiplyBlock<E> block = block_of<E>(num_rows, min(VECS, num_vecs - v));
    block(a, a_stride, b + v * LANES, b_stride, depth, c + v * LANES, c_stride, accumulate);
  }
}

// scores[NUM_ROWS, LANES] of queries [NUM_ROWS, depth] and LANES keys of `size` entries, transposed on their way
// through the registers: multiply_block's chains. Asks for the rows that come `soon`.
template <typename E, typename T, int NUM_ROWS>
void score_block(const E* queries, const T* const* keys, const T* const* soon, std::int64_t size, float* scores) {
  const std::int64_t depth = operands<E>(size);
  const std::int64_t whole = size / WIDTH<E> / LANES * LANES;
  vfloat sum[NUM_ROWS] = {};
  for (std::int64_t i = 0; i < depth; i += LANES) {
    vfloat x[LANES];
#pragma GCC unroll 16
    for (int lane = 0; lane < LANES; ++lane) {
      x[lane] = i < whole ? whole_operands_at<E>(keys[lane], i) : operands_at<E>(keys[lane], i, size);
      ask_for(soon[lane], i * WIDTH<E>);
    }
    transpose(x);
    const auto multiply_lane = [&](std::int64_t lane) {
      const auto right = operand_lanes<E>(x[lane]);
#pragma GCC unroll 8
      for (int r = 0; r < NUM_ROWS; ++r) sum[r] = fma(splat(queries[r * depth + i + lane]), right, sum[r]);
    };
    if (i < whole) {
#pragma GCC unroll 16
      for (int lane = 0; lane < LANES; ++lane) multiply_lane(lane);
    } else {
      for (std::int64_t lane = 0; lane < min(LANES, depth - i); ++lane) multiply_lane(lane);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < NUM_ROWS; ++r) store(scores + r * TILE, sum[r]);
}

template <typename E, typename T>
using ScoreBlock = void (*)(const E*, const T* const*, const T* const*, std::int64_t, float*);

template <typename E, typename T, int... ROW>
inline ScoreBlock<E, T> score_block_of(int num_rows, std::integer_sequence<int, ROW...>) {
  constexpr ScoreBlock<E, T> by_rows[] = {score_block<E, T, ROW + 1>...};
  return by_rows[num_rows - 1];
}

// sums[NUM_ROWS, NUM_VECS] += probabilities [NUM_ROWS, TILE] x columns of values where they lie, operands [begin, end)
// of a tile: multiply_block's chains. From the first column on values have `size` entries. Asks for rows as
// score_block.
template <typename E, typename T, int NUM_ROWS, int NUM_VECS>
void add_rows(const E* probabilities, const T* const* values, const T* const* soon, std::int64_t column,
              std::int64_t size, std::int64_t begin, std::int64_t end, float* sums, std::int64_t stride) {
  constexpr std::int64_t LINE = 64 / sizeof(T);
  vfloat sum[NUM_ROWS][NUM_VECS];
#pragma GCC unroll 6
  for (int r = 0; r < NUM_ROWS; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < NUM_VECS; ++v) sum[r][v] = load(sums + r * stride + v * LANES);
  }
  for (std::int64_t i = begin; i < end; ++i) {
    decltype(load(probabilities)) right[NUM_VECS];
#pragma GCC unroll 4
    for (int v = 0; v < NUM_VECS; ++v) {
      right[v] = values_at<E>(values + i * WIDTH<E>, column + v * LANES, size - v * LANES);
    }
    for (std::int64_t place = 0; place < WIDTH<E>; ++place) {
#pragma GCC unroll 4
      for (std::int64_t entry = 0; entry < NUM_VECS * LANES; entry += LINE) {
        ask_for(soon[i * WIDTH<E> + place], column + entry);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < NUM_ROWS; ++r) {
      const auto left = splat(probabilities[r * TILE + i]);
#pragma GCC unroll 4
      for (int v = 0; v < NUM_VECS; ++v) sum[r][v] = fma(left, right[v], sum[r][v]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < NUM_ROWS; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < NUM_VECS; ++v) store(sums + r * stride + v * LANES, sum[r][v]);
  }
}

template <typename E, typename T>
using AddRows = void (*)(const E*, const T* const*, const T* const*, std::int64_t, std::int64_t, std::int64_t,
                         std::int64_t, float*, std::int64_t);

template <typename E, typename T, int NUM_VECS, int... ROW>
inline AddRows<E, T> add_rows_of(int num_rows, std::integer_sequence<int, ROW...>) {
  constexpr AddRows<E, T> by_rows[] = {add_rows<E, T, ROW + 1, NUM_VECS>...};
  return by_rows[num_rows - 1];
}

template <typename E, typename T>
inline AddRows<E, T> add_rows_of(int num_rows, std::int64_t num_vecs) {
  constexpr std::make_integer_sequence<int, ROWS> up_to{};
  if constexpr (VECS == 4) {
    if (num_vecs == 4) return add_rows_of<E, T, 4>(num_rows, up_to);
    if (num_vecs == 3) return add_rows_of<E, T, 3>(num_rows, up_to);
  }
  return num_vecs == 2 ? add_rows_of<E, T, 2>(num_rows, up_to) : add_rows_of<E, T, 1>(num_rows, up_to);
}

}  // namespace
}  // namespace iclperm::ICLPERM_ISA
