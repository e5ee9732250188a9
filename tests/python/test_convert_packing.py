# SPDX-License-Identifier: Apache-2.0
"""The packed order of weights and the arithmetic of quantising."""

import numpy as np
import pytest
import readback

from hisparse_rt.tools import packing
from hisparse_rt.tools.errors import ConvertError

pytestmark = pytest.mark.python

SHAPES = [(1, 1), (16, 32), (17, 33), (40, 96), (48, 31), (320, 64)]


def rows(n, k, seed=0):
    return np.random.default_rng(seed).standard_normal((n, k), dtype=np.float32)


def packed(encoded, dtype):
    return np.concatenate(packing.pack(encoded, dtype))


@pytest.mark.parametrize("dtype", packing.DTYPES)
@pytest.mark.parametrize("n, k", SHAPES)
def test_packing_keeps_every_value_in_its_documented_place(dtype, n, k):
    encoded = packing.encode(rows(n, k), dtype, "w")
    data = packed(encoded, dtype)
    assert data.size == packing.packed_bytes(dtype, n, k)
    values = packing.decode(encoded, dtype)[:, :k]
    assert np.array_equal(readback.decode(data, dtype, n, k), values)
    again = packing.unpack(data, dtype, n, k)
    assert all(np.array_equal(a, b) for a, b in zip(again, encoded, strict=True))


@pytest.mark.parametrize("dtype", packing.DTYPES)
def test_size_is_the_one_gguf_states_for_the_type(dtype):
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(packing.GGML_TYPE[dtype])]
    assert packing.packed_bytes(dtype, 40, 70) == 48 * 96 // block * size


@pytest.mark.parametrize("dtype", packing.DTYPES)
def test_padding_is_zero(dtype):
    data = packed(packing.encode(rows(3, 5) + 10, dtype, "w"), dtype)
    values = readback.decode(data, dtype, 16, 32)
    assert not values[3:].any()
    codes = packing.unpack(data, dtype, 16, 32)[0]
    assert not codes[:, 5:].any()


def test_bf16_rounds_half_to_even():
    x = np.array([[1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-20, 3e38]], np.float32)
    expected = [1.0, 1.0, 1 + 2**-6, -1 - 2**-7, np.float32(3e38)]
    got = packing.decode(packing.encode(x, "bf16", "w"), "bf16")[0, :5]
    assert np.allclose(got, expected, rtol=2**-9) and got[:4].tolist() == expected[:4]


def test_q8_is_the_nearest_code_of_the_rounded_scale():
    x = rows(64, 320)
    codes, scales = packing.encode(x, "q8", "w")
    peak = np.abs(x.reshape(64, 10, 32)).max(-1)
    assert np.array_equal(scales, (peak / np.float32(127)).astype(np.float16))
    step = np.repeat(scales.astype(np.float32), 32, axis=1)
    assert np.array_equal(codes, np.clip(np.rint(x / step), -127, 127))
    assert np.abs(packing.decode((codes, scales), "q8") - x).max() <= 0.51 * step.max()


def test_q4_error_is_half_a_step():
    x = rows(64, 320)
    encoded = packing.encode(x, "q4", "w")
    error = np.abs(packing.decode(encoded, "q4") - x).reshape(64, 10, 32).max(-1)
    assert (error <= 0.51 * encoded[1].astype(np.float32) + 2e-3).all()
    assert encoded[0].max() == 15 and encoded[0].min() == 0


@pytest.mark.parametrize("dtype", ["q8", "q4"])
@pytest.mark.parametrize("size", [0.0, 1e-9, 3e-7, 1e-6, 4e-6, 7e-6, 2e-5])
def test_groups_below_the_range_of_halves_keep_what_they_can(dtype, size):
    x = rows(16, 64) * np.float32(size)
    got = packing.decode(packing.encode(x, dtype, "w"), dtype)
    assert np.isfinite(got).all()
    assert (
        np.abs(got - x).max()
        <= max(0.51 * np.abs(x).max() / (127 if dtype == "q8" else 7.5), 0.51 * 2.0**-24 * (1 if dtype == "q8" else 2)) + 2.0**-24
    )


@pytest.mark.parametrize("dtype", ["q8", "q4"])
def test_equal_values_are_exact(dtype):
    x = np.full((16, 32), 0.5, np.float32)
    assert np.allclose(packing.decode(packing.encode(x, dtype, "w"), dtype), x, rtol=1e-3)


@pytest.mark.parametrize("dtype", packing.DTYPES)
@pytest.mark.parametrize("bad, word", [(np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "infinity")])
def test_values_that_are_not_numbers_are_refused_by_name(dtype, bad, word):
    x = rows(16, 32)
    x[3, 4] = bad
    with pytest.raises(ConvertError, match=f"tensor some.weight holds {word}"):
        packing.encode(x, dtype, "some.weight")


@pytest.mark.parametrize("dtype, value", [("bf16", 3.4e38), ("q8", 3e38), ("q8", 9e6), ("q4", 3e38), ("q4", -7e4)])
def test_values_that_do_not_fit_are_refused_by_name(dtype, value):
    x = rows(16, 32)
    x[3, 4] = value
    with pytest.raises(ConvertError, match=f"tensor some.weight holds .*does not fit {dtype}"):
        packing.encode(x, dtype, "some.weight")


def test_levels_keep_their_places():
    """4-bit weights in 8 bits: the scales that divide the step leave less than half of the error of the plain ones."""
    random = np.random.default_rng(4)
    steps = (random.uniform(0.001, 0.01, (64, 4))).astype(np.float16)
    lows = (-steps.astype(np.float32) * random.uniform(5, 9, steps.shape)).astype(np.float16).astype(np.float32)
    levels = random.integers(0, 16, (64, 4, 32)) * steps.astype(np.float32)[..., None] + lows[..., None]
    rows = levels.reshape(64, -1).astype(np.float32)
    plain = packing.decode(packing.encode(rows, "q8", "w"), "q8") - rows
    better = packing.decode(packing.encode_q8_levels(rows, steps, "w"), "q8") - rows
    assert np.sqrt((better**2).mean()) < 0.55 * np.sqrt((plain**2).mean())
    zero = packing.encode_q8_levels(np.zeros((16, 32), np.float32), np.zeros((16, 1), np.float16), "w")
    assert not packing.decode(zero, "q8").any()
