"""Heads on the encoder: a label for each word or letter, or classes, labels or a number for each text.

    python fine_tune_t5.py --head tokens --train_file train.conll --validation_file dev.conll \
        --model_name_or_path out/pre_train_t5
    python fine_tune_t5.py --head class --task glue/sst2 --model_name_or_path google/t5-v1_1-base

tagged_texts.py reads words with tags, head_kinds.py has what differs between the heads, head_models.py makes and loads
the models, which are transformers' own; head_tasks.py has the rows, head_trainer.py loss and evaluation, and
head_answers.py evaluates and answers for evaluate_t5.py and predict_t5.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from foundry.common.errors import UserError
from foundry.common.flags import Flags, Rules, option, refuse
from foundry.modeling.learning import Learning
from foundry.modeling.weights import Part, Weights
from tasks.row_source import RowSource

KINDS = ("tokens", "class", "labels", "number")
POOLINGS = ("mean", "first")
# Flags that a head on the encoder cannot follow, and why.
_OF_TEXTS = "a head writes no text: leave it out"
_NOT_WITH = {
    "predict_with_generate generation_num_beams generation_max_length max_target_length": _OF_TEXTS,
    "z_loss loss_chunk_size span_corruption_file": "is for target texts, of which a head writes none: leave it out",
    "packing torch_compile": "not with --head, whose rows are padded: leave it out",
}


@dataclass
class Heads(RowSource, Learning, Part):
    """A head on the encoder, in place of the decoder."""

    _argument_group_name = "head on the encoder"
    decisive: ClassVar = ("head", "pooling", "freeze_encoder", "characters")
    rules: ClassVar[Rules] = (
        ("freeze_encoder", lambda flags: not flags.head, "needs --head"),
        ("characters", lambda flags: flags.head != "tokens", "needs --head tokens"),
        (
            "pooling",
            lambda flags: flags.head in (None, "tokens"),
            "is for whole texts: needs --head class, labels or number",
        ),
        ("target_type", lambda flags: flags.head and flags.target_type == "text", _OF_TEXTS),
        *((names, lambda flags: flags.head, reason) for names, reason in _NOT_WITH.items()),
    )

    head: str | None = option(
        None, "Train a head on the encoder: tokens labels words, the others whole texts.", choices=KINDS
    )
    pooling: str = option("mean", "What the head reads of a text: the tokens' mean, or the first.", choices=POOLINGS)
    freeze_encoder: bool = option(False, "Train the head alone (linear probe).")
    characters: bool = option(False, "A label for each letter, as of residues, in place of words.")

    def is_on(self) -> bool:
        return self.head is not None

    def decide(self, flags: Flags) -> dict[str, Any]:
        if flags.freeze_encoder and flags.train_only:
            refuse(flags, "train_only", "--freeze_encoder says already what is trained: leave one of them out")
        return {}

    # ------------------------------------------------------------ rows
    def task(self, *of_task: Any) -> Any:
        raise UserError("--head: evaluate_t5.py knows the head by the task.json of the model's folder: leave it out")

    def tasks(self, args: Any) -> Any:
        from features.encoder_heads.head_tasks import HeadTasks

        self.found = HeadTasks(self, args)
        return self.found

    def of_tasks(self, tasks: Any, args: Any) -> int | None:
        if not self.is_on():
            return None
        for each in args.features:
            if each is not self and isinstance(each, Learning | RowSource | Weights):
                folder = type(each).__module__.split(".")[-1]
                raise UserError(f"--head {self.head}: not with {folder}: leave the flags of one of them out")
        return 1  # rows are not packed

    # ------------------------------------------------------------ the model
    def created(self, config: Any, attention: str | None) -> Any:
        if not self.is_on():
            return None
        from features.encoder_heads.head_models import create_head_model

        return create_head_model(config, attention, self.found.kind, self.freeze_encoder)

    def loaded(self, name_or_path: str, attention: str | None) -> Any:
        if not self.is_on():
            return None
        from features.encoder_heads.head_models import load_head_model

        return load_head_model(name_or_path, attention, self.found.kind, self.freeze_encoder)

    def loss(self, model: Any, args: Any) -> Callable:
        from features.encoder_heads.head_trainer import head_loss

        return head_loss(self.found.kind, args.label_smoothing_factor)

    def plan(self, args: Any, model: Any) -> dict[str, str | None]:
        return {"head": self.found.kind.described() + ("; the encoder is frozen" if self.freeze_encoder else "")}


FEATURE = {"fine_tune_t5": Heads}
ANSWERING = {"head": "head_answers:HeadAnswers"}
