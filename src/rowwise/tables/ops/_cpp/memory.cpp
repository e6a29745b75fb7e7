// Random rows of 4 KB pages miss the translation cache at every row, so arenas ask for huge pages; a fresh
// output of tens of megabytes costs as much in page faults as the lookup that fills it, so outputs are kept.
// The cost: freed outputs stay resident, within the two limits below.
#include "memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <vector>

namespace rowwise {
namespace {

constexpr std::size_t huge_page = std::size_t(2) << 20;
// A step of training frees all its outputs at once; if some were unmapped, the next would fault their pages in again.
constexpr std::size_t kept_blocks = 64, kept_limit = std::size_t(1) << 30;
constexpr std::size_t always_kept = 6;  // blocks, however large

std::size_t round_up(std::size_t bytes) {
  const std::size_t unit = bytes >= huge_page ? huge_page : 4096;
  return (bytes + unit - 1) / unit * unit;
}

// Blocks come in sizes an eighth apart, so that a batch a little larger than the last finds its block again.
std::size_t size_class(std::size_t bytes) {
  std::size_t step = 4096;
  while (step * 8 < bytes) step *= 2;
  return round_up((bytes + step - 1) / step * step);
}

struct Block {
  void* data;
  std::size_t bytes;
};

std::mutex mutex;
std::vector<Block> kept;  // oldest first
std::map<void*, std::size_t> in_use;

}  // namespace

void* map_zeroed(std::size_t bytes) {
  // Over-map by a huge page and cut, so that the block starts on one.
  bytes = round_up(bytes ? bytes : 1);
  const std::size_t slack = bytes >= huge_page ? huge_page : 0;
  void* raw = mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) throw std::bad_alloc();
  if (!slack) return raw;
  char* begin = static_cast<char*>(raw);
  const std::size_t head = (huge_page - reinterpret_cast<uintptr_t>(begin) % huge_page) % huge_page;
  if (head) munmap(begin, head);
  if (slack - head) munmap(begin + head + bytes, slack - head);
#if defined(MADV_HUGEPAGE)
  madvise(begin + head, bytes, MADV_HUGEPAGE);  // advice: where it is refused the pages stay small
#endif
  return begin + head;
}

void unmap(void* data, std::size_t bytes) { munmap(data, round_up(bytes ? bytes : 1)); }

void* acquire(std::size_t bytes) {
  bytes = size_class(bytes ? bytes : 1);
  std::lock_guard<std::mutex> lock(mutex);
  std::size_t best = kept.size();
  // The smallest that fits, if it wastes less than a quarter; of equals the last released, which caches may still hold.
  for (std::size_t i = kept.size(); i-- > 0;)
    if (kept[i].bytes >= bytes && kept[i].bytes - bytes <= bytes / 4 &&
        (best == kept.size() || kept[i].bytes < kept[best].bytes))
      best = i;
  void* data;
  if (best < kept.size()) {
    data = kept[best].data;
    bytes = kept[best].bytes;
    kept.erase(kept.begin() + long(best));
  } else {
    data = map_zeroed(bytes);
  }
  in_use[data] = bytes;
  return data;
}

void release(void* block) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = in_use.find(block);
  kept.push_back({block, found->second});
  in_use.erase(found);
  std::size_t total = 0;
  for (const Block& b : kept) total += b.bytes;
  while (kept.size() > kept_blocks || (total > kept_limit && kept.size() > always_kept)) {
    total -= kept.front().bytes;
    unmap(kept.front().data, kept.front().bytes);
    kept.erase(kept.begin());
  }
}

std::size_t kept_bytes() {
  std::lock_guard<std::mutex> lock(mutex);
  std::size_t total = 0;
  for (const Block& b : kept) total += b.bytes;
  return total;
}

void drop_kept() {
  std::lock_guard<std::mutex> lock(mutex);
  for (const Block& b : kept) unmap(b.data, b.bytes);
  kept.clear();
}

}  // namespace rowwise
