// Included before every source, so that what is built here runs wherever torch's own wheels do: with glibc 2.28 and the
// libstdc++ of GCC 8. What this compiler's headers use of later ones is replaced.
#include <features.h>
#ifdef __GLIBC__
#ifdef __x86_64__
#define FIRST_GLIBC "GLIBC_2.2.5"
#else
#define FIRST_GLIBC "GLIBC_2.17"
#endif
// The names of glibc 2.29 differ from these only in what they do on errors.
__asm__(".symver exp,exp@" FIRST_GLIBC);
__asm__(".symver log,log@" FIRST_GLIBC);
__asm__(".symver pow,pow@" FIRST_GLIBC);
#ifdef __cplusplus
// The name of GCC 12 differs from this in noexcept only.
#define CONDITION_WAIT "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE"
__asm__(".symver " CONDITION_WAIT "," CONDITION_WAIT "@GLIBCXX_3.4.11");
#include <cstddef>
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0  // string streams are compiled here
extern "C" {
// Since glibc 2.32 a process says whether it has one thread; references are counted without atomics then.
__attribute__((weak, visibility("hidden"))) char __libc_single_threaded = 0;
}
namespace std {
[[noreturn]] __attribute__((weak, visibility("hidden"))) void __throw_bad_array_new_length() { __builtin_abort(); }
}  // namespace std
#endif
#endif
