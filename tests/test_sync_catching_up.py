"""Servers that are behind get the version that was decided, and nothing else under its number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_convert.converter import WeightSync
from areal_convert.converter.errors import InDoubt, ServerRefused, ServerUnreachable, SyncAborted, SyncError
from areal_convert.converter.sync.journal import Journal
from areal_convert.converter.sync.protocol_sink import ProtocolSink
from areal_convert.converter.sync.rounds import as_all_see
from areal_convert.converter.sync.transport import choose
from areal_convert.converter.sync.transports.segments import host_id
from sync_jobs import other_weights
from sync_threads import serving, start, state_of

SMALL: dict[str, Any] = {"bucket": 1 << 16, "block": 1 << 12, "timeout": 10.0}
HASTY: dict[str, Any] = {**SMALL, "timeout": 0.3}

Model = Callable[..., Path]


def same(held: Any, path: Path) -> bool:
    return all(torch.equal(held[name], value) for name, value in state_of(path, zero=False).items())


@pytest.fixture
def a(model: Model) -> Path:
    return model("qwen3", layers=2)


def test_nobody_catches_up_from_what_was_called_off(a: Path, tmp_path: Path) -> None:
    """A later checkpoint is opened, and its push fails: the version before it is still that of the one before it."""
    later = other_weights(a, tmp_path / "later", 5)
    state = load_file(later / "model.safetensors")
    state["model.norm.weight"][0] = torch.nan
    save_file(state, later / "model.safetensors", metadata={"format": "pt"})
    journal = tmp_path / "journal"
    with serving(a) as (server,):
        port = int(server.url.rsplit(":", 1)[1])
        with WeightSync(a, server.url, journal=journal, **SMALL) as sync:
            assert sync.push().version == 1
            with pytest.raises(SyncAborted, match="final_norm holds NaN"):
                sync.push(source=later)
            assert server.receiver.version == 1 and same(server.weights, a)
            server.stop()
            again = start(a, port=port)
            assert sync.catch_up() == [server.url] and again.receiver.version == 1
            assert same(again.weights, a)
            again.stop()
        again = start(a, port=port)
        with WeightSync(later, server.url, journal=journal, allow_nan=True, **SMALL) as sync:
            with pytest.raises(SyncError, match="is not what was pushed as version 1"):
                sync.catch_up()  # a hub that has pushed nothing goes by the digest in its journal
            assert again.receiver.version == 0 and not any(value.any() for value in again.weights.values())
        with WeightSync(a, server.url, journal=journal, **SMALL) as sync:
            assert sync.catch_up() == [server.url] and again.receiver.version == 1
        again.stop()


def test_a_decision_that_was_taken_back_leaves_nobody_behind(a: Path, tmp_path: Path) -> None:
    """The journal's line is written, and a step after it fails before any server is told."""
    path = tmp_path / "journal"
    with serving(a) as (server,):
        with WeightSync(a, server.url, journal=path, **SMALL) as sync:
            sync.push()
        journal = Journal.open(path)
        journal.begin("run", 9, 2, [server.url])
        journal.commit(9, 2, "ab", [server.url])
        journal.abort(2, "a rank failed")
        journal.close()
        with WeightSync(a, server.url, journal=path, **SMALL) as sync:
            assert sync.behind() == [] and sync.push().version == 2


def test_what_is_decided_waits_on_the_server_for_the_next_hub(
    a: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub that ends with a version in doubt keeps the lease, which the next one with its journal has at once. Without
    a journal nobody would come."""
    path = tmp_path / "journal"

    def lost(*_: Any) -> Any:
        raise ServerUnreachable("the answer was lost.")

    for journal in (path, None):
        with serving(a) as (server,):
            with monkeypatch.context() as patched, WeightSync(a, server.url, journal=journal, **HASTY) as sync:
                patched.setattr(ProtocolSink, "commit", lost)
                hint = "with this journal completes it" if journal else "without a journal nobody completes it"
                with pytest.raises(InDoubt) as caught:
                    sync.push()
                assert hint in caught.value.hint
            assert (server.receiver.status()["lease"] is not None) == (journal is not None)
            assert server.receiver.version == 0
            if journal is not None:
                with WeightSync(a, server.url, journal=journal, **HASTY):
                    assert server.receiver.version == 1 and same(server.weights, a)


def test_shared_memory_is_for_ranks_that_all_are_on_the_servers_host() -> None:
    status = SimpleNamespace(raw={"host": host_id(), "transports": ["shm", "gloo"]})
    here: list[Any] = [SimpleNamespace(url="http://a:1", status=status)]
    assert choose("auto", as_all_see(here, [host_id()] * 2)) == "shm"
    assert choose("auto", as_all_see(here, [host_id(), "another"])) == "gloo"
    with pytest.raises(ServerRefused, match="is on another host"):
        choose("shm", as_all_see(here, [host_id(), "another"]))
