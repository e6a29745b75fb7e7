// Words in memory that processes share: one publishes a number, others wait until it is there.
//
// Its own file because nothing here computes. What was written before `publish` is seen after `wait_for` (release and
// acquire). On Linux a waiter sleeps in the kernel (futex), which needs a syscall for each publish; elsewhere it polls.
#include "bind.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#include <time.h>
#include <unistd.h>

#include <climits>

namespace {

using namespace rowwise;

int64_t* word_of(const Tensor& words, int64_t index) {
  check_tensor(words, ScalarType::Long, "words");
  STD_TORCH_CHECK(index >= 0 && index < words.numel(), "rowwise: word ", index, " of ", words.numel());
  return const_cast<int64_t*>(words.const_data_ptr<int64_t>()) + index;
}

inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

#if defined(__linux__)
// The kernel compares 32 bits: the half of the word that changes with every number.
uint32_t* low_half(int64_t* word) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  return reinterpret_cast<uint32_t*>(word) + 1;
#else
  return reinterpret_cast<uint32_t*>(word);
#endif
}
#endif

// Until the word is no longer `seen`, or about that long.
void sleep_while(int64_t* word, int64_t seen, double most_s) {
#if defined(__linux__)
  const timespec t{time_t(most_s), long((most_s - double(time_t(most_s))) * 1e9)};
  syscall(SYS_futex, low_half(word), FUTEX_WAIT, uint32_t(seen), &t, nullptr, 0);
#else
  (void)word, (void)seen;
  usleep(useconds_t(1e6 * std::min(most_s, 50e-6)));
#endif
}

void publish(Tensor words, int64_t index, int64_t value) {
  int64_t* word = word_of(words, index);
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#if defined(__linux__)
  syscall(SYS_futex, low_half(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// Whether the word has come to `value` or more in time; looks `spins` times before it sleeps.
bool wait_for(const Tensor& words, int64_t index, int64_t value, int64_t spins, double timeout_s) {
  int64_t* word = word_of(words, index);
  int64_t seen;
  for (int64_t i = 0; (seen = __atomic_load_n(word, __ATOMIC_ACQUIRE)) < value && i < spins; ++i) relax();
  if (seen >= value) return true;
  for (const double end_s = now_s() + timeout_s; (seen = __atomic_load_n(word, __ATOMIC_ACQUIRE)) < value;) {
    const double left_s = end_s - now_s();
    if (left_s <= 0) return false;
    sleep_while(word, seen, left_s);
  }
  return true;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rowwise, m) {
  m.def("publish(Tensor(a!) words, int index, int value) -> ()");
  m.def("wait_for(Tensor words, int index, int value, int spins, float timeout_s) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(rowwise, CPU, m) {
  m.impl("publish", TORCH_BOX(&publish));
  m.impl("wait_for", TORCH_BOX(&wait_for));
}
