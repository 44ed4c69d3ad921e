#include "prefix_tree.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace iclperm {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

struct RowView {
  const std::int32_t* tokens;
  std::int32_t length;
};

// Length of the common prefix; 8 tokens a step, since most compared rows share hundreds.
std::int32_t common_prefix(const RowView& a, const RowView& b) {
  const std::int32_t n = std::min(a.length, b.length);
  std::int32_t i = 0;
  while (i + 8 <= n && std::memcmp(a.tokens + i, b.tokens + i, 8 * sizeof(std::int32_t)) == 0) i += 8;
  while (i < n && a.tokens[i] == b.tokens[i]) ++i;
  return i;
}

bool before(const RowView& a, const RowView& b, std::int32_t shared) {
  const RowView rest_a{a.tokens + shared, a.length - shared}, rest_b{b.tokens + shared, b.length - shared};
  const std::int32_t i = common_prefix(rest_a, rest_b);
  if (i == rest_a.length || i == rest_b.length) return rest_a.length < rest_b.length;
  return rest_a.tokens[i] < rest_b.tokens[i];
}

// Sorts rows lexicographically by most significant digit, a digit being two tokens: compact keys are sorted, not rows
// that lie anywhere in memory. Groups too small for that are compared row by row.
class RowSorter {
 public:
  explicit RowSorter(const std::vector<RowView>& rows) : rows_(rows), order_(rows.size()) {
    std::iota(order_.begin(), order_.end(), std::int64_t{0});
  }

  std::vector<std::int64_t> sort() {
    std::vector<Group> open{{0, order_.size(), 0}};
    while (!open.empty()) {
      const Group group = open.back();
      open.pop_back();
      if (group.end - group.begin < kSmall) {
        compare(group);
      } else {
        split(group, open);
      }
    }
    return std::move(order_);
  }

 private:
  struct Group {
    std::size_t begin, end;
    std::int32_t shared;
  };
  struct Keyed {
    std::uint64_t key;
    std::int64_t row;
    bool operator<(const Keyed& other) const { return key < other.key; }
  };
  static constexpr std::size_t kSmall = 24;

  void compare(const Group& group) {
    std::sort(order_.begin() + offset(group.begin), order_.begin() + offset(group.end),
              [&](std::int64_t a, std::int64_t b) { return before(rows_[at(a)], rows_[at(b)], group.shared); });
  }

  void split(const Group& group, std::vector<Group>& open) {
    const std::int32_t shared = shared_by_all(group);
    keyed_.clear();
    for (std::size_t i = group.begin; i < group.end; ++i)
      keyed_.push_back({digit(rows_[at(order_[i])], shared), order_[i]});
    std::sort(keyed_.begin(), keyed_.end());
    for (std::size_t i = 0, first = 0; i < keyed_.size(); ++i) {
      order_[group.begin + i] = keyed_[i].row;
      const bool ends = i + 1 == keyed_.size() || keyed_[i + 1].key != keyed_[i].key;
      if (!ends) continue;
      const bool rows_go_on = (keyed_[i].key & 0xffffffffU) != 0;
      if (rows_go_on && i > first) open.push_back({group.begin + first, group.begin + i + 1, shared + 2});
      first = i + 1;
    }
  }

  std::int32_t shared_by_all(const Group& group) const {
    const RowView& first = rows_[at(order_[group.begin])];
    RowView rest{first.tokens + group.shared, first.length - group.shared};
    const auto shorten = [&](std::size_t i) {
      const RowView& row = rows_[at(order_[i])];
      rest.length = common_prefix(rest, {row.tokens + group.shared, row.length - group.shared});
    };
    // Two rows tell most groups that share nothing more; only the others are read whole.
    shorten(group.end - 1);
    shorten(group.begin + (group.end - group.begin) / 2);
    for (std::size_t i = group.begin + 1; i < group.end && rest.length > 2; ++i) shorten(i);
    return group.shared + (rest.length > 2 ? rest.length : 0);
  }

  // Two tokens from `depth` on, each plus one; 0 where the row has ended.
  static std::uint64_t digit(const RowView& row, std::int32_t depth) {
    const auto token = [&](std::int32_t d) -> std::uint64_t {
      return d < row.length ? static_cast<std::uint64_t>(row.tokens[d]) + 1 : 0;
    };
    return token(depth) << 32 | token(depth + 1);
  }

  static std::ptrdiff_t offset(std::size_t i) { return static_cast<std::ptrdiff_t>(i); }

  const std::vector<RowView>& rows_;
  std::vector<std::int64_t> order_;
  std::vector<Keyed> keyed_;
};

// Rows in lexicographic order, each with the length of the prefix it shares with the row before it.
struct SortedRows {
  std::vector<RowView> rows;
  std::vector<std::int64_t> source;  // sorted place -> row number
  std::vector<std::int32_t> shared;
};

SortedRows sort_rows(const std::vector<RowView>& rows) {
  SortedRows sorted;
  sorted.source = RowSorter(rows).sort();
  sorted.rows.reserve(rows.size());
  for (const std::int64_t r : sorted.source) sorted.rows.push_back(rows[at(r)]);
  sorted.shared.assign(rows.size(), 0);
  for (std::size_t i = 1; i < rows.size(); ++i) sorted.shared[i] = common_prefix(sorted.rows[i - 1], sorted.rows[i]);
  return sorted;
}

// For every sorted row, the depths at which the tokens that it introduces are cut into nodes.
struct Cuts {
  std::vector<std::int64_t> offsets;
  std::vector<std::int32_t> depths;  // ascending within a row
};

using Cut = std::pair<std::int64_t, std::int32_t>;  // owner, depth

// Sorts cuts by owner (a counting sort) and depth, and drops repetitions.
Cuts group_cuts(const std::vector<Cut>& found, std::size_t num_rows) {
  std::vector<std::int64_t> place(num_rows + 1, 0);
  for (const Cut& cut : found) ++place[at(cut.first) + 1];
  std::partial_sum(place.begin(), place.end(), place.begin());
  std::vector<std::int32_t> depths(found.size());
  std::vector<std::int64_t> next(place.begin(), place.end() - 1);
  for (const Cut& cut : found) depths[at(next[at(cut.first)]++)] = cut.second;
  Cuts cuts;
  cuts.offsets.assign(num_rows + 1, 0);
  cuts.depths.reserve(found.size());
  for (std::size_t owner = 0; owner < num_rows; ++owner) {
    const auto begin = depths.begin() + place[owner], end = depths.begin() + place[owner + 1];
    std::sort(begin, end);
    std::unique_copy(begin, end, std::back_inserter(cuts.depths));
    cuts.offsets[owner + 1] = static_cast<std::int64_t>(cuts.depths.size());
  }
  return cuts;
}

// First pass. The tokens of the current path are owned by the rows that introduced them; a mark or a branch cuts the
// edge of its owner, which may be a row far above.
Cuts find_cuts(const SortedRows& sorted, std::span<const std::int64_t> mark_offsets,
               std::span<const std::int32_t> marks) {
  struct Segment {
    std::int64_t owner;
    std::int32_t from;
  };
  const std::size_t num_rows = sorted.rows.size();
  std::vector<Segment> path;
  std::vector<Cut> found;
  found.reserve(marks.size() + num_rows);
  const auto cut = [&](std::int32_t depth) {
    const auto after = std::partition_point(path.begin(), path.end(), [&](const Segment& s) { return s.from < depth; });
    found.emplace_back(std::prev(after)->owner, depth);
  };
  for (std::size_t i = 0; i < num_rows; ++i) {
    const std::int32_t shared = sorted.shared[i];
    while (!path.empty() && path.back().from >= shared) path.pop_back();
    if (sorted.rows[i].length > shared) {
      if (shared > 0) cut(shared);
      path.push_back({static_cast<std::int64_t>(i), shared});
    }
    const std::size_t row = at(sorted.source[i]);
    for (std::int64_t m = mark_offsets[row]; m < mark_offsets[row + 1]; ++m)
      if (marks[at(m)] > 0) cut(marks[at(m)]);
  }
  return group_cuts(found, num_rows);
}

// Nodes of the current path, root first.
using Path = std::vector<std::int32_t>;

// Second pass: write the nodes in preorder and show `visit(row, path)` the path of every row.
template <class Visit>
PrefixTree write_nodes(const SortedRows& sorted, const Cuts& cuts, Visit visit) {
  if (cuts.depths.size() >= at(std::numeric_limits<std::int32_t>::max()))
    throw std::length_error("the tree would have more than 2^31 nodes; split the requests");
  const std::size_t num_nodes = cuts.depths.size() + 1;
  std::int64_t num_tokens = 0;
  for (std::size_t i = 0; i < sorted.rows.size(); ++i) num_tokens += sorted.rows[i].length - sorted.shared[i];

  PrefixTree tree;
  tree.tokens.reserve(at(num_tokens));
  tree.token_offsets.reserve(num_nodes + 1);
  tree.parent.reserve(num_nodes);
  tree.depth.reserve(num_nodes);
  tree.parent.push_back(-1);
  tree.depth.push_back(0);
  tree.token_offsets.assign(2, 0);
  Path path{0};
  for (std::size_t i = 0; i < sorted.rows.size(); ++i) {
    std::int32_t from = sorted.shared[i];
    while (tree.end_depth(path.back()) > from) path.pop_back();
    for (std::int64_t c = cuts.offsets[i]; c < cuts.offsets[i + 1]; ++c) {
      const std::int32_t to = cuts.depths[at(c)];
      tree.tokens.insert(tree.tokens.end(), sorted.rows[i].tokens + from, sorted.rows[i].tokens + to);
      tree.token_offsets.push_back(tree.num_tokens());
      tree.parent.push_back(path.back());
      tree.depth.push_back(from);
      path.push_back(tree.num_nodes() - 1);
      from = to;
    }
    visit(sorted.source[i], tree, path);
  }
  tree.subtree_end.resize(num_nodes);
  for (std::int32_t n = tree.num_nodes() - 1; n >= 0; --n) {
    std::int32_t& end = tree.subtree_end[at(n)];
    end = std::max(end, n + 1);
    if (n > 0) {
      std::int32_t& above = tree.subtree_end[at(tree.parent[at(n)])];
      above = std::max(above, end);
    }
  }
  return tree;
}

// First node of the path whose tokens reach below `depth`; path.end() if none does.
Path::const_iterator first_below(const PrefixTree& tree, const Path& path, std::int32_t depth) {
  return std::partition_point(path.begin(), path.end(), [&](std::int32_t n) { return tree.end_depth(n) <= depth; });
}

std::int32_t row_length(const Rows& rows, std::int64_t r) {
  const std::int64_t n = rows.offsets[at(r) + 1] - rows.offsets[at(r)];
  if (n > std::numeric_limits<std::int32_t>::max())
    throw std::invalid_argument("row " + std::to_string(r) + " has " + std::to_string(n) +
                                " tokens; 2^31 are too many");
  return static_cast<std::int32_t>(n);
}

struct Pair {
  std::int64_t token;
  std::int32_t id;
};

// Equal pairs become one target, numbered in token order (a counting sort) and by id within a token.
void number_targets(const std::vector<Pair>& pairs, std::int64_t num_tokens, Targets& targets) {
  std::vector<std::int64_t> place(at(num_tokens) + 1, 0);
  for (const Pair& pair : pairs) ++place[at(pair.token) + 1];
  std::partial_sum(place.begin(), place.end(), place.begin());
  std::vector<std::int64_t> by_token(pairs.size());
  std::vector<std::int64_t> next(place.begin(), place.end() - 1);
  for (std::size_t i = 0; i < pairs.size(); ++i)
    by_token[at(next[at(pairs[i].token)]++)] = static_cast<std::int64_t>(i);
  targets.row_items.resize(pairs.size());
  for (std::size_t token = 0; token < at(num_tokens); ++token) {
    const auto begin = by_token.begin() + place[token], end = by_token.begin() + place[token + 1];
    std::sort(begin, end, [&](std::int64_t a, std::int64_t b) { return pairs[at(a)].id < pairs[at(b)].id; });
    for (auto item = begin; item != end; ++item) {
      const Pair& pair = pairs[at(*item)];
      if (item == begin || pair.id != targets.id.back()) {
        targets.token.push_back(pair.token);
        targets.id.push_back(pair.id);
      }
      targets.row_items[at(*item)] = targets.size() - 1;
    }
  }
}

}  // namespace

void Rows::validate(const char* what) const {
  const std::string name(what);
  if (offsets.empty()) throw std::invalid_argument(name + " offsets are empty; CSR needs one more offset than rows");
  if (offsets.front() != 0)
    throw std::invalid_argument(name + " row 0 starts at " + std::to_string(offsets.front()) + "; offsets start at 0");
  for (std::int64_t r = 0; r < size(); ++r)
    if (offsets[at(r) + 1] < offsets[at(r)])
      throw std::invalid_argument(name + " row " + std::to_string(r) + " ends at " +
                                  std::to_string(offsets[at(r) + 1]) + " before it starts at " +
                                  std::to_string(offsets[at(r)]) + "; offsets must not decrease");
  if (offsets.back() != static_cast<std::int64_t>(tokens.size()))
    throw std::invalid_argument(name + " row " + std::to_string(size() - 1) + " ends at " +
                                std::to_string(offsets.back()) + " but there are " + std::to_string(tokens.size()) +
                                " tokens");
  const auto negative = std::find_if(tokens.begin(), tokens.end(), [](std::int32_t id) { return id < 0; });
  if (negative != tokens.end()) {
    const std::int64_t place = negative - tokens.begin();
    const auto row = std::upper_bound(offsets.begin(), offsets.end(), place) - offsets.begin() - 1;
    throw std::invalid_argument(name + " row " + std::to_string(row) + " holds the negative token id " +
                                std::to_string(*negative));
  }
}

std::int32_t PrefixTree::max_depth() const {
  std::int32_t deepest = 0;
  for (std::int32_t n = 0; n < num_nodes(); ++n) deepest = std::max(deepest, end_depth(n));
  return deepest;
}

std::int32_t PrefixTree::node_of_token(std::int64_t token) const {
  const auto after = std::upper_bound(token_offsets.begin(), token_offsets.end(), token);
  return static_cast<std::int32_t>(after - token_offsets.begin()) - 1;
}

std::int32_t PrefixTree::common_ancestor(std::int32_t a, std::int32_t b) const {
  while (a != b) {
    // Preorder numbers: the larger one cannot be an ancestor of the smaller.
    if (a > b) {
      a = parent[at(a)];
    } else {
      b = parent[at(b)];
    }
  }
  return a;
}

void PrefixTree::check() const {
  const auto broken = [](std::int32_t n, const char* what) {
    throw std::logic_error("prefix tree: node " + std::to_string(n) + " " + what);
  };
  const std::size_t nodes = parent.size();
  if (nodes == 0 || depth.size() != nodes || subtree_end.size() != nodes || token_offsets.size() != nodes + 1)
    throw std::logic_error("prefix tree: arrays differ in length");
  if (parent[0] != -1 || depth[0] != 0 || token_offsets[1] != 0 || subtree_end[0] != num_nodes())
    broken(0, "is no root");
  for (std::int32_t n = 1; n < num_nodes(); ++n) {
    const std::int32_t up = parent[at(n)];
    if (up < 0 || up >= n) broken(n, "has a parent that does not precede it");
    if (edge_length(n) <= 0) broken(n, "has an empty edge");
    if (depth[at(n)] != end_depth(up)) broken(n, "does not start where its parent ends");
    if (subtree_end[at(n)] <= n || subtree_end[at(n)] > subtree_end[at(up)]) broken(n, "leaves its parent's subtree");
    const bool first_child = n == up + 1;
    if (!first_child && token_offsets[at(n)] <= token_offsets[at(up)]) broken(n, "is out of preorder");
  }
  if (token_offsets.back() != num_tokens())
    throw std::logic_error("prefix tree: token offsets do not end at the tokens");
}

PrefixTree build_tree(const Rows& rows, std::span<const std::int64_t> mark_offsets, std::span<const std::int32_t> marks,
                      std::vector<std::int32_t>& mark_node) {
  rows.validate("token");
  if (static_cast<std::int64_t>(mark_offsets.size()) != rows.size() + 1 || mark_offsets.front() != 0 ||
      mark_offsets.back() != static_cast<std::int64_t>(marks.size()) ||
      !std::is_sorted(mark_offsets.begin(), mark_offsets.end()))
    throw std::invalid_argument("mark offsets are not the CSR offsets of " + std::to_string(marks.size()) +
                                " marks over " + std::to_string(rows.size()) + " rows");
  // Tokens after the last mark of a row reach no node.
  std::vector<RowView> views(at(rows.size()));
  for (std::int64_t r = 0; r < rows.size(); ++r) {
    const std::int32_t length = row_length(rows, r);
    std::int32_t reach = 0;
    for (std::int64_t m = mark_offsets[at(r)]; m < mark_offsets[at(r) + 1]; ++m) {
      const std::int32_t mark = marks[at(m)];
      if (mark < 0 || mark > length)
        throw std::invalid_argument("row " + std::to_string(r) + " is marked at depth " + std::to_string(mark) +
                                    " but has " + std::to_string(length) + " tokens");
      reach = std::max(reach, mark);
    }
    views[at(r)] = {rows.tokens.data() + rows.offsets[at(r)], reach};
  }
  const SortedRows sorted = sort_rows(views);
  const Cuts cuts = find_cuts(sorted, mark_offsets, marks);
  mark_node.assign(marks.size(), 0);
  return write_nodes(sorted, cuts, [&](std::int64_t row, const PrefixTree& tree, const Path& path) {
    for (std::int64_t m = mark_offsets[at(row)]; m < mark_offsets[at(row) + 1]; ++m)
      mark_node[at(m)] = *std::prev(first_below(tree, path, marks[at(m)]));
  });
}

ScoredTree build_requests(const Rows& rows, std::span<const std::int64_t> score_begin) {
  rows.validate("request");
  if (static_cast<std::int64_t>(score_begin.size()) != rows.size())
    throw std::invalid_argument(std::to_string(score_begin.size()) + " continuation starts for " +
                                std::to_string(rows.size()) + " requests");
  std::vector<RowView> fed(at(rows.size()));
  std::vector<std::int64_t> mark_offsets(at(rows.size()) + 1);
  std::vector<std::int32_t> ends(at(rows.size()));
  ScoredTree scored;
  scored.targets.row_offsets.assign(at(rows.size()) + 1, 0);
  for (std::int64_t r = 0; r < rows.size(); ++r) {
    const std::int32_t length = row_length(rows, r);
    if (score_begin[at(r)] < 1 || score_begin[at(r)] >= length)
      throw std::invalid_argument("request row " + std::to_string(r) + " of " + std::to_string(length) +
                                  " tokens cannot be scored from token " + std::to_string(score_begin[at(r)]) +
                                  "; both context and continuation need at least one token");
    fed[at(r)] = {rows.tokens.data() + rows.offsets[at(r)], length - 1};
    ends[at(r)] = length - 1;
    mark_offsets[at(r) + 1] = r + 1;
    scored.targets.row_offsets[at(r) + 1] = scored.targets.row_offsets[at(r)] + length - score_begin[at(r)];
  }
  const SortedRows sorted = sort_rows(fed);
  const Cuts cuts = find_cuts(sorted, mark_offsets, ends);
  std::vector<Pair> pairs(at(scored.targets.row_offsets.back()));
  scored.tree = write_nodes(sorted, cuts, [&](std::int64_t row, const PrefixTree& tree, const Path& path) {
    const std::int32_t* tokens = fed[at(row)].tokens;
    std::int64_t item = scored.targets.row_offsets[at(row)];
    for (std::int64_t p = score_begin[at(row)] - 1; p < fed[at(row)].length; ++p, ++item) {
      const std::int32_t node = *first_below(tree, path, static_cast<std::int32_t>(p));
      const std::int64_t token = tree.token_offsets[at(node)] + p - tree.depth[at(node)];
      pairs[at(item)] = {token, tokens[p + 1]};
    }
  });
  number_targets(pairs, scored.tree.num_tokens(), scored.targets);
  return scored;
}

}  // namespace iclperm
