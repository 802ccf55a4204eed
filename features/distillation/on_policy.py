"""Steps whose targets are answers of the student: it learns what the teacher would write after its own mistakes.

(GKD, Agarwal et al. 2024, arXiv 2306.13649.) In such a step the divergence is the whole loss: the student's own answers
are no labels. No gradient goes through the drawing.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from constants import IGNORE_INDEX
from foundry.training.drawn_answers import ROW, draw_answers
from foundry.training.run_callback import RunCallback

if TYPE_CHECKING:
    from features.distillation import Teacher

_STEPS = 1  # tells the random numbers of steps from those of answers


def is_on_policy(seed: int, step: int, share: float) -> bool:
    """Whether a step has answers of the student, decided by seed and step alone."""
    return bool(np.random.default_rng([seed, step, 0, _STEPS]).random() < share)


class OnPolicyCallback(RunCallback):
    """In its share of the steps replaces the targets by drawn answers, and leaves the loss on them out.

    own_loss: a tensor that the loss reads, the weight of the loss on the labels.
    """

    def __init__(self, trainer: Any, how: "Teacher", own_loss: torch.Tensor):
        self.trainer, self.how, self.own_loss = trainer, how, own_loss

    def change_batches(self, batches: list[dict[str, torch.Tensor]]) -> None:
        args, how = self.trainer.args, self.how
        is_drawn = is_on_policy(args.seed, self.trainer.state.global_step, how.flags.on_policy_share)
        self.own_loss.fill_(0.0 if is_drawn else 1 - how.flags.distillation_weight)
        answers = draw_answers(self.trainer, batches, how.longest) if is_drawn and batches else [None] * len(batches)
        for batch, drawn in zip(batches, answers, strict=True):
            batch.pop(ROW)
            if drawn is not None:
                counted = batch["labels"].ne(IGNORE_INDEX).any(1, keepdim=True)  # not in the filling of a batch
                batch["labels"] = drawn[:, 0].where(counted, IGNORE_INDEX)
                batch.pop("decoder_input_ids", None)  # of the targets

    def divisor(self, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """The number of target tokens in all micro-batches and ranks of the step."""
        tokens = torch.zeros(1, device=self.trainer.args.device)
        for batch in batches:
            tokens += batch["labels"].ne(IGNORE_INDEX).sum()
        return self.trainer.accelerator.reduce(tokens, "sum")[0]
