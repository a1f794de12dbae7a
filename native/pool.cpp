#include "pool.h"

#include <dlfcn.h>
#include <pthread.h>

#include <chrono>
#include <exception>
#include <memory>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pinscher {
namespace {

constexpr auto PATIENCE = std::chrono::microseconds(200);  // awake between steps, asleep between requests
constexpr int LOOKS = 64;                                  // between two looks at the clock

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

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

Crew::Crew(size_t threads) : forks_(forks), threads_(threads) {
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
  {
    std::lock_guard<std::mutex> lock(sleeping_);
    stop_ = true;
    ++gathering_;
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

bool Crew::here() const { return forks_ == forks.load(std::memory_order_relaxed); }

Pool::Pool(size_t threads) : threads_(threads) {
  if (!threads) throw std::invalid_argument("a pool has one thread at least");
  crew_ = new Crew(threads);
}

Pool::~Pool() {
  if (Crew* const last = crew_; last->here()) delete last;
}

// What a parent's crew was doing at the fork is unknown: its locks may be held by threads that are not here. So it is left
// alone, and never freed.
Crew& Pool::crew() {
  Crew* found = crew_.load(std::memory_order_acquire);
  if (found->here()) return *found;
  auto made = std::make_unique<Crew>(threads_);
  if (crew_.compare_exchange_strong(found, made.get(), std::memory_order_acq_rel)) return *made.release();
  return *found;  // another thread was faster
}

// Takes one of the ticket's items and does it, unless somebody else was faster.
bool Crew::take(uint64_t ticket, size_t thread) {
  if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) return false;
  job_(context_, items_ - static_cast<uint32_t>(ticket), thread);
  finished_.fetch_add(1, std::memory_order_release);
  return true;
}

void Crew::share(size_t items, Job job, void* context) {
  items_ = items;
  job_ = job;
  context_ = context;
  finished_.store(0, std::memory_order_relaxed);
  uint64_t ticket = ++sharings_ << 32 | items;
  ticket_.store(ticket, std::memory_order_release);
  while (static_cast<uint32_t>(ticket = ticket_.load(std::memory_order_acquire))) take(ticket, 0);
  while (finished_.load(std::memory_order_acquire) != items) relax();
}

void Crew::help(size_t thread) {
  while (!over_.load(std::memory_order_acquire)) {
    const uint64_t ticket = ticket_.load(std::memory_order_acquire);
    if (!static_cast<uint32_t>(ticket) || !take(ticket, thread)) relax();
  }
}

void Crew::gather(Body body, void* context) {
  struct Call {
    Crew* crew;
    Body body;
    void* context;
    std::exception_ptr failure;
    void run() {
      try {
        body(context);
      } catch (...) {  // must not pass through frames of OpenMP
        failure = std::current_exception();
      }
      crew->over_.store(true, std::memory_order_release);
    }
  } call{this, body, context, nullptr};
  over_.store(false, std::memory_order_release);
  if (workers_.empty()) {
    const auto run = [](void* of) {
      Call& call = *static_cast<Call*>(of);
      const auto thread = static_cast<size_t>(openmp().number());
      thread ? call.crew->help(thread) : call.run();
    };
    openmp().parallel(run, &call, static_cast<unsigned>(threads_), 0);
  } else {
    {
      std::lock_guard<std::mutex> lock(sleeping_);  // so that nobody falls asleep between looking and waiting
      gathering_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    call.run();
  }
  if (call.failure) std::rethrow_exception(call.failure);
}

void Crew::work(size_t thread) {
  size_t seen = 0;
  while (true) {
    const auto until = std::chrono::steady_clock::now() + PATIENCE;
    while (gathering_.load(std::memory_order_acquire) == seen) {
      int looks = LOOKS;
      while (looks-- && gathering_.load(std::memory_order_acquire) == seen) relax();
      if (looks >= 0 || std::chrono::steady_clock::now() < until) continue;
      std::unique_lock<std::mutex> lock(sleeping_);
      wake_.wait(lock, [&] { return gathering_.load(std::memory_order_acquire) != seen; });
    }
    seen = gathering_.load(std::memory_order_acquire);
    if (stop_) return;
    help(thread);
  }
}

}  // namespace pinscher
