"""Embeddings of pairs within T5Trainer: sentence-transformers' losses to train on, and its evaluators.

    embedder = Embedder(temperature=0.05)
    embedder.embed(model, batch)                # [B, 2, D], of rows {"input_ids", "labels"}; with negatives [B, 2+K, D]
    embedder.measured(embeddings, rows)         # {"loss", "mrr_at_10", "recall_at_10"}

In-batch negatives: the source of a row is compared with the targets and the negatives of all rows of the micro-batch,
of which its own target is right (van den Oord et al. 2018, arXiv 1807.03748). CoSENT: each pair of pairs, of which one
is scored higher (https://kexue.fm/archives/8847).

Legend of shapes: N rows, B batch, S tokens, K most negatives of a row, D d_model.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from foundry.common.errors import UserError

if importlib.util.find_spec("sentence_transformers") is None:
    raise UserError("embeddings need sentence-transformers: pip install -r requirements/embeddings.txt")

from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
)
from sentence_transformers.sentence_transformer.losses import CoSENTLoss, MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.util import cos_sim
from torch import nn

from constants import IGNORE_INDEX
from features.encoder_heads.head_trainer import EncoderTrainer
from foundry.modeling.families import shape_of
from foundry.modeling.loss import LossOutput
from foundry.trainer_t5 import T5Trainer
from foundry.training.run_callback import RunCallback

AT = 10  # texts that are found for a source
COMPARED_AT_ONCE = 2**26  # similarities
_POOLING = {"mean": "mean", "first": "cls"}  # in sentence-transformers' words


@dataclass(frozen=True)
class Embedder:
    """How texts become embeddings, and how these are learnt and scored: with `score`, the column of scores, by CoSENT,
    otherwise by in-batch negatives. negative: columns of more, as --negative_column names them. rows: of a micro-batch
    in training, and of a block whose loss an evaluation reports."""

    temperature: float = 0.05
    pooling: str = "mean"
    normalize: bool = False
    negative: str | None = None
    score: str | None = None
    rows: int = 0

    @property
    def metrics(self) -> list[str]:
        """Names of what an evaluation measures, beside the loss; the first chooses the best checkpoint."""
        return ["spearman", "pearson"] if self.score else ["mrr_at_10", "recall_at_10"]

    def described(self) -> str:
        """For the plan."""
        of_text = "the mean of its tokens" if self.pooling == "mean" else "its first token"
        of_text += ", of length 1" if self.normalize else ""
        if self.score:
            compared = f"pairs are ranked as {self.score} says, within the {self.rows} rows of a micro-batch (CoSENT)"
        else:
            hard = f", and their {self.negative}" if self.negative else ""
            compared = f"the other targets of the {self.rows} rows of a micro-batch are negatives{hard}"
        return f"{compared}; temperature {self.temperature:g}; a text is {of_text}"

    # ------------------------------------------------------------ in a forward pass
    def embed(self, model: Any, inputs: dict, labels: torch.Tensor) -> torch.Tensor:
        """The embeddings [B, 2 + K, D] of source, target and negatives, in float32; 0 in place of those that a row
        lacks. labels: ids of the targets, [B, T], padded with -100."""
        sources = self.embed_texts(model, inputs["input_ids"], inputs["attention_mask"])
        pairs = torch.stack([sources, self.embed_answers(model, labels)], dim=1)
        if self.negative is None:
            return pairs
        known = has_text(inputs[self.negative])
        negatives = pairs.new_zeros(*known.shape, pairs.shape[-1])
        texts = inputs[self.negative][known]
        if not len(texts):  # the processes that share a model's weights must read it equally often
            texts = labels[:1]
        negatives[known] = self.embed_answers(model, texts)[: known.sum()]
        return torch.cat([pairs, negatives], dim=1)

    def embed_answers(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        """The embeddings [B, D] of texts [B, S] that are padded with -100."""
        filled = ids.masked_fill(ids.eq(IGNORE_INDEX), model.config.pad_token_id)
        return self.embed_texts(model, filled, ids.ne(IGNORE_INDEX).long())

    def embed_texts(self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The embeddings [B, D] of texts [B, S]."""
        read = getattr(model, "plain_forward", model)
        states = read(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state.float()
        # A row without any token fills a batch up. Its embedding counts nowhere, and must be finite.
        mask = attention_mask.clone()
        mask[:, 0] |= mask.sum(1).eq(0)
        pooling = Pooling(states.shape[-1], _POOLING[self.pooling])
        pooled = pooling({"token_embeddings": states, "attention_mask": mask})["sentence_embedding"]
        return nn.functional.normalize(pooled, dim=-1) if self.normalize else pooled

    def loss_of(
        self, embeddings: torch.Tensor, scores: torch.Tensor | None = None, known: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The loss of rows [B, 2 + K, D] that are compared with each other. scores: [B]. known: which negatives a row
        has, [B, K]; None: it has none."""
        compared = list(embeddings[:, :2].unbind(1))
        if known is not None:
            compared.append(embeddings[:, 2:][known])  # as a column of candidates, which need not be one for each row
        kind = CoSENTLoss if self.score else MultipleNegativesRankingLoss
        return kind(None, scale=1 / self.temperature).compute_loss_from_embeddings(compared, scores)

    def loss_in_forward(
        self, model: Any, labels: torch.Tensor, rows: torch.Tensor | None, inputs: dict, _chunk: int
    ) -> LossOutput:
        """The loss of a micro-batch, times its share of the `rows` of the whole step (None: of this batch), so that
        micro-batches count by their rows. Rows whose labels are -100 alone do not count."""
        counted = labels.ne(IGNORE_INDEX).any(1)
        embeddings = self.embed(model, inputs, labels)
        if not counted.any():
            return LossOutput(0 * embeddings.sum())
        scores = None if self.score is None else inputs[self.score][counted]
        known = None if self.negative is None else has_text(inputs[self.negative])[counted]
        loss, count = self.loss_of(embeddings[counted], scores, known), counted.sum()
        return LossOutput(loss * count / (count if rows is None else rows))

    # ------------------------------------------------------------ of all rows of a split
    def measured(
        self,
        embeddings: np.ndarray,
        sources: list[str],
        targets: list[str],
        scores: Sequence[float] | None,
        negatives: Sequence[int],
    ) -> dict[str, float]:
        """The loss, as the mean over blocks of `rows` rows in their order, and the metrics of the evaluator.
        embeddings: [N, 2 + K, D]. negatives: how many each row has."""
        tensors = torch.from_numpy(np.asarray(embeddings))
        known = torch.arange(tensors.shape[1] - 2) < torch.tensor(negatives)[:, None]
        wanted = None if scores is None else torch.tensor(scores)
        total = 0.0
        for start in range(0, len(tensors), self.rows):
            part = slice(start, start + self.rows)
            loss = self.loss_of(tensors[part], None if wanted is None else wanted[part], known[part])
            total += float(loss) * len(tensors[part])
        known = dict(zip([*targets, *sources], [*tensors[:, 1], *tensors[:, 0]], strict=True))
        found = ranked(known, sources, targets) if wanted is None else correlated(known, sources, targets, scores)
        return {"loss": total / len(tensors)} | found


def has_text(ids: torch.Tensor) -> torch.Tensor:
    """Which negatives [B, K] there are. ids: [B, K, S], padded with -100."""
    return ids.ne(IGNORE_INDEX).any(-1)


class _OfKnownTexts:
    """Of an evaluator: texts whose embeddings are known, in the place of its model."""

    def embed_inputs(self, known: dict[str, torch.Tensor], texts: list[str], **_: Any) -> torch.Tensor:
        return torch.stack([known[text] for text in texts])

    def store_metrics_in_model_card_data(self, *_: Any) -> None:
        pass


class _Correlation(_OfKnownTexts, EmbeddingSimilarityEvaluator):
    pass


class _Retrieval(_OfKnownTexts, InformationRetrievalEvaluator):
    pass


def correlated(
    known: dict[str, torch.Tensor], sources: list[str], targets: list[str], scores: Sequence[float]
) -> dict[str, float]:
    """How the cosine of a pair's embeddings follows its score. known: the embedding [D] of each text."""
    found = _Correlation(sources, targets, list(scores), main_similarity="cosine")(known)
    return {name: float(found[f"{name}_cosine"]) for name in ("spearman", "pearson")}


def ranked(known: dict[str, torch.Tensor], sources: list[str], targets: list[str]) -> dict[str, float]:
    """How often, and at which place, the target of a source is among the AT texts that are most like it, of all
    targets. Equal sources have the targets of all their rows. known: the embedding [D] of each text."""
    queries, corpus = ({text: str(n) for n, text in enumerate(dict.fromkeys(side))} for side in (sources, targets))
    relevant: dict[str, set[str]] = {}
    for source, target in zip(sources, targets, strict=True):
        relevant.setdefault(queries[source], set()).add(corpus[target])
    texts = [{number: text for text, number in side.items()} for side in (queries, corpus)]
    at = dict.fromkeys(("mrr_at_k", "ndcg_at_k", "accuracy_at_k", "precision_recall_at_k", "map_at_k"), [AT])
    at["corpus_chunk_size"] = max(AT, COMPARED_AT_ONCE // len(queries))
    options = dict(score_functions={"cosine": cos_sim}, main_score_function="cosine") | at
    found = _Retrieval(*texts, relevant, **options)(known)  # type: ignore[call-arg]
    return {f"{name}_at_{AT}": float(found[f"cosine_{name}@{AT}"]) for name in ("mrr", "recall")}


# ---------------------------------------------------------------- in the trainer
class RowsCallback(RunCallback):
    """Says by what the loss of a step is divided: the rows of all its micro-batches and ranks."""

    def __init__(self, trainer: T5Trainer):
        self.trainer = trainer

    def divisor(self, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        rows = sum(batch["labels"].ne(IGNORE_INDEX).any(1).sum() for batch in batches)
        return self.trainer.accelerator.reduce(rows, "sum")


class EmbeddingTrainer(EncoderTrainer):
    """Its evaluation keeps the embeddings of each row, and its folders are sentence-transformers'. longest: tokens of a
    text. prefix: put before sources."""

    embedder: Embedder
    longest: int
    prefix: str

    def kept(self, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """(embeddings [B, 2 + K, D], tokens of each source [B])."""
        return self.embedder.embed(self.model, inputs, inputs["labels"]), inputs["attention_mask"].sum(1)

    def _save(self, output_dir=None, state_dict=None):
        """Overrides T5Trainer to write the files of sentence-transformers too."""
        from features.encoder_heads.sentence_folder import write_modules

        super()._save(output_dir, state_dict)
        if self.args.should_save:
            with self.checkpoints.full_disk_put_off():
                write_modules(output_dir or self.args.output_dir, shape_of(self.model.config).encoder.width, self)
