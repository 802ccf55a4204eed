"""evaluate_t5.py through its main(): answers, metrics, files, the GLUE submission, several ranks and errors.

One small model learns by heart what to answer to each row of a GLUE folder made here: labels right and wrong, and texts
that are no label. Whatever it is asked, the expected answer is therefore known, and `generate` is asked to confirm it.
"""

import contextlib
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from absl.testing import absltest, parameterized
from helpers import on_two_ranks, run_main, sentences
from test_export_checkpoint import SHAPE, workspace
from test_export_checkpoint import TestCase as TextFolders
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import evaluate_t5
import pre_train_t5
from constants import DATASET_VALS
from foundry.arguments.task import TaskArguments
from foundry.common.errors import UserError
from foundry.corpora import token_files
from foundry.corpora.tokenizers import load_tokenizer, train_tokenizer
from foundry.corpora.trained_text import TRAINED_TEXT
from foundry.model_t5 import build_config, create_model
from foundry.training.optimizers import AdamWRMSScaled
from tasks.named import find_entry
from tasks.row_texts import source_text
from tasks.rows import load_rows
from tools import report_glue

ROOT = Path(__file__).parents[2]
TIMINGS = ("_runtime", "_per_second")
WORDS = "the a old new red cold river house garden doctor letter sings opens crosses under over never always".split()
HEADERS = {  # of the official test files, separated by commas
    "CoLA": "index,sentence",
    "SST-2": "index,sentence",
    "MRPC": "index,#1 ID,#2 ID,#1 String,#2 String",
    "STS-B": "index,genre,filename,year,old_index,source1,source2,sentence1,sentence2",
    "QQP": "id,question1,question2",
    "MNLI": "index,promptID,pairID,genre,sentence1_parse,sentence2_parse,sentence1,sentence2",
    "QNLI": "index,question,sentence",
    "RTE": "index,sentence1,sentence2",
    "WNLI": "index,sentence1,sentence2",
    "diagnostic": "index,sentence1,sentence2",
}
NEW_SHARD = "\n".join(sentences(60, seed=9)) + "\n"
GOLD = {"MNLI": ("gold_label", "neutral"), "STS-B": ("score", "3.750")}  # last column of the evaluation files
COLA_GOLD = [1, 0, 1, 1, 0, 1, 0]
COLA_SAID = [*"acceptable unacceptable unacceptable accept acceptable acceptable".split(), "acceptable not"]
# (task, split): what the model answers to its rows, one after the other.
ANSWERS = {
    ("cola", "validation"): "acceptable,unacceptable,unacceptable,accept,acceptable,acceptable,acceptable not".split(
        ","
    ),
    ("mnli", "validation_matched"): ["neutral", "contradiction", "entailment"],
    ("mnli", "validation_mismatched"): ["entailment", "entail", "entailment"],
    ("stsb", "validation"): ["3.8", "8.3", "many"],
    ("cola", "test"): ["acceptable", "river", "unacceptable"],
    ("sst2", "test"): ["positive", "negative", "positive"],
    ("mrpc", "test"): ["equivalent", "not_equivalent", "not_equivalent"],
    ("stsb", "test"): ["3.8", "8.3", "many"],
    ("qqp", "test"): ["not_duplicate", "duplicate", "duplicate"],
    ("mnli", "test_matched"): ["contradiction", "neutral", "entailment"],
    ("mnli", "test_mismatched"): ["neutral", "garden", "contradiction"],
    ("qnli", "test"): ["not_entailment", "entailment", "not_entailment"],
    ("rte", "test"): ["entailment", "not_entailment", "not"],
    ("wnli", "test"): ["not_entailment", "entailment", "entailment"],
    ("ax", "test"): ["neutral", "contradiction", "neutral"],
}
SUBMISSION = {
    "CoLA.tsv": ["1", "0", "0"],
    "SST-2.tsv": ["1", "0", "1"],
    "MRPC.tsv": ["1", "0", "0"],
    "STS-B.tsv": ["3.800", "5.000", "0.000"],
    "QQP.tsv": ["0", "1", "1"],
    "MNLI-m.tsv": ["contradiction", "neutral", "entailment"],
    "MNLI-mm.tsv": ["neutral", "entailment", "contradiction"],
    "QNLI.tsv": ["not_entailment", "entailment", "not_entailment"],
    "RTE.tsv": ["entailment", "not_entailment", "entailment"],
    "WNLI.tsv": ["0", "1", "1"],
    "AX.tsv": ["neutral", "contradiction", "neutral"],
}


def write_glue(folder: Path) -> None:
    """Every evaluation and test file of GLUE, with sentences of three words that occur once."""
    draws = torch.Generator().manual_seed(0)
    seen = set()

    def sentence() -> str:
        while True:
            words = " ".join(WORDS[i] for i in torch.randint(len(WORDS), (3,), generator=draws))
            if words not in seen:
                seen.add(words)
                return words

    for (name, split), answers in ANSWERS.items():
        path = folder / DATASET_VALS["glue"][name]["files"][split]
        path.parent.mkdir(parents=True, exist_ok=True)
        if (name, split) == ("cola", "validation"):
            path.write_text("".join(f"gj04\t{gold}\t*\t{sentence()}\n" for gold in COLA_GOLD))
            continue
        columns = HEADERS[path.parent.name].split(",")
        gold_column, gold = ("", "") if split.startswith("test") else GOLD[path.parent.name]
        lines = ["\t".join([*columns, *[gold_column] * bool(gold)])]
        for index in range(len(answers)):
            values = [sentence() if c.startswith(("sentence", "question", "#")) else str(index) for c in columns]
            lines.append("\t".join([*values, *[gold] * bool(gold)]))
        path.write_text("\n".join(lines) + "\n")


def learn_by_heart(tokenizer, pairs: list[tuple[str, str]]):
    """A small model that writes the second text of each pair when it reads the first."""
    torch.manual_seed(0)
    shape = dict(d_model=64, d_kv=32, d_ff=128, num_heads=4, num_layers=1, num_decoder_layers=1, dropout_rate=0.0)
    model = create_model(build_config("tiny", len(tokenizer), shape))
    sources = tokenizer([source for source, _ in pairs], padding=True, return_tensors="pt")
    labels = tokenizer([answer for _, answer in pairs], padding=True, return_tensors="pt").input_ids
    labels[labels == tokenizer.pad_token_id] = -100
    optimizer = AdamWRMSScaled(model.parameters(), lr=3e-2)
    for _ in range(300):
        nats = F.cross_entropy(model(**sources, labels=labels).logits.transpose(1, 2), labels, reduction="none")
        if nats.max() < 0.1:  # every single token: most rows have the same ones
            return model.eval()  # before another step could undo it
        optimizer.zero_grad()
        (nats.sum() / labels.ne(-100).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raise AssertionError(f"the model did not learn its answers: {nats.max()} nats")


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@contextlib.contextmanager
def captured_text() -> Iterator[dict[str, set]]:
    """{split: the documents, as tuples of ids} of the text that is read last, whose documents end with EOS (1)."""
    found: dict[str, set] = {}

    def tokenised(*args) -> dict:
        files = token_files.tokenised(*args)
        for split, file in files.items():
            ends = np.flatnonzero(file.tokens == 1) + 1
            found[split] = {tuple(part.tolist()) for part in np.split(file.tokens, ends)[:-1]}
        return files

    with absltest.mock.patch("foundry.data_t5.tokenised", tokenised):
        yield found


def without_timings(results: dict) -> dict:
    return {name: value for name, value in results.items() if not name.endswith(TIMINGS)}


class LearntPairsTest(parameterized.TestCase):
    def evaluate(self, rows: list[dict], *more, special: str | None = None) -> tuple[dict, str]:
        """(results, what was printed) of a model that knows the answers to rows of the columns q and a by heart."""
        model, texts = self.folder / "model", [text for row in rows for text in row.values()]
        if not model.exists():
            train_tokenizer([*sentences(200), *texts], model, vocab_size=400)
            tokenizer = load_tokenizer(str(model))
            if special:
                tokenizer.add_special_tokens({"extra_special_tokens": [special]})
                tokenizer.save_pretrained(model)
            learn_by_heart(tokenizer, [(row["q"], row["a"]) for row in rows]).save_pretrained(model)
        (self.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags = "--source_column q --target_column a --overwrite_output_dir --use_cpu true --disable_tqdm true".split()
        flags += ["--model_name_or_path", model, "--data_cache_dir", self.folder / "cache"]
        flags += ["--validation_file", self.folder / "rows.jsonl", "--output_dir", self.folder / "out", "--metrics"]
        results, printed, _ = run_main(evaluate_t5.main, *flags, *(more or ["exact_match"]))
        return results, printed

    def test_an_answer_without_the_line_break_of_its_target_is_wrong(self):
        """T5's tokenizers read a line break as a space, so the model can learn and write the first target in no way."""
        rows = [dict(q="which colors", a="- red\n- blue"), dict(q="which one", a="grey")]
        for some, line, score in ((rows, "50 % .*at most 50 %", 0.5), (rows[:1], "100 % .*at most 0 %", 0.0)):
            results, printed = self.evaluate(some)
            self.assertEqual(results["eval_exact_match"], score)
            self.assertRegex(printed, f"lost by the tokenizer +line break in {line} of the targets")
        self.assertEqual(read_lines(self.folder / "out/predictions.jsonl")[0]["prediction"], "- red - blue")

    def test_an_answer_with_a_special_token_of_its_target_is_right(self):
        rows = [dict(q="which colors", a="red <sep> blue"), dict(q="which one", a="grey")]
        results, printed = self.evaluate(rows, special="<sep>")
        self.assertEqual((results["eval_exact_match"], results["eval_token_accuracy"]), (1, 1))
        self.assertRegex(printed, "lost by the tokenizer +nothing")
        self.assertNotIn("have no end", printed)
        _, printed = self.evaluate(rows, "exact_match", "--max_target_length", "5")
        self.assertIn("pairs validation: 1 of 2 answers have no end within 5 tokens", printed)

    def test_bleu_of_chinese_counts_its_letters(self):
        rows = [dict(q="first", a="今天天气很好我们喝茶"), dict(q="second", a="今天我们去公园散步吧")]
        results, printed = self.evaluate(rows, "bleu")
        self.assertAlmostEqual(results["eval_bleu"], 100)
        self.assertIn("|tok:zh|", results["eval_bleu_signature"])
        self.assertIn("bleu counts words of sacrebleu's tokenizer zh", printed)


class EvaluateTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(tempfile.mkdtemp())
        cls.glue, cls.model = cls.folder / "glue", cls.folder / "model"
        write_glue(cls.glue)
        cls.pairs = {}
        for (name, split), answers in ANSWERS.items():
            task, args = find_entry("glue", name), TaskArguments("glue", name, data_dir=str(cls.glue))
            sources = [source_text(task, row) for row in load_rows(name, task, args, split)]
            cls.pairs[name, split] = list(zip(sources, answers, strict=True))
        pairs = sum(cls.pairs.values(), [])
        text = [source for source, _ in pairs] + sorted({answer for _, answer in pairs})
        train_tokenizer(text, cls.model, vocab_size=150)  # so small that labels become several tokens
        tokenizer = load_tokenizer(str(cls.model))
        cls.memory = learn_by_heart(tokenizer, pairs)
        cls.memory.save_pretrained(cls.model)

    def run_script(self, *argv: str, task: str = "cola", model: Path | str | None = None, where: str | None = None):
        """(results, output folder, what was printed) of one run on the CPU, in a folder of its own."""
        folder = self.folder / (where or self.id().rsplit(".", 1)[-1])
        results, out, err = run_main(evaluate_t5.main, *self.flags(*argv, task=task, model=model, folder=folder))
        return results, folder, out + err

    def flags(self, *argv: str, task: str, model, folder: Path) -> list[str]:
        flags = ["--benchmark", "glue", "--dataset_name", task, "--data_dir", str(self.glue), "--output_dir"]
        flags += [str(folder), "--model_name_or_path", str(model or self.model), "--per_device_eval_batch_size", "2"]
        flags += ["--data_cache_dir", str(self.folder / "cache"), "--disable_tqdm", "true", "--use_cpu", "true"]
        return [*flags, *argv]

    def fails_with(self, message: str, *argv: str, **options) -> None:
        self.assertRegex(run_main(evaluate_t5.main, *self.flags(*argv, **options), code=2)[2], message)

    # ------------------------------------------------------------ answers
    def test_the_model_generates_what_it_learnt(self):
        """What the other tests rely on, asked of `generate` itself, one row at a time and without padding."""
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        model = AutoModelForSeq2SeqLM.from_pretrained(self.model)
        for source, answer in sum(self.pairs.values(), []):
            ids = model.generate(**tokenizer(source, return_tensors="pt"), max_new_tokens=30, do_sample=False)
            self.assertEqual(tokenizer.decode(ids[0], skip_special_tokens=True).strip(), answer)
        lengths = [len(ids) for ids in tokenizer(["acceptable", "unacceptable"])["input_ids"]]
        self.assertGreater(min(lengths), 3, "the labels must have several tokens, EOS aside")
        self.assertGreater(max(lengths), DATASET_VALS["glue"]["cola"]["max_target_length"], "and must not be cut")

    def test_teacher_forcing_finds_the_classes_that_generation_writes(self):
        scored, folder, _ = self.run_script(where="scored")
        generated, generated_folder, _ = self.run_script("--predict_with_generate", where="generated")
        labels = DATASET_VALS["glue"]["cola"]["labels"]
        answers = [answer if answer in labels else "" for answer in ANSWERS["cola", "validation"]]
        self.assertEqual([row["prediction"] for row in read_lines(folder / "predictions.jsonl")], answers)
        texts = [row["prediction"] for row in read_lines(generated_folder / "predictions.jsonl")]
        self.assertEqual([text if text in labels else "" for text in texts], answers)
        self.assertEqual(texts[3], "accept")
        self.assertEqual(scored["eval_invalid_outputs"], 2)
        self.assertAlmostEqual(scored["eval_accuracy"], 3 / 7)
        losses = [results.pop("eval_loss") for results in (scored, generated)]
        self.assertAlmostEqual(*losses, places=5, msg="the same logits, from sequences of other lengths")
        self.assertEqual(generated.pop("eval_non_canonical_outputs"), 0)
        self.assertEqual(without_timings(scored), without_timings(generated))

    def test_several_tasks_by_one_checkpoint_as_each_alone(self):
        """Each row has its line, in order; mnli has two splits, whose gold is always "neutral"."""
        together, folder, printed = self.run_script(task="cola,mnli,stsb")  # 7, 3 + 3 and 3 rows in batches of 2
        rows, expected, lines = read_lines(folder / "predictions.jsonl"), {}, []
        for name in ("cola", "mnli", "stsb"):
            alone, alone_folder, _ = self.run_script(task=name, where=f"alone_{name}")
            expected |= {f"eval_{name}_{key.removeprefix('eval_')}": value for key, value in alone.items()}
            lines += read_lines(alone_folder / "predictions.jsonl")
        main = ["cola_matthews_correlation", "mnli_validation_matched_accuracy", "stsb_pearson"]
        expected["eval_average"] = sum(expected[f"eval_{name}"] for name in main) / 3
        self.assertEqual(without_timings(together).keys(), without_timings(expected).keys())
        for name, value in without_timings(together).items():
            self.assertAlmostEqual(value, expected[name], places=5, msg=name)
        self.assertEqual(json.loads((folder / "all_results.json").read_text()), together)
        self.assertEqual(rows, lines)
        asked = [key for key in ANSWERS if not key[1].startswith("test")]
        self.assertEqual([row["source"] for row in rows], [source for key in asked for source, _ in self.pairs[key]])
        self.assertEqual([row["index"] for row in rows], [*range(7), *range(3), *range(3), *range(3)])
        gold = [["unacceptable", "acceptable"][number] for number in COLA_GOLD]
        self.assertEqual([row["target"] for row in rows], [*gold, *["neutral"] * 6, *["3.75"] * 3])  # not T5's "3.8"
        self.assertEqual([row["prediction"] for row in rows[-3:]], ["3.8", "8.3", "many"])
        self.assertAlmostEqual(together["eval_mnli_validation_matched_accuracy"], 1 / 3)
        self.assertEqual(together["eval_mnli_validation_mismatched_accuracy"], 0.0)
        invalid = ("cola", "mnli_validation_mismatched", "stsb")
        self.assertEqual([together[f"eval_{name}_invalid_outputs"] for name in invalid], [2, 1, 1])
        self.assertIn(str(folder), printed)

    def test_all_leaves_out_what_is_missing_where_it_may(self):
        results, _, printed = self.run_script("--allow_missing", task="all")
        self.assertRegex(printed, r"left out +sst2, mrpc, qqp, qnli, rte, wnli\n")  # ax has no labels to compare with
        self.assertIn("eval_mnli_validation_mismatched_accuracy", results)

    def test_limit_and_named_split_from_a_recipe(self):
        recipe, folder = self.folder / "recipe.yaml", self.folder / "from_recipe"
        recipe.write_text("split: validation_mismatched\nmax_eval_samples: 2\n")
        results = evaluate_t5.main([str(recipe), *self.flags(task="mnli", model=None, folder=folder)])
        self.assertLen(read_lines(folder / "predictions.jsonl"), 2)
        self.assertIn("eval_validation_mismatched_accuracy", results)
        self.assertNotIn("eval_validation_matched_accuracy", results)

    @parameterized.parameters(["--do_predict"], ["--split", "test"], ["--do_predict", "--predict_with_generate"])
    def test_prediction_without_labels(self, *argv):
        results, folder, _ = self.run_script(*argv, where="_".join(argv))
        counted = {} if "--predict_with_generate" not in argv else {"cola_test_non_canonical_outputs": 0}
        self.assertEqual(results, {"cola_test_samples": 3, "cola_test_invalid_outputs": 1} | counted)
        rows = read_lines(folder / "predictions.jsonl")
        texts = ["acceptable", "river" if counted else "", "unacceptable"]
        self.assertEqual([row["prediction"] for row in rows], texts)
        self.assertNotIn("target", rows[0])

    def test_prediction_of_a_split_with_labels_has_its_metrics(self):
        wanted, *_ = self.run_script(where="evaluated")
        found, *_ = self.run_script("--do_predict", "--split", "validation", where="predicted")
        names = ("matthews_correlation", "loss", "invalid_outputs")
        wanted = {f"cola_validation_{name}": wanted[f"eval_{name}"] for name in names}
        self.assertEqual({name: found[name] for name in wanted}, wanted)

    def test_the_default_folder_lies_in_the_models_and_is_no_link(self):
        """A downloaded folder would have the answers written wherever its link leads."""
        model = shutil.copytree(self.model, self.folder / "downloaded")
        flags = self.flags(task="cola", model=model, folder=self.folder)
        del flags[flags.index("--output_dir") : flags.index("--output_dir") + 2]
        for more, name in (([], "eval_cola"), (["--do_predict"], "predict_cola")):
            self.assertEqual(evaluate_t5.parse_evaluation([*flags, *more])[1].output_dir, str(model / name))
        (model / "eval_cola").symlink_to(self.folder)
        with self.assertRaisesRegex(UserError, "downloaded: eval_cola is a link"):
            evaluate_t5.parse_evaluation(flags)

    # ------------------------------------------------------------ submission
    def assert_submission(self, folder: Path, expected: dict[str, list[str]]) -> str:
        """Makes submission.zip of the answers in a folder; returns what is printed."""
        _, printed, _ = run_main(report_glue.main, "--predictions", folder)
        with zipfile.ZipFile(folder / "submission.zip") as archive:
            texts = {name: archive.read(name).decode() for name in archive.namelist()}
        for name, answers in expected.items():
            lines = "".join(f"{index}\t{answer}\n" for index, answer in enumerate(answers))
            self.assertEqual(texts.pop(name), "index\tprediction\n" + lines, name)
        self.assertEmpty(texts)
        return printed

    def test_submission_of_one_model_for_all_tasks(self):
        results, folder, printed = self.run_script("--do_predict", task="all")
        self.assertIn(f"python -m tools.report_glue --predictions {folder}\n", printed)
        self.assertIn("gluebenchmark.com/submit", self.assert_submission(folder, SUBMISSION))
        self.assertEqual(results["rte_test_invalid_outputs"], 1)
        self.assertEqual(results["mnli_test_mismatched_invalid_outputs"], 1)
        self.assertEqual(results["ax_test_invalid_outputs"], 0)
        self.assertLen(read_lines(folder / "predictions.jsonl"), 33)
        self.run_script("--do_predict", "--overwrite_output_dir", task="cola")
        self.assertFalse((folder / "submission.zip").exists(), "it is of earlier answers")

    def test_submission_of_one_model_a_task(self):
        models = self.folder / "models"
        models.mkdir()
        for name in DATASET_VALS["glue"]:
            if name not in ("ax", "rte", "qqp"):
                (models / name).symlink_to(self.model)
        options = dict(task="all", model=models / "{task}")
        self.fails_with(
            r"lacks 2 of 10 tasks(.|\n)*qqp: (.|\n)*rte: ", "--do_predict", folder=self.folder / "x", **options
        )
        _, folder, printed = self.run_script("--do_predict", "--allow_missing", **options)
        self.assertRegex(printed, r"left out +qqp, rte")
        self.assertNotIn("report_glue", printed)
        in_part = {name: SUBMISSION[name] for name in SUBMISSION.keys() - {"RTE.tsv", "QQP.tsv"}}
        printed = self.assert_submission(folder, in_part)
        self.assertRegex(printed, r"lacks +no answers for QQP.tsv, RTE.tsv: the server takes whole submissions only")
        self.assertNotIn("gluebenchmark.com/submit", printed)

    def test_submission_names_missing_data(self):
        data = self.folder / "glue_without"
        shutil.copytree(self.glue, data, ignore=shutil.ignore_patterns("WNLI", "diagnostic"))
        flags = self.flags("--do_predict", task="all", model=None, folder=self.folder / "y")
        flags[flags.index("--data_dir") + 1] = str(data)
        error = run_main(evaluate_t5.main, *flags, code=2)[2]
        self.assertRegex(error, "lacks 2 of 10 tasks(.|\n)*wnli: .*WNLI/test.tsv(.|\n)*ax: .*diagnostic/diagnostic.tsv")
        self.assertFalse((self.folder / "y").exists())

    # ------------------------------------------------------------ ranks
    def test_two_ranks_count_every_row_once(self):
        alone, alone_folder, _ = self.run_script(where="alone")  # 7 rows: the last batch of two ranks is filled up
        folder = self.folder / "together"
        on_two_ranks(ROOT / "evaluate_t5.py", *self.flags(task="cola", model=None, folder=folder))
        together = without_timings(json.loads((folder / "all_results.json").read_text()))
        self.assertEqual(together.keys(), without_timings(alone).keys())
        for name, value in together.items():
            self.assertAlmostEqual(value, alone[name], places=5, msg=name)
        self.assertEqual((folder / "predictions.jsonl").read_text(), (alone_folder / "predictions.jsonl").read_text())

    # ------------------------------------------------------------ errors
    @parameterized.named_parameters(
        ("checkpoint", "--model_name_or_path .*nowhere", [], dict(model="/nowhere/at/all")),
        ("split", "--split dev: task cola has train, validation, test", ["--split", "dev"], {}),
        ("task", "--dataset_name colla: .*did you mean cola", [], dict(task="colla")),
        ("flag", "--splt: no such flag; did you mean --split", ["--splt", "x"], {}),
        ("two_tasks_one_unknown", "--dataset_name colla: .*did you mean cola", [], dict(task="mnli,colla")),
        ("twice", "--task glue/cola,glue/cola: cola occurs twice", [], dict(task="cola,cola")),
        ("all_without_data", r"lacks 6 of 9 tasks(.|\n)*sst2: .*no file SST-2/dev.tsv", [], dict(task="all")),
        (
            "part_of_a_submission",
            "excludes .*--max_eval",
            ["--do_predict", "--max_eval_samples", "2"],
            dict(task="all"),
        ),
        ("beams", "--predict_with_generate", ["--generation_num_beams", "4"], {}),
        ("no_rows", "no file for the split validation", [], dict(task="ax")),
    )
    def test_error(self, message, argv, options):
        with absltest.mock.patch("foundry.corpora.hub.hub_is_reachable", return_value=False):
            self.fails_with(message, *argv, **dict(task="cola", model=None, folder=self.folder / "error") | options)

    def test_a_model_without_a_record_needs_a_task(self):
        error = run_main(evaluate_t5.main, "--model_name_or_path", str(self.model), "--use_cpu", code=2)[2]
        self.assertRegex(error, "--model_name_or_path .*: has no task.json .*Name a task, such as --task glue/sst2")

    def test_folder_in_use_is_refused_or_overwritten(self):
        _, folder, _ = self.run_script()
        (folder / "notes.txt").write_text("mine")
        self.fails_with("is not empty.*--overwrite_output_dir", task="cola", model=None, folder=folder)
        self.run_script("--overwrite_output_dir", "--max_eval_samples", "3")
        self.assertLen(read_lines(folder / "predictions.jsonl"), 3)
        self.assertEqual((folder / "notes.txt").read_text(), "mine")

    def test_folder_of_the_model_is_refused(self):
        for folder in (self.model, self.model.parent):
            self.fails_with("holds the model", "--overwrite_output_dir", task="cola", model=None, folder=folder)


class TextTest(TextFolders):
    """A pre-trained folder is scored as its own run scored it."""

    def setUp(self):
        super().setUp()
        lines = sentences(400, seed=7)
        self.texts = {"a": self.folder / "a.txt", "b": self.folder / "b.txt", "held": self.folder / "held.txt"}
        for number, path in enumerate(self.texts.values()):
            path.write_text("\n".join(lines[100 * number : 100 * number + 140]) + "\n")

    def train(self, *more, model: Path | None = None) -> dict:
        shape = ",".join(f"{key}={value}" for key, value in SHAPE.items())
        flags = f"--tokenizer_name {workspace() / 'tokenizer'} --config_name tiny --config_overrides {shape}"
        flags = f"--model_name_or_path {model}" if model else flags
        flags += " --input_seq_length 48 --per_device_train_batch_size 2 --gradient_accumulation_steps 1 --max_steps 2"
        flags += " --eval_steps 2 --logging_steps 1 --report_to none --disable_tqdm true --preprocessing_num_workers 1"
        out = self.folder / "more" if model else self.out
        flags += f" --output_dir {out} --data_cache_dir {self.folder / 'cache'} --num_samples 0"
        return run_main(pre_train_t5.main, *flags.split(), *more)[0]

    def score(self, *more, code=None):
        flags = f"--model_name_or_path {self.out} --data_cache_dir {self.folder / 'cache'} --disable_tqdm true"
        return run_main(evaluate_t5.main, *flags.split(), *more, code=code)

    @parameterized.parameters(
        ("--train_file A --validation_split_percentage 20", "--train_file A"),
        ("--train_file A --validation_split_count 40 --max_train_samples 120 --noise_density 0.3", "--train_file A"),
        ("--train_file A --validation_file HELD --objective ul2", "--validation_file HELD"),
        ("--train_file A --validation_file HELD --packing documents", "--train_file B --validation_file HELD"),
        ("--train_file A:0.7 B:0.3 --validation_split_percentage 20", "--train_file A:0.7 B:0.3"),
        ("--train_file A --streaming --max_eval_samples 4", "--train_file A"),
    )
    def test_the_numbers_of_the_run(self, flags, text):
        flags, text = (self.named(words) for words in (flags, text))
        wanted = {name: value for name, value in self.train(*flags).items() if name.startswith("eval_")}
        found, printed, _ = self.score(*text)
        self.assertIn("eval_bits_per_byte", found)
        for name in wanted.keys() - {"eval_runtime"}:
            if not name.endswith(("_per_second", "_time")):
                self.assertAlmostEqual(found[name], wanted[name], delta=1e-6 * abs(wanted[name]), msg=name)
        written = json.loads((self.out / "eval_text" / "all_results.json").read_text())
        self.assertEqual(written["eval_loss"], found["eval_loss"])
        self.assertRegex(" ".join(printed.split()), "text [0-9,]+ held-out documents of [0-9]+ .*, [0-9,]+ rows of ")
        shown = printed.split("---- what the model reads")[1]
        self.assertRegex(shown, "(document|block) 1 .*\n(?s:.*)(example|validation) source .*<extra_id_0>")
        if str(self.texts["held"]) in text:
            self.assertIn(" ".join(sentences(400, seed=7)[200].split()[1:4]), shown)

    def named(self, words: str) -> list[str]:
        for name, path in self.texts.items():
            words = words.replace(f" {name.upper()}", f" {path}")
        return words.split()

    # How the text of an evaluation, or of a further pre-training, differs from that of the first run.
    @parameterized.named_parameters(
        ("the_same", None, [], None),
        ("one_file_renamed", lambda folder: (folder / "a.txt").rename(folder / "z.txt"), [], "[0-9]+ documents were"),
        ("a_new_shard", lambda folder: (folder / "0.txt").write_text(NEW_SHARD), [], None),
        ("another_share", None, ["--validation_split_percentage", "45"], "[0-9]+ documents were trained on by"),
        ("a_number", None, ["--validation_split_count", "50"], "[0-9]+ documents were trained on by"),
        ("less_text", None, ["--max_train_samples", "90"], None),
        ("own_text", None, ["--validation_file", "B"], "[0-9]+ of 40 validation documents were trained on by"),
    )
    def test_no_text_that_was_trained_on_is_held_out(self, change, flags, told):
        corpus = self.folder / "corpus"
        corpus.mkdir()
        lines = sentences(120, seed=8)
        for number, name in enumerate("abc"):
            (corpus / f"{name}.txt").write_text("\n".join(lines[40 * number : 40 * number + 40]) + "\n")
        with captured_text() as first:
            self.train("--train_file", corpus, "--eos_between_documents", "true", "--validation_split_percentage", "20")
        self.assertEmpty(first["train"] & first["validation"])
        if change:
            change(corpus)
        flags = [corpus / "b.txt" if word == "B" else word for word in flags]
        text = ["--train_file", corpus, *flags]
        with captured_text() as scored:
            _, printed, _ = self.score(*(text if "--validation_file" not in flags else flags))
        self.assertRegex(printed, f"trained before +{told}" if told else "text")
        text += ["--eos_between_documents", "true"]
        text += ["--validation_split_percentage", "20"] * ("--validation" not in str(flags))
        with captured_text() as further:
            self.train(*text, model=self.out)
        if "--validation_file" in flags:  # it is scored as a whole, and the plan says what is known
            self.assertNotEmpty(scored["validation"] & first["train"])
            return
        for found in (scored, further):
            self.assertNotEmpty(found["validation"])
            self.assertEmpty(found["validation"] & first["train"])
            self.assertEmpty(found["validation"] & found["train"])
        if not change and not flags:
            self.assertEqual(scored["validation"], first["validation"])

    def test_a_stream_has_no_list_of_what_was_trained_on(self):
        corpus = self.folder / "corpus"
        corpus.mkdir()
        shutil.copy(self.texts["a"], corpus / "a.txt")
        stream = ["--train_file", corpus, "--streaming", "--max_eval_samples", "4"]
        self.train(*stream)
        self.score("--train_file", corpus)
        self.score("--train_file", corpus, "--max_eval_samples", "2", "--overwrite_output_dir")
        for number in (["--max_eval_samples", "8"], ["--max_eval_samples", "4", "--input_seq_length", "96"]):
            _, _, error = self.score("--train_file", corpus, *number, "--overwrite_output_dir", code=2)
            self.assertRegex(error, "--max_eval_samples [48]: needs [0-9]+ documents of the stream, and .* all but the")
        shutil.copy(self.texts["held"], corpus / "0.txt")
        _, _, error = self.score("--train_file", corpus, "--overwrite_output_dir", code=2)
        self.assertRegex(error, "--train_file .*corpus: is not what .*out was trained on.*documents of a stream")
        _, printed, _ = self.score("--validation_file", self.texts["b"], "--overwrite_output_dir")
        self.assertRegex(printed, "trained before +0 of [0-9]+ .*, besides those that it read as a stream")
        for words in (stream, stream[:2]):  # a further pre-training of the grown folder
            with self.assertRaisesRegex(
                AssertionError, "corpus: is not what .*out was trained on.* as --validation_file"
            ):
                self.train(*words, model=self.out)
        self.train("--train_file", corpus / "0.txt", model=self.out)
        with np.load(self.folder / "more" / TRAINED_TEXT) as file:  # the first run's stream is not forgotten
            self.assertLen(file["streamed"], 1)
            self.assertNotEmpty(file["documents"])

    def test_a_run_of_a_version_that_kept_no_list(self):
        self.train(*self.named("--train_file A"), "--save_steps", "1")
        (self.out / TRAINED_TEXT).unlink()
        self.score(*self.named("--train_file A"))
        _, _, error = self.score(*self.named("--train_file B"), "--overwrite_output_dir", code=2)
        self.assertRegex(error, "is not what .*out was trained on.*, and no trained_text.npz says which documents")
        self.train(*self.named("--train_file B"), "--save_steps", "1", model=self.out)
        self.train(*self.named("--train_file A"), "--overwrite_output_dir")  # now it has a list
        run = json.loads((self.folder / "more" / "run.json").read_text())
        del run["fingerprints"]["earlier"]
        (self.folder / "more" / "run.json").write_text(json.dumps(run))
        self.train(
            *self.named("--train_file B"),
            "--resume_from_checkpoint",
            self.folder / "more" / "checkpoint-1",
            model=self.out,
        )

    def test_other_text_and_none(self):
        self.train(*self.named("--train_file A"))
        numbers = [
            self.score(f"--{split}_file", self.texts[name], "--overwrite_output_dir")[0]["eval_loss"]
            for split, name in (("validation", "held"), ("validation", "b"), ("train", "a"))
        ]
        self.assertLen(set(numbers), 3)
        _, _, error = self.score(code=2)
        self.assertRegex(error, "is pre-trained. Give text to score it on .--validation_file, --train_file, ")
        _, _, error = self.score("--train_file", self.texts["a"], "--do_predict", code=2)
        self.assertRegex(error, "--do_predict True: has no effect on text")
        _, _, error = self.score("--validation_file", self.folder / "none.txt", code=2)
        self.assertRegex(error, "--validation_file .*none.txt: no such file")
        (self.folder / "short.txt").write_text("Bada.\n")
        _, _, error = self.score("--validation_file", self.folder / "short.txt", "--overwrite_output_dir", code=2)
        self.assertRegex(error, "gives? no|gives 0 chunks")
