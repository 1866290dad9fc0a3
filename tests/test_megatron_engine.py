"""MegatronEngine against transformers and torch.optim alone: the same losses and gradient norms on every layout.

The other side is `engine_jobs.reference`, as for FSDPEngine: padded rows, torch's AdamW, the loss from its definition.
Tolerance: 1e-5 relative, in fp32, over 20 steps (what differs little from another case takes fewer). Megatron-Core's
own models, schedules, DDP and optimizers run, on gloo.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import engine_jobs
import megatron_jobs
import models
from areal_convert.converter.errors import ConfigError
from engine_worker import run_ranks
from megatron_jobs import Case

TOLERANCE = 1e-5

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]

Cases = dict[str, Case]
"""The path of each is a family's name here, with its number of layers unless that is 2: `llama@4`."""

FEW = 6
VPP = {"virtual_pipeline_parallel_size": 2}
PLAIN = {"ddp": {"use_distributed_optimizer": False}}

ONE: Cases = {
    "plain": Case("llama"),
    "accumulated x4": Case("llama", steps=FEW, n_mbs=4),
    "few tokens a micro-batch": Case("llama", steps=FEW, max_tokens=30),
    "padded rows": Case("llama", steps=FEW, padded=True),
    "padded to the maximum": Case("llama", steps=FEW, max_tokens=128, config={"pad_to_maximum": True}),
    "checkpointing": Case("llama", steps=FEW, config={"gradient_checkpointing": True}),
    "eager attention": Case("llama", steps=FEW, config={"attn_impl": "eager"}),
    "plain optimizer": Case("llama", steps=FEW, megatron=PLAIN),
    "tied": Case("llama_tied"),
    "experts, checkpointing": Case("qwen3_moe", steps=FEW, n_mbs=2, config={"gradient_checkpointing": True}),
}
TWO: Cases = {
    "dp2": Case("llama", dp=2, n_mbs=2),
    "dp2, gradients reduced meanwhile": Case(
        "llama", steps=FEW, dp=2, n_mbs=2, megatron={"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}}
    ),
    "dp2, plain optimizer": Case("qwen2", steps=FEW, dp=2, megatron=PLAIN),
    "tp2": Case("llama_tied", tp=2, megatron={"sequence_parallel": False}),
    "tp2, sequence parallel": Case("qwen2", tp=2),
    "pp2": Case("qwen3", pp=2),
    "pp2, tied, plain optimizer": Case("llama_tied", steps=FEW, pp=2, n_mbs=4, megatron=PLAIN),
    "pp2 vpp2": Case("llama@4", pp=2, n_mbs=4, megatron=VPP),
    "pp2 vpp2, tied": Case("llama_tied@4", steps=FEW, pp=2, megatron=VPP),
    "cp2": Case("llama", cp=2),
    "experts, ep2": Case("qwen3_moe", dp=2, ep=2, n_mbs=2),
    "experts, ep2, plain optimizer": Case("mixtral", steps=FEW, dp=2, ep=2, megatron=PLAIN),
    "experts, tp2": Case("mixtral", tp=2),
    "experts, tp2 etp2": Case("qwen3_moe", steps=FEW, tp=2, etp=2),
    "experts, pp2": Case("mixtral", steps=FEW, pp=2),
    "latent attention, ep2": Case("deepseek_v3", dp=2, ep=2),
    "latent attention, tp2": Case("deepseek_v3", steps=FEW, tp=2),
    "latent attention, pp2": Case("deepseek_v3", steps=FEW, pp=2),
}
FOUR: Cases = {
    "tp2 x pp2": Case("llama_tied", tp=2, pp=2),
    "tp2 x pp2 vpp2": Case("llama@4", steps=FEW, tp=2, pp=2, megatron=VPP),
    "dp2 x pp2": Case("qwen2", dp=2, pp=2, n_mbs=4),
    "tp4, fewer KV heads than ranks": Case("qwen3", steps=FEW, tp=4),
    "experts, tp2 x dp2, ep4": Case("qwen3_moe", dp=2, tp=2, ep=4),
    "experts, pp2 x ep2": Case("mixtral", steps=FEW, dp=2, pp=2, ep=2),
    "tp2 x cp2": Case("llama", steps=FEW, tp=2, cp=2),
    "experts, cp2 x dp2, ep4": Case("mixtral", steps=FEW, cp=2, dp=2, ep=4),
    "tied, cp2 x pp2 vpp2": Case("llama_tied@4", steps=FEW, cp=2, pp=2, megatron=VPP),
}
FAMILIES = sorted({case.path for case in (*ONE.values(), *TWO.values(), *FOUR.values())})


def path_of(name: str) -> str:
    family, _, layers = name.partition("@")
    # Megatron-Core ranks groups of experts by another number of their members than transformers.
    changes: dict[str, Any] = {"topk_group": 1} if family == "deepseek_v3" else {}
    return str(models.cached_model(family, layers=int(layers or 2), **changes))


def placed(case: Case) -> Case:
    return dataclasses.replace(case, path=path_of(case.path))


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Any]]:
    found = run_ranks(1, engine_jobs.reference, paths=[path_of(f) for f in FAMILIES])[0]
    return dict(zip(FAMILIES, found, strict=True))


Answers = dict[str, list[dict[str, Any]]]
"""Per case, what each rank said."""


def run_all(cases: Cases, world: int) -> Answers:
    """Every case on ranks that are started once."""
    placed_ = [placed(case) for case in cases.values()]
    answers = run_ranks(world, megatron_jobs.train, limit=220, cases=placed_)
    return {name: [answer[n] for answer in answers] for n, name in enumerate(cases)}


@pytest.fixture(scope="module")
def one() -> Answers:
    return run_all(ONE, 1)


@pytest.fixture(scope="module")
def two() -> Answers:
    return run_all(TWO, 2)


@pytest.fixture(scope="module")
def four() -> Answers:
    return run_all(FOUR, 4)


def check(found: Sequence[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Losses, norms, log-probabilities before and after, evaluation; and that all ranks say the same."""
    first = found[0]
    assert expected["losses"][-1] < 0.8 * expected["losses"][0], "the reference learns nothing: this would prove little"
    steps = len(first["losses"])
    for key in ("losses", "norms"):
        assert first[key] == pytest.approx(expected[key][:steps], rel=TOLERANCE, abs=0), key
    for other in found[1:]:
        for key in ("losses", "norms", "evaluated"):
            assert other[key] == first[key], f"ranks do not agree on {key}"
    ranks = 1 + max(answer["dp_rank"] for answer in found)
    for answer in found:
        own = expected["first"][answer["dp_rank"] :: ranks]
        torch.testing.assert_close(list(answer["first"]), own, rtol=TOLERANCE, atol=TOLERANCE)
        if steps == len(expected["losses"]):  # by then the weights differ in their last bits
            own = expected["last"][answer["dp_rank"] :: ranks]
            torch.testing.assert_close(list(answer["last"]), own, rtol=1e-3, atol=1e-3)
    if steps < len(expected["losses"]):
        return
    targets = torch.cat([logprobs[1:-1] for logprobs in expected["last"]])
    assert first["evaluated"] == pytest.approx(-targets.mean().item(), rel=1e-4)


@pytest.mark.parametrize("name", ONE)
def test_one_rank_trains_as_transformers_alone(name: str, one: Answers, references: dict[str, dict[str, Any]]) -> None:
    check(one[name], references[ONE[name].path])


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_train_as_transformers_alone(name: str, two: Answers, references: dict[str, dict[str, Any]]) -> None:
    check(two[name], references[TWO[name].path])


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_train_as_transformers_alone(
    name: str, four: Answers, references: dict[str, dict[str, Any]]
) -> None:
    check(four[name], references[FOUR[name].path])


def test_batches_are_cut_as_asked(one: Answers, two: Answers) -> None:
    assert one["plain"][0]["micro_batches"] == 1
    assert one["accumulated x4"][0]["micro_batches"] == 4
    assert one["few tokens a micro-batch"][0]["micro_batches"] >= 4  # 106 tokens, 30 at a time
    assert two["pp2"][0]["micro_batches"] == 2  # something to do for each stage


def test_recomputing_changes_no_bit(one: Answers) -> None:
    for key in ("losses", "norms"):
        assert one["checkpointing"][0][key] == one["plain"][0][key][:FEW], key


def test_every_rank_reads_its_own_part(two: Answers, four: Answers) -> None:
    whole = sum(t.numel() * 4 for t in models.tensors(Path(path_of("qwen2"))).values())
    stages = [answer["loaded"] for answer in four["dp2 x pp2"]]
    assert stages[0] + stages[2] == whole  # one replica: two stages
    halves = [answer["loaded"] for answer in two["tp2, sequence parallel"]]
    assert all(count < 0.53 * whole for count in halves)


GROUPS = {
    # case: (data, model) of every rank; ranks count tensor, context, data, pipeline parallel
    "tp2 x pp2": ([[0], [1], [2], [3]], [[0, 1, 2, 3]] * 4),
    "dp2 x pp2": ([[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]),
    "experts, tp2 x dp2, ep4": ([[0, 2], [1, 3], [0, 2], [1, 3]], [[0, 1], [0, 1], [2, 3], [2, 3]]),
}


@pytest.mark.parametrize("name", GROUPS)
def test_who_is_with_whom(name: str, four: Answers) -> None:
    data, model = GROUPS[name]
    found = [answer["groups"] for answer in four[name]]
    assert [g["data"] for g in found] == data
    assert [g["model"] for g in found] == model
    assert [g["head"] for g in found] == [ranks[0] for ranks in model]
    assert [g["is_head"] for g in found] == [rank == ranks[0] for rank, ranks in enumerate(model)]
    assert all(g["cpu"] == [0, 1, 2, 3] for g in found)


# ------------------------------------------------------------------------------------------------ weights out

SAVED: Cases = {
    "pp2 vpp2, tied": Case("llama_tied@4", pp=2, steps=0, megatron=VPP),
    "pp2 x tp2": Case("llama", pp=2, tp=2, steps=0),
    "tp2 x dp2": Case("qwen2", tp=2, dp=2, steps=0),
    "ep2 x pp2": Case("qwen3_moe", dp=2, ep=2, pp=2, steps=0),
    "tp2 x dp2, ep4": Case("mixtral", tp=2, dp=2, ep=4, steps=0),
    "latent attention, pp2 x tp2": Case("deepseek_v3", pp=2, tp=2, steps=0),
}


def test_what_is_saved_is_what_was_loaded(tmp_path: Path) -> None:
    """Bit for bit on every layout: names, shapes, true rows of the vocabulary (1003, padded to 1024)."""
    for world in (2, 4):
        cases = {n: c for n, c in SAVED.items() if c.tp * c.pp * c.dp == world}
        outs = [str(tmp_path / name.replace(" ", "_")) for name in cases]
        run_ranks(world, megatron_jobs.trained_and_saved, cases=[placed(c) for c in cases.values()], outs=outs)
        for case, out in zip(cases.values(), outs, strict=True):
            before, after = models.tensors(Path(path_of(case.path))), models.tensors(Path(out))
            assert before.keys() == after.keys()
            for name, tensor in before.items():
                assert torch.equal(after[name], tensor), (out, name)


def test_a_saved_model_computes_what_the_engine_did(tmp_path: Path, references: dict[str, dict[str, Any]]) -> None:
    out = str(tmp_path / "out")
    run_ranks(2, megatron_jobs.trained_and_saved, cases=[placed(Case("qwen3", pp=2))], outs=[out])
    found = models.logits(Path(out), engine_jobs.sequences(0)[2][None])
    logprobs = torch.log_softmax(found[0, :-1], -1).gather(1, engine_jobs.sequences(0)[2][1:, None])[:, 0]
    torch.testing.assert_close(logprobs, references["qwen3"]["last"][2][:-1], rtol=1e-3, atol=1e-3)


def test_a_model_is_saved_as_the_last_step_left_it(tmp_path: Path) -> None:
    """With parameters gathered by the next forward pass, which there is none of, too."""
    overlap = {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}}
    cases = [placed(Case("llama", dp=2, steps=3, megatron=m)) for m in ({}, overlap)]
    outs = [str(tmp_path / name) for name in ("plain", "overlap")]
    run_ranks(2, megatron_jobs.trained_and_saved, cases=cases, outs=outs)
    plain, overlapped = (models.tensors(Path(out)) for out in outs)
    for name, tensor in plain.items():
        assert torch.equal(overlapped[name], tensor), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_brings_weights_and_masters_back(dtype: str, tmp_path: Path) -> None:
    """Two steps from the same weights have the same loss, the second one's masters included; files in fp32 have the
    masters, to the bit."""
    case = Case(path_of("mixtral"), dp=2, ep=2, config={"dtype": dtype})
    for answer in run_ranks(2, megatron_jobs.reloaded, case=case, out=str(tmp_path / "out")):
        assert answer["same"]
        assert answer["moved"]
        assert answer["losses"][0] == answer["losses"][1]
    saved, loaded = models.tensors(tmp_path / "out"), models.tensors(Path(case.path))
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)


# ------------------------------------------------------------------------------------------------ balancing experts

BALANCED: Cases = {
    "plain": Case(""),
    "padded to the maximum": Case("", max_tokens=128, config={"pad_to_maximum": True}),
    "tp2": Case("", tp=2),
    "tp2, padded to the maximum": Case("", tp=2, max_tokens=128, config={"pad_to_maximum": True}),
    "cp2": Case("", cp=2),
}


def test_experts_are_balanced_as_transformers_does() -> None:
    """One layer, where the two formulas say the same; FSDPEngine takes transformers' own. Padding counts nowhere."""
    loss: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    path = str(models.cached_model("qwen3_moe", layers=1, **loss))
    without = str(models.cached_model("qwen3_moe", layers=1))
    other = [engine_jobs.Case(path, steps=6), engine_jobs.Case(without, steps=6)]
    wanted, unbalanced = run_ranks(1, engine_jobs.train, cases=other)[0]
    assert wanted["norms"] != pytest.approx(unbalanced["norms"], rel=1e-3)
    for world in (1, 2):
        cases = [dataclasses.replace(c, path=path, steps=6) for c in BALANCED.values() if c.tp * c.cp == world]
        for case, found in zip(cases, run_ranks(world, megatron_jobs.train, cases=cases)[0], strict=True):
            for key in ("losses", "norms"):
                assert found[key] == pytest.approx(wanted[key], rel=TOLERANCE, abs=0), (case, key)


def test_the_balancing_loss_is_the_mean_over_layers_and_stages() -> None:
    """The same on every layout: stages, sequence parallelism beyond the first stage, micro-batches of one length."""
    loss: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    path = str(models.cached_model("qwen3_moe", layers=2, **loss))
    size: dict[str, Any] = {"max_tokens": 64, "n_mbs": 2, "steps": 4, "config": {"pad_to_maximum": True}}
    plain = run_ranks(1, megatron_jobs.train, cases=[Case(path, **size)])[0][0]
    staged = run_ranks(4, megatron_jobs.train, cases=[Case(path, pp=2, tp=2, **size)])[0][0]
    for key in ("losses", "norms"):
        assert staged[key] == pytest.approx(plain[key], rel=TOLERANCE, abs=0), key


# ------------------------------------------------------------------------------------------------ and the rest


@pytest.mark.parametrize(
    "changes", [{"ep": 2, "path": "mixtral"}, {"megatron": PLAIN, "path": "mixtral"}, {"path": "llama"}]
)
def test_bfloat16_keeps_the_masters_of_the_checkpoint(changes: dict[str, Any]) -> None:
    case = placed(Case(dp=2, config={"dtype": "bfloat16"}, **changes))
    assert run_ranks(2, megatron_jobs.masters, case=case, compare="masters") == [0.0, 0.0]


def test_bfloat16_trains(references: dict[str, dict[str, Any]]) -> None:
    case = placed(Case("llama", pp=2, config={"dtype": "bfloat16"}))
    losses = run_ranks(2, megatron_jobs.train, cases=[case])[0][0]["losses"]
    assert losses == pytest.approx(references["llama"]["losses"], rel=0.03)
    assert losses != references["llama"]["losses"]


@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2}, {"dp": 2, "megatron": PLAIN}])
def test_a_step_that_is_not_finite_is_skipped(layout: dict[str, Any]) -> None:
    for answer in run_ranks(2, megatron_jobs.skipped_step, case=placed(Case("llama", **layout))):
        assert answer["bad"]["update_successful"] == 0.0
        assert answer["bad"]["grad_norm"] != answer["bad"]["grad_norm"] or answer["bad"]["grad_norm"] == float("inf")
        assert answer["unchanged"]
        assert answer["good"]["update_successful"] == 1.0
        assert answer["changed"]


@pytest.mark.parametrize("changes", [{}, {"config": {"dtype": "bfloat16"}}, {"megatron": PLAIN}])
def test_offloading_changes_no_bit(changes: dict[str, Any]) -> None:
    for away, here, left in run_ranks(2, megatron_jobs.moved, case=placed(Case("mixtral", dp=2, **changes))):
        assert away == here
        assert left == 0


def test_forward_batch_cuts_and_fills_up_on_every_stage() -> None:
    first, second = run_ranks(2, megatron_jobs.resized, case=placed(Case("llama", pp=2, optimizer=None)))
    assert first == second
    whole, cut, filled, same, _ = first
    assert cut == pytest.approx(whole[:3])
    assert filled == pytest.approx([*whole[6:], 0.0, 0.0, 0.0, 0.0])
    assert same == pytest.approx(whole[:6])


def test_a_loss_of_ones_own() -> None:
    """Called on the last stage alone; the gradients are the sum of the micro-batches', on every layout the same."""
    plain = run_ranks(1, megatron_jobs.own_loss, case=placed(Case("llama")))[0]
    first, last = run_ranks(2, megatron_jobs.own_loss, case=placed(Case("llama", pp=2)))
    assert first["shapes"] == []
    assert [rows for rows, _ in last["shapes"]] == [7, 9, 7, 9]
    assert first["norm"] == last["norm"] == pytest.approx(plain["norm"], rel=TOLERANCE)


def test_the_schedule_reaches_every_group() -> None:
    settings = {"lr_scheduler_type": "linear", "warmup_steps": 2}
    case = placed(Case("mixtral", dp=2, ep=2, optimizer=settings))
    assert run_ranks(2, megatron_jobs.schedule_of, case=case) == [pytest.approx([0.0, 5e-4, 1e-3, 5e-4])] * 2


def test_one_engine_at_a_time_and_nothing_is_left() -> None:
    for answer in run_ranks(2, megatron_jobs.lifetimes, case=placed(Case("llama", tp=2))):
        assert "one MegatronEngine at a time" in answer["refused"]
        assert not answer["initialized"]
        assert answer["groups"] == (1, 1)  # the default one, which is not the engine's


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"megatron": {"enable_mtp": True}}, "megatron.enable_mtp: true: this llama model has no such layers"),
        ({"megatron": {"use_torch_fsdp2": True, "wrap_with_ddp": False}}, "megatron.wrap_with_ddp"),
        ({"config": {"is_critic": True}}, "is_critic"),
        ({"config": {"attn_impl": "flash_attention_2"}}, "attn_impl"),
        ({"megatron": {"moe_router_fusion": True}}, "megatron.moe_router_fusion"),
    ],
)
def test_what_is_not_there_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    """Before any process group is made."""
    with pytest.raises(ConfigError) as error:
        megatron_jobs.make_engine(placed(Case("llama", **changes)))
    assert said in str(error.value)
    assert not torch.distributed.is_initialized()
