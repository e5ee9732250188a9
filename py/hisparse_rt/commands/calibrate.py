# SPDX-License-Identifier: Apache-2.0
"""calibrate: learn a model's bases for sketches and compact keys."""
from __future__ import annotations

import argparse
import json
import os
import time
from typing import TYPE_CHECKING, Any

from .. import progress
from ..calibration import SUFFIX, Calibration, beside, write_calibration
from ..checks import text_content
from ..load import load
from . import common

if TYPE_CHECKING:
    from ..tools.calibrate import LayerFacts

HELP = "learn from a text how a model's keys are sketched and stored"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..tools.calibrate import LEAST_TOKENS, TOKENS

    common.add_model(parser)
    parser.add_argument("--text", metavar="FILE", help="text to learn from (default: docstrings of Python's standard library)")
    parser.add_argument("--tokens", type=common.whole(LEAST_TOKENS), default=TOKENS, metavar="N",
                        help="use at most N tokens, and no more than the model was trained for (default: %(default)s)")
    parser.add_argument("--out", metavar="FILE", help=f"file to write (default: MODEL with the ending {SUFFIX}, where it is found)")
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON")
    common.add_machine(parser)


def run(args: argparse.Namespace) -> int:
    from ..tools.calibrate import calibrate, default_ids

    text = None if args.text is None else text_content(args.text)
    with load(args.model, threads=args.threads, isa=args.isa, ram=args.ram, calibration=False) as model:
        target = args.out or beside(os.fsdecode(model.file))
        common.check_output(target, sources=(os.fsdecode(model.file), *([args.text] if args.text else ())))
        ids = default_ids(model, text, args.tokens)
        began = time.monotonic()
        with progress.bar("calibrating", "tok") as report:
            calibration, facts = calibrate(model, ids, report)
        seconds = time.monotonic() - began
    write_calibration(target, calibration)
    if args.json:
        common.write(json.dumps(_report(target, calibration, facts, len(ids), seconds)) + "\n")
    else:
        common.write(_table(calibration, facts))
        common.say(f"{target}: calibrated on {len(ids)} tokens in {seconds:.0f} s")
    return 0


def _report(target: str, calibration: Calibration, facts: list[LayerFacts], tokens: int, seconds: float) -> dict[str, Any]:
    classes = calibration.classes or ()
    return {
        "file": target, "tokens": tokens, "seconds": seconds,
        "layers": [
            {"layer": layer, "recall_sketch": fact.recall_sketch, "recall_gaussian": fact.recall_gaussian,
             "gap": float(calibration.gap[layer]), "class": classes[layer], "error": fact.error,
             "error_virtual": fact.error_virtual, "virtual": bool(calibration.virtual[layer])}
            for layer, fact in enumerate(facts)
        ],
    }


def _table(calibration: Calibration, facts: list[LayerFacts]) -> str:
    classes = calibration.classes or ()
    head = "layer  recall: sketch  gaussian     gap  class     output error  with virtual tokens\n"
    return head + "".join(
        f"{layer:<7}{fact.recall_sketch:14.4f}{fact.recall_gaussian:10.4f}{calibration.gap[layer]:8.4f}  {classes[layer]:8}"
        f"{fact.error:14.5f}"
        f"{fact.error_virtual:21.5f}{'' if calibration.virtual[layer] else '  off'}\n"
        for layer, fact in enumerate(facts)
    )
