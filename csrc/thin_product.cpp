#include "thin_product.hpp"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>

#include "parallel.hpp"

namespace iclperm {

namespace {

// Floats that hold nothing yet, from the border of a cache line on.
class Floats {
 public:
  explicit Floats(std::int64_t size)
      : data_(static_cast<float*>(
            ::operator new(static_cast<std::size_t>(size) * sizeof(float), std::align_val_t{CACHE_LINE}))) {}
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;
  ~Floats() { ::operator delete(data_, std::align_val_t{CACHE_LINE}); }

  float* data() const { return data_; }

 private:
  static constexpr std::size_t CACHE_LINE = 64;
  float* data_;
};

}  // namespace

bool has_fused_products(Isa isa) {
#if defined(__aarch64__)
  static_cast<void>(isa);
  return true;
#else
  return isa != Isa::baseline;
#endif
}

void thin_product(const ThinProduct& call, Isa isa, int num_threads) {
  check_threads(num_threads);
  if (call.block < 1) throw std::invalid_argument("block is " + std::to_string(call.block) + "; give 1 at least");
  if (call.num_rows == 0 || call.num_outputs == 0) return;
  constexpr std::int64_t MOST = std::int64_t{1} << 40;  // floats: more than any memory holds, few enough to be counted
  if (call.num_rows > MOST / std::max(call.num_columns, THIN_OUTPUTS)) {
    throw std::invalid_argument("x has " + std::to_string(call.num_rows) + " rows, more than any memory holds");
  }
  const Floats columns(ICLPERM_SELECT(isa, thin_columns_size)(call));
  ICLPERM_SELECT(isa, thin_columns)(call, columns.data());
  const std::int64_t scratch_size = ICLPERM_SELECT(isa, thin_scratch_size)(call);
  const Floats scratch(scratch_size * num_threads);
  const auto outputs = ICLPERM_SELECT(isa, thin_outputs);
  parallel_for((call.num_outputs + THIN_OUTPUTS - 1) / THIN_OUTPUTS, num_threads, [&](std::int64_t item, int worker) {
    const std::int64_t begin = item * THIN_OUTPUTS;
    outputs(call, columns.data(), begin, std::min(call.num_outputs, begin + THIN_OUTPUTS),
            scratch.data() + worker * scratch_size);
  });
}

}  // namespace iclperm
