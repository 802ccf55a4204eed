"""Fine-tuning as a whole: an epoch of rows through T5Trainer and through Seq2SeqTrainer in run_glue's set-up."""

import tempfile
import time
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from transformers import PrinterCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

from arguments.training import FineTuningArguments, check_training
from benchmarks.material import benchmark_config, padded, random_sources, use_plain_activation
from benchmarks.measure import failure, free_memory, median, synchronize
from model_t5 import create_model, set_dropout
from tasks.batching import BucketCollator, bucket_lengths
from trainer_t5 import T5Trainer

BUCKETS = 4
LABEL_LENGTHS = (2, 3)  # tokens of a class label with its EOS


@dataclass(frozen=True)
class Way:
    """A way to fine-tune. flags: of the training arguments; compiled: only where compilation is asked for.

    pads: "all" to --source_length, "batch" to a batch's longest row, "buckets" to one of four lengths, as T5Trainer.
    """

    text: str
    pads: str
    flags: dict = field(default_factory=dict)
    dropout: float = 0.1
    attention: str = "sdpa"
    compiled: bool = False

    @property
    def ours(self) -> bool:
        return self.pads == "buckets"


_FUSED = dict(bf16_residual=True, fused_projections=True, fused_cross_projections=True, torch_compile=True)
_WITHOUT_DROPOUT = dict(pads="buckets", dropout=0.0, attention="t5_fused")
WAYS = {
    "run_glue_like": Way("Seq2SeqTrainer, rows in random order, all padded to --source_length", "all"),
    "by_length": Way(
        "the same, --train_sampling_strategy group_by_length, padded to a batch's longest row",
        "batch",
        dict(train_sampling_strategy="group_by_length"),
    ),
    "buckets": Way(f"T5Trainer, --length_buckets {BUCKETS}", "buckets"),
    "t5_fused": Way("the same, --dropout_rate 0 --attn_implementation t5_fused", **_WITHOUT_DROPOUT),
    "compiled": Way(
        "the same, --torch_compile, fused projections, bf16 residual stream",
        flags=_FUSED,
        compiled=True,
        **_WITHOUT_DROPOUT,
    ),
    "cuda_graphs": Way(
        "the same, --torch_compile_mode reduce-overhead",
        flags=_FUSED | dict(torch_compile_mode="reduce-overhead"),
        compiled=True,
        **_WITHOUT_DROPOUT,
    ),
}


class EpochTimer(TrainerCallback):
    """`seconds` of the epochs of a training, from the first batch's loading to the last update."""

    def on_epoch_begin(self, *_, **__):
        synchronize()
        self.begun = time.perf_counter()

    def on_epoch_end(self, *_, **__):
        synchronize()
        self.seconds = time.perf_counter() - self.begun


def measure_fine_tune(
    config_name: str,
    examples: int,
    batch: int,
    source_length: int,
    device: torch.device,
    bf16: bool,
    rounds: int,
    compiled: bool,
    deadline: float = float("inf"),
) -> dict:
    """Rows/s of an epoch in each of WAYS, in turn A B A B; "ratio": the best of ours to run_glue's set-up.

    Sources are as `random_sources` makes them, labels have two or three tokens. Every way trains the same rows with
    batches of as many rows, at a learning rate at which nothing changes; a first epoch, which compiles, is not counted.
    "ratio_same_dropout": ours with run_glue's dropout 0.1. What fails has "error", and the others go on.
    """
    generator, config = np.random.default_rng(0), benchmark_config(config_name)
    sources = random_sources(examples, source_length, config.vocab_size)
    lengths = generator.choice(LABEL_LENGTHS, examples)
    dataset = [
        dict(input_ids=source, labels=[*generator.integers(3, 100, length - 1).tolist(), config.eos_token_id])
        for source, length in zip(sources, lengths, strict=True)
    ]
    rows = {name: {"name": name, "what": way.text} for name, way in WAYS.items() if compiled or not way.compiled}
    seconds, trainers, timers = {name: [] for name in rows}, {}, {name: EpochTimer() for name in rows}
    with tempfile.TemporaryDirectory() as folder:
        where = (batch, source_length, device, bf16, folder)
        for turn in range(rounds + 1):
            for name, row in rows.items():
                if "error" in row or (turn > 1 and time.monotonic() > deadline):
                    continue
                try:
                    if turn == 0:
                        trainers[name] = _trainer(WAYS[name], config, dataset, *where)
                        trainers[name].remove_callback(PrinterCallback)
                        trainers[name].add_callback(timers[name])
                    result = trainers[name].train()
                    if not np.isfinite(result.training_loss):
                        raise ArithmeticError(f"the loss became {result.training_loss}")
                except Exception as error:
                    row["error"] = failure(error)
                    trainers.pop(name, None)
                    free_memory()
                    continue
                row["training_loss"] = result.training_loss
                if turn:
                    seconds[name].append(timers[name].seconds)
    for name, row in rows.items():
        if seconds[name] and "error" not in row:
            row["sequences_per_second"] = examples / median(seconds[name])
            row["settings"] = {"ours": WAYS[name].ours}
    rates = {name: row["sequences_per_second"] for name, row in rows.items() if "sequences_per_second" in row}
    ours = {name: rate for name, rate in rates.items() if WAYS[name].ours}
    found = {}
    if "run_glue_like" in rates and ours:
        found["ratio"] = max(ours.values()) / rates["run_glue_like"]
    if "run_glue_like" in rates and "buckets" in rates:
        found["ratio_same_dropout"] = rates["buckets"] / rates["run_glue_like"]
    return {
        "config_name": config_name,
        "batch": batch,
        "examples": examples,
        "source_length": source_length,
        "mean_source_length": float(np.mean([len(source) for source in sources])),
        "precision": "bf16 autocast" if bf16 else "float32",
        "rows": list(rows.values()),
        **found,
    }


def _trainer(way: Way, config, dataset: list[dict], batch: int, source_length: int, device, bf16: bool, folder: str):
    """The trainer of a way, with a model of its own that has the same weights."""
    flags = dict(
        output_dir=folder,
        per_device_train_batch_size=batch,
        num_train_epochs=1,
        learning_rate=1e-7,
        use_cpu=device.type == "cpu",
        bf16=bf16,
        report_to="none",
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **way.flags,
    )
    torch.manual_seed(0)
    model = create_model(config, way.attention)
    set_dropout(model, way.dropout)
    if not way.ours:
        use_plain_activation(model)
        collator = partial(padded, source_length=source_length if way.pads == "all" else None)
        arguments = Seq2SeqTrainingArguments(**flags)
        return Seq2SeqTrainer(model=model, args=arguments, train_dataset=dataset, data_collator=collator)
    buckets = bucket_lengths([len(row["input_ids"]) for row in dataset], BUCKETS)
    target_length = bucket_lengths(LABEL_LENGTHS, 1)[0]
    shapes = BucketCollator(config.pad_token_id, config.decoder_start_token_id, buckets, target_length, batch)
    arguments = FineTuningArguments(**flags)
    check_training(arguments, "fine-tuning from scratch")
    return T5Trainer(model=model, args=arguments, train_dataset=dataset, data_collator=padded, train_collator=shapes)


FINE_TUNE_COLUMNS = {"name": "", "what": "", "sequences_per_second": "{:,.1f}", "training_loss": "{:.3f}"}
