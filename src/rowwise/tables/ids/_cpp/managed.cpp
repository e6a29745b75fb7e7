// The functions of managed.h. Calls are single-threaded: a map is a pure function of the ids of its steps.
#include "managed.h"

#include <algorithm>
#include <cstddef>
#include <new>
#include <tuple>
#include <vector>

#include "random.h"

namespace rowwise_hashing {
namespace {

constexpr int64_t NO_ID = -1, AHEAD = 16, SWEEPS = 8, LEAST_VICTIMS = 8;

uint64_t hash_of(int64_t id) { return mixed(uint64_t(id)); }
int64_t bucket_of(uint64_t hash, int64_t bits) { return bits ? int64_t(hash >> (64 - bits)) : 0; }

struct NewId {
  int64_t bucket;  // in the piece
  int64_t count;
  uint64_t hash;
  int64_t id;
  auto key() const { return std::make_tuple(bucket, -count, hash); }
};

struct Victim {
  int64_t count;  // 0 if the policy does not count
  int64_t used, row;
  auto key() const { return std::make_tuple(count, used, row); }
};

class RowMap {
 public:
  RowMap(const ManagedSettings& settings, const ManagedRows& rows)
      : set_(settings), is_(rows), buckets_(settings.rows / settings.bucket_rows) {
    std::size_t size = 16;
    while (size < std::size_t(2 * set_.rows)) size *= 2;
    index_.assign(size, 0);
    mask_ = size - 1;
    first_free_.assign(std::size_t(buckets_), 1);
    free_.assign(std::size_t(buckets_), set_.bucket_rows - 1);
    victims_.resize(std::size_t(buckets_));
    for (int64_t row = 0; row < set_.rows; ++row)
      if (is_.id[row] != NO_ID) {
        put(row);
        --free_[std::size_t(row / set_.bucket_rows)];
        ++in_use_;
      }
  }

  void find(const int64_t* ids, int64_t n, int64_t* rows) const {
    for (int64_t i = 0; i < n; ++i) {
      prefetch(ids[std::min(i + AHEAD, n - 1)]);
      const uint64_t hash = hash_of(ids[i]);
      const int64_t row = row_of(ids[i], hash);
      rows[i] = row < 0 ? local_bucket(hash) * set_.bucket_rows : row;
    }
  }

  void observe(const int64_t* ids, const int64_t* counts, int64_t n, int64_t step) {
    reset_.clear(), changed_.clear(), evicted_.clear(), new_.clear();
    if (set_.ttl && step != swept_) sweep(step);
    swept_ = step;
    for (int64_t i = 0; i < n; ++i) {
      prefetch(ids[std::min(i + AHEAD, n - 1)]);
      if (ids[i] == NO_ID) continue;
      const uint64_t hash = hash_of(ids[i]);
      const int64_t row = row_of(ids[i], hash);
      if (row < 0) {
        new_.push_back({local_bucket(hash), counts[i], hash, ids[i]});
        continue;
      }
      is_.used[row] = step;
      is_.count[row] += counts[i];
      changed_.push_back(row);
    }
    merge_new();
    for (std::size_t begin = 0, end = 0; begin < new_.size(); begin = end) {
      while (end < new_.size() && new_[end].bucket == new_[begin].bucket) ++end;
      admit(begin, end, step);
    }
  }

  const std::vector<int64_t>& list(int32_t which) const {
    return which == MANAGED_RESET ? reset_ : which == MANAGED_CHANGED ? changed_ : evicted_;
  }

  void counters(int64_t* out) const {
    const int64_t values[MANAGED_COUNTERS] = {in_use_, admitted_, evictions_, rejected_, overflowed_, expired_};
    std::copy(values, values + MANAGED_COUNTERS, out);
  }

 private:
  int64_t local_bucket(uint64_t hash) const { return bucket_of(hash, set_.bucket_bits) - set_.first_bucket; }
  void prefetch(int64_t id) const { __builtin_prefetch(&index_[hash_of(id) & mask_]); }

  int64_t row_of(int64_t id, uint64_t hash) const {
    if (id == NO_ID) return -1;
    for (std::size_t at = hash & mask_;; at = (at + 1) & mask_) {
      if (!index_[at]) return -1;
      if (is_.id[index_[at] - 1] == id) return int64_t(index_[at]) - 1;
    }
  }

  void put(int64_t row) {
    std::size_t at = hash_of(is_.id[row]) & mask_;
    while (index_[at]) at = (at + 1) & mask_;
    index_[at] = uint32_t(row + 1);
  }

  void erase(int64_t row) {
    std::size_t hole = hash_of(is_.id[row]) & mask_;
    while (index_[hole] != uint32_t(row + 1)) hole = (hole + 1) & mask_;
    // Entries behind the hole move up, unless they would come before their own first place.
    for (std::size_t at = (hole + 1) & mask_; index_[at]; at = (at + 1) & mask_) {
      const std::size_t home = hash_of(is_.id[index_[at] - 1]) & mask_;
      if (((at - home) & mask_) >= ((at - hole) & mask_)) index_[hole] = index_[at], hole = at;
    }
    index_[hole] = 0;
  }

  void remove(int64_t row) {
    erase(row);
    is_.id[row] = NO_ID, is_.used[row] = -1, is_.count[row] = 0;
    const auto bucket = std::size_t(row / set_.bucket_rows);
    ++free_[bucket];
    first_free_[bucket] = std::min(first_free_[bucket], row % set_.bucket_rows);
    reset_.push_back(row), changed_.push_back(row);
    --in_use_;
  }

  void insert(const NewId& one, int64_t row, int64_t step) {
    is_.id[row] = one.id, is_.used[row] = step, is_.count[row] = one.count;
    put(row);
    --free_[std::size_t(one.bucket)];
    changed_.push_back(row);
    ++in_use_, ++admitted_;
  }

  // Of every bucket once in ttl / SWEEPS steps.
  void sweep(int64_t step) {
    const int64_t period = std::max<int64_t>(1, set_.ttl / SWEEPS);
    for (int64_t bucket = 0; bucket < buckets_; ++bucket) {
      if ((set_.first_bucket + bucket) % period != step % period) continue;
      const int64_t end = (bucket + 1) * set_.bucket_rows;
      for (int64_t row = bucket * set_.bucket_rows; row < end; ++row)
        if (is_.id[row] != NO_ID && step - is_.used[row] > set_.ttl) {
          evicted_.push_back(is_.id[row]);
          remove(row);
          ++expired_;
        }
    }
  }

  // The new ids once each, by bucket, the most frequent first.
  void merge_new() {
    std::sort(new_.begin(), new_.end(), [](const NewId& a, const NewId& b) { return a.hash < b.hash; });
    std::size_t kept = 0;
    for (const NewId& one : new_)
      if (kept && new_[kept - 1].hash == one.hash)
        new_[kept - 1].count += one.count;
      else
        new_[kept++] = one;
    new_.resize(kept);
    std::sort(new_.begin(), new_.end(), [](const NewId& a, const NewId& b) { return a.key() < b.key(); });
  }

  void admit(std::size_t begin, std::size_t end, int64_t step) {
    admit_.clear();
    for (std::size_t i = begin; i < end; ++i)
      if (is_admitted(new_[i], step))
        admit_.push_back(new_[i]);
      else
        ++rejected_;
    const int64_t bucket = new_[begin].bucket, top = bucket * set_.bucket_rows;
    std::size_t next = 0;
    int64_t& free_row = first_free_[std::size_t(bucket)];
    for (; next < admit_.size() && free_[std::size_t(bucket)]; ++next) {
      while (is_.id[top + free_row] != NO_ID) ++free_row;
      insert(admit_[next], top + free_row, step);
    }
    for (; next < admit_.size(); ++next) {
      const int64_t row = next_victim(bucket, int64_t(admit_.size() - next), step);
      if (row < 0) break;
      evicted_.push_back(is_.id[row]);
      remove(row);
      ++evictions_;
      insert(admit_[next], row, step);
    }
    overflowed_ += int64_t(admit_.size() - next);
    victims_[std::size_t(bucket)].fresh = false;
  }

  bool is_admitted(const NewId& one, int64_t step) {
    int64_t slot = -1;
    if (set_.admit > 1 && one.count < set_.admit) {
      slot = one.bucket * set_.bucket_rows + int64_t((one.hash & 0xffffffff) % uint64_t(set_.bucket_rows));
      int64_t &candidate = is_.candidate[slot], &seen = is_.seen[slot];
      changed_.push_back(slot);
      if (candidate == one.id) {
        seen += one.count;
      } else {
        seen -= one.count;
        if (seen > 0) return false;
        candidate = one.id, seen = one.count;
      }
      if (seen < set_.admit) return false;
    }
    const uint64_t draw = mixed(one.hash ^ mixed(set_.seed ^ mixed(uint64_t(step))));
    if (set_.threshold != ~uint64_t(0) && draw >= set_.threshold) return false;
    if (slot >= 0) is_.candidate[slot] = NO_ID, is_.seen[slot] = 0;
    return true;
  }

  struct Victims {
    std::vector<Victim> ordered;
    std::size_t next = 0;
    bool fresh = false;  // of this call
  };

  // The row to evict next, or -1 if all are used in this step. Recency only grows, so the victims that a scan has found
  // stay the first ones until they are used: `ordered` has an eighth of the bucket. Frequencies of new rows are small,
  // so with least_used the order holds for one call only.
  int64_t next_victim(int64_t bucket, int64_t wanted, int64_t step) {
    Victims& victims = victims_[std::size_t(bucket)];
    if (set_.least_used && !victims.fresh) victims.ordered.clear(), victims.next = 0;
    victims.fresh = true;
    for (int scans = 0; scans < 2; ++scans) {
      while (victims.next < victims.ordered.size()) {
        const Victim& one = victims.ordered[victims.next++];
        if (is_.id[one.row] != NO_ID && is_.used[one.row] == one.used) return one.row;
      }
      if (!scans) scan(bucket, std::max({wanted, set_.bucket_rows / 8, LEAST_VICTIMS}), step, victims);
    }
    return -1;
  }

  void scan(int64_t bucket, int64_t most, int64_t step, Victims& victims) {
    auto& ordered = victims.ordered;
    ordered.clear(), victims.next = 0;
    const int64_t end = (bucket + 1) * set_.bucket_rows;
    for (int64_t row = bucket * set_.bucket_rows; row < end; ++row)
      if (is_.id[row] != NO_ID && is_.used[row] < step)
        ordered.push_back({set_.least_used ? is_.count[row] : 0, is_.used[row], row});
    const auto before = [](const Victim& a, const Victim& b) { return a.key() < b.key(); };
    const auto kept = std::min(ordered.size(), std::size_t(most));
    std::partial_sort(ordered.begin(), ordered.begin() + std::ptrdiff_t(kept), ordered.end(), before);
    ordered.resize(kept);
  }

  const ManagedSettings set_;
  const ManagedRows is_;
  const int64_t buckets_;
  std::vector<uint32_t> index_;  // row + 1; 0: free
  std::size_t mask_ = 0;
  std::vector<int64_t> first_free_;  // by bucket: no row before it is free
  std::vector<int64_t> free_;
  std::vector<Victims> victims_;
  std::vector<NewId> new_, admit_;
  std::vector<int64_t> reset_, changed_, evicted_;
  int64_t swept_ = -1, in_use_ = 0;
  int64_t admitted_ = 0, evictions_ = 0, rejected_ = 0, overflowed_ = 0, expired_ = 0;
};

}  // namespace
}  // namespace rowwise_hashing

using rowwise_hashing::RowMap;

extern "C" {

void* managed_open(const ManagedSettings* settings, const ManagedRows* rows) {
  try {
    return new RowMap(*settings, *rows);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void managed_close(void* map) { delete static_cast<RowMap*>(map); }

void managed_find(const void* map, const int64_t* ids, int64_t n, int64_t* rows) {
  static_cast<const RowMap*>(map)->find(ids, n, rows);
}

int32_t managed_observe(void* map, const int64_t* ids, const int64_t* counts, int64_t n, int64_t step) {
  try {
    static_cast<RowMap*>(map)->observe(ids, counts, n, step);
  } catch (const std::bad_alloc&) {
    return MANAGED_MEMORY;
  }
  return MANAGED_OK;
}

int64_t managed_list(const void* map, int32_t which, int64_t* out) {
  const auto& list = static_cast<const RowMap*>(map)->list(which);
  if (out) std::copy(list.begin(), list.end(), out);
  return int64_t(list.size());
}

void managed_counters(const void* map, int64_t* out) { static_cast<const RowMap*>(map)->counters(out); }

void managed_buckets(const int64_t* ids, int64_t n, int64_t bucket_bits, int64_t* buckets) {
  for (int64_t i = 0; i < n; ++i)
    buckets[i] = rowwise_hashing::bucket_of(rowwise_hashing::hash_of(ids[i]), bucket_bits);
}
}
