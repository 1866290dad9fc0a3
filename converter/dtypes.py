"""Element types, named as safetensors names them, and what each format and library calls them.

Nothing here imports torch: a conversion moves bytes, and most never looks at a value.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """`name` is safetensors' name, `torch` torch's (without the `torch.`), `storage` the legacy storage class
    that `torch.save` writes into its pickles, `size` bytes per element."""

    name: str
    torch: str
    storage: str
    size: int

    def __str__(self) -> str:
        return self.name


_ALL = (
    DType("BOOL", "bool", "BoolStorage", 1),
    DType("U8", "uint8", "ByteStorage", 1),
    DType("I8", "int8", "CharStorage", 1),
    DType("I16", "int16", "ShortStorage", 2),
    DType("I32", "int32", "IntStorage", 4),
    DType("I64", "int64", "LongStorage", 8),
    DType("F16", "float16", "HalfStorage", 2),
    DType("BF16", "bfloat16", "BFloat16Storage", 2),
    DType("F32", "float32", "FloatStorage", 4),
    DType("F64", "float64", "DoubleStorage", 8),
    # torch writes these through UntypedStorage and `_rebuild_tensor_v3`, which carries the dtype itself.
    DType("U16", "uint16", "UntypedStorage", 2),
    DType("U32", "uint32", "UntypedStorage", 4),
    DType("U64", "uint64", "UntypedStorage", 8),
    DType("F8_E4M3", "float8_e4m3fn", "UntypedStorage", 1),
    DType("F8_E5M2", "float8_e5m2", "UntypedStorage", 1),
)

BY_NAME: dict[str, DType] = {d.name: d for d in _ALL}
BY_TORCH: dict[str, DType] = {d.torch: d for d in _ALL}
BY_STORAGE: dict[str, DType] = {d.storage: d for d in _ALL if d.storage != "UntypedStorage"}
FLOATS = frozenset({"F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"})

_ALIASES = {
    "bf16": "BF16",
    "fp16": "F16",
    "fp32": "F32",
    "float": "F32",
    "half": "F16",
}


def parse(text: str) -> DType:
    """The type that a user or a config means: `bfloat16`, `torch.bfloat16`, `bf16` and `BF16` are one.

    Raises ValueError for a name that is none of them.
    """
    name = text.removeprefix("torch.")
    found = BY_NAME.get(name.upper()) or BY_TORCH.get(name) or BY_NAME.get(_ALIASES.get(name.lower(), ""))
    if found is None:
        raise ValueError(f"unknown dtype {text!r}; known: {', '.join(sorted(BY_TORCH))}")
    return found
