"""Checkpoints that a fine-tuning starts from."""

import pytest
from fixtures_training import finetune_flags, pretrained, refused


@pytest.mark.parametrize("new_head", [True, False])
def test_a_dropout_outside_its_range_is_refused_with_either_head(tmp_path, new_head):
    fields = {"classes": [0, 1, 2, 3, 4], "new_head": new_head, "hidden_dropout_prob": 2}
    line = refused(*finetune_flags(pretrained(), tmp_path / "run", **fields))
    assert "hidden_dropout_prob=2.0 must be in [0, 1)" in line
