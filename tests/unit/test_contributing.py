"""The feature and the format of exports that CONTRIBUTING.md shows, as its reader would add them; the objective is
NewObjectiveTest's (tests/slow/test_text.py)."""

import json
from unittest import mock

import numpy as np
import torch
from absl.testing import parameterized
from helpers import SMALL_RUN, argv_of, run_main, sentences, write_tiny_model
from page_examples import PAGE, page_modules
from torch.distributions import Categorical
from transformers import T5Config

import export_checkpoint
import fine_tune_t5
import pre_train_t5
from features import FORMATS
from foundry.common.errors import UserError
from foundry.corpora.tokenizers import load_tokenizer
from foundry.model_t5 import load_model
from foundry.publishing.exports import Original, encode, pytorch_answers
from foundry.publishing.file_names import COMPARISON


class ContributingTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.pages = page_modules()

    def test_each_module_and_its_line_of_a_table_are_shown(self):
        self.assertCountEqual(self.pages, ["features.last.last_tokens", "features.confidence", "features.npz.arrays"])
        for name in ("last.last_tokens:LastTokens", "confidence:Confidence", "npz.arrays:FORMAT"):
            self.assertIn(f'"features.{name}"', PAGE)

    def test_the_feature_s_term_has_the_gradient_of_its_values(self):
        logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
        values, slopes = self.pages["features.confidence"].NegativeEntropy().of_chunk(logits.detach(), slice(0, 5))
        wanted = -Categorical(logits=logits).entropy()
        torch.testing.assert_close(values[:, 0], wanted)
        wanted.sum().backward()
        torch.testing.assert_close(slopes, logits.grad)

    @parameterized.parameters((pre_train_t5, {}), (fine_tune_t5, dict(source_column=0, target_column=1)))
    def test_the_feature_trains(self, script, more):
        """It is logged, and a large factor of it drives the answers towards the uniform distribution."""
        write_tiny_model(self.folder / "model", sentences(100), 200)
        (self.folder / "rows.tsv").write_text("".join(f"{text}\t{text[:9]}\n" for text in sentences(40)))
        (self.folder / "text.txt").write_text("\n".join(sentences(300)))
        file = "rows.tsv" if more else "text.txt"
        flags = SMALL_RUN | dict(use_cpu=True, max_steps=12, learning_rate=1e-2, lr_scheduler_type="constant") | more
        flags |= dict(model_name_or_path=self.folder / "model", train_file=self.folder / file, eval_strategy="no")
        flags |= dict(data_cache_dir=self.folder / "cache", save_strategy="no", load_best_model_at_end="false")
        flags |= dict(output_dir=self.folder / "out", confidence_penalty=100)
        if not more:
            flags |= dict(input_seq_length=32)
        with mock.patch.object(script, "FLAGS", [*script.FLAGS, self.pages["features.confidence"].Confidence]):
            run_main(script.main, *argv_of(flags))
        lines = (self.folder / "out" / "metrics.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        entropies = [-line["negative_entropy"] for line in found if "negative_entropy" in line]
        self.assertGreater(entropies[-1], entropies[0])
        self.assertLess(entropies[-1], np.log(256))

    def original(self) -> Original:
        write_tiny_model(self.folder / "model", sentences(100), 200)
        model, tokenizer = load_model(str(self.folder / "model")).eval(), load_tokenizer(str(self.folder / "model"))
        return Original(model, tokenizer, encode(tokenizer, list(export_checkpoint.TEXTS)))

    def test_the_format_is_exported_as_any_other(self):
        args = export_checkpoint.ExportArguments(formats=["npz"])
        texts, folder = list(export_checkpoint.TEXTS), self.folder / "out"
        with mock.patch.dict(FORMATS, npz="features.npz.arrays:FORMAT"):
            found, lines = export_checkpoint.export_model(args, folder, self.original(), texts)
        self.assertEqual(found["npz"]["largest_difference"], 0)
        self.assertStartsWith(lines["npz"], "8 of 8 texts with PyTorch's tokens")
        self.assertCountEqual(
            [path.name for path in (folder / "npz").iterdir()], ["weights.npz", "config.json", COMPARISON]
        )

    def test_the_format_s_comparison_is_of_what_stands_in_the_folder(self):
        """Weights that are written otherwise than they are held are found, and nothing is said to be right."""
        original, save, page = self.original(), np.savez, self.pages["features.npz.arrays"]
        original.answers = pytorch_answers(original.model, original.sources)

        def rounded(path, **weights):
            save(path, **{name: np.asarray(weight).astype(np.float16) for name, weight in weights.items()})

        with mock.patch.object(np, "savez", rounded), self.assertRaisesRegex(UserError, "npz.*nats"):
            page.write("npz", original, self.folder / "npz")

    def test_the_format_refuses_what_it_cannot_hold_before_a_weight_is_read(self):
        config = T5Config(architectures=["T5EncoderModel"])
        with self.assertRaisesRegex(UserError, "npz.*an encoder alone.*give encoder"):
            self.pages["features.npz.arrays"].check(config, "npz")
