"""Real embedded servers for tests, and clients that hammer them.

    with running_server(model_dir) as server:
        requests.post(f"{server.url}/v1/completions", json={"prompt": [5, 6], "max_tokens": 4})
        with hammer(server.url, prompts) as answers:
            ...                                           # a push
        assert wrong(answers, {0: oracle_of_a, 1: oracle_of_b}) == []

A server is a process of its own, forked from one that has imported torch, transformers and FastAPI already (it is up in
some 0.3 s). `kill` is SIGKILL; leaving the context stops it in an orderly way and fails when it does not end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import requests

START_LIMIT = 60.0
STOP_LIMIT = 15.0
PRELOAD = ["torch", "torch.distributed.fsdp", "transformers", "sync_preload"]
"""Of the first fork server that a test run starts; ranks (`engine_worker`) are forked from the same one."""


@dataclass
class RunningServer:
    """A server process. `process` is multiprocessing's."""

    url: str
    process: Any
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def get(self, path: str, **options: Any) -> Any:
        """JSON of a GET; raises for a status that is none of success."""
        answer = requests.get(f"{self.url}{path}", timeout=30, **options)
        answer.raise_for_status()
        return answer.json()

    def post(self, path: str, body: Any, **options: Any) -> requests.Response:
        return requests.post(f"{self.url}{path}", json=body, timeout=60, **options)

    def generate(self, prompt: Sequence[int], tokens: int = 8, **fields: Any) -> dict[str, Any]:
        """A greedy completion with token ids and logprobs; the whole answer."""
        return generate(self.url, prompt, tokens, **fields)

    @property
    def version(self) -> int:
        return self.get("/version")["weight_version"]

    def kill(self) -> None:
        """At once, as a crash would."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.join()

    def pause(self) -> None:
        """SIGSTOP: the process is there and does nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> int | None:
        """SIGTERM, and wait; returns the exit code. Raises AssertionError when it does not end."""
        if self.alive:
            os.kill(self.pid, signal.SIGTERM)
            self.process.join(STOP_LIMIT)
        if self.alive:
            self.kill()
            raise AssertionError(f"the server did not stop within {STOP_LIMIT:g} s:\n{self.output()}")
        return self.process.exitcode

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def start_server(
    model_dir: str | Path, log: Path, before: Callable[[], None] | None = None, **options: Any
) -> RunningServer:
    """A server over a model directory. `options` are fields of `server.app.Settings`; `port` is any free one unless it
    is given. `before` is called in its process first. Stop it yourself. Raises AssertionError with its output when it
    does not come up."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    start_forkserver()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(str(model_dir), options, theirs, str(log), before), daemon=True)
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(START_LIMIT) else None
    except EOFError:
        found = None
    ours.close()
    server = RunningServer(found or "", process, log)
    if not isinstance(found, str) or not found.startswith("http"):
        process.kill()
        process.join()
        raise AssertionError(f"the server did not start: {found or server.output()}")
    return server


@contextmanager
def running_server(model_dir: str | Path, *, log: Path | None = None, **options: Any) -> Iterator[RunningServer]:
    """A server for the length of a `with`; see `start_server`."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="server-") as folder:
        server = start_server(model_dir, log or Path(folder, "log"), **options)
        try:
            yield server
        except BaseException:
            sys.stderr.write(server.output())
            server.kill()
            raise
        if server.alive:
            server.stop()


def start_forkserver() -> None:
    """Python 3.11 does not hand its module path on to the fork server, which then passes over what it cannot import."""
    before = os.environ.get("PYTHONPATH")
    own = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = own if before is None else f"{own}{os.pathsep}{before}"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _serve(model_dir: str, options: dict[str, Any], answer: Any, log: str, before: Callable[[], None] | None) -> None:
    """In the server's process."""
    with open(log, "ab", buffering=0) as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    try:
        import torch

        from areal_convert.converter.sync.server.app import Settings, serve

        torch.set_num_threads(1)
        if before is not None:
            before()
        serve(Settings(model_dir, **({"port": 0, "device": "cpu"} | options)), lambda url, _: answer.send(url))
    except BaseException:
        with contextlib.suppress(OSError):
            answer.send(traceback.format_exc())
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # threads of gloo may wait for peers that are gone


# ------------------------------------------------------------------------------------------------ clients


def generate(url: str, prompt: Sequence[int], tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """A greedy completion of token ids with logprobs and token ids; raises for an error."""
    body = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"logprobs": 0, "return_token_ids": True, **fields}
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=60)
    if answer.status_code != 200:
        raise AssertionError(f"{answer.status_code}: {answer.text}")
    return answer.json()


def tokens_of(answer: Mapping[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def logprobs_of(answer: Mapping[str, Any]) -> list[float]:
    return answer["choices"][0]["logprobs"]["token_logprobs"]


@dataclass(frozen=True)
class Answer:
    """One answer that `hammer` got. `tokens` and `logprobs` are None where the request failed (`status`, `error`)."""

    prompt: tuple[int, ...]
    status: int
    begin: float
    end: float
    version: int | None = None
    spans: tuple[tuple[int, int, int], ...] = ()
    tokens: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    error: str = ""


@dataclass
class Answers:
    """What `hammer` recorded so far; complete once its context was left."""

    found: list[Answer] = field(default_factory=list)

    @property
    def ok(self) -> list[Answer]:
        return [answer for answer in self.found if answer.status == 200]

    @property
    def failed(self) -> list[Answer]:
        return [answer for answer in self.found if answer.status != 200]

    @property
    def versions(self) -> set[int | None]:
        return {answer.version for answer in self.ok}

    def wait_for(self, count: int, limit: float = 60.0) -> None:
        """Until so many more requests were answered."""
        goal, end = len(self.found) + count, time.monotonic() + limit
        while len(self.found) < goal:
            if time.monotonic() > end:
                raise AssertionError(f"only {len(self.found)} of {goal} answers within {limit:g} s")
            time.sleep(0.01)


@contextmanager
def hammer(
    url: str,
    prompts: Sequence[Sequence[int]],
    *,
    clients: int = 3,
    tokens: int = 6,
    token: str | None = None,
    **fields: Any,
) -> Iterator[Answers]:
    """Greedy requests from several threads, one after another, as long as the `with` lasts."""
    answers, stop = Answers(), threading.Event()
    headers = {"Authorization": f"Bearer {token}"} if token else {}

    def client(first: int) -> None:
        with requests.Session() as session:
            n = first
            while not stop.is_set():
                answers.found.append(_ask(session, url, tuple(prompts[n % len(prompts)]), tokens, headers, fields))
                n += 1

    threads = [threading.Thread(target=client, args=(n,), daemon=True) for n in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


def _ask(
    session: requests.Session, url: str, prompt: tuple[int, ...], tokens: int, headers: Any, fields: Mapping[str, Any]
) -> Answer:
    body = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"logprobs": 0, "return_token_ids": True, **fields}
    begin = time.monotonic()
    try:
        answer = session.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    except requests.RequestException as error:
        time.sleep(0.05)  # a server that is gone must not be asked thousands of times
        return Answer(prompt, 0, begin, time.monotonic(), error=str(error))
    end = time.monotonic()
    if answer.status_code != 200:
        return Answer(prompt, answer.status_code, begin, end, error=answer.text)
    found = answer.json()
    choice = found["choices"][0]
    return Answer(
        prompt, 200, begin, end, found["weight_version"],
        tuple((s["version"], s["start"], s["end"]) for s in choice["weight_versions"]),
        tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]),
    )  # fmt: skip


Oracle = Callable[[tuple[int, ...]], tuple[Sequence[int], Sequence[float]]]
"""Prompt → the greedy tokens and their log-probabilities, as transformers has them."""


def oracle_of(model_dir: str | Path, prompts: Sequence[Sequence[int]], tokens: int = 6) -> Oracle:
    """What transformers answers with the weights of a directory (any that the hub reads), fp32, greedy."""
    from areal_convert.converter.sync.server.loading import load_model

    module = load_model(model_dir, device="cpu").module
    known = {tuple(prompt): greedy(module, prompt, tokens) for prompt in prompts}
    return known.__getitem__


def greedy(module: Any, prompt: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and logprobs of transformers: whole sequences, no cache, no batch."""
    import torch

    ids, logprobs = list(prompt), []
    with torch.inference_mode():
        for _ in range(tokens):
            scores = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float().log_softmax(-1)
            ids.append(int(scores.argmax()))
            logprobs.append(float(scores[ids[-1]]))
    return ids[len(prompt) :], logprobs


def wrong(answers: Answers, oracles: Mapping[int, Oracle], within: float = 1e-4) -> list[str]:
    """The answers that are not their own version's: other tokens, logprobs that differ, or an unknown version."""
    found = []
    for answer in answers.ok:
        if answer.version is None or answer.version not in oracles:
            found.append(f"version {answer.version} for {answer.prompt}")
            continue
        tokens, logprobs = oracles[answer.version](answer.prompt)
        same = tuple(tokens) == answer.tokens and len(answer.spans) == 1
        assert answer.logprobs is not None
        if not same or any(abs(a - b) > within for a, b in zip(logprobs, answer.logprobs, strict=True)):
            found.append(f"version {answer.version}, prompt {answer.prompt}: {answer.tokens}, expected {tuple(tokens)}")
    return found
