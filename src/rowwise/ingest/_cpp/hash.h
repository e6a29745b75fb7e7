// 64-bit hashes, LANES ids at a time, and exact remainders.
//
// The hashes are those of mix.py and of torcharrow; saved models depend on every bit of them.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>  // vector extensions have no operator for 32 x 32 -> 64 bit products
#endif
#include <cstring>

#include "kernels.h"

#if !defined(ISA)
#error "compile the kernels with -DISA=<namespace>"
#endif
#if defined(__AVX512F__)
#define LANES 8
#elif defined(__AVX2__)
#define LANES 4
#else
#define LANES 1
#endif

namespace rowwise_ingest::ISA {

#if LANES == 1
typedef uint64_t Words;
typedef int64_t Signed;
#else
typedef uint64_t Words __attribute__((vector_size(LANES * 8)));
typedef int64_t Signed __attribute__((vector_size(LANES * 8)));
#endif

static inline Words load(const void* p) {
  Words x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
static inline void store(void* p, Words x) { std::memcpy(p, &x, sizeof x); }
static inline Words all(uint64_t x) { return x + Words{}; }

// The upper half of each 128-bit product.
#if LANES == 1
static inline Words high(Words a, Words b) { return uint64_t((unsigned __int128)(a)*b >> 64); }
#else
static inline Words halves(Words a, Words b) {  // product of the lower halves
#if LANES == 8
  return Words(_mm512_maskz_mul_epu32(0xFF, __m512i(a), __m512i(b)));  // gcc warns about the unmasked variant
#else
  return Words(_mm256_mul_epu32(__m256i(a), __m256i(b)));
#endif
}
static inline Words high(Words a, Words b) {
  const Words a1 = a >> 32, b1 = b >> 32;
  const Words middle = halves(a1, b) + (halves(a, b) >> 32);
  const Words other = halves(a, b1) + (middle & 0xFFFFFFFF);
  return halves(a1, b1) + (middle >> 32) + (other >> 32);
}
#endif

// splitmix64's, see mix.py.
static inline Words mix(Words x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// Thomas Wang's mix, then CityHash's 128-bit mix: folly's twang_mix64 and hash_combine(salt, ...) where std::hash of an
// integer is the identity, as in libstdc++. For salt 0, tests/ingest/test_encode_kernels.py pins the 16 results of
// torcharrow's own tests; for other salts this follows its sources, without a reference result.
static inline Words sigrid(Words x, Words salt) {
  const uint64_t factor = 0x9DDFEA08EB382D69;
  x = ~x + (x << 21);
  x ^= x >> 24;
  x = x + (x << 3) + (x << 8);
  x ^= x >> 14;
  x = x + (x << 2) + (x << 4);
  x ^= x >> 28;
  x += x << 31;
  Words a = (x ^ salt) * factor;
  a ^= a >> 47;
  Words b = (salt ^ a) * factor;
  b ^= b >> 47;
  return b * factor;
}

// Exact division of any word by rows, not a power of two: with l the bits of rows - 1, it is (x * M) >> (64 + l), where
// M = 2^64 + multiplier is 2^(64 + l) / rows rounded up. The sum below takes M's 65th bit without overflowing. Source:
// Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994.
struct Divisor {
  Words rows, multiplier;
  int shift;  // l - 1
  explicit Divisor(const Make& make) : rows(all(make.rows)), multiplier(all(make.multiplier)), shift(int(make.shift)) {}
  Words operator()(Words x) const {
    const Words part = high(x, multiplier);
    return (((x - part) >> 1) + part) >> shift;
  }
};

struct AsIs {
  explicit AsIs(const Make&) {}
  Words operator()(Words x) { return x; }
  bool bad() const { return false; }
};
struct Check {
  Words rows, outside{};
  explicit Check(const Make& make) : rows(all(make.rows)) {}
  Words operator()(Words x) {  // as unsigned words, negative ids are large
#if LANES == 1
    outside |= x >= rows;
#else
    outside |= Words(x >= rows);
#endif
    return x;
  }
  bool bad() const {
    const Words none{};
    return std::memcmp(&outside, &none, sizeof none) != 0;
  }
};
struct Masked {  // remainder by a power of two
  Words mask;
  explicit Masked(const Make& make) : mask(all(make.rows - 1)) {}
  Words operator()(Words x) const { return x & mask; }
  Words floored(Words x) const { return x & mask; }
};
struct Divided {
  Divisor divide;
  explicit Divided(const Make& make) : divide(make) {}
  Words operator()(Words x) const { return x - divide(x) * divide.rows; }
  Words floored(Words x) const {  // of signed x, with the quotient rounded towards minus infinity
    const Words sign = Words(Signed(x) >> 63);
    return x - (sign ^ divide(sign ^ x)) * divide.rows;
  }
};
template <class Rest>
struct Remainder {
  Rest rest;
  explicit Remainder(const Make& make) : rest(make) {}
  Words operator()(Words x) { return rest(x); }
  bool bad() const { return false; }
};
template <class Rest>
struct Hash {
  Rest rest;
  explicit Hash(const Make& make) : rest(make) {}
  Words operator()(Words x) { return rest(mix(x)); }
  bool bad() const { return false; }
};
template <class Rest>
struct Sigrid {
  Rest rest;
  Words salt;
  explicit Sigrid(const Make& make) : rest(make), salt(all(make.salt)) {}
  Words operator()(Words x) { return rest.floored(sigrid(x, salt)); }
  bool bad() const { return false; }
};

// Prefetch distance in ids. Hardware prefetchers stop at page borders; with slow memory, this makes sigrid_hash more
// than twice as fast.
constexpr int64_t FAR = 256;

// `in` and `out` may alias.
template <class F>
static inline void map_all(const int64_t* in, int64_t* out, int64_t count, F& make) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    __builtin_prefetch(in + i + FAR);
    store(out + i, make(load(in + i)));
  }
  if (i < count) {
    Words rest{};
    std::memcpy(&rest, in + i, size_t(count - i) * 8);
    rest = make(rest);
    std::memcpy(out + i, &rest, size_t(count - i) * 8);
  }
}

// Dispatches on `make.what`: calls `use` with the functor.
template <class Use>
static inline auto with(const Make& make, Use use) {
  const bool power = (make.rows & (make.rows - 1)) == 0;
  switch (make.what) {
    case CHECK:
      return use(Check(make));
    case REMAINDER:
      return power ? use(Remainder<Masked>(make)) : use(Remainder<Divided>(make));
    case HASH:
      return power ? use(Hash<Masked>(make)) : use(Hash<Divided>(make));
    case SIGRID:
      return power ? use(Sigrid<Masked>(make)) : use(Sigrid<Divided>(make));
    default:
      return use(AsIs(make));
  }
}

static int64_t map(const int64_t* in, int64_t* out, int64_t count, const Make& make) {
  return with(make, [&](auto f) {
    map_all(in, out, count, f);
    return int64_t(f.bad());
  });
}

// Not vectorised: the words of a string depend on each other, and out-of-order execution overlaps several strings.
static void text(const uint8_t* data, const int64_t* offsets, int64_t count, int64_t bytes, uint64_t* out) {
  auto mix1 = [](uint64_t x) {
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
  };
  for (int64_t n = 0; n < count; ++n) {
    int64_t at = offsets[n];
    const int64_t end = offsets[n + 1];
    uint64_t hash = mix1(uint64_t(end - at));
    for (; at < end; at += 8) {
      uint64_t word = 0;
      if (at + 8 <= bytes) {
        std::memcpy(&word, data + at, 8);
        if (end - at < 8) word &= ~uint64_t(0) >> (64 - (end - at) * 8);
      } else {
        std::memcpy(&word, data + at, size_t(end - at < 8 ? end - at : 8));
      }
      hash = mix1(hash ^ word);
    }
    out[n] = hash;
  }
}

}  // namespace rowwise_ingest::ISA
