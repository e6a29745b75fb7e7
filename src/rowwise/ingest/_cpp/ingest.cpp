// The C API of the library, and runtime dispatch: the widest instruction set of this processor is chosen once; tests
// may select a narrower one.
#include <atomic>
#include <cstring>

#include "kernels.h"
#include "repeats.h"

namespace rowwise_ingest {

namespace base {
extern const Kernels kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

namespace {

const Kernels* usable(int at) {  // narrowest first; null after the last
  if (at == 0) return &base::kernels;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("f16c");
  const bool widest = wide && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (at == 1 && wide) return &avx2::kernels;
  if (at == 2 && widest) return &avx512::kernels;
#endif
  return nullptr;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> choice{[] {
    int at = 0;
    while (usable(at + 1)) ++at;
    return usable(at);
  }()};
  return choice;
}

const Kernels& use() { return *chosen().load(std::memory_order_relaxed); }

// Computes the constants of division by `rows`, see hash.h.
Make ready(Make make) {
  if (make.rows < 2 || (make.rows & (make.rows - 1)) == 0) return make;
  const int bits = 64 - __builtin_clzll(make.rows - 1);
  const auto above = (static_cast<unsigned __int128>(1) << bits) - make.rows;
  make.multiplier = uint64_t((above << 64) / make.rows) + 1;
  make.shift = bits - 1;
  return make;
}

}  // namespace
}  // namespace rowwise_ingest

using namespace rowwise_ingest;
#define API extern "C" __attribute__((visibility("default")))

API const char* rw_ingest_isa() { return use().name; }
API int64_t rw_ingest_limit(const char* name) {  // 0 if this processor lacks it
  for (int at = 0; usable(at); ++at)
    if (std::strcmp(usable(at)->name, name) == 0) {
      chosen() = usable(at);
      return 1;
    }
  return 0;
}
API int64_t rw_count(const Ids* ids) { return use().count(*ids); }
API int64_t rw_bags(const Ids* ids, const Make* make, int64_t* out, int64_t* offsets, int64_t total, int64_t room) {
  return use().bags(*ids, ready(*make), out, offsets, total, room);
}
// Many features with one id per row; skips features without values.
API int64_t rw_singles(const Ids* ids, const Make* makes, int64_t features, const int64_t* order, int64_t rows,
                       int64_t* const* outs) {
  int64_t bad = 0;
  for (int64_t f = 0; f < features; ++f) {
    if (!ids[f].values) continue;
    Ids feature = ids[f];
    feature.order = order;
    feature.rows = rows;
    bad |= use().bags(feature, ready(makes[f]), outs[f], nullptr, rows, rows);
  }
  return bad;
}
API void rw_changes(const Ids* ids, uint8_t* begins) { Changes(*ids).mark(begins); }
API int64_t rw_map(const int64_t* in, int64_t* out, int64_t count, const Make* make) {
  return use().map(in, out, count, ready(*make));
}
API void rw_text(const uint8_t* data, const int64_t* offsets, int64_t count, int64_t bytes, uint64_t* out) {
  use().text(data, offsets, count, bytes, out);
}
API void rw_buckets32(const float* x, int64_t count, const float* borders, int64_t half, int64_t most, int64_t* out) {
  use().buckets32(x, count, borders, half, most, out);
}
API void rw_buckets64(const double* x, int64_t count, const double* borders, int64_t half, int64_t most, int64_t* out) {
  use().buckets64(x, count, borders, half, most, out);
}
API int64_t rw_fill(const Numbers* numbers, int64_t columns, const int64_t* order, int64_t begin, int64_t rows,
                    float* out) {
  return use().fill(numbers, columns, order, begin, rows, out);
}
API void rw_turn(const float* columns, int64_t count, int64_t rows, float* out) {
  use().turn(columns, count, rows, out);
}
