"""Pre-train a T5 with span corruption, from scratch or on from a checkpoint.

    accelerate launch pre_train_t5.py                         # tiny model, built-in English, a laptop's CPU
    accelerate launch pre_train_t5.py recipes/my.yaml --learning_rate 1e-2
    accelerate launch pre_train_t5.py --config_name t5-v1_1-base --train_file 'corpus/*.jsonl.gz' --output_dir out/base
    accelerate launch pre_train_t5.py --model_name_or_path google/t5-v1_1-base --train_file my.txt
    accelerate launch pre_train_t5.py --streaming --dataset_name allenai/c4 --dataset_config_name en \
        --tokenizer_name google/t5-v1_1-base --config_name t5-v1_1-base   # tokenised on the fly

Without flags it runs recipes/pre_train_installed_docs.yaml, which names its cost and the numbers to expect. Writes the
model and tokenizer, all_results.json, metrics.jsonl, loss.png and run.json into --output_dir.
"""

import math
from functools import partial
from pathlib import Path

from transformers import set_seed

from arguments_t5 import (
    ModelArguments,
    PreTrainingArguments,
    PreTrainingDataArguments,
    check_best_metric,
    check_model,
    check_pre_training_data,
    check_streaming,
    check_training,
    parse_overrides,
)
from common.command_line import exit_on_user_error, parse_arguments
from common.reports import human_count, human_time
from corpora.pre_training_streams import first_tokens, open_streams, stream_chunks
from corpora.streams import resume as resume_stream
from corpora.tokenizers import load_tokenizer, tokenizer_fingerprint
from data_collator_t5 import T5DataCollator
from data_t5 import ChunkDataset, find_sources, tokenised, tokenizer_for
from model_t5 import (
    build_config,
    check_model_source,
    create_model,
    fit_vocabulary,
    flops_per_sequence,
    load_model,
    set_dropout,
)
from tasks.metrics import LANGUAGE_MODEL_METRICS, language_model_metrics
from trainer_t5 import T5Trainer, global_batch_size
from training.checkpoints import check_resumed_data, check_resumed_model, prepare_output_dir
from training.runs import finish_run, set_up_tracking, start_run

DEFAULT_RECIPE = Path(__file__).parent / "recipes" / "pre_train_installed_docs.yaml"


def parse_flags(argv: list[str] | None):
    """The three groups of flags, checked."""
    model_args, data_args, training_args = parse_arguments(
        [ModelArguments, PreTrainingDataArguments, PreTrainingArguments],
        argv,
        default_recipe=str(DEFAULT_RECIPE),
        starts_anew=("model_name_or_path", "config_name", "dataset_name", "train_file"),
    )
    check_model(model_args)
    check_pre_training_data(data_args)
    check_training(training_args, "pre_training")
    check_streaming(data_args, training_args)
    check_best_metric(training_args.metric_for_best_model, [*LANGUAGE_MODEL_METRICS])
    training_args.greater_is_better = (training_args.metric_for_best_model or "loss").endswith("accuracy")
    return model_args, data_args, training_args


def find_text(model_args: ModelArguments, data_args: PreTrainingDataArguments):
    """(sources, tokenizer): the text that was named, and the tokenizer loaded or trained on it."""
    name = model_args.tokenizer_name or model_args.model_name_or_path
    if data_args.streaming and not name:
        raise ValueError("--streaming needs --tokenizer_name: create_tokenizer.py trains one on a sample of the text")
    tokenizer = load_tokenizer(name) if name else None
    sources = open_streams(data_args) if data_args.streaming else find_sources(data_args)
    if tokenizer is None:
        cache = Path(data_args.data_cache_dir).expanduser()
        tokenizer = tokenizer_for(sources["train"], model_args.vocab_size, cache)
    return sources, tokenizer


def build_model(model_args: ModelArguments, tokenizer):
    """The checkpoint, or a new model of the chosen shape whose vocabulary fits the tokenizer."""
    if model_args.model_name_or_path:
        model = load_model(model_args.model_name_or_path, model_args.attn_implementation)
    else:
        overrides = parse_overrides(model_args.config_overrides)
        config = build_config(model_args.config_name or "t5-v1_1-small", len(tokenizer), overrides)
        model = create_model(config, model_args.attn_implementation)
    fit_vocabulary(model, len(tokenizer))
    set_dropout(model, model_args.dropout_rate or 0.0)
    return model


def cut_chunks(
    data_args: PreTrainingDataArguments, tokens: dict, length: int, training_args
) -> dict[str, ChunkDataset]:
    """Chunks of both splits, or where the text is streamed of validation alone. ValueError when there are too few for
    one step, or none to evaluate on."""
    chunks = {"validation": ChunkDataset(tokens["validation"].tokens, length, max_chunks=data_args.max_eval_samples)}
    if "train" in tokens:
        chunks = {"train": ChunkDataset(tokens["train"].tokens, length, seed=training_args.seed)} | chunks
    batch = global_batch_size(training_args)
    if "train" in chunks and len(chunks["train"]) < batch:
        raise ValueError(
            f"the training text gives {len(chunks['train'])} chunks of {length} tokens, one step needs {batch}: use "
            "more text, a smaller --per_device_train_batch_size or --gradient_accumulation_steps, or a shorter "
            "--input_seq_length"
        )
    if not len(chunks["validation"]) and training_args.eval_strategy != "no":
        raise ValueError(
            f"the validation text ({len(tokens['validation'].tokens)} tokens) gives no chunk of {length} tokens: raise "
            "--validation_split_percentage, give --validation_file, or set --eval_strategy no"
        )
    return chunks


def main(argv: list[str] | None = None) -> dict:
    """Runs the script; returns what it writes to all_results.json."""
    with exit_on_user_error():
        model_args, data_args, training_args = parse_flags(argv)
        check_model_source(model_args)
        checkpoint = prepare_output_dir(training_args)
        set_seed(training_args.seed)
        with training_args.main_process_first(desc="finding the text"):
            sources, tokenizer = find_text(model_args, data_args)
        model = build_model(model_args, tokenizer)
        collator = T5DataCollator(
            tokenizer,
            data_args.input_seq_length,
            data_args.noise_density,
            data_args.mean_noise_span_length,
            model.config.decoder_start_token_id,
        )  # built before the long work: it refuses lengths and densities that cannot be
        fingerprints = {split: source.fingerprint for split, source in sources.items()}
        fingerprints["tokenizer"] = tokenizer_fingerprint(tokenizer)
        check_resumed_model(checkpoint, model.config, training_args.optim)
        check_resumed_data(checkpoint, fingerprints)
        if data_args.streaming:
            tokens = {"validation": first_tokens(data_args, sources, tokenizer, collator.tokens_length)}
            stream = stream_chunks(data_args, sources["train"], tokenizer, collator.tokens_length, training_args)
            resume_stream(stream, checkpoint)
        else:
            with training_args.main_process_first(desc="tokenising the text"):
                tokens = tokenised(data_args, sources, tokenizer)
        chunks = cut_chunks(data_args, tokens, collator.tokens_length, training_args)
    set_up_tracking(training_args)

    trainer = T5Trainer(
        model=model,
        args=training_args,
        train_dataset=stream if data_args.streaming else chunks["train"],
        eval_dataset=chunks["validation"] if len(chunks["validation"]) else None,
        data_collator=collator,
        processing_class=tokenizer,
        compute_metrics=partial(
            language_model_metrics,
            num_spans=collator.num_spans,
            bytes_per_token=tokens["validation"].bytes_per_token,
        ),
    )
    tokens_per_step = global_batch_size(training_args) * collator.tokens_length
    steps, epochs = training_args.max_steps, ""
    if not data_args.streaming:
        steps_per_epoch = len(chunks["train"]) // global_batch_size(training_args)
        if steps <= 0:
            steps = math.ceil(training_args.num_train_epochs * steps_per_epoch)
        epochs = f" ({steps / steps_per_epoch:.1f} epochs)"
    start_run(
        trainer,
        title="pre-training",
        flags=[model_args, data_args, training_args],
        tokens_per_step=tokens_per_step,
        flops_per_sequence=flops_per_sequence(model.config, collator.inputs_length, collator.targets_length),
        examples={split: file.documents_read for split, file in tokens.items()},
        fingerprints=fingerprints,
        rows={
            "text": sources["train"].description,
            "documents": ", ".join(
                f"{file.documents:,} {split} ({file.empty_documents:,} empty ones left out)"
                for split, file in tokens.items()
            ),
            "tokenizer": f"{len(tokenizer):,} words, {next(iter(tokens.values())).bytes_per_token:.2f} bytes per token",
            "chunks": f"{', '.join(f'{len(dataset):,} {split}' for split, dataset in chunks.items())}, of "
            f"{collator.tokens_length} tokens -> {collator.inputs_length} in, {collator.targets_length} out",
            "tokens": f"{human_count(tokens_per_step)} a step, {human_count(tokens_per_step * steps)} in all{epochs}",
        },
        checkpoint=checkpoint,
    )
    train_metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    return finish_run(
        trainer,
        train_metrics | {"train_tokens": trainer.state.global_step * tokens_per_step},
        shown={"training took": human_time(train_metrics["train_runtime"])},
        next_command=f"accelerate launch fine_tune_t5.py --model_name_or_path {training_args.output_dir}",
    )


if __name__ == "__main__":
    main()
