"""Pushes through shared memory: the same bytes for all servers, credit, and nothing left behind whoever is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_convert.converter import open_checkpoint
from areal_convert.converter.errors import ServerRefused, SyncError
from areal_convert.converter.sync.hub import WeightSync
from areal_convert.converter.sync.refusals import Refused
from areal_convert.converter.sync.transport import Peer
from areal_convert.converter.sync.transports import segments
from areal_convert.converter.sync.transports.segments import SHM, Segment, SegmentError, host_id, sweep
from areal_convert.converter.sync.transports.shm import ShmInlet, ShmTransport
from sync_jobs import other_weights
from sync_server import RunningServer, start_server

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(90)]


def ours() -> set[str]:
    """Segments that there are now."""
    return {name for name in os.listdir(SHM) if name.startswith("arcs-")}


# ------------------------------------------------------------------------------------------------ segments


def test_a_segment_is_shared_read_only_and_unlinked() -> None:
    made = Segment.make(1 << 16)
    made.array[:4] = [1, 2, 3, 4]
    seen = Segment.attach(made.name)
    made.unlink()
    assert made.name not in ours(), "whoever has mapped it keeps it, its name is gone"
    made.array[1] = 9
    assert seen.array[:4].tolist() == [1, 9, 3, 4]
    with pytest.raises(ValueError, match="read-only"):
        seen.array[0] = 1
    with pytest.raises(SegmentError, match="cannot be opened"):
        Segment.attach(made.name)


def test_names_lead_nowhere_else() -> None:
    for name in ("../etc/passwd", "/etc/passwd", "arcs-1-1-1-x", ""):
        with pytest.raises(SegmentError, match="no name of a segment"):
            Segment.attach(name)


def test_too_little_room_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = ours()
    with pytest.raises(SegmentError, match="no room for 4096 bytes"):
        Segment.make(4096)
    assert ours() == before


def _makes(answer: Any) -> None:
    answer.send(Segment.make(4096).name)
    time.sleep(60)


def test_what_a_killed_process_left_is_swept_and_nothing_else() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_makes, args=(there,), daemon=True)
    process.start()
    name, mine = here.recv(), Segment.make(4096)
    assert name not in sweep(), "its process lives"
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    foreign = SHM / f"arcs-1-{process.pid}-1-{'0' * 16}"  # of another process namespace: nobody can tell from here
    foreign.touch()
    try:
        assert name in sweep()
        assert name not in ours() and mine.name in ours() and foreign.exists()
    finally:
        foreign.unlink()
        mine.close()


# ------------------------------------------------------------------------------------------------ who can be reached


def test_only_who_sees_the_same_memory_is_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def peer(host: str) -> Peer:
        return Peer("http://x", {"host": host, "transports": ["shm"]})

    assert ShmTransport.unfit(peer(host_id())) == ""
    assert "another host" in ShmTransport.unfit(peer(host_id() + "0"))
    assert "does not say" in ShmTransport.unfit(peer(""))
    monkeypatch.setattr(segments, "SHM", Path("/nowhere"))
    assert host_id() == ""


@pytest.mark.parametrize(
    ("transport", "says"),
    [
        ({}, "segments"),
        ({"segments": [[1]], "rank": 1}, "no text"),
        ({"segments": [["a"]], "rank": 0}, "rank 0"),
        ({"segments": [[]], "rank": 1}, "segments"),
    ],
)
def test_a_join_that_makes_no_sense_is_refused(transport: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match=says):
        ShmInlet(transport, 1.0)


def test_an_inlet_of_another_hub_does_not_open() -> None:
    control = Segment.make(4096)
    fields = {"segments": [["a"]], "rank": 1, "control": control.name, "token": "00" * 16}
    with pytest.raises(SegmentError, match="another shared memory"):
        ShmInlet({**fields, "host": "elsewhere"}, 1.0).open()
    control.array[:16] = 7
    with pytest.raises(SegmentError, match="does not hold"):
        ShmInlet({**fields, "host": host_id()}, 1.0).open()
    control.close()


# ------------------------------------------------------------------------------------------------ pushes


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import models

    return models.make_model("qwen3", tmp_path_factory.mktemp("shm") / "model", layers=2)


@pytest.fixture(scope="module")
def servers(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningServer]]:
    started = [start_server(base, tmp_path_factory.mktemp("log") / str(n)) for n in range(2)]
    yield started
    for server in started:
        if server.alive:
            server.stop()


def atoms_of(path: Path) -> dict[str, str]:
    """Content digests of a checkpoint."""
    from areal_convert.converter.execute import content_digest
    from areal_convert.converter.rawio import Files
    from areal_convert.converter.slots import whole

    found = open_checkpoint(path)
    return {n: content_digest(Files(), s, whole(found.atoms[n][1]), 1 << 20) for n, s in found.slots.items()}


def test_two_servers_read_one_ring(base: Path, servers: list[RunningServer], tmp_path: Path) -> None:
    other = other_weights(base, tmp_path / "other", 2)
    before = ours()
    with WeightSync(other, [s.url for s in servers], bucket=16 << 10, block=4 << 10) as sync:
        report = sync.push()
        assert report.transport == "shm", "auto, on one host"
        assert ours() == before, "names are gone as soon as everybody has mapped the memory"
        again = sync.push(source=base)
    assert report.buckets > 10 and report.complete and again.complete
    assert again.root != report.root
    for server in servers:
        assert server.get("/ws/digests")["atoms"] == atoms_of(base)
        assert server.version == again.version


def _hub(source: str, urls: list[str], answer: Any) -> None:
    with WeightSync(source, urls, transport="shm", bucket=4 << 10, block=1 << 10, lease=2.0) as sync:
        sync.push()
        answer.send("pushed")
        while True:
            sync.push()


def test_a_hub_that_is_killed_leaves_nothing(base: Path, servers: list[RunningServer]) -> None:
    before = ours()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_hub, args=(str(base), [s.url for s in servers], there), daemon=True)
    process.start()
    assert here.recv() == "pushed"
    time.sleep(0.1)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert ours() == before
    end = time.monotonic() + 20
    while True:  # the dead hub's lease runs out
        try:
            with WeightSync(base, [s.url for s in servers], transport="shm") as sync:
                assert sync.push().complete
            break
        except ServerRefused as error:
            assert error.code == "lease_held" and time.monotonic() < end, str(error)
            time.sleep(0.2)


def test_a_server_that_is_killed_ends_the_push(base: Path, tmp_path: Path) -> None:
    before = ours()
    server = start_server(base, tmp_path / "log")
    with WeightSync(base, [server.url], transport="shm", timeout=5, bucket=4 << 10, block=1 << 10) as sync:
        sync.push()
        server.kill()
        with pytest.raises(SyncError):
            sync.push()
    assert ours() == before


def test_a_header_is_hexadecimal() -> None:
    inlet = ShmInlet({"segments": [["a"]], "rank": 1}, 1.0)
    inlet._rings = [[Segment.make(4096)]]
    for message, says in (
        ({"sender": 1}, "no sender 1"),
        ({"sender": 0, "segment": 3, "header": ""}, "no segment 3"),
        ({"sender": 0, "segment": 0, "header": "xy"}, "not hexadecimal"),
    ):
        with pytest.raises(Refused, match=says):
            inlet.make("bucket", {"header": "00", **message}, None)
    with pytest.raises(Refused, match="told by JSON"):
        inlet.make("bucket", {}, np.zeros(4, np.uint8).data)
    inlet.close()
