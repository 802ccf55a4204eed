"""Training by T5Trainer and by transformers' Seq2SeqTrainer, timed in turn: pre-training, and a classifier."""

import copy
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import transformers
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config

from benchmarks.inputs import peer_collator
from benchmarks.measure import (
    Ceiling,
    bare_tokenizer,
    benchmark_config,
    compared,
    interleaved,
    largest_that_fits,
    new_model,
    padded_batch,
    random_sources,
    setting_of,
    synchronize,
    timed,
)
from benchmarks.scripts import measure_apart
from data_collator_t5 import T5DataCollator
from foundry.arguments.training import FineTuningArguments, PreTrainingArguments, check_training
from foundry.common.errors import UserError
from foundry.common.machine import cores_here
from foundry.corpora.chunks import ChunkDataset
from foundry.model_t5 import flops_per_sequence
from foundry.modeling.generation_settings import set_generation_length
from foundry.modeling.segment_masks import enable_packing
from foundry.runs.speed import MOST_WORKERS, PREFETCHED, BatchLengths, decide_speed, job_of, use_speed
from foundry.trainer_t5 import T5Trainer
from foundry.training.batching import OneShapeCollator, PackingCollator, round_up

CHUNKS = 4096  # chunks of random tokens, on which all ways to pre-train train
LONG_RUN = 65_536  # --speed chooses as for a run of this many steps
CLASSES = 4  # of the classifier
LABEL_LENGTHS = (2, 3)  # tokens of its class labels, EOS included


@dataclass(frozen=True)
class Way:
    """A way to train, with T5Trainer (ours) or Seq2SeqTrainer.

    pads: how fine-tuning pads its rows: "all" to --source_length, those of a "batch" to its longest; with T5Trainer
    also "packs" (several examples into a row). flags: training arguments.
    compiled: whether the model is compiled; such a way is only measured with --compile.
    """

    text: str
    pads: str = ""
    flags: dict = field(default_factory=dict)
    dropout: float = 0.0
    attention: str = "sdpa"
    ours: bool = False
    compiled: bool = False


# Flags that give Seq2SeqTrainer what T5Trainer has by itself or --speed chooses: data workers that stay alive, batches
# copied while the GPU computes, and no check of the loss, for which the CPU would wait for the GPU.
_WORKERS = dict(dataloader_num_workers=min(MOST_WORKERS, cores_here()), dataloader_prefetch_factor=PREFETCHED)
_WORKERS |= dict(dataloader_persistent_workers=True, dataloader_pin_memory=True, logging_nan_inf_filter=False)
_TUNED = dict(flags=_WORKERS | dict(accelerator_config={"non_blocking": True}))
PRE_TRAINING = {
    "ours": Way("T5Trainer with what --speed chooses, RMS-scaled AdamW", ours=True),
    "compiled_eager": Way("Seq2SeqTrainer, eager attention, compiled", attention="eager", compiled=True, **_TUNED),
    "compiled_sdpa": Way("the same, sdpa", compiled=True, **_TUNED),
    "tuned_trainer": Way("the same, not compiled", **_TUNED),
    "plain_trainer": Way("Seq2SeqTrainer as it comes: sdpa, fused AdamW, dropout 0.1", dropout=0.1),
    "ours_muon": Way("T5Trainer, Muon", flags=dict(optim="muon"), ours=True),
}
_SORTED = "the same, --train_sampling_strategy group_by_length, padded to a batch's longest row"
_BY_LENGTH = dict(train_sampling_strategy="group_by_length")
_LEAN = dict(bf16_residual=True, torch_compile=True)
_COMPILED = "the same, padded to one length, --torch_compile, bf16 residual stream"
_COMPILED_BY_US = dict(compiled=True, ours=True)
_GRAPHS = _LEAN | dict(torch_compile_mode="reduce-overhead")
FINE_TUNING = {
    "run_glue_like": Way("Seq2SeqTrainer, rows in random order, all padded to --source_length", "all", dropout=0.1),
    "by_length": Way(_SORTED, "batch", _BY_LENGTH, dropout=0.1),
    "packing": Way("T5Trainer, --packing true", "packs", dropout=0.1, ours=True),
    "dropout_0": Way("the same, --dropout_rate 0", "packs", ours=True),
    "compiled": Way(_COMPILED, "all", flags=_LEAN, **_COMPILED_BY_US),
    "cuda_graphs": Way("the same, --torch_compile_mode reduce-overhead", "all", flags=_GRAPHS, **_COMPILED_BY_US),
}


EVALUATIONS = {
    "generated_padded": "rows in file order, all padded to --source_length; Seq2SeqTrainer with predict_with_generate",
    "generated": "rows by length, little padding; generate(), greedy, and the loss",
    "scored": "the same batches; all labels scored in one pass",
}


def trainer_flags(args: Namespace, folder: str) -> dict:
    """Training arguments of all trainers here. The learning rate is so low that the weights hardly change."""
    silent = dict(report_to="none", disable_tqdm=True, eval_strategy="no", save_strategy="no", logging_strategy="no")
    return dict(output_dir=folder, use_cpu=args.device.type == "cpu", bf16=args.bf16, learning_rate=1e-7, **silent)


class Timer(transformers.TrainerCallback):
    """Measures `seconds` of a training from the end of its step `untimed` (0: from its beginning) to the end of its
    last epoch, including the wait for data."""

    def __init__(self, untimed: int):
        self.untimed = untimed

    def on_epoch_begin(self, _args, state: transformers.TrainerState, _control, **_) -> None:
        if state.global_step == self.untimed:
            synchronize()
            self.begun = time.perf_counter()

    on_step_end = on_epoch_begin

    def on_epoch_end(self, *_, **__) -> None:
        synchronize()
        self.seconds = time.perf_counter() - self.begun


def train_in_turn(
    ways: dict[str, Way],
    make: Callable[[Way, dict, int], Seq2SeqTrainer],
    untimed: int,
    args: Namespace,
    finish: Callable[[dict], dict],
) -> dict[str, dict]:
    """{name: row} of the ways, each of which trains in turn. After each training args.keep gets `finish(rows)`.

    make: function (way, its row, batch size) -> its trainer. A way's first training, which compiles and reserves
    memory, does not count, nor do the first `untimed` steps of each later one. A non-finite loss is an error of the
    row.
    """
    taken, trainers = {name: way for name, way in ways.items() if args.compile or not way.compiled}, {}
    rows = {name: dict(name=name, what=way.text, ours=way.ours) for name, way in taken.items()}

    def train(name: str, trainer: Seq2SeqTrainer) -> Seq2SeqTrainer:
        loss = rows[name]["training_loss"] = trainer.train().training_loss
        if not np.isfinite(loss):
            raise ArithmeticError(f"the loss became {loss}")
        return trainer

    def first(name: str, batch: int) -> Seq2SeqTrainer:
        trainer = make(taken[name], rows[name], batch)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.timer = Timer(untimed)
        trainer.add_callback(trainer.timer)
        return train(name, trainer)

    def run(name: str) -> float:
        trainer = trainers.pop(name, None)  # taken out, so that its memory is freed if it fails
        if trainer is None:
            start = time.perf_counter()
            trainer = largest_that_fits(rows[name], args.device, partial(first, name), args.batch)
            rows[name]["first_steps_seconds"] = time.perf_counter() - start
        trainers[name] = train(name, trainer)
        return trainer.timer.seconds

    runs = {name: partial(run, name) for name in rows}
    interleaved(rows, runs, args.rounds, args.deadline, keep=lambda: args.keep(finish(rows)))
    return rows


# ---------------------------------------------------------------- pre-training
def chosen_ways(rows: str) -> dict[str, Way]:
    """The ways of PRE_TRAINING for --rows: "all", or names separated by commas."""
    names = list(PRE_TRAINING) if rows == "all" else rows.split(",")
    for name in names:
        if name not in PRE_TRAINING:
            raise UserError(f"--rows {name}: no such row; there are {', '.join(PRE_TRAINING)}")
    return {name: PRE_TRAINING[name] for name in names}


def measure_trainer(args: Namespace) -> dict:
    """Sequences/s of the ways of --rows. All train on the same random tokens, with --batch sequences per step.

    The collator of the peers is that of --nanot5, or its stand-in. A way that runs out of memory accumulates smaller
    batches. args.apart: each way runs in a process of its own.
    """
    config = benchmark_config(args.model)
    ours = T5DataCollator(bare_tokenizer(config.vocab_size), args.source_length)
    peers, peers_name = peer_collator(args.nanot5, ours, config.vocab_size)
    tokens = np.random.default_rng(0).integers(3, config.vocab_size - 110, CHUNKS * ours.tokens_length, np.uint16)
    chunks = ChunkDataset(tokens, ours.tokens_length)
    lists = [{"input_ids": row.tolist()} for row in chunks.chunks[: min(CHUNKS, 64 * args.batch)]]
    ceiling = Ceiling(config, ours, args)

    def make(way: Way, row: dict, batch: int) -> Seq2SeqTrainer:
        model = new_model(config, way.ours, way.attention, way.dropout)
        flags = trainer_flags(args, folder) | way.flags | dict(max_steps=args.steps + 1)
        flags |= dict(per_device_train_batch_size=batch, gradient_accumulation_steps=args.batch // batch)
        if flags["use_cpu"]:  # no data workers: the cores are busy with the model
            flags = {name: value for name, value in flags.items() if not name.startswith("dataloader")}
        if way.ours:
            arguments = PreTrainingArguments(**flags, warmup_steps=0)
            check_training(arguments, "pre-training from scratch")
            decided = dict(bf16=True, torch_compile=not args.compile, per_device_train_batch_size=batch < args.batch)
            arguments.given = frozenset(name for name, is_given in decided.items() if is_given)
            batches = BatchLengths(ours.inputs_length, ours.targets_length, shapes=1)
            speed = decide_speed(job_of(model, batches, LONG_RUN, None, None), arguments)
            use_speed(speed, model, arguments)
            arguments = arguments.replaced(**speed.flags(arguments))
            row["speed"] = speed.described
            return T5Trainer(model=model, args=arguments, train_dataset=chunks, data_collator=ours)
        # The way with transformers' defaults, the one with dropout, keeps the cache of keys and values.
        model.config.use_cache = model.decoder.config.use_cache = way.dropout > 0
        arguments = Seq2SeqTrainingArguments(**flags, torch_compile=way.compiled, remove_unused_columns=False)
        trainer = Seq2SeqTrainer(model=model, args=arguments, train_dataset=lists, data_collator=peers)
        trainer.accelerator.state.dynamo_plugin.dynamic = False
        return trainer

    def finish(rows: dict[str, dict]) -> dict:
        for row in rows.values():
            if "seconds" in row:
                ceiling.add_rates(row, args.steps * args.batch)
        result = setting_of(args) | ceiling.record() | compared(rows)
        ratio = rows.get("ours", {}).get("ratio")  # of the way with our default optimizer
        return result | dict(peers_collator=peers_name, steps=args.steps, ratio=ratio)

    ways = chosen_ways(args.rows)
    if args.apart and len(ways) > 1:
        rows = {name: dict(name=name, what=way.text, ours=way.ours) for name, way in ways.items()}
        return measure_apart(args, rows, finish)
    with tempfile.TemporaryDirectory() as folder:
        return finish(train_in_turn(ways, make, 1, args, finish))


# ---------------------------------------------------------------- a classifier
def measure_classifier(args: Namespace) -> dict:
    """Rows/s of an epoch in each way of FINE_TUNING, then of an evaluation in each way of EVALUATIONS.

    Sources come from `random_sources`; the CLASSES labels are texts of two or three tokens. Every way trains on or
    scores the same rows, with the same number of rows in a batch.
    """
    generator, config = np.random.default_rng(0), benchmark_config(args.model)
    labels = [
        generator.integers(3, 100, LABEL_LENGTHS[n % 2] - 1).tolist() + [config.eos_token_id] for n in range(CLASSES)
    ]
    sources = random_sources(args.examples, args.source_length, config.vocab_size)
    dataset = [dict(input_ids=ids, labels=labels[n % CLASSES]) for n, ids in enumerate(sources)]

    def make(way: Way, _row: dict, batch: int) -> Seq2SeqTrainer:
        model = new_model(config, way.ours, way.attention, way.dropout)
        tokens = config.pad_token_id, config.decoder_start_token_id
        flags = trainer_flags(args, folder) | way.flags | dict(per_device_train_batch_size=batch, num_train_epochs=1)
        if not way.ours:
            collator = partial(padded_batch, source_length=args.source_length if way.pads == "all" else None)
            arguments = Seq2SeqTrainingArguments(**flags)
            return Seq2SeqTrainer(model=model, args=arguments, train_dataset=dataset, data_collator=collator)
        arguments = FineTuningArguments(**flags)
        check_training(arguments, "fine-tuning from scratch")
        if way.pads == "packs":
            enable_packing(model)
            collator = PackingCollator(*tokens, cost=partial(flops_per_sequence, config))
        else:
            longest = args.source_length, round_up(max(LABEL_LENGTHS))
            collator = OneShapeCollator(*tokens, *longest, batch)
        options = dict(data_collator=padded_batch, train_collator=collator)
        return T5Trainer(model=model, args=arguments, train_dataset=dataset, **options)

    def finish(trained: dict[str, dict], evaluated: dict[str, dict] | None = None) -> dict:
        parts = {"training": compared(trained, args.examples)}
        if evaluated is not None:
            parts["evaluation"] = compared(evaluated, args.examples)
        result = {key: {name: part[key] for name, part in parts.items()} for key in ("strongest_peer", "ratio")}
        rows = [row for part in parts.values() for row in part["rows"]]
        return setting_of(args) | dict(examples=args.examples, rows=rows) | result

    with tempfile.TemporaryDirectory() as folder:
        trained = train_in_turn(FINE_TUNING, make, 0, args, finish)
        return finish(trained, evaluated_in_turn(config, dataset, labels, args, folder))


def evaluated_in_turn(
    config: T5Config, dataset: list[dict], labels: list[list[int]], args: Namespace, folder: str
) -> dict[str, dict]:
    """{name: row} of EVALUATIONS, each row with the seconds of each turn."""
    model, plain = (new_model(config, ours) for ours in (True, False))
    set_generation_length(model, max(LABEL_LENGTHS))
    plain.generation_config = copy.deepcopy(model.generation_config)
    rows = {name: dict(name=name, what=what, ours=name == "scored") for name, what in EVALUATIONS.items()}
    flags = trainer_flags(args, folder) | dict(per_device_eval_batch_size=args.batch, predict_with_generate=True)
    ours = T5Trainer(model=model, args=FineTuningArguments(**flags), data_collator=padded_batch)
    ours.class_label_ids = padded_batch([{"input_ids": [1], "labels": ids} for ids in labels])["labels"]
    collator = partial(padded_batch, source_length=args.source_length)
    peer = Seq2SeqTrainer(model=plain, args=Seq2SeqTrainingArguments(**flags), data_collator=collator)

    def answer(name: str) -> None:
        ours.args = ours.args.replaced(predict_with_generate=name == "generated")
        (peer if name == "generated_padded" else ours).predict(dataset)

    interleaved(rows, {name: timed(partial(answer, name)) for name in rows}, args.rounds, warm_up=1)
    return rows
