/* Preloaded into a process: counts the calls that change files under a folder, and kills the process before the n-th. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static size_t folder_length;
static volatile long count, kill_at;
static unsigned delay_us;
static int told = -1;

/* Start to count. Called from Python; n = 0 kills never. */
void kill_at_call(const char *under, long n) {
    strncpy(folder, under, sizeof folder - 1);
    kill_at = n;
    count = 0;
    folder_length = strlen(folder);
}

/* Delay each counted call of the threads beside the first, so that their work is unfinished when the first goes on. */
void delay_threads(unsigned us) { delay_us = us; }

long calls_counted(void) { return count; }

/* Write a line "CALL PATH" for each call that is counted. */
void tell_calls(int fd) { told = fd; }

static void note_call(const char *call, const char *path) {
    char line[PATH_MAX + 64];
    if (!folder_length || strncmp(path, folder, folder_length)) return;
    if (delay_us && syscall(SYS_gettid) != getpid()) usleep(delay_us);
    if (told >= 0) syscall(SYS_write, told, line, snprintf(line, sizeof line, "%s %s\n", call, path + folder_length));
    if (__sync_add_and_fetch(&count, 1) == kill_at) kill(getpid(), SIGKILL);
}

static void note_call_fd(const char *call, int fd) {
    char link[64], path[PATH_MAX];
    if (!folder_length) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    note_call(call, path);
}

static void note_call_at(const char *call, int fd, const char *path) {
    char link[64], whole[2 * PATH_MAX];
    if (path[0] == '/' || fd == AT_FDCWD) { note_call(call, path); return; }
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, whole, PATH_MAX);
    if (length < 0) return;
    snprintf(whole + length, PATH_MAX, "/%s", path);
    note_call(call, whole);
}

#define note(path) note_call(__func__, path)
#define note_fd(fd) note_call_fd(__func__, fd)
#define note_at(fd, path) note_call_at(__func__, fd, path)

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *b, size_t n) { REAL(write); note_fd(fd); return real(fd, b, n); }
ssize_t writev(int fd, const struct iovec *v, int n) { REAL(writev); note_fd(fd); return real(fd, v, n); }
ssize_t pwrite(int fd, const void *b, size_t n, off_t o) { REAL(pwrite); note_fd(fd); return real(fd, b, n, o); }
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) { REAL(pwrite64); note_fd(fd); return real(fd, b, n, o); }
ssize_t pwritev(int fd, const struct iovec *v, int n, off_t o) { REAL(pwritev); note_fd(fd); return real(fd, v, n, o); }
ssize_t pwritev64(int fd, const struct iovec *v, int n, off64_t o) { REAL(pwritev64); note_fd(fd); return real(fd, v, n, o); }
int fsync(int fd) { REAL(fsync); note_fd(fd); return real(fd); }
int fdatasync(int fd) { REAL(fdatasync); note_fd(fd); return real(fd); }
int ftruncate(int fd, off_t n) { REAL(ftruncate); note_fd(fd); return real(fd, n); }
int ftruncate64(int fd, off64_t n) { REAL(ftruncate64); note_fd(fd); return real(fd, n); }
int truncate(const char *p, off_t n) { REAL(truncate); note(p); return real(p, n); }
int truncate64(const char *p, off64_t n) { REAL(truncate64); note(p); return real(p, n); }
int posix_fallocate(int fd, off_t o, off_t n) { REAL(posix_fallocate); note_fd(fd); return real(fd, o, n); }
int posix_fallocate64(int fd, off64_t o, off64_t n) { REAL(posix_fallocate64); note_fd(fd); return real(fd, o, n); }
int rename(const char *a, const char *b) { REAL(rename); note(b); return real(a, b); }
int renameat(int x, const char *a, int y, const char *b) { REAL(renameat); note_at(y, b); return real(x, a, y, b); }
int unlink(const char *p) { REAL(unlink); note(p); return real(p); }
int unlinkat(int fd, const char *p, int f) { REAL(unlinkat); note_at(fd, p); return real(fd, p, f); }
int rmdir(const char *p) { REAL(rmdir); note(p); return real(p); }
int mkdir(const char *p, mode_t m) { REAL(mkdir); note(p); return real(p, m); }
int mkdirat(int fd, const char *p, mode_t m) { REAL(mkdirat); note_at(fd, p); return real(fd, p, m); }
int link(const char *a, const char *b) { REAL(link); note(b); return real(a, b); }
int chmod(const char *p, mode_t m) { REAL(chmod); note(p); return real(p, m); }

#define OPEN(name) \
    int name(const char *p, int f, ...) { \
        va_list rest; va_start(rest, f); mode_t m = f & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; va_end(rest); \
        REAL(name); if (f & (O_CREAT | O_TRUNC)) note(p); return real(p, f, m); }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int fd, const char *p, int f, ...) { \
        va_list rest; va_start(rest, f); mode_t m = f & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; va_end(rest); \
        REAL(name); if (f & (O_CREAT | O_TRUNC)) note_at(fd, p); return real(fd, p, f, m); }
OPENAT(openat)
OPENAT(openat64)
