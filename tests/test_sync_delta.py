"""Delta pushes: only what changed is sent, onto exactly the version that it changed, and what hinders it is said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import models
import sync_threads
from areal_convert.converter.errors import ServerRefused
from areal_convert.converter.sync.hub import WeightSync
from areal_convert.converter.sync.protocol_sink import ProtocolSink
from areal_convert.converter.sync.transports.delta import Base, Holds, choose
from sync_threads import ThreadServer

pytestmark = pytest.mark.timeout(60)
SMALL: dict[str, Any] = {"mode": "delta", "bucket": 16 << 10, "block": 1 << 10, "timeout": 10}
BASE = Base(3, "aa", "key", np.arange(64, dtype=np.uint8).reshape(4, 16), since=1)


@pytest.mark.parametrize(
    ("base", "key", "holds", "anchor", "why"),
    [
        (None, "key", (3, "aa"), 0, "first push"),
        (BASE, "other", (3, "aa"), 0, "cut otherwise"),
        (BASE, "key", (2, "aa"), 0, "holds version 2"),
        (BASE, "key", (4, "aa"), 0, "holds version 4"),
        (BASE, "key", (3, "bb"), 0, "another version 3"),
        (BASE, "key", (3, ""), 0, "root unknown"),
        (BASE, "key", (3, "aa"), 2, "anchor"),
    ],
)
def test_what_makes_a_delta_impossible(base: Any, key: str, holds: tuple[int, str], anchor: int, why: str) -> None:
    servers = [Holds("http://a", 3, "aa"), Holds("http://b", *holds)]
    found = choose("delta", base, key, servers, anchor)
    assert not found.delta and why in found.why


def test_a_delta_is_chosen_where_it_can_be() -> None:
    servers = [Holds("http://a", 3, "aa")]
    assert choose("auto", BASE, "key", servers) == (True, "")
    assert choose("delta", BASE, "key", servers, anchor=3).delta
    assert choose("full", BASE, "key", servers) == (False, "")


@pytest.fixture
def servers() -> Iterator[list[ThreadServer]]:
    with sync_threads.serving(models.cached_model("qwen3", layers=2), 2) as started:
        yield started


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return sync_threads.state_of(models.cached_model("qwen3", layers=2), zero=False)


def hub(state: dict[str, torch.Tensor], servers: list[ThreadServer], **options: Any) -> WeightSync:
    base = models.cached_model("qwen3", layers=2)
    return WeightSync(state, [s.url for s in servers], base=base, **{**SMALL, **options})


def same(servers: list[ThreadServer], state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(s.weights[name], value) for s in servers for name, value in state.items())


@pytest.mark.parametrize("transport", ["shm", "gloo", "inline"])
def test_only_changed_blocks_travel_and_all_is_verified(
    servers: list[ThreadServer], state: dict[str, torch.Tensor], transport: str
) -> None:
    with hub(state, servers, transport=transport) as sync:
        whole = sync.push()
        report = whole
        assert whole.mode == "full" and "first push" in " ".join(whole.notes) and whole.sent_bytes == whole.bytes
        for n in range(4):  # the two copies of a server take turns: each has to catch up with what the other got
            state["model.layers.0.mlp.up_proj.weight"][n] += 1
            report = sync.push(digests=True)
            assert report.mode == "delta" and 0 < report.sent_bytes <= 2 << 10, report
            assert same(servers, state)
        nothing = sync.push()
        assert (nothing.mode, nothing.sent_bytes, nothing.root) == ("delta", 0, report.root)
        assert all(s.receiver.version == nothing.version == 6 for s in servers)


def test_a_server_that_has_another_version_gets_all(
    servers: list[ThreadServer], state: dict[str, torch.Tensor]
) -> None:
    with hub(state, servers) as sync:
        sync.push()
    with hub({n: t + 1 for n, t in state.items()}, servers[1:]) as other:
        other.push()
    with hub(state, servers) as sync:
        sync.push(5)
        state["model.norm.weight"] += 1
        assert sync.push().mode == "delta"
        with torch.no_grad():
            servers[0].receiver.stage.root = "0" * 32  # as if another hub had pushed this version
        report = sync.push()
    assert report.mode == "full" and "holds another version 6" in " ".join(report.notes)
    assert same(servers, state)


def test_weights_that_were_written_to_since_are_not_built_upon(
    servers: list[ThreadServer], state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server's own copy has changed: it says so before anything moves, neither server takes the delta, and both get
    all of it in its place."""
    refused: list[str] = []
    prepare = ProtocolSink.prepare

    def noting(self: ProtocolSink, manifest: Any) -> None:
        try:
            prepare(self, manifest)
        except ServerRefused as error:
            refused.append(error.code)
            assert [s.receiver.version for s in servers] == [1, 1]
            raise

    monkeypatch.setattr(ProtocolSink, "prepare", noting)
    with hub(state, servers) as sync:
        sync.push()
        with torch.no_grad():
            servers[1].weights["model.norm.weight"].add_(1)
        state["lm_head.weight"] += 1
        report = sync.push()
        assert refused == ["base_mismatch"] and (report.mode, report.version) == ("full", 2)
        assert "no longer those that were pushed" in " ".join(report.notes) and servers[1].url in " ".join(report.notes)
        assert same(servers, state) and [s.receiver.version for s in servers] == [2, 2]
        state["lm_head.weight"] += 1
        assert sync.push().mode == "delta" and same(servers, state)


def test_what_a_delta_leaves_as_it_is_is_verified(servers: list[ThreadServer], state: dict[str, torch.Tensor]) -> None:
    """The copy that serves is damaged where the push after next brings nothing: that copy is its target, and what was
    remembered of it would do. It is hashed again, refused, and written whole."""
    with hub(state, servers) as sync:
        for _ in range(2):
            state["lm_head.weight"] += 1
            sync.push()
        with torch.no_grad():
            servers[1].weights["model.norm.weight"].add_(1)
        state["lm_head.weight"] += 1
        assert sync.push().mode == "delta" and same(servers, state)  # into the other copy, which is whole
        state["lm_head.weight"] += 1
        report = sync.push()
        notes = " ".join(report.notes)
        assert (report.mode, report.version) == ("full", 4) and "final_norm is not what was pushed any more" in notes
        assert same(servers, state) and [s.receiver.version for s in servers] == [4, 4]
        state["lm_head.weight"] += 1
        assert sync.push().mode == "delta" and same(servers, state)


def test_every_so_often_a_whole_one_is_sent(servers: list[ThreadServer], state: dict[str, torch.Tensor]) -> None:
    with hub(state, servers, anchor=3) as sync:
        reports = [sync.push() for _ in range(7)]
    assert [r.mode for r in reports] == ["full", "delta", "delta", "full", "delta", "delta", "full"]
    assert all("anchor" in " ".join(r.notes) for r in reports[3::3])


def test_auto_says_nothing_of_it(servers: list[ThreadServer], state: dict[str, torch.Tensor]) -> None:
    with hub(state, servers, mode="auto") as sync:
        first, second = sync.push(), sync.push()
    assert (first.mode, first.notes, second.mode) == ("full", [], "delta")
