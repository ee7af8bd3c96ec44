/* nvidia-smi without options: the table. */
#define _GNU_SOURCE
#include "smi.h"

#include <string.h>

#define MIB (1024ull * 1024)

static const char rule[] =
    "+-----------------------------------------+------------------------+----------------------+\n";
static const char wide[] =
    "+-----------------------------------------------------------------------------------------+\n";

static void head(FILE *out)
{
    fprintf(out, "%s\n%s", timestamp("%a %b %e %H:%M:%S %Y       "), wide);
    fprintf(out, "| NVIDIA-SMI %-22s Driver Version: %-14s CUDA Version: %-8s |\n", st.driver_version,
            st.driver_version, CUDA_VERSION);
    fputs(rule, out);
    fputs("| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |\n"
          "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |\n"
          "|                                         |                        |               MIG M. |\n"
          "|=========================================+========================+======================|\n",
          out);
}

static const char *mig_text(const struct st_gpu *g)
{
    if (!gpu_card(g)->mem_slices)
        return "N/A";
    if (g->mig_current != g->mig_pending)
        return g->mig_current ? "Enabled*" : "Disabled*";
    return g->mig_current ? "Enabled" : "Disabled";
}

static void gpu_rows(unsigned index, unsigned gpu, FILE *out)
{
    static const char *const modes[] = {"Default", "E. Thread", "Prohibited", "E. Process"};
    const struct st_gpu *g = &st.gpus[gpu];
    const struct card *c = gpu_card(g);
    unsigned long long total, reserved, used;
    char bus[24];

    bus_id_text(gpu, bus);
    gpu_memory(gpu, &total, &reserved, &used);
    fprintf(out, "| %3u  %-26s%7s  |   %s Off |%21s |\n", index, c->name, g->persistence ? "On" : "Off", bus,
            g->mig_current ? "On" : "0");
    fprintf(out, "| N/A   %2dC    P0%15dW / %4uW | %7uMiB / %6uMiB |%8s%13s |\n", c->idle_c, c->idle_w,
            c->power_w, mib_up(used), mib_up(total), g->mig_current ? "N/A" : "0%",
            modes[g->compute_mode & 3]);
    fprintf(out, "|                                         |                        |%21s |\n", mig_text(g));
    fputs(rule, out);
}

static void mig_rows(unsigned index, unsigned gpu, unsigned *shown, FILE *out)
{
    const struct card *c = gpu_card(&st.gpus[gpu]);
    struct st_gi *gi;
    struct st_ci *ci;

    for (unsigned n = 0; mig_at(gpu, n, &gi, &ci); n++) {
        const struct mig_profile *p = gi_profile(&st.gpus[gpu], gi);

        char total[16], bar1[16];

        ++*shown;
        snprintf(total, sizeof(total), "%5uMiB", p->memory_mib);
        snprintf(bar1, sizeof(bar1), "%5uMiB", c->mig_bar1_mib * p->mem_slices);
        fprintf(out, "| %2u  %3u  %2u  %2u  | %15uMiB / %-12s|%3u      0 | %2u  %2u   %2u   %2u   %2u |\n",
                index, gi->id, ci->id, n, instance_used_mib(gpu, gi), total, ci_profile_sm(p, ci->profile),
                p->ce, p->enc, p->dec, p->ofa, p->jpeg);
        fprintf(out, "|                  | %15uMiB / %-12s|           |                       |\n", 0, bar1);
        fputs("+------------------+----------------------------------+-----------+-----------------------+\n",
              out);
    }
}

static void process_rows(unsigned index, unsigned gpu, unsigned *shown, FILE *out)
{
    struct app app;

    for (unsigned n = 0; app_at(gpu, n, &app); n++) {
        char ids[16] = "   N/A  N/A", name[40];
        size_t length = strlen(app.name);

        if (app.gi != NO_ID)
            snprintf(ids, sizeof(ids), "%5u%5u ", app.gi, app.ci);
        /* A long path keeps its end. */
        if (length > 36)
            snprintf(name, sizeof(name), "...%s", app.name + length - 33);
        else
            snprintf(name, sizeof(name), "%s", app.name);
        ++*shown;
        fprintf(out, "|%5u%s%16d      C   %-36s%7uMiB |\n", index, ids, app.pid, name, app.mib);
    }
}

int command_table(const struct selection *s, FILE *out)
{
    unsigned enabled = 0, shown = 0;

    head(out);
    for (unsigned i = 0; i < s->n; i++) {
        gpu_rows(s->index[i], s->gpu[i], out);
        enabled += st.gpus[s->gpu[i]].mig_current;
    }
    fputc('\n', out);
    if (enabled) {
        fputs(wide, out);
        fputs("| MIG devices:                                                                            |\n"
              "+------------------+----------------------------------+-----------+-----------------------+\n"
              "| GPU  GI  CI  MIG |                     Memory-Usage |        Vol|        Shared         |\n"
              "|      ID  ID  Dev |                       BAR1-Usage | SM     Unc| CE ENC  DEC  OFA  JPG |\n"
              "|                  |                                  |        ECC|                       |\n"
              "|==================+==================================+===========+=======================|\n",
              out);
        for (unsigned i = 0; i < s->n; i++)
            mig_rows(s->index[i], s->gpu[i], &shown, out);
        if (!shown) {
            fputs("|  No MIG devices found                                                                   "
                  "|\n",
                  out);
            fputs(wide, out);
        }
        fputc('\n', out);
    }
    fputs(wide, out);
    fputs("| Processes:                                                                              |\n"
          "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |\n"
          "|        ID   ID                                                               Usage      |\n"
          "|=========================================================================================|\n",
          out);
    shown = 0;
    for (unsigned i = 0; i < s->n; i++)
        process_rows(s->index[i], s->gpu[i], &shown, out);
    if (!shown)
        fputs("|  No running processes found                                                             |\n",
              out);
    fputs(wide, out);
    return 0;
}
