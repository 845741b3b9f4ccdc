"""The order of the training images: a pure function of seed, epoch and position."""

import random

import numpy as np
import pytest
import torch

from modeling_vit_scratch.errors_vit_scratch import InputError
from training.stream import GlobalBatches, epoch_order, micro_batch_size


def stream(num_samples=11, *, max_steps=12, seed=3, batch=4, micro=None, **fields):
    """One rank's micro-batches of (epoch, row)."""
    return GlobalBatches(
        num_samples,
        global_batch_size=batch,
        micro_batch_size=micro or batch // fields.get("world_size", 1),
        max_steps=max_steps,
        seed=seed,
        **fields,
    )


def global_steps(num_samples=11, *, world_size=1, **fields):
    """The images of each step, gathered from all ranks in the order of their positions."""
    ranks = [stream(num_samples, rank=rank, world_size=world_size, **fields) for rank in range(world_size)]
    num_micro = ranks[0].batches_per_step
    batches = [list(rank) for rank in ranks]
    return [
        [image for micro in range(num_micro) for rank in batches for image in rank[step * num_micro + micro]]
        for step in range(ranks[0].max_steps)
    ]


@pytest.mark.parametrize(("num_samples", "batch"), [(11, 4), (12, 4), (3, 8), (1, 2), (97, 32)])
def test_each_epoch_holds_every_image_once(num_samples, batch):
    steps = -(-5 * num_samples // batch)
    images = [image for step in global_steps(num_samples, batch=batch, max_steps=steps) for image in step]
    for epoch in range(5):
        assert sorted(row for found, row in images if found == epoch) == list(range(num_samples))
    epochs = [epoch for epoch, _ in images]
    assert epochs == sorted(epochs)


def test_every_batch_is_full_across_the_ends_of_epochs():
    assert {len(step) for step in global_steps(11, batch=4)} == {4}


@pytest.mark.parametrize(
    ("world_size", "micro"), [(1, 12), (1, 6), (1, 1), (2, 6), (2, 3), (2, 1), (3, 2), (4, 3), (12, 1)]
)
def test_the_images_of_a_step_do_not_depend_on_ranks_and_micro_batches(world_size, micro):
    whole = global_steps(31, batch=12)
    assert global_steps(31, batch=12, world_size=world_size, micro=micro) == whole


def test_ranks_are_disjoint_and_of_equal_length():
    ranks = [list(stream(40, batch=8, micro=2, max_steps=5, rank=rank, world_size=4)) for rank in range(4)]
    assert {len(rank) for rank in ranks} == {5}
    images = [image for rank in ranks for batch in rank for image in batch]
    assert len(set(images)) == len(images) == 40


def test_the_order_is_a_pure_function_of_its_arguments():
    first = list(stream())
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    again = stream()
    assert list(again) == first
    assert list(again) == first  # a second pass too


def test_the_order_leaves_the_global_generator_as_it_was():
    before = torch.get_rng_state()
    list(stream())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("first_step", [0, 1, 5, 11, 12])
@pytest.mark.parametrize("micro", [4, 2])
def test_starting_at_a_step_equals_skipping_to_it(first_step, micro):
    whole, seeking = stream(micro=micro), stream(micro=micro, first_step=first_step)
    skipped = first_step * whole.batches_per_step
    assert len(seeking) == len(whole) == len(list(seeking))
    assert list(seeking)[skipped:] == list(whole)[skipped:]
    assert list(seeking)[:skipped] == [[]] * skipped


def test_a_shorter_training_is_the_beginning_of_a_longer_one():
    assert list(stream(max_steps=5)) == list(stream(max_steps=12))[:5]


def test_epochs_and_seeds_are_shuffled_apart():
    orders = {tuple(epoch_order(50, seed, epoch).tolist()) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_each_place_of_the_order_is_taken_by_each_image_alike():
    """4000 draws of a permutation of 5: an image at a place is seen 800 times, within 5 standard deviations."""
    counts = np.zeros((5, 5))
    for epoch in range(4000):
        counts[range(5), epoch_order(5, 0, epoch)] += 1
    assert np.abs(counts - 800).max() < 5 * np.sqrt(4000 * 0.2 * 0.8)


def test_the_largest_seed_of_a_recipe_has_an_order():
    assert sorted(epoch_order(9, 2**32 - 1, 1000).tolist()) == list(range(9))


@pytest.mark.parametrize(
    ("batch", "world_size", "limit", "expected"),
    [
        (512, 1, None, 512),
        (512, 2, None, 256),
        (512, 2, 64, 64),
        (512, 1, 100, 64),
        (12, 1, 5, 4),
        (7, 1, 3, 1),
        (6, 3, 9, 2),
    ],
)
def test_the_micro_batch_is_the_largest_divisor_within_the_limit(batch, world_size, limit, expected):
    assert micro_batch_size(batch, world_size, limit) == expected


def test_a_batch_that_ranks_cannot_share_is_refused():
    with pytest.raises(InputError, match="global_batch_size=8 must be a multiple of the 3 processes"):
        micro_batch_size(8, 3, None)
