"""What ranks do in the tests of adapters: PEFT and torch.optim alone, and the same training through an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import engine_jobs
from engine_jobs import Case, batch_of, make_engine, sequences

STEPS = 10
LR = 3e-2
LORA = {"use_lora": True, "lora_rank": 4, "lora_alpha": 8}


# ------------------------------------------------------------------------------------------------ PEFT alone


def reference(base: str, adapter: str) -> dict[str, Any]:
    """transformers, PEFT and torch.optim.AdamW from the same first adapters; nothing of ours."""
    from peft import PeftModel

    model: Any = PeftModel.from_pretrained(plain(base), adapter, is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) < len(list(model.parameters()))
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.01)
    losses, norms = [], []
    model.train()
    for step in range(STEPS):
        ids, mask = engine_jobs._padded(sequences(step))
        logits = model(input_ids=ids, attention_mask=mask).logits
        targets = mask[:, 1:].bool().clone()
        targets[:, 0] = False
        nll = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        loss = nll[targets].sum() / targets.sum()
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.stack([p.grad.double().norm() for p in trained]).norm().item())
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms}


def plain(base: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(base)
    config._experts_implementation = "eager"
    return AutoModelForCausalLM.from_pretrained(base, config=config, dtype=torch.float32)


@torch.no_grad()
def logprobs(model: Any) -> list[torch.Tensor]:
    """Of the first batch, as an engine's `forward_batch` gives them."""
    return engine_jobs._plain_logprobs(model.eval())


# ------------------------------------------------------------------------------------------------ through an engine


def train(cases: Sequence[Case], out: str, merge: bool = False) -> list[dict[str, Any]]:
    """Train every case; what it saves lies in `out`/number: `first`, `trained` and, if asked for, `merged`."""
    return [_train(case, Path(out, str(number)), merge) for number, case in enumerate(cases)]


def _train(case: Case, out: Path, merge: bool) -> dict[str, Any]:
    from areal_convert.engines.api.metas import SaveLoadMeta
    from areal_convert.engines.losses import sft_loss, sft_weight

    engine = make_engine(case)
    out.mkdir(parents=True, exist_ok=True)
    engine.save(SaveLoadMeta(str(out / "first")))
    base = engine.lora.base()
    before = {name: _local(value).clone() for name, value in base.items()}
    engine.train()
    results = [engine.train_batch(batch_of(engine, step), sft_loss, sft_weight) for step in range(STEPS)]
    last = engine.eval().forward_batch(batch_of(engine, 0), aggregate_fn=list)
    engine.save(SaveLoadMeta(str(out / "trained")))
    if merge:
        engine.save(SaveLoadMeta(str(out / "merged"), merge_adapters=True))
    answer = {
        "losses": [r["loss"] for r in results],
        "norms": [r["grad_norm"] for r in results],
        "last": last,
        "frozen": all(torch.equal(_local(value), before[name]) for name, value in engine.lora.base().items()),
        "states": len(engine.optimizer.state),
        "trained": len(engine.lora.adapters()),
        "types": sorted({str(p.dtype) for p in engine.model.parameters()}),
        "dp_rank": engine.data_parallel_rank,
        "reloaded": _reloaded(engine, out, last),
    }
    engine.destroy()
    return answer


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def _reloaded(engine: Any, out: Path, last: list[torch.Tensor]) -> bool:
    """The trained adapters, gone and loaded again: not the same before, and bit for bit after."""
    from areal_convert.engines.api.metas import SaveLoadMeta

    engine.lora.initialise(99)
    other = engine.forward_batch(batch_of(engine, 0), aggregate_fn=list)
    engine.load(SaveLoadMeta(str(out / "trained")))
    again = engine.forward_batch(batch_of(engine, 0), aggregate_fn=list)
    differs = not all(torch.equal(a, b) for a, b in zip(last, other, strict=True))
    return differs and all(torch.equal(a, b) for a, b in zip(last, again, strict=True))


def resumed(case: Case, out: str) -> dict[str, Any]:
    """Ten steps at once, and five with a training state, a new engine, and five more."""
    from areal_convert.engines.api.metas import SaveLoadMeta
    from areal_convert.engines.losses import sft_loss, sft_weight

    def steps(engine: Any, numbers: range) -> list[float]:
        return [engine.train_batch(batch_of(engine, n), sft_loss, sft_weight)["loss"] for n in numbers]

    meta = SaveLoadMeta(str(Path(out, "state")), "dcp", with_optim=True)
    whole = make_engine(case)
    first = steps(whole, range(5))
    whole.save(meta)
    rest = steps(whole, range(5, STEPS))
    expected = {n: _local(p.detach()).clone() for n, p in whole.lora.adapters().items()}
    whole.destroy()
    engine = make_engine(case)
    engine.load(meta)
    again = steps(engine, range(5, STEPS))
    same = all(torch.equal(_local(p.detach()), expected[n]) for n, p in engine.lora.adapters().items())
    engine.destroy()
    return {"losses": first + rest, "again": again, "rest": rest, "same": same}


def loaded_state(case: Case, out: str) -> list[float]:
    """The last five steps, from the state that other ranks saved."""
    from areal_convert.engines.api.metas import SaveLoadMeta
    from areal_convert.engines.losses import sft_loss, sft_weight

    engine = make_engine(case)
    engine.load(SaveLoadMeta(str(Path(out, "state")), "dcp", with_optim=True))
    losses = [engine.train_batch(batch_of(engine, n), sft_loss, sft_weight)["loss"] for n in range(5, STEPS)]
    engine.destroy()
    return losses


def refusal(case: Case) -> str:
    """What an engine says to a configuration that it cannot run."""
    from areal_convert.converter.errors import ConvertError

    try:
        make_engine(case)
    except ConvertError as error:
        return str(error)
    return "nothing"


def refusals(cases: Sequence[Case]) -> list[str]:
    return [refusal(case) for case in cases]


def places(case: Case, out: str) -> dict[str, Any]:
    """What directories an engine writes to and reads from, and which it refuses."""
    from areal_convert.converter.errors import ConvertError
    from areal_convert.engines.api.metas import SaveLoadMeta, WeightUpdateMeta

    def said(method: Any, meta: Any) -> str:
        try:
            method(meta)
        except ConvertError as error:
            return str(error)
        return ""

    engine, folder = make_engine(case), Path(out)
    adapter, merged, damaged = folder / "adapter", folder / "merged", folder / "damaged"
    found: dict[str, Any] = {"adapter": said(engine.save, SaveLoadMeta(str(adapter)))}
    found["merged"] = said(engine.save, SaveLoadMeta(str(merged), merge_adapters=True))
    found["over a model"] = said(engine.save, SaveLoadMeta(str(merged)))
    found["over an adapter"] = said(engine.save, SaveLoadMeta(str(adapter), merge_adapters=True))
    found["what is there then"] = sorted(p.name for p in adapter.iterdir())
    for use_lora in (True, False):
        meta = WeightUpdateMeta(type="disk", path=str(folder / f"update-{use_lora}"), use_lora=use_lora)
        engine.update_weights(meta)
        found[f"update, {use_lora}"] = sorted(p.name for p in Path(str(meta.path)).iterdir())
    damaged.mkdir()
    source = folder / "update-True"
    for file in source.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    config = damaged / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 4', '"r": 8'))
    found["another rank"] = said(engine.load, SaveLoadMeta(str(damaged)))
    config.write_bytes((source / config.name).read_bytes())
    weights = damaged / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b".q_proj.lora_A", b".z_proj.lora_A"))
    found["other names"] = said(engine.load, SaveLoadMeta(str(damaged)))
    weights.unlink()
    found["no weights"] = said(engine.load, SaveLoadMeta(str(damaged)))
    with torch.no_grad():
        next(iter(engine.lora.adapters().values())).fill_(float("nan"))
    found["nan"] = said(engine.save, SaveLoadMeta(str(folder / "nan")))
    found["left"] = sorted(p.name for p in folder.iterdir() if "nan" in p.name)
    engine.destroy()
    return found
