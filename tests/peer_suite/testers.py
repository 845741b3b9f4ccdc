"""Small models and inputs in the form that transformers' common tests ask for; placed among its test files."""

from transformers.testing_utils import torch_device

from ..test_modeling_common import floats_tensor, ids_tensor

SHAPE = {
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}


class VisionModelTester:
    """What the mixins read: a tiny config, a batch of pixels, and the shapes that come out."""

    is_training = True
    batch_size = 3

    def __init__(self, parent, config_class, **fields):
        self.parent, self.config_class = parent, config_class
        self.fields = {**SHAPE, **fields}
        for name, value in self.fields.items():
            setattr(self, name, value)
        self.num_labels = 10
        self.num_patches = (self.image_size // self.patch_size) ** 2
        self.seq_length = self.num_patches + 1

    def get_config(self):
        return self.config_class(**self.fields, num_labels=self.num_labels)

    def prepare_config_and_inputs(self):
        pixel_values = floats_tensor([self.batch_size, self.num_channels, self.image_size, self.image_size])
        labels = ids_tensor([self.batch_size], self.num_labels).to(torch_device)
        return self.get_config(), pixel_values, labels

    def prepare_config_and_inputs_for_common(self):
        config, pixel_values, _ = self.prepare_config_and_inputs()
        return config, {"pixel_values": pixel_values}
