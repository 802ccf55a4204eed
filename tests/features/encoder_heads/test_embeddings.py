"""Embeddings: losses beside their formulas, metrics and folder in sentence-transformers, resuming, wrong flags."""

import csv
import importlib.util
import itertools
import json
import random
import shutil
import tempfile
from pathlib import Path
from unittest import mock, skipUnless

import numpy as np
import pyarrow
import torch
import torch.nn.functional as F
from absl.testing import parameterized
from helpers import argv_of, on_two_ranks, run_main, sentences, small_disk, write_tiny_model
from pyarrow import parquet
from safetensors.torch import load_file
from zoo import write_checkpoint

import evaluate_t5
import fine_tune_t5
import predict_t5
from foundry.common.errors import UserError
from foundry.corpora.tokenizers import load_tokenizer, save_tokenizer
from foundry.model_t5 import load_model
from foundry.publishing.sentence_folder import write_modules

THERE = importlib.util.find_spec("sentence_transformers") is not None
HAS_LORA = all(map(importlib.util.find_spec, ("peft", "features.lora")))
NOT_THERE = "sentence-transformers is not installed (requirements/embeddings.txt)"
ROOT = Path(fine_tune_t5.__file__).parent


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def embedder(*args, **kwargs):
    from features.encoder_heads.embedder import Embedder

    return Embedder(*args, **kwargs)


@skipUnless(THERE, NOT_THERE)
class FormulasTest(parameterized.TestCase):
    @parameterized.parameters(((0, 0, 0, 0, 0), 0.05), ((2, 2, 2, 2, 2), 0.5), ((2, 0, 3, 1, 0), 0.05))
    def test_in_batch_negatives(self, counts, temperature):
        """The cross-entropy of the own target's place among the targets and the negatives of all rows; what fills up
        the rows with fewer negatives is none of them."""
        embeddings = drawn(5, 5, 8).double()
        for row, count in enumerate(counts):
            embeddings[row, 2 + count :] = embeddings[0, 1]  # as like another row's source as can be
        candidates = [embeddings[row, 1] for row in range(5)]
        candidates += [embeddings[row, 2 + place] for row in range(5) for place in range(counts[row])]
        nats = []
        for row in range(5):
            alike = [float(F.cosine_similarity(embeddings[row, 0], one, dim=0)) / temperature for one in candidates]
            nats.append(np.log(np.exp(alike).sum()) - alike[row])
        known = torch.arange(3) < torch.tensor(counts)[:, None]
        found = float(embedder(temperature).loss_of(embeddings, None, known))
        self.assertAlmostEqual(found, np.mean(nats), delta=1e-9)

    def test_cosent(self):
        """log(1 + the sum of exp((cos j - cos i) / t)) over all i that are scored higher than j."""
        embeddings, scores = drawn(6, 2, 8), torch.tensor([0.1, 0.9, 0.5, 0.5, 0.0, 1.0])
        cosines = F.cosine_similarity(embeddings[:, 0], embeddings[:, 1]).double() / 0.1
        terms = [cosines[j] - cosines[i] for i in range(6) for j in range(6) if scores[i] > scores[j]]
        wanted = torch.log1p(torch.stack(terms).exp().sum()).float()
        torch.testing.assert_close(embedder(0.1, score="score").loss_of(embeddings, scores), wanted)

    def test_micro_batches_count_by_their_rows(self):
        """A row without labels fills a batch up, and counts nowhere."""
        how, embeddings = embedder(), drawn(7, 2, 8)
        object.__setattr__(how, "embed", lambda _model, inputs, _labels: embeddings[inputs["rows"]])
        labels = torch.ones(7, 3, dtype=torch.long)
        labels[6] = -100
        found = []
        for rows in (torch.arange(2), torch.arange(2, 7), torch.tensor([6])):
            found.append(how.loss_in_forward(None, labels[rows], torch.tensor(6), {"rows": rows}, 0).loss)
        wanted = (2 * how.loss_of(embeddings[:2]) + 4 * how.loss_of(embeddings[2:6])) / 6
        torch.testing.assert_close(found[0] + found[1], wanted)
        self.assertEqual(float(found[2]), 0)

    @parameterized.parameters(0, 1, 3)
    def test_the_model_is_read_equally_often(self, negatives):
        """However many a batch has: processes among which the weights are spread would wait for each other."""
        how, labels, calls = embedder(negative="n"), torch.tensor([[5, 1], [6, 1]]), []

        def embed_texts(_model, ids, _mask):
            calls.append(len(ids))
            return drawn(len(ids), 8).requires_grad_()

        object.__setattr__(how, "embed_texts", embed_texts)
        further = torch.full((2, 2, 3), -100)
        further.view(4, 3)[:negatives, 0] = 7
        inputs = {"input_ids": labels, "attention_mask": labels, "n": further}
        found = how.embed(mock.Mock(config=mock.Mock(pad_token_id=0)), inputs, labels)
        self.assertEqual(calls, [2, 2, max(1, negatives)])
        self.assertEqual(int(found[:, 2:].ne(0).any(-1).sum()), negatives)
        found.sum().backward()


@skipUnless(THERE, NOT_THERE)
class EncodersTest(parameterized.TestCase):
    @parameterized.parameters("t5_v1_0", "t5_v1_1", "mt5", "umt5", "byt5", "longt5_local", "longt5_tglobal", "t5gemma")
    def test_a_family(self, family):
        """The encoder gives what it gives within its model, and what is written embeds in sentence-transformers."""
        from sentence_transformers import SentenceTransformer

        from features.encoder_heads.head_models import load_encoder

        write_checkpoint(self.folder / "whole", family)
        encoder, whole = load_encoder(str(self.folder / "whole")).eval(), load_model(str(self.folder / "whole")).eval()
        batch = {"input_ids": torch.tensor([[5, 6, 7, 8, 1]]), "attention_mask": torch.ones(1, 5, dtype=torch.long)}
        with torch.no_grad():
            wanted = whole.get_encoder()(**batch).last_hidden_state
            torch.testing.assert_close(encoder(**batch).last_hidden_state, wanted)
            encoder.save_pretrained(self.folder / "encoder")
            tokenizer = load_tokenizer(str(self.folder / "whole"))
            save_tokenizer(tokenizer, self.folder / "encoder")
            how = embedder(pooling="first")
            write_modules(self.folder / "encoder", 16, longest=64, pooling="first", prefix="")
            again = load_encoder(str(self.folder / "encoder")).eval()
            batch = tokenizer(["the old tree", "moon"], return_tensors="pt", padding=True)
            wanted = how.embed_texts(again, batch["input_ids"], batch["attention_mask"])
            found = SentenceTransformer(str(self.folder / "encoder"), device="cpu").encode(["the old tree", "moon"])
            torch.testing.assert_close(torch.from_numpy(found), wanted)

    def test_a_family_without(self):
        from features.encoder_heads.head_models import load_encoder

        write_checkpoint(self.folder / "gemma", "t5gemma2")
        with self.assertRaisesRegex(UserError, "--head: transformers has no encoder with a head for T5Gemma 2"):
            load_encoder(str(self.folder / "gemma"))


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@skipUnless(THERE, NOT_THERE)
class ScriptsTest(parameterized.TestCase):
    """pairs.jsonl and dev.jsonl: some words of a sentence, the sentence, another one, and none to three others; also a
    mixture of two sentences with the share of the first."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        lines, draw, rows = sentences(120), random.Random(0), []
        for number, line in enumerate(lines):
            words, equal, other = line.split(), draw.randint(0, 12), draw.choice(lines)
            row = {"id": number, "q": " ".join(draw.sample(words, 6)).lower(), "a": line, "n": draw.choice(lines)}
            row |= {"m": lines[-1 - number % 4 :][1:], "mixed": " ".join(words[:equal] + other.split()[equal:])}
            rows.append(row | {"score": equal / 12})
        cls.rows, cls.dev = rows[:100], rows[100:]
        write_lines(cls.folder / "pairs.jsonl", cls.rows)
        write_lines(cls.folder / "dev.jsonl", cls.dev)
        write_tiny_model(cls.folder / "base", lines, 300)
        cls.made = {}

    def argv(self, output: str, **changes) -> list[str]:
        flags = dict(head="embedding", source_column="q", target_column="a", use_cpu=True, report_to="none")
        flags |= dict(train_file=self.folder / "pairs.jsonl", validation_file=self.folder / "dev.jsonl")
        flags |= dict(model_name_or_path=self.folder / "base", output_dir=self.folder / output, max_steps=4)
        flags |= dict(per_device_train_batch_size=16, data_cache_dir=self.folder / "cache", logging_steps=1)
        return argv_of(flags | changes)

    def fine_tune(self, output: str, code: int | None = None, **changes) -> tuple[dict, str]:
        results, printed, errors = run_main(fine_tune_t5.main, *self.argv(output, **changes), code=code)
        return results, printed + errors

    def trained(self) -> tuple[Path, dict, str]:
        """(folder, results, what was printed) of the run that tests share."""
        changes = dict(negative_column="n", source_prefix="find: ", normalize_embeddings=True)
        if not self.made:
            self.made["pairs"] = self.fine_tune("pairs", **changes)
        return self.folder / "pairs", *self.made["pairs"]

    def predict(self, *flags: object, code: int | None = None) -> str:
        """Embeds by the folder of `trained`; what was printed."""
        folder = self.trained()[0]
        _, out, errors = run_main(predict_t5.main, "--model_name_or_path", folder, "--use_cpu", *flags, code=code)
        return out + errors

    def assert_weights_are_equal(self, one: str, other: str, tolerance: float = 0):
        ours, theirs = (load_file(self.folder / name / "model.safetensors") for name in (one, other))
        self.assertEqual(ours.keys(), theirs.keys())
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=tolerance, msg=name)

    # ------------------------------------------------------------ training, and sentence-transformers' own numbers
    def test_the_folder_embeds_in_sentence_transformers_as_here(self):
        from sentence_transformers import SentenceTransformer

        folder, _, printed = self.trained()
        self.assertIn("the other targets of the 16 rows of a micro-batch are negatives, and their n;", printed)
        model = SentenceTransformer(str(folder), device="cpu")
        rows, array, table = self.folder / "dev.jsonl", self.folder / "dev.npy", self.folder / "dev.parquet"
        self.predict("--input_file", rows, "--output_file", array, "--batch_size", 8)
        np.testing.assert_allclose(np.load(array), model.encode_query([row["q"] for row in self.dev]), atol=1e-6)
        of_answers = ("--source_column", "a", "--source_prefix", "", "--output_file", table)
        self.predict("--input_file", rows, *of_answers)
        written = parquet.read_table(table).to_pylist()
        given = np.array([row.pop("embedding") for row in written])
        self.assertEqual(written, self.dev)
        np.testing.assert_allclose(given, model.encode_document([row["a"] for row in self.dev]), atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(given, axis=1), 1, atol=1e-6)

    def test_all_targets_of_an_evaluation_row_are_right(self):
        """As in sentence-transformers' evaluator with sets of relevant documents, in any order of them, and where two
        rows have one source; the loss is that of the first targets."""
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

        folder, trained, _ = self.trained()
        rows, file = [*self.dev, self.dev[0] | {"a": self.dev[5]["n"]}], self.folder / "targets.jsonl"
        lists = [[rows[-1 - n]["n"], row["a"], *row["m"][: n % 3]][n % 2 :] for n, row in enumerate(rows)]
        files, found = {"dev": self.dev}, {}
        for name, order in (("all", slice(None)), ("turned", slice(None, None, -1)), ("first", slice(1))):
            files[name] = [row | {"a": texts[order]} for row, texts in zip(rows, lists, strict=True)]
        for name, some in files.items():
            flags = ("--model_name_or_path", folder, "--validation_file", write_lines(file, some), "--use_cpu")
            found[name], _, _ = run_main(evaluate_t5.main, *flags, "--overwrite_output_dir")
        relevant = {}
        for row, texts in zip(rows, lists, strict=True):
            relevant.setdefault(row["q"], set()).update(texts)
        corpus = {text: text for texts in lists for text in texts}
        evaluator = InformationRetrievalEvaluator({query: query for query in relevant}, corpus, relevant)
        wanted = evaluator(SentenceTransformer(str(folder), device="cpu"))
        for name in ("mrr", "recall"):
            for order in ("all", "turned"):
                self.assertAlmostEqual(found[order][f"eval_{name}_at_10"], wanted[f"cosine_{name}@10"], delta=1e-9)
        self.assertAlmostEqual(found["all"]["eval_loss"], found["first"]["eval_loss"], delta=1e-6)
        self.assertGreater(found["all"]["eval_mrr_at_10"], found["first"]["eval_mrr_at_10"])
        for name in ("eval_loss", "eval_mrr_at_10", "eval_recall_at_10"):
            self.assertAlmostEqual(found["dev"][name], trained[name], delta=1e-6)

    def test_scored_pairs(self):
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

        flags = dict(score_column="score", target_column="mixed", source_column="a", max_eval_samples=15)
        results, printed = self.fine_tune("scored", pooling="first", **flags)
        self.assertIn("(CoSENT); temperature 0.05; a text is its first token", printed)
        columns = [[row[name] for row in self.dev[:15]] for name in ("a", "mixed", "score")]
        found = EmbeddingSimilarityEvaluator(*columns)(SentenceTransformer(str(self.folder / "scored"), device="cpu"))
        for name in ("spearman", "pearson"):
            self.assertAlmostEqual(results[f"eval_{name}"], float(found[f"{name}_cosine"]), delta=1e-6)

    @skipUnless(HAS_LORA, "peft or features/lora is not there")
    def test_low_rank_matrices_are_learnt(self):
        """sentence-transformers, through peft, puts the folder onto the base; the encoder itself is not in it."""
        from sentence_transformers import SentenceTransformer

        self.fine_tune("adapted", lora_rank=4, learning_rate=0.01)
        folder, texts, array = self.folder / "adapted", self.folder / "texts.txt", self.folder / "texts.npy"
        names = load_file(folder / "adapter_model.safetensors").keys()
        self.assertTrue(all(".lora_" in name for name in names))
        texts.write_text("the old tree\na moon\n")
        flags = ("--model_name_or_path", folder, "--use_cpu", "--input_file", texts, "--output_file", array)
        run_main(predict_t5.main, *flags)
        for model, is_alike in ((folder, True), (self.folder / "base", False)):
            found = SentenceTransformer(str(model), device="cpu").encode(texts.read_text().splitlines())
            self.assertEqual(np.allclose(np.load(array), found, atol=1e-5), is_alike)

    def test_long_texts_are_cut_alike(self):
        """The loss of an evaluation is that of blocks of 16 rows, with all their negatives."""
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.util import cos_sim

        flags = dict(max_source_length=8, max_target_length=8, negative_column="m")
        flags |= dict(per_device_eval_batch_size=1)  # also a batch without negatives
        results, printed = self.fine_tune("cut", **flags)
        self.assertRegex(printed, r"cut .* of the m answers at 8 tokens")
        model, total = SentenceTransformer(str(self.folder / "cut"), device="cpu"), 0
        for part in (self.dev[:16], self.dev[16:]):
            texts = [row["a"] for row in part] + [text for row in part for text in row["m"]]
            cosines = cos_sim(model.encode([row["q"] for row in part]), model.encode(texts))
            total += F.cross_entropy(cosines / 0.05, torch.arange(len(part)), reduction="sum")
        self.assertAlmostEqual(results["eval_loss"], float(total) / 20, delta=1e-5)

    def test_several_negatives(self):
        """Lists of JSON and Parquet, and columns of which some cells are empty, train and score alike."""
        nothing, results = itertools.cycle(["", " ", None, []]), {}
        for kind in ("parquet", "csv", "jsonl"):
            files = {}
            for split, rows in (("train", self.rows), ("validation", self.dev)):
                file = files[f"{split}_file"] = self.folder / f"several_{split}.{kind}"
                if kind == "jsonl":
                    write_lines(file, [row | {"m": row["m"] or next(nothing)} for row in rows])
                elif kind == "parquet":
                    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
                else:
                    lines = [[row["q"], row["a"], *(row["m"] + [""] * 3)[:3]] for row in rows]
                    with file.open("w", newline="") as opened:
                        csv.writer(opened).writerows([["q", "a", "m1", "m2", "m3"], *lines])
            column = "m1,m2,m3" if kind == "csv" else "m"
            results[kind], printed = self.fine_tune(kind, negative_column=column, plan="full", **files)
        for kind in ("parquet", "csv"):
            self.assert_weights_are_equal(kind, "jsonl")
            self.assertEqual(results[kind]["eval_loss"], results["jsonl"]["eval_loss"])
        self.assertRegex(printed, r"lengths .*, 0 to 3 m of a row \(150 in all\) of \d+ to \d+ tokens")
        self.assertRegex(printed, r"empty +25 m answers of train")

    # ------------------------------------------------------------ processes and folders
    @parameterized.parameters(False, True)
    def test_two_processes_end_with_the_weights_of_two_micro_batches(self, with_zero2):
        """Each rank has the negatives of its own micro-batch."""
        changes = dict(max_steps=3, per_device_train_batch_size=8, dropout_rate=0, negative_column="m")
        changes |= dict(eval_strategy="no", save_strategy="no", load_best_model_at_end=False)
        if not (self.folder / "one").exists():
            self.fine_tune("one", gradient_accumulation_steps=2, **changes)
        changes |= dict(deepspeed=ROOT / "zero_stage2_config.json") if with_zero2 else {}
        on_two_ranks(ROOT / "fine_tune_t5.py", *self.argv(f"two_{with_zero2}", **changes))
        self.assert_weights_are_equal(f"two_{with_zero2}", "one", tolerance=1e-6)

    def test_a_resumed_run_ends_with_the_same_bits(self):
        changes = dict(save_strategy="steps", eval_strategy="steps", save_steps=2, eval_steps=2, save_total_limit=5)
        changes |= dict(negative_column="n", dropout_rate=0.1, max_steps=6)
        self.fine_tune("whole", **changes)
        shutil.copytree(self.folder / "whole" / "checkpoint-2", self.folder / "resumed" / "checkpoint-2")
        self.fine_tune("resumed", **changes, resume_from_checkpoint=True)
        self.assert_weights_are_equal("resumed", "whole")

    def test_a_folder_is_trained_again(self):
        """Folders of modules are replaced, and a plain run leaves none of them."""
        self.fine_tune("again", max_steps=1)
        self.fine_tune("again", max_steps=1, overwrite_output_dir=True, normalize_embeddings=True)
        self.assertTrue((self.folder / "again" / "2_Normalize").is_dir())
        plain = dict(head=None, max_steps=1, eval_strategy="no", load_best_model_at_end=False, max_train_samples=20)
        self.fine_tune("again", overwrite_output_dir=True, **plain)
        self.assertFalse((self.folder / "again" / "modules.json").exists())

    # ------------------------------------------------------------ mistakes
    @parameterized.parameters(
        (dict(negative_column="n", score_column="id"), "--negative_column n:"),
        (dict(negative_column="nn"), "no column nn (did you mean n?)"),
        (dict(negative_column="n,nn"), "no column nn (did you mean n?)"),
        (dict(negative_column="q"), "--negative_column q:"),
        (dict(negative_column="labels"), "--negative_column labels:"),
        (dict(head=None, negative_column="n"), "--negative_column n:"),
        (dict(per_device_train_batch_size=1), "--per_device_train_batch_size 1:"),
        (dict(packing=True), "--packing True:"),
        (dict(metrics="bleu"), "--metrics bleu:"),
        (dict(freeze_encoder=True), "--freeze_encoder True:"),
        (dict(preference="dpo", rejected_column="n"), "--head embedding: other flags ask for rejected"),
        (dict(embedding_temperature=0), "--embedding_temperature 0.0:"),
    )
    def test_wrong_flags(self, changes, named):
        _, printed = self.fine_tune("refused", code=2, **changes)
        self.assertIn(named, printed)
        self.assertFalse((self.folder / "refused").exists())

    @parameterized.parameters(
        ("negative", [], {"text": "a"}, "refused.jsonl, row 3: the column x "),
        ("negative", [], ["a", ["b"]], "refused.jsonl, row 3: the column x "),
        ("negative", [], None, "--negative_column x:"),
        ("score", 0.5, "high", "the column x has 'high'"),
        ("score", 0.5, 0.5, "--score_column x:"),
    )
    def test_rows_that_are_refused(self, kind, value, of_third, named):
        """What is no text or number, and a column that says nothing in all its rows."""
        rows = [row | {"x": of_third if number == 2 else value} for number, row in enumerate(self.rows)]
        file = write_lines(self.folder / "refused.jsonl", rows)
        flags = {f"{kind}_column": "x", "train_file": file, "validation_file": file}
        _, printed = self.fine_tune("refused", code=2, **flags)
        self.assertIn(named, printed)

    @parameterized.parameters(
        ([{"x": "a"}, {"x": 1}], "x"),
        ([{"x": 1}, {"x": "a"}], "x"),
        ([{"x": 2**70}], "x"),
        ([{"x": {}}], "x"),
        ([{}, {"x": [{}]}], "x"),
        ([{}, {"embedding": 1}], "embedding"),
    )
    def test_columns_that_parquet_cannot_hold_are_named_before_a_text_is_embedded(self, rows, column):
        from features.encoder_heads.embedding_answers import EmbeddingReader

        file = write_lines(self.folder / "rows.jsonl", [{"q": "a text"} | row for row in rows])
        table = self.folder / "rows.parquet"
        with mock.patch.object(EmbeddingReader, "model", side_effect=AssertionError("the model is loaded")):
            printed = self.predict("--input_file", file, "--output_file", table, code=2)
        self.assertRegex(printed.splitlines()[-1], rf"error: --output_file .*column {column}\b.*\.npy")
        self.assertFalse(table.exists())

    def test_columns_of_a_table(self):
        """A column that only later rows have is kept; a file of texts has one."""
        table, wanted = self.folder / "more.parquet", [{"q": "a", "x": None}, {"q": "b", "x": 1}]
        text = self.folder / "more.txt"
        text.write_text("a\nb\n")
        lines = write_lines(self.folder / "more.jsonl", [{"q": "a"}, wanted[1]])
        for file, rows in ((lines, wanted), (text, [{"source": "a"}, {"source": "b"}])):
            self.predict("--input_file", file, "--output_file", table, "--overwrite_output_file")
            written = parquet.read_table(table).to_pylist()
            self.assertEqual([len(row.pop("embedding")) for row in written], [32, 32])
            self.assertEqual(written, rows)

    @parameterized.parameters("npy", "parquet")
    def test_a_full_disk_is_named_and_keeps_nothing(self, kind):
        from features.encoder_heads.embedding_answers import EmbeddingFile

        file, output, write = self.folder / "many.txt", self.folder / f"many.{kind}", EmbeddingFile.write
        file.write_text("a text\n" * 20)

        def write_to_a_small_disk(embeddings: EmbeddingFile) -> int:
            with small_disk(1000):
                return write(embeddings)

        with mock.patch.object(EmbeddingFile, "write", write_to_a_small_disk):
            printed = self.predict("--input_file", file, "--output_file", output, code=2)
        self.assertRegex(printed.splitlines()[-1], f"error: --output_file .*many.{kind}: no room on the disk")
        self.assertEqual(list(self.folder.glob("*many.*")), [file])

    @parameterized.parameters(
        (["--input_file", "texts", "--output_file", "x.jsonl"], "--output_file .*x.jsonl:"),
        (["--input_file", "texts", "--output_file", "there"], "--output_file .*there.npy: is there"),
        (["--input_file", "texts", "--num_beams", "2"], "--num_beams 2:"),
        (["--interactive"], "--interactive:"),
    )
    def test_predictions_that_are_refused(self, words, named):
        files = {"texts": self.folder / "texts.txt", "there": self.folder / "there.npy"}
        files["texts"].write_text("a text\n")
        files["there"].write_bytes(b"")
        self.assertRegex(self.predict(*(files.get(word, word) for word in words), code=2), named)

    def test_damaged_records(self):
        from features.encoder_heads.embedding_answers import embedder_of

        folder = self.trained()[0]
        record, path = json.loads((folder / "task.json").read_text()), self.folder / "task.json"
        right = record["embedding"]
        path.write_text(json.dumps(record))
        self.assertEqual(embedder_of(str(self.folder)), embedder(**right))
        wrong = [{"pooling": "sum"}, {"temperature": 0}, {"normalize": "yes"}, {"more": 1}]
        for value in (None, [], {}, *(right | changes for changes in wrong)):
            path.write_text(json.dumps(record | {"embedding": value}))
            with self.assertRaisesRegex(UserError, "task.json: its field embedding "):
                embedder_of(str(self.folder))
