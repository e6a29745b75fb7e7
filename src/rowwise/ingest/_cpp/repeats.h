// Marks rows whose ids differ from those of the previous row, in an order of rows.
//
// Included by ingest.cpp only, not per instruction set: memcmp dispatches by itself.
#pragma once
#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace rowwise_ingest {

struct Changes {  // of one feature
  const Ids& ids;
  int64_t width;  // bytes of an id

  explicit Changes(const Ids& ids) : ids(ids), width(int64_t(1) << (ids.kind < 4 ? ids.kind : ids.kind - 4)) {}

  // Marks rows that differ from the previous one; skips rows that are already marked.
  void mark(uint8_t* begins) const {
    Range before{0, 0};
    for (int64_t r = 0; r < ids.rows; ++r) {
      const Range now = range(r);
      if (r && !begins[r]) begins[r] = !(ids.id_valid ? same_valid(before, now) : same(before, now));
      before = now;
    }
  }

 private:
  struct Range {
    int64_t begin, end;
  };

  static bool bit(const uint8_t* bits, int64_t at) { return bits[at >> 3] >> (at & 7) & 1; }

  Range range(int64_t r) const {
    const int64_t row = ids.order ? ids.order[r] : r;
    if (ids.row_valid && !bit(ids.row_valid, ids.row_bit + row)) return {0, 0};
    if (!ids.offsets) return {row, row + 1};
    if (ids.offset_bytes == 4) return range_of(static_cast<const int32_t*>(ids.offsets) + row);
    return range_of(static_cast<const int64_t*>(ids.offsets) + row);
  }
  template <class Offset>
  Range range_of(const Offset* at) const {
    return {int64_t(at[0]) - ids.base, int64_t(at[1]) - ids.base};
  }

  const char* at(int64_t id) const { return static_cast<const char*>(ids.values) + id * width; }

  bool same(Range a, Range b) const {
    const int64_t count = std::min(a.end - a.begin, ids.first);
    if (count != std::min(b.end - b.begin, ids.first)) return false;
    return !count || !std::memcmp(at(a.begin), at(b.begin), size_t(count * width));
  }

  // Compares the first valid ids.
  bool same_valid(Range a, Range b) const {
    const auto skip = [&](Range& x) {
      while (x.begin < x.end && !bit(ids.id_valid, ids.id_bit + x.begin)) ++x.begin;
    };
    for (int64_t i = 0; i < ids.first; ++i) {
      skip(a), skip(b);
      if (a.begin == a.end || b.begin == b.end) return a.begin == a.end && b.begin == b.end;
      if (std::memcmp(at(a.begin++), at(b.begin++), size_t(width))) return false;
    }
    return true;
  }
};

}  // namespace rowwise_ingest
