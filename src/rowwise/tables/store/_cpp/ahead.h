// Rows of the next batches, read before they are needed into memory beside the cache.
//
// A copy is used only if its record still is the latest one when the row is needed; else the row is read again. So
// prefetching changes when a row is read, never its bits.
#pragma once
#include <algorithm>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "log.h"

namespace rowwise {

class Ahead {
 public:
  explicit Ahead(Log& log, const std::vector<TierTable>& tables) : log_(log), tables_(tables) {}

  struct Batch {
    std::vector<Log::Wanted> rows;  // by table and row; `index`: where in `bytes` the copy is
    std::vector<char> bytes;        // of each row: 1 once it was read, the row, its state
    int64_t job = 0;
  };
  struct Copy {
    const Batch* batch = nullptr;  // nullptr: none
    int64_t place = 0;
  };

  // Starts to read rows of a batch that are on the disk. The oldest batch is dropped when there are too many.
  void add(std::vector<Log::Wanted> rows) {
    std::sort(rows.begin(), rows.end(), by_row);
    const auto same = [](const auto& a, const auto& b) { return a.table == b.table && a.row == b.row; };
    rows.erase(std::unique(rows.begin(), rows.end(), same), rows.end());
    const auto unneeded = [this](Log::Wanted& one) {
      return find(one.table, one.row).batch || !log_.locate_on_disk(one);
    };
    rows.erase(std::remove_if(rows.begin(), rows.end(), unneeded), rows.end());
    const auto batch = std::make_shared<Batch>();
    int64_t bytes = 0;
    for (auto& one : rows)
      one.index = bytes, bytes += 1 + tables_[one.table].row_bytes + tables_[one.table].state_bytes;
    batch->rows = rows, batch->bytes.assign(std::size_t(bytes), 0);
    if (!rows.empty())  // the thread may be at a batch that was dropped
      batch->job = log_.read_behind(
          std::move(rows), [&tables = tables_, batch](const Log::Wanted& one, const char* row, const char* state) {
            char* const to = batch->bytes.data() + one.index;
            copy_bytes(to + 1, row, tables[one.table].row_bytes);
            copy_bytes(to + 1 + tables[one.table].row_bytes, state, tables[one.table].state_bytes);
            to[0] = 1;
          });
    batches_.push_front(batch);
    if (batches_.size() > MOST) batches_.pop_back();
  }

  // The copy of a row's latest record, which may still be on its way.
  Copy find(int64_t table, int64_t row) const {
    const Log::Wanted wanted{table, row, 0};
    for (const auto& batch : batches_) {
      const auto found = std::lower_bound(batch->rows.begin(), batch->rows.end(), wanted, by_row);
      if (found == batch->rows.end() || found->table != table || found->row != row || !log_.is_latest(*found)) continue;
      return {batch.get(), found - batch->rows.begin()};
    }
    return {};
  }

  // Waits for the copy, and calls f(row, state); false: it could not be read.
  template <class F>
  bool take(const Copy& copy, F f) {
    log_.wait_behind(copy.batch->job);
    const Log::Wanted& one = copy.batch->rows[copy.place];
    const char* const from = copy.batch->bytes.data() + one.index;
    if (!from[0]) return false;
    f(from + 1, from + 1 + tables_[one.table].row_bytes);
    return true;
  }

 private:
  static constexpr std::size_t MOST = 4;  // a batch that is looked up, two after it, and one to spare

  static bool by_row(const Log::Wanted& a, const Log::Wanted& b) {
    return a.table != b.table ? a.table < b.table : a.row < b.row;
  }

  Log& log_;
  const std::vector<TierTable>& tables_;
  std::deque<std::shared_ptr<Batch>> batches_;  // the latest first
};

}  // namespace rowwise
