// Tells whether what lies in memory is what it was: at the speed at which it can be read.
#pragma once

#include <cstddef>
#include <cstdint>

namespace iclperm {

struct Bytes {
  const std::byte* data;
  std::int64_t num_rows;
  std::int64_t row_size;
  std::int64_t row_stride;
};

// 64 bits of all rows and their shape, the same with any number of threads. Other bytes in one word of eight alone, as a
// row is cut into them, always give others; other ones anywhere do but for one case in 2^64, if nobody aims at it. Cost:
// each byte is read once.
std::uint64_t checksum(const Bytes& bytes, int num_threads);

}  // namespace iclperm
