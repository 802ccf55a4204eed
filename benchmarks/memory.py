"""What a training step keeps for its backward pass: bytes of the tensors that autograd holds, by model and settings.

A forward pass alone is needed, so that a CPU counts a model that it could not train. torch.compile is left out: it
keeps less, and what it keeps is not known before it has compiled.
"""

import contextlib
from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import torch

from benchmarks import measure, step
from benchmarks.kept import kept_bytes
from data_collator_t5 import T5DataCollator
from foundry.trainer_t5 import set_up_step

CASES = (("eager", 0.0), ("eager", 0.1), ("sdpa", 0.0), ("sdpa", 0.1))  # attention, dropout
WAYS = {
    "ours": "T5Trainer's step",
    "plain": "T5Trainer's step with --recompute false: transformers' layers",
    "transformers": "transformers' model as it comes",
    "checkpointing": "transformers' model with gradient checkpointing",
}


def measure_memory(args: Namespace) -> dict:
    """MiB that autograd keeps, and MiB of autocast's copies of weights beside them, of each way and case."""
    config = measure.benchmark_config(args.model)
    (batch,) = measure.random_batches(config, args.batch, args.source_length, 1, args.device)
    rows: dict[str, dict] = {}
    for way, text in WAYS.items():
        for attention, dropout in CASES:
            row = _new_row(rows, way, text, attention, dropout)
            with measure.recording(row):
                model = _prepared(way, config, attention, dropout, args)
                _count(row, model, batch, args)
                del model
            args.keep(_result(args, rows))
    if args.nanot5:
        collator = T5DataCollator(measure.bare_tokenizer(config.vocab_size), args.source_length)
        for dropout in (0.0, 0.1):
            row = _new_row(rows, "nanot5", "nanoT5's own model", "eager", dropout)
            with measure.recording(row):
                row |= step.published_steps("nanot5", args.nanot5, config, collator, args, kept_at=dropout)
    return _result(args, rows)


def _new_row(rows: dict[str, dict], way: str, text: str, attention: str, dropout: float) -> dict:
    row = dict(name=f"{way} {attention} {dropout:g}", what=text, attention=attention, dropout=dropout)
    rows[row["name"]] = row
    return row


def _result(args: Namespace, rows: dict[str, dict]) -> dict:
    return measure.setting_of(args) | {"rows": list(rows.values())}


def _prepared(way: str, config, attention: str, dropout: float, args: Namespace) -> torch.nn.Module:
    """A new model in training mode, as its trainer prepares it."""
    model = measure.new_model(config, way in ("ours", "plain"), attention, dropout).to(args.device).train()
    if way in ("ours", "plain"):
        flags = step.STEP_OPTIONS | dict(torch_compile=False, label_smoothing_factor=0.0, recompute=way == "ours")
        set_up_step(model, SimpleNamespace(**flags))
    elif way == "checkpointing":
        model.gradient_checkpointing_enable()
    return model


def _count(row: dict, model: torch.nn.Module, batch: dict, args: Namespace) -> None:
    """Adds to the row what autograd keeps of a forward pass."""
    context = partial(torch.autocast, args.device.type, torch.bfloat16) if args.bf16 else contextlib.nullcontext

    def forward() -> torch.Tensor:
        with context():
            return model(**batch, use_cache=False)["loss"]

    kept = kept_bytes(forward, model.parameters())
    row |= dict(kept_mib=kept.activations / 2**20, weight_copies_mib=kept.weight_copies / 2**20)
