#define _GNU_SOURCE
#include "root.h"
#include "device.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define CAPS_MAJOR 236
#define GI_IDS 15 /* 9 minors each: 135 a GPU */

static void path_in(char *out, size_t size, const char *root, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static void path_in(char *out, size_t size, const char *root, const char *format, ...)
{
    size_t n = (size_t)snprintf(out, size, "%s/", root);
    va_list ap;

    va_start(ap, format);
    if (n < size)
        vsnprintf(out + n, size - n, format, ap);
    va_end(ap);
}

int mkdirs(const char *path, mode_t mode)
{
    char copy[700];

    snprintf(copy, sizeof(copy), "%s", path);
    for (char *p = copy + 1; *p; p++)
        if (*p == '/') {
            *p = '\0';
            if (mkdir(copy, mode) != 0 && errno != EEXIST)
                return -1;
            *p = '/';
        }
    return mkdir(copy, mode) != 0 && errno != EEXIST ? -1 : 0;
}

static void dir_of(const char *path, char *out, size_t size)
{
    char *slash;

    snprintf(out, size, "%s", path);
    slash = strrchr(out, '/');
    if (slash)
        *slash = '\0';
}

/* Leave a file alone whose content is already so: pods and the driver may be reading it. */
static int file_put(const char *path, const char *text)
{
    char dir[700], have[4096] = "";
    size_t want = strlen(text);
    ssize_t n;
    int f = open(path, O_RDONLY | O_CLOEXEC);

    if (f >= 0) {
        n = read(f, have, sizeof(have));
        close(f);
        if (n == (ssize_t)want && memcmp(have, text, want) == 0)
            return 0;
    }
    dir_of(path, dir, sizeof(dir));
    if (mkdirs(dir, 0755) != 0)
        return -1;
    f = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0444);
    if (f < 0)
        return -1;
    n = write(f, text, want);
    return close(f) == 0 && n == (ssize_t)want ? 0 : -1;
}

static int cap_put(const char *path, unsigned minor, unsigned mode)
{
    char text[96];

    snprintf(text, sizeof(text), "DeviceFileMinor: %u\nDeviceFileMode: %u\nDeviceFileModify: 1\n", minor,
             mode);
    return file_put(path, text);
}

/* Remove "gi<N>" (or "ci<N>") directories whose number is not wanted. */
static void dirs_prune(const char *dir, const char *prefix, unsigned wanted)
{
    char path[900], inner[1200];
    struct dirent *e;
    DIR *d = opendir(dir);
    unsigned n;

    while (d && (e = readdir(d)) != NULL) {
        if (strncmp(e->d_name, prefix, 2) != 0 || sscanf(e->d_name + 2, "%u", &n) != 1)
            continue;
        if (n < 32 && wanted & 1u << n)
            continue;
        snprintf(path, sizeof(path), "%s/%s", dir, e->d_name);
        if (prefix[0] == 'g')
            dirs_prune(path, "ci", 0);
        snprintf(inner, sizeof(inner), "%s/access", path);
        unlink(inner);
        rmdir(path);
    }
    if (d)
        closedir(d);
}

void root_sync(void)
{
    char dir[700], path[900];

    if (!place.admin || geteuid() != 0)
        return;
    for (unsigned g = 0; g < st.n_gpus; g++) {
        struct st_gpu *gpu = &st.gpus[g];
        unsigned gis = 0;

        if (!gpu_card(gpu)->mem_slices)
            continue;
        path_in(dir, sizeof(dir), place.root, "proc/driver/nvidia/capabilities/gpu%u/mig", gpu->minor);
        mkdirs(dir, 0755);
        for (int i = 0; i < MAX_GIS; i++) {
            struct st_gi *gi = &gpu->gi[i];
            unsigned cis = 0;

            if (!gi->used)
                continue;
            gis |= 1u << gi->id;
            snprintf(path, sizeof(path), "%s/gi%u/access", dir, gi->id);
            cap_put(path, gi_minor(gpu->minor, gi->id), 0444);
            for (int k = 0; k < MAX_CIS; k++)
                if (gi->ci[k].used) {
                    cis |= 1u << gi->ci[k].id;
                    snprintf(path, sizeof(path), "%s/gi%u/ci%u/access", dir, gi->id, gi->ci[k].id);
                    cap_put(path, ci_minor(gpu->minor, gi->id, gi->ci[k].id), 0444);
                }
            snprintf(path, sizeof(path), "%s/gi%u", dir, gi->id);
            dirs_prune(path, "ci", cis);
        }
        dirs_prune(dir, "gi", gis);
    }
}

static int node_put(const char *root, const char *name, unsigned major, unsigned minor, mode_t mode)
{
    dev_t dev = makedev(major, minor);
    struct stat sb;
    char path[700];

    path_in(path, sizeof(path), root, "dev/%s", name);
    if (lstat(path, &sb) == 0 && S_ISCHR(sb.st_mode) && sb.st_rdev == dev)
        return 0;
    unlink(path);
    return mknod(path, S_IFCHR | mode, dev) == 0 && chmod(path, mode) == 0 ? 0 : -1;
}

static int file_copy(const char *from, const char *to, mode_t mode)
{
    char dir[700], tmp[720], buffer[65536];
    struct stat a, b;
    ssize_t n = -1;
    int in, out;

    if (stat(from, &a) != 0)
        return -1;
    if (stat(to, &b) == 0 && a.st_size == b.st_size && a.st_mtim.tv_sec == b.st_mtim.tv_sec)
        return 0;
    dir_of(to, dir, sizeof(dir));
    if (mkdirs(dir, 0755) != 0)
        return -1;
    snprintf(tmp, sizeof(tmp), "%s.new", to);
    in = open(from, O_RDONLY | O_CLOEXEC);
    out = open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);
    while (in >= 0 && out >= 0 && (n = read(in, buffer, sizeof(buffer))) > 0)
        if (write(out, buffer, (size_t)n) != n) {
            n = -1;
            break;
        }
    if (out >= 0 && n == 0) {
        struct timespec times[2] = {a.st_mtim, a.st_mtim};

        if (fchmod(out, mode) != 0 || futimens(out, times) != 0)
            n = -1;
    }
    if (in >= 0)
        close(in);
    if (out >= 0 && close(out) != 0)
        n = -1;
    return n == 0 && rename(tmp, to) == 0 ? 0 : -1;
}

static int link_put(const char *target, const char *path)
{
    char have[700], dir[700];
    ssize_t n = readlink(path, have, sizeof(have) - 1);

    if (n >= 0) {
        have[n] = '\0';
        if (strcmp(have, target) == 0)
            return 0;
    }
    dir_of(path, dir, sizeof(dir));
    if (mkdirs(dir, 0755) != 0)
        return -1;
    unlink(path);
    return symlink(target, path);
}

static int devices_put(const char *root)
{
    char path[700], line[256], text[8192];
    size_t n = 0;
    FILE *f = fopen("/proc/devices", "re");

    if (!f)
        return -1;
    while (fgets(line, sizeof(line), f) && n + sizeof(line) + 64 < sizeof(text)) {
        if (strstr(line, " nvidia"))
            continue; /* a host with real GPUs, or our own list seen through a bind mount */
        if (line[0] == '\n')
            n += (size_t)snprintf(text + n, sizeof(text) - n,
                                  "195 nvidia\n195 nvidiactl\n%u nvidia-caps\n510 nvidia-uvm\n", CAPS_MAJOR);
        n += (size_t)snprintf(text + n, sizeof(text) - n, "%s", line);
    }
    fclose(f);
    path_in(path, sizeof(path), root, "proc/devices");
    return file_put(path, text);
}

static int minors_put(const char *root)
{
    char path[700];
    FILE *f;

    path_in(path, sizeof(path), root, "proc/driver/nvidia-caps/mig-minors");
    if (access(path, F_OK) == 0)
        return 0;
    path_in(path, sizeof(path), root, "proc/driver/nvidia-caps");
    if (mkdirs(path, 0755) != 0)
        return -1;
    path_in(path, sizeof(path), root, "proc/driver/nvidia-caps/mig-minors");
    f = fopen(path, "we");
    if (!f)
        return -1;
    fprintf(f, "config 1\nmonitor 2\n");
    for (unsigned g = 0; g < 32; g++) /* 32 GPUs have minors, as with NVIDIA's driver */
        for (unsigned i = 0; i < GI_IDS; i++) {
            fprintf(f, "gpu%u/gi%u/access %u\n", g, i, gi_minor(g, i));
            for (unsigned c = 0; c < 8; c++)
                fprintf(f, "gpu%u/gi%u/ci%u/access %u\n", g, i, c, ci_minor(g, i, c));
        }
    return fclose(f);
}

static int gpu_files_put(const char *root, const struct st_gpu *g)
{
    const struct card *c = gpu_card(g);
    char path[700], text[700], uuid[48], name[32];

    uuid_text("GPU-", g->uuid, uuid);
    snprintf(text, sizeof(text),
             "Model: \t\t %s\nIRQ:   \t\t 41\nGPU UUID: \t %s\nVideo BIOS: \t %s\nBus Type: \t PCIe\n"
             "DMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\nBus Location: \t 0000:%02x:%02x.0\n"
             "Device Minor: \t %u\nGPU Firmware: \t %s\nGPU Excluded:\t No\n",
             c->name, uuid, c->vbios, g->bus, g->device, g->minor, st.driver_version);
    path_in(path, sizeof(path), root, "proc/driver/nvidia/gpus/0000:%02x:%02x.0/information", g->bus,
            g->device);
    if (file_put(path, text) != 0)
        return -1;
    snprintf(name, sizeof(name), "nvidia%u", g->minor);
    return node_put(root, name, 195, g->minor, 0666);
}

static int fail(const char *what)
{
    fprintf(stderr, "lab-silicon: cannot make %s: %s\n", what, strerror(errno));
    return -1;
}

int root_make(const char *root, const char *bin, const char *version, int link_host)
{
    static const char *const programs[] = {"nvidia-smi", "nvidia-cuda-mps-control", "lab-silicon"};
    char path[700], from[700], text[256];

    path_in(path, sizeof(path), root, "dev/nvidia-caps");
    if (mkdirs(path, 0755) != 0)
        return fail(path);
    if (node_put(root, "nvidiactl", 195, 255, 0666) || node_put(root, "nvidia-uvm", 510, 0, 0666) ||
        node_put(root, "nvidia-uvm-tools", 510, 1, 0666) ||
        node_put(root, "nvidia-caps/nvidia-cap1", CAPS_MAJOR, 1, 0400) ||
        node_put(root, "nvidia-caps/nvidia-cap2", CAPS_MAJOR, 2, 0444))
        return fail("the device nodes below dev/ (CAP_MKNOD is needed)");
    for (unsigned g = 0; g < st.n_gpus; g++)
        if (gpu_files_put(root, &st.gpus[g]) != 0)
            return fail("a GPU's device node or proc files");

    snprintf(
        text, sizeof(text),
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  %s  Release Build  (emulated silicon)\n"
        "GCC version:  gcc version %s\n",
        version, __VERSION__);
    path_in(path, sizeof(path), root, "proc/driver/nvidia/version");
    if (file_put(path, text) != 0)
        return fail(path);
    path_in(path, sizeof(path), root, "proc/driver/nvidia/capabilities/mig/config");
    if (cap_put(path, 1, 0400) != 0)
        return fail(path);
    path_in(path, sizeof(path), root, "proc/driver/nvidia/capabilities/mig/monitor");
    if (cap_put(path, 2, 0444) != 0)
        return fail(path);
    if (minors_put(root) != 0 || devices_put(root) != 0)
        return fail("the proc files");

    for (unsigned i = 0; i < sizeof(programs) / sizeof(programs[0]); i++) {
        path_in(path, sizeof(path), root, "usr/bin/%s", programs[i]);
        snprintf(from, sizeof(from), "%s/%s", bin, programs[i]);
        snprintf(text, sizeof(text), "/usr/bin/%s", programs[i]);
        if (file_copy(from, path, 0755) != 0)
            return fail(path);
        if (link_host && link_put(path, text) != 0)
            return fail(text);
    }
    path_in(path, sizeof(path), root, "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.%s", version);
    snprintf(from, sizeof(from), "%s/libnvidia-ml.so.1", bin);
    if (file_copy(from, path, 0755) != 0)
        return fail(path);
    if (link_host && link_put(path, "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1") != 0)
        return fail("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1");
    snprintf(text, sizeof(text), "libnvidia-ml.so.%s", version);
    path_in(path, sizeof(path), root, "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1");
    if (link_put(text, path) != 0)
        return fail(path);
    return 0;
}

/*
 * NVIDIA's driver reads its capability files below /proc, where no volume may be mounted. Its container is
 * privileged, so the library shows it the driver root's files there. Only with the driver root in its usual
 * container path; where a real driver's files are, nothing is done.
 */
void root_bind_proc(void)
{
    char from[700];

    if (!place.admin || strcmp(place.root, "/driver-root") != 0 || geteuid() != 0 ||
        access("/proc/driver/nvidia", F_OK) == 0)
        return;
    path_in(from, sizeof(from), place.root, "proc/driver");
    if (mount(from, "/proc/driver", NULL, MS_BIND, NULL) != 0)
        return; /* an ordinary process: it needs none of this */
    path_in(from, sizeof(from), place.root, "proc/devices");
    mount(from, "/proc/devices", NULL, MS_BIND, NULL);
}
