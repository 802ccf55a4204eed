"""Tests of runs.duration: how long a run takes, on paper and timed."""

from types import SimpleNamespace
from unittest import mock

import torch
from absl.testing import parameterized

from constants import IGNORE_INDEX
from foundry.model_t5 import build_config, create_model, flops_per_sequence
from foundry.runs import duration


class OnPaperTest(parameterized.TestCase):
    @parameterized.parameters(
        # bf16, checkpointing, accumulation, GPU -> seconds: 128 rows at 45 % of the peak, and 28 bytes for each weight
        (True, False, 1, "NVIDIA H100 80GB HBM3", 128 * 425.9e9 / (0.45 * 989e12) + 28 * 247.6e6 / 3350e9),
        (True, True, 1, "H100", 128 * 425.9e9 * 4 / 3 / (0.45 * 989e12) + 28 * 247.6e6 / 3350e9),
        (False, False, 2, "A100", 256 * 425.9e9 / (0.45 * 156e12) + 28 * 247.6e6 / 2039e9),
    )
    def test_a_step_of_base(self, bf16, checkpointing, accumulation, gpu, expected):
        config = build_config("t5-v1_1-base")
        with torch.device("meta"):
            model = create_model(config)
        args = SimpleNamespace(
            per_device_train_batch_size=128,
            gradient_accumulation_steps=accumulation,
            activation_checkpointing=checkpointing,
            bf16=bf16,
            deepspeed=None,
            fsdp=None,
            use_cpu=False,
            world_size=1,
        )
        seconds = duration.step_on_paper(model, args, gpu, flops_per_sequence(config, 512, 114))
        self.assertAlmostEqual(seconds / expected, 1, places=3)


class TimedTest(parameterized.TestCase):
    @parameterized.parameters(
        # FLOPs of a row, clock -> rows that are timed, seconds of a step of 8 rows x 3, the update being 0.5 of them
        (1e10, [0, 2, 3, 3, 4, 4.5], 8, 3.5),
        (5e10, [0, 2, 3, 3, 4, 4.5], 4, 6.5),  # the second one counts
        (1e12, [0, 11, 11.5], 1, 264.5),  # so slow that the first one must do
    )
    def test_as_many_rows_as_cost_little(self, flops, clock, rows, seconds):
        seen, optimizer = [], mock.Mock()
        trainer = mock.Mock(args=SimpleNamespace(gradient_accumulation_steps=3))
        trainer.create_optimizer.return_value, trainer.begin_step.side_effect = optimizer, lambda _, count: count
        trainer.training_step.side_effect = lambda _, part, count: seen.append((len(part["input_ids"]), int(count)))
        labels = torch.tensor([[5, 1, IGNORE_INDEX]]).repeat(8, 1)
        batch = {"input_ids": torch.ones(8, 4), "labels": labels}
        with mock.patch("time.perf_counter", side_effect=clock):
            self.assertEqual(duration.step_timed(trainer, batch, flops), seconds)
        self.assertEqual(set(seen), {(rows, 2 * rows)})
        self.assertEqual(optimizer.step.call_count, len(clock) // 3)
