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
from requests.utils import get_netrc_auth
from torch.utils.data import SequentialSampler
from transformers import EarlyStoppingCallback, Seq2SeqTrainer, Trainer, TrainerCallback

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
from data_collator_t5 import T5DataCollator
from data_t5 import ChunkDataset, EpochSampler
from metrics_t5 import STATISTICS
from model_t5 import IGNORE_INDEX, count_parameters, shift_right, token_mean_loss
from optimizers_t5 import build_scheduler, optimizer_class_and_kwargs, scheduler_name


class _EpochCallback(TrainerCallback):
    """Tells the sampler which epoch begins. Trainer does so too, but where several ranks resume within an epoch, the
    data loader that skips the batches already seen hides the sampler one wrapper too deep."""

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **_):  # noqa: ARG002
        train_dataloader.set_epoch(int(state.epoch or 0))


class T5Trainer(Seq2SeqTrainer):
    """Seq2SeqTrainer with T5's loss, optimizers, schedules, data order and evaluation.

    class_label_ids: [C, T] token ids of the class labels (EOS included, padded with -100). With them evaluation scores
    by teacher forcing and generates nothing, unless `--predict_with_generate` asks for the texts themselves.
    """

    def __init__(self, *args, class_label_ids: torch.Tensor | None = None, **kwargs):
        training_args = kwargs["args"]
        if training_args.ddp_find_unused_parameters is None:
            training_args.ddp_find_unused_parameters = False  # T5 has none: a search at every step would be wasted
        super().__init__(
            *args,
            compute_loss_func=partial(token_mean_loss, label_smoothing=training_args.label_smoothing_factor),
            **kwargs,
        )
        self.optimizer_cls_and_kwargs = optimizer_class_and_kwargs(training_args)
        self.class_label_ids = class_label_ids
        self.add_callback(_EpochCallback())

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """The schedule of `--lr_scheduler_type` as optimizers_t5 defines it."""
        if self.lr_scheduler is None:
            self.lr_scheduler = build_scheduler(self.args, optimizer or self.optimizer, num_training_steps)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _issue_warnings_after_load(self, load_result):
        """As Trainer's, but embeddings that share another's tensor are not in the file and not missing."""
        missing = [name for name in load_result.missing_keys if name not in self.model.all_tied_weights_keys]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

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

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):  # noqa: ARG002
        """(None, (generated tokens or -1 [B, 1 or T], statistics [B, 6]), labels [B, T] or None); the statistics hold
        the loss."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs.get("labels")
        with torch.no_grad(), self.compute_loss_context_manager():
            statistics = self._score(model, inputs, labels)
        generated = torch.full_like(statistics[:, :1], -1, dtype=torch.long)
        if self.args.predict_with_generate:
            sources = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
            _, generated, _ = super().prediction_step(model, sources, False, ignore_keys, **gen_kwargs)
        return None, (generated, statistics), labels

    def _score(self, model, inputs, labels: torch.Tensor | None) -> torch.Tensor:
        """Statistics [B, 6] of a batch by teacher forcing, on its labels and on every class label in one forward pass.

        The texts to be scored stand side by side in one decoder sequence. A block-diagonal causal mask keeps them
        apart, and relative positions are the same within each, so encoder and cross-attention keys are computed once.
        """
        rows = len(inputs["input_ids"])
        texts = [] if labels is None else [labels]
        if self.class_label_ids is not None and not self.args.predict_with_generate:
            texts += [label.expand(rows, -1) for label in self.class_label_ids.to(inputs["input_ids"].device)]
        statistics = torch.zeros(rows, len(STATISTICS), device=inputs["input_ids"].device)
        statistics[:, STATISTICS.index("predicted_class")] = -1
        if not texts:
            return statistics
        length = max(text.shape[1] for text in texts)
        targets = torch.stack([F.pad(t, (0, length - t.shape[1]), value=IGNORE_INDEX) for t in texts], dim=1)
        config = self.model.config
        decoder_inputs = shift_right(targets, config.decoder_start_token_id, config.pad_token_id)
        sources = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
        if len(texts) > 1:
            sources["decoder_attention_mask"] = _block_causal_mask(len(texts), length, targets.device, rows)
        logits = model(**sources, decoder_input_ids=decoder_inputs.flatten(1)).logits.unflatten(1, targets.shape[1:])
        if labels is not None:
            statistics[:, :4] = _teacher_forced(logits[:, 0], targets[:, 0])
            if isinstance(self.data_collator, T5DataCollator):
                markers = torch.tensor([*self.data_collator.sentinel_ids, self.data_collator.eos_id])
                text = ~torch.isin(targets[:, 0], markers.to(targets.device))
                correct_text = (logits[:, 0].argmax(-1).eq(targets[:, 0]) & text).sum(-1)
                statistics[:, STATISTICS.index("correct_text_tokens")] = correct_text.float()
        classes = slice(1 if labels is not None else 0, None)
        written = (logits[:, classes].argmax(-1).eq(targets[:, classes]) | targets[:, classes].eq(IGNORE_INDEX)).all(-1)
        if written.shape[1]:
            found = torch.where(written.any(-1), written.int().argmax(-1), -1)
            statistics[:, STATISTICS.index("predicted_class")] = found.float()
        return statistics


def _block_causal_mask(blocks: int, length: int, device: torch.device, rows: int) -> torch.Tensor:
    """[rows, 1, blocks * length, blocks * length]: 0 where a position of the same block is not later, else lowest."""
    allowed = torch.block_diag(*[torch.ones(length, length, device=device).tril()] * blocks).bool()
    mask = torch.zeros(allowed.shape, device=device).masked_fill_(~allowed, torch.finfo(torch.float32).min)
    return mask.expand(rows, 1, -1, -1)


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
    return args.train_batch_size * args.gradient_accumulation_steps * max(1, args.world_size)


def set_up_tracking(args) -> None:
    """W&B online when the user is logged in and it answers, else offline: a line says so, and nothing is waited for."""
    if "wandb" not in args.report_to:
        return
    os.environ.setdefault("WANDB_PROJECT", "t5_foundry")
    os.environ.setdefault("WANDB_DIR", args.output_dir)
    Path(os.environ["WANDB_DIR"]).mkdir(parents=True, exist_ok=True)
    if "WANDB_MODE" in os.environ:
        return
    # Not through wandb itself: its session reads the mode once, and here it is still to be decided.
    import wandb

    server = os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url
    logins = [server] if "WANDB_BASE_URL" in os.environ else [server, "https://api.wandb.ai"]  # the second till 0.30
    logged_in = {"WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"} & set(os.environ) or any(map(get_netrc_auth, logins))
    reason = None if logged_in else "not logged in"
    reason = reason or (None if answers(server) else f"{server} does not answer")
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
    precision the weights stay float32); disk is the model, and the checkpoints while one more is being written.
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
    kept = 0 if args.save_strategy == "no" else (args.save_total_limit or 1) + args.load_best_model_at_end + 1
    unlimited = " and all later checkpoints" if kept and not args.save_total_limit else ""
    summary = {
        "model": f"{human_count(parameters)} parameters ({trainer.model.config.model_type}, "
        f"d_model {trainer.model.config.d_model}, {trainer.model.config.num_layers} + "
        f"{trainer.model.config.num_decoder_layers} layers), dropout {trainer.model.config.dropout_rate}",
        **rows,
        "batch": f"{sequences} sequences a step ({args.train_batch_size} x "
        f"{args.gradient_accumulation_steps} accumulated x {max(1, args.world_size)} processes)",
        "optimizer": f"{args.optim}, peak {args.learning_rate:g}, {scheduler_name(args)}",
        "device": f"{args.device}, {'bfloat16 mixed precision' if args.bf16 else 'float32'}",
        "memory": f"{human_bytes(parameters * 4 * (2 + states))} (weights, gradients, optimizer), plus activations",
        "disk": f"{human_bytes(parameters * 4 * (1 + (1 + states) * kept))}{unlimited} in {output_dir}",
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
    """Evaluates, saves model and tokenizer, writes all_results.json, says where it all is and returns the results."""
    results = dict(train_metrics)
    trainer.save_model()
    trainer.save_state()
    if trainer.eval_dataset is not None and trainer.args.eval_strategy != "no":
        results |= _evaluated_just_now(trainer) or trainer.evaluate()
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


def _evaluated_just_now(trainer: T5Trainer) -> dict:
    """The metrics of an evaluation at the last step, if these very weights have had one; else nothing."""
    if trainer.args.load_best_model_at_end or len(trainer.state.log_history) < 2:
        return {}
    last = trainer.state.log_history[-2]  # the closing line of the training comes after it
    just_now = "eval_loss" in last and last["step"] == trainer.state.global_step
    return {name: value for name, value in last.items() if name != "step"} if just_now else {}


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
