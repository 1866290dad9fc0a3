"""Casts against torch, bit for bit, for every value of the 16-bit and 8-bit types; and NaN, wherever it hides."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from areal_convert.converter import codecs
from areal_convert.converter.codecs import bits, cast, exactness, has_nan, numpy_dtype, widest
from areal_convert.converter.dtypes import BY_NAME, FLOATS, parse

FLOAT8 = ("F8_E4M3", "F8_E5M2")


def every_value(dtype: str) -> Any:
    """All bit patterns of a type of one or two bytes."""
    size = BY_NAME[dtype].size
    return np.arange(1 << (8 * size), dtype=np.uint32).astype(bits(size))


def by_torch(raw: Any, source: str, target: str) -> tuple[Any, Any]:
    """What torch makes of it: bits, and where it says NaN."""
    import torch

    signed = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
    values = torch.from_numpy(raw.view(signed[raw.itemsize])).view(getattr(torch, BY_NAME[source].torch))
    out = values.to(getattr(torch, BY_NAME[target].torch))
    back = out.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[out.itemsize])
    return back.numpy().view(bits(out.itemsize)), out.to(torch.float64).isnan().numpy()


def as_floats(raw: Any, dtype: str) -> Any:
    with np.errstate(invalid="ignore"):
        return raw.view(numpy_dtype(dtype)).astype(np.float64)


def assert_as_torch(raw: Any, source: str, target: str) -> None:
    """Equal bits, but for a NaN's payload and for what is beyond E4M3 (versions of torch disagree: NaN or 448)."""
    if target == "F8_E4M3":
        raw = raw[~(np.abs(as_floats(raw, source)) > 448)]
    have = cast(raw, source, target)
    want, nan = by_torch(raw, source, target)
    assert have.dtype == want.dtype
    assert np.array_equal(have[~nan], want[~nan])
    assert np.array_equal(np.isnan(as_floats(have, target)), nan)


@pytest.mark.parametrize(
    ("source", "target"),
    [(s, t) for s, t in product(("BF16", "F16", *FLOAT8), sorted(FLOATS)) if s != t],
)
def test_every_value_is_cast_as_torch_casts_it(source: str, target: str) -> None:
    assert_as_torch(every_value(source), source, target)


@pytest.mark.parametrize("target", ["BF16", "F16", "F64", *FLOAT8])
def test_wide_values_are_rounded_as_torch_rounds_them(target: str) -> None:
    """Random patterns, and for every bf16 the fp32 values at, just below and just above it and halfway to the next."""
    rng = np.random.default_rng(0)
    exact = every_value("BF16").astype(np.uint32) << 16
    f16 = cast(every_value("F16"), "F16", "F32")
    near = [
        (np.concatenate([exact, f16]).astype(np.int64) + step).clip(0, 2**32 - 1).astype(np.uint32)
        for step in (-1, 0, 1, 0x7FFF, 0x8000, 0x8001, 0x0FFF, 0x1000, 0x1001)
    ]
    raw = np.concatenate([rng.integers(0, 2**32, 1 << 18, dtype=np.uint32), *near])
    assert_as_torch(raw, "F32", target)


@pytest.mark.parametrize("target", ["F32", "BF16", "F16"])
def test_doubles_are_rounded_as_torch_rounds_them(target: str) -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal(1 << 16) * 10.0 ** rng.integers(-50, 40, 1 << 16)
    assert_as_torch(values.view(np.uint64), "F64", target)


def test_rounding_on_paper() -> None:
    """bf16 keeps 8 bits of 1.00000001…: a tie goes to the even neighbour."""
    fp32 = np.array([0x3F800000, 0x3F808000, 0x3F808001, 0x3F818000, 0x7F7FFFFF], np.uint32)
    assert [hex(x) for x in cast(fp32, "F32", "BF16")] == [
        "0x3f80",  # 1 is 1
        "0x3f80",  # halfway between 0x3f80 and 0x3f81: down to the even one
        "0x3f81",  # a little more than halfway: up
        "0x3f82",  # halfway between 0x3f81 and 0x3f82: up to the even one
        "0x7f80",  # the largest fp32 is beyond bf16's largest: infinity
    ]


def test_the_same_type_is_left_alone() -> None:
    raw = every_value("F16")
    assert cast(raw, "F16", "F16") is raw


@pytest.mark.parametrize("shape", [(4, 3), (2, 2, 3), (12,), (12, 1)])
def test_a_cast_keeps_the_shape(shape: tuple[int, ...]) -> None:
    raw = np.arange(12, dtype=np.uint16).reshape(shape)
    assert cast(raw, "BF16", "F32").shape == shape
    assert cast(raw, "BF16", "F8_E4M3").shape == shape


# ------------------------------------------------------------------------------------------------ exactness


@pytest.mark.parametrize(("source", "target"), list(product(("BF16", "F16", *FLOAT8), sorted(FLOATS))))
def test_what_is_declared_to_widen_comes_back_and_what_narrows_does_not(source: str, target: str) -> None:
    raw = every_value(source)
    there = cast(raw, source, target)
    back = cast(there, target, source)
    nan = np.isnan(as_floats(raw, source))
    comes_back = np.array_equal(back[~nan], raw[~nan])
    kind = exactness(source, target)
    assert comes_back == (kind in ("bitwise", "widen"))
    assert (kind == "bitwise") == (source == target)


def test_exactness_of_wide_types() -> None:
    assert exactness("F32", "F64") == "widen"
    assert exactness("F64", "F32") == "narrow"
    assert exactness("F32", "BF16") == "narrow"
    assert exactness("F32", "F32") == "bitwise"
    assert exactness("I64", "I32") == "narrow"
    assert exactness("I64", "I64") == "bitwise"


def test_the_narrowest_common_type() -> None:
    assert widest({"BF16"}) == "BF16"
    assert widest({"BF16", "F32"}) == "F32"
    assert widest({"BF16", "F16"}) == "F32"
    assert widest({"F8_E4M3", "F8_E5M2", "F16"}) == "F16"
    assert widest({"F32", "F64"}) == "F64"


# ------------------------------------------------------------------------------------------------ NaN


@pytest.mark.parametrize("dtype", ["BF16", "F16", *FLOAT8])
def test_every_nan_of_a_small_type_is_found_and_nothing_else(dtype: str) -> None:
    import torch

    raw = every_value(dtype)
    signed = torch.from_numpy(raw.view(np.int8 if raw.itemsize == 1 else np.int16))
    want = signed.view(getattr(torch, BY_NAME[dtype].torch)).to(torch.float32).isnan().numpy()
    have = np.array([has_nan(raw[n : n + 1], dtype) for n in range(raw.size)])
    assert np.array_equal(have, want)
    assert want.any()


@pytest.mark.parametrize(
    ("dtype", "fine", "nan"),
    [
        ("F32", [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0, 0x80000000], [0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF]),
        ("F64", [0x7FF << 52, 0xFFF << 52, 1], [(0x7FF << 52) + 1, (0xFFF << 52) + 1, (1 << 64) - 1]),
    ],
)
def test_infinities_are_no_nan(dtype: str, fine: list[int], nan: list[int]) -> None:
    kind = bits(BY_NAME[dtype].size)
    assert not has_nan(np.array(fine, kind), dtype)
    for value in nan:
        assert has_nan(np.array([0, value], kind), dtype)


def test_one_nan_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_SCAN", 7)
    raw = np.zeros((5, 8), np.uint16)
    assert not has_nan(raw, "BF16")
    for n in range(raw.size):
        poisoned = raw.copy()
        poisoned.reshape(-1)[n] = 0xFFC1
        assert has_nan(poisoned, "BF16")
        assert has_nan(poisoned.T, "BF16")  # however it lies in memory


@pytest.mark.parametrize("dtype", ["I64", "U8", "BOOL", "I32"])
def test_whole_numbers_have_no_nan(dtype: str) -> None:
    kind = bits(BY_NAME[dtype].size)
    assert not has_nan(np.array([0, np.iinfo(kind).max], kind), dtype)


def test_nothing_has_no_nan() -> None:
    assert not has_nan(np.empty((0, 3), np.uint16), "BF16")


# ------------------------------------------------------------------------------------------------ names of types


def test_numpys_types_have_the_sizes_that_the_names_say() -> None:
    for name, dtype in BY_NAME.items():
        assert numpy_dtype(name).itemsize == dtype.size, name
        assert bits(dtype.size).itemsize == dtype.size


def test_the_names_are_torchs_and_safetensors() -> None:
    import torch
    from safetensors.numpy import load, save

    for name, dtype in BY_NAME.items():
        assert getattr(torch, dtype.torch).itemsize == dtype.size, name
    for name in ("BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "F32", "F64", "U16", "U32", "U64"):
        raw = save({"x": np.zeros(2, numpy_dtype(name))})
        assert f'"dtype":"{name}"'.encode() in raw
        assert load(raw)["x"].dtype == numpy_dtype(name)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("bfloat16", "BF16"),
        ("torch.bfloat16", "BF16"),
        ("bf16", "BF16"),
        ("BF16", "BF16"),
        ("fp32", "F32"),
        ("float", "F32"),
        ("half", "F16"),
        ("float64", "F64"),
        ("float8_e4m3fn", "F8_E4M3"),
        ("int64", "I64"),
    ],
)
def test_what_a_user_may_call_a_type(text: str, want: str) -> None:
    assert parse(text).name == want


@pytest.mark.parametrize("text", ["", "float12", "torch.", "bfloat", "torch.nn"])
def test_what_is_no_type(text: str) -> None:
    with pytest.raises(ValueError, match=r"known: .*bfloat16"):
        parse(text)
