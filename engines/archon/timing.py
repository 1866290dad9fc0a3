"""What a pipeline really did: when every rank began and ended each piece of its work, beside the ideal.

`recording` watches torch's stages while it lasts, whoever made them; between two pieces of work a rank waits, sends or
receives. Times count from one moment for all ranks: those of one machine share a clock, those of several start it
together. On CUDA the times are the device's, not those at which work was handed to it.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...converter.errors import ConfigError, Problems, SourceError
from .orders import Order, Slot, Step, bubble_share, timeline

if TYPE_CHECKING:
    import torch.distributed as dist

    from .schedules import Pipeline

_SCHEMA = 1


@dataclass(frozen=True)
class Timing:
    """One step of a pipeline. `slots` are those of all ranks, in seconds from the first one's begin."""

    schedule: str
    pp: int
    micro: int
    stages: tuple[int, ...]
    slots: tuple[Slot, ...]

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they did no work."""
        return bubble_share(self.slots)

    @property
    def order(self) -> Order:
        """What every rank did, in order."""
        ordered = sorted(self.slots, key=lambda slot: slot.begin)
        return tuple(tuple(slot.step for slot in ordered if slot.rank == rank) for rank in range(self.pp))

    @property
    def costs(self) -> dict[str, float]:
        """Seconds that a piece of work of each kind took, on the average."""
        kinds = sorted({slot.step.kind for slot in self.slots})
        lengths = {k: [slot.end - slot.begin for slot in self.slots if slot.step.kind == k] for k in kinds}
        return {kind: sum(found) / len(found) for kind, found in lengths.items()}

    @property
    def at_best(self) -> float:
        """The bubble of the same order with the measured `costs`, were nothing to be sent and all stages alike: what
        of `bubble` lies in the schedule. The rest is sending, and stages that differ."""
        return bubble_share(timeline(self.order, self.costs))


def theory(schedule: str, pp: int, micro: int, stages: int) -> float | None:
    """The share of bubbles as papers have it, where there is a formula: (p - 1) / (v m + p - 1), v stages a rank."""
    if schedule not in ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"):
        return None
    return (pp - 1) / (stages // pp * micro + pp - 1)


# ------------------------------------------------------------------------------------------------ recording


@dataclass
class Recording:
    """What this rank did: (step, when it began, when it ended), as the clock had it."""

    zero: Any = None
    done: list[tuple[Step, Any, Any]] = field(default_factory=list)
    clock: Callable[[], Any] = time.perf_counter

    def begin(self, group: dist.ProcessGroup | None = None) -> None:
        """Forget what was recorded, and start the clock on all ranks of a group together."""
        import torch.distributed as dist

        self.done.clear()
        if dist.is_initialized():
            dist.barrier(group)
        self.zero = self.clock()

    def since(self, moment: Any) -> float:
        """Seconds from the beginning."""
        if isinstance(moment, float):
            return moment - self.zero
        moment.synchronize()
        return self.zero.elapsed_time(moment) / 1000


@contextmanager
def recording(device: Any = "cpu", group: dist.ProcessGroup | None = None) -> Iterator[Recording]:
    """Record what this process's pipeline stages do while it lasts, from a moment common to all ranks of `group`."""
    from torch.distributed.pipelining.stage import _PipelineStageBase as Stage

    found = Recording(clock=_cuda_clock if str(device).startswith("cuda") else time.perf_counter)
    theirs: dict[str, Any] = {name: getattr(Stage, name) for name in _KINDS}
    for name, kind in _KINDS.items():
        setattr(Stage, name, _watched(theirs[name], kind, found))
    try:
        found.begin(group)
        yield found
    finally:
        for name, method in theirs.items():
            setattr(Stage, name, method)


def _watched(method: Any, kind: Callable[[Mapping[str, Any]], str], found: Recording) -> Any:
    @functools.wraps(method)
    def watched(stage: Any, micro: int, *args: Any, **options: Any) -> Any:
        begin = found.clock()
        result = method(stage, micro, *args, **options)
        found.done.append((Step(stage.stage_index, kind(options), micro), begin, found.clock()))
        return result

    return watched


_KINDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "forward_one_chunk": lambda options: "F",
    "backward_one_chunk": lambda options: "B" if options.get("full_backward", True) else "I",
    "backward_weight_one_chunk": lambda options: "W",
}
"""torch's methods for a piece of work, and its kind."""


def _cuda_clock() -> Any:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def gather(found: Recording, pipeline: Pipeline, group: dist.ProcessGroup | None = None) -> Timing:
    """What all ranks of the pp group did. Collective: every one of them calls it and has the answer."""
    import torch.distributed as dist

    mine = [(step.stage, step.kind, step.micro, found.since(a), found.since(b)) for step, a, b in found.done]
    everyone: list[Any] = [mine]
    if dist.is_initialized() and pipeline.pp > 1:
        everyone = [None] * pipeline.pp
        dist.all_gather_object(everyone, mine, group=group)
    return _timing(pipeline.name, pipeline.pp, pipeline.ranks, everyone)


def _timing(schedule: str, pp: int, stages: Sequence[int], everyone: Sequence[Sequence[Any]]) -> Timing:
    zero = min((begin for mine in everyone for *_, begin, _ in mine), default=0.0)
    slots = [
        Slot(rank, Step(int(stage), str(kind), int(micro)), begin - zero, end - zero)
        for rank, mine in enumerate(everyone)
        for stage, kind, micro, begin, end in mine
    ]
    if not slots:
        raise ConfigError("There was no pipeline at work.", hint="pipeline_parallel_size, and a step to be recorded.")
    micro = 1 + max(slot.step.micro for slot in slots)
    return Timing(schedule, pp, micro, tuple(stages), tuple(sorted(slots, key=lambda slot: (slot.begin, slot.rank))))


# ------------------------------------------------------------------------------------------------ files


def write_timing(path: Path, timing: Timing) -> Path:
    """As JSON; a piece of work is [rank, "0F0", begin, end]."""
    rows = [[slot.rank, str(slot.step), slot.begin, slot.end] for slot in timing.slots]
    head = {"schema": _SCHEMA, "schedule": timing.schedule, "pp": timing.pp, "stages": list(timing.stages)}
    body = ",\n  ".join(json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{json.dumps(head)[:-1]}, "slots": [\n  {body}\n]}}\n', encoding="utf-8")
    return path


def read_timing(path: Path) -> Timing:
    """Raises SourceError for a file that is none."""
    from .orders import parse_step

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot be read as JSON: {error}.") from None
    problems, pp = Problems(), found.get("pp") if isinstance(found, dict) else None
    if not isinstance(pp, int) or not isinstance(found.get("slots"), list) or found.get("schema") != _SCHEMA:
        hint = "A run writes {dir}/profile/pipeline.json when profile.start is set."
        raise SourceError(f"{path}: holds no measured pipeline.", hint=hint)
    everyone: list[list[Any]] = [[] for _ in range(pp)]
    for number, row in enumerate(found["slots"]):
        match row:
            case [int(rank), str(text), int() | float() as begin, int() | float() as end] if 0 <= rank < pp:
                step = parse_step(text) if begin <= end else None
            case _:
                rank, step, begin, end = 0, None, 0.0, 0.0
        if step is not None:
            everyone[rank].append((step.stage, step.kind, step.micro, float(begin), float(end)))
            continue
        problems.add(f"slot {number}", f"{row!r}, expected [rank below {pp}, '0F0', begin, end]")
    problems.raise_as(SourceError, f"{path} is damaged:")
    return _timing(str(found.get("schedule", "")), pp, found.get("stages", ()), everyone)


# ------------------------------------------------------------------------------------------------ in a run


class PipelineWindow:
    """Records one step of an engine's pipeline into a file; rank 0 writes it. All ranks call `start` and `stop`."""

    def __init__(self, engine: Any, path: Path) -> None:
        self.engine, self.path = engine, path
        self._stack: ExitStack | None = None
        self._found: Recording | None = None

    def start(self) -> None:
        self._stack = ExitStack()
        self._found = self._stack.enter_context(recording(self.engine.device, self.engine.mesh.group("pp")))

    def stop(self) -> Path | None:
        """The file, on rank 0."""
        if self._stack is None or self._found is None:
            return None
        self._stack.close()
        found, self._stack, self._found = self._found, None, None
        timing = gather(found, self.engine.pipeline, self.engine.mesh.group("pp"))
        import torch.distributed as dist

        return write_timing(self.path, timing) if dist.get_rank() == 0 else None
