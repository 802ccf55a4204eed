"""Rows that repeat others in a plan: copies, frequent targets, and held-out rows that are trained on."""

from collections import Counter
from typing import TYPE_CHECKING

from foundry.common.terminal import visible
from foundry.report.lengths import percent
from tasks.row_texts import reference_texts

if TYPE_CHECKING:
    from tasks.task import LoadedTask

# What is more than ordinary tasks have (GLUE, CommonGen, translated captions, summaries).
COMMON_ROWS, FEW_ROWS = 0.005, 5  # share of the rows that are copies of one, and their number
COMMON_TARGET = {"class": 0.9, "number": 0.5, "text": 0.05}  # share of the most frequent target
COMMON_SEVERAL = 0.01  # share of the rows whose source has other targets too
QUOTED = 60  # characters of a text


def described_known_rows(task: "LoadedTask", split: str, known_in: str) -> str | None:
    """ "3 of 8 dev sources are trained on, 1 of them with source and target swapped"; None if none is. known_in:
    "trained on". A row is known if its source is also that of a training row, or, in tasks of texts, if a training row
    has its source as target and its target as source."""
    if split == "train":
        return None
    rows = task.rows[split]
    same, swapped, is_estimate = task.trained.count(task.entry, rows, task.sources[split])
    if not same + swapped:
        return None
    text = f"{same + swapped:,} of {len(rows):,} {split} sources are {known_in}"
    if is_estimate:
        text = f"about {text}"
    if swapped:
        text += f", {swapped:,} of them with source and target swapped"
    return text


def described_repeated_rows(task: "LoadedTask", split: str) -> str | None:
    """What repeats more than in ordinary tasks: "'id' -> 'label' stands 19 times; ..."; None if nothing does."""
    rows, sources, target = task.rows[split], task.sources[split], task.entry.target
    has_targets = target in rows[0]
    pairs = list(zip(sources, _targets(task, rows), strict=True)) if has_targets else [(source,) for source in sources]
    parts, different = [], Counter(pairs)
    row, times = different.most_common(1)[0]
    if times >= max(FEW_ROWS, COMMON_ROWS * len(rows)):
        shown = _quoted(row[0])
        if has_targets:
            shown += f" -> {_quoted(_shown_target(task, rows[pairs.index(row)]))}"
        parts.append(f"{shown} stands {times:,} times")
    if has_targets:
        targets = [of_row[:1] for _, of_row in pairs]
        first, times = Counter(targets).most_common(1)[0]
        if times >= max(FEW_ROWS, COMMON_TARGET[task.entry.target_type] * len(rows)):
            text = _quoted(_shown_target(task, rows[targets.index(first)]))
            parts.append(f"{percent(times / len(rows))} of the targets are {text}")
    of_source = Counter(pair[0] for pair in different)  # how many different targets each source stands with
    several = sum(times for pair, times in different.items() if of_source[pair[0]] > 1)
    if several > COMMON_SEVERAL * len(rows):
        parts.append(f"{several:,} rows have a source that stands with other targets too")
    return "; ".join(parts) or None


def _targets(task: "LoadedTask", rows: list[dict]) -> list[tuple[str, ...]]:
    """The references of each row; a class or a number as the row writes it."""
    if task.entry.target_type == "text":
        return [tuple(reference_texts(task.name, task.entry, row)) for row in rows]
    return [(str(row[task.entry.target]),) for row in rows]


def _shown_target(task: "LoadedTask", row: dict) -> str:
    return reference_texts(task.name, task.entry, row)[0]


def _quoted(text: str) -> str:
    if len(text) <= QUOTED:
        return f'"{visible(text)}"'
    return f'"{visible(text[:QUOTED])} ..."'
