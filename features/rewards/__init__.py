"""Rewards: fine-tuning learns from answers that the model draws, by how good a metric or a function says they are.

    python fine_tune_t5.py --reward rougeL --train_file pairs.jsonl --model_name_or_path out/fine_tune_t5

scores.py has the rewards, methods.py the losses, rewarded_steps.py a step, its log and samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from constants import TASK_RECORD
from foundry.common.errors import UserError
from foundry.common.flags import Flags, Rules, option, refuse
from foundry.features import Feature, TaskFeature
from foundry.modeling.training_method import TrainingMethod

METHODS = ("scst", "rloo", "grpo")
_HOW = "reward_method reward_samples reward_temperature reward_kl reward_unscaled reward_updates reward_clip"
_TRIED = 8  # training rows whose targets are rewarded before training, so that a wrong function shows


def _of_grpo(names: str, what: str) -> tuple:
    return (names, lambda flags: flags.reward and flags.reward_method != "grpo", what)


@dataclass(kw_only=True)
class RewardedTask(TaskFeature):
    """An entry may have a function `reward`."""

    fields: ClassVar = {"reward": "function"}


@dataclass
class Rewards(Feature):
    """The flags of rewards."""

    _argument_group_name = "rewards"
    _usual = ""
    switch: ClassVar = "reward"
    rules: ClassVar[Rules] = (
        (
            f"{_HOW} supervised_share",
            lambda flags: not flags.reward,
            "says how to learn from a reward: name it with --reward",
        ),
        _of_grpo("reward_unscaled", "is for --reward_method grpo, the one that divides by deviation and length"),
        _of_grpo(
            "reward_updates reward_clip", "only --reward_method grpo may learn twice from an answer: leave it out"
        ),
        (
            "reward_clip",
            lambda flags: flags.reward_updates == 1,
            "has an effect only from the second update on: add --reward_updates 2",
        ),
        (
            "reward",
            lambda flags: flags.reward and flags.reward_samples < 2 and flags.reward_method != "scst",
            "--reward_method {reward_method} compares the answers to a source, and --reward_samples {reward_samples} "
            "draws one: give at least 2",
        ),
        ("reward", lambda flags: flags.get("teacher"), "not with --teacher, whose loss it replaces: leave one out"),
    )
    decisive: ClassVar = ("reward", "supervised_share", *_HOW.split())

    reward: str | None = option(
        None, "Learn from rewards of drawn answers: a metric, metrics with weights (rougeL:0.8,length:0.2), or entry."
    )
    reward_method: str = option("rloo", "What a reward is compared with.", choices=METHODS)
    reward_samples: int = option(4, "Answers drawn to each source of a step.", at_least=1)
    reward_temperature: float = option(1.0, "Temperature of drawing and of the loss.", at_least=0.01, at_most=100)
    reward_kl: float = option(0.0, "Factor of the distance from the starting weights.", at_least=0)
    reward_unscaled: bool = option(False, "grpo without division by deviation and by the answer's length.")
    reward_updates: int = option(1, "grpo: updates on the answers of a step.", at_least=1)
    reward_clip: float = option(
        0.2, "grpo: largest change of a token's probability from the second update on.", above=0
    )
    supervised_share: float = option(0.0, "Share of the ordinary loss on the targets.", at_least=0, below=1)

    def of_run(self) -> "RewardLearning":
        return RewardLearning(self)


class RewardLearning(TrainingMethod):
    """Learns from rewards of the model's own answers.

    scorer: the reward, from `take_tasks` on. From `rows` on: entry, tokenizer and train_rows of the task, the method,
    and what the plan says of sources that repeat. reference: the starting weights, from `callbacks` on.
    """

    def __init__(self, flags: Rewards):
        self.flags = flags
        self.scorer: Any = None
        self.entry: Any = None
        self.tokenizer: Any = None
        self.train_rows: Any = None
        self.method: Any = None
        self.reference: Any = None
        self.reference_bytes, self.repeated = 0, ""

    def is_on(self) -> bool:
        return self.flags.is_on()

    @property
    def texts(self) -> int:
        """The answers to a source that a forward pass reads."""
        return self.flags.reward_samples + (self.flags.supervised_share > 0)

    def decide(self, flags: Flags) -> dict[str, Any]:
        """The logits of all answers never exist whole. UserError for a model that our pre-training wrote."""
        from foundry.modeling.loss import CHUNK

        folder = Path(flags.model_name_or_path or "")
        is_ours = any((place / "run.json").is_file() for place in (folder, folder.parent))
        if flags.model_name_or_path and is_ours and not (folder / TASK_RECORD).is_file():
            raise UserError(
                f"--model_name_or_path {folder}: was never fine-tuned, and answers that are all wrong teach nothing; "
                f"fine-tune it first, without --reward {self.flags.reward}"
            )
        return {} if "loss_chunk_size" in flags.given else {"loss_chunk_size": CHUNK}

    def take_tasks(self, tasks: Any, args: Any) -> int | None:
        if not self.is_on():
            return None
        from features.rewards.scores import Reward
        from foundry.arguments.sharding import wants_fsdp, zero_stage

        name = f"--reward {self.flags.reward}"
        if len(tasks) > 1 or tasks.args.span_corruption_file:
            raise UserError(f"{name}: needs one task, and the flags mix several. Name one alone")
        (task,) = tasks
        if "preference" in task.entry.further:
            raise UserError(f"--preference and {name} exclude each other: each is a loss of its own")
        self.scorer = Reward(self.flags.reward, task.entry)
        alone = f"not with {name}, whose answers are of any length: leave it out"
        refuse(args, "packing torch_compile label_smoothing_factor z_loss", alone)
        if args.features.flags().get("streaming"):
            raise UserError(f"--streaming True: {name} compares with the rows' own texts, and a stream keeps none")
        if zero_stage(args) == 3 or wants_fsdp(args):
            flag = f"--deepspeed {args.deepspeed}" if args.deepspeed else "--fsdp"
            raise UserError(
                f"{flag}: {name} draws answers, which needs whole weights on each GPU; take zero_stage2_config.json"
            )
        return self.texts

    def job(self, job: str) -> str:
        if not job.startswith("fine-tuning a checkpoint"):
            raise UserError(
                f"--reward {self.flags.reward}: begins with a model that does the task already: name it with "
                "--model_name_or_path"
            )
        return job.replace("fine-tuning a checkpoint", "learning from rewards")

    def check(self, args: Any, config: Any, tokenizer: Any, packed: object = None) -> None:
        from foundry.modeling.families import shape_of

        shape = shape_of(config)
        shares_weights = args.features.flags().get("lora_rank")
        has_copy = self.flags.reward_kl and not shares_weights
        self.reference_bytes = 4 * (shape.layer_weights + shape.embedding_weights) if has_copy else 0

    def rows(self, data: Any, model: Any) -> None:
        from features.rewards.methods import Method
        from features.rewards.scores import repeated_sources, with_all_references
        from foundry.training.drawn_answers import with_row_numbers
        from tasks.examples import answer_length, class_label_ids, references_of

        (task,) = data.tasks
        task.data["train"] = with_row_numbers(task.data["train"])
        self.entry, self.tokenizer = task.entry, data.tokenizer
        self.train_rows = with_all_references(task.entry, task.rows["train"])
        self.repeated = repeated_sources(task.entry, task.rows["train"])
        longest = answer_length(task.entry, class_label_ids(task.entry, data.tokenizer))
        self.method = Method(
            self.flags.reward_method,
            self.flags.reward_samples,
            longest,
            self.flags.reward_temperature,
            self.flags.reward_kl,
            self.flags.reward_unscaled,
            self.flags.reward_updates,
            self.flags.reward_clip,
            self.flags.supervised_share,
        )
        rows = self.train_rows[:_TRIED]
        targets = [one if isinstance(one, str) else one[0] for one in references_of(self.entry, rows)[0]]
        try:
            self.scorer(targets, rows)
        except UserError:
            raise
        except Exception as error:  # whatever a user's function raises
            raise UserError(
                f"--reward {self.flags.reward}: fails on the first rows. {type(error).__name__}: {error}"
            ) from error

    def loss(self, model: Any, args: Any) -> Callable:
        from features.rewards.methods import reward_loss

        return partial(reward_loss, self.method)

    def callbacks(self, trainer: Any) -> list:
        from features.rewards.rewarded_steps import RewardCallback, RewardSamples
        from foundry.runs.trackers import show_table

        callback = RewardCallback(trainer, self)
        self.reference = callback.reference
        return [callback, RewardSamples(callback, trainer.args.output_dir, partial(show_table, trainer))]

    def memory(self, args: Any) -> dict[str, int]:
        return {"reference": self.reference_bytes}

    def plan(self, args: Any, model: Any) -> dict[str, str | None]:
        from foundry.arguments.training import global_batch_size

        method, sequences = self.method, global_batch_size(args)
        compared = {
            "scst": "the greedy answer's",
            "rloo": "the mean of the other answers'",
            "grpo": "the mean of the answers'" + (", unscaled" if method.unscaled else ", divided by their deviation"),
        }
        drawn = f"{method.samples} answers" + (" and the greedy one" if method.kind == "scst" else "")
        count = sequences * (method.samples + (method.kind == "scst"))
        every = f" every {method.updates} steps" if method.updates > 1 else " a step"
        text = (
            f"{self.scorer.described}, {method.kind}: less {compared[method.kind]}; {drawn} to each source, {count:,}"
        )
        text += f"{every}, of at most {method.longest} tokens, at temperature {method.temperature:g}"
        if method.kl:
            text += f"; {method.kl:g} of the distance from the starting weights"
            text += ", the base without LoRA's matrices" if self.reference.shares_weights else ""
        if method.supervised:
            text += f"; {method.supervised:g} of the loss is the ordinary one"
        return {"reward": text + self.repeated}

    def record(self) -> dict[str, Any]:
        return {"reference": {"weights": self.reference.contents}} if self.reference else {}

    def check_resumed(self, checkpoint: str, run: dict) -> None:
        before, now = (run.get("reference") or {}).get("weights"), self.reference and self.reference.contents
        if before != now:
            raise UserError(
                f"--resume_from_checkpoint {checkpoint}: the starting weights of --reward_kl: {before} in its run, "
                f"{now} now: name the same --model_name_or_path"
            )
