"""A user's process, with nothing but its environment to tell it where the Hub is."""

import os
import subprocess
import sys
from pathlib import Path

from hub_server import HubServer


def run_online(code: str, hub: HubServer, home: Path, token: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `code` as a user's process would: everything from the environment, with its own empty caches."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_TOKEN": token} if token else {}
    home.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=home, capture_output=True, text=True, timeout=280
    )
