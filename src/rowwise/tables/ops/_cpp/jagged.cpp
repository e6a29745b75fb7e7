// Rearranging jagged batches: taking segments of bags (reorder, split, join), routing ids by row ranges, and expanding.
//
// A batch has lengths; the begin of a segment of bags is a sum of them. `Begins` keeps a prefix sum for every 64
// lengths, so that no offset for each bag has to be written and read back. All operators here are bound by memory: they
// touch it once, in order, and on all threads.
#include <numeric>
#include <optional>
#include <tuple>

#include "bind.h"
#include "expand.h"
#include "isa.h"
#include "radix.h"

namespace {

using namespace rowwise;

constexpr int64_t items_per_task = 1 << 15;
constexpr int64_t lengths_per_task = 1 << 17;  // summed faster than threads meet
constexpr int64_t samples_per_task = 1024;
constexpr int64_t counts_at_once = 2048;          // stay in first-level cache
constexpr int64_t most_items = INT64_C(1) << 59;  // their bytes can be counted

class Begins {
 public:
  Begins(const Integers& lengths, int64_t values) : lengths_(lengths), sums_(size_t(lengths.count / step + 2), 0) {
    const int64_t blocks = (lengths.count + step - 1) / step, blocks_per_task = lengths_per_task / step;
    each_task((blocks + blocks_per_task - 1) / blocks_per_task, [&](int64_t task) {
      const int64_t end = std::min(blocks, (task + 1) * blocks_per_task);
      for (int64_t b = task * blocks_per_task; b < end; ++b)
        sums_[size_t(b) + 1] = sum(b * step, std::min(lengths.count, (b + 1) * step));
    });
    bool fits = true;
    for (int64_t b = 0; b < blocks && fits; ++b) {
      fits = sums_[size_t(b) + 1] <= values - sums_[size_t(b)];
      if (fits) sums_[size_t(b) + 1] += sums_[size_t(b)];
    }
    STD_TORCH_CHECK(fits && sums_[size_t(blocks)] == values, "rowwise: lengths do not add up to ", values, " values");
  }
  // The first value of a bag; of the bag after the last, where the values end.
  int64_t operator[](int64_t bag) const { return sums_[size_t(bag / step)] + sum(bag / step * step, bag); }

 private:
  static constexpr int64_t step = 64;

  int64_t sum(int64_t begin, int64_t end) const {
    return lengths_.wide ? sum_of<int64_t>(begin, end) : sum_of<int32_t>(begin, end);
  }
  template <class Length>
  int64_t sum_of(int64_t begin, int64_t end) const {  // INT64_MAX: a length that is negative or past any memory
    const Length* lengths = static_cast<const Length*>(lengths_.data);
    uint64_t total = 0, any = 0;
    for (int64_t i = begin; i < end; ++i) {
      total += uint64_t(int64_t(lengths[i]));
      any |= uint64_t(int64_t(lengths[i]));
    }
    return any >> 56 ? INT64_MAX : int64_t(total);
  }

  Integers lengths_;
  std::vector<int64_t> sums_;
};

const float* weights_of(const Tensor& weights, int64_t values) {
  check_tensor(weights, ScalarType::Float, "weights");
  STD_TORCH_CHECK(weights.numel() == values, "rowwise: ", weights.numel(), " weights for ", values, " values");
  return weights.const_data_ptr<float>();
}

template <class Out, class In>
void copy(Out* out, const In* in, int64_t n, bool stream) {
  if (stream && sizeof(Out) == sizeof(In))
    kernels().stream_copy(out, in, n * int64_t(sizeof(In)));
  else
    std::copy(in, in + n, out);  // one memcpy where the types are the same
}

struct Destination {  // integers of one width, or floats
  void* data;
  bool wide;
  bool stream;

  explicit Destination(Tensor& t)
      : data(t.mutable_data_ptr()),
        wide(t.scalar_type() == ScalarType::Long),
        stream(t.numel() * int64_t(t.element_size()) >= streamed_bytes) {}

  // Integers of either width, to those of a width that holds them.
  void put(int64_t at, const Integers& in, int64_t from, int64_t n) const {
    with_type(in.wide, [&](auto zero) {
      const auto* source = static_cast<const decltype(zero)*>(in.data) + from;
      wide ? copy(static_cast<int64_t*>(data) + at, source, n, stream)
           : copy(static_cast<int32_t*>(data) + at, source, n, stream);
    });
  }
  void put(int64_t at, const float* in, int64_t n) const { copy(static_cast<float*>(data) + at, in, n, stream); }
};

struct Source {  // one of the batches that bags are taken from
  Integers values, lengths;
  const float* weights;
  Begins begins;
};

struct Segment {  // a row of the tensor `segments`
  int64_t source, first_bag, bags;
};

struct Copy {  // where a segment's values and bags go, and where they come from
  int64_t value, bag, from;
};

std::vector<Source> sources_of(const std::vector<Tensor>& values, const std::vector<Tensor>& lengths,
                               const std::vector<Tensor>& weights) {
  const size_t n = values.size();
  STD_TORCH_CHECK(n && lengths.size() == n && (weights.empty() || weights.size() == n), "rowwise: ", n,
                  " tensors of values, ", lengths.size(), " of lengths and ", weights.size(), " of weights");
  std::vector<Source> sources;
  for (size_t i = 0; i < n; ++i) {
    const Integers v(values[i], "values"), l(lengths[i], "lengths");
    sources.push_back({v, l, weights.empty() ? nullptr : weights_of(weights[i], v.count), Begins(l, v.count)});
  }
  return sources;
}

// Where each segment goes, and at the end the sizes of everything.
std::vector<Copy> lay_out(const std::vector<Source>& sources, const Segment* segments, int64_t count) {
  std::vector<Copy> copies(size_t(count) + 1, {0, 0, 0});
  for (int64_t i = 0; i < count; ++i) {
    const Segment& from = segments[i];
    STD_TORCH_CHECK(from.source >= 0 && from.source < int64_t(sources.size()), "rowwise: no batch ", from.source);
    const Source& source = sources[size_t(from.source)];
    STD_TORCH_CHECK(from.first_bag >= 0 && from.bags >= 0 && from.first_bag <= source.lengths.count &&
                        from.bags <= source.lengths.count - from.first_bag,
                    "rowwise: segment ", i, " reaches past the ", source.lengths.count, " bags of its batch");
    Copy &copy = copies[size_t(i)], &next = copies[size_t(i) + 1];
    copy.from = source.begins[from.first_bag];
    next.value = copy.value + source.begins[from.first_bag + from.bags] - copy.from;
    next.bag = copy.bag + from.bags;
    STD_TORCH_CHECK(next.value <= most_items && next.bag <= most_items, "rowwise: too many ids for one tensor");
  }
  return copies;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> take(const std::vector<Tensor>& values, const std::vector<Tensor>& lengths,
                                                const std::vector<Tensor>& weights, const Tensor& segments) {
  const std::vector<Source> sources = sources_of(values, lengths, weights);
  check_tensor(segments, ScalarType::Long, "segments");
  STD_TORCH_CHECK(segments.dim() == 2 && segments.size(1) == 3, "rowwise: segments must be [n, 3]");
  const Segment* rows = static_cast<const Segment*>(segments.const_data_ptr());
  const int64_t count = segments.size(0);
  const std::vector<Copy> copies = lay_out(sources, rows, count);
  bool wide = false, wide_lengths = false;
  for (const Source& s : sources) wide |= s.values.wide, wide_lengths |= s.lengths.wide;

  Tensor out = empty({copies.back().value}, wide ? ScalarType::Long : ScalarType::Int);
  Tensor out_lengths = empty({copies.back().bag}, wide_lengths ? ScalarType::Long : ScalarType::Int);
  Tensor out_weights = empty({weights.empty() ? 0 : copies.back().value});
  Tensor starts = torch::stable::empty({count + 1}, ScalarType::Long);
  const Destination v(out), l(out_lengths), w(out_weights);
  for (int64_t i = 0; i <= count; ++i) starts.mutable_data_ptr<int64_t>()[i] = copies[size_t(i)].value;
  const auto copy_values = [&](int64_t i, int64_t begin, int64_t end) {
    const Source& source = sources[size_t(rows[i].source)];
    const Copy& c = copies[size_t(i)];
    v.put(c.value + begin, source.values, c.from + begin, end - begin);
    if (source.weights) w.put(c.value + begin, source.weights + c.from + begin, end - begin);
  };
  const auto copy_lengths = [&](int64_t i, int64_t begin, int64_t end) {
    l.put(copies[size_t(i)].bag + begin, sources[size_t(rows[i].source)].lengths, rows[i].first_bag + begin,
          end - begin);
  };
  // First the values of all segments, then the lengths, without a meeting of the threads between the two.
  each_range(
      2 * count, items_per_task,
      [&](int64_t i) {
        return i < count ? copies[size_t(i) + 1].value - copies[size_t(i)].value : rows[i - count].bags;
      },
      [&](int64_t i, int64_t begin, int64_t end) {
        i < count ? copy_values(i, begin, end) : copy_lengths(i - count, begin, end);
      });
  return {out, out_lengths, out_weights, starts};
}

// The row ranges of one feature, prepared for finding the one that an id is in.
class Router {
 public:
  Router(const int64_t* bounds, int64_t buckets) {
    int64_t size = 1;
    while (size < buckets) size *= 2;
    padded_.assign(size_t(size), INT64_MAX);
    std::copy(bounds + 1, bounds + buckets, padded_.begin());
    ranges_ = {bounds, buckets, padded_.data(), size / 2, 0, 0};
    if (even(bounds, buckets)) prepare_division(uint64_t(bounds[1]));
  }

  // buckets[i] for ids from .. from + n; the place of the first id outside the table, or n.
  int64_t route(const Integers& ids, int64_t from, int64_t n, uint16_t* buckets) const {
    const char* first = static_cast<const char*>(ids.data) + from * (ids.wide ? 8 : 4);
    if (kernels().route(first, ids.wide, n, ranges_, buckets)) return n;
    int64_t i = 0;
    while (uint64_t(ids[from + i]) < uint64_t(ranges_.bounds[ranges_.buckets])) ++i;
    return i;
  }

 private:
  // Whether every range has the size of the first, as row-wise sharding cuts them; the table's end may cut some short.
  static bool even(const int64_t* bounds, int64_t buckets) {
    const int64_t size = bounds[1], rows = bounds[buckets];
    if (size < 2) return false;
    for (int64_t k = 1; k <= buckets; ++k)
      if (bounds[k] != (k > rows / size ? rows : k * size)) return false;
    return true;
  }

  // id / size for every id < 2^63 as a multiplication by 2^(63 + bits) / size rounded up, which has 64 bits, where
  // 2^bits >= size (Granlund and Montgomery).
  void prepare_division(uint64_t size) {
    const int bits = bits_of(size - 1);
    const unsigned __int128 power = (unsigned __int128)(1) << (63 + bits);
    ranges_.multiplier = uint64_t((power + size - 1) / size);
    ranges_.shift = bits - 1;
  }

  std::vector<int64_t> padded_;
  Ranges ranges_;
};

struct BucketsCall {
  Integers values, lengths;
  const float* weights;  // nullptr: none
  int64_t features, buckets;
  const int64_t* bounds;  // [features][buckets + 1]
};

// Two passes over ranges of samples of one feature: count the ids of each bucket and bag, then place them. Ranges
// are walked in order and ids of a range keep theirs, so the result does not depend on their distribution to threads.
class Bucketize {
 public:
  explicit Bucketize(const BucketsCall& call)
      : c_(call), batch_(call.lengths.count / call.features), begins_(call.lengths, call.values.count) {
    for (int64_t f = 0; f < c_.features; ++f) routers_.emplace_back(c_.bounds + f * (c_.buckets + 1), c_.buckets);
    for (int64_t f = 0; f < c_.features; ++f)
      for (int64_t b = 0; b < batch_; b += samples_per_task)
        ranges_.push_back({f, b, std::min(batch_, b + samples_per_task), begins_[f * batch_ + b], 0});
    for (Range& r : ranges_) r.value_end = begins_[r.feature * batch_ + r.last_sample];
    next_.assign(ranges_.size() * size_t(c_.buckets), 0);
    routes_ = reinterpret_cast<uint16_t*>(route_memory_.at_least(size_t(c_.values.count) * 2));
  }

  void count(Tensor& lengths) {
    with_type(c_.lengths.wide, [&](auto zero) {
      using Length = decltype(zero);
      Length* const out = static_cast<Length*>(lengths.mutable_data_ptr());
      each_task(int64_t(ranges_.size()), [&](int64_t task) {
        if (route(ranges_[size_t(task)])) count_range(task, out);
      });
    });
    STD_TORCH_CHECK(!fault_.found(), "rowwise: id ", c_.values[fault_.position.load()], " at position ",
                    fault_.position.load(), " is outside its table");
  }

  // Where each bucket's values begin, and in `next_` where each range writes in each bucket.
  void lay_out(int64_t* starts) {
    int64_t at = 0;
    for (int64_t w = 0; w < c_.buckets; ++w) {
      starts[w] = at;
      for (size_t r = 0; r < ranges_.size(); ++r) at += std::exchange(next_[r * size_t(c_.buckets) + size_t(w)], at);
    }
    starts[c_.buckets] = at;
  }

  void place(Tensor& values, int64_t* positions, float* weights) {
    with_type(c_.values.wide, [&](auto zero) {
      using Id = decltype(zero);
      Id* const out = static_cast<Id*>(values.mutable_data_ptr());
      each_task(int64_t(ranges_.size()), [&](int64_t task) { place_range(task, out, positions, weights); });
    });
  }

 private:
  struct Range {
    int64_t feature, first_sample, last_sample;
    int64_t value_begin, value_end;
  };

  bool route(const Range& r) {
    const int64_t n = r.value_end - r.value_begin;
    const int64_t good = routers_[size_t(r.feature)].route(c_.values, r.value_begin, n, routes_ + r.value_begin);
    if (good < n) fault_.at(r.value_begin + good);
    return good == n;
  }

  // Counts of a few bags at a time are kept in a local buffer before they are written to their buckets, as the buckets
  // of a bag are often a power of two apart, which caches map to the same lines.
  template <class Length>
  void count_range(int64_t task, Length* out) {
    const Range& r = ranges_[size_t(task)];
    const int64_t buckets = c_.buckets, at_once = std::max<int64_t>(counts_at_once / buckets, 8);
    std::vector<Length> counts(size_t(at_once * buckets));  // [bucket][bag]
    int64_t* const totals = next_.data() + task * buckets;
    const uint16_t* route = routes_ + r.value_begin;
    for (int64_t b = r.first_sample; b < r.last_sample; b += at_once) {
      const int64_t bags = std::min(at_once, r.last_sample - b), first = r.feature * batch_ + b;
      const Length* const lengths = static_cast<const Length*>(c_.lengths.data) + first;
      std::fill(counts.begin(), counts.end(), Length(0));
      for (int64_t k = 0; k < bags; ++k)
        for (const uint16_t* end = route + lengths[k]; route < end; ++route) ++counts[size_t(*route * at_once + k)];
      for (int64_t w = 0; w < buckets; ++w) {
        const Length* const mine = counts.data() + w * at_once;
        std::copy(mine, mine + bags, out + w * c_.lengths.count + first);
        totals[w] = std::accumulate(mine, mine + bags, totals[w]);
      }
    }
  }

  template <class Id>
  void place_range(int64_t task, Id* values, int64_t* positions, float* weights) {
    const Range& r = ranges_[size_t(task)];
    const Id* const ids = static_cast<const Id*>(c_.values.data);
    const int64_t* const bounds = c_.bounds + r.feature * (c_.buckets + 1);
    const uint16_t* const routes = routes_;
    const float* const in = c_.weights;
    int64_t* const next = next_.data() + task * c_.buckets;
    for (int64_t i = r.value_begin; i < r.value_end; ++i) {
      const int64_t bucket = routes[i], at = next[bucket]++;
      values[at] = Id(int64_t(ids[i]) - bounds[bucket]);
      positions[at] = i;
      if (in) weights[at] = in[i];
    }
  }

  const BucketsCall& c_;
  int64_t batch_;
  Begins begins_;
  std::vector<Router> routers_;
  std::vector<Range> ranges_;
  std::vector<int64_t> next_;  // [range][bucket]
  Scratch route_memory_;
  uint16_t* routes_;  // the bucket of each value
  Fault fault_;
};

const int64_t* bounds_of(const Tensor& bounds) {
  check_tensor(bounds, ScalarType::Long, "bounds");
  STD_TORCH_CHECK(bounds.dim() == 2 && bounds.size(0) > 0 && bounds.size(1) >= 2 && bounds.size(1) <= 65536,
                  "rowwise: bounds must be [features, buckets + 1], with 1 to 65535 buckets");
  const int64_t* at = bounds.const_data_ptr<int64_t>();
  const int64_t n = bounds.size(1);
  for (int64_t f = 0; f < bounds.size(0); ++f)
    STD_TORCH_CHECK(at[f * n] == 0 && std::is_sorted(at + f * n, at + (f + 1) * n), "rowwise: bounds of feature ", f,
                    " do not ascend from 0");
  return at;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> bucketize(const Tensor& values, const Tensor& lengths,
                                                             const std::optional<Tensor>& weights,
                                                             const Tensor& bounds) {
  const int64_t* ranges = bounds_of(bounds);
  const Integers ids(values, "values"), bags(lengths, "lengths");
  const BucketsCall call{
      ids, bags, weights ? weights_of(*weights, ids.count) : nullptr, bounds.size(0), bounds.size(1) - 1, ranges};
  STD_TORCH_CHECK(bags.count % call.features == 0, "rowwise: ", bags.count, " bags do not divide among ", call.features,
                  " features");
  STD_TORCH_CHECK(bags.count <= most_items / call.buckets, "rowwise: too many bags for one tensor");
  Bucketize work(call);
  Tensor out_lengths = empty({call.buckets * bags.count}, bags.type());
  work.count(out_lengths);
  Tensor starts = torch::stable::empty({call.buckets + 1}, ScalarType::Long);
  work.lay_out(starts.mutable_data_ptr<int64_t>());
  Tensor out = empty({ids.count}, ids.type());
  Tensor positions = empty({ids.count}, ScalarType::Long);
  Tensor out_weights = empty({weights ? ids.count : 0});
  work.place(out, positions.mutable_data_ptr<int64_t>(), out_weights.mutable_data_ptr<float>());
  return {out, out_lengths, out_weights, positions, starts};
}

// Whether every id is in 0..rows-1; `limits`: pairs of a feature of the batch and the rows of its table.
bool in_range(const Tensor& values, const Tensor& lengths, const Tensor& limits, int64_t batch) {
  const Integers ids(values, "values");
  const Begins begins(Integers(lengths, "lengths"), ids.count);
  check_tensor(limits, ScalarType::Long, "limits");
  const int64_t* pairs = limits.const_data_ptr<int64_t>();
  std::atomic<bool> good{true};
  for (int64_t i = 0; i < limits.numel(); i += 2)
    STD_TORCH_CHECK(batch >= 0 && pairs[i] >= 0 && (pairs[i] + 1) * batch <= lengths.numel(), "rowwise: no feature ",
                    pairs[i]);
  const auto first = [&](int64_t i) { return begins[pairs[2 * i] * batch]; };
  each_range(
      limits.numel() / 2, items_per_task, [&](int64_t i) { return begins[(pairs[2 * i] + 1) * batch] - first(i); },
      [&](int64_t i, int64_t begin, int64_t end) {
        with_type(ids.wide, [&](auto zero) {
          const auto* at = static_cast<const decltype(zero)*>(ids.data) + first(i);
          bool outside = false;
          for (int64_t k = begin; k < end; ++k) outside |= uint64_t(int64_t(at[k])) >= uint64_t(pairs[2 * i + 1]);
          if (outside) good = false;
        });
      });
  return good;
}

struct NewerFeature {                 // a row of the tensor `features`
  int64_t source, rows, first, last;  // of the batch; of its table; its ids among `ids`
};

// The ids of a batch, with their places instead of those among `ids`; see `newer.py`. The ids of each table
// ascend. Features without a table keep their ids.
Tensor find_newer(const Tensor& values, const Tensor& offsets, const Tensor& features, const Tensor& ids,
                  const Tensor& places, int64_t batch) {
  const Integers in(values, "values"), bounds(offsets, "offsets");
  for (const Tensor* t : {&features, &ids, &places}) check_tensor(*t, ScalarType::Long, "features, ids and places");
  STD_TORCH_CHECK(batch >= 0 && ids.numel() == places.numel() && features.numel() % 4 == 0, "rowwise: wrong sizes");
  const auto* rows = reinterpret_cast<const NewerFeature*>(features.const_data_ptr<int64_t>());
  const int64_t count = features.numel() / 4;
  const auto begin_of = [&](int64_t source) { return bounds[source * batch]; };
  for (int64_t i = 0; i < count; ++i) {
    const auto& [source, limit, first, last] = rows[i];
    STD_TORCH_CHECK(source >= 0 && (source + 1) * batch < bounds.count && begin_of(source) >= 0 &&
                        begin_of(source) <= begin_of(source + 1) && begin_of(source + 1) <= in.count,
                    "rowwise: no feature ", source);
    STD_TORCH_CHECK(first >= 0 && first <= last && last <= ids.numel(), "rowwise: no ids of feature ", source);
  }
  Tensor out = empty({in.count}, ScalarType::Long);
  int64_t* const to = out.mutable_data_ptr<int64_t>();
  with_type(in.wide, [&](auto zero) {
    const auto* from = static_cast<const decltype(zero)*>(in.data);
    std::copy(from, from + in.count, to);
  });
  std::atomic<bool> good{true};
  const int64_t* const known = ids.const_data_ptr<int64_t>();
  const int64_t* const place = places.const_data_ptr<int64_t>();
  each_range(
      count, items_per_task, [&](int64_t i) { return begin_of(rows[i].source + 1) - begin_of(rows[i].source); },
      [&](int64_t i, int64_t begin, int64_t end) {
        const NewerFeature& f = rows[i];
        int64_t* const at = to + begin_of(f.source);
        for (int64_t k = begin; k < end; ++k) {
          if (uint64_t(at[k]) >= uint64_t(f.rows)) good = false;
          const int64_t* found = std::lower_bound(known + f.first, known + f.last, at[k]);
          if (found != known + f.last && *found == at[k]) at[k] = place[found - known];
        }
      });
  STD_TORCH_CHECK(good, "rowwise: an id is outside its table");
  return out;
}

Tensor lengths_of(const Tensor& offsets) {
  const Integers o(offsets, "offsets");
  STD_TORCH_CHECK(o.count > 0 && o[0] == 0, "rowwise: offsets must begin with 0");
  Tensor out = empty({o.count - 1}, ScalarType::Long);
  int64_t* lengths = out.mutable_data_ptr<int64_t>();
  int64_t bad = -1;
  with_type(o.wide, [&](auto zero) {
    const auto* at = static_cast<const decltype(zero)*>(o.data);
    for (int64_t i = 0; i < o.count - 1 && bad < 0; ++i) {
      if (at[i + 1] < at[i]) bad = i + 1;
      lengths[i] = int64_t(uint64_t(at[i + 1]) - uint64_t(at[i]));
    }
  });
  STD_TORCH_CHECK(bad < 0, "rowwise: offset at position ", bad, " is less than the one before");
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rowwise, m) {
  m.def("lengths(Tensor offsets) -> Tensor");
  m.def("in_range(Tensor values, Tensor lengths, Tensor limits, int batch) -> bool");
  m.def("find_newer(Tensor values, Tensor offsets, Tensor features, Tensor ids, Tensor places, int batch) -> Tensor");
  m.def(
      "take(Tensor[] values, Tensor[] lengths, Tensor[] weights, Tensor segments) -> (Tensor values, Tensor lengths, "
      "Tensor weights, Tensor starts)");
  m.def(
      "bucketize(Tensor values, Tensor lengths, Tensor? weights, Tensor bounds) -> (Tensor values, Tensor lengths, "
      "Tensor weights, Tensor positions, Tensor starts)");
  m.def(
      "expand(Tensor[] values, Tensor[] lengths, Tensor[] weights, Tensor[] samples, Tensor places, bool narrow) -> "
      "(Tensor values, Tensor lengths, Tensor weights)");
  m.def("spread(Tensor(a!) out, Tensor vectors, Tensor? samples, Tensor segments) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rowwise, CPU, m) {
  m.impl("lengths", TORCH_BOX(&lengths_of));
  m.impl("in_range", TORCH_BOX(&in_range));
  m.impl("find_newer", TORCH_BOX(&find_newer));
  m.impl("take", TORCH_BOX(&take));
  m.impl("bucketize", TORCH_BOX(&bucketize));
  m.impl("expand", TORCH_BOX(&expand));
  m.impl("spread", TORCH_BOX(&spread));
}
