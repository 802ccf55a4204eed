"""`Seq2SeqTrainer` made exact for T5: loss over the global batch, evaluation that counts every token and example once.

Evaluation needs one forward pass where others generate: a greedy decoder gives the text of a label if and only if, fed
with that label, its most likely token is the label's at every position, EOS included. One teacher-forced pass per
class label therefore tells exactly which label greedy decoding would have written, or that it would have been none.

Legend of shapes: B batch, T target length, V vocabulary, C class labels.
"""

import dataclasses
import os
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import SequentialSampler
from transformers import EarlyStoppingCallback, Seq2SeqTrainer, Trainer

from arguments_t5 import answers, is_first_process, print_once
from callbacks_t5 import (
    LossCurveCallback,
    MetricsFileCallback,
    T5ProgressCallback,
    ThroughputCallback,
    end_summary,
    human_bytes,
    human_count,
    install_callbacks,
    run_record,
    start_summary,
    write_json,
)
from constants import HARDWARE_PEAKS
from data_t5 import ChunkDataset, EpochSampler
from metrics_t5 import STATISTICS
from model_t5 import IGNORE_INDEX, count_parameters, shift_right, token_mean_loss
from optimizers_t5 import build_scheduler, optimizer_class_and_kwargs


class T5Trainer(Seq2SeqTrainer):
    """Seq2SeqTrainer with T5's loss, optimizers, schedules, data order and evaluation.

    class_label_ids: [C, T] token ids of the class labels (EOS included, padded with -100). With them evaluation scores
    by teacher forcing and generates nothing, unless `--predict_with_generate` asks for the texts themselves.
    """

    def __init__(self, *args, class_label_ids: torch.Tensor | None = None, **kwargs):
        training_args = kwargs["args"]
        super().__init__(
            *args,
            compute_loss_func=partial(token_mean_loss, label_smoothing=training_args.label_smoothing_factor),
            **kwargs,
        )
        self.optimizer_cls_and_kwargs = optimizer_class_and_kwargs(training_args)
        self.class_label_ids = class_label_ids

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """The schedule of `--lr_scheduler_type` as optimizers_t5 defines it."""
        if self.lr_scheduler is None:
            self.lr_scheduler = build_scheduler(self.args, optimizer or self.optimizer, num_training_steps)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # ------------------------------------------------------------ data order
    def _get_train_sampler(self, train_dataset=None):
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "random":
            return super()._get_train_sampler(dataset)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        if isinstance(dataset, ChunkDataset):
            return EpochSampler(len(dataset), seed, group=global_batch_size(self.args), count_epochs=True)
        return EpochSampler(len(dataset), seed)

    def _get_eval_sampler(self, eval_dataset):
        return SequentialSampler(eval_dataset)  # predictions come back in the order of the rows

    # ------------------------------------------------------------ evaluation
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval", **gen_kwargs):
        """As Seq2SeqTrainer's, but rows that fill up the last batch of several ranks are not counted twice."""
        self._gen_kwargs = self._generation_arguments(gen_kwargs)
        self.gather_function = self.accelerator.gather_for_metrics
        return Trainer.evaluate(self, eval_dataset, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix="test", **gen_kwargs):
        """As Seq2SeqTrainer's, with every row exactly once."""
        self._gen_kwargs = self._generation_arguments(gen_kwargs)
        self.gather_function = self.accelerator.gather_for_metrics
        return Trainer.predict(self, test_dataset, ignore_keys, metric_key_prefix)

    def _generation_arguments(self, gen_kwargs: dict) -> dict:
        chosen = {"max_length": self.args.generation_max_length, "num_beams": self.args.generation_num_beams}
        return {name: value for name, value in chosen.items() if value is not None} | gen_kwargs

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):
        """(None, (generated tokens or -1 [B, 1 or T], statistics [B, 5]), labels [B, T]); the loss is in the statistics."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs.get("labels")
        with torch.no_grad(), self.compute_loss_context_manager():
            statistics = self._score(model, inputs, labels)
        generated = torch.full_like(statistics[:, :1], -1, dtype=torch.long)
        if self.args.predict_with_generate:
            sources = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
            _, generated, _ = super().prediction_step(model, sources, False, ignore_keys, **gen_kwargs)
        if labels is None:
            labels = torch.full_like(generated[:, :1], IGNORE_INDEX)
        return None, (generated, statistics), labels

    def _score(self, model, inputs, labels: torch.Tensor | None) -> torch.Tensor:
        """Statistics [B, 5] of a batch by teacher forcing, on the labels and on every class label."""
        sources = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
        statistics = torch.zeros(len(inputs["input_ids"]), len(STATISTICS), device=inputs["input_ids"].device)
        statistics[:, STATISTICS.index("predicted_class")] = -1
        encoder_outputs = None
        if labels is not None:
            outputs = model(**sources, decoder_input_ids=self._decoder_inputs(labels))
            statistics[:, :4] = _teacher_forced(outputs.logits, labels)
            encoder_outputs = (outputs.encoder_last_hidden_state,)
        if self.class_label_ids is not None and not self.args.predict_with_generate:
            for index, label in enumerate(self.class_label_ids.to(statistics.device)):
                label = label[: int(label.ne(IGNORE_INDEX).sum())].expand(len(statistics), -1).contiguous()
                outputs = model(
                    **sources, decoder_input_ids=self._decoder_inputs(label), encoder_outputs=encoder_outputs
                )
                encoder_outputs = (outputs.encoder_last_hidden_state,)
                written = outputs.logits.argmax(-1).eq(label).all(-1)
                statistics[written, STATISTICS.index("predicted_class")] = index
        return statistics

    def _decoder_inputs(self, labels: torch.Tensor) -> torch.Tensor:
        config = self.model.config
        return shift_right(labels, config.decoder_start_token_id, config.pad_token_id)


def _teacher_forced(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[B, 4] nats, tokens, correct tokens and exact match of each example; logits [B, T, V], labels [B, T]."""
    nats = F.cross_entropy(
        logits.float().transpose(1, 2), labels, ignore_index=IGNORE_INDEX, reduction="none"
    )  # 0 where ignored
    counted = labels.ne(IGNORE_INDEX)
    correct = logits.argmax(-1).eq(labels) & counted
    exact = (correct | ~counted).all(-1)
    return torch.stack([nats.sum(-1), counted.sum(-1).float(), correct.sum(-1).float(), exact.float()], dim=1)


# ---------------------------------------------------------------- a run from start to end
def global_batch_size(args) -> int:
    """Sequences of one optimizer step: per process x accumulation x processes."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * max(1, args.world_size)


def set_up_tracking(args) -> None:
    """W&B online when the user is logged in and it answers, else offline: one line says so, and nothing is waited for."""
    if "wandb" not in args.report_to:
        return
    os.environ.setdefault("WANDB_PROJECT", "t5_foundry")
    os.environ.setdefault("WANDB_DIR", args.output_dir)
    Path(os.environ["WANDB_DIR"]).mkdir(parents=True, exist_ok=True)
    if "WANDB_MODE" in os.environ:
        return
    import wandb

    reason = None if wandb.api.api_key else "not logged in"
    reason = reason or (None if answers(wandb.api.settings("base_url")) else "its server does not answer")
    if reason:
        os.environ["WANDB_MODE"] = "offline"
        folder = Path(os.environ["WANDB_DIR"]) / "wandb"
        print_once(f"W&B: {reason}, tracking offline; later: wandb sync {folder}/offline-run-* (--report_to none: off)")


def start_run(
    trainer: T5Trainer,
    title: str,
    flags: list,
    rows: dict[str, str],
    tokens_per_step: int | None,
    flops_per_sequence: int | None,
    examples: dict[str, int],
    fingerprints: dict[str, str],
) -> None:
    """Installs our callbacks, writes run.json and prints what the run will do and need.

    flags: the parsed dataclasses. Memory is what weights, gradients and optimizer take, without activations (in mixed
    precision the weights stay float32); disk is the checkpoints kept, one more while the next is written, and the model.
    """
    args, parameters = trainer.args, count_parameters(trainer.model)
    sequences = global_batch_size(args)
    peak = device_peak_flops(args.device, args.bf16)
    output_dir = Path(args.output_dir)
    callbacks = [
        ThroughputCallback(sequences, tokens_per_step, flops_per_sequence, peak and peak * max(1, args.world_size)),
        MetricsFileCallback(output_dir),
        LossCurveCallback(output_dir),
        T5ProgressCallback(),
    ]
    if args.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(args.early_stopping_patience))
    install_callbacks(trainer, callbacks)

    states = 0.01 if args.optim == "adafactor" else 2.0  # optimizer tensors per weight
    kept = 1 if args.save_strategy == "no" else (args.save_total_limit or 0) + 2
    summary = {
        "model": f"{human_count(parameters)} parameters ({trainer.model.config.model_type}, "
        f"d_model {trainer.model.config.d_model}, {trainer.model.config.num_layers} + "
        f"{trainer.model.config.num_decoder_layers} layers), dropout {trainer.model.config.dropout_rate}",
        **rows,
        "batch": f"{sequences} sequences a step ({args.per_device_train_batch_size} x "
        f"{args.gradient_accumulation_steps} accumulated x {max(1, args.world_size)} processes)",
        "optimizer": f"{args.optim}, peak {args.learning_rate:g}, {getattr(args.lr_scheduler_type, 'value', args.lr_scheduler_type)}",
        "device": f"{args.device}, {'bfloat16 mixed precision' if args.bf16 else 'float32'}",
        "memory": f"{human_bytes(parameters * 4 * (2 + states))} for weights, gradients and optimizer, plus activations",
        "disk": f"{human_bytes(parameters * 4 * (1 + (1 + states) * kept))} in {output_dir}",
    }
    start_summary(summary, title)
    if is_first_process():
        arguments = {}
        for group in flags:
            values = group.to_dict() if hasattr(group, "to_dict") else dataclasses.asdict(group)
            arguments |= values
        output_dir.mkdir(parents=True, exist_ok=True)
        record = run_record(arguments, trainer.model, tokens_per_step, fingerprints, examples)
        write_json(output_dir / "run.json", record)


def finish_run(trainer: T5Trainer, train_metrics: dict, shown: dict[str, str], next_command: str) -> dict:
    """Evaluates, saves model and tokenizer, writes all_results.json and says where everything is; returns the results."""
    results = dict(train_metrics)
    trainer.save_model()
    trainer.save_state()
    if trainer.eval_dataset is not None and trainer.args.eval_strategy != "no":
        results |= trainer.evaluate()
    if is_first_process():
        output_dir = Path(trainer.args.output_dir)
        write_json(output_dir / "all_results.json", results)
        numbers = {
            name.removeprefix("eval_").replace("_", " "): f"{value:.4f}"
            for name, value in results.items()
            if name.startswith("eval_") and not name.endswith(("runtime", "per_second", "preparation_time"))
        }
        files = "all_results.json, metrics.jsonl, loss.png, run.json"
        end_summary(numbers | shown | {"written to": f"{output_dir}: the model, {files}", "next": next_command})
    finish_process_group()
    return results


def device_peak_flops(device: torch.device, bf16: bool) -> float | None:
    """Peak matrix FLOP/s of a known GPU in the precision used; None where it is not known (no MFU is shown then)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peaks = [peak for known, peak in HARDWARE_PEAKS.items() if known in name]
    return peaks[0]["bf16" if bf16 else "tf32"] * 1e12 if peaks else None


def finish_process_group() -> None:
    """Leaves the process group together: gloo ranks that exit one by one abort each other now and then."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
