"""How much of a pipeline's time its ranks wait, schedule by schedule: `bench_engines.py bubbles`.

Every stage sleeps for as long as its work would take, forward, and backward for inputs and for weights: ranks then do
not take cores from each other, and what is measured is the schedule, torch's runtime, and sending over gloo. The order
of work, the stages and the recording are the engine's own (`engines/archon`).
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH = 64
"""Of what is sent; small."""


@dataclass
class Bubble:
    """Shares of all ranks' time: by the papers' formula (None where there is none), of the ideal run, of the same order
    with the times that the work took, and as it ran."""

    schedule: str
    pp: int
    stages: int
    micro: int
    formula: float | None
    ideal: float
    at_best: float
    measured: float


def sleeping(seconds: float) -> Any:
    """A stage that takes its time."""
    import torch
    from torch import Tensor, nn

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            time.sleep(seconds)
            return grads[0]

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.zeros(WIDTH))
            self.weight = nn.Parameter(torch.eye(WIDTH))

        def forward(self, x: Tensor, **_: Any) -> Tensor:
            time.sleep(seconds)
            if x.dtype == torch.int64:  # the first stage: its backward pass costs as much as another's
                x = x[..., None] * 1e-3 + self.first
            result: Tensor = Backward.apply(x) @ Backward.apply(self.weight)
            return result

    return Stage()


def rank(
    number: int, pp: int, port: int, work: list[tuple[str, int]], seconds: float, rounds: int, answer: Any
) -> None:
    os.environ.update(RANK=str(number), WORLD_SIZE=str(pp), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = [_measure(number, pp, name, micro, seconds, rounds) for name, micro in work]
    if number == 0:
        answer.put(found)
    dist.barrier()
    dist.destroy_process_group()


def _measure(number: int, pp: int, name: str, micro: int, seconds: float, rounds: int) -> list[Any]:
    import torch

    from areal_convert.engines.archon.schedules import Shapes, plan_pipeline, run_schedule, schedule_of, stage_of
    from areal_convert.engines.archon.timing import gather, recording

    pipeline = plan_pipeline(name, pp, 8 * pp)
    shapes = Shapes((1, 8), (1, 8, WIDTH), (1, 8, WIDTH))
    each = seconds * pp / len(pipeline.parts)  # the same model, in more stages
    device = torch.device("cpu")
    stages = [stage_of(pipeline, s, sleeping(each), shapes, device) for s in pipeline.stages_of(number)]
    schedule = schedule_of(pipeline, stages, micro, lambda y, _: y.sum())
    inputs = [torch.ones(1, 8, dtype=torch.int64)] * micro
    timings = []
    for turn in range(rounds + 1):
        with recording() as found:
            run_schedule(schedule, inputs, [{}] * micro, [None] * micro)
        if turn:  # connections are made in the first
            timings.append(gather(found, pipeline))
    return timings


def measure(pp: int, micro: int, names: list[str], seconds: float, rounds: int, out: Path | None) -> list[Bubble]:
    """On `pp` ranks. `out`: a directory for a picture of each, ideal and measured."""
    from areal_convert.engines.archon.orders import bubble_share, timeline
    from areal_convert.engines.archon.schedules import order_of, plan_pipeline
    from areal_convert.engines.archon.timing import theory, write_timing

    plans = {name: plan_pipeline(name, pp, 8 * pp) for name in names}
    work = [(name, plan.micro_batches(micro)) for name, plan in plans.items()]
    context = multiprocessing.get_context("spawn")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    answer = context.Queue()
    processes = [context.Process(target=rank, args=(n, pp, port, work, seconds, rounds, answer)) for n in range(pp)]
    for process in processes:
        process.start()
    answers = answer.get(timeout=600)
    for process in processes:
        process.join()
    found = []
    for (name, number), timings in zip(work, answers, strict=True):
        plan = plans[name]
        middle = sorted(timings, key=lambda timing: timing.bubble)[len(timings) // 2]
        ideal = bubble_share(timeline(order_of(plan, number)))
        share = statistics.median(timing.bubble for timing in timings)
        formula = theory(name, pp, number, len(plan.parts))
        found.append(Bubble(name, pp, len(plan.parts), number, formula, ideal, middle.at_best, share))
        if out is not None:
            _draw(out, write_timing(out / f"pp{pp}-{name}.json", middle))
    return found


def _draw(out: Path, file: Path) -> None:
    from areal_convert.engines.archon.charts import chart_of, draw_chart

    draw_chart(chart_of(measured=file), out / f"{file.stem}.svg")


def show(found: list[Bubble]) -> None:
    for b in found:
        formula = "      -" if b.formula is None else f"{b.formula:7.1%}"
        print(
            f"{b.schedule:25}pp {b.pp}  {b.stages} stages  {b.micro:2} micro-batches  formula {formula}"
            f"  ideal {b.ideal:6.1%}  at best {b.at_best:6.1%}  measured {b.measured:6.1%}",
            flush=True,
        )
