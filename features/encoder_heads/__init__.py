"""Heads on the encoder: a label for each word or letter, or classes, labels, a number or an embedding for each text.

    python fine_tune_t5.py --head tokens --train_file train.conll --validation_file dev.conll \
        --model_name_or_path out/pre_train_t5
    python fine_tune_t5.py --head class --task glue/sst2 --model_name_or_path google/t5-v1_1-base
    python fine_tune_t5.py --head embedding --train_file pairs.jsonl --source_column question --target_column answer \
        --model_name_or_path out/pre_train_t5

tagged_texts.py reads words with tags, conll.py CoNLL files, label_lists.py lists of labels; word_division.py finds the
words of running text, and tag_schemes.py the entities that tags say. head_kinds.py has what differs between the heads,
head_records.py reads it from task.json, head_models.py makes and loads the models, which are transformers' own;
head_tasks.py finds the task, head_rows.py has its tokens and labels, head_trainer.py loss and evaluation.
encoder_answers.py evaluates and answers for evaluate_t5.py and predict_t5.py, and head_answers.py says what a head
reads and answers.

Embeddings have no head. pair_rows.py has their rows, embedder.py loss and evaluators (sentence-transformers' own),
embedding_answers.py their part of the answers, and sentence_answers.py that of a folder without task.json.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from foundry.common.errors import UserError
from foundry.common.flags import Flags, Rules, option, refuse
from foundry.features import Feature
from foundry.modeling.training_method import TrainingMethod
from foundry.modeling.weights import ModelSource, Weights
from tasks.row_source import RowSource

EMBEDDING = "embedding"
KINDS = ("tokens", "class", "labels", "number", EMBEDDING)
POOLINGS = ("mean", "first")
# Flags that a head on the encoder cannot follow, and why.
_OF_TEXTS = "a head writes no text: leave it out"
_NOT_WITH = {
    "predict_with_generate generation_num_beams generation_max_length": _OF_TEXTS,
    "z_loss loss_chunk_size": "is for target texts, of which a head writes none: leave it out",
    "packing torch_compile": "not with --head, whose rows are padded: leave it out",
}


_OF_EMBEDDINGS = "embedding_temperature normalize_embeddings negative_column score_column"
# Flags of tasks that all heads follow, the last three without an effect on any number; and those of each head.
_FOLLOWED = (
    "task benchmark dataset_name train_file validation_file hub_dataset hub_config source_column target_column "
    "skip_rows_where validation_split_percentage max_train_samples max_eval_samples max_source_length "
    "preprocessing_num_workers data_cache_dir overwrite_cache"
)
_OF_TEXT_ROWS = (
    "data_dir source_file target_file validation_source_file validation_target_file tsv_header source_prefix "
    "record_shape records json_as_text max_piece_length"
)
_FOLLOWED_BY = {
    "tokens": "labels tsv_header",
    "labels": "labels",
    "class": f"{_OF_TEXT_ROWS} target_type metrics labels positive_label",
    "number": f"{_OF_TEXT_ROWS} target_type metrics",
    EMBEDDING: f"{_OF_TEXT_ROWS} max_target_length",
}


def refuse_unused(head: str, task: Any) -> None:
    """UserError for the first flag of a task (TaskArguments) that a head does not follow."""
    refuse(task, " ".join(unused_flags(head, task)), f"not with --head {head}, which does not follow it: leave it out")


def unused_flags(head: str, task: Any) -> list[str]:
    """The flags of a task that a head does not follow."""
    followed = {*_FOLLOWED.split(), *_FOLLOWED_BY[head].split()}
    return [field.name for field in fields(task) if field.name not in followed]


@dataclass
class Heads(Feature):
    """A head on the encoder, in place of the decoder."""

    _argument_group_name = "head on the encoder"
    _usual = "head"
    decisive: ClassVar = ("head", "pooling", "freeze_encoder", "characters", "mask_column", *_OF_EMBEDDINGS.split())
    rules: ClassVar[Rules] = (
        ("freeze_encoder", lambda flags: not flags.head, "needs --head"),
        ("freeze_encoder", lambda flags: flags.head == EMBEDDING, "--head embedding trains the encoder: leave it out"),
        (_OF_EMBEDDINGS, lambda flags: flags.head != EMBEDDING, "is for embeddings: needs --head embedding"),
        ("negative_column", lambda flags: flags.score_column, "scored pairs have none: leave out one of the columns"),
        ("characters mask_column", lambda flags: flags.head != "tokens", "needs --head tokens"),
        (
            "pooling",
            lambda flags: flags.head in (None, "tokens"),
            "is for whole texts: needs --head class, labels, number or embedding",
        ),
        (
            "label_smoothing_factor",
            lambda flags: flags.head == "number",
            "a number has no classes to smooth: leave it out",
        ),
        (
            "config_overrides",
            lambda flags: (
                flags.head and flags.model_name_or_path and "num_decoder_layers" in (flags.config_overrides or "")
            ),
            "with --head there is no decoder: leave num_decoder_layers out",
        ),
        *((names, lambda flags: flags.head, reason) for names, reason in _NOT_WITH.items()),
    )

    head: str | None = option(None, "Train the encoder: tokens labels words, the others whole texts.", choices=KINDS)
    pooling: str = option("mean", "What stands for a text: the mean of its tokens, or the first.", choices=POOLINGS)
    freeze_encoder: bool = option(False, "Train the head alone (linear probe).")
    characters: bool = option(False, "Each letter is a word, as of residues.")
    mask_column: str | None = option(None, "Column of a 1 for each word or letter whose tag counts, 0 for others.")
    embedding_temperature: float = option(0.05, "Temperature of similarities in the loss.", above=0, at_most=100)
    normalize_embeddings: bool = option(False, "Embeddings have the length 1.")
    negative_column: str | None = option(None, "Embeddings: column of texts unlike the source; a,b: several.")
    score_column: str | None = option(None, "Embeddings: column that says how alike source and target are.")

    def is_on(self) -> bool:
        return self.head is not None

    def of_run(self) -> "EncoderLearning":
        return EmbeddingLearning(self) if self.head == EMBEDDING else HeadLearning(self)

    def embedder(self, rows: int = 0) -> Any:
        """The Embedder of the flags. rows: of a micro-batch."""
        from features.encoder_heads.embedder import Embedder

        how = self.embedding_temperature, self.pooling, self.normalize_embeddings
        return Embedder(*how, self.negative_column, self.score_column, rows)


class EncoderLearning(RowSource, TrainingMethod, ModelSource):
    """Learns with the encoder alone."""

    def __init__(self, flags: Heads):
        self.flags = flags

    def is_on(self) -> bool:
        return self.flags.is_on()

    def decide(self, flags: Flags) -> dict[str, Any]:
        for group in flags.groups:
            if hasattr(group, "train_file"):
                refuse_unused(self.flags.head, group)
        if flags.freeze_encoder and flags.train_only:
            refuse(flags, "train_only", "--freeze_encoder says already what is trained: leave one of them out")
        return {}

    def task(self, *of_task: Any) -> Any:
        raise UserError("--head: evaluate_t5.py knows the head by the task.json of the model's folder: leave it out")

    def take_tasks(self, tasks: Any, args: Any) -> int | None:
        if not self.is_on():
            return None
        for each in args.features:
            has_loss = isinstance(each, TrainingMethod) and type(each).loss is not TrainingMethod.loss
            freezes = isinstance(each, Weights) and self.flags.freeze_encoder
            if each is not self and (has_loss or freezes or isinstance(each, RowSource)):
                folder = type(each).__module__.split(".")[-1]
                with_what = "--freeze_encoder" if freezes else f"--head {self.flags.head}"
                raise UserError(f"{with_what}: not with {folder}: leave the flags of one of them out")
        return 1  # rows are not packed


class HeadLearning(EncoderLearning):
    """Learns a head. found: its HeadTasks, from `tasks` on."""

    found: Any = None

    def tasks(self, args: Any) -> Any:
        from features.encoder_heads.head_tasks import HeadTasks

        self.found = HeadTasks(self.flags, args)
        return self.found

    def created(self, config: Any, attention: str | None) -> Any:
        from features.encoder_heads.head_models import create_head_model

        return create_head_model(config, attention, self.found.kind, self.flags.freeze_encoder)

    def loaded(self, name_or_path: str, attention: str | None) -> Any:
        from features.encoder_heads.head_models import load_head_model, refuse_adapters

        refuse_adapters(name_or_path)
        return load_head_model(name_or_path, attention, self.found.kind, self.flags.freeze_encoder)

    def loss(self, model: Any, args: Any) -> Callable:
        from features.encoder_heads.head_trainer import head_loss

        return head_loss(self.found.kind, args.label_smoothing_factor)

    def plan(self, args: Any, model: Any) -> dict[str, str | None]:
        rows = self.found.kind.plan(self.found.example)
        if self.flags.freeze_encoder:
            rows["head"] += "; the encoder is frozen"
        return rows


class EmbeddingLearning(EncoderLearning):
    """Learns embeddings, which need no head."""

    def check(self, args: Any, config: Any, tokenizer: Any, packed: object = None) -> None:
        if args.per_device_train_batch_size < 2 and not self.flags.negative_column:
            raise UserError(
                f"--per_device_train_batch_size {args.per_device_train_batch_size}: --head embedding compares the "
                "pairs of a micro-batch, and there must be at least 2"
            )

    def tasks(self, args: Any) -> Any:
        from features.encoder_heads.pair_rows import PairTasks

        return PairTasks.of_flags_and(args, self.flags.embedder())

    def created(self, config: Any, attention: str | None) -> Any:
        from features.encoder_heads.head_models import create_encoder

        return create_encoder(config, attention)

    def loaded(self, name_or_path: str, attention: str | None) -> Any:
        from features.encoder_heads.head_models import load_encoder, refuse_adapters

        refuse_adapters(name_or_path)
        return load_encoder(name_or_path, attention)

    def loss(self, model: Any, args: Any) -> Callable:
        return self.flags.embedder().loss_in_forward

    def callbacks(self, trainer: Any) -> list:
        from features.encoder_heads.embedder import RowsCallback

        return [RowsCallback(trainer)]

    def plan(self, args: Any, model: Any) -> dict[str, str | None]:
        return {"embedding": self.flags.embedder(args.per_device_train_batch_size).described()}


@dataclass
class Exported(ModelSource):
    """Exports an encoder with a head, or alone."""

    def is_on(self) -> bool:
        return True

    def loaded(self, name_or_path: str, attention: str | None) -> Any:
        from pathlib import Path

        from constants import TASK_RECORD
        from foundry.common.reports import read_json
        from foundry.modeling.loading import load_config
        from foundry.publishing.exports import lone_part

        part = lone_part(load_config(name_or_path, "--model_name_or_path"))
        record = read_json(Path(name_or_path) / TASK_RECORD)  # of LoRA's matrices, whose base may be a whole model
        if part is None and not record.keys() & {"head", "embedding"}:
            return None
        if part == "a head" or "head" in record:
            import torch

            from features.encoder_heads.head_models import load_saved

            return load_saved(name_or_path, torch.device("cpu"))
        from features.encoder_heads.head_models import load_encoder

        return load_encoder(name_or_path, attention)
