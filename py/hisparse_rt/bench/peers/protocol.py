# SPDX-License-Identifier: Apache-2.0
"""How a measuring process talks: a JSON job on standard input, a JSON answer on standard output.

With the argument "probe" there is no job, and the answer says what is installed. Runs under any Python 3.8.
"""
from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(probe: Callable[[], dict[str, Any]], measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer once.

    probe()       facts such as {"version": ..., "kv": ...}; ImportError if the program is not installed
    measure(job)  {"prefill": tokens per second, "decode": tokens per second, "kv": ...}
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not spoil the answer
    if sys.argv[1:] == ["probe"]:
        try:
            answer = probe()
        except ImportError as error:
            answer = {"missing": str(error)}
    else:
        answer = measure(json.load(sys.stdin))
    json.dump(answer, answers)
    answers.close()
