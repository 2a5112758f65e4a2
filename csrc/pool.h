// A small thread pool: tasks are numbered, handed out by an atomic counter, and the caller works too.
// It exists because two OpenMP runtimes in one process (torch's and ours) fight over the cores and hang after fork.
#pragma once

#include <cstdint>
#include <functional>

namespace sortrl {

// Run task(0) ... task(count - 1) on at most `threads` threads, the caller among them; returns when all are done.
// Callable from several threads at once, and in a forked child.
void parallel_for(int64_t count, int threads, const std::function<void(int64_t)>& task);

}  // namespace sortrl
