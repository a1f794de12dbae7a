// Arrays that start at a cache line, as the kernels like them.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace pinscher {

constexpr size_t LINE = 64;
constexpr size_t SLACK = 128;  // bytes behind the end that a wide load may touch

template <typename T>
class Array {
 public:
  Array() = default;
  explicit Array(size_t count) { resize(count); }
  // Makes room for `count` numbers, all zero; what was there is gone. Keeps the room it has if that is enough.
  void resize(size_t count) {
    reserve(count);
    if (count) std::memset(data_.get(), 0, count * sizeof(T));
  }
  // The same without zeros: whatever was there before.
  void reserve(size_t count) {
    if (count > room_) {
      const size_t bytes = (count * sizeof(T) + SLACK + LINE - 1) / LINE * LINE;
      void* fresh = std::aligned_alloc(LINE, bytes);
      if (!fresh) throw std::bad_alloc();
      std::memset(fresh, 0, bytes);
      data_.reset(static_cast<T*>(fresh));
      room_ = count;
    }
    size_ = count;
  }
  size_t size() const { return size_; }
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  T& operator[](size_t i) { return data_.get()[i]; }
  const T& operator[](size_t i) const { return data_.get()[i]; }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  size_t size_ = 0, room_ = 0;
};

}  // namespace pinscher
