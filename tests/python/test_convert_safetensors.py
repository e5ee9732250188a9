# SPDX-License-Identifier: Apache-2.0
"""Damaged and strange safetensors files: refused with file, tensor and reason, quickly and without much memory."""

import json
import struct
import time
import tracemalloc

import numpy as np
import pytest
import tiny

from hisparse_rt.tools.convert import ConvertError, convert
from hisparse_rt.tools.files import RangeFile
from hisparse_rt.tools.safetensors_file import read_entries

pytestmark = pytest.mark.python


def parts(path):
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def with_header(header, data, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def shifted(header, name, by):
    header[name]["data_offsets"] = [x + by for x in header[name]["data_offsets"]]
    return header


def last(header):
    return max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])


def twice(header):
    text = json.dumps(header)
    return text.replace('"model.norm.weight"', '"lm_head.weight"').encode()


def restated(header, **changes):
    header["lm_head.weight"] |= changes
    return header


DAMAGE = {
    "one byte short": (lambda raw, h, d: raw[:-1], "but the file has"),
    "cut in the data": (lambda raw, h, d: raw[: len(raw) // 2], "but the file has"),
    "cut in the header": (lambda raw, h, d: raw[:100], "the header claims"),
    "only a length": (lambda raw, h, d: raw[:8], "the header claims"),
    "empty": (lambda raw, h, d: b"", "only 0 bytes"),
    "header of 0": (lambda raw, h, d: with_header(h, d, 0), "a header of 0 bytes"),
    "header of 2^63": (lambda raw, h, d: with_header(h, d, 1 << 63), "the header claims 9223372036854775808"),
    "header past the end": (lambda raw, h, d: with_header(h, d, len(raw)), "the header claims"),
    "bytes behind": (lambda raw, h, d: raw + b"x", "1 bytes follow the last tensor"),
    "a gap": (lambda raw, h, d: with_header(shifted(h, last(h), 4), d + b"1234"), "leaves a gap"),
    "overlap": (lambda raw, h, d: with_header(shifted(h, last(h), -4), d[:-4]), "overlaps"),
    "shape and range disagree": (lambda raw, h, d: with_header(restated(h, shape=[1, 64]), d), "lm_head.weight has shape"),
    "shape that overflows": (lambda raw, h, d: with_header(restated(h, shape=[1 << 63, 2]), d), "lm_head.weight has shape"),
    "negative shape": (lambda raw, h, d: with_header(restated(h, shape=[-320, -64]), d), "lm_head.weight has no valid shape"),
    "no range": (lambda raw, h, d: with_header(restated(h, data_offsets=None), d), "lm_head.weight has no valid"),
    "unknown dtype": (lambda raw, h, d: with_header(restated(h, dtype="F12"), d), "lm_head.weight has the unknown dtype 'F12'"),
    "no object": (lambda raw, h, d: with_header(h | {"lm_head.weight": 3}, d), "lm_head.weight is not described"),
    "one name twice": (lambda raw, h, d: with_header(twice(h), d), "lm_head.weight occurs twice"),
    "no JSON": (lambda raw, h, d: with_header(b"{" * 50, d), "not valid JSON"),
    "deep JSON": (lambda raw, h, d: with_header(b"[" * 200_000, d), "not valid JSON"),
    "a list": (lambda raw, h, d: with_header(b"[]", d), "not a JSON object"),
    "half a character": (lambda raw, h, d: with_header(json.dumps(h).replace("lm_head", "\\ud800").encode(), d), "half a character"),
    "no text": (lambda raw, h, d: with_header(b"\xff\xfe\xfd", d), "not valid JSON"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files(tmp_path, damage):
    src = tiny.write_hf(tmp_path / "hf", tokenizer=None)
    file = src / "model.safetensors"
    surgery, text = DAMAGE[damage]
    header, data = parts(file)
    file.write_bytes(surgery(file.read_bytes(), header, data))
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(ConvertError, match=text) as caught:
        convert(src, tmp_path / "m.hsr", "f32")
    assert time.process_time() - began < 1
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert "model.safetensors" in str(caught.value) and not (tmp_path / "m.hsr").exists()


@pytest.mark.parametrize("size", [4095, 4096, 65536, 100_000, 3_000_000])
def test_headers_of_any_size(tmp_path, size):
    src = tiny.write_hf(tmp_path / "hf", tokenizer=None)
    file = src / "model.safetensors"
    header, data = parts(file)
    text = json.dumps(header).encode()
    text += b" " * (size - len(text))
    assert len(text) == size
    file.write_bytes(with_header(text, data))
    assert convert(src, tmp_path / "m.hsr", "f32").tensors > 0


def test_entries_agree_with_the_library(tmp_path):
    from safetensors.numpy import load_file, save_file

    tensors = {name: value for name, value in tiny.weights(tiny.config()).items()} | {"half": np.ones((3, 5), np.float16)}
    save_file(tensors, tmp_path / "lib.safetensors")
    file = RangeFile(str(tmp_path / "lib.safetensors"))
    entries = read_entries(file)
    assert {name: entry.shape for name, entry in entries.items()} == {name: value.shape for name, value in tensors.items()}
    assert file.read(entries["half"].offset, entries["half"].size).tobytes() == tensors["half"].tobytes()
    file.close()
    tiny.write_safetensors(tmp_path / "own.safetensors", tensors | {"half": ("F16", (3, 5), tensors["half"].tobytes())})
    assert all(np.array_equal(value, tensors[name]) for name, value in load_file(tmp_path / "own.safetensors").items())


def test_a_file_that_shrinks_under_us_is_an_error(tmp_path):
    """Read by position, not by mapping: no signal reaches the host."""
    src = tiny.write_hf(tmp_path / "hf", tokenizer=None)
    file = src / "model.safetensors"

    def cut(done, total, name):
        with open(file, "r+b") as handle:
            handle.truncate(20_000)

    with pytest.raises(ConvertError, match="model.safetensors became shorter"):
        convert(src, tmp_path / "m.hsr", "f32", progress=cut)
    assert not (tmp_path / "m.hsr").exists()
