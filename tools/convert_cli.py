# SPDX-License-Identifier: Apache-2.0
"""The `convert` command."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from contextlib import contextmanager

from .errors import shown
from .packing import DTYPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Convert a Hugging Face model folder or a GGUF file into a model file of this runtime."
    parser.add_argument("src", metavar="SRC", help="folder with config.json and safetensors files, or a GGUF file")
    parser.add_argument("dst", metavar="DST", help="model file to write (.hsr)")
    parser.add_argument("--dtype", choices=DTYPES, default="q8", help="how to store the weights (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--skip-unknown", action="store_true", help="leave out tensors that have no place in the model")
    parser.add_argument("--allow-unknown-pretokenizer", action="store_true", help="take a GGUF file whose way to split text is not known")
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=None, help="progress bar (default: if stderr is a terminal)"
    )


def run(args: argparse.Namespace) -> int:
    """Convert and report; a ConvertError is the caller's to show."""
    from .convert import convert  # late: other commands share this program and need none of what it imports

    with _bar(args.progress) as progress:
        report = convert(
            args.src,
            args.dst,
            args.dtype,
            progress=progress,
            skip_unknown=args.skip_unknown,
            allow_unknown_pretokenizer=args.allow_unknown_pretokenizer,
        )
    for text in report.warnings if sys.stderr is not None else ():  # print(file=None) would write to stdout
        print(f"warning: {text}", file=sys.stderr)
    if args.json:
        print(json.dumps(dataclasses.asdict(report)))
    else:
        size = f"{report.tensors} tensors, {report.bytes / 1e6:.1f} MB"
        print(f"{shown(args.dst)}: {report.arch} {report.dtype}, {size}, {report.seconds:.1f} s")
    return 0


@contextmanager
def _bar(wanted: bool | None):
    """A progress callback that drives a bar on stderr, or None."""
    if sys.stderr is None or not (sys.stderr.isatty() if wanted is None else wanted):
        yield None
        return
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, unit_divisor=1000, desc="convert", leave=False) as bar:

        def progress(done: int, total: int, name: str) -> None:
            bar.total = total
            bar.set_postfix_str(name, refresh=False)
            bar.update(done - bar.n)

        yield progress
