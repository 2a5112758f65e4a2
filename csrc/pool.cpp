#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

namespace sortrl {
namespace {

struct Job {
  Job(int64_t count, int helpers, const std::function<void(int64_t)>& task)
      : count(count), helpers_wanted(helpers), task(task) {}

  // Take tasks until none is left.
  void work() {
    for (int64_t i; (i = next.fetch_add(1)) < count;) {
      try {
        task(i);
      } catch (...) {  // out of memory, say: remember it for the caller, a worker has nobody to tell
        std::lock_guard<std::mutex> lock(mutex);
        if (!error) error = std::current_exception();
      }
      if (done.fetch_add(1) + 1 == count) {
        std::lock_guard<std::mutex> lock(mutex);
        finished.notify_all();
      }
    }
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [&] { return done.load() == count; });
    if (error) std::rethrow_exception(error);
  }

  const int64_t count;
  int helpers_wanted;  // guarded by the pool's mutex
  const std::function<void(int64_t)>& task;
  std::atomic<int64_t> next{0}, done{0};
  std::mutex mutex;
  std::condition_variable finished;
  std::exception_ptr error;
};

class Pool {
 public:
  void run(int64_t count, int threads, const std::function<void(int64_t)>& task) {
    int helpers = int(std::min<int64_t>(threads, count)) - 1;
    // Shared ownership: a helper may still look at the counter after the caller has seen the last task finish.
    auto job = std::make_shared<Job>(count, helpers, task);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (workers_ < helpers) {
        std::thread([this] { serve(); }).detach();
        ++workers_;
      }
      jobs_.push_back(job);
    }
    for (int i = 0; i < helpers; ++i) wake_.notify_one();
    job->work();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto it = std::find(jobs_.begin(), jobs_.end(), job);
      if (it != jobs_.end()) jobs_.erase(it);
    }
    job->wait();
  }

 private:
  void serve() {
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return !jobs_.empty(); });
        job = jobs_.front();
        if (--job->helpers_wanted <= 0) jobs_.pop_front();
      }
      job->work();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> jobs_;
  int workers_ = 0;
};

// The pool is leaked on purpose: its detached threads may outlive static destruction. A forked child has none of
// its parent's threads (and maybe a locked mutex), so it starts a pool of its own.
Pool* current_pool = nullptr;

Pool& pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    current_pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { current_pool = new Pool; });
  });
  return *current_pool;
}

}  // namespace

void parallel_for(int64_t count, int threads, const std::function<void(int64_t)>& task) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  pool().run(count, threads, task);
}

}  // namespace sortrl
