# SPDX-License-Identifier: Apache-2.0
"""convert: make a model file of a Hugging Face folder or a GGUF file."""
from __future__ import annotations

import argparse
import os

from .. import progress
from ..errors import HisparseError
from . import common

HELP = "convert a Hugging Face folder or a GGUF file to a model file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..tools import convert_cli

    convert_cli.add_arguments(parser)
    parser.add_argument("--no-calibrate", action="store_true",
                        help="do not learn how to sketch the model's keys, which takes a minute or more; `calibrate` can do it later")


def run(args: argparse.Namespace) -> int:
    from ..tools import convert_cli

    code = convert_cli.run(args)
    if code == 0 and not args.no_calibrate:
        _calibrate(os.path.realpath(args.dst))
    return code


def _calibrate(model: str) -> None:
    from ..tools.calibrate import calibrate_file

    try:
        with progress.bar("calibrating", "tok") as report:
            calibrate_file(model, report)
    except HisparseError as error:
        common.say(f"warning: the model is converted but not calibrated: {error}")
