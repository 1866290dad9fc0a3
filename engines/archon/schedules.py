"""Pipeline schedules by name: which rank has which stages, which layers are in them, what micro-batches will do.

All that is decided before a run is decided here, without processes: stages, the ranks with the first and the last one,
how many micro-batches a schedule takes, and the order in which every rank works. torch's classes do the work.

| name                     | stages a rank | shape | micro-batches                          |
|--------------------------|---------------|-------|----------------------------------------|
| `gpipe`                  | 1             | loop  | any                                    |
| `1f1b`                   | 1             | loop  | at least the stages                    |
| `looped_bfs`             | 2 or more     | loop  | any                                    |
| `interleaved_1f1b`       | 2 or more     | loop  | a multiple of their rounds, see below  |
| `interleaved_zero_bubble`| 2 or more     | loop  | the same                               |
| `zbv_zero_bubble`        | 2             | V     | any                                    |
| `dual_pipe_v`            | 2             | V     | at least the stages                    |
| a CSV file               | as it says    | any   | as it says                             |

`loop`: stage s is on rank s mod pp, the last stage on the last rank. `V`: down the ranks and up again, the last stage
on rank 0, which then has loss, logging and sync. There are ⌊micro-batches / pp⌋ rounds, at least one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...converter.errors import ConfigError
from ..api.backends import SCHEDULES, SINGLE_SCHEDULES, V_SCHEDULES, schedule_name
from ..api.fields import nearest
from .model import Part
from .orders import Order, Step, micro_batches, ranks_of, read_schedule
from .specs import split

_CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv_zero_bubble": "ScheduleZBVZeroBubble",
    "dual_pipe_v": "ScheduleDualPipeV",
}
_ROUNDS = ("interleaved_1f1b", "interleaved_zero_bubble")
_AT_LEAST_THE_STAGES = ("1f1b", "dual_pipe_v")


@dataclass(frozen=True)
class Pipeline:
    """A schedule with its stages.

    name   one of SCHEDULES, or the path of a CSV file
    parts  of the model, one a stage
    ranks  of the pp group, one a stage: where it lives
    order  of a CSV file; None: torch's class makes it
    """

    name: str
    pp: int
    parts: tuple[Part, ...]
    ranks: tuple[int, ...]
    order: Order | None = field(default=None, repr=False)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank of the pp group has."""
        return tuple(stage for stage, at in enumerate(self.ranks) if at == rank)

    @property
    def first_rank(self) -> int:
        """The rank with the embedding."""
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        """The rank with the head: losses, logs and weight sync are its."""
        return self.ranks[-1]

    @property
    def splits_backward(self) -> bool:
        """Whether backward passes run in two halves, which torch.compile cannot cut."""
        if self.order is not None:
            return any(step.kind == "I" for steps in self.order for step in steps)
        return "zero_bubble" in self.name or self.name == "dual_pipe_v"

    def takes(self, micro: int) -> bool:
        """Whether the schedule runs with so many micro-batches."""
        if self.order is not None:
            return micro == micro_batches(self.order)
        if self.name in _AT_LEAST_THE_STAGES:
            return micro >= len(self.parts)
        return micro >= 1 and (self.name not in _ROUNDS or micro % max(1, micro // self.pp) == 0)

    def micro_batches(self, wanted: int) -> int:
        """The least number of at least `wanted` micro-batches with which the schedule runs.

        Raises ConfigError where a CSV file was written for fewer.
        """
        if self.order is not None:
            fixed = micro_batches(self.order)
            if wanted > fixed:
                what = f"{self.name} is a schedule of {fixed} micro-batches, and {wanted} are needed."
                raise ConfigError(what, hint="Larger micro-batches (mb_spec), or a file with more of them.")
            return fixed
        enough = max(1, wanted, len(self.parts))  # that many always fit: a whole number of rounds
        enough += -enough % self.pp
        return next(micro for micro in range(max(1, wanted), enough + 1) if self.takes(micro))

    def check(self, micro: int) -> None:
        """Raises ConfigError when the schedule does not run with so many micro-batches, with a number that it takes."""
        if not self.takes(micro):
            fixed = self.order is not None
            near = micro_batches(self.order) if self.order is not None else self.micro_batches(micro)
            what = f"{self.name} on pp={self.pp} with {len(self.parts)} stages does not run {micro} micro-batches."
            raise ConfigError(what, hint=f"It has {near}." if fixed else f"{near} would do (mb_spec.n_mbs).")


# ------------------------------------------------------------------------------------------------ planning


def plan_pipeline(
    schedule: str,
    pp: int,
    layers: int,
    *,
    layers_per_stage: int | None = None,
    first_less: int = 1,
    last_less: int = 1,
) -> Pipeline:
    """Stages, their layers and their ranks.

    schedule              in any spelling (`DualPipeV`), or the path of a CSV file
    layers_per_stage      None: the fewest stages that the schedule is made for
    first_less, last_less layers that embedding and head count as

    Raises ConfigError for an unknown schedule, stages that do not go round, more stages than there is to deal, or a
    file that is no schedule.
    """
    name = schedule_name(schedule)
    if name is None:
        hint = nearest(schedule.lower(), SCHEDULES)
        raise ConfigError(f"pp_schedule: {schedule!r} is no pipeline schedule.", hint=hint)
    counted = layers + first_less + last_less
    wanted = -(-counted // layers_per_stage) if layers_per_stage else None
    if name not in SCHEDULES:
        order = read_schedule(Path(name), pp)
        ranks = ranks_of(order)
        if wanted not in (None, len(ranks)):
            what = f"{layers_per_stage} gives {wanted} stages, and {name} has {len(ranks)}"
            raise ConfigError(f"pp_layers_per_stage: {what}.", hint="Leave it out: the file decides.")
        return Pipeline(name, pp, split(layers, len(ranks), first_less=first_less, last_less=last_less), ranks, order)
    usual = pp if name in SINGLE_SCHEDULES else 2 * pp
    stages = wanted or usual
    exact = name in SINGLE_SCHEDULES or name in V_SCHEDULES
    if stages != usual if exact else stages % pp:
        needs = f"{usual}" if exact else f"a multiple of {pp}"
        what = f"{layers_per_stage} gives {stages} stages, {name} on pp={pp} needs {needs}"
        raise ConfigError(f"pp_layers_per_stage: {what}.", hint=f"Leave it out for {usual} stages.")
    parts = split(layers, stages, first_less=first_less, last_less=last_less)
    return Pipeline(name, pp, parts, stage_ranks(pp, stages, "v" if name in V_SCHEDULES else "loop"))


def stage_ranks(pp: int, stages: int, style: str) -> tuple[int, ...]:
    """The rank of every stage: round and round (`loop`), or down and up again (`v`)."""
    if style == "loop":
        return tuple(stage % pp for stage in range(stages))
    return tuple(s % pp if s // pp % 2 == 0 else pp - 1 - s % pp for s in range(stages))


# ------------------------------------------------------------------------------------------------ torch's schedules


@dataclass(frozen=True)
class Shapes:
    """What goes through a pipeline, the same for all micro-batches: the first stage's token ids, hidden states between
    two stages (a slice of the sequence under sequence parallelism), and what the last stage gives, of type `dtype`."""

    tokens: tuple[int, ...]
    hidden: tuple[int, ...]
    outputs: tuple[int, ...]
    dtype: torch.dtype = torch.float32


def stage_of(
    pipeline: Pipeline,
    stage: int,
    model: nn.Module,
    shapes: Shapes,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """torch's stage object. It is told all shapes: to find them out it would run the model on the meta device, where
    experts cannot count their rows. `group` is the pp group; None: the default one."""
    from torch.distributed.pipelining import PipelineStage

    first, last = stage == 0, stage == len(pipeline.parts) - 1
    # Without requires_grad the stage would not ask the next one for gradients.
    floating = {"dtype": shapes.dtype, "device": "meta", "requires_grad": True}
    given = torch.empty(shapes.tokens, dtype=torch.int64, device="meta") if first else None
    return PipelineStage(
        model,
        stage,
        len(pipeline.parts),
        device,
        input_args=torch.empty(shapes.hidden, **floating) if given is None else given,
        output_args=torch.empty(shapes.outputs if last else shapes.hidden, **floating),
        group=group,
    )


def schedule_of(
    pipeline: Pipeline, stages: Sequence[Any], micro: int, loss_fn: Callable[..., Any], **options: Any
) -> Any:
    """torch's schedule object that trains this rank's stages, for one step or more with so many micro-batches. Where
    another object has run the same stages since, make a new one: stages hold buffers for one at a time.

    loss_fn  (what the last stage gives, target) → loss; losses come with their weights, gradients are not scaled

    Raises ConfigError when the schedule does not run with so many micro-batches.
    """
    from torch.distributed.pipelining import schedules

    pipeline.check(micro)
    options = {"n_microbatches": micro, "loss_fn": loss_fn, "scale_grads": False, **options}
    if pipeline.name in SINGLE_SCHEDULES:
        return getattr(schedules, _CLASSES[pipeline.name])(stages[0], **options)
    if pipeline.order is None:
        return getattr(schedules, _CLASSES[pipeline.name])(list(stages), **options)
    made: Any = schedules._PipelineScheduleRuntime(list(stages), **options)
    made._load_csv(pipeline.name)
    return made


def forward_of(
    pipeline: Pipeline, stages: Sequence[Any], micro: int, look: Callable[[Any, int], None] | None = None
) -> Any:
    """The same without a backward pass, for any number of micro-batches: stage after stage, all micro-batches of each.

    look  called with what the last stage gives, and the number of the micro-batch: it is then not kept, and with a
          large vocabulary logits are larger than anything else. None: all are kept and `run_schedule` returns them

    torch's V-shaped schedules (2.13) do not run without their backward passes.
    """
    from torch.distributed.pipelining import schedules

    made: Any = schedules._PipelineScheduleRuntime(list(stages), n_microbatches=micro)
    if look is not None:

        def let_go(stage: Any, output: Any, targets: Any, number: int, options: Any = None) -> None:
            if stage.is_last:
                del stage.fwd_cache[number]
                stage.output_chunks.clear()
                look(output, number)

        made._maybe_compute_loss = let_go
    made.stage_index_to_group_rank = dict(enumerate(pipeline.ranks))
    for stage in stages:
        stage.stage_index_to_group_rank = made.stage_index_to_group_rank
    forward, ranks = schedules._ComputationType.FORWARD, range(pipeline.pp)
    work: dict[int, list[Any]] = {
        rank: [schedules._Action(stage, forward, m) for stage in pipeline.stages_of(rank) for m in range(micro)]
        for rank in ranks
    }
    # What torch's own preparation does, but for its check that everything goes backward too.
    gathered = {rank: schedules._add_unshard_reshard(work[rank]) for rank in ranks}
    made.pipeline_order = work
    made.pipeline_order_with_comms = schedules._add_send_recv(
        gathered, made.stage_index_to_group_rank.__getitem__, len(pipeline.parts)
    )
    return made


def run_schedule(
    schedule: Any, inputs: Sequence[Any], settings: Sequence[Mapping[str, Any]], targets: Sequence[Any] = ()
) -> list[Any]:
    """One step over micro-batches that differ in more than tensors: each has boundaries of its own.

    inputs    tokens of each micro-batch, all of one shape; only the first stage looks at them
    settings  `packing` and `positions` of each micro-batch, on every rank
    targets   second argument of the loss for each micro-batch, on every rank or where the last stage is

    Returns, where the last stage is and in the order of the micro-batches, the losses (`schedule_of`) or what the stage
    gave (`forward_of`); elsewhere []. torch's own `step` would cut one tensor into micro-batches.
    """
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    trains = schedule._has_backward
    for stage in stages:
        stage.has_backward = trains
        stage.clear_runtime_states()
    arguments = [(x,) if any(stage.is_first for stage in stages) else () for x in inputs]
    wanted = list(targets) if trains and any(stage.is_last for stage in stages) else None
    losses: list[Any] | None = [] if trains else None
    schedule._step_microbatches(arguments, [dict(s) for s in settings], wanted, losses, return_outputs=not trains)
    if losses is not None:
        return losses
    return [out for stage in stages if stage.is_last for out in stage.output_chunks]


def order_of(pipeline: Pipeline, micro: int) -> Order:
    """What every rank does, in order, by torch's own schedule on stages of paper: no process, no model."""
    if pipeline.order is not None:
        pipeline.check(micro)
        return pipeline.order
    paper = [_PaperStage(pipeline, stage) for stage in pipeline.stages_of(0)]
    made = schedule_of(pipeline, paper, micro, print).pipeline_order
    if pipeline.name == "1f1b":  # torch 2.13's list for pictures lets the last rank begin with micro-batch 1
        return tuple(_one_and_one(rank, pipeline.pp, micro) for rank in range(pipeline.pp))
    return tuple(_steps(made[rank]) for rank in range(pipeline.pp))


def _one_and_one(rank: int, pp: int, micro: int) -> tuple[Step, ...]:
    """Forward passes until the first backward pass can come, then one and one, then the backward passes left."""
    ahead = pp - 1 - rank
    forward = [Step(rank, "F", m) for m in range(micro)]
    backward = [Step(rank, "B", m) for m in range(micro)]
    pairs = [step for pair in zip(forward[ahead:], backward, strict=False) for step in pair]
    return (*forward[:ahead], *pairs, *backward[micro - ahead :])


def _steps(actions: Sequence[Any]) -> tuple[Step, ...]:
    """The work among torch's actions, without gaps; what overlaps is one after the other."""
    work = [action for action in actions if action is not None and action.is_compute_op]
    parts = [part for action in work for part in action.sub_actions or (action,)]
    return tuple(Step(part.stage_index, part.computation_type.value, part.microbatch_index) for part in parts)


class _PaperStage:
    """What torch's schedules ask a stage for while they lay out their order."""

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        self.stage_index, self.num_stages = stage, len(pipeline.parts)
        self.group_rank, self.group_size = 0, pipeline.pp
        self.is_first, self.is_last = stage == 0, stage == self.num_stages - 1
        self.has_backward = True
        self.submod = None
        self.stage_index_to_group_rank: dict[int, int] = {}
