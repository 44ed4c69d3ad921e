// Functions of one row at a time: activations, norms, rotations, and what scoring needs of a row of logits.
//
// An element's or a row's bits depend on that row alone, never on the rows beside it or on the number of threads.
#pragma once

#include <cstdint>

#include "activations.hpp"
#include "isa.hpp"
#include "tree_attention.hpp"

namespace iclperm {

// y = activation(x), times factor unless that is nullptr, on [num_rows, num_columns], columns contiguous; strides count
// elements.
struct Elementwise {
  Activation activation;
  Element element;
  std::int64_t num_rows, num_columns;
  const void* x;
  std::int64_t x_stride;
  void* y;
  std::int64_t y_stride;
  const void* factor;
  std::int64_t factor_stride;
};

// out = z / sqrt(mean(z^2) + eps) * (offset + weight) of each row z of [num_rows, num_columns]: z = x, or z = sum + x
// unless sum is nullptr, rounded and left there.
struct RmsNorm {
  Element element;
  std::int64_t num_rows, num_columns;
  const void* x;
  std::int64_t x_stride;
  void* sum;
  std::int64_t sum_stride;
  const void* weight;  // [num_columns]
  float offset, eps;
  void* out;
  std::int64_t out_stride;
};

// out = (z - mean(z)) / sqrt(mean((z - mean(z))^2) + eps) * weight, plus bias unless that is nullptr; z as of RmsNorm.
struct LayerNorm {
  Element element;
  std::int64_t num_rows, num_columns;
  const void* x;
  std::int64_t x_stride;
  void* sum;
  std::int64_t sum_stride;
  const void* weight;  // [num_columns]
  const void* bias;    // [num_columns]
  float eps;
  void* out;
  std::int64_t out_stride;
};

// Rotary embedding in place: pairs of columns of every head of x [num_rows, num_heads, >= num_columns] are turned by
// the row's cosines and sines [num_rows, num_columns]. Pair i is turned by columns i and i + half of the tables, half =
// num_columns / 2; it is the same columns of x, or where neighbours are turned columns 2 i and 2 i + 1.
struct Rotation {
  Element element;
  bool turns_neighbours;
  std::int64_t num_rows, num_heads, num_columns;
  void* x;
  std::int64_t row_stride, head_stride;
  const float* cosines;
  std::int64_t cosine_stride;
  const float* sines;
  std::int64_t sine_stride;
};

// Of each row of logits [R, V], soft-capped: log-sum-exp, first index of the maximum, and whether all are finite. Of
// each pair (row, id): the log-probability in nats. A row that is not finite has NaN, -1 and NaN.
struct HeadRowsCall {
  Element element;
  std::int64_t num_rows, num_columns;
  const void* logits;
  std::int64_t row_stride;
  float softcap;                 // 0: none
  float* logsumexp;              // [R]
  std::int32_t* argmax;          // [R]
  bool* finite;                  // [R]
  std::int64_t num_pairs;        // N
  const std::int64_t* pair_row;  // [N]
  const std::int64_t* pair_id;   // [N]
  float* gathered;               // [N]
};

// Error in float32: at most 2e-7 * |x|, or |x factor|, for each activation. x or factor may be y.
void elementwise(const Elementwise& call, Isa isa, int num_threads);

// Sums of squares are in float32, in the order of columns. x may be out.
void rms_norm(const RmsNorm& call, Isa isa, int num_threads);

// As rms_norm, in two passes over the sum.
void layer_norm(const LayerNorm& call, Isa isa, int num_threads);

void rotate(const Rotation& call, Isa isa, int num_threads);

// Throws std::invalid_argument naming the first pair outside [R, V]. One pass over the logits.
void head_rows(const HeadRowsCall& call, Isa isa, int num_threads);

// What follows is between the dispatcher and the kernels.

// All handle rows [begin, end), the last one pairs [begin, end).
#define ICLPERM_ROWWISE_KERNELS                                                         \
  void elementwise_rows(const Elementwise& call, std::int64_t begin, std::int64_t end); \
  void norm_rows(const RmsNorm& call, std::int64_t begin, std::int64_t end);            \
  void centred_rows(const LayerNorm& call, std::int64_t begin, std::int64_t end);       \
  void rotate_rows(const Rotation& call, std::int64_t begin, std::int64_t end);         \
  void reduce_logits(const HeadRowsCall& call, std::int64_t begin, std::int64_t end);   \
  void gather_logits(const HeadRowsCall& call, std::int64_t begin, std::int64_t end);
namespace baseline {
ICLPERM_ROWWISE_KERNELS
}
namespace avx2 {
ICLPERM_ROWWISE_KERNELS
}
namespace avx512 {
ICLPERM_ROWWISE_KERNELS
}
namespace avx512_bf16 {
ICLPERM_ROWWISE_KERNELS
}
#undef ICLPERM_ROWWISE_KERNELS

}  // namespace iclperm
