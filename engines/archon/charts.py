"""Pictures of pipeline schedules: a row for each rank, a box for each piece of work, white where a rank waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...converter.errors import ConfigError, Problems
from ..plotting import drawing, written
from .orders import Slot, bubble_share, timeline
from .schedules import order_of, plan_pipeline
from .timing import Timing, read_timing, theory

COLOURS = {"F": "#4c78a8", "B": "#59a14f", "I": "#8cd17d", "W": "#f1ce63"}
NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
_DARK = "FB"


@dataclass(frozen=True)
class Chart:
    """One schedule, ideal and, where a run measured it, as it ran. `formula` is None where papers have none."""

    schedule: str
    pp: int
    stages: int
    micro: int
    ideal: tuple[Slot, ...]
    measured: Timing | None = None

    @property
    def formula(self) -> float | None:
        return theory(self.schedule, self.pp, self.micro, self.stages)

    def lines(self) -> list[str]:
        """What is said beside the picture."""
        head = f"{self.schedule}: pp {self.pp}, {self.stages} stages, {self.micro} micro-batches"
        found = [f"{head}: bubble {bubble_share(self.ideal):.1%} ideal"]
        if (formula := self.formula) is not None:
            found[0] += f", {formula:.1%} by the formula"
        if (run := self.measured) is not None:
            costs = ", ".join(f"{kind} {1000 * cost:.1f} ms" for kind, cost in run.costs.items())
            found.append(f"measured: bubble {run.bubble:.1%}; {run.at_best:.1%} at best with what work took: {costs}")
        return found


def chart_of(
    schedule: str | None = None,
    pp: int | None = None,
    micro: int | None = None,
    layers: int | None = None,
    measured: Path | None = None,
) -> Chart:
    """The chart of a schedule, or of what `measured` recorded, which then need not be said again.

    layers  of the model; None: as many as any number of stages takes. micro None: the least that fill the pipeline

    Raises ConfigError for what does not fit together, SourceError for a file that holds no measured pipeline.
    """
    run = read_timing(measured) if measured is not None else None
    if run is not None:
        _agree(run, schedule, pp, micro)
        schedule, pp, micro = schedule or run.schedule, run.pp, run.micro
    if schedule is None or pp is None:
        raise ConfigError("--schedule and --pp are needed.", hint="areal-convert plot --schedule 1f1b --pp 4 --micro 8")
    if pp < 2:
        raise ConfigError(f"--pp is {pp}: a pipeline has at least 2 ranks.")
    stages = None if run is None or not run.stages else len(run.stages)
    layers = layers if layers is not None else max(8 * pp, stages or 0)
    per_stage = None
    if stages is not None and stages > 2 * pp:  # more chunks than the schedule makes by itself
        per_stage, layers = 1, stages - 2
    pipeline = plan_pipeline(schedule, pp, layers, layers_per_stage=per_stage)
    micro = pipeline.micro_batches(2 * pp) if micro is None and pipeline.order is None else micro
    micro = pipeline.micro_batches(1) if micro is None else micro
    pipeline.check(micro)
    ideal = tuple(timeline(order_of(pipeline, micro)))
    return Chart(pipeline.name, pp, len(pipeline.parts), micro, ideal, run)


def _agree(run: Timing, schedule: str | None, pp: int | None, micro: int | None) -> None:
    """What was said besides the file must be what is in it."""
    from ..api.backends import schedule_name

    problems, named = Problems(), schedule_name(schedule) if schedule else None
    said = {"--schedule": (named, run.schedule), "--pp": (pp, run.pp), "--micro": (micro, run.micro)}
    for name, (given, there) in said.items():
        if given is not None and given != there:
            problems.add(name, f"is {given}, and {there} was measured", "leave it out")
    problems.raise_as(ConfigError, "The measured pipeline is another one:")


def draw_chart(chart: Chart, out: Path) -> Path:
    """Write the picture; its suffix says as what. Raises ConfigError and ConvertError."""
    pyplot = drawing()
    rows = [("ideal", chart.ideal)] + ([("measured", chart.measured.slots)] if chart.measured else [])
    width = min(24.0, max(8.0, 0.28 * max(slot.end for slot in chart.ideal)))
    size = (width, 1.2 + len(rows) * (0.6 + 0.45 * chart.pp))
    figure, axes = pyplot.subplots(len(rows), 1, figsize=size, layout="tight", squeeze=False)
    for (name, slots), axis in zip(rows, axes[:, 0], strict=True):
        _draw_rows(axis, slots, chart)
        axis.set_title(f"{chart.schedule}, {name}: bubble {bubble_share(slots):.1%}", loc="left", fontsize=10)
        axis.set_xlabel("forward passes" if name == "ideal" else "seconds", fontsize=8)
    kinds = [kind for kind in COLOURS if any(slot.step.kind == kind for _, slots in rows for slot in slots)]
    boxes = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in kinds]
    names = [NAMES[kind] for kind in kinds]
    axes[-1, 0].legend(boxes, names, ncols=len(kinds), frameon=False, fontsize=8, loc="upper right",
                       bbox_to_anchor=(1.0, -0.25))  # fmt: skip
    return written(figure, out)


def _draw_rows(axis: Any, slots: Sequence[Slot], chart: Chart) -> None:
    """Later stages of a rank are lighter; the number is the micro-batch."""
    total = max(slot.end for slot in slots)
    for slot in slots:
        step = slot.step
        light = 1.0 - 0.35 * (step.stage // chart.pp) / max(1, chart.stages // chart.pp - 1)
        length = slot.end - slot.begin
        axis.barh(slot.rank, length, left=slot.begin, height=0.9, color=COLOURS[step.kind], alpha=light,
                  edgecolor="white", linewidth=0.5)  # fmt: skip
        if length > total / 120:
            colour = "white" if step.kind in _DARK and light > 0.8 else "black"
            middle = slot.begin + length / 2
            axis.text(middle, slot.rank, step.micro, ha="center", va="center", fontsize=7, color=colour)
    axis.set_yticks(range(chart.pp), [f"rank {rank}" for rank in range(chart.pp)], fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, total)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
