r"""Fine-tune a T5 on your own pairs or any task of DATASET_VALS (constants.py), from a checkpoint or from scratch.

    python fine_tune_t5.py                         # built-in task, from the demo checkpoint if there is one
    python fine_tune_t5.py --train_file 'pairs/*.jsonl' --validation_file dev.jsonl \
        --source_column prompt --target_column completion --model_name_or_path google/flan-t5-base
    python fine_tune_t5.py --task glue/sst2 --model_name_or_path google/t5-v1_1-base
    python fine_tune_t5.py --task glue/rte --data_dir glue/ --model_name_or_path out/base
    python fine_tune_t5.py --task glue/cola,glue/sst2,super_glue/rte --mixing equal   # or glue/all
    python fine_tune_t5.py --task text/restore_diacritics --streaming --max_steps 10000 \
        --train_file 'books/*.txt' --model_name_or_path google/mt5-base
    torchrun --nproc_per_node 8 fine_tune_t5.py --deepspeed zero_stage2_config.json --task glue/mnli

Without flags it runs recipes/fine_tune_installed_docs.yaml. Class labels are scored by teacher forcing, which finds the
label whose tokens greedy decoding would write; `--predict_with_generate` generates and compares texts. A mixture is
evaluated task by task, and the mean of the tasks' main metrics (eval_average) chooses the best model. The flags of your
own pairs become an entry, which is printed (docs/your_data.md). Writes the best model, task.json (for evaluate_t5.py to
repeat the numbers), all_results.json, metrics.jsonl, loss.png and run.json into --output_dir.
"""

from common.command_line import answer_early

if __name__ == "__main__":
    answer_early(__doc__)


import shlex
from pathlib import Path

from transformers import DataCollatorForSeq2Seq, set_seed

from arguments.model import ModelArguments, check_model
from arguments.own_pairs import SOURCES
from arguments.task import TaskArguments
from arguments.training import FineTuningArguments, check_streaming, check_training
from common.command_line import exit_on_user_error, parse_arguments
from common.processes import prepare_process, print_once, run_script
from constants import DEMO_CHECKPOINTS, LORA
from corpora.sources import tokenizer_for_pairs
from corpora.tokenizers import check_saved, described_tokenizer, named_tokenizer
from model_t5 import check_model_source, get_model, is_local_model
from modeling.generation_settings import forget_search, set_generation_length
from runs.memory import check_before_data
from runs.run import TrainingRun
from runs.speed import apply_speed, decide_speed, job_of
from tasks.tasks import TaskData, Tasks
from trainer_t5 import T5Trainer
from training.batching import train_collator
from training.checkpoints import check_resumed, check_same_flags, prepare_output_dir

FLAGS = [ModelArguments, TaskArguments, FineTuningArguments]
DEFAULT_RECIPE = Path(__file__).parent / "recipes" / "fine_tune_installed_docs.yaml"


def parse_flags(argv: list[str] | None) -> tuple[ModelArguments, TaskArguments, FineTuningArguments, Tasks]:
    """The three groups of flags and the tasks they name, checked and completed from one another."""
    model_args, task_args, args = parse_arguments(
        FLAGS,
        argv,
        default_recipe=str(DEFAULT_RECIPE),
        about=__doc__,
        starts_anew=("model_name_or_path", "config_name", "task", "benchmark", "dataset_name", *SOURCES),
    )
    check_model(model_args)
    tasks = Tasks.of_flags(task_args)
    vars(args).update(tasks.flags(args))
    if model_args.model_name_or_path is None and model_args.config_name is None:
        model_args.model_name_or_path = next((path for path in DEMO_CHECKPOINTS if is_local_model(path)), None)
        if model_args.model_name_or_path:
            print_once(f"no model was named: starting from the checkpoint {model_args.model_name_or_path}")
        else:
            model_args.config_name = "tiny"
            print_once(f"no model was named and there is no {' or '.join(DEMO_CHECKPOINTS)}: a tiny model from scratch")
    job = "fine-tuning a checkpoint" if model_args.model_name_or_path else "fine-tuning from scratch"
    check_training(args, job + LORA if model_args.lora_rank else job)
    check_streaming(task_args, args)
    return model_args, task_args, args, tasks


def main(argv: list[str] | None = None) -> dict:
    """Parses, prepares, trains, evaluates and saves; returns what it writes to all_results.json."""
    with exit_on_user_error():
        model_args, task_args, args, tasks = parse_flags(argv)
        check_model_source(model_args, args, packed="--packing true" if args.packing else None)
        check_same_flags(model_args, task_args, args)
        checkpoint = prepare_output_dir(args)
        set_seed(args.seed)
        with args.main_process_first(desc="loading the tokenizer"):
            tokenizer = named_tokenizer(model_args)
            origin = model_args.tokenizer_name or model_args.model_name_or_path
            if tokenizer is None:
                texts, cache = tasks.training_texts(), Path(task_args.data_cache_dir).expanduser()
                tokenizer = tokenizer_for_pairs(texts, model_args.vocab_size, cache, model_args.byte_fallback)
                origin = "trained on the sources and targets"
            check_saved(tokenizer)
        model, vocabulary = get_model(model_args, tokenizer)
        shapes = (*tasks.most_tokens(tokenizer), args.length_buckets)
        options = (args.max_steps, checkpoint, model_args.attn_implementation, not task_args.streaming)
        speed = decide_speed(job_of(model, *shapes, *options), args)
        apply_speed(speed, model, model_args, args)
        check_before_data(model, args)
        with args.main_process_first(desc="preparing the task"):
            data = TaskData(tasks, tokenizer, args)
        check_resumed(checkpoint, model.config, data.fingerprints(tokenizer), model_args, task_args, args)
        data.resume(checkpoint)
        forget_search(model, greedy=not any(task.predict_with_generate for task in data.judged.values()))
        set_generation_length(model, data.generation_length)
        collator = train_collator(data.train, args, model)

    trainer = T5Trainer(
        model=model,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.validation,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=8),
        train_collator=collator,
        processing_class=tokenizer,
        evaluation_tasks=data.judged,
        summarise=tasks.summarise,
        task_record=data.record(),
    )
    title, flags = f"fine-tuning on {task_args.benchmark}/{task_args.dataset_name}", [model_args, task_args, args]
    source = model_args.model_name_or_path or f"scratch ({model_args.config_name})"
    rows = {
        "from": source,
        "tokenizer": described_tokenizer(tokenizer, origin),
        "vocabulary": vocabulary,
        "speed": speed.described,
    }
    run = TrainingRun(trainer, title, flags, data, checkpoint, rows)
    run.start()
    result = trainer.train(resume_from_checkpoint=checkpoint)
    command = f"python evaluate_t5.py --model_name_or_path {shlex.quote(args.output_dir)}"
    return run.finish(result.metrics, next_command=command)


if __name__ == "__main__":
    prepare_process()
    run_script(main)
