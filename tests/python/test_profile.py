# SPDX-License-Identifier: Apache-2.0
"""Profiles: presets, JSON files, and what is refused by name."""

from __future__ import annotations

import json

import hisparse_rt as hs
import pytest
from hisparse_rt.profile import PRESETS, SELECTORS, Profile, as_profile, read_profile

pytestmark = pytest.mark.python


def file(tmp_path, content) -> str:
    path = tmp_path / "hi-sparse-config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_presets_are_distinct_and_named():
    assert list(PRESETS) == ["exact", "balanced", "fast", "long-document", "chat", "classic"]
    assert len(set(PRESETS.values())) == len(PRESETS)
    assert PRESETS["exact"].mode == "dense" and all(p.mode == "sparse" for name, p in PRESETS.items() if name != "exact")
    assert PRESETS["fast"].budget < PRESETS["balanced"].budget
    assert as_profile("fast") is PRESETS["fast"]


def test_every_setting_of_a_file_arrives(tmp_path):
    settings = {
        "mode": "sparse", "window_size": 256, "sink_size": 128, "budget": 2048, "sparse_ratio": 0.25, "slice_size": 32,
        "selector": "minmax", "virtual_tokens": False, "forced_history": 3, "candidates": 8192, "dense_layers": [5, 1, 1],
        "dense_below": 100, "prefill_dense_below": 2000, "prefill_budget": 512, "layers": {"0": {"mode": "dense"}, "3": {"budget": 64}},
        "block_size_coarse": 512, "block_size_fine": 32, "top_k_coarse": 7, "top_k_fine": 9, "seed": 4, "late": "estimate",
    }  # fmt: skip
    profile = read_profile(file(tmp_path, settings))
    for name, value in settings.items():
        if name not in ("layers", "dense_layers"):
            assert getattr(profile, name) == value, name
    assert profile.dense_layers == (0, 1, 5) and profile.layer_budgets == ((3, 64),)
    native = profile.native_fields(8)
    assert native["dense_layers"] == [0, 1, 5] and native["layer_budgets"] == [0, 0, 0, 64, 0, 0, 0, 0]
    assert native["selector"] == SELECTORS["minmax"] and native["sparse"] is True and native["virtual_tokens"] is False
    assert native["late"] == 1 and Profile().native_fields(8)["late"] == 0
    assert "window_size" not in native and profile.session_options() == {"window_size": 256, "sink_size": 128}


def test_a_file_starts_from_a_preset(tmp_path):
    profile = read_profile(file(tmp_path, {"preset": "fast", "budget": 768}))
    assert profile.budget == 768 and profile.forced_history == PRESETS["fast"].forced_history
    assert read_profile(file(tmp_path, {"mode": "dense"})) == PRESETS["exact"]
    assert read_profile(file(tmp_path, {})) == PRESETS["balanced"]


def test_local_window_tokens_is_another_name(tmp_path):
    assert as_profile({"preset": "classic", "local_window_tokens": 1024}).window_size == 1024
    with pytest.raises(hs.InvalidError, match="window_size is 512 and local_window_tokens, its other name, is 1024"):
        as_profile({"window_size": 512, "local_window_tokens": 1024})


BAD = [
    ({"budgte": 100}, "there is no setting 'budgte'"),
    ({"mode": "fast"}, "mode is 'fast', known are dense, sparse"),
    ({"preset": "turbo"}, "preset is 'turbo'"),
    ({"selector": "best"}, "selector is 'best', known are auto, sketch"),
    ({"budget": 0}, "budget is 0, allowed are 16 to"),
    ({"budget": 2.5}, "budget must be an integer"),
    ({"budget": True}, "budget must be an integer"),
    ({"budget": None}, "budget must be an integer"),
    ({"sparse_ratio": 1.5}, "sparse_ratio is 1.5, allowed are 0 to 1"),
    ({"sparse_ratio": -0.1}, "sparse_ratio"),
    ({"slice_size": 24}, "slice_size is 24, allowed are 16, 32 and 64: slices divide pages"),
    ({"budget": 48, "slice_size": 64}, "budget is 48, and nothing smaller than slice_size is selected, which is 64"),
    ({"budget": 48, "selector": "classic"}, "budget is 48, and nothing smaller than block_size_fine is selected, which is 64"),
    ({"prefill_budget": 16, "slice_size": 32}, "prefill_budget is 16, and nothing smaller than slice_size"),
    ({"layers": {"1": {"budget": 16}}, "slice_size": 32}, "the budget of layer 1 is 16, and nothing smaller than slice_size"),
    ({"block_size_fine": 128}, "block_size_fine is 128"),
    ({"block_size_coarse": 100}, "block_size_coarse is 100, allowed are multiples of 64"),
    ({"window_size": 500}, "window_size is 500, allowed are multiples of 64"),
    ({"window_size": 0}, "window_size is 0"),
    ({"sink_size": -64}, "sink_size is -64"),
    ({"forced_history": 65}, "forced_history is 65, allowed are 0 to 64"),
    ({"virtual_tokens": 1}, "virtual_tokens must be true or false"),
    ({"late": "skip"}, "late is 'skip', known are wait, estimate"),
    ({"late": 1}, "late is 1, known are wait, estimate"),
    ({"dense_layers": 3}, "dense_layers is 3, not a list"),
    ({"dense_layers": [-1]}, "a number in dense_layers is -1"),
    ({"layers": [1]}, "layers is not an object"),
    ({"layers": {"x": {}}}, "layers names 'x', which is no layer number and no class of layers: gaussian, sketch"),
    ({"layers": {"sketch": {"budget": 3}}}, "the budget of class sketch is 3"),
    ({"layers": {"sketch": {"budget": 16}}, "slice_size": 32}, "the budget of class sketch is 16, and nothing smaller than slice_size"),
    ({"layers": {"sketch": {"selector": "mean"}}}, r"layers\[sketch\] may have the settings mode and budget"),
    ({"layers": {"1": {"selector": "mean"}}}, r"layers\[1\] may have the settings mode and budget"),
    ({"layers": {"1": {"budget": 3}}}, "the budget of layer 1 is 3"),
    ({"top_k_coarse": 0}, "top_k_coarse is 0"),
    ({"seed": -1}, "seed is -1"),
]  # fmt: skip


@pytest.mark.parametrize("settings, text", BAD, ids=lambda value: str(value)[:40])
def test_wrong_settings_are_refused_by_name(tmp_path, settings, text):
    with pytest.raises(hs.InvalidError, match=text):
        read_profile(file(tmp_path, settings))
    with pytest.raises(hs.InvalidError, match=text):
        as_profile(settings)


@pytest.mark.parametrize("content, text", [
    ("{", "is not JSON"), ("[1]", "does not hold a JSON object"), ('{"budget": 64, "budget": 128}', "'budget' is given twice"),
    ('{"sparse_ratio": NaN}', "sparse_ratio is nan"), ("[" * 100000, "is not JSON"), ("\xff", "is not JSON"),
])  # fmt: skip
def test_damaged_files(tmp_path, content, text):
    path = tmp_path / "p.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(hs.InvalidError, match=text) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)


def test_unknown_names_and_missing_files(tmp_path):
    with pytest.raises(hs.InvalidError, match="there is no profile 'turbo': known presets are exact, balanced"):
        as_profile("turbo")
    with pytest.raises(hs.FileMissingError, match="missing.json"):
        as_profile(str(tmp_path / "missing.json"))
    with pytest.raises(TypeError, match="a profile is"):
        as_profile(3.5)


def test_layers_the_model_lacks():
    for profile, name in ((Profile(dense_layers=(4,)), "dense_layers"), (Profile(layer_budgets=((4, 64),)), "layers")):
        with pytest.raises(hs.InvalidError, match=f"{name} names layer 4, and the model has the layers 0 to 3"):
            profile.native_fields(4)
        assert profile.native_fields(5)


def test_classes_of_layers():
    """Stand for their layers; what is said of a layer itself goes before."""
    profile = as_profile({"layers": {"gaussian": {"budget": 256}, "2": {"budget": 512}, "4": {"budget": 128}, "sketch": {"mode": "dense"}},
                          "dense_layers": [0]})
    classes = ("gaussian", "sketch", "gaussian", "gaussian", "sketch")
    assert profile.for_layers(classes) == as_profile({
        "layers": {"0": {"budget": 256}, "2": {"budget": 512}, "3": {"budget": 256}, "4": {"budget": 128}}, "dense_layers": [0, 1]})
    assert Profile().for_layers(None) == Profile() == Profile().for_layers(classes)
    with pytest.raises(hs.InvalidError, match="layers names the class sketch, gaussian, and the model has no classes of layers"):
        profile.for_layers(None)


def test_profiles_are_keys():
    assert {Profile(budget=64): 1}[Profile(budget=64)] == 1
    assert Profile(dense_layers=[2, 1]) == Profile(dense_layers=(1, 2))
