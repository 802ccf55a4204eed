"""Heads from the command line: they train, resume, evaluate and answer, and load in plain transformers.

The references are transformers' own classes on the saved folders, sklearn and seqeval on the answers, and runs without
accumulation or interruption.
"""

import importlib.util
import json
import random
import re
import shutil
import tempfile
import unittest
from functools import partial
from pathlib import Path

import numpy as np
import torch
from absl.testing import parameterized
from helpers import argv_of, on_two_ranks, run_main, sentences, write_tiny_model
from safetensors.torch import load_file
from sklearn.metrics import f1_score
from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

import evaluate_t5
import export_checkpoint
import fine_tune_t5
import predict_t5
from features.encoder_heads.head_records import saved_kind
from foundry.common.errors import UserError
from foundry.corpora.files import say_once
from foundry.corpora.tokenizers import train_tokenizer
from foundry.model_t5 import load_model

ROOT = Path(fine_tune_t5.__file__).parent
HAS_SEQEVAL = importlib.util.find_spec("seqeval") is not None
HAS_LORA = all(map(importlib.util.find_spec, ("peft", "features.lora")))
QUICK = dict(max_steps=4, per_device_train_batch_size=8, eval_strategy="steps", eval_steps=2, save_strategy="steps")
QUICK |= dict(save_steps=2, save_total_limit=4, logging_steps=1, report_to="none", disable_tqdm=True, use_cpu=True)
PLAIN = dict(source_column="words", target_column="plain")
CLASS = dict(source_column="text", target_column="many")


def made_up(line: str, count: int) -> dict:
    """A row of `count` words with all that any head reads; the tags follow from the words."""
    words, tags = line.rstrip(".").split()[:count], []
    for word in words:
        goes_on = bool(tags) and tags[-1] != "O" and word[0] in "bc"
        begins = "B-A" if word[0] in "dfg" else "B-B" if word[0] in "xyz" else "O"
        tags.append("I" + tags[-1][1:] if goes_on else begins)
    row = dict(words=words, tags=tags, text=" ".join(words), size=len(words), many=f"{len(words) > 5}")
    row["plain"] = ["V" if word[1] in "ae" else "C" for word in words]
    return row | dict(labels=sorted({tag[2:] for tag in tags} - {""}), letters="".join(words).lower())


def begins_of(words: list[str]) -> list[int]:
    """Where each word begins in their text."""
    return [0, *np.cumsum([len(word) + 1 for word in words[:-1]]).tolist()]


def loaded(folder: Path) -> tuple:
    """(model, tokenizer) of a folder, by transformers alone."""
    return AutoModelForTokenClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def loss_of(folder: Path, rows: list[tuple[str, list[tuple[int, str]]]]) -> float:
    """The mean loss of transformers' own class. rows: (text, [(where a word begins, its tag), ...])."""
    model, tokenizer = loaded(folder)
    nats = count = 0
    for text, words in rows:
        made = tokenizer(text, return_tensors="pt")
        labels = torch.full_like(made["input_ids"], -100)
        for begin, tag in words:
            labels[0, made.char_to_token(begin)] = model.config.label2id[tag]
        if words:
            nats += float(model(**made, labels=labels).loss.detach()) * len(words)
        count += len(words)
    return nats / count


def quality(results: dict) -> dict:
    """The metrics of an evaluation, without times."""
    return {
        name: v for name, v in results.items() if name.startswith("eval_") and not name.endswith(("time", "second"))
    }


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class HeadsTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.shared = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        lines, chooser = sentences(200), random.Random(3)
        write_tiny_model(cls.shared / "model", lines, 300)
        cls.rows = [made_up(line, chooser.randint(2, 9)) for line in lines]
        cls.held_out = cls.rows[150:]
        for name, rows in (("train", cls.rows[:150]), ("dev", cls.held_out)):
            write_lines(cls.shared / f"{name}.jsonl", rows)
            texts = [map("\t".join, zip(row["words"], row["tags"], strict=True)) for row in rows]
            (cls.shared / f"{name}.conll").write_text("\n\n".join(map("\n".join, texts)))

    def flags(self, head: str | None, folder: Path, ending: str = "jsonl", **flags) -> list[str]:
        given = QUICK | dict(head=head, model_name_or_path=self.shared / "model", output_dir=folder)
        given |= dict(train_file=self.shared / f"train.{ending}", validation_file=self.shared / f"dev.{ending}")
        return argv_of(given | flags)

    def train(self, *of_run, **flags) -> tuple[dict, str]:
        result, out, _ = run_main(fine_tune_t5.main, *self.flags(*of_run, **flags))
        return result, out

    @classmethod
    def trained(cls, head: str) -> Path:
        """The folder of a run that several tests look at."""
        folder = cls.shared / head
        if not folder.exists():
            flags = CLASS if head == "class" else PLAIN
            run_main(fine_tune_t5.main, *cls.flags(cls, head, folder, **flags))
        return folder

    def refused(self, head: str | None, **flags) -> str:
        _, out, err = run_main(fine_tune_t5.main, *self.flags(head, self.folder / "refused", **flags), code=2)
        self.assertEqual(err.count("\n"), 1, out + err)
        return err

    def evaluated(self, folder: Path) -> tuple[dict, list[dict]]:
        """(metrics, predictions.jsonl) of evaluate_t5.py."""
        results, _, _ = run_main(evaluate_t5.main, "--model_name_or_path", folder, "--use_cpu")
        return results, lines_of(folder / "eval_pairs" / "predictions.jsonl")

    def answers(self, folder: Path, source: Path) -> list[dict]:
        run_main(predict_t5.main, "--model_name_or_path", folder, "--input_file", source, "--use_cpu")
        return lines_of(Path(f"{source}.answers.jsonl"))

    @parameterized.parameters("class", "tokens")
    def test_a_call_from_python_has_the_records_of_the_file(self, head):
        folder, source = self.trained(head), self.folder / "new.txt"
        texts = [" ".join(row["words"]) for row in self.held_out]
        source.write_text("\n".join(texts))
        flags = ["--model_name_or_path", folder, "--use_cpu"]
        found, _, _ = run_main(partial(predict_t5.predict, texts), *flags)
        self.assertEqual(found, self.answers(folder, source))

    # ------------------------------------------------------------ what is learnt, saved and answered
    @unittest.skipUnless(HAS_SEQEVAL, "seqeval is not installed")
    @parameterized.parameters("jsonl", "conll")
    def test_entities(self, ending):
        from seqeval.metrics import f1_score as entity_f1
        from seqeval.metrics.sequence_labeling import get_entities

        folder = self.folder / "out"
        columns = dict(source_column="words", target_column="tags") if ending == "jsonl" else {}
        results, out = self.train("tokens", folder, ending, **columns, max_steps=30, eval_steps=30, save_steps=30)
        self.assertIn("tokens: 5 labels (O, B-A, B-B, I-A, I-B) of words; IOB2 tags", out)
        self.assertRegex(out, r"train tags +\S+/(O|B-A|B-B) ")
        evaluated, predictions = self.evaluated(folder)
        self.assertEqual(quality(evaluated), quality(results))
        gold, found = [row["tags"] for row in self.held_out], [row["prediction"] for row in predictions]
        self.assertEqual([row["target"] for row in predictions], gold)
        self.assertAlmostEqual(results["eval_f1"], entity_f1(gold, found))

        self.assertEqual(type(loaded(folder)[0]).__name__, "T5ForTokenClassification")
        known = [(row["text"], list(zip(begins_of(row["words"]), row["tags"], strict=True))) for row in self.held_out]
        self.assertAlmostEqual(results["eval_loss"], loss_of(folder, known), places=5)

        # The same text in predict_t5.py, and in transformers' pipeline.
        source = self.folder / "in.txt"
        source.write_text("".join(row["text"] + "\n" for row in self.held_out[:10]))
        labeller = pipeline("token-classification", str(folder), ignore_labels=[], device="cpu")
        for row, answer, known in zip(self.held_out, self.answers(folder, source), found, strict=False):
            of_tokens = [(token["end"], token["entity"]) for token in labeller(row["text"])]
            tags = [next(tag for end, tag in of_tokens if end > begin) for begin in begins_of(row["words"])]
            self.assertEqual(tags, known)
            spans = get_entities(tags)
            self.assertEqual([span["label"] for span in answer["prediction"]], [label for label, _, _ in spans])
            for span, (_, first, last) in zip(answer["prediction"], spans, strict=True):
                self.assertEqual(span["text"], " ".join(row["words"][first : last + 1]))
                self.assertEqual(answer["source"][span["start"] : span["end"]], span["text"])

    def test_plain_tags_of_letters(self):
        rows = []
        for row in self.rows:
            tags = re.sub("[^V]", "C", re.sub("[aeiou]", "V", row["letters"]))
            rows.append(dict(sequence=row["letters"], tags=tags))
        path, folder = write_lines(self.folder / "letters.jsonl", rows), self.folder / "out"
        files = dict(train_file=path, validation_file=path, max_eval_samples=40, characters=True)
        results, out = self.train(
            "tokens", folder, **files, max_steps=120, eval_steps=60, save_steps=60, learning_rate=0.02
        )
        self.assertIn("tokens: 2 labels (C, V) of letters; plain tags", out)
        self.assertGreater(results["eval_accuracy"], 0.95)  # the letter itself says it
        _, predictions = self.evaluated(folder)
        self.assertEqual([row["target"] for row in predictions], [list(row["tags"]) for row in rows[:40]])
        pairs = [pair for row in predictions for pair in zip(row["prediction"], row["target"], strict=True)]
        self.assertEqual(results["eval_accuracy"], np.mean([ours == theirs for ours, theirs in pairs]))
        (answer,) = self.answers(folder, write_lines(self.folder / "in.jsonl", [dict(id=7, sequence="dama")]))
        self.assertEqual((answer["id"], answer["prediction"]), (7, ["C", "V", "C", "V"]))
        self.assertLen(answer["probabilities"], 4)

    @parameterized.parameters(("mean", "class"), ("first", "class"), ("mean", "labels"), ("first", "number"))
    def test_whole_texts(self, pooling, head):
        """The outputs are recomputed by transformers' class and the pooling that the documentation gives."""
        column, folder = {"class": "many", "labels": "labels", "number": "size"}[head], self.folder / "out"
        results, _ = self.train(head, folder, source_column="text", target_column=column, pooling=pooling)
        evaluated, predictions = self.evaluated(folder)
        self.assertEqual(quality(evaluated), quality(results))
        model, tokenizer = loaded(folder)
        made = tokenizer([row["text"] for row in self.held_out], padding=True, return_tensors="pt")
        with torch.no_grad():
            logits, mask = model(**made).logits, made["attention_mask"][..., None]
        logits = logits[:, 0] if pooling == "first" else (logits * mask).sum(1) / mask.sum(1)
        gold, names = [row[column] for row in self.held_out], list(model.config.id2label.values())
        if head == "class":
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(list(map(names.index, gold))))
            wanted = [names[number] for number in logits.argmax(-1)]
            metric = np.mean([ours == theirs for ours, theirs in zip(gold, wanted, strict=True)])
        elif head == "labels":
            targets = torch.tensor([[float(name in labels) for name in names] for labels in gold])
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets)
            wanted = [[name for name, logit in zip(names, row, strict=True) if logit > 0] for row in logits]
            metric = f1_score(targets, logits > 0, average="micro", zero_division=0)
        else:
            kind, sizes = (
                json.loads((folder / "task.json").read_text())["head"],
                [row["size"] for row in self.rows[:150]],
            )
            np.testing.assert_allclose((kind["mean"], kind["deviation"]), (np.mean(sizes), np.std(sizes)))
            wanted = (logits[:, 0] * kind["deviation"] + kind["mean"]).tolist()
            loss = ((torch.tensor(wanted) - torch.tensor(gold)) / kind["deviation"]).square().mean()
            metric = np.corrcoef(gold, wanted)[0, 1]
        name = {"class": "eval_accuracy", "labels": "eval_f1", "number": "eval_pearson"}[head]
        self.assertAlmostEqual(results[name], metric, places=4)
        self.assertAlmostEqual(results["eval_loss"], float(loss), places=5)
        source = write_lines(self.folder / "in.jsonl", [{"text": row["text"]} for row in self.held_out])
        for found in (predictions, self.answers(folder, source)):
            found = [row["prediction"] for row in found]
            if head == "number":
                np.testing.assert_allclose(np.array(found, dtype=float), wanted, rtol=1e-4)
            else:
                self.assertEqual(found, wanted)

    # ------------------------------------------------------------ how it is learnt
    def test_a_resumed_run_ends_in_the_same_weights(self):
        whole, resumed = self.trained("tokens"), self.folder / "resumed"
        resumed.mkdir()
        shutil.copytree(whole / "checkpoint-2", resumed / "checkpoint-2")
        shutil.copy(whole / "run.json", resumed)
        again, _ = self.train("tokens", resumed, **PLAIN, resume_from_checkpoint=True)
        self.assertEqual(*((folder / "model.safetensors").read_bytes() for folder in (whole, resumed)))
        self.assertEqual(quality(again), quality(json.loads((whole / "all_results.json").read_text())))
        other = PLAIN | dict(output_dir=whole, resume_from_checkpoint=True, freeze_encoder=True)
        self.assertIn("--freeze_encoder: False in its run, True now", self.refused("tokens", **other))

    @unittest.skipUnless(HAS_LORA, "peft or features/lora is not there")
    def test_low_rank_matrices_and_the_head_are_learnt(self):
        """peft puts the folder onto transformers' own class; a resumed run ends in the same bits."""
        from peft import PeftModel

        whole, resumed = self.folder / "whole", self.folder / "resumed"
        results, _ = self.train("tokens", whole, **PLAIN, lora_rank=4)
        trained = load_file(whole / "adapter_model.safetensors")
        of_head = {f"base_model.model.classifier.{name}" for name in ("weight", "bias")}
        self.assertEqual({name for name in trained if ".lora_" not in name}, of_head)
        evaluated, predictions = self.evaluated(whole)
        for name, value in quality(results).items():
            self.assertAlmostEqual(evaluated[name], value, places=5)  # of merged matrices
        labels = json.loads((whole / "task.json").read_text())["head"]["labels"]
        base = AutoModelForTokenClassification.from_pretrained(self.shared / "model", num_labels=len(labels))
        model, tokenizer = PeftModel.from_pretrained(base, whole).eval(), AutoTokenizer.from_pretrained(whole)
        for row, ours in zip(self.held_out, predictions, strict=True):
            made = tokenizer(row["text"], return_tensors="pt")
            found = model(**made).logits[0].argmax(-1)
            places = [made.char_to_token(begin) for begin in begins_of(row["words"])]
            self.assertEqual([labels[found[place]] for place in places], ours["prediction"])
        exported = self.folder / "exported"
        run_main(export_checkpoint.main, "--model_name_or_path", whole, "--output_dir", exported)
        of_export = loaded(exported)[0]
        self.assertEqual(list(of_export.config.id2label.values()), labels)
        torch.testing.assert_close(of_export(**made).logits, model(**made).logits, rtol=1e-4, atol=1e-5)
        resumed.mkdir()
        shutil.copytree(whole / "checkpoint-2", resumed / "checkpoint-2")
        shutil.copy(whole / "run.json", resumed)
        self.train("tokens", resumed, **PLAIN, lora_rank=4, resume_from_checkpoint=True)
        self.assertEqual(*((folder / "adapter_model.safetensors").read_bytes() for folder in (whole, resumed)))
        self.assertIn("Merge them first", self.refused("class", **CLASS | dict(model_name_or_path=whole)))
        self.assertIn(
            "--freeze_encoder: not with lora", self.refused("class", **CLASS, freeze_encoder=True, lora_rank=4)
        )

    @parameterized.parameters(("tokens", PLAIN), ("class", CLASS))
    def test_accumulation_does_not_change_the_loss(self, head, flags):
        losses = []
        for batch, steps in ((8, 1), (2, 4)):
            how = dict(per_device_train_batch_size=batch, gradient_accumulation_steps=steps, dropout_rate=0)
            self.train(head, self.folder / str(batch), **flags, **how)
            lines = lines_of(self.folder / str(batch) / "metrics.jsonl")
            losses.append([line["loss"] for line in lines if "loss" in line])
        self.assertLen(losses[0], 4)
        np.testing.assert_allclose(*losses, rtol=1e-5)

    @parameterized.parameters("none, 2 whole copies", "ZeRO-2")
    def test_two_processes_end_with_the_weights_of_one(self, sharding):
        """Of 21 rows; the others of the last batch only fill it up."""
        how = PLAIN | dict(dropout_rate=0, max_steps=-1, num_train_epochs=1, max_train_samples=21, eval_steps=3)
        how |= dict(save_steps=3)
        self.train("tokens", self.folder / "one", **how)
        words = self.flags("tokens", self.folder / "two", **how | dict(per_device_train_batch_size=4))
        words += ["--deepspeed", ROOT / "zero_stage2_config.json"] if sharding == "ZeRO-2" else []
        printed = on_two_ranks(ROOT / "fine_tune_t5.py", *words)
        self.assertRegex(printed, f"sharding +{sharding}")
        weights, logged = [], []
        for folder in (self.folder / "one", self.folder / "two"):
            weights.append(load_file(folder / "model.safetensors"))
            lines = lines_of(folder / "metrics.jsonl")
            logged.append([[line[name] for line in lines if name in line] for name in ("loss", "eval_loss")])
        for name, tensor in weights[0].items():
            torch.testing.assert_close(weights[1][name], tensor, rtol=1e-3, atol=1e-4, msg=name)
        self.assertEqual([len(values) for values in logged[0]], [3, 1])
        for ours, theirs in zip(*logged, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4)

    def test_the_head_of_a_folder_is_kept_for_the_same_labels(self):
        first, second = self.trained("class"), self.folder / "second"
        self.train("class", second, **CLASS, model_name_or_path=first, learning_rate=1e-9, max_steps=2)
        heads = [loaded(folder)[0].classifier.weight for folder in (first, second)]
        torch.testing.assert_close(*heads, rtol=1e-3, atol=1e-6)

    def test_a_frozen_encoder_stays_as_it_is_with_another_vocabulary(self):
        """Tokens of both vocabularies keep their embeddings; of the others the first steps learn."""
        train_tokenizer(sentences(200, seed=5), self.folder / "tokens", 260)
        out = self.folder / "out"
        _, printed = self.train("class", out, **CLASS, tokenizer_name=self.folder / "tokens", freeze_encoder=True)
        self.assertIn("the encoder is frozen", printed)
        (model, tokenizer), old = loaded(out), AutoTokenizer.from_pretrained(self.shared / "model")
        base = load_model(str(self.shared / "model"))
        for name, weight in model.transformer.encoder.block.named_parameters():
            torch.testing.assert_close(weight, base.encoder.block.get_parameter(name), rtol=0, atol=0)
        before, after = base.shared.weight, model.get_input_embeddings().weight
        both = [token for token in tokenizer.get_vocab() if token in old.get_vocab()]
        self.assertGreater(len(both), 50)
        ids = [of.convert_tokens_to_ids(both) for of in (old, tokenizer)]
        torch.testing.assert_close(after[ids[1]], before[ids[0]], rtol=0, atol=0)

    @unittest.skipUnless(HAS_SEQEVAL, "seqeval is not installed")
    @parameterized.parameters(("tokens", "words", "tags"), ("labels", "text", "labels"))
    def test_rows_are_read_as_meant_by_every_script(self, head, source, target):
        """Skipped rows, and tags that are written otherwise, change nothing: in the training, in an evaluation by its
        record or of another file, and in answers to a CoNLL file."""
        files, odd = {}, dict(o="O", **{f"{a.lower()}_{b}": f"{a}-{b}" for a in "BI" for b in "AB"})
        meant = {tag: other for other, tag in odd.items()}
        for split, rows in (("train", self.rows[:150]), ("validation", self.held_out)):
            written = []
            for number, row in enumerate(rows):
                written.append(row | dict(tags=[meant[tag] for tag in row["tags"]], answer="accept", seen=1))
                written.append(row | dict(tags=["b_A"] * len(row["tags"]), labels=["B"], seen=number % 2))
                written[-1] |= dict(_task_hash=number, answer="reject") if number % 2 else dict(answer="ignored")
            files[f"{split}_file"] = write_lines(self.folder / f"{split}.jsonl", written)
        columns = dict(source_column=source, target_column=target)
        say_once.cache_clear()
        known, _ = self.train(head, self.folder / "known", **columns)
        results, out = self.train(head, self.folder / "out", **columns, **files, skip_rows_where="seen=0")
        self.assertIn("train: --skip_rows_where seen=0 leaves out 75 rows", out)
        self.assertIn("train: 75 rows are left out, of which the answer of Prodigy is reject", out)
        self.assertEqual(quality(results), quality(known))
        self.assertEqual(quality(self.evaluated(self.folder / "out")[0]), quality(known))
        clean = self.folder / "known"
        again, _, _ = run_main(
            evaluate_t5.main,
            *argv_of(dict(model_name_or_path=clean, skip_rows_where="seen=0", use_cpu=True)),
            *argv_of(dict(validation_file=files["validation_file"], output_dir=self.folder / "again")),
        )
        self.assertEqual(quality(again), quality(known))
        flags = dict(model_name_or_path=clean, positive_label="A", use_cpu=True)
        _, _, err = run_main(evaluate_t5.main, *argv_of(flags), code=2)
        self.assertIn(f"--positive_label A: not with --head {head}", err)
        record = json.loads((clean / "task.json").read_text())  # of an earlier training, which took the flag
        (clean / "task.json").write_text(json.dumps(record | {"positive_label": "A"}))
        self.assertEqual(quality(self.evaluated(clean)[0]), quality(known))
        if head == "tokens":
            texts = [zip(row["words"], row["tags"], strict=True) for row in self.held_out]
            lines = ["".join(f"{word}\t{meant[tag]}\n" for word, tag in text) for text in texts]
            (self.folder / "in.txt").write_text("\n".join(lines))
            found = self.answers(clean, self.folder / "in.txt")
            self.assertEqual([row["words"] for row in found], [row["words"] for row in self.held_out])

    def test_what_repeats_is_counted(self):
        """In the plan of the training, and by task.json in that of an evaluation."""
        rows = [*self.held_out[:20], *self.rows[:3], *[self.held_out[0]] * 9]
        held_out = write_lines(self.folder / "dev.jsonl", rows)
        _, out = self.train("tokens", self.folder / "out", **PLAIN, validation_file=held_out)
        for place in ("training", "evaluation"):
            self.assertIn("3 of 32 validation sources are trained on", out, place)
            self.assertIn(f'"{self.held_out[0]["text"]}" stands 10 times (validation)', out, place)
            if place == "training":
                _, out, _ = run_main(evaluate_t5.main, "--model_name_or_path", self.folder / "out", "--use_cpu")

    def test_positions_without_a_label_do_not_count(self):
        """-100, null and what a mask leaves out are neither learnt nor scored; the loss is that of transformers' own
        class, which leaves -100 out."""
        rows = []
        for number, row in enumerate(self.rows):
            tags = [None if (number + place) % 3 == 0 else tag for place, tag in enumerate(row["plain"])]
            tags = [-100 if tag is None and number % 2 else tag for tag in tags]
            mask = "".join("0" if (number + place) % 5 == 0 else "1" for place in range(len(tags)))
            rows.append(dict(words=row["words"], tags=tags, seen=mask))
        files = dict(train_file=write_lines(self.folder / "train.jsonl", rows[:150]))
        files |= dict(validation_file=write_lines(self.folder / "dev.jsonl", rows[150:]))
        folder = self.folder / "out"
        results, out = self.train("tokens", folder, **files, mask_column="seen")
        self.assertIn("tokens: 2 labels (C, V) of words; plain tags", out)
        evaluated, predictions = self.evaluated(folder)
        self.assertEqual(quality(evaluated), quality(results))
        known, right = [], []
        for row, answer in zip(rows[150:], predictions, strict=True):
            words = []
            of_words = zip(begins_of(row["words"]), row["tags"], row["seen"], answer["prediction"], strict=True)
            for begin, tag, seen, found in of_words:
                if tag in ("C", "V") and seen == "1":
                    words.append((begin, tag))
                    right.append(tag == found)
            known.append((" ".join(row["words"]), words))
        self.assertAlmostEqual(results["eval_loss"], loss_of(folder, known), places=5)
        self.assertAlmostEqual(results["eval_accuracy"], np.mean(right))

    @unittest.skipUnless(HAS_SEQEVAL, "seqeval is not installed")
    def test_conll_files_are_read_alike_by_every_script(self):
        """Of index, word, class and tag, in a .txt; the tags as IOBES, of which seqeval counts the entities."""
        from seqeval.metrics import f1_score as entity_f1

        for name, rows in (("train", self.rows[:150]), ("dev", self.held_out)):
            lines = ["i\tword\tpos\tner"]
            for row in rows:
                tags = [*row["tags"], "O"]
                for place, word in enumerate(row["words"]):
                    tag, goes_on = tags[place], tags[place + 1].startswith("I-")
                    ends = {"B": "B" if goes_on else "S", "I": "I" if goes_on else "E", "O": "O"}
                    lines.append(f"{place + 1}\t{word}\tN\t{ends[tag[0]] + tag[1:]}")
                lines.append("")
            (self.folder / f"{name}.txt").write_text("\n".join(lines))
        files = {
            f"{split}_file": self.folder / f"{name}.txt" for split, name in (("train", "train"), ("validation", "dev"))
        }
        folder, columns = self.folder / "out", dict(source_column="1", target_column="3")
        results, out = self.train("tokens", folder, **files, **columns, max_steps=30, eval_steps=30, save_steps=30)
        self.assertIn("of words; IOBES tags", out)
        self.assertRegex(out, r"words +stand between white space: \w+ \| \w+")
        _, predictions = self.evaluated(folder)
        found = [row["prediction"] for row in predictions]
        self.assertAlmostEqual(results["eval_f1"], entity_f1([row["target"] for row in predictions], found))
        wanted = [row["prediction"] for row in self.answers(folder, self.folder / "dev.txt")]
        self.assertLen(wanted, len(self.held_out))
        self.assertTrue(any(wanted))
        shutil.copy(self.folder / "dev.txt", self.folder / "dev.tsv")
        for source in (
            self.folder / "dev.tsv",
            write_lines(self.folder / "in.jsonl", [dict(words=row["words"]) for row in self.held_out]),
            write_lines(self.folder / "text.jsonl", [dict(text=row["text"]) for row in self.held_out]),
        ):
            self.assertEqual([row["prediction"] for row in self.answers(folder, source)], wanted)

    def test_answers_go_on_where_a_run_ended_and_blank_texts_have_no_class(self):
        folder, source = self.trained("class"), self.folder / "in.txt"
        source.write_text("a\n\n \u00a0\nb\n")
        found = [row["prediction"] for row in self.answers(folder, source)]
        self.assertEqual([answer is None for answer in found], [False, True, True, False])
        answers = Path(f"{source}.answers.jsonl")
        written = answers.read_bytes()
        answers.write_bytes(b"".join(written.splitlines(True)[:3]))
        flags = ["--model_name_or_path", folder, "--input_file", source, "--use_cpu", "--batch_size", 1]
        self.assertEqual(run_main(predict_t5.main, *flags)[0], {"inputs": 4, "answered": 1})
        self.assertEqual(answers.read_bytes(), written)
        scripts = [(predict_t5.main, ["--num_beams", 2, "--input_file", source]), (evaluate_t5.main, ["--do_predict"])]
        for main, flags in scripts:
            _, _, err = run_main(main, "--model_name_or_path", folder, "--use_cpu", *flags, code=2)
            self.assertIn(f"{flags[0]} ", err)

    def test_damaged_records_are_refused_in_one_line(self):
        folder, source = self.folder / "out", self.folder / "in.txt"
        shutil.copytree(self.trained("tokens"), folder)
        source.write_text("a\n")
        record = json.loads((folder / "task.json").read_text())
        head = record["head"]
        form = {name: value for name, value in head["form"].items() if name not in ("division", "mask")}
        earlier = {name: value for name, value in head.items() if name != "suffixes"} | {"form": form}
        (folder / "task.json").write_text(json.dumps(record | {"head": earlier}))  # as an earlier version wrote it
        self.assertLen(self.answers(folder, source), 1)
        damaged = [None, "tokens", [], {}, 3]
        for name in ("kind", "labels", "pooling", "scheme", "form"):
            damaged += [{key: value for key, value in head.items() if key != name}, head | {name: 7}]
        for changes in (
            dict(labels=[]),
            dict(labels=["C", "C"]),
            dict(labels=["V", "C"]),  # of which config.json has another order
            dict(kind="words"),
            dict(kind="number", pooling="mean", mean=0.0, deviation=0.0),
            dict(kind="class", pooling="mean"),
            dict(scheme="XYZ"),
        ):
            damaged.append(head | changes)
        for changes in (
            dict(columns=["words"]),
            dict(reads="lines"),
            dict(spaced="yes"),
            dict(division=dict(by="lines")),
        ):
            damaged.append(head | dict(form=head["form"] | changes))
        for value in damaged:
            (folder / "task.json").write_text(json.dumps(record | {"head": value}))
            with self.subTest(head=value), self.assertRaisesRegex(UserError, "task.json|config.json"):
                saved_kind(str(folder), {})
        scripts = [(predict_t5.main, ["--input_file", source, "--use_cpu"]), (evaluate_t5.main, ["--use_cpu"])]
        scripts.append((export_checkpoint.main, ["--output_dir", self.folder / "exported"]))
        for changes in (dict(head=3), dict(max_source_length=-1), dict(dataset_name=5)):
            (folder / "task.json").write_text(json.dumps(record | changes))
            for main, flags in scripts:
                _, out, err = run_main(main, "--model_name_or_path", folder, *flags, code=2)
                self.assertEqual(err.count("\n"), 1, out + err)
                self.assertIn("task.json", err)

    # ------------------------------------------------------------ what is refused
    @parameterized.parameters(
        (None, CLASS | dict(freeze_encoder=True), "--freeze_encoder True"),
        ("class", CLASS | dict(characters=True), "--characters True"),
        ("class", CLASS | dict(target_type="text"), "--target_type text"),
        ("class", CLASS | dict(config_overrides="num_decoder_layers=1"), "--config_overrides num_decoder_layers=1"),
        ("class", CLASS | dict(mask_column="x"), "--mask_column x"),
        ("tokens", PLAIN | dict(pooling="first"), "--pooling first"),
        ("tokens", PLAIN | dict(packing=True), "--packing True"),
        ("tokens", PLAIN | dict(target_type="class"), "--target_type class"),
        ("tokens", PLAIN | dict(metrics="bleu"), "--metrics bleu"),
        ("tokens", PLAIN | dict(labels="C"), "--labels C: .* V"),
        ("tokens", PLAIN | dict(mask_column="x"), "train.jsonl, row 1: no column x"),
        ("tokens", PLAIN | dict(target_column="text"), "train.jsonl, row 1: the column text"),
        ("tokens", dict(task="glue/cola"), "--head tokens"),
        ("labels", CLASS, "train.jsonl, row 1: the column many"),
        ("number", CLASS, "many"),
        ("number", CLASS | dict(target_column="size", label_smoothing_factor=0.1), "--label_smoothing_factor 0.1"),
        ("number", dict(task="glue/cola"), "--head number: .* --head class"),
    )
    def test_refused(self, head, flags, message):
        self.assertRegex(self.refused(head, **flags), message)
