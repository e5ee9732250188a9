# SPDX-License-Identifier: Apache-2.0
"""Conditions under which all these tests run, and the processes that they start."""

import os
import signal

# NumPy's own threads only get in the way of tiny matrices, and of the engine's threads. Before NumPy is imported, that is.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Shells start what runs in the background with Ctrl-C ignored, and so would be what tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
