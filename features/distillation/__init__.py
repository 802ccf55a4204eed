"""Distillation: the student learns from a teacher's distribution over the tokens, beside the labels.

    python fine_tune_t5.py recipes/distil_installed_docs.yaml
    python pre_train_t5.py --model_name_or_path google/t5-v1_1-small --teacher google/t5-v1_1-large --train_file my.txt

divergence.py has the loss, teacher.py the teacher, cached_teacher.py what --teacher_top_k caches of it, on_policy.py
the steps on answers of the student.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from foundry.common.errors import UserError
from foundry.common.flags import Flags, Rules, option
from foundry.features import Feature
from foundry.modeling.training_method import TrainingMethod


@dataclass
class Distillation(Feature):
    """The flags of a teacher."""

    _argument_group_name = "distillation"
    _usual = ""
    switch: ClassVar = "teacher"
    rules: ClassVar[Rules] = (
        (
            "distillation_weight distillation_temperature distillation_beta teacher_top_k",
            lambda flags: not flags.teacher,
            "says how to learn from a teacher: name it with --teacher",
        ),
    )
    decisive: ClassVar = ("distillation_weight", "distillation_temperature", "distillation_beta")

    teacher: str | None = option(None, "Checkpoint or Hub name of a model to distil from, with the same tokenizer.")
    distillation_weight: float = option(
        0.5, "Weight of the divergence from --teacher; the rest is that of the loss on the labels.", above=0, at_most=1
    )
    distillation_temperature: float = option(
        1.0, "Temperature of both distributions. Hinton: 2 to 20.", at_least=0.01, at_most=1000
    )
    distillation_beta: float = option(
        0.0, "0: KL(teacher || student), 1: KL(student || teacher), else Jensen-Shannon.", at_least=0, at_most=1
    )

    # Flags of fine-tuning.
    teacher_top_k: ClassVar[int] = 0
    on_policy_share: ClassVar[float] = 0.0

    def divergence(self, teacher: Any) -> Any:
        """What the flags ask for. teacher: the model, None if it ran before and is cached."""
        from features.distillation.divergence import Divergence
        from foundry.modeling.families import family_of

        cap = teacher and family_of(teacher.config).logit_cap(teacher.config)
        flags = self.distillation_weight, self.distillation_temperature, self.distillation_beta
        return Divergence(*flags, self.teacher_top_k, cap)

    def of_run(self) -> "Teacher":
        return Teacher(self)


@dataclass
class TaskDistillation(Distillation):
    """In fine-tuning the teacher may also read all rows once, before the training, or answers of the student."""

    rules: ClassVar[Rules] = (
        *Distillation.rules,
        (
            "teacher",
            lambda flags: flags.get("preference"),
            "not with --preference {preference}, whose loss needs two whole answers of each row: leave it out",
        ),
        (
            "teacher_top_k",
            lambda flags: flags.get("streaming"),
            "caches predictions of --teacher for all rows, and a stream has no end: leave it out",
        ),
        (
            "teacher_top_k",
            lambda flags: flags.span_corruption_file,
            "caches rows of tasks, not of --span_corruption_file: leave one of them out",
        ),
        (
            "on_policy_share",
            lambda flags: not flags.teacher,
            "is of the steps in which --teacher judges the student's answers: name one",
        ),
        (
            "on_policy_share",
            lambda flags: flags.teacher_top_k,
            "needs the teacher at answers that nobody knows beforehand, and --teacher_top_k caches what it says of the "
            "targets: leave one out",
        ),
        (
            "on_policy_share",
            lambda flags: flags.get("streaming") or flags.span_corruption_file or flags.packing or flags.torch_compile,
            "draws an answer of any length to each row of a task: leave out --streaming, --span_corruption_file, "
            "--packing and --torch_compile",
        ),
    )

    decisive: ClassVar = (*Distillation.decisive, "on_policy_share")

    teacher_top_k: int = option(0, "Cache the N likeliest tokens of --teacher. 0: run it at every step.", at_least=0)

    on_policy_share: float = option(
        0.0,
        "Share of the steps in which --teacher judges answers of the student, not the targets.",
        at_least=0,
        at_most=1,
    )


class Teacher(TrainingMethod):
    """Learns from a teacher. From `loss` on: model, the teacher with its weights, None if it is cached, and own_loss,
    the weight of the loss on labels, which changes with --on_policy_share. In fine-tuning, from `rows` on: longest, the
    tokens of an answer, and what the plan says of the teacher's own task."""

    # Log-probabilities and probabilities of student, teacher and mixture, and the gradient.
    logit_copies: ClassVar = 7

    def __init__(self, flags: Distillation):
        self.flags = flags
        self.model = self.own_loss = self.longest = self.other_task = None

    def is_on(self) -> bool:
        return self.flags.is_on()

    def decide(self, flags: Flags) -> dict[str, Any]:
        """The logits of student and teacher never exist whole, unless the head's weights are gathered only when it
        runs."""
        from foundry.arguments.sharding import wants_fsdp, zero_stage
        from foundry.modeling.loss import CHUNK

        if "loss_chunk_size" in flags.given or zero_stage(flags) == 3 or wants_fsdp(flags):
            return {}
        return {"loss_chunk_size": CHUNK}

    def take_tasks(self, tasks: Any, args: Any) -> int | None:
        from foundry.arguments.sharding import wants_fsdp, zero_stage

        if not (self.is_on() and self.flags.on_policy_share):
            return None
        if zero_stage(args) == 3 or wants_fsdp(args):
            flag = f"--deepspeed {args.deepspeed}" if args.deepspeed else "--fsdp"
            name = f"--on_policy_share {self.flags.on_policy_share:g}"
            raise UserError(f"{flag}: {name} draws answers, which needs whole weights on each GPU: leave one out")
        return 1

    def check(self, args: Any, config: Any, tokenizer: Any, packed: object = None) -> None:
        from features.distillation.teacher import check_teacher

        check_teacher(self.flags, config, tokenizer, packed)

    def rows(self, data: Any, model: Any) -> None:
        from features.distillation.cached_teacher import teach
        from foundry.training.drawn_answers import with_row_numbers
        from tasks.examples import answer_length, class_label_ids
        from tasks.predictions import other_task

        entries = [task.entry for task in data.tasks]
        self.longest = max(answer_length(entry, class_label_ids(entry, data.tokenizer)) for entry in entries)
        self.other_task = other_task(self.flags.teacher, entries)
        if self.flags.teacher_top_k:
            with data.training_args.main_process_first():
                teach(data, self.flags)
        for task in data.tasks if self.flags.on_policy_share else ():
            task.data["train"] = with_row_numbers(task.data["train"])

    def collator(self, collator: Callable) -> Callable:
        from features.distillation.cached_teacher import TaughtCollator

        top_k = self.flags.teacher_top_k
        return TaughtCollator(collator, top_k) if top_k else collator

    def loss(self, model: Any, args: Any) -> Any:
        import torch

        from features.distillation.teacher import load_teacher, loss_term

        self.model = None if self.flags.teacher_top_k else load_teacher(self.flags.teacher, args)
        term = loss_term(self.flags.divergence(self.model), self.model)
        if self.flags.on_policy_share:
            self.own_loss = torch.tensor(term.kept, device=args.device)
            term = term._replace(kept=self.own_loss)
        return term

    def callbacks(self, trainer: Any) -> list:
        from features.distillation.on_policy import OnPolicyCallback

        return [OnPolicyCallback(trainer, self, self.own_loss)] if self.flags.on_policy_share else []

    def memory(self, args: Any) -> dict[str, int]:
        from features.distillation.teacher import teacher_bytes

        return {} if self.flags.teacher_top_k else {"teacher": teacher_bytes(self.flags, args)}

    def plan(self, args: Any, model: Any) -> dict[str, str | None]:
        from features.distillation.teacher import described_teacher

        text, share = described_teacher(self.flags, args), self.flags.on_policy_share
        if share:
            text += f"; {share:g} of the steps on answers of the student, of at most {self.longest} tokens"
        return {"teacher": text, "teacher's task": self.other_task}

    def record(self) -> dict[str, Any]:
        return {"teacher": {"name": self.flags.teacher, "weights": self.model.contents}} if self.model else {}

    def check_resumed(self, checkpoint: str, run: dict) -> None:
        now, before = self.model and self.model.contents, (run.get("teacher") or {}).get("weights")
        if before != now:
            raise UserError(
                f"--resume_from_checkpoint {checkpoint}: the weights of --teacher: {before} in its run, {now} now: "
                "name the teacher of its run, or take only the weights with --model_name_or_path "
                f"{checkpoint}"
            )
