// Merge the contributions to each row of a bucket, then update the row once.
//
// Included by isa.cpp only, once per instruction set. Merging and updating meet in one small buffer (the
// merged gradient of a row, in first-level cache), so an optimizer is a function of (gradient, row, state)
// and knows nothing of how gradients were found, nor, as it sees floats only, of how rows are stored. See [Note: Merge
// order] in tables.h.
#pragma once
#include <algorithm>
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

inline float root(float x) { return std::sqrt(x); }
template <class V>
inline V root(V x) {
  V y;
  for (int k = 0; k < Vec<V>::width; ++k) y[k] = std::sqrt(x[k]);
  return y;
}

inline float square_sum(const float* x, int64_t dim) {
  return column_sum(dim, [&](int64_t c) __attribute__((always_inline)) {
    const Quad q = quad_at(x, c, dim);
    return q * q;
  });
}

struct Sgd {
  static constexpr bool decays_gradient = true;
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
  static constexpr bool decays_gradient = true;
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
  static constexpr bool decays_gradient = true;
  template <int D>
  static void apply(const Row& row) {
    const Row r = row;
    const int64_t dim = D ? D : r.dim;
    const float state = *r.state += square_sum(r.g, dim) / float(dim);
    const float step = r.h.lr / (std::sqrt(state) + r.h.eps);
    each_vector(dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using X = Vec<decltype(v)>;
      X::store(r.w + c, X::load(r.w + c) - X::load(r.g + c) * step);
    });
  }
};

// The moving averages of gradients; state is the first, then the second.
template <class V>
inline __attribute__((always_inline)) V first_moment(const Row& r, int64_t c, V g) {
  const V m = Vec<V>::load(r.state + c) * r.h.moments.beta1 + g * (1.f - r.h.moments.beta1);
  Vec<V>::store(r.state + c, m);
  return m * r.h.moments.inverse1;
}
template <class V>
inline __attribute__((always_inline)) V adam_step(const Row& r, int64_t c, int64_t dim) {
  const V g = Vec<V>::load(r.g + c);
  const V m = first_moment(r, c, g);
  const V v = Vec<V>::load(r.state + dim + c) * r.h.moments.beta2 + g * g * (1.f - r.h.moments.beta2);
  Vec<V>::store(r.state + dim + c, v);
  return m / (root(v * r.h.moments.inverse2) + r.h.eps);
}

struct Adam {
  static constexpr bool decays_gradient = false;
  template <int D>
  static void apply(const Row& row) {
    const Row r = row;
    const int64_t dim = D ? D : r.dim;
    each_vector(dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using V = decltype(v);
      const V w = Vec<V>::load(r.w + c);
      Vec<V>::store(r.w + c, w - (adam_step<V>(r, c, dim) + w * r.h.weight_decay) * r.h.lr);
    });
  }
};

struct RowWiseAdam {
  static constexpr bool decays_gradient = false;
  template <int D>
  static void apply(const Row& row) {
    const Row r = row;
    const int64_t dim = D ? D : r.dim;
    float& state = r.state[dim];
    state = state * r.h.moments.beta2 + square_sum(r.g, dim) / float(dim) * (1.f - r.h.moments.beta2);
    const float inverse = 1.f / (std::sqrt(state * r.h.moments.inverse2) + r.h.eps);
    each_vector(dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using V = decltype(v);
      const V w = Vec<V>::load(r.w + c);
      const V step = first_moment(r, c, Vec<V>::load(r.g + c)) * inverse;
      Vec<V>::store(r.w + c, w - (step + w * r.h.weight_decay) * r.h.lr);
    });
  }
};

struct Lamb {  // Adam's step, as long as the row is
  static constexpr bool decays_gradient = false;
  template <int D>
  static void apply(const Row& row) {
    const Row r = row;
    const int64_t dim = D ? D : r.dim;
    each_vector(dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using V = decltype(v);
      Vec<V>::store(r.g + c, adam_step<V>(r, c, dim) + Vec<V>::load(r.w + c) * r.h.weight_decay);
    });
    const float length = std::sqrt(square_sum(r.w, dim)), step = std::sqrt(square_sum(r.g, dim));
    const float trust =
        length > 0.f && step > 0.f && std::isfinite(length) && std::isfinite(step) ? length / step : 1.f;
    const float lr = r.h.lr * trust;
    each_vector(dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using X = Vec<decltype(v)>;
      X::store(r.w + c, X::load(r.w + c) - X::load(r.g + c) * lr);
    });
  }
};

struct Ftrl {  // state is z, then n
  static constexpr bool decays_gradient = false;
  template <int D>
  static void apply(const Row& row) {
    const Row r = row;
    const int64_t dim = D ? D : r.dim;
    each_vector(dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using V = decltype(v);
      using X = Vec<V>;
      const V g = X::load(r.g + c), n = X::load(r.state + dim + c), sum = n + g * g;
      const V after = root(sum), rate = (after - root(n)) / r.h.lr;
      const V z = X::load(r.state + c) + g - rate * X::load(r.w + c);
      X::store(r.state + c, z);
      X::store(r.state + dim + c, sum);
      const V l1 = V{} + r.h.ftrl.l1, zero = {};
      const V shrunk = z > l1 ? z - l1 : z < zero - l1 ? z + l1 : zero;
      X::store(r.w + c, zero - shrunk / ((after + r.h.ftrl.beta) / r.h.lr + r.h.ftrl.l2));
    });
  }
};

void clip(const Row& r) {  // to a length
  const float length = std::sqrt(square_sum(r.g, r.dim));
  if (length <= r.h.clip) return;
  const float scale = r.h.clip / length;
  each_vector(r.dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
    using X = Vec<decltype(v)>;
    X::store(r.g + c, X::load(r.g + c) * scale);
  });
}

void decay(const Row& r) {  // L2 in the gradient; Adam and LAMB apply it to the weight instead, and FTRL has its own
  each_vector(r.dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
    using X = Vec<decltype(v)>;
    X::store(r.g + c, X::load(r.g + c) + X::load(r.w + c) * r.h.weight_decay);
  });
}

// Where the segments of equal rows begin, and the end of the last; returns how many.
int64_t find_rows(const Bucket& b, int64_t* starts) {
  const uint64_t* entries = b.entries;
  const int64_t n = b.num_entries;
  int64_t num_rows = 0;
  uint64_t last = ~(entries[0] >> b.payload_bits);
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t key = entries[i] >> b.payload_bits;
    if (key != last) starts[num_rows++] = i;
    last = key;
  }
  starts[num_rows] = n;
  return num_rows;
}

template <class Lookup, class Rule, int D>
void apply_rows(const Bucket& bucket, const Workspace& workspace, Fault& fault) {
  const Bucket b = bucket;
  const Workspace work = workspace;
  const Lookup lookup(b);
  const uint64_t* entries = b.entries;
  const int64_t dim = D ? D : b.table.dim, n = b.num_entries;
  const Format format{b.table.type, dim, b.table.group};
  const bool floats = format.type == RowType::fp32;
  char* const weights = b.arena + b.table.base;
  float* const states = b.state + b.table.state_base;
  const int64_t bytes = format.bytes(), state_width = b.table.state_width;
  const bool whole_rows = bytes % 64 == 0, whole_states = state_width % 16 == 0, whole_grads = dim % 16 == 0;
  auto row_of = [&](int64_t i) { return int64_t(entries[i] >> b.payload_bits); };
  const int64_t num_rows = find_rows(b, work.starts);

  // Rows come from memory to the second-level cache well ahead, and from there to the first shortly before use.
  constexpr int64_t far = 32, near = 4, grads_ahead = 16;
  for (int64_t s = 0; s < num_rows; ++s) {
    if (s + far < num_rows) {
      const int64_t next = row_of(work.starts[s + far]);
      prefetch<2>(weights + next * bytes, bytes, whole_rows);
      if (state_width)
        prefetch<2>(reinterpret_cast<const char*>(states + next * state_width), state_width * 4, whole_states);
    }
    if (s + near < num_rows) {
      const int64_t next = row_of(work.starts[s + near]);
      prefetch(weights + next * bytes, bytes, whole_rows);
      if (state_width)
        prefetch(reinterpret_cast<const char*>(states + next * state_width), state_width * 4, whole_states);
    }
    const int64_t begin = work.starts[s], end = work.starts[s + 1];
    if (!b.source.in_cache)
      for (int64_t i = begin + grads_ahead; i < std::min(end + grads_ahead, n); ++i)
        prefetch(reinterpret_cast<const char*>(lookup.at(entries[i]).grad), dim * 4, whole_grads);
    for_strips(dim, [&](auto strip, int64_t column) __attribute__((always_inline)) {
      merge_strip<typename decltype(strip)::type, decltype(strip)::count>(lookup, entries + begin, end - begin, column,
                                                                          work);
    });
    const int64_t row = row_of(begin);
    if (__builtin_expect(!is_finite(work.merged, dim), 0)) {
      fault.at(row);
      continue;
    }
    char* const stored = weights + row * bytes;
    if (!floats) read_row(format, stored, work.row);
    const Row r{work.merged, floats ? reinterpret_cast<float*>(stored) : work.row, states + row * state_width, dim,
                b.hyper};
    if (r.h.clip > 0.f) clip(r);
    if (Rule::decays_gradient && r.h.weight_decay != 0.f) decay(r);
    Rule::template apply<D>(r);
    if (!floats) write_row(format, work.row, stored, RowBits(b.key, row));
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
    case Rule::adam:
      return apply_rule<Adam>(b, work, fault);
    case Rule::rowwise_adam:
      return apply_rule<RowWiseAdam>(b, work, fault);
    case Rule::lamb:
      return apply_rule<Lamb>(b, work, fault);
    case Rule::ftrl:
      return apply_rule<Ftrl>(b, work, fault);
  }
}

}  // namespace
}  // namespace rowwise::ISA
