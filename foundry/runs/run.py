"""A run from start to end: plan and checks before it, results and files after it; `TrainingRun` trains in between."""

import contextlib
import json
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME

from foundry.arguments.sharding import wants_fsdp
from foundry.arguments.training import T5TrainingArguments, global_batch_size, other_defaults, warmup_of
from foundry.common.errors import UserError
from foundry.common.machine import slow_bf16
from foundry.common.ranks import finish_process_group, is_first_process
from foundry.common.reports import (
    end_summary,
    first_line,
    human_bytes,
    human_count,
    human_time,
    read_json,
    run_record,
    side_file,
    start_summary,
    write_json,
)
from foundry.common.terminal import print_once
from foundry.common.whole_folders import SAVING, is_disk_full, patiently, remove, what_is_left
from foundry.model_t5 import count_parameters, dropout_of, is_adapted
from foundry.modeling.families import shape_of
from foundry.modeling.training_method import held
from foundry.modeling.weights import adapters
from foundry.report.preview import LINES, print_preview, recorded
from foundry.report.report import Report
from foundry.report.unknown import refuse_unknown
from foundry.runs.callbacks import (
    LossCurveCallback,
    MetricsFileCallback,
    PatienceCallback,
    T5ProgressCallback,
    ThroughputCallback,
    TieCallback,
    install_callbacks,
)
from foundry.runs.decision import Decision
from foundry.runs.duration import described_time
from foundry.runs.memory import Needs, check_plan, device_peak_flops, needs_of
from foundry.runs.trackers import finish_trackers, start_trackers
from foundry.trainer_t5 import T5Trainer
from foundry.training.checkpoints import (
    changed_schedule,
    check_same_features,
    give_up_later,
    old_files,
    run_of,
    this_job,
)
from foundry.training.optimizers import least_greedy_rate
from foundry.training.output_lock import lock_output_dir, unlock_output_dir
from foundry.training.rows_read import SEGMENTS, with_segment

# Rows of the plan that the first screen leaves out (--plan full, run.json), since they follow from the others or are
# nearly always the same. A row that is not named here always shows, so whatever is odd does.
DETAILS = ("tokenizer", "lengths", "sample", "chunks", "steps", "speed", "defaults")
ORDINARY = {"sharding": "none", "lost by the tokenizer": "nothing.*"}  # {row: text that says that nothing is odd}


class TrainingData(Protocol):
    """What a training reads: `Text` or `TaskData`. tokens_per_example: None if rows have different lengths."""

    tokens_per_example: float | None
    steps_per_epoch: int | None
    flops_per_sequence: Callable[..., float]
    documents: dict[str, int]
    signatures: dict[str, str]

    def report(self, steps: float) -> Report: ...
    def fingerprints(self, tokenizer: Any) -> dict[str, str]: ...
    def keep(self, folder: Path) -> None: ...


class Run:
    """A run of any script: its plan, its trackers and its results. title: such as "evaluation"."""

    def __init__(self, args: T5TrainingArguments, title: str):
        self.args, self.title, self.output_dir = args, title, Path(args.output_dir)

    def announce(self, plan: dict[str, object], *notices: str | None) -> None:
        """Prints the plan and, below it, the notices that are not empty."""
        start_summary(plan, self.title)
        for notice in filter(None, notices):
            print_once(notice)

    def write_results(self, results: dict) -> None:
        """Writes all_results.json."""
        with side_file(self.output_dir / "all_results.json") as path:
            write_json(path, results)


class TrainingRun(Run):
    """A run of T5Trainer from its plan to its results.

    decision: what the run is. data: the training data. rows: further rows of the plan.
    """

    def __init__(self, decision: Decision, trainer: T5Trainer, data: TrainingData, rows: dict):
        super().__init__(decision.args, decision.title)
        self.decision, self.trainer, self.data = decision, trainer, data
        self.checkpoint = decision.checkpoint
        self.rows = rows | {"speed": decision.speed.described}
        self.sequences = global_batch_size(self.args)
        self.read_before = trainer.rows.place_at(self.checkpoint)
        state = read_json(Path(self.checkpoint) / TRAINER_STATE_NAME) if self.checkpoint else {}
        self.step = state.get("global_step", 0)
        self.tokens_per_step = None
        if data.tokens_per_example is not None:
            self.tokens_per_step = round(self.sequences * data.tokens_per_example)

    def execute(self, next_script: str) -> dict:
        """Shows the plan, trains, evaluates and saves; returns the results. next_script: the script that the last lines
        suggest to run next, with its flags except --model_name_or_path."""
        self.start()
        try:
            trained = self.trainer.train(resume_from_checkpoint=self.checkpoint)
        except torch.OutOfMemoryError as error:
            batch, steps = self.args.per_device_train_batch_size, self.args.gradient_accumulation_steps
            raise UserError(
                f"--per_device_train_batch_size {batch}: {first_line(error)} Give half of it and "
                f"--gradient_accumulation_steps {2 * steps}, or --activation_checkpointing; "
                "--resume_from_checkpoint continues from the last checkpoint"
            ) from None
        command = f"python {next_script} --model_name_or_path {shlex.quote(self.args.output_dir)}"
        with self.trainer.preemption.finishing(self.args):
            return self.finish(trained.metrics, command)

    def start(self) -> None:
        """Installs our callbacks, prints the plan, checks memory and disk, tells the features and writes run.json.

        Unless the run resumes, the files of an earlier one are deleted once all checks have passed. `--dry_run` ends
        the process after the plan. UserError for too little disk or memory, too many unknown tokens, other
        features than before, or a schedule that does not fit.
        """
        args, data = self.args, self.data
        steps = self.trainer.rows.planned_steps(self.checkpoint)
        self._install_callbacks()
        needs = needs_of(self.trainer.model, args)
        report = data.report(self._steps_of_this_size(steps))
        plan = self.plan(steps, needs, report)
        preview = report.shown(args.dry_run)
        self.reported: dict[str, Any] = {"read": {"shown": recorded(self.trainer.processing_class, preview)}}
        self.reported |= {"unknown_share": report.unknown, "lost_by_the_tokenizer": plan["lost by the tokenizer"]}
        if needs.memory <= needs.available_memory:
            plan["time"] = described_time(self.trainer, steps - self.step, self._flops())
        self.rows_of_plan = {row: text for row, text in plan.items() if text is not None}
        if args.dry_run:  # its longest part first, and the plan last
            record = self._record() | {"arguments": self.decision.decided_flags()}
            lines = json.dumps(record, indent=1).split("\n")
            print_once("run.json would hold, flags with their defaults left out:", *lines)
            print_preview(self.trainer.processing_class, preview, None)
        shown = self.rows_of_plan if args.plan == "full" else first_screen(self.rows_of_plan)
        left_out = len(self.rows_of_plan) - len(shown)
        more = f"({left_out} more rows: --plan full, or run.json)" if left_out else None
        changed = changed_schedule(self.checkpoint, args, steps, dropout_of(self.trainer.model))
        self.announce(shown, more, *changed)
        if not args.dry_run:
            print_preview(self.trainer.processing_class, preview, LINES)
        refuse_unknown(report.unknown, self.decision.model.most_unknown)
        check_plan(args, steps, needs)
        check_same_features(self.checkpoint, args.features)
        if args.dry_run:
            print_once("--dry_run: nothing was trained or written")
            finish_process_group()
            raise SystemExit(0)
        if is_first_process():
            self.output_dir.mkdir(parents=True, exist_ok=True)
        lock_output_dir(args)
        old = old_files(args, self.checkpoint)  # before the trackers write theirs
        record = self._record() if is_first_process() else {"arguments": {}}
        # The flags go to the top level, so that trackers can filter runs by them.
        shown = record["arguments"] | record | {"model": self.trainer.model.config.to_dict()}
        del shown["arguments"]
        for name in ("read", "plan"):  # the user's own text stays here
            shown.pop(name, None)  # other ranks have no record
        start_trackers(self.trainer, shown, self.checkpoint)
        for path in old:
            remove(path, quietly=path.name == SAVING)
        if is_first_process():
            if self.checkpoint is not None:
                give_up_later(self.output_dir, self.checkpoint)
            with side_file(self.output_dir / "run.json") as path:
                write_json(path, record)
            self.data.keep(self.output_dir)

    def plan(self, steps: int, needs: Needs, report: Report) -> dict[str, str | None]:
        """The rows of the plan but for its time, None for those that do not apply. steps: of the whole run."""
        args, model, named = self.args, self.trainer.model, self.decision.model
        rows = {
            "model": described_model(model),
            "layers kept": getattr(model, "kept_layers", None),
            **self.rows,
            "resumed": self.described_place(steps),
            **report.rows,
            **report.lost(not (named.tokenizer_name or named.model_name_or_path)),
            "batch": self._described_batch(),
        }
        for feature in args.features:
            rows |= feature.plan(args, model)
        rows["sharding"] = sharding(self.trainer)
        rows["optimizer"] = f"{args.optim}, peak {args.learning_rate:g}"
        if args.defaults_of:
            rows["optimizer"] += f" (the default of {args.defaults_of}: docs/defaults.md)"
        rows["schedule"] = described_schedule(args, steps)
        if other := other_defaults(args):
            rows["defaults"] = f"other than transformers' (theirs in brackets): {other}"
        rows["device"] = described_device(args)
        rows["frozen weights"] = self.decision.speed.weight_formats
        parts = ", ".join(["weights", "gradients", "optimizer", *held(args.features, args)])
        of_step = self.decision.speed.memory or "plus activations, which --dry_run counts"
        rows["memory"] = (
            f"{human_bytes(needs.memory)} ({parts}), {of_step}; {human_bytes(needs.available_memory)} available"
        )
        rows["disk"] = human_bytes(needs.disk)
        if not args.save_total_limit and args.save_strategy != "no":
            rows["disk"] += " and all later checkpoints"
        rows["disk"] += f" in {self.output_dir}; {human_bytes(needs.available_disk)} free"
        return rows

    def _described_batch(self) -> str:
        args = self.args
        steps, processes = args.gradient_accumulation_steps, args.world_size
        parts = f"{args.train_batch_size} x {steps} accumulated x {processes} processes"
        text = f"{self.sequences} sequences per step ({parts})"
        if args.learning_rate_batch:
            text += f"; the learning rate is for {args.learning_rate_batch:,}"
        return text

    def _steps_of_this_size(self, steps: int) -> float:
        """In how many steps of the batch that the run has now all rows of the run would be read, those too that it read
        before in other batches."""
        to_come = max(0, steps - self.step)
        before = self.read_before.total / self.sequences
        return to_come + (round(before) if before.is_integer() else before)

    def described_place(self, steps: int) -> str | None:
        """For the plan of a resumed run: what it has read, and what is left of it."""
        if self.checkpoint is None:
            return None
        name, read = Path(self.checkpoint).name, self.read_before
        left = max(0, steps - self.step)
        of_epoch = ""
        if self.trainer.rows.counts_rows:
            of_epoch = f", epoch {read.epoch + 1} has {self.trainer.rows.rows_of_epoch - read.of_epoch:,} rows left"
        if not left:
            return (
                f"nothing is left: {name} has made {self.step:,} steps of {steps:,}, {read.total:,} rows. Its "
                "model is evaluated and saved again; to train on, give more --max_steps or --num_train_epochs"
            )
        return f"{name} has read {read.total:,} rows in {self.step:,} steps; {left:,} steps are left{of_epoch}"

    def _install_callbacks(self) -> None:
        args, ranks = self.args, self.args.world_size
        peak = device_peak_flops(args.device, args.bf16)
        peak = peak and peak * ranks
        callbacks = [ThroughputCallback(self.sequences, self.tokens_per_step, self._flops(), peak, ranks)]
        if is_first_process():
            further = [name for callback in self.trainer.feature_callbacks for name in callback.curves]
            callbacks += [MetricsFileCallback(self.output_dir), LossCurveCallback(self.output_dir, further)]
            callbacks.append(T5ProgressCallback())
        if args.early_stopping_patience is not None:
            callbacks.append(PatienceCallback(args.early_stopping_patience))
        callbacks.append(TieCallback())
        install_callbacks(self.trainer, callbacks)
        if wants_fsdp(args) and not self.trainer.is_fsdp_enabled:
            print_once(
                "FSDP has no effect here: accelerate shards on GPUs only. Every process holds "
                "the whole model (plain data parallelism)"
            )

    def _flops(self) -> float | Callable[[int, int], float]:
        """FLOPs of a training row: a number or, for tasks, a function of its lengths."""
        flops = partial(self._flops_per_sequence, self.trainer.model.config)
        return flops() if self.tokens_per_step else flops

    def _flops_per_sequence(self, *args) -> float:
        """FLOPs of a training step for one sequence; a frozen model saves the third of them for its gradients."""
        flops = self.data.flops_per_sequence(*args)
        return flops * 2 / 3 if is_adapted(self.trainer.model) else flops

    def _record(self) -> dict:
        """The content of run.json."""
        fingerprints = self.data.fingerprints(self.trainer.processing_class)
        flags, documents = self.decision.flags(), self.data.documents
        record = run_record(flags, self.trainer.model, self.tokens_per_step, fingerprints, documents)
        record["dropout"] = dropout_of(self.trainer.model)
        record["sequences_per_step"], record["job"] = self.sequences, this_job()
        record["features"] = self.args.features.decisive()
        record[SEGMENTS] = with_segment(run_of(self.checkpoint), self.step, self.sequences)
        for feature in self.args.features:
            record |= feature.record()
        return record | {"plan": self.rows_of_plan} | self.reported

    def finish(self, train_metrics: dict, next_command: str) -> dict:
        """Saves the model, evaluates, writes all_results.json, uploads and prints the end summary; returns the results.
        If an upload fails, SystemExit with exit code 1."""
        trainer, results = self.trainer, dict(train_metrics)
        if self.tokens_per_step:
            results["train_tokens"] = round(trainer.rows.read.total * self.tokens_per_step / self.sequences)
        self._save_model()
        if trainer.eval_dataset is not None and self.args.eval_strategy != "no":
            results |= _evaluated(trainer) | self.data.signatures
        tracked = finish_trackers(trainer)
        failed = uploaded = None
        if is_first_process():
            self.write_results(results)
            uploads = trainer.checkpoints.uploads
            try:
                uploaded = uploads.finish(trainer.model) if uploads else None
            except ValueError as error:
                failed = error
            written = ("all_results.json", "metrics.jsonl", "loss.png", "samples.md", "run.json")
            files = ", ".join(name for name in written if (self.output_dir / name).is_file())
            rows = shown_numbers({name: value for name, value in results.items() if name.startswith("eval_")})
            since = f" since {Path(self.checkpoint).name}" if self.checkpoint else ""
            rows["training took"] = human_time(train_metrics["train_runtime"]) + since
            rows["written to"] = f"{self.output_dir}: the model, {files}"
            rows |= tracked | {"uploaded to": uploaded, "next": next_command}
            end_summary(rows)
        finish_process_group()
        unlock_output_dir(self.args)
        if failed:
            raise SystemExit(str(failed))
        return results

    def _save_model(self) -> None:
        """Saves the finished model. If the disk fails, SystemExit with one line that names the last checkpoint."""
        aside = self.output_dir / SAVING / "model"
        try:
            self.trainer.save_model(str(aside))
            if self.args.should_save:
                self.trainer.state.save_to_json(str(aside / TRAINER_STATE_NAME))
                self._put_in_place(aside)
        except Exception as error:
            if not (is_full := is_disk_full(error)) and not isinstance(error, OSError):
                raise
            with contextlib.suppress(OSError):
                remove(aside.parent, quietly=True)  # an incomplete file would be taken for the model
            what = "no room for the finished model" if is_full else "the finished model was not saved"
            raise SystemExit(
                f"{what} in {self.output_dir} ({first_line(error)}); {what_is_left(self.output_dir)}"
            ) from None

    def _put_in_place(self, aside: Path) -> None:
        """Moves the files of the finished model into --output_dir, in place of what has their name, links too, and of
        an earlier model's files, beside which this one would not be found."""
        new = {path.name: path for path in aside.iterdir()}
        for name, path in new.items():
            if path.is_dir():  # no rename replaces a folder that is not empty
                remove(self.output_dir / name, quietly=True)
            patiently(partial(path.replace, self.output_dir / name))
        of_models = ("*model*.safetensors*", "config.json", "modules.json", *(one.config for one in adapters()))
        for pattern in of_models:
            for path in self.output_dir.glob(pattern):
                if path.name not in new:
                    path.unlink()
        remove(aside.parent, quietly=True)


def first_screen(plan: dict[str, str]) -> dict[str, str]:
    """The rows of a plan without details: {"model": "...", "speed": "..."} -> {"model": "..."}."""
    shown = {}
    for row, text in plan.items():
        is_ordinary = row in ORDINARY and re.fullmatch(ORDINARY[row], text)
        if row not in DETAILS and not is_ordinary:
            shown[row] = text
    return shown


def described_device(args: T5TrainingArguments) -> str:
    """ "cpu, float32, 2 threads", "NVIDIA H100, bfloat16 mixed precision"."""
    precision = "bfloat16 mixed precision" if args.bf16 else "float32"
    text = f"{args.assume_gpu or args.device}, {precision}"
    if args.device.type == "cpu" and not args.assume_gpu:
        text += f", {torch.get_num_threads()} threads"
        if slow := slow_bf16(args.bf16, "cpu"):
            text += f"; {slow}"
    return text


def described_schedule(args: T5TrainingArguments, steps: int) -> str:
    """ "cosine over 1,000 steps, 100 of them warm-up"; of the greedy one the bound too."""
    warmup = warmup_of(vars(args), steps)
    share = f"{warmup:,} of them" if warmup else "no"
    text = f"{args.lr_scheduler_type} over {steps:,} steps, {share} warm-up"
    if args.lr_scheduler_type == "greedy":
        text += f", the rate never below {least_greedy_rate(args):g}"
    return text


def shown_numbers(results: dict) -> dict[str, str]:
    """Numbers as text, without times: {"eval_f1": 0.5, "eval_runtime": 2.0} -> {"f1": "0.5000"}."""
    shown = {}
    for name, value in results.items():
        if isinstance(value, str) or name.endswith(("runtime", "per_second", "preparation_time")):
            continue
        text = f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
        shown[name.removeprefix("eval_").replace("_", " ")] = text
    return shown


def described_model(model: PreTrainedModel) -> str:
    """ "1.9M parameters (t5, d_model 128, 2 + 2 layers), dropout 0"; if adapted "..., of which 98.3k are trained". Of
    an encoder alone "2 layers"."""
    shape = shape_of(model.config)
    layers = shape.described if model.config.is_encoder_decoder else shape.described_encoder
    text = f"{human_count(count_parameters(model))} parameters ({model.config.model_type}, {layers})"
    text += f", dropout {dropout_of(model):g}"
    if is_adapted(model):
        text += f", of which {human_count(count_parameters(model, True))} are trained"
    return text


def sharding(trainer: T5Trainer) -> str:
    """What is split over the processes: "none, 2 whole copies", "ZeRO-2 over 8 processes", "FSDP2 over 8 processes"."""
    processes = trainer.args.world_size
    if trainer.is_deepspeed_enabled:
        return f"ZeRO-{trainer.accelerator.state.deepspeed_plugin.zero_stage} over {processes} processes"
    if trainer.is_fsdp_enabled:
        return f"FSDP2 over {processes} processes"
    return "none" if processes == 1 else f"none, {processes} whole copies of the model"


def _evaluated(trainer: T5Trainer) -> dict:
    """The metrics of the final weights: of the last step, or of the best checkpoint if it was loaded. Evaluates only if
    that step has not been evaluated. The best checkpoint's metrics are logged again, so that they are the last ones."""
    state = trainer.state
    best = trainer.args.load_best_model_at_end and state.best_model_checkpoint
    step = int(Path(best).name.split("-")[1]) if best else state.global_step
    lines = [line for line in state.log_history if "eval_loss" in line and line["step"] == step]
    if not lines:
        return trainer.evaluate()
    known = {name: value for name, value in lines[-1].items() if name not in ("step", "epoch")}
    if step != state.global_step:
        print_once(f"the best checkpoint, {Path(best).name}, is the model that is kept; its evaluation again:")
        trainer.log(dict(known))
    return known
