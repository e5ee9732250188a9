/* SPDX-License-Identifier: Apache-2.0 */
/* The library's version, written by hand; meson.build reads it from here. */
#ifndef HISPARSE_RT_VERSION_H
#define HISPARSE_RT_VERSION_H

#define HSR_VERSION_MAJOR 0
#define HSR_VERSION_MINOR 1
#define HSR_VERSION_PATCH 0

/* Counts incompatible changes of the binary interface. Before 1.0 every minor version may raise it. */
#define HSR_ABI_VERSION 1

#endif
