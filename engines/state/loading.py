"""Load a training state: checked as a whole first, then read box by box into what the ranks hold now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...converter.errors import CorruptFile, PlanError, Problems, SourceError
from ...converter.execute import Limits
from ...converter.formats.dcpfile import read as read_index
from ...converter.peers import Peers
from ...converter.sidefiles import read_json
from ..ranks import peers_of
from . import directory, shards
from .directory import Marker
from .entries import EXTRA, MODEL, OPTIM, Collected, Entry, TrainState, collect
from .extras import check_optimizers, grouped, reseed, restore_optimizers, restore_rng
from .saving import Progress

ASIDE = {
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "torchscript"),
    *("return_dict", "output_attentions", "output_hidden_states", "id2label", "label2id", "problem_type"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}
"""Fields of a config that do not change what the weights mean."""


@dataclass
class Restored:
    """What was loaded, and what the engine has to take back itself.

    rng     the engine's own random states, when those of this topology came back; `reseeded` where they did not
    notes   what is not as it was
    """

    path: Path
    progress: Progress
    same_topology: bool
    reseeded: bool = False
    with_optimizer: bool = False
    bytes_read: int = 0
    rng: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def load(
    state: TrainState,
    path: str | Path,
    *,
    optimizer: bool = True,
    rng: bool = True,
    verify: bool = True,
    limits: Limits | None = None,
) -> Restored:
    """Bring a model and its optimizer back to what `path` (a state, or a run's root: its latest) holds.

    optimizer  also moments, steps and options of the parameter groups
    rng        also random states: bit for bit on the topology that saved them, else seeded anew from seed, step, rank
    verify     digest every file first, the work spread over the ranks

    Raises NotACheckpoint, CorruptFile or SourceError for a directory that is no whole state of this model, and
    PlanError for tensors that do not fit, before anything is changed; RankError where only another rank failed.
    """
    peers = peers_of(state.group)
    where = directory.resolve(path)
    loader = _Loader(state, where, peers, optimizer, rng, limits)
    peers.together(f"Opening {where}", loader.open)
    peers.agree("The state to load", (loader.marker.step, loader.marker.serial))

    def check() -> tuple[set[str], list[list[str]]]:
        loader.check(verify)
        return loader.held_here()

    said = peers.together(f"Checking {where}", check)
    peers.together(f"Checking {where}", lambda: loader.check_together(said))
    peers.together(f"Loading {where}", loader.read)
    return loader.restored


class _Loader:
    marker: Marker
    trainer: dict[str, Any]
    found: Collected
    restored: Restored

    def __init__(
        self, state: TrainState, path: Path, peers: Peers, optimizer: bool, rng: bool, limits: Limits | None
    ) -> None:
        self.state, self.path, self.peers = state, path, peers
        self.optimizer, self.rng, self.limits = optimizer, rng, limits

    def open(self) -> None:
        """Marker, trainer.json, model: nothing large is read."""
        self.marker = directory.read_marker(self.path)
        directory.check_files(self.path, self.marker, [directory.TRAINER])
        self.trainer = _trainer(self.path)
        self._check_model()
        saved = self.trainer
        topology = {"world": self.peers.world, **self.state.topology}
        same = saved["topology"] == topology
        names = ("step", "version", "schedule", "data", "counters", "seed")
        progress = Progress(**{name: saved[name] for name in names})
        config = self.path / directory.CONFIG
        progress.config = config.read_text(encoding="utf-8") if config.is_file() else ""
        self.restored = Restored(self.path, progress, same)
        if not same:
            was = ", ".join(f"{k} {v}" for k, v in saved["topology"].items())
            self.restored.notes.append(f"saved on another topology ({was}): losses agree, bits do not")

    def _check_model(self) -> None:
        base, model, problems = self.state.base, self.trainer["model"], Problems()
        if model["family"] != base.table.name:
            problems.add("family", f"is {base.table.name} here, {model['family']} in the state")
        else:
            there = model["config"]
            for name in sorted((base.config.keys() | there.keys()) - ASIDE):
                here, was = _plain(base.config.get(name)), there.get(name)
                if here != was:
                    problems.add(name, f"is {here!r} here, {was!r} in the state")
        problems.raise_as(SourceError, f"{self.path} is the state of another model:")

    def check(self, verify: bool) -> None:
        """Everything that can be wrong on this rank, before anything is changed."""
        mine = sorted(self.marker.files)[self.peers.rank :: self.peers.world] if verify else []
        directory.check_files(self.path, self.marker, mine)
        if not (self.path / directory.DCP).is_dir():
            raise SourceError(
                f"{self.path} is the training state of another engine: it has no {directory.DCP}/.",
                hint="Convert its weights (areal-convert convert), and start from them.",
            )
        self.index = read_index(self.path / directory.DCP)
        saved = self.trainer["optimizer"]
        if self.optimizer and self.state.optimizers and saved is None:
            raise SourceError(f"{self.path} was saved without an optimizer.", hint="Load it with optimizer=False.")
        self.found = collect(self.state, optimizer=False)
        problems = Problems()
        shards.check_against(self.index.tensors, self._held(), problems)
        problems.raise_as(PlanError, f"{self.path} does not fit this model:")

    def held_here(self) -> tuple[set[str], list[list[str]]]:
        """What this rank has, by name: tensors, and the parameters of every group of the optimizer."""
        names = self.found.entries.keys() | self.found.aliases.keys()
        return names, grouped(self.state.optimizers, self.found)

    def check_together(self, said: Sequence[tuple[set[str], list[list[str]]]]) -> None:
        """What the ranks have together is all that was saved: each pipeline stage has a part of it."""
        problems = Problems()
        names = {name for held, _ in said for name in held}
        for name in sorted(self.index.tensors):
            if name.startswith((MODEL, EXTRA)) and name not in names:
                problems.add(name, "is in the saved state, and not in this model")
        problems.raise_as(PlanError, f"{self.path} does not fit this model:")
        saved = self.trainer["optimizer"]
        if self.optimizer and saved is not None and self.state.optimizers:
            groups = [groups for _, groups in said]
            self.restored.notes += check_optimizers(saved, self.state.optimizers, groups)

    def _held(self) -> list[Entry]:
        return [*self.found.entries.values(), *self.found.again]

    def read(self) -> None:
        """Fill tensors, then what is no tensor."""
        done = self.restored
        if self.optimizer and self.state.optimizers:
            restore_optimizers(self.trainer["optimizer"], self.state.optimizers, self.found)
            self.found = collect(self.state)
            problems = Problems()
            moments = [entry for entry in self._held() if entry.name.startswith(OPTIM)]
            shards.check_against(self.index.tensors, moments, problems)
            problems.raise_as(PlanError, f"The optimizer's state in {self.path} does not fit:")
            done.with_optimizer = True
        done.bytes_read = shards.fill(self.index.tensors, self._held(), self.limits)
        if self.rng:
            self._random()

    def _random(self) -> None:
        done, rank = self.restored, self.peers.rank
        if not done.same_topology:
            reseed(done.progress.seed, done.progress.step, rank if self.state.stream is None else self.state.stream)
            done.reseeded = True
            done.notes.append("random states are seeded anew from seed, step and rank")
            return
        file = self.path / directory.RNG / f"rank-{rank:05d}.json"
        try:
            saved = read_json(file)
        except ValueError as error:
            raise CorruptFile(f"{file}: cannot be read as JSON: {error}.") from None
        done.rng = restore_rng(saved, str(file))


def _trainer(path: Path) -> dict[str, Any]:
    file = path / directory.TRAINER
    try:
        found = read_json(file)
    except ValueError as error:
        raise CorruptFile(f"{file}: cannot be read as JSON: {error}.") from None
    wanted: Mapping[str, Any] = {
        "step": int,
        "version": int,
        "seed": int,
        "schedule": dict,
        "data": dict,
        "counters": dict,
        "model": dict,
        "topology": dict,
        "optimizer": (dict, type(None)),
    }
    problems = Problems()
    for name, kind in wanted.items():
        if not isinstance(found, dict) or not isinstance(found.get(name), kind):
            problems.add(name, f"is missing from {file.name}, or of another kind")
    problems.raise_as(CorruptFile, f"{file} is damaged:")
    return found


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value
