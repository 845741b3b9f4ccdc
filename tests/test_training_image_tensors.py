"""Augmentation depends on seed, epoch and sample id alone; evaluation is the image processor."""

import hashlib
import random

import numpy as np
import pytest
import torch
from fixtures_data import augmentation_arguments, data_arguments, write_class_folders, write_truncated_jpeg
from torch.utils.data import DataLoader
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvF

from modeling_vit_scratch.errors_vit_scratch import InputError
from modeling_vit_scratch.image_processing_vit_scratch import ViTScratchImageProcessor
from training.data import LabelledImages, load_image_dataset
from training.image_tensors import EvaluationImages, TrainingImages

EVERYTHING = {
    "horizontal_flip": True,
    "rotation_degrees": 20.0,
    "randaugment_num_layers": 2,
    "random_erasing": 0.7,
}
AUGMENTATIONS = {
    "none": {},
    "padding and flip": {"crop_padding": 2, "horizontal_flip": True},
    "resized crop": {"crop_scale_min": 0.3, **EVERYTHING},
    "padding and everything": {"crop_padding": 2, **EVERYTHING},
}


@pytest.fixture
def images():
    pixels = np.random.default_rng(0).integers(1, 256, (12, 16, 16), dtype=np.uint8)
    return LabelledImages.from_column("train", pixels, np.arange(12) % 3)


@pytest.fixture
def processor():
    return ViTScratchImageProcessor(size=16, patch_size=4, num_channels=3)


def training_images(images, processor, *, seed=0, **augmentation):
    return TrainingImages(images, processor, augmentation_arguments(**augmentation), seed=seed)


def pixels_of(dataset, epoch=0):
    return torch.stack([dataset[(epoch, row)]["pixel_values"] for row in range(len(dataset))])


@pytest.mark.parametrize("augmentation", AUGMENTATIONS.values(), ids=AUGMENTATIONS)
def test_an_image_is_the_same_whatever_was_drawn_before(images, processor, augmentation):
    dataset = training_images(images, processor, **augmentation)
    torch.manual_seed(1)
    first = pixels_of(dataset)
    torch.manual_seed(2), random.seed(2), np.random.seed(2)
    backwards = torch.stack([dataset[(0, row)]["pixel_values"] for row in reversed(range(12))]).flip(0)
    assert torch.equal(first, backwards)


@pytest.mark.parametrize("augmentation", AUGMENTATIONS.values(), ids=AUGMENTATIONS)
def test_a_batch_equals_its_samples(images, processor, augmentation):
    dataset = training_images(images, processor, **augmentation)
    batch = dataset.__getitems__([(3, row) for row in range(12)])
    assert torch.equal(torch.stack([sample["pixel_values"] for sample in batch]), pixels_of(dataset, epoch=3))
    assert [sample["labels"] for sample in batch] == images.labels.tolist()


@pytest.mark.parametrize("augmentation", AUGMENTATIONS.values(), ids=AUGMENTATIONS)
def test_augmentation_leaves_the_global_generator_as_it_was(images, processor, augmentation):
    dataset = training_images(images, processor, **augmentation)
    before = torch.get_rng_state()
    pixels_of(dataset)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "augmentation", [AUGMENTATIONS[name] for name in AUGMENTATIONS if name != "none"], ids=list(AUGMENTATIONS)[1:]
)
@pytest.mark.parametrize("change", ["epoch", "seed"])
def test_another_epoch_or_seed_augments_otherwise(images, processor, augmentation, change):
    dataset = training_images(images, processor, **augmentation)
    if change == "epoch":
        other = pixels_of(dataset, epoch=1)
    else:
        other = pixels_of(training_images(images, processor, seed=1, **augmentation))
    assert not torch.equal(pixels_of(dataset), other)


def test_augmentation_follows_the_sample_id_not_the_row(images, processor):
    dataset = training_images(images, processor, crop_padding=2, **EVERYTHING)
    shuffled = training_images(images.select([7, 0, 5]), processor, crop_padding=2, **EVERYTHING)
    assert torch.equal(pixels_of(shuffled), pixels_of(dataset)[[7, 0, 5]])


@pytest.mark.e2e
def test_worker_processes_give_the_same_images(images, processor):
    dataset = training_images(images, processor, crop_padding=2, **EVERYTHING)
    keys = [[(1, row) for row in range(start, start + 4)] for start in (0, 4, 8)]
    batches = list(DataLoader(dataset, batch_sampler=keys, num_workers=2, multiprocessing_context="fork"))
    assert torch.equal(torch.cat([batch["pixel_values"] for batch in batches]), pixels_of(dataset, epoch=1))


def test_without_augmentation_training_equals_evaluation(images, processor):
    assert torch.equal(pixels_of(training_images(images, processor)), evaluation_pixels(images, processor))


def evaluation_pixels(images, processor):
    dataset = EvaluationImages(images, processor)
    return torch.stack([dataset[row]["pixel_values"] for row in range(len(dataset))])


def test_evaluation_is_the_image_processor(images, processor):
    expected = processor([images.read(row) for row in range(12)])["pixel_values"]
    assert torch.equal(evaluation_pixels(images, processor), expected)
    assert EvaluationImages(images, processor)[4]["labels"] == images.labels[4]


def test_padded_crops_are_shifts_by_at_most_the_padding(images, processor):
    dataset = training_images(images, processor, crop_padding=2)
    shifts = set()
    for row in range(12):
        padded = processor.normalize(tvF.pad(processor.decode(images.read(row)), [2, 2, 2, 2]))
        crops = {
            padded[:, top : top + 16, left : left + 16].numpy().tobytes(): (top, left)
            for top in range(5)
            for left in range(5)
        }
        shifts |= {crops[dataset[(epoch, row)]["pixel_values"].numpy().tobytes()] for epoch in range(20)}
    assert len(shifts) == 25  # 240 draws of 25: each is missed with a probability of 6e-5


def test_half_of_the_images_are_mirrored(images, processor):
    dataset = training_images(images, processor, horizontal_flip=True)
    plain = pixels_of(training_images(images, processor))
    mirrored = 0
    for epoch in range(50):
        for pixels, original in zip(pixels_of(dataset, epoch), plain, strict=True):
            is_mirrored = torch.equal(pixels, original.flip(-1))
            assert is_mirrored or torch.equal(pixels, original)
            mirrored += is_mirrored
    assert abs(mirrored / 600 - 0.5) < 0.1  # five standard deviations


def test_a_resized_crop_comes_from_the_unresized_image():
    images = LabelledImages.from_column("train", [np.arange(64 * 48, dtype=np.uint8).reshape(64, 48)], np.array([0]))
    processor = ViTScratchImageProcessor(size=16, patch_size=4, num_channels=1)
    dataset = training_images(images, processor, crop_scale_min=0.05)
    seed = dataset_seed(dataset, epoch=2, row=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        crop = v2.RandomResizedCrop((16, 16), scale=(0.05, 1.0), antialias=True)(processor.decode(images.read(0)))
    assert torch.equal(dataset[(2, 0)]["pixel_values"], processor.normalize(crop))


def dataset_seed(dataset, *, epoch, row):
    key = f"{dataset.seed}/{epoch}/{dataset.images.sample_ids[row]}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=33).digest()[:8])


def test_erased_pixels_are_the_mean_and_the_rest_is_untouched(images, processor):
    plain = pixels_of(training_images(images, processor))
    erased = pixels_of(training_images(images, processor, random_erasing=1.0))
    changed = erased != plain
    assert (erased[changed] == 0).all()
    assert ((changed.any(dim=1).float().mean(dim=(1, 2)) > 0).sum()) >= 10


def test_two_kinds_of_crop_at_once_are_refused(images, processor):
    with pytest.raises(InputError, match=r"crop_scale_min=0\.3 and crop_padding=2"):
        training_images(images, processor, crop_scale_min=0.3, crop_padding=2)


@pytest.mark.parametrize("kind", [TrainingImages, EvaluationImages])
def test_a_broken_image_is_named_with_row_and_file(tmp_path, kind, processor):
    folder = write_class_folders(tmp_path / "data", {"cat": 2, "dog": 2}, suffix="jpg")
    write_truncated_jpeg(folder / "dog" / "0.jpg")
    images = load_image_dataset(data_arguments(data_dir=str(folder))).train
    dataset = EvaluationImages(images, processor) if kind is EvaluationImages else training_images(images, processor)
    row = images.sample_ids.index("dog/0.jpg")
    with pytest.raises(InputError, match=rf"train row {row} \(dog/0.jpg\).*truncated"):
        dataset[(0, row) if kind is TrainingImages else row]


def test_deep_images_keep_their_range_through_augmentation(processor):
    deep = np.linspace(0, 65535, 256, dtype=np.uint16).reshape(16, 16)
    images = LabelledImages.from_column("train", [deep], np.array([0]))
    pixels = training_images(images, processor, crop_padding=1, **EVERYTHING)[(0, 0)]["pixel_values"]
    assert pixels.dtype == torch.float32 and pixels.min() >= -1 and pixels.max() <= 1


def test_another_magnitude_of_randaugment_changes_the_images(images, processor):
    weak, strong = (
        TrainingImages(images, processor, augmentation_arguments(**fields), seed=0)
        for fields in ({"randaugment_num_layers": 2, "randaugment_magnitude": magnitude} for magnitude in (1, 30))
    )
    pairs = [(weak[0, row]["pixel_values"], strong[0, row]["pixel_values"]) for row in range(len(images))]
    assert any(not torch.equal(first, second) for first, second in pairs)
