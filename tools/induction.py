# SPDX-License-Identifier: Apache-2.0
"""A hand-built model that looks things up: python -m hisparse_rt.tools.induction write FOLDER | run MODEL

Its weights are set, not trained. A text is noise with needles in it, each a key token followed by a value token; when a key comes
again at the end, the most likely next token is its value, however far away it was. Among the noise lie needles of other keys whose
codes differ from the one asked for in two of 32 bits.

Layer 1 looks one token back: head 0 rotates fast, and turns towards the distance of one. It copies the code of the token there.
Layer 2 looks for the same code: head 0 compares the code of its own token with what layer 1 copied, in components that do not
rotate, and copies the identity of the token it finds, which the output reads. All other weights are zero.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CODE = 32  # bits of a token's code
VALUES = 64  # tokens 0 to 63
FAMILIES, MEMBERS = 32, 8  # keys: families of near duplicates
KEYS = FAMILIES * MEMBERS
NOISE = 192
VOCAB = VALUES + KEYS + NOISE
FIRST_KEY, FIRST_NOISE = VALUES, VALUES + KEYS
LONGEST = 1 << 20
_HEADS, _KV_HEADS, _HEAD_DIM, _ROTARY = 4, 2, 64, 32
_THETA = 2.0  # over a million tokens, no other distance comes within a quarter of the score of one
_NEAR, _SAME = 8.0, 2.0  # scores: per rotating pair in layer 1, per bit in layer 2
_IDENTITY, _CONSTANT = 0.5, 4.0
_LOGIT = 24.0
_LIKENESS = 16  # most equal bits less unequal ones, of codes that are not of one family
# Places in the hidden state: own code, copied code, identity, output, constant.
_OWN, _COPIED, _ID, _OUT, _ONE = slice(0, 32), slice(32, 64), slice(64, 128), slice(128, 192), 192
_HIDDEN = 224


def key(family: int, member: int) -> int:
    """The token of a key."""
    return FIRST_KEY + family * MEMBERS + member


# ---- the model --------------------------------------------------------------------------------------------------


def codes(seed: int = 0) -> np.ndarray:
    """Codes of all tokens, +1 and -1: [VOCAB, CODE]. Members of a family differ from its first in two bits, among each other in four."""
    draw = np.random.default_rng(seed)
    table = np.empty((VOCAB, CODE))
    for family in range(FAMILIES):
        members = table[key(family, 0) : key(family, 0) + MEMBERS]
        members[:] = _unlike(table[FIRST_KEY : key(family, 0)], draw)
        for member in range(1, MEMBERS):
            members[member, 2 * member : 2 * member + 2] *= -1
    for token in (*range(VALUES), *range(FIRST_NOISE, VOCAB)):
        table[token] = _unlike(table[FIRST_KEY:FIRST_NOISE], draw)
    return table


def _unlike(others: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """A random code that differs from all of `others` in eight bits or more."""
    while True:
        code = draw.choice((-1.0, 1.0), CODE)
        if (others @ code <= _LIKENESS).all():
            return code


def _identities() -> np.ndarray:
    """Of values: rows of a Hadamard matrix, at right angles. The other tokens have some of the same length, which nothing reads."""
    rows = np.ones((1, 1))
    while len(rows) < VALUES:
        rows = np.block([[rows, rows], [rows, -rows]])
    return rows[np.arange(VOCAB) % VALUES]


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 tensors by their Hugging Face names."""
    embedding = np.zeros((VOCAB, _HIDDEN))
    embedding[:, _OWN], embedding[:, _ID], embedding[:, _ONE] = codes(seed), _IDENTITY * _identities(), _CONSTANT
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": np.ones(_HIDDEN)}
    length = np.square(embedding[0]).sum()  # of every token's hidden state, squared: the norm divides all alike
    for layer, linears in enumerate((_look_back(np.sqrt(length / _HIDDEN)), _look_up(np.sqrt((length + CODE) / _HIDDEN)))):
        prefix = f"model.layers.{layer}."
        q, k, v, o = linears
        tensors |= {f"{prefix}self_attn.{name}_proj.weight": value for name, value in (("q", q), ("k", k), ("v", v), ("o", o))}
        tensors |= {f"{prefix}mlp.{name}_proj.weight": np.zeros((32, _HIDDEN)) for name in ("gate", "up")}
        tensors[f"{prefix}mlp.down_proj.weight"] = np.zeros((_HIDDEN, 32))
        tensors |= {f"{prefix}{name}.weight": np.ones(_HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")}
    final = np.sqrt((length + CODE + VALUES * _IDENTITY**2) / _HIDDEN)
    head = np.zeros((VOCAB, _HIDDEN))
    head[:VALUES, _OUT] = _identities()[:VALUES] * final * _LOGIT / (_IDENTITY * VALUES)
    tensors["lm_head.weight"] = head
    return {name: value.astype(np.float32) for name, value in tensors.items()}


def _empty() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    q, kv = (np.zeros((heads * _HEAD_DIM, _HIDDEN)) for heads in (_HEADS, _KV_HEADS))
    return q, kv, kv.copy(), np.zeros((_HIDDEN, _HEADS * _HEAD_DIM))


def _look_back(rms: float) -> tuple[np.ndarray, ...]:
    """Head 0 of layer 1: the query is the key, turned by one position."""
    q, k, v, o = _empty()
    pairs = _ROTARY // 2
    angle = _THETA ** (-np.arange(pairs) / pairs)
    size = np.sqrt(_NEAR * np.sqrt(_HEAD_DIM)) * rms / _CONSTANT
    k[:pairs, _ONE] = size
    q[:pairs, _ONE], q[pairs:_ROTARY, _ONE] = size * np.cos(angle), -size * np.sin(angle)
    bits = np.arange(CODE)
    v[bits, _OWN.start + bits] = rms
    o[_COPIED.start + bits, bits] = 1
    return q, k, v, o


def _look_up(rms: float) -> tuple[np.ndarray, ...]:
    """Head 0 of layer 2, in the components that do not rotate."""
    q, k, v, o = _empty()
    bits, size = np.arange(CODE), np.sqrt(_SAME * np.sqrt(_HEAD_DIM)) * rms
    q[_ROTARY + bits, _OWN.start + bits] = size
    k[_ROTARY + bits, _COPIED.start + bits] = size
    places = np.arange(VALUES)
    v[places, _ID.start + places] = rms
    o[_OUT.start + places, places] = 1
    return q, k, v, o


def config() -> dict:
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": _HIDDEN, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": _HEADS, "num_key_value_heads": _KV_HEADS, "head_dim": _HEAD_DIM,
        "hidden_act": "silu", "max_position_embeddings": LONGEST, "rms_norm_eps": 1e-6, "rope_theta": _THETA,
        "partial_rotary_factor": _ROTARY / _HEAD_DIM, "tie_word_embeddings": False,
    }  # fmt: skip


def write(folder: str | os.PathLike, seed: int = 0) -> Path:
    """Write the model as a Hugging Face folder."""
    from safetensors.numpy import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(), indent=1))
    save_file(weights(seed), folder / "model.safetensors")
    return folder


# ---- texts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """Noise with needles. Asking: append the key; the next token is the value. The first token is noise, with nothing before it to copy."""

    ids: np.ndarray
    needles: tuple[tuple[int, int, int], ...]
    """Position of the key, key, value."""


def text(length: int, n_needles: int = 16, distractors: int = 4, seed: int = 0) -> Text:
    """Needles of as many families, at even distances from the beginning to the end, and of every other member of their
    families `distractors` ones anywhere, with other values. length: at least four times all of them and two."""
    draw = np.random.default_rng(seed)
    total = n_needles * (1 + distractors * (MEMBERS - 1))
    if not 1 <= n_needles <= FAMILIES or length < 4 * total + 2:
        raise ValueError(f"{length} tokens do not hold {n_needles} needles of {FAMILIES} families with {distractors} distractors each")
    ids = draw.integers(FIRST_NOISE, VOCAB, length, dtype=np.int32)
    places = np.linspace(1, length - 2, n_needles).astype(int)
    taken = np.zeros(length, bool)
    needles = []
    for place, family in zip(places, draw.permutation(FAMILIES)[:n_needles]):
        needles.append((int(place), key(family, int(draw.integers(MEMBERS))), int(draw.integers(VALUES))))
        taken[place : place + 2] = True
    for place, asked, value in needles:
        ids[place : place + 2] = asked, value
        for member in range(MEMBERS):
            other = asked - (asked - FIRST_KEY) % MEMBERS + member
            for _ in range(distractors if other != asked else 0):
                _put(ids, taken, other, (value + int(draw.integers(1, VALUES))) % VALUES, draw)
    return Text(ids, tuple(needles))


def _put(ids: np.ndarray, taken: np.ndarray, token: int, value: int, draw: np.random.Generator) -> None:
    while True:
        place = int(draw.integers(1, len(ids) - 1))
        if not taken[place : place + 2].any():
            break
    taken[place : place + 2] = True
    ids[place : place + 2] = token, value


# ---- asking -----------------------------------------------------------------------------------------------------


def ask(session, needles: tuple[tuple[int, int, int], ...]) -> list[dict]:
    """Ask for every needle, each in a fork of a session that holds the text."""
    answers = []
    for position, asked, value in needles:
        with session.fork() as fork:
            row = fork.logits([asked])[0].astype(np.float64)
            stats = fork.stats()
        rivals = np.delete(row, value).max()
        answers.append({
            "position": position, "value": value, "found": bool(row[value] > rivals), "margin": float(row[value] - rivals),
            "covered": stats.covered if stats.sparse_rows else None, "attended": stats.attended_tokens if stats.sparse_rows else None,
        })  # fmt: skip
    return answers


def _run(options: argparse.Namespace) -> int:
    import hisparse_rt as hs
    from hisparse_rt import progress

    made = text(options.length, options.needles, options.distractors, options.seed)
    with hs.load(options.model, kv=options.kv, threads=options.threads, ram=options.ram, profile=options.profile) as model:
        with model.session(context=options.length + 1) as session:
            began = time.perf_counter()
            session.append(made.ids)
            with progress.bar("computing", "tok") as report:
                session.prefill(report)
            seconds = time.perf_counter() - began
            answers = ask(session, made.needles)
    found = sum(answer["found"] for answer in answers)
    if options.json:
        print(json.dumps({"length": options.length, "prefill_seconds": seconds, "found": found, "answers": answers}))
    else:
        for answer in answers:
            print(f"{answer['position']:>9} {'found' if answer['found'] else 'LOST '} margin {answer['margin']:8.3f}")
        print(f"{found} of {len(answers)} found in {options.length} tokens, prefill {seconds:.1f} s")
    return 0 if found == len(answers) else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hisparse_rt.tools.induction", description="A hand-built model that looks things up.")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("write", help="write the model as a Hugging Face folder")
    command.add_argument("folder")
    command.set_defaults(run=lambda options: print(write(options.folder)) or 0)
    command = commands.add_parser("run", help="hide needles in noise and ask for them")
    command.add_argument("model", help="the converted model")
    command.add_argument("--length", type=int, default=8192, metavar="N", help="tokens of the text (default %(default)s)")
    command.add_argument("--needles", type=int, default=16, metavar="N", help="at most %d (default %%(default)s)" % FAMILIES)
    command.add_argument("--distractors", type=int, default=4, metavar="N", help="of each near duplicate (default %(default)s)")
    command.add_argument("--profile", default="exact", help="how to attend (default %(default)s)")
    command.add_argument("--kv", default="auto", help="key-value format (default %(default)s)")
    command.add_argument("--ram", default=None, help="budget of the key-value memory")
    command.add_argument("--threads", type=int, default=0)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=_run)
    options = parser.parse_args(argv)
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
