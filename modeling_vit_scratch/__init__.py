"""The Vision Transformer from scratch; importing it registers the classes with transformers' Auto classes."""

from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
    AutoModelForPreTraining,
)

from .backbone_vit_scratch import ViTScratchBackbone
from .configuration_vit_scratch import ViTScratchConfig
from .image_processing_vit_scratch import ViTScratchImageProcessor
from .modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchModel
from .pretrained_vit_scratch import ViTScratchPreTrainedModel
from .pretraining_vit_scratch import ViTScratchForMaskedAutoencoding, ViTScratchForMaskedPatchPrediction

__all__ = [
    "ViTScratchBackbone",
    "ViTScratchConfig",
    "ViTScratchForImageClassification",
    "ViTScratchForMaskedAutoencoding",
    "ViTScratchForMaskedPatchPrediction",
    "ViTScratchImageProcessor",
    "ViTScratchModel",
    "ViTScratchPreTrainedModel",
]

AutoConfig.register(ViTScratchConfig.model_type, ViTScratchConfig)
AutoBackbone.register(ViTScratchConfig, ViTScratchBackbone)
AutoModel.register(ViTScratchConfig, ViTScratchModel)
AutoModelForImageClassification.register(ViTScratchConfig, ViTScratchForImageClassification)
AutoModelForMaskedImageModeling.register(ViTScratchConfig, ViTScratchForMaskedPatchPrediction)
AutoModelForPreTraining.register(ViTScratchConfig, ViTScratchForMaskedAutoencoding)
AutoImageProcessor.register(ViTScratchConfig, image_processor_classes={"torchvision": ViTScratchImageProcessor})
