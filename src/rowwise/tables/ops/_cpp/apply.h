// Merge the contributions to each row of a bucket, then update the row once.
//
// Included by isa.cpp only, once per instruction set. Merging and updating meet in one small buffer (the
// merged gradient of a row, in first-level cache), so an optimizer is a function of (gradient, row, state)
// and independent of how gradients are found and, as it sees floats only, of how rows are stored. See [Note: Merge
// order] in tables.h.
#pragma once
#include <algorithm>
#include <limits>
#include <type_traits>

#include "kernels.h"
#include "rowtype.h"

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

// Loads the vectors of a strip, the last of which may be cut off.
struct WholeStrip {
  template <class V, int N>
  static void load(const float* from, V (&to)[N]) {
    for (int k = 0; k < N; ++k) to[k] = Vec<V>::load(from + k * Vec<V>::width);
  }
};
struct CutStrip {
  Tail tail;
  template <int N>
  void load(const float* from, Wide (&to)[N]) const {
    for (int k = 0; k < N - 1; ++k) to[k] = Vec<Wide>::load(from + k * LANES);
    to[N - 1] = tail.load(from + (N - 1) * LANES);
  }
};

template <class V, int N, class Lookup, class Load>
inline __attribute__((always_inline)) void load_term(const Lookup& lookup, const Load& load, uint64_t entry,
                                                     int64_t column, V (&term)[N]) {
  const Contribution c = lookup.at(entry);
  load.load(c.grad + column, term);
  if (Lookup::scaled)
    for (int k = 0; k < N; ++k) term[k] *= c.scale;
}

struct Run {  // the entries of one row
  const uint64_t* entries;
  int64_t count;
  int64_t left;  // entries up to the end of the bucket
  bool far;      // gradients are worth prefetching
  bool whole_lines;
};

// Gradients are prefetched entry by entry: of thousands for a row, the first would be evicted before the last arrive.
constexpr int64_t gradients_ahead = 16;

template <class V, int N, class Lookup, class Load>
inline __attribute__((always_inline)) void merge_strip(const Lookup& lookup, const Load& load, const Run& run,
                                                       int64_t column, int64_t floats, const Workspace& work) {
  const uint64_t* const entries = run.entries;
  const auto fetch = [&](int64_t i) __attribute__((always_inline)) {
    if (!run.far) return;
    const float* grad = lookup.at(entries[std::min(i + gradients_ahead, run.left - 1)]).grad + column;
    prefetch(reinterpret_cast<const char*>(grad), floats * 4, run.whole_lines);
  };
  V sum[N], term[N];
  fetch(0);
  load_term(lookup, load, entries[0], column, sum);
  if (run.count > 1) {
    BlockTree<V, N> tree(work.tree);
    int64_t block = lookup.block(entries[0]);
    for (int64_t i = 1; i < run.count; ++i) {
      fetch(i);
      load_term(lookup, load, entries[i], column, term);
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

// The optimizers: g is the merged gradient (a scratch copy), finite; w holds weights as `Weights` does. One function
// each; the state of a row is state_width floats. D is the dimension where it is a common one, so that loops unroll;
// 0: any.
struct Row {
  float* g;
  float* state;
  int64_t dim;
  const Hyper& h;
  float factor;  // of rules with one rate for the whole row: their numerator over (the root of `prepare` + eps)
};

inline float root(float x) { return std::sqrt(x); }
template <class V>
inline V root(V x) {
  V y;
  for (int k = 0; k < Vec<V>::width; ++k) y[k] = std::sqrt(x[k]);
  return y;
}

// Of a merged gradient, which has zeros from its end to a multiple of sixteen columns.
template <int D>
inline __attribute__((always_inline)) float padded_square_sum(const float* x, int64_t dim) {
  return column_sum<D>(dim, [&](int64_t c) __attribute__((always_inline)) {
    const Quad q = Vec<Quad>::load(x + c);
    return q * q;
  });
}
template <int D = 16>
__attribute__((noinline)) float square_sum_of_any_dim(const float* x, int64_t dim) {
  if (dim <= D) return padded_square_sum<D>(x, D);
  if constexpr (D < 256) return square_sum_of_any_dim<D + 16>(x, dim);
  return padded_square_sum<0>(x, (dim + 3) / 4 * 4);
}
template <int D>
inline float square_sum(const float* x, int64_t dim) {
  return D ? padded_square_sum<D>(x, dim) : square_sum_of_any_dim(x, dim);
}

struct Sgd {
  static constexpr const char* name = "sgd";
  static int64_t state_floats(int64_t) { return 0; }
  static constexpr bool decays_gradient = true, one_rate = false;
  template <int D, class W>
  static void apply(const Row& r, const W& w) {
    each_vector(D ? D : r.dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using V = decltype(v);
      w.set(c, w.template at<V>(c) - Vec<V>::load(r.g + c) * r.h.lr);
    });
  }
};

struct Adagrad {
  static constexpr const char* name = "adagrad";
  static int64_t state_floats(int64_t dim) { return dim; }
  static constexpr bool decays_gradient = true, one_rate = false;
  template <int D, class W>
  static void apply(const Row& r, const W& w) {
    each_vector(D ? D : r.dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using V = decltype(v);
      const V g = Vec<V>::load(r.g + c);
      const V sum = Vec<V>::load(r.state + c) + g * g;
      Vec<V>::store(r.state + c, sum);
      w.set(c, w.template at<V>(c) - g / (root(sum) + r.h.eps) * r.h.lr);
    });
  }
};

struct RowWiseAdagrad {
  static constexpr const char* name = "rowwise_adagrad";
  static int64_t state_floats(int64_t) { return 1; }
  static constexpr bool decays_gradient = true, one_rate = true;
  static float numerator(const Hyper& h) { return h.lr; }
  template <int D>
  static float prepare(const Row& r) {
    const int64_t dim = D ? D : r.dim;
    return *r.state += square_sum<D>(r.g, dim) / float(dim);
  }
  template <int D, class W>
  static void apply(const Row& r, const W& w) {
    each_vector(D ? D : r.dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using V = decltype(v);
      w.set(c, w.template at<V>(c) - Vec<V>::load(r.g + c) * r.factor);
    });
  }
};

// Numbers of optimizers with moving averages; inverse: 1 / (1 - beta ** step).
inline float beta1(const Hyper& h) { return h.own[0]; }
inline float beta2(const Hyper& h) { return h.own[1]; }
inline float inverse1(const Hyper& h) { return h.own[2]; }
inline float inverse2(const Hyper& h) { return h.own[3]; }

// The moving averages of gradients; state is the first, then the second.
template <class V>
inline __attribute__((always_inline)) V first_moment(const Row& r, int64_t c, V g) {
  const V m = Vec<V>::load(r.state + c) * beta1(r.h) + g * (1.f - beta1(r.h));
  Vec<V>::store(r.state + c, m);
  return m * inverse1(r.h);
}
template <class V>
inline __attribute__((always_inline)) V adam_step(const Row& r, int64_t c, int64_t dim) {
  const V g = Vec<V>::load(r.g + c);
  const V m = first_moment(r, c, g);
  const V v = Vec<V>::load(r.state + dim + c) * beta2(r.h) + g * g * (1.f - beta2(r.h));
  Vec<V>::store(r.state + dim + c, v);
  return m / (root(v * inverse2(r.h)) + r.h.eps);
}

struct Adam {
  static constexpr const char* name = "adam";
  static int64_t state_floats(int64_t dim) { return 2 * dim; }
  static constexpr bool decays_gradient = false, one_rate = false;
  template <int D, class W>
  static void apply(const Row& r, const W& weights) {
    const int64_t dim = D ? D : r.dim;
    each_vector(dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using V = decltype(v);
      const V w = weights.template at<V>(c);
      weights.set(c, w - (adam_step<V>(r, c, dim) + w * r.h.weight_decay) * r.h.lr);
    });
  }
};

struct RowWiseAdam {
  static constexpr const char* name = "rowwise_adam";
  static int64_t state_floats(int64_t dim) { return dim + 1; }
  static constexpr bool decays_gradient = false, one_rate = true;
  static float numerator(const Hyper&) { return 1.f; }
  template <int D>
  static float prepare(const Row& r) {
    const int64_t dim = D ? D : r.dim;
    float& state = r.state[dim];
    state = state * beta2(r.h) + square_sum<D>(r.g, dim) / float(dim) * (1.f - beta2(r.h));
    return state * inverse2(r.h);
  }
  template <int D, class W>
  static void apply(const Row& r, const W& weights) {
    each_vector(D ? D : r.dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using V = decltype(v);
      const V w = weights.template at<V>(c);
      const V step = first_moment(r, c, Vec<V>::load(r.g + c)) * r.factor;
      weights.set(c, w - (step + w * r.h.weight_decay) * r.h.lr);
    });
  }
};

struct Lamb {  // Adam's step, as long as the row is
  static constexpr const char* name = "lamb";
  static int64_t state_floats(int64_t dim) { return 2 * dim; }
  static constexpr bool decays_gradient = false, one_rate = false;
  template <int D, class W>
  static void apply(const Row& r, const W& w) {
    const int64_t dim = D ? D : r.dim;
    each_vector(dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using V = decltype(v);
      Vec<V>::store(r.g + c, adam_step<V>(r, c, dim) + w.template at<V>(c) * r.h.weight_decay);
    });
    const float length = std::sqrt(column_sum<D>(dim, [&](int64_t c) __attribute__((always_inline)) {
      const Quad q = quad_from(c, dim, [&](auto v, int64_t at) { return w.template at<decltype(v)>(at); });
      return q * q;
    }));
    const float step = std::sqrt(square_sum<D>(r.g, dim));
    const float trust =
        length > 0.f && step > 0.f && std::isfinite(length) && std::isfinite(step) ? length / step : 1.f;
    const float lr = r.h.lr * trust;
    each_vector(dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using V = decltype(v);
      w.set(c, w.template at<V>(c) - Vec<V>::load(r.g + c) * lr);
    });
  }
};

struct Ftrl {  // state is z, then n
  static constexpr const char* name = "ftrl";
  static int64_t state_floats(int64_t dim) { return 2 * dim; }
  static constexpr bool decays_gradient = false, one_rate = false;
  static float l1(const Hyper& h) { return h.own[0]; }
  static float l2(const Hyper& h) { return h.own[1]; }
  static float beta(const Hyper& h) { return h.own[2]; }
  template <int D, class W>
  static void apply(const Row& r, const W& w) {
    const int64_t dim = D ? D : r.dim;
    each_vector(dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using V = decltype(v);
      using X = Vec<V>;
      const V g = X::load(r.g + c), n = X::load(r.state + dim + c);
      const V sum = least(n + g * g, V{} + std::numeric_limits<float>::max());  // an infinite sum would have no rate
      const V after = root(sum), rate = (after - root(n)) / r.h.lr;
      const V z = X::load(r.state + c) + g - rate * w.template at<V>(c);
      X::store(r.state + c, z);
      X::store(r.state + dim + c, sum);
      const V edge = V{} + l1(r.h), zero = {};
      const V shrunk = z > edge ? z - edge : z < zero - edge ? z + edge : zero;
      w.set(c, zero - shrunk / ((after + beta(r.h)) / r.h.lr + l2(r.h)));
    });
  }
};

void clip(const Row& r) {  // to a length
  const float length = std::sqrt(square_sum<0>(r.g, r.dim));
  if (length <= r.h.clip) return;
  const float scale = r.h.clip / length;
  each_vector(r.dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
    using X = Vec<decltype(v)>;
    X::store(r.g + c, X::load(r.g + c) * scale);
  });
}

// L2 in the gradient; Adam and LAMB apply it to the weight instead, and FTRL has its own.
template <class W>
void decay(const Row& r, const W& w) {
  each_vector(r.dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
    using V = decltype(v);
    Vec<V>::store(r.g + c, Vec<V>::load(r.g + c) + w.template at<V>(c) * r.h.weight_decay);
  });
}

// Writes the starts of the segments of equal rows, and the end of the last; returns the number of segments.
int64_t find_rows(const Bucket& b, int64_t* starts) {
  const uint64_t* entries = b.entries;
  int64_t num_rows = 0;
  uint64_t last = ~(entries[0] >> b.payload_bits);
  for (int64_t i = 0; i < b.num_entries; ++i) {
    const uint64_t key = entries[i] >> b.payload_bits;
    starts[num_rows] = i;  // branchless, as a branch would often be mispredicted
    num_rows += key != last;
    last = key;
  }
  starts[num_rows] = b.num_entries;
  return num_rows;
}

// Some rows of a bucket, which are merged and then updated together: enough that the dependency chains of sums and
// roots of neighbours overlap, and few enough that all of it stays in the first-level cache.
struct Merged {
  int64_t rows[batch_rows];
  int64_t count = 0;
};

// Padded: strips are of whole vectors only. A masked vector also reads the line behind a short row, so rows of one
// strip are not.
template <class Lookup, int D, bool Padded>
Merged merge_rows(const Bucket& bucket, const Workspace& workspace, int64_t first, int64_t count, Fault& fault) {
  const Bucket& b = bucket;
  const Lookup lookup(b);
  const uint64_t* entries = b.entries;
  const int64_t dim = D ? D : b.table.dim, n = b.num_entries;
  Workspace work = workspace;
  const bool whole_lines = fill_lines(dim * 4) && b.source.stride % dim == 0;
  Merged found;
  for (int64_t s = first; s < first + count; ++s) {
    const int64_t begin = work.starts[s], end = work.starts[s + 1];
    const Run run{entries + begin, end - begin, n - begin, !b.source.in_cache, whole_lines};
    if constexpr (!Padded)
      for_strips(dim, [&](auto strip, int64_t column) __attribute__((always_inline)) {
        using V = typename decltype(strip)::type;
        constexpr int vectors = decltype(strip)::count;
        merge_strip<V, vectors>(lookup, WholeStrip{}, run, column, vectors * Vec<V>::width, work);
      });
    else
      for_padded_strips(dim, [&](auto strip, int64_t column, int64_t floats) __attribute__((always_inline)) {
        constexpr int vectors = decltype(strip)::count;
        const CutStrip load{Tail(floats - (vectors - 1) * LANES)};
        merge_strip<Wide, vectors>(lookup, load, run, column, floats, work);
      });
    const int64_t row = int64_t(entries[begin] >> b.payload_bits);
    if (__builtin_expect(!is_finite(work.merged, Padded ? whole_vectors(dim) : dim), 0)) {
      fault.at(row);
      continue;  // the next row takes its place
    }
    found.rows[found.count++] = row;
    work.merged += work.stride;
  }
  return found;
}

template <class Optimizer, RowType T, int D>
void update_rows(const Bucket& b, const Workspace& work, const Merged& merged) {
  const int64_t dim = D ? D : b.table.dim;
  const Format format{T, dim, b.table.group};
  const Hyper hyper = b.hyper;
  char* const weights = b.arena + b.table.base;
  float* const states = b.state + b.table.state_base;
  const auto row_of = [&](int64_t k, float factor) {
    return Row{work.merged + k * work.stride, states + merged.rows[k] * b.table.state_width, dim, hyper, factor};
  };
  const auto stored = [&](int64_t k) { return weights + merged.rows[k] * format.bytes(); };
  const auto bits_of = [&](int64_t k) { return RowBits(b.key, b.full_row(merged.rows[k]), b.table.first_column); };
  const auto weights_of = [&](int64_t k) {
    return Weights<T>(format, stored(k), work.floats + k * work.stride, bits_of(k));
  };
  const bool decays = Optimizer::decays_gradient && hyper.weight_decay != 0.f;
  if (hyper.clip > 0.f || decays)
    for (int64_t k = 0; k < merged.count; ++k) {
      if (hyper.clip > 0.f) clip(row_of(k, 0.f));
      if (decays) decay(row_of(k, 0.f), weights_of(k));
    }
  float factors[batch_rows] = {};
  if constexpr (Optimizer::one_rate) {  // roots and quotients of all rows at once
    for (int64_t k = 0; k < merged.count; ++k) factors[k] = Optimizer::template prepare<D>(row_of(k, 0.f));
    for (float& factor : factors) factor = Optimizer::numerator(hyper) / (std::sqrt(factor) + hyper.eps);
  }
  for (int64_t k = 0; k < merged.count; ++k) Optimizer::template apply<D>(row_of(k, factors[k]), weights_of(k));
  if constexpr (facts_of(T).scaled)
    for (int64_t k = 0; k < merged.count; ++k)
      Weights<T>::write(format, work.floats + k * work.stride, stored(k), bits_of(k));
}

using MergeRows = Merged (*)(const Bucket&, const Workspace&, int64_t, int64_t, Fault&);
using UpdateRows = void (*)(const Bucket&, const Workspace&, const Merged&);

template <class Lookup>
MergeRows merge_of_any_dim(int64_t dim) {
  return is_one_strip(dim) ? merge_rows<Lookup, 0, false> : merge_rows<Lookup, 0, true>;
}

MergeRows merge_of(const Bucket& b) {
  if (b.source.place) return merge_of_any_dim<Listed>(b.table.dim);
  switch (b.table.dim) {
    case 16:
      return merge_rows<Plain, 16, false>;
    case 32:
      return merge_rows<Plain, 32, false>;
    case 64:
      return merge_rows<Plain, 64, false>;
    case 128:
      return merge_rows<Plain, 128, false>;
    default:
      return merge_of_any_dim<Plain>(b.table.dim);
  }
}

template <class Optimizer, RowType T>
UpdateRows update_of_dim(int64_t dim) {
  switch (dim) {
    case 16:
      return update_rows<Optimizer, T, 16>;
    case 32:
      return update_rows<Optimizer, T, 32>;
    case 64:
      return update_rows<Optimizer, T, 64>;
    case 128:
      return update_rows<Optimizer, T, 128>;
    default:
      return update_rows<Optimizer, T, 0>;
  }
}

template <class Optimizer>
UpdateRows update_of_type(const Table& table) {
  return with_type(table.type, [&](auto stored) -> UpdateRows {
    constexpr RowType type = decltype(stored)::type;
    if constexpr (is_updated(type)) return update_of_dim<Optimizer, type>(table.dim);
    __builtin_trap();  // the caller has refused it
  });
}

// All optimizers; a table's rule is a place in this list. Python's (`OPTIMIZERS` in rowwise/tables/row_optimizers.py)
// are the same in the same order, which is checked when the library is loaded.
template <class... Optimizer>
struct List {
  static constexpr int64_t count = sizeof...(Optimizer);
  static constexpr OptimizerFacts facts[] = {{Optimizer::name, Optimizer::state_floats}...};
  static constexpr UpdateRows (*update_of[])(const Table&) = {update_of_type<Optimizer>...};
};
using Optimizers = List<Sgd, Adagrad, RowWiseAdagrad, Adam, RowWiseAdam, Lamb, Ftrl>;

OptimizerFacts optimizer(int64_t rule) {
  return rule >= 0 && rule < Optimizers::count ? Optimizers::facts[rule] : OptimizerFacts{};
}

void apply(const Bucket& b, const Workspace& work, Fault& fault) {
  const MergeRows merge = merge_of(b);
  const UpdateRows update = Optimizers::update_of[b.table.rule](b.table);
  const int64_t bytes = b.table.format().bytes(), state_bytes = b.table.state_width * 4;
  const bool whole_rows = fill_lines(bytes), whole_states = state_bytes && fill_lines(state_bytes);
  const char* const weights = b.arena + b.table.base;
  const char* const states = reinterpret_cast<const char*>(b.state + b.table.state_base);
  const int64_t num_rows = find_rows(b, work.starts);
  for (int64_t k = 0; k < batch_rows; ++k)  // columns behind a row stay zeros
    std::fill(work.merged + k * work.stride + b.table.dim, work.merged + (k + 1) * work.stride, 0.f);
  auto row_at = [&](int64_t s) { return int64_t(b.entries[work.starts[s]] >> b.payload_bits); };
  // Rows come from memory to the second-level cache well ahead, and from there to the first a batch before use.
  constexpr int64_t far = 32;
  for (int64_t s = 0; s < num_rows; s += batch_rows) {
    for (int64_t k = s + far; k < std::min(s + far + batch_rows, num_rows); ++k) {
      prefetch<2>(weights + row_at(k) * bytes, bytes, whole_rows);
      if (state_bytes) prefetch<2>(states + row_at(k) * state_bytes, state_bytes, whole_states);
    }
    for (int64_t k = s; k < std::min(s + batch_rows, num_rows); ++k) {
      prefetch(weights + row_at(k) * bytes, bytes, whole_rows);
      if (state_bytes) prefetch(states + row_at(k) * state_bytes, state_bytes, whole_states);
    }
    update(b, work, merge(b, work, s, std::min(batch_rows, num_rows - s), fault));
  }
}

}  // namespace
}  // namespace rowwise::ISA
