# SPDX-License-Identifier: Apache-2.0
"""Conversion of GGUF files."""

import struct
import time
import tracemalloc

import gguf
import numpy as np
import pytest
import reference
import tiny
from gguf import GGMLQuantizationType as Type
from readback import ReadBack

from hisparse_rt.tools.convert import ConvertError, convert
from hisparse_rt.tools.hsr_file import HsrFile

pytestmark = pytest.mark.python

IDS = [5, 9, 200, 7, 7, 319, 42, 100, 3, 17, 256, 99]


def converted(src, tmp_path, dtype="f32", **options):
    report = convert(src, tmp_path / "out.hsr", dtype, **options)
    return ReadBack(tmp_path / "out.hsr"), report


def refused(src, tmp_path, text, **options):
    with pytest.raises(ConvertError, match=text) as caught:
        convert(src, tmp_path / "refused.hsr", "f32", **options)
    assert not (tmp_path / "refused.hsr").exists()
    str(caught.value).encode("utf-8")


def same_packages(tmp_path, cfg, **keys):
    """The same model as a folder and as a GGUF file gives the same tensors and the same numbers in the metadata."""
    tensors = tiny.weights(cfg)
    src = tiny.write_hf(tmp_path / "hf", cfg, tensors)
    tiny.write_gguf(tmp_path / "m.gguf", cfg, tensors, keys=keys)
    convert(src, tmp_path / "a.hsr", "f32")
    convert(tmp_path / "m.gguf", tmp_path / "b.hsr", "f32")
    a, b = ReadBack(tmp_path / "a.hsr"), ReadBack(tmp_path / "b.hsr")
    assert a.names == b.names
    assert all(np.array_equal(value, b.weights()[name]) for name, value in a.weights().items())
    assert np.array_equal(a.vector("rope.inv_freq"), b.vector("rope.inv_freq"))
    free = ("general.name", "hisparse.source", "tokenizer.huggingface.json", "hisparse.special_tokens", "hisparse.arch")
    for key in a.metadata.keys() | b.metadata.keys():
        assert key in free or np.array_equal(a.metadata[key], b.metadata[key]), key
    assert np.abs(b.logits(IDS) - reference.logits(src, IDS)).max() < 1e-4
    return a, b


# ---- the same model in two formats ------------------------------------------------------------------------------


def test_row_order_of_q_and_k_is_undone_with_their_own_head_counts(tmp_path):
    """8 query heads and 2 key heads, with biases: k has to be undone by its own count."""
    same_packages(tmp_path, tiny.config(num_attention_heads=8, num_key_value_heads=2, attention_bias=True))


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_folder_and_gguf_give_the_same_package(tmp_path, arch):
    a, b = same_packages(tmp_path, tiny.config(arch, head_dim=24, intermediate_size=88, rms_norm_eps=1e-6, rope_theta=1e6))
    assert (a.get("arch"), b.get("arch")) == (arch, "llama" if arch == "mistral" else arch)


def test_small_chunks_change_nothing(tmp_path, monkeypatch):
    """Heads of 24 rows, permuted, in ranges of 32 rows."""
    tiny.write_gguf(tmp_path / "m.gguf", tiny.config(head_dim=24, intermediate_size=96), types={"blk.0.attn_q.weight": Type.Q8_0})
    convert(tmp_path / "m.gguf", tmp_path / "a", "q8")
    monkeypatch.setattr("hisparse_rt.tools.convert._CHUNK", 1)
    convert(tmp_path / "m.gguf", tmp_path / "b", "q8")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_tied_gguf(tmp_path):
    _, b = same_packages(tmp_path, tiny.config(tie_word_embeddings=True))
    assert "output.weight" not in b.names


# ---- quantised types --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, dtype",
    [
        (Type.Q8_0, "q8"),
        (Type.Q4_0, "q8"),
        (Type.Q4_0, "q4"),
        (Type.Q4_1, "q4"),
        (Type.Q4_1, "f32"),
        (Type.Q5_0, "f32"),
        (Type.BF16, "bf16"),
        (Type.F16, "f32"),
    ],
)
def test_types_that_convert_without_loss(tmp_path, kind, dtype):
    """Groups of 32 keep codes and scales, through the row permutation of q and k too."""
    cfg = tiny.config(num_attention_heads=8)
    tensors = tiny.weights(cfg)
    back, _ = converted(tiny.write_gguf(tmp_path / "m.gguf", cfg, tensors, types=kind), tmp_path, dtype)
    got = back.weights()
    for name, value in tensors.items():
        meant = value if value.ndim == 1 else gguf.dequantize(gguf.quantize(value, kind), kind)
        assert np.array_equal(got[name], meant), name
    assert back.dtype("blk.0.attn_qkv.weight") == dtype


@pytest.mark.parametrize("kind", [k for k in Type if k.name not in ("F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K", "Q1_0")])
def test_every_type_the_gguf_package_knows(tmp_path, kind):
    """Random blocks of each type, compared with the package's own decoding."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    cfg = tiny.config(hidden_size=256, num_attention_heads=16, intermediate_size=96)
    raw = np.random.default_rng(kind.value).integers(0, 256, (96, 256 // block * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        good = np.isfinite(gguf.dequantize(raw, kind)).reshape(96, -1, block).all(-1)
    raw.reshape(96, -1, size)[~good] = 0  # only blocks whose scales are numbers
    want = gguf.dequantize(raw, kind)
    tiny.write_gguf(tmp_path / "m.gguf", cfg, raw={"blk.1.ffn_up.weight": (raw, kind)})
    got = converted(tmp_path / "m.gguf", tmp_path)[0].weights()["model.layers.1.mlp.up_proj.weight"]
    assert np.array_equal(got, want.astype(np.float32))


@pytest.mark.parametrize("kind", [Type.I32, Type.F64])
def test_types_that_are_no_weights_are_refused_by_name(tmp_path, kind):
    value = np.zeros((96, 64), {Type.I32: np.int32, Type.F64: np.float64}[kind])
    tiny.write_gguf(tmp_path / "m.gguf", raw={"blk.1.ffn_up.weight": (value, kind)})
    refused(tmp_path / "m.gguf", tmp_path, f"blk.1.ffn_up.weight has type {kind.name}")


def q8_0(codes, scale):
    blocks = np.concatenate([np.array([scale], "<f2").view(np.uint8), np.asarray(codes, np.int8).view(np.uint8)])
    return np.tile(blocks, (96, 2))


@pytest.mark.parametrize("codes, exact", [([-128] * 16 + [64] * 16, True), ([-128] * 16 + [63] * 16, False)])
def test_code_minus_128(tmp_path, codes, exact):
    """A code that q8 does not have: exact by halving where all codes are even, else quantised anew."""
    tiny.write_gguf(tmp_path / "m.gguf", raw={"blk.1.ffn_up.weight": (q8_0(codes, 0.01), Type.Q8_0)})
    got = converted(tmp_path / "m.gguf", tmp_path, "q8")[0].weights()["model.layers.1.mlp.up_proj.weight"]
    with HsrFile(tmp_path / "out.hsr") as file:
        assert file.encoded("blk.1.ffn_gate_up.weight", 192, 64)[0].min() >= -127
    want = np.tile(np.float32(np.float16(0.01)) * np.array(codes, np.float32), (96, 2))
    assert np.array_equal(got, want) if exact else np.abs(got - want).max() < 0.51 * 0.0101


@pytest.mark.parametrize("dtype", ["q8", "f32"])
def test_scale_that_is_not_a_number(tmp_path, dtype):
    tiny.write_gguf(tmp_path / "m.gguf", raw={"blk.1.ffn_up.weight": (q8_0([1] * 32, np.nan), Type.Q8_0)})
    with pytest.raises(ConvertError, match="blk.1.ffn_up.weight holds NaN"):
        convert(tmp_path / "m.gguf", tmp_path / "x.hsr", dtype)


def test_k_quants_keep_their_codes_in_four_bits(tmp_path):
    random = np.random.default_rng(3)
    raw = random.integers(0, 256, (96, 144), dtype=np.uint8)
    raw[:, :4] = np.array([0.01, 0.03], "<f2").view(np.uint8)
    cfg = tiny.config(hidden_size=256, num_attention_heads=16)
    tiny.write_gguf(tmp_path / "m.gguf", cfg, raw={f"blk.1.ffn_{part}.weight": (raw, Type.Q4_K) for part in ("gate", "up")})
    got = converted(tmp_path / "m.gguf", tmp_path, "q4")[0].weights()["model.layers.1.mlp.up_proj.weight"]
    want = gguf.dequantize(raw, Type.Q4_K)
    assert np.abs(got - want).max() < 2**-10 * np.abs(want).max()


@pytest.mark.parametrize(
    "types, expected",
    [
        ({"token_embd.weight": Type.Q8_0, "blk.0.ffn_down.weight": Type.Q8_0, "*": Type.Q4_1}, ("q8", "q8", "q4")),
        ({"token_embd.weight": Type.Q4_0, "*": Type.Q4_0}, ("q4", "q4", "q4")),
        ({"token_embd.weight": Type.Q8_0, "*": Type.Q8_0}, ("q8", "q4", "q4")),
    ],
)
def test_mixed_widths_in_a_four_bit_file(tmp_path, types, expected):
    """Eight-bit embeddings stay, and eight-bit projections where others have four; sources of eight bits alone shrink as asked."""
    cfg = tiny.config()
    names = tiny.gguf_tensors(cfg, tiny.weights(cfg))
    kinds = {name: types.get(name, types["*"]) for name in names}
    back, _ = converted(tiny.write_gguf(tmp_path / "m.gguf", cfg, types=kinds), tmp_path, "q4")
    assert tuple(back.dtype(name) for name in ("token_embd.weight", "blk.0.ffn_down.weight", "blk.1.ffn_down.weight")) == expected
    assert back.get("weight_dtype") == "q4"


# ---- settings ---------------------------------------------------------------------------------------------------


def test_rope_freqs_carry_llama3_scaling(tmp_path):
    """The metadata says nothing of it: the divisors are a tensor."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    cfg = tiny.config(rope_scaling=scaling)
    table, _ = reference.inverse_frequencies(cfg, 1)
    divisors = (10000.0 ** (-np.arange(0, 16, 2) / 16) / table).astype(np.float32)
    src = tiny.write_hf(tmp_path / "hf", cfg)
    tiny.write_gguf(tmp_path / "m.gguf", cfg, raw={"rope_freqs.weight": (divisors, Type.F32)})
    back, _ = converted(tmp_path / "m.gguf", tmp_path)
    assert np.allclose(back.vector("rope.inv_freq"), table, rtol=1e-6)
    assert np.abs(back.logits(IDS) - reference.logits(src, IDS)).max() < 1e-4
    tiny.write_gguf(tmp_path / "m.gguf", cfg, raw={"rope_freqs.weight": (divisors[:4], Type.F32)})
    refused(tmp_path / "m.gguf", tmp_path, "rope_freqs.weight has 4 values, expected 8")


def test_linear_and_yarn_scaling(tmp_path):
    keys = {"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": 4.0}
    back, _ = converted(tiny.write_gguf(tmp_path / "m.gguf", keys=keys), tmp_path)
    assert back.vector("rope.inv_freq")[0] == 0.25
    back, _ = converted(tiny.write_gguf(tmp_path / "m.gguf", keys=keys | {"{arch}.rope.scaling.type": "none"}), tmp_path)
    assert back.vector("rope.inv_freq")[0] == 1
    keys = {"{arch}.rope.scaling.type": "yarn", "{arch}.rope.scaling.factor": 4.0, "{arch}.rope.scaling.original_context_length": 64}
    back, _ = converted(tiny.write_gguf(tmp_path / "m.gguf", keys=keys), tmp_path)
    cfg = tiny.config(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})
    table, factor = reference.inverse_frequencies(cfg, 1)
    assert np.allclose(back.vector("rope.inv_freq"), table, rtol=1e-6) and back.get("rope.attention_factor") == pytest.approx(factor)


def test_head_sizes(tmp_path):
    """Explicit key length; absent, the quotient; unequal lengths and a quotient that does not exist are refused."""
    cfg = tiny.config(hidden_size=56, head_dim=16)
    assert converted(tiny.write_gguf(tmp_path / "m.gguf", cfg), tmp_path)[0].get("head_dim") == 16
    absent = {"{arch}.attention.key_length": None, "{arch}.attention.value_length": None}
    assert converted(tiny.write_gguf(tmp_path / "m.gguf", keys=absent), tmp_path)[0].get("head_dim") == 16
    cfg = tiny.config(hidden_size=60, num_attention_heads=8)
    refused(tiny.write_gguf(tmp_path / "m.gguf", cfg, keys=absent), tmp_path, "embedding_length 60 is not a multiple of 8 heads")
    refused(
        tiny.write_gguf(tmp_path / "m.gguf", keys={"{arch}.attention.value_length": 32}),
        tmp_path,
        "key_length 16 and value_length 32 differ",
    )


@pytest.mark.parametrize(
    "keys, text",
    [
        ({"{arch}.attention.sliding_window": 64}, "sliding_window of 64"),
        ({"{arch}.attention.sliding_window": "64"}, "sliding_window' is '64', not a count"),
        ({"{arch}.expert_count": 8}, "'llama.expert_count' is 8"),
        ({"{arch}.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"{arch}.block_count": None}, "'llama.block_count' is missing"),
        ({"{arch}.logit_scale": 0.5}, "'llama.logit_scale' is 0.5"),
        ({"{arch}.rope.dimension_count": 8}, "dimension_count' 8"),
        ({"{arch}.attention.head_count_kv": ("UINT32", [2, 4])}, "head_count_kv' differs"),
        ({"{arch}.block_count": 3}, "missing tensors: blk.2.attn_k.weight"),
        ({"{arch}.block_count": 1}, "no place.*blk.1.attn_k.weight"),
        ({"{arch}.feed_forward_length": 95}, r"has shape \[96, 64\], expected \[95, 64\]"),
        ({"{arch}.block_count": 2**31}, "'llama.block_count' is 2147483648"),
    ],
)
def test_settings_that_are_refused(tmp_path, keys, text):
    refused(tiny.write_gguf(tmp_path / "m.gguf", keys=keys), tmp_path, text)


def test_per_layer_counts_that_are_all_the_same(tmp_path):
    tiny.write_gguf(tmp_path / "m.gguf", keys={"{arch}.attention.head_count_kv": ("UINT32", [2, 2])})
    assert converted(tmp_path / "m.gguf", tmp_path)[0].get("kv_head_count") == 2


@pytest.mark.parametrize(
    "arch, text", [("glm4", "'glm4' is not supported yet"), ("gemma", "'gemma' is not supported \\("), ("hisparse", "already converted")]
)
def test_architectures_are_refused_by_name(tmp_path, arch, text):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", arch)
    writer.add_uint32("x.block_count", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "m.gguf", tmp_path, text)


def test_split_files_are_one_model(tmp_path):
    cfg = tiny.config()
    tiny.write_gguf(tmp_path / "m.gguf", cfg, split=8)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 3
    got = converted(parts[1], tmp_path)[0].weights()
    assert all(np.array_equal(got[name], value) for name, value in tiny.weights(cfg).items())
    parts[2].rename(tmp_path / "gone")
    refused(parts[0], tmp_path, "missing: .*m-00003-of-00003.gguf")


# ---- hostile files ----------------------------------------------------------------------------------------------


def string(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name, kind, value):
    return string(name) + struct.pack("<I", kind) + value


def tensor(name="t", dims=(32,), kind=0, offset=0, n_dims=None):
    return (
        string(name)
        + struct.pack("<I", len(dims) if n_dims is None else n_dims)
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


def file(keys=(), tensors=(), version=3, magic=b"GGUF", n_keys=None, n_tensors=None, data=b"\0" * 256):
    arch = key("general.architecture", 8, string("llama"))
    keys = [arch, *keys]
    counts = struct.pack("<QQ", len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys)
    head = magic + struct.pack("<I", version) + counts + b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


U32, STR, ARR = 4, 8, 9
HOSTILE = {
    "dims that overflow": (file(tensors=[tensor(dims=(1 << 63, 2))]), "impossible dimensions"),
    "dims whose product wraps to a small number": (file(tensors=[tensor(dims=(1 << 32, 1 << 32, 1 << 1))]), "impossible dimensions"),
    "a dimension of zero": (file(tensors=[tensor(dims=(32, 0))]), "impossible dimensions"),
    "5 dimensions": (file(tensors=[tensor(dims=(1,) * 5)]), "has 5 dimensions"),
    "9 dimensions": (file(tensors=[tensor(dims=(1,) * 9)]), "has 9 dimensions"),
    "no dimensions": (file(tensors=[tensor(dims=())]), "has 0 dimensions"),
    "2^32-1 dimensions": (file(tensors=[tensor(n_dims=(1 << 32) - 1)]), "has 4294967295 dimensions"),
    "alignment 0": (file([key("general.alignment", U32, struct.pack("<I", 0))], [tensor()]), "alignment is 0"),
    "alignment 3": (file([key("general.alignment", U32, struct.pack("<I", 3))], [tensor()]), "alignment is 3"),
    "alignment 2^30": (file([key("general.alignment", U32, struct.pack("<I", 1 << 30))], [tensor()]), "alignment is 1073741824"),
    "alignment as text": (file([key("general.alignment", STR, string("32"))], [tensor()]), "alignment is 32"),
    "string of 2^60 bytes": (file([string("k") + struct.pack("<IQ", STR, 1 << 60)]), "key 'k' needs 1152921504606846976 bytes"),
    "array of 2^60 numbers": (file([string("k") + struct.pack("<IIQ", ARR, U32, 1 << 60)]), "key 'k' needs"),
    "array of 2^60 strings": (file([string("k") + struct.pack("<IIQ", ARR, STR, 1 << 60)]), "key 'k' claims"),
    "array of arrays": (file([string("k") + struct.pack("<IIQ", ARR, ARR, 1)]), "array of arrays"),
    "key of an unknown type": (file([key("k", 77, b"")]), "unknown type 77"),
    "truth value of 7": (file([key("k", 7, b"\7")]), "truth value"),
    "two keys of one name": (file([key("k", 0, b"\1"), key("k", 0, b"\1")]), "key 'k' occurs twice"),
    "name that is no text": (file(tensors=[tensor(b"\xff\xfe")]), "not UTF-8"),
    "2^60 keys": (file(n_keys=1 << 60), "do not fit the file"),
    "2^63 tensors": (file(n_tensors=1 << 63), "do not fit the file"),
    "tensor past the end": (file(tensors=[tensor(offset=1 << 20)]), "but the file has"),
    "offset near 2^64": (file(tensors=[tensor(offset=(1 << 64) - 32)]), "but the file has"),
    "offset not aligned": (file(tensors=[tensor(offset=8)]), "not a multiple of the alignment"),
    "tensors of one name": (file(tensors=[tensor(), tensor(offset=128)]), "tensor 't' occurs twice"),
    "tensors that overlap": (file(tensors=[tensor("a"), tensor("b", offset=64)]), "'a' and 'b' overlap"),
    "unknown tensor type": (file(tensors=[tensor(kind=999)]), "unknown type 999"),
    "half a block": (file(tensors=[tensor(dims=(33,), kind=8)]), "not whole blocks"),
    "big-endian magic": (file(magic=b"FUGG"), "big-endian"),
    "big-endian version": (file(version=0x03000000), "big-endian"),
    "another version": (file(version=9), "version 9"),
    "not GGUF": (b"PK\3\4" + b"x" * 100, "not a GGUF file"),
    "empty": (b"", "magic number needs 4 bytes"),
    "no architecture": (b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + b"\0" * 64, "no general.architecture"),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_hostile_numbers(tmp_path, fault):
    """Hand-made headers of a few hundred bytes: refused within a second and with little memory."""
    content, text = HOSTILE[fault]
    (tmp_path / "m.gguf").write_bytes(content)
    tracemalloc.start()
    began = time.process_time()
    refused(tmp_path / "m.gguf", tmp_path, text)
    assert time.process_time() - began < 1
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "kind, values, text",
    [
        ("UINT8", [1] * 320, "scores' is not an array of floats"),
        ("FLOAT32", [1.0] * 10, "scores' has 10 values for 320 tokens"),
    ],
)
def test_scores_of_another_type_or_length(tmp_path, kind, values, text):
    keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": (kind, values)}
    refused(tiny.write_gguf(tmp_path / "m.gguf", keys=keys), tmp_path, text)


def test_cut_anywhere(tmp_path):
    """A download that stopped: at any point of the header and of the data."""
    whole = tiny.write_gguf(tmp_path / "m.gguf").read_bytes()
    for size in [*range(0, 200, 7), *range(200, len(whole), len(whole) // 60), len(whole) - 1]:
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        refused(tmp_path / "cut.gguf", tmp_path, "cut.gguf")


def test_random_damage_never_escapes_as_another_error(tmp_path):
    """Bytes flipped anywhere in the header give a ConvertError or a file, nothing else."""
    whole = bytearray(tiny.write_gguf(tmp_path / "m.gguf").read_bytes())
    random = np.random.default_rng(1)
    for _ in range(150):
        damaged = bytearray(whole)
        for at in random.integers(0, 9000, 3):
            damaged[at] = random.integers(0, 256)
        (tmp_path / "bad.gguf").write_bytes(damaged)
        try:
            convert(tmp_path / "bad.gguf", tmp_path / "bad.hsr", "f32")
        except ConvertError as error:
            str(error).encode("utf-8")
