// Arrays whose pages take no memory until they are written, and aligned buffers for direct input and output.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace rowwise {

template <class T>
class ZeroArray {
 public:
  explicit ZeroArray(int64_t count) : count_(count) {
    if (!count) return;
    void* pages = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<T*>(pages);
  }
  ZeroArray(ZeroArray&& other) noexcept : data_(other.data_), count_(other.count_) { other.data_ = nullptr; }
  ZeroArray(const ZeroArray&) = delete;
  ZeroArray& operator=(const ZeroArray&) = delete;
  ~ZeroArray() {
    if (data_) munmap(data_, bytes());
  }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return count_; }
  void clear() {  // gives the pages back
    if (data_) madvise(data_, bytes(), MADV_DONTNEED);
  }

 private:
  std::size_t bytes() const { return std::size_t(count_) * sizeof(T); }
  T* data_ = nullptr;
  int64_t count_;
};

// Tables without optimizer state have no memory for it.
inline void copy_bytes(char* to, const char* from, int64_t bytes) {
  if (bytes) std::memcpy(to, from, std::size_t(bytes));
}

constexpr int64_t BLOCK = 4096;  // the unit of direct input and output

class Buffer {
 public:
  explicit Buffer(int64_t bytes) : data_(static_cast<char*>(std::aligned_alloc(BLOCK, std::size_t(bytes)))) {
    if (!data_) throw std::bad_alloc();
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }
  char* data() { return data_; }

 private:
  char* data_;
};

}  // namespace rowwise
