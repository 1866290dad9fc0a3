"""ArchonEngine against transformers and torch.optim alone, and against FSDPEngine: the same losses and gradient norms
on every layout and under every pipeline schedule.

The other side is `engine_jobs.reference`, as for FSDPEngine. Tolerance: 1e-5 relative, in fp32; what is measured is ten
times smaller (experts' gradients, 3e-6). All trainings of a number of ranks share these ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import archon_jobs
import engine_jobs
import models
from archon_jobs import Case
from areal_convert.converter.errors import ConfigError
from areal_convert.engines.api.backends import SCHEDULES
from areal_convert.engines.api.configs import ArchonEngineConfig, TrainEngineConfig
from areal_convert.engines.archon import loading
from areal_convert.engines.archon.compute import attention_of
from areal_convert.engines.archon.schedules import order_of, plan_pipeline
from engine_worker import run_ranks
from test_archon_models import config_of
from test_archon_schedules import write

TOLERANCE = 1e-5
FAMILIES = ("llama", "llama_tied", "qwen3", "qwen3_moe", "deepseek_v3")
LAYERS = 2
SHORT = 4
"""Steps of what is a variation of a layout or family that takes all twenty."""

pytestmark = [pytest.mark.multiprocess]

Cases = dict[str, Case]
"""The path of each is a family's name here; `placed` puts the model's directory in its place."""

CHECKPOINTING = {"gradient_checkpointing": True}
PADDED = {"pad_to_maximum": True}
MOVING = {"moe_router_bias_update_rate": 1e-2}

ONE: Cases = {
    "plain": Case("llama"),
    "tied, accumulated x3": Case("llama_tied", n_mbs=3, steps=SHORT),
    "qwen3": Case("qwen3", steps=SHORT),
    "experts, checkpointing": Case("qwen3_moe", n_mbs=2, config=CHECKPOINTING, steps=SHORT),
    "latent": Case("deepseek_v3", steps=SHORT),
    "biases": Case("deepseek_v3", steps=SHORT, archon=MOVING),
}
TWO: Cases = {
    "dp2": Case("llama", dp=2),
    "tp2": Case("llama", tp=2),
    "cp2": Case("qwen3", cp=2, steps=SHORT),
    "pp2": Case("llama", pp=2, n_mbs=4),
    **{f"pp2, {name}": Case("qwen3", pp=2, schedule=name, n_mbs=4, steps=SHORT) for name in SCHEDULES},
    "pp2, csv": Case("qwen3", pp=2, schedule="mine.csv", n_mbs=3, steps=SHORT),
    "pp2, tied": Case("llama_tied", pp=2, n_mbs=3, steps=SHORT),
    "pp2, tied, zbv": Case("llama_tied", pp=2, n_mbs=3, schedule="zbv_zero_bubble", steps=SHORT),
    "pp2, tied, dual pipe, more micro-batches than sequences": Case(
        "llama_tied", pp=2, n_mbs=9, schedule="dual_pipe_v", steps=2
    ),
    "pp2, latent, zbv": Case("deepseek_v3", pp=2, n_mbs=4, schedule="zbv_zero_bubble", steps=SHORT),
    "pp2, checkpointing": Case("qwen3_moe", pp=2, n_mbs=2, schedule="dual_pipe_v", config=CHECKPOINTING, steps=SHORT),
    "replicas 2, experts": Case("qwen3_moe", dp=2, replicate=2, steps=SHORT),
    "ep2": Case("qwen3_moe", dp=2, ep=2),
    "ep2, latent": Case("deepseek_v3", dp=2, ep=2, steps=SHORT),
    "tp2, latent, tied to none": Case("deepseek_v3", tp=2, steps=SHORT),
    "tp2, ep2, whole experts": Case("qwen3_moe", tp=2, ep=2, steps=SHORT),
    "dp2, biases": Case("deepseek_v3", dp=2, steps=SHORT, archon=MOVING),
    "cp2, biases": Case("deepseek_v3", cp=2, max_tokens=200, config=PADDED, steps=SHORT, archon=MOVING),
    "tp2, ep2, biases": Case("deepseek_v3", tp=2, ep=2, steps=SHORT, archon=MOVING),
    "pp2, biases": Case("deepseek_v3", pp=2, n_mbs=9, schedule="dual_pipe_v", steps=SHORT, archon=MOVING),
}
FOUR: Cases = {
    "replicas 2 x shards 2": Case("llama", dp=4, replicate=2, steps=SHORT),
    "tp2 x pp2": Case("llama", tp=2, pp=2, n_mbs=2, steps=SHORT),
    "cp2 x tp2": Case("qwen3", cp=2, tp=2, steps=SHORT),
    "ep2 x pp2": Case("qwen3_moe", dp=2, ep=2, pp=2, n_mbs=2, schedule="interleaved_1f1b", steps=SHORT),
    "ep2 x tp2, cut experts": Case("qwen3_moe", dp=2, tp=2, ep=2, etp=2, steps=SHORT),
    "ep2 x tp2, whole experts": Case("qwen3_moe", dp=2, tp=2, ep=2, steps=SHORT),
    "ep4 of dp2 x tp2": Case("qwen3_moe", dp=2, tp=2, ep=4, steps=2),
    "dp2 x pp2, tied": Case("llama_tied", dp=2, pp=2, n_mbs=2, schedule="zbv_zero_bubble", steps=SHORT),
    "tp2 x pp2, tied": Case("llama_tied", tp=2, pp=2, n_mbs=2, steps=SHORT),
    "dp2 x pp2, zero bubble": Case("llama", dp=2, pp=2, n_mbs=4, schedule="interleaved_zero_bubble", steps=SHORT),
    "ep2 x pp2, dual pipe": Case("deepseek_v3", dp=2, ep=2, pp=2, n_mbs=4, schedule="dual_pipe_v", steps=SHORT),
}
BF16 = {"dtype": "bfloat16"}
SCRATCH = {"init_from_scratch": True}
CRITIC = {"is_critic": True, "disable_dropout": True}


def path_of(family: str) -> str:
    return str(models.cached_model(family, layers=LAYERS))


@pytest.fixture(scope="module")
def csv(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A schedule of six micro-batches in a file: halves of backward passes, in the shape of a V."""
    order = order_of(plan_pipeline("zbv_zero_bubble", 2, LAYERS), 6)
    return str(write(tmp_path_factory.mktemp("schedules") / "mine.csv", order))


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Any]]:
    found = run_ranks(1, engine_jobs.reference, paths=[path_of(f) for f in FAMILIES])[0]
    return dict(zip(FAMILIES, found, strict=True))


Answers = dict[str, list[Any]]
"""Per job, what each rank said."""


def run_all(world: int, cases: Cases, others: dict[str, tuple[str, dict[str, Any]]], csv: str) -> Answers:
    """Every training and every other job on ranks that are started once."""

    def placed(value: Any) -> Any:
        if not isinstance(value, Case):
            return value
        schedule = csv if value.schedule.endswith(".csv") else value.schedule
        return dataclasses.replace(value, path=path_of(value.path), schedule=schedule)

    jobs = {name: ("train", {"case": case}) for name, case in cases.items()} | others
    ready = [(name, {key: placed(value) for key, value in given.items()}) for name, given in jobs.values()]
    answers = run_ranks(world, archon_jobs.many, jobs=ready, limit=110)
    return {name: [answer[n] for answer in answers] for n, name in enumerate(jobs)}


@pytest.fixture(scope="module")
def one(csv: str, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    out = str(tmp_path_factory.mktemp("one") / "saved")
    others = {
        "own loss": ("own_loss", {"case": Case("llama")}),
        "critic": ("critic", {"case": Case("llama", config=CRITIC)}),
        "critic, fsdp": ("critic", {"case": Case("llama"), "engine_of": "fsdp"}),
        "scratch": ("scratch", {"case": Case("deepseek_v3", config=SCRATCH)}),
        "scratch, tied": ("scratch", {"case": Case("llama_tied", config=SCRATCH)}),
        "moved": ("moved", {"case": Case("llama")}),
        "saved": ("saved", {"case": Case("qwen3_moe"), "out": out}),
        "bf16": ("train", {"case": Case("llama", steps=SHORT, config=BF16)}),
    }
    return run_all(1, ONE, others, csv)


@pytest.fixture(scope="module")
def two(csv: str, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    out = tmp_path_factory.mktemp("two")
    piped: dict[str, Any] = {"pp": 2, "n_mbs": 2}
    vee: dict[str, Any] = {"pp": 2, "schedule": "zbv_zero_bubble"}
    pipeline = Case("llama_tied", **piped)
    others = {
        "own loss": ("own_loss", {"case": Case("llama", **piped)}),
        "own loss, vee": ("own_loss", {"case": Case("llama", **vee)}),
        "critic, pp2": ("critic", {"case": Case("llama", config=CRITIC, **piped)}),
        "critic, tp2": ("critic", {"case": Case("llama", config=CRITIC, tp=2)}),
        "scratch, dp2": ("scratch", {"case": Case("deepseek_v3", config=SCRATCH, dp=2, ep=2)}),
        "scratch, vee": ("scratch", {"case": Case("deepseek_v3", config=SCRATCH, **vee)}),
        "scratch, tied": ("scratch", {"case": Case("llama_tied", config=SCRATCH, **piped)}),
        "moved": ("moved", {"case": Case("llama", **vee)}),
        "skipped": ("skipped_step", {"case": Case("deepseek_v3", dp=2)}),
        "saved, pp2": ("saved", {"case": pipeline, "out": str(out / "pp2")}),
        "saved, vee → tp2": (
            "saved",
            {"case": Case("llama_tied", **vee), "back": Case("llama_tied", tp=2), "out": str(out / "vee")},
        ),
        "saved, ep2": ("saved", {"case": Case("deepseek_v3", dp=2, ep=2), "out": str(out / "ep2")}),
        "topology": ("topology", {"case": Case("llama", **vee)}),
    }
    return run_all(2, TWO, others, csv)


@pytest.fixture(scope="module")
def four(csv: str) -> Answers:
    layout = {"dp": 2, "pp": 2, "n_mbs": 4, "steps": SHORT, "config": BF16}
    others = {
        "bf16, 1f1b": ("train", {"case": Case("llama", **layout)}),
        "bf16, halves": ("train", {"case": Case("llama", schedule="zbv_zero_bubble", **layout)}),
    }
    return run_all(4, FOUR, others, csv)


# ------------------------------------------------------------------------------------------------ training


def check(found: Sequence[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Losses, norms and log-probabilities; that all ranks say the same, and tied copies are the same."""
    first = found[0]
    assert expected["losses"][-1] < 0.75 * expected["losses"][0], "the reference learns nothing: this proves little"
    steps = len(first["losses"])
    for key in ("losses", "norms"):
        assert first[key] == pytest.approx(expected[key][:steps], rel=TOLERANCE, abs=0), key
    if steps < engine_jobs.STEPS:
        assert first["evaluated"] == pytest.approx(expected["losses"][steps], rel=TOLERANCE, abs=0)
    for other in found[1:]:
        for key in ("losses", "norms", "evaluated"):
            assert other[key] == first[key], f"ranks do not agree on {key}"
    ranks = 1 + max(answer["dp_rank"] for answer in found)
    for answer in found:
        own = expected["first"][answer["dp_rank"] :: ranks]
        torch.testing.assert_close(list(answer["first"]), own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in ONE if "biases" not in name])
def test_one_rank_trains_as_transformers_alone(name: str, one: Answers, references: dict[str, dict[str, Any]]) -> None:
    check(one[name], references[ONE[name].path])


@pytest.mark.parametrize("name", [name for name in TWO if "biases" not in name])
def test_two_ranks_train_as_transformers_alone(name: str, two: Answers, references: dict[str, dict[str, Any]]) -> None:
    check(two[name], references[TWO[name].path])


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_train_as_transformers_alone(
    name: str, four: Answers, references: dict[str, dict[str, Any]]
) -> None:
    check(four[name], references[FOUR[name].path])


def test_the_number_of_micro_batches_is_one_that_the_schedule_takes(two: Answers) -> None:
    """Asked for 3, where the file is for 6 and 1f1b takes them; asked for 9 of 8 sequences, one of which stands in."""
    assert two["pp2, csv"][0]["micro_batches"] == 6
    assert two["pp2, tied"][0]["micro_batches"] == 3
    assert two["pp2, tied, dual pipe, more micro-batches than sequences"][0]["micro_batches"] == 9


@pytest.mark.parametrize("name", [name for name in (*TWO, *FOUR) if "pp2" in name and "tied" in name])
def test_copies_of_a_tied_embedding_stay_the_same_to_the_bit(name: str, two: Answers, four: Answers) -> None:
    found = (two | four)[name]
    copies = [copy for answer in found for copy in answer["copies"].values()]
    kinds = {kind for answer in found for kind in answer["copies"]}
    assert len(copies) >= 2 and len(set(copies)) == 1 and kinds == {"tok_embeddings.weight", "output.weight"}


def test_experts_are_balanced_the_same_on_every_layout(one: Answers, two: Answers) -> None:
    """Padding, stand-ins and evaluation count nothing, and the losses follow."""
    alone = one["biases"][0]
    start = one["latent"][0]["biases"]
    assert alone["biases"].keys() == start.keys() and alone["biases"] != start
    assert alone["losses"] != one["latent"][0]["losses"]
    for name in (name for name in TWO if "biases" in name):
        answers = two[name]
        merged = {layer: values for answer in answers for layer, values in answer["biases"].items()}
        assert merged == alone["biases"], name
        assert answers[0]["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE, abs=0), name


def test_half_precision_is_close_under_pipelines_too(one: Answers, four: Answers) -> None:
    """Also where backward passes run in two halves, whose gradients FSDP is told of later."""
    plain, bf16 = one["plain"][0], one["bf16"][0]
    for found in (bf16, four["bf16, 1f1b"][0], four["bf16, halves"][0]):
        assert found["losses"] == pytest.approx(plain["losses"][:SHORT], rel=2e-3)
        assert found["norms"] == pytest.approx(plain["norms"][:SHORT], rel=2e-2)
        assert found["losses"] != plain["losses"][:SHORT]


def test_every_rank_reads_its_own_part(two: Answers, four: Answers) -> None:
    """Of 4-byte files. A stage reads its layers; a tied embedding is read where it stands, once on each stage."""
    size = {f: sum(t.numel() * 4 for t in models.tensors(Path(path_of(f))).values()) for f in ("llama", "qwen3_moe")}
    assert sum(answer["loaded"] for answer in two["pp2"]) == size["llama"]
    assert sum(answer["loaded"] for answer in two["ep2"]) == size["qwen3_moe"]
    read = [answer["loaded"] for answer in four["tp2 x pp2"]]
    assert sum(read) == pytest.approx(size["llama"], rel=0.02) and max(read) < 0.27 * size["llama"]


# ------------------------------------------------------------------------------------------------ one's own loss


def test_the_logits_are_transformers_and_stand_where_the_last_stage_is(one: Answers, two: Answers) -> None:
    for name, answer in (("", one["own loss"][0]), ("", two["own loss"][1]), ("vee", two["own loss, vee"][0])):
        for number, length in enumerate((7, 9)):
            expected = models.logits(Path(path_of("llama")), torch.arange(5, 5 + length)[None])[0]
            torch.testing.assert_close(answer["logits"][number], expected, rtol=1e-5, atol=1e-5, msg=name)
    assert two["own loss"][0]["logits"] == {} and two["own loss, vee"][1]["logits"] == {}


def test_a_loss_of_ones_own_has_the_same_gradient_everywhere(one: Answers, two: Answers) -> None:
    alone = one["own loss"][0]["norm"]
    for answer in (*two["own loss"], *two["own loss, vee"]):
        assert answer["norm"] == pytest.approx(alone, rel=TOLERANCE, abs=0)
    assert one["own loss"][0]["refused"] == ""
    assert all("does not run 1 micro-batches" in answer["refused"] for answer in two["own loss"])


# ------------------------------------------------------------------------------------------------ the rest


def test_a_critic_trains_as_that_of_fsdp(one: Answers, two: Answers) -> None:
    expected = one["critic, fsdp"][0]
    for answer in (one["critic"][0], *two["critic, pp2"], *two["critic, tp2"]):
        for key in ("losses", "norms"):
            assert answer[key] == pytest.approx(expected[key], rel=TOLERANCE, abs=0), key
        assert answer["shape"] == expected["shape"]


def test_random_weights_are_the_same_on_every_layout(one: Answers, two: Answers) -> None:
    alone = one["scratch"][0]
    assert all(set(values) == {0.0} for values in alone["biases"].values()) and alone["biases"]
    for name in ("scratch, dp2", "scratch, vee"):
        found = {key: value for answer in two[name] for key, value in answer["digests"].items()}
        assert found == alone["digests"], name
        assert two[name][0]["loss"] == pytest.approx(alone["loss"], rel=TOLERANCE)
    tied = {key: value for answer in two["scratch, tied"] for key, value in answer["digests"].items()}
    assert tied.pop("output.weight") == tied["tok_embeddings.weight"]
    assert tied == one["scratch, tied"][0]["digests"]


def test_moving_everything_away_and_back_changes_nothing(one: Answers, two: Answers) -> None:
    for answers in (one["moved"], two["moved"]):
        for away, here, rates in answers:
            assert away == here and rates == pytest.approx([1e-3] * 6)


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_everywhere(two: Answers) -> None:
    for answer in two["skipped"]:
        assert answer["bad"]["update_successful"] == 0.0 and answer["unchanged"]
        assert answer["good"]["update_successful"] == 1.0 and answer["changed"]


@pytest.mark.parametrize("name", ["saved", "saved, pp2", "saved, vee → tp2", "saved, ep2"])
def test_what_is_saved_comes_back(name: str, one: Answers, two: Answers) -> None:
    """As a Hugging Face directory and as a training state, onto the same and onto another layout."""
    for answer in (one if name == "saved" else two)[name]:
        assert answer["hf"] == answer["dcp"] and answer["version"] == 7
        if "→" in name:
            assert answer["resumed"] == pytest.approx(answer["on"], rel=TOLERANCE)
        else:
            assert answer["resumed"] == answer["on"]


@pytest.mark.parametrize(
    ("kind", "impl", "runs"),
    [
        ("sdpa", "flash_attention_2", "sdpa"),
        ("varlen", "flash_attention_3", "flash_attention_3"),
        ("varlen", "flex_attention", "flex_attention"),
        ("varlen", "sdpa", "flash_attention_2"),
    ],
)
def test_two_fields_say_what_attention_runs(kind: Any, impl: Any, runs: str) -> None:
    config = TrainEngineConfig(attn_impl=impl, archon=ArchonEngineConfig(attn_type=kind))
    assert attention_of(config) == runs


def test_a_file_whose_halves_would_lose_gradients_is_refused(csv: str) -> None:
    archon = ArchonEngineConfig(pp_schedule=csv, reshard_after_forward_policy="always")
    with pytest.raises(ConfigError, match="FSDP would lose gradients"):
        loading.plan(TrainEngineConfig(archon=archon), config_of(Path(path_of("llama"))), 2)


def test_who_is_with_whom(two: Answers) -> None:
    for rank, answer in enumerate(two["topology"]):
        assert answer["data"] == [rank] and answer["model"] == answer["cpu"] == [0, 1] and answer["head"] == 0
        assert answer["is_head"] == (rank == 0)
        assert answer["resized"] and answer["initialized"] and answer["destroyed"]
