// The rows of ids, section by section over blocks of ids that stay in cache.
//
// Included by isa.cpp only; rowwise/tables/ops/reference/idmap.py says the same in torch. Ids of a set are found by
// popcounts, which take twenty instructions on base processors and one on wider ones.
#pragma once
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "random.h"

namespace rowwise::ISA {
namespace {

constexpr int64_t id_block = 1024, id_batch = 64;
constexpr uint64_t no_bits = 0;

inline uint64_t mix_word(uint64_t x) { return mix(x + 0x9E3779B97F4A7C15ull); }

inline int64_t select_bit(uint64_t bits, int64_t k) {  // where the one is that has k ones below it
#ifdef __BMI2__
  return __builtin_ctzll(__builtin_ia32_pdep_di(uint64_t(1) << k, bits));
#else
  for (; k > 0; --k) bits &= bits - 1;
  return __builtin_ctzll(bits);
#endif
}

// Numbers of up to 56 bits, one after another.
struct Packed {
  const char* bytes;
  int64_t last;  // the byte at which the last word begins: nothing past it is read
  int64_t bits;
  uint64_t mask;

  Packed(const uint64_t* words, int64_t count, int64_t bits)
      : bytes(reinterpret_cast<const char*>(count && bits ? words : &no_bits)),
        last(std::max<int64_t>(0, (words_of(count, bits) - 1) * 8)),
        bits(bits),
        mask((uint64_t(1) << bits) - 1) {}
  int64_t operator[](int64_t i) const {
    const int64_t bit = i * bits, byte = std::min(bit >> 3, last);
    uint64_t word;
    std::memcpy(&word, bytes + byte, 8);
    return int64_t((word >> (bit - 8 * byte)) & mask);
  }
  void near(int64_t i) const { __builtin_prefetch(bytes + std::min((i * bits) >> 3, last)); }
};

struct IdRun {  // places of the ids that share a bucket
  int64_t first, last;
};

struct Found {
  int64_t place;  // of the first id of the set that is not below the one looked for
  bool is_in;
};

// A set of ids; see [Note: Sets of ids]. Numbers from damaged words are clamped.
struct IdSet {
  SetLayout layout;
  const uint64_t *starts, *zeros, *marks;
  int64_t count, low_bits;
  Packed lows;

  IdSet(const IdSection& s, const IdMap& map)
      : layout(s, map.known),
        starts(map.words + s.at),
        zeros(starts + layout.zeros),
        marks(starts + layout.marks),
        count(s.count),
        low_bits(s.low_bits),
        lows(starts + layout.lows, s.count, s.low_bits) {}

  int64_t start_of(int64_t block) const {
    return block < layout.zeros ? int64_t(std::min(starts[block], uint64_t(layout.mark_bits))) : layout.mark_bits;
  }
  // The bit at which a bucket begins (select): past one zero for each bucket before it.
  int64_t begin_of(int64_t bucket) const {
    if (bucket >= layout.buckets) return layout.mark_bits;
    const int64_t block = bucket / SetLayout::start_buckets, begin = start_of(block), end = start_of(block + 1);
    int64_t wanted = bucket % SetLayout::start_buckets, w = begin / 64;
    if (!wanted) return begin;
    if (w >= layout.lows - layout.marks) return layout.mark_bits;
    uint64_t word = ~marks[w] & (~uint64_t(0) << (begin & 63));
    if (end - begin > 64 * SetLayout::zero_words) {  // many ids in these buckets: skip words by `zeros`
      const uint64_t* first = zeros + w / SetLayout::zero_words + 1;
      const uint64_t* past = zeros + std::min(end / 64 / SetLayout::zero_words + 1, layout.marks - layout.zeros);
      const uint64_t* at = std::lower_bound(first, past, uint64_t(bucket));
      if (at != first) {
        w = (at - 1 - zeros) * SetLayout::zero_words, word = ~marks[w];
        // In damaged words the search may end anywhere.
        wanted = std::max<int64_t>(1, bucket - int64_t(std::min(at[-1], uint64_t(bucket))));
      }
    }
    return past_zero(w, word, wanted);
  }
  int64_t past_zero(int64_t w, uint64_t word, int64_t wanted) const {  // `word`: the zeros that count, as ones
    for (;;) {
      const int64_t here = __builtin_popcountll(word);
      if (here >= wanted) return std::min(64 * w + select_bit(word, wanted - 1) + 1, layout.mark_bits);
      wanted -= here;
      if (++w >= layout.lows - layout.marks) return layout.mark_bits;
      word = ~marks[w];
    }
  }
  // Prefetches for a block of ids, one function for each level (`starts`, `marks`, `lows`): a single id would wait for
  // memory three times.
  void near_start(int64_t id) const { __builtin_prefetch(starts + (id >> low_bits) / SetLayout::start_buckets); }
  void near_marks(int64_t id) const {
    const int64_t begin = start_of((id >> low_bits) / SetLayout::start_buckets);
    __builtin_prefetch(marks + begin / 64);
    __builtin_prefetch(marks + begin / 64 + 8);
  }
  IdRun run_of(int64_t id) const {
    const int64_t bucket = id >> low_bits, begin = begin_of(bucket);
    int64_t ids = 0;
    if (begin < layout.mark_bits) {
      const uint64_t rest = ~marks[begin / 64] >> (begin & 63);
      ids = rest ? __builtin_ctzll(rest) : begin_of(bucket + 1) - 1 - begin;
    }
    const int64_t first = std::min(std::max<int64_t>(begin - bucket, 0), count);
    lows.near(first);
    return {first, std::min(std::max(first + ids, first), count)};
  }
  Found find(int64_t id, const IdRun& run) const {
    const int64_t low = id & int64_t(lows.mask);
    int64_t first = run.first, last = run.last;
    while (last - first > 8) {
      const int64_t middle = first + (last - first) / 2;
      (lows[middle] < low ? first : last) = middle;
    }
    int64_t below = 0;
    for (int64_t i = first; i < last; ++i) below += lows[i] < low;
    first += below;
    return {first, first < run.last && lows[first] == low};
  }
};

// A permutation of 0 .. ids - 1; see [Note: Scrambled ids].
struct Order {
  uint64_t keys[4], ids, mask;
  int half = 1;

  Order(uint64_t seed, int64_t known) : ids(uint64_t(known)) {
    for (uint64_t& key : keys) key = seed = mix_word(seed);
    while (uint64_t(1) << (2 * half) < ids) ++half;
    mask = (uint64_t(1) << half) - 1;
  }
  uint64_t operator()(uint64_t id) const {
    do {
      uint64_t a = id >> half, b = id & mask;
      for (uint64_t key : keys) {
        const uint64_t next = a ^ (mix_word(b ^ key) & mask);
        a = b, b = next;
      }
      id = a << half | b;
    } while (id >= ids);
    return id;
  }
};

// Some ids in one column, and the rows they have so far: -1 is none.
struct IdBlock {
  int64_t count;
  int64_t ids[id_block], rows[id_block], before[id_block];  // before: ids below in the sets so far

  // number(id) for all that have no row yet; what is not below the section's rows is none.
  template <class F>
  void fill(const IdSection& s, int64_t begin, int64_t end, F number) {
    for (int64_t i = begin; i < end; ++i) {
      if (rows[i] >= 0) continue;
      const uint64_t row = uint64_t(number(i));
      rows[i] = row < uint64_t(s.rows) ? s.base + int64_t(row) : -1;
    }
  }
  void hash(const IdSection& s) {
    const uint64_t key = mix_word(uint64_t(s.seed)), rows_ = uint64_t(s.rows);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = s.base + int64_t(mix_word(uint64_t(ids[i]) ^ key) % rows_);
      rows[i] = rows[i] < 0 ? row : rows[i];
    }
  }
  void find(const IdSection& s, const IdMap& map) {
    if (!s.count) return;
    const IdSet set(s, map);
    const bool listed = s.kind == listed_kind;
    const Packed entries(set.starts + set.layout.entries, s.count, listed ? s.entry_bits : 0);
    for (int64_t at = 0; at < count; at += id_batch) {
      IdRun runs[id_batch];
      const int64_t some = std::min(id_batch, count - at);
      for (int64_t i = at; i < at + some; ++i) set.near_start(ids[i]);
      for (int64_t i = at; i < at + some; ++i) set.near_marks(ids[i]);
      for (int64_t i = 0; i < some; ++i) runs[i] = set.run_of(ids[at + i]);
      fill(s, at, at + some, [&](int64_t i) {
        const Found found = set.find(ids[i], runs[i - at]);
        before[i] += found.place;
        return !found.is_in ? -1 : listed ? entries[found.place] : found.place;
      });
    }
  }
  void run(const IdSection& s, const IdMap& map) {
    switch (s.kind) {
      case hash_kind:
        return hash(s);
      case quotient_kind:
      case remainder_kind: {
        const Order order(uint64_t(s.seed), map.known);
        const uint64_t divisor = uint64_t(s.divisor);
        if (s.kind == quotient_kind)
          return fill(s, 0, count, [&](int64_t i) { return order(uint64_t(ids[i])) / divisor; });
        return fill(s, 0, count, [&](int64_t i) { return order(uint64_t(ids[i])) % divisor; });
      }
      case every_kind: {
        const Packed entries(map.words + s.at, map.known, s.entry_bits);
        return fill(s, 0, count, [&](int64_t i) { return entries[ids[i]]; });
      }
      case rest_kind:
        return fill(s, 0, count, [&](int64_t i) { return ids[i] - before[i]; });
      default:
        return find(s, map);
    }
  }
};

template <class Id>
void map_block(const Id* ids, int64_t n, const IdMap& map, int64_t* out) {
  IdBlock block;
  const auto is_known = [&](int64_t i) { return uint64_t(int64_t(ids[i])) < uint64_t(map.known); };
  block.count = n;
  for (int64_t i = 0; i < n; ++i) block.ids[i] = is_known(i) ? int64_t(ids[i]) : 0;
  for (int64_t c = 0; c < map.columns; ++c) {
    std::fill_n(block.rows, n, int64_t(-1));
    std::fill_n(block.before, n, int64_t(0));
    for (int64_t s = 0; s < map.num_sections; ++s)
      if (map.sections[s].column == c) block.run(map.sections[s], map);
    for (int64_t i = 0; i < n; ++i) out[i * map.columns + c] = is_known(i) ? block.rows[i] : -1;
  }
}

void map_ids(const void* ids, bool wide, int64_t n, const IdMap& map, int64_t* out) {
  for (int64_t i = 0; i < n; i += id_block) {
    const int64_t some = std::min(id_block, n - i);
    if (wide)
      map_block(static_cast<const int64_t*>(ids) + i, some, map, out + i * map.columns);
    else
      map_block(static_cast<const int32_t*>(ids) + i, some, map, out + i * map.columns);
  }
}

}  // namespace
}  // namespace rowwise::ISA
