// Keys or values of a pack's rows that later packs see, copied to the slots of the pool that they have there.
#pragma once

#include <cstdint>

#include "tree_attention.hpp"

namespace iclperm {

// Rows [begin[n], end[n]) of rows [M, H, d] become slots slot[n], slot[n] + 1, ... of pool [S, H, d], run after run.
struct Retained {
  std::int64_t element_size;  // bytes
  std::int64_t head_dim;
  ConstHeadRows rows;
  MutableHeadRows pool;
  std::int64_t num_runs;
  const std::int64_t* begin;  // [num_runs]
  const std::int64_t* end;
  const std::int64_t* slot;
};

// Throws std::invalid_argument naming the first run that is no part of the rows, or of the pool.
void retain_rows(const Retained& call, int num_threads);

}  // namespace iclperm
