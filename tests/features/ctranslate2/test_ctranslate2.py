"""CTranslate2: predict_t5.py --backend ctranslate2 answers as transformers does."""

import itertools
import os
import shutil
import threading
from collections import Counter
from unittest import mock

import ctranslate2
import test_predict_t5
import torch
from absl.testing import parameterized
from test_predict_t5 import LINES, plain_answers, workspace
from transformers import GenerationConfig

from features.ctranslate2.engine import TOKENS, CTranslate2Engine, write_ctranslate2
from foundry.corpora.tokenizers import load_tokenizer
from foundry.model_t5 import load_model
from foundry.publishing.exports import Original, pytorch_tokens


class BackendTest(test_predict_t5.TestCase):
    def test_ctranslate2_gives_the_same(self):
        path = self.write("in.txt", "\n".join(LINES))
        _, wanted, _ = self.predict(path)
        more = ("--backend", "ctranslate2", "--overwrite_output_file", "true", "--model_name_or_path")
        for folder in (workspace() / "export", workspace() / "export" / "ctranslate2"):
            self.assertEqual(self.predict(path, *more, folder)[1], wanted)
        export = shutil.copytree(workspace() / "export", self.folder / "export")
        own = GenerationConfig.from_pretrained(export)
        own.update(num_beams=3, length_penalty=2.0, early_stopping=True)
        own.save_pretrained(export)
        searched = self.predict(path, *more[2:], export)[1]
        self.assertNotEqual(searched, wanted)
        self.assertEqual(self.predict(path, *more, export)[1], searched, "the checkpoint's own beams")
        others = [wanted, searched]
        for rule in (dict(repetition_penalty=3.0), dict(no_repeat_ngram_size=2)):
            GenerationConfig(decoder_start_token_id=0, eos_token_id=1, pad_token_id=0, **rule).save_pretrained(export)
            searched = self.predict(path, *more[2:], export)[1]
            self.assertNotIn(searched, others)
            others.append(searched)
            self.assertEqual(self.predict(path, *more, export)[1], searched, f"the checkpoint's own {rule}")
        _, _, error = self.predict(path, *more, workspace() / "model", code=2)
        self.assertIn("needs a folder that export_checkpoint.py --formats ctranslate2 wrote", error)

    def test_scores_are_those_of_the_whole_source(self):
        """CTranslate2 scores the first 1,024 tokens of a source, unless it is told otherwise."""
        model = load_model(str(self.model)).eval()
        sources, target = torch.randint(5, 150, (2, 1500), generator=torch.Generator().manual_seed(1)), [7, 9, 1]
        with torch.no_grad():
            logits = model(input_ids=sources, labels=torch.tensor([target] * 2)).logits
        wanted = logits.log_softmax(-1)[:, range(3), target]
        engine = CTranslate2Engine(workspace() / "export" / "ctranslate2")
        found = engine.log_probs(sources.tolist(), [target] * 2, eos=1)
        torch.testing.assert_close(torch.tensor(found), wanted, atol=0.01, rtol=0)

    def test_the_thread_that_loads_ends(self):
        """It computes, and while it lived, int8 answers of one text took three to four times as long."""
        loaders, real = [], ctranslate2.Translator

        def load(*words, **options):
            loaders.append(threading.current_thread())
            return real(*words, **options)

        with mock.patch.object(ctranslate2, "Translator", load):
            CTranslate2Engine(workspace() / "export" / "ctranslate2")
        (loader,) = loaders
        self.assertIsNot(loader, threading.current_thread())
        loader.join()

    def test_ctranslate2_forbids_the_tokens_that_transformers_forbids(self):
        path = self.write("in.txt", "\n".join(LINES))
        tokenizer, model = load_tokenizer(str(self.model)), load_model(str(self.model)).eval()
        answers = pytorch_tokens(model, tokenizer(LINES)["input_ids"])
        counted = Counter(pair for tokens in answers for pair in itertools.pairwise(tokens))
        pairs = [list(pair) for pair, _ in counted.most_common(3)]
        single = Counter(token for tokens in answers for token in tokens).most_common(1)[0][0]
        more, seen = ("--overwrite_output_file", "true", "--model_name_or_path"), [plain_answers(LINES)]
        for rules in (dict(suppress_tokens=[single]), dict(bad_words_ids=[*pairs, [single], [1]])):
            export = self.with_settings(**rules)
            wanted = plain_answers(LINES, **rules)
            self.assertNotIn(wanted, seen)
            seen.append(wanted)
            for backend in ("transformers", "ctranslate2"):
                _, rows, printed = self.predict(path, "--backend", backend, *more, export)
                self.assertEqual([row["prediction"] for row in rows], wanted, (backend, rules))
                self.assertRegex(printed, f"search +greedy, {next(iter(rules))} ")

    @parameterized.parameters(
        dict(begin_suppress_tokens=[5]),
        dict(forced_bos_token_id=5),
        dict(forced_eos_token_id=1),
        dict(encoder_no_repeat_ngram_size=2),
        dict(sequence_bias=[[[5], 2.0]]),
    )
    def test_settings_that_ctranslate2_lacks_are_refused(self, **rules):
        path, export = self.write("in.txt", "\n".join(LINES)), self.with_settings(**rules)
        _, rows, error = self.predict(path, "--model_name_or_path", export, "--backend", "ctranslate2", code=2)
        ((name, value),) = rules.items()
        self.assertIn(f"--backend ctranslate2: has nothing like {name} {value} of generation_config.json", error)
        self.assertEmpty(rows)

    def test_a_folder_without_its_model_is_named(self):
        path, folder = self.write("in.txt", "\n".join(LINES)), self.folder / "above" / "alone"
        folder.mkdir(parents=True)
        for name in ("model.bin", "config.json", TOKENS):
            (folder / name).write_text("{}")
        _, rows, error = self.predict(path, "--model_name_or_path", folder, code=2)
        self.assertIn(f"--model_name_or_path {folder}: no tokenizer there: name one with --tokenizer_name", error)
        self.assertEmpty(rows)

    @parameterized.parameters(
        ("model.bin", None, "its model.bin is missing"),
        ("model.bin", b"", "is damaged: .*model.bin"),
        ("model.bin", b"{}" * 999, "is damaged: "),
        ("model.bin", 0.5, "is damaged: "),
        ("model.bin", 0.999, "is damaged: "),
        ("model.bin", "pipe", "its model.bin is no file"),
        ("config.json", b"{", "is damaged: .*"),
        ("config.json", b"[1]", "is damaged: .*"),
        ("config.json", None, "its config.json is missing"),
        (TOKENS, b"[", "is damaged: .*"),
        (TOKENS, b'{"a": 1}', "is damaged: .*"),
        (TOKENS, b"[1, 2]", "is damaged: .*"),
        (TOKENS, b"[[]]", "is damaged: .*"),
        (TOKENS, b"\xff\xfe", "is damaged: .*"),
        (TOKENS, 0.5, "is damaged: .*"),
        (TOKENS, "pipe", "its shared_vocabulary.json is no file"),
        ("comparison.json", b"[]", "comparison.json holds no JSON object"),
        ("comparison.json", b'{"longest_source": "x"}', "comparison.json: longest_source 'x'"),
        ("comparison.json", b'{"longest_answer": -5}', "comparison.json: longest_answer -5"),
        ("comparison.json", b"{", "comparison.json is not JSON"),
        ("comparison.json", "pipe", "its comparison.json is no file"),
    )
    def test_a_damaged_folder_is_named(self, name, content, message):
        """content: None if the file is gone; the part of it that is left."""
        export = shutil.copytree(workspace() / "export", self.folder / "export")
        file = export / "ctranslate2" / name
        whole = file.read_bytes()
        file.unlink()
        if isinstance(content, float):
            file.write_bytes(whole[: int(content * len(whole))])
        elif content == "pipe":
            os.mkfifo(file)
        elif content is not None:
            file.write_bytes(content)
        path = self.write("in.txt", "yes no\n")
        _, rows, error = self.predict(path, "--model_name_or_path", export, "--backend", "ctranslate2", code=2)
        self.assertRegex(error, message)
        self.assertNotIn("Traceback", error)
        self.assertEmpty(rows)

    @parameterized.parameters(0, 4)
    def test_ctranslate2_ends_where_transformers_does(self, least):
        """At once, which CTranslate2's own default forbids, or behind the least length of generation_config.json."""
        export = shutil.copytree(self.model, self.folder / "export")
        tokenizer, model = load_tokenizer(str(export)), load_model(str(export)).eval()
        with torch.no_grad():
            model.lm_head.weight.zero_()
            model.lm_head.weight[1, 0], model.lm_head.weight[5, 0], model.lm_head.weight[6, 1] = 9, -9, 1e-3
        model.generation_config.min_length = least
        model.save_pretrained(export)
        original = Original(model, tokenizer, [tokenizer(line)["input_ids"] for line in LINES])
        write_ctranslate2(original, export / "ctranslate2", None)
        wanted = pytorch_tokens(model, original.sources)
        self.assertIn([1], wanted)
        found = CTranslate2Engine(export / "ctranslate2").tokens(original.sources, dict(beam_size=1))
        self.assertEqual(found, wanted)
        path, more = self.write("in.txt", "\n".join(LINES)), ("--model_name_or_path", export)
        answers = self.predict(path, *more)[1]
        more = ("--backend", "ctranslate2", "--overwrite_output_file", "true", *more)
        self.assertEqual(self.predict(path, *more)[1], answers)
        self.assertEqual("" in [row["prediction"] for row in answers], least == 0)

    def test_the_plan_shows_the_settings_of_the_file(self):
        self.assertIn("CTranslate2 applies no_repeat_ngram_size before", self.check_settings("ctranslate2"))

    @parameterized.parameters("--do_sample", "--bf16")
    def test_what_it_lacks_is_refused(self, flag):
        path = self.write("in.txt", "x\n")
        _, rows, error = self.predict(path, "--backend", "ctranslate2", flag, code=2)
        self.assertRegex(error, "--backend ctranslate2: excludes --bf16, and --do_sample")
        _, rows, error = self.predict(path, "--backend", "ctranslate2", "--dtype", "bfloat16", code=2)
        self.assertRegex(error, "--dtype bfloat16: is PyTorch's: leave it out with --backend ctranslate2")
        self.assertEmpty(rows)
