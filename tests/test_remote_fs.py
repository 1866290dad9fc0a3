"""Checkpoints over plain HTTP and in fsspec's other file systems, and what servers do wrong."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from areal_convert.converter import Limits, Mesh, convert, inspect, open_checkpoint, plan, verify
from areal_convert.converter.convert import run
from areal_convert.converter.errors import ConfigError, NoAccess, RemoteChanged, RemoteError, SourceError, Unreachable
from areal_convert.converter.remote import http_client, http_place
from areal_convert.converter.remote.fs_store import FsspecStore, is_safe, state_of
from range_server import RangeServer
from s3_server import settle

SHARD = "*-00002-of-00004.safetensors"


@pytest.fixture(autouse=True)
def _fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch, {"AREAL_CACHE": str(tmp_path / "cache"), "no_proxy": "127.0.0.1"})


@pytest.fixture
def small(model_copy: Callable[..., Path]) -> Path:
    return model_copy("qwen3", layers=2, max_shard_size="150KB", side_files=True)


@pytest.fixture
def server(small: Path) -> Iterator[RangeServer]:
    """Serves the model, without listings."""
    with RangeServer(small) as running:
        yield running


@pytest.fixture
def memory() -> Iterator[Callable[[Path, str], str]]:
    """Puts a directory into memory://, which is empty again afterwards."""
    import fsspec

    fs = fsspec.filesystem("memory")

    def put(directory: Path, name: str) -> str:
        for path in directory.rglob("*"):
            if path.is_file():
                fs.pipe_file(f"/{name}/{path.relative_to(directory)}", path.read_bytes())
        return f"memory://{name}"

    yield put
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


# ------------------------------------------------------------------------------------------------ finding the files


def test_a_model_is_found_by_its_names_where_nothing_is_listed(server: RangeServer, small: Path) -> None:
    assert verify(small, server.url).same
    found = FsspecStore(server.url).entries()
    assert found.keys() >= {"config.json", "tokenizer.json", "chat_template.jinja"} | {
        p.name for p in small.glob("*.s*")
    }


def test_a_listing_shows_whatever_is_there(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "mega tron"
    convert(small, out, "torch_dist", Mesh(tp=2))
    with RangeServer(tmp_path / "out", listing=True) as server:
        url = f"{server.url}/mega tron"
        assert verify(small, url).same
        found = FsspecStore(url).entries()
        here = {
            str(p.relative_to(tmp_path / "out" / "mega tron")) for p in (tmp_path / "out").rglob("*") if p.is_file()
        }
        assert found.keys() == here


def test_dot_files_that_a_listing_hides_are_looked_for(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(small, tmp_path / "dcp", "dcp", Mesh(dp_shard=2))
    real = http_place.HttpPlace._links
    monkeypatch.setattr(
        http_place.HttpPlace, "_links", lambda self, d: {p for p in real(self, d) if not p.startswith(".")}
    )
    with RangeServer(tmp_path / "dcp", listing=True) as server:
        assert verify(small, server.url).same


def test_one_file_by_its_url(model: Callable[..., Path]) -> None:
    whole = model("qwen3", layers=2)
    with RangeServer(whole) as server:
        assert verify(whole, f"{server.url}/model.safetensors").same


def test_a_signature_goes_along_and_is_not_shown(server: RangeServer) -> None:
    store = FsspecStore(f"{server.url}?sig=SECRET")
    assert "SECRET" not in store.url + store.key + store.name
    assert b"".join(map(bytes, store.stream("config.json", 0, 10)))
    login = server.url.replace("http://", "http://me:SECRET@")
    assert "SECRET" not in FsspecStore(login).url


@pytest.mark.parametrize("path", ["../x", "/x", "a//b", "a/./b", "", "a\0b"])
def test_names_that_lead_elsewhere_are_left_out(path: str) -> None:
    assert not is_safe(path)


def test_what_is_not_there(server: RangeServer) -> None:
    with pytest.raises(NoAccess, match="there is nothing there"):
        open_checkpoint(f"{server.url}/none")
    with pytest.raises(Unreachable, match="no such server"):
        open_checkpoint("http://nowhere.invalid/x")
    with pytest.raises(Unreachable, match="cannot be reached"):
        open_checkpoint("http://127.0.0.1:1/x")


# ------------------------------------------------------------------------------------------------ what servers do wrong


@pytest.mark.parametrize("reset", [False, True])
def test_a_dropped_connection_goes_on_at_the_byte_reached(
    reset: bool, server: RangeServer, small: Path, tmp_path: Path
) -> None:
    planned = plan(server.url, "dcp", Mesh(dp_shard=2))
    server.reset()
    server.fault("*.safetensors", drop_after=30_000, reset=reset, times=6)
    result = run(planned, tmp_path / "out")
    assert verify(small, tmp_path / "out").same
    assert result.fetched["retries"] >= 6
    weights = sum(p.stat().st_size for p in small.glob("*.safetensors"))
    slack = 6 * 4_000_000 if reset else 0  # what is under way when a connection is reset is lost
    assert server.bytes_sent("*.safetensors") <= weights * 1.1 + slack


def test_503_is_tried_again(server: RangeServer, small: Path, tmp_path: Path) -> None:
    server.fault("*", status=503, times=2, methods=("HEAD",))
    planned = plan(server.url, "dcp")
    server.fault("*.safetensors", status=503, headers={"Retry-After": "0"}, times=3)
    result = run(planned, tmp_path / "out")
    assert verify(small, tmp_path / "out").same
    assert result.fetched["retries"] >= 3


def test_a_server_that_fails_for_good_is_given_up(server: RangeServer, tmp_path: Path) -> None:
    planned = plan(server.url, "dcp")
    server.fault(SHARD, status=503)
    with pytest.raises(Unreachable, match=r"model-00002-of-00004\.safetensors: the server answers 503.*attempts"):
        run(planned, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_was_fetched_before_a_failure_is_not_fetched_again(
    server: RangeServer, small: Path, tmp_path: Path
) -> None:
    planned = plan(server.url, "dcp")
    server.reset()
    fault = server.fault("*-00004-of-00004.safetensors", status=503)
    with pytest.raises(Unreachable, match="--resume"):
        run(planned, tmp_path / "out", limits=Limits(workers=1))
    assert fault.hits
    server.reset()
    result = run(planned, tmp_path / "out", resume=True)
    assert verify(small, tmp_path / "out").same
    assert result.resumed
    weights = sum(p.stat().st_size for p in small.glob("*.safetensors"))
    assert server.bytes_sent("*.safetensors") < 0.9 * weights


def test_a_server_that_ignores_ranges(small: Path) -> None:
    with RangeServer(small, no_ranges=True) as server, pytest.raises(SourceError, match="the server ignores ranges"):
        open_checkpoint(server.url).check()


def test_ranges_that_are_ignored_later(server: RangeServer, tmp_path: Path) -> None:
    planned = plan(server.url, "dcp")
    server.fault(SHARD, whole=True)
    with pytest.raises(RemoteError, match="ignores ranges"):
        run(planned, tmp_path / "out")


@pytest.mark.parametrize("how", ["other", "shorter", "gone"])
def test_a_file_that_changes_meanwhile(how: str, server: RangeServer, small: Path, tmp_path: Path) -> None:
    planned = plan(server.url, "dcp")
    file = small / "model-00002-of-00004.safetensors"
    data = file.read_bytes()
    change = {
        "other": lambda: file.write_bytes(data[::-1]),
        "shorter": lambda: file.write_bytes(data[:2000]),
        "gone": file.unlink,
    }
    server.fault("*-00001-of-00004.safetensors", call=change[how], times=1)
    with pytest.raises(SourceError, match=r"was changed|shorter|no such file|it is there no more") as caught:
        run(planned, tmp_path / "out")
    assert file.name in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_change_after_the_last_byte_is_noticed(server: RangeServer, small: Path, tmp_path: Path) -> None:
    planned = plan(server.url, "dcp")
    file = small / "model-00001-of-00004.safetensors"
    server.fault("*", call=lambda: file.write_bytes(file.read_bytes()), methods=("HEAD",), times=1)
    with pytest.raises(SourceError, match="was changed while it was converted"):
        run(planned, tmp_path / "out")


def test_a_change_of_content_gives_another_mirror(server: RangeServer, small: Path, tmp_path: Path) -> None:
    first = FsspecStore(server.url).key
    assert first == FsspecStore(server.url).key
    (small / "config.json").write_text((small / "config.json").read_text() + "\n")
    assert first != FsspecStore(server.url).key


def test_without_an_etag_the_size_has_to_do(server: RangeServer, small: Path) -> None:
    server.fault("*", no_etag=True, methods=("HEAD", "GET"))
    assert verify(small, server.url).same
    assert FsspecStore(server.url).entries()["config.json"].etag.startswith("size ")


def test_head_may_be_forbidden(server: RangeServer, small: Path) -> None:
    server.fault("*", status=405, methods=("HEAD",))
    assert verify(small, server.url).same


def test_a_login_that_is_wanted(server: RangeServer) -> None:
    server.fault("*", status=401, methods=("GET", "HEAD"))
    with pytest.raises(NoAccess, match="it wants a login"):
        open_checkpoint(server.url)


def test_redirects_are_followed_without_our_credentials(server: RangeServer, small: Path, tmp_path: Path) -> None:
    with RangeServer(tmp_path) as front:
        headers = {"Location": f"{server.url}/config.json"}
        front.fault("*", status=302, headers=headers, methods=("GET",))
        client = http_client.Client("http", "me", "secret")
        with client.request("GET", f"{front.url}/x") as answer:
            assert answer.read() == (small / "config.json").read_bytes()
        front.reset()
        front.fault("*", status=302, headers={"Location": f"{front.url}/x"})
        with pytest.raises(RemoteError, match="redirects without end"), client.request("GET", f"{front.url}/x"):
            pass


def test_a_kept_connection_that_the_server_closed(server: RangeServer, small: Path) -> None:
    """It is used again, found dead, and replaced, without counting as a failure."""
    store = FsspecStore(server.url)
    wanted = (small / "config.json").read_bytes()
    assert b"".join(map(bytes, store.stream("config.json", 0, len(wanted)))) == wanted
    (kept,) = store._place._client._idle.values()
    assert kept
    for connection in kept:
        connection.http.sock.shutdown(socket.SHUT_RDWR)
    assert b"".join(map(bytes, store.stream("config.json", 0, len(wanted)))) == wanted


def test_a_proxy_is_used_and_can_be_bypassed(server: RangeServer, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        seen: list[bytes] = []

        def serve() -> None:
            connection, _ = proxy.accept()
            seen.append(connection.recv(4096))
            connection.sendall(b"HTTP/1.1 404 no\r\nContent-Length: 0\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        monkeypatch.setenv("http_proxy", f"http://me:pw@127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "")
        with http_client.Client("http", None, None).request("HEAD", "http://models.invalid/config.json") as answer:
            assert answer.status == 404
        thread.join()
        assert seen[0].startswith(b"HEAD http://models.invalid/config.json HTTP/1.1\r\n")
        assert b"Proxy-Authorization: Basic bWU6cHc=" in seen[0] and seen[0].count(b"Host:") == 1
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert inspect(server.url).ok


# ------------------------------------------------------------------------------------------------ other file systems


def test_memory_there_and_back(small: Path, tmp_path: Path, memory: Callable[[Path, str], str]) -> None:
    url = memory(small, "q")
    assert verify(small, url).same
    for to, mesh in (("torch_dist", Mesh(tp=2, pp=2)), ("dcp", Mesh(dp_shard=2)), ("hf", Mesh())):
        convert(url, f"memory://out/{to}", to, mesh)
        convert(f"memory://out/{to}", tmp_path / to, "hf")
        assert verify(small, tmp_path / to).same


def test_schemes_that_nobody_serves() -> None:
    with pytest.raises(ConfigError, match=r"foo://x: Protocol not known"):
        open_checkpoint("foo://x")
    with pytest.raises(ConfigError, match=r"(?s)gs:// needs a package.*pip install gcsfs"):
        open_checkpoint("gs://bucket/x")


def test_states_are_the_surest_that_a_file_system_knows() -> None:
    assert state_of({"size": 3, "ETag": '"abc"', "mtime": 1.0}) == "abc"
    assert state_of({"size": 3, "mtime": 1.5}) == "1.5"
    assert state_of({"size": 3}) == "size 3"


def test_a_place_that_sends_more_than_was_asked_for(
    small: Path, memory: Callable[[Path, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    store = FsspecStore(memory(small, "q"))
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda self, path, **_: b"x" * 100)
    with pytest.raises((RemoteError, RemoteChanged), match="ignores ranges"):
        list(store.stream("config.json", 0, 10))
