"""What hub and servers say to each other, and nothing else: the manifest, the header of a bucket, the states.

Weights travel as *blocks*: sub-boxes of the family's atoms (`layers.0.attn.q`, with its factored axes), which both
sides cut alike from the manifest, so that a block is called by its number alone. A *bucket* is some blocks after each
other, behind a header of 64 bytes. Every byte is hashed once on either side: a block has a digest, a bucket the digest
of its blocks' digests, and a version the *root*, the digest of all blocks' digests in order.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from ..dtypes import BY_NAME
from ..errors import ConvertError

PROTOCOL = 2
MAGIC = b"ARCSYNC1"
HEADER_BYTES = 64
_HEADER = struct.Struct("<8sQQIIQII16s")  # magic, epoch, version, sender, number, nbytes, blocks, flags, digest
assert _HEADER.size == HEADER_BYTES

MOST_NUMBERS = 1008
"""Blocks that a bucket has at most, however small they are."""
HEAD_BYTES = HEADER_BYTES + 4 * MOST_NUMBERS
"""Header and numbers, where a receiver has to know beforehand how much comes (process groups)."""

LAST = 1
"""Flag: the sender has no more buckets in this push."""
ABORT = 2
"""Flag: the push is off; the header has no payload."""
CALLED_OFF = "The hub called the push off"
"""How a server's error begins when it was not the server that failed."""

Mode = Literal["full", "delta", "lora"]
State = Literal["serving", "joined", "prepared", "receiving", "staged", "committing", "failed"]
"""Of a server. All but `committing` go on serving the committed version; `failed` waits for an abort."""


class ProtocolError(ConvertError):
    """A message is not what the protocol has here: another epoch or version, a bucket out of turn, damaged bytes."""


@dataclass(frozen=True, slots=True)
class Header:
    """In front of a bucket's payload: `blocks` numbers (uint32, little-endian), then the bytes of these blocks.

    number  of the bucket, counted from 0 for each sender
    nbytes  of the payload, numbers included
    digest  xxh3_128 of the numbers and of the blocks' digests (xxh3_128 each), in the order of the payload
    """

    epoch: int
    version: int
    sender: int
    number: int
    nbytes: int
    blocks: int
    digest: bytes
    flags: int = 0

    def pack(self) -> bytes:
        return _HEADER.pack(
            MAGIC, self.epoch, self.version, self.sender, self.number, self.nbytes, self.blocks, self.flags, self.digest
        )

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Header:
        """Raises ProtocolError for anything that is no header."""
        if len(data) != HEADER_BYTES or bytes(data[:8]) != MAGIC:
            raise ProtocolError(f"A bucket's header has {len(data)} bytes and begins with {bytes(data[:8])!r}.")
        _, epoch, version, sender, number, nbytes, blocks, flags, digest = _HEADER.unpack(data)
        return cls(epoch, version, sender, number, nbytes, blocks, digest, flags)


@dataclass(frozen=True, slots=True)
class Atom:
    """A tensor as it travels: in the server's element type (safetensors' names: BF16, F32, …)."""

    name: str
    shape: tuple[int, ...]
    dtype: str


Box = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A box of an atom: its number in the manifest, lower bounds, upper bounds (elements)."""


@dataclass(slots=True)
class Manifest:
    """One push, said before any byte of it.

    senders  for every sender the boxes that it sends, in order; all together they tile every atom once
    block    bytes that a block has at most; `bucket` the bytes of a bucket's payload at most
    base     (delta) the version and the root that the blocks are changes of; else None
    model    family and sizes, for a server to compare with its own
    lora     (lora) name, rank, alpha, target modules: what a PEFT adapter_config.json says; atoms are its tensors
    """

    run: str
    epoch: int
    version: int
    mode: Mode
    atoms: list[Atom]
    senders: list[list[Box]]
    block: int
    bucket: int
    base: tuple[int, str] | None = None
    model: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    protocol: int = PROTOCOL

    def to_json(self) -> dict[str, Any]:
        """As plain data. A box that is all of its atom is its number alone."""
        shapes = [a.shape for a in self.atoms]
        return {
            "protocol": self.protocol,
            "run": self.run,
            "epoch": self.epoch,
            "version": self.version,
            "mode": self.mode,
            "atoms": [[a.name, list(a.shape), a.dtype] for a in self.atoms],
            "senders": [
                [n if hi == shapes[n] and not any(lo) else [n, list(lo), list(hi)] for n, lo, hi in boxes]
                for boxes in self.senders
            ],
            "block": self.block,
            "bucket": self.bucket,
            "base": list(self.base) if self.base is not None else None,
            "model": self.model,
            "lora": self.lora,
        }

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """From what a hub sent. Raises ProtocolError naming the field that is missing or no such thing."""
        if not isinstance(data, Mapping):
            raise ProtocolError(f"A manifest is a JSON object; this is {type(data).__name__}.")
        protocol = _field(data, "protocol", int)
        if protocol != PROTOCOL:
            raise ProtocolError(
                f"The hub speaks version {protocol} of the protocol, this server version {PROTOCOL}.",
                hint="Install the same version of areal-convert on both sides.",
            )
        mode = _field(data, "mode", str)
        if mode not in get_args(Mode):
            raise ProtocolError(f"mode: {mode!r} is none of {', '.join(get_args(Mode))}.")
        atoms = [_atom(n, a) for n, a in enumerate(_field(data, "atoms", list))]
        senders = [
            [_box(s, n, box, atoms) for n, box in enumerate(_listed(f"senders[{s}]", boxes))]
            for s, boxes in enumerate(_field(data, "senders", list))
        ]
        base = data.get("base")
        if base is not None and not (_is_list(base, 2) and _is_number(base[0]) and isinstance(base[1], str)):
            raise ProtocolError(f"base: {base!r} is no [version, root].")
        lora = data.get("lora")
        if lora is not None and not isinstance(lora, Mapping):
            raise ProtocolError(f"lora: {lora!r} is no object.")
        return cls(
            run=_field(data, "run", str),
            epoch=_field(data, "epoch", int),
            version=_field(data, "version", int),
            mode=cast("Mode", mode),
            atoms=atoms,
            senders=senders,
            block=_positive(data, "block"),
            bucket=_positive(data, "bucket"),
            base=(base[0], base[1]) if base is not None else None,
            model=dict(_field(data, "model", Mapping)),
            lora=dict(lora) if lora is not None else None,
        )


# ------------------------------------------------------------------------------------------------ reading JSON


def _field(data: Mapping[str, Any], name: str, kind: type) -> Any:
    value = data.get(name)
    if not isinstance(value, kind) or (kind is int and not _is_number(value)):
        found = "missing" if name not in data else f"{str(value)[:40]!r}"
        raise ProtocolError(f"{name}: {found} in the manifest; expected {kind.__name__}.")
    return value


def _positive(data: Mapping[str, Any], name: str) -> int:
    value: int = _field(data, name, int)
    if value <= 0:
        raise ProtocolError(f"{name}: {value} in the manifest; more than 0 bytes were expected.")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == length


def _listed(where: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise ProtocolError(f"{where}: {str(value)[:40]!r} is no list.")
    return value


def _numbers(where: str, value: Any) -> tuple[int, ...]:
    if not (isinstance(value, (list, tuple)) and all(_is_number(x) for x in value)):
        raise ProtocolError(f"{where}: {str(value)[:40]!r} is no list of sizes.")
    return tuple(value)


def _atom(n: int, value: Any) -> Atom:
    if not (_is_list(value, 3) and isinstance(value[0], str) and isinstance(value[2], str)):
        raise ProtocolError(f"atoms[{n}]: {str(value)[:80]!r} is no [name, shape, dtype].")
    if value[2] not in BY_NAME:
        raise ProtocolError(f"atoms[{n}] ({value[0]}): there is no element type {value[2]!r}.")
    return Atom(value[0], _numbers(f"atoms[{n}]", value[1]), value[2])


def _box(sender: int, n: int, value: Any, atoms: Sequence[Atom]) -> Box:
    where = f"senders[{sender}][{n}]"
    number: Any = value[0] if _is_list(value, 3) else value
    if not _is_number(number) or number >= len(atoms):
        raise ProtocolError(f"{where}: {str(value)[:80]!r} is no box of one of the {len(atoms)} atoms.")
    shape = atoms[number].shape
    if number is value:
        return number, (0,) * len(shape), shape
    lo, hi = _numbers(where, value[1]), _numbers(where, value[2])
    if len(lo) != len(shape) or len(hi) != len(shape) or any(a >= b for a, b in zip(lo, hi, strict=True)):
        raise ProtocolError(f"{where}: {list(lo)}..{list(hi)} is no box of {atoms[number].name} {list(shape)}.")
    return number, lo, hi
