"""The numbers of a step, where they are written, and the picture of them."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from areal_convert.converter.errors import ConfigError, SourceError
from areal_convert.engines.flops import Architecture, Layer
from areal_convert.engines.metrics import Meter, StepTimes
from areal_convert.engines.plotting import draw, read_run
from areal_convert.engines.profiling import ProfilerWindow
from areal_convert.engines.tracking import Console, JsonLines, TensorBoard, Trackers, WeightsAndBiases, read_lines

RESULT = {"loss": 2.0, "grad_norm": 1.5, "lr": 1e-3, "update_successful": 1.0, "num_micro_batches": 2.0}
TIMES = {"total": 2.0, "data": 0.5, "step": 1.25}


def other_rank_has_as_much(values: Sequence[float], how: str) -> list[float]:
    return [2 * v for v in values] if how == "sum" else [v + 0.25 for v in values]


def test_a_line_by_hand() -> None:
    """One layer of 10 weights, a head of 5, no attention: 30 FLOPs a token forward, 90 in training."""
    meter = Meter(Architecture((Layer(10, 0),), 5), peak=1e-9, devices=2)
    line = meter.record(1, RESULT, [30, 20], TIMES, memory=1000)
    assert line["tokens"] == 50 and line["tokens_per_second"] == 25 and line["data_share"] == 0.25
    assert line["tflops_per_device"] == pytest.approx(50 * 90 / 1.25 / 2 / 1e12)
    assert line["mfu"] == pytest.approx(50 * 90 / 1.25 / 2 / 1000)
    assert "hfu" not in line and line["memory_bytes"] == 1000 and line["micro_batches"] == 2
    json.dumps(line)


def test_recomputing_counts_for_the_hardware_only() -> None:
    meter = Meter(Architecture((Layer(10, 0),), 5), peak=1e-9, recompute=True)
    line = meter.record(1, RESULT, [10], TIMES, 0)
    assert line["hfu"] / line["mfu"] == pytest.approx((90 + 20) / 90)


def test_numbers_are_those_of_all_ranks() -> None:
    meter = Meter(reduce=other_rank_has_as_much)
    line = meter.record(1, RESULT, [50], TIMES, memory=0)
    assert line["tokens"] == 100 and line["seconds"] == 2.25 and line["tokens_per_second"] == pytest.approx(100 / 2.25)


def test_what_is_not_known_is_left_out() -> None:
    assert not {"mfu", "tflops_per_device"} & Meter().record(1, RESULT, [5], TIMES, 0).keys()
    line = Meter(Architecture((), 5)).record(1, RESULT, [5], TIMES, 0)
    assert "mfu" not in line and "tflops_per_device" in line


def test_totals_go_on_after_a_resume() -> None:
    meter = Meter()
    meter.record(1, RESULT | {"update_successful": 0.0}, [5], TIMES, 0)
    again = Meter()
    again.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    line = again.record(2, RESULT, [5], TIMES, 0)
    assert line["total_tokens"] == 10 and line["skipped_steps"] == 1


def test_times_add_up_also_when_something_fails() -> None:
    now = iter([0.0, 1.0, 5.0, 7.0])
    times = StepTimes(clock=lambda: next(now))
    with times.part("data"):
        pass
    with pytest.raises(ValueError), times.part("data"):
        raise ValueError
    assert times.seconds == {"data": 3.0}


# ------------------------------------------------------------------------------------------------ where they go


def line(step: int, **more: Any) -> dict[str, Any]:
    return Meter().record(step, RESULT | {"loss": 5.0 - step}, [8], TIMES, 1 << 20) | more


def test_json_lines_survive_a_crash_and_non_numbers(tmp_path: Path) -> None:
    file = tmp_path / "run" / "metrics.jsonl"
    log = JsonLines(file)
    log.log("train", {"step": 1, "loss": math.nan, "grad_norm": math.inf})
    with file.open("a") as cut_off:
        cut_off.write('{"kind": "train", "st')
    (found,) = read_lines(file)
    assert math.isnan(found["loss"]) and found["grad_norm"] == math.inf and found["kind"] == "train"
    log.close()


def test_the_console_tells_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(total=12)
    console.log("train", line(3, mfu=0.415, tflops_per_device=0.0123, skipped_steps=2))
    console.log("eval", {"step": 3, "eval_loss": 1.25})
    console.log("event", {"message": "saved [/tmp/x]"})
    console.log("start", {"step": 0})
    out = capsys.readouterr().err
    for words in ("step  3/12", "loss 2.0000", "4 tok/s", "12.3 GFLOP/s", "MFU 41.5%", "skipped 2", "eval loss 1.2500"):
        assert words in out, out
    assert "saved [/tmp/x]" in out and len(out.splitlines()) == 3


def test_tensorboard_can_read_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = Trackers([TensorBoard(tmp_path)])
    trackers.log("train", line(1))
    trackers.log("train", line(2))
    trackers.say("an event is no scalar")
    trackers.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 4.0), (2, 3.0)]


def test_what_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="Weights & Biases is not installed"):
        WeightsAndBiases("p", "r", tmp_path, {})


# ------------------------------------------------------------------------------------------------ profiler and plot


def test_the_profiler_records_its_window(tmp_path: Path) -> None:
    import torch

    window = ProfilerWindow(tmp_path / "profile", 2, 3, rank=1)
    traces = []
    for step in range(1, 5):
        window.before(step)
        with torch.profiler.record_function(f"my step {step}"):
            torch.ones(2).sum()
        traces.append(window.after(step))
    window.close()
    assert [bool(t) for t in traces] == [False, False, True, False]
    text = (tmp_path / "profile" / "trace-rank-1.json").read_text()
    assert [f"my step {n}" in text for n in (1, 2, 3, 4)] == [False, True, True, False]
    with pytest.raises(ConfigError, match="steps 3 to 2"):
        ProfilerWindow(tmp_path, 3, 2)


def write_run(path: Path, *, resumed_at: int | None = None, mfu: bool = True) -> Path:
    log = JsonLines(path / "metrics.jsonl")
    log.log("start", {"step": 0, "backend": "fsdp"})
    for step in range(1, 5):
        log.log("train", line(step, **({"mfu": 0.1 * step} if mfu else {})))
    if resumed_at is not None:
        log.log("start", {"step": resumed_at, "backend": "archon"})
        for step in range(resumed_at + 1, 6):
            log.log("train", line(step, loss=0.5, mfu=0.2))
    log.log("eval", {"step": 4, "eval_loss": 1.0})
    log.close()
    return path


def test_steps_that_were_taken_again_count_once(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "r", resumed_at=2))
    assert [(t["step"], t["loss"]) for t in run["train"]] == [(1, 4), (2, 3), (3, 0.5), (4, 0.5), (5, 0.5)]


def test_the_picture_shows_all_runs_and_marks_the_change(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "first", resumed_at=2), write_run(tmp_path / "second", mfu=False)
    png = draw([a], tmp_path / "a.png")
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        svg = draw([a, b], tmp_path / "b.svg").read_text()
    for words in ("first", "second", "first, evaluation", "fsdp → archon", "tokens/s", ">loss<"):
        assert words in svg
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert "MFU (%)" in draw([a], tmp_path / "c.svg").read_text()


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"has no metrics\.jsonl"):
        draw([tmp_path], tmp_path / "x.png")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "start", "step": 0}\n')
    with pytest.raises(SourceError, match="there is no step in it"):
        draw([tmp_path], tmp_path / "x.png")
