// A few threads that stay awake between the steps of one forward pass: torch's own where they are GNU OpenMP's, since two
// sets of threads that wait awake take the cores from each other; else ours.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

namespace pinscher {

class Pool {
 public:
  explicit Pool(size_t threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  size_t threads() const { return threads_; }

 private:
  friend class Team;
  using Job = void (*)(void* context, size_t item, size_t thread);
  void run(size_t items, Job job, void* context);
  void run_shared(size_t items, Job job, void* context);
  void work(size_t thread);
  void take(size_t thread);

  const size_t threads_;
  std::vector<std::thread> workers_;  // none where torch's are used
  std::mutex busy_;  // held by the one caller that has the workers
  std::mutex sleeping_;
  std::condition_variable wake_;
  std::atomic<size_t> round_{0}, next_{0}, done_{0};
  std::atomic<bool> stop_{false};
  size_t items_ = 0;
  Job job_ = nullptr;
  void* context_ = nullptr;
};

// One caller's hold on the pool. If another thread has the workers, this one does its work alone.
class Team {
 public:
  explicit Team(Pool& pool) : pool_(pool), lock_(pool.busy_, std::try_to_lock) {}
  size_t threads() const { return lock_ ? pool_.threads() : 1; }
  // Calls work(item, thread) for every item, in any order; returns when all are done. `work` does not throw.
  template <typename Work>
  void each(size_t items, Work&& work) {
    if (!lock_ || items < 2 || pool_.threads() == 1) {
      for (size_t item = 0; item < items; ++item) work(item, 0);
      return;
    }
    using Plain = std::remove_reference_t<Work>;
    pool_.run(items, [](void* context, size_t item, size_t thread) { (*static_cast<Plain*>(context))(item, thread); },
              const_cast<std::remove_const_t<Plain>*>(&work));
  }

 private:
  Pool& pool_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace pinscher
