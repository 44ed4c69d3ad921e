#include "checksum.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "parallel.hpp"

namespace iclperm {
namespace {

constexpr std::int64_t AN_ITEM = std::int64_t{1} << 20;  // bytes that one thread reads at a time
constexpr std::int64_t LANES = 8;  // sums side by side, since each multiplication waits for the one before

// One-to-one in each argument while the other stays, so that no other word gives the same. Turned round, since a product
// carries bits up alone.
std::uint64_t mixed(std::uint64_t sum, std::uint64_t word) {
  return (std::rotl(sum, 29) ^ word) * 0x9e3779b97f4a7c15;
}

class Lanes {
 public:
  // In whole blocks; what the last one lacks is zero.
  void add(const std::byte* data, std::int64_t size) {
    constexpr std::int64_t BLOCK = LANES * sizeof(std::uint64_t);
    std::int64_t begin = 0;
    for (; begin + BLOCK <= size; begin += BLOCK) add_block(data + begin);
    if (begin == size) return;
    std::byte last[BLOCK] = {};
    std::memcpy(last, data + begin, static_cast<std::size_t>(size - begin));
    add_block(last);
  }

  std::uint64_t sum() const {
    std::uint64_t all = 0;
    for (const std::uint64_t lane : sums_) all = mixed(all, lane);
    return all;
  }

 private:
  void add_block(const std::byte* data) {
    std::uint64_t words[LANES];
    std::memcpy(words, data, sizeof words);
    for (std::int64_t lane = 0; lane < LANES; ++lane) sums_[lane] = mixed(sums_[lane], words[lane]);
  }

  std::uint64_t sums_[LANES] = {};
};

}  // namespace

std::uint64_t checksum(const Bytes& bytes, int num_threads) {
  check_threads(num_threads);
  const std::int64_t step = std::max<std::int64_t>(1, AN_ITEM / std::max<std::int64_t>(1, bytes.row_size));
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(in_parts_of(bytes.num_rows, step)));
  parallel_for(static_cast<std::int64_t>(sums.size()), num_threads, [&](std::int64_t item, int) {
    Lanes lanes;
    const std::int64_t end = std::min(bytes.num_rows, (item + 1) * step);
    for (std::int64_t row = item * step; row < end; ++row) lanes.add(bytes.data + row * bytes.row_stride, bytes.row_size);
    sums[static_cast<std::size_t>(item)] = lanes.sum();
  });
  std::uint64_t all = mixed(static_cast<std::uint64_t>(bytes.num_rows), static_cast<std::uint64_t>(bytes.row_size));
  for (const std::uint64_t sum : sums) all = mixed(all, sum);
  return all;
}

}  // namespace iclperm
