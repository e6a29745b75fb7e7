// Loops over ids alone: their span, their buckets, their ranks among those marked in a bitmap.
//
// Included by isa.cpp only: these gain from wide comparisons and from the instruction that counts bits.
#pragma once
#include <algorithm>

#include "kernels.h"
#include "simd.h"

namespace rowwise::ISA {
namespace {

template <class Id>
void span_of(const Id* ids, int64_t n, int64_t& least, int64_t& largest) {
  Id low = ids[0], high = ids[0];
  for (int64_t i = 0; i < n; ++i) {
    low = std::min(low, ids[i]);
    high = std::max(high, ids[i]);
  }
  least = low;
  largest = high;
}

void span(const void* ids, bool wide, int64_t n, int64_t& least, int64_t& largest) {
  wide ? span_of(static_cast<const int64_t*>(ids), n, least, largest)
       : span_of(static_cast<const int32_t*>(ids), n, least, largest);
}

template <class Id>
void rank_of(const Id* ids, int64_t n, const Marks& marks, int64_t* out) {
  const uint64_t* const bits = marks.bits;
  const uint32_t* const before = marks.before;
  const uint64_t least = uint64_t(marks.least);
  const int64_t first = marks.first;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t at = uint64_t(int64_t(ids[i])) - least;
    const uint64_t lower = bits[at >> 6] & ((uint64_t(1) << (at & 63)) - 1);
    out[i] = first + before[at >> 6] + __builtin_popcountll(lower);
  }
}

void rank(const void* ids, bool wide, int64_t n, const Marks& marks, int64_t* out) {
  wide ? rank_of(static_cast<const int64_t*>(ids), n, marks, out)
       : rank_of(static_cast<const int32_t*>(ids), n, marks, out);
}

constexpr int64_t ids_at_once = 64;
constexpr int64_t most_compared = 16;  // with more bounds than this a search takes fewer steps than comparing to all

// The three ways write a bucket for ids outside the table too, some bucket: the caller looks at `outside`.
template <class Id>
inline void divide(const Id* ids, int64_t n, const Ranges& r, uint16_t* out) {
  const uint64_t multiplier = r.multiplier;
  const int shift = r.shift;
  for (int64_t i = 0; i < n; ++i) {
    const unsigned __int128 product = (unsigned __int128)(uint64_t(int64_t(ids[i]))) * multiplier;
    out[i] = uint16_t(uint64_t(product >> 64) >> shift);
  }
}

template <class Id>
inline void compare(const Id* ids, const Ranges& r, uint16_t* out) {
  int64_t x[ids_at_once], found[ids_at_once] = {};
  for (int64_t i = 0; i < ids_at_once; ++i) x[i] = ids[i];
  for (int64_t k = 1; k < r.buckets; ++k) {
    const int64_t bound = r.bounds[k];
    for (int64_t i = 0; i < ids_at_once; ++i) found[i] += x[i] >= bound;
  }
  for (int64_t i = 0; i < ids_at_once; ++i) out[i] = uint16_t(found[i]);
}

// Halving without a branch, step by step over many ids, so that the steps of different ids overlap.
template <class Id>
inline void search(const Id* ids, const Ranges& r, uint16_t* out) {
  int64_t x[ids_at_once], found[ids_at_once] = {};
  for (int64_t i = 0; i < ids_at_once; ++i) x[i] = ids[i];
  for (int64_t step = r.half; step; step /= 2)
    for (int64_t i = 0; i < ids_at_once; ++i) found[i] += step & -int64_t(r.padded[found[i] + step - 1] <= x[i]);
  for (int64_t i = 0; i < ids_at_once; ++i) out[i] = uint16_t(found[i]);
}

template <class Id>
bool route_ids(const Id* ids, int64_t n, const Ranges& r, uint16_t* out) {
  const uint64_t rows = uint64_t(r.bounds[r.buckets]);
  bool outside = false;
  for (int64_t i = 0; i < n; ++i) outside |= uint64_t(int64_t(ids[i])) >= rows;
  if (r.multiplier && r.buckets > most_compared) {
    divide(ids, n, r, out);
    return !outside;
  }
  const auto some = r.buckets > most_compared ? search<Id> : compare<Id>;
  int64_t i = 0;
  for (; i + ids_at_once <= n; i += ids_at_once) some(ids + i, r, out + i);
  if (i < n) {
    Id last[ids_at_once] = {};
    uint16_t found[ids_at_once];
    std::copy(ids + i, ids + n, last);
    some(last, r, found);
    std::copy(found, found + (n - i), out + i);
  }
  return !outside;
}

bool route(const void* ids, bool wide, int64_t n, const Ranges& r, uint16_t* out) {
  return wide ? route_ids(static_cast<const int64_t*>(ids), n, r, out)
              : route_ids(static_cast<const int32_t*>(ids), n, r, out);
}

}  // namespace
}  // namespace rowwise::ISA
