"""The embedded server over HTTP, as a process: OpenAI's forms, streams, errors, limits, the token, start and stop."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from areal_convert.converter import cli_serve
from areal_convert.converter.sync.server.generation import POLICIES, Room
from areal_convert.converter.sync.server.loading import load_model
from sync_server import RunningServer, greedy, running_server

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(90)]

Models = Callable[..., Path]


@pytest.fixture(scope="module")
def module_dir() -> Path:
    import models

    return models.cached_model("qwen3", side_files=True)


@pytest.fixture(scope="module")
def server(module_dir: Path) -> Iterator[RunningServer]:
    with running_server(
        module_dir, names=("policy", "again"), version=3, max_body=20_000, max_tokens=150, room=Room(rows=8, queue=12)
    ) as running:
        yield running


@pytest.fixture(scope="module")
def module(module_dir: Path) -> Any:
    return load_model(module_dir, device="cpu").module


def complete(server: RunningServer, **body: Any) -> dict[str, Any]:
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(answer: requests.Response) -> list[dict[str, Any]]:
    """Every event of a stream; it must end with [DONE]."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# ------------------------------------------------------------------------------------------------ completions


def test_a_completion_has_every_field(server: RunningServer, module: Any) -> None:
    found = complete(
        server, model="policy", prompt="w1 w2 w3", max_tokens=4, temperature=0, logprobs=2, return_token_ids=True,
        ignore_eos=True,
    )  # fmt: skip
    (choice,) = found["choices"]
    tokens, scores = greedy(module, choice["prompt_token_ids"], 4)
    assert choice["prompt_token_ids"] == [5, 6, 7] and choice["token_ids"] == tokens
    assert choice["text"] == " ".join(f"w{t - 4}" for t in tokens)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(scores, abs=1e-4)
    assert choice["logprobs"]["tokens"] == [f"w{t - 4}" for t in tokens]
    assert [max(top, key=top.__getitem__) for top in choice["logprobs"]["top_logprobs"]] == choice["logprobs"]["tokens"]
    assert all(len(top) == 2 for top in choice["logprobs"]["top_logprobs"])
    assert (choice["finish_reason"], choice["index"], choice["stop_reason"]) == ("length", 0, None)
    assert found["object"] == "text_completion" and found["id"].startswith("cmpl-") and found["model"] == "policy"
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert found["weight_version"] == choice["weight_version"] == 3
    assert found["weight_versions"] == choice["weight_versions"] == [{"version": 3, "start": 0, "end": 4}]


def test_prompts_of_all_four_kinds_and_several_samples(server: RunningServer) -> None:
    one = complete(server, prompt=[5, 6], max_tokens=3, temperature=0, ignore_eos=True)["choices"][0]["text"]
    for prompt in ("w1 w2", [5, 6], ["w1 w2"], [[5, 6]]):
        found = complete(server, prompt=prompt, max_tokens=3, temperature=0, ignore_eos=True)
        assert [c["text"] for c in found["choices"]] == [one]
    found = complete(
        server, prompt=[[5, 6], [9, 9, 9]], n=2, max_tokens=5, seed=1, return_token_ids=True, ignore_eos=True
    )
    assert [c["index"] for c in found["choices"]] == [0, 1, 2, 3]
    assert [c["prompt_token_ids"] for c in found["choices"]] == [[5, 6], [5, 6], [9, 9, 9], [9, 9, 9]]
    assert len({tuple(c["token_ids"]) for c in found["choices"]}) == 4  # every sample has a seed of its own
    assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 20, "total_tokens": 25}
    again = complete(
        server, prompt=[[5, 6], [9, 9, 9]], n=2, max_tokens=5, seed=1, return_token_ids=True, ignore_eos=True
    )
    assert [c["token_ids"] for c in again["choices"]] == [c["token_ids"] for c in found["choices"]]


def test_echo_and_prompt_logprobs(server: RunningServer, module: Any) -> None:
    import torch

    prompt = [5, 6, 7, 8]
    with torch.inference_mode():
        scores = module(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
    known = [float(scores[n, t]) for n, t in enumerate(prompt[1:])]
    found = complete(server, prompt=prompt, max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert found["text"] == "w1 w2 w3 w4" and found["finish_reason"] == "length"
    assert found["logprobs"]["token_logprobs"][0] is None
    assert found["logprobs"]["token_logprobs"][1:] == pytest.approx(known, abs=1e-4)
    found = complete(server, prompt=prompt, max_tokens=2, prompt_logprobs=3, ignore_eos=True)["choices"][0]
    first, *rest = found["prompt_logprobs"]
    assert first is None and [r[str(t)]["logprob"] for r, t in zip(rest, prompt[1:], strict=True)] == pytest.approx(
        known, abs=1e-4
    )
    for n, entries in enumerate(rest):
        ranks = {int(token): entry["rank"] for token, entry in entries.items()}
        assert ranks == {t: int((scores[n] > scores[n, t]).sum()) + 1 for t in ranks} and len(ranks) in (3, 4)
    assert rest[0]["6"]["decoded_token"] == "w2"


def test_stops(server: RunningServer) -> None:
    plain = complete(
        server, prompt=[5, 6], max_tokens=9, temperature=0, ignore_eos=True, return_token_ids=True
    )["choices"][0]  # fmt: skip
    words = plain["text"].split()
    third = next(n for n, w in enumerate(words) if n >= 2 and w not in words[:n])
    found = complete(server, prompt=[5, 6], max_tokens=9, temperature=0, ignore_eos=True, stop=[f"{words[third]} "])
    choice = found["choices"][0]
    assert choice["text"] == " ".join(words[:third]) + " "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", f"{words[third]} ")
    kept = complete(
        server, prompt=[5, 6], max_tokens=9, temperature=0, ignore_eos=True, stop=words[third],
        include_stop_str_in_output=True,
    )["choices"][0]  # fmt: skip
    assert kept["text"] == " ".join(words[: third + 1])
    ids = [plain["token_ids"][third]]
    by_id = complete(server, prompt=[5, 6], max_tokens=9, temperature=0, ignore_eos=True, stop_token_ids=ids)
    assert by_id["choices"][0]["stop_reason"] == ids[0] and by_id["choices"][0]["text"] == " ".join(words[:third])


def test_a_stream_says_the_same_in_pieces(server: RunningServer) -> None:
    body = {"prompt": [5, 6], "max_tokens": 6, "temperature": 0, "logprobs": 1, "return_token_ids": True,
            "ignore_eos": True, "n": 2, "echo": True}  # fmt: skip
    whole = complete(server, **body)
    found = chunks(server.post("/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}))
    *parts, last = found
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [c for part in parts for c in part["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [t for c in mine for t in c["token_ids"]] == choice["token_ids"]
        for key in ("tokens", "token_logprobs", "text_offset"):
            assert [x for c in mine for x in c["logprobs"][key]] == choice["logprobs"][key]
        assert [c["finish_reason"] for c in mine] == [None] * 5 + ["length"]
        assert [s for c in mine for s in c["weight_versions"]] == [
            {"version": 3, "start": n, "end": n + 1} for n in range(6)
        ]
    assert {part["weight_version"] for part in found} == {3}


# ------------------------------------------------------------------------------------------------ chat


def test_a_conversation_whole_and_streamed(server: RunningServer, module_dir: Path) -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": [{"type": "text", "text": "w7"}, {"type": "text", "text": " w8"}]}]
    body: dict[str, Any] = {"messages": messages, "max_completion_tokens": 5, "temperature": 0, "logprobs": True,
                            "top_logprobs": 2, "return_token_ids": True, "ignore_eos": True}  # fmt: skip
    found = server.post("/v1/chat/completions", body).json()
    (choice,) = found["choices"]
    tokenizer = AutoTokenizer.from_pretrained(module_dir)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "w7 w8"}], tokenize=False, add_generation_prompt=True
    )
    assert found["prompt_token_ids"] == tokenizer.encode(text, add_special_tokens=False)
    assert found["object"] == "chat.completion" and choice["message"]["role"] == "assistant"
    content = choice["logprobs"]["content"]
    assert choice["message"]["content"] == " ".join(c["token"] for c in content)
    assert all(c["bytes"] == list(c["token"].encode()) and len(c["top_logprobs"]) == 2 for c in content)
    assert all(c["top_logprobs"][0]["logprob"] == c["logprob"] for c in content)  # greedy: the likeliest
    parts = chunks(server.post("/v1/chat/completions", {**body, "stream": True}))
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(p["choices"][0]["delta"]["content"] for p in parts) == choice["message"]["content"]
    assert [t for p in parts for t in p["choices"][0]["token_ids"]] == choice["token_ids"]


# ------------------------------------------------------------------------------------------------ refusals

BAD: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({}, 400, "prompt: Field required", "prompt"),
    ({"prompt": [5], "temperature": -1}, 400, "temperature", "temperature"),
    ({"prompt": [5], "guided_json": {}}, 400, "guided_json", "guided_json"),
    ({"prompt": [5], "logit_bias": {"5": 1}}, 400, "logit_bias is not supported", "logit_bias"),
    ({"prompt": [5], "best_of": 3}, 400, "best_of", "best_of"),
    ({"prompt": [5], "logprobs": 21}, 400, "logprobs", "logprobs"),
    ({"prompt": []}, 400, "no tokens", "prompt"),
    ({"prompt": [1003]}, 400, "not in the vocabulary of 1003", "prompt"),
    ({"prompt": [-1]}, 400, "prompt", "prompt"),
    ({"prompt": [5] * 256, "max_tokens": 1}, 400, "context is 256", "max_tokens"),
    ({"prompt": [5], "max_tokens": 256}, 400, "context is 256", "max_tokens"),
    ({"prompt": [5], "max_tokens": 151}, 400, "at most 150", "max_tokens"),
    ({"prompt": [5], "max_tokens": 0}, 400, "nothing to answer", "max_tokens"),
    ({"prompt": [5], "stop": [""]}, 400, "empty text", "stop"),
    ({"prompt": [5], "stop_token_ids": [1003], "min_tokens": 1}, 400, "Token 1003 is not", "stop_token_ids"),
    ({"prompt": [5], "stop_token_ids": list(range(1003)), "min_tokens": 1}, 400, "end the answer", "stop_token_ids"),
    ({"prompt": [5], "temperature": 1e300}, 400, "temperature", "temperature"),
    ({"prompt": "\ud800"}, 400, "no Unicode", "prompt"),
    ({"prompt": [5], "model": "other"}, 404, "Models: policy", "model"),
    ({"prompt": [5], "min_weight_version": 4}, 409, "at least 4", None),
    ({"prompt": [5], "weight_version": 2}, 409, "exactly 2", None),
    ({"prompt": [[5]] * 13}, 429, "do not fit", None),
    ({"prompt": [5] * 9000}, 413, "larger than 20000", None),
]


@pytest.mark.parametrize(("body", "status", "text", "param"), BAD)
def test_requests_that_are_refused(
    server: RunningServer, body: dict[str, Any], status: int, text: str, param: str | None
) -> None:
    answer = server.post("/v1/completions", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param) and text in error["message"]
    assert error["retryable"] == (status in (409, 429)) and error["code"] and error["type"].endswith("_error")
    if status == 409:
        assert (error["code"], error["current"]) == ("weight_version", 3)


def test_a_temperature_close_to_0_is_0(server: RunningServer) -> None:
    """Divided by it the logits would be no numbers, and the whole batch would fail."""
    rows = [complete(server, prompt=[5, 6], max_tokens=6, temperature=t)["choices"] for t in (0, 1e-300)]
    assert rows[0][0]["text"] == rows[1][0]["text"]


def test_versions_that_are_demanded_by_header(server: RunningServer) -> None:
    def ask(**headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return server.post("/v1/completions", {"prompt": [5], "max_tokens": 1}, headers=named).status_code

    assert [ask(X_Weight_Version=v) for v in ("3", "2", "x", "²")] == [200, 409, 400, 400]
    assert [ask(X_Min_Weight_Version=v) for v in ("0", "3", "4")] == [200, 200, 409]
    body = {"prompt": [5], "max_tokens": 1, "weight_version": 3}
    assert server.post("/v1/completions", body, headers={"X-Weight-Version": "2"}).status_code == 400


def test_conversations_that_are_refused(server: RunningServer) -> None:
    user = [{"role": "user", "content": "w1"}]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    for body, text in [
        ({"messages": []}, "messages"),
        ({"messages": image}, "Only text"),
        ({"messages": user, "top_logprobs": 2}, "needs logprobs"),
        ({"messages": user, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": user, "continue_final_message": True}, "exclude each other"),
    ]:
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 400 and text in answer.json()["error"]["message"]


def test_what_is_no_endpoint_or_no_json(server: RunningServer) -> None:
    assert requests.get(f"{server.url}/v1/nothing", timeout=10).json()["error"]["code"] == "not_found"
    assert requests.get(f"{server.url}/v1/completions", timeout=10).status_code == 405
    answer = requests.post(
        f"{server.url}/v1/completions", data="{", timeout=10, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_request"

    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    answer = requests.post(f"{server.url}/v1/completions", data=endless(), timeout=10)
    assert answer.status_code == 413


# ------------------------------------------------------------------------------------------------ clients that leave


def test_a_client_that_leaves_ends_its_request(server: RunningServer) -> None:
    body = {"prompt": [5], "max_tokens": 150, "ignore_eos": True, "n": 8}
    for stream in (True, False):
        before = server.get("/stats")["totals"]["generated_tokens"]
        if stream:
            answer = requests.post(
                f"{server.url}/v1/completions", json={**body, "stream": True}, stream=True, timeout=10
            )
            next(answer.iter_lines())
            assert server.get("/stats")["running"] == 8
            answer.close()
        else:
            with pytest.raises(requests.Timeout):
                requests.post(f"{server.url}/v1/completions", json=body, timeout=0.15)
        end = time.monotonic() + 5
        while server.get("/stats")["running"] and time.monotonic() < end:
            time.sleep(0.01)
        assert server.get("/stats")["totals"]["generated_tokens"] - before < 8 * 150 - 8
        assert server.get("/stats")["running"] == 0


def test_what_does_not_fit_the_batch_waits(server: RunningServer) -> None:
    found: list[int] = []

    def ask() -> None:
        found.append(server.post("/v1/completions", {"prompt": [5], "max_tokens": 20, "n": 4}).status_code)

    threads = [threading.Thread(target=ask) for _ in range(3)]  # 12 sequences, 8 at a time
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200] * 3


# ------------------------------------------------------------------------------------------------ information


def test_what_the_server_says_of_itself(server: RunningServer) -> None:
    assert requests.get(f"{server.url}/health", timeout=10).status_code == 200
    about = server.get("/version")
    assert (about["model"], about["weight_version"], about["dtype"]) == ("policy", 3, "float32")
    models = server.get("/v1/models")["data"]
    assert [m["id"] for m in models][:2] == ["policy", "again"] and models[0]["max_model_len"] == 256


def test_metrics_count(server: RunningServer) -> None:
    def value(text: str, name: str) -> float:
        match = re.search(rf"^{re.escape(name)} ([\d.e+]+)$", text, re.MULTILINE)
        return float(match[1]) if match else 0.0

    def read() -> str:
        return requests.get(f"{server.url}/metrics", timeout=10).text

    before = read()
    complete(server, prompt=[5, 6, 7], max_tokens=4, ignore_eos=True)
    server.post("/v1/completions", {"prompt": [5], "model": "other"})
    after = read()
    names = {
        'areal_requests_total{endpoint="completions",status="200"}': 1,
        'areal_requests_total{endpoint="completions",status="404"}': 1,
        'areal_sequences_total{reason="length"}': 1,
        "areal_prompt_tokens_total": 3,
        "areal_generated_tokens_total": 4,
        "areal_first_token_seconds_count": 1,
    }
    assert {name: value(after, name) - value(before, name) for name in names} == names
    assert value(after, "areal_weight_version") == 3


# ------------------------------------------------------------------------------------------------ token, start, stop


def test_the_token_is_wanted_everywhere_but_for_health_and_the_page(model: Models) -> None:
    with running_server(model("llama"), token="s3cret") as server:

        def status(path: str, token: str | None, scheme: str = "Bearer") -> int:
            headers = {"Authorization": f"{scheme} {token}"} if token else {}
            return requests.get(f"{server.url}{path}", headers=headers, timeout=10).status_code

        assert [status(path, None) for path in ("/health", "/")] == [200, 200]
        paths = ("/v1/models", "/metrics", "/stats", "/version", "/ws/status", "/nothing")
        assert {status(path, None) for path in paths} == {401}
        assert [status("/stats", t) for t in ("s3cret", "s3cre", "s3cret!", "")] == [200, 401, 401, 401]
        assert [status("/stats", "s3cret", s) for s in ("bearer", "Basic")] == [200, 401]
        answer = server.post("/v1/completions", {"prompt": "text"}, headers={"Authorization": "Bearer s3cret"})
        assert answer.status_code == 400 and "no tokenizer" in answer.json()["error"]["message"]
        body = {"prompt": [5], "max_tokens": 2, "logprobs": 0, "ignore_eos": True, "return_token_ids": True}
        answer = server.post("/v1/completions", body, headers={"Authorization": "Bearer s3cret"}).json()
        choice = answer["choices"][0]
        assert choice["text"] == "" and choice["logprobs"]["tokens"] == [f"token_id:{t}" for t in choice["token_ids"]]


def test_an_orderly_stop_lets_running_requests_finish(model: Models) -> None:
    with running_server(model("qwen3")) as server:
        url, found = server.url, []
        body = {"prompt": [5], "max_tokens": 120, "ignore_eos": True}
        thread = threading.Thread(
            target=lambda: found.append(requests.post(f"{url}/v1/completions", json=body, timeout=30))
        )
        thread.start()
        end = time.monotonic() + 10
        while not server.get("/stats")["running"] and time.monotonic() < end:
            time.sleep(0.005)
        server.stop()
        thread.join()
        assert found[0].status_code == 200 and found[0].json()["usage"]["completion_tokens"] == 120
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{url}/health", timeout=2)


def test_the_command_says_where_it_serves_and_ends_on_a_signal(model: Models) -> None:
    command = [sys.executable, "-m", "areal_convert.converter.cli", "serve", str(model("llama")), "--port", "0",
               "--host", "0.0.0.0", "--weight-version", "5", "--device", "cpu"]  # fmt: skip
    environment = os.environ | {"AREAL_SERVE_TOKEN": "abc"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        match = re.fullmatch(r"Serving \S+, weight version 5, at (http://127\.0\.0\.1:\d+)\n", line)
        if match is None:
            process.kill()
            raise AssertionError(line + process.stderr.read())
        answers = [
            requests.get(f"{match[1]}/version", timeout=30, headers={"Authorization": f"Bearer {t}"})
            for t in ("abc", "abd")
        ]
        assert answers[0].json()["weight_version"] == 5 and answers[1].status_code == 401
        process.send_signal(signal.SIGINT)
        assert process.wait(40) == 130
        err = process.stderr.read()
        assert "no tokenizer" in err and "Traceback" not in err and "warning" not in err


def test_addresses_of_other_machines_are_warned_of_and_taken_ports_are_said(model: Models) -> None:
    from click.testing import CliRunner

    from areal_convert.converter.cli import cli

    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(cli, ["serve", str(model("llama")), "--host", "0.0.0.0", "--port", port])
    assert result.exit_code == 2 and "cannot listen there" in result.stderr and "--port 0" in result.stderr
    assert "can be reached from other machines" in result.stderr
    assert all(cli_serve.is_loopback(host) for host in ("127.0.0.1", "::1", "localhost"))
    assert not any(cli_serve.is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "host"))
    assert cli_serve.POLICIES == POLICIES
