"""ArchonEngine's adapters: trained as PEFT and torch.optim train them, on every layout; in files as PEFT has them.

Tolerance: 1e-5 relative in fp32 for losses and gradient norms, over 10 steps.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import archon_lora_jobs
import lora_jobs
import models
from archon_jobs import Case
from engine_worker import run_ranks
from lora_jobs import LORA

TOLERANCE = 1e-5

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]

Answer = list[dict[str, Any]]


def case(family: str, **kinds: Any) -> Case:
    config = {**LORA, **kinds.pop("config", {})}
    path = str(models.cached_model(family, layers=4 if "pp" in kinds or family == "qwen2_tied" else 2))
    return Case(path, config=config, optimizer={"lr": lora_jobs.LR}, **kinds)


CASES = {
    "dp2": case("llama", dp=2),
    "tp2": case("qwen2_tied", tp=2),
    "cp2": case("llama", cp=2, config={"gradient_checkpointing": True}),
    "pp2": case("llama", pp=2, schedule="interleaved_1f1b", n_mbs=2),
    "pp2, V": case("qwen2_tied", pp=2, schedule="dual_pipe_v", n_mbs=4),
    "experts": case("qwen3_moe", dp=2, ep=2),
    "latent": case("deepseek_v3", tp=2),
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def two(out: Path) -> dict[str, Answer]:
    answers = run_ranks(2, archon_lora_jobs.train, cases=list(CASES.values()), out=str(out), merge=True)
    return {name: [answer[n] for answer in answers] for n, name in enumerate(CASES)}


def saved(out: Path, name: str) -> Path:
    return out / str(list(CASES).index(name))


@pytest.fixture(scope="module")
def references(two: dict[str, Answer], out: Path) -> dict[str, dict[str, Any]]:
    """PEFT's own training, from the adapters that the engine began with; one of each model."""
    first = {one.path: name for name, one in CASES.items()}
    return {path: lora_jobs.reference(path, str(saved(out, name) / "first")) for path, name in first.items()}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_peft_does(name: str, two: dict[str, Answer], references: dict[str, Any], out: Path) -> None:
    expected = references[CASES[name].path]
    assert expected["losses"][8] < 0.95 * expected["losses"][0], "the reference learns nothing: this would prove little"
    for answer in two[name]:
        for key in ("losses", "norms"):
            assert answer[key] == pytest.approx(expected[key], rel=TOLERANCE, abs=0), key
        assert answer["frozen"], "a base weight has changed"
        assert answer["states"] == answer["trained"] > 0, "the optimizer has states of something else"
        assert answer["reloaded"]
    merged, adapted = (lora_jobs.logprobs(model) for model in _exported(CASES[name].path, saved(out, name)))
    for a, b in zip(merged, adapted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def _exported(base: str, folder: Path) -> tuple[Any, Any]:
    """The merged model as transformers loads it, and the adapter as PEFT does."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(lora_jobs.plain(base), str(folder / "trained"))
    second = [p for n, p in model.named_parameters() if ".lora_B." in n]
    assert second
    assert all(p.abs().max() > 0 for p in second), "a B is zero: the adapter does nothing"
    return lora_jobs.plain(str(folder / "merged")), model


def test_files_are_those_of_the_other_engines(two: dict[str, Answer], out: Path) -> None:
    """Names and first values are alike on every layout, and FSDPEngine's."""
    import engine_jobs

    path = CASES["dp2"].path
    fsdp = engine_jobs.Case(path, config=LORA, optimizer={"lr": lora_jobs.LR})
    run_ranks(1, lora_jobs.train, cases=[fsdp], out=str(out / "fsdp"))
    expected = load_file(out / "fsdp" / "0" / "first" / "adapter_model.safetensors")
    for name, one in CASES.items():
        found = load_file(saved(out, name) / "first" / "adapter_model.safetensors")
        if one.path == path:
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert all(key.startswith("base_model.model.model.layers.") for key in found)
        assert {key.split(".")[5] for key in found} <= {"self_attn", "mlp"}
        assert ("mlp" in {key.split(".")[5] for key in found}) == (name not in ("experts", "latent"))


def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    one = case("llama", pp=2, schedule="1f1b", n_mbs=2)
    other = replace(one, pp=1, tp=2)
    for answer in run_ranks(2, archon_lora_jobs.resumed, case=one, other=other, out=str(tmp_path)):
        assert answer["again"] == answer["rest"]
        assert answer["same"]
        assert answer["other"] == pytest.approx(answer["rest"], rel=TOLERANCE)
    state = sum(f.stat().st_size for f in (tmp_path / "state" / "dcp").iterdir())
    base = sum(f.stat().st_size for f in Path(one.path).glob("*.safetensors"))
    assert state < base / 2, "the frozen weights are in the state"


def test_what_cannot_be_is_refused_by_name() -> None:
    targets = [["q_proj", "no_such"], ["gate_proj"], ["shared_experts.up_proj"], ["norm"], ["lm_head"]]
    families = ["llama", "qwen3_moe", "deepseek_v3", "llama", "llama_tied"]
    cases = [case(f, config={"target_modules": t}) for f, t in zip(families, targets, strict=True)]
    cases += [case("llama", config={"is_critic": True}), case("llama", config={"init_from_scratch": True})]
    said = run_ranks(1, archon_lora_jobs.refusals, cases=cases)[0]
    assert "no_such" in said[0]
    assert "there are: down_proj, gate_proj" in said[0]
    assert "q_proj:" not in said[0]
    assert "gate_proj" in said[1]
    assert "experts are stacked tensors" in said[1]
    assert "belongs to a mixture of experts" in said[2]
    assert "model.norm is a RMSNorm, no linear layer" in said[3]
    assert "shares its weights with the embedding" in said[4]
    assert "value head" in said[5]
    assert "random weights" in said[6]
