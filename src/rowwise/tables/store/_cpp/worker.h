// A thread that does jobs one after the other, and a clock of the time in which a resource is busy.
#pragma once
#include <time.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

namespace rowwise {

inline double now_s() {  // as Python's time.perf_counter on Linux
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

// The thread starts with the first job. Jobs that have not begun when the worker ends are dropped.
class Worker {
 public:
  Worker() = default;
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  ~Worker() { stop(); }

  bool is_started() const { return thread_.joinable(); }
  int64_t add(std::function<void()> job) {  // the number of the job
    if (!is_started()) thread_ = std::thread([this] { work(); });
    const std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
    added_.notify_one();
    return ++count_;
  }
  double wait(int64_t job) {  // seconds until it was done
    std::unique_lock<std::mutex> lock(mutex_);
    if (done_ >= job) return 0;
    const double begin_s = now_s();
    finished_.wait(lock, [&] { return done_ >= job; });
    return now_s() - begin_s;
  }
  void stop() {
    if (!is_started()) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      added_.notify_one();
    }
    thread_.join();
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      added_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
      if (stopping_) return;
      std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      try {
        job();
      } catch (const std::bad_alloc&) {  // rows that were not read ahead are read when they are needed
      }
      job = nullptr;
      lock.lock();
      ++done_;
      finished_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable added_, finished_;
  std::deque<std::function<void()>> jobs_;
  int64_t count_ = 0, done_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

// Calls of any number of threads that overlap are one interval.
class BusyClock {
 public:
  static constexpr std::size_t MOST_INTERVALS = 4096;

  template <class F>
  auto run(F f) {
    enter();
    struct Leave {
      BusyClock* clock;
      ~Leave() { clock->leave(); }
    } const leave{this};
    return f();
  }
  double total_s() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return total_s_ + (inside_ ? now_s() - begin_s_ : 0);
  }
  template <class F>
  void each_since(double since_s, F f) {  // f(begin, end) of the latest intervals that end after it
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [begin_s, end_s] : intervals_)
      if (end_s > since_s) f(begin_s, end_s);
  }

 private:
  void enter() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!inside_++) begin_s_ = now_s();
  }
  void leave() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--inside_) return;
    const double end_s = now_s();
    total_s_ += end_s - begin_s_;
    if (intervals_.size() == MOST_INTERVALS) intervals_.pop_front();
    intervals_.emplace_back(begin_s_, end_s);
  }

  std::mutex mutex_;
  int64_t inside_ = 0;
  double begin_s_ = 0, total_s_ = 0;
  std::deque<std::pair<double, double>> intervals_;
};

}  // namespace rowwise
