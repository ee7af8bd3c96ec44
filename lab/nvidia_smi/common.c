/* What the parts of nvidia-smi share. */
#define _GNU_SOURCE
#include "smi.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#define MIB (1024ull * 1024)

int open_silicon(void)
{
    if (nvmlInit_v2() == NV_OK)
        return 0;
    puts("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the "
         "latest "
         "NVIDIA driver is installed and running.\n");
    return NV_NOT_LOADED;
}

void bus_id_text(unsigned gpu, char out[24])
{
    snprintf(out, 24, "00000000:%02X:%02X.0", st.gpus[gpu].bus & 0xff, st.gpus[gpu].device & 0xff);
}

const char *timestamp(const char *format)
{
    static char text[64];
    time_t now = time(NULL);

    strftime(text, sizeof(text), format, localtime(&now));
    return text;
}

static int matches(const char *id, unsigned gpu, unsigned index)
{
    unsigned domain, bus, device;
    char uuid[48], *end;
    unsigned long n = strtoul(id, &end, 10);

    if (*id && !*end)
        return n == index;
    uuid_text("GPU-", st.gpus[gpu].uuid, uuid);
    if (strcasecmp(id, uuid) == 0)
        return 1;
    return sscanf(id, "%x:%x:%x.", &domain, &bus, &device) == 3 && domain == 0 && bus == st.gpus[gpu].bus &&
           device == st.gpus[gpu].device;
}

int select_gpus(const char *ids, struct selection *s)
{
    unsigned index = 0;

    s->n = 0;
    for (unsigned gpu = 0; gpu < st.n_gpus; gpu++) {
        char copy[1024], *save;
        int wanted = !ids;

        if (!gpu_visible(gpu))
            continue;
        snprintf(copy, sizeof(copy), "%s", ids ? ids : "");
        for (char *p = strtok_r(copy, ",", &save); p; p = strtok_r(NULL, ",", &save))
            wanted |= matches(p, gpu, index);
        if (wanted) {
            s->gpu[s->n] = gpu;
            s->index[s->n++] = index;
        }
        index++;
    }
    if (s->n)
        return 0;
    puts("No devices were found");
    return NV_NOT_FOUND;
}

int lost_check(const struct selection *s)
{
    for (unsigned i = 0; i < s->n; i++)
        if (st.gpus[s->gpu[i]].faults.lost) {
            printf("Unable to determine the device handle for GPU%u: 0000:%02X:%02X.0: GPU is lost.  Reboot "
                   "the system "
                   "to recover this GPU\n\n",
                   s->index[i], st.gpus[s->gpu[i]].bus, st.gpus[s->gpu[i]].device);
            return NV_LOST;
        }
    return 0;
}

unsigned mib_up(unsigned long long bytes)
{
    return (unsigned)((bytes + MIB - 1) / MIB);
}

int mig_at(unsigned gpu, unsigned n, struct st_gi **gi, struct st_ci **ci)
{
    for (unsigned id = 0; id < 15; id++) {
        *gi = gi_find(&st.gpus[gpu], id);
        for (unsigned k = 0; *gi && k < MAX_CIS; k++) {
            *ci = ci_find(*gi, k);
            if (*ci && mig_visible(gpu, id, k) && n-- == 0)
                return 1;
        }
    }
    return 0;
}

int app_at(unsigned gpu, unsigned n, struct app *app)
{
    pid_t pid;

    for (unsigned i = 0; i < MAX_CLIENTS; i++) {
        const struct st_client *c = &st.clients[i];

        if (!c->used || !c->compute || c->gpu != gpu || !client_alive(i, &pid) || pid <= 0 || n-- > 0)
            continue;
        *app = (struct app){.pid = (int)pid, .mib = client_mib(i, pid), .gi = c->gi, .ci = c->ci};
        process_name(pid, c->name, app->name, sizeof(app->name));
        return 1;
    }
    return 0;
}
