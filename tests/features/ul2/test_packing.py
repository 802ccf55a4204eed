"""Tests of modeling/segment_masks.py: examples of a row do not attend to each other, and are what they would be alone.

A T5 of a few thousand weights, on a CPU.
"""

import functools
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from absl.testing import parameterized
from test_data_collator_t5 import make_tokenizer
from test_trainer_t5 import arguments, quietly
from transformers import T5Config, set_seed

from constants import ATTENTION_IMPLEMENTATIONS
from model_t5 import build_config, create_model
from modeling.loss import compute_loss_in_forward
from modeling.segment_masks import enable_packing, segment_mask
from objectives.denoisers import DenoiserMixture, PackedChunks, with_mode_tokens
from objectives.metrics import language_model_metrics
from trainer_t5 import T5Trainer

SIZE = 400
SHAPE = dict(d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=2, num_decoder_layers=2, dropout_rate=0.0)
ROWS = 6


@functools.cache
def tokenizer():
    return with_mode_tokens(make_tokenizer(SIZE), "ul2")


@functools.cache
def collator(objective: str = "ul2", length: int = 64) -> DenoiserMixture:
    return DenoiserMixture(tokenizer(), objective, length)


def chunks(objective: str = "ul2", count: int = 20_000, seed: int = 0) -> PackedChunks:
    steps = np.random.default_rng(seed).integers(1, 3, count)
    tokens = (np.cumsum(steps) % 280 + 3).astype(np.uint16)  # each token is followed by one of two
    return PackedChunks(tokens, collator(objective).raw_lengths, collator(objective).pattern, seed)


def make_model(attention: str = "eager"):
    set_seed(0)
    model = create_model(build_config("tiny", len(tokenizer()), SHAPE), attention)
    enable_packing(model)
    return model.eval()


def losses(model, batch: dict) -> torch.Tensor:
    """[B, T] nats."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")


class PackingTest(parameterized.TestCase):
    @parameterized.product(attention=("eager", "sdpa"), objective=("ul2", "prefix_lm"))
    def test_a_loss_is_that_of_the_example_alone(self, attention, objective):
        model = make_model(attention)
        batch = collator(objective)(chunks(objective).__getitems__(range(ROWS)))
        with torch.no_grad():
            packed = losses(model, batch)
            for row in range(ROWS):
                for segment in batch["input_segments"][row].unique():
                    inputs = batch["input_segments"][row] == segment
                    targets = batch["target_segments"][row] == segment
                    alone = {"input_ids": batch["input_ids"][row : row + 1, inputs]}
                    for name in ("labels", "decoder_input_ids"):
                        alone[name] = batch[name][row : row + 1, targets]
                    torch.testing.assert_close(packed[row, targets], losses(model, alone)[0], rtol=1e-5, atol=1e-5)

    @parameterized.parameters("eager", "sdpa")
    def test_neighbours_do_not_matter(self, attention):
        model = make_model(attention)
        batch = collator()(chunks().__getitems__(range(ROWS)))
        changed = {name: tensor.clone() for name, tensor in batch.items()}
        others_in, others_out = batch["input_segments"] != 1, batch["target_segments"] != 1
        generator = torch.Generator().manual_seed(0)
        for name, others in (("input_ids", others_in), ("decoder_input_ids", others_out)):
            changed[name][others] = torch.randint(3, 280, (int(others.sum()),), generator=generator)
        with torch.no_grad():
            before, after = losses(model, batch), losses(model, changed)
        torch.testing.assert_close(before[~others_out], after[~others_out], rtol=1e-6, atol=1e-6)
        self.assertGreater((before - after)[others_out].abs().max().item(), 0.1)

    @parameterized.parameters("eager", "sdpa", "t5_fused")
    def test_gradients_do_not_reach_the_neighbours(self, attention):
        model = make_model(attention)
        batch = collator()(chunks().__getitems__(range(ROWS)))
        embedded = model.shared(batch.pop("input_ids")).detach().requires_grad_()
        labels, kinds = batch.pop("labels"), batch["target_segments"]
        logits = model(inputs_embeds=embedded, **batch).logits
        nats = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        nats[kinds == 1].sum().backward()
        reached = embedded.grad.abs().sum(-1) > 0
        self.assertFalse(reached[batch["input_segments"] != 1].any())
        self.assertTrue(reached[batch["input_segments"] == 1].all())

    def test_without_segments_nothing_changes(self):
        set_seed(0)
        plain = create_model(build_config("tiny", len(tokenizer()), SHAPE), "sdpa").eval()
        batch = collator()(chunks().__getitems__(range(2)))
        batch = {name: batch[name] for name in ("input_ids", "decoder_input_ids", "labels")}
        with torch.no_grad():
            self.assertTrue(torch.equal(losses(plain, batch), losses(make_model("sdpa"), batch)))

    def test_masks(self):
        segments = torch.tensor([[1, 1, 2, 0]])
        low = torch.finfo(torch.float32).min
        both = segment_mask(segments, segments)[0, 0].eq(0).int().tolist()
        self.assertEqual(both, [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
        causal = segment_mask(segments, segments, causal=True)
        self.assertEqual(causal[0, 0].eq(low).int().tolist(), [[0, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]])
        self.assertEqual(segment_mask(torch.tensor([[1, 2]]), segments, torch.bfloat16).dtype, torch.bfloat16)

    def test_positions_that_are_not_used_are_no_nan(self):
        model = make_model("sdpa")
        batch = collator()(chunks().__getitems__(range(2)))
        whole = losses(model, batch).detach()
        batch["target_segments"][:, -3:] = 0  # no input position is unused, so these see nothing in the encoder
        cut = losses(model, batch).detach()
        self.assertTrue(torch.isfinite(cut).all())
        torch.testing.assert_close(cut[:, :-3], whole[:, :-3], rtol=1e-6, atol=1e-6)

    def test_bfloat16(self):
        model = make_model("sdpa")
        batch = collator()(chunks().__getitems__(range(ROWS)))
        exact = losses(model, batch)
        with torch.autocast("cpu", torch.bfloat16):
            rough = losses(model, batch)
        self.assertAlmostEqual(rough.mean().item(), exact.mean().item(), delta=0.02)


# Loss with its z-loss, and norms of the gradients of the encoder's relative biases and of the embedding, from T5X
# cc342d4: its examples/t5/network.py and losses.py (z_loss 1e-4), with the weights, tokens and segments of the test, in
# float32.
T5X = {
    ("v1_1", "padded"): (4.490637779, 0.149025753, 1.030239582),
    ("v1_1", "packed"): (4.101300716, 0.135466442, 0.777859330),
    ("v1_0", "padded"): (3.800577402, 0.045353584, 0.408383697),
    ("v1_0", "packed"): (3.757446766, 0.108069062, 0.615382850),
}


class ReferenceTest(parameterized.TestCase):
    @parameterized.product(version=["v1_0", "v1_1"], rows=["padded", "packed"], attention=ATTENTION_IMPLEMENTATIONS)
    def test_loss_and_gradients_are_t5x_s(self, version, rows, attention):
        own = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False) if version == "v1_1" else {}
        shape = dict(d_model=16, d_kv=4, d_ff=24, num_heads=4, num_layers=2, dropout_rate=0.0, vocab_size=40)
        model = create_model(T5Config(**shape, **own, decoder_start_token_id=0), attention)
        enable_packing(model)
        compute_loss_in_forward(model, z_loss=1e-4)
        with torch.no_grad():
            for number, (name, weight) in enumerate(sorted(model.named_parameters())):
                places = torch.arange(weight.numel(), dtype=torch.float64)
                wave = torch.sin(places**1.5 + number).view(weight.shape)
                is_table = "relative" in name or "shared" in name
                spread = 1 if is_table else 1.4 * weight.shape[-1] ** -0.5
                weight.copy_(1 + wave / 4 if weight.ndim == 1 else spread * wave)
        inputs = torch.arange(24).view(2, 12) % 37 + 3
        targets = torch.arange(18).view(2, 9) * 5 % 37 + 3
        inputs[1, 7:], targets[0, 6:] = 0, 0
        batch = dict(input_ids=inputs, decoder_input_ids=F.pad(targets[:, :-1], (1, 0)))
        if rows == "packed":
            batch["input_segments"] = torch.tensor([[1] * 5 + [2] * 7, [1] * 3 + [2] * 4 + [0] * 5])
            batch["target_segments"] = torch.tensor([[1] * 2 + [2] * 4 + [0] * 3, [1] * 4 + [2] * 5])
            batch["decoder_input_ids"][:, 1:][batch["target_segments"].diff() != 0] = 0
        else:
            batch["attention_mask"] = inputs.ne(0).long()
        found = model(**batch, labels=targets.masked_fill(targets.eq(0), -100))
        found.loss.backward()
        biases = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        norms = (biases.grad.norm(), model.shared.weight.grad.norm())
        found = torch.stack([found.loss, *norms]).detach()
        torch.testing.assert_close(found, torch.tensor(T5X[version, rows]), rtol=1e-5, atol=1e-7)


class TrainerTest(parameterized.TestCase):
    def trainer(self, folder, **flags) -> T5Trainer:
        return T5Trainer(
            model=make_model(),
            args=arguments(folder, **flags),
            train_dataset=chunks(seed=1),
            eval_dataset=chunks(count=2_500, seed=2),
            data_collator=collator(),
            compute_metrics=functools.partial(language_model_metrics, names=collator().names, bytes_per_token=3.0),
        )

    def test_it_learns_and_is_evaluated_by_denoiser(self):
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        trainer = self.trainer(folder, max_steps=40, per_device_train_batch_size=8, per_device_eval_batch_size=7)
        before, _ = quietly(trainer.evaluate)
        quietly(trainer.train)
        after, _ = quietly(trainer.evaluate)
        self.assertLess(after["eval_loss"], before["eval_loss"] - 0.5)
        self.assertContainsSubset([f"eval_loss_{name}" for name in collator().names], after)
        # The same by hand, one batch of all rows.
        data = chunks(count=2_500, seed=2)
        batch = collator()(data.__getitems__(range(len(data))))
        with torch.no_grad():
            nats = losses(trainer.model.eval(), batch)
        self.assertAlmostEqual(after["eval_loss"], nats.mean().item(), places=4)
        s = collator().names.index("ul2_s")
        chosen = batch["target_kinds"] % len(collator().names) == s
        self.assertAlmostEqual(after["eval_loss_ul2_s"], nats[chosen].mean().item(), places=4)

    def test_accumulation_does_not_change_the_gradient(self):
        weights = []
        for size, steps in ((8, 1), (2, 4)):
            folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
            flags = dict(max_steps=3, per_device_train_batch_size=size, gradient_accumulation_steps=steps)
            trainer = self.trainer(folder, **flags)
            quietly(trainer.train)
            weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
        torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)
