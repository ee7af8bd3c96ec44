/*
 * nvidia-cuda-mps-control of the emulated silicon. No CUDA runs here, so no client is ever served; but it can
 * be started, spoken to and stopped as NVIDIA's, which is all that the DRA driver does with it. It says in
 * its log and in its help that it is emulated.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define MAX_LIMITS 16

static const char usage[] =
    "nvidia-cuda-mps-control of the lab's emulated silicon: no CUDA client is served (no real hardware is "
    "involved)\n"
    "\n"
    "  nvidia-cuda-mps-control -d     start the control daemon in the background\n"
    "  nvidia-cuda-mps-control -f     start it in the foreground\n"
    "  nvidia-cuda-mps-control        send it commands from standard input:\n"
    "      get_server_list\n"
    "      get_default_active_thread_percentage\n"
    "      set_default_active_thread_percentage PERCENT\n"
    "      get_default_device_pinned_mem_limit DEVICE\n"
    "      set_default_device_pinned_mem_limit DEVICE LIMIT      (LIMIT as 2G or 512M)\n"
    "      quit\n"
    "\n"
    "Environment: CUDA_MPS_PIPE_DIRECTORY (/tmp/nvidia-mps), CUDA_MPS_LOG_DIRECTORY (/var/log/nvidia-mps).\n";

static struct {
    char device[64], limit[32];
} limits[MAX_LIMITS];
static double percentage = 100.0;
static FILE *journal;

static const char *directory(const char *name, const char *otherwise)
{
    const char *given = getenv(name);

    return given && *given ? given : otherwise;
}

static const char *pipes(void)
{
    return directory("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps");
}

static int die(const char *what, int error)
{
    fprintf(stderr, "nvidia-cuda-mps-control (emulated): %s: %s\n", what, strerror(error));
    return 1;
}

static void note(const char *format, ...) __attribute__((format(printf, 1, 2)));

static void note(const char *format, ...)
{
    char stamp[40];
    struct timespec now;
    struct tm parts;
    va_list ap;

    clock_gettime(CLOCK_REALTIME, &now);
    strftime(stamp, sizeof(stamp), "%Y-%m-%d %H:%M:%S", gmtime_r(&now.tv_sec, &parts));
    fprintf(journal, "[%s.%03ld Control %5d] ", stamp, now.tv_nsec / 1000000, (int)getpid());
    va_start(ap, format);
    vfprintf(journal, format, ap);
    va_end(ap);
    fputc('\n', journal);
    fflush(journal);
}

/* ---- commands ---- */

/* "2G" or "512M": a number of at least one and a unit. */
static int is_limit(const char *text)
{
    char *end;
    unsigned long n = strtoul(text, &end, 10);

    return *text >= '0' && *text <= '9' && n > 0 && (end[0] == 'G' || end[0] == 'M') && !end[1];
}

static const char *limit_of(const char *device)
{
    for (int i = 0; i < MAX_LIMITS; i++)
        if (strcmp(limits[i].device, device) == 0)
            return limits[i].limit;
    return NULL;
}

static int limit_put(const char *device, const char *limit)
{
    for (int i = 0; i < MAX_LIMITS; i++)
        if (!*limits[i].device || strcmp(limits[i].device, device) == 0) {
            snprintf(limits[i].device, sizeof(limits[i].device), "%s", device);
            snprintf(limits[i].limit, sizeof(limits[i].limit), "%s", limit);
            return 0;
        }
    return -1;
}

/* Answer one line; 1 when it was the order to quit. */
static int command(char *line, FILE *out)
{
    char *save = NULL, *word = strtok_r(line, " \t\r\n", &save), *a, *b, *end;
    double given;

    if (!word)
        return 0;
    a = strtok_r(NULL, " \t\r\n", &save);
    b = a ? strtok_r(NULL, " \t\r\n", &save) : NULL;
    if (strcmp(word, "quit") == 0) {
        note("Received quit command");
        return 1;
    }
    if (strcmp(word, "get_server_list") == 0)
        return 0; /* there is never a server: no CUDA client comes */
    if (strcmp(word, "get_default_active_thread_percentage") == 0) {
        fprintf(out, "%.1f\n", percentage);
        return 0;
    }
    if (strcmp(word, "set_default_active_thread_percentage") == 0 && a && !b) {
        given = strtod(a, &end);
        if (!*end && end != a && given > 0 && given <= 100) {
            percentage = given;
            note("Default active thread percentage set to %.1f", percentage);
            fprintf(out, "%.1f\n", percentage);
        } else
            fprintf(out, "Invalid percentage: %s\n", a);
        return 0;
    }
    if (strcmp(word, "get_default_device_pinned_mem_limit") == 0 && a && !b) {
        const char *limit = limit_of(a);

        fprintf(out, "%s\n", limit ? limit : "no limit");
        return 0;
    }
    if (strcmp(word, "set_default_device_pinned_mem_limit") == 0 && a && b) {
        if (!is_limit(b) || limit_put(a, b) != 0)
            fprintf(out, "Invalid limit: %s\n", b);
        else
            note("Default pinned memory limit of device %s set to %s", a, b);
        return 0;
    }
    fprintf(out, "Unknown or incomplete command: %s\n", word);
    return 0;
}

/* ---- the daemon ---- */

static int address(struct sockaddr_un *to)
{
    memset(to, 0, sizeof(*to));
    to->sun_family = AF_UNIX;
    return (size_t)snprintf(to->sun_path, sizeof(to->sun_path), "%s/control", pipes()) >= sizeof(to->sun_path)
               ? ENAMETOOLONG
               : 0;
}

static int serve(int listener)
{
    for (int done = 0; !done;) {
        char line[512];
        int peer = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        /* Two streams: one alone would lose what it has read ahead when it turns to writing. */
        FILE *in = peer >= 0 ? fdopen(dup(peer), "r") : NULL, *out = peer >= 0 ? fdopen(peer, "w") : NULL;

        if (peer < 0 && errno != EINTR && errno != ECONNABORTED)
            return errno;
        while (in && out && !done && fgets(line, sizeof(line), in)) {
            done = command(line, out);
            fflush(out);
        }
        if (in)
            fclose(in);
        if (out)
            fclose(out);
    }
    note("Exit");
    return 0;
}

static int start(int background)
{
    const char *logs = directory("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps");
    struct sockaddr_un here;
    char path[512];
    FILE *pid;
    int lock, listener, rc = address(&here);

    if (rc)
        return die(pipes(), rc);
    if ((mkdir(pipes(), 0755) != 0 && errno != EEXIST) || (mkdir(logs, 0755) != 0 && errno != EEXIST))
        return die("its directories cannot be made", errno);
    snprintf(path, sizeof(path), "%s/control_lock", pipes());
    lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (lock < 0)
        return die(path, errno);
    if (flock(lock, LOCK_EX | LOCK_NB) != 0) {
        fprintf(stderr, "An instance of this daemon is already running\n");
        return 1;
    }
    snprintf(path, sizeof(path), "%s/control.log", logs);
    journal = fopen(path, "ae");
    if (!journal)
        return die(path, errno);
    unlink(here.sun_path);
    listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&here, sizeof(here)) != 0 ||
        listen(listener, 8) != 0)
        return die(here.sun_path, errno);
    chmod(here.sun_path, 0600); /* clients use other pipes; only the one who started it gives it orders */
    if (background && daemon(1, 0) != 0)
        return die("it cannot go to the background", errno);
    snprintf(path, sizeof(path), "%s/nvidia-cuda-mps-control.pid", pipes());
    pid = fopen(path, "we");
    if (pid) {
        fprintf(pid, "%d\n", (int)getpid());
        fclose(pid);
    }
    note("Start (emulated silicon of the lab: no CUDA client is served)");
    note("CUDA_VISIBLE_DEVICES=%s", directory("CUDA_VISIBLE_DEVICES", ""));
    rc = serve(listener);
    unlink(here.sun_path);
    unlink(path);
    return rc ? die("serving", rc) : 0;
}

/* ---- the other end ---- */

static int speak(void)
{
    struct sockaddr_un there;
    char line[512];
    int peer = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), rc = address(&there);
    ssize_t n;

    if (rc || peer < 0 || connect(peer, (struct sockaddr *)&there, sizeof(there)) != 0) {
        fprintf(stderr, "Cannot find MPS control daemon process\n");
        return 1;
    }
    while (fgets(line, sizeof(line), stdin))
        if (send(peer, line, strlen(line), MSG_NOSIGNAL) < 0)
            break;
    shutdown(peer, SHUT_WR);
    while ((n = read(peer, line, sizeof(line))) > 0)
        fwrite(line, 1, (size_t)n, stdout);
    close(peer);
    return 0;
}

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN);
    if (argc == 1)
        return speak();
    if (argc == 2 && (strcmp(argv[1], "-d") == 0 || strcmp(argv[1], "-f") == 0))
        return start(argv[1][1] == 'd');
    fputs(usage, argc == 2 && strcmp(argv[1], "-h") == 0 ? stdout : stderr);
    return argc == 2 && strcmp(argv[1], "-h") == 0 ? 0 : 2;
}
