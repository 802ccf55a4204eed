"""The README.md of a published model, filled from what its run wrote: run.json, all_results.json, metrics.jsonl.

Nothing is invented: what no file tells is left out, and local paths are shortened to the names of their files.
"""

import dataclasses
import json
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData

from arguments.model import ModelArguments
from arguments.task import TaskArguments
from arguments.text import PreTrainingDataArguments
from arguments.training import FineTuningArguments, PreTrainingArguments
from common.reports import human_count, human_time, read_metrics, short_number
from constants import BUILTIN_CORPUS, DATASET_VALS

# Flags that say where things were and how they were shown, not what was trained.
_NOT_THE_TRAINING = (
    "output_dir overwrite_output_dir dry_run data_cache_dir overwrite_cache preprocessing_num_workers data_dir "
    "run_name report_to logging_steps logging_strategy logging_dir disable_tqdm use_cpu resume_from_checkpoint "
    "push_to_hub dataloader_num_workers dataloader_pin_memory greater_is_better project trackio_space_id local_rank "
    "ddp_find_unused_parameters save_total_limit save_steps save_strategy do_train do_eval"
).split()
_NO_RESULT = (
    "_runtime",
    "_per_second",
    "_time",
    "train_loss",
    "total_flos",
    "epoch",
    "_samples",
    "num_input_tokens_seen",
)


def read_run(folder: Path) -> dict[str, dict | list]:
    """{"run": ..., "results": ..., "metrics": [lines]} of a run's folder; empty where a file is missing or damaged."""

    def read(name: str) -> dict:
        try:
            value = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    try:
        metrics = read_metrics(folder / "metrics.jsonl")
    except (OSError, ValueError):
        metrics = []
    return {"run": read("run.json"), "results": read("all_results.json"), "metrics": metrics}


def task_of(run: dict) -> tuple[str, str] | None:
    """(benchmark, task) of a fine-tuning run's record, None for pre-training."""
    arguments = run.get("arguments", {})
    return (arguments["benchmark"], arguments["dataset_name"]) if arguments.get("benchmark") else None


def model_card(
    name: str,
    record: dict,
    model,
    license: str | None = None,
    language: list[str] | None = None,
    formats: dict[str, dict] | None = None,
    has_curve: bool = False,
) -> str:
    """The text of README.md: YAML front matter as the Hub reads it, and what can be said of the model.

    name: of the model; a Hub name's owner is kept in the commands only. record: of read_run. formats: for each engine
    what publishing.exports.compare found.
    """
    run, results = record["run"], record["results"]
    arguments, task = run.get("arguments", {}), task_of(run)
    config = model.config
    parameters = run.get("parameters") or sum(p.numel() for p in model.parameters())
    kind = (
        f"fine-tuned on {'/'.join(task)}" if task else "pre-trained with span corruption" if arguments else "exported"
    )
    parts = [
        f"# {name.split('/')[-1]}",
        f"A {config.model_type.upper()} encoder-decoder model of {human_count(parameters)} parameters{kind}. Made "
        "with T5 Foundry.",
        f"Shape: d_model {config.d_model}, d_ff {config.d_ff}, {config.num_heads} heads of {config.d_kv}, "
        f"{config.num_layers} encoder and {config.num_decoder_layers} decoder layers, {config.vocab_size:,} words, "
        f"{'one matrix for embedding and head' if _tied(model) else 'a head of its own'}.",
        "## How to use it",
        _usage(name, task, config),
    ]
    if config.model_type == "umt5" and not _tied(model):
        parts.append("transformers 5 multiplies umT5's logits by d_model^-0.5, as if its head were the embedding: "
                     "greedy answers are right, probabilities, samples and beams are not.")  # fmt: skip
    if arguments:
        parts += ["## Training data", _data(arguments, run, task)]
        parts += ["## Training", _training(arguments, run, record["metrics"])]
    if has_curve:
        parts += ["![Loss and main metric over the training](loss.png)"]
    numbers = _numbers(results, record["metrics"])
    if numbers:
        rows = [f"| {key.removeprefix('eval_').replace('_', ' ')} | {value:.4g} |" for key, value in numbers.items()]
        parts += ["## Evaluation", "\n".join(["| held-out data | |", "|---|---|", *rows])]
        if not results:
            parts[-1] += "\n\nFrom the last evaluation before this checkpoint was exported; the run had not ended."
    if formats:
        parts += ["## Other formats", _formats(formats)]
    front = _front_matter(name, arguments, task, numbers, license, language).to_yaml()
    return f"---\n{front}\n---\n\n" + "\n\n".join(parts) + "\n"


def _tied(model) -> bool:
    return model.lm_head.weight is model.shared.weight


def _front_matter(name, arguments, task, numbers, license, language) -> ModelCardData:
    entry = DATASET_VALS.get(task[0], {}).get(task[1], {}) if task else {}
    hub = (entry.get("hub") or [None])[0] if task else arguments.get("dataset_name")
    local = arguments.get("train_file") or arguments.get("data_dir") or hub == BUILTIN_CORPUS or Path(str(hub)).exists()
    base = arguments.get("model_name_or_path")
    results = [
        EvalResult(
            task_type="text2text-generation",
            dataset_type=hub or "/".join(task),
            dataset_name="/".join(task),
            metric_type=metric.removeprefix("eval_"),
            metric_value=round(value, 6),
        )
        for metric, value in numbers.items()
        if task and not metric.endswith("loss")
    ]
    return ModelCardData(
        license=license,
        language=(language if len(language) > 1 else language[0]) if language else None,
        library_name="transformers",
        pipeline_tag="text2text-generation",
        tags=["t5", "t5-foundry", *(["span-corruption"] if arguments and not task else [])],
        datasets=[hub] if hub and not local else None,
        base_model=base if base and not _is_local(base) else None,
        metrics=entry.get("metrics"),
        **(dict(model_name=name.split("/")[-1], eval_results=results) if results else {}),
    )


def _is_local(name: str) -> bool:
    return Path(name).exists() or name.startswith((".", "/", "~", "out/")) or name.count("/") > 1


def _usage(name: str, task: tuple[str, str] | None, config) -> str:
    by_number = not task and getattr(config, "sentinel_ids", None) and not hasattr(config, "input_ids_offset")
    text = "The cat <extra_id_0> on the <extra_id_1>."
    if task:
        entry = DATASET_VALS.get(task[0], {}).get(task[1], {})
        keys = list(entry.get("inputs", {}))
        text = " ".join([f"{entry.get('prefix', task[1])}{' ' + key if key else ''}: ..." for key in keys[:1]]
                        + [f"{key}: ..." for key in keys[1:]])  # fmt: skip
    skip, inputs = "True" if task else "False", f'inputs = tokenizer("{text}", return_tensors="pt")'
    if by_number:  # of ByT5's tokenizer, whose words <extra_id_n> are others
        inputs = """parts = tokenizer(["The cat ", " on the ", "."], add_special_tokens=False).input_ids
gaps = model.config.sentinel_ids  # bytes that ByT5 was trained with as marks; its words <extra_id_n> are untrained
inputs = {"input_ids": torch.tensor([[*parts[0], gaps[0], *parts[1], gaps[1], *parts[2], 1]])}"""
    code = f'''```python
{"import torch" + chr(10) if by_number else ""}from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForSeq2SeqLM.from_pretrained("{name}")
{inputs}
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0], skip_special_tokens={skip}))
```'''
    if by_number:
        code += "\n\nEach number of `gaps` marks a gap; the model writes the marks again, each before what goes there."
    elif not task:
        code += (
            "\n\nEach `<extra_id_n>` marks a gap; the model writes the marks again, each followed by what goes there."
        )
    return code


def _data(arguments: dict, run: dict, task: tuple[str, str] | None) -> str:
    files = arguments.get("train_file") or []
    names = [f"`{Path(str(file)).name}`" for file in ([files] if isinstance(files, str) else files)]
    source = f"the files {', '.join(names)}"
    if not names and task:
        hub = DATASET_VALS.get(task[0], {}).get(task[1], {}).get("hub")
        source = f"`{'/'.join(task)}`" + (f" ([{hub[0]}](https://huggingface.co/datasets/{hub[0]}))" if hub else "")
    elif not names and arguments.get("dataset_name") in (None, BUILTIN_CORPUS):
        source = "English documentation of installed Python packages"
    elif not names:
        source = " ".join(f"`{arguments[k]}`" for k in ("dataset_name", "dataset_config_name") if arguments.get(k))
    lines = [f"Trained on {source}."]
    counts = [f"{count:,} {split}" for split, count in (run.get("examples") or {}).items()]
    prints = [f"{split} `{str(value)[:16]}`" for split, value in (run.get("fingerprints") or {}).items()]
    lines += [f"Read: {', '.join(counts)} examples."] if counts else []
    lines += [f"Fingerprints: {', '.join(prints)}."] if prints else []
    return " ".join(lines)


def _training(arguments: dict, run: dict, metrics: list[dict]) -> str:
    lines = []
    steps = max((line.get("step", 0) for line in metrics), default=0)
    seconds = max((line.get("seconds", 0) for line in metrics), default=0)
    hardware = run.get("hardware") or {}
    if steps:
        tokens = f", {human_count(steps * run['tokens_per_step'])} tokens" if run.get("tokens_per_step") else ""
        device = f"{hardware['gpus']} x {hardware['gpu_name']}" if hardware.get("gpus") else "a CPU"
        lines.append(f"{steps:,} steps{tokens} in {human_time(seconds)} on {device}.")
    versions, commit = run.get("versions") or {}, (run.get("git") or {}).get("commit")
    shown = [f"{package} {versions[package]}" for package in ("torch", "transformers") if package in versions]
    shown += [f"T5 Foundry at commit `{commit[:12]}`"] if commit else []
    if shown:
        lines.append(f"With {', '.join(shown)}.")
    rows = [f"| `{key}` | {value} |" for key, value in changed_flags(arguments).items()]
    table = "\n".join(["Flags that differ from the script's defaults:", "", "| flag | value |", "|---|---|", *rows])
    return "\n".join(lines) + ("\n\n" + table if rows else "")


def changed_flags(arguments: dict) -> dict[str, str]:
    """{flag: value} of those that decide what is trained and are not the script's defaults; paths as bare names."""
    groups = [TaskArguments, FineTuningArguments] if arguments.get("benchmark") else []
    groups = groups or [PreTrainingDataArguments, PreTrainingArguments]
    known = {}
    for group in (ModelArguments, *groups):
        for field in dataclasses.fields(group):
            lazy = field.default_factory is not dataclasses.MISSING
            known[field.name] = field.default_factory() if lazy else field.default
    changed = {}
    for key, value in arguments.items():
        if key not in known or key in _NOT_THE_TRAINING or key.startswith("hub_") or value in (None, known[key], {}):
            continue
        values = value if isinstance(value, list) else [value]
        changed[key] = " ".join(_without_folder(v) for v in values)
    return changed


def _without_folder(value: object) -> str:
    if isinstance(value, str) and (Path(value).is_absolute() or value.startswith((".", "~"))):
        return Path(value).name
    return short_number(value) if isinstance(value, float) else str(value).replace("|", "\\|")


def _numbers(results: dict, metrics: list[dict]) -> dict[str, float]:
    """The evaluation's numbers: of all_results.json, or of the last evaluation if the run has not ended."""
    last = next((line for line in reversed(metrics) if any(key.startswith("eval_") for key in line)), {})
    source = results or last
    return {
        key: float(value)
        for key, value in source.items()
        if key.startswith("eval_") and isinstance(value, (int, float)) and not key.endswith(_NO_RESULT)
    }


_CTRANSLATE2_USAGE = """```python
import ctranslate2

translator = ctranslate2.Translator("{folder}")
pieces = tokenizer.convert_ids_to_tokens(tokenizer("...").input_ids)
result = translator.translate_batch([pieces], {search})[0].hypotheses[0]
print(tokenizer.decode(tokenizer.convert_tokens_to_ids(result)))
```"""
_ONNX_USAGE = """`onnx/encoder_model.onnx` and `onnx/decoder_model.onnx` take any batch size and length. The decoder has
no key-value cache: it is fed all tokens written so far, and gives the logits of all of them."""


def shown_search(search: dict) -> str:
    """Arguments as Python writes them: {"beam_size": 4, "patience": 2} -> "beam_size=4, patience=2"."""
    return ", ".join(f"{name}={value}" for name, value in search.items())


def _formats(formats: dict[str, dict]) -> str:
    lines = [
        "Each was loaded again and compared with PyTorch on real texts, greedily decoded:",
        "",
        "| folder | same tokens | largest difference of a token's log-probability | allowed |",
        "|---|---|---|---|",
    ]
    for kind, found in formats.items():
        same = f"{found['same_tokens']} of {found['texts']} texts"
        folder = "this one" if kind == "huggingface" else f"`{kind}/`"
        lines.append(f"| {folder} | {same} | {found['largest_difference']:.2g} | {found['tolerance']:g} |")
    ctranslate2 = next((kind for kind in formats if kind.startswith("ctranslate2")), None)
    if ctranslate2:
        found = formats[ctranslate2]
        search = shown_search(found.get("search", {"beam_size": 1}))
        lines += ["", _CTRANSLATE2_USAGE.format(folder=ctranslate2, search=search)]
        if "search" in found:
            lines += ["", f"So searched, {found['same_beams']} of {found['texts']} texts are those of transformers' "
                      "beams, whose search ends by another rule."]  # fmt: skip
    lines += ["", _ONNX_USAGE] if "onnx" in formats else []
    return "\n".join(lines)
