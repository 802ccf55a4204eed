"""Token ids of the rows of tasks, and texts and metrics of a model's answers.

A row goes through three steps: tasks/rows.py gives it the entry's columns, `source_text` and `target_text` of
tasks/row_texts.py make T5's texts of them, and the function of `build_tokenize_function` makes token ids.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from constants import IGNORE_INDEX
from data_collator_t5 import find_bos_id
from foundry.common.errors import UserError
from foundry.common.terminal import print_once
from foundry.corpora.reading import as_list
from foundry.corpora.sentinels import source_ids
from foundry.corpora.tokenizers import decoded, encode_targets
from foundry.features import task_features
from foundry.modeling.loss import STATISTICS, token_metrics
from foundry.report.losses import LONGEST_TEXT, Losses, round_trip, sampled
from tasks.entry import TaskEntry
from tasks.metrics.scoring import METRICS, score_predictions
from tasks.row_texts import column_value, finite_number, joined_text, reference_texts, source_text, target_text

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import EvalPrediction

_EXACT = ("exact_match", "squad_exact_match")  # metrics that are 1 for the right text alone


def build_tokenize_function(
    name: str,
    entry: TaskEntry,
    tokenizer: PreTrainedTokenizerBase,
    max_source_length: int,
    max_target_length: int | None,
) -> Callable[[dict], dict]:
    """The function from a batch of rows {column: values} to "input_ids", "attention_mask" and "labels", each cut and
    with EOS; also the entry's `further_columns`, under their names.

    Lengths are in tokens, EOS included. Rows without the target column (test data) get no labels. Where the entry has a
    `tokenize`, its ids are taken as they are; the function raises UserError if they are none or too many.
    """
    columns = entry.further_columns

    def by_entry(rows: list[dict]) -> dict[str, list]:
        tokenised = [entry.tokenize(tokenizer, row) for row in rows]
        limits = {"input_ids": max_source_length}
        if entry.target in rows[0]:
            limits["labels"] = max_target_length
        made = {}
        for side, most in limits.items():
            made[side] = [list(map(int, ids[side])) for ids in tokenised]
            lengths = [len(ids) for ids in made[side]]
            if min(lengths) == 0 or most and max(lengths) > most:
                raise UserError(
                    f"task {name}, tokenize: it returns {max(lengths)} {side} for a row, and there must be 1 to "
                    f"{most or 'any number'}. Cut them, or raise the entry's lengths"
                )
        return made | {"attention_mask": [[1] * len(ids) for ids in made["input_ids"]]}

    def tokenize(batch: dict[str, list]) -> dict[str, list]:
        rows = as_rows(batch)
        if entry.tokenize:
            return by_entry(rows)
        sources = source_ids(tokenizer, [source_text(entry, row) for row in rows], max_source_length)
        made: dict[str, list] = {"input_ids": sources, "attention_mask": [[1] * len(ids) for ids in sources]}
        if entry.target in batch:
            texts = [target_text(name, entry, row) for row in rows]
            made["labels"] = encode_targets(tokenizer, texts, max_target_length)
            for beside, column in columns.items():
                if column.column in batch:
                    made[beside] = [column_value(column, row) for row in rows]
                    if column.kind == "answer":
                        made[beside] = encode_targets(tokenizer, made[beside], max_target_length)
                    elif column.kind == "answers":
                        made[beside] = encode_lists(tokenizer, made[beside], max_target_length)
        return made

    return tokenize


def encode_lists(tokenizer: PreTrainedTokenizerBase, lists: list[list[str]], most: int | None) -> list[list[list[int]]]:
    """As `encode_targets`, of lists of texts: [["a", "b"], []] -> [[[5, 1], [6, 1]], []]."""
    texts = list(itertools.chain.from_iterable(lists))
    ids = iter(encode_targets(tokenizer, texts, most) if texts else [])
    return [list(itertools.islice(ids, len(of_row))) for of_row in lists]


def text_length(ids: list) -> int:
    """Tokens of an answer, or of the longest of a list: [5, 6, 1] -> 3, [[5, 1], [6, 7, 1]] -> 3, [] -> 0."""
    if ids and isinstance(ids[0], list):
        return max(map(len, ids))
    return len(ids)


def without_end_tokens(
    entry: TaskEntry, tokenizer: PreTrainedTokenizerBase, rows: list[dict], place: str | None = None
) -> list[dict]:
    """The rows, whose free-text targets no longer end in the names of EOS or padding: "a b </s>" -> "a b". The
    tokenizer writes EOS itself.

    place: what the printed line on names that were left out begins with; None prints nothing.
    """
    if entry.target_type != "text":
        return rows
    ends = tuple(filter(None, (tokenizer.eos_token, tokenizer.pad_token)))

    def shortened(value: object) -> object:
        if isinstance(value, list | tuple):
            return list(map(shortened, value))
        while isinstance(value, str) and value.rstrip().endswith(ends):
            value = value.rstrip()
            for end in ends:
                value = value.removesuffix(end)
            value = value.rstrip()
        return value

    kept, cut = [], 0
    for row in rows:
        for column in entry.answer_columns:
            if column in row and (shorter := shortened(row[column])) != row[column]:
                row = row | {column: shorter}
                cut += 1
        kept.append(row)
    if place and cut:
        print_once(f"{place}: {cut:,} targets end in {' or '.join(ends)}, which is left out: the tokenizer writes it")
    return kept


def numbered_labels(entry: TaskEntry, rows: list[dict]) -> str | None:
    """For the plan: "0, 1, 2 are read as the labels contradiction, entailment, neutral", of the targets that are the
    numbers of labels' places; None if there are none."""
    labels, target = entry.labels, entry.target
    if entry.target_type != "class" or any(finite_number(label) is not None for label in labels):
        return None
    values = {str(row[target]).strip() for row in rows if target in row} - {*labels}
    places = sorted((value for value in values if finite_number(value) is not None), key=float)
    if not places:
        return None
    return f"{', '.join(places)} are read as the labels {', '.join(labels[int(float(place))] for place in places)}"


def unchanged_targets(entry: TaskEntry, rows: list[dict]) -> str | None:
    """For the plan: "18 of 90 targets are their sources", of a task of texts, if they are at least 0.5 %; None for
    running text, whose pieces often need no change."""
    if entry.target_type != "text" or entry.is_running_text:
        return None
    same = 0
    for row in rows:
        if entry.target in row:
            source = " ".join(joined_text(row[column]) for column in entry.reads)
            same += bool(source) and source in [text.strip() for text in reference_texts("", entry, row)]
    return f"{same:,} of {len(rows):,} targets are their sources" if same >= max(1, 0.005 * len(rows)) else None


def equal_answers(entry: TaskEntry, rows: list[dict], data: "Dataset") -> str | None:
    """For the plan: "3 of 80 pairs have two equal answers, 1 of them only as they are cut", of a task with further
    answers to each source; None if no pair has, or there are none. rows: those of a split; data: their tokens."""
    told = []
    for name, column in entry.further_answers.items():
        if column.made or name not in data.column_names:
            continue
        equal = cut = 0
        for row, tokens in zip(rows, data, strict=True):
            others = tokens[name] if column.kind == "answers" else [tokens[name]]
            if tokens["labels"] in others:
                equal += 1
                target = str(as_list(row[entry.target])[0]).strip()
                cut += target not in [str(text).strip() for text in as_list(row[column.column])]
        if equal:
            more = f", {cut:,} of them only as they are cut" if cut else ""
            told.append(f"{equal:,} of {len(rows):,} pairs have two equal answers{more}")
    return ", ".join(told) or None


def lost_columns(entry: TaskEntry, tokenizer: PreTrainedTokenizerBase, rows: list[dict], most: int) -> dict[str, int]:
    """{input column: number of the rows whose source has none of it within the first `most` tokens}, without zeros."""
    inputs, lost = list(entry.inputs.items()), Counter()
    for number, (_, column) in enumerate(inputs[1:], start=1):
        without = dataclasses.replace(entry, inputs=dict(inputs[:number]))
        before = source_ids(tokenizer, [source_text(without, row) for row in rows], most)
        for row, ids in zip(rows, before, strict=True):
            lost[column] += len(ids) >= most and bool(joined_text(row[column]).strip())
    return dict(+lost)


def tokenizer_losses(
    name: str, entry: TaskEntry, tokenizer: PreTrainedTokenizerBase, rows: list[dict]
) -> dict[str, Losses]:
    """{"targets": what the tokenizer loses of a sample of them, "sources": the same}, as far as the rows have them.

    Class labels are no targets here: `decode_texts` spells them as the entry does. {} where the entry has a `tokenize`.
    """
    if entry.tokenize:
        return {}
    rows, losses = sampled(rows), {}
    if entry.target_type != "class" and entry.target in rows[0]:
        references = []
        for row in rows:
            texts = reference_texts(name, entry, row)
            if entry.target_type == "number":
                texts = [target_text(name, entry, row)]
            references.append([text[:LONGEST_TEXT] for text in texts])
        encode = functools.partial(encode_targets, tokenizer)
        losses["targets"], read_back = round_trip(tokenizer, list(itertools.chain.from_iterable(references)), encode)
        exact = [metric for metric in entry.metrics if metric in _EXACT] or ["exact_match"]
        equals, right, place = METRICS[exact[0]], [], 0
        for texts in references:  # a row is answered exactly with any of its references
            answers = read_back[place : place + len(texts)]
            place += len(texts)
            if len(answers) == len(texts):
                right.append(max(equals([answer], [texts]) for answer in answers))
        if right:
            losses["targets"].answerable = sum(right) / len(right)
    return losses | {"sources": round_trip(tokenizer, [source_text(entry, row) for row in rows])[0]}


def as_rows(columns: dict[str, list]) -> list[dict]:
    """{"a": [1, 2], "b": [3, 4]} -> [{"a": 1, "b": 3}, {"a": 2, "b": 4}]."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def as_columns(rows: list[dict], names: Iterable[str] | None = None) -> dict[str, list]:
    """[{"a": 1, "b": 3}, {"a": 2, "b": 4}] -> {"a": [1, 2], "b": [3, 4]}. names: of the columns, None: all."""
    return {name: [row[name] for row in rows] for name in (rows[0] if names is None else names)}


def max_lengths(entry: TaskEntry, split: str) -> tuple[int, int | None]:
    """(source, target) lengths in tokens at which the rows of a split are cut; None: not cut. Targets are cut in
    training alone, since metrics compare with the whole target, and class labels never; `cuts_targets` of an entry:
    always, where the model reads them."""
    target = None
    if entry.target_type != "class" and (split == "train" or entry.cuts_targets):
        target = entry.max_target_length
    return entry.max_source_length, target


def target_lengths(name: str, entry: TaskEntry, tokenizer: PreTrainedTokenizerBase, rows: list[dict]) -> list[int]:
    """The tokens of each row's target, uncut, EOS included."""
    if entry.tokenize:
        return [len(entry.tokenize(tokenizer, row)["labels"]) for row in rows]
    rows = without_end_tokens(entry, tokenizer, rows)
    return list(map(len, encode_targets(tokenizer, [target_text(name, entry, row) for row in rows])))


def class_label_ids(entry: TaskEntry, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor | None:
    """[C, T] token ids of the class labels, EOS included, padded with -100; None for tasks without classes.

    UserError if the tokenizer writes two labels alike, or reads a part of one as a special token.
    """
    if entry.target_type != "class":
        return None
    for label in entry.labels:
        for token in tokenizer.all_special_tokens:
            if token in label:
                raise UserError(
                    f"--labels {label}: {token} is a special token of the tokenizer. Take it off the labels."
                )
    if len(labels_as_read_back(entry, tokenizer)) < len(entry.labels):
        raise UserError(
            f"--labels {','.join(entry.labels)}: the tokenizer writes two of them with the same text. Give them "
            "other names, or another --tokenizer_name"
        )
    encoded = [torch.tensor(ids) for ids in encode_targets(tokenizer, entry.labels)]
    return torch.nn.utils.rnn.pad_sequence(encoded, batch_first=True, padding_value=IGNORE_INDEX)


def answer_length(entry: TaskEntry, labels: torch.Tensor | None) -> int:
    """Tokens that an answer may have, EOS included: `max_target_length`, or the longest class label if it has more.
    labels: what `class_label_ids` returns."""
    return max(entry.max_target_length, 0 if labels is None else labels.shape[1])


def decode_texts(entry: TaskEntry, tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> list[str]:
    """The texts [N] of token ids [N, T] padded with -100, without white space at their ends; class labels as the entry
    spells them."""
    texts = decoded(tokenizer, ids)
    names = labels_as_read_back(entry, tokenizer)
    return [names.get(text.strip(), text.rstrip()) for text in texts]


def labels_as_read_back(entry: TaskEntry, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """{what this tokenizer decodes a label to: label}, {} for tasks without classes. A tokenizer without "_" decodes
    "not_entailment" to "notentailment"."""
    if entry.target_type != "class":
        return {}
    texts = decoded(tokenizer, encode_targets(tokenizer, entry.labels))
    return dict(zip((text.strip() for text in texts), entry.labels, strict=True))


def non_canonical_outputs(entry: TaskEntry, tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> dict[str, int]:
    """{"non_canonical_outputs": how many rows of generated ids [N, T] write a label with other tokens than the
    tokenizer does}, {} for tasks without classes.

    Such as _en tail ment EOS for entail ment EOS, or a label without EOS at the maximum length. They count as the label
    where texts are compared, and as no label under teacher forcing.
    """
    if entry.target_type != "class":
        return {}
    canonical, eos = encode_targets(tokenizer, entry.labels), tokenizer.eos_token_id
    no_text = (IGNORE_INDEX, tokenizer.pad_token_id, find_bos_id(tokenizer))  # T5's start token, or Gemma's
    count = 0
    for text, row in zip(decode_texts(entry, tokenizer, ids), ids.tolist(), strict=True):
        written = [token for token in row if token not in no_text]
        if eos in written:
            written = written[: written.index(eos) + 1]  # beam search pads with EOS
        count += text in entry.labels and written not in canonical
    return {"non_canonical_outputs": count}


def task_metrics(
    entry: TaskEntry, tokenizer: PreTrainedTokenizerBase, generated: bool, rows: list[dict]
) -> Callable[["EvalPrediction"], dict[str, float]]:
    """The function from T5Trainer's evaluation output on `rows` to the entry's metrics, loss, token accuracy and what
    features measure.

    generated: the answers are the generated texts, and `non_canonical_outputs` are counted; otherwise they are the
    classes that teacher forcing found.
    """

    def measured(tokens: np.ndarray, statistics: np.ndarray, rows: list[dict]) -> dict[str, float]:
        answers = answer_texts(entry, tokenizer, generated, (tokens, statistics))
        metrics = token_metrics(statistics) | score_predictions(entry, answers, *references_of(entry, rows))
        if generated:
            metrics |= non_canonical_outputs(entry, tokenizer, tokens)
        return metrics

    measure: Callable = measured
    for feature in task_features():
        if feature.measures.names(entry):
            measure = feature.measures.measured(entry, measure)
    return lambda output: measure(*output.predictions, rows)


def references_of(entry: TaskEntry, rows: list[dict]) -> tuple[list, list[tuple] | None]:
    """(target texts, context) of the rows, as `score_predictions` takes them: for each row the text of its class or
    number, or its list of references; and the values of the entry's `metric_columns`, or None if it has none."""
    references = [reference_texts("", entry, row) for row in rows]
    if entry.target_type != "text":
        references = [text for (text,) in references]
    columns = entry.metric_columns
    if not columns:
        return references, None
    return references, [tuple(row[column] for column in columns) for row in rows]


def answer_texts(
    entry: TaskEntry, tokenizer: PreTrainedTokenizerBase, generated: bool, predictions: tuple[np.ndarray, np.ndarray]
) -> list[str]:
    """The answer to each row, from T5Trainer's predictions (ids, statistics): the generated text, or, without
    generation, the label whose tokens greedy decoding would write, "" if it would write none of them."""
    tokens, statistics = predictions
    if generated:
        return decode_texts(entry, tokenizer, tokens)
    classes = statistics[:, STATISTICS.index("predicted_class")].astype(int)
    return [entry.labels[number] if number >= 0 else "" for number in classes]
