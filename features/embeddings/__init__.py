"""Embeddings: the encoder learns that texts of a pair are alike, and is saved as a sentence-transformers folder.

    python fine_tune_t5.py --embedding in_batch --train_file pairs.jsonl --source_column question \
        --target_column answer --model_name_or_path out/pre_train_t5
    python fine_tune_t5.py --embedding cosent --train_file pairs.csv --source_column one --target_column other \
        --score_column score --model_name_or_path google/t5-v1_1-base

pair_rows.py has the rows, encoders.py the models, embedder.py loss and evaluators (sentence-transformers' own),
sentence_folder.py the folder, embedding_answers.py what evaluate_t5.py and predict_t5.py do with it.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from foundry.common.errors import UserError
from foundry.common.flags import Rules, option
from foundry.modeling.learning import Learning
from foundry.modeling.weights import Part, Weights
from tasks.row_source import RowSource

LOSSES = ("in_batch", "cosent")
POOLINGS = ("mean", "first")
_OF_TEXTS = "with --embedding no text is written: leave it out"
# (flags that do not go with embeddings, why)
_NOT_WITH = (
    ("predict_with_generate generation_num_beams generation_max_length metrics target_type labels", _OF_TEXTS),
    ("label_smoothing_factor z_loss loss_chunk_size span_corruption_file", "is for target texts: leave it out"),
    ("packing torch_compile", "not with --embedding, whose rows are padded: leave it out"),
)


@dataclass
class Embeddings(RowSource, Learning, Part):
    """The encoder alone is trained, on pairs of texts."""

    _argument_group_name = "embeddings"
    decisive: ClassVar = (
        "embedding",
        "embedding_temperature",
        "embedding_pooling",
        "normalize_embeddings",
        "negative_column",
        "score_column",
    )
    rules: ClassVar[Rules] = (
        *((names, lambda flags: flags.embedding, reason) for names, reason in _NOT_WITH),
        (
            "embedding_temperature embedding_pooling normalize_embeddings negative_column score_column",
            lambda flags: not flags.embedding,
            "is for embeddings: give --embedding in_batch or cosent too",
        ),
        ("negative_column", lambda flags: flags.embedding == "cosent", "is for --embedding in_batch"),
        ("score_column", lambda flags: flags.embedding == "in_batch", "scored pairs need --embedding cosent"),
        (
            "embedding",
            lambda flags: flags.embedding == "cosent" and not flags.score_column,
            "name the column that says how alike the texts of a pair are with --score_column",
        ),
        (
            "embedding",
            lambda flags: flags.embedding and importlib.util.find_spec("sentence_transformers") is None,
            "needs sentence-transformers: pip install -r requirements/embeddings.txt",
        ),
    )

    embedding: str | None = option(
        None, "Train the encoder to embed texts: pairs with in-batch negatives, or scored pairs.", choices=LOSSES
    )
    embedding_temperature: float = option(0.05, "Temperature of the similarities in the loss.", above=0, at_most=100)
    embedding_pooling: str = option("mean", "An embedding is the mean of its tokens, or the first.", choices=POOLINGS)
    normalize_embeddings: bool = option(False, "Embeddings have the length 1.")
    negative_column: str | None = option(None, "Embeddings in_batch: column of a text that is unlike the source.")
    score_column: str | None = option(None, "Embeddings cosent: column that says how alike source and target are.")

    def is_on(self) -> bool:
        return self.embedding is not None

    def tasks(self, args: Any) -> Any:
        from features.embeddings.pair_rows import PairTasks

        return PairTasks.of_flags_and(args, self.embedder())

    def of_tasks(self, tasks: Any, args: Any) -> int | None:
        if not self.is_on():
            return None
        for each in args.features:
            has_loss = isinstance(each, Learning) and type(each).loss is not Learning.loss
            if each is not self and (has_loss or isinstance(each, RowSource | Part | Weights)):
                folder = type(each).__module__.split(".")[-1]
                raise UserError(f"--embedding {self.embedding}: not with {folder}: leave the flags of one of them out")
        return 1  # rows are not packed

    def check(self, args: Any, config: Any, tokenizer: Any, packed: object = None) -> None:
        if args.per_device_train_batch_size < 2 and not self.negative_column:
            raise UserError(
                f"--per_device_train_batch_size {args.per_device_train_batch_size}: --embedding {self.embedding} "
                "compares the pairs of a micro-batch, and there must be at least 2"
            )

    def created(self, config: Any, attention: str | None) -> Any:
        if not self.is_on():
            return None
        from features.embeddings.encoders import create_encoder

        return create_encoder(config, attention)

    def loaded(self, name_or_path: str, attention: str | None) -> Any:
        if not self.is_on():
            return None
        from features.embeddings.encoders import load_encoder

        return load_encoder(name_or_path, attention)

    def embedder(self, rows: int = 0) -> Any:
        """The Embedder of the flags. rows: of a block of pairs whose loss an evaluation reports."""
        from features.embeddings.embedder import Embedder

        columns = self.negative_column, self.score_column
        how = self.embedding_temperature, self.embedding_pooling, self.normalize_embeddings
        return Embedder(self.embedding, *how, *columns, rows)

    def loss(self, model: Any, args: Any) -> Callable:
        return self.embedder().loss_in_forward

    def callbacks(self, trainer: Any) -> list:
        from features.embeddings.embedder import RowsCallback

        return [RowsCallback(trainer)]

    def plan(self, args: Any, model: Any) -> dict[str, str | None]:
        return {"embedding": self.embedder(args.per_device_train_batch_size).described()}


FEATURE = {"fine_tune_t5": Embeddings}
ANSWERING = {"embedding": "embedding_answers:EmbeddingAnswers"}
