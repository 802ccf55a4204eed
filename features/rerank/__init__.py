"""Choosing among answers: the one that is most like the others, or the one from which a second model finds back.

    python predict_t5.py --input_file in.txt --do_sample --num_return_sequences 32 --rerank mbr
    python predict_t5.py --input_file in.txt --num_beams 8 --num_return_sequences 8 --rerank score --rerank_model out/ro
    python -m features.rerank.rerank_answers --answers_file answers.jsonl --output_file chosen.jsonl --rerank mbr

similarity.py compares answers, channel.py asks the second model, rerank_answers.py reranks files of answers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from foundry.common.errors import UserError
from foundry.common.flags import Flags, Rules, option
from tasks.frontend import frontends
from tasks.reranker import Reranker

METRICS = ("chrf", "chrf++", "bleu", "ter", "rouge1", "rouge2", "rougeL", "exact_match")
METRICS += ("squad_exact_match", "squad_f1", "final_number_accuracy")
# Of any script that chooses.
RULES: Rules = (
    ("rerank_metric", lambda flags: flags.rerank != "mbr", "is what --rerank mbr compares answers by: give that too"),
    (
        "rerank_model rerank_task rerank_prefix rerank_weight",
        lambda flags: flags.rerank != "score",
        "says how --rerank score asks a second model: give that too",
    ),
    (
        "rerank",
        lambda flags: flags.rerank == "score" and not flags.rerank_model,
        "name the model that writes sources from answers with --rerank_model",
    ),
)


@dataclass
class Rerank(Reranker):
    """Chooses the answer by its likeness to the others, or by a second model."""

    _argument_group_name = "choosing among answers"
    _usual = "rerank"
    switch: ClassVar = "rerank"
    decisive: ClassVar = ("rerank", "rerank_metric", "rerank_task", "rerank_prefix", "rerank_weight")
    rules: ClassVar[Rules] = (
        *RULES,
        (
            "rerank",
            lambda flags: flags.rerank and (flags.num_return_sequences or 1) < 2,
            "chooses among several answers: add --num_return_sequences 32 with --do_sample or --num_beams 32",
        ),
        (
            "rerank",
            lambda flags: flags.rerank and any(flags.get(kind.switch) for kind in frontends()),
            "is for the inputs of a file: leave it out, or give --input_file",
        ),
    )
    rerank: str | None = option(
        None,
        "Answer with the text that is most like the others (mbr), or that also a second model finds likely (score).",
        choices=("mbr", "score"),
    )
    rerank_metric: str = option("chrf", "Of --rerank mbr: what likeness is.", choices=METRICS)
    rerank_model: str | None = option(None, "Of --rerank score: folder of a model that writes sources from answers.")
    rerank_task: str | None = option(None, "Of --rerank score: the task of --rerank_model, if it has several.")
    rerank_prefix: str | None = option(None, "Of --rerank score: put before each answer. Not set: the task's.")
    rerank_weight: float = option(
        1.0, "Of --rerank score: weight of the second model's nats of a token; the first one's is 1.", at_least=0
    )

    def decide(self, flags: Flags) -> dict[str, Any]:
        """UserError for a second model that cannot be asked, before anything is read."""
        if self.rerank == "score":
            from features.rerank.channel import task_of_channel

            task_of_channel(self.rerank_model, self.rerank_task, self.rerank_prefix)
        return {}

    def record(self) -> dict[str, Any]:
        if self.rerank != "score":
            return {}
        from features.rerank.channel import files_of_model
        from foundry.common.digests import contents_digest

        return {"rerank_weights": contents_digest(files_of_model(self.rerank_model))}

    def plan(self, args: Any, model: Any) -> dict[str, str | None]:
        if self.rerank == "mbr":
            return {"choice": f"the text with the largest mean {self.rerank_metric} to the others"}
        weight = "" if self.rerank_weight == 1 else f"{self.rerank_weight:g} * "
        return {"choice": f"by nats of a token: of the answer, and {weight}of the source by {self.rerank_model}"}

    def chooser(self, plan: Any, device: Any) -> Callable:
        from tasks.row_texts import source_text

        if self.rerank == "score" and len(plan.entry.inputs) > 1:
            raise UserError(
                f"--rerank score: the task reads {', '.join(plan.reader.inputs)}, and a second model writes one "
                "source: take --rerank mbr"
            )
        # What the model reads is a source behind the prefix of its task.
        prefix = source_text(plan.entry, dict.fromkeys(plan.entry.reads, ""))
        score = self.scorer(device, plan.args.batch_size, plan.args.bf16)

        def choose(texts: list[str], candidates: list) -> list:
            sources = [text.removeprefix(prefix) for text in texts]
            answers = [[one.text for one in found] for found in candidates]
            nats = [[one.log_probability for one in found] for found in candidates]
            with_scores = (
                [one._replace(more=more) for one, more in zip(found, numbers, strict=True)]
                for found, numbers in zip(candidates, score(sources, answers, nats), strict=True)
            )
            return [in_order(found, lambda one: one.more) for found in with_scores]

        return choose

    def scorer(self, device: Any, batch_size: int, bf16: bool = False) -> Callable:
        """A function (sources, answers to each, their log-probabilities) -> what is found of each answer to each
        source; by the first number it is chosen. Loads the second model."""
        if self.rerank == "mbr":
            from features.rerank.similarity import mean_similarities

            return lambda _sources, answers, _nats: [
                [{"similarity": round(value, 4)} for value in mean_similarities(texts, self.rerank_metric)]
                for texts in answers
            ]
        from features.rerank.channel import Channel

        channel = Channel(self.rerank_model, self.rerank_task, self.rerank_prefix, device, batch_size, bf16)
        return partial(channel.scored, weight=self.rerank_weight)


def in_order(found: list, numbers_of: Callable[[Any], dict[str, float]]) -> list:
    """The answers to a source with the largest first number first; of equal ones the first stays before the others."""
    return sorted(found, key=lambda one: -next(iter(numbers_of(one).values())))
