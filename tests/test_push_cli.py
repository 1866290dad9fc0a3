"""The commands `push` and `pull`: what they print, what they ask, and with which code they leave."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from areal_convert.converter.cli import cli
from areal_convert.converter.remote import fetch
from areal_convert.converter.remote.mounts import unmount_all
from areal_convert.converter.remote.upload import Repo
from hub_server import READ, HubServer

pytestmark = pytest.mark.filterwarnings(
    # How huggingface_hub hands a file to its HTTP client.
    "ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning",
)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(fetch, "FIRST_PAUSE", 0.01)
    with HubServer(tmp_path / "hub") as server:
        server.patch(monkeypatch)
        monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        yield server
    unmount_all()


@pytest.fixture
def source(model: Callable[..., Path]) -> Path:
    return model("llama", dtype="bfloat16", layers=2, max_shard_size=100_000, side_files=True)


def run(*args: Any, **how: Any) -> Result:
    """The command in this process. An exception that it did not turn into a message fails the test."""
    result = CliRunner().invoke(cli, [str(a) for a in args], **how)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_an_interrupt_says_what_is_known(hub: HubServer, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the commit was asked for, nobody knows whether it was made; the same push finds out."""
    commit, upload = Repo.commit, Repo.upload

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Repo, "upload", stopped)
    done = run("push", source, "org/m")
    assert done.exit_code == 130 and "Interrupted. Nothing was committed" in done.stderr
    monkeypatch.setattr(Repo, "upload", upload)
    monkeypatch.setattr(Repo, "commit", lambda *args: stopped(commit(*args)))
    done = run("push", source, "org/m")
    assert done.exit_code == 130 and "Whether the commit was made is not known" in done.stderr
    monkeypatch.setattr(Repo, "commit", commit)
    assert "Nothing had changed: " in run("push", source, "org/m").stdout


STALE = {"model-00009-of-00009.safetensors": b"\0" * 1234, "m.gguf": b"\0"}


def test_a_dry_run_shows_what_would_be(hub: HubServer, source: Path) -> None:
    hub.add_repo("org/m", STALE)
    done = run("push", source, "org/m", "--dry-run")
    assert done.exit_code == 0 and f"branch main (at {hub.head('org/m')[:8]})" in done.stdout
    assert "as its files are" in done.stdout and "send   model-00001-of-00004.safetensors (" in done.stdout
    assert "delete model-00009-of-00009.safetensors (1.23 kB)" in done.stdout and "stays  m.gguf" in done.stdout
    assert "README.md (written at the end)" in done.stdout and "Nothing was changed" in done.stdout
    report = json.loads(run("push", source, "org/m", "--dry-run", "--json").stdout)
    assert report["dry_run"] and report["deletes"] == {"model-00009-of-00009.safetensors": 1234}
    assert not [call for call in hub.calls() if call.method != "GET"]


def test_deletions_are_asked_for(hub: HubServer, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = hub.add_repo("org/m", STALE)
    done = run("push", source, "org/m")
    assert done.exit_code == 2 and "1 weight file of org/m would be deleted" in done.stderr and "--yes" in done.stderr
    monkeypatch.setattr(
        "areal_convert.converter.cli_hub.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    )
    done = run("push", source, "org/m", input="n\n")
    assert done.exit_code == 2 and "Go on?" in done.stderr and "Nothing was sent" in done.stderr
    assert hub.head("org/m") == base and not hub.calls("lfs-*")
    done = run("push", source, "org/m", input="y\n")
    assert done.exit_code == 0 and "model-00009-of-00009.safetensors" not in hub.files("org/m")


def test_a_push_prints_where_it_is(hub: HubServer, source: Path) -> None:
    hub.add_repo("org/m", STALE)
    done = run("push", source, "org/m", "--yes", "--message", "Better")
    assert done.exit_code == 0 and done.stdout.splitlines()[-1] == f"{hub.url}/org/m/commit/{hub.head('org/m')}"
    assert "verified" in done.stdout and "1 file deleted" in done.stdout
    assert hub.repo("org/m").commits[hub.head("org/m")].title == "Better"
    done = run("push", source, "org/m")
    assert done.stdout.splitlines()[-1].startswith("Nothing had changed: ")
    report = json.loads(run("push", source, "org/m", "--branch", "b", "--dtype", "float32", "--json").stdout)
    assert report["commit"] == hub.head("org/m", "b") and report["exactness"] == "widen" and report["changed"]
    done = run("push", source, "org/m", "--create-pr", "--dtype", "float32")
    assert done.stdout.splitlines()[-1] == f"{hub.url}/org/m/discussions/1"


def test_errors_leave_with_two(hub: HubServer, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_repo("org/m", source)
    assert run("push", source, "org/m", "--revision", "a", "--branch", "b").exit_code == 2
    hub.patch(monkeypatch, token=READ)
    done = run("push", source, "org/m")
    assert done.exit_code == 2 and "read-only" in done.stderr and "Traceback" not in done.stderr
    done = run("pull", "org/none")
    assert done.exit_code == 2 and "org/none" in done.stderr
    done = run("pull", "org/m", "--tp", 2)
    assert done.exit_code == 2 and "need --to FORMAT" in done.stderr


def test_a_pull_says_what_came(hub: HubServer, source: Path, tmp_path: Path) -> None:
    sha = hub.add_repo("org/m", {str(p.relative_to(source)): p for p in source.rglob("*") if p.is_file()} | STALE)
    done = run("pull", "org/m")
    assert done.exit_code == 0 and f"org/m at {sha[:12]} → {tmp_path / 'm'} (llama, hf)" in done.stdout
    assert "left out (--include-all fetches them): m.gguf, model-00009-of-00009.safetensors" in done.stdout
    sha = hub.commit("org/m", delete=("model-00009-of-00009.safetensors",))
    done = run("pull", "org/m", "--json", "-o", "n", "--include-all")
    assert json.loads(done.stdout)["revision"] == sha and (tmp_path / "n" / "m.gguf").is_file()
    assert run("pull", "org/m").exit_code == 2
    assert run("pull", "org/m", "--overwrite").exit_code == 0


def test_a_pull_that_converts(hub: HubServer, source: Path, tmp_path: Path) -> None:
    sha = hub.add_repo("org/m", source)
    done = run("pull", "org/m", "--to", "mp_rank", "--tp", 2, "-o", "out", "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 0 and report["revision"] == sha and report["target"]["mesh"] == "tp2"
    assert (tmp_path / "out" / "mp_rank_01").is_dir() or list((tmp_path / "out").rglob("mp_rank_01"))


@pytest.mark.parametrize(("command", "words"), [("push", "Nothing was committed"), ("pull", "with --resume")])
def test_ctrl_c_says_what_is_kept(
    hub: HubServer, source: Path, monkeypatch: pytest.MonkeyPatch, command: str, words: str
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    hub.add_repo("org/m", source)
    base = hub.head("org/m")
    monkeypatch.setattr("areal_convert.converter.remote.shards.sha256_of", interrupt)
    monkeypatch.setattr("areal_convert.converter.remote.pulling._digest_fits", interrupt)
    done = run(command, *([source] if command == "push" else []), "org/m")
    assert done.exit_code == 130 and words in done.stderr and hub.head("org/m") == base
