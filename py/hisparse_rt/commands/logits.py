# SPDX-License-Identifier: Apache-2.0
"""logits: the model's raw output for given token ids."""
from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import progress
from ..checks import content
from ..errors import ContextError, InvalidError, TokenError
from ..ids import as_ids
from . import common

HELP = "write the logits of given token ids to a file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    parser.add_argument("--ids", required=True, metavar="FILE", help="JSON file with a list of token ids")
    parser.add_argument("--out", required=True, metavar="FILE",
                        help="little-endian float32 file to write: a row of vocabulary size per id; - is standard output")
    parser.add_argument("--chunk", type=common.whole(1, 4096), default=512, metavar="N",
                        help="tokens per step; changes the result with sparse profiles only (default: %(default)s)")
    common.add_context(parser, "the number of ids")
    common.add_engine(parser)


def run(args: argparse.Namespace) -> int:
    ids = _read_ids(args.ids)
    sources = (args.ids, args.model)
    common.check_output(args.out, sources=sources, stdout=True)
    with common.open_model(args) as model:
        if not args.beyond_trained and ids.size > model.info.context_length:
            raise ContextError(f"{args.ids}: {ids.size} ids, and the model was trained for {model.info.context_length} tokens; "
                               "--beyond-trained allows more")
        session = model.session(context=args.context or int(ids.size), beyond_trained=args.beyond_trained)
        session.check_room(ids.size)
        with common.output_file(args.out, sources=sources, stdout=True) as file, progress.bar("computing", "tok") as report:
            for start in range(0, ids.size, args.chunk):
                file.write(session.logits(ids[start:start + args.chunk]).astype("<f4", copy=False).tobytes())
                if report is not None:
                    report(min(start + args.chunk, ids.size), ids.size)
        common.say(f"{args.out}: {ids.size} rows of {model.info.vocab_size} float32")
    return 0


def _read_ids(name: str) -> npt.NDArray[np.int32]:
    held = content(name)
    try:
        data: Any = json.loads(held)
    except (ValueError, RecursionError) as error:
        raise InvalidError(f"{name} is not JSON: {error}") from None
    if not isinstance(data, list):
        raise InvalidError(f"{name} does not hold a list of token ids")
    try:
        ids = as_ids(data)
    except (TypeError, TokenError) as error:
        raise InvalidError(f"{name}: {error}") from None
    if not ids.size:
        raise InvalidError(f"{name} has no token ids")
    return ids
