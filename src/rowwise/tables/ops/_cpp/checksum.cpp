// CRC-32 of bytes, the one that zlib computes, several times as fast where the processor multiplies without carry.
//
// Its own file because nothing here knows tables: it is what checkpoints are checked by. A message is a polynomial of
// which the remainder is wanted; 64 bytes at a time are multiplied by powers of x, reduced by the same divisor, to
// stand over the next 64. What is left in the end is 16 bytes with the same remainder, which a table divides.
#include "bind.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define ROWWISE_CARRYLESS __attribute__((target("pclmul,sse4.1")))
#endif

namespace {

using namespace rowwise;

constexpr uint32_t divisor = 0xEDB88320;  // reflected: the first bit of a byte is its lowest

struct Table {
  uint32_t of[256];
  Table() {
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int bit = 0; bit < 8; ++bit) c = c >> 1 ^ (c & 1 ? divisor : 0);
      of[i] = c;
    }
  }
};

uint32_t divide(uint32_t state, const uint8_t* data, int64_t n) {
  static const Table table;
  for (int64_t i = 0; i < n; ++i) state = state >> 8 ^ table.of[(state ^ data[i]) & 255];
  return state;
}

#if defined(ROWWISE_CARRYLESS)
ROWWISE_CARRYLESS inline __m128i load(const uint8_t* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

// `x`, moved over what stands at `next`; `powers` are those of x for its two halves.
ROWWISE_CARRYLESS inline __m128i fold(__m128i x, __m128i powers, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(x, powers, 0x00), high = _mm_clmulepi64_si128(x, powers, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

ROWWISE_CARRYLESS uint32_t divide_fast(uint32_t state, const uint8_t* data, int64_t n) {
  const __m128i by_64 = _mm_set_epi64x(0x1C6E41596, 0x154442BD4), by_16 = _mm_set_epi64x(0x0CCAA009E, 0x1751997D0);
  __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128(int(state)));
  __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
  int64_t at = 64;
  for (; at + 64 <= n; at += 64) {
    a = fold(a, by_64, load(data + at));
    b = fold(b, by_64, load(data + at + 16));
    c = fold(c, by_64, load(data + at + 32));
    d = fold(d, by_64, load(data + at + 48));
  }
  a = fold(fold(fold(a, by_16, b), by_16, c), by_16, d);
  for (; at + 16 <= n; at += 16) a = fold(a, by_16, load(data + at));
  uint8_t left[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(left), a);
  return divide(divide(0, left, 16), data + at, n - at);
}
#endif

// Continues from `start`, the checksum of the bytes before; -1 where this processor is no faster than zlib.
int64_t crc32(const Tensor& bytes, int64_t start) {
  check_tensor(bytes, ScalarType::Byte, "bytes");
#if defined(ROWWISE_CARRYLESS)
  static const bool fast = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  const uint8_t* data = bytes.const_data_ptr<uint8_t>();
  const uint32_t state = ~uint32_t(start);
  if (fast) return int64_t(~(bytes.numel() < 64 ? divide : divide_fast)(state, data, bytes.numel()));
#else
  (void)start;
#endif
  return -1;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rowwise, m) { m.def("crc32(Tensor bytes, int start) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(rowwise, CPU, m) { m.impl("crc32", TORCH_BOX(&crc32)); }
