#include "pool.h"

#include <dlfcn.h>

#include <chrono>

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

}  // namespace

Pool::Pool(size_t threads) : threads_(threads) {
  if (openmp().parallel) return;
  for (size_t i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(sleeping_);
    stop_ = true;
    ++round_;
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::take(size_t thread) {
  for (size_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items_;) job_(context_, item, thread);
}

void Pool::run_shared(size_t items, Job job, void* context) {
  items_ = items;
  job_ = job;
  context_ = context;
  next_.store(0, std::memory_order_relaxed);
  openmp().parallel([](void* pool) { static_cast<Pool*>(pool)->take(static_cast<size_t>(openmp().number())); }, this,
                    static_cast<unsigned>(threads_), 0);
}

void Pool::run(size_t items, Job job, void* context) {
  if (workers_.empty()) return run_shared(items, job, context);
  items_ = items;
  job_ = job;
  context_ = context;
  next_.store(0, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> lock(sleeping_);  // so that nobody falls asleep between looking and waiting
    round_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  take(0);
  while (done_.load(std::memory_order_acquire) != workers_.size()) relax();
}

void Pool::work(size_t thread) {
  size_t seen = 0;
  while (true) {
    const auto until = std::chrono::steady_clock::now() + PATIENCE;
    while (round_.load(std::memory_order_acquire) == seen) {
      int looks = LOOKS;
      while (looks-- && round_.load(std::memory_order_acquire) == seen) relax();
      if (looks >= 0 || std::chrono::steady_clock::now() < until) continue;
      std::unique_lock<std::mutex> lock(sleeping_);
      wake_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != seen; });
    }
    seen = round_.load(std::memory_order_acquire);
    if (stop_) return;
    take(thread);
    done_.fetch_add(1, std::memory_order_release);
  }
}

}  // namespace pinscher
