"""Tests of `--packing documents` (features/documents): what rows hold, that documents are alone there, and a run.

The reference is the documented rule, followed here in plain Python, a token and an example at a time. Hermetic. About
30 s, most of it for three short runs.
"""

import functools
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from absl.testing import parameterized
from accelerate.data_loader import BatchSamplerShard
from helpers import SHAPE, SMALL_MODEL, SMALL_RUN, argv_of, call, sentences, weights_of
from test_data_collator_t5 import EOS, T5_SENTINELS, make_tokenizer, restored
from test_trainer_t5 import arguments, quietly
from transformers import set_seed

import pre_train_t5
from data_collator_t5 import T5DataCollator
from features.documents.document_spans import DocumentRows, DocumentSpans, RowLayout, share_out_in_rows
from foundry.arguments.text import PreTrainingDataArguments
from foundry.corpora.chunks import EpochSampler, WeightedExamples
from foundry.corpora.own_ids import ids_tokenizer
from foundry.corpora.sources import find_sources
from foundry.corpora.token_files import TokenFile, tokenised
from foundry.model_t5 import build_config, create_model
from foundry.modeling.segment_masks import enable_packing
from foundry.objectives.metrics import language_model_metrics
from foundry.trainer_t5 import T5Trainer

# (input_seq_length, noise_density, mean_noise_span_length)
SETTINGS = ((512, 0.15, 3.0), (128, 0.15, 3.0), (64, 0.3, 3.0), (64, 0.2, 1.0), (96, 0.5, 8.0), (40, 0.5, 1.0))
SETTINGS += ((33, 0.9, 1.0), (256, 0.15, 64.0))


tokenizer = functools.cache(make_tokenizer)


@functools.cache
def collator(*setting) -> DocumentSpans:
    return DocumentSpans(tokenizer(), *setting)


def text_of(longest: int, size: int, seed: int = 0, last_eos: bool = True) -> np.ndarray:
    """Documents of 1 to `longest` tokens, of all orders of magnitude, about `size` tokens in all."""
    rng = np.random.default_rng(seed)
    parts, total = [], 0
    while total < size:
        length = round(np.exp(rng.uniform(0, np.log(longest))))
        parts += [rng.integers(3, 31_000, length), [EOS]]
        total += length + 1
    parts = parts if last_eos else parts[:-1]
    return np.concatenate(parts).astype(np.uint16)


def slow_rows(tokens: list[int], layout: RowLayout, inputs: int, targets: int) -> list[list[tuple[int, int]]]:
    """[(first token, length) of each example] of each row, from the equations and the rule alone."""
    rows, row, begin = [], [], 0
    while True:
        end = begin + layout.shortest  # the document's, or that of the documents that are joined
        while end < len(tokens) and tokens[end] != EOS:
            end += 1
        if end > len(tokens):
            return rows
        count = len(row) + 1
        noise, spans = int(layout.noise[count]), int(layout.spans[count])
        assert noise + spans + count == targets
        room = inputs - count - spans + noise - sum(length for _, length in row)
        if end - begin < room:
            row.append((begin, end - begin))
            begin = end + 1
            continue
        if room < 2:
            row[-1] = (row[-1][0], row[-1][1] - (2 - room))
            room = 2
        rows.append([*row, (begin, room)])
        row = []
        begin = begin + room if end - begin - room >= layout.shortest else end + 1


def examples_of(batch: dict, row: int):
    """(inputs, targets, decoder inputs) of the examples of a row."""
    for segment in range(1, int(batch["input_segments"][row].max()) + 1):
        targets = batch["target_segments"][row] == segment
        yield (
            batch["input_ids"][row][batch["input_segments"][row] == segment].numpy(),
            batch["labels"][row][targets].numpy(),
            batch["decoder_input_ids"][row][targets].numpy(),
        )


class LayoutTest(parameterized.TestCase):
    @parameterized.parameters(*SETTINGS, (512, 0.15, 8.0), (1024, 0.5, 64.0), (16, 0.15, 3.0), (3, 0.15, 3.0))
    def test_a_row_of_one_example_is_t5s(self, *setting):
        with mock.patch("data_collator_t5.find_sentinel_ids", return_value=np.arange(1_000)):
            plain, own = T5DataCollator(tokenizer(), *setting), DocumentSpans(tokenizer(), *setting)
        self.assertEqual((own.inputs_length, own.targets_length), (plain.inputs_length, plain.targets_length))
        layout = own.layout
        found = layout.texts[1], layout.noise[1], layout.spans[1]
        self.assertEqual(found, (plain.tokens_length, plain.num_noise, plain.num_spans))
        for count in range(1, len(layout.texts)):
            text, noise, spans = int(layout.texts[count]), int(layout.noise[count]), int(layout.spans[count])
            self.assertEqual(text - noise + spans + count, own.inputs_length)
            self.assertEqual(noise + spans + count, own.targets_length)
            self.assertTrue(count <= spans <= min(noise, text - noise))

    def test_the_papers_numbers(self):
        layout = RowLayout(512, 114, 3.0)
        self.assertEqual((layout.texts[1], layout.noise[1], layout.spans[1]), (568, 85, 28))
        self.assertEqual((layout.texts[4], layout.noise[4], layout.spans[4]), (562, 82, 28))
        # 38 examples of 13 tokens have room for a hidden token each and nothing else.
        self.assertEqual((len(layout.texts) - 1, layout.shortest), (38, 13))

    def test_share_out(self):
        self.assertEqual(share_out_in_rows(np.array([5]), np.array([4, 4, 2]), np.array([3])).tolist(), [2, 2, 1])
        rng = np.random.default_rng(0)
        for _ in range(200):
            counts = rng.integers(1, 9, 5)
            capacities = rng.integers(0, 30, counts.sum())
            row = np.repeat(np.arange(5), counts)
            sums = np.bincount(row, capacities).astype(int)
            totals = rng.integers(0, sums + 1)
            parts = share_out_in_rows(totals, capacities, counts)
            self.assertEqual(np.bincount(row, parts).tolist(), totals.tolist())
            self.assertTrue(((parts >= 0) & (parts <= capacities)).all())
            exact = totals[row] * capacities / np.maximum(sums, 1)[row]
            self.assertLess(np.abs(parts - exact).max(), 1)


class RowsTest(parameterized.TestCase):
    @parameterized.product(setting=SETTINGS, longest=(3_000, 60), seed=(0, 1))
    def test_rows_are_full_and_give_their_text_back(self, setting, longest, seed):
        own = collator(*setting)
        text = text_of(longest, 12_000, seed, last_eos=seed == 0)
        rows = DocumentRows(text, own.layout, EOS, seed)
        wanted = slow_rows(text.tolist(), own.layout, own.inputs_length, own.targets_length)
        self.assertEqual(rows.starts.tolist(), [row[0][0] for row in wanted])
        batch = own(rows.__getitems__(range(len(rows))))
        self.assertEqual(batch["input_ids"].shape, (len(rows), own.inputs_length))
        self.assertEqual(batch["labels"].shape, (len(rows), own.targets_length))
        self.assertGreater(min(batch["input_segments"].min(), batch["target_segments"].min()), 0, "padding")
        for number, parts in enumerate(wanted):
            found = list(examples_of(batch, number))
            self.assertLen(found, len(parts))
            for (inputs, targets, decoder_inputs), (begin, length) in zip(found, parts, strict=True):
                self.assertEqual((inputs[-1], targets[-1]), (EOS, EOS))
                self.assertEqual(decoder_inputs.tolist(), [0, *targets[:-1]])
                self.assertEqual(restored(inputs, targets, T5_SENTINELS), text[begin : begin + length].tolist())
                written = [token for token in inputs if token in T5_SENTINELS]
                self.assertEqual(written, T5_SENTINELS[: len(written)].tolist())
                self.assertEqual([token for token in targets if token in T5_SENTINELS], written)
                self.assertGreater(len(written), 0)
                self.assertGreater(len(inputs) - 1 - len(written), 0, "nothing is kept")
        kinds = torch.isin(batch["labels"], torch.tensor([*T5_SENTINELS, EOS]))
        inner = sum(int((text[b : b + n] == EOS).sum()) for row in wanted for b, n in row)  # of joined documents
        self.assertLessEqual(int((kinds != batch["target_kinds"].bool()).sum()), inner)

        texts = own.layout.texts[[len(row) for row in wanted]]
        self.assertAlmostEqual(rows.tokens_length, texts.mean())
        self.assertAlmostEqual(rows.examples_per_row, np.mean([len(row) for row in wanted]))

    @parameterized.product(setting=SETTINGS[:4], longest=(3_000, 60), part_rows=(2, 4_096))
    def test_every_token_is_in_one_row_but_for_the_stated_ones(self, setting, longest, part_rows):
        own = collator(*setting)
        text = text_of(longest, 30_000)
        with (
            mock.patch("features.documents.document_spans.PART_ROWS", part_rows),
            mock.patch("features.documents.document_spans.SCANNED", 1_000),
        ):
            rows = DocumentRows(text, own.layout, EOS)
        begins, lengths, counts = own.find_examples(rows.__getitems__(range(len(rows)))["input_ids"])
        row = np.repeat(np.arange(len(rows)), counts)
        begins = begins - row * own.layout.width + rows.starts[row]
        self.assertLessEqual((begins - rows.starts[row] + lengths).max(), own.layout.width)
        used = np.zeros(len(text), int)
        for begin, length in zip(begins, lengths, strict=True):
            used[begin : begin + length] += 1
        self.assertEqual(used.max(), 1, "a token is in two examples")
        parts = 0
        ends = [*(begins + lengths)[:-1]]
        for end, begin in zip([0, *ends], begins, strict=True):
            gap = text[end:begin]
            # A document's rest or end, and the EOS behind it; between parts up to a row.
            if len(gap) and not (gap[-1] == EOS and len(gap) <= max(own.layout.shortest, 6)):
                parts += 1
                self.assertLess(len(gap), 2 * own.layout.width)
        self.assertLessEqual(parts, len(text) // (part_rows * own.layout.texts[1]))
        self.assertLess(len(text) - begins[-1], 2 * own.layout.width)
        separators = np.count_nonzero((used == 0) & (text == EOS))
        self.assertAlmostEqual(rows.unused, 1 - used.sum() / (len(text) - separators), delta=0.01)
        # No document sees another one: an EOS is within an example only if what precedes it there is too short.
        for begin, length in zip(begins, lengths, strict=True):
            inner = np.flatnonzero(text[begin : begin + length] == EOS)
            self.assertLess(inner.max(initial=0), own.layout.shortest)

    def test_noise_is_shared_out_in_proportion(self):
        own = collator(512, 0.15, 3.0)
        rows = DocumentRows(text_of(3_000, 200_000, 3), own.layout, EOS)
        batch = own(rows.__getitems__(range(len(rows))))
        shares, sizes = [], []
        for row in range(len(rows)):
            for inputs, targets, _ in examples_of(batch, row):
                markers = int(np.isin(targets, T5_SENTINELS).sum())
                hidden = len(targets) - markers - 1
                shares.append(hidden / (hidden + len(inputs) - markers - 1))
                sizes.append(hidden + len(inputs) - markers - 1)
        shares, sizes = np.array(shares), np.array(sizes)
        self.assertAlmostEqual(np.average(shares, weights=sizes), 0.145, delta=0.006)
        for low, high in ((13, 50), (50, 150), (150, 400), (400, 600)):
            chosen = (sizes >= low) & (sizes < high)
            self.assertAlmostEqual(np.average(shares[chosen], weights=sizes[chosen]), 0.15, delta=0.03)

    @parameterized.parameters(([],), ([EOS],), ([EOS] * 100,), ([5] * 7,), ([5, EOS] * 40,), ([5] * 10_000,))
    def test_odd_texts(self, text):
        own = collator(64, 0.3, 3.0)
        text = np.array(text, dtype=np.uint16)
        rows = DocumentRows(text, own.layout, EOS)
        wanted = slow_rows(text.tolist(), own.layout, own.inputs_length, own.targets_length)
        self.assertEqual(rows.starts.tolist(), [row[0][0] for row in wanted])
        if len(rows):
            self.assertEqual(own(rows.__getitems__(range(len(rows))))["input_ids"].shape, (len(rows), 64))

    def test_a_number_decides_its_row(self):
        own = collator(64, 0.3, 3.0)
        rows = DocumentRows(text_of(300, 20_000), own.layout, EOS, seed=3)
        numbers = np.array([7, 3, len(rows) + 7, 50, 11])
        together = own(rows.__getitems__(numbers))
        for place, number in enumerate(numbers):
            alone = own([rows[int(number)]])
            for name, tensor in together.items():
                self.assertTrue(torch.equal(tensor[place], alone[name][0]), name)
        self.assertFalse(torch.equal(together["input_ids"][0], together["input_ids"][2]), "another epoch, another mask")
        self.assertTrue(torch.equal(together["input_segments"][0].max(), together["input_segments"][2].max()))

    def test_workers_and_ranks_get_the_same(self):
        own = collator(64, 0.3, 3.0)
        rows = DocumentRows(text_of(300, 20_000), own.layout, EOS, seed=3)
        sampler = EpochSampler(len(rows), 7, 8, count_epochs=True)
        batches = torch.utils.data.BatchSampler(sampler, 4, drop_last=True)
        load = functools.partial(torch.utils.data.DataLoader, rows, collate_fn=own)
        one = [batch["input_ids"] for batch in load(batch_sampler=batches)]
        workers = [batch["input_ids"] for batch in load(batch_sampler=batches, num_workers=2)]
        ranks = [[b["input_ids"] for b in load(batch_sampler=BatchSamplerShard(batches, 2, rank))] for rank in range(2)]
        self.assertTrue(torch.equal(torch.cat(one), torch.cat(workers)))
        self.assertTrue(torch.equal(torch.cat(one), torch.cat([b for pair in zip(*ranks, strict=True) for b in pair])))

    def test_corpora_by_weight(self):
        own = collator(64, 0.3, 3.0)
        corpora = [DocumentRows(text_of(longest, 20_000, longest), own.layout, EOS) for longest in (20, 3_000)]
        chunks = WeightedExamples(corpora, [0.25, 0.75])
        batch = own(chunks.__getitems__(range(0, len(chunks), 7)))
        self.assertGreater(int(batch["input_segments"].min()), 0)
        wanted = 0.25 * corpora[0].tokens_length + 0.75 * corpora[1].tokens_length
        self.assertAlmostEqual(chunks.tokens_length, wanted, delta=0.1)


class TokensTest(parameterized.TestCase):
    def test_a_stretch_that_is_held_out_parts_its_document(self):
        """Where the other stretches go on, tokens are neighbours that were none in the text."""
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        size = 15_001
        np.save(folder / "flat.npy", np.arange(size, dtype=np.uint32))
        args = PreTrainingDataArguments(
            train_file=[str(folder / "flat.npy")],
            packing="documents",
            data_cache_dir=str(folder / "cache"),
            validation_split_percentage=30.0,
        )
        self.assertTrue(args.eos_between_documents)
        files = tokenised(args, find_sources(args), ids_tokenizer(size))
        seen = []
        for file in files.values():
            steps = np.diff(file.tokens.astype(np.int64))
            near_eos = (file.tokens[1:] == EOS) | (file.tokens[:-1] == EOS)
            self.assertTrue(((steps == 1) | near_eos).all())
            seen += file.tokens[file.tokens != EOS].tolist()
        self.assertEqual(sorted(seen), list(range(3, size + 3)))
        self.assertGreater(np.count_nonzero(files["validation"].tokens == EOS), 3)

    def test_bytes_of_a_token_leave_out_the_separators(self):
        file = TokenFile(np.array([5, 6, EOS, 7, EOS]), 2, 0, 30)
        self.assertEqual((file.bytes_per_token(), file.bytes_per_token(EOS)), (6.0, 10.0))


class ModelTest(parameterized.TestCase):
    SETTING = (64, 0.3, 3.0)

    def make(self, attention: str, dtype=torch.float32):
        set_seed(0)
        model = create_model(build_config("tiny", 400, SHAPE | {"num_layers": 2, "dropout_rate": 0.0}), attention)
        enable_packing(model)
        return model.to(dtype)

    def batch(self, rows: int = 6):
        own = DocumentSpans(tokenizer(400), *self.SETTING)
        text = text_of(40, 5_000)
        text[text != EOS] = text[text != EOS] % 290 + 3
        return own, own(DocumentRows(text, own.layout, EOS).__getitems__(range(rows)))

    @staticmethod
    def losses(model, batch: dict) -> torch.Tensor:
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")

    @staticmethod
    def alone(batch: dict, row: int):
        """(where in the row's targets, the example as a batch without packing)."""
        for segment in batch["input_segments"][row].unique():
            inputs, targets = (batch[f"{side}_segments"][row] == segment for side in ("input", "target"))
            example = {name: batch[name][row : row + 1, targets] for name in ("labels", "decoder_input_ids")}
            yield targets, example | {"input_ids": batch["input_ids"][row : row + 1, inputs]}

    @parameterized.parameters(
        ("eager", torch.float64, 1e-12), ("sdpa", torch.float64, 1e-12), ("sdpa", torch.float32, 2e-5)
    )
    def test_losses_and_gradients_are_those_of_the_documents_alone(self, attention, dtype, tolerance):
        packed, single = self.make(attention, dtype), self.make(attention, dtype)
        _, batch = self.batch(3)
        nats = self.losses(packed, batch)
        nats.sum().backward()
        for row in range(len(nats)):
            for targets, example in self.alone(batch, row):
                one = self.losses(single, example)
                one.sum().backward()
                torch.testing.assert_close(nats[row, targets], one[0], rtol=tolerance, atol=tolerance)
        for (name, ours), theirs in zip(packed.named_parameters(), single.parameters(), strict=True):
            size = max(theirs.grad.abs().max().item(), 1.0)
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=20 * tolerance * size, msg=name)

    def test_an_evaluation_counts_every_target_once(self):
        own, _ = self.batch(1)
        text = text_of(200, 2_500)
        text[text != EOS] = text[text != EOS] % 290 + 3
        rows = DocumentRows(text, own.layout, EOS)
        trainer = T5Trainer(
            model=self.make("sdpa"),
            args=arguments(Path(self.enterContext(tempfile.TemporaryDirectory())), per_device_eval_batch_size=7),
            train_dataset=rows,
            eval_dataset=rows,
            data_collator=own,
            compute_metrics=functools.partial(language_model_metrics, names=own.names, bytes_per_token=3.0),
        )
        metrics, _ = quietly(trainer.evaluate)
        batch = own(rows.__getitems__(range(len(rows))))
        with torch.no_grad():
            nats = self.losses(trainer.model.eval(), batch)
        self.assertNotEqual(len(rows) % 7, 0)
        self.assertAlmostEqual(metrics["eval_loss"], nats.mean().item(), places=5)
        hidden = int((batch["target_kinds"] == 0).sum())
        bits = nats.sum().item() / np.log(2) / (3.0 * hidden)
        self.assertAlmostEqual(metrics["eval_bits_per_byte"], bits, places=4)


class RunTest(parameterized.TestCase):
    def run_script(self, name: str, *more: str, **changes) -> tuple[dict, str]:
        """(results, what was printed) of a run of six steps in the folder `name`."""
        flags = SMALL_RUN | SMALL_MODEL | dict(vocab_size=300, packing="documents", plan="full", input_seq_length=64)
        flags |= dict(max_steps=6, warmup_steps=0.3, gradient_accumulation_steps=2, logging_steps=2, num_samples=2)
        flags |= dict(eval_steps=6, save_steps=3, save_total_limit=5)
        flags |= dict(output_dir=self.folder / name, data_cache_dir=self.folder / "cache")
        results, code, printed, errors = call(pre_train_t5.main, *argv_of(flags | changes), *more)
        return results or {"code": code}, printed + errors

    def test_a_run_of_corpora_by_weight_and_its_resumption(self):
        corpora = ["--train_file"]
        for name, seed, weight in (("a", 0, 0.8), ("b", 1, 0.2)):
            (self.folder / f"{name}.txt").write_text("\n".join(sentences(250, seed)) + "\n")
            corpora.append(f"{self.folder / name}.txt:{weight}")
        results, printed = self.run_script("whole", *corpora)
        self.assertRegex(
            printed, r"packing +documents do not attend to each other, \d\.\d/\d\.\d per row; \d\.\d+%/\d\.\d+% of"
        )
        self.assertContainsSubset(["eval_loss", "eval_a_loss", "eval_b_bits_per_byte"], results)
        weights = weights_of(self.folder / "whole")
        samples = (self.folder / "whole" / "samples.md").read_text()
        self.assertRegex(samples, r"## Step 6\n\n.*\n.*\n.*\[1\]")
        self.assertNotIn("extra_id", samples)
        (tokens,) = {line.split("of ")[-1] for line in printed.splitlines() if line.strip().startswith("chunks ")}
        self.assertRegex(tokens, r"^\d+ raw tokens -> 64 input, 14 target tokens$")

        shutil.rmtree(self.folder / "whole" / "checkpoint-6")
        again, _ = self.run_script("whole", *corpora, "--resume_from_checkpoint", dataloader_num_workers=2)
        self.assertTrue(torch.equal(weights_of(self.folder / "whole"), weights))
        self.assertEqual(again["eval_loss"], results["eval_loss"])
        refused, errors = self.run_script("whole", *corpora, "--resume_from_checkpoint", packing="chunks")
        self.assertEqual(refused, {"code": 2})
        self.assertRegex(errors, "--packing: documents in its run, chunks now")

    def test_ready_made_ids(self):
        rng = np.random.default_rng(0)
        np.save(self.folder / "rows.npy", rng.integers(0, 50, (400, 37)))
        flags = dict(train_file=self.folder / "rows.npy", vocab_size=50, max_steps=1, save_strategy="no", eval_steps=1)
        results, printed = self.run_script("ids", **flags)
        self.assertContainsSubset(["eval_loss", "eval_nats_per_id"], results)
        self.assertRegex(printed, r"packing +documents do not attend to each other, 2\.\d per row; ")

    @parameterized.parameters(
        (["--objective", "ul2"], "--packing documents"),
        (["--eos_between_documents", "false"], "--eos_between_documents False"),
    )
    def test_refused(self, flags, message):
        with self.assertRaisesRegex(ValueError, message):
            packing = [] if "--packing" in flags else ["--packing", "documents"]
            pre_train_t5.parse_flags(["--config_name", "tiny", *packing, *flags])
