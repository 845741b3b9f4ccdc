"""transformers' common tests, run on our classes."""

import unittest

from modeling_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, ViTScratchModel
from transformers.models.auto import modeling_auto

from ...test_configuration_common import ConfigTester
from ..testers import VisionModelTester

# The mixins ask transformers' own tables by model type which inputs and labels a class takes.
modeling_auto.MODEL_MAPPING_NAMES["vit_scratch"] = "ViTScratchModel"
modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES["vit_scratch"] = "ViTScratchForImageClassification"

from ...test_modeling_common import ModelTesterMixin  # noqa: E402  # reads those tables at import


class ViTScratchModelTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (ViTScratchModel, ViTScratchForImageClassification)
    test_resize_embeddings = False
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = VisionModelTester(self, ViTScratchConfig, intermediate_size=37)
        self.config_tester = ConfigTester(self, config_class=ViTScratchConfig, has_text_modality=False, hidden_size=24)

    def test_config(self):
        self.config_tester.run_common_tests()
