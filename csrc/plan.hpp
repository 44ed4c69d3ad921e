// The order in which a product of trees is forwarded: units, cut into packs under a token and a KV budget.
//
// The workload is a tree of contexts and, beneath every context end, the same query trees (one a block of queries).
// Only the factors are stored. A *unit* is some consecutive leaf paths of the context tree with one block of queries;
// a *pack* is what one forward pass takes. The tokens of a unit come in this order:
//
//   for each leaf path: its tokens that are not held yet, then, beneath each context that ends on it and on no path
//   before it, the block's query tree in preorder.
//
// The keys and values of the current path are held from pack to pack: position p of the context path lies in pool slot
// p, position p of the open query path in slot query_base + p. A pack's own keys are read where the model wrote them,
// and those that later packs need are copied into the pool after each layer (`retain`). Nothing else is ever stored:
// the pool is a stack, its height a property of the plan.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "prefix_tree.hpp"

namespace iclperm {

struct Limits {
  std::int64_t pack_tokens;  // most tokens of one forward pass
  std::int64_t kv_tokens;    // most tokens whose keys and values are alive at once: held path + pack
  std::int64_t unit_tokens;  // wanted size of a unit
};

// A run of rows of a pack at consecutive positions of one edge. Its ancestors' keys, in position order, are spans of
// pool slots (source 0) or of earlier rows of the pack (source 1).
struct Pack {
  std::vector<std::int32_t> token_ids;                              // [M]
  std::vector<std::int32_t> positions;                              // [M] distance from the root
  std::vector<std::int32_t> visit_row_offsets{0};                   // [V + 1]
  std::vector<std::int32_t> visit_pos;                              // [V] position of the first row
  std::vector<std::int32_t> span_offsets{0};                        // [V + 1]
  std::vector<std::uint8_t> span_source;                            // [J]
  std::vector<std::int32_t> span_begin, span_end;                   // [J]
  std::vector<std::int32_t> retain_begin, retain_end, retain_slot;  // rows -> pool slots, after each layer
  std::vector<std::int32_t> scored_rows;                            // [R] rows whose logits are wanted, ascending
  std::vector<std::int32_t> pair_row, pair_id;                      // [X] place in scored_rows, token id wanted there
  std::vector<std::int64_t> pair_out;                               // [X] place in the unit's values
  std::int32_t held_tokens = 0;                                     // pool tokens alive while the pack runs
};

struct Units {
  std::vector<std::int32_t> leaf_begin, leaf_end;        // leaf paths
  std::vector<std::int32_t> block;                       // query block; -1: the context tree itself is scored
  std::vector<std::int32_t> context_begin, context_end;  // context ends scored
  std::vector<std::int64_t> value_begin, num_values;     // first target (block -1) and size of the unit's values
  std::vector<std::int64_t> tokens, packs, kv_peak;      // predicted, if the unit before it has just run
};

struct Prediction {
  std::int64_t tokens, packs, kv_peak;
};

class Plan {
 public:
  // ends: context-tree nodes beneath which the queries hang, strictly ascending. Without blocks the targets of the
  // context tree are scored instead. Throws std::invalid_argument if a budget cannot hold the deepest path.
  Plan(std::shared_ptr<const ScoredTree> contexts, std::vector<std::int32_t> ends,
       std::vector<std::shared_ptr<const ScoredTree>> blocks, Limits limits);

  const Units& units() const { return units_; }
  std::int64_t num_units() const { return static_cast<std::int64_t>(units_.block.size()); }
  std::int32_t query_base() const { return query_base_; }
  // Pool slots that any unit may need, in whatever order units run.
  std::int32_t pool_slots() const { return query_base_ + max_query_depth_; }
  // The context node whose path is held after a unit.
  std::int32_t held_after(std::int64_t unit) const;
  // What a unit forwards when the path to `held` is in the pool (0, the root: nothing is).
  Prediction predict(std::int64_t unit, std::int32_t held) const;
  std::vector<Pack> packs_of(std::int64_t unit, std::int32_t held) const;

 private:
  template <class Sink>
  void walk(std::int64_t unit, std::int32_t held, Sink& sink) const;
  void check_unit(std::int64_t unit, std::int32_t held) const;
  void cut_units();
  void predict_all();
  std::int32_t owned_end(std::int32_t leaf) const;

  std::shared_ptr<const ScoredTree> contexts_;
  std::vector<std::int32_t> ends_;
  std::vector<std::shared_ptr<const ScoredTree>> blocks_;
  Limits limits_;
  std::vector<std::int32_t> leaves_;
  std::int32_t query_base_ = 0;
  std::int32_t max_query_depth_ = 0;
  Units units_;
};

}  // namespace iclperm
