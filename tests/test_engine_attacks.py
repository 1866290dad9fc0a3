"""What nobody should do to an engine, and what it answers: the same on every rank, and with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import engine_jobs
import models
from areal_convert.converter.errors import ConfigError, SourceError, TargetError
from areal_convert.engines.data.batches import concatenate, from_sequences, pack
from areal_convert.engines.grad_norm import agreed
from areal_convert.engines.run_lock import only_run_in
from areal_convert.engines.states import _changes
from engine_jobs import Case
from engine_worker import run_ranks


def path_of(family: str) -> str:
    return str(models.cached_model(family, layers=2))


def answer(call: Callable[[], Any]) -> Any:
    """What it gives, or the text of what it raises."""
    try:
        return call()
    except (ConfigError, SourceError) as error:
        return f"{type(error).__name__}: {error}"


def misuse(tensor: Case, data: Case) -> dict[str, Any]:
    from areal_convert.engines.losses import sft_loss, sft_weight

    rank, found = dist.get_rank(), {}
    engine = engine_jobs.make_engine(tensor)

    def train(**changes: Any) -> Any:
        batch = {**engine_jobs.batch_of(engine, 0), **changes}
        return answer(lambda: engine.train_batch(batch, sft_loss, sft_weight))

    ids = engine_jobs.batch_of(engine, 0)["input_ids"]
    found["foreign"] = train(input_ids=torch.where(torch.arange(len(ids)) == 3, 5000, ids))
    norm = engine.model.get_parameter("model.norm.weight")  # whole on both ranks: the other one's norm is fine

    def spoil(parameter: Any) -> None:
        if rank == 1:
            getattr(parameter.grad, "_local_tensor", parameter.grad).fill_(torch.nan)

    before = engine_jobs.digest(engine.model)
    hook = norm.register_post_accumulate_grad_hook(spoil)
    found["spoilt"] = train()["update_successful"], engine_jobs.digest(engine.model) == before
    hook.remove()
    engine.offload()
    found["away"] = train(), answer(lambda: engine.save(Any))
    engine.onload()
    found["back"] = train()["update_successful"]
    engine.destroy()
    engine.destroy()
    engine = engine_jobs.make_engine(data)
    mask = engine_jobs.batch_of(engine, 0)["loss_mask"]
    found["one without targets"] = train(loss_mask=mask * (1 - rank))["loss"]
    rows = [torch.tensor([5]), torch.tensor([5, 6])][: 2 - rank]
    short = from_sequences(rows, loss_mask=[torch.ones(len(row)) for row in rows])
    found["one token"] = engine.train_batch(short, sft_loss, sft_weight)["update_successful"]
    engine.destroy()
    return found


@pytest.mark.multiprocess
def test_misuse_is_answered_alike_on_all_ranks() -> None:
    path = path_of("llama_tied")
    one, two = run_ranks(2, misuse, tensor=Case(path, tp=2), data=Case(path, dp=2))
    assert one == two
    assert one["foreign"].startswith("SourceError: input_ids: 1 tokens are not in the model's vocabulary of 1003, 5000")
    assert one["spoilt"] == (0.0, True), "one rank's gradient is not finite: no rank takes the step"
    assert all("Call onload() first" in text for text in one["away"]) and one["back"] == 1.0
    assert 0 < one["one without targets"] < 20 and one["one token"] == 1.0


def test_alone_the_norm_is_the_norm() -> None:
    assert agreed(torch.tensor(2.0)) == 2.0 and agreed(torch.tensor(torch.inf)).isinf()


@pytest.mark.parametrize(
    ("cu", "says"),
    [([0, 3], r"ends at 3, and input_ids is \(5,\)"), ([1, 5], "expected 0 first"), ([0, 3, 3, 5], "a token at least")],
)
def test_boundaries_that_are_none(cu: list[int], says: str) -> None:
    with pytest.raises(SourceError, match=says):
        pack({"input_ids": torch.arange(5), "cu_seqlens": torch.tensor(cu, dtype=torch.int32), "max_seqlen": 5})


def test_no_batch_at_all() -> None:
    with pytest.raises(SourceError, match="empty list"):
        concatenate([])


def test_one_run_at_a_time_in_a_directory(tmp_path: Path) -> None:
    another = pytest.raises(TargetError, match="another run is training")
    with only_run_in(tmp_path / "run"), another, only_run_in(tmp_path / "run"):
        raise AssertionError("two at once")
    with only_run_in(tmp_path / "run"):
        assert list((tmp_path / "run").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(TargetError, match="cannot be written"), only_run_in(tmp_path / "file" / "run"):
        pass


def test_a_configuration_that_has_changed_is_told() -> None:
    was = "dir: a\nengine:\n  optimizer:\n    lr: 0.001\n    beta1: 0.9\nmax_steps: 3\n"
    now = "dir: b\nengine:\n  optimizer:\n    lr: 1.0e-05\n    beta1: 0.9\nmax_steps: null\n"
    assert _changes(was, now) == ["engine.optimizer.lr was 0.001, is 1e-05", "max_steps was 3, is None"]
    assert _changes("", now) == [] and _changes(was, was) == []
