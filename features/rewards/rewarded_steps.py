"""What each step does before its loss: answers are drawn and rewarded. And what the log and samples.md show of it.

Legend of shapes: B sources of a micro-batch, K answers to each, T tokens of the longest answer.
"""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel, TrainerState, TrainingArguments

from constants import IGNORE_INDEX
from features.rewards.methods import SUMS, Method
from foundry.common.terminal import print_once
from foundry.model_t5 import is_adapted, weights_digest
from foundry.report.lengths import percent
from foundry.runs.samples import SampleSections
from foundry.training.drawn_answers import ROW, SOURCES, draw_answers
from foundry.training.flow import SumsCallback
from tasks.examples import decode_texts
from tasks.row_texts import reference_texts, source_text

if TYPE_CHECKING:
    from features.rewards import RewardLearning

SHOWN = 4  # questions in a section of samples.md
MEASURED = range(2, 7)  # steps of this process whose time is measured; the first one warms up
_CHARACTERS = 300  # of a text in samples.md
COLUMNS = ["question", "best answer", "best reward", "worst answer", "worst reward", "target"]


class Reference:
    """The starting weights. With LoRA they are the model's own without the matrices, else a frozen copy."""

    def __init__(self, model: PreTrainedModel, device: torch.device):
        self.contents, self.model, self.trained = weights_digest(model), model, model
        self.shares_weights = is_adapted(model)
        if not self.shares_weights:
            self.model = copy.deepcopy(model).requires_grad_(False).to(device)

    @contextmanager
    def ready(self) -> Iterator[PreTrainedModel]:
        """The model, within the block."""
        layers = []
        if not self.shares_weights:
            self.model.to(self.trained.dtype)  # which DeepSpeed casts to bfloat16 after this copy was made
        else:
            from peft.tuners.tuners_utils import BaseTunerLayer

            layers = [layer for layer in self.model.modules() if isinstance(layer, BaseTunerLayer)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield self.model
        finally:
            for layer in layers:
                layer.enable_adapters(True)


class RewardCallback(SumsCallback):
    """Draws and rewards the answers of each step, and adds what SUMS tell to the training logs.

    sums: SUMS. Checkpoints hold the answers too that further updates will see.
    """

    saved_as = "rewards"
    curves = ("reward", "answer_length")

    def __init__(self, trainer: Any, how: "RewardLearning"):
        self.how, self.method = how, how.method
        # Before the model gets a hook, which no copy could have.
        self.reference = Reference(trainer.model, trainer.args.device) if self.method.kl else None
        super().__init__(trainer, len(SUMS))
        self.kept: list[dict] = []  # what was added to the micro-batches of the last step that drew answers
        self.shown: list[list] = []  # rows of samples.md
        self.steps, self.seconds, self.tokens = 0, np.zeros(2), np.zeros(2)  # of drawing answers, and of the rest

    # ------------------------------------------------------------ a step
    def change_batches(self, batches: list[dict[str, torch.Tensor]]) -> None:
        """Adds answers and their rewards to the micro-batches of this rank, and the step's target tokens."""
        self.began, step = time.perf_counter(), self.trainer.state.global_step
        if step % self.method.updates and len(self.kept) == len(batches):
            for batch, kept in zip(batches, self.kept, strict=True):
                batch.clear()
                batch |= kept
        elif batches:
            self._add_answers(batches)
            self.kept = [dict(batch) for batch in batches] if self.method.updates > 1 else []
        self.written = time.perf_counter()
        total = torch.zeros(2, device=self.trainer.args.device)
        for batch in batches:
            counted = batch["labels"].ne(IGNORE_INDEX)
            total += torch.stack([counted.any(1).sum(), counted.sum()])
        self.rows, tokens = self.trainer.accelerator.reduce(total, "sum")
        for batch in batches:
            batch["target_tokens"] = tokens

    def divisor(self, _batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """The number of rows in all micro-batches and ranks of the step."""
        return self.rows

    def _add_answers(self, batches: list[dict[str, torch.Tensor]]) -> None:
        method, greedy = self.method, self.method.kind == "scst"
        drawing = method.longest, method.samples, method.temperature, greedy
        answers = draw_answers(self.trainer, batches, *drawing)
        self.shown = []
        for batch, drawn in zip(batches, answers, strict=True):
            given = self._rewards(drawn, batch.pop(ROW).tolist()).to(drawn.device)
            batch["answers"], batch["rewards"] = drawn[:, : method.samples], given[:, : method.samples]
            if greedy:
                batch["greedy"] = given[:, -1]
            if self.reference is not None:
                with self.reference.ready() as starting:
                    batch["reference"] = self._read(starting, batch)
            if method.updates > 1:
                batch["drawn_under"] = self._read(self.trainer.model, batch)
            if self.steps + 1 in MEASURED:
                self.tokens += [int(ids.ne(IGNORE_INDEX).sum()) for ids in (drawn, batch["answers"])]
        self.shown = sorted(self.shown, key=lambda row: -float(row[2]))[:SHOWN]

    def _rewards(self, answers: torch.Tensor, numbers: list[int]) -> torch.Tensor:
        """[B, K] rewards of answers [B, K, T] to these rows; keeps some of both for samples.md."""
        how, count = self.how, answers.shape[1]
        texts = decode_texts(how.entry, how.tokenizer, answers.flatten(0, 1).cpu().numpy())
        rows = [how.train_rows[number] for number in numbers]
        rewards = how.scorer(texts, [row for row in rows for _ in range(count)]).reshape(-1, count)
        for place in np.argsort(-rewards.max(1), kind="stable")[:SHOWN].tolist():
            best, worst = int(rewards[place].argmax()), int(rewards[place].argmin())
            shown = [source_text(how.entry, rows[place])]
            for one in (best, worst):
                shown += [texts[place * count + one], f"{rewards[place, one]:.4g}"]
            shown.append(reference_texts("", how.entry, rows[place])[0])
            self.shown.append([" ".join(text.split())[:_CHARACTERS] for text in shown])
        return torch.from_numpy(rewards).float()

    @torch.no_grad()
    def _read(self, model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Log-probabilities [B, K, T] of a micro-batch's answers under a model, without dropout."""
        was_training, names = model.training, (*SOURCES, "labels", "answers")
        model.eval()
        with self.trainer.accelerator.autocast():  # accelerate wraps the trained model alone
            found = model(**{name: batch[name] for name in names})["log_probabilities"]
        model.train(was_training)
        return found

    # ------------------------------------------------------------ what is seen
    def on_step_end(self, args: TrainingArguments, *_, **__) -> None:
        self.steps += 1
        if self.steps not in MEASURED:
            return
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds += np.array([self.written - self.began, time.perf_counter() - self.written])
        if self.steps == MEASURED[-1]:
            writing, reading = (self.tokens * args.world_size / self.seconds).round().astype(int).tolist()
            print_once(
                f"rewards: {percent(float(self.seconds[0] / self.seconds.sum()))} of a step's time goes into drawing "
                f"and rewarding answers; {writing:,} tokens are drawn and {reading:,} trained on in a second of each"
            )

    def on_log(self, _args: TrainingArguments, _state: TrainerState, *_, logs: dict, **__) -> None:
        if "loss" in logs:
            logs |= reward_metrics(self.method, self.of_all_ranks())

    # ------------------------------------------------------------ checkpoints
    def texts(self) -> dict:
        kept = [{name: values.tolist() for name, values in batch.items()} for batch in self.kept]
        return {"answers": {"processes": self.trainer.args.world_size, "kept": kept, "shown": self.shown}}

    def restore(self, state: dict) -> None:
        super().restore(state)
        if not (answers := state.get("answers")):  # an upload leaves them out
            if self.method.updates > 1:
                print_once("the checkpoint has no drawn answers (uploads leave them out): they are drawn anew")
            return
        device, self.shown = self.trainer.args.device, answers["shown"]
        # Of another number of processes, the rows of a step are not divided as before: answers are drawn anew.
        kept = answers["kept"] if answers["processes"] == self.trainer.args.world_size else []
        self.kept = [{name: torch.tensor(v, device=device) for name, v in batch.items()} for batch in kept]


def reward_metrics(method: Method, sums: torch.Tensor) -> dict[str, float]:
    """Metrics, which are means over rows, from SUMS: reward, its spread (deviation within a group), the share of groups
    without spread, tokens of an answer, KL(p, p0) of an answer in nats, and the supervised loss of a token."""
    values = dict(zip(SUMS, sums.double().tolist(), strict=True))
    rows = max(1.0, values["rows"])
    metrics = {"reward": values["reward"], "reward_spread": values["spread"], "equal_rewards": values["equal"]}
    metrics["answer_length"] = values["length"]
    if method.kl:
        metrics["reward_kl_nats"] = values["log_ratio"]
    metrics = {name: value / rows for name, value in metrics.items()}
    if method.supervised:
        metrics["supervised_loss"] = values["supervised_nats"] / max(1.0, values["supervised_tokens"])
    return metrics


class RewardSamples(SampleSections):
    """After each evaluation adds to samples.md the questions of the last step that have the highest rewards, with their
    best and worst answers: a reward that is being cheated shows there first."""

    def __init__(self, callback: RewardCallback, *others: Any):
        super().__init__(*others)
        self.callback = callback

    def on_evaluate(self, _args: TrainingArguments, state: TrainerState, *_, **__) -> None:
        if state.is_world_process_zero and self.callback.shown:
            self.add(state.global_step, COLUMNS, self.callback.shown)
