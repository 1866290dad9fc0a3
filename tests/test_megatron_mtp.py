"""Multi-token prediction on Megatron-Core against DeepSeek-V3's, written out with transformers' layers (`mtp_jobs`)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import models
import mtp_jobs
from areal_convert.converter.errors import ConfigError
from engine_worker import run_ranks
from megatron_jobs import Case, make_engine
from mtp_jobs import COEFF

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]

STEPS = 3
TOLERANCE = 1e-5
MTP: dict[str, Any] = {"enable_mtp": True, "mtp_loss_coeff": COEFF}
PLAIN: dict[str, Any] = {**MTP, "ddp": {"use_distributed_optimizer": False}}
BASE = Case("", steps=STEPS, megatron=MTP)

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "four micro-batches": {"n_mbs": 4},
    "recomputed": {"config": {"gradient_checkpointing": True}},
    "padded to the maximum": {"max_tokens": 128, "config": {"pad_to_maximum": True}},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp2, plain optimizer": {"pp": 2, "n_mbs": 4, "megatron": PLAIN},
    "pp2, a layout": {"pp": 2, "megatron": {**MTP, "pipeline_model_parallel_layout": "E|ttmL"}},
    "dp2, gradients reduced meanwhile": {
        "dp": 2,
        "megatron": {**MTP, "ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
    },
    "dp2 ep2": {"dp": 2, "ep": 2, "n_mbs": 2},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = models.make_model("deepseek_v3", tmp_path_factory.mktemp("mtp") / "hf", layers=2, topk_group=1)
    return str(models.add_mtp(made))


@pytest.fixture(scope="module")
def expected(path: str) -> dict[str, Any]:
    return run_ranks(1, mtp_jobs.reference, path=path, steps=STEPS)[0]


@pytest.fixture(scope="module")
def found(path: str) -> dict[str, list[dict[str, Any]]]:
    """Per layout, what each rank said."""
    answers = {}
    for world in (1, 2):
        cases = {n: dataclasses.replace(BASE, path=path, **c) for n, c in LAYOUTS.items()}
        cases = {n: c for n, c in cases.items() if c.dp * c.tp * c.pp == world}
        ranks = run_ranks(world, mtp_jobs.train, cases=list(cases.values()), limit=110)
        answers |= {name: [rank[n] for rank in ranks] for n, name in enumerate(cases)}
    return answers


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_and_gradient_norms_are_the_references(
    name: str, found: dict[str, list[dict[str, Any]]], expected: dict[str, Any]
) -> None:
    for answer in found[name]:
        for key in ("losses", "mtp_losses", "norms"):
            assert answer[key] == pytest.approx(expected[key], rel=TOLERANCE, abs=0), key
        assert "forward_backward_batch has no multi-token prediction loss" in answer["refused"]
        assert answer["short"] == [0.0, 1.0]
        assert answer["evaluated"] == found[name][0]["evaluated"]


GRADIENTS: dict[str, dict[str, Any]] = {"one rank": {"n_mbs": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}


def test_every_gradient_is_the_references_and_is_exported(path: str, expected: dict[str, Any], tmp_path: Path) -> None:
    """By what one step of gradient descent leaves in the saved model, the layer of the MTP among it."""
    descent = {"type": "sgd", "lr": 1.0, "beta1": 0.0, "weight_decay": 0.0, "gradient_clipping": 1e9}
    base = dataclasses.replace(BASE, path=path, steps=1, megatron=PLAIN, optimizer=descent)
    before = models.tensors(Path(path))
    for name, changes in GRADIENTS.items():
        case, out = dataclasses.replace(base, **changes), tmp_path / name
        run_ranks(case.tp * case.pp, mtp_jobs.stepped, cases=[case], outs=[str(out)])
        after = models.tensors(out)
        assert after.keys() == before.keys()
        largest = max(float(grad.abs().max()) for grad in expected["grads"].values())
        for key, value in before.items():
            if key.endswith("e_score_correction_bias"):
                continue
            grad = expected["grads"][key]
            torch.testing.assert_close(
                value - after[key], grad, rtol=1e-4, atol=2e-6 * max(largest, 1.0), msg=lambda m, k=key: f"{k}: {m}"
            )
            moved = bool(grad.any())
            assert moved or "experts" in key, f"{key} has no gradient: this would prove nothing"


def test_what_is_saved_is_what_was_loaded(path: str, tmp_path: Path) -> None:
    case = dataclasses.replace(BASE, path=path, pp=2, steps=0)
    run_ranks(2, mtp_jobs.stepped, cases=[case], outs=[str(tmp_path / "out")])
    before, after = models.tensors(Path(path)), models.tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


def test_a_training_state_has_the_mtp_layers(path: str, tmp_path: Path) -> None:
    """Bit for bit where it was made, and the same on other ranks."""
    cases = [dataclasses.replace(BASE, path=path, **sizes) for sizes in ({"pp": 2}, {"tp": 2})]
    for answer in run_ranks(2, mtp_jobs.resumed, cases=cases, path=str(tmp_path / "step-000003"), limit=110):
        through, again, elsewhere = answer
        assert again == through
        for step, wanted in zip(elsewhere, through, strict=True):
            assert step == pytest.approx(wanted, rel=2e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cp": 2}, "context_parallel_size: 2: under enable_mtp"),
        ({"pp": 2, "megatron": {**MTP, "pipeline_model_parallel_layout": "Ettm|L"}}, "have to be where the loss"),
        ({"pp": 2, "megatron": {**MTP, "pipeline_model_parallel_layout": "Ett|mL"}}, "have to be where the loss"),
        (
            {"config": {"gradient_checkpointing": True}, "megatron": {**MTP, "recompute_method": "block"}},
            "recompute_method, recompute_num_layers: block, 1",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    changes: dict[str, Any], said: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(changes.get("cp", 1) * changes.get("pp", 1)))
    with pytest.raises(ConfigError) as error:
        make_engine(dataclasses.replace(BASE, path=path, **changes))
    assert said in str(error.value)
    assert not torch.distributed.is_initialized()


def test_the_coefficient_counts_and_without_the_layers_stay_out(path: str, expected: dict[str, Any]) -> None:
    """Otherwise the rest would prove little."""
    cases = [dataclasses.replace(BASE, path=path, steps=1, megatron=m) for m in ({"enable_mtp": True}, {})]
    (other, off) = run_ranks(1, mtp_jobs.train, cases=cases)[0]
    for answer in (other, off):
        assert answer["losses"] == pytest.approx(expected["losses"][:1], rel=TOLERANCE)
        assert answer["norms"] != pytest.approx(expected["norms"][:1], rel=1e-3)
    assert other["mtp_losses"] == pytest.approx(expected["mtp_losses"][:1], rel=TOLERANCE)
    assert off["mtp_losses"] == [None]
