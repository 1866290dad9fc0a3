"""What goes wrong during a `push`: nothing is committed, the old revision is served, the same again sends the rest."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_convert.converter import Mesh, convert
from areal_convert.converter.errors import TargetError, VerifyError
from areal_convert.converter.execute import Limits
from areal_convert.converter.hub import Pushed, push
from areal_convert.converter.remote import fetch
from areal_convert.converter.sidefiles import INDEX
from areal_convert.converter.target import Options
from hub_server import STRANGER, HubServer

pytestmark = pytest.mark.filterwarnings(
    # How huggingface_hub hands a file to its HTTP client.
    "ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning",
)

KIND: dict[str, Any] = {"dtype": "bfloat16", "layers": 2}
OPTIONS = Options(max_shard=60_000)
TWO = Limits(workers=2, memory=16 << 20)
OLD = {"model.safetensors": b"\0 the old weights", "config.json": "{}", "notes.txt": "n"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(fetch, "FIRST_PAUSE", 0.01)
    # huggingface_hub's own pauses between attempts: 1, 2, 4, 8, 8 seconds.
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda _: None, time=time.time))
    with HubServer(tmp_path / "hub") as server:
        server.patch(monkeypatch)
        monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
        server.add_repo("org/m", OLD)
        yield server
    assert not server.leaks, "a token reached the CDN"
    assert not list((tmp_path / "cache").rglob("*.safetensors")), "files were left in the scratch directory"


@pytest.fixture
def source(tmp_path: Path, model: Callable[..., Path]) -> Path:
    """Five shards' worth, in another format."""
    out = tmp_path / "mp"
    convert(model("llama", **KIND), out, "mp_rank", Mesh(tp=2), limits=TWO)
    return out


def again(hub: HubServer, source: Path, **how: Any) -> Pushed:
    return push(source, "org/m", options=OPTIONS, limits=TWO, **how)


def served(hub: HubServer) -> bool:
    """Whether a reader gets the old model, all of it and nothing else."""
    there = {path: hub.read("org/m", path) for path in hub.files("org/m") if path != ".gitattributes"}
    return there == {path: text.encode() if isinstance(text, str) else text for path, text in OLD.items()}


def uploads(hub: HubServer) -> list[int]:
    """Bytes of every upload that was taken."""
    return [call.received for call in hub.calls("lfs-upload") if call.status == 200]


def check_whole(hub: HubServer, tmp_path: Path, source: Path) -> None:
    """The repository holds what a conversion to a directory gives, and the old weights are gone."""
    convert(source, tmp_path / "expected", "hf", options=OPTIONS, limits=TWO)
    wanted = {p.name: p.read_bytes() for p in (tmp_path / "expected").iterdir() if p.name.endswith(("tensors", INDEX))}
    assert len(wanted) > 5
    assert {n: hub.read("org/m", n) for n in hub.files("org/m") if n.endswith(("tensors", INDEX))} == wanted
    assert hub.read("org/m", "notes.txt") == b"n"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"status": 403, "message": "denied"}, r"uploading model-00003.*refused: .*\n.*Nothing was committed"),
        ({"status": 500}, r"the Hub is in trouble \(500\)"),
        ({"status": 429, "retry_after": 1}, r"too many requests \(429\), wait 1 s"),
        ({"drop_after": 1000, "reset": True}, "the connection broke off"),
    ],
    ids=["refused", "500", "429", "reset"],
)
def test_a_third_upload_that_fails_and_the_push_again(
    hub: HubServer, source: Path, tmp_path: Path, fault: dict[str, Any], words: str
) -> None:
    hub.fault("lfs-upload", after=2, **fault)
    states: list[bool] = []
    hub.fault("lfs-upload", call=lambda _: states.append(served(hub)))
    with pytest.raises(TargetError, match=words):
        again(hub, source)
    assert len(states) >= 3 and all(states) and served(hub) and not hub.calls("commit")
    hub.clear_faults()
    hub.reset()
    done = again(hub, source)
    report = done.report()
    assert len(report["arrived_before"]) == 2 and len(uploads(hub)) == len(report["made"])
    assert not set(report["made"]) & set(report["arrived_before"])
    check_whole(hub, tmp_path, source)


def test_a_cut_that_passes_is_not_even_noticed(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.fault("lfs-upload", times=1, drop_after=1000, reset=True)
    hub.fault("info", times=2, status=502)
    hub.fault("auth-check", times=1, drop_after=0)
    hub.fault("tree", times=1, status=503)
    again(hub, source)
    check_whole(hub, tmp_path, source)


def test_a_hub_that_does_not_answer(hub: HubServer, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.fault("whoami", drop_after=0)
    with pytest.raises(
        TargetError, match=r"asking who we are failed: the connection broke off \(http.*\n.*HF_ENDPOINT"
    ):
        again(hub, source)
    hub.clear_faults()
    hub.fault("refs", status=429, retry_after=0)
    with pytest.raises(TargetError, match=r"listing its branches failed: too many requests \(429\)"):
        again(hub, source)


def test_a_full_account(hub: HubServer, source: Path) -> None:
    hub.quota = 150_000
    with pytest.raises(TargetError, match=r"storage is full.*\n.*Free or buy room"):
        again(hub, source)
    assert served(hub)


def test_what_was_uploaded_but_is_gone_is_sent_again(hub: HubServer, source: Path, tmp_path: Path) -> None:
    """The Hub may clear away what no commit names."""
    hub.fault("lfs-upload", after=3, status=403)
    with pytest.raises(TargetError):
        again(hub, source)
    hub.clear_faults()
    arrived = [sha for sha in hub.repo("org/m").lfs if hub.repo("org/m").lfs[sha] > 1000]
    del hub.repo("org/m").lfs[arrived[0]]
    assert len(again(hub, source).report()["arrived_before"]) == 2
    check_whole(hub, tmp_path, source)


def test_another_source_does_not_take_what_arrived(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.fault("lfs-upload", after=3, status=403)
    with pytest.raises(TargetError):
        again(hub, source)
    hub.clear_faults()
    for file in source.rglob("*.pt"):
        file.touch()  # for all we know these are other weights
    assert again(hub, source).report()["arrived_before"] == []
    check_whole(hub, tmp_path, source)


def test_a_branch_that_moves_meanwhile(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.fault("commit", times=1, call=lambda _: hub.commit("org/m", {"config.json": '{"theirs": 1}'}))
    with pytest.raises(TargetError, match=r"somebody committed to the branch meanwhile.*\n.*Run the same push again"):
        again(hub, source)
    assert hub.read("org/m", "config.json") == b'{"theirs": 1}' and "model.safetensors" in hub.files("org/m")
    hub.reset()
    done = again(hub, source)
    assert done.report()["made"] == [] and not uploads(hub) and done.changed
    check_whole(hub, tmp_path, source)


@pytest.mark.parametrize("fault", [{"lose_reply": True}, {"status": 504}, {"drop_after": 0}], ids=str)
def test_a_commit_whose_answer_is_lost_happens_once(hub: HubServer, source: Path, fault: dict[str, Any]) -> None:
    hub.fault("commit", times=1, **fault)
    done = again(hub, source)
    assert done.changed and done.commit == hub.head("org/m") and len(hub.repo("org/m").commits) == 3


def test_a_pull_request_whose_answer_is_lost_is_found(
    hub: HubServer, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.patch(monkeypatch, token=STRANGER)
    hub.fault("commit", times=1, lose_reply=True)
    done = again(hub, source, create_pr=True)
    assert list(hub.repo("org/m").pulls) == [1] and done.commit == hub.head("org/m", "refs/pr/1") and served(hub)
    assert done.report()["pr_url"] == f"{hub.url}/org/m/discussions/1"


def test_a_commit_that_is_refused_for_good(hub: HubServer, source: Path) -> None:
    hub.fault("commit", status=500, message="down")
    with pytest.raises(TargetError, match=r"the commit failed: the Hub is in trouble \(500\): .*down"):
        again(hub, source)
    assert served(hub)


def test_a_commit_that_is_not_what_was_meant(hub: HubServer, source: Path) -> None:
    def spoil(_: object) -> None:
        if len(hub.repo("org/m").commits) > 2:
            hub.tamper("org/m", next(n for n in hub.files("org/m") if "model-00002" in n), b"\0 others")
            hub.tamper("org/m", "notes.txt", b"others")

    hub.fault("tree", call=spoil)
    with pytest.raises(
        VerifyError, match=r"(?s)is not what was meant:.*model-00002.*has 8 bytes.*notes\.txt.*not part"
    ):
        again(hub, source)


def test_a_commit_that_cannot_be_looked_at(hub: HubServer, source: Path) -> None:
    hub.fault("tree", after=1, status=503)
    with pytest.raises(TargetError, match=r"The commit was made \(http.*could not be verified"):
        again(hub, source)
    hub.clear_faults()
    assert not again(hub, source).changed and not served(hub)


def test_at_most_two_files_lie_on_the_disk(hub: HubServer, source: Path, tmp_path: Path) -> None:
    seen: list[int] = []

    def look(_: object) -> None:
        time.sleep(0.05)  # long enough for the next one to be made
        seen.append(len(list((tmp_path / "cache").rglob("*.safetensors"))))

    hub.fault("lfs-upload", call=look)
    again(hub, source)
    assert len(seen) > 4 and max(seen) == 2


def test_the_very_same_push_twice_at_a_time(hub: HubServer, source: Path) -> None:
    found: list[str] = []

    def second(_: object) -> None:
        with pytest.raises(TargetError) as caught:
            again(hub, source)
        found.append(str(caught.value))

    hub.fault("lfs-verify", times=1, call=second)
    again(hub, source)
    assert "is running already" in found[0]


# Kills


SCRIPT = """
import sys
from areal_convert.converter.cli import main
sys.argv = ["areal-convert", *sys.argv[1:]]
main()
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("kind", "after", "how"),
    [
        ("lfs-upload", 0, {"drop_after": 0}),
        ("lfs-upload", 2, {"drop_after": 0}),
        ("lfs-verify", 3, {"drop_after": 0}),
        ("commit", 0, {"status": 503}),
        ("tree", 1, {"status": 503}),  # of the new commit, which is made
    ],
    ids=str,
)
def test_killed_and_pushed_again(
    hub: HubServer, source: Path, tmp_path: Path, kind: str, after: int, how: dict[str, Any]
) -> None:
    """Wherever it is killed: the old revision or the new one is served, and what has arrived is not sent again."""
    env = hub.env(AREAL_CACHE=str(tmp_path / "cache"), OMP_NUM_THREADS="1", HF_HOME=str(tmp_path / "home"))
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        "push",
        str(source),
        "org/m",
        "--max-shard-size",
        "60000",
        "--yes",
        "--json",
    ]
    running: list[subprocess.Popen[bytes]] = []

    def kill(_: object) -> None:
        running[0].kill()
        running[0].wait()

    hub.fault(kind, after=after, times=1, call=kill, **how)
    running.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    _, err = running[0].communicate(timeout=60)
    assert running[0].returncode == -9, err.decode()
    assert served(hub) == (kind != "tree")
    before = len(uploads(hub))
    hub.clear_faults()
    hub.reset()
    report = again(hub, source).report()
    total = len(report["made"]) + len(report["arrived_before"])
    assert len(uploads(hub)) == total - before
    assert len(report["arrived_before"]) == (after if kind.startswith("lfs") else total)
    assert report["changed"] == (kind != "tree")
    check_whole(hub, tmp_path, source)


def test_somebody_makes_the_repository_meanwhile(hub: HubServer, source: Path) -> None:
    hub.fault("create-repo", times=1, call=lambda _: hub.add_repo("org/new", OLD))
    with pytest.raises(TargetError, match=r"somebody made it meanwhile(.|\n)*The same push again"):
        push(source, "org/new", options=OPTIONS, limits=TWO)
    assert set(hub.files("org/new")) >= set(OLD), "nothing of it was touched"
    assert push(source, "org/new", options=OPTIONS, limits=TWO).changed
