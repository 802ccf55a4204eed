"""Evaluation and generation: scoring class labels against generate(), and a growing cache against a static one."""

import copy
import tempfile
from functools import partial

import numpy as np
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from arguments.training import FineTuningArguments
from benchmarks.material import benchmark_config, padded, random_sources, use_plain_activation
from benchmarks.measure import NotAvailableError, failure, interleaved, median
from constants import IGNORE_INDEX
from model_t5 import create_model, set_generation_length
from tasks.metrics.scoring import STATISTICS
from trainer_t5 import T5Trainer

CLASSES = 4
EVALUATION_ROWS = {
    "ours": "rows by length, little padding; all labels scored in one pass",
    "generate": "the same batches; generate(), greedy, and the loss",
    "run_glue_like": "rows in file order, all padded to --source_length; Seq2SeqTrainer with predict_with_generate",
}


# ---------------------------------------------------------------- evaluation
def measure_evaluate(
    config_name: str, rows: int, batch: int, source_length: int, device: torch.device, bf16: bool, rounds: int
) -> dict:
    """Sequences/s of an evaluation on labelled rows as each of EVALUATION_ROWS does it; "ratio" is ours to the last.

    Sources are as `random_sources` makes them. The labels are texts of three tokens that this very model writes for
    some of the rows, so that "which label" and "no label at all" both occur. In float32 all ways must give the same
    answer for every row (AssertionError otherwise: scoring is exact); in bf16 roundings differ, and the share of equal
    answers is reported.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = dict(
            output_dir=folder,
            per_device_eval_batch_size=batch,
            use_cpu=device.type == "cpu",
            bf16=bf16,
            report_to="none",
            eval_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            predict_with_generate=True,
        )
        torch.manual_seed(0)
        model = create_model(benchmark_config(config_name))
        plain = copy.deepcopy(model)
        use_plain_activation(plain)
        dataset = [{"input_ids": source} for source in random_sources(rows, source_length, model.config.vocab_size)]
        trainer = T5Trainer(model=model, args=FineTuningArguments(**flags), data_collator=padded)
        share_of_labels = set_labels(trainer, dataset)
        peer = Seq2SeqTrainer(
            model=plain,
            args=Seq2SeqTrainingArguments(**flags),
            data_collator=partial(padded, source_length=source_length),
        )
        plain.generation_config = copy.deepcopy(model.generation_config)
        texts = [label[label.ne(IGNORE_INDEX)].tolist() for label in trainer.class_label_ids]
        for number, row in enumerate(dataset):
            row["labels"] = texts[number % len(texts)]
        answers = {}

        def ours() -> None:
            trainer.args.predict_with_generate = False
            _, statistics = trainer.predict(dataset).predictions
            answers["ours"] = statistics[:, STATISTICS.index("predicted_class")].astype(int).tolist()

        def generate() -> None:
            trainer.args.predict_with_generate = True
            generated, _ = trainer.predict(dataset).predictions
            answers["generate"] = [class_of(row, trainer.class_label_ids) for row in torch.as_tensor(generated)]

        def run_glue_like() -> None:
            generated = peer.predict(dataset).predictions
            answers["run_glue_like"] = [class_of(row, trainer.class_label_ids) for row in torch.as_tensor(generated)]

        ways = {function.__name__: function for function in (ours, generate, run_glue_like)}
        seconds = {name: median(values) for name, values in interleaved(ways, rounds).items()}
    equal = {name: float(np.mean(np.equal(found, answers["ours"]))) for name, found in answers.items()}
    if not bf16 and min(equal.values()) != 1.0:
        raise AssertionError(f"scoring and generate() gave the same answer for {min(equal.values()):.1%} of the rows")
    return {
        "config_name": config_name,
        "batch": batch,
        "source_length": source_length,
        "mean_source_length": float(np.mean([len(row["input_ids"]) for row in dataset])),
        "classes": len(texts),
        "precision": "bf16 autocast" if bf16 else "float32",
        "rows": [
            {"name": name, "what": EVALUATION_ROWS[name], "sequences_per_second": rows / value}
            for name, value in seconds.items()
        ],
        "ratio": seconds["run_glue_like"] / seconds["ours"],
        "ratio_to_generate": seconds["generate"] / seconds["ours"],
        "equal_answers": min(equal.values()),
        "answers_that_are_labels": share_of_labels,
    }


def set_labels(trainer: T5Trainer, dataset: list[dict], length: int = 3) -> float:
    """Makes labels of the `length` tokens that the model itself writes most often; returns how many rows get one.

    Generation stops after `length` tokens, so an answer is a label if it is equal to it.
    """
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
    """Number of the label [T] that a generated row [start, ...] is, -1 if it is none."""
    for number, label in enumerate(labels):
        wanted = label[label != IGNORE_INDEX]
        if torch.equal(generated[1 : 1 + len(wanted)], wanted):
            return number
    return -1


# ---------------------------------------------------------------- generation
def measure_generate(
    config_name: str,
    batch: int,
    source_length: int,
    new_tokens: int,
    beams: int,
    device: torch.device,
    bf16: bool,
    rounds: int,
) -> dict:
    """{"rows": generated tokens/s with each kind of cache, "ratio"}: the cache that grows, and the static one.

    On a GPU transformers compiles the decoding step over a static cache by itself. Every row writes `new_tokens`
    tokens; float32 caches must give equal texts ("equal_texts").
    """
    torch.manual_seed(0)
    model = create_model(benchmark_config(config_name)).to(device).eval()
    if bf16:
        model = model.to(torch.bfloat16)
    source = torch.randint(3, model.config.vocab_size - 110, (batch, source_length), device=device)
    mask = torch.ones_like(source)
    lengths = dict(min_new_tokens=new_tokens, max_new_tokens=new_tokens, num_beams=beams, do_sample=False)
    model.generation_config.max_length = None
    texts, rows, runs = {}, [], {}

    @torch.no_grad()
    def generate(cache: str | None) -> None:
        texts[cache] = model.generate(source, attention_mask=mask, cache_implementation=cache, **lengths)

    for name, cache in (("dynamic", None), ("static", "static")):
        row = {"name": name, "what": f"{name} cache{', compiled' if cache and device.type == 'cuda' else ''}"}
        rows.append(row)
        try:
            if cache and beams > 1:
                raise NotAvailableError("beams reorder the cache, which transformers does with the growing one only")
            generate(cache)
            runs[name] = lambda cache=cache: generate(cache)
        except Exception as error:
            row["error"] = failure(error)
    seconds = interleaved(runs, rounds)
    for row in rows:
        if row["name"] in seconds:
            row["sequences_per_second"] = batch / median(seconds[row["name"]])
            row["tokens_per_second"] = row["sequences_per_second"] * new_tokens
    result = {
        "config_name": config_name,
        "batch": batch,
        "beams": beams,
        "source_length": source_length,
        "new_tokens": new_tokens,
        "precision": "bf16" if bf16 else "float32",
        "rows": rows,
    }
    if len(seconds) == 2:
        result["ratio"] = median(seconds["dynamic"]) / median(seconds["static"])
        result["equal_texts"] = (texts[None] == texts["static"]).all(-1).float().mean().item()
    return result


EVALUATE_COLUMNS = {"name": "", "what": "", "sequences_per_second": "{:,.1f}"}
GENERATE_COLUMNS = {"name": "", "what": "", "sequences_per_second": "{:,.1f}", "tokens_per_second": "{:,.0f}"}
