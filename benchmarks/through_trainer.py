"""Training through a Trainer, this project's or transformers' own, timed in turn; and the ways to pre-train so."""

import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import transformers
from torch.utils.data import Dataset
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config

from arguments.training import PreTrainingArguments, check_training
from benchmarks.inputs import peer_collator
from benchmarks.material import bare_tokenizer, benchmark_config, new_model, setting_of
from benchmarks.measure import Ceiling, compared, first_that_fits, interleaved, synchronize
from corpora.examples import ChunkDataset
from data_collator_t5 import T5DataCollator
from runs.speed import job_of, make_fast
from trainer_t5 import T5Trainer

CHUNKS = 4096  # of random tokens; all ways train on them
LONG_RUN = 65_536  # steps of the run for which --speed chooses


@dataclass(frozen=True)
class Way:
    """A way to train. pads: in fine-tuning, what rows are padded to. flags: training arguments. ours: with T5Trainer.
    compiled: only with --compile."""

    text: str
    pads: str = ""
    flags: dict = field(default_factory=dict)
    dropout: float = 0.0
    attention: str = "sdpa"
    ours: bool = False
    compiled: bool = False


def trainer_flags(args: Namespace, folder: str) -> dict:
    """Training arguments of all trainers here. At this learning rate the weights hardly change."""
    silent = dict(report_to="none", disable_tqdm=True, eval_strategy="no", save_strategy="no", logging_strategy="no")
    return dict(output_dir=folder, use_cpu=args.device.type == "cpu", bf16=args.bf16, learning_rate=1e-7, **silent)


def rows_of(ways: dict[str, Way], args: Namespace) -> dict[str, dict]:
    """A row for each way that is measured."""
    taken = {name: way for name, way in ways.items() if args.compile or not way.compiled}
    return {name: {"name": name, "what": way.text, "settings": {"ours": way.ours}} for name, way in taken.items()}


class Timer(transformers.TrainerCallback):
    """`seconds` of a training from the end of its step `untimed` (0: from its beginning) to the end of its last epoch,
    waiting for data included. The trainer gets it as `trainer.timer`, and prints no more."""

    def __init__(self, trainer: Seq2SeqTrainer, untimed: int = 0):
        self.untimed = untimed
        trainer.timer = self
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.add_callback(self)

    def on_epoch_begin(self, _args, state: transformers.TrainerState, _control, **_) -> None:
        if state.global_step == self.untimed:
            synchronize()
            self.begun = time.perf_counter()

    on_step_end = on_epoch_begin

    def on_epoch_end(self, *_, **__) -> None:
        synchronize()
        self.seconds = time.perf_counter() - self.begun


def trained_in_turn(rows: dict[str, dict], make: Callable[[str], Seq2SeqTrainer], args: Namespace, **options) -> dict:
    """{name of a row: seconds of each of its trainings}; a non-finite loss is an ArithmeticError, in its row.

    make: the trainer of a row, with a Timer; called once for a row. options: of `interleaved`.
    """
    trainers = {}

    def train(name: str) -> float:
        trainer = trainers.pop(name, None) or make(name)  # what fails is freed
        loss = rows[name]["training_loss"] = trainer.train().training_loss
        if not np.isfinite(loss):
            raise ArithmeticError(f"the loss became {loss}")
        trainers[name] = trainer
        return trainer.timer.seconds

    runs = {name: partial(train, name) for name in rows}
    return interleaved(runs, args.rounds, args.deadline, rows=rows, clock=lambda run: run(), **options)


# ---------------------------------------------------------------- pre-training
_WORKERS = dict(flags=dict(dataloader_num_workers=4, dataloader_pin_memory=True))
WAYS = {
    "plain_trainer": Way("Seq2SeqTrainer as it comes: sdpa, fused AdamW, dropout 0.1", dropout=0.1),
    "tuned_trainer": Way("Seq2SeqTrainer, no dropout, no cache, data workers", **_WORKERS),
    "compiled_eager": Way("the same, eager attention, compiled", attention="eager", compiled=True, **_WORKERS),
    "compiled_sdpa": Way("the same, sdpa, compiled", compiled=True, **_WORKERS),
    "ours": Way("T5Trainer with what --speed chooses, RMS-scaled AdamW", ours=True),
    "ours_muon": Way("the same, Muon", flags=dict(optim="muon"), ours=True),
}


def measure_trainer(args: Namespace) -> dict:
    """{"rows": sequences/s of each of WAYS, in turn A B A B, "ratio": ours with its default optimizer to the strongest
    peer, ...}.

    All train the same random tokens, --batch sequences per step, at a rate at which nothing changes. Peers take their
    batches from the collator of --nanot5, else from its stand-in. What runs out of memory accumulates smaller batches.
    args.keep is called with the result so far after every round.
    """
    config = benchmark_config(args.model)
    ours = T5DataCollator(bare_tokenizer(config.vocab_size), args.source_length)
    peers, peers_name = peer_collator(args.nanot5, ours, config.vocab_size)
    tokens = np.random.default_rng(0).integers(3, config.vocab_size - 110, CHUNKS * ours.tokens_length, np.uint16)
    chunks = ChunkDataset(tokens, ours.tokens_length)
    lists = [{"input_ids": row.tolist()} for row in chunks.chunks[: min(CHUNKS, 64 * args.batch)]]
    rows = rows_of(WAYS, args)
    ceiling = Ceiling(config, ours.inputs_length, ours.targets_length, args)
    result = setting_of(args) | dict(peers_collator=peers_name, steps=args.steps, compiled=args.compile)

    def so_far(seconds: dict[str, list[float]]) -> dict:
        for name, values in seconds.items():
            rows[name] |= ceiling.rates([value / args.steps for value in values], args.batch)
        ratios = compared({name: row for name, row in rows.items() if name != "ours_muon"}, ["ours"], "plain_trainer")
        of_ours = None if "error" in rows["ours"] else rows["ours"].get("sequences_per_second")
        return result | ratios | {"rows": list(rows.values()), "rate_of_ours": of_ours}

    def make(name: str) -> Seq2SeqTrainer:
        data = (chunks, ours) if WAYS[name].ours else (lists, peers)
        build = partial(first_trainer, WAYS[name], config, data, args, folder)
        trainer = first_that_fits(rows[name], args.device, build, args.batch)
        if trainer is None:
            raise RuntimeError(rows[name].pop("error"))
        size, accumulated = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
        rows[name] |= dict(batch=f"{size} x {accumulated}", speed=trainer.speed)
        return trainer

    with tempfile.TemporaryDirectory() as folder:
        return so_far(trained_in_turn(rows, make, args, warm_up=0, each_round=lambda found: args.keep(so_far(found))))


def first_trainer(
    way: Way, config: T5Config, data: tuple[Dataset | list, Any], args: Namespace, folder: str, size: int
) -> Seq2SeqTrainer:
    """The trainer of a way after its first steps, which compile and reserve memory. Batches of `size` sequences are
    accumulated to --batch. data: (data set, its collator)."""
    model, (dataset, collator) = new_model(config, way.ours, way.attention, way.dropout), data
    flags = trainer_flags(args, folder) | way.flags | dict(max_steps=args.steps + 1)
    flags |= dict(per_device_train_batch_size=size, gradient_accumulation_steps=args.batch // size)
    if flags["use_cpu"]:
        flags.pop("dataloader_num_workers", None)  # the cores compute
    speed = None
    if way.ours:
        arguments = PreTrainingArguments(**flags, warmup_steps=0)
        check_training(arguments, "pre-training from scratch")
        chosen_here = dict(bf16=True, torch_compile=not args.compile, per_device_train_batch_size=size < args.batch)
        arguments.given = frozenset(name for name, is_given in chosen_here.items() if is_given)
        job = job_of(model, collator.inputs_length, collator.targets_length, 1, LONG_RUN, None)
        speed = make_fast(model, job, Namespace(attn_implementation=None), arguments)
    else:
        model.config.use_cache = model.decoder.config.use_cache = way.dropout > 0  # the default has one
        arguments = Seq2SeqTrainingArguments(**flags, torch_compile=way.compiled, remove_unused_columns=False)
    kind = T5Trainer if way.ours else Seq2SeqTrainer
    trainer = kind(model=model, args=arguments, train_dataset=dataset, data_collator=collator)
    trainer.speed = speed
    Timer(trainer, untimed=1)
    trainer.train()
    return trainer
