"""Token ids of the rows of tasks, and texts and metrics of a model's answers.

A row goes through three steps: tasks/rows.py gives it the entry's columns, `source_text` and `target_text` of
tasks/registry.py make T5's texts of them, and the function of `build_tokenize_function` makes token ids.
"""

import itertools
import math
import operator
import unicodedata
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import EvalPrediction

from constants import IGNORE_INDEX
from data_collator_t5 import find_bos_id
from features import task_features
from foundry.common.errors import UserError
from foundry.common.processes import print_once
from foundry.corpora.gaps import source_ids
from foundry.corpora.round_trip import LONGEST_TEXT, Losses, round_trip, sampled
from foundry.corpora.tokenizers import decoded, encode_targets
from foundry.modeling.loss import STATISTICS, token_metrics
from tasks.metrics.scoring import METRICS, score_predictions
from tasks.registry import (
    answer_columns,
    answers_of,
    as_list,
    column_value,
    further_columns,
    number_of,
    reference_texts,
    source_text,
    target_text,
)

if TYPE_CHECKING:
    from datasets import Dataset

_EXACT = ("exact_match", "squad_exact_match")  # metrics that are 1 for the right text alone


def build_tokenize_function(
    name: str, task: dict, tokenizer: PreTrainedTokenizerBase, max_source_length: int, max_target_length: int | None
) -> Callable[[dict], dict]:
    """The function from a batch of rows {column: values} to "input_ids", "attention_mask" and "labels", each cut and
    with EOS; also the entry's `further_columns`, under their names.

    Lengths are in tokens, EOS included. Rows without the target column (test data) get no labels. Where the entry has a
    `tokenize`, its ids are taken as they are; the function raises UserError if they are none or too many.
    """
    columns = further_columns(task)

    def by_entry(rows: list[dict]) -> dict[str, list]:
        tokenised = [task["tokenize"](tokenizer, row) for row in rows]
        made = {}
        for side, most in (("input_ids", max_source_length), ("labels", max_target_length)):
            if side == "input_ids" or task["target"] in rows[0]:
                made[side] = [list(map(int, ids[side])) for ids in tokenised]
                if not all(0 < len(ids) <= (most or math.inf) for ids in made[side]):
                    raise UserError(
                        f"task {name}, tokenize: it returns {max(map(len, made[side]))} {side} for a row, and there "
                        f"must be 1 to {most or 'any number'}. Cut them, or raise the entry's lengths"
                    )
        return made | {"attention_mask": [[1] * len(ids) for ids in made["input_ids"]]}

    def tokenize(batch: dict[str, list]) -> dict[str, list]:
        rows = as_rows(batch)
        if "tokenize" in task:
            return by_entry(rows)
        sources = source_ids(tokenizer, [source_text(task, row) for row in rows], max_source_length)
        made: dict[str, list] = {"input_ids": sources, "attention_mask": [[1] * len(ids) for ids in sources]}
        if task["target"] in batch:
            texts = [target_text(name, task, row) for row in rows]
            made["labels"] = encode_targets(tokenizer, texts, max_target_length)
            for beside, column in columns.items():
                if column.column in batch:
                    values: list = [column_value(column, row) for row in rows]
                    if column.kind == "answer":
                        values = encode_targets(tokenizer, values, max_target_length)
                    elif column.kind == "answers":
                        values = encode_lists(tokenizer, values, max_target_length)
                    made[beside] = values
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
    task: dict, tokenizer: PreTrainedTokenizerBase, rows: list[dict], place: str | None = None
) -> list[dict]:
    """The rows, whose free-text targets no longer end in the names of EOS or padding: "a b </s>" -> "a b". The
    tokenizer writes EOS itself.

    place: what the printed line on names that were left out begins with; None prints nothing.
    """
    ends = tuple(token for token in (tokenizer.eos_token, tokenizer.pad_token) if token)

    def shortened(text: object) -> object:
        while isinstance(text, str) and text.rstrip().endswith(ends):
            text = text.rstrip()
            text = text.removesuffix(next(end for end in ends if text.endswith(end))).rstrip()
        return text

    kept, cut = [], 0
    columns = answer_columns(task) if task["target_type"] == "text" else []
    for row in rows:
        for column in filter(row.__contains__, columns):
            value = row[column]
            texts = list(map(shortened, value)) if isinstance(value, list | tuple) else shortened(value)
            if texts != value:
                row, cut = row | {column: texts}, cut + 1
        kept.append(row)
    if place and cut:
        print_once(f"{place}: {cut:,} targets end in {' or '.join(ends)}, which is left out: the tokenizer writes it")
    return kept


def numbered_labels(task: dict, rows: list[dict]) -> str | None:
    """For the plan: "0, 1, 2 are read as the labels contradiction, entailment, neutral", of the targets that are the
    numbers of labels' places; None if there are none."""
    labels, target = task.get("labels", []), task["target"]
    if task["target_type"] != "class" or any(number_of(label) is not None for label in labels):
        return None
    values = {str(row[target]).strip() for row in rows if target in row} - {*labels}
    values = sorted((value for value in values if number_of(value) is not None), key=float)
    read_as = ", ".join(labels[int(float(value))] for value in values)
    return f"{', '.join(values)} are read as the labels {read_as}" if values else None


def unchanged_targets(task: dict, rows: list[dict]) -> str | None:
    """For the plan: "18 of 90 targets are their sources", of a task of texts, if they are at least 0.5 %; None for
    running text, whose pieces often need no change."""
    if task["target_type"] != "text" or "max_piece_length" in task:
        return None
    columns, same = task["inputs"].values(), 0
    for row in (row for row in rows if task["target"] in row):
        source = " ".join(str(item).strip() for column in columns for item in as_list(row[column]))
        same += bool(source) and source in (text.strip() for text in reference_texts("", task, row))
    return f"{same:,} of {len(rows):,} targets are their sources" if same >= max(1, 0.005 * len(rows)) else None


def equal_answers(task: dict, rows: list[dict], data: "Dataset") -> str | None:
    """For the plan: "3 of 80 pairs have two equal answers, 1 of them only as they are cut", of a task with further
    answers to each source; None if no pair has, or there are none. rows: those of a split; data: their tokens."""
    told = []
    for name, column in answers_of(task).items():
        if column.made or name not in data.column_names:
            continue
        is_equal = operator.contains if column.kind == "answers" else operator.eq
        equal = sum(sum(map(is_equal, batch[name], batch["labels"])) for batch in data.iter(1_000))
        texts = ([str(text).strip() for text in as_list(row[column.column])] for row in rows)
        targets = (str(as_list(row[task["target"]])[0]).strip() for row in rows)
        cut = equal - sum(map(operator.contains, texts, targets))
        more = f", {cut:,} of them only as they are cut" if cut > 0 else ""
        told += [f"{equal:,} of {len(rows):,} pairs have two equal answers{more}"] if equal else []
    return ", ".join(told) or None


def lost_columns(task: dict, tokenizer: PreTrainedTokenizerBase, rows: list[dict], most: int) -> dict[str, int]:
    """{input column: number of the rows whose source has none of it within the first `most` tokens}, without zeros."""
    inputs, lost = list(task["inputs"].items()), Counter()
    for number, (_, column) in enumerate(inputs[1:], start=1):
        before = [source_text(task | {"inputs": dict(inputs[:number])}, row) for row in rows]
        ids = source_ids(tokenizer, before, most)
        is_there = (any(str(item).strip() for item in as_list(row[column])) for row in rows)
        lost[column] = sum(len(one) >= most and there for one, there in zip(ids, is_there, strict=True))
    return dict(+lost)


def losses_of(name: str, task: dict, tokenizer: PreTrainedTokenizerBase, rows: list[dict]) -> dict[str, Losses]:
    """{"targets": what the tokenizer loses of a sample of them, "sources": the same}, as far as the rows have them.

    Class labels are no targets here: `decode_texts` spells them as the entry does. {} where the entry has a `tokenize`.
    """
    if "tokenize" in task:
        return {}
    rows, losses = sampled(rows), {}
    if task["target_type"] != "class" and task["target"] in rows[0]:
        write = reference_texts if task["target_type"] == "text" else lambda *one: [target_text(*one)]
        references = [[text[:LONGEST_TEXT] for text in write(name, task, row)] for row in rows]
        losses["targets"], written = round_trip(tokenizer, [text for texts in references for text in texts])
        equals = next((METRICS[metric] for metric in task["metrics"] if metric in _EXACT), METRICS["exact_match"])
        written, right = iter(written), []
        for texts in references:  # a row is answered exactly with any of its references
            answers = list(itertools.islice(written, len(texts)))
            right += [max(equals([answer], [texts]) for answer in answers)] if len(answers) == len(texts) else []
        losses["targets"].answerable = sum(right) / len(right) if right else None
    return losses | {"sources": round_trip(tokenizer, [source_text(task, row) for row in rows])[0]}


def as_rows(columns: dict[str, list]) -> list[dict]:
    """{"a": [1, 2], "b": [3, 4]} -> [{"a": 1, "b": 3}, {"a": 2, "b": 4}]."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def max_lengths(task: dict, split: str) -> tuple[int, int | None]:
    """(source, target) lengths in tokens at which the rows of a split are cut; None: not cut. Targets are cut in
    training alone, since metrics compare with the whole target, and class labels never; `cuts_targets` of an entry:
    always, where the model reads them."""
    is_cut = split == "train" or task.get("cuts_targets", False)
    cuts_targets = is_cut and task["target_type"] != "class"
    return task["max_source_length"], task["max_target_length"] if cuts_targets else None


def target_lengths(name: str, task: dict, tokenizer: PreTrainedTokenizerBase, rows: list[dict]) -> list[int]:
    """The tokens of each row's target, uncut, EOS included."""
    if "tokenize" in task:
        return [len(task["tokenize"](tokenizer, row)["labels"]) for row in rows]
    rows = without_end_tokens(task, tokenizer, rows)
    return list(map(len, encode_targets(tokenizer, [target_text(name, task, row) for row in rows])))


def class_label_ids(task: dict, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor | None:
    """[C, T] token ids of the class labels, EOS included, padded with -100; None for tasks without classes.

    UserError if the tokenizer writes two labels alike, or reads a part of one as a special token.
    """
    if task["target_type"] != "class":
        return None
    for label in task["labels"]:
        if token := next((token for token in tokenizer.all_special_tokens if token in label), None):
            raise UserError(f"--labels {label}: {token} is a special token of the tokenizer. Take it off the labels.")
    encoded = encode_targets(tokenizer, task["labels"])
    plain = Counter(unicodedata.normalize("NFKC", label) for label in task["labels"])
    if len(_labels_as_read_back(task, tokenizer)) < len(encoded):
        if alike := [ascii(label) for label in task["labels"] if plain[unicodedata.normalize("NFKC", label)] > 1]:
            raise UserError(
                f"--labels {','.join(task['labels'])}: {' and '.join(alike)} look alike, and the tokenizer writes them "
                "with the same text. Write one class in one way, or keep them apart with a tokenizer of "
                "create_tokenizer.py --normalization identity"
            )
        raise UserError(
            f"--labels {','.join(task['labels'])}: the tokenizer writes two of them with the same text. Give them "
            "other names, or another --tokenizer_name"
        )
    longest = max(len(ids) for ids in encoded)
    return torch.tensor([ids + [IGNORE_INDEX] * (longest - len(ids)) for ids in encoded])


def answer_length(task: dict, labels: torch.Tensor | None) -> int:
    """Tokens that an answer may have, EOS included: `max_target_length`, or the longest class label if it has more.
    labels: what `class_label_ids` returns."""
    return max(task["max_target_length"], 0 if labels is None else labels.shape[1])


def decode_texts(task: dict, tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> list[str]:
    """The texts [N] of token ids [N, T] padded with -100, without white space at their ends; class labels as the entry
    spells them."""
    texts = decoded(tokenizer, ids)
    names = _labels_as_read_back(task, tokenizer)
    return [names.get(text.strip(), text.rstrip()) for text in texts]


def _labels_as_read_back(task: dict, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """{what this tokenizer decodes a label to: label}, {} for tasks without classes. A tokenizer without "_" decodes
    "not_entailment" to "notentailment"."""
    if task["target_type"] != "class":
        return {}
    texts = decoded(tokenizer, encode_targets(tokenizer, task["labels"]))
    return dict(zip((text.strip() for text in texts), task["labels"], strict=True))


def non_canonical_outputs(task: dict, tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> dict[str, int]:
    """{"non_canonical_outputs": how many rows of generated ids [N, T] write a label with other tokens than the
    tokenizer does}, {} for tasks without classes.

    Such as _en tail ment EOS for entail ment EOS, or a label without EOS at the maximum length. They count as the label
    where texts are compared, and as no label under teacher forcing.
    """
    if task["target_type"] != "class":
        return {}
    canonical, eos = encode_targets(tokenizer, task["labels"]), tokenizer.eos_token_id
    no_text = (IGNORE_INDEX, tokenizer.pad_token_id, find_bos_id(tokenizer))  # T5's start token, or Gemma's
    written = [[int(token) for token in row if token not in no_text] for row in ids]
    written = [row[: row.index(eos) + 1] if eos in row else row for row in written]  # beam search pads with EOS
    pairs = zip(decode_texts(task, tokenizer, ids), written, strict=True)
    return {"non_canonical_outputs": sum(text in task["labels"] and row not in canonical for text, row in pairs)}


def task_metrics(
    task: dict, tokenizer: PreTrainedTokenizerBase, generated: bool, rows: list[dict]
) -> Callable[[EvalPrediction], dict[str, float]]:
    """The function from T5Trainer's evaluation output on `rows` to the entry's metrics, loss, token accuracy and what
    features measure.

    generated: the answers are the generated texts, and `non_canonical_outputs` are counted; otherwise they are the
    classes that teacher forcing found.
    """

    def compute(output: EvalPrediction) -> dict[str, float]:
        measure: Callable = measured
        for feature in task_features():
            measure = feature.measures.measured(task, measure)
        return measure(*output.predictions, rows)

    def measured(tokens: np.ndarray, statistics: np.ndarray, rows: list[dict]) -> dict[str, float]:
        answers = answer_texts(task, tokenizer, generated, (tokens, statistics))
        metrics = token_metrics(statistics) | score_predictions(task, answers, *references_of(task, rows))
        return metrics | (non_canonical_outputs(task, tokenizer, tokens) if generated else {})

    return compute


def references_of(task: dict, rows: list[dict]) -> tuple[list, list[tuple] | None]:
    """(target texts, context) of the rows, as `score_predictions` takes them: for each row the text of its class or
    number, or its list of references; and the values of the entry's `metric_columns`, or None if it has none."""
    references = [reference_texts("", task, row) for row in rows]
    if task["target_type"] != "text":
        references = [text for (text,) in references]
    columns = task.get("metric_columns", [])
    return references, [tuple(row[column] for column in columns) for row in rows] if columns else None


def answer_texts(
    task: dict, tokenizer: PreTrainedTokenizerBase, generated: bool, predictions: tuple[np.ndarray, np.ndarray]
) -> list[str]:
    """The answer to each row, from T5Trainer's predictions (ids, statistics): the generated text, or, without
    generation, the label whose tokens greedy decoding would write, "" if it would write none of them."""
    tokens, statistics = predictions
    if generated:
        return decode_texts(task, tokenizer, tokens)
    classes = statistics[:, STATISTICS.index("predicted_class")].astype(int)
    return [task["labels"][number] if number >= 0 else "" for number in classes]
