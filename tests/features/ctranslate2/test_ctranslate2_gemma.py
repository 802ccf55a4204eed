"""T5Gemma and T5Gemma 2 in CTranslate2: written, compared, and answering as transformers does."""

import json
import shutil
from pathlib import Path
from unittest import mock

import torch
import zoo
from absl.testing import parameterized
from helpers import run_main
from transformers import AutoConfig

import export_checkpoint
import predict_t5
from features.ctranslate2.engine import CTranslate2Engine, limits_of_engine
from foundry.corpora.tokenizers import load_tokenizer
from foundry.model_t5 import create_model, load_model
from foundry.publishing.exports import pytorch_answers, pytorch_tokens

WINDOW = 40
NO_CAP = dict(attn_logit_softcapping=None)
# What CTranslate2's own converters leave out.
ODD = dict(query_pre_attn_scalar=9, final_logit_softcapping=3.0)
ROPE = {"rope_type": "default", "rope_theta": 30.0}
LINEAR = {"full_attention": ROPE | {"rope_type": "linear", "factor": 8.0}, "sliding_attention": ROPE}


class GemmaTest(parameterized.TestCase):
    def checkpoint(self, family: str, tied: bool = True, **changes) -> Path:
        """A small model whose weights are so large that its answers differ."""
        folder = self.folder / family
        zoo.write_checkpoint(folder, family)
        config = AutoConfig.from_pretrained(folder)
        config.tie_word_embeddings = tied
        encoder = getattr(config.encoder, "text_config", config.encoder)
        for half in (encoder, config.decoder):
            for name, value in (dict(sliding_window=WINDOW) | changes).items():
                setattr(half, name, value)
        torch.manual_seed(1)
        model = create_model(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 2 or "norm" in name:
                    weight.normal_(0, 0.4)
        model.save_pretrained(folder)
        return folder

    def export(self, source: Path, *formats: str, code: int | None = None) -> tuple[dict, str, str]:
        flags = ("--model_name_or_path", source, "--output_dir", self.folder / "out", "--formats", *formats)
        return run_main(export_checkpoint.main, *flags, code=code)

    def predict(self, *more: object, code: int | None = None) -> tuple[list[dict], str]:
        (self.folder / "in.txt").write_text("Bada\nDile bo bada.\nFuko\n\nBada dile bo fuko ma se nu ti ke go lo.\n")
        flags = ["--input_file", self.folder / "in.txt", "--output_file", self.folder / "a.jsonl"]
        flags += ["--model_name_or_path", self.folder / "out" / ("ctranslate2" if "ctranslate2" in more else "")]
        flags += ["--overwrite_output_file", *([] if "--max_new_tokens" in more else ["--max_new_tokens", 9])]
        _, _, error = run_main(predict_t5.main, *flags, *more, code=code)
        lines = (self.folder / "a.jsonl").read_text().splitlines() if code is None else []
        return [json.loads(line) for line in lines], error

    @parameterized.named_parameters(
        ("t5gemma", "t5gemma", NO_CAP),
        ("t5gemma_odd", "t5gemma", NO_CAP | ODD | {"rope_parameters": ROPE, "tied": False}),
        ("t5gemma2", "t5gemma2", {}),
        ("t5gemma2_odd", "t5gemma2", {"query_pre_attn_scalar": 9, "rope_parameters": LINEAR}),
    )
    def test_answers_and_scores_are_transformers(self, family, changes):
        found, _, _ = self.export(self.checkpoint(family, **changes), "ctranslate2", "ctranslate2_int8")
        self.assertEqual(found["ctranslate2"]["same_tokens"], 8)
        self.assertLess(found["ctranslate2"]["largest_difference"], 1e-4)
        self.assertBetween(found["ctranslate2_int8"]["largest_difference"], 1e-5, 0.25)
        lengths = ("--max_source_length", found["ctranslate2"]["longest_source"])
        for search in ([], ["--num_beams", 3], ["--num_beams", 3, "--num_return_sequences", 3]):
            wanted, _ = self.predict(*search, *lengths)
            rows, _ = self.predict(*search, *lengths, "--backend", "ctranslate2")
            scores = [
                [best.pop("log_probability") for row in answers for best in row.get("n_best", [])]
                for answers in (wanted, rows)
            ]
            self.assertEqual(rows, wanted, search)
            self.assertSequenceAlmostEqual(*scores, places=3)
        self.assertGreater(len({row["prediction"] for row in wanted}), 3)

    def test_a_cap_on_attention_scores_is_left_out_and_said(self):
        """Fails when CTranslate2 gains the cap: then `limits_of` need not name it."""
        found, printed, _ = self.export(self.checkpoint("t5gemma", attn_logit_softcapping=40.0), "ctranslate2")
        self.assertGreater(found["ctranslate2"]["largest_difference"], 1e-3)
        self.assertRegex(
            printed, r"allowed 0.25\); CTranslate2 leaves out the model's cap on attention scores; for sources"
        )

    def test_a_model_that_needs_the_cap_is_not_written(self):
        _, _, error = self.export(self.checkpoint("t5gemma", attn_logit_softcapping=2.0), "ctranslate2", code=2)
        self.assertRegex(
            error, "PyTorch.*: not written, since CTranslate2 leaves out the model's cap on attention scores$"
        )
        self.assertFalse((self.folder / "out").exists())

    def test_texts_longer_than_its_windows_are_refused(self):
        found, printed, _ = self.export(self.checkpoint("t5gemma2"), "ctranslate2")
        self.assertEqual(found["ctranslate2"]["longest_source"], WINDOW // 2)
        self.assertEqual(found["ctranslate2"]["longest_answer"], WINDOW)
        self.assertIn("; for sources of at most 20 tokens", printed)
        refused = {"--max_source_length": 21, "--max_new_tokens": 41}
        for flag, length in refused.items():
            flags = {"--max_source_length": 20} | {flag: length}
            _, error = self.predict(
                "--backend", "ctranslate2", *[word for pair in flags.items() for word in pair], code=2
            )
            self.assertRegex(
                error, f"^.*error: {flag} {length}: CTranslate2 has no windows .* give {flag} {length - 1}, or"
            )

    @parameterized.parameters("t5gemma", "t5gemma2")
    def test_the_limit_is_that_of_the_attention(self, family):
        """Up to the limit transformers' answer does not change without windows; a token more changes it."""
        folder = self.checkpoint(family, sliding_window=8)
        model, limits = load_model(str(folder)).eval(), limits_of_engine(AutoConfig.from_pretrained(folder))
        config = AutoConfig.from_pretrained(folder)
        for half in (getattr(config.encoder, "text_config", config.encoder), config.decoder):
            half.sliding_window = 4096
        open_model = create_model(config).eval()
        open_model.load_state_dict(model.state_dict())
        for source, answer, is_same in ((0, 0, True), (1, 0, False), (0, 1, False)):
            ids = torch.arange(200, 200 + limits["longest_source"] + source)[None]
            written = torch.arange(230, 230 + limits["longest_answer"] + answer)[None]
            with torch.no_grad():
                one, other = (each(input_ids=ids, labels=written).logits for each in (model, open_model))
            self.assertEqual(torch.equal(one, other), is_same, (source, answer))

    def test_a_batch_is_answered_as_each_source_alone(self):
        self.export(self.checkpoint("t5gemma2"), "ctranslate2")
        model = load_model(str(self.folder / "out")).eval()
        engine = CTranslate2Engine(self.folder / "out" / "ctranslate2", one_at_a_time=True)
        sources, seen = [list(range(200, 200 + length)) for length in (3, 17, 9)], {}
        answers = engine.tokens(sources, dict(beam_size=1), lambda row, token: seen.setdefault(row, []).append(token))
        self.assertEqual(answers, pytorch_tokens(model, sources))
        self.assertEqual([seen[row] for row in range(3)], answers)

    @parameterized.parameters(("t5gemma", NO_CAP, 60), ("t5gemma2", {}, 30))
    def test_it_still_has_no_windows(self, family, changes, length):
        """Fails when CTranslate2 gains them: then `limits_of` need not name the longest source."""
        model, engine = self.loaded(family, changes, one_at_a_time=True)
        sources = [list(range(200, 200 + length))]
        (wanted,) = pytorch_answers(model, sources).log_probs
        (found,) = engine.log_probs(sources, [wanted.argmax(-1).tolist()], 1)
        self.assertGreater(abs(found - wanted.max(-1)).max(), 1e-2)

    def test_its_merged_attention_still_has_no_masks(self):
        """Fails when CTranslate2 gains them: then T5Gemma 2 can be answered in batches, and scored by score_batch."""
        model, engine = self.loaded("t5gemma2", {}, one_at_a_time=False)
        sources = [list(range(200, 200 + length)) for length in (3, 17, 9)]
        wanted = pytorch_answers(model, sources)
        self.assertNotEqual(engine.tokens(sources, dict(beam_size=1)), wanted.tokens)
        (found,) = engine.log_probs(sources[:1], wanted.tokens[:1], 1)
        self.assertGreater(abs(found - wanted.log_probs[0].max(-1)).max(), 1e-2)

    def loaded(self, family: str, changes: dict, one_at_a_time: bool) -> tuple:
        """(the model, CTranslate2's engine) of a checkpoint."""
        self.export(self.checkpoint(family, **changes), "ctranslate2")
        engine = CTranslate2Engine(self.folder / "out" / "ctranslate2", one_at_a_time)
        return load_model(str(self.folder / "out")).eval(), engine

    def test_families_that_it_lacks_are_refused_before_a_weight_is_read(self):
        zoo.write_checkpoint(self.folder / "longt5_local", "longt5_local")
        with mock.patch.object(export_checkpoint, "load_model", side_effect=AssertionError):
            _, _, error = self.export(self.folder / "longt5_local", "huggingface", "ctranslate2_int8", code=2)
        self.assertRegex(
            error, "--formats ctranslate2_int8: not for longt5 models, which CTranslate2 lacks. It has t5, "
        )
        self.assertFalse((self.folder / "out").exists())

    def test_an_answer_ends_with_any_of_several_tokens(self):
        """As an instruction-tuned T5Gemma's does."""
        self.export(self.checkpoint("t5gemma", **NO_CAP), "ctranslate2")
        folder, tokenizer = self.folder / "out", load_tokenizer(str(self.folder / "out"))
        plain, _ = self.predict("--max_source_length", 20)
        tokens = tokenizer(plain[0]["prediction"], add_special_tokens=False)["input_ids"]
        settings = json.loads((folder / "generation_config.json").read_text())
        (folder / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [1, tokens[2]]}))
        wanted, _ = self.predict("--max_source_length", 20)
        rows, _ = self.predict("--max_source_length", 20, "--backend", "ctranslate2")
        self.assertEqual(rows, wanted)
        self.assertLess(len(rows[0]["prediction"]), len(plain[0]["prediction"]))
        shutil.rmtree(folder)
