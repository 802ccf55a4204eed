"""A classification task with T5Trainer and in run_glue's set-up: an epoch of fine-tuning, and an evaluation."""

import copy
import tempfile
from argparse import Namespace
from functools import partial
from statistics import median

import numpy as np
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config

from arguments.training import FineTuningArguments, check_training
from benchmarks.material import benchmark_config, new_model, padded, random_sources, setting_of
from benchmarks.measure import compared, interleaved
from benchmarks.through_trainer import Timer, Way, rows_of, trained_in_turn, trainer_flags
from constants import IGNORE_INDEX
from model_t5 import flops_per_sequence
from modeling.generation_settings import set_generation_length
from modeling.segment_masks import enable_packing
from tasks.batching import BucketCollator, PackingCollator, bucket_lengths
from tasks.metrics.scoring import STATISTICS
from trainer_t5 import T5Trainer

BUCKETS = 4
LABEL_LENGTHS = (2, 3)  # tokens of a class label with its EOS
CLASSES = 4
NOTE = "sources of {mean_source_length:.0f} tokens on average, at most {source_length}"
# pads: "all" to --source_length, "batch" to a batch's longest row; of T5Trainer "buckets", to one of four lengths, and
# "packs", several examples into a row.
_BY_LENGTH = dict(train_sampling_strategy="group_by_length")
_SORTED = "the same, --train_sampling_strategy group_by_length, padded to a batch's longest row"
_OURS = dict(pads="buckets", ours=True)
_FAST = _OURS | dict(attention="t5_fused")
_FUSED = dict(bf16_residual=True, fused_projections=True, fused_cross_projections=True, torch_compile=True)
_GRAPHS = _FUSED | dict(torch_compile_mode="reduce-overhead")
WAYS = {
    "run_glue_like": Way("Seq2SeqTrainer, rows in random order, all padded to --source_length", "all", dropout=0.1),
    "by_length": Way(_SORTED, "batch", _BY_LENGTH, dropout=0.1),
    "buckets": Way(f"T5Trainer, --length_buckets {BUCKETS}", dropout=0.1, **_OURS),
    "packing": Way("T5Trainer, --packing true", "packs", dropout=0.1, ours=True),
    "t5_fused": Way("T5Trainer with buckets, --dropout_rate 0 --attn_implementation t5_fused", **_FAST),
    "compiled": Way(
        "the same, --torch_compile, fused projections, bf16 residual stream", flags=_FUSED, compiled=True, **_FAST
    ),
    "cuda_graphs": Way("the same, --torch_compile_mode reduce-overhead", flags=_GRAPHS, compiled=True, **_FAST),
}
EVALUATIONS = {
    "ours": "rows by length, little padding; all labels scored in one pass",
    "generate": "the same batches; generate(), greedy, and the loss",
    "run_glue_like": "rows in file order, all padded to --source_length; Seq2SeqTrainer with predict_with_generate",
}


# ---------------------------------------------------------------- fine-tuning
def measure_fine_tune(args: Namespace) -> dict:
    """Rows/s of an epoch in each of WAYS, in turn A B A B, and the best of ours to the strongest peer.

    Sources are as `random_sources` makes them, labels have two or three tokens. Every way trains the same rows with
    batches of as many rows, at a learning rate that hardly changes weights; a first epoch, which compiles, does not
    count. "ratio_same_dropout": ours with the peers' dropout 0.1. A way that fails has "error"; the others go on.
    """
    generator, config = np.random.default_rng(0), benchmark_config(args.model)
    sources = random_sources(args.examples, args.source_length, config.vocab_size)
    lengths = generator.choice(LABEL_LENGTHS, args.examples)
    labels = [[*generator.integers(3, 100, length - 1).tolist(), config.eos_token_id] for length in lengths]
    dataset = [{"input_ids": source, "labels": label} for source, label in zip(sources, labels, strict=True)]
    rows = rows_of(WAYS, args)
    with tempfile.TemporaryDirectory() as folder:
        seconds = trained_in_turn(rows, lambda name: make_trainer(WAYS[name], config, dataset, args, folder), args)
    for name, values in seconds.items():
        rows[name]["sequences_per_second"] = args.examples / median(values)
    own, result = [name for name in rows if WAYS[name].ours], setting_of(args, sources)
    result |= dict(rows=list(rows.values())) | compared(rows, own, "run_glue_like")
    with_dropout = {name: row for name, row in rows.items() if WAYS[name].dropout}  # all peers have it
    ratio = compared(with_dropout, own, "run_glue_like").get("ratio")
    return result | ({"ratio_same_dropout": ratio} if ratio else {})


def make_trainer(way: Way, config: T5Config, dataset: list[dict], args: Namespace, folder: str) -> Seq2SeqTrainer:
    """The trainer of a way for one epoch."""
    flags = trainer_flags(args, folder) | way.flags | dict(per_device_train_batch_size=args.batch, num_train_epochs=1)
    model = new_model(config, way.ours, way.attention, way.dropout)
    if not way.ours:
        collator = partial(padded, source_length=args.source_length if way.pads == "all" else None)
        options = dict(args=Seq2SeqTrainingArguments(**flags), data_collator=collator)
        trainer = Seq2SeqTrainer(model=model, train_dataset=dataset, **options)
    else:
        arguments, tokens = FineTuningArguments(**flags), (config.pad_token_id, config.decoder_start_token_id)
        check_training(arguments, "fine-tuning from scratch")
        if way.pads == "packs":
            enable_packing(model)
            collator = PackingCollator(*tokens, cost=partial(flops_per_sequence, config))
        else:
            buckets = bucket_lengths([len(row["input_ids"]) for row in dataset], BUCKETS)
            collator = BucketCollator(*tokens, buckets, bucket_lengths(LABEL_LENGTHS, 1)[0], args.batch)
        options = dict(args=arguments, data_collator=padded, train_collator=collator)
        trainer = T5Trainer(model=model, train_dataset=dataset, **options)
    Timer(trainer)
    return trainer


# ---------------------------------------------------------------- evaluation
def measure_evaluate(args: Namespace) -> dict:
    """Sequences/s of an evaluation on labelled rows as each of EVALUATIONS does it; "ratio" is ours to the last.

    Sources are those of `random_sources`. The labels are texts of three tokens that this model itself writes for some
    of the rows, so answers with and without a label occur. In float32 all ways must give the same answer for every row,
    else AssertionError; in bf16 rounding differs, and the share of equal answers is reported.
    """
    model, plain = (new_model(benchmark_config(args.model), ours) for ours in (True, False))
    sources = random_sources(args.examples, args.source_length, model.config.vocab_size)
    dataset, answers = [{"input_ids": source} for source in sources], {}

    def answer(name: str) -> None:
        trainer.args.predict_with_generate = name == "generate"
        found = (peer if name == "run_glue_like" else trainer).predict(dataset).predictions
        if name == "ours":
            answers[name] = found[1][:, STATISTICS.index("predicted_class")].astype(int).tolist()
        else:
            texts = torch.as_tensor(found[0] if name == "generate" else found)
            answers[name] = [class_of(text, trainer.class_label_ids) for text in texts]

    with tempfile.TemporaryDirectory() as folder:
        flags = trainer_flags(args, folder) | dict(per_device_eval_batch_size=args.batch, predict_with_generate=True)
        trainer = T5Trainer(model=model, args=FineTuningArguments(**flags), data_collator=padded)
        share_of_labels = set_labels(trainer, dataset)
        plain.generation_config = copy.deepcopy(model.generation_config)
        collator = partial(padded, source_length=args.source_length)
        peer = Seq2SeqTrainer(model=plain, args=Seq2SeqTrainingArguments(**flags), data_collator=collator)
        texts = [label[label.ne(IGNORE_INDEX)].tolist() for label in trainer.class_label_ids]
        for number, row in enumerate(dataset):
            row["labels"] = texts[number % len(texts)]
        runs = {name: partial(answer, name) for name in EVALUATIONS}
        seconds = {name: median(values) for name, values in interleaved(runs, args.rounds).items()}
    equal = min(float(np.mean(np.equal(found, answers["ours"]))) for found in answers.values())
    if not args.bf16 and equal != 1.0:
        raise AssertionError(f"scoring and generate() gave the same answer for {equal:.1%} of the rows")
    rates = {name: args.examples / value for name, value in seconds.items()}
    rows = [{"name": name, "what": EVALUATIONS[name], "sequences_per_second": rate} for name, rate in rates.items()]
    ratios = dict(ratio=rates["ours"] / rates["run_glue_like"], ratio_to_generate=rates["ours"] / rates["generate"])
    answered = dict(classes=len(texts), equal_answers=equal, answers_that_are_labels=share_of_labels)
    return setting_of(args, sources) | dict(rows=rows) | ratios | answered


def set_labels(trainer: T5Trainer, dataset: list[dict], length: int = 3) -> float:
    """Makes labels of the `length` tokens that the model itself writes most often, after which generation stops;
    returns the share of rows whose answer is a label."""
    set_generation_length(trainer.model, length)
    generated, _ = trainer.predict(dataset).predictions
    texts, counts = torch.unique(torch.as_tensor(generated)[:, 1 : length + 1], dim=0, return_counts=True)
    chosen = counts.argsort(descending=True, stable=True)[:CLASSES]
    trainer.class_label_ids = texts[chosen].clone()
    # A label may hold the padding that follows an early EOS; a real label's padding is not scored.
    ended = (trainer.class_label_ids == trainer.model.config.eos_token_id).cumsum(1).bool()
    trainer.class_label_ids[:, 1:][ended[:, :-1]] = IGNORE_INDEX
    return counts[chosen].sum().item() / len(dataset)


def class_of(generated: torch.Tensor, labels: torch.Tensor) -> int:
    """Class index of the label [T] that a generated row [start, ...] equals, -1 if there is none."""
    for number, label in enumerate(labels):
        wanted = label[label != IGNORE_INDEX]
        if torch.equal(generated[1 : 1 + len(wanted)], wanted):
            return number
    return -1
