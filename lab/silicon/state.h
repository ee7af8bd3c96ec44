/*
 * The node's silicon in one file, shared by every process that loads the library or runs nvidia-smi.
 *
 * File: two slots, each a header and a body. A writer locks, fills the slot that is not current, body first,
 * and then its header (generation + checksum): a writer killed half-way leaves the other slot whole. Readers
 * take no lock. The file keeps its inode for ever, because pods get it as a bind mount.
 *
 * Who holds a GPU: each such process has a client entry and a POSIX record lock on that entry's own byte. The
 * kernel drops the lock with the process, and F_GETLK names the holder in the asker's PID namespace.
 */
#ifndef SILICON_STATE_H
#define SILICON_STATE_H

#include <stdint.h>
#include <sys/types.h>

#include "cards.h"

#define MAX_GPUS 64
#define MAX_GIS 8
#define MAX_CIS 8
#define MAX_CLIENTS 512
#define MAX_EVENTS 64
#define NO_ID 0xff /* a client of the whole GPU, an event of the whole GPU */

struct st_ci {
    uint8_t used, id, profile, start; /* profile: NVML_COMPUTE_INSTANCE_PROFILE_* */
    uint8_t uuid[16];
};

struct st_gi {
    uint8_t used, id, profile, start; /* profile: index in the card's table */
    struct st_ci ci[MAX_CIS];
};

struct st_faults {
    uint8_t busy;         /* held by a client nobody can name */
    uint8_t noreset;      /* like a passed-through GPU: no reset from here, mode changes wait for a reboot */
    uint8_t lost;         /* fell off the bus; a reboot brings it back */
    uint8_t insufficient; /* creations fail with Insufficient Resources ... */
    uint32_t insufficient_after; /* ... after so many that still succeed */
    uint32_t slow_ms;            /* every change takes so long */
};

struct st_gpu {
    char card[16];
    uint8_t uuid[16];
    uint32_t bus, device, minor;
    uint64_t serial;
    uint8_t mig_current, mig_pending, persistence, compute_mode, timeslice, pad[3];
    struct st_faults faults;
    struct st_gi gi[MAX_GIS];
};

struct st_client {
    uint8_t used, compute, gpu, gi, ci, pad[3];
    uint32_t memory_mib; /* 0: count the process's resident memory */
    uint32_t pid;        /* in its own namespace; only for `show` where the kernel cannot translate */
    char name[48];
};

struct st_event {
    uint64_t seq;
    uint64_t time; /* seconds since 1970 */
    uint32_t xid;
    uint8_t gpu, gi, ci, pad;
};

struct state {
    char driver_version[32];
    char boot_id[96];
    char seed[64];
    uint64_t layout; /* counts changes of instances: /proc and /dev below the driver root follow it */
    uint64_t last_event;
    uint32_t n_gpus, pad;
    struct st_client clients[MAX_CLIENTS];
    struct st_event events[MAX_EVENTS];
    struct st_gpu gpus[MAX_GPUS];
};

/* Where this process found its silicon. */
struct place {
    int admin; /* 1: beside a driver root, everything visible; 0: a pod, only what its device nodes say */
    char root[400]; /* admin: the driver root */
    char file[512];
    char dev[512]; /* pod: directory of the device nodes */
};

extern struct state st; /* the state as last read */
extern struct place place;

/* All return 0, or an errno value. One thread at a time: the library holds its own lock around every call. */
int state_find(void);               /* fill `place`; ENOENT where there is no emulated silicon */
int state_open(void);               /* find and open; keeps one descriptor for the life of the process */
int state_create(const char *file); /* open or make the file without reading it */
int state_read(void);               /* refresh `st` */
int state_begin(void);              /* lock and refresh `st` */
int state_commit(void);             /* write `st` and unlock */
void state_abort(void);             /* unlock, forget changes */
int state_is_new(void);             /* after state_create + state_begin: nothing valid was in the file */
uint64_t state_generation(void);

const struct card *gpu_card(const struct st_gpu *g);

/* Clients. `hold` needs no state_begin around it; a second hold of the same is a no-op. */
int client_hold(unsigned gpu, unsigned gi, unsigned ci, int compute, unsigned memory_mib, const char *name);
void client_release_all(void);
/* Is client `i` alive? pid: the holder as this process's PID namespace sees it, 0 if it does not. Own: 2. */
int client_alive(unsigned i, pid_t *pid);

#endif
