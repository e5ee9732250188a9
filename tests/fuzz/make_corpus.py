#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the hostile corpus of the container reader: one small file per way to be wrong, and a few good ones.

Usage: make_corpus.py FOLDER. Names that start with "good" must open, names that start with "bad" must be refused.
Needs nothing but Python; every byte is fixed, so that a corpus can be made again anywhere.
"""

import argparse
import struct
from collections.abc import Sequence
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
T_F32, T_Q4_1, T_Q8_0, T_I8, T_BF16 = 0, 3, 8, 24, 30

HUGE = 2**60
MOST = 2**64 - 1


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: bytes) -> bytes:
    return u64(len(text)) + text


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return string(name) + u32(kind) + value


def array(name: bytes, kind: int, count: int, values: bytes) -> bytes:
    return key(name, ARRAY, u32(kind) + u64(count) + values)


def tensor(name: bytes, dims: list[int], kind: int = T_F32, offset: int = 0, n_dims: int | None = None) -> bytes:
    count = len(dims) if n_dims is None else n_dims
    return string(name) + u32(count) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def build(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: int = 64,
    *,
    magic: bytes = b"GGUF",
    version: bytes = u32(3),
    n_tensors: int | None = None,
    n_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file; what a case wants wrong is given, the rest is right."""
    head = magic + version
    head += u64(len(tensors) if n_tensors is None else n_tensors) + u64(len(keys) if n_keys is None else n_keys)
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + bytes(i * 7 % 251 for i in range(data))


def good() -> dict[str, bytes]:
    keys = [
        key(b"general.alignment", U32, u32(64)),
        key(b"general.architecture", STRING, string(b"hisparse")),
        key(b"u8", U8, b"\xff"),
        key(b"i8", I8, b"\xff"),
        key(b"u16", U16, b"\xff\xff"),
        key(b"i16", I16, b"\xff\xff"),
        key(b"i32", I32, u32(2**32 - 1)),
        key(b"f32", F32, struct.pack("<f", 1.5)),
        key(b"bool", BOOL, b"\x01"),
        key(b"u64", U64, u64(MOST)),
        key(b"i64", I64, u64(MOST)),
        key(b"f64", F64, struct.pack("<d", float("nan"))),
        array(b"hisparse.eos_token_ids", U32, 2, u32(1) + u32(2)),
        array(b"words", STRING, 3, string(b"one") + string(b"") + string(b"three")),
        array(b"k", F32, 0, b""),
    ]
    tensors = [
        tensor(b"b.weight", [32, 2], T_Q8_0, 128),
        tensor(b"a.norm", [8], T_F32, 0),
        tensor(b"c.weight", [64, 1], T_Q4_1, 64),
        tensor(b"d", [2, 3, 1, 2], T_BF16, 256),
    ]
    return {
        "good-full": build(keys, tensors, 280, alignment=64),
        "good-empty": build(data=0, alignment=1),
        "good-one-tensor": build([], [tensor(b"t", [4])], 16),
        "good-odd-names": build([key(b"\xff\n", U8, b"\0")], [tensor("größe €".encode(), [4])], 16),
        "good-trailing-bytes": build([], [tensor(b"t", [4])], 1000),
    }


def bad_heads() -> dict[str, bytes]:
    return {
        "bad-empty": b"",
        "bad-text": b"this is not a model file, but it is long enough to be one",
        "bad-zip": b"PK\x03\x04" + bytes(200),
        "bad-magic-only": b"GGUF",
        "bad-big-endian-magic": build(magic=b"FUGG"),
        "bad-big-endian-version": build(version=b"\0\0\0\3"),
        "bad-version-1": build(version=u32(1)),
        "bad-version-2": build(version=u32(2)),
        "bad-version-4": build(version=u32(4)),
        "bad-version-most": build(version=u32(2**32 - 1)),
        "bad-tensors-huge": build(data=176, n_tensors=HUGE),
        "bad-tensors-most": build(data=176, n_tensors=MOST),
        "bad-keys-huge": build(data=176, n_keys=HUGE),
        "bad-both-most": build(data=176, n_tensors=MOST, n_keys=MOST),
        "bad-one-key-more": build([key(b"k", U8, b"\0")], n_keys=2, data=0),
        "bad-one-tensor-more": build([], [tensor(b"t", [4])], 64, n_tensors=2),
    }


def bad_keys() -> dict[str, bytes]:
    def one(*keys: bytes) -> bytes:
        return build(list(keys), [], 64)

    cases = {
        "name-huge": u64(HUGE) + b"name",
        "name-most": u64(MOST) + b"name",
        "name-empty": key(b"", U8, b"\0"),
        "name-65536": key(b"n" * 65536, U8, b"\0"),
        "name-nul": key(b"a\0b", U8, b"\0"),
        "type-13": key(b"k", 13, b"\0"),
        "type-most": key(b"k", 2**32 - 1, b"\0"),
        "string-huge": key(b"k", STRING, u64(HUGE)),
        "string-most": key(b"k", STRING, u64(MOST)),
        "string-half": key(b"k", STRING, u64(2**63)),
        "array-huge": array(b"k", F32, HUGE, b""),
        "array-most": array(b"k", U8, MOST, b""),
        "array-wraps": array(b"k", F64, 2**61 + 1, b""),
        "array-of-strings-huge": array(b"k", STRING, HUGE, string(b"one")),
        "array-of-strings-wraps": array(b"k", STRING, 2**61 + 1, string(b"one")),
        "array-of-strings-second-huge": array(b"k", STRING, 2, string(b"one") + u64(HUGE)),
        "array-of-arrays": array(b"k", ARRAY, 1, u32(U8) + u64(1) + b"\0"),
        "array-type-13": array(b"k", 13, 1, b"\0"),
        "array-type-most": array(b"k", 2**32 - 1, 1, b"\0"),
        "alignment-string": key(b"general.alignment", STRING, string(b"32")),
        "alignment-negative": key(b"general.alignment", I32, u32(2**32 - 32)),
        "alignment-array": array(b"general.alignment", U32, 1, u32(32)),
    }
    for alignment in (0, 1, 3, 4, 33, 2**21, 2**30, 2**32 - 1):
        cases[f"alignment-{alignment}"] = key(b"general.alignment", U32, u32(alignment))
    files = {f"bad-key-{name}": one(body) for name, body in cases.items()}
    files["bad-key-twice"] = one(key(b"k", U8, b"\1"), key(b"k", STRING, string(b"x")))
    return files


def bad_tensors() -> dict[str, bytes]:
    def one(*tensors: bytes, data: int = 256) -> bytes:
        return build([], list(tensors), data)

    cases = {
        "name-huge": u64(HUGE) + b"name" + bytes(64),
        "name-empty": tensor(b"", [4]),
        "name-nul": tensor(b"t\0", [4]),
        "dims-0": tensor(b"t", []),
        "dims-5": tensor(b"t", [1] * 5),
        "dims-9": tensor(b"t", [1] * 9),
        "dims-most": tensor(b"t", [1] * 4, n_dims=2**32 - 1),
        "size-0": tensor(b"t", [0, 4]),
        "size-0-last": tensor(b"t", [4, 0]),
        "product-wraps": tensor(b"t", [2**63, 2]),
        "product-wraps-to-4": tensor(b"t", [2**62 + 1, 4]),
        "product-most": tensor(b"t", [MOST] * 4),
        "product-square": tensor(b"t", [2**32, 2**32]),
        "bytes-wrap": tensor(b"t", [2**62 + 1]),
        "bytes-wrap-blocks": tensor(b"t", [MOST - 31], T_Q8_0),
        "bytes-huge": tensor(b"t", [HUGE]),
        "bytes-most": tensor(b"t", [MOST], T_I8, 32),
        "half-block": tensor(b"t", [16, 2], T_Q8_0),
        "type-4": tensor(b"t", [32], 4),
        "type-1000": tensor(b"t", [32], 1000),
        "type-most": tensor(b"t", [32], 2**32 - 1),
        "offset-odd": tensor(b"t", [4], T_F32, 4),
        "offset-end": tensor(b"t", [4], T_F32, 256),
        "offset-huge": tensor(b"t", [4], T_F32, HUGE),
        "offset-most": tensor(b"t", [4], T_F32, MOST - 31),
    }
    files = {f"bad-tensor-{name}": one(body) for name, body in cases.items()}
    files["bad-tensor-twice"] = one(tensor(b"t", [4]), tensor(b"t", [4], T_F32, 32))
    files["bad-tensor-overlap"] = one(tensor(b"a", [16]), tensor(b"b", [4], T_F32, 32))
    files["bad-tensor-same-place"] = one(tensor(b"a", [4]), tensor(b"b", [4]))
    files["bad-tensor-no-data"] = one(tensor(b"t", [4]), data=0)
    files["bad-tensor-byte-short"] = one(tensor(b"t", [4]), data=15)
    return files


def bad_cuts(whole: bytes) -> dict[str, bytes]:
    return {f"bad-cut-{n:03d}": whole[:n] for n in range(1, len(whole), 11)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the hostile corpus of the container reader.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    files = good()
    files |= bad_heads() | bad_keys() | bad_tensors() | bad_cuts(files["good-full"])
    for name, content in files.items():
        (folder / f"{name}.hsr").write_bytes(content)
    print(f"{len(files)} files, {sum(map(len, files.values()))} bytes")


if __name__ == "__main__":
    main()
