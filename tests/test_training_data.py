"""Sources, splits and classes: what a user's folder becomes, and what is refused."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from fixtures_data import (
    data_arguments,
    idx_bytes,
    write_class_folders,
    write_idx_folder,
    write_image,
    write_truncated_jpeg,
)
from PIL import Image
from sklearn.datasets import load_digits

from modeling_vit_scratch.errors_vit_scratch import InputError
from training.data import load_image_dataset, summarize_description


def load_folder(folder, **fields):
    return load_image_dataset(data_arguments(data_dir=str(folder), **fields))


def counts(split):
    return Counter(split.labels.tolist())


# --- digits and splits


def test_digits_hold_out_exactly_360_of_1797():
    dataset = load_image_dataset(data_arguments(dataset_name="digits", test_fraction=0.2))
    assert (len(dataset.train), len(dataset.test), dataset.validation) == (1437, 360, None)


def test_digits_are_scaled_from_16_grey_levels_to_uint8():
    dataset = load_image_dataset(data_arguments(dataset_name="digits"))
    assert np.array_equal(dataset.train.read(7), np.rint(load_digits().images[7] * 255 / 16))
    assert dataset.train.read(7).dtype == np.uint8


def test_splits_are_disjoint_and_cover_the_source():
    dataset = load_image_dataset(data_arguments(dataset_name="digits", test_fraction=0.2, validation_fraction=0.1))
    ids = [*dataset.train.sample_ids, *dataset.validation.sample_ids, *dataset.test.sample_ids]
    assert sorted(ids) == sorted(f"train/{row}" for row in range(1797))


def test_carved_samples_keep_their_image_and_label():
    dataset = load_image_dataset(data_arguments(dataset_name="digits", test_fraction=0.2))
    digits = load_digits()
    for row in (0, 100, 359):
        original = int(dataset.test.sample_ids[row].removeprefix("train/"))
        assert dataset.test.labels[row] == digits.target[original]
        assert np.array_equal(dataset.test.read(row), np.rint(digits.images[original] * 255 / 16))


def test_every_class_has_its_share_of_a_carved_split():
    dataset = load_image_dataset(data_arguments(dataset_name="digits", test_fraction=0.2))
    whole = np.bincount(load_digits().target)
    assert np.abs(np.bincount(dataset.test.labels) - 0.2 * whole).max() < 1


def test_the_test_split_is_the_same_with_and_without_a_validation_split():
    alone = load_image_dataset(data_arguments(dataset_name="digits", test_fraction=0.2))
    both = load_image_dataset(data_arguments(dataset_name="digits", test_fraction=0.2, validation_fraction=0.1))
    assert alone.test.fingerprint == both.test.fingerprint


def test_another_seed_gives_another_split():
    splits = [
        load_image_dataset(data_arguments(dataset_name="digits", test_fraction=0.2, split_seed=seed)).test
        for seed in (0, 1)
    ]
    assert splits[0].fingerprint != splits[1].fingerprint


def test_images_held_out_of_all_classes_are_held_out_of_some():
    all_classes = load_image_dataset(data_arguments(dataset_name="digits", test_fraction=0.2))
    some = load_image_dataset(data_arguments(dataset_name="digits", test_fraction=0.2, classes=["5", "6", "7"]))
    assert not set(some.train.sample_ids) & set(all_classes.test.sample_ids)


@pytest.mark.e2e
def test_another_process_carves_the_same_split():
    program = (
        "from fixtures_data import data_arguments; from training.data import load_image_dataset;"
        "print(load_image_dataset(data_arguments(dataset_name='digits', test_fraction=0.2)).test.fingerprint)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    other = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    ).stdout.strip()
    assert other == load_image_dataset(data_arguments(dataset_name="digits", test_fraction=0.2)).test.fingerprint


def test_the_fingerprint_is_the_hash_of_ids_and_labels():
    dataset = load_image_dataset(data_arguments(dataset_name="digits"))
    text = "".join(f"train/{row}\t{label}\n" for row, label in enumerate(load_digits().target))
    assert dataset.description["splits"]["train"]["sha256"] == hashlib.sha256(text.encode()).hexdigest()


def test_the_description_says_which_splits_were_carved():
    dataset = load_image_dataset(data_arguments(dataset_name="digits", test_fraction=0.2))
    origins = {name: split["origin"] for name, split in dataset.description["splits"].items()}
    assert origins == {"train": "given, less what was carved from it", "test": "carved from train"}


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.7])
def test_fractions_of_round_numbers_give_round_counts(tmp_path, fraction):
    folder = write_class_folders(tmp_path / "data", {"a": 15, "b": 15})
    assert len(load_folder(folder, test_fraction=fraction).test) == round(30 * fraction)


def test_a_class_with_one_image_is_refused_when_a_split_is_carved(tmp_path):
    folder = write_class_folders(tmp_path / "data", {"cat": 10, "dog": 1})
    with pytest.raises(InputError, match=r"class 'dog' has 1 image .* test_fraction=0"):
        load_folder(folder, test_fraction=0.2)


def test_a_class_with_one_image_that_classes_leaves_out_does_no_harm(tmp_path):
    folder = write_class_folders(tmp_path / "data", {"cat": 10, "cow": 10, "dog": 1})
    assert len(load_folder(folder, test_fraction=0.2, classes=["cat", "cow"]).test) == 4


def test_a_fraction_too_small_for_every_class_is_refused(tmp_path):
    folder = write_class_folders(tmp_path / "data", {"a": 10, "b": 10, "c": 10})
    with pytest.raises(InputError, match=r"test_fraction gives 1 of 30 .* 3 classes"):
        load_folder(folder, test_fraction=0.03)


# --- classes


def test_classes_are_kept_in_the_given_order():
    dataset = load_image_dataset(data_arguments(dataset_name="digits", classes=["7", "2"]))
    assert dataset.class_names == ["7", "2"]
    assert counts(dataset.train) == {0: (load_digits().target == 7).sum(), 1: (load_digits().target == 2).sum()}


def test_an_unknown_class_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"'eleven'.* 0, 1, 2"):
        load_image_dataset(data_arguments(dataset_name="digits", classes=["1", "eleven"]))


def test_labels_follow_the_class_order_of_a_checkpoint():
    order = [str(digit) for digit in (9, 8, 7, 6, 5, 4, 3, 2, 1, 0)]
    dataset = load_image_dataset(data_arguments(dataset_name="digits"), class_names=order)
    assert dataset.class_names == order
    assert np.array_equal(dataset.train.labels, 9 - load_digits().target)


def test_classes_that_differ_from_the_checkpoint_are_listed_from_both_sides(tmp_path):
    folder = write_class_folders(tmp_path / "data", {"cat": 2, "dog": 2})
    with pytest.raises(InputError, match=r"\(\+\): dog\..*\(-\): cow, horse\."):
        load_image_dataset(data_arguments(data_dir=str(folder)), class_names=["cat", "cow", "horse"])


# --- idx


@pytest.mark.parametrize("compressed", [True, False])
def test_idx_files_give_train_and_test(tmp_path, compressed):
    dataset = load_folder(write_idx_folder(tmp_path / "idx", [0, 1, 2, 1], compressed=compressed))
    assert (dataset.train.labels.tolist(), len(dataset.test)) == ([0, 1, 2, 1], 4)
    assert np.array_equal(dataset.train.read(3), np.full((5, 4), 3))


def test_idx_test_files_alone_are_enough_to_evaluate(tmp_path):
    dataset = load_folder(write_idx_folder(tmp_path / "idx", [0, 1], prefixes=("t10k",)), test_fraction=0.5)
    assert (dataset.train, len(dataset.test)) == (None, 2)


BROKEN_IDX = {
    "wrong magic": ("train-images-idx3-ubyte.gz", gzip.compress(idx_bytes(np.zeros(9))), "0x00000801, not 0x00000803"),
    "too short": (
        "train-images-idx3-ubyte.gz",
        gzip.compress(idx_bytes(np.zeros((2, 5, 4)))[:-3]),
        "announces 2 x 5 x 4 bytes but holds 37",
    ),
    "no header": ("train-labels-idx1-ubyte.gz", gzip.compress(b"\0\0"), "holds 2 bytes, fewer than an idx header"),
    "cut gzip": ("train-images-idx3-ubyte.gz", gzip.compress(b"x" * 99)[:-9], "no complete gzip file"),
    "no gzip": ("train-images-idx3-ubyte.gz", idx_bytes(np.zeros((2, 5, 4))), "no complete gzip file"),
    "other count": ("train-labels-idx1-ubyte.gz", gzip.compress(idx_bytes(np.zeros(3))), "2 images but .* 3 labels"),
    "label gap": ("train-labels-idx1-ubyte.gz", gzip.compress(idx_bytes(np.array([0, 9]))), "label 9 at train row 1"),
}


@pytest.mark.parametrize(("name", "content", "message"), BROKEN_IDX.values(), ids=BROKEN_IDX)
def test_broken_idx_files_are_named_with_what_was_found(tmp_path, name, content, message):
    folder = write_idx_folder(tmp_path / "idx", [0, 1], prefixes=("train",))
    (folder / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load_folder(folder)
    assert str(folder) in str(caught.value)


def test_an_idx_file_without_its_partner_is_refused(tmp_path):
    folder = write_idx_folder(tmp_path / "idx", [0, 1])
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(InputError, match=r"t10k-images-idx3-ubyte\.gz but no t10k-labels"):
        load_folder(folder)


@pytest.mark.skipif(not os.path.isdir("/usr/share/datasets/fashion-mnist"), reason="no Fashion-MNIST package")
def test_fashion_mnist_is_known_by_its_labels():
    dataset = load_folder("/usr/share/datasets/fashion-mnist")
    assert dataset.class_names[9] == "Ankle boot"
    assert (len(dataset.train), len(dataset.test)) == (60000, 10000)


# --- image folders


def test_classes_stand_in_natural_order(tmp_path):
    folder = write_class_folders(tmp_path / "data", {"10": 1, "2": 1, "1": 1})
    assert load_folder(folder).class_names == ["1", "2", "10"]


def test_sample_ids_are_paths_relative_to_the_folder(tmp_path):
    folder = write_class_folders(tmp_path / "data", {"cat": 2, "dog": 1})
    dataset = load_folder(folder)
    assert dataset.train.sample_ids == ["cat/0.png", "cat/1.png", "dog/0.png"]
    assert dataset.train.read(2) == str(folder / "dog" / "0.png")


@pytest.mark.parametrize("suffix", ["jpg", "JPEG", "png", "webp", "gif", "tiff", "bmp"])
def test_every_promised_image_format_is_found(tmp_path, suffix):
    folder = write_class_folders(tmp_path / "data", {"cat": 1, "dog": 1}, suffix=suffix)
    assert len(load_folder(folder).train) == 2


@pytest.mark.parametrize("validation", ["val", "valid", "validation", "dev", "Val"])
def test_split_folders_are_recognised_and_named(tmp_path, validation):
    for name, count in (("train", 3), (validation, 2), ("test", 1)):
        write_class_folders(tmp_path / "data" / name, {"cat": count, "dog": count})
    dataset = load_folder(tmp_path / "data", validation_fraction=0.5, test_fraction=0.5)
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (6, 4, 2)
    found = {"train": "train", validation: "validation", "test": "test"}
    assert dataset.description["inferred"]["split_folders"] == found
    assert f"'{validation}': 'validation'" in summarize_description(dataset.description)


def test_class_folders_with_split_names_inside_stay_classes(tmp_path):
    folder = write_class_folders(tmp_path / "data", {"cat-test": 2, "dog_train": 2, "validation set": 2})
    dataset = load_folder(folder)
    assert dataset.class_names == ["cat-test", "dog_train", "validation set"]
    assert (len(dataset.train), dataset.test, dataset.validation) == (6, None, None)


def test_a_class_may_be_called_train(tmp_path):
    assert load_folder(write_class_folders(tmp_path / "data", {"bus": 1, "train": 2})).class_names == ["bus", "train"]


def test_split_names_below_the_top_level_are_parts_of_a_class(tmp_path):
    for name in ("cat/train", "cat/test", "dog/test"):
        write_image(tmp_path / "data" / name / "0.png")
    dataset = load_folder(tmp_path / "data")
    assert (dataset.class_names, counts(dataset.train), dataset.test) == (["cat", "dog"], {0: 2, 1: 1}, None)


def test_files_that_are_no_images_are_listed_as_dropped(tmp_path):
    folder = write_class_folders(tmp_path / "data", {"cat": 1, "dog": 1})
    for name in ("README.md", "cat/notes.txt", "cat/.hidden.png", ".cache/0.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    dropped = {entry["sample_id"]: entry["reason"] for entry in load_folder(folder).description["dropped"]}
    assert dropped == {
        "README.md": "not an image file",
        "cat/notes.txt": "not an image file",
        "cat/.hidden.png": "hidden",
        ".cache": "hidden",
    }


@pytest.mark.parametrize("lost", ["stray.png", "cat/photo.heic"])
def test_images_that_would_be_lost_are_an_error_unless_skipping_is_asked_for(tmp_path, lost):
    folder = write_class_folders(tmp_path / "data", {"cat": 1, "dog": 1})
    (folder / lost).write_bytes(b"x")
    with pytest.raises(InputError, match="on_broken_image=skip") as caught:
        load_folder(folder)
    assert lost in str(caught.value)
    skipped = load_folder(folder, on_broken_image="skip").description["dropped"]
    assert [entry["sample_id"] for entry in skipped] == [lost]


def test_a_link_to_its_own_folder_does_not_repeat_images(tmp_path):
    folder = write_class_folders(tmp_path / "data", {"cat": 1, "dog": 1})
    (folder / "cat" / "again").symlink_to(folder / "cat")
    assert load_folder(folder).train.sample_ids == ["cat/0.png", "dog/0.png"]


def test_a_file_name_that_is_no_unicode_gets_an_id_that_is(tmp_path):
    folder = write_class_folders(tmp_path / "data", {"cat": 1, "dog": 1})
    os.rename(folder / "cat" / "0.png", os.fsencode(folder / "cat") + b"/\xff.png")
    dataset = load_folder(folder)
    assert dataset.train.sample_ids[0] == "cat/\\xff.png"
    assert Image.open(dataset.train.read(0)).size == (9, 7)


def _empty(root):
    root.mkdir()


def _images_only(root):
    write_image(root / "a.png")


BAD_FOLDERS = {
    "missing": (lambda root: None, "does not exist"),
    "a file": (lambda root: root.write_text("x"), "is a file"),
    "empty": (_empty, "no class folders"),
    "images without class folders": (_images_only, "outside of any class folder"),
    "one class": (lambda root: write_class_folders(root, {"cat": 3}), r"has 1 class \(cat\)"),
    "an empty class": (
        lambda root: (write_class_folders(root, {"cat": 1}), (root / "dog").mkdir()),
        "dog holds no image",
    ),
    "split folders without classes": (
        lambda root: [write_image(root / name / "0.png") for name in ("train", "test")],
        "test has no class folders",
    ),
    "unlabelled test folder": (
        lambda root: (write_class_folders(root / "train", {"cat": 1, "dog": 1}), write_image(root / "test" / "0.png")),
        "beside 'test'.*give its images class folders",
    ),
    "splits beside something else": (
        lambda root: [write_class_folders(root / name, {"cat": 1, "dog": 1}) for name in ("train", "extra")],
        "beside 'extra'",
    ),
    "two validation folders": (
        lambda root: [write_class_folders(root / name, {"cat": 1, "dog": 1}) for name in ("train", "val", "dev")],
        "two folders for the validation split, dev and val",
    ),
    "class in test only": (
        lambda root: (
            write_class_folders(root / "train", {"cat": 1, "dog": 1}),
            write_class_folders(root / "test", {"cow": 1}),
        ),
        "'cow' that train lacks",
    ),
}


@pytest.mark.parametrize(("build", "message"), BAD_FOLDERS.values(), ids=BAD_FOLDERS)
def test_a_folder_that_is_no_dataset_is_refused_by_name(tmp_path, build, message):
    build(tmp_path / "data")
    with pytest.raises(InputError, match=message) as caught:
        load_folder(tmp_path / "data")
    assert "data" in str(caught.value) and "\n" not in str(caught.value)


def test_neither_a_name_nor_a_folder_is_refused():
    with pytest.raises(InputError, match="set exactly one"):
        load_image_dataset(data_arguments())


# --- broken images


def test_skip_drops_broken_images_and_lists_them(tmp_path, caplog):
    folder = write_class_folders(tmp_path / "data", {"cat": 3, "dog": 3}, suffix="jpg")
    write_truncated_jpeg(folder / "cat" / "half.jpg")
    (folder / "cat" / "zero.png").write_bytes(b"")
    (folder / "dog" / "text.jpg").write_text("no picture")
    (folder / "dog" / "gone.jpg").symlink_to(folder / "nowhere.jpg")
    dataset = load_folder(folder, on_broken_image="skip")
    assert counts(dataset.train) == {0: 3, 1: 3}
    reasons = {entry["sample_id"]: entry["reason"] for entry in dataset.description["dropped"]}
    assert sorted(reasons) == ["cat/half.jpg", "cat/zero.png", "dog/gone.jpg", "dog/text.jpg"]
    assert "truncated" in reasons["cat/half.jpg"] and str(tmp_path) not in json.dumps(dataset.description)
    assert "4 of 10 train images are broken" in caplog.text


def test_a_split_of_nothing_but_broken_images_is_refused(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "0.jpg").write_text("x")
    with pytest.raises(InputError, match="train split of data holds no readable image"):
        load_folder(tmp_path / "data", on_broken_image="skip")


@pytest.mark.parametrize("name", ["image_column", "label_column", "dataset_config_name", "dataset_revision"])
def test_a_field_that_means_nothing_for_the_source_is_refused(name):
    with pytest.raises(InputError, match=f"{name}='x' means nothing for digits: leave it out"):
        load_image_dataset(data_arguments(dataset_name="digits", **{name: "x"}))
