"""Loss and evaluation of heads within T5Trainer, which does all else as for texts.

The loss is the sum over what is labelled in a micro-batch, divided by how much is labelled in all micro-batches and
ranks of the step. Labels are -100 where nothing counts: in all tokens of a word but its first, and in padding.

Legend of shapes: B batch, S tokens, T labels of a row (head_kinds.py), C outputs.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedTokenizerBase

from constants import IGNORE_INDEX
from features.encoder_heads.head_kinds import Kind, Tokens
from foundry.modeling.loss import LossOutput
from foundry.trainer_t5 import T5Trainer
from foundry.training.batching import round_up


def head_loss(kind: Kind, smoothing: float) -> Callable:
    """The function that replaces the loss of target tokens (`compute_loss_in_forward`)."""

    def loss(model: Any, labels: torch.Tensor, num_items: torch.Tensor | None, inputs: dict, _chunk: int) -> LossOutput:
        total = kind.nats(outputs_of(model, inputs, kind), labels, smoothing).sum()
        divisor = labels.ne(IGNORE_INDEX).sum() if num_items is None else num_items
        return LossOutput(total / max(divisor, 1))  # of rows that have no known label, the loss is 0

    return loss


def outputs_of(model: Any, inputs: dict, kind: Kind) -> torch.Tensor:
    """The head's outputs in float32: [B, S, C] of tokens, [B, 1, C] of whole texts."""
    read = getattr(model, "plain_forward", model)
    logits = read(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    return kind.pooled(logits, inputs["attention_mask"])


class HeadCollator:
    """Pads rows {"input_ids", "wanted"} to the longest: {"input_ids" [B, S], "attention_mask" [B, S], "labels" [B, T]},
    S a multiple of 8; T is S for labels of tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kind: Kind):
        self.padding, self.of_tokens = tokenizer.pad_token_id, isinstance(kind, Tokens)

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        length = round_up(max(len(row["input_ids"]) for row in rows))
        ids = [torch.as_tensor(row["input_ids"]) for row in rows]
        batch = {"input_ids": self.padded(ids, length, self.padding)}
        batch["attention_mask"] = self.padded([torch.ones_like(one) for one in ids], length, 0)
        if "wanted" in rows[0]:
            # A row that only fills up a batch has other "labels" beside, -100 (`FilledRows`).
            labels = [torch.as_tensor(row.get("labels", row["wanted"])) for row in rows]
            width = length if self.of_tokens else max(map(len, labels))
            batch["labels"] = self.padded(labels, width, IGNORE_INDEX)
        return batch

    @staticmethod
    def padded(rows: list[torch.Tensor], length: int, value: int) -> torch.Tensor:
        return torch.stack([F.pad(row, (0, length - len(row)), value=value) for row in rows])


class EncoderTrainer(T5Trainer):
    """A T5Trainer of an encoder without decoder."""

    @classmethod
    def of(cls, **own: Any) -> type:
        """A subclass with these attributes, which are set once."""
        return type(cls.__name__, (cls,), own | {"__module__": cls.__module__})

    def kept(self, inputs: dict) -> tuple[torch.Tensor, ...]:
        """What an evaluation keeps of a batch, under autocast."""
        raise NotImplementedError

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict,
        prediction_loss_only: bool,  # noqa: ARG002
        ignore_keys: list[str] | None = None,  # noqa: ARG002
    ) -> tuple[None, tuple[torch.Tensor, ...], torch.Tensor]:
        """(None, `kept`, labels [B, T])."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager(), self.accelerator.autocast():
            return None, self.kept(inputs), inputs["labels"]


class HeadTrainer(EncoderTrainer):
    """Its loss and answers are those of a kind of head."""

    kind: Kind

    def kept(self, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """(what `Kind.chosen` keeps [B, T], loss and number of labels of each row [B, 2])."""
        labels, outputs = inputs["labels"], outputs_of(self.model, inputs, self.kind)
        nats = self.kind.nats(outputs, labels).sum(1)
        return self.kind.chosen(outputs, labels), torch.stack([nats, labels.ne(IGNORE_INDEX).sum(1).to(nats)], dim=1)
