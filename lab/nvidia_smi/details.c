/* nvidia-smi -q, and the same as XML with -x. */
#define _GNU_SOURCE
#include "smi.h"
#include "lines.h"

#include <string.h>
#include <strings.h>

#define MIB (1024ull * 1024)

struct about {
    unsigned gpu;
    const struct st_gpu *g;
    const struct card *c;
    unsigned long long total, reserved, used;
    FILE *out;
};

/* ---- values ---- */

static void word(const struct about *a, const char *name, char *out, size_t size)
{
    static const char *const modes[] = {"Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process"};
    const struct card *c = a->c;
    char text[64] = "";

#define TEXT(word, ...)                                                                                      \
    if (strcmp(name, word) == 0) {                                                                           \
        snprintf(out, size, __VA_ARGS__);                                                                    \
        return;                                                                                              \
    }
    TEXT("name", "%s", c->name)
    TEXT("arch", "%s", c->arch_name)
    TEXT("persistence", "%s", a->g->persistence ? "Enabled" : "Disabled")
    TEXT("mig_now", "%s", !c->mem_slices ? "N/A" : a->g->mig_current ? "Enabled" : "Disabled")
    TEXT("mig_then", "%s", !c->mem_slices ? "N/A" : a->g->mig_pending ? "Enabled" : "Disabled")
    TEXT("serial", "%llu", (unsigned long long)a->g->serial)
    TEXT("pdi", "0x%02x%02x%02x%02x%02x%02x%02x%02x", a->g->uuid[0], a->g->uuid[1], a->g->uuid[2],
         a->g->uuid[3], a->g->uuid[4], a->g->uuid[5], a->g->uuid[6], a->g->uuid[7])
    TEXT("minor", "%u", a->g->minor)
    TEXT("vbios", "%s", c->vbios)
    TEXT("board", "0x%x", a->g->bus << 8 | a->g->device)
    TEXT("module", "%u", gpu_module(a->gpu))
    TEXT("inforom", "%s", c->inforom_image)
    TEXT("inforom_oem", "%s", c->inforom_oem)
    TEXT("inforom_ecc", "%s", c->inforom_ecc)
    TEXT("driver", "%s", st.driver_version)
    TEXT("bus", "%02X", a->g->bus)
    TEXT("device", "%02X", a->g->device)
    TEXT("device_id", "%08X", c->pci_device)
    TEXT("sub_id", "%08X", c->pci_subsystem)
    TEXT("gen", "%u", c->pcie_gen)
    TEXT("total", "%u", mib_up(a->total))
    TEXT("reserved", "%u", mib_up(a->reserved))
    TEXT("used", "%u", mib_up(a->used))
    TEXT("free", "%u", mib_up(a->total - a->reserved - a->used))
    TEXT("bar1", "%u", c->bar1_mib)
    TEXT("bar1_free", "%u", c->bar1_mib - 1)
    TEXT("compute_mode", "%s", modes[a->g->compute_mode & 3])
    TEXT("util", "%s", a->g->mig_current ? "N/A" : "0 %")
    TEXT("banks", "%u", c->remap_banks)
    TEXT("temp", "%d", c->idle_c)
    TEXT("tlimit", "%d", 87 - c->idle_c)
    TEXT("draw", "%d", c->idle_w)
    TEXT("power", "%u", c->power_w)
    TEXT("power_min", "%u", c->power_min_w)
    TEXT("clock", "%u", c->clock_max)
    TEXT("clock_mem", "%u", c->clock_mem)
    TEXT("clock_video", "%u", c->clock_video)
#undef TEXT
    if (strcmp(name, "uuid") == 0)
        uuid_text("GPU-", a->g->uuid, text);
    else if (strcmp(name, "bus_id") == 0)
        bus_id_text(a->gpu, text);
    snprintf(out, size, "%s", text);
}

/* Fill the {words} of a value. */
static const char *filled(const struct about *a, const char *value)
{
    static char text[256];
    size_t n = 0;

    while (*value && n + 1 < sizeof(text)) {
        const char *end = *value == '{' ? strchr(value, '}') : NULL;
        char name[32];

        if (!end) {
            text[n++] = *value++;
            continue;
        }
        snprintf(name, sizeof(name), "%.*s", (int)(end - value - 1), value + 1);
        word(a, name, text + n, sizeof(text) - n);
        n += strlen(text + n);
        value = end + 1;
    }
    text[n] = '\0';
    return text;
}

/* ---- text ---- */

/* Labels end in the same column; the blocks of MIG devices and processes are narrower, as on a real system.
 */
static void text_line(FILE *out, int column, int depth, const char *label, const char *value)
{
    if (value)
        fprintf(out, "%*s%-*s: %s\n", 4 * depth, "", column - 4 * depth, label, value);
    else
        fprintf(out, "%*s%s\n", 4 * depth, "", label);
}

static void numbered(FILE *out, int depth, const char *label, unsigned value, const char *unit)
{
    char text[32];

    snprintf(text, sizeof(text), "%u%s", value, unit);
    text_line(out, 42, depth, label, text);
}

static void text_mig(const struct about *a)
{
    struct st_gi *gi;
    struct st_ci *ci;

    for (unsigned n = 0; mig_at(a->gpu, n, &gi, &ci); n++) {
        const struct mig_profile *p = gi_profile(a->g, gi);
        unsigned used = instance_used_mib(a->gpu, gi), bar1 = a->c->mig_bar1_mib * p->mem_slices;

        text_line(a->out, 42, 1, "MIG Device", NULL);
        numbered(a->out, 2, "Index", n, "");
        numbered(a->out, 2, "GPU Instance ID", gi->id, "");
        numbered(a->out, 2, "Compute Instance ID", ci->id, "");
        text_line(a->out, 42, 2, "Device Attributes", NULL);
        text_line(a->out, 42, 3, "Shared", NULL);
        numbered(a->out, 4, "Multiprocessor count", ci_profile_sm(p, ci->profile), "");
        numbered(a->out, 4, "Copy Engine count", p->ce, "");
        numbered(a->out, 4, "Encoder count", p->enc, "");
        numbered(a->out, 4, "Decoder count", p->dec, "");
        numbered(a->out, 4, "OFA count", p->ofa, "");
        numbered(a->out, 4, "JPG count", p->jpeg, "");
        text_line(a->out, 42, 2, "ECC Errors", NULL);
        text_line(a->out, 42, 3, "Volatile", NULL);
        numbered(a->out, 4, "SRAM Uncorrectable", 0, "");
        text_line(a->out, 42, 2, "FB Memory Usage", NULL);
        numbered(a->out, 3, "Total", p->memory_mib, " MiB");
        numbered(a->out, 3, "Reserved", 0, " MiB");
        numbered(a->out, 3, "Used", used, " MiB");
        numbered(a->out, 3, "Free", p->memory_mib - used, " MiB");
        text_line(a->out, 42, 2, "BAR1 Memory Usage", NULL);
        numbered(a->out, 3, "Total", bar1, " MiB");
        numbered(a->out, 3, "Used", 0, " MiB");
        numbered(a->out, 3, "Free", bar1, " MiB");
    }
}

static void id_text(unsigned id, char out[8])
{
    if (id == NO_ID)
        strcpy(out, "N/A");
    else
        snprintf(out, 8, "%u", id);
}

static void text_processes(const struct about *a)
{
    struct app app;
    char text[8];

    if (!app_at(a->gpu, 0, &app)) {
        text_line(a->out, 55, 1, "Processes", "None");
        return;
    }
    text_line(a->out, 55, 1, "Processes", NULL);
    for (unsigned n = 0; app_at(a->gpu, n, &app); n++) {
        id_text(app.gi, text);
        text_line(a->out, 42, 2, "GPU instance ID", text);
        id_text(app.ci, text);
        text_line(a->out, 42, 2, "Compute instance ID", text);
        numbered(a->out, 2, "Process ID", (unsigned)app.pid, "");
        text_line(a->out, 42, 3, "Type", "C");
        text_line(a->out, 42, 3, "Name", app.name);
        numbered(a->out, 3, "Used GPU Memory", app.mib, " MiB");
    }
}

/* Which headings belong to a word of -d; NULL-ended. */
static const struct {
    const char *name, *headings[5];
} displays[] = {
    {"MEMORY", {"FB Memory Usage", "BAR1 Memory Usage", "Conf Compute Protected Memory Usage"}},
    {"UTILIZATION", {"Utilization", "Encoder Stats", "FBC Stats"}},
    {"ECC", {"ECC Mode", "ECC Errors"}},
    {"TEMPERATURE", {"Temperature"}},
    {"POWER",
     {"GPU Power Readings", "GPU Memory Power Readings ", "Module Power Readings", "Power Smoothing"}},
    {"CLOCK",
     {"Clocks", "Applications Clocks", "Default Applications Clocks", "Deferred Clocks", "Max Clocks"}},
    {"COMPUTE", {"Compute Mode"}},
    {"PIDS", {"Processes"}},
    {"PERFORMANCE", {"Performance State", "Clocks Event Reasons", "Clocks Event Reasons Counters"}},
    {"PAGE_RETIREMENT", {"Retired Pages"}},
    {"ROW_REMAPPER", {"Remapped Rows"}},
    {"ACCOUNTING", {"Accounting Mode", "Accounting Mode Buffer Size"}},
};

/* Is this heading asked for? heading NULL: is the list itself good? */
static int displayed(const char *list, const char *heading)
{
    char copy[256], *save;
    int good = 1, wanted = 0;

    if (!list)
        return 1;
    snprintf(copy, sizeof(copy), "%s", list);
    for (char *p = strtok_r(copy, ",", &save); p; p = strtok_r(NULL, ",", &save)) {
        size_t i = 0, n = sizeof(displays) / sizeof(displays[0]);

        while (i < n && strcasecmp(displays[i].name, p) != 0)
            i++;
        good &= i < n;
        for (int k = 0; i < n && heading && k < 5 && displays[i].headings[k]; k++)
            wanted |= strcmp(displays[i].headings[k], heading) == 0;
    }
    return heading ? wanted : good;
}

static void text_gpu(const struct about *a, const char *display)
{
    int shown = 1;

    for (const struct line *l = text_lines; l->depth; l++) {
        const char *block = l->label ? NULL : l->value;

        if (l->depth == 1)
            shown = displayed(display, l->label ? l->label : strcmp(block, "mig") ? "Processes" : "MIG Mode");
        if (!shown)
            continue;
        if (!block)
            text_line(a->out, 55, l->depth, l->label, l->value ? filled(a, l->value) : NULL);
        else if (strcmp(block, "mig") == 0)
            text_mig(a);
        else
            text_processes(a);
    }
    fputc('\n', a->out);
}

/* ---- XML ---- */

static void tabs(FILE *out, int n)
{
    while (n-- > 0)
        fputc('\t', out);
}

static void element(FILE *out, int depth, const char *tag, const char *value)
{
    tabs(out, depth);
    fprintf(out, "<%s>", tag);
    for (; *value; value++)
        if (*value == '<' || *value == '>' || *value == '&')
            fprintf(out, "&#%d;", *value);
        else
            fputc(*value, out);
    fprintf(out, "</%s>\n", tag);
}

static void element_number(FILE *out, int depth, const char *tag, unsigned value, const char *unit)
{
    char text[32];

    snprintf(text, sizeof(text), "%u%s", value, unit);
    element(out, depth, tag, text);
}

static void open_tag(FILE *out, int depth, const char *tag)
{
    tabs(out, depth);
    fprintf(out, "<%s>\n", tag);
}

static void close_tag(FILE *out, int depth, const char *tag)
{
    tabs(out, depth);
    fprintf(out, "</%s>\n", tag);
}

static void xml_memory(FILE *out, const char *tag, unsigned total, const unsigned *reserved, unsigned used)
{
    open_tag(out, 4, tag);
    element_number(out, 5, "total", total, " MiB");
    if (reserved)
        element_number(out, 5, "reserved", *reserved, " MiB");
    element_number(out, 5, "used", used, " MiB");
    element_number(out, 5, "free", total - used, " MiB");
    close_tag(out, 4, tag);
}

static void xml_mig(const struct about *a)
{
    FILE *out = a->out;
    struct st_gi *gi;
    struct st_ci *ci;

    open_tag(out, 2, "mig_devices");
    for (unsigned n = 0; mig_at(a->gpu, n, &gi, &ci); n++) {
        const struct mig_profile *p = gi_profile(a->g, gi);

        open_tag(out, 3, "mig_device");
        element_number(out, 4, "index", n, "");
        element_number(out, 4, "gpu_instance_id", gi->id, "");
        element_number(out, 4, "compute_instance_id", ci->id, "");
        open_tag(out, 4, "device_attributes");
        open_tag(out, 5, "shared");
        element_number(out, 6, "multiprocessor_count", ci_profile_sm(p, ci->profile), "");
        element_number(out, 6, "copy_engine_count", p->ce, "");
        element_number(out, 6, "encoder_count", p->enc, "");
        element_number(out, 6, "decoder_count", p->dec, "");
        element_number(out, 6, "ofa_count", p->ofa, "");
        element_number(out, 6, "jpg_count", p->jpeg, "");
        close_tag(out, 5, "shared");
        close_tag(out, 4, "device_attributes");
        open_tag(out, 4, "ecc_error_count");
        open_tag(out, 5, "volatile_count");
        element(out, 6, "sram_uncorrectable", "0");
        close_tag(out, 5, "volatile_count");
        close_tag(out, 4, "ecc_error_count");
        xml_memory(out, "fb_memory_usage", p->memory_mib, &(unsigned){0}, instance_used_mib(a->gpu, gi));
        xml_memory(out, "bar1_memory_usage", a->c->mig_bar1_mib * p->mem_slices, NULL, 0);
        close_tag(out, 3, "mig_device");
    }
    if (!mig_at(a->gpu, 0, &gi, &ci)) {
        tabs(out, 3);
        fputs("None\n", out);
    }
    close_tag(out, 2, "mig_devices");
}

static void xml_processes(const struct about *a)
{
    struct app app;
    char text[8];

    open_tag(a->out, 2, "processes");
    for (unsigned n = 0; app_at(a->gpu, n, &app); n++) {
        open_tag(a->out, 3, "process_info");
        id_text(app.gi, text);
        element(a->out, 4, "gpu_instance_id", text);
        id_text(app.ci, text);
        element(a->out, 4, "compute_instance_id", text);
        element_number(a->out, 4, "pid", (unsigned)app.pid, "");
        element(a->out, 4, "type", "C");
        element(a->out, 4, "process_name", app.name);
        element_number(a->out, 4, "used_memory", app.mib, " MiB");
        close_tag(a->out, 3, "process_info");
    }
    close_tag(a->out, 2, "processes");
}

static void xml_clocks(const struct about *a)
{
    const unsigned memory[] = {a->c->clock_mem, a->c->clock_mem_low};

    open_tag(a->out, 2, "supported_clocks");
    for (int i = 0; i < 2 && memory[i]; i++) {
        open_tag(a->out, 3, "supported_mem_clock");
        element_number(a->out, 4, "value", memory[i], " MHz");
        for (unsigned mhz = a->c->clock_max; mhz >= a->c->clock_min; mhz -= 15)
            element_number(a->out, 4, "supported_graphics_clock", mhz, " MHz");
        close_tag(a->out, 3, "supported_mem_clock");
    }
    close_tag(a->out, 2, "supported_clocks");
}

static void xml_gpu(const struct about *a)
{
    const char *open[8];
    char bus[24];
    int depth = 0; /* how many of `open` are open */

    bus_id_text(a->gpu, bus);
    fprintf(a->out, "\t<gpu id=\"%s\">\n", bus);
    for (const struct line *l = xml_lines;; l++) {
        while (depth > 0 && depth >= l->depth) {
            depth--;
            close_tag(a->out, depth + 2, open[depth]);
        }
        if (!l->depth)
            break;
        if (l->label && l->value) {
            element(a->out, l->depth + 1, l->label, filled(a, l->value));
        } else if (l->label) {
            open_tag(a->out, l->depth + 1, l->label);
            open[depth++] = l->label;
        } else if (strcmp(l->value, "mig") == 0) {
            xml_mig(a);
        } else if (strcmp(l->value, "clocks") == 0) {
            xml_clocks(a);
        } else if (strcmp(l->value, "processes") == 0) {
            xml_processes(a);
        } else {
            open_tag(a->out, 2, "accounted_processes");
            close_tag(a->out, 2, "accounted_processes");
        }
    }
    fputs("\t</gpu>\n\n", a->out);
}

int command_details(const struct selection *s, int xml, const char *display, FILE *out)
{
    unsigned attached = 0;
    char count[16];

    if (!displayed(display, NULL)) {
        puts("Failed to parse --display/-d flags");
        return 2;
    }
    for (unsigned gpu = 0; gpu < st.n_gpus; gpu++)
        attached += gpu_visible(gpu);
    snprintf(count, sizeof(count), "%u", attached);
    if (xml) {
        fputs("<?xml version=\"1.0\" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "
              "\"nvsmi_device_v13.dtd\">\n<nvidia_smi_log>\n",
              out);
        element(out, 1, "timestamp", timestamp("%a %b %e %H:%M:%S %Y"));
        element(out, 1, "driver_version", st.driver_version);
        element(out, 1, "cuda_version", CUDA_VERSION);
        element(out, 1, "attached_gpus", count);
    } else {
        fputs("\n==============NVSMI LOG==============\n\n", out);
        text_line(out, 55, 0, "Timestamp", timestamp("%a %b %e %H:%M:%S %Y"));
        text_line(out, 55, 0, "Driver Version", st.driver_version);
        text_line(out, 55, 0, "CUDA Version", CUDA_VERSION);
        fputc('\n', out);
        text_line(out, 55, 0, "Attached GPUs", count);
    }
    for (unsigned i = 0; i < s->n; i++) {
        struct about a = {.gpu = s->gpu[i], .g = &st.gpus[s->gpu[i]], .out = out};
        char bus[24];

        a.c = gpu_card(a.g);
        gpu_memory(a.gpu, &a.total, &a.reserved, &a.used);
        if (xml) {
            xml_gpu(&a);
            continue;
        }
        bus_id_text(a.gpu, bus);
        fprintf(out, "GPU %s\n", bus);
        text_gpu(&a, display);
    }
    if (xml)
        fputs("</nvidia_smi_log>\n", out);
    return 0;
}
