/* nvidia-smi mig ... */
#define _GNU_SOURCE
#include "smi.h"

#include <stdlib.h>
#include <string.h>

struct args {
    const char *ids, *create_gi, *create_ci;
    int has_gi, has_ci;
    unsigned gi[32], n_gi, ci[32], n_ci;
    int with_ci;
    char command; /* p: -lgip, P: -lgipp, g: -lgi, c: -lci, i: -lcip, I: -lcipp, G/C: create, d/D: destroy
                     CI/GI */
};

static int in_list(int given, const unsigned *list, unsigned n, unsigned id)
{
    if (!given)
        return 1;
    for (unsigned i = 0; i < n; i++)
        if (list[i] == id)
            return 1;
    return 0;
}

static unsigned numbers(const char *text, unsigned *out, unsigned room)
{
    unsigned n = 0;

    while (*text && n < room) {
        char *end;

        out[n] = (unsigned)strtoul(text, &end, 10);
        if (end == text)
            break;
        n++;
        text = *end == ',' ? end + 1 : end;
    }
    return n;
}

/* ---- tables ---- */

static void table_text(const char *const lines[])
{
    for (int i = 0; lines[i]; i++)
        puts(lines[i]);
}

static void list_profiles(const struct selection *s)
{
    static const char *const head[] = {
        "+-------------------------------------------------------------------------------+",
        "| GPU instance profiles:                                                        |",
        "| GPU   Name               ID    Instances   Memory     P2P    SM    DEC   ENC  |",
        "|                                Free/Total   GiB              CE    JPEG  OFA  |",
        "|===============================================================================|",
        NULL};

    table_text(head);
    for (unsigned i = 0; i < s->n; i++) {
        const struct st_gpu *g = &st.gpus[s->gpu[i]];
        const struct card *c = gpu_card(g);

        for (unsigned p = 0; p < MAX_PROFILES && c->profiles[p].name; p++) {
            const struct mig_profile *q = &c->profiles[p];
            char name[32], memory[16];

            snprintf(name, sizeof(name), "MIG %s", q->name);
            snprintf(memory, sizeof(memory), "%.2f", q->memory_mib / 1024.0);
            printf("| %3u  %-19s %2u     %u/%-6u   %-6s     No     %-3u%5u  %4u   |\n", s->index[i], name,
                   q->id, remaining(g, p), q->max, memory, q->sm, q->dec, q->enc);
            printf("|                                                              %2u  %4u  %4u   |\n",
                   q->ce, q->jpeg, q->ofa);
            puts(head[0]);
        }
    }
}

static void list_placements(const struct selection *s)
{
    for (unsigned i = 0; i < s->n; i++) {
        const struct card *c = gpu_card(&st.gpus[s->gpu[i]]);

        for (unsigned p = 0; p < MAX_PROFILES && c->profiles[p].name; p++) {
            const struct mig_profile *q = &c->profiles[p];

            printf("GPU %2u Profile ID %2u Placement%s{", s->index[i], q->id,
                   q->starts[1] >= 0 ? "s: " : " : ");
            for (int k = 0; k < MAX_PLACEMENTS && q->starts[k] >= 0; k++)
                printf("%s%d", k ? "," : "", q->starts[k]);
            printf("}:%u\n", q->mem_slices);
        }
    }
}

/* Run `show` for each chosen GPU instance, in the order of IDs; returns how many there were. */
typedef int each_gi(const struct args *a, unsigned index, unsigned gpu, struct st_gi *gi);

static unsigned for_each_gi(const struct args *a, const struct selection *s, each_gi *show, int *rc)
{
    unsigned count = 0;

    for (unsigned i = 0; i < s->n; i++)
        for (unsigned id = 0; id < 15; id++) {
            struct st_gi *gi = gi_find(&st.gpus[s->gpu[i]], id);

            if (!gi || !gi_visible(s->gpu[i], gi) || !in_list(a->has_gi, a->gi, a->n_gi, id))
                continue;
            count++;
            *rc = show(a, s->index[i], s->gpu[i], gi);
            if (*rc)
                return count;
        }
    return count;
}

static const char gi_rule[] = "+-------------------------------------------------------+";

static int show_gi(const struct args *a, unsigned index, unsigned gpu, struct st_gi *gi)
{
    const struct mig_profile *p = gi_profile(&st.gpus[gpu], gi);
    char name[32];

    (void)a;
    snprintf(name, sizeof(name), "MIG %s", p->name);
    printf("| %3u  %-20s%2u       %2u          %u:%u     |\n", index, name, p->id, gi->id, gi->start,
           p->mem_slices);
    puts(gi_rule);
    return 0;
}

static const char ci_rule[] = "+--------------------------------------------------------------------+";
static unsigned ci_shown;

static int show_ci(const struct args *a, unsigned index, unsigned gpu, struct st_gi *gi)
{
    static const char *const head[] = {
        ci_rule,
        "| Compute instances:                                                 |",
        "| GPU     GPU       Name             Profile   Instance   Placement  |",
        "|       Instance                       ID        ID       Start:Size |",
        "|         ID                                                         |",
        "|====================================================================|",
        NULL};
    const struct mig_profile *p = gi_profile(&st.gpus[gpu], gi);
    char name[64], text[80];

    for (unsigned id = 0; id < MAX_CIS; id++) {
        struct st_ci *ci = ci_find(gi, id);

        if (!ci || !in_list(a->has_ci, a->ci, a->n_ci, id))
            continue;
        if (!ci_shown++)
            table_text(head);
        ci_profile_name(p, ci->profile, name, sizeof(name));
        snprintf(text, sizeof(text), "MIG %s", name);
        printf("| %3u     %2u       %-20s %-3u       %2u       %4u:%u     |\n", index, gi->id, text,
               ci->profile, ci->id, ci->start, ci_profile_slices[ci->profile]);
        puts(ci_rule);
    }
    return 0;
}

static const char cip_rule[] =
    "+--------------------------------------------------------------------------------------+";

static int show_ci_profiles(const struct args *a, unsigned index, unsigned gpu, struct st_gi *gi)
{
    const struct mig_profile *p = gi_profile(&st.gpus[gpu], gi);
    char name[64], text[80], id[8];

    (void)a;
    for (unsigned i = 0; i < CI_PROFILES; i++) {
        if (!ci_profile_max(p, i))
            continue;
        ci_profile_name(p, i, name, sizeof(name));
        snprintf(text, sizeof(text), "MIG %s", name);
        snprintf(id, sizeof(id), "%u%s", i, i == ci_profile_default(p) ? "*" : "");
        printf("| %3u     %2u       %-20s %2s%s     %u/%-6u      %3u       %2u   %3u   %3u   |\n", index,
               gi->id, text, id, id[1] ? "" : " ", ci_remaining(&st.gpus[gpu], gi, i), ci_profile_max(p, i),
               ci_profile_sm(p, i), p->dec, p->enc, p->ofa);
        printf("|                                                                     %2u   %3u         |\n",
               p->ce, p->jpeg);
        puts(cip_rule);
    }
    return 0;
}

static int show_ci_placements(const struct args *a, unsigned index, unsigned gpu, struct st_gi *gi)
{
    const struct mig_profile *p = gi_profile(&st.gpus[gpu], gi);

    (void)a;
    for (unsigned i = 0; i < CI_PROFILES; i++) {
        unsigned slices = ci_profile_slices[i], last = ci_profile_max(p, i) ? p->slices - slices : 0;

        if (!ci_profile_max(p, i))
            continue;
        printf("GPU %2u GI %2u Profile ID %2u Placement%s{", index, gi->id, i, last ? "s: " : " : ");
        for (unsigned at = 0; at <= last; at++)
            printf("%s%u", at ? "," : "", at);
        printf("}:%u\n", slices);
    }
    return 0;
}

/* ---- changes ---- */

static int failed(const char *what, int rc)
{
    printf("Failed to %s: %s\n", what, result_text(rc));
    return rc > 255 ? 255 : rc;
}

static int make_ci(unsigned index, unsigned gpu, unsigned gi, int profile, const char *text)
{
    struct st_gi *found = gi_find(&st.gpus[gpu], gi);
    char name[64];
    unsigned id;
    int rc;

    if (profile < 0 && !text && found)
        profile = (int)ci_profile_default(gi_profile(&st.gpus[gpu], found));
    rc = profile < 0 ? NV_INVALID : ci_create(gpu, gi, (unsigned)profile, -1, &id);
    if (rc) {
        if (text)
            printf(
                "Unable to create a compute instance on GPU %2u GPU instance ID %2u using profile %s: %s\n",
                index, gi, text, result_text(rc));
        else
            printf(
                "Unable to create a compute instance on GPU %2u GPU instance ID %2u using profile %d: %s\n",
                index, gi, profile, result_text(rc));
        return rc;
    }
    ci_profile_name(gi_profile(&st.gpus[gpu], gi_find(&st.gpus[gpu], gi)), (unsigned)profile, name,
                    sizeof(name));
    printf("Successfully created compute instance ID %2u on GPU %2u GPU instance ID %2u using profile MIG %s "
           "(ID %2d)\n",
           id, index, gi, name, profile);
    return 0;
}

/* "14", "1g.6gb", "MIG 1g.6gb", each with an optional ":start". */
static int make_gi(unsigned index, unsigned gpu, char *tuple, int with_ci)
{
    const struct card *c = gpu_card(&st.gpus[gpu]);
    char *colon = strchr(tuple, ':'), *end;
    int start = -1, profile, rc = 0;
    unsigned id = 0;

    if (colon) {
        *colon = '\0';
        start = (int)strtol(colon + 1, &end, 10);
        if (!colon[1] || *end || start < 0)
            rc = NV_INVALID;
    }
    strtoul(tuple, &end, 10);
    profile = *tuple && !*end ? profile_by_id(c, (unsigned)atoi(tuple)) : profile_by_name(c, tuple);
    if (!rc)
        rc = profile < 0 ? NV_INVALID : gi_create(gpu, (unsigned)profile, start, &id);
    if (rc) {
        if (profile >= 0)
            snprintf(tuple, strlen(tuple) + 1, "%u", c->profiles[profile].id);
        printf("Unable to create a GPU instance on GPU %2u using profile %s: %s\n", index, tuple,
               result_text(rc));
        return rc;
    }
    printf("Successfully created GPU instance ID %2u on GPU %2u using profile MIG %s (ID %2u)\n", id, index,
           c->profiles[profile].name, c->profiles[profile].id);
    return with_ci ? make_ci(index, gpu, id, -1, NULL) : 0;
}

static int create_gis(const struct args *a, const struct selection *s)
{
    char copy[1024], *save;

    for (unsigned i = 0; i < s->n; i++) {
        snprintf(copy, sizeof(copy), "%s", a->create_gi);
        for (char *p = strtok_r(copy, ",", &save); p; p = strtok_r(NULL, ",", &save)) {
            int rc = make_gi(s->index[i], s->gpu[i], p, a->with_ci);

            /* What was made before the failure stays, as on hardware. */
            if (rc)
                return failed("create GPU instances", rc);
        }
    }
    return 0;
}

static int create_cis(const struct args *a, unsigned index, unsigned gpu, struct st_gi *gi)
{
    const struct mig_profile *p = gi_profile(&st.gpus[gpu], gi);
    unsigned id = gi->id;
    char copy[512], name[64], *save, *end;

    if (!a->create_ci)
        return make_ci(index, gpu, id, -1, NULL);
    snprintf(copy, sizeof(copy), "%s", a->create_ci);
    for (char *q = strtok_r(copy, ",", &save); q; q = strtok_r(NULL, ",", &save)) {
        const char *bare = strncmp(q, "MIG ", 4) ? q : q + 4;
        int profile = -1, rc;

        strtoul(q, &end, 10);
        for (unsigned i = 0; i < CI_PROFILES; i++) {
            if (!ci_profile_max(p, i))
                continue;
            ci_profile_name(p, i, name, sizeof(name));
            if (*end ? strcmp(bare, name) == 0 : (unsigned)atoi(q) == i)
                profile = (int)i;
        }
        rc = make_ci(index, gpu, id, profile, q);
        if (rc)
            return rc;
    }
    return 0;
}

static int destroy_gi(const struct args *a, unsigned index, unsigned gpu, struct st_gi *gi)
{
    unsigned id = gi->id;
    int rc = gi_destroy(gpu, id);

    (void)a;
    if (rc)
        printf("Unable to destroy GPU instance ID %2u from GPU %2u: %s\n", id, index, result_text(rc));
    else
        printf("Successfully destroyed GPU instance ID %2u from GPU %2u\n", id, index);
    return rc;
}

static unsigned cis_found;

static int destroy_cis(const struct args *a, unsigned index, unsigned gpu, struct st_gi *gi)
{
    unsigned gi_id = gi->id;

    for (unsigned id = 0; id < MAX_CIS; id++) {
        int rc;

        if (!ci_find(gi, id) || !in_list(a->has_ci, a->ci, a->n_ci, id))
            continue;
        cis_found++;
        rc = ci_destroy(gpu, gi_id, id);
        if (rc) {
            printf("Unable to destroy compute instance ID %2u from GPU %2u GPU instance ID %2u: %s\n", id,
                   index, gi_id, result_text(rc));
            return rc;
        }
        printf("Successfully destroyed compute instance ID %2u from GPU %2u GPU instance ID %2u\n", id, index,
               gi_id);
    }
    return 0;
}

/* ---- command line ---- */

static int parse(int argc, char **argv, struct args *a)
{
    static const struct {
        const char *brief, *full;
        char command;
    } commands[] = {{"-lgip", "--list-gpu-instance-profiles", 'p'},
                    {"-lgipp", "--list-gpu-instance-possible-placements", 'P'},
                    {"-lgi", "--list-gpu-instances", 'g'},
                    {"-lci", "--list-compute-instances", 'c'},
                    {"-lcip", "--list-compute-instance-profiles", 'i'},
                    {"-lcipp", "--list-compute-instance-possible-placements", 'I'},
                    {"-cgi", "--create-gpu-instance", 'G'},
                    {"-cci", "--create-compute-instance", 'C'},
                    {"-dci", "--destroy-compute-instance", 'd'},
                    {"-dgi", "--destroy-gpu-instance", 'D'}};
    static const char *const with_value[][2] = {
        {"-i", "--id"}, {"-gi", "--gpu-instance-id"}, {"-ci", "--compute-instance-id"}};

    for (int i = 0; i < argc; i++) {
        char *value = strchr(argv[i], '=');
        size_t length = value && argv[i][1] == '-' ? (size_t)(value - argv[i]) : strlen(argv[i]);
        int found = 0;

        value = value && argv[i][1] == '-' ? value + 1 : NULL;
#define IS(text) (strncmp(argv[i], text, length) == 0 && strlen(text) == length)
        if (IS("-h") || IS("--help"))
            return -1;
        if (IS("-C") || IS("--default-compute-instance")) {
            a->with_ci = 1;
            continue;
        }
        for (unsigned k = 0; k < 3 && !found; k++) {
            if (!IS(with_value[k][0]) && !IS(with_value[k][1]))
                continue;
            found = 1;
            if (!value && i + 1 < argc)
                value = argv[++i];
            if (!value) {
                printf("ERROR: Option %s requires an argument. Please run 'nvidia-smi mig -h' for help.\n\n",
                       argv[i]);
                return 2;
            }
            if (k == 0)
                a->ids = value;
            else if (k == 1) {
                a->has_gi = 1;
                a->n_gi = numbers(value, a->gi, 32);
            } else {
                a->has_ci = 1;
                a->n_ci = numbers(value, a->ci, 32);
            }
        }
        for (unsigned k = 0; k < sizeof(commands) / sizeof(commands[0]) && !found; k++) {
            if (!IS(commands[k].brief) && !IS(commands[k].full))
                continue;
            found = 1;
            a->command = commands[k].command;
            if (strchr("GC", a->command) && !value && i + 1 < argc && argv[i + 1][0] != '-')
                value = argv[++i];
            if (a->command == 'G')
                a->create_gi = value;
            else if (a->command == 'C')
                a->create_ci = value;
        }
#undef IS
        if (!found) {
            printf("ERROR: Option %s is not recognized. Please run 'nvidia-smi mig -h'.\n\n", argv[i]);
            return 255;
        }
    }
    if (!a->command)
        return -1;
    if (a->command == 'G' && !a->create_gi) {
        puts("ERROR: Option -cgi requires an argument. Please run 'nvidia-smi mig -h' for help.\n");
        return 2;
    }
    return 0;
}

/* Keep the GPUs in MIG mode; most commands speak of no others. */
static unsigned keep_mig(struct selection *s)
{
    unsigned n = 0;

    for (unsigned i = 0; i < s->n; i++)
        if (st.gpus[s->gpu[i]].mig_current) {
            s->gpu[n] = s->gpu[i];
            s->index[n++] = s->index[i];
        }
    return s->n = n;
}

static int none(const char *what)
{
    printf("No %s found: Not Found\n", what);
    return NV_NOT_FOUND;
}

int command_mig(int argc, char **argv)
{
    static const char *const gi_head[] = {gi_rule,
                                          "| GPU instances:                                        |",
                                          "| GPU   Name             Profile  Instance   Placement  |",
                                          "|                          ID       ID       Start:Size |",
                                          "|=======================================================|",
                                          NULL};
    static const char *const cip_head[] = {
        cip_rule,
        "| Compute instance profiles:                                                           |",
        "| GPU     GPU       Name             Profile  Instances   Exclusive       Shared       |",
        "|       Instance                       ID     Free/Total     SM       DEC   ENC   OFA  |",
        "|         ID                                                          CE    JPEG       |",
        "|======================================================================================|",
        NULL};
    struct args a = {0};
    struct selection s;
    int rc = parse(argc, argv, &a);
    unsigned n = 0;

    if (rc < 0) {
        fputs(mig_help, stdout);
        return 0;
    }
    if (rc == 0)
        rc = open_silicon();
    if (rc == 0)
        rc = select_gpus(a.ids, &s);
    if (rc == 0)
        rc = lost_check(&s);
    if (rc)
        return rc;
    if (a.command == 'p' || a.command == 'P') {
        unsigned capable = 0;

        for (unsigned i = 0; i < s.n; i++)
            capable += gpu_card(&st.gpus[s.gpu[i]])->mem_slices > 0;
        if (!capable) {
            puts("No MIG-supported devices found.");
            return NV_NOT_FOUND;
        }
        if (a.command == 'p')
            list_profiles(&s);
        else
            list_placements(&s);
        return 0;
    }
    if (!keep_mig(&s)) {
        puts("No MIG-enabled devices found.");
        return 0;
    }
    if (a.command == 'G')
        return create_gis(&a, &s);
    if (a.command == 'c') {
        for_each_gi(&a, &s, show_ci, &rc);
        return ci_shown ? 0 : none("compute instances");
    }
    if (a.command == 'd') {
        for_each_gi(&a, &s, destroy_cis, &rc);
        if (rc)
            return failed("destroy compute instances", rc);
        return cis_found ? 0 : none("compute instances");
    }
    /* The others speak of GPU instances: none is an error, and is found out before a table is begun. */
    for (unsigned i = 0; i < s.n; i++)
        for (int k = 0; k < MAX_GIS; k++) {
            const struct st_gi *gi = &st.gpus[s.gpu[i]].gi[k];

            n += gi->used && gi_visible(s.gpu[i], gi) && in_list(a.has_gi, a.gi, a.n_gi, gi->id);
        }
    if (!n)
        return none("GPU instances");
    if (a.command == 'g') {
        table_text(gi_head);
        for_each_gi(&a, &s, show_gi, &rc);
    } else if (a.command == 'i') {
        table_text(cip_head);
        for_each_gi(&a, &s, show_ci_profiles, &rc);
    } else if (a.command == 'I') {
        for_each_gi(&a, &s, show_ci_placements, &rc);
    } else if (a.command == 'C') {
        for_each_gi(&a, &s, create_cis, &rc);
        if (rc)
            return failed("create compute instances", rc);
    } else {
        for_each_gi(&a, &s, destroy_gi, &rc);
        if (rc)
            return failed("destroy GPU instances", rc);
    }
    return 0;
}
