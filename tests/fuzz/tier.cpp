// A tier of rows beside a map: rows are pinned, changed, read, written, read ahead, flushed and forgotten. The log may
// be damaged on the way: then a call says so, or its rows are right.
#include "../../src/rowwise/tables/store/_cpp/tier.h"

#include <unistd.h>

#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "fuzz.h"

namespace {

struct Table {
  TierTable shape;
  std::vector<char> rows, state;
  std::vector<int64_t> slot_rows, pinned;
  std::map<int64_t, std::string> known;  // rows that were changed or written, with their state
  int64_t accesses = 0;

  int64_t record() const { return shape.row_bytes + shape.state_bytes; }
  std::string initial(int64_t row) const { return std::string(std::size_t(record()), char('a' + row % 26)); }
  std::string wanted(int64_t row) const {
    const auto found = known.find(row);
    return found == known.end() ? initial(row) : found->second;
  }
  std::string in_slot(int64_t slot) const {
    return std::string(rows.data() + slot * shape.row_bytes, std::size_t(shape.row_bytes)) +
           std::string(state.data() + slot * shape.state_bytes, std::size_t(shape.state_bytes));
  }
  void fill(int64_t slot, const std::string& value) {
    std::memcpy(rows.data() + slot * shape.row_bytes, value.data(), std::size_t(shape.row_bytes));
    std::memcpy(state.data() + slot * shape.state_bytes, value.data() + shape.row_bytes,
                std::size_t(shape.state_bytes));
  }
};

class Run {
 public:
  explicit Run(Bytes& bytes) : bytes_(bytes) {
    tables_.resize(std::size_t(bytes.next(1, 3)));
    std::vector<TierTable> shapes;
    for (Table& table : tables_) {
      TierTable& shape = table.shape;
      shape = TierTable{bytes.next(1, 300),
                        4 * bytes.next(1, 40),
                        4 * bytes.next(0, 40),
                        32 * bytes.next(1, 3),
                        bytes.next(0, 8),
                        bytes.flip() ? 1 : 0,
                        nullptr,
                        nullptr,
                        nullptr,
                        nullptr,
                        0};
      for (int64_t row = bytes.next(0, 8); row < shape.rows && !bytes.flip(8); row += 1 + bytes.next(0, 70))
        table.pinned.push_back(row);
      shape.pinned_rows = table.pinned.data(), shape.pinned = int64_t(table.pinned.size());
      if (bytes.flip()) shape.row_bytes *= 16;     // fills segments soon, which leave memory for the disk
      if (bytes.flip(8)) shape.row_bytes += 4100;  // a record longer than a block of the disk
      const std::size_t slots = std::size_t(shape.slots + shape.pinned + shape.overflow);
      table.rows.resize(slots * std::size_t(shape.row_bytes));
      table.state.resize(slots * std::size_t(shape.state_bytes) + 1);
      table.slot_rows.resize(slots);
      shape.row_memory = table.rows.data(), shape.state_memory = table.state.data();
      shape.slot_rows = table.slot_rows.data();
      shapes.push_back(shape);
    }
    const int64_t segment_bytes = bytes.next(0, 8) * 8192;
    tier_ = tier_open("/dev/shm", segment_bytes, bytes.flip(), int64_t(shapes.size()), shapes.data(), &status_);
    CHECK(tier_ && status_.code == TIER_OK);
  }
  ~Run() { tier_close(tier_); }

  bool pinned() const { return pinned_; }  // rows, at least once

  // One call; false: the tier has failed, as it may.
  bool step() {
    switch (bytes_.next(0, 9)) {
      default:
        return pin();
      case 3:
        return write();
      case 4:
        return read();
      case 5:
        return read_ahead();
      case 6:
        return flush();
      case 7:
        return forget();
      case 8:
        return bytes_.flip() ? damage() : pin();
      case 9:
        return count();
    }
  }

  // Everything that is known is there.
  void finish() {
    for (std::size_t t = 0; t < tables_.size(); ++t) {
      std::vector<int64_t> rows;
      for (int64_t row = 0; row < tables_[t].shape.rows; ++row) rows.push_back(row);
      if (!read_rows(t, rows)) return;
    }
  }

 private:
  struct Ids {
    std::size_t table;
    bool wide;
    std::vector<int64_t> ids;
    std::vector<int64_t> wide_slots;
    std::vector<int32_t> narrow_ids, narrow_slots;
    TierSegment segment() {
      if (wide) return {int64_t(table), 1, ids.data(), int64_t(ids.size()), wide_slots.data()};
      return {int64_t(table), 0, narrow_ids.data(), int64_t(ids.size()), narrow_slots.data()};
    }
    int64_t slot(std::size_t i) const { return wide ? wide_slots[i] : narrow_slots[i]; }
  };

  // Ids of some features; `good`: they are all inside of their tables.
  std::vector<Ids> draw(bool* good) {
    std::vector<Ids> drawn(std::size_t(bytes_.next(1, 3)));
    *good = true;
    for (Ids& one : drawn) {
      one.table = std::size_t(bytes_.next(0, int64_t(tables_.size()) - 1));
      one.wide = bytes_.flip();
      const int64_t rows = tables_[one.table].shape.rows, first = bytes_.next(0, rows - 1), step = bytes_.next(0, 3);
      const int64_t count = bytes_.flip(4) ? bytes_.next(0, 200) : bytes_.next(0, 20);
      for (int64_t i = 0; i < count; ++i)
        one.ids.push_back(step ? (first + step * i) % rows : bytes_.next(0, rows - 1));
      if (!one.ids.empty() && bytes_.flip(40)) {
        one.ids.back() = bytes_.flip() ? rows : -1;
        *good = false;
      }
      one.narrow_ids.assign(one.ids.begin(), one.ids.end());
      one.wide_slots.assign(one.ids.size(), -7), one.narrow_slots.assign(one.ids.size(), -7);
    }
    return drawn;
  }

  bool failed() {
    if (status_.code == TIER_OK) return false;
    CHECK(damaged_ && (status_.code == TIER_DAMAGED || status_.code == TIER_IO));
    const TierStatus before = status_;
    tier_unpin(tier_, &status_);
    CHECK(status_.code == before.code);  // and stays so
    return true;
  }

  bool pin() {
    bool good;
    std::vector<Ids> drawn = draw(&good);
    std::vector<TierSegment> segments;
    for (Ids& one : drawn) segments.push_back(one.segment());
    const bool changes = bytes_.flip(), counts = bytes_.flip();
    std::vector<std::set<int64_t>> distinct(tables_.size());
    for (const Ids& one : drawn) distinct[one.table].insert(one.ids.begin(), one.ids.end());
    tier_pin(tier_, int64_t(segments.size()), segments.data(), changes, counts, &status_);
    if (!good) {
      CHECK(status_.code == TIER_BAD_ID);
      for (const Ids& one : drawn)
        for (std::size_t i = 0; i < one.ids.size(); ++i) CHECK(one.slot(i) == -7);  // nothing has changed
      return true;
    }
    bool must_fail = false, may_fail = false;
    for (std::size_t t = 0; t < tables_.size(); ++t) {
      int64_t count = int64_t(distinct[t].size()), overflow = tables_[t].shape.overflow;
      for (const int64_t row : tables_[t].pinned) count -= int64_t(distinct[t].count(row));
      may_fail |= count > 32 + overflow;
      must_fail |= count > tables_[t].shape.slots + overflow;
    }
    if (status_.code == TIER_TOO_SMALL) {
      CHECK(may_fail);
      return true;  // it was undone
    }
    if (failed()) return false;
    CHECK(!must_fail);
    for (const Ids& one : drawn) pinned_ |= !one.ids.empty();
    for (std::size_t t = 0; t < tables_.size(); ++t) make_new_rows(t, distinct[t]);
    for (const Ids& one : drawn) {
      Table& table = tables_[one.table];
      table.accesses += counts ? int64_t(one.ids.size()) : 0;
      for (std::size_t i = 0; i < one.ids.size(); ++i) {
        const int64_t slot = one.slot(i);
        CHECK(slot >= 0 && slot < table.shape.slots + table.shape.pinned + table.shape.overflow);
        CHECK(table.slot_rows[std::size_t(slot)] == one.ids[i]);
        CHECK(table.in_slot(slot) == table.wanted(one.ids[i]));
      }
    }
    if (changes)
      for (const Ids& one : drawn)
        for (std::size_t i = 0; i < one.ids.size(); ++i) {
          Table& table = tables_[one.table];
          std::string value = table.wanted(one.ids[i]);
          if (i % 3) value[value.size() / 2] = char(++changes_);
          table.fill(one.slot(i), value);
          table.known[one.ids[i]] = value;
        }
    tier_unpin(tier_, &status_);
    return !failed();
  }

  void make_new_rows(std::size_t t, const std::set<int64_t>& batch) {
    Table& table = tables_[t];
    std::vector<int64_t> rows(std::size_t(tier_new_rows(tier_, int64_t(t), nullptr, nullptr))), slots(rows.size());
    tier_new_rows(tier_, int64_t(t), rows.data(), slots.data());
    CHECK(std::set<int64_t>(rows.begin(), rows.end()).size() == rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      CHECK(batch.count(rows[i]) && !table.known.count(rows[i]));
      CHECK(table.slot_rows[std::size_t(slots[i])] == rows[i]);
      table.fill(slots[i], table.initial(rows[i]));
    }
  }

  std::vector<int64_t> draw_rows(std::size_t t) {
    std::vector<int64_t> rows(std::size_t(bytes_.next(0, 60)));
    for (int64_t& row : rows) row = bytes_.next(0, tables_[t].shape.rows - 1);
    return rows;
  }

  bool write() {
    const std::size_t t = std::size_t(bytes_.next(0, int64_t(tables_.size()) - 1));
    Table& table = tables_[t];
    const std::vector<int64_t> rows = draw_rows(t);
    std::string values, state;
    for (const int64_t row : rows) {
      const std::string value(std::size_t(table.record()), char(++changes_));
      values += value.substr(0, std::size_t(table.shape.row_bytes));
      state += value.substr(std::size_t(table.shape.row_bytes));
      table.known[row] = value;
    }
    tier_write(tier_, int64_t(t), rows.data(), int64_t(rows.size()), values.data(), state.data(), &status_);
    return !failed();
  }

  bool read() {
    const std::size_t t = std::size_t(bytes_.next(0, int64_t(tables_.size()) - 1));
    return read_rows(t, draw_rows(t));
  }

  bool read_rows(std::size_t t, const std::vector<int64_t>& rows) {
    const Table& table = tables_[t];
    std::string values(rows.size() * std::size_t(table.shape.row_bytes), 0);
    std::string state(rows.size() * std::size_t(table.shape.state_bytes), 0);
    std::vector<uint8_t> found(rows.size() + 1);
    tier_read(tier_, int64_t(t), rows.data(), int64_t(rows.size()), &values[0], &state[0], found.data(), &status_);
    if (failed()) return false;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::string got =
          values.substr(i * std::size_t(table.shape.row_bytes), std::size_t(table.shape.row_bytes)) +
          state.substr(i * std::size_t(table.shape.state_bytes), std::size_t(table.shape.state_bytes));
      CHECK(found[i] ? got == table.wanted(rows[i]) : !table.known.count(rows[i]));
    }
    return true;
  }

  bool read_ahead() {
    bool good;
    std::vector<Ids> drawn = draw(&good);
    std::vector<TierSegment> segments;
    for (Ids& one : drawn) segments.push_back(one.segment());
    tier_read_ahead(tier_, int64_t(segments.size()), segments.data(), &status_);
    if (good) return !failed();
    CHECK(status_.code == TIER_BAD_ID);
    return true;
  }

  bool flush() {
    tier_flush(tier_, &status_);
    if (failed()) return false;
    for (std::size_t t = 0; t < tables_.size(); ++t) {
      const Table& table = tables_[t];
      std::vector<int64_t> rows(std::size_t(tier_written(tier_, int64_t(t), 0, table.shape.rows, nullptr)));
      tier_written(tier_, int64_t(t), 0, table.shape.rows, rows.data());
      std::vector<int64_t> known;
      for (const auto& one : table.known) known.push_back(one.first);
      CHECK(rows == known);
    }
    return true;
  }

  bool forget() {
    const std::size_t t = std::size_t(bytes_.next(0, int64_t(tables_.size()) - 1));
    tier_forget(tier_, int64_t(t));
    tables_[t].known.clear();
    return true;
  }

  bool damage() {
    const int file = tier_file(tier_);
    const off_t size = lseek(file, 0, SEEK_END);
    if (size <= 0) return true;
    damaged_ = true;
    if (bytes_.flip(4)) {
      CHECK(!ftruncate(file, bytes_.next(0, 65535) % size));
    } else {
      const off_t at = bytes_.next(0, 65535) * 37 % size;
      uint8_t byte = 0;
      CHECK(pread(file, &byte, 1, at) == 1);
      byte = uint8_t(byte ^ bytes_.next(1, 255));
      CHECK(pwrite(file, &byte, 1, at) == 1);
    }
    return true;
  }

  bool count() {
    double io[IO_BUSY_S + 1], begins[4], ends[4];
    tier_io(tier_, io);
    for (const double value : io) CHECK(value >= 0);
    for (int64_t i = tier_busy(tier_, 0, 4, begins, ends); i-- > 0;) CHECK(begins[i] <= ends[i]);
    for (std::size_t t = 0; t < tables_.size(); ++t) {
      int64_t values[TIER_COUNTERS];
      tier_counters(tier_, int64_t(t), values);
      CHECK(values[HITS] + values[MISSES] == tables_[t].accesses);
    }
    CHECK(tier_disk_bytes(tier_) >= 0);
    return true;
  }

  Bytes& bytes_;
  std::vector<Table> tables_;
  void* tier_ = nullptr;
  TierStatus status_{};
  bool damaged_ = false, pinned_ = false;
  uint8_t changes_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  Bytes bytes(data, size);
  Run run(bytes);
  bool works = true;
  for (int calls = 0; works && !bytes.empty() && calls < 200; ++calls) works = run.step();
  if (works) run.finish();
  ++rate().inputs;
  rate().taken += run.pinned();
  return 0;
}
