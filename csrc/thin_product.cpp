#include "thin_product.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "parallel.hpp"
#include "raw_memory.hpp"

namespace iclperm {

namespace {

// Outputs of an item, sixteen or a multiple: fewer than THIN_OUTPUTS where the thread with the most to do is done sooner
// by that, when they take the items in turns. The last item has what is left.
constexpr std::int64_t outputs_an_item(std::int64_t num_outputs, int num_threads) {
  constexpr std::int64_t STEP = 16;
  constexpr std::int64_t READ_ANEW = 4;  // outputs that take as long as an item's reading of the rows' columns
  std::int64_t best = 0, least = 0;
  for (std::int64_t size = THIN_OUTPUTS; size > 0; size -= STEP) {
    const std::int64_t items = in_parts_of(num_outputs, size);
    const bool last_is_alone = (items - 1) % num_threads == 0;  // in its turn
    const std::int64_t taken =
        in_parts_of(items, num_threads) * (size + READ_ANEW) - (last_is_alone ? items * size - num_outputs : 0);
    if (best == 0 || taken < least - least / 32) best = size, least = taken;  // by 3 % at least
  }
  return best;
}
static_assert(THIN_OUTPUTS == 96 && outputs_an_item(640, 2) == 80 && outputs_an_item(896, 2) == 64);
static_assert(outputs_an_item(1408, 2) == 96 && outputs_an_item(262144, 2) == 96);
static_assert(outputs_an_item(640, 1) == 96 && outputs_an_item(1, 1) == 96 && outputs_an_item(256, 16) == 16);

// Columns that a thread lays out at a time: all of them where threads would take longer to wake.
std::int64_t columns_an_item(const ThinProduct& call, int num_threads) {
  constexpr std::int64_t ALONE = 1 << 14;  // floats
  constexpr std::int64_t LINE = 16;
  if (call.num_rows * call.num_columns <= ALONE) return std::max(call.num_columns, std::int64_t{1});
  return in_parts_of(in_parts_of(call.num_columns, num_threads), LINE) * LINE;
}

}  // namespace

bool has_fused_products(Isa isa, Element element) {
  if (element == Element::bfloat16) return isa >= Isa::avx512_bf16;
#if defined(__aarch64__)
  return true;
#else
  return isa != Isa::baseline;
#endif
}

void thin_product(const ThinProduct& call, Isa isa, int num_threads) {
  check_threads(num_threads);
  if (call.block < 1) throw std::invalid_argument("block is " + std::to_string(call.block) + "; give 1 at least");
  if (call.element == Element::bfloat16 && !has_fused_products(isa, call.element)) {
    throw std::invalid_argument(std::string("bfloat16 is multiplied from avx512_bf16 on; this is ") + isa_name(isa));
  }
  if (call.num_rows == 0 || call.num_outputs == 0) return;
  constexpr std::int64_t MOST = std::int64_t{1} << 40;  // floats: more than any memory holds, few enough to be counted
  if (call.num_rows > MOST / std::max(call.num_columns, THIN_OUTPUTS)) {
    throw std::invalid_argument("x has " + std::to_string(call.num_rows) + " rows, more than any memory holds");
  }
  const RawMemory<float> columns(ICLPERM_SELECT(isa, thin_columns_size)(call));
  const auto fill = ICLPERM_SELECT(isa, thin_columns);
  const std::int64_t fill_step = columns_an_item(call, num_threads);
  parallel_for(in_parts_of(call.num_columns, fill_step), num_threads, [&](std::int64_t item, int) {
    const std::int64_t begin = item * fill_step;
    fill(call, begin, std::min(call.num_columns, begin + fill_step), columns.data());
  });
  const std::int64_t scratch_size = ICLPERM_SELECT(isa, thin_scratch_size)(call);
  const RawMemory<float> scratch(scratch_size * num_threads);
  const auto outputs = ICLPERM_SELECT(isa, thin_outputs);
  const std::int64_t step = outputs_an_item(call.num_outputs, num_threads);
  parallel_for(in_parts_of(call.num_outputs, step), num_threads, [&](std::int64_t item, int worker) {
    const std::int64_t begin = item * step;
    outputs(call, columns.data(), begin, std::min(call.num_outputs, begin + step),
            scratch.data() + worker * scratch_size);
  });
}

}  // namespace iclperm
