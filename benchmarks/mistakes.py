"""Four mistakes, beside what is right: transformers as it comes, this project, and the value by definition.

    python -m benchmarks mistakes                          # seconds; a table
    python -m benchmarks from_scratch --output curve.json  # the loss of T5 v1.1 small from scratch, and curve.png

Legend of shapes: B batch, S source length, T target length, V vocabulary.
"""

import contextlib
import math
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForSeq2SeqLM,
    ByT5Tokenizer,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

from benchmarks.measure import (
    SMALL_VOCABULARY,
    bare_tokenizer,
    benchmark_config,
    padded_batch,
    random_batches,
    recording,
    rows_as_table,
    setting_of,
)
from constants import BUILTIN_CORPUS
from data_collator_t5 import T5DataCollator, find_sentinel_ids
from foundry.arguments.model import ModelArguments
from foundry.arguments.text import PreTrainingDataArguments
from foundry.arguments.training import FineTuningArguments, PreTrainingArguments, check_training
from foundry.common.curves import draw_curves, save_figure
from foundry.common.processes import end_with_parent, finish_process_group
from foundry.common.reports import read_json, write_json
from foundry.corpora.chunks import ChunkDataset
from foundry.model_t5 import build_config, create_model, set_dropout
from foundry.modeling.new_vocabulary import embedding_rows
from foundry.trainer_t5 import T5Trainer

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = {"name": "{}", "what": "{}", "transformers": "{:,.3f}", "here": "{:,.3f}", "right": "{:,.3f}"}
EVALUATED = 21  # rows, which two ranks with batches of 4 fill up to 24
SILENT = dict(report_to="none", disable_tqdm=True, eval_strategy="no", save_strategy="no", seed=7)


def as_it_comes(config: T5Config) -> T5ForConditionalGeneration:
    """transformers' own model of a shape of T5 v1.1, as `T5Config(tie_word_embeddings=False)` builds it."""
    names = ("d_model", "d_ff", "d_kv", "num_heads", "num_layers", "num_decoder_layers", "vocab_size")
    shape = {name: getattr(config, name) for name in names}
    own = T5Config(**shape, feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0)
    torch.manual_seed(0)
    return T5ForConditionalGeneration(own)


def first_loss(args: Namespace) -> dict:
    """The mean loss of new weights on random tokens, corrupted as in pre-training; right is ln V of a model that knows
    nothing."""
    config = benchmark_config(args.model)
    (batch,) = random_batches(config, args.batch, args.source_length, 1, args.device)
    torch.manual_seed(0)
    row = dict(what=f"first loss of {args.model} from scratch", right=math.log(config.vocab_size))
    for name, model in (("transformers", as_it_comes(config)), ("here", create_model(config))):
        with torch.no_grad():
            logits = model.to(args.device).eval()(**{key: batch[key] for key in batch if key != "labels"}).logits
        row[name] = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten()).item()
    return row


def tiny_model(seed: int = 0) -> PreTrainedModel:
    """A model in which targets differ much in their loss."""
    torch.manual_seed(seed)
    shape = dict(d_model=32, d_kv=8, d_ff=64, num_heads=2, num_layers=2, num_decoder_layers=2, dropout_rate=0.0)
    model = create_model(build_config("tiny", 512, shape))
    with torch.no_grad():
        model.lm_head.weight *= 8
    return model


def accumulation(args: Namespace) -> dict:
    """The logged loss of one step of 32 sequences in four parts, over that of the same sequences in one part."""
    collator = T5DataCollator(bare_tokenizer(512), 32)
    tokens = np.random.default_rng(0).integers(3, 400, 64 * collator.tokens_length, np.uint16)
    row = dict(what="loss of a step in four parts, over that in one part", right=1.0)
    with tempfile.TemporaryDirectory() as folder:
        for name, trainer, flags in (
            ("transformers", Seq2SeqTrainer, Seq2SeqTrainingArguments),
            ("here", T5Trainer, PreTrainingArguments),
        ):
            losses = []
            for parts in (1, 4):
                model = tiny_model()
                if trainer is Seq2SeqTrainer:  # as transformers loads it
                    model.save_pretrained(folder)
                    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
                sizes = dict(per_device_train_batch_size=32 // parts, gradient_accumulation_steps=parts, max_steps=1)
                order = dict(train_sampling_strategy="sequential", remove_unused_columns=False, logging_steps=1)
                chosen = flags(folder, use_cpu=args.device.type == "cpu", **SILENT, **sizes, **order)
                if trainer is T5Trainer:
                    check_training(chosen, "pre-training from scratch")
                data = dict(train_dataset=ChunkDataset(tokens, collator.tokens_length), data_collator=collator)
                losses.append(trained(trainer(model=model, args=chosen, **data))[0]["loss"])
            row[name] = losses[1] / losses[0]
    return row


def trained(trainer: Seq2SeqTrainer) -> list[dict]:
    """What a trainer logs, without printing it."""
    with contextlib.redirect_stdout(None):
        trainer.train()
    return trainer.state.log_history


def pairs() -> list[dict]:
    """EVALUATED rows of random tokens, whose targets have 2 to 40 tokens."""
    generator = np.random.default_rng(0)
    lengths = zip(generator.integers(4, 20, EVALUATED), generator.integers(2, 40, EVALUATED), strict=True)
    return [
        {"input_ids": generator.integers(3, 400, s).tolist(), "labels": generator.integers(3, 400, t).tolist()}
        for s, t in lengths
    ]


def exact_loss(rows: list[dict], model: PreTrainedModel) -> float:
    """The mean loss over all target tokens of the rows, each of which passes alone, without padding."""
    total, count = 0.0, 0
    for row in rows:
        source, target = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
        decoder_input = torch.cat([torch.zeros_like(target[:, :1]), target[:, :-1]], dim=1)
        with torch.no_grad():
            logits = model.eval()(input_ids=source, decoder_input_ids=decoder_input).logits.double()
        total += F.cross_entropy(logits[0], target[0], reduction="sum").item()
        count += target.numel()
    return total / count


def evaluate_rank(folder: str) -> None:
    """What each rank runs; the first one writes the evaluation losses into FOLDER/losses.json."""
    losses, flags = {}, dict(use_cpu=True, per_device_eval_batch_size=4, max_steps=1, remove_unused_columns=False)
    for name, trainer, arguments in (
        ("transformers", Seq2SeqTrainer, Seq2SeqTrainingArguments),
        ("here", T5Trainer, FineTuningArguments),
    ):
        args = arguments(folder, **SILENT, **flags)
        if trainer is T5Trainer:
            check_training(args, "fine-tuning a checkpoint")
        data = dict(train_dataset=pairs(), eval_dataset=pairs(), data_collator=padded_batch)
        made = trainer(model=tiny_model(), args=args, **data)
        losses[name] = made.evaluate()["eval_loss"]
    if made.is_world_process_zero():
        write_json(Path(folder, "losses.json"), losses)
    finish_process_group()


def two_ranks() -> dict:
    """The evaluation loss that two ranks report of EVALUATED rows of different lengths."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--no-python"]
    rank = "import sys; from benchmarks.mistakes import evaluate_rank; evaluate_rank(sys.argv[1])"
    with tempfile.TemporaryDirectory() as folder:
        command = [*launcher, sys.executable, "-c", rank, folder]
        options = dict(capture_output=True, text=True, timeout=600, preexec_fn=end_with_parent)
        done = subprocess.run(command, cwd=ROOT, **options)
        losses = read_json(Path(folder, "losses.json"))
    if done.returncode or not losses:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
    what = f"evaluation loss of {EVALUATED} rows on two ranks"
    return dict(what=what, right=exact_loss(pairs(), tiny_model())) | losses


def sentinels() -> dict:
    """The id of ByT5's first sentinel: the last of its 256 bytes, after the three special tokens (Xue et al. 2022). The
    collator of transformers' run_t5_mlm_flax.py, and nanoT5's, counts from the end of the tokenizer."""
    tokenizer = ByT5Tokenizer()
    found = dict(transformers=len(tokenizer) - 1, here=int(find_sentinel_ids(tokenizer)[0]), right=3 + 256 - 1)
    return dict(what="id of ByT5's first sentinel") | found


CHECKS = {
    "first_loss": first_loss,
    "accumulation": accumulation,
    "two_ranks": lambda _: two_ranks(),
    "sentinels": lambda _: sentinels(),
}


def measure_mistakes(args: Namespace) -> dict:
    """A row {"transformers", "here", "right"} of each check."""
    rows = [dict(name=name) for name in CHECKS]
    for row in rows:
        with recording(row):
            row |= CHECKS[row["name"]](args)
    return setting_of(args) | {"rows": rows, "text": rows_as_table(rows, COLUMNS)}


# ---------------------------------------------------------------- a curve
def measure_from_scratch(args: Namespace) -> dict:
    """The losses of --steps steps of --model from scratch on the same text, masks, batches and tokenizer: transformers'
    model and Trainer with its defaults, and pre_train_t5.py's. With --output, a picture beside it.

    The text is --train_file, or else the built-in corpus; the tokenizer of SMALL_VOCABULARY tokens is trained on it.
    """
    from foundry.data_t5 import FoundText, Text  # needs packages that a machine for timing may lack
    from foundry.objectives.objective_types import get_objective

    source = dict(train_file=args.train_file) if args.train_file else dict(dataset_name=BUILTIN_CORPUS)
    text = PreTrainingDataArguments(**source, input_seq_length=args.source_length)
    found = FoundText(text, ModelArguments(config_name=args.model, vocab_size=SMALL_VOCABULARY), None)
    config = build_config(args.model, embedding_rows(len(found.tokenizer)))
    sizes = dict(max_steps=args.steps, per_device_train_batch_size=args.batch, gradient_accumulation_steps=1)
    every = dict(
        logging_steps=max(1, args.steps // 100),
        logging_first_step=True,
        use_cpu=args.device.type == "cpu",
        bf16=args.bf16,
    )
    rows, curves = [], {}
    with tempfile.TemporaryDirectory() as folder:
        ours = PreTrainingArguments(folder, **SILENT, **sizes, **every)
        check_training(ours, "pre-training from scratch")
        torch.manual_seed(0)
        model = create_model(config)
        set_dropout(model, 0.0)
        objective = get_objective(text, found.tokenizer, model)
        data = dict(train_dataset=Text(found, objective, ours).train, data_collator=objective)
        theirs = Seq2SeqTrainingArguments(folder, **SILENT, **sizes, **every, remove_unused_columns=False)
        for name, what, trainer in (
            (
                "here",
                f"T5Trainer, {ours.optim}, {ours.learning_rate:g}",
                lambda: T5Trainer(model=model, args=ours, **data),
            ),
            (
                "transformers",
                f"Seq2SeqTrainer as it comes, {theirs.optim.value}, {theirs.learning_rate:g}",
                lambda: Seq2SeqTrainer(as_it_comes(config), theirs, **data),
            ),
        ):
            curves[what] = [line for line in trained(trainer()) if "loss" in line]
            rows.append(dict(name=name, what=what, training_loss=curves[what][-1]["loss"], curve=curves[what]))
    if args.output:
        title = f"{args.model} from scratch on the same batches: training loss"
        picture = Path(args.output).with_suffix(".png")
        with contextlib.suppress(ImportError):
            figure = draw_curves(curves, picture, title=title, metrics=[])
            figure.axes[0].set_yscale("log")
            save_figure(figure, picture)
    return setting_of(args) | {"steps": args.steps, "rows": rows}
