"""A run folder onto the Hub: staged, proven to load, uploaded as one commit, pulled again and verified."""

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import RepositoryNotFoundError

from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError

from .card import DEFAULT_LICENSE
from .eval_results import benchmark_results
from .golden import GOLDEN_NAME
from .hub_errors import TOKEN_HINT, check_repo_id, hub_requests
from .manifest import MANIFEST_NAME, read_manifest
from .run_facts import RunFacts, read_run_facts
from .stage import PublishedBefore, stage
from .verify import Verification, load_in_fresh_process, verify

__all__ = ["PushResult", "push"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PushResult:
    folder: Path
    """The staging folder."""
    repo_id: str
    commit: str | None
    """Hash of the revision that holds the run; None for a dry run."""
    url: str | None
    verification: Verification | None
    """What pulling that revision into an empty cache showed; None for a dry run."""


@dataclass(frozen=True)
class _Target:
    """The repository as it is before the push."""

    repo_id: str
    head: str | None
    """Commit of its main branch; None where the repository does not exist."""
    before: PublishedBefore
    ours: frozenset[str]
    """Files that our previous push put there and that are still there."""

    @property
    def state(self) -> str:
        return f"the repository is as it was, at {self.head}" if self.head else "nothing was created on the Hub"


def push(
    run_folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    dry_run: bool = False,
    token: str | None = None,
    output: str | Path | None = None,
    license: str = DEFAULT_LICENSE,
) -> PushResult:
    """Returns the staging folder and the verified commit.

    Args:
        run_folder: What `pretrain` or `finetune` left.
        repo_id: owner/name; a name alone goes to the token's owner.
        private: Creates the repository private. An existing public one is refused then.
        dry_run: Does everything but the requests: stages, loads in a fresh process, checks the card.
        token: A write token; None: the one of HF_TOKEN or `hf auth login`.
        output: The staging folder; None: `hub` in the run folder.
        license: Identifier of the weights' licence, for a card that has none yet.

    Raises:
        InputError: Name, token, permission or run folder are at fault. The repository is as it was.
        EnvironmentFault: Disk, network or server failed. The message tells the repository's state.
    """
    check_repo_id(repo_id)
    facts = read_run_facts(Path(run_folder))
    folder = Path(output) if output else facts.folder / "hub"
    if dry_run:
        stage(facts.folder, folder, repo_id=repo_id, base_model=facts.possible_base_model, license=license)
        load_in_fresh_process(folder, folder / GOLDEN_NAME)
        return PushResult(folder, repo_id, None, None, None)
    return _publish(facts, folder, repo_id, private, license, token or get_token())


def _publish(
    facts: RunFacts, folder: Path, repo_id: str, private: bool, license: str, token: str | None
) -> PushResult:
    if token is None:
        raise InputError(f"{repo_id}: no token to push with; {TOKEN_HINT}")
    api = HfApi(token=token)
    with hub_requests(repo_id, lambda: "nothing was changed on the Hub"):
        target = _inspect_target(api, repo_id, private)
        base_model = _confirmed_base_model(api, facts)
        results = benchmark_results(facts, api)
    stage(
        facts.folder,
        folder,
        repo_id=target.repo_id,
        base_model=base_model,
        eval_results=results,
        before=target.before,
        license=license,
    )
    load_in_fresh_process(folder, folder / GOLDEN_NAME)
    commit = _upload(api, target, folder, private)
    logger.info("pushed %s as %s", target.repo_id, commit)
    verification = _verify_arrival(target.repo_id, commit, token)
    return PushResult(folder, target.repo_id, commit, f"{api.endpoint}/{target.repo_id}/tree/{commit}", verification)


def _inspect_target(api: HfApi, repo_id: str, private: bool) -> _Target:
    """Returns the repository as it is, after refusing what the token may not do: before any byte is uploaded."""
    user = api.whoami()
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise InputError(f"{repo_id}: the token of {user['name']} is read-only; use one with write permission")
    repo_id = repo_id if "/" in repo_id else f"{user['name']}/{repo_id}"
    try:
        info = api.model_info(repo_id)
    except RepositoryNotFoundError as error:
        owner = repo_id.split("/")[0]
        owners = [user["name"], *(organisation["name"] for organisation in user.get("orgs", []))]
        if owner not in owners:
            raise InputError(
                f"{repo_id}: {user['name']} may not create a repository for {owner}; "
                f"use {' or '.join(owners)} as owner"
            ) from error
        return _Target(repo_id, None, PublishedBefore(), frozenset())
    api.auth_check(repo_id, write=True)
    if private and not info.private:
        raise InputError(
            f"{repo_id}: exists and is public; make it private in its settings first, or leave out private"
        )
    assert info.sha is not None  # the Hub names it for every repository that exists
    return _what_is_there(api, repo_id, info.sha, {file.rfilename for file in info.siblings or []})


def _what_is_there(api: HfApi, repo_id: str, head: str, paths: set[str]) -> _Target:
    with tempfile.TemporaryDirectory(prefix="vit-scratch-before-") as cache:

        def fetch(path: str) -> Path:
            return Path(api.hf_hub_download(repo_id, path, revision=head, cache_dir=cache))

        try:
            # Bytes, since reading as text would turn its \r\n into \n.
            card = fetch("README.md").read_bytes().decode("utf-8") if "README.md" in paths else None
        except UnicodeDecodeError as error:
            raise InputError(f"{repo_id}: its README.md is not UTF-8 ({error}); save it as UTF-8 there") from error
        if MANIFEST_NAME not in paths:
            return _Target(repo_id, head, PublishedBefore(card), frozenset())
        try:
            manifest = read_manifest(fetch(MANIFEST_NAME).parent)
        except InputError as error:
            raise InputError(f"{repo_id}: its {MANIFEST_NAME} was not written by a push; rename it there") from error
    before = PublishedBefore(card, manifest.get("card_metadata", {}))
    return _Target(repo_id, head, before, frozenset(manifest["files"]) & paths)


def _confirmed_base_model(api: HfApi, facts: RunFacts) -> str | None:
    """A path such as runs/pretrain looks like a Hub id: only a model that is there is named as the base."""
    if facts.possible_base_model is None:
        return None
    try:
        return api.model_info(facts.possible_base_model).id
    except RepositoryNotFoundError:
        return None


def _upload(api: HfApi, target: _Target, folder: Path, private: bool) -> str:
    """Returns the commit that holds everything in `folder`, without those files of our previous push it replaces."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in sorted(files.items())
    ]
    operations += [CommitOperationDelete(path_in_repo=name) for name in sorted(target.ours - set(files))]
    parent = target.head
    if parent is None:
        with hub_requests(target.repo_id, lambda: target.state):
            api.create_repo(target.repo_id, private=private, exist_ok=True)
    with hub_requests(target.repo_id, lambda: _state_after_failure(api, target, parent)):
        parent = parent or api.model_info(target.repo_id).sha
        return api.create_commit(
            target.repo_id,
            operations,
            commit_message="Publish a vit-scratch run",
            parent_commit=parent,
        ).oid


def _state_after_failure(api: HfApi, target: _Target, parent: str | None) -> str:
    """What the repository holds after a failed commit: its answer may have been lost on the way back."""
    try:
        head = api.model_info(target.repo_id).sha
    except Exception:
        return (
            "its state could not be read: a commit is there whole or not at all, "
            f"`vit-scratch verify {target.repo_id}` tells which once the Hub answers"
        )
    if parent is not None and head != parent:
        return f"it holds a newer commit, {head}: `vit-scratch verify {target.repo_id}` tells whether it is this push"
    return target.state if target.head else f"the new repository {target.repo_id} is empty and stays for the next push"


def _verify_arrival(repo_id: str, commit: str, token: str) -> Verification:
    try:
        return verify(repo_id, revision=commit, token=token)
    except (InputError, EnvironmentFault) as error:
        raise EnvironmentFault(
            f"{repo_id}: pushed as {commit}, but checking what arrived failed: {error}; "
            f"try `vit-scratch verify {repo_id} --revision {commit}`"
        ) from error
