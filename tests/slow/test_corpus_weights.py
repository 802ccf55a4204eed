"""Tests of `--train_file a.txt:0.7 b.txt:0.3`: what is drawn from where, in which order, and what is reported.

Hermetic: two made-up corpora and a T5 of a few thousand weights.
"""

import json
import re
import shutil

import datasets
import numpy as np
import torch
from absl.testing import parameterized
from accelerate.data_loader import BatchSamplerShard
from helpers import SMALL_MODEL, SMALL_RUN, argv_of, call, sentences, weights_of
from transformers import ByT5Tokenizer

import pre_train_t5
from foundry.arguments.model import ModelArguments
from foundry.arguments.text import PreTrainingDataArguments
from foundry.common.command_line import parse_arguments
from foundry.corpora.chunks import ChunkDataset, EpochSampler, WeightedExamples, evaluation_shares
from foundry.corpora.files import split_weights
from foundry.corpora.sources import find_corpora
from foundry.data_t5 import FoundText


class TestCase(parameterized.TestCase):
    def write(self, name: str, content: str = "text\n") -> str:
        (self.folder / name).write_text(content)
        return str(self.folder / name)


class ParsingTest(TestCase):
    def test_weights(self):
        a, b = self.write("a.txt"), self.write("b.txt")
        self.assertEqual(split_weights("--train_file", [f"{a}:0.7", f"{b}:3e-1"]), ([a, b], [0.7, 0.3]))
        self.assertEqual(split_weights("--train_file", [a, b]), ([a, b], None))
        self.assertEqual(split_weights("--train_file", [f"{self.folder}/*.txt:2"]), ([f"{self.folder}/*.txt"], [2.0]))

    def test_a_file_with_a_colon_in_its_name(self):
        odd = self.write("a.txt:0.7")
        self.assertEqual(split_weights("--train_file", [odd]), ([odd], None))
        self.assertEqual(split_weights("--train_file", [f"{odd}:0.5"]), ([odd], [0.5]))
        self.assertEqual(split_weights("--train_file", ["C:/corpus.txt"]), (["C:/corpus.txt"], None))

    @parameterized.parameters(
        (("a.txt:0", "b.txt:1"), "--train_file a.txt:0: the weight after the colon must be above 0"),
        (("a.txt:1", "b.txt:-0.5"), "--train_file b.txt:-0.5: the weight after the colon must be above 0"),
        (("a.txt:nan", "b.txt:1"), "--train_file a.txt:nan: the weight after the colon must be above 0"),
        (("a.txt:1", "b.txt:inf"), "--train_file b.txt:inf: the weight after the colon must be above 0"),
        (("a.txt:1", "b.txt"), "--train_file b.txt"),
    )
    def test_weights_that_are_refused(self, texts, message):
        with self.assertRaisesRegex(ValueError, message):
            split_weights("--train_file", list(texts))

    def test_names_and_shares(self):
        paths = [self.write("a.jsonl.gz"), self.write("b-c.txt"), self.write("a.txt")]
        args = PreTrainingDataArguments(train_file=[f"{path}:{w}" for path, w in zip(paths, (1, 2, 1), strict=True)])
        shares = {"a": (paths[0], 0.25), "b_c": (paths[1], 0.5), "a_2": (paths[2], 0.25)}
        found = find_corpora(args)
        self.assertEqual({name: (one.train_file[0], weight) for name, (weight, one) in found.items()}, shares)

    def test_patterns_are_named_after_their_folders(self):
        for name in ("old books", "wiki"):
            (self.folder / name).mkdir()
            self.write(f"{name}/a.txt")
        args = PreTrainingDataArguments(train_file=[f"{self.folder}/{name}/*.txt:1" for name in ("old books", "wiki")])
        self.assertEqual([*find_corpora(args)], ["old_books", "wiki"])

    def test_data_sets_have_weights_too(self):
        args = PreTrainingDataArguments(dataset_name="allenai/c4:3,wiki/pedia:1", dataset_config_name="en,20231101.ro")
        found = {n: (w, one.dataset_name, one.dataset_config_name) for n, (w, one) in find_corpora(args).items()}
        self.assertEqual(found, {"c4": (0.75, "allenai/c4", "en"), "pedia": (0.25, "wiki/pedia", "20231101.ro")})
        args = PreTrainingDataArguments(dataset_name="a/c4:1,a/c4:1,a/c4:1", dataset_config_name="en,de.x,de.x")
        self.assertEqual([*find_corpora(args)], ["c4", "c4_de_x", "c4_2"])
        for names, configs, message in (
            ("a/b,c/d", None, "--dataset_name a/b,c/d: several data sets need weights"),
            ("a/b:1,c/d", None, "c/d: has no weight, and others have"),
            (
                "a/b:1,c/d:1,e/f:1",
                "x,y",
                "--dataset_config_name x,y: give one name, or one for each of the 3 data sets",
            ),
        ):
            with self.assertRaisesRegex(ValueError, message):
                find_corpora(PreTrainingDataArguments(dataset_name=names, dataset_config_name=configs))

    def test_a_mapping_in_a_recipe(self):
        recipe = self.write("recipe.yaml", "train_file:\n  a.txt: 0.7\n  b.txt: 0.3\n")
        (args,) = parse_arguments([PreTrainingDataArguments], [recipe])
        self.assertEqual(args.train_file, ["a.txt:0.7", "b.txt:0.3"])


class WeightedChunksTest(TestCase):
    # Tokens tell the corpus (thousands) and the chunk (the rest).
    SIZES, WEIGHTS = (40, 7, 13), (0.5, 0.3, 0.2)

    def chunks(self, weights=WEIGHTS, seed: int = 5) -> WeightedExamples:
        corpora = [
            ChunkDataset(np.repeat(1_000 * n + np.arange(size), 4), 4) for n, size in enumerate(self.SIZES, start=1)
        ]
        return WeightedExamples(corpora, weights, seed)

    def drawn(self, chunks: WeightedExamples, epoch: int) -> list[int]:
        numbers = np.arange(len(chunks)) + epoch * len(chunks)
        return chunks.__getitems__(numbers)["input_ids"][:, 0].tolist()

    def test_an_epoch_has_the_shares(self):
        chunks = self.chunks()
        self.assertLen(chunks, 60)
        for epoch in range(4):
            corpora = np.array(self.drawn(chunks, epoch)) // 1_000
            self.assertEqual(np.bincount(corpora)[1:].tolist(), [30, 18, 12])
        self.assertEqual(self.chunks((1, 1, 1e-9)).draws.sum(), 60)

    def test_every_chunk_of_a_corpus_comes_before_any_comes_again(self):
        chunks = self.chunks()
        found = [value for epoch in range(8) for value in self.drawn(chunks, epoch)]
        for corpus, size in enumerate(self.SIZES, start=1):
            own = [value % 1_000 for value in found if value // 1_000 == corpus]
            epochs = [own[start : start + size] for start in range(0, len(own) - size + 1, size)]
            self.assertNotEmpty(epochs)
            for one in epochs:
                self.assertEqual(sorted(one), list(range(size)))

    def test_a_part_of_a_walk_is_spread_over_the_corpus(self):
        chunks = WeightedExamples([ChunkDataset(np.arange(9_000), 1), ChunkDataset(np.arange(1_000), 1)], (0.09, 0.91))
        own = chunks.__getitems__(range(int(chunks.draws[0])))["input_ids"][:, 0]
        self.assertLen(np.unique(own), 900)
        self.assertLess(np.diff(np.sort(own)).max(), 4 * 9_000 / 900)

    def test_times_seen(self):
        np.testing.assert_allclose(self.chunks().times_seen(2.0), [60 / 40, 36 / 7, 24 / 13])

    def test_a_number_decides_its_example(self):
        chunks = self.chunks()
        numbers = np.random.default_rng(0).permutation(500)
        together = chunks.__getitems__(numbers)
        self.assertLen(np.unique(together["key"]), 500)
        for place in (0, 77, 499):
            alone = chunks[int(numbers[place])]
            for name, values in together.items():
                np.testing.assert_array_equal(values[place], alone[name])
        self.assertFalse(np.array_equal(self.chunks(seed=6).__getitems__([3])["key"], chunks.__getitems__([3])["key"]))

    def test_two_ranks_share_the_order_of_one(self):
        chunks = self.chunks()
        batches = torch.utils.data.BatchSampler(EpochSampler(len(chunks), 7, 8, count_epochs=True), 4, drop_last=True)
        one = [number for batch in batches for number in batch]
        ranks = [list(BatchSamplerShard(batches, 2, rank)) for rank in range(2)]
        both = [number for pair in zip(*ranks, strict=True) for batch in pair for number in batch]
        self.assertEqual(one, both)
        self.assertLen(set(both), 56)


class EvaluationSharesTest(TestCase):
    @parameterized.parameters(
        ([0.7, 0.3], 10, [7, 3]),
        ([0.5, 0.5], 200, [100, 100]),
        ([0.98, 0.01, 0.01], 10, [8, 1, 1]),
        ([0.5, 0.3, 0.2], 2, [1, 1, 0]),
        ([0.9, 0.1], 1, [1, 0]),
    )
    def test_by_hand(self, weights, total, shares):
        self.assertEqual(evaluation_shares(weights, total), shares)


class RunTest(TestCase):
    def run_script(self, name: str, weights: tuple[float, float], *more: str, **changes) -> tuple[dict, str]:
        """(results, what was printed) of a run of six steps in the folder `name`."""
        flags = SMALL_RUN | SMALL_MODEL | dict(vocab_size=300, objective="ul2", input_seq_length=32)
        flags |= dict(max_steps=6, warmup_steps=0.3, per_device_train_batch_size=8, logging_steps=2)
        flags |= dict(eval_steps=6, save_steps=3, save_total_limit=5)
        flags |= dict(output_dir=self.folder / name, data_cache_dir=self.folder / "cache")
        corpora = [f"{self.folder / path}:{weight}" for path, weight in zip(("a.txt", "b.txt"), weights, strict=True)]
        words = [*argv_of(flags | changes), *more, "--train_file", *corpora]
        results, code, printed, errors = call(pre_train_t5.main, *words)
        return (results, printed) if results else ({"code": code}, errors)

    def test_a_run_its_resumption_and_other_weights(self):
        self.write("a.txt", "\n".join(sentences(300)) + "\n")
        self.write("b.txt", "\n".join(sentences(120, seed=1)) + "\n")
        results, printed = self.run_script("whole", (0.8, 0.2))
        self.assertContainsSubset(["eval_a_loss", "eval_b_loss", "eval_a_bits_per_byte", "eval_loss_ul2_s"], results)
        mean = 0.8 * results["eval_a_loss"] + 0.2 * results["eval_b_loss"]
        self.assertAlmostEqual(results["eval_loss"], mean, places=5)
        self.assertRegex(printed, r"corpora +a 80.0% \(seen 0\.\d+ times\), b 20.0% \(seen 0\.\d+ times\)")
        weights = weights_of(self.folder / "whole")
        cached = sorted((self.folder / "cache").glob("to*"))
        self.assertLen(cached, 3)  # the tokenizer and the tokens of each corpus

        # Stopped after three steps and gone on: the same bits.
        shutil.rmtree(self.folder / "whole" / "checkpoint-6")
        again, _ = self.run_script("whole", (0.8, 0.2), "--resume_from_checkpoint")
        self.assertTrue(torch.equal(weights_of(self.folder / "whole"), weights))
        self.assertEqual(again["eval_loss"], results["eval_loss"])
        refused, errors = self.run_script("whole", (0.7, 0.3), "--resume_from_checkpoint")
        self.assertEqual(refused, {"code": 2})
        self.assertRegex(errors, "the contents of train: .* in its run")

        # Other weights, another objective: nothing is tokenised again.
        changes = dict(
            objective="span_corruption", max_steps=1, eval_strategy="no", save_strategy="no", eval_steps=None
        )
        self.run_script("other", (1, 9), **changes)
        self.assertEqual(sorted((self.folder / "cache").glob("to*")), cached)

    def test_the_fingerprint_of_held_out_text_is_of_every_corpus(self):
        """Where each corpus has a validation split of its own, a change of the second one's changes run.json."""
        tokenizer, found = ByT5Tokenizer(), []
        for name, held_out in (("a", "a"), ("b", "b"), ("c", "other text")):
            splits = {"train": ["some text"], "validation": [held_out]}
            data = datasets.DatasetDict({split: datasets.Dataset.from_dict({"text": t}) for split, t in splits.items()})
            data.save_to_disk(self.folder / name)
        for second in ("b", "b", "c"):
            names = ",".join(f"{self.folder / name}:1" for name in ("a", second))
            args = PreTrainingDataArguments(dataset_name=names, data_cache_dir=str(self.folder / "cache"))
            found.append(FoundText(args, ModelArguments(), tokenizer).fingerprints(tokenizer))
        self.assertEqual(found[0], found[1])
        self.assertNotEqual(found[0]["validation"], found[2]["validation"])

    def test_the_fingerprint_of_a_validation_file_is_its_own(self):
        """It validates all corpora together, so how many there are changes nothing."""
        tokenizer, prints = ByT5Tokenizer(), set()
        texts = [f"{self.write(f'{name}.txt')}:1" for name in "abc"]
        held_out = [self.write("held_out.txt", "held-out text\n")]
        for count in (1, 2, 3):
            cache = str(self.folder / "cache")
            args = PreTrainingDataArguments(train_file=texts[:count], validation_file=held_out, data_cache_dir=cache)
            prints.add(FoundText(args, ModelArguments(), tokenizer).fingerprints(tokenizer)["validation"])
        self.assertLen(prints, 1)

    def test_the_samples_of_an_evaluation_and_the_examples_of_run_json(self):
        """The corpora share --max_eval_samples; run.json counts what the summary does, empty lines not."""
        self.write("a.txt", "\n\n".join(sentences(300)) + "\n")
        self.write("b.txt", "\n\n".join(sentences(200, seed=1)) + "\n")
        for name, weights, more in (("two", (0.8, 0.2), []), ("file", (0.8, 0.2), [str(self.folder / "b.txt")])):
            changes = dict(objective="span_corruption", max_steps=1, save_strategy="no", max_eval_samples=10)
            more = ["--validation_file", *more] if more else []
            _, printed = self.run_script(name, weights, *more, "--plan", "full", **changes | dict(eval_steps=1))
            self.assertRegex(printed, r"chunks +\d+ training, 10 of \d\d+ validation")
        examples = json.loads((self.folder / "two" / "run.json").read_text())["examples"]
        self.assertEqual(sum(examples.values()), 500)
        train = re.search(r"documents +(\d+) \((\d+) empty", printed)
        examples = json.loads((self.folder / "file" / "run.json").read_text())["examples"]
        self.assertEqual(examples["train"], int(train[1]))
