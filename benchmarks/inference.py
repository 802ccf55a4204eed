"""Evaluation and generation: scoring class labels against generate(), and a growing cache against a static one."""

import tempfile

import torch

from arguments_t5 import FineTuningArguments
from benchmarks.material import benchmark_config
from benchmarks.measure import NotAvailableError, failure, interleaved, median
from model_t5 import IGNORE_INDEX, create_model, set_generation_length
from trainer_t5 import T5Trainer

CLASSES = 4


# ---------------------------------------------------------------- evaluation
def measure_evaluate(
    config_name: str, rows: int, batch: int, source_length: int, device: torch.device, bf16: bool, rounds: int
) -> dict:
    """{"rows": sequences/s of T5Trainer's scoring and of generate() for classification, "ratio", "equal_answers"}.

    The labels are texts that this very model writes for some of the rows, so that "which label" and "no label at all"
    both occur. In float32 both ways must give the same answer for every row (AssertionError otherwise: scoring is
    exact); in bf16 the two roundings differ, and the share of equal answers is reported.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer, dataset = classification_trainer(config_name, rows, batch, source_length, device, bf16, folder)
        share_of_labels = set_labels(trainer, dataset)
        answers = {}

        def scoring() -> None:
            trainer.args.predict_with_generate = False
            _, statistics = trainer.predict(dataset).predictions
            answers["scoring"] = torch.as_tensor(statistics[:, -2]).long().tolist()

        def generating() -> None:
            trainer.args.predict_with_generate = True
            generated, _ = trainer.predict(dataset).predictions
            answers["generate"] = [class_of(row, trainer.class_label_ids) for row in torch.as_tensor(generated)]

        seconds = interleaved({"scoring": scoring, "generate": generating}, rounds)
    equal = sum(a == b for a, b in zip(answers["scoring"], answers["generate"], strict=True)) / rows
    if not bf16 and equal != 1.0:
        raise AssertionError(f"scoring and generate() gave the same answer for {equal:.1%} of the rows only")
    texts = {"scoring": "teacher forcing, all labels in one pass", "generate": "generate(), greedy"}
    return {
        "config_name": config_name,
        "batch": batch,
        "source_length": source_length,
        "classes": CLASSES,
        "precision": "bf16 autocast" if bf16 else "float32",
        "rows": [
            {"name": name, "what": texts[name], "sequences_per_second": rows / median(values)}
            for name, values in seconds.items()
        ],
        "ratio": median(seconds["generate"]) / median(seconds["scoring"]),
        "equal_answers": equal,
        "answers_that_are_labels": share_of_labels,
    }


def classification_trainer(
    config_name: str, rows: int, batch: int, source_length: int, device: torch.device, bf16: bool, folder: str
) -> tuple[T5Trainer, list[dict]]:
    """A trainer with an untrained model, and `rows` random sources of one length."""
    torch.manual_seed(0)
    model = create_model(benchmark_config(config_name))
    args = FineTuningArguments(
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
    sources = torch.randint(3, model.config.vocab_size - 110, (rows, source_length))
    return T5Trainer(model=model, args=args, data_collator=as_batch), [{"input_ids": source} for source in sources]


def as_batch(rows: list[dict]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


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
