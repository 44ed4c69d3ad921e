#include "simd.hpp"
#include "tree_attention.hpp"

namespace iclperm::ICLPERM_ISA {
namespace {

// The register block: ROWS x VECS accumulators, VECS vectors of the right side and one splat fill the registers.
constexpr int ROWS = 6;
constexpr int VECS = LANES == 16 ? 4 : 2;
static_assert(LANES <= MAX_LANES && TILE % LANES == 0);

constexpr std::int64_t NO_ROW = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t FAR = std::numeric_limits<std::int64_t>::max();

// The keys of one tile of a path: row r >= 0 is pool slot r, row r < 0 is pack row ~r, NO_ROW lies past the path's end.
struct PathTile {
  std::int64_t rows[TILE];
};

inline std::int64_t min(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t max(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
inline std::int64_t clamp(std::int64_t x, std::int64_t low, std::int64_t high) { return min(max(x, low), high); }
inline std::int64_t vectors(std::int64_t floats) { return (floats + LANES - 1) / LANES; }

template <typename T>
inline const T* row_of(const ConstHeadRows& x, std::int64_t row, std::int64_t head) {
  return static_cast<const T*>(x.data) + row * x.row_stride + head * x.head_stride;
}

// c[NUM_ROWS, NUM_VECS] (+)= a[NUM_ROWS, depth] x b[depth, NUM_VECS]: one chain of fma per element.
template <int NUM_ROWS, int NUM_VECS>
void multiply_block(const float* a, std::int64_t a_stride, const float* b, std::int64_t b_stride, std::int64_t depth,
                    float* c, std::int64_t c_stride, bool accumulate) {
  vfloat sum[NUM_ROWS][NUM_VECS];
#pragma GCC unroll 6
  for (int r = 0; r < NUM_ROWS; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < NUM_VECS; ++v) sum[r][v] = accumulate ? load(c + r * c_stride + v * LANES) : vfloat{};
  }
  for (std::int64_t i = 0; i < depth; ++i) {
    vfloat right[NUM_VECS];
#pragma GCC unroll 4
    for (int v = 0; v < NUM_VECS; ++v) right[v] = load(b + i * b_stride + v * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < NUM_ROWS; ++r) {
      const vfloat left = splat(a[r * a_stride + i]);
#pragma GCC unroll 4
      for (int v = 0; v < NUM_VECS; ++v) sum[r][v] = fma(left, right[v], sum[r][v]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < NUM_ROWS; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < NUM_VECS; ++v) store(c + r * c_stride + v * LANES, sum[r][v]);
  }
}

using MultiplyBlock = void (*)(const float*, std::int64_t, const float*, std::int64_t, std::int64_t, float*,
                               std::int64_t, bool);

template <int NUM_VECS>
inline MultiplyBlock block_of_rows(int num_rows) {
  constexpr MultiplyBlock by_rows[ROWS] = {multiply_block<1, NUM_VECS>, multiply_block<2, NUM_VECS>,
                                           multiply_block<3, NUM_VECS>, multiply_block<4, NUM_VECS>,
                                           multiply_block<5, NUM_VECS>, multiply_block<6, NUM_VECS>};
  return by_rows[num_rows - 1];
}

inline MultiplyBlock block_of(int num_rows, std::int64_t num_vecs) {
  if constexpr (VECS == 4) {
    if (num_vecs == 4) return block_of_rows<4>(num_rows);
    if (num_vecs == 3) return block_of_rows<3>(num_rows);
  }
  return num_vecs == 2 ? block_of_rows<2>(num_rows) : block_of_rows<1>(num_rows);
}

// c (+)= a x b for up to ROWS rows and any number of vectors.
inline void multiply(int num_rows, std::int64_t num_vecs, const float* a, std::int64_t a_stride, const float* b,
                     std::int64_t b_stride, std::int64_t depth, float* c, std::int64_t c_stride, bool accumulate) {
  for (std::int64_t v = 0; v < num_vecs; v += VECS) {
    const MultiplyBlock block = block_of(num_rows, min(VECS, num_vecs - v));
    block(a, a_stride, b + v * LANES, b_stride, depth, c + v * LANES, c_stride, accumulate);
  }
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

template <typename T>
class Gather {
 public:
  Gather(const TreeAttention& call, std::int64_t kv_head) : call_(call), kv_head_(kv_head) {}

  // Brings keys and values of the tile into the scratch, from the first position where it differs from what is there.
  void operator()(const PathTile& tile, Scratch& scratch) const {
    std::int64_t column = 0;
    if (scratch.tile_kv_head == kv_head_) {
      while (column < TILE && tile.rows[column] == scratch.tile_rows[column]) ++column;
    }
    for (std::int64_t c = column / LANES * LANES; c < TILE && tile.rows[c] != NO_ROW; c += LANES) {
      keys(tile.rows + c, scratch.keys + c);
    }
    const std::int64_t stride = vectors(call_.head_dim) * LANES;
    for (std::int64_t c = column; c < TILE && tile.rows[c] != NO_ROW; ++c) {
      const T* value = key_or_value(call_.v_pool, call_.v_new, tile.rows[c]);
      for (std::int64_t i = 0; i < call_.head_dim; i += LANES) {
        store(scratch.values + c * stride + i, load_some(value + i, call_.head_dim - i));
      }
    }
    std::memcpy(scratch.tile_rows, tile.rows, sizeof tile.rows);
    scratch.tile_kv_head = kv_head_;
  }

 private:
  const T* key_or_value(const ConstHeadRows& pool, const ConstHeadRows& pack, std::int64_t row) const {
    return row >= 0 ? row_of<T>(pool, row, kv_head_) : row_of<T>(pack, ~row, kv_head_);
  }

  // LANES keys become LANES columns of the transposed tile.
  void keys(const std::int64_t* rows, float* columns) const {
    for (std::int64_t i = 0; i < call_.head_dim; i += LANES) {
      vfloat x[LANES];
      for (int lane = 0; lane < LANES; ++lane) {
        x[lane] = rows[lane] == NO_ROW
                      ? vfloat{}
                      : load_some(key_or_value(call_.k_pool, call_.k_new, rows[lane]) + i, call_.head_dim - i);
      }
      transpose(x);
      for (std::int64_t lane = 0; lane < min(LANES, call_.head_dim - i); ++lane) {
        store(columns + (i + lane) * TILE, x[lane]);
      }
    }
  }

  const TreeAttention& call_;
  const std::int64_t kv_head_;
};

// The tile's columns that a line sees.
struct Seen {
  std::int64_t begin, end;
  bool empty() const { return begin >= end; }
};

class Lines {
 public:
  Lines(const TreeAttention& call, Scratch& scratch)
      : call_(call), scratch_(scratch), depth_(call.head_dim), vecs_(vectors(depth_)), stride_(vecs_ * LANES) {}

  template <typename T>
  void start(std::int64_t line, const T* query, std::int64_t pos) {
    const vfloat scaling = splat(call_.scaling);
    for (std::int64_t i = 0; i < depth_; i += LANES) {
      store_some(scratch_.queries + line * depth_ + i, depth_ - i, scaling * load_some(query + i, depth_ - i));
      store(scratch_.accumulator + line * stride_ + i, vfloat{});
    }
    store(scratch_.sums + line * LANES, vfloat{});
    scratch_.maxima[line] = -INF;
    scratch_.line_pos[line] = pos;
  }

  template <typename T>
  void finish(std::int64_t line, T* out) const {
    const vfloat sum = splat(sum_lanes(load(scratch_.sums + line * LANES)));
    for (std::int64_t i = 0; i < depth_; i += LANES) {
      store_some(out + i, depth_ - i, load(scratch_.accumulator + line * stride_ + i) / sum);
    }
  }

  // Lines [begin, end) attend to the gathered tile at positions [first, first + TILE).
  void attend(std::int64_t begin, std::int64_t end, std::int64_t first) {
    for (std::int64_t line = begin; line < end; line += ROWS) {
      attend_group(line, static_cast<int>(min(ROWS, end - line)), first);
    }
  }

 private:
  Seen seen(std::int64_t line, std::int64_t first) const {
    const std::int64_t pos = scratch_.line_pos[line] - first;
    return {call_.window > 0 ? clamp(pos - call_.window + 1, 0, TILE) : 0, clamp(pos + 1, 0, TILE)};
  }

  void attend_group(std::int64_t line, int num_lines, std::int64_t first) {
    Seen by_line[ROWS];
    Seen any = {TILE, 0};
    Seen all = {0, TILE};
    for (int r = 0; r < num_lines; ++r) {
      const Seen one = by_line[r] = seen(line + r, first);
      if (!one.empty()) any = {min(any.begin, one.begin), max(any.end, one.end)};
      all = {max(all.begin, one.begin), min(all.end, one.end)};
    }
    if (any.empty()) return;

    alignas(VECTOR_ALIGNMENT) float scores[ROWS * TILE];
    const std::int64_t skipped = any.begin / LANES * LANES;
    multiply(num_lines, vectors(any.end - skipped), scratch_.queries + line * depth_, depth_, scratch_.keys + skipped,
             TILE, depth_, scores + skipped, TILE, false);
    for (int r = 0; r < num_lines; ++r) {
      if (!by_line[r].empty()) soften(scores + r * TILE, by_line[r], line + r);
    }
    // What all lines see is multiplied together; before and after it, each line by itself, in the order of positions.
    if (all.empty()) all = {TILE, TILE};
    for (int r = 0; r < num_lines; ++r) {
      add_values(scores + r * TILE, {by_line[r].begin, min(by_line[r].end, all.begin)}, line + r, 1);
    }
    add_values(scores, all, line, num_lines);
    for (int r = 0; r < num_lines; ++r) {
      add_values(scores + r * TILE, {max(by_line[r].begin, all.end), by_line[r].end}, line + r, 1);
    }
  }

  // Scores become probabilities up to the factor exp(maximum), which moves on when the tile raises the maximum.
  void soften(float* scores, Seen seen, std::int64_t line) {
    const std::int64_t first = seen.begin / LANES;
    const std::int64_t last = vectors(seen.end);
    vfloat highest = splat(-INF);
    for (std::int64_t v = first; v < last; ++v) {
      const vint column = lane_index() + static_cast<std::int32_t>(v * LANES);
      const vint visible =
          (column >= static_cast<std::int32_t>(seen.begin)) & (column < static_cast<std::int32_t>(seen.end));
      const vfloat score = select(visible, capped(load(scores + v * LANES), call_.softcap), splat(-INF));
      store(scores + v * LANES, score);
      highest = max(highest, score);
    }
    raise_maximum(line, max_lanes(highest));
    const vfloat maximum = splat(scratch_.maxima[line]);
    vfloat sum = load(scratch_.sums + line * LANES);
    for (std::int64_t v = first; v < last; ++v) {
      const vfloat probability = exp(load(scores + v * LANES) - maximum);
      store(scores + v * LANES, probability);
      sum += probability;
    }
    store(scratch_.sums + line * LANES, sum);
  }

  // Not rescaling by exp(0) = 1 where the maximum stays leaves every bit as it is.
  void raise_maximum(std::int64_t line, float highest) {
    float& maximum = scratch_.maxima[line];
    if (!(highest > maximum)) return;
    const vfloat factor = exp(splat(maximum - highest));
    float* accumulator = scratch_.accumulator + line * stride_;
    for (std::int64_t i = 0; i < stride_; i += LANES) store(accumulator + i, factor * load(accumulator + i));
    store(scratch_.sums + line * LANES, factor * load(scratch_.sums + line * LANES));
    maximum = highest;
  }

  void add_values(const float* probabilities, Seen seen, std::int64_t line, int num_lines) {
    if (seen.empty()) return;
    multiply(num_lines, vecs_, probabilities + seen.begin, TILE, scratch_.values + seen.begin * stride_, stride_,
             seen.end - seen.begin, scratch_.accumulator + line * stride_, stride_, true);
  }

  const TreeAttention& call_;
  Scratch& scratch_;
  const std::int64_t depth_, vecs_, stride_;
};

// Calls each(line, row, head) for the lines of a block: a row's heads stand together.
template <typename Each>
inline void for_lines(const Block& block, std::int64_t kv_head, std::int64_t group_size, const Each& each) {
  std::int64_t line = block.line_begin;
  for (std::int64_t row = block.row_begin; row < block.row_end; ++row) {
    for (std::int64_t g = 0; g < group_size; ++g) each(line++, row, kv_head * group_size + g);
  }
}

template <typename T>
void attend_as(const TreeAttention& call, const WorkItem& item, Scratch& scratch) {
  Lines lines(call, scratch);
  const Gather<T> gather(call, item.kv_head);
  const std::int64_t group_size = call.q.num_heads / call.k_new.num_heads;
  std::int64_t first = FAR;
  std::int64_t longest = 0;
  for (std::int64_t b = 0; b < item.num_blocks; ++b) {
    const Block& block = item.blocks[b];
    const Path path(call, block);
    scratch.cursors[b] = {call.visits.span_offsets[block.visit], 0};
    first = min(first, call.window > 0 ? max(path.first_pos() - call.window + 1, 0) / TILE * TILE : 0);
    longest = max(longest, path.length());
    for_lines(block, item.kv_head, group_size, [&](std::int64_t line, std::int64_t row, std::int64_t head) {
      lines.start(line, row_of<T>(call.q, row, head), path.position(row));
    });
  }

  for (; first < longest; first += TILE) {
    PathTile shared;
    std::int64_t begin = 0;
    std::int64_t end = 0;  // lines [begin, end) wait to attend to the shared tile
    const auto attend_shared = [&] {
      if (begin < end) {
        gather(shared, scratch);
        lines.attend(begin, end, first);
      }
      begin = end;
    };
    for (std::int64_t b = 0; b < item.num_blocks; ++b) {
      const Block& block = item.blocks[b];
      const Path path(call, block);
      if (!path.reaches(first, call.window)) continue;
      PathTile own;
      path.tile(first, scratch.cursors[b], own);
      if (begin == end || end != block.line_begin || std::memcmp(own.rows, shared.rows, sizeof own.rows) != 0) {
        attend_shared();
        begin = block.line_begin;
        shared = own;
      }
      end = block.line_begin + block.num_lines;
    }
    attend_shared();
  }

  for (std::int64_t b = 0; b < item.num_blocks; ++b) {
    for_lines(item.blocks[b], item.kv_head, group_size, [&](std::int64_t line, std::int64_t row, std::int64_t head) {
      T* out = static_cast<T*>(call.out.data) + row * call.out.row_stride + head * call.out.head_stride;
      lines.finish(line, out);
    });
  }
}

}  // namespace

void attend(const TreeAttention& call, const WorkItem& item, Scratch& scratch) {
  if (call.element == Element::float32) {
    attend_as<float>(call, item, scratch);
  } else {
    attend_as<bfloat16>(call, item, scratch);
  }
}

}  // namespace iclperm::ICLPERM_ISA
