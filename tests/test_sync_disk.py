"""Pushes through a directory: verified like all others, seen by everybody or refused, and tidied up."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import models
import sync_threads
from areal_convert.converter.errors import ConvertError, ServerRefused, SyncError
from areal_convert.converter.sync.hub import WeightSync
from areal_convert.converter.sync.refusals import Refused
from areal_convert.converter.sync.transports.disk import DiskInlet
from areal_convert.converter.sync.wire import Header, ProtocolError
from sync_jobs import other_weights

pytestmark = pytest.mark.timeout(60)
SMALL: dict[str, Any] = {"transport": "disk", "bucket": 16 << 10, "block": 4 << 10, "timeout": 10}


@pytest.fixture(scope="module")
def model() -> Path:
    return models.cached_model("qwen3", layers=2)


def holds(server: sync_threads.ThreadServer, path: Path) -> bool:
    wanted = sync_threads.state_of(path, zero=False)
    return all(torch.equal(server.weights[name], value) for name, value in wanted.items())


def test_two_servers_load_from_files_which_then_go(model: Path, tmp_path: Path) -> None:
    other, folder = other_weights(model, tmp_path / "other", 1), tmp_path / "way"
    with sync_threads.serving(model, 2) as servers:
        with WeightSync(model, [s.url for s in servers], options={"directory": str(folder)}, **SMALL) as sync:
            first, second = sync.push(), sync.push(source=other)
            assert (first.transport, second.complete) == ("disk", True) and first.buckets > 10
            assert [p.name for p in folder.glob("v*")] == [], "applied: not needed any more"
        assert all(holds(server, other) for server in servers)
    assert list(folder.iterdir()) == []


def test_the_last_versions_stay_where_they_are_to(model: Path, tmp_path: Path) -> None:
    with sync_threads.serving(model) as (server,):
        options = {"directory": str(tmp_path / "way"), "keep": 2}
        with WeightSync(model, server.url, options=options, **SMALL) as sync:
            for _ in range(4):
                sync.push()
        assert holds(server, model)
    kept = sorted((tmp_path / "way").iterdir())
    assert [p.name for p in kept] == ["v000003", "v000004"]
    assert len(list(kept[1].glob("s0-*.bucket"))) > 10


def test_a_delta_goes_by_files_too(model: Path, tmp_path: Path) -> None:
    state = sync_threads.state_of(model, zero=False)
    with sync_threads.serving(model) as (server,):
        options = {"directory": str(tmp_path)}
        with WeightSync(state, server.url, base=model, mode="delta", options=options, **SMALL) as sync:
            sync.push()
            state["model.norm.weight"] += 1
            report = sync.push()
        assert report.mode == "delta" and report.sent_bytes == state["model.norm.weight"].nbytes
        assert torch.equal(server.weights["model.norm.weight"], state["model.norm.weight"])


def test_a_directory_must_be_given(model: Path) -> None:
    with sync_threads.serving(model) as (server,), WeightSync(model, server.url, **SMALL) as sync:
        with pytest.raises(ServerRefused, match="no directory was given"):
            sync.push()
        assert server.receiver.version == 0


def test_a_directory_that_the_server_does_not_see_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sync_threads.serving(model) as (server,):
        monkeypatch.setattr(DiskInlet, "open", lambda self: _elsewhere(self))
        sync = WeightSync(model, server.url, options={"directory": str(tmp_path)}, **SMALL)
        with sync, pytest.raises(ConvertError, match="not on this server's file system"):
            sync.push()
        assert server.receiver.version == 0


_opens = DiskInlet.open


def _elsewhere(inlet: DiskInlet) -> None:
    inlet.directory = inlet.directory / "mounted elsewhere"
    _opens(inlet)


def test_a_file_that_was_damaged_on_the_way_is_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, before = DiskInlet.make, threading.active_count()

    def damage(self: DiskInlet, what: str, message: Any, data: Any) -> Any:
        file = self.directory / message["file"]
        raw = bytearray(file.read_bytes())
        if len(raw) > 5000:
            raw[-1] ^= 1
            file.write_bytes(raw)
        return make(self, what, message, data)

    monkeypatch.setattr(DiskInlet, "make", damage)
    with sync_threads.serving(model) as (server,):
        sync = WeightSync(model, server.url, options={"directory": str(tmp_path)}, **SMALL)
        with sync, pytest.raises(SyncError, match="damaged"):
            sync.push()
        assert server.receiver.version == 0 and not any(t.any() for t in server.weights.values())
    assert threading.active_count() < before + 20  # those of the server end with it, those of the push at once


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "v000001/s0-000001.bucket/..", "v1/s0-000000.bucket"])
def test_only_files_of_buckets_are_opened(tmp_path: Path, name: str) -> None:
    inlet = DiskInlet({"directory": str(tmp_path), "token": "0" * 32}, 1.0)
    with pytest.raises(Refused, match="told by JSON"):
        inlet.make("load", {"file": name, "header": ""}, None)


def test_a_file_of_another_bucket_or_none_is_an_error(tmp_path: Path) -> None:
    inlet = DiskInlet({"directory": str(tmp_path), "token": "0" * 32}, 1.0)
    header = Header(1, 1, 0, 0, 4, 0, bytes(16))
    arrival = inlet.make("load", {"file": "v000001/s0-000000.bucket", "header": header.pack().hex()}, None)
    with pytest.raises(ProtocolError, match="cannot be read"):
        arrival.fill(header, [np.empty(4, np.uint8)])()
    (tmp_path / "v000001").mkdir()
    (tmp_path / "v000001/s0-000000.bucket").write_bytes(header.pack()[::-1] + b"abcd")
    with pytest.raises(ProtocolError, match="another bucket"):
        arrival.fill(header, [np.empty(4, np.uint8)])()


def test_a_join_that_makes_no_sense_is_refused() -> None:
    for transport in ({}, {"directory": "/x"}, {"directory": "/x", "token": "../.."}):
        with pytest.raises(Refused, match="directory, token"):
            DiskInlet(transport, 1.0)
