# SPDX-License-Identifier: Apache-2.0
"""The hand-built model that looks things up: exact answers under dense attention, and under sparse ones that are worth it."""

from __future__ import annotations

import hisparse_rt as hs
import numpy as np
import pytest
import reference
from hisparse_rt.calibration import write_calibration
from hisparse_rt.profile import Profile
from hisparse_rt.tools import induction
from hisparse_rt.tools.calibrate import calibrate
from hisparse_rt.tools.convert import convert

pytestmark = pytest.mark.slow  # of the front and the tools; what it runs in C the other tests run too

LENGTH = 2048


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("induction")
    induction.write(folder / "hf")
    for dtype in ("f32", "bf16", "q8"):
        convert(folder / "hf", folder / f"{dtype}.hsr", dtype=dtype)
    with hs.load(folder / "bf16.hsr", calibration=False, threads=2) as model:
        calibration, _ = calibrate(model, induction.text(4096, 16, 2, seed=99).ids)
    write_calibration(folder / "bf16.hsrcal", calibration)
    return folder


def answers(model: hs.Model, text: induction.Text, profile) -> list[dict]:
    with model.session(context=len(text.ids) + 1, profile=profile) as session:
        session.append(text.ids)
        session.prefill()
        return induction.ask(session, text.needles)


def test_near_duplicates_are_near_and_others_are_not():
    codes = induction.codes()
    keys = codes[induction.FIRST_KEY : induction.FIRST_NOISE].reshape(induction.FAMILIES, induction.MEMBERS, -1)
    for family in keys:
        assert set(np.unique(family @ family.T)) == {24.0, 28.0, 32.0}  # four, two and no bits apart
    flat = keys.reshape(induction.KEYS, -1)
    apart = np.kron(np.eye(induction.FAMILIES), np.ones((induction.MEMBERS, induction.MEMBERS))) == 0
    assert (flat @ flat.T)[apart].max() <= 20
    assert (codes[induction.FIRST_NOISE :] @ flat.T).max() <= 16


def test_no_distance_but_one_is_looked_back_to():
    """In exact arithmetic, over a million tokens, all the weight of layer 1 but e-18 lies on the token before."""
    pairs = induction._ROTARY // 2
    angle = induction._THETA ** (-np.arange(pairs) / pairs)
    score = np.zeros(induction.LONGEST)
    for frequency in angle:
        score += induction._NEAR * np.cos(frequency * (np.arange(induction.LONGEST) - 1))
    rivals = np.exp(score - score[1])
    rivals[1] = 0
    assert rivals.sum() < np.exp(-18)


def test_every_value_in_exact_arithmetic(folder):
    """The float64 reference gives the value of every needle, whatever the value, and nothing else comes near."""
    for seed in range(4):
        text = induction.text(640, 16, 1, seed)
        config, tensors = reference.load(folder / "hf")
        # All questions in one pass would see each other, so each is asked alone; 16 needles of 4 texts.
        for _, asked, value in text.needles[:: 1 if seed == 0 else 4]:
            ids = [*text.ids.tolist(), asked]
            row = reference.forward(config, tensors, ids, *reference.inverse_frequencies(config, len(ids)))[-1]
            assert row.argmax() == value and row[value] > 20 and np.delete(row, value).max() < 2


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8"])
def test_dense_attention_finds_every_value(folder, dtype):
    found = set()
    with hs.load(folder / f"{dtype}.hsr", calibration=False, threads=2) as model:
        for seed in range(8):
            for answer in answers(model, induction.text(LENGTH, 32, 1, seed), "exact"):
                assert answer["found"] and answer["margin"] > 20, answer
                found.add(answer["value"])
    assert found == set(range(induction.VALUES))


def test_the_answer_is_lost_where_the_needle_is_not_read(folder):
    """The text is a test: a budget that reads next to nothing by chance loses what lies outside sink and window."""
    text = induction.text(LENGTH, 16, 2)
    with hs.load(folder / "bf16.hsr", threads=2) as model:
        blind = answers(model, text, Profile(selector="random", budget=16, forced_history=0, virtual_tokens=False))
        exact = answers(model, text, Profile(selector="oracle", budget=64, forced_history=0))
    far = [answer for answer in blind if 64 <= answer["position"] < LENGTH - 512]
    assert sum(answer["found"] for answer in far) <= len(far) // 3
    assert all(answer["found"] for answer in exact)


@pytest.mark.parametrize("selector", ["sketch", "cluster"])
def test_sketches_tell_near_duplicates_apart(folder, selector):
    text = induction.text(3 * LENGTH, 32, 2, seed=3)
    with hs.load(folder / "bf16.hsr", threads=2) as model:
        found = answers(model, text, Profile(selector=selector, budget=512, forced_history=0))
    assert all(answer["found"] for answer in found), [answer for answer in found if not answer["found"]]
    assert all(answer["attended"] < 1200 for answer in found)


def test_texts_hold_what_they_say():
    text = induction.text(4096, 8, 3, seed=1)
    ids = text.ids
    assert len(ids) == 4096 and ids[0] >= induction.FIRST_NOISE
    for position, key, value in text.needles:
        assert (ids[position], ids[position + 1]) == (key, value)
        assert (ids == key).sum() == 1, "a key is asked for, and must have one value"
        family = key - (key - induction.FIRST_KEY) % induction.MEMBERS
        for other in range(family, family + induction.MEMBERS):
            places = np.flatnonzero(ids == other)
            assert len(places) == (1 if other == key else 3)
            assert other == key or (ids[places + 1] != value).all()
    assert text.needles[0][0] == 1 and text.needles[-1][0] == 4094
    with pytest.raises(ValueError, match="do not hold"):
        induction.text(100, 16)
