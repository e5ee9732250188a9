# SPDX-License-Identifier: Apache-2.0
"""Logits of the runtime against references that share no code with it: Hugging Face's own numbers, stored with tiny
checkpoints, and a NumPy forward pass in float64."""

from __future__ import annotations

import json
from pathlib import Path

import hisparse_rt as hs
import numpy as np
import pytest
import reference
import tiny
from hisparse_rt.tools.convert import convert
from readback import ReadBack

FIXTURES = Path(__file__).parents[1] / "data" / "fixtures"
NAMES = ["llama", "llama_rope_llama3", "llama_tied_bias_hd24", "qwen2", "qwen3"]
ROPES = {
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 32}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "yarn_mscale": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0,
                                        "mscale_all_dim": 0.7, "rope_theta": 5000.0}},
    "dynamic_within": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "dynamic_beyond": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32},
    "longrope_short": {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(8)],
                                        "long_factor": [2.0 + 0.3 * i for i in range(8)], "factor": 4.0},
                       "original_max_position_embeddings": 128},
    "longrope_long": {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(8)],
                                       "long_factor": [2.0 + 0.3 * i for i in range(8)], "factor": 4.0},
                      "original_max_position_embeddings": 32},
    "partial": {"partial_rotary_factor": 0.5},
}


def available(isa: str) -> bool:
    """Whether this machine has an instruction set: asking for a missing one is an error."""
    order = ["reference", "avx2", "avx512", "amx"]
    with hs.load(_any_model(), threads=1) as model:
        return order.index(isa) <= order.index(model.stats().isa)


_model: list[Path] = []


def _any_model() -> Path:
    return _model[0]


@pytest.fixture(scope="module", autouse=True)
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fixtures")
    for name in NAMES:
        convert(FIXTURES / name, folder / f"{name}.hsr", dtype="f32")
    _model[:] = [folder / "llama.hsr"]
    return folder


def _stored(name: str) -> tuple[list[int], np.ndarray]:
    ids = json.loads((FIXTURES / name / "ids.json").read_text())
    return ids, np.fromfile(FIXTURES / name / "logits.f32", "<f4").reshape(len(ids), -1)


@pytest.mark.parametrize("isa", ["reference", "avx2", "avx512", "amx"])
@pytest.mark.parametrize("name", NAMES)
def test_stored_logits(converted, name, isa):
    """Every checkpoint at every level; one chunk, chunks of 1, 5 and 7 and a batch with others give the same bits."""
    if not available(isa):
        pytest.skip(f"this machine has no {isa}")
    ids, want = _stored(name)
    with hs.load(converted / f"{name}.hsr", isa=isa, threads=2) as model:
        got = model.logits(ids)
        assert np.abs(got - want).max() < 1e-3
        for chunk in (1, 5, 7):
            assert np.array_equal(model.logits(ids, chunk=chunk), got)
        with model.session() as session:
            rows = [session.logits([token]) for token in ids]
            assert np.array_equal(np.concatenate(rows), got)
        others = [model.session() for _ in range(3)]
        streams = []
        for i, other in enumerate(others):
            other.append(ids[i : i + 9])
            streams.append(other.generate(stream=True, max_tokens=30, ignore_eos=True, return_details=False))
        assert np.array_equal(model.logits(ids, chunk=5), got)
        for stream in streams:
            stream.close()
        for other in others:
            other.close()


@pytest.mark.parametrize("isa", ["reference", "avx2", "avx512", "amx"])
@pytest.mark.parametrize("name", NAMES)
def test_bf16_kv_is_near(converted, name, isa):
    """At the level amx these pages are the ones that tiles read; and the same bits in chunks, of one token, too."""
    if not available(isa):
        pytest.skip(f"this machine has no {isa}")
    ids, want = _stored(name)
    with hs.load(converted / f"{name}.hsr", isa=isa, kv="bf16", threads=1) as model:
        got = model.logits(ids)
        assert np.abs(got - want).max() < 0.15
        for chunk in (1, 5):
            assert np.array_equal(model.logits(ids, chunk=chunk), got)


def _compare(tmp_path, cfg: dict, seed: int, n: int = 60, **options) -> None:
    folder = tiny.write_hf(tmp_path / "hf", cfg, tiny.weights(cfg, seed))
    convert(folder, tmp_path / "m.hsr", dtype="f32")
    ids = np.random.default_rng(seed).integers(0, cfg["vocab_size"], n).tolist()
    want = reference.logits(folder, ids, context=n)
    with hs.load(tmp_path / "m.hsr", threads=2) as model:
        got = model.logits(ids, **options)
        assert np.abs(got - want).max() < 1e-3
        assert np.array_equal(model.logits(ids, chunk=7, context=n, **options), got)


@pytest.mark.parametrize("form", sorted(ROPES))
def test_rope_forms(tmp_path, form):
    """Length-dependent kinds take their table from the session's length, and keep it."""
    _compare(tmp_path, tiny.config(**ROPES[form]), 3, beyond_trained=form.endswith("beyond"))


@pytest.mark.parametrize("changes", [
    {"hidden_size": 56, "head_dim": 16},
    {"hidden_size": 60, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
    {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "hidden_size": 36, "intermediate_size": 50},
    {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64},
    {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 333},
    {"num_hidden_layers": 1, "intermediate_size": 33, "tie_word_embeddings": True},
    {"attention_bias": True, "mlp_bias": True, "intermediate_size": 40},
], ids=str)
def test_shapes(tmp_path, changes):
    _compare(tmp_path, tiny.config(**changes), 5)


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("seed", [11, 12])
def test_architectures(tmp_path, arch, seed):
    _compare(tmp_path, tiny.config(arch, num_hidden_layers=4), seed, n=150)


def test_beyond_one_group(tmp_path):
    """1,300 tokens: two attention groups, sealed pages."""
    _compare(tmp_path, tiny.config(max_position_embeddings=2048, rope_theta=100000.0), 21, n=1300)


@pytest.mark.parametrize("dtype, bound", [("bf16", 0.3), ("q8", 0.35), ("q4", 6.0)])
@pytest.mark.parametrize("isa", ["reference", "avx2", "avx512", "amx"])
def test_packed_dtypes(tmp_path, dtype, bound, isa):
    """Packed weights run as the numbers they decode to: the reference runs on exactly those. Where activations are rounded to
    bf16, each sum is off by 2^-9 of its terms on average; rows keep their bits all the same."""
    if not available(isa):
        pytest.skip(f"this machine has no {isa}")
    cfg = tiny.config(intermediate_size=40)
    folder = tiny.write_hf(tmp_path / "hf", cfg, tiny.weights(cfg, 9))
    convert(folder, tmp_path / "m.hsr", dtype=dtype)
    ids = np.random.default_rng(1).integers(0, cfg["vocab_size"], 40).tolist()
    with hs.load(tmp_path / "m.hsr", isa=isa, kv="f32", threads=2) as model:
        got = model.logits(ids)
        for chunk in (1, 5, 7):
            assert np.array_equal(model.logits(ids, chunk=chunk), got)
    with hs.load(tmp_path / "m.hsr", isa=isa, kv="bf16", threads=2) as model:
        rounded = model.logits(ids)
        assert np.array_equal(model.logits(ids, chunk=1), rounded)
    assert 0 < np.abs(got - rounded).max() < 0.2
    assert np.abs(got - ReadBack(tmp_path / "m.hsr").logits(ids)).max() < (0.2 if isa == "amx" else 1e-3)
    assert np.abs(got - reference.logits(folder, ids, context=40)).max() < bound
