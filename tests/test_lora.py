"""Adapters: trained as PEFT and torch.optim train them, on every layout; saved so that PEFT loads them; merged.

Tolerance: 1e-5 relative in fp32 for losses and gradient norms, over 10 steps.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lora_jobs
import models
from engine_jobs import Case
from engine_worker import run_ranks
from lora_jobs import LORA

TOLERANCE = 1e-5
FAMILIES = ("qwen2", "llama")

pytestmark = [pytest.mark.multiprocess]

Answer = list[dict[str, Any]]
"""Of one case, what each rank said."""


def case(family: str, *, dtype: str = "float32", **kinds: Any) -> Case:
    config = {**LORA, **kinds.pop("config", {})}
    path = str(models.cached_model(family, layers=2, dtype=dtype))
    return Case(path, config=config, optimizer={"lr": lora_jobs.LR}, **kinds)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def one(out: Path) -> dict[str, Answer]:
    """On one rank, with everything that is saved."""
    cases = {family: case(family) for family in FAMILIES} | {
        "checkpointing": case("llama", config={"gradient_checkpointing": True}),
        "accumulated x4": case("llama", n_mbs=4),
        "some targets": case("llama", config={"target_modules": ["o_proj", "v_proj"]}),
        "experts": case("qwen3_moe"),
        "bf16 weights": case("llama", dtype="bfloat16"),
    }
    return train(cases, 1, out / "one", merge=True)


def train(cases: dict[str, Case], world: int, out: Path, **how: Any) -> dict[str, Answer]:
    answers = run_ranks(world, lora_jobs.train, cases=list(cases.values()), out=str(out), **how)
    return {name: [answer[n] for answer in answers] for n, name in enumerate(cases)}


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
        assert answer["states"] == answer["trained"] > 0, "the optimizer has states of something else"
        assert answer["reloaded"]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_trains_as_peft_does(family: str, one: dict[str, Answer], references: dict[str, Any]) -> None:
    check(one[family], references[family])


@pytest.mark.parametrize("name", ["checkpointing", "accumulated x4"])
def test_checkpointing_and_accumulation_change_nothing(
    name: str, one: dict[str, Answer], references: dict[str, Any]
) -> None:
    check(one[name], references["llama"])


@pytest.fixture(scope="module")
def two(out: Path) -> dict[str, Answer]:
    cases = {
        "dp2": case("llama", dp=2),
        "tp2": case("llama", tp=2),
        "tp2, qwen2": case("qwen2", tp=2),
        "sp2": case("llama", cp=2),
        "tp2, checkpointing": case("llama", tp=2, config={"gradient_checkpointing": True}),
        "tp2, experts": case("qwen3_moe", tp=2),
        "dp2, host": case("llama", dp=2, config={"fsdp": {"offload_params": True}}),
    }
    return train(cases, 2, out / "two", merge=True)


LAYOUTS = {"dp2": "llama", "tp2": "llama", "tp2, qwen2": "qwen2", "sp2": "llama", "tp2, checkpointing": "llama"}
LAYOUTS |= {"dp2, host": "llama"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_train_as_peft_does(name: str, two: dict[str, Answer], references: dict[str, Any]) -> None:
    check(two[name], references[LAYOUTS[name]])


def test_four_ranks_train_as_peft_does(out: Path, references: dict[str, Any]) -> None:
    found = train({"dp2 x tp2": case("qwen2", dp=2, tp=2)}, 4, out / "four")
    check(found["dp2 x tp2"], references["qwen2"])


def test_experts_are_left_alone_and_attention_is_trained_alike_on_two_ranks(
    one: dict[str, Answer], two: dict[str, Answer], out: Path
) -> None:
    check(two["tp2, experts"], one["experts"][0])
    number = list(one).index("experts")
    names = load_file(out / "one" / str(number) / "trained" / "adapter_model.safetensors")
    assert {name.split(".")[5] for name in names} == {"self_attn"}


def test_every_layout_begins_with_the_same_adapters_and_writes_them_alike(
    one: dict[str, Answer], two: dict[str, Answer], out: Path
) -> None:
    llama = list(one).index("llama")
    for number, name in enumerate(two):
        if LAYOUTS.get(name) != "llama":
            continue
        for saved, exact in (("first", True), ("trained", False), ("merged", False)):
            file = "adapter_model.safetensors" if saved != "merged" else "model.safetensors"
            a, b = (load_file(out / x / saved / file) for x in (f"one/{llama}", f"two/{number}"))
            assert a.keys() == b.keys()
            for key in a:
                tolerance = 0.0 if exact else 2e-3  # AdamW turns the last bit of a tiny gradient into a step
                torch.testing.assert_close(
                    b[key], a[key], rtol=tolerance, atol=tolerance, msg=f"{name}: {saved}: {key}"
                )


# ------------------------------------------------------------------------------------------------ what PEFT says


def loaded_by_peft(base: str, adapter: Path, caplog: pytest.LogCaptureFixture) -> Any:
    from peft import PeftModel

    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, logger="peft"):
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # PEFT's own
        model = PeftModel.from_pretrained(lora_jobs.plain(base), str(adapter))
    assert [r for r in caplog.records if r.name.startswith("peft")] == []
    return model.eval()


@pytest.mark.parametrize(
    ("where", "name"),
    [("one", "qwen2"), ("one", "llama"), ("one", "some targets"), ("one", "experts"), ("two", "tp2"), ("two", "dp2")],
)
def test_peft_loads_the_adapter_and_says_what_the_engine_says(
    where: str, name: str, one: Any, two: Any, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = (one if where == "one" else two)[name]
    folder = out / where / str(list(one if where == "one" else two).index(name))
    family = {"some targets": "llama", "experts": "qwen3_moe", "tp2": "llama", "dp2": "llama"}.get(name, name)
    base = case(family).path
    model = loaded_by_peft(base, folder / "trained", caplog)
    second = {n: p for n, p in model.named_parameters() if ".lora_B." in n}
    assert len(second) == answers[0]["trained"] // 2
    assert all(p.abs().max() > 0 for p in second.values()), "a B is zero: the adapter does nothing"
    adapted, without = lora_jobs.logprobs(model), lora_jobs.logprobs(lora_jobs.plain(base))
    ranks = 1 + max(a["dp_rank"] for a in answers)
    for answer in answers:
        mine = adapted[answer["dp_rank"] :: ranks]
        torch.testing.assert_close(list(answer["last"]), mine, rtol=1e-5, atol=1e-5)
    assert max((a - b).abs().max() for a, b in zip(adapted, without, strict=True)) > 0.1
    merged = model.merge_and_unload()
    exported = lora_jobs.plain(str(folder / "merged"))
    for a, b in zip(lora_jobs.logprobs(merged), lora_jobs.logprobs(exported), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    assert not list((folder / "merged").glob("adapter*")), "the adapter would be applied again"


def test_merged_bf16_weights_are_rounded_once(one: dict[str, Answer], out: Path) -> None:
    """W + s·B·A in fp32, from the files: what PEFT rounds twice."""
    folder = out / "one" / str(list(one).index("bf16 weights"))
    base = load_file(Path(case("llama", dtype="bfloat16").path) / "model.safetensors")
    adapter, merged = (
        load_file(folder / "trained" / "adapter_model.safetensors"),
        load_file(folder / "merged" / "model.safetensors"),
    )
    assert {value.dtype for value in adapter.values()} == {torch.float32}, "adapters are fp32 masters"
    assert one["bf16 weights"][0]["types"] == ["torch.bfloat16", "torch.float32"], "frozen weights stay what they are"
    assert merged.keys() == base.keys()
    changed = 0
    for name, weight in base.items():
        stem = "base_model.model." + name.removesuffix(".weight")
        if f"{stem}.lora_A.weight" in adapter:
            a, b = adapter[f"{stem}.lora_A.weight"], adapter[f"{stem}.lora_B.weight"]
            weight = (weight.float() + 2.0 * (b @ a)).bfloat16()
            changed += 1
        assert torch.equal(merged[name], weight), name
    assert changed == 14


def test_the_config_says_what_was_trained(one: dict[str, Answer], out: Path) -> None:
    from peft import LoraConfig

    folder = out / "one" / str(list(one).index("some targets")) / "trained"
    config: Any = LoraConfig.from_pretrained(str(folder))
    assert (config.r, config.lora_alpha, set(config.target_modules)) == (4, 8, {"o_proj", "v_proj"})
    assert config.base_model_name_or_path == case("llama").path and config.inference_mode
    names = load_file(folder / "adapter_model.safetensors").keys()
    assert all(name.startswith("base_model.model.model.layers.") for name in names)
    assert not any("_orig_mod" in name or "default" in name for name in names)


# ------------------------------------------------------------------------------------------------ state, refusals


def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    one = case("qwen2", dp=2)
    answers = run_ranks(2, lora_jobs.resumed, case=one, out=str(tmp_path))
    for answer in answers:
        assert answer["again"] == answer["rest"] and answer["same"]
    names = json.dumps(sorted(p.name for p in (tmp_path / "state" / "dcp").iterdir()))
    base = sum(f.stat().st_size for f in Path(one.path).glob("*.safetensors"))
    state = sum(f.stat().st_size for f in (tmp_path / "state" / "dcp").iterdir())
    assert state < base / 2, f"the frozen weights are in the state: {names}"
    other = run_ranks(1, lora_jobs.loaded_state, case=dataclasses.replace(one, dp=1), out=str(tmp_path))[0]
    assert other == pytest.approx(answers[0]["rest"], rel=TOLERANCE)


def test_what_cannot_be_is_refused_by_name() -> None:
    targets = [["q_proj", "no_such"], ["gate_proj"], ["norm"], ["lm_head"]]
    families = ["llama", "qwen3_moe", "llama", "llama_tied"]
    cases = [case(f, config={"target_modules": t}) for f, t in zip(families, targets, strict=True)]
    cases += [case("llama", config={"is_critic": True}), case("llama", config={"init_from_scratch": True})]
    said = run_ranks(1, lora_jobs.refusals, cases=cases)[0]
    assert "no_such" in said[0] and "there are: down_proj, gate_proj" in said[0] and "q_proj:" not in said[0]
    assert "gate_proj" in said[1] and "experts are stacked tensors" in said[1]
    assert "model.norm is a LlamaRMSNorm, no linear layer" in said[2]
    assert "shares its weights with the embedding" in said[3]
    assert "value head" in said[4] and "random weights" in said[5]


def test_where_adapters_and_models_may_lie(tmp_path: Path) -> None:
    said = run_ranks(1, lora_jobs.places, case=case("llama"), out=str(tmp_path))[0]
    files = ["adapter_config.json", "adapter_model.safetensors"]
    assert said["adapter"] == said["merged"] == said["over an adapter"] == ""
    assert "merged is in the way, and no adapter" in said["over a model"]
    assert "model.safetensors" in said["what is there then"] and not set(files) & set(said["what is there then"])
    assert said["update, True"] == files and "model.safetensors" in said["update, False"]
    assert "r: is 8" in said["another rank"] and "4 here" in said["another rank"]
    assert "z_proj.lora_A.weight: is in the file" in said["other names"]
    assert "q_proj.lora_A.weight: is not in the file" in said["other names"]
    assert "has no adapter_config.json, or no adapter_model.safetensors" in said["no weights"]
    assert "q_proj.lora_A.weight: holds NaN" in said["nan"] and said["left"] == []


def test_frozen_weights_have_no_gradients_to_be_counted() -> None:
    from areal_convert.engines.flops import Architecture

    model = Architecture.of(json.loads((Path(case("llama").path) / "config.json").read_text()))
    lengths = [7, 30]
    attention = model.forward(lengths) - 2 * sum(lengths) * model.weights
    assert model.training(lengths, frozen=True) == 4 * sum(lengths) * model.weights + 3 * attention


def test_the_command_line_trains_adapters_and_leaves_both_forms(
    tmp_path: Path, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    base = model("llama", layers=2, side_files=True)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"w{n} w{n + 1} w{n + 2}"}) + "\n" for n in range(8)))
    lora = ["engine.use_lora=true", "engine.lora_rank=4", "engine.lora_alpha=8", "engine.optimizer.lr=1e-2"]
    run = [f"dir={tmp_path}/run", f"engine.path={base}", f"data.path={data}", "data.batch_size=2", "max_steps=4"]
    small = ["engine.attn_impl=sdpa", "engine.dtype=float32", "log.tensorboard=false"]
    command = [sys.executable, "-m", "areal_convert.converter.cli", "train", "--engine", "fsdp", *lora, *run, *small]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    adapted = loaded_by_peft(str(base), tmp_path / "run" / "adapter", caplog)
    merged = lora_jobs.plain(str(tmp_path / "run" / "model"))
    for a, b in zip(lora_jobs.logprobs(adapted), lora_jobs.logprobs(merged), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    assert (tmp_path / "run" / "model" / "tokenizer.json").is_file()
    assert (tmp_path / "run" / "adapter" / "tokenizer.json").is_file()
