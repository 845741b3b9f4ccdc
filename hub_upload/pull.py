"""A revision of a Hub repository, downloaded into a cache of one's own."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi

from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError

from .hub_errors import check_repo_id, hub_requests

__all__ = ["PulledRevision", "pull"]


@dataclass(frozen=True)
class PulledRevision:
    folder: Path
    """The snapshot in the cache."""
    commit: str
    """Its commit hash."""


def pull(
    repo_id: str, cache_dir: str | Path, *, revision: str | None = None, token: str | None = None
) -> PulledRevision:
    """Returns where the files of a revision lie below `cache_dir`, after downloading what is not there yet.

    Raises InputError for a name, revision or token the Hub refuses, EnvironmentFault where server or network fail.
    """
    check_repo_id(repo_id)
    api = HfApi(token=token)
    with hub_requests(repo_id):
        # Resolved first: two requests for a branch that moves in between would mix two revisions.
        commit = api.model_info(repo_id, revision=revision).sha
        folder = api.snapshot_download(repo_id, revision=commit, cache_dir=cache_dir)
    if not isinstance(commit, str):
        raise EnvironmentFault(
            f"{repo_id}: the Hub names no commit for revision {revision or 'main'}; try again later"
        )
    if not any(Path(folder).iterdir()):
        raise InputError(f"{repo_id}: revision {revision or 'main'} holds no files; push a run folder to it")
    return PulledRevision(Path(folder), commit)
