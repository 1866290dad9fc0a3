"""How tensors stand in the pickles of `torch.save`, and what they become here: references to bytes.

The functions that a pickle calls are those of torch/_utils.py (`_rebuild_tensor_v2` and its kin) and torch/_tensor.py
(`_rebuild_from_type_v2`); a persistent id stands for a storage (torch/serialization.py `_load`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ..dtypes import BY_STORAGE, BY_TORCH, DType
from ..errors import Problems
from .pickle_values import Builder, Global, Opaque

# Types that occur in torch's files but are nothing that we move; they are told apart and measured.
_FURTHER = {
    dtype.torch: dtype
    for dtype in (
        DType("C64", "complex64", "ComplexFloatStorage", 8),
        DType("C128", "complex128", "ComplexDoubleStorage", 16),
        DType("F8_E4M3FNUZ", "float8_e4m3fnuz", "UntypedStorage", 1),
        DType("F8_E5M2FNUZ", "float8_e5m2fnuz", "UntypedStorage", 1),
        DType("F8_E8M0", "float8_e8m0fnu", "UntypedStorage", 1),
        DType("F4_X2", "float4_e2m1fn_x2", "UntypedStorage", 1),
    )
}
Kind = TypeVar("Kind")
_BYTES = DType("U8", "uint8", "UntypedStorage", 1)
_STORAGES = {**BY_STORAGE, **{dtype.storage: dtype for dtype in _FURTHER.values()}, "UntypedStorage": _BYTES}


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where a tensor lies: element [i, j] starts at byte `offset + (i * strides[0] + j * strides[1]) * itemsize`.

    `storage` is the byte range, offset and size, of the storage that it views; tied tensors have the same one.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    file: Path
    offset: int
    storage: tuple[int, int]
    parameter: bool = False


@dataclass(frozen=True, slots=True)
class DTensorRef:
    """One rank's part of a DTensor.

    `placements` are `("Shard", dim)`, `("Replicate",)`, `("_StridedShard", dim, factor)`, one per mesh dimension;
    `coordinate` is the rank's place in the mesh, where the file says so.
    """

    dtype: str
    shape: tuple[int, ...]
    local: TensorRef
    placements: tuple[tuple[Any, ...], ...]
    mesh_shape: tuple[int, ...] | None
    mesh_names: tuple[str, ...] | None
    coordinate: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Storage:
    """A record of raw bytes: what the pickle says of it, and where it is."""

    key: str
    dtype: DType
    offset: int
    nbytes: int


class Tensors:
    """Turns the storages and tensors of one pickle into references; what does not fit goes to `problems`.

    This base knows no file: its only storage is at 0, and as large as the pickle says.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.problems = Problems()
        self.storages: dict[str, Storage] = {}
        self.tensors = 0

    def find(self, key: str, dtype: DType, nbytes: int) -> Storage:
        """The storage `key`, which must hold `nbytes`."""
        return Storage(key, dtype, 0, nbytes)

    def storage(self, identity: Any) -> Storage:
        """What a persistent id stands for: `("storage", class, key, location, number of elements)`."""
        if type(identity) is not tuple or len(identity) not in (5, 6) or identity[0] != "storage":
            raise ValueError("a persistent id that torch does not write")
        _, kind, key, _, count = identity[:5]
        if type(kind) is not Global or type(key) is not str or type(count) is not int or not 0 <= count < 1 << 60:
            raise ValueError("a persistent id that torch does not write")
        dtype = _STORAGES.get(kind.name)
        if dtype is None:
            raise ValueError(f"a storage of the kind {kind}")
        if key not in self.storages:
            self.storages[key] = self.find(key, dtype, count * dtype.size)
        return self.storages[key]

    def tensor(self, storage: Any, start: Any, shape: Any, strides: Any, dtype: DType | None = None) -> TensorRef:
        """A view of a storage, checked to lie within it."""
        if type(storage) is not Storage:
            raise ValueError("a tensor without a storage")
        kind = dtype or storage.dtype
        self.tensors += 1
        extent = _extent(start, shape, strides) * kind.size
        if extent > storage.nbytes:
            self.problems.add(
                f"tensor {self.tensors} in the file",
                f"shape {list(shape)} of {kind} from element {start} on needs {extent} bytes of storage {storage.key}, "
                f"found {storage.nbytes}",
            )
        place = (storage.offset, storage.nbytes)
        return TensorRef(kind.name, tuple(shape), tuple(strides), self.file, storage.offset + start * kind.size, place)

    def builders(self) -> dict[tuple[str, str], Builder]:
        """For the pickle machine: what the names that rebuild tensors build."""
        return {
            ("torch._utils", "_rebuild_tensor"): self._v2,
            ("torch._utils", "_rebuild_tensor_v2"): self._v2,
            ("torch._utils", "_rebuild_tensor_v3"): self._v3,
            ("torch._utils", "_rebuild_parameter"): self._parameter,
            ("torch._utils", "_rebuild_parameter_with_state"): self._parameter,
            ("torch._tensor", "_rebuild_from_type_v2"): self._from_type,
        }

    def _v2(self, storage: Any, start: Any, shape: Any, strides: Any, *_rest: Any) -> TensorRef:
        return self.tensor(storage, start, shape, strides)

    def _v3(
        self, storage: Any, start: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, *_rest: Any
    ) -> TensorRef:
        return self.tensor(storage, start, shape, strides, torch_dtype(dtype))

    def _parameter(self, data: Any, *_rest: Any) -> Any:
        return replace(data, parameter=True) if type(data) is TensorRef else data

    def _from_type(self, func: Any, kind: Any, args: Any, state: Any) -> Any:
        if type(func) is not Global or type(kind) is not Global or type(args) is not tuple:
            raise ValueError("a tensor of a class that is no name")
        if kind.name == "DTensor":
            return _dtensor(state)
        return func.build(*args) if func.build else Opaque(kind.module, kind.name, args, state)


def _extent(start: Any, shape: Any, strides: Any) -> int:
    """How many elements a storage must have for this view."""
    numbers = (start, *shape, *strides)
    if len(shape) != len(strides) or not all(type(n) is int and 0 <= n < 1 << 60 for n in numbers):
        raise ValueError("a tensor whose shape and strides are no plain numbers")
    if 0 in shape:
        return 0
    return start + 1 + sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True))


def torch_dtype(value: Any) -> DType:
    """The type that the name `torch.bfloat16` in a pickle means."""
    if type(value) is Global and value.module == "torch":
        found = BY_TORCH.get(value.name) or _FURTHER.get(value.name)
        if found is not None:
            return found
    raise ValueError(f"a tensor of the type {value if type(value) is Global else type(value).__name__}")


def _dtensor(state: Any) -> DTensorRef:
    """torch/distributed/tensor/_api.py: a DTensor's own fields are `_local_tensor` and `_spec`."""
    fields: dict[Any, Any] = {}
    for part in state if type(state) is tuple else (state,):
        fields |= part if type(part) is dict else {}
    spec, local = fields.get("_spec"), fields.get("_local_tensor")
    if type(spec) is not Opaque or type(local) is not TensorRef:
        raise ValueError("a DTensor without its specification")
    meta, mesh, placements = spec.get("tensor_meta"), spec.get("mesh"), spec.get("placements")
    if type(meta) is not Opaque or type(mesh) is not Opaque or type(placements) is not tuple:
        raise ValueError("a DTensor without shape, mesh or placements")
    shape, _, dtype = meta.args if len(meta.args) == 3 else (meta.get("shape"), None, meta.get("dtype"))
    extents, names = _tuple_of(int, shape), mesh.get("_mesh_dim_names") or mesh.get("mesh_dim_names")
    if extents is None:
        raise ValueError("a DTensor without a shape")
    return DTensorRef(
        torch_dtype(dtype).name,
        extents,
        replace(local, parameter=bool(fields.get("_is_param"))),
        tuple(_placement(placement) for placement in placements),
        _mesh_shape(mesh),
        _tuple_of(str, names),
        _tuple_of(int, mesh.get("_coordinate_on_dim")),
    )


def _tuple_of(kind: type[Kind], value: Any) -> tuple[Kind, ...] | None:
    """`value` if it is such a tuple (lists pass too), and nothing else: what a file holds may be anything."""
    if type(value) not in (tuple, list) or not all(type(item) is kind for item in value):
        return None
    return tuple(value)


def _placement(value: Any) -> tuple[Any, ...]:
    if type(value) is not Opaque:
        raise ValueError("a placement that is none")
    fields = [value.get("dim"), value.get("split_factor")] if value.state is not None else value.args
    return (value.name, *(field for field in fields if type(field) is int))


def _mesh_shape(mesh: Opaque) -> tuple[int, ...] | None:
    """A mesh was a tensor of ranks first, then a layout with a shape; torch 2.13's layout has an axis per dimension."""
    ranks, layout = mesh.get("mesh"), mesh.get("_layout")
    if type(ranks) is TensorRef:
        return ranks.shape
    if type(layout) is not Opaque:
        return None
    axes = layout.get("axes")
    shapes = (
        [axis.get("shape") for axis in axes if type(axis) is Opaque] if type(axes) is tuple else [layout.get("shape")]
    )
    return _tuple_of(int, [extent for shape in shapes for extent in (shape if type(shape) is tuple else (shape,))])
