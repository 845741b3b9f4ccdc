"""The same tests on transformers' own vision models: what these do not pass is the mixins' doing."""

import unittest

from transformers import (
    Dinov2Backbone,
    Dinov2Config,
    ViTConfig,
    ViTForImageClassification,
    ViTForMaskedImageModeling,
    ViTImageProcessor,
    ViTImageProcessorPil,
    ViTModel,
)

from ...test_backbone_common import BackboneTesterMixin
from ...test_configuration_common import ConfigTester
from ...test_image_processing_common import ImageProcessingTester, ImageProcessingTestMixin
from ...test_modeling_common import ModelTesterMixin
from ..testers import ImageTraining, VisionModelTester


class ViTModelTest(ImageTraining, ModelTesterMixin, unittest.TestCase):
    all_model_classes = (ViTModel, ViTForImageClassification, ViTForMaskedImageModeling)
    trained_class = ViTForImageClassification
    test_resize_embeddings = False
    model_tester = None

    def setUp(self):
        self.model_tester = VisionModelTester(self, ViTConfig, encoder_stride=8)

    def test_config(self):
        ConfigTester(self, config_class=ViTConfig, has_text_modality=False, hidden_size=24).run_common_tests()


class Dinov2BackboneTest(BackboneTesterMixin, unittest.TestCase):
    all_model_classes = (Dinov2Backbone,)
    config_class = Dinov2Config

    def setUp(self):
        self.model_tester = VisionModelTester(self, Dinov2Config)


class ViTProcessorTester(ImageProcessingTester):
    def __init__(self, parent):
        super().__init__(parent, size={"height": 18, "width": 18}, image_mean=[0.5] * 3, image_std=[0.5] * 3)

    def _get_image_processing_classes(self):
        return {"torchvision": ViTImageProcessor, "pil": ViTImageProcessorPil}


class ViTImageProcessorTest(ImageProcessingTestMixin, unittest.TestCase):
    image_processor_tester_class = ViTProcessorTester
