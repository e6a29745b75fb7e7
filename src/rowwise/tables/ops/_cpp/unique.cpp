// Distinct ids of each segment, ascending, and where each id went.
//
// Two ways, chosen by how far apart the ids of a segment are. Near (tables of up to a hundred rows for each id): a
// bitmap of the ids that occur; the rank of an id is the number of bits set below it. Far: ids become (id, place)
// words, are placed into ranges of ids that fit in cache, sorted there and read off. Neither has ids that are slow, as
// hashing has: the first is one step an id, the second as many as the ids have digits. All results are sums or have
// a fixed order, so threads change no bit of them.
//
// A segment is the task of one thread, so its memory stays in that core's cache; one with more than its share of the
// ids is worked on by all threads instead.
#include <memory>
#include <tuple>

#include "bind.h"
#include "isa.h"
#include "radix.h"

namespace {

using namespace rowwise;
using Each = void (*)(int64_t tasks, const std::function<void(int64_t)>& f);

constexpr int64_t ids_per_word = 2;      // of a bitmap: with fewer, sorting is faster
constexpr int64_t huge_from = 1 << 18;   // bytes that are read all over: they are worth a huge page
constexpr int64_t range_ids = 1 << 13;   // sorted in second-level cache
constexpr int most_range_bits = 11;      // more ranges than this are too many places to write to
constexpr int64_t shared_ids = 1 << 16;  // smaller segments do not pay for a barrier of the threads
constexpr int64_t words_per_task = 1 << 13;
constexpr int64_t ids_at_once = 1 << 11;  // ranked, then counted, while they are in first-level cache

void one_by_one(int64_t tasks, const std::function<void(int64_t)>& f) {
  for (int64_t i = 0; i < tasks; ++i) f(i);
}

template <class Id>
struct Segment {
  const Id* ids;
  int64_t n;
  int64_t least;
  uint64_t span;  // no id is further from the least
  int64_t parts;  // that threads share
  Each each;

  int64_t part_begin(int64_t part) const { return n / parts * part + std::min(part, n % parts); }
};

template <class Id>
struct Output {  // of one segment
  Id* values;
  int64_t* counts;
  int64_t* inverse;
  int64_t first;  // the rank of its first distinct id
};

template <class Id>
class Way {
 public:
  virtual ~Way() = default;
  virtual int64_t find() = 0;  // returns the number of distinct ids
  virtual void write(const Output<Id>&) const = 0;
};

template <class Id>
class Near final : public Way<Id> {
 public:
  // Whether a bitmap pays off, and the most parts for which one each stays small beside the ids.
  static bool suits(const Segment<Id>& s) { return s.span / 64 < uint64_t(s.n) / ids_per_word; }
  static int64_t most_parts(const Segment<Id>& s) { return std::max<int64_t>(1, s.n / ids_per_word / words(s)); }

  explicit Near(const Segment<Id>& s)
      : s_(s), words_(words(s)), chunks_((words_ + words_per_task - 1) / words_per_task) {}

  int64_t find() override {
    bits_ = reinterpret_cast<uint64_t*>(bit_memory_.at_least(read_all_over(words_ * (s_.parts * 8 + 4))));
    before_ = reinterpret_cast<uint32_t*>(bits_ + words_ * s_.parts);
    s_.each(s_.parts, [&](int64_t part) { mark(part); });
    std::vector<int64_t> starts(size_t(chunks_) + 1, 0);
    s_.each(chunks_, [&](int64_t chunk) { starts[size_t(chunk) + 1] = join(chunk); });
    for (int64_t c = 0; c < chunks_; ++c) starts[size_t(c) + 1] += starts[size_t(c)];
    s_.each(chunks_, [&](int64_t chunk) {
      for (int64_t w = chunk * words_per_task; w < chunk_end(chunk); ++w) before_[w] += uint32_t(starts[size_t(chunk)]);
    });
    return distinct_ = starts.back();
  }

  void write(const Output<Id>& out) const override {
    s_.each(chunks_, [&](int64_t chunk) { write_values(chunk, out.values); });
    Scratch memory;
    uint32_t* const counts = reinterpret_cast<uint32_t*>(memory.at_least(read_all_over(distinct_ * s_.parts * 4)));
    s_.each(s_.parts, [&](int64_t part) { rank(part, out, counts + part * distinct_); });
    s_.each((distinct_ + words_per_task - 1) / words_per_task, [&](int64_t chunk) {
      const int64_t begin = chunk * words_per_task, end = std::min(distinct_, begin + words_per_task);
      std::copy(counts + begin, counts + end, out.counts + begin);
      for (int64_t part = 1; part < s_.parts; ++part)
        for (int64_t i = begin; i < end; ++i) out.counts[i] += counts[part * distinct_ + i];
    });
  }

 private:
  static size_t read_all_over(int64_t bytes) {
    return size_t(bytes < huge_from ? bytes : std::max<int64_t>(bytes, 2 << 20));
  }
  static int64_t words(const Segment<Id>& s) { return int64_t(s.span / 64) + 1; }
  int64_t chunk_end(int64_t chunk) const { return std::min(words_, (chunk + 1) * words_per_task); }

  void mark(int64_t part) {
    uint64_t* const bits = bits_ + part * words_;
    std::fill(bits, bits + words_, 0);
    const Id* const ids = s_.ids;
    const uint64_t least = uint64_t(s_.least);
    const int64_t end = s_.part_begin(part + 1);
    for (int64_t i = s_.part_begin(part); i < end; ++i) {
      const uint64_t at = uint64_t(int64_t(ids[i])) - least;
      bits[at >> 6] |= uint64_t(1) << (at & 63);
    }
  }

  // Merges the bitmaps of all parts; counts the set bits before each word of the chunk, and in all of it.
  int64_t join(int64_t chunk) {
    int64_t set = 0;
    for (int64_t w = chunk * words_per_task; w < chunk_end(chunk); ++w) {
      for (int64_t part = 1; part < s_.parts; ++part) bits_[w] |= bits_[part * words_ + w];
      before_[w] = uint32_t(set);
      set += __builtin_popcountll(bits_[w]);
    }
    return set;
  }

  void write_values(int64_t chunk, Id* values) const {
    const int64_t begin = chunk * words_per_task;
    Id* at = values + before_[begin];
    for (int64_t w = begin; w < chunk_end(chunk); ++w)
      for (uint64_t bits = bits_[w]; bits; bits &= bits - 1)
        *at++ = Id(int64_t(uint64_t(s_.least) + uint64_t(w) * 64 + uint64_t(__builtin_ctzll(bits))));
  }

  void rank(int64_t part, const Output<Id>& out, uint32_t* counts) const {
    std::fill(counts, counts + distinct_, 0);
    counts -= out.first;
    const Marks marks{bits_, before_, s_.least, out.first};
    const int64_t end = s_.part_begin(part + 1);
    for (int64_t i = s_.part_begin(part); i < end; i += ids_at_once) {
      const int64_t n = std::min(ids_at_once, end - i);
      kernels().rank(s_.ids + i, sizeof(Id) == 8, n, marks, out.inverse + i);
      for (int64_t k = i; k < i + n; ++k) ++counts[out.inverse[k]];
    }
  }

  Segment<Id> s_;
  int64_t words_, chunks_, distinct_ = 0;
  Scratch bit_memory_;
  uint64_t* bits_ = nullptr;  // [part][word]
  uint32_t* before_ = nullptr;
};

// Words hold an id less the least, and its place. Where the two take more than 64 bits, a word holds as much of the
// id as makes most ids differ, and the rest is sorted in a second step, only among ids that agree so far.
template <class Id>
class Far final : public Way<Id> {
 public:
  explicit Far(const Segment<Id>& s)
      : s_(s),
        place_bits_(bits_of(uint64_t(s.n) - 1)),
        place_mask_((uint64_t(1) << place_bits_) - 1),
        drop_(bits_to_drop(bits_of(s.span), place_bits_)),
        key_bits_(bits_of(s.span) - drop_),
        range_bits_(std::min({bits_of(uint64_t(s.n) / range_ids), most_range_bits, key_bits_})),
        ranges_(size_t(1) << range_bits_),
        next_(ranges_.size() * size_t(s.parts), 0) {}

  int64_t find() override {
    words_ = reinterpret_cast<uint64_t*>(memory_.at_least(size_t(s_.n) * 16));
    s_.each(s_.parts, [&](int64_t part) { count(part); });
    lay_out();
    s_.each(s_.parts, [&](int64_t part) { place(part); });
    s_.each(int64_t(ranges_.size()), [&](int64_t range) { sort(ranges_[size_t(range)]); });
    int64_t at = 0;
    for (Range& range : ranges_) at += std::exchange(range.first, at);
    return at;
  }

  void write(const Output<Id>& out) const override {
    s_.each(int64_t(ranges_.size()), [&](int64_t range) {
      drop_ ? write_range<true>(ranges_[size_t(range)], out) : write_range<false>(ranges_[size_t(range)], out);
    });
  }

 private:
  struct Range {
    int64_t begin, end;     // among the words
    const uint64_t* words;  // sorted
    int64_t first;          // the rank of its first distinct id in the segment
  };

  static int bits_to_drop(int id_bits, int place_bits) {
    if (id_bits + place_bits <= 64) return 0;
    const int apart = id_bits - place_bits - 8;  // n ids mostly differ in their place_bits + 8 highest bits
    return std::clamp(apart, id_bits + place_bits - 64, 64 - place_bits);
  }

  uint64_t key_of(int64_t i) const { return (uint64_t(int64_t(s_.ids[i])) - uint64_t(s_.least)) >> drop_; }

  void count(int64_t part) {
    int64_t* const counts = next_.data() + size_t(part) * ranges_.size();
    const int64_t begin = s_.part_begin(part), end = s_.part_begin(part + 1);
    const int shift = key_bits_ - range_bits_;
    if (!range_bits_)
      counts[0] = end - begin;
    else
      for (int64_t i = begin; i < end; ++i) ++counts[key_of(i) >> shift];
  }

  void lay_out() {
    int64_t at = 0;
    for (size_t r = 0; r < ranges_.size(); ++r) {
      ranges_[r].begin = at;
      for (int64_t part = 0; part < s_.parts; ++part) at += std::exchange(next_[size_t(part) * ranges_.size() + r], at);
      ranges_[r].end = at;
    }
  }

  void place(int64_t part) {
    int64_t* const next = next_.data() + size_t(part) * ranges_.size();
    uint64_t* const words = words_;
    const int64_t end = s_.part_begin(part + 1);
    const int place_bits = place_bits_, range_bits = range_bits_, shift = key_bits_ - range_bits_;
    for (int64_t i = s_.part_begin(part); i < end; ++i) {
      const uint64_t key = key_of(i);
      words[next[range_bits ? key >> shift : 0]++] = key << place_bits | uint64_t(i);
    }
  }

  void sort(Range& range) {
    const int64_t n = range.end - range.begin;
    uint64_t *const words = words_ + range.begin, *const other = words_ + s_.n + range.begin;
    uint64_t* const sorted = radix_sort(words, other, n, place_bits_, place_bits_ + key_bits_ - range_bits_);
    range.words = sorted;
    range.first = drop_ ? sort_rest(sorted, sorted == words ? other : words, n) : count_distinct(sorted, n);
  }

  int64_t count_distinct(const uint64_t* words, int64_t n) const {
    int64_t distinct = n > 0;
    for (int64_t i = 1; i < n; ++i) distinct += words[i] >> place_bits_ != words[i - 1] >> place_bits_;
    return distinct;
  }

  // Among words that agree, by the bits of the id that were dropped. Of the key, a word then says only whether it is
  // the first with its id. Returns the number of these.
  int64_t sort_rest(uint64_t* words, uint64_t* other, int64_t n) const {
    const uint64_t first = uint64_t(1) << place_bits_;
    int64_t distinct = 0;
    for (int64_t i = 0, end; i < n; i = end) {
      bool same = true;  // as nearly always: ids that agree in these bits are equal
      const Id id = s_.ids[words[i] & place_mask_];
      for (end = i + 1; end < n && words[end] >> place_bits_ == words[i] >> place_bits_; ++end)
        same &= s_.ids[words[end] & place_mask_] == id;
      if (!same) sort_rest_of_run(words + i, other + i, end - i);
      uint64_t last = ~(words[i] >> place_bits_);
      for (int64_t k = i; k < end; ++k) {
        const uint64_t key = words[k] >> place_bits_;
        distinct += key != last;
        words[k] = (words[k] & place_mask_) | (key != last ? first : 0);
        last = key;
      }
    }
    return distinct;
  }

  void sort_rest_of_run(uint64_t* words, uint64_t* other, int64_t n) const {
    const uint64_t rest = (uint64_t(1) << drop_) - 1;
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t place = words[i] & place_mask_;
      words[i] = ((uint64_t(int64_t(s_.ids[place])) - uint64_t(s_.least)) & rest) << place_bits_ | place;
    }
    const uint64_t* sorted = radix_sort(words, other, n, place_bits_, place_bits_ + drop_);
    if (sorted != words) std::copy(sorted, sorted + n, words);
  }

  template <bool dropped>
  void write_range(const Range& range, const Output<Id>& out) const {
    const int64_t n = range.end - range.begin;
    if (!n) return;
    int64_t at = range.first - 1;
    uint64_t last = ~(range.words[0] >> place_bits_);
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t key = range.words[i] >> place_bits_, place = range.words[i] & place_mask_;
      const bool first = dropped ? key : key != last;
      at += first;
      last = key;
      // Without a branch where there is nothing to look up: the last word of a run has the last say.
      if (!dropped) out.values[at] = Id(int64_t(uint64_t(s_.least) + key));
      if (dropped && first) out.values[at] = s_.ids[place];
      out.counts[at] = i + 1;
      out.inverse[place] = out.first + at;
    }
    for (; at > range.first; --at) out.counts[at] -= out.counts[at - 1];
  }

  Segment<Id> s_;
  int place_bits_;
  uint64_t place_mask_;
  int drop_;  // low bits of an id that a word has no room for
  int key_bits_, range_bits_;
  std::vector<Range> ranges_;
  std::vector<int64_t> next_;  // [part][range]: ids in it, then where the next one goes
  Scratch memory_;
  uint64_t* words_ = nullptr;
};

template <class Id>
class Deduplicate {
 public:
  Deduplicate(const Id* ids, const int64_t* bounds, int64_t segments)
      : ids_(ids), bounds_(bounds), ways_(size_t(segments)), threads_(torch::stable::get_num_threads()) {
    for (int64_t s = 0; s < segments; ++s) {
      STD_TORCH_CHECK(size(s) <= int64_t(UINT32_MAX), "rowwise: ", size(s), " ids in one segment; split it");
      if (size(s)) (is_shared(s) ? shared_ : alone_).push_back(s);
    }
    std::stable_sort(alone_.begin(), alone_.end(), [&](int64_t a, int64_t b) { return size(a) > size(b); });
  }

  // How many distinct ids there are, and where those of each segment begin.
  int64_t find(int64_t* starts) {
    const int64_t segments = int64_t(ways_.size());
    std::fill(starts, starts + segments + 1, 0);
    for_all([&](int64_t s, bool shared) {
      ways_[size_t(s)] = way_of(s, shared);
      starts[s + 1] = ways_[size_t(s)]->find();
    });
    for (int64_t s = 0; s < segments; ++s) starts[s + 1] += starts[s];
    return starts[segments];
  }

  void write(const int64_t* starts, Id* values, int64_t* inverse, int64_t* counts) const {
    for_all([&](int64_t s, bool) {
      ways_[size_t(s)]->write({values + starts[s], counts + starts[s], inverse + bounds_[s], starts[s]});
    });
  }

 private:
  int64_t size(int64_t s) const { return bounds_[s + 1] - bounds_[s]; }

  bool is_shared(int64_t s) const {
    return threads_ > 1 && size(s) >= shared_ids && size(s) * 2 * threads_ > bounds_[ways_.size()];
  }

  template <class F>
  void for_all(F f) const {
    for (const int64_t s : shared_) f(s, true);
    each_task(int64_t(alone_.size()), [&](int64_t i) { f(alone_[size_t(i)], false); });
  }

  std::unique_ptr<Way<Id>> way_of(int64_t s, bool shared) const {
    Segment<Id> segment{ids_ + bounds_[s], size(s), 0, 0, shared ? threads_ : 1, shared ? each_task : one_by_one};
    find_span(segment);
    if (!Near<Id>::suits(segment)) return std::make_unique<Far<Id>>(segment);
    segment.parts = std::min(segment.parts, Near<Id>::most_parts(segment));
    return std::make_unique<Near<Id>>(segment);
  }

  static void find_span(Segment<Id>& s) {
    std::vector<std::pair<int64_t, int64_t>> spans(size_t(s.parts));
    s.each(s.parts, [&](int64_t part) {
      const int64_t begin = s.part_begin(part), end = s.part_begin(part + 1);
      auto& [least, largest] = spans[size_t(part)];
      kernels().span(s.ids + begin, sizeof(Id) == 8, end - begin, least, largest);
    });
    auto [least, largest] = spans[0];
    for (const auto& span : spans) least = std::min(least, span.first), largest = std::max(largest, span.second);
    s.least = least;
    s.span = uint64_t(largest) - uint64_t(least);
  }

  const Id* ids_;
  const int64_t* bounds_;
  std::vector<std::unique_ptr<Way<Id>>> ways_;
  std::vector<int64_t> shared_, alone_;
  int64_t threads_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor> deduplicate(const Tensor& values, const Tensor& bounds) {
  const Integers ids(values, "values");
  check_tensor(bounds, ScalarType::Long, "bounds");
  const int64_t segments = bounds.numel() - 1;
  const int64_t* b = bounds.const_data_ptr<int64_t>();
  STD_TORCH_CHECK(segments >= 0 && b[0] == 0 && b[segments] == ids.count && std::is_sorted(b, b + segments + 1),
                  "rowwise: bounds of segments do not ascend from 0 to ", ids.count);
  Tensor starts = torch::stable::empty({segments + 1}, ScalarType::Long);
  Tensor inverse = empty({ids.count}, ScalarType::Long);
  Tensor distinct, counts;
  with_type(ids.wide, [&](auto zero) {
    using Id = decltype(zero);
    Deduplicate<Id> work(static_cast<const Id*>(ids.data), b, segments);
    int64_t* const first = starts.mutable_data_ptr<int64_t>();
    const int64_t n = work.find(first);
    distinct = empty({n}, ids.type());
    counts = empty({n}, ScalarType::Long);
    work.write(first, static_cast<Id*>(distinct.mutable_data_ptr()), inverse.mutable_data_ptr<int64_t>(),
               counts.mutable_data_ptr<int64_t>());
  });
  return {distinct, starts, inverse, counts};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rowwise, m) {
  m.def("deduplicate(Tensor values, Tensor bounds) -> (Tensor values, Tensor bounds, Tensor inverse, Tensor counts)");
}

STABLE_TORCH_LIBRARY_IMPL(rowwise, CPU, m) { m.impl("deduplicate", TORCH_BOX(&deduplicate)); }
