"""Tokenizers of single letters and of bytes: create_tokenizer.py --pieces characters, --tokenizer_name bytes.

Each letter of a source is one token and each symbol between spaces of a target, in training, evaluation and prediction.
The ids are sentencepiece's own. Text is made here.
"""

import contextlib
import functools
import io
import itertools
import json
import re
import shlex
import tempfile
from pathlib import Path
from types import SimpleNamespace

import sentencepiece
from absl.testing import parameterized
from helpers import run_main
from transformers import AutoTokenizer, ByT5Tokenizer

import create_tokenizer
import evaluate_t5
import fine_tune_t5
import pre_train_t5
import predict_t5
from data_collator_t5 import find_sentinel_ids
from foundry.arguments.task import TaskArguments
from foundry.corpora.tokenizers import decoded, encode_targets, load_tokenizer, tokenizer_fingerprint
from foundry.report.losses import described_losses, round_trip
from foundry.report.unknown import LetterCounts
from tasks.mixture import Tasks
from tasks.report import described_few_rows
from tasks.task import LoadedTask

# Letters in parts (NFD), jamo and their syllable, ʲ, tie bars, ligature and fullwidth letter, which NFKC would change.
PAIRS = [
    ("aalst", "aː l s t"),
    ("abba", "ɒ bː ɒ"),
    ("ploaie", "p lʷ a j e"),
    ("e\u0301te\u0301", "e t e"),
    ("ᆯ지", "ʎ t͡ɕ͈ i"),
    ("ㄱ걷", "k ʌ̹ t̚"),
    ("ﬁＡ", "f i aʲ"),
    ("a", "a"),
]


@functools.cache
def workspace() -> Path:
    folder = Path(tempfile.mkdtemp())
    write(folder / "pairs.tsv", PAIRS)
    make(folder / "tokenizer", "--train_file", folder / "pairs.tsv", "--source_column", 0, "--target_column", 1)
    return folder


def write(path: Path, pairs: list) -> Path:
    path.write_text("".join("\t".join(row) + "\n" for row in pairs), encoding="utf-8")
    return path


def make(folder: Path, *flags, code=None) -> str:
    pieces = () if "--pieces" in flags else ("--pieces", "characters")
    _, printed, errors = run_main(create_tokenizer.main, *pieces, *flags, "--output_dir", folder, code=code)
    return printed + errors


class CharactersTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.tokenizer = load_tokenizer(str(workspace() / "tokenizer"))
        self.sources, self.targets = (list(side) for side in zip(*PAIRS, strict=True))

    def test_letters_and_symbols_are_tokens(self):
        for source, target in PAIRS:
            self.assertEqual(self.tokenizer.tokenize(source), list(source))
            (ids,) = encode_targets(self.tokenizer, [target])
            wanted = [f"▁{symbol}" for symbol in target.split(" ")]
            self.assertEqual(self.tokenizer.convert_ids_to_tokens(ids), [*wanted, "</s>"])

    def test_texts_are_read_back_as_they_are(self):
        self.assertEqual(decoded(self.tokenizer, self.tokenizer(self.sources)["input_ids"]), self.sources)
        odd = ["", "aː  t", " aː", "lʷs aːt͡", "x" * 3]
        for targets in (self.targets, odd[:-1]):
            self.assertEqual(decoded(self.tokenizer, encode_targets(self.tokenizer, targets)), targets)
        self.assertIn(2, encode_targets(self.tokenizer, odd)[-1])

    def test_an_unknown_symbol_falls_to_its_letters(self):
        (ids,) = encode_targets(self.tokenizer, ["bʲ lː"])
        self.assertEqual(self.tokenizer.convert_ids_to_tokens(ids), ["▁", "b", "ʲ", "▁l", "ː", "</s>"])

    def test_ids_are_sentencepieces_and_autotokenizers(self):
        folder = workspace() / "tokenizer"
        processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
        texts = [*self.sources, *(f" {target}" for target in self.targets), "aalst aː l s t", "  xя ", "b\u0301 e"]
        ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        self.assertEqual(ids, processor.encode(texts))
        self.assertEqual(AutoTokenizer.from_pretrained(folder)(texts, add_special_tokens=False)["input_ids"], ids)

    def test_letters_are_taken_apart_and_symbols_are_not(self):
        pairs = write(self.folder / "pairs.tsv", [("\u00e9t\u00e9", "\u00e7 t \u0065\u0301"), ("\ud55c", "h a n")])
        columns = ("--train_file", pairs, "--source_column", 0, "--target_column", 1)
        make(self.folder / "t", *columns, "--normalization", "nfd")
        for load in (load_tokenizer, AutoTokenizer.from_pretrained):
            tokenizer = load(str(self.folder / "t"))
            self.assertEqual(tokenizer.tokenize("\u00e9t\ud55c"), [*"e\u0301t\u1112\u1161\u11ab"])
            target = "\u00e7 t \u0065\u0301"
            ids = encode_targets(tokenizer, [target])
            self.assertEqual(tokenizer.convert_ids_to_tokens(ids[0]), ["▁\u00e7", "▁t", "▁\u0065\u0301", "</s>"])
            self.assertEqual(decoded(tokenizer, ids), [target])
            losses, _ = round_trip(tokenizer, ["\u00e9t\u00e9"])
            self.assertEqual(losses.kinds, {"letters taken apart (NFD)": 1})
            self.assertEqual(described_losses({"train": {"sources": losses}}), "nothing, of 1 texts tried")

    def test_special_tokens_and_sentinels(self):
        roles = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, self.tokenizer.unk_token_id
        self.assertEqual(roles, (0, 1, 2))
        self.assertLess(len(self.tokenizer), 300)
        last = len(self.tokenizer) - 1
        self.assertEqual(find_sentinel_ids(self.tokenizer).tolist(), list(range(last, last - 100, -1)))

    def test_saving_keeps_the_rule_of_targets_which_the_fingerprint_knows(self):
        self.tokenizer.save_pretrained(self.folder)
        again = load_tokenizer(str(self.folder))
        self.assertEqual(encode_targets(again, self.targets), encode_targets(self.tokenizer, self.targets))
        self.assertEqual(tokenizer_fingerprint(again), tokenizer_fingerprint(self.tokenizer))
        path = self.folder / "tokenizer_config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({name: value for name, value in config.items() if name != "target_prefix"}))
        self.assertNotEqual(tokenizer_fingerprint(load_tokenizer(str(self.folder))), tokenizer_fingerprint(again))

    def test_a_tag_is_a_token_that_is_added(self):
        added = ("--from_tokenizer", workspace() / "tokenizer", "--add_tokens", "<dut>")
        run_main(create_tokenizer.main, *added, "--output_dir", self.folder / "t")
        tokenizer = load_tokenizer(str(self.folder / "t"))
        self.assertEqual(tokenizer.tokenize("<dut>aalst"), ["<dut>", *"aalst"])
        self.assertEqual(encode_targets(tokenizer, self.targets), encode_targets(self.tokenizer, self.targets))


class SourcesTest(parameterized.TestCase):
    @parameterized.parameters("jsonl", "csv", "two tsv", "header")
    def test_files_of_the_same_pairs_give_the_same_tokenizer(self, kind):
        columns, files = ("word", "phones"), [self.folder / f"pairs.{kind}"]
        if kind == "jsonl":
            lines = [json.dumps(dict(zip(columns, pair, strict=True))) for pair in PAIRS]
            files[0].write_text("\n".join(lines))
        elif kind == "csv":
            files[0].write_text("\n".join(map(",".join, [columns, *PAIRS])))
        elif kind == "header":
            files = [write(self.folder / "a.tsv", [columns, *PAIRS])]
        else:
            columns = (0, 1)
            files = [write(self.folder / "a.tsv", PAIRS[:3]), write(self.folder / "b.tsv", PAIRS[3:])]
        make(
            self.folder / "out",
            *("--train_file", *files, "--source_column", columns[0], "--target_column", columns[1]),
        )
        found = [load_tokenizer(str(folder)) for folder in (self.folder / "out", workspace() / "tokenizer")]
        self.assertEqual(*map(tokenizer_fingerprint, found))

    def test_a_text(self):
        (self.folder / "text.txt").write_text("to be\nor not\n")
        printed = make(
            self.folder / "out", "--train_file", self.folder / "text.txt", "--extra_ids", 5, "--config_name", "tiny"
        )
        self.assertRegex(printed, r"\ntokens +15, sentinels 14 to 10\n")  # 3 special ones, space, b e n o r t
        tokenizer = load_tokenizer(str(self.folder / "out"))
        self.assertEqual(tokenizer.tokenize("to be"), list("to▁be"))
        self.assertEqual(encode_targets(tokenizer, ["to be"]), tokenizer(["to be"])["input_ids"])

    @parameterized.parameters(
        (PAIRS, {"--source_column": 0, "--target_column": 1, "--tsv_header": "false"}),
        (
            [("word", "phones"), *PAIRS],
            {"--source_column": "word", "--target_column": "phones", "--config_name": "tiny"},
        ),
    )
    def test_the_next_command_runs(self, rows, flags):
        words = itertools.chain.from_iterable(flags.items())
        pairs = write(self.folder / "my pairs.tsv", rows)
        printed = make(self.folder / "out", "--train_file", pairs, *words)
        _, script, *words = shlex.split(re.search("(?m)^next +(.*)$", printed)[1])
        quiet = ["--report_to", "none", "--use_cpu", "--dry_run", "--output_dir", self.folder / "model"]
        quiet += ["--data_cache_dir", self.folder / "cache", "--per_device_train_batch_size", 2]
        _, printed, _ = run_main(fine_tune_t5.main, *words, *quiet, code=0)
        self.assertEqual(script, "fine_tune_t5.py")
        self.assertRegex(printed, r"\nrows +7 of 7 train, 1 of 1 validation\n")
        self.assertRegex(printed, "smallest sequence_error_rate is best")
        self.assertRegex(printed, r"\nfew rows +7 from scratch: --optim muon --learning_rate 5e-2 .*--max_steps 1600")

    @parameterized.parameters(
        (
            800,
            ("label_smoothing_factor",),
            "--optim muon --learning_rate 5e-2 --weight_decay 0.05 --warmup_steps 20 --max_steps 1600",
        ),
        (8000, ("learning_rate", "label_smoothing_factor"), "--max_steps 3000"),
        (
            29_000,
            ("warmup_steps", "label_smoothing_factor", "num_train_epochs"),
            "--optim muon --learning_rate 5e-2 --weight_decay 0.0125",
        ),
        (800, ("optim", "num_train_epochs", "dropout_rate"), "--label_smoothing_factor 0.1"),
        (800, ("optim", "label_smoothing_factor", "max_steps"), None),
        (80_000, (), None),
    )
    def test_what_a_plan_proposes_for_few_rows(self, rows, given, flags):
        task = SimpleNamespace(entry=SimpleNamespace(target_type="text"), data={"train": range(rows)})
        wanted = flags and f"{rows:,} from scratch: {flags}, in batches of 64, did better (docs/defaults.md)"
        self.assertEqual(described_few_rows([task], given), wanted)
        self.assertIsNone(described_few_rows([task, task], given))
        task.entry.target_type = "class"
        self.assertIsNone(described_few_rows([task], given))

    @parameterized.parameters(
        (["--vocab_size", 60, "--extra_ids", 20], "--vocab_size 60: .* needs [0-9]+ tokens"),
        (
            ["--normalization", "nmt_nfkc"],
            "--normalization nmt_nfkc: nfd is for --pieces characters",
        ),
        (["--byte_fallback", "true"], "--byte_fallback True: is for SentencePiece"),
        (["--character_coverage", 0.99], "--character_coverage 0.99: is for SentencePiece"),
        (["--max_sentences", 5], "--max_sentences 5: is for SentencePiece"),
        (["--pieces", "unigram"], "--source_column 0: is for --pieces characters"),
        (["--extra_ids", -1], "--extra_ids -1: must be at least 0"),
        (["--validation_file", "{pairs}"], "--validation_file .*: is for text"),
        (["--target_column", 2], r"pairs.tsv, row 1: no column 2, which task pairs needs; available: 0, 1(?=\n)"),
        (["--train_file", "{three}"], "three.tsv, line 2: 3 fields, the lines before have 2"),
        (["--train_file", "{unspaced}"], "--target_column 1: 3 of 4 targets .*, such as wɝd, .* w ɝ d"),
        (["--train_file", "{blank}"], "there is no text to take letters from"),
    )
    def test_refused(self, flags, message):
        names = {"pairs": workspace() / "pairs.tsv"}
        names["three"] = write(self.folder / "three.tsv", [PAIRS[0], (*PAIRS[1], "x")])
        names["unspaced"] = write(
            self.folder / "unspaced.tsv", [PAIRS[0], ("word", "wɝd"), ("a", "ɑː"), ("bee", "biː")]
        )
        names["blank"] = write(self.folder / "blank.tsv", [(" ", ""), (" ", "")])
        given = {"--train_file": names["pairs"], "--source_column": 0, "--target_column": 1}
        words = [str(word).format(**names) for word in flags]
        for flag, value in given.items():
            if flag not in words:
                words += [flag, value]
        printed = make(self.folder / "out", *words, code=2)
        self.assertRegex(printed, f"error: [^\n]*({message})[^\n]*\n$")
        self.assertFalse((self.folder / "out").exists())

    def test_single_symbols_that_repeat_are_no_unspaced_targets(self):
        pairs = write(self.folder / "pairs.tsv", [("one", "NOUN"), ("two", "NOUN"), ("go", "VERB"), ("see", "VERB")])
        make(self.folder / "out", "--train_file", pairs, "--source_column", 0, "--target_column", 1)

    def test_rows_without_symbols_are_counted_and_named(self):
        pairs = write(self.folder / "pairs.tsv", [PAIRS[0], ("b", ""), PAIRS[1], ("c", " ")])
        printed = make(self.folder / "out", "--train_file", pairs, "--source_column", 0, "--target_column", 1)
        self.assertRegex(printed, r"\nempty +2 targets, of rows 2, 4\n")

    def test_an_odd_rule_of_targets_is_refused(self):
        load_tokenizer(str(workspace() / "tokenizer")).save_pretrained(self.folder)
        path = self.folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"target_prefix": 5}))
        with self.assertRaisesRegex(Exception, "target_prefix 5 of tokenizer_config.json"):
            load_tokenizer(str(self.folder))


TINY = ("--config_name", "tiny", "--config_overrides", "d_model=16,num_layers=1,num_decoder_layers=1,d_ff=16,d_kv=4")


class RunsTest(parameterized.TestCase):
    """Training, evaluation and prediction see the same tokens."""

    def flags(self, train: Path, validation: Path) -> list:
        pairs = ["--train_file", train, "--validation_file", validation, "--source_column", 0, "--target_column", 1]
        quiet = ["--report_to", "none", "--use_cpu", "--max_steps", 1, "--warmup_steps", 0]
        metrics = ["--metrics", "sequence_error_rate,token_error_rate", "--per_device_train_batch_size", 8]
        folders = ["--output_dir", self.folder / "model", "--data_cache_dir", self.folder / "cache"]
        return [*pairs, *quiet, *metrics, *folders, "--tokenizer_name", workspace() / "tokenizer", *TINY]

    def test_from_training_to_prediction(self):
        train = workspace() / "pairs.tsv"
        known = [("b" * 9, "a l s t a l s t")] * 4
        validation = write(self.folder / "dev.tsv", [("aяa", "aː"), ("ab", "bʘ"), ("bя걸", "b"), *known])
        flags = self.flags(train, validation)
        results, printed, _ = run_main(fine_tune_t5.main, *flags)
        lost = r"no token for 2 letters \(texts that have them\): я \(2\), 걸 \(1\)"
        self.assertRegex(printed, rf"\nunknown +{lost} \(validation sources\)")
        self.assertRegex(printed, r"no token for 1 letters \(texts that have them\): ʘ \(1\) \(validation targets\)")
        self.assertRegex(printed, "smallest sequence_error_rate is best")
        self.assertEqual(results["eval_sequence_error_rate"], 1)
        model = ("--model_name_or_path", self.folder / "model", "--use_cpu")
        again, _, _ = run_main(evaluate_t5.main, *model, "--data_cache_dir", self.folder)
        same = ("eval_token_error_rate", "eval_sequence_error_rate", "eval_loss")
        self.assertEqual([again[name] for name in same], [results[name] for name in same])
        further = [self.folder / "further" if flag == self.folder / "model" else flag for flag in flags[: -len(TINY)]]
        _, printed, _ = run_main(fine_tune_t5.main, *further, *model[:2], "--dry_run", code=0)
        self.assertNotIn("few rows", printed)
        inputs = self.folder / "in.txt"
        inputs.write_text("ab\naяa\n걸я\n")
        predict = (*model, "--max_new_tokens", 4, "--input_file")
        _, printed, _ = run_main(predict_t5.main, *predict, inputs)
        self.assertRegex(printed, rf"\nunknown +{lost}\n")
        inputs.write_text("걸\n\nя걸\n")
        _, _, errors = run_main(predict_t5.main, *predict, inputs, "--output_file", self.folder / "o.jsonl", code=2)
        self.assertRegex(errors, r"error: --input_file .*in.txt: no letter has a token, such as 걸")
        self.assertFalse((self.folder / "o.jsonl").exists())

    @parameterized.parameters((None, True), (["token_error_rate"], False))
    def test_rouge_of_symbols_is_named(self, metrics, is_named):
        files = dict(train_file=[str(workspace() / "pairs.tsv")], validation_file=[str(workspace() / "pairs.tsv")])
        columns = dict(source_column=["0"], target_column=["1"], data_cache_dir=str(self.folder))
        (task,) = Tasks.of_flags(TaskArguments(**files, **columns, metrics=metrics))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            LoadedTask(task, task.read(["train", "validation"]), load_tokenizer(str(workspace() / "tokenizer")))
        said = printed.getvalue()
        self.assertEqual(said.count("--metrics sequence_error_rate,token_error_rate"), is_named, said)

    def test_a_text_of_unknown_letters_alone_is_refused(self):
        """Three of 16 tokens are <unk>, of a split whose sources say nothing."""
        others = write(self.folder / "dev.tsv", [("яя", "a l s t a l s t"), ("걸", "a l s t")])
        flags = [*self.flags(workspace() / "pairs.tsv", others), "--most_unknown", 1]
        _, _, errors = run_main(fine_tune_t5.main, *flags, code=2)
        self.assertRegex(errors, "error: task pairs, validation: of the sources: no letter has a token, such as я")
        self.assertFalse((self.folder / "model").exists())

    @parameterized.parameters(
        ("é 👍", "é 👍", None),  # a letter in parts that the tokenizer joins is none without a token
        ("bя", None, "я \\(1\\)"),
    )
    def test_letters(self, text, known, named):
        tokenizer = load_tokenizer("bytes") if known else load_tokenizer(str(workspace() / "tokenizer"))
        found = LetterCounts([text]).unknown(tokenizer, "here")
        if named:
            self.assertRegex(found, named)
        else:
            self.assertIsNone(found)


class BytesTest(parameterized.TestCase):
    def test_pre_trained_and_fine_tuned_without_the_hub(self):
        text = self.folder / "text.txt"
        text.write_text("".join(f"{source} {target}\n" for source, target in PAIRS * 60))
        shared = ["--report_to", "none", "--use_cpu", "--max_steps", 1, "--warmup_steps", 0]
        shared += ["--data_cache_dir", self.folder / "cache", "--per_device_train_batch_size", 2]
        shared += ["--gradient_accumulation_steps", 1]
        first, second = self.folder / "first", self.folder / "second"
        run_main(
            pre_train_t5.main,
            *("--train_file", text, "--tokenizer_name", "bytes", "--input_seq_length", 32, "--output_dir", first),
            *shared,
            *TINY,
        )
        config = json.loads((first / "config.json").read_text())
        self.assertEqual(config["vocab_size"], 384)
        pairs = ["--train_file", workspace() / "pairs.tsv", "--source_column", 0, "--target_column", 1]
        pairs += ["--validation_file", workspace() / "pairs.tsv", "--metrics", "token_error_rate"]
        run_main(fine_tune_t5.main, *pairs, *shared, "--model_name_or_path", first, "--output_dir", second)
        for folder in (first, second):
            tokenizer = AutoTokenizer.from_pretrained(folder)
            self.assertIsInstance(tokenizer, ByT5Tokenizer)
            self.assertEqual(tokenizer("é")["input_ids"], [0xC3 + 3, 0xA9 + 3, 1])
            self.assertEqual(tokenizer.get_vocab(), ByT5Tokenizer().get_vocab())

    def test_a_folder_of_this_name_is_a_folder(self):
        self.enter_context(self.in_folder())
        load_tokenizer(str(workspace() / "tokenizer")).save_pretrained("bytes")
        self.assertLess(len(load_tokenizer("bytes")), 300)

    def in_folder(self):
        return contextlib.chdir(self.folder)
