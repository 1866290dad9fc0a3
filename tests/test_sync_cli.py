"""The command `sync`: what it prints, its exit codes, and `--watch`."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

import models
import sync_threads
from areal_convert.converter import cli_sync_end, cli_sync_watch
from areal_convert.converter.cli import cli
from areal_convert.converter.cli_sync import MODES, TRANSPORTS
from areal_convert.converter.cli_sync_watch import Watcher
from areal_convert.converter.sync import channel
from areal_convert.converter.sync.fleet import Fleet
from areal_convert.converter.sync.transport import KINDS
from areal_convert.converter.sync.watching import Watch
from sync_jobs import other_weights
from sync_standins import standing
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


@pytest.fixture(scope="module")
def untouched(model: Path) -> Iterator[ThreadServer]:
    """A server that nothing gets to: version 0, and all weights zero."""
    with sync_threads.serving(model) as (started,):
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
    ("arguments", "code", "says"),
    [
        (["{model}"], None, "--server"),
        (["{model}/nothing", "--server", "{url}"], 2, "nothing"),
        (["{other}", "--server", "{url}"], 2, "hidden_size|is .* on the servers"),
        (["{model}", "--server", "http://127.0.0.1:9"], 3, "cannot be reached"),
        (["{model}", "--server", "ftp://127.0.0.1:9"], 2, "no address of a server"),
        (["{model}", "--server", "{url}", "--version", "0"], None, "--version"),
        (["{model}", "--server", "{url}", "--transport", "disk"], 2, "no directory was given"),
        (["{model}", "--server", "{url}", "--bucket", "many"], None, "many"),
        (["{model}", "--server", "{url}", "--timeout", "nan"], None, "no number of seconds"),
        (["{model}", "--server", "{url}", "--server", "{again}"], 2, "{again} is the same server as {url}"),
        (["{model}", "--server", "{url}/v1"], 2, "no inference server that is known here"),
        (["{model}", "--server", "{url}", "--watch", "--adapter", "x"], 2, "--adapter"),
        (["{model}/nothing", "--server", "{url}", "--watch"], 2, "no such directory"),
        (["{model}", "--server", "{url}", "--adapter", "x"], 2, "is no adapter"),
        (["{model}", "--server", "{url}", "--token-env", "NOBODY_SETS_IT"], 2, "is not set"),
        (["{nan}", "--server", "{url}"], 2, "holds NaN.*\n?.*--allow-nan"),
    ],
)
def test_what_is_refused(
    model: Path, untouched: ThreadServer, tmp_path: Path, arguments: list[str], code: int | None, says: str
) -> None:
    """Said on standard error, and with --json on standard output, too, unless click itself stopped at an option."""
    import re

    broken = poisoned(model, tmp_path / "nan") if arguments[0] == "{nan}" else ""
    names: dict[str, Any] = {
        "model": model,
        "url": untouched.url,
        "other": models.cached_model("llama", layers=2),
        "nan": broken,
    }
    names["again"] = untouched.url.replace("127.0.0.1", "localhost")
    done = sync(*[a.format(**names) for a in arguments], "--json")
    assert done.exit_code == (code or 2) and re.search(says.format(**names), done.stderr), done.stderr
    assert "Traceback" not in done.output and untouched.receiver.version == 0
    assert not any(value.any() for value in untouched.weights.values()), "they are the zeros that they were"
    if code is not None:
        error = json.loads(done.stdout)["error"]
        assert error["kind"] and error["message"] and set(error) == {"kind", "code", "message", "hint", "problems"}


def test_a_page_that_answers_every_path_is_no_server(model: Path) -> None:
    """It has every endpoint by which servers are told apart, and is pushed nothing."""
    asked: list[str] = []

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.command)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>welcome</html>")

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as page:
        threading.Thread(target=page.serve_forever, args=(0.01,), daemon=True).start()
        done = sync(model, "--server", f"http://127.0.0.1:{page.server_port}", "--timeout", "5")
        page.shutdown()
    assert done.exit_code == 2 and "it answers whatever path is asked for" in done.stderr and set(asked) == {"GET"}


def poisoned(model: Path, out: Path) -> Path:
    """The model with one value that is none."""
    other_weights(model, out, 1)
    state = load_file(out / "model.safetensors")
    state["model.norm.weight"][3] = torch.nan
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_nan_goes_where_it_is_wanted(model: Path, servers: list[ThreadServer], tmp_path: Path) -> None:
    path = poisoned(model, tmp_path / "nan")
    for transport in ("shm", "gloo"):
        assert sync(path, "--server", servers[0].url, "--transport", transport, "--allow-nan").exit_code == 0
    assert servers[0].weights["model.norm.weight"].isnan().tolist().count(True) == 1
    refused = sync(path, "--server", servers[0].url, "--mode", "delta")
    assert refused.exit_code == 2 and "final_norm" in refused.stderr and servers[0].receiver.version == 2
    assert servers[0].url not in refused.stderr, "no server is to blame"


def test_what_the_server_has_against_it(model: Path) -> None:
    """Memory that is short, and another hub: codes for programs, and whether to come again."""
    with sync_threads.serving(model, free=lambda device: 1000) as (server,):
        done = sync(model, "--server", server.url, "--json")
        error = json.loads(done.stdout)["error"]
        assert done.exit_code == 2 and error["code"] == "memory" and server.url in error["message"]
        server.receiver.lease({"hub": "hub-node7-1", "ttl": 30})
        done = sync(model, "--server", server.url, "--json")
        assert done.exit_code == 3 and json.loads(done.stdout)["error"]["code"] == "lease_held"
        assert "hub-node7-1" in done.stderr and server.receiver.version == 0


def test_fenced_servers_are_not_paused_for_nan(model: Path, tmp_path: Path) -> None:
    """They cannot go back: it has to be found before anything is written over."""
    held = sync_threads.state_of(model)
    with standing("vllm-0.30", held) as server:
        done = sync(poisoned(model, tmp_path / "nan"), "--server", server.url)
        assert done.exit_code == 2 and "final_norm" in done.stderr and "--allow-nan" in done.stderr
        assert not server.paused and server.version == "default"
        assert all(torch.equal(server.weights[name], value) for name, value in held.items())


def test_casts_are_said(model: Path) -> None:
    state = sync_threads.state_of(model, dtype=torch.bfloat16)
    with sync_threads.serving(model, state=state) as (server,):
        done = sync(model, "--server", server.url)
        assert done.exit_code == 0 and f"cast F32 → BF16: {len(state)} tensors" in done.stdout


def test_an_old_version_is_refused(model: Path, servers: list[ThreadServer]) -> None:
    assert sync(model, "--server", servers[0].url, "--version", "3").exit_code == 0
    again = sync(model, "--server", servers[0].url, "--version", "3")
    assert again.exit_code == 2 and "version 3" in again.stderr.lower()
    assert sync(model, "--server", servers[0].url).exit_code == 0
    assert servers[0].receiver.version == 4


def test_one_server_gone(model: Path, servers: list[ThreadServer]) -> None:
    servers[1].stop()
    urls = ["--server", servers[0].url, "--server", servers[1].url]
    assert sync(model, *urls).exit_code == 3 and servers[0].receiver.version == 0
    done = sync(model, *urls, "--on-failure", "drop")
    assert servers[0].receiver.version == 1 and done.exit_code in (0, 1), done.output


@pytest.mark.parametrize(
    ("step", "says"), [("seal", "Every server goes on with the weights that it had."), ("commit", "had been decided")]
)
def test_sigterm_calls_off_what_is_not_decided(
    model: Path, servers: list[ThreadServer], monkeypatch: pytest.MonkeyPatch, step: str, says: str
) -> None:
    import os
    import signal

    taken = getattr(Fleet, step)

    def terminated(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return taken(*given)

    monkeypatch.setattr(Fleet, step, terminated)
    before = signal.getsignal(signal.SIGTERM)
    done = sync(model, "--server", servers[0].url, "--transport", "gloo", "--json")
    assert done.exit_code == 143 and says in done.stderr and says in json.loads(done.stdout)["error"]["message"]
    assert servers[0].receiver.version == 0 and not servers[0].weights["model.norm.weight"].any()
    assert servers[0].receiver.status()["lease"] is None and signal.getsignal(signal.SIGTERM) == before


def test_a_group_that_does_not_end_cannot_take_the_exit_code_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(cli_sync_end.os, "_exit", codes.append)
    cli_sync_end.let_go(3)
    assert codes == []
    end = threading.Event()
    name = cli_sync_end._CLOSING
    assert name == channel.CLOSING
    thread = threading.Thread(target=end.wait, name=name, daemon=True)
    thread.start()
    cli_sync_end.let_go(3, patience=0.01)
    end.set()
    assert codes == [3]


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
            "allow_nan": False,
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
        poisoned(model, tmp_path / "made").rename(root / "checkpoint-6")
        time.sleep(0.6)
        shutil.copytree(models.cached_model("llama", layers=2), root / "checkpoint-8")
        time.sleep(0.6)
        assert len(watching.reports) == 1, "cut short; not under its name yet; NaN; another family"
        assert watching.thread.is_alive() and holds(servers[0], root / "checkpoint-5")
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

    monkeypatch.setattr(cli_sync_watch.Watcher, "run", interrupted)
    done = sync(model, "--server", servers[0].url, "--watch")
    assert done.exit_code == 0 and "Stopped." in done.stderr
