"""`Seq2SeqTrainer` made exact for T5: loss over the global batch, evaluation that counts every token and example once.

An optimizer step, in its order:

1. `get_batch_samples` takes the step's micro-batches from `rows` (training/row_order.py: an order that is the same for
   any number of ranks), through `step_watch` (training/broken_steps.py), and counts the target tokens of all of them on
   all ranks. A feature's callback may add answers (`begin_step`).
2. Trainer's `training_step` calls the model for each micro-batch. Its forward pass ends in the loss
   (modeling/loss.py): a sum over target tokens, divided by their number in the whole step. Backward pass.
3. Trainer clips the gradient; `_get_grad_norm` ends the run if it is not finite.
4. Update (training/optimizers.py), then the schedule (`create_scheduler`).
5. `on_step_end` of the callbacks, in the order of `__init__`: training/flow.py says what is due (log, evaluation,
   save, end) and counts the rows; training/preemption.py asks whether a signal or time limit ends the run.
6. `_maybe_log_save_evaluate` does what is due: `evaluate` scores each task by its own rule, `_save_checkpoint` writes a
   checkpoint that is whole or absent (training/saving.py).

Legend of shapes: B batch, T target length, C class labels.
"""

import contextlib
import copy
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import DynamoBackend, send_to_device
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset
from transformers import DefaultFlowCallback, PreTrainedModel, Seq2SeqTrainer, TrainerCallback
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, set_hf_deepspeed_config
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, SaveStrategy, TrainOutput

from constants import IGNORE_INDEX, PREEMPTED_EXIT_CODE
from foundry.arguments.training import T5TrainingArguments, best_metric_key
from foundry.common.errors import UserError
from foundry.common.processes import finish_process_group, print_once
from foundry.common.whole_folders import SAVING
from foundry.model_t5 import use_one_embedding_module
from foundry.modeling.decoding import Source
from foundry.modeling.families import family_of
from foundry.modeling.found_answers import AnswerFinder
from foundry.modeling.generation_settings import deciding_settings, described_search
from foundry.modeling.layers import sum_bias_by_diagonals, use_bf16_residual
from foundry.modeling.learning import Learning, losses_of
from foundry.modeling.loss import LossTerm, compute_loss_in_forward, token_metrics
from foundry.modeling.recomputed import keep_less
from foundry.modeling.rows_at_a_time import parts, rows_to_generate, rows_to_score
from foundry.publishing.publication import Publication
from foundry.training.batching import OneShapeCollator, PackingCollator
from foundry.training.broken_steps import StepWatch
from foundry.training.flow import FlowCallback, LossTermsCallback, ResumeCallback
from foundry.training.optimizers import build_scheduler, optimizer_class_and_kwargs
from foundry.training.preemption import EvaluationStopped, PreemptionCallback, undone_if_stopped
from foundry.training.progress import WatchCallback
from foundry.training.row_order import TrainingRows, evaluation_loader, in_row_order
from foundry.training.saving import (
    CheckpointWriter,
    complete_model,
    load_optimizer,
    load_weights,
    named_weights,
    save_optimizer,
)
from foundry.training.teacher_forcing import score_rows


def set_up_step(
    model: PreTrainedModel,
    args: T5TrainingArguments,
    terms: Sequence[LossTerm] = (),
    whole: Callable | None = None,
) -> None:
    """Applies the options of the training step to the model: loss, compilation, residual stream, and what its layers
    keep for the backward pass. terms: are mixed into the loss of tokens, which `whole` replaces."""
    sum_bias_by_diagonals(model)
    if args.keep_less and not args.torch_compile and family_of(model.config).keeps_less:
        keep_less(model)
    if args.bf16_residual:
        use_bf16_residual(model)
    options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode} if args.torch_compile else None
    loss_options = args.label_smoothing_factor, args.z_loss, args.loss_chunk_size
    compute_loss_in_forward(model, *loss_options, options, terms, whole)


@contextlib.contextmanager
def kept_random_numbers(device: torch.device) -> Iterator[None]:
    """Restores the random generators of Python, NumPy and torch after the block, as if it had drawn nothing. device:
    whose generator is restored beside the CPU's."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


@dataclass(frozen=True)
class EvaluationTask:
    """How the answers to one evaluation data set are found and scored.

    class_label_ids: [C, T], as in T5Trainer. max_length: tokens that `generate` may write, start token included.
    """

    compute_metrics: Callable
    class_label_ids: torch.Tensor | None
    predict_with_generate: bool
    max_length: int


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
            class_label_ids, compute_metrics = first.class_label_ids, first.compute_metrics
        publication = args.features.first(Publication)
        self.checkpoints = CheckpointWriter(self, publication.uploads(args) if publication else None)
        self.rows, self.step_watch = TrainingRows(self, train_collator), StepWatch(self)
        self.feature_callbacks: list[TrainerCallback] = []
        self.resumed_from: str | None = None  # the checkpoint from which this training resumed
        if args.push_to_hub:  # Trainer would upload a checkpoint while it is being written
            args = args.replaced(push_to_hub=False)
        if getattr(args, "hf_deepspeed_config", None) is not None:
            set_hf_deepspeed_config(args.hf_deepspeed_config)
        use_one_embedding_module(model)
        learnings = args.features.of(Learning)
        terms, whole = losses_of(args.features, model, args)
        set_up_step(model, args, terms, whole)
        super().__init__(model=model, args=args, compute_metrics=compute_metrics or _loss_and_accuracy, **kwargs)
        self.label_smoother = None  # our loss smooths labels itself
        if self.is_fsdp_enabled:
            family_of(self.model.config).fit_for_fsdp(self.model)
        self.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO  # the model compiles its own loss
        self.optimizer_cls_and_kwargs = optimizer_class_and_kwargs(args, self.model)
        self.class_label_ids, self.task_record = class_label_ids, task_record
        self.evaluation_tasks, self.summarise, self._max_length = evaluation_tasks or {}, summarise, None
        self._finder: AnswerFinder | None = None  # of an evaluation
        self.preemption = PreemptionCallback(self)
        self.remove_callback(DefaultFlowCallback)
        self.callback_handler.callbacks.insert(0, FlowCallback(self))
        self.add_callback(ResumeCallback(self))
        self.add_callback(self.preemption)
        self.watch = WatchCallback()
        self.add_callback(self.watch)
        self.feature_callbacks = [callback for learning in learnings for callback in learning.callbacks(self)]
        if any(names := [term.logged for term in terms]):
            self.feature_callbacks.append(LossTermsCallback(self, names))
        for callback in self.feature_callbacks:
            self.add_callback(callback)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Overrides Trainer to make the schedule as training/optimizers.py defines it."""
        if self.lr_scheduler is None:
            self.lr_scheduler = build_scheduler(self.args, optimizer or self.optimizer, num_training_steps)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # ------------------------------------------------------------ rows
    def get_train_dataloader(self) -> DataLoader:
        """Overrides Trainer, whose order depends on the number of ranks and on what drew random numbers before."""
        return self.rows.loader()

    def set_initial_training_values(self, args: T5TrainingArguments, dataloader: DataLoader) -> tuple:
        """Overrides Trainer, which counts steps of the size that they have now, for a resumed run of other batches."""
        passes, *others, max_steps = super().set_initial_training_values(args, dataloader)
        passes, max_steps = self.rows.begun(passes, max_steps)
        return passes, *others, max_steps

    def _init_training_state(self, *args, **kwargs) -> tuple[int, int]:
        """Overrides Trainer for the same run: no batch is skipped, since the pass has only the rest of its rows."""
        places = super()._init_training_state(*args, **kwargs)
        return (self.rows.first_epoch, 0) if self.rows.goes_on_by_rows else places

    # ------------------------------------------------------------ training
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
        try:
            self.rows.start_workers()
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        finally:
            self.preemption.on_train_end()
            self.watch.on_train_end()
            self.rows.end_workers()

    def _draw_by_rank(self, checkpoint: str | None) -> None:
        """Gives every rank but the first random numbers of its own, since all begin with the same seed: dropout would
        drop the same places of different rows. A checkpoint holds each rank's; a rank that it has none for, of a run
        that goes on with more processes, begins with new ones."""
        rank, step = self.args.process_index, self.rows.read.total
        if rank or checkpoint and self.args.world_size > 1:
            torch.manual_seed(int(np.random.default_rng([self.args.seed, rank, step]).integers(2**63)))

    def _finalize_training(self, *args, **kwargs):
        """Overrides Trainer to exit with code 75 if a signal or the time limit stopped the run. Such a run prints no
        closing line, does not load the best model and does not delete the checkpoint just saved."""
        self._make_owed_evaluation()
        if self.preemption.reason is not None:
            self._leave()
        best = self.state.best_model_checkpoint
        if not self.args.load_best_model_at_end:  # Trainer would keep only this one, under save_total_limit 1
            self.state.best_model_checkpoint = None
        output = super()._finalize_training(*args, **kwargs)
        self.state.best_model_checkpoint = best
        if self.checkpoints.uploads:
            self.checkpoints.uploads.wait()
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Overrides Trainer to make the closing `train_loss` the mean over the whole run, also if it was resumed."""
        if "train_loss" in logs and self.state.global_step:
            # Trainer has already added the losses since the last log, but only those of this rank.
            unlogged = self.accelerator.gather(self._tr_loss.reshape(1)).mean().item() - self._tr_loss.item()
            logs["train_loss"] = (self._total_loss_scalar + unlogged) / self.state.global_step
        super().log(logs, start_time)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple:
        """Overrides Trainer to take the step's batches from `rows`, and to count them for the log. A feature may say by
        what the loss is divided."""
        batches = self.step_watch.batches(self.rows.batches_of(epoch_iterator), num_batches, device)
        batches, num_items = super().get_batch_samples(iter(batches), num_batches, device)
        for callback in self.callback_handler.callbacks:
            if hasattr(callback, "count_batches"):
                callback.count_batches(batches)
        return batches, self.begin_step(batches, num_items)

    def begin_step(self, batches: list[dict], num_items: torch.Tensor | None) -> torch.Tensor | None:
        """What features do to the micro-batches of a step before its loss. Returns by what that loss is divided."""
        for callback in self.feature_callbacks:
            num_items = callback.begin_step(batches) if hasattr(callback, "begin_step") else num_items
        return num_items

    def _get_grad_norm(self, model, grad_norm=None):
        """Overrides Trainer, which calls this before the update, to end the run at a non-finite norm."""
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.step_watch.check_norm(grad_norm)
        return grad_norm

    def _run_epoch(self, *args, **kwargs):
        """Overrides Trainer, which trains one step too many when it resumes a run that is finished or that early
        stopping ended (PatienceCallback). A resumed run first makes up for an evaluation that was stopped."""
        self._make_owed_evaluation()
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        rows = self.rows
        if rows.goes_on_by_rows and rows.first_row and kwargs["epoch"] == rows.first_epoch:
            kwargs |= rows.rest_of_pass()
        super()._run_epoch(*args, **kwargs)

    def _maybe_log_save_evaluate(self, tr_loss, grad_norm, model, *args, **kwargs):
        """Overrides Trainer for a run that a signal or the time limit stops before or within an evaluation, which may
        take longer than the job still has. The state from before the evaluation is saved, with a note
        (owed_evaluation) by which the run that resumes makes the evaluation."""
        control = self.control
        if self.preemption.reason is not None and control.should_evaluate:
            control.should_evaluate = False
            self.checkpoints.owed_evaluation = {"save_was_due": self.preemption.save_was_due}
        try:
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, *args, **kwargs)
        except EvaluationStopped:
            self.checkpoints.owed_evaluation = {"save_was_due": self.preemption.save_was_due}
            if self.args.save_strategy != SaveStrategy.NO:
                self._save_checkpoint(model, None)
            self._leave()

    def _make_owed_evaluation(self) -> None:
        """Makes the evaluation that the checkpoint's run had to leave out (owed_evaluation), as if that run had gone
        on: it counts for the best model, for the patience and for a schedule that follows evaluations."""
        owed, self.checkpoints.owed_evaluation, control = self.checkpoints.owed_evaluation, None, self.control
        if owed is not None and self.preemption.reason is None:
            control.should_log, control.should_evaluate, control.should_save = False, True, owed["save_was_due"]
            where = self.state.epoch, None, time.time()
            self._maybe_log_save_evaluate(self._tr_loss, None, self.model_wrapped, None, *where)

    def _leave(self) -> None:
        """Exits with code 75, after a signal or the time limit has stopped the run."""
        self.callback_handler.on_train_end(self.args, self.state, self.control)
        finish_process_group()
        print_once(self.preemption.reason)
        raise SystemExit(PREEMPTED_EXIT_CODE)

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

    # ------------------------------------------------------------ checkpoints
    def _get_output_dir(self, trial):
        """Overrides Trainer, which offers no other way to choose a checkpoint's folder, to write into `_saving/`."""
        folder = super()._get_output_dir(trial)
        return str(Path(folder) / SAVING) if self.checkpoints.is_saving else folder

    def _save_checkpoint(self, model, trial):
        """Overrides Trainer: a checkpoint appears when it is whole, and a full disk costs a checkpoint, not the run."""
        output_dir = Path(super()._get_output_dir(trial))
        self.checkpoints.save(partial(super()._save_checkpoint, model, trial), output_dir)

    def _save(self, output_dir=None, state_dict=None):
        """Overrides Trainer to save the shared embedding once, float32 weights also where DeepSpeed computes with
        bfloat16 ones, and task.json with every fine-tuned model."""
        state_dict = named_weights(self, state_dict)
        with self.checkpoints.full_disk_put_off():
            super()._save(output_dir, state_dict)
            if self.args.should_save:
                complete_model(Path(output_dir or self.args.output_dir), self.task_record)

    def _save_optimizer_and_scheduler(self, output_dir):
        """Overrides Trainer to save whole tensors by name, from which a run of any sharding resumes."""
        save_optimizer(self, Path(output_dir))

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

    def _load_best_model(self):
        """Overrides Trainer to load the best checkpoint as `_load_from_checkpoint` does."""
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    # ------------------------------------------------------------ evaluation
    def evaluate(self, eval_dataset: Dataset | dict | str | None = None, *args, **kwargs) -> dict[str, float]:
        """Overrides Seq2SeqTrainer to score each task by its own rule, and to add the metrics of `summarise`. The
        random numbers of training continue as if there had been no evaluation."""
        with kept_random_numbers(self.args.device), undone_if_stopped(self):
            return self._evaluate_task(eval_dataset, *args, **kwargs)

    def _evaluate_task(self, eval_dataset: Dataset | dict | str | None, *args, **kwargs) -> dict[str, float]:
        if isinstance(eval_dataset, str) and eval_dataset in self.evaluation_tasks:
            task = self.evaluation_tasks[eval_dataset]
            self.compute_metrics, self.class_label_ids = task.compute_metrics, task.class_label_ids
            self.args = self.args.replaced(predict_with_generate=task.predict_with_generate)
            self._max_length = task.max_length
        metrics = super().evaluate(eval_dataset, *args, **kwargs)
        if eval_dataset is None and self.summarise is not None:
            summary = self.summarise(metrics)
            self.log(dict(summary))
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, summary)
            metrics |= summary
        return metrics

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader:
        """Overrides Trainer to put rows of similar length into one batch."""
        return evaluation_loader(self, eval_dataset)

    def get_test_dataloader(self, test_dataset: Dataset) -> DataLoader:
        """Overrides Trainer to do the same as `get_eval_dataloader`."""
        return evaluation_loader(self, test_dataset)

    def evaluation_loop(self, dataloader: DataLoader, *args, **kwargs) -> EvalLoopOutput:
        """Overrides Trainer: answers are found with the weights as they are now; predictions come in the order of the
        rows, each row once, where Seq2SeqTrainer counts those twice that fill the last batch of all ranks."""
        self._finder = AnswerFinder(self.model, 1)
        try:
            return in_row_order(self, dataloader, partial(super().evaluation_loop, dataloader, *args, **kwargs))
        finally:
            self._finder = None  # it holds a copy of the decoder's weights

    def _search(self) -> dict:
        """The arguments of `generate`, kept out of the model's generation_config, which every checkpoint saves."""
        chosen = {"max_length": self._max_length, "do_sample": False, "num_return_sequences": 1}
        chosen["cache_implementation"] = "static" if self.args.generation_cache == "static" else None
        return {name: value for name, value in chosen.items() if value is not None} | self._gen_kwargs

    def described_search(self) -> str:
        """How the answers of an evaluation are searched, for the plan: by the model's own settings and the flags."""
        own = copy.deepcopy(self.model.generation_config)
        own.update(do_sample=False, num_beams=self.args.generation_num_beams or own.num_beams)
        most = (self.args.generation_max_length or own.max_length) - 1  # both count the start token too
        return described_search(deciding_settings(own), {"max_new_tokens": most})

    def _prepare_input(self, data):
        """Overrides Trainer, which gives a batch's fractions the type of DeepSpeed's weights. None is read by a layer:
        they are log-probabilities, rewards and counts, of which bfloat16 would keep three digits."""
        return send_to_device(data, self.args.device)

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
            statistics, encoded = self._score(model, inputs, labels)
        generated = torch.full_like(statistics[:, :1], -1, dtype=torch.long)
        if self.args.predict_with_generate:
            generated = self._written(inputs, encoded)
        return None, (generated, statistics), labels

    def _written(self, inputs: dict, encoded: torch.Tensor | None) -> torch.Tensor:
        """The answers [B, T] to the sources of a batch, behind the token that the decoder reads first. encoded: the
        encoder's output, if it is known."""
        config, search, lengths = self.model.config, self._search(), inputs["attention_mask"].sum(1).tolist()
        rows = [Source(ids[:length]) for ids, length in zip(inputs["input_ids"].tolist(), lengths, strict=True)]
        for number, row in enumerate(rows if encoded is not None else ()):
            row.encoded = encoded[number]
        own, find = self.model.generation_config, self._finder or AnswerFinder(self.model, len(rows))
        longest, beams = (search.get(n) or getattr(own, n) or 1 for n in ("max_length", "num_beams"))
        find.slots = len(rows)
        if not self._is_sharded:
            source, device = inputs["input_ids"].shape[1], self.args.device
            find.slots = rows_to_generate(config, source, longest, beams, device, self.args.bf16)
        with self.accelerator.autocast():  # accelerate wraps the model's forward, which is not called
            find(rows, **search)
        answers = [[own.decoder_start_token_id, *row.answers[0].tokens] for row in rows]
        written = [torch.tensor(ids, device=self.args.device) for ids in answers]
        return pad_sequence(written, batch_first=True, padding_value=config.pad_token_id)

    def _parts(self, rows: dict[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
        """The rows of a batch, in parts of at most `size`; under ZeRO-3 and FSDP2 in one part, since all ranks must
        make the same number of forward passes."""
        tensors = {name: values for name, values in rows.items() if values is not None}
        return parts(tensors, len(rows["input_ids"]) if self._is_sharded else size)

    @property
    def _is_sharded(self) -> bool:
        """Whether the weights are spread over the ranks."""
        return is_deepspeed_zero3_enabled() or self.is_fsdp_enabled

    def _score(self, model, inputs, labels: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What `score_rows` returns: (statistics [B, 5 + n], the encoder's output [B, S, d_model] or None). Scores few
        rows at a time, to limit memory: 64 rows of 128 tokens have 8 GB of logits with mT5's vocabulary."""
        positions, classes = 0 if labels is None else labels.shape[1], self.class_label_ids
        if self.args.predict_with_generate:
            classes = None
        if classes is not None:
            positions += int(classes.ne(IGNORE_INDEX).sum())
        if "rejected" in inputs:
            positions += inputs["rejected"].shape[1]
        config, more = self.model.config, getattr(self.data_collator, "statistics", None)
        size = rows_to_score(config, inputs["input_ids"].shape[1], positions)
        scored = [score_rows(model, config, part, classes, more) for part in self._parts(inputs, size)]
        statistics, encoded = zip(*scored, strict=True)
        return torch.cat(statistics), None if encoded[0] is None else torch.cat(encoded)


def _loss_and_accuracy(output: EvalPrediction) -> dict[str, float]:
    return token_metrics(output.predictions[1])
