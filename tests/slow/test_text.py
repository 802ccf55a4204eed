"""Tests of foundry/data_t5.py: every kind of text with every objective."""

import contextlib
import json
import random
import string
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from absl.testing import parameterized
from page_examples import page_modules
from transformers import T5Config, T5ForConditionalGeneration

import constants
from features import PACKINGS
from foundry.arguments.text import PreTrainingDataArguments
from foundry.corpora.own_ids import has_ids
from foundry.data_t5 import Text
from foundry.features import Features
from foundry.objectives.objective_types import get_objective, objective_type
from foundry.text_source import found_text

OBJECTIVES: dict[str, dict] = {"spans": {}} | {name: {"packing": name} for name in PACKINGS}
OBJECTIVES |= {"ul2": {"objective": "ul2"}, "prefix": {"objective": "prefix_lm"}}
TEXTS = ("file", "weighted", "ids_json", "ids_npy", "ids_flat", "saved", "weighted_saved", "weighted_ids")
LENGTH, BATCH = 64, 12
IDS = 50


def lines(seed: int, count: int = 400) -> list[str]:
    chooser = random.Random(seed)
    return [
        " ".join("".join(chooser.choices(string.ascii_lowercase, k=5)) for _ in range(chooser.randint(2, 40)))
        for _ in range(count)
    ]


class TestCase(parameterized.TestCase):
    features = Features()

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        generator = np.random.default_rng(0)
        ids = [generator.integers(0, IDS, generator.integers(3, 150)).tolist() for _ in range(300)]
        for name, seed in (("a", 1), ("b", 2)):
            (cls.folder / f"{name}.txt").write_text("\n".join(lines(seed)))
            shift = ids[seed:]
            (cls.folder / f"{name}.jsonl").write_text("".join(json.dumps({"ids": row}) + "\n" for row in shift))
        np.save(cls.folder / "rows.npy", generator.integers(0, IDS, (200, 90)).astype(np.uint8))
        np.save(cls.folder / "flat.npy", generator.integers(0, IDS, 30_000).astype(np.uint16))
        import datasets

        for name, seed in (("one", 1), ("two", 2)):
            rows = datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": lines(seed)}))
            rows.save_to_disk(cls.folder / name)

    def flags(self, kind: str, **others) -> PreTrainingDataArguments:
        a, b, ids_a, ids_b = (str(self.folder / name) for name in ("a.txt", "b.txt", "a.jsonl", "b.jsonl"))
        one, two = self.folder / "one", self.folder / "two"
        source = dict(
            file=dict(train_file=[a]),
            weighted=dict(train_file=[f"{a}:0.7", f"{b}:0.3"]),
            ids_json=dict(train_file=[ids_a], input_ids_column="ids"),
            ids_npy=dict(train_file=[str(self.folder / "rows.npy")]),
            ids_flat=dict(train_file=[str(self.folder / "flat.npy")]),
            saved=dict(dataset_name=str(one)),
            weighted_saved=dict(dataset_name=f"{one}:0.7,{two}:0.3"),
            weighted_ids=dict(train_file=[f"{ids_a}:0.6", f"{ids_b}:0.4"], input_ids_column="ids"),
        )[kind]
        values = dict(input_seq_length=LENGTH, max_eval_samples=8) | source | others
        return PreTrainingDataArguments(
            data_cache_dir=str(self.folder / "cache"), preprocessing_num_workers=1, **values
        )

    def open(self, flags, rank: int = 0, ranks: int = 1, checkpoint: str | None = None):
        """(text, objective, training examples) of a rank."""
        name = None if has_ids(flags) else "letters"
        model_args = SimpleNamespace(tokenizer_name=name, model_name_or_path=None, vocab_size=IDS)
        found = found_text(self.features, flags, model_args, None if has_ids(flags) else self.byte_tokenizer())
        tokenizer = objective_type(flags).new_tokenizer(found.tokenizer, flags)
        config = T5Config(
            vocab_size=len(tokenizer), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
        objective = get_objective(flags, tokenizer, T5ForConditionalGeneration(config))
        args = SimpleNamespace(
            train_batch_size=BATCH // ranks,
            gradient_accumulation_steps=1,
            world_size=ranks,
            process_index=rank,
            seed=3,
            data_seed=None,
            eval_strategy="steps",
            main_process_first=lambda **_: contextlib.nullcontext(),
        )
        text = found.text(objective, args, checkpoint)
        return text, objective, text.train

    _tokenizer = None

    @classmethod
    def byte_tokenizer(cls):
        """A tokenizer of letters, with sentinels at its end."""
        if cls._tokenizer is None:
            from tokenizers import Regex, Tokenizer, models, pre_tokenizers
            from transformers import PreTrainedTokenizerFast

            sentinels = [f"<extra_id_{n}>" for n in range(100)]
            tokens = ["<pad>", "</s>", "<unk>", " ", *string.ascii_lowercase, *reversed(sentinels)]
            backend = Tokenizer(models.WordLevel({t: n for n, t in enumerate(tokens)}, unk_token="<unk>"))
            backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
            cls._tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=backend,
                pad_token="<pad>",
                eos_token="</s>",
                unk_token="<unk>",
                extra_special_tokens=sentinels,
            )
        return cls._tokenizer


class PreviewTest(TestCase):
    @parameterized.parameters(*TEXTS)
    def test_it_has_the_ids_that_the_model_gets(self, kind):
        objective = tuple(OBJECTIVES)[TEXTS.index(kind) % len(OBJECTIVES)]
        text, corrupt, train = self.open(self.flags(kind, **OBJECTIVES[objective]))
        rows = text.report(10).shown(True)
        (example,) = [row for row in rows if len(row) == 2]
        batch = corrupt([train[0]])
        self.assertEqual(list(example[0].ids), batch["input_ids"][0].tolist())
        self.assertEqual(list(example[1].ids), [number for number in batch["labels"][0].tolist() if number >= 0])
        documents = [row[0] for row in rows if len(row) == 1]
        self.assertNotEmpty(documents)
        for file, document in zip(text.files.get("train", []), documents, strict=False):
            np.testing.assert_array_equal(file.tokens[: len(document.ids)], document.ids)
            self.assertEqual(sum(length * count for length, count in file.lengths.items()), len(file.tokens))


class CachedTextTest(TestCase):
    @parameterized.product(kind=TEXTS, objective=tuple(OBJECTIVES))
    def test_every_text_with_every_objective(self, kind, objective):
        text, corrupt, train = self.open(self.flags(kind, **OBJECTIVES[objective]))
        self.assertGreater(len(train), BATCH)
        batch = corrupt(train.__getitems__(np.arange(BATCH)))
        self.assertEqual(batch["input_ids"].shape, (BATCH, LENGTH))
        self.assertEqual(len(text.files["validation"]), 2 if "weighted" in kind else 1)
        for name, row in text.report(10).rows.items():
            says_nothing = ("files", "repeats", "known", "trained before")  # unless there is something to say
            self.assertTrue(row or name in says_nothing, name)

    @parameterized.product(kind=("file", "weighted"), objective=tuple(OBJECTIVES))
    def test_of_much_held_out_text_a_part_is_scored(self, kind, objective):
        with mock.patch.object(Text, "evaluated", 6):
            many = dict(validation_split_percentage=50, max_eval_samples=None)
            text, corrupt, _ = self.open(self.flags(kind, **many, **OBJECTIVES[objective]))
        self.assertRegex(text.report(10).rows["chunks"], r" 6 of \d\d+ validation")
        batch = [text.validation[number] for number in range(len(text.validation))]
        self.assertEqual(corrupt(batch)["input_ids"].shape, (6, LENGTH))

    def test_ready_made_ids_are_held_out_by_number(self):
        text, _, _ = self.open(self.flags("ids_json", validation_split_count=20))
        self.assertEqual(text.documents["validation"], 20)

    @parameterized.parameters(
        (dict(validation_split_percentage=0.01), "raise --validation_split_percentage, give --validation_file"),
        (
            dict(validation_split_count=1, input_seq_length=400),
            "raise --validation_split_count, give --validation_file",
        ),
        (dict(train_file=True), "the text is one document, which cannot be divided: .* or give --validation_file, or"),
        (dict(train_file=True, validation_split_count=1), "_count 1: the text is one document, which cannot be div"),
        (dict(validation_file=True), "tokens: give a longer --validation_file, or"),
    )
    def test_too_little_held_out_text_names_the_flag_that_is_given(self, held_out, message):
        if "validation_file" in held_out:
            (self.folder / "short.txt").write_text("Short.\n")
            held_out = dict(validation_file=[str(self.folder / "short.txt")])
        if "train_file" in held_out:
            (self.folder / "one.txt").write_text(" ".join(lines(1)))
            held_out |= dict(train_file=[str(self.folder / "one.txt")])
        with self.assertRaisesRegex(ValueError, message):
            self.open(self.flags("file", **held_out))

    def test_how_much_is_held_out_is_refused_where_all_text_has_a_validation_split(self):
        import datasets

        splits = {"train": lines(1), "validation": lines(3, 40)}
        rows = {split: datasets.Dataset.from_dict({"text": texts}) for split, texts in splits.items()}
        datasets.DatasetDict(rows).save_to_disk(self.folder / "whole")
        for flag, value in (("validation_split_percentage", 1.0), ("validation_split_count", 10)):
            own, mixed = str(self.folder / "whole"), f"{self.folder / 'whole'}:0.5,{self.folder / 'one'}:0.5"
            with self.assertRaisesRegex(ValueError, f"--{flag} {value}: the text has a validation split of its own"):
                self.open(self.flags("saved", dataset_name=own, **{flag: value}))
            text, _, _ = self.open(self.flags("saved", dataset_name=mixed, **{flag: value}))  # of the other one
            of_own, of_other = (file.documents for file in text.files["validation"])
            self.assertEqual(of_own, 40)
            self.assertBetween(of_other, 1, 10)


class NewObjectiveTest(TestCase):
    """What CONTRIBUTING.md shows: an objective is one entry, or one class in a table of features/__init__.py."""

    def test_a_mixture_is_an_entry(self):
        denoisers = {"half": dict(noise_density=0.5, mean_noise_span_length=5.0)}
        mixture = {"half_and_spans": {"half": 1.0, "span_corruption": 1.0}}
        with mock.patch.dict(constants.DENOISERS, denoisers), mock.patch.dict(constants.OBJECTIVES, mixture):
            text, objective, train = self.open(self.flags("file", objective="half_and_spans"))
        self.assertEqual(objective.names, ["half", "span_corruption"])
        self.assertEqual(objective(train.__getitems__([0, 1]))["labels"].shape, (2, objective.targets_length))

    def test_a_class_in_the_table(self):
        page_modules()
        with mock.patch.dict(PACKINGS, last="features.last.last_tokens:LastTokens"):
            self.check_rows()

    def check_rows(self):
        _, objective, train = self.open(self.flags("weighted", packing="last"))
        self.assertEqual(objective(train.__getitems__(np.arange(BATCH)))["input_ids"].shape, (BATCH, LENGTH))
