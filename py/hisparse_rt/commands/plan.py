# SPDX-License-Identifier: Apache-2.0
"""plan: what sessions need, before anything is loaded."""
from __future__ import annotations

import argparse
import errno
import json
import os
from dataclasses import asdict

from ..errors import FileMissingError
from ..model import DTYPES
from ..plan import Plan, plan
from ..sizes import format_size
from . import common

HELP = "show what sessions of a size need, and whether they fit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?",
                        help="model file (.hsr), Hugging Face folder or .gguf file; nothing is converted")
    parser.add_argument("--config", metavar="FILE", help="in place of MODEL: a config.json; weights are estimated")
    parser.add_argument("--dtype", choices=list(DTYPES.values()),
                        help="of the weights after conversion, for all but .hsr files (default: q8)")
    parser.add_argument("--sessions", type=common.whole(1, 65536), default=1, metavar="K", help="sessions at a time (default: 1)")
    parser.add_argument("--chunk", type=common.whole(1, 4096), default=512, metavar="N",
                        help="most tokens of one prompt in one step (default: 512)")
    parser.add_argument("--window", type=common.whole(64), metavar="N",
                        help="most recent tokens, kept as written (default: 512, or the profile's)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    common.add_context(parser, "the trained length")
    common.add_engine(parser)
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """0 if everything fits, else 1."""
    if (args.model is None) == (args.config is None):
        args.usage_error("give MODEL or --config FILE")
    if args.calibration and not os.path.isfile(args.calibration):
        raise FileMissingError(f"{args.calibration}: no such file", sys_code=errno.ENOENT)
    found = plan(
        args.model or args.config, context=args.context, sessions=args.sessions, dtype=args.dtype, kv=args.kv,
        beyond_trained=args.beyond_trained, profile=0 if args.profile == "exact" else args.profile, window_size=args.window,
        calibrated=None if args.calibration is None else bool(args.calibration),
        ram=args.ram, hot=args.hot, warm=args.warm, cold=args.cold, cold_size=args.cold_size,
        readable_tiers=args.readable_tiers, chunk=args.chunk,
    )
    common.write(json.dumps(asdict(found)) + "\n" if args.json else _table(found))
    return 0 if found.fits else 1


def _table(p: Plan) -> str:
    one = [("pages as written", p.plain_bytes), (f"sealed pages, {p.kv_format}", p.sealed_bytes), ("index", p.index_bytes),
           ("tables", p.table_bytes)]
    one += [("history of attention", p.history_bytes)] if p.history_bytes else []
    rows = [("weights", p.weight_bytes, ""), ("scratch", p.scratch_bytes, "")]
    rows += [(name, size * p.sessions, f"{format_size(size)} each" if p.sessions > 1 else "") for name, size in one]
    rows += [("memory promised", p.memory_bytes, f"of {format_size(p.memory_budget)}")]
    if p.cold_budget:
        rows += [("cold promised", p.cold_bytes, f"of {format_size(p.cold_budget)}")]
    rows += [("process at most", p.total_bytes, "")]
    text = f"{p.sessions} session{'s' if p.sessions > 1 else ''} of {p.context:,} tokens\n"
    text += "".join(f"  {name:24}{format_size(size):>12}  {note}".rstrip() + "\n" for name, size, note in rows)
    return text + _verdict(p)


def _verdict(p: Plan) -> str:
    if not p.fits:
        return f"does not fit: {p.shortage}\n"
    away = p.sessions - p.n_resident
    if away == 0:
        return "fits, all of it in memory\n"
    return f"fits; pages of {away} session{'s' if away > 1 else ''} may leave memory for cold storage\n"
