"""The README.md of a published model: model_card.md.j2, filled from run.json, all_results.json and metrics.jsonl.

It leaves out what these files do not know, and shortens local paths to file names.
"""

import contextlib
import dataclasses
import json
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel

from arguments.model import ModelArguments
from arguments.own_pairs import OWN, own_entry
from arguments.task import TaskArguments, find_entry, task_arguments, task_names
from arguments.text import PreTrainingDataArguments
from arguments.training import FineTuningArguments, PreTrainingArguments
from common.command_line import comma_words
from common.reports import human_count, human_time, read_json, read_metrics, short_number
from constants import BUILTIN_CORPUS, OBJECTIVES
from corpora.files import split_weights
from modeling.families import family_of, is_tied, shape_of
from objectives.denoisers import Denoiser, denoisers_of
from tasks.registry import as_list, source_text

TEMPLATE = Path(__file__).with_name("model_card.md.j2")
# Flags about places and display, not about what was trained.
_NOT_THE_TRAINING = (
    "output_dir overwrite_output_dir dry_run data_cache_dir overwrite_cache preprocessing_num_workers data_dir "
    "run_name report_to logging_steps logging_strategy logging_dir disable_tqdm use_cpu resume_from_checkpoint "
    "push_to_hub dataloader_num_workers dataloader_pin_memory greater_is_better project trackio_space_id local_rank "
    "ddp_find_unused_parameters save_total_limit save_steps save_strategy do_train do_eval accelerator_config debug"
).split()
_NO_RESULT = ("_runtime", "_per_second", "_time", "_samples")


def read_run(folder: Path) -> dict[str, dict | list]:
    """{"run": ..., "results": ..., "metrics": [lines]} of a run's folder; empty where a file is missing or damaged."""
    record = {"run": {}, "results": {}, "metrics": []}
    readers = {"run": read_json, "results": read_json, "metrics": read_metrics}
    for key, name in {"run": "run.json", "results": "all_results.json", "metrics": "metrics.jsonl"}.items():
        with contextlib.suppress(OSError, ValueError):
            record[key] = readers[key](folder / name)
    return record


def task_of(run: dict) -> tuple[str, str] | None:
    """(benchmark, task) of a fine-tuning run's record, None for pre-training."""
    arguments = run.get("arguments", {})
    return (arguments["benchmark"], arguments["dataset_name"]) if arguments.get("benchmark") else None


def model_card(
    name: str,
    record: dict,
    model: PreTrainedModel,
    formats: dict[str, dict] | None = None,
    has_curve: bool = False,
    **given: str | list[str] | None,
) -> str:
    """The text of README.md, with the Hub's YAML front matter.

    name: of the model; a Hub name's owner is kept in the commands only. record: of read_run. formats: for each engine
    what publishing.exports.compare found. given: what only people know for the front matter: license, language.
    """
    run, metrics = record["run"], record["metrics"]
    arguments, task = run.get("arguments", {}), task_of(run)
    first = _first_entry(task, arguments) if task else {}
    entry = first if task and len(task_names(*task)) == 1 else {}
    last_evaluation = next((line for line in reversed(metrics) if any(key.startswith("eval_") for key in line)), {})
    numbers = {
        key: float(value)
        for key, value in (record["results"] or last_evaluation).items()
        if key.startswith("eval_") and isinstance(value, (int, float)) and not key.endswith(_NO_RESULT)
    }
    steps, seconds = (max((line.get(key, 0) for line in metrics), default=0) for key in ("step", "seconds"))
    versions, commit = run.get("versions") or {}, (run.get("git") or {}).get("commit")
    versions = [f"{package} {versions[package]}" for package in ("torch", "transformers") if package in versions]
    versions += [f"T5 Foundry at commit `{commit[:12]}`"] if commit else []
    objective = arguments.get("objective") or "span_corruption"
    known = objective if objective in OBJECTIVES else "span_corruption"
    denoisers = [denoiser for denoiser, _ in denoisers_of(known).values()]
    shown = min(denoisers, key=lambda denoiser: denoiser.is_prefix)  # the first that masks spans, if one does
    # ByT5's sentinels are not its tokenizer's <extra_id_n>.
    reads_ids = hasattr(model.config, "input_ids_offset")
    has_marks = getattr(model.config, "sentinel_ids", None) and not reads_ids
    by_id = has_marks and not task and not shown.is_prefix
    family = family_of(model.config)
    card = ModelCard.from_template(
        _front_matter(name, arguments, objective, task, entry, numbers, given),
        TEMPLATE,
        name=name,
        run=run,
        task=task,
        config=model.config,
        tied=is_tied(model),
        shape=shape_of(model.config),
        head_is_scaled=family.head_is_scaled,
        parameters=human_count(run.get("parameters") or sum(p.numel() for p in model.parameters())),
        by_id=by_id,
        gap=family.gap,
        objective=objective.replace("_", " "),
        masks_spans=not shown.is_prefix,
        example=json.dumps(_example(task, first, family.gap, shown, reads_ids), ensure_ascii=False),
        data=_data(arguments, task, entry),
        steps=steps,
        tokens=human_count(steps * run["tokens_per_step"]) if run.get("tokens_per_step") else None,
        time=human_time(seconds),
        hardware=run.get("hardware") or {},
        versions=versions,
        flags=changed_flags(arguments),
        has_curve=has_curve,
        numbers=numbers,
        finished=bool(record["results"]),
        formats=formats,
        shown_search=shown_search,
    )
    return f"{card}\n"


def _first_entry(task: tuple[str, str], arguments: dict) -> dict:
    """The entry of a task, or of the first one of a mixture; {} if DATASET_VALS no longer has it."""
    name = task_names(*task)[0]
    if name == OWN:
        return own_entry(task_arguments(arguments))
    with contextlib.suppress(ValueError):
        return find_entry(task[0], name)
    return {}


def _front_matter(
    name: str,
    arguments: dict,
    objective: str,
    task: tuple[str, str] | None,
    entry: dict,
    numbers: dict[str, float],
    given: dict,
) -> ModelCardData:
    hubs = list(entry.get("hub") or [])[:1]
    if not task:  # one or several, also with weights
        hubs, _ = split_weights("--dataset_name", comma_words(arguments.get("dataset_name") or ""))
    hubs = [hub for hub in hubs if hub != BUILTIN_CORPUS and not _is_folder(hub)]
    local = arguments.get("train_file") or arguments.get("data_dir")
    base = arguments.get("model_name_or_path") or ""
    results = [
        EvalResult(
            task_type=hub_task(task, entry),
            dataset_type=hubs[0] if hubs else "/".join(task),
            dataset_name="/".join(task),
            metric_type=metric.removeprefix("eval_"),
            metric_value=round(value, 6),
        )
        for metric, value in numbers.items()
        if task and not metric.endswith("loss")
    ]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=hub_task(task, entry),
        tags=["t5", "t5-foundry", *([objective.replace("_", "-")] if arguments and not task else [])],
        datasets=hubs if hubs and not local else None,
        base_model=None if _is_folder(base) else base or None,
        metrics=entry.get("metrics"),
        **(dict(model_name=name.split("/")[-1], eval_results=results) if results else {}),
        **given,
    )


def _is_folder(name: str) -> bool:
    """Whether a name is a path, here or on the run's machine, and none of the Hub."""
    return Path(name).exists() or name.startswith((".", "/", "~", "out/")) or name.count("/") > 1


def hub_task(task: tuple[str, str] | None, entry: dict) -> str:
    """The Hub's name of the task."""
    if entry.get("target_type") == "class":
        return "text-classification"
    return task[0] if task and task[0] in ("summarization", "translation") else "text-generation"


def _example(task: tuple[str, str] | None, entry: dict, gap: str, denoiser: Denoiser, reads_ids: bool = False) -> str:
    """A source text of the task: "rte sentence1: ... sentence2: ..."; for pre-training one of the denoiser, behind its
    mode token, or numbers if the model was trained on ready-made ids."""
    if not task:
        whole, gaps = ("0 1 1 0", "0 1 {} 1 0 {} 1") if reads_ids else ("The cat sat on the", "The cat {} on the {}.")
        text = whole if denoiser.is_prefix else gaps.format(gap.format(0), gap.format(1))
        return f"{denoiser.mode} {text}" if denoiser.mode else text
    entry = {"inputs": {"": "text"}} | entry  # own pairs have none if only their rows show the columns
    return source_text(entry, dict.fromkeys(entry["inputs"].values(), "..."))


def _data(arguments: dict, task: tuple[str, str] | None, entry: dict) -> str:
    """The training data, as the end of a sentence."""
    flags = (arguments.get(flag) for flag in ("train_file", "source_file", "target_file"))
    if files := [file for paths in flags if paths for file in as_list(paths)]:
        is_mixed = task and task[1] != OWN and OWN in comma_words(task[1])
        mixture = f"`{'/'.join(task)}`, {OWN} being " if is_mixed else ""
        return f"{mixture}the files {', '.join(f'`{Path(str(file)).name}`' for file in files)}"
    if task:
        hub, *_ = entry.get("hub") or [None]
        link = hub and (f"`{Path(hub).name}`" if _is_folder(hub) else f"[{hub}](https://huggingface.co/datasets/{hub})")
        return f"`{'/'.join(task)}`" + (f" ({link})" if link else "")
    if arguments.get("dataset_name") in (None, BUILTIN_CORPUS):
        return "English documentation of installed Python packages"
    return " ".join(
        f"`{_without_folder(arguments[k])}`" for k in ("dataset_name", "dataset_config_name") if arguments.get(k)
    )


def changed_flags(arguments: dict) -> dict[str, str]:
    """{flag: value} of the flags that decide the training and are not the script's defaults; paths as bare names."""
    pre_training, fine_tuning = (PreTrainingDataArguments, PreTrainingArguments), (TaskArguments, FineTuningArguments)
    defaults = {}
    for group in (ModelArguments, *(fine_tuning if arguments.get("benchmark") else pre_training)):
        for field in dataclasses.fields(group):
            is_made = field.default_factory is not dataclasses.MISSING
            defaults[field.name] = field.default_factory() if is_made else field.default
    hidden = {key for key in defaults if key.startswith("hub_")} - {"hub_dataset", "hub_config"}
    of_training = defaults.keys() - hidden - set(_NOT_THE_TRAINING)
    return {
        key: " ".join(map(_without_folder, as_list(value)))
        for key, value in arguments.items()
        if key in of_training and value not in (None, defaults[key], {})
    }


def _without_folder(value: object) -> str:
    if isinstance(value, str) and (Path(value).is_absolute() or value.startswith((".", "~"))):
        return Path(value).name
    return short_number(value) if isinstance(value, float) else str(value).replace("|", "\\|")


def shown_search(search: dict) -> str:
    """Arguments as Python writes them: {"beam_size": 4, "patience": 2} -> "beam_size=4, patience=2"."""
    return ", ".join(f"{name}={value}" for name, value in search.items())
