// Causal attention of a packed tree, on the CPU: every row sees the keys on its own path and nothing else.
//
// The pack's rows are grouped in visits: rows at consecutive positions of one path. A visit lists the keys of its
// ancestors as spans, in the order of their positions; spans lie in the pool (keys kept from earlier packs) or in the
// pack itself. A block of query rows, the heads of one key-value head together, walks its path in tiles of TILE
// positions. A tile's keys are gathered once, transposed and in float32 or pairs of bfloat16, its values likewise; then
//   scores = queries x keys^T,  online softmax,  accumulator += probabilities x values,
// both products by the same register-blocked kernel, or in the processor's tiles (amx.hpp), where every tile is gathered.
// Visits next to each other that share a tile share its gathering. The keys of a row that decodes, which no other row
// has, are read where they lie instead, with the same bits.
//
// A row's bits depend on its query and on the keys and values on its path alone. Tiles are cut by position; a score is
// one chain of products in the order of the head's dimensions, an output one chain in the order of positions; a lane of
// the softmax's sum is the position modulo the vector's width. Masked keys are never multiplied in, so a NaN in a row
// that another may not see cannot reach it; where tiles multiply values by zero, these are finite.
#pragma once

#include <cstdint>

#include "element.hpp"
#include "isa.hpp"

namespace iclperm {

// [rows, heads, head_dim], head_dim contiguous; strides count elements.
template <typename Byte>
struct HeadRows {
  Byte* data;
  std::int64_t num_rows;
  std::int64_t num_heads;
  std::int64_t row_stride;
  std::int64_t head_stride;
};
using ConstHeadRows = HeadRows<const void>;
using MutableHeadRows = HeadRows<void>;

struct Visits {
  std::int64_t num_visits;  // V
  std::int64_t num_spans;
  const std::int64_t* row_offsets;   // [V + 1] visit v owns pack rows [row_offsets[v], row_offsets[v + 1])
  const std::int64_t* pos;           // [V] position of its first row
  const std::int64_t* span_offsets;  // [V + 1] CSR into the three below
  const std::int64_t* span_source;   // [num_spans] 0: pool slots, 1: pack rows
  const std::int64_t* span_begin;
  const std::int64_t* span_end;
};

struct TreeAttention {
  Element element;
  std::int64_t head_dim;
  ConstHeadRows q;             // [M, Hq, d], or [Q, Hq, d] with query_rows
  ConstHeadRows k_new, v_new;  // [M, Hkv, d]
  ConstHeadRows k_pool, v_pool;
  MutableHeadRows out;  // as q
  Visits visits;
  // [num_query_rows], ascending: row n of q and out is that of pack row query_rows[n]. nullptr: of pack row n.
  const std::int64_t* query_rows;
  std::int64_t num_query_rows;
  float scaling;
  float softcap;        // 0: none
  std::int64_t window;  // 0: none; else a row sees the keys less than `window` positions before it
  const float* sinks;   // [Hq] one score more a head, neither scaled nor capped, of no value; nullptr: none
};

// Throws std::invalid_argument naming the visit and the number that is wrong. Rows of out that no visit owns,
// or that lie past query_rows, become zero.
// Cost: 4 * head_dim * Hq flops for every visible (row, key) pair, tiles' edges rounded up.
void tree_attention(const TreeAttention& call, Isa isa, int num_threads);

// What follows is between the dispatcher and the kernels.

constexpr int TILE = 64;        // positions a tile, multiples of it counted from the root
constexpr int MAX_LINES = 512;  // (row, head) pairs that a work item holds; more only where one row has more
constexpr int MAX_LANES = 16;   // floats in the widest vector
constexpr int VECTOR_ALIGNMENT = 64;

// Rows [row_begin, row_end) of q, all of one visit, all heads of a group: lines [line_begin, ...) of its work item.
struct Block {
  std::int64_t visit;
  std::int64_t row_begin;
  std::int64_t row_end;
  std::int64_t line_begin;
  std::int64_t num_lines;
};

// Blocks of consecutive visits under one key-value head.
struct WorkItem {
  const Block* blocks;
  std::int64_t num_blocks;
  std::int64_t kv_head;
};

// Where a walk along a path stands.
struct Cursor {
  std::int64_t span;      // absolute span number
  std::int64_t position;  // of the span's first key
};

// One worker's buffers, each aligned for vectors. Lines hold head_dim rounded up to whole vectors.
struct Scratch {
  float* keys;                   // [padded d, TILE] the tile's keys, transposed
  float* values;                 // [TILE, padded d]
  float* queries;                // [padded lines, padded d]
  float* accumulator;            // [lines, padded d]
  float* sums;                   // [lines, MAX_LANES] of probabilities, by lane
  float* maxima;                 // [lines]
  float* zeros;                  // [padded d] a key or value where there is none
  float* visible;                // [TILE / 2, padded d] pairs of values as one line sees them
  bool* has_infinite;            // [TILE / 2] whether a pair of values has an infinity or NaN
  std::int64_t* line_pos;        // [lines]
  Cursor* cursors;               // [blocks]
  std::int64_t tile_rows[TILE];  // what `keys` and `values` hold (see PathTile)
  std::int64_t tile_kv_head;     // -1: nothing yet
};

namespace baseline {
void attend(const TreeAttention& call, const WorkItem& item, Scratch& scratch);
}
namespace avx2 {
void attend(const TreeAttention& call, const WorkItem& item, Scratch& scratch);
}
namespace avx512 {
void attend(const TreeAttention& call, const WorkItem& item, Scratch& scratch);
}
namespace avx512_bf16 {
void attend(const TreeAttention& call, const WorkItem& item, Scratch& scratch);
}
namespace amx_bf16 {
void attend(const TreeAttention& call, const WorkItem& item, Scratch& scratch);
}

}  // namespace iclperm
