// The C functions of the library, which choose the instruction set and distribute cells over threads. Threads do not
// depend on each other, so results are the same for any number of them.
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <system_error>
#include <thread>

#include "cell.h"
#include "kernels.h"
#include "survey.h"

namespace rowwise_hashing {

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

const Kernels* usable(int at) {  // narrowest first, then none
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

// Calls worker(0) to worker(things - 1), with a worker for each thread; returns 0 if memory ran out.
template <class MakeWorker>
int64_t share_out(int64_t things, int64_t threads, MakeWorker make) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  auto work = [&] {
    try {
      auto worker = make();
      for (int64_t thing; !failed && (thing = next++) < things;) worker(thing);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
  };
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < std::min(threads, things); ++i) others.emplace_back(work);
  } catch (const std::exception&) {  // go on with the threads that could be started
  }
  work();
  for (std::thread& other : others) other.join();
  return !failed;
}

}  // namespace
}  // namespace rowwise_hashing

using namespace rowwise_hashing;
#define API extern "C" __attribute__((visibility("default")))

API const char* rw_hashing_isa() { return use().name; }
API int64_t rw_hashing_limit(const char* name) {  // 0: this processor lacks the instruction set
  for (int at = 0; usable(at); ++at)
    if (std::strcmp(usable(at)->name, name) == 0) {
      chosen() = usable(at);
      return 1;
    }
  return 0;
}

// Cuts a range into `wanted` equal ranges, and draws one point from each.
API void rw_sample(const int32_t* order, int64_t count, int64_t wanted, uint64_t seed, int32_t* out) {
  for (int64_t i = 0; i < wanted; ++i) {
    const int64_t begin = int64_t(double(count) / double(wanted) * double(i));
    const int64_t end = i + 1 < wanted ? int64_t(double(count) / double(wanted) * double(i + 1)) : count;
    out[i] = order[begin + int64_t(share(mixed(seed), uint64_t(i)) * double(end - begin))];
  }
}

// The nearest centroid of each point of a range; centroids are scaled as the points are.
API int64_t rw_nearest(const Points* points, int64_t begin, int64_t end, const float* centroids, int64_t count,
                       int64_t threads, int32_t* at) {
  constexpr int64_t CHUNK = 64 * BLOCK;
  const int64_t dims = points->dims;
  return share_out((end - begin + CHUNK - 1) / CHUNK, threads, [&] {
    return [=, x = std::make_shared<Room<float>>(), best = std::make_shared<Room<float>>(),
            found = std::make_shared<Room<int32_t>>()](int64_t chunk) {
      const int64_t from = begin + chunk * CHUNK, n = std::min(CHUNK, end - from);
      float* to = x->of(CHUNK * dims);
      std::fill(to, to + CHUNK * dims, 0.0f);
      for (int64_t i = 0; i < n; ++i)
        for (int64_t d = 0; d < dims; ++d)
          to[i / BLOCK * BLOCK * dims + d * BLOCK + i % BLOCK] =
              float(double(points->x[int64_t(points->order[from + i]) * dims + d]) * points->scale);
      use().nearest(to, (n + BLOCK - 1) / BLOCK, dims, centroids, count, best->of(CHUNK), found->of(CHUNK));
      std::copy(found->of(CHUNK), found->of(CHUNK) + n, at + (from - begin));
    };
  });
}

// Sorts the points of a range by their numbers; `ends` are the ends of the points of each number in the output.
API void rw_sort(const int32_t* order, int64_t count, const int32_t* number, int64_t numbers, int32_t* out,
                 int64_t* ends) {
  std::fill(ends, ends + numbers, 0);
  for (int64_t i = 0; i < count; ++i) ++ends[number[i]];
  int64_t begin = 0;
  for (int64_t k = 0; k < numbers; ++k) {
    const int64_t mine = ends[k];
    ends[k] = begin;
    begin += mine;
  }
  for (int64_t i = 0; i < count; ++i) out[ends[number[i]]++] = order[i];
}

API int64_t rw_survey(const Points* points, const Cell* cells, int64_t count, double cap, int64_t threads,
                      Survey* out) {
  return share_out(count, threads, [&] {
    return [=, runs = std::make_shared<Runs>()](int64_t c) { out[c] = survey(*points, cells[c], cap, *runs); };
  });
}

// Writes one point for each distinct vector of a range; returns their number.
API int64_t rw_distinct(const Points* points, int64_t begin, int64_t end, int32_t* out) {
  try {
    Runs runs;
    runs.sort(*points, begin, end);
    return runs.firsts(out);
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

API int64_t rw_drops(const Points* points, const Cell* cells, int64_t count, const How* how, int64_t threads,
                     double* out) {
  return share_out(count, threads, [&] {
    return [=, work = std::make_shared<CellWork>(use(), *points, *how)](int64_t c) {
      work->drops(cells[c], out + cells[c].base);
    };
  });
}

// `distinct`: of each cell, its distinct vectors. Without a cap, as many clusters mean one for each distinct vector.
API int64_t rw_cells(const Points* points, const Cell* cells, const int64_t* distinct, int64_t count, const How* how,
                     int64_t threads, const Out* out) {
  return share_out(count, threads, [&] {
    return [=, runs = std::make_shared<Runs>(), work = std::make_shared<CellWork>(use(), *points, *how)](int64_t c) {
      if (cells[c].clusters < distinct[c] || how->cap < std::numeric_limits<double>::infinity()) {
        work->run(cells[c], out->used[c], *out);
      } else {
        runs->sort(*points, cells[c].begin, cells[c].end);
        out->used[c] = runs->write(cells[c], *out);
      }
    };
  });
}
