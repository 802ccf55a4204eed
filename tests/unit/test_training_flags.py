"""Tests of flags of training that contradict each other."""

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from unittest import mock

import torch
from absl.testing import parameterized
from test_optimizers import arguments

import foundry.arguments.training as training_arguments
from constants import TRAINING_DEFAULTS
from foundry.arguments.training import FineTuningArguments, PreTrainingArguments
from foundry.common import machine, ranks
from foundry.common.command_line import parse_arguments
from foundry.common.errors import UserError


class FlagsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("cuda_graphs", dict(torch_compile_mode="reduce-overhead"), "--torch_compile_mode reduce-overhead"),
        ("cuda_graphs_too", dict(torch_compile_mode="max-autotune"), "--torch_compile_mode max-autotune"),
        ("micro_batch", dict(auto_find_batch_size=True), "--auto_find_batch_size True"),
        ("backend", dict(ddp_backend="nccl"), "--ddp_backend nccl"),
        ("schedule", dict(lr_scheduler_kwargs="{"), "."),
        ("accelerator", dict(accelerator_config="nowhere.json"), "nowhere.json"),
        ("deepspeed", dict(deepspeed="nowhere.json"), "nowhere.json"),
        ("fsdp", dict(fsdp_config={"limit_all_gathers": True}), "--fsdp_config .*limit_all_gathers"),
        ("no_deepspeed", dict(deepspeed="zero_stage2_config.json"), "zero_stage2_config.json"),
        ("fp16", {}, "mixed_precision fp16", dict(ACCELERATE_MIXED_PRECISION="fp16")),
        ("fp8", {}, "mixed_precision fp8", dict(ACCELERATE_MIXED_PRECISION="fp8")),
        ("accelerates_deepspeed", {}, "zero_stage2_config.json", dict(ACCELERATE_USE_DEEPSPEED="true", RANK="0")),
    )
    def test_refused(self, flags, named, environment=()):
        """Of each the message names flag and value. DeepSpeed is not installed here, for the row that asks for it."""
        if "torch_compile_mode" in flags:
            flags = flags | dict(torch_compile=True, gradient_accumulation_steps=4)
        if flags == dict(deepspeed="zero_stage2_config.json"):
            self.enterContext(mock.patch("foundry.arguments.sharding.find_spec", lambda _: None))
        with mock.patch.dict(os.environ, environment), self.assertRaisesRegex(UserError, named):
            args = PreTrainingArguments(output_dir="never_written", report_to=["none"], use_cpu=True, **flags)
            args.given = frozenset(flags)
            training_arguments.check_training(args, "pre-training from scratch")

    @parameterized.parameters("reduce-overhead", "max-autotune")
    def test_cuda_graphs_without_accumulation(self, mode):
        flags = dict(torch_compile=True, torch_compile_mode=mode)
        arguments(gradient_accumulation_steps=1, **flags)
        arguments(FineTuningArguments, "fine-tuning a checkpoint", **flags)

    def test_accelerates_deepspeed_is_the_flags(self):
        asked = dict(ACCELERATE_USE_DEEPSPEED="true", RANK="0")
        with mock.patch.dict(os.environ, asked | dict(ACCELERATE_DEEPSPEED_CONFIG_FILE="zero_stage3_config.json")):
            args = arguments()
        self.assertEqual((args.deepspeed, args.optim), ("zero_stage3_config.json", "adamw_torch"))

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

    @parameterized.parameters(([], (5e-3, 128)), (["--learning_rate", "0.01"], (0.01, None)))
    def test_the_batch_that_a_recipe_s_rate_is_for(self, flags, expected):
        """It says nothing of a rate that the command line gives."""
        recipe = self.folder / "r.yaml"
        recipe.write_text("learning_rate: 5.0e-3\nlearning_rate_batch: 128\n")
        (args,) = parse_arguments([PreTrainingArguments], [str(recipe), "--report_to", "none", *flags])
        self.assertEqual((args.learning_rate, args.learning_rate_batch), expected)

    def test_the_batch_that_a_default_rate_is_for(self):
        """docs/defaults.md: nanoT5's and T5's 128 in pre-training, ours in fine-tuning."""
        self.assertEqual(arguments().learning_rate_batch, 128)
        self.assertEqual(arguments(FineTuningArguments, "fine-tuning a checkpoint").learning_rate_batch, 32)
        self.assertIsNone(arguments(learning_rate=1e-3).learning_rate_batch)

    @parameterized.parameters("default", "named", "none")
    def test_defaults_other_than_transformers(self, recipe):
        """Those of Seq2SeqTrainingArguments(): adam_epsilon 1e-8, warmup_steps 0, weight_decay 0, seed 42."""
        path = self.folder / "r.yaml"
        path.write_text("weight_decay: 0.1\nwarmup_steps: 0.2\nseed: 42\n")
        words = [str(path)] if recipe == "named" else []
        more = dict(default_recipe=str(path)) if recipe == "default" else {}
        (args,) = parse_arguments([PreTrainingArguments], [*words, "--report_to", "none", "--save_steps", "7"], **more)
        with contextlib.redirect_stdout(io.StringIO()):
            training_arguments.check_training(args, "pre-training from scratch")
        found = training_arguments.other_defaults(args)
        self.assertIn("adam_epsilon 1e-06 (1e-08), ", found)
        self.assertIn("learning_rate 0.02 (5e-05), ", found)
        self.assertEqual("weight_decay 0.1 (0.0)" in found, recipe == "default")
        self.assertEqual("warmup_steps 0.2 (0)" in found, recipe == "default")
        # Given, the same, or ours alone; the last changes no result.
        for name in ("save_steps", "report_to", "seed", "z_loss", "output_dir", "ddp_find_unused_parameters"):
            self.assertNotIn(f"{name} ", found)

    @parameterized.parameters(("1", "2", 3), ("2", "2", None), ("1", "1", 6))
    def test_a_launched_process_takes_its_share_of_the_cores(self, threads, count, taken):
        """accelerate launch gives each one thread, unless the user has said how many."""
        environment = dict(ACCELERATE_MIXED_PRECISION="no", OMP_NUM_THREADS=threads, LOCAL_WORLD_SIZE=count)
        with (
            mock.patch.dict(os.environ, environment),
            mock.patch.object(os, "sched_getaffinity", lambda _: range(6)),
            mock.patch.object(torch, "set_num_threads") as set_threads,
            mock.patch("resource.setrlimit"),
        ):
            machine.prepare_process()
        self.assertEqual([call.args[0] for call in set_threads.call_args_list], [taken] * (taken is not None))

    @parameterized.parameters(
        (dict(LOCAL_WORLD_SIZE="2", WORLD_SIZE="8"), 2),
        (dict(LOCAL_SIZE="4", WORLD_SIZE="8", LOCAL_RANK="1"), 4),  # deepspeed
        (dict(OMPI_COMM_WORLD_LOCAL_SIZE="3", WORLD_SIZE="6"), 3),
        (dict(WORLD_SIZE="2", RANK="1", MASTER_ADDR="127.0.0.1"), 2),  # by hand
        (dict(WORLD_SIZE="2", RANK="1", MASTER_ADDR="10.0.0.7"), 1),
        ({}, 1),
    )
    def test_processes_of_a_machine(self, environment, expected):
        with mock.patch.dict(os.environ, environment, clear=True):
            self.assertEqual(ranks.processes_here(), expected)

    @parameterized.parameters(
        # version, its group -> bytes left: of 1,000 of the group 700 are used, 100 of them by a cache; of 500 above it
        ("2", "0::/job/step", "max", [sys.maxsize, 400, 300]),
        ("2", "0::/job/step", "100", [sys.maxsize, 400, 300, 0]),
        ("1", "5:cpu:/x\n4:memory:/job/step", "9223372036854771712", [sys.maxsize, 400, 300, 9223372036854771412]),
        ("1", "4:memory:/not/seen/in/a/container", "600", [sys.maxsize, 300]),
    )
    def test_memory_that_a_container_or_slurm_allows(self, version, group, top, expected):
        root = self.folder if version == "2" else self.folder / "memory"
        names = {"2": ("memory.max", "memory.current", "inactive_file")}
        names["1"] = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        limit, used, cache = names[version]
        for folder, most, now, cached in (("job/step", "1000", 700, 100), ("job", "500", 200, 0), ("", top, 300, 0)):
            (root / folder).mkdir(parents=True, exist_ok=True)
            (root / folder / limit).write_text(f"{most}\n")
            (root / folder / used).write_text(f"{now}\n")
            (root / folder / "memory.stat").write_text(f"anon 5\n{cache} {cached}\n")
        (self.folder / "groups").write_text(group + "\n")
        self.assertEqual(machine._free_of_limits(self.folder / "groups", self.folder), expected)

    @parameterized.parameters(
        # version, its group, its quota and period, those of the group above -> cores
        ("2", "0::/pod/box", "150000 100000", "max 100000", 2),
        ("2", "0::/pod/box", "max 100000", "300000 100000", 3),
        ("2", "0::/pod/box", "20000 100000", "400000 100000", 1),
        ("2", "0::/pod/box", "max 100000", "max 100000", 6),
        ("1", "0::/\n3:cpu,cpuacct:/pod/box", "-1 100000", "250000 100000", 3),
        ("1", "7:cpuset:/\n3:cpu,cpuacct:/not/seen/in/a/container", "", "50000 25000", 2),
    )
    def test_cores_that_a_container_allows(self, version, groups, own, above, expected):
        top = self.folder if version == "2" else self.folder / "cpu"
        shown = "" if "not/seen" in groups else "pod"
        for folder, quota in ((f"{shown}/box", own), (shown, above)):
            folder = top / folder.lstrip("/")
            folder.mkdir(parents=True, exist_ok=True)
            names = ["cpu.max"] if version == "2" else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
            for name, text in zip(names, [quota] if version == "2" else quota.split(), strict=False):
                (folder / name).write_text(f"{text}\n")
        (self.folder / "groups").write_text(groups + "\n")
        with (
            mock.patch.object(machine, "_CONTROL_GROUPS", (self.folder / "groups", self.folder)),
            mock.patch.object(os, "sched_getaffinity", lambda _: range(6)),
            mock.patch.object(torch, "get_num_threads", lambda: 6),
            mock.patch.object(torch, "set_num_threads") as set_threads,
            mock.patch.dict(os.environ),
            mock.patch("resource.setrlimit"),
        ):
            os.environ.pop("OMP_NUM_THREADS", None)
            self.assertEqual(machine.cores_here(), expected)
            machine.prepare_process()
        self.assertEqual([call.args[0] for call in set_threads.call_args_list], [expected] * (expected < 6))

    @parameterized.parameters("pre_train_t5", "fine_tune_t5", "evaluate_t5", "predict_t5", "export_checkpoint")
    def test_every_script_with_a_model_sets_its_threads(self, name):
        (script,) = Path(__file__).parents[2].glob(f"{name}.py")
        *_, started = script.read_text().split('if __name__ == "__main__":\n')
        self.assertEqual(started.split(), ["prepare_process()", "run_script(main)"])

    def test_these_are_the_modes_with_cuda_graphs(self):
        modes = torch._inductor.list_mode_options()
        self.assertCountEqual(
            training_arguments.CUDA_GRAPHS,
            [mode for mode, options in modes.items() if options.get("triton.cudagraphs")],
        )

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


LINEAR = {"warmup_type": "linear"}
# As in the documentation of Hugging Face's Trainer, with "auto" and with numbers.
ZERO_2 = {"zero_optimization": {"stage": 2, "overlap_comm": True}}
AUTO = ZERO_2 | {
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", **LINEAR},
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
NUMBERS = ZERO_2 | {
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.9], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 50, "total_num_steps": 500, **LINEAR},
    },
    "gradient_clipping": 0.5,
    "train_batch_size": 48,
    "train_micro_batch_size_per_gpu": 8,
}
TAKEN = dict(
    bf16=True,
    optim="adamw_torch",
    learning_rate=3e-5,
    adam_beta1=0.8,
    adam_beta2=0.9,
    adam_epsilon=1e-8,
    weight_decay=3e-7,
    lr_scheduler_type="linear",
    warmup_steps=50,
    max_steps=500,
    warmup_start_factor=0,
    final_learning_rate_factor=0,
    max_grad_norm=0.5,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=6,
)


class DeepSpeedTest(parameterized.TestCase):
    def parse(self, config: dict, *argv: str) -> PreTrainingArguments:
        (self.folder / "zero.json").write_text(json.dumps(config))
        argv = [*argv, "--deepspeed", str(self.folder / "zero.json"), "--report_to", "none", "--use_cpu"]
        with mock.patch.dict(os.environ, RANK="0"), contextlib.redirect_stdout(io.StringIO()) as self.printed:
            (args,) = parse_arguments([PreTrainingArguments], argv)
            training_arguments.check_training(args, "pre-training from scratch")
        return args

    def test_what_a_file_says_is_as_if_the_flags_said_it(self):
        args = self.parse(NUMBERS)
        self.assertEqual({name: getattr(args, name) for name in TAKEN}, TAKEN)
        self.assertContainsSubset(TAKEN, args.given)
        config = args.hf_deepspeed_config.config
        found = config["gradient_clipping"], config["gradient_accumulation_steps"], config["train_batch_size"]
        self.assertEqual(found, (0.5, 6, 48))
        self.assertNoCommonElements({"optimizer", "scheduler"}, config)

    def test_auto_leaves_it_to_the_flags(self):
        args = self.parse(AUTO, "--max_grad_norm", "0.05", "--warmup_steps", "30")
        self.assertEqual(
            (args.optim, args.lr_scheduler_type, args.warmup_steps), ("adamw_torch", "constant_with_warmup", 30)
        )
        self.assertEqual(
            args.learning_rate, TRAINING_DEFAULTS["pre-training from scratch"]["learning_rate"][args.optim]
        )
        self.assertEqual((args.bf16, args.hf_deepspeed_config.config["gradient_clipping"]), (False, 0.05))

    @parameterized.parameters(
        (2, 128, {}), (2, 129, {"grad_accum_dtype": "fp32"}), (3, 129, {"grad_accum_dtype": "fp32"})
    )
    def test_many_micro_batches_are_summed_in_float32(self, stage, steps, wanted):
        """DeepSpeed sums bfloat16 gradients in bfloat16: of 512 equal ones a quarter was missing."""
        file = {"zero_optimization": {"stage": stage}}
        flags = ("--bf16", "true", "--gradient_accumulation_steps", str(steps))
        said = {"grad_accum_dtype": "bf16"}
        for given, expected in ((file, wanted), (file | {"data_types": said}, said)):
            engine = self.parse(given, *flags).deepspeed_plugin.deepspeed_config
            self.assertEqual(engine.get("data_types", {}), expected)

    def test_a_file_without_what_flags_decide(self):
        """DeepSpeed clipped at 1, whatever --max_grad_norm said; train_batch_size alone was an AssertionError."""
        for config in (ZERO_2, ZERO_2 | {"train_batch_size": "auto"}):
            args = self.parse(config, "--max_grad_norm", "0.05")
            config = args.hf_deepspeed_config.config
            batch = args.per_device_train_batch_size, args.gradient_accumulation_steps
            self.assertEqual((config["gradient_clipping"], config["bf16"]["enabled"]), (0.05, False))
            self.assertEqual((config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]), batch)
            self.assertEqual(config["train_batch_size"], batch[0] * batch[1])

    @parameterized.parameters(
        # DeepSpeed 0.19.8: 0.5 + 0.5 * step / 40 of the peak, and 1,000 steps where the file does not say how many
        ("WarmupCosineLR", dict(warmup_min_ratio=0.5, warmup_num_steps=40), "cosine", 40, 0.5),
        ("WarmupCosineLR", dict(total_num_steps=4_000), "cosine", 1_000, 0.0),
        ("WarmupLR", dict(), "constant_with_warmup", 1_000, 0.0),
    )
    def test_a_linear_warm_up_is_the_file_s(self, kind, params, schedule, steps, start):
        args = self.parse(ZERO_2 | {"scheduler": {"type": kind, "params": params | LINEAR}}, "--max_steps", "4000")
        self.assertEqual(
            (args.lr_scheduler_type, args.warmup_steps, args.warmup_start_factor), (schedule, steps, start)
        )

    @parameterized.product(kind=["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"], given=[{}, {"warmup_type": "log"}])
    def test_a_logarithmic_warm_up_is_refused_by_name(self, kind, given):
        with self.assertRaisesRegex(ValueError, f'scheduler {kind} warms up logarithmically .*"warmup_type": "linear"'):
            self.parse(ZERO_2 | {"scheduler": {"type": kind, "params": given}})

    @parameterized.parameters(
        (NUMBERS, ["--learning_rate", "1e-3"], "--learning_rate 0.001: the file of --deepspeed, .*, says 3e-05"),
        (NUMBERS, ["--max_grad_norm", "1"], "--max_grad_norm 1.0: .* says 0.5"),  # also the default, if it is given
        (NUMBERS, ["--optim", "adamw_rms_scaled"], "--optim adamw_rms_scaled: .* says adamw_torch"),
        (NUMBERS, ["--gradient_accumulation_steps", "2"], "train_batch_size 48 .* 16 sequences a step"),
        (NUMBERS | {"train_batch_size": 50}, [], "train_batch_size 50 .* 48 sequences a step"),
        (ZERO_2 | {"fp16": {"enabled": True}}, [], "differs from the flags .fp16.enabled=True"),
        (ZERO_2 | {"optimizer": {"type": "Lamb"}}, [], "optimizer Lamb is not taken .* give --optim"),
        (ZERO_2 | {"scheduler": {"type": "OneCycle"}}, [], "scheduler OneCycle is not taken"),
        ([1], [], "holds no JSON object"),
        (NUMBERS | {"bfloat16": {"enabled": True}}, [], "has the sections bf16 and bfloat16, which are one: keep bf16"),
        (ZERO_2 | {"elasticity": {"enabled": True, "max_train_batch_size": 64}}, [], "elasticity"),
        (ZERO_2 | {"curriculum_learning": {"enabled": True}}, [], "curriculum_learning would cut the rows"),
        (ZERO_2 | {"data_efficiency": {"enabled": True}}, [], "data_efficiency would choose the order"),
    )
    def test_contradictions(self, config, argv, message):
        with self.assertRaisesRegex(UserError, message):
            self.parse(config, *argv)

    def test_sections_of_older_files(self):
        """bfloat16 was taken for no section of the kind, and the run computed with float32."""
        args = self.parse(ZERO_2 | {"bfloat16": {"enabled": True}, "elasticity": {"enabled": False}})
        self.assertTrue(args.bf16)
        self.assertTrue(args.hf_deepspeed_config.config["bf16"]["enabled"])

    def test_zero_3_saves_the_model(self):
        """The run ended well, and there was no model file."""
        args = self.parse({"zero_optimization": {"stage": 3}}, "--optim", "adamw_torch")
        name = "stage3_gather_16bit_weights_on_model_save"
        self.assertTrue(args.hf_deepspeed_config.config["zero_optimization"][name])
        self.assertIn(f"{name} is set to true", self.printed.getvalue())
