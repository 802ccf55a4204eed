"""The command of unbabel-comet, comet-score, on rows of predictions.jsonl.

comet_score("comet-score", Path("wmt22-comet-da/checkpoints/model.ckpt"), [("Hallo.", "Hello.", "Hello.")])  -> 0.97
"""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from foundry.common.errors import UserError
from foundry.common.processes import end_with_parent, print_once
from tasks.registry import as_list, source_prefix

INSTALL = "python -m venv comet_env && comet_env/bin/pip install -r requirements/comet.txt"


def triples(entry: dict, records: list[dict]) -> list[tuple[str, str, str]]:
    """(source without the task's prefix, answer, reference) of each row. COMET reads one reference: the first."""
    if several := sum(len(as_list(record["target"])) > 1 for record in records):
        print_once(f"comet: {several:,} rows have several references, of which it reads the first")
    prefix = source_prefix(entry)
    return [(r["source"].removeprefix(prefix), r["prediction"], as_list(r["target"])[0]) for r in records]


def comet_score(command: str, model: Path, rows: list[tuple[str, str, str]]) -> float:
    """The mean score of rows (source, answer, reference), which the command reads as lines. UserError if there is no
    such program, or if it fails."""
    program = shutil.which(command)
    if program is None:
        raise UserError(f"--comet_command {command}: no such program. Install it with: {INSTALL}")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("sources", "answers", "references")]
        for path, texts in zip(files, zip(*rows, strict=True), strict=True):
            path.write_text("".join(f"{' '.join(text.split())}\n" for text in texts), encoding="utf-8")
        found = Path(folder) / "scores.json"
        argv = [program, "-s", files[0], "-t", files[1], "-r", files[2], "--model", model.resolve()]
        argv += ["--gpus", int(torch.cuda.is_available()), "--quiet", "--only_system", "--to_json", found]
        options = dict(capture_output=True, text=True, errors="replace", preexec_fn=end_with_parent)
        done = subprocess.run(list(map(str, argv)), **options)
        if done.returncode or not found.is_file():
            last = (done.stderr.strip() or "it wrote no scores").splitlines()[-1]
            raise UserError(f"--comet_command {command}: failed with {done.returncode}: {last}")
        (scored,) = json.loads(found.read_text(encoding="utf-8")).values()
    return sum(row["COMET"] for row in scored) / len(rows)
