// The memory operations of the exchange between ranks: packs ids into messages, and moves columns.
//
// Each is one pass over its data, into kept memory (memory.h); other code sends the messages.
#include <cstring>
#include <optional>
#include <string>
#include <tuple>

#include "bind.h"

namespace {

using namespace rowwise;

constexpr int64_t samples_per_task = 128;
constexpr int64_t most_words = INT64_C(1) << 40;

// A row of the tensor `segments` of `place`: columns of a block, and where they go.
struct Segment {
  int64_t block, source, target, width, add;
};

template <int64_t n>
void copy_floats(float* to, const float* from) {  // of a size known here: no call, which would cost as much as the copy
  std::memcpy(to, from, size_t(n) * 4);
}

void move_columns(const float* from, float* to, const Segment& segment) {
  from += segment.source, to += segment.target;
  if (segment.add) {
    for (int64_t c = 0; c < segment.width; ++c) to[c] += from[c];
    return;
  }
  switch (segment.width) {
    case 16:
      return copy_floats<16>(to, from);
    case 32:
      return copy_floats<32>(to, from);
    case 64:
      return copy_floats<64>(to, from);
    case 128:
      return copy_floats<128>(to, from);
    default:
      std::memcpy(to, from, size_t(segment.width) * 4);
  }
}

void place(const std::vector<Tensor>& blocks, const Tensor& segments, Tensor out) {
  check_tensor(out, ScalarType::Float, "out");
  check_tensor(segments, ScalarType::Long, "segments");
  STD_TORCH_CHECK(out.dim() == 2 && segments.dim() == 2 && segments.size(1) == 5,
                  "rowwise: place wants out [B, S], segments [n, 5]");
  const int64_t batch = out.size(0), columns = out.size(1), count = segments.size(0);
  const Segment* rows = static_cast<const Segment*>(segments.const_data_ptr());
  struct Block {
    const float* data;
    int64_t columns;
  };
  std::vector<Block> from;
  for (const Tensor& block : blocks) {
    check_tensor(block, ScalarType::Float, "blocks");
    STD_TORCH_CHECK(block.dim() == 2 && block.size(0) == batch, "rowwise: blocks must be [", batch, ", n]");
    from.push_back({block.const_data_ptr<float>(), block.size(1)});
  }
  const auto inside = [](int64_t first, int64_t width, int64_t all) { return first >= 0 && first <= all - width; };
  for (int64_t i = 0; i < count; ++i) {
    const Segment& segment = rows[i];
    STD_TORCH_CHECK(segment.block >= 0 && segment.block < int64_t(from.size()) && segment.width >= 0 &&
                        inside(segment.source, segment.width, from[size_t(segment.block)].columns) &&
                        inside(segment.target, segment.width, columns),
                    "rowwise: segment ", i, " reaches past its block or the output");
  }
  if (!count) return;
  float* const to = out.mutable_data_ptr<float>();
  each_task((batch + samples_per_task - 1) / samples_per_task, [&](int64_t task) {
    const int64_t end = std::min(batch, (task + 1) * samples_per_task);
    for (int64_t b = task * samples_per_task; b < end; ++b)
      for (int64_t i = 0; i < count; ++i) {
        const Block& block = from[size_t(rows[i].block)];
        move_columns(block.data + b * block.columns, to + b * columns, rows[i]);
      }
  });
}

// A row of `slices`: bags first .. first + batch of the input, all of whose ids have to be below `rows`.
struct Slice {
  int64_t first, rows;
};
// A row of `messages`: its number of slices, whether ids take two words, whether weights follow.
struct Message {
  int64_t slices, wide, weighted;
};

std::vector<int64_t> begins_of(const Integers& lengths, int64_t values) {
  std::vector<int64_t> begins(size_t(lengths.count) + 1, 0);
  bool good = true;
  for (int64_t i = 0; i < lengths.count; ++i) {
    const int64_t n = lengths[i];
    good &= n >= 0 && n <= values;
    begins[size_t(i) + 1] = begins[size_t(i)] + n;
    if (!good) break;
  }
  STD_TORCH_CHECK(good && begins.back() == values, "rowwise: lengths do not add up to ", values, " values");
  return begins;
}

template <class To, class From>
bool convert(void* out, const From* in, int64_t n, uint64_t rows) {  // whether all ids are below `rows`
  To* to = static_cast<To*>(out);
  uint64_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t id = int64_t(in[i]);
    bad |= uint64_t(uint64_t(id) >= rows);
    const To narrow = To(id);
    std::memcpy(to + i, &narrow, sizeof(To));  // two words need not begin on eight bytes
  }
  return !bad;
}

// Ids for all ranks as one row of 32-bit words: for each rank the bags' lengths, then ids, then weights. Also the
// first word of each rank, and the number of ids of each slice.
std::tuple<Tensor, Tensor, Tensor> pack_ids(const Tensor& values, const Tensor& lengths,
                                            const std::optional<Tensor>& weights, const Tensor& slices,
                                            const Tensor& messages, int64_t batch) {
  const Integers ids(values, "values"), bags(lengths, "lengths");
  const float* scale = nullptr;
  if (weights) {
    check_tensor(*weights, ScalarType::Float, "weights");
    STD_TORCH_CHECK(weights->numel() == ids.count, "rowwise: ", weights->numel(), " weights for ", ids.count,
                    " values");
    scale = ids.count ? weights->const_data_ptr<float>() : nullptr;
  }
  check_tensor(slices, ScalarType::Long, "slices");
  check_tensor(messages, ScalarType::Long, "messages");
  STD_TORCH_CHECK(
      slices.dim() == 2 && slices.size(1) == 2 && messages.dim() == 2 && messages.size(1) == 3 && batch >= 0,
      "rowwise: slices must be [n, 2] and messages [n, 3]");
  const std::vector<int64_t> begins = begins_of(bags, ids.count);
  const Slice* s = static_cast<const Slice*>(slices.const_data_ptr());
  const Message* m = static_cast<const Message*>(messages.const_data_ptr());
  const int64_t num_slices = slices.size(0), world = messages.size(0);
  Tensor starts = torch::stable::empty({world + 1}, ScalarType::Long);
  Tensor counts = torch::stable::empty({num_slices}, ScalarType::Long);
  int64_t *start = starts.mutable_data_ptr<int64_t>(), *count = counts.mutable_data_ptr<int64_t>();
  std::vector<int64_t> words_at, weights_at;  // of each slice: its ids, and their weights
  int64_t at = 0, next = 0;
  for (int64_t w = 0; w < world; ++w) {
    start[w] = at;
    STD_TORCH_CHECK(m[w].slices >= 0 && m[w].slices <= num_slices - next, "rowwise: messages have more than ",
                    num_slices, " slices");
    int64_t total = 0;
    for (int64_t k = next; k < next + m[w].slices; ++k) {
      STD_TORCH_CHECK(s[k].first >= 0 && s[k].first <= bags.count - batch, "rowwise: slice ", k, " reaches past the ",
                      bags.count, " bags of its batch");
      count[k] = begins[size_t(s[k].first + batch)] - begins[size_t(s[k].first)];
      total += count[k];
    }
    STD_TORCH_CHECK(total <= INT32_MAX, "rowwise: too many ids for one rank; make the batch smaller");
    int64_t ids_at = at + m[w].slices * batch, more_at = ids_at + total * (m[w].wide ? 2 : 1);
    for (int64_t k = next; k < next + m[w].slices; ++k) {
      words_at.push_back(ids_at), weights_at.push_back(more_at);
      ids_at += count[k] * (m[w].wide ? 2 : 1), more_at += m[w].weighted ? count[k] : 0;
    }
    STD_TORCH_CHECK(!m[w].weighted || weights, "rowwise: a rank wants weights, and there are none");
    at = more_at, next += m[w].slices;
    STD_TORCH_CHECK(at <= most_words, "rowwise: too many ids for one tensor");
  }
  start[world] = at;
  STD_TORCH_CHECK(next == num_slices, "rowwise: messages have ", next, " of ", num_slices, " slices");
  Tensor out = empty({at}, ScalarType::Int);
  int32_t* const words = out.mutable_data_ptr<int32_t>();
  std::vector<int64_t> rank_of;
  for (int64_t w = 0; w < world; ++w) rank_of.insert(rank_of.end(), size_t(m[w].slices), w);
  std::atomic<bool> good{true};
  each_task(num_slices, [&](int64_t k) {
    const int64_t w = rank_of[size_t(k)], first = begins[size_t(s[k].first)];
    int64_t in_message = k;
    for (int64_t r = 0; r < w; ++r) in_message -= m[r].slices;
    int32_t* const bag = words + start[w] + in_message * batch;
    for (int64_t b = 0; b < batch; ++b) bag[b] = int32_t(bags[s[k].first + b]);
    bool fine = true;
    with_type(ids.wide, [&](auto zero) {
      const auto* in = static_cast<const decltype(zero)*>(ids.data) + first;
      fine = m[w].wide ? convert<int64_t>(words + words_at[size_t(k)], in, count[k], uint64_t(s[k].rows))
                       : convert<int32_t>(words + words_at[size_t(k)], in, count[k], uint64_t(s[k].rows));
    });
    if (m[w].weighted && count[k]) std::memcpy(words + weights_at[size_t(k)], scale + first, size_t(count[k]) * 4);
    if (!fine) good = false;
  });
  STD_TORCH_CHECK(good, "rowwise: an id is outside its table");
  return {out, starts, counts};
}

// Bytes whose memory is kept for the next one when it is freed.
Tensor empty_bytes(int64_t bytes) {
  STD_TORCH_CHECK(bytes >= 0 && bytes <= most_words, "rowwise: cannot make a tensor of ", bytes, " bytes");
  if (bytes < pooled_bytes) return torch::stable::empty({bytes}, ScalarType::Byte);
  return torch::stable::from_blob(acquire(size_t(bytes)), {bytes}, {1},
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU), ScalarType::Byte,
                                  &release);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rowwise, m) {
  m.def("place(Tensor[] blocks, Tensor segments, Tensor(a!) out) -> ()");
  m.def(
      "pack_ids(Tensor values, Tensor lengths, Tensor? weights, Tensor slices, Tensor messages, int batch) -> "
      "(Tensor words, Tensor starts, Tensor counts)");
  m.def("empty_bytes(int bytes) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(rowwise, CPU, m) {
  m.impl("place", TORCH_BOX(&place));
  m.impl("pack_ids", TORCH_BOX(&pack_ids));
}

// It has no tensor to tell the device by.
STABLE_TORCH_LIBRARY_IMPL(rowwise, CompositeExplicitAutograd, m) { m.impl("empty_bytes", TORCH_BOX(&empty_bytes)); }
