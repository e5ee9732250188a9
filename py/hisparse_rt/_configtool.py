# SPDX-License-Identifier: Apache-2.0
"""Compiler and linker flags for programs that embed the library of this installed package."""
from __future__ import annotations

import argparse
import shlex
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    from . import __version__

    folder = Path(__file__).resolve().parent
    native = folder / "_native"
    include = shlex.quote(f"-I{folder / 'include'}")
    link = shlex.quote(f"-L{native}"), "-lhisparse_rt", shlex.quote(f"-Wl,-rpath,{native}")
    parser = argparse.ArgumentParser(prog="python -m hisparse_rt", description=__doc__,
                                     epilog="The command line is hisparse-rt.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--cflags", action="append_const", dest="words", const=include, help="print the compiler flags")
    parser.add_argument("--libs", action="append_const", dest="words", const=" ".join(link), help="print the linker flags")
    parser.add_argument("--pkgconfigdir", action="append_const", dest="words", const=str(native / "pkgconfig"),
                        help="print the folder of hisparse_rt.pc")
    args, unknown = parser.parse_known_args(arguments)
    if unknown or not args.words:
        parser.error(f"{f'{unknown[0]} is not known here' if unknown else 'nothing asked for'}: give --cflags, --libs, --pkgconfigdir or "
                     "--version (the command line is hisparse-rt)")
    print(" ".join(args.words))
    return 0
