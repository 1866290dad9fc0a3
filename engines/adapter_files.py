"""Adapters in PEFT's form, `adapter_model.safetensors` and `adapter_config.json`: each rank writes and reads its boxes.

Names are `base_model.model.<module>.lora_A.weight`: under any other PEFT loads nothing, with no more than a warning,
and the model stays the base model (cases.md B103, B104).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..converter.codecs import bits
from ..converter.dtypes import BY_NAME
from ..converter.errors import ConfigError, NotACheckpoint, PlanError, Problems, SourceError, TargetError
from ..converter.formats.safetensors_file import encode_header, read_header
from ..converter.live import raw_bits
from ..converter.peers import share_out
from ..converter.rawio import Files, read_box, write_box, write_exactly
from ..converter.sidefiles import read_json
from ..converter.slots import Buffer, Slot, whole
from ..converter.workdir import WorkDir, check_target, explained, settle_target, sync_file
from .lora import adapter_fields
from .ranks import peers_of
from .state.entries import Entry
from .state.shards import Key, say

if TYPE_CHECKING:
    import torch.distributed as dist


class Adapted(Protocol):
    """The adapters of a model: an engine's `Lora`."""

    @property
    def config(self) -> Any:
        """PEFT's LoraConfig."""
        ...

    def entries(self) -> Mapping[str, Entry]:
        """By name: which boxes of the whole adapters this rank holds, and where."""
        ...


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."

_MATTER = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias", "modules_to_save")
"""Fields of an adapter's config that change what its tensors mean."""


def is_adapter_directory(path: str | Path) -> bool:
    return (Path(path) / CONFIG).is_file()


def save_adapter(
    lora: Adapted,
    path: str | Path,
    group: dist.ProcessGroup | None = None,
    *,
    base: str = "",
    small: Sequence[Any] = (),
) -> Path:
    """Write the adapters as PEFT does, over an earlier adapter; every rank calls it and writes its own boxes.

    base   what `base_model_name_or_path` says; empty: the path that the model was loaded from
    small  what else is saved into the directory (`save_pretrained`): a tokenizer

    Raises TargetError for a directory that is in the way, RankError where another rank failed.
    """
    peers = peers_of(group)
    target = settle_target(path)
    entries = {PREFIX + name: entry for name, entry in lora.entries().items()}
    said = peers.exchange(say(entries, {}).boxes)
    held: dict[Key, tuple[int, list[int]]] = {}
    for rank, boxes in enumerate(said):
        for key, (dtype, _) in boxes.items():
            held.setdefault(key, (key.box.volume * BY_NAME[dtype].size, []))[1].append(rank)
    chosen = share_out(dict(sorted(held.items())), peers.world)
    dtypes = {key.name: what for boxes in said for key, what in boxes.items()}
    slots, header = _lay_out(dtypes)
    with ExitStack() as stack:
        work: WorkDir | None = None

        def begin() -> str:
            nonlocal work
            if peers.rank != 0:
                return ""
            with explained(target, sum(s.buffer.size for s in slots.values())):
                _check_place(target)
                work = stack.enter_context(WorkDir(target, "adapter", resume=False, overwrite=True))
                last = max(slot.buffer.begin + slot.buffer.size for slot in slots.values())
                work.allocate(WEIGHTS, last)
                files = Files(work.path, write=True)
                try:
                    write_exactly(files.fd(WEIGHTS), memoryview(header), 0)
                finally:
                    files.close()
            return str(work.path)

        def write() -> None:
            mine = {key for key, rank in chosen.items() if rank == peers.rank}
            with explained(target):
                _write(Path(partial), entries, slots, mine)

        def finish() -> None:
            if work is None:
                return
            with explained(target):
                fields = {**adapter_fields(lora.config), **({"base_model_name_or_path": base} if base else {})}
                work.write_text(CONFIG, (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode())
                for saved in small:
                    saved.save_pretrained(str(work.path))
                read_header(work.path / WEIGHTS)
                work.sync()
                work.publish()

        partial = peers.together(f"Making {target}", begin)[0]
        peers.together(f"Writing {target}", write)
        peers.together(f"Finishing {target}", finish)
    return target


def load_adapter(lora: Adapted, path: str | Path, group: dist.ProcessGroup | None = None) -> None:
    """Fill the adapters from a directory in PEFT's form; every rank reads its own boxes.

    Raises NotACheckpoint, SourceError or PlanError with all that does not fit, before anything is changed.
    """
    peers, source = peers_of(group), Path(path)
    entries = {PREFIX + name: entry for name, entry in lora.entries().items()}
    everywhere = {name for names in peers.exchange(sorted(entries)) for name in names}
    slots: dict[str, Slot] = {}

    def check() -> None:
        nonlocal slots
        slots = _stored(source, lora, entries, everywhere)

    peers.together(f"Opening {source}", check)
    peers.together(f"Loading {source}", lambda: _read(source, entries, slots))


# ------------------------------------------------------------------------------------------------ writing


def _check_place(target: Path) -> None:
    """An adapter replaces an adapter; a whole model in its way is no adapter's to remove."""
    check_target(target, overwrite=True, resume=True)
    if target.is_dir() and any(target.iterdir()) and not (target / WEIGHTS).is_file():
        raise TargetError(f"{target} is in the way, and no adapter.", hint="Choose another path.")


def _lay_out(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[dict[str, Slot], bytes]:
    """A place for every tensor, one after the other, and the header that says so."""
    header = encode_header([(name, *what) for name, what in sorted(tensors.items())], {"format": "pt"})
    slots, at = {}, len(header)
    for name, (dtype, shape) in sorted(tensors.items()):
        slots[name] = _slot(name, dtype, shape, at)
        at += slots[name].buffer.size
    return slots, header


def _slot(name: str, dtype: str, shape: tuple[int, ...], at: int) -> Slot:
    size = BY_NAME[dtype].size
    strides = tuple(int(np.prod(shape[n + 1 :])) * size for n in range(len(shape)))
    box = whole(shape)
    return Slot(box, Buffer(WEIGHTS, at, box.volume * size, name), 0, strides, dtype)


def _write(folder: Path, entries: Mapping[str, Entry], slots: Mapping[str, Slot], mine: set[Key]) -> None:
    files, problems = Files(folder, write=True), Problems()
    try:
        for name, entry in entries.items():
            for box, region in entry.regions():
                if Key(name, box) not in mine:
                    continue
                if region.isnan().any():
                    problems.add(name, "holds NaN")
                write_box(files, slots[name], box, raw_bits(region))
    finally:
        files.close()
    problems.raise_as(PlanError, "The adapters are not saved:")
    sync_file(folder / WEIGHTS)


# ------------------------------------------------------------------------------------------------ reading


def _stored(source: Path, lora: Adapted, entries: Mapping[str, Entry], everywhere: set[str]) -> dict[str, Slot]:
    """Where this rank's tensors lie, when the file has those of `everywhere`: of the model's adapters on all ranks."""
    if not is_adapter_directory(source) or not (source / WEIGHTS).is_file():
        raise NotACheckpoint(f"{source} is no adapter: it has no {CONFIG}, or no {WEIGHTS}.", hint="Is the path right?")
    try:
        fields = read_json(source / CONFIG)
    except ValueError as error:
        raise SourceError(f"{source / CONFIG}: cannot be read as JSON: {error}.") from None
    problems, own = Problems(), adapter_fields(lora.config)
    for name in _MATTER:
        if fields.get(name, own[name]) != own[name]:
            problems.add(name, f"is {fields[name]!r} in {source}, {own[name]!r} here")
    problems.raise_as(
        ConfigError, "The adapter was trained with another configuration:", "Set lora_rank, lora_alpha, …"
    )
    header = read_header(source / WEIGHTS)
    for name in sorted(header.tensors.keys() ^ everywhere):
        problems.add(
            name, f"is {'in the file, and not in this model' if name in header.tensors else 'not in the file'}"
        )
    slots = {}
    for name in header.tensors.keys() & entries.keys():
        tensor, entry = header.tensors[name], entries[name]
        dtype = str(entry.memory.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != entry.shape or BY_NAME[tensor.dtype].torch != dtype:
            what = f"is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(entry.shape)}"
            problems.add(name, what)
        slots[name] = _slot(name, tensor.dtype, tuple(tensor.shape), tensor.begin)
    problems.raise_as(PlanError, f"{source} does not fit the adapters of this model:")
    return slots


def _read(source: Path, entries: Mapping[str, Entry], slots: Mapping[str, Slot]) -> None:
    import torch

    files = Files(source)
    signed: dict[int, Any] = {2: np.int16, 4: np.int32}
    try:
        for name, entry in entries.items():
            for box, region in entry.regions():
                data = np.empty(box.sizes, bits(region.element_size()))
                read_box(files, slots[name], box, data)
                with torch.no_grad():
                    region.copy_(torch.from_numpy(data.view(signed[region.element_size()])).view(region.dtype))
    finally:
        files.close()
