"""Pipeline schedules: what is decided about them before anything runs agrees with torch's own classes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from areal_convert.converter.errors import ConfigError
from areal_convert.engines.api.backends import SCHEDULES, V_SCHEDULES
from areal_convert.engines.archon import schedules
from areal_convert.engines.archon.orders import Order, Step, bubble_share, read_schedule, timeline
from areal_convert.engines.archon.schedules import order_of, plan_pipeline, schedule_of, stage_ranks

LAYERS = 30


def write(path: Path, order: Order) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(order)
    return path


@pytest.mark.parametrize("style", ["loop", "v"])
def test_ranks_of_stages_are_torchs(style: str) -> None:
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

    for pp in (1, 2, 3, 4, 8):
        for each in (1, 2, 3):
            theirs = generate_stage_to_rank_mapping(pp, pp * each, style=style)
            assert dict(enumerate(stage_ranks(pp, pp * each, style))) == theirs


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_micro_batches_that_we_take_are_those_that_torch_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of torch's constructors, past our own check; whatever they take is a whole order without deadlock."""
    for pp in (1, 2, 3, 4):
        pipeline = plan_pipeline(name, pp, LAYERS)
        for micro in range(1, 14):
            ours = pipeline.takes(micro)
            with monkeypatch.context() as patched:
                patched.setattr(schedules.Pipeline, "check", lambda *_: None)
                try:
                    order = order_of(pipeline, micro)
                except ValueError:
                    order = None
            assert ours == (order is not None), (name, pp, micro)
            if order is not None:
                _check_whole(order, pipeline.ranks, micro)


def _check_whole(order: Order, ranks: tuple[int, ...], micro: int) -> None:
    for stage, rank in enumerate(ranks):
        for m in range(micro):
            done = sorted(step.kind for step in order[rank] if (step.stage, step.micro) == (stage, m))
            assert done in (["B", "F"], ["F", "I", "W"])
    assert sum(map(len, order)) == len(timeline(order))


@pytest.mark.parametrize("name", SCHEDULES)
def test_counts_that_are_proposed_are_taken(name: str) -> None:
    for pp in (2, 3, 4):
        pipeline = plan_pipeline(name, pp, LAYERS)
        for wanted in range(12):
            found = pipeline.micro_batches(wanted)
            assert found >= max(1, wanted)
            assert pipeline.takes(found)
            assert not any(pipeline.takes(fewer) for fewer in range(max(1, wanted), found))
            pipeline.check(found)


def test_who_has_what() -> None:
    loop, v = plan_pipeline("Interleaved1F1B", 2, 8), plan_pipeline("ScheduleDualPipeV", 2, 8)
    assert (loop.name, v.name) == ("interleaved_1f1b", "dual_pipe_v")
    assert [loop.stages_of(rank) for rank in range(2)] == [(0, 2), (1, 3)]
    assert [v.stages_of(rank) for rank in range(2)] == [(0, 3), (1, 2)]
    assert (loop.first_rank, loop.last_rank) == (0, 1)
    assert (v.first_rank, v.last_rank) == (0, 0)
    assert [part.end - part.begin for part in v.parts] == [2, 3, 2, 1]
    single = plan_pipeline("1f1b", 4, 8, first_less=0, last_less=0)
    assert [(part.begin, part.end) for part in single.parts] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert plan_pipeline("looped_bfs", 2, 10, layers_per_stage=2).ranks == (0, 1, 0, 1, 0, 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_which_schedules_split_their_backward_passes(name: str) -> None:
    pipeline = plan_pipeline(name, 4, LAYERS)
    kinds = {step.kind for steps in order_of(pipeline, 8) for step in steps}
    assert pipeline.splits_backward == ("I" in kinds)
    assert (pipeline.last_rank == 0) == (name in V_SCHEDULES)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"schedule": "2f2b"}, "no pipeline schedule"),
    ({"schedule": "1f1b", "layers_per_stage": 2}, "gives 5 stages, 1f1b on pp=4 needs 4"),
    ({"schedule": "dual_pipe_v", "layers_per_stage": 2}, "needs 8"),
    ({"schedule": "interleaved_1f1b", "layers_per_stage": 2}, "needs a multiple of 4"),
    ({"schedule": "zbv_zero_bubble", "layers": 3}, "do not make 8 stages"),
    ({"schedule": "nowhere.csv"}, "cannot be read"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_pipeline(**{"pp": 4, "layers": 8, **given})


def test_too_few_micro_batches_are_refused_with_how_many_do() -> None:
    with pytest.raises(ConfigError, match=r"(?s)with 8 stages does not run 5 micro-batches.*8 would do"):
        plan_pipeline("dual_pipe_v", 4, 16).check(5)
    with pytest.raises(ConfigError, match=r"(?s)does not run 9.*10 would do"):
        schedule_of(plan_pipeline("interleaved_1f1b", 4, 16), [], 9, print)


# ------------------------------------------------------------------------------------------------ the ideal run


@pytest.mark.parametrize(("pp", "micro"), [(2, 4), (4, 4), (4, 8)])
def test_bubbles_are_those_of_the_papers(pp: int, micro: int) -> None:
    """(p - 1) / (m + p - 1); with v stages a rank (p - 1) / (v m + p - 1); zero-bubble schedules have fewer."""
    plans = {name: plan_pipeline(name, pp, LAYERS) for name in SCHEDULES}
    share = {name: bubble_share(timeline(order_of(p, micro))) for name, p in plans.items() if p.takes(micro)}
    classic, looped = (pp - 1) / (micro + pp - 1), (pp - 1) / (2 * micro + pp - 1)
    assert share["gpipe"] == pytest.approx(classic)
    assert share["1f1b"] == pytest.approx(classic)
    assert share["interleaved_1f1b"] == pytest.approx(looped)
    assert share["looped_bfs"] == pytest.approx(looped)
    assert share["interleaved_zero_bubble"] < looped
    assert share["zbv_zero_bubble"] < looped


# ------------------------------------------------------------------------------------------------ CSV files


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_is_written_down_is_read_back(name: str, tmp_path: Path) -> None:
    known = plan_pipeline(name, 2, 8)
    order = order_of(known, 4)
    pipeline = plan_pipeline(str(write(tmp_path / "mine.csv", order)), 2, 8)
    assert (pipeline.ranks, pipeline.parts, pipeline.order) == (known.ranks, known.parts, order)
    assert order_of(pipeline, 4) == order
    assert pipeline.splits_backward == known.splits_backward
    assert pipeline.micro_batches(3) == 4
    stages: list[Any] = [schedules._PaperStage(pipeline, stage) for stage in pipeline.stages_of(0)]
    made = schedule_of(pipeline, stages, 4, print)  # torch reads the same file
    assert {rank: schedules._steps(actions) for rank, actions in made.pipeline_order.items()} == dict(enumerate(order))
    assert made.stage_index_to_group_rank == dict(enumerate(pipeline.ranks))
    with pytest.raises(ConfigError, match="It has 4"):
        pipeline.check(8)
    with pytest.raises(ConfigError, match="5 are needed"):
        pipeline.micro_batches(5)
    with pytest.raises(ConfigError, match="the file decides"):
        plan_pipeline(str(tmp_path / "mine.csv"), 2, 8, layers_per_stage=1)


BROKEN: list[tuple[str, list[str]]] = [
    ("0F0,0B0\n", ["has 1 lines, expected one for each of pp=2"]),
    ("0F0,0X0,0B0\n1F0,1B,1B0\n", ["line 1: '0X0'", "line 2: '1B'"]),
    ("0F0,0B0\n0F1,0B1\n", ["stage 0: is on 0 and 1"]),
    ("0F0,0B0\n2F0,2B0\n", ["stage 1: is on no rank", "stage 1: does nothing for micro-batch 0"]),
    ("0F0,0F1,0B0\n1F0,1F1,1B0,1B1\n", ["stage 0: does F for micro-batch 1"]),
    ("0F0,0F0,0B0\n1F0,1B0,1I0\n", ["stage 0: does FFB", "stage 1: does FBI"]),
    ("0F0,0B0\n\n", ["rank 1: has nothing to do"]),
    ("0B0,0F0\n1F0,1B0\n", ["rank 0: waits for ever before 0B0", "rank 1: waits for ever before 1F0"]),
    ("0F0,0W0,0I0\n1F0,1B0\n", ["rank 0: waits for ever before 0W0"]),
    ("0F1,0F0,0B1,0B0\n1F1,1B1,1F0,1B0\n", ["stage 1: the last one, takes the micro-batches in the order 1, 0"]),
    ("", ["has 0 lines"]),
]


@pytest.mark.parametrize(("text", "said"), BROKEN, ids=[str(n) for n in range(len(BROKEN))])
def test_files_that_are_no_schedule_are_refused(text: str, said: list[str], tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_schedule(path, 2)
    for words in said:
        assert words in str(caught.value)


def test_a_timeline_by_hand() -> None:
    order = ((Step(0, "F", 0), Step(0, "B", 0)), (Step(1, "F", 0), Step(1, "I", 0), Step(1, "W", 0)))
    when = {str(slot.step): (slot.begin, slot.end) for slot in timeline(order)}
    assert when == {"0F0": (0, 1), "1F0": (1, 2), "1I0": (2, 3), "1W0": (3, 4), "0B0": (3, 5)}
    assert bubble_share(timeline(order)) == pytest.approx(1 - 6 / 10)
    with pytest.raises(ConfigError, match="never ends"):
        timeline((order[0][::-1], order[1]))
