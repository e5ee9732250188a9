# SPDX-License-Identifier: Apache-2.0
"""Perplexity of one or more models on a text: python -m hisparse_rt.tools.perplexity MODEL... --text FILE

The text is cut into windows of --context tokens; in each, every token but the first is predicted. With several models, each is
also given as a ratio to the first, on the same tokens."""

from __future__ import annotations

import argparse
import json
import math
import sys

import numpy as np

import hisparse_rt as hs


def perplexity(model: hs.Model, ids: np.ndarray, context: int) -> tuple[float, int]:
    """exp of the mean negative log-likelihood of `ids`, and how many tokens were predicted."""
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, context):
        window = ids[start : start + context]
        if len(window) < 2:
            break
        logits = model.logits(window)[:-1].astype(np.float64)
        peak = logits.max(axis=1, keepdims=True)
        normaliser = peak[:, 0] + np.log(np.exp(logits - peak).sum(axis=1))
        total += float((normaliser - logits[np.arange(len(window) - 1), window[1:]]).sum())
        count += len(window) - 1
    return math.exp(total / count), count


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hisparse_rt.tools.perplexity", description="Perplexity of models on a text.")
    parser.add_argument("models", nargs="+", metavar="MODEL", help=".hsr files with the same tokenizer; the first is the reference")
    parser.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="use at most this many tokens (default %(default)s)")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="tokens per window (default %(default)s)")
    parser.add_argument("--kv", choices=("auto", "f32", "bf16"), default="auto", help="key-value format (default %(default)s)")
    parser.add_argument("--isa", default="auto", help="highest instruction set to use (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    rows = []
    try:
        with open(options.text, encoding="utf-8") as file:
            text = file.read()
        for path in options.models:
            with hs.load(path, kv=options.kv, isa=options.isa) as model:
                ids = np.asarray(model.encode(text), dtype=np.int32)[: options.tokens]
                value, count = perplexity(model, ids, options.context)
            rows.append({"model": path, "perplexity": value, "ratio": value / rows[0]["perplexity"] if rows else 1.0, "tokens": count})
    except (OSError, UnicodeError, hs.HisparseError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"text": options.text, "context": options.context, "kv": options.kv, "models": rows}))
    else:
        for row in rows:
            print(f"{row['perplexity']:10.4f}  x{row['ratio']:.5f}  {row['tokens']} tokens  {row['model']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
