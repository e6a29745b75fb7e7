// A cache in memory over a log on disk: the functions of tier.h.
#include "tier.h"

#include "cache.h"
#include "log.h"

namespace rowwise {
namespace {

struct NewRow {
  int64_t row, slot;
};

class Tier {
 public:
  Tier(int file, bool direct, int64_t segment_bytes, bool uring, const std::vector<TierTable>& tables)
      : direct_(direct), tables_(tables), log_(file, segment_bytes, tables, uring), new_rows_(tables.size()) {
    for (const TierTable& table : tables_)
      caches_.emplace_back(new Cache(table.rows, table.slots, table.overflow, table.policy == 1, table.slot_rows));
    for (std::size_t i = 0; i < tables_.size(); ++i) counters_.emplace_back(TIER_COUNTERS, 0);
  }

  const std::vector<NewRow>& new_rows(int64_t table) const { return new_rows_[table]; }
  Log& log() { return log_; }
  bool direct() const { return direct_; }

  // A call that failed may have left slots without their rows, so later ones fail too.
  template <class F>
  void run(F f) {
    if (failure_.code != TIER_OK) throw failure_;
    try {
      f();
    } catch (const Failure& failure) {
      if (failure.code != TIER_BAD_ID) failure_ = failure;
      throw;
    }
  }

  ~Tier() { wait_for_ahead(); }

  void read_ahead(int64_t count, const TierSegment* segments) {
    for (int64_t i = 0; i < count; ++i) check_ids(segments[i]);
    wait_for_ahead();
    ahead_.clear();
    for (int64_t i = 0; i < count; ++i)
      with_ids(segments[i], [&](const auto* ids, auto*) {
        const int64_t t = segments[i].table;
        for (int64_t k = 0; k < segments[i].count; ++k) {
          caches_[t]->prefetch(int64_t(ids[std::min(k + AHEAD, segments[i].count - 1)]));
          if (log_.has(t, ids[k]) && caches_[t]->find(ids[k]) == NONE) ahead_.push_back({t, int64_t(ids[k]), 0});
        }
      });
    std::sort(ahead_.begin(), ahead_.end(), by_row);
    const auto same = [](const auto& a, const auto& b) { return a.table == b.table && a.row == b.row; };
    ahead_.erase(std::unique(ahead_.begin(), ahead_.end(), same), ahead_.end());
    int64_t bytes = 0;
    for (auto& one : ahead_)
      one.index = bytes, bytes += 1 + tables_[one.table].row_bytes + tables_[one.table].state_bytes;
    ahead_bytes_.assign(std::size_t(bytes), 0);
    if (ahead_.empty()) return;
    thread_ = log_.read_behind(ahead_, [this](const Log::Wanted& one, const char* row, const char* state) {
      char* const to = ahead_bytes_.data() + one.index;
      to[0] = 1;
      copy_bytes(to + 1, row, tables_[one.table].row_bytes);
      copy_bytes(to + 1 + tables_[one.table].row_bytes, state, tables_[one.table].state_bytes);
    });
  }

  void pin(int64_t count, const TierSegment* segments, bool changes, bool counts) {
    for (int64_t i = 0; i < count; ++i) check_ids(segments[i]);
    if (counts && thread_.joinable()) {
      wait_for_ahead();
      std::sort(ahead_.begin(), ahead_.end(), by_row);
    }
    for (auto& rows : new_rows_) rows.clear();
    for (auto& cache : caches_) cache->begin_batch();
    wanted_.clear();
    for (int64_t i = 0; i < count; ++i)
      with_ids(segments[i], [&](const auto* ids, auto* slots) {
        const TierSegment& segment = segments[i];
        for (int64_t k = 0; k < segment.count; ++k) {
          caches_[segment.table]->prefetch(int64_t(ids[std::min(k + AHEAD, segment.count - 1)]));
          slots[k] = std::decay_t<decltype(*slots)>(place(segment.table, int64_t(ids[k]), changes, counts));
        }
      });
    log_.read(wanted_, [&](const Log::Wanted& one, const char* row, const char* state) {
      copy_bytes(row_in(one.table, one.index), row, tables_[one.table].row_bytes);
      copy_bytes(state_in(one.table, one.index), state, tables_[one.table].state_bytes);
    });
  }

  void unpin() {
    for (int64_t t = 0; t < int64_t(tables_.size()); ++t)
      caches_[t]->end_batch([&](int64_t row, int64_t slot) { write_back(t, row, slot); });
    log_.compact();
  }

  void read(int64_t t, const int64_t* rows, int64_t count, char* row_out, char* state_out, uint8_t* found) {
    const TierTable& table = tables_[t];
    std::vector<Log::Wanted> wanted;
    const auto copy = [&](int64_t i, const char* row, const char* state) {
      copy_bytes(row_out + i * table.row_bytes, row, table.row_bytes);
      copy_bytes(state_out + i * table.state_bytes, state, table.state_bytes);
    };
    for (int64_t i = 0; i < count; ++i) {
      const int64_t slot = caches_[t]->find(rows[i]);
      found[i] = slot != NONE || log_.has(t, rows[i]);
      if (slot != NONE)
        copy(i, row_in(t, slot), state_in(t, slot));
      else if (found[i])
        wanted.push_back({t, rows[i], i});
    }
    log_.read(wanted, [&](const Log::Wanted& one, const char* row, const char* state) { copy(one.index, row, state); });
  }

  void write(int64_t t, const int64_t* rows, int64_t count, const char* row, const char* state) {
    const TierTable& table = tables_[t];
    for (int64_t i = 0; i < count; ++i, row += table.row_bytes, state += table.state_bytes) {
      const int64_t slot = caches_[t]->find(rows[i]);
      if (slot != NONE) {
        copy_bytes(row_in(t, slot), row, table.row_bytes);
        copy_bytes(state_in(t, slot), state, table.state_bytes);
        caches_[t]->mark_changed(slot);
      } else {
        log_.append(t, rows[i], row, state);
      }
    }
    log_.compact();
  }

  void flush() {
    for (int64_t t = 0; t < int64_t(tables_.size()); ++t)
      caches_[t]->clean([&](int64_t row, int64_t slot) { write_back(t, row, slot); });
    log_.compact();
  }

  void forget(int64_t t) {
    caches_[t]->clear();
    log_.forget(t);
  }

  void read_counters(int64_t t, int64_t* values) const {
    std::copy(counters_[t].begin(), counters_[t].end(), values);
    values[BLOCK_READS] = log_.block_reads();
  }

 private:
  static constexpr int64_t AHEAD = 8;

  template <class F>
  static void with_ids(const TierSegment& segment, F f) {
    if (segment.wide)
      f(static_cast<const int64_t*>(segment.ids), static_cast<int64_t*>(segment.slots));
    else
      f(static_cast<const int32_t*>(segment.ids), static_cast<int32_t*>(segment.slots));
  }

  void check_ids(const TierSegment& segment) const {  // before anything changes
    const uint64_t rows = uint64_t(tables_[segment.table].rows);
    bool outside = false;
    with_ids(segment, [&](const auto* ids, auto*) {
      for (int64_t k = 0; k < segment.count; ++k) outside |= uint64_t(int64_t(ids[k])) >= rows;
    });
    if (outside) throw Failure{TIER_BAD_ID, 0, segment.table};
  }

  static bool by_row(const Log::Wanted& a, const Log::Wanted& b) {
    return a.table != b.table ? a.table < b.table : a.row < b.row;
  }

  void wait_for_ahead() {
    if (thread_.joinable()) thread_.join();
  }

  // Whether the row was read ahead and is still the latest; then it is in its slot now.
  bool take_ahead(int64_t t, int64_t row, int64_t slot) {
    if (ahead_.empty() || thread_.joinable()) return false;
    const Log::Wanted wanted{t, row, 0};
    const auto found = std::lower_bound(ahead_.begin(), ahead_.end(), wanted, by_row);
    if (found == ahead_.end() || found->table != t || found->row != row) return false;
    const char* const from = ahead_bytes_.data() + found->index;
    if (!from[0] || !log_.is_latest(*found)) return false;
    copy_bytes(row_in(t, slot), from + 1, tables_[t].row_bytes);
    copy_bytes(state_in(t, slot), from + 1 + tables_[t].row_bytes, tables_[t].state_bytes);
    return true;
  }

  char* row_in(int64_t t, int64_t slot) const { return tables_[t].row_memory + slot * tables_[t].row_bytes; }
  char* state_in(int64_t t, int64_t slot) const { return tables_[t].state_memory + slot * tables_[t].state_bytes; }

  void write_back(int64_t t, int64_t row, int64_t slot) {
    log_.append(t, row, row_in(t, slot), state_in(t, slot));
    ++counters_[t][WRITES];
  }

  int64_t place(int64_t t, int64_t row, bool changes, bool counts) {
    const Placed placed = caches_[t]->place(row, changes, counts);
    std::vector<int64_t>& counters = counters_[t];
    counters[HITS] += counts && placed.hit;
    counters[MISSES] += counts && !placed.hit;
    if (placed.hit) return placed.slot;
    if (placed.slot == NONE) throw Failure{TIER_TOO_SMALL, 0, t, row, tables_[t].slots + tables_[t].overflow};
    if (placed.victim != NONE) {
      ++counters[EVICTIONS];
      if (placed.victim_changed) write_back(t, placed.victim, placed.slot);
    }
    if (log_.has(t, row)) {
      if (!take_ahead(t, row, placed.slot)) wanted_.push_back({t, row, placed.slot});
    } else {
      new_rows_[t].push_back({row, placed.slot});
      ++counters[NEW_ROWS];
    }
    return placed.slot;
  }

  Failure failure_{TIER_OK};
  bool direct_;
  std::vector<TierTable> tables_;
  Log log_;
  std::vector<std::unique_ptr<Cache>> caches_;
  std::vector<std::vector<NewRow>> new_rows_;
  std::vector<std::vector<int64_t>> counters_;
  std::vector<Log::Wanted> wanted_, ahead_;  // those read ahead: `index` is where in the bytes
  std::vector<char> ahead_bytes_;
  std::thread thread_;
};

Tier& tier_of(void* tier) { return *static_cast<Tier*>(tier); }

template <class F>
void guarded(TierStatus* status, F f) {
  *status = TierStatus{};
  try {
    f();
  } catch (const Failure& failure) {
    *status = TierStatus{failure.code, failure.error, int32_t(failure.table), failure.row, failure.distinct};
  } catch (const std::bad_alloc&) {
    *status = TierStatus{TIER_MEMORY, 0, 0, 0, 0};
  }
}

// The descriptor of a file without a name in a folder.
int open_unnamed(const char* folder, bool direct) {
  const int flags = O_RDWR | O_CLOEXEC | (direct ? O_DIRECT : 0);
  int file = open(folder, flags | O_TMPFILE, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) return file;
  std::string name = std::string(folder) + "/rows.XXXXXX";  // a file system without unnamed files
  file = mkostemp(name.data(), flags & ~O_RDWR);
  if (file >= 0) unlink(name.c_str());
  return file;
}

}  // namespace
}  // namespace rowwise

using namespace rowwise;

void* tier_open(const char* path, int64_t segment_bytes, int32_t use_uring, int64_t count, const TierTable* tables,
                TierStatus* status) {
  void* made = nullptr;
  guarded(status, [&] {
    bool direct = true;
    int file = open_unnamed(path, true);
    if (file < 0 && errno == EINVAL) file = open_unnamed(path, direct = false);  // a file system in memory
    if (file < 0) throw Failure{TIER_IO, errno};
    try {
      made = new Tier(file, direct, segment_bytes, use_uring != 0, std::vector<TierTable>(tables, tables + count));
    } catch (...) {
      close(file);
      throw;
    }
  });
  return made;
}

void tier_close(void* tier) { delete static_cast<Tier*>(tier); }

void tier_pin(void* tier, int64_t count, const TierSegment* segments, int32_t changes, int32_t counts,
              TierStatus* status) {
  guarded(status, [&] { tier_of(tier).run([&] { tier_of(tier).pin(count, segments, changes != 0, counts != 0); }); });
}

int64_t tier_new_rows(void* tier, int64_t table, int64_t* rows, int64_t* slots) {
  const auto& made = tier_of(tier).new_rows(table);
  for (std::size_t i = 0; rows && i < made.size(); ++i) rows[i] = made[i].row, slots[i] = made[i].slot;
  return int64_t(made.size());
}

void tier_read_ahead(void* tier, int64_t count, const TierSegment* segments, TierStatus* status) {
  guarded(status, [&] { tier_of(tier).run([&] { tier_of(tier).read_ahead(count, segments); }); });
}

void tier_unpin(void* tier, TierStatus* status) {
  guarded(status, [&] { tier_of(tier).run([&] { tier_of(tier).unpin(); }); });
}

void tier_read(void* tier, int64_t table, const int64_t* rows, int64_t count, char* row_out, char* state_out,
               uint8_t* found, TierStatus* status) {
  guarded(status,
          [&] { tier_of(tier).run([&] { tier_of(tier).read(table, rows, count, row_out, state_out, found); }); });
}

void tier_write(void* tier, int64_t table, const int64_t* rows, int64_t count, const char* row_in, const char* state_in,
                TierStatus* status) {
  guarded(status, [&] { tier_of(tier).run([&] { tier_of(tier).write(table, rows, count, row_in, state_in); }); });
}

void tier_flush(void* tier, TierStatus* status) {
  guarded(status, [&] { tier_of(tier).run([&] { tier_of(tier).flush(); }); });
}

int64_t tier_written(void* tier, int64_t table, int64_t first, int64_t last, int64_t* rows) {
  int64_t count = 0;
  tier_of(tier).log().each_row(table, first, last, [&](int64_t row) {
    if (rows) rows[count] = row;
    ++count;
  });
  return count;
}

void tier_forget(void* tier, int64_t table) { tier_of(tier).forget(table); }
void tier_counters(void* tier, int64_t table, int64_t* values) { tier_of(tier).read_counters(table, values); }
int64_t tier_disk_bytes(void* tier) { return tier_of(tier).log().disk_bytes(); }
int32_t tier_is_direct(void* tier) { return tier_of(tier).direct(); }
int32_t tier_uses_uring(void* tier) { return tier_of(tier).log().uses_uring(); }
int32_t tier_file(void* tier) { return tier_of(tier).log().file(); }
