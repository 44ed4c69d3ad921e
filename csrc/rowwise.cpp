#include "rowwise.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "parallel.hpp"

namespace iclperm {
namespace {

constexpr std::int64_t ELEMENTS_PER_ITEM = 1 << 15;  // enough work to be worth handing out

template <typename Rows>
void by_rows(std::int64_t num_rows, std::int64_t elements_per_row, int num_threads, const Rows& rows) {
  check_threads(num_threads);
  if (elements_per_row == 0) return;  // however many rows there are
  const std::int64_t step = std::max<std::int64_t>(1, ELEMENTS_PER_ITEM / std::max<std::int64_t>(1, elements_per_row));
  parallel_for(in_parts_of(num_rows, step), num_threads,
               [&](std::int64_t item, int) { rows(item * step, std::min(num_rows, (item + 1) * step)); });
}

void check(const HeadRowsCall& call) {
  if (call.num_columns < 1) throw std::invalid_argument("logits have 0 columns; at least 1 is needed");
  if (!(std::isfinite(call.softcap) && call.softcap >= 0.0f)) {
    throw std::invalid_argument("softcap is " + std::to_string(call.softcap) + "; it must be positive, or 0 for none");
  }
  for (std::int64_t n = 0; n < call.num_pairs; ++n) {
    const std::int64_t row = call.pair_row[n];
    const std::int64_t id = call.pair_id[n];
    if (0 <= row && row < call.num_rows && 0 <= id && id < call.num_columns) continue;
    throw std::invalid_argument("pair " + std::to_string(n) + " is (row " + std::to_string(row) + ", id " +
                                std::to_string(id) + "), outside logits [" + std::to_string(call.num_rows) + ", " +
                                std::to_string(call.num_columns) + "]");
  }
}

}  // namespace

void elementwise(const Elementwise& call, Isa isa, int num_threads) {
  const auto rows = ICLPERM_SELECT(isa, elementwise_rows);
  by_rows(call.num_rows, call.num_columns, num_threads,
          [&](std::int64_t begin, std::int64_t end) { rows(call, begin, end); });
}

void rms_norm(const RmsNorm& call, Isa isa, int num_threads) {
  const auto rows = ICLPERM_SELECT(isa, norm_rows);
  by_rows(call.num_rows, call.num_columns, num_threads,
          [&](std::int64_t begin, std::int64_t end) { rows(call, begin, end); });
}

void layer_norm(const LayerNorm& call, Isa isa, int num_threads) {
  const auto rows = ICLPERM_SELECT(isa, centred_rows);
  by_rows(call.num_rows, call.num_columns, num_threads,
          [&](std::int64_t begin, std::int64_t end) { rows(call, begin, end); });
}

void rotate(const Rotation& call, Isa isa, int num_threads) {
  const auto rows = ICLPERM_SELECT(isa, rotate_rows);
  by_rows(call.num_rows, call.num_heads * call.num_columns, num_threads,
          [&](std::int64_t begin, std::int64_t end) { rows(call, begin, end); });
}

void head_rows(const HeadRowsCall& call, Isa isa, int num_threads) {
  check(call);
  const auto reduce = ICLPERM_SELECT(isa, reduce_logits);
  by_rows(call.num_rows, call.num_columns, num_threads,
          [&](std::int64_t begin, std::int64_t end) { reduce(call, begin, end); });
  ICLPERM_SELECT(isa, gather_logits)(call, 0, call.num_pairs);
}

}  // namespace iclperm
