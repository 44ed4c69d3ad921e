/* Counts what a process writes below one folder, and lets one operation fail, or the process die there.
 *
 * Preloaded (LD_PRELOAD) it stands between every library of the process and the system, so that it does not matter who
 * opens, writes, syncs, renames or removes, and by which function. Until it is armed it only passes calls on.
 *
 * faults_arm(root, kinds, at, how, log): operations of these kinds below root are counted from 0; the one of number
 * `at` fails with the error number `how`, and where LASTING is in kinds so do all later ones. KILL_BEFORE and KILL_AFTER
 * end the process instead; a write that is to fail, or to be killed after, writes its first half. Every operation is a
 * line of `log`; changes outside root are, too.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

enum { CREATE = 1, WRITE = 2, SYNC = 4, MOVE = 8, REMOVE = 16, FOLDER = 32, CUT = 64, READ = 128, LASTING = 1024 };
enum { KILL_BEFORE = -1, KILL_AFTER = -2 };

static char root[PATH_MAX];
static size_t root_length;
static int armed, kinds, how, log_to = -1;
static long at, count;

void faults_arm(const char *folder, int which, long number, int error, int log)
{
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
    kinds = which, at = number, how = error, log_to = log, count = 0;
    armed = 1;
}

long faults_count(void) { return count; }

static int is_below(const char *path)
{
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* Where a path leads, whatever links its folder has; of the last name itself only where it is no link. */
static void whole_path(int folder, const char *path, char *found)
{
    char joined[PATH_MAX] = "", link[64], parent[PATH_MAX];
    if (path[0] != '/') {
        ssize_t length = -1;
        if (folder == AT_FDCWD) {
            if (getcwd(joined, sizeof joined)) length = (ssize_t)strlen(joined);
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            length = readlink(link, joined, sizeof joined - 1);
        }
        joined[length < 0 ? 0 : length] = 0;
        strncat(joined, "/", sizeof joined - strlen(joined) - 1);
    }
    strncat(joined, path, sizeof joined - strlen(joined) - 1);
    snprintf(parent, sizeof parent, "%s", joined);
    char *name = strrchr(parent, '/'), real[PATH_MAX];
    if (name && name[1] && name != parent) {
        *name = 0;
        if (realpath(parent, real)) {
            snprintf(found, PATH_MAX, "%.2000s/%.2000s", real, name + 1);
            return;
        }
    }
    snprintf(found, PATH_MAX, "%s", joined);
}

static void path_of(int descriptor, char *found)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, found, PATH_MAX - 1);
    found[length < 0 ? 0 : length] = 0;
}

static void note(const char *sign, long number, const char *name, const char *path)
{
    char line[PATH_MAX + 100];
    int length = snprintf(line, sizeof line, "%s %ld %s %s\n", sign, number, name, path);
    if (log_to >= 0 && syscall(SYS_write, log_to, line, (size_t)length) < 0) return;
}

/* 0: go on; an error number: fail with it; KILL_AFTER: go on, then die. */
static int met(int kind, const char *name, const char *path)
{
    if (!armed) return 0;
    if (!is_below(path)) {
        if (kind != READ && kind != WRITE && kind != SYNC && path[0] == '/') note("outside", 0, name, path);
        return 0;
    }
    if (!(kinds & kind)) return 0;
    long number = __atomic_fetch_add(&count, 1, __ATOMIC_SEQ_CST);
    note("op", number, name, path);
    if (!how || !(number == at || ((kinds & LASTING) && number > at))) return 0;
    if (how == KILL_BEFORE) kill(getpid(), SIGKILL);
    return how;
}

static long done(int what, long result)
{
    if (what == KILL_AFTER) kill(getpid(), SIGKILL);
    return result;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)
#define REFUSED(what) \
    if ((what) > 0) { errno = (what); return -1; }

static int opened(int (*real)(int, const char *, int, mode_t), const char *name, int folder, const char *path, int flags,
                  mode_t mode)
{
    int what = 0, creates = (flags & (O_CREAT | O_TRUNC)) || (flags & O_ACCMODE) != O_RDONLY;
    if (armed) {
        char found[PATH_MAX];
        whole_path(folder, path, found);
        if ((flags & O_TMPFILE) == O_TMPFILE) creates = 1;
        what = met(creates ? CREATE : READ, name, found);
        REFUSED(what)
    }
    int result = real(folder, path, flags, mode);
    if (armed && creates && result >= 0) { /* through a link that led elsewhere */
        char found[PATH_MAX];
        path_of(result, found);
        if (found[0] == '/' && !is_below(found)) note("outside", 0, "opened", found);
    }
    return (int)done(what, result);
}

static int real_openat(int folder, const char *path, int flags, mode_t mode)
{
    return (int)syscall(SYS_openat, folder, path, flags | O_LARGEFILE, mode);
}

#define MODE \
    mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { \
        va_list more; \
        va_start(more, flags); \
        mode = va_arg(more, mode_t); \
        va_end(more); \
    }

int open(const char *path, int flags, ...) { MODE return opened(real_openat, "open", AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return opened(real_openat, "open", AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE return opened(real_openat, "open", folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE return opened(real_openat, "open", folder, path, flags, mode); }
int __open64_2(const char *path, int flags) { return opened(real_openat, "open", AT_FDCWD, path, flags, 0); }
int __openat64_2(int folder, const char *path, int flags) { return opened(real_openat, "open", folder, path, flags, 0); }

FILE *fopen64(const char *path, const char *mode)
{
    REAL(FILE *, fopen64, const char *, const char *);
    if (armed) {
        char found[PATH_MAX];
        whole_path(AT_FDCWD, path, found);
        int what = met(strpbrk(mode, "wa+") ? CREATE : READ, "fopen", found);
        if (what > 0) { errno = what; return NULL; }
        FILE *result = real(path, mode);
        done(what, 0);
        return result;
    }
    return real(path, mode);
}
FILE *fopen(const char *path, const char *mode) { return fopen64(path, mode); }

#define OF_FILE(type, name, kind, parameters, arguments, before) \
    type name parameters \
    { \
        int what = 0; \
        if (armed) { \
            char found[PATH_MAX]; \
            path_of(descriptor, found); \
            what = met(kind, #name, found); \
            before \
            REFUSED(what) \
        } \
        type result = (type)syscall arguments; \
        return (type)done(what, result); \
    }
/* A write that fails on a full disk, or that a kill ends, has often written its beginning. */
#define HALF \
    if (what && size > 1) syscall(SYS_write, descriptor, data, size / 2); \
    if (what == KILL_AFTER) kill(getpid(), SIGKILL);
#define HALF_THERE \
    if (what && size > 1) syscall(SYS_pwrite64, descriptor, data, size / 2, offset); \
    if (what == KILL_AFTER) kill(getpid(), SIGKILL);

OF_FILE(ssize_t, write, WRITE, (int descriptor, const void *data, size_t size), (SYS_write, descriptor, data, size), HALF)
OF_FILE(ssize_t, pwrite64, WRITE, (int descriptor, const void *data, size_t size, off64_t offset),
        (SYS_pwrite64, descriptor, data, size, offset), HALF_THERE)
OF_FILE(int, fsync, SYNC, (int descriptor), (SYS_fsync, descriptor), )
OF_FILE(int, fdatasync, SYNC, (int descriptor), (SYS_fdatasync, descriptor), )
OF_FILE(int, ftruncate, CUT, (int descriptor, off_t size), (SYS_ftruncate, descriptor, size), )
OF_FILE(int, ftruncate64, CUT, (int descriptor, off64_t size), (SYS_ftruncate, descriptor, size), )
OF_FILE(int, fchmod, CUT, (int descriptor, mode_t mode), (SYS_fchmod, descriptor, mode), )

#define OF_PATH(name, kind, folder, path, parameters, arguments) \
    int name parameters \
    { \
        int what = 0; \
        if (armed) { \
            char found[PATH_MAX]; \
            whole_path(folder, path, found); \
            what = met(kind, #name, found); \
            REFUSED(what) \
        } \
        return (int)done(what, syscall arguments); \
    }
#define OF_TWO(name, from_folder, from, to_folder, to, parameters, arguments) \
    int name parameters \
    { \
        int what = 0; \
        if (armed) { \
            char one[PATH_MAX], other[PATH_MAX]; \
            whole_path(from_folder, from, one); \
            whole_path(to_folder, to, other); \
            if (is_below(other) && !is_below(one)) note("outside", 0, #name, one); \
            what = met(MOVE, #name, other); \
            REFUSED(what) \
        } \
        return (int)done(what, syscall arguments); \
    }

OF_TWO(rename, AT_FDCWD, from, AT_FDCWD, to, (const char *from, const char *to), (SYS_renameat, AT_FDCWD, from, AT_FDCWD, to))
OF_TWO(renameat, f, from, t, to, (int f, const char *from, int t, const char *to), (SYS_renameat, f, from, t, to))
OF_TWO(renameat2, f, from, t, to, (int f, const char *from, int t, const char *to, unsigned int flags), (SYS_renameat2, f, from, t, to, flags))
OF_TWO(link, AT_FDCWD, from, AT_FDCWD, to, (const char *from, const char *to), (SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0))
OF_TWO(linkat, f, from, t, to, (int f, const char *from, int t, const char *to, int flags), (SYS_linkat, f, from, t, to, flags))
OF_PATH(symlink, MOVE, AT_FDCWD, path, (const char *target, const char *path), (SYS_symlinkat, target, AT_FDCWD, path))
OF_PATH(unlink, REMOVE, AT_FDCWD, path, (const char *path), (SYS_unlinkat, AT_FDCWD, path, 0))
OF_PATH(unlinkat, REMOVE, folder, path, (int folder, const char *path, int flags), (SYS_unlinkat, folder, path, flags))
OF_PATH(rmdir, REMOVE, AT_FDCWD, path, (const char *path), (SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR))
OF_PATH(mkdir, FOLDER, AT_FDCWD, path, (const char *path, mode_t mode), (SYS_mkdirat, AT_FDCWD, path, mode))
OF_PATH(mkdirat, FOLDER, folder, path, (int folder, const char *path, mode_t mode), (SYS_mkdirat, folder, path, mode))
OF_PATH(truncate64, CUT, AT_FDCWD, path, (const char *path, off64_t size), (SYS_truncate, path, size))
OF_PATH(chmod, CUT, AT_FDCWD, path, (const char *path, mode_t mode), (SYS_fchmodat, AT_FDCWD, path, mode))
