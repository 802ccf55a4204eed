"""A teacher's likeliest tokens at each target token of the training rows, computed once and cached on disk.

    teach(data, how)     # adds "teacher_ids" [T * K], "teacher_log_probs" [T * (K + 1)] to the training rows

The last of K + 1 log-probabilities is that of all other tokens (divergence.py). The cache's key holds rows, weights of
the teacher, K and temperature. A target token takes 8 K + 4 bytes.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from constants import IGNORE_INDEX
from data_collator_t5 import shift_right
from features.distillation.divergence import CACHED, Divergence, log_of_others
from features.distillation.teacher import load_teacher
from foundry.arguments.task import TaskArguments
from foundry.common.whole_folders import cached
from foundry.corpora.chunks import row_lengths
from foundry.modeling.families import output_head
from foundry.modeling.loss import CHUNK, head_inputs
from foundry.modeling.rows_at_a_time import rows_to_score

if TYPE_CHECKING:
    from datasets import Dataset

    from features.distillation import Distillation
    from tasks.mixture import TaskData


def teach(data: "TaskData", how: "Distillation") -> None:
    """Gives the training rows the teacher's columns. The teacher is in memory only during the call."""
    teacher = load_teacher(how.teacher, data.training_args)
    divergence = how.divergence(teacher)
    for task in data.tasks:
        task.data["train"] = _taught(task.name, task.data["train"], teacher, divergence, data.args)


def _taught(name: str, rows: "Dataset", teacher: PreTrainedModel, how: Divergence, args: TaskArguments) -> "Dataset":
    import datasets

    decisive = f"{rows._fingerprint} {teacher.contents} {how.top_k} {how.temperature!r}"
    key = hashlib.sha256(decisive.encode()).hexdigest()[:24]
    longest = [int(row_lengths(rows, column).max()) for column in ("input_ids", "labels")]

    def build(folder: Path) -> None:
        rows.map(
            lambda batch: said(teacher, how, batch["input_ids"], batch["labels"]),
            batched=True,
            batch_size=min(64, rows_to_score(teacher.config, *longest)),
            keep_in_memory=True,
            load_from_cache_file=False,
            new_fingerprint=key,
            desc=f"the teacher reads {name}",
        ).save_to_disk(folder / "rows")

    cache = Path(args.data_cache_dir).expanduser()
    return datasets.load_from_disk(cached(cache, f"teacher-{name}", key, build, args.overwrite_cache) / "rows")


@torch.no_grad()
def said(teacher: PreTrainedModel, how: Divergence, sources: list[list[int]], targets: list[list[int]]) -> dict:
    """{"teacher_ids": [T * K] int32 for each row, the teacher's K likeliest tokens at each target token,
    "teacher_log_probs": [T * (K + 1)], their log-probabilities and that of all other tokens}.

    sources, targets: token ids of the rows.
    """
    padding, start, device = teacher.config.pad_token_id, teacher.config.decoder_start_token_id, teacher.device
    ids, labels, mask = (
        pad_sequence([torch.tensor(row) for row in part], True, fill).to(device)
        for part, fill in ((sources, padding), (targets, IGNORE_INDEX), ([[1] * len(row) for row in sources], 0))
    )
    inputs = dict(input_ids=ids, attention_mask=mask, use_cache=False)
    states = head_inputs(teacher, inputs | {"decoder_input_ids": shift_right(labels, start, padding)})
    chunks = []
    for part in states[labels.ne(IGNORE_INDEX)].split(CHUNK):
        log_probs = how.log_probs(part, output_head(teacher).weight)
        top = log_probs.topk(how.top_k)
        chunks.append((top.indices, torch.cat([top.values, log_of_others(log_probs, top.indices)], dim=1)))
    lengths = list(map(len, targets))
    tokens, values = (torch.cat(parts).cpu().split(lengths) for parts in zip(*chunks, strict=True))
    return {
        "teacher_ids": [part.flatten().int().numpy() for part in tokens],
        "teacher_log_probs": [part.flatten().numpy() for part in values],
    }


@dataclass
class TaughtCollator:
    """Adds a teacher's cached predictions for the rows to the batch of `collator`, at the positions
    of their labels: "teacher_ids" [B, T, K] and "teacher_log_probs" [B, T, K + 1]."""

    collator: Callable[[list[dict]], dict[str, torch.Tensor]]
    top_k: int

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        plain = [{name: values for name, values in row.items() if name not in CACHED} for row in rows]
        lengths = [len(row["labels"]) for row in rows]
        # To learn where the collator puts each label, it is called once with the labels' numbers instead of the labels.
        numbers = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
        numbered = [row | {"labels": own.tolist()} for row, own in zip(plain, numbers, strict=True)]
        places, batch = self.collator(numbered)["labels"].clamp(min=0), self.collator(plain)
        for name, width in zip(CACHED, (self.top_k, self.top_k + 1), strict=True):
            # A row of the filling has a whole row's values for its one label: the first are taken, none of them counts.
            values = [np.resize(np.asarray(row[name]), (n, width)) for row, n in zip(rows, lengths, strict=True)]
            batch[name] = torch.from_numpy(np.concatenate(values))[places]
        batch["teacher_ids"] = batch["teacher_ids"].long()
        return batch
