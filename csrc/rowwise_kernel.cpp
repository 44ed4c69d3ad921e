#include "rowwise.hpp"

#include <math.h>

#include "simd.hpp"

namespace iclperm::ICLPERM_ISA {
namespace {

constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

inline std::int64_t min(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

#define ICLPERM_FUNCTION(name, value)       \
  struct name##_function {                  \
    static vfloat of(vfloat x) { return value; } \
  };
ICLPERM_ACTIVATIONS(ICLPERM_FUNCTION)
#undef ICLPERM_FUNCTION

template <typename Function, typename T>
void apply(const Elementwise& call, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
    T* y = static_cast<T*>(call.y) + row * call.y_stride;
    const T* factor = call.factor ? static_cast<const T*>(call.factor) + row * call.factor_stride : nullptr;
    for (std::int64_t i = 0; i < call.num_columns; i += LANES) {
      const std::int64_t count = call.num_columns - i;
      const vfloat value = Function::of(load_some(x + i, count));
      store_some(y + i, count, factor ? value * load_some(factor + i, count) : value);
    }
  }
}

template <typename T>
void apply_as(const Elementwise& call, std::int64_t begin, std::int64_t end) {
  switch (call.activation) {
#define ICLPERM_CASE(name, value) \
  case Activation::name:          \
    return apply<name##_function, T>(call, begin, end);
    ICLPERM_ACTIVATIONS(ICLPERM_CASE)
#undef ICLPERM_CASE
  }
}

// Several parts of a sum over columns, since each addition to one waits for the one before: lane l of part p adds up
// the columns that are p LANES + l modulo PARTS LANES.
constexpr int PARTS = 4;

inline float sum_parts(const vfloat (&parts)[PARTS]) {
  return sum_lanes((parts[0] + parts[1]) + (parts[2] + parts[3]));
}

// z of a row, sum + x where there is a sum, and the sum of its squares.
template <typename T>
inline float add_and_square(const T* x, T* sum, std::int64_t num_columns) {
  vfloat squares[PARTS] = {};
  for (std::int64_t begin = 0; begin < num_columns; begin += PARTS * LANES) {
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; ++part) {
      const std::int64_t i = begin + part * LANES;
      const std::int64_t count = num_columns - i;
      if (count <= 0) break;
      if (sum) store_some(sum + i, count, load_some(sum + i, count) + load_some(x + i, count));
      const vfloat z = load_some(sum ? sum + i : x + i, count);
      squares[part] = fma(z, z, squares[part]);
    }
  }
  return sum_parts(squares);
}

// z as of add_and_square, and the sum of its columns.
template <typename T>
inline float add_and_total(const T* x, T* sum, std::int64_t num_columns) {
  vfloat totals[PARTS] = {};
  for (std::int64_t begin = 0; begin < num_columns; begin += PARTS * LANES) {
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; ++part) {
      const std::int64_t i = begin + part * LANES;
      const std::int64_t count = num_columns - i;
      if (count <= 0) break;
      if (sum) store_some(sum + i, count, load_some(sum + i, count) + load_some(x + i, count));
      totals[part] += load_some(sum ? sum + i : x + i, count);
    }
  }
  return sum_parts(totals);
}

// The sum of squares of what a row is off from its mean; missing lanes of the last vector are off by nothing.
template <typename T>
inline float squares_about(const T* z, float mean, std::int64_t num_columns) {
  vfloat squares[PARTS] = {};
  for (std::int64_t begin = 0; begin < num_columns; begin += PARTS * LANES) {
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; ++part) {
      const std::int64_t i = begin + part * LANES;
      const std::int64_t count = num_columns - i;
      if (count <= 0) break;
      const vint is_column = lane_index() < static_cast<std::int32_t>(count < LANES ? count : LANES);
      const vfloat off = select(is_column, load_some(z + i, count) - mean, vfloat{});
      squares[part] = fma(off, off, squares[part]);
    }
  }
  return sum_parts(squares);
}

template <typename T>
void norm_as(const RmsNorm& call, std::int64_t begin, std::int64_t end) {
  const T* weight = static_cast<const T*>(call.weight);
  for (std::int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
    T* sum = call.sum ? static_cast<T*>(call.sum) + row * call.sum_stride : nullptr;
    T* out = static_cast<T*>(call.out) + row * call.out_stride;
    const float mean = add_and_square(x, sum, call.num_columns) / static_cast<float>(call.num_columns);
    const vfloat scale = splat(1.0f / sqrtf(mean + call.eps));
    const T* z = sum ? sum : x;
    for (std::int64_t i = 0; i < call.num_columns; i += LANES) {
      const std::int64_t count = call.num_columns - i;
      store_some(out + i, count, load_some(z + i, count) * scale * (call.offset + load_some(weight + i, count)));
    }
  }
}

template <typename T>
void centre_as(const LayerNorm& call, std::int64_t begin, std::int64_t end) {
  const T* weight = static_cast<const T*>(call.weight);
  const T* bias = static_cast<const T*>(call.bias);
  const float width = static_cast<float>(call.num_columns);
  for (std::int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
    T* sum = call.sum ? static_cast<T*>(call.sum) + row * call.sum_stride : nullptr;
    T* out = static_cast<T*>(call.out) + row * call.out_stride;
    const float mean = add_and_total(x, sum, call.num_columns) / width;
    const T* z = sum ? sum : x;
    const vfloat scale = splat(1.0f / sqrtf(squares_about(z, mean, call.num_columns) / width + call.eps));
    for (std::int64_t i = 0; i < call.num_columns; i += LANES) {
      const std::int64_t count = call.num_columns - i;
      const vfloat normed = (load_some(z + i, count) - mean) * scale;
      const vfloat factor = load_some(weight + i, count);
      store_some(out + i, count, bias ? fma(normed, factor, load_some(bias + i, count)) : normed * factor);
    }
  }
}

// The first `count` pairs of neighbours, 0 < count, as load_some; firsts and seconds apart.
template <typename T>
inline void load_neighbours(const T* from, std::int64_t count, vfloat& firsts, vfloat& seconds) {
  const vfloat low = load_some(from, 2 * count);
  const vfloat high = 2 * count > LANES ? load_some(from + LANES, 2 * count - LANES) : vfloat{};
  firsts = pick(low, high, lanes_by<EveryOther<0>>(Lanes{}));
  seconds = pick(low, high, lanes_by<EveryOther<1>>(Lanes{}));
}

template <typename T>
inline void store_neighbours(T* to, std::int64_t count, vfloat firsts, vfloat seconds) {
  store_some(to, 2 * count, pick(firsts, seconds, lanes_by<Zipped<0>>(Lanes{})));
  if (2 * count > LANES) store_some(to + LANES, 2 * count - LANES, pick(firsts, seconds, lanes_by<Zipped<1>>(Lanes{})));
}

template <bool NEIGHBOURS, typename T>
void rotate_as(const Rotation& call, std::int64_t begin, std::int64_t end) {
  const std::int64_t half = call.num_columns / 2;
  for (std::int64_t row = begin; row < end; ++row) {
    const float* cosines = call.cosines + row * call.cosine_stride;
    const float* sines = call.sines + row * call.sine_stride;
    for (std::int64_t head = 0; head < call.num_heads; ++head) {
      T* x = static_cast<T*>(call.x) + row * call.row_stride + head * call.head_stride;
      for (std::int64_t i = 0; i < half; i += LANES) {
        const std::int64_t count = half - i;
        vfloat low, high;
        if constexpr (NEIGHBOURS) {
          load_neighbours(x + 2 * i, count, low, high);
        } else {
          low = load_some(x + i, count), high = load_some(x + half + i, count);
        }
        const vfloat low_turn = high * load_some(sines + i, count);
        const vfloat high_turn = low * load_some(sines + half + i, count);
        const vfloat new_low = fma(low, load_some(cosines + i, count), -low_turn);
        const vfloat new_high = fma(high, load_some(cosines + half + i, count), high_turn);
        if constexpr (NEIGHBOURS) {
          store_neighbours(x + 2 * i, count, new_low, new_high);
        } else {
          store_some(x + i, count, new_low), store_some(x + half + i, count, new_high);
        }
      }
    }
  }
}

template <typename T>
void rotate_some(const Rotation& call, std::int64_t begin, std::int64_t end) {
  call.turns_neighbours ? rotate_as<true, T>(call, begin, end) : rotate_as<false, T>(call, begin, end);
}

constexpr std::int64_t CHUNK = 2048;  // columns that are capped, compared and summed while they lie in the first cache
static_assert(CHUNK % LANES == 0);

template <typename T>
inline const T* logits_of(const HeadRowsCall& call, std::int64_t row) {
  return static_cast<const T*>(call.logits) + row * call.row_stride;
}

// The running state of one row. A chunk is summed in float32, lane l its columns that are l modulo LANES; chunks are
// summed in double, since most of a large vocabulary weighs less than the last bit of a sum that holds its likely ids.
struct RowSum {
  float maximum = -INF;
  std::int64_t argmax = -1;
  double sum = 0.0;
  vint finite = vint{} - 1;
};

inline std::int64_t first_equal(const float* x, std::int64_t count, float value) {
  std::int64_t i = 0;
  while (i < count && x[i] != value) ++i;
  return i;
}

// Takes in columns [begin, begin + count), count <= CHUNK. Missing lanes of the last vector weigh exp(-inf) = 0.
template <typename T>
inline void add_chunk(const T* logits, std::int64_t begin, std::int64_t count, float softcap, RowSum& row) {
  alignas(VECTOR_ALIGNMENT) float capped_logits[CHUNK];
  vfloat highest = splat(-INF);
  for (std::int64_t i = 0; i < count; i += LANES) {
    const vfloat logit = load_some(logits + begin + i, count - i);
    row.finite &= abs(logit) < INF;
    const vint column = lane_index() + static_cast<std::int32_t>(i);
    const vfloat x = select(column < static_cast<std::int32_t>(count), capped(logit, softcap), splat(-INF));
    store(capped_logits + i, x);
    highest = max(x, highest);
  }
  const float top = max_lanes(highest);
  if (top > row.maximum) {
    row.sum *= static_cast<double>(exp(splat(row.maximum - top))[0]);
    row.maximum = top;
    row.argmax = begin + first_equal(capped_logits, count, top);
  }
  vfloat sum = {};
  for (std::int64_t i = 0; i < count; i += LANES) sum += exp(load(capped_logits + i) - row.maximum);
  row.sum += static_cast<double>(sum_lanes(sum));
}

inline bool all_lanes(vint condition) {
  bool all = true;
  for (int lane = 0; lane < LANES; ++lane) all = all && condition[lane] != 0;
  return all;
}

template <typename T>
void reduce_as(const HeadRowsCall& call, std::int64_t begin, std::int64_t end) {
  for (std::int64_t r = begin; r < end; ++r) {
    RowSum row;
    for (std::int64_t c = 0; c < call.num_columns; c += CHUNK) {
      add_chunk(logits_of<T>(call, r), c, min(CHUNK, call.num_columns - c), call.softcap, row);
    }
    const bool finite = all_lanes(row.finite);
    const double logsumexp = static_cast<double>(row.maximum) + log(row.sum);
    call.finite[r] = finite;
    call.logsumexp[r] = finite ? static_cast<float>(logsumexp) : NOT_A_NUMBER;
    call.argmax[r] = finite ? static_cast<std::int32_t>(row.argmax) : -1;
  }
}

template <typename T>
void gather_as(const HeadRowsCall& call, std::int64_t begin, std::int64_t end) {
  for (std::int64_t n = begin; n < end; ++n) {
    const std::int64_t row = call.pair_row[n];
    const vfloat logit = load_some(logits_of<T>(call, row) + call.pair_id[n], 1);
    call.gathered[n] = capped(logit, call.softcap)[0] - call.logsumexp[row];
  }
}

}  // namespace

void elementwise_rows(const Elementwise& call, std::int64_t begin, std::int64_t end) {
  call.element == Element::float32 ? apply_as<float>(call, begin, end) : apply_as<bfloat16>(call, begin, end);
}

void norm_rows(const RmsNorm& call, std::int64_t begin, std::int64_t end) {
  call.element == Element::float32 ? norm_as<float>(call, begin, end) : norm_as<bfloat16>(call, begin, end);
}

void centred_rows(const LayerNorm& call, std::int64_t begin, std::int64_t end) {
  call.element == Element::float32 ? centre_as<float>(call, begin, end) : centre_as<bfloat16>(call, begin, end);
}

void rotate_rows(const Rotation& call, std::int64_t begin, std::int64_t end) {
  call.element == Element::float32 ? rotate_some<float>(call, begin, end) : rotate_some<bfloat16>(call, begin, end);
}

void reduce_logits(const HeadRowsCall& call, std::int64_t begin, std::int64_t end) {
  call.element == Element::float32 ? reduce_as<float>(call, begin, end) : reduce_as<bfloat16>(call, begin, end);
}

void gather_logits(const HeadRowsCall& call, std::int64_t begin, std::int64_t end) {
  call.element == Element::float32 ? gather_as<float>(call, begin, end) : gather_as<bfloat16>(call, begin, end);
}

}  // namespace iclperm::ICLPERM_ISA
