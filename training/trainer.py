"""The Trainer with this project's order of data, optimizers, strict restore, whole checkpoints and finite updates."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput

from modeling_vit_scratch import ViTScratchImageProcessor
from modeling_vit_scratch.errors_vit_scratch import InputError
from modeling_vit_scratch.modeling_vit_scratch import classification_loss
from training import checkpoints
from training.arguments import OptimizationArguments
from training.callbacks import Cost, StopRequests, leave_signals_to_the_main_process
from training.image_tensors import TrainingImages
from training.optimization import build_optimizer, build_scheduler
from training.stream import GlobalBatches

__all__ = ["ViTTrainer"]

logger = logging.getLogger(__name__)


class ViTTrainer(Trainer):
    """`Trainer` whose training is a function of the recipe alone, however it is split, stopped and resumed.

    Args:
        optimization: the recipe's optimizer, schedule and global batch size.
        train_dataset: maps (epoch, row) to `pixel_values` and `labels`.
    """

    train_dataset: TrainingImages
    optimizer: Any
    lr_scheduler: Any
    processing_class: ViTScratchImageProcessor

    def __init__(self, *, optimization: OptimizationArguments, **kwargs: Any):
        super().__init__(**kwargs)
        # Trainer gives every model this field, which is none of a ViT and would be saved with it.
        vars(cast(PreTrainedModel, self.model).config).pop("use_cache", None)
        self.optimization = optimization
        self.stop_requests, self.cost = StopRequests(), Cost()
        self.add_callback(self.stop_requests)
        self.add_callback(self.cost)
        self._first_step = 0
        self._finite = torch.tensor(True, device=self.args.device)
        self._gates_on_device = self.args.device.type != "cpu"  # where reading the flag would wait for the device
        self._window_start, self._window_step, self._waited = time.perf_counter(), 0, 0.0

    # Data: the whole training is one pass over one stream of batches.

    def get_train_dataloader(self) -> DataLoader:
        args = self.args
        batches = GlobalBatches(
            len(self.train_dataset),
            global_batch_size=self.optimization.global_batch_size,
            micro_batch_size=args.per_device_train_batch_size,
            max_steps=args.max_steps,
            seed=args.seed,
            rank=args.process_index,
            world_size=args.world_size,
            first_step=self._first_step,
        )
        return DataLoader(
            self.train_dataset,
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.device.type == "cuda",
            persistent_workers=args.dataloader_num_workers > 0,
            worker_init_fn=leave_signals_to_the_main_process,
            # Its own, so that loading never moves the generator of the dropout masks.
            generator=torch.Generator().manual_seed(args.seed),
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        loader = super().get_eval_dataloader(eval_dataset)
        getattr(loader, "base_dataloader", loader).worker_init_fn = leave_signals_to_the_main_process
        return loader

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        output = super().evaluation_loop(*args, **kwargs)
        # Trainer's mean also counts the images that fill the last batch of a rank.
        logits, labels = torch.as_tensor(output.predictions), torch.as_tensor(output.label_ids)
        loss = classification_loss(logits, labels, cast(Any, self.model).config.problem_type)
        cast(dict[str, float], output.metrics)["eval_loss"] = loss.item()
        return output

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | int | None]:
        start = time.perf_counter()
        batches = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._waited += time.perf_counter() - start
        return batches

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # Trainer's estimate walks all modules each step, for a formula that is not a ViT's

    # Optimization

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = build_optimizer(cast(nn.Module, model or self.model), self.optimization)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        if self.lr_scheduler is None:
            self.lr_scheduler = build_scheduler(optimizer or self.optimizer, self.optimization, num_training_steps)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # A non-finite loss or gradient never reaches weights or moments.

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._finite = self._finite & loss.isfinite()
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        # Called between the backward and the optimizer's step.
        grad_norm = super()._get_grad_norm(model, grad_norm)
        self._finite = self._finite & torch.as_tensor(grad_norm, device=self.args.device).isfinite()
        if self._gates_on_device:  # the fused optimizer skips the update by itself
            self.optimizer.optimizer.found_inf = (~self._finite).float()
        else:
            self._stop_unless_finite(self.state.global_step + 1)
        return grad_norm

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log or self.control.should_save:
            self._stop_unless_finite(self.state.global_step)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _stop_unless_finite(self, step: int) -> None:
        if not self._finite:
            last = checkpoints.newest_checkpoint(str(self.args.output_dir))
            raise InputError(
                f"the loss or a gradient was not finite by step {step}; the weights were left "
                f"as they were; lower learning_rate={self.optimization.learning_rate}, set max_grad_norm, or lengthen "
                f"warmup_steps; the last good checkpoint is {last or 'none yet'}"
            )

    # Logging

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Trainer's epoch is the share of the one pass that all of training is here.
        self.state.epoch = self.state.global_step * self.optimization.global_batch_size / len(self.train_dataset)
        if "loss" in logs:
            now = time.perf_counter()
            elapsed = now - self._window_start
            steps = self.state.global_step - self._window_step
            logs["images_per_second"] = steps * self.optimization.global_batch_size / elapsed
            logs["data_wait_share"] = self._waited / elapsed
            self._window_start, self._window_step, self._waited = now, self.state.global_step, 0.0
        super().log(logs, start_time)

    def training_figures(self) -> dict[str, Any]:
        """Returns the "training" block of metrics.json, over all sessions of a resumed run."""
        losses = [entry["loss"] for entry in self.state.log_history if "loss" in entry]
        steps, batch = self.state.global_step, self.optimization.global_batch_size
        cost = self.cost.state()["attributes"]
        return {
            "num_train_samples": len(self.train_dataset),
            "global_batch_size": batch,
            "num_steps": steps,
            "num_epochs": steps * batch / len(self.train_dataset),
            "elapsed_seconds": cost["elapsed_seconds"],
            "cpu_seconds": cost["cpu_seconds"],
            "images_per_second": steps * batch / cost["elapsed_seconds"],
            "final_train_loss": losses[-1] if losses else None,
            "world_size": self.args.world_size,
        }

    # Checkpoints

    def fit(self, checkpoint: str | None) -> None:
        """Trains to the end, from the start or from a checkpoint."""
        if checkpoint is not None:
            state = TrainerState.load_from_json(f"{checkpoint}/trainer_state.json")
            self._first_step = state.global_step
            self.cost.add(cast(dict[str, Any], state.stateful_callbacks)["Cost"]["attributes"])
        self._window_start, self._window_step = time.perf_counter(), self._first_step
        try:
            self.train(resume_from_checkpoint=checkpoint)
        except BaseException:
            # Trainer only calls this when all went well; else the bar stays open and signals stay ours.
            self.callback_handler.on_train_end(self.args, self.state, self.control)
            raise

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        # As Trainer's, less the pickled training arguments: the recipe says it all.
        if self.args.should_save and output_dir is not None:
            model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            model.save_pretrained(output_dir, state_dict=state_dict)
            self.processing_class.save_pretrained(output_dir)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        step, run_folder = self.state.global_step, str(self.args.output_dir)
        aside = checkpoints.unfinished_folder(run_folder, step)
        with checkpoints.writing_to_disk(aside):
            if self.args.should_save:
                checkpoints.remove_unfinished(run_folder)
                aside.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            self.save_model(str(aside), _internal_call=True)
            self._save_optimizer_and_scheduler(str(aside))
            self._save_scaler(str(aside))
            self._save_rng_state(str(aside))
            if self.state.best_global_step == step:
                self.state.best_model_checkpoint = str(checkpoints.checkpoint_folder(run_folder, step))
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self._save_state(f"{aside}/trainer_state.json")
                checkpoints.publish_checkpoint(run_folder, step)
                checkpoints.prune_checkpoints(
                    run_folder, keep=self.args.save_total_limit or 1, best=self.state.best_model_checkpoint
                )
            self.accelerator.wait_for_everyone()

    def _save_state(self, path: str) -> None:
        for part in (*self.callback_handler.callbacks, self.control):
            if isinstance(part, ExportableState):
                cast(dict[str, Any], self.state.stateful_callbacks)[type(part).__name__] = part.state()
        self.state.save_to_json(path)

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        trained = super()._init_training_state(max_steps, *args)
        # The stored state brings its intervals and the path of the best checkpoint with it.
        self.state.compute_steps(self.args, max_steps)
        if self.state.best_global_step is not None:
            best = checkpoints.checkpoint_folder(str(self.args.output_dir), self.state.best_global_step)
            self.state.best_model_checkpoint = str(best)
            if not best.is_dir():
                logger.warning("%s, the best so far, is gone: the best of what is to come will be kept", best)
                self.state.best_metric = self.state.best_global_step = self.state.best_model_checkpoint = None
        return trained

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        is_best = super()._determine_best_metric(metrics, trial)
        if is_best and self.args.load_best_model_at_end:
            self.control.should_save = True  # or there is nothing to load in the end
        return is_best

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # Trainer's own loads what fits and warns of the rest.
        model = self.accelerator.unwrap_model(self.model if model is None else model, keep_torch_compile=False)
        model.load_state_dict(load_file(f"{resume_from_checkpoint}/model.safetensors"), strict=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # The stored state brings the stored settings with it; those of the recipe are what was asked for.
        settings = [
            {name: value for name, value in group.items() if name not in ("params", "lr")}
            for group in self.optimizer.param_groups
        ]
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.lr_scheduler.base_lrs = [group["initial_lr"] for group in settings]
            factors = [factor(self.lr_scheduler.last_epoch) for factor in self.lr_scheduler.lr_lambdas]
            for group, setting, factor in zip(self.optimizer.param_groups, settings, factors, strict=True):
                group.update(setting, lr=setting["initial_lr"] * factor)
            self.lr_scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]  # what is logged

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))
