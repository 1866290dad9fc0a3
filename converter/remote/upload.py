"""Writing to a repository on the Hub: who may, which branch, upload of a file, one commit, a look at the result.

Nothing here knows what a model is. Only `create_commit` is used, with the parent pinned: it happens or it does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import TargetError, Unreachable, VerifyError
from .fetch import Fetcher, pause, retried
from .hub_store import hub_api
from .remote_tree import Committed, Meant, Place, RemoteFile, Uploaded, faults
from .store import open_hub
from .upload_errors import LOGIN, explained, may_pass, passing, root_cause, status_of, wait_of
from .urls import HubUrl

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

BATCH = 100
"""Objects in one question whether they are there."""

COMMITS = 4
"""Attempts at the commit. Its parent is pinned, so that it cannot happen twice."""


@contextmanager
def quiet() -> Iterator[None]:
    """Without huggingface_hub's own bars, which would be drawn across ours."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


class Repo:
    """One repository, and the right to write to it."""

    def __init__(self, repo: str, token: str | None = None) -> None:
        self.repo, self.token = repo, token

    @cached_property
    def api(self) -> HfApi:
        return hub_api(self.token)

    def _ask(self, doing: str, action: Any, *, begun: bool = False) -> Any:
        """A call that huggingface_hub makes once only: again when it may pass."""

        def attempt() -> Any:
            with passing():
                return action()

        with explained(self.repo, doing, begun=begun):
            try:
                return retried(attempt, about=f"{self.repo}: {doing}")
            except Unreachable as error:
                raise root_cause(error) from None

    # ---- before anything is read

    def look(self, branch: str | None, *, create_branch: bool, create_pr: bool, private: bool) -> Place:
        """Who pushes, whether he may, and where to. Raises TargetError; changes nothing."""
        user, spaces = self._who()
        info = self._info(spaces, create_pr)
        if info is None and branch not in (None, "main") and not create_branch:
            raise TargetError(
                f"{self.repo} does not exist, and so has no branch {branch!r}.",
                hint=f"Pass --branch {branch} to have both made.",
            )
        if info is None:
            return Place(self.repo, branch or "main", user, private=private, new_branch=branch not in (None, "main"))
        if private and not info.private:
            raise TargetError(
                f"{self.repo} exists and is public; --private is for a repository that a push creates.",
                hint=f"Make it private in its settings on the Hub ({self.api.endpoint}/{self.repo}/settings) first.",
            )
        self._may_write(create_pr)
        name, head, new = self._branch(branch or "main", create_branch, create_pr)
        return Place(self.repo, name, user, head, new, create_pr, bool(info.private), self.tree(head))

    def _who(self) -> tuple[str, set[str]]:
        """The user, and the namespaces that are his. Raises TargetError without a token that may write."""
        from huggingface_hub import constants, get_token

        if constants.HF_HUB_OFFLINE:
            raise TargetError(
                f"{self.repo} cannot be pushed to: offline mode is on.", hint="Unset HF_HUB_OFFLINE to push."
            )
        if not (self.token or get_token()):
            raise TargetError(f"{self.repo}: pushing needs a token, and there is none.", hint=LOGIN)
        me = self._ask("asking who we are", lambda: self.api.whoami())
        access = me.get("auth", {}).get("accessToken") or {}
        if access.get("role") == "read":
            raise TargetError(
                f"{self.repo}: the token {access.get('displayName', '')!r} of {me['name']} is read-only.",
                hint="Use a token with the role `write`, from https://huggingface.co/settings/tokens.",
            )
        return me["name"], {me["name"], *(org["name"] for org in me.get("orgs", ()))}

    def _info(self, spaces: set[str], create_pr: bool) -> Any:
        """The repository's facts, or None where the push may create it."""
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        def ask() -> Any:
            try:
                return self.api.model_info(self.repo, timeout=30)
            except GatedRepoError:
                raise
            except RepositoryNotFoundError:
                return None

        info = self._ask("looking it up", ask)
        space = self.repo.partition("/")[0]
        if info is None and (create_pr or space not in spaces):
            why = "a pull request needs one that is there" if space in spaces else f"{space!r} is not one of yours"
            raise TargetError(
                f"{self.repo} does not exist, or is private and this user does not see it; creating it: {why}.",
                hint=f"Namespaces that you may push to: {', '.join(sorted(spaces))}. Check the name and the token.",
            )
        return info

    def _may_write(self, create_pr: bool) -> None:
        """Ask for the right to write, where the library can; to propose, the right to read."""
        import inspect

        check = getattr(self.api, "auth_check", None)
        if check is None:
            return
        if not create_pr and "write" in inspect.signature(check).parameters:
            self._ask("asking for the right to write", lambda: check(self.repo, write=True))
        else:
            self._ask("asking for the right to read", lambda: check(self.repo))

    def _branch(self, branch: str, create: bool, create_pr: bool) -> tuple[str, str, bool]:
        """The branch, the commit at its head (or that it will start from), and whether it is still to be made."""
        if create_pr and branch != "main":
            raise TargetError(f"A pull request to {branch}: the Hub takes them for main only.", hint="Drop --revision.")
        prs = branch.startswith("refs/pr/")
        refs = self._ask("listing its branches", lambda: self.api.list_repo_refs(self.repo, include_pull_requests=prs))
        heads = {ref.name: ref.target_commit for ref in refs.branches}
        heads |= {ref.ref: ref.target_commit for ref in (refs.pull_requests or ())} if prs else {}
        if branch in heads:
            return branch, heads[branch], False
        tags = {ref.name for ref in refs.tags}
        known = f"Branches: {', '.join(sorted(heads))}."
        if branch in tags or prs or not create:
            what = "is a tag, to which nothing can be pushed" if branch in tags else "does not exist"
            hint = known if branch in tags or prs else f"{known} Pass --branch {branch} to have it created."
            raise TargetError(f"{self.repo}: the branch {branch!r} {what}.", hint=hint)
        return branch, heads["main"], True

    def tree(self, revision: str) -> dict[str, RemoteFile]:
        """Every file of a commit."""

        def ask() -> dict[str, RemoteFile]:
            listed = self.api.list_repo_tree(self.repo, recursive=True, revision=revision)
            found: dict[str, RemoteFile] = {}
            for entry in listed:
                if hasattr(entry, "blob_id"):
                    file: Any = entry
                    found[file.path] = RemoteFile(file.size, file.blob_id, file.lfs.sha256 if file.lfs else None)
            return found

        return self._ask("listing its files", ask)

    def text(self, path: str, revision: str) -> str:
        """A small file, as text."""
        store = open_hub(HubUrl(self.repo, revision), token=self.token)
        return bytes(Fetcher(store).read(path, 0, store.entries()[path].size)).decode("utf-8", "replace")

    # ---- uploading

    def create(self, place: Place) -> Place:
        """Make the repository where there is none yet; the place with a commit to build upon."""
        if place.head is not None:
            return place
        with explained(self.repo, "creating it", begun=False):
            self.api.create_repo(self.repo, private=place.private or None)
        made = self.look(place.branch, create_branch=True, create_pr=False, private=place.private)
        return made

    def present(self, files: Iterable[Uploaded], place: Place) -> set[str]:
        """Paths of those files whose content the Hub still has."""
        from huggingface_hub.lfs import UploadInfo, post_lfs_batch_info

        wanted, found = list(files), set[str]()
        for start in range(0, len(wanted), BATCH):
            chunk = wanted[start : start + BATCH]
            infos = [UploadInfo(size=f.size, sample=f.sample, sha256=bytes.fromhex(f.sha256)) for f in chunk]
            with explained(self.repo, "asking what has arrived"):
                actions, errors, _ = post_lfs_batch_info(
                    infos, self.token, "model", self.repo, endpoint=self.api.endpoint
                )
            missing = {a["oid"] for a in actions if a.get("actions")} | {e.get("oid") for e in errors}
            found |= {f.path for f in chunk if f.sha256 not in missing}
        return found

    def known(self, file: Uploaded, place: Place) -> CommitOperationAdd:
        """The operation for a file that has arrived, without its bytes.

        huggingface_hub has no public way to say so; these fields have been the same since 0.26, and a test watches.
        """
        from huggingface_hub import CommitOperationAdd
        from huggingface_hub.lfs import UploadInfo

        op = CommitOperationAdd(file.path, b"")
        op.upload_info = UploadInfo(size=file.size, sample=file.sample, sha256=bytes.fromhex(file.sha256))
        op._upload_mode, op._should_ignore, op._is_uploaded = "lfs", False, True
        there = place.files.get(file.path)
        op._remote_oid = there.sha256 if there is not None else None
        return op

    def upload(self, ops: list[CommitOperationAdd], place: Place) -> None:
        """Send the contents that go to LFS; what goes into the commit itself stays with its operation."""
        # A branch that is still to be made does not matter here: contents belong to the repository.
        revision = "main" if place.new_branch else place.branch
        with explained(self.repo, f"uploading {ops[0].path_in_repo}"):
            self.api.preupload_lfs_files(
                self.repo, ops, revision=revision, create_pr=place.create_pr, free_memory=False
            )
        ignored = [op.path_in_repo for op in ops if op._should_ignore]
        if ignored:
            raise TargetError(
                f"{self.repo}: its .gitignore excludes {', '.join(ignored[:5])}, so that the commit would lack them. "
                "Nothing was committed.",
                hint="Mend the .gitignore there first.",
            )

    # ---- the commit

    def commit(
        self, place: Place, ops: list[CommitOperationAdd], delete: Iterable[str], message: str, description: str
    ) -> Committed:
        """One commit on top of the pinned head, or an error and no commit. An answer that gets lost is looked for."""
        from huggingface_hub import CommitOperationDelete

        assert place.head is not None
        deleted = sorted(delete)
        meant = {op.path_in_repo: meant_by(op) for op in ops}
        before = self._pull_requests() if place.create_pr else set[str]()
        if place.new_branch:
            head = place.head
            self._ask(
                "creating the branch",
                lambda: self.api.create_branch(self.repo, branch=place.branch, revision=head, exist_ok=True),
                begun=True,
            )
        for attempt in range(COMMITS):
            try:
                made = self.api.create_commit(
                    self.repo,
                    [*ops, *(CommitOperationDelete(path, is_folder=False) for path in deleted)],
                    commit_message=message,
                    commit_description=description,
                    revision=place.branch,
                    create_pr=place.create_pr,
                    parent_commit=place.head,
                )
            except Exception as error:
                if not (may_pass(error) or status_of(error) == 412):
                    self._refuse(error)
                found = self._find(place, meant, deleted, before)
                if found is not None:
                    return found
                # A pull request has no place of its own by which a second one would be refused.
                safe = status_of(error) == 429 if place.create_pr else status_of(error) != 412
                if not safe or attempt + 1 == COMMITS:
                    self._refuse(error)
                pause(attempt + 1, wait_of(error))
            else:
                return Committed(made.oid, made.commit_url, made.pr_url, made.pr_revision)
        raise AssertionError

    def _refuse(self, error: Exception) -> None:
        with explained(self.repo, "the commit"):
            raise error

    def _find(
        self, place: Place, meant: Mapping[str, Meant], deleted: Iterable[str], before: set[str]
    ) -> Committed | None:
        """The commit that an answer got lost of: at the branch's head, or a pull request that was not there before."""
        refs = sorted(self._pull_requests() - before) if place.create_pr else [place.branch]
        for ref in refs:
            info = self._ask(
                "looking at its head", lambda ref=ref: self.api.model_info(self.repo, revision=ref), begun=True
            )
            if info.sha != place.head and not faults(self.tree(info.sha), meant, deleted):
                page = f"{self.api.endpoint}/{self.repo}"
                number = ref.rpartition("/")[2]
                pr = f"{page}/discussions/{number}" if place.create_pr else None
                return Committed(info.sha, f"{page}/commit/{info.sha}", pr, ref if place.create_pr else None)
        return None

    def _pull_requests(self) -> set[str]:
        refs = self._ask(
            "listing pull requests", lambda: self.api.list_repo_refs(self.repo, include_pull_requests=True), begun=True
        )
        return {ref.ref for ref in refs.pull_requests or ()}

    def verify(self, made: Committed, place: Place, meant: Mapping[str, Meant], deleted: Iterable[str]) -> None:
        """Raise VerifyError unless the commit holds exactly what was meant, and all else as it was before."""
        found = self.tree(made.oid)
        problems = faults(found, meant, deleted)
        for path, file in place.files.items():
            if path not in meant and path not in set(deleted) and found.get(path) != file:
                problems.add(path, "was not part of the push, and is another than before")
        problems.raise_as(
            VerifyError, f"{made.url} is not what was meant:", hint="Revert it on the Hub; please report this."
        )


def meant_by(op: CommitOperationAdd) -> Meant:
    """What an operation will leave at the Hub."""
    from huggingface_hub.utils.sha import git_hash

    info = op.upload_info
    oid = None
    if op._upload_mode != "lfs":
        with op.as_file() as file:
            oid = git_hash(file.read())
    return Meant(info.size, bytes(info.sha256).hex(), oid)
