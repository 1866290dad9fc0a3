"""`areal-convert plot --schedule`, and the recorder of what a pipeline really did: no processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from areal_convert.converter.cli import cli
from areal_convert.converter.errors import ConfigError, SourceError
from areal_convert.engines.api.backends import SCHEDULES
from areal_convert.engines.archon.charts import chart_of, draw_chart
from areal_convert.engines.archon.orders import Slot, bubble_share, parse_step, timeline
from areal_convert.engines.archon.schedules import order_of, plan_pipeline
from areal_convert.engines.archon.timing import (
    Timing,
    gather,
    read_timing,
    recording,
    theory,
    write_timing,
)
from test_archon_schedules import write


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["plot", *map(str, arguments)])


def measured(name: str, pp: int = 2, micro: int = 4, pace: float = 0.01, late: float = 0.0) -> Timing:
    """The ideal run as if it had been measured: `pace` seconds a forward pass, the last half `late`."""
    pipeline = plan_pipeline(name, pp, 8 * pp)
    slots = timeline(order_of(pipeline, micro))
    half = max(slot.end for slot in slots) / 2
    lag = {slot: late * (slot.begin > half) for slot in slots}
    moved = [Slot(s.rank, s.step, s.begin * pace + lag[s], s.end * pace + lag[s]) for s in slots]
    ordered = tuple(sorted(moved, key=lambda slot: (slot.begin, slot.rank)))
    return Timing(pipeline.name, pp, micro, pipeline.ranks, ordered)


@pytest.mark.parametrize("name", SCHEDULES)
def test_formulas_are_what_the_ideal_run_shows(name: str) -> None:
    for pp, micro in ((2, 4), (3, 6), (4, 8)):
        pipeline = plan_pipeline(name, pp, 30)
        share = bubble_share(timeline(order_of(pipeline, micro)))
        formula = theory(name, pp, micro, len(pipeline.parts))
        assert (formula is None) == ("zero" in name or name == "dual_pipe_v")
        if formula is not None:
            assert share == pytest.approx(formula)


# ------------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize("name", ["1f1b", "DualPipeV"])
def test_a_schedule_is_drawn_and_its_bubbles_said(name: str, tmp_path: Path) -> None:
    done = call("--schedule", name, "--pp", 4, "--micro", 8, "--layers", 16, "-o", tmp_path / "x.svg")
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert {"1f1b": "27.3% ideal, 27.3% by the formula", "DualPipeV": "5.9% ideal"}[name] in done.output
    picture = (tmp_path / "x.svg").read_text()
    assert picture.count("<path") > 4 * 8 * 2, "a box for each piece of work"


def test_a_schedule_of_a_file_is_drawn(tmp_path: Path) -> None:
    mine = write(tmp_path / "mine.csv", order_of(plan_pipeline("zbv_zero_bubble", 2, 8), 6))
    done = call("--schedule", mine, "--pp", 2, "--out", tmp_path / "x.png")
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert "pp 2, 4 stages, 6 micro-batches" in done.output
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_measured_is_drawn_below(tmp_path: Path) -> None:
    late = write_timing(tmp_path / "pipeline.json", measured("interleaved_1f1b", late=0.02))
    done = call("--measured", late, "-o", tmp_path / "x.png")
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert "interleaved_1f1b: pp 2, 4 stages, 4 micro-batches: bubble 11.1% ideal" in done.output
    assert "measured: bubble 17.2%; 11.1% at best with what work took: B 20.0 ms, F 10.0 ms" in done.output
    assert (tmp_path / "x.png").stat().st_size > 10_000


REFUSED: list[tuple[list[Any], str]] = [
    ([], "There is nothing to draw"),
    (["--pp", 2], "--pp belongs to --schedule"),
    (["--schedule", "1f1b"], "--schedule and --pp are needed"),
    (["--schedule", "1f2b", "--pp", 2], "is no pipeline schedule"),
    (["--schedule", "dual_pipe_v", "--pp", 4, "--micro", 5], "8 would do"),
    (["--schedule", "dual_pipe_v", "--pp", 4, "--layers", 5], "do not make 8 stages"),
    (["a-run", "--schedule", "1f1b", "--pp", 2], "two pictures"),
    (["--measured", "nowhere.json"], "cannot be read"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_be_drawn_is_refused(arguments: list[Any], said: str) -> None:
    done = call(*arguments)
    assert done.exit_code == 2, done.output + repr(done.exception)
    assert said in done.output


def test_another_pipeline_than_the_measured_is_refused(tmp_path: Path) -> None:
    file = write_timing(tmp_path / "pipeline.json", measured("1f1b"))
    with pytest.raises(ConfigError) as caught:
        chart_of("gpipe", 4, 8, measured=file)
    for words in ("--schedule: is gpipe, and 1f1b was measured", "--pp: is 4, and 2", "--micro: is 8, and 4"):
        assert words in str(caught.value)
    assert chart_of("Schedule1F1B", 2, measured=file).measured is not None


def test_more_stages_than_usual_are_drawn(tmp_path: Path) -> None:
    pipeline = plan_pipeline("looped_bfs", 2, 10, layers_per_stage=2)
    slots = tuple(timeline(order_of(pipeline, 4)))
    file = write_timing(tmp_path / "x.json", Timing("looped_bfs", 2, 4, pipeline.ranks, slots))
    chart = chart_of(measured=file)
    assert chart.stages == 6
    assert chart.measured is not None
    assert bubble_share(chart.ideal) == pytest.approx(chart.measured.bubble)
    assert draw_chart(chart, tmp_path / "x.svg").is_file()


# ------------------------------------------------------------------------------------------------ files, recording


def test_a_timing_is_read_back(tmp_path: Path) -> None:
    timing = measured("zbv_zero_bubble", 4, 8)
    assert read_timing(write_timing(tmp_path / "a" / "x.json", timing)) == timing
    assert timing.order == order_of(plan_pipeline("zbv_zero_bubble", 4, 32), 8)
    assert timing.at_best == pytest.approx(timing.bubble)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 2}, "holds no measured pipeline"),
        ({"pp": "two"}, "holds no measured pipeline"),
        ({"slots": [[0, "0F0", 0, 1], [2, "0F1", 1, 2], [0, "0X0", 1, 2], [0, "0F1", 2, 1], 7]}, "slot 4: 7"),
        ({"slots": []}, "no pipeline at work"),
    ],
)
def test_a_file_that_is_no_timing_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    found = json.loads(write_timing(tmp_path / "x.json", measured("1f1b")).read_text())
    (tmp_path / "x.json").write_text(json.dumps(found | change))
    with pytest.raises((SourceError, ConfigError), match=said) as caught:
        read_timing(tmp_path / "x.json")
    if said.startswith("slot"):
        assert [problem.about for problem in caught.value.problems] == ["slot 1", "slot 2", "slot 3", "slot 4"]


def test_a_recording_has_every_piece_of_work_and_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.pipelining import stage as torchs

    base, done = torchs._PipelineStageBase, list[str]()
    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        monkeypatch.setattr(base, name, lambda self, micro, *a, n=name, **o: done.append(n))
    before = {name: vars(base)[name] for name in vars(base) if name.endswith("one_chunk")}
    one: Any = object.__new__(torchs.PipelineStage)
    one.stage_index = 3
    with recording() as found:
        one.forward_one_chunk(0, (), {})
        one.backward_one_chunk(0, loss=None, full_backward=False)
        one.backward_weight_one_chunk(0)
        one.forward_one_chunk(1, (), {}, save_forward_output=False)
        one.backward_one_chunk(1, loss=None, full_backward=True, last_backward=True)
    assert {name: vars(base)[name] for name in before} == before
    one.forward_one_chunk(2, (), {})
    timing = gather(found, plan_pipeline("1f1b", 1, 8))
    assert [str(slot.step) for slot in timing.slots] == ["3F0", "3I0", "3W0", "3F1", "3B1"]
    assert all(a.begin <= a.end <= b.begin for a, b in zip(timing.slots, timing.slots[1:], strict=False))
    assert len(done) == 6
    assert parse_step("3F1") == timing.slots[3].step
