// The processor's tiles: eight registers of 16 rows of 64 bytes, and the product of two of them.
//
// multiply_tiles adds to each float32 of a tile C [16, 16] the products of 32 bfloat16 of a row of A and a column of B:
// the even ones and the odd ones in a chain of fma each, from zero; then the chains' sum. Denormal numbers count as
// zero. A lies as rows of 32 entries, B as 16 rows of pairs. What a row of C is does not depend on its neighbours.
//
// In assembly, since the compilers' intrinsics do not say that they read and write memory. Include it in sources that
// are compiled for amx_bf16 alone.
#pragma once

#include <cstdint>

namespace iclperm::ICLPERM_ISA {
namespace {

constexpr int TILE_ROWS = 16;   // of a tile; as many float32, or pairs of bfloat16, are a row
constexpr int TILE_PAIRS = 16;  // of A's row, which one product adds up

// This thread's tiles are all of the whole size for as long as one of these lives.
class TilesInUse {
 public:
  TilesInUse() {
    struct alignas(64) {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } const configuration;
    static_assert(sizeof configuration == 64);
    asm volatile("ldtilecfg %0" : : "m"(configuration));
  }
  TilesInUse(const TilesInUse&) = delete;
  TilesInUse& operator=(const TilesInUse&) = delete;
  ~TilesInUse() { asm volatile("tilerelease"); }
};

template <int TO>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(TO));
}

// Rows are `stride` bytes apart.
template <int TO>
inline void load_tile(const void* from, std::int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TO) : "memory");
}

template <int FROM>
inline void store_tile(void* to, std::int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(FROM) : "memory");
}

// C += A x B.
template <int C, int A, int B>
inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

}  // namespace
}  // namespace iclperm::ICLPERM_ISA
