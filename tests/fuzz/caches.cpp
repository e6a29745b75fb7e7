// Caches: simulated ones beside the plainest form of each, and rows that processes share beside a function of their
// key.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "../../src/rowwise/tables/store/_cpp/shared_cache.h"
#include "fuzz.h"

extern "C" {  // of tables/store/_c/simulate.c, which has no header
struct Trace {
  const int32_t* row;
  int64_t accesses, rows;
  const int64_t* batch_end;
  int64_t batches, skip;
};
struct Counts {
  int64_t hits, misses, evictions, overflows;
};
int64_t rw_simulate_sets(const Trace*, const int64_t* set_of, int64_t sets, int64_t lfu, Counts*);
int64_t rw_simulate_lru(const Trace*, int64_t capacity, Counts*);
int64_t rw_simulate_belady(const Trace*, int64_t capacity, Counts*);
}

namespace {

constexpr std::size_t WAYS = 32;

bool operator==(const Counts& a, const Counts& b) {
  return a.hits == b.hits && a.misses == b.misses && a.evictions == b.evictions && a.overflows == b.overflows;
}

class Simulation {
 public:
  explicit Simulation(Bytes& bytes) : bytes_(bytes) {
    rows_ = bytes.next(1, 300);
    for (int64_t batches = bytes.next(0, 8); batches-- > 0;) {
      for (int64_t count = bytes.next(0, 99), step = bytes.next(0, 3), first = bytes.next(0, rows_ - 1); count-- > 0;)
        row_.push_back(int32_t(step ? (first += step) % rows_ : bytes.next(0, rows_ - 1)));
      ends_.push_back(int64_t(row_.size()));
    }
    trace_ = {row_.data(),  int64_t(row_.size()),  rows_,
              ends_.data(), int64_t(ends_.size()), bytes.next(0, int64_t(row_.size()))};
  }

  bool run() {
    const int64_t capacity = bytes_.next(1, 60);
    Counts lru{}, best{};
    CHECK(rw_simulate_lru(&trace_, capacity, &lru) && lru == in_order(capacity, false));
    CHECK(rw_simulate_belady(&trace_, capacity, &best) && best.hits >= 0);
    const Counts wanted = in_order(capacity, true);
    CHECK(best.hits == wanted.hits && best.misses == wanted.misses && best.evictions == wanted.evictions);
    if (!trace_.skip) CHECK(best.hits >= lru.hits);
    const int64_t sets = bytes_.next(1, 3), lfu = bytes_.next(0, 1);
    std::vector<int64_t> set_of;
    for (int64_t row = 0; row < rows_; ++row) set_of.push_back((row * 7 + row / 5) % sets);
    Counts counts{};
    CHECK(rw_simulate_sets(&trace_, set_of.data(), sets, lfu, &counts) && counts == in_sets(set_of, lfu));
    return trace_.accesses > 0;
  }

 private:
  // Of all cached rows, the one leaves that was used first, or is used last of all.
  Counts in_order(int64_t capacity, bool knows_future) const {
    Counts counts{};
    std::vector<int32_t> cached;  // the last used one is the last
    for (int64_t at = 0; at < trace_.accesses; ++at) {
      const auto found = std::find(cached.begin(), cached.end(), row_[at]);
      const bool hit = found != cached.end(), evicts = !hit && int64_t(cached.size()) == capacity;
      if (at >= trace_.skip) counts.hits += hit, counts.misses += !hit, counts.evictions += evicts;
      if (hit) cached.erase(found);
      if (evicts) cached.erase(knows_future ? farthest(cached, at) : cached.begin());
      cached.push_back(row_[at]);
    }
    return counts;
  }
  std::vector<int32_t>::iterator farthest(std::vector<int32_t>& cached, int64_t at) const {
    const auto use = [&](int32_t row) { return std::find(row_.begin() + at, row_.end(), row); };
    return std::max_element(cached.begin(), cached.end(), [&](int32_t a, int32_t b) { return use(a) < use(b); });
  }

  Counts in_sets(const std::vector<int64_t>& set_of, bool lfu) const {
    Counts counts{};
    std::map<int64_t, std::vector<int32_t>> sets;  // the last used one is the last
    std::map<int32_t, int64_t> accessed;
    int64_t at = 0;
    for (const int64_t end : ends_) {
      std::set<int32_t> batch, spilled;
      for (; at < end; ++at) {
        const int32_t row = row_[at];
        const bool counted = at >= trace_.skip;
        std::vector<int32_t>& set = sets[set_of[row]];
        ++accessed[row], batch.insert(row);
        const auto found = std::find(set.begin(), set.end(), row);
        if (found != set.end() || spilled.count(row)) {
          counts.hits += counted;
          if (found != set.end()) set.erase(found), set.push_back(row);
          continue;
        }
        counts.misses += counted;
        if (set.size() == WAYS) {
          auto leaves = set.end();
          for (auto one = set.begin(); one != set.end(); ++one)
            if (!batch.count(*one) && (leaves == set.end() || (lfu && accessed[*one] < accessed[*leaves])))
              leaves = one;
          if (leaves == set.end()) {
            spilled.insert(row), counts.overflows += counted;
            continue;
          }
          set.erase(leaves), counts.evictions += counted;
        }
        set.push_back(row);
      }
    }
    return counts;
  }

  Bytes& bytes_;
  int64_t rows_;
  std::vector<int32_t> row_;
  std::vector<int64_t> ends_;
  Trace trace_;
};

// Two openings of one memory, as of two processes, take turns.
class Shared {
 public:
  explicit Shared(Bytes& bytes) : bytes_(bytes) {
    tables_ = bytes.next(1, 3);
    shape_ = {32 * bytes.next(1, 3), bytes.next(1, 40), 0, bytes.next(0, 1)};
    for (int64_t t = 0; t < tables_; ++t) first_.push_back(shape_.keys), shape_.keys += rows_ = bytes.next(1, 200);
    const int64_t size = shared_cache_bytes(&shape_);
    memory_ = static_cast<char*>(std::aligned_alloc(64, std::size_t((size + 63) / 64 * 64)));
    std::memset(memory_, 0, std::size_t(size));
    for (void*& cache : caches_) CHECK((cache = shared_cache_open(memory_, &shape_)));
  }
  ~Shared() {
    for (void* cache : caches_) shared_cache_close(cache);
    std::free(memory_);
  }

  bool run() {
    bool taken = false;
    for (int calls = 0; !bytes_.empty() && calls < 100; ++calls) taken |= bytes_.flip(5) ? warm() : take();
    return taken;
  }

 private:
  int64_t rows_of(int64_t t) const { return (t + 1 < tables_ ? first_[t + 1] : shape_.keys) - first_[t]; }
  std::string row_of(int64_t tag, int64_t key) const {
    std::string row;
    for (int64_t i = 0; i < shape_.row_bytes; ++i) row.push_back(char(tag * 31 + key * 7 + i));
    return row;
  }

  bool take() {
    void* const cache = caches_[bytes_.next(0, 1)];
    const int64_t tag = bytes_.next(0, 3), features = bytes_.next(1, 3), batch = bytes_.next(1, 4);
    std::vector<int64_t> offsets{0}, values, table_of;
    for (int64_t f = 0; f < features; ++f) {
      table_of.push_back(bytes_.next(0, tables_ - 1));
      const int64_t rows = rows_of(table_of.back()), step = bytes_.next(0, 2), first = bytes_.next(0, rows - 1);
      for (int64_t bag = 0; bag < batch; ++bag) {
        for (int64_t count = bytes_.next(0, 12); count-- > 0;)
          values.push_back(step ? (first + step * count) % rows : bytes_.next(0, rows - 1));
        offsets.push_back(int64_t(values.size()));
      }
    }
    std::vector<std::string> memory(std::size_t(tables_),
                                    std::string(values.size() * std::size_t(shape_.row_bytes), 0));
    std::vector<CachedFeature> described;
    for (int64_t f = 0; f < features; ++f)
      described.push_back({f, first_[table_of[f]], table_of[f], &memory[std::size_t(table_of[f])][0]});
    const std::vector<int64_t> ids = values;
    int64_t distinct = -1;
    const int64_t missing =
        shared_cache_take(cache, tag, features, described.data(), offsets.data(), batch, values.data(), &distinct);
    const MissingRow* const lacks = shared_cache_missing(cache);
    std::string rows;
    std::set<int64_t> keys;
    for (int64_t i = 0; i < missing; ++i) {
      CHECK(lacks[i].key >= 0 && lacks[i].key < shape_.keys && keys.insert(lacks[i].key).second);
      CHECK(lacks[i].to == &memory[std::size_t(lacks[i].table)][0] + lacks[i].place * shape_.row_bytes);
      rows += row_of(tag, lacks[i].key);
    }
    const std::vector<MissingRow> kept(lacks, lacks + missing);
    shared_cache_put(cache, tag, missing, kept.data(), rows.data());
    std::vector<std::map<int64_t, int64_t>> place_of(static_cast<std::size_t>(tables_));
    int64_t wanted = 0;
    for (int64_t f = 0; f < features; ++f)
      for (int64_t at = offsets[f * batch]; at < offsets[(f + 1) * batch]; ++at) {
        auto& places = place_of[std::size_t(table_of[f])];
        const auto placed = places.emplace(ids[at], int64_t(places.size()));
        wanted += placed.second;
        CHECK(values[at] == placed.first->second);
        CHECK(!memory[std::size_t(table_of[f])].compare(std::size_t(values[at] * shape_.row_bytes),
                                                        std::size_t(shape_.row_bytes),
                                                        row_of(tag, first_[table_of[f]] + ids[at])));
      }
    CHECK(distinct == wanted);
    return !ids.empty();
  }

  bool warm() {
    const int64_t tag = bytes_.next(0, 3);
    std::vector<int64_t> keys(std::size_t(bytes_.next(0, 40))), counts;
    std::string rows;
    for (int64_t& key : keys) {
      key = bytes_.next(0, shape_.keys - 1), counts.push_back(bytes_.next(0, 65535) * 3);
      rows += row_of(tag, key);
    }
    shared_cache_warm(caches_[bytes_.next(0, 1)], tag, int64_t(keys.size()), keys.data(), rows.data(), counts.data());
    return !keys.empty();
  }

  Bytes& bytes_;
  SharedCacheShape shape_;
  int64_t tables_, rows_ = 0;
  std::vector<int64_t> first_;  // key of each table
  char* memory_;
  void* caches_[2];
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  Bytes bytes(data, size);
  ++rate().inputs;
  rate().taken += bytes.flip() ? Simulation(bytes).run() : Shared(bytes).run();
  return 0;
}
