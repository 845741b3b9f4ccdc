"""Every test runs offline with an empty Hugging Face cache, and with threads that do not spin."""

import os
import tempfile

# Read by the libraries at import, so before any of them is imported.
_CACHE = tempfile.mkdtemp(prefix="vit-scratch-hf-")
os.environ.update(
    HF_HOME=_CACHE,
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_XET="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_WAIT_POLICY="PASSIVE",
    MPLBACKEND="Agg",
)

import shutil  # noqa: E402

import pytest  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _empty_cache():
    yield
    shutil.rmtree(_CACHE, ignore_errors=True)
