// The buffers of segments: records go into one while a thread writes those before it.
//
// A segment is readable from its buffer until the buffer is needed again. So which rows are in memory depends on what
// was appended, and not on how fast the disk is.
#pragma once
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <vector>

#include "memory.h"
#include "reader.h"
#include "tier.h"
#include "worker.h"

namespace rowwise {

constexpr int64_t NOWHERE = -1;

struct Failure {  // thrown; becomes a TierStatus
  TierCode code;
  int error = 0;
  int64_t table = 0, row = 0, distinct = 0;
};

class SegmentWriter {
 public:
  SegmentWriter(int file, int64_t segment_bytes) : file_(file), bytes_(segment_bytes), copied_(segment_bytes) {
    for (int i = 0; i < BUFFERS; ++i) held_.emplace_back(new Held(segment_bytes));
  }

  char* data() { return held_[open_]->buffer.data(); }
  void open(int64_t segment) { held_[open_]->segment = segment; }
  const char* find(int64_t segment) const {  // nullptr: it is on the disk only
    for (const auto& held : held_)
      if (held->segment == segment) return held->buffer.data();
    return nullptr;
  }

  // Starts to write the open segment, and opens the next buffer. The segment that was in it, which is written now.
  int64_t write() {
    Held& held = *held_[open_];
    held.job = worker_.add([this, &held] { held.error = put(held.buffer.data(), held.segment * bytes_); });
    open_ = (open_ + 1) % BUFFERS;
    written_bytes_ += bytes_;
    return finish(*held_[open_]);
  }
  // Waits for a segment that is being written; NOWHERE: none is.
  int64_t drain() {
    for (int next = 1; next < BUFFERS; ++next) {
      Held& held = *held_[(open_ + next) % BUFFERS];
      if (held.segment != NOWHERE) return finish(held);
    }
    return NOWHERE;
  }

  // A segment is read to copy its records: `begin_copy`, and later `copy` waits for it.
  void begin_copy(int64_t segment) {
    copy_job_ =
        worker_.add([this, segment] { copy_error_ = read_fully(file_, copied_.data(), bytes_, segment * bytes_); });
  }
  const char* copy() {
    wait_s_ += worker_.wait(copy_job_);
    if (copy_error_) throw Failure{TIER_IO, copy_error_};
    return copied_.data();
  }

  double wait_s() const { return wait_s_; }
  int64_t written_bytes() const { return written_bytes_; }
  bool is_started() const { return worker_.is_started(); }
  void stop() { worker_.stop(); }

 private:
  static constexpr int BUFFERS = 3;  // one is filled, two wait for the disk
  struct Held {
    explicit Held(int64_t bytes) : buffer(bytes) {}
    Buffer buffer;
    int64_t segment = NOWHERE, job = 0;
    int error = 0;
  };

  int64_t finish(Held& held) {
    wait_s_ += worker_.wait(held.job);
    if (held.error) throw Failure{TIER_IO, held.error};
    return std::exchange(held.segment, NOWHERE);
  }
  int put(const char* from, int64_t at) const {
    for (int64_t done = 0; done < bytes_;) {
      const ssize_t wrote = pwrite(file_, from + done, std::size_t(bytes_ - done), at + done);
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote <= 0) return wrote ? errno : ENOSPC;
      done += wrote;
    }
    return 0;
  }

  int file_;
  int64_t bytes_;
  Buffer copied_;
  std::vector<std::unique_ptr<Held>> held_;
  int open_ = 0, copy_error_ = 0;
  int64_t copy_job_ = 0, written_bytes_ = 0;
  double wait_s_ = 0;
  Worker worker_;  // ends first
};

}  // namespace rowwise
