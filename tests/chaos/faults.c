// Faults of the disk and the clock, put between a process and the C library by LD_PRELOAD; see tests/chaos/faulty.py.
//
// FAULT_MODE  full: from the FAULT_AT-th write below FAULT_FOLDER on there is no room; of that one half is written.
//             kill: before its FAULT_AT-th change below FAULT_FOLDER the process dies; of a write half is done.
//             clock: the time of day jumps back and forth by an hour.
// FAULT_COUNT a file in which the changes are counted, also those of child processes (not where they are killed).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static int full, deadly, jumping;
static long at;
static char folder[4096];
static volatile long *count;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) void fault_arm(void) {
    const char *mode = getenv("FAULT_MODE"), *where = getenv("FAULT_FOLDER"), *counter = getenv("FAULT_COUNT");
    full = deadly = jumping = 0, count = NULL;
    if (!mode) return;
    jumping = !strcmp(mode, "clock");
    if (!where || !counter) return;
    at = atol(getenv("FAULT_AT"));
    strncpy(folder, where, sizeof folder - 1);
    int fd = REAL(open)(counter, O_RDWR);
    if (fd < 0) abort();
    count = mmap(NULL, sizeof(long), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    full = !strcmp(mode, "full"), deadly = !strcmp(mode, "kill");
}

static int inside(const char *path) { return path && !strncmp(path, folder, strlen(folder)); }

static int watched(int fd) {
    char link[64], path[4096];
    if (!count) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return inside(path);
}

static void die(void) { kill(getpid(), SIGKILL), pause(); }

// Counts a change that is no write; a full disk allows it.
static void change(int is_watched) {
    if (!count || full || !is_watched) return;
    if (__sync_add_and_fetch(count, 1) == at && deadly) die();
}

// How many bytes of a write there is room for.
static ssize_t room(int fd, size_t size) {
    if (!watched(fd)) return size;
    long number = __sync_add_and_fetch(count, 1);
    if (!(full || deadly) || number < at) return size;
    if (number == at) return size / 2;
    return full ? 0 : size;
}

#define WRITE(call, size)                                                                                              \
    ssize_t left = room(fd, size);                                                                                     \
    if (left == (ssize_t)(size)) return call(size);                                                                    \
    ssize_t done = left ? call(left) : 0;                                                                              \
    if (deadly) die();                                                                                                 \
    if (done > 0) return done;                                                                                         \
    errno = ENOSPC;                                                                                                    \
    return -1;

ssize_t write(int fd, const void *data, size_t size) {
#define CALL(n) REAL(write)(fd, data, n)
    WRITE(CALL, size)
#undef CALL
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
#define CALL(n) REAL(pwrite)(fd, data, n, offset)
    WRITE(CALL, size)
#undef CALL
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
#define CALL(n) REAL(pwrite64)(fd, data, n, offset)
    WRITE(CALL, size)
#undef CALL
}
ssize_t writev(int fd, const struct iovec *parts, int n) {
#define CALL(m) REAL(writev)(fd, parts, m)
    WRITE(CALL, n)
#undef CALL
}

#define OPEN(name, call)                                                                                               \
    mode_t mode = 0;                                                                                                   \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                                               \
        va_list rest;                                                                                                  \
        va_start(rest, flags), mode = va_arg(rest, int), va_end(rest);                                                 \
    }                                                                                                                  \
    if (flags & (O_CREAT | O_TRUNC)) change(inside(path));                                                             \
    return call;
int open(const char *path, int flags, ...) { OPEN(open, REAL(open)(path, flags, mode)) }
int open64(const char *path, int flags, ...) { OPEN(open64, REAL(open64)(path, flags, mode)) }
int openat(int at_fd, const char *path, int flags, ...) { OPEN(openat, REAL(openat)(at_fd, path, flags, mode)) }
int openat64(int at_fd, const char *path, int flags, ...) { OPEN(openat64, REAL(openat64)(at_fd, path, flags, mode)) }
int rename(const char *from, const char *to) { return change(inside(to)), REAL(rename)(from, to); }
int unlink(const char *path) { return change(inside(path)), REAL(unlink)(path); }
int unlinkat(int fd, const char *path, int flags) { return change(watched(fd) || inside(path)), REAL(unlinkat)(fd, path, flags); }
int rmdir(const char *path) { return change(inside(path)), REAL(rmdir)(path); }
int mkdir(const char *path, mode_t mode) { return change(inside(path)), REAL(mkdir)(path, mode); }
int ftruncate(int fd, off_t size) { return change(watched(fd)), REAL(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) { return change(watched(fd)), REAL(ftruncate64)(fd, size); }

static long hour(void) {
    static long calls;
    return jumping ? (__sync_add_and_fetch(&calls, 1) / 16 % 3 - 1) * 3600 : 0;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = REAL(clock_gettime)(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += hour();
    return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
    int failed = REAL(gettimeofday)(now, zone);
    now->tv_sec += hour();
    return failed;
}
