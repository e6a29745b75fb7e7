// What the fuzzers share: numbers out of bytes, checks, and how many inputs were more than refused.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define CHECK(what)                                                                  \
  do {                                                                               \
    if (!(what)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #what); \
      std::abort();                                                                  \
    }                                                                                \
  } while (0)

// Numbers of an input, as it gives them; the lowest ones after its end.
class Bytes {
 public:
  Bytes(const uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  bool empty() const { return !size_; }
  int64_t next(int64_t low, int64_t high) {  // one byte for up to 256 values, else two
    uint64_t value = byte();
    if (high - low > 255) value = value << 8 | byte();
    return low + int64_t(value % uint64_t(high - low + 1));
  }
  bool flip(int64_t one_in = 2) { return next(1, one_in) == one_in; }  // false after the end
  // Zero, small and large numbers, many of them equal; sums that were added to and taken from keep enough digits.
  double positive() {
    static const double scales[] = {1, 0, 1e-3, 1e3};
    const int64_t value = next(0, 63);
    return scales[value % 4] * double(1 + value / 4);
  }

 private:
  uint64_t byte() { return size_ ? (--size_, *data_++) : 0; }
  const uint8_t* data_;
  std::size_t size_;
};

// Counted from the start to the end of the process.
struct Rate {
  int64_t inputs = 0, taken = 0;
  ~Rate() {
    std::fprintf(stderr, "fuzz: %lld inputs, of which %.1f %% got past the first check\n", (long long)inputs,
                 inputs ? 100.0 * double(taken) / double(inputs) : 0.0);
  }
};
inline Rate& rate() {
  static Rate counted;
  return counted;
}

inline bool near(double a, double b, double share = 1e-6) {
  return a == b || std::fabs(a - b) <= share * std::fmax(std::fabs(a), std::fabs(b));
}
