"""Tests of data_collator_t5 against T5's definition: its length table, its golden example, the arithmetic of its masks,
and a slow implementation of its algorithm, written here example by example after the released preprocessors.
"""

import pickle
import time

import numpy as np
import torch
from absl.testing import absltest, parameterized
from tokenizers import Tokenizer, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from data_collator_t5 import (
    T5DataCollator,
    compute_input_and_target_lengths,
    cut_numbers,
    example_keys,
    find_sentinel_ids,
    inputs_and_targets,
    masks_from_random,
    noise_counts,
    random_numbers,
    shift_right,
)

T5_SENTINELS = np.arange(32_099, 31_999, -1)  # <extra_id_0> ... <extra_id_99> in T5's own vocabulary
EOS = 1


def make_tokenizer(size: int = 32_100, sentinels: dict[int, int] | None = None, eos: bool = True, mark: str = ""):
    """A tokenizer with a vocabulary of `size` words; sentinels: {number: id}, by default T5's places at the end. mark:
    what their names begin with (mT5: the mark of a space)."""
    sentinels = {n: size - 1 - n for n in range(100)} if sentinels is None else sentinels
    names = {number: f"{mark}<extra_id_{n}>" for n, number in sentinels.items()} | {0: "<pad>", 1: "</s>", 2: "<unk>"}
    vocabulary = {names.get(i, f"word{i}"): i for i in range(size)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    special = dict(pad_token="<pad>", unk_token="<unk>") | (dict(eos_token="</s>") if eos else {})
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


# ---------------------------------------------------------------- T5's algorithm, one example at a time
def slow_mask(length: int, density: float, mean_span: float, rng: np.random.Generator) -> np.ndarray:
    """T5's random_spans_noise_mask as the ports write it: shuffled span starts, segment sums, interleaved lengths."""
    num_noise = min(max(int(np.round(length * density)), 1), length - 1)
    num_spans = max(int(np.round(num_noise / mean_span)), 1)
    num_kept = length - num_noise

    def segmentation(num_items, num_segments):
        starts = np.arange(num_items - 1) < (num_segments - 1)
        rng.shuffle(starts)
        segment_id = np.cumsum(np.pad(starts, [[1, 0]]))
        _, lengths = np.unique(segment_id, return_counts=True)
        return lengths

    noise_lengths, kept_lengths = segmentation(num_noise, num_spans), segmentation(num_kept, num_spans)
    interleaved = np.reshape(np.stack([kept_lengths, noise_lengths], axis=1), [num_spans * 2])
    span_starts = np.cumsum(interleaved)[:-1]
    indicator = np.zeros((length,), dtype=np.int8)
    indicator[span_starts] = True
    return np.equal(np.cumsum(indicator) % 2, 1)


def slow_side(tokens: np.ndarray, mask: np.ndarray, sentinels: np.ndarray) -> np.ndarray:
    """T5's noise_span_to_unique_sentinel: each span under the mask becomes one sentinel; EOS at the end."""
    first = mask & ~np.concatenate([[False], mask[:-1]])
    marked = np.where(first, sentinels[np.maximum(np.cumsum(first) - 1, 0)], tokens)
    return np.append(marked[first | ~mask], EOS)


def slow_target(tokens: np.ndarray, mask: np.ndarray, sentinels: np.ndarray) -> np.ndarray:
    """Each span's sentinel and its tokens, written as a loop; EOS at the end."""
    target, span = [], -1
    for place, hidden in enumerate(mask):
        if hidden:
            if place == 0 or not mask[place - 1]:
                span += 1
                target.append(sentinels[span])
            target.append(tokens[place])
    return np.array([*target, EOS])


def restored(inputs: np.ndarray, target: np.ndarray, sentinels: np.ndarray) -> list[int]:
    """The original tokens, from inputs and targets alone."""
    spans, current = {}, None
    for token in target[:-1].tolist():
        if token in sentinels:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    return [t for token in inputs[:-1].tolist() for t in spans.get(token, [token])]


class LengthsTest(parameterized.TestCase):
    # REFERENCE, section 1: run with the released code.
    @parameterized.parameters(
        (512, 0.15, 3, 568, 114),
        (1024, 0.15, 3, 1137, 229),
        (256, 0.15, 3, 284, 58),
        (128, 0.15, 3, 141, 29),
        (512, 0.15, 8, 588, 100),
        (512, 0.15, 64, 600, 92),
        (512, 0.3, 3, 639, 257),
        (512, 0.5, 3, 766, 512),
        (512, 0.5, 8, 908, 512),
        (512, 0.5, 64, 1006, 512),
        (64, 0.2, 2, 70, 22),
        (64, 0.2, 1, 63, 27),
    )
    def test_table(self, inputs_length, density, mean_span, tokens_length, targets_length):
        lengths = compute_input_and_target_lengths(inputs_length, density, mean_span)
        self.assertEqual(lengths, (tokens_length, targets_length))

    @parameterized.parameters(
        (568, 0.15, 3, 85, 28), (766, 0.5, 3, 383, 128), (2, 0.5, 3, 1, 1), (3, 0.9, 1, 2, 1), (10, 0.9, 1, 9, 1)
    )
    def test_noise_counts(self, length, density, mean_span, num_noise, num_spans):
        self.assertEqual(noise_counts(length, density, mean_span), (num_noise, num_spans))

    @parameterized.product(density=(0.05, 0.15, 0.25, 0.5, 0.7), mean_span=(1.0, 2.0, 3.0, 8.0, 64.0))
    def test_every_length_is_what_the_corruption_gives(self, density, mean_span):
        for inputs_length in [*range(3, 130), 512]:
            tokens_length, targets_length = compute_input_and_target_lengths(inputs_length, density, mean_span)
            num_noise, num_spans = noise_counts(tokens_length, density, mean_span)
            filled = tokens_length - num_noise + num_spans + 1
            self.assertEqual(targets_length, num_noise + num_spans + 1, inputs_length)
            self.assertLessEqual(filled, inputs_length)
            self.assertGreaterEqual(tokens_length - num_noise, num_spans, "spans would touch")
            if density < 0.5:  # nothing is wasted: one more token would be one too many
                more_noise, more_spans = noise_counts(tokens_length + 1, density, mean_span)
                self.assertGreater(tokens_length + 1 - more_noise + more_spans + 1, inputs_length)

    def test_the_shortest_possible_input(self):
        self.assertEqual(compute_input_and_target_lengths(3, 0.15, 3), (2, 3))
        collator = T5DataCollator(make_tokenizer(), 3)
        batch = collator({"input_ids": np.array([[10, 11]]), "key": np.array([7])})
        self.assertEqual(batch["input_ids"].tolist(), [[10, 32_099, EOS]])
        self.assertEqual(batch["labels"].tolist(), [[32_099, 11, EOS]])


class MaskTest(parameterized.TestCase):
    LENGTH, NOISE, SPANS, COUNT = 568, 85, 28, 5_000
    DTYPE = np.uint32  # what the collator draws for chunks of such a length

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        keys = example_keys(0, np.arange(cls.COUNT))
        cls.masks = masks_from_random(cls.random(keys, cls.LENGTH), cls.NOISE, cls.SPANS)
        edges = np.diff(cls.masks.astype(np.int8), axis=1)
        starts, ends = np.nonzero(edges == 1), np.nonzero(edges == -1)
        cls.starts = starts[1].reshape(cls.COUNT, -1) + 1
        cls.ends = np.concatenate([ends[1].reshape(cls.COUNT, -1) + 1, np.full((cls.COUNT, 1), cls.LENGTH)], axis=1)
        cls.spans = cls.ends - cls.starts  # [masks, spans]: lengths of hidden spans
        cls.kept = cls.starts - np.concatenate([np.zeros((cls.COUNT, 1), int), cls.ends[:, :-1]], axis=1)

    @staticmethod
    def random(keys: np.ndarray, length: int) -> np.ndarray:
        return cut_numbers(keys, length)

    def test_the_numbers_have_the_dtype_that_is_tested_here(self):
        self.assertEqual(self.random(np.arange(2), self.LENGTH).dtype, self.DTYPE)

    def test_counts_are_exact(self):
        """From which follow the means: 85 / 28 hidden and 17.25 kept tokens a span, 85 / 568 of all."""
        self.assertTrue((self.masks.sum(axis=1) == self.NOISE).all())
        self.assertEqual(self.spans.shape, (self.COUNT, self.SPANS))
        self.assertGreaterEqual(self.spans.min(), 1)
        self.assertGreaterEqual(self.kept.min(), 1)
        self.assertFalse(self.masks[:, 0].any(), "it begins kept")
        self.assertTrue(self.masks[:, -1].all(), "and ends hidden")

    def test_span_lengths_are_those_of_a_uniform_segmentation(self):
        # 27 cuts among 84 places: P(length > k) = C(84 - k, 27) / C(84, 27), hence P(1) = 27/84 for every span alike.
        survival = np.cumprod([1.0, *(1 - 27 / (84 - k) for k in range(57))])
        expected = survival[:-1] - survival[1:]
        self.assertAlmostEqual(expected[0], 27 / 84)
        for k in range(1, 9):
            share = (self.spans == k).mean()
            # 5,000 x 28 spans; those of a mask repel each other slightly, so independence overstates the deviation.
            deviation = np.sqrt(expected[k - 1] * (1 - expected[k - 1]) / self.spans.size)
            self.assertAlmostEqual(share, expected[k - 1], delta=5 * deviation, msg=f"length {k}")
        kept_one = (self.kept == 1).mean()
        self.assertAlmostEqual(kept_one, 27 / 482, delta=5 * np.sqrt(27 / 482 / self.kept.size))

    def test_every_place_of_the_sequence_of_spans_is_alike(self):
        for name, lengths, mean in (("hidden", self.spans, 85 / 28), ("kept", self.kept, 17.25)):
            deviation = lengths.std() / np.sqrt(self.COUNT)
            for place in range(self.SPANS):
                self.assertAlmostEqual(lengths[:, place].mean(), mean, delta=5 * deviation, msg=f"{name} {place}")

    def test_spans_and_kept_runs_are_drawn_independently(self):
        correlation = np.corrcoef(self.spans[:, 0], self.kept[:, 0])[0, 1]
        self.assertLess(abs(correlation), 5 / np.sqrt(self.COUNT))

    def test_statistics_are_those_of_the_slow_algorithm(self):
        rng = np.random.default_rng(0)
        slow = np.stack([slow_mask(568, 0.15, 3.0, rng) for _ in range(1_000)])
        self.assertTrue((slow.sum(axis=1) == self.NOISE).all())
        # Places near the ends tell a wrong first or last span at once; 5 deviations of a share of 1,000 masks.
        for place in (1, 2, 5, 100, 300, 500, -30, -5, -3, -2):
            share = self.masks[:, place].mean()
            tolerance = 5 * np.sqrt(max(share * (1 - share), 0.01) * (1 / 1_000 + 1 / self.COUNT))
            self.assertAlmostEqual(slow[:, place].mean(), share, delta=tolerance, msg=str(place))

    @parameterized.parameters(2, 5, 12, 20)
    def test_very_short_sequences_lose_their_tail_only(self, length):
        num_noise, num_spans = noise_counts(length, 0.15, 3.0)
        self.assertEqual(num_spans, 1)
        random = np.random.default_rng(0).integers(2**32, size=(20, length - 2), dtype=np.uint32)
        for mask in masks_from_random(random, num_noise, num_spans):
            self.assertEqual(mask.tolist(), [False] * (length - num_noise) + [True] * num_noise)


class MaskFrom64BitsTest(MaskTest):
    """As the masks of chunks beyond 16,384 tokens are drawn, whose places take more of a number's bits."""

    DTYPE = np.uint64

    @staticmethod
    def random(keys: np.ndarray, length: int) -> np.ndarray:
        return random_numbers(keys, length - 2)


class KeysTest(parameterized.TestCase):
    def test_numbers_are_splitmix64(self):
        # Sebastiano Vigna's published first outputs for seed 1234567.
        expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
        self.assertEqual(random_numbers(np.array([1234567]), 4)[0].tolist(), expected)

    @parameterized.parameters((568, np.uint32), (569, np.uint32), (2**14, np.uint32), (2**14 + 1, np.uint64))
    def test_numbers_of_cuts_are_the_bits_of_the_keys_numbers(self, length, dtype):
        found = cut_numbers(np.array([5, 1234567]), length)
        self.assertEqual((found.shape, found.dtype), ((2, length - 2), dtype))
        bits = random_numbers(np.array([5, 1234567]), length).view(dtype)
        np.testing.assert_array_equal(found, bits[:, : length - 2])

    def test_bits_are_balanced(self):
        bits = np.unpackbits(random_numbers(np.arange(1_000), 100).view(np.uint8))
        self.assertAlmostEqual(bits.mean(), 0.5, delta=5 * 0.5 / np.sqrt(bits.size))

    def test_keys_tell_seeds_and_examples_apart(self):
        keys = np.concatenate([example_keys(seed, np.arange(10_000)) for seed in (0, 1, 42, -1)])
        self.assertLen(np.unique(keys), 40_000)
        np.testing.assert_array_equal(example_keys(7, np.array([5, 9])), example_keys(7, np.arange(10))[[5, 9]])


class InputsAndTargetsTest(parameterized.TestCase):
    def test_golden_example(self):
        # REFERENCE, section 1: vocabulary 1000, so that the sentinels are 999, 998 ...
        tokens, mask = np.array([[10, 11, 12, 13, 14, 15]]), np.array([[True, True, False, False, True, False]])
        inputs, targets = inputs_and_targets(tokens, mask, np.arange(999, 899, -1), EOS)
        self.assertEqual(inputs.tolist(), [[999, 12, 13, 998, 15, EOS]])
        self.assertEqual(targets.tolist(), [[999, 10, 11, 998, 14, EOS]])
        self.assertEqual(tokens.tolist(), [[10, 11, 12, 13, 14, 15]], "they are not changed")

    def test_inputs_with_bos_begin_with_it_and_keep_their_order(self):
        """As Gemma's tokenizer writes a text: <bos>, the text, no <eos>. Targets are those without BOS."""
        tokens = np.array([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]])
        mask = np.array([[1, 1, 0, 0, 1, 0], [0, 1, 0, 1, 1, 0]], dtype=bool)
        inputs, targets = inputs_and_targets(tokens, mask, np.arange(999, 899, -1), EOS, bos_id=2)
        self.assertEqual(inputs.tolist(), [[2, 999, 12, 13, 998, 15], [2, 20, 999, 22, 998, 25]])
        self.assertEqual(targets.tolist(), [[999, 10, 11, 998, 14, EOS], [999, 21, 998, 23, 24, EOS]])

    @parameterized.product(length=(2, 7, 40, 568), density=(0.15, 0.5), mean_span=(1.0, 3.0, 8.0))
    def test_as_the_slow_algorithm_with_the_same_masks(self, length, density, mean_span):
        rng = np.random.default_rng(length)
        num_noise, num_spans = noise_counts(length, density, mean_span)
        tokens = rng.integers(3, 30_000, (16, length)).astype(np.uint16)
        mask = masks_from_random(random_numbers(np.arange(16), length - 2), num_noise, num_spans)
        sentinels = np.arange(65_000, 64_000, -1)
        inputs, targets = inputs_and_targets(tokens, mask, sentinels, EOS)
        for row in range(16):
            np.testing.assert_array_equal(inputs[row], slow_side(tokens[row], mask[row], sentinels))
            np.testing.assert_array_equal(targets[row], slow_target(tokens[row], mask[row], sentinels))

    @parameterized.parameters((128, 0.15, 3.0), (64, 0.5, 2.0), (100, 0.3, 1.0), (512, 0.15, 64.0))
    def test_inputs_and_targets_restore_the_text(self, input_length, density, mean_span):
        collator = T5DataCollator(make_tokenizer(), input_length, density, mean_span)
        tokens = np.random.default_rng(0).integers(3, 31_000, (50, collator.tokens_length))
        batch = collator({"input_ids": tokens, "key": example_keys(0, np.arange(50))})
        for row in range(50):
            inputs, targets = batch["input_ids"][row].numpy(), batch["labels"][row].numpy()
            self.assertEqual(restored(inputs, targets, T5_SENTINELS), tokens[row].tolist())

    def test_masks_of_unequal_shape_are_refused(self):
        tokens = np.arange(12).reshape(2, 6)
        # One token more, one span less, as many altogether but not in every row, none at all.
        for masks in (["000001", "000011"], ["010001", "000011"], ["010001", "000111"], ["000000", "000000"]):
            mask = np.array([[place == "1" for place in row] for row in masks])
            with self.assertRaisesRegex(ValueError, "same number of tokens in the same number of spans"):
                inputs_and_targets(tokens, mask, T5_SENTINELS, EOS)

    def test_more_spans_than_sentinels_are_refused(self):
        mask = np.array([[False, True, False, True]])
        with self.assertRaisesRegex(ValueError, "2 masked spans need 2 sentinels; the tokenizer has 1"):
            inputs_and_targets(np.array([[5, 6, 7, 8]]), mask, T5_SENTINELS[:1], EOS)


class ShiftTest(absltest.TestCase):
    def test_start_token_and_padding_may_be_two_tokens(self):
        labels = torch.tensor([[5, 6, EOS, -100, -100], [7, EOS, -100, -100, -100]])
        self.assertEqual(shift_right(labels, 9, 0).tolist(), [[9, 5, 6, EOS, 0], [9, 7, EOS, 0, 0]])


class SentinelsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("t5", 32_100, None, T5_SENTINELS),
        # As in mT5's published tokenizer the vocabulary goes on after the sentinels, and len() says nothing of them.
        ("by_name_not_by_size", 500, {n: 300 + 2 * n for n in range(10)}, 300 + 2 * np.arange(10)),
        ("a_gap_ends_them", 50, {0: 40, 1: 41, 3: 43}, [40, 41]),
    )
    def test_ids(self, size, sentinels, ids):
        np.testing.assert_array_equal(find_sentinel_ids(make_tokenizer(size, sentinels)), ids)

    def test_byt5_counts_down_from_its_last_byte(self):
        tokenizer = ByT5Tokenizer()
        np.testing.assert_array_equal(find_sentinel_ids(tokenizer), np.arange(258, 158, -1))
        collator = T5DataCollator(tokenizer, 64)
        chunk = np.array(tokenizer("x" * collator.tokens_length, add_special_tokens=False)["input_ids"])
        batch = collator({"input_ids": chunk[None], "key": np.array([1])})
        self.assertEqual(batch["labels"][0, 0].item(), 258)
        self.assertEqual(batch["labels"][0, -1].item(), tokenizer.eos_token_id)

    def test_mt5_pieces_before_words_that_were_added_to_them(self):
        tokenizer = make_tokenizer(500, {n: 499 - n for n in range(5)}, mark="▁")
        np.testing.assert_array_equal(find_sentinel_ids(tokenizer), 499 - np.arange(5))
        tokenizer.add_tokens([f"<extra_id_{n}>" for n in range(100)], special_tokens=True)
        np.testing.assert_array_equal(find_sentinel_ids(tokenizer), 499 - np.arange(5))

    def test_added_to_another_tokenizer(self):
        tokenizer = make_tokenizer(100, sentinels={})
        tokenizer.add_tokens([f"<extra_id_{n}>" for n in range(5)], special_tokens=True)
        np.testing.assert_array_equal(find_sentinel_ids(tokenizer), 100 + np.arange(5))

    def test_none_is_refused(self):
        with self.assertRaisesRegex(ValueError, r"has no sentinels \(<extra_id_0> ...\): train one with create_tok"):
            find_sentinel_ids(make_tokenizer(50, {}))
        self.assertEmpty(find_sentinel_ids(make_tokenizer(50, {}), required=False))


class CollatorTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.collator = T5DataCollator(make_tokenizer(), 512)
        self.tokens = np.random.default_rng(1).integers(3, 31_000, (32, 568)).astype(np.uint16)
        self.keys = example_keys(5, np.arange(32))

    def test_lengths_eos_and_no_closing_sentinel(self):
        batch = self.collator({"input_ids": self.tokens, "key": self.keys})
        shapes = {name: tuple(tensor.shape) for name, tensor in batch.items()}
        self.assertEqual(shapes, {"input_ids": (32, 512), "labels": (32, 114), "decoder_input_ids": (32, 114)})
        self.assertEqual({tensor.dtype for tensor in batch.values()}, {batch["labels"].new_zeros(1).dtype})
        for name in ("input_ids", "labels"):
            rows = batch[name].numpy()
            self.assertTrue((rows[:, -1] == EOS).all())
            self.assertEqual((rows == EOS).sum(), 32, "one EOS each")
            self.assertEqual((rows <= 0).sum(), 0, "no padding, nothing ignored")
            sentinels = rows[rows >= 32_000].reshape(32, -1)
            np.testing.assert_array_equal(sentinels, np.tile(T5_SENTINELS[:28], (32, 1)))  # each once, counting down
        self.assertTrue((batch["labels"][:, -2] < 32_000).all(), "a closing sentinel")

    def test_decoder_inputs_are_the_labels_shifted(self):
        batch = T5DataCollator(make_tokenizer(), 512, decoder_start_token_id=9)({"input_ids": self.tokens})
        self.assertTrue((batch["decoder_input_ids"][:, 0] == 9).all())
        self.assertTrue((batch["decoder_input_ids"][:, 1:] == batch["labels"][:, :-1]).all())

    def test_a_mask_depends_on_its_key_alone(self):
        whole = self.collator({"input_ids": self.tokens, "key": self.keys})
        order = np.random.default_rng(2).permutation(32)
        shuffled = self.collator({"input_ids": self.tokens[order], "key": self.keys[order]})
        one_by_one = [self.collator([{"input_ids": t, "key": k}]) for t, k in zip(self.tokens, self.keys, strict=True)]
        for name in whole:
            np.testing.assert_array_equal(whole[name][order], shuffled[name])
            np.testing.assert_array_equal(whole[name], np.concatenate([batch[name] for batch in one_by_one]))
        other_text = self.collator({"input_ids": self.tokens[::-1], "key": self.keys})
        hidden = [(batch["labels"] >= 32_000).numpy() for batch in (whole, other_text)]
        np.testing.assert_array_equal(*hidden)  # the places of the sentinels tell the lengths of the spans

    def test_keys_may_be_python_integers(self):
        """Of large and small ones numpy would make floats, which lack the last bits by which the rows differ."""
        keys = np.array([1, 2**64 - 1, 2**64 - 2, 2**63, 2**63 + 1], dtype=np.uint64)
        rows = [{"input_ids": self.tokens[0], "key": key} for key in keys.tolist()]
        expected = self.collator({"input_ids": self.tokens[:1].repeat(5, axis=0), "key": keys})
        np.testing.assert_array_equal(self.collator(rows)["input_ids"], expected["input_ids"])

    def test_nothing_else_is_drawn_or_remembered(self):
        np.random.seed(0)
        first = self.collator({"input_ids": self.tokens, "key": self.keys})
        np.random.seed(1)
        copy = pickle.loads(pickle.dumps(self.collator))  # as a worker process gets it
        again = copy({"input_ids": self.tokens, "key": self.keys})
        np.testing.assert_array_equal(first["input_ids"], again["input_ids"])
        other = self.collator({"input_ids": self.tokens, "key": example_keys(5, np.arange(32) + 32)})
        self.assertTrue((first["input_ids"] != other["input_ids"]).any(dim=1).all(), "other keys, other masks")

    def test_without_keys_the_text_decides(self):
        first = self.collator([{"input_ids": row.tolist()} for row in self.tokens])
        again = self.collator({"input_ids": self.tokens[::-1]})
        np.testing.assert_array_equal(first["labels"], again["labels"].flip(0))
        places = {tuple(np.flatnonzero(row >= 32_000)) for row in first["labels"].numpy()}
        self.assertLen(places, 32)

    @parameterized.parameters(
        ([567, 567], r"chunks must be 568 tokens long, got lengths \[567\]"),
        ([568, 500], r"chunks must be 568 tokens long, got lengths \[500, 568\]"),
    )
    def test_chunks_of_another_length_are_refused(self, lengths, message):
        with self.assertRaisesRegex(ValueError, message):
            self.collator([{"input_ids": [5] * length, "key": 0} for length in lengths])

    def test_sentinel_budget(self):
        message = (
            "--input_seq_length 512 with --noise_density 0.5 and --mean_noise_span_length 3.0 masks 128 spans, "
            "but the tokenizer has 100 sentinels: use longer spans, a lower density or a shorter input"
        )
        with self.assertRaisesRegex(ValueError, message):
            T5DataCollator(make_tokenizer(), 512, 0.5, 3.0)
        enough = make_tokenizer(1_000, {n: 999 - n for n in range(128)})
        self.assertEqual(T5DataCollator(enough, 512, 0.5, 3.0).num_spans, 128)

    def test_a_tokenizer_without_eos_is_refused(self):
        with self.assertRaisesRegex(ValueError, "has no EOS token, with which T5 ends every text"):
            T5DataCollator(make_tokenizer(eos=False), 512)

    def test_attributes_agree_with_the_batches(self):
        for density, mean_span, length in ((0.15, 3.0, 100), (0.5, 2.0, 9), (0.5, 3.0, 11), (0.5, 8.0, 64)):
            collator = T5DataCollator(make_tokenizer(), length, density, mean_span)
            batch = collator({"input_ids": np.full((1, collator.tokens_length), 7)})
            self.assertEqual(batch["input_ids"].shape[1], collator.inputs_length)
            self.assertEqual(batch["labels"].shape[1], collator.targets_length)


class SpeedTest(absltest.TestCase):
    def test_ten_times_the_speed_of_the_example_by_example_algorithm(self):
        """Both get the same 128 x 568 tokens. Timed in turns, the best of many: other work on the machine only adds."""
        collator = T5DataCollator(make_tokenizer(), 512)
        tokens = np.random.default_rng(0).integers(3, 31_000, (128, 568)).astype(np.uint16)
        keys = example_keys(0, np.arange(128))
        rng = np.random.default_rng(0)

        def slow():
            for row in tokens:
                mask = slow_mask(568, 0.15, 3.0, rng)
                slow_side(row, mask, T5_SENTINELS)
                slow_side(row, ~mask, T5_SENTINELS)  # T5 makes the targets by the same function; they begin otherwise

        def fast():
            collator({"input_ids": tokens, "key": keys})

        best = {slow: np.inf, fast: np.inf}
        for attempt in range(60):
            for function, repeats in ((slow, 1), (fast, 5)):
                for _ in range(repeats):
                    start = time.perf_counter()
                    function()
                    best[function] = min(best[function], time.perf_counter() - start)
            if attempt >= 5 and best[slow] > 12 * best[fast]:
                break
        ratio = best[slow] / best[fast]
        print(f"collator: {128 / best[fast]:,.0f} examples/s, {ratio:.1f} x the example-by-example algorithm")
        self.assertGreater(ratio, 10)
