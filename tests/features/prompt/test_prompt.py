"""predict_t5.py --interactive: gaps are filled and tasks are done, at a prompt or through a pipe."""

import contextlib
import dataclasses
import io
import json
import shutil
import sys
from pathlib import Path
from unittest import mock

import zoo
from absl.testing import parameterized
from helpers import run_main, sentences
from test_export_checkpoint import TestCase, workspace
from test_zoo import animal, place, pre_train, script
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer

import constants
import predict_t5
from create_tokenizer import add_tokens
from data_collator_t5 import find_sentinel_ids
from features.prompt.prompt import answers_to, prompt, spans
from foundry.corpora.sentinels import sentinel_encoder
from foundry.corpora.tokenizers import load_tokenizer, plain_encoder
from foundry.model_t5 import load_model
from foundry.modeling.decoding import Answer
from foundry.modeling.found_answers import Engine
from foundry.publishing.exports import encode
from tasks.answering import tokenise
from tasks.entry import TaskEntry
from tasks.examples import build_tokenize_function
from tasks.predictions import PLAIN

ROOT = Path(constants.__file__).parent


class SpansTest(parameterized.TestCase):
    @parameterized.parameters(
        ([99, 5, 6, 98, 7, 1, 8], {0: [5, 6], 1: [7]}),  # what stands after EOS does not count
        ([0, 4, 98, 7, 99, 5], {1: [7], 0: [5]}),  # nor what stands before the first sentinel
        ([99, 5, 99, 6, 98, 7], {0: [5], 1: [7]}),  # nor a sentinel that comes again
        ([99, 98, 1], {0: [], 1: []}),
        ([5, 6], {}),
    )
    def test_spans(self, ids, expected):
        self.assertEqual(spans(ids, [99, 98, 97], 1), expected)


class FixedEngine(Engine):
    """Its answer to every source is these ids. read: the sources."""

    def __init__(self, *ids: int):
        self.ids, self.read = ids, []

    def find(self, sources, *_, **__):
        for source in sources:
            source.answers = [Answer([*self.ids])]
            self.read.append(source.ids)

    def score(self, *_):
        raise NotImplementedError


class PromptTest(TestCase):
    def setUp(self):
        super().setUp()
        self.tokenizer = load_tokenizer(str(workspace() / "tokenizer"))

    def answers(self, written: str, lines: list[str]) -> list[str]:
        engine = FixedEngine(*self.tokenizer(written).input_ids)
        return list(answers_to(lines, engine, self.tokenizer))

    def run_script(self, lines: str, *flags, model=None, code=None) -> tuple[dict, str, str]:
        flags = ("--model_name_or_path", model or workspace() / "whole", "--use_cpu", *flags)
        with mock.patch("sys.stdin", io.StringIO(lines)):
            return run_main(predict_t5.main, "--interactive", *flags, code=code)

    def test_sentinels_are_filled_in_the_users_own_text(self):
        written = "<extra_id_0> bada <extra_id_1> kuli"
        lines = ["Unknown Ж <extra_id_0>, or <extra_id_1>!", "", " only <extra_id_1> \n", "<extra_id_7>?"]
        expected = ["Unknown Ж bada, or kuli!", "only kuli", "<extra_id_7>?"]
        self.assertEqual(self.answers(written, lines), expected)

    def test_a_line_without_sentinels_is_a_task(self):
        self.assertEqual(self.answers("bada kuli", ["summarize: bada"]), ["bada kuli"])

    def test_the_answer_is_what_generate_gives(self):
        model = load_model(str(workspace() / "whole")).eval()
        ids = self.tokenizer("bada kuli", return_tensors="pt").input_ids
        for beams in (1, 3):
            search = dict(max_new_tokens=8, num_beams=beams, do_sample=False)
            wanted = self.tokenizer.decode(model.generate(ids, **search)[0], skip_special_tokens=True).strip()
            _, printed, _ = self.run_script("bada kuli\n", "--max_new_tokens", 8, "--num_beams", beams)
            self.assertEqual(printed, f"{wanted}\n")

    def test_a_task_is_read_as_in_fine_tuning(self):
        """CodeT5's tokenizer begins a text with <s>; pre-training, which cuts running text, does not."""
        words, engine = load_tokenizer(str(workspace() / "tokenizer")), FixedEngine(1)
        content = words.backend_tokenizer
        content.post_processor = TemplateProcessing(single="<unk> $A </s>", special_tokens=[("<unk>", 2), ("</s>", 1)])
        list(answers_to(["bada kuli", "bada <extra_id_0>"], engine, words))
        self.assertEqual(engine.read[0], words("bada kuli")["input_ids"])
        self.assertEqual([ids[0] == 2 for ids in engine.read], [True, False])

    def test_piped_through_the_script(self):
        lines, flags = "bada <extra_id_0> kuli\n\nbada\n", ("--max_new_tokens", 5, "--max_source_length", 3)
        _, printed, error = self.run_script(lines, *flags)
        read = self.tokenizer.decode(self.tokenizer("bada", max_length=3, truncation=True)["input_ids"])
        self.assertEqual(error.splitlines()[-1], f"the model reads: {read}")
        self.assertRegex(error, "the model reads: bada *<extra_id_0>")
        self.assertLen(printed.splitlines(), 2)
        self.assertRegex(printed.splitlines()[0], "^bada .* kuli$")

    def test_a_line_is_read_as_it_is_typed(self):
        """Also by a model of several tasks, and uncut."""
        tuned = shutil.copytree(workspace() / "whole", self.folder / "tuned")
        (tuned / "task.json").write_text(json.dumps(dict(benchmark="glue", dataset_name="cola,rte")))
        line = " ".join(["bada"] * 600)
        _, _, error = self.run_script(f"{line}\n", model=tuned)
        read = self.tokenizer.decode(self.tokenizer(line).input_ids)
        self.assertEqual(error.splitlines()[-1], f"the model reads: {read}")

    def test_a_terminal_is_asked(self):
        stdin = io.StringIO("bada\n")
        stdin.isatty = lambda: True
        plan = mock.Mock(tokenizer=self.tokenizer, args=mock.Mock(seed=1, max_source_length=None))
        with mock.patch("sys.stdin", stdin), contextlib.redirect_stdout(io.StringIO()) as printed:
            prompt(plan, FixedEngine(1))
        self.assertRegex(printed.getvalue(), "^> .*\n> $")

    @parameterized.parameters(
        (["--num_beams", "0"], "--num_beams 0: .* 1"),
        (["--max_new_tokens", "0"], "--max_new_tokens 0: .* 1"),
        (["--interactiv"], "--interactiv: .* --interactive"),
        (["--input_file", "x"], "--input_file x: .* --interactive"),
        (["--source_prefix", "x"], "--source_prefix x: .* --interactive"),
        (["--num_return_sequences", "2"], "--num_return_sequences 2: .* --interactive"),
        (["--web"], "--interactive.*: excludes --web"),
    )
    def test_refused(self, flags, named):
        self.assertRegex(self.run_script("", *flags, code=2)[-1], named)

    def test_a_folder_without_a_model_is_refused(self):
        self.assertRegex(self.run_script("", model=self.folder, code=2)[-1], "--model_name_or_path .*tokenizer")


class GapsTest(parameterized.TestCase):
    @parameterized.parameters("T5's", "with added tokens")
    def test_a_prompt_has_the_ids_of_pre_training(self, kind):
        """Any token of a text is masked, and the text around it given as a prompt."""
        tokenizer = load_tokenizer(str(workspace() / "tokenizer"))
        if kind != "T5's":
            tokenizer, _ = add_tokens(tokenizer, ["\n", "{"])
        sentinels, tried = find_sentinel_ids(tokenizer).tolist(), 0
        encode, with_sentinels = plain_encoder(tokenizer), sentinel_encoder(tokenizer, sentinels)
        for line in sentences(40, seed=3):
            ids = list(encode([line])[0])
            tokens = tokenizer.convert_ids_to_tokens(ids)
            for number in range(len(tokens)):
                before, token, after = "".join(tokens[:number]), tokens[number], "".join(tokens[number + 1 :])
                if before.endswith("▁") or tokenizer.unk_token_id in ids:
                    continue  # a space before the gap is taken for a part of what is masked
                space = " " if token.startswith("▁") and number else ""
                text = f"{before}{space}<extra_id_0>{after}".replace("▁", " ").strip()
                wanted = [*ids[:number], sentinels[0], *ids[number + 1 :], tokenizer.eos_token_id]
                self.assertEqual(with_sentinels(text), wanted, text)
                tried += 1
        self.assertGreater(tried, 500)

    def test_several_sentinels_and_what_is_none(self):
        tokenizer, _ = add_tokens(load_tokenizer(str(workspace() / "tokenizer")), ["{", "[NLU]"])
        sentinels = find_sentinel_ids(tokenizer).tolist()
        encode, with_sentinels = plain_encoder(tokenizer), sentinel_encoder(tokenizer, sentinels[:2])
        ids = [[*encode([text])[0]] for text in ("bada", "kuli", "bada<extra_id_700> kuli")]
        brace, mode, _ = tokenizer.convert_tokens_to_ids(["{", "[NLU]", "bada"])
        one, two, *_ = sentinels
        for line, wanted in (
            ("bada <extra_id_0> <extra_id_1> kuli", [*ids[0], one, two, *ids[1]]),
            ("<extra_id_1>{ kuli", [two, brace, *ids[1]]),
            ("[NLU] bada <extra_id_0>", [mode, *ids[0], one]),
            ("bada<extra_id_700> kuli <extra_id_0>", [*ids[2], one]),
        ):
            self.assertEqual(with_sentinels(line), [*wanted, 1], line)

    def test_bytes_keep_their_spaces(self):
        tokenizer = ByT5Tokenizer()
        with_sentinels = sentinel_encoder(tokenizer, [258, 257])
        wanted = [[byte + 3 for byte in text.encode()] for text in ("é ", ".")]
        self.assertEqual(with_sentinels("é <extra_id_0>."), [*wanted[0], 258, *wanted[1], 1])


class FamiliesTest(parameterized.TestCase):
    @parameterized.parameters(*zoo.FAMILIES)
    def test_a_prompt_writes_the_published_ids(self, family):
        folder, words = animal(family)
        tokenizer, sentinels = load_tokenizer(str(folder)), zoo.sentinel_ids(family, words)
        bada, dile = (tokenizer(word, add_special_tokens=False).input_ids for word in ("bada", "dile"))
        engine = FixedEngine(sentinels[0], *bada, sentinels[1], *dile, 1)
        (answer,) = answers_to(["Bo <extra_id_0> ri<extra_id_1>li."], engine, tokenizer)
        self.assertEqual(answer, "Bo bada ridileli.")
        (given,) = engine.read
        self.assertEqual([number for number in given if number in sentinels], sentinels[:2])
        self.assertEqual(given[0] if family in zoo.GEMMA else given[-1], 2 if family in zoo.GEMMA else 1)

    @parameterized.parameters(*zoo.FAMILIES)
    def test_every_entry_point_reads_a_sentinel_as_the_prompt(self, family):
        """The sentinels with which the family was trained: published ids, as the zoo has them."""
        folder, words = animal(family)
        tokenizer, sentinels = load_tokenizer(str(folder)), zoo.sentinel_ids(family, words)
        text, engine = "Bo <extra_id_0> ri<extra_id_1>li.", FixedEngine(1)
        list(answers_to([text, "Bo rili."], engine, tokenizer))
        wanted, plain = engine.read
        task = dataclasses.replace(PLAIN, inputs={"": "text"})
        self.assertEqual([number for number in wanted if number in sentinels], sentinels[:2])
        plan = mock.Mock(tokenizer=tokenizer, entry=TaskEntry(max_source_length=100))
        rows = {"text": [text, "Bo rili."], "prediction": ["a", "b"]}
        entry_points = {
            "file, server and page": tokenise([text, "Bo rili."], plan),
            "export": encode(tokenizer, [text, "Bo rili."]),
            "training": build_tokenize_function("x", task, tokenizer, 100, 8)(rows)["input_ids"],
        }
        for entry_point, found in entry_points.items():
            self.assertEqual([list(map(int, ids)) for ids in found], [wanted, plain], entry_point)
        ends = wanted[:1] + wanted[1:4] if family in zoo.GEMMA else [*wanted[:3], 1]
        plan.entry = TaskEntry(max_source_length=4)
        self.assertEqual(tokenise([text], plan), [ends])

    def test_mt5_goes_on_with_other_words(self):
        """`--tokenizer_name` of a T5 for an mT5: training and the prompt find the sentinels of the new one."""
        out = place() / "renamed"
        _, printed = pre_train(animal("mt5")[0], out, tokenizer_name=animal("t5_v1_1")[0], max_steps=1, warmup_steps=0)
        self.assertRegex(printed, r"vocabulary +2\d\d tokens keep their embeddings")
        with mock.patch.object(sys, "stdin", io.StringIO("Bada <extra_id_0>.\n")):
            _, answer = script(predict_t5, "--interactive", "--use_cpu", model_name_or_path=out, max_new_tokens=3)
        self.assertRegex(answer, r"Bada .*\.")
