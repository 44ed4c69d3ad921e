// Which keys stand at TILE positions of a path, from the root on: where each lies in the pool or the pack.
//
// For one instruction set, as simd.hpp.
#pragma once

#include <limits>

#include "tile_products.hpp"
#include "tree_attention.hpp"

namespace iclperm::ICLPERM_ISA {
namespace {

constexpr std::int64_t NO_ROW = std::numeric_limits<std::int64_t>::min();

// The keys of one tile of a path: row r >= 0 is pool slot r, row r < 0 is pack row ~r, NO_ROW lies past the path's end.
struct PathTile {
  std::int64_t rows[TILE];
};

// Pool slots of a tile that another one at the same positions does not have there.
inline std::int64_t own_slots(const PathTile& tile, const PathTile& other) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < TILE; ++i) count += (tile.rows[i] >= 0) & (tile.rows[i] != other.rows[i]);
  return count;
}

class Path {
 public:
  Path(const TreeAttention& call, const Block& block)
      : visits_(call.visits),
        rows_(call.query_rows),
        own_begin_(visits_.row_offsets[block.visit]),
        own_pos_(visits_.pos[block.visit]),
        first_pos_(position(block.row_begin)),
        length_(position(block.row_end - 1) + 1) {}

  // Of a row of q.
  std::int64_t position(std::int64_t row) const { return own_pos_ + rows_[row] - own_begin_; }

  // Whether a row of the block sees a key at positions [first, first + TILE).
  bool reaches(std::int64_t first, std::int64_t window) const {
    return first < length_ && (window == 0 || first_pos_ - window + 1 < first + TILE);
  }

  // The tile at positions [first, first + TILE). The cursor stands at or before `first` and moves on.
  void tile(std::int64_t first, Cursor& cursor, PathTile& tile) const {
    const std::int64_t end = min(first + TILE, length_);
    const std::int64_t ancestors_end = min(end, own_pos_);
    std::int64_t pos = first;
    while (pos < ancestors_end) {
      const std::int64_t span = cursor.span;
      const std::int64_t shift = visits_.span_begin[span] - cursor.position;
      const std::int64_t span_end = visits_.span_end[span] - shift;
      const bool pooled = visits_.span_source[span] == 0;
      for (; pos < min(ancestors_end, span_end); ++pos) tile.rows[pos - first] = pooled ? pos + shift : ~(pos + shift);
      if (pos >= span_end) cursor = {cursor.span + 1, span_end};
    }
    for (; pos < end; ++pos) tile.rows[pos - first] = ~(own_begin_ + pos - own_pos_);
    for (; pos < first + TILE; ++pos) tile.rows[pos - first] = NO_ROW;
  }

  std::int64_t first_pos() const { return first_pos_; }
  std::int64_t length() const { return length_; }

 private:
  const Visits& visits_;
  const std::int64_t* const rows_;
  const std::int64_t own_begin_, own_pos_, first_pos_, length_;
};

}  // namespace
}  // namespace iclperm::ICLPERM_ISA
