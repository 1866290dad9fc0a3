"""What may stand in a pickle, and the inert values that it becomes here.

No name in a pickle is ever imported. A name on the list below becomes a `Global`, a call of it an `Opaque` (or,
for a handful of plain values such as `torch.Size`, the value itself, made by a function of this module). A name
that is not on the list makes the whole file refused: an `os.system` in a checkpoint is worth an alarm, although
nothing here could run it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

Builder = Callable[..., Any]


@dataclass(slots=True)
class Global:
    """A name that a pickle refers to, `torch.bfloat16` or a class; never the thing that it names."""

    module: str
    name: str
    build: Builder | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def __hash__(self) -> int:
        return hash((self.module, self.name))


@dataclass(slots=True, eq=False)
class Opaque:
    """The description of an object that a pickle builds: which name it calls, with what, and its state.

    `new` tells the two ways apart in which a pickle builds: by calling the name, or by its `__new__`.
    """

    module: str
    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    kwargs: dict[str, Any] | None = None
    new: bool = False

    def get(self, key: str, default: Any = None) -> Any:
        """A field of the object, where its state is the usual dict of them."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default


# The names that pickles of protocol 2 use for what moved in Python 3.
RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}

_NAMES = """
collections: OrderedDict defaultdict Counter deque
argparse: Namespace
builtins: set frozenset bytearray bytes complex slice range bool int float str list tuple dict object getattr
copyreg: _reconstructor
datetime: timedelta datetime date time timezone
pathlib: Path PurePath PosixPath PurePosixPath WindowsPath PureWindowsPath
pathlib._local: Path PurePath PosixPath PurePosixPath WindowsPath PureWindowsPath
signal: Signals
types: SimpleNamespace
functools: partial
uuid: UUID SafeUUID
_codecs: encode
_io: BytesIO
io: BytesIO
numpy: dtype ndarray bool_ str_ bytes_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64
numpy.core.multiarray: scalar _reconstruct
numpy._core.multiarray: scalar _reconstruct
numpy.core.numeric: _frombuffer
numpy._core.numeric: _frombuffer
numpy.random._pickle: __randomstate_ctor __generator_ctor __bit_generator_ctor
torch: Size Tensor device Generator SymInt strided sparse_coo bool uint8 uint16 uint32 uint64 int8 int16 int32 int64
torch: float16 bfloat16 float32 float64 half float double short int long complex32 complex64 complex128
torch: float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2
torch: qint8 quint8 qint32 quint4x2 quint2x4 bits8 bits16
torch: UntypedStorage ByteStorage CharStorage ShortStorage IntStorage LongStorage BoolStorage HalfStorage
torch: BFloat16Storage FloatStorage DoubleStorage ComplexFloatStorage ComplexDoubleStorage
torch: QInt8Storage QUInt8Storage QInt32Storage
torch._C: device
torch._C._nn: gelu
torch._utils: _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter _rebuild_parameter_with_state
torch._utils: _rebuild_wrapper_subclass _rebuild_meta_tensor_no_storage _rebuild_sparse_tensor _rebuild_nested_tensor
torch._utils: _rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor
torch._tensor: _rebuild_from_type_v2
torch.nn.functional: gelu silu relu sigmoid tanh softmax
torch.nn.parameter: Parameter Buffer
torch.serialization: _get_layout
torch.storage: UntypedStorage TypedStorage
"""

ALLOWED: frozenset[tuple[str, str]] = frozenset(
    (module, name)
    for line in _NAMES.strip().splitlines()
    for module, _, names in [line.partition(": ")]
    for name in names.split()
)

# Packages whose pickled objects are settings, enums and records. All of it stays an inert description.
PACKAGES = (
    "megatron",
    "transformer_engine",
    "nemo",
    "mbridge",
    "areal",
    "verl",
    "slime",
    "apex",
    "deepspeed",
    "torchtitan",
    "omegaconf",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch.distributed._tensor",
    "torch.distributed.device_mesh",
    "torch.distributed._mesh_layout",
    "torch.distributed._shard",
    "torch.distributed._pycute",
)


def allowed(module: str, name: str) -> bool:
    """Whether a pickle may speak of `module.name`."""
    if (module, name) in ALLOWED:
        return True
    return any(module == package or module.startswith(package + ".") for package in PACKAGES)


def _size(shape: Any = ()) -> tuple[int, ...]:
    if type(shape) is not tuple and type(shape) is not list:
        raise ValueError("torch.Size of something that is not a tuple")
    return tuple(shape)


def _dict(items: Any = ()) -> dict[Any, Any]:
    if type(items) is dict:
        return dict(items)
    out: dict[Any, Any] = {}
    for key, value in _plain(items):
        out[hashable(key)] = value
    return out


def _plain(items: Any) -> Any:
    if type(items) not in (list, tuple, set, frozenset):
        raise ValueError(f"a collection of {type(items).__name__}")
    return items


def _bytes(text: Any = b"", encoding: Any = "latin1") -> bytes:
    """How protocol 2, which has no bytes, spells them: as characters 0 to 255. Lengths (`bytes(9)`) are refused."""
    if type(text) is bytes:
        return text
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes in another form than Python writes")
    return text.encode("latin-1")


def _layout(name: Any) -> Global:
    if type(name) is not str:
        raise ValueError("a layout that is no name")
    return Global("torch", name.removeprefix("torch."))


def _member(owner: Any, name: Any) -> Opaque:
    """Python 3.11.0 to 3.11.4 pickled an enum's member as `getattr(Class, "NAME")`. Only of classes that are inert."""
    if type(owner) is not Global or type(name) is not str or owner.module.split(".")[0] == "builtins":
        raise ValueError("getattr of something other than an enum")
    return Opaque(owner.module, f"{owner.name}.{name}")


def _posix(*parts: Any) -> PurePosixPath:
    return PurePosixPath(*_texts(parts))


def _windows(*parts: Any) -> PureWindowsPath:
    return PureWindowsPath(*_texts(parts))


def _texts(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    if not all(type(part) is str for part in parts):
        raise ValueError("a path of something that is not text")
    return parts


def _scalar(dtype: Any, raw: Any = None) -> Any:
    """A numpy scalar, as the Python number that it is."""
    code = dtype.args[0] if isinstance(dtype, Opaque) and dtype.args else None
    form = {"b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q"}
    form |= {"f2": "e", "f4": "f", "f8": "d"}
    if code not in form or type(raw) is not bytes:
        return Opaque("numpy", "scalar", (dtype, raw))
    order = dtype.state[1] if type(dtype.state) is tuple and len(dtype.state) > 1 else "<"
    return struct.unpack((">" if order == ">" else "<") + form[code], raw)[0]


def hashable(key: Any) -> Any:
    """`key`, when it may become a key. A tuple's hash walks all of it, in C and without a limit: we limit it first."""
    if type(key) in (str, int, float, bool, bytes, complex, type(None), Global, Opaque):
        return key
    todo, seen = [(key, 0)], 0
    while todo:
        item, depth = todo.pop()
        seen += 1
        if seen > 10_000 or depth > 50:
            raise ValueError("an absurdly large key of a dictionary")
        if type(item) is tuple:
            todo += [(part, depth + 1) for part in item]
    hash(key)
    return key


BUILDERS: dict[tuple[str, str], Builder] = {
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): _dict,
    ("builtins", "dict"): _dict,
    ("builtins", "list"): lambda items=(): list(_plain(items)),
    ("builtins", "tuple"): lambda items=(): tuple(_plain(items)),
    ("builtins", "set"): lambda items=(): {hashable(item) for item in _plain(items)},
    ("builtins", "frozenset"): lambda items=(): frozenset(hashable(item) for item in _plain(items)),
    ("builtins", "bytes"): _bytes,
    ("builtins", "bytearray"): _bytes,
    ("builtins", "getattr"): _member,
    ("_codecs", "encode"): _bytes,
    ("torch.serialization", "_get_layout"): _layout,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy._core.multiarray", "scalar"): _scalar,
    **{(module, name): _posix for module, name in ALLOWED if module.startswith("pathlib")},
    **{(module, name): _windows for module, name in ALLOWED if module.startswith("pathlib") and "Windows" in name},
}
