r"""Fine-tune a T5 on your own pairs or any task of DATASET_VALS (constants.py), from a checkpoint or from scratch.

    python fine_tune_t5.py                         # built-in task, from the demo checkpoint if there is one
    python fine_tune_t5.py --train_file 'pairs/*.jsonl' --validation_file dev.jsonl \
        --source_column prompt --target_column completion --model_name_or_path google/flan-t5-base
    python fine_tune_t5.py --task glue/sst2 --model_name_or_path google/t5-v1_1-base
    python fine_tune_t5.py --task glue/rte --data_dir glue/ --model_name_or_path out/base
    python fine_tune_t5.py --task glue/all,super_glue/rte --mixing equal --model_name_or_path google/t5-v1_1-base
    python fine_tune_t5.py --task text/restore_diacritics --train_file 'books/*.txt' \
        --model_name_or_path google/mt5-base
    torchrun --nproc_per_node 8 fine_tune_t5.py --deepspeed zero_stage2_config.json --task glue/mnli \
        --model_name_or_path google/t5-v1_1-xl

Without flags it runs recipes/fine_tune_installed_docs.yaml; all but the built-in tasks need a named model. Class labels
are scored by teacher forcing, which finds the label whose tokens greedy decoding would write; `--predict_with_generate`
generates and compares texts. A mixture is evaluated task by task, and the mean of the tasks' main metrics
(eval_average) chooses the best model. The flags of your own pairs become an entry, which is printed
(docs/fine_tune.md). Writes the best model, task.json (for evaluate_t5.py to repeat the numbers), all_results.json,
metrics.jsonl, loss.png and run.json into --output_dir.
"""

from foundry.common.command_line import answer_early

if __name__ == "__main__":
    answer_early(__doc__)


import dataclasses
from pathlib import Path

from transformers import PreTrainedTokenizerBase, set_seed

from constants import DEMO_CHECKPOINTS
from foundry.arguments.model import ModelArguments, check_model
from foundry.arguments.task import TaskArguments
from foundry.arguments.training import FineTuningArguments, resolve_training
from foundry.common.command_line import exit_on_user_error, parse_arguments
from foundry.common.errors import UserError
from foundry.common.flags import AUTO
from foundry.common.machine import prepare_process, run_script
from foundry.common.terminal import print_once
from foundry.corpora.sources import tokenizer_for_pairs
from foundry.corpora.tokenizers import check_saved, described_tokenizer, named_tokenizer
from foundry.features import Features, features_of
from foundry.model_t5 import is_local_model
from foundry.modeling.generation_settings import forget_search, set_generation_length
from foundry.runs.decision import Decision, build_model, resolve_flags
from foundry.runs.memory import fitting_flan_t5
from foundry.runs.run import TrainingRun
from foundry.runs.speed import BatchLengths
from foundry.training.batching import train_collator
from foundry.training.checkpoints import check_resumed
from tasks.mixture import Tasks
from tasks.own_pairs import SOURCES
from tasks.predictions import other_task
from tasks.report import described_few_rows
from tasks.row_source import tasks_of

FLAGS = [ModelArguments, TaskArguments, FineTuningArguments, *features_of("fine_tune_t5")]
DEFAULT_RECIPE = Path(__file__).parent / "recipes" / "fine_tune_installed_docs.yaml"


def parse_flags(argv: list[str] | None) -> tuple[ModelArguments, TaskArguments, FineTuningArguments, Tasks]:
    """The flags of model, task and training from recipe and command line, checked, with the defaults of the job; and
    the tasks, of which no row is read yet but those that show the columns and classes of own pairs."""
    model_args, task_args, args, *features = parse_arguments(
        FLAGS,
        argv,
        default_recipe=str(DEFAULT_RECIPE),
        about=__doc__,
        starts_anew=("model_name_or_path", "config_name", "task", "benchmark", "dataset_name", *SOURCES),
    )
    args = args.replaced(features=Features(features))
    check_model(model_args)
    tasks = tasks_of(args.features, task_args)
    if not (model_args.model_name_or_path or model_args.config_name or all(task.entry.builtin for task in tasks)):
        raise UserError(
            f"--model_name_or_path: name the model to start from, such as {fitting_flan_t5(args)}, which fits here "
            "(docs/fine_tune.md), or give --config_name for one from scratch"
        )
    args = args.replaced(**tasks.flags(args))
    model_args = with_source(model_args)
    args = resolve_training(args, tasks.job(bool(model_args.model_name_or_path)), task_args, model_args)
    return model_args, tasks.args, args, tasks


def with_source(model: ModelArguments) -> ModelArguments:
    """The flags of the model. If none names one, they get the demo's checkpoint, or else a tiny model from scratch."""
    if model.model_name_or_path or model.config_name:
        return model
    if demo := next((path for path in DEMO_CHECKPOINTS if is_local_model(path)), None):
        print_once(f"no model was named: starting from the checkpoint {demo}")
        return dataclasses.replace(model, model_name_or_path=demo)
    print_once(f"no model was named and there is no {' or '.join(DEMO_CHECKPOINTS)}: a tiny model from scratch")
    return dataclasses.replace(model, config_name="tiny")


def decide(argv: list[str] | None) -> tuple[Decision, Tasks]:
    """(what this run does, decided from flags, the model's shape, the machine and --output_dir; its tasks)."""
    model_args, task_args, args, tasks = parse_flags(argv)
    packed = "--packing true" if args.packing else None
    tokenizer = named_tokenizer(model_args)
    if task_args.max_target_length == AUTO:
        tasks.fit_targets(tokenizer)
    batches = BatchLengths(*tasks.most_tokens(tokenizer), 0, packed, packable=tasks.packable)
    title = f"fine-tuning on {task_args.benchmark}/{task_args.dataset_name}"
    return resolve_flags(title, model_args, task_args, args, tokenizer, batches), tasks


def trained_tokenizer(run: Decision, tasks: Tasks) -> PreTrainedTokenizerBase:
    """A new tokenizer, trained on the sources and targets of the training rows."""
    cache = Path(run.data.data_cache_dir).expanduser()
    tokenizer = tokenizer_for_pairs(tasks.training_texts(), run.model.vocab_size, cache, run.model.byte_fallback)
    check_saved(tokenizer)
    return tokenizer


@exit_on_user_error()
def main(argv: list[str] | None = None) -> dict:
    """Decides what the run is, builds it and runs it; returns what it writes to all_results.json."""
    run, tasks = decide(argv)
    set_seed(run.args.seed)
    with run.args.main_process_first():
        tokenizer = run.tokenizer or trained_tokenizer(run, tasks)
    model, vocabulary = build_model(run, tokenizer)
    data = tasks.data(tokenizer, run.args, model)
    check_resumed(run.checkpoint, model.config, data.fingerprints(tokenizer), *run.groups)
    data.resume(run.checkpoint)
    generates = any(task.predict_with_generate for task in data.evaluation_tasks.values())
    forget_search(model, greedy=not generates)
    set_generation_length(model, data.generation_length)

    trainer = data.trainer_type(
        model=model,
        args=run.args,
        train_dataset=data.train,
        eval_dataset=data.validation,
        data_collator=data.collator(tokenizer, model),
        train_collator=train_collator(data.train, run.args, model),
        processing_class=tokenizer,
        evaluation_tasks=data.evaluation_tasks,
        summarise=tasks.summarise,
        task_record=data.record(run.model.model_name_or_path),
    )
    origin = run.model.tokenizer_name or run.model.model_name_or_path or "trained on the sources and targets"
    plan = {"from": run.source, "tokenizer": described_tokenizer(tokenizer, origin), "vocabulary": vocabulary}
    plan["search"] = trainer.described_search() if generates else None
    if start := run.model.model_name_or_path:
        plan["earlier task"] = other_task(start, [task.entry for task in tasks])
    else:
        plan["few rows"] = described_few_rows(data.tasks, run.args.given)
    return TrainingRun(run, trainer, data, plan).execute("evaluate_t5.py")


if __name__ == "__main__":
    prepare_process()
    run_script(main)
