#include "tile_product.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "parallel.hpp"
#include "raw_memory.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace iclperm {
namespace {

constexpr std::int64_t CHUNK = 1 << 19;  // numbers of panels that stay in a core's own memory while rows go by

// Memory that has not been written to yet is made of large pages where the system has them, so that reading it all looks
// up fewer addresses. Where it has none, nothing is lost.
void ask_for_large_pages([[maybe_unused]] std::uint16_t* numbers, [[maybe_unused]] std::int64_t size) {
#if defined(__linux__)
  constexpr std::uintptr_t LARGE = std::uintptr_t{1} << 21;
  const auto begin = (reinterpret_cast<std::uintptr_t>(numbers) + LARGE - 1) / LARGE * LARGE;
  const auto end = reinterpret_cast<std::uintptr_t>(numbers + size) / LARGE * LARGE;
  if (begin < end) static_cast<void>(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE));
#endif
}

void check(const TileProduct& call, Isa isa, int num_threads) {
  check_threads(num_threads);
  if (!has_tile_products(isa)) {
    throw std::invalid_argument(std::string("tiles are of amx_bf16 alone; this is ") + isa_name(isa));
  }
  if (call.num_columns < 1 || call.num_columns % TILE_COLUMNS != 0) {
    throw std::invalid_argument("the matrix has " + std::to_string(call.num_columns) + " columns; give a multiple of " +
                                std::to_string(TILE_COLUMNS) + ", and one at least");
  }
}

}  // namespace

bool has_tile_products(Isa isa) { return isa == Isa::amx_bf16; }

std::int64_t laid_out_size(std::int64_t num_outputs, std::int64_t num_columns) {
  constexpr std::int64_t MOST = std::int64_t{1} << 31;  // of either, so that they can be multiplied
  if (num_outputs < 0 || num_columns < 0 || num_outputs > MOST || num_columns > MOST) {
    throw std::invalid_argument("a matrix of " + std::to_string(num_outputs) + " outputs and " +
                                std::to_string(num_columns) + " columns cannot be laid out; give numbers from 0 to 2^31");
  }
  return in_parts_of(num_outputs, PANEL_OUTPUTS) * PANEL_OUTPUTS * num_columns;
}

#if defined(ICLPERM_TILE_PATH)
void lay_out(const TileProduct& call, std::uint16_t* laid_out, Isa isa, int num_threads) {
  check(call, isa, num_threads);
  ask_for_large_pages(laid_out, laid_out_size(call.num_outputs, call.num_columns));
  const std::int64_t panels = in_parts_of(call.num_outputs, PANEL_OUTPUTS), a_panel = PANEL_OUTPUTS * call.num_columns;
  const std::int64_t step = std::max<std::int64_t>(1, CHUNK / a_panel);
  parallel_for(in_parts_of(panels, step), num_threads, [&](std::int64_t item, int) {
    const std::int64_t begin = item * step;
    amx_bf16::lay_out_panels(call, begin, std::min(panels, begin + step), laid_out + begin * a_panel);
  });
}

void tile_product(const TileProduct& call, Isa isa, int num_threads) {
  check(call, isa, num_threads);
  laid_out_size(call.num_outputs, call.num_columns);  // which refuses what is too large
  if (call.num_rows == 0 || call.num_outputs == 0) return;
  const std::int64_t panels = in_parts_of(call.num_outputs, PANEL_OUTPUTS), a_panel = PANEL_OUTPUTS * call.num_columns;
  // As many items for each thread as for the others: of panels, and where these are too few, of rows, too.
  const std::int64_t most = std::max<std::int64_t>(1, CHUNK / a_panel);
  const std::int64_t wanted = in_parts_of(in_parts_of(panels, most), num_threads) * num_threads;
  const std::int64_t step = in_parts_of(panels, std::min(wanted, panels));
  const std::int64_t chunks = in_parts_of(panels, step);
  const std::int64_t blocks = in_parts_of(call.num_rows, BLOCK_ROWS);
  const std::int64_t row_step = in_parts_of(blocks, in_parts_of(num_threads, chunks)) * BLOCK_ROWS;
  const std::int64_t row_parts = in_parts_of(call.num_rows, row_step);
  const std::int64_t a_row_block = BLOCK_ROWS * call.num_columns;
  const std::int64_t scratch_size = a_row_block + (call.laid_out == nullptr ? step * a_panel : 0);
  const RawMemory<std::uint16_t> scratch(scratch_size * num_threads);
  parallel_for(chunks * row_parts, num_threads, [&](std::int64_t item, int worker) {
    const std::int64_t begin = item / row_parts * step, end = std::min(panels, begin + step);
    const std::int64_t row_begin = item % row_parts * row_step;
    std::uint16_t* const own = scratch.data() + worker * scratch_size;
    const std::uint16_t* laid_out = own + a_row_block;
    if (call.laid_out == nullptr) {
      amx_bf16::lay_out_panels(call, begin, end, own + a_row_block);
    } else {
      laid_out = call.laid_out + begin * a_panel;
    }
    amx_bf16::multiply_panels(call, row_begin, std::min(call.num_rows, row_begin + row_step), begin, end, laid_out, own);
  });
}
#else
void lay_out(const TileProduct& call, std::uint16_t*, Isa isa, int num_threads) { check(call, isa, num_threads); }
void tile_product(const TileProduct& call, Isa isa, int num_threads) { check(call, isa, num_threads); }
#endif

}  // namespace iclperm
