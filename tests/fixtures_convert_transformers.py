"""Tiny checkpoints of transformers' own vision models, every tensor of them random."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from fixtures_modeling import TINY, random_pixels, randomize
from packaging.version import Version

# In float64 rounding is about 1e-15 and a few layers make 1e-13 of it; a difference of meaning is far larger.
CLOSE = {"rtol": 0, "atol": 1e-12}
# DINOv2 resamples its positions in float32 whatever its dtype; a DeiT's token and position, added in float32 when it
# became a register, carry one rounding of 2**-24. Both move outputs by 2e-7 at most.
CLOSE_TO_SINGLE = {"rtol": 0, "atol": 1e-6}

SHAPE = {**TINY, "hidden_act": "gelu"}
DINO_SHAPE = {name: value for name, value in SHAPE.items() if name != "intermediate_size"} | {"mlp_ratio": 2}
LABELS = {"id2label": {index: f"kind {index}" for index in range(7)}}
DECODER = {
    "decoder_hidden_size": 24,
    "decoder_num_hidden_layers": 2,
    "decoder_num_attention_heads": 3,
    "decoder_intermediate_size": 40,
}


def vit(**fields):
    return transformers.ViTConfig(**{**SHAPE, **LABELS, **fields})


def deit(**fields):
    return transformers.DeiTConfig(**{**SHAPE, **LABELS, **fields})


def dinov2(**fields):
    return transformers.Dinov2Config(**{**DINO_SHAPE, **LABELS, **fields})


def registers(**fields):
    return transformers.Dinov2WithRegistersConfig(**{**DINO_SHAPE, **LABELS, "num_register_tokens": 3, **fields})


def dinov3(**fields):
    return transformers.DINOv3ViTConfig(**{**SHAPE, "num_register_tokens": 3, **fields})


def siglip_vision(**fields):
    return transformers.SiglipVisionConfig(**{**SHAPE, **fields})


def siglip(**fields):
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"vocab_size": 10, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.SiglipConfig(vision_config={**SHAPE, **fields}, text_config={**text, **ids}, **LABELS)


def mae(**fields):
    return transformers.ViTMAEConfig(**{**SHAPE, **DECODER, **fields})


NON_SQUARE = {"image_size": [32, 48], "patch_size": [8, 16]}
BIASES = {"query_bias": False, "key_bias": True, "value_bias": False, "proj_bias": False, "mlp_bias": False}

# Each class of each type, and each field that changes what is computed.
ENCODERS = {
    "ViT with a pooler": ("ViTModel", vit(pooler_output_size=24)),
    "ViT without square": ("ViTModel", vit(**NON_SQUARE)),
    "ViT without biases": ("ViTModel", vit(qkv_bias=False, hidden_act="relu", layer_norm_eps=1e-3)),
    "ViT of 1 channel": ("ViTModel", vit(num_channels=1)),
    "ViT masked": ("ViTForMaskedImageModeling", vit(encoder_stride=8)),
    "DeiT": ("DeiTModel", deit()),
    "DeiT masked": ("DeiTForMaskedImageModeling", deit(encoder_stride=8)),
    "DINOv2": ("Dinov2Model", dinov2()),
    "DINOv2 with SwiGLU": ("Dinov2Model", dinov2(use_swiglu_ffn=True, mlp_ratio=3)),
    "DINOv2 without mask token": ("Dinov2Model", dinov2(use_mask_token=False)),
    "DINOv2 backbone": ("Dinov2Backbone", dinov2()),
    "registers": ("Dinov2WithRegistersModel", registers()),
    "registers, none": ("Dinov2WithRegistersModel", registers(num_register_tokens=0)),
    "registers with SwiGLU": ("Dinov2WithRegistersModel", registers(use_swiglu_ffn=True)),
    "DINOv3": ("DINOv3ViTModel", dinov3()),
    "DINOv3 of another base": ("DINOv3ViTModel", dinov3(rope_theta=50.0)),
    "DINOv3 gated": ("DINOv3ViTModel", dinov3(use_gated_mlp=True, hidden_act="silu", key_bias=True)),
    "DINOv3 with other biases": ("DINOv3ViTModel", dinov3(**BIASES, num_register_tokens=0)),
    "DINOv3 without q, k, v biases": ("DINOv3ViTModel", dinov3(query_bias=False, value_bias=False)),
    "DINOv3 backbone": ("DINOv3ViTBackbone", dinov3()),
    "SigLIP vision": ("SiglipVisionModel", siglip_vision(hidden_act="gelu_pytorch_tanh")),
    "SigLIP vision without head": ("SiglipVisionModel", siglip_vision(vision_use_head=False)),
    "SigLIP": ("SiglipModel", siglip()),
    "MAE": ("ViTMAEModel", mae()),
}
if Version(transformers.__version__) >= Version("5.24"):  # earlier ones divide by the list
    ENCODERS["DINOv2 with a list of sizes"] = ("Dinov2Model", dinov2(image_size=[32, 32], patch_size=[8, 8]))
    ENCODERS["DINOv3 without square"] = ("DINOv3ViTModel", dinov3(**NON_SQUARE))
CLASSIFIERS = {
    "ViT": ("ViTForImageClassification", vit()),
    "ViT without square": ("ViTForImageClassification", vit(**NON_SQUARE)),
    "DeiT": ("DeiTForImageClassification", deit()),
    "DeiT distilled": ("DeiTForImageClassificationWithTeacher", deit()),
    "DINOv2": ("Dinov2ForImageClassification", dinov2()),
    "registers": ("Dinov2WithRegistersForImageClassification", registers()),
    "SigLIP": ("SiglipForImageClassification", siglip()),
    "SigLIP without head": ("SiglipForImageClassification", siglip(vision_use_head=False)),
}
# Their distillation token has no head, and becomes a register.
WITH_FOLDED_TOKEN = ("DeiTModel", "DeiTForMaskedImageModeling", "DeiTForImageClassification")


def random_peer(class_name: str, config: transformers.PreTrainedConfig, seed: int = 0) -> transformers.PreTrainedModel:
    """Returns transformers' model with every tensor drawn anew, norms and LayerScales around 1."""
    model = getattr(transformers, class_name)(copy.deepcopy(config))
    randomize(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name and name.endswith("weight") and "layernorm" not in name
            if is_norm or "lambda1" in name:
                parameter.add_(1)
    return model.eval()


def saved_peer(folder: Path, class_name: str, config: transformers.PreTrainedConfig, **kwargs: Any) -> Any:
    """Returns transformers' model in float64; saved in `folder` is float32, under the names of published files."""
    model = random_peer(class_name, config)
    model.save_pretrained(folder, **kwargs)
    return model.double()


def encoder_of(theirs: Any) -> Any:
    """Returns the part of transformers' model that is an encoder."""
    name = type(theirs).__name__
    if name in ("SiglipForImageClassification", "SiglipModel"):
        return theirs.vision_model
    if name.endswith(("Classification", "Teacher", "MaskedImageModeling", "PreTraining")):
        return getattr(theirs, theirs.base_model_prefix)
    return theirs


def run_encoder(theirs: Any, pixels: torch.Tensor, **kwargs: Any) -> Any:
    """Returns the outputs of transformers' encoder; one of MAE hides nothing and keeps the order."""
    encoder = encoder_of(theirs)
    if encoder.config.model_type == "vit_mae":
        encoder.config.mask_ratio = 0.0
        num_patches = pixels[0, 0].numel() // encoder.config.patch_size**2
        kwargs["noise"] = torch.arange(num_patches).expand(len(pixels), -1)
    return encoder(pixels, **kwargs)


def own_pixels(theirs: Any) -> torch.Tensor:
    """Returns random pixel values of the size the model was made for."""
    config = encoder_of(theirs).config
    size = config.image_size if isinstance(config.image_size, list) else [config.image_size] * 2
    return random_pixels(height=size[0], width=size[1], channels=config.num_channels, dtype=torch.float64)


def set_config(folder: Path, **fields: Any) -> None:
    """Writes fields into the config.json of `folder`."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
