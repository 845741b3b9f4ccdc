"""A run folder of the test's own, and a Hub on loopback."""

import importlib
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from hub_run_folder import make_run_folder
from hub_server import OTHER, OWNER, READER, HubServer, User
from huggingface_hub import constants

push_module, verify_module = (importlib.import_module(f"hub_upload.{name}") for name in ("push", "verify"))


@pytest.fixture(scope="session")
def _made_run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run_folder(tmp_path_factory.mktemp("runs") / "digits")


@pytest.fixture
def run_folder(_made_run_folder: Path, tmp_path: Path) -> Path:
    """A run folder of the test's own."""
    return Path(shutil.copytree(_made_run_folder, tmp_path / "runs" / "digits"))


@pytest.fixture
def hub(tmp_path: Path):
    with HubServer(
        tmp_path / "hub", {OWNER: User("alice"), READER: User("alice", "read"), OTHER: User("bob")}
    ) as server:
        yield server


@pytest.fixture
def online(hub: HubServer, monkeypatch: pytest.MonkeyPatch):
    """The test process itself talks to the server: the client has read its environment at import, offline."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    # The client retries for half a minute; the tests don't wait.
    monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", lambda seconds: None)
    return hub


@pytest.fixture
def uploading(online, monkeypatch):
    """The server, for tests whose claim is what it holds: loading in fresh processes has tests of its own."""
    for module in (push_module, verify_module):
        monkeypatch.setattr(module, "load_in_fresh_process", lambda *arguments: {"max_logit_difference": 0.0})
    return online


@pytest.fixture
def published(uploading, run_folder):
    """The repository after one push."""
    return push_module.push(run_folder, "alice/digits", token=OWNER)
