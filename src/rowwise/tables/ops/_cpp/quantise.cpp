// Rows in half a byte a column, and the largest numbers of rows, as torch sees them. Apart from bind.cpp, which binds
// the operators of training.
#include "bind.h"
#include "isa.h"
#include "kernels.h"

namespace {

using namespace rowwise;

constexpr int64_t rows_per_task = 256;
constexpr int64_t most_columns = INT64_C(1) << 40;  // so that the bytes of a row fit, also where there are no rows

// f(first row, rows) in parallel.
template <class F>
void each_rows(int64_t rows, F f) {
  each_task((rows + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
    const int64_t first = task * rows_per_task;
    f(first, std::min(rows_per_task, rows - first));
  });
}

Tensor pack4(const Tensor& rows) {
  check_tensor(rows, ScalarType::Float, "rows");
  STD_TORCH_CHECK(rows.dim() == 2 && rows.size(1) > 0 && rows.size(1) <= most_columns,
                  "rowwise: rows must be [rows, columns]");
  const int64_t n = rows.size(0), dim = rows.size(1), bytes = packed4_bytes(dim);
  Tensor out = torch::stable::empty({n, bytes}, ScalarType::Byte);
  const float* in = rows.const_data_ptr<float>();
  char* o = static_cast<char*>(out.mutable_data_ptr());
  each_rows(n, [&](int64_t r, int64_t some) { kernels().pack4(in + r * dim, dim, o + r * bytes, some); });
  return out;
}

Tensor unpack4(const Tensor& packed, int64_t dim) {
  check_tensor(packed, ScalarType::Byte, "packed");
  STD_TORCH_CHECK(dim > 0 && dim <= most_columns, "rowwise: rows of ", dim, " columns");
  const int64_t bytes = packed4_bytes(dim);
  STD_TORCH_CHECK(packed.dim() == 2 && packed.size(1) == bytes, "rowwise: rows of ", dim, " columns take ", bytes,
                  " bytes at four bits");
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(packed.const_data_ptr()) % 4 == 0, "rowwise: packed is not aligned");
  const int64_t n = packed.size(0);
  Tensor out = torch::stable::empty({n, dim}, ScalarType::Float);
  const char* in = static_cast<const char*>(packed.const_data_ptr());
  float* o = out.mutable_data_ptr<float>();
  each_rows(n, [&](int64_t r, int64_t some) { kernels().unpack4(in + r * bytes, dim, o + r * dim, some); });
  return out;
}

Tensor keep_largest(const Tensor& rows, int64_t kept) {
  check_tensor(rows, ScalarType::Float, "rows");
  STD_TORCH_CHECK(rows.dim() == 2 && rows.size(1) > 0 && rows.size(1) <= 256,
                  "rowwise: rows must be [rows, columns], of at most 256 columns");
  const int64_t n = rows.size(0), dim = rows.size(1);
  STD_TORCH_CHECK(kept > 0 && kept <= dim, "rowwise: ", kept, " numbers of rows of ", dim);
  Tensor out = torch::stable::empty({n, 5 * kept}, ScalarType::Byte);
  const float* in = rows.const_data_ptr<float>();
  char* o = static_cast<char*>(out.mutable_data_ptr());
  each_rows(n,
            [&](int64_t r, int64_t some) { kernels().keep_largest(in + r * dim, dim, kept, o + r * 5 * kept, some); });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rowwise, m) {
  m.def("pack4(Tensor rows) -> Tensor");
  m.def("unpack4(Tensor packed, int dim) -> Tensor");
  m.def("keep_largest(Tensor rows, int kept) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(rowwise, CPU, m) {
  m.impl("pack4", TORCH_BOX(&pack4));
  m.impl("unpack4", TORCH_BOX(&unpack4));
  m.impl("keep_largest", TORCH_BOX(&keep_largest));
}
