"""The command `sync`: what it prints, its exit codes, and `--watch`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import models
import sync_threads
from areal_convert.converter import cli_sync
from areal_convert.converter.cli import cli
from areal_convert.converter.cli_sync import MODES, TRANSPORTS, Watcher
from areal_convert.converter.sync.transport import KINDS
from areal_convert.converter.sync.watching import Watch
from sync_jobs import other_weights
from sync_threads import ThreadServer

pytestmark = pytest.mark.timeout(60)


def sync(*arguments: str | Path, **env: str) -> Result:
    done = CliRunner().invoke(cli, ["sync", *map(str, arguments)], env=env)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.fixture(scope="module")
def model() -> Path:
    return models.cached_model("qwen3", layers=2)


@pytest.fixture
def servers(model: Path) -> Iterator[list[ThreadServer]]:
    with sync_threads.serving(model, 2) as started:
        yield started


def holds(server: ThreadServer, path: Path) -> bool:
    wanted = sync_threads.state_of(path, zero=False)
    return all(torch.equal(server.weights[name], value) for name, value in wanted.items())


def test_choices_are_those_of_the_library() -> None:
    assert set(TRANSPORTS) == {"auto", *KINDS}
    assert set(MODES) == {"auto", "full", "delta"}


def test_a_push_and_what_it_prints(model: Path, servers: list[ThreadServer]) -> None:
    done = sync(model, "--server", servers[0].url, "--server", servers[1].url, "--version", "7")
    assert done.exit_code == 0, done.output
    assert all(holds(s, model) and s.receiver.version == 7 for s in servers)
    for text in ("version 7: ", " to 2 servers", "GB/s", "send ", "commit ", "root ", "pause "):
        assert text in done.stdout
    assert all(f"{s.url}  committed  swap  pause" in done.stdout for s in servers)


def test_json(model: Path, servers: list[ThreadServer]) -> None:
    done = sync(model, "--server", servers[0].url, "--transport", "gloo", "--json")
    report = json.loads(done.stdout)
    assert (report["version"], report["transport"], report["mode"]) == (1, "gloo", "full")
    assert report["servers"][servers[0].url]["kind"] == "committed" and report["seconds"]["total"] > 0


def test_the_token_comes_from_the_environment_or_the_option(model: Path) -> None:
    with sync_threads.serving(model, token="secret") as (server,):
        refused = sync(model, "--server", server.url)
        assert refused.exit_code == 2 and "token" in refused.stderr and server.receiver.version == 0
        assert sync(model, "--server", server.url, AREAL_SERVE_TOKEN="secret").exit_code == 0
        assert sync(model, "--server", server.url, "--token", "secret").exit_code == 0
        assert sync(model, "--server", server.url, "--token-env", "MINE", MINE="secret").exit_code == 0
        unset = sync(model, "--server", server.url, "--token-env", "MINE")
        assert unset.exit_code == 2 and "MINE is not set" in unset.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{model}"], "--server"),
        (["{model}/nothing", "--server", "{url}"], "nothing"),
        (["{other}", "--server", "{url}"], "hidden_size|is .* on the servers"),
        (["{model}", "--server", "http://127.0.0.1:9"], "cannot be reached"),
        (["{model}", "--server", "{url}", "--version", "0"], "--version"),
        (["{model}", "--server", "{url}", "--transport", "disk"], "no directory was given"),
        (["{model}", "--server", "{url}", "--bucket", "many"], "many"),
        (["{model}", "--server", "{url}", "--watch", "--adapter", "x"], "--adapter"),
        (["{model}/nothing", "--server", "{url}", "--watch"], "no such directory"),
        (["{model}", "--server", "{url}", "--adapter", "x"], "is no adapter"),
    ],
)
def test_what_is_refused(model: Path, servers: list[ThreadServer], arguments: list[str], says: str) -> None:
    import re

    names = {"model": model, "url": servers[0].url, "other": models.cached_model("llama", layers=2)}
    done = sync(*[a.format(**names) for a in arguments])
    assert done.exit_code == 2 and re.search(says, done.stderr), done.stderr
    assert "Traceback" not in done.output and servers[0].receiver.version == 0


def test_an_old_version_is_refused(model: Path, servers: list[ThreadServer]) -> None:
    assert sync(model, "--server", servers[0].url, "--version", "3").exit_code == 0
    again = sync(model, "--server", servers[0].url, "--version", "3")
    assert again.exit_code == 2 and "version 3" in again.stderr.lower()
    assert sync(model, "--server", servers[0].url).exit_code == 0
    assert servers[0].receiver.version == 4


def test_one_server_gone(model: Path, servers: list[ThreadServer]) -> None:
    servers[1].stop()
    urls = ["--server", servers[0].url, "--server", servers[1].url]
    assert sync(model, *urls).exit_code == 2 and servers[0].receiver.version == 0
    done = sync(model, *urls, "--on-failure", "drop")
    assert servers[0].receiver.version == 1 and done.exit_code in (0, 1), done.output


# ------------------------------------------------------------------------------------------------ watching


class Watching:
    """`sync --watch` in a thread, as the command runs it; `reports` of what it pushed."""

    def __init__(self, root: Path, urls: list[str], **values: Any) -> None:
        from areal_convert.converter.cli_options import OPENING

        assert OPENING is not None
        self.reports: list[Any] = []
        self.stop = threading.Event()
        names: dict[str, Any] = {
            "servers": tuple(urls), "token": None, "token_env": None, "transport": "auto", "mode": "auto", "anchor": 0,
            "bucket": 1 << 20, "directory": None, "on_failure": "abort", "timeout": 5.0, "interval": 0.05,
            "version": None, "hf_config": None, "family": None, "also": (), "drop": (), "tie": None,
            "journal": None, "in_flight": "finish", "server_path": None, "fp8": None, "drained": False,
        }  # fmt: skip
        watcher = Watcher(Watch(root, 0.2), {**names, **values}, self.reports.append)
        self.thread = threading.Thread(target=watcher.run, args=(self.stop,), daemon=True)

    def __enter__(self) -> Watching:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join(20)
        assert not self.thread.is_alive()

    def wait_for(self, count: int) -> None:
        end = time.monotonic() + 20
        while len(self.reports) < count:
            assert self.thread.is_alive() and time.monotonic() < end, f"{len(self.reports)} of {count} pushes"
            time.sleep(0.02)


def test_new_checkpoints_are_pushed_as_they_are_completed(
    model: Path, servers: list[ThreadServer], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    root.mkdir()
    with Watching(root, [servers[0].url]) as watching:
        other_weights(model, tmp_path / "made", 1).rename(root / "checkpoint-5")
        watching.wait_for(1)
        assert servers[0].receiver.version == 5 and holds(servers[0], root / "checkpoint-5")
        (root / "checkpoint-9").mkdir()
        (root / "checkpoint-9/config.json").write_bytes((model / "config.json").read_bytes())
        (root / "checkpoint-9/model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-9])
        other_weights(model, tmp_path / "made", 2).rename(root / "checkpoint-7.partial")
        time.sleep(0.6)
        assert len(watching.reports) == 1, "one is cut short, the other not under its name yet"
        (root / "checkpoint-7.partial").rename(root / "checkpoint-7")
        watching.wait_for(2)
    assert [r.version for r in watching.reports] == [5, 7] and holds(servers[0], root / "checkpoint-7")


def test_a_server_that_was_restarted_gets_the_last_one_again(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    other_weights(model, root / "checkpoint-3", 1)
    server = sync_threads.start(model)
    port = int(server.url.rsplit(":", 1)[1])
    with Watching(root, [server.url]) as watching:
        watching.wait_for(1)
        server.stop()
        time.sleep(0.3)
        again = sync_threads.start(model, port=port)
        try:
            end = time.monotonic() + 20
            while again.receiver.version != 3:
                assert time.monotonic() < end and watching.thread.is_alive()
                time.sleep(0.02)
            assert holds(again, root / "checkpoint-3")
            other_weights(model, tmp_path / "made", 2).rename(root / "checkpoint-4")
            watching.wait_for(2)
            assert again.receiver.version == 4
        finally:
            again.stop()


def test_steps_that_go_back_get_the_next_version(model: Path, servers: list[ThreadServer], tmp_path: Path) -> None:
    root = tmp_path / "run"
    other_weights(model, root / "checkpoint-8", 1)
    with Watching(root, [servers[0].url]) as watching:
        watching.wait_for(1)
        other_weights(model, tmp_path / "made", 2).rename(root / "checkpoint-2")
        watching.wait_for(2)
    assert [r.version for r in watching.reports] == [8, 9]


def test_ctrl_c_ends_the_watch(model: Path, servers: list[ThreadServer], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Watcher, stop: threading.Event) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_sync.Watcher, "run", interrupted)
    done = sync(model, "--server", servers[0].url, "--watch")
    assert done.exit_code == 0 and "Stopped." in done.stderr
