"""Processes whose wall clock is wrong by hours: a small library in C that is loaded before all others.

Its wall times are those of the machine plus CLOCK_SHIFT_s. Deadlines on the wall clock are handed on without the shift,
so that a wait takes as long as it should. Times that the kernel gives to files are those of the machine, as the times
of a file server are.
"""

import atexit
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift_s;
__attribute__((constructor)) static void read_shift(void) {
    const char *text = getenv("CLOCK_SHIFT_s");
    shift_s = text ? atol(text) : 0;
}
int clock_gettime(clockid_t clock, struct timespec *at) {
    int failed = (int)syscall(SYS_clock_gettime, clock, at);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI))
        at->tv_sec += shift_s;
    return failed;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    (void)zone;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
int timespec_get(struct timespec *at, int base) {
    return clock_gettime(CLOCK_REALTIME, at) ? 0 : base;
}
static struct timespec true_deadline(const struct timespec *at) {
    struct timespec deadline = *at;
    if (deadline.tv_sec > 1000000000) deadline.tv_sec -= shift_s; /* others count from the boot */
    return deadline;
}
static void *next(const char *name) {
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
    return found ? found : dlsym(RTLD_NEXT, name);
}
int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict at) {
    struct timespec deadline = true_deadline(at);
    return ((int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *))next("pthread_cond_timedwait"))(
        cond, mutex, &deadline);
}
int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict at) {
    struct timespec deadline = true_deadline(at);
    return ((int (*)(sem_t *, const struct timespec *))next("sem_timedwait"))(semaphore, &deadline);
}
int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict at) {
    struct timespec deadline = true_deadline(at);
    return ((int (*)(pthread_mutex_t *, const struct timespec *))next("pthread_mutex_timedlock"))(mutex, &deadline);
}
"""


def missing():
    """Why no clock can be shifted here; empty if one can."""
    return "" if shutil.which("cc") else "no C compiler"


@functools.cache
def _library():
    folder = Path(tempfile.mkdtemp(prefix="clocks-"))
    atexit.register(shutil.rmtree, folder)
    (folder / "clocks.c").write_text(SOURCE)
    done = subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", "-o", folder / "clocks.so", folder / "clocks.c", "-ldl"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "clocks.so"


def shifted(hours):
    """The variables of a process whose wall clock is ahead by so many hours, or behind."""
    return {"LD_PRELOAD": str(_library()), "CLOCK_SHIFT_s": str(round(hours * 3600))}
