#include "isa.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace iclperm {
namespace {

constexpr Isa best_first[] = {Isa::avx512_bf16, Isa::avx512, Isa::avx2, Isa::baseline};

Isa best_isa() {
  for (const Isa isa : best_first) {
    if (isa_available(isa)) return isa;
  }
  return Isa::baseline;
}

}  // namespace

bool isa_available(Isa isa) {
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
  throw std::invalid_argument("ICLPERM_ISA=" + std::string(asked) + " is none of baseline, avx2, avx512, avx512_bf16");
}

}  // namespace iclperm
