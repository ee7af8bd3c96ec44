#include "smi.h"
int command_details(const struct selection *s, int xml, const char *display, FILE *out)
{
    (void)s;
    (void)xml;
    (void)display;
    (void)out;
    return 2;
}
