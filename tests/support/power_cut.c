/* Preloaded into a process, keeps what a power cut would leave of the files under $POWER_CUT_ROOT.
 *
 * After every fsync or fdatasync that succeeds, $POWER_CUT_DISK gets the file's content as files/<inode>, or the
 * folder's names as folders/<inode> ("d|f <inode> <name>" a line). What was written, created, renamed or removed without
 * such a call is not there. A hard link in held/ keeps the inode's number from being given to another file.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

static void fail(const char *what) {
    perror(what);
    abort(); /* a record with a hole would let faults live */
}

static int is_ours(int fd, char *path, size_t size) {
    const char *root = getenv("POWER_CUT_ROOT");
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, size - 1);
    if (!root || length < 0) return 0;
    path[length] = 0;
    size_t wanted = strlen(root);
    return !strncmp(path, root, wanted) && (path[wanted] == '/' || !path[wanted]);
}

static void keep_folder(const char *source, FILE *out) {
    DIR *folder = opendir(source);
    if (!folder) fail("power_cut: opendir");
    struct dirent *entry;
    while ((entry = readdir(folder)))
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            fprintf(out, "%c %lu %s\n", entry->d_type == DT_DIR ? 'd' : 'f', (unsigned long)entry->d_ino, entry->d_name);
    closedir(folder);
}

static void keep_file(const char *source, FILE *out) {
    char block[1 << 16];
    ssize_t count;
    int in = open(source, O_RDONLY | O_CLOEXEC);
    if (in < 0) fail("power_cut: open");
    while ((count = read(in, block, sizeof block)) > 0)
        if (fwrite(block, 1, count, out) != (size_t)count) fail("power_cut: write");
    if (count < 0) fail("power_cut: read");
    close(in);
}

static void keep(int fd) {
    char path[4096], source[64], target[4200], written[4300], held[4200];
    const char *disk = getenv("POWER_CUT_DISK");
    struct stat found;
    if (!disk || !is_ours(fd, path, sizeof path)) return;
    if (fstat(fd, &found)) fail("power_cut: fstat");
    int is_folder = S_ISDIR(found.st_mode);
    snprintf(source, sizeof source, "/proc/self/fd/%d", fd);
    snprintf(target, sizeof target, "%s/%s/%lu", disk, is_folder ? "folders" : "files", (unsigned long)found.st_ino);
    snprintf(written, sizeof written, "%s.new", target);
    pthread_mutex_lock(&one_at_a_time);
    if (!is_folder && found.st_nlink) {
        snprintf(held, sizeof held, "%s/held/%lu", disk, (unsigned long)found.st_ino);
        if (linkat(AT_FDCWD, source, AT_FDCWD, held, AT_SYMLINK_FOLLOW) && errno != EEXIST && errno != ENOENT)
            fail("power_cut: link");
    }
    FILE *out = fopen(written, "we");
    if (!out) fail("power_cut: fopen");
    if (is_folder) keep_folder(source, out);
    else keep_file(source, out);
    if (fclose(out) || rename(written, target)) fail("power_cut: rename");
    pthread_mutex_unlock(&one_at_a_time);
}

int fsync(int fd) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    int result = real(fd);
    if (!result) keep(fd);
    return result;
}

int fdatasync(int fd) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    int result = real(fd);
    if (!result) keep(fd);
    return result;
}
