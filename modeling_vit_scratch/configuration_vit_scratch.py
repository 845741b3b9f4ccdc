"""Shape of a Vision Transformer ("An Image is Worth 16x16 Words", https://arxiv.org/abs/2010.11929)."""

import dataclasses
import difflib
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import BackboneConfigMixin, PreTrainedConfig

from .errors_vit_scratch import InputError
from .validation_vit_scratch import check_architecture, check_grid, check_labels, check_pretraining, check_tokens

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

# Depths of the ResNet's stages in front of a ViT, under the names of the released hybrids (paper section 3.1).
HYBRIDS: dict[str, list[int]] = {
    "R+Ti/16": [],
    "R26+S/32": [2, 2, 2, 2],
    "R26+B/32": [2, 2, 2, 2],
    "R50+B/16": [3, 4, 9],  # stage 4 removed, its layers moved to stage 3
    "R50+B/32": [3, 4, 6, 3],
    "R50+L/16": [3, 4, 9],
    "R50+L/32": [3, 4, 6, 3],
}
# The stem of R+Ti/16 shrinks the image 4 times and its patches are 8 x 8, so that a token stands for 32 pixels.
PIXELS_BEHIND_R_TI_16 = 32

POOLINGS_OF_CLASS_TOKEN = ("class_token", "class_token_and_mean")

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
class ViTScratchConfig(BackboneConfigMixin, PreTrainedConfig):
    """Configuration of the ViTScratch models; `from_variant("B/16")` gives the named ones.

    Defaults are those of ViT-B/16 in the official code. Unknown fields raise `InputError`, values of a wrong type
    `StrictDataclassFieldValidationError`, fields that contradict each other `StrictDataclassClassValidationError`.
    """

    model_type = "vit_scratch"

    image_size: int | list[int] = 224
    """Pixels: one number for a square, or [height, width]. The grid the position embeddings are made for."""
    patch_size: int | list[int] = 16
    """Pixels a token stands for: one number for a square, or [height, width]. Behind a ResNet stem they are cut from
    its feature map, so they must be multiples of its stride."""
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
    qk_norm: bool = False
    """LayerNorm on each head's queries and keys (arXiv 2302.05442, section 2)."""
    mlp_type: Literal["mlp", "swiglu"] = "mlp"
    """Two layers with `hidden_act` between, or SwiGLU (arXiv 2002.05202), whose `hidden_act` is "silu"."""
    layer_scale_init: float | int | None = None
    """Initial factor on each channel of what a layer adds (LayerScale, arXiv 2103.17239); None: no such factors."""
    drop_path_rate: float | int = 0.0
    """In [0, 1): share of images for which the last layer is skipped in training; linear from 0 at the first layer
    (stochastic depth as in AugReg, arXiv 2106.10270)."""
    patch_dropout_rate: float | int = 0.0
    """In [0, 1): share of patches that are dropped in training, their work with them (arXiv 2212.00794)."""
    position_embedding_type: Literal["none", "learned_1d", "learned_2d", "sincos_2d", "relative", "rope_2d"] = (
        "learned_1d"
    )
    """Paper appendix D.4 for the first five; sincos_2d as in arXiv 2205.01580, rope_2d as in DINOv3 (arXiv
    2508.10104)."""
    position_embedding_placement: Literal["stem", "every_layer", "every_layer_shared"] = "stem"
    """Added once before the first layer, to each layer's input from a table of its own, or from one table (D.4)."""
    class_token_position: bool = True
    """Whether the learned_1d table has rows for the class and distillation tokens too."""
    rope_theta: float | int = 100.0
    """Ratio of the longest to the shortest wavelength of rope_2d, but for one step."""
    use_class_token: bool | None = None
    """None: where `pooling` reads it."""
    use_distillation_token: bool = False
    """A second class token with a head of its own, for distillation (DeiT, arXiv 2012.12877)."""
    num_register_tokens: int = 0
    """Tokens without position between class token and patches that no head reads (arXiv 2309.16588)."""
    pooling: Literal["class_token", "mean", "attention", "class_token_and_mean"] = "class_token"
    """What the head reads: the class token, the mean of the patch tokens, what an attention head makes of these (MAP,
    arXiv 2106.04560), or class token and mean side by side (DINOv2's linear classifier)."""
    final_norm: Literal["before_pooling", "after_pooling"] = "before_pooling"
    """Where the last LayerNorm stands; after_pooling is for the mean (timm's `fc_norm`)."""
    representation_size: int | None = None
    """Width of the tanh layer before the head (paper section 3.2, pre-training only); None: no such layer."""
    head_bias_init: float | int = 0.0
    """Initial bias of the classifier; -10 for the ImageNet-21k runs of the paper."""
    position_interpolation: Literal["bilinear_corners", "bicubic", "bicubic_antialias"] = "bilinear_corners"
    """How positions are resampled to another grid: as the official code, as transformers' ViT, or as timm."""
    stem_depths: list[int] | None = None
    """Hybrids: residual units in each stage of the ResNet in front; [] is its root alone, None no ResNet."""
    stem_width_factor: int = 1
    corruption_ratio: float | int = 0.5
    """Masked patch prediction, in (0, 1]: share of patches that are corrupted and predicted (paper B.1.2)."""
    prediction_target: Literal["mean_color", "downsized", "pixels"] = "mean_color"
    """Masked patch prediction: the patch's mean colour of 3 bits a channel, those of its 4 x 4 downsized version, or
    all its pixels (paper B.1.2)."""
    image_mean: list[float] | None = None
    """Masked patch prediction: of the image processor, to tell colours by; None: 0.5 a channel."""
    image_std: list[float] | None = None
    mask_ratio: float | int = 0.75
    """Masked autoencoding, in (0, 1): share of patches the encoder does not see (arXiv 2111.06377)."""
    norm_pix_loss: bool = True
    """Masked autoencoding: whether each patch's target is normalised by its own mean and deviation."""
    decoder_hidden_size: int = 512
    decoder_num_hidden_layers: int = 8
    decoder_num_attention_heads: int = 16
    decoder_intermediate_size: int = 2048
    apply_layernorm: bool = True
    """Backbone: whether feature maps pass the last LayerNorm."""
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None
    problem_type: Literal["single_label_classification", "multi_label_classification"] = "single_label_classification"
    """Softmax over the classes, or one sigmoid a class."""

    @classmethod
    def from_variant(cls, name: str, **fields: Any) -> "ViTScratchConfig":
        """Returns the configuration called `name`, such as "B/16" or "R50+B/16"; `fields` override any value."""
        size, _, patch = name.rpartition("+")[2].partition("/")
        is_known = name in HYBRIDS if "+" in name else size in VARIANTS and patch.isdigit()
        if not is_known:
            raise InputError(
                f"variant={name!r} must be SIZE/PATCH with SIZE one of {', '.join(VARIANTS)}, as in B/16, or a "
                f"hybrid: {', '.join(HYBRIDS)}"
            )
        hidden_size, num_hidden_layers, intermediate_size, num_attention_heads = VARIANTS[size]
        shape = {
            "patch_size": PIXELS_BEHIND_R_TI_16 if name == "R+Ti/16" else int(patch),
            "hidden_size": hidden_size,
            "num_hidden_layers": num_hidden_layers,
            "intermediate_size": intermediate_size,
            "num_attention_heads": num_attention_heads,
            "stem_depths": HYBRIDS.get(name),
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
        if {"out_features", "out_indices", "num_hidden_layers"} & (fields.keys() | kwargs.keys()):
            stored = {name: value for name, value in stored.items() if name not in ("out_features", "out_indices")}
            fields |= {name: kwargs.pop(name) for name in ("out_features", "out_indices") if name in kwargs}
        return super().from_dict({**stored, **fields}, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        self.set_output_features_output_indices(kwargs.pop("out_features", None), kwargs.pop("out_indices", None))
        _refuse_unknown_fields(kwargs, known=[field.name.lstrip("_") for field in dataclasses.fields(self)])
        if self.use_class_token is None:
            self.use_class_token = self.pooling in POOLINGS_OF_CLASS_TOKEN
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
        """Tokens before the patches: class, distillation and register tokens."""
        return int(bool(self.use_class_token)) + int(self.use_distillation_token) + self.num_register_tokens

    @property
    def num_prefix_positions(self) -> int:
        """Rows of the learned_1d table before those of the patches."""
        return self.num_prefix_tokens - self.num_register_tokens if self.class_token_position else 0

    @property
    def stem_stride(self) -> int:
        """Pixels a side of one feature of the ResNet stem; 1 without one."""
        return 1 if self.stem_depths is None else 4 * 2 ** max(0, len(self.stem_depths) - 1)

    @property
    def pooled_size(self) -> int:
        """Width of what the pre-logits layer, or without one the classifier, reads."""
        return self.hidden_size * (2 if self.pooling == "class_token_and_mean" else 1)

    @property
    def stage_names(self) -> list[str]:
        """Feature maps of the backbone: the embeddings and each layer's output."""
        return ["stem", *(f"stage{index}" for index in range(1, self.num_hidden_layers + 1))]

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
        check_architecture(self)
        check_tokens(self)
        check_pretraining(self)
        super().validate_architecture()

    def validate_grid(self) -> None:
        check_grid(self)

    def validate_labels(self) -> None:
        check_labels(self.id2label, self.label2id)


def _height_width(size: int | list[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _refuse_unknown_fields(fields: dict[str, Any], known: list[str]) -> None:
    unknown = [name for name in fields if not name.startswith("_") and name not in _FIELDS_OF_TRANSFORMERS]
    for name in unknown:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; the fields are {', '.join(sorted(known))}"
        raise InputError(f"ViTScratchConfig has no field {name!r}{hint}")
