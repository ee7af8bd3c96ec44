/* nvidia-smi on emulated silicon: what the parts share. */
#ifndef LAB_NVIDIA_SMI_H
#define LAB_NVIDIA_SMI_H

#include <stddef.h>
#include <stdio.h>

#include "device.h"
#include "nvml.h"

#define CUDA_VERSION "13.0"

/* The GPUs a command is about: physical numbers, and the numbers this process sees them under. */
struct selection {
    unsigned n, gpu[MAX_GPUS], index[MAX_GPUS];
};

/* ids: comma list of indices, UUIDs or PCI bus IDs; NULL: all visible. Returns the exit status, 0 if some
 * were found. */
int select_gpus(const char *ids, struct selection *s);
int open_silicon(void); /* 0, or the exit status having said why */
void bus_id_text(unsigned gpu, char out[24]);
const char *timestamp(const char *format);
int lost_check(const struct selection *s); /* says so and returns the exit status if one is lost */
unsigned mib_up(unsigned long long bytes);

/* MIG devices of a GPU in the order of -L; returns 0 past the last. */
int mig_at(unsigned gpu, unsigned n, struct st_gi **gi, struct st_ci **ci);

/* Compute processes of a GPU that are visible from here; returns 0 past the last. */
struct app {
    int pid;
    unsigned mib, gi, ci;
    char name[256];
};
int app_at(unsigned gpu, unsigned n, struct app *app);

int command_mig(int argc, char **argv);
int command_compute_policy(int argc, char **argv);
int command_query(const struct selection *s, const char *fields, const char *format, FILE *out);
int command_query_apps(const struct selection *s, const char *fields, const char *format, FILE *out);
int command_table(const struct selection *s, FILE *out);
int command_details(const struct selection *s, int xml, const char *display, FILE *out);

extern const char mig_help[], compute_policy_help[], main_help[];

#endif
