"""What the plan of a training or an evaluation says of the rows of tasks: plain functions over a `LoadedTask`."""

import itertools
import math
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foundry.arguments.task import CORRUPTED
from foundry.corpora.chunks import row_lengths
from foundry.report.files import described_files
from foundry.report.lengths import described_lengths, evenly, percent
from foundry.report.preview import Sample
from foundry.report.repeats import TokenCounts, counted, described_repeats
from foundry.report.report import Report, grouped, one_row
from foundry.report.unknown import LetterCounts, unknown_in_rows
from tasks import examples, row_texts
from tasks.entry import TaskEntry
from tasks.repeated_rows import described_known_rows, described_repeated_rows

if TYPE_CHECKING:
    from datasets import Dataset

    from tasks.task import LoadedTask

COUNTED = 2**16  # rows of a split of which the tokens are counted
MEASURED = 1_000  # rows of a split in which the columns that a cut takes away are looked for
SHOWN_ROWS = 4  # rows of a split that the preview may show
SIDES = {"input_ids": "sources", "labels": "targets"}  # {column of token ids: what a plan calls them}
Shown = list[list[Sample]]
# What did better than the defaults for texts written by a model from scratch (results/pronunciation.md and
# translation_multi30k.md): {flags: those that say otherwise}, and {most rows: what stands in the flags}.
_ON_FEW_ROWS = {
    "--optim muon --learning_rate 5e-2": {"optim", "learning_rate"},
    "--weight_decay {decay}": {"optim", "learning_rate", "weight_decay"},
    "--warmup_steps 20": {"optim", "learning_rate", "warmup_steps"},
    "--label_smoothing_factor 0.1": {"label_smoothing_factor"},
    "--max_steps {steps}": {"max_steps", "num_train_epochs"},
}
_OF_SO_MANY_ROWS = {
    2_500: dict(steps=1_600, decay=0.05),
    10_000: dict(steps=3_000, decay=0.05),
    40_000: dict(steps=18_000, decay=0.0125),
}


def report_of_tasks(
    tasks: "list[LoadedTask]",
    corrupted: Any = None,
    cut: "Callable[[Any, str], str | None] | None" = None,
    known_in: str = "trained on",
    train: str = "train",
) -> Report:
    """What a plan says of all splits of the tasks, which are named task/split if there are several tasks. corrupted: a
    CorruptedText beside their training rows. cut: what is said of the cut rows of a split. known_in, train: words for
    training rows, of which there may be a sample alone."""
    is_mixed, shown = len(tasks) > 1, {}
    files, kept, lengths, empty, repeats = {}, [], [], [], []
    known, alike, labels, unchanged, cuts, equal, unknown = {}, {}, {}, {}, {}, {}, {}
    report = Report({}, partial(_shown, shown, corrupted), {}, {})
    for task in tasks:
        entry, losses = task.entry, task.losses()
        alike[task.name] = row_texts.look_alikes(entry, task.rows, task.sources)
        shown[task.name] = {}
        for split, of_split in task.files.items():
            files[f"{task.name}/{split}" if is_mixed else split] = of_split
        for split, rows in task.rows.items():
            data, name = task.data[split], train if split == "train" else split
            if is_mixed:
                name = f"{task.name}/{name}"
            counts = {side: counted_tokens(data, ids) for ids, side in SIDES.items() if ids in data.column_names}
            shown[task.name][split] = shown_rows(task, split, counts)
            report.losses[name], report.unknown[name] = losses[split], unknown_in_rows(task.tokenizer, data)
            if report.unknown[name] and not entry.tokenize:
                unknown |= _unknown_letters(task, split, name)
            if split in task.examples:  # not a sample
                kept.append(f"{len(data):,} of {task.examples[split]:,} {name}")
                lengths.append(f"{name} {_lengths(task, split)}")
            for what, count in row_texts.empty_texts(task.name, entry, rows).items():
                empty.append(f"{count:,} {what} of {name}")
            if text := described_repeated_rows(task, split):
                repeats.append(f"{text} ({name})")
            for side, found in counts.items():
                if text := described_repeats(found, task.tokenizer, common=1):
                    repeats.append(f"{text} ({side}) ({name})")
            known[name] = described_known_rows(task, split, known_in)
            labels[name] = examples.numbered_labels(entry, rows)
            unchanged[name] = examples.unchanged_targets(entry, rows)
            cuts[name] = (cut or described_cut)(task, split)
            equal[name] = examples.equal_answers(entry, rows, data)
    if corrupted is not None:
        files[CORRUPTED], report.losses[CORRUPTED] = [corrupted.files], {"documents": corrupted.losses}
    report.rows = {
        "files": described_files(files),
        "rows": ", ".join(kept),
        "lengths": "; ".join(lengths),
        "repeats": "; ".join(repeats) or None,
        "known": one_row(known, is_mixed),
        "look alike": one_row(alike, is_mixed),
        "empty": ", ".join(empty) or None,
        "unknown": one_row(unknown),
        "labels": grouped(labels),
        "unchanged": grouped(unchanged),
        "cut": one_row(cuts),
        "equal": one_row(equal),
        "numbers": "; ".join(filter(None, map(_described_numbers, tasks))) or None,
    }
    return report


def described_few_rows(tasks: "list[LoadedTask]", given: Collection[str]) -> str | None:
    """For the plan of a model from scratch: flags that did better on so few rows, without those for which a flag of the
    `given` stands. None if there are none, or many rows, other targets than text, or several tasks."""
    task, *others = tasks
    if others or task.entry.target_type != "text" or "train" not in task.data:
        return None
    rows, flags = len(task.data["train"]), []
    fitting = next((values for most, values in _OF_SO_MANY_ROWS.items() if rows <= most), None)
    if fitting is None:
        return None
    for text, otherwise in _ON_FEW_ROWS.items():
        if otherwise.isdisjoint(given):
            flags.append(text.format(**fitting))
    if not flags:
        return None
    return f"{rows:,} from scratch: {' '.join(flags)}, in batches of 64, did better (docs/defaults.md)"


def _unknown_letters(task: "LoadedTask", split: str, name: str) -> dict[str, str | None]:
    """{"train sources": the letters without a token, "train targets": the same}. UserError where no letter has one."""
    entry, texts = task.entry, {"sources": task.sources[split]}
    if entry.target_type == "text" and entry.target in task.rows[split][0]:
        texts["targets"] = [row_texts.target_text(task.name, entry, row) for row in task.rows[split]]
    found = {}
    for side, of_side in texts.items():
        what = f"task {task.name}, {split}: of the {side}"
        found[f"{name} {side}"] = LetterCounts(of_side).unknown(task.tokenizer, what)
    return found


# ---------------------------------------------------------------- the preview
def shown_rows(task: "LoadedTask", split: str, counts: dict[str, TokenCounts]) -> tuple[Shown, Shown]:
    """(some rows of a split, spread evenly; the oddest one, if it is not among them)."""
    rows, data = task.rows[split], task.data[split]
    numbers = evenly(range(len(rows)), SHOWN_ROWS)
    some = task.shown_of(split, [rows[number] for number in numbers], [data[number] for number in numbers])
    oddest = max((found.oddest[::-1] for found in counts.values() if found.oddest), default=(0, numbers[0]))[1]
    if oddest in numbers:
        return some, []
    return some, task.shown_of(f"oddest {split}", [rows[oddest]], [data[oddest]])


def _shown(
    shown: dict[str, dict[str, tuple[Shown, Shown]]], corrupted: Any, detailed: bool, tasks: Iterable[str] | None = None
) -> Shown:
    """The first training row of each task, the oddest one of a single task, and a row of corrupted text; then the first
    row of each evaluated split. detailed: more rows of each. tasks: some of their names, None: all."""
    count, rows, evaluated = None if detailed else 1, [], []
    tasks = list(shown if tasks is None else tasks)
    for task in tasks:
        for split, (some, oddest) in shown[task].items():
            if split != "train":
                evaluated += some[:count]
                continue
            rows += some[:count]
            if len(tasks) == 1:
                rows += oddest
    if corrupted is not None:
        row, sentinels = corrupted[0], corrupted.collator.sentinel_ids
        sides = {"source": "input_ids", "target": "labels"}
        rows.append([Sample(f"{CORRUPTED} {side}", row[ids], None, sentinels) for side, ids in sides.items()])
    return rows + evaluated


# ---------------------------------------------------------------- tokens
def counted_tokens(rows: "Dataset", column: str) -> TokenCounts:
    """What repeats and what is odd among the ids in a column of tokenised rows."""
    from pyarrow import compute

    stride = math.ceil(len(rows) / COUNTED)
    ids = rows.with_format("arrow")[:: max(1, stride)][column]
    found = counted(compute.list_flatten(ids).to_numpy(), np.cumsum(compute.list_value_length(ids).to_numpy()))
    if found.oddest:
        found.oddest[0] *= stride
    return found


def answer_lists(task: "LoadedTask", split: str) -> dict[str, list[list[int]]]:
    """{column of lists of answers: the tokens of each answer, row by row}."""
    data, found = task.data[split], {}
    for name, column in task.entry.further_answers.items():
        if column.kind == "answers" and name in data.column_names:
            found[name] = [list(map(len, answers)) for answers in data[name]]
    return found


def _lengths(task: "LoadedTask", split: str) -> str:
    """ "sources of 3 to 512 tokens, median 40, targets of 2 tokens each, 0 to 5 n of a row (31 in all) of 4 tokens
    each"."""
    data, lists, sides = task.data[split], answer_lists(task, split), []
    for ids, side in (SIDES | {name: name for name in task.entry.further_answers}).items():
        if ids in data.column_names and ids not in lists:
            sides.append(f"{side} of {described_lengths(row_lengths(data, ids))}")
    for side, answers in lists.items():
        tokens, several = list(itertools.chain.from_iterable(answers)), list(map(len, answers))
        numbers = f"{min(several):,} to {max(several):,} {side} of a row ({len(tokens):,} in all)"
        sides.append(f"{numbers} of {described_lengths(tokens)}")
    return ", ".join(sides)


def described_cut(task: "LoadedTask", split: str) -> str | None:
    """ "12 % of the sources at 512 tokens, 9% without question": how many rows of a split are cut, if at least 0.5 %,
    and in how many nothing is left of a column. Also how many targets that are not cut are longer than an answer may
    be."""
    rows, (longest, of_targets) = task.data[split], examples.max_lengths(task.entry, split)
    sides: dict[str, tuple[str, int | None]] = {"sources": ("input_ids", longest), "targets": ("labels", of_targets)}
    for name, column in task.entry.further_answers.items():
        sides[column.plural] = (name, of_targets)
    told = []
    for name, (ids, most) in sides.items():
        if not most or ids not in rows.column_names:
            continue
        share, some = cut_rows(task, split, ids, most)
        if share < 0.005:
            continue
        told.append(f"{percent(share)} of the {name} at {most} tokens")
        if name == "sources" and not task.entry.tokenize:
            lost = examples.lost_columns(task.entry, task.tokenizer, some, longest)
            told += [f"{percent(share * n / len(some))} without {lacks}" for lacks, n in lost.items()]
    if "labels" in rows.column_names and of_targets is None and task.entry.target_type != "class":
        longest = task.entry.max_target_length
        if share := float((row_lengths(rows, "labels") > longest).mean()):
            told.append(f"{percent(share)} of the targets longer than max_target_length {longest}")
    return ", ".join(told) or None


def cut_rows(task: "LoadedTask", split: str, column: str, most: int) -> tuple[float, list[dict]]:
    """(share of a split's rows whose `column` had more than `most` tokens, these rows), estimated from MEASURED of
    those that have so many now."""
    lists = answer_lists(task, split).get(column)
    if lists is None:
        lengths = row_lengths(task.data[split], column)
    else:
        lengths = np.array([max(of_row, default=0) for of_row in lists])
    numbers = np.flatnonzero(lengths >= most)
    tried = [task.rows[split][number] for number in numbers[:: max(1, math.ceil(len(numbers) / MEASURED))]]
    longer = []
    for row, uncut in zip(tried, task.uncut(tried), strict=True):
        if examples.text_length(uncut[column]) > most:
            longer.append(row)
    return len(longer) / max(1, len(tried)) * len(numbers) / len(lengths), longer


def _described_numbers(task: "LoadedTask") -> str | None:
    """Of a task of numbers: "size rounded to 0.01, between 0.02 and 0.98 (from the train rows); an answer that is no
    number counts as the worst of them". None for other tasks."""
    if (numbers := task.entry.numbers) is None:
        return None
    least, most = row_texts.number_text(numbers["least"], None), row_texts.number_text(numbers["most"], None)
    worst = "counts as the worst of them"
    if "unreadable" in numbers:
        worst = f"counts as {numbers['unreadable']:g}"
    return (
        f"{task.name} rounded to {row_texts.number_text(numbers['step'], None)}, between {least} and {most} "
        f"({task.numbers_from}); an answer that is no number {worst}"
    )


# ---------------------------------------------------------------- metrics
def described_metrics(tasks: "list[LoadedTask]", args: Any) -> str:
    """ "f1 (of the class equivalent), accuracy from generated texts; largest f1 is best". args: of the training."""
    parts = []
    for task in tasks:
        text = ", ".join(_described_metric(task.entry, metric) for metric in task.entry.metrics)
        parts.append(f"{task.name} {text}" if len(tasks) > 1 else text)
    if len(tasks) == 1:
        parts[0] += " from generated texts" if args.predict_with_generate else " from teacher-forced scoring"
    best = args.metric_for_best_model.removeprefix("eval_")
    if best == "average":
        best = "mean of each task's first metric"
    direction = "largest" if args.greater_is_better else "smallest"
    return "; ".join([*parts, f"{direction} {best} is best"])


def _described_metric(entry: TaskEntry, metric: str) -> str:
    """ "f1 (of the class equivalent)"; the name alone of metrics that are not of one class."""
    of_one_class = Path(metric).stem in ("f1", "precision", "recall") and entry.positive_class
    return f"{metric} (of the class {entry.positive_class})" if of_one_class else metric
