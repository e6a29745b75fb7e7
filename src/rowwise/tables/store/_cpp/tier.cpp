// A cache in memory over a log on disk: the functions of tier.h.
#include "tier.h"

#include <fcntl.h>

#include <string>
#include <system_error>

#include "ahead.h"
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
      : direct_(direct),
        tables_(tables),
        log_(file, segment_bytes, tables, uring),
        ahead_(log_, tables_),
        new_rows_(tables.size()) {
    for (const TierTable& table : tables_)
      caches_.emplace_back(new Cache(table.rows, table.slots, table.pinned_rows, table.pinned, table.overflow,
                                     table.policy == 1, table.slot_rows));
    for (std::size_t i = 0; i < tables_.size(); ++i) counters_.emplace_back(TIER_COUNTERS, 0);
  }

  const std::vector<NewRow>& new_rows(int64_t table) const { return new_rows_[table]; }
  Log& log() { return log_; }
  bool direct() const { return direct_; }

  // A call that failed may have left slots without their rows, so later ones fail too, unless it was undone.
  template <class F>
  void run(F f) {
    if (failure_.code != TIER_OK) throw failure_;
    if (is_elsewhere()) throw Failure{TIER_FORKED};
    try {
      f();
    } catch (const Failure& failure) {
      if (failure.code != TIER_BAD_ID && failure.code != TIER_TOO_SMALL) failure_ = failure;
      throw;
    }
  }

  // A process has no threads of the one that it was forked from.
  bool is_elsewhere() const { return log_.has_threads() && getpid() != process_; }

  void read_ahead(int64_t count, const TierSegment* segments) {
    for (int64_t i = 0; i < count; ++i) check_ids(segments[i]);
    std::vector<Log::Wanted> missing;
    for (int64_t i = 0; i < count; ++i)
      with_ids(segments[i], [&](const auto* ids, auto*) {
        const int64_t t = segments[i].table;
        for (int64_t k = 0; k < segments[i].count; ++k) {
          caches_[t]->prefetch(int64_t(ids[std::min(k + AHEAD, segments[i].count - 1)]));
          if (log_.has(t, ids[k]) && caches_[t]->find(ids[k]) == NONE) missing.push_back({t, int64_t(ids[k]), 0});
        }
      });
    ahead_.add(std::move(missing));
  }

  void pin(int64_t count, const TierSegment* segments, bool changes, bool counts) {
    for (int64_t i = 0; i < count; ++i) check_ids(segments[i]);
    for (auto& rows : new_rows_) rows.clear();
    for (auto& cache : caches_) cache->begin_batch();
    wanted_.clear(), copies_.clear(), marked_.clear();
    counters_before_ = counters_;
    try {
      for (int64_t i = 0; i < count; ++i) place_all(segments[i], changes, counts);
    } catch (const Failure& failure) {
      if (failure.code == TIER_TOO_SMALL) undo_places();
      throw;
    }
    read_wanted();
    for (const auto& [copy, missed] : copies_)
      if (!ahead_.take(copy, [&, &missed = missed](const char* row, const char* state) { fill(missed, row, state); }))
        wanted_.push_back(missed);
    read_wanted();  // copies that failed: a record is damaged, or its block was replaced while it was read
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
    log_.flush();
  }

  void forget(int64_t t) {
    caches_[t]->clear();
    log_.forget(t);
  }

  void read_counters(int64_t t, int64_t* values) const { std::copy(counters_[t].begin(), counters_[t].end(), values); }

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

  void fill(const Log::Wanted& one, const char* row, const char* state) const {
    copy_bytes(row_in(one.table, one.index), row, tables_[one.table].row_bytes);
    copy_bytes(state_in(one.table, one.index), state, tables_[one.table].state_bytes);
  }
  void read_wanted() {
    log_.read(wanted_, [&](const Log::Wanted& one, const char* row, const char* state) { fill(one, row, state); });
    wanted_.clear();
  }

  char* row_in(int64_t t, int64_t slot) const { return tables_[t].row_memory + slot * tables_[t].row_bytes; }
  char* state_in(int64_t t, int64_t slot) const { return tables_[t].state_memory + slot * tables_[t].state_bytes; }

  void write_back(int64_t t, int64_t row, int64_t slot) {
    log_.append(t, row, row_in(t, slot), state_in(t, slot));
    ++counters_[t][WRITES];
  }

  void place_all(const TierSegment& segment, bool changes, bool counts) {
    with_ids(segment, [&](const auto* ids, auto* slots) {
      for (int64_t k = 0; k < segment.count; ++k) {
        caches_[segment.table]->prefetch(int64_t(ids[std::min(k + AHEAD, segment.count - 1)]));
        slots[k] = std::decay_t<decltype(*slots)>(place(segment.table, int64_t(ids[k]), changes, counts));
      }
    });
  }

  // Empties the slots that have not got their rows yet. Rows that had to leave them are in the log.
  void undo_places() {
    for (const auto& [t, slot] : marked_) caches_[t]->mark_changed(slot, false);
    for (const Log::Wanted& one : wanted_) caches_[one.table]->empty(one.index);
    for (const auto& [copy, one] : copies_) caches_[one.table]->empty(one.index);
    for (int64_t t = 0; t < int64_t(tables_.size()); ++t) {
      for (const NewRow& one : new_rows_[t]) caches_[t]->empty(one.slot);
      new_rows_[t].clear();
      caches_[t]->end_batch([](int64_t, int64_t) {});  // the overflow has rows of this batch only
      for (const int counter : {HITS, MISSES, NEW_ROWS}) counters_[t][counter] = counters_before_[t][counter];
    }
  }

  int64_t place(int64_t t, int64_t row, bool changes, bool counts) {
    const Placed placed = caches_[t]->place(row, changes, counts);
    std::vector<int64_t>& counters = counters_[t];
    counters[HITS] += counts && placed.hit;
    counters[MISSES] += counts && !placed.hit;
    if (placed.marked) marked_.emplace_back(t, placed.slot);
    if (placed.hit) return placed.slot;
    if (placed.slot == NONE)
      throw Failure{TIER_TOO_SMALL, 0, t, row, tables_[t].slots + tables_[t].pinned + tables_[t].overflow};
    if (placed.victim != NONE) {
      ++counters[EVICTIONS];
      if (placed.victim_changed) write_back(t, placed.victim, placed.slot);
    }
    if (log_.has(t, row)) {
      const Log::Wanted missed{t, row, placed.slot};
      const Ahead::Copy copy = ahead_.find(t, row);
      if (copy.batch)
        copies_.emplace_back(copy, missed);
      else
        wanted_.push_back(missed);
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
  Ahead ahead_;
  std::vector<std::unique_ptr<Cache>> caches_;
  std::vector<std::vector<NewRow>> new_rows_;
  std::vector<std::vector<int64_t>> counters_, counters_before_;  // the latter: of the last call of `pin`
  std::vector<Log::Wanted> wanted_;  // by `place`: rows to read, and copies of rows that were read ahead
  std::vector<std::pair<Ahead::Copy, Log::Wanted>> copies_;
  std::vector<std::pair<int64_t, int64_t>> marked_;  // tables and slots that `place` has marked as changed
  pid_t process_ = getpid();
};

Tier& tier_of(void* tier) { return *static_cast<Tier*>(tier); }

template <class F>
void guarded(TierStatus* status, F f) {
  *status = TierStatus{};
  try {
    f();
  } catch (const Failure& failure) {
    *status = TierStatus{failure.code, failure.error, int32_t(failure.table), failure.row, failure.distinct};
  } catch (const std::system_error& error) {  // no thread could be started
    *status = TierStatus{TIER_IO, error.code().value(), 0, 0, 0};
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

void tier_close(void* tier) {
  if (!tier_of(tier).is_elsewhere()) delete static_cast<Tier*>(tier);  // else its threads cannot be waited for
}

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
void tier_io(void* tier, double* values) { tier_of(tier).log().read_counters(values); }
int64_t tier_busy(void* tier, double since_s, int64_t most, double* begins, double* ends) {
  int64_t count = 0;
  tier_of(tier).log().busy_clock().each_since(since_s, [&](double begin_s, double end_s) {
    if (count < most) begins[count] = begin_s, ends[count] = end_s, ++count;
  });
  return count;
}
int64_t tier_disk_bytes(void* tier) { return tier_of(tier).log().disk_bytes(); }
int32_t tier_is_direct(void* tier) { return tier_of(tier).direct(); }
int32_t tier_uses_uring(void* tier) { return tier_of(tier).log().uses_uring(); }
int32_t tier_file(void* tier) { return tier_of(tier).log().file(); }
