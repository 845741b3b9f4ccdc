"""Shape of a Vision Transformer ("An Image is Worth 16x16 Words", https://arxiv.org/abs/2010.11929)."""

import dataclasses
import difflib
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from .errors_vit_scratch import InputError

__all__ = ["VARIANTS", "ViTScratchConfig"]

# name: (hidden_size, num_hidden_layers, intermediate_size, num_attention_heads). B, L, H: paper Table 1; Ti, S: AugReg
# (arXiv 2106.10270); g, G: Scaling Vision Transformers (arXiv 2106.04560); So400m: big_vision.
VARIANTS: dict[str, tuple[int, int, int, int]] = {
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
    "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
    "So400m": (1152, 27, 4304, 16),
}

_LABEL_FIELDS = ("id2label", "label2id", "num_labels")

# What transformers itself writes into a config.json or passes to a config, beside the declared fields.
_FIELDS_OF_TRANSFORMERS = {
    "attn_implementation",
    "auto_map",
    "base_model_tp_plan",
    "custom_pipelines",
    "distributed_config",
    "experts_implementation",
    "fusion_config",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "quantization_config",
    "tie_word_embeddings",
    "torch_dtype",
    "use_cache",
}


@strict
class ViTScratchConfig(PreTrainedConfig):
    """Configuration of the ViTScratch models; `from_variant("B/16")` gives the named ones.

    Defaults are those of ViT-B/16 in the official code. Unknown fields raise `InputError`, values of a wrong type
    `StrictDataclassFieldValidationError`, fields that contradict each other `StrictDataclassClassValidationError`.
    """

    model_type = "vit_scratch"

    image_size: int | list[int] = 224
    """Pixels: one number for a square, or [height, width]. The grid the position embeddings are made for."""
    patch_size: int | list[int] = 16
    """Pixels: one number for a square, or [height, width]."""
    num_channels: int = 3
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    """Width of the hidden layer of each MLP block."""
    hidden_act: str = "gelu_pytorch_tanh"
    """Activation of the MLP blocks. The paper does not say which GELU; the official code uses the tanh form."""
    layer_norm_eps: float = 1e-6
    hidden_dropout_prob: float | int = 0.0
    """In [0, 1): after the position embeddings, the attention output, the GELU and the second MLP layer."""
    attention_probs_dropout_prob: float | int = 0.0
    """In [0, 1): on the attention probabilities. 0 in every released checkpoint."""
    qkv_bias: bool = True
    pooling: Literal["class_token", "mean"] = "class_token"
    """What the head reads: the class token, or the mean of the patch tokens (then there is no class token)."""
    representation_size: int | None = None
    """Width of the tanh layer before the head (paper section 3.2, pre-training only); None: no such layer."""
    head_bias_init: float | int = 0.0
    """Initial bias of the classifier; -10 for the ImageNet-21k runs of the paper."""
    position_interpolation: Literal["bilinear_corners", "bicubic"] = "bilinear_corners"
    """How positions are resampled to another grid: as the official code, or as transformers' ViT."""
    problem_type: Literal["single_label_classification", "multi_label_classification"] = "single_label_classification"
    """Softmax over the classes, or one sigmoid a class."""

    @classmethod
    def from_variant(cls, name: str, **fields: Any) -> "ViTScratchConfig":
        """Returns the configuration called `name`, such as "B/16": size and patch; `fields` override any value."""
        size, _, patch = name.partition("/")
        if size not in VARIANTS or not patch.isdigit():
            raise InputError(f"variant={name!r} must be SIZE/PATCH with SIZE one of {', '.join(VARIANTS)}, as in B/16")
        hidden_size, num_hidden_layers, intermediate_size, num_attention_heads = VARIANTS[size]
        shape = {
            "patch_size": int(patch),
            "hidden_size": hidden_size,
            "num_hidden_layers": num_hidden_layers,
            "intermediate_size": intermediate_size,
            "num_attention_heads": num_attention_heads,
        }
        return cls(**{**shape, **fields})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Returns the configuration of `config_dict` with the fields among `kwargs` in place of its own."""
        # transformers sets such fields one by one on the finished config, past every check, and keeps the stored
        # label2id when only id2label is given. dtype stays: transformers reads it here and in the model.
        names = {field.name for field in dataclasses.fields(cls)} - {"dtype"}
        fields = {name: kwargs.pop(name) for name in list(kwargs) if name in names}
        other_labels = bool({"id2label", "label2id"} & fields.keys())
        if "num_labels" in kwargs and kwargs["num_labels"] != len(config_dict.get("id2label") or {}):
            other_labels = True
        stored = {name: value for name, value in config_dict.items() if not (other_labels and name in _LABEL_FIELDS)}
        return super().from_dict({**stored, **fields}, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        _refuse_unknown_fields(kwargs, known=[field.name for field in dataclasses.fields(self)])
        if self.label2id is not None:
            self.label2id = {label: int(index) for label, index in self.label2id.items()}
            if self.id2label is None:
                self.id2label = {index: label for label, index in self.label2id.items()}
        self._check_num_labels(kwargs.get("num_labels"))
        super().__post_init__(**kwargs)
        if self.id2label is not None and self.label2id is None:
            self.label2id = {label: int(index) for index, label in self.id2label.items()}

    def _check_num_labels(self, num_labels: int | None) -> None:
        if num_labels is not None and (not isinstance(num_labels, int) or num_labels < 1):
            raise InputError(f"num_labels={num_labels!r} must be a whole number of at least 1")
        if num_labels is not None and self.id2label is not None and num_labels != len(self.id2label):
            raise InputError(f"num_labels={num_labels} contradicts id2label of {len(self.id2label)}; give only one")
        if self.problem_type == "single_label_classification" and 1 in (num_labels, len(self.id2label or {})):
            raise InputError("a softmax over num_labels=1 is always 1; use problem_type='multi_label_classification'")

    @property
    def image_height_width(self) -> tuple[int, int]:
        return _height_width(self.image_size)

    @property
    def patch_height_width(self) -> tuple[int, int]:
        return _height_width(self.patch_size)

    @property
    def grid_size(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        (height, width), (patch_height, patch_width) = self.image_height_width, self.patch_height_width
        return height // patch_height, width // patch_width

    @property
    def num_patches(self) -> int:
        rows, columns = self.grid_size
        return rows * columns

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the patches: the class token, if there is one."""
        return 1 if self.pooling == "class_token" else 0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def output_attentions(self) -> bool:
        return bool(self._output_attentions)

    @output_attentions.setter
    def output_attentions(self, value: bool) -> None:
        # transformers ties this to eager attention; here every backend returns the attentions it is asked for.
        self._output_attentions = value

    def validate_output_attentions(self) -> None:
        """Nothing to refuse: see the setter."""

    def validate_architecture(self) -> None:
        for name in (
            "num_channels",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
        ):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        if self.hidden_size % self.num_attention_heads:
            raise InputError(
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads={self.num_attention_heads}"
            )
        if self.representation_size is not None and self.representation_size < 1:
            raise InputError(
                f"representation_size={self.representation_size} must be at least 1, or None for no layer"
            )
        if self.hidden_act not in ACT2FN:
            close = difflib.get_close_matches(self.hidden_act, list(ACT2FN), n=3)
            raise InputError(f"hidden_act={self.hidden_act!r} must be one of transformers' activations; near: {close}")
        if not self.layer_norm_eps > 0:
            raise InputError(f"layer_norm_eps={self.layer_norm_eps} must be above 0")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be in [0, 1)")
        super().validate_architecture()

    def validate_grid(self) -> None:
        for name in ("image_size", "patch_size"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != 2:
                raise InputError(f"{name}={value} must be one number or [height, width]")
            if min(_height_width(value)) < 1:
                raise InputError(f"{name}={value} must be at least 1 pixel a side")
        for side, pixels, patch in zip(
            ("height", "width"), self.image_height_width, self.patch_height_width, strict=True
        ):
            if pixels % patch:
                raise InputError(
                    f"image_size={self.image_size} must be a multiple of patch_size={self.patch_size}: the {side} of "
                    f"{pixels} leaves {pixels % patch} pixels; use {max(patch, pixels - pixels % patch)}"
                )

    def validate_labels(self) -> None:
        if self.id2label is None:
            return
        if sorted(self.id2label) != list(range(len(self.id2label))):
            raise InputError(
                f"id2label must number its classes 0..{len(self.id2label) - 1}; got {list(self.id2label)}"
            )
        names = list(self.id2label.values())
        if numbers := [str(name) for name in names if not isinstance(name, str)]:  # JSON would turn them into text
            raise InputError(f"id2label must name its classes by text; got {', '.join(numbers)}")
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise InputError(f"id2label must name each class once; {twice} stand more than once")
        if {label: int(index) for label, index in (self.label2id or {}).items()} != {
            label: index for index, label in self.id2label.items()
        }:
            raise InputError("label2id must be the inverse of id2label; leave it out to have it derived")


def _height_width(size: int | list[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _refuse_unknown_fields(fields: dict[str, Any], known: list[str]) -> None:
    unknown = [name for name in fields if not name.startswith("_") and name not in _FIELDS_OF_TRANSFORMERS]
    for name in unknown:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; the fields are {', '.join(sorted(known))}"
        raise InputError(f"ViTScratchConfig has no field {name!r}{hint}")
