"""Elementwise changes of representation: casts between element types, each with its declared exactness.

A conversion that only permutes bytes never comes here. `numpy` has no bfloat16 and no FP8; `ml_dtypes` supplies them,
with round-to-nearest-even, as torch has it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from .dtypes import BY_NAME, FLOATS

Array = np.ndarray[Any, Any]

_MANTISSA = {"F64": (52, 11), "F32": (23, 8), "F16": (10, 5), "BF16": (7, 8), "F8_E4M3": (3, 4), "F8_E5M2": (2, 5)}
"""Bits of the fraction and of the exponent (IEEE 754; OCP 8-bit floating point, table 1)."""

_BITS = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


def bits(itemsize: int) -> np.dtype[Any]:
    """The unsigned type in which elements of this size are moved."""
    return _BITS[itemsize]


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's (or ml_dtypes') type for a safetensors name."""
    plain = {"BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "U16": "<u2"}
    plain |= {"U32": "<u4", "U64": "<u8", "F16": "<f2", "F32": "<f4", "F64": "<f8"}
    if name in plain:
        return np.dtype(plain[name])
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, BY_NAME[name].torch))


def exactness(source: str, target: str) -> str:
    """`bitwise` (same type), `widen` (every value has an equal one in the target) or `narrow` (values are rounded)."""
    if source == target:
        return "bitwise"
    if source in FLOATS and target in FLOATS:
        fraction, exponent = _MANTISSA[source]
        fraction2, exponent2 = _MANTISSA[target]
        return "widen" if fraction <= fraction2 and exponent <= exponent2 else "narrow"
    return "narrow"


def widest(names: set[str]) -> str:
    """The smallest type to which all of `names` widen; F32 where none of them is that (F16 with BF16)."""
    for name in sorted(names, key=lambda n: BY_NAME[n].size):
        if all(exactness(other, name) != "narrow" for other in names):
            return name
    return "F32"


def cast(data: Array, source: str, target: str) -> Array:
    """Values of `data` (raw bits of type `source`) as raw bits of type `target`, rounded to nearest even."""
    if source == target:
        return data
    values = data.view(numpy_dtype(source))
    with np.errstate(over="ignore", invalid="ignore"):
        if BY_NAME[source].size + BY_NAME[target].size <= 3 and {source, target} & {"F8_E4M3", "F8_E5M2"}:
            values = values.astype(np.float32)
        return values.astype(numpy_dtype(target)).view(bits(BY_NAME[target].size))


_NAN_ABOVE = {
    "BF16": 0x7F80,
    "F16": 0x7C00,
    "F32": 0x7F800000,
    "F64": 0x7FF0000000000000,
    "F8_E4M3": 0x7E,
    "F8_E5M2": 0x7C,
}
"""The largest magnitude, as bits without the sign, that is no NaN."""

_SCAN = 1 << 20
"""Bytes looked at in one go: few enough to stay in a core's cache for the second look."""


def has_nan(data: Array, dtype: str) -> bool:
    """Whether raw bits of a floating-point type hold a NaN.

    The bits of a NaN are above those of infinity: as signed numbers where its sign is clear, as unsigned ones where it
    is set. So two maxima tell, and nothing is written.
    """
    limit = _NAN_ABOVE.get(dtype)
    if limit is None:
        return False
    flat = data.reshape(-1)
    sign = 1 << (8 * flat.itemsize - 1)
    step = max(1, _SCAN // flat.itemsize)
    for start in range(0, flat.size, step):
        part = flat[start : start + step]
        if int(part.view(f"i{flat.itemsize}").max()) > limit or int(part.max()) > sign | limit:
            return True
    return False
