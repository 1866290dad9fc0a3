"""FSDPEngine besides plain training: numerics, memory, random weights, refusals, and the parts it is made of."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import engine_jobs
import models
from areal_convert.converter.errors import ConfigError, MeshError, PlanError, SourceError
from engine_jobs import Case
from engine_worker import RanksFailed, run_ranks

several = pytest.mark.multiprocess


def path_of(family: str, **kinds: Any) -> str:
    return str(models.cached_model(family, layers=2, **kinds))


# ------------------------------------------------------------------------------------------------ numerics


@several
def test_bf16_computes_close_to_fp32_on_every_layout() -> None:
    bf16 = {"dtype": "bfloat16"}
    path = path_of("llama", dtype="bfloat16")
    alone = run_ranks(1, engine_jobs.train, cases=[Case(path, steps=5), Case(path, steps=5, config=bf16)])[0]
    cases = [Case(path, steps=5, config=bf16, tp=2), Case(path, steps=5, config=bf16, cp=2)]
    for found in [alone[1], *run_ranks(2, engine_jobs.train, cases=cases)[0]]:
        assert found["losses"] == pytest.approx(alone[0]["losses"], rel=2e-3)
        assert found["norms"] == pytest.approx(alone[0]["norms"], rel=2e-2)
        assert found["losses"] != alone[0]["losses"]


@several
def test_optimizers_that_are_not_adam_train_too() -> None:
    path = path_of("llama")
    kahan = Case(path, steps=9, config={"dtype": "bfloat16"}, optimizer={"type": "adam_bf16"})
    adam, sgd, small = run_ranks(
        1,
        engine_jobs.train,
        cases=[Case(path, steps=9), Case(path, steps=9, optimizer={"type": "sgd", "lr": 0.1}), kahan],
    )[0]
    assert sgd["losses"][-1] < sgd["losses"][3] - 0.3
    assert small["losses"] == pytest.approx(adam["losses"], rel=1e-2)


@several
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_everywhere() -> None:
    for answer in run_ranks(2, engine_jobs.skipped_step, case=Case(path_of("llama"), dp=2)):
        assert answer["bad"]["update_successful"] == 0.0 and answer["unchanged"]
        assert not torch.isfinite(torch.tensor(answer["bad"]["grad_norm"]))
        assert answer["good"]["update_successful"] == 1.0 and answer["changed"]


@several
def test_the_trainer_steps_the_learning_rate() -> None:
    decaying = {"lr": 0.4, "lr_scheduler_type": "linear", "warmup_steps": 1}
    rates = run_ranks(1, engine_jobs.schedule_of, case=Case(path_of("llama"), optimizer=decaying))[0]
    assert rates == pytest.approx([0.0, 0.4, 0.4 * 2 / 3, 0.4 / 3])


@several
def test_moving_everything_away_and_back_changes_nothing() -> None:
    away, here = run_ranks(2, engine_jobs.moved, case=Case(path_of("qwen3"), tp=2))[0]
    assert away == here


@several
def test_the_results_have_the_lengths_that_were_asked_for() -> None:
    whole, *rows = run_ranks(1, engine_jobs.resized, case=Case(path_of("llama"), n_mbs=2))[0]
    assert [len(whole), *map(len, rows)] == [11, 3, 9, 6, 5]
    assert whole[5] == 0.0 and whole[10] == 0.0, "there is no token behind the last one"
    assert rows[0] == whole[:3] and rows[2] == whole[:6] and rows[3] == whole[6:]
    assert rows[1] == [*whole[6:], 0.0, 0.0, 0.0, 0.0]


@several
def test_a_critic_trains_a_value_head_the_same_on_every_layout() -> None:
    critic = {"is_critic": True, "disable_dropout": True}  # transformers' value heads have 0.1 of it
    alone = run_ranks(1, engine_jobs.critic, case=Case(path_of("llama"), config=critic))[0]
    assert alone["names"] == ["score.weight", "score.bias"]
    assert alone["losses"][-1] < 0.5 * alone["losses"][0]
    assert alone["shape"] == (106,)
    for tp, cp in ((2, 1), (1, 2)):
        case = Case(path_of("llama"), tp=tp, cp=cp, config=critic)
        other = run_ranks(2, engine_jobs.critic, case=case)[0]
        assert other["losses"] == pytest.approx(alone["losses"], rel=1e-5)


@several
@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler")
def test_compiled_blocks_compute_the_same() -> None:
    compiled = {"fsdp": {"enable_compile": True}}
    path = path_of("llama")
    cases = [Case(path), Case(path, config=compiled)]
    plain, fast = run_ranks(1, engine_jobs.two_steps, cases=cases, limit=280)[0]
    for (loss, norm), expected in zip(fast, plain, strict=True):
        assert (loss, norm) == pytest.approx(expected, rel=1e-5)


# ------------------------------------------------------------------------------------------------ loading


@several
def test_random_weights_are_the_same_on_every_layout() -> None:
    path, scratch = path_of("qwen3_moe"), {"init_from_scratch": True}
    alone = [Case(path, config=scratch), Case(path, config={**scratch, "seed": 2})]
    one, other = run_ranks(1, engine_jobs.scratch_digests, cases=alone)[0]
    assert one != other
    layouts = [Case(path, dp=4, config=scratch), Case(path, dp=2, tp=2, config=scratch)]
    assert set(run_ranks(4, engine_jobs.scratch_digests, cases=layouts)[0]) == {one}


@several
def test_no_rank_holds_more_than_its_boxes_while_loading() -> None:
    """Of 200 MB: a rank of two ends with half, never makes a larger tensor than its largest box, and grows by little
    more than what it holds in the end: the chunks that are read at a time."""
    path = path_of("llama", hidden_size=1024, intermediate_size=3072, vocab_size=12000)
    for case in (Case(path, dp=2), Case(path, tp=2)):
        for rank in run_ranks(2, engine_jobs.loading_memory, case=case, tiny=path_of("llama")):
            assert rank["whole"] > 180e6
            assert rank["held"] < 0.51 * rank["whole"]
            assert rank["tensor"] <= rank["box"]
            assert rank["grown"] < rank["held"] + 48e6 < 0.8 * rank["whole"]


@pytest.mark.parametrize("family", models.FAMILIES)
def test_buffers_that_no_checkpoint_has_are_those_of_a_normal_model(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from areal_convert.engines.fsdp import model as ours

    path = path_of(family)
    model = ours.build(ours.parse_config(AutoConfig.from_pretrained(path).to_dict()), torch.float32)
    assert all(p.is_meta for p in model.parameters())
    ours.materialize(model, torch.device("cpu"))
    normal: Any = AutoModelForCausalLM.from_pretrained(path)
    mine, theirs = dict(model.named_buffers()), dict(normal.named_buffers())
    kept = set(model.state_dict())
    assert mine.keys() == theirs.keys()
    lost = [name for name in mine if name not in kept]
    assert lost
    for name in lost:
        assert torch.equal(mine[name], theirs[name]), name


# ------------------------------------------------------------------------------------------------ refusals


def engine_of(path: str, **changes: Any) -> Any:
    from areal_convert.engines.api.configs import OptimizerConfig, TrainEngineConfig
    from areal_convert.engines.fsdp.engine import FSDPEngine

    settings = {"dtype": "float32", "attn_impl": "sdpa", "optimizer": OptimizerConfig(), **changes}
    return FSDPEngine(TrainEngineConfig(path=path, **settings))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel_strategy": {"tensor_parallel_size": 8}}, "num_key_value_heads"),
        ({"parallel_strategy": {"pipeline_parallel_size": 2}}, "megatron and archon can"),
        ({"parallel_strategy": {"data_parallel_size": 2}}, "2 ranks were configured, 1 are there"),
        ({"attn_impl": "flash_attention_2"}, "attn_impl"),
        ({"attn_impl": "flex_attention"}, "no backward pass on the CPU"),
        ({"backend": "megatron"}, "megatron"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="what a CPU refuses")
def test_what_cannot_run_is_refused_before_any_group_is_made(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(path_of("llama"), **changes).create_process_group()
    assert not dist.is_initialized()


def test_an_engine_without_its_parts_says_so() -> None:
    engine = engine_of(path_of("llama"))
    with pytest.raises(ConfigError, match="create_process_group"):
        engine.initialize()
    with pytest.raises(ConfigError, match="initialize"):
        engine.train()
    with pytest.raises(ConfigError, match="No inference engine"):
        engine.rollout_batch([], None)


def misused(path: str) -> list[str]:
    """What an engine answers to calls that make no sense."""
    from areal_convert.engines.api.metas import WeightUpdateMeta
    from areal_convert.engines.losses import sft_loss, sft_weight

    engine = engine_of(path, optimizer=None)
    engine.create_process_group()
    answers = []

    def refused(error: type[Exception], call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with pytest.raises(error) as caught:
            call(*args, **kwargs)
        answers.append(str(caught.value))

    refused(ConfigError, engine.initialize, "localhost:1")
    engine.initialize()
    batch = engine_jobs.batch_of(engine, 0)
    refused(SourceError, engine.eval_batch, {**batch, "loss_mask": batch["loss_mask"] * 0}, sft_loss, sft_weight)
    refused(ConfigError, engine.train_batch, batch, sft_loss, sft_weight)
    refused(ConfigError, engine.update_weights, WeightUpdateMeta(type="xccl"))
    engine.destroy()
    engine.destroy()
    answers.append(str(dist.is_initialized()))
    return answers


@several
def test_calls_that_make_no_sense_are_refused() -> None:
    addr, nothing, evaluates, xccl, left = run_ranks(1, misused, path=path_of("llama"), init=False)[0]
    assert "localhost:1" in addr
    assert "no token" in nothing
    assert "optimizer" in evaluates
    assert "connect_engine" in xccl
    assert left == "False", "the group that the engine made is gone with it"


def uncovered(path: str) -> str:
    """A layer that the plan does not know."""
    from torch.distributed.device_mesh import init_device_mesh

    from areal_convert.engines.fsdp import model as ours
    from areal_convert.engines.fsdp.tp_plans import plan_for
    from areal_convert.engines.tensor_parallel import TensorParallel, parallelize
    from areal_convert.engines.weights import open_model

    config = ours.parse_config(open_model(path).config)
    model: Any = ours.build(config, torch.float32)
    model.model.layers[1].mlp.extra = nn.Linear(4, 4, device="meta")
    tp = TensorParallel(init_device_mesh("cpu", (dist.get_world_size(),)))
    with pytest.raises(PlanError) as caught:
        parallelize(model, plan_for(model, config, 2), tp)
    with pytest.raises(MeshError, match="num_key_value_heads"):
        plan_for(model, config, 8)
    config.model_type = "gpt2"
    with pytest.raises(ConfigError, match="gpt2"):
        plan_for(model, config, 2)
    return str(caught.value)


@several
def test_a_layer_without_a_style_is_named() -> None:
    assert "model.layers.1.mlp.extra" in run_ranks(2, uncovered, path=path_of("llama"))[0]


# ------------------------------------------------------------------------------------------------ parts


def attend(impl: str, window: int | None = None) -> tuple[torch.Tensor, ...]:
    from areal_convert.engines.packed_attention import Packing, packed_attention

    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, heads, 12, 8, generator=g).requires_grad_() for heads in (4, 2, 2))
    bounds = [0, 5, 6, 12]
    packing = Packing(bounds, torch.tensor(bounds, dtype=torch.int32), impl)
    out, _ = packed_attention(nn.Module(), q, k, v, None, sliding_window=window, packing=packing)
    out.square().sum().backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return out.detach(), q.grad, k.grad, v.grad


def attend_by_hand(window: int | None = None) -> torch.Tensor:
    """softmax(q kᵀ / √d) v under the one mask that says all: same sequence, not later, not too far."""
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, heads, 12, 8, generator=g) for heads in (4, 2, 2))
    owner = torch.tensor([0] * 5 + [1] + [2] * 6)
    place = torch.arange(12)
    distance = place[:, None] - place[None]
    seen = (owner[:, None] == owner[None]) & (distance >= 0) & (distance < (window or 99))
    k, v = k[:, [0, 0, 1, 1]], v[:, [0, 0, 1, 1]]
    scores = (q @ k.transpose(2, 3) / 8**0.5).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 3, 100])
def test_packed_sequences_do_not_see_each_other(window: int | None) -> None:
    sdpa, eager = attend("sdpa", window), attend("eager", window)
    torch.testing.assert_close(sdpa[0], attend_by_hand(window), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sdpa, eager, rtol=1e-5, atol=1e-5)


def test_attention_refuses_what_it_would_leave_out() -> None:
    from areal_convert.engines.packed_attention import packed_attention

    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(ConfigError, match="s_aux"):
        packed_attention(nn.Module(), x, x, x, None, s_aux=torch.zeros(2))
    with pytest.raises(ConfigError, match="no packed row"):
        packed_attention(nn.Module(), x, x, x, None)


def problem() -> dict[str, Any]:
    g = torch.Generator().manual_seed(2)
    shapes = {"a.0.w": (6, 5), "a.1.w": (3,), "head": (4, 2)}
    return {name: nn.Parameter(torch.randn(shape, generator=g)) for name, shape in shapes.items()}


def descend(optimizer: Any, named: dict[str, Any], steps: int = 7) -> list[torch.Tensor]:
    for step in range(steps):
        for number, parameter in enumerate(named.values()):
            if (step, number) != (3, 1):  # one parameter has no gradient once
                parameter.grad = (parameter.detach() + number).sin().to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in named.values()]


def test_adam_is_torchs_also_layer_by_layer() -> None:
    from areal_convert.engines.sharded_optim import AdamW, Streaming

    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    theirs, mine, streamed = problem(), problem(), problem()
    expected = descend(torch.optim.AdamW(list(theirs.values()), fused=True, **settings), theirs)
    optimizer = AdamW(mine, **settings)
    assert all(map(torch.equal, descend(optimizer, mine), expected))
    by_layers = AdamW(streamed, **settings, blocks=["a.0", "a.1"], streaming=Streaming(torch.device("cpu"), 1))
    assert all(map(torch.equal, descend(by_layers, streamed), expected))
    assert {k for state in optimizer.state.values() for k in state} == {"step", "exp_avg", "exp_avg_sq"}
    assert [float(optimizer.state[p]["step"]) for p in mine.values()] == [7, 6, 7]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs(momentum: float) -> None:
    from areal_convert.engines.sharded_optim import SGD

    theirs, mine = problem(), problem()
    torchs = torch.optim.SGD(list(theirs.values()), lr=0.1, momentum=momentum, weight_decay=0.1)
    expected = descend(torchs, theirs)
    found = descend(SGD(mine, lr=0.1, momentum=momentum, weight_decay=0.1), mine)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_compensation_keeps_small_steps_of_bf16_parameters() -> None:
    """Steps of 1e-4 on a value of 1.0 are lost to bf16's rounding one by one, and add up with compensation."""
    from areal_convert.engines.sharded_optim import AdamW, AdamWKahan

    moved = {}
    for kind in (AdamW, AdamWKahan):
        parameter = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        optimizer = kind({"w": parameter}, lr=1e-4, weight_decay=0.0)
        for _ in range(400):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        moved[kind] = 1.0 - parameter.detach().float().mean().item()
    assert moved[AdamW] == 0.0
    assert moved[AdamWKahan] == pytest.approx(0.04, rel=0.1)


def fails_on_one_rank() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 found something")
    dist.barrier()


@several
def test_ranks_that_fail_show_their_tracebacks() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, fails_on_one_rank, limit=30)
    text = str(caught.value)
    assert "rank 1 found something" in text and "fails_on_one_rank" in text and "rank 0: " in text


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=str(tmp_path / "nothing")):
        engine_of(str(tmp_path / "nothing")).create_process_group()
