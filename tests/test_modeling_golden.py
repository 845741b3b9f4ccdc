"""Logits of the official Flax code on a tiny model, with parameters and input given by formulas.

Width 32, 2 layers, MLP 64, 4 heads, 7 classes, patch 8; made with google-research/vision_transformer at c6de1e5.
"""

import math

import numpy as np
import pytest
import torch
from fixtures_modeling import TINY
from torch import Tensor

from modeling_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification

DIM, MLP, NUM_HEADS, NUM_LABELS, PATCH, NUM_LAYERS = 32, 64, 4, 7, 8, 2

CASES = {  # fields: number of parameters, number of tensors, logits of image 0 and 1
    "A class token": (
        {},
        24_135,
        40,
        [
            [0.105306, 0.278099, 0.276815, 0.111880, -0.098551, -0.221473, -0.202879],
            [0.101823, 0.281928, 0.286155, 0.122338, -0.091893, -0.221747, -0.209956],
        ],
    ),
    "B pre-logits": (
        {"representation_size": 16},
        24_551,
        42,
        [
            [0.068393, 0.205687, 0.202961, 0.071318, -0.086743, -0.162849, -0.125011],
            [0.068666, 0.207920, 0.206103, 0.073892, -0.085949, -0.164207, -0.127883],
        ],
    ),
    "C mean pooling": (
        {"pooling": "mean"},
        24_071,
        39,
        [
            [-0.110513, 0.041334, 0.160431, 0.160793, 0.052070, -0.074019, -0.124137],
            [-0.098197, 0.019838, 0.115233, 0.113150, 0.024390, -0.068718, -0.088348],
        ],
    ),
}
HYBRIDS = {  # likewise; patch_size is in pixels: a kernel of 1 on features of 8 pixels, one of 4 on features of 4
    "D ResNet of two stages": (
        {"stem_depths": [1, 2], "patch_size": 8},
        778_375,
        76,
        [
            [-0.152726, -0.056942, 0.083037, 0.158540, 0.114592, -0.006331, -0.104333],
            [-0.159848, -0.066132, 0.076101, 0.157120, 0.119356, 0.002376, -0.095777],
        ],
    ),
    "E root of the ResNet alone": (
        {"stem_depths": [], "patch_size": 16},
        59_911,
        43,
        [
            [-0.055594, -0.261103, -0.302651, -0.164505, 0.050216, 0.203107, 0.219976],
            [-0.066953, -0.254990, -0.281942, -0.138940, 0.068614, 0.205684, 0.205521],
        ],
    ),
}
# Case A, image 0, had the official code used the exact (erf) GELU.
LOGITS_ERF = [0.105307, 0.278108, 0.276828, 0.111890, -0.098548, -0.221479, -0.202891]
SHAPE_FIELDS = ("pooling", "representation_size", "stem_depths", "patch_size")


def linen_shapes(
    pooling: str = "class_token",
    representation_size: int | None = None,
    stem_depths: list[int] | None = None,
    patch_size: int = PATCH,
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the official code's parameters, as today's Flax Linen writes them."""
    has_class_token = pooling == "class_token"
    num_tokens = (32 // patch_size) ** 2 + has_class_token
    stem, channels, stride = ({}, 3, 1) if stem_depths is None else stem_shapes(stem_depths)
    shapes: dict[str, tuple[int, ...]] = {
        **stem,
        "embedding/kernel": (patch_size // stride, patch_size // stride, channels, DIM),
        "embedding/bias": (DIM,),
        "Transformer/posembed_input/pos_embedding": (1, num_tokens, DIM),
        "Transformer/encoder_norm/scale": (DIM,),
        "Transformer/encoder_norm/bias": (DIM,),
        "head/kernel": (representation_size or DIM, NUM_LABELS),
        "head/bias": (NUM_LABELS,),
    }
    if has_class_token:
        shapes["cls"] = (1, 1, DIM)
    if representation_size:
        shapes["pre_logits/kernel"] = (DIM, representation_size)
        shapes["pre_logits/bias"] = (representation_size,)
    for index in range(NUM_LAYERS):
        block = f"Transformer/encoderblock_{index}"
        attention, head_dim = f"{block}/MultiHeadDotProductAttention_0", DIM // NUM_HEADS
        for norm in ("LayerNorm_0", "LayerNorm_1"):
            shapes[f"{block}/{norm}/scale"] = shapes[f"{block}/{norm}/bias"] = (DIM,)
        for name in ("query", "key", "value"):
            shapes[f"{attention}/{name}/kernel"] = (DIM, NUM_HEADS, head_dim)
            shapes[f"{attention}/{name}/bias"] = (NUM_HEADS, head_dim)
        shapes[f"{attention}/out/kernel"] = (NUM_HEADS, head_dim, DIM)
        shapes[f"{attention}/out/bias"] = (DIM,)
        shapes[f"{block}/MlpBlock_0/Dense_0/kernel"] = (DIM, MLP)
        shapes[f"{block}/MlpBlock_0/Dense_0/bias"] = (MLP,)
        shapes[f"{block}/MlpBlock_0/Dense_1/kernel"] = (MLP, DIM)
        shapes[f"{block}/MlpBlock_0/Dense_1/bias"] = (DIM,)
    return shapes


def stem_shapes(depths: list[int]) -> tuple[dict[str, tuple[int, ...]], int, int]:
    """The same for the ResNet of a hybrid, with the channels and the stride of its feature map."""
    shapes: dict[str, tuple[int, ...]] = {
        "conv_root/kernel": (7, 7, 3, 64),
        "gn_root/scale": (64,),
        "gn_root/bias": (64,),
    }
    channels, stride = 64, 4
    for s, depth in enumerate(depths):
        mid, stride = 64 * 2**s, stride * (2 if s else 1)
        for u in range(depth):
            unit = f"block{s + 1}/unit{u + 1}"
            kernels = {"1": (1, 1, channels, mid), "2": (3, 3, mid, mid), "3": (1, 1, mid, 4 * mid)}
            if u == 0:
                kernels["_proj"] = (1, 1, channels, 4 * mid)
            for place, kernel in kernels.items():
                shapes[f"{unit}/conv{place}/kernel"] = kernel
                shapes[f"{unit}/gn{place}/scale"] = shapes[f"{unit}/gn{place}/bias"] = kernel[3:]
            channels = 4 * mid
    return shapes, channels, stride


def linen_parameters(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Every tensor by its formula of the flat index i and of the tensor's place j among the sorted names."""
    parameters = {}
    for j, name in enumerate(sorted(shapes)):
        shape = shapes[name]
        i = np.arange(math.prod(shape), dtype=np.float64)
        if name.endswith("/scale"):
            values = 1 + 0.1 * np.sin(i + j)
        elif name.endswith("/kernel"):
            is_query_key_value = name.split("/")[-2] in ("query", "key", "value")
            fan_in = shape[0] if is_query_key_value else math.prod(shape[:-1])
            values = np.sin(0.7 * i + j) / np.sqrt(fan_in)
        else:
            values = 0.1 * np.sin(i + j)
        parameters[name] = values.reshape(shape)
    return parameters


def to_state_dict(parameters: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """The same parameters under our names and in torch's layout."""
    state: dict[str, np.ndarray] = {}
    for name, values in parameters.items():
        *path, leaf = name.split("/")
        kind = "bias" if leaf == "bias" else "weight"
        match path:
            case []:
                state["vit.embeddings.cls_token"] = values
            case [first, *_] if first.startswith(("conv_root", "gn_root", "block")):
                conv = values.transpose(3, 2, 0, 1) if leaf == "kernel" else values
                state[f"vit.embeddings.patch_embeddings.stem.{stem_module(path)}.{kind}"] = conv
            case [_, "posembed_input"]:
                state["vit.embeddings.position_embeddings"] = values
            case ["embedding"]:
                conv = values.transpose(3, 2, 0, 1) if kind == "weight" else values  # HWIO -> OIHW
                state[f"vit.embeddings.patch_embeddings.projection.{kind}"] = conv
            case [_, "encoder_norm"]:
                state[f"vit.layernorm.{kind}"] = values
            case ["pre_logits"]:
                state[f"vit.pooler.dense.{kind}"] = values.T
            case ["head"]:
                state[f"classifier.{kind}"] = values.T
            case [_, block, *rest]:
                layer = f"vit.layers.{block.removeprefix('encoderblock_')}"
                target = {
                    "LayerNorm_0": "layernorm_before",
                    "LayerNorm_1": "layernorm_after",
                    "query": "attention.q_proj",
                    "key": "attention.k_proj",
                    "value": "attention.v_proj",
                    "out": "attention.o_proj",
                    "Dense_0": "mlp.fc1",
                    "Dense_1": "mlp.fc2",
                }[rest[-1]]
                if leaf == "kernel":
                    num_inputs = math.prod(values.shape[:-1]) if rest[-1] == "out" else values.shape[0]
                    values = values.reshape(num_inputs, -1).T
                state[f"{layer}.{target}.{kind}"] = values.reshape(-1) if kind == "bias" else values
    return {name: torch.from_numpy(values.copy()) for name, values in state.items()}


def stem_module(path: list[str]) -> str:
    """Our name of a convolution or norm of the ResNet."""
    names = {"conv": "conv", "gn": "norm", "conv_proj": "downsample_conv", "gn_proj": "downsample_norm"}
    leaf = path[-1]
    if leaf.endswith("_root"):
        return f"root.{names[leaf.removesuffix('_root')]}"
    stage, unit = int(path[0].removeprefix("block")) - 1, int(path[1].removeprefix("unit")) - 1
    return f"stages.{stage}.{unit}.{names.get(leaf) or names[leaf[:-1]] + leaf[-1]}"


def golden_model(dtype: torch.dtype = torch.float32, **fields) -> ViTScratchForImageClassification:
    config = ViTScratchConfig(**{**TINY, "num_labels": NUM_LABELS, **fields})
    model = ViTScratchForImageClassification(config).to(dtype).eval()
    shape_fields = {name: fields[name] for name in SHAPE_FIELDS if name in fields}
    state = to_state_dict(linen_parameters(linen_shapes(**shape_fields)))
    model.load_state_dict(state, strict=True)
    return model


def golden_pixels(dtype: torch.dtype = torch.float32) -> Tensor:
    flat = np.sin(0.01 * np.arange(2 * 32 * 32 * 3))
    return torch.from_numpy(flat.reshape(2, 32, 32, 3).transpose(0, 3, 1, 2).copy()).to(dtype)


def test_the_first_names_are_those_of_the_specification():
    names = sorted(linen_shapes())
    assert names[:3] == [
        "Transformer/encoder_norm/bias",
        "Transformer/encoder_norm/scale",
        "Transformer/encoderblock_0/LayerNorm_0/bias",
    ]


@pytest.mark.parametrize("case", [*CASES, *HYBRIDS])
def test_the_golden_model_has_the_official_number_of_parameters_and_tensors(case):
    fields, num_parameters, num_tensors, _ = {**CASES, **HYBRIDS}[case]
    parameters = list(golden_model(**fields).parameters())
    assert (sum(parameter.numel() for parameter in parameters), len(parameters)) == (num_parameters, num_tensors)


@pytest.mark.parametrize("full", [False, True], ids=["classifier", "full last layer"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_official_code(case, full):
    fields, _, _, logits = CASES[case]
    with torch.no_grad():
        output = golden_model(**fields)(golden_pixels(), output_hidden_states=full)
    torch.testing.assert_close(output.logits, torch.tensor(logits), rtol=0, atol=2e-6)


# In float64: the ResNet of D amplifies rounding, so that the official code's float32 itself lies 3.8e-5 from it.
@pytest.mark.parametrize("case", HYBRIDS)
def test_logits_of_a_hybrid_are_those_of_the_official_code(case):
    fields, _, _, logits = HYBRIDS[case]
    with torch.no_grad():
        actual = golden_model(torch.float64, **fields)(golden_pixels(torch.float64)).logits
    torch.testing.assert_close(actual, torch.tensor(logits).double(), rtol=0, atol=5e-5)


@pytest.mark.parametrize("case", HYBRIDS)
def test_a_hybrid_in_float32_stays_near_float64(case):
    fields = HYBRIDS[case][0]
    with torch.no_grad():
        exact = golden_model(torch.float64, **fields)(golden_pixels(torch.float64)).logits
        actual = golden_model(**fields)(golden_pixels()).logits
    # Measured: 2.5e-5; how convolutions are summed differs between processors.
    torch.testing.assert_close(actual.double(), exact, rtol=0, atol=1e-4)


def test_exact_gelu_gives_the_other_logits():
    with torch.no_grad():
        logits = golden_model(hidden_act="gelu")(golden_pixels()).logits[0]
    torch.testing.assert_close(logits, torch.tensor(LOGITS_ERF), rtol=0, atol=2e-6)


def test_the_tolerance_tells_the_two_gelus_apart():
    with torch.no_grad():
        logits = golden_model(hidden_act="gelu")(golden_pixels()).logits[0]
    assert (logits - torch.tensor(CASES["A class token"][3][0])).abs().max() > 5e-6
