/* How the silicon behaves: MIG mode, instances, resets, faults. Results are NVML return codes. */
#ifndef SILICON_DEVICE_H
#define SILICON_DEVICE_H

#include "state.h"

enum result {
    NV_OK = 0,
    NV_UNINITIALIZED = 1,
    NV_INVALID = 2,
    NV_UNSUPPORTED = 3,
    NV_PERMISSION = 4,
    NV_NOT_FOUND = 6,
    NV_TOO_SMALL = 7,
    NV_NOT_LOADED = 9,
    NV_LOST = 15,
    NV_IN_USE = 19,
    NV_INSUFFICIENT = 23,
    NV_VERSION = 25,
    NV_UNKNOWN = 999,
};

const char *result_text(int r);

/* What this process may see: all on the node, in a pod what it has device nodes for. */
int gpu_visible(unsigned gpu);
int mig_visible(unsigned gpu, unsigned gi, unsigned ci);
int gi_visible(unsigned gpu,
               const struct st_gi *gi); /* it has a compute instance that is visible, or all are */
unsigned gi_minor(unsigned gpu_minor, unsigned gi);
unsigned ci_minor(unsigned gpu_minor, unsigned gi, unsigned ci);
unsigned gpu_module(unsigned gpu); /* place on the base board */
int may_configure(void); /* root, and on the node or with the capability node for MIG configuration */

struct st_gi *gi_find(struct st_gpu *g, unsigned id);
struct st_ci *ci_find(struct st_gi *gi, unsigned id);
const struct mig_profile *gi_profile(const struct st_gpu *g, const struct st_gi *gi);

/*
 * Be a client of a GPU or instance, and show it as a client of a real one would: with its device nodes among
 * the process's open files. (They are opened as paths: no driver stands behind them.) A second time is a
 * no-op.
 */
int device_hold(unsigned gpu, unsigned gi, unsigned ci, int compute, unsigned memory_mib, const char *name);
void device_release_all(void);

/* Is the GPU (or, with gi/ci, that instance) held by anybody but this process? */
int gpu_busy(unsigned gpu);
int instance_busy(unsigned gpu, unsigned gi, unsigned ci);      /* ci NO_ID: any of that GPU instance */
unsigned processes_mib(unsigned gpu, unsigned gi, unsigned ci); /* memory its compute processes use */
/* Memory of a GPU in bytes, as nvidia-smi counts it. */
void gpu_memory(unsigned gpu, unsigned long long *total, unsigned long long *reserved,
                unsigned long long *used);
unsigned instance_used_mib(unsigned gpu, const struct st_gi *gi);
unsigned client_mib(unsigned client, pid_t pid);
/* The name of a process, as short as nvidia-smi shows it. */
void process_name(pid_t pid, const char *fallback, char *out, unsigned size);

/* Free placements of a profile: start of the first, or -1; *count: how many more instances would fit. */
int placement_find(const struct st_gpu *g, unsigned profile, int wanted_start);
unsigned remaining(const struct st_gpu *g, unsigned profile);
unsigned ci_remaining(const struct st_gpu *g, const struct st_gi *gi, unsigned ci_profile);

/* Changes; each is one transaction. */
int mode_set(unsigned gpu, unsigned mode, int *activation);
int gpu_reset(unsigned gpu);
int gi_create(unsigned gpu, unsigned profile, int start, unsigned *id);
int gi_destroy(unsigned gpu, unsigned id);
int ci_create(unsigned gpu, unsigned gi, unsigned ci_profile, int start, unsigned *id);
int ci_destroy(unsigned gpu, unsigned gi, unsigned id);
int setting_set(unsigned gpu, int what, unsigned value); /* what: one of the following */
enum { SET_PERSISTENCE, SET_COMPUTE_MODE, SET_TIMESLICE };

void reboot_apply(void); /* on `st`, inside a transaction */

/* "GPU-xxxxxxxx-..." / "MIG-..." from 16 bytes. */
void uuid_text(const char *prefix, const uint8_t uuid[16], char out[48]);
void uuid_make(const char *text, unsigned version, uint8_t out[16]);

#endif
