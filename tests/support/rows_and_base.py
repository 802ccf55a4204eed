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
    """folder: holds rows.jsonl, text.txt and the checkpoint base. A subclass has `argv(name, **changes)`, the flags of
    a run into the folder `name`."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        (cls.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        (cls.folder / "text.txt").write_text("\n".join(sentences(300)))
        write_tiny_model(cls.folder / "base", [*(row["text"] for row in ROWS), "kind:", *sentences(200)], 300)

    @classmethod
    def fine_tune(cls, name: str, *flags: str, code: int | None = None, **changes) -> tuple[dict, str]:
        """(results, what was printed) of a run."""
        results, printed, errors = run_main(fine_tune_t5.main, *cls.argv(name, **changes), *flags, code=code)
        return results, printed + errors
