"""A second model, which reads an answer and says how likely the source is: the channel of a noisy channel (Yee et al.
2019, arXiv 1908.05731).

    score = log P(answer | source) / tokens of the answer + weight * log P(source | answer) / tokens of the source

Both are counted by the second model's tokenizer, EOS included, so that a file of answers is all that is needed.
"""

import dataclasses
from pathlib import Path

import torch

from foundry.common.errors import UserError
from foundry.corpora.sentinels import source_ids
from foundry.corpora.tokenizers import encode_targets, load_tokenizer
from foundry.model_t5 import fit_vocabulary, load_model, named_config
from foundry.modeling.found_answers import log_probabilities
from foundry.publishing.exports import export_of
from tasks.entry import TaskEntry
from tasks.own_pairs import prefix_of
from tasks.predictions import recorded_task
from tasks.row_texts import source_text


def task_of_channel(model: str, task: str | None, prefix: str | None) -> TaskEntry:
    """The entry of the task that the second model does. UserError if it reads or writes anything but one text."""
    named_config(model, "--rerank_model")
    try:
        entry, _ = recorded_task(str(export_of(Path(model))), task)
    except UserError as error:
        raise UserError(str(error).replace("--dataset_name", "--rerank_task", 1)) from None
    if len(entry.inputs) > 1 or entry.target_type != "text" or entry.is_running_text:
        raise UserError(
            f"--rerank_model {model}: its task reads {', '.join(entry.inputs.values())} and writes a "
            f"{entry.target_type}. Name a model that reads an answer and writes a source"
        )
    return entry if prefix is None else dataclasses.replace(entry, prefix=prefix_of(prefix))


def files_of_model(model: str) -> list[Path]:
    """The files that decide what the second model says."""
    patterns = ("*model*.safetensors", "*model*.bin", "task.json")
    return [file for pattern in patterns for file in sorted(Path(model).glob(pattern))]


class Channel:
    """The second model, loaded. batch_size: answers that it reads at a time."""

    def __init__(
        self, model: str, task: str | None, prefix: str | None, device: torch.device, batch_size: int, bf16: bool
    ):
        self.entry, self.device, self.size = task_of_channel(model, task, prefix), device, batch_size
        self.tokenizer = load_tokenizer(model, "--rerank_model")
        self.model = load_model(model, flag="--rerank_model")
        fit_vocabulary(self.model, self.tokenizer)
        self.model = self.model.to(device, torch.bfloat16 if bf16 else None).eval()

    def scored(
        self, sources: list[str], answers: list[list[str]], nats: list[list[float]], weight: float
    ) -> list[list[dict[str, float]]]:
        """The score of each answer, and log P(source | answer). nats: log P(answer | source)."""
        found = []
        for source, texts, known in zip(sources, answers, nats, strict=True):
            back, read, written = self.log_probabilities(source, texts)
            found.append(
                [
                    {
                        "score": round(round(direct, 4) / tokens + weight * channel / written, 4),
                        "source_log_probability": round(channel, 4),
                    }
                    for direct, channel, tokens in zip(known, back, read, strict=True)
                ]
            )
        return found

    @torch.no_grad()
    def log_probabilities(self, source: str, answers: list[str]) -> tuple[list[float], list[int], int]:
        """([N] log P(source | answer) in nats; [N] tokens of the answers; tokens of the source)."""
        (column,) = self.entry.reads
        sources = [source_text(self.entry, {column: text}) for text in answers]
        read = source_ids(self.tokenizer, sources, self.entry.max_source_length)
        (target,) = encode_targets(self.tokenizer, [source])
        start = [self.model.config.decoder_start_token_id]
        written, found = torch.tensor([start + target], device=self.device), []
        for begin in range(0, len(read), self.size):
            part = read[begin : begin + self.size]
            batch = self.tokenizer.pad({"input_ids": part}, return_tensors="pt", pad_to_multiple_of=8).to(self.device)
            nats = log_probabilities(self.model, batch, written.expand(len(part), -1), 1)
            found += nats.sum(dim=1).tolist()
        return found, list(map(len, encode_targets(self.tokenizer, answers))), len(target)
