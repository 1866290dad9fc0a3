"""FSDPEngine's save, load and export: exactly what it trained, on the same ranks and on others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import engine_state_jobs
import models
from areal_convert.converter import verify
from engine_jobs import Case, sequences
from engine_worker import run_ranks

pytestmark = [pytest.mark.multiprocess]

BF16 = {"dtype": "bfloat16"}


def case(family: str, *, dtype: str = "float32", **layout: Any) -> Case:
    return Case(str(models.cached_model(family, layers=2, dtype=dtype, side_files=True)), **layout)


@pytest.mark.parametrize(
    "layout",
    [
        ("qwen2", {"dp": 1, "config": {"fsdp": {"per_layer_optim_step": True}}}),
        ("llama_tied", {"dp": 2, "tp": 2}),
        ("qwen3_moe", {"dp": 2, "config": {**BF16, "fsdp": {"offload_params": True}}}),
        ("qwen2", {"cp": 2, "optimizer": {"type": "adam_bf16"}}),
    ],
    ids=["by_layer", "tied_dp2_tp2", "moe_dp2_bf16_on_the_host", "kahan_sp2"],
)
def test_stopped_at_step_7_and_resumed_bit_for_bit(tmp_path: Path, layout: tuple[str, dict[str, Any]]) -> None:
    one = case(layout[0], **layout[1])
    for found in run_ranks(one.world, engine_state_jobs.stop_and_go, case=one, path=str(tmp_path / "state")):
        assert found["resumed"] == found["through"] and found["digest_resumed"] == found["digest"]
        assert (found["version"], found["lr_step"]) == (7, 7)


def test_resumed_on_another_world(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    wide, narrow = case("qwen3_moe", dp=2, tp=2), case("qwen3_moe", cp=2)
    through = run_ranks(4, engine_state_jobs.stop_and_go, case=wide, path=path)[0]["through"]
    for found in run_ranks(2, engine_state_jobs.go_on, case=narrow, path=path):
        assert found["resumed"] == pytest.approx(through, rel=1e-5)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama_tied", {"dp": 2, "tp": 2}),
        ("qwen3_moe", {"dp": 2, "tp": 2}),
        ("qwen2", {"dp": 4, "replicate": 2}),
    ],
)
def test_an_export_is_what_the_engine_computes(tmp_path: Path, family: str, layout: dict[str, Any]) -> None:
    one, out = case(family, **layout), tmp_path / "out"
    found = run_ranks(4, engine_state_jobs.export, case=one, path=str(out))
    assert verify(out, tmp_path / "out-torch").same and verify(out, tmp_path / "out-wide").same
    assert not any("gate_up" in name for name in models.tensors(out))
    assert (out / "tokenizer.json").read_bytes() == (Path(one.path) / "tokenizer.json").read_bytes()
    rows = sequences(0)
    for answer in found:
        mine = rows[answer["rank"] :: 2 if family != "qwen2" else 4]
        for row, ours, loaded in zip(mine, answer["logprobs"], answer["loaded"], strict=True):
            after = models.logits(out, row[None])[0].log_softmax(-1)
            wanted = after[:-1].gather(1, row[1:, None])[:, 0]
            torch.testing.assert_close(ours[:-1], wanted, rtol=1e-4, atol=1e-5)
            assert torch.equal(ours, loaded)


def test_a_bfloat16_model_comes_out_as_it_went_in(tmp_path: Path) -> None:
    one = case("qwen2", dtype="bfloat16", dp=2, config=BF16)
    run_ranks(2, engine_state_jobs.export, case=one, path=str(tmp_path / "out"))
    assert {str(t.dtype) for t in models.tensors(tmp_path / "out").values()} == {"torch.bfloat16"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (Path(one.path) / "config.json").read_text()
    )
