"""The core's instruction sets, worst first, and what Linux calls what each needs of the processor."""

ISA_FLAGS = {"baseline": frozenset[str](), "avx2": frozenset({"avx2", "fma"})}
ISA_FLAGS["avx512"] = ISA_FLAGS["avx2"] | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
ISA_FLAGS["avx512_bf16"] = ISA_FLAGS["avx512"] | {"avx512_bf16"}
ISA_FLAGS["amx_bf16"] = ISA_FLAGS["avx512_bf16"] | {"amx_tile", "amx_bf16"}
