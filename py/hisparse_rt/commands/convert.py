# SPDX-License-Identifier: Apache-2.0
"""convert: make a model file of a Hugging Face folder or a GGUF file."""
from __future__ import annotations

import argparse

HELP = "convert a Hugging Face folder or a GGUF file to a model file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..tools import convert_cli

    convert_cli.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from ..tools import convert_cli

    return convert_cli.run(args)
