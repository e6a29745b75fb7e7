// A set-associative cache of rows: which slot holds which row, and which row has to leave.
//
// It moves no data. tables/store/policy.py has the same policies as functions, and tests hold the two equal.
#pragma once
#include <algorithm>
#include <vector>

#include "memory.h"

namespace rowwise {

constexpr int64_t WAYS = 32;
constexpr int64_t NONE = -1;

inline uint64_t mix64(uint64_t h) {  // the finalizer of MurmurHash3
  h = (h ^ (h >> 33)) * 0xff51afd7ed558ccdull;
  h = (h ^ (h >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return h ^ (h >> 33);
}

// The first slot of a set whose print is this one and for which is_row(slot); NONE: there is none.
template <class F>
inline int64_t find_slot(const uint8_t* prints_of_set, int64_t set, uint8_t print, F is_row) {
  typedef uint8_t Prints __attribute__((vector_size(WAYS)));
  Prints prints;
  __builtin_memcpy(&prints, prints_of_set, sizeof prints);
  const auto equal = prints == print;
  uint64_t words[WAYS / 8];
  __builtin_memcpy(words, &equal, sizeof words);
  for (int64_t word = 0; word < WAYS / 8; ++word)
    for (uint64_t bits = words[word] & 0x0101010101010101ull; bits; bits &= bits - 1) {
      const int64_t slot = set + word * 8 + (__builtin_ctzll(bits) >> 3);
      if (is_row(slot)) return slot;
    }
  return NONE;
}

// Rows whose set is full of rows of the same batch: an open-addressing map that lives for one batch.
class Overflow {
 public:
  Overflow(int64_t first_slot, int64_t capacity) : first_slot_(first_slot), capacity_(capacity) {
    while (int64_t(1) << bits_ < 2 * capacity) ++bits_;
  }
  int64_t count() const { return count_; }
  int64_t find(int64_t row, uint64_t hash) const {
    if (!count_) return NONE;
    for (uint64_t at = hash >> (64 - bits_);; at = (at + 1) & (keys_.size() - 1)) {
      if (keys_[at] == row) return first_slot_ + places_[at];
      if (keys_[at] == NONE) return NONE;
    }
  }
  int64_t add(int64_t row, uint64_t hash) {  // NONE: full
    if (count_ == capacity_) return NONE;
    if (keys_.empty()) keys_.assign(std::size_t(1) << bits_, NONE), places_.resize(keys_.size());
    uint64_t at = hash >> (64 - bits_);
    while (keys_[at] != NONE) at = (at + 1) & (keys_.size() - 1);
    keys_[at] = row, places_[at] = int32_t(count_);
    return first_slot_ + count_++;
  }
  void clear() {
    if (count_) std::fill(keys_.begin(), keys_.end(), NONE);
    count_ = 0;
  }

 private:
  int64_t first_slot_, capacity_, count_ = 0;
  int bits_ = 1;
  std::vector<int64_t> keys_;
  std::vector<int32_t> places_;
};

// Rows with a slot of their own, in ascending order: a bit for each row of the table, and for each 64 rows the number
// of such rows before them. The slot of a row is its rank.
class PinnedRows {
 public:
  PinnedRows(int64_t rows, int64_t first_slot, const int64_t* pinned, int64_t count)
      : first_slot_(first_slot), count_(count), words_(count ? (rows + 63) / 64 : 0) {
    for (int64_t i = 0; i < count; ++i) words_[pinned[i] >> 6].bits |= uint64_t(1) << (pinned[i] & 63);
    uint32_t before = 0;
    for (int64_t i = 0; i < words_.size(); ++i) {
      words_[i].before = before;
      before += uint32_t(__builtin_popcountll(words_[i].bits));
    }
  }
  int64_t count() const { return count_; }
  void prefetch(int64_t row) const {
    if (count_) __builtin_prefetch(words_.data() + (row >> 6));
  }
  int64_t slot_of(int64_t row) const {  // NONE: the row is not pinned
    if (!count_) return NONE;
    const Word& word = words_[row >> 6];
    const uint64_t bit = uint64_t(1) << (row & 63);
    return word.bits & bit ? first_slot_ + word.before + __builtin_popcountll(word.bits & (bit - 1)) : NONE;
  }

 private:
  struct Word {
    uint64_t bits;
    uint32_t before;
  };
  int64_t first_slot_, count_;
  ZeroArray<Word> words_;
};

struct Placed {
  int64_t slot;         // NONE: no slot is left
  bool hit;             // the row was in the slot
  int64_t victim;       // the row that was in the slot, NONE: none
  bool victim_changed;  // and has to be written
  bool marked;          // the row was there, and was not to be written before
};

class Cache {
 public:
  // `slots`: of the sets. Pinned rows have the slots behind them, and the overflow the last ones. `slot_rows`: of all
  // slots, kept up to date for the caller.
  Cache(int64_t rows, int64_t slots, const int64_t* pinned, int64_t pins, int64_t overflow, bool lfu,
        int64_t* slot_rows)
      : slots_(slots),
        lfu_(lfu),
        slot_rows_(slot_rows),
        stamps_(slots),
        prints_(slots),
        changed_(slots + pins + overflow),
        counts_(lfu ? rows : 0),
        pinned_(rows, slots, pinned, pins),
        overflow_(slots + pins, overflow) {
    std::fill_n(slot_rows_, changed_.size(), NONE);
  }

  void begin_batch() { batch_begin_ = clock_; }

  void prefetch(int64_t row) const {
    const int64_t set = set_of(mix64(uint64_t(row)));
    __builtin_prefetch(prints_.data() + set);
    pinned_.prefetch(row);
  }

  int64_t find(int64_t row) const {
    const int64_t own = pinned_.slot_of(row);
    if (own != NONE) return slot_rows_[own] == row ? own : NONE;
    const uint64_t hash = mix64(uint64_t(row));
    const int64_t slot = find_in_set(row, set_of(hash), print_of(hash));
    return slot == NONE ? overflow_.find(row, hash) : slot;
  }

  Placed place(int64_t row, bool changes, bool counts) {
    const int64_t own = pinned_.slot_of(row);
    if (own != NONE) return place_pinned(row, own, changes);
    const uint64_t hash = mix64(uint64_t(row));
    const int64_t set = set_of(hash);
    ++clock_;
    if (lfu_ && counts && counts_[row] != UINT16_MAX) ++counts_[row];
    Placed placed{find_in_set(row, set, print_of(hash)), true, NONE, false, false};
    if (placed.slot == NONE) placed.slot = overflow_.find(row, hash);
    if (placed.slot == NONE) {
      placed.hit = false;
      placed.slot = victim_in(set);
      if (placed.slot == NONE) {
        placed.slot = overflow_.add(row, hash);
        if (placed.slot == NONE) return placed;
      } else {
        placed.victim = slot_rows_[placed.slot];
        placed.victim_changed = placed.victim != NONE && changed_[placed.slot];
        prints_[placed.slot] = print_of(hash);
      }
      slot_rows_[placed.slot] = row;
      changed_[placed.slot] = 0;
    }
    if (placed.slot < slots_) stamps_[placed.slot] = clock_;
    placed.marked = placed.hit && changes && !changed_[placed.slot];
    changed_[placed.slot] |= uint8_t(changes);
    return placed;
  }

  // f(row, slot) for each changed row of the overflow, which ends with the batch.
  template <class F>
  void end_batch(F f) {
    const int64_t first = slots_ + pinned_.count();
    for (int64_t slot = first; slot < first + overflow_.count(); ++slot) {
      if (changed_[slot]) f(slot_rows_[slot], slot);
      slot_rows_[slot] = NONE, changed_[slot] = 0;
    }
    overflow_.clear();
  }
  template <class F>
  void clean(F f) {
    for (int64_t slot = 0; slot < slots_ + pinned_.count(); ++slot) {
      if (changed_[slot]) f(slot_rows_[slot], slot);
      changed_[slot] = 0;
    }
  }
  void mark_changed(int64_t slot, bool changed = true) { changed_[slot] = changed; }
  void empty(int64_t slot) { slot_rows_[slot] = NONE, changed_[slot] = 0; }
  void clear() {
    std::fill_n(slot_rows_, changed_.size(), NONE);
    changed_.clear();
    overflow_.clear();
  }

 private:
  int64_t set_of(uint64_t hash) const { return int64_t((__uint128_t(hash) * uint64_t(slots_ / WAYS)) >> 64) * WAYS; }
  static uint8_t print_of(uint64_t hash) { return uint8_t(hash); }  // the set is a matter of the high bits

  int64_t find_in_set(int64_t row, int64_t set, uint8_t print) const {
    return find_slot(prints_.data() + set, set, print, [&](int64_t slot) { return slot_rows_[slot] == row; });
  }

  // A pinned row misses once: when it is accessed for the first time.
  Placed place_pinned(int64_t row, int64_t slot, bool changes) {
    const bool hit = slot_rows_[slot] == row;
    if (!hit) slot_rows_[slot] = row, changed_[slot] = 0;
    const bool marked = hit && changes && !changed_[slot];
    changed_[slot] |= uint8_t(changes);
    return {slot, hit, NONE, false, marked};
  }

  // Rows of this batch stay: they were accessed since it began. Ages are differences, so the clock may wrap.
  int64_t victim_in(int64_t set) const {
    const uint32_t batch_age = clock_ - batch_begin_;
    int64_t best = NONE;
    uint64_t best_rank = 0;
    for (int64_t slot = set; slot < set + WAYS; ++slot) {
      if (slot_rows_[slot] == NONE) return slot;
      const uint32_t age = clock_ - stamps_[slot];
      if (age < batch_age) continue;
      const uint64_t rarity = lfu_ ? UINT16_MAX - counts_[slot_rows_[slot]] : 0;
      const uint64_t rank = rarity << 32 | age;
      if (best == NONE || rank > best_rank) best = slot, best_rank = rank;
    }
    return best;
  }

  int64_t slots_;
  bool lfu_;
  uint32_t clock_ = 0, batch_begin_ = 0;
  int64_t* slot_rows_;
  ZeroArray<uint32_t> stamps_;
  ZeroArray<uint8_t> prints_, changed_;
  ZeroArray<uint16_t> counts_;  // of every row, in the cache or not
  PinnedRows pinned_;
  Overflow overflow_;
};

}  // namespace rowwise
