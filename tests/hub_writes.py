"""The writing half of the Hub's API: repositories, refs, pull requests, LFS uploads and commits."""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from hub_access import identify, readable, who, with_write_token, writable
from hub_bucket import signed
from hub_call import TYPES, Call, Reply, Route, json_reply, nowhere, unquoted
from hub_store import Blob, HubError, Repo, apply, ignored, iso, make_commit, tracked_by_lfs


def find(call: Call, rest: list[str]) -> tuple[str, Route]:
    match [call.method, *rest]:
        case ["POST", "preupload", *revision]:
            call.revision = unquoted(revision)
            return "preupload", preupload
        case ["POST", "commit", *revision]:
            call.revision = unquoted(revision)
            return "commit", commit
        case [("POST" | "DELETE") as method, "branch", *name]:
            call.revision = unquoted(name)
            return "branch", create_branch if method == "POST" else delete_branch
        case [("POST" | "DELETE") as method, "tag", *name]:
            call.revision = unquoted(name)
            return "tag", create_tag if method == "POST" else delete_tag
        case ["POST", "super-squash", *name]:
            call.revision = unquoted(name)
            return "squash", squash
        case ["PUT", "settings"]:
            return "settings", settings
        case ["POST", "discussions"]:
            return "discussion", open_discussion
        case ["GET", "discussions", number]:
            return "discussion", partial(show_discussion, number=int(number))
        case ["POST", "discussions", number, "merge"]:
            return "discussion", partial(merge, number=int(number))
        case _:
            return "unknown", nowhere


# Repositories and refs


def create_repo(call: Call) -> Reply:
    hub, wish = call.hub, call.json()
    token = identify(call)
    if token is None:
        raise HubError(401, "Invalid username or password.")
    kind = wish.get("type") or "model"
    space = wish.get("organization") or token.name
    if not token.may_write(space):
        raise HubError(403, f'You don\'t have the rights to create a {kind} under the namespace "{space}"')
    name = f"{space}/{wish['name']}"
    url = hub.web(name, kind)
    with hub.lock:
        if (kind, name) in hub.repos:
            raise HubError(409, f"You already created this {kind} repo: {name}", body={"url": url})
        private = wish.get("visibility") == "private" or bool(wish.get("private"))
        hub.add_repo(name, repo_type=kind, private=private, members={token.name})
    return json_reply({"url": url, "name": name, "id": name})


def _named(call: Call, name: str, kind: str | None) -> Repo:
    call.repo_id, call.repo_type = name, kind or "model"
    return writable(call)


def delete_repo(call: Call) -> Reply:
    wish, token = call.json(), identify(call)
    space = wish.get("organization") or (token.name if token else "")
    repo = _named(call, f"{space}/{wish['name']}", wish.get("type"))
    with call.hub.lock:
        del call.hub.repos[repo.type, repo.id]
    return json_reply({})


def move_repo(call: Call) -> Reply:
    """The old name stays as a redirection."""
    wish = call.json()
    repo = _named(call, wish["fromRepo"], wish.get("type"))
    call.hub.rename(repo.id, wish["toRepo"], repo.type)
    return json_reply({"url": call.hub.web(repo.id, repo.type)})


def settings(call: Call) -> Reply:
    repo, wish = writable(call), call.json()
    repo.private = wish["visibility"] == "private" if "visibility" in wish else wish.get("private", repo.private)
    repo.gated = wish.get("gated", repo.gated)
    return json_reply({"private": repo.private, "gated": repo.gated})


def create_branch(call: Call) -> Reply:
    repo, wish = writable(call), call.json()
    if call.revision.startswith("refs/"):
        raise HubError(400, f"Invalid reference for a branch: refs/heads/{call.revision}")
    with call.hub.lock:
        if call.revision in repo.branches and not wish.get("overwrite"):
            raise HubError(409, f"Reference already exists: refs/heads/{call.revision}")
        repo.branches[call.revision] = repo.resolve(wish.get("startingPoint") or "main").oid
    return json_reply({})


def delete_branch(call: Call) -> Reply:
    repo = writable(call)
    if call.revision == "main":
        raise HubError(403, "Cannot delete refs/heads/main: protected reference")
    if repo.branches.pop(call.revision, None) is None:
        raise HubError(404, f"Invalid rev id: {call.revision}", "RevisionNotFound")
    return json_reply({})


def create_tag(call: Call) -> Reply:
    repo, wish = writable(call), call.json()
    with call.hub.lock:
        if wish["tag"] in repo.tags:
            raise HubError(409, f"Tag reference exists already: refs/tags/{wish['tag']}")
        repo.tags[wish["tag"]] = repo.resolve(call.revision).oid
    return json_reply({})


def delete_tag(call: Call) -> Reply:
    if writable(call).tags.pop(call.revision, None) is None:
        raise HubError(404, f"Invalid rev id: {call.revision}", "RevisionNotFound")
    return json_reply({})


def squash(call: Call) -> Reply:
    """One commit instead of the history; the commits before it are gone."""
    repo, wish = writable(call), call.json()
    if call.revision not in repo.branches:
        raise HubError(404, f"Invalid rev id: {call.revision}", "RevisionNotFound")
    with call.hub.lock:
        head = repo.resolve(call.revision)
        gone = {earlier.oid for earlier in repo.history(head)}
        kept = make_commit(None, head.files, wish.get("message") or "Super-squash", "", who(call))
        repo.commits = {oid: entry for oid, entry in repo.commits.items() if oid not in gone} | {kept.oid: kept}
        repo.branches[call.revision] = kept.oid
    return json_reply({})


# Pull requests


def open_discussion(call: Call) -> Reply:
    hub, wish = call.hub, call.json()
    repo, token = readable(call), identify(call)
    if token is None:
        raise HubError(401, "Invalid username or password.")
    with hub.lock:
        pull_request = bool(wish.get("pullRequest"))
        opened = repo.new_discussion(wish["title"], wish.get("description", ""), token.name, pull_request)
        if pull_request:
            repo.pulls[opened.num] = repo.branches["main"]
    url = f"{hub.web(repo.id, repo.type)}/discussions/{opened.num}"
    return json_reply({"num": opened.num, "url": url, "pullRequest": pull_request})


def show_discussion(call: Call, number: int) -> Reply:
    repo = readable(call)
    if number not in repo.discussions:
        raise HubError(404, f"Discussion not found: {number}")
    found = repo.discussions[number]
    facts: dict[str, Any] = {
        "num": found.num,
        "title": found.title,
        "author": {"name": found.author},
        "createdAt": iso(found.created),
        "status": found.status,
        "repo": {"name": repo.id, "type": repo.type},
        "isPullRequest": found.pull_request,
        "events": [],
    }
    if found.pull_request:
        facts |= {"changes": {"base": f"refs/heads/{found.base}"}, "filesWithConflicts": [], "diff": ""}
    return json_reply(facts)


def merge(call: Call, number: int) -> Reply:
    repo = writable(call)
    if number not in repo.pulls:
        raise HubError(404, f"Pull request not found: {number}")
    with call.hub.lock:
        found = repo.discussions[number]
        repo.commit(found.base, repo.resolve(f"refs/pr/{number}").files, f"{found.title} (#{number})")
        found.status = "merged"
    return json_reply({})


# Uploads


def _for_upload(call: Call, create_pr: bool) -> Repo:
    """Whoever may read may propose; to write one must be a member."""
    if not create_pr:
        return writable(call)
    repo = readable(call)
    with_write_token(call)
    return repo


def preupload(call: Call) -> Reply:
    """Which files go to LFS, which are ignored, and what stands under their names now."""
    hub, wish = call.hub, call.json()
    repo = _for_upload(call, call.flag("create_pr"))
    base = repo.resolve(call.revision)
    attributes = _content(call, base.files.get(".gitattributes"))
    gitignore = wish.get("gitIgnore") or _content(call, base.files.get(".gitignore")).decode()
    answers = []
    for file in wish["files"]:
        binary = b"\0" in base64.b64decode(file["sample"])
        lfs = tracked_by_lfs(attributes, file["path"]) or binary or file["size"] > hub.lfs_threshold
        blob = base.files.get(file["path"])
        answer = {"path": file["path"], "uploadMode": "lfs" if lfs else "regular"}
        answer["shouldIgnore"] = ignored(gitignore, file["path"])
        answers.append(answer | ({"oid": blob.etag} if blob else {}))
    return json_reply({"files": answers, "commitOid": base.oid})


def _content(call: Call, blob: Blob | None) -> bytes:
    return call.hub.store.read(blob.sha256) if blob else b""


def lfs_batch(call: Call) -> Reply:
    hub, wish = call.hub, call.json()
    token = with_write_token(call)
    repo = readable(call)
    if "ref" in wish and token.name not in repo.members:
        raise HubError(403, "Authorization error.")
    fresh = {item["oid"]: item["size"] for item in wish["objects"] if item["oid"] not in repo.lfs}
    if hub.quota is not None and repo.used() + sum(fresh.values()) > hub.quota:
        limit = (
            "Private repository storage limit reached, please upgrade your plan to increase your private storage limit."
        )
        raise HubError(403, limit)
    multipart = "multipart" in wish.get("transfers", [])
    objects = [_upload(call, repo, item, multipart) for item in wish["objects"]]
    several = any("chunk_size" in item.get("actions", {}).get("upload", {}).get("header", {}) for item in objects)
    headers = {"Content-Type": "application/vnd.git-lfs+json"}
    return json_reply({"transfer": "multipart" if several else "basic", "objects": objects}, headers=headers)


def _upload(call: Call, repo: Repo, item: dict[str, Any], multipart: bool) -> dict[str, Any]:
    """Nothing to do for what is here; else where to put it, in one piece or in several."""
    hub, oid, size = call.hub, item["oid"], item["size"]
    answer: dict[str, Any] = {"oid": oid, "size": size, "authenticated": True}
    if repo.lfs.get(oid) == size:
        return answer
    where = f"upload/{repo.api}/{oid}"
    verify = {"href": f"{hub.url}/{repo.url}.git/info/lfs/objects/verify", "header": {}}
    if not multipart or size <= hub.multipart_threshold:
        upload = {"href": signed(call, where, size=str(size)), "header": {}}
        return answer | {"actions": {"upload": upload, "verify": verify}, "expires_in": 900}
    upload_id = uuid.uuid4().hex
    hub.uploads[upload_id] = {}
    header = {"chunk_size": str(hub.part_size)}
    for part in range(1, -(-size // hub.part_size) + 1):
        header[f"{part:05d}"] = signed(call, f"{where}/{part}", upload_id=upload_id)
    href = f"{hub.url}/api/complete_multipart?uploadId={upload_id}&repo={repo.api}"
    return answer | {"actions": {"upload": {"href": href, "header": header}, "verify": verify}, "expires_in": 900}


def complete_multipart(call: Call) -> Reply:
    """The parts become one object, if they are all there and are what was announced."""
    hub, wish = call.hub, call.json()
    parts = hub.uploads.get(call.text("uploadId"), {})
    listed = {part["partNumber"]: part["etag"].strip('"') for part in wish["parts"]}
    if not parts or listed != {number: etag for number, (etag, _) in parts.items()}:
        raise HubError(400, "One or more of the specified parts could not be found or its ETag does not match")
    with hub.store.scratch() as scratch:
        digest = hashlib.sha256()
        with scratch.open("wb") as file:
            for number in sorted(parts):
                data = hub.store.read(parts[number][1])
                file.write(data)
                digest.update(data)
        if digest.hexdigest() != wish["oid"]:
            raise HubError(400, "The uploaded content does not have the announced sha256")
        size = scratch.stat().st_size
        hub.store.adopt(scratch, wish["oid"])
    kind, _, name = call.text("repo").partition("/")
    with hub.lock:
        hub.repos[TYPES[kind], name].lfs[wish["oid"]] = size
        del hub.uploads[call.text("uploadId")]
    return json_reply({"success": True})


def lfs_verify(call: Call) -> Reply:
    wish, repo = call.json(), readable(call)
    if repo.lfs.get(wish["oid"]) != wish["size"]:
        raise HubError(404, "Object does not exist or has another size")
    return json_reply({})


# Commits

Change = Callable[[dict[str, Blob]], None]


def commit(call: Call) -> Reply:
    """All lines of the request, or none of them."""
    hub, create_pr = call.hub, call.flag("create_pr")
    repo = _for_upload(call, create_pr)
    lines = [json.loads(line) for line in call.incoming.read().splitlines() if line.strip()]
    header = next(line["value"] for line in lines if line["key"] == "header")
    title, body, parent = header["summary"], header.get("description", ""), header.get("parentCommit")
    with hub.lock:
        if call.revision in repo.tags or repo.ref(call.revision) is None:
            raise HubError(404, f"Invalid rev id: {call.revision}", "RevisionNotFound")
        base = repo.resolve(parent if parent and create_pr else call.revision)
        if parent and not base.oid.startswith(parent.lower()):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        changes = [_change(call, repo, line["key"], line["value"]) for line in lines if line["key"] != "header"]
        files = apply(base.files, changes)
        answer: dict[str, Any] = {"success": True, "hookOutput": ""}
        ref = call.revision
        if create_pr:
            opened = repo.new_discussion(title, body, who(call), pull_request=True)
            opened.base, ref = call.revision, f"refs/pr/{opened.num}"
            repo.pulls[opened.num] = base.oid
            answer["pullRequestUrl"] = f"{hub.web(repo.id, repo.type)}/discussions/{opened.num}"
        made = repo.commit(ref, files, title, body, who(call))
    url = f"{hub.web(repo.id, repo.type)}/commit/{made.oid}"
    return json_reply(answer | {"commitOid": made.oid, "commitUrl": url})


def _change(call: Call, repo: Repo, key: str, value: dict[str, Any]) -> Change:
    path = value["path"].strip("/")
    if key == "file":
        content = base64.b64decode(value["content"])
        if len(content) > call.hub.lfs_threshold:
            raise HubError(400, f"{path} is larger than {call.hub.lfs_threshold} bytes: use LFS")
        blob = call.hub.store.blob(content, lfs=False)
        return lambda files: files.__setitem__(path, blob)
    if key == "lfsFile":
        size = repo.lfs.get(value["oid"])
        if size is None or size != value.get("size", size):
            raise HubError(400, f"{path}: the LFS pointer pointed to a file that does not exist")
        blob = call.hub.store.known(value["oid"], size, lfs=True)
        return lambda files: files.__setitem__(path, blob)
    if key in ("deletedFile", "deletedFolder"):
        return partial(_delete, path=path, folder=key == "deletedFolder")
    raise HubError(400, f"Unexpected key {key!r}")


def _delete(files: dict[str, Blob], path: str, folder: bool) -> None:
    gone = [name for name in files if (name.startswith(path + "/") if folder else name == path)]
    if not gone:
        what = "folder" if folder else "file"
        raise HubError(404, f"A {what} with this name doesn't exist: {path}", "EntryNotFound")
    for name in gone:
        del files[name]
