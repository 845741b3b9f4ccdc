"""What happens between steps: progress, stop requests."""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

__all__ = [
    "Cost",
    "Interrupted",
    "ProgressBar",
    "StopRequests",
    "leave_signals_to_the_main_process",
    "ending_resumably",
]

logger = logging.getLogger(__name__)


class Interrupted(RuntimeError):
    """Training was asked to stop and has saved a checkpoint to go on from."""


def leave_signals_to_the_main_process(worker_id: int) -> None:
    """Keeps a loader's worker alive when all processes are asked to stop: the step at hand needs its images.

    SIGTERM from the main process still ends it, or that would wait for its workers at exit for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_obey_parent, daemon=True).start()


def _obey_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


class ProgressBar(TrainerCallback):
    """One bar on stderr with the last logged figures, rate and time to go."""

    def __init__(self, title: str):
        self.title = title
        self.bar: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self.bar = tqdm(
                total=state.max_steps, initial=state.global_step, desc=self.title, unit="step", dynamic_ncols=True
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        shown = {"loss": "loss", "learning_rate": "lr", "eval_accuracy": "val", "images_per_second": "img/s"}
        if self.bar is not None and logs:
            figures = {label: f"{logs[name]:.4g}" for name, label in shown.items() if name in logs}
            if figures:
                self.bar.set_postfix(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.bar is not None:
            self.bar.close()


class StopRequests(TrainerCallback):
    """Turns SIGTERM and SIGINT into a checkpoint and a stop at the next step boundary, on all ranks at once."""

    def __init__(self) -> None:
        self.requested = False
        self.stopped = False
        self._previous: dict[int, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if threading.current_thread() is threading.main_thread():  # signal handlers cannot be set elsewhere
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._request)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step < state.max_steps and self._requested_anywhere(args):
            self.stopped = True
            control.should_save = control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        for signal_number, handler in self._previous.items():  # a second signal ends the process at once
            signal.signal(signal_number, handler)
        logger.warning("%s received: saving a checkpoint after this step, then stopping", signal.Signals(number).name)

    def _requested_anywhere(self, args: TrainingArguments) -> bool:
        if args.world_size == 1:
            return self.requested
        flag = torch.tensor(float(self.requested), device=args.device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return bool(flag.item())


@contextmanager
def ending_resumably(message: str) -> Iterator[None]:
    """Turns SIGTERM and SIGINT inside the block into `Interrupted`; for work that starts anew at the next try."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(f"{signal.Signals(number).name} received; {message}")

    in_main_thread = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if in_main_thread else ()
    previous = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Cost(TrainerCallback, ExportableState):
    """Seconds of wall time and of all cores that this process and its workers took, over all sessions of a run."""

    def __init__(self, elapsed_seconds: float = 0.0, cpu_seconds: float = 0.0):
        self.before = {"elapsed_seconds": elapsed_seconds, "cpu_seconds": cpu_seconds}
        self.start, self.cpu_at_start = time.perf_counter(), _cpu_seconds()

    def add(self, cost: dict[str, float]) -> None:
        """Counts what earlier sessions took."""
        self.before = {name: self.before[name] + cost[name] for name in self.before}

    def state(self) -> dict[str, Any]:
        attributes = {
            "elapsed_seconds": self.before["elapsed_seconds"] + time.perf_counter() - self.start,
            "cpu_seconds": self.before["cpu_seconds"] + _cpu_seconds() - self.cpu_at_start,
        }
        return {"args": {}, "attributes": attributes}


def _cpu_seconds() -> float:
    """Of all threads of this process, and of the workers that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
