"""Tests of mixtures of denoisers (features/ul2/denoisers.py): what a row holds, how much of it, and what decides it.

The references are the arithmetic of the rows, T5's definition of prefix LM (a split uniform in [1, length), no
sentinels) and the masks of data_collator_t5. Hermetic.
"""

import tempfile
import types
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import zoo
from absl.testing import parameterized
from test_data_collator_t5 import EOS, T5_SENTINELS, make_tokenizer, restored

import constants
from data_collator_t5 import example_keys, masks_from_random, random_numbers
from features.ul2.denoisers import (
    Denoiser,
    DenoiserMixture,
    PackedChunks,
    build_rows,
    denoisers_of,
    pattern_of,
    with_mode_tokens,
)
from foundry.common.errors import UserError
from foundry.corpora.chunks import SomeExamples
from foundry.corpora.tokenizers import load_tokenizer
from foundry.modeling.loss import token_nll
from foundry.objectives.metrics import language_model_metrics
from foundry.objectives.packed_rows import PackedObjective, ragged_noise_mask

HARD = dict(noise_density=0.5, mean_noise_span_length=3.0)  # at 512 it needs 128 sentinels: REFERENCE, section 1
OWN = {
    "hard": {"hard": 1.0},
    "own": {"span_corruption": 3.0, "prefix_lm": 1.0},
    "two_prefixes": {"prefix_lm": 1.0, "ul2_s": 1.0},
    "unknown": {"span_corupption": 1.0},
    "dense": {"dense": 1.0},
    "short": {"short": 1.0},
    "bare": {"bare": 1.0},
}
DENOISERS = dict(
    hard=HARD,
    dense=dict(noise_density=1.5),
    short=dict(noise_density=0.5, mean_noise_span_length=0.5),
    bare=dict(noise_density=0.5, mean_noise_span_length=3.0, sentinels=False),
)


class TestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.dict(constants.OBJECTIVES, OWN))
        self.enterContext(mock.patch.dict(constants.DENOISERS, DENOISERS))

    def collator(self, objective: str, length: int = 512) -> DenoiserMixture:
        return DenoiserMixture(with_mode_tokens(make_tokenizer(), objective), objective, length)

    def batch(self, collator, rows: int = 64, seed: int = 0, least: int = 3):
        """(raw tokens of each row, what the collator made of them as arrays). least: lowest id of a raw token."""
        count = 2 * rows * collator.raw_lengths.max()
        tokens = np.random.default_rng(seed).integers(least, 31_000, count).astype(np.uint16)
        chunks = PackedChunks(tokens, collator.raw_lengths, collator.pattern, seed)
        examples = chunks.__getitems__(range(rows))
        raw = [row[: collator.raw_lengths[k]] for row, k in zip(examples["input_ids"], examples["row"], strict=True)]
        return raw, {name: tensor.numpy() for name, tensor in collator(examples).items()}


def examples_of(batch: dict, row: int):
    """(denoiser, inputs, targets, decoder inputs) of the examples of a row."""
    for segment in np.unique(batch["input_segments"][row]):
        inputs = batch["input_segments"][row] == segment
        targets = batch["target_segments"][row] == segment
        yield (
            batch["target_kinds"][row][targets],
            batch["input_ids"][row][inputs],
            batch["labels"][row][targets],
            batch["decoder_input_ids"][row][targets],
        )


class RowsTest(TestCase):
    @parameterized.product(objective=("ul2", "prefix_lm", "own", "two_prefixes"), length=(32, 33, 64, 127, 512))
    def test_every_token_is_once_in_inputs_or_targets(self, objective, length):
        collator = self.collator(objective, length)
        raw, batch = self.batch(collator, 24)
        self.assertEqual(batch["input_ids"].shape, (24, length))
        self.assertEqual(batch["labels"].shape, (24, collator.targets_length))
        self.assertGreater(batch["input_segments"].min(), 0, "a position is not used")
        self.assertGreater(batch["target_segments"].min(), 0)
        for row in range(24):
            text = []
            for kinds, inputs, targets, decoder_inputs in examples_of(batch, row):
                denoiser = collator.denoisers[kinds[0] % len(collator.denoisers)]
                self.assertEqual((inputs[-1], targets[-1]), (EOS, EOS))
                self.assertEqual(decoder_inputs.tolist(), [0, *targets[:-1]])
                if denoiser.mode:
                    self.assertGreaterEqual(inputs[0], 32_100)  # added behind T5's own
                    inputs = inputs[1:]
                written = [token for token in inputs.tolist() if token in T5_SENTINELS]
                self.assertEqual(written, T5_SENTINELS[: len(written)].tolist(), "sentinels descend from <extra_id_0>")
                self.assertEqual([token for token in targets.tolist() if token in T5_SENTINELS], written)
                self.assertEqual(bool(written), denoiser.sentinels)
                markers = np.isin(targets, [*T5_SENTINELS, EOS])
                np.testing.assert_array_equal(kinds >= len(collator.denoisers), markers)
                whole = restored(inputs, targets, T5_SENTINELS) if written else [*inputs[:-1], *targets[:-1]]
                text += [int(token) for token in whole]
            self.assertEqual(text, raw[row].tolist())

    @parameterized.parameters("ul2", "own", "two_prefixes", "prefix_lm")
    def test_weights_are_shares_of_the_input_tokens(self, objective):
        collator = self.collator(objective)
        given = np.zeros(len(collator.names))
        hidden, raw = np.zeros_like(given), np.zeros_like(given)
        for kind in collator.pattern:
            for example in collator.kinds[kind]:
                denoiser = collator.denoisers[example.denoiser]
                noise = example.noise / (2 if example.pair else 1)
                overhead = denoiser.input_overhead + example.spans * denoiser.sentinels
                given[example.denoiser] += example.length - noise + overhead
                hidden[example.denoiser] += noise
                raw[example.denoiser] += example.length
        weights = [weight for _, weight in denoisers_of(objective).values()]
        np.testing.assert_allclose(given / given.sum(), weights, rtol=0.02)
        np.testing.assert_allclose(hidden / raw, [d.noise_density for d in collator.denoisers], atol=0.002)
        self.assertAlmostEqual(given.sum() / len(collator.pattern), 512)

    def test_ul2_has_seven_denoisers_as_in_the_paper(self):
        """Table 1; only the S denoiser, T5's prefix LM in the code of appendix 9.2, writes no sentinels."""
        found = {
            (d.mean_noise_span_length, d.noise_density, d.mode): round(weight, 6)
            for d, weight in denoisers_of("ul2").values()
        }
        self.assertEqual([d.mode for d, _ in denoisers_of("ul2").values() if not d.sentinels], ["[S2S]"])
        r, x = "[NLU]", "[NLG]"
        paper = [(3.0, 0.15, r), (8.0, 0.15, r), (3.0, 0.5, x), (8.0, 0.5, x), (64.0, 0.15, x), (64.0, 0.5, x)]
        self.assertEqual(found, {key: round(1 / 7, 6) for key in [*paper, (None, 0.25, "[S2S]")]})

    def test_a_single_denoiser_has_t5s_lengths(self):
        rows, shares, targets = build_rows([Denoiser(**constants.DENOISERS["span_corruption"])], [1.0], 512)
        (example,) = rows[0]
        self.assertEqual(shares, [1.0])
        # T5's own: 568 raw tokens, 85 of them hidden in 28 spans, 114 targets; they round down what is rounded here.
        self.assertAlmostEqual(example.length, 568, delta=1)
        self.assertAlmostEqual(example.noise, 85, delta=1)
        self.assertEqual((example.spans, example.noise + example.spans + 1), (28, targets))

    def test_any_beginning_of_the_pattern_has_the_shares(self):
        shares = np.array([0.05, 0.15, 0.8])
        pattern = pattern_of(shares)
        for count in (10, 100, 777, 1024):
            np.testing.assert_allclose(np.bincount(pattern[:count], minlength=3), shares * count, atol=2)


class MasksTest(TestCase):
    def test_statistics_are_those_of_the_fixed_lengths(self):
        count = 2_000
        random = random_numbers(example_keys(1, np.arange(count)), 568)
        sizes = [np.full(count, n) for n in (568, 85, 28)]
        ragged = ragged_noise_mask(random.ravel(), *sizes).reshape(count, 568)
        fixed = masks_from_random(random_numbers(example_keys(2, np.arange(count)), 566), 85, 28)
        self.assertTrue((ragged.sum(axis=1) == 85).all())
        self.assertFalse(ragged[:, 0].any())
        self.assertTrue(ragged[:, -1].all())
        starts = ragged & ~np.concatenate([np.zeros((count, 1), bool), ragged[:, :-1]], axis=1)
        self.assertTrue((starts.sum(axis=1) == 28).all())
        alone = starts & ~np.concatenate([ragged[:, 1:], np.zeros((count, 1), bool)], axis=1)
        share = 27 / 84  # of spans of one token: REFERENCE, section 1
        self.assertAlmostEqual(alone.sum() / (28 * count), share, delta=5 * np.sqrt(share / (28 * count)))
        for place in (1, 2, 5, 100, 300, -30, -5, -2):
            one, other = ragged[:, place].mean(), fixed[:, place].mean()
            self.assertAlmostEqual(one, other, delta=5 * np.sqrt(2 * max(other * (1 - other), 0.01) / count))

    def test_prefixes_are_uniform_and_the_row_is_full(self):
        collator = self.collator("prefix_lm", 34)
        self.assertEqual([example.length for example in collator.kinds[0]], [32, 32])
        _, batch = self.batch(collator, 4_000)
        first = (batch["input_segments"] == 1).sum(axis=1) - 1  # less EOS
        second = (batch["input_segments"] == 2).sum(axis=1) - 1
        self.assertTrue((first + second == 32).all())
        counts = np.bincount(first, minlength=33)
        self.assertEqual((counts[0], counts[32:].sum()), (0, 0), "T5: uniform in [1, length)")
        expected = 4_000 / 31
        self.assertLess(np.abs(counts[1:32] - expected).max(), 5 * np.sqrt(expected))

    def test_a_row_is_decided_by_its_key_alone(self):
        collator = self.collator("ul2", 128)
        tokens = np.random.default_rng(0).integers(3, 31_000, 40_000).astype(np.uint16)
        chunks = PackedChunks(tokens, collator.raw_lengths, collator.pattern, seed=3)
        numbers = np.array([7, 3, len(chunks) + 7, 50, 11])
        together = collator(chunks.__getitems__(numbers))
        for place, number in enumerate(numbers):
            alone = collator([chunks[int(number)]])
            for name, tensor in together.items():
                self.assertTrue(torch.equal(tensor[place], alone[name][0]), name)
        self.assertFalse(torch.equal(together["input_ids"][0], together["input_ids"][2]), "another epoch, another mask")
        rows = [chunk | {"key": int(chunk["key"])} for chunk in map(chunks.__getitem__, numbers.tolist())]
        self.assertTrue(torch.equal(collator(rows)["input_ids"], together["input_ids"]))


class PackedChunksTest(TestCase):
    def test_every_token_is_in_one_row_of_an_epoch(self):
        lengths, pattern = np.array([5, 7]), np.array([0, 1, 1])
        for size in (19, 38, 45, 50, 51):
            tokens = np.arange(size)
            chunks = PackedChunks(tokens, lengths, pattern)
            for epoch in range(3):
                numbers = np.arange(len(chunks)) + epoch * len(chunks)
                examples = chunks.__getitems__(numbers)
                self.assertEqual(examples["row"].tolist(), [pattern[n % 3] for n in range(len(chunks))])
                used = [row[: lengths[k]] for row, k in zip(examples["input_ids"], examples["row"], strict=True)]
                used = np.concatenate(used)
                self.assertLen(np.unique(used), len(used))
                self.assertLess(size - len(used), 7)
                if epoch == 0:
                    self.assertEqual(used.tolist(), list(range(len(used))))

    @parameterized.parameters(10, 12, 18, 25, 100)
    def test_a_part_of_them_has_all_kinds(self, count):
        chunks = PackedChunks(np.arange(1_800), np.array([5, 8, 5]), np.array([0, 1, 2]))
        kinds = SomeExamples(chunks, count).__getitems__(np.arange(count))["row"]
        for kind in range(3):
            self.assertAlmostEqual((kinds == kind).mean(), 1 / 3, delta=0.2)

    def test_later_epochs_begin_elsewhere(self):
        chunks = PackedChunks(np.arange(1_000), np.array([5, 7]), np.array([0, 1, 1]))
        begins = [chunks[epoch * len(chunks)]["input_ids"][0] for epoch in range(5)]
        self.assertEqual(begins[0], 0)
        self.assertLen(set(begins), 5)


class RefusedTest(TestCase):
    def test_more_spans_than_sentinels(self):
        message = r"--input_seq_length 512 with --objective hard masks 128 spans .* has 100 sentinels: .* (\d+) or less"
        with self.assertRaisesRegex(ValueError, message) as caught:
            self.collator("hard")
        fits = int(str(caught.exception).split(" or less")[0].split()[-1])
        self.collator("hard", fits)
        with self.assertRaisesRegex(ValueError, "masks 101 spans"):
            self.collator("hard", fits + 1)

    @parameterized.parameters("ul2", "prefix_lm", "span_corruption", "own")
    def test_too_short(self, objective):
        with self.assertRaisesRegex(
            ValueError, rf"--input_seq_length 2: --objective {objective} needs at least \d+"
        ) as caught:
            self.collator(objective, 2)
        least = int(str(caught.exception).split()[-1])
        _, batch = self.batch(self.collator(objective, least), 16)
        self.assertEqual(batch["input_ids"].shape, (16, least))

    @parameterized.parameters(
        ("unknown", "the denoiser span_corupption is not in DENOISERS; available: span_corruption"),
        ("dense", "noise_density=1.5, .* must lie between 0 and 1"),
        ("short", "mean_noise_span_length=0.5, .* be at least 1"),
        ("bare", "only a prefix denoiser can do without sentinels"),
    )
    def test_entries(self, objective, message):
        with self.assertRaisesRegex(UserError, message):
            denoisers_of(objective)


class ModesTest(TestCase):
    def test_a_new_model_has_the_next_free_ids_for_them(self):
        plain = make_tokenizer()
        tokenizer = with_mode_tokens(plain, "ul2")
        self.assertEqual(tokenizer.convert_tokens_to_ids(["[NLU]", "[NLG]", "[S2S]"]), [32_100, 32_101, 32_102])
        self.assertEqual((len(plain), len(tokenizer)), (32_100, 32_103))
        self.assertIs(with_mode_tokens(tokenizer, "ul2"), tokenizer)
        self.assertIs(with_mode_tokens(plain, "prefix_lm"), plain)
        with self.assertRaisesRegex(ValueError, r"--objective ul2: the tokenizer .* cannot write \[NLU\]"):
            DenoiserMixture(plain, "ul2", 512)

    @parameterized.parameters("t5_v1_1", "mt5", "byt5", "t5gemma")
    def test_a_checkpoint_has_the_tokens_that_its_tokenizer_writes_them_with(self, family):
        """As `prepend_prompt` of GoogleCloudPlatform/t5x-on-vertex-ai encodes "[NLU]" and puts it before the inputs."""
        folder = Path(self.enterContext(tempfile.TemporaryDirectory())) / family
        zoo.write_checkpoint(folder, family)
        tokenizer = load_tokenizer(str(folder))
        collator = DenoiserMixture(tokenizer, "ul2", 64)
        raw, batch = self.batch(collator, 32, least=1000)
        self.assertEqual(batch["input_ids"].shape, (32, 64))
        seen, eos = set(), [] if family == "t5gemma" else [EOS]
        for row in range(32):
            text = []
            for kinds, inputs, targets, _ in examples_of(batch, row):
                denoiser = collator.denoisers[kinds[0] % len(collator.denoisers)]
                start = tokenizer(denoiser.mode)["input_ids"]  # Gemma's begin with <bos>, others end in EOS
                start = start[: len(start) - len(eos)]
                self.assertEqual(inputs[: len(start)].tolist(), start)
                inputs = np.append(inputs[len(start) : len(inputs) - len(eos)], EOS)
                whole = [*inputs[:-1], *targets[:-1]]
                whole = restored(inputs, targets, collator.sentinel_ids) if denoiser.sentinels else whole
                text += [int(token) for token in whole]
                seen.add(denoiser.mode)
            self.assertEqual(text, raw[row].tolist())
        self.assertEqual(seen, {"[NLU]", "[NLG]", "[S2S]"})


class MetricsTest(TestCase):
    def test_by_hand(self):
        # Two denoisers; a row of four targets: text of the first, its EOS, text of the second, its EOS.
        logits = torch.zeros(1, 4, 3)
        logits[0, 0, 0] = 2.0
        labels, kinds = torch.tensor([[0, 1, 2, 1]]), torch.tensor([[0, 2, 1, 3]])
        objective, nats = PackedObjective(), token_nll(logits, labels)
        objective.names = ["a", "b"]
        by_kind = objective.statistics(nats, labels, logits.argmax(-1).eq(labels), {"target_kinds": kinds})
        statistics = torch.cat([torch.tensor([[nats.sum(), 4, 1, 0, 0]]), by_kind], dim=1).numpy()
        output = types.SimpleNamespace(predictions=(None, statistics))
        metrics = language_model_metrics(output, names=["a", "b"], bytes_per_token=2.0)
        first, other = -2 + np.log(np.exp(2) + 2), np.log(3)
        self.assertAlmostEqual(metrics["loss"], (first + 3 * other) / 4, places=6)
        self.assertAlmostEqual(metrics["loss_a"], (first + other) / 2, places=6)
        self.assertAlmostEqual(metrics["loss_b"], other, places=6)
        self.assertEqual((metrics["token_accuracy"], metrics["text_token_accuracy"]), (0.25, 0.5))
        self.assertAlmostEqual(metrics["bits_per_byte"], (first + 3 * other) / np.log(2) / 4, places=6)
        ids = language_model_metrics(output, names=["a", "b"], bytes_per_token=None)
        self.assertAlmostEqual(ids["nats_per_id"], (first + 3 * other) / 2, places=6)
        self.assertNotIn("bits_per_byte", ids)
