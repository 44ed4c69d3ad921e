// Memory that the kernels' drivers write their own numbers to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

namespace iclperm {

// Numbers that hold nothing yet, from the border of a cache line on.
template <typename Number>
class RawMemory {
 public:
  explicit RawMemory(std::int64_t size)
      : data_(static_cast<Number*>(
            ::operator new(static_cast<std::size_t>(size) * sizeof(Number), std::align_val_t{CACHE_LINE}))) {}
  RawMemory(const RawMemory&) = delete;
  RawMemory& operator=(const RawMemory&) = delete;
  ~RawMemory() { ::operator delete(data_, std::align_val_t{CACHE_LINE}); }

  Number* data() const { return data_; }

 private:
  static constexpr std::size_t CACHE_LINE = 64;
  Number* data_;
};

}  // namespace iclperm
