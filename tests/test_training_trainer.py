"""The trainer: strict restore, settings at resume, finite updates, and runs that must coincide."""

import json
import time

import numpy as np
import pytest
import torch
from fixtures_training import (
    call,
    log_of,
    pretrain_flags,
    random_images,
    tiny_model,
    tiny_trainer,
    weights_of,
)
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from modeling_vit_scratch import ViTScratchForImageClassification
from modeling_vit_scratch.errors_vit_scratch import InputError
from training import checkpoints
from training.evaluation import predict_logits


class EachStep(TrainerCallback):
    """Keeps what `look` returns after each step."""

    def __init__(self, look):
        self.look, self.seen = look, {}

    def on_step_end(self, args, state, control, **kwargs):
        self.seen[state.global_step] = self.look()


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def moments_of(optimizer) -> dict[str, torch.Tensor]:
    """A copy of the optimizer's state, steps included."""
    state = optimizer.state_dict()["state"]
    return {f"{index} {name}": value.clone() for index, entry in state.items() for name, value in entry.items()}


# Restoring


def test_every_tensor_of_a_checkpoint_is_restored(tmp_path):
    tiny_trainer(tmp_path, max_steps=2).fit(None)
    resumed = tiny_trainer(tmp_path, max_steps=2, model=tiny_model(seed=9))
    resumed.fit(str(tmp_path / "checkpoint-2"))
    assert_equal(weights_of(resumed.model), load_file(tmp_path / "checkpoint-2" / "model.safetensors"))


@pytest.mark.parametrize("harm", ["missing", "extra", "reshaped"])
def test_a_checkpoint_of_other_tensors_is_not_restored(tmp_path, harm):
    tiny_trainer(tmp_path, max_steps=2).fit(None)
    path = tmp_path / "checkpoint-2" / "model.safetensors"
    tensors = load_file(path)
    name = "vit.layers.1.mlp.fc1.weight"
    if harm == "missing":
        del tensors[name]
    elif harm == "extra":
        tensors["vit.layers.2.mlp.fc1.weight"] = tensors[name].clone()
    else:
        tensors[name] = tensors[name][:3].contiguous()
    save_file(tensors, path)
    with pytest.raises(RuntimeError, match=r"vit\.layers\.[12]\.mlp\.fc1\.weight"):
        tiny_trainer(tmp_path, max_steps=4).fit(str(tmp_path / "checkpoint-2"))


def scripted_accuracy(trainer, values):
    """Makes the validation accuracies come from a list."""
    left = iter(values)
    trainer.compute_metrics = lambda prediction: {"accuracy": next(left)}


@pytest.mark.parametrize("save_steps", [1, 3, 6])
def test_the_run_ends_with_the_best_of_all_evaluations(tmp_path, save_steps):
    fields = {"eval_steps": 1, "max_steps": 6, "save_steps": save_steps, "save_total_limit": 1}
    trainer = tiny_trainer(tmp_path, load_best_model_at_end=True, **fields)
    scripted_accuracy(trainer, [0.1, 0.8, 0.3, 0.2, 0.8, 0.5])  # of equal ones the first
    weights = EachStep(lambda: weights_of(trainer.model))
    trainer.add_callback(weights)
    trainer.fit(None)
    assert_equal(weights_of(trainer.model), weights.seen[2])


def test_the_best_model_evaluates_to_its_recorded_accuracy(tmp_path):
    trainer = tiny_trainer(tmp_path, eval_steps=1, max_steps=8, save_steps=2, load_best_model_at_end=True)
    trainer.fit(None)
    recorded = log_of(tmp_path / "checkpoint-8", "eval_accuracy")
    assert trainer.state.best_metric == max(recorded.values())
    assert trainer.evaluate()["eval_accuracy"] == trainer.state.best_metric


def test_the_best_model_is_found_when_the_run_folder_has_moved(tmp_path):
    fields = {"eval_steps": 1, "save_steps": 2, "load_best_model_at_end": True}
    first = tiny_trainer(tmp_path / "old", max_steps=4, **fields)
    scripted_accuracy(first, [0.1, 0.8, 0.3, 0.2])
    first.fit(None)
    (tmp_path / "old").rename(tmp_path / "new")
    resumed = tiny_trainer(tmp_path / "new", max_steps=6, **fields)
    scripted_accuracy(resumed, [0.5, 0.6])
    resumed.fit(str(tmp_path / "new" / "checkpoint-4"))
    assert_equal(weights_of(resumed.model), load_file(tmp_path / "new" / "checkpoint-2" / "model.safetensors"))


# Finite updates

POISONS = ["loss and gradient", "loss alone", "gradient alone"]


def poison(trainer, poison_kind: str, step: int) -> None:
    """Makes the loss or a gradient of this step not finite."""
    compute_loss = trainer.compute_loss

    def compute(model, inputs, **kwargs):
        loss = compute_loss(model, inputs, **kwargs)
        if trainer.state.global_step + 1 != step:
            return loss
        if poison_kind == "gradient alone":
            model.vit.layernorm.bias.register_hook(lambda gradient: gradient * float("inf"))
            return loss
        return loss * float("nan") if poison_kind == "loss and gradient" else loss + float("inf")

    trainer.compute_loss = compute


def poisoned(folder, kind, *, on_device=False, step=3, **fields):
    """A trainer that was stopped by a poisoned step, its state after the last good one, and the error."""
    trainer = tiny_trainer(folder, **fields)
    trainer._gates_on_device = on_device
    poison(trainer, kind, step)
    state = EachStep(lambda: (weights_of(trainer.model), moments_of(trainer.optimizer)))
    trainer.add_callback(state)
    with pytest.raises(InputError) as error:
        trainer.fit(None)
    return trainer, state.seen[step - 1], str(error.value)


def assert_untouched(trainer, state) -> None:
    assert_equal(weights_of(trainer.model), state[0])
    assert_equal(moments_of(trainer.optimizer), state[1])
    assert all(value.isfinite().all() for value in state[0].values())


@pytest.mark.parametrize("kind", POISONS)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_value_that_is_not_finite_reaches_neither_weights_nor_moments(tmp_path, kind, optimizer, max_grad_norm):
    fields = {"optimizer": optimizer, "max_grad_norm": max_grad_norm, "max_steps": 6}
    trainer, state, message = poisoned(tmp_path, kind, **fields)
    assert_untouched(trainer, state)
    assert "not finite by step 3;" in message and len(message.splitlines()) == 1
    assert message.endswith(f"the last good checkpoint is {tmp_path / 'checkpoint-2'}")


@pytest.mark.parametrize("kind", POISONS)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_on_an_accelerator_the_update_is_gated_without_reading_the_flag(tmp_path, kind, optimizer, max_grad_norm):
    fields = {"optimizer": optimizer, "max_grad_norm": max_grad_norm, "max_steps": 9}
    fields |= {"logging_steps": 6, "save_steps": 50, "weight_decay": 0.1, "momentum": 0.9}
    trainer, state, message = poisoned(tmp_path, kind, on_device=True, **fields)
    assert trainer.state.global_step == 6  # on to the next reading of the flag
    assert_untouched(trainer, state)
    assert "not finite by step 6;" in message and message.endswith("none yet")


def test_on_an_accelerator_the_flag_is_read_before_a_save(tmp_path):
    fields = {"logging_steps": 50, "save_steps": 2, "max_steps": 9}
    trainer, state, message = poisoned(tmp_path, "loss alone", on_device=True, **fields)
    assert_untouched(trainer, state)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    assert str(tmp_path / "checkpoint-2") in message


def test_on_an_accelerator_the_flag_is_read_at_the_end(tmp_path):
    fields = {"logging_steps": 50, "save_steps": 50, "max_steps": 3}
    trainer, state, _ = poisoned(tmp_path, "loss alone", on_device=True, **fields)
    assert_untouched(trainer, state)
    assert list(tmp_path.iterdir()) == []


def test_an_accelerators_gate_changes_nothing_while_all_is_finite(tmp_path):
    plain, gated = tiny_trainer(tmp_path / "plain"), tiny_trainer(tmp_path / "gated")
    gated._gates_on_device = True
    plain.fit(None), gated.fit(None)
    assert_equal(weights_of(gated.model), weights_of(plain.model))


def test_only_one_of_several_micro_batches_needs_to_be_bad(tmp_path):
    trainer = tiny_trainer(tmp_path, per_device_batch_size=2, max_steps=4)
    compute_loss, calls = trainer.compute_loss, iter(range(100))

    def compute(model, inputs, **kwargs):
        return compute_loss(model, inputs, **kwargs) + (float("inf") if next(calls) == 5 else 0)

    trainer.compute_loss = compute
    with pytest.raises(InputError, match="not finite by step 2;"):
        trainer.fit(None)


def test_a_run_that_diverges_ends_with_2_and_leaves_the_last_good_checkpoint(tmp_path, monkeypatch):
    forward, calls = ViTScratchForImageClassification.forward, iter(range(100))

    def poisoned_forward(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        if next(calls) == 2:
            output.loss = output.loss * float("nan")
        return output

    monkeypatch.setattr(ViTScratchForImageClassification, "forward", poisoned_forward)
    outcome = call(*pretrain_flags(tmp_path / "run"))
    assert outcome.code == 2
    assert "not finite by step 3" in outcome.error_line and "lower learning_rate=0.002" in outcome.error_line
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.name != "figures") == [
        "checkpoint-2",
        "data.json",
        "recipe.yaml",
    ]
    checkpoints.verify_checkpoint(tmp_path / "run" / "checkpoint-2")
    monkeypatch.undo()
    assert call(*pretrain_flags(tmp_path / "run"), "--resume").code == 0


# Runs that must coincide


def trained(folder, **fields):
    trainer = tiny_trainer(folder, max_steps=5, **fields)
    trainer.fit(None)
    return weights_of(trainer.model), log_of(folder / "checkpoint-5")


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("fields", [{}, {"optimizer": "sgd", "max_grad_norm": 1}], ids=["adamw", "clipped sgd"])
def test_accumulated_micro_batches_equal_one_batch(tmp_path, micro, fields):
    whole, whole_log = trained(tmp_path / "whole", **fields)
    parts, parts_log = trained(tmp_path / "parts", per_device_batch_size=micro, **fields)
    differences = torch.tensor([parts_log[step] - whole_log[step] for step in whole_log])
    assert differences.abs().max() < 2e-6
    # A dropped factor would be a drift to one side, which the largest difference may hide.
    # Softmax does not see a key's bias: its gradient is rounding alone, which AdamW makes as large as any.
    names = [name for name in whole if not name.endswith("k_proj.bias")]
    residual = torch.cat([(parts[name] - whole[name]).flatten() for name in names])
    assert residual.mean().abs() < 1e-7
    assert residual.abs().max() < 2e-5


def test_recomputed_activations_give_the_same_bits(tmp_path):
    plain = trained(tmp_path / "plain", model=tiny_model(hidden_dropout_prob=0.1))
    recomputed = trained(tmp_path / "again", model=tiny_model(hidden_dropout_prob=0.1), activation_checkpointing=True)
    assert recomputed[1] == plain[1]
    assert_equal(recomputed[0], plain[0])


@pytest.mark.parametrize("asked", [True, False])
def test_activations_are_recomputed_where_that_is_asked_for(tmp_path, asked):
    model = tiny_trainer(tmp_path, activation_checkpointing=asked).model
    assert model.vit.layers[0].gradient_checkpointing is asked


def test_bfloat16_keeps_weights_in_float32_and_the_loss_near(tmp_path):
    plain, plain_log = trained(tmp_path / "plain")
    rounded, rounded_log = trained(tmp_path / "bf16", bf16=True)
    assert {value.dtype for value in rounded.values()} == {torch.float32}
    assert not torch.equal(rounded["classifier.weight"], plain["classifier.weight"])
    assert [rounded_log[step] for step in plain_log] == pytest.approx(list(plain_log.values()), rel=0.02)


def test_another_seed_gives_another_order_of_images(tmp_path):
    _, first = trained(tmp_path / "first", seed=0)
    _, second = trained(tmp_path / "second", seed=1)
    assert first != second


# What is written


def test_the_config_of_a_checkpoint_is_that_of_the_model(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "alone")
    tiny_trainer(tmp_path / "run", model=model, max_steps=2).fit(None)
    folders = (tmp_path / "alone", tmp_path / "run" / "checkpoint-2")
    stored = [json.loads((folder / "config.json").read_text()) for folder in folders]
    assert stored[0] == stored[1]
    assert "use_cache" not in stored[1]


def test_validation_figures_are_logged_at_each_evaluation(tmp_path):
    trainer = tiny_trainer(tmp_path, eval_steps=2, max_steps=5)
    images, processor = trainer.eval_dataset.images, trainer.processing_class
    expected = {}

    class Evaluate(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            logits = predict_logits(trainer.model, processor, images, batch_size=4)
            accuracy = float((logits.argmax(1) == images.labels).mean())
            loss = torch.nn.functional.cross_entropy(torch.tensor(logits), torch.tensor(images.labels)).item()
            expected[state.global_step] = accuracy, loss
            trainer.model.train()

    trainer.add_callback(Evaluate())
    trainer.fit(None)
    accuracies, losses = (log_of(tmp_path / "checkpoint-5", f"eval_{name}") for name in ("accuracy", "loss"))
    assert accuracies == {step: expected[step][0] for step in (2, 4, 5)}
    assert list(losses.values()) == pytest.approx([expected[step][1] for step in (2, 4, 5)], rel=1e-5)


def test_the_logged_epoch_is_the_passes_over_the_images(tmp_path):
    tiny_trainer(tmp_path, max_steps=6, train=random_images(12)).fit(None)
    epochs = log_of(tmp_path / "checkpoint-6", "epoch")
    assert epochs == {step: step * 8 / 12 for step in range(1, 7)}


def test_the_logged_loss_is_the_mean_cross_entropy_of_the_batch(tmp_path):
    model = tiny_model()
    trainer = tiny_trainer(tmp_path, model=model, max_steps=1, global_batch_size=24, save_steps=1)
    logits = predict_logits(model, trainer.processing_class, random_images(), batch_size=24)
    expected = torch.nn.functional.cross_entropy(torch.tensor(logits), torch.tensor(random_images().labels)).item()
    trainer.fit(None)
    assert log_of(tmp_path / "checkpoint-1")[1] == pytest.approx(expected, rel=1e-5)


class SlowImages:
    """Images that take 10 ms each to read."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, position):
        time.sleep(0.01)
        return self.images[position]


def test_the_log_tells_when_training_waits_for_data(tmp_path):
    pixels = np.zeros((24, 8, 8), dtype=np.uint8)
    slow = type(random_images()).from_column("train", SlowImages(pixels), np.arange(24) % 5)
    tiny_trainer(tmp_path / "slow", train=slow, max_steps=4, logging_steps=2).fit(None)
    shares, rates = (log_of(tmp_path / "slow/checkpoint-4", name) for name in ("data_wait_share", "images_per_second"))
    assert 0.5 < shares[4] < 1
    assert rates[4] < 100  # one image every 10 ms at most
    assert rates[4] * 0.01 <= shares[4] * 1.01  # the time asleep is part of the wait


def test_training_figures_count_what_was_trained(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=6)
    start = time.perf_counter()
    trainer.fit(None)
    elapsed = time.perf_counter() - start
    figures = trainer.training_figures()
    assert (figures["num_train_samples"], figures["num_steps"], figures["num_epochs"]) == (24, 6, 2.0)
    assert figures["final_train_loss"] == log_of(tmp_path / "checkpoint-6")[6]
    assert 0.9 * elapsed < figures["elapsed_seconds"] < elapsed + 1
    assert figures["images_per_second"] == pytest.approx(48 / figures["elapsed_seconds"])


def test_a_resumed_run_counts_the_cost_of_both_sessions(tmp_path):
    first = tiny_trainer(tmp_path, max_steps=2)
    first.fit(None)
    cost = json.loads((tmp_path / "checkpoint-2/trainer_state.json").read_text())["stateful_callbacks"]["Cost"]
    second = tiny_trainer(tmp_path, max_steps=4)
    time.sleep(0.05)
    second.fit(str(tmp_path / "checkpoint-2"))
    assert second.training_figures()["elapsed_seconds"] > cost["attributes"]["elapsed_seconds"] + 0.05
