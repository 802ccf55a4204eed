"""Tests of trainer_t5: what must not change a run (accumulation, ranks, workers, interruptions), and exact evaluation.

Hermetic: a T5 of a few thousand weights on made-up tokens. Two ranks are this file itself under torchrun, once for all
tests that need them.
"""

import contextlib
import functools
import io
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import types
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from absl.testing import parameterized
from accelerate import skip_first_batches
from helpers import masked_by_bits, on_two_ranks
from safetensors.torch import load_file, save_file
from torch.utils.data import IterableDataset
from transformers import (
    TrainerCallback,
    TrainerState,
    set_seed,
)

from benchmarks.kept import kept_bytes
from constants import PREEMPTED_EXIT_CODE
from data_collator_t5 import shift_right
from foundry.arguments.model import ModelArguments
from foundry.arguments.task import TaskArguments
from foundry.arguments.training import PreTrainingArguments, check_training, global_batch_size
from foundry.common.errors import UserError
from foundry.common.ranks import finish_process_group
from foundry.common.whole_folders import checkpoints_of
from foundry.corpora.chunks import ChunkDataset
from foundry.model_t5 import build_config, create_model, set_attention
from foundry.modeling import found_answers, rows_at_a_time
from foundry.modeling.loss import STATISTICS, token_metrics
from foundry.objectives.metrics import language_model_metrics
from foundry.objectives.spans import SpanCorruption
from foundry.report.report import Report
from foundry.runs.decision import Decision
from foundry.runs.memory import device_peak_flops
from foundry.runs.run import TrainingRun
from foundry.trainer_t5 import T5Trainer
from foundry.training.evaluation import score_batch
from foundry.training.optimizers import learning_rate_factor
from foundry.training.saving import load_weights

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 64
SHAPE = dict(d_model=16, d_kv=8, d_ff=32, num_heads=2, num_layers=1, num_decoder_layers=1)
STEPS_PER_EPOCH, GLOBAL_BATCH = 5, 32
BYTES_PER_TOKEN = 3.5
# Three classes whose labels share a beginning: [token ids, EOS], padded with -100.
LABELS = torch.tensor([[40, 41, 1, -100], [40, 42, 43, 1], [44, 1, -100, -100]])


# ---------------------------------------------------------------- what the runs are made of
class Words:
    """As much of a tokenizer as the collator looks at: words 2 to 55 and eight sentinels."""

    eos_token_id, pad_token_id, name_or_path = 1, 0, "words"

    def get_vocab(self):
        return {"<pad>": 0, "</s>": 1} | {f"<extra_id_{i}>": VOCABULARY - 1 - i for i in range(8)}


def collator() -> SpanCorruption:
    return SpanCorruption(Words(), input_seq_length=32)


def chunks(count: int, seed: int) -> ChunkDataset:
    """Chunks of patterns that can be learnt: each token is followed by one of two others."""
    length, generator = collator().tokens_length, np.random.default_rng(seed)
    tokens = np.cumsum(generator.integers(1, 3, size=count * length + 3)) % 50 + 2
    return ChunkDataset(tokens.astype(np.uint16), length, seed=seed)


def ragged_rows(count: int, seed: int) -> list[dict]:
    """Rows of a made-up three-class task with sources of 3 to 9 tokens: the class is the source's second token % 3."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        source = generator.integers(2, 40, size=generator.integers(3, 10)).tolist()
        label = LABELS[source[1] % 3]
        rows.append({"input_ids": source + [1], "labels": label[label >= 0].tolist()})
    return rows


def pad_rows(rows: list[dict]) -> dict[str, torch.Tensor]:
    def padded(name: str, filler: int) -> torch.Tensor:
        tensors = [torch.tensor(row[name]) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=filler)

    batch = {"input_ids": padded("input_ids", 0)}
    batch["attention_mask"] = batch["input_ids"].ne(0).long()
    if "labels" in rows[0]:
        batch["labels"] = padded("labels", -100)
        batch["decoder_input_ids"] = shift_right(batch["labels"], 0, 0)
    return batch


def make_model(seed: int = 0, **overrides):
    set_seed(seed)
    return create_model(build_config("tiny", VOCABULARY, SHAPE | {"dropout_rate": 0.0} | overrides))


def arguments(folder, **flags) -> PreTrainingArguments:
    chosen = dict(output_dir=str(folder), report_to=["none"], use_cpu=True, disable_tqdm=True, max_steps=12)
    chosen |= dict(per_device_train_batch_size=32, gradient_accumulation_steps=1, warmup_steps=4, logging_steps=1)
    chosen |= dict(eval_strategy="no", save_strategy="no", seed=7)
    chosen |= flags
    chosen["warmup_steps"] = min(chosen["warmup_steps"], max(0, chosen["max_steps"] - 1))
    args = PreTrainingArguments(**chosen)
    check_training(args, "pre-training from scratch")
    return args


def make_trainer(folder, model=None, rows=None, collate=None, eval_dataset=None, **flags) -> T5Trainer:
    """A T5Trainer on chunks, or on `rows` where given; `flags` are training flags. Its metrics are pre-training's."""
    metrics = functools.partial(language_model_metrics, bytes_per_token=BYTES_PER_TOKEN)
    return T5Trainer(
        model=make_model() if model is None else model,
        args=arguments(folder, **flags),
        train_dataset=chunks(STEPS_PER_EPOCH * GLOBAL_BATCH + 9, seed=3) if rows is None else rows,
        eval_dataset=eval_dataset,
        data_collator=collate or (collator() if rows is None else pad_rows),
        compute_metrics=metrics if rows is None else None,
    )


def curve(trainer, key: str = "loss") -> list[float]:
    return [line[key] for line in trainer.state.log_history if key in line]


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def quietly(function, *args, **kwargs):
    """Runs `function` without its printed log lines; returns (result, what it printed)."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = function(*args, **kwargs)
    return result, printed.getvalue()


def trained(folder, resume=None, **options) -> T5Trainer:
    """A trainer after its training; not by Muon, whose products in bfloat16 would hide float32's roundings."""
    trainer = make_trainer(folder, **{"optim": "adamw_rms_scaled"} | options)
    quietly(trainer.train, resume_from_checkpoint=resume)
    return trainer


class Recorder:
    """A collator that keeps what it made."""

    def __init__(self):
        self.collator, self.batches = collator(), []
        self.statistics = self.collator.statistics

    def __call__(self, examples):
        self.batches.append(self.collator(examples))
        return self.batches[-1]


# ---------------------------------------------------------------- two ranks
def two_ranks(folder: Path) -> None:
    """What each of two ranks runs; rank 0 writes results.pt."""
    results = {}
    for name, rows in (("chunks", None), ("ragged", ragged_rows(192, seed=5))):
        trainer = trained(folder / name, rows=rows, per_device_train_batch_size=8, gradient_accumulation_steps=2)
        assert trainer.args.world_size == 2 and global_batch_size(trainer.args) == 32
        results[name] = (curve(trainer), weights(trainer))
    for name, rows, data in (("chunks", None, chunks(21, 4)), ("ragged", ragged_rows(8, 1), ragged_rows(21, 2))):
        trainer = make_trainer(folder / "eval", rows=rows, eval_dataset=data, per_device_eval_batch_size=4)
        results[f"{name}_eval"] = quietly(trainer.evaluate)[0]
        results[f"{name}_predict"] = trainer.predict(data).predictions[1]
    trainer = make_trainer(folder / "epochs", rows=ragged_rows(64, 5), per_device_train_batch_size=8)
    loader, results["resumed_batches"] = trainer.get_train_dataloader(), []
    for epoch in (0.5, 1.5):  # a run resumes within each
        trainer.callback_handler.train_dataloader = loader
        trainer.callback_handler.on_epoch_begin(trainer.args, TrainerState(epoch=epoch), trainer.control)
        results["resumed_batches"].append(next(iter(skip_first_batches(loader, 1)))["input_ids"].tolist())
    if trainer.is_world_process_zero():
        torch.save(results, folder / "results.pt")
    finish_process_group()


@functools.cache
def two_ranks_results() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        on_two_ranks(__file__, folder, PYTHONPATH=os.pathsep.join(sys.path))
        return torch.load(Path(folder) / "results.pt", weights_only=False)


class TrainerTest(parameterized.TestCase):
    def assert_same_run(self, found, expected, rtol=2e-5, atol=1e-5):
        """(losses, weights) equal to float32 rounding."""
        np.testing.assert_allclose(found[0], expected[0], rtol=rtol)
        for name, weight in expected[1].items():
            torch.testing.assert_close(found[1][name], weight, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


class SameRunTest(TrainerTest):
    """One global batch of 32 is one global batch of 32, however it is split."""

    @parameterized.parameters("chunks", "ragged")
    def test_accumulation_and_ranks_change_nothing(self, kind):
        rows = None if kind == "chunks" else ragged_rows(192, seed=5)
        whole = trained(self.folder / "whole", rows=rows)
        expected = (curve(whole), weights(whole))
        self.assertLen(expected[0], 12)
        self.assertLess(expected[0][-1], expected[0][0] - 0.2)  # it learns
        split = dict(per_device_train_batch_size=8, gradient_accumulation_steps=4)
        accumulated = trained(self.folder / "accumulated", rows=rows, **split)
        self.assert_same_run((curve(accumulated), weights(accumulated)), expected)
        self.assert_same_run(two_ranks_results()[kind], expected)

    def test_two_ranks_that_resume_in_another_epoch_see_other_batches(self):
        self.assertNotEqual(*two_ranks_results()["resumed_batches"])

    def test_rows_grouped_by_length_depend_on_seed_and_epoch_alone(self):
        orders = []
        for split in (dict(per_device_train_batch_size=32), dict(gradient_accumulation_steps=4)):
            trainer = make_trainer(self.folder, rows=ragged_rows(192, 5), **dict(per_device_train_batch_size=8) | split)
            trainer.args.train_sampling_strategy = "group_by_length"
            sampler = trainer.rows.order()
            for epoch in (1, 2):
                torch.rand(epoch)  # as dropout does
                sampler.set_epoch(epoch)
                orders.append(list(sampler))
                self.assertCountEqual(orders[-1], range(192))
        self.assertEqual(orders[:2], orders[2:])
        self.assertNotEqual(orders[0], orders[1])

    def test_the_logged_loss_is_the_mean_over_all_target_tokens(self):
        rows = ragged_rows(192, seed=5)
        trainer = trained(
            self.folder, rows=rows, max_steps=1, per_device_train_batch_size=8, gradient_accumulation_steps=4
        )
        order = np.random.default_rng([7, 0]).permutation(192)[:32]  # seed 7, epoch 0
        batch = pad_rows([rows[i] for i in order])
        with torch.no_grad():
            logits = make_model()(**{k: v for k, v in batch.items() if k != "labels"}).logits
        expected = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.assertAlmostEqual(curve(trainer)[0], expected.item(), delta=1e-5)

    def test_worker_processes_change_nothing(self):
        alone = trained(self.folder, max_steps=7)
        workers = trained(self.folder, max_steps=7, dataloader_num_workers=2)
        self.assertEqual(curve(alone), curve(workers))

    def test_every_epoch_has_another_order_other_masks_and_leaves_out_other_chunks(self):
        recorder = Recorder()
        trained(self.folder, collate=recorder, max_steps=10)
        rows = [tuple(row.tolist()) for batch in recorder.batches[:10] for row in batch["input_ids"]]
        self.assertEqual(len(set(rows[:160])), 160)
        self.assertGreater(len(set(rows)), 310)  # chunks come again, but very seldom under the same mask
        self.assertEqual([b["input_ids"].shape[0] for b in recorder.batches[:10]], [32] * 10)

    def test_seed_decides_the_order(self):
        runs = [trained(self.folder, max_steps=2, **seeds) for seeds in (dict(), dict(data_seed=7), dict(data_seed=8))]
        self.assertEqual(curve(runs[0]), curve(runs[1]))
        self.assertNotEqual(curve(runs[0]), curve(runs[2]))

    def test_label_smoothing_is_part_of_the_loss(self):
        smoothed = trained(self.folder, max_steps=1, label_smoothing_factor=0.5)
        recorder = Recorder()
        plain = trained(self.folder, max_steps=1, collate=recorder)
        batch = recorder.batches[0]
        with torch.no_grad():
            logits = make_model()(input_ids=batch["input_ids"], decoder_input_ids=batch["decoder_input_ids"]).logits
        for trainer, smoothing in ((plain, 0.0), (smoothed, 0.5)):
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=smoothing)
            self.assertAlmostEqual(curve(trainer)[0], loss.item(), delta=1e-5)

    def test_global_batch_counts_every_device_of_a_process(self):
        args = arguments(self.folder, per_device_train_batch_size=3, gradient_accumulation_steps=5)
        self.assertEqual(global_batch_size(args), 15)
        args._n_gpu = 2  # torch's DataParallel: one process, two GPUs
        self.assertEqual(global_batch_size(args), 30)


class LibraryTest(TrainerTest):
    """T5Trainer with data and arguments that no script of ours has made."""

    def test_rows_of_any_kind_are_trained_on_and_have_a_loss(self):
        class Stream(IterableDataset):
            def __iter__(self):
                return iter(rows)

        rows = ragged_rows(64, seed=5)
        ordered = dict(max_steps=2, train_sampling_strategy="sequential")
        trainers = [make_trainer(self.folder, rows=kind, eval_dataset=rows[:8], **ordered) for kind in (rows, Stream())]
        for trainer in trainers:
            trainer.train()
        self.assertEqual(*map(curve, trainers))
        metrics = trainers[0].evaluate()
        self.assertGreater(metrics["eval_loss"], 0)
        self.assertIn("eval_token_accuracy", metrics)

    def test_arguments_that_are_not_complete(self):
        args = PreTrainingArguments(output_dir=str(self.folder), report_to=["none"], eval_strategy="no")
        trainer = T5Trainer(model=make_model(), args=args, train_dataset=ragged_rows(4, seed=5), data_collator=pad_rows)
        with self.assertRaisesRegex(ValueError, "check_training"):
            trainer.train()

    def test_workers_need_numbered_rows(self):
        class Stream(IterableDataset):
            def __iter__(self):
                return iter(ragged_rows(64, seed=5))

        trainer = make_trainer(self.folder, rows=Stream(), max_steps=2, dataloader_num_workers=1)
        with self.assertRaisesRegex(ValueError, "--dataloader_num_workers 1"):
            trainer.train()


class FailureTest(TrainerTest):
    def test_the_next_run_of_the_process_has_its_signals_and_no_workers_of_this_one(self):
        trainer, before = make_trainer(self.folder, dataloader_num_workers=1), signal.getsignal(signal.SIGINT)
        with mock.patch.object(T5Trainer, "compute_loss", side_effect=KeyError("a bug")):
            try:
                trainer.train()
            except KeyError as error:
                kept = error  # as a notebook does, and with it all that its traceback holds
        self.assertIn("a bug", kept.args)
        self.assertEqual(signal.getsignal(signal.SIGINT), before)  # whose handler would keep the model, too
        self.assertEmpty(multiprocessing.active_children())

    def test_a_killed_worker_costs_one_line_and_no_step(self):
        flags = dict(save_strategy="steps", save_steps=100, max_steps=9, dataloader_num_workers=1)
        whole = trained(self.folder / "whole", **flags)
        trainer = make_trainer(self.folder / "killed", optim="adamw_rms_scaled", **flags)

        class Kill(TrainerCallback):
            def on_step_end(self, _args, state, *_, **__):
                if state.global_step == 3:
                    for worker in multiprocessing.active_children():
                        os.kill(worker.pid, signal.SIGKILL)

        trainer.add_callback(Kill())
        with contextlib.redirect_stderr(io.StringIO()) as said, self.assertRaises(SystemExit) as ended:
            quietly(trainer.train)
        self.assertEqual(ended.exception.code, 1)
        line = r"(?m)^\S*: error: a data worker of rank 0 was killed.*/checkpoint-\d holds the weights .*\. Resume .*$"
        self.assertRegex(said.getvalue(), line)
        self.assertNotIn("Traceback", said.getvalue())
        (checkpoint,) = (self.folder / "killed").glob("checkpoint-*")
        self.assertBetween(int(checkpoint.name[-1]), 3, 8)
        resumed = trained(self.folder / "killed", str(checkpoint), model=make_model(99), **flags)
        self.assertEqual(curve(resumed), curve(whole))

    def test_no_process_is_forked_once_the_training_has_begun(self):
        """A process that is forked while autograd's or gloo's threads enter Python waits for ever."""
        forks, fork, begun = [], os.fork, []

        def counted():
            forks.append(len(begun))
            return fork()

        class Begin(TrainerCallback):
            def on_train_begin(self, *_, **__):
                begun.append(1)

        flags = dict(dataloader_num_workers=2, max_steps=14, save_strategy="steps", save_steps=3, save_total_limit=None)
        flags |= dict(eval_dataset=chunks(9, 4), eval_strategy="steps", eval_steps=2)
        for resume in (None, "checkpoint-3", "checkpoint-9"):  # within the first and the second epoch
            trainer = make_trainer(self.folder, **flags)
            trainer.add_callback(Begin())
            with mock.patch("os.fork", counted):
                quietly(trainer.train, resume_from_checkpoint=resume and str(self.folder / resume))
                quietly(trainer.evaluate)
            self.assertEqual(forks, [0, 0])
            forks.clear()
            begun.clear()


class ResumeTest(TrainerTest):
    def run_from(self, folder, resume=None, seed=0) -> tuple[T5Trainer, list[torch.Tensor]]:
        """(trainer after 12 steps of 2 x 16 rows, its training batches)."""
        recorder = Recorder()
        trainer = trained(
            folder,
            resume=resume,
            model=make_model(seed, dropout_rate=0.1),  # the random state must be resumed too
            collate=recorder,
            eval_dataset=chunks(9, 4),
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=1,
            save_total_limit=None,
        )
        # Each evaluation collates a batch too, of 9 rows.
        return trainer, [b["input_ids"] for b in recorder.batches if len(b["input_ids"]) == 16]

    def test_a_resumed_run_is_bit_identical(self):
        whole, seen = self.run_from(self.folder / "whole")
        for step in (3, 5, 8):  # within the first epoch, at its end, within the second
            with self.subTest(step), self.assertNoLogs("transformers", "WARNING"):
                checkpoint = self.folder / "whole" / f"checkpoint-{step}"
                resumed, seen_again = self.run_from(self.folder / f"resumed_{step}", str(checkpoint), seed=99)
                for key in ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch"):
                    self.assertEqual(curve(resumed, key), curve(whole, key), key)
                for name, weight in weights(whole).items():
                    torch.testing.assert_close(weights(resumed)[name], weight, rtol=0, atol=0)
                torch.testing.assert_close(seen_again[: 24 - 2 * step], seen[2 * step : 24], rtol=0, atol=0)

    @parameterized.parameters(True, False)
    def test_layers_that_keep_less_or_transformers_resume_each_other(self, first):
        """With the same dropout masks only rounding tells the losses apart; the bytes kept differ."""
        self.enter_context(mock.patch("torch.nn.functional.dropout", masked_by_bits))
        flags = dict(max_steps=4, save_strategy="steps", save_steps=2, eval_strategy="no", logging_steps=1)
        ended = []
        for name, resume, recompute in (
            ("whole", None, first),
            ("resumed", str(self.folder / "whole" / "checkpoint-2"), not first),
        ):
            model = make_model(dropout_rate=0.1)
            set_attention(model, "eager")
            ended.append(trained(self.folder / name, resume, model=model, recompute=recompute, **flags))
        whole, resumed = ended
        np.testing.assert_allclose(curve(resumed), curve(whole), rtol=1e-5)
        kept = {}
        for trainer in (whole, resumed):
            model, inputs = trainer.model.train(), next(iter(trainer.get_train_dataloader()))
            found = kept_bytes(lambda m=model, i=inputs: m(**i)["loss"], model.parameters())
            kept[trainer.args.recompute] = found.activations
        self.assertLess(kept[True], 0.8 * kept[False])

    @parameterized.parameters("adamw_rms_scaled", "adamw_torch", "muon", "adafactor")
    def test_a_resumed_run_has_the_rate_of_its_own_flags(self, optim):
        """Also in its first step, and if the run is longer now. It had the rate and decay of the checkpoint."""
        flags = dict(eval_strategy="no", lr_scheduler_type="cosine", warmup_steps=0.25, optim=optim, logging_steps=1)
        trained(self.folder / "short", **flags, max_steps=4, save_strategy="steps", save_steps=4)
        flags |= dict(learning_rate=3e-3, weight_decay=0.5, max_steps=8)
        resumed = trained(self.folder / "resumed", str(self.folder / "short" / "checkpoint-4"), **flags)
        factor = learning_rate_factor("cosine", 8, 2, warmup_start=0.5, floor=resumed.args.final_learning_rate_factor)
        wanted = [3e-3 * factor(step) for step in range(4, 8)]
        np.testing.assert_allclose(curve(resumed, "learning_rate")[-4:], wanted)
        self.assertEqual({group["weight_decay"] for group in resumed.optimizer.param_groups}, {0.0, 0.5})

    def test_the_best_checkpoint_is_found_in_a_folder_that_was_moved(self):
        flags = dict(eval_dataset=chunks(4, 4), eval_strategy="steps", eval_steps=2, save_strategy="steps")
        flags |= dict(save_steps=2, max_steps=6, load_best_model_at_end=True, learning_rate=3.0)
        flags |= dict(save_total_limit=9, warmup_steps=0)
        whole = trained(self.folder / "out", **flags)
        self.assertLess(best := whole.state.best_global_step, 6)
        (self.folder / "out").rename(self.folder / "moved")
        moved = trained(self.folder / "moved", str(self.folder / "moved" / "checkpoint-6"), **flags)
        self.assertEqual(moved.state.best_model_checkpoint, str(self.folder / "moved" / f"checkpoint-{best}"))
        for name, weight in weights(whole).items():
            torch.testing.assert_close(weights(moved)[name], weight, rtol=0, atol=0)

    def test_a_best_checkpoint_elsewhere_is_not_read(self):
        """The trainer_state.json of a downloaded run may name any folder of this machine."""
        flags = dict(eval_dataset=chunks(4, 4), eval_strategy="steps", eval_steps=2, save_strategy="steps")
        flags |= dict(save_steps=2, load_best_model_at_end=True, save_total_limit=9)
        trained(self.folder / "out", **flags, max_steps=4)
        (self.folder / "out" / "checkpoint-2").rename(self.folder / "private-2")
        path = self.folder / "out" / "checkpoint-4" / "trainer_state.json"
        best = dict(best_model_checkpoint=str(self.folder / "private-2"), best_global_step=2)
        state = json.loads(path.read_text()) | best
        for line in state["log_history"]:
            line |= {"eval_loss": 0.0} if line["step"] == 2 else {}
        path.write_text(json.dumps(state))
        (path.parent / "manifest.json").unlink()
        resumed = make_trainer(self.folder / "out", **flags, max_steps=6)
        _, printed = quietly(resumed.train, resume_from_checkpoint=str(path.parent))
        self.assertRegex(printed, "private-2 is not beside .*checkpoint-4, and not read: a later one is chosen")
        self.assertEqual(resumed.state.best_model_checkpoint, str(self.folder / "out" / "checkpoint-6"))

    def test_a_checkpoint_without_some_weights_is_not_resumed(self):
        """As another version of transformers would leave it, which names them otherwise."""
        trained(self.folder, max_steps=1, save_strategy="steps", save_steps=1)
        file = self.folder / "checkpoint-1" / "model.safetensors"
        tensors = load_file(file)
        tensors["encoder.final_norm.weight"] = tensors.pop("encoder.final_layer_norm.weight")
        save_file(tensors, file, {"format": "pt"})
        with self.assertRaisesRegex(UserError, "lacks: 1 tensors, encoder.final_layer_norm.weight"):
            trained(self.folder / "resumed", str(self.folder / "checkpoint-1"), max_steps=2)

    def test_weights_in_several_files_or_in_a_file_of_transformers_4_are_loaded(self):
        saved, loaded = (trained(self.folder / name, max_steps=steps).model for name, steps in (("a", 1), ("b", 2)))
        saved.save_pretrained(self.folder / "parts", max_shard_size="10KB")
        self.assertGreater(len(list((self.folder / "parts").glob("model-*.safetensors"))), 1)
        (self.folder / "old").mkdir()
        torch.save(saved.state_dict(), self.folder / "old" / "pytorch_model.bin")
        for folder in ("parts", "old"):
            with torch.no_grad():
                loaded.get_input_embeddings().weight.zero_()
            load_weights(loaded, self.folder / folder)
            for name, weight in loaded.state_dict().items():
                torch.testing.assert_close(weight, saved.state_dict()[name], rtol=0, atol=0)


class EvaluationTest(TrainerTest):
    def reference(self, model, batch) -> tuple[np.ndarray, np.ndarray]:
        """(nats, correct) of every counted target token, by torch alone."""
        model.eval()
        with torch.no_grad():
            logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits.double()
        counted = batch["labels"].ne(-100)
        targets = batch["labels"].clamp(min=0)[..., None]
        nats = -logits.log_softmax(-1).gather(-1, targets)[..., 0]
        return nats[counted].numpy(), (logits.argmax(-1) == batch["labels"])[counted].numpy()

    @parameterized.parameters(3, 7, 64)
    def test_language_model_metrics_by_hand(self, batch_size):
        data = chunks(20, seed=4)  # 20 = 6 * 3 + 2 = 2 * 7 + 6: the last batch is ragged
        trainer = trained(self.folder, max_steps=6, eval_dataset=data, per_device_eval_batch_size=batch_size)
        found, _ = quietly(trainer.evaluate)
        batch = collator()(data.__getitems__(list(range(20))))
        nats, correct = self.reference(trainer.model, batch)
        self.assertLen(nats, 20 * collator().targets_length)
        self.assertAlmostEqual(found["eval_loss"], nats.mean(), delta=1e-6)
        self.assertAlmostEqual(found["eval_perplexity"], math.exp(nats.mean()), delta=1e-4)
        self.assertEqual(found["eval_token_accuracy"], correct.mean())
        self.assertBetween(correct.mean(), 0.02, 0.98)
        text = ~np.isin(batch["labels"].numpy().ravel(), [*collator().sentinel_ids, collator().eos_id])
        self.assertEqual(text.sum(), 20 * collator().num_noise)
        self.assertAlmostEqual(found["eval_text_token_accuracy"], correct.ravel()[text].mean(), delta=1e-12)
        hidden_tokens = 20 * collator().num_noise
        bits = nats.sum() / math.log(2) / (hidden_tokens * BYTES_PER_TOKEN)
        self.assertAlmostEqual(found["eval_bits_per_byte"], bits, delta=1e-6)

    def test_two_evaluations_are_the_same(self):
        trainer = make_trainer(self.folder, eval_dataset=chunks(20, seed=4), learning_rate=0.0)
        before, _ = quietly(trainer.evaluate)
        quietly(trainer.train)  # at learning rate 0: it only draws random numbers
        after, _ = quietly(trainer.evaluate)
        for key in ("eval_loss", "eval_token_accuracy", "eval_bits_per_byte"):
            self.assertEqual(after[key], before[key])

    @parameterized.parameters("chunks", "ragged")
    def test_two_ranks_count_each_row_once(self, kind):
        """21 rows in batches of 2 x 4 are filled up to 24."""
        data, rows = (chunks(21, 4), None) if kind == "chunks" else (ragged_rows(21, 2), ragged_rows(8, 1))
        trainer = make_trainer(self.folder, rows=rows, eval_dataset=data)
        results = two_ranks_results()
        expected = trainer.predict(data).predictions[1]
        self.assertEqual(results[f"{kind}_predict"].shape, (21, len(STATISTICS) + 6 * (kind == "chunks")))
        np.testing.assert_allclose(results[f"{kind}_predict"], expected, rtol=1e-5)  # in the order of the rows
        found, _ = quietly(trainer.evaluate)
        self.assertAlmostEqual(results[f"{kind}_eval"]["eval_loss"], found["eval_loss"], delta=1e-6)
        self.assertEqual(results[f"{kind}_eval"]["eval_token_accuracy"], found["eval_token_accuracy"])


def task_trainer(folder, steps: int, eval_dataset, class_labels=LABELS, **flags) -> T5Trainer:
    """A T5Trainer on the three-class task with accuracy from the predicted classes, as fine-tuning has it."""

    def metrics(output) -> dict:
        classes = output.predictions[1][:, STATISTICS.index("predicted_class")]
        gold = [LABELS.tolist().index((row[:4].tolist() + [-100] * 4)[:4]) for row in output.label_ids]
        return token_metrics(output.predictions[1]) | {"accuracy": float(np.mean(classes == gold))}

    return T5Trainer(
        model=make_model(d_model=32),
        args=arguments(folder, max_steps=steps, lr_scheduler_type="constant_with_warmup", **flags),
        train_dataset=ragged_rows(320, seed=5),
        eval_dataset=eval_dataset,
        data_collator=pad_rows,
        compute_metrics=metrics,
        class_label_ids=class_labels,
    )


class ClassScoringTest(TrainerTest):
    def test_teacher_forcing_finds_what_greedy_decoding_writes(self):
        data = ragged_rows(60, seed=11)
        trainer = task_trainer(self.folder, 25, data, per_device_eval_batch_size=16)
        quietly(trainer.train)
        statistics = trainer.predict(data).predictions[1]
        scored = statistics[:, STATISTICS.index("predicted_class")].astype(int)
        # The outside reference: transformers' own greedy search, row by row.
        generated = []
        for row in data:
            ids = trainer.model.generate(torch.tensor([row["input_ids"]]), max_new_tokens=4, do_sample=False)[0, 1:]
            ids = ids[: ids.tolist().index(1) + 1].tolist() if 1 in ids.tolist() else ids.tolist()
            texts = [label[label >= 0].tolist() for label in LABELS]
            generated.append(texts.index(ids) if ids in texts else -1)
        self.assertEqual(scored.tolist(), generated)
        self.assertGreater(len(set(generated)), 1)  # an undecided model would prove little
        gold = np.array(
            [row["labels"] == LABELS[c][LABELS[c] >= 0].tolist() for c, row in zip(scored, data, strict=True)]
        )
        np.testing.assert_array_equal(statistics[:, STATISTICS.index("exact_match")] == 1, gold & (scored >= 0))

    def test_each_label_is_fed_once_and_as_long_as_it_is(self):
        """Labels padded to a multiple of eight cost nothing, and a row's own label is one of those scored anyway."""
        data = ragged_rows(10, seed=11)
        trainer = task_trainer(self.folder, 25, data)
        quietly(trainer.train)

        def statistics(labels: list[int] | None = None, **padding) -> tuple[np.ndarray, int]:
            batch = pad_rows([row | {"labels": labels} for row in data] if labels else data)
            batch["labels"] = F.pad(batch["labels"], (0, padding.get("more", 0)), value=-100)
            with mock.patch.object(trainer.model, "forward", wraps=trainer.model.forward) as forward, torch.no_grad():
                found = score_batch(trainer, trainer.model, batch, batch["labels"]).statistics
            return found.numpy(), forward.call_args.kwargs["decoder_input_ids"].shape[1]

        found, positions = statistics(more=4)
        self.assertEqual(positions, LABELS.ne(-100).sum())
        # The outside reference: transformers' own loss of each row, and its argmax at every position of each label.
        trainer.model.eval()
        for row, values in zip(data, found, strict=True):
            source, target = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
            logits = trainer.model(input_ids=source, decoder_input_ids=shift_right(target, 0, 0)).logits
            nats = F.cross_entropy(logits[0], target[0], reduction="sum").item()
            right = logits[0].argmax(-1).eq(target[0])
            np.testing.assert_allclose(values[:4], [nats, len(right), right.sum(), right.all()], rtol=1e-5)
        # A label that is no class is fed as well; what the classes' texts are scored at does not change.
        other, positions = statistics([40, 41, 42, 43, 1])
        self.assertEqual(positions, LABELS.ne(-100).sum() + 5)
        column = STATISTICS.index("predicted_class")
        np.testing.assert_array_equal(other[:, column], found[:, column])
        self.assertGreater(len(set(found[:, column])), 1)
        self.assertEqual(set(other[:, 1]), {5.0})

    @parameterized.product(classes=(True, False), generates=(True, False))
    def test_rows_that_take_too_much_memory_are_scored_in_parts(self, classes, generates):
        """Else 64 rows of 128 tokens of mT5's vocabulary would take 16 GB, and 77 class labels of it 40."""
        data, shapes = ragged_rows(10, seed=11), []
        trainer = task_trainer(self.folder, 25, data, LABELS if classes else None, predict_with_generate=generates)
        quietly(trainer.train)
        whole = trainer.predict(data).predictions
        trainer.model.register_forward_hook(lambda *call: shapes.append(call[-1].logits.shape))
        most = 20 * VOCABULARY  # logits at 20 positions
        watched = mock.patch.object(found_answers, "answers", wraps=found_answers.answers)
        with mock.patch.multiple(rows_at_a_time, LARGEST_TENSOR=most, SHARE_OF_CACHES=0), watched as written:
            tokens, statistics = trainer.predict(data).predictions
        self.assertEqual({call.args[3] for call in written.call_args_list}, {1} if generates else set())  # slots
        self.assertLessEqual(max(shape.numel() for shape in shapes), most)
        self.assertGreater(len(shapes), 1)
        np.testing.assert_allclose(statistics, whole[1], rtol=1e-5)
        np.testing.assert_array_equal(tokens, whole[0])

    def test_a_model_that_writes_no_label_has_class_minus_one(self):
        data = ragged_rows(10, seed=11)
        trainer = task_trainer(self.folder, 1, data)
        statistics = trainer.predict(data).predictions[1]
        self.assertEqual(set(statistics[:, STATISTICS.index("predicted_class")]), {-1.0})

    def test_generation_when_it_is_asked_for(self):
        data = ragged_rows(10, seed=11)
        trainer = task_trainer(self.folder, 1, data, predict_with_generate=True, generation_max_length=4)
        trainer.model.generation_config.max_length = 7  # as fine_tune_t5.py sets it; the flag must win
        tokens = trainer.predict(data).predictions[0]
        reference = trainer.model.generate(
            **{k: v for k, v in pad_rows(data).items() if "label" not in k and "dec" not in k}, max_new_tokens=3
        )
        np.testing.assert_array_equal(tokens[:, :4], reference.numpy())
        self.assertFalse(tokens[:, 4:].any())

    def test_evaluated_texts_are_not_drawn(self):
        """T5Gemma 2's generation_config.json says do_sample."""
        trainer = task_trainer(self.folder, 1, None, predict_with_generate=True, generation_max_length=8)
        wanted = trainer.predict(ragged_rows(10, seed=11)).predictions[0]
        trainer.model.generation_config.update(do_sample=True, temperature=9.0)
        np.testing.assert_array_equal(trainer.predict(ragged_rows(10, seed=11)).predictions[0], wanted)

    @parameterized.parameters(1, 3)
    def test_a_static_cache_changes_no_text_and_no_checkpoint(self, beams):
        data, found = ragged_rows(10, seed=11), {}
        for cache in ("dynamic", "static"):
            options = dict(predict_with_generate=True, generation_max_length=6, generation_num_beams=beams)
            trainer = task_trainer(self.folder, 1, data, generation_cache=cache, **options)
            with mock.patch.object(trainer.model, "generate", wraps=trainer.model.generate) as generate:
                found[cache] = trainer.predict(data).predictions[0]
            asked = {call.kwargs["cache_implementation"] for call in generate.call_args_list}
            self.assertEqual(asked, {"static"} if cache == "static" else set())
            self.assertIsNone(trainer.model.generation_config.cache_implementation)
        np.testing.assert_array_equal(found["static"], found["dynamic"])

    @parameterized.product(labelled=(True, False), beams=(1, 3))
    def test_texts_come_from_one_encoder_pass_at_the_runs_precision(self, labelled, beams):
        """The source that was read to score its label is not read again. Without autocast it would be read in float32:
        not what was trained."""
        data = ragged_rows(10, seed=11)
        data = data if labelled else [{"input_ids": row["input_ids"]} for row in data]
        options = dict(predict_with_generate=True, generation_max_length=4, generation_num_beams=beams, bf16=True)
        trainer = task_trainer(self.folder, 1, None, **options)
        seen = []
        projection = trainer.model.encoder.block[0].layer[0].SelfAttention.q
        projection.register_forward_hook(lambda *call: seen.append(call[-1].dtype))
        found = trainer.predict(data).predictions[0]
        self.assertEqual(seen, [torch.bfloat16] * -(-10 // trainer.args.eval_batch_size) if labelled else [])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            row = torch.tensor([data[0]["input_ids"]])
            expected = trainer.model.generate(row, max_new_tokens=3, num_beams=beams)[0].tolist()
        self.assertEqual(found[0, : len(expected)].tolist(), expected)

    @parameterized.parameters(False, True)
    def test_rows_without_labels_are_predicted_and_not_scored(self, generate):
        data = ragged_rows(10, seed=11)
        trainer = task_trainer(self.folder, 1, None, predict_with_generate=generate)
        trainer.model.generation_config.max_new_tokens = 4
        with_labels = trainer.predict(data)
        without = trainer.predict([{"input_ids": row["input_ids"]} for row in data])
        self.assertIsNone(without.label_ids)
        self.assertNotIn("test_loss", without.metrics)
        self.assertIn("test_loss", with_labels.metrics)
        np.testing.assert_array_equal(without.predictions[0], with_labels.predictions[0])
        np.testing.assert_array_equal(without.predictions[1][:, 4], with_labels.predictions[1][:, 4])


class RunTest(TrainerTest):
    """Early stopping, the best checkpoint and what `Run.start` prints and writes."""

    def start(self, trainer: T5Trainer, **values) -> str:
        data = dict(tokens_per_example=17, steps_per_epoch=12, documents={"train": 200}, fingerprints=lambda _: {})
        data |= dict(flops_per_sequence=lambda _: 1000, read={}) | values
        data["report"] = lambda _: Report({"text": "made up"}, lambda *_: [], {}, None)
        speed = types.SimpleNamespace(described="plain", attention="eager", weight_formats=None, memory=None)
        decision = Decision("test", ModelArguments(), TaskArguments(), trainer.args, None, speed, None)
        run = TrainingRun(decision, trainer, types.SimpleNamespace(keep=lambda _: None, **data), {})
        return quietly(run.start)[1]

    @parameterized.named_parameters(
        # scores and losses of the evaluations -> the step of the end, of the best checkpoint, its score
        dict(testcase_name="patience", scores=[0.5, 0.8, 0.7, 0.6, 0.9], patience=2, end=8, best=4, metric=0.8),
        dict(
            testcase_name="of_equal_scores_the_lower_loss",
            scores=[0.5, 0.5, 0.5, 0.4],
            losses=[3.0, 2.0, 2.5, 1.0],
            patience=3,
            end=8,
            best=4,
            metric=0.5,
        ),
        # evaluated each step: those saved have 0.5, 0.6 and 0.4
        dict(testcase_name="of_those_saved", scores=[0.8, 0.5, 0.9, 0.6, 0.7, 0.4], every=1, end=6, best=4, metric=0.6),
    )
    def test_the_best_checkpoint(self, scores, end, best, metric, losses=None, patience=None, every=2):
        trainer = make_trainer(
            self.folder,
            eval_dataset=chunks(4, 4),
            eval_strategy="steps",
            eval_steps=every,
            save_strategy="steps",
            save_steps=2,
            save_total_limit=1,
            load_best_model_at_end=True,
            metric_for_best_model="eval_score",
            greater_is_better=True,
            early_stopping_patience=patience,
            max_steps=20 if patience else len(scores),
        )
        loop, evaluations, seen = trainer.evaluation_loop, iter(range(len(scores))), {}

        def measured(*args, **kwargs):
            found, number = loop(*args, **kwargs), next(evaluations)
            found.metrics["eval_score"] = scores[number]
            if losses:
                found.metrics["eval_loss"] = losses[number]
            seen[trainer.state.global_step] = weights(trainer)
            return found

        self.start(trainer)
        with mock.patch.object(trainer, "evaluation_loop", measured):
            quietly(trainer.train)
        self.assertEqual(trainer.state.global_step, end)
        self.assertEndsWith(trainer.state.best_model_checkpoint, f"checkpoint-{best}")
        self.assertEqual(trainer.state.best_metric, metric)
        for name, weight in weights(trainer).items():
            torch.testing.assert_close(weight, seen[best][name], rtol=0, atol=0)

    def test_an_evaluation_without_the_main_metric_is_the_users_error(self):
        trainer = make_trainer(
            self.folder,
            eval_dataset=chunks(4, 4),
            eval_strategy="steps",
            eval_steps=1,
            metric_for_best_model="loss_ul2_s",
        )
        with self.assertRaisesRegex(UserError, "--metric_for_best_model loss_ul2_s: the evaluation has no row for it;"):
            quietly(trainer.train)

    def test_a_stop_is_saved_where_the_evaluation_is_not_the_best(self):
        trainer = make_trainer(
            self.folder,
            eval_dataset=chunks(4, 4),
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="best",
            metric_for_best_model="eval_score",
            greater_is_better=True,
        )

        def metrics(output) -> dict:
            trainer.preemption._received = signal.SIGTERM  # in the first evaluation, so in step 2
            return token_metrics(output.predictions[1]) | {"score": -trainer.state.global_step}

        trainer.compute_metrics = metrics
        self.start(trainer)
        with self.assertRaises(SystemExit) as stop:
            quietly(trainer.train)
        self.assertEqual(stop.exception.code, PREEMPTED_EXIT_CODE)
        self.assertEqual([path.name for path in checkpoints_of(self.folder)], ["checkpoint-1", "checkpoint-2"])
        self.assertEndsWith(trainer.state.best_model_checkpoint, "checkpoint-1")

    @parameterized.parameters(
        (dict(save_strategy="no"), 1, ""),
        (dict(save_strategy="steps", save_total_limit=2), 1 + 3 * 3, ""),
        (dict(save_strategy="steps", save_total_limit=None), 1 + 2 * 3, " and all later checkpoints"),
    )
    def test_disk_is_model_and_checkpoints(self, flags, copies, more):
        trainer = make_trainer(self.folder, optim="adamw_torch", **flags)
        size = sum(p.numel() for p in trainer.model.parameters()) * 4 * copies
        self.assertRegex(self.start(trainer), rf"disk +{size / 1024:.4g} KiB{more} in ")

    def test_peak_flops_are_those_of_the_device_and_precision(self):
        self.assertIsNone(device_peak_flops(torch.device("cpu"), bf16=True))
        for name, bf16, expected in (
            ("NVIDIA H200", True, 989e12),
            ("NVIDIA A100-SXM4-80GB", False, 156e12),
            ("Some GPU of tomorrow", True, None),
        ):
            with mock.patch("torch.cuda.get_device_name", return_value=name):
                self.assertEqual(device_peak_flops(torch.device("cuda"), bf16), expected)


if __name__ == "__main__":
    two_ranks(Path(sys.argv[1]))
