// Sums over a sample of the edges into each node, which is chosen while it is read: there is no sampled graph in
// memory.
//
// The edges of as many nodes as fit into a list in the first-level cache are chosen, then the lookup kernel adds up
// their rows. So sums have the bits of those over a graph of the chosen edges alone.
#include "bind.h"
#include "isa.h"
#include "kernels.h"

namespace {

using namespace rowwise;

constexpr int64_t nodes_per_task = 256;
constexpr int64_t nodes_ahead = 8;
constexpr int64_t listed = 1024;  // edges: a list of 12 KB at most, unless one node has more
constexpr int64_t prime = 577;

enum class Choice : int64_t { first, spread, stride };

// [Note: Sampled edges]
// Of a node with `degree` edges, more than `width`, choice s = 0 .. width - 1 is the edge
//   first: s;    spread: s * degree / width;    stride: s * 577 mod degree, and s * 577 / degree further if 577 divides
// the degree, as the stride would repeat its edges. All divisions round down. No edge is chosen twice.
struct Sample {
  int64_t width;
  Choice choice;
  bool rescaled;

  // f(edge) in the order of choice
  template <class F>
  inline __attribute__((always_inline)) void each(int64_t degree, F f) const {
    const int64_t count = std::min(degree, width);
    if (degree <= width || choice == Choice::first) {
      for (int64_t s = 0; s < count; ++s) f(s);
    } else if (choice == Choice::spread) {
      const int64_t step = degree / width, more = degree % width;
      for (int64_t s = 0, edge = 0, part = 0; s < count; ++s) {
        f(edge);
        edge += step;
        part += more;
        if (part >= width) part -= width, ++edge;
      }
    } else {
      const int64_t step = degree < prime ? prime % degree : prime, further = degree % prime == 0;
      for (int64_t s = 0, edge = 0; s < count; ++s) {
        f(edge);
        edge += step;
        if (edge >= degree) edge += further - degree;
      }
    }
  }

  float scale(int64_t degree) const { return rescaled && degree > width ? float(degree) / float(width) : 1.f; }
};

// The edges into each of some nodes.
template <class Id>
struct Edges {
  const int64_t* starts;
  const Id* ids;
  const float* weights;
  int64_t rows;  // of vectors

  // The first edges of a node: among rows that are read at random the processor does not fetch ahead by itself.
  void prefetch(int64_t node) const {
    for (int64_t i = starts[node]; i < starts[node] + 32; i += 16) {
      __builtin_prefetch(ids + i);
      __builtin_prefetch(weights + i);
    }
  }
};

template <class Id>
struct List {  // the chosen edges of some nodes
  std::vector<Id> ids;
  std::vector<float> weights;
  std::vector<int64_t> ends;  // one for each node, after a zero
  int64_t used = 0;

  explicit List(int64_t edges) : ids(size_t(edges)), weights(size_t(edges)), ends(nodes_per_task + 1) {}

  // An id that is out of range is reported and left out.
  void add(const Sample& sample, const Edges<Id>& edges, int64_t node, Fault& fault) {
    const int64_t begin = edges.starts[node], degree = edges.starts[node + 1] - begin;
    const float scale = sample.scale(degree);
    Id* const to = ids.data();
    float* const weights_to = weights.data();
    int64_t n = used;
    sample.each(degree, [&](int64_t edge) __attribute__((always_inline)) {
      const int64_t i = begin + edge;
      const bool good = uint64_t(int64_t(edges.ids[i])) < uint64_t(edges.rows);
      if (__builtin_expect(!good, 0)) fault.at(i);
      to[n] = edges.ids[i];
      weights_to[n] = edges.weights[i] * scale;
      n += good;
    });
    used = n;
  }
};

Tensor sum_sampled(const Tensor& vectors, const Tensor& ids, const Tensor& starts, const Tensor& weights, int64_t width,
                   int64_t choice, bool rescaled) {
  check_tensor(vectors, ScalarType::Float, "vectors");
  check_tensor(starts, ScalarType::Long, "starts");
  check_tensor(weights, ScalarType::Float, "weights");
  const Integers checked(ids, "ids");
  const int64_t nodes = starts.numel() - 1;
  STD_TORCH_CHECK(vectors.dim() == 2 && vectors.size(1) > 0 && nodes >= 0 && weights.numel() == checked.count,
                  "rowwise: sum_sampled wants vectors [S, D], starts [T + 1] and a weight for each edge");
  STD_TORCH_CHECK(width > 0 && choice >= 0 && choice <= int64_t(Choice::stride), "rowwise: a width of ", width,
                  " with choice ", choice);
  const int64_t rows = vectors.size(0), dim = vectors.size(1);
  STD_TORCH_CHECK(nodes <= (INT64_C(1) << 60) / dim, "rowwise: cannot make an output of ", nodes, " x ", dim);
  const int64_t* o = starts.const_data_ptr<int64_t>();
  bool ordered = o[0] == 0 && o[nodes] == checked.count;
  int64_t longest = 0;
  for (int64_t i = 0; i < nodes; ++i) {
    ordered &= o[i] <= o[i + 1];
    longest = std::max(longest, o[i + 1] - o[i]);
  }
  STD_TORCH_CHECK(ordered, "rowwise: starts do not ascend from 0 to the number of edges");

  const Sample sample{width, Choice(choice), rescaled};
  const Feature feature{0, 0, 0, rows, dim, 0, Mode::weighted, RowType::fp32, 0};
  const int64_t room = std::max(listed, std::min(width, longest));
  const char* table = static_cast<const char*>(vectors.const_data_ptr());
  Tensor out = empty({nodes, dim});
  float* to = out.mutable_data_ptr<float>();
  const bool stream = nodes * dim * 4 >= streamed_bytes && dim % 16 == 0;
  Fault fault, none;
  with_type(checked.wide, [&](auto id) {
    using Id = decltype(id);
    const Edges<Id> edges{o, static_cast<const Id*>(checked.data), weights.const_data_ptr<float>(), rows};
    each_task((nodes + nodes_per_task - 1) / nodes_per_task, [&](int64_t task) {
      List<Id> list(room);
      int64_t first = task * nodes_per_task;
      const int64_t last = std::min(nodes, first + nodes_per_task);
      const auto add_up = [&](int64_t end) {
        const Bags bags{list.ids.data(), checked.wide, list.ends.data(), list.weights.data(), end - first};
        kernels().pool(table, feature, bags, to + first * dim, dim, 0, end - first, stream, none);
        first = end;
        list.used = 0;
      };
      for (int64_t node = first; node < last; ++node) {
        edges.prefetch(std::min(node + nodes_ahead, nodes));
        if (list.used + std::min(o[node + 1] - o[node], width) > room) add_up(node);
        list.add(sample, edges, node, fault);
        list.ends[size_t(node - first + 1)] = list.used;
      }
      add_up(last);
    });
  });
  check_ids(fault, ids);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rowwise, m) {
  m.def(
      "sum_sampled(Tensor vectors, Tensor ids, Tensor starts, Tensor weights, int width, int choice, bool rescaled) -> "
      "Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(rowwise, CPU, m) { m.impl("sum_sampled", TORCH_BOX(&sum_sampled)); }
