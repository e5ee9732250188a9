# SPDX-License-Identifier: Apache-2.0
"""Squeezed runs beside resident ones: python -m hisparse_rt.tools.squeeze MODEL [--context N]

For each key-value format, dense and sparse: a context is computed in part and filled (`Session.fill`) up to N tokens, then tokens are
generated and the next logits computed, once with everything in memory and once with hot memory for 5 % of the pages, beside their
index, which stays there, and warm memory for 10 %, whose pages must move to be read. All tokens and logits must be the same to the bit, and
the counters must show that pages were sealed, evicted, read on demand and late."""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import hisparse_rt as hs
from hisparse_rt.profile import Profile

FORMATS = ("f32", "bf16", "int8", "compact", "vtq")
PROFILES = {"dense": Profile(mode="dense"), "sparse": Profile(budget=512, prefill_budget=512, prefill_dense_below=1024)}
HOT, WARM = 0.05, 0.1
_MIB = 1 << 20
_PROMPT = 1024
_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Squeeze:
    """What one comparison found."""

    page_blocks: int
    """All pages that were sealed, in MiB."""
    hot_blocks: int
    warm_blocks: int
    same: bool
    """Tokens and logits, to the bit."""
    sealed: int
    evictions: int
    moved: int
    """From warm memory."""
    misses: int
    late: int

    @property
    def shown(self) -> bool:
        """The same bits, of a run that was squeezed."""
        return self.same and min(self.sealed, self.evictions, self.misses, self.late) > 0


def squeeze(path: Path, cold: Path, kv: str, profile: Profile, context: int, *, tokens: int = 16, threads: int = 2) -> Squeeze:
    """Compare a squeezed run with a resident one. NoSpaceError: 5 % of so few pages is less than one step works on."""
    options: dict[str, Any] = {"kv": kv, "profile": profile, "window_size": 64, "sink_size": 64, "rollback_tokens": 64,
                               "beyond_trained": True}
    plan = hs.plan(path, context=context, chunk=_CHUNK, cold=cold, **options)
    pages, index = plan.sealed_bytes, plan.index_bytes
    hot, warm = -(-int(HOT * pages + index) // _MIB), max(1, int(WARM * pages) // _MIB)
    with hs.load(path, threads=threads, chunk=_CHUNK) as model:
        want, *_ = _run(model, options, context, tokens)
    with hs.load(path, threads=threads, chunk=_CHUNK, hot=f"{hot}MiB", warm=f"{warm}MiB", readable_tiers="hot", cold=cold,
                 cold_size=f"{2 * pages // _MIB + 64}MiB") as model:
        got, sealed, stats = _run(model, options, context, tokens)
    same = got[0] == want[0] and np.array_equal(got[1], want[1])
    return Squeeze(pages // _MIB, hot, warm, same, sealed, stats.cold_evictions, stats.warm_moved_out, stats.cold_misses, stats.cold_late)


def _run(model: hs.Model, options: dict[str, Any], context: int, tokens: int) -> tuple[tuple[list[int], np.ndarray], int, hs.EngineStats]:
    prompt = np.random.default_rng(1).integers(3, model.info.vocab_size, min(_PROMPT, context // 2), dtype=np.int32)
    with model.session(context=context, **options) as session:
        session.append(prompt)
        session.prefill()
        session.fill(context - len(prompt) - tokens - 2, seed=1)
        session.append(prompt[:1])
        out = list(session.generate(max_tokens=tokens, ignore_eos=True, return_details=True).tokens)
        return (out, session.logits(prompt[1:2])), session.stats().pages_sealed, model.stats()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hisparse_rt.tools.squeeze", description="Squeezed runs beside resident ones.")
    parser.add_argument("model", type=Path, metavar="MODEL", help="a .hsr file; compact needs its calibration")
    parser.add_argument("--context", type=int, default=65536, metavar="N", help="tokens (default %(default)s)")
    parser.add_argument("--kv", default=",".join(FORMATS), metavar="LIST", help="formats (default %(default)s)")
    parser.add_argument("--cold", metavar="DIR", help="where the cold file lies (default: the directory for temporary files)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="default %(default)s")
    given = parser.parse_args(argv)
    shown = True
    print("kv       mode    pages MiB  hot  warm      sealed   evicted  from warm    misses      late  result")
    with tempfile.TemporaryDirectory(prefix="hisparse-rt-", dir=given.cold) as folder:
        for kv in given.kv.split(","):
            for mode, profile in PROFILES.items():
                try:
                    s = squeeze(given.model, Path(folder), kv, profile, given.context, threads=given.threads)
                except hs.HisparseError as error:
                    print(f"{kv:8} {mode:7} {error}", flush=True)
                    shown = False
                    continue
                shown &= s.shown
                result = "same bits" if s.shown else "DIFFERS" if not s.same else "not squeezed"
                print(f"{kv:8} {mode:7} {s.page_blocks:9} {s.hot_blocks:4} {s.warm_blocks:5} {s.sealed:11} {s.evictions:9} {s.moved:10} "
                      f"{s.misses:9} {s.late:9}  {result}", flush=True)
    return 0 if shown else 1


if __name__ == "__main__":
    sys.exit(main())
