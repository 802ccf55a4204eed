"""The README.md of a published model: model_card.md.j2, filled from run.json, all_results.json and metrics.jsonl.

The card leaves out what these files lack, and every path and file of a machine. Text from these files is set as
Markdown code, so that it cannot become a link, a table or HTML.
"""

import dataclasses
import json
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, PreTrainedModel

from constants import BUILTIN_CORPUS, DENOISERS, OBJECTIVES
from features.hub.names import local_flags, names_in
from foundry.common.reports import human_count, human_time
from foundry.corpora.reading import as_list
from foundry.modeling.families import family_of, is_tied, outgrows_cache, shape_of
from foundry.publishing.exports import lone_part, shown_search
from foundry.publishing.records import task_of_run
from foundry.training.rows_read import tokens_at
from tasks.entry import TaskEntry
from tasks.named import first_entry, task_names
from tasks.row_texts import source_text

TEMPLATE = Path(__file__).with_name("model_card.md.j2")
_NO_RESULT = ("_runtime", "_per_second", "_time", "_samples")


def model_card(
    name: str,
    record: dict,
    model: PreTrainedModel,
    formats: dict[str, dict] | None = None,
    has_curve: bool = False,
    embeds: bool = False,
    **given: str | list[str] | None,
) -> str:
    """The text of README.md, with the Hub's YAML front matter.

    name: the model's name; the owner in a Hub name appears only in the commands. record: the result of read_run.
    formats: {format: its comparison, from publishing/exports.py}. has_curve: whether the folder has a loss.png. embeds:
    whether it is one of sentence-transformers. given:
    fields of the front matter that no file holds: license, language.
    """
    run, results = record["run"], record["results"]
    arguments, task = run.get("arguments", {}), task_of_run(run)
    entry = first_entry(arguments) if task else None
    numbers = _numbers(results, [] if "averaged" in record else record["metrics"])
    # An export may be made elsewhere, where a relative path of the run looks like a name of the Hub.
    local = {*local_flags(arguments), *as_list(run.get("local", []))}
    objective, family = arguments.get("objective") or "span_corruption", family_of(model.config)
    denoisers = [DENOISERS[name] for name in OBJECTIVES.get(objective, ("span_corruption",))]
    shown = min(denoisers, key=_is_prefix)  # prefers one that masks spans
    reads_ids = hasattr(model.config, "input_ids_offset")
    # ByT5's sentinels are not its tokenizer's <extra_id_n>.
    has_marks = getattr(model.config, "sentinel_ids", None) and not reads_ids
    steps, seconds = (max((line.get(key, 0) for line in record["metrics"]), default=0) for key in ("step", "seconds"))
    part = lone_part(model.config)
    front = _front_matter(name, arguments, local, objective, task, entry, numbers, given)
    if part:
        _name_encoder(front, _encoder_task(arguments, part, embeds), numbers, embeds)
    card = ModelCard.from_template(
        front,
        TEMPLATE,
        name=name,
        run=run,
        flags={name: value for name, value in arguments.items() if name not in local and not name.endswith("_file")},
        task=task and "/".join(task),
        objective=objective,
        builtin=BUILTIN_CORPUS,
        config=model.config,
        tied=is_tied(model),
        kind={"a head": "encoder with a head", "an encoder alone": "encoder"}.get(part or "", "encoder-decoder model"),
        encoder_class=part and _encoder_class(model, part),
        has_head=part == "a head",
        embeds=embeds,
        shape=shape_of(model.config),
        family=family,
        outgrows_cache=outgrows_cache(model.config),
        parameters=run.get("parameters") or sum(p.numel() for p in model.parameters()),
        by_id=has_marks and not task and not _is_prefix(shown),
        masks_spans=not _is_prefix(shown),
        example=_example(task, entry, family.sentinel, shown, reads_ids),
        steps=steps,
        seconds=seconds,
        has_curve=has_curve,
        numbers=numbers,
        finished=bool(results),
        averaged=record.get("averaged"),
        formats=formats,
        code=_code,
        human_count=human_count,
        tokens_at=tokens_at,
        human_time=human_time,
        python_text=_python_text,
        shown_search=shown_search,
    )
    return f"{card}\n"


def _numbers(results: dict, metrics: list[dict]) -> dict[str, float]:
    """{metric: value} of a run's results or, if it has not finished, of its last evaluation."""
    evaluations = [line for line in metrics if any(key.startswith("eval_") for key in line)]
    return {
        key.removeprefix("eval_"): float(value)
        for key, value in (results or (evaluations or [{}])[-1]).items()
        if key.startswith("eval_") and isinstance(value, (int, float)) and not key.endswith(_NO_RESULT)
    }


def _front_matter(
    name: str,
    arguments: dict,
    local: set[str],
    objective: str,
    task: tuple[str, str] | None,
    entry: TaskEntry | None,
    numbers: dict[str, float],
    given: dict,
) -> ModelCardData:
    if task:
        entry = entry if len(task_names(*task)) == 1 else None
        hubs = [entry.hub[0]] if entry and entry.hub and "hub_dataset" not in local else []
    else:  # one data set or several, perhaps with weights
        hubs = [] if "dataset_name" in local else names_in("dataset_name", arguments.get("dataset_name"))
    hubs = [hub for hub in hubs if hub != BUILTIN_CORPUS]
    kind = hub_task(task, entry)
    scored = {metric: round(value, 6) for metric, value in numbers.items() if task and not metric.endswith("loss")}
    where = dict(task_type=kind, dataset_name="/".join(task or ()))
    where["dataset_type"] = hubs[0] if hubs else where["dataset_name"]
    results = [EvalResult(metric_type=metric, metric_value=value, **where) for metric, value in scored.items()]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=kind,
        tags=["t5", "t5-foundry", *([objective.replace("_", "-")] if arguments and not task else [])],
        datasets=None if arguments.get("train_file") or arguments.get("data_dir") else hubs or None,
        base_model=None if "model_name_or_path" in local else arguments.get("model_name_or_path") or None,
        metrics=list(entry.metrics) if entry else None,
        **(dict(model_name=name.split("/")[-1], eval_results=results) if results else {}),
        **given,
    )


def hub_task(task: tuple[str, str] | None, entry: TaskEntry | None) -> str:
    """The Hub's name for the kind of task (its pipeline tag), such as "translation"."""
    if entry and entry.target_type == "class":
        return "text-classification"
    return task[0] if task and task[0] in ("summarization", "translation") else "text-generation"


def _encoder_task(arguments: dict, part: str, embeds: bool) -> str:
    """The Hub's name for what an encoder does."""
    if embeds:
        return "sentence-similarity"
    of_head = "token-classification" if arguments.get("head") in (None, "tokens") else "text-classification"
    return of_head if part == "a head" else "feature-extraction"


def _encoder_class(model: PreTrainedModel, part: str) -> str:
    """transformers' class that loads the folder."""
    name = type(model).__name__
    is_ours = part == "a head" and type(model.config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    return name.replace("ForTokenClassification", "EncoderModel") if is_ours else name


def _name_encoder(front: ModelCardData, what: str, numbers: dict, embeds: bool) -> None:
    """Frontend matter of an encoder. what: the Hub's name for what it does."""
    front.pipeline_tag, front.library_name = what, "sentence-transformers" if embeds else "transformers"
    front.metrics = [metric for metric in numbers if not metric.endswith("loss")] or None  # no text is scored
    for result in front.eval_results or []:
        result.task_type = what


def _is_prefix(denoiser: dict) -> bool:
    """Whether an entry of DENOISERS masks the end of the text, not spans."""
    return "mean_noise_span_length" not in denoiser


def _example(
    task: tuple[str, str] | None, entry: TaskEntry | None, sentinel: str, denoiser: dict, reads_ids: bool = False
) -> str:
    """An example of a source: of a task "rte sentence1: ... sentence2: ..."; for pre-training one of the denoiser, with
    its mode token in front, or numbers if the model was trained on ready-made ids."""
    if not task:
        prefix, masked = "The cat sat on the", "The cat {} on the {}."
        if reads_ids:
            prefix, masked = "0 1 1 0", "0 1 {} 1 0 {} 1"
        text = prefix if _is_prefix(denoiser) else masked.format(sentinel.format(0), sentinel.format(1))
        return f"{denoiser['mode']} {text}" if "mode" in denoiser else text
    entry = entry or TaskEntry()
    if not entry.inputs:  # of own pairs, if only their rows show the columns
        entry = dataclasses.replace(entry, inputs={"": "text"})
    return source_text(entry, dict.fromkeys(entry.reads, "..."))


def _code(value: object) -> str:
    """The value as Markdown code in one line, without characters that would end the code or a cell of a table."""
    text = " ".join(" ".join(map(str, as_list(value))).split())
    return "`{}`".format(text.replace("`", "'").replace("|", "\\|"))


def _python_text(text: str) -> str:
    """The text as a Python string, without backticks, which could end the Markdown block that it stands in."""
    return json.dumps(text, ensure_ascii=False).replace("`", "\\u0060")
