"""Small folders that trainings with --head wrote, and the answers that a server or a page must give."""

import importlib.util
import json
import random
from pathlib import Path

from helpers import argv_of, run_main, sentences, write_tiny_model

import fine_tune_t5
import predict_t5

ARE_THERE = importlib.util.find_spec("sentence_transformers") is not None
NOT_THERE = "sentence-transformers is not installed (requirements/embeddings.txt)"
QUICK = dict(max_steps=2, per_device_train_batch_size=8, report_to="none", disable_tqdm=True, use_cpu=True)
QUICK |= dict(eval_strategy="no", save_strategy="no", load_best_model_at_end=False)
COLUMNS = {
    "class": ("text", "many"),
    "labels": ("text", "labels"),
    "number": ("text", "size"),
    "tokens": ("words", "plain"),
    "entities": ("words", "tags"),
    "embedding": ("text", "other"),
}


def made_up(line: str, count: int) -> dict:
    """A row of `count` words with all that any head reads."""
    words = line.rstrip(".").split()[:count]
    row = dict(words=words, text=" ".join(words), size=len(words), many=str(len(words) > 5), other=line)
    row["plain"] = ["V" if word[1] in "ae" else "C" for word in words]
    row["tags"] = ["B-A" if word[1] in "ae" else "O" for word in words]
    return row | {"labels": sorted({*row["plain"]})}


def head_folder(kind: str, place: Path, **flags) -> Path:
    """The folder of a model that learnt a kind of COLUMNS, made once in `place`, which gets rows.jsonl too."""
    folder, lines, chooser = place / kind, sentences(60), random.Random(0)
    if not (place / "rows.jsonl").is_file():
        write_tiny_model(place / "base", lines, 300)
        rows = [made_up(line, chooser.randint(2, 9)) for line in lines]
        (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not folder.is_dir():
        source, target = COLUMNS[kind]
        columns = dict(source_column=source, target_column=target, train_file=place / "rows.jsonl")
        head = "tokens" if kind == "entities" else kind
        flags = QUICK | columns | dict(head=head, model_name_or_path=place / "base", output_dir=folder) | flags
        run_main(fine_tune_t5.main, *argv_of(flags))
    return folder


def texts_of(place: Path) -> list[str]:
    """The texts of rows.jsonl."""
    return [json.loads(line)["text"] for line in (place / "rows.jsonl").read_text().splitlines()]


def answers_to_file(folder: Path) -> list[dict]:
    """What predict_t5.py answers to the texts, as lines of a file, one at a time: without the columns of the input."""
    source = folder.parent / "texts.txt"
    source.write_text("".join(f"{text}\n" for text in texts_of(folder.parent)))
    output = folder.parent / f"{folder.name}.answers"
    files = ["--input_file", source, "--output_file", output, "--overwrite_output_file", "--batch_size", 1]
    run_main(predict_t5.main, "--use_cpu", "--model_name_or_path", folder, *files)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    return [{name: row[name] for name in ("prediction", "probabilities") if name in row} for row in rows]
