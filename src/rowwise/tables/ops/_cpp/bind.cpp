// The operators as torch sees them: check what the caller hands over, share the work, report bad ids.
//
// Checks here protect memory (no argument can make a kernel read or write outside its tensors); messages with
// table and feature names are made on the Python side, which knows them.
#include "bind.h"

#include <optional>
#include <string>

#include "isa.h"
#include "kernels.h"
#include "update.h"

namespace {

using namespace rowwise;

constexpr int64_t bags_per_task = 256;
constexpr int64_t ids_per_task = 4096;

template <class T>
const T* rows_of(const Tensor& t, ScalarType type, const char* name) {
  check_tensor(t, type, name);
  STD_TORCH_CHECK(t.dim() == 2 && t.size(1) * int64_t(t.element_size()) == int64_t(sizeof(T)), "rowwise: ", name,
                  " must be [n, ", sizeof(T) / t.element_size(), "]");
  return static_cast<const T*>(t.const_data_ptr());
}

Bags bags_of(const Tensor& values, const Tensor& offsets, const std::optional<Tensor>& weights, int64_t batch) {
  const bool wide = values.scalar_type() == ScalarType::Long;
  check_tensor(values, wide ? ScalarType::Long : ScalarType::Int, "values");
  check_tensor(offsets, ScalarType::Long, "offsets");
  const int64_t n = offsets.numel() - 1;
  STD_TORCH_CHECK(batch >= 0 && batch <= INT32_MAX && n >= 0 && (batch ? n % batch == 0 : n == 0), "rowwise: ", n,
                  " bags do not divide into a batch of ", batch);
  const int64_t* o = offsets.const_data_ptr<int64_t>();
  bool ordered = o[0] == 0 && o[n] == values.numel();
  for (int64_t i = 0; i < n; ++i) ordered &= o[i] <= o[i + 1];
  STD_TORCH_CHECK(ordered, "rowwise: lengths do not add up to ", values.numel(), " values");
  Bags bags{values.const_data_ptr(), wide, o, nullptr, batch};
  if (weights) {
    check_tensor(*weights, ScalarType::Float, "weights");
    STD_TORCH_CHECK(weights->numel() == values.numel(), "rowwise: ", weights->numel(), " weights for ", values.numel(),
                    " values");
    static const float none = 0.f;  // an empty tensor has no address
    bags.weights = values.numel() ? weights->const_data_ptr<float>() : &none;
  }
  return bags;
}

void check_arena(const Tensor& arena) {
  check_tensor(arena, ScalarType::Byte, "arena");
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(arena.const_data_ptr()) % 4 == 0, "rowwise: arena is not aligned");
}

void check_format(const Format& f) {
  STD_TORCH_CHECK(f.dim > 0 && f.dim <= INT32_MAX, "rowwise: rows of ", f.dim, " columns");
  STD_TORCH_CHECK(int64_t(f.type) >= 0 && int64_t(f.type) < num_row_types, "rowwise: unknown row type ",
                  int64_t(f.type));
  STD_TORCH_CHECK(f.group >= 0 && f.group % 16 == 0, "rowwise: a group of ", f.group,
                  " columns; expected a multiple of 16, or 0 for all");
}

struct Features {
  const Feature* data;
  int64_t count;

  Features(const Tensor& t, const Tensor& arena, const Tensor& offsets, const Bags& bags, int64_t columns)
      : data(rows_of<Feature>(t, ScalarType::Long, "features")), count(t.size(0)) {
    check_arena(arena);
    const int64_t sources = bags.batch ? (offsets.numel() - 1) / bags.batch : INT64_MAX;
    for (int64_t i = 0; i < count; ++i) {
      const Feature& f = data[i];
      STD_TORCH_CHECK(f.source >= 0 && f.source < sources, "rowwise: no feature ", f.source, " in the batch");
      check_format(f.format());
      STD_TORCH_CHECK(
          f.rows > 0 && f.base >= 0 && f.base % 4 == 0 && f.rows <= (arena.numel() - f.base) / f.format().bytes(),
          "rowwise: table ", f.table, " reaches past the arena");
      STD_TORCH_CHECK(columns < 0 || (f.column >= 0 && f.column <= columns - f.dim), "rowwise: feature ", i,
                      " reaches past the output");
      STD_TORCH_CHECK(
          int64_t(f.mode) >= 0 && int64_t(f.mode) <= 2 && (columns < 0 || f.mode != Mode::weighted || bags.weights),
          "rowwise: feature ", i, " is weighted and the batch carries no weights");
    }
  }
  const Feature& operator[](int64_t i) const { return data[i]; }
  int64_t ids(int64_t i, const Bags& b) const {
    return b.offsets[(data[i].source + 1) * b.batch] - b.offsets[data[i].source * b.batch];
  }
  // Where each feature's rows begin when one row for each id is written down, and the end of the last.
  std::vector<int64_t> row_starts(const Bags& b) const {
    std::vector<int64_t> starts(size_t(count) + 1, 0);
    for (int64_t i = 0; i < count; ++i) {
      int64_t floats;
      const bool wraps = __builtin_mul_overflow(ids(i, b), data[i].dim, &floats) ||
                         __builtin_add_overflow(starts[size_t(i)], floats, &starts[size_t(i) + 1]);
      STD_TORCH_CHECK(!wraps && starts[size_t(i) + 1] <= (INT64_C(1) << 60), "rowwise: too many rows for one tensor");
    }
    return starts;
  }
};

// Streaming stores write whole cache lines, so every row of the output must begin and end on one.
bool whole_lines(const Features& fs, int64_t columns) {
  bool whole = columns % 16 == 0;
  for (int64_t i = 0; i < fs.count; ++i) whole &= fs[i].dim % 16 == 0 && fs[i].column % 16 == 0;
  return whole;
}

Tensor offsets_of(const Tensor& lengths) {
  const bool wide = lengths.scalar_type() == ScalarType::Long;
  check_tensor(lengths, wide ? ScalarType::Long : ScalarType::Int, "lengths");
  const int64_t n = lengths.numel();
  Tensor out = torch::stable::empty({n + 1}, ScalarType::Long);
  int64_t* o = out.mutable_data_ptr<int64_t>();
  const void* data = lengths.const_data_ptr();
  int64_t sum = 0, bad = -1;
  o[0] = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t length = wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
    if (length < 0 || length > INT64_MAX - sum) {
      bad = i;
      break;
    }
    o[i + 1] = sum += length;
  }
  STD_TORCH_CHECK(bad < 0, "rowwise: length at position ", bad, " is negative");
  return out;
}

Tensor pool(const Tensor& arena, const Tensor& features, const Tensor& values, const Tensor& offsets,
            const std::optional<Tensor>& weights, int64_t batch, int64_t columns) {
  const Bags bags = bags_of(values, offsets, weights, batch);
  STD_TORCH_CHECK(columns >= 0 && batch <= (INT64_C(1) << 60) / std::max<int64_t>(columns, 1),
                  "rowwise: cannot make an output of ", batch, " x ", columns);
  const Features fs(features, arena, offsets, bags, columns);
  Tensor out = empty({batch, columns});
  float* o = out.mutable_data_ptr<float>();
  const char* a = static_cast<const char*>(arena.const_data_ptr());
  const bool stream = batch * columns * 4 >= streamed_bytes && whole_lines(fs, columns);
  Fault fault;
  each_range(
      fs.count, bags_per_task, [&](int64_t) { return batch; },
      [&](int64_t i, int64_t b0, int64_t b1) { kernels().pool(a, fs[i], bags, o, columns, b0, b1, stream, fault); });
  check_ids(fault, values);
  return out;
}

Tensor pool_weight_grad(const Tensor& arena, const Tensor& features, const Tensor& values, const Tensor& offsets,
                        const Tensor& weights, const Tensor& grad, int64_t batch) {
  const Bags bags = bags_of(values, offsets, weights, batch);
  check_tensor(grad, ScalarType::Float, "grad");
  STD_TORCH_CHECK(grad.dim() == 2 && grad.size(0) == batch, "rowwise: grad must be [batch, columns]");
  const Features fs(features, arena, offsets, bags, grad.size(1));
  Tensor out = torch::stable::empty({values.numel()}, ScalarType::Float);
  torch::stable::zero_(out);
  float* o = out.mutable_data_ptr<float>();
  Fault fault;
  each_range(
      fs.count, bags_per_task, [&](int64_t) { return batch; },
      [&](int64_t i, int64_t b0, int64_t b1) {
        if (fs[i].mode != Mode::weighted) return;
        kernels().weight_grad(static_cast<const char*>(arena.const_data_ptr()), fs[i], bags,
                              grad.const_data_ptr<float>(), grad.size(1), b0, b1, o, fault);
      });
  check_ids(fault, values);
  return out;
}

Tensor gather(const Tensor& arena, const Tensor& features, const Tensor& values, const Tensor& offsets, int64_t batch) {
  const Bags bags = bags_of(values, offsets, std::nullopt, batch);
  const Features fs(features, arena, offsets, bags, -1);
  const std::vector<int64_t> first = fs.row_starts(bags);
  Tensor out = empty({first.back()});
  float* o = out.mutable_data_ptr<float>();
  Fault fault;
  each_range(
      fs.count, ids_per_task, [&](int64_t i) { return fs.ids(i, bags); },
      [&](int64_t i, int64_t i0, int64_t i1) {
        const int64_t begin = bags.offsets[fs[i].source * batch];
        kernels().gather(static_cast<const char*>(arena.const_data_ptr()), fs[i], bags,
                         o + first[size_t(i)] + i0 * fs[i].dim, begin + i0, begin + i1, fault);
      });
  check_ids(fault, values);
  return out;
}

void update_rows(Tensor arena, Tensor state, const Tensor& tables, const Tensor& hyper, const Tensor& keys,
                 const Tensor& features, const Tensor& values, const Tensor& offsets,
                 const std::optional<Tensor>& weights, const Tensor& grad, int64_t batch, bool per_id,
                 const std::optional<Tensor>& slot_rows) {
  const Bags bags = bags_of(values, offsets, weights, batch);
  check_tensor(grad, ScalarType::Float, "grad");
  check_tensor(state, ScalarType::Float, "state");
  STD_TORCH_CHECK(per_id ? grad.dim() == 1 : grad.dim() == 2 && grad.size(0) == batch, "rowwise: wrong shape of grad");
  const Features fs(features, arena, offsets, bags, per_id ? -1 : grad.size(1));
  const Table* ts = rows_of<Table>(tables, ScalarType::Long, "tables");
  const Hyper* hs = rows_of<Hyper>(hyper, ScalarType::Float, "hyper");
  check_tensor(keys, ScalarType::Long, "keys");
  STD_TORCH_CHECK(hyper.size(0) == tables.size(0) && keys.dim() == 1 && keys.size(0) == tables.size(0),
                  "rowwise: one row of hyper and one key for each table");
  if (slot_rows) check_tensor(*slot_rows, ScalarType::Long, "slot_rows");
  int64_t next = 0;
  for (int64_t t = 0; t < tables.size(0); ++t) {
    const Table& table = ts[t];
    const OptimizerFacts optimizer = kernels().optimizer(table.rule);
    STD_TORCH_CHECK(optimizer.name, "rowwise: unknown optimizer ", table.rule);
    STD_TORCH_CHECK(table.dim <= INT32_MAX && table.state_base >= 0 &&
                        table.state_width >= optimizer.state_floats(table.dim) &&
                        (!table.state_width || table.rows <= (state.numel() - table.state_base) / table.state_width),
                    "rowwise: state of table ", t, " reaches past the arena");
    STD_TORCH_CHECK(table.slot_rows < 0 || (slot_rows && table.rows <= slot_rows->numel() - table.slot_rows),
                    "rowwise: slots of table ", t, " reach past those that are listed");
    STD_TORCH_CHECK(table.first_feature == next && table.num_features > 0 && table.num_features <= fs.count - next,
                    "rowwise: features are not in table order");
    for (int64_t f = next; f < next + table.num_features; ++f)
      STD_TORCH_CHECK(fs[f].base == table.base && fs[f].rows == table.rows && fs[f].dim == table.dim &&
                          fs[f].type == table.type && fs[f].group == table.group && fs[f].mode == fs[next].mode,
                      "rowwise: feature ", f, " does not match its table");
    STD_TORCH_CHECK(is_updated(table.type), "rowwise: rows of type ", facts_of(table.type).name, " are not updated");
    next += table.num_features;
  }
  STD_TORCH_CHECK(next == fs.count, "rowwise: features without a table");
  if (per_id) {
    STD_TORCH_CHECK(fs.row_starts(bags).back() == grad.numel(), "rowwise: wrong shape of grad");
  }
  if (!fs.count || !batch) return;
  const UpdateCall call{static_cast<char*>(arena.mutable_data_ptr()),
                        state.mutable_data_ptr<float>(),
                        ts,
                        tables.size(0),
                        hs,
                        keys.const_data_ptr<int64_t>(),
                        fs.data,
                        bags,
                        grad.const_data_ptr<float>(),
                        per_id ? 0 : grad.size(1),
                        per_id,
                        slot_rows ? slot_rows->const_data_ptr<int64_t>() : nullptr};
  const BadRow bad = rowwise::update(call, kernels(), {int(torch::stable::get_num_threads()), each_task});
  if (bad.position >= 0) {
    Fault fault;
    fault.at(bad.position);
    check_ids(fault, values);
  }
  STD_TORCH_CHECK(bad.table < 0, "rowwise: the merged gradient of row ", bad.row, " of table ", bad.table,
                  " is not finite");
}

// Sets the byte of each row that is looked up; ids outside their table are skipped, as the update reports them.
void mark(Tensor touched, const Tensor& starts, const Tensor& arena, const Tensor& features, const Tensor& values,
          const Tensor& offsets, int64_t batch) {
  const Bags bags = bags_of(values, offsets, std::nullopt, batch);
  const Features fs(features, arena, offsets, bags, -1);
  check_tensor(touched, ScalarType::Byte, "touched");
  check_tensor(starts, ScalarType::Long, "starts");
  STD_TORCH_CHECK(starts.numel() == fs.count, "rowwise: expected where the rows of each feature start");
  const int64_t* first = starts.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < fs.count; ++i)
    STD_TORCH_CHECK(first[i] >= 0 && first[i] <= touched.numel() - fs[i].rows, "rowwise: rows of feature ", i,
                    " reach past those that can be touched");
  uint8_t* bytes = touched.mutable_data_ptr<uint8_t>();
  each_range(
      fs.count, ids_per_task, [&](int64_t i) { return fs.ids(i, bags); },
      [&](int64_t i, int64_t i0, int64_t i1) {
        const int64_t begin = bags.offsets[fs[i].source * batch];
        with_type(bags.wide_ids, [&](auto id) {
          const auto* ids = static_cast<const decltype(id)*>(bags.values) + begin;
          uint8_t* rows = bytes + first[i];
          for (int64_t k = i0; k < i1; ++k)  // relaxed: threads meet at hot rows, and all write the same
            if (uint64_t(ids[k]) < uint64_t(fs[i].rows)) __atomic_store_n(rows + ids[k], 1, __ATOMIC_RELAXED);
        });
      });
}

double touch(const Tensor& arena, const Tensor& features, const Tensor& values, const Tensor& offsets, int64_t batch) {
  const Bags bags = bags_of(values, offsets, std::nullopt, batch);
  const Features fs(features, arena, offsets, bags, -1);
  std::atomic<int64_t> sum{0};
  each_range(
      fs.count, ids_per_task, [&](int64_t i) { return fs.ids(i, bags); },
      [&](int64_t i, int64_t i0, int64_t i1) {
        const int64_t begin = bags.offsets[fs[i].source * batch];
        sum +=
            kernels().touch(static_cast<const char*>(arena.const_data_ptr()), fs[i], bags, begin + i0, begin + i1) > 0;
      });
  return double(sum.load());
}

void rewrite(Tensor arena, const Tensor& features, const Tensor& values, const Tensor& offsets, int64_t batch) {
  const Bags bags = bags_of(values, offsets, std::nullopt, batch);
  const Features fs(features, arena, offsets, bags, -1);
  char* rows = static_cast<char*>(arena.mutable_data_ptr());
  each_range(
      fs.count, ids_per_task, [&](int64_t i) { return fs.ids(i, bags); },
      [&](int64_t i, int64_t i0, int64_t i1) {
        const int64_t begin = bags.offsets[fs[i].source * batch];
        kernels().rewrite(rows, fs[i], bags, begin + i0, begin + i1);
      });
}

Tensor zeros(int64_t n) {
  STD_TORCH_CHECK(n >= 0 && n <= INT64_MAX / 2, "rowwise: cannot allocate ", n, " bytes");
  void* data = map_zeroed(size_t(n));
  return torch::stable::from_blob(data, {n}, {1}, torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  ScalarType::Byte, [n](void* p) { unmap(p, size_t(n)); });
}

constexpr int64_t rows_per_task = 256;

Tensor pack(const Tensor& rows, int64_t group) {
  check_tensor(rows, ScalarType::Float, "rows");
  STD_TORCH_CHECK(rows.dim() == 2, "rowwise: rows must be [rows, columns]");
  const Format format{RowType::int8, rows.size(1), group};
  check_format(format);
  const int64_t n = rows.size(0), bytes = format.bytes();
  Tensor out = torch::stable::empty({n, bytes}, ScalarType::Byte);
  const float* in = rows.const_data_ptr<float>();
  char* o = static_cast<char*>(out.mutable_data_ptr());
  each_task((n + rows_per_task - 1) / rows_per_task, [&](int64_t i) {
    const int64_t r = i * rows_per_task;
    kernels().pack(format, in + r * format.dim, o + r * bytes, std::min(rows_per_task, n - r));
  });
  return out;
}

Tensor unpack(const Tensor& packed, int64_t dim, int64_t group) {
  const Format format{RowType::int8, dim, group};
  check_format(format);
  check_arena(packed);
  STD_TORCH_CHECK(packed.dim() == 2 && packed.size(1) == format.bytes(), "rowwise: rows of ", dim, " columns take ",
                  format.bytes(), " bytes");
  const int64_t n = packed.size(0), bytes = format.bytes();
  Tensor out = torch::stable::empty({n, dim}, ScalarType::Float);
  const char* in = static_cast<const char*>(packed.const_data_ptr());
  float* o = out.mutable_data_ptr<float>();
  each_task((n + rows_per_task - 1) / rows_per_task, [&](int64_t i) {
    const int64_t r = i * rows_per_task;
    kernels().unpack(format, in + r * bytes, o + r * dim, std::min(rows_per_task, n - r));
  });
  return out;
}

void fill_uniform(Tensor out, int64_t key, int64_t start, double low, double high) {
  check_tensor(out, ScalarType::Float, "out");
  float* o = out.mutable_data_ptr<float>();
  const int64_t n = out.numel(), piece = 1 << 16;
  each_task((n + piece - 1) / piece, [&](int64_t i) {
    kernels().uniform(o + i * piece, std::min(piece, n - i * piece), uint64_t(key), uint64_t(start + i * piece),
                      float(low), float(high) - float(low));
  });
}

// Rows of uniform numbers, each from its own position in the stream of its table.
void fill_uniform_rows(Tensor out, const Tensor& starts, int64_t key, double low, double high) {
  check_tensor(out, ScalarType::Float, "out");
  check_tensor(starts, ScalarType::Long, "starts");
  STD_TORCH_CHECK(out.dim() == 2 && starts.numel() == out.size(0), "rowwise: expected a start for each row of out");
  float* o = out.mutable_data_ptr<float>();
  const int64_t* start = starts.const_data_ptr<int64_t>();
  const int64_t dim = out.size(1), rows = out.size(0), piece = 1024;
  each_task((rows + piece - 1) / piece, [&](int64_t i) {
    for (int64_t row = i * piece; row < std::min(rows, (i + 1) * piece); ++row)
      kernels().uniform(o + row * dim, dim, uint64_t(key), uint64_t(start[row]), float(low), float(high) - float(low));
  });
}

// Names in the order of their numbers, with commas between them.
std::string row_type_list() {
  std::string names;
  for (const RowTypeFacts& type : row_types) names += (names.empty() ? "" : ",") + std::string(type.name);
  return names;
}
std::string optimizer_list() {
  std::string names;
  for (int64_t rule = 0; const char* name = kernels().optimizer(rule).name; ++rule)
    names += (rule ? "," : "") + std::string(name);
  return names;
}

int64_t kept() { return int64_t(kept_bytes()); }

}  // namespace

STABLE_TORCH_LIBRARY(rowwise, m) {
  m.def("offsets(Tensor lengths) -> Tensor");
  m.def(
      "pool(Tensor arena, Tensor features, Tensor values, Tensor offsets, Tensor? weights, int batch, int columns) -> "
      "Tensor");
  m.def(
      "pool_weight_grad(Tensor arena, Tensor features, Tensor values, Tensor offsets, Tensor weights, Tensor grad, int "
      "batch) -> Tensor");
  m.def("gather(Tensor arena, Tensor features, Tensor values, Tensor offsets, int batch) -> Tensor");
  m.def(
      "update(Tensor(a!) arena, Tensor(b!) state, Tensor tables, Tensor hyper, Tensor keys, Tensor features, Tensor "
      "values, Tensor offsets, Tensor? weights, Tensor grad, int batch, bool per_id, Tensor? slot_rows=None) -> ()");
  m.def("fill_uniform(Tensor(a!) out, int key, int start, float low, float high) -> ()");
  m.def("fill_uniform_rows(Tensor(a!) out, Tensor starts, int key, float low, float high) -> ()");
  m.def("pack(Tensor rows, int group) -> Tensor");
  m.def("unpack(Tensor packed, int dim, int group) -> Tensor");
  m.def(
      "mark(Tensor(a!) touched, Tensor starts, Tensor arena, Tensor features, Tensor values, Tensor offsets, int "
      "batch) "
      "-> ()");
  m.def("touch(Tensor arena, Tensor features, Tensor values, Tensor offsets, int batch) -> float");
  m.def("rewrite(Tensor(a!) arena, Tensor features, Tensor values, Tensor offsets, int batch) -> ()");
  m.def("zeros(int n) -> Tensor");
  m.def("row_types() -> str");
  m.def("optimizers() -> str");
  m.def("isa() -> str");
  m.def("limit_isa(str name) -> ()");
  m.def("kept_bytes() -> int");
  m.def("drop_kept() -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rowwise, CPU, m) {
  m.impl("offsets", TORCH_BOX(&offsets_of));
  m.impl("pool", TORCH_BOX(&pool));
  m.impl("pool_weight_grad", TORCH_BOX(&pool_weight_grad));
  m.impl("gather", TORCH_BOX(&gather));
  m.impl("update", TORCH_BOX(&update_rows));
  m.impl("fill_uniform", TORCH_BOX(&fill_uniform));
  m.impl("fill_uniform_rows", TORCH_BOX(&fill_uniform_rows));
  m.impl("pack", TORCH_BOX(&pack));
  m.impl("unpack", TORCH_BOX(&unpack));
  m.impl("mark", TORCH_BOX(&mark));
  m.impl("touch", TORCH_BOX(&touch));
  m.impl("rewrite", TORCH_BOX(&rewrite));
}

STABLE_TORCH_LIBRARY_IMPL(rowwise, CompositeExplicitAutograd, m) {  // no tensor argument to dispatch on
  m.impl("zeros", TORCH_BOX(&zeros));
  m.impl("row_types", TORCH_BOX(&row_type_list));
  m.impl("optimizers", TORCH_BOX(&optimizer_list));
  m.impl("isa", TORCH_BOX(&isa_name));
  m.impl("limit_isa", TORCH_BOX(&limit_isa));
  m.impl("kept_bytes", TORCH_BOX(&kept));
  m.impl("drop_kept", TORCH_BOX(&drop_kept));
}
