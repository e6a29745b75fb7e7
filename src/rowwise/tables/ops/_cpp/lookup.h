// Table lookups of one device: pooled, per id, the gradient of per-id weights, and the gather limit.
//
// Included by isa.cpp only, once per instruction set. Rows are summed in the order of the ids, with each column of up
// to eight vectors held in registers; rows some ids ahead are prefetched, as random rows come from memory.
#pragma once
#include <algorithm>

#include "kernels.h"
#include "rowtype.h"

namespace rowwise::ISA {
namespace {

// Rows to prefetch ahead: about four kilobytes, the most that a core keeps in flight.
inline int64_t rows_ahead(int64_t bytes) { return std::clamp<int64_t>(4096 / bytes, 8, 32); }

template <class Id>
struct Rows {  // the rows of one feature, in the order of its ids
  const char* table;
  uint64_t rows;
  Format format;
  int64_t bytes, header;
  const Id* ids;
  int64_t last;  // one past the feature's ids
  int64_t ahead;
  bool whole;

  Rows(const char* arena, const Feature& f, const Bags& bags)
      : table(arena + f.base),
        rows(uint64_t(f.rows)),
        format(f.format()),
        bytes(format.bytes()),
        header(format.header()),
        ids(static_cast<const Id*>(bags.values)),
        last(bags.offsets[(f.source + 1) * bags.batch]),
        ahead(rows_ahead(bytes)),
        whole(fill_lines(bytes)) {}

  // Of an id that is out of range too: a prefetch never faults.
  const char* ahead_of(int64_t i) const {
    const uint64_t id = uint64_t(int64_t(ids[std::min(i + ahead, last - 1)]));
    return reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(table) + id * uint64_t(bytes));
  }
  const char* at(int64_t i) const {  // nullptr: out of range
    uint64_t id = uint64_t(int64_t(ids[i]));
    return id < rows ? table + id * uint64_t(bytes) : nullptr;
  }
};

// f(rows of the feature, tag of their type)
template <class F>
inline void with_rows(const char* arena, const Feature& feature, const Bags& bags, F f) {
  with_type(feature.type, [&](auto stored) {
    bags.wide_ids ? f(Rows<int64_t>(arena, feature, bags), stored) : f(Rows<int32_t>(arena, feature, bags), stored);
  });
}

struct Output {  // of a range of bags
  int64_t b0, b1;
  const int64_t* offsets;
  const float* weights;  // nullptr: not weighted
  bool mean;
  float* out;
  int64_t out_stride;
  bool stream;
};

// Where bags are short, fetching the lines of the output takes as long as fetching the rows.
constexpr int64_t bags_ahead = 4;

template <class V, int N, bool weighted, RowType T, class Id>
inline __attribute__((always_inline)) void pool_bag(const Rows<Id>& rows, const Output& c, int64_t b, int64_t column,
                                                    Fault& fault) {
  constexpr int W = Vec<V>::width;
  int64_t group[N];
  for (int k = 0; k < N; ++k) group[k] = group_of(rows.format, column + k * W);
  const int64_t from = column ? rows.header + Reader<T>::bytes(column) : 0;
  const int64_t length = rows.header + Reader<T>::bytes(column + N * W) - from;
  const int64_t begin = c.offsets[b], end = c.offsets[b + 1];
  float* const out = c.out + b * c.out_stride + column;
  if (!c.stream)
    for (int k = 0; k < N * W; k += 16) __builtin_prefetch(out + bags_ahead * c.out_stride + k, 1);
  V sum[N];
  for (int k = 0; k < N; ++k) sum[k] = V{};
  for (int64_t i = begin; i < end; ++i) {
    if constexpr (facts_of(T).scaled)
      prefetch(rows.ahead_of(i) + from, length, false);
    else  // a length that is known unrolls
      prefetch(rows.ahead_of(i) + from, Reader<T>::bytes(N * W), rows.whole);
    const char* row = rows.at(i);
    if (__builtin_expect(row == nullptr, 0)) {
      fault.at(i);
      continue;
    }
    const Reader<T> reader(row, rows.header);
    for (int k = 0; k < N; ++k) {
      const V term = reader.template at<V>(column + k * W, group[k]);
      sum[k] += weighted ? term * c.weights[i] : term;
    }
  }
  if (c.mean && end > begin) {
    const float inverse = 1.0f / float(end - begin);
    for (int k = 0; k < N; ++k) sum[k] *= inverse;
  }
  if (c.stream)
    for (int k = 0; k < N; ++k) Vec<V>::stream(out + k * W, sum[k]);
  else
    for (int k = 0; k < N; ++k) Vec<V>::store(out + k * W, sum[k]);
}

// The operands of the inner loop are copied to locals: through references they would be reloaded after every possible
// report of a bad id.
template <class V, int N, bool weighted, RowType T, class Id>
void pool_strip(const Rows<Id>& feature_rows, const Output& output, Fault& fault) {  // rows of one strip
  const Rows<Id> rows = feature_rows;
  const Output c = output;
  for (int64_t b = c.b0; b < c.b1; ++b) pool_bag<V, N, weighted, T>(rows, c, b, 0, fault);
}

template <bool weighted, RowType T, class Id>
void pool_strips(const Rows<Id>& feature_rows, const Output& output, Fault& fault) {
  const Rows<Id> rows = feature_rows;
  const Output c = output;
  for (int64_t b = c.b0; b < c.b1; ++b)  // bag by bag: the later strips find the rows in cache
    for_strips(rows.format.dim, [&](auto strip, int64_t column) __attribute__((always_inline)) {
      pool_bag<typename decltype(strip)::type, decltype(strip)::count, weighted, T>(rows, c, b, column, fault);
    });
}

template <bool weighted, RowType T, class Id>
void pool_bags(const Rows<Id>& rows, const Output& c, Fault& fault) {
  if (!is_one_strip(rows.format.dim)) return pool_strips<weighted, T>(rows, c, fault);
  for_strips(rows.format.dim, [&](auto strip, int64_t) {
    pool_strip<typename decltype(strip)::type, decltype(strip)::count, weighted, T>(rows, c, fault);
  });
}

template <RowType T, class Id>
void pool_rows(const Rows<Id>& rows, const Output& c, Fault& fault) {
  c.weights ? pool_bags<true, T>(rows, c, fault) : pool_bags<false, T>(rows, c, fault);
}

void pool(const char* arena, const Feature& f, const Bags& bags, float* out, int64_t out_stride, int64_t b0, int64_t b1,
          bool stream, Fault& fault) {
  const Output c{b0,
                 b1,
                 bags.offsets + f.source * bags.batch,
                 f.mode == Mode::weighted ? bags.weights : nullptr,
                 f.mode == Mode::mean,
                 out + f.column,
                 out_stride,
                 stream};
  with_rows(arena, f, bags, [&](auto rows, auto stored) { pool_rows<decltype(stored)::type>(rows, c, fault); });
  if (stream) stream_fence();
}

template <RowType T, class Id>
void gather_rows(const Rows<Id>& rows, float* out, int64_t i0, int64_t i1, Fault& fault) {
  for (int64_t i = i0; i < i1; ++i, out += rows.format.dim) {
    prefetch(rows.ahead_of(i), rows.bytes, rows.whole);
    const char* row = rows.at(i);
    if (__builtin_expect(row == nullptr, 0)) {
      fault.at(i);
      continue;
    }
    const Reader<T> reader(row, rows.header);
    each_vector(rows.format.dim, [&](auto v, int64_t c) {
      using V = decltype(v);
      Vec<V>::store(out + c, reader.template at<V>(c, group_of(rows.format, c)));
    });
  }
}

void gather(const char* arena, const Feature& f, const Bags& bags, float* out, int64_t i0, int64_t i1, Fault& fault) {
  with_rows(arena, f, bags,
            [&](auto rows, auto stored) { gather_rows<decltype(stored)::type>(rows, out, i0, i1, fault); });
}

struct BagGradients {
  const int64_t* offsets;
  const float* grad;  // of the feature's first column
  int64_t stride;
  int64_t b0, b1;
};

template <RowType T, class Id>
void weight_grad_rows(const Rows<Id>& rows, const BagGradients& bags, float* out, Fault& fault) {
  const int64_t dim = rows.format.dim;
  for (int64_t b = bags.b0; b < bags.b1; ++b) {
    const float* g = bags.grad + b * bags.stride;
    for (int64_t i = bags.offsets[b]; i < bags.offsets[b + 1]; ++i) {
      prefetch(rows.ahead_of(i), rows.bytes, rows.whole);
      const char* row = rows.at(i);
      if (__builtin_expect(row == nullptr, 0)) {
        fault.at(i);
        continue;
      }
      const Reader<T> reader(row, rows.header);
      out[i] = column_sum<0>(dim, [&](int64_t c) {
        const int64_t group = group_of(rows.format, c);
        const auto at = [&](auto v, int64_t column) { return reader.template at<decltype(v)>(column, group); };
        return quad_from(c, dim, at) * quad_at(g, c, dim);
      });
    }
  }
}

void weight_grad(const char* arena, const Feature& f, const Bags& bags, const float* grad, int64_t grad_stride,
                 int64_t b0, int64_t b1, float* out, Fault& fault) {
  const BagGradients mine{bags.offsets + f.source * bags.batch, grad + f.column, grad_stride, b0, b1};
  with_rows(arena, f, bags,
            [&](auto rows, auto stored) { weight_grad_rows<decltype(stored)::type>(rows, mine, out, fault); });
}

// The gather limit: every byte of every row is read once, in the order of the ids, and nothing else is done.
template <class V, int N, class Id>
uint32_t touch_strip(const Rows<Id>& rows, int64_t column, int64_t i0, int64_t i1) {
  typename Vec<V>::Bits seen = {};
  for (int64_t i = i0; i < i1; ++i) {
    prefetch(rows.ahead_of(i) + column * 4, N * Vec<V>::width * 4, rows.whole);
    const char* row = rows.at(i);
    if (row)
      for (int k = 0; k < N; ++k)
        seen ^= bits_of(Vec<V>::load(reinterpret_cast<const float*>(row) + column + k * Vec<V>::width));
  }
  uint32_t lanes[Vec<V>::width], all = 0;
  std::memcpy(lanes, &seen, sizeof lanes);
  for (const uint32_t lane : lanes) all ^= lane;
  return all;
}

float touch(const char* arena, const Feature& f, const Bags& bags, int64_t i0, int64_t i1) {
  const auto bits = [&](const auto& rows) {
    uint32_t all = 0;
    for_strips(rows.bytes / 4, [&](auto strip, int64_t column) {
      all ^= touch_strip<typename decltype(strip)::type, decltype(strip)::count>(rows, column, i0, i1);
    });
    return float(all);
  };
  return bags.wide_ids ? bits(Rows<int64_t>(arena, f, bags)) : bits(Rows<int32_t>(arena, f, bags));
}

// The limit of an update: every byte of every row is read and written back as it is, in the order of the ids.
template <class V, int N, class Id>
void rewrite_strip(const Rows<Id>& rows, int64_t column, int64_t i0, int64_t i1) {
  for (int64_t i = i0; i < i1; ++i) {
    prefetch(rows.ahead_of(i) + column * 4, N * Vec<V>::width * 4, rows.whole);
    const char* row = rows.at(i);
    if (!row) continue;
    float* out = reinterpret_cast<float*>(const_cast<char*>(row)) + column;
    V values[N];
    for (int k = 0; k < N; ++k) values[k] = Vec<V>::load(out + k * Vec<V>::width);
    __asm__ volatile("" ::: "memory");  // else a compiler may elide a store of an unchanged value
    for (int k = 0; k < N; ++k) Vec<V>::store(out + k * Vec<V>::width, values[k]);
  }
}

void rewrite(char* arena, const Feature& f, const Bags& bags, int64_t i0, int64_t i1) {
  const auto all = [&](const auto& rows) {
    for_strips(rows.bytes / 4, [&](auto strip, int64_t column) {
      rewrite_strip<typename decltype(strip)::type, decltype(strip)::count>(rows, column, i0, i1);
    });
  };
  bags.wide_ids ? all(Rows<int64_t>(arena, f, bags)) : all(Rows<int32_t>(arena, f, bags));
}

}  // namespace
}  // namespace rowwise::ISA
