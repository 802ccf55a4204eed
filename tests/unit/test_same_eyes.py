"""What fine-tuning says of its rows, evaluation, answers and exports say too; and a tokenizer that is not the model's.

Hermetic: one tiny model is fine-tuned on rows made here.
"""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

from absl.testing import parameterized
from helpers import run_main, sentences, write_tiny_model

import evaluate_t5
import export_checkpoint
import predict_t5
from foundry.corpora.tokenizers import load_tokenizer, train_tokenizer

LINES = sentences(400)


@functools.cache
def workspace() -> Path:
    """`model`: a tiny one of random weights; `other`: a tokenizer with as many other pieces; `same`: the model's own
    elsewhere; `bare`: the model without a tokenizer."""
    folder = Path(tempfile.mkdtemp(prefix="t5_foundry_eyes_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_tiny_model(folder / "model", LINES, 300)
    train_tokenizer([line.upper() for line in LINES], folder / "other", 300)
    load_tokenizer(str(folder / "model")).save_pretrained(folder / "same")
    bare = shutil.ignore_patterns("tokenizer*", "spiece.model", "special*")
    shutil.copytree(folder / "model", folder / "bare" / "model", ignore=bare)
    (folder / "in.txt").write_text("\n".join(LINES[:4]))
    (folder / "rows.jsonl").write_text("".join(json.dumps({"q": text, "a": text[:9]}) + "\n" for text in LINES[:4]))
    return folder


class TokenizerTest(parameterized.TestCase):
    """Another tokenizer of the same size: answers would be noise, and an export would be called equal."""

    def run_door(self, door: str, model: str, tokenizer: str, code: int | None) -> str:
        place = workspace()
        flags = ["--model_name_or_path", place / model, "--tokenizer_name", place / tokenizer]
        out = ["--output_dir", self.folder / "out"]
        pairs = ["--validation_file", place / "rows.jsonl", "--source_column", "q", "--target_column", "a"]
        cache = ["--data_cache_dir", self.folder / "cache", "--use_cpu", "true"]
        main, more = {
            "predict": (
                predict_t5.main,
                ["--input_file", place / "in.txt", "--output_file", self.folder / "out", "--max_new_tokens", 3],
            ),
            "evaluate": (evaluate_t5.main, [*pairs, *out, *cache, "--max_target_length", 9]),
            "export": (export_checkpoint.main, [*out, "--num_samples", 2]),
        }[door]
        _, printed, error = run_main(main, *flags, *more, code=code)
        return printed + error

    @parameterized.product(door=("predict", "evaluate", "export"))
    def test_another_tokenizer_of_the_same_size_is_refused_by_name(self, door):
        error = self.run_door(door, "model", "other", 2)
        own, other = (load_tokenizer(str(workspace() / name)).get_vocab() for name in ("model", "other"))
        self.assertLen(other, len(own))
        differ = len({*own.items()} ^ {*other.items()})
        self.assertRegex(error, f"error: --tokenizer_name .*/other: is not the tokenizer of .*/model: {differ} pieces")
        self.assertFalse((self.folder / "out").exists())

    @parameterized.product(door=("predict", "evaluate", "export"), model=("model", "bare/model"))
    def test_the_own_one_elsewhere_or_that_of_a_model_without_is_taken(self, door, model):
        self.run_door(door, model, "same", None)
        self.assertTrue((self.folder / "out").exists())
