// Rows on disk: a log of segments, an index of where each row's latest record is, and compaction.
//
// A segment is one large write. It consists of blocks of one table each; a block has a header and as many records as
// fit. A row that changes gets a new record; compaction copies the latest records out of the segment that has the
// fewest of them. The index is in memory and the file is unnamed: after a crash a run resumes from its checkpoint.
#pragma once
#include <unistd.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "reader.h"
#include "tier.h"
#include "worker.h"
#include "writer.h"

namespace rowwise {

struct BlockHeader {
  uint32_t table, count;
  uint64_t unused;
};

struct RecordEnd {  // behind the row and its state
  int64_t row;
  uint32_t table, sum;
};

// Each step is a bijection of the sum so far, so that any change of one word changes the result.
inline uint32_t checksum(const char* data, int64_t bytes, uint64_t sum) {
  uint64_t word;
  for (; bytes >= 8; data += 8, bytes -= 8) {
    std::memcpy(&word, data, 8);
    sum = (sum ^ word) * 0x9E3779B97F4A7C15ull;
    sum ^= sum >> 29;
  }
  word = 0;
  std::memcpy(&word, data, std::size_t(bytes));
  sum = (sum ^ word) * 0x9E3779B97F4A7C15ull;
  return uint32_t(sum ^ (sum >> 32));
}

class Log {
 public:
  Log(int file, int64_t segment_bytes, const std::vector<TierTable>& tables, bool uring)
      : file_(file), open_(tables.size()) {
    for (const TierTable& table : tables) {
      Records records{table.row_bytes, table.state_bytes};
      records.bytes = (table.row_bytes + table.state_bytes + 7) / 8 * 8 + int64_t(sizeof(RecordEnd));
      const int64_t least = records.bytes + int64_t(sizeof(BlockHeader));
      records.block_bytes = (least + BLOCK - 1) / BLOCK * BLOCK;
      records.per_block = (records.block_bytes - int64_t(sizeof(BlockHeader))) / records.bytes;
      longest_ = std::max(longest_, records.block_bytes);
      records_.push_back(records);
      index_.emplace_back(table.rows);
      live_.push_back(0);
    }
    // Open blocks are closed with their segment: many tables need longer segments.
    const int64_t least = std::max(segment_bytes, 4 * longest_ * int64_t(tables.size()));
    segment_bytes_ = (least + BLOCK - 1) / BLOCK * BLOCK;
    writer_.reset(new SegmentWriter(file, segment_bytes_));
    reader_.reset(new Reader(longest_, uring, false));
    begin_segment();
  }
  ~Log() {
    worker_.stop();
    writer_->stop();
    close(file_);
  }

  bool has(int64_t table, int64_t row) const { return index_[table][row] != 0; }
  bool has_threads() const { return worker_.is_started() || writer_->is_started(); }
  int64_t disk_bytes() const { return int64_t(segments_.size() - free_.size()) * segment_bytes_; }
  bool uses_uring() const { return reader_->uses_uring(); }
  int file() const { return file_; }

  void append(int64_t t, int64_t row, const char* values, const char* state) {
    Records& records = records_[t];
    Open& open = open_[t];
    if (open.at == NOWHERE || open.count == records.per_block) begin_block(t);
    char* const block = writer_->data() + open.at;
    char* const record = block + sizeof(BlockHeader) + open.count * records.bytes;
    copy_bytes(record, values, records.row_bytes);
    copy_bytes(record + records.row_bytes, state, records.state_bytes);
    const int64_t payload = records.payload();
    std::memset(record + records.row_bytes + records.state_bytes, 0,
                std::size_t(payload - records.row_bytes - records.state_bytes));
    RecordEnd end{row, uint32_t(t), 0};
    end.sum = checksum(record, payload, seed(t, row));
    std::memcpy(record + payload, &end, sizeof end);
    const int64_t block_number = (current_ * segment_bytes_ + open.at) / BLOCK;
    const int64_t location = block_number * records.per_block + open.count + 1;
    if (location > UINT32_MAX) throw Failure{TIER_LOG_FULL, 0, t, row};
    const BlockHeader header{uint32_t(t), uint32_t(++open.count), 0};
    std::memcpy(block, &header, sizeof header);
    release(t, row);
    index_[t][row] = uint32_t(location);
    segments_[current_].live += records.bytes;
    appended_ += records.bytes;
    ++live_[t];
  }

  struct Wanted {
    int64_t table, row;
    int64_t index;  // of the caller: a slot, or a place in a list
    uint32_t location = 0, generation = 0;
  };
  // f(wanted, row, state) for each; the pointers hold until f returns. From several threads at once.
  template <class F>
  void read(std::vector<Wanted>& wanted, F f) {
    for (Wanted& one : wanted) one.location = index_[one.table][one.row];
    sort_by_place(wanted);
    std::vector<Read> reads;
    std::vector<int64_t> begins;
    const int64_t count = int64_t(wanted.size());
    for (int64_t i = 0; i < count;) {
      const int64_t block = block_of(wanted[i]), offset = block * BLOCK, begin = i;
      const char* const segment = writer_->find(offset / segment_bytes_);
      for (; i < count && block_of(wanted[i]) == block; ++i)
        if (segment) deliver(wanted[i], segment + offset % segment_bytes_, f);
      if (segment) continue;
      reads.push_back({offset, records_[wanted[begin].table].block_bytes});
      begins.push_back(begin);
    }
    if (reads.empty()) return;
    count_reads(reads);
    std::atomic<int64_t> damaged{NOWHERE};
    const auto done = [&](int64_t read, char* block) {
      const int64_t number = reads[read].offset / BLOCK;
      for (int64_t i = begins[read]; i < count && block_of(wanted[i]) == number; ++i)
        if (!try_deliver(wanted[i], block, f)) damaged = i;
    };
    const double begin_s = now_s();
    const int error = busy_clock_.run([&] { return reader_->run(file_, reads, done); });
    wait_s_ += now_s() - begin_s;
    if (error) throw Failure{TIER_IO, error};
    if (damaged != NOWHERE) throw Failure{TIER_DAMAGED, 0, wanted[damaged].table, wanted[damaged].row};
  }

  // Where the latest record of a row is; false: in memory, or nowhere.
  bool locate_on_disk(Wanted& one) const {
    one.location = index_[one.table][one.row];
    if (!one.location || writer_->find(segment_of(one))) return false;
    one.generation = segments_[segment_of(one)].generation;
    return true;
  }
  bool is_latest(const Wanted& one) const {
    return index_[one.table][one.row] == one.location && segments_[segment_of(one)].generation == one.generation;
  }
  // Reads rows that were located, in the thread, while others are changed. `f` is called in it as by `read`, for the
  // rows whose records were found: those that were replaced meanwhile may be missing. The number of the job.
  template <class F>
  int64_t read_behind(std::vector<Wanted> wanted, F f) {
    sort_by_place(wanted);
    std::vector<Read> reads;
    std::vector<int64_t> begins;
    for (int64_t i = 0; i < int64_t(wanted.size()); ++i)
      if (!i || block_of(wanted[i]) != block_of(wanted[i - 1])) {
        reads.push_back({block_of(wanted[i]) * BLOCK, records_[wanted[i].table].block_bytes});
        begins.push_back(i);
      }
    begins.push_back(int64_t(wanted.size()));
    count_reads(reads);
    return worker_.add([this, wanted = std::move(wanted), f, reads = std::move(reads), begins = std::move(begins)] {
      const auto done = [&](int64_t read, char* block) {
        for (int64_t i = begins[read]; i < begins[read + 1]; ++i) try_deliver(wanted[i], block, f);
      };
      if (!behind_) behind_.reset(new Reader(longest_, reader_->uses_uring(), true));
      busy_clock_.run([&] { return behind_->run(file_, reads, done); });
    });
  }
  void wait_behind(int64_t job) { wait_s_ += worker_.wait(job); }

  // Keeps the file below about twice the bytes of the latest records.
  // Copies a multiple of the bytes appended since the last call, from a segment that was read in the meantime.
  void compact() {
    for (int64_t left = COPIES * std::exchange(appended_, 0);;) {
      if (busy_ == NOWHERE) {
        const int64_t excess = choose_segment();
        if (busy_ == NOWHERE) return;
        writer_->begin_copy(busy_);
        copied_ = 0;
        if (excess < FAR * segment_bytes_) return;
      }
      if (left <= 0) return;
      left -= copy_out(left);
    }
  }
  void flush() {
    for (int64_t segment; (segment = writer_->drain()) != NOWHERE;) end_write(segment);
  }

  // Of all reads and writes.
  void read_counters(double* values) {
    values[IO_READS] = double(reads_), values[IO_READ_BYTES] = double(read_bytes_);
    values[IO_WRITTEN_BYTES] = double(writer_->written_bytes());
    values[IO_READ_WAIT_S] = wait_s_, values[IO_WRITE_WAIT_S] = writer_->wait_s();
    values[IO_BUSY_S] = busy_clock_.total_s();
  }
  BusyClock& busy_clock() { return busy_clock_; }

  void forget(int64_t t) {
    for (int64_t row = 0; row < index_[t].size() && live_[t]; ++row) release(t, row);
    index_[t].clear();
  }

  template <class F>
  void each_row(int64_t t, int64_t first, int64_t last, F f) const {
    if (live_[t])
      for (int64_t row = first; row < last; ++row)
        if (index_[t][row]) f(row);
  }

 private:
  static constexpr int64_t COPIES = 4;  // bytes of segments to copy, for each byte appended: half of them are current
  static constexpr int64_t FAR = 4;     // segments too many until a call waits for one to be read
  struct Records {
    int64_t row_bytes, state_bytes;
    int64_t bytes = 0, block_bytes = 0, per_block = 0;
    int64_t payload() const { return bytes - int64_t(sizeof(RecordEnd)); }
  };
  struct Open {  // the block of a table that takes its next records
    int64_t at = NOWHERE, count = 0;
  };
  struct Segment {
    int64_t live = 0;  // bytes of latest records
    bool full = false;
    uint32_t generation = 0;  // number of reuses
  };

  static uint64_t seed(int64_t t, int64_t row) { return (uint64_t(t) << 48) ^ uint64_t(row) ^ 0x5bd1e9955bd1e995ull; }
  int64_t segment_of(const Wanted& one) const { return block_of(one) * BLOCK / segment_bytes_; }
  int64_t block_of(const Wanted& one) const { return (one.location - 1) / records_[one.table].per_block; }

  void sort_by_place(std::vector<Wanted>& wanted) const {
    std::sort(wanted.begin(), wanted.end(), [&](const Wanted& a, const Wanted& b) {
      const int64_t x = block_of(a), y = block_of(b);
      return x != y ? x < y : a.location < b.location;
    });
  }
  void count_reads(const std::vector<Read>& reads) {
    reads_ += int64_t(reads.size());
    for (const Read& read : reads) read_bytes_ += read.bytes;
  }

  // A row's old record, if it has one, is no longer its latest.
  void release(int64_t t, int64_t row) {
    const uint32_t location = index_[t][row];
    if (!location) return;
    const int64_t segment = (location - 1) / records_[t].per_block * BLOCK / segment_bytes_;
    segments_[segment].live -= records_[t].bytes;
    index_[t][row] = 0;
    --live_[t];
    if (!segments_[segment].live && segments_[segment].full && segment != busy_) free_segment(segment);
  }

  void free_segment(int64_t segment) {
    segments_[segment] = Segment{0, false, segments_[segment].generation + 1};
    free_.push_back(segment);
  }

  void begin_block(int64_t t) {
    const int64_t bytes = records_[t].block_bytes;
    if (next_ + bytes > segment_bytes_) write_segment();
    std::memset(writer_->data() + next_, 0, std::size_t(bytes));
    open_[t] = Open{next_, 0};
    next_ += bytes;
  }

  void begin_segment() {
    if (free_.empty()) {
      current_ = int64_t(segments_.size());
      segments_.emplace_back();
    } else {
      current_ = free_.back();
      free_.pop_back();
    }
    next_ = 0;
    writer_->open(current_);
    for (Open& open : open_) open = Open{};
  }

  void write_segment() {
    if (next_ < segment_bytes_) std::memset(writer_->data() + next_, 0, std::size_t(segment_bytes_ - next_));
    const int64_t written = writer_->write();
    if (written != NOWHERE) end_write(written);
    begin_segment();
  }
  void end_write(int64_t segment) {
    segments_[segment].full = true;
    if (!segments_[segment].live) free_segment(segment);
  }

  // Makes the segment with the fewest latest records `busy_` if the file is too large; returns the excess in bytes.
  int64_t choose_segment() {
    int64_t used = 0, live_bytes = 0, best = NOWHERE;
    for (int64_t s = 0; s < int64_t(segments_.size()); ++s) {
      if (!segments_[s].full) continue;
      ++used, live_bytes += segments_[s].live;
      if (best == NOWHERE || segments_[s].live < segments_[best].live) best = s;
    }
    const int64_t excess = used * segment_bytes_ - 2 * live_bytes - 4 * segment_bytes_;
    if (best != NOWHERE && excess > 0) busy_ = best;
    return excess;
  }

  // Appends the latest records of about `most` bytes of the busy segment's next blocks; returns the bytes done.
  int64_t copy_out(int64_t most) {
    const char* const data = writer_->copy();
    const int64_t begin = copied_;
    while (copied_ < segment_bytes_ && copied_ - begin < most) {
      BlockHeader header;
      std::memcpy(&header, data + copied_, sizeof header);
      if (!header.count) {  // the rest of the segment was not used
        copied_ = segment_bytes_;
        break;
      }
      if (header.table >= records_.size() || int64_t(header.count) > records_[header.table].per_block)
        throw Failure{TIER_DAMAGED, 0, NOWHERE, NOWHERE};
      copy_block(data + copied_, header, (busy_ * segment_bytes_ + copied_) / BLOCK);
      copied_ += records_[header.table].block_bytes;
    }
    const int64_t done = copied_ - begin;
    if (copied_ < segment_bytes_) return done;
    // What is counted as live here but was not found would be lost: a damaged header.
    if (segments_[busy_].live) throw Failure{TIER_DAMAGED, 0, NOWHERE, NOWHERE};
    free_segment(std::exchange(busy_, NOWHERE));
    return done;
  }
  void copy_block(const char* data, const BlockHeader& header, int64_t block) {
    const int64_t t = header.table, appended = appended_;
    const Records& records = records_[t];
    for (int64_t i = 0; i < int64_t(header.count); ++i) {
      const char* record = data + sizeof(BlockHeader) + i * records.bytes;
      RecordEnd end;
      std::memcpy(&end, record + records.payload(), sizeof end);
      if (end.row < 0 || end.row >= index_[t].size() || end.table != header.table)
        throw Failure{TIER_DAMAGED, 0, t, NOWHERE};
      if (index_[t][end.row] != uint32_t(block * records.per_block + i + 1)) continue;
      if (end.sum != checksum(record, records.payload(), seed(t, end.row))) throw Failure{TIER_DAMAGED, 0, t, end.row};
      append(t, end.row, record, record + records.row_bytes);
    }
    appended_ = appended;  // copies are no reason to copy more
  }

  template <class F>
  bool try_deliver(const Wanted& one, const char* block, F& f) const {
    const Records& records = records_[one.table];
    const int64_t place = (one.location - 1) % records.per_block;
    const char* record = block + sizeof(BlockHeader) + place * records.bytes;
    RecordEnd end;
    std::memcpy(&end, record + records.payload(), sizeof end);
    if (end.row != one.row || end.table != uint32_t(one.table) ||
        end.sum != checksum(record, records.payload(), seed(one.table, one.row)))
      return false;
    f(one, record, record + records.row_bytes);
    return true;
  }
  template <class F>
  void deliver(const Wanted& one, const char* block, F& f) const {
    if (!try_deliver(one, block, f)) throw Failure{TIER_DAMAGED, 0, one.table, one.row};
  }

  int file_;
  int64_t segment_bytes_ = 0, current_ = 0, next_ = 0, longest_ = BLOCK;
  int64_t busy_ = NOWHERE, copied_ = 0;  // the segment whose records are copied, and how far
  int64_t appended_ = 0, reads_ = 0, read_bytes_ = 0;
  double wait_s_ = 0;
  std::vector<Records> records_;
  std::vector<ZeroArray<uint32_t>> index_;  // where each row's latest record is, plus one; 0: it was never written
  std::vector<int64_t> live_;
  std::vector<Open> open_;
  std::vector<Segment> segments_;
  std::vector<int64_t> free_;
  std::unique_ptr<SegmentWriter> writer_;
  std::unique_ptr<Reader> reader_, behind_;  // the latter is the thread's
  BusyClock busy_clock_;                     // of reads
  Worker worker_;
};

}  // namespace rowwise
