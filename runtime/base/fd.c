/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE 1
#include "base/fd.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

int hsri_raise_fd(int fd)
{
    if (fd < 0 || fd > 2)
        return fd;
    const int above = fcntl(fd, F_DUPFD_CLOEXEC, 3), refusal = errno;
    close(fd);
    errno = refusal;
    return above;
}
