"""Datasets in the Hub's formats: columns, labels and splits, from folders of parquet and arrow files."""

import json
import sys

import pytest
from fixtures_data import COLORS, data_arguments
from hub_client import run_online
from hub_server import HubServer
from PIL import Image

from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError
from training.data import load_image_dataset


def load_folder(folder, **fields):
    return load_image_dataset(data_arguments(data_dir=str(folder), **fields))


@pytest.fixture
def parquet_folder(tmp_path):
    """Writes columns as a dataset folder with the given splits."""
    from datasets import Dataset, Features
    from datasets import Image as ImageFeature

    def write(labels, label_feature, *, column="label", splits=("train",), columns=None, missing_image=None):
        images = [Image.new("RGB", (6, 5), color) for color in COLORS[: len(labels)]]
        if missing_image is not None:
            images[missing_image] = None
        features = {"image": ImageFeature(), column: label_feature}
        content = {"image": images, column: labels}
        for name, (values, feature) in (columns or {}).items():
            features[name], content[name] = feature, values
        for split in splits:
            (tmp_path / "data").mkdir(exist_ok=True)
            table = Dataset.from_dict(content, features=Features(features))
            table.to_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet")
        return tmp_path / "data"

    return write


def class_label(*names):
    from datasets import ClassLabel

    return ClassLabel(names=list(names))


def value(dtype):
    from datasets import Value

    return Value(dtype)


def test_a_parquet_folder_keeps_the_class_order_of_its_features(parquet_folder):
    dataset = load_folder(parquet_folder([0, 1, 1], class_label("zebra", "ant"), splits=("train", "test")))
    assert (dataset.class_names, dataset.train.labels.tolist()) == (["zebra", "ant"], [0, 1, 1])
    assert dataset.description["inferred"]["splits"] == {"train": "train", "test": "test"}


def test_images_of_a_parquet_folder_stay_encoded(parquet_folder):
    dataset = load_folder(parquet_folder([0, 1], class_label("a", "b")))
    assert isinstance(dataset.train.read(1), bytes) and dataset.train.read(1).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("labels", "dtype", "names"),
    [(["dog", "cat", "dog"], "string", ["cat", "dog"]), ([10, 2, 10], "int64", ["2", "10"])],
)
def test_plain_labels_become_classes_in_natural_order(parquet_folder, labels, dtype, names):
    dataset = load_folder(parquet_folder(labels, value(dtype)))
    assert (dataset.class_names, dataset.train.labels.tolist()) == (names, [1, 0, 1])


@pytest.mark.parametrize(
    ("labels", "feature"),
    [([0, -1, 1], "class"), ([0, None, 1], "class"), ([0, -1, 1], "int64"), (["a", None, "b"], "string")],
)
def test_a_missing_label_is_named_with_row_and_value(parquet_folder, labels, feature):
    folder = parquet_folder(labels, class_label("a", "b") if feature == "class" else value(feature))
    with pytest.raises(InputError, match=f"is {labels[1]!r} at train row 1"):
        load_folder(folder)


def test_a_label_outside_the_classes_is_named_with_row_and_value(parquet_folder):
    folder = parquet_folder([0, 1, 2], value("int64"), splits=("test",))
    parquet_folder([0, 1, 0], value("int64"), splits=("train",))
    with pytest.raises(InputError, match="is 2 at test row 2, which is none of the 2 classes"):
        load_folder(folder)


def test_a_split_without_labels_is_left_out_and_said(parquet_folder):
    parquet_folder([0, 1, 0], class_label("a", "b"), splits=("train",))
    dataset = load_folder(parquet_folder([-1, -1, -1], class_label("a", "b"), splits=("test",)))
    assert dataset.test is None
    assert dataset.description["inferred"]["ignored_splits"] == {"test": "every label is missing or -1"}


def test_two_label_columns_ask_for_a_choice(parquet_folder):
    folder = parquet_folder(
        [0, 1], class_label("a", "b"), column="fine", columns={"coarse": ([1, 1], class_label("x", "y"))}
    )
    with pytest.raises(InputError, match=r"several candidates \(fine, coarse\).*image, fine, coarse"):
        load_folder(folder)
    assert load_folder(folder, label_column="coarse").class_names == ["x", "y"]


def test_an_unknown_column_is_refused_with_the_known_ones(parquet_folder):
    folder = parquet_folder([0, 1], class_label("a", "b"))
    with pytest.raises(InputError, match=r"image_column='picture' is no column of .*: image, label"):
        load_folder(folder, image_column="picture")


def test_a_hub_dataset_that_cannot_be_reached_is_a_fault_of_the_environment():
    with pytest.raises(EnvironmentFault, match="some/dataset"):
        load_image_dataset(data_arguments(dataset_name="some/dataset"))


def test_a_dataset_that_was_saved_to_disk_is_read(tmp_path):
    from datasets import Dataset, DatasetDict, Features
    from datasets import Image as ImageFeature

    content = {"image": [Image.new("RGB", (6, 5), color) for color in COLORS[:2]], "label": [1, 0]}
    table = Dataset.from_dict(content, features=Features(image=ImageFeature(), label=class_label("a", "b")))
    DatasetDict(train=table, validation=table).save_to_disk(tmp_path / "saved")
    dataset = load_folder(tmp_path / "saved")
    assert (dataset.train.labels.tolist(), len(dataset.validation), dataset.test) == ([1, 0], 2, None)


def test_a_local_dataset_name_follows_the_rules_of_folders(tmp_path):
    from fixtures_data import write_class_folders

    folder = write_class_folders(tmp_path / "data", {"cat-test": 2, "dog": 2})
    dataset = load_image_dataset(data_arguments(dataset_name=str(folder)))
    assert (dataset.class_names, dataset.test) == (["cat-test", "dog"], None)


def test_a_missing_image_is_named_when_it_is_read(parquet_folder):
    from training.image_tensors import EvaluationImages

    class Unused:
        pass

    dataset = load_folder(parquet_folder([0, 1, 0], class_label("a", "b"), missing_image=1))
    with pytest.raises(InputError, match=r"train row 1 \(train/1\): column 'image' holds no image"):
        EvaluationImages(dataset.train, Unused())[1]


def test_a_broken_image_is_dropped_when_asked_for(parquet_folder):
    dataset = load_folder(parquet_folder([0, 1, 0], class_label("a", "b"), missing_image=2), on_broken_image="skip")
    assert dataset.train.sample_ids == ["train/0", "train/1"]
    assert dataset.description["dropped"] == [{"sample_id": "train/2", "reason": "column 'image' holds no image"}]


def _without_footer(content):
    return b"PAR1 and nothing of parquet PAR1"


def _without_data(content):
    return content[:4] + bytes(len(content) // 4) + content[4 + len(content) // 4 :]


@pytest.mark.parametrize("corrupt", [_without_footer, _without_data])
def test_a_corrupt_parquet_file_is_the_users_to_mend(parquet_folder, corrupt):
    folder = parquet_folder([0, 1], class_label("a", "b"))
    file = next(folder.glob("*.parquet"))
    file.write_bytes(corrupt(file.read_bytes()))
    with pytest.raises(InputError, match=f"cannot (load|prepare) dataset '{folder}'"):
        load_folder(folder)


def test_a_folder_is_not_called_a_hub_dataset(parquet_folder):
    description = load_folder(parquet_folder([0, 1], class_label("a", "b"))).description
    assert (description["kind"], description["dataset"]) == ("dataset_folder", "data")


# --- the Hub itself

LOAD = """
import json, sys
sys.path[:0] = {path!r}
from fixtures_data import data_arguments
from training.data import load_image_dataset
try:
    dataset = load_image_dataset(data_arguments(dataset_name={name!r}))
    print(json.dumps({{**dataset.description, "first": type(dataset.train.read(0)).__name__}}))
except ValueError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def hub(tmp_path):
    with HubServer(tmp_path / "hub", {}) as server:
        yield server


def load_from_hub(hub, home, name):
    result = run_online(LOAD.format(path=sys.path, name=name), hub, home)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().splitlines()[-1]


@pytest.mark.e2e
def test_a_hub_dataset_is_described_with_the_commit_it_was_read_at(hub, parquet_folder, tmp_path):
    folder = parquet_folder([0, 1, 1], class_label("zebra", "ant"), splits=("train", "test"))
    hub.create("datasets/alice/animals")
    commit = hub.write("datasets/alice/animals", {file.name: file.read_bytes() for file in folder.iterdir()})
    found = json.loads(load_from_hub(hub, tmp_path / "home", "alice/animals"))
    assert (found["dataset"], found["kind"], found["revision"]) == ("alice/animals", "hub", commit)
    assert (found["class_names"], found["first"]) == (["zebra", "ant"], "bytes")


@pytest.mark.e2e
def test_a_hub_dataset_that_does_not_exist_is_the_users_to_mend(hub, tmp_path):
    answer = load_from_hub(hub, tmp_path / "home", "alice/nothing")
    assert answer.startswith("InputError dataset_name='alice/nothing': ")
