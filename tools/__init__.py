# SPDX-License-Identifier: Apache-2.0
"""Tools around the runtime: the converter and what reads and writes `.hsr` files."""
