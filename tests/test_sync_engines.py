"""Engines push their live weights: `connect_engine` and `update_weights` of all three, on two ranks each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import models
import sync_engine_jobs
import sync_threads
from areal_convert.converter.errors import ConfigError
from areal_convert.engines.syncing import ADDRESSES, servers_of
from engine_worker import run_ranks
from sync_jobs import other_weights

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("backend", "kinds"),
    [
        ("fsdp", {"dp": 2}),
        ("megatron", {"tp": 2}),
        ("archon", {"dp": 2}),
    ],
)
def test_servers_have_the_engines_weights(backend: str, kinds: dict[str, Any], tmp_path: Path) -> None:
    model = models.cached_model("qwen3", layers=2)
    other = other_weights(model, tmp_path / "other", 1)
    kinds = {**kinds, "config": {"enable_delta_weight_update": True, "weight_update_anchor_interval": 9}}
    with sync_threads.serving(model) as (server,):
        arguments: dict[str, Any] = {"backend": backend, "path": str(model), "other": str(other), "url": server.url}
        said = run_ranks(2, sync_engine_jobs.updates, **arguments, folder=str(tmp_path), kinds=kinds)
        for first, second, third, left in said:
            assert first == (1, "full", 2, True, True)
            assert second == (2, "delta", 2, True, True), "everything has changed"
            assert third[0] == 3 and third[3] and not left, "the directory goes when the servers have it"
        assert server.receiver.version == 3
        wanted = sync_threads.state_of(other, zero=False)
        assert all(torch.equal(server.weights[name], value) for name, value in wanted.items())


def test_an_adapter_alone(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from areal_convert.converter.sync.server.adapters import Adapters
    from areal_convert.converter.sync.transports.lora import AdapterStage
    from sync_parts import module_of

    model = models.cached_model("llama", layers=2)
    held = Adapters(module_of(model))
    server = sync_threads.start(model, sync_threads.state_of(model, zero=False), adapters=AdapterStage(held))
    try:
        arguments: dict[str, Any] = {"path": str(model), "url": server.url, "folder": str(tmp_path / "saved")}
        sizes = run_ranks(2, sync_engine_jobs.adapters, **arguments)
    finally:
        server.stop()
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert sizes == [sum(t.nbytes for t in saved.values())] * 2
    adapter = held.get("policy")
    assert adapter is not None and adapter.version == 4
    for module, (a, b, _) in adapter.pairs.items():
        name = f"base_model.model.{module}"
        assert torch.equal(a, saved[f"{name}.lora_A.weight"]) and torch.equal(b, saved[f"{name}.lora_B.weight"])


def test_calls_that_make_no_sense() -> None:
    model = models.cached_model("qwen3", layers=2)
    with sync_threads.serving(model) as (server,):
        found = run_ranks(1, sync_engine_jobs.refusals, path=str(model), url=server.url, init=False)[0]
    wanted = ("none is connected", "a directory is needed", "object knows no", "NoneType knows no", "awex")
    for text, part in zip(found, (*wanted, "cannot be reached", "xccl is connected", "no adapters"), strict=True):
        assert part in text, found


class _Inner:
    addresses = ("10.0.0.1:30000", "10.0.0.2:30000")


class _Outer:
    addresses: tuple[str, ...] = ()
    _engine = _Inner()


def test_where_the_servers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    two = ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]
    assert servers_of(_Inner()) == servers_of(_Outer()) == two
    assert servers_of("10.0.0.1:30000, http://10.0.0.2:30000/") == two
    assert servers_of([*two, two[0]]) == two
    monkeypatch.setenv(ADDRESSES, "10.0.0.1:30000,10.0.0.2:30000")
    assert servers_of(None) == two
    monkeypatch.delenv(ADDRESSES)
    with pytest.raises(ConfigError, match=ADDRESSES):
        servers_of(None)
