#include "isa.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(ICLPERM_TILE_PATH)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace iclperm {
namespace {

constexpr Isa best_first[] = {Isa::amx_bf16, Isa::avx512_bf16, Isa::avx512, Isa::avx2, Isa::baseline};

Isa best_isa() {
  for (const Isa isa : best_first) {
    if (isa_available(isa)) return isa;
  }
  return Isa::baseline;
}

#if defined(ICLPERM_TILE_PATH)
// Whether the processor has tiles and multiplies bfloat16 in them, and the system keeps them for this process: it does
// so for whoever has asked.
bool has_tiles() {
  constexpr unsigned TILE = 1u << 24, BF16 = 1u << 22;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & TILE) == 0 || (d & BF16) == 0) return false;
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

}  // namespace

bool isa_available(Isa isa) {
#if defined(ICLPERM_TILE_PATH)
  if (isa == Isa::amx_bf16) {
    static const bool tiles = isa_available(Isa::avx512_bf16) && has_tiles();
    return tiles;
  }
#endif
#if defined(ICLPERM_X86_PATHS)
  if (isa == Isa::avx512_bf16) return isa_available(Isa::avx512) && __builtin_cpu_supports("avx512bf16");
  if (isa == Isa::avx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  }
  if (isa == Isa::avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return isa == Isa::baseline;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::amx_bf16: return "amx_bf16";
    case Isa::avx512_bf16: return "avx512_bf16";
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    case Isa::baseline: break;
  }
  return "baseline";
}

Isa selected_isa() {
  const char* asked = std::getenv("ICLPERM_ISA");
  if (asked == nullptr || *asked == '\0') return best_isa();
  for (const Isa isa : best_first) {
    if (std::string(asked) != isa_name(isa)) continue;
    if (isa_available(isa)) return isa;
    throw std::invalid_argument("ICLPERM_ISA=" + std::string(asked) +
                                " cannot run on this processor or build; the best here is " + isa_name(best_isa()));
  }
  throw std::invalid_argument("ICLPERM_ISA=" + std::string(asked) + " is none of baseline, avx2, avx512, avx512_bf16, amx_bf16");
}

}  // namespace iclperm
