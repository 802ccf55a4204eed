"""Embeddings: losses and metrics beside their formulas, the folder in sentence-transformers, resuming, wrong flags."""

import csv
import importlib.util
import json
import os
import random
import signal
import subprocess
import tempfile
import time
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
from scipy.stats import pearsonr, spearmanr
from warm_python import warm_python
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
        the rows with fewer negatives is none of them. With as many in each row: sentence-transformers' own loss."""
        from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

        embeddings, most = drawn(5, 5, 8).double(), max(counts)
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
        if min(counts) == most:
            loss = MultipleNegativesRankingLoss(None, scale=1 / temperature)
            columns = list(embeddings[:, : 2 + most].unbind(1))
            self.assertAlmostEqual(found, float(loss.compute_loss_from_embeddings(columns, None)), delta=1e-9)

    def test_lists_of_answers_are_padded(self):
        """Each of [B, K, R]; rows without any have none, also where no row of a batch has one."""
        from foundry.training.batching import FurtherColumns

        collate = FurtherColumns(lambda rows: {"kept": [sorted(row) for row in rows]})
        rows = [{"labels": [1], "n": [[5, 1], [6, 7, 1]]}, {"labels": [1], "n": []}]
        batch = collate(rows)
        self.assertEqual(batch["kept"], [["labels"], ["labels"]])
        wanted = torch.full((2, 2, 8), -100)
        wanted[0, 0, :2], wanted[0, 1, :3] = torch.tensor([5, 1]), torch.tensor([6, 7, 1])
        torch.testing.assert_close(batch["n"], wanted)
        self.assertEqual(collate(rows[1:])["n"].shape[:2], (1, 0))

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

    def test_cosent(self):
        """log(1 + the sum of exp((cos j - cos i) / t)) over all i that are scored higher than j."""
        embeddings, scores = drawn(6, 2, 8), torch.tensor([0.1, 0.9, 0.5, 0.5, 0.0, 1.0])
        cosines = F.cosine_similarity(embeddings[:, 0], embeddings[:, 1]).double() / 0.1
        terms = [cosines[j] - cosines[i] for i in range(6) for j in range(6) if scores[i] > scores[j]]
        wanted = torch.log1p(torch.stack(terms).exp().sum()).float()
        found = embedder(0.1, score="score").loss_of(embeddings, scores)
        torch.testing.assert_close(found, wanted)

    def test_micro_batches_count_by_their_rows(self):
        """A row without labels fills a batch up, and counts nowhere."""
        how = embedder()
        embeddings = drawn(6, 2, 8)
        how_embeds = torch.cat([embeddings, torch.full((1, 2, 8), 7.0)])
        object.__setattr__(how, "embed", lambda _model, inputs, _labels: how_embeds[inputs["rows"]])
        labels = torch.ones(7, 3, dtype=torch.long)
        labels[6] = -100
        parts = [torch.arange(2), torch.arange(2, 7)]
        found = [how.loss_in_forward(None, labels[p], torch.tensor(6), {"rows": p}, 0).loss for p in parts]
        wanted = (2 * how.loss_of(embeddings[:2], None) + 4 * how.loss_of(embeddings[2:], None)) / 6
        torch.testing.assert_close(sum(found), wanted)
        alone = how.loss_in_forward(None, labels[6:], torch.tensor(6), {"rows": torch.tensor([6])}, 0).loss
        self.assertEqual(float(alone), 0)

    def test_places_of_targets(self):
        """Equal sources have the targets of all their rows, and a target stands once among those that are found."""
        from features.encoder_heads.embedder import ranked

        sources = [f"s{n % 30}" for n in range(40)]
        targets = [f"t{n % 35}" for n in range(40)]
        known = {text: drawn(8, seed=n) for n, text in enumerate(dict.fromkeys([*sources, *targets]))}
        places, found = [], []
        for source in dict.fromkeys(sources):
            own = {target for one, target in zip(sources, targets, strict=True) if one == source}
            likeness = {t: float(F.cosine_similarity(known[source], known[t], dim=0)) for t in dict.fromkeys(targets)}
            best = sorted(likeness, key=likeness.get, reverse=True)[:10]
            places.append(next((1 / place for place, target in enumerate(best, 1) if target in own), 0))
            found.append(len(own & set(best)) / len(own))
        got = ranked(known, sources, targets)
        self.assertAlmostEqual(got["mrr_at_10"], np.mean(places), delta=1e-9)
        self.assertAlmostEqual(got["recall_at_10"], np.mean(found), delta=1e-9)

    def test_correlations(self):
        from features.encoder_heads.embedder import correlated

        sources, targets, scores = [*"abcdef"], [*"uvwxyz"], [0.0, 0.2, 0.2, 0.5, 0.7, 1.0]
        known = {text: drawn(8, seed=n) for n, text in enumerate(sources + targets)}
        cosines = [float(F.cosine_similarity(known[s], known[t], dim=0)) for s, t in zip(sources, targets, strict=True)]
        found = correlated(known, sources, targets, scores)
        self.assertAlmostEqual(found["spearman"], spearmanr(scores, cosines)[0], delta=1e-6)
        self.assertAlmostEqual(found["pearson"], pearsonr(scores, cosines)[0], delta=1e-6)


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


def rows_of(name: str, test: "ScriptsTest") -> list[str]:
    return (test.folder / f"{name}.jsonl").read_text().splitlines()


def write_negatives(path: Path, rows: list[dict]) -> None:
    """The rows with their lists "m", of which a .csv has three columns."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["q", "a", "negative_1", "negative_2", "negative_3"])
            for row in rows:
                writer.writerow([row["q"], row["a"], *row["m"], *[""] * (3 - len(row["m"]))])


@skipUnless(THERE, NOT_THERE)
class ScriptsTest(parameterized.TestCase):
    """pairs.jsonl: some words of a sentence, the sentence, another one, and none to three others; scored.csv: two
    sentences with equal words."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        lines, draw = sentences(120), random.Random(0)
        pairs, scored = [], []
        for line in lines:
            words = line.lower().rstrip(".").split()
            pairs.append({"id": len(pairs), "q": " ".join(draw.sample(words, 6)), "a": line, "n": draw.choice(lines)})
            pairs[-1]["m"] = lines[-1 - len(pairs) % 4 :][1:]
            equal, other = draw.randint(0, 12), draw.choice(lines).split()
            scored.append({"one": line, "other": " ".join(line.split()[:equal] + other[equal:]), "score": equal / 12})
        for name, part in (("pairs", slice(100)), ("dev", slice(100, None))):
            text = "".join(json.dumps(row) + "\n" for row in pairs[part])
            (cls.folder / f"{name}.jsonl").write_text(text)
            with (cls.folder / f"{name}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, ["one", "other", "score"])
                writer.writeheader()
                writer.writerows(scored[part])
        write_tiny_model(cls.folder / "base", lines, 300)

    def argv(self, output: str, kind: str = "pairs", **changes) -> list[str]:
        source, target, suffix = ("q", "a", "jsonl") if kind == "pairs" else ("one", "other", "csv")
        flags = dict(head="embedding", source_column=source, target_column=target, use_cpu=True, report_to="none")
        flags |= {"score_column": "score"} if kind == "scored" else {}
        flags |= dict(train_file=self.folder / f"pairs.{suffix}", validation_file=self.folder / f"dev.{suffix}")
        flags |= dict(model_name_or_path=self.folder / "base", output_dir=self.folder / output, max_steps=4)
        flags |= dict(per_device_train_batch_size=16, data_cache_dir=self.folder / "cache", logging_steps=1)
        return argv_of(flags | changes)

    def fine_tune(self, *argv, code=None, **changes) -> tuple[dict, str]:
        results, printed, errors = run_main(fine_tune_t5.main, *self.argv(*argv, **changes), code=code)
        return results, printed + errors

    def test_pairs_with_negatives(self):
        """The folder embeds and scores in sentence-transformers as here; a plain run in its place leaves none of its
        files."""
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

        changes = dict(negative_column="n", source_prefix="find: ", normalize_embeddings=True)
        results, printed = self.fine_tune("pairs", **changes)
        self.assertIn("(t5, d_model 32, 1 layers), dropout", printed)
        self.assertIn("the other targets of the 16 rows of a micro-batch are negatives, and their n;", printed)
        self.assertIn("mrr_at_10, recall_at_10 of cosines; largest mrr_at_10 is best", printed)
        folder = self.folder / "pairs"
        model = SentenceTransformer(str(folder), device="cpu")
        rows = [json.loads(line) for line in (self.folder / "dev.jsonl").read_text().splitlines()]
        queries, corpus = ({str(row["id"]): row[side] for row in rows} for side in ("q", "a"))
        found = InformationRetrievalEvaluator(queries, corpus, {one: {one} for one in queries})(model)
        for name in ("mrr", "recall"):
            self.assertAlmostEqual(results[f"eval_{name}_at_10"], found[f"cosine_{name}@10"], delta=1e-9)

        again, _, _ = run_main(evaluate_t5.main, "--model_name_or_path", folder, "--use_cpu")
        for name in ("eval_loss", "eval_mrr_at_10", "eval_recall_at_10"):
            self.assertAlmostEqual(again[name], results[name], delta=1e-6)

        predict = ("--model_name_or_path", folder, "--use_cpu", "--batch_size", 8, "--input_file")
        rows_file, array = self.folder / "dev.jsonl", self.folder / "dev.npy"
        run_main(predict_t5.main, *predict, rows_file, "--output_file", array)
        np.testing.assert_allclose(np.load(array), model.encode_query([*queries.values()]), atol=1e-6)
        table = self.folder / "dev.parquet"
        of_answers = ("--source_column", "a", "--source_prefix", "", "--output_file", table)
        run_main(predict_t5.main, *predict, rows_file, *of_answers)
        written = parquet.read_table(table).to_pylist()
        self.assertEqual([row["id"] for row in written], [row["id"] for row in rows])
        given = np.array([row["embedding"] for row in written])
        np.testing.assert_allclose(given, model.encode_document([*corpus.values()]), atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(given, axis=1), 1, atol=1e-6)

        self.fine_tune("pairs", overwrite_output_dir=True, max_steps=2, **changes)  # folders of modules are replaced
        plain = dict(head=None, max_steps=1, eval_strategy="no", load_best_model_at_end=False, max_train_samples=20)
        self.fine_tune("pairs", overwrite_output_dir=True, **plain)
        self.assertFalse((folder / "modules.json").exists())

    def test_all_targets_of_an_evaluation_row_are_right(self):
        """As in sentence-transformers' evaluator with sets of relevant documents, in any order of them; the loss is
        that of the first."""
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

        rows, found = [json.loads(line) for line in rows_of("dev", self)], {}
        lists = [[rows[-1 - n]["n"], row["a"], *row["m"][: n % 3]][n % 2 :] for n, row in enumerate(rows)]
        self.fine_tune("targets", max_steps=1, negative_column="m")
        folder, file = self.folder / "targets", self.folder / "targets.jsonl"
        flags = ("--model_name_or_path", folder, "--validation_file", file, "--use_cpu", "--overwrite_output_dir")
        for name, order in (("all", slice(None)), ("turned", slice(None, None, -1)), ("first", slice(1))):
            changed = [row | {"a": targets[order]} for row, targets in zip(rows, lists, strict=True)]
            file.write_text("".join(json.dumps(row) + "\n" for row in changed))
            found[name], _, _ = run_main(evaluate_t5.main, *flags)
        corpus = {text: text for targets in lists for text in targets}
        relevant = {row["q"]: {*targets} for row, targets in zip(rows, lists, strict=True)}
        evaluator = InformationRetrievalEvaluator({query: query for query in relevant}, corpus, relevant)
        wanted = evaluator(SentenceTransformer(str(folder), device="cpu"))
        for name in ("mrr", "recall"):
            for order in ("all", "turned"):
                self.assertAlmostEqual(found[order][f"eval_{name}_at_10"], wanted[f"cosine_{name}@10"], delta=1e-9)
        self.assertAlmostEqual(found["all"]["eval_loss"], found["first"]["eval_loss"], delta=1e-6)
        self.assertGreater(found["all"]["eval_mrr_at_10"], found["first"]["eval_mrr_at_10"])

    def test_scored_pairs(self):
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

        results, printed = self.fine_tune("scored", "scored", pooling="first", max_eval_samples=15)
        self.assertIn("(CoSENT); temperature 0.05; a text is its first token", printed)
        with (self.folder / "dev.csv").open() as file:
            rows = list(csv.DictReader(file))[:15]
        texts = [row["one"] for row in rows], [row["other"] for row in rows], [float(row["score"]) for row in rows]
        model = SentenceTransformer(str(self.folder / "scored"), device="cpu")
        found = EmbeddingSimilarityEvaluator(*texts)(model)
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
        for model, is_alike in ((folder, True), (self.folder / "base", False)):
            predict = ("--model_name_or_path", folder, "--use_cpu", "--input_file", texts, "--output_file", array)
            run_main(predict_t5.main, *predict, "--overwrite_output_file")
            found = SentenceTransformer(str(model), device="cpu").encode(texts.read_text().splitlines())
            self.assertEqual(np.allclose(np.load(array), found, atol=1e-5), is_alike)

    def test_long_texts_are_cut_alike(self):
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.util import cos_sim

        results, printed = self.fine_tune("cut", max_source_length=8, max_target_length=8, negative_column="m")
        self.assertRegex(printed, r"cut .* of the m answers at 8 tokens")
        model = SentenceTransformer(str(self.folder / "cut"), device="cpu")
        rows = [json.loads(line) for line in (self.folder / "dev.jsonl").read_text().splitlines()]
        total = 0
        for part in (rows[:16], rows[16:]):
            texts = [row["a"] for row in part] + [text for row in part for text in row["m"]]
            cosines = cos_sim(model.encode([row["q"] for row in part]), model.encode(texts))
            total += F.cross_entropy(cosines / 0.05, torch.arange(len(part)), reduction="sum")
        self.assertAlmostEqual(results["eval_loss"], float(total) / 20, delta=1e-5)

    def test_several_negatives(self):
        """Lists of JSON and Parquet, and columns of which some cells are empty, train and score alike: as
        sentence-transformers where rows have as many, and as computed from its embeddings where they have not."""
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

        rows = [json.loads(line) for line in rows_of("pairs", self)]
        dev = [json.loads(line) for line in rows_of("dev", self)]
        dev = [row | {"m": [rows[n]["a"], rows[n + 1]["a"]]} for n, row in enumerate(dev)]
        results, printed = {}, {}
        for kind in ("jsonl", "parquet", "csv"):
            files = {}
            for name, some in (("train", rows), ("validation", dev)):
                files[f"{name}_file"] = self.folder / f"several_{name}.{kind}"
                write_negatives(files[f"{name}_file"], some)
            column = "negative_1,negative_2,negative_3" if kind == "csv" else "m"
            results[kind], printed[kind] = self.fine_tune(kind, negative_column=column, plan="full", **files)
        weights = [load_file(self.folder / kind / "model.safetensors") for kind in results]
        for name, tensor in weights[0].items():
            self.assertTrue(torch.equal(tensor, weights[1][name]) and torch.equal(tensor, weights[2][name]), name)
        self.assertRegex(printed["jsonl"], r"lengths .*, 0 to 3 m of a row \(150 in all\) of \d+ to \d+ tokens")
        self.assertRegex(printed["jsonl"], r"empty +25 m answers of train")

        model = SentenceTransformer(str(self.folder / "parquet"), device="cpu")
        columns = [[row[side] for row in dev] for side in ("q", "a")] + [[row["m"][n] for row in dev] for n in (0, 1)]
        total = 0
        for part in (slice(16), slice(16, 20)):
            features = [model.preprocess(texts[part]) for texts in columns]
            with torch.no_grad():
                total += MultipleNegativesRankingLoss(model)(features, None) * len(columns[0][part])
        for kind in results:
            self.assertAlmostEqual(results[kind]["eval_loss"], float(total) / 20, delta=1e-6)
        again, _, _ = run_main(evaluate_t5.main, "--model_name_or_path", self.folder / "csv", "--use_cpu")
        self.assertAlmostEqual(again["eval_loss"], results["csv"]["eval_loss"], delta=1e-6)

    def trained(self, output: str, **changes) -> None:
        """Fine-tunes into a folder that tests share."""
        if not (self.folder / output).exists():
            self.fine_tune(output, **changes)

    @parameterized.parameters(False, True)
    def test_two_processes_end_with_the_weights_of_two_micro_batches(self, with_zero2):
        """Each rank has the negatives of its own micro-batch."""
        changes = dict(
            max_steps=3, per_device_train_batch_size=8, dropout_rate=0, eval_strategy="no", save_strategy="no"
        )
        changes |= dict(negative_column="m", load_best_model_at_end=False)
        output = {name: f"{name}_{with_zero2}" for name in ("one", "two")}
        self.fine_tune(output["one"], gradient_accumulation_steps=2, **changes)
        changes |= dict(deepspeed=ROOT / "zero_stage2_config.json") if with_zero2 else {}
        on_two_ranks(ROOT / "fine_tune_t5.py", *self.argv(output["two"], **changes))
        one, two = (load_file(self.folder / name / "model.safetensors") for name in output.values())
        for name, tensor in one.items():
            torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-6, msg=name)

    def test_a_killed_run_ends_with_the_same_bits(self):
        changes = dict(max_steps=60, save_strategy="steps", eval_strategy="steps", save_steps=5, eval_steps=5)
        changes |= dict(negative_column="n", dropout_rate=0.1, save_total_limit=50)
        self.fine_tune("whole", **changes)
        output = self.folder / "killed"
        words = [warm_python(), ROOT / "fine_tune_t5.py", *self.argv("killed", **changes)]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not (output / "checkpoint-5").exists():
            self.assertIsNone(process.poll())
            time.sleep(0.01)
        os.kill(json.loads((output / ".lock").read_text())["pid"], signal.SIGKILL)
        process.wait()
        self.assertFalse((output / "all_results.json").exists())
        self.fine_tune("killed", **changes, resume_from_checkpoint=True)
        ours, theirs = (load_file(self.folder / name / "model.safetensors") for name in ("killed", "whole"))
        self.assertEqual(ours.keys(), theirs.keys())
        for name, tensor in theirs.items():
            self.assertTrue(torch.equal(ours[name], tensor), name)

    @parameterized.parameters(
        (dict(negative_column="n", score_column="id"), "--negative_column n: scored pairs have none: leave out one of"),
        (dict(negative_column="nn"), "no column nn (did you mean n?), which task pairs needs; available: id, q, a, n"),
        (dict(negative_column="n,nn"), "no column nn (did you mean n?), which task pairs needs; available: id, q, a"),
        (dict(negative_column="q"), "--negative_column q: is a column of sources or targets already"),
        (dict(head=None, negative_column="n"), "--negative_column n: is for embeddings: needs --head embedding"),
        (dict(per_device_train_batch_size=1), "--per_device_train_batch_size 1: --head embedding compares the pairs"),
        (dict(packing=True), "--packing True: not with --head, whose rows are padded"),
        (dict(metrics="bleu"), "--metrics bleu: not with --head embedding"),
        (dict(freeze_encoder=True), "--freeze_encoder True: --head embedding trains the encoder"),
        (dict(preference="dpo", rejected_column="n"), "--head embedding: other flags ask for rejected"),
        (dict(embedding_temperature=0), "--embedding_temperature 0.0: must be above 0"),
    )
    def test_wrong_flags(self, changes, message):
        _, printed = self.fine_tune("refused", code=2, **changes)
        self.assertIn(message, printed)
        self.assertFalse((self.folder / "refused").exists())

    def test_scores_that_are_none(self):
        for name, value, message in (("same", 0.5, "has the same value in all train rows"), ("text", "high", "'high'")):
            file = self.folder / f"{name}.csv"
            file.write_text("one,other,score\n" + "".join(f"a b {n},a c {n},{value}\n" for n in range(20)))
            _, printed = self.fine_tune("refused", "scored", code=2, train_file=file)
            self.assertIn(message, printed)

    def test_negatives_that_are_none_or_no_texts(self):
        rows = [json.loads(line) for line in rows_of("pairs", self)]
        file = self.folder / "negatives.jsonl"
        for values, message in (
            ({2: {"text": "a"}}, "negatives.jsonl, row 3: the column n holds no text, but a value of type dict"),
            ({2: ["a", ["b"]]}, "negatives.jsonl, row 3: the column n holds no text, but a value of type list"),
            (dict.fromkeys(range(100)), "--negative_column n: no training row has a negative. Leave it out"),
        ):
            changed = [row | {"n": values.get(number, row["n"])} for number, row in enumerate(rows)]
            file.write_text("".join(json.dumps(row) + "\n" for row in changed))
            _, printed = self.fine_tune("refused", code=2, train_file=file, negative_column="n")
            self.assertIn(message, printed)
        nothing = ["", " ", None, []]
        changed = [row | {"n": nothing[number] if number < 4 else row["n"]} for number, row in enumerate(rows)]
        file.write_text("".join(json.dumps(row) + "\n" for row in changed))
        _, printed = self.fine_tune("empty", train_file=file, negative_column="n", max_steps=1, plan="full")
        self.assertRegex(printed, r"empty +4 n answers of")
        self.assertRegex(printed, r"0 to 1 n of a row \(96 in all\)")

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

        self.trained("short", max_steps=1)
        file, table = self.folder / "rows.jsonl", self.folder / "rows.parquet"
        file.write_text("".join(json.dumps({"q": "a text"} | row) + "\n" for row in rows))
        flags = ("--model_name_or_path", self.folder / "short", "--use_cpu", "--input_file", file)
        with mock.patch.object(EmbeddingReader, "model", side_effect=AssertionError("the model is loaded")):
            _, _, errors = run_main(predict_t5.main, *flags, "--output_file", table, code=2)
        self.assertRegex(errors.splitlines()[-1], f"error: --(in|out)put_file .*column {column}\\b.*\\.npy")
        self.assertFalse(table.exists())

    def test_columns_of_a_table(self):
        """A column that only later rows have is kept; a file of texts has one."""
        self.trained("short", max_steps=1)
        flags, table = ("--model_name_or_path", self.folder / "short", "--use_cpu"), self.folder / "more.parquet"
        for name, text, wanted in (
            ("more.jsonl", '{"q": "a"}\n{"q": "b", "x": 1}\n', [{"q": "a", "x": None}, {"q": "b", "x": 1}]),
            ("more.txt", "a\nb\n", [{"source": "a"}, {"source": "b"}]),
        ):
            (self.folder / name).write_text(text)
            run_main(predict_t5.main, *flags, "--input_file", self.folder / name, "--output_file", table)
            rows = parquet.read_table(table).to_pylist()
            self.assertEqual([len(row.pop("embedding")) for row in rows], [32, 32])
            self.assertEqual(rows, wanted)
            table.unlink()

    @parameterized.parameters("npy", "parquet")
    def test_a_full_disk_is_named_and_keeps_nothing(self, kind):
        from features.encoder_heads.embedding_answers import EmbeddingFile

        self.trained("short", max_steps=1)
        file, output, write = self.folder / "many.txt", self.folder / f"many.{kind}", EmbeddingFile.write
        file.write_text("a text\n" * 20)

        def write_to_a_small_disk(embeddings: EmbeddingFile) -> int:
            with small_disk(1000):
                return write(embeddings)

        flags = ("--model_name_or_path", self.folder / "short", "--use_cpu", "--input_file", file)
        with mock.patch.object(EmbeddingFile, "write", write_to_a_small_disk):
            _, _, errors = run_main(predict_t5.main, *flags, "--output_file", output, code=2)
        self.assertRegex(errors.splitlines()[-1], f"error: --output_file .*many.{kind}: no room on the disk")
        self.assertEqual(list(self.folder.glob("*many.*")), [file])

    def test_predictions_that_are_refused(self):
        self.fine_tune("refusing", max_steps=1)
        file, there = self.folder / "texts.txt", self.folder / "there.npy"
        file.write_text("a text\n")
        there.write_bytes(b"")
        for words, message in (
            (
                ("--output_file", self.folder / "x.jsonl"),
                "x.jsonl: embeddings are written as .npy .an array. or .parquet",
            ),
            (("--output_file", there), "there.npy: is there. Name another one, or give --overwrite_output_file"),
            (("--num_beams", "2"), "--num_beams 2: a head writes no text"),
            (("--interactive",), "--interactive: the model .*refusing writes no text: give --input_file"),
            (("--interactive", "--input_file", file), "--input_file .*: is for the inputs of a file"),
        ):
            of_file = ("--input_file", file) if "--interactive" not in words else ()
            flags = ("--model_name_or_path", self.folder / "refusing", "--use_cpu", *of_file, *words)
            _, printed, errors = run_main(predict_t5.main, *flags, code=2)
            self.assertRegex(printed + errors, message)
        record = json.loads((self.folder / "refusing" / "task.json").read_text())
        of_embedding = record["embedding"]
        for value in (
            None,
            [],
            {},
            of_embedding | {"pooling": "sum"},
            of_embedding | {"temperature": 0},
            of_embedding | {"normalize": "yes"},
            of_embedding | {"more": 1},
        ):
            (self.folder / "refusing" / "task.json").write_text(json.dumps(record | {"embedding": value}))
            flags = ("--model_name_or_path", self.folder / "refusing", "--use_cpu")
            for main, more in ((predict_t5.main, ("--input_file", file)), (evaluate_t5.main, ())):
                _, _, errors = run_main(main, *flags, *more, code=2)
                self.assertRegex(errors, "task.json: its field embedding is not as fine_tune_t5.py writes it")
