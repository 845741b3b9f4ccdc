import unittest

from transformers import ViTConfig, ViTForImageClassification, ViTModel, ViTForMaskedImageModeling

from ...test_configuration_common import ConfigTester
from ...test_modeling_common import ModelTesterMixin
from ..testers import VisionModelTester


class ViTModelTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (ViTModel, ViTForImageClassification, ViTForMaskedImageModeling)
    test_resize_embeddings = False

    def setUp(self):
        self.model_tester = VisionModelTester(self, ViTConfig, intermediate_size=37, encoder_stride=8)
        self.config_tester = ConfigTester(self, config_class=ViTConfig, has_text_modality=False, hidden_size=24)

    def test_config(self):
        self.config_tester.run_common_tests()
