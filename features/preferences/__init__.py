"""Preferences: fine-tuning learns which of two answers is better (dpo, ipo, simpo), or which answers are good (kto).

    python fine_tune_t5.py --preference dpo --train_file pairs.jsonl --model_name_or_path out/fine_tune_t5

losses.py has the losses and the forward pass, reference.py the starting weights' log-probabilities and the log,
preference_rows.py the rows and records.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from foundry.common.errors import UserError
from foundry.common.flags import check_rules, option, refuse
from foundry.common.words import listed
from foundry.features import Column, Feature, Measures, TaskFeature
from foundry.modeling.training_method import TrainingMethod

if TYPE_CHECKING:
    import numpy as np

# {kind: default of beta}, as in the papers and TRL; SimPO's default is that of its authors' code.
BETAS = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "kto": 0.1}
SIMPO_GAMMA = 0.5

# What an evaluation of preferences measures besides the task's metrics; the training logs have all but the loss.
PREFERENCE_METRICS = ("preference_accuracy", "reward_margin", "chosen_log_probability", "rejected_log_probability")
PREFERENCE_METRICS += ("preference_loss",)

OTHER_ANSWER = "answer to another prompt"  # the column that `with_other_answers` adds to unpaired rows
_COLUMNS = ("rejected_column", "desirable_column")
_FACTORS = ("preference", "preference_beta", "simpo_gamma")
_APART = ("labels", "source_file", "validation_source_file")  # flags that exclude --preference
# For check_rules: (flags, function of all flags that says when these are refused, why and what to do).
_RULES = (
    (
        "rejected_column",
        lambda args: args.preference in (None, "kto"),
        "pairs are compared by --preference dpo, ipo or simpo: give one of them",
    ),
    (
        "desirable_column",
        lambda args: args.preference != "kto",
        "single answers are compared by --preference kto: give it",
    ),
    ("preference_beta", lambda args: not args.preference, "is a factor of --preference: give both"),
    ("simpo_gamma", lambda args: args.preference != "simpo", "is for --preference simpo"),
    (
        "preference",
        lambda args: args.target_type not in (None, "text"),
        "compares free texts: leave out --target_type {target_type}",
    ),
    (
        "preference",
        lambda args: (
            args.source_column and not (args.desirable_column if args.preference == "kto" else args.rejected_column)
        ),
        "name the column of worse answers with --rejected_column, or for kto that of ratings with --desirable_column",
    ),
    (
        "preference",
        lambda args: args.record_shape and args.record_shape not in _shapes_for(args.preference),
        "--record_shape {record_shape} has no answers to compare: dpo, ipo and simpo read the shape preference, and "
        "kto reads unpaired",
    ),
)


def _shapes_for(preference: str) -> tuple[str, ...]:
    return ("unpaired",) if preference == "kto" else ("preference",)


def _pair(row: dict) -> dict:
    from features.preferences.preference_rows import pair

    return pair(row)


def _rated(row: dict) -> dict:
    from features.preferences.preference_rows import rated

    return rated(row)


class AnswerMeasures(Measures):
    """How often the better answer is the likelier one, and both answers' log-probabilities."""

    @staticmethod
    def names(entry: Any) -> Sequence[str]:
        return PREFERENCE_METRICS if "preference" in entry.further else ()

    @staticmethod
    def statistics(nats: Any, labels: Any, correct: Any, inputs: dict) -> Any:
        if "rejected" not in inputs:  # rows of one answer read no further file
            return nats.new_zeros(len(nats), 0)
        from features.preferences.losses import answer_statistics

        return answer_statistics(nats, inputs)

    @staticmethod
    def measured(entry: Any, measure: Callable) -> Callable:
        """An undesirable answer is no reference: in all but PREFERENCE_METRICS its row does not count."""
        from features.preferences.losses import Preference, evaluated
        from tasks.row_texts import column_value

        is_good = ComparedAnswers.columns(entry).get("desirable")

        def compute(tokens: "np.ndarray", statistics: "np.ndarray", rows: list[dict]) -> dict[str, float]:
            good = [n for n, row in enumerate(rows) if is_good is None or column_value(is_good, row)]
            metrics = measure(tokens[good], statistics[good], [rows[number] for number in good]) if good else {}
            return metrics | evaluated(Preference(**entry.further["preference"]), statistics)

        return compute

    @staticmethod
    def answered(entry: Any, statistics: "np.ndarray") -> dict[str, Sequence]:
        if "rejected" not in entry.further:
            return {}
        from features.preferences.losses import both_log_probabilities

        return dict(both_log_probabilities(statistics))


@dataclass(kw_only=True)
class ComparedAnswers(TaskFeature):
    """Rows with two answers, or with an answer and whether it is good."""

    fields: ClassVar = {"rejected": "column", "desirable": "column", "preference": "dictionary"}
    # Pairs of answers, which may have no column `prompt`, and rated single answers for kto.
    shapes: ClassVar = {
        "preference": (("chosen", "rejected"), _pair),
        "unpaired": (("prompt", "completion", "label"), _rated),
    }
    measures: ClassVar = AnswerMeasures

    preference: str | None = option(None, "Learn which answers are better, by this loss.", choices=BETAS)
    rejected_column: str | None = option(None, "Preference: column of the worse answers.")
    desirable_column: str | None = option(None, "Preference kto: column that says whether a target is good.")
    preference_beta: float | None = option(None, "Preference: scale of rewards. Not set: 0.1, of simpo 2.", above=0)
    simpo_gamma: float | None = option(None, f"Target reward margin of simpo. Not set: {SIMPO_GAMMA}.", at_least=0)

    # ------------------------------------------------------------ flags of own pairs
    @staticmethod
    def fields_of(args: Any) -> dict[str, Any]:
        for flag in _COLUMNS:
            if getattr(args, flag) and not args.target_column:
                raise UserError(f"--{flag} {getattr(args, flag)}: needs --target_column")
        for other in _APART:
            if args.preference and getattr(args, other):
                raise UserError(
                    f"--preference and --{other} exclude each other: answers that are compared are free texts"
                )
        check_rules(args, _RULES)
        if args.preference is None:
            return {}
        beta = args.preference_beta or BETAS[args.preference]
        gamma = SIMPO_GAMMA if args.simpo_gamma is None else args.simpo_gamma
        compared = dict(preference=dict(kind=args.preference, beta=beta, gamma=gamma))
        if args.preference == "kto":
            return compared | dict(desirable=args.desirable_column or "label")
        return compared | dict(rejected=args.rejected_column or "rejected")

    @staticmethod
    def shapes_for(args: Any) -> tuple[Sequence[str], str] | None:
        if args.preference is None:
            return None
        pairs, rated = "which answer is worse with --rejected_column", "which answers are good with --desirable_column"
        return _shapes_for(args.preference), f", and {rated if args.preference == 'kto' else pairs}"

    @staticmethod
    def replaced(record: dict, values: dict, given: Collection[str]) -> set[str]:
        if "record_shape" in given:
            keeps = values.get("record_shape") in _shapes_for(record.get("preference"))
            return {*_COLUMNS, *(() if keeps else _FACTORS)}
        names_columns = not set(_COLUMNS).isdisjoint(given)
        if "source_column" in given and "record_shape" in record:
            return set() if names_columns else set(_FACTORS)
        if "preference" not in given:
            return set()
        columns = {"source_column", "target_column", "tsv_header", "record_shape", *_COLUMNS}
        replaced = {"preference_beta", "simpo_gamma"} | (set() if names_columns else columns)
        is_text = record.get("target_type") in (None, "text") and not record.get("labels")
        return replaced if is_text else replaced | {"target_type", "labels", "positive_label", "metrics"}

    # ------------------------------------------------------------ the entry and its rows
    @staticmethod
    def columns(entry: Any) -> dict[str, Column]:
        named = [field for field in ("rejected", "desirable") if entry.further.get(field)]
        preference = entry.further.get("preference")
        if not preference or entry.target_type != "text":
            if preference or named:
                raise UserError("preference, rejected and desirable go together, with the target_type text")
            return {}
        (wanted,) = fields = ["desirable" if preference.get("kind") == "kto" else "rejected"]
        if preference.get("kind") not in BETAS or named != fields:
            raise UserError(f"preference {preference}: needs kind, one of {listed(BETAS)}, and {wanted}")
        if wanted == "rejected":
            column = entry.further["rejected"]
            worse = Column("answer", column, plural="rejected answers", shown="rejected", beside="chosen")
            return {"rejected": worse}
        other = Column(
            "answer", OTHER_ANSWER, made=True, plural="answers to other prompts", shown="other prompt's answer"
        )
        good = Column("boolean", entry.further["desirable"], beside=("target (bad)", "target (good)"))
        return {"rejected": other, "desirable": good}

    @staticmethod
    def rows(entry: Any, rows: list[dict]) -> list[dict]:
        if "desirable" not in entry.further:
            return rows
        from features.preferences.preference_rows import with_other_answers

        return with_other_answers(entry, rows)


@dataclass
class Preferences(Feature):
    """No flags of its own: those of the task (`ComparedAnswers`), or its entry, say whether preferences are learnt."""

    decisive: ClassVar = ("preference", "preference_beta", "simpo_gamma")

    def of_run(self) -> "PreferenceLearning":
        return PreferenceLearning()


class PreferenceLearning(TrainingMethod):
    """Learns preferences, if the entry of the task has some. how: the loss, a `Preference`, and entry: of the task,
    from `take_tasks` on."""

    def __init__(self) -> None:
        self.how: Any = None
        self.entry: Any = None

    def is_on(self) -> bool:
        return self.how is not None

    def take_tasks(self, tasks: Any, args: Any) -> int | None:
        from features.preferences.losses import Preference
        from foundry.arguments.sharding import zero_stage

        self.entry = next((task.entry for task in tasks if "preference" in task.entry.further), None)
        if self.entry is None:
            return None
        self.how = Preference(**self.entry.further["preference"])
        name = f"--preference {self.how.kind}"
        if len(tasks) > 1 or tasks.args.span_corruption_file:
            raise UserError(f"{name}: needs one task, and the flags mix several. Name the pairs alone")
        alone = f"not with {name}, whose loss needs two whole answers of each row: leave it out"
        refuse(args, "packing torch_compile label_smoothing_factor z_loss", alone)
        if self.how.has_reference:
            known = "needs the reference's log-probabilities of all rows before training"
            if args.features.flags().get("streaming"):
                raise UserError(f"--streaming True: {name} {known}: leave it out, or give --preference simpo")
            if zero_stage(args) == 3:
                raise UserError(
                    f"--deepspeed {args.deepspeed}: {name} {known}, and ZeRO-3 holds no whole weights then; take "
                    "zero_stage2_config.json or --fsdp"
                )
        return 2

    def job(self, job: str) -> str:
        if not job.startswith("fine-tuning a checkpoint"):
            raise UserError(
                f"--preference {self.how.kind}: begins with a model that does the task already: name it with "
                "--model_name_or_path"
            )
        return job.replace("fine-tuning a checkpoint", "learning preferences")

    def loss(self, model: Any, args: Any) -> Callable:
        from features.preferences.losses import preference_loss

        return partial(preference_loss, self.how)

    def callbacks(self, trainer: Any) -> list:
        from features.preferences.reference import PreferenceCallback

        return [PreferenceCallback(trainer, self.how)]

    def rows(self, data: Any, model: Any) -> None:
        from features.preferences.reference import add_reference

        if self.how.has_reference:
            add_reference(data, model)

    def plan(self, args: Any, model: Any) -> dict[str, str | None]:
        entry, preference = self.entry, self.how
        text = f"{preference.kind}, beta {preference.beta:g}: "
        if preference.is_unpaired:
            text += f"{entry.target} is good or bad, as {entry.further['desirable']} says"
        else:
            text += f"{entry.target} is better than {entry.further['rejected']}"
        if preference.has_reference:
            text += "; log-probabilities are compared with those of the starting weights, computed once"
        else:
            text += f"; mean log-probabilities of a token, without a reference, gamma {preference.gamma:g}"
        return {"preference": text}
