"""What one rank does wrong: raised on all of them at once, with its name, and the engine goes on as before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import archon_jobs
import engine_jobs
import megatron_jobs
import models
import together_jobs
from areal_convert.converter.errors import ConfigError, SourceError
from areal_convert.engines.together import Together, check_weight, nothing_of
from engine_worker import run_ranks

Answers = list[list[dict[str, Any]]]
"""Of each rank, one after the other of `CASES`."""

LLAMA = str(models.cached_model("llama", layers=2))
CASES: Mapping[str, tuple[str, Any, int]] = {
    "archon, dual pipe": ("archon", archon_jobs.Case(LLAMA, pp=2, n_mbs=4, schedule="dual_pipe_v"), 0),
    "archon, tp2": ("archon", archon_jobs.Case(LLAMA, tp=2, n_mbs=2), 1),
    "fsdp, dp2": ("fsdp", engine_jobs.Case(LLAMA, dp=2, n_mbs=2), 1),
    "megatron, pp2": ("megatron", megatron_jobs.Case(LLAMA, pp=2), 1),
}
"""The engine, its layout, and the rank that fails: of a pipeline's, the one with the last stage."""


@pytest.fixture(scope="module")
def answers() -> dict[str, list[dict[str, Any]]]:
    found = run_ranks(2, together_jobs.fail, cases=list(CASES.values()))
    return {name: [rank[n] for rank in found] for n, name in enumerate(CASES)}


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_raise_what_one_does_and_name_it(name: str, answers: dict[str, list[dict[str, Any]]]) -> None:
    failing, shares = CASES[name][2], "dp2" not in name
    own, other = answers[name][failing]["says"], answers[name][1 - failing]["says"]
    for what, kind in {
        "loss": "ValueError: the loss is broken",
        "evaluation": "ValueError: the loss is broken",
        "constant": "ConfigError: loss_fn: its loss",
        "weight": "ZeroDivisionError: division by zero",
        "mask": "SourceError: loss_mask: expected",
    }.items():
        assert own[what].startswith(kind), what
        assert other[what].startswith("RankError") and f"rank {failing}: {kind}" in other[what], what
    for said in (own, other):
        assert "share a model, and were given different tokens" in said["tokens"] or not shares
        assert said["number"].startswith("ConfigError: Ranks have between 4 and 8 micro-batches")
        assert said["own"] == "" and "Call onload() first" in said["away"]
    assert shares or ("not in the model's vocabulary" in own["tokens"] and "rank 1: SourceError" in other["tokens"])


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", CASES)
def test_an_engine_goes_on_after_a_failure_as_if_there_had_been_none(
    name: str, answers: dict[str, list[dict[str, Any]]]
) -> None:
    for answer in answers[name]:
        assert answer["losses"] == answer["undisturbed"] and len(set(answer["losses"])) == 3


@pytest.mark.multiprocess
def test_what_breaks_a_collective_is_told_by_name() -> None:
    case = archon_jobs.Case(LLAMA, pp=2, n_mbs=2)
    other, own = run_ranks(2, together_jobs.break_off, case=case, limit=60)
    assert own.startswith("RuntimeError") and "Failed to run stage backward" in own, (
        "the rank's own error goes on there"
    )
    assert other.startswith("RankError: Rank 1 failed: ") and "(MemoryError: no room for a gradient)" in other


@pytest.mark.multiprocess
def test_biases_of_experts_count_tokens_alone_and_move_when_a_step_is_taken() -> None:
    """Whatever is padded, in half precision too; Megatron-Core's as ours."""
    path = str(models.cached_model("deepseek_v3", layers=2, topk_group=1))
    rate, bf16 = {"moe_router_bias_update_rate": 1e-2}, {"dtype": "bfloat16", "pad_to_maximum": True}
    cases = [
        ("archon", archon_jobs.Case(path, dp=2, archon=rate)),
        ("megatron", megatron_jobs.Case(path, dp=2, ep=2, n_mbs=6, megatron=rate)),
        ("megatron", megatron_jobs.Case(path, tp=2, max_tokens=300, megatron=rate, config=bf16)),
    ]
    for ours, *cores in run_ranks(2, together_jobs.balanced, cases=cases):
        assert ours[0] == ours[1] == ours[2] and ours[0]
        for core in cores:
            assert core == ours


# ------------------------------------------------------------------------------------------------ alone


def given(loss: Any) -> torch.Tensor:
    together, logprobs = Together(torch.device("cpu"), None), torch.zeros(3, requires_grad=True)  # type: ignore[arg-type]
    found = together.loss(lambda x: loss(x), logprobs)
    if together.error is not None:
        raise together.error
    found.backward()
    assert logprobs.grad is not None
    return logprobs.grad


def test_a_loss_is_one_number_that_depends_on_the_model() -> None:
    assert given(lambda x: x.sum(0, keepdim=True)).tolist() == [1.0, 1.0, 1.0]
    assert given(lambda x: torch.tensor(0.0)).tolist() == [0.0, 0.0, 0.0], "nothing counts in this micro-batch"
    for loss, says in (
        (lambda x: [1.0], "found list"),
        (lambda x: x, r"shape \(3,\)"),
        (lambda x: x.sum().item(), "float"),
    ):
        with pytest.raises(ConfigError, match=says):
            given(loss)
    with pytest.raises(ConfigError, match="does not depend"):
        given(lambda x: x.detach().sum() + 1)


def test_nothing_has_no_gradient_of_what_is_not_finite() -> None:
    x = torch.full((2, 3), torch.inf, requires_grad=True)
    nothing_of(x).backward()
    assert x.grad is not None and not x.grad.any()


@pytest.mark.parametrize(("total", "says"), [(0.0, "no token"), (float("nan"), "not finite"), (float("inf"), "finite")])
def test_weights_that_cannot_be_divided_by(total: float, says: str) -> None:
    with pytest.raises(SourceError, match=says):
        check_weight(total)
