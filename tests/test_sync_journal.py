"""The journal: what was written before a crash is there after it, and a torn line was never written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_convert.converter.errors import SyncError
from areal_convert.converter.sync import journal as module
from areal_convert.converter.sync.journal import Journal, Pending

A, B, C = "http://a:1", "http://b:2", "http://c:3"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "journal"


def reopened(path: Path) -> Journal:
    journal = Journal.open(path)
    journal.close()
    return journal


def test_a_hub_has_one_name_for_as_long_as_its_journal(path: Path) -> None:
    first = Journal.open(path)
    first.close()
    assert reopened(path).known.hub == first.known.hub != Journal.open(None).known.hub


def test_what_is_decided_and_not_confirmed_is_known_to_the_next(path: Path) -> None:
    journal = Journal.open(path)
    journal.begin("run", 4, 7, [A, B, C])
    journal.commit(4, 7, "ab", [A, B, C])
    journal.done(7, [B])
    journal.close()
    known = reopened(path).known
    assert known.pending == Pending(7, 4, "ab", [A, C])
    assert (known.version, known.epoch, known.root, known.begun) == (7, 4, "ab", None)
    journal = Journal.open(path)
    journal.done(7, [A, C])
    journal.close()
    assert reopened(path).known.pending is None


def test_what_was_begun_only_is_no_decision(path: Path) -> None:
    journal = Journal.open(path)
    journal.begin("run", 2, 1, [A])
    journal.close()
    assert (reopened(path).known.begun, reopened(path).known.pending) == (1, None)
    journal = Journal.open(path)
    journal.abort(1, "x" * 10_000)
    journal.close()
    assert reopened(path).known.begun is None and path.stat().st_size < 2000


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_torn_last_line_was_not_written(path: Path, cut: int) -> None:
    """The decision counts only when all of its line is on disk."""
    journal = Journal.open(path)
    journal.begin("run", 1, 1, [A])
    journal.commit(1, 1, "ab", [A])
    journal.close()
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    known = reopened(path).known
    assert known.pending is None and known.begun == 1
    journal = Journal.open(path)
    journal.commit(1, 1, "cd", [A])  # and the next line stands on a line of its own
    journal.close()
    assert reopened(path).known.root == "cd"
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["hub", "begin", "commit"]


@pytest.mark.parametrize(
    "line", [b"not json", b'{"event": "party"}', b'{"event": "commit"}', b"[]", b'{"event": "begin"}']
)
def test_a_line_that_is_damaged_is_told_and_nothing_is_guessed(path: Path, line: bytes) -> None:
    reopened(path)
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(SyncError, match="line 2 of the journal is damaged"):
        Journal.open(path)
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    reopened(path)  # the lock was given back


def test_one_hub_has_a_journal(path: Path) -> None:
    first = Journal.open(path)
    with pytest.raises(SyncError, match="another hub uses this journal"):
        Journal.open(path)
    first.close()
    reopened(path)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SyncError, match="cannot be written"):
        Journal.open(tmp_path / "file" / "journal")


def test_a_long_journal_is_written_anew_with_what_matters(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST", 20)
    journal = Journal.open(path)
    for version in range(1, 30):
        journal.begin("run", version, version, [A, B])
        journal.commit(version, version, f"{version:x}", [A, B])
        journal.done(version, [A] if version == 29 else [A, B])
    journal.retained(29, "/kept/v29")
    journal.close()
    before = path.stat().st_size
    first = reopened(path).known
    assert path.stat().st_size < before / 5 and first == reopened(path).known
    assert first.pending == Pending(29, 29, "1d", [B])
    assert (first.version, first.epoch, first.snapshot) == (29, 29, "/kept/v29")
    second = Journal.open(path)
    with pytest.raises(SyncError):
        Journal.open(path)  # the new file is locked as the old one was
    second.close()
