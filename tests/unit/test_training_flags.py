"""Tests of flags of training that contradict each other."""

import contextlib
import io
import json
import os
import re
from unittest import mock

import torch
from absl.testing import absltest, parameterized
from test_optimizers import arguments

import arguments.training as training_arguments
from arguments.training import FineTuningArguments, PreTrainingArguments


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
        ("activation_checkpointing_kwargs", "nonsense", "must be a mapping in JSON"),
        ("gradient_checkpointing_kwargs", "[1]", "must be a mapping in JSON"),
        ("lr_scheduler_kwargs", "null", "must be a mapping in JSON"),
        ("lr_scheduler_kwargs", "{", "not JSON: Expecting"),
        ("accelerator_config", "nonsense", "no such file"),
        ("accelerator_config", '{"foo": 1}', "unexpected keyword argument 'foo'"),
        ("accelerator_config", '{"gradient_accumulation_kwargs": {"foo": 1}}', "unexpected keyword argument 'foo'"),
        ("accelerator_config", '{"split_batches": true}', "split_batches and even_batches must stay"),
        ("accelerator_config", '{"even_batches": false}', "split_batches and even_batches must stay"),
        ("fsdp_config", "nonsense", "no such file"),
        ("fsdp_config", "LIST", "holds no mapping"),
        ("deepspeed", "LIST", "holds no mapping"),
        ("deepspeed", "{", "not JSON: Expecting"),
    )
    def test_json(self, name, value, message):
        (self.folder / "list.json").write_text("[1]")
        value = value.replace("LIST", str(self.folder / "list.json"))
        with self.assertRaisesRegex(ValueError, f"^--{name} {re.escape(value)}: .*{message}"):
            arguments(**{name: value})

    def test_json_that_is_right(self):
        flags = dict(activation_checkpointing_kwargs='{"use_reentrant": true}', lr_scheduler_kwargs='{"min_lr": 0}')
        self.assertEqual(arguments(**flags).activation_checkpointing_kwargs, {"use_reentrant": True})
        arguments(accelerator_config='{"dispatch_batches": true, "gradient_accumulation_kwargs": {"num_steps": 1}}')

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

    def test_unknown_options_of_activation_checkpointing(self):
        message = "--activation_checkpointing_kwargs use_reetrant: .*did you mean use_reentrant"
        with self.assertRaisesRegex(ValueError, message):
            arguments(activation_checkpointing_kwargs='{"use_reetrant": false}')

    @parameterized.parameters(
        # what is asked for, what is installed -> what is taken, what is said
        (None, ["wandb", "tensorboard"], ["wandb"], ""),
        (None, ["tensorboard"], [], "the package wandb is not installed"),
        (["none"], [], ["none"], ""),
        (["tensorboard"], ["tensorboard"], ["tensorboard"], ""),
    )
    def test_a_tracker_that_nobody_named_may_be_missing(self, asked, installed, taken, said):
        printed = io.StringIO()
        there = mock.patch.object(training_arguments, "get_available_reporting_integrations", lambda: installed)
        with there, contextlib.redirect_stdout(printed):
            self.assertEqual(training_arguments._trackers(asked), taken)
            flags = {} if asked is None else {"report_to": asked}
            args = PreTrainingArguments(output_dir="never_written", use_cpu=True, **flags)
        self.assertEqual(args.report_to, [] if taken == ["none"] else taken)
        self.assertIn(said, printed.getvalue())
        self.assertLen(printed.getvalue().splitlines(), 2 * bool(said))

    def test_wandb_can_be_switched_off_as_earlier_versions_of_transformers_do(self):
        there = mock.patch.object(training_arguments, "get_available_reporting_integrations", lambda: ["wandb"])
        with there, mock.patch.dict(os.environ, WANDB_DISABLED="true"):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                self.assertEqual(training_arguments._trackers(None), [])
            self.assertIn("WANDB_DISABLED is set", printed.getvalue())
            self.assertEqual(training_arguments._trackers(["wandb"]), ["wandb"])
        with there, mock.patch.dict(os.environ, WANDB_DISABLED="false"):
            self.assertEqual(training_arguments._trackers(None), ["wandb"])

    def test_a_tracker_that_was_named_must_be_there(self):
        there = mock.patch.object(training_arguments, "get_available_reporting_integrations", list)
        with there, self.assertRaisesRegex(ValueError, "--report_to wandb: the package wandb is not installed"):
            PreTrainingArguments(output_dir="never_written", use_cpu=True, report_to=["wandb"])

    @parameterized.parameters("none", "all")
    def test_all_trackers_or_none_go_alone(self, name):
        there = mock.patch.object(training_arguments, "get_available_reporting_integrations", lambda: ["wandb"])
        with there, self.assertRaisesRegex(ValueError, f"--report_to wandb {name}: {name} excludes other trackers"):
            arguments(report_to=["wandb", name])


if __name__ == "__main__":
    absltest.main()
