"""Reading from elsewhere without anywhere to read from: addresses, requests, boxes, retries, reading ahead."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import threading
import time
import zipfile
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_convert.converter import ConfigError
from areal_convert.converter.errors import RemoteChanged, TargetError, Unreachable
from areal_convert.converter.execute import Limits
from areal_convert.converter.formats.zip_read import Window, data_offset, directory, reckoned
from areal_convert.converter.rawio import Files, read_box
from areal_convert.converter.remote import checked, fetch, mounts
from areal_convert.converter.remote.ahead import ReadAhead
from areal_convert.converter.remote.boxes import read_plain, wanted
from areal_convert.converter.remote.fetch import Fetcher, Stopped
from areal_convert.converter.remote.mirror import Mirror
from areal_convert.converter.remote.store import Chunk, Dropped, Entry
from areal_convert.converter.remote.urls import HubUrl, is_remote, parse_hub, url_of
from areal_convert.converter.remote.windows import bridged, cut, requests, union, without
from areal_convert.converter.slots import Box, Buffer, Slot, row_major


@pytest.fixture(autouse=True)
def _nothing_stays_mounted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fetch, "FIRST_PAUSE", 0.001)
    yield
    mounts.unmount_all()


class FakeStore:
    """A store in memory. `failing`: how many bytes each of the next attempts gives before it drops."""

    url, key, name, revision, single = "fake://place", "fake/1", "place", None, None

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.asked: list[tuple[str, int, int]] = []
        self.failing: list[int] = []
        self.gate: threading.Event | None = None

    def entries(self) -> dict[str, Entry]:
        return {name: Entry(name, len(data), "1") for name, data in self.files.items()}

    def local(self, path: str) -> Path | None:
        return None

    def unchanged(self, path: str) -> bool:
        return True

    def stream(self, path: str, begin: int, end: int) -> Generator[Chunk, None, None]:
        self.asked.append((path, begin, end))
        if self.gate is not None:
            self.gate.wait(10)
        limit = self.failing.pop(0) if self.failing else None
        for at in range(begin, end, 100):
            piece = self.files[path][at : min(at + 100, end)]
            if limit is not None and at + len(piece) - begin > limit:
                raise Dropped("cut on demand")
            yield piece


# ------------------------------------------------------------------------------------------------ addresses


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("hf://org/name", HubUrl("org/name")),
        ("org/name", HubUrl("org/name")),
        (Path("hf://org/name/"), HubUrl("org/name")),
        ("hf://org/name@v1/sub/dir", HubUrl("org/name", "v1", "sub/dir")),
        ("hf://org/name@refs/pr/7", HubUrl("org/name", "refs/pr/7")),
        ("hf://org/name@a%2Fb/x", HubUrl("org/name", "a/b", "x")),
        ("hf://gpt2", HubUrl("gpt2")),
        ("hf://datasets/org/name/x", HubUrl("org/name", None, "x", "dataset")),
    ],
)
def test_addresses_on_the_hub(text: str | Path, meant: HubUrl) -> None:
    assert parse_hub(text) == meant
    assert parse_hub(str(meant)) == meant


@pytest.mark.parametrize(
    "text", ["hf://", "hf://org/na me", "hf://org/name@", "../x/y", "hf://org/name/../../x", "/a/b/c@d"]
)
def test_no_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="no repository"):
        parse_hub(text)


def test_two_revisions_contradict_each_other() -> None:
    assert parse_hub("org/name@v1", "v1").revision == "v1"
    with pytest.raises(ConfigError, match="'v1', --revision says 'v2'"):
        parse_hub("org/name@v1", "v2")


def test_what_is_elsewhere() -> None:
    for text in ("s3://b/x", "gs://b", "https://h/x", Path("hf://a/b"), "memory://x"):
        assert is_remote(text) and is_remote(url_of(text))
    for text in ("org/name", "/abs/path", "C:/x", "file:///x", "a:b", "x/hf://y", ""):
        assert not is_remote(text)
    assert url_of(Path("S3://bucket/dir/")) == "s3://bucket/dir"


# ------------------------------------------------------------------------------------------------ requests

SPANS = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 200)).map(lambda x: (x[0], x[0] + x[1])), max_size=40)


def covered(spans: list[tuple[int, int]]) -> set[int]:
    return {byte for begin, end in spans for byte in range(begin, end)}


@given(SPANS, st.floats(0, 0.5), st.one_of(st.none(), st.integers(0, 300)), st.integers(1, 400))
def test_requests_cover_what_is_wanted_and_little_else(
    spans: list[tuple[int, int]], waste: float, max_gap: int | None, limit: int
) -> None:
    made = requests(spans, waste=waste, max_gap=max_gap, limit=limit)
    needed, got = covered(spans), covered(made)
    assert needed <= got and sum(end - begin for begin, end in made) == len(got)
    assert all(0 < end - begin <= limit for begin, end in made) and made == sorted(made)
    if max_gap is None:
        assert len(got) <= len(needed) * (1 + waste)


@given(SPANS, SPANS)
def test_what_is_missing(spans: list[tuple[int, int]], have: list[tuple[int, int]]) -> None:
    assert covered(without(spans, have)) == covered(spans) - covered(have)


def test_gaps_are_bridged_smallest_first() -> None:
    spans = union([(0, 1000), (1010, 2000), (2050, 3000), (3001, 4000)])
    assert bridged(spans, waste=0.004) == [(0, 2000), (2050, 4000)]
    assert bridged(spans, waste=0) == spans
    assert bridged(spans, max_gap=50) == [(0, 4000)]
    assert cut([(0, 10)], 3) == [(0, 3), (3, 6), (6, 9), (9, 10)]


# ------------------------------------------------------------------------------------------------ boxes


@given(st.data())
def test_boxes_from_exactly_the_bytes_that_they_want(data: st.DataObject) -> None:
    """Any box of an array with its axes in any order in the file: from a file in which nothing else is right."""
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    order = data.draw(st.permutations(range(len(shape))))
    stored = row_major(tuple(shape[a] for a in order), 2)
    strides = tuple(stored[order.index(a)] for a in range(len(shape)))
    lo = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = Box(lo, tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(lo, shape, strict=True)))
    count = int(np.prod(shape))
    memory = np.arange(count, dtype=np.uint16)
    values = np.ndarray(shape, np.uint16, memory, 0, strides)
    slot = Slot(Box((0,) * len(shape), shape), Buffer("file", 64, count * 2, "t"), 0, strides, "BF16")
    raw, clean = bytearray(64 + count * 2), b"\0" * 64 + memory.tobytes()
    for _, begin, end in wanted(slot, box):
        raw[begin:end] = clean[begin:end]

    def read(file: str, begin: int, out: memoryview) -> None:
        out[:] = raw[begin : begin + len(out)]

    out = np.zeros(box.sizes, np.uint16)
    read_plain(read, slot, box, out)
    assert np.array_equal(out, values[tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))])


def test_rows_of_a_kilobyte_are_fetched_without_what_lies_between() -> None:
    slot = Slot(Box((0, 0), (8, 512)), Buffer("file", 0, 8 * 8192, "t"), 0, (8192, 2), "BF16")
    assert [end - begin for _, begin, end in wanted(slot, slot.box)] == [1024] * 8
    fine = Slot(Box((0, 0), (8, 100)), Buffer("file", 0, 8 * 8192, "t"), 0, (8192, 2), "BF16")
    assert [end - begin for _, begin, end in wanted(fine, fine.box)] == [7 * 8192 + 200]


# ------------------------------------------------------------------------------------------------ retries


def test_a_dropped_connection_goes_on_at_the_byte_reached() -> None:
    data = random.Random(1).randbytes(1050)
    store = FakeStore({"f": data})
    store.failing = [500, 0, 300]
    fetcher = Fetcher(store)
    assert fetcher.read("f", 0, 1050) == data
    assert store.asked == [("f", 0, 1050), ("f", 500, 1050), ("f", 500, 1050), ("f", 800, 1050)]
    assert fetcher.traffic.report() == {"bytes": 1050, "requests": 4, "retries": 3, "checked_files": 0}


def test_it_gives_up_without_progress_only() -> None:
    store = FakeStore({"f": bytes(3000)})
    store.failing = [100] * 25
    assert len(Fetcher(store).read("f", 0, 3000)) == 3000
    store.failing = [0] * 50
    with pytest.raises(Unreachable, match=r"cut on demand \(at byte 7, after 6 attempts\)") as caught:
        Fetcher(store).read("f", 7, 3000)
    assert "--resume" in str(caught.value) and len(store.failing) == 44


def test_more_bytes_than_were_asked_for_are_refused() -> None:
    store = FakeStore({"f": bytes(100)})
    store.stream = lambda path, begin, end: (piece for piece in [bytes(200)])
    with pytest.raises(RemoteChanged, match="more bytes"):
        Fetcher(store).read("f", 0, 100)


# ------------------------------------------------------------------------------------------------ the mirror


def test_a_mirror_fetches_what_is_asked_for_once(tmp_path: Path) -> None:
    data = random.Random(2).randbytes(500_000)
    store = FakeStore({"a/w.bin": data, "small": b"{}"})
    mirror = Mirror(store, tmp_path)
    place = mirror.root / "a/w.bin"
    assert place.stat().st_size == 500_000 and place.stat().st_blocks * 512 < 100_000
    mirror.ensure({"a/w.bin": [(0, 10), (20, 30), (400_000, 400_010)], "small": [(0, 2)]})
    assert sorted(store.asked) == [("a/w.bin", 0, 30), ("a/w.bin", 400_000, 400_010), ("small", 0, 2)]
    assert place.read_bytes()[400_000:400_010] == data[400_000:400_010] and (mirror.root / "small").read_text() == "{}"
    mirror.ensure({"a/w.bin": [(5, 25), (400_005, 400_010)]})
    again = Mirror(FakeStore(store.files), tmp_path)
    again.ensure({"a/w.bin": [(0, 30)], "small": [(0, 2)]})
    assert len(store.asked) == 3 and not again.fetcher.traffic.requests


def test_a_note_that_a_kill_cut_short_claims_nothing(tmp_path: Path) -> None:
    store = FakeStore({"w": bytes(range(256)) * 10})
    Mirror(store, tmp_path).ensure({"w": [(0, 100)]})
    notes = next(tmp_path.rglob("have/w"))
    for torn in ("\n100 25", "\n1", "\n100 9999999\n", "\n300 x\n", "\n 300 400\n"):
        notes.write_text(f"\n0 100\n{torn}")
        mirror = Mirror(FakeStore(store.files), tmp_path)
        mirror.ensure({"w": [(100, 2560)]})
        assert (mirror.root / "w").read_bytes() == store.files["w"]
        assert Mirror(store, tmp_path)._known("w") == [(0, 2560)]


# ------------------------------------------------------------------------------------------------ what torch saved


def test_where_records_begin_is_reckoned_from_the_directory_as_torch_writes_it(tmp_path: Path) -> None:
    tree = {str(n): torch.arange(n * 37 + 1, dtype=torch.int16) for n in range(30)} | {"empty": torch.zeros(0)}
    torch.save(tree, tmp_path / "a.pt")
    with open(tmp_path / "a.pt", "rb") as file:
        window = Window(file.fileno(), 0, (tmp_path / "a.pt").stat().st_size, "a.pt")
        records = directory(window)
        said = {record.header: data_offset(window, record) for record in records}
    end = zipfile.ZipFile(tmp_path / "a.pt").start_dir
    assert reckoned(records, end) == said and len(said) > 31
    moved = [record._replace(header=record.header - 1) for record in records[:1]] + records[1:]
    assert len(reckoned(moved[1:], end + 4)) == len(said) - 2, "what does not say so twice is not believed"


# ------------------------------------------------------------------------------------------------ the mirror


def test_a_full_disk_is_said_to_be_the_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be written is not taken for written."""
    mirror = Mirror(FakeStore({"w": b"weights"}), tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for call in ("pwrite", "write"):
        with monkeypatch.context() as patch:
            patch.setattr(f"areal_convert.converter.remote.mirror.os.{call}", full)
            with pytest.raises(TargetError, match=r"No space left on device(.|\n)*AREAL_CACHE names another"):
                mirror.ensure({"w": [(0, 7)]})
        assert mirror.amount("w") == 0
    mirror.ensure({"w": [(0, 7)]})
    assert mirror.present("w", 0, 7) == b"weights"


def test_mirrors_that_nobody_opened_for_a_month_go(tmp_path: Path) -> None:
    def opened(key: str, days: float) -> Path:
        store = FakeStore({"have/w": b"weights", "used": b"a file of the model"})
        store.key = key
        mirror = Mirror(store, tmp_path)
        mirror.ensure({"used": [(0, 5)]})
        base = tmp_path / key
        then = time.time() - days * 86400
        os.utime(base / "used", (then, then))
        return base

    old, below, young = opened("hub/a/1", 31), opened("hub/a/1/sub", 29), opened("hub/b/1", 29)
    lone, other = opened("hub/c/1", 31), tmp_path / "push" / "journal"
    other.parent.mkdir()
    other.touch()
    os.utime(other, (0, 0))
    Mirror(FakeStore({}), tmp_path)
    assert [p.name for p in old.iterdir()] == ["sub"] and below.is_dir() and young.is_dir() and other.is_file()
    assert not lone.parent.exists()
    opened("hub/b/1", 40)
    opened("hub/b/1", 0)
    Mirror(FakeStore({}), tmp_path / "elsewhere")
    assert young.is_dir(), "to open one is to use it"


def test_a_stop_reaches_reads_that_nobody_expected(tmp_path: Path) -> None:
    _, mirror = mounted_store(tmp_path, {"w": bytes(1000)})
    files, stop = Files(), threading.Event()
    files.expect([], Limits(), stop)
    files.read(str(mirror.directory / "w"), 0, memoryview(bytearray(1000)))
    stop.set()
    with pytest.raises(Stopped):
        files.read(str(mirror.directory / "w"), 0, memoryview(bytearray(1000)))
    (slot, box), out = rows(mirror, "w", 1, 1000)[0], np.zeros(1000, np.uint8)
    with pytest.raises(Stopped):
        read_box(files, slot, box, out)
    files.close()


# ------------------------------------------------------------------------------------------------ reading ahead


def mounted_store(tmp_path: Path, files: dict[str, bytes]) -> tuple[FakeStore, Mirror]:
    store = FakeStore(files)
    mirror = Mirror(store, tmp_path / "cache")
    mounts._table[str(mirror.directory)] = mirror
    return store, mirror


def rows(mirror: Mirror, name: str, count: int, size: int) -> list[tuple[Slot, Box]]:
    """One slot a row of a file."""
    file = str(mirror.directory / name)
    box = Box((0,), (size,))
    return [(Slot(box, Buffer(file, n * size, size, name), 0, (1,), "U8"), box) for n in range(count)]


def test_reading_ahead_stays_within_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_convert.converter.remote.ahead.WINDOW", 4000)
    data = random.Random(3).randbytes(200_000)
    _, mirror = mounted_store(tmp_path, {"w": data})
    reads = rows(mirror, "w", 200, 1000)
    ahead = ReadAhead(reads, budget=20_000, connections=3, max_gap=None, stop=threading.Event())
    peak = 0

    def one(n: int) -> None:
        nonlocal peak
        slot, box = reads[n]
        expected = ahead.take(slot, box)
        assert expected is not None
        out = bytearray(1000)
        assert expected.read(slot.buffer.file, slot.buffer.begin, memoryview(out))
        assert out == data[n * 1000 : (n + 1) * 1000]
        peak = max(peak, ahead._held)
        ahead.done(expected)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(200)))
    assert ahead._held == 0 and mirror.fetcher.traffic.bytes == 200_000
    assert 5_000 < peak <= 20_000 + 2 * 8_000
    assert ahead.take(*reads[0]) is None, "what was read is expected no more"
    ahead.close()
    assert not any(thread.is_alive() for thread in ahead._threads)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_file_that_passes_whole_is_held_against_its_sha256(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """Its header is on this machine already; its windows come nearly in order."""
    monkeypatch.setattr("areal_convert.converter.remote.ahead.WINDOW", 1000)
    data = random.Random(5).randbytes(20_000)
    store, mirror = mounted_store(tmp_path, {"w": data})
    mirror._entries["w"] = replace(mirror.entry("w"), sha256=hashlib.sha256(data).hexdigest())
    mirror.ensure({"w": [(0, 700)]})
    if damaged:
        store.files["w"] = data[:15_000] + bytes([data[15_000] ^ 1]) + data[15_001:]
    reads = [pair for pair in rows(mirror, "w", 40, 500) if pair[0].buffer.begin >= 500]
    dice = random.Random(6)
    reads.sort(key=lambda pair: pair[0].buffer.begin + dice.randrange(3000))
    ahead = ReadAhead(reads, budget=60_000, connections=3, max_gap=None, stop=threading.Event())

    def everything() -> None:
        for slot, box in reads:
            expected = ahead.take(slot, box)
            assert expected is not None
            ahead.done(expected)

    if damaged:
        with pytest.raises(RemoteChanged, match="w: what came is not what its sha256 says"):
            everything()
        assert mirror.amount("w") == 0
    else:
        everything()
        assert mirror.fetcher.traffic.checked == 1
    ahead.close()


def test_parts_of_a_file_are_not_checked_and_not_kept(tmp_path: Path) -> None:
    _, mirror = mounted_store(tmp_path, {"w": bytes(20_000)})
    mirror._entries["w"] = replace(mirror.entry("w"), sha256="no such content")
    checker: checked.Checker[int] = checked.Checker(2000)
    checker.expect(mirror, "w")
    seen = [checker.saw(mirror, "w", n * 1000, memoryview(bytes(1000)), n) for n in range(1, 5)]
    assert seen == [[], [], [1, 2, 3], [4]]


def test_readers_may_come_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may want the last first, though the memory is full of what comes before."""
    monkeypatch.setattr("areal_convert.converter.remote.ahead.WINDOW", 1000)
    data = random.Random(4).randbytes(50_000)
    _, mirror = mounted_store(tmp_path, {"w": data})
    reads = rows(mirror, "w", 50, 1000)
    ahead = ReadAhead(reads, budget=3_000, connections=2, max_gap=None, stop=threading.Event())
    for n in reversed(range(50)):
        slot, box = reads[n]
        expected = ahead.take(slot, box)
        out = bytearray(1000)
        assert expected is not None and expected.read(slot.buffer.file, n * 1000, memoryview(out))
        assert out == data[n * 1000 : (n + 1) * 1000]
        ahead.done(expected)
    ahead.close()


def test_a_stop_and_a_failure_wake_everybody(tmp_path: Path) -> None:
    store, mirror = mounted_store(tmp_path, {"w": bytes(3000)})
    store.gate, stop = threading.Event(), threading.Event()
    reads = rows(mirror, "w", 3, 1000)
    ahead = ReadAhead(reads, budget=10_000, connections=1, max_gap=None, stop=stop)
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(Stopped):
        ahead.take(*reads[0])
    store.gate.set()
    ahead.close()
    store.failing = [0] * 50
    ahead = ReadAhead(reads, budget=10_000, connections=1, max_gap=None, stop=threading.Event())
    with pytest.raises(Unreachable, match="cut on demand"):
        ahead.take(*reads[1])
    ahead.close()
