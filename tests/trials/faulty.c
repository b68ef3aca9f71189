/* A disk that fails, for LD_PRELOAD. Once the file FAULTY_WHEN exists, what writes below the folder FAULTY_UNDER fails
   with the error number FAULTY_ERRNO; with FAULTY_SLEEP_S an fsync there takes that many seconds, and succeeds. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int begun(void) {
  const char *when = getenv("FAULTY_WHEN");
  return when && syscall(21 /* access */, when, F_OK) == 0;
}
static int below(const char *path) {
  const char *under = getenv("FAULTY_UNDER");
  char here[PATH_MAX];
  if (!under || !path) return 0;
  if (path[0] != '/') {
    if (!getcwd(here, sizeof here)) return 0;
    return !strncmp(here, under, strlen(under));
  }
  return !strncmp(path, under, strlen(under));
}
static int of(int fd) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return below(path);
}
static int fails(int there) {
  const char *number = getenv("FAULTY_ERRNO");
  if (!number || !there || !begun()) return 0;
  errno = atoi(number);
  return 1;
}
static int writes(int flags) { return flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC); }

#define OPEN(name)                                                   \
  int name(const char *path, int flags, ...) {                       \
    va_list more; va_start(more, flags);                             \
    mode_t mode = va_arg(more, int); va_end(more);                   \
    if (writes(flags) && fails(below(path))) return -1;              \
    return REAL(name)(path, flags, mode);                            \
  }
OPEN(open)
OPEN(open64)
#define OPENAT(name)                                                 \
  int name(int at, const char *path, int flags, ...) {               \
    va_list more; va_start(more, flags);                             \
    mode_t mode = va_arg(more, int); va_end(more);                   \
    if (writes(flags) && fails(below(path))) return -1;              \
    return REAL(name)(at, path, flags, mode);                        \
  }
OPENAT(openat)
OPENAT(openat64)
ssize_t write(int fd, const void *data, size_t size) { return fails(of(fd)) ? -1 : REAL(write)(fd, data, size); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return fails(of(fd)) ? -1 : REAL(pwrite)(fd, data, size, at); }
ssize_t writev(int fd, const struct iovec *data, int count) { return fails(of(fd)) ? -1 : REAL(writev)(fd, data, count); }
int mkdir(const char *path, mode_t mode) { return fails(below(path)) ? -1 : REAL(mkdir)(path, mode); }
int rename(const char *from, const char *to) { return fails(below(to)) ? -1 : REAL(rename)(from, to); }
int unlink(const char *path) { return fails(below(path)) ? -1 : REAL(unlink)(path); }
int rmdir(const char *path) { return fails(below(path)) ? -1 : REAL(rmdir)(path); }
int symlink(const char *to, const char *path) { return fails(below(path)) ? -1 : REAL(symlink)(to, path); }
int ftruncate(int fd, off_t size) { return fails(of(fd)) ? -1 : REAL(ftruncate)(fd, size); }
#define FSYNC(name)                                                  \
  int name(int fd) {                                                 \
    const char *seconds = getenv("FAULTY_SLEEP_S");                  \
    if (seconds && of(fd) && begun()) usleep(1e6 * atof(seconds));   \
    return fails(of(fd)) ? -1 : REAL(name)(fd);                      \
  }
FSYNC(fsync)
FSYNC(fdatasync)
