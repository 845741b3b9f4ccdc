"""Optimizers with the decay groups of the paper's code, and its two schedules."""

from __future__ import annotations

import logging
import re

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_cosine_schedule_with_warmup, get_polynomial_decay_schedule_with_warmup

from training.arguments import OptimizationArguments

__all__ = ["build_optimizer", "build_scheduler", "decay_groups"]

logger = logging.getLogger(__name__)

LINEAR_END_LEARNING_RATE = 1e-5  # the official schedule's, absolute


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Returns the trainable parameters as two groups: matrices, which decay, and all else, which does not.

    The official code decays what is called `kernel`: no bias, norm, class token or position embedding. Parameters are
    in the order of their names, so that the state of a checkpoint finds its place.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [name for name, parameter in named if name.endswith(".weight") and parameter.ndim >= 2]
    decayed = [(name, parameter) for name, parameter in named if name in set(matrices)]
    others = [(name, parameter) for name, parameter in named if name not in set(matrices)]
    for group, decay in ((decayed, weight_decay), (others, 0.0)):
        kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name, _ in group)
        logger.info("weight decay %g on %d tensors: %s", decay, len(group), ", ".join(kinds))
    return [
        {"params": [parameter for _, parameter in group], "weight_decay": decay}
        for group, decay in ((decayed, weight_decay), (others, 0.0))
        if group
    ]


def build_optimizer(model: nn.Module, arguments: OptimizationArguments) -> torch.optim.Optimizer:
    """Returns AdamW, or SGD with heavy-ball momentum (paper table 4: fine-tuning)."""
    # Fused kernels also take `found_inf`, by which an update is gated on the device (trainer.py).
    groups = decay_groups(model, arguments.weight_decay)
    if arguments.optimizer == "adamw":
        betas = (arguments.adam_beta1, arguments.adam_beta2)
        return torch.optim.AdamW(groups, lr=arguments.learning_rate, betas=betas, eps=1e-8, fused=True)
    return torch.optim.SGD(groups, lr=arguments.learning_rate, momentum=arguments.momentum, fused=True)


def build_scheduler(optimizer: torch.optim.Optimizer, arguments: OptimizationArguments, max_steps: int) -> LRScheduler:
    """Returns base * decay(p) * min(1, step / warmup) with p the share of the steps after warm-up (paper B.1)."""
    if arguments.lr_scheduler_type == "cosine":
        return get_cosine_schedule_with_warmup(optimizer, arguments.warmup_steps, max_steps)
    return get_polynomial_decay_schedule_with_warmup(
        optimizer, arguments.warmup_steps, max_steps, lr_end=LINEAR_END_LEARNING_RATE, power=1.0
    )
