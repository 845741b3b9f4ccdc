"""What every converter returns, and the proof that the converted model computes what the original computes.

B images, C channels, H x W pixels.
"""

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from .convert_messages_vit_scratch import some
from .errors_vit_scratch import InputError
from .image_processing_vit_scratch import ViTScratchImageProcessor

__all__ = [
    "Conversion",
    "Difference",
    "LARGEST_IN_DOUBLE",
    "TOLERANCES",
    "built",
    "fixed_images",
    "our_outputs",
    "proof_dtype",
    "prove",
]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Parameters up to which both sides fit into memory in float64 beside the original.
LARGEST_IN_DOUBLE = 700_000_000

# Largest |difference| over max(1, largest |original|). On the DINOv2 S/14 the other GELU moves it to 1.2e-3 and an
# epsilon of 1e-12 for 1e-6 to 1.8e-4, on networks of random weights to 1e-6 and less. The order of sums alone moves it
# to 1e-14 in float64 and to 3e-6 in float32.
TOLERANCES = {torch.float64: 1e-8, torch.float32: 3e-5}


@dataclass(eq=False)
class Conversion:
    """A foreign checkpoint as a model of ours, and the original to compare it with."""

    source: str
    """As the user named it."""
    model: PreTrainedModel
    """In evaluation mode, every tensor from the source, each in the dtype that the converter gives it."""
    image_processor: ViTScratchImageProcessor
    reference: Callable[[Tensor], dict[str, Tensor]]
    """The original's outputs for pixel_values (B, C, H, W): some of logits, last_hidden_state, pooler_output."""
    reference_dtype: torch.dtype = torch.float64
    """What the original computes in; pixel values arrive in it."""
    notes: list[str] = field(default_factory=list)
    """What was left out, folded or assumed: a sentence each, printed."""
    image_sizes: list[tuple[int, int]] | None = None
    """(height, width) in pixels to compare at; None: the size the model is made for."""
    source_kind: str = ""
    """What the source is, in words."""
    taken_from_user: str = ""
    """The option whose value no tensor confirms, as "--name value": where sides differ, it is at fault."""


@dataclass(frozen=True)
class Difference:
    """How far one output of ours is from the original's."""

    output: str
    image_size: tuple[int, int]
    """(height, width) in pixels of the images it was computed from."""
    largest: float
    """Largest |ours - original|; NaN where either is."""
    scale: float
    """Largest |original|, 1 at least: the tolerance is relative to it."""
    tolerance: float

    @property
    def is_equal(self) -> bool:
        return self.largest <= self.tolerance * self.scale  # NaN is not


def built(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, state_dict: Mapping[str, Tensor], source: str
) -> PreTrainedModel:
    """Returns the model in evaluation mode with exactly these tensors, in their own dtype.

    Raises:
        InputError: a tensor is missing, has no place, has another shape, or is not of finite floating-point numbers.
    """
    with no_init_weights():  # every tensor is overwritten
        model = model_class(config)
    _check_tensors(model, state_dict, source)
    _check_numbers(state_dict, source)
    # Copies: a tensor shared with the original, or a view of a fused one, could neither be trained nor saved.
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in state_dict.items()}
    model.load_state_dict(tensors, strict=True, assign=True)
    dtypes = Counter(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    model.config.dtype = dtypes.most_common(1)[0][0]
    return model.eval()


def _check_tensors(model: PreTrainedModel, state_dict: Mapping[str, Tensor], source: str) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    problems = {
        "missing": sorted(wanted.keys() - found.keys()),
        "without a place": sorted(found.keys() - wanted.keys()),
        "of another shape": [
            f"{name} {shape} instead of {wanted[name]}"
            for name, shape in sorted(found.items())
            if wanted.get(name, shape) != shape
        ],
    }
    if any(problems.values()):
        listed = "; ".join(f"{kind}: {some(names)}" for kind, names in problems.items() if names)
        raise InputError(
            f"{source} does not fill a {type(model).__name__} of the shape its config or tensors tell: {listed}; the "
            "file is incomplete or of an architecture that is not converted"
        )


def _check_numbers(state_dict: Mapping[str, Tensor], source: str) -> None:
    if odd := [f"{name} ({tensor.dtype})" for name, tensor in state_dict.items() if tensor.dtype not in FLOATS]:
        raise InputError(
            f"{source}: {some(odd)}: only float16, bfloat16, float32 and float64 are converted; save it in one of them"
        )
    if odd := [name for name, tensor in state_dict.items() if not tensor.isfinite().all()]:
        raise InputError(
            f"{source}: NaN or infinity in {some(odd)}; the training diverged or the file is damaged: take another"
        )


def proof_dtype(model: torch.nn.Module) -> torch.dtype:
    """Returns float64, or float32 for a model so large that its copies in float64 would not fit."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return torch.float64 if num_parameters < LARGEST_IN_DOUBLE else torch.float32


def fixed_images(
    num_channels: int, image_size: tuple[int, int], *, batch_size: int = 2, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Returns pixel values (B, C, H, W) in [-2, 2] by a formula: no two patches, channels or images are alike."""
    image = torch.arange(batch_size, dtype=torch.float64).view(-1, 1, 1, 1)
    channel = torch.arange(num_channels, dtype=torch.float64).view(-1, 1, 1)
    row = torch.arange(image_size[0], dtype=torch.float64).view(-1, 1)
    column = torch.arange(image_size[1], dtype=torch.float64)
    phase = 0.31 * row + 0.17 * column + 0.001 * row * column + 1.3 * channel + 0.7 * image
    return (2 * torch.sin(phase)).to(dtype)


@torch.no_grad()
def our_outputs(model: PreTrainedModel, pixel_values: Tensor, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the outputs that `names` holds: logits of the head, the rest of the encoder."""
    found = {}
    if "logits" in names:
        found["logits"] = model(pixel_values).logits
    if encoder_names := names.keys() - {"logits"}:
        outputs = model.base_model(pixel_values)
        found |= {name: getattr(outputs, name) for name in encoder_names}
    return found


@torch.no_grad()
def prove(conversion: Conversion, *, tolerance: float | None = None) -> list[Difference]:
    """Returns how far ours is from the original on two fixed images, for every output the original gives.

    Args:
        conversion: both sides.
        tolerance: relative to the largest value of the original; None: that of `TOLERANCES`.
    """
    dtype, config = conversion.reference_dtype, conversion.model.config
    tolerance = TOLERANCES[dtype] if tolerance is None else tolerance
    model = conversion.model
    if any(tensor.dtype != dtype for tensor in model.state_dict().values()):
        model = copy.deepcopy(model)
        torch.nn.Module.to(model, dtype=dtype)
    differences = []
    for image_size in conversion.image_sizes or [config.image_height_width]:
        pixel_values = fixed_images(config.num_channels, image_size, dtype=dtype)
        original = conversion.reference(pixel_values)
        assert original, "a reference without outputs proves nothing"
        ours = our_outputs(model, pixel_values, original)
        differences += [_difference(name, image_size, ours[name], original[name], tolerance) for name in original]
    return differences


def _difference(
    name: str, image_size: tuple[int, int], ours: Tensor, original: Tensor, tolerance: float
) -> Difference:
    assert ours.shape == original.shape, f"{name}: {tuple(ours.shape)} instead of {tuple(original.shape)}"
    ours, original = ours.double(), original.double()
    largest = (ours - original).abs().max().item()
    return Difference(name, image_size, largest, max(1.0, original.abs().max().item()), tolerance)
