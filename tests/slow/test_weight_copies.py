"""Tests of the bfloat16 copies of joined weights: never stale, and to the bit what autocast's own copies give.

Hermetic; models of a few thousand weights on the CPU.
"""

import copy
import functools
from types import SimpleNamespace
from unittest import mock

import torch
from absl.testing import absltest, parameterized
from test_host_waits import Calls
from test_step import batch, tiny
from test_trainer_t5 import chunks, curve, make_model, make_trainer, quietly, weights
from transformers import T5ForConditionalGeneration
from transformers.optimization import Adafactor

from modeling.fused_projections import (
    checkpoint_blocks_only,
    fuse_cross_projections,
    fuse_projections,
    keep_weight_copies,
    project,
)
from modeling.loss import compute_loss_in_forward
from trainer_t5 import set_up_step
from training.optimizers import AdamWRMSScaled, MuonWithAdamW, layer_matrices

FUSED = (fuse_projections, fuse_cross_projections)


def model(*, copies: bool = True, fused=FUSED, backend: str | None = None, **overrides):
    """A model with fused products, with copies of its weights or without them."""
    made = tiny(torch.float32, **overrides)
    for fuse in fused:
        fuse(made)
    if copies:
        keep_weight_copies(made)
    compute_loss_in_forward(made, compile_options=backend and {"backend": backend})
    return made


def loss_of(model, rows: int = 3) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(**batch(rows), num_items_in_batch=torch.tensor(40)).loss


def gradients(model, *, backward_passes: int = 1) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for rows in range(3, 3 + backward_passes):
        loss_of(model, rows).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def one_step(optimizer_of, model) -> None:
    optimizer = optimizer_of(model)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()


def other_weights(model) -> dict[str, torch.Tensor]:
    return {name: tensor * 1.5 for name, tensor in model.state_dict().items()}


def in_place(model) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)


def other_storage(model) -> None:
    """Twice: the second tensor may well lie where the first weight was."""
    for p in model.parameters():
        p.data = p.data * 1.5
        p.data = p.data * 0.5


def other_layers(model) -> None:
    attention = model.encoder.block[0].layer[0].SelfAttention
    attention.k = torch.nn.Linear(*attention.k.weight.T.shape, bias=False)


OPTIMIZERS = dict(
    adamw_rms_scaled=lambda m: AdamWRMSScaled(m.parameters()),
    muon=lambda m: MuonWithAdamW(m.parameters(), layer_matrices(m)),
    adafactor=lambda m: Adafactor(m.parameters(), lr=1e-2, relative_step=False, scale_parameter=True),
    adamw_torch=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    adamw_torch_fused=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
)
CHANGES = {name: functools.partial(one_step, made) for name, made in OPTIMIZERS.items()}
CHANGES |= dict(
    in_place=in_place,
    loaded=lambda m: m.load_state_dict(other_weights(m)),
    loaded_as_new_tensors=lambda m: m.load_state_dict(other_weights(m), assign=True),
    other_storage=other_storage,
    other_layers=other_layers,
    initialised_again=lambda m: [m._init_weights(module) for module in m.modules()],
)


def assert_equal(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)


class CopiesTest(parameterized.TestCase):
    @parameterized.product(fused=(FUSED, FUSED[:1], FUSED[1:]), checkpointing=(False, True))
    def test_losses_and_gradients_are_autocasts_to_the_bit(self, fused, checkpointing):
        """Of two forward passes, whose gradients are added up."""
        found = []
        for copies in (True, False):
            made = model(copies=copies, fused=fused)
            if checkpointing:
                made.gradient_checkpointing_enable()
                checkpoint_blocks_only(made)
            found.append(gradients(made, backward_passes=2) | {"loss": loss_of(made)})
        assert_equal(*found)
        self.assertLen(found[0], 1 + len(list(made.parameters())))

    def test_gradients_are_those_of_float64_to_bfloat16s_rounding(self):
        reference, found = tiny(), gradients(model())
        compute_loss_in_forward(reference)
        reference(**batch(), num_items_in_batch=40).loss.backward()
        for name, p in reference.named_parameters():
            self.assertEqual(found[name].dtype, torch.float32)
            self.assertLess((found[name] - p.grad).norm() / p.grad.norm(), 0.1, name)

    @parameterized.parameters(*CHANGES)
    def test_no_change_of_a_weight_is_missed(self, change):
        made = model()
        before = loss_of(made).item()
        torch.manual_seed(1)
        CHANGES[change](made)
        plain = model(copies=False)
        plain.load_state_dict(made.state_dict())
        self.assertNotEqual(loss_of(made).item(), before)
        self.assertEqual(loss_of(made).item(), loss_of(plain).item())
        names = {name for name, _ in plain.named_parameters()}  # without the untied embedding's others
        found, expected = gradients(made), gradients(plain)
        assert_equal(*({n: g for n, g in each.items() if n in names & found.keys()} for each in (found, expected)))

    def test_the_encoder_alone_sees_a_change_too(self):
        """Before a forward pass of the whole model has looked at the weights."""
        made, plain = model(), model(copies=False)
        loss_of(made)
        for each in (made, plain):
            in_place(each)
        with torch.autocast("cpu", torch.bfloat16):
            self.assertTrue(torch.equal(*(each.encoder(batch()["input_ids"])[0] for each in (made, plain))))

    def test_a_change_that_torch_does_not_count_is_seen_where_nothing_is_trained(self):
        made, plain = model(), model(copies=False)
        loss_of(made)
        for each in (made, plain):
            for p in each.parameters():
                p.data.mul_(1.5)
        with torch.no_grad():
            self.assertEqual(loss_of(made).item(), loss_of(plain).item())

    def test_frozen_weights(self):
        found = []
        for copies in (True, False):
            made = model(copies=copies)
            for name, p in made.named_parameters():
                p.requires_grad_(".k." in name or ".wi_1." in name)
            found.append(gradients(made))
        assert_equal(*found)

    def test_a_forward_pass_neither_casts_nor_joins_weights(self):
        counts = {}
        for copies in (True, False):
            made = model(copies=copies)
            loss_of(made)
            with Calls() as calls:
                loss_of(made)
            counts[copies] = calls.counts
        self.assertNotIn("_foreach_copy_", counts[True])
        joined = 2 * (2 + 2) + 1  # Q, K, V and the gated feed-forward of two layers of each stack; all cross K, V
        self.assertEqual(counts[False]["cat"] - counts[True].get("cat", 0), joined)
        self.assertLessEqual(counts[True]["_to_copy"], counts[False]["_to_copy"] - len(layer_matrices(made)))

    def test_a_copy_of_the_model_has_its_own(self):
        made = model()
        before = loss_of(made).item()
        other = copy.deepcopy(made)
        in_place(other)
        loss_of(other)
        self.assertEqual(loss_of(made).item(), before)
        self.assertNotEqual(loss_of(other).item(), before)

    def test_checkpoints_are_transformers_own(self):
        made, plain = model(), tiny(torch.float32)
        loss_of(made)
        assert_equal(made.state_dict(), plain.state_dict())
        made.save_pretrained(self.folder)
        loaded, report = T5ForConditionalGeneration.from_pretrained(self.folder, output_loading_info=True)
        self.assertEmpty(report["missing_keys"] or report["unexpected_keys"])
        self.assertEqual([n for n, _ in made.named_buffers()], [n for n, _ in plain.named_buffers()])
        assert_equal(dict(loaded.named_parameters()), dict(plain.named_parameters()))

    @parameterized.parameters(
        (dict(), True),
        (dict(bf16=False), False),
        (dict(deepspeed="zero_stage2_config.json"), False),
        (dict(fused_projections=False, fused_cross_projections=False), False),
    )
    def test_they_are_made_where_autocast_would_make_them(self, flags, expected):
        options = dict(bf16=True, deepspeed=None, fused_projections=True, fused_cross_projections=True)
        options |= dict(bf16_residual=False, label_smoothing_factor=0.0, z_loss=0.0, loss_chunk_size=0)
        made = tiny(torch.float32)
        set_up_step(made, SimpleNamespace(**options | dict(torch_compile=False) | flags))
        self.assertEqual(hasattr(made, "weight_copies"), expected)

    def test_a_norm_of_another_package_is_no_product(self):
        """apex's, which transformers takes where it is installed, has such a name too."""
        made = tiny(torch.float32)
        norm = made.encoder.final_layer_norm
        norm.__class__ = type("FusedRMSNorm", (type(norm),), {})
        fuse_projections(made)
        keep_weight_copies(made)
        self.assertLen(made.weight_copies, 2 * (2 + 2) + 2 * (2 + 3 + 2))  # layers of encoder and decoder

    def test_without_autocast_weights_are_joined_as_they_are(self):
        made = model()
        loss_of(made)
        attention, states = made.encoder.block[0].layer[0].SelfAttention, torch.randn(2, 3, 16)
        for found, linear in zip(project(states, attention.q, attention.k), (attention.q, attention.k), strict=True):
            torch.testing.assert_close(found, linear(states))


FLAGS = dict(bf16=True, fused_projections=True, fused_cross_projections=True)
FLAGS |= dict(max_steps=4, gradient_accumulation_steps=2, per_device_train_batch_size=8)


class TrainerTest(parameterized.TestCase):
    def train(self, name: str, *, copies: bool = True, resume=None, **flags):
        with mock.patch("trainer_t5.keep_weight_copies", keep_weight_copies if copies else lambda _: None):
            trainer = make_trainer(self.folder / name, **FLAGS | flags)
        quietly(trainer.train, resume_from_checkpoint=resume)
        self.assertEqual(hasattr(trainer.model, "weight_copies"), copies)
        return trainer

    def assert_same_run(self, found, expected) -> None:
        for key in ("loss", "grad_norm", "eval_loss"):
            self.assertEqual(curve(found, key), curve(expected, key))
        for name, tensor in weights(expected).items():
            self.assertTrue(torch.equal(weights(found)[name], tensor), name)

    @parameterized.parameters("adamw_rms_scaled", "muon", "adafactor", "adamw_torch")
    def test_a_run_is_that_without_copies_to_the_bit(self, optim):
        runs = [self.train(str(copies), copies=copies, optim=optim) for copies in (True, False)]
        self.assert_same_run(*runs)

    def test_a_resumed_run_and_the_best_model_of_a_run_are_those_without_copies(self):
        flags = dict(max_steps=6, eval_dataset=chunks(9, 4), eval_strategy="steps", eval_steps=2, save_strategy="steps")
        flags |= dict(save_steps=2, load_best_model_at_end=True, metric_for_best_model="eval_loss", learning_rate=0.5)
        flags |= dict(greater_is_better=True)  # not the last one
        whole, plain = self.train("whole", **flags), self.train("plain", copies=False, **flags)
        self.assertNotEqual(whole.state.best_global_step, 6)
        self.assert_same_run(whole, plain)
        self.assertEqual(loss_of(whole.model).item(), loss_of(plain.model).item())  # in training, from the copies
        resumed = self.train("again", resume=str(self.folder / "whole" / "checkpoint-4"), model=make_model(99), **flags)
        self.assert_same_run(resumed, whole)
        self.assertEqual(quietly(whole.evaluate)[0]["eval_loss"], max(curve(whole, "eval_loss")))


if __name__ == "__main__":
    absltest.main()
