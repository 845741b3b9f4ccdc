"""The Vision Transformer from scratch; importing it registers the classes with transformers' Auto classes."""

from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification

from .configuration_vit_scratch import ViTScratchConfig
from .image_processing_vit_scratch import ViTScratchImageProcessor
from .modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchModel
from .pretrained_vit_scratch import ViTScratchPreTrainedModel

__all__ = [
    "ViTScratchConfig",
    "ViTScratchForImageClassification",
    "ViTScratchImageProcessor",
    "ViTScratchModel",
    "ViTScratchPreTrainedModel",
]

AutoConfig.register(ViTScratchConfig.model_type, ViTScratchConfig)
AutoModel.register(ViTScratchConfig, ViTScratchModel)
AutoModelForImageClassification.register(ViTScratchConfig, ViTScratchForImageClassification)
AutoImageProcessor.register(ViTScratchConfig, image_processor_classes={"torchvision": ViTScratchImageProcessor})
