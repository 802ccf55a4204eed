"""`Seq2SeqTrainer` made exact for T5: loss over the global batch, evaluation that counts every token and example once.

An optimizer step, in its order:

1. `get_batch_samples` takes the step's micro-batches and sends them to the device. Their rows are in an order that is
   the same for any number of ranks (training/row_order.py). It counts the target tokens of all of them on all ranks,
   for the loss, and of its own, for the log. A feature may add answers, or divide by its own count (`begin_step`).
2. Trainer's `training_step` calls the model for each micro-batch. Its forward pass ends in the loss
   (modeling/loss.py): a sum over target tokens, divided by their number in the whole step. Backward pass.
3. Trainer clips the gradient; `_get_grad_norm` ends the run if it is not finite (training/broken_steps.py).
4. Update (training/optimizers.py), then the schedule (`create_scheduler`).
5. `on_step_end` of the callbacks: `FlowCallback` says what is due (log, evaluation, save, end); runs/callbacks.py
   measures speed and moves the progress bar; training/preemption.py asks whether a signal or time limit ends the run.
6. Trainer does what is due: `log`, `evaluate` (training/evaluation.py), which scores each task by its own rule, and
   `_save_checkpoint` (training/saving.py), which writes a checkpoint that is whole or absent.

Legend of shapes: B batch, T target length, C class labels.
"""

import contextlib
import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import DynamoBackend, send_to_device
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset
from transformers import (
    DefaultFlowCallback,
    PreTrainedModel,
    Seq2SeqTrainer,
    TrainerControl,
    TrainerState,
)
from transformers.integrations.deepspeed import set_hf_deepspeed_config
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, SaveStrategy, TrainOutput

from constants import PREEMPTED_EXIT_CODE
from foundry.arguments.training import T5TrainingArguments, best_metric_key
from foundry.common.errors import StreamError, UserError
from foundry.common.ranks import finish_process_group
from foundry.common.terminal import print_once
from foundry.model_t5 import use_one_embedding_module
from foundry.modeling.ensemble import members
from foundry.modeling.families import family_of
from foundry.modeling.found_answers import AnswerFinder
from foundry.modeling.generation_settings import deciding_settings, described_search
from foundry.modeling.layers import sum_bias_by_diagonals, use_bf16_residual
from foundry.modeling.loss import LossTerm, compute_loss_in_forward, token_metrics
from foundry.modeling.recomputed import recompute_cheap
from foundry.modeling.training_method import losses_of
from foundry.publishing.uploader import Uploader
from foundry.training.batching import OneShapeCollator, PackingCollator
from foundry.training.broken_steps import end_at_norm, end_if_broken
from foundry.training.evaluation import (
    EvaluationTask,
    evaluation_loader,
    generate_answers,
    in_row_order,
    preserve_rng_state,
    score_batch,
)
from foundry.training.flow import EpochCallback, LossTermsCallback, ResumeCallback
from foundry.training.optimizers import build_scheduler, optimizer_class_and_kwargs
from foundry.training.preemption import EvaluationStopped, PreemptionCallback, WatchCallback, undone_if_stopped
from foundry.training.row_order import TrainingRows
from foundry.training.run_callback import RunCallback, callbacks_of
from foundry.training.saving import CheckpointWriter, complete_model, load_optimizer, load_weights, named_weights


def set_up_step(
    model: PreTrainedModel,
    args: T5TrainingArguments,
    terms: Sequence[LossTerm] = (),
    loss_override: Callable | None = None,
) -> None:
    """Applies the options of the training step to the model: loss, compilation, residual stream, and what its layers
    keep for the backward pass. terms: are mixed into the loss of tokens, which `loss_override` replaces."""
    sum_bias_by_diagonals(model)
    if args.recompute and not args.torch_compile and family_of(model.config).can_recompute:
        recompute_cheap(model)
    if args.bf16_residual:
        for one in members(model):
            use_bf16_residual(one)
    options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode} if args.torch_compile else None
    loss_options = args.label_smoothing_factor, args.z_loss, args.loss_chunk_size
    compute_loss_in_forward(model, *loss_options, options, terms, loss_override)


class FlowCallback(DefaultFlowCallback):
    """Trainer's DefaultFlowCallback, except that the log, evaluation and save at the end of an epoch are part of the
    epoch's last step.

    Trainer makes them after that step. A checkpoint that the step saves would then lack the epoch's log and evaluation,
    and a run that resumes from it would not make up for them. Trainer makes them also when a signal ends the run within
    an epoch: the run would evaluate first, though it may be killed within seconds.
    """

    def __init__(self, trainer: "T5Trainer"):
        self.trainer = trainer
        self.has_ended = False

    def on_step_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        super().on_step_end(args, state, control, **kwargs)
        is_last_of_epoch = self.trainer.rows.stream is None and state.epoch == int(state.epoch)
        self.has_ended = is_last_of_epoch or state.global_step >= state.max_steps
        if self.has_ended:
            super().on_epoch_end(args, state, control, **kwargs)

    def on_epoch_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if not self.has_ended and self.trainer.preemption.reason is None:  # left early, such as by early stopping
            super().on_epoch_end(args, state, control, **kwargs)

    def on_log(self, _args, state: TrainerState, *_, logs: dict, **__) -> None:
        """Makes the closing `train_loss` the mean over the whole run, also if it was resumed."""
        if "train_loss" in logs and state.global_step:
            logs["train_loss"] = state.log_history[-1]["train_loss"] = self.trainer.mean_loss()


class T5Trainer(Seq2SeqTrainer):
    """Seq2SeqTrainer with T5's loss, optimizers, schedules, data order and evaluation.

    The model's class is changed so that its forward pass computes the loss (modeling/loss.py); `--torch_compile`
    compiles that pass as one graph, without the wrappers around it.

    args: completed by `check_training`. compute_metrics: a function that gets the predictions of `prediction_step`;
    None: loss and token accuracy. class_label_ids: [C, T] token ids of the class labels (EOS included, padded with
    -100), which are scored unless `--predict_with_generate` asks for texts. evaluation_tasks: {name in `eval_dataset`:
    EvaluationTask}, if the data sets are scored in different ways. summarise: function from the metrics of a whole
    evaluation to further ones, all with the prefix "eval_". train_collator: a collator for training alone.
    task_record: the content of task.json, which is saved with every model.
    """

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        args: T5TrainingArguments,
        compute_metrics: Callable | None = None,
        class_label_ids: torch.Tensor | None = None,
        evaluation_tasks: dict[str, EvaluationTask] | None = None,
        summarise: Callable[[dict], dict] | None = None,
        train_collator: OneShapeCollator | PackingCollator | None = None,
        task_record: dict | None = None,
        **kwargs,
    ):
        if evaluation_tasks:  # a single data set is scored like the first task
            first = next(iter(evaluation_tasks.values()))
            class_label_ids = first.class_label_ids
            compute_metrics = first.compute_metrics
        uploader = args.features.first(Uploader)
        self.checkpoints = CheckpointWriter(self, uploader.uploads(args) if uploader else None)
        self.rows = TrainingRows(self, train_collator)
        self.feature_callbacks: list[RunCallback] = []
        self.resumed_from: str | None = None  # the checkpoint from which this training resumed
        self.place_before: dict | None = None  # before the step, the place in a stream
        self.losses_before: torch.Tensor | None = None  # before the step, the sum of losses since the last log
        if args.push_to_hub:  # Trainer would upload a checkpoint while it is being written
            args = args.replaced(push_to_hub=False)
        if args.deepspeed:
            set_hf_deepspeed_config(args.hf_deepspeed_config)
        use_one_embedding_module(model)
        terms, loss_override = losses_of(args.features, model, args)
        set_up_step(model, args, terms, loss_override)
        super().__init__(model=model, args=args, compute_metrics=compute_metrics or _loss_and_accuracy, **kwargs)
        self.label_smoother = None  # our loss smooths labels itself
        if self.is_fsdp_enabled:
            family_of(self.model.config).fit_for_fsdp(self.model)
        self.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO  # the model compiles its own loss
        self.optimizer_cls_and_kwargs = optimizer_class_and_kwargs(args, self.model)
        self.class_label_ids = class_label_ids
        self.task_record = task_record
        self.evaluation_tasks = evaluation_tasks or {}
        self.summarise = summarise
        self.longest_answer: int | None = None  # tokens that `generate` may write; None: as the model's settings say
        self._finder: AnswerFinder | None = None  # of an evaluation
        self._add_callbacks(terms)

    def _add_callbacks(self, terms: Sequence[LossTerm]) -> None:
        """Adds the callbacks of every training, and those that the features of this one need."""
        self.remove_callback(DefaultFlowCallback)
        self.callback_handler.callbacks.insert(0, FlowCallback(self))
        self.preemption = PreemptionCallback(self)
        self.watch = WatchCallback()
        for callback in (ResumeCallback(self), self.preemption, self.watch):
            self.add_callback(callback)
        self.feature_callbacks += callbacks_of(self.args.features, self)
        names = [term.logged for term in terms]
        if any(names):
            self.feature_callbacks.append(LossTermsCallback(self, names))
        for callback in self.feature_callbacks:
            self.add_callback(callback)

    # ------------------------------------------------------------ a training, its epochs and their steps
    def train(self, resume_from_checkpoint: str | None = None, **kwargs) -> TrainOutput:
        """Overrides Trainer to start the data workers before all else, and to end them, which ignore signals, and to
        restore the signal handlers, however the training ends. ValueError if `args` were not completed."""
        if self.args.warmup_steps is None and self.lr_scheduler is None:
            raise ValueError(
                "T5Trainer.train: the training arguments are not complete: call check_training(args, "
                "'fine-tuning a checkpoint') of arguments/training.py first, or give `optimizers`"
            )
        self.resumed_from = resume_from_checkpoint
        self.rows.find_place(resume_from_checkpoint)
        self._draw_by_rank(resume_from_checkpoint)
        self.remove_callback(EpochCallback)
        if self.rows.goes_on_by_rows or self.rows.stream is not None:
            self.add_callback(EpochCallback(self))
        max_steps = self.args.max_steps
        if self.rows.goes_on_by_rows:  # Trainer would count steps as if all epochs were as long as the first
            self.args = self.args.replaced(max_steps=self.rows.planned_steps(resume_from_checkpoint))
        try:
            self.rows.start_workers()
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        finally:
            self.args = self.args.replaced(max_steps=max_steps)
            self.preemption.on_train_end()
            self.watch.on_train_end()
            self.rows.end_workers()

    def _draw_by_rank(self, checkpoint: str | None) -> None:
        """Gives every rank but the first random numbers of its own, since all begin with the same seed: dropout would
        drop the same places of different rows. A checkpoint holds each rank's; a rank that it has none for, of a run
        that goes on with more processes, begins with new ones."""
        rank, rows_read = self.args.process_index, self.rows.begun_at.total
        if rank or checkpoint and self.args.world_size > 1:
            torch.manual_seed(int(np.random.default_rng([self.args.seed, rank, rows_read]).integers(2**63)))

    def _run_epoch(self, *args, **kwargs):
        """Overrides Trainer, which trains one step too many when it resumes a run that is finished or that early
        stopping ended (PatienceCallback), and for a resumed run of other batches. A resumed run first makes up for an
        evaluation that was stopped. A run that is told to stop ends here."""
        with self._left_if_stopped():
            self._make_pending_evaluation()
            if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
                self.control.should_training_stop = True
                return
            if self.rows.goes_on_by_rows:
                kwargs = self.rows.epoch_by_rows(kwargs)
            super()._run_epoch(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple:
        """Overrides Trainer to take the step's batches from the data workers, and to count them for the log. A feature
        may say by what the loss is divided."""
        self.place_before = self.rows.place
        self.losses_before = self._tr_loss.clone()
        batches = self._batches_on(device, epoch_iterator, num_batches)
        if self.rows.begins_within_epoch and self.state.global_step == self.rows.begun_step:
            self._load_rng_state(self.resumed_from)  # Trainer's came before the loader drew a number
        batches, num_items = super().get_batch_samples(iter(batches), num_batches, device)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, RunCallback):
                callback.count_batches(batches)
        return batches, self.begin_step(batches, num_items)

    def _batches_on(self, device: torch.device, epoch_iterator: Iterator, count: int) -> list[dict]:
        """The micro-batches of a step, on the device. They are sent there first: if Trainer counted their tokens on the
        host, the host would wait to send the count."""
        send = partial(send_to_device, device=device, non_blocking=self.args.accelerator_config.non_blocking)
        has_workers = self.rows.workers is not None
        if has_workers:
            epoch_iterator = self.rows.batches_of(epoch_iterator)
        batches: list[dict] = []
        error = None
        try:
            batches.extend(map(send, itertools.islice(epoch_iterator, count)))
        except (StreamError, RuntimeError, OSError, EOFError) as broken:
            error = broken
        if error or has_workers or self.place_before is not None:
            end_if_broken(self, error)
        return batches

    def begin_step(self, batches: list[dict], num_items: torch.Tensor | None) -> torch.Tensor | None:
        """What features do to the micro-batches of a step before its loss. Returns by what that loss is divided, which
        a feature may say in place of the target tokens, `num_items`."""
        for callback in self.feature_callbacks:
            callback.change_batches(batches)
        for callback in self.feature_callbacks:
            if callback.gives_divisor():
                num_items = callback.divisor(batches)
        return num_items

    def _prepare_input(self, data):
        """Overrides Trainer, which gives a batch's fractions the type of DeepSpeed's weights. None is read by a layer:
        they are log-probabilities, rewards and counts, of which bfloat16 would keep three digits."""
        return send_to_device(data, self.args.device)

    def _get_grad_norm(self, model, grad_norm=None):
        """Overrides Trainer, which calls this before the update, to end the run at a non-finite norm. Reading the norm
        makes the CPU wait for the GPU, once in a step."""
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm  # FSDP2's
        if norm is not None and not math.isfinite(norm):
            end_at_norm(self, float(norm))
        return grad_norm

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Overrides Trainer to make the schedule as training/optimizers.py defines it."""
        if self.lr_scheduler is None:
            optimizer, reached = optimizer or self.optimizer, self.rows.reached
            self.lr_scheduler = build_scheduler(self.args, optimizer, num_training_steps, reached)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _finalize_training(self, *args, **kwargs):
        """Overrides Trainer, which would load the best model in a way of its own, and without
        `--load_best_model_at_end` keep only that checkpoint, under `--save_total_limit 1`."""
        with self._left_if_stopped():
            self._make_pending_evaluation()
        best = self.state.best_model_checkpoint
        if best is not None and self.args.load_best_model_at_end:
            self.checkpoints.load_best()
        self.state.best_model_checkpoint = None
        output = super()._finalize_training(*args, **kwargs)
        self.state.best_model_checkpoint = best
        if self.checkpoints.uploads:
            self.checkpoints.uploads.wait()
        return output

    def mean_loss(self) -> float:
        """The mean training loss of all steps and ranks, at the end. Trainer has then added the losses since the last
        log, but only those of this rank."""
        unlogged = self.accelerator.gather(self._tr_loss.reshape(1)).mean().item() - self._tr_loss.item()
        return (self._total_loss_scalar + unlogged) / self.state.global_step

    # ------------------------------------------------------------ a run that is told to stop
    @contextlib.contextmanager
    def _left_if_stopped(self) -> Iterator[None]:
        """Ends a run that a signal or the time limit stopped in the block, with code 75. If it was stopped within an
        evaluation, which may take longer than the job still has, it saves the state from before the evaluation. Such a
        run prints no closing line, does not load the best model and does not delete the checkpoint just saved."""
        try:
            yield
        except EvaluationStopped:
            self.preemption.owe_evaluation()
            if self.args.save_strategy != SaveStrategy.NO:
                self._save_checkpoint(self.model_wrapped, None)
        if self.preemption.reason is not None:
            self.callback_handler.on_train_end(self.args, self.state, self.control)
            finish_process_group()
            print_once(self.preemption.reason)
            raise SystemExit(PREEMPTED_EXIT_CODE)

    def _make_pending_evaluation(self) -> None:
        """Makes the evaluation that the checkpoint's run had to leave out (pending_evaluation), as if that run had gone
        on: it counts for the best model, for the patience and for a schedule that follows evaluations."""
        pending = self.checkpoints.pending_evaluation
        self.checkpoints.pending_evaluation = None
        if pending is not None and self.preemption.reason is None:
            self.control.should_log = False
            self.control.should_evaluate = True
            self.control.should_save = pending["save_was_due"]
            where = self.state.epoch, None, time.time()
            self._maybe_log_save_evaluate(self._tr_loss, None, self.model_wrapped, None, *where)

    # ------------------------------------------------------------ checkpoints
    def _determine_best_metric(self, metrics: dict[str, float], trial: object) -> bool:
        """Overrides Trainer: with `--load_best_model_at_end` only evaluations of steps that are saved count. If one
        between them were better, Trainer would end with an older checkpoint or the last weights.
        UserError if the evaluation lacks the metric, such as that of a corpus or denoiser without validation rows."""
        key = best_metric_key(self.args)
        if key is not None and key not in metrics:
            raise UserError(
                f"--metric_for_best_model {self.args.metric_for_best_model}: the evaluation has no "
                "row for it; give another metric, or more validation rows"
            )
        saves_the_best = self.args.save_strategy == SaveStrategy.BEST
        if self.args.load_best_model_at_end and not (saves_the_best or self.control.should_save):
            return False
        return super()._determine_best_metric(metrics, trial)

    def _save_checkpoint(self, model, trial):  # noqa: ARG002
        """Overrides Trainer: a checkpoint appears when it is whole, with an optimizer's state from which a run of any
        sharding resumes; a full disk costs a checkpoint, not the run."""
        self.checkpoints.save()

    def _save(self, output_dir=None, state_dict=None):
        """Overrides Trainer to save the shared embedding once, float32 weights also where DeepSpeed computes with
        bfloat16 ones, and task.json with every fine-tuned model."""
        state_dict = named_weights(self, state_dict)
        with self.checkpoints.full_disk_put_off():
            super()._save(output_dir, state_dict)
            if self.args.should_save:
                complete_model(Path(output_dir or self.args.output_dir), self.task_record)

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        """Overrides Trainer, which loads a checkpoint only into the sharding that wrote it. The weights of a model
        without sharding have been loaded before."""
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        if resume_from_checkpoint is not None:
            if self.is_deepspeed_enabled or self.is_fsdp_enabled:
                self._load_from_checkpoint(resume_from_checkpoint)
            load_optimizer(self, Path(resume_from_checkpoint))
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):  # noqa: ARG002
        """Overrides Trainer to load whole weights, or what a feature trains beside them, into any sharding. If the
        checkpoint lacks tensors the run ends; Trainer would warn and keep those of the model."""
        load_weights(self.model, Path(resume_from_checkpoint))

    # ------------------------------------------------------------ rows and evaluation
    def _get_dataloader(
        self,
        dataset: Dataset,
        description: str,  # noqa: ARG002
        batch_size: int,  # noqa: ARG002
        sampler_fn: Callable | None = None,  # noqa: ARG002
        is_training: bool = False,
        dataloader_key: str | None = None,  # noqa: ARG002
    ) -> DataLoader:
        """Overrides Trainer, whose order of training rows depends on the number of ranks and on what drew random
        numbers before; an evaluation gets rows of similar length in a batch."""
        return self.rows.loader() if is_training else evaluation_loader(self, dataset)

    def evaluate(self, eval_dataset: Dataset | dict | str | None = None, *args, **kwargs) -> dict[str, float]:
        """Overrides Seq2SeqTrainer to score each task by its own rule, and to add the metrics of `summarise`. The
        random numbers of training continue as if there had been no evaluation."""
        with preserve_rng_state(self.args.device), undone_if_stopped(self):
            return self._evaluate_task(eval_dataset, *args, **kwargs)

    def _evaluate_task(self, eval_dataset: Dataset | dict | str | None, *args, **kwargs) -> dict[str, float]:
        if isinstance(eval_dataset, str) and eval_dataset in self.evaluation_tasks:
            task = self.evaluation_tasks[eval_dataset]
            self.compute_metrics = task.compute_metrics
            self.class_label_ids = task.class_label_ids
            self.longest_answer = task.max_length
            self.args = self.args.replaced(predict_with_generate=task.predict_with_generate)
        metrics = super().evaluate(eval_dataset, *args, **kwargs)
        if eval_dataset is None and self.summarise is not None:
            summary = self.summarise(metrics)
            self.log(dict(summary))
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, summary)
            metrics |= summary
        return metrics

    def evaluation_loop(self, dataloader: DataLoader, *args, **kwargs) -> EvalLoopOutput:
        """Overrides Trainer: answers are found with the weights as they are now; predictions come in the order of the
        rows, each row once, where Seq2SeqTrainer counts those twice that fill the last batch of all ranks."""
        self._finder = AnswerFinder(self.model, 1)
        try:
            return in_row_order(self, dataloader, partial(super().evaluation_loop, dataloader, *args, **kwargs))
        finally:
            self._finder = None  # it holds a copy of the decoder's weights

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict,
        prediction_loss_only: bool,  # noqa: ARG002
        ignore_keys: list[str] | None = None,  # noqa: ARG002
    ) -> tuple[None, tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]:
        """(None, (generated tokens [B, T] or, without generating, -1 [B, 1], statistics [B, 5 + n] of `score_rows`),
        labels [B, T] or None). The first None is the loss, which the statistics include."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs.get("labels")
        with torch.no_grad(), self.compute_loss_context_manager():
            scores = score_batch(self, model, inputs, labels)
        generated = torch.full_like(scores.statistics[:, :1], -1, dtype=torch.long)
        if self.args.predict_with_generate:
            generated = generate_answers(self, inputs, scores.encoded, self._finder)
        return None, (generated, scores.statistics), labels

    def described_search(self) -> str:
        """How the answers of an evaluation are searched, for the plan: by the model's own settings and the flags."""
        own = copy.deepcopy(self.model.generation_config)
        own.update(do_sample=False, num_beams=self.args.generation_num_beams or own.num_beams)
        most = (self.args.generation_max_length or own.max_length) - 1  # both count the start token too
        return described_search(deciding_settings(own), {"max_new_tokens": most})


def _loss_and_accuracy(output: EvalPrediction) -> dict[str, float]:
    return token_metrics(output.predictions[1])
