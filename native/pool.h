// A few threads that stay awake between the steps of one forward pass: torch's own where they are GNU OpenMP's, since two
// sets of threads that wait awake take the cores from each other; else ours. A forked process has none of its parent's
// threads, and GNU OpenMP waits for them forever: it gets new ones of ours.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace pinscher {

// The threads of one process.
class Crew {
 public:
  explicit Crew(size_t threads);
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;
  bool here() const;  // whether this is the process it was made in

 private:
  friend class Team;
  using Job = void (*)(void* context, size_t item, size_t thread);
  using Body = void (*)(void* context);

  // Runs `body` while the other threads wait, awake, for what it shares with them.
  void gather(Body body, void* context);
  void share(size_t items, Job job, void* context);
  void help(size_t thread);
  void work(size_t thread);
  void dismiss();
  bool take(uint64_t ticket, size_t thread);

  const unsigned forks_;              // that led to its process
  const size_t threads_;
  std::vector<std::thread> workers_;  // none where torch's are used
  std::mutex busy_;                   // held by the one caller that has the workers
  std::mutex sleeping_;
  std::condition_variable wake_;
  std::atomic<size_t> gathering_{0};
  std::atomic<bool> stop_{false};

  // How many items nobody has taken yet, below a number that no two sharings have in common: one exchange takes an item,
  // and cannot take one of another sharing. What is shared stays as it is until all items are finished.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<size_t> finished_{0};
  std::atomic<bool> over_{true};
  uint64_t sharings_ = 0;
  size_t items_ = 0;
  Job job_ = nullptr;
  void* context_ = nullptr;
};

// A number of threads, in whichever process asks for them.
class Pool {
 public:
  explicit Pool(size_t threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  size_t threads() const { return threads_; }

 private:
  friend class Team;
  Crew& crew();

  const size_t threads_;
  std::atomic<Crew*> crew_{nullptr};
};

// One caller's hold on the pool. If another thread has the workers, or it has no pool, this one does its work alone.
class Team {
 public:
  Team() = default;
  explicit Team(Pool& pool) : crew_(&pool.crew()), lock_(crew_->busy_, std::try_to_lock) {}
  size_t threads() const { return lock_ ? crew_->threads_ : 1; }

  // Calls work(item, thread) for every item, in any order; returns when all are done. `work` does not throw.
  template <typename Work>
  void each(size_t items, Work&& work) {
    if (threads() == 1 || items < 2) {
      for (size_t item = 0; item < items; ++item) work(item, 0);
      return;
    }
    using Plain = std::remove_reference_t<Work>;
    const auto job = [](void* context, size_t item, size_t thread) { (*static_cast<Plain*>(context))(item, thread); };
    together([&] { crew_->share(items, job, const_cast<std::remove_const_t<Plain>*>(&work)); });
  }

  // Calls work(item), each item by the thread of its number if that one comes: what it needs is in that one's caches.
  template <typename Work>
  void each_own(size_t items, Work&& work) {
    std::vector<std::atomic<bool>> taken(items);
    each(items, [&](size_t, size_t thread) {
      size_t item = thread % items;
      while (taken[item].exchange(true)) item = (item + 1) % items;
      work(item);
    });
  }

  // Calls body(), in which `each` finds the workers awake: for many small steps one after the other.
  template <typename Body>
  void together(Body&& body) {
    if (threads() == 1 || inside_) return body();
    inside_ = true;
    using Plain = std::remove_reference_t<Body>;
    const Leave leave{inside_};
    crew_->gather([](void* context) { (*static_cast<Plain*>(context))(); }, &body);
  }

 private:
  struct Leave {
    bool& inside;
    ~Leave() { inside = false; }
  };
  Crew* crew_ = nullptr;
  std::unique_lock<std::mutex> lock_;
  bool inside_ = false;
};

}  // namespace pinscher
