"""Pairs of answers from the built-in data.

python -m features.preferences.pairs pairs      # pairs/train.jsonl, preferences.jsonl, validation.jsonl
"""

import argparse
import json
import random
from pathlib import Path

from constants import PACKAGE_TOPIC_LABELS
from foundry.common.processes import run_script
from foundry.corpora.sources import builtin_corpus

TRAINED = 300  # rows for fine-tuning the model that then learns preferences from the other rows


def write_pairs(folder: Path, cache: Path) -> None:
    """Rows {"prompt": a paragraph, "chosen": its package, "rejected": another one}, the same in every run."""
    draw, folder = random.Random(0), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation"):
        lines = (builtin_corpus(cache) / "package_topic" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = []
        for row in map(json.loads, lines):
            others = [label for label in PACKAGE_TOPIC_LABELS if label != row["label"]]
            rows.append(dict(prompt=row["text"], chosen=row["label"], rejected=draw.choice(others)))
        draw.shuffle(rows)
        parts = {"train": rows[:TRAINED], "preferences": rows[TRAINED:]} if split == "train" else {split: rows}
        for name, part in parts.items():
            text = "".join(json.dumps(row) + "\n" for row in part)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the pairs are written")
    parser.add_argument("--data_cache_dir", type=Path, default=Path("~/.cache/t5_foundry"))
    args = parser.parse_args(argv)
    write_pairs(args.folder, args.data_cache_dir.expanduser())


if __name__ == "__main__":
    run_script(main)
