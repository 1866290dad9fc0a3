"""Learning rates, by hand and against transformers' schedules."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from areal_convert.converter.errors import ConfigError
from areal_convert.engines.api.configs import OptimizerConfig
from areal_convert.engines.schedule import Schedule


def test_linear_by_hand() -> None:
    schedule = Schedule("linear", 1.0, total=10, warmup=2, min_ratio=0.2)
    assert [schedule.at(s) for s in range(12)] == pytest.approx(
        [0, 0.5, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2]
    )


def test_the_warm_up_counts_once() -> None:
    """areal-project/AReaL pull 1289: a rate that ends at the last step, not a warm-up later."""
    for kind in ("linear", "cosine"):
        assert Schedule(kind, 1e-3, total=100, warmup=40).at(100) == 0.0
        assert Schedule(kind, 1e-3, total=100, warmup=40).at(70) == pytest.approx(5e-4)


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize(
    ("kind", "ratio", "theirs"),
    [
        ("constant", 0.0, "constant_with_warmup"),
        ("linear", 0.0, "linear"),
        ("cosine", 0.0, "cosine"),
        ("cosine", 0.1, "cosine_with_min_lr"),
    ],
)
def test_as_transformers(kind: str, ratio: float, theirs: str, warmup: int) -> None:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.7)
    more = {"scheduler_specific_kwargs": {"min_lr_rate": ratio}} if ratio else {}
    scheduler = get_scheduler(theirs, optimizer, num_warmup_steps=warmup, num_training_steps=17, **more)
    ours = Schedule(kind, 0.7, total=17, warmup=warmup, min_ratio=ratio)
    for step in range(17):
        assert ours.at(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12), step
        optimizer.step()
        scheduler.step()


def test_from_the_optimizers_config() -> None:
    config = OptimizerConfig(lr=0.1, lr_scheduler_type="cosine", warmup_steps_proportion=0.25, min_lr_ratio=0.1)
    assert Schedule.of(config, 20) == Schedule("cosine", 0.1, 20, 5, 0.1)
    assert Schedule.of(dataclasses.replace(config, warmup_steps=0), 20).warmup == 0


def test_impossible_schedules_name_all_that_is_wrong() -> None:
    with pytest.raises(ConfigError) as error:
        Schedule("cosin", -1, total=5, warmup=6, min_ratio=2)
    assert {p.about for p in error.value.problems} == {"lr_scheduler_type", "warmup_steps", "min_lr_ratio", "lr"}
