"""Pre-train a T5 with span corruption, prefix LM or UL2, from scratch or on from a checkpoint.

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

from arguments_t5 import ModelArguments, PreTrainingArguments, PreTrainingDataArguments
from common.command_line import exit_on_user_error, parse_arguments
from common.processes import run_script
from common.reports import human_count, human_time
from corpora.own_ids import ids_offset, ids_tokenizer
from corpora.pre_training_streams import first_tokens, open_streams, stream_chunks
from corpora.sources import corpus_weights, find_corpora, find_sources, id_format, joined, tokenizer_for
from corpora.streams import resume as resume_stream
from corpora.tokenizers import has_tokenizer, load_tokenizer, tokenizer_fingerprint
from data_collator_t5 import T5DataCollator, find_sentinel_ids, is_byte_level
from data_t5 import tokenised, unknown_tokens
from model_t5 import (
    build_config,
    check_model_source,
    create_model,
    fit_vocabulary,
    flops_per_sequence,
    load_model,
    parse_overrides,
    set_dropout,
)
from modeling.new_vocabulary import change_vocabulary, same_vocabulary
from modeling.segment_masks import enable_packing
from objectives.chunks import (
    JoinedChunks,
    WeightedChunks,
    chunks_for,
    described_packing,
    evaluation_shares,
    tokens_per_example,
)
from objectives.denoisers import MixtureDataCollator, denoisers_of, with_mode_tokens
from objectives.documents import DocumentDataCollator
from objectives.metrics import (
    CORPUS_METRICS,
    LANGUAGE_MODEL_METRICS,
    corpora_metrics,
    language_model_metrics,
    mixture_metrics,
)
from objectives.packed_rows import PackedDataCollator
from runs.run import finish_run, set_up_tracking, start_run
from runs.samples import SamplesCallback
from runs.trackers import log_table
from trainer_t5 import T5Trainer
from training.batch_size import global_batch_size
from training.checkpoints import check_resumed_data, check_resumed_flags, check_resumed_model, prepare_output_dir
from training.flag_checks import (
    check_best_metric,
    check_model,
    check_pre_training_data,
    check_streaming,
    check_training,
)

UNUSED_BYTES = 11  # F5 to FF are in no UTF-8
DEFAULT_RECIPE = Path(__file__).parent / "recipes" / "pre_train_installed_docs.yaml"


def parse_flags(argv: list[str] | None):
    """The three groups of flags, checked."""
    model_args, data_args, training_args = parse_arguments(
        [ModelArguments, PreTrainingDataArguments, PreTrainingArguments],
        argv,
        default_recipe=str(DEFAULT_RECIPE),
        starts_anew=("model_name_or_path", "config_name", "dataset_name", "train_file"),
    )
    check_model(model_args, own_ids=id_format(data_args) is not None)
    check_pre_training_data(data_args)
    job = "continued pre-training" if model_args.model_name_or_path else "pre-training from scratch"
    check_training(training_args, job)
    check_streaming(data_args, training_args)
    for given, what in (
        (data_args.objective != "span_corruption", f"--objective {data_args.objective}"),
        (corpus_weights(data_args), "corpora drawn by weight"),
        (id_format(data_args), "ready-made ids"),
    ):
        if data_args.streaming and given:
            raise ValueError(f"--streaming does not go with {what}: leave it out")
    known = [*LANGUAGE_MODEL_METRICS, *(f"loss_{name}" for name in denoisers_of(data_args.objective))]
    known += [f"{corpus}_{metric}" for corpus in corpus_weights(data_args) for metric in CORPUS_METRICS]
    check_best_metric(training_args.metric_for_best_model, known)
    training_args.greater_is_better = (training_args.metric_for_best_model or "loss").endswith("accuracy")
    return model_args, data_args, training_args


def find_text(model_args: ModelArguments, data_args: PreTrainingDataArguments):
    """(sources, corpora, tokenizer): the text that was named, the corpora that make it up if they have weights (else
    one without a name), and the tokenizer loaded or trained on all."""
    name = model_args.tokenizer_name or model_args.model_name_or_path
    tokenizer = load_tokenizer(name) if name else None
    if data_args.streaming:
        if tokenizer is None:
            raise ValueError(
                "--streaming needs --tokenizer_name: create_tokenizer.py trains one on a sample of the text"
            )
        sources = open_streams(data_args)
        return sources, {"": sources}, tokenizer
    corpora = find_corpora(data_args)
    sources = joined(corpora) if corpora else find_sources(data_args)
    if tokenizer is None and id_format(data_args) is not None:
        tokenizer = ids_tokenizer(model_args.vocab_size)
    elif tokenizer is None:
        cache = Path(data_args.data_cache_dir).expanduser()
        tokenizer = tokenizer_for(sources["train"], model_args.vocab_size, cache, model_args.byte_fallback)
    return sources, corpora or {"": sources}, tokenizer


def adapt_vocabulary(model_args: ModelArguments, model, tokenizer) -> str | None:
    """Gives the checkpoint the words of `--tokenizer_name` if they are others than its own; what became of them."""
    folder = Path(model_args.model_name_or_path)
    if folder.is_dir() and not has_tokenizer(folder):
        return "the checkpoint names no words: --tokenizer_name is taken for its own"
    own = load_tokenizer(model_args.model_name_or_path, "--model_name_or_path")
    if same_vocabulary(own, tokenizer):
        return None
    words = change_vocabulary(model, own, tokenizer)
    return f"{words['kept']:,} words keep their embeddings, {words['new']:,} new ones start at their mean"


def build_model(model_args: ModelArguments, tokenizer, plain_size: int):
    """(model, what became of the vocabulary or None): the checkpoint, given the tokenizer's words if they are others
    than its own, or a new model of the chosen shape whose vocabulary fits the tokenizer. plain_size: the tokenizer's
    size before mode tokens were added to it."""
    changed = None
    if model_args.model_name_or_path:
        model = load_model(model_args.model_name_or_path, model_args.attn_implementation)
        changed = adapt_vocabulary(model_args, model, tokenizer) if model_args.tokenizer_name else None
    else:
        overrides = parse_overrides(model_args.config_overrides)
        config = build_config(model_args.config_name or "t5-v1_1-small", len(tokenizer), overrides)
        model = create_model(config, model_args.attn_implementation)
    rows, modes = model.get_input_embeddings().num_embeddings, len(tokenizer) - plain_size
    if modes and plain_size <= rows < len(tokenizer):
        raise ValueError(
            f"--objective needs {modes} mode tokens beside the tokenizer's {plain_size}, and the model has {rows} "
            "embedding rows: use a model with free rows, or an objective without modes (constants.py)"
        )
    fit_vocabulary(model, len(tokenizer))
    set_dropout(model, model_args.dropout_rate or 0.0)
    if ids_offset(tokenizer):  # what a reader of ready-made ids must know
        model.config.input_ids_offset = ids_offset(tokenizer)
    if ids_offset(tokenizer) or is_byte_level(tokenizer):  # and of words that do not name the sentinels
        model.config.sentinel_ids = find_sentinel_ids(tokenizer).tolist()
    return model, changed


def build_collator(data_args: PreTrainingDataArguments, tokenizer, decoder_start_token_id: int):
    """What corrupts the text. ValueError for lengths, densities and vocabularies that cannot be."""
    if data_args.objective == "span_corruption":
        kind = DocumentDataCollator if data_args.packing == "documents" else T5DataCollator
        return kind(
            tokenizer,
            data_args.input_seq_length,
            data_args.noise_density,
            data_args.mean_noise_span_length,
            decoder_start_token_id,
        )
    return MixtureDataCollator(tokenizer, data_args.objective, data_args.input_seq_length, decoder_start_token_id)


def cut_chunks(data_args: PreTrainingDataArguments, tokens: dict[str, dict], collator, training_args) -> dict:
    """Examples of both splits, of one text or of corpora drawn by weight. ValueError when there are too few for one
    step, or none to evaluate on."""
    most, length = data_args.max_eval_samples, f"{collator.tokens_length:.0f}"
    weights = [weight for _, weight in corpus_weights(data_args).values()]
    of_each = [most] * len(tokens)
    if most and weights and not data_args.validation_file:
        of_each = evaluation_shares(weights, most)
    train = {n: chunks_for(collator, files["train"].tokens, training_args.seed) for n, files in tokens.items()}
    validation = {
        n: chunks_for(collator, files["validation"].tokens, 0, most)
        for (n, files), most in zip(tokens.items(), of_each, strict=True)
    }
    empty = [f" of the corpus {name}" for name, chunks in train.items() if weights and not len(chunks)]
    joined = WeightedChunks([*train.values()], weights, training_args.seed) if weights and not empty else None
    chunks = {
        "train": joined or next(iter(train.values())),
        "validation": JoinedChunks([*validation.values()])
        if weights and not data_args.validation_file
        else next(iter(validation.values())),
    }
    batch = global_batch_size(training_args)
    if empty or len(chunks["train"]) < batch:
        raise ValueError(
            f"the training text{''.join(empty[:1])} gives {0 if empty else len(chunks['train'])} chunks of {length} "
            f"tokens, one step needs {batch}: use more text, a smaller --per_device_train_batch_size or "
            "--gradient_accumulation_steps, or a shorter --input_seq_length"
        )
    if not len(chunks["validation"]) and training_args.eval_strategy != "no":
        raise ValueError(
            f"the validation text ({sum(len(files['validation'].tokens) for files in tokens.values())} tokens) gives "
            f"no chunk of {length} tokens: raise --validation_split_percentage, give --validation_file, or set "
            "--eval_strategy no"
        )
    return chunks


def open_stream(data_args: PreTrainingDataArguments, sources: dict, collator, tokenizer, training_args, checkpoint):
    """({"": {"validation": tokens}}, {"train": stream, "validation": chunks}) of text that is read on the fly; the
    stream goes on where the checkpoint left it. ValueError if there is nothing to evaluate on."""
    length = collator.tokens_length
    tokens = first_tokens(data_args, sources, tokenizer, length)
    stream = stream_chunks(data_args, sources["train"], tokenizer, length, training_args)
    resume_stream(stream, checkpoint)
    validation = chunks_for(collator, tokens.tokens, 0, data_args.max_eval_samples)
    if not len(validation) and training_args.eval_strategy != "no":
        raise ValueError(f"the validation text ({len(tokens.tokens)} tokens) gives no chunk of {length} tokens: give a "
                         "longer --validation_file, or set --eval_strategy no")  # fmt: skip
    return {"": {"validation": tokens}}, {"train": stream, "validation": validation}


def build_metrics(data_args: PreTrainingDataArguments, tokens: dict[str, dict], collator, chunks: dict):
    """The function that turns an evaluation's statistics into metrics, of each corpus too where there are several."""

    def metrics_of(files: dict):
        bytes_per_token = files["validation"].without(collator.eos_id).bytes_per_token
        if isinstance(collator, PackedDataCollator):
            return partial(mixture_metrics, names=collator.names, bytes_per_token=bytes_per_token)
        return partial(language_model_metrics, bytes_per_token=bytes_per_token)

    if not isinstance(chunks["validation"], JoinedChunks):
        return metrics_of(next(iter(tokens.values())))
    return partial(
        corpora_metrics,
        names=[*tokens],
        ends=chunks["validation"].ends.tolist(),
        weights=[weight for _, weight in corpus_weights(data_args).values()],
        metrics=[metrics_of(files) for files in tokens.values()],
    )


def plan_rows(data_args: PreTrainingDataArguments, tokens: dict, words: int, collator, chunks: dict, epochs: float):
    """The rows of the summary that say what is read, how it is corrupted, and how often each corpus will be seen."""
    files = [next(iter(files.values())) if data_args.streaming else files["train"] for files in tokens.values()]
    text_bytes, count = sum(file.text_bytes for file in files), sum(len(file.tokens) for file in files)
    rows = {
        "documents": f"{sum(file.documents for file in files):,} {'read for validation ' * data_args.streaming}"
        f"({sum(file.empty_documents for file in files):,} empty ones left out)",
        "tokenizer": f"{words:,} words" + (f", {text_bytes / count:.2f} bytes per token" if text_bytes else ""),
    }
    weights = [weight for _, weight in corpus_weights(data_args).values()]
    if weights:
        parts = zip(tokens, weights, chunks["train"].passes(epochs), strict=True)
        rows["corpora"] = ", ".join(f"{name} {weight:.1%} (seen {passes:.3g} times)" for name, weight, passes in parts)
    if isinstance(collator, MixtureDataCollator):
        rows["objective"] = f"{data_args.objective}: {', '.join(collator.names)}"
    if isinstance(collator, DocumentDataCollator):
        rows["packing"] = described_packing(collator, chunks["train"])
    return rows


def shared_sentinels(tokenizer, collator) -> str | None:
    """A line for the summary where ByT5's sentinels reach down to bytes that characters of three or four bytes have."""
    spans = getattr(collator, "num_spans", 0)
    if not is_byte_level(tokenizer) or spans <= UNUSED_BYTES:
        return None
    return (f"{spans} bytes from id {collator.sentinel_ids[0]} down; UTF-8 leaves {UNUSED_BYTES} unused: longer spans "
            "(--mean_noise_span_length 20, as ByT5) need fewer")  # fmt: skip


def main(argv: list[str] | None = None) -> dict:
    """Runs the script; returns what it writes to all_results.json."""
    with exit_on_user_error():
        model_args, data_args, training_args = parse_flags(argv)
        flag = "packing" if data_args.packing == "documents" else "objective"
        is_packed = flag == "packing" or data_args.objective != "span_corruption"
        packed = f"--{flag} {getattr(data_args, flag)}" if is_packed else None
        check_model_source(model_args, training_args, packed)
        checkpoint = prepare_output_dir(training_args)
        set_seed(training_args.seed)
        with training_args.main_process_first(desc="finding the text"):
            sources, corpora, plain_tokenizer = find_text(model_args, data_args)
        tokenizer = with_mode_tokens(plain_tokenizer, data_args.objective)  # tokens are cached for the plain one
        model, changed_vocabulary = build_model(model_args, tokenizer, len(plain_tokenizer))
        # Built before the long work: it refuses lengths and densities that cannot be.
        collator = build_collator(data_args, tokenizer, model.config.decoder_start_token_id)
        fingerprints = {split: source.fingerprint for split, source in sources.items()}
        if len(corpora) > 1:
            fingerprints["train"] += "".join(f" {weight:.9f}" for _, weight in corpus_weights(data_args).values())
        fingerprints["tokenizer"] = tokenizer_fingerprint(tokenizer)
        check_resumed_model(checkpoint, model.config, training_args.optim)
        check_resumed_data(checkpoint, fingerprints)
        check_resumed_flags(checkpoint, data_args, training_args)
        if data_args.streaming:
            tokens, chunks = open_stream(data_args, sources, collator, plain_tokenizer, training_args, checkpoint)
        else:
            with training_args.main_process_first(desc="tokenising the text"):
                tokens = {name: tokenised(data_args, found, plain_tokenizer) for name, found in corpora.items()}
            chunks = cut_chunks(data_args, tokens, collator, training_args)
    set_up_tracking(training_args)

    if isinstance(collator, PackedDataCollator):
        enable_packing(model)
    trainer = T5Trainer(
        model=model,
        args=training_args,
        train_dataset=chunks["train"],
        eval_dataset=chunks["validation"] if len(chunks["validation"]) else None,
        data_collator=collator,
        processing_class=tokenizer,
        compute_metrics=build_metrics(data_args, tokens, collator, chunks),
    )
    if training_args.num_samples and trainer.eval_dataset is not None and not isinstance(collator, MixtureDataCollator):
        samples = (training_args.output_dir, tokenizer, chunks["validation"], collator, training_args.num_samples)
        trainer.add_callback(SamplesCallback(*samples, show=partial(log_table, trainer)))
    tokens_length = tokens_per_example(collator, chunks["train"])
    tokens_per_step = round(global_batch_size(training_args) * tokens_length)
    steps, epochs = training_args.max_steps, math.nan  # of a stream nobody knows how long they are
    if not data_args.streaming:
        steps_per_epoch = len(chunks["train"]) // global_batch_size(training_args)
        steps = steps if steps > 0 else math.ceil(training_args.num_train_epochs * steps_per_epoch)
        epochs = steps / steps_per_epoch
    start_run(
        trainer,
        title="pre-training",
        flags=[model_args, data_args, training_args],
        tokens_per_step=tokens_per_step,
        flops_per_sequence=flops_per_sequence(model.config, collator.inputs_length, collator.targets_length),
        examples={
            split: sum(files[split].documents for files in tokens.values()) for split in next(iter(tokens.values()))
        },
        fingerprints=fingerprints,
        rows={
            "text": sources["train"].description,
            "vocabulary": changed_vocabulary,
            "sentinels": shared_sentinels(tokenizer, collator),
            **plan_rows(data_args, tokens, len(tokenizer), collator, chunks, epochs),
            "chunks": f"{'a stream' if data_args.streaming else format(len(chunks['train']), ',')} training, "
            f"{len(chunks['validation']):,} validation, of "
            f"{tokens_length:.0f} tokens -> {collator.inputs_length} in, {collator.targets_length} out",
            "tokens": f"{human_count(tokens_per_step)} a step, "
            f"{human_count(tokens_per_step * steps)} in all"
            + ("" if math.isnan(epochs) else f" ({epochs:.1f} epochs)"),
        },
        checkpoint=checkpoint,
        unknown=unknown_tokens(tokens),
    )
    train_metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    return finish_run(
        trainer,
        train_metrics | {"train_tokens": trainer.state.global_step * tokens_per_step},
        shown={"training took": human_time(train_metrics["train_runtime"])},
        next_command=f"accelerate launch fine_tune_t5.py --model_name_or_path {training_args.output_dir}",
    )


if __name__ == "__main__":
    run_script(main)
