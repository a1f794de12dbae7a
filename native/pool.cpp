#include "pool.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pinscher {
namespace {

constexpr int64_t MICROSECOND = 1000, MILLISECOND = 1000 * MICROSECOND;
constexpr int64_t PATIENCE = 200 * MICROSECOND;  // awake between steps, asleep between requests
constexpr int LOOKS = 64;                        // between two looks at the clock
constexpr int64_t LATE = MILLISECOND;            // a time slice of another process is longer
constexpr int64_t TOLERATED = 10;                // one in so many parts of a call may be lost, too
constexpr int64_t LONG = INT64_MAX / 4;
constexpr int64_t LEAST_ALONE = 10 * MILLISECOND, MOST_ALONE = 500 * MILLISECOND;

int64_t now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Looks for what `found` says, awake, until PATIENCE and `more` have passed.
template <typename Found>
bool look_for(Found&& found, int64_t more = 0) {
  const int64_t until = now() + PATIENCE + more;
  do
    for (int looks = LOOKS; looks--; relax())
      if (found()) return true;
  while (now() < until);
  return false;
}

size_t left(uint64_t ticket) { return static_cast<uint32_t>(ticket); }

// The two functions of GNU OpenMP that are needed, if the process has it loaded. Their interface is what compilers have
// called for as long as there is OpenMP 4.
struct OpenMp {
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  using Number = int (*)();
  Parallel parallel = nullptr;
  Number number = nullptr;

  OpenMp() {
    void* library = dlopen("libgomp.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (!library) return;
    parallel = reinterpret_cast<Parallel>(dlsym(library, "GOMP_parallel"));
    number = reinterpret_cast<Number>(dlsym(library, "omp_get_thread_num"));
    if (!number) parallel = nullptr;
  }
};

const OpenMp& openmp() {
  static const OpenMp found;
  return found;
}

// From the process that loaded this to the one we are in; counted from the start, since others may have used OpenMP before
// there is a pool.
std::atomic<unsigned> forks{0};
[[maybe_unused]] const int counting = pthread_atfork(nullptr, nullptr, [] { ++forks; });

}  // namespace

bool Retreat::lasts() const {
  const int64_t until = until_.load(std::memory_order_relaxed);
  return until && now() < until;
}

void Retreat::begin(int64_t entered, int64_t lost) {
  if (lasts()) return;
  const int64_t length = length_.load(std::memory_order_relaxed);
  const bool again = entered - until_.load(std::memory_order_relaxed) < length;
  const int64_t next = std::min(std::max(again ? 2 * length : LEAST_ALONE, TOLERATED * lost), MOST_ALONE);
  length_.store(next, std::memory_order_relaxed);
  until_.store(now() + next, std::memory_order_relaxed);
}

Crew::Crew(size_t threads, bool patient) : forks_(forks), threads_(threads), patient_(patient) {
  if (!forks_ && openmp().parallel) return;
  try {
    for (size_t i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (...) {  // the system has no more
    dismiss();
    throw;
  }
}

Crew::~Crew() { dismiss(); }

void Crew::dismiss() {
  stop_ = true;
  {
    std::lock_guard<std::mutex> lock(sleeping_);
    ++calls_;
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

bool Crew::here() const { return forks_ == forks.load(std::memory_order_relaxed); }

Pool::Pool(size_t threads, bool patient) : threads_(threads), patient_(patient) {
  if (!threads) throw std::invalid_argument("a pool has one thread at least");
  crew_ = new Crew(threads, patient);
}

Pool::~Pool() {
  if (Crew* const last = crew_; last->here()) delete last;
}

// What a parent's crew was doing at the fork is unknown: its locks may be held by threads that are not here. So it is left
// alone, and never freed.
Crew& Pool::crew() {
  Crew* found = crew_.load(std::memory_order_acquire);
  if (found->here()) return *found;
  auto made = std::make_unique<Crew>(threads_, patient_);
  if (crew_.compare_exchange_strong(found, made.get(), std::memory_order_acq_rel)) return *made.release();
  return *found;  // another thread was faster
}

// OpenMP's threads serve one caller at a time, ours whoever has something to do.
Crew::Slot* Crew::enter() {
  if (threads_ == 1 || (!patient_ && retreat_.lasts())) return nullptr;
  const size_t count = workers_.empty() ? 1 : SLOTS;
  for (size_t i = 0; i < count; ++i)
    if (!slots_[i].used.exchange(true, std::memory_order_acquire)) {
      slots_[i].entered = now();
      slots_[i].lost = 0;
      return &slots_[i];
    }
  return nullptr;
}

// Takes one of the ticket's items and does it, unless somebody else was faster.
bool Crew::take(Slot& slot, uint64_t ticket, size_t thread) {
  if (!slot.ticket.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) return false;
  const size_t items = slot.items;  // once all are finished it may be that of the next sharing
  slot.job(slot.context, items - left(ticket), thread);
  if (slot.finished.fetch_add(1) + 1 == items && slot.sleeps.load()) {
    { std::lock_guard<std::mutex> lock(slot.sleeping); }  // so that the caller does not fall asleep between looking and waiting
    slot.wake.notify_one();
  }
  return true;
}

void Crew::share(Slot& slot, size_t items, Job job, void* context) {
  if (!patient_ && retreat_.lasts()) {  // since an earlier step of the same call
    for (size_t item = 0; item < items; ++item) job(context, item, 0);
    return;
  }
  slot.items = items;
  slot.job = job;
  slot.context = context;
  slot.finished.store(0, std::memory_order_relaxed);
  uint64_t ticket = ++slot.sharings << 32 | items;
  slot.ticket.store(ticket);
  if (asleep_.load()) rouse();
  const int64_t start = now();
  int64_t own = 0;
  while (left(ticket = slot.ticket.load(std::memory_order_acquire))) own += take(slot, ticket, 0);
  if (slot.finished.load(std::memory_order_acquire) != items) wait(slot, items, own ? (now() - start) / own : LONG);
}

// For what others have begun; `one`: what an item takes, or LONG if that is not known.
void Crew::wait(Slot& slot, size_t items, int64_t one) {
  const int64_t start = now();
  const auto done = [&] { return slot.finished.load() == items; };
  if (!look_for(done, one == LONG ? 0 : one)) {
    // Somebody else may use this core meanwhile: perhaps the one that is waited for.
    std::unique_lock<std::mutex> lock(slot.sleeping);
    slot.sleeps.store(true);
    slot.wake.wait(lock, done);
    slot.sleeps.store(false);
  }
  note(slot, now() - start - 2 * one);
}

// Time for which a caller has waited longer than it should.
void Crew::note(Slot& slot, int64_t lost) {
  slot.lost += std::max<int64_t>(lost, 0);
  if (slot.lost > LATE + (now() - slot.entered) / TOLERATED) retreat_.begin(slot.entered, slot.lost);
}

// Takes an item of any caller's.
bool Crew::help(size_t thread) {
  for (Slot& slot : slots_) {
    const uint64_t ticket = slot.ticket.load();
    if (left(ticket) && take(slot, ticket, thread)) return true;
  }
  return false;
}

void Crew::rouse() {
  { std::lock_guard<std::mutex> lock(sleeping_); }  // so that nobody falls asleep between looking and waiting
  wake_.notify_all();
}

void Crew::gather(Slot& slot, Body body, void* context) {
  if (!workers_.empty()) {
    calls_.fetch_add(1);
    if (asleep_.load()) rouse();
    return body(context);
  }
  struct Call {
    Crew* crew;
    Slot* slot;
    Body body;
    void* context;
    int64_t time;
    std::exception_ptr failure;
    void run() {
      crew->note(*slot, now() - time);
      try {
        body(context);
      } catch (...) {  // must not pass through frames of OpenMP
        failure = std::current_exception();
      }
      slot->over.store(true, std::memory_order_release);
      time = now();
    }
    void help(size_t thread) {
      while (!slot->over.load(std::memory_order_acquire))
        if (!crew->help(thread)) relax();
    }
  } call{this, &slot, body, context, now(), nullptr};
  slot.over.store(false, std::memory_order_release);
  const auto run = [](void* of) {
    Call& call = *static_cast<Call*>(of);
    const auto thread = static_cast<size_t>(openmp().number());
    thread ? call.help(thread) : call.run();
  };
  openmp().parallel(run, &call, static_cast<unsigned>(threads_), 0);
  note(slot, now() - call.time);
  if (call.failure) std::rethrow_exception(call.failure);
}

void Crew::work(size_t thread) {
  while (!stop_) {
    const size_t seen = calls_.load();
    if (look_for([&] { return stop_ || help(thread); })) continue;
    const auto called = [&] {
      if (calls_.load() != seen) return true;
      return std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return left(slot.ticket.load()) != 0; });
    };
    std::unique_lock<std::mutex> lock(sleeping_);
    asleep_.fetch_add(1);
    wake_.wait(lock, called);
    asleep_.fetch_sub(1);
  }
}

}  // namespace pinscher
