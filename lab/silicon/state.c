#define _GNU_SOURCE
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC "LABGPU02"
#define HEADER_SPACE 4096
#define BODY_SPACE ((sizeof(struct state) + 4095) / 4096 * 4096)
#define SLOT_SPACE (HEADER_SPACE + BODY_SPACE)

/* Locked bytes lie far beyond the data, so that data and locks never meet. */
#define LOCK_WRITER (1ll << 40)
#define LOCK_CLIENT (LOCK_WRITER + 16)

struct header {
    char magic[8];
    uint64_t generation, length, body_sum, sum;
};

struct state st;
struct place place;

static int fd = -1;
static uint64_t current_generation, current_sum;
static int current_slot = -1;
static char mine[MAX_CLIENTS];

static uint64_t checksum(const void *data, size_t n)
{
    const unsigned char *p = data;
    uint64_t h = 0x9e3779b97f4a7c15ull, w;

    for (; n >= 8; n -= 8, p += 8) {
        memcpy(&w, p, 8);
        h = (h ^ w) * 0xff51afd7ed558ccdull;
        h ^= h >> 32;
    }
    for (; n; n--)
        h = (h ^ *p++) * 0x100000001b3ull;
    return h ? h : 1;
}

static void lock_init(struct flock *fl, short type, off_t byte)
{
    memset(fl, 0, sizeof(*fl));
    fl->l_type = type;
    fl->l_whence = SEEK_SET;
    fl->l_start = byte;
    fl->l_len = 1;
}

static int lock_byte(short type, off_t byte, int wait)
{
    struct flock fl;

    for (;;) {
        lock_init(&fl, type, byte);
        if (fcntl(fd, wait ? F_SETLKW : F_SETLK, &fl) == 0)
            return 0;
        if (errno != EINTR)
            return errno;
    }
}

/* A fork inherits the descriptor but no lock: the child is a client of nothing yet. */
static void forked(void)
{
    memset(mine, 0, sizeof(mine));
}

static int try_file(const char *file, int admin, const char *root, const char *dev)
{
    if (access(file, R_OK) != 0)
        return ENOENT;
    place.admin = admin;
    snprintf(place.root, sizeof(place.root), "%s", root);
    snprintf(place.file, sizeof(place.file), "%s", file);
    snprintf(place.dev, sizeof(place.dev), "%s", dev);
    return 0;
}

int state_find(void)
{
    const char *root = getenv("LAB_SILICON_ROOT"), *file = getenv("LAB_SILICON_STATE");
    const char *dev = getenv("LAB_SILICON_DEV");
    char path[512];

    if (file)
        return try_file(file, 0, "", dev ? dev : "/dev");
    if (!root)
        root = "/driver-root";
    snprintf(path, sizeof(path), "%s/run/nvidia-persistenced/socket", root);
    if (try_file(path, 1, root, "") == 0)
        return 0;
    return try_file("/run/nvidia-persistenced/socket", 0, "", dev ? dev : "/dev");
}

static int state_open_fd(int flags)
{
    static int once;

    fd = open(place.file, flags | O_CLOEXEC, 0666);
    if (fd < 0)
        return errno;
    /* Standard streams may be closed at start (env -i and the like): never sit on one of them. */
    if (fd < 3) {
        int up = fcntl(fd, F_DUPFD_CLOEXEC, 3);

        close(fd);
        fd = up;
        if (fd < 0)
            return EMFILE;
    }
    if (!once++)
        pthread_atfork(NULL, NULL, forked);
    return 0;
}

int state_open(void)
{
    int rc;

    if (fd >= 0)
        return state_read();
    rc = state_find();
    if (rc)
        return rc;
    rc = state_open_fd(O_RDWR);
    if (rc == EACCES || rc == EROFS)
        rc = state_open_fd(O_RDONLY);
    return rc ? rc : state_read();
}

int state_create(const char *file)
{
    int rc;

    snprintf(place.file, sizeof(place.file), "%s", file);
    rc = state_open_fd(O_RDWR | O_CREAT);
    /* Pods run as any user and must be able to enter themselves as clients, as with /dev/nvidia0 (0666). */
    if (rc == 0 && fchmod(fd, 0666) != 0)
        rc = errno;
    return rc;
}

static int header_read(int slot, struct header *h)
{
    if (pread(fd, h, sizeof(*h), slot * (off_t)SLOT_SPACE) != (ssize_t)sizeof(*h))
        return 0;
    return memcmp(h->magic, MAGIC, 8) == 0 && h->length == sizeof(struct state) &&
           h->sum == checksum(h, offsetof(struct header, sum));
}

/* 1: `st` is now the newest whole state; 0: neither slot is whole. */
static int slots_read(void)
{
    static struct state body;
    struct header h[2];
    int ok[2], order[2];

    for (int i = 0; i < 2; i++)
        ok[i] = header_read(i, &h[i]);
    order[0] = ok[1] && (!ok[0] || h[1].generation > h[0].generation);
    order[1] = !order[0];
    for (int i = 0; i < 2; i++) {
        int s = order[i];

        if (!ok[s])
            continue;
        if (s == current_slot && h[s].generation == current_generation && h[s].body_sum == current_sum)
            return 1;
        if (pread(fd, &body, sizeof(body), s * (off_t)SLOT_SPACE + HEADER_SPACE) != (ssize_t)sizeof(body) ||
            checksum(&body, sizeof(body)) != h[s].body_sum)
            continue;
        st = body;
        current_slot = s;
        current_generation = h[s].generation;
        current_sum = h[s].body_sum;
        return 1;
    }
    return 0;
}

int state_read(void)
{
    int ok = 0;

    /* Two writers in a row can overwrite both slots under a slow reader; it simply looks again. */
    for (int i = 0; i < 1000 && !ok; i++) {
        ok = slots_read();
        if (!ok)
            usleep(1000);
        if (!ok && i == 20 && pread(fd, &(char){0}, 1, 0) != 1)
            break;
    }
    return ok ? 0 : EIO;
}

int state_begin(void)
{
    int rc;

    rc = lock_byte(F_WRLCK, LOCK_WRITER, 1);
    if (rc)
        return rc == EBADF ? EACCES : rc;
    if (!slots_read())
        current_slot = -1;
    return 0;
}

int state_is_new(void)
{
    return current_slot < 0;
}

uint64_t state_generation(void)
{
    return current_generation;
}

static int write_all(const void *data, size_t n, off_t at)
{
    const char *p = data;

    while (n) {
        ssize_t k = pwrite(fd, p, n, at);

        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return k < 0 ? errno : EIO;
        p += k;
        at += k;
        n -= k;
    }
    return 0;
}

int state_commit(void)
{
    struct header h = {.magic = MAGIC, .generation = current_generation + 1, .length = sizeof(st)};
    int slot = current_slot == 0 ? 1 : 0;
    off_t at = slot * (off_t)SLOT_SPACE;
    int rc;

    h.body_sum = checksum(&st, sizeof(st));
    h.sum = checksum(&h, offsetof(struct header, sum));
    rc = write_all(&st, sizeof(st), at + HEADER_SPACE);
    if (rc == 0)
        rc = write_all(&h, sizeof(h), at);
    if (rc == 0) {
        current_slot = slot;
        current_generation = h.generation;
        current_sum = h.body_sum;
        lock_byte(F_UNLCK, LOCK_WRITER, 0);
    } else {
        state_abort();
    }
    return rc;
}

void state_abort(void)
{
    current_slot = -1; /* `st` may hold changes: read afresh next time */
    slots_read();
    lock_byte(F_UNLCK, LOCK_WRITER, 0);
}

const struct card *gpu_card(const struct st_gpu *g)
{
    return card_find(g->card);
}

int client_alive(unsigned i, pid_t *pid)
{
    struct flock fl;

    if (pid)
        *pid = 0;
    if (!st.clients[i].used)
        return 0;
    if (mine[i]) {
        if (pid)
            *pid = getpid();
        return 2;
    }
    lock_init(&fl, F_WRLCK, LOCK_CLIENT + i);
    if (fcntl(fd, F_GETLK, &fl) != 0 || fl.l_type == F_UNLCK)
        return 0;
    if (pid && fl.l_pid > 0)
        *pid = fl.l_pid;
    return 1;
}

int client_hold(unsigned gpu, unsigned gi, unsigned ci, int compute, unsigned memory_mib, const char *name)
{
    int rc, slot = -1;

    for (int i = 0; i < MAX_CLIENTS; i++) {
        struct st_client *c = &st.clients[i];

        if (mine[i] && c->gpu == gpu && c->gi == gi && c->ci == ci && c->compute == compute)
            return 0;
    }
    rc = state_begin();
    if (rc)
        return rc;
    /* Entries of dead processes are free: nobody locks their byte. */
    for (int i = 0; i < MAX_CLIENTS && slot < 0; i++)
        if (!mine[i] && !client_alive(i, NULL) && lock_byte(F_WRLCK, LOCK_CLIENT + i, 0) == 0)
            slot = i;
    if (slot < 0) {
        state_abort();
        return EAGAIN;
    }
    mine[slot] = 1;
    st.clients[slot] = (struct st_client){
        .used = 1,
        .compute = compute,
        .gpu = gpu,
        .gi = gi,
        .ci = ci,
        .memory_mib = memory_mib,
        .pid = getpid(),
    };
    snprintf(st.clients[slot].name, sizeof(st.clients[slot].name), "%s", name);
    return state_commit();
}

void client_release_all(void)
{
    int any = 0;

    for (int i = 0; i < MAX_CLIENTS; i++)
        any |= mine[i];
    if (!any || state_begin() != 0)
        return;
    for (int i = 0; i < MAX_CLIENTS; i++)
        if (mine[i]) {
            mine[i] = 0;
            memset(&st.clients[i], 0, sizeof(st.clients[i]));
            lock_byte(F_UNLCK, LOCK_CLIENT + i, 0);
        }
    state_commit();
}
