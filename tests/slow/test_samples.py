"""What the model writes into gaps: spans, samples.md of a run, and the prompt of evaluate_t5.py."""

import contextlib
import io
import re
from unittest import mock

import torch
from absl.testing import parameterized
from helpers import run_main, sentences
from test_export_checkpoint import SHAPE, TestCase, workspace
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, TrainerState

import evaluate_t5
import pre_train_t5
from create_tokenizer import add_tokens
from data_collator_t5 import find_sentinel_ids
from foundry.common.reports import markdown_table
from foundry.corpora.token_files import split_off_documents
from foundry.corpora.tokenizers import load_tokenizer, plain_encoder
from foundry.model_t5 import load_model
from foundry.runs import samples


class SpansTest(parameterized.TestCase):
    @parameterized.parameters(
        ([99, 5, 6, 98, 7, 1, 8], {0: [5, 6], 1: [7]}),  # what stands after EOS does not count
        ([0, 4, 98, 7, 99, 5], {1: [7], 0: [5]}),  # nor what stands before the first sentinel
        ([99, 5, 99, 6, 98, 7], {0: [5], 1: [7]}),  # nor a sentinel that comes again
        ([99, 98, 1], {0: [], 1: []}),
        ([5, 6], {}),
    )
    def test_spans(self, ids, expected):
        self.assertEqual(samples.spans(ids, [99, 98, 97], 1), expected)

    def test_table(self):
        rows = [["The\n[1] by [2].", "[1] old |\nbridge", ""]]
        expected = "| text | masked | filled in |\n| --- | --- | --- |\n| The [1] by [2]. | [1] old \\| bridge |  |"
        self.assertEqual(markdown_table(samples.COLUMNS, rows), expected)

    def test_marked(self):
        tokenizer = load_tokenizer(str(workspace() / "tokenizer"))
        bada, kuli = (tokenizer(word, add_special_tokens=False).input_ids for word in ("bada", "kuli"))
        ids = [0, *bada, 99, *kuli, 98, 1, -100]
        self.assertEqual(samples.marked(tokenizer, ids, [99, 98, 97]), "bada [1] kuli [2]")
        with mock.patch.object(samples, "SHOWN_GAPS", 1):
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


class PromptTest(TestCase):
    def setUp(self):
        super().setUp()
        self.tokenizer = load_tokenizer(str(workspace() / "tokenizer"))

    def answers(self, written: str, lines: list[str]) -> list[str]:
        ids = self.tokenizer(written).input_ids
        model = load_model(str(workspace() / "whole"))
        with mock.patch.object(samples, "fill", return_value=[ids]):
            return list(samples.answers_to(lines, model, self.tokenizer, 8))

    def test_gaps_are_filled_in_the_users_own_text(self):
        written = "<extra_id_0> bada <extra_id_1> kuli"
        lines = ["Unknown Ж <extra_id_0>, or <extra_id_1>!", "", " only <extra_id_1> \n", "<extra_id_7>?"]
        expected = ["Unknown Ж bada, or kuli!", "only kuli", "<extra_id_7>?"]
        self.assertEqual(self.answers(written, lines), expected)

    def test_a_line_without_gaps_is_a_task(self):
        self.assertEqual(self.answers("bada kuli", ["summarize: bada"]), ["bada kuli"])

    def test_the_answer_is_what_generate_gives(self):
        model = load_model(str(workspace() / "whole")).eval()
        ids = self.tokenizer("bada kuli", return_tensors="pt").input_ids
        wanted = self.tokenizer.decode(model.generate(ids, max_new_tokens=8)[0], skip_special_tokens=True).strip()
        self.assertEqual(list(samples.answers_to(["bada kuli"], model, self.tokenizer, 8)), [wanted])

    def test_a_task_is_read_as_in_fine_tuning(self):
        """CodeT5's tokenizer begins a text with <s>; pre-training, which cuts running text, does not."""
        words, model = load_tokenizer(str(workspace() / "tokenizer")), load_model(str(workspace() / "whole"))
        content = words.backend_tokenizer
        content.post_processor = TemplateProcessing(single="<unk> $A </s>", special_tokens=[("<unk>", 2), ("</s>", 1)])
        with mock.patch.object(samples, "fill", return_value=[[1]]) as fill:
            list(samples.answers_to(["bada kuli", "bada <extra_id_0>"], model, words, 8))
        read = [call.args[1][0].tolist() for call in fill.call_args_list]
        self.assertEqual(read[0], words("bada kuli")["input_ids"])
        self.assertEqual([ids[0] == 2 for ids in read], [True, False])

    def test_piped_through_the_script(self):
        stdin = io.StringIO("bada <extra_id_0> kuli\n\nbada\n")
        with mock.patch("sys.stdin", stdin):
            flags = ["--model_name_or_path", workspace() / "whole", "--generation_max_length", 6]
            result, printed, error = run_main(evaluate_t5.main, "--interactive", "--max_source_length", 3, *flags)
        read = self.tokenizer.decode(self.tokenizer("bada", max_length=3, truncation=True)["input_ids"])
        self.assertEqual(error.splitlines()[-1], f"the model reads: {read}")
        self.assertRegex(error, "the model reads: bada *<extra_id_0>")
        self.assertEqual(result, {"lines": 2})
        self.assertLen(printed.splitlines(), 2)
        self.assertRegex(printed.splitlines()[0], "^bada .* kuli$")

    def test_a_terminal_is_asked(self):
        stdin = io.StringIO("bada\n")
        stdin.isatty = lambda: True
        model = load_model(str(workspace() / "whole"))
        with mock.patch("sys.stdin", stdin), contextlib.redirect_stdout(io.StringIO()) as printed:
            self.assertEqual(samples.prompt(model, self.tokenizer, 4, 1), 1)
        self.assertRegex(printed.getvalue(), "^> .*\n> $")

    @parameterized.parameters(
        (["--model_name_or_path", "{folder}"], "--model_name_or_path .*: no tokenizer there"),
        (["--interactive", "--generation_num_beams", "0"], "--generation_num_beams 0: must be at least 1"),
        (["--generation_max_length", "0"], "--generation_max_length 0: must be at least 1"),
        (["--push_to_hub"], "--push_to_hub: an evaluation uploads nothing"),
        (["--interactiv"], "--interactiv: no such flag; did you mean --interactive"),
    )
    def test_refused(self, flags, message):
        argv = [word.format(folder=self.folder) for word in flags]
        argv += ["--interactive"] if "--interactive" not in argv else []
        argv += [] if "--model_name_or_path" in argv else ["--model_name_or_path", str(workspace() / "whole")]
        _, _, error = run_main(evaluate_t5.main, *argv, code=2)
        self.assertRegex(error, message)


class GapsTest(parameterized.TestCase):
    @parameterized.parameters("T5's", "with added tokens")
    def test_a_prompt_has_the_ids_of_pre_training(self, kind):
        """Any token of a text is masked, and the text around it given as a prompt."""
        tokenizer = load_tokenizer(str(workspace() / "tokenizer"))
        if kind != "T5's":
            tokenizer, _ = add_tokens(tokenizer, ["\n", "{"])
        sentinels, tried = find_sentinel_ids(tokenizer).tolist(), 0
        encode, with_gaps = plain_encoder(tokenizer), samples.gap_encoder(tokenizer, sentinels)
        for line in sentences(40, seed=3):
            ids = list(encode([line])[0])
            tokens = tokenizer.convert_ids_to_tokens(ids)
            for place in range(len(tokens)):
                before, token, after = "".join(tokens[:place]), tokens[place], "".join(tokens[place + 1 :])
                if before.endswith("▁") or tokenizer.unk_token_id in ids:
                    continue  # a space before the gap is taken for a part of what is masked
                space = " " if token.startswith("▁") and place else ""
                text = f"{before}{space}<extra_id_0>{after}".replace("▁", " ").strip()
                wanted = [*ids[:place], sentinels[0], *ids[place + 1 :], tokenizer.eos_token_id]
                self.assertEqual(with_gaps(text), wanted, text)
                tried += 1
        self.assertGreater(tried, 500)

    def test_several_gaps_and_what_is_none(self):
        tokenizer, _ = add_tokens(load_tokenizer(str(workspace() / "tokenizer")), ["{", "[NLU]"])
        sentinels = find_sentinel_ids(tokenizer).tolist()
        encode, with_gaps = plain_encoder(tokenizer), samples.gap_encoder(tokenizer, sentinels[:2])
        ids = [[*encode([text])[0]] for text in ("bada", "kuli", "bada<extra_id_7> kuli")]
        brace, mode, _ = tokenizer.convert_tokens_to_ids(["{", "[NLU]", "bada"])
        one, two, *_ = sentinels
        for line, wanted in (
            ("bada <extra_id_0> <extra_id_1> kuli", [*ids[0], one, two, *ids[1]]),
            ("<extra_id_1>{ kuli", [two, brace, *ids[1]]),
            ("[NLU] bada <extra_id_0>", [mode, *ids[0], one]),
            ("bada<extra_id_7> kuli <extra_id_0>", [*ids[2], one]),
        ):
            self.assertEqual(with_gaps(line), [*wanted, 1], line)

    def test_bytes_keep_their_spaces(self):
        tokenizer = ByT5Tokenizer()
        with_gaps = samples.gap_encoder(tokenizer, [258, 257])
        wanted = [[byte + 3 for byte in text.encode()] for text in ("é ", ".")]
        self.assertEqual(with_gaps("é <extra_id_0>."), [*wanted[0], 258, *wanted[1], 1])


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
