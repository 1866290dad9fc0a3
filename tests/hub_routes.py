"""The reading half of the Hub's API: who, what, which revision, which files and where they lie. `find` is the door."""

from __future__ import annotations

import hashlib
from typing import Any
from urllib.parse import quote, unquote, urlencode

import yaml

import hub_writes
from hub_access import identify, readable, writable
from hub_bucket import signed
from hub_call import TYPES, Call, Reply, Route, file_reply, json_reply, nowhere, unquoted
from hub_store import Blob, Commit, Files, HubError, Repo, iso, tree_oid, walk


def find(call: Call) -> tuple[str, Route]:
    """What a request is for; fills in the repository, revision and path that it names."""
    match [call.method, *call.segments]:
        case ["GET", "api", "whoami-v2"]:
            return "whoami", whoami
        case ["GET", "api", "agent-harnesses"]:
            return "other", lambda _: json_reply({"standardEnvVars": [], "harnesses": {}})
        case ["POST", "api", "validate-yaml"]:
            return "validate-yaml", validate_yaml
        case ["POST", "api", "repos", "create"]:
            return "create-repo", hub_writes.create_repo
        case ["DELETE", "api", "repos", "delete"]:
            return "delete-repo", hub_writes.delete_repo
        case ["POST", "api", "repos", "move"]:
            return "move-repo", hub_writes.move_repo
        case ["POST", "api", "complete_multipart"]:
            return "lfs-complete", hub_writes.complete_multipart
        case ["GET" | "HEAD", "api", "resolve-cache", plural, space, name, *rest] if plural in TYPES:
            _names(call, TYPES[plural], space, name, rest)
            return "file", small_file
        case [_, "api", plural, space, name, *rest] if plural in TYPES:
            _names(call, TYPES[plural], space, name)
            return _repo_route(call, rest)
        case ["GET" | "HEAD", ("datasets" | "spaces") as plural, space, name, "resolve", *rest]:
            _names(call, TYPES[plural], space, name, rest)
            return "resolve", resolve
        case ["GET" | "HEAD", space, name, "resolve", *rest]:
            _names(call, "model", space, name, rest)
            return "resolve", resolve
        case ["POST", *before, space, name, "info", "lfs", "objects", ("batch" | "verify") as step]:
            plural = before[0] if before else "models"
            _names(call, TYPES.get(plural, "model"), space, name.removesuffix(".git"))
            return f"lfs-{step}", hub_writes.lfs_batch if step == "batch" else hub_writes.lfs_verify
        case _:
            return "unknown", nowhere


def _repo_route(call: Call, rest: list[str]) -> tuple[str, Route]:
    match [call.method, *rest]:
        case ["GET"]:
            return "info", info
        case ["GET", "revision", *revision]:
            _revision(call, revision)
            return "info", info
        case ["GET", "tree", *rest]:
            _revision(call, rest)
            return "tree", tree
        case ["POST", "paths-info", *rest]:
            _revision(call, rest)
            return "paths-info", paths_info
        case ["GET", "refs"]:
            return "refs", refs
        case ["GET", "commits", *rest]:
            _revision(call, rest)
            return "commits", commits
        case ["GET", "auth-check", *write]:
            return "auth-check", auth_check_write if write else auth_check
        case ["GET", ("xet-read-token" | "xet-write-token") as step, *_]:
            return step, no_xet
        case _:
            return hub_writes.find(call, rest)


def _names(call: Call, kind: str, space: str, name: str, rest: list[str] | None = None) -> None:
    call.repo_type, call.repo_id = kind, f"{unquote(space)}/{unquote(name)}"
    if rest is not None:
        _revision(call, rest)


def _revision(call: Call, rest: list[str]) -> None:
    """A revision and a path; the revision is one quoted segment, or `refs/…/…` spelt out."""
    length = 3 if rest and rest[0] == "refs" else 1
    call.revision, call.path = unquoted(rest[:length]), unquoted(rest[length:])


def whoami(call: Call) -> Reply:
    token = identify(call)
    if token is None:
        raise HubError(401, "Invalid username or password.")
    organisations = [{"type": "org", "id": name, "name": name, "roleInOrg": "admin"} for name in sorted(token.spaces)]
    access = {"displayName": "tests", "role": token.role, "createdAt": "2026-01-01T00:00:00.000Z"}
    return json_reply(
        {
            "type": "user",
            "id": hashlib.md5(token.name.encode(), usedforsecurity=False).hexdigest()[:24],
            "name": token.name,
            "fullname": token.name.title(),
            "email": f"{token.name}@example.com",
            "emailVerified": True,
            "isPro": False,
            "canPay": False,
            "orgs": organisations,
            "auth": {"type": "access_token", "accessToken": access},
        }
    )


def validate_yaml(call: Call) -> Reply:
    """The head of a model card: absent is a warning, broken is an error."""
    content = str(call.json()["content"])
    head = content.split("---", 2)[1] if content.startswith("---") and content.count("---") > 1 else ""
    try:
        metadata = yaml.safe_load(head)
    except yaml.YAMLError as error:
        return json_reply({"errors": [{"message": str(error)}], "warnings": []}, 400)
    missing = {"message": "empty or missing yaml metadata in repo card"}
    return json_reply({"errors": [], "warnings": [] if isinstance(metadata, dict) else [missing]})


def auth_check(call: Call) -> Reply:
    readable(call, content=True)
    return json_reply({})


def auth_check_write(call: Call) -> Reply:
    writable(call)
    return json_reply({})


def no_xet(call: Call) -> Reply:
    raise HubError(404, "This Hub stores nothing in Xet: set HF_HUB_DISABLE_XET=1")


def info(call: Call) -> Reply:
    repo = readable(call)
    commit = repo.resolve(call.revision or "main")
    facts = _facts(repo, commit, blobs=call.flag("blobs"))
    wanted = call.query.get("expand", []) + call.query.get("expand[]", [])
    unknown = [name for name in wanted if name not in facts]
    if unknown:
        raise HubError(400, f"Invalid option: expected one of {'|'.join(sorted(facts))}, received {unknown[0]}")
    return json_reply({name: facts[name] for name in ["_id", "id", *wanted]} if wanted else facts)


def _facts(repo: Repo, commit: Commit, blobs: bool) -> dict[str, Any]:
    return {
        "_id": hashlib.md5(repo.api.encode(), usedforsecurity=False).hexdigest()[:24],
        "id": repo.id,
        "modelId": repo.id,
        "author": repo.id.split("/")[0],
        "sha": commit.oid,
        "lastModified": iso(commit.date),
        "createdAt": iso(repo.created),
        "private": repo.private,
        "gated": repo.gated,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
        "usedStorage": repo.used(),
        "xetEnabled": False,
        "siblings": [_sibling(path, blob, blobs) for path, blob in commit.files.items()],
    }


def _sibling(path: str, blob: Blob, blobs: bool) -> dict[str, Any]:
    if not blobs:
        return {"rfilename": path}
    lfs = {"sha256": blob.sha256, "size": blob.size, "pointerSize": blob.pointer_size}
    return {"rfilename": path, "size": blob.size, "blobId": blob.oid} | ({"lfs": lfs} if blob.lfs else {})


def tree(call: Call) -> Reply:
    """Pages of entries; the next one is named by a Link header, as on the Hub."""
    hub = call.hub
    repo = readable(call)
    commit = repo.resolve(call.revision)
    folder, expand = call.path.strip("/"), call.flag("expand")
    if folder and not any(path.startswith(folder + "/") for path in commit.files):
        where = {"X-Repo-Commit": commit.oid}
        raise HubError(404, f"{folder} does not exist on {call.revision!r}", "EntryNotFound", where)
    paths = list(walk(commit.files, folder, call.flag("recursive")))
    limit = min(int(call.text("limit", "1000")), hub.page_size if not expand else min(hub.page_size, 50))
    start = int(call.text("cursor", "0"))
    headers = {}
    if start + limit < len(paths):
        query = urlencode({"recursive": call.text("recursive"), "expand": call.text("expand"), "cursor": start + limit})
        headers["Link"] = f'<{hub.url}/{"/".join(call.segments)}?{query}>; rel="next"'
    page = paths[start : start + limit]
    return json_reply([_entry(repo, commit, path, expand) for path in page], headers=headers)


def paths_info(call: Call) -> Reply:
    repo = readable(call)
    commit = repo.resolve(call.revision)
    form = call.form()
    expand = form.get("expand", [""])[0].lower() in ("1", "true")
    folders = {folder for path in commit.files for folder in _parents(path)}
    wanted = [path.strip("/") for path in form.get("paths", [])]
    return json_reply(
        [_entry(repo, commit, path, expand) for path in wanted if path in commit.files or path in folders]
    )


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _entry(repo: Repo, commit: Commit, path: str, expand: bool) -> dict[str, Any]:
    files: Files = commit.files
    entry: dict[str, Any]
    if path in files:
        blob = files[path]
        entry = {"type": "file", "oid": blob.oid, "size": blob.size, "path": path}
        if blob.lfs:
            entry["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": blob.pointer_size}
    else:
        entry = {"type": "directory", "oid": tree_oid(files, path), "size": 0, "path": path}
    if expand:
        last = repo.last_change(commit, path)
        entry["lastCommit"] = {"id": last.oid, "title": last.title, "date": iso(last.date)}
        if path in files:
            entry["securityFileStatus"] = {"status": "safe", "avScan": None, "pickleImportScan": None}
    return entry


def refs(call: Call) -> Reply:
    repo = readable(call)

    def listed(prefix: str, refs: dict[Any, str]) -> list[dict[str, str]]:
        return [{"name": str(name), "ref": f"{prefix}{name}", "targetCommit": oid} for name, oid in refs.items()]

    answer: dict[str, Any] = {"branches": listed("refs/heads/", repo.branches), "converts": []}
    answer["tags"] = listed("refs/tags/", repo.tags)
    if call.flag("include_prs"):
        answer["pullRequests"] = listed("refs/pr/", repo.pulls)
    return json_reply(answer)


def commits(call: Call) -> Reply:
    repo = readable(call)
    return json_reply(
        [
            {
                "id": commit.oid,
                "title": commit.title,
                "message": commit.body,
                "authors": [{"user": commit.author}],
                "date": iso(commit.date),
            }
            for commit in repo.history(repo.resolve(call.revision))
        ]
    )


def _located(call: Call) -> tuple[Repo, Commit, Blob]:
    """The file that a resolve URL means, if the caller may read it."""
    repo = readable(call, content=True)
    commit = repo.resolve(call.revision)
    if call.path not in commit.files:
        raise HubError(404, "Entry not found", "EntryNotFound", {"X-Repo-Commit": commit.oid})
    return repo, commit, commit.files[call.path]


def resolve(call: Call) -> Reply:
    """Never the bytes: LFS files lie at the CDN, under a signed address, and small ones behind the Hub's own cache."""
    repo, commit, blob = _located(call)
    name = quote(f"{commit.oid}/{call.path}")
    headers = {"X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
    if not blob.lfs:
        seen = urlencode({f"/{'/'.join(call.segments)}": "", "etag": f'"{blob.oid}"'})
        headers["Location"] = f"/api/resolve-cache/{repo.api}/{name}?{seen}"
        return Reply(307, f"Temporary Redirect. Redirecting to {headers['Location']}".encode(), headers)
    headers |= {"X-Linked-Size": str(blob.size), "X-Linked-ETag": f'"{blob.etag}"'}
    headers["Location"] = signed(call, f"cdn/{repo.api}/{blob.sha256}", path=call.path, commit=commit.oid)
    return Reply(302, f"Found. Redirecting to {headers['Location']}".encode(), headers)


def small_file(call: Call) -> Reply:
    _, commit, blob = _located(call)
    kind = "application/json" if call.path.endswith(".json") else "text/plain; charset=utf-8"
    disposition = f'inline; filename="{call.path.rsplit("/", 1)[-1]}";'
    headers = {"X-Repo-Commit": commit.oid, "Content-Type": kind, "Content-Disposition": disposition}
    return file_reply(call, call.hub.store.path(blob.sha256), blob.size, blob.etag, headers)
