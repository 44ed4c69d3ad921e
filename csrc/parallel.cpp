#include "parallel.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace iclperm {
namespace {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// A second pool beside torch's would fight it for the cores. Looked up at each call, since torch may be loaded late.
GompParallel gomp_parallel() { return reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel")); }

// One parallel_for: workers draw items until none is left.
class Job {
 public:
  Job(std::int64_t num_items, const std::function<void(std::int64_t, int)>& task)
      : num_items_(num_items), task_(task) {}

  void work() noexcept {
    const int worker = next_worker_.fetch_add(1);
    try {
      for (std::int64_t item = next_item_.fetch_add(1); item < num_items_; item = next_item_.fetch_add(1)) {
        task_(item, worker);
      }
    } catch (...) {
      next_item_.store(num_items_);
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }

  void finish() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const std::int64_t num_items_;
  const std::function<void(std::int64_t, int)>& task_;
  std::atomic<std::int64_t> next_item_{0};
  std::atomic<int> next_worker_{0};
  std::mutex mutex_;
  std::exception_ptr error_;
};

// Threads that wait for a job. One job at a time; grows to the largest number of threads asked for.
class Pool {
 public:
  void run(Job& job, int num_threads) {
    const std::lock_guard<std::mutex> one_job(callers_);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (static_cast<int>(threads_.size()) < num_threads - 1) threads_.emplace_back([this] { serve(); });
      job_ = &job;
      seats_ = num_threads - 1;
      busy_ = num_threads - 1;
    }
    wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  [[noreturn]] void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return seats_ > 0; });
      --seats_;
      Job& job = *job_;
      lock.unlock();
      job.work();
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex callers_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  Job* job_ = nullptr;
  int seats_ = 0;  // workers the job still wants
  int busy_ = 0;   // workers that have not finished it
};

// A forked child has none of its parent's threads, so it gets a pool of its own; pools are never destroyed, because
// their threads may outlive the end of main.
Pool& pool() {
  static std::mutex mutex;
  static Pool* current = nullptr;
  static pid_t owner = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  if (current == nullptr || owner != getpid()) {
    current = new Pool;
    owner = getpid();
  }
  return *current;
}

}  // namespace

void check_threads(int num_threads) {
  constexpr int MOST = 4096;
  if (num_threads < 1 || num_threads > MOST) {
    throw std::invalid_argument("num_threads is " + std::to_string(num_threads) + "; give a number from 1 to " +
                                std::to_string(MOST));
  }
}

void parallel_for(std::int64_t num_items, int num_threads, const std::function<void(std::int64_t, int)>& task) {
  const int team = static_cast<int>(std::min<std::int64_t>(num_threads, num_items));
  Job job(num_items, task);
  if (team <= 1) {
    job.work();
  } else if (const GompParallel run = gomp_parallel()) {
    run([](void* data) { static_cast<Job*>(data)->work(); }, &job, static_cast<unsigned>(team), 0);
  } else {
    pool().run(job, team);
  }
  job.finish();
}

const char* thread_backend() { return gomp_parallel() != nullptr ? "gomp" : "std"; }

}  // namespace iclperm
