// An id map for the kernels: its sections as numbers, and the offsets of a set's arrays among its words.
//
// See [Note: Id maps] and [Note: Sets of ids] in rowwise/tables/ids/idmap.py. Outside the kernels' namespaces, as
// idmap.cpp checks every section against the words before any kernel runs: the words are untrusted, and no read
// leaves them.
#pragma once
#include <cstdint>

namespace rowwise {

enum IdKind : int64_t { hash_kind, quotient_kind, remainder_kind, every_kind, ranked_kind, listed_kind, rest_kind };

// A row of the tensor `sections`.
struct IdSection {
  int64_t kind, rows, base, column, seed, divisor, at, count, low_bits, entry_bits;

  bool is_set() const { return kind == ranked_kind || kind == listed_kind; }
};

struct IdMap {
  const IdSection* sections;
  int64_t num_sections;
  const uint64_t* words;
  int64_t known;
  int64_t columns;
};

inline int64_t words_of(int64_t count, int64_t bits) { return (count * bits + 63) / 64; }

// Offsets of the arrays of a set, in words from its first; `end` is the number of its words.
struct SetLayout {
  static constexpr int64_t start_buckets = 256, zero_words = 64;
  int64_t buckets, mark_bits, zeros, marks, lows, entries, end;

  SetLayout(const IdSection& section, int64_t known) {
    buckets = ((known - 1) >> section.low_bits) + 1;
    mark_bits = section.count + buckets;
    zeros = (buckets + start_buckets - 1) / start_buckets;
    const int64_t mark_words = words_of(mark_bits, 1);
    marks = zeros + (mark_words + zero_words - 1) / zero_words;
    lows = marks + mark_words;
    entries = lows + words_of(section.count, section.low_bits);
    end = entries + words_of(section.count, section.kind == listed_kind ? section.entry_bits : 0);
  }
};

}  // namespace rowwise
