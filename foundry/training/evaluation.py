"""Evaluation: rows of similar length in a batch, scored by teacher forcing or answered, each row once.

A greedy decoder writes the tokens of a label if and only if, when it reads that label, its most likely next token is
the label's at every position, EOS included. So one teacher-forced pass over all labels finds the one that greedy
decoding would write, or none (docs/experiments.md: other tokens that spell the same text).

Legend of shapes: B batch, S source length, T target length, C class labels.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedConfig
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction

from constants import IGNORE_INDEX
from foundry.corpora.chunks import is_table, longest_first, row_lengths
from foundry.modeling.decoding import Source
from foundry.modeling.ensemble import members
from foundry.modeling.found_answers import AnswerFinder, is_sharded
from foundry.modeling.loss import STATISTICS, token_nll
from foundry.modeling.rows_at_a_time import parts, rows_to_generate, rows_to_score
from foundry.modeling.segment_masks import SEGMENTS, side_by_side
from foundry.training.row_order import batch_loader


@dataclass(frozen=True)
class EvaluationTask:
    """How the answers to one evaluation data set are found and scored.

    class_label_ids: [C, T], as in T5Trainer. max_length: tokens that `generate` may write, start token included.
    """

    compute_metrics: Callable
    class_label_ids: torch.Tensor | None
    predict_with_generate: bool
    max_length: int


@contextlib.contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """Restores the random generators of Python, NumPy and torch after the block, as if it had drawn nothing. device:
    whose generator is restored beside the CPU's."""
    python = random.getstate()
    arrays = np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


# ---------------------------------------------------------------- batches
def evaluation_loader(trainer: Any, rows: Dataset) -> DataLoader:
    """A loader with rows of similar length in a batch; `in_row_order` restores their order. An evaluation has no data
    workers: its batches are made while the device computes the one before. trainer: the T5Trainer, here and below."""
    return batch_loader(trainer, rows, trainer.args.eval_batch_size, _evaluation_order(rows), trainer.data_collator)


def in_row_order(trainer: Any, dataloader: DataLoader, loop: Callable[[], EvalLoopOutput]) -> EvalLoopOutput:
    """What an evaluation's loop over a loader of `evaluation_loader` gives, with predictions in the order of the rows,
    also for the metrics, and without the rows that are repeated to fill the last batch of all ranks."""
    trainer.gather_function = trainer.accelerator.gather_for_metrics
    if not _has_rows(dataloader.dataset):
        return loop()
    places = np.argsort(_evaluation_order(dataloader.dataset))

    def in_order(predictions, labels) -> dict:
        if predictions is not None:
            predictions = tuple(part[places] for part in predictions)
        if labels is not None:
            labels = labels[places]
        return {"predictions": predictions, "label_ids": labels}

    def compute_in_order(output: EvalPrediction) -> dict:
        return compute(EvalPrediction(**in_order(output.predictions, output.label_ids)))

    compute = trainer.compute_metrics
    if compute is not None:
        trainer.compute_metrics = compute_in_order
    try:
        output = loop()
    finally:
        trainer.compute_metrics = compute
    return output._replace(**in_order(output.predictions, output.label_ids))


def _evaluation_order(rows: Dataset) -> list[int] | None:
    """Numbers of the rows, the longest first. None for chunks of one length or a stream."""
    return longest_first(row_lengths(rows)).tolist() if _has_rows(rows) else None


def _has_rows(dataset: Dataset | list[dict]) -> bool:
    """Whether these are rows with known lengths, rather than chunks of one length or a stream."""
    return isinstance(dataset, list) or is_table(dataset)


# ---------------------------------------------------------------- teacher forcing
class RowScores(NamedTuple):
    """What a teacher-forced pass says of B rows. statistics: STATISTICS and n further ones [B, 5 + n]. encoded: the
    encoder's output [B, S, d_model]; None if there was nothing to score."""

    statistics: torch.Tensor
    encoded: torch.Tensor | None


def score_rows(
    model: nn.Module, config: PreTrainedConfig, inputs: dict, classes: torch.Tensor | None, more: Callable | None
) -> RowScores:
    """Scores the rows' labels and every class label in one teacher-forced forward pass.

    inputs: a batch, with labels [B, T] or without. classes: [C, T] token ids of class labels (EOS included, padded with
    -100). The n further statistics are those of the function `more`, such as an objective's (objectives/objective.py).
    Where rows have a second answer, `rejected` [B, R], `more` also finds `rejected_nats` [B] among its inputs.

    The texts are joined into one decoder sequence with a block-diagonal causal mask, so encoder and cross-attention
    keys are computed once; relative positions within each text stay the same. If every row's label is a class label, it
    is scored from that class's logits; otherwise the labels are fed as well.
    """
    rows, device, labels = len(inputs["input_ids"]), inputs["input_ids"].device, inputs.get("labels")
    statistics = torch.zeros(rows, len(STATISTICS), device=device)
    statistics[:, STATISTICS.index("predicted_class")] = -1
    texts, gold = [], None
    if classes is not None:
        classes = classes.to(device)
        texts = [label[label.ne(IGNORE_INDEX)].expand(rows, -1) for label in classes]
        gold = None if labels is None else _which_class(labels, classes)
    num_classes = len(texts)
    if labels is not None and gold is None:
        texts += [inputs["rejected"], labels] if "rejected" in inputs else [labels]
    if not texts:
        return RowScores(statistics, None)
    lengths, targets = [text.shape[1] for text in texts], torch.cat(texts, dim=1)
    sources = {name: inputs[name] for name in ("input_ids", "attention_mask", *SEGMENTS) if name in inputs}
    joined = side_by_side(texts, config)
    if "target_segments" in inputs:  # packed examples: each begins with the start token
        joined["decoder_input_ids"] = inputs["decoder_input_ids"]
    output = model(**sources, **joined, use_cache=False)
    logits, encoded = output.logits, output.encoder_last_hidden_state
    written = logits.argmax(-1)
    if labels is not None:
        where = torch.arange(targets.shape[1], device=device)[-labels.shape[1] :].expand(rows, -1)
        if gold is not None:  # the positions of the row's class; those after its text have label -100
            first = torch.tensor([0, *lengths], device=device).cumsum(0)[gold, None]
            labels = classes[gold]
            where = (first + torch.arange(labels.shape[1], device=device)).clamp(max=targets.shape[1] - 1)
        own = logits
        if gold is not None or len(texts) > 1:
            own = logits[torch.arange(rows, device=device)[:, None], where]
        correct = written.gather(1, where).eq(labels)
        nats = token_nll(own, labels)
        statistics[:, :4] = _teacher_forced(nats, labels, correct)
        if "rejected" in inputs:
            others = inputs["rejected"]
            inputs = inputs | {"rejected_nats": token_nll(logits[:, : others.shape[1]], others).sum(-1)}
        if more is not None:
            statistics = torch.cat([statistics, more(nats, labels, correct, inputs)], dim=1)
    if num_classes:
        right = written.eq(targets).split(lengths, dim=1)[:num_classes]
        right = torch.stack([tokens.all(-1) for tokens in right], dim=1)
        predicted = torch.where(right.any(-1), right.int().argmax(-1), -1)
        statistics[:, STATISTICS.index("predicted_class")] = predicted.float()
    return RowScores(statistics, encoded)


def _which_class(labels: torch.Tensor, classes: torch.Tensor) -> torch.Tensor | None:
    """The class [B] of each row's labels [B, T'], an index into the class labels [C, T]; None if the labels of any row
    are no class label."""
    length = max(labels.shape[1], classes.shape[1])
    labels, classes = (F.pad(ids, (0, length - ids.shape[1]), value=IGNORE_INDEX) for ids in (labels, classes))
    same = labels[:, None].eq(classes).all(-1)
    return same.int().argmax(-1) if bool(same.any(-1).all()) else None


def _teacher_forced(nats: torch.Tensor, labels: torch.Tensor, correct: torch.Tensor) -> torch.Tensor:
    """Nats, tokens, correct tokens and exact match of each row [B, 4], from nats, labels and correct [B, T]; correct:
    whether the label's token is the most likely one."""
    counted = labels.ne(IGNORE_INDEX)
    exact = (correct | ~counted).all(-1)
    return torch.stack([nats.sum(-1), counted.sum(-1).float(), correct.sum(-1).float(), exact.float()], dim=1)


# ---------------------------------------------------------------- a batch of the trainer's
def score_batch(trainer: Any, model: nn.Module, inputs: dict, labels: torch.Tensor | None) -> RowScores:
    """What `score_rows` says of a batch. Scores few rows at a time, to limit memory: 64 rows of 128 tokens have 8 GB of
    logits with mT5's vocabulary. Under ZeRO-3 and FSDP2 all at once, since all ranks must make the same number of
    forward passes."""
    config = trainer.model.config
    classes = None if trainer.args.predict_with_generate else trainer.class_label_ids
    size = len(inputs["input_ids"])
    if not is_sharded(trainer.model):
        positions = 0 if labels is None else labels.shape[1]
        if classes is not None:
            positions += int(classes.ne(IGNORE_INDEX).sum())
        if "rejected" in inputs:
            positions += inputs["rejected"].shape[1]
        source = inputs["input_ids"].shape[1]
        size = min(rows_to_score(one.config, source, positions) for one in members(trainer.model))
    more = getattr(trainer.data_collator, "statistics", None)
    tensors = {name: values for name, values in inputs.items() if values is not None}
    found = [score_rows(model, config, part, classes, more) for part in parts(tensors, size)]
    statistics = torch.cat([scores.statistics for scores in found])
    if found[0].encoded is None:
        return RowScores(statistics, None)
    return RowScores(statistics, torch.cat([scores.encoded for scores in found]))


def generate_answers(
    trainer: Any, inputs: dict, encoded: torch.Tensor | None, finder: AnswerFinder | None
) -> torch.Tensor:
    """The answers [B, T] to the sources of a batch, behind the token that the decoder reads first. encoded: the
    encoder's output, if it is known. finder: that of the evaluation."""
    model, device = trainer.model, trainer.args.device
    own = model.generation_config
    search = _search_of(trainer)
    lengths = inputs["attention_mask"].sum(1).tolist()
    rows = [Source(ids[:length]) for ids, length in zip(inputs["input_ids"].tolist(), lengths, strict=True)]
    if encoded is not None:
        for row, output in zip(rows, encoded, strict=True):
            row.encoded = output
    finder = finder or AnswerFinder(model, len(rows))
    finder.slots = len(rows)
    if not is_sharded(model):
        longest = search.get("max_length") or own.max_length or 1
        beams = search.get("num_beams") or own.num_beams or 1
        source = inputs["input_ids"].shape[1]
        configs = [one.config for one in members(model)]
        finder.slots = rows_to_generate(configs, source, longest, beams, device, trainer.args.bf16)
    with trainer.accelerator.autocast():  # accelerate wraps the model's forward, which is not called
        finder.find(rows, **search)
    written = []
    for row in rows:
        ids = [own.decoder_start_token_id, *row.answers[0].tokens]
        written.append(torch.tensor(ids, device=device))
    return pad_sequence(written, batch_first=True, padding_value=model.config.pad_token_id)


def _search_of(trainer: Any) -> dict[str, Any]:
    """The arguments of `generate`, kept out of the model's generation_config, which every checkpoint saves."""
    search: dict[str, Any] = {"do_sample": False, "num_return_sequences": 1}
    if trainer.longest_answer is not None:
        search["max_length"] = trainer.longest_answer
    if trainer.args.generation_cache == "static":
        search["cache_implementation"] = "static"
    # transformers' evaluate and predict put --generation_num_beams there (trainer_seq2seq.py), as num_beams.
    return search | trainer._gen_kwargs
