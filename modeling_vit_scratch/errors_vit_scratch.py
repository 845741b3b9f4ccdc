"""The two kinds of failure that are not ours; the command line turns them into exit codes 2 and 3."""

__all__ = ["EnvironmentFault", "InputError"]


class InputError(ValueError):
    """What the caller gave is at fault. The message says what was found, where, and what to do instead."""


class EnvironmentFault(RuntimeError):
    """Disk, network, server or a lock failed. The message says where, what is safe, and what to retry."""
