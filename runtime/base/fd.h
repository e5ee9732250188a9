/* SPDX-License-Identifier: Apache-2.0 */
#ifndef HSRI_FD_H
#define HSRI_FD_H

/* The descriptor, or in its place a copy above 2. A host that closed its standard streams gets those numbers for what is opened next, and
 * what it prints, or puts there again, must not meet a file of the library. -1 stays, with errno. */
int hsri_raise_fd(int fd);

#endif
