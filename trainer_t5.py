"""`Seq2SeqTrainer` made exact for T5: loss over the global batch, evaluation that counts every token and example once.

Class labels are scored without generating. A greedy decoder writes the tokens of a label if and only if, fed with that
label, its most likely token is the label's at every position, EOS included. So one teacher-forced pass over all labels
finds the label that greedy decoding would write, or none (docs/tasks.md: other tokens that spell the same text).

Legend of shapes: B batch, T target length, C class labels.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate.utils import DynamoBackend, gather_object, send_to_device
from torch import nn
from torch._inductor.codecache import cache_dir
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset
from transformers import (
    DefaultFlowCallback,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, set_hf_deepspeed_config
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.trainer_utils import EvalPrediction, PredictionOutput, SaveStrategy, TrainOutput

from arguments.training import T5TrainingArguments, best_metric_key, global_batch_size
from common.command_line import exit_on_user_error
from common.processes import finish_process_group, is_first_process, print_once
from constants import IGNORE_INDEX, PREEMPTED_EXIT_CODE
from corpora.streams import StreamError
from data_collator_t5 import shift_right
from model_t5 import use_one_embedding_module
from modeling.families import family_of, is_tied, shape_of
from modeling.fused_projections import (
    checkpoint_blocks_only,
    fuse_cross_projections,
    fuse_projections,
    keep_weight_copies,
    use_bf16_residual,
)
from modeling.loss import compute_loss_in_forward, nats_of
from modeling.relative_bias import sum_bias_by_diagonals
from modeling.rows_at_a_time import parts, rows_to_generate, rows_to_score
from modeling.segment_masks import SEGMENTS
from tasks.batching import BucketCollator, PackingCollator
from tasks.examples import EvaluationTask
from tasks.metrics.scoring import STATISTICS, token_metrics
from training.optimizers import build_scheduler, optimizer_class_and_kwargs, options_of, restore_options
from training.preemption import PreemptionCallback
from training.saving import SavingTrainer


class _ResumeCallback(TrainerCallback):
    """Restores what Trainer forgets of the resumed run, and sets the epochs of a stream, which Trainer cannot know."""

    def __init__(self, trainer: "T5Trainer"):
        self.trainer = trainer

    def on_train_begin(self, _args, state: TrainerState, *_, **__) -> None:
        """Restores the losses since the last log, so that the next log has the same mean as without interruption; and
        finds the best checkpoint beside the resumed one, if their folder has been moved. The optimizer's options are
        those of the flags again, not of the checkpoint, and so are the steps between logs, evaluations and saves, and
        the metric by which the best checkpoint is compared."""
        self.trainer.restore_loss_state()
        resumed = self.trainer._resumed_from
        if resumed:
            _take_steps_of_flags(self.trainer.args, state)
            key, lines = best_metric_key(self.trainer.args), state.log_history
            values = [line[key] for line in lines if line["step"] == state.best_global_step and key in line]
            state.best_metric = values[0] if values else None
        if resumed and self.trainer.asked_options:
            restore_options(self.trainer.optimizer, self.trainer.lr_scheduler, self.trainer.asked_options)
        best = resumed and Path(resumed).with_name(f"checkpoint-{state.best_global_step}")
        if best and best.is_dir():
            state.best_model_checkpoint = str(best)
        checkpoint_blocks_only(self.trainer.model)

    def on_epoch_begin(self, _args, state: TrainerState, *_, train_dataloader: DataLoader, **__) -> None:
        """Sets the sampler's epoch. Trainer does so too, but where several ranks resume within an epoch it does not
        reach the sampler: the data loader that skips the batches already seen is one wrapper more."""
        train_dataloader.set_epoch(int(state.epoch or 0))

    def on_step_end(self, _args, state: TrainerState, *_, **__) -> None:
        """Sets the epochs of a stream. Trainer does not know its length and would count shares of --max_steps."""
        if hasattr(self.trainer.train_dataset, "epochs_done"):
            state.epoch = self.trainer.train_dataset.epochs_done()


def _take_steps_of_flags(args: T5TrainingArguments, state: TrainerState) -> None:
    """Gives the state of a resumed run the steps between logs, evaluations and saves that its flags ask for; prints
    what is different from the checkpoint's."""
    names = ("logging_steps", "eval_steps", "save_steps")
    before = {name: getattr(state, name) for name in names}
    state.compute_steps(args, state.max_steps)
    for name, steps in before.items():
        if getattr(state, name) != steps:
            print_once(f"--{name} {getattr(state, name):g} from here on, {steps:g} before")


class _FlowCallback(DefaultFlowCallback):
    """DefaultFlowCallback that logs, evaluates and saves for the end of an epoch at its last step.

    Trainer does so after what is due at that step: a checkpoint saved there would lack the epoch's log and evaluation,
    which a run that resumes from it would not make up for. And it does so wherever an epoch is left: a run that a
    signal stops would first evaluate, though it may be killed within seconds.
    """

    def __init__(self, trainer: "T5Trainer"):
        self.trainer, self.has_ended = trainer, False

    def on_step_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        super().on_step_end(args, state, control, **kwargs)
        counts_epochs = not hasattr(self.trainer.train_dataset, "epochs_done")  # a stream ends with the run alone
        self.has_ended = state.global_step >= state.max_steps or (counts_epochs and state.epoch == int(state.epoch))
        if self.has_ended:
            super().on_epoch_end(args, state, control, **kwargs)

    def on_epoch_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if not self.has_ended and self.trainer.preemption.reason is None:  # such as by early stopping
            super().on_epoch_end(args, state, control, **kwargs)


class _PrecompileCallback(TrainerCallback):
    """`--precompile`: ends the run after two steps, when the compiler's cache is filled."""

    def on_step_end(self, _args, state: TrainerState, *_, **__) -> None:
        if state.global_step >= 2:
            print_once(f"--precompile: compiled in two steps and kept in {cache_dir()}; nothing else was written")
            finish_process_group()
            raise SystemExit(0)


class _OnItsWay:
    """A number that is copied from the device to the host while both go on working.

    non_finite: float32 on the device, 1 where the number is NaN or infinite, else 0.
    """

    def __init__(self, number: torch.Tensor):
        number = number.full_tensor() if isinstance(number, DTensor) else number  # FSDP2's
        number = number.detach().float()
        self.non_finite, self.on_host, self.copied = 1 - number.isfinite().float(), number, None
        if number.is_cuda:
            self.on_host = torch.empty_like(number, device="cpu", pin_memory=True).copy_(number, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()

    def value(self) -> float:
        """The number, after waiting for the copy."""
        if self.copied is not None:
            self.copied.synchronize()
        return float(self.on_host.numpy())


def set_up_step(model: PreTrainedModel, args: T5TrainingArguments) -> None:
    """Puts the options of the training step into the model: loss, compilation, joined products, residual stream."""
    sum_bias_by_diagonals(model)
    if args.fused_projections:
        fuse_projections(model)
    if args.fused_cross_projections:
        fuse_cross_projections(model)
    if (args.fused_projections or args.fused_cross_projections) and args.bf16 and not args.deepspeed:
        keep_weight_copies(model)  # DeepSpeed's weights are in bfloat16 already
    if args.bf16_residual:
        use_bf16_residual(model)
    options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode} if args.torch_compile else None
    shapes = 8 + getattr(args, "length_buckets", 0)
    compute_loss_in_forward(model, args.label_smoothing_factor, args.z_loss, args.loss_chunk_size, options, shapes)


def _fit_for_fsdp(model: PreTrainedModel) -> None:
    """Lets accelerate shard a T5Gemma too. accelerate puts the head into one group with the input embedding, which here
    must be the decoder's, not the encoder's; and T5Gemma 2 names layers of its image encoder, which is not there."""
    if is_tied(model):
        model.get_input_embeddings = lambda: model.get_decoder().embed_tokens
    there = {type(module).__name__ for module in model.modules()}
    model._no_split_modules = [name for name in model._no_split_modules if name in there]


class T5Trainer(SavingTrainer):
    """Seq2SeqTrainer with T5's loss, optimizers, schedules, data order and evaluation.

    The model's class is changed so that its forward pass computes the loss (modeling/loss.py); `--torch_compile`
    compiles that pass as one graph, without the wrappers around it.

    args: completed by `check_training`. compute_metrics: its predictions are those of `prediction_step`; None: loss and
    token accuracy. class_label_ids: [C, T] token ids of the class labels (EOS included, padded with -100), which are
    scored unless `--predict_with_generate` asks for texts. evaluation_tasks: {name in `eval_dataset`: EvaluationTask},
    where the data sets are scored in different ways. summarise: metrics of a whole evaluation -> further ones, all with
    the prefix "eval_". train_collator: a collator for training alone; each batch of a BucketCollator holds rows of one
    bucket.
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
        train_collator: BucketCollator | PackingCollator | None = None,
        **kwargs,
    ):
        if evaluation_tasks:  # a single data set is scored like the first task
            first = next(iter(evaluation_tasks.values()))
            class_label_ids, compute_metrics = first.class_label_ids, first.compute_metrics
        if args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = False  # T5 has none to search for at every step
        if getattr(args, "hf_deepspeed_config", None) is not None:
            set_hf_deepspeed_config(args.hf_deepspeed_config)
        use_one_embedding_module(model)
        set_up_step(model, args)
        super().__init__(model=model, args=args, compute_metrics=compute_metrics or _loss_and_accuracy, **kwargs)
        self.label_smoother = None  # our loss smooths by itself
        if self.is_fsdp_enabled:
            _fit_for_fsdp(self.model)
        self.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO  # the model compiles its own loss
        self.optimizer_cls_and_kwargs = optimizer_class_and_kwargs(args, self.model)
        self.class_label_ids, self.train_collator = class_label_ids, train_collator
        self.evaluation_tasks, self.summarise, self._max_length = evaluation_tasks or {}, summarise, None
        self.asked_options = []  # of the optimizer's groups, as the flags ask for
        self.preemption = PreemptionCallback(self)
        self.remove_callback(DefaultFlowCallback)
        self.callback_handler.callbacks.insert(0, _FlowCallback(self))
        self.add_callback(_ResumeCallback(self))
        self.add_callback(self.preemption)
        if args.precompile:
            self.add_callback(_PrecompileCallback())
        self._tr_z_loss, self._z_loss_last_logged = torch.zeros((), device=args.device), 0
        # What was there when the step began; (norm, the same) of the last step, until its norm is known to be finite.
        self._began, self._unchecked = {}, (None, {})

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """The schedule of `--lr_scheduler_type` as training/optimizers.py defines it."""
        if self.lr_scheduler is None:
            self.lr_scheduler = build_scheduler(self.args, optimizer or self.optimizer, num_training_steps)
            self.asked_options = options_of(optimizer or self.optimizer)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # ------------------------------------------------------------ training
    def train(self, resume_from_checkpoint: str | None = None, **kwargs) -> TrainOutput:
        """Overrides Trainer to end the data workers, which ignore signals, and to give back the signals, however the
        training ends. A resumed run has had its `--eval_on_start`: a second one would be logged, and count against the
        patience."""
        if self.args.warmup_steps is None and self.lr_scheduler is None:
            raise ValueError("T5Trainer.train: its arguments are not complete: call check_training(args, "
                             "'fine-tuning a checkpoint') of arguments/training.py, or give optimizers")  # fmt: skip
        self._resumed_from = resume_from_checkpoint
        self._tr_z_loss = torch.zeros_like(self._tr_z_loss)  # without that of steps that --auto_find_batch_size tried
        self.args.eval_on_start = self.args.eval_on_start and not resume_from_checkpoint
        try:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        finally:
            self.preemption.on_train_end()
            self.end_data_workers()

    def _finalize_training(self, *args, **kwargs):
        """Overrides Trainer to exit with code 75 if a signal or the time limit has stopped the run. There is no closing
        line, the best model is not loaded and, above all, the checkpoint just saved is not deleted for a better one."""
        self._stop_if_non_finite()
        if self.preemption.reason is not None:
            self.callback_handler.on_train_end(self.args, self.state, self.control)
            finish_process_group()
            print_once(f"{self.preemption.reason}; resume with the same command and --resume_from_checkpoint "
                       f"(output: {self.args.output_dir})")  # fmt: skip
            raise SystemExit(PREEMPTED_EXIT_CODE)
        best = self.state.best_model_checkpoint
        if not self.args.load_best_model_at_end:  # Trainer would keep it alone all the same, under save_total_limit 1
            self.state.best_model_checkpoint = None
        output = super()._finalize_training(*args, **kwargs)
        self.state.best_model_checkpoint = best
        return output

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Seq2SeqLMOutput]:
        """Overrides Trainer to add up the z-loss, on the device."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if outputs.z_loss is not None:
            self._tr_z_loss = self._tr_z_loss + outputs.z_loss.sum()
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Overrides Trainer to log the part of `loss` that is z-loss, and to make the closing `train_loss` the mean
        over the whole run, also of a resumed one."""
        if "loss" in logs and self.args.z_loss:
            steps = self.state.global_step - self._z_loss_last_logged
            logs["z_loss"] = self.accelerator.gather(self._tr_z_loss.reshape(1)).sum().item() / steps
            self._tr_z_loss, self._z_loss_last_logged = torch.zeros_like(self._tr_z_loss), self.state.global_step
        if "train_loss" in logs and self.state.global_step:
            # Trainer has added what was not yet logged, but of this rank alone.
            unlogged = self.accelerator.gather(self._tr_loss.reshape(1)).mean().item() - self._tr_loss.item()
            logs["train_loss"] = (self._total_loss_scalar + unlogged) / self.state.global_step
        super().log(logs, start_time)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple:
        """Overrides Trainer to count the batches of the step for the log. They are sent to the device first: if
        Trainer counted their tokens on the host, the host would wait to send the count."""
        self.batches_in_use = epoch_iterator
        place = getattr(getattr(self.train_dataset, "loader_in_use", None), "state", None)
        self._began = {"place": place, "loss": self._tr_loss.clone(), "z_loss": self._tr_z_loss}
        send = partial(send_to_device, device=device, non_blocking=self.args.accelerator_config.non_blocking)
        batches, error = [], None
        try:
            batches.extend(map(send, itertools.islice(epoch_iterator, num_batches)))
        except StreamError as broken:
            error = str(broken)
        if place is not None and any(self.preemption.largest(error is not None)):
            self._break_off(error, place)
        batches, num_items = super().get_batch_samples(iter(batches), num_batches, device)
        for callback in self.callback_handler.callbacks:
            if hasattr(callback, "count_batches"):
                callback.count_batches(batches)
        return batches, num_items

    def _break_off(self, error: str | None, place: dict) -> None:
        """Ends the run, where a rank's stream cannot be read any further, as a user's error, exit code 2. Saves what
        was there before the step, which began at this place of the stream, unless the run began there too."""
        self._stop_if_non_finite()
        step = self.state.global_step
        is_new = step > 0 and not (Path(self.args.output_dir) / f"checkpoint-{step}").exists()
        errors, are_new = zip(*gather_object([(error, is_new)]), strict=True)
        told = list(filter(None, errors))
        if are_new[0]:  # one rank decides for all
            told.append(self._save_before_step(place))
        finish_process_group()
        with exit_on_user_error():
            raise ValueError("; ".join(told))

    def _run_epoch(self, *args, **kwargs):
        """Overrides Trainer, which would train one step too many when it resumes a run that had ended, also by early
        stopping (PatienceCallback)."""
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    # ------------------------------------------------------------ non-finite gradients
    def _get_grad_norm(self, model, grad_norm=None):
        """Overrides Trainer, which calls this before the update, to end the run at a non-finite norm.

        To read the norm the host must wait for the GPU. An optimizer that knows `found_inf` leaves weights and moments
        alone where the norm is non-finite, so the host reads it one step later, or before it logs, saves or evaluates.
        With any other optimizer it reads the norm at once.
        """
        self._stop_if_non_finite()
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        norm = _OnItsWay(grad_norm) if isinstance(grad_norm, torch.Tensor) else grad_norm
        optimizer = self._plain_optimizer
        if not isinstance(norm, _OnItsWay) or not getattr(optimizer, "_step_supports_amp_scaling", False):
            self._unchecked = norm, self._began
            self._stop_if_non_finite()
            return grad_norm
        optimizer.found_inf = norm.non_finite
        self._began |= {  # what the host will have changed before it knows the norm
            "rates": [group["lr"] for group in optimizer.param_groups],
            "schedule": self.lr_scheduler.state_dict(),
            "step": self.state.global_step,
            "epoch": self.state.epoch,
        }
        self._unchecked = norm, self._began
        return grad_norm

    @property
    def _plain_optimizer(self) -> Optimizer:
        """The optimizer without accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _maybe_log_save_evaluate(self, tr_loss, grad_norm, model, *args, **kwargs):
        control = self.control
        if control.should_log or control.should_save or control.should_evaluate or control.should_training_stop:
            self._stop_if_non_finite()
        if self.preemption.reason is not None and control.should_save and control.should_evaluate:
            control.should_evaluate = False  # which may take longer than the run still has: saved without it first
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, *args, **kwargs)
            control.should_save = control.should_evaluate = True
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, *args, **kwargs)

    def _determine_best_metric(self, metrics: dict[str, float], trial: object) -> bool:
        """Overrides Trainer, which with `--save_strategy best` saves where this is true, and so not where a run is told
        to stop after an evaluation that is no better. With `--load_best_model_at_end` only evaluations of steps that
        are saved count: after a better one between them Trainer would end with an older checkpoint or the last weights.
        A metric that needs rows of a kind that is not there, as of one corpus or denoiser, is the user's error."""
        with exit_on_user_error():
            key = best_metric_key(self.args)
            if key is not None and key not in metrics:
                raise ValueError(f"--metric_for_best_model {self.args.metric_for_best_model}: the evaluation has no "
                                 "row for it; give another metric, or more validation rows")  # fmt: skip
        saves_the_best = self.args.save_strategy == SaveStrategy.BEST
        if self.args.load_best_model_at_end and not (saves_the_best or self.control.should_save):
            return False
        return super()._determine_best_metric(metrics, trial) or self.preemption.reason is not None

    def _stop_if_non_finite(self) -> None:
        """If the last norm is non-finite: saves what was there before its step, prints the step and its examples, and
        exits with code 1. A step that the host has already counted is taken back first."""
        (norm, began), self._unchecked = self._unchecked, (None, {})
        value = norm.value() if isinstance(norm, _OnItsWay) else norm
        if value is None or math.isfinite(value):
            return
        if "step" in began:
            optimizer = self._plain_optimizer
            if hasattr(optimizer, "uncount_step"):  # torch's own optimizers count on the device
                optimizer.uncount_step()
            for group, rate in zip(optimizer.param_groups, began["rates"], strict=True):
                group["lr"] = rate
            self.lr_scheduler.load_state_dict(began["schedule"])
            self.state.global_step, self.state.epoch = began["step"], began["epoch"]
        self._tr_loss.copy_(began["loss"])
        self._tr_z_loss = began["z_loss"]
        step, kept = self.state.global_step, self._save_before_step(began["place"])
        examples = ", ".join(map(str, self._examples_of_step(step)))
        finish_process_group()
        if is_first_process():
            where = f"examples {examples}" if examples else "unknown examples"
            what = f"step {step + 1:,}: the gradient's norm is {value} ({where}); {kept}"
            advice = "Try a lower --learning_rate or a longer --warmup_steps, or look at these examples."
            print(f"{Path(sys.argv[0]).name}: error: {what}. {advice}", file=sys.stderr, flush=True)
        raise SystemExit(1)

    def _save_before_step(self, place: dict | None) -> str:
        """Saves the weights from before a step that began at this place of the stream; says where they are."""
        if place is not None:
            self.train_dataset.loader_in_use.state = place
        if self.args.save_strategy == SaveStrategy.NO:
            return "nothing was saved (--save_strategy no)"
        self._save_checkpoint(self.model_wrapped, None)
        return f"{self.args.output_dir}/checkpoint-{self.state.global_step} holds the weights from before this step"

    def _examples_of_step(self, step: int) -> list[int]:
        """Numbers of the training examples in the global batch of a step (from 0); [] with a sampler of Trainer's."""
        size = global_batch_size(self.args)
        if hasattr(self.train_dataset, "examples_of_step"):
            return self.train_dataset.examples_of_step(step, size)
        sampler = self._get_train_sampler()
        if not hasattr(sampler, "num_examples"):
            return []
        steps_per_epoch = max(1, math.ceil(len(sampler) / size))
        sampler.set_epoch(step // steps_per_epoch)
        first = step % steps_per_epoch * size
        return [number % sampler.num_examples for number in itertools.islice(sampler, first, first + size)]

    # ------------------------------------------------------------ evaluation
    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | str | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs,
    ) -> dict[str, float]:
        """Overrides Seq2SeqTrainer, which counts twice the rows repeated to fill the last batch of all ranks."""
        if isinstance(eval_dataset, str) and eval_dataset in self.evaluation_tasks:
            task = self.evaluation_tasks[eval_dataset]
            self.compute_metrics, self.class_label_ids = task.compute_metrics, task.class_label_ids
            self.args.predict_with_generate, self._max_length = task.predict_with_generate, task.max_length
        self._prepare_prediction(gen_kwargs)
        metrics = Trainer.evaluate(self, eval_dataset, ignore_keys, metric_key_prefix)
        if eval_dataset is None and self.summarise is not None:
            summary = self.summarise(metrics)
            self.log(dict(summary))
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, summary)
            metrics |= summary
        return metrics

    def predict(
        self, test_dataset: Dataset, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test", **gen_kwargs
    ) -> PredictionOutput:
        """Overrides Seq2SeqTrainer to predict every row exactly once."""
        self._prepare_prediction(gen_kwargs)
        return Trainer.predict(self, test_dataset, ignore_keys, metric_key_prefix)

    def _prepare_prediction(self, gen_kwargs: dict) -> None:
        """Sets the arguments of `generate`, and gathers the rows of all ranks without those that fill up a batch."""
        longest = self.args.generation_max_length or self._max_length
        chosen = {"max_length": longest, "num_beams": self.args.generation_num_beams, "do_sample": False}
        chosen["num_return_sequences"] = 1
        # Not into the model's generation_config, which is saved with every checkpoint.
        chosen["cache_implementation"] = "static" if self.args.generation_cache == "static" else None
        self._gen_kwargs = {name: value for name, value in chosen.items() if value is not None} | gen_kwargs
        self.gather_function = self.accelerator.gather_for_metrics

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict,
        prediction_loss_only: bool,  # noqa: ARG002
        ignore_keys: list[str] | None = None,
        **gen_kwargs,
    ) -> tuple[None, tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]:
        """(None, (generated tokens or -1 [B, 1 or T], statistics [B, 5 + n]), labels [B, T] or None); the statistics
        include the loss."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs.get("labels")
        with torch.no_grad(), self.compute_loss_context_manager():
            statistics, encoded = self._score(model, inputs, labels)
        generated = torch.full_like(statistics[:, :1], -1, dtype=torch.long)
        if self.args.predict_with_generate:
            sources = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
            if encoded is not None:
                sources["encoder_outputs"] = encoded
            own, source, written = self.model.generation_config, inputs["input_ids"].shape[1], []
            longest, beams = (self._gen_kwargs.get(n) or getattr(own, n) or 1 for n in ("max_length", "num_beams"))
            size = rows_to_generate(self.model.config, source, longest, beams, self.args.device, self.args.bf16)
            for part in self._parts(sources, size):
                if encoded is not None:
                    part["encoder_outputs"] = BaseModelOutput(last_hidden_state=part["encoder_outputs"])
                with self.accelerator.autocast():  # accelerate wraps the model's forward; generate() calls its parts
                    written.append(super().prediction_step(model, part, False, ignore_keys, **gen_kwargs)[1])
            generated = torch.cat(written)
        return None, (generated, statistics), labels

    def _parts(self, rows: dict[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
        """The rows of a batch, at most `size` at a time. Under ZeRO-3 and FSDP2 all at once, since all ranks need as
        many forward passes."""
        whole = is_deepspeed_zero3_enabled() or self.is_fsdp_enabled
        there = {name: values for name, values in rows.items() if values is not None}
        return parts(there, len(rows["input_ids"]) if whole else size)

    def _score(self, model, inputs, labels: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(statistics [B, 5 + n], encoder's output [B, S, d_model] or None) of `_score_rows`, of as many rows at a time
        as memory allows: 64 rows of 128 tokens of mT5's vocabulary have 8 GB of logits."""
        positions = 0 if labels is None else labels.shape[1]
        if self.class_label_ids is not None and not self.args.predict_with_generate:
            positions += int(self.class_label_ids.ne(IGNORE_INDEX).sum())
        size = rows_to_score(self.model.config, inputs["input_ids"].shape[1], positions)
        scored = [self._score_rows(model, part, part.get("labels")) for part in self._parts(inputs, size)]
        statistics, encoded = zip(*scored, strict=True)
        return torch.cat(statistics), None if encoded[0] is None else torch.cat(encoded)

    def _score_rows(self, model, inputs, labels: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Statistics [B, 5 + n] of rows by teacher forcing, on their labels and on every class label in one forward
        pass, and the encoder's output [B, S, d_model], or None where there is nothing to score.

        The texts are joined into one decoder sequence with a block-diagonal causal mask, so encoder and cross-attention
        keys are computed once; relative positions within each text stay the same. If every row's label is a class
        label, it is scored from that class's logits; otherwise the labels are fed as well.
        """
        rows, device = len(inputs["input_ids"]), inputs["input_ids"].device
        statistics = torch.zeros(rows, len(STATISTICS), device=device)
        statistics[:, STATISTICS.index("predicted_class")] = -1
        texts, gold = [], None
        if self.class_label_ids is not None and not self.args.predict_with_generate:
            classes = self.class_label_ids.to(device)
            texts = [label[label.ne(IGNORE_INDEX)].expand(rows, -1) for label in classes]
            gold = None if labels is None else _which_class(labels, classes)
        num_classes = len(texts)
        if labels is not None and gold is None:
            texts.append(labels)
        if not texts:
            return statistics, None
        lengths, targets = [text.shape[1] for text in texts], torch.cat(texts, dim=1)
        config = self.model.config
        decoder_inputs = [shift_right(text, config.decoder_start_token_id, config.pad_token_id) for text in texts]
        sources = {name: inputs[name] for name in ("input_ids", "attention_mask", *SEGMENTS) if name in inputs}
        if "target_segments" in inputs:  # packed examples: each begins with the start token
            decoder_inputs = [inputs["decoder_input_ids"]]
        if len(texts) > 1:
            mask = _block_causal_mask(lengths, device, rows)
            # transformers joins this mask with one of its own, which is boolean under sdpa.
            joined = shape_of(config).merged and config._attn_implementation == "sdpa"
            sources["decoder_attention_mask"] = mask.eq(0) if joined else mask
            if family_of(config).rotary:
                places = torch.cat([torch.arange(length, device=device) for length in lengths])
                sources["decoder_position_ids"] = places.expand(rows, -1)
        output = model(**sources, decoder_input_ids=torch.cat(decoder_inputs, dim=1), use_cache=False)
        logits, encoded = output.logits, output.encoder_last_hidden_state
        written = logits.argmax(-1)
        if labels is not None:
            where = torch.arange(targets.shape[1], device=device)[-labels.shape[1] :].expand(rows, -1)
            if gold is not None:  # the places of the row's class; those beyond the end of its text have no label
                first = torch.tensor([0, *lengths], device=device).cumsum(0)[gold, None]
                labels = classes[gold]
                where = (first + torch.arange(labels.shape[1], device=device)).clamp(max=targets.shape[1] - 1)
            elsewhere = gold is not None or len(texts) > 1
            own = logits[torch.arange(rows, device=device)[:, None], where] if elsewhere else logits
            correct = written.gather(1, where).eq(labels)
            nats = nats_of(own, labels)
            statistics[:, :4] = _teacher_forced(nats, labels, correct)
            if hasattr(self.data_collator, "statistics"):  # an objective's (objectives/objective.py)
                more = self.data_collator.statistics(nats, labels, correct, inputs)
                statistics = torch.cat([statistics, more], dim=1)
        if num_classes:
            right = written.eq(targets).split(lengths, dim=1)[:num_classes]
            right = torch.stack([tokens.all(-1) for tokens in right], dim=1)
            found = torch.where(right.any(-1), right.int().argmax(-1), -1)
            statistics[:, STATISTICS.index("predicted_class")] = found.float()
        return statistics, encoded


def _loss_and_accuracy(output: EvalPrediction) -> dict[str, float]:
    return token_metrics(output.predictions[1])


def _which_class(labels: torch.Tensor, classes: torch.Tensor) -> torch.Tensor | None:
    """[B] class index of each row's labels [B, T'] among the class labels [C, T]; None if any row has no such class."""
    length = max(labels.shape[1], classes.shape[1])
    labels, classes = (F.pad(ids, (0, length - ids.shape[1]), value=IGNORE_INDEX) for ids in (labels, classes))
    same = labels[:, None].eq(classes).all(-1)
    return same.int().argmax(-1) if bool(same.any(-1).all()) else None


def _block_causal_mask(lengths: list[int], device: torch.device, rows: int) -> torch.Tensor:
    """[rows, 1, P, P] for P = sum(lengths): 0 for this and earlier positions of the same block, elsewhere the lowest
    float32."""
    allowed = torch.block_diag(*(torch.ones(length, length, device=device).tril() for length in lengths)).bool()
    mask = torch.zeros(allowed.shape, device=device).masked_fill_(~allowed, torch.finfo(torch.float32).min)
    return mask.expand(rows, 1, -1, -1)


def _teacher_forced(nats: torch.Tensor, labels: torch.Tensor, correct: torch.Tensor) -> torch.Tensor:
    """[B, 4] nats, tokens, correct tokens and exact match of each example; nats, labels and correct [B, T] (whether the
    label's token is the most likely one)."""
    counted = labels.ne(IGNORE_INDEX)
    exact = (correct | ~counted).all(-1)
    return torch.stack([nats.sum(-1), counted.sum(-1).float(), correct.sum(-1).float(), exact.float()], dim=1)
