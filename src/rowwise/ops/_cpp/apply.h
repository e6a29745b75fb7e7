// Merge the contributions to each row of a bucket, then update the row once.
//
// Included by isa.cpp only, once per instruction set. Merging and updating meet in one small buffer (the
// merged gradient of a row, in first-level cache), so an optimizer is a function of (gradient, row, state)
// and knows nothing of how gradients were found. See [Note: Merge order] in tables.h.
#pragma once
#include <algorithm>
#include <type_traits>

#include "kernels.h"
#include "simd.h"

namespace rowwise::ISA {
namespace {

struct Contribution {
  const float* grad;
  float scale;
};

struct Plain {
  Source s;
  uint64_t samples_per_block;
  uint64_t mask;
  Plain(const Bucket& b)
      : s(b.source),
        samples_per_block(uint64_t(b.source.features) << block_shift),
        mask((uint64_t(1) << b.payload_bits) - 1) {}
  static constexpr bool scaled = false;
  Contribution at(uint64_t entry) const { return {s.grad + int64_t(entry & mask) * s.stride, 1.f}; }
  int64_t block(uint64_t entry) const {
    const uint64_t c = entry & mask;
    return int64_t(s.features == 1 ? c >> block_shift : c / samples_per_block);
  }
};

struct Listed {
  Source s;
  uint64_t mask;
  Listed(const Bucket& b) : s(b.source), mask((uint64_t(1) << b.payload_bits) - 1) {}
  static constexpr bool scaled = true;
  Contribution at(uint64_t entry) const {
    const uint64_t c = entry & mask;
    return {s.grad + s.place[c], s.scale[c]};
  }
  int64_t block(uint64_t entry) const { return s.sample[entry & mask] >> block_shift; }
};

// A stack of finished subtrees; each is named by its last block. Before a block is followed by the next,
// it absorbs the subtrees that cannot grow any more: those below the level where the two blocks part.
template <class V, int N>
class BlockTree {
 public:
  explicit BlockTree(float* memory) : sums_(memory) {}
  void close(V (&sum)[N], int64_t block, int64_t next) {
    const int level = 63 - __builtin_clzll(uint64_t(block ^ next));
    while (depth_ && (last_[depth_ - 1] >> level) == (block >> level)) absorb(sum);
    last_[depth_] = block;
    for (int k = 0; k < N; ++k) Vec<V>::store(sums_ + depth_ * tree_row + k * Vec<V>::width, sum[k]);
    ++depth_;
  }
  void finish(V (&sum)[N]) {
    while (depth_) absorb(sum);
  }

 private:
  void absorb(V (&sum)[N]) {
    --depth_;
    for (int k = 0; k < N; ++k) sum[k] += Vec<V>::load(sums_ + depth_ * tree_row + k * Vec<V>::width);
  }
  float* sums_;
  int depth_ = 0;
  int64_t last_[tree_levels];
};

template <class V, int N, class Lookup>
inline void load_term(const Lookup& lookup, uint64_t entry, int64_t column, V (&term)[N]) {
  const Contribution c = lookup.at(entry);
  for (int k = 0; k < N; ++k) {
    term[k] = Vec<V>::load(c.grad + column + k * Vec<V>::width);
    if (Lookup::scaled) term[k] *= c.scale;
  }
}

template <class V, int N, class Lookup>
inline __attribute__((always_inline)) void merge_strip(const Lookup& lookup, const uint64_t* entries, int64_t n,
                                                       int64_t column, const Workspace& work) {
  V sum[N], term[N];
  load_term(lookup, entries[0], column, sum);
  if (n > 1) {
    BlockTree<V, N> tree(work.tree);
    int64_t block = lookup.block(entries[0]);
    for (int64_t i = 1; i < n; ++i) {
      load_term(lookup, entries[i], column, term);
      const int64_t at = lookup.block(entries[i]);
      if (at == block) {
        for (int k = 0; k < N; ++k) sum[k] += term[k];
      } else {
        tree.close(sum, block, at);
        for (int k = 0; k < N; ++k) sum[k] = term[k];
        block = at;
      }
    }
    tree.finish(sum);
  }
  for (int k = 0; k < N; ++k) Vec<V>::store(work.merged + column + k * Vec<V>::width, sum[k]);
}

// The optimizers: g is the merged gradient (a scratch copy), finite. One function each; the state of a row
// is state_width floats. D is the dimension where it is a common one, so that loops unroll; 0: any.
struct Row {
  float* g;
  float* w;
  float* state;
  int64_t dim;
  Hyper h;
};

template <class F>
inline __attribute__((always_inline)) void each_vector(int64_t dim, F f) {
  for_strips(dim, [&](auto strip, int64_t column) __attribute__((always_inline)) {
    using V = typename decltype(strip)::type;
    for (int k = 0; k < decltype(strip)::count; ++k) f(V{}, column + k * Vec<V>::width);
  });
}

inline float root(float x) { return std::sqrt(x); }
template <class V>
inline V root(V x) {
  V y;
  for (int k = 0; k < Vec<V>::width; ++k) y[k] = std::sqrt(x[k]);
  return y;
}

struct Sgd {
  template <int D>
  static void apply(const Row& row) {
    const Row r = row;
    each_vector(D ? D : r.dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using X = Vec<decltype(v)>;
      X::store(r.w + c, X::load(r.w + c) - X::load(r.g + c) * r.h.lr);
    });
  }
};

struct Adagrad {
  template <int D>
  static void apply(const Row& row) {
    const Row r = row;
    each_vector(D ? D : r.dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using X = Vec<decltype(v)>;
      const auto g = X::load(r.g + c);
      const auto sum = X::load(r.state + c) + g * g;
      X::store(r.state + c, sum);
      X::store(r.w + c, X::load(r.w + c) - g / (root(sum) + r.h.eps) * r.h.lr);
    });
  }
};

struct RowWiseAdagrad {
  template <int D>
  static void apply(const Row& row) {
    const Row r = row;
    const int64_t dim = D ? D : r.dim;
    const float squares = column_sum(dim, [&](int64_t c) __attribute__((always_inline)) {
      const Quad q = quad_at(r.g, c, dim);
      return q * q;
    });
    const float state = *r.state += squares / float(dim);
    const float step = r.h.lr / (std::sqrt(state) + r.h.eps);
    each_vector(dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using X = Vec<decltype(v)>;
      X::store(r.w + c, X::load(r.w + c) - X::load(r.g + c) * step);
    });
  }
};

void decay(const Row& r) {
  each_vector(r.dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
    using X = Vec<decltype(v)>;
    X::store(r.g + c, X::load(r.g + c) + X::load(r.w + c) * r.h.weight_decay);
  });
}

inline __attribute__((always_inline)) bool is_finite(const float* g,
                                                     int64_t dim) {  // x * 0 is 0 unless x is Inf or NaN
  Wide wide = {};
  float narrow = 0.f;
  each_vector(dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
    using V = decltype(v);
    const V zero = Vec<V>::load(g + c) * 0.f;
    if constexpr (std::is_same_v<V, Wide>)
      wide += zero;
    else if constexpr (std::is_same_v<V, float>)
      narrow += zero;
    else
      narrow += (zero[0] + zero[1]) + (zero[2] + zero[3]);
  });
  return !any_nan(wide) && narrow == 0.f;
}

template <class Lookup, class Rule, int D>
void apply_rows(const Bucket& bucket, const Workspace& workspace, Fault& fault) {
  const Bucket b = bucket;
  const Workspace work = workspace;
  const Lookup lookup(b);
  const uint64_t* entries = b.entries;
  const int64_t dim = D ? D : b.table.dim, n = b.num_entries;
  float* const weights = b.arena + b.table.base;
  float* const states = b.state + b.table.state_base;
  const int64_t state_width = b.table.state_width;
  auto row_of = [&](int64_t i) { return int64_t(entries[i] >> b.payload_bits); };
  int64_t num_rows = 0;
  uint64_t last = ~(entries[0] >> b.payload_bits);
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t key = entries[i] >> b.payload_bits;
    if (key != last) work.starts[num_rows++] = i;
    last = key;
  }
  work.starts[num_rows] = n;

  // Rows come from memory to the second-level cache well ahead, and from there to the first shortly before use.
  constexpr int64_t far = 32, near = 4, grads_ahead = 16;
  for (int64_t s = 0; s < num_rows; ++s) {
    if (s + far < num_rows) {
      const int64_t next = row_of(work.starts[s + far]);
      prefetch_row<2>(weights + next * dim, dim);
      if (state_width) prefetch_row<2>(states + next * state_width, state_width);
    }
    if (s + near < num_rows) {
      const int64_t next = row_of(work.starts[s + near]);
      prefetch_row(weights + next * dim, dim);
      if (state_width) prefetch_row(states + next * state_width, state_width);
    }
    const int64_t begin = work.starts[s], end = work.starts[s + 1];
    if (!b.source.in_cache)
      for (int64_t i = begin + grads_ahead; i < std::min(end + grads_ahead, n); ++i)
        prefetch_row(lookup.at(entries[i]).grad, dim);
    for_strips(dim, [&](auto strip, int64_t column) __attribute__((always_inline)) {
      merge_strip<typename decltype(strip)::type, decltype(strip)::count>(lookup, entries + begin, end - begin, column,
                                                                          work);
    });
    const int64_t row = row_of(begin);
    if (__builtin_expect(!is_finite(work.merged, dim), 0)) {
      fault.at(row);
      continue;
    }
    const Row r{work.merged, weights + row * dim, states + row * state_width, dim, b.hyper};
    if (r.h.weight_decay != 0.f) decay(r);
    Rule::template apply<D>(r);
  }
}

template <class Lookup, class Rule>
void apply_dim(const Bucket& b, const Workspace& work, Fault& fault) {
  switch (b.table.dim) {
    case 16:
      return apply_rows<Lookup, Rule, 16>(b, work, fault);
    case 32:
      return apply_rows<Lookup, Rule, 32>(b, work, fault);
    case 64:
      return apply_rows<Lookup, Rule, 64>(b, work, fault);
    case 128:
      return apply_rows<Lookup, Rule, 128>(b, work, fault);
    default:
      return apply_rows<Lookup, Rule, 0>(b, work, fault);
  }
}

template <class Rule>
void apply_rule(const Bucket& b, const Workspace& work, Fault& fault) {
  b.source.place ? apply_rows<Listed, Rule, 0>(b, work, fault) : apply_dim<Plain, Rule>(b, work, fault);
}

void apply(const Bucket& b, const Workspace& work, Fault& fault) {
  switch (b.table.rule) {
    case Rule::sgd:
      return apply_rule<Sgd>(b, work, fault);
    case Rule::adagrad:
      return apply_rule<Adagrad>(b, work, fault);
    case Rule::rowwise_adagrad:
      return apply_rule<RowWiseAdagrad>(b, work, fault);
  }
}

}  // namespace
}  // namespace rowwise::ISA
