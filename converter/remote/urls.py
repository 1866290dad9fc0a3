"""What a user may write where a path is wanted, when it lies elsewhere. Pure text: nothing is asked of anybody."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from ..errors import ConfigError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?://(?!/)|/(?=[^/]))")
"""`hf://`, and `hf:/`, which is what `Path` makes of it. One letter is a drive, not a scheme."""

_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_TYPES = {"models": "model", "datasets": "dataset", "spaces": "space"}
_SPECIAL = re.compile(r"refs/(?:pr/\d+|convert/[^/]+)")
"""Revisions that have slashes of their own, as the Hub makes them; a branch with slashes is written `a%2Fb`."""


def is_remote(text: str | Path) -> bool:
    """Whether a text names a place elsewhere rather than a path. `file://` does not.

    >>> is_remote("hf://org/name"), is_remote(Path("s3://bucket/dir")), is_remote("org/name"), is_remote("C:/x")
    (True, True, False, False)
    """
    found = _SCHEME.match(str(text))
    return found is not None and found[1].lower() not in ("file", "local")


def url_of(text: str | Path) -> str:
    """The URL as it was meant, though a `Path` may have eaten one of its slashes, without a slash at its end."""
    text = str(text)
    found = _SCHEME.match(text)
    if found is None:
        raise ConfigError(f"{text!r} is no URL.", hint="hf://org/name, s3://bucket/directory, https://…")
    return f"{found[1].lower()}://{text[found.end() :].rstrip('/')}"


def scheme_of(url: str) -> str:
    """`hf`, `s3`, …"""
    return url.partition("://")[0]


@dataclass(frozen=True, slots=True)
class HubUrl:
    """A repository on the Hub, a revision of it (None: its main branch), and a directory or file below it."""

    repo: str
    revision: str | None = None
    path: str = ""
    kind: str = "model"

    def __str__(self) -> str:
        """As one writes it. A revision's slashes are escaped unless the Hub made them."""
        prefix = "" if self.kind == "model" else f"{self.kind}s/"
        revision = self.revision or ""
        if not _SPECIAL.fullmatch(revision):
            revision = quote(revision, safe="")
        return (
            f"hf://{prefix}{self.repo}" + (f"@{revision}" if revision else "") + (f"/{self.path}" if self.path else "")
        )


def parse_hub(text: str | Path, revision: str | None = None) -> HubUrl:
    """A repository's address: `hf://org/name[@revision][/path]`, or without `hf://` (for `pull` and `push`).

    Raises ConfigError for what is none, and when two revisions are given.

    >>> parse_hub("hf://org/name@refs/pr/3/sub/dir")
    HubUrl(repo='org/name', revision='refs/pr/3', path='sub/dir', kind='model')
    >>> str(parse_hub("org/name", "v1"))
    'hf://org/name@v1'
    """
    inside = re.sub(r"^hf:/{1,2}", "", str(text)).strip("/")
    kind = "model"
    head, _, rest = inside.partition("/")
    if head in _TYPES and rest:
        kind, inside = _TYPES[head], rest
    before, at, after = inside.partition("@")
    if at:
        repo, (said, path) = before, _revision(after)
    else:
        parts = inside.split("/")
        repo, said, path = "/".join(parts[:2]), None, "/".join(parts[2:])
    names = repo.split("/")
    if not 1 <= len(names) <= 2 or not all(map(_REPO.fullmatch, names)) or (at and not said) or ".." in path.split("/"):
        raise ConfigError(
            f"{str(text)!r} is no repository on the Hub.",
            hint="Write hf://org/name, hf://org/name@revision or hf://org/name@revision/directory.",
        )
    if said and revision and said != revision:
        raise ConfigError(f"{text} says the revision {said!r}, --revision says {revision!r}.", hint="Give one of them.")
    return HubUrl(repo, said or revision, path, kind)


_COMMIT = re.compile(r"[0-9a-f]{40}")


def as_begun(text: str | Path, begun: str | None) -> str | Path:
    """What to go on with: `text`, or the commit of it that was begun with, though its branch has moved since.

    >>> as_begun("hf://org/name@main", "hf://org/name@" + "a" * 40)[-3:]
    'aaa'
    """
    if begun is None or not is_remote(text) or {scheme_of(url_of(text)), scheme_of(begun)} != {"hf"}:
        return text
    now, then = parse_hub(url_of(text)), parse_hub(begun)
    same = (now.repo, now.kind, now.path) == (then.repo, then.kind, then.path)
    return begun if same and not _COMMIT.fullmatch(now.revision or "") else text


def _revision(text: str) -> tuple[str, str]:
    """What stands behind the `@`: the revision, and the path below it."""
    special = _SPECIAL.match(text)
    revision = special[0] if special else text.partition("/")[0]
    return unquote(revision), text[len(revision) :].strip("/")
