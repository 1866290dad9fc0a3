"""What breaks a mirror of a place elsewhere: other processes, kills, cleaners, torn notes, names, leaks."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from areal_convert.converter import Mesh, convert, inspect, open_checkpoint, verify
from areal_convert.converter.remote.fs_store import FsspecStore
from areal_convert.converter.remote.mirror import Mirror
from areal_convert.converter.remote.mounts import unmount_all
from range_server import RangeServer
from s3_server import settle


@pytest.fixture(autouse=True)
def _fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch, {"AREAL_CACHE": str(tmp_path / "cache"), "no_proxy": "127.0.0.1"})


@pytest.fixture
def small(model_copy: Callable[..., Path]) -> Path:
    return model_copy("qwen3", layers=2, max_shard_size="150KB", side_files=True)


@pytest.fixture
def server(small: Path) -> Iterator[RangeServer]:
    with RangeServer(small, listing=True) as running:
        yield running


def test_files_that_a_cleaner_took_are_fetched_again(server: RangeServer, small: Path, tmp_path: Path) -> None:
    """Directories of caches are cleaned file by file; the notes on what was there may stay."""
    assert inspect(server.url).ok
    for file in list((tmp_path / "cache").rglob("config.json")) + list((tmp_path / "cache").rglob("*.safetensors")):
        if "files" in file.parts:
            file.unlink()
    unmount_all()
    assert verify(small, server.url).same


def test_a_file_that_was_cut_off_is_fetched_again(server: RangeServer, small: Path, tmp_path: Path) -> None:
    assert inspect(server.url).ok
    for file in (tmp_path / "cache").rglob("*.json"):
        if "files" in file.parts:
            os.truncate(file, 3)
    unmount_all()
    assert verify(small, server.url).same


@pytest.mark.parametrize("torn", [b"\n0 99999999\n", b"\n5 2", b"\n-1 7\n", b"\xff\xfe\n", b"\n0 1 2\n", b"\n0 "])
def test_torn_notes_promise_nothing(torn: bytes, server: RangeServer) -> None:
    store = FsspecStore(server.url)
    mirror = Mirror(store)
    note = mirror._have / "config.json"
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_bytes(torn)
    size = mirror.size("config.json")
    mirror.ensure({"config.json": [(0, size)]})
    assert (mirror.directory / "config.json").read_bytes() == b"".join(map(bytes, store.stream("config.json", 0, size)))


def test_a_kill_between_the_bytes_and_their_note(
    server: RangeServer, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(self: Mirror, path: str, span: tuple[int, int]) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "_note", killed)
        with pytest.raises(Killed):
            open_checkpoint(server.url)
    unmount_all()
    assert verify(small, server.url).same


def test_what_has_no_state_is_never_taken_from_an_earlier_run(server: RangeServer, small: Path) -> None:
    """Another config of the same size, on a server that tells neither an ETag nor a time."""
    server.fault("*", no_etag=True, methods=("HEAD", "GET"))
    assert inspect(server.url).ok
    config = (small / "config.json").read_text()
    changed = config.replace('"eos_token_id": 2', '"eos_token_id": 7')
    assert changed != config and len(changed) == len(config)
    (small / "config.json").write_text(changed)
    unmount_all()
    assert open_checkpoint(server.url).config["eos_token_id"] == 7


def test_an_object_that_is_also_a_directory(small: Path) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    try:
        for path in small.rglob("*"):
            if path.is_file():
                fs.pipe_file(f"/q/{path.relative_to(small)}", path.read_bytes())
        fs.store["/q/1_Pooling"] = fs.store["/q/config.json"]
        fs.store["/q/" + "x" * 300] = fs.store["/q/config.json"]
        assert verify(small, "memory://q").same
        assert any("1_Pooling" in note for note in FsspecStore("memory://q").notes)
    finally:
        fs.store.clear()


def test_nothing_stays_open(server: RangeServer, tmp_path: Path) -> None:
    def rounds(count: int) -> int:
        for n in range(count):
            convert(server.url, tmp_path / "out", "dcp", Mesh(dp_shard=2), overwrite=bool(n) or count > 1)
            unmount_all()
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = rounds(1)
    assert rounds(4) <= before + 2


OPEN = """
import sys
from areal_convert.converter import inspect
found = inspect(sys.argv[1])
sys.exit(0 if found.ok else 3)
"""


def _start(url: str, tmp_path: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, "AREAL_CACHE": str(tmp_path / "cache")}
    return subprocess.Popen([sys.executable, "-c", OPEN, url], env=env, stderr=subprocess.PIPE)


@pytest.mark.multiprocess
def test_processes_share_a_mirror_and_one_is_killed(server: RangeServer, small: Path, tmp_path: Path) -> None:
    victims: list[subprocess.Popen[bytes]] = []
    server.fault("model-00002*", call=lambda: victims[0].send_signal(signal.SIGKILL) if victims else None, times=1)
    victims.append(_start(server.url, tmp_path))
    others = [_start(server.url, tmp_path) for _ in range(3)]
    for other in others:
        assert other.wait(60) == 0, other.communicate()[1].decode()
    for process in (*victims, *others):
        process.communicate(timeout=60)
    assert victims[0].returncode in (0, -signal.SIGKILL)
    assert verify(small, server.url).same
    shutil.rmtree(tmp_path / "cache")
