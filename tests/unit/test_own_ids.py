"""Tests of ready-made token ids: files of every kind, the vocabulary around them, and a run that loads again."""

import contextlib
import io
import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import torch
import yaml
from absl.testing import parameterized
from helpers import OVERRIDES, SMALL_RUN, argv_of
from test_data_collator_t5 import make_tokenizer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import pre_train_t5
from data_collator_t5 import T5DataCollator, find_sentinel_ids
from foundry.arguments.text import PreTrainingDataArguments, check_pre_training_data
from foundry.common.flags import check_limits
from foundry.corpora.own_ids import IdDocument, IdEncoder, has_ids, ids_offset, ids_tokenizer, read_ids
from foundry.corpora.sources import find_sources
from foundry.corpora.token_files import tokenised
from foundry.model_t5 import build_config

ROOT = Path(pre_train_t5.__file__).parent
ROWS = [[0, 1, 2], [5, 4, 3, 9], [], [7]]
SQUARE = [[0, 1, 2], [5, 4, 3], [9, 9, 7]]


class TestCase(parameterized.TestCase):
    def path(self, name: str, content) -> Path:
        """A file of the kind that the name's ending says, holding `content`."""
        path = self.folder / name
        if path.suffix == ".npy":
            np.save(path, content)
        elif path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.table({"ids": content}), path, row_group_size=2)
        else:
            path.write_text("".join(json.dumps({"ids": row}) + "\n" for row in content))
        return path

    def arguments(self, *paths, **flags) -> PreTrainingDataArguments:
        names = dict(train_file=[str(path) for path in paths], data_cache_dir=str(self.folder / "cache"))
        return PreTrainingDataArguments(**names | flags)

    def tokens(self, *paths, tokenizer=None, **flags) -> dict:
        args = self.arguments(*paths, **flags)
        check_limits(args)
        check_pre_training_data(args)
        return tokenised(args, find_sources(args), tokenizer or ids_tokenizer(10))


class ReadingTest(TestCase):
    @parameterized.parameters(
        ("rows.parquet", ROWS),
        ("rows.jsonl", ROWS),
        ("square.npy", np.array(SQUARE, np.uint8)),
        ("square.parquet", pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(sum(SQUARE, []), "int16"), 3)),
        ("large.parquet", pyarrow.array(ROWS, pyarrow.large_list(pyarrow.int64()))),
    )
    def test_documents(self, name, content):
        documents = list(read_ids(self.path(name, content), "ids"))
        rows = ROWS if name.startswith(("rows", "large")) else SQUARE
        self.assertEqual([document.ids.tolist() for document in documents], rows)
        self.assertFalse(any(document.goes_on for document in documents))
        self.assertEndsWith(documents[1].where, f"{name}, row 2")

    def test_flat_arrays_are_one_document_in_pieces(self):
        values = np.random.default_rng(0).integers(0, 60_000, 100_001).astype(np.uint16)
        pieces = list(read_ids(self.path("flat.npy", values), None))
        np.testing.assert_array_equal(np.concatenate([piece.ids for piece in pieces]), values)
        self.assertEqual([piece.goes_on for piece in pieces], [True] * (len(pieces) - 1) + [False])
        self.assertEqual([len(piece) for piece in pieces[:3]], [500, 500, 500])


class TokensTest(TestCase):
    @parameterized.parameters(("a.parquet", "ids"), ("a.jsonl", "ids"), ("a.npy", None))
    def test_ids_are_moved_behind_the_special_ones(self, name, column):
        content = ROWS if column else np.array(SQUARE)
        valid = self.path("valid.jsonl" if column else "valid.npy", [[1]] if column else np.array([[1]]))
        flags = dict(input_ids_column=column, validation_file=[str(valid)])
        tokens = self.tokens(self.path(name, content), **flags)
        flat = np.array(sum(ROWS if column else SQUARE, []))
        self.assertEqual(tokens["train"].tokens.tolist(), (flat + 3).tolist())
        self.assertEqual(tokens["validation"].tokens.tolist(), [4])
        counts = tokens["train"].documents, tokens["train"].empty_documents
        self.assertEqual(counts, (3, 1) if column else (3, 0))
        self.assertIsNone(tokens["train"].bytes_per_token())
        with_eos = self.tokens(self.path(name, content), eos_between_documents=True, **flags)["train"].tokens
        self.assertEqual(with_eos.tolist().count(1), 3)

    ENDED = [[5, 6, 1], [7, 8, 9], [2, 1], [4], [1]]  # EOS is 1
    CLOSED = [5, 6, 1, 7, 8, 9, 1, 2, 1, 4, 1, 1]

    @parameterized.parameters("rows.jsonl", "rows.parquet")
    def test_a_row_that_ends_in_eos_gets_no_second(self, name):
        path = self.path(name, self.ENDED)
        flags = dict(input_ids_column="ids", validation_file=[str(path)], packing="documents")
        tokens = self.tokens(path, tokenizer=make_tokenizer(1_000), **flags)
        self.assertEqual(tokens["train"].tokens.tolist(), self.CLOSED)

    @parameterized.parameters(([[5, 6, 1], [7, 8, 1]], [5, 6, 1, 7, 8, 1]), ([5, 6, 1, 7, 8, 1], [5, 6, 1, 7, 8, 1]))
    def test_an_array_that_ends_in_eos_gets_no_second(self, array, closed):
        path = self.path("a.npy", np.array(array))
        flags = dict(validation_file=[str(path)], eos_between_documents=True)
        self.assertEqual(self.tokens(path, tokenizer=make_tokenizer(1_000), **flags)["train"].tokens.tolist(), closed)

    def test_a_flat_array_of_documents_is_held_out_without_a_second_eos(self):
        flat = np.tile([*range(100, 199), 1], 300)  # pieces of 500 ids, which end where documents do
        files = self.tokens(self.path("a.npy", flat), tokenizer=make_tokenizer(1_000), packing="documents")
        for file in files.values():
            self.assertGreater(len(file.tokens), 500)
            np.testing.assert_array_equal(file.tokens, flat[: len(file.tokens)])

    @parameterized.parameters(1, 2, 20)
    def test_held_out_copies_are_counted(self, copies):
        documents = np.random.default_rng(0).integers(0, 10, (400 // copies, 50)).tolist() * copies
        files = self.tokens(self.path("rows.jsonl", documents), input_ids_column="ids", validation_split_percentage=10)
        train, held_out = ([*map(tuple, file.tokens.reshape(-1, 50).tolist())] for file in files.values())
        self.assertEqual(files["validation"].known, sum(row in set(train) for row in held_out))
        self.assertLen({*train, *held_out}, 400 // copies)
        self.assertBetween(files["validation"].documents, 28, 56)

    def test_all_ids_are_in_one_split_or_the_other(self):
        values = np.random.default_rng(0).integers(0, 10, 40_000).astype(np.uint8)
        tokens = self.tokens(self.path("a.npy", values))
        self.assertEqual(len(tokens["train"].tokens) + len(tokens["validation"].tokens), 40_000)
        self.assertBetween(len(tokens["validation"].tokens), 1_000, 3_500)
        self.assertEqual(tokens["train"].documents + tokens["validation"].documents, 1)

    def test_a_saved_data_set(self):
        datasets.Dataset.from_dict({"ids": ROWS * 300}).save_to_disk(self.folder / "saved")
        args = self.arguments(train_file=None, dataset_name=str(self.folder / "saved"), input_ids_column="ids")
        tokens = tokenised(args, find_sources(args), ids_tokenizer(10))
        self.assertEqual(sum(len(file.tokens) for file in tokens.values()), 8 * 300)

    @parameterized.parameters(dict(type="torch"), dict(type="numpy", columns=["n"]))
    def test_a_data_set_that_was_saved_with_a_format(self, **how):
        rows = datasets.Dataset.from_dict({"ids": ROWS * 300, "n": list(range(1_200))})
        rows.with_format(**how).save_to_disk(self.folder / "saved")
        args = self.arguments(train_file=None, dataset_name=str(self.folder / "saved"), input_ids_column="ids")
        tokens = tokenised(args, find_sources(args), ids_tokenizer(10))
        self.assertEqual(sum(len(file.tokens) for file in tokens.values()), 8 * 300)

    def test_weighted_arrays_are_ids(self):
        paths = [self.path(f"{name}.npy", np.array(SQUARE)) for name in "ab"]
        args = self.arguments(f"{paths[0]}:0.7", f"{paths[1]}:0.3")
        check_pre_training_data(args)
        self.assertTrue(has_ids(args))

    def test_ids_of_a_tokenizer_are_not_moved(self):
        tokenizer = make_tokenizer(1_000)
        valid = self.path("valid.npy", np.array([1, 2]))
        path = self.path("a.npy", np.array([[1, 2, 899], [5, 6, 7]]))
        found = self.tokens(path, tokenizer=tokenizer, validation_file=[str(valid)])["train"].tokens
        self.assertEqual(found.tolist(), [1, 2, 899, 5, 6, 7])
        for wrong in (900, 999, 1_000, 0, -1):  # sentinels, beyond, padding
            with self.assertRaisesRegex(ValueError, f"row 1, place 2: the id {wrong} must be an id of the tokenizer's"):
                self.tokens(self.path("b.npy", np.array([[1, wrong]])), tokenizer=tokenizer)


class VocabularyTest(TestCase):
    def test_places_are_those_of_t5(self):
        tokenizer = ids_tokenizer(10)
        self.assertLen(tokenizer, 113)
        self.assertEqual((tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id), (0, 1, 2))
        self.assertEqual(find_sentinel_ids(tokenizer).tolist(), list(range(112, 12, -1)))
        self.assertEqual(tokenizer("0 7 9 <extra_id_0>")["input_ids"], [3, 10, 12, 112, 1])
        self.assertEqual(tokenizer.decode([3, 10, 1], skip_special_tokens=True), "0 7")

    def test_it_is_saved_and_loaded(self):
        ids_tokenizer(10).save_pretrained(self.folder)
        loaded = AutoTokenizer.from_pretrained(self.folder)
        self.assertEqual(ids_offset(loaded), 3)
        self.assertEqual(loaded.get_vocab(), ids_tokenizer(10).get_vocab())
        self.assertEqual(ids_offset(make_tokenizer()), 0)
        words = IdEncoder(loaded)
        self.assertEqual(words(IdDocument(np.array([0, 9]), "x")).tolist(), [3, 12])
        with self.assertRaisesRegex(ValueError, rf"must be 0 to 9 \(the ids that {self.folder} was trained with\)$"):
            words(IdDocument(np.array([10]), "x"))

    @parameterized.parameters("", "▁")
    def test_sentinels_of_t5_and_mt5_are_no_data(self, mark):
        words = IdEncoder(make_tokenizer(500, {0: 499, 1: 498}, mark=mark))
        self.assertEqual(words(IdDocument(np.array([497]), "x")).tolist(), [497])
        with self.assertRaisesRegex(ValueError, "the id 498 must be .* neither its padding nor a sentinel"):
            words(IdDocument(np.array([498]), "x"))

    @parameterized.parameters(
        (np.array([0, 10]), 10), (np.array([3, -1]), -1), (np.array([3, 2**64 - 1], np.uint64), 2**64 - 1)
    )
    def test_out_of_range(self, values, wrong):
        message = f"^x, row 4, place 2: the id {wrong} must be 0 to 9 "
        with self.assertRaisesRegex(ValueError, message):
            IdEncoder(ids_tokenizer(10))(IdDocument(values, "x, row 4"))


class RefusedTest(TestCase):
    @parameterized.parameters(
        ("a.npy", np.array([0.5]), {}, "a.npy: holds float64; ids must be whole"),
        ("a.npy", np.array([[5, 6], [7]], object), {}, "a.npy: holds Python objects.*--input_ids_column"),
        ("a.npy", np.zeros((2, 2, 2), int), {}, r"has the shape \(2, 2, 2\); ids must be a"),
        ("*", ROWS, {}, "--input_ids_column must name the column"),
        ("a.jsonl", ROWS, dict(input_ids_column="tokens"), "row 1: no column tokens; available: ids"),
        ("a.parquet", ROWS, dict(input_ids_column="tokens"), "no column tokens; available: ids"),
        ("a.jsonl", ["1 2"], dict(input_ids_column="ids"), "row 1: the column ids holds no list"),
        ("a.jsonl", [[1], [2.0]], dict(input_ids_column="ids"), "row 2: the column ids holds no list"),
        ("a.jsonl", [[2**70]], dict(input_ids_column="ids"), "row 1: .* a number beyond 64 bits"),
        ("a.parquet", ["1 2"], dict(input_ids_column="ids"), "row 1: the column ids holds no list"),
        ("a.parquet", [[1.5]], dict(input_ids_column="ids"), "row 1: the column ids holds no list"),
        ("a.parquet", [[1], None], dict(input_ids_column="ids"), "row 2: the column ids holds no list"),
        ("a.csv", ROWS, dict(input_ids_column="ids"), "a.csv: ready-made ids come from .npy .parquet"),
        ("a.jsonl", [[1], [4, 10]], dict(input_ids_column="ids"), "row 2, place 2: the id 10 must be 0 to 9"),
    )
    def test_files(self, name, content, flags, message):
        if name == "*":  # a folder of an array and rows
            self.path("a.npy", np.array([1]))
            self.path("b.jsonl", content)
            paths = [self.folder / "a.npy", self.folder / "b.jsonl"]
        else:
            paths = [self.path(name, content)]
        with self.assertRaisesRegex(ValueError, message):
            self.tokens(*paths, **flags)

    def test_flags(self):
        for flags, message in (
            (dict(train_file="{npy}", vocab_size=1), "--vocab_size 1: must be at least 2"),
            (dict(input_ids_column="ids"), "--input_ids_column ids: name the files of ids with --train_file"),
            (dict(input_ids_column="ids", dataset_name="installed_docs"), "with --train_file, or a data set of "),
            (
                dict(train_file="{npy}", vocab_size=9, objective="ul2", config_overrides="vocab_size=113"),
                "the tokenizer has ids up to 114 and the model only 113 embedding rows",
            ),
            (dict(train_file="{npy}", vocab_size=5), "a.npy, after 0 ids, place 10: the id 5 must be 0 to 4"),
        ):
            npy = self.path("a.npy", np.repeat(np.arange(9), 2)[1:])
            flags = {name: npy if value == "{npy}" else value for name, value in flags.items()}
            flags |= dict(output_dir=self.folder / "out", data_cache_dir=self.folder / "cache", report_to="none")
            with contextlib.redirect_stderr(io.StringIO()) as errors, self.assertRaises(SystemExit) as stopped:
                pre_train_t5.main(argv_of(dict(config_name="tiny") | flags))
            self.assertEqual(stopped.exception.code, 2)
            self.assertRegex(errors.getvalue(), message)


class RunTest(TestCase):
    def run_script(self, recipe: Path, **flags) -> dict:
        common = SMALL_RUN | dict(config_overrides=OVERRIDES, max_steps=3, warmup_steps=0.3)
        common |= dict(per_device_train_batch_size=8, gradient_accumulation_steps=None)  # that of the recipe
        common |= dict(eval_steps=3, save_steps=3, max_eval_samples=16, data_cache_dir=self.folder / "cache")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            results = pre_train_t5.main([str(recipe), *argv_of(common | flags)])
        self.assertIn("next ", printed.getvalue())
        self.assertNotIn("fine_tune_t5.py", printed.getvalue())  # whose built-in task is text
        return results

    def test_the_recipe(self):
        """A few steps of a tiny model on data of the same layout, and its real model on the meta device."""
        path = ROOT / "recipes" / "pre_train_own_ids.yaml"
        _, _, code = path.read_text().partition("python - <<'END'\n")
        code = code.partition("#   END\n")[0].replace("#   ", "").replace("out/series.npy", f"{self.folder}/series.npy")
        exec(code, {})
        series = np.load(self.folder / "series.npy")
        self.assertEqual((series.shape, series.min(), series.max()), ((2_000, 512), 0, 63))
        np.testing.assert_allclose(np.bincount(series.ravel()), 16_000, rtol=0.01)  # all levels are equally frequent
        np.save(self.folder / "series.npy", series[:40])
        recipe = yaml.safe_load(path.read_text())
        results = self.run_script(path, train_file=self.folder / "series.npy", output_dir=self.folder / "out")
        self.assertIn("eval_nats_per_id", results)
        self.assertNotIn("eval_bits_per_byte", results)

        with torch.device("meta"):
            config = build_config(recipe["config_name"], len(ids_tokenizer(recipe["vocab_size"])))
            model = AutoModelForSeq2SeqLM.from_config(config)
        self.assertEqual((config.vocab_size, model.shared.weight.shape), (192, (192, 128)))

        # The saved run loads, says how ids are moved, and goes on from itself and its own tokenizer.
        model = AutoModelForSeq2SeqLM.from_pretrained(self.folder / "out")
        tokenizer = AutoTokenizer.from_pretrained(self.folder / "out")
        self.assertEqual((model.config.input_ids_offset, ids_offset(tokenizer)), (3, 3))
        self.assertEqual(model.config.sentinel_ids, find_sentinel_ids(tokenizer).tolist())
        T5DataCollator(tokenizer, 64)
        flags = dict(config_name=None, config_overrides=None, model_name_or_path=self.folder / "out", max_steps=1)
        own = yaml.safe_dump({n: v for n, v in recipe.items() if n not in ("config_name", "vocab_size")})
        (self.folder / "again.yaml").write_text(own)
        again = self.run_script(
            self.folder / "again.yaml",
            train_file=self.folder / "series.npy",
            output_dir=self.folder / "again",
            eval_steps=1,
            **flags,
        )
        self.assertLess(abs(again["eval_nats_per_id"] - results["eval_nats_per_id"]), 1.0)
