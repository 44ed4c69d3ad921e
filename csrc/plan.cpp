#include "plan.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace iclperm {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// A GEMM under 8 rows takes another code path and other bits: no pack is planned smaller because of a KV budget.
constexpr std::int64_t kMinPack = 8;

// What both sinks know of the pack being filled.
struct Gauge {
  Limits limits;
  std::int64_t depth = 0;       // length of the current context path
  std::int64_t held = 0;        // context path tokens in the pool when the pack started
  std::int64_t held_query = 0;  // likewise of the open query path
  std::int64_t fill = 0;

  std::int64_t limit() const { return std::min(limits.pack_tokens, limits.kv_tokens - held - held_query); }
  bool full() const { return fill == limit(); }
  std::int64_t take(std::int64_t wanted) const { return std::min(wanted, limit() - fill); }
  std::int64_t alive() const { return held + held_query + fill; }
  void restart(std::int64_t open_query_depth) {
    held = depth;
    held_query = open_query_depth;
    fill = 0;
  }
};

// Predicts packs without writing them: O(packs + contexts), since only the pack borders need a look at the tree.
class Counter {
 public:
  Counter(const Limits& limits, std::int64_t held) { gauge_ = {limits, held, held, 0, 0}; }

  void turn_back(std::int64_t depth) { gauge_.depth = depth; }

  void context(const ScoredTree& contexts, std::int32_t node) {
    for (std::int64_t left = contexts.tree.edge_length(node); left > 0;) {
      if (gauge_.full()) flush(0);
      const std::int64_t taken = gauge_.take(left);
      gauge_.fill += taken;
      gauge_.depth += taken;
      left -= taken;
    }
  }

  void queries(const ScoredTree& block, std::int64_t) {
    const PrefixTree& tree = block.tree;
    for (std::int64_t token = 0; token < tree.num_tokens();) {
      if (gauge_.full()) flush(open_depth(tree, token));
      const std::int64_t taken = gauge_.take(tree.num_tokens() - token);
      gauge_.fill += taken;
      token += taken;
    }
  }

  void finish() {
    if (gauge_.fill > 0) flush(0);
  }

  Prediction prediction{0, 0, 0};

 private:
  static std::int64_t open_depth(const PrefixTree& tree, std::int64_t token) {
    const std::int32_t node = tree.node_of_token(token);
    return tree.depth[at(node)] + token - tree.token_offsets[at(node)];
  }

  void flush(std::int64_t open_query_depth) {
    prediction.tokens += gauge_.fill;
    prediction.packs += 1;
    prediction.kv_peak = std::max(prediction.kv_peak, gauge_.alive());
    gauge_.restart(open_query_depth);
  }

  Gauge gauge_;
};

// Rows of the pack that carry consecutive positions of the current path.
struct Segment {
  std::int64_t pos;
  std::int64_t row;
  std::int64_t length;
};

// The current path: positions [0, pooled) lie in the pool from slot `base` on, the rest in the pack.
struct OpenPath {
  std::int64_t base = 0;
  std::int64_t pooled = 0;
  std::vector<Segment> rows;

  void cut(std::int64_t depth) {
    pooled = std::min(pooled, depth);
    while (!rows.empty() && rows.back().pos >= depth) rows.pop_back();
    if (!rows.empty()) rows.back().length = std::min(rows.back().length, depth - rows.back().pos);
  }

  void append(std::int64_t pos, std::int64_t row, std::int64_t length) {
    if (!rows.empty() && rows.back().row + rows.back().length == row && rows.back().pos + rows.back().length == pos) {
      rows.back().length += length;
    } else {
      rows.push_back({pos, row, length});
    }
  }
};

class Builder {
 public:
  Builder(const Limits& limits, std::int64_t held, std::int32_t query_base, std::pair<std::int64_t, std::int64_t> owned,
          std::int64_t first_target)
      : owned_(owned), first_target_(first_target) {
    gauge_ = {limits, held, held, 0, 0};
    context_.pooled = held;
    query_.base = query_base;
    pack_.held_tokens = static_cast<std::int32_t>(held);
  }

  void turn_back(std::int64_t depth) {
    gauge_.depth = depth;
    context_.cut(depth);
  }

  void context(const ScoredTree& contexts, std::int32_t node) {
    const PrefixTree& tree = contexts.tree;
    std::int64_t token = tree.token_offsets[at(node)];
    while (token < tree.token_offsets[at(node) + 1]) {
      if (gauge_.full()) flush(0);
      const std::int64_t taken = gauge_.take(tree.token_offsets[at(node) + 1] - token);
      const std::int64_t row = gauge_.fill;
      spans_of(context_, gauge_.depth);
      visit(tree, token, taken, gauge_.depth);
      // A path that is recomputed on resume was scored by the units that own it.
      if (token >= owned_.first && token < owned_.second) score(contexts.targets, token, taken, row, -first_target_);
      context_.append(gauge_.depth, row, taken);
      gauge_.depth += taken;
      token += taken;
    }
  }

  void queries(const ScoredTree& block, std::int64_t context) {
    const PrefixTree& tree = block.tree;
    const std::int64_t first_value = num_query_contexts_++ * block.targets.size();
    query_.cut(0);
    for (std::int32_t node = 1; node < tree.num_nodes(); ++node) {
      query_.cut(tree.depth[at(node)]);
      std::int64_t token = tree.token_offsets[at(node)];
      std::int64_t pos = tree.depth[at(node)];
      while (token < tree.token_offsets[at(node) + 1]) {
        if (gauge_.full()) flush(pos);
        const std::int64_t taken = gauge_.take(tree.token_offsets[at(node) + 1] - token);
        const std::int64_t row = gauge_.fill;
        spans_of(context_, context);
        spans_of(query_, pos);
        visit(tree, token, taken, context + pos);
        score(block.targets, token, taken, row, first_value);
        query_.append(pos, row, taken);
        token += taken;
        pos += taken;
      }
    }
  }

  void finish() {
    if (gauge_.fill > 0) flush(0);
  }

  std::vector<Pack> packs;

 private:
  void span(std::uint8_t source, std::int64_t begin, std::int64_t end) {
    if (begin >= end) return;
    pack_.span_source.push_back(source);
    pack_.span_begin.push_back(static_cast<std::int32_t>(begin));
    pack_.span_end.push_back(static_cast<std::int32_t>(end));
  }

  // Where the first `depth` positions of a path lie.
  void spans_of(const OpenPath& path, std::int64_t depth) {
    span(0, path.base, path.base + std::min(path.pooled, depth));
    for (const Segment& s : path.rows) span(1, s.row, s.row + std::min(s.length, depth - s.pos));
  }

  void visit(const PrefixTree& tree, std::int64_t token, std::int64_t count, std::int64_t pos) {
    pack_.visit_pos.push_back(static_cast<std::int32_t>(pos));
    for (std::int64_t i = 0; i < count; ++i) {
      pack_.token_ids.push_back(tree.tokens[at(token + i)]);
      pack_.positions.push_back(static_cast<std::int32_t>(pos + i));
    }
    gauge_.fill += count;
    pack_.visit_row_offsets.push_back(static_cast<std::int32_t>(gauge_.fill));
    pack_.span_offsets.push_back(static_cast<std::int32_t>(pack_.span_begin.size()));
  }

  void score(const Targets& targets, std::int64_t token, std::int64_t count, std::int64_t row,
             std::int64_t first_value) {
    auto t = std::lower_bound(targets.token.begin(), targets.token.end(), token);
    for (; t != targets.token.end() && *t < token + count; ++t) {
      const auto scored = static_cast<std::int32_t>(row + *t - token);
      if (pack_.scored_rows.empty() || pack_.scored_rows.back() != scored) pack_.scored_rows.push_back(scored);
      const std::int64_t number = t - targets.token.begin();
      pack_.pair_row.push_back(static_cast<std::int32_t>(pack_.scored_rows.size()) - 1);
      pack_.pair_id.push_back(targets.id[at(number)]);
      pack_.pair_out.push_back(first_value + number);
    }
  }

  void retain(OpenPath& path, std::int64_t depth) {
    path.cut(depth);
    for (const Segment& s : path.rows) {
      pack_.retain_begin.push_back(static_cast<std::int32_t>(s.row));
      pack_.retain_end.push_back(static_cast<std::int32_t>(s.row + s.length));
      pack_.retain_slot.push_back(static_cast<std::int32_t>(path.base + s.pos));
    }
    path.rows.clear();
    path.pooled = depth;
  }

  void flush(std::int64_t open_query_depth) {
    retain(context_, gauge_.depth);
    retain(query_, open_query_depth);
    packs.push_back(std::exchange(pack_, Pack{}));
    gauge_.restart(open_query_depth);
    pack_.held_tokens = static_cast<std::int32_t>(gauge_.alive());
  }

  Gauge gauge_;
  OpenPath context_, query_;
  std::pair<std::int64_t, std::int64_t> owned_;
  std::int64_t first_target_;
  std::int64_t num_query_contexts_ = 0;
  Pack pack_;
};

}  // namespace

Plan::Plan(std::shared_ptr<const ScoredTree> contexts, std::vector<std::int32_t> ends,
           std::vector<std::shared_ptr<const ScoredTree>> blocks, Limits limits)
    : contexts_(std::move(contexts)), ends_(std::move(ends)), blocks_(std::move(blocks)), limits_(limits) {
  const PrefixTree& tree = contexts_->tree;
  if (limits_.pack_tokens < kMinPack)
    throw std::invalid_argument("pack_tokens is " + std::to_string(limits_.pack_tokens) + "; at least " +
                                std::to_string(kMinPack) + " are needed");
  if (limits_.unit_tokens < 1)
    throw std::invalid_argument("unit_tokens is " + std::to_string(limits_.unit_tokens) + "; at least 1 is needed");
  for (std::size_t e = 0; e < ends_.size(); ++e)
    if (ends_[e] < 0 || ends_[e] >= tree.num_nodes() || (e > 0 && ends_[e] <= ends_[e - 1]))
      throw std::invalid_argument("context end " + std::to_string(ends_[e]) + " at place " + std::to_string(e) +
                                  " is no node of the tree in ascending order");
  // Rows of a pack are numbered in 32 bits.
  limits_.pack_tokens = std::min<std::int64_t>(limits_.pack_tokens, std::numeric_limits<std::int32_t>::max());
  query_base_ = tree.max_depth();
  for (const auto& block : blocks_) max_query_depth_ = std::max(max_query_depth_, block->tree.max_depth());
  const std::int64_t needed = std::int64_t{query_base_} + max_query_depth_ + kMinPack;
  if (needed > std::numeric_limits<std::int32_t>::max())
    throw std::invalid_argument("the deepest path and eight more are " + std::to_string(needed) +
                                " tokens; positions end at 2^31 - 1");
  if (limits_.kv_tokens < needed)
    throw std::invalid_argument("a KV budget of " + std::to_string(limits_.kv_tokens) +
                                " tokens cannot hold the deepest path; it needs at least " + std::to_string(needed));
  for (std::int32_t n = 0; n < tree.num_nodes(); ++n)
    if (tree.is_leaf(n)) leaves_.push_back(n);
  cut_units();
  predict_all();
}

// One past the last context end on the leaf's path or on a path before it.
std::int32_t Plan::owned_end(std::int32_t leaf) const {
  return static_cast<std::int32_t>(std::upper_bound(ends_.begin(), ends_.end(), leaves_[at(leaf)]) - ends_.begin());
}

// Several small leaf paths share a unit; where the queries come in several blocks, each leaf path has a unit a block.
void Plan::cut_units() {
  const PrefixTree& tree = contexts_->tree;
  const auto num_leaves = static_cast<std::int32_t>(leaves_.size());
  const std::int64_t query_tokens = blocks_.size() == 1 ? blocks_[0]->tree.num_tokens() : 0;
  const auto first_token = [&](std::int32_t leaf) {
    return leaf == 0 ? 0 : tree.token_offsets[at(leaves_[at(leaf) - 1]) + 1];
  };
  const auto work = [&](std::int32_t leaf) {
    const std::int32_t contexts = owned_end(leaf) - (leaf == 0 ? 0 : owned_end(leaf - 1));
    return first_token(leaf + 1) - first_token(leaf) + contexts * query_tokens;
  };
  for (std::int32_t leaf = 0; leaf < num_leaves;) {
    std::int32_t last = leaf + 1;
    if (blocks_.size() <= 1) {
      std::int64_t total = work(leaf);
      while (last < num_leaves && total + work(last) <= limits_.unit_tokens) total += work(last++);
    }
    const std::int32_t context_begin = leaf == 0 ? 0 : owned_end(leaf - 1);
    const std::int32_t context_end = owned_end(last - 1);
    for (std::int32_t b = blocks_.empty() ? -1 : 0; b < static_cast<std::int32_t>(blocks_.size()); ++b) {
      units_.leaf_begin.push_back(leaf);
      units_.leaf_end.push_back(last);
      units_.block.push_back(b);
      units_.context_begin.push_back(context_begin);
      units_.context_end.push_back(context_end);
      const std::vector<std::int64_t>& predicting = contexts_->targets.token;
      const auto target = [&](std::int32_t l) {
        return std::lower_bound(predicting.begin(), predicting.end(), first_token(l)) - predicting.begin();
      };
      units_.value_begin.push_back(b < 0 ? target(leaf) : 0);
      units_.num_values.push_back(b < 0 ? target(last) - target(leaf)
                                        : (context_end - context_begin) * blocks_[at(b)]->targets.size());
      if (b < 0) break;
    }
    leaf = last;
  }
}

void Plan::predict_all() {
  std::int32_t held = 0;
  for (std::int64_t u = 0; u < num_units(); ++u) {
    const Prediction unit = predict(u, held);
    units_.tokens.push_back(unit.tokens);
    units_.packs.push_back(unit.packs);
    units_.kv_peak.push_back(unit.kv_peak);
    held = held_after(u);
  }
}

template <class Sink>
void Plan::walk(std::int64_t unit, std::int32_t held, Sink& sink) const {
  const PrefixTree& tree = contexts_->tree;
  const std::int32_t block = units_.block[at(unit)];
  std::int32_t context = units_.context_begin[at(unit)];
  std::vector<std::int32_t> chain;
  for (std::int32_t leaf = units_.leaf_begin[at(unit)]; leaf < units_.leaf_end[at(unit)]; ++leaf) {
    const std::int32_t branch = tree.common_ancestor(held, leaves_[at(leaf)]);
    sink.turn_back(tree.end_depth(branch));
    chain.clear();
    for (std::int32_t n = leaves_[at(leaf)]; n != branch; n = tree.parent[at(n)]) chain.push_back(n);
    for (auto n = chain.rbegin(); n != chain.rend(); ++n) sink.context(*contexts_, *n);
    held = leaves_[at(leaf)];
    if (block >= 0)
      for (; context < owned_end(leaf); ++context)
        sink.queries(*blocks_[at(block)], tree.end_depth(ends_[at(context)]));
  }
  sink.finish();
}

std::int32_t Plan::held_after(std::int64_t unit) const {
  check_unit(unit, 0);
  return leaves_[at(units_.leaf_end[at(unit)] - 1)];
}

void Plan::check_unit(std::int64_t unit, std::int32_t held) const {
  if (unit < 0 || unit >= num_units())
    throw std::invalid_argument("unit " + std::to_string(unit) + " is not among the plan's " +
                                std::to_string(num_units()));
  if (held < 0 || held >= contexts_->tree.num_nodes())
    throw std::invalid_argument("held node " + std::to_string(held) + " is not in the context tree");
}

Prediction Plan::predict(std::int64_t unit, std::int32_t held) const {
  check_unit(unit, held);
  Counter counter(limits_, contexts_->tree.end_depth(held));
  walk(unit, held, counter);
  return counter.prediction;
}

std::vector<Pack> Plan::packs_of(std::int64_t unit, std::int32_t held) const {
  check_unit(unit, held);
  const PrefixTree& tree = contexts_->tree;
  const std::int32_t first = units_.leaf_begin[at(unit)];
  const std::pair<std::int64_t, std::int64_t> owned{
      first == 0 ? 0 : tree.token_offsets[at(leaves_[at(first - 1)]) + 1],
      tree.token_offsets[at(leaves_[at(units_.leaf_end[at(unit)] - 1)]) + 1]};
  Builder builder(limits_, tree.end_depth(held), query_base_, owned, units_.value_begin[at(unit)]);
  walk(unit, held, builder);
  return std::move(builder.packs);
}

}  // namespace iclperm
