/* The driver root: the files NVIDIA's driver, its CDI generator and the pods expect. */
#ifndef SILICON_ROOT_H
#define SILICON_ROOT_H

#include <sys/types.h>

int mkdirs(const char *path, mode_t mode); /* like mkdir -p */
int root_make(const char *root, const char *bin, const char *version,
              int link_host); /* 0 or -1, having said why */
void root_sync(void);         /* capability files = instances in `st`; only on the node */
void root_bind_proc(
    void); /* in the driver's own container: show the root's /proc files where the driver looks */

#endif
