"""The Hub of the tests is believed because the real client works against it, in this process and in others."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import httpx2
import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    BadRequestError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile, RepoFolder
from huggingface_hub.utils import get_session, hf_raise_for_status

from hub_server import INVALID, READ, STRANGER, WRITE, HubServer

pytestmark = pytest.mark.filterwarnings(
    # How huggingface_hub hands a file to its HTTP client.
    "ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning",
)

WEIGHTS = random.Random(1).randbytes(3_000_000)
FILES: dict[str, bytes | str | Path] = {
    "config.json": '{"model_type": "llama"}',
    "README.md": "# a model\n",
    "model.safetensors": WEIGHTS,
    "sub/dir/notes.txt": "deep",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub", multipart_threshold=2_000_000, part_size=1_000_000) as server:
        server.patch(monkeypatch)
        yield server
    assert not server.leaks, "a token reached the CDN"
    assert not list(server.store.root.glob("incoming-*"))


def download(name: str, repo: str = "org/model", **how: str | bool) -> bytes:
    return Path(hf_hub_download(repo, name, **how)).read_bytes()  # pyright: ignore[reportArgumentType, reportCallIssue]


# Looking


def test_who_is_who(hub: HubServer) -> None:
    me = hub.api().whoami()
    assert (me["name"], me["auth"]["accessToken"]["role"]) == ("alice", "write")
    assert hub.api(READ).whoami()["auth"]["accessToken"]["role"] == "read"
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        hub.api(INVALID).whoami()


def test_model_info(hub: HubServer) -> None:
    sha = hub.add_repo("org/model", FILES)
    api = hub.api()
    info = api.model_info("org/model", files_metadata=True)
    assert (info.sha, info.private, info.gated, info.author) == (sha, False, False, "org")
    sizes = {file.rfilename: (file.size, file.lfs.sha256 if file.lfs else None) for file in info.siblings or []}
    assert sizes["model.safetensors"] == (len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest())
    assert sizes["sub/dir/notes.txt"] == (4, None)
    slim = api.model_info("org/model", expand=["sha", "gated"])
    assert (slim.sha, slim.gated, slim.siblings) == (sha, False, None)
    with pytest.raises(BadRequestError):
        api.model_info("org/model", expand=["nonsense"])  # pyright: ignore[reportArgumentType]


def test_tree_in_pages(hub: HubServer) -> None:
    hub.add_repo("org/model", FILES | {f"many/{number:02d}.txt": str(number) for number in range(25)})
    hub.page_size = 10
    api = hub.api()
    everything = {entry.path: entry for entry in api.list_repo_tree("org/model", recursive=True)}
    assert len(hub.calls("tree")) == 4 and len(everything) == 5 + 25 + 3
    notes, folder = everything["sub/dir/notes.txt"], everything["sub/dir"]
    assert isinstance(notes, RepoFile) and isinstance(folder, RepoFolder)
    blob = hashlib.sha1(b"blob 4\0deep").hexdigest()
    assert notes.blob_id == blob
    listing = b"100644 notes.txt\0" + bytes.fromhex(blob)
    assert folder.tree_id == hashlib.sha1(b"tree %d\0" % len(listing) + listing).hexdigest()
    assert [entry.path for entry in api.list_repo_tree("org/model", "sub")] == ["sub/dir"]
    assert sorted(api.list_repo_files("org/model")) == sorted(hub.files("org/model"))
    with pytest.raises(RemoteEntryNotFoundError):
        list(api.list_repo_tree("org/model", "nowhere"))


def test_expanded_entries_name_their_last_commit(hub: HubServer) -> None:
    first = hub.add_repo("org/model", FILES)
    second = hub.commit("org/model", {"sub/dir/notes.txt": "other"}, message="Better notes")
    entries = {entry.path: entry for entry in hub.api().list_repo_tree("org/model", recursive=True, expand=True)}
    commits = {path: entry.last_commit.oid for path, entry in entries.items() if entry.last_commit}
    assert commits["sub/dir/notes.txt"] == commits["sub"] == second and commits["config.json"] == first
    found = hub.api().get_paths_info("org/model", ["config.json", "sub", "absent"], expand=True)
    assert [(entry.path, entry.last_commit.title if entry.last_commit else "") for entry in found] == [
        ("config.json", "Upload"),
        ("sub", "Better notes"),
    ]


def test_refs_and_revisions(hub: HubServer) -> None:
    old = hub.add_repo("org/model", FILES)
    api = hub.api()
    api.create_branch("org/model", branch="dev/one")
    api.create_tag("org/model", tag="v1", tag_message="first")
    new = hub.commit("org/model", {"config.json": "{}"})
    refs = api.list_repo_refs("org/model")
    assert {ref.name: ref.target_commit for ref in refs.branches} == {"main": new, "dev/one": old}
    assert {ref.ref: ref.target_commit for ref in refs.tags} == {"refs/tags/v1": old}
    for revision, sha in (("dev/one", old), ("v1", old), (old, old), (old[:8], old), ("main", new)):
        assert api.model_info("org/model", revision=revision).sha == sha
        assert download("config.json", revision=revision) == hub.read("org/model", "config.json", sha)
    assert [commit.commit_id for commit in api.list_repo_commits("org/model")][:2] == [new, old]
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_branch("org/model", branch="main")
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_tag("org/model", tag="v1")
    api.create_branch("org/model", branch="main", exist_ok=True)
    with pytest.raises(BadRequestError):
        api.create_branch("org/model", branch="refs/heads/x")
    api.delete_branch("org/model", branch="dev/one")
    api.delete_tag("org/model", tag="v1")
    assert not api.revision_exists("org/model", "dev/one") and not api.revision_exists("org/model", "v1")


def test_a_resolved_revision_pins_one_commit(hub: HubServer) -> None:
    old = hub.add_repo("org/model", FILES)
    pinned = hub.api().resolve_revision("org/model")
    hub.fault("resolve", times=1, call=lambda _: hub.commit("org/model", {"README.md": "moved on"}))
    assert [download(name, revision=pinned) for name in ("config.json", "README.md")] == [
        b'{"model_type": "llama"}',
        b"# a model\n",
    ]
    assert pinned.resolved == old != hub.head("org/model")
    hub.forget("org/model", old)
    with pytest.raises(RevisionNotFoundError):
        download("sub/dir/notes.txt", revision=pinned)


def test_renamed_repository(hub: HubServer) -> None:
    sha = hub.add_repo("org/model", FILES)
    hub.api().move_repo("org/model", "org/renamed")
    assert hub.api().model_info("org/model").id == "org/renamed"
    assert download("model.safetensors") == WEIGHTS and download("config.json", revision=sha).startswith(b"{")


# Reading


def test_metadata_of_small_and_large_files(hub: HubServer) -> None:
    sha = hub.add_repo("org/model", FILES)
    large = get_hf_file_metadata(hf_hub_url("org/model", "model.safetensors"))
    assert (large.commit_hash, large.etag, large.size) == (sha, hashlib.sha256(WEIGHTS).hexdigest(), len(WEIGHTS))
    assert large.location.startswith(hub.cdn_url) and large.xet_file_data is None
    small = get_hf_file_metadata(hf_hub_url("org/model", "sub/dir/notes.txt"))
    assert (small.commit_hash, small.etag, small.size) == (sha, hashlib.sha1(b"blob 4\0deep").hexdigest(), 4)
    assert small.location.startswith(hub.url)


def test_ranges(hub: HubServer) -> None:
    hub.add_repo("org/model", FILES)
    session = get_session()
    size = len(WEIGHTS)
    for name, whole in (("model.safetensors", WEIGHTS), ("config.json", b'{"model_type": "llama"}')):
        url = hf_hub_url("org/model", name)
        for asked, part in (("0-4", whole[:5]), ("5-", whole[5:]), ("-7", whole[-7:]), ("3-99999999", whole[3:])):
            answer = session.get(url, headers={"Range": f"bytes={asked}", "Authorization": f"Bearer {WRITE}"})
            assert answer.status_code == 206 and answer.content == part
        for asked in ("7-3", "0-1,4-5", "x"):
            assert session.get(url, headers={"Range": f"bytes={asked}"}).content == whole
        beyond = session.get(url, headers={"Range": f"bytes={size}-"})
        assert beyond.status_code == 416 and beyond.headers["content-range"] == f"bytes */{len(whole)}"
        assert session.get(url, headers={"Range": "bytes=0-1", "If-Range": '"other"'}).content == whole
        etag = session.get(url).headers["etag"]
        assert session.get(url, headers={"Range": "bytes=0-1", "If-Range": etag}).content == whole[:2]
        assert session.get(url, headers={"If-None-Match": etag}).status_code == 304


def test_file_system_reads_ranges(hub: HubServer) -> None:
    hub.add_repo("org/model", FILES)
    fs = hub.fs()
    path = "org/model/model.safetensors"
    with fs.open(path, block_size=4096) as file:
        file.seek(1_000_000)
        assert file.read(100) == WEIGHTS[1_000_000:1_000_100]
    assert hub.spans("*.safetensors") == [(1_000_000, 1_004_196)]
    hub.reset()
    with fs.open(path, cache_type="none") as file:
        for at in (7, 2_000_000):
            file.seek(at)
            assert file.read(10) == WEIGHTS[at : at + 10]
    assert hub.spans("*.safetensors") == [(7, 17), (2_000_000, 2_000_010)] and hub.bytes_sent() == 20
    hub.reset()
    assert fs.cat_file(path, start=10, end=20) == WEIGHTS[10:20]
    assert fs.cat_file(path, start=-5) == WEIGHTS[-5:]
    assert hub.bytes_sent() > 2_000_000, "cat_file reads ahead by a block of 5 MiB"
    assert fs.cat_ranges([path, path], [0, 2_999_990], [8, 3_000_000]) == [WEIGHTS[:8], WEIGHTS[-10:]]
    assert fs.cat_file(path) == WEIGHTS
    assert sorted(fs.find("org/model")) == [f"org/model/{name}" for name in sorted(hub.files("org/model"))]
    assert fs.cat_file(f"org/model@{hub.head('org/model')}/config.json") == b'{"model_type": "llama"}'
    with pytest.raises(FileNotFoundError):
        fs.cat_file("org/model/absent")


def test_snapshot(hub: HubServer, tmp_path: Path) -> None:
    sha = hub.add_repo("org/model", FILES)
    folder = Path(snapshot_download("org/model", allow_patterns=["*.json", "sub/*"]))
    assert folder.name == sha and not hub.calls(path="*.safetensors")
    assert (folder / "sub/dir/notes.txt").read_text() == "deep"
    snapshot_download("org/model", local_dir=tmp_path / "copy")
    assert (tmp_path / "copy/model.safetensors").read_bytes() == WEIGHTS
    assert hub.bytes_sent("*.safetensors") == len(WEIGHTS)


# Writing


def test_create_and_delete_a_repository(hub: HubServer) -> None:
    api = hub.api()
    url = api.create_repo("org/new", private=True)
    assert url.repo_id == "org/new" and api.model_info("org/new").private
    assert api.create_repo("org/new", exist_ok=True) == url
    with pytest.raises(HfHubHTTPError, match="already created"):
        api.create_repo("org/new")
    with pytest.raises(HfHubHTTPError, match="rights to create a model under the namespace"):
        api.create_repo("elsewhere/new")
    assert api.create_repo("mine").repo_id == "alice/mine"
    assert api.create_repo("org/data", repo_type="dataset").repo_type == "dataset"
    assert api.repo_exists("org/data", repo_type="dataset") and not api.repo_exists("org/data")
    api.delete_repo("org/new")
    assert not api.repo_exists("org/new")
    with pytest.raises(RepositoryNotFoundError):
        api.delete_repo("org/new")


def test_upload_folder_with_small_lfs_and_multipart_files(hub: HubServer, tmp_path: Path) -> None:
    hub.add_repo("org/model", {"old.safetensors": b"old"})
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    content = {
        "config.json": b"{}",
        "README.md": b"---\nlicense: mit\n---\n",
        "sub/small.safetensors": b"x" * 1000,
        "big.safetensors": WEIGHTS,
        "empty.bin": b"",
        "ignored.log": b"x",
        ".gitignore": b"*.log\n",
    }
    for name, data in content.items():
        (folder / name).write_bytes(data)
    info = hub.api().upload_folder(repo_id="org/model", folder_path=folder, delete_patterns="*.safetensors")
    assert info.oid == hub.head("org/model")
    content.pop("ignored.log")
    assert {name: hub.read("org/model", name) for name in hub.files("org/model") if name != ".gitattributes"} == content
    assert (len(hub.calls("lfs-upload")), len(hub.calls("lfs-part")), len(hub.calls("lfs-complete"))) == (1, 3, 1)
    assert len(hub.calls("lfs-verify")) == 2 and len(hub.calls("commit")) == 1
    hub.reset()
    (folder / "ignored.log").unlink()
    hub.api().upload_folder(repo_id="org/model", folder_path=folder)
    assert not hub.calls("lfs-upload") and not hub.calls("lfs-part") and info.oid == hub.head("org/model")


def test_one_commit_adds_copies_and_deletes(hub: HubServer) -> None:
    hub.add_repo("org/model", FILES | {"b/1.txt": "1", "b/2.txt": "2"})
    operations = [
        CommitOperationAdd("new.safetensors", io.BytesIO(b"from a file object")),
        CommitOperationAdd("config.json", b"changed"),
        CommitOperationCopy("model.safetensors", "copy.safetensors"),
        CommitOperationDelete("model.safetensors"),
        CommitOperationDelete("b/"),
    ]
    parent = hub.head("org/model")
    info = hub.api().create_commit("org/model", operations, commit_message="All at once", parent_commit=parent)
    names = ".gitattributes README.md config.json copy.safetensors new.safetensors sub/dir/notes.txt"
    assert list(hub.files("org/model")) == names.split() and hub.read("org/model", "copy.safetensors") == WEIGHTS
    assert info.commit_url == f"{hub.url}/org/model/commit/{info.oid}" and info.repo_url.repo_id == "org/model"
    absent = [CommitOperationAdd("a.txt", b"a"), CommitOperationDelete("absent.txt")]
    with pytest.raises(RemoteEntryNotFoundError, match="A file with this name doesn't exist"):
        hub.api().create_commit("org/model", absent, commit_message="Cannot be")
    late = [CommitOperationAdd("a.txt", b"a")]
    with pytest.raises(HfHubHTTPError, match="A commit has happened since"):
        hub.api().create_commit("org/model", late, commit_message="Too late", parent_commit=parent)
    assert hub.head("org/model") == info.oid


def test_shards_one_by_one_then_one_commit(hub: HubServer) -> None:
    hub.add_repo("org/model")
    api = hub.api()
    shards = []
    for number in range(3):
        shard = CommitOperationAdd(f"model-{number}.safetensors", bytes([number]) * 1000)
        api.preupload_lfs_files("org/model", [shard])
        assert shard.path_or_fileobj == b""
        shards.append(shard)
    assert list(hub.files("org/model")) == [".gitattributes"] and len(hub.calls("lfs-upload")) == 3
    api.create_commit("org/model", shards, commit_message="Three shards")
    assert hub.read("org/model", "model-2.safetensors") == b"\2" * 1000 and len(hub.calls("lfs-upload")) == 3


PATTERN = bytes(range(251)) * 10_000


class Virtual(io.BufferedIOBase):
    """A file that lies nowhere: its bytes are made when they are read."""

    def __init__(self, size: int) -> None:
        self.size, self.at, self.asked = size, 0, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def read(self, size: int | None = -1) -> bytes:
        count = self.size - self.at if size is None or size < 0 else max(min(size, self.size - self.at), 0)
        data = PATTERN[self.at : self.at + count]
        self.at, self.asked = self.at + count, max(self.asked, count)
        return data


@pytest.mark.parametrize("size", [300_000, 2_300_000], ids=["basic", "multipart"])
def test_upload_of_a_file_that_lies_nowhere(hub: HubServer, size: int) -> None:
    hub.add_repo("org/model")
    virtual = Virtual(size)
    hub.fault("lfs-part", drop_after=100_000, times=1)
    file = cast(BinaryIO, virtual)
    hub.api().upload_file(path_or_fileobj=file, path_in_repo="v.safetensors", repo_id="org/model")
    assert hub.read("org/model", "v.safetensors") == PATTERN[:size]
    assert virtual.asked <= 1 << 20, "read in pieces"


def test_model_card_is_checked(hub: HubServer) -> None:
    hub.add_repo("org/model")

    def upload(card: bytes) -> None:
        hub.api().upload_file(path_or_fileobj=card, path_in_repo="README.md", repo_id="org/model")

    with pytest.warns(UserWarning, match="empty or missing yaml metadata"):
        upload(b"# no head")
    with pytest.raises(ValueError, match=r"Invalid metadata in README\.md"):
        upload(b"---\na: [\n---\n")
    upload(b"---\nlicense: mit\n---\n")


def test_pull_requests(hub: HubServer) -> None:
    main = hub.add_repo("org/model", FILES)
    by_a_stranger = hub.api(STRANGER).upload_file(
        path_or_fileobj=b"proposed", path_in_repo="p.safetensors", repo_id="org/model", create_pr=True
    )
    assert (by_a_stranger.pr_num, by_a_stranger.pr_revision, hub.head("org/model")) == (1, "refs/pr/1", main)
    assert download("p.safetensors", revision="refs/pr/1") == b"proposed"
    assert hub.fs().cat_file("org/model@refs/pr/1/p.safetensors") == b"proposed"
    opened = hub.api().create_pull_request("org/model", title="By hand")
    assert (opened.num, opened.git_reference) == (2, "refs/pr/2")
    hub.api().upload_file(path_or_fileobj=b"2", path_in_repo="2", repo_id="org/model", revision="refs/pr/2")
    refs = hub.api().list_repo_refs("org/model", include_pull_requests=True)
    assert [ref.ref for ref in refs.pull_requests or []] == ["refs/pr/1", "refs/pr/2"]
    hub.api().merge_pull_request("org/model", 1)
    assert hub.read("org/model", "p.safetensors") == b"proposed" and hub.head("org/model") != main


def test_uploads_need_an_existing_branch(hub: HubServer) -> None:
    hub.add_repo("org/model")
    api = hub.api()
    with pytest.raises(RevisionNotFoundError):
        api.upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id="org/model", revision="dev")
    api.create_branch("org/model", branch="dev")
    api.upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id="org/model", revision="dev")
    assert "x" in hub.files("org/model", "dev") and "x" not in hub.files("org/model")
    api.super_squash_history("org/model", branch="dev")
    assert len(api.list_repo_commits("org/model", revision="dev")) == 1 and hub.read("org/model", "x", "dev") == b"x"


# Refusals


def test_what_is_not_there(hub: HubServer) -> None:
    hub.add_repo("org/model", FILES)
    hub.add_repo("org/private", FILES, private=True)
    for token in (STRANGER, False):
        for name in ("org/private", "org/absent"):
            with pytest.raises(RepositoryNotFoundError) as caught:
                hub.api(token).model_info(name)
            assert caught.value.response.status_code == (404 if token else 401)
            with pytest.raises(RepositoryNotFoundError):
                download("config.json", name, token=token)
    assert download("config.json", "org/private", token=READ).startswith(b"{")
    with pytest.raises(RevisionNotFoundError):
        download("config.json", revision="absent")
    with pytest.raises(RemoteEntryNotFoundError):
        download("absent.json")
    with pytest.raises(HfHubHTTPError, match="Invalid credentials in Authorization header") as invalid:
        hub.api(INVALID).model_info("org/model")
    assert not isinstance(invalid.value, RepositoryNotFoundError)


def test_gated(hub: HubServer) -> None:
    hub.add_repo("org/gated", FILES, gated="manual")
    for token, words in ((STRANGER, "not in the authorized list"), (False, "Please log in")):
        assert hub.api(token).model_info("org/gated").gated == "manual"
        assert len(list(hub.api(token).list_repo_tree("org/gated"))) == 5
        with pytest.raises(GatedRepoError, match=words):
            download("config.json", "org/gated", token=token)
        with pytest.raises(GatedRepoError, match=words):
            hub.api(token).auth_check("org/gated")
        with pytest.raises(GatedRepoError):
            hub.fs(token).cat_file("org/gated/model.safetensors", start=0, end=8)
    hub.repo("org/gated").granted.add("mallory")
    assert download("config.json", "org/gated", token=STRANGER).startswith(b"{")


def test_who_may_write(hub: HubServer) -> None:
    sha = hub.add_repo("org/model", FILES)
    for token, words in ((READ, "you must use a write token"), (STRANGER, "create a Pull Request"), (False, "401")):
        with pytest.raises(HfHubHTTPError, match=words):
            hub.api(token).upload_file(path_or_fileobj=b"x", path_in_repo="x.bin", repo_id="org/model")
        with pytest.raises(HfHubHTTPError):
            hub.api(token).auth_check("org/model", write=True)
    hub.api().auth_check("org/model", write=True)
    assert hub.head("org/model") == sha and not hub.calls("lfs-*")


def test_quota(hub: HubServer) -> None:
    hub.add_repo("org/model")
    hub.quota = 1000
    with pytest.raises(HfHubHTTPError, match="storage limit reached"):
        hub.api().upload_file(path_or_fileobj=b"x" * 2000, path_in_repo="x.bin", repo_id="org/model")


# Faults


def test_download_goes_on_where_the_connection_ended(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 65536)
    hub.add_repo("org/model", FILES)
    drop = hub.fault("cdn", "*.safetensors", drop_after=1_000_000, times=1)
    assert download("model.safetensors") == WEIGHTS and drop.fired == 1
    first, second = hub.calls("cdn")
    assert first.sent == 1_000_000 and second.asked is not None and second.status == 206
    assert hub.spans("model.safetensors") == [(0, len(WEIGHTS))]
    assert hub.bytes_sent("model.safetensors") < len(WEIGHTS) + 65536


def test_connections_end_politely_or_not(hub: HubServer) -> None:
    hub.add_repo("org/model", FILES)
    location = get_hf_file_metadata(hf_hub_url("org/model", "model.safetensors")).location
    for reset, error in ((False, httpx2.RemoteProtocolError), (True, httpx2.ReadError)):
        hub.fault("cdn", drop_after=500_000, reset=reset, times=1)
        with pytest.raises(error):
            get_session().get(location)


def test_the_client_waits_and_tries_again(hub: HubServer) -> None:
    hub.add_repo("org/model", FILES)
    hub.fault("tree", status=429, retry_after=0, times=1)
    hub.fault("cdn", status=503, times=1)
    assert len(list(hub.api().list_repo_tree("org/model"))) == 5
    assert hub.fs().cat_file("org/model/model.safetensors", start=0, end=3) == WEIGHTS[:3]
    assert [call.status for call in hub.calls("tree")][:2] == [429, 200]
    assert [call.status for call in hub.calls("cdn")] == [503, 206]


def test_errors_say_what_the_server_said(hub: HubServer) -> None:
    hub.add_repo("org/model", FILES)
    for status, message in ((429, "too fast"), (500, "a bad day"), (403, "out of storage")):
        hub.clear_faults()
        hub.fault("info", status=status, message=message, retry_after=7)
        with pytest.raises(HfHubHTTPError, match=message) as caught:
            hub.api().model_info("org/model")
        assert caught.value.response.status_code == status and caught.value.request_id
        if status == 429:
            assert "Retry after 7 seconds" in str(caught.value)


def test_which_requests_are_hit(hub: HubServer) -> None:
    hub.add_repo("org/model", FILES)
    hub.fault("info", status=403, every=3)
    hub.fault("refs", status=403, after=1, times=2)
    for ask in (hub.api().model_info, hub.api().list_repo_refs):
        for _ in range(6):
            with contextlib.suppress(HfHubHTTPError):
                ask("org/model")
    assert [call.status for call in hub.calls("info")] == [200, 200, 403] * 2
    assert [call.status for call in hub.calls("refs")] == [200, 403, 403, 200, 200, 200]


def test_third_upload_fails_and_nothing_changes(hub: HubServer) -> None:
    sha = hub.add_repo("org/model", FILES)
    shards = [CommitOperationAdd(f"{number}.bin", bytes([number]) * 500) for number in range(5)]
    hub.fault("lfs-upload", after=2, times=1, status=403, message="no")
    with pytest.raises(RuntimeError, match="Error while uploading"):
        hub.api().create_commit("org/model", shards, commit_message="Shards", num_threads=1)
    assert hub.head("org/model") == sha
    hub.api().create_commit("org/model", shards, commit_message="Shards", num_threads=1)
    stored = [call.path for call in hub.calls("lfs-upload") if call.status == 200]
    assert len(stored) == len(set(stored)) == 5, "what had arrived was sent again"


def test_upload_that_is_cut_is_sent_again(hub: HubServer) -> None:
    hub.add_repo("org/model")
    hub.fault("lfs-part", drop_after=300_000, times=1)
    hub.api().upload_file(path_or_fileobj=WEIGHTS, path_in_repo="w.safetensors", repo_id="org/model")
    assert hub.read("org/model", "w.safetensors") == WEIGHTS and len(hub.calls("lfs-part")) == 4


def test_commit_that_was_made_though_nobody_heard(hub: HubServer) -> None:
    sha = hub.add_repo("org/model")
    hub.fault("commit", lose_reply=True, times=1)
    with pytest.raises(httpx2.RemoteProtocolError):
        hub.api().upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id="org/model")
    assert hub.head("org/model") != sha and hub.read("org/model", "x") == b"x"


def test_what_ranges_may_meet(hub: HubServer) -> None:
    hub.add_repo("org/model", FILES)
    session, url = get_session(), hf_hub_url("org/model", "model.safetensors")
    ask = {"Range": "bytes=10-19"}
    hub.fault("cdn", ignore_range=True, times=1)
    whole = session.get(url, headers=ask)
    assert whole.status_code == 200 and whole.content == WEIGHTS
    hub.fault("cdn", corrupt_at=12, times=1)
    spoilt = session.get(url, headers=ask).content
    assert spoilt != WEIGHTS[10:20] and spoilt[:2] == WEIGHTS[10:12] and spoilt[3:] == WEIGHTS[13:20]
    hub.fault("file", gzip=True, times=1)
    packed = session.get(hf_hub_url("org/model", "config.json"), headers=ask)
    assert packed.status_code == 200 and packed.headers["content-encoding"] == "gzip"
    assert packed.content == b'{"model_type": "llama"}'
    hub.url_lifetime = -1
    with pytest.raises(HfHubHTTPError, match="Request has expired"):
        hf_raise_for_status(session.get(url, headers=ask))
    hub.url_lifetime = 60
    old = session.head(url, follow_redirects=False).headers["x-linked-etag"]
    hub.tamper("org/model", "model.safetensors", b"other")
    assert session.head(url, follow_redirects=False).headers["x-linked-etag"] != old
    refused = httpx2.get(hub.cdn_url + "/cdn/models/org/model/abc?path=x&expires=9e9&signature=0")
    assert refused.status_code == 403


def test_slow_bodies(hub: HubServer) -> None:
    hub.add_repo("org/model", {"slow.bin": b"x" * 10_000})
    hub.fault("cdn", rate=20_000)
    location = get_hf_file_metadata(hf_hub_url("org/model", "slow.bin")).location
    started = httpx2.get(location)
    assert len(started.content) == 10_000 and started.elapsed.total_seconds() > 0.4
    hub.clear_faults()
    hub.fault("cdn", delay=1.0)
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.get(location, timeout=0.1)


def test_tokens_that_reach_the_cdn_are_noticed(tmp_path: Path) -> None:
    with HubServer(tmp_path / "hub") as hub:
        hub.add_repo("org/model", FILES)
        answer = httpx2.get(hub.url + "/org/model/resolve/main/model.safetensors")
        told = httpx2.get(answer.headers["location"], headers={"Authorization": f"Bearer {WRITE}"})
        assert told.status_code == 400 and len(hub.leaks) == 1


def test_offline(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_repo("org/model", FILES)
    cached = download("config.json")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.reset()
    assert download("config.json") == cached
    with pytest.raises(OfflineModeIsEnabled):
        hub.api().model_info("org/model")
    with pytest.raises(LocalEntryNotFoundError):
        download("README.md")
    assert not hub.calls()


# Other processes


def hf(hub: HubServer, *arguments: str | Path) -> str:
    command = [str(Path(sys.executable).parent / "hf"), *map(str, arguments)]
    done = subprocess.run(command, env=hub.env(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_command_line(hub: HubServer, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(WEIGHTS)
    hf(hub, "upload", "org/cli", source, "--private", "--commit-message", "By hand")
    assert hub.repo("org/cli").private and hub.read("org/cli", "model.safetensors") == WEIGHTS
    hf(hub, "download", "org/cli", "--local-dir", target)
    assert (target / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.calls("cdn")[-1].user is None and hub.calls("resolve")[-1].user == "alice"


def test_a_client_that_is_killed(hub: HubServer) -> None:
    sha = hub.add_repo("org/model", FILES)
    code = (
        "from huggingface_hub import HfApi, hf_hub_download\n"
        "hf_hub_download('org/model', 'config.json')\n"
        "HfApi().upload_file(path_or_fileobj=b'x' * 1000000, path_in_repo='x.bin', repo_id='org/model')"
    )
    with subprocess.Popen([sys.executable, "-c", code], env=hub.env()) as client:
        hub.fault("lfs-upload", rate=50_000)
        hub.fault("lfs-upload", call=lambda _: threading.Timer(0.3, client.kill).start())
        assert client.wait(timeout=60) == -signal.SIGKILL
    assert hub.head("org/model") == sha and 0 < hub.calls("lfs-upload")[0].received < 1_000_000
    hub.clear_faults()
    subprocess.run([sys.executable, "-c", code], env=hub.env(), check=True, timeout=60)
    assert hub.read("org/model", "x.bin") == b"x" * 1_000_000


def test_as_a_program(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/a.bin").write_bytes(WEIGHTS)
    command = [sys.executable, str(Path(__file__).with_name("hub_server.py")), str(tmp_path / "hub")]
    command += ["--model", f"org/m={tmp_path / 'm'}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["HF_ENDPOINT"]
        answer = httpx2.get(f"{url}/org/m/resolve/main/a.bin", follow_redirects=True)
        server.communicate()
    assert answer.content == WEIGHTS and server.returncode == 0
