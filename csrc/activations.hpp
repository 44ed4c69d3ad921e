// Activation functions: a name and its value at x. A line here is all that the C++ core needs to know of one; kernels,
// the enumeration and the binding follow from it. The formula may use the vector functions of simd.hpp.
#pragma once

#include <cstdint>

// clang-format off
#define ICLPERM_ACTIVATIONS(ACTIVATION)                                                                              \
  ACTIVATION(silu, x / (1.0f + exp(-x)))                                                                             \
  ACTIVATION(gelu_tanh, 0.5f * x * (1.0f + tanh(0.79788456080286536f * fma(0.044715f * x * x, x, x))))               \
  ACTIVATION(gelu_erf, 0.5f * x * (1.0f + erf(x * 0.70710678118654752f)))
// clang-format on

namespace iclperm {

#define ICLPERM_NAME(name, value) name,
enum class Activation : std::uint8_t { ICLPERM_ACTIVATIONS(ICLPERM_NAME) };
#undef ICLPERM_NAME

}  // namespace iclperm
