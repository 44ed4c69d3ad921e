// One vector type and its arithmetic, written once for every instruction set.
//
// Everything has internal linkage (see isa.hpp) and no operation has a scalar twin: a row's last, partial vector goes
// through the same code as the others, so a value's bits never depend on where it stands.
// Built with -ffp-contract=off; products are fused only where fma() says so.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if !defined(ICLPERM_ISA)
#error "compile this once per instruction set, with ICLPERM_ISA naming the namespace"
#endif

namespace iclperm::ICLPERM_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vfloat __attribute__((vector_size(4 * LANES)));
typedef std::int32_t vint __attribute__((vector_size(4 * LANES)));
typedef std::uint32_t vuint __attribute__((vector_size(4 * LANES)));
typedef std::uint16_t vhalf __attribute__((vector_size(2 * LANES)));

constexpr float INF = std::numeric_limits<float>::infinity();

struct bfloat16 {
  std::uint16_t bits;
};

inline vfloat as_float(vfloat x) { return x; }
inline vfloat as_float(vint x) { return reinterpret_cast<vfloat>(x); }
inline vfloat as_float(vuint x) { return reinterpret_cast<vfloat>(x); }
inline vint as_int(vfloat x) { return reinterpret_cast<vint>(x); }
inline vuint as_uint(vfloat x) { return reinterpret_cast<vuint>(x); }

// Minus, since x - 0 is x to the compiler: it broadcasts and does not add. 0 + x is another number where x is -0.
inline vfloat splat(float x) { return x - vfloat{}; }

inline vint lane_index() {
  vint index;
  for (int lane = 0; lane < LANES; ++lane) index[lane] = lane;
  return index;
}

inline vfloat select(vint condition, vfloat yes, vfloat no) { return condition ? yes : no; }

// a * b + c, rounded once where the instruction set can.
inline vfloat fma(vfloat a, vfloat b, vfloat c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// The larger; the second if either is NaN.
inline vfloat max(vfloat a, vfloat b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return select(a > b, a, b);
#endif
}

inline vfloat abs(vfloat x) { return as_float(as_int(x) & 0x7fffffff); }

inline vfloat copy_sign(vfloat magnitude, vfloat sign) {
  return as_float((as_uint(magnitude) & 0x7fffffffu) | (as_uint(sign) & 0x80000000u));
}

inline vfloat load(const float* from) {
  vfloat x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

// As bits, each in the lower half of a lane.
inline vuint load_halves(const bfloat16* from) {
  vhalf bits;
  std::memcpy(&bits, from, sizeof bits);
#if defined(__AVX512F__)
  return reinterpret_cast<vuint>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(bits)));  // GCC would take two halves
#else
  return __builtin_convertvector(bits, vuint);
#endif
}

inline vfloat load(const bfloat16* from) { return as_float(load_halves(from) << 16); }

inline void store(float* to, vfloat x) { std::memcpy(to, &x, sizeof x); }

// Rounds to nearest, ties to even; a NaN stays one. The instruction takes denormal numbers for zero.
inline void store(bfloat16* to, vfloat x) {
#if defined(__AVX512BF16__)
  const __m256bh narrow = _mm512_cvtneps_pbh(x);
#else
  const vuint bits = as_uint(x);
  const vuint rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const vuint quiet = (bits >> 16) | 0x40u;
  const vhalf narrow = __builtin_convertvector(x == x ? rounded : quiet, vhalf);
#endif
  std::memcpy(to, &narrow, sizeof narrow);
}

// Two bfloat16 that one instruction multiplies with two others, where the processor has it.
struct Pair {
  bfloat16 first, second;
};

inline vuint load(const Pair* from) {
  vuint x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline void store(Pair* to, vuint x) { std::memcpy(to, &x, sizeof x); }

// Read as bytes, since it may lie in memory of floats.
inline vuint splat(const Pair& x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return vuint{} + bits;
}

#if defined(__AVX512BF16__)
// c + a.second * b.second + a.first * b.first, rounded twice; denormal numbers count as zero.
inline vfloat fma(vuint a, vuint b, vfloat c) {
  return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
#endif

// The first `count` lanes, 0 < count; whole vectors where count >= LANES. Missing lanes read as zero.
template <typename T>
inline auto load_some(const T* from, std::int64_t count) {
  if (count >= LANES) return load(from);
  T padded[LANES] = {};
  for (std::int64_t lane = 0; lane < count; ++lane) padded[lane] = from[lane];
  return load(padded);
}

// The pairs (a[i], b[i]) of the first `count` entries, 0 < count, as load_some; b may be null for zeros.
inline vuint zip_some(const bfloat16* a, const bfloat16* b, std::int64_t count) {
  if (count >= LANES && b != nullptr) return load_halves(a) | load_halves(b) << 16;
  const vuint low = as_uint(load_some(a, count)) >> 16;
  return b == nullptr ? low : low | as_uint(load_some(b, count));
}

// Whether an infinity or NaN is among pairs, whole vectors of them.
inline bool has_infinite(const Pair* pairs, std::int64_t count) {
  vint found{};
  for (std::int64_t i = 0; i < count; i += LANES) {
    const vuint x = load(pairs + i);
    found |= ((x & 0x7f80u) == 0x7f80u) | ((x & 0x7f800000u) == 0x7f800000u);
  }
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(found), reinterpret_cast<__m512i>(found)) != 0;
#else
  std::int32_t any = 0;
  for (int lane = 0; lane < LANES; ++lane) any |= found[lane];
  return any != 0;
#endif
}

template <typename T>
inline void store_some(T* to, std::int64_t count, vfloat x) {
  if (count >= LANES) return store(to, x);
  T padded[LANES];
  store(padded, x);
  for (std::int64_t lane = 0; lane < count; ++lane) to[lane] = padded[lane];
}

// Lane i of the result is lane LANE[i] of a and b put end to end.
template <int... LANE>
inline vfloat pick(vfloat a, vfloat b, std::integer_sequence<int, LANE...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, LANE...);
#else
  return __builtin_shuffle(a, b, vint{LANE...});
#endif
}

// The pattern map(0), map(1), ..., for pick.
template <typename Map, int... LANE>
constexpr auto lanes_by(std::integer_sequence<int, LANE...>) {
  return std::integer_sequence<int, Map::of(LANE)...>{};
}

using Lanes = std::make_integer_sequence<int, LANES>;

template <int DISTANCE>
struct Swapped {
  static constexpr int of(int lane) { return lane ^ DISTANCE; }
};

template <int DISTANCE>
inline vfloat swapped(vfloat x) {
  return pick(x, x, lanes_by<Swapped<DISTANCE>>(Lanes{}));
}

// Sum of the lanes by halving: one order, whatever the compiler.
template <int DISTANCE = LANES / 2>
inline float sum_lanes(vfloat x) {
  if constexpr (DISTANCE == 0) {
    return x[0];
  } else {
    return sum_lanes<DISTANCE / 2>(x + swapped<DISTANCE>(x));
  }
}

template <int DISTANCE = LANES / 2>
inline float max_lanes(vfloat x) {
  if constexpr (DISTANCE == 0) {
    return x[0];
  } else {
    return max_lanes<DISTANCE / 2>(max(x, swapped<DISTANCE>(x)));
  }
}

template <int HALF>
struct Zipped {
  static constexpr int of(int lane) { return HALF * LANES / 2 + lane / 2 + (lane % 2) * LANES; }
};

template <int FIRST>
struct EveryOther {
  static constexpr int of(int lane) { return 2 * lane + FIRST; }
};

// log2(LANES) perfect shuffles: each rotates the bits of (vector, lane) by one.
inline void transpose(vfloat (&x)[LANES]) {
#pragma GCC unroll 4
  for (int round = 1; round < LANES; round *= 2) {
    vfloat y[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; ++i) {
      y[2 * i] = pick(x[i], x[i + LANES / 2], lanes_by<Zipped<0>>(Lanes{}));
      y[2 * i + 1] = pick(x[i], x[i + LANES / 2], lanes_by<Zipped<1>>(Lanes{}));
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) x[i] = y[i];
  }
}

// exp within 1.5 ulp (2 without fused products). Below -126 ln 2, where the result would be denormal: 0. NaN stays NaN.
// Range reduction to |r| <= ln 2 / 2 and polynomial as in Cephes' expf.
inline vfloat exp(vfloat x) {
  constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const vfloat shifted = fma(x, splat(1.44269504088896341f), splat(ROUND));
  const vfloat n = shifted - ROUND;
  vfloat r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  vfloat p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  const vfloat scaled = as_float(as_uint(p) + (as_uint(shifted) << 23));
  const vfloat floored = select(x < -87.3365447505f, vfloat{}, scaled);
  return select(x < 88.7228390520f, floored, x * INF);
}

// 2^x of x <= 0 within 2e-7, relative; 0 below about -126.5 (with AVX-512 -150). NaN stays.
// 2^f for |f| <= 1/2 by a polynomial fitted for the smallest relative error.
inline vfloat exp2_below(vfloat x) {
#if defined(__AVX512F__)
  const vfloat t = max(splat(-160.0f), x);
  const vfloat n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT);
#else
  constexpr float ROUND = 12582912.0f + 127.0f;  // as in exp; the low bits are the exponent of 2^n, where -127 is of 0
  const vfloat t = max(splat(-127.0f), x);
  const vfloat shifted = t + ROUND;
  const vfloat n = shifted - ROUND;
#endif
  const vfloat f = t - n;
  vfloat p = splat(1.326472731307149e-3f);
  p = fma(p, f, splat(9.671512991189957e-3f));
  p = fma(p, f, splat(5.550733581185341e-2f));
  p = fma(p, f, splat(2.4022242426872253e-1f));
  p = fma(p, f, splat(6.931470036506653e-1f));
  p = fma(p, f, splat(1.0f));
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, n);
#else
  return p * as_float(as_uint(shifted) << 23);
#endif
}

// tanh within 2.5 ulp: Cephes' polynomial near zero, where 1 - 2 / (exp(2x) + 1) would cancel.
inline vfloat tanh(vfloat x) {
  const vfloat z = x * x;
  vfloat p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  const vfloat near = fma(p * z, x, x);
  const vfloat magnitude = abs(x);
  const vfloat far = 1.0f - 2.0f / (exp(magnitude + magnitude) + 1.0f);
  return select(magnitude < 0.625f, near, copy_sign(far, x));
}

// erf within 2 ulp: odd polynomial near zero, 1 - exp(polynomial) beyond (N. Juffa's fit).
inline vfloat erf(vfloat x) {
  const vfloat t = abs(x);
  const vfloat s = x * x;
  vfloat q = fma(splat(-1.72853470e-5f), t, splat(3.83197126e-4f));
  q = fma(q, s, fma(splat(-3.88396438e-3f), t, splat(2.42546219e-2f)));
  q = fma(q, t, splat(-1.06777877e-1f));
  q = fma(q, t, splat(-6.34846687e-1f));
  q = fma(q, t, splat(-1.28717512e-1f));
  q = fma(q, t, -t);
  // Beyond 4 erf is 1 in float32, and the fit no longer falls.
  const vfloat far = select(t > 4.0f, splat(1.0f), 1.0f - exp(q));
  vfloat p = splat(-5.96761703e-4f);
  p = fma(p, s, splat(4.99119423e-3f));
  p = fma(p, s, splat(-2.67681349e-2f));
  p = fma(p, s, splat(1.12819925e-1f));
  p = fma(p, s, splat(-3.76125336e-1f));
  p = fma(p, s, splat(1.28379166e-1f));
  const vfloat near = fma(p, x, x);
  return select(t > 0.927734375f, copy_sign(far, x), near);
}

// softcap * tanh(x / softcap); the identity where softcap is 0.
inline vfloat capped(vfloat x, float softcap) { return softcap > 0.0f ? softcap * tanh(x / softcap) : x; }

}  // namespace
}  // namespace iclperm::ICLPERM_ISA
