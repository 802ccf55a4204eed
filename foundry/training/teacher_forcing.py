"""Scores rows by teacher forcing: their loss and, without generating, the class label that the model would write.

A greedy decoder writes the tokens of a label if and only if, when it reads that label, its most likely next token is
the label's at every position, EOS included. So one teacher-forced pass over all labels finds the one that greedy
decoding would write, or none (docs/experiments.md: other tokens that spell the same text).

Legend of shapes: B batch, T target length, C class labels.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from constants import IGNORE_INDEX
from foundry.modeling.loss import STATISTICS, nats_of
from foundry.modeling.segment_masks import SEGMENTS, side_by_side


def score_rows(
    model: nn.Module, config: PreTrainedConfig, inputs: dict, classes: torch.Tensor | None, more: Callable | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores the rows' labels and every class label in one teacher-forced forward pass. Returns (STATISTICS and n
    further ones [B, 5 + n] of the rows; the encoder's output [B, S, d_model], or None if there is nothing to score).

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
        return statistics, None
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
        elsewhere = gold is not None or len(texts) > 1
        own = logits[torch.arange(rows, device=device)[:, None], where] if elsewhere else logits
        correct = written.gather(1, where).eq(labels)
        nats = nats_of(own, labels)
        statistics[:, :4] = _teacher_forced(nats, labels, correct)
        if "rejected" in inputs:
            others = inputs["rejected"]
            inputs = inputs | {"rejected_nats": nats_of(logits[:, : others.shape[1]], others).sum(-1)}
        if more is not None:
            statistics = torch.cat([statistics, more(nats, labels, correct, inputs)], dim=1)
    if num_classes:
        right = written.eq(targets).split(lengths, dim=1)[:num_classes]
        right = torch.stack([tokens.all(-1) for tokens in right], dim=1)
        predicted = torch.where(right.any(-1), right.int().argmax(-1), -1)
        statistics[:, STATISTICS.index("predicted_class")] = predicted.float()
    return statistics, encoded


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
