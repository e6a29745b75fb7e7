// Many small direct reads at once: io_uring, or threads with pread where the system refuses io_uring.
#pragma once
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "file.h"
#include "memory.h"

namespace rowwise {

constexpr int DEPTH = 256;  // reads in flight: a solid-state disk needs this many to reach its limit
constexpr int THREADS = 16;
constexpr int64_t WAKE = 32;  // reads that end until the caller is woken: cores have other work

struct Read {
  int64_t offset, bytes;
};

// Submission and completion rings of io_uring, by system calls: their library is not installed everywhere.
class Uring {
 public:
  // `one_thread`: the thread that makes it is the only one that uses it. Then completions interrupt no core.
  explicit Uring(bool one_thread) {
    constexpr uint32_t COOP = 1 << 8, SINGLE_ISSUER = 1 << 12, DEFER = 1 << 13;  // of Linux 5.19 and 6.1
    io_uring_params params{};
    for (const uint32_t flags : {one_thread ? SINGLE_ISSUER | DEFER : COOP, uint32_t(0)}) {
      params = io_uring_params{};
      params.flags = flags;
      fd_ = int(syscall(__NR_io_uring_setup, DEPTH, &params));
      if (fd_ >= 0 || errno != EINVAL) break;
    }
    if (fd_ < 0) return;
    sq_bytes_ = std::max(params.sq_off.array + params.sq_entries * sizeof(uint32_t),
                         params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    char* ring = (params.features & IORING_FEAT_SINGLE_MMAP) ? map(sq_bytes_, IORING_OFF_SQ_RING) : nullptr;
    char* entries = ring ? map(entries_bytes_, IORING_OFF_SQES) : nullptr;
    if (!ring || !entries) {
      if (ring) munmap(ring, sq_bytes_);
      close(fd_);
      fd_ = -1;
      return;
    }
    ring_ = ring, entries_ = reinterpret_cast<io_uring_sqe*>(entries);
    const auto word = [&](uint32_t offset) { return reinterpret_cast<uint32_t*>(ring + offset); };
    sq_tail_ = word(params.sq_off.tail), sq_array_ = word(params.sq_off.array);
    sq_mask_ = *word(params.sq_off.ring_mask), cq_mask_ = *word(params.cq_off.ring_mask);
    cq_head_ = word(params.cq_off.head), cq_tail_ = word(params.cq_off.tail);
    completions_ = reinterpret_cast<io_uring_cqe*>(ring + params.cq_off.cqes);
  }
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;
  ~Uring() {
    if (fd_ < 0) return;
    munmap(entries_, entries_bytes_);
    munmap(ring_, sq_bytes_);
    close(fd_);
  }
  bool works() const { return fd_ >= 0; }

  void add(int file, const Read& read, char* buffer, uint64_t tag) {
    const uint32_t tail = *sq_tail_, at = tail & sq_mask_;
    io_uring_sqe& entry = entries_[at];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = IORING_OP_READ, entry.fd = file, entry.user_data = tag;
    entry.addr = reinterpret_cast<uint64_t>(buffer), entry.len = uint32_t(read.bytes),
    entry.off = uint64_t(read.offset);
    sq_array_[at] = at;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
  }
  int submit_and_wait(unsigned submit, unsigned wait) {  // the number of submissions taken, or -errno
    for (;;) {
      const long taken = syscall(__NR_io_uring_enter, fd_, submit, wait, wait ? IORING_ENTER_GETEVENTS : 0, nullptr, 0);
      if (taken >= 0) return int(taken);
      if (errno != EINTR) return -errno;
    }
  }
  template <class F>
  int completed(F f) {  // f(tag, result) for each read that has ended
    uint32_t head = *cq_head_;
    const uint32_t tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
    const int count = int(tail - head);
    for (; head != tail; ++head) {
      const io_uring_cqe& entry = completions_[head & cq_mask_];
      f(entry.user_data, entry.res);
    }
    __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
    return count;
  }

 private:
  char* map(std::size_t bytes, int64_t offset) {
    void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, offset);
    return pages == MAP_FAILED ? nullptr : static_cast<char*>(pages);
  }
  int fd_ = -1;
  std::size_t sq_bytes_ = 0, entries_bytes_ = 0;
  char* ring_ = nullptr;
  io_uring_sqe* entries_ = nullptr;
  uint32_t *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  uint32_t sq_mask_ = 0, cq_mask_ = 0;
  io_uring_cqe* completions_ = nullptr;
};

class Reader {
 public:
  Reader(int64_t longest, bool uring, bool one_thread) : longest_(longest), buffers_(longest * DEPTH) {
    if (uring) uring_.reset(new Uring(one_thread));
    if (uring_ && !uring_->works()) uring_.reset();
  }
  bool uses_uring() const { return bool(uring_); }

  // done(index of the read, its bytes) for each, from any thread, in any order. Returns 0 or errno.
  int run(int file, const std::vector<Read>& reads, const std::function<void(int64_t, char*)>& done) {
    if (reads.empty()) return 0;
    return uring_ ? run_uring(file, reads, done) : run_threads(file, reads, done);
  }

 private:
  int run_uring(int file, const std::vector<Read>& reads, const std::function<void(int64_t, char*)>& done) {
    const int64_t count = int64_t(reads.size());
    std::vector<int> idle(DEPTH);
    for (int i = 0; i < DEPTH; ++i) idle[i] = DEPTH - 1 - i;
    std::vector<int64_t> read_of(DEPTH);
    int64_t next = 0, in_flight = 0;
    int failed = 0;
    unsigned added = 0;
    while ((next < count && !failed) || in_flight || added) {
      while (next < count && !failed && !idle.empty()) {
        const int place = idle.back();
        idle.pop_back();
        read_of[place] = next;
        uring_->add(file, reads[next++], buffers_.data() + place * longest_, uint64_t(place));
        ++added;
      }
      const int64_t wait = std::min(WAKE, in_flight + int64_t(added));
      const int taken = uring_->submit_and_wait(added, unsigned(wait));
      if (taken < 0 && taken != -EAGAIN && taken != -EBUSY) return -taken;
      if (taken > 0) added -= unsigned(taken), in_flight += taken;
      in_flight -= uring_->completed([&](uint64_t place, int result) {
        const Read& read = reads[read_of[place]];
        char* const buffer = buffers_.data() + int64_t(place) * longest_;
        int error = result < 0 ? -result : 0;
        if (!error && result < read.bytes) error = read_rest(file, read, buffer, result);
        if (error)
          failed = error;
        else if (!failed)
          done(read_of[place], buffer);
        idle.push_back(int(place));
      });
    }
    return failed;
  }

  int run_threads(int file, const std::vector<Read>& reads, const std::function<void(int64_t, char*)>& done) {
    const int64_t count = int64_t(reads.size());
    std::atomic<int64_t> next{0};
    std::atomic<int> failed{0};
    const auto work = [&](int thread) {
      char* const buffer = buffers_.data() + thread * longest_;
      for (int64_t i; !failed && (i = next++) < count;) {
        if (const int error = read_rest(file, reads[i], buffer, 0))
          failed = error;
        else
          done(i, buffer);
      }
    };
    std::vector<std::thread> threads;
    for (int i = 1; i < THREADS && i < count; ++i) threads.emplace_back(work, i);
    work(0);
    for (std::thread& thread : threads) thread.join();
    return failed;
  }

  static int read_rest(int file, const Read& read, char* buffer, int64_t have) {
    return read_fully(file, buffer + have, read.bytes - have, read.offset + have);
  }

  int64_t longest_;
  Buffer buffers_;
  std::unique_ptr<Uring> uring_;
};

}  // namespace rowwise
