# SPDX-License-Identifier: Apache-2.0
"""Every spelling of the rope settings in config.json."""

import json

import numpy as np
import pytest
import reference
import tiny
from readback import ReadBack

from hisparse_rt.tools.convert import ConvertError, convert

pytestmark = pytest.mark.python

IDS = list(range(3, 43))
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
LONG = {
    "short_factor": [1 + 0.1 * j for j in range(8)],
    "long_factor": [2 + 0.7 * j for j in range(8)],
    "original_max_position_embeddings": 30,
}
FORMS = {
    "default": ("default", {}, 64),
    "linear": ("linear", {"factor": 4.0}, 64),
    "dynamic": ("dynamic", {"factor": 2.0}, 64),
    "llama3": ("llama3", LLAMA3, 256),
    "llama3 without original": ("llama3", {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}, 48),
    "yarn": ("yarn", YARN, 16384),
    "yarn betas": ("yarn", YARN | {"beta_fast": 8, "beta_slow": 2, "truncate": False}, 16384),
    "yarn mscale": ("yarn", YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}, 16384),
    "yarn attention_factor": ("yarn", YARN | {"attention_factor": 1.3}, 16384),
    "yarn factor null": ("yarn", YARN | {"factor": None}, 16384),
    "longrope": ("longrope", LONG, 60),
}


def converted(tmp_path, cfg):
    src = tiny.write_hf(tmp_path / "hf", cfg, tokenizer=None)
    report = convert(src, tmp_path / "m.hsr", "f32")
    return src, ReadBack(tmp_path / "m.hsr"), report


def refused(tmp_path, cfg, text):
    with pytest.raises(ConvertError, match=text):
        convert(tiny.write_hf(tmp_path / "hf", cfg, tiny.weights(tiny.config()), tokenizer=None), tmp_path / "m.hsr", "f32")


def spelled(kind, values, spelling):
    """Settings in the new form, in the old one, and in the old one under its oldest key."""
    if spelling == "new":
        return {"rope_theta": None, "rope_parameters": {"rope_type": kind, "rope_theta": 20000.0} | values}
    return {"rope_theta": 20000.0, "rope_scaling": {"rope_type" if spelling == "old" else "type": kind} | values}


@pytest.mark.parametrize("form", FORMS)
def test_all_spellings_mean_the_same(tmp_path, form):
    """Equal meaning gives equal bytes of metadata and table, and the logits of the reference."""
    kind, values, context = FORMS[form]
    tables = set()
    for spelling in ("new", "old", "oldest"):
        cfg = tiny.config(max_position_embeddings=context, **spelled(kind, values, spelling))
        src, back, report = converted(tmp_path, cfg)
        rope = {key: str(value) for key, value in back.metadata.items() if ".rope." in key or "rotary" in key}
        tables.add((back.vector("rope.inv_freq").tobytes(), json.dumps(rope)))
        assert not report.warnings[1:]
    assert len(tables) == 1
    short = min(context, values.get("original_max_position_embeddings", context)) if kind == "longrope" else None
    ids = IDS[:short]
    assert np.abs(back.logits(ids) - reference.logits(src, ids, context=1)).max() < 1e-4


def test_dynamic_keeps_what_its_table_is_made_of(tmp_path):
    _, back, _ = converted(tmp_path, tiny.config(max_position_embeddings=64, rope_scaling={"type": "dynamic", "factor": 3}))
    assert [back.get(f"rope.{key}") for key in ("kind", "base", "factor", "original_context")] == ["dynamic", 10000.0, 3.0, 64]


def test_longrope_has_two_tables(tmp_path):
    cfg = tiny.config(max_position_embeddings=60, rope_scaling={"type": "su"} | LONG)
    _, back, _ = converted(tmp_path, cfg)
    long, factor = reference.inverse_frequencies(cfg | {"rope_scaling": {"rope_type": "longrope"} | LONG}, 60)
    assert np.allclose(back.vector("rope.inv_freq_long"), long, rtol=1e-6)
    assert back.get("rope.kind") == "longrope" and back.get("rope.original_context") == 30
    assert back.get("rope.attention_factor") == pytest.approx(factor, rel=1e-12)


def test_null_settings_are_plain_rope(tmp_path):
    _, back, _ = converted(tmp_path, tiny.config(rope_scaling=tiny.NULL, rope_parameters=tiny.NULL))
    assert np.allclose(back.vector("rope.inv_freq"), 10000.0 ** (-np.arange(0, 16, 2) / 16), rtol=1e-7)


def test_a_factor_without_use_is_told(tmp_path):
    _, back, report = converted(tmp_path, tiny.config(rope_scaling={"rope_type": "default", "factor": 4.0}))
    assert np.allclose(back.vector("rope.inv_freq"), 10000.0 ** (-np.arange(0, 16, 2) / 16), rtol=1e-7)
    assert "no use for the factor 4.0" in report.warnings[0]
    assert converted(tmp_path, tiny.config(rope_scaling={"rope_type": "default", "factor": 1.0}))[2].warnings == report.warnings[1:]


@pytest.mark.parametrize("factor", [4, 4.0, "4", "4.0"])
def test_factor_as_number_or_string(tmp_path, factor):
    _, back, _ = converted(tmp_path, tiny.config(rope_scaling={"type": "linear", "factor": factor}))
    assert back.vector("rope.inv_freq")[0] == 0.25


def test_both_keys_alike(tmp_path):
    _, back, _ = converted(tmp_path, tiny.config(rope_scaling={"type": "linear", "rope_type": "linear", "factor": 2}))
    assert back.vector("rope.inv_freq")[0] == 0.5


def test_inner_theta_wins_and_old_settings_replace_new_ones(tmp_path):
    _, back, report = converted(tmp_path, tiny.config(rope_theta=5.0, rope_parameters={"rope_type": "default", "rope_theta": 100.0}))
    assert np.allclose(back.vector("rope.inv_freq"), 100.0 ** (-np.arange(0, 16, 2) / 16)) and any(
        "rope_theta" in text for text in report.warnings
    )
    both = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    _, back, report = converted(tmp_path, tiny.config(rope_theta=None, **both))
    assert np.allclose(back.vector("rope.inv_freq"), 10000.0 ** (-np.arange(0, 16, 2) / 16) / 2) and any(
        "both" in text for text in report.warnings
    )


def test_top_level_original_context_wins(tmp_path):
    _, back, _ = converted(tmp_path, tiny.config(original_max_position_embeddings=16, rope_scaling={"rope_type": "llama3"} | LLAMA3))
    expected, _ = reference.inverse_frequencies(
        tiny.config(rope_scaling={"rope_type": "llama3"} | LLAMA3 | {"original_max_position_embeddings": 16}), 1
    )
    assert np.allclose(back.vector("rope.inv_freq"), expected, rtol=1e-6)


@pytest.mark.parametrize("place", ["outer", "inner"])
def test_partial_rotation(tmp_path, place):
    partial = {"partial_rotary_factor": 0.5}
    cfg = tiny.config(**(partial if place == "outer" else {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | partial}))
    src, back, _ = converted(tmp_path, cfg)
    assert back.get("rotary_dim") == 8 and len(back.vector("rope.inv_freq")) == 4
    assert np.abs(back.logits(IDS) - reference.logits(src, IDS)).max() < 1e-4


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}}, "'yarn' and type 'linear' contradict"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope type 'mrope' is not supported"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope type 'proportional'"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_type 3"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": {"factor": 4.0}}, "a factor, 4.0, and no rope_type"),
        ({"rope_parameters": {"type": None, "rope_type": None, "factor": 2}}, "a factor, 2, and no rope_type"),
        ({"rope_scaling": {"type": "linear", "factor": "four"}}, "'factor' is 'four'"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "'factor' is -1"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "'factor' is True"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "'factor'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "below 1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor' is missing"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}}, "'short_factor' is not a list of 8"),
        ({"rope_scaling": [1]}, "rope_scaling is neither"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per kind of layer"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 1e-300}}, "not finite"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 1}}, "not a count of at least 2"),
        ({"partial_rotary_factor": 0.2}, "rotates 3 components"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(tmp_path, changes, text):
    """Never a silent fall back to plain rope."""
    refused(tmp_path, tiny.config(**changes), text)
