# SPDX-License-Identifier: Apache-2.0
"""convert: make a model file of a Hugging Face folder or a GGUF file."""
from __future__ import annotations

import argparse
import os

from .. import progress
from ..calibration import beside, read_calibration
from ..errors import FormatError, HisparseError, VersionError
from . import common

HELP = "convert a Hugging Face folder or a GGUF file to a model file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..tools import convert_cli

    convert_cli.add_arguments(parser)
    parser.add_argument("--no-calibrate", action="store_true",
                        help="do not learn how to sketch the model's keys, which takes a minute or more; `calibrate` can do it later")


def run(args: argparse.Namespace) -> int:
    from ..tools import convert_cli

    common.check_no_stdout(args.dst)
    code = convert_cli.run(args)
    if code == 0:
        model = os.path.realpath(args.dst)
        _drop_stale(model)
        if not args.no_calibrate:
            _calibrate(model)
    return code


def _drop_stale(model: str) -> None:
    """A calibration that belonged to the file that was replaced would keep the new one from loading."""
    from ..tools.hsr_file import HsrFile

    file = beside(model)
    if not os.path.isfile(file):
        return
    with HsrFile(model) as converted:
        source = converted.metadata.get("hisparse.source")
    try:
        read_calibration(file, source)
    except (FormatError, VersionError):
        os.unlink(file)
        common.say(f"{file} was made for other weights, and is removed")


def _calibrate(model: str) -> None:
    from ..tools.calibrate import calibrate_file

    try:
        with progress.bar("calibrating", "tok") as report:
            calibrate_file(model, report)
    except HisparseError as error:
        common.say(f"warning: the model is converted but not calibrated: {error}")
