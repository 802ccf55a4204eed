"""Pairs of answers from the built-in data, and the time saved by encoding a prompt once for both answers.

python -m benchmarks.preference_pairs pairs       # pairs/train.jsonl, preferences.jsonl, validation.jsonl
python -m benchmarks.preference_pairs --time --model mini --source 256 --target 32
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch

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


def seconds_of_step(model, batches: list[dict], repeats: int) -> float:
    """Median seconds of forward and backward passes over the batches."""
    device, taken = model.device, []
    for _ in range(repeats + 2):  # the first two warm up
        began = time.perf_counter()
        for batch in batches:
            model(**batch).loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
        model.zero_grad(set_to_none=True)
    return statistics.median(taken[2:])


def compare(shape: str, rows: int, source: int, target: int, repeats: int = 10) -> dict:
    """Seconds of a step if a prompt is encoded once for both answers, and if it is encoded for each, as TRL did."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = create_model(build_config(shape)).to(device).train()
    ids = torch.randint(100, 30_000, (rows, source + 2 * target), device=device)
    prompts, chosen, rejected = ids.split([source, target, target], dim=1)
    compute_loss_in_forward(model, preference=Preference("simpo", 2.0))
    once = seconds_of_step(model, [dict(input_ids=prompts, labels=chosen, rejected=rejected)], repeats)
    compute_loss_in_forward(model)
    both = dict(input_ids=prompts.repeat(2, 1), labels=torch.cat([chosen, rejected]))
    twice = seconds_of_step(model, [both], repeats)
    return dict(device=device, model=shape, rows=rows, source=source, target=target, once=once, twice=twice)


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
