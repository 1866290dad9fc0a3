"""The order in which the ranks of a pipeline work: read from a file, checked, and timed as it would ideally run."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...converter.errors import ConfigError, Problems

_STEP = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True)
class Step:
    """One piece of a rank's work: `F` forward, `B` backward, or `I` and `W`, its halves for inputs and for weights."""

    stage: int
    kind: str
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


def parse_step(text: str) -> Step | None:
    """`0F2` → stage 0, forward, micro-batch 2; None for anything else."""
    match = _STEP.fullmatch(text)
    return Step(int(match[1]), match[2], int(match[3])) if match else None


Order = tuple[tuple[Step, ...], ...]
"""What every rank does, in order."""


# ------------------------------------------------------------------------------------------------ CSV files


def read_schedule(path: Path, pp: int) -> Order:
    """A schedule from a file: a line for each rank, in it `<stage><kind><micro-batch>` (`0F0`, `1B3`) or nothing.

    Raises ConfigError with everything that makes it no schedule: stages on two ranks or on none, work that is missing,
    done twice or before what it needs, and ranks that wait for each other for ever.
    """
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"pp_schedule: {path} cannot be read: {error}.") from error
    problems = Problems()
    if len(rows) != pp:
        problems.add(str(path), f"has {len(rows)} lines, expected one for each of pp={pp} ranks")
    order: list[tuple[Step, ...]] = []
    for number, row in enumerate(rows, 1):
        steps = []
        for cell in (cell.strip() for cell in row):
            if (step := parse_step(cell)) is not None:
                steps.append(step)
            elif cell:
                problems.add(f"line {number}", f"{cell!r}, expected something like 0F2", "F, B, or I and W")
        order.append(tuple(steps))
    if not problems:
        _check_order(tuple(order), problems)
    problems.raise_as(ConfigError, f"{path} is no pipeline schedule:")
    return tuple(order)


def _check_order(order: Order, problems: Problems) -> None:
    homes: dict[int, set[int]] = {}
    done: dict[tuple[int, int], list[str]] = {}
    for rank, steps in enumerate(order):
        for step in steps:
            homes.setdefault(step.stage, set()).add(rank)
            done.setdefault((step.stage, step.micro), []).append(step.kind)
    micros = {micro for _, micro in done}
    for stage in range(max(homes, default=0) + 1):
        if len(homes.get(stage, ())) != 1:
            where = " and ".join(map(str, sorted(homes.get(stage, ())))) or "no rank"
            problems.add(f"stage {stage}", f"is on {where}, expected one rank")
        for micro in range(max(micros, default=0) + 1):
            kinds = "".join(done.get((stage, micro), []))
            if sorted(kinds) not in (["B", "F"], ["F", "I", "W"]):
                problems.add(f"stage {stage}", f"does {kinds or 'nothing'} for micro-batch {micro}, expected FB or FIW")
    last = max(homes, default=0)
    turns = [step.micro for steps in order for step in steps if step.stage == last and step.kind == "F"]
    if turns != sorted(turns):
        what = f"the last one, takes the micro-batches in the order {', '.join(map(str, turns))}"
        problems.add(f"stage {last}", what, "in their own order: torch finds losses again by it")
    idle = [str(rank) for rank, steps in enumerate(order) if not steps]
    if idle:
        problems.add("rank " + ", ".join(idle), "has nothing to do")
    if not problems:
        timeline(order, problems=problems)


def ranks_of(order: Order) -> tuple[int, ...]:
    """Where every stage lives."""
    homes = {step.stage: rank for rank, steps in enumerate(order) for step in steps}
    return tuple(homes[stage] for stage in range(len(homes)))


def micro_batches(order: Order) -> int:
    """How many there are."""
    return 1 + max(step.micro for steps in order for step in steps)


# ------------------------------------------------------------------------------------------------ the ideal run


@dataclass(frozen=True)
class Slot:
    """A step and when it runs."""

    rank: int
    step: Step
    begin: float
    end: float


COSTS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""A backward pass costs two forward passes."""


def timeline(order: Order, costs: Mapping[str, float] = COSTS, *, problems: Problems | None = None) -> list[Slot]:
    """When every step would run if all stages cost the same and sending cost nothing.

    Raises ConfigError (or adds to `problems`) when ranks wait for each other for ever.
    """
    last = max(step.stage for steps in order for step in steps)
    ends: dict[tuple[int, str, int], float] = {}
    at, free = [0] * len(order), [0.0] * len(order)
    slots: list[Slot] = []
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(order):
            while at[rank] < len(steps) and (needs := _needs(steps[at[rank]], last, ends)) is not None:
                step = steps[at[rank]]
                begin = max(free[rank], needs)
                free[rank] = begin + costs[step.kind]
                kind = "B" if step.kind == "I" else step.kind  # the stage before waits for either
                ends[step.stage, kind, step.micro] = free[rank]
                slots.append(Slot(rank, step, begin, free[rank]))
                at[rank] += 1
                moved = True
    stuck = [(rank, steps[at[rank]]) for rank, steps in enumerate(order) if at[rank] < len(steps)]
    found = Problems() if problems is None else problems
    for rank, step in stuck:
        found.add(f"rank {rank}", f"waits for ever before {step}", "what it needs comes after it")
    if problems is None:
        found.raise_as(ConfigError, "This order of work never ends:")
    return slots


def _needs(step: Step, last: int, ends: Mapping[tuple[int, str, int], float]) -> float | None:
    """When everything that a step needs is there; None while some of it is not."""
    needed: list[tuple[int, str, int]] = []
    if step.kind == "F" and step.stage:
        needed.append((step.stage - 1, "F", step.micro))
    elif step.kind in "BI":
        needed.append((step.stage, "F", step.micro))
        if step.stage < last:
            needed.append((step.stage + 1, "B", step.micro))
    elif step.kind == "W":
        needed.append((step.stage, "B", step.micro))
    times = [ends.get(key) for key in needed]
    return None if None in times else max((t for t in times if t is not None), default=0.0)


def bubble_share(slots: Sequence[Slot]) -> float:
    """The part of all ranks' time in which they wait."""
    ranks, total = {slot.rank for slot in slots}, max(slot.end for slot in slots)
    busy = sum(slot.end - slot.begin for slot in slots)
    return 1.0 - busy / (total * len(ranks))
