// Rows in memory that processes share: the functions of shared_cache.h.
//
// [Note: Shared sets] A set has a number that is odd while a process writes to the set. A reader that finds an odd
// number, or another one after its copy, treats the row as missing. A writer that finds an odd number writes nothing.
// So no process waits, and a process that is killed while it writes leaves one set unused.
//
// A key has the tag of the file that its row is in, so rows of two versions are never taken for each other.
#include "shared_cache.h"

#include <fcntl.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "cache.h"
#include "file.h"

namespace rowwise {
namespace {

constexpr int64_t TAG_SHIFT = 43;      // lower bits are the number of a row among those of all tables
constexpr int64_t AGING = 64;          // counts are halved once in this many accesses per slot
constexpr int64_t AHEAD_OF_SETS = 12;  // ids between the prefetch of a set and its use
constexpr int64_t AHEAD_OF_ROWS = 4;   // ids between the prefetch of a row and its copy
constexpr int RETRIES = 2;

int64_t round_up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

// The places of the rows of a batch, by key.
class BatchMap {
 public:
  void begin(int64_t most) {
    std::size_t size = 64;
    while (size < 2 * std::size_t(most)) size *= 2;
    if (size > entries_.size()) entries_.assign(size, Entry{0, 0, 0}), batch_ = 0;
    ++batch_;
  }
  // The place of a key; `next` if the map had none for it.
  int64_t place(int64_t key, uint64_t hash, int64_t next) {
    const std::size_t mask = entries_.size() - 1;
    for (std::size_t at = std::size_t(hash) & mask;; at = (at + 1) & mask) {
      Entry& entry = entries_[at];
      if (entry.batch != batch_) {
        entry = Entry{key, next, batch_};
        return next;
      }
      if (entry.key == key) return entry.place;
    }
  }

 private:
  struct Entry {
    int64_t key, place, batch;
  };
  std::vector<Entry> entries_;
  int64_t batch_ = 0;
};

struct Header {
  int64_t clock;  // accesses of all processes
  int64_t aged;   // counts that were halved so far
  int64_t tags;   // that were given out, by `next_tag` in tables/store/shared_cache.py
  char unused[40];
};

class SharedCache {
 public:
  SharedCache(char* memory, const SharedCacheShape& shape)
      : shape_(shape), sets_(shape.slots / WAYS), slot_bytes_(round_up(shape.row_bytes, 8)) {
    const auto part = [&](int64_t bytes) {
      char* const begin = memory ? memory + size_ : nullptr;
      size_ += round_up(bytes, 64);
      return begin;
    };
    header_ = reinterpret_cast<Header*>(part(sizeof(Header)));
    numbers_ = reinterpret_cast<uint32_t*>(part(sets_ * int64_t(sizeof(uint32_t))));
    prints_ = reinterpret_cast<uint8_t*>(part(shape.slots));
    stamps_ = reinterpret_cast<uint32_t*>(part(shape.slots * int64_t(sizeof(uint32_t))));
    keys_ = reinterpret_cast<int64_t*>(part(shape.slots * int64_t(sizeof(int64_t))));
    counts_ = reinterpret_cast<uint16_t*>(part(shape.lfu ? shape.keys * int64_t(sizeof(uint16_t)) : 0));
    rows_ = part(shape.slots * slot_bytes_);
  }
  int64_t size() const { return size_; }

  void take(int64_t tag, int64_t count, const CachedFeature* features, const int64_t* offsets, int64_t batch,
            int64_t* values, int64_t* distinct) {
    int64_t total = 0, tables = 0;
    for (int64_t f = 0; f < count; ++f) {
      total += offsets[(features[f].source + 1) * batch] - offsets[features[f].source * batch];
      tables = std::max(tables, features[f].table + 1);
    }
    missing_.clear();
    map_.begin(total);
    next_.assign(std::size_t(tables), 0);
    clock_ = uint32_t(__atomic_fetch_add(&header_->clock, total, __ATOMIC_RELAXED));
    for (int64_t f = 0; f < count; ++f) {
      const int64_t begin = offsets[features[f].source * batch], end = offsets[(features[f].source + 1) * batch];
      take_feature(features[f], features[f].key | tag << TAG_SHIFT, values + begin, end - begin);
    }
    if (shape_.lfu) age(total);
    *distinct = 0;
    for (const int64_t places : next_) *distinct += places;
  }
  const std::vector<MissingRow>& missing() const { return missing_; }

  void put(int64_t tag, int64_t key, const char* row) { write(key | tag << TAG_SHIFT, row); }

  // Others have stamped rows since this process looked: with an older clock theirs would be the oldest.
  void see_time() { clock_ = uint32_t(__atomic_load_n(&header_->clock, __ATOMIC_RELAXED)); }

  void warm(int64_t tag, int64_t key, const char* row, int64_t accessed) {
    if (shape_.lfu)
      *count_of(key) = uint16_t(std::min<int64_t>(std::max<int64_t>(accessed, *count_of(key)), UINT16_MAX));
    clock_ = uint32_t(__atomic_add_fetch(&header_->clock, 1, __ATOMIC_RELAXED));
    put(tag, key, row);
  }

  int64_t row_bytes() const { return shape_.row_bytes; }

 private:
  void take_feature(const CachedFeature& feature, int64_t base, int64_t* values, int64_t count) {
    int64_t& next = next_[std::size_t(feature.table)];
    for (int64_t k = 0; k < count; ++k) {
      if (k + AHEAD_OF_SETS < count) prefetch_set(base + values[k + AHEAD_OF_SETS]);
      if (k + AHEAD_OF_ROWS < count) prefetch_row(base + values[k + AHEAD_OF_ROWS]);
      const int64_t key = base + values[k];
      const uint64_t hash = mix64(uint64_t(key));
      ++clock_;
      if (shape_.lfu) {
        uint16_t* const accessed = count_of(key);
        const uint16_t before = __atomic_load_n(accessed, __ATOMIC_RELAXED);
        if (before != UINT16_MAX) __atomic_store_n(accessed, uint16_t(before + 1), __ATOMIC_RELAXED);
      }
      const int64_t place = map_.place(key, hash, next);
      values[k] = place;
      if (place != next) continue;
      ++next;
      char* const to = feature.memory + place * shape_.row_bytes;
      if (!read(key, hash, to)) missing_.push_back(MissingRow{key & KEYS, to, feature.table, place});
    }
  }

  bool read(int64_t key, uint64_t hash, char* to) {
    const int64_t set = set_of(hash);
    for (int attempt = 0; attempt < RETRIES; ++attempt) {
      const uint32_t before = __atomic_load_n(numbers_ + set, __ATOMIC_ACQUIRE);
      if (before & 1) return false;
      const int64_t slot = find(set * WAYS, key, hash);
      if (slot == NONE) return false;
      copy_out(to, rows_ + slot * slot_bytes_);
      __atomic_thread_fence(__ATOMIC_ACQUIRE);
      if (__atomic_load_n(numbers_ + set, __ATOMIC_RELAXED) == before) {
        __atomic_store_n(stamps_ + slot, clock_, __ATOMIC_RELAXED);
        return true;
      }
    }
    return false;
  }

  void write(int64_t key, const char* row) {
    const uint64_t hash = mix64(uint64_t(key));
    const int64_t set = set_of(hash);
    uint32_t before = __atomic_load_n(numbers_ + set, __ATOMIC_RELAXED);
    if (before & 1 ||
        !__atomic_compare_exchange_n(numbers_ + set, &before, before + 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
      return;                                 // another process writes to the set
    __atomic_thread_fence(__ATOMIC_RELEASE);  // the odd number is seen before what follows
    if (find(set * WAYS, key, hash) == NONE) {
      const int64_t slot = victim_in(set * WAYS);
      __atomic_store_n(prints_ + slot, uint8_t(hash), __ATOMIC_RELAXED);
      __atomic_store_n(keys_ + slot, key + 1, __ATOMIC_RELAXED);
      __atomic_store_n(stamps_ + slot, clock_, __ATOMIC_RELAXED);
      copy_in(rows_ + slot * slot_bytes_, row);
    }
    __atomic_store_n(numbers_ + set, before + 2, __ATOMIC_RELEASE);
  }

  // Words, as others may write or read them at the same time.
  void copy_out(char* to, const char* from) const {
    const int64_t words = shape_.row_bytes / 8, rest = shape_.row_bytes % 8;
    const auto* const stored = reinterpret_cast<const uint64_t*>(from);
    for (int64_t i = 0; i < words; ++i) {
      const uint64_t word = __atomic_load_n(stored + i, __ATOMIC_RELAXED);
      std::memcpy(to + 8 * i, &word, 8);
    }
    if (!rest) return;
    const uint64_t word = __atomic_load_n(stored + words, __ATOMIC_RELAXED);
    std::memcpy(to + 8 * words, &word, std::size_t(rest));
  }
  void copy_in(char* to, const char* from) const {
    const int64_t words = shape_.row_bytes / 8, rest = shape_.row_bytes % 8;
    auto* const stored = reinterpret_cast<uint64_t*>(to);
    uint64_t word = 0;
    for (int64_t i = 0; i < words; ++i) {
      std::memcpy(&word, from + 8 * i, 8);
      __atomic_store_n(stored + i, word, __ATOMIC_RELAXED);
    }
    if (!rest) return;
    word = 0;
    std::memcpy(&word, from + 8 * words, std::size_t(rest));
    __atomic_store_n(stored + words, word, __ATOMIC_RELAXED);
  }

  int64_t find(int64_t first, int64_t key, uint64_t hash) const {
    return find_slot(prints_ + first, first, uint8_t(hash),
                     [&](int64_t slot) { return __atomic_load_n(keys_ + slot, __ATOMIC_RELAXED) == key + 1; });
  }

  int64_t victim_in(int64_t first) const {
    int64_t best = first;
    uint64_t best_rank = 0;
    for (int64_t slot = first; slot < first + WAYS; ++slot) {
      const int64_t key = __atomic_load_n(keys_ + slot, __ATOMIC_RELAXED);
      if (!key) return slot;
      const uint32_t age = clock_ - __atomic_load_n(stamps_ + slot, __ATOMIC_RELAXED);
      const uint64_t rarity = shape_.lfu ? UINT16_MAX - *count_of(key - 1) : 0;
      const uint64_t rank = rarity << 32 | age;
      if (slot == first || rank > best_rank) best = slot, best_rank = rank;
    }
    return best;
  }

  // Ages counts, so that rows that were frequent long ago are evicted: each access halves some, of all keys in turn.
  void age(int64_t accesses) {
    owed_ += accesses * shape_.keys;
    const int64_t count = std::min(owed_ / (AGING * shape_.slots), shape_.keys);
    owed_ -= count * AGING * shape_.slots;
    if (!count) return;
    int64_t at = __atomic_fetch_add(&header_->aged, count, __ATOMIC_RELAXED) % shape_.keys;
    for (int64_t i = 0; i < count; ++i, at = at + 1 == shape_.keys ? 0 : at + 1) counts_[at] >>= 1;
  }

  uint16_t* count_of(int64_t key) const {
    const int64_t number = key & KEYS;
    return counts_ + (number < shape_.keys ? number : number % shape_.keys);
  }
  int64_t set_of(uint64_t hash) const { return int64_t((__uint128_t(hash) * uint64_t(sets_)) >> 64); }
  void prefetch_set(int64_t key) const {
    const int64_t set = set_of(mix64(uint64_t(key)));
    __builtin_prefetch(prints_ + set * WAYS);
    __builtin_prefetch(numbers_ + set);
    if (shape_.lfu) __builtin_prefetch(count_of(key), 1);
  }
  void prefetch_row(int64_t key) const {
    const uint64_t hash = mix64(uint64_t(key));
    const int64_t slot = find(set_of(hash) * WAYS, key, hash);
    if (slot == NONE) return;
    __builtin_prefetch(stamps_ + slot, 1);
    for (int64_t at = 0; at < slot_bytes_; at += 64) __builtin_prefetch(rows_ + slot * slot_bytes_ + at);
  }

  static constexpr int64_t KEYS = (int64_t(1) << TAG_SHIFT) - 1;
  SharedCacheShape shape_;
  int64_t sets_, slot_bytes_, size_ = 0, owed_ = 0;
  uint32_t clock_ = 0;
  Header* header_;
  uint32_t *numbers_, *stamps_;
  uint8_t* prints_;
  int64_t* keys_;  // one more than a slot's key; 0: the slot is empty
  uint16_t* counts_;
  char* rows_;
  BatchMap map_;
  std::vector<int64_t> next_;  // place, by table
  std::vector<MissingRow> missing_;
};

SharedCache* of(void* cache) { return static_cast<SharedCache*>(cache); }

}  // namespace
}  // namespace rowwise

using namespace rowwise;

int64_t shared_cache_bytes(const SharedCacheShape* shape) { return SharedCache(nullptr, *shape).size(); }

void* shared_cache_open(char* memory, const SharedCacheShape* shape) {
  return new (std::nothrow) SharedCache(memory, *shape);
}

void shared_cache_close(void* cache) { delete of(cache); }

int64_t shared_cache_take(void* cache, int64_t tag, int64_t count, const CachedFeature* features,
                          const int64_t* offsets, int64_t batch, int64_t* values, int64_t* distinct) try {
  of(cache)->take(tag, count, features, offsets, batch, values, distinct);
  return int64_t(of(cache)->missing().size());
} catch (const std::bad_alloc&) {
  return -1;
}

const MissingRow* shared_cache_missing(void* cache) { return of(cache)->missing().data(); }

void shared_cache_put(void* cache, int64_t tag, int64_t count, const MissingRow* missing, const char* rows) {
  const int64_t bytes = of(cache)->row_bytes();
  of(cache)->see_time();
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(missing[i].to, rows + i * bytes, std::size_t(bytes));
    of(cache)->put(tag, missing[i].key, rows + i * bytes);
  }
}

void shared_cache_warm(void* cache, int64_t tag, int64_t count, const int64_t* keys, const char* rows,
                       const int64_t* counts) {
  for (int64_t i = 0; i < count; ++i) of(cache)->warm(tag, keys[i], rows + i * of(cache)->row_bytes(), counts[i]);
}

int32_t read_rows(int32_t file, int64_t count, const int64_t* begins, int64_t row_bytes, char* rows) {
  std::vector<int64_t> waiting;
  for (int64_t i = 0; i < count; ++i) {
    const iovec to{rows + i * row_bytes, std::size_t(row_bytes)};
    if (preadv2(file, &to, 1, begins[i], RWF_NOWAIT) != row_bytes) waiting.push_back(i);
  }
  for (const int64_t i : waiting) posix_fadvise(file, begins[i], row_bytes, POSIX_FADV_WILLNEED);
  for (const int64_t i : waiting)
    if (const int error = read_fully(file, rows + i * row_bytes, row_bytes, begins[i])) return error;
  return 0;
}
