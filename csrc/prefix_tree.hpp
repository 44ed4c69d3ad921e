// Rows of token ids become a radix tree in flat preorder arrays.
//
// A row is marked at one or more depths (for a plain row: its end). Every marked prefix ends at a node, so
// equal prefixes meet at the same node whatever rows they come from. Rows are sorted first; the tree therefore
// depends on the set of marked prefixes alone, never on the order in which the rows were given.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace iclperm {

// Token rows as CSR: row r is tokens[offsets[r], offsets[r + 1]).
struct Rows {
  std::span<const std::int32_t> tokens;
  std::span<const std::int64_t> offsets;

  std::int64_t size() const { return static_cast<std::int64_t>(offsets.size()) - 1; }
  // Throws std::invalid_argument naming the row that breaks CSR order or holds a negative id.
  void validate(const char* what) const;
};

struct PrefixTree {
  std::vector<std::int32_t> tokens;         // [T] edge tokens; token t is its own tin
  std::vector<std::int64_t> token_offsets;  // [N + 1] node n owns tokens [token_offsets[n], token_offsets[n + 1])
  std::vector<std::int32_t> parent;         // [N] node 0 is the root: empty edge, parent -1
  std::vector<std::int32_t> depth;          // [N] tokens above the edge = position of its first token
  std::vector<std::int32_t> subtree_end;    // [N] one past the last descendant: next sibling in preorder

  std::int32_t num_nodes() const { return static_cast<std::int32_t>(parent.size()); }
  std::int64_t num_tokens() const { return static_cast<std::int64_t>(tokens.size()); }
  std::int32_t edge_length(std::int32_t n) const {
    return static_cast<std::int32_t>(token_offsets[static_cast<std::size_t>(n) + 1] -
                                     token_offsets[static_cast<std::size_t>(n)]);
  }
  std::int32_t end_depth(std::int32_t n) const { return depth[static_cast<std::size_t>(n)] + edge_length(n); }
  bool is_leaf(std::int32_t n) const { return subtree_end[static_cast<std::size_t>(n)] == n + 1; }
  std::int32_t max_depth() const;
  // The node that owns a token.
  std::int32_t node_of_token(std::int64_t token) const;
  // Deepest common ancestor.
  std::int32_t common_ancestor(std::int32_t a, std::int32_t b) const;
  // Throws std::logic_error if any invariant of the arrays is broken.
  void check() const;
};

// What is asked of a tree: distinct pairs (token that predicts, token id predicted), and for every row the
// numbers of the pairs whose log-probabilities add up to its log-likelihood.
struct Targets {
  std::vector<std::int64_t> token;        // [X] tree token, ascending
  std::vector<std::int32_t> id;           // [X] predicted token id
  std::vector<std::int64_t> row_offsets;  // [R + 1]
  std::vector<std::int64_t> row_items;    // target numbers, in the order of the row's scored tokens

  std::int64_t size() const { return static_cast<std::int64_t>(token.size()); }
};

struct ScoredTree {
  PrefixTree tree;
  Targets targets;
};

// Tree of the rows cut at their marks. marks[mark_offsets[r], mark_offsets[r + 1]) are depths in [0, length of r];
// mark_node (one entry a mark) receives the node at which that prefix ends. Cost O(tokens + marks + R log R compares).
PrefixTree build_tree(const Rows& rows, std::span<const std::int64_t> mark_offsets, std::span<const std::int32_t> marks,
                      std::vector<std::int32_t>& mark_node);

// Tree of scoring requests: row r is a prompt and its continuation, which begins at score_begin[r] >= 1. All but the
// last token are fed; each token of the continuation is a target of the token before it.
ScoredTree build_requests(const Rows& rows, std::span<const std::int64_t> score_begin);

}  // namespace iclperm
