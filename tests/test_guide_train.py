"""docs/guides/train.md: its commands are accepted as they stand, its configuration trains, its script runs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import models
from areal_convert.converter.cli import cli
from areal_convert.converter.remote.mounts import unmount_all
from areal_convert.engines.archon.timing import write_timing
from engine_worker import run_ranks
from test_archon_plot import measured

GUIDE = (Path(__file__).parents[1] / "docs" / "guides" / "train.md").read_text()
ONE_RANK = ["engine.path=model", "engine.backend=fsdp", "engine.dtype=float32", "engine.optimizer.warmup_steps=0"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def commands() -> Iterator[list[str]]:
    """Of `areal-convert`, without what stands behind a `#`."""
    for block in blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["areal-convert"]:
                yield words[1:]


@pytest.fixture
def work(tmp_path: Path, model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").symlink_to(model("llama", layers=2, side_files=True))
    (tmp_path / "run.yaml").write_text(next(text for text in blocks("yaml") if "run.yaml" in text))
    for name in ("train", "eval"):
        rows = [
            {"messages": [{"role": "user", "content": f"w{i} w{i}"}, {"role": "assistant", "content": f"w{i + 1}"}]}
            for i in range(32)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rollouts = [{"input_ids": [5, 6, 7 + i], "loss_mask": [0, 0, 1], "reward": i % 3} for i in range(32)]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(map(json.dumps, rollouts)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words: str) -> str:
    done = CliRunner().invoke(cli, list(words))
    unmount_all()
    assert done.exit_code == 0, f"{words}\n{done.output}{done.exception!r}"
    return done.output


def test_every_way_to_train_is_accepted(work: Path) -> None:
    found = [words for words in commands() if words[0] == "train"]
    assert len(found) >= 7
    for words in found:
        if not any(f"{backend}:" in " ".join(words) for backend in ("fsdp", "megatron", "archon")):
            words = [*words, "engine.backend=fsdp"]
        assert "sizes: " in call(*words, "engine.path=model", "--dry-run")


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_what_a_run_leaves_can_be_drawn_and_converted(work: Path) -> None:
    call("train", "--config", "run.yaml", *ONE_RANK)
    call("train", "--config", "run.yaml", *ONE_RANK, "dir=runs/second", "save.at_end=false", "save.hf_at_end=false")
    named = set(re.findall(r"`(\w+)`", next(line for line in GUIDE.splitlines() if "metrics.jsonl" in line)))
    lines = [json.loads(line) for line in (work / "runs" / "first" / "metrics.jsonl").read_text().splitlines()]
    assert len(named) > 6 and named - {"eval", "mfu"} <= {key for line in lines for key in line}
    write_timing(work / "runs" / "first" / "profile" / "pipeline.json", measured("1f1b"))
    for words in commands():
        if words[0] in ("plot", "convert"):
            call(*(word.replace("step-000100", "step-000002") for word in words))
    assert (work / "schedule.svg").is_file() and (work / "1f1b.png").is_file()
    assert (work / "runs" / "first" / "plot.png").is_file() and (work / "both.svg").is_file()
    assert models.tensors(work / "out").keys() == models.tensors(work / "runs" / "first" / "model").keys()


def script(text: str, folder: str) -> dict[str, Any]:
    import os

    os.chdir(folder)
    names: dict[str, Any] = {}
    exec(compile(text, "train.md", "exec"), names)
    return names["result"]


@pytest.mark.multiprocess
def test_the_script_trains(work: Path) -> None:
    text = next(text for text in blocks("python") if "FSDPEngine" in text)
    for result in run_ranks(4, script, text=text, folder=str(work), init=True):
        assert result["update_successful"] == 1.0 and result["loss"] < 6.0
    assert (work / "out" / "model" / "model.safetensors").is_file() and (work / "out" / "state" / "COMPLETE").is_file()
