"""What ranks do in the tests of adapters on Megatron's layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine_jobs import batch_of
from lora_jobs import STEPS
from megatron_jobs import Case, make_engine
from megatron_state_jobs import writers


def train(cases: Sequence[Case], out: str, merge: bool = False) -> list[dict[str, Any]]:
    """Train every case; what it saves lies in `out`/number: `first`, `trained` and, if asked for, `merged`."""
    return [_train(case, Path(out, str(number)), merge) for number, case in enumerate(cases)]


def _train(case: Case, out: Path, merge: bool) -> dict[str, Any]:
    from areal_convert.engines.api.metas import SaveLoadMeta
    from areal_convert.engines.losses import sft_loss, sft_weight

    engine = make_engine(case)
    out.mkdir(parents=True, exist_ok=True)
    engine.save(SaveLoadMeta(str(out / "first")))
    before = [{name: value.clone() for name, value in part.items()} for part in engine.lora.base()]
    results = [engine.train_batch(batch_of(engine, step), sft_loss, sft_weight) for step in range(STEPS)]
    last = engine.eval().forward_batch(batch_of(engine, 0), aggregate_fn=list)
    engine.save(SaveLoadMeta(str(out / "trained")))
    if merge:
        engine.save(SaveLoadMeta(str(out / "merged"), merge_adapters=True))
    pairs = zip(engine.lora.base(), before, strict=True)
    answer = {
        "losses": [r["loss"] for r in results],
        "norms": [r["grad_norm"] for r in results],
        "last": last,
        "frozen": all(torch.equal(now[name], then[name]) for now, then in pairs for name in then),
        "trained": sum(p.requires_grad for chunk in engine.model for p in chunk.parameters()),
        "adapters": len(engine.lora.adapters()),
        "reloaded": _reloaded(engine, out, last),
        "dp_rank": engine.data_parallel_rank,
    }
    engine.destroy()
    return answer


def _reloaded(engine: Any, out: Path, last: list[torch.Tensor]) -> bool:
    """The trained adapters, gone and loaded again: not the same before, and bit for bit after."""
    from areal_convert.engines.api.metas import SaveLoadMeta

    engine.lora.initialise(99)
    other = engine.forward_batch(batch_of(engine, 0), aggregate_fn=list)
    engine.load(SaveLoadMeta(str(out / "trained")))
    again = engine.forward_batch(batch_of(engine, 0), aggregate_fn=list)
    differs = not all(torch.equal(a, b) for a, b in zip(last, other, strict=True))
    return differs and all(torch.equal(a, b) for a, b in zip(last, again, strict=True))


def resumed(case: Case, path: str) -> dict[str, Any]:
    """Three steps, a training state, two more; and a new engine that goes on from the state."""
    from areal_convert.engines.api.metas import SaveLoadMeta

    meta = SaveLoadMeta(path, "dcp", with_optim=True)
    with writers():
        engine = make_engine(case)
        _steps(engine, 0, 3)
        engine.save(meta)
        rest = _steps(engine, 3, 5)
        engine.destroy()
        return {"rest": rest, "again": _gone_on(case, meta)}


def loaded(case: Case, path: str) -> list[float]:
    from areal_convert.engines.api.metas import SaveLoadMeta

    with writers():
        return _gone_on(case, SaveLoadMeta(path, "dcp", with_optim=True))


def _gone_on(case: Case, meta: Any) -> list[float]:
    engine = make_engine(case)
    engine.lora.initialise(99)
    engine.load(meta)
    losses = _steps(engine, 3, 5)
    engine.destroy()
    return losses


def _steps(engine: Any, first: int, last: int) -> list[float]:
    from areal_convert.engines.losses import sft_loss, sft_weight

    return [engine.train_batch(batch_of(engine, n), sft_loss, sft_weight)["loss"] for n in range(first, last)]


def refusals(cases: Sequence[Case]) -> list[str]:
    from areal_convert.converter.errors import ConfigError

    said = []
    for case in cases:
        try:
            make_engine(case)
        except ConfigError as error:
            said.append(str(error))
        else:
            said.append("made")
    return said
