#include "retain.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

#include "parallel.hpp"

namespace iclperm {
namespace {

constexpr std::int64_t FEW_BYTES = 1 << 18;  // are copied before a second thread has come

void check(const Retained& call) {
  if (call.rows.num_heads != call.pool.num_heads) {
    throw std::invalid_argument("rows have " + std::to_string(call.rows.num_heads) + " heads and the pool " +
                                std::to_string(call.pool.num_heads) + "; they must be equal");
  }
  for (std::int64_t n = 0; n < call.num_runs; ++n) {
    const std::int64_t begin = call.begin[n], end = call.end[n], slot = call.slot[n];
    const bool are_rows = 0 <= begin && begin <= end && end <= call.rows.num_rows;
    if (are_rows && 0 <= slot && slot <= call.pool.num_rows - (end - begin)) continue;
    throw std::invalid_argument("run " + std::to_string(n) + " takes rows [" + std::to_string(begin) + ", " +
                                std::to_string(end) + ") of " + std::to_string(call.rows.num_rows) + " to slot " +
                                std::to_string(slot) + " of " + std::to_string(call.pool.num_rows));
  }
}

}  // namespace

// A thread has heads of its own, whose slots lie apart from those of others, so that runs follow each other.
void retain_rows(const Retained& call, int num_threads) {
  check_threads(num_threads);
  check(call);
  const std::int64_t size = call.element_size, bytes = call.head_dim * size;
  std::int64_t num_rows = 0;
  for (std::int64_t n = 0; n < call.num_runs; ++n) num_rows += call.end[n] - call.begin[n];
  const bool is_little = num_rows * call.rows.num_heads * bytes < FEW_BYTES;
  parallel_for(call.rows.num_heads, is_little ? 1 : num_threads, [&](std::int64_t head, int) {
    const auto* const from = static_cast<const unsigned char*>(call.rows.data) + head * call.rows.head_stride * size;
    auto* const to = static_cast<unsigned char*>(call.pool.data) + head * call.pool.head_stride * size;
    for (std::int64_t n = 0; n < call.num_runs; ++n) {
      for (std::int64_t i = 0; i < call.end[n] - call.begin[n]; ++i) {
        std::memcpy(to + (call.slot[n] + i) * call.pool.row_stride * size,
                    from + (call.begin[n] + i) * call.rows.row_stride * size, static_cast<std::size_t>(bytes));
      }
    }
  });
}

}  // namespace iclperm
