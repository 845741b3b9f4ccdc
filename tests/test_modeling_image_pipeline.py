"""The image-classification pipeline gives the processor the undecoded image."""

import base64
import io
import json
import logging
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from fixtures_modeling import tiny_classifier
from PIL import Image
from torch.utils.data import Dataset
from transformers.pipelines.pt_utils import KeyDataset

import modeling_vit_scratch
from modeling_vit_scratch import ViTScratchForImageClassification
from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError
from modeling_vit_scratch.image_processing_vit_scratch import ViTScratchImageProcessor
from modeling_vit_scratch.pipeline_vit_scratch import CUSTOM_PIPELINES, ViTScratchImageClassificationPipeline

LABELS = ["ant", "bee", "cat", "dog", "eel", "fox"]


def make_model(**fields) -> ViTScratchForImageClassification:
    return tiny_classifier(id2label=dict(enumerate(LABELS)), **fields)


def make_pipeline(model: ViTScratchForImageClassification) -> ViTScratchImageClassificationPipeline:
    processor = ViTScratchImageProcessor.from_config(model.config)
    return ViTScratchImageClassificationPipeline(model=model, image_processor=processor, device="cpu")


@pytest.fixture(scope="module")
def classify() -> ViTScratchImageClassificationPipeline:
    return make_pipeline(make_model())


def direct_logits(classify, image) -> list[float]:
    """What evaluation computes: the processor, then the model."""
    with torch.no_grad():
        return classify.model(**classify.image_processor(image)).logits[0].tolist()


def as_vector(answers: list[dict]) -> list[float]:
    """Scores of one image in the order of the classes."""
    return [answer["score"] for label in LABELS for answer in answers if answer["label"] == label]


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def png(image: Image.Image, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


def turned_exif() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


# ------------------------------------------------------------------------------------------------ the undecoded image

UNUSUAL = {
    "rgb": png(Image.fromarray(noise(40, 60, 3))),
    "alpha": png(Image.fromarray(noise(40, 60, 4))),
    "16 bit": png(Image.fromarray(np.arange(65536, dtype=np.uint16).reshape(256, 256))),
    "turned": png(Image.fromarray(noise(40, 60, 3)), exif=turned_exif()),
    "palette": png(Image.fromarray(noise(40, 60, 3)).quantize(8), transparency=0),
}


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("source", ["path", "string", "bytes", "pillow", "data uri", "base64"])
def test_the_pipeline_sees_what_evaluation_sees(classify, tmp_path, kind, source):
    path = tmp_path / "image.png"
    path.write_bytes(UNUSUAL[kind])
    image = {
        "path": lambda: path,
        "string": lambda: str(path),
        "bytes": path.read_bytes,
        "pillow": lambda: Image.open(path),
        "data uri": lambda: "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode(),
        "base64": lambda: base64.encodebytes(path.read_bytes()).decode(),
    }[source]()
    answers = classify(image, function_to_apply="none", top_k=6)
    assert np.allclose(as_vector(answers), direct_logits(classify, path), rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_arrays_and_tensors_are_images_too(classify, make):
    pixels = noise(40, 60, 3)
    answers = classify(make(pixels), function_to_apply="none", top_k=6)
    assert np.allclose(as_vector(answers), direct_logits(classify, pixels), rtol=0, atol=1e-6)


# ----------------------------------------------------------------------------------------------- as transformers' own


class Images(Dataset):
    def __init__(self, images: list):
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int):
        return {"image": self.images[row]}


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("container", ["list", "generator", "dataset"])
def test_many_images_equal_each_alone(classify, container, batch_size):
    images = [Image.fromarray(noise(20 + seed, 40, 3, seed=seed)) for seed in range(5)]
    inputs = {
        "list": images,
        "generator": (image for image in images),
        "dataset": KeyDataset(Images(images), "image"),
    }[container]
    many = classify(inputs, batch_size=batch_size)
    alone = [classify(image) for image in images]
    for answers, expected in zip(many, alone, strict=True):
        assert [answer["label"] for answer in answers] == [answer["label"] for answer in expected]
        assert np.allclose([a["score"] for a in answers], [a["score"] for a in expected], rtol=0, atol=1e-6)


def test_scores_of_a_single_label_model_are_the_softmax(classify):
    pixels = noise(40, 60, 3)
    expected = torch.tensor(direct_logits(classify, pixels)).softmax(-1).tolist()
    assert np.allclose(as_vector(classify(pixels, top_k=6)), expected, rtol=0, atol=1e-6)


def test_scores_of_a_multi_label_model_are_sigmoids():
    classify = make_pipeline(make_model(problem_type="multi_label_classification"))
    pixels = noise(40, 60, 3)
    expected = torch.tensor(direct_logits(classify, pixels)).sigmoid().tolist()
    assert np.allclose(as_vector(classify(pixels, top_k=6)), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_top_k_gives_the_best_classes_first(classify, top_k):
    pixels = noise(40, 60, 3)
    logits = torch.tensor(direct_logits(classify, pixels))
    names = [classify.model.config.id2label[row] for row in logits.argsort(descending=True).tolist()]
    assert [answer["label"] for answer in classify(pixels, top_k=top_k)] == names[:top_k]


def test_making_the_pipeline_logs_no_complaint_about_the_model(caplog):
    transformers_logger = logging.getLogger("transformers")
    transformers_logger.addHandler(caplog.handler)
    try:
        make_pipeline(make_model())
    finally:
        transformers_logger.removeHandler(caplog.handler)
    assert "not supported" not in caplog.text


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("no/such/file.jpg", "no/such/file.jpg: cannot be read"),
        ("no/such/café", "no/such/café: cannot be read"),
        ("abcd", "abcd: cannot be read"),
        ("data:image/png;base64,@@@", "not a base64 data URI"),
        (noise(2, 40, 60, 3), "one input holds 2 images"),
        (None, "NoneType is no image"),
    ],
)
def test_what_is_no_image_is_an_error_that_says_so(classify, image, message):
    with pytest.raises(InputError, match=message):
        classify.run_single(image, {}, {}, {})


def test_a_broken_file_is_named(classify, tmp_path):
    (tmp_path / "bad.jpg").write_text("hello")
    with pytest.raises(InputError, match=r"bad\.jpg: not an image"):
        classify([noise(8, 8, 3), str(tmp_path / "bad.jpg")])


# ---------------------------------------------------------------------------------------------------------------- URLs


@pytest.fixture
def web_address(monkeypatch):
    """A server on loopback: /image.png, redirected to from /moved; /busy answers 503; all else 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status = {"/image.png": 200, "/moved": 302, "/busy": 503}.get(self.path, 404)
            body = UNUSUAL["alpha"] if status == 200 else b""
            self.send_response(status)
            self.send_header("Location", "/image.png")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("path", ["/image.png", "/moved"])
def test_a_url_gives_the_answer_of_its_file(classify, web_address, path):
    answers = classify(web_address + path, function_to_apply="none", top_k=6)
    assert np.allclose(as_vector(answers), direct_logits(classify, UNUSUAL["alpha"]), rtol=0, atol=1e-6)


def test_a_url_without_an_image_is_the_users_error(classify, web_address):
    with pytest.raises(InputError, match=r"/none\.png: the server answered 404"):
        classify(f"{web_address}/none.png")


def test_a_server_in_trouble_is_the_environments_fault(classify, web_address):
    with pytest.raises(EnvironmentFault, match="/busy: the server answered 503"):
        classify(f"{web_address}/busy")


def test_a_refused_connection_is_the_environments_fault(classify, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(EnvironmentFault, match=r"127\.0\.0\.1:1/a\.png: cannot be fetched"):
        classify("http://127.0.0.1:1/a.png", timeout=5.0)


def test_offline_a_url_is_an_error_that_says_offline(classify):
    with pytest.raises(EnvironmentFault, match="offline"):
        classify("http://127.0.0.1:1/a.png")


# ------------------------------------------------------------------------------------------------- published with code

REMOTE_SCRIPT = """
import json, sys
from transformers import pipeline
classify = pipeline("image-classification", model=sys.argv[1], trust_remote_code=True, device="cpu")
assert type(classify).__module__.startswith("transformers_modules"), type(classify)
print(json.dumps(classify(sys.argv[3], function_to_apply="none", top_k=6)))
classify.save_pretrained(sys.argv[2])
"""


def publish(folder: Path) -> None:
    """Writes what a Hub repository of the model holds."""
    model = make_model()
    model.config.custom_pipelines = CUSTOM_PIPELINES
    model.config.auto_map = {
        "AutoConfig": "configuration_vit_scratch.ViTScratchConfig",
        "AutoModelForImageClassification": "modeling_vit_scratch.ViTScratchForImageClassification",
    }
    model.save_pretrained(folder)
    processor = ViTScratchImageProcessor.from_config(model.config)
    processor.auto_map = {"AutoImageProcessor": "image_processing_vit_scratch.ViTScratchImageProcessor"}
    processor.save_pretrained(folder)
    for source in Path(modeling_vit_scratch.__file__).parent.glob("*_vit_scratch.py"):
        (folder / source.name).write_text(source.read_text())


@pytest.mark.e2e
def test_a_fresh_process_answers_alike_from_a_published_folder_and_from_what_it_saves(classify, tmp_path):
    publish(tmp_path / "published")
    (tmp_path / "image.png").write_bytes(UNUSUAL["alpha"])
    expected = direct_logits(classify, UNUSUAL["alpha"])
    for folder, copy in (("published", "saved"), ("saved", "saved_again")):
        command = [sys.executable, "-c", REMOTE_SCRIPT, str(tmp_path / folder), str(tmp_path / copy)]
        done = subprocess.run(
            [*command, str(tmp_path / "image.png")], check=True, cwd=tmp_path, stdout=subprocess.PIPE, text=True
        )
        answers = json.loads(done.stdout.strip().splitlines()[-1])
        assert np.allclose(as_vector(answers), expected, rtol=0, atol=1e-6)
