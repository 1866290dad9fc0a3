"""The new weights as whole tensors under Hugging Face's names, for servers of others (`sink.FencedSink`).

A tensor is put together when its turn comes. With several sender ranks every rank gives its part of it to the first
one; nothing is held beyond that tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..codecs import Array, bits, has_nan
from ..dtypes import BY_NAME, parse
from ..errors import Problems, SourceError
from ..layout import Named, View, contiguous
from ..mesh import Mesh
from ..peers import Peers
from ..slots import Box, Buffer, Slot, intersect
from ..target import Options, dtype_of, place
from .sink import Wanted
from .source import AtomBox, Source, empty_like

_Part = tuple[str, Box, bytes]


class SourceFeed:
    """See `sink.Feed`. On the first rank a server's dialect iterates over `tensors`; the others `serve` meanwhile.

    The send loop has looked for NaN before any server was paused (`sending`); a live model may have changed since."""

    def __init__(self, source: Source, peers: Peers, *, allow_nan: bool = False) -> None:
        self._source, self._peers, self._allow_nan = source, peers, allow_nan
        ckpt = source.checkpoint
        self._view = View(ckpt.table.hf, ckpt.view.dims)
        boxes = source.senders()[peers.rank] if peers.world > 1 else []
        self._mine: dict[str, list[Box]] = {}
        for name, box in boxes:
            self._mine.setdefault(name, []).append(box)

    def wanted(self, dtype: str | None = None) -> list[Wanted]:
        ckpt = self._source.checkpoint
        options = Options(dtype=parse(dtype).name if dtype else None)
        locals_ = place(ckpt, "hf", Mesh(), options).locals
        of = dtype_of(ckpt, options, locals_)
        return [Wanted(x.named.name, tuple(x.named.geometry.shape), of(x.named)) for x in locals_]

    def tensors(self, wanted: Sequence[Wanted]) -> Iterator[tuple[Wanted, Array]]:
        named = self._resolved(wanted)
        for want in wanted:
            if self._peers.world > 1:
                self._peers.exchange(want)
            data = self._assembled(want, named[want.name])
            if not self._allow_nan and has_nan(data, want.dtype):
                raise SourceError(
                    f"{want.name} of {self._source.label} holds NaN: it is not sent.",
                    hint="A broken save, or a run that diverged; --allow-nan or allow_nan=True sends it all the same.",
                )
            yield want, data

    def end(self) -> None:
        """On the first rank, after the last server: the others need not wait any more."""
        if self._peers.world > 1:
            self._peers.exchange(None)

    def serve(self) -> None:
        """On every rank but the first: give parts of tensors until the first one says that it was the last."""
        while (want := self._peers.exchange(None)[0]) is not None:
            named = self._resolved([want])
            self._peers.exchange(self._parts(want, named[want.name]))

    # -------------------------------------------------------------------------------------------- underneath

    def _resolved(self, wanted: Sequence[Wanted]) -> dict[str, Named]:
        """What the names mean. Raises SourceError with all that mean nothing, or have another shape."""
        problems, found = Problems(), dict[str, Named]()
        for want in wanted:
            named, fault = self._view.resolve(want.name, want.shape)
            if named is None or fault:
                problems.add(want.name, fault or "is no tensor of the family")
            else:
                found[want.name] = named
        problems.raise_as(SourceError, f"{self._source.label} has no such tensors:")
        return found

    def _slots(self, want: Wanted, named: Named) -> list[tuple[str, Slot]]:
        size = BY_NAME[want.dtype].size
        buffer = Buffer("", 0, 0, want.name)
        return list(contiguous(named, want.shape, buffer, size, want.dtype))

    def _assembled(self, want: Wanted, named: Named) -> Array:
        size = BY_NAME[want.dtype].size
        out = np.zeros(want.shape, bits(size))
        slots = self._slots(want, named)
        if self._peers.world > 1:
            answers = self._peers.exchange(self._parts(want, named))
            parts = [part for answer in answers for part in answer]
        else:
            parts = [(atom, slot.box, self._read((atom, slot.box), want.dtype)) for atom, slot in slots]
        homes: dict[str, list[Slot]] = {}
        for atom, slot in slots:
            homes.setdefault(atom, []).append(slot)
        for atom, box, data in parts:
            values = np.frombuffer(data, bits(size)).reshape(box.sizes)
            for slot in homes.get(atom, ()):
                common = intersect(slot.box, box)
                if common is not None:
                    _region(out, slot, common)[...] = _cut(values, box, common)
        return out

    def _parts(self, want: Wanted, named: Named) -> list[_Part]:
        """What this rank has of a tensor."""
        found: list[_Part] = []
        for atom, slot in self._slots(want, named):
            for box in self._mine.get(atom, ()):
                common = intersect(slot.box, box)
                if common is not None:
                    found.append((atom, common, self._read((atom, common), want.dtype)))
        return found

    def _read(self, what: AtomBox, dtype: str) -> Any:
        out = empty_like(what[1], dtype)
        self._source.read(what[0], what[1], dtype, out)
        return out if self._peers.world == 1 else out.tobytes()


def _region(out: Array, slot: Slot, box: Box) -> Array:
    """Where a box of an atom lies in the tensor."""
    return np.ndarray(box.sizes, out.dtype, out, slot.at(box.lo), slot.strides)


def _cut(values: Array, outer: Box, box: Box) -> Array:
    return values[tuple(slice(a - o, b - o) for a, b, o in zip(box.lo, box.hi, outer.lo, strict=True))]
