"""A server's weights twice: one copy answers requests, the other takes a push, and a commit swaps the two.

    stage = Stage(module, config)
    with stage.reading() as (module, version):      # whoever answers a request
        module.generate(…)
    ledger = stage.begin(manifest, blocks, timeout=60)
    stage.put(number, data); …                       # any order, several threads
    stage.install(); …                               # module ↔ twin: two references change places

The second copy is made by the first push and used again by every later one, once nobody reads it any more. What no push
touches (buffers that are no weights, padding, `keep`) is the same in both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ..codecs import Array
from ..errors import Problems
from ..human import size_text
from . import memory
from .homes import Kept, describe_server, state_of
from .ledger import DIGEST, Ledger, layout_key, root_of
from .refusals import Refused
from .staging import buffers_of
from .unchanged import Unchanged
from .views import Memory
from .wire import Manifest

if TYPE_CHECKING:
    from .blocks import Blocks, Run

WORKERS = 2
"""Threads that compare or copy a whole model (delta pushes, digests)."""

SETTLE = 2.0
"""Seconds to wait until a push that was called off has let go of the second copy; then another one is made."""


@dataclass(eq=False)
class _Copy:
    target: Any
    version: int = -1
    readers: int = 0


@dataclass(frozen=True, eq=False)
class _Known:
    """Digests of the blocks of what serves: a delta push is checked against them. `key` tells how they are cut."""

    version: int
    root: str
    key: str
    digests: Array


@dataclass(eq=False)
class _Push:
    manifest: Manifest
    blocks: Blocks
    key: str
    ledger: Ledger
    memory: Memory
    flats: dict[int, Array | None] = field(default_factory=dict)
    unchanged: Unchanged | None = None
    root: str | None = None
    before: tuple[int, str | None, _Known | None] | None = None


class Stage:
    """Two copies of a module's, or a state dict's, weights. See the module's docstring.

    target   the module that serves, or a mapping of its tensors
    config   the model's config.json
    version  of what the target holds now; `root` its root, where one is known
    keep     regular expressions of tensors that are no part of the family's model and stay as they are
    twin     makes the second copy of a target, with memory of its own and the same aliases; None: `copy.deepcopy`
    free     bytes that are free on a device

    Raises PlanError when the target is not what the config says.
    """

    def __init__(
        self,
        target: Any,
        config: Mapping[str, Any],
        *,
        version: int = 0,
        root: str | None = None,
        keep: Sequence[str] = (),
        twin: Callable[[Any], Any] | None = None,
        free: memory.Free = memory.free,
    ) -> None:
        self.layout = describe_server(target, config, keep)
        self.version, self.root = version, root
        self.device = str(next(iter(memory.tensors_of(target))).device)
        self._copies: list[_Copy | None] = [_Copy(target, version), None]
        self._serving = 0
        self._turn = threading.Condition()
        self._twin, self._free = twin or memory.twin, free
        self._push: _Push | None = None
        self._known: _Known | None = None
        self._behind: tuple[str, Array] | None = None  # blocks in which the spare copy differs; None: who knows
        self._settled: Callable[[float], bool] | None = None  # whether a push that was called off has let go of it

    # -------------------------------------------------------------------------------------------- who serves

    def current(self) -> Any:
        """The module (or state dict) that serves now. Whoever uses it for long says so by `reading`."""
        return self._current().target

    def spare(self) -> Any | None:
        """The other one: None before the first push."""
        other = self._copies[1 - self._serving]
        return other.target if other is not None else None

    @contextmanager
    def reading(self) -> Iterator[tuple[Any, int]]:
        """The module that serves now, and its version: neither changes while somebody reads, whatever is committed."""
        with self._turn:
            held = self._current()
            held.readers += 1
        try:
            yield held.target, held.version
        finally:
            self._release(held)

    @property
    def readers(self) -> dict[str, int]:
        """How many read the copy that serves, and how many still read the one before it."""
        with self._turn:
            old = self._copies[1 - self._serving]
            return {"current": self._current().readers, "previous": old.readers if old is not None else 0}

    def _current(self) -> _Copy:
        held = self._copies[self._serving]
        assert held is not None
        return held

    def _release(self, held: _Copy) -> None:
        with self._turn:
            held.readers -= 1
            self._turn.notify_all()

    # -------------------------------------------------------------------------------------------- before a push

    def check(self, manifest: Manifest, problems: Problems) -> None:
        """Names, shapes and types of the manifest's atoms must be ours, both ways."""
        theirs = manifest.model.get("family")
        if theirs is not None and theirs != self.layout.family:
            problems.add("model", f"is {theirs!r}; this server has {self.layout.family!r}")
        ours = self.layout.atoms
        named = {atom.name for atom in manifest.atoms}
        for atom in manifest.atoms:
            own = ours.get(atom.name)
            if own is None:
                problems.add(atom.name, "is no tensor of this server's model")
            elif tuple(atom.shape) != own.shape:
                problems.add(atom.name, f"has shape {list(atom.shape)}; this server's is {list(own.shape)}")
            elif atom.dtype != own.dtype:
                problems.add(atom.name, f"is {atom.dtype}; this server's is {own.dtype}", "the hub casts")
        for name in sorted(ours.keys() - named):
            problems.add(name, "is not in the manifest; this server has it")

    def begin(self, manifest: Manifest, blocks: Blocks, timeout: float) -> Ledger:
        """Make the second copy, or wait until nobody reads it any more; for a delta, make it equal to the first."""
        spare = self._spare(manifest, timeout)
        state, layout = state_of(spare.target), self.layout
        moved = [name for name, kept in layout.kept.items() if name not in state or Kept.of(state[name]) != kept]
        if moved:
            raise Refused(
                "mismatch", f"{moved[0]} is no longer what it was when this server started (of {len(moved)})."
            )
        target, key = Memory(state, layout.homes), layout_key(manifest)
        behind, self._behind = self._behind, None
        base, unchanged = None, None
        if manifest.mode == "delta":
            base, copied = self._base(manifest, blocks, key, target, behind)
            self._behind = (key, np.empty(0, np.int64))
            left = np.setdiff1d(np.arange(blocks.count), copied, assume_unique=True)
            unchanged = Unchanged(target, manifest, blocks, left, base)
        ledger = Ledger(blocks, base)
        self._push = _Push(manifest, blocks, key, ledger, target, unchanged=unchanged)
        return ledger

    def _spare(self, manifest: Manifest, timeout: float) -> _Copy:
        """The copy that nobody reads."""
        if self._settled is not None and not self._settled(min(timeout, SETTLE)):
            self._copies[1 - self._serving] = None  # what is still written there would spoil what comes now
        self._settled = None
        made = self._copies[1 - self._serving]
        self._check_memory(manifest, made is None)
        if made is None:
            try:
                made = _Copy(self._twin(self._current().target))
            except (MemoryError, RuntimeError) as error:  # torch raises a RuntimeError when memory is out
                raise Refused("memory", f"The second copy cannot be allocated: {_first_line(error)}.") from error
            self._copies[1 - self._serving] = made
            self._behind = None
        end = time.monotonic() + timeout
        with self._turn:
            while made.readers:
                if not self._turn.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                    raise Refused(
                        "busy",
                        f"{made.readers} requests still read version {made.version} after {timeout:g} s; "
                        "its memory is needed for the next.",
                        hint="Try again when they have ended, or commit with in_flight=abort.",
                    )
        made.version = -1
        return made

    def _check_memory(self, manifest: Manifest, copy_too: bool) -> None:
        """Raise Refused where the second copy and two buckets are more than what is free."""
        needed = memory.bytes_of(self._current().target) if copy_too else {}
        needed["cpu"] = needed.get("cpu", 0) + buffers_of(manifest)
        for device, size in needed.items():
            there = self._free(device)
            if there is not None and size > there:
                raise Refused(
                    "memory",
                    f"A push needs {size_text(size)} on {device}; {size_text(there)} are free.",
                    hint="A server holds its weights twice while a push is under way.",
                    needed=size,
                    free=there,
                    device=device,
                )

    # -------------------------------------------------------------------------------------------- delta

    def _base(
        self, manifest: Manifest, blocks: Blocks, key: str, target: Memory, behind: tuple[str, Array] | None
    ) -> tuple[Array, Array]:
        """Digests of what serves now, cut as the push is, which must be the manifest's base; the spare copy is made
        equal to it on the way. With the numbers of the blocks that were copied for it. Raises Refused."""
        known = self._known if self._known is not None and self._known.key == key else None
        version, root = manifest.base or (-1, "")
        ours = known.root if known is not None else None
        if version != self._weights_version() or (ours is not None and root != ours):
            raise self._other_base(version, root, ours)
        source = Memory(state_of(self._current().target), self.layout.homes)
        fresh = behind is None or behind[0] != key or known is None
        numbers = np.arange(blocks.count) if fresh or behind is None else behind[1]
        digests = self._copy(source, target, manifest, blocks, numbers, known.digests if known is not None else None)
        if known is None:
            known = _Known(version, root_of(digests), key, digests)
            if root != known.root:
                raise self._other_base(version, root, known.root)
            self._known = known
        return known.digests, numbers

    def _weights_version(self) -> int:
        return self._current().version

    def _other_base(self, version: int, root: str, ours: str | None) -> Refused:
        have = self._weights_version()
        return Refused(
            "base_mismatch",
            f"The blocks are changes of version {version} ({root}); this server has version {have} ({ours or '?'}).",
            hint="Push this version in full.",
            version=have,
            root=ours,
        )

    def _copy(
        self, source: Memory, target: Memory, manifest: Manifest, blocks: Blocks, numbers: Array, known: Array | None
    ) -> Array:
        """Copy blocks from the copy that serves to the other, and return their digests; they must be the known ones."""
        digests = np.zeros((blocks.count, DIGEST), np.uint8)

        def some(part: Iterable[int]) -> None:
            for n in part:
                atom, lo, hi = blocks.box(n)
                name = manifest.atoms[atom].name
                data = source.get(name, lo, hi)
                digests[n] = np.frombuffer(xxhash.xxh3_128_digest(data.data), np.uint8)
                target.put(name, lo, hi, data)

        _in_threads(some, [int(n) for n in numbers])
        if known is not None and not np.array_equal(digests[numbers], known[numbers]):
            raise Refused("base_mismatch", "The weights that serve are no longer those that were pushed.")
        return digests

    # -------------------------------------------------------------------------------------------- a push

    def where(self, run: Run) -> Array | None:
        push = self._push
        if push is None:
            raise Refused("no_push", "There is no push to put a block into.")
        if run.cut not in push.flats:
            push.flats[run.cut] = push.memory.flat(push.manifest.atoms[run.atom].name, run.lo, run.hi)
        flat = push.flats[run.cut]
        return flat[run.begin : run.begin + run.nbytes] if flat is not None else None

    def put(self, number: int, data: Array) -> None:
        push = self._push
        if push is None:
            raise Refused("no_push", "There is no push to put a block into.")
        atom, lo, hi = push.blocks.box(number)
        push.memory.put(push.manifest.atoms[atom].name, lo, hi, data)

    def wait(self, timeout: float) -> bool:
        push = self._push
        return push is None or push.unchanged is None or push.unchanged.wait(timeout)

    def finish(self, root: str) -> None:
        push = self._push
        if push is None:
            return
        spoiled = self._spoiled(push, push.unchanged) if push.unchanged is not None else ""
        if spoiled:
            self._known = None
            raise Refused(
                "base_mismatch",
                f"{spoiled} is not what was pushed any more: somebody else wrote to these weights.",
                hint="Push this version in full.",
            )
        push.root = root

    def _spoiled(self, push: _Push, unchanged: Unchanged) -> str:
        """An atom of which something is wrong that no block came for, or that is stored twice and differs; or ""."""
        wrong = unchanged.wrong(push.ledger.came)
        if wrong.size:
            return push.manifest.atoms[push.blocks.box(int(wrong[0]))[0]].name
        twice = [name for name, homes in self.layout.homes.items() if len({home.tensor for home in homes}) > 1]
        shapes = {name: self.layout.atoms[name].shape for name in twice}
        return next((n for n, shape in shapes.items() if any(push.memory.differing(n, shape))), "")

    def install(self) -> None:
        push = self._push
        if push is None or push.root is None:
            raise Refused("not_staged", "Nothing is staged.")
        with self._turn:
            staged = self._copies[1 - self._serving]
            assert staged is not None
            push.before = (self.version, self.root, self._known)
            staged.version = self.version = push.manifest.version
            self.root = push.root
            self._known = _Known(self.version, push.root, push.key, push.ledger.digests)
            self._serving = 1 - self._serving
            self._behind = (push.key, np.flatnonzero(push.ledger.came)) if push.ledger.delta else None

    def undo(self) -> None:
        push = self._push
        if push is None or push.before is None:
            raise Refused("not_staged", "Nothing was installed.")
        with self._turn:
            self.version, self.root, self._known = push.before
            push.before = None
            self._serving = 1 - self._serving

    def drop(self, settled: Callable[[float], bool] | None = None) -> None:
        push, self._push = self._push, None
        if push is not None and push.unchanged is not None:
            push.unchanged.stop()
        if push is not None and push.before is None:
            self._settled = settled if settled is not None and not settled(0) else None
            self._behind = (push.key, np.flatnonzero(push.ledger.claimed)) if push.ledger.delta else None

    def digests(self, staged: bool = False) -> dict[str, str]:
        with self._turn:
            if staged and (self._push is None or self._push.root is None):
                raise Refused("not_staged", "Nothing is staged.")
            held = self._copies[1 - self._serving] if staged else self._current()
            assert held is not None
            held.readers += 1
        try:
            values = Memory(state_of(held.target), self.layout.homes)
            found = dict.fromkeys(self.layout.atoms, "")

            def some(names: Iterable[str]) -> None:
                for name in names:
                    found[name] = values.digest(name, self.layout.atoms[name].shape)

            _in_threads(some, list(found))
            return found
        finally:
            self._release(held)


def _in_threads(work: Callable[[Iterable[Any]], None], items: Sequence[Any]) -> None:
    """Work through a list in a few threads; the first exception is raised."""
    if len(items) < 64:
        work(items)
        return
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="areal-stage") as pool:
        list(pool.map(work, [items[n::WORKERS] for n in range(WORKERS)]))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
