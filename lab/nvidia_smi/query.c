/* nvidia-smi --query-gpu=..., --query-compute-apps=... */
#define _GNU_SOURCE
#include "smi.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define NA "[N/A]"

struct row {
    unsigned index, gpu;
    const struct st_gpu *g;
    const struct card *c;
    const struct app *app;
};

typedef void value_fn(const struct row *r, char *out, size_t size);

/* Either a function or a fixed text: what does not change on a card that computes nothing. */
struct field {
    const char *name, *alias, *unit;
    value_fn *value;
    const char *fixed;
};

#define VALUE(function, format, ...)                                                                         \
    static void function(const struct row *r, char *out, size_t size)                                        \
    {                                                                                                        \
        (void)r;                                                                                             \
        snprintf(out, size, format, __VA_ARGS__);                                                            \
    }

VALUE(v_timestamp, "%s.000", timestamp("%Y/%m/%d %H:%M:%S"))
VALUE(v_driver, "%s", st.driver_version)
VALUE(v_name, "%s", r->c->name)
VALUE(v_serial, "%llu", (unsigned long long)r->g->serial)
VALUE(v_index, "%u", r->index)
VALUE(v_bus, "0x%02X", r->g->bus)
VALUE(v_device, "0x%02X", r->g->device)
VALUE(v_device_id, "0x%08X", r->c->pci_device)
VALUE(v_sub_id, "0x%08X", r->c->pci_subsystem)
VALUE(v_gen, "%u", r->c->pcie_gen)
VALUE(v_persistence, "%s", r->g->persistence ? "Enabled" : "Disabled")
VALUE(v_vbios, "%s", r->c->vbios)
VALUE(v_inforom, "%s", r->c->inforom_image)
VALUE(v_inforom_oem, "%s", r->c->inforom_oem)
VALUE(v_inforom_ecc, "%s", r->c->inforom_ecc)
VALUE(v_cap, "%u.%u", r->c->cc_major, r->c->cc_minor)
VALUE(v_utilization, "%s", r->g->mig_current ? NA : "0")
VALUE(v_temperature, "%d", r->c->idle_c)
VALUE(v_tlimit, "%d", 87 - r->c->idle_c)
VALUE(v_draw, "%d.00", r->c->idle_w)
VALUE(v_limit, "%u.00", r->c->power_w)
VALUE(v_min_limit, "%u.00", r->c->power_min_w)
VALUE(v_clock, "%u", r->c->clock_max)
VALUE(v_clock_mem, "%u", r->c->clock_mem)
VALUE(v_clock_video, "%u", r->c->clock_video)
VALUE(v_mig_now, "%s", !r->c->mem_slices ? NA : r->g->mig_current ? "Enabled" : "Disabled")
VALUE(v_mig_then, "%s", !r->c->mem_slices ? NA : r->g->mig_pending ? "Enabled" : "Disabled")
VALUE(v_banks_max, "%u", r->c->remap_banks)
VALUE(v_module, "%u", gpu_module(r->gpu))
VALUE(v_pid, "%d", r->app->pid)
VALUE(v_process, "%s", r->app->name)
VALUE(v_app_memory, "%u", r->app->mib)

static void v_count(const struct row *r, char *out, size_t size)
{
    unsigned n = 0;

    (void)r;
    for (unsigned gpu = 0; gpu < st.n_gpus; gpu++)
        n += gpu_visible(gpu);
    snprintf(out, size, "%u", n);
}

static void v_uuid(const struct row *r, char *out, size_t size)
{
    char text[48];

    uuid_text("GPU-", r->g->uuid, text);
    snprintf(out, size, "%s", text);
}

static void v_bus_id(const struct row *r, char *out, size_t size)
{
    char text[24];

    bus_id_text(r->gpu, text);
    snprintf(out, size, "%s", text);
}

static void v_compute_mode(const struct row *r, char *out, size_t size)
{
    static const char *const modes[] = {"Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process"};

    snprintf(out, size, "%s", modes[r->g->compute_mode & 3]);
}

static void memory(const struct row *r, int what, char *out, size_t size)
{
    unsigned long long m[3];

    gpu_memory(r->gpu, &m[0], &m[1], &m[2]);
    snprintf(out, size, "%u", mib_up(what < 3 ? m[what] : m[0] - m[1] - m[2]));
}

#define MEMORY(function, what)                                                                               \
    static void function(const struct row *r, char *out, size_t size)                                        \
    {                                                                                                        \
        memory(r, what, out, size);                                                                          \
    }

MEMORY(v_total, 0)
MEMORY(v_reserved, 1)
MEMORY(v_used, 2)
MEMORY(v_free, 3)

// clang-format off
static const struct field gpu_fields[] = {
    {"timestamp", 0, 0, v_timestamp, 0},
    {"driver_version", 0, 0, v_driver, 0},
    {"vgpu_driver_capability.heterogenous_multivGPU", 0, 0, 0, NA},
    {"count", 0, 0, v_count, 0},
    {"name", "gpu_name", 0, v_name, 0},
    {"serial", "gpu_serial", 0, v_serial, 0},
    {"uuid", "gpu_uuid", 0, v_uuid, 0},
    {"pci.bus_id", "gpu_bus_id", 0, v_bus_id, 0},
    {"pci.domain", 0, 0, 0, "0x0000"},
    {"pci.bus", 0, 0, v_bus, 0},
    {"pci.device", 0, 0, v_device, 0},
    {"pci.baseClass", 0, 0, 0, "0x3"},
    {"pci.subClass", 0, 0, 0, "0x2"},
    {"pci.device_id", 0, 0, v_device_id, 0},
    {"pci.sub_device_id", 0, 0, v_sub_id, 0},
    {"vgpu_device_capability.fractional_multiVgpu", 0, 0, 0, NA},
    {"vgpu_device_capability.heterogeneous_timeSlice_profile", 0, 0, 0, NA},
    {"vgpu_device_capability.heterogeneous_timeSlice_sizes", 0, 0, 0, NA},
    {"vgpu_device_capability.homogeneous_placements", 0, 0, 0, NA},
    {"vgpu_device_capability.mig_timeSlicing", 0, 0, 0, NA},
    {"vgpu_device_capability.mig_timeSlicing_mode", 0, 0, 0, NA},
    {"pcie.link.gen.current", 0, 0, v_gen, 0},
    {"pcie.link.gen.gpucurrent", 0, 0, v_gen, 0},
    {"pcie.link.gen.max", 0, 0, v_gen, 0},
    {"pcie.link.gen.gpumax", 0, 0, v_gen, 0},
    {"pcie.link.gen.hostmax", 0, 0, 0, NA},
    {"pcie.link.width.current", 0, 0, 0, "16"},
    {"pcie.link.width.max", 0, 0, 0, "16"},
    {"index", 0, 0, v_index, 0},
    {"display_mode", 0, 0, 0, "[Requested functionality has been deprecated]"},
    {"display_attached", 0, 0, 0, "Yes"},
    {"display_active", 0, 0, 0, "Disabled"},
    {"persistence_mode", 0, 0, v_persistence, 0},
    {"addressing_mode", 0, 0, 0, "None"},
    {"accounting.mode", 0, 0, 0, "Disabled"},
    {"accounting.buffer_size", 0, 0, 0, "4000"},
    {"driver_model.current", 0, 0, 0, NA},
    {"driver_model.pending", 0, 0, 0, NA},
    {"vbios_version", 0, 0, v_vbios, 0},
    {"inforom.img", "inforom.image", 0, v_inforom, 0},
    {"inforom.oem", 0, 0, v_inforom_oem, 0},
    {"inforom.ecc", 0, 0, v_inforom_ecc, 0},
    {"inforom.pwr", "inforom.power", 0, 0, NA},
    {"inforom.checksum_validation", 0, 0, 0, NA},
    {"gpu_recovery_action", 0, 0, 0, "None"},
    {"gom.current", "gpu_operation_mode.current", 0, 0, NA},
    {"gom.pending", "gpu_operation_mode.pending", 0, 0, NA},
    {"fan.speed", 0, "%", 0, NA},
    {"pstate", 0, 0, 0, "P0"},
    {"clocks_event_reasons.supported", "clocks_throttle_reasons.supported", 0, 0, "0x00000000000001FF"},
    {"clocks_event_reasons.active", "clocks_throttle_reasons.active", 0, 0, "0x0000000000000001"},
    {"clocks_event_reasons.gpu_idle", "clocks_throttle_reasons.gpu_idle", 0, 0, "Active"},
    {"clocks_event_reasons.applications_clocks_setting", "clocks_throttle_reasons.applications_clocks_setting", 0, 0, "Not Active"},
    {"clocks_event_reasons.sw_power_cap", "clocks_throttle_reasons.sw_power_cap", 0, 0, "Not Active"},
    {"clocks_event_reasons.hw_slowdown", "clocks_throttle_reasons.hw_slowdown", 0, 0, "Not Active"},
    {"clocks_event_reasons.hw_thermal_slowdown", "clocks_throttle_reasons.hw_thermal_slowdown", 0, 0, "Not Active"},
    {"clocks_event_reasons.hw_power_brake_slowdown", "clocks_throttle_reasons.hw_power_brake_slowdown", 0, 0, "Not Active"},
    {"clocks_event_reasons.sw_thermal_slowdown", "clocks_throttle_reasons.sw_thermal_slowdown", 0, 0, "Not Active"},
    {"clocks_event_reasons.sync_boost", "clocks_throttle_reasons.sync_boost", 0, 0, "Not Active"},
    {"clocks_event_reasons_counters.sw_power_cap", 0, "us", 0, "0"},
    {"clocks_event_reasons_counters.sync_boost", 0, "us", 0, "0"},
    {"clocks_event_reasons_counters.sw_thermal_slowdown", 0, "us", 0, "0"},
    {"clocks_event_reasons_counters.hw_thermal_slowdown", 0, "us", 0, "0"},
    {"clocks_event_reasons_counters.hw_power_brake_slowdown", 0, "us", 0, "0"},
    {"memory.total", 0, "MiB", v_total, 0},
    {"memory.reserved", 0, "MiB", v_reserved, 0},
    {"memory.used", 0, "MiB", v_used, 0},
    {"memory.free", 0, "MiB", v_free, 0},
    {"compute_mode", 0, 0, v_compute_mode, 0},
    {"compute_cap", 0, 0, v_cap, 0},
    {"utilization.gpu", 0, "%", v_utilization, 0},
    {"utilization.memory", 0, "%", v_utilization, 0},
    {"utilization.encoder", 0, "%", v_utilization, 0},
    {"utilization.decoder", 0, "%", v_utilization, 0},
    {"utilization.jpeg", 0, "%", v_utilization, 0},
    {"utilization.ofa", 0, "%", v_utilization, 0},
    {"encoder.stats.sessionCount", 0, 0, 0, "0"},
    {"encoder.stats.averageFps", 0, 0, 0, "0"},
    {"encoder.stats.averageLatency", 0, 0, 0, "0"},
    {"dramEncryption.mode.current", 0, 0, 0, NA},
    {"dramEncryption.mode.pending", 0, 0, 0, NA},
    {"ecc.mode.current", 0, 0, 0, "Enabled"},
    {"ecc.mode.pending", 0, 0, 0, "Enabled"},
    {"ecc.errors.corrected.volatile.device_memory", 0, 0, 0, NA},
    {"ecc.errors.corrected.volatile.dram", 0, 0, 0, "0"},
    {"ecc.errors.corrected.volatile.register_file", 0, 0, 0, NA},
    {"ecc.errors.corrected.volatile.l1_cache", 0, 0, 0, NA},
    {"ecc.errors.corrected.volatile.l2_cache", 0, 0, 0, NA},
    {"ecc.errors.corrected.volatile.texture_memory", 0, 0, 0, NA},
    {"ecc.errors.corrected.volatile.cbu", 0, 0, 0, NA},
    {"ecc.errors.corrected.volatile.sram", 0, 0, 0, "0"},
    {"ecc.errors.corrected.volatile.total", 0, 0, 0, "0"},
    {"ecc.errors.corrected.aggregate.device_memory", 0, 0, 0, NA},
    {"ecc.errors.corrected.aggregate.dram", 0, 0, 0, "0"},
    {"ecc.errors.corrected.aggregate.register_file", 0, 0, 0, NA},
    {"ecc.errors.corrected.aggregate.l1_cache", 0, 0, 0, NA},
    {"ecc.errors.corrected.aggregate.l2_cache", 0, 0, 0, NA},
    {"ecc.errors.corrected.aggregate.texture_memory", 0, 0, 0, NA},
    {"ecc.errors.corrected.aggregate.cbu", 0, 0, 0, NA},
    {"ecc.errors.corrected.aggregate.sram", 0, 0, 0, "0"},
    {"ecc.errors.corrected.aggregate.total", 0, 0, 0, "0"},
    {"ecc.errors.uncorrected.volatile.device_memory", 0, 0, 0, NA},
    {"ecc.errors.uncorrected.volatile.dram", 0, 0, 0, "0"},
    {"ecc.errors.uncorrected.volatile.register_file", 0, 0, 0, NA},
    {"ecc.errors.uncorrected.volatile.l1_cache", 0, 0, 0, NA},
    {"ecc.errors.uncorrected.volatile.l2_cache", 0, 0, 0, NA},
    {"ecc.errors.uncorrected.volatile.texture_memory", 0, 0, 0, NA},
    {"ecc.errors.uncorrected.volatile.cbu", 0, 0, 0, NA},
    {"ecc.errors.uncorrected.volatile.sram", 0, 0, 0, "0"},
    {"ecc.errors.uncorrected.volatile.total", 0, 0, 0, "0"},
    {"ecc.errors.uncorrected.aggregate.device_memory", 0, 0, 0, NA},
    {"ecc.errors.uncorrected.aggregate.dram", 0, 0, 0, "0"},
    {"ecc.errors.uncorrected.aggregate.register_file", 0, 0, 0, NA},
    {"ecc.errors.uncorrected.aggregate.l1_cache", 0, 0, 0, NA},
    {"ecc.errors.uncorrected.aggregate.l2_cache", 0, 0, 0, NA},
    {"ecc.errors.uncorrected.aggregate.texture_memory", 0, 0, 0, NA},
    {"ecc.errors.uncorrected.aggregate.cbu", 0, 0, 0, NA},
    {"ecc.errors.uncorrected.aggregate.sram", 0, 0, 0, "0"},
    {"ecc.errors.uncorrected.aggregate.total", 0, 0, 0, "0"},
    {"ecc.errors.uncorrected.volatile.sram.parity", 0, 0, 0, "0"},
    {"ecc.errors.uncorrected.volatile.sram.secded", 0, 0, 0, "0"},
    {"ecc.errors.uncorrected.aggregate.sram.parity", 0, 0, 0, "0"},
    {"ecc.errors.uncorrected.aggregate.sram.secded", 0, 0, 0, "0"},
    {"ecc.errors.uncorrected.aggregate.sram.thresholdExceeded", 0, 0, 0, "No"},
    {"ecc.errors.uncorrected.aggregate.sram.l2", 0, 0, 0, "0"},
    {"ecc.errors.uncorrected.aggregate.sram.sm", 0, 0, 0, "0"},
    {"ecc.errors.uncorrected.aggregate.sram.mcu", 0, 0, 0, "0"},
    {"ecc.errors.uncorrected.aggregate.sram.pcie", 0, 0, 0, "0"},
    {"ecc.errors.uncorrected.aggregate.sram.other", 0, 0, 0, "0"},
    {"retired_pages.single_bit_ecc.count", "retired_pages.sbe", 0, 0, NA},
    {"retired_pages.double_bit.count", "retired_pages.dbe", 0, 0, NA},
    {"retired_pages.pending", 0, 0, 0, NA},
    {"remapped_rows.correctable", "remapped_rows.sbe", 0, 0, "0"},
    {"remapped_rows.correctable_inactive", 0, 0, 0, "0"},
    {"remapped_rows.uncorrectable", "remapped_rows.dbe", 0, 0, "0"},
    {"remapped_rows.uncorrectable_inactive", 0, 0, 0, "0"},
    {"remapped_rows.pending", 0, 0, 0, "No"},
    {"remapped_rows.failure", 0, 0, 0, "No"},
    {"remapped_rows.histogram.max", 0, "bank(s)", v_banks_max, 0},
    {"remapped_rows.histogram.high", 0, "bank(s)", 0, "0"},
    {"remapped_rows.histogram.partial", 0, "bank(s)", 0, "0"},
    {"remapped_rows.histogram.low", 0, "bank(s)", 0, "0"},
    {"remapped_rows.histogram.none", 0, "bank(s)", 0, "0"},
    {"temperature.gpu", 0, 0, v_temperature, 0},
    {"temperature.gpu.tlimit", 0, 0, v_tlimit, 0},
    {"temperature.memory", 0, 0, v_temperature, 0},
    {"power.management", 0, 0, 0, "Enabled"},
    {"power.draw", 0, "W", v_draw, 0},
    {"power.draw.average", "gpu.power.draw.average", "W", v_draw, 0},
    {"power.draw.instant", "gpu.power.draw.instant", "W", v_draw, 0},
    {"power.limit", "gpu.power.requested_limit", "W", v_limit, 0},
    {"enforced.power.limit", "gpu.power.current_limit", "W", v_limit, 0},
    {"power.default_limit", "gpu.power.default_limit", "W", v_limit, 0},
    {"power.min_limit", "gpu.power.min_limit", "W", v_min_limit, 0},
    {"power.max_limit", "gpu.power.max_limit", "W", v_limit, 0},
    {"module.power.draw.average", 0, "W", 0, NA},
    {"module.power.draw.instant", 0, "W", 0, NA},
    {"module.power.limit", "module.power.requested_limit", "W", 0, NA},
    {"module.enforced.power.limit", "module.power.current_limit", "W", 0, NA},
    {"module.power.default_limit", 0, "W", 0, NA},
    {"module.power.min_limit", 0, "W", 0, NA},
    {"module.power.max_limit", 0, "W", 0, NA},
    {"power_smoothing.delayed_power_smoothing_supported", 0, 0, 0, NA},
    {"power_smoothing.primary_power_floor", 0, "W", 0, NA},
    {"power_smoothing.secondary_power_floor", 0, "W", 0, NA},
    {"power_smoothing.min_primary_floor_activation_offset", 0, "W", 0, NA},
    {"power_smoothing.min_primary_floor_activation_point", 0, "W", 0, NA},
    {"power_smoothing.window_multiplier", 0, 0, 0, NA},
    {"power_smoothing.curr_profile.secondary_power_floor", 0, "W", 0, NA},
    {"power_smoothing.curr_profile.primary_floor_act_window_multiplier", 0, "W", 0, NA},
    {"power_smoothing.curr_profile.primary_floor_tar_window_multiplier", 0, "W", 0, NA},
    {"power_smoothing.curr_profile.primary_floor_act_offset", 0, "W", 0, NA},
    {"power_smoothing.admin_override.secondary_power_floor", 0, "W", 0, NA},
    {"power_smoothing.admin_override.primary_floor_act_window_multiplier", 0, "W", 0, NA},
    {"power_smoothing.admin_override.primary_floor_tar_window_multiplier", 0, "W", 0, NA},
    {"power_smoothing.admin_override.primary_floor_act_offset", 0, "W", 0, NA},
    {"clocks.current.graphics", "clocks.gr", "MHz", v_clock, 0},
    {"clocks.current.sm", "clocks.sm", "MHz", v_clock, 0},
    {"clocks.current.memory", "clocks.mem", "MHz", v_clock_mem, 0},
    {"clocks.current.video", "clocks.video", "MHz", v_clock_video, 0},
    {"clocks.applications.graphics", "clocks.applications.gr", "MHz", v_clock, 0},
    {"clocks.applications.memory", "clocks.applications.mem", "MHz", v_clock_mem, 0},
    {"clocks.default_applications.graphics", "clocks.default_applications.gr", "MHz", v_clock, 0},
    {"clocks.default_applications.memory", "clocks.default_applications.mem", "MHz", v_clock_mem, 0},
    {"clocks.max.graphics", "clocks.max.gr", "MHz", v_clock, 0},
    {"clocks.max.sm", 0, "MHz", v_clock, 0},
    {"clocks.max.memory", "clocks.max.mem", "MHz", v_clock_mem, 0},
    {"mig.mode.current", 0, 0, v_mig_now, 0},
    {"mig.mode.pending", 0, 0, v_mig_then, 0},
    {"gsp.mode.current", 0, 0, 0, "Enabled"},
    {"gsp.mode.default", 0, 0, 0, "Enabled"},
    {"c2c.mode", 0, 0, 0, "Disabled"},
    {"protected_memory.total", 0, "MiB", 0, "0"},
    {"protected_memory.used", 0, "MiB", 0, "0"},
    {"protected_memory.free", 0, "MiB", 0, "0"},
    {"fabric.state", 0, 0, 0, NA},
    {"fabric.status", 0, 0, 0, NA},
    {"fabric.cliqueId", 0, 0, 0, NA},
    {"fabric.clusterUuid", 0, 0, 0, NA},
    {"fabric.health.summary", 0, 0, 0, NA},
    {"fabric.health.bandwidth", 0, 0, 0, NA},
    {"fabric.health.route_recovery_in_progress", 0, 0, 0, NA},
    {"fabric.health.route_unhealthy", 0, 0, 0, NA},
    {"fabric.health.access_timeout_recovery", 0, 0, 0, NA},
    {"fabric.health.incorrect_configuration", 0, 0, 0, NA},
    {"fabric.health.partition_assigned", 0, 0, 0, NA},
    {"platform.chassis_serial_number", 0, 0, 0, NA},
    {"platform.slot_number", 0, 0, 0, NA},
    {"platform.tray_index", 0, 0, 0, NA},
    {"platform.host_id", 0, 0, 0, NA},
    {"platform.peer_type", 0, 0, 0, NA},
    {"platform.module_id", 0, 0, v_module, 0},
    {"platform.gpu_fabric_guid", 0, 0, 0, NA},
    {"hostname", 0, 0, 0, NA},
    {0, 0, 0, 0, 0},
};

static const struct field app_fields[] = {
    {"timestamp", 0, 0, v_timestamp, 0},
    {"gpu_name", 0, 0, v_name, 0},
    {"gpu_bus_id", 0, 0, v_bus_id, 0},
    {"gpu_serial", 0, 0, v_serial, 0},
    {"gpu_uuid", 0, 0, v_uuid, 0},
    {"pid", 0, 0, v_pid, 0},
    {"process_name", "name", 0, v_process, 0},
    {"used_gpu_memory", "used_memory", "MiB", v_app_memory, 0},
    {0, 0, 0, 0, 0},
};
// clang-format on

struct plan {
    const struct field *fields[256];
    unsigned n;
    int header, units;
};

static char *strip(char *p)
{
    char *end = p + strlen(p);

    while (*p == ' ')
        p++;
    while (end > p && end[-1] == ' ')
        *--end = '\0';
    return p;
}

static int plan_make(const struct field *known, const char *names, const char *format, struct plan *plan)
{
    char copy[16384], *save;
    int csv = 0;

    *plan = (struct plan){.header = 1, .units = 1};
    snprintf(copy, sizeof(copy), "%s", format ? format : "");
    for (char *p = strtok_r(copy, ",", &save); p; p = strtok_r(NULL, ",", &save)) {
        p = strip(p);
        if (strcmp(p, "csv") == 0)
            csv = 1;
        else if (strcmp(p, "noheader") == 0)
            plan->header = 0;
        else if (strcmp(p, "nounits") == 0)
            plan->units = 0;
        else {
            printf("\"%s\" is not a valid format switch.\n\n", p);
            return 2;
        }
    }
    if (!csv) {
        puts("Option --format=csv is required with a query.\n");
        return 2;
    }
    snprintf(copy, sizeof(copy), "%s", names);
    for (char *p = strtok_r(copy, ",", &save); p; p = strtok_r(NULL, ",", &save)) {
        const struct field *f = known;

        p = strip(p);
        while (f->name && strcasecmp(f->name, p) != 0 && (!f->alias || strcasecmp(f->alias, p) != 0))
            f++;
        if (!f->name || plan->n == 256) {
            printf("Field \"%s\" is not a valid field to query.\n\n", p);
            return 2;
        }
        plan->fields[plan->n++] = f;
    }
    return 0;
}

static void print_header(const struct plan *plan, FILE *out)
{
    if (!plan->header)
        return;
    for (unsigned i = 0; i < plan->n; i++) {
        fprintf(out, "%s%s", i ? ", " : "", plan->fields[i]->name);
        if (plan->fields[i]->unit)
            fprintf(out, " [%s]", plan->fields[i]->unit);
    }
    fputc('\n', out);
}

static void print_row(const struct plan *plan, const struct row *row, FILE *out)
{
    for (unsigned i = 0; i < plan->n; i++) {
        const struct field *f = plan->fields[i];
        char text[300];

        if (f->value)
            f->value(row, text, sizeof(text));
        else
            snprintf(text, sizeof(text), "%s", f->fixed);
        fprintf(out, "%s%s", i ? ", " : "", text);
        if (f->unit && plan->units && text[0] != '[')
            fprintf(out, " %s", f->unit);
    }
    fputc('\n', out);
}

int command_query(const struct selection *s, const char *names, const char *format, FILE *out)
{
    struct plan plan;
    int rc = plan_make(gpu_fields, names, format, &plan);

    if (rc)
        return rc;
    print_header(&plan, out);
    for (unsigned i = 0; i < s->n; i++) {
        const struct st_gpu *g = &st.gpus[s->gpu[i]];

        print_row(&plan, &(struct row){s->index[i], s->gpu[i], g, gpu_card(g), NULL}, out);
    }
    return 0;
}

int command_query_apps(const struct selection *s, const char *names, const char *format, FILE *out)
{
    struct plan plan;
    int rc = plan_make(app_fields, names, format, &plan);

    if (rc)
        return rc;
    print_header(&plan, out);
    for (unsigned i = 0; i < s->n; i++) {
        const struct st_gpu *g = &st.gpus[s->gpu[i]];
        struct app app;

        for (unsigned n = 0; app_at(s->gpu[i], n, &app); n++)
            print_row(&plan, &(struct row){s->index[i], s->gpu[i], g, gpu_card(g), &app}, out);
    }
    return 0;
}
