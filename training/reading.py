"""What goes wrong while a checkpoint is read, said in one line that names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors import SafetensorError

from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError

__all__ = ["reading"]

Loaded = TypeVar("Loaded")


def reading(load: Callable[[], Loaded], source: str) -> Loaded:
    """Returns what `load` does; what the Hub and the disk raise becomes an error that names the source."""
    try:
        return load()
    except SafetensorError as error:
        raise InputError(f"{source}: its weights are damaged ({error}); get them again") from error
    except ImportError as error:  # a package that config.json asks for, such as kernels
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise EnvironmentFault(f"{source} needs a package that is not here: {reason}") from error
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        reason = str(error).splitlines()[0]
        if not Path(source).is_dir() and ("/" not in source or source.startswith(("/", "."))):
            reason = "no such folder"
        elif _is_unreachable(error):
            raise EnvironmentFault(f"{source}: {reason} Try again, or name a folder.") from error
        raise InputError(f"{source}: {reason}") from error


def _is_unreachable(error: BaseException | None) -> bool:
    """Whether the Hub could not be asked, as far as the causes of an error tell."""
    while error is not None:
        if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
            return True
        if isinstance(error, HfHubHTTPError) and error.response.status_code >= 500:
            return True
        error = error.__cause__
    return False
