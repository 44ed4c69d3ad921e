#include "path_tiles.hpp"
#include "tile_products.hpp"
#include "tree_attention.hpp"

namespace iclperm::ICLPERM_ISA {
namespace {

constexpr float LOG2_E = 1.44269504088896341f;
constexpr std::int64_t MANY_OWN = TILE / 8;  // slots: where fewer come from memory, laying keys out is sooner done
constexpr std::int64_t FAR = std::numeric_limits<std::int64_t>::max();

// Where the keys and values of a tile lie.
template <typename T>
struct Places {
  const T* keys[TILE];
  const T* values[TILE];
};

template <typename T>
inline const T* row_of(const ConstHeadRows& x, std::int64_t row, std::int64_t head) {
  return static_cast<const T*>(x.data) + row * x.row_stride + head * x.head_stride;
}

template <typename T>
class Gather {
  using E = typename OperandOf<T>::Type;

 public:
  Gather(const TreeAttention& call, std::int64_t kv_head) : call_(call), kv_head_(kv_head) {}

  // Brings keys and values of the tile into the scratch, from the first position where it differs from what is there.
  void operator()(const PathTile& tile, Scratch& scratch) const {
    std::int64_t column = 0;
    if (scratch.tile_kv_head == kv_head_) {
      while (column < TILE && tile.rows[column] == scratch.tile_rows[column]) ++column;
    }
    for (std::int64_t c = column / LANES * LANES; c < TILE && tile.rows[c] != NO_ROW; c += LANES) {
      keys(tile.rows + c, reinterpret_cast<const T*>(scratch.zeros), scratch.keys + c);
    }
    const std::int64_t stride = vectors(call_.head_dim) * LANES;
    std::int64_t c = column / WIDTH<E>;
    for (; c * WIDTH<E> < TILE && tile.rows[c * WIDTH<E>] != NO_ROW; ++c) {
      values(tile.rows + c * WIDTH<E>, scratch.values + c * stride);
      if constexpr (IN_TILES<E>) scratch.has_infinite[c] = has_infinite(as<Pair>(scratch.values) + c * stride, stride);
    }
    if constexpr (IN_TILES<E>) {  // past the path's end, as far as a processor's tile goes, zeros are multiplied by zero
      for (; c % LANES != 0; ++c) {
        std::memset(scratch.values + c * stride, 0, static_cast<std::size_t>(stride) * sizeof(float));
        scratch.has_infinite[c] = false;
      }
    }
    std::memcpy(scratch.tile_rows, tile.rows, sizeof tile.rows);
    scratch.tile_kv_head = kv_head_;
  }

  // How many blocks of LANES keys from the c-th on are in the scratch; what the next tile has as well is brought there.
  std::int64_t brought(const PathTile& tile, const PathTile& next, std::int64_t c, Scratch& scratch) const {
    if (scratch.tile_kv_head != kv_head_) {
      for (std::int64_t& row : scratch.tile_rows) row = NO_ROW;
      scratch.tile_kv_head = kv_head_;
    }
    std::int64_t end = c;
    for (; end < TILE && tile.rows[end + LANES - 1] != NO_ROW; end += LANES) {
      if (same(tile.rows + end, scratch.tile_rows + end)) continue;
      if (&next == &tile || !same(tile.rows + end, next.rows + end)) break;
      bring(tile.rows + end, end, scratch);
    }
    return (end - c) / LANES;
  }

  // Where the tile lies; past the path's end, zeros.
  void find(const PathTile& tile, const T* zeros, Places<T>& places) const {
    find(tile, zeros, call_.k_pool, call_.k_new, places.keys);
    find(tile, zeros, call_.v_pool, call_.v_new, places.values);
  }

 private:
  void find(const PathTile& tile, const T* zeros, ConstHeadRows pool, ConstHeadRows pack, const T** places) const {
    const T *const pooled = row_of<T>(pool, 0, kv_head_), *const packed = row_of<T>(pack, 0, kv_head_);
    for (int c = 0; c < TILE; ++c) {
      const std::int64_t row = tile.rows[c];
      places[c] = row >= 0 ? pooled + row * pool.row_stride : row == NO_ROW ? zeros : packed + ~row * pack.row_stride;
    }
  }

  static bool same(const std::int64_t* a, const std::int64_t* b) { return std::memcmp(a, b, LANES * sizeof *a) == 0; }

  // LANES keys and values of a tile, from its c-th on.
  void bring(const std::int64_t* rows, std::int64_t c, Scratch& scratch) const {
    keys(rows, reinterpret_cast<const T*>(scratch.zeros), scratch.keys + c);
    const std::int64_t stride = vectors(call_.head_dim) * LANES;
    for (std::int64_t i = 0; i < LANES; i += WIDTH<E>) values(rows + i, scratch.values + (c + i) / WIDTH<E> * stride);
    std::memcpy(scratch.tile_rows + c, rows, LANES * sizeof *rows);
  }

  const T* key_or_value(const ConstHeadRows& pool, const ConstHeadRows& pack, std::int64_t row) const {
    return row >= 0 ? row_of<T>(pool, row, kv_head_) : row_of<T>(pack, ~row, kv_head_);
  }

  // LANES keys become LANES columns of the transposed tile, an operand a row.
  void keys(const std::int64_t* rows, const T* zeros, float* columns) const {
    const T* places[LANES];
    for (int lane = 0; lane < LANES; ++lane) {
      places[lane] = rows[lane] == NO_ROW ? zeros : key_or_value(call_.k_pool, call_.k_new, rows[lane]);
    }
    const std::int64_t depth = depth_of<E>(call_.head_dim);
    const std::int64_t whole = call_.head_dim / WIDTH<E> / LANES * LANES;
    for (std::int64_t i = 0; i < depth; i += LANES) {
      vfloat x[LANES];
#pragma GCC unroll 16
      for (int lane = 0; lane < LANES; ++lane) {
        x[lane] = i < whole ? whole_operands_at<E>(places[lane], i) : operands_at<E>(places[lane], i, call_.head_dim);
      }
      transpose(x);
      if (depth - i >= LANES) {
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; ++lane) store(columns + (i + lane) * TILE, x[lane]);
      } else {
        for (std::int64_t lane = 0; lane < depth - i; ++lane) store(columns + (i + lane) * TILE, x[lane]);
      }
    }
  }

  // The values of one operand's positions become a row.
  void values(const std::int64_t* rows, float* row) const {
    const T* value = key_or_value(call_.v_pool, call_.v_new, rows[0]);
    if constexpr (std::is_same_v<E, Pair>) {
      const T* next = rows[1] == NO_ROW ? nullptr : key_or_value(call_.v_pool, call_.v_new, rows[1]);
      for (std::int64_t i = 0; i < call_.head_dim; i += LANES) {
        const vuint pairs = zip_some(value + i, next == nullptr ? nullptr : next + i, call_.head_dim - i);
        store(row + i, as_float(pairs));
      }
    } else {
      for (std::int64_t i = 0; i < call_.head_dim; i += LANES) {
        store(row + i, load_some(value + i, call_.head_dim - i));
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

template <typename T>
class Lines {
  using E = typename OperandOf<T>::Type;

 public:
  Lines(const TreeAttention& call, Scratch& scratch)
      : call_(call),
        scratch_(scratch),
        head_dim_(call.head_dim),
        depth_(depth_of<E>(head_dim_)),
        vecs_(vectors(head_dim_)),
        stride_(vecs_ * LANES),
        is_scaled_later_(call.scaling > 0.0f && call.softcap == 0.0f),
        to_exponent_(is_scaled_later_ ? call.scaling * LOG2_E : LOG2_E) {}

  void start(std::int64_t line, const T* query, std::int64_t pos) {
    for (std::int64_t i = 0; i < depth_; i += LANES) {
      store_some(scratch_.queries + line * depth_ + i, depth_ - i, operands_at<E>(query, i, head_dim_));
    }
    for (std::int64_t i = 0; i < stride_; i += LANES) store(scratch_.accumulator + line * stride_ + i, vfloat{});
    store(scratch_.sums + line * LANES, vfloat{});
    scratch_.maxima[line] = -INF;
    scratch_.line_pos[line] = pos;
  }

  void finish(std::int64_t line, std::int64_t head, T* out) {
    if (call_.sinks != nullptr) add_sink(line, call_.sinks[head]);
    const vfloat sum = splat(sum_lanes(load(scratch_.sums + line * LANES)));
    for (std::int64_t i = 0; i < head_dim_; i += LANES) {
      store_some(out + i, head_dim_ - i, load(scratch_.accumulator + line * stride_ + i) / sum);
    }
  }

  // Lines [begin, end), all of one row, attend to a tile where it lies, but for the blocks of LANES keys from the c-th
  // on that brought(c) tells to be in the scratch. Asks for what comes `soon`.
  template <typename Brought>
  void attend_in_place(std::int64_t begin, std::int64_t end, std::int64_t first, Places<T>& places,
                       const Places<T>& soon, const T* zeros, const Brought& brought) {
    const Seen all = seen(begin, first);
    if (all.empty()) return;
    // Of an operand that is seen in half, the other half has a probability of zero, and gets a value of zero.
    if (all.begin % WIDTH<E> != 0) places.values[all.begin - 1] = zeros;
    if (all.end % WIDTH<E> != 0) places.values[all.end] = zeros;
    const std::int64_t skipped = all.begin / LANES * LANES;
    const std::int64_t in_scratch = min(brought(skipped), vectors(all.end - skipped));
    alignas(VECTOR_ALIGNMENT) float scores[FEW * TILE];
    for (std::int64_t line = begin; line < end; line += FEW) {
      const int num_lines = static_cast<int>(min(FEW, end - line));
      const E* const queries = as<E>(scratch_.queries) + line * depth_;
      for (int r = 0; r < num_lines; r += ROWS) {
        multiply(static_cast<int>(min(ROWS, num_lines - r)), in_scratch, queries + r * depth_, depth_,
                 as<E>(scratch_.keys) + skipped, TILE, depth_, scores + r * TILE + skipped, TILE, false);
      }
      const auto score = score_block_of<E, T>(num_lines, std::make_integer_sequence<int, FEW>{});
      for (std::int64_t c = skipped + in_scratch * LANES; c < all.end; c += LANES) {
        score(queries, places.keys + c, places.values + c, head_dim_, scores + c);
      }
      for (int r = 0; r < num_lines; ++r) soften(scores + r * TILE, all, line + r);
      for (int r = 0; r < num_lines; r += ROWS) {
        const int num = static_cast<int>(min(ROWS, num_lines - r));
        float* const sums = scratch_.accumulator + (line + r) * stride_;
        for (std::int64_t v = 0; v < vecs_; v += VECS) {
          const auto add = add_rows_of<E, T>(num, min(VECS, vecs_ - v));
          add(as<E>(scores) + r * TILE, places.values, soon.keys, v * LANES, head_dim_ - v * LANES,
              all.begin / WIDTH<E>, operands<E>(all.end), sums + v * LANES, stride_);
        }
      }
    }
  }

  // Lines [begin, end) attend to the gathered tile at positions [first, first + TILE).
  void attend(std::int64_t begin, std::int64_t end, std::int64_t first) {
    constexpr std::int64_t GROUP = IN_TILES<E> ? LANES : ROWS;
    for (std::int64_t line = begin; line < end; line += GROUP) {
      const int num_lines = static_cast<int>(min(GROUP, end - line));
#if defined(__AMX_BF16__)
      if constexpr (IN_TILES<E>) {
        attend_group_in_tiles(line, num_lines, first);
        continue;
      }
#endif
      attend_group(line, num_lines, first);
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
    multiply(num_lines, vectors(any.end - skipped), as<E>(scratch_.queries) + line * depth_, depth_,
             as<E>(scratch_.keys) + skipped, TILE, depth_, scores + skipped, TILE, false);
    // In the place of the scores: those of a line are read before its probabilities are written.
    for (int r = 0; r < num_lines; ++r) {
      if (!by_line[r].empty()) soften(scores + r * TILE, by_line[r], line + r);
    }
    // What all lines see is multiplied together; before and after it, each line by itself, in the order of positions.
    all = {(all.begin + WIDTH<E> - 1) / WIDTH<E> * WIDTH<E>, all.end / WIDTH<E> * WIDTH<E>};
    if (all.empty()) all = {TILE, TILE};
    for (int r = 0; r < num_lines; ++r) {
      add_values(scores + r * TILE, {by_line[r].begin, min(by_line[r].end, all.begin)}, line + r);
    }
    add_whole_operands(scores, all, line, num_lines);
    for (int r = 0; r < num_lines; ++r) {
      add_values(scores + r * TILE, {max(by_line[r].begin, all.end), by_line[r].end}, line + r);
    }
  }

#if defined(__AMX_BF16__)
  // As attend_group, of up to 16 lines. A tile's product takes 32 positions at a time, and what a line does not see of
  // them by a probability of zero.
  void attend_group_in_tiles(std::int64_t line, int num_lines, std::int64_t first) {
    Seen by_line[LANES];
    Seen any = {TILE, 0};
    for (int r = 0; r < num_lines; ++r) {
      const Seen one = by_line[r] = seen(line + r, first);
      if (!one.empty()) any = {min(any.begin, one.begin), max(any.end, one.end)};
    }
    if (any.empty()) return;

    alignas(VECTOR_ALIGNMENT) float scores[2 * LANES * TILE];  // as 16 rows are read from a line on; half is written
    const std::int64_t skipped = any.begin / LANES * LANES;
    multiply_in_tiles(vectors(any.end - skipped), as<Pair>(scratch_.queries) + line * depth_, depth_,
                      as<Pair>(scratch_.keys) + skipped, TILE, depth_, scores + skipped, TILE, false);
    for (int r = 0; r < num_lines; ++r) {
      float* const row = scores + r * TILE;
      if (by_line[r].empty()) {
        clear(row, 0, TILE / LANES);
        continue;
      }
      soften(row, by_line[r], line + r);
      clear(row, 0, by_line[r].begin / LANES);
      clear(row, vectors(by_line[r].end), TILE / LANES);
    }

    const std::int64_t begin = any.begin / 2 / TILE_PAIRS * TILE_PAIRS, end = vectors((any.end + 1) / 2) * TILE_PAIRS;
    bool has_infinite = false;
    for (std::int64_t i = begin; i < end; ++i) has_infinite |= scratch_.has_infinite[i];
    const Pair* const values = as<Pair>(scratch_.values) + begin * stride_;
    if (!has_infinite) return add_in_tiles(scores, values, begin, end, line, num_lines);
    for (int r = 0; r < num_lines; ++r) {
      const auto size = static_cast<std::size_t>((end - begin) * stride_) * sizeof(Pair);
      std::memcpy(scratch_.visible, values, size);
      for (std::int64_t c = 2 * begin; c < 2 * end; ++c) {
        if (by_line[r].begin <= c && c < by_line[r].end) continue;
        for (std::int64_t i = 0; i < stride_; ++i) {
          reinterpret_cast<bfloat16*>(scratch_.visible)[((c / 2 - begin) * stride_ + i) * 2 + c % 2] = {};
        }
      }
      add_in_tiles(scores + r * TILE, as<Pair>(scratch_.visible), begin, end, line + r, 1);
    }
  }

  // Probabilities of vectors [begin, end) of a tile are zero.
  static void clear(float* probabilities, std::int64_t begin, std::int64_t end) {
    auto* const cleared = reinterpret_cast<bfloat16*>(probabilities);
    for (std::int64_t v = begin; v < end; ++v) store(cleared + v * LANES, vfloat{});
  }

  // Probabilities of pairs [begin, end) times their values are added to what lines have.
  void add_in_tiles(const float* probabilities, const Pair* values, std::int64_t begin, std::int64_t end,
                    std::int64_t line, int num_lines) {
    const Pair* const some = as<Pair>(probabilities) + begin;
    float* const sums = scratch_.accumulator + line * stride_;
    if (num_lines == TILE_ROWS) {
      return multiply_in_tiles(vecs_, some, TILE, values, stride_, end - begin, sums, stride_, true);
    }
    alignas(VECTOR_ALIGNMENT) float whole[TILE_ROWS * VECS * LANES];  // of which num_lines rows are lines
    for (std::int64_t v = 0; v < vecs_; v += VECS) {
      const std::int64_t num_vecs = min(VECS, vecs_ - v);
      const auto size = static_cast<std::size_t>(num_vecs * LANES) * sizeof(float);
      for (int r = 0; r < num_lines; ++r) std::memcpy(whole + r * VECS * LANES, sums + r * stride_ + v * LANES, size);
      multiply_in_tiles(num_vecs, some, TILE, values + v * LANES, stride_, end - begin, whole, VECS * LANES, true);
      for (int r = 0; r < num_lines; ++r) std::memcpy(sums + r * stride_ + v * LANES, whole + r * VECS * LANES, size);
    }
  }
#endif

  using Probability = std::conditional_t<std::is_same_v<E, Pair>, bfloat16, float>;

  // Scores become probabilities up to the factor exp(maximum), which moves on when the tile raises the maximum.
  void soften(float* scores, Seen seen, std::int64_t line) {
    const std::int64_t first = seen.begin / LANES;
    const std::int64_t last = vectors(seen.end);
    if (!is_scaled_later_) {
      for (std::int64_t v = first; v < last; ++v) {
        store(scores + v * LANES, capped(call_.scaling * load(scores + v * LANES), call_.softcap));
      }
    }
    if (seen.begin % LANES != 0) hide(scores, first, seen);
    if (seen.end % LANES != 0) hide(scores, last - 1, seen);
    const auto soften_vectors = softening_of(static_cast<int>(last - first), Tiles{});
    (this->*soften_vectors)(scores + first * LANES, reinterpret_cast<Probability*>(scores) + first * LANES, line);
  }

  // What is not seen of the v-th vector of scores.
  static void hide(float* scores, std::int64_t v, Seen seen) {
    const vint column = lane_index() + static_cast<std::int32_t>(v * LANES);
    const vint visible =
        (column >= static_cast<std::int32_t>(seen.begin)) & (column < static_cast<std::int32_t>(seen.end));
    store(scores + v * LANES, select(visible, load(scores + v * LANES), splat(-INF)));
  }

  // All scores are read before a probability is written in their place.
  template <int NUM>
  void soften_some(const float* scores, Probability* probabilities, std::int64_t line) {
    vfloat score[NUM];
    vfloat highest = splat(-INF);
#pragma GCC unroll 16
    for (int v = 0; v < NUM; ++v) {
      score[v] = load(scores + v * LANES);
      highest = max(highest, score[v]);
    }
    raise_maximum(line, max_lanes(highest));
    const vfloat maximum = splat(scratch_.maxima[line]);
    vfloat sum = load(scratch_.sums + line * LANES);
#pragma GCC unroll 16
    for (int v = 0; v < NUM; ++v) {
      const vfloat probability = exp2_below(to_exponent_ * (score[v] - maximum));
      store(probabilities + v * LANES, probability);
      sum += probability;
    }
    store(scratch_.sums + line * LANES, sum);
  }

  using Tiles = std::make_integer_sequence<int, TILE / LANES>;
  using Softening = void (Lines::*)(const float*, Probability*, std::int64_t);

  template <int... NUM>
  static Softening softening_of(int num_vectors, std::integer_sequence<int, NUM...>) {
    constexpr Softening by_vectors[] = {&Lines::soften_some<NUM + 1>...};
    return by_vectors[num_vectors - 1];
  }

  // Not rescaling by 2^0 = 1 where the maximum stays leaves every bit as it is.
  void raise_maximum(std::int64_t line, float highest) {
    float& maximum = scratch_.maxima[line];
    if (!(highest > maximum)) return;
    rescale(line, exp2_below(splat(to_exponent_ * (maximum - highest))));
    maximum = highest;
  }

  // After the last tile. In scores that are scaled, where no finite sink overflows; one of -inf leaves every bit.
  void add_sink(std::int64_t line, float sink) {
    const float highest = (is_scaled_later_ ? call_.scaling : 1.0f) * scratch_.maxima[line];
    const float top = highest > sink ? highest : sink;
    rescale(line, exp2_below(splat(LOG2_E * (highest - top))));
    scratch_.sums[line * LANES] += exp2_below(splat(LOG2_E * (sink - top)))[0];
  }

  void rescale(std::int64_t line, vfloat factor) {
    float* accumulator = scratch_.accumulator + line * stride_;
    for (std::int64_t i = 0; i < stride_; i += LANES) store(accumulator + i, factor * load(accumulator + i));
    store(scratch_.sums + line * LANES, factor * load(scratch_.sums + line * LANES));
  }

  // One line's probabilities times values; of an operand that it sees half of, the other half's value is made zero.
  void add_values(const float* probabilities, Seen seen, std::int64_t line) {
    if (seen.empty()) return;
    if constexpr (std::is_same_v<E, Pair>) {
      if (seen.begin % 2) add_half<E>(probabilities, seen.begin++ / 2, 0xffff0000u, line);
      const bool is_cut = seen.end % 2 && seen.begin < seen.end;
      if (is_cut) --seen.end;
      add_whole_operands(probabilities, seen, line, 1);
      if (is_cut) add_half<E>(probabilities, seen.end / 2, 0x0000ffffu, line);
    } else {
      add_whole_operands(probabilities, seen, line, 1);
    }
  }

  void add_whole_operands(const float* probabilities, Seen seen, std::int64_t line, int num_lines) {
    if (seen.empty()) return;
    const std::int64_t first = seen.begin / WIDTH<E>;
    multiply(num_lines, vecs_, as<E>(probabilities) + first, TILE, as<E>(scratch_.values) + first * stride_, stride_,
             seen.end / WIDTH<E> - first, scratch_.accumulator + line * stride_, stride_, true);
  }

  template <typename P>
  void add_half(const float* probabilities, std::int64_t pair, std::uint32_t half, std::int64_t line) {
    const auto left = splat(as<P>(probabilities)[pair]) & half;
    const P* values = as<P>(scratch_.values) + pair * stride_;
    float* accumulator = scratch_.accumulator + line * stride_;
    for (std::int64_t i = 0; i < stride_; i += LANES) {
      store(accumulator + i, fma(left, load(values + i) & half, load(accumulator + i)));
    }
  }

  const TreeAttention& call_;
  Scratch& scratch_;
  const std::int64_t head_dim_, depth_, vecs_, stride_;
  const bool is_scaled_later_;  // in the exponent: a cap needs scaled scores, a maximum their order
  const float to_exponent_;     // a difference of scores times this is the exponent to base 2
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
#if defined(__AMX_BF16__)
  const TilesInUse tiles;
#endif
  Lines<T> lines(call, scratch);
  const Gather<T> gather(call, item.kv_head);
  const std::int64_t group_size = call.q.num_heads / call.k_new.num_heads;
  const T* const scratch_zeros = reinterpret_cast<const T*>(scratch.zeros);
  Places<T> found[2];
  Places<T>*places = found, *soon = found + 1;
  bool is_found = false;  // places are those of the shared tile
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
    std::int64_t end = 0;       // lines [begin, end) wait to attend to the shared tile
    std::int64_t num_rows = 0;  // whose lines these are
    const auto attend_shared = [&](const PathTile& next) {
      const bool is_alone = num_rows == 1 && end - begin <= 2 * FEW &&
                            (&next == &shared || own_slots(shared, next) >= MANY_OWN);
      if constexpr (IN_TILES<typename OperandOf<T>::Type>) {
        if (begin < end) {
          gather(shared, scratch);
          lines.attend(begin, end, first);
        }
      } else if (is_alone) {
        if (!is_found) gather.find(shared, scratch_zeros, *places);
        gather.find(next, scratch_zeros, *soon);
        lines.attend_in_place(begin, end, first, *places, *soon, scratch_zeros,
                              [&](std::int64_t c) { return gather.brought(shared, next, c, scratch); });
        const auto held = places;
        places = soon;
        soon = held;
      } else if (begin < end) {
        gather(shared, scratch);
        lines.attend(begin, end, first);
      }
      is_found = is_alone && &next != &shared;
      begin = end;
      num_rows = 0;
    };
    for (std::int64_t b = 0; b < item.num_blocks; ++b) {
      const Block& block = item.blocks[b];
      const Path path(call, block);
      if (!path.reaches(first, call.window)) continue;
      PathTile own;
      path.tile(first, scratch.cursors[b], own);
      if (begin == end || end != block.line_begin || std::memcmp(own.rows, shared.rows, sizeof own.rows) != 0) {
        attend_shared(own);
        begin = block.line_begin;
        shared = own;
      }
      end = block.line_begin + block.num_lines;
      num_rows += block.row_end - block.row_begin;
    }
    attend_shared(shared);
  }

  for (std::int64_t b = 0; b < item.num_blocks; ++b) {
    for_lines(item.blocks[b], item.kv_head, group_size, [&](std::int64_t line, std::int64_t row, std::int64_t head) {
      T* out = static_cast<T*>(call.out.data) + row * call.out.row_stride + head * call.out.head_stride;
      lines.finish(line, head, out);
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
