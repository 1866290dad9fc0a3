"""Each engine on one GPU: the losses of plain transformers on the CPU, and what only a GPU can do.

`tools/gpu_check.sh` runs these, and measures speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

import archon_jobs
import engine_jobs
import megatron_jobs
import models
from engine_jobs import Case, batch_of, make_engine

TOLERANCE = 1e-4
"""Relative, in fp32 over 10 steps: a GPU sums in another order than a CPU. TF32 is off, as it is by default."""

STEPS = 10

BF16 = 2e-2
"""Relative, over a few steps of bf16."""

TRANSFORMER_ENGINE = find_spec("transformer_engine") is not None

pytestmark = [pytest.mark.gpu]


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No rank of anybody's job, and no group that a failed test left behind."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def train(case: Case, steps: int = STEPS) -> tuple[list[dict[str, Any]], Any]:
    from areal_convert.engines.losses import sft_loss, sft_weight

    engine = make_engine(case)
    assert engine.device.type == "cuda"
    return [engine.train_batch(batch_of(engine, step), sft_loss, sft_weight) for step in range(steps)], engine


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
@pytest.mark.parametrize("offload", [False, True])
def test_fp32_losses_are_the_cpus(family: str, offload: bool) -> None:
    path = str(models.cached_model(family, layers=2))
    (expected,) = engine_jobs.reference([path], STEPS)
    results, engine = train(Case(path, config={"fsdp": {"offload_params": offload}}))
    engine.destroy()
    assert [r["loss"] for r in results] == pytest.approx(expected["losses"], rel=TOLERANCE)
    assert [r["grad_norm"] for r in results] == pytest.approx(expected["norms"], rel=10 * TOLERANCE)


def test_attention_kernels_agree_in_bf16() -> None:
    path = str(models.cached_model("llama", layers=2, head_dim=16))  # narrower heads have no flex kernel
    kinds = ["sdpa", "flex_attention"] + (["flash_attention_2"] if find_spec("flash_attn") else [])
    found = {}
    for kind in kinds:
        results, engine = train(Case(path, config={"dtype": "bfloat16", "attn_impl": kind}), 3)
        engine.destroy()
        found[kind] = [r["loss"] for r in results]
    for kind in kinds[1:]:
        assert found[kind] == pytest.approx(found["sdpa"], rel=2e-2), kind


def test_offload_empties_the_gpu_and_onload_brings_back_every_bit() -> None:
    path = str(models.cached_model("llama", layers=2))
    _, engine = train(Case(path), 2)
    before = engine_jobs.digest(engine.model)
    held = torch.cuda.memory_allocated()
    engine.offload()
    assert torch.cuda.memory_allocated() < held / 4
    engine.onload()
    assert engine_jobs.digest(engine.model) == before
    engine.destroy()


# ------------------------------------------------------------------------------------------------ ArchonEngine


def train_archon(path: str, steps: int = STEPS, **changes: Any) -> tuple[list[dict[str, Any]], Any]:
    from areal_convert.engines.losses import sft_loss, sft_weight

    engine = archon_jobs.make_engine(archon_jobs.Case(path, **changes))
    assert engine.device.type == "cuda"
    return [engine.train_batch(batch_of(engine, step), sft_loss, sft_weight) for step in range(steps)], engine


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("archon", [{}, {"enable_compile": True}, {"offload_params": True}], ids=str)
def test_archons_fp32_losses_are_the_cpus(family: str, archon: dict[str, Any]) -> None:
    path = str(models.cached_model(family, layers=2))
    (expected,) = engine_jobs.reference([path], STEPS)
    results, engine = train_archon(path, archon=archon)
    engine.destroy()
    assert [r["loss"] for r in results] == pytest.approx(expected["losses"], rel=TOLERANCE)
    assert [r["grad_norm"] for r in results] == pytest.approx(expected["norms"], rel=10 * TOLERANCE)


def test_archons_attention_over_packed_rows_agrees_in_bf16() -> None:
    path = str(models.cached_model("llama", layers=2, head_dim=16))
    kinds = {"sdpa": "sdpa", "flex_attention": "varlen"}
    kinds |= {"flash_attention_2": "varlen"} if find_spec("flash_attn") else {}
    found = {}
    for kernel, kind in kinds.items():
        changes: dict[str, Any] = {"dtype": "bfloat16", "attn_impl": kernel}
        results, engine = train_archon(path, 3, config=changes, archon={"attn_type": kind})
        engine.destroy()
        found[kernel] = [r["loss"] for r in results]
    for kernel in found:
        assert found[kernel] == pytest.approx(found["sdpa"], rel=BF16), kernel


def test_archons_offload_empties_the_gpu_and_onload_brings_back_every_bit() -> None:
    _, engine = train_archon(str(models.cached_model("llama", layers=2)), 2)
    before, held = archon_jobs.digests(engine), torch.cuda.memory_allocated()
    engine.offload()
    assert torch.cuda.memory_allocated() < held / 4
    engine.onload()
    assert archon_jobs.digests(engine) == before
    engine.destroy()


def test_archon_trains_in_fp8_with_block_scales() -> None:
    """Hopper; where it is not, refused with the reason, which is the reason to skip."""
    from areal_convert.converter.errors import ConfigError

    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    path = str(models.cached_model("llama", layers=2, num_key_value_heads=2, **sizes))
    found = {}
    for mode in ("disabled", "blockwise"):
        try:
            results, engine = train_archon(path, config={"dtype": "bfloat16"}, archon={"fp8_config": {"mode": mode}})
        except ConfigError as error:
            pytest.skip(str(error))
        engine.destroy()
        found[mode] = [r["loss"] for r in results]
    assert found["blockwise"] != found["disabled"], "nothing was computed in FP8"
    assert found["blockwise"] == pytest.approx(found["disabled"], rel=5e-2)
    assert found["blockwise"][-1] < found["blockwise"][0]


# ------------------------------------------------------------------------------------------------ MegatronEngine

needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-Core is not installed")


def train_megatron(path: str, steps: int = STEPS, **changes: Any) -> tuple[list[dict[str, Any]], Any]:
    from areal_convert.engines.losses import sft_loss, sft_weight

    engine = megatron_jobs.make_engine(megatron_jobs.Case(path, **changes))
    assert engine.device.type == "cuda"
    assert all(p.is_cuda for chunk in engine.model for p in chunk.parameters())
    return [engine.train_batch(batch_of(engine, step), sft_loss, sft_weight) for step in range(steps)], engine


@needs_megatron
@pytest.mark.skipif(TRANSFORMER_ENGINE, reason="Transformer Engine's packed attention has no fp32")
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_megatrons_fp32_losses_are_the_cpus(family: str) -> None:
    """With torch's layers."""
    path = str(models.cached_model(family, layers=2))
    (expected,) = engine_jobs.reference([path], STEPS)
    results, engine = train_megatron(path)
    engine.destroy()
    assert [r["loss"] for r in results] == pytest.approx(expected["losses"], rel=TOLERANCE)
    assert [r["grad_norm"] for r in results] == pytest.approx(expected["norms"], rel=10 * TOLERANCE)


@needs_megatron
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_megatrons_bf16_losses_are_near_the_cpus(family: str) -> None:
    """With Transformer Engine's layers where it is installed: same names, same weights, packed sequences kept apart."""
    path = str(models.cached_model(family, layers=2, head_dim=16))
    (expected,) = engine_jobs.reference([path], STEPS)
    results, engine = train_megatron(path, config={"dtype": "bfloat16"})
    engine.destroy()
    assert [r["loss"] for r in results] == pytest.approx(expected["losses"], rel=BF16)


@needs_megatron
def test_megatrons_offload_empties_the_gpu_and_onload_brings_back_every_bit() -> None:
    path = str(models.cached_model("llama", layers=2, head_dim=16))
    _, engine = train_megatron(path, 2, config={"dtype": "bfloat16"})
    before, held = megatron_jobs.digest(engine), torch.cuda.memory_allocated()
    engine.offload()
    assert torch.cuda.memory_allocated() < held / 4
    engine.onload()
    assert megatron_jobs.digest(engine) == before
    engine.destroy()


@needs_megatron
def test_megatron_trains_in_fp8_with_block_scales() -> None:
    """Hopper and Transformer Engine; where they are not, refused with the reason, which is the reason to skip."""
    from areal_convert.converter.errors import ConfigError
    from areal_convert.engines.api.configs import FP8EngineConfig
    from areal_convert.engines.megatron import fp8

    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    path = str(models.cached_model("llama", layers=2, num_key_value_heads=2, **sizes))
    config = FP8EngineConfig(recipe="blockwise")
    try:
        fp8.check(config, {}, fp8.machine(torch.device("cuda")))
    except ConfigError as error:
        pytest.skip(str(error))
    found = {}
    for name, megatron in {"bf16": {}, "fp8": {"fp8_config": config}}.items():
        results, engine = train_megatron(path, config={"dtype": "bfloat16"}, megatron=megatron)
        engine.destroy()
        found[name] = [r["loss"] for r in results]
    assert found["fp8"] != found["bf16"], "nothing was computed in FP8"
    assert found["fp8"] == pytest.approx(found["bf16"], rel=5e-2)
    assert found["fp8"][-1] < found["fp8"][0]
