"""The benchmarks of the engines run: with tiny models, whose figures mean nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[1] / "tools"

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]


TINY = "--model tiny --rounds 1"


def figures(command_line: str, out: Path) -> Any:
    tool, *arguments = command_line.split()
    command = [sys.executable, str(TOOLS / tool), *arguments, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())["figures"]


def test_steps_are_measured_for_both_sides(tmp_path: Path) -> None:
    found = figures(f"bench_engines.py steps {TINY} --tokens 128", tmp_path / "x.json")
    assert [f["side"] for f in found] == ["transformers", "fsdp"] * 2
    assert all(f["tokens_per_second"] > 0 and f["loss"] > 0 for f in found)


def test_megatron_is_measured_against_itself_driven_by_hand(tmp_path: Path) -> None:
    """The tool itself fails when the losses of the two differ."""
    found = figures(f"bench_engines.py steps --engine megatron {TINY} --tokens 128", tmp_path / "x.json")
    assert [f["side"] for f in found] == ["megatron-core", "megatron"] * 2
    assert all(f["tokens_per_second"] > 0 and f["loss"] > 0 for f in found)


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_loading_is_measured_for_both_sides(engine: str, tmp_path: Path) -> None:
    found = figures(f"bench_engines.py load --engine {engine} {TINY} --ranks 2", tmp_path / "x.json")
    assert [f["side"] for f in found] == ["transformers", engine]
    assert found[0]["held_bytes"] == pytest.approx(found[1]["held_bytes"], rel=0.02), "both end with the same shards"


def test_archon_is_measured_beside_fsdp(tmp_path: Path) -> None:
    found = figures(f"bench_engines.py steps --engine archon --beside fsdp {TINY} --tokens 128", tmp_path / "x.json")
    assert [f["side"] for f in found] == ["transformers", "archon", "fsdp"] * 2
    assert all(f["tokens_per_second"] > 0 and f["loss"] > 0 for f in found)


def test_bubbles_are_measured_beside_their_theory(tmp_path: Path) -> None:
    options = "--pp 2 --micro 4 --rounds 1 --pace 0.01 --schedules gpipe dual_pipe_v"
    found = figures(f"bench_engines.py bubbles {options} --pictures {tmp_path}", tmp_path / "x.json")
    assert [f["ideal"] for f in found] == pytest.approx([0.2, 0.04])
    assert all(f["measured"] > 0.8 * f["ideal"] for f in found), "ranks cannot wait less than they must"
    assert {path.name for path in tmp_path.glob("*.svg")} == {"pp2-gpipe.svg", "pp2-dual_pipe_v.svg"}


def test_the_gpu_check_runs_dry(tmp_path: Path) -> None:
    found = figures("gpu_check.py --dry-run --length 32 --sequences 2 --steps 1", tmp_path / "x.json")
    (sdpa,) = found
    ours, plain = sdpa["speed"]
    assert (ours["side"], plain["side"]) == ("fsdp", "transformers")
    assert ours["loss"] == pytest.approx(plain["loss"], rel=2e-2)


def test_the_gpu_check_runs_dry_with_megatron_and_says_why_there_is_no_fp8(tmp_path: Path) -> None:
    found = figures("gpu_check.py --dry-run --engine megatron --length 32 --sequences 2 --steps 1", tmp_path / "x.json")
    bf16, fp8 = found
    ours, by_hand, fsdp = bf16["speed"]
    assert (ours["side"], by_hand["side"], fsdp["side"]) == ("megatron", "megatron-core", "fsdp")
    assert ours["loss"] == pytest.approx(by_hand["loss"], rel=1e-3)
    assert ours["loss"] == pytest.approx(fsdp["loss"], rel=2e-2)
    assert "needs a GPU" in fp8["skipped"]


@pytest.mark.slow  # it compiles
def test_the_gpu_check_runs_dry_with_archon(tmp_path: Path) -> None:
    options = "--dry-run --engine archon --length 32 --sequences 2 --steps 1"
    (found,) = figures(f"gpu_check.py {options}", tmp_path / "x.json")
    assert [speed["side"] for speed in found["speed"]] == ["archon-compiled", "transformers", "archon", "fsdp"]
    losses = [speed["loss"] for speed in found["speed"]]
    assert losses == pytest.approx([losses[1]] * 4, rel=2e-2)


def test_without_a_gpu_the_check_is_skipped_and_says_so() -> None:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    done = subprocess.run([str(TOOLS / "gpu_check.sh")], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "skipped: torch sees no CUDA device" in done.stdout, done.stderr


def test_the_check_on_a_real_model_fails_for_one_figure_that_differs() -> None:
    """The comparison itself; the model is not there in tests."""
    spec = importlib.util.spec_from_file_location("check_smollm2", TOOLS / "check_smollm2.py")
    assert spec is not None and spec.loader is not None
    tool = sys.modules["check_smollm2"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    good = {"logprobs": [[-1.0, -2.0], [-3.0]], "losses": [2.0, 1.0], "norms": [5.0, 4.0]}

    def fine(**changes: Any) -> list[bool]:
        answers = [good, {**good, **changes}]  # the second rank is another
        return [line.fine for line in tool.compare(tool.LAYOUTS[0], answers, good, good)]

    assert fine() == [True] * 3
    assert fine(logprobs=[[-1.0, -2.0], [-3.001]]) == [False, True, True]
    assert fine(losses=[2.0, 1.001]) == [True, False, True]
    assert fine(norms=[5.0, float("nan")]) == [True, True, False]
    with pytest.raises(SystemExit, match="not the same work"):
        fine(losses=[2.0])
