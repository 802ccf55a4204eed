"""What the tests of LoRA's scripts begin with: rows of two classes, plain text, and a tiny checkpoint to train on."""

import json
import tempfile
from pathlib import Path

from absl.testing import parameterized
from helpers import run_main, sentences, write_tiny_model

import fine_tune_t5

ROWS = [
    {"text": f"the {color} {thing} number {n}", "kind": thing}
    for n in range(8)
    for color in ("red", "old")
    for thing in ("tree", "moon")
]
TIMES = ("_runtime", "_per_second", "_preparation_time")


def reported(results: dict) -> dict:
    """The metrics of an evaluation, without times."""
    return {n: value for n, value in results.items() if n.startswith("eval_") and not n.endswith(TIMES)}


class RowsAndBaseTest(parameterized.TestCase):
    """folder: holds rows.jsonl, text.txt and the checkpoint base."""

    STEPS, EVERY = 8, 4  # of a run; after how many it is evaluated and saved

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        (cls.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        (cls.folder / "text.txt").write_text("\n".join(sentences(300)))
        write_tiny_model(cls.folder / "base", [*(row["text"] for row in ROWS), "kind:", *sentences(200)], 300)

    @classmethod
    def common(cls, name: str, steps: int, batch: int, rank: int) -> str:
        flags = f"--model_name_or_path {cls.folder}/base --lora_rank {rank} --output_dir {cls.folder}/{name} "
        flags += f"--data_cache_dir {cls.folder}/cache --max_steps {steps} --per_device_train_batch_size {batch} "
        return flags + "--report_to none --use_cpu true --disable_tqdm true "

    @classmethod
    def argv(cls, name: str, steps: int | None = None, rank: int = 4, batch: int = 4, every: int | None = None) -> list:
        """The flags of a fine-tuning into the folder `name`."""
        every = every or cls.EVERY
        flags = cls.common(name, steps or cls.STEPS, batch, rank) + f"--train_file {cls.folder}/rows.jsonl "
        flags += "--source_column text --target_column kind --target_type class --validation_split_percentage 20 "
        flags += f"--eval_strategy steps --eval_steps {every} --save_strategy steps --save_steps {every} "
        return f"{flags} --save_total_limit 9".split()

    @classmethod
    def text_argv(cls, name: str, steps: int) -> list[str]:
        """The flags of a pre-training with samples, evaluated and saved every two steps."""
        flags = cls.common(name, steps, 4, 4) + f"--train_file {cls.folder}/text.txt --input_seq_length 32 "
        flags += "--gradient_accumulation_steps 1 --eval_steps 2 --save_steps 2 --warmup_steps 1 "
        return f"{flags} --max_eval_samples 8 --num_samples 1".split()

    @classmethod
    def fine_tune(cls, name: str, *flags: str, code: int | None = None, **changes) -> tuple[dict, str]:
        """(results, what was printed) of a run."""
        results, printed, errors = run_main(fine_tune_t5.main, *cls.argv(name, **changes), *flags, code=code)
        return results, printed + errors
