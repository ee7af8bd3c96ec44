/* lab-silicon: makes, shows and breaks the emulated silicon of one node. */
#define _GNU_SOURCE
#include "device.h"
#include "root.h"

#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef DRIVER_VERSION
#error "DRIVER_VERSION is set by the Makefile"
#endif

static const char usage[] =
    "lab-silicon: emulated NVIDIA GPUs of this node (no real hardware is involved)\n"
    "\n"
    "  lab-silicon init --cards A30[,H200...] [--root DIR] [--bin DIR] [--link-host]\n"
    "                   [--driver-version V] [--boot-id TEXT] [--seed TEXT]\n"
    "      Make the driver root, and the state if it is not there. A new boot id applies what a reboot "
    "does.\n"
    "      Cards: A30 A100-40 A100-80 H100 H200 T4. --bin: where nvidia-smi and libnvidia-ml.so.1 lie\n"
    "      (default: beside this program). --link-host: put them also into this system's own paths.\n"
    "  lab-silicon show [--json]\n"
    "  lab-silicon reboot\n"
    "      Instances vanish; MIG mode stays on Ampere and is lost on Hopper.\n"
    "  lab-silicon hold --gpu N [--gi N [--ci N]] [--memory MiB] [--seconds S]\n"
    "      Be a compute process on that GPU or instance until killed (or for S seconds).\n"
    "  lab-silicon fault FAULT... [--gpu N] [--gi N] [--ci N]     (without --gpu: all GPUs)\n"
    "      busy             a client that cannot be named holds the GPU\n"
    "      noreset          as in a virtual machine: no reset; a mode change waits for a reboot (Ampere)\n"
    "      lost             the GPU has fallen off the bus, until a reboot\n"
    "      insufficient[:N] creating instances fails after N that succeed (default 0)\n"
    "      slow:MS          every change takes so many milliseconds\n"
    "      xid:CODE         one Xid event\n"
    "      clear            no faults\n"
    "\n"
    "Environment, for tests: LAB_SILICON_ROOT, the driver root (default /driver-root); LAB_SILICON_STATE "
    "and\n"
    "LAB_SILICON_DEV, the state file and the device directory of a pod.\n";

static int die(const char *what, int error)
{
    fprintf(stderr, "lab-silicon: %s%s%s\n", what, error ? ": " : "", error ? strerror(error) : "");
    return 1;
}

static int wrong(const char *what)
{
    fprintf(stderr, "lab-silicon: %s\n\n%s", what, usage);
    return 2;
}

struct options {
    const char *root, *cards, *bin, *version, *boot, *seed;
    int link_host, json;
    long gpu, gi, ci, memory, seconds;
};

/* A boot of this node: the kernel's, and the start of the first process (containers restart under one
 * kernel). */
static void boot_id(char *out, size_t size)
{
    char kernel[64] = "", line[1024] = "", *p;
    unsigned long long start = 0;
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");

    if (f) {
        if (fscanf(f, "%63s", kernel) != 1)
            kernel[0] = '\0';
        fclose(f);
    }
    f = fopen("/proc/1/stat", "re");
    if (f) {
        /* Field 22; counted from the last bracket, since field 2 may hold anything. */
        if (fgets(line, sizeof(line), f) && (p = strrchr(line, ')')) != NULL)
            sscanf(p + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                   &start);
        fclose(f);
    }
    snprintf(out, size, "%s/%llu", kernel, start);
}

static int cards_parse(const char *list, const struct card *out[MAX_GPUS], unsigned *n)
{
    char copy[1024], *save = NULL;

    snprintf(copy, sizeof(copy), "%s", list);
    *n = 0;
    for (char *p = strtok_r(copy, ", ", &save); p; p = strtok_r(NULL, ", ", &save)) {
        const struct card *c = card_find(p);

        if (!c) {
            fprintf(stderr, "lab-silicon: unknown card '%s'; known:", p);
            for (unsigned i = 0; card_at(i); i++)
                fprintf(stderr, " %s", card_at(i)->key);
            fputc('\n', stderr);
            return -1;
        }
        if (*n == MAX_GPUS) {
            fprintf(stderr, "lab-silicon: at most %d cards\n", MAX_GPUS);
            return -1;
        }
        out[(*n)++] = c;
    }
    return *n ? 0 : -1;
}

static int same_cards(const struct card *const cards[], unsigned n)
{
    if (st.n_gpus != n)
        return 0;
    for (unsigned i = 0; i < n; i++)
        if (gpu_card(&st.gpus[i]) != cards[i])
            return 0;
    return 1;
}

static void fresh(const struct card *const cards[], unsigned n, const char *seed)
{
    char text[128];

    memset(&st, 0, sizeof(st));
    st.n_gpus = n;
    snprintf(st.seed, sizeof(st.seed), "%s", seed);
    for (unsigned i = 0; i < n; i++) {
        struct st_gpu *g = &st.gpus[i];

        snprintf(g->card, sizeof(g->card), "%s", cards[i]->key);
        snprintf(text, sizeof(text), "%s/%u", seed, i);
        uuid_make(text, 4, g->uuid);
        g->serial = 1650000000000ull + (g->uuid[0] << 16 | g->uuid[1] << 8 | g->uuid[2]);
        g->minor = i;
        g->bus = i / 16;
        g->device = 6 + i % 16;
        g->persistence = 1;
    }
}

static int do_init(const struct options *o)
{
    const struct card *cards[MAX_GPUS];
    char path[600], dir[600], host[64] = "", boot[96], bin[PATH_MAX] = "";
    const char *root = place.root;
    int rc, changed = 0;
    unsigned n;

    if (!o->cards)
        return wrong("init needs --cards");
    if (cards_parse(o->cards, cards, &n) != 0)
        return 2;
    if (geteuid() != 0)
        return die("init needs root", 0);
    if (o->bin) {
        snprintf(bin, sizeof(bin), "%s", o->bin);
    } else {
        ssize_t k = readlink("/proc/self/exe", bin, sizeof(bin) - 1);

        bin[k > 0 ? k : 0] = '\0';
        *strrchr(bin, '/') = '\0';
    }
    gethostname(host, sizeof(host) - 1);
    if (o->boot)
        snprintf(boot, sizeof(boot), "%s", o->boot);
    else
        boot_id(boot, sizeof(boot));

    snprintf(dir, sizeof(dir), "%s/run/nvidia-persistenced", root);
    if (mkdirs(dir, 0755) != 0)
        return die(dir, errno);
    snprintf(path, sizeof(path), "%s/socket", dir);
    place.admin = 1;
    rc = state_create(path);
    if (rc == 0)
        rc = state_begin();
    if (rc)
        return die(path, rc);
    if (state_is_new() || !same_cards(cards, n) || (o->seed && strcmp(o->seed, st.seed) != 0)) {
        fresh(cards, n, o->seed ? o->seed : host);
        changed = 1;
    } else if (strcmp(boot, st.boot_id) != 0) {
        reboot_apply();
        changed = 1;
    }
    if (strcmp(st.driver_version, o->version) != 0 || strcmp(st.boot_id, boot) != 0) {
        snprintf(st.driver_version, sizeof(st.driver_version), "%s", o->version);
        snprintf(st.boot_id, sizeof(st.boot_id), "%s", boot);
        changed = 1;
    }
    rc = root_make(root, bin, o->version, o->link_host);
    root_sync();
    if (rc || !changed)
        state_abort();
    else if ((errno = state_commit()) != 0)
        return die(path, errno);
    return rc ? 1 : 0;
}

/* ---- show ---- */

static const char *mode_text(const struct st_gpu *g, unsigned mode)
{
    return !gpu_card(g)->mem_slices ? "N/A" : mode ? "Enabled" : "Disabled";
}

static void faults_text(const struct st_faults *f, char *out, size_t size)
{
    size_t n = 0;

    out[0] = '\0';
    if (f->busy)
        n += (size_t)snprintf(out + n, size - n, "busy ");
    if (f->noreset)
        n += (size_t)snprintf(out + n, size - n, "noreset ");
    if (f->lost)
        n += (size_t)snprintf(out + n, size - n, "lost ");
    if (f->insufficient)
        n += (size_t)snprintf(out + n, size - n, "insufficient:%u ", f->insufficient_after);
    if (f->slow_ms)
        n += (size_t)snprintf(out + n, size - n, "slow:%u ", f->slow_ms);
    if (n)
        out[n - 1] = '\0';
}

static void show_client(unsigned i, pid_t pid, int json, int first)
{
    const struct st_client *c = &st.clients[i];
    char name[256], gi[8] = "-", ci[8] = "-";

    process_name(pid, c->name, name, sizeof(name));
    if (c->gi != NO_ID)
        snprintf(gi, sizeof(gi), "%u", c->gi);
    if (c->ci != NO_ID)
        snprintf(ci, sizeof(ci), "%u", c->ci);
    if (!json) {
        printf("  client pid %d (%s): %s, GPU instance %s, compute instance %s, %u MiB\n", (int)pid, name,
               c->compute ? "compute" : "monitor", gi, ci, c->compute ? client_mib(i, pid) : 0);
        return;
    }
    for (char *p = name; *p; p++)
        if (*p == '"' || *p == '\\' || (unsigned char)*p < ' ')
            *p = '?';
    printf("%s{\"pid\": %d, \"name\": \"%s\", \"compute\": %s, \"gi\": %s, \"ci\": %s}", first ? "" : ", ",
           (int)pid, name, c->compute ? "true" : "false", c->gi == NO_ID ? "null" : gi,
           c->ci == NO_ID ? "null" : ci);
}

static void show_clients(unsigned gpu, int json)
{
    int first = 1;
    pid_t pid;

    for (unsigned i = 0; i < MAX_CLIENTS; i++)
        if (st.clients[i].used && st.clients[i].gpu == gpu && client_alive(i, &pid)) {
            show_client(i, pid, json, first);
            first = 0;
        }
}

static void show_instances(const struct st_gpu *g, int json)
{
    const char *sep = "";
    char uuid[48], name[64];

    for (int i = 0; i < MAX_GIS; i++) {
        const struct st_gi *gi = &g->gi[i];
        const struct mig_profile *p;

        if (!gi->used)
            continue;
        p = gi_profile(g, gi);
        if (json)
            printf("%s{\"gi\": %u, \"profile\": \"%s\", \"profile_id\": %u, \"start\": %u, \"size\": %u, "
                   "\"compute_instances\": [",
                   sep, gi->id, p->name, p->id, gi->start, p->mem_slices);
        else
            printf("  GPU instance %u: %s (ID %u) at %u:%u\n", gi->id, p->name, p->id, gi->start,
                   p->mem_slices);
        sep = "";
        for (int k = 0; k < MAX_CIS; k++)
            if (gi->ci[k].used) {
                uuid_text("MIG-", gi->ci[k].uuid, uuid);
                ci_profile_name(p, gi->ci[k].profile, name, sizeof(name));
                if (json)
                    printf("%s{\"ci\": %u, \"profile\": \"%s\", \"uuid\": \"%s\"}", sep, gi->ci[k].id, name,
                           uuid);
                else
                    printf("    compute instance %u: %s %s\n", gi->ci[k].id, name, uuid);
                sep = ", ";
            }
        if (json)
            printf("]}");
        sep = ", ";
    }
}

static int do_show(const struct options *o)
{
    char uuid[48], faults[128];

    if (o->json)
        printf("{\"silicon\": \"emulated\", \"driver_version\": \"%s\", \"state\": \"%s\", \"generation\": "
               "%llu, "
               "\"gpus\": [",
               st.driver_version, place.file, (unsigned long long)state_generation());
    else
        printf("silicon: emulated (driver %s, state %s, generation %llu)\n", st.driver_version, place.file,
               (unsigned long long)state_generation());
    for (unsigned i = 0; i < st.n_gpus; i++) {
        const struct st_gpu *g = &st.gpus[i];
        const char *now = mode_text(g, g->mig_current), *then = mode_text(g, g->mig_pending);

        uuid_text("GPU-", g->uuid, uuid);
        faults_text(&g->faults, faults, sizeof(faults));
        if (o->json) {
            printf("%s{\"index\": %u, \"card\": \"%s\", \"name\": \"%s\", \"uuid\": \"%s\", \"mig_current\": "
                   "\"%s\", "
                   "\"mig_pending\": \"%s\", \"faults\": \"%s\", \"instances\": [",
                   i ? ", " : "", i, g->card, gpu_card(g)->name, uuid, now, then, faults);
            show_instances(g, 1);
            printf("], \"clients\": [");
            show_clients(i, 1);
            printf("]}");
        } else {
            printf("GPU %u: %s, %s, MIG %s (pending %s)%s%s\n", i, gpu_card(g)->name, uuid, now, then,
                   faults[0] ? ", faults: " : "", faults);
            show_instances(g, 0);
            show_clients(i, 0);
        }
    }
    if (o->json)
        printf("]}\n");
    return 0;
}

/* ---- the rest ---- */

static int do_reboot(void)
{
    int rc = state_begin();

    if (rc)
        return die(place.file, rc);
    reboot_apply();
    root_sync();
    rc = state_commit();
    return rc ? die(place.file, rc) : 0;
}

static int do_hold(const struct options *o)
{
    unsigned gi = o->gi < 0 ? NO_ID : (unsigned)o->gi,
             ci = o->ci < 0 ? (o->gi < 0 ? NO_ID : 0) : (unsigned)o->ci;
    struct st_gi *found;
    sigset_t ends;
    int rc, got;

    if (o->gpu < 0 || o->gpu >= (long)st.n_gpus)
        return wrong("hold needs --gpu with the index of a GPU");
    found = gi == NO_ID ? NULL : gi_find(&st.gpus[o->gpu], gi);
    if (gi != NO_ID && (!found || !ci_find(found, ci)))
        return die("no such instance", 0);
    /* Blocked and waited for: a handler would lose a signal that comes just before the wait. */
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGINT);
    sigaddset(&ends, SIGALRM);
    sigprocmask(SIG_BLOCK, &ends, NULL);
    rc = device_hold((unsigned)o->gpu, gi, ci, 1, o->memory > 0 ? (unsigned)o->memory : 0, "lab-silicon");
    if (rc)
        return die("cannot hold", rc);
    printf("held by pid %d\n", (int)getpid());
    fflush(stdout);
    if (o->seconds > 0)
        alarm((unsigned)o->seconds);
    sigwait(&ends, &got);
    device_release_all();
    return 0;
}

static int number_after(const char *text, unsigned otherwise, unsigned *out)
{
    const char *colon = strchr(text, ':');
    char *end;

    *out = otherwise;
    if (!colon)
        return 0;
    *out = (unsigned)strtoul(colon + 1, &end, 10);
    return colon[1] == '\0' || *end ? -1 : 0;
}

static int fault_is(const char *text, const char *name)
{
    size_t n = strlen(name);

    return strncmp(text, name, n) == 0 && (text[n] == '\0' || text[n] == ':');
}

/* 0: done to GPU `gpu`; -1: there is no such fault. */
static int fault_arm(unsigned gpu, const char *fault, const struct options *o)
{
    struct st_faults *f = &st.gpus[gpu].faults;
    unsigned n;

    if (number_after(fault, 0, &n) != 0)
        return -1;
    if (fault_is(fault, "busy")) {
        f->busy = 1;
    } else if (fault_is(fault, "noreset")) {
        f->noreset = 1;
    } else if (fault_is(fault, "lost")) {
        f->lost = 1;
    } else if (fault_is(fault, "insufficient")) {
        f->insufficient = 1;
        f->insufficient_after = n;
    } else if (fault_is(fault, "slow")) {
        f->slow_ms = n;
    } else if (fault_is(fault, "clear")) {
        memset(f, 0, sizeof(*f));
    } else if (fault_is(fault, "xid") && n) {
        st.events[st.last_event % MAX_EVENTS] = (struct st_event){
            .seq = st.last_event + 1,
            .time = (uint64_t)time(NULL),
            .xid = n,
            .gpu = (uint8_t)gpu,
            .gi = o->gi < 0 ? NO_ID : (uint8_t)o->gi,
            .ci = o->ci < 0 ? NO_ID : (uint8_t)o->ci,
        };
        st.last_event++;
    } else {
        return -1;
    }
    return 0;
}

/* All the faults named, on one GPU or on all, or none of them. */
static int do_fault(const struct options *o, char *const *faults, int count)
{
    unsigned first = o->gpu < 0 ? 0 : (unsigned)o->gpu, last = o->gpu < 0 ? st.n_gpus : first + 1;
    int rc;

    if (last > st.n_gpus)
        return wrong("no such GPU");
    rc = state_begin();
    if (rc)
        return die(place.file, rc);
    for (unsigned gpu = first; gpu < last; gpu++)
        for (int i = 0; i < count; i++)
            if (fault_arm(gpu, faults[i], o) != 0) {
                state_abort();
                return wrong("unknown fault, or a number that is none");
            }
    rc = state_commit();
    return rc ? die(place.file, rc) : 0;
}

static int number(const char *text, long *out)
{
    char *end;

    *out = strtol(text, &end, 10);
    return *text && !*end && *out >= 0 ? 0 : -1;
}

int main(int argc, char **argv)
{
    enum {
        O_ROOT = 1,
        O_CARDS,
        O_BIN,
        O_VERSION,
        O_BOOT,
        O_SEED,
        O_LINK,
        O_JSON,
        O_GPU,
        O_GI,
        O_CI,
        O_MEM,
        O_SEC
    };
    // clang-format off
    static const struct option longs[] = {
        {"root", 1, 0, O_ROOT},       {"cards", 1, 0, O_CARDS}, {"bin", 1, 0, O_BIN},   {"driver-version", 1, 0, O_VERSION},
        {"boot-id", 1, 0, O_BOOT},    {"seed", 1, 0, O_SEED},   {"link-host", 0, 0, O_LINK}, {"json", 0, 0, O_JSON},
        {"gpu", 1, 0, O_GPU},         {"gi", 1, 0, O_GI},       {"ci", 1, 0, O_CI},     {"memory", 1, 0, O_MEM},
        {"seconds", 1, 0, O_SEC},     {"help", 0, 0, 'h'},      {0, 0, 0, 0}};
    // clang-format on
    struct options o = {.version = DRIVER_VERSION, .gpu = -1, .gi = -1, .ci = -1};
    const char *command, *env = getenv("LAB_SILICON_ROOT");
    int opt, bad = 0, rc;

    while ((opt = getopt_long(argc, argv, "h", longs, NULL)) != -1)
        switch (opt) {
        case O_ROOT:
            o.root = optarg;
            break;
        case O_CARDS:
            o.cards = optarg;
            break;
        case O_BIN:
            o.bin = optarg;
            break;
        case O_VERSION:
            o.version = optarg;
            break;
        case O_BOOT:
            o.boot = optarg;
            break;
        case O_SEED:
            o.seed = optarg;
            break;
        case O_LINK:
            o.link_host = 1;
            break;
        case O_JSON:
            o.json = 1;
            break;
        case O_GPU:
            bad |= number(optarg, &o.gpu);
            break;
        case O_GI:
            bad |= number(optarg, &o.gi);
            break;
        case O_CI:
            bad |= number(optarg, &o.ci);
            break;
        case O_MEM:
            bad |= number(optarg, &o.memory);
            break;
        case O_SEC:
            bad |= number(optarg, &o.seconds);
            break;
        case 'h':
            fputs(usage, stdout);
            return 0;
        default:
            return 2;
        }
    if (bad)
        return wrong("numbers are wanted for --gpu, --gi, --ci, --memory and --seconds");
    snprintf(place.root, sizeof(place.root), "%s", o.root ? o.root : env ? env : "/driver-root");
    command = optind < argc ? argv[optind++] : "";
    if (o.root)
        setenv("LAB_SILICON_ROOT", o.root, 1);
    if (strcmp(command, "init") == 0)
        return do_init(&o);
    if (strcmp(command, "show") != 0 && strcmp(command, "reboot") != 0 && strcmp(command, "hold") != 0 &&
        (strcmp(command, "fault") != 0 || optind == argc))
        return wrong(*command ? "unknown command, or a fault without a name" : "a command is wanted");
    rc = state_open();
    if (rc == ENOENT)
        return die("no emulated silicon here; `lab-silicon init` makes it", 0);
    if (rc)
        return die(place.file, rc);
    if (strcmp(command, "show") == 0)
        return do_show(&o);
    if (strcmp(command, "reboot") == 0)
        return do_reboot();
    if (strcmp(command, "hold") == 0)
        return do_hold(&o);
    return do_fault(&o, argv + optind, argc - optind);
}
