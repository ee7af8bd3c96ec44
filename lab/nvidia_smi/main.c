/* nvidia-smi for emulated silicon. */
#define _GNU_SOURCE
#include "smi.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

struct options {
    const char *ids, *query, *apps, *format, *display, *file;
    const char *mig, *persistence, *compute;
    int list, details, xml, reset, version;
    unsigned loop;
};

static int not_recognized(const char *option)
{
    printf("ERROR: Option %s is not recognized. Please run 'nvidia-smi -h'.\n\n", option);
    return 255;
}

/* ---- listings ---- */

static int command_list(const struct selection *s)
{
    char uuid[48], name[64];
    struct st_gi *gi;
    struct st_ci *ci;

    for (unsigned i = 0; i < s->n; i++) {
        const struct st_gpu *g = &st.gpus[s->gpu[i]];

        uuid_text("GPU-", g->uuid, uuid);
        printf("GPU %u: %s (UUID: %s)\n", s->index[i], gpu_card(g)->name, uuid);
        for (unsigned n = 0; mig_at(s->gpu[i], n, &gi, &ci); n++) {
            ci_profile_name(gi_profile(g, gi), ci->profile, name, sizeof(name));
            uuid_text("MIG-", ci->uuid, uuid);
            printf("  MIG %-11s Device %2u: (UUID: %s)\n", name, n, uuid);
        }
    }
    return 0;
}

static int command_version(void)
{
    char nvml[48];

    /* NVML's own version is the driver's branch and release. */
    snprintf(nvml, sizeof(nvml), "%s", st.driver_version);
    if (strrchr(nvml, '.') != strchr(nvml, '.'))
        *strrchr(nvml, '.') = '\0';
    printf("NVIDIA-SMI version  : %s\nNVML version        : %s\nDRIVER version      : %s\nCUDA Version       "
           " : %s\n",
           st.driver_version, nvml, st.driver_version, CUDA_VERSION);
    return 0;
}

/* ---- changes ---- */

static int terminate(int rc)
{
    puts("Terminating early due to previous errors.");
    return rc;
}

static int command_mig_mode(const struct selection *s, const char *text)
{
    int mode = !strcmp(text, "1") || !strcasecmp(text, "ENABLED")    ? 1
               : !strcmp(text, "0") || !strcasecmp(text, "DISABLED") ? 0
                                                                     : -1;
    const char *verb = mode ? "enable" : "disable";

    if (mode < 0) {
        printf("ERROR: Invalid multi-instance-gpu mode: %s\n\n", text);
        return 2;
    }
    for (unsigned i = 0; i < s->n; i++) {
        char bus[24];
        int activation, rc = mode_set(s->gpu[i], (unsigned)mode, &activation);

        bus_id_text(s->gpu[i], bus);
        if (rc) {
            printf("Unable to %s MIG Mode for GPU %s: %s\n", verb, bus, result_text(rc));
            if (rc != NV_UNSUPPORTED)
                return terminate(rc);
            puts("Treating as warning and moving on.");
        } else if (activation == NV_OK) {
            printf("%s MIG Mode for GPU %s\n", mode ? "Enabled" : "Disabled", bus);
        } else {
            printf("Warning: MIG mode is in pending %s state for GPU %s:%s\n", verb, bus,
                   result_text(activation));
            if (activation == NV_IN_USE)
                printf("%s is currently being used by one or more other processes (e.g. CUDA application or "
                       "a monitoring "
                       "application such as another instance of nvidia-smi). Please first kill all processes "
                       "using the "
                       "device and retry the command or reboot the system to make MIG mode effective.\n",
                       bus);
            else
                printf(
                    "Reboot the system or try nvidia-smi --gpu-reset to make MIG mode effective on GPU %s\n",
                    bus);
        }
    }
    puts("All done.");
    return 0;
}

static int command_reset(const struct selection *s)
{
    unsigned refused = 0, in_use = 0;
    int results[MAX_GPUS];
    char bus[24];

    if (geteuid() != 0) {
        puts("Resetting GPUs requires root privileges.\n");
        return NV_PERMISSION;
    }
    for (unsigned i = 0; i < s->n; i++) {
        results[i] = gpu_reset(s->gpu[i]);
        refused += results[i] != NV_OK;
        in_use += results[i] == NV_IN_USE;
        bus_id_text(s->gpu[i], bus);
        if (results[i] == NV_OK)
            printf("GPU %s was successfully reset.\n", bus);
    }
    if (!refused) {
        puts("All done.");
        return 0;
    }
    puts("The following GPUs could not be reset:");
    for (unsigned i = 0; i < s->n; i++)
        if (results[i] != NV_OK) {
            bus_id_text(s->gpu[i], bus);
            printf("  GPU %s: %s\n", bus, result_text(results[i]));
        }
    putchar('\n');
    if (in_use)
        printf("%u device%s currently being used by one or more other processes (e.g., Fabric Manager, CUDA "
               "application, "
               "graphics application such as an X server, or a monitoring application such as another "
               "instance of "
               "nvidia-smi). Please first kill all processes using %s and all compute applications running "
               "in the "
               "system.\n",
               in_use, in_use == 1 ? " is" : "s are", in_use == 1 ? "this device" : "these devices");
    return 255;
}

static int command_persistence(const struct selection *s, const char *text)
{
    int on = !strcmp(text, "1") || !strcasecmp(text, "ENABLED")    ? 1
             : !strcmp(text, "0") || !strcasecmp(text, "DISABLED") ? 0
                                                                   : -1;

    if (on < 0) {
        printf("ERROR: Invalid persistence mode: %s\n\n", text);
        return 2;
    }
    for (unsigned i = 0; i < s->n; i++) {
        int was = st.gpus[s->gpu[i]].persistence, rc = setting_set(s->gpu[i], SET_PERSISTENCE, (unsigned)on);
        char bus[24];

        bus_id_text(s->gpu[i], bus);
        if (rc) {
            printf("Unable to set persistence mode for GPU %s: %s\n", bus, result_text(rc));
            return terminate(rc);
        }
        if (was == on)
            printf("Persistence mode is already %s for GPU %s.\n", on ? "Enabled" : "Disabled", bus);
        else
            printf("%s persistence mode for GPU %s.\n", on ? "Enabled" : "Disabled", bus);
    }
    puts("All done.");
    return 0;
}

static int command_compute_mode(const struct selection *s, const char *text)
{
    static const char *const names[] = {"DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS"};
    int mode = -1;

    for (int i = 0; i < 4; i++)
        if (strcasecmp(text, names[i]) == 0 || (text[0] == '0' + i && !text[1]))
            mode = i;
    if (mode < 0 || mode == 1) {
        printf("ERROR: Invalid compute mode: %s\n\n", text);
        return 2;
    }
    for (unsigned i = 0; i < s->n; i++) {
        int was = st.gpus[s->gpu[i]].compute_mode,
            rc = setting_set(s->gpu[i], SET_COMPUTE_MODE, (unsigned)mode);
        char bus[24];

        bus_id_text(s->gpu[i], bus);
        if (rc) {
            printf("Unable to set the compute mode for GPU %s: %s\n", bus, result_text(rc));
            return terminate(rc);
        }
        if (was == mode)
            printf("Compute mode is already set to %s for GPU %s.\n", names[mode], bus);
        else
            printf("Set compute mode to %s for GPU %s.\n", names[mode], bus);
    }
    puts("All done.");
    return 0;
}

int command_compute_policy(int argc, char **argv)
{
    static const char *const slices[] = {"Default", "Short", "Medium", "Long"};
    const char *ids = NULL, *set = NULL;
    struct selection s;
    int list = 0, rc;

    for (int i = 0; i < argc; i++) {
        if (!strcmp(argv[i], "-h") || !strcmp(argv[i], "--help")) {
            fputs(compute_policy_help, stdout);
            return 0;
        } else if ((!strcmp(argv[i], "-i") || !strcmp(argv[i], "--id")) && i + 1 < argc)
            ids = argv[++i];
        else if (!strncmp(argv[i], "--set-timeslice=", 16))
            set = argv[i] + 16;
        else if (!strcmp(argv[i], "--set-timeslice") && i + 1 < argc)
            set = argv[++i];
        else if (!strcmp(argv[i], "-l") || !strcmp(argv[i], "--list"))
            list = 1;
        else {
            printf("ERROR: Option %s is not recognized. Please run 'nvidia-smi compute-policy -h'.\n\n",
                   argv[i]);
            return 255;
        }
    }
    if (!set && !list) {
        fputs(compute_policy_help, stdout);
        return 0;
    }
    if (set && (set[0] < '0' || set[0] > '3' || set[1])) {
        printf("ERROR: Invalid timeslice: %s\n\n", set);
        return 2;
    }
    rc = open_silicon();
    if (!rc)
        rc = select_gpus(ids, &s);
    if (!rc)
        rc = lost_check(&s);
    for (unsigned i = 0; !rc && set && i < s.n; i++) {
        char bus[24];

        bus_id_text(s.gpu[i], bus);
        rc = setting_set(s.gpu[i], SET_TIMESLICE, (unsigned)(set[0] - '0'));
        if (rc)
            printf("Failed to set timeslice policy for GPU %s : %s\n", bus, result_text(rc));
        else
            printf("Successfully set timeslice policy to %s for GPU %s\n", slices[set[0] - '0'], bus);
    }
    if (!rc && list) {
        puts("+-------------------------------------+\n| GPU compute policies:               |\n"
             "| GPU     Name           Value        |\n|=====================================|");
        for (unsigned i = 0; i < s.n; i++)
            printf("| %3u   Timeslice       %-14s|\n+-------------------------------------+\n", s.index[i],
                   slices[st.gpus[s.gpu[i]].timeslice & 3]);
    }
    return rc;
}

/* ---- command line ---- */

/* Options with a value: "-i X", "-i=X"? no; "--id X", "--id=X". */
static const struct value_option {
    const char *brief, *full;
    size_t at;
} value_options[] = {
    {"-i", "--id", offsetof(struct options, ids)},
    {"", "--query-gpu", offsetof(struct options, query)},
    {"", "--query-compute-apps", offsetof(struct options, apps)},
    {"", "--format", offsetof(struct options, format)},
    {"-d", "--display", offsetof(struct options, display)},
    {"-f", "--filename", offsetof(struct options, file)},
    {"-mig", "--multi-instance-gpu", offsetof(struct options, mig)},
    {"-pm", "--persistence-mode", offsetof(struct options, persistence)},
    {"-c", "--compute-mode", offsetof(struct options, compute)},
};

/* Number of arguments used; 0: not such an option, -1: its value is missing. */
static int value_option(int left, char **argv, struct options *o)
{
    const char *equals = argv[0][1] == '-' ? strchr(argv[0], '=') : NULL;
    size_t length = equals ? (size_t)(equals - argv[0]) : strlen(argv[0]);

    for (size_t i = 0; i < sizeof(value_options) / sizeof(value_options[0]); i++) {
        const struct value_option *v = &value_options[i];
        const char **to = (const char **)((char *)o + v->at);

        if (strcmp(argv[0], v->brief) != 0 &&
            (strlen(v->full) != length || strncmp(argv[0], v->full, length) != 0))
            continue;
        if (equals) {
            *to = equals + 1;
            return 1;
        }
        if (left < 2)
            return -1;
        *to = argv[1];
        return 2;
    }
    return 0;
}

static int parse(int argc, char **argv, struct options *o)
{
    for (int i = 1; i < argc;) {
        const char *a = argv[i];
        int used = value_option(argc - i, argv + i, o);

        if (used < 0) {
            printf("ERROR: Option %s requires an argument. Please run 'nvidia-smi -h' for help.\n\n", a);
            return 2;
        }
        if (used > 0) {
            i += used;
            continue;
        }
        if (!strcmp(a, "-L") || !strcmp(a, "--list-gpus"))
            o->list = 1;
        else if (!strcmp(a, "-q") || !strcmp(a, "--query"))
            o->details = 1;
        else if (!strcmp(a, "-x") || !strcmp(a, "--xml-format"))
            o->xml = 1;
        else if (!strcmp(a, "-r") || !strcmp(a, "--gpu-reset"))
            o->reset = 1;
        else if (!strcmp(a, "--version"))
            o->version = 1;
        else if (!strcmp(a, "-l") || !strncmp(a, "--loop=", 7)) {
            const char *value = a[1] == '-' ? a + 7 : i + 1 < argc && argv[i + 1][0] != '-' ? argv[++i] : "5";

            o->loop = (unsigned)atoi(value);
            if (!o->loop)
                return not_recognized(value);
        } else if (!strcmp(a, "-h") || !strcmp(a, "--help")) {
            printf("NVIDIA System Management Interface -- v%s (emulated silicon)\n\n%s", DRIVER_VERSION,
                   main_help);
            exit(0);
        } else
            return not_recognized(a);
        i++;
    }
    if (o->list && o->ids) {
        puts("ERROR: Option -i is not valid for this command. Please run 'nvidia-smi -h' for help.\n");
        return 2;
    }
    return 0;
}

static int run(const struct options *o, FILE *out)
{
    struct selection s;
    int rc = select_gpus(o->ids, &s);

    if (!rc)
        rc = lost_check(&s);
    if (rc)
        return rc;
    if (o->list)
        return command_list(&s);
    if (o->mig)
        return command_mig_mode(&s, o->mig);
    if (o->reset)
        return command_reset(&s);
    if (o->persistence)
        return command_persistence(&s, o->persistence);
    if (o->compute)
        return command_compute_mode(&s, o->compute);
    if (o->query)
        return command_query(&s, o->query, o->format, out);
    if (o->apps)
        return command_query_apps(&s, o->apps, o->format, out);
    if (o->details || o->xml)
        return command_details(&s, o->xml, o->display, out);
    return command_table(&s, out);
}

/* Only a looping nvidia-smi has a GPU open for long enough to be in somebody's way. */
static void hold_all(const struct options *o)
{
    struct selection s;

    if (select_gpus(o->ids, &s) == 0)
        for (unsigned i = 0; i < s.n; i++)
            device_hold(s.gpu[i], NO_ID, NO_ID, 0, 0, "nvidia-smi");
}

int main(int argc, char **argv)
{
    struct options o = {0};
    FILE *out = stdout;
    int rc;

    if (argc > 1 && !strcmp(argv[1], "mig"))
        return command_mig(argc - 2, argv + 2);
    if (argc > 1 && !strcmp(argv[1], "compute-policy"))
        return command_compute_policy(argc - 2, argv + 2);
    rc = parse(argc, argv, &o);
    if (!rc)
        rc = open_silicon();
    if (rc)
        return rc;
    if (o.version)
        return command_version();
    if (o.file && !(out = fopen(o.file, "we"))) {
        printf("ERROR: Unable to open file %s\n\n", o.file);
        return 2;
    }
    if (o.loop)
        hold_all(&o);
    do {
        rc = run(&o, out);
        fflush(out);
        if (o.loop)
            sleep(o.loop);
    } while (o.loop && !rc && state_read() == 0);
    if (out != stdout)
        fclose(out);
    return rc;
}
