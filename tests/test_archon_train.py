"""`areal-convert train --engine archon`: end to end, killed and resumed, under pipeline parallelism."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

import models
from areal_convert.engines.archon.timing import read_timing
from areal_convert.engines.tracking import read_lines
from test_train_cli import call, configured, finished, losses, ranks_of, refused, shell, trained, until

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]

SMALL = (
    "engine.archon.attn_type=sdpa", "engine.dtype=float32", "engine.optimizer.lr=1e-3", "log.tensorboard=false",
    "engine.optimizer.warmup_steps=0", "save.hf_at_end=false",
)  # fmt: skip
EVERY = 40


@dataclass(frozen=True)
class Killed:
    """A run of two stages that was killed some steps after its first state; `seen`: the losses of those steps."""

    config: Path
    dir: Path
    seen: dict[int, float]

    @property
    def state(self) -> Path:
        return self.dir / "checkpoints" / f"step-{EVERY:06}"

    def after(self) -> dict[int, float]:
        """What it logs of these steps by now."""
        return {step: loss for step, loss in losses(self.dir).items() if step in self.seen}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """A tiny Qwen3 of four layers that learns to say words backwards, on two ranks that get no time to end."""
    folder = tmp_path_factory.mktemp("killed")
    file = configured(folder)
    path = models.cached_model("qwen3", layers=4, side_files=True)
    text = file.read_text().replace("backend: fsdp", "backend: 'archon:p2', archon: {pp_schedule: 1f1b}")
    file.write_text(text.replace(text.split("path: ")[1].split(",")[0], str(path)))
    options = ("max_steps=1000", f"save.every={EVERY}", "save.async_save=true", "engine.mb_spec.n_mbs=2")
    process = shell("train", "--config", file, *SMALL, *options, "profile.start=1", "profile.steps=1")
    run = Killed(file, folder / "run", {})
    until(lambda: trained(run.dir, EVERY + 2)() and (run.state / "COMPLETE").is_file())
    for rank in ranks_of(process):
        os.kill(rank, signal.SIGKILL)
    finished(process, 2, seconds=30)
    seen = {step: loss for step, loss in losses(run.dir).items() if step > EVERY}
    assert len(seen) >= 2
    assert max(seen) < 2 * EVERY, "there is another state by now"
    return Killed(file, run.dir, seen)


def test_a_killed_run_is_resumed_bit_for_bit(killed: Killed) -> None:
    last = ("max_steps=1000", "save.keep_latest_k=0", "engine.mb_spec.n_mbs=2", "--until", max(killed.seen))
    output = finished(shell("train", "--config", killed.config, *SMALL, *last))
    assert f"resumed after step {EVERY}" in output
    assert killed.after() == killed.seen
    lines = [line["step"] for line in read_lines(killed.dir / "metrics.jsonl") if line["kind"] == "train"]
    assert lines.count(EVERY + 1) == 2, "the steps were not taken again"


def test_what_its_pipeline_did_is_recorded_and_drawn(killed: Killed, tmp_path: Path) -> None:
    file = killed.dir / "profile" / "pipeline.json"
    timing = read_timing(file)
    assert (timing.schedule, timing.pp, timing.micro, len(timing.slots)) == ("1f1b", 2, 2, 8)
    assert 0 < timing.bubble < 1
    done = call("plot", "--measured", file, "-o", tmp_path / "x.svg")
    assert done.exit_code == 0
    assert "1f1b: pp 2, 2 stages, 2 micro-batches: bubble 33.3% ideal" in done.output
    assert "measured: bubble" in done.output


def test_one_rank_and_another_engine_go_on(killed: Killed, tmp_path: Path) -> None:
    """The state of two stages on one rank; its weights, exported by the hub, in FSDPEngine."""
    where = tmp_path / "run"
    here = (f"dir={where}", f"resume={killed.state}", "engine.backend=archon:d1", f"max_steps={max(killed.seen)}")
    done = call("train", "--config", killed.config, *SMALL, *here, "save.at_end=false")
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert "saved on another topology" in done.output
    assert losses(where) == pytest.approx(killed.seen, rel=1e-4)
    done = call("convert", killed.state, tmp_path / "hf", "--to", "hf")
    assert done.exit_code == 0, done.output
    done = call(
        "train", "--config", killed.config, f"dir={tmp_path}/next", f"engine.path={tmp_path}/hf", "max_steps=1",
        "engine.backend=fsdp", "engine.attn_impl=sdpa", *SMALL[1:], "save.at_end=false",
    )  # fmt: skip
    assert done.exit_code == 0, done.output + repr(done.exception)
    first = losses(tmp_path / "next")[1]
    assert first < losses(killed.dir)[1] - 1.0, "the weights of the state were not what was trained"


def test_what_cannot_be_is_refused_before_anything_is_made(killed: Killed) -> None:
    dry = ("train", "--config", killed.config, "--dry-run")
    assert "varlen has no kernel for the CPU" in refused(*dry, *SMALL[1:])
    compiled = ("engine.archon.pp_schedule=DualPipeV", "engine.archon.enable_compile=true")
    assert "torch.compile cannot cut" in refused(*dry, *SMALL, *compiled)
