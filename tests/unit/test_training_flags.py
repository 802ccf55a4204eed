"""Tests of flags of training that contradict each other."""

import contextlib
import io
import json
import os
from unittest import mock

import torch
from absl.testing import absltest, parameterized
from test_optimizers import arguments

import arguments.training as training_arguments
from arguments.training import FineTuningArguments, PreTrainingArguments
from common.errors import UserError


class FlagsTest(parameterized.TestCase):
    @parameterized.parameters("reduce-overhead", "max-autotune")
    def test_cuda_graphs_do_not_accumulate(self, mode):
        flags = dict(torch_compile=True, torch_compile_mode=mode)
        with self.assertRaisesRegex(
            ValueError, f"--torch_compile_mode {mode}: .* --gradient_accumulation_steps 1 instead of 4"
        ):
            arguments(gradient_accumulation_steps=4, **flags)
        arguments(gradient_accumulation_steps=1, **flags)
        arguments(FineTuningArguments, "fine-tuning a checkpoint", **flags)

    @parameterized.parameters(
        ("bf16", None, "bf16"),
        ("no", None, "no"),
        ("bf16", False, "no"),
        ("fp16", True, "bf16"),
        ("no", True, "bf16"),
    )
    def test_accelerates_precision_is_the_flags(self, asked, flag, precision):
        """transformers would train in what `accelerate launch` or its configuration says, whatever the plan shows."""
        with mock.patch.dict(os.environ, ACCELERATE_MIXED_PRECISION=asked):
            args = arguments(bf16=flag)
        self.assertEqual((args.mixed_precision, args.bf16), (precision, precision == "bf16"))
        self.assertEqual("bf16" in args.given, asked == "bf16" and flag is None)  # --speed leaves it alone

    @parameterized.parameters(("1", "2", 3), ("2", "2", None), ("1", "1", 6))
    def test_a_launched_process_takes_its_share_of_the_cores(self, threads, processes, taken):
        """accelerate launch gives each one thread, unless the user has said how many."""
        environment = dict(ACCELERATE_MIXED_PRECISION="no", OMP_NUM_THREADS=threads, LOCAL_WORLD_SIZE=processes)
        with (
            mock.patch.dict(os.environ, environment),
            mock.patch.object(os, "sched_getaffinity", lambda _: range(6)),
            mock.patch.object(torch, "set_num_threads") as set_threads,
        ):
            arguments()
        self.assertEqual([call.args[0] for call in set_threads.call_args_list], [taken] * (taken is not None))

    @parameterized.parameters("optimizer", "scheduler")
    def test_a_file_of_deepspeed_with_an_optimizer_or_schedule_of_its_own(self, section):
        (self.folder / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, section: {"type": "X"}}))
        wrong = self.assertRaisesRegex(
            ValueError, f"--deepspeed .*zero.json: its section {section} would .*: remove it"
        )
        with mock.patch.dict(os.environ, RANK="0"), wrong:
            arguments(deepspeed=str(self.folder / "zero.json"))

    @parameterized.parameters("fp16", "fp8")
    def test_a_precision_of_accelerate_that_t5_cannot_have(self, asked):
        wrong = self.assertRaisesRegex(ValueError, f"accelerate's mixed_precision {asked}: .*; make it bf16 or no")
        with mock.patch.dict(os.environ, ACCELERATE_MIXED_PRECISION=asked), wrong:
            arguments()

    def test_accelerates_deepspeed_is_the_flags(self):
        asked = dict(ACCELERATE_USE_DEEPSPEED="true", RANK="0")
        with mock.patch.dict(os.environ, asked | dict(ACCELERATE_DEEPSPEED_CONFIG_FILE="zero_stage3_config.json")):
            args = arguments()
        self.assertEqual((args.deepspeed, args.optim), ("zero_stage3_config.json", "adamw_torch"))
        wrong = self.assertRaisesRegex(
            ValueError, "accelerate's configuration asks for DeepSpeed without .* zero_stage2"
        )
        with mock.patch.dict(os.environ, asked), wrong:
            arguments()

    def test_a_search_of_the_micro_batch_is_refused(self):
        with self.assertRaisesRegex(ValueError, "--auto_find_batch_size True: .*--per_device_train_batch_size"):
            arguments(auto_find_batch_size=True)

    def test_these_are_the_modes_with_cuda_graphs(self):
        modes = torch._inductor.list_mode_options()
        self.assertCountEqual(
            training_arguments.CUDA_GRAPHS,
            [mode for mode, options in modes.items() if options.get("triton.cudagraphs")],
        )

    @parameterized.parameters(
        dict(lr_scheduler_kwargs="{"), dict(accelerator_config="nowhere.json"), dict(deepspeed="nowhere.json")
    )
    def test_what_transformers_says_of_its_own_flags_is_the_user_s(self, **flags):
        with self.assertRaises(UserError):
            arguments(**flags)

    def test_options_of_fsdp_need_fsdp(self):
        given = PreTrainingArguments(output_dir="never_written", use_cpu=True, fsdp_config={"limit_all_gathers": True})
        given.given = frozenset({"fsdp_config"})
        with self.assertRaisesRegex(ValueError, "--fsdp_config .*limit_all_gathers.*: has an effect only with --fsdp"):
            training_arguments.check_training(given, "pre-training from scratch")

    @parameterized.parameters("activation", "gradient")
    def test_both_names_of_checkpointing_have_the_value_of_the_one_given(self, name):
        """Trainer of transformers 5.17 reads the older name, which 5.23 takes for the newer one."""
        flags = {f"{name}_checkpointing": True, f"{name}_checkpointing_kwargs": {"use_reentrant": True}}
        for given, on, options in (({}, False, None), (flags, True, {"use_reentrant": True})):
            args = arguments(**given)
            for other in ("activation", "gradient"):
                self.assertIs(getattr(args, f"{other}_checkpointing"), on)
                self.assertEqual(getattr(args, f"{other}_checkpointing_kwargs"), options)

    @parameterized.parameters(
        # installed, WANDB_DISABLED -> what is taken, what is said
        (True, "false", ["wandb"], ""),
        (False, "false", [], "the package wandb is not installed"),
        (True, "true", [], "WANDB_DISABLED is set"),
    )
    def test_a_tracker_that_nobody_named_may_be_missing(self, installed, disabled, taken, said):
        there = mock.patch.object(training_arguments, "find_spec", lambda _: installed or None)
        with there, mock.patch.dict(os.environ, WANDB_DISABLED=disabled):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                args = PreTrainingArguments(output_dir="never_written", use_cpu=True)
            self.assertEqual(args.report_to, taken)
            self.assertStartsWith(printed.getvalue(), f"tracking: {said}" if said else "")


if __name__ == "__main__":
    absltest.main()
