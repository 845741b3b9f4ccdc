"""Failures of the Hub's client as our two kinds: the caller's (name, token, permission), and the environment's."""

import contextlib
import json
from collections.abc import Callable, Iterator

from huggingface_hub import get_session
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError

__all__ = ["TOKEN_HINT", "check_repo_id", "hub_requests", "translate"]

# Without a byte for this long a connection counts as dead. The client itself would wait for ever.
REQUEST_TIMEOUT_SECONDS = 120.0

TOKEN_HINT = "log in with `hf auth login`, or set HF_TOKEN to a token from the Hub's settings"


def check_repo_id(repo_id: str) -> None:
    """Raises InputError where the Hub would not take `repo_id` as a name."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"repo_id={repo_id!r} is not a name the Hub takes ({reason}); use owner/name") from error


@contextlib.contextmanager
def hub_requests(repo_id: str, state: Callable[[], str] | None = None) -> Iterator[None]:
    """Turns failed requests in the block into InputError or EnvironmentFault; `state` ends the message.

    For the time of the block the client's shared session has a timeout, where it has none of its own.
    """
    session = get_session()
    before = session.timeout
    if before.read is None:
        session.timeout = REQUEST_TIMEOUT_SECONDS
    try:
        yield
    except (InputError, EnvironmentFault):
        raise
    except Exception as error:
        fault = translate(error, repo_id)
        if fault is None:
            raise
        raise (type(fault)(f"{fault}; {state()}") if state else fault) from error
    finally:
        session.timeout = before


def translate(error: Exception, repo_id: str) -> InputError | EnvironmentFault | None:
    """Returns the failure of a request about `repo_id` as one of our two kinds; None where it is neither."""
    # A failed LFS upload comes wrapped in a RuntimeError, a failed download in LocalEntryNotFoundError.
    wrapped = error.__cause__ if isinstance(error, RuntimeError | LocalEntryNotFoundError) else None
    if isinstance(wrapped, HTTPError | OfflineModeIsEnabled):
        error = wrapped
    if isinstance(error, OfflineModeIsEnabled):
        return InputError(f"{repo_id}: HF_HUB_OFFLINE is set, so the Hub is not asked; unset it and try again")
    if isinstance(error, LocalTokenNotFoundError):
        return InputError(f"{repo_id}: no token; {TOKEN_HINT}")
    if isinstance(error, HfHubHTTPError):
        return _translate_status(error, repo_id)
    if isinstance(error, ValueError) and isinstance(error.__cause__, HfHubHTTPError):
        reason = " ".join(str(error).split())
        return InputError(f"{repo_id}: the Hub refused the model card ({reason}); correct README.md there")
    if isinstance(error, json.JSONDecodeError):
        return EnvironmentFault(f"{repo_id}: the Hub answered with something that is no JSON; try again later")
    if isinstance(error, OSError) and error.strerror and not isinstance(error, HTTPError | ConnectionError):
        return EnvironmentFault(
            f"{repo_id}: {error.strerror} ({error.filename}); make room or mend permissions, and try again"
        )
    if isinstance(error, HTTPError | OSError | RuntimeError):  # RuntimeError is what the xet transfer raises
        reason = " ".join(str(error).split()) or type(error).__name__
        return EnvironmentFault(f"{repo_id}: the Hub could not be reached ({reason}); check the network and try again")
    return None


def _translate_status(error: HfHubHTTPError, repo_id: str) -> InputError | EnvironmentFault:
    status, said = error.response.status_code, " ".join((error.server_message or "").split())
    answered = f"{repo_id}: the Hub answered {status}" + (f" ({said})" if said else "")
    if isinstance(error, RevisionNotFoundError):
        return InputError(f"{repo_id}: no such revision; name a branch, a tag or a whole commit hash")
    if isinstance(error, RepositoryNotFoundError):
        return InputError(f"{repo_id}: no such repository, or a private one this token may not read; {TOKEN_HINT}")
    if status == 401:
        return InputError(f"{answered}: the token is not valid; {TOKEN_HINT}")
    if status in (402, 403):
        return InputError(f"{answered}: this token may not write there; use a write token of the repository's owner")
    if status in (409, 412):
        return EnvironmentFault(f"{answered}: somebody else changed the repository meanwhile; push again")
    if status in (408, 429) or status >= 500:
        return EnvironmentFault(f"{answered}; try again later")
    return InputError(f"{answered}; correct what it names and try again")
