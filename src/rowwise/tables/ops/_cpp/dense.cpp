// The operators of the dense side as torch sees them. Apart from bind.cpp, which binds those on tables: the two
// share how they check and spread work (bind.h), and no shapes.
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>

#include "bind.h"
#include "isa.h"
#include "kernels.h"

namespace {

using namespace rowwise;

constexpr int64_t samples_per_task = 32;
constexpr int64_t dots_per_task = 4096;
constexpr int64_t rows_per_task = 48;               // whose vectors stay in the second-level cache between layers
constexpr int64_t tile = 16;                        // floats of a cache line
constexpr int64_t most_features = 1 << 20;          // so that the number of pairs fits,
constexpr int64_t most_columns = INT64_C(1) << 40;  // and of floats in scratch: an empty batch may claim any shape

Interaction interaction_of(const Tensor& dense, const Tensor& pooled, const char* name) {
  check_tensor(dense, ScalarType::Float, "dense");
  check_tensor(pooled, ScalarType::Float, "pooled");
  STD_TORCH_CHECK(dense.dim() == 2 && pooled.dim() == 2 && dense.size(0) == pooled.size(0) && dense.size(1) > 0 &&
                      pooled.size(1) > 0 && pooled.size(1) % dense.size(1) == 0,
                  "rowwise: ", name, " wants dense [B, D] and pooled [B, F * D]");
  const int64_t dim = dense.size(1), features = pooled.size(1) / dim;
  STD_TORCH_CHECK(features <= most_features && dim <= most_columns, "rowwise: cannot pair ", features,
                  " features of dim ", dim);
  const int64_t stride = (features + 1 + widest_lanes - 1) / widest_lanes * widest_lanes;
  return {dense.const_data_ptr<float>(), pooled.const_data_ptr<float>(), dim, features, stride};
}

int64_t columns_of(const Interaction& in) { return in.dim + (in.features + 1) * in.features / 2; }

// f(first sample, one past the last) in parallel.
template <class F>
void each_samples(int64_t batch, F f) {
  each_task((batch + samples_per_task - 1) / samples_per_task,
            [&](int64_t task) { f(task * samples_per_task, std::min(batch, (task + 1) * samples_per_task)); });
}

bool on_line(const float* p) { return reinterpret_cast<uintptr_t>(p) % 64 == 0; }

Tensor interact(const Tensor& dense, const Tensor& pooled) {
  const Interaction in = interaction_of(dense, pooled, "interact");
  const int64_t batch = dense.size(0), columns = columns_of(in);
  STD_TORCH_CHECK(batch <= (INT64_C(1) << 60) / columns, "rowwise: cannot make an output of ", batch, " x ", columns);
  Tensor out = empty({batch, columns});
  float* o = out.mutable_data_ptr<float>();
  const int64_t floats = in.dim * in.stride + columns + widest_lanes;
  each_samples(batch, [&](int64_t b0, int64_t b1) {
    std::vector<float> scratch(static_cast<size_t>(floats));
    kernels().interact(in, o, b0, b1, scratch.data());
  });
  return out;
}

std::tuple<Tensor, Tensor> interact_grad(const Tensor& dense, const Tensor& pooled, const Tensor& grad) {
  const Interaction in = interaction_of(dense, pooled, "interact_grad");
  const int64_t batch = dense.size(0);
  check_tensor(grad, ScalarType::Float, "grad");
  STD_TORCH_CHECK(grad.dim() == 2 && grad.size(0) == batch && grad.size(1) == columns_of(in), "rowwise: grad must be [",
                  batch, ", ", columns_of(in), "]");
  Tensor dense_grad = empty({batch, in.dim}), pooled_grad = empty({batch, in.features * in.dim});
  const float* g = grad.const_data_ptr<float>();
  InteractionGrad to{dense_grad.mutable_data_ptr<float>(), pooled_grad.mutable_data_ptr<float>(), false};
  // Streaming stores write whole cache lines, so every vector has to begin on one.
  to.stream = in.dim % 16 == 0 && pooled.numel() * 4 >= streamed_bytes && on_line(to.dense) && on_line(to.pooled);
  each_samples(batch, [&](int64_t b0, int64_t b1) { kernels().interact_grad(in, g, to, b0, b1); });
  return {dense_grad, pooled_grad};
}

Tensor pair_sums(const Tensor& offset, const Tensor& pooled) {
  const Interaction in = interaction_of(offset, pooled, "pair_sums");
  Tensor out = empty({offset.size(0)});
  float* o = out.mutable_data_ptr<float>();
  each_samples(offset.size(0), [&](int64_t b0, int64_t b1) {
    std::vector<float> scratch(static_cast<size_t>(in.dim));
    kernels().pair_sums(in, o, b0, b1, scratch.data());
  });
  return out;
}

std::tuple<Tensor, Tensor> pair_sums_grad(const Tensor& offset, const Tensor& pooled, const Tensor& grad) {
  const Interaction in = interaction_of(offset, pooled, "pair_sums_grad");
  const int64_t batch = offset.size(0);
  check_tensor(grad, ScalarType::Float, "grad");
  STD_TORCH_CHECK(grad.dim() == 1 && grad.size(0) == batch, "rowwise: grad must be [", batch, "]");
  Tensor offset_grad = empty({batch, in.dim}), pooled_grad = empty({batch, in.features * in.dim});
  const InteractionGrad to{offset_grad.mutable_data_ptr<float>(), pooled_grad.mutable_data_ptr<float>(), false};
  const float* g = grad.const_data_ptr<float>();
  each_samples(batch, [&](int64_t b0, int64_t b1) { kernels().pair_sums_grad(in, g, to, b0, b1); });
  return {offset_grad, pooled_grad};
}

// Of a query [D] with all rows or those at places [N]; or of queries [Q, D] with rows at places [Q, N] of their own.
Tensor dots(const Tensor& query, const Tensor& rows, const std::optional<Tensor>& places) {
  check_tensor(query, ScalarType::Float, "query");
  check_tensor(rows, ScalarType::Float, "rows");
  const bool several = query.dim() == 2 && places && places->dim() == 2 && places->size(0) == query.size(0);
  STD_TORCH_CHECK((query.dim() == 1 || several) && rows.dim() == 2, "rowwise: dots expects query [D] and rows [R, D]");
  const int64_t size = rows.size(0), dim = rows.size(1);
  STD_TORCH_CHECK(query.size(query.dim() - 1) == dim && dim > 0, "rowwise: dots expects vectors of one dim");
  if (places) {
    check_tensor(*places, ScalarType::Long, "places");
    const int64_t* p = places->const_data_ptr<int64_t>();
    for (int64_t i = 0; i < places->numel(); ++i)
      STD_TORCH_CHECK(0 <= p[i] && p[i] < size, "rowwise: place ", p[i], " of ", size, " rows");
  }
  const Dots in{query.const_data_ptr<float>(), rows.const_data_ptr<float>(), dim,
                places ? places->const_data_ptr<int64_t>() : nullptr};
  if (several) {
    const int64_t queries = query.size(0), each = places->size(1);
    Tensor out = empty({queries, each});
    float* o = out.mutable_data_ptr<float>();
    each_task(queries, [&](int64_t q) {
      const Dots own{in.query + q * dim, in.rows, dim, in.places + q * each};
      kernels().dots(own, o + q * each, 0, each);
    });
    return out;
  }
  const int64_t count = places ? places->numel() : size;
  Tensor out = empty({count});
  float* o = out.mutable_data_ptr<float>();
  each_task((count + dots_per_task - 1) / dots_per_task, [&](int64_t task) {
    kernels().dots(in, o, task * dots_per_task, std::min(count, (task + 1) * dots_per_task));
  });
  return out;
}

// The layers of `layers` [L, 3] (inputs, outputs, whether a ReLU follows), packed one after the other in `weights`.
std::vector<Layer> layers_of(const Tensor& layers, const Tensor& weights) {
  check_tensor(layers, ScalarType::Long, "layers");
  check_tensor(weights, ScalarType::Float, "weights");
  STD_TORCH_CHECK(layers.dim() == 2 && layers.size(0) > 0 && layers.size(1) == 3, "rowwise: layers must be [L, 3]");
  const int64_t* facts = layers.const_data_ptr<int64_t>();
  std::vector<Layer> made;
  const float* at = weights.const_data_ptr<float>();
  int64_t left = weights.numel();
  for (int64_t k = 0; k < layers.size(0); ++k, facts += 3) {
    const int64_t in = facts[0], out = facts[1];
    STD_TORCH_CHECK(in >= 0 && out > 0 && out <= left, "rowwise: layer ", k, " has no room in its weights");
    const int64_t lanes = (out + panel - 1) / panel * panel;
    STD_TORCH_CHECK(in < left / lanes, "rowwise: layer ", k, " has no room in its weights");
    made.push_back({at, in, out, facts[2] != 0});
    at += (in + 1) * lanes, left -= (in + 1) * lanes;
  }
  STD_TORCH_CHECK(!left, "rowwise: ", left, " weights belong to no layer");
  return made;
}

// Rows [0, rows) through layers [begin, end), into `out`; between layers they are in two buffers, which are swapped.
void run_layers(const Layer* begin, const Layer* end, const float* x, float* out, int64_t rows, float* (&buffers)[2]) {
  for (const Layer* layer = begin; layer < end; ++layer) {
    float* to = layer + 1 == end ? out : buffers[0];
    kernels().layer(*layer, x, to, rows);
    x = to;
    std::swap(buffers[0], buffers[1]);
  }
}

// Where each of the rows begins a run of equal ones: [begin of the first run, .., rows].
std::vector<int64_t> runs_of(const float* x, int64_t columns, int64_t rows) {
  std::vector<int64_t> begins{0};
  for (int64_t b = 1; b < rows; ++b)
    if (std::memcmp(x + b * columns, x + (b - 1) * columns, size_t(columns) * 4)) begins.push_back(b);
  begins.push_back(rows);
  return begins;
}

// A model's dense part: x through all layers, or, with `pooled`, through the first ones, then beside the pooled vectors
// through the interaction, then through the others. Equal neighbours, as the candidates of a context have, go through
// the first ones once.
Tensor layers(const Tensor& x, const Tensor& layers_LC, const Tensor& weights, const std::optional<Tensor>& pooled,
              int64_t first) {
  const std::vector<Layer> all = layers_of(layers_LC, weights);
  const int64_t count = int64_t(all.size());
  check_tensor(x, ScalarType::Float, "x");
  STD_TORCH_CHECK(x.dim() == 2 && first >= 0 && first < count, "rowwise: layers wants x [B, inputs]");
  const int64_t batch = x.size(0), columns = x.size(1);
  if (pooled) check_tensor(*pooled, ScalarType::Float, "pooled");
  Interaction pairs{};
  int64_t width = columns, widest = columns;
  for (int64_t k = 0; k < count; ++k) {
    if (pooled && k == first) {
      STD_TORCH_CHECK(pooled->dim() == 2 && pooled->size(0) == batch && width > 0 && pooled->size(1) > 0 &&
                          pooled->size(1) % width == 0 && pooled->size(1) / width <= most_features,
                      "rowwise: layers wants pooled [B, F * ", width, "]");
      const int64_t features = pooled->size(1) / width;
      pairs = {nullptr, pooled->const_data_ptr<float>(), width, features,
               (features + 1 + widest_lanes - 1) / widest_lanes * widest_lanes};
      width = columns_of(pairs);
      widest = std::max(widest, width);
    }
    STD_TORCH_CHECK(all[size_t(k)].in == width, "rowwise: layer ", k, " has ", all[size_t(k)].in, " inputs and gets ",
                    width);
    width = all[size_t(k)].out;
    widest = std::max(widest, width);
  }
  STD_TORCH_CHECK(batch <= (INT64_C(1) << 60) / widest, "rowwise: cannot make ", batch, " x ", widest);
  Tensor out = empty({batch, width});
  const float* from = x.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const Layer *begin = all.data(), *middle = begin + first, *end = begin + count;
  each_task((batch + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
    const int64_t b0 = task * rows_per_task, rows = std::min(rows_per_task, batch - b0), size = rows * widest;
    const int64_t extra = pooled ? pairs.dim * pairs.stride + columns_of(pairs) + widest_lanes : 0;
    const std::unique_ptr<float[]> scratch(new float[size_t(3 * size + extra)]);
    float *buffers[2] = {scratch.get(), scratch.get() + size}, *spare = scratch.get() + 2 * size;
    const float* rows_x = from + b0 * columns;
    float* rows_out = to + b0 * width;
    if (!pooled) return run_layers(begin, end, rows_x, rows_out, rows, buffers);
    const std::vector<int64_t> runs = runs_of(rows_x, columns, rows);
    const int64_t distinct = int64_t(runs.size()) - 1;
    for (int64_t k = 0; k < distinct; ++k)
      std::memcpy(buffers[1] + k * columns, rows_x + runs[size_t(k)] * columns, size_t(columns) * 4);
    if (first) run_layers(begin, middle, buffers[1], spare, distinct, buffers);
    float* dense = spare;
    if (!first) std::memcpy(spare, buffers[1], size_t(distinct * columns) * 4);
    for (int64_t k = distinct; k-- > 0;)  // from the end, as rows move back
      for (int64_t b = runs[size_t(k) + 1]; b-- > runs[size_t(k)];)
        std::memmove(dense + b * pairs.dim, dense + k * pairs.dim, size_t(pairs.dim) * 4);
    Interaction part = pairs;
    part.dense = dense, part.pooled += b0 * pairs.features * pairs.dim;
    kernels().interact(part, buffers[1], 0, rows, scratch.get() + 3 * size);
    run_layers(middle, end, buffers[1], rows_out, rows, buffers);
  });
  return out;
}

// `grad` where a layer's output is not cut off; NaN lets its gradient through.
void mask(const float* __restrict grad, const float* __restrict out, int64_t n, float* __restrict masked) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, grad + i, sizeof bits);
    bits &= -uint32_t(!(out[i] <= 0.0f));  // no branch: signs are as good as random
    std::memcpy(masked + i, &bits, sizeof bits);
  }
}

// One square of a matrix [.., columns], turned around into one of [.., batch].
void turn_tile(const float* __restrict from, int64_t columns, int64_t batch, float* __restrict to) {
  float square[tile * tile];  // rows of a matrix lie on the same few lines of a cache
  for (int64_t i = 0; i < tile; ++i) std::memcpy(square + i * tile, from + i * columns, tile * sizeof(float));
  for (int64_t j = 0; j < tile; ++j)
    for (int64_t i = 0; i < tile; ++i) to[j * batch + i] = square[i * tile + j];
}

// torch's threshold_backward, and a transposed copy, which torch would make on one thread.
std::tuple<Tensor, Tensor> relu_grad(const Tensor& grad, const Tensor& out) {
  check_tensor(grad, ScalarType::Float, "grad");
  check_tensor(out, ScalarType::Float, "out");
  STD_TORCH_CHECK(grad.dim() == 2 && out.dim() == 2 && grad.size(0) == out.size(0) && grad.size(1) == out.size(1),
                  "rowwise: relu_grad wants two matrices of one shape");
  const int64_t batch = grad.size(0), columns = grad.size(1);
  Tensor masked = empty({batch, columns}), turned = empty({columns, batch});
  const float *g = grad.const_data_ptr<float>(), *o = out.const_data_ptr<float>();
  float *m = masked.mutable_data_ptr<float>(), *t = turned.mutable_data_ptr<float>();
  each_samples(batch, [&](int64_t b0, int64_t b1) {
    mask(g + b0 * columns, o + b0 * columns, (b1 - b0) * columns, m + b0 * columns);
    for (int64_t b = b0; b < b1; b += tile)
      for (int64_t c = 0; c < columns; c += tile)
        if (b + tile <= b1 && c + tile <= columns)
          turn_tile(m + b * columns + c, columns, batch, t + c * batch + b);
        else
          for (int64_t i = b; i < std::min(b + tile, b1); ++i)
            for (int64_t j = c; j < std::min(c + tile, columns); ++j) t[j * batch + i] = m[i * columns + j];
  });
  return {masked, turned};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rowwise, m) {
  m.def("interact(Tensor dense, Tensor pooled) -> Tensor");
  m.def("interact_grad(Tensor dense, Tensor pooled, Tensor grad) -> (Tensor, Tensor)");
  m.def("pair_sums(Tensor offset, Tensor pooled) -> Tensor");
  m.def("pair_sums_grad(Tensor offset, Tensor pooled, Tensor grad) -> (Tensor, Tensor)");
  m.def("dots(Tensor query, Tensor rows, Tensor? places=None) -> Tensor");
  m.def("layers(Tensor x, Tensor layers, Tensor weights, Tensor? pooled=None, int first=0) -> Tensor");
  m.def("relu_grad(Tensor grad, Tensor out) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(rowwise, CPU, m) {
  m.impl("interact", TORCH_BOX(&interact));
  m.impl("interact_grad", TORCH_BOX(&interact_grad));
  m.impl("pair_sums", TORCH_BOX(&pair_sums));
  m.impl("pair_sums_grad", TORCH_BOX(&pair_sums_grad));
  m.impl("dots", TORCH_BOX(&dots));
  m.impl("layers", TORCH_BOX(&layers));
  m.impl("relu_grad", TORCH_BOX(&relu_grad));
}
