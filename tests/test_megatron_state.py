"""Training states of a Megatron run: resumed bit for bit, on other ranks, converted without an engine."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megatron_state_jobs as jobs
from areal_convert.engines.state.directory import digest_of
from engine_worker import run_ranks
from megatron_jobs import Case
from models import cached_model, make_model, tensors

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]

PLAIN = {"ddp": {"use_distributed_optimizer": False}}
CLOSE = 2e-4
"""Losses of the same steps in another order of sums, fp32."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """llama on TP2 with the distributed optimizer, stopped at 3 of 5 and resumed."""
    path = tmp_path_factory.mktemp("state") / "step-000000"
    case = Case(str(cached_model("llama", layers=2)), tp=2)
    return path, run_ranks(2, jobs.stop_and_go, case=case, path=str(path), limit=200)


def _resumed_exactly(answers: list[dict[str, Any]], stop: int = 3) -> None:
    for answer in answers:
        assert answer["resumed"] == answer["through"]
        assert answer["digest_resumed"] == answer["digest"]
        assert answer["draws_resumed"] == answer["draws"]
        assert (answer["version"], answer["lr_step"]) == (stop, stop)


def test_the_same_ranks_go_on_bit_for_bit(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    path, answers = saved
    _resumed_exactly(answers)
    assert {"COMPLETE", "trainer.json", "rng", "hf", "iter_0000000"} <= {entry.name for entry in path.iterdir()}


def test_tensor_parallel_ranks_become_pipeline_stages(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    path, answers = saved
    case = Case(str(cached_model("llama", layers=2)), pp=2)
    for other in run_ranks(2, jobs.go_on, case=case, path=str(path), limit=200):
        assert other["resumed"] == pytest.approx(answers[0]["through"], abs=CLOSE)


def test_the_state_converts_without_an_engine(saved: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """By the command line, and equal to what the engine exported at the same step."""
    path, _ = saved
    program = "from areal_convert.converter.cli import main; main()"
    command = [sys.executable, "-c", program, "convert", str(path), str(tmp_path / "hf"), "--to", "hf"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, live = (
        {k: v for file in sorted(where.glob("*.safetensors")) for k, v in load_file(file).items()}
        for where in (tmp_path / "hf", Path(f"{path}-hf"))
    )
    assert ours.keys() == live.keys()
    assert all(torch.equal(ours[name], live[name]) for name in live)


@pytest.mark.parametrize(
    ("change", "how", "why"),
    [
        ({"megatron": PLAIN}, "", "distributed: is True there, False here"),
        ({"megatron": PLAIN, "optimizer": {"type": "sgd"}}, "", "type: is 'adam' there, 'sgd' here"),
        ({"path": "qwen3"}, "weights", "family: is qwen3 here, llama in the state"),
        ({"damaged": True}, "weights", "has another content than was saved"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    saved: tuple[Path, list[dict[str, Any]]], change: dict[str, Any], how: str, why: str, tmp_path: Path
) -> None:
    path, _ = saved
    if change.pop("damaged", False):
        path = Path(shutil.copytree(path, tmp_path / path.name))
        file = max(path.rglob("*.distcp"), key=lambda file: file.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    model = str(cached_model(change.pop("path", "llama"), layers=2))
    (said,) = run_ranks(1, jobs.refuse, case=Case(model, **change), path=str(path), how=how)
    assert why in said


def test_a_save_runs_behind_training(tmp_path: Path) -> None:
    case = Case(str(cached_model("llama_tied", layers=2)), dp=2)
    for found in run_ranks(2, jobs.behind, case=case, root=str(tmp_path / "run"), limit=200):
        assert not found["at_once"]
        assert all(found[name] for name in ("complete", "changed", "same", "polled"))
        assert (found["data"], found["step"]) == ({"at": 7}, 2)
        assert found["kept"] == ["step-000004"]


def test_the_schedule_stays_where_it_is_when_the_configuration_says_so(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    case = Case(str(cached_model("llama", layers=2)), megatron={"use_checkpoint_opt_param_scheduler": False})
    (found,) = run_ranks(1, jobs.go_on, case=case, path=str(saved[0]))
    assert (found["lr_step"], found["version"]) == (0, 3)
    assert found["resumed"] == pytest.approx(saved[1][0]["through"], abs=CLOSE)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_moe", {"dp": 2, "ep": 2}),
        ("qwen2", {"dp": 2, "megatron": PLAIN, "config": {"dtype": "bfloat16"}}),
        ("llama_tied", {"pp": 2, "megatron": {"virtual_pipeline_parallel_size": 2}, "config": {"dtype": "bfloat16"}}),
        ("qwen2", {"dp": 2, "megatron": PLAIN}),
    ],
)
def test_experts_chunks_and_plain_optimizers_go_on_bit_for_bit(
    family: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    case, path = Case(str(cached_model(family, layers=4 if "pp" in sizes else 2)), **sizes), tmp_path / "step-000000"
    answers = run_ranks(2, jobs.stop_and_go, case=case, path=str(path), limit=200)
    _resumed_exactly(answers)
    if "ep" in sizes:  # whole experts become parts of all
        for other in run_ranks(2, jobs.go_on, case=Case(case.path, tp=2, etp=2), path=str(path), limit=200):
            assert other["resumed"] == pytest.approx(answers[0]["through"], abs=CLOSE)


@pytest.mark.slow
def test_the_command_line_saves_behind_training_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    """`train` on TP2, stopped at 3 of 4 and resumed; its last state, converted, is the model that it exported."""
    rows = [{"messages": [{"role": "user", "content": f"w{n}"}, {"role": "assistant", "content": f"w{n + 1} w{n}"}]}
            for n in range(12)]  # fmt: skip
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = make_model("qwen3", tmp_path / "qwen3", layers=2, side_files=True)
    (tmp_path / "run.yaml").write_text(
        f"engine: {{path: {model}, backend: 'megatron:t2', attn_impl: sdpa, dtype: float32}}\n"
        f"data: {{path: {tmp_path}/data.jsonl, batch_size: 6}}\nmax_steps: 4\nlog: {{tensorboard: false}}\n"
    )

    def command(*words: object) -> None:
        line = [sys.executable, "-m", "areal_convert.converter.cli", *map(str, words)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    train = ("train", "--config", tmp_path / "run.yaml", "engine.optimizer.lr=3e-3")
    command(*train, f"dir={tmp_path}/straight")
    stopped = (*train, f"dir={tmp_path}/stopped", "save.every=2", "save.async_save=true")
    command(*stopped, "--until", 3)
    command(*stopped)
    command("convert", tmp_path / "stopped" / "checkpoints" / "step-000004", tmp_path / "hf", "--to", "hf")
    places = (tmp_path / "straight" / "model", tmp_path / "stopped" / "model", tmp_path / "hf")
    assert len({(place / "model.safetensors").read_bytes() for place in places}) == 1


def test_the_marker_knows_every_file(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    path, _ = saved
    marker = json.loads((path / "COMPLETE").read_text())
    files = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert marker["files"].keys() == files - {"COMPLETE"}


def test_uneven_stages_and_layouts_load_train_and_become_even_ones(tmp_path: Path) -> None:
    """The same losses whichever way four layers are cut."""
    llama = str(cached_model("llama", layers=4))
    uneven = Case(llama, pp=2, megatron={"num_layers_in_first_pipeline_stage": 3})
    path = str(tmp_path / "step-000000")
    answers = run_ranks(2, jobs.stop_and_go, case=uneven, path=path, limit=200)
    _resumed_exactly(answers)
    laid_out = Case(llama, pp=2, megatron={"pipeline_model_parallel_layout": "Et|t*3L"})
    for other in run_ranks(2, jobs.go_on, case=laid_out, path=path, limit=200):
        assert other["resumed"] == pytest.approx(answers[0]["through"], abs=CLOSE)


def test_an_fp8_checkpoint_is_read_as_the_values_that_it_stands_for(tmp_path: Path) -> None:
    """On TP2: bit for bit the weights of a checkpoint that has the same values in bfloat16."""
    source = cached_model("llama", layers=2, dtype="bfloat16")
    config, stored, values = json.loads((source / "config.json").read_text()), {}, {}
    for name, tensor in tensors(source).items():
        stored[name] = values[name] = tensor.contiguous()
        if tensor.dim() == 2 and ".layers." in name:
            stored[name] = (tensor.float() * 4).to(torch.float8_e4m3fn)
            scales = 0.25 + torch.arange(-(-tensor.shape[0] // 128) * -(-tensor.shape[1] // 128)) / 8
            stored[f"{name}_scale_inv"] = scales.view(-(-tensor.shape[0] // 128), -1)
            blocks = stored[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            values[name] = (stored[name].float() * blocks[: tensor.shape[0], : tensor.shape[1]]).bfloat16()
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    cases = []
    for name, held, more in (("fp8", stored, quantised), ("bf16", values, {})):
        (tmp_path / name).mkdir()
        save_file(held, tmp_path / name / "model.safetensors", {"format": "pt"})
        (tmp_path / name / "config.json").write_text(json.dumps(config | more))
        cases.append(Case(str(tmp_path / name), tp=2))
    for (eight, loss), (sixteen, same) in run_ranks(2, jobs.loaded_weights, cases=cases):
        assert eight == sixteen and loss == same


class _Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_an_index_that_would_run_code_is_refused_without_running_it(
    saved: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """With the digests of whoever made it."""
    path, ran = Path(shutil.copytree(saved[0], tmp_path / saved[0].name)), tmp_path / "ran"
    index = path / "iter_0000000" / ".metadata"
    index.write_bytes(pickle.dumps(_Evil(str(ran))))
    marker = json.loads((path / "COMPLETE").read_text())
    marker["files"]["iter_0000000/.metadata"] = [index.stat().st_size, digest_of(index)]
    (path / "COMPLETE").write_text(json.dumps(marker))
    case = Case(str(cached_model("llama", layers=2)))
    (said,) = run_ranks(1, jobs.refuse, case=case, path=str(path), how="weights")
    assert "mkdir" in said and not ran.exists()
