// Groups by row without memory of the size of a table: the contributions to a table become (row, contribution) words,
// radix-sorted in cache; equal neighbours are one row. The rows of a bucket are then visited in ascending order.
//
// A table is the task of one thread, from counting to applying, so its words and gradients stay in that core's
// cache. A table with more than its share of the contributions is worked on by all threads instead: chunks of
// samples are counted and placed into buckets of rows, then the buckets are sorted and applied. Chunks are in
// sample order and every step is stable, so the order inside a row, and with it every bit of the result, does
// not depend on the number of threads. See [Note: Merge order] in tables.h.
#include "update.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "memory.h"
#include "radix.h"

namespace rowwise {
namespace {

constexpr int64_t bucket_entries = 1 << 16;  // sort in second-level cache
constexpr int64_t shared_entries = 1 << 16;  // smaller tables do not pay for a barrier of the threads
constexpr int64_t near_bytes = 3 << 18;      // gradients of a table that stay in second-level cache
constexpr int max_bucket_bits = 10;
constexpr int64_t samples_ahead = 8;  // gradients of a sample lie further apart than processors look ahead

int bits_for(uint64_t count) { return bits_of(count - 1); }  // bits that hold 0 .. count - 1

// The bucket of a row, of 2^bits: rows in use are often neighbours, so their low bits are spread.
inline uint64_t bucket_of(uint64_t row, int bits) { return (row * 0x9E3779B97F4A7C15ull) >> 1 >> (63 - bits); }

struct Work {  // one table
  int64_t table;
  int64_t num_entries;
  int64_t features, first_feature;
  int key_bits, payload_bits;
  int bucket_bits, digit_bits;  // placed by bucket, or, in a table of one bucket, by lowest digit
  bool compact;                 // gradients are copied side by side (and scaled) first
  int64_t num_chunks, samples_per_chunk;
  uint64_t* entries;
  float* gradients;
  int64_t* place;
  float* scale;
  int32_t* sample;
  std::vector<int64_t> counts;  // [chunk][slot], then where each chunk writes next
  std::vector<int64_t> slot_starts;

  int64_t slots() const { return int64_t(1) << (bucket_bits + digit_bits); }
  int64_t buckets() const { return int64_t(1) << bucket_bits; }
  int64_t bucket_start(int64_t bucket) const { return digit_bits ? bucket * num_entries : slot_starts[size_t(bucket)]; }
};

struct Slots {  // where the entry of a row is placed first
  int bucket_bits, payload_bits;
  uint64_t digit_mask;
  explicit Slots(const Work& w)
      : bucket_bits(w.bucket_bits), payload_bits(w.payload_bits), digit_mask((uint64_t(1) << w.digit_bits) - 1) {}
  uint64_t of(uint64_t row) const { return digit_mask ? row & digit_mask : bucket_of(row, bucket_bits); }
  uint64_t entry(uint64_t row, int64_t payload) const { return row << payload_bits | uint64_t(payload); }
};

struct ThreadScratch {
  Scratch table, bucket;
};

class Update {
 public:
  Update(const UpdateCall& u, const Kernels& k, const Parallel& p)
      : u_(u), kernels_(k), parallel_(p), scratch_(size_t(p.threads)) {}

  BadRow run() {
    if (u_.per_id) find_gradients();
    std::vector<Work> works = prepare();
    std::stable_sort(works.begin(), works.end(),
                     [](const Work& a, const Work& b) { return a.num_entries > b.num_entries; });
    int64_t total = 0, shared = 0;
    for (const Work& w : works) total += w.num_entries;
    while (shared < int64_t(works.size()) && is_shared(works[size_t(shared)], total))
      update_together(works[size_t(shared++)]);
    // The lookup has checked the ids, so only one that was changed in place since then is bad. The tables updated
    // before it is met stay updated; which these are depends on the threads.
    const int64_t left = int64_t(works.size()) - shared;
    std::atomic<int64_t> next{shared};
    parallel_.each(std::min<int64_t>(parallel_.threads, left), [&](int64_t thread) {
      for (int64_t i; (i = next.fetch_add(1)) < int64_t(works.size());)
        if (!fault_.found()) update_alone(works[size_t(i)], scratch_[size_t(thread)]);
    });
    if (fault_.found()) bad_.position = fault_.position.load();
    return bad_;
  }

 private:
  bool listed(const Work& w) const { return u_.per_id || u_.features[w.first_feature].mode == Mode::weighted; }

  int64_t bytes_of(const Work& w) const {
    const int64_t dim = u_.tables[w.table].dim;
    int64_t bytes = w.num_entries * 8 + 64 * 5;
    if (w.compact) bytes += u_.bags.batch * w.features * dim * 4;
    if (listed(w)) bytes += w.num_entries * 16;
    return bytes;
  }

  int64_t offset(int64_t feature, int64_t sample) const {
    return u_.bags.offsets[u_.features[feature].source * u_.bags.batch + sample];
  }

  std::vector<Work> prepare() const {
    std::vector<Work> works;
    for (int64_t t = 0; t < u_.num_tables; ++t) {
      const Table& table = u_.tables[t];
      Work w{};
      w.table = t;
      w.first_feature = table.first_feature;
      w.features = table.num_features;
      for (int64_t f = 0; f < w.features; ++f)
        w.num_entries += offset(w.first_feature + f, u_.bags.batch) - offset(w.first_feature + f, 0);
      if (!w.num_entries) continue;
      w.key_bits = std::max(1, bits_for(uint64_t(table.rows)));
      w.payload_bits = bits_for(uint64_t(listed(w) ? w.num_entries : u_.bags.batch * w.features));
      w.bucket_bits =
          std::min(bits_for(uint64_t((w.num_entries + bucket_entries - 1) / bucket_entries)), max_bucket_bits);
      if (!w.bucket_bits) w.digit_bits = std::min(w.key_bits, digit_width(w.num_entries));
      if (w.key_bits + w.payload_bits > 64)
        throw std::length_error("rowwise: too many ids in one update; split the batch");
      const bool scaled = u_.features[w.first_feature].mode == Mode::mean;
      w.compact = !listed(w) && (w.features > 1 || scaled || w.num_entries >= 4 * u_.bags.batch);
      works.push_back(std::move(w));
    }
    return works;
  }

  void find_gradients() {
    int64_t at = 0;
    const Table& last = u_.tables[u_.num_tables - 1];
    for (int64_t f = 0; f < last.first_feature + last.num_features; ++f) {
      first_gradient_.push_back(at);
      at += (offset(f, u_.bags.batch) - offset(f, 0)) * u_.features[f].dim;
    }
  }

  bool is_shared(const Work& w, int64_t total) const {
    return parallel_.threads > 1 && w.num_entries >= shared_entries && w.num_entries * 2 * parallel_.threads > total;
  }

  void update_alone(Work& w, ThreadScratch& scratch) {
    carve(w, scratch.table.at_least(size_t(bytes_of(w))));
    split(w, 1);
    count(w, 0);
    if (fault_.found()) return;
    lay_out(w);
    scatter(w, 0);
    for (int64_t b = 0; b < w.buckets(); ++b) apply_bucket(w, b, scratch);
  }

  void update_together(Work& w) {
    carve(w, shared_scratch_.at_least(size_t(bytes_of(w))));
    split(w, 4 * parallel_.threads);
    parallel_.each(w.num_chunks, [&](int64_t chunk) { count(w, chunk); });
    if (fault_.found()) return;
    lay_out(w);
    parallel_.each(w.num_chunks, [&](int64_t chunk) { scatter(w, chunk); });
    std::atomic<int64_t> next{0};
    parallel_.each(parallel_.threads, [&](int64_t thread) {
      for (int64_t b; (b = next.fetch_add(1)) < w.buckets();) apply_bucket(w, b, scratch_[size_t(thread)]);
    });
  }

  void carve(Work& w, char* at) const {
    auto take = [&](int64_t bytes) {
      char* mine = at;
      at += (bytes + 63) / 64 * 64;
      return mine;
    };
    w.entries = reinterpret_cast<uint64_t*>(take(w.num_entries * 8));
    if (w.compact)
      w.gradients = reinterpret_cast<float*>(take(u_.bags.batch * w.features * u_.tables[w.table].dim * 4));
    if (listed(w)) {
      w.place = reinterpret_cast<int64_t*>(take(w.num_entries * 8));
      w.scale = reinterpret_cast<float*>(take(w.num_entries * 4));
      w.sample = reinterpret_cast<int32_t*>(take(w.num_entries * 4));
    }
  }

  void split(Work& w, int64_t chunks) const {  // into ranges of samples
    w.samples_per_chunk = (u_.bags.batch + chunks - 1) / chunks;
    w.num_chunks = (u_.bags.batch + w.samples_per_chunk - 1) / w.samples_per_chunk;
    w.counts.assign(size_t(w.num_chunks * (w.slots() + 1)), 0);
  }

  // f(feature, sample, first id, last id), samples ascending, the features of the table inside each.
  template <class F>
  void each_bag(const Work& w, int64_t chunk, F f) const {
    const int64_t b0 = chunk * w.samples_per_chunk, b1 = std::min(u_.bags.batch, b0 + w.samples_per_chunk);
    if (w.features == 1) {
      const int64_t* offsets = u_.bags.offsets + u_.features[w.first_feature].source * u_.bags.batch;
      for (int64_t b = b0; b < b1; ++b) f(0, b, offsets[b], offsets[b + 1]);
      return;
    }
    for (int64_t b = b0; b < b1; ++b)
      for (int64_t k = 0; k < w.features; ++k)
        f(k, b, offset(w.first_feature + k, b), offset(w.first_feature + k, b + 1));
  }

  void count(Work& w, int64_t chunk) { u_.bags.wide_ids ? count_ids<int64_t>(w, chunk) : count_ids<int32_t>(w, chunk); }

  template <class Id>
  void count_ids(Work& w, int64_t chunk) {
    const Id* ids = static_cast<const Id*>(u_.bags.values);
    const uint64_t rows = uint64_t(u_.tables[w.table].rows);
    const Slots slots(w);
    int64_t* counts = w.counts.data() + chunk * (w.slots() + 1);
    const int64_t b0 = chunk * w.samples_per_chunk, b1 = std::min(u_.bags.batch, b0 + w.samples_per_chunk);
    int64_t total = 0;
    for (int64_t k = 0; k < w.features; ++k) {
      const int64_t begin = offset(w.first_feature + k, b0), end = offset(w.first_feature + k, b1);
      total += end - begin;
      for (int64_t i = begin; i < end; ++i) {
        const uint64_t id = uint64_t(int64_t(ids[i]));
        if (__builtin_expect(id >= rows, 0)) {
          fault_.at(i);
          continue;
        }
        ++counts[slots.of(id)];
      }
    }
    counts[w.slots()] = total;
  }

  void lay_out(Work& w) const {
    w.slot_starts.resize(size_t(w.slots()) + 1);
    int64_t at = 0;
    for (int64_t b = 0; b < w.slots(); ++b) {
      w.slot_starts[size_t(b)] = at;
      for (int64_t c = 0; c < w.num_chunks; ++c) {
        int64_t& n = w.counts[size_t(c * (w.slots() + 1) + b)];
        const int64_t mine = n;
        n = at;
        at += mine;
      }
    }
    w.slot_starts[size_t(w.slots())] = at;
    at = 0;  // where the listed contributions of a chunk begin
    for (int64_t c = 0; c < w.num_chunks; ++c) {
      int64_t& n = w.counts[size_t((c + 1) * (w.slots() + 1) - 1)];
      const int64_t mine = n;
      n = at;
      at += mine;
    }
  }

  void scatter(Work& w, int64_t chunk) {
    if (listed(w))
      u_.bags.wide_ids ? scatter_listed<int64_t>(w, chunk) : scatter_listed<int32_t>(w, chunk);
    else
      u_.bags.wide_ids ? scatter_plain<int64_t>(w, chunk) : scatter_plain<int32_t>(w, chunk);
  }

  template <class Id>
  void scatter_plain(Work& w, int64_t chunk) {
    const Id* ids = static_cast<const Id*>(u_.bags.values);
    const Feature* features = u_.features + w.first_feature;
    const bool mean = features->mode == Mode::mean;
    const int64_t num_features = w.features, dim = features->dim;
    const Slots slots(w);
    uint64_t* const entries = w.entries;
    int64_t* const next = w.counts.data() + chunk * (w.slots() + 1);
    float* const copies = w.compact ? w.gradients : nullptr;
    each_bag(w, chunk, [&](int64_t k, int64_t b, int64_t begin, int64_t end) {
      const int64_t payload = b * num_features + k;
      for (int64_t i = begin; i < end; ++i) {
        const uint64_t row = uint64_t(int64_t(ids[i]));
        entries[next[slots.of(row)]++] = slots.entry(row, payload);
      }
      if (!copies || begin == end) return;
      const float* grad = u_.grad + b * u_.grad_stride + features[k].column;
      if (b + samples_ahead < u_.bags.batch)
        for (int64_t c = 0; c < dim; c += 16) __builtin_prefetch(grad + samples_ahead * u_.grad_stride + c);
      float* copy = copies + payload * dim;
      std::memcpy(copy, grad, size_t(dim) * 4);
      if (!mean) return;
      const float inverse = 1.0f / float(end - begin);
      for (int64_t c = 0; c < dim; ++c) copy[c] *= inverse;
    });
  }

  template <class Id>
  void scatter_listed(Work& w, int64_t chunk) {
    const Id* ids = static_cast<const Id*>(u_.bags.values);
    const Slots slots(w);
    int64_t* const next = w.counts.data() + chunk * (w.slots() + 1);
    int64_t at = next[w.slots()];
    each_bag(w, chunk, [&](int64_t k, int64_t b, int64_t begin, int64_t end) {
      const int64_t f = w.first_feature + k;
      const Feature& feature = u_.features[f];
      const float inverse = feature.mode == Mode::mean && begin < end ? 1.0f / float(end - begin) : 1.0f;
      for (int64_t i = begin; i < end; ++i, ++at) {
        w.place[at] = u_.per_id ? first_gradient_[size_t(f)] + (i - offset(f, 0)) * feature.dim
                                : b * u_.grad_stride + feature.column;
        w.scale[at] = u_.per_id ? 1.0f : feature.mode == Mode::weighted ? u_.bags.weights[i] : inverse;
        w.sample[at] = int32_t(b);
        const uint64_t row = uint64_t(int64_t(ids[i]));
        w.entries[next[slots.of(row)]++] = slots.entry(row, at);
      }
    });
  }

  void apply_bucket(const Work& w, int64_t bucket, ThreadScratch& scratch) {
    const int64_t begin = w.bucket_start(bucket), n = w.bucket_start(bucket + 1) - begin;
    if (!n) return;
    const Table& table = u_.tables[w.table];
    const int64_t row_floats = (table.dim + 15) / 16 * 16;
    char* at =
        scratch.bucket.at_least(size_t(n * 16 + 16 + row_floats * 4 * 2 * batch_rows + tree_levels * tree_row * 4));
    float* tree = reinterpret_cast<float*>(at);
    float* merged = tree + tree_levels * tree_row;
    float* floats = merged + row_floats * batch_rows;
    uint64_t* other = reinterpret_cast<uint64_t*>(floats + row_floats * batch_rows);
    const Workspace work{reinterpret_cast<int64_t*>(other + n), merged, row_floats, floats, tree};
    const int low = w.payload_bits + w.digit_bits, high = w.payload_bits + w.key_bits;
    const bool in_cache = w.compact && u_.bags.batch * w.features * table.dim * 4 <= near_bytes;
    Source source{u_.grad, u_.grad_stride, w.features, in_cache, w.place, w.scale, w.sample};
    if (w.compact)
      source.grad = w.gradients, source.stride = table.dim;
    else if (!listed(w))
      source.grad = u_.grad + u_.features[w.first_feature].column;
    Fault fault;
    const int64_t* const slot_rows = table.slot_rows < 0 ? nullptr : u_.slot_rows + table.slot_rows;
    // By row. A table of one bucket was placed by its lowest digit, so that pass is left out. Equal entries have the
    // same gradient: their order does not matter.
    kernels_.apply({radix_sort(w.entries + begin, other, n, low, high), n, w.payload_bits, table, u_.hyper[w.table],
                    uint64_t(u_.keys[w.table]), source, u_.arena, u_.state, slot_rows},
                   work, fault);
    if (fault.found()) {
      const int64_t at = fault.position.load();
      report(w.table, slot_rows ? slot_rows[at] : at);
    }
  }

  void report(int64_t table, int64_t row) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (bad_.table < 0 || table < bad_.table || (table == bad_.table && row < bad_.row))
      bad_.table = table, bad_.row = row;
  }

  const UpdateCall& u_;
  const Kernels& kernels_;
  const Parallel& parallel_;
  std::vector<int64_t> first_gradient_;  // per_id: where each feature's gradients begin
  Fault fault_;
  BadRow bad_;
  std::mutex mutex_;
  Scratch shared_scratch_;
  std::vector<ThreadScratch> scratch_;
};

}  // namespace

BadRow update(const UpdateCall& u, const Kernels& k, const Parallel& p) { return Update(u, k, p).run(); }

}  // namespace rowwise
