"""Which directories `--watch` takes for new, whole checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import models
from areal_convert.converter import Mesh, convert, open_checkpoint
from areal_convert.converter.sync import watching
from areal_convert.converter.sync.watching import Watch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as `Watch` sees it: a list of one, to be changed."""
    now = [0.0]
    monkeypatch.setattr(watching.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return models.make_model("qwen3", tmp_path / "model", layers=2)


def plain(model: Path, out: Path) -> Path:
    """As a trainer writes in place: no manifest."""
    out.mkdir(parents=True)
    for file in model.iterdir():
        shutil.copy(file, out / file.name)
    return out


def names(found: list[watching.Appeared]) -> list[tuple[str, int | None]]:
    return [(one.path.name, one.number) for one in found]


def test_a_directory_without_a_marker_must_have_settled(model: Path, tmp_path: Path, clock: list[float]) -> None:
    root, watch = tmp_path / "run", Watch(tmp_path / "run", settle=3)
    assert watch.poll() == [], "there is nothing yet"
    made = plain(model, root / "checkpoint-50")
    assert watch.poll() == []
    clock[0] = 2
    (made / "late.json").write_text("{}")
    assert watch.poll() == []
    clock[0] = 4
    assert watch.poll() == [], "it changed two seconds ago"
    clock[0] = 5
    assert names(watch.poll()) == [("checkpoint-50", 50)]
    clock[0] = 50
    assert watch.poll() == [], "once"
    (made / "late.json").write_text("{ }")
    assert watch.poll() == []
    clock[0] = 60
    assert names(watch.poll()) == [("checkpoint-50", 50)], "it was written again"


def test_what_is_cut_short_is_passed_over(model: Path, tmp_path: Path, clock: list[float]) -> None:
    root, watch = tmp_path / "run", Watch(tmp_path / "run", settle=1)
    short = plain(model, root / "checkpoint-1")
    with (short / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    for name in ("checkpoint-2.partial", "step-000003.partial", "step-000004.deleted", ".hidden", "x.areal-partial"):
        plain(model, root / name)
    (root / "logs").mkdir()
    (root / "notes.txt").write_text("x")
    assert watch.poll() == []
    clock[0] = 5
    assert watch.poll() == []
    shutil.copy(model / "model.safetensors", short / "model.safetensors")
    watch.poll()
    clock[0] = 10
    assert names(watch.poll()) == [("checkpoint-1", 1)]


def test_what_we_wrote_is_whole_at_once(model: Path, tmp_path: Path, clock: list[float]) -> None:
    root, watch = tmp_path / "run", Watch(tmp_path / "run")
    root.mkdir()
    convert(model, root / "export-7", "hf")
    convert(model, root / "export-8", "dcp", Mesh(dp_shard=2))
    assert names(watch.poll()) == [("export-7", 7), ("export-8", 8)]


def test_megatrons_iterations_count_when_the_tracker_says_so(model: Path, tmp_path: Path, clock: list[float]) -> None:
    root, watch = tmp_path / "run", Watch(tmp_path / "run")
    convert(model, tmp_path / "out", "torch_dist")
    found = open_checkpoint(tmp_path / "out").found.where
    shutil.copytree(found, root / "iter_0000010")
    shutil.copytree(tmp_path / "out" / "hf", root / "iter_0000010" / "hf", dirs_exist_ok=True)
    assert watch.poll() == []
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    assert names(watch.poll()) == [("iter_0000010", 10)]


def state(root: Path, model: Path, step: int) -> Path:
    """A training state of the engines."""
    from transformers import AutoModelForCausalLM

    from areal_convert.engines.state.entries import TrainState
    from areal_convert.engines.state.saving import Progress, Saver

    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    saver = Saver()
    try:
        return saver.save_step(TrainState([module], open_checkpoint(model)), Progress(step=step), root)
    finally:
        saver.close()


def test_training_states_have_a_marker(model: Path, tmp_path: Path, clock: list[float]) -> None:
    run, watch = tmp_path / "run", Watch(tmp_path / "run")
    (run / "logs").mkdir(parents=True)
    made = state(run / "checkpoints", model, 12)
    marker = made / watching.MARKER
    text: Any = json.loads(marker.read_text())
    marker.unlink()
    assert watch.poll() == []
    marker.write_text(json.dumps(text))
    assert names(watch.poll()) == [("step-000012", 12)]
    assert Watch(run / "checkpoints").poll()[0].path == made
    assert watch.poll() == []


def test_a_checkpoint_itself_is_watched_for_being_replaced(model: Path, clock: list[float]) -> None:
    watch = Watch(model, settle=1)
    watch.poll()
    clock[0] = 2
    assert [one.path for one in watch.poll()] == [model]
    raw = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(raw)
    assert watch.poll() == []
    clock[0] = 4
    assert [one.path for one in watch.poll()] == [model]
