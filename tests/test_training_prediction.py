"""Which files `predict` takes from a folder, and what it says of the others."""

import pytest
from PIL import Image

from training.prediction import list_images


@pytest.fixture
def folder(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.jpg")
    return tmp_path


@pytest.mark.parametrize("name", ["._photo.jpg", ".cache/photo.jpg"])
def test_hidden_files_are_no_images_of_a_folder(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"what macOS puts beside a photo")
    assert list_images([str(folder)]) == [folder / "photo.jpg"]


def test_a_folder_inside_a_hidden_one_is_listed_if_it_is_named(tmp_path):
    (tmp_path / ".hidden").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / ".hidden" / "photo.jpg")
    assert list_images([str(tmp_path / ".hidden")]) == [tmp_path / ".hidden" / "photo.jpg"]


def test_images_in_formats_that_are_not_read_are_told(folder, caplog):
    (folder / "phone.heic").write_bytes(b"")
    assert list_images([str(folder)]) == [folder / "photo.jpg"]
    assert "1 images in formats that are not read are left out" in caplog.text and "phone.heic" in caplog.text
