// The types of the numbers that kernels read and write; all of them add up in float32.
#pragma once

#include <cstdint>

namespace iclperm {

enum class Element : std::uint8_t { float32, bfloat16 };

}  // namespace iclperm
