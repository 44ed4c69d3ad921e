#include "tree_attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "parallel.hpp"
#include "raw_memory.hpp"

namespace iclperm {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

void require(bool holds, const std::string& message) {
  if (!holds) refuse(message);
}

void check_shapes(const TreeAttention& call) {
  const std::int64_t hkv = call.k_new.num_heads;
  require(call.head_dim >= 1, "head_dim is " + std::to_string(call.head_dim) + "; at least 1 is needed");
  require(hkv >= 1 && call.q.num_heads >= 1 && call.q.num_heads % hkv == 0,
          "q has " + std::to_string(call.q.num_heads) + " heads, not a multiple of the " + std::to_string(hkv) +
              " key-value heads of k_new");
  const auto same = [](const ConstHeadRows& x, const ConstHeadRows& like, const char* name, const char* like_name) {
    require(x.num_rows == like.num_rows && x.num_heads == like.num_heads,
            std::string(name) + " is [" + std::to_string(x.num_rows) + ", " + std::to_string(x.num_heads) + ", d]; " +
                like_name + " asks for [" + std::to_string(like.num_rows) + ", " + std::to_string(like.num_heads) +
                ", d]");
  };
  same(call.v_new, call.k_new, "v_new", "k_new");
  same(call.v_pool, call.k_pool, "v_pool", "k_pool");
  same({nullptr, call.out.num_rows, call.out.num_heads, 0, 0}, call.q, "out", "q");
  require(call.query_rows != nullptr || call.k_new.num_rows == call.q.num_rows,
          "k_new has " + std::to_string(call.k_new.num_rows) + " rows and q " + std::to_string(call.q.num_rows) +
              "; they must be equal");
  require(call.k_pool.num_heads == hkv, "k_pool has " + std::to_string(call.k_pool.num_heads) + " heads and k_new " +
                                            std::to_string(hkv) + "; they must be equal");
  require(std::isfinite(call.scaling), "scaling is " + std::to_string(call.scaling) + "; it must be finite");
  require(std::isfinite(call.softcap) && call.softcap >= 0.0f,
          "softcap is " + std::to_string(call.softcap) + "; it must be positive, or 0 for none");
  require(call.window >= 0, "window is " + std::to_string(call.window) + "; it must be positive, or 0 for none");
}

void check_offsets(const std::int64_t* offsets, std::int64_t num_visits, std::int64_t limit, const char* name) {
  for (std::int64_t v = 0; v < num_visits; ++v) {
    if (offsets[v] > offsets[v + 1]) {
      refuse(std::string(name) + " falls from " + std::to_string(offsets[v]) + " to " + std::to_string(offsets[v + 1]) +
             " at visit " + std::to_string(v));
    }
  }
  require(offsets[0] >= 0 && offsets[num_visits] <= limit,
          std::string(name) + " covers [" + std::to_string(offsets[0]) + ", " + std::to_string(offsets[num_visits]) +
              "), outside [0, " + std::to_string(limit) + ")");
}

// Asked for every layer of every step: words are made where something is wrong alone.
void check_visit(const TreeAttention& call, std::int64_t visit) {
  const Visits& visits = call.visits;
  const auto name = [&] { return "visit " + std::to_string(visit); };
  constexpr std::int64_t MOST_KEYS = std::numeric_limits<std::int64_t>::max();
  std::int64_t length = 0;
  for (std::int64_t s = visits.span_offsets[visit]; s < visits.span_offsets[visit + 1]; ++s) {
    const std::int64_t source = visits.span_source[s];
    const std::int64_t begin = visits.span_begin[s];
    const std::int64_t end = visits.span_end[s];
    if (source != 0 && source != 1) {
      refuse(name() + ": span source is " + std::to_string(source) + "; 0 (pool) or 1 (pack) is needed");
    }
    const std::int64_t limit = source == 0 ? call.k_pool.num_rows : call.k_new.num_rows;
    if (!(0 <= begin && begin <= end && end <= limit)) {
      refuse(name() + ": span [" + std::to_string(begin) + ", " + std::to_string(end) + ") is not within the " +
             std::to_string(limit) + (source == 0 ? " pool slots" : " pack rows"));
    }
    length = end - begin > MOST_KEYS - length ? MOST_KEYS : length + (end - begin);
  }
  if (length != visits.pos[visit]) {
    refuse(name() + ": spans hold " + std::to_string(length) + " keys but its first row is at position " +
           std::to_string(visits.pos[visit]));
  }
}

void check_query_rows(const TreeAttention& call) {
  const Visits& visits = call.visits;
  require(call.num_query_rows <= call.q.num_rows, "query_rows has " + std::to_string(call.num_query_rows) +
                                                      " entries, more than the " + std::to_string(call.q.num_rows) +
                                                      " rows of q");
  for (std::int64_t n = 0; n < call.num_query_rows; ++n) {
    const std::int64_t row = call.query_rows[n];
    if (row < visits.row_offsets[0] || visits.row_offsets[visits.num_visits] <= row) {
      refuse("query_rows holds " + std::to_string(row) + ", a row that no visit owns");
    }
    if (n > 0 && call.query_rows[n - 1] >= row) {
      refuse("query_rows does not rise at entry " + std::to_string(n));
    }
  }
}

void check(const TreeAttention& call, int num_threads) {
  const Visits& visits = call.visits;
  check_threads(num_threads);
  check_shapes(call);
  check_offsets(visits.row_offsets, visits.num_visits, call.k_new.num_rows, "visit_row_offsets");
  check_offsets(visits.span_offsets, visits.num_visits, visits.num_spans, "span_offsets");
  for (std::int64_t v = 0; v < visits.num_visits; ++v) check_visit(call, v);
  check_query_rows(call);
}

// The rows of q that visits own, and the pack row of each row of q.
struct Queries {
  std::int64_t begin, end;
  std::vector<std::int64_t> pack_rows;
};

Queries queries_of(const TreeAttention& call) {
  if (call.query_rows != nullptr) {
    return {0, call.num_query_rows, {call.query_rows, call.query_rows + call.num_query_rows}};
  }
  const Visits& visits = call.visits;
  Queries all{visits.row_offsets[0], visits.row_offsets[visits.num_visits],
              std::vector<std::int64_t>(at(call.q.num_rows))};
  std::iota(all.pack_rows.begin(), all.pack_rows.end(), 0);
  return all;
}

struct BlockGroup {
  std::int64_t begin, end;  // blocks
};

struct Work {
  std::vector<Block> blocks;
  std::vector<BlockGroup> groups;  // one work item for each of these and each key-value head
  std::int64_t max_lines = 0;
};

// Cuts visits into blocks and puts consecutive ones together, up to MAX_LINES lines and to as many as leave each thread
// about as much as the others. A row's bits do not depend on whom it is put together with.
Work divide(const TreeAttention& call, const Queries& queries, int num_threads) {
  const std::int64_t num_heads = call.k_new.num_heads, group_size = call.q.num_heads / num_heads;
  const std::int64_t most_rows = std::max<std::int64_t>(1, MAX_LINES / group_size);
  const std::int64_t num_rows = std::max<std::int64_t>(1, queries.end - queries.begin);
  const std::int64_t sharers = in_parts_of(num_threads, num_heads);  // of a head's groups
  const std::int64_t max_rows = in_parts_of(num_rows, in_parts_of(in_parts_of(num_rows, most_rows), sharers) * sharers);
  const std::int64_t max_lines = max_rows * group_size;
  Work work;
  std::int64_t lines = 0;
  std::int64_t row = queries.begin;
  for (std::int64_t v = 0; v < call.visits.num_visits; ++v) {
    std::int64_t visit_end = row;
    while (visit_end < queries.end && queries.pack_rows[at(visit_end)] < call.visits.row_offsets[v + 1]) ++visit_end;
    while (row < visit_end) {
      const std::int64_t end = std::min(row + max_rows, visit_end);
      const std::int64_t num_lines = (end - row) * group_size;
      if (work.groups.empty() || lines + num_lines > max_lines) {
        work.groups.push_back({static_cast<std::int64_t>(work.blocks.size()), 0});
        lines = 0;
      }
      work.blocks.push_back({v, row, end, lines, num_lines});
      work.groups.back().end = static_cast<std::int64_t>(work.blocks.size());
      lines += num_lines;
      work.max_lines = std::max(work.max_lines, lines);
      row = end;
    }
  }
  return work;
}

class ScratchMemory {
 public:
  ScratchMemory(std::int64_t head_dim, std::int64_t lines) {
    const std::int64_t padded = round_up(head_dim);
    const std::int64_t sizes[] = {padded * TILE,     TILE * padded,   round_up(lines) * padded, lines * padded,
                                  lines * MAX_LANES, round_up(lines), padded,                   TILE / 2 * padded};
    std::int64_t total = 0;
    for (const std::int64_t size : sizes) total += size;
    floats_.emplace(total);
    line_pos_.resize(at(lines));
    cursors_.resize(at(lines));
    float** const parts[] = {&scratch_.keys,        &scratch_.values, &scratch_.queries,
                             &scratch_.accumulator, &scratch_.sums,   &scratch_.maxima,
                             &scratch_.zeros,       &scratch_.visible};
    float* next = floats_->data();
    for (std::size_t part = 0; part < std::size(parts); ++part) {
      *parts[part] = next;
      next += sizes[part];
    }
    std::fill_n(scratch_.zeros, padded, 0.0f);
    scratch_.has_infinite = has_infinite_;
    scratch_.line_pos = line_pos_.data();
    scratch_.cursors = cursors_.data();
    scratch_.tile_kv_head = -1;
  }

  Scratch& scratch() { return scratch_; }

 private:
  static std::int64_t round_up(std::int64_t floats) { return (floats + MAX_LANES - 1) / MAX_LANES * MAX_LANES; }

  std::optional<RawMemory<float>> floats_;
  bool has_infinite_[TILE / 2] = {};
  std::vector<std::int64_t> line_pos_;
  std::vector<Cursor> cursors_;
  Scratch scratch_;
};

void clear_rows(const MutableHeadRows& out, std::int64_t head_dim, Element element, std::int64_t begin,
                std::int64_t end) {
  const std::int64_t size = element == Element::float32 ? 4 : 2;
  for (std::int64_t row = begin; row < end; ++row) {
    for (std::int64_t head = 0; head < out.num_heads; ++head) {
      auto* first = static_cast<unsigned char*>(out.data) + (row * out.row_stride + head * out.head_stride) * size;
      std::memset(first, 0, at(head_dim * size));
    }
  }
}

}  // namespace

void tree_attention(const TreeAttention& asked, Isa isa, int num_threads) {
  check(asked, num_threads);
#if defined(ICLPERM_TILE_PATH)
  const auto attend = isa == Isa::amx_bf16 ? amx_bf16::attend : ICLPERM_SELECT(isa, attend);
#else
  const auto attend = ICLPERM_SELECT(isa, attend);
#endif
  const Queries queries = queries_of(asked);
  TreeAttention call = asked;
  call.query_rows = queries.pack_rows.data();  // the kernels always have it
  call.window = std::min(call.window, std::numeric_limits<std::int64_t>::max() / 2);  // the kernels take it off positions
  const Work work = divide(call, queries, num_threads);
  const std::int64_t num_heads = call.k_new.num_heads;
  const std::int64_t num_items = static_cast<std::int64_t>(work.groups.size()) * num_heads;

  // Allocated here, so that nothing can fail inside the parallel part.
  std::vector<std::unique_ptr<ScratchMemory>> memory;
  for (std::int64_t worker = 0; worker < std::min<std::int64_t>(num_threads, num_items); ++worker) {
    memory.push_back(std::make_unique<ScratchMemory>(call.head_dim, work.max_lines));
  }
  parallel_for(num_items, num_threads, [&](std::int64_t item, int worker) {
    const BlockGroup& group = work.groups[at(item / num_heads)];
    attend(call, {work.blocks.data() + group.begin, group.end - group.begin, item % num_heads},
           memory[at(worker)]->scratch());
  });
  clear_rows(call.out, call.head_dim, call.element, 0, queries.begin);
  clear_rows(call.out, call.head_dim, call.element, queries.end, call.q.num_rows);
}

}  // namespace iclperm
