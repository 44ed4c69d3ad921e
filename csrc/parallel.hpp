// Runs numbered items of work on several threads, on torch's own threads where torch is loaded.
#pragma once

#include <cstdint>
#include <functional>

namespace iclperm {

// How many parts of so many, the last of which may be smaller.
constexpr std::int64_t in_parts_of(std::int64_t all, std::int64_t part) { return (all + part - 1) / part; }

// Throws std::invalid_argument for a number of threads below 1, or one that no machine could start: libgomp ends the
// process where it cannot.
void check_threads(int num_threads);

// Calls task(item, worker) once for every item in [0, num_items), worker in [0, num_threads). Items are handed out one
// by one in ascending order. One thread, or one item, runs in the calling thread. The first exception is rethrown here.
void parallel_for(std::int64_t num_items, int num_threads, const std::function<void(std::int64_t, int)>& task);

// "gomp" when the OpenMP runtime that torch brings is in the process and will be used, "std" when our own pool will.
const char* thread_backend();

}  // namespace iclperm
