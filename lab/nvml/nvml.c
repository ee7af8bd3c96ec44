/* The emulated libnvidia-ml.so.1. */
#define _GNU_SOURCE
#include "nvml.h"
#include "device.h"
#include "root.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#define MIB (1024ull * 1024)
#define MAX_HANDLES 4096

enum kind { K_GPU = 1, K_MIG, K_GI, K_CI };

/* Clients only pass handles around; they are addresses in this pool, so they stay valid for good. */
struct handle {
    enum kind kind;
    unsigned gpu, gi, ci;
};

struct event_set {
    unsigned long long seen, gpus;
};

static struct handle pool[MAX_HANDLES];
static unsigned pooled, initialised;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void unlock(int *taken)
{
    if (*taken)
        pthread_mutex_unlock(&lock);
}

static void forked(void)
{
    pthread_mutex_init(&lock, NULL);
}

static int enter(void)
{
    pthread_mutex_lock(&lock);
    return 1;
}

/* Every entry point is alone in here, and looks at the newest state. */
#define LOCKED                                                                                               \
    int locked_ __attribute__((cleanup(unlock))) = enter();                                                  \
    (void)locked_
#define ENTER                                                                                                \
    LOCKED;                                                                                                  \
    if (!initialised)                                                                                        \
        return NV_UNINITIALIZED;                                                                             \
    if (state_read() != 0)                                                                                   \
    return NV_UNKNOWN

/* ---- handles ---- */

static struct handle *intern(enum kind kind, unsigned gpu, unsigned gi, unsigned ci)
{
    for (unsigned i = 0; i < pooled; i++)
        if (pool[i].kind == kind && pool[i].gpu == gpu && pool[i].gi == gi && pool[i].ci == ci)
            return &pool[i];
    if (pooled == MAX_HANDLES)
        return NULL;
    pool[pooled] = (struct handle){kind, gpu, gi, ci};
    return &pool[pooled++];
}

static int known(const struct handle *h)
{
    return h >= pool && h < pool + pooled;
}

/* What a handle stands for at this moment. */
struct target {
    struct st_gpu *g;
    const struct card *card;
    unsigned gpu;
    struct st_gi *gi;
    struct st_ci *ci;
    const struct mig_profile *profile;
};

static int resolve(const struct handle *h, struct target *t)
{
    memset(t, 0, sizeof(*t));
    if (!known(h) || h->gpu >= st.n_gpus)
        return NV_INVALID;
    t->gpu = h->gpu;
    t->g = &st.gpus[h->gpu];
    t->card = gpu_card(t->g);
    if (t->g->faults.lost)
        return NV_LOST;
    if (h->kind == K_GPU)
        return NV_OK;
    t->gi = gi_find(t->g, h->gi);
    if (!t->gi)
        return NV_NOT_FOUND;
    t->profile = gi_profile(t->g, t->gi);
    if (h->kind == K_GI)
        return NV_OK;
    t->ci = ci_find(t->gi, h->ci);
    return t->ci ? NV_OK : NV_NOT_FOUND;
}

#define DEVICE(device)                                                                                       \
    struct target t;                                                                                         \
    ENTER;                                                                                                   \
    int rc_ = known(device) && (device)->kind > K_MIG ? NV_INVALID : resolve(device, &t);                    \
    if (rc_ != NV_OK)                                                                                        \
    return rc_
/* For what only a whole GPU has. */
#define WHOLE_GPU(device)                                                                                    \
    DEVICE(device);                                                                                          \
    if (t.ci)                                                                                                \
    return NV_UNSUPPORTED
#define NEED(pointer)                                                                                        \
    if (!(pointer))                                                                                          \
    return NV_INVALID

/* ---- library ---- */

/* Is this a process that computes? In a pod, yes: it is there for that. */
static int computes(void)
{
    const char *told = getenv("LAB_SILICON_COMPUTE");

    return told ? told[0] == '1' : !place.admin;
}

nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    LOCKED;
    static int once;
    int rc;

    (void)flags;
    if (initialised) {
        initialised++;
        return NV_OK;
    }
    rc = state_open();
    if (rc)
        return rc == ENOENT ? NV_NOT_LOADED : NV_UNKNOWN;
    if (!once++)
        pthread_atfork(NULL, NULL, forked);
    root_bind_proc();
    initialised = 1;
    return NV_OK;
}

nvmlReturn_t nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

nvmlReturn_t nvmlInit(void)
{
    return nvmlInitWithFlags(0);
}

nvmlReturn_t nvmlShutdown(void)
{
    LOCKED;
    if (!initialised)
        return NV_UNINITIALIZED;
    /* A CUDA program keeps its device beyond NVML; a compute process here does so until it ends. */
    if (--initialised == 0 && !computes())
        device_release_all();
    return NV_OK;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    return result_text(result);
}

static nvmlReturn_t text_out(char *out, unsigned length, const char *text)
{
    NEED(out);
    if (strlen(text) + 1 > length)
        return NV_TOO_SMALL;
    strcpy(out, text);
    return NV_OK;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    ENTER;
    return text_out(version, length, st.driver_version);
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length)
{
    char text[48];

    ENTER;
    /* CUDA's major number, then the driver's branch and release: "13.580.95". */
    snprintf(text, sizeof(text), "13.%s", st.driver_version);
    if (strrchr(text, '.') != strchr(text, '.'))
        *strrchr(text, '.') = '\0';
    return text_out(version, length, text);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    ENTER;
    NEED(version);
    *version = 13000;
    return NV_OK;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length)
{
    char text[256];

    ENTER;
    process_name((pid_t)pid, "", text, sizeof(text));
    return text[0] ? text_out(name, length, text) : NV_NOT_FOUND;
}

/* ---- finding devices ---- */

/* The n-th GPU this process sees; NV_NOT_FOUND past the last. */
static int visible_gpu(unsigned n, unsigned *gpu)
{
    for (*gpu = 0; *gpu < st.n_gpus; ++*gpu)
        if (gpu_visible(*gpu) && n-- == 0)
            return NV_OK;
    return NV_NOT_FOUND;
}

/*
 * The process now has the GPU open. On the node it is a monitor (nvidia-smi itself is too brief to be one);
 * in a pod it is there to compute, on whatever the pod was given.
 */
static int opened(unsigned gpu)
{
    struct st_gpu *g = &st.gpus[gpu];
    int any = 0;

    if (!strcmp(program_invocation_short_name, "nvidia-smi"))
        return NV_OK;
    if (!computes()) {
        device_hold(gpu, NO_ID, NO_ID, 0, 0, program_invocation_short_name);
        return NV_OK;
    }
    for (int i = 0; i < MAX_GIS; i++)
        for (int k = 0; k < MAX_CIS && g->gi[i].used; k++)
            if (g->gi[i].ci[k].used && mig_visible(gpu, g->gi[i].id, g->gi[i].ci[k].id)) {
                device_hold(gpu, g->gi[i].id, g->gi[i].ci[k].id, 1, 0, program_invocation_short_name);
                any = 1;
            }
    if (!any)
        device_hold(gpu, NO_ID, NO_ID, !g->mig_current, 0, program_invocation_short_name);
    return NV_OK;
}

static nvmlReturn_t gpu_handle(unsigned gpu, nvmlDevice_t *device)
{
    if (st.gpus[gpu].faults.lost)
        return NV_LOST;
    *device = intern(K_GPU, gpu, 0, 0);
    return *device ? opened(gpu) : NV_UNKNOWN;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    unsigned gpu;

    ENTER;
    NEED(count);
    for (*count = 0; visible_gpu(*count, &gpu) == NV_OK;)
        ++*count;
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned *count)
{
    return nvmlDeviceGetCount_v2(count);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    unsigned gpu;

    ENTER;
    NEED(device);
    return visible_gpu(index, &gpu) == NV_OK ? gpu_handle(gpu, device) : NV_INVALID;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    char text[48];

    ENTER;
    NEED(uuid && device);
    for (unsigned gpu = 0; gpu < st.n_gpus; gpu++) {
        struct st_gpu *g = &st.gpus[gpu];

        if (!gpu_visible(gpu))
            continue;
        uuid_text("GPU-", g->uuid, text);
        if (strcasecmp(text, uuid) == 0)
            return gpu_handle(gpu, device);
        for (int i = 0; i < MAX_GIS; i++)
            for (int k = 0; k < MAX_CIS && g->gi[i].used; k++) {
                struct st_ci *ci = &g->gi[i].ci[k];

                if (!ci->used || !mig_visible(gpu, g->gi[i].id, ci->id))
                    continue;
                uuid_text("MIG-", ci->uuid, text);
                if (strcasecmp(text, uuid) == 0) {
                    *device = intern(K_MIG, gpu, g->gi[i].id, ci->id);
                    return *device ? opened(gpu) : NV_UNKNOWN;
                }
            }
    }
    return NV_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    unsigned domain, bus, dev;

    ENTER;
    NEED(bus_id && device);
    if (sscanf(bus_id, "%x:%x:%x", &domain, &bus, &dev) != 3)
        return NV_INVALID;
    for (unsigned gpu = 0; gpu < st.n_gpus; gpu++)
        if (gpu_visible(gpu) && domain == 0 && bus == st.gpus[gpu].bus && dev == st.gpus[gpu].device)
            return gpu_handle(gpu, device);
    return NV_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}

nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
    ENTER;
    NEED(serial && device);
    for (unsigned gpu = 0; gpu < st.n_gpus; gpu++)
        if (gpu_visible(gpu) && strtoull(serial, NULL, 10) == st.gpus[gpu].serial)
            return gpu_handle(gpu, device);
    return NV_NOT_FOUND;
}

/* ---- identity ---- */

/* The n-th MIG device this process sees on a GPU, in the order of instance IDs. */
static int visible_mig(unsigned gpu, unsigned n, unsigned *gi, unsigned *ci)
{
    for (*gi = 0; *gi < 15; ++*gi) {
        struct st_gi *instance = gi_find(&st.gpus[gpu], *gi);

        for (*ci = 0; instance && *ci < MAX_CIS; ++*ci)
            if (ci_find(instance, *ci) && mig_visible(gpu, *gi, *ci) && n-- == 0)
                return NV_OK;
    }
    return NV_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length)
{
    char text[96], profile[48];

    DEVICE(device);
    if (!t.ci)
        return text_out(name, length, t.card->name);
    ci_profile_name(t.profile, t.ci->profile, profile, sizeof(profile));
    snprintf(text, sizeof(text), "%s MIG %s", t.card->name, profile);
    return text_out(name, length, text);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length)
{
    char text[48];

    DEVICE(device);
    if (t.ci)
        uuid_text("MIG-", t.ci->uuid, text);
    else
        uuid_text("GPU-", t.g->uuid, text);
    return text_out(uuid, length, text);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index)
{
    unsigned gpu, gi, ci;

    DEVICE(device);
    NEED(index);
    if (t.ci) {
        for (*index = 0; visible_mig(t.gpu, *index, &gi, &ci) == NV_OK; ++*index)
            if (gi == t.gi->id && ci == t.ci->id)
                return NV_OK;
        return NV_NOT_FOUND;
    }
    for (*index = 0; visible_gpu(*index, &gpu) == NV_OK; ++*index)
        if (gpu == t.gpu)
            return NV_OK;
    return NV_NOT_FOUND;
}

#define NUMBER(function, expression)                                                                         \
    nvmlReturn_t function(nvmlDevice_t device, unsigned *out);                                               \
    nvmlReturn_t function(nvmlDevice_t device, unsigned *out)                                                \
    {                                                                                                        \
        WHOLE_GPU(device);                                                                                   \
        NEED(out);                                                                                           \
        *out = (expression);                                                                                 \
        return NV_OK;                                                                                        \
    }
#define SHARED_NUMBER(function, expression)                                                                  \
    nvmlReturn_t function(nvmlDevice_t device, unsigned *out);                                               \
    nvmlReturn_t function(nvmlDevice_t device, unsigned *out)                                                \
    {                                                                                                        \
        DEVICE(device);                                                                                      \
        NEED(out);                                                                                           \
        *out = (expression);                                                                                 \
        return NV_OK;                                                                                        \
    }
#define TEXT(function, expression)                                                                           \
    nvmlReturn_t function(nvmlDevice_t device, char *out, unsigned length);                                  \
    nvmlReturn_t function(nvmlDevice_t device, char *out, unsigned length)                                   \
    {                                                                                                        \
        WHOLE_GPU(device);                                                                                   \
        return text_out(out, length, (expression));                                                          \
    }
#define UNSUPPORTED(function)                                                                                \
    nvmlReturn_t function(nvmlDevice_t device);                                                              \
    nvmlReturn_t function(nvmlDevice_t device)                                                               \
    {                                                                                                        \
        DEVICE(device);                                                                                      \
        return NV_UNSUPPORTED;                                                                               \
    }

SHARED_NUMBER(nvmlDeviceGetMinorNumber, t.g->minor)
SHARED_NUMBER(nvmlDeviceGetBrand, 14)
SHARED_NUMBER(nvmlDeviceGetArchitecture, t.card->arch)
SHARED_NUMBER(nvmlDeviceGetVirtualizationMode, 1)
SHARED_NUMBER(nvmlDeviceGetBoardId, t.g->bus << 8 | t.g->device)
SHARED_NUMBER(nvmlDeviceIsMigDeviceHandle, t.ci != NULL)
SHARED_NUMBER(nvmlDeviceGetMaxMigDeviceCount, !t.ci && t.g->mig_current ? t.card->mem_slices == 4 ? 4 : 7 : 0)
NUMBER(nvmlDeviceGetNumGpuCores, t.card->cores)
NUMBER(nvmlDeviceGetMultiGpuBoard, 0)
NUMBER(nvmlDeviceGetMemoryBusWidth, t.card->bus_width)
NUMBER(nvmlDeviceGetModuleId, gpu_module(t.gpu))
SHARED_NUMBER(nvmlDeviceGetPersistenceMode, t.g->persistence)
SHARED_NUMBER(nvmlDeviceGetComputeMode, t.g->compute_mode)
NUMBER(nvmlDeviceGetDisplayMode, 1)
NUMBER(nvmlDeviceGetDisplayActive, 0)
NUMBER(nvmlDeviceGetAccountingMode, 0)
NUMBER(nvmlDeviceGetAccountingBufferSize, 4000)
NUMBER(nvmlDeviceGetPowerManagementMode, 1)
NUMBER(nvmlDeviceGetPowerManagementLimit, t.card->power_w * 1000)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, t.card->power_w * 1000)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, t.card->power_w * 1000)
NUMBER(nvmlDeviceGetPowerUsage, (unsigned)t.card->idle_w * 1000)
NUMBER(nvmlDeviceGetPerformanceState, 0)
NUMBER(nvmlDeviceGetPowerState, 0)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, t.card->pcie_gen)
NUMBER(nvmlDeviceGetGpuMaxPcieLinkGeneration, t.card->pcie_gen)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, t.card->pcie_gen)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, 16)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, 16)
NUMBER(nvmlDeviceGetPcieReplayCounter, 0)
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, 0)
NUMBER(nvmlDeviceGetNumFans, 0)
NUMBER(nvmlDeviceGetIrqNum, 41)
TEXT(nvmlDeviceGetVbiosVersion, t.card->vbios)
TEXT(nvmlDeviceGetBoardPartNumber, "000-00000-0000-000")
TEXT(nvmlDeviceGetInforomImageVersion, t.card->inforom_image)
UNSUPPORTED(nvmlDeviceGetFanSpeed)
UNSUPPORTED(nvmlDeviceGetFanSpeed_v2)
UNSUPPORTED(nvmlDeviceGetDriverModel)
UNSUPPORTED(nvmlDeviceGetDriverModel_v2)
UNSUPPORTED(nvmlDeviceGetGpuOperationMode)
UNSUPPORTED(nvmlDeviceGetBridgeChipInfo)
UNSUPPORTED(nvmlDeviceGetGpuFabricInfo)
UNSUPPORTED(nvmlDeviceGetGpuFabricInfoV)
UNSUPPORTED(nvmlDeviceGetNvLinkState)
UNSUPPORTED(nvmlDeviceGetNvLinkVersion)
UNSUPPORTED(nvmlDeviceGetNvLinkCapability)
UNSUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
UNSUPPORTED(nvmlDeviceGetNvLinkRemoteDeviceType)

nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned length)
{
    char text[32];

    WHOLE_GPU(device);
    snprintf(text, sizeof(text), "%llu", (unsigned long long)t.g->serial);
    return text_out(serial, length, text);
}

nvmlReturn_t nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t device, char *version)
{
    WHOLE_GPU(device);
    return text_out(version, 64, st.driver_version);
}

nvmlReturn_t nvmlDeviceGetGspFirmwareMode(nvmlDevice_t device, unsigned *enabled, unsigned *by_default)
{
    WHOLE_GPU(device);
    NEED(enabled && by_default);
    *enabled = *by_default = 1;
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetInforomVersion(nvmlDevice_t device, unsigned object, char *version, unsigned length)
{
    WHOLE_GPU(device);
    if (object > 1)
        return NV_UNSUPPORTED;
    return text_out(version, length, object ? t.card->inforom_ecc : t.card->inforom_oem);
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    DEVICE(device);
    NEED(major && minor);
    *major = (int)t.card->cc_major;
    *minor = (int)t.card->cc_minor;
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetAddressingMode(nvmlDevice_t device, nvmlDeviceAddressingMode_t *mode)
{
    DEVICE(device);
    NEED(mode);
    if (mode->version != NVML_STRUCT_VERSION(sizeof(*mode), 1))
        return NV_VERSION;
    mode->value = 0; /* none: no HMM, no ATS */
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    DEVICE(device);
    NEED(pci);
    memset(pci, 0, sizeof(*pci));
    pci->bus = t.g->bus;
    pci->device = t.g->device;
    pci->pciDeviceId = t.card->pci_device;
    pci->pciSubSystemId = t.card->pci_subsystem;
    snprintf(pci->busIdLegacy, sizeof(pci->busIdLegacy), "0000:%02X:%02X.0", pci->bus, pci->device);
    snprintf(pci->busId, sizeof(pci->busId), "00000000:%02X:%02X.0", pci->bus, pci->device);
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_v2_t *pci)
{
    nvmlPciInfo_t full;
    int rc = nvmlDeviceGetPciInfo_v3(device, pci ? &full : NULL);

    if (rc == NV_OK) {
        memset(pci, 0, sizeof(*pci));
        memcpy(pci, &full, 36); /* the same up to the reserved fields */
    }
    return rc;
}

nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_v2_t *pci)
{
    return nvmlDeviceGetPciInfo_v2(device, pci);
}

nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_t *pci)
{
    DEVICE(device);
    NEED(pci);
    if (pci->version != NVML_STRUCT_VERSION(sizeof(*pci), 1))
        return NV_VERSION;
    pci->domain = 0;
    pci->bus = t.g->bus;
    pci->device = t.g->device;
    pci->pciDeviceId = t.card->pci_device;
    pci->pciSubSystemId = t.card->pci_subsystem;
    pci->baseClass = 3;
    pci->subClass = 2;
    snprintf(pci->busId, sizeof(pci->busId), "00000000:%02X:%02X.0", pci->bus, pci->device);
    return NV_OK;
}

/* ---- memory, sensors ---- */

static void memory_of(const struct target *t, unsigned long long *total, unsigned long long *reserved,
                      unsigned long long *used)
{
    if (!t->gi) {
        gpu_memory(t->gpu, total, reserved, used);
        return;
    }
    *total = t->profile->memory_mib * MIB;
    *reserved = 0;
    *used = instance_used_mib(t->gpu, t->gi) * MIB;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    unsigned long long reserved;

    DEVICE(device);
    NEED(memory);
    memory_of(&t, &memory->total, &reserved, &memory->used);
    memory->used += reserved;
    memory->free = memory->total - memory->used;
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    DEVICE(device);
    NEED(memory);
    if (memory->version != NVML_STRUCT_VERSION(sizeof(*memory), 2))
        return NV_VERSION;
    memory_of(&t, &memory->total, &memory->reserved, &memory->used);
    memory->free = memory->total - memory->used - memory->reserved;
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *bar1)
{
    DEVICE(device);
    NEED(bar1);
    if (t.gi) {
        bar1->bar1Total = t.card->mig_bar1_mib * (unsigned long long)t.profile->mem_slices * MIB;
        bar1->bar1Used = 0;
    } else {
        bar1->bar1Total = t.card->bar1_mib * MIB;
        bar1->bar1Used = MIB;
    }
    bar1->bar1Free = bar1->bar1Total - bar1->bar1Used;
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates)
{
    WHOLE_GPU(device);
    NEED(rates);
    if (t.g->mig_current)
        return NV_UNSUPPORTED;
    rates->gpu = rates->memory = 0; /* nothing is computed on emulated silicon */
    return NV_OK;
}

#define ENGINE_UTILIZATION(function)                                                                         \
    nvmlReturn_t function(nvmlDevice_t device, unsigned *percent, unsigned *period);                         \
    nvmlReturn_t function(nvmlDevice_t device, unsigned *percent, unsigned *period)                          \
    {                                                                                                        \
        WHOLE_GPU(device);                                                                                   \
        NEED(percent &&period);                                                                              \
        if (t.g->mig_current)                                                                                \
            return NV_UNSUPPORTED;                                                                           \
        *percent = 0;                                                                                        \
        *period = 167000;                                                                                    \
        return NV_OK;                                                                                        \
    }

ENGINE_UTILIZATION(nvmlDeviceGetEncoderUtilization)
ENGINE_UTILIZATION(nvmlDeviceGetDecoderUtilization)
ENGINE_UTILIZATION(nvmlDeviceGetJpgUtilization)
ENGINE_UTILIZATION(nvmlDeviceGetOfaUtilization)

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *celsius)
{
    WHOLE_GPU(device);
    NEED(celsius && sensor == 0);
    *celsius = (unsigned)t.card->idle_c;
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature)
{
    WHOLE_GPU(device);
    NEED(temperature);
    if (temperature->version != NVML_STRUCT_VERSION(sizeof(*temperature), 1))
        return NV_VERSION;
    NEED(temperature->sensorType == 0);
    temperature->temperature = t.card->idle_c;
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, nvmlMarginTemperature_t *margin)
{
    WHOLE_GPU(device);
    NEED(margin);
    if (margin->version != NVML_STRUCT_VERSION(sizeof(*margin), 1))
        return NV_VERSION;
    margin->marginTemperature = 87 - t.card->idle_c;
    return NV_OK;
}

static nvmlReturn_t clock_of(nvmlDevice_t device, unsigned type, unsigned *mhz)
{
    WHOLE_GPU(device);
    NEED(mhz && type < 4);
    *mhz = type == 2 ? t.card->clock_mem : type == 3 ? t.card->clock_video : t.card->clock_max;
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned type, unsigned *mhz)
{
    return clock_of(device, type, mhz);
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned type, unsigned *mhz)
{
    return clock_of(device, type, mhz);
}

nvmlReturn_t nvmlDeviceGetApplicationsClock(nvmlDevice_t device, unsigned type, unsigned *mhz)
{
    return clock_of(device, type, mhz);
}

nvmlReturn_t nvmlDeviceGetDefaultApplicationsClock(nvmlDevice_t device, unsigned type, unsigned *mhz)
{
    return clock_of(device, type, mhz);
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    WHOLE_GPU(device);
    NEED(reasons);
    *reasons = 1; /* idle */
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    return nvmlDeviceGetCurrentClocksEventReasons(device, reasons);
}

nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned *least,
                                                          unsigned *most)
{
    WHOLE_GPU(device);
    NEED(least && most);
    *least = t.card->power_min_w * 1000;
    *most = t.card->power_w * 1000;
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, unsigned counter, unsigned *kbytes)
{
    WHOLE_GPU(device);
    NEED(kbytes && counter < 2);
    *kbytes = counter ? 430 : 825;
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    WHOLE_GPU(device);
    NEED(current && pending);
    *current = *pending = 1;
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned type, unsigned counter,
                                         unsigned long long *count)
{
    DEVICE(device);
    NEED(count && type < 2 && counter < 2);
    *count = 0;
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, unsigned type, unsigned counter,
                                             unsigned location, unsigned long long *count)
{
    (void)location;
    return nvmlDeviceGetTotalEccErrors(device, type, counter, count);
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *corrected, unsigned *uncorrected,
                                       unsigned *pending, unsigned *failed)
{
    WHOLE_GPU(device);
    NEED(corrected && uncorrected && pending && failed);
    *corrected = *uncorrected = *pending = *failed = 0;
    return t.card->remap_banks ? NV_OK : NV_UNSUPPORTED;
}

nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, nvmlRowRemapperHistogram_t *histogram)
{
    WHOLE_GPU(device);
    NEED(histogram);
    *histogram = (nvmlRowRemapperHistogram_t){.max = t.card->remap_banks};
    return t.card->remap_banks ? NV_OK : NV_UNSUPPORTED;
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    struct timespec now;

    DEVICE(device);
    NEED(values && count > 0);
    clock_gettime(CLOCK_REALTIME, &now);
    for (int i = 0; i < count; i++) {
        values[i].timestamp = now.tv_sec * 1000000ll + now.tv_nsec / 1000;
        values[i].latencyUsec = 0;
        values[i].value.u = 0;
        values[i].nvmlReturn = NV_UNSUPPORTED;
    }
    return NV_OK;
}

/* ---- processes ---- */

struct process {
    unsigned pid, mib, gi, ci;
};

/* Compute processes of a device that this process can see; returns how many there are. */
static unsigned processes(const struct target *t, struct process *out, unsigned room)
{
    unsigned n = 0;
    pid_t pid;

    for (unsigned i = 0; i < MAX_CLIENTS; i++) {
        const struct st_client *c = &st.clients[i];

        if (!c->used || !c->compute || c->gpu != t->gpu || !client_alive(i, &pid) || pid <= 0)
            continue;
        if (t->ci && (c->gi != t->gi->id || c->ci != t->ci->id))
            continue;
        if (n < room)
            out[n] =
                (struct process){(unsigned)pid, client_mib(i, pid), c->gi == NO_ID ? NVML_NO_INSTANCE : c->gi,
                                 c->ci == NO_ID ? NVML_NO_INSTANCE : c->ci};
        n++;
    }
    return n;
}

static nvmlReturn_t processes_out(nvmlDevice_t device, unsigned *count, void *infos, int v1)
{
    struct process found[MAX_CLIENTS];
    unsigned n;

    DEVICE(device);
    NEED(count && (infos || *count == 0));
    n = processes(&t, found, MAX_CLIENTS);
    if (n > *count) {
        *count = n;
        return NV_TOO_SMALL;
    }
    for (unsigned i = 0; i < n; i++)
        if (v1)
            ((nvmlProcessInfo_v1_t *)infos)[i] = (nvmlProcessInfo_v1_t){found[i].pid, found[i].mib * MIB};
        else
            ((nvmlProcessInfo_t *)infos)[i] =
                (nvmlProcessInfo_t){found[i].pid, found[i].mib * MIB, found[i].gi, found[i].ci};
    *count = n;
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                     nvmlProcessInfo_t *infos)
{
    return processes_out(device, count, infos, 0);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned *count,
                                                     nvmlProcessInfo_t *infos)
{
    return processes_out(device, count, infos, 0);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned *count,
                                                  nvmlProcessInfo_v1_t *infos)
{
    return processes_out(device, count, infos, 1);
}

#define NO_PROCESSES(function)                                                                               \
    nvmlReturn_t function(nvmlDevice_t device, unsigned *count, void *infos);                                \
    nvmlReturn_t function(nvmlDevice_t device, unsigned *count, void *infos)                                 \
    {                                                                                                        \
        DEVICE(device);                                                                                      \
        (void)infos;                                                                                         \
        NEED(count);                                                                                         \
        *count = 0;                                                                                          \
        return NV_OK;                                                                                        \
    }

NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3)

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
                                             unsigned *count, unsigned long long since)
{
    WHOLE_GPU(device);
    (void)samples;
    (void)since;
    NEED(count);
    *count = 0;
    return t.g->mig_current ? NV_UNSUPPORTED : NV_NOT_FOUND; /* no samples: nothing is computed here */
}

/* ---- MIG ---- */

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    WHOLE_GPU(device);
    NEED(current && pending);
    if (!t.card->mem_slices)
        return NV_UNSUPPORTED;
    *current = t.g->mig_current;
    *pending = t.g->mig_pending;
    return NV_OK;
}

nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned mode, nvmlReturn_t *activation)
{
    WHOLE_GPU(device);
    NEED(activation);
    return mode_set(t.gpu, mode, activation);
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *mig)
{
    unsigned gi, ci;

    WHOLE_GPU(device);
    NEED(mig);
    if (!t.card->mem_slices)
        return NV_UNSUPPORTED;
    if (visible_mig(t.gpu, index, &gi, &ci) != NV_OK)
        return NV_NOT_FOUND;
    *mig = intern(K_MIG, t.gpu, gi, ci);
    return *mig ? NV_OK : NV_UNKNOWN;
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device)
{
    DEVICE(mig);
    NEED(device && t.ci);
    *device = intern(K_GPU, t.gpu, 0, 0);
    return *device ? NV_OK : NV_UNKNOWN;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t mig, unsigned *id)
{
    DEVICE(mig);
    NEED(id);
    if (!t.ci)
        return NV_UNSUPPORTED;
    *id = t.gi->id;
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t mig, unsigned *id)
{
    DEVICE(mig);
    NEED(id);
    if (!t.ci)
        return NV_UNSUPPORTED;
    *id = t.ci->id;
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t mig, nvmlDeviceAttributes_t *a)
{
    const struct mig_profile *p;

    DEVICE(mig);
    NEED(a);
    if (!t.ci)
        return NV_UNSUPPORTED;
    p = t.profile;
    *a = (nvmlDeviceAttributes_t){.multiprocessorCount = ci_profile_sm(p, t.ci->profile),
                                  .sharedCopyEngineCount = p->ce,
                                  .sharedDecoderCount = p->dec,
                                  .sharedEncoderCount = p->enc,
                                  .sharedJpegCount = p->jpeg,
                                  .sharedOfaCount = p->ofa,
                                  .gpuInstanceSliceCount = p->slices,
                                  .computeInstanceSliceCount = ci_profile_slices[t.ci->profile],
                                  .memorySizeMB = p->memory_mib};
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t mig, nvmlDeviceAttributes_t *a)
{
    return nvmlDeviceGetAttributes_v2(mig, a);
}

/* A profile by NVML's number, with the answers of a real H200 for those it does not have. */
static nvmlReturn_t profile_find(const struct card *card, unsigned nvml, int *profile)
{
    if (!card->mem_slices)
        return NV_UNSUPPORTED;
    *profile = profile_by_nvml(card, nvml);
    return *profile >= 0 ? NV_OK : nvml < 17 ? NV_UNSUPPORTED : NV_INVALID;
}

static void gi_info_v2(const struct mig_profile *p, nvmlGpuInstanceProfileInfo_v2_t *info)
{
    memset(info, 0, sizeof(*info));
    info->version = NVML_STRUCT_VERSION(sizeof(*info), 2);
    info->id = p->id;
    info->sliceCount = p->slices;
    info->instanceCount = p->max;
    info->multiprocessorCount = p->sm;
    info->copyEngineCount = p->ce;
    info->decoderCount = p->dec;
    info->encoderCount = p->enc;
    info->jpegCount = p->jpeg;
    info->ofaCount = p->ofa;
    info->memorySizeMB = p->memory_mib;
    snprintf(info->name, sizeof(info->name), "MIG %s", p->name);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned profile,
                                                 nvmlGpuInstanceProfileInfo_t *info)
{
    nvmlGpuInstanceProfileInfo_v2_t v2;
    int i, rc;

    WHOLE_GPU(device);
    NEED(info);
    rc = profile_find(t.card, profile, &i);
    if (rc != NV_OK)
        return rc;
    gi_info_v2(&t.card->profiles[i], &v2);
    *info = (nvmlGpuInstanceProfileInfo_t){v2.id,
                                           v2.isP2pSupported,
                                           v2.sliceCount,
                                           v2.instanceCount,
                                           v2.multiprocessorCount,
                                           v2.copyEngineCount,
                                           v2.decoderCount,
                                           v2.encoderCount,
                                           v2.jpegCount,
                                           v2.ofaCount,
                                           v2.memorySizeMB};
    return NV_OK;
}

static nvmlReturn_t gi_info_versioned(const struct mig_profile *p, void *info)
{
    nvmlGpuInstanceProfileInfo_v2_t v2;
    unsigned version;

    memcpy(&version, info, sizeof(version));
    gi_info_v2(p, &v2);
    if (version == NVML_STRUCT_VERSION(sizeof(v2), 2)) {
        memcpy(info, &v2, sizeof(v2));
    } else if (version == NVML_STRUCT_VERSION(sizeof(nvmlGpuInstanceProfileInfo_v3_t), 3)) {
        nvmlGpuInstanceProfileInfo_v3_t *v3 = info;

        *v3 = (nvmlGpuInstanceProfileInfo_v3_t){version,
                                                v2.id,
                                                v2.sliceCount,
                                                v2.instanceCount,
                                                v2.multiprocessorCount,
                                                v2.copyEngineCount,
                                                v2.decoderCount,
                                                v2.encoderCount,
                                                v2.jpegCount,
                                                v2.ofaCount,
                                                v2.memorySizeMB,
                                                "",
                                                0};
        memcpy(v3->name, v2.name, sizeof(v3->name));
    } else {
        return NV_VERSION;
    }
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned profile, void *info)
{
    int i, rc;

    WHOLE_GPU(device);
    NEED(info);
    rc = profile_find(t.card, profile, &i);
    return rc == NV_OK ? gi_info_versioned(&t.card->profiles[i], info) : rc;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t device, unsigned id, void *info)
{
    int i;

    WHOLE_GPU(device);
    NEED(info);
    i = profile_by_id(t.card, id);
    return i >= 0 ? gi_info_versioned(&t.card->profiles[i], info) : NV_INVALID;
}

/* nvidia-smi's IDs, as NVML takes them below. */
static nvmlReturn_t profile_id_find(const struct card *card, unsigned id, int *profile)
{
    if (!card->mem_slices)
        return NV_UNSUPPORTED;
    *profile = profile_by_id(card, id);
    return *profile >= 0 ? NV_OK : NV_INVALID;
}

nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned id,
                                                           nvmlPlacement_t *placements, unsigned *count)
{
    const struct mig_profile *p;
    unsigned n = 0;
    int i, rc;

    WHOLE_GPU(device);
    NEED(count);
    rc = profile_id_find(t.card, id, &i);
    if (rc != NV_OK)
        return rc;
    p = &t.card->profiles[i];
    while (n < MAX_PLACEMENTS && p->starts[n] >= 0)
        n++;
    if (placements && *count < n)
        return NV_TOO_SMALL;
    *count = n;
    for (unsigned k = 0; placements && k < n; k++)
        placements[k] = (nvmlPlacement_t){(unsigned)p->starts[k], p->mem_slices};
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements(nvmlDevice_t device, unsigned id,
                                                        nvmlPlacement_t *placements, unsigned *count)
{
    return nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, id, placements, count);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned id, unsigned *count)
{
    int i, rc;

    WHOLE_GPU(device);
    NEED(count);
    rc = profile_id_find(t.card, id, &i);
    if (rc == NV_OK)
        *count = remaining(t.g, (unsigned)i);
    return rc;
}

static nvmlReturn_t gi_create_at(nvmlDevice_t device, unsigned id, int start, nvmlGpuInstance_t *instance)
{
    unsigned gi;
    int i, rc;

    WHOLE_GPU(device);
    NEED(instance);
    rc = profile_id_find(t.card, id, &i);
    if (rc == NV_OK)
        rc = gi_create(t.gpu, (unsigned)i, start, &gi);
    if (rc == NV_OK && !(*instance = intern(K_GI, t.gpu, gi, 0)))
        rc = NV_UNKNOWN;
    return rc;
}

nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instance)
{
    return gi_create_at(device, id, -1, instance);
}

nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t device, unsigned id,
                                                      const nvmlPlacement_t *placement,
                                                      nvmlGpuInstance_t *instance)
{
    NEED(placement);
    return gi_create_at(device, id, (int)placement->start, instance);
}

nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instances,
                                       unsigned *count)
{
    int i, rc;

    WHOLE_GPU(device);
    NEED(instances && count);
    rc = profile_id_find(t.card, id, &i);
    if (rc != NV_OK)
        return rc;
    *count = 0;
    for (unsigned gi = 0; gi < 15; gi++) {
        struct st_gi *found = gi_find(t.g, gi);

        if (found && found->profile == i && gi_visible(t.gpu, found))
            instances[(*count)++] = intern(K_GI, t.gpu, gi, 0);
    }
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instance)
{
    const struct st_gi *gi;

    WHOLE_GPU(device);
    NEED(instance);
    if (!t.card->mem_slices)
        return NV_UNSUPPORTED;
    gi = gi_find(t.g, id);
    if (!gi || !gi_visible(t.gpu, gi))
        return NV_NOT_FOUND;
    *instance = intern(K_GI, t.gpu, id, 0);
    return *instance ? NV_OK : NV_UNKNOWN;
}

#define INSTANCE(instance, wanted)                                                                           \
    struct target t;                                                                                         \
    ENTER;                                                                                                   \
    int rc_ = known(instance) && (instance)->kind != (wanted) ? NV_INVALID : resolve(instance, &t);          \
    if (rc_ != NV_OK)                                                                                        \
    return rc_

nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
    INSTANCE(instance, K_GI);
    NEED(info);
    *info = (nvmlGpuInstanceInfo_t){.device = intern(K_GPU, t.gpu, 0, 0),
                                    .id = t.gi->id,
                                    .profileId = t.profile->id,
                                    .placement = {t.gi->start, t.profile->mem_slices}};
    return NV_OK;
}

nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t instance)
{
    INSTANCE(instance, K_GI);
    return gi_destroy(t.gpu, t.gi->id);
}

/* NVML: a profile this instance cannot have is Not Supported, a number beyond the list Invalid Argument. */
static nvmlReturn_t ci_profile_find(const struct mig_profile *p, unsigned profile)
{
    return ci_profile_max(p, profile) ? NV_OK : profile < CI_PROFILES ? NV_UNSUPPORTED : NV_INVALID;
}

static nvmlReturn_t ci_info(nvmlGpuInstance_t instance, unsigned profile, unsigned engine,
                            nvmlComputeInstanceProfileInfo_t *info, char name[96])
{
    char text[64];
    int rc;

    INSTANCE(instance, K_GI);
    NEED(engine == 0);
    rc = ci_profile_find(t.profile, profile);
    if (rc != NV_OK)
        return rc;
    *info = (nvmlComputeInstanceProfileInfo_t){.id = profile,
                                               .sliceCount = ci_profile_slices[profile],
                                               .instanceCount = ci_profile_max(t.profile, profile),
                                               .multiprocessorCount = ci_profile_sm(t.profile, profile),
                                               .sharedCopyEngineCount = t.profile->ce,
                                               .sharedDecoderCount = t.profile->dec,
                                               .sharedEncoderCount = t.profile->enc,
                                               .sharedJpegCount = t.profile->jpeg,
                                               .sharedOfaCount = t.profile->ofa};
    if (name) {
        ci_profile_name(t.profile, profile, text, sizeof(text));
        snprintf(name, 96, "MIG %s", text);
    }
    return NV_OK;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t instance, unsigned profile,
                                                          unsigned engine,
                                                          nvmlComputeInstanceProfileInfo_t *info)
{
    NEED(info);
    return ci_info(instance, profile, engine, info, NULL);
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t instance, unsigned profile,
                                                           unsigned engine, void *info)
{
    nvmlComputeInstanceProfileInfo_v3_t *v = info; /* _v2 is the same but for the last field */

    NEED(info);
    if (v->version == NVML_STRUCT_VERSION(sizeof(*v), 3))
        v->capabilities = 0;
    else if (v->version != NVML_STRUCT_VERSION(sizeof(nvmlComputeInstanceProfileInfo_v2_t), 2))
        return NV_VERSION;
    return ci_info(instance, profile, engine, &v->info, v->name);
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceRemainingCapacity(nvmlGpuInstance_t instance, unsigned profile,
                                                                unsigned *count)
{
    int rc;

    INSTANCE(instance, K_GI);
    NEED(count);
    rc = ci_profile_find(t.profile, profile);
    if (rc == NV_OK)
        *count = ci_remaining(t.g, t.gi, profile);
    return rc;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstancePossiblePlacements(nvmlGpuInstance_t instance, unsigned profile,
                                                                 nvmlPlacement_t *placements, unsigned *count)
{
    unsigned n, slices;
    int rc;

    INSTANCE(instance, K_GI);
    NEED(count);
    rc = ci_profile_find(t.profile, profile);
    if (rc != NV_OK)
        return rc;
    slices = ci_profile_slices[profile];
    n = t.profile->slices - slices + 1;
    if (placements && *count < n)
        return NV_TOO_SMALL;
    *count = n;
    for (unsigned i = 0; placements && i < n; i++)
        placements[i] = (nvmlPlacement_t){i, slices};
    return NV_OK;
}

static nvmlReturn_t ci_create_at(nvmlGpuInstance_t instance, unsigned profile, int start,
                                 nvmlComputeInstance_t *out)
{
    unsigned ci;
    int rc;

    INSTANCE(instance, K_GI);
    NEED(out);
    rc = ci_profile_find(t.profile, profile);
    if (rc == NV_OK)
        rc = ci_create(t.gpu, t.gi->id, profile, start, &ci);
    if (rc == NV_OK && !(*out = intern(K_CI, instance->gpu, instance->gi, ci)))
        rc = NV_UNKNOWN;
    return rc;
}

nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t instance, unsigned profile,
                                                  nvmlComputeInstance_t *out)
{
    return ci_create_at(instance, profile, -1, out);
}

nvmlReturn_t nvmlGpuInstanceCreateComputeInstanceWithPlacement(nvmlGpuInstance_t instance, unsigned profile,
                                                               const nvmlPlacement_t *placement,
                                                               nvmlComputeInstance_t *out)
{
    NEED(placement);
    return ci_create_at(instance, profile, (int)placement->start, out);
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t instance, unsigned profile,
                                                nvmlComputeInstance_t *out, unsigned *count)
{
    int rc;

    INSTANCE(instance, K_GI);
    NEED(out && count);
    rc = ci_profile_find(t.profile, profile);
    if (rc != NV_OK)
        return rc;
    *count = 0;
    for (unsigned ci = 0; ci < MAX_CIS; ci++) {
        struct st_ci *found = ci_find(t.gi, ci);

        if (found && found->profile == profile)
            out[(*count)++] = intern(K_CI, t.gpu, t.gi->id, ci);
    }
    return NV_OK;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t instance, unsigned id,
                                                   nvmlComputeInstance_t *out)
{
    INSTANCE(instance, K_GI);
    NEED(out);
    if (!ci_find(t.gi, id))
        return NV_NOT_FOUND;
    *out = intern(K_CI, t.gpu, t.gi->id, id);
    return *out ? NV_OK : NV_UNKNOWN;
}

nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info)
{
    INSTANCE(instance, K_CI);
    NEED(info);
    *info = (nvmlComputeInstanceInfo_t){.device = intern(K_GPU, t.gpu, 0, 0),
                                        .gpuInstance = intern(K_GI, t.gpu, t.gi->id, 0),
                                        .id = t.ci->id,
                                        .profileId = t.ci->profile,
                                        .placement = {t.ci->start, ci_profile_slices[t.ci->profile]}};
    return NV_OK;
}

nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t instance)
{
    INSTANCE(instance, K_CI);
    return ci_destroy(t.gpu, t.gi->id, t.ci->id);
}

/* ---- settings ---- */

nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, unsigned mode)
{
    WHOLE_GPU(device);
    NEED(mode < 2);
    return setting_set(t.gpu, SET_PERSISTENCE, mode);
}

nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, unsigned mode)
{
    WHOLE_GPU(device);
    NEED(mode < 4);
    return mode == 1 ? NV_UNSUPPORTED : setting_set(t.gpu, SET_COMPUTE_MODE, mode);
}

/* ---- events ---- */

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    ENTER;
    NEED(set);
    *set = calloc(1, sizeof(**set));
    if (!*set)
        return NV_UNKNOWN;
    (*set)->seen = st.last_event;
    return NV_OK;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    ENTER;
    NEED(set);
    free(set);
    return NV_OK;
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    WHOLE_GPU(device);
    NEED(types);
    *types = 0x1 | 0x2 | NVML_EVENT_XID | 0x10; /* ECC errors, Xid, clocks: only Xids ever come */
    return NV_OK;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    WHOLE_GPU(device);
    NEED(set);
    if (types & NVML_EVENT_XID)
        set->gpus |= 1ull << t.gpu;
    return NV_OK;
}

static nvmlReturn_t event_next(nvmlEventSet_t set, nvmlEventData_t *data)
{
    ENTER;
    while (set->seen < st.last_event) {
        const struct st_event *e = &st.events[set->seen % MAX_EVENTS];

        if (e->seq <= set->seen || e->seq > set->seen + 1) {
            set->seen = st.last_event - MAX_EVENTS; /* overrun: the oldest are gone */
            continue;
        }
        set->seen = e->seq;
        if (!(set->gpus & 1ull << e->gpu))
            continue;
        *data = (nvmlEventData_t){intern(K_GPU, e->gpu, 0, 0), NVML_EVENT_XID, e->xid,
                                  e->gi == NO_ID ? NVML_NO_INSTANCE : e->gi,
                                  e->ci == NO_ID ? NVML_NO_INSTANCE : e->ci};
        return NV_OK;
    }
    return 10; /* Timeout */
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms)
{
    unsigned waited = 0;
    int rc;

    NEED(set && data);
    while ((rc = event_next(set, data)) == 10 && waited < timeout_ms) {
        unsigned step = timeout_ms - waited < 100 ? timeout_ms - waited : 100;

        usleep(step * 1000);
        waited += step;
    }
    return rc;
}

nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms)
{
    return nvmlEventSetWait_v2(set, data, timeout_ms);
}
