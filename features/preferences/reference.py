"""What training on preferences needs besides the loss: log-probabilities under the reference, and sums over a step.

    add_reference(data, model)                          # before training, as the model is the reference
    callback = PreferenceCallback(trainer, preference)  # in T5Trainer

Legend of shapes: B rows of a batch, N rows of a data set.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object, send_to_device
from transformers import PreTrainedModel, Seq2SeqTrainer, TrainerState, TrainingArguments

from constants import IGNORE_INDEX
from features.preferences import PREFERENCE_METRICS, AnswerMeasures
from features.preferences.losses import OF_PREFERENCE, SUMS, Preference, preference_metrics
from foundry.arguments.training import FineTuningArguments
from foundry.common.terminal import print_once
from foundry.common.whole_folders import cached, difference
from foundry.corpora.chunks import longest_first, row_lengths
from foundry.model_t5 import weights_digest
from foundry.modeling.rows_at_a_time import parts, rows_to_score
from foundry.training.batching import padding_collator
from foundry.training.evaluation import score_rows
from foundry.training.flow import SumsCallback

if TYPE_CHECKING:
    from datasets import Dataset

    from tasks.mixture import TaskData


# ---------------------------------------------------------------- the reference
def add_reference(data: "TaskData", model: PreTrainedModel) -> None:
    """Gives the rows of all splits a column `reference`: the log-probabilities of both answers under `model`, which
    must still have its starting weights. LoRA's matrices may be added already, since they change no output before
    training.
    """
    args, collator = data.training_args, padding_collator(data.tokenizer, model)
    digest = [weights_digest(model) if args.process_index == 0 else None]
    key = hashlib.sha256(f"{broadcast_object_list(digest)[0]} {args.bf16}".encode()).hexdigest()
    (task,) = data.tasks
    task.data = {split: _with_column(rows, model, args, collator, key, data.args) for split, rows in task.data.items()}


def _with_column(rows: "Dataset", model, args: FineTuningArguments, collator, key: str, cache) -> "Dataset":
    """The rows with the column `reference`, read from the cache of prepared data if all processes find it there;
    otherwise it is computed and cached."""
    key = hashlib.sha256(f"{rows._fingerprint} {key}".encode()).hexdigest()[:24]
    folder = Path(cache.data_cache_dir).expanduser()
    kept = folder / f"reference-{key}"
    is_cached = kept.is_dir() and difference(kept) is None and not cache.overwrite_cache
    if not all(gather_object([is_cached])):
        values = _log_probabilities(rows, model, args, collator)
        with args.main_process_first():
            cached(folder, "reference", key, lambda aside: np.save(aside / "reference.npy", values), not is_cached)
    # The fingerprint stays: rows and starting weights decide the column, and a run that resumes compares the rows.
    values = np.load(kept / "reference.npy").tolist()
    return rows.add_column("reference", values, new_fingerprint=rows._fingerprint)


@torch.no_grad()
def _log_probabilities(rows: "Dataset", model, args: FineTuningArguments, collator) -> np.ndarray:
    """Log-probabilities [N, 2] of both answers of each row, without dropout. Each process scores a part of the rows."""
    print_once(f"reference: scoring {len(rows):,} rows with the starting weights, once; they are kept in the cache")
    order = longest_first(row_lengths(rows))
    own, scores = order[args.process_index :: args.world_size], []
    before, was_training = model.device, model.training
    model.to(args.device).eval()
    columns = [0, -len(OF_PREFERENCE)]
    for start in range(0, len(own), args.eval_batch_size):
        batch = collator([rows[int(number)] for number in own[start : start + args.eval_batch_size]])
        batch = send_to_device(dict(batch), args.device)
        size = rows_to_score(model.config, batch["input_ids"].shape[1], batch["labels"].shape[1] * 2)
        with torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16):
            more = AnswerMeasures.statistics
            scored = [score_rows(model, model.config, part, None, more).statistics for part in parts(batch, size)]
        scores.append(-torch.cat(scored)[:, columns].cpu().numpy())
    model.to(before).train(was_training)
    values = np.zeros((len(rows), 2), np.float32)
    for numbers, part in gather_object([(own, np.concatenate(scores or [values[:0]]))]):
        values[numbers] = part
    return values


# ---------------------------------------------------------------- the steps
class PreferenceCallback(SumsCallback):
    """Counts the rows of each step, estimates kto's divergence, and adds preference metrics to the training logs.

    sums: SUMS.
    """

    saved_as = "preferences"
    curves = tuple(f"eval_{name}" for name in PREFERENCE_METRICS)

    def __init__(self, trainer: Seq2SeqTrainer, preference: Preference):
        super().__init__(trainer, len(SUMS))
        self.preference = preference

    def change_batches(self, batches: list[dict[str, torch.Tensor]]) -> None:
        """Counts the rows. For kto, whose rows are unpaired, their answers to other prompts are replaced by
        "divergence": its estimate from those answers in the whole step, as if it were one batch."""
        total = torch.zeros(2, device=self.trainer.args.device)
        for batch in batches:
            counted = batch["labels"].ne(IGNORE_INDEX).any(1)
            total[0] += counted.sum()
            if self.preference.is_unpaired:
                total[1] += (self._of_other_answers(batch) * counted).sum()
        self.rows, divergence = self.trainer.accelerator.reduce(total, "sum")
        for batch in batches if self.preference.is_unpaired else ():
            batch["divergence"] = (divergence / self.rows).clamp(min=0)

    def divisor(self, _batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """The number of rows in all micro-batches and ranks of the step."""
        return self.rows

    @torch.no_grad()
    def _of_other_answers(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Removes the answers to other prompts from a batch, and returns their log-probabilities minus the reference's
        [B], computed without dropout."""
        model, answers = self.trainer.model_wrapped.eval(), batch.pop("rejected")
        sources = {name: batch[name] for name in ("input_ids", "attention_mask")}
        with self.trainer.compute_loss_context_manager():
            output = model(**sources, labels=answers)
        return output["log_probabilities"][:, 0] - batch["reference"][:, 1]

    def on_log(self, _args: TrainingArguments, _state: TrainerState, *_, logs: dict, **__) -> None:
        if "loss" in logs:
            logs |= preference_metrics(self.of_all_ranks())
