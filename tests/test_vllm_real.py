"""A real vLLM on the CPU takes weights, on one worker and on two: run by `make test-vllm`, never by `make test`.

What it answers is compared with transformers, token for token, and every answer given meanwhile has to be that of one
version or of another: a mixture of two is neither's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from areal_convert.converter import WeightSync
from areal_convert.converter.errors import ServerRefused
from areal_convert.converter.sync.client import Client
from areal_convert.converter.sync.dialects import probe, vllm
from areal_convert.converter.sync.dialects.base import Oracle
from areal_convert.converter.sync.sink import Wanted
from models import make_model

PYTHON = os.environ.get("AREAL_CONVERT_VLLM_PYTHON", "")
ROOT = Path(__file__).parents[1]
PROMPTS = [[5, 17, 230, 4, 99], [7, 7, 800], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
COUNT = 12
TOLERANCE = 2e-3

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multiprocess,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="AREAL_CONVERT_VLLM_PYTHON names no interpreter with vLLM: make test-vllm"),
]

Answer = tuple[tuple[int, ...], tuple[float, ...]]


def say(line: str) -> None:
    """Into the report that is kept under docs/."""
    print(line, flush=True)
    if path := os.environ.get("AREAL_CONVERT_VLLM_REPORT"):
        with open(path, "a", encoding="utf-8") as report:
            report.write(line + "\n")


# ------------------------------------------------------------------------------------------------ models and oracle


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three models of one shape with a tokenizer, which answer differently."""
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("vllm")
    found = {"A": make_model("qwen3", root / "A", dtype="float32", layers=2, head_dim=32)}
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(1003)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0").save_pretrained(found["A"])
    for n, name in enumerate("BC", 1):
        shutil.copytree(found["A"], root / name)
        found[name] = root / name
        generator = torch.Generator().manual_seed(n)
        state = load_file(root / "A" / "model.safetensors")
        for key, value in state.items():
            state[key] = value + 0.5 * value.std(correction=0) * torch.randn(value.shape, generator=generator)
        save_file(state, root / name / "model.safetensors", {"format": "pt"})
    return found


@pytest.fixture(scope="module")
def oracles(versions: dict[str, Path]) -> dict[str, list[Answer]]:
    """What transformers answers, greedily."""
    from transformers import AutoModelForCausalLM

    found: dict[str, list[Answer]] = {}
    for name, path in versions.items():
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        found[name] = []
        for prompt in PROMPTS:
            tokens, logprobs = list(prompt), []
            with torch.no_grad():
                for _ in range(COUNT):
                    row = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
                    tokens.append(int(row.argmax()))
                    logprobs.append(float(row.max()))
            found[name].append((tuple(tokens[len(prompt) :]), tuple(logprobs)))
    assert len({a[0] for answers in found.values() for a in answers}) == len(versions) * len(PROMPTS)
    return found


def same(a: Answer, b: Answer) -> bool:
    return a[0] == b[0] and all(abs(x - y) < TOLERANCE for x, y in zip(a[1], b[1], strict=True))


# ------------------------------------------------------------------------------------------------ the server


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    stopped: bool = field(default=False)

    def answer(self, prompt: list[int]) -> Answer | None:
        """None where the server answers 503 (paused). Raises for anything else that is no answer."""
        body = {"model": "policy", "prompt": prompt, "max_tokens": COUNT, "temperature": 0.0, "logprobs": 1}
        body |= {"return_tokens_as_token_ids": True, "ignore_eos": True}
        reply = requests.post(f"{self.url}/v1/completions", json=body, timeout=60)
        if reply.status_code == 503:
            return None
        reply.raise_for_status()
        found = reply.json()["choices"][0]["logprobs"]
        tokens = tuple(int(t.removeprefix("token_id:")) for t in found["tokens"])
        return tokens, tuple(map(float, found["token_logprobs"]))


def serve(model: Path, tp: int, where: Path) -> Server:
    where.mkdir()
    shutil.copy(Path(vllm.__file__).with_name("vllm_gloo.py"), where)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AREAL", "PYTEST", "TRANSFORMERS"))}
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_SERVER_DEV_MODE": "1"}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(where)}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if tp == 2 else {}
    flags = f"--served-model-name policy --dtype float32 --max-model-len 256 --enforce-eager --host 127.0.0.1 -tp {tp}"
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *flags.split()]
    command += ["--port", str(port), "--worker-extension-cls", "vllm_gloo.Extension"]
    command += ["--weight-transfer-config", json.dumps({"backend": "gloo"})]
    log = where / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    return Server(f"http://127.0.0.1:{port}", process, log)


def await_up(server: Server, limit: float = 400.0) -> float:
    start = time.monotonic()
    while time.monotonic() - start < limit:
        if server.process.poll() is not None:
            break
        try:
            if requests.get(f"{server.url}/health", timeout=2).ok:
                return time.monotonic() - start
        except requests.RequestException:
            time.sleep(0.5)
    pytest.fail(f"vLLM did not come up:\n{server.log.read_text(errors='replace')[-3000:]}")


def stop(server: Server) -> None:
    os.killpg(server.process.pid, signal.SIGKILL)  # SIGTERM waits for requests that are stuck
    server.process.wait(20)


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def server(request: pytest.FixtureRequest, versions: dict[str, Path], tmp_path: Path) -> Iterator[Server]:
    found = serve(versions["A"], request.param, tmp_path / "server")
    try:
        seconds = await_up(found)
        say(f"\nvLLM {requests.get(f'{found.url}/version', timeout=5).json()['version']}, TP {request.param}: up")
        print(f"up in {seconds:.0f} s")
        yield found
    finally:
        stop(found)


# ------------------------------------------------------------------------------------------------ the tests


class Hammer:
    """Requests without a pause, from two threads; what came back is sorted by whose answer it is."""

    def __init__(self, server: Server, oracles: dict[str, list[Answer]]) -> None:
        self.server, self.oracles = server, oracles
        self.counts: dict[str, int] = {}
        self.strange: list[Any] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(2)]

    def _run(self, n: int) -> None:
        while not self._stop.is_set():
            n = (n + 1) % len(PROMPTS)
            try:
                answer = self.server.answer(PROMPTS[n])
            except requests.RequestException as error:
                self.strange.append(repr(error))
                return
            whose = "503" if answer is None else self._whose(n, answer)
            self.counts[whose] = self.counts.get(whose, 0) + 1
            if whose == "neither":
                self.strange.append(answer)
            if answer is None:
                time.sleep(0.01)

    def _whose(self, n: int, answer: Answer) -> str:
        return next((name for name, known in self.oracles.items() if same(answer, known[n])), "neither")

    def __enter__(self) -> Hammer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(90)


def check_answers(server: Server, known: list[Answer]) -> float:
    """The largest difference of a logprob."""
    found = [server.answer(prompt) for prompt in PROMPTS]
    for answer, wanted in zip(found, known, strict=True):
        assert answer is not None and answer[0] == wanted[0]
    return max(abs(x - y) for a, k in zip(found, known, strict=True) if a for x, y in zip(a[1], k[1], strict=True))


def test_versions_under_traffic_then_a_bad_push(
    server: Server, versions: dict[str, Path], oracles: dict[str, list[Answer]]
) -> None:
    live: dict[str, Any] = {}

    def take(name: str) -> None:
        from safetensors.torch import load_file

        live.clear()
        live.update(load_file(versions[name] / "model.safetensors"))

    take("A")
    check_answers(server, oracles["A"])
    order = "BACB"
    options = {"oracle": lambda v: Oracle(PROMPTS[0], *oracles[order[v - 1]][0], TOLERANCE), "group_bytes": 1 << 16}
    with WeightSync(lambda: live, server.url, base=versions["A"], in_flight="wait", options=options) as sync:
        for number, name in enumerate(order, 1):
            take(name)
            with Hammer(server, oracles) as hammer:
                time.sleep(0.5)
                report = sync.push()
                time.sleep(0.5)
            assert hammer.strange == []
            assert report.version == number
            far = check_answers(server, oracles[name])
            told = requests.get(f"{server.url}/weight_info", timeout=5).json()["weight_version"]
            assert told == str(number)
            counts = " ".join(f"{k}:{v}" for k, v in sorted(hammer.counts.items()))
            pause = report.pause_s[server.url]
            say(f"version {number} ({name}): pause {pause:.2f} s, answers {counts}, logprobs within {far:.1e}")
        from_disk(server, versions, oracles)
        bad_push(server, versions, oracles)


def from_disk(server: Server, versions: dict[str, Path], oracles: dict[str, list[Answer]]) -> None:
    """The server reads a directory itself."""
    client = Client(server.url)
    sink = probe(client, "test", {"path": versions["C"], "in_flight": "wait"})
    sink.load(Stub(versions["C"]), 5)
    sink.commit(5, "")
    say(f"version 5 (C) from disk: logprobs within {check_answers(server, oracles['C']):.1e}")


class Stub:
    """A feed of whole tensors in memory, as wrong as a test wants it."""

    def __init__(self, path: Path, rename: dict[str, str] | None = None) -> None:
        from safetensors.torch import load_file

        self.state = {(rename or {}).get(k, k): v for k, v in load_file(path / "model.safetensors").items()}

    def wanted(self, dtype: str | None = None) -> list[Wanted]:
        return [Wanted(k, tuple(v.shape), dtype or "F32") for k, v in self.state.items()]

    def tensors(self, wanted: Any) -> Iterator[tuple[Wanted, Any]]:
        for want in wanted:
            yield want, self.state[want.name].contiguous().numpy().view("u4")


def bad_push(server: Server, versions: dict[str, Path], oracles: dict[str, list[Answer]]) -> None:
    """A name that vLLM does not know: the fence stays closed, and nobody gets an answer from what is there now."""
    client = Client(server.url, timeout=20)
    sink = probe(client, "test", {"in_flight": "wait"})
    with Hammer(server, oracles) as hammer:
        with pytest.raises(ServerRefused) as caught:
            sink.load(Stub(versions["B"], {"model.norm.weight": "model.no_such_norm.weight"}), 6)
        time.sleep(0.5)
    assert caught.value.code == "fenced"
    assert "neither" not in hammer.counts
    say(f"a bad push: {type(caught.value).__name__} {caught.value.code}: stays paused, sent {1 + sink.resent} ×")
    with pytest.raises(ServerRefused, match="stays paused"):
        sink.abort(6, "the test says so")
    try:
        sink.load(Stub(versions["B"]), 7)
    except ServerRefused as error:
        say(f"a whole push after it: refused: {error.what.replace(server.url, 'the server')}")
        return
    sink.commit(7, "")
    say(f"a whole push after it (B): logprobs within {check_answers(server, oracles['B']):.1e}")
