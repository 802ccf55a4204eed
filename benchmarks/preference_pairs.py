"""Pairs of answers from the built-in data, and the time saved by encoding a prompt once for both answers.

python -m benchmarks.preference_pairs pairs       # pairs/train.jsonl, preferences.jsonl, validation.jsonl
python -m benchmarks.preference_pairs --time --model mini --source 256 --target 32
"""

import argparse
import json
import random
import statistics
from functools import partial
from pathlib import Path

import torch

from benchmarks.measure import interleaved, timed
from common.reports import write_json
from constants import PACKAGE_TOPIC_LABELS
from corpora.sources import builtin_corpus
from model_t5 import build_config, create_model
from modeling.loss import compute_loss_in_forward
from modeling.preferences import Preference

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


def compare(shape: str, rows: int, source: int, target: int, repeats: int = 10) -> dict:
    """Seconds of a step if a prompt is encoded once for both answers, and if it is encoded for each, as TRL did."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.randint(100, 30_000, (rows, source + 2 * target), device=device)
    prompts, chosen, rejected = ids.split([source, target, target], dim=1)
    both = dict(input_ids=prompts.repeat(2, 1), labels=torch.cat([chosen, rejected]))
    once = dict(input_ids=prompts, labels=chosen, rejected=rejected)
    ways = {"once": (once, Preference("simpo", 2.0)), "twice": (both, None)}
    found, runs = {name: {} for name in ways}, {}
    for name, (batch, preference) in ways.items():
        model = create_model(build_config(shape)).to(device).train()
        compute_loss_in_forward(model, preference=preference)
        runs[name] = timed(partial(_step, model, batch))
    interleaved(found, runs, repeats, warm_up=2)
    seconds = {name: statistics.median(row["seconds"]) for name, row in found.items()}
    return dict(device=device, model=shape, rows=rows, source=source, target=target, **seconds)


def _step(model, batch: dict) -> None:
    model(**batch).loss.backward()
    model.zero_grad(set_to_none=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="where the pairs are written")
    parser.add_argument("--data_cache_dir", type=Path, default=Path("~/.cache/t5_foundry"))
    parser.add_argument("--time", action="store_true", help="measure a step")
    parser.add_argument("--model", default="mini")
    for name, value in (("rows", 8), ("source", 256), ("target", 32)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--output", type=Path, help="JSON file of the times")
    args = parser.parse_args(argv)
    if args.folder:
        write_pairs(args.folder, args.data_cache_dir.expanduser())
    if args.time:
        found = compare(args.model, args.rows, args.source, args.target)
        print(json.dumps(found))
        if args.output:
            write_json(args.output, found)


if __name__ == "__main__":
    main()
