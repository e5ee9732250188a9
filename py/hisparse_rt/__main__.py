# SPDX-License-Identifier: Apache-2.0
"""python -m hisparse_rt --cflags | --libs | --pkgconfigdir | --version"""
import sys

from ._configtool import main

sys.exit(main())
