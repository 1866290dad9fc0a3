"""What goes wrong in a run, end to end: it is said clearly, in time, and what was saved before stays good."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_convert.engines.state.directory import complete

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

SMALL = ("engine.attn_impl=sdpa", "engine.dtype=float32", "engine.optimizer.lr=3e-3", "log.tensorboard=false")


@pytest.fixture
def run(tmp_path: Path, model: Callable[..., Path]) -> Path:
    """The configuration of a run: a tiny llama on sentences of its tokenizer's words."""
    return configured(tmp_path, model("llama", layers=2, side_files=True))


def configured(folder: Path, model: Path) -> Path:
    rows = [json.dumps({"text": " ".join(f"w{(7 * i + j) % 60}" for j in range(3 + i % 9))}) for i in range(24)]
    (folder / "data.jsonl").write_text("\n".join(rows))
    (folder / "run.yaml").write_text(
        f"dir: {folder}/run\nengine: {{path: {model}, backend: fsdp}}\n"
        f"data: {{path: {folder}/data.jsonl, batch_size: 6}}\nmax_steps: 6\n"
    )
    return folder / "run.yaml"


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "areal_convert.converter.cli", "train", "--config", *map(str, arguments)]
    env = os.environ | environment
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str], code: int, seconds: float = 90) -> str:
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"still running: {process.communicate()[0]}") from None
    assert process.returncode == code, f"{process.returncode}\n{output}"
    assert "Traceback" not in output, output
    return output


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        if process.poll() is not None:
            raise AssertionError(f"it ended by itself: {process.communicate()[0]}")
        if time.monotonic() > end:
            process.kill()
            raise AssertionError(f"it took too long: {process.communicate()[0]}")
        time.sleep(0.05)
    return found


def losses(folder: Path) -> dict[int, float]:
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return {line["step"]: line["loss"] for line in lines if line.get("kind") == "train"}


# ------------------------------------------------------------------------------------------------ the model


def test_a_model_that_is_not_all_there(run: Path, model_copy: Callable[..., Path]) -> None:
    path = model_copy("llama", layers=2, side_files=True, max_shard_size="200KB")
    (gone, *_) = sorted(path.glob("model-*.safetensors"))
    gone.unlink()
    output = ended(start(run, *SMALL, f"engine.path={path}"), 2)
    assert gone.name in output and str(path) in output


def test_weights_of_another_family(run: Path, model_copy: Callable[..., Path]) -> None:
    """A qwen2's weights under a llama's config: the biases are named, nothing is left out silently."""
    path = model_copy("qwen2", layers=2, side_files=True)
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config))
    output = ended(start(run, *SMALL, f"engine.path={path}"), 2)
    assert "q_proj.bias" in output or "attn.q_bias" in output or "q.bias" in output, output


def test_a_family_that_nobody_knows(run: Path, model_copy: Callable[..., Path]) -> None:
    path = model_copy("llama", layers=2, side_files=True)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "no_such", "architectures": ["NoSuch"]}))
    output = ended(start(run, *SMALL, f"engine.path={path}"), 2)
    assert "no_such" in output or "NoSuch" in output


def test_a_tokenizer_with_more_words_than_the_model(run: Path, model_copy: Callable[..., Path], tmp_path: Path) -> None:
    other = model_copy("llama", layers=2, side_files=True)
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["w3"] = 5000
    file.write_text(json.dumps(tokenizer))
    output = ended(start(run, *SMALL, f"tokenizer={other}"), 2)
    assert "5000" in output and "1003" in output, output
    assert not (tmp_path / "run" / "checkpoints").exists()


# ------------------------------------------------------------------------------------------------ the training


def test_training_that_diverges_ends_and_keeps_what_was_good(run: Path, tmp_path: Path) -> None:
    """The learning rate of step 3 on is out of all proportion: losses are not finite, steps are skipped, it ends."""
    ended(start(run, *SMALL, "save.every=2", "--until", 2), 0)
    good = complete(tmp_path / "run" / "checkpoints")
    assert [marker.step for _, marker in good] == [2]
    wild = ["engine.optimizer.lr=1e38", "engine.optimizer.gradient_clipping=0", "max_steps=200", "save.every=0"]
    output = ended(start(run, *SMALL[:2], *SMALL[3:], *wild), 2)
    assert "not finite" in output or "finite" in output, output
    assert [(p, m.step) for p, m in complete(tmp_path / "run" / "checkpoints")] == [(p, m.step) for p, m in good]
    ended(start(run, *SMALL), 0)
    assert max(losses(tmp_path / "run")) >= 6


def test_no_space_for_a_training_state(run: Path, tmp_path: Path) -> None:
    """Files must not grow beyond 100 kB from some step on, as on a disk that is full."""
    folder = tmp_path / "run" / "checkpoints"
    process = start(run, *SMALL, "max_steps=100000", "save.every=3", "save.keep_latest_k=2", "save.async_save=false")
    wait_for(lambda: complete(folder), process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    output = ended(process, 2)
    assert "cannot be written" in output or "File too large" in output or "free" in output, output
    assert str(folder) in output.replace("\n", "")
    left = complete(folder)
    assert left and sorted(p.name for p in folder.iterdir()) == sorted(p.name for p, _ in left), "something half-done"
    step = max(marker.step for _, marker in left)
    output = ended(start(run, *SMALL, f"max_steps={step + 2}"), 0)
    assert f"resumed after step {step}" in output


# ------------------------------------------------------------------------------------------------ other ranks


def ranks(run: Path, count: int, *overrides: str) -> list[subprocess.Popen[str]]:
    """Ranks as torchrun starts them, with nobody who ends the others when one is gone."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [start(run, *SMALL, *overrides, RANK=str(n), LOCAL_RANK=str(n), **common) for n in range(count)]


@pytest.mark.parametrize(("number", "how"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_the_others_stop_when_a_rank_is_gone_or_hangs(run: Path, tmp_path: Path, number: int, how: Any) -> None:
    """Under torchrun, say, where no launcher of ours looks after them: the other one says which, and stops in time."""
    group = ranks(run, 2, "max_steps=100000", "timeout=6", "save.every=3")
    try:
        wait_for(lambda: complete(tmp_path / "run" / "checkpoints"), group[0])
        group[number].send_signal(how)
        since = time.monotonic()
        output, _ = group[1 - number].communicate(timeout=60)
        assert group[1 - number].returncode not in (0, None), output
        print(f"{time.monotonic() - since:.1f} s", output)
        assert time.monotonic() - since < 30
    finally:
        for process in group:
            process.kill()
            process.communicate()
    assert f"ank {number}" in output.partition("error: ")[2].splitlines()[0] or (number == 0 and "gone" in output), (
        output
    )
    assert complete(tmp_path / "run" / "checkpoints"), "the last whole state is not there any more"
