#include "cards.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#define MIB (1024ull * 1024)

/* Placements. 8-slice cards have 8 memory and 7 compute slices; the A30 has 4 of each. */
#define P8_1                                                                                                 \
    {                                                                                                        \
        0, 1, 2, 3, 4, 5, 6, -1                                                                              \
    }
#define P8_2                                                                                                 \
    {                                                                                                        \
        0, 2, 4, -1                                                                                          \
    }
#define P8_2R                                                                                                \
    {                                                                                                        \
        0, 2, 4, 6, -1                                                                                       \
    }
#define P8_4                                                                                                 \
    {                                                                                                        \
        0, 4, -1                                                                                             \
    }
#define P_0                                                                                                  \
    {                                                                                                        \
        0, -1                                                                                                \
    }
#define P4_1                                                                                                 \
    {                                                                                                        \
        0, 1, 2, 3, -1                                                                                       \
    }
#define P4_2                                                                                                 \
    {                                                                                                        \
        0, 2, -1                                                                                             \
    }

// clang-format off
static const struct card cards[] = {
    {
        .key = "A30", .name = "NVIDIA A30", .arch_name = "Ampere", .arch = ARCH_AMPERE,
        .cc_major = 8, .cc_minor = 0, .pci_device = 0x20B710DE, .pci_subsystem = 0x153210DE,
        .memory_bytes = 24576 * MIB, .reserved_bytes = 446 * MIB, .bar1_mib = 32768, .mig_bar1_mib = 8191,
        .cores = 3584, .bus_width = 3072, .power_w = 165, .power_min_w = 100,
        .clock_max = 1440, .clock_min = 210, .clock_mem = 1215, .clock_mem_low = 0, .clock_video = 1305,
        .pcie_gen = 4, .vbios = "92.00.66.00.01", .inforom_image = "1001.0205.00.03", .inforom_oem = "2.0",
        .inforom_ecc = "6.16", .mem_slices = 4, .ids_from_upper_half = 0, .reset_for_mode = 1,
        .idle_w = 30, .idle_c = 34, .remap_banks = 384,
        .profiles = {
            {"1g.6gb", 0, 14, 1, 1, 4, 5952, 14, 1, 1, 0, 0, 0, P4_1},
            {"1g.6gb+me", 7, 21, 1, 1, 1, 5952, 14, 1, 1, 0, 1, 1, P4_1},
            {"2g.12gb", 1, 5, 2, 2, 2, 11968, 28, 2, 2, 0, 0, 0, P4_2},
            {"2g.12gb+me", 8, 6, 2, 2, 1, 11968, 28, 2, 2, 0, 1, 1, P4_2},
            {"4g.24gb", 3, 0, 4, 4, 1, 24000, 56, 4, 4, 0, 1, 1, P_0},
        },
    },
    {
        .key = "A100-40", .name = "NVIDIA A100-SXM4-40GB", .arch_name = "Ampere", .arch = ARCH_AMPERE,
        .cc_major = 8, .cc_minor = 0, .pci_device = 0x20B010DE, .pci_subsystem = 0x144E10DE,
        .memory_bytes = 40960 * MIB, .reserved_bytes = 571 * MIB, .bar1_mib = 65536, .mig_bar1_mib = 8191,
        .cores = 6912, .bus_width = 5120, .power_w = 400, .power_min_w = 100,
        .clock_max = 1410, .clock_min = 210, .clock_mem = 1215, .clock_mem_low = 0, .clock_video = 1275,
        .pcie_gen = 4, .vbios = "92.00.45.00.03", .inforom_image = "G506.0200.00.04", .inforom_oem = "2.0",
        .inforom_ecc = "6.16", .mem_slices = 8, .ids_from_upper_half = 1, .reset_for_mode = 1,
        .idle_w = 52, .idle_c = 32, .remap_banks = 640,
        .profiles = {
            {"1g.5gb", 0, 19, 1, 1, 7, 4864, 14, 1, 0, 0, 0, 0, P8_1},
            {"1g.5gb+me", 7, 20, 1, 1, 1, 4864, 14, 1, 1, 0, 1, 1, P8_1},
            {"1g.10gb", 9, 15, 1, 2, 4, 9856, 14, 1, 1, 0, 0, 0, P8_2R},
            {"2g.10gb", 1, 14, 2, 2, 3, 9856, 28, 2, 1, 0, 0, 0, P8_2},
            {"3g.20gb", 2, 9, 3, 4, 2, 19968, 42, 3, 2, 0, 0, 0, P8_4},
            {"4g.20gb", 3, 5, 4, 4, 1, 19968, 56, 4, 2, 0, 0, 0, P_0},
            {"7g.40gb", 4, 0, 7, 8, 1, 40192, 98, 7, 5, 0, 1, 1, P_0},
        },
    },
    {
        .key = "A100-80", .name = "NVIDIA A100-SXM4-80GB", .arch_name = "Ampere", .arch = ARCH_AMPERE,
        .cc_major = 8, .cc_minor = 0, .pci_device = 0x20B210DE, .pci_subsystem = 0x147F10DE,
        .memory_bytes = 81920 * MIB, .reserved_bytes = 673 * MIB, .bar1_mib = 131072, .mig_bar1_mib = 16383,
        .cores = 6912, .bus_width = 5120, .power_w = 400, .power_min_w = 100,
        .clock_max = 1410, .clock_min = 210, .clock_mem = 1593, .clock_mem_low = 0, .clock_video = 1275,
        .pcie_gen = 4, .vbios = "92.00.45.00.06", .inforom_image = "G506.0210.00.04", .inforom_oem = "2.0",
        .inforom_ecc = "6.16", .mem_slices = 8, .ids_from_upper_half = 1, .reset_for_mode = 1,
        .idle_w = 62, .idle_c = 33, .remap_banks = 640,
        .profiles = {
            {"1g.10gb", 0, 19, 1, 1, 7, 9728, 14, 1, 0, 0, 0, 0, P8_1},
            {"1g.10gb+me", 7, 20, 1, 1, 1, 9728, 14, 1, 1, 0, 1, 1, P8_1},
            {"1g.20gb", 9, 15, 1, 2, 4, 19968, 14, 1, 1, 0, 0, 0, P8_2R},
            {"2g.20gb", 1, 14, 2, 2, 3, 19968, 28, 2, 1, 0, 0, 0, P8_2},
            {"3g.40gb", 2, 9, 3, 4, 2, 40192, 42, 3, 2, 0, 0, 0, P8_4},
            {"4g.40gb", 3, 5, 4, 4, 1, 40192, 56, 4, 2, 0, 0, 0, P_0},
            {"7g.80gb", 4, 0, 7, 8, 1, 80640, 98, 7, 5, 0, 1, 1, P_0},
        },
    },
    {
        .key = "H100", .name = "NVIDIA H100 80GB HBM3", .arch_name = "Hopper", .arch = ARCH_HOPPER,
        .cc_major = 9, .cc_minor = 0, .pci_device = 0x233010DE, .pci_subsystem = 0x16C110DE,
        .memory_bytes = 81559 * MIB, .reserved_bytes = 551 * MIB, .bar1_mib = 131072, .mig_bar1_mib = 16383,
        .cores = 16896, .bus_width = 5120, .power_w = 700, .power_min_w = 200,
        .clock_max = 1980, .clock_min = 345, .clock_mem = 2619, .clock_mem_low = 1593, .clock_video = 1545,
        .pcie_gen = 5, .vbios = "96.00.99.00.01", .inforom_image = "G520.0200.00.05", .inforom_oem = "2.1",
        .inforom_ecc = "7.16", .mem_slices = 8, .ids_from_upper_half = 1, .reset_for_mode = 0,
        .idle_w = 70, .idle_c = 33, .remap_banks = 2560,
        .profiles = {
            {"1g.10gb", 0, 19, 1, 1, 7, 9984, 16, 1, 1, 0, 1, 0, P8_1},
            {"1g.10gb+me", 7, 20, 1, 1, 1, 9984, 16, 1, 1, 0, 1, 1, P8_1},
            {"1g.20gb", 9, 15, 1, 2, 4, 20096, 26, 1, 1, 0, 1, 0, P8_2R},
            {"2g.20gb", 1, 14, 2, 2, 3, 20096, 32, 2, 2, 0, 2, 0, P8_2},
            {"3g.40gb", 2, 9, 3, 4, 2, 40448, 60, 3, 3, 0, 3, 0, P8_4},
            {"4g.40gb", 3, 5, 4, 4, 1, 40448, 64, 4, 4, 0, 4, 0, P_0},
            {"7g.80gb", 4, 0, 7, 8, 1, 81152, 132, 8, 7, 0, 7, 1, P_0},
        },
    },
    {
        /* Every value of this one was read from a real card. */
        .key = "H200", .name = "NVIDIA H200", .arch_name = "Hopper", .arch = ARCH_HOPPER,
        .cc_major = 9, .cc_minor = 0, .pci_device = 0x233510DE, .pci_subsystem = 0x18BF10DE,
        .memory_bytes = 150754820096ull, .reserved_bytes = 644939776ull,
        .bar1_mib = 262144, .mig_bar1_mib = 32767,
        .cores = 16896, .bus_width = 6016, .power_w = 700, .power_min_w = 200,
        .clock_max = 1980, .clock_min = 345, .clock_mem = 3201, .clock_mem_low = 2201, .clock_video = 1545,
        .pcie_gen = 5, .vbios = "96.00.A5.00.1A", .inforom_image = "G520.0282.02.02", .inforom_oem = "2.1",
        .inforom_ecc = "7.16", .mem_slices = 8, .ids_from_upper_half = 1, .reset_for_mode = 0,
        .idle_w = 127, .idle_c = 41, .remap_banks = 3072,
        .profiles = {
            {"1g.18gb", 0, 19, 1, 1, 7, 16384, 16, 1, 1, 0, 1, 0, P8_1},
            {"1g.18gb+me", 7, 20, 1, 1, 1, 16384, 16, 1, 1, 0, 1, 1, P8_1},
            {"1g.35gb", 9, 15, 1, 2, 4, 33280, 26, 1, 1, 0, 1, 0, P8_2R},
            {"2g.35gb", 1, 14, 2, 2, 3, 33280, 32, 2, 2, 0, 2, 0, P8_2},
            {"3g.71gb", 2, 9, 3, 4, 2, 71424, 60, 3, 3, 0, 3, 0, P8_4},
            {"4g.71gb", 3, 5, 4, 4, 1, 71424, 64, 4, 4, 0, 4, 0, P_0},
            {"7g.141gb", 4, 0, 7, 8, 1, 143360, 132, 8, 7, 0, 7, 1, P_0},
        },
    },
    {
        /* A card without MIG: its mode reads [N/A], and every MIG call is Not Supported. */
        .key = "T4", .name = "Tesla T4", .arch_name = "Turing", .arch = ARCH_TURING,
        .cc_major = 7, .cc_minor = 5, .pci_device = 0x1EB810DE, .pci_subsystem = 0x12A210DE,
        .memory_bytes = 15360 * MIB, .reserved_bytes = 448 * MIB, .bar1_mib = 256, .mig_bar1_mib = 0,
        .cores = 2560, .bus_width = 256, .power_w = 70, .power_min_w = 60,
        .clock_max = 1590, .clock_min = 300, .clock_mem = 5001, .clock_mem_low = 405, .clock_video = 1470,
        .pcie_gen = 3, .vbios = "90.04.96.00.02", .inforom_image = "G183.0200.00.02", .inforom_oem = "1.1",
        .inforom_ecc = "5.0", .mem_slices = 0, .ids_from_upper_half = 0, .reset_for_mode = 0,
        .idle_w = 10, .idle_c = 36, .remap_banks = 0,
    },
};
// clang-format on

const struct card *card_at(unsigned i)
{
    return i < sizeof(cards) / sizeof(cards[0]) ? &cards[i] : NULL;
}

const struct card *card_find(const char *key)
{
    for (unsigned i = 0; card_at(i); i++)
        if (strcasecmp(cards[i].key, key) == 0)
            return &cards[i];
    return NULL;
}

int profile_by_nvml(const struct card *c, unsigned nvml)
{
    for (int i = 0; i < MAX_PROFILES && c->profiles[i].name; i++)
        if (c->profiles[i].nvml == nvml)
            return i;
    return -1;
}

int profile_by_id(const struct card *c, unsigned id)
{
    for (int i = 0; i < MAX_PROFILES && c->profiles[i].name; i++)
        if (c->profiles[i].id == id)
            return i;
    return -1;
}

int profile_by_name(const struct card *c, const char *name)
{
    if (strncasecmp(name, "MIG ", 4) == 0)
        name += 4;
    for (int i = 0; i < MAX_PROFILES && c->profiles[i].name; i++)
        if (strcasecmp(c->profiles[i].name, name) == 0)
            return i;
    return -1;
}

/* NVML: 1, 2, 3, 4, 7, 8, 6 slices, and 1 slice (rev. 1). */
const unsigned ci_profile_slices[CI_PROFILES] = {1, 2, 3, 4, 7, 0, 0, 0};

unsigned ci_profile_max(const struct mig_profile *p, unsigned ci_profile)
{
    unsigned n = ci_profile < CI_PROFILES ? ci_profile_slices[ci_profile] : 0;

    return n && n <= p->slices ? p->slices / n : 0;
}

unsigned ci_profile_default(const struct mig_profile *p)
{
    unsigned i = 0;

    while (ci_profile_slices[i] != p->slices)
        i++;
    return i;
}

unsigned ci_profile_sm(const struct mig_profile *p, unsigned ci_profile)
{
    unsigned n = ci_profile_slices[ci_profile];

    /* A whole instance has all its SMs; parts are whole GPCs' shares, so rounded down to even. */
    return n == p->slices ? p->sm : p->sm * n / p->slices / 2 * 2;
}

void ci_profile_name(const struct mig_profile *p, unsigned ci_profile, char *out, unsigned size)
{
    unsigned n = ci_profile_slices[ci_profile];

    if (n == p->slices)
        snprintf(out, size, "%s", p->name);
    else
        snprintf(out, size, "%uc.%s", n, p->name);
}
