"""Rows whose answers are compared: from records of several shapes, to answers to other prompts."""

import os
from collections import Counter

from features.preferences import OTHER_ANSWER
from foundry.common.errors import UserError
from tasks.entry import TaskEntry
from tasks.row_texts import source_text
from tasks.transforms import read_dialogue

_ASSISTANT = "\n\nAssistant:"  # before each answer of HH-RLHF


def pair(row: dict) -> dict:
    """The row with `source`, `target` and `rejected`, from a prompt and two answers, or from two whole dialogues
    (HH-RLHF), each a text or a list of messages (UltraFeedback, TRL). A dialogue's last turn is the answer, the turns
    before it are the source; a row to be answered may have the prompt alone. UserError if the two sources differ."""
    prompt, chosen, rejected = (row.get(name) for name in ("prompt", "chosen", "rejected"))
    if prompt is None and isinstance(chosen, str):
        shared = os.path.commonprefix([chosen, rejected])
        end = shared.rfind(_ASSISTANT) + len(_ASSISTANT)
        if end < len(_ASSISTANT):
            raise UserError(
                f"no column prompt, and chosen and rejected have no common beginning that ends in {_ASSISTANT!r}. Give "
                "the rows a column prompt, and the answers alone in chosen and rejected"
            )
        prompt, chosen, rejected = shared[:end], *(text[end:].removeprefix(" ") for text in (chosen, rejected))
    if prompt is None and chosen is None:
        raise UserError("no column prompt, nor chosen and rejected")
    source, target = read_dialogue(prompt, chosen)
    other, worse = (source, None) if rejected is None else read_dialogue(prompt, rejected)
    if source != other:
        raise UserError("chosen and rejected are answers to different prompts: their earlier turns differ")
    return row | {"source": source, "target": target, "rejected": worse}


def rated(row: dict) -> dict:
    """The row of an answer with a label (TRL's unpaired preferences) with `source` and `target`, from texts or
    messages; without an answer, `target` is None."""
    source, target = read_dialogue(row["prompt"], row.get("completion"))
    return row | {"source": source, "target": target}


def with_other_answers(entry: TaskEntry, rows: list[dict]) -> list[dict]:
    """The rows of unpaired preferences, with the answer of a row with another source as OTHER_ANSWER in each row: from
    such answers to other prompts the divergence is estimated (losses.py). Rows without answers are unchanged. UserError
    if all rows have the same source.

    Sources a, a, b, c with answers 1, 2, 3, 4 -> 3, 4, 1, 2. Each answer is taken once, unless more than half of the
    rows have the same source.
    """
    if entry.target not in rows[0]:
        return rows
    sources = [source_text(entry, row) for row in rows]
    by_count, total = Counter(sources).most_common(), len(rows)
    most = by_count[0][1]
    if most == total:
        raise UserError(
            f"--preference kto: all {total:,} rows of a split have the same source, {sources[0][:60]!r}, and its "
            "divergence is estimated from answers to other prompts: give rows with several sources"
        )
    place = {source: number for number, (source, _) in enumerate(by_count)}
    order = sorted(range(total), key=lambda number: place[sources[number]])  # rows with the same source are neighbours
    answers, rows = [row[entry.target] for row in rows], list(rows)
    for step, number in enumerate(order):
        other = most + step % (total - most) if step < most else (step + most) % total
        rows[number] = rows[number] | {OTHER_ANSWER: answers[order[other]]}
    return rows
