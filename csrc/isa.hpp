// Which instruction set the kernels run on, chosen at run time.
//
// A kernel source is compiled once per instruction set, each time inside a namespace of that name (ICLPERM_ISA).
// Such a source may use no inline function or template with external linkage: the linker keeps one copy of those,
// and it could be the one that holds AVX-512 code.
#pragma once

namespace iclperm {

// amx_bf16 is avx512_bf16 with tiles, in which bfloat16 is multiplied.
enum class Isa { baseline, avx2, avx512, avx512_bf16, amx_bf16 };

// The best one this processor has, or the one that the environment variable ICLPERM_ISA names.
// Throws std::invalid_argument when that one is unknown or cannot run here.
Isa selected_isa();

// The build's and the processor's verdict, whatever the environment says.
bool isa_available(Isa isa);

const char* isa_name(Isa isa);

}  // namespace iclperm

// The function of that name in the namespace of an instruction set; of those that use no tiles, amx_bf16's are
// avx512_bf16's.
#if defined(ICLPERM_X86_PATHS)
#define ICLPERM_SELECT(isa, function)                                      \
  ((isa) >= ::iclperm::Isa::avx512_bf16 ? ::iclperm::avx512_bf16::function \
   : (isa) == ::iclperm::Isa::avx512    ? ::iclperm::avx512::function      \
   : (isa) == ::iclperm::Isa::avx2      ? ::iclperm::avx2::function        \
                                        : ::iclperm::baseline::function)
#else
#define ICLPERM_SELECT(isa, function) (static_cast<void>(isa), ::iclperm::baseline::function)
#endif
