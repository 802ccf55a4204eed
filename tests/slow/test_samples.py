"""What the model writes into gaps: samples.md of a run."""

import re
from unittest import mock

import torch
from absl.testing import parameterized
from helpers import run_main
from test_export_checkpoint import SHAPE, TestCase, workspace
from transformers import TrainerState

import pre_train_t5
from foundry.common.reports import markdown_table
from foundry.corpora.token_files import split_off_documents
from foundry.corpora.tokenizers import load_tokenizer
from foundry.model_t5 import load_model
from foundry.runs import samples


class TableTest(parameterized.TestCase):
    def test_table(self):
        rows = [["The\n[1] by [2].", "[1] old |\nbridge", ""]]
        expected = "| text | masked | filled in |\n| --- | --- | --- |\n| The [1] by [2]. | [1] old \\| bridge |  |"
        self.assertEqual(markdown_table(samples.COLUMNS, rows), expected)

    def test_marked(self):
        tokenizer = load_tokenizer(str(workspace() / "tokenizer"))
        bada, kuli = (tokenizer(word, add_special_tokens=False).input_ids for word in ("bada", "kuli"))
        ids = [0, *bada, 99, *kuli, 98, 1, -100]
        self.assertEqual(samples.marked(tokenizer, ids, [99, 98, 97]), "bada [1] kuli [2]")
        with mock.patch.object(samples, "SHOWN_SENTINELS", 1):
            self.assertEqual(samples.marked(tokenizer, ids, [99, 98, 97]), "bada [1] kuli")


class ResumedTest(TestCase):
    def test_a_text_may_begin_as_a_section_does(self):
        callback = object.__new__(samples.SamplesCallback)
        callback.path = self.folder / samples.SAMPLES_FILE
        texts = [f"## Step {step}\n\n| ## Step one: [1]. | a | b |\n\n" for step in (2, 4)]
        callback.path.write_text("".join(texts))
        evaluated = [{"step": 2, "eval_loss": 1.0}]
        callback.on_train_begin(None, TrainerState(global_step=2, log_history=evaluated))
        self.assertEqual(callback.path.read_text(), texts[0])
        callback.on_train_begin(None, TrainerState(global_step=2))
        self.assertEmpty(callback.path.read_text(), "the resumed run makes this evaluation")


class RunTest(TestCase):
    def train(self, *more, code=None):
        flags = dict(
            train_file=workspace() / "text.txt",
            tokenizer_name=workspace() / "tokenizer",
            config_name="tiny",
            config_overrides=",".join(f"{key}={value}" for key, value in SHAPE.items()),
            input_seq_length=64,
            warmup_steps=0,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=1,
            logging_steps=1,
            max_eval_samples=6,
            output_dir=self.out,
            data_cache_dir=self.folder / "cache",
            report_to="none",
            disable_tqdm="true",
            preprocessing_num_workers=1,
            eval_steps=1,
            save_steps=1,
        )
        return run_main(
            pre_train_t5.main, *[word for key, value in flags.items() for word in (f"--{key}", value)], *more, code=code
        )

    def sections(self) -> list[str]:
        return re.split(r"(?m)^(?=## Step )", (self.out / samples.SAMPLES_FILE).read_text())[1:]

    def test_samples_md_shows_the_same_held_out_texts_at_every_evaluation_and_goes_on(self):
        self.train("--max_steps", 2, "--num_samples", 2)
        first = self.sections()
        self.assertEqual([text.split()[2] for text in first], ["1", "2"])
        tables = [[line.split(" | ")[:2] for line in text.splitlines()[4:] if line] for text in first]
        self.assertLen(tables[0], 2)
        self.assertEqual(tables[0], tables[1])
        corpus = "".join((workspace() / "text.txt").read_text().split())
        for text, masked in tables[0]:
            self.assertIn("[1]", text)
            for span in re.split(r"\[\d\]", masked):
                self.assertIn("".join(span.split()), corpus)
        self.train("--max_steps", 3, "--num_samples", 2, "--resume_from_checkpoint", self.out / "checkpoint-1")
        again = self.sections()
        self.assertEqual([text.split()[2] for text in again], ["1", "2", "3"])
        self.assertEqual(again[0], first[0])

    def test_samples_change_nothing_of_the_run(self):
        weights = []
        for count in (0, 3):
            self.train("--max_steps", 2, "--num_samples", count, "--overwrite_output_dir", "--dropout_rate", 0.1)
            weights.append(load_model(str(self.out)).state_dict())
            self.assertEqual((self.out / samples.SAMPLES_FILE).exists(), bool(count))
        for name, tensor in weights[0].items():
            self.assertTrue(torch.equal(tensor, weights[1][name]), name)

    @parameterized.parameters(
        (["--num_samples", "-1"], "--num_samples -1: must be at least 0"),
        (["--validation_split_count", "0"], "--validation_split_count 0: must be at least 1 document"),
        (
            ["--validation_split_count", "300"],
            "--validation_split_count 300: the text has 400 documents, and at most half",
        ),
        (
            ["--validation_split_count", "3", "--validation_split_percentage", "3"],
            "--validation_split_percentage 3.0: excludes --validation_split_count: give one of them",
        ),
    )
    def test_refused(self, flags, message):
        _, _, error = self.train("--max_steps", 1, *flags, code=2)
        self.assertRegex(error, message)

    def test_a_number_of_documents_is_held_out(self):
        _, printed, _ = self.train("--max_steps", 1, "--validation_split_count", 120, "--dry_run", code=0)
        self.assertRegex(printed, r"documents +280 \(0 empty")


class HeldOutDocumentsTest(parameterized.TestCase):
    @parameterized.parameters((10, 2), (1000, 100), (1000, 500), (7, 3), (101, 50), (333, 1), (5000, 777))
    def test_exactly_so_many_in_stretches(self, total, count):
        documents = [f"d{number}" for number in range(total)]
        with_empty = [text for number, document in enumerate(documents) for text in ([""] * (number % 3) + [document])]
        blocks = list(split_off_documents(with_empty, count, total))
        self.assertEqual([text for _, block in blocks for text in block], with_empty, "nothing is lost or moved")
        held = [int(text[1:]) for out, block in blocks for text in block if out and text]
        self.assertLen(held, count)
        stretches = 1 + sum(two - one > 1 for one, two in zip(held, held[1:], strict=False))
        self.assertLessEqual(stretches, -(-count // 50))
        self.assertLessEqual(max(b - a for a, b in zip([-1, *held], held, strict=False)), total // stretches + 2)
