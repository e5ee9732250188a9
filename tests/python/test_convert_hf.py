# SPDX-License-Identifier: Apache-2.0
"""Conversion of Hugging Face folders: what is taken, what is refused and how."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import reference
import tiny
from readback import ReadBack

from hisparse_rt.tools.convert import ConvertError, convert

pytestmark = pytest.mark.python

FIXTURES = Path(__file__).parent.parent / "data" / "fixtures"
IDS = [5, 9, 200, 7, 7, 319, 42, 100, 3, 17, 256, 99]


def refused(src, tmp_path, text, **options):
    """Conversion fails with this text in the message, and leaves nothing behind."""
    out = tmp_path / "refused"
    out.mkdir(exist_ok=True)
    with pytest.raises(ConvertError, match=text) as caught:
        convert(src, out / "m.hsr", **{"dtype": "f32"} | options)
    assert os.listdir(out) == []
    str(caught.value).encode("utf-8")
    return str(caught.value)


def converted(src, tmp_path, dtype="f32", **options):
    out = tmp_path / "out.hsr"
    report = convert(src, out, dtype, **options)
    return ReadBack(out), report


def model(tmp_path, arch="llama", tensors=None, drop=(), **changes):
    cfg = tiny.config(arch, **changes)
    tensors = tiny.weights(cfg) | (tensors or {})
    return tiny.write_hf(tmp_path / "hf", cfg, {name: value for name, value in tensors.items() if name not in drop}), cfg


# ---- the same numbers come out ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama_rope_llama3", "llama_tied_bias_hd24", "qwen2", "qwen3"])
def test_fixtures_give_the_logits_of_transformers(name, tmp_path):
    ids = json.loads((FIXTURES / name / "ids.json").read_text())
    expected = np.fromfile(FIXTURES / name / "logits.f32", "<f4").reshape(len(ids), -1)
    back, report = converted(FIXTURES / name, tmp_path)
    assert np.abs(back.logits(ids) - expected).max() < 1e-4
    assert report.arch == back.get("arch") == name.split("_")[0]
    assert back.get("tokenizer_size") == back.get("vocab_size") == 97
    assert any("tokenizer.json" in text for text in report.warnings)


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8", "q4"])
def test_every_architecture_and_dtype_keeps_the_weights(arch, dtype, tmp_path):
    src, cfg = model(tmp_path, arch, intermediate_size=88, head_dim=24, hidden_size=72)
    back, report = converted(src, tmp_path, dtype)
    want, got = tiny.weights(cfg), back.weights()
    assert got.keys() == want.keys()
    for name, value in want.items():
        allowed = 0 if dtype == "f32" or value.ndim == 1 else {"bf16": 2**-8, "q8": 1 / 250, "q4": 1 / 14}[dtype] * np.abs(value).max()
        assert np.abs(got[name] - value).max() <= allowed, name
    assert back.get("weight_dtype") == report.dtype == dtype
    assert back.dtype("blk.0.attn_qkv.weight") == dtype


def test_embedding_and_head_of_a_four_bit_file_keep_eight_bits(tmp_path):
    back, _ = converted(model(tmp_path)[0], tmp_path, "q4")
    assert {back.dtype("token_embd.weight"), back.dtype("output.weight")} == {"q8"}
    assert back.dtype("blk.1.ffn_down.weight") == "q4"


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_precision_sources(kind, tmp_path):
    cfg = tiny.config()
    src = tiny.write_hf(tmp_path / "hf", cfg, dtype=kind)
    _, tensors = reference.load(src)
    got = converted(src, tmp_path)[0].weights()
    assert all(np.array_equal(got[name], tensors[name]) for name in tensors)


def test_metadata_says_what_the_config_says(tmp_path):
    src, _ = model(tmp_path, rms_norm_eps=1e-5, max_position_embeddings=777)
    back, report = converted(src, tmp_path)
    expected = {
        "format_version": 1, "arch": "llama", "weight_dtype": "f32", "vocab_size": 320, "tokenizer_size": 320, "hidden_size": 64,
        "intermediate_size": 96, "layer_count": 2, "head_count": 4, "kv_head_count": 2, "head_dim": 16, "rotary_dim": 16,
        "context_length": 777, "rms_norm_eps": 1e-5, "attention_scale": 0.25, "rope.kind": "static", "rope.attention_factor": 1.0,
        "bos_token_id": 0,
    }  # fmt: skip
    assert {key: back.get(key) for key in expected} == expected
    assert back.metadata["general.architecture"] == "hisparse" and back.metadata["general.alignment"] == 4096
    assert back.get("eos_token_ids").tolist() == [1]
    assert re.fullmatch("sha256:[0-9a-f]{64}", back.get("source")) and back.get("source") == report.source
    assert report.bytes == (tmp_path / "out.hsr").stat().st_size and report.tensors == len(back.names)


def test_fingerprint_follows_the_source_only(tmp_path):
    src, cfg = model(tmp_path)
    marks = {convert(src, tmp_path / "a.hsr", dtype).source for dtype in ("f32", "q8")}
    assert len(marks) == 1
    tiny.write_hf(src, cfg, tiny.weights(cfg, seed=1))
    assert convert(src, tmp_path / "a.hsr", "f32").source not in marks


def test_same_source_gives_the_same_bytes(tmp_path):
    src, _ = model(tmp_path)
    for name in ("a", "b"):
        convert(src, tmp_path / name, "q4")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_small_chunks_change_nothing(tmp_path, monkeypatch):
    """Tensors are streamed in ranges of rows; ranges of one pair of panels give the same file."""
    src, _ = model(tmp_path, intermediate_size=88, head_dim=24)
    convert(src, tmp_path / "a", "q8")
    monkeypatch.setattr("hisparse_rt.tools.convert._CHUNK", 1)
    convert(src, tmp_path / "b", "q8")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# ---- tied embeddings --------------------------------------------------------------------------------------------


def test_tied_without_a_head(tmp_path):
    """The usual tied checkpoint: the head is left out and taken from the embedding, stored once."""
    src, _ = model(tmp_path, tie_word_embeddings=True)
    back, report = converted(src, tmp_path)
    assert "output.weight" not in back.names and not report.warnings
    assert np.abs(back.logits(IDS) - reference.logits(src, IDS)).max() < 1e-4


def test_tied_with_an_equal_head_is_stored_once(tmp_path):
    cfg = tiny.config(tie_word_embeddings=True)
    head = tiny.weights(cfg)["model.embed_tokens.weight"]
    src, _ = model(tmp_path, tie_word_embeddings=True, tensors={"lm_head.weight": head})
    back, report = converted(src, tmp_path)
    assert "output.weight" not in back.names and not report.warnings


def test_tied_with_another_head_uses_the_files_own_and_warns(tmp_path):
    head = np.random.default_rng(5).standard_normal((320, 64), dtype=np.float32)
    src, _ = model(tmp_path, tie_word_embeddings=True, tensors={"lm_head.weight": head})
    back, report = converted(src, tmp_path)
    assert np.array_equal(back.weights()["lm_head.weight"], head)
    assert any("lm_head.weight" in text and "tie_word_embeddings" in text for text in report.warnings)


def test_untied_without_a_head_is_refused(tmp_path):
    src, _ = model(tmp_path, drop=["lm_head.weight"])
    refused(src, tmp_path, "missing tensors: lm_head.weight")


# ---- shards and tensors that do not fit -------------------------------------------------------------------------


def test_shards_are_one_model(tmp_path):
    cfg = tiny.config()
    src = tiny.write_hf(tmp_path / "hf", cfg, shards=3)
    assert np.array_equal(converted(src, tmp_path)[0].weights()["lm_head.weight"], tiny.weights(cfg)["lm_head.weight"])


@pytest.mark.parametrize("with_index", [True, False])
def test_missing_shard(tmp_path, with_index):
    """A shard lost in a broken download is named, with and without an index, instead of leaving weights out."""
    src = tiny.write_hf(tmp_path / "hf", shards=3)
    (src / "model-00002-of-00003.safetensors").unlink()
    if not with_index:
        (src / "model.safetensors.index.json").unlink()
    refused(src, tmp_path, "missing weight files: model-00002-of-00003.safetensors")


def test_missing_tensors_are_listed(tmp_path):
    names = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    src, _ = model(tmp_path, drop=names)
    text = refused(src, tmp_path, "missing tensors")
    assert all(name in text for name in names)


def test_exported_rotary_tables_are_skipped_quietly(tmp_path):
    src, _ = model(tmp_path, tensors={"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)})
    assert not converted(src, tmp_path)[1].warnings


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.lora_A.weight", "model.layers.2.mlp.up_proj.weight", "score.weight"])
def test_left_over_tensors(tmp_path, name):
    """A stale adapter, a layer too many, a foreign head: refused by name, left out only on request."""
    src, _ = model(tmp_path, tensors={name: np.ones((96, 64), np.float32)})
    refused(src, tmp_path, f"no place.*{name}")
    back, report = converted(src, tmp_path, skip_unknown=True)
    assert back.get("layer_count") == 2 and any(name in text for text in report.warnings)


def test_wrong_shape(tmp_path):
    src, _ = model(tmp_path, tensors={"model.layers.1.self_attn.k_proj.weight": np.ones((48, 64), np.float32)})
    refused(src, tmp_path, r"model.layers.1.self_attn.k_proj.weight has shape \[48, 64\], expected \[32, 64\]")


def test_tensor_in_two_shards(tmp_path):
    src = tiny.write_hf(tmp_path / "hf", shards=2)
    tensors = tiny.weights(tiny.config())
    name = "model.norm.weight"
    for i in (1, 2):
        tiny.write_safetensors(src / f"model-0000{i}-of-00002.safetensors", {name: tensors[name]})
    refused(src, tmp_path, f"{name} is in .*again in")


def test_index_may_not_point_outside(tmp_path):
    src = tiny.write_hf(tmp_path / "hf", shards=2)
    index = {"weight_map": {"model.norm.weight": "../other.safetensors"}}
    (src / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(src, tmp_path, r"\.\./other.safetensors")


@pytest.mark.parametrize(
    "files, text", [(["pytorch_model.bin"], "only PyTorch"), (["a.safetensors", "b.safetensors"], "several"), ([], "no safetensors")]
)
def test_no_usable_weight_files(tmp_path, files, text):
    src, _ = model(tmp_path)
    (src / "model.safetensors").unlink()
    for name in files:
        (src / name).write_bytes(b"x")
    refused(src, tmp_path, text)


# ---- head sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(56, 4, 2, 16), (60, 8, 2, 16), (64, 4, 2, None), (64, 4, 4, tiny.NULL)])
def test_head_dim_is_what_the_config_says(tmp_path, sizes):
    """head_dim need not be hidden / heads, and hidden need not be a multiple of heads; absent and null mean the quotient."""
    width, heads, kv, d = sizes
    src, _ = model(tmp_path, hidden_size=width, num_attention_heads=heads, num_key_value_heads=kv, head_dim=d)
    back, _ = converted(src, tmp_path)
    assert back.get("head_dim") == 16
    assert np.abs(back.logits(IDS) - reference.logits(src, IDS)).max() < 1e-4


@pytest.mark.parametrize("d", [None, tiny.NULL])
def test_head_dim_that_does_not_divide(tmp_path, d):
    cfg = tiny.config(hidden_size=60, num_attention_heads=8)
    tensors = tiny.weights(cfg)
    cfg = tiny.config(hidden_size=60, num_attention_heads=8, head_dim=d)
    refused(tiny.write_hf(tmp_path / "hf", cfg, tensors), tmp_path, "hidden_size 60 is not a multiple of 8 heads")


@pytest.mark.parametrize(
    "change, text",
    [
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"num_key_value_heads": 3}, "4 heads are not a multiple of 3"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"head_dim": True}, "head_dim is True"),
        ({"intermediate_size": 2**40}, "intermediate_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes', not a truth value"),
        ({"head_dim": 1 << 20}, "head_dim 1048576 is above"),
        ({"num_hidden_layers": 1 << 30}, "1073741824 layers, but only 21 tensors"),
    ],
)
def test_impossible_settings(tmp_path, change, text):
    src = tiny.write_hf(tmp_path / "hf", tiny.config(**change), tiny.weights(tiny.config()))
    refused(src, tmp_path, text)


def test_absent_kv_heads_mean_no_grouping(tmp_path):
    src, _ = model(tmp_path, num_key_value_heads=None)
    assert converted(src, tmp_path)[0].get("kv_head_count") == 4


# ---- biases -----------------------------------------------------------------------------------------------------


def test_all_biases_of_llama(tmp_path):
    src, _ = model(tmp_path, attention_bias=True, mlp_bias=True, intermediate_size=88)
    back, report = converted(src, tmp_path)
    assert not report.warnings and {
        "blk.1.attn_qkv.bias",
        "blk.1.attn_output.bias",
        "blk.1.ffn_gate_up.bias",
        "blk.1.ffn_down.bias",
    } <= set(back.names)
    assert np.abs(back.logits(IDS) - reference.logits(src, IDS)).max() < 1e-4


@pytest.mark.parametrize("flag, there", [(True, False), (False, True)])
def test_where_flag_and_tensors_disagree_the_tensors_win(tmp_path, flag, there):
    tensors = tiny.weights(tiny.config(attention_bias=there))
    src = tiny.write_hf(tmp_path / "hf", tiny.config(attention_bias=flag), tensors)
    back, report = converted(src, tmp_path)
    assert ("blk.0.attn_qkv.bias" in back.names) == there
    assert any("biases of attn_qkv" in text for text in report.warnings)
    assert np.abs(back.logits(IDS) - reference.logits(src, IDS)).max() < 1e-4


def test_bias_of_one_layer_only_is_refused(tmp_path):
    cfg = tiny.config(attention_bias=True)
    src, _ = model(
        tmp_path, attention_bias=True, drop=[name for name in tiny.weights(cfg) if ".layers.1." in name and name.endswith("q_proj.bias")]
    )
    refused(src, tmp_path, "missing tensors: model.layers.1.self_attn.q_proj.bias")


def test_qwen2_needs_its_biases_and_mistral_has_none(tmp_path):
    src, _ = model(tmp_path, "qwen2", drop=["model.layers.0.self_attn.v_proj.bias"])
    refused(src, tmp_path, "missing tensors: model.layers.0.self_attn.v_proj.bias")
    src, _ = model(tmp_path, "mistral", tensors={"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)})
    refused(src, tmp_path, "no place.*q_proj.bias")


# ---- architectures and windows ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}, "architecture 'gemma' is not supported \\("),
        ({"model_type": "glm4", "architectures": ["Glm4ForCausalLM"]}, "architecture 'glm4' is not supported yet"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "'LlamaForSequenceClassification' is not supported"),
        ({"architectures": ["MistralForCausalLM"]}, "'llama' and architecture 'MistralForCausalLM' contradict"),
        ({"model_type": None, "architectures": None}, "no model_type"),
        ({"model_type": 7}, "model_type"),
    ],
)
def test_unknown_architectures_are_refused_by_name(tmp_path, changes, text):
    src = tiny.write_hf(tmp_path / "hf", tiny.config(**changes), tiny.weights(tiny.config()))
    refused(src, tmp_path, text)


def test_architecture_from_the_class_alone(tmp_path):
    src = tiny.write_hf(tmp_path / "hf", tiny.config(model_type=None), tiny.weights(tiny.config()))
    assert converted(src, tmp_path)[1].arch == "llama"


def test_fixture_with_an_active_window_is_refused(tmp_path):
    refused(FIXTURES / "mistral_swa5", tmp_path, "sliding_window of 5")


@pytest.mark.parametrize(
    "window, context, active",
    [
        (tiny.NULL, 32768, False),
        (4096, 32768, True),
        (256, 256, False),
        (255, 256, True),
        (None, 32768, True),
        (None, 2048, False),
    ],
)
def test_mistral_window(tmp_path, window, context, active):
    """null is off, an absent key is the 4096 of the library, a window as long as the context does nothing."""
    src, _ = model(tmp_path, "mistral", sliding_window=window, max_position_embeddings=context)
    if active:
        refused(src, tmp_path, "mistral with an active sliding_window")
    else:
        converted(src, tmp_path)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "changes, active",
    [
        ({"use_sliding_window": False, "sliding_window": 16}, False),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, True),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, False),
        ({"use_sliding_window": True, "sliding_window": tiny.NULL}, False),
        ({"use_sliding_window": True, "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}, True),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0, "layer_types": ["full_attention"] * 2}, False),
    ],
)
def test_qwen_window(tmp_path, arch, changes, active):
    src, _ = model(tmp_path, arch, **changes)
    if active:
        refused(src, tmp_path, f"{arch} with an active sliding_window of 16")
    else:
        converted(src, tmp_path)


# ---- vocabulary -------------------------------------------------------------------------------------------------


def with_added(*added):
    """The tiny tokenizer with more added tokens."""
    tokenizer = json.loads(tiny.tokenizer_json())
    for i, content in added:
        tokenizer["added_tokens"].append(dict(tokenizer["added_tokens"][0], id=i, content=content))
    return json.dumps(tokenizer)


def test_token_beyond_the_embedding_is_refused_with_both_numbers(tmp_path):
    """An added padding token that the embedding was never enlarged for."""
    src = tiny.write_hf(tmp_path / "hf", tokenizer=with_added((320, "[PAD]")))
    text = refused(src, tmp_path, "token id 320")
    assert "320 rows" in text


def test_padded_embedding(tmp_path):
    """More rows than tokens: the rest is padding that is never sampled."""
    cfg = tiny.config(vocab_size=352)
    back, report = converted(tiny.write_hf(tmp_path / "hf", cfg), tmp_path)
    assert (back.get("vocab_size"), back.get("tokenizer_size")) == (352, 320) and not report.warnings


def test_added_tokens_that_repeat_base_ids(tmp_path):
    src = tiny.write_hf(tmp_path / "hf", tokenizer=with_added())
    assert [token["id"] for token in json.loads(with_added())["added_tokens"]] == [0, 1, 2]
    assert converted(src, tmp_path)[0].get("tokenizer_size") == 320


def test_rows_win_over_a_stated_vocabulary(tmp_path):
    src = tiny.write_hf(tmp_path / "hf", tiny.config(vocab_size=333), tiny.weights(tiny.config()))
    back, report = converted(src, tmp_path)
    assert back.get("vocab_size") == 320 and any("333" in text and "320" in text for text in report.warnings)


# ---- FP8 --------------------------------------------------------------------------------------------------------


def e4m3(values):
    """The codes nearest to values, by search."""
    codes = np.arange(256, dtype=np.uint8)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    table = np.where(exponent == 0, mantissa / 512, (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7)) * np.where(codes & 128, -1, 1)
    table[(codes & 127) == 127] = np.inf
    picked = np.abs(values.reshape(-1, 1) - table).argmin(axis=1).astype(np.uint8)
    return picked.reshape(values.shape), table[picked].reshape(values.shape)


def fp8_model(tmp_path, scale_kind, drop_scale=False, kind="F8_E4M3"):
    """hidden 72 and inner 200: scale blocks of 128 are ragged. Returns the folder and what the weights stand for."""
    cfg = tiny.config(hidden_size=72, intermediate_size=200, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    tensors, meant = tiny.weights(cfg), {}
    for name in [name for name in tensors if ".mlp." in name]:
        codes, values = e4m3(tensors[name] * 400)
        n, k = codes.shape
        shape = {"block": (-(-n // 128), -(-k // 128)), "tensor": (), "row": (n, 1)}[scale_kind]
        scale = np.random.default_rng(n).uniform(0.001, 0.003, shape).astype(np.float32)
        grid = {"block": lambda: scale[np.ix_(np.arange(n) // 128, np.arange(k) // 128)], "tensor": lambda: scale, "row": lambda: scale}[
            scale_kind
        ]()
        meant[name] = (values * grid).astype(np.float32)
        tensors[name] = (kind, (n, k), codes.tobytes())
        if not drop_scale:
            tensors[name + ("_scale_inv" if scale_kind == "block" else "_scale")] = scale
        tensors[name.replace(".weight", ".input_scale")] = np.ones((), np.float32)
    tensors["lm_head.weight"] = tiny.bf16(tensors["lm_head.weight"])
    return tiny.write_hf(tmp_path / "hf", cfg, tensors), meant


@pytest.mark.parametrize("scale_kind", ["block", "tensor", "row"])
def test_fp8_with_scales(tmp_path, scale_kind):
    """Block scales with ragged edges, one scale per tensor, one per row; scales of activations are ignored."""
    src, meant = fp8_model(tmp_path, scale_kind)
    back, report = converted(src, tmp_path)
    got = back.weights()
    assert meant and all(np.allclose(got[name], value, rtol=1e-6, atol=0) for name, value in meant.items())
    assert not report.warnings


def test_fp8_without_its_scale_is_refused(tmp_path):
    refused(fp8_model(tmp_path, "block", drop_scale=True)[0], tmp_path, "mlp.*is FP8 without a scale")


def test_fp8_scale_of_another_shape_is_refused(tmp_path):
    src, _ = fp8_model(tmp_path, "block")
    config = json.loads((src / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 64]
    (src / "config.json").write_text(json.dumps(config))
    refused(src, tmp_path, r"_scale_inv has shape .* in blocks of \[64, 64\] needs")


@pytest.mark.parametrize("kind", ["F8_E5M2", "I8"])
def test_unsupported_storage_is_refused_by_name(tmp_path, kind):
    refused(fp8_model(tmp_path, "block", kind=kind)[0], tmp_path, f"dtype {kind}, which is not supported")


def test_foreign_quantisation_is_named(tmp_path):
    names = [name for name in tiny.weights(tiny.config()) if name.endswith("q_proj.weight")]
    src, _ = model(tmp_path, drop=names, quantization_config={"quant_method": "gptq"})
    refused(src, tmp_path, "missing tensors.*'gptq'")


# ---- values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, dtype, text",
    [
        (np.nan, "f32", "holds NaN"),
        (np.inf, "bf16", "holds infinity"),
        (3.4e38, "bf16", "does not fit bf16"),
        (3e38, "q8", "does not fit q8"),
        (3e38, "q4", "does not fit q4"),
    ],
)
def test_values_that_cannot_be_stored_are_refused_with_the_tensor(tmp_path, value, dtype, text):
    tensors = tiny.weights(tiny.config())
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 5] = value
    refused(tiny.write_hf(tmp_path / "hf", None, tensors), tmp_path, f"{name} .*{text}", dtype=dtype)


def test_norms_are_checked_too(tmp_path):
    tensors = tiny.weights(tiny.config())
    tensors["model.norm.weight"][7] = np.nan
    refused(tiny.write_hf(tmp_path / "hf", None, tensors), tmp_path, "model.norm.weight holds NaN")


# ---- paths and output -------------------------------------------------------------------------------------------

ODD = ["with space", "[brackets]", "模型", "cafe\u0301", "-dash"]


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("form", [str, os.fsencode, Path])
def test_paths_of_any_spelling(tmp_path, name, form, monkeypatch):
    folder = tmp_path / name
    src = tiny.write_hf(folder / name)
    report = convert(form(src), form(folder / f"{name}.hsr"), "f32")
    assert report.bytes == (folder / f"{name}.hsr").stat().st_size
    monkeypatch.chdir(folder)
    convert(form(name), form(f"{name}.hsr"), "f32")


def test_path_with_a_byte_that_is_no_text(tmp_path):
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    src = tiny.write_hf(os.fsdecode(folder + b"/hf\xfe"))
    assert convert(folder + b"/hf\xfe", folder + b"/m.hsr", "f32").tensors > 0
    (src / "model.safetensors").unlink()
    with pytest.raises(ConvertError) as caught:
        convert(folder + b"/hf\xfe", folder + b"/m2.hsr", "f32")
    assert str(caught.value).encode("utf-8")


def test_destinations_that_cannot_be_written(tmp_path):
    src, _ = model(tmp_path)
    for dst, text in (
        (tmp_path / "no" / "m.hsr", "no folder"),
        (tmp_path, "is a folder"),
        (src / "config.json", "is a file of the source"),
    ):
        with pytest.raises(ConvertError, match=text):
            convert(src, dst, "f32")
    assert json.loads((src / "config.json").read_text())["model_type"] == "llama"


def test_sources_that_are_not_there(tmp_path):
    refused(tmp_path / "nothing", tmp_path, "there is no file or folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", tmp_path, "config.json")
    refused("/dev/null", tmp_path, "neither a folder nor a regular file")
    refused(model(tmp_path)[0], tmp_path, "dtype 'q5'", dtype="q5")


def test_an_interrupt_leaves_the_old_file_and_no_other(tmp_path):
    """The output appears only when it is whole, also when the conversion is stopped half way."""
    src, _ = model(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "m.hsr").write_bytes(b"old")

    def stop(done, total, name):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(src, out / "m.hsr", "f32", progress=stop)
    assert os.listdir(out) == ["m.hsr"] and (out / "m.hsr").read_bytes() == b"old"


STOPPED = """
import os, signal, sys
from hisparse_rt.tools.convert import convert

signals = [int(sys.argv[3])]

def stop(done, total, name):
    if done > total / 2 and signals:
        os.kill(os.getpid(), signals.pop())

convert(sys.argv[1], sys.argv[2], "f32", progress=stop)
"""


def test_what_a_killed_conversion_left_goes_with_the_next_one(tmp_path):
    """And what belongs to one that lives stays, as does everything that only looks like it."""
    src, _ = model(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "m.hsr").write_bytes(b"old")
    theirs = [".hisparse-1.tmp", "hisparse-0123456789abcdef.tmp", ".hisparse-0123456789abcdef.tmp.old"]
    for name in theirs:
        (out / name).write_bytes(b"theirs")
    os.mkdir(out / ".hisparse-0123456789abcdef.tmp")
    os.mkfifo(out / ".hisparse-fedcba9876543210.tmp")
    kept = {*theirs, ".hisparse-0123456789abcdef.tmp", ".hisparse-fedcba9876543210.tmp", "m.hsr"}

    def start(number):
        return subprocess.Popen([sys.executable, "-c", STOPPED, src, out / "m.hsr", str(int(number))])

    dead = start(signal.SIGKILL)
    assert dead.wait() == -signal.SIGKILL
    (left,) = set(os.listdir(out)) - kept
    living = start(signal.SIGSTOP)
    try:
        os.waitpid(living.pid, os.WUNTRACED)
        (held,) = set(os.listdir(out)) - kept
        assert held != left  # it has removed the one of the dead
        convert(src, out / "m.hsr", "f32")
        assert set(os.listdir(out)) == kept | {held}
        converted = (out / "m.hsr").read_bytes()
    finally:
        living.send_signal(signal.SIGCONT)
    assert living.wait() == 0
    assert set(os.listdir(out)) == kept and (out / "m.hsr").read_bytes() == converted


def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path):
    import resource
    import signal

    src, _ = model(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(ConvertError, match="cannot write .*m.hsr"):
            convert(src, out / "m.hsr", "f32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert os.listdir(out) == []


def test_progress_counts_to_the_end(tmp_path):
    src, _ = model(tmp_path)
    steps = []
    convert(src, tmp_path / "m.hsr", "q8", progress=lambda done, total, name: steps.append((done, total, name)))
    assert [done for done, _, _ in steps] == sorted(done for done, _, _ in steps)
    assert steps[-1][0] == steps[-1][1] and steps[0][2] == "token_embd.weight"


def test_file_mode_follows_the_umask(tmp_path):
    src, _ = model(tmp_path)
    old = os.umask(0o027)
    try:
        convert(src, tmp_path / "m.hsr", "f32")
    finally:
        os.umask(old)
    assert (tmp_path / "m.hsr").stat().st_mode & 0o777 == 0o640
