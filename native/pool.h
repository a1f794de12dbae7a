// A few threads that share the steps of a forward pass: torch's own where they are GNU OpenMP's, since two sets of threads
// that wait awake take the cores from each other; else ours. A forked process has none of its parent's threads, and GNU
// OpenMP waits for them forever: it gets new ones of ours.
//
// Nobody waits for a thread as such, only for pieces of work that it has begun. Where other processes have the cores even
// those come late, by a time slice of the system: then callers work alone for a while, before they try again.
#pragma once
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace pinscher {

// When to work alone, after somebody came late: for ten times what that has cost, and twice as long as the time before if it
// happens again before as much time has passed.
class Retreat {
 public:
  bool lasts() const;
  void begin(int64_t entered, int64_t lost);  // when the call began that has waited, and how long

 private:
  std::atomic<int64_t> until_{0}, length_{0};  // in ns
};

// The threads of one process.
class Crew {
 public:
  Crew(size_t threads, bool patient);
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;
  bool here() const;  // whether this is the process it was made in

 private:
  friend class Team;
  using Job = void (*)(void* context, size_t item, size_t thread);
  using Body = void (*)(void* context);

  // What one caller shares with the workers. A slot lives as long as its crew: who looks at one too late finds nothing to do.
  struct alignas(64) Slot {
    std::atomic<bool> used{false}, over{true};
    // How many items nobody has taken yet, below a number that no two sharings have in common: one exchange takes an item,
    // and cannot take one of another sharing. What is shared stays as it is until all items are finished.
    std::atomic<uint64_t> ticket{0};
    std::atomic<size_t> finished{0};
    std::atomic<bool> sleeps{false};  // the caller, until the last item is finished
    std::mutex sleeping;
    std::condition_variable wake;
    uint64_t sharings = 0;
    size_t items = 0;
    Job job = nullptr;
    void* context = nullptr;
    int64_t entered = 0, lost = 0;  // in ns: when the caller came, and how long it has waited for others that came late
  };
  static constexpr size_t SLOTS = 8;  // callers at once that get help; others work alone

  Slot* enter();  // null if there is no help to be had
  // Runs `body` while the other threads wait, awake, for what it shares with them.
  void gather(Slot& slot, Body body, void* context);
  void share(Slot& slot, size_t items, Job job, void* context);
  void wait(Slot& slot, size_t items, int64_t one);
  void note(Slot& slot, int64_t lost);
  bool take(Slot& slot, uint64_t ticket, size_t thread);
  bool help(size_t thread);
  void work(size_t thread);
  void rouse();
  void dismiss();

  const unsigned forks_;              // that led to its process
  const size_t threads_;
  const bool patient_;                // never works alone
  std::vector<std::thread> workers_;  // none where torch's are used
  std::array<Slot, SLOTS> slots_;
  std::mutex sleeping_;
  std::condition_variable wake_;
  std::atomic<size_t> asleep_{0}, calls_{0};
  std::atomic<bool> stop_{false};
  Retreat retreat_;
};

// A number of threads, in whichever process asks for them.
class Pool {
 public:
  explicit Pool(size_t threads, bool patient = false);  // patient: it gives all of them even while they come late
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  size_t threads() const { return threads_; }

 private:
  friend class Team;
  Crew& crew();

  const size_t threads_;
  const bool patient_;
  std::atomic<Crew*> crew_{nullptr};
};

// One caller's share of the pool. If there is no help to be had, or it has no pool, it does its work alone.
class Team {
 public:
  Team() = default;
  explicit Team(Pool& pool) : crew_(&pool.crew()), slot_(crew_->enter()) {}
  ~Team() {
    if (slot_) slot_->used.store(false, std::memory_order_release);
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  size_t threads() const { return slot_ ? crew_->threads_ : 1; }

  // Calls work(item, thread) for every item, in any order; returns when all are done. `work` does not throw.
  template <typename Work>
  void each(size_t items, Work&& work) {
    if (threads() == 1 || items < 2) {
      for (size_t item = 0; item < items; ++item) work(item, 0);
      return;
    }
    using Plain = std::remove_reference_t<Work>;
    const auto job = [](void* context, size_t item, size_t thread) { (*static_cast<Plain*>(context))(item, thread); };
    together([&] { crew_->share(*slot_, items, job, const_cast<std::remove_const_t<Plain>*>(&work)); });
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
    crew_->gather(*slot_, [](void* context) { (*static_cast<Plain*>(context))(); }, &body);
  }

 private:
  struct Leave {
    bool& inside;
    ~Leave() { inside = false; }
  };
  Crew* crew_ = nullptr;
  Crew::Slot* slot_ = nullptr;
  bool inside_ = false;
};

}  // namespace pinscher
