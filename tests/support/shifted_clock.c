/* Preloaded: the process's wall clock is off by the number of seconds in the file SHIFTED_CLOCK (a double, which may
 * change while the process runs). The monotonic clocks are left alone, as by a step of a real clock.
 *
 * Also the futex calls of gRPC are shifted: it waits until a time of the wall clock, which the kernel reads itself. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile double *offset;

__attribute__((constructor)) static void open_offset(void) {
    const char *path = getenv("SHIFTED_CLOCK");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) offset = mapped;
}

static void shift(struct timespec *at, double seconds) {
    double whole = floor(seconds);
    at->tv_sec += (time_t)whole;
    at->tv_nsec += (long)((seconds - whole) * 1e9);
    if (at->tv_nsec >= 1000000000L) { at->tv_nsec -= 1000000000L; at->tv_sec++; }
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, at);
    if (!failed && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) shift(at, *offset);
    return failed;
}

int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
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

long syscall(long number, ...) {
    static long (*real)(long, ...);
    if (!real) real = dlsym(RTLD_NEXT, "syscall");
    va_list rest;
    long a[6];
    va_start(rest, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);
    va_end(rest);
    struct timespec until;
    if (number == SYS_futex && offset && (a[1] & FUTEX_CLOCK_REALTIME) && a[3]) {
        until = *(struct timespec *)a[3];
        shift(&until, -*offset);
        if (until.tv_sec < 0) until.tv_sec = until.tv_nsec = 0;
        a[3] = (long)&until;
    }
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
