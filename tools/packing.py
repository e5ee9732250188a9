# SPDX-License-Identifier: Apache-2.0
"""Weights to and from the packed order of docs/model-file.md.

Two steps, so that rows can be picked, permuted and joined between them. `encode` turns float rows into the arrays of one
dtype, rows first:
    f32 (values)   bf16 (bits)   q8 (codes, scales)   q4 (codes, scales, minimums)
`pack` lays whole panels of such rows out in file order. In every dtype, one panel is then 16 rows of 32-bit words, transposed.
"""

from __future__ import annotations

import numpy as np

from .errors import ConvertError

PANEL = 16
RUN = 32
DTYPES = ("f32", "bf16", "q8", "q4")
GGML_TYPE = {"f32": 0, "bf16": 30, "q8": 8, "q4": 3}
_CODE_BYTES = {"f32": 128, "bf16": 64, "q8": 32, "q4": 16}  # of one row in one run
_TAIL_BYTES = {"f32": 0, "bf16": 0, "q8": 2, "q4": 4}

_LEVEL_TRIES = 6  # scales that encode_q8_levels tries; twice as many gain 5 % more

Encoded = tuple[np.ndarray, ...]


def padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def code_bytes(dtype: str, n: int, k: int) -> int:
    """Bytes of the codes of an [n, k] matrix; its scales and minimums follow them."""
    return padded(n, PANEL) * (padded(k, RUN) // RUN) * _CODE_BYTES[dtype]


def tail_bytes(dtype: str, n: int, k: int) -> int:
    return padded(n, PANEL) * (padded(k, RUN) // RUN) * _TAIL_BYTES[dtype]


def packed_bytes(dtype: str, n: int, k: int) -> int:
    return code_bytes(dtype, n, k) + tail_bytes(dtype, n, k)


# ---- encode -----------------------------------------------------------------------------------------------------


def encode(rows: np.ndarray, dtype: str, name: str) -> Encoded:
    """Float rows [n, k] as dtype, k padded to whole runs. Values the dtype cannot hold are refused, naming the tensor."""
    require_finite(rows, name)
    return _ENCODERS[dtype](np.ascontiguousarray(rows, np.float32), name)


def require_finite(values: np.ndarray, name: str) -> None:
    if not np.isfinite(values).all():
        what = "NaN" if np.isnan(values).any() else "infinity"
        raise ConvertError(f"tensor {name} holds {what}")


def _pad_columns(rows: np.ndarray, mode: str = "constant") -> np.ndarray:
    short = padded(rows.shape[1], RUN) - rows.shape[1]
    return np.pad(rows, ((0, 0), (0, short)), mode=mode) if short else rows


def _does_not_fit(name: str, dtype: str, values: np.ndarray) -> ConvertError:
    return ConvertError(f"tensor {name} holds {float(np.abs(values).max()):g}, which does not fit {dtype}")


def _encode_f32(rows: np.ndarray, name: str) -> Encoded:
    return (_pad_columns(rows),)


def _encode_bf16(rows: np.ndarray, name: str) -> Encoded:
    bits = rows.view(np.uint32)
    short = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    if ((short & 0x7F80) == 0x7F80).any():
        raise _does_not_fit(name, "bf16", rows)
    return (_pad_columns(short),)


def _step(span: np.ndarray, n_steps: int) -> np.ndarray:
    """The half-precision step that covers span in n_steps. A step that was rounded down so far that the last code would be
    cut off (only tiny halves are that coarse) is raised to the next half."""
    with np.errstate(over="ignore"):
        step = (span / np.float32(n_steps)).astype(np.float16)
    low = span > step.astype(np.float32) * np.float32(n_steps + 0.5)
    return np.where(low, np.nextafter(step, np.float16(np.inf)), step)


def _codes(groups: np.ndarray, scales: np.ndarray, low: int, high: int) -> np.ndarray:
    divisor = np.where(scales == 0, np.float32(1), scales.astype(np.float32))
    codes = groups / divisor[..., None]
    np.rint(codes, out=codes)
    return np.clip(codes, low, high, out=codes)


def _encode_q8(rows: np.ndarray, name: str) -> Encoded:
    n = len(rows)
    groups = _pad_columns(rows).reshape(n, -1, RUN)
    scales = _step(np.abs(groups).max(axis=-1), 127)
    if np.isinf(scales).any():
        raise _does_not_fit(name, "q8", rows)
    return _codes(groups, scales, -127, 127).astype(np.int8).reshape(n, -1), scales


def encode_q8_levels(rows: np.ndarray, steps: np.ndarray, name: str) -> Encoded:
    """q8 of rows whose groups are evenly spaced levels, `steps` [n, groups] apart: 4-bit weights on their way to 8 bits.

    With a scale that divides the step, all levels of a group miss their codes by one and the same amount; of the largest few
    such scales, and the plain one, the group takes that with the smallest squared error, which is less than half the plain.
    """
    codes, scales = _encode_q8(rows, name)
    n = len(rows)
    groups, steps = _pad_columns(rows).reshape(n, -1, RUN), np.abs(steps).astype(np.float32)
    largest = np.abs(groups).max(axis=-1)
    codes, error = codes.reshape(groups.shape), _squared_error(groups, codes.reshape(groups.shape), scales)
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = np.floor(np.float32(127) * steps / largest)
    for _ in range(_LEVEL_TRIES):
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            tried = (steps / parts).astype(np.float16)
        usable = (parts >= 1) & np.isfinite(tried) & (tried > 0)
        tried = np.where(usable, tried, scales)
        new = _codes(groups, tried, -127, 127).astype(np.int8)
        new_error = _squared_error(groups, new, tried)
        better = usable & (new_error < error)
        codes[better], scales[better], error[better] = new[better], tried[better], new_error[better]
        parts -= 1
    return codes.reshape(n, -1), scales


def _squared_error(groups: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    miss = codes * scales.astype(np.float32)[..., None] - groups
    return np.einsum("ngk,ngk->ng", miss, miss)


def _encode_q4(rows: np.ndarray, name: str) -> Encoded:
    n, k = rows.shape
    groups = _pad_columns(rows, "edge").reshape(n, -1, RUN)  # repeated values leave the group's extremes alone
    lowest, highest = groups.min(axis=-1), groups.max(axis=-1)
    with np.errstate(over="ignore"):
        minimums = lowest.astype(np.float16)
    if np.isinf(minimums).any():
        raise _does_not_fit(name, "q4", rows)
    start = minimums.astype(np.float32)
    scales = _step(np.maximum(highest - start, 0), 15)
    if np.isinf(scales).any():
        raise _does_not_fit(name, "q4", rows)
    codes = _codes(groups - start[..., None], scales, 0, 15).astype(np.uint8).reshape(n, -1)
    codes[:, k:] = 0
    return codes, scales, minimums


_ENCODERS = {"f32": _encode_f32, "bf16": _encode_bf16, "q8": _encode_q8, "q4": _encode_q4}


def decode(encoded: Encoded, dtype: str) -> np.ndarray:
    """The float32 values that encoded rows stand for, padding columns included."""
    if dtype == "f32":
        return encoded[0]
    if dtype == "bf16":
        return (encoded[0].astype(np.uint32) << np.uint32(16)).view(np.float32)
    codes, scales = encoded[0], encoded[1].astype(np.float32)
    values = codes.reshape(len(codes), -1, RUN).astype(np.float32) * scales[..., None]
    if dtype == "q4":
        values += encoded[2].astype(np.float32)[..., None]
    return values.reshape(codes.shape)


# ---- pack -------------------------------------------------------------------------------------------------------


def pack(encoded: Encoded, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Whole panels (the last one padded with zeros) as bytes: the codes, and the scales and minimums."""
    encoded = tuple(_pad_rows(array) for array in encoded)
    codes = _transpose_panels(_words(encoded[0], dtype))
    if dtype in ("f32", "bf16"):
        return codes, np.empty(0, np.uint8)
    tail = np.stack([array.reshape(-1, PANEL, array.shape[1]).transpose(0, 2, 1) for array in encoded[1:]], axis=2)
    return codes, np.ascontiguousarray(tail).reshape(-1).view(np.uint8)


def _pad_rows(array: np.ndarray) -> np.ndarray:
    short = padded(len(array), PANEL) - len(array)
    return np.pad(array, ((0, short), (0, 0))) if short else array


def _words(codes: np.ndarray, dtype: str) -> np.ndarray:
    """Codes [n, k] as 32-bit words along the row."""
    if dtype == "q4":
        eights = codes.reshape(len(codes), -1, 2, 4)
        codes = (eights[:, :, 0] | (eights[:, :, 1] << 4)).reshape(len(codes), -1)
    return np.ascontiguousarray(codes).view(np.uint32)


def _transpose_panels(words: np.ndarray) -> np.ndarray:
    panels = words.reshape(-1, PANEL, words.shape[1])
    return np.ascontiguousarray(panels.transpose(0, 2, 1)).reshape(-1).view(np.uint8)


def unpack(data: np.ndarray, dtype: str, n: int, k: int) -> Encoded:
    """The encoded rows [n, k padded to runs] of a packed matrix; the inverse of encode and pack."""
    runs, rows = padded(k, RUN) // RUN, padded(n, PANEL)
    codes, tail = data[: code_bytes(dtype, n, k)], data[code_bytes(dtype, n, k) :]
    words = codes.view(np.uint32).reshape(rows // PANEL, -1, PANEL).transpose(0, 2, 1)
    words = np.ascontiguousarray(words).reshape(rows, -1)[:n]
    if dtype == "f32":
        return (words.view(np.float32),)
    if dtype == "bf16":
        return (words.view(np.uint16),)
    parts = 1 if dtype == "q8" else 2
    tail = tail.view(np.float16).reshape(rows // PANEL, runs, parts, PANEL).transpose(2, 0, 3, 1).reshape(parts, rows, runs)[:, :n]
    if dtype == "q8":
        return words.view(np.int8), tail[0]
    nibbles = words.view(np.uint8).reshape(n, -1, 1, 4)
    return np.concatenate([nibbles & 15, nibbles >> 4], axis=2).reshape(n, -1), tail[0], tail[1]
