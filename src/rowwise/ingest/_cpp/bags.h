// Gathers the ids of a feature from Arrow's arrays: without missing ids, truncated lists, rows in any order.
//
// Ids are first copied to their place in the output, and mapped in place a chunk later, while they are in L1.
// So hashing uses full vectors even with short lists.
#pragma once
#include <algorithm>
#include <type_traits>

#include "hash.h"

namespace rowwise_ingest::ISA {

constexpr int64_t CHUNK = 1024;
constexpr int64_t WIDE = 8;           // ids copied at once, a cache line
constexpr int64_t AHEAD = 24;         // prefetch distance in rows
constexpr int64_t TOUCHED = 1 << 20;  // bytes that fit into L2

static inline bool bit(const uint8_t* bits, int64_t at) { return bits[at >> 3] >> (at & 7) & 1; }

// Prefetches an array sequentially before its values are picked in random order.
template <class T>
static inline void touch(const T* values, int64_t count, int64_t picked) {
  if (picked * 4 < count || count > TOUCHED / int64_t(sizeof(T))) return;
  for (int64_t i = 0; i < count; i += int64_t(64 / sizeof(T))) __builtin_prefetch(values + i);
}

struct Range {
  int64_t begin, end;
};

template <class Offset>
struct Lists {
  const Offset* offsets;
  int64_t base;
  explicit Lists(const Ids& ids) : offsets(static_cast<const Offset*>(ids.offsets)), base(ids.base) {}
  Range operator()(int64_t row) const { return {int64_t(offsets[row]) - base, int64_t(offsets[row + 1]) - base}; }
};
struct Singles {
  explicit Singles(const Ids&) {}
  Range operator()(int64_t row) const { return {row, row + 1}; }
};

template <class Rows>
static int64_t count_of(const Ids& ids) {
  const Rows range(ids);
  int64_t total = 0;
  bool wrong = false;
  auto length = [&](Range at) {
    wrong |= (at.begin < 0) | (at.end < at.begin) | (at.end > ids.count);
    return std::min(at.end - at.begin, ids.first);
  };
  if (!ids.order && !ids.row_valid && !ids.id_valid) {
    for (int64_t r = 0; r < ids.rows; ++r) total += length(range(r));
    return wrong ? -1 : total;
  }
  for (int64_t r = 0; r < ids.rows; ++r) {
    const int64_t row = ids.order ? ids.order[r] : r;
    const Range at = range(row);
    int64_t valid = length(at);
    if (ids.row_valid && !bit(ids.row_valid, ids.row_bit + row)) continue;
    if (ids.id_valid && !wrong) {
      valid = 0;
      for (int64_t i = at.begin; i < at.end; ++i) valid += bit(ids.id_valid, ids.id_bit + i);
      valid = std::min(valid, ids.first);
    }
    total += valid;
  }
  return wrong ? -1 : total;
}

template <class T, class Rows>
struct Filler {
  const Ids& ids;
  const T* values;
  const Rows range;
  const Make& make;
  int64_t* out;
  int64_t room, at = 0, done = 0, bad = 0;

  Filler(const Ids& ids, const Make& make, int64_t* out, int64_t room)
      : ids(ids), values(static_cast<const T*>(ids.values)), range(ids), make(make), out(out), room(room) {}

  void flush() {
    bad |= map(out + done, out + done, at - done, make);
    done = at;
  }
  void fetch(int64_t r) const {
    const Range next = range(ids.order[r]);
    const int64_t end = next.begin + std::min(next.end - next.begin, ids.first);
    for (int64_t i = next.begin; i < end; i += int64_t(64 / sizeof(T))) __builtin_prefetch(values + i);
  }
  void copy(int64_t from, int64_t length) {
    if (!ids.order)
      for (int64_t i = 0; i < length; i += int64_t(64 / sizeof(T))) __builtin_prefetch(values + from + FAR + i);
    const int64_t whole = (length + WIDE - 1) / WIDE * WIDE;
    // Copies whole WIDE blocks: the next row overwrites the excess.
    if (at + whole <= room && from + whole <= ids.count) {
      for (int64_t i = 0; i < whole; i += WIDE)
        for (int64_t k = i; k < i + WIDE; ++k) out[at + k] = int64_t(values[from + k]);
    } else {
      for (int64_t i = 0; i < length; ++i) out[at + i] = int64_t(values[from + i]);
    }
    at += length;
  }
  void copy_valid(Range from) {  // skips missing ids
    int64_t left = ids.first;
    for (int64_t i = from.begin; i < from.end && left > 0; ++i)
      if (bit(ids.id_valid, ids.id_bit + i)) {
        out[at++] = int64_t(values[i]);
        --left;
      }
  }
  int64_t lists(int64_t* offsets) {
    for (int64_t r = 0; r < ids.rows; ++r) {
      if (offsets) offsets[r] = at;
      if (ids.order && r + AHEAD < ids.rows) fetch(r + AHEAD);
      const int64_t row = ids.order ? ids.order[r] : r;
      if (ids.row_valid && !bit(ids.row_valid, ids.row_bit + row)) continue;
      const Range from = range(row);
      if (ids.id_valid)
        copy_valid(from);
      else
        copy(from.begin, std::min(from.end - from.begin, ids.first));
      if (at - done >= CHUNK) flush();
    }
    if (offsets) offsets[ids.rows] = at;
    flush();
    return bad;
  }
  int64_t contiguous(int64_t from, int64_t total) {  // one range of values, all used
    if constexpr (sizeof(T) == 8) {
      bad |= map(values + from, out, total, make);
    } else {
      while (at < total) {
        const int64_t end = std::min(at + CHUNK, total);
        for (int64_t i = at; i < end; ++i) out[i] = int64_t(values[from + i]);
        at = end;
        flush();
      }
    }
    return bad;
  }
  int64_t picked() {  // one value a row, in the given order
    touch(values, ids.count, ids.rows);
    while (at < ids.rows) {
      const int64_t end = std::min(at + CHUNK, ids.rows);
      for (int64_t r = at; r < end; ++r) out[r] = int64_t(values[ids.order[r]]);
      at = end;
      flush();
    }
    return bad;
  }
};

template <class T, class Rows>
static int64_t fill_bags(const Ids& ids, const Make& make, int64_t* out, int64_t* offsets, int64_t total,
                         int64_t room) {
  Filler<T, Rows> filler(ids, make, out, room);
  if (std::is_same_v<Rows, Singles> && ids.order && !ids.row_valid && !offsets) return filler.picked();
  if (ids.rows > 0 && !ids.order && !ids.id_valid) {
    const int64_t begin = filler.range(0).begin;
    if (filler.range(ids.rows - 1).end - begin == total) {  // no values are skipped
      if (offsets) {
        for (int64_t r = 0; r < ids.rows; ++r) offsets[r] = filler.range(r).begin - begin;
        offsets[ids.rows] = total;
      }
      return filler.contiguous(begin, total);
    }
  }
  return filler.lists(offsets);
}

static int64_t count(const Ids& ids) {
  if (ids.offset_bytes == 4) return count_of<Lists<int32_t>>(ids);
  if (ids.offset_bytes == 8) return count_of<Lists<int64_t>>(ids);
  return ids.row_valid ? count_of<Singles>(ids) : ids.rows;
}

template <class T>
static int64_t bags_of(const Ids& ids, const Make& make, int64_t* out, int64_t* offsets, int64_t total, int64_t room) {
  if (ids.offset_bytes == 4) return fill_bags<T, Lists<int32_t>>(ids, make, out, offsets, total, room);
  if (ids.offset_bytes == 8) return fill_bags<T, Lists<int64_t>>(ids, make, out, offsets, total, room);
  return fill_bags<T, Singles>(ids, make, out, offsets, total, room);
}

static int64_t bags(const Ids& ids, const Make& make, int64_t* out, int64_t* offsets, int64_t total, int64_t room) {
  switch (ids.kind) {
    case I8:
      return bags_of<int8_t>(ids, make, out, offsets, total, room);
    case I16:
      return bags_of<int16_t>(ids, make, out, offsets, total, room);
    case I32:
      return bags_of<int32_t>(ids, make, out, offsets, total, room);
    case U8:
      return bags_of<uint8_t>(ids, make, out, offsets, total, room);
    case U16:
      return bags_of<uint16_t>(ids, make, out, offsets, total, room);
    case U32:
      return bags_of<uint32_t>(ids, make, out, offsets, total, room);
    default:
      return bags_of<int64_t>(ids, make, out, offsets, total, room);
  }
}

}  // namespace rowwise_ingest::ISA
