// Memory for tables, outputs and scratch: huge pages where the system has them, blocks kept for reuse.
#pragma once
#include <cstddef>

namespace rowwise {

void* map_zeroed(std::size_t bytes);  // a table arena; throws std::bad_alloc
void unmap(void* data, std::size_t bytes);

// A block at least this big, 64-byte aligned, contents undefined. A released block may be
// handed out again at once, so its holder has to release it after the last use.
void* acquire(std::size_t bytes);
void release(void* block);
std::size_t kept_bytes();  // released and not yet handed out
void drop_kept();

// A block that grows and goes back when its owner does; growing drops the contents.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch() {
    if (data_) release(data_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  char* at_least(std::size_t bytes) {
    if (bytes > bytes_) {
      if (data_) release(data_);
      data_ = acquire(bytes);
      bytes_ = bytes;
    }
    return static_cast<char*>(data_);
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace rowwise
