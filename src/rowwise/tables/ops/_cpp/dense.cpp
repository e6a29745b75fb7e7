// The operators of the dense side as torch sees them. Apart from bind.cpp, which binds those on tables: the two
// share how they check and spread work (bind.h), and no shapes.
#include <cstring>
#include <optional>
#include <tuple>

#include "bind.h"
#include "isa.h"
#include "kernels.h"

namespace {

using namespace rowwise;

constexpr int64_t samples_per_task = 32;
constexpr int64_t dots_per_task = 4096;
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
  m.def("relu_grad(Tensor grad, Tensor out) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(rowwise, CPU, m) {
  m.impl("interact", TORCH_BOX(&interact));
  m.impl("interact_grad", TORCH_BOX(&interact_grad));
  m.impl("pair_sums", TORCH_BOX(&pair_sums));
  m.impl("pair_sums_grad", TORCH_BOX(&pair_sums_grad));
  m.impl("dots", TORCH_BOX(&dots));
  m.impl("relu_grad", TORCH_BOX(&relu_grad));
}
