"""Order of the training images: a pure function of seed, epoch and position, the same on any number of devices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from modeling_vit_scratch.errors_vit_scratch import InputError

__all__ = ["GlobalBatches", "epoch_order", "micro_batch_size"]


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the permutation of the rows that one pass over the images follows."""
    # torch's generator heeds only 32 bits of a seed, too few to tell all (seed, epoch) apart.
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def micro_batch_size(global_batch_size: int, world_size: int, limit: int | None) -> int:
    """Returns the images a device takes at once: the largest divisor of its share that the limit allows."""
    if global_batch_size % world_size:
        raise InputError(
            f"global_batch_size={global_batch_size} must be a multiple of the {world_size} processes that share it"
        )
    share = global_batch_size // world_size
    return max(size for size in range(1, min(share, limit or share) + 1) if share % size == 0)


class GlobalBatches(Sampler[list[tuple[int, int]]]):
    """One rank's micro-batches of (epoch, row), step after step, to the end of training.

    Step k trains on positions [k * B, (k + 1) * B) of the endless sequence of shuffled passes, so that every batch is
    full and the union over ranks and micro-batches does not depend on how many there are.

    Args:
        first_step: the step a resumed run starts with. The Trainer skips what lies before it, batch by batch; those
            are yielded empty and cost nothing.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        max_steps: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        first_step: int = 0,
    ):
        self.num_samples, self.seed = num_samples, seed
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.max_steps, self.first_step = max_steps, first_step
        self.rank, self.world_size = rank, world_size

    @property
    def batches_per_step(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.world_size)

    def __len__(self) -> int:
        return self.max_steps * self.batches_per_step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for _ in range(self.first_step * self.batches_per_step):
            yield []
        epoch, order = -1, np.empty(0, dtype=np.int64)
        for step in range(self.first_step, self.max_steps):
            for micro in range(self.batches_per_step):
                start = step * self.global_batch_size + (micro * self.world_size + self.rank) * self.micro_batch_size
                batch = []
                for position in range(start, start + self.micro_batch_size):
                    if position // self.num_samples != epoch:
                        epoch = position // self.num_samples
                        order = epoch_order(self.num_samples, self.seed, epoch)
                    batch.append((epoch, int(order[position % self.num_samples])))
                yield batch
