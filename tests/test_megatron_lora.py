"""Adapters on Megatron's fused layers: trained as PEFT trains them, saved in its form, merged.

Tolerance: 1e-5 relative in fp32 for losses and gradient norms, over 10 steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lora_jobs
import megatron_lora_jobs as jobs
from areal_convert.converter.formats.dcpfile import read
from engine_worker import run_ranks
from lora_jobs import LORA
from megatron_jobs import Case
from models import cached_model

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]

TOLERANCE = 1e-5
FAMILIES = ("llama", "qwen2")

Answer = list[dict[str, Any]]


def case(family: str, **kinds: Any) -> Case:
    config = {**LORA, **kinds.pop("config", {})}
    changes: dict[str, Any] = (
        {"topk_group": 1} if family == "deepseek_v3" else {}
    )  # Megatron-Core ranks groups by other experts
    path = str(cached_model(family, layers=2, **changes))
    return Case(path, config=config, optimizer={"lr": lora_jobs.LR}, **kinds)


def train(cases: dict[str, Case], world: int, out: Path) -> dict[str, Answer]:
    answers = run_ranks(world, jobs.train, cases=list(cases.values()), out=str(out), merge=True, limit=200)
    return {name: [answer[n] for answer in answers] for n, name in enumerate(cases)}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


TWO: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("llama", {"tp": 2}),
    "tp2, qwen2": ("qwen2", {"tp": 2}),
    "tp2, sequences whole": ("llama", {"tp": 2, "megatron": {"sequence_parallel": False}}),
    "pp2, recomputed": ("llama", {"pp": 2, "config": {"gradient_checkpointing": True}}),
    "dp2": ("llama", {"dp": 2}),
}


@pytest.fixture(scope="module")
def one(out: Path) -> dict[str, Answer]:
    return train({family: case(family) for family in FAMILIES} | {"experts": case("qwen3_moe")}, 1, out / "one")


@pytest.fixture(scope="module")
def two(out: Path) -> dict[str, Answer]:
    cases = {name: case(family, **kinds) for name, (family, kinds) in TWO.items()}
    return train(cases | {"tp2, experts": case("qwen3_moe", tp=2)}, 2, out / "two")


@pytest.fixture(scope="module")
def references(one: dict[str, Answer], out: Path) -> dict[str, dict[str, Any]]:
    """PEFT's own training, from the adapters that the engine began with."""
    return {
        family: lora_jobs.reference(case(family).path, str(out / "one" / str(n) / "first"))
        for n, family in enumerate(FAMILIES)
    }


def check(found: Answer, expected: dict[str, Any]) -> None:
    assert expected["losses"][8] < 0.9 * expected["losses"][0], "the reference learns nothing: this would prove little"
    for answer in found:
        for key in ("losses", "norms"):
            print(key, max(abs(a - b) / b for a, b in zip(answer[key], expected[key], strict=True)))
            assert answer[key] == pytest.approx(expected[key], rel=TOLERANCE, abs=0), key
        assert answer["frozen"], "a base weight has changed"
        assert answer["trained"] == answer["adapters"] > 0, "something else is trained"
        assert answer["reloaded"]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_trains_as_peft_does(family: str, one: dict[str, Answer], references: dict[str, Any]) -> None:
    check(one[family], references[family])


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_train_as_peft_does(name: str, two: dict[str, Answer], references: dict[str, Any]) -> None:
    check(two[name], references[TWO[name][0]])


def test_of_a_mixture_of_experts_the_attention_is_trained(
    one: dict[str, Answer], two: dict[str, Answer], out: Path
) -> None:
    check(two["tp2, experts"], one["experts"][0])
    names = load_file(out / "one" / "2" / "trained" / "adapter_model.safetensors")
    assert {name.split(".")[5] for name in names} == {"self_attn"}


def test_every_layout_begins_with_the_same_adapters_and_writes_them_alike(
    one: dict[str, Answer], two: dict[str, Answer], out: Path
) -> None:
    for number, name in enumerate(TWO):
        family = FAMILIES.index(TWO[name][0])
        for saved, exact in (("first", True), ("trained", False), ("merged", False)):
            file = "adapter_model.safetensors" if saved != "merged" else "model.safetensors"
            ours, theirs = (
                load_file(out / world / str(n) / saved / file) for world, n in (("two", number), ("one", family))
            )
            assert ours.keys() == theirs.keys()
            for key in theirs:
                assert torch.allclose(ours[key], theirs[key], rtol=0, atol=0 if exact else 1e-4), (name, saved, key)


@pytest.mark.parametrize("name", ["tp2", "tp2, qwen2", "pp2, recomputed"])
def test_peft_loads_what_was_saved_and_merged_weights_say_the_same(
    name: str, two: dict[str, Answer], out: Path
) -> None:
    from peft import PeftModel

    folder = out / "two" / str(list(TWO).index(name))
    base = case(TWO[name][0]).path
    model = PeftModel.from_pretrained(lora_jobs.plain(base), str(folder / "trained"))
    for found in (lora_jobs.logprobs(model), lora_jobs.logprobs(lora_jobs.plain(str(folder / "merged")))):
        for ours, theirs in zip(two[name][0]["last"], found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_the_training_state_has_the_adapters_and_goes_on(tmp_path: Path) -> None:
    path = str(tmp_path / "step-000000")
    answers = run_ranks(2, jobs.resumed, case=case("llama", tp=2), path=path, limit=200)
    assert all(answer["again"] == answer["rest"] for answer in answers)
    names = read(Path(path) / "iter_0000000").tensors
    assert names and all(".lora_" in name for name in names), "frozen weights are in the state"
    for other in run_ranks(2, jobs.loaded, case=case("llama", pp=2), path=path, limit=200):
        assert other == pytest.approx(answers[0]["rest"], rel=TOLERANCE)


def test_what_cannot_be_is_refused_by_name() -> None:
    targets = [("llama", ["q_proj", "no_such"]), ("qwen3_moe", ["gate_proj"]), ("deepseek_v3", [])]
    said = run_ranks(1, jobs.refusals, cases=[case(f, config={"target_modules": t}) for f, t in targets])[0]
    assert "target_modules: no_such" in said[0] and "target_modules: q_proj" not in said[0]
    assert "gate_proj" in said[1] and "experts get no adapters" in said[1]
    assert "multi-head latent attention" in said[2]
