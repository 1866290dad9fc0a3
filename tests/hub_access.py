"""Who may do what at the Hub of the tests, and in which words it refuses."""

from __future__ import annotations

from typing import NoReturn

from hub_call import Call
from hub_state import Token
from hub_store import HubError, Repo


def identify(call: Call) -> Token | None:
    given = call.request.token
    if given is not None and given not in call.hub.tokens:
        raise HubError(401, "Invalid credentials in Authorization header")
    return call.hub.tokens[given] if given else None


def who(call: Call) -> str:
    token = identify(call)
    return token.name if token else "anonymous"


def readable(call: Call, content: bool = False) -> Repo:
    """The repository, if the caller may see it; with `content`, if he may read its files."""
    token = identify(call)
    key = (call.repo_type, call.repo_id)
    if key in call.hub.moved:
        _moved(call, call.hub.moved[key])
    repo = call.hub.repos.get(key)
    name = token.name if token else None
    if repo is None or (repo.private and name not in repo.members):
        if token is None:
            raise HubError(401, "Invalid username or password.", "RepoNotFound")
        raise HubError(404, "Repository not found", "RepoNotFound")
    if content and repo.gated and name not in repo.members | repo.granted:
        _gated(call, repo, name)
    return repo


def _moved(call: Call, new: str) -> NoReturn:
    where = "/" + "/".join(call.segments).replace(call.repo_id, new, 1)
    where += f"?{call.raw_query}" if call.raw_query else ""
    raise HubError(307, f"Moved to {new}", headers={"Location": where})


def _gated(call: Call, repo: Repo, name: str | None) -> NoReturn:
    what = f"Access to {repo.type} {repo.id} is restricted"
    if name is None:
        message = f"{what}. You must have access to it and be authenticated to access it. Please log in."
        raise HubError(401, message, "GatedRepo")
    where = call.hub.web(repo.id, repo.type)
    message = f"{what} and you are not in the authorized list. Visit {where} to ask for access."
    raise HubError(403, message, "GatedRepo")


def with_write_token(call: Call) -> Token:
    token = identify(call)
    if token is None:
        raise HubError(401, "Invalid username or password.", "RepoNotFound")
    if token.role != "write":
        raise HubError(403, "you must use a write token to upload to a repository.")
    return token


def writable(call: Call) -> Repo:
    repo = readable(call)
    if with_write_token(call).name not in repo.members:
        raise HubError(403, "Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request")
    return repo
