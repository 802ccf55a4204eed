"""Pre-training steps through the real Trainer, data loader and optimizer, of this project and of its peers."""

import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import numpy as np
import torch
from transformers import PrinterCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

from arguments.training import PreTrainingArguments, check_training
from benchmarks.inputs import peer_collator
from benchmarks.material import bare_tokenizer, benchmark_config, setting_of, use_plain_activation
from benchmarks.measure import (
    compared,
    interleaved,
    is_out_of_memory,
    peak_flops,
    rates_of,
    recording,
    spread,
    synchronize,
)
from corpora.examples import ChunkDataset
from data_collator_t5 import T5DataCollator
from model_t5 import create_model, flops_per_sequence, set_dropout
from runs.speed import device_peak_flops, job_of, make_fast
from trainer_t5 import T5Trainer

COLUMNS = {"name": "", "what": "", "batch": "", "sequences_per_second": "{:,.1f}", "spread": "{:.0%}"}
COLUMNS |= {"mfu": "{:.1%}", "mfu_of_data_sheet": "{:.1%}", "peak_memory_gib": "{:.2f}"}
CHUNKS = 4096  # of random tokens that all train on
LONG_RUN = 65_536  # steps of the run that --speed is to choose for


@dataclass(frozen=True)
class Way:
    """A way to pre-train. flags: of the training arguments; compiled: only where compilation is asked for."""

    text: str
    flags: dict = field(default_factory=dict)
    attention: str | None = None
    dropout: float = 0.0
    ours: bool = False
    compiled: bool = False


_WORKERS = dict(dataloader_num_workers=4, dataloader_pin_memory=True)
WAYS = {
    "plain_trainer": Way("Seq2SeqTrainer as it comes: sdpa, fused AdamW, dropout 0.1", dropout=0.1),
    "tuned_trainer": Way("Seq2SeqTrainer, no dropout, no cache, data workers", _WORKERS),
    "compiled_eager": Way("the same, eager attention, compiled", _WORKERS, attention="eager", compiled=True),
    "compiled_sdpa": Way("the same, sdpa, compiled", _WORKERS, compiled=True),
    "ours": Way("T5Trainer with what --speed chooses, RMS-scaled AdamW", ours=True),
    "ours_muon": Way("the same, Muon", dict(optim="muon"), ours=True),
}


class StepTimer(TrainerCallback):
    """`seconds` of a training's steps from the second on, waiting for data included."""

    def on_step_end(self, args, state, control, **_):  # noqa: ARG002
        if state.global_step == 1:  # the untimed one
            synchronize()
            self.begun = time.perf_counter()

    def on_train_end(self, *_, **__):
        synchronize()
        self.seconds = time.perf_counter() - self.begun


def measure_trainer(args: Namespace) -> dict:
    """{"rows": sequences/s of each of WAYS, in turn A B A B, "ratio": ours with its default optimizer to the strongest
    peer, ...}.

    All train the same random tokens, --batch sequences a step, at a rate at which nothing changes. Peers take their
    batches from the collator of --nanot5, else from its stand-in. What runs out of memory accumulates smaller batches.
    args.keep is called with the result so far after every round.
    """
    config = benchmark_config(args.model)
    ours = T5DataCollator(bare_tokenizer(config.vocab_size), args.source_length)
    peers, peers_name = peer_collator(args.nanot5, ours, config.vocab_size)
    tokens = np.random.default_rng(0).integers(3, config.vocab_size - 110, CHUNKS * ours.tokens_length, np.uint16)
    chunks = ChunkDataset(tokens, ours.tokens_length)
    lists = [{"input_ids": row.tolist()} for row in chunks.chunks[: min(CHUNKS, 64 * args.batch)]]
    ways = {name: way for name, way in WAYS.items() if args.compile or not way.compiled}
    rows = {name: {"name": name, "what": way.text, "settings": {"ours": way.ours}} for name, way in ways.items()}
    flops = flops_per_sequence(config, ours.inputs_length, ours.targets_length)
    peak = peak_flops(args.device, torch.bfloat16 if args.bf16 else torch.float32)
    sheet, trainers, seconds = device_peak_flops(args.device, args.bf16), {}, {name: [] for name in ways}
    result = setting_of(args) | dict(peers_collator=peers_name, steps=args.steps, compiled=args.compile)

    def steps(name: str, folder: str) -> float:
        """Seconds of a step; the first call of a way makes its trainer, which then has been compiled."""
        if name not in trainers:
            data = (chunks, ours) if ways[name].ours else (lists, peers)
            trainers[name] = first_trainer(rows[name], ways[name], config, data, args, folder)
        trainer, timer = trainers.pop(name)  # what fails is freed
        trainer.train()
        trainers[name] = trainer, timer
        return timer.seconds / args.steps

    def so_far() -> dict:
        for name, values in seconds.items():
            if values:
                rate = args.batch / median(values)
                rows[name] |= dict(sequences_per_second=rate, spread=spread(values), mfu=rate * flops / peak)
                rows[name]["mfu_of_data_sheet"] = sheet and rate * flops / sheet
        rates = {name: rate for name, rate in rates_of(rows).items() if name != "ours_muon"}
        ratios = compared(rates, ["ours"], "plain_trainer")
        return result | ratios | {"rows": list(rows.values()), "rate_of_ours": rates.get("ours")}

    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            if number and time.monotonic() > args.deadline:
                break
            runs = {name: partial(steps, name, folder) for name in ways}
            found = interleaved(runs, 1, warm_up=0, rows=rows, clock=lambda run: run())
            for name, values in found.items():
                seconds[name] += values
            args.keep(so_far())
    return so_far()


def first_trainer(row: dict, way: Way, config, data: tuple, args: Namespace, folder: str):
    """(the trainer of a way after its first steps, its timer); smaller batches, accumulated, where memory is short."""
    for divisor in (1, 2, 4, 8):
        if args.batch % divisor:
            break
        attempt = {}
        with recording(attempt, args.device):
            trainer = make_trainer(way, config, data, args, folder, divisor)
            timer = StepTimer()
            trainer.remove_callback(PrinterCallback)
            trainer.add_callback(timer)
            trainer.train()
            per_device, accumulated = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
            row |= dict(batch=f"{per_device} x {accumulated}", speed=getattr(trainer, "speed", None))
            row |= {name: value for name, value in attempt.items() if name != "error"}
            return trainer, timer
        if not is_out_of_memory(attempt):
            break
    raise RuntimeError(attempt["error"])


def make_trainer(way: Way, config, data: tuple, args: Namespace, folder: str, divisor: int):
    """The trainer of a way, with a model of its own that has the same weights. divisor: of the batch."""
    flags = dict(report_to="none", disable_tqdm=True, eval_strategy="no", save_strategy="no", logging_strategy="no")
    flags |= dict(output_dir=folder, use_cpu=args.device.type == "cpu", bf16=args.bf16, learning_rate=1e-7)
    flags |= dict(per_device_train_batch_size=args.batch // divisor, gradient_accumulation_steps=divisor)
    flags |= way.flags | dict(max_steps=args.steps + 1)
    if flags["use_cpu"]:
        flags.pop("dataloader_num_workers", None)  # the cores compute
    torch.manual_seed(0)
    model = create_model(config, way.attention)
    set_dropout(model, way.dropout)
    dataset, collator = data
    if not way.ours:
        use_plain_activation(model)
        model.config.use_cache = model.decoder.config.use_cache = way.dropout > 0  # it comes with a cache
        arguments = Seq2SeqTrainingArguments(**flags, torch_compile=way.compiled, remove_unused_columns=False)
        return Seq2SeqTrainer(model=model, args=arguments, train_dataset=dataset, data_collator=collator)
    arguments = PreTrainingArguments(**flags, warmup_steps=0)
    check_training(arguments, "pre-training from scratch")
    given = {"bf16", "torch_compile" * (not args.compile), "per_device_train_batch_size" * (divisor > 1)}
    arguments.given = frozenset(given)
    job = job_of(model, collator.inputs_length, collator.targets_length, 1, LONG_RUN, None)
    row = make_fast(model, job, Namespace(attn_implementation=None), arguments)
    trainer = T5Trainer(model=model, args=arguments, train_dataset=dataset, data_collator=collator)
    trainer.speed = row
    return trainer
