"""Tests of batches in one shape and of packed ones: their collators, and the runs they are for.

Hermetic; a T5 of a few thousand weights on made-up rows. A few seconds.
"""

import tempfile
from types import SimpleNamespace

import numpy as np
import torch
from absl.testing import parameterized
from datasets import Dataset
from test_trainer_t5 import LABELS, curve, make_model, make_trainer, pad_rows, ragged_rows
from torch._dynamo.utils import counters

from constants import IGNORE_INDEX
from foundry.corpora.chunks import EpochSampler, row_lengths
from foundry.model_t5 import set_attention
from foundry.modeling.loss import compute_loss_in_forward
from foundry.modeling.segment_masks import enable_packing
from foundry.training.batching import FilledRows, OneShapeCollator, PackingCollator, assign_to_rows, train_collator


class FilledRowsTest(parameterized.TestCase):
    def test_every_row_once_and_nothing_to_learn_behind(self):
        rows = [{"input_ids": [n + 5, 1], "attention_mask": [1, 1], "labels": [n + 5, 1]} for n in range(5)]
        data = Dataset.from_list(rows)
        filled = FilledRows(data, 3, EpochSampler(5, seed=1))
        sampler = filled.order
        for epoch in range(2):
            sampler.set_epoch(epoch)
            numbers = list(sampler)
            self.assertLen(numbers, len(sampler))
            self.assertLen(filled, 8)
            found = [filled[number] for number in numbers]
            self.assertCountEqual([tuple(row["labels"]) for row in found[:5]], [tuple(row["labels"]) for row in rows])
            self.assertEqual([row["labels"] for row in found[5:]], [[IGNORE_INDEX]] * 3)
            self.assertEqual({len(row["input_ids"]) for row in found[5:]}, {1})
        self.assertNotEqual(numbers[:5], list(EpochSampler(5, seed=1)), "the epoch reaches the order")


class RowLengthsTest(parameterized.TestCase):
    def test_lengths_of_rows_in_a_list_and_in_a_table_whatever_its_order(self):
        rows = [{"input_ids": [1] * n, "labels": [1] * (n % 3 + 1)} for n in (4, 9, 1, 6)]
        table = Dataset.from_list(rows)
        for found, wanted in ((rows, [4, 9, 1, 6]), (table, [4, 9, 1, 6]), (table.select([2, 0]), [1, 4])):
            self.assertEqual(row_lengths(found).tolist(), wanted)
        self.assertEqual(row_lengths(table.select(range(1, 3)), "labels").tolist(), [1, 2])


def assert_same_gradients(model, attention: str, batch: dict, other: dict) -> None:
    """The loss and all gradients of the model, in float64, are those of the other batch."""
    model = model.double().train()
    set_attention(model, attention)
    compute_loss_in_forward(model)
    found = []
    for each in (batch, other):
        model.zero_grad()
        loss = model(**each).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for value, wanted in zip(*found, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12)


def one_shape_collator(rows: int = 8) -> OneShapeCollator:
    return OneShapeCollator(0, 0, source_length=16, target_length=8, rows=rows)


class CollatorTest(parameterized.TestCase):
    @parameterized.parameters(3, 8)
    def test_shapes_are_static_and_rows_whole(self, count):
        rows = ragged_rows(8, seed=0)[:count]
        batch = one_shape_collator()(rows)
        self.assertEqual(
            {name: tuple(t.shape) for name, t in batch.items()},
            dict(input_ids=(8, 16), attention_mask=(8, 16), labels=(8, 8), decoder_input_ids=(8, 8)),
        )
        for number, row in enumerate(rows):
            length = len(row["input_ids"])
            self.assertEqual(batch["input_ids"][number].tolist(), row["input_ids"] + [0] * (16 - length))
            self.assertEqual(batch["attention_mask"][number].tolist(), [1] * length + [0] * (16 - length))
            labels = row["labels"] + [IGNORE_INDEX] * (8 - len(row["labels"]))
            self.assertEqual(batch["labels"][number].tolist(), labels)
        self.assertTrue((batch["labels"][count:] == IGNORE_INDEX).all())

    @parameterized.parameters(
        # rows, flags -> shape of the collator for training
        (Dataset.from_list, dict(torch_compile=True, packing=False), (16, 8, 4)),
        (Dataset.from_list, dict(torch_compile=False, packing=False), None),
        (list, dict(torch_compile=True, packing=False), None),  # a mixture, a stream: no table
    )
    def test_compiled_batches_are_as_long_as_the_longest_row(self, made, flags, shape):
        rows = [{"input_ids": [5] * n, "labels": [5] * (n % 5 + 1)} for n in (3, 9, 14)]
        found = train_collator(made(rows), SimpleNamespace(train_batch_size=4, **flags), make_model())
        self.assertEqual(found and (found.source_length, found.target_length, found.rows), shape)

    @parameterized.parameters("eager", "sdpa")
    def test_rows_without_an_example_change_nothing(self, attention):
        """Each sees one token: a softmax over none is nan, and a nan in one row reaches all weights."""
        rows = ragged_rows(3, seed=0)
        filled, alone = (one_shape_collator(rows=count)(rows) for count in (8, 3))
        lengths = [len(row["input_ids"]) for row in rows]
        self.assertEqual(filled["attention_mask"].sum(1).tolist(), lengths + [1] * 5)
        assert_same_gradients(make_model(), attention, filled, alone)

    @parameterized.parameters("eager", "sdpa")
    def test_loss_and_gradients_are_those_of_tight_padding(self, attention):
        rows = ragged_rows(5, seed=0)
        assert_same_gradients(make_model(), attention, one_shape_collator()(rows), pad_rows(rows))


class RunTest(parameterized.TestCase):
    def trainer(self, rows, **flags):
        args = dict(max_steps=-1, num_train_epochs=2, per_device_train_batch_size=8) | flags
        trainer = make_trainer(tempfile.mkdtemp(), rows=rows, **args)
        trainer.rows.collator = one_shape_collator()
        return trainer

    def test_compiled_training_meets_one_shape(self):
        """One graph, the last batch's missing rows included; the losses are the uncompiled."""
        torch._dynamo.reset()
        counters.clear()
        rows = ragged_rows(43, seed=0)
        plain, compiled = self.trainer(rows), self.trainer(rows, torch_compile_backend="aot_eager")
        plain.train()
        self.assertEqual(counters["stats"]["unique_graphs"], 0)
        compiled.train()
        self.assertEqual(counters["stats"]["unique_graphs"], 1)
        self.assertEmpty(counters["graph_break"])
        np.testing.assert_allclose(curve(plain), curve(compiled), rtol=1e-4)
        self.assertEqual(compiled.state.global_step, 2 * 6)

    def test_evaluation_pads_as_ever(self):
        trainer = self.trainer(ragged_rows(8, seed=0))
        self.assertIs(trainer.get_eval_dataloader(ragged_rows(8, seed=0)).collate_fn, trainer.data_collator)
        self.assertIs(trainer.get_train_dataloader().collate_fn, trainer.rows.collator)

    def test_predictions_come_in_the_order_of_the_rows(self):
        """Though evaluation takes the longest rows first: each row alone has the same answer and label."""
        rows = ragged_rows(13, seed=0)
        trainer = make_trainer(tempfile.mkdtemp(), rows=rows, per_device_eval_batch_size=4)
        trainer.class_label_ids = LABELS
        shapes = []
        collate = trainer.data_collator
        trainer.data_collator = lambda rows: shapes.append(max(len(r["input_ids"]) for r in rows)) or collate(rows)
        output = trainer.predict(rows)
        self.assertEqual(shapes, sorted(shapes, reverse=True))
        self.assertGreater(shapes[0], shapes[-1])
        for number, row in enumerate(rows):
            alone = trainer.predict([row])
            np.testing.assert_allclose(output.predictions[1][number], alone.predictions[1][0], rtol=1e-4, atol=1e-4)
            self.assertEqual([i for i in output.label_ids[number].tolist() if i >= 0], row["labels"])


def packing_collator() -> PackingCollator:
    return PackingCollator(0, 0, cost=lambda source, target: source + target)


class PackingTest(parameterized.TestCase):
    @parameterized.parameters(
        # lengths of sources and targets, cost of a row -> examples of each row
        ([16, 3, 9, 2], [2, 2, 2, 2], lambda s, t: s + t, [[0], [2, 1, 3]]),
        ([16, 3, 9, 2], [8, 8, 8, 8], lambda s, t: s + 100 * t, [[0], [2], [1], [3]]),  # longer targets cost too much
        ([5], [1], lambda s, t: s + t, [[0]]),
        ([8, 8], [1, 1], lambda s, t: s + t, [[0], [1]]),
    )
    def test_examples(self, sources, targets, cost, expected):
        self.assertEqual(assign_to_rows(sources, targets, cost), expected)

    @parameterized.parameters(range(5))
    def test_every_example_is_in_one_row_and_whole(self, seed):
        rows = ragged_rows(13, seed=seed)
        batch = packing_collator()(rows)
        self.assertLess(len(batch["input_ids"]), len(rows))
        self.assertEqual({length.shape[1] % 8 for length in batch.values()}, {0})
        found = []
        for row in range(len(batch["input_ids"])):
            sources, targets = batch["input_segments"][row], batch["target_segments"][row]
            for segment in range(1, int(sources.max()) + 1):
                here = targets == segment
                labels = batch["labels"][row][here].tolist()
                self.assertEqual(batch["decoder_input_ids"][row][here].tolist(), [0, *labels[:-1]])
                found.append((batch["input_ids"][row][sources == segment].tolist(), labels))
            self.assertEqual(set(batch["labels"][row][targets == 0].tolist()) - {IGNORE_INDEX}, set())
        self.assertCountEqual(found, [(row["input_ids"], row["labels"]) for row in rows])

    @parameterized.product(attention=("eager", "sdpa"), filling=(0, 3))
    def test_loss_and_gradients_are_those_of_the_padded_batch(self, attention, filling):
        rows = ragged_rows(9, seed=0)
        filled = FilledRows(Dataset.from_list(rows), filling, EpochSampler(9, seed=1))
        model = make_model()
        enable_packing(model)
        assert_same_gradients(model, attention, packing_collator()(list(filled)), pad_rows(rows))

    def test_a_run_has_the_same_losses_and_weights(self):
        rows, trainers = ragged_rows(43, seed=0), []
        for collator in (None, packing_collator()):
            flags = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=8)
            trainer = make_trainer(tempfile.mkdtemp(), rows=rows, **flags)
            trainer.rows.collator = collator
            if collator:
                enable_packing(trainer.model)
            trainer.train()
            trainers.append(trainer)
        padded, packed = trainers
        np.testing.assert_allclose(curve(packed), curve(padded), rtol=1e-5)
        for name, weight in padded.model.state_dict().items():
            torch.testing.assert_close(packed.model.state_dict()[name], weight, rtol=1e-4, atol=1e-5, msg=name)
        self.assertEqual(packed.get_eval_dataloader(rows).collate_fn, packed.data_collator)
