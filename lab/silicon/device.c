#define _GNU_SOURCE
#include "device.h"
#include "root.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MIB (1024ull * 1024)
#define CONTEXT_BYTES 8454144 /* what a real H200 used beyond its one process's memory */

const char *result_text(int r)
{
    static const char *const texts[] = {
        [0] = "Success",
        [1] = "Uninitialized",
        [2] = "Invalid Argument",
        [3] = "Not Supported",
        [4] = "Insufficient Permissions",
        [5] = "Already Initialized",
        [6] = "Not Found",
        [7] = "Insufficient Size",
        [8] = "Insufficient External Power",
        [9] = "Driver Not Loaded",
        [10] = "Timeout",
        [11] = "Interrupt Request Issue",
        [12] = "NVML Shared Library Not Found",
        [13] = "Function Not Found",
        [14] = "Corrupted infoROM",
        [15] = "GPU is lost",
        [16] = "GPU requires reset",
        [17] = "GPU access blocked by the operating system",
        [18] = "Driver/library version mismatch",
        [19] = "In use by another client",
        [20] = "Insufficient Memory",
        [21] = "No data",
        [22] = "vGPU ECC not supported",
        [23] = "Insufficient Resources",
        [24] = "Invalid Frequency",
        [25] = "Argument version mismatch",
        [26] = "Requested functionality has been deprecated",
        [27] = "System is not in ready state",
        [28] = "No supported GPUs were found",
        [29] = "Resource not in correct state to perform requested operation",
        [30] = "Reset type is not supported for given device",
    };

    return r >= 0 && r < (int)(sizeof(texts) / sizeof(texts[0])) ? texts[r] : "Unknown Error";
}

/* ---- identities ---- */

void uuid_make(const char *text, unsigned version, uint8_t out[16])
{
    uint64_t h[2] = {0xcbf29ce484222325ull, 0x6c62272e07bb0142ull};

    for (int half = 0; half < 2; half++) {
        for (const char *p = text; *p; p++)
            h[half] = (h[half] ^ (unsigned char)*p) * 0x100000001b3ull;
        h[half] ^= h[half] >> 31;
        h[half] *= 0x94d049bb133111ebull;
        h[half] ^= h[half] >> 29;
        memcpy(out + 8 * half, &h[half], 8);
    }
    out[6] = (out[6] & 0x0f) | version << 4;
    out[8] = (out[8] & 0x3f) | 0x80;
}

void uuid_text(const char *prefix, const uint8_t u[16], char out[48])
{
    snprintf(out, 48, "%s%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", prefix, u[0],
             u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}

unsigned gi_minor(unsigned gpu_minor, unsigned gi)
{
    return 3 + 135 * gpu_minor + 9 * gi;
}

unsigned ci_minor(unsigned gpu_minor, unsigned gi, unsigned ci)
{
    return gi_minor(gpu_minor, gi) + 1 + ci;
}

/* ---- visibility ---- */

/* Device nodes are only looked at, never opened: no driver stands behind them. */
static int node_there(const char *format, unsigned n)
{
    char path[600];
    int k = snprintf(path, sizeof(path), "%s/", place.dev);

    snprintf(path + k, sizeof(path) - k, format, n);
    return access(path, F_OK) == 0;
}

int gpu_visible(unsigned gpu)
{
    return gpu < st.n_gpus && (place.admin || node_there("nvidia%u", st.gpus[gpu].minor));
}

int mig_visible(unsigned gpu, unsigned gi, unsigned ci)
{
    unsigned minor = st.gpus[gpu].minor;

    return place.admin || (node_there("nvidia-caps/nvidia-cap%u", gi_minor(minor, gi)) &&
                           node_there("nvidia-caps/nvidia-cap%u", ci_minor(minor, gi, ci)));
}

int gi_visible(unsigned gpu, const struct st_gi *gi)
{
    for (int i = 0; i < MAX_CIS && !place.admin; i++)
        if (gi->ci[i].used && mig_visible(gpu, gi->id, gi->ci[i].id))
            return 1;
    return place.admin;
}

/* Boards number their modules in their own way; the first card of a captured one was module 5. */
unsigned gpu_module(unsigned gpu)
{
    return (gpu + 5) % 8;
}

int may_configure(void)
{
    return geteuid() == 0 && (place.admin || node_there("nvidia-caps/nvidia-cap%u", 1));
}

static int node_fds[256];
static unsigned node_count;

static void node_keep(const char *format, unsigned n)
{
    char path[600], have[600], link[64];
    int k = place.admin ? snprintf(path, sizeof(path), "%s/dev/", place.root)
                        : snprintf(path, sizeof(path), "%s/", place.dev);

    snprintf(path + k, sizeof(path) - k, format, n);
    for (unsigned i = 0; i < node_count; i++) {
        ssize_t length;

        snprintf(link, sizeof(link), "/proc/self/fd/%d", node_fds[i]);
        length = readlink(link, have, sizeof(have) - 1);
        have[length > 0 ? length : 0] = '\0';
        if (strcmp(have, path) == 0)
            return;
    }
    if (node_count < sizeof(node_fds) / sizeof(node_fds[0]) &&
        (node_fds[node_count] = open(path, O_PATH | O_CLOEXEC)) >= 0)
        node_count++;
}

int device_hold(unsigned gpu, unsigned gi, unsigned ci, int compute, unsigned memory_mib, const char *name)
{
    int rc = client_hold(gpu, gi, ci, compute, memory_mib, name);

    if (rc)
        return rc;
    node_keep("nvidia%u", st.gpus[gpu].minor);
    if (gi != NO_ID && ci != NO_ID) {
        node_keep("nvidia-caps/nvidia-cap%u", gi_minor(st.gpus[gpu].minor, gi));
        node_keep("nvidia-caps/nvidia-cap%u", ci_minor(st.gpus[gpu].minor, gi, ci));
    }
    return 0;
}

void device_release_all(void)
{
    client_release_all();
    while (node_count)
        close(node_fds[--node_count]);
}

/* ---- looking ---- */

struct st_gi *gi_find(struct st_gpu *g, unsigned id)
{
    for (int i = 0; i < MAX_GIS; i++)
        if (g->gi[i].used && g->gi[i].id == id)
            return &g->gi[i];
    return NULL;
}

struct st_ci *ci_find(struct st_gi *gi, unsigned id)
{
    for (int i = 0; i < MAX_CIS; i++)
        if (gi->ci[i].used && gi->ci[i].id == id)
            return &gi->ci[i];
    return NULL;
}

const struct mig_profile *gi_profile(const struct st_gpu *g, const struct st_gi *gi)
{
    return &gpu_card(g)->profiles[gi->profile];
}

int gpu_busy(unsigned gpu)
{
    if (st.gpus[gpu].faults.busy)
        return 1;
    for (unsigned i = 0; i < MAX_CLIENTS; i++)
        if (st.clients[i].used && st.clients[i].gpu == gpu && client_alive(i, NULL) == 1)
            return 1;
    return 0;
}

static int client_on(const struct st_client *c, unsigned gpu, unsigned gi, unsigned ci)
{
    return c->used && c->compute && c->gpu == gpu && (gi == NO_ID || c->gi == gi) &&
           (ci == NO_ID || c->ci == ci);
}

int instance_busy(unsigned gpu, unsigned gi, unsigned ci)
{
    if (st.gpus[gpu].faults.busy)
        return 1;
    for (unsigned i = 0; i < MAX_CLIENTS; i++)
        if (client_on(&st.clients[i], gpu, gi, ci) && client_alive(i, NULL) == 1)
            return 1;
    return 0;
}

/* There is no GPU memory to count, so a process "uses" on the card what it keeps in the host's memory. */
unsigned client_mib(unsigned client, pid_t pid)
{
    unsigned long pages = 0;
    char path[64];
    FILE *f;

    if (st.clients[client].memory_mib)
        return st.clients[client].memory_mib;
    snprintf(path, sizeof(path), "/proc/%d/statm", (int)pid);
    f = pid > 0 ? fopen(path, "re") : NULL;
    if (f) {
        if (fscanf(f, "%*u %lu", &pages) != 1)
            pages = 0;
        fclose(f);
    }
    return (unsigned)(pages * (unsigned long)sysconf(_SC_PAGESIZE) >> 20);
}

unsigned processes_mib(unsigned gpu, unsigned gi, unsigned ci)
{
    unsigned sum = 0;
    pid_t pid;

    for (unsigned i = 0; i < MAX_CLIENTS; i++)
        if (client_on(&st.clients[i], gpu, gi, ci) && client_alive(i, &pid))
            sum += client_mib(i, pid);
    return sum;
}

/* An instance shows 12 MiB for each memory slice as used while nothing runs in it. */
unsigned instance_used_mib(unsigned gpu, const struct st_gi *gi)
{
    const struct mig_profile *p = gi_profile(&st.gpus[gpu], gi);
    unsigned used = p->mem_slices * 12 + processes_mib(gpu, gi->id, NO_ID);

    return used < p->memory_mib ? used : p->memory_mib;
}

void gpu_memory(unsigned gpu, unsigned long long *total, unsigned long long *reserved,
                unsigned long long *used)
{
    const struct st_gpu *g = &st.gpus[gpu];
    unsigned mib = 0;

    *total = gpu_card(g)->memory_bytes;
    *reserved = gpu_card(g)->reserved_bytes;
    *used = 0;
    if (g->mig_current)
        for (int i = 0; i < MAX_GIS; i++)
            mib += g->gi[i].used ? instance_used_mib(gpu, &g->gi[i]) : 0;
    else if ((mib = processes_mib(gpu, NO_ID, NO_ID)) > 0)
        *used = CONTEXT_BYTES;
    *used += mib * MIB;
    if (*used > *total - *reserved)
        *used = *total - *reserved;
}

void process_name(pid_t pid, const char *fallback, char *out, unsigned size)
{
    char path[64];
    size_t n = 0;
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%d/cmdline", (int)pid);
    f = pid > 0 ? fopen(path, "re") : NULL;
    if (f) {
        n = fread(out, 1, size - 1, f);
        fclose(f);
    }
    out[n] = '\0'; /* the arguments are separated by NULs: this leaves the first */
    if (!out[0])
        snprintf(out, size, "%s", fallback);
}

/* ---- geometry ---- */

static unsigned taken_slices(const struct st_gpu *g)
{
    unsigned mask = 0;

    for (int i = 0; i < MAX_GIS; i++)
        if (g->gi[i].used)
            mask |= ((1u << gi_profile(g, &g->gi[i])->mem_slices) - 1) << g->gi[i].start;
    return mask;
}

/* What is limited besides memory slices: the count of the profile itself, and the one OFA. */
static unsigned extra_allowed(const struct st_gpu *g, unsigned profile)
{
    const struct mig_profile *p = &gpu_card(g)->profiles[profile];
    unsigned same = 0, ofa = 0;

    for (int i = 0; i < MAX_GIS; i++)
        if (g->gi[i].used) {
            same += g->gi[i].profile == profile;
            ofa += gi_profile(g, &g->gi[i])->ofa;
        }
    return p->ofa && ofa ? 0 : p->max - same;
}

int placement_find(const struct st_gpu *g, unsigned profile, int wanted)
{
    const struct mig_profile *p = &gpu_card(g)->profiles[profile];
    unsigned taken = taken_slices(g), size = (1u << p->mem_slices) - 1;

    if (!extra_allowed(g, profile))
        return -1;
    for (int i = 0; i < MAX_PLACEMENTS && p->starts[i] >= 0; i++)
        if ((wanted < 0 || wanted == p->starts[i]) && !(taken & size << p->starts[i]))
            return p->starts[i];
    return -1;
}

unsigned remaining(const struct st_gpu *g, unsigned profile)
{
    const struct mig_profile *p = &gpu_card(g)->profiles[profile];
    unsigned taken = taken_slices(g), size = (1u << p->mem_slices) - 1, n = 0;
    unsigned allowed = extra_allowed(g, profile);

    for (int i = 0; i < MAX_PLACEMENTS && p->starts[i] >= 0; i++)
        n += !(taken & size << p->starts[i]);
    return n < allowed ? n : allowed;
}

static unsigned ci_taken(const struct st_gi *gi)
{
    unsigned mask = 0;

    for (int i = 0; i < MAX_CIS; i++)
        if (gi->ci[i].used)
            mask |= ((1u << ci_profile_slices[gi->ci[i].profile]) - 1) << gi->ci[i].start;
    return mask;
}

/* First free run of `n` of the instance's slices, from `from`; -1: none. */
static int ci_place(const struct mig_profile *p, unsigned taken, unsigned n, unsigned from)
{
    for (unsigned s = from; s + n <= p->slices; s++)
        if (!(taken & ((1u << n) - 1) << s))
            return (int)s;
    return -1;
}

unsigned ci_remaining(const struct st_gpu *g, const struct st_gi *gi, unsigned ci_profile)
{
    const struct mig_profile *p = gi_profile(g, gi);
    unsigned taken = ci_taken(gi), n = ci_profile_slices[ci_profile], count = 0;

    for (int s = 0; n && (s = ci_place(p, taken, n, (unsigned)s)) >= 0; s += (int)n)
        count++;
    return count;
}

/* Instances are numbered like a heap over the memory slices: 0 is the whole, 1 and 2 the halves, and so on.
 */
static unsigned gi_number(const struct card *c, const struct mig_profile *p, unsigned start)
{
    unsigned parts = c->mem_slices / p->mem_slices, i = start / p->mem_slices;

    if (c->ids_from_upper_half && parts > 1)
        i = (i + parts / 2) % parts;
    return parts - 1 + i;
}

/* ---- changes ---- */

static int change_begin(unsigned gpu)
{
    int rc;

    if (!may_configure())
        return NV_PERMISSION;
    if (st.gpus[gpu].faults.slow_ms)
        usleep(st.gpus[gpu].faults.slow_ms * 1000);
    rc = state_begin();
    if (rc)
        return rc == EACCES || rc == EROFS ? NV_PERMISSION : NV_UNKNOWN;
    if (gpu >= st.n_gpus || st.gpus[gpu].faults.lost) {
        state_abort();
        return gpu >= st.n_gpus ? NV_NOT_FOUND : NV_LOST;
    }
    return NV_OK;
}

static int change_end(int result)
{
    if (result != NV_OK) {
        state_abort();
        return result;
    }
    root_sync(); /* before the commit: whoever sees the instance also finds its files */
    return state_commit() ? NV_UNKNOWN : NV_OK;
}

static void instances_drop(struct st_gpu *g)
{
    memset(g->gi, 0, sizeof(g->gi));
    st.layout++;
}

static int has_instances(const struct st_gpu *g)
{
    for (int i = 0; i < MAX_GIS; i++)
        if (g->gi[i].used)
            return 1;
    return 0;
}

int mode_set(unsigned gpu, unsigned mode, int *activation)
{
    struct st_gpu *g = &st.gpus[gpu];
    const struct card *c = gpu_card(g);
    int rc;

    *activation = NV_OK;
    if (mode > 1)
        return NV_INVALID;
    if (!c->mem_slices)
        return NV_UNSUPPORTED;
    rc = change_begin(gpu);
    if (rc)
        return rc;
    g->mig_pending = (uint8_t)mode;
    if (g->mig_current == mode)
        return change_end(NV_OK);
    if (gpu_busy(gpu) || (!c->reset_for_mode && has_instances(g)))
        *activation = NV_IN_USE;
    else if (c->reset_for_mode && g->faults.noreset)
        *activation = NV_UNSUPPORTED;
    else {
        g->mig_current = (uint8_t)mode;
        instances_drop(g);
    }
    return change_end(NV_OK);
}

int gpu_reset(unsigned gpu)
{
    struct st_gpu *g = &st.gpus[gpu];
    int rc = change_begin(gpu);

    if (rc)
        return rc;
    if (gpu_busy(gpu))
        return change_end(NV_IN_USE);
    if (g->faults.noreset)
        return change_end(NV_UNSUPPORTED);
    g->mig_current = g->mig_pending;
    instances_drop(g);
    return change_end(NV_OK);
}

void reboot_apply(void)
{
    for (unsigned i = 0; i < st.n_gpus; i++) {
        struct st_gpu *g = &st.gpus[i];

        if (!gpu_card(g)->reset_for_mode)
            g->mig_pending = 0;
        g->mig_current = g->mig_pending;
        g->compute_mode = 0;
        g->timeslice = 0;
        g->faults.lost = 0;
        g->faults.busy = 0;
        instances_drop(g);
    }
    for (unsigned i = 0; i < MAX_CLIENTS; i++)
        if (!client_alive(i, NULL))
            memset(&st.clients[i], 0, sizeof(st.clients[i]));
}

int gi_create(unsigned gpu, unsigned profile, int start, unsigned *id)
{
    struct st_gpu *g = &st.gpus[gpu];
    const struct card *c = gpu_card(g);
    const struct mig_profile *p = &c->profiles[profile];
    int rc = change_begin(gpu), at, slot = 0, legal = start < 0;

    if (rc)
        return rc;
    if (!g->mig_current)
        return change_end(NV_UNSUPPORTED);
    for (int i = 0; i < MAX_PLACEMENTS && p->starts[i] >= 0; i++)
        legal |= p->starts[i] == start;
    if (!legal)
        return change_end(NV_INVALID);
    at = placement_find(g, profile, start);
    if (g->faults.insufficient && !g->faults.insufficient_after)
        at = -1;
    if (at < 0)
        return change_end(NV_INSUFFICIENT);
    if (g->faults.insufficient)
        g->faults.insufficient_after--;
    while (g->gi[slot].used)
        slot++;
    *id = gi_number(c, p, (unsigned)at);
    g->gi[slot] =
        (struct st_gi){.used = 1, .id = (uint8_t)*id, .profile = (uint8_t)profile, .start = (uint8_t)at};
    st.layout++;
    return change_end(NV_OK);
}

int gi_destroy(unsigned gpu, unsigned id)
{
    struct st_gpu *g = &st.gpus[gpu];
    int rc = change_begin(gpu);
    struct st_gi *gi;

    if (rc)
        return rc;
    gi = gi_find(g, id);
    if (!gi)
        return change_end(NV_NOT_FOUND);
    for (int i = 0; i < MAX_CIS; i++)
        if (gi->ci[i].used)
            return change_end(NV_IN_USE);
    if (instance_busy(gpu, id, NO_ID))
        return change_end(NV_IN_USE);
    memset(gi, 0, sizeof(*gi));
    st.layout++;
    return change_end(NV_OK);
}

int ci_create(unsigned gpu, unsigned gi_id, unsigned profile, int start, unsigned *id)
{
    struct st_gpu *g = &st.gpus[gpu];
    int rc = change_begin(gpu), at, slot = 0;
    const struct mig_profile *p;
    char text[128], parent[48];
    struct st_gi *gi;
    unsigned n;

    if (rc)
        return rc;
    gi = gi_find(g, gi_id);
    if (!gi)
        return change_end(NV_NOT_FOUND);
    p = gi_profile(g, gi);
    if (!ci_profile_max(p, profile))
        return change_end(NV_INVALID);
    n = ci_profile_slices[profile];
    at = ci_place(p, ci_taken(gi), n, start < 0 ? 0 : (unsigned)start);
    if (at < 0 || (start >= 0 && at != start))
        return change_end(NV_INSUFFICIENT);
    for (*id = 0; ci_find(gi, *id);)
        ++*id;
    while (gi->ci[slot].used)
        slot++;
    gi->ci[slot] =
        (struct st_ci){.used = 1, .id = (uint8_t)*id, .profile = (uint8_t)profile, .start = (uint8_t)at};
    /* As on hardware, the same instance made again has the same UUID. */
    uuid_text("", g->uuid, parent);
    snprintf(text, sizeof(text), "%s/%u/%u/%u/%u", parent, gi_id, *id, p->id, profile);
    uuid_make(text, 5, gi->ci[slot].uuid);
    st.layout++;
    return change_end(NV_OK);
}

int ci_destroy(unsigned gpu, unsigned gi_id, unsigned id)
{
    int rc = change_begin(gpu);
    struct st_gi *gi;
    struct st_ci *ci;

    if (rc)
        return rc;
    gi = gi_find(&st.gpus[gpu], gi_id);
    ci = gi ? ci_find(gi, id) : NULL;
    if (!ci)
        return change_end(NV_NOT_FOUND);
    if (instance_busy(gpu, gi_id, id))
        return change_end(NV_IN_USE);
    memset(ci, 0, sizeof(*ci));
    st.layout++;
    return change_end(NV_OK);
}

int setting_set(unsigned gpu, int what, unsigned value)
{
    struct st_gpu *g = &st.gpus[gpu];
    int rc = change_begin(gpu);

    if (rc)
        return rc;
    if (what == SET_PERSISTENCE)
        g->persistence = (uint8_t)value;
    else if (what == SET_COMPUTE_MODE)
        g->compute_mode = (uint8_t)value;
    else
        g->timeslice = (uint8_t)value;
    return change_end(NV_OK);
}
