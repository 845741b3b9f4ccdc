"""Small models and inputs in the form that transformers' common tests ask for; placed among its test files."""

import torch
from transformers.testing_utils import torch_device

from .. import test_modeling_common as common
from ..test_training_mixin import TrainingTesterMixin

SHAPE = {
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}


class VisionModelTester:
    """What the mixins read: a tiny config, a batch of pixels, and the shapes that come out."""

    is_training = True
    batch_size = 3
    num_labels = 10

    def __init__(self, parent, config_class, num_tokens=17, **fields):
        self.parent, self.config_class = parent, config_class
        self.fields = {**SHAPE, **fields}
        for name, value in self.fields.items():
            setattr(self, name, value)
        self.seq_length = num_tokens
        self.mask_length = (self.image_size // self.patch_size) ** 2
        self.num_masks = self.mask_length // 2

    def get_config(self):
        return self.config_class(**self.fields, num_labels=self.num_labels)

    def prepare_config_and_inputs_for_common(self):
        shape = [self.batch_size, self.num_channels, self.image_size, self.image_size]
        return self.get_config(), {"pixel_values": common.floats_tensor(shape)}


class ImageTraining(TrainingTesterMixin):
    """The training mixin with a batch of images; transformers' own has one of text and no other yet."""

    def _get_model_modality(self):
        return "text"  # the only one whose batch is asked for

    def _get_trainable_model_class(self):
        return self.trained_class

    def _create_text_training_batch(self, batch_size, seq_length, vocab_size):
        tester = self.model_tester
        shape = (batch_size, tester.num_channels, tester.image_size, tester.image_size)
        pixels = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).mul(0.01).sin().view(shape)
        return {"pixel_values": pixels.to(torch_device), **self.training_labels(batch_size)}

    def training_labels(self, batch_size):
        return {"labels": torch.arange(batch_size, device=torch_device)}

    def test_training_overfit(self):
        config = self.model_tester.get_config
        self.model_tester.get_config = lambda: _for_overfitting(config())
        super().test_training_overfit()


def _for_overfitting(config):
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config.vocab_size = 0  # read for a batch of text
    return config
