"""Image classification that hands the image processor the undecoded image.

transformers' own pipeline decodes first: it drops alpha and clips 16 bits to 8. Here alpha, depth and EXIF orientation
reach the processor, so that a pipeline sees what training and evaluation saw.
"""

import base64
import os
from typing import Any, ClassVar

from huggingface_hub import get_session
from transformers import AutoModelForImageClassification, BatchFeature, ImageClassificationPipeline

from .errors_vit_scratch import EnvironmentFault, InputError
from .image_input_vit_scratch import ImageInput
from .image_processing_vit_scratch import ViTScratchImageProcessor

__all__ = ["CUSTOM_PIPELINES", "ViTScratchImageClassificationPipeline"]

# What `config.custom_pipelines` of a published model holds; it makes `pipeline()` use the class below.
CUSTOM_PIPELINES = {
    "image-classification": {
        "impl": "pipeline_vit_scratch.ViTScratchImageClassificationPipeline",
        "pt": ["AutoModelForImageClassification"],
    }
}

# No image file is this short, so that a string below is a path that does not exist.
_MIN_BASE64_LENGTH = 40


class ViTScratchImageClassificationPipeline(ImageClassificationPipeline):
    """Pipeline "image-classification" of the ViTScratch models, called as transformers' own.

    An image is a path, a URL, a data URI or base64 string, encoded bytes, a Pillow image, an array or a tensor;
    several are a list, a dataset or a generator. Scores follow `config.problem_type`: softmax, or sigmoid a class.
    """

    image_processor: ViTScratchImageProcessor
    _registered_impl: ClassVar[dict[str, dict[str, Any]]]

    def preprocess(self, image: ImageInput, timeout: float | None = None) -> BatchFeature:  # type: ignore[override]
        if isinstance(image, str) and not os.path.exists(image):
            image = _read_url(image, timeout) if image.startswith(("http://", "https://")) else _read_base64(image)
        model_inputs = self.image_processor(image, return_tensors="pt")
        num_images = len(model_inputs["pixel_values"])
        if num_images != 1:  # postprocess answers for one image and would drop the others
            raise InputError(f"one input holds {num_images} images; pass several images as a flat list")
        return model_inputs.to(self.dtype)

    def check_model_type(self, supported_models: list[str] | dict) -> None:
        """Accepts the model: transformers lists its own classes alone, and would log ours as unsupported."""


# Makes `save_pretrained` of the pipeline write this code and `custom_pipelines`, as registering would, without taking
# "image-classification" away from other models of the process.
ViTScratchImageClassificationPipeline._registered_impl = {
    "image-classification": {"impl": ViTScratchImageClassificationPipeline, "pt": (AutoModelForImageClassification,)}
}


def _read_url(url: str, timeout: float | None) -> bytes:
    try:
        response = get_session().get(url, timeout=timeout, follow_redirects=True)
    except Exception as error:  # the session's library differs by version of huggingface_hub, and so do its errors
        raise EnvironmentFault(f"{url}: cannot be fetched ({error}); check the address and the network") from error
    if response.status_code >= 500 or response.status_code == 429:
        raise EnvironmentFault(f"{url}: the server answered {response.status_code}; try again later")
    if response.status_code >= 400:
        raise InputError(f"{url}: the server answered {response.status_code}; check the address")
    return response.content


def _read_base64(text: str) -> str | bytes:
    """Returns the encoded bytes in `text`, or `text` itself where it can only be a path."""
    is_data_uri = text.startswith("data:image/")
    encoded = text.partition(",")[2] if is_data_uri else text
    try:
        # A file name has a dot, which is no base64.
        data = base64.b64decode("".join(encoded.split()), validate=True)
    except ValueError as error:
        if is_data_uri:
            raise InputError(f"{text[:40]}...: not a base64 data URI ({error})") from error
        return text
    return data if is_data_uri or len(text) >= _MIN_BASE64_LENGTH else text
