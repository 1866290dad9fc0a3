"""`areal-convert train` and `plot`: what is asked for, refused and shown; runs on one and on two ranks."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import models
from areal_convert.converter.cli import cli
from areal_convert.engines.tracking import read_lines

SMALL = ("engine.attn_impl=sdpa", "engine.dtype=float32", "engine.optimizer.lr=3e-3", "log.tensorboard=false")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's configuration: a tiny Qwen3 that learns to say words backwards."""
    return configured(tmp_path)


def configured(folder: Path) -> Path:
    """The same run in any directory."""
    rng = random.Random(0)
    rows = []
    for _ in range(24):
        words = [f"w{rng.randrange(50)}" for _ in range(rng.randint(2, 8))]
        turns = [("user", " ".join(words)), ("assistant", " ".join(reversed(words)))]
        rows.append(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}))
    (folder / "data.jsonl").write_text("\n".join(rows))
    path = models.cached_model("qwen3", layers=2, side_files=True)
    (folder / "run.yaml").write_text(
        f"dir: {folder}/run\nengine: {{path: {path}, backend: fsdp}}\n"
        f"data: {{path: {folder}/data.jsonl, batch_size: 6}}\nmax_steps: 6\n"
    )
    return folder / "run.yaml"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def refused(*arguments: object) -> str:
    done = call(*arguments)
    assert done.exit_code == 2, done.output + repr(done.exception)
    return done.output


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_lines(folder / "metrics.jsonl") if line["kind"] == "train"}


def shell(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "areal_convert.converter.cli", *map(str, arguments)]
    return subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.1)


# ------------------------------------------------------------------------------------------------ without training


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nsys.modules['torch'] = sys.modules['omegaconf'] = None\n"
        "from click.testing import CliRunner\nfrom areal_convert.converter.cli import cli\n"
        "for words in (['--help'], ['train', '--help'], ['plot', '--help']):\n"
        "    done = CliRunner().invoke(cli, words)\n    assert done.exit_code == 0, done.output\n"
        "assert 'train ' in CliRunner().invoke(cli, ['--help']).output\n"
        "loaded = {name for name, module in sys.modules.items() if module}\n"
        "assert not loaded & {'torch', 'transformers', 'numpy', 'yaml', 'rich', 'matplotlib'}, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_dry_run_tells_what_would_be_done_and_writes_nothing(run: Path) -> None:
    done = call("train", "--config", run, "--dry-run", "--nproc", 2, *SMALL)
    assert done.exit_code == 0, done.output
    for words in ("ranks: 2", "sizes: dp2", "steps: 6", "data samples: 24", "lr: 0.003"):
        assert words in done.output, done.output
    report = json.loads(call("train", "--config", run, "--dry-run", "--json", *SMALL).stdout)
    assert report["steps"] == 6 and report["config"]["engine"]["optimizer"]["lr"] == 3e-3
    assert not (run.parent / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data.path=nowhere.jsonl"], ["nowhere.jsonl: no such file"]),
        (["data.pth=x"], ["data.pth", "did you mean path?"]),
        (["engine.path=nowhere"], ["nowhere: no such directory", "engine.path names the model"]),
        (["data.max_length=8"], ["data.jsonl:", "tokens, at most 8", "data.too_long=truncate or drop"]),
        (["data.batch_size=25"], ["data.batch_size is 25, but the data has only 24 samples"]),
        (["--engine", "megatron"], ["--engine is megatron, but engine.backend is 'fsdp'"]),
        (["engine.backend=fsdp:d2p2"], ["pipeline", "megatron"]),
        (["engine.attn_impl=flash_attention_2"], ["flash_attention_2 has no kernel for the CPU"]),
        (["engine.backend=null"], ["backend"]),
        (["engine.mb_spec.max_tokens_per_mb=8"], ["data.jsonl:", "tokens, at most 8"]),
        (["loss.kind=grpo", "loss.group_size=2", "data.shuffle=false"], ["data.jsonl:1: has no reward"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_cannot_be_is_refused_before_anything_is_made(run: Path, arguments: list[str], words: list[str]) -> None:
    overrides = [a for a in SMALL if a.partition("=")[0] not in " ".join(arguments)]
    output = refused("train", "--config", run, "--dry-run", *overrides, *arguments)
    for word in words:
        assert word in output, output


def test_no_engine_no_training(tmp_path: Path) -> None:
    assert "No engine was given" in refused("train", f"dir={tmp_path}/x", "engine.path=x", "data.path=x")


def test_a_damaged_tokenizer_is_said(run: Path, model_copy: Callable[..., Path]) -> None:
    path = model_copy("qwen3", layers=2, side_files=True)
    (path / "tokenizer.json").write_text("{")
    assert "the tokenizer cannot be loaded" in refused(
        "train", "--config", run, "--dry-run", *SMALL, f"tokenizer={path}"
    )
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").unlink()
    assert "there is no tokenizer in it" in refused("train", "--config", run, "--dry-run", *SMALL, f"tokenizer={path}")


# ------------------------------------------------------------------------------------------------ one rank, two ranks


def finished(process: subprocess.Popen[str], code: int = 0, seconds: float = 100) -> str:
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == code, f"{process.returncode}\n{output}"
    return output


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of one rank, from beginning to end, in this process; to be read only."""
    run = configured(tmp_path_factory.mktemp("straight"))
    done = call("train", "--config", run, *SMALL, "profile.start=1", "profile.steps=1")
    assert done.exit_code == 0, done.output + repr(done.exception)
    return run.parent / "run"


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_what_a_run_leaves(straight: Path, tmp_path: Path) -> None:
    made = {"config.yaml", "env.json", "metrics.jsonl", "checkpoints", "model", "profile"}
    assert {p.name for p in straight.iterdir()} == made
    found = losses(straight)
    assert list(found) == [1, 2, 3, 4, 5, 6] and found[6] < found[1] - 0.5
    assert "aten::mm" in (straight / "profile" / "trace-rank-0.json").read_text()
    facts = json.loads((straight / "env.json").read_text())
    assert facts["ranks"] == 1 and facts["packages"]["torch"]
    picture = tmp_path / "plot.png"
    assert call("plot", straight, "--out", picture).exit_code == 0 and picture.is_file()


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_two_ranks_stopped_and_resumed_on_one_learn_what_one_rank_learns(run: Path, straight: Path) -> None:
    other = run.parent / "other"
    output = finished(shell("train", "--config", run, *SMALL, f"dir={other}", "--nproc", 2, "--until", 3))
    assert "step 3: training state in" in output and list(losses(other)) == [1, 2, 3]
    done = call("train", "--config", run, *SMALL, f"dir={other}")
    assert "resumed after step 3" in done.output and "saved on another topology" in done.output
    assert losses(other) == pytest.approx(losses(straight), rel=1e-5)

    import torch
    from safetensors.torch import load_file

    one, two = (load_file(folder / "model" / "model.safetensors") for folder in (straight, other))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_a_run_that_was_stopped_ends_bit_for_bit_as_one_that_was_not(run: Path, straight: Path) -> None:
    other = run.parent / "other"
    for more in (["--until", 4], []):
        done = call("train", "--config", run, *SMALL, f"dir={other}", *more)
        assert done.exit_code == 0, done.output + repr(done.exception)
    assert losses(other) == losses(straight)
    one, two = ((folder / "model" / "model.safetensors").read_bytes() for folder in (straight, other))
    assert one == two


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_policy_gradient_from_a_file_of_rewards(run: Path) -> None:
    """Two answers to each prompt, one of them good: its probability rises."""
    rows = []
    for i in range(8):
        good, bad = ([5, 6, 7 + i, 20, 2], 1.0), ([5, 6, 7 + i, 30, 2], 0.0)
        for ids, reward in (good, bad):
            rows.append(json.dumps({"input_ids": ids, "loss_mask": [0, 0, 0, 1, 1], "reward": reward}))
    (run.parent / "rollouts.jsonl").write_text("\n".join(rows))
    done = call(
        "train", "--config", run, *SMALL, f"data.path={run.parent}/rollouts.jsonl", "data.batch_size=8",
        "data.shuffle=false", "loss.kind=grpo", "loss.group_size=2", "loss.normalization=sequence",
    )  # fmt: skip
    assert done.exit_code == 0, done.output + repr(done.exception)
    lines = [line for line in read_lines(run.parent / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert all(line["policy/ratio"] == pytest.approx(1, abs=1e-4) for line in lines), "on policy: nothing to clip"

    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run.parent / "run" / "model")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1]
    assert logits[20] > logits[30] + 0.5


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks, in order."""
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return sorted(int(pid) for pid in text.split())


def trained(folder: Path, steps: int) -> Callable[[], bool]:
    return lambda: (folder / "metrics.jsonl").is_file() and len(losses(folder)) >= steps


LONG: Sequence[Any] = (*SMALL, "max_steps=10000", "save.hf_at_end=false", "--nproc", 2)


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_sigterm_saves_on_all_ranks_and_leaves(run: Path, tmp_path: Path) -> None:
    process = shell("train", "--config", run, *LONG)
    until(trained(tmp_path / "run", 2))
    process.send_signal(signal.SIGTERM)
    output = finished(process, 128 + signal.SIGTERM)
    assert "SIGTERM after step" in output
    (state,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert (state / "COMPLETE").is_file() and int(state.name.removeprefix("step-")) == max(losses(tmp_path / "run"))


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_a_killed_rank_ends_the_others_in_time(run: Path, tmp_path: Path) -> None:
    process = shell("train", "--config", run, *LONG)
    until(trained(tmp_path / "run", 2))
    ranks = ranks_of(process)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    output = finished(process, 2, seconds=30)
    assert "Rank 1 was ended by SIGKILL" in output
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), 5)


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_the_first_failing_ranks_output_is_shown(run: Path, tmp_path: Path) -> None:
    """Rank 1 alone cannot read the model: it is the one that is blamed, with what it said."""
    broken = tmp_path / "sitecustomize.py"
    broken.write_text("import os\nif os.environ.get('RANK') == '1': raise SystemExit('rank one has no legs')\n")
    program = (
        "import sys\nfrom pathlib import Path\nfrom areal_convert.engines.local_ranks import run_ranks\n"
        "try:\n    run_ranks(2, 'fsdp', Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(run), str(tmp_path / "logs")],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "RankError Rank 1 failed (exit code 1)" in done.stdout, done.stdout + done.stderr
    assert "rank one has no legs" in done.stdout
