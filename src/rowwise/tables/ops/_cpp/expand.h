// Expands shared bags: copies bags of ids, or vectors, of distinct samples to every sample that refers to them.
//
// Included by jagged.cpp only. Neighbouring samples mostly refer to the same distinct sample or to the next one: copies
// are short and read from cache. Prefix sums of all lengths are materialised, as there are only as many as bags of
// distinct samples.
#pragma once
#include <optional>
#include <tuple>

#include "bind.h"
#include "isa.h"

namespace rowwise {

constexpr int64_t expanded_per_task = 512;  // samples
constexpr int64_t floats_streamed = 256;    // fewer at a time do not pay for the store fence
constexpr int64_t most_expanded = INT64_C(1) << 59;

// A batch that bags are taken from: sample b of the output has the bags of its sample samples[b].
struct Distinct {
  Integers values, lengths, samples;
  const float* weights;
  std::vector<int64_t> begins;  // of all bags, and the end of the last

  Distinct(const Tensor& v, const Tensor& l, const Tensor& s, const Tensor* w)
      : values(v, "values"), lengths(l, "lengths"), samples(s, "samples"), weights(nullptr) {
    if (w) {
      check_tensor(*w, ScalarType::Float, "weights");
      STD_TORCH_CHECK(w->numel() == values.count, "rowwise: ", w->numel(), " weights for ", values.count, " values");
      weights = w->const_data_ptr<float>();
    }
    begins.resize(size_t(lengths.count) + 1);
    int64_t at = 0;
    bool fits = true;
    with_type(lengths.wide, [&](auto zero) {
      const auto* length = static_cast<const decltype(zero)*>(lengths.data);
      for (int64_t i = 0; i < lengths.count && fits; ++i) {
        begins[size_t(i)] = at;
        fits = length[i] >= 0 && length[i] <= values.count - at;
        at += fits ? length[i] : 0;
      }
    });
    begins.back() = at;
    STD_TORCH_CHECK(fits && at == values.count, "rowwise: lengths do not add up to ", values.count, " values");
  }
};

class Expand {
 public:
  Expand(const std::vector<Tensor>& values, const std::vector<Tensor>& lengths, const std::vector<Tensor>& weights,
         const std::vector<Tensor>& samples, const Tensor& places)
      : features_(places.numel() / 2), weighted_(!weights.empty()) {
    const size_t n = values.size();
    STD_TORCH_CHECK(n && lengths.size() == n && samples.size() == n && (weights.empty() || weights.size() == n),
                    "rowwise: ", n, " tensors of values, ", lengths.size(), " of lengths, ", samples.size(),
                    " of samples and ", weights.size(), " of weights");
    for (size_t i = 0; i < n; ++i)
      sources_.emplace_back(values[i], lengths[i], samples[i], weights.empty() ? nullptr : &weights[i]);
    check_tensor(places, ScalarType::Long, "places");
    STD_TORCH_CHECK(places.dim() == 2 && places.size(1) == 2, "rowwise: places must be [n, 2]");
    places_ = places.const_data_ptr<int64_t>();
    batch_ = sources_[0].samples.count;
    for (const Distinct& d : sources_)
      STD_TORCH_CHECK(d.samples.count == batch_, "rowwise: ", d.samples.count, " samples; expected ", batch_);
    for (int64_t f = 0; f < features_; ++f)
      STD_TORCH_CHECK(places_[2 * f] >= 0 && places_[2 * f] < int64_t(n) && places_[2 * f + 1] >= 0 &&
                          places_[2 * f + 1] <= source(f).lengths.count,
                      "rowwise: no bags ", places_[2 * f + 1], " of batch ", places_[2 * f]);
    tasks_ = (batch_ + expanded_per_task - 1) / expanded_per_task;
    starts_.assign(size_t(features_ * tasks_) + 1, 0);
    for (const Distinct& d : sources_) wide_ |= d.values.wide, wide_lengths_ |= d.lengths.wide;
  }

  std::tuple<Tensor, Tensor, Tensor> run(bool narrow) {
    Tensor lengths = empty({features_ * batch_}, wide_lengths_ ? ScalarType::Long : ScalarType::Int);
    with_type(wide_lengths_, [&](auto zero) {
      auto* out = static_cast<decltype(zero)*>(lengths.mutable_data_ptr());
      each_task(features_ * tasks_, [&](int64_t task) { count(task, out + task / tasks_ * batch_); });
    });
    STD_TORCH_CHECK(!bad_.load(), "rowwise: a sample is outside the distinct ones");
    for (size_t i = 1; i < starts_.size(); ++i) {
      starts_[i] += starts_[i - 1];
      STD_TORCH_CHECK(starts_[i] <= most_expanded, "rowwise: too many ids for one tensor");
    }
    const bool wide = wide_ && !narrow;
    Tensor values = empty({starts_.back()}, wide ? ScalarType::Long : ScalarType::Int);
    Tensor weights = empty({weighted_ ? starts_.back() : 0});
    float* const w = weights.mutable_data_ptr<float>();
    with_type(wide, [&](auto zero) {
      auto* out = static_cast<decltype(zero)*>(values.mutable_data_ptr());
      each_task(features_ * tasks_, [&](int64_t task) {
        const Distinct& d = source(task / tasks_);
        with_type(d.values.wide, [&](auto in) { copy(task, static_cast<const decltype(in)*>(d.values.data), out); });
        if (weighted_) copy(task, d.weights, w);
      });
    });
    return {values, lengths, weights};
  }

 private:
  const Distinct& source(int64_t feature) const { return sources_[size_t(places_[2 * feature])]; }

  template <class Length>
  void count(int64_t task, Length* out) {
    const Distinct& d = source(task / tasks_);
    const int64_t first = places_[task / tasks_ * 2 + 1], bags = d.lengths.count - first;
    const int64_t begin = task % tasks_ * expanded_per_task, end = std::min(batch_, begin + expanded_per_task);
    int64_t total = 0;
    for (int64_t b = begin; b < end; ++b) {
      const int64_t sample = d.samples[b];
      if (sample < 0 || sample >= bags) {
        bad_.store(true);
        return;
      }
      const int64_t length = d.lengths[first + sample];
      out[b] = Length(length);
      total += length;
    }
    starts_[size_t(task) + 1] = std::min(total, most_expanded + 1);
  }

  // Bags that follow one another here and there are copied at once.
  template <class In, class Out>
  void copy(int64_t task, const In* in, Out* out) const {
    const Distinct& d = source(task / tasks_);
    const int64_t* const begins = d.begins.data() + places_[task / tasks_ * 2 + 1];
    int64_t b = task % tasks_ * expanded_per_task;
    const int64_t end = std::min(batch_, b + expanded_per_task);
    out += starts_[size_t(task)];
    while (b < end) {
      const int64_t first = d.samples[b];
      int64_t next = first + 1;
      while (++b < end && d.samples[b] == next) ++next;
      const int64_t from = begins[first], n = begins[next] - from;
      for (int64_t i = 0; i < n; ++i) out[i] = Out(in[from + i]);
      out += n;
    }
  }

  std::vector<Distinct> sources_;
  const int64_t* places_;  // of each feature: a source, and its first bag there
  int64_t features_, batch_, tasks_;
  bool weighted_, wide_ = false, wide_lengths_ = false;
  std::vector<int64_t> starts_;  // in the output, of each feature's ranges of samples
  std::atomic<bool> bad_{false};
};

inline std::tuple<Tensor, Tensor, Tensor> expand(const std::vector<Tensor>& values, const std::vector<Tensor>& lengths,
                                                 const std::vector<Tensor>& weights, const std::vector<Tensor>& samples,
                                                 const Tensor& places, bool narrow) {
  return Expand(values, lengths, weights, samples, places).run(narrow);
}

struct ColumnSegment {  // a row of the tensor `segments`
  int64_t source, target, width;
};

inline void spread(Tensor out, const Tensor& vectors, const std::optional<Tensor>& samples, const Tensor& segments) {
  check_tensor(out, ScalarType::Float, "out");
  check_tensor(vectors, ScalarType::Float, "vectors");
  check_tensor(segments, ScalarType::Long, "segments");
  STD_TORCH_CHECK(out.dim() == 2 && vectors.dim() == 2 && segments.dim() == 2 && segments.size(1) == 3,
                  "rowwise: expected matrices, and segments [n, 3]");
  const int64_t batch = out.size(0), columns = out.size(1), distinct = vectors.size(0), width = vectors.size(1);
  std::optional<Integers> numbers;
  if (samples) numbers.emplace(*samples, "samples");
  const int64_t count = numbers ? numbers->count : distinct;
  STD_TORCH_CHECK(count == batch, "rowwise: vectors of ", count, " samples for ", batch);
  const ColumnSegment* const rows = static_cast<const ColumnSegment*>(segments.const_data_ptr());
  for (int64_t r = 0; r < segments.size(0); ++r)
    STD_TORCH_CHECK(rows[r].source >= 0 && rows[r].target >= 0 && rows[r].width >= 0 &&
                        rows[r].width <= width - rows[r].source && rows[r].width <= columns - rows[r].target,
                    "rowwise: segment ", r, " reaches past the columns");
  float* const to = out.mutable_data_ptr<float>();
  const float* const from = vectors.const_data_ptr<float>();
  const bool large = batch * columns * 4 >= streamed_bytes;
  std::atomic<bool> bad{false};
  each_task((batch + expanded_per_task - 1) / expanded_per_task, [&](int64_t task) {
    const int64_t end = std::min(batch, (task + 1) * expanded_per_task);
    for (int64_t b = task * expanded_per_task; b < end; ++b) {
      const int64_t sample = numbers ? (*numbers)[b] : b;
      if (sample < 0 || sample >= distinct) {
        bad.store(true);
        return;
      }
      for (int64_t r = 0; r < segments.size(0); ++r) {
        float* const mine = to + b * columns + rows[r].target;
        const float* const theirs = from + sample * width + rows[r].source;
        if (large && rows[r].width >= floats_streamed)
          kernels().stream_copy(mine, theirs, rows[r].width * 4);
        else
          std::copy(theirs, theirs + rows[r].width, mine);
      }
    }
  });
  STD_TORCH_CHECK(!bad.load(), "rowwise: a sample is outside the distinct ones");
}

}  // namespace rowwise
