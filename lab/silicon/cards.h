/* What each emulated card is: read-only data, one table entry per card. */
#ifndef SILICON_CARDS_H
#define SILICON_CARDS_H

#include <stdint.h>

#define MAX_PROFILES 8
#define MAX_PLACEMENTS 8

/* One GPU instance profile, as `nvidia-smi mig -lgip` and -lgipp show it. */
struct mig_profile {
    const char *name;    /* "1g.6gb+me" */
    unsigned nvml;       /* NVML_GPU_INSTANCE_PROFILE_* */
    unsigned id;         /* the ID nvidia-smi prints */
    unsigned slices;     /* compute slices */
    unsigned mem_slices; /* placement size */
    unsigned max;        /* most instances on an empty card */
    unsigned memory_mib;
    unsigned sm, ce, dec, enc, jpeg, ofa;
    int starts[MAX_PLACEMENTS]; /* possible starts, ended by -1 */
};

enum arch { ARCH_TURING = 6, ARCH_AMPERE = 7, ARCH_HOPPER = 9 }; /* NVML_DEVICE_ARCH_* */

struct card {
    const char *key;  /* name on the command line */
    const char *name; /* product name */
    const char *arch_name;
    enum arch arch;
    unsigned cc_major, cc_minor;
    unsigned pci_device, pci_subsystem;
    uint64_t memory_bytes, reserved_bytes; /* reserved: what the driver keeps for itself */
    unsigned bar1_mib, mig_bar1_mib;       /* the second: BAR1 of one memory slice */
    unsigned cores, bus_width;
    unsigned power_w, power_min_w;
    unsigned clock_max, clock_min, clock_mem, clock_mem_low, clock_video; /* MHz */
    unsigned pcie_gen;
    const char *vbios, *inforom_image, *inforom_oem, *inforom_ecc;
    unsigned mem_slices;     /* 0: the card cannot do MIG */
    int ids_from_upper_half; /* instance IDs count from the upper half of the memory (8-slice cards) */
    int reset_for_mode;      /* a mode change takes effect by a GPU reset, and survives reboots */
    int idle_w, idle_c;      /* what an idle card shows */
    unsigned remap_banks;
    struct mig_profile profiles[MAX_PROFILES]; /* in the order -lgip prints them; ended by a NULL name */
};

const struct card *card_find(const char *key);
const struct card *card_at(unsigned i); /* NULL after the last */

/* The profile with this NVML enum, nvidia-smi ID or name ("1g.6gb", "MIG 1g.6gb"); -1 if the card has none.
 */
int profile_by_nvml(const struct card *c, unsigned nvml);
int profile_by_id(const struct card *c, unsigned id);
int profile_by_name(const struct card *c, const char *name);

/* Compute instance profiles: `slices` of a GPU instance. */
#define CI_PROFILES 8
extern const unsigned
    ci_profile_slices[CI_PROFILES]; /* by NVML_COMPUTE_INSTANCE_PROFILE_*; 0: not on these cards */
unsigned ci_profile_max(const struct mig_profile *p, unsigned ci_profile); /* 0: not in such an instance */
unsigned ci_profile_default(const struct mig_profile *p);
unsigned ci_profile_sm(const struct mig_profile *p, unsigned ci_profile);
/* "1g.6gb", or "1c.3g.20gb" for a part of the instance. */
void ci_profile_name(const struct mig_profile *p, unsigned ci_profile, char *out, unsigned size);

#endif
