"""transformers' common tests on our classes. Every test defined here stands in the list of the test that runs this."""

import copy
import tempfile
import unittest
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from transformers import initialization as init
from transformers.models.auto import modeling_auto

from modeling_vit_scratch import (
    ViTScratchBackbone,
    ViTScratchConfig,
    ViTScratchForImageClassification,
    ViTScratchForMaskedAutoencoding,
    ViTScratchForMaskedPatchPrediction,
    ViTScratchImageProcessor,
    ViTScratchModel,
)
from modeling_vit_scratch.errors_vit_scratch import InputError
from modeling_vit_scratch.modeling_vit_scratch import ViTScratchAttention
from modeling_vit_scratch.pretraining_vit_scratch import evaluation_noise

# The mixins look up in these tables, which the Auto classes' `register` leaves alone, what a class takes and returns.
modeling_auto.MODEL_MAPPING_NAMES["vit_scratch"] = "ViTScratchModel"
modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES["vit_scratch"] = "ViTScratchForImageClassification"
modeling_auto.MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES["vit_scratch"] = "ViTScratchForMaskedPatchPrediction"
modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES["vit_scratch"] = "ViTScratchForMaskedAutoencoding"
modeling_auto.MODEL_FOR_BACKBONE_MAPPING_NAMES["vit_scratch"] = "ViTScratchBackbone"

from ... import test_modeling_common as common  # noqa: E402  # reads the tables at import
from ...test_backbone_common import BackboneTesterMixin  # noqa: E402
from ...test_configuration_common import ConfigTester  # noqa: E402
from ...test_image_processing_common import ImageProcessingTester, ImageProcessingTestMixin  # noqa: E402
from ..testers import ImageTraining, VisionModelTester  # noqa: E402


def config_zero_init(config):
    """Theirs takes any field with "_std" in its name for the spread of an initialiser, `image_std` too."""
    config = copy.deepcopy(config)
    if config.layer_scale_init is not None:
        config.layer_scale_init = 1e-10
    return config


def set_config_for_less_flaky_test(config):
    """Theirs also sets fields that the config does not have, and that it then refuses to load."""
    config.layer_norm_eps = 1.0


def initialize_with_random_head(model_class, head):
    """Our heads begin at zero, where comparisons of what they return would pass for any encoder."""
    initialize = model_class.initialize

    def initialize_all(self):
        initialize(self)
        init.normal_(getattr(self, head).weight, std=0.2)

    model_class.initialize = initialize_all


initialize_with_random_head(ViTScratchForImageClassification, "classifier")
initialize_with_random_head(ViTScratchForMaskedPatchPrediction, "prediction_head")
common._config_zero_init = config_zero_init
common.set_config_for_less_flaky_test = set_config_for_less_flaky_test


class CommonTests(ImageTraining, common.ModelTesterMixin):
    test_resize_embeddings = False
    test_can_init_all_missing_weights_before_2023 = True  # else the test is skipped for files without a date
    model_tester = None
    fields: ClassVar[dict[str, Any]] = {}

    def setUp(self):
        self.model_tester = VisionModelTester(self, ViTScratchConfig, **self.fields)

    def test_config(self):
        ConfigTester(self, config_class=ViTScratchConfig, has_text_modality=False, hidden_size=24).run_common_tests()

    def test_model_get_set_embeddings(self):
        for model_class in self.all_model_classes:
            model = model_class(self.model_tester.get_config())
            self.assertIsInstance(model.get_input_embeddings(), torch.nn.Module)
            self.assertIsNone(model.get_output_embeddings())

    def test_model_outputs_equivalence(self):
        subtract = torch.Tensor.__sub__

        def subtract_masks_too(left, right):  # for the words of a failure, theirs subtracts all outputs
            return subtract(left.int(), right.int()) if left.dtype == torch.bool else subtract(left, right)

        with patch.object(torch.Tensor, "__sub__", subtract_masks_too):
            super().test_model_outputs_equivalence()

    def test_model_weights_reload_no_missing_tied_weights(self):
        with self.assertRaisesRegex(InputError, "missing"):
            super().test_model_weights_reload_no_missing_tied_weights()

    def test_problem_types(self):
        if ViTScratchForImageClassification not in self.all_model_classes:
            return  # as theirs passes over classes that do not classify
        for problem_type, labels in (
            ("multi_label_classification", torch.tensor([[0.0, 1.0, 1.0]] * self.model_tester.batch_size)),
            ("single_label_classification", torch.tensor([2] * self.model_tester.batch_size)),
        ):
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            fields = {**config.to_dict(), "id2label": {index: str(index) for index in range(3)}, "label2id": None}
            model = ViTScratchForImageClassification(ViTScratchConfig(**{**fields, "problem_type": problem_type}))
            model(**inputs, labels=labels).loss.backward()
            self.assertEqual(model.config.problem_type, problem_type)
            self.assertGreater(model.classifier.bias.grad.abs().sum().item(), 0)

    def test_sdpa_can_dispatch_non_composite_models(self):
        for model_class in self.all_model_classes:
            model = model_class(self.model_tester.get_config())
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                for kernel in ("sdpa", "eager"):
                    loaded = model_class.from_pretrained(folder, attn_implementation=kernel)
                    layers = [module for module in loaded.modules() if isinstance(module, ViTScratchAttention)]
                    self.assertEqual({layer.config._attn_implementation for layer in layers}, {kernel})


class ViTScratchModelTest(CommonTests, unittest.TestCase):
    all_model_classes = (
        ViTScratchModel,
        ViTScratchForImageClassification,
        ViTScratchForMaskedPatchPrediction,
        ViTScratchBackbone,
    )
    trained_class = ViTScratchForImageClassification


class MaskedAutoencodingTest(CommonTests, unittest.TestCase):
    all_model_classes = (ViTScratchForMaskedAutoencoding,)
    trained_class = ViTScratchForMaskedAutoencoding
    fields: ClassVar[dict[str, Any]] = {
        "num_tokens": 5,  # the class token and a quarter of the patches
        "decoder_hidden_size": 32,
        "decoder_num_hidden_layers": 2,
        "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 37,
    }

    def training_labels(self, batch_size):
        return {"noise": evaluation_noise(batch_size, self.model_tester.mask_length)}  # one mask at every step


class MaskedPatchPredictionTrainingTest(ImageTraining, unittest.TestCase):
    trained_class = ViTScratchForMaskedPatchPrediction
    training_grad_norm_reduction_threshold = float("-inf")  # each step corrupts anew: the loss alone can settle
    model_tester = None

    def setUp(self):
        self.model_tester = VisionModelTester(self, ViTScratchConfig)

    def training_labels(self, batch_size):
        return {"bool_masked_pos": evaluation_noise(batch_size, self.model_tester.mask_length) < 0.5}


class HybridTest(CommonTests, unittest.TestCase):
    """Tokens, positions, residuals and stem that transformers' ViT does not have."""

    all_model_classes = (ViTScratchModel, ViTScratchForImageClassification, ViTScratchForMaskedPatchPrediction)
    trained_class = ViTScratchForImageClassification
    fields: ClassVar[dict[str, Any]] = {
        "num_tokens": 18,
        "stem_depths": [1],
        "use_distillation_token": True,
        "position_embedding_type": "relative",
        "layer_scale_init": 0.1,
        "drop_path_rate": 0.1,
    }


class ModernTest(CommonTests, unittest.TestCase):
    """Rotary positions, registers, SwiGLU, normalised queries and keys, attention pooling."""

    all_model_classes = (ViTScratchModel, ViTScratchForImageClassification, ViTScratchForMaskedPatchPrediction)
    trained_class = ViTScratchForImageClassification
    fields: ClassVar[dict[str, Any]] = {
        "num_tokens": 18,
        "pooling": "attention",
        "num_register_tokens": 2,
        "position_embedding_type": "rope_2d",
        "mlp_type": "swiglu",
        "hidden_act": "silu",
        "qk_norm": True,
    }


class ViTScratchBackboneTest(BackboneTesterMixin, unittest.TestCase):
    all_model_classes = (ViTScratchBackbone,)
    config_class = ViTScratchConfig

    def setUp(self):
        self.model_tester = VisionModelTester(self, ViTScratchConfig, num_hidden_layers=4)


class OurProcessorTester(ImageProcessingTester):
    def __init__(self, parent):
        super().__init__(parent, size={"height": 18, "width": 18}, image_mean=[0.5] * 3, image_std=[0.5] * 3)

    def _get_image_processing_classes(self):
        return {"torchvision": ViTScratchImageProcessor}


class ViTScratchImageProcessorTest(ImageProcessingTestMixin, unittest.TestCase):
    image_processor_tester_class = OurProcessorTester

    def test_call_numpy_4_channels(self):
        with self.assertRaisesRegex(InputError, "do_convert_rgb"):
            super().test_call_numpy_4_channels()

    def test_image_processor_from_dict_with_kwargs_has_attributes(self):
        with self.assertRaisesRegex(InputError, "do_convert_rgb"):
            super().test_image_processor_from_dict_with_kwargs_has_attributes()
