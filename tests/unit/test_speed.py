"""Tests of foundry/runs/speed.py: what is chosen for which machine as a table, and that flags and a resumed run win."""

import multiprocessing
import os
from unittest import mock

import torch
from absl.testing import parameterized
from helpers import OVERRIDES, SHAPE, argv_of, run_main, sentences
from transformers import LongT5Config, PreTrainedModel

import pre_train_t5
from foundry.arguments.training import GPUS, FineTuningArguments, PreTrainingArguments, check_training
from foundry.common import machine
from foundry.common.reports import read_json
from foundry.model_t5 import build_config, create_model, set_attention, set_dropout, train_only
from foundry.runs import memory, speed
from foundry.runs.memory import Gpu, Launcher, find_gpu, peaks_of
from foundry.runs.run import described_device
from foundry.runs.speed import SpeedChoice, TrainingJob, choose_settings, decide_speed, use_speed
from foundry.runs.step_memory import StepMemory

BASE = build_config("t5-v1_1-base", None)
LONGT5 = LongT5Config()


def planned(config, dropout: float = 0.0) -> PreTrainedModel:
    """A model without weights."""
    with torch.device("meta"):
        model = create_model(config)
    set_dropout(model, dropout)
    return model


JOB = dict(model=planned(BASE), source=512, target=114, shapes=1, steps=65_536)


def arguments(given: dict | None = None, **changes) -> PreTrainingArguments:
    given = given or {}
    args = PreTrainingArguments(output_dir="never_written", report_to=["none"], dry_run=True, **given, **changes)
    args.optim, args.given = "adamw_rms_scaled", frozenset(given)
    return args


def chosen(
    gpu: str | None, given: dict | None = None, launcher: Launcher | None = None, **job
) -> dict[str, SpeedChoice]:
    args = arguments(given, assume_gpu=gpu)
    choices = choose_settings(find_gpu(args), TrainingJob(**JOB | job), args, launcher or Launcher(cores=16))
    return {choice.name: choice for choice in choices}


class MicroBatchTest(parameterized.TestCase):
    """What is chosen by counting (tests/slow/test_memory.py)."""

    @parameterized.parameters(
        # memory in GB, dropout, flags, weights that are trained -> sequences and accumulation steps of 32 x 4
        (64, 0.0, {}, "", None),
        (4, 0.0, {}, "", (8, 16)),
        (2.5, 0.1, {}, "", (2, 64)),
        (2.5, 0.1, dict(recompute=False), "", (2, 64)),
        (1, 0.0, {}, "", (32, 4)),
        (1, 0.0, {}, "SelfAttention.q", (2, 64)),
    )
    def test_a_cpu_takes_fewer_sequences_at_a_time_where_memory_is_short(self, memory, rate, flags, trained, chosen_):
        """Else the system would kill the run in its first step, without a word."""
        model = planned(build_config("t5-v1_1-base", None, dict(num_layers=2, num_decoder_layers=2)), rate)
        train_only(model, trained)
        with mock.patch.object(speed, "bf16_units", lambda: None):
            found = chosen(None, flags, Launcher(memory=1e9 * memory), model=model).get("micro-batch")
        self.assertEqual(found and found.value, chosen_)
        if memory == 1 and not trained:
            self.assertIn("one sequence is too much for 1 GB", found.reason)

    @parameterized.parameters(("h200", (128, 1)), ("rtx4090", (32, 4)))
    def test_a_gpu_takes_the_largest_that_fits(self, gpu, micro_batch):
        self.assertEqual(chosen(gpu)["micro-batch"].value, micro_batch)


@mock.patch.object(StepMemory, "fitting", lambda _, sizes, _step: (sizes[0], 1e9))
class ChoiceTest(parameterized.TestCase):
    @parameterized.parameters(
        # GPU -> bf16, compiled, TF32
        ("h200", True, True, True),
        ("l4", True, True, True),
        ("t4", False, False, False),
    )
    def test_pre_training_base(self, gpu, bf16, compiled, tf32):
        found = chosen(gpu)
        self.assertEqual(found["bf16"].value, bf16)
        self.assertEqual(found["attn_implementation"].value, "sdpa")
        self.assertEqual(found["torch_compile"].value, compiled)
        self.assertEqual("float32 products" in found, tf32)
        self.assertEqual(found["dataloader_num_workers"].value, 8)
        for name in ("non_blocking", "expandable segments"):
            self.assertTrue(found[name].value)
        for choice in found.values():
            self.assertRegex(str(choice), rf"^{choice.name} .+ \(.+\)$")
        if gpu == "t4":
            self.assertIn("has no bfloat16, and T5 overflows in float16", found["bf16"].reason)

    @parameterized.parameters(
        # what is so, flag -> value, part of the reason
        (dict(job=dict(shapes=0)), "torch_compile", False, "--torch_compile true"),
        (dict(job=dict(shapes=4, steps=-1)), "torch_compile", True, "4 shapes"),
        (dict(job=dict(steps=300)), "torch_compile", False, "cost more than it saves"),
        (dict(launcher=Launcher(8, 16, "fsdp2")), "torch_compile", False, "FSDP2"),
        (dict(launcher=Launcher(8, 16, "zero3")), "torch_compile", False, "ZeRO-3"),
        (dict(launcher=Launcher(8, 16, "zero2")), "torch_compile", True, "one shape"),
        (dict(launcher=Launcher(8, 16, "zero2")), "micro-batch", (32, 4), "DeepSpeed"),
        (dict(launcher=Launcher(8, 3)), "dataloader_num_workers", 3, "3 cores"),
        (dict(given=dict(torch_compile=False)), "torch_compile", False, "given"),
        (dict(given=dict(torch_compile_mode="max-autotune")), "torch_compile", True, "given"),
        (dict(given=dict(bf16=False)), "bf16", False, "given"),
        (dict(given=dict(dataloader_num_workers=1)), "dataloader_num_workers", 1, "given"),
        (dict(given=dict(per_device_train_batch_size=32)), "micro-batch", (32, 4), "given"),
        (dict(given=dict(gradient_accumulation_steps=4)), "micro-batch", (32, 4), "given"),
        (dict(job=dict(earlier={"attn_implementation": "sdpa"})), "attn_implementation", "sdpa", "resumed"),
        (dict(job=dict(earlier={"attn_implementation": None})), "attn_implementation", "sdpa", "resumed"),
        (dict(job=dict(earlier={"torch_compile": False})), "torch_compile", False, "resumed"),
        (
            dict(job=dict(earlier=dict(per_device_train_batch_size=32, gradient_accumulation_steps=4))),
            "micro-batch",
            (32, 4),
            "resumed",
        ),
        (
            dict(job=dict(earlier=dict(per_device_train_batch_size=8, gradient_accumulation_steps=4))),
            "micro-batch",
            (128, 1),
            "memory plan",
        ),
    )
    def test_reasons(self, case, name, value, reason):
        found = chosen("h200", case.get("given"), case.get("launcher"), **case.get("job", {}))[name]
        self.assertEqual(found.value, value)
        self.assertIn(reason, found.reason)

    def test_the_memory_is_what_is_free_on_the_fullest_gpu(self):
        """It was all that the GPU has: beside another program the micro-batch did not fit. What this process holds
        itself is free for it: once the model was there, its weights were counted twice."""
        device = mock.Mock(major=9, minor=0, total_memory=80e9)
        device.name = "NVIDIA H100"
        with (
            mock.patch.object(torch.cuda, "get_device_properties", lambda _: device),
            mock.patch.object(torch.cuda, "mem_get_info", lambda _: (40e9, 80e9)),
            mock.patch.object(torch.cuda, "memory_reserved", lambda _: 5e9),
        ):
            for elsewhere, free in ((20e9, 20e9), (60e9, 45e9)):
                with mock.patch.object(memory, "gather_object", lambda values, other=elsewhere: [*values, other]):
                    gpu = find_gpu(mock.Mock(assume_gpu=None, device=torch.device("cuda", 0)))
                self.assertEqual(gpu, Gpu("NVIDIA H100", free, (9, 0)))

    @parameterized.product(
        gpu=("h200", None),
        missing=(("shutil.which", "gcc or clang", "g[+][+]"), ("sysconfig.get_path", "Python's headers")),
    )
    def test_nothing_is_compiled_where_its_code_cannot_be_built(self, gpu, missing):
        """On a GPU Triton's package was enough. It builds a launcher in C; without a compiler the run ended there, and
        so did one without compilation at the bias gradient's kernel."""
        name, *lacks = missing
        machine.missing_for_triton.cache_clear()
        self.addCleanup(machine.missing_for_triton.cache_clear)
        there = mock.patch("torch.cuda.is_available", return_value=gpu is not None)
        triton = mock.patch.object(machine, "triton_is_installed", lambda: True)
        nothing = "" if name.startswith("sys") else None
        with there, triton, mock.patch(f"foundry.common.machine.{name}", return_value=nothing):
            found = chosen(gpu, {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1})["torch_compile"]
            args = arguments({"torch_compile": True})
            args.use_cpu = gpu is None
            with self.assertRaisesRegex(ValueError, f"^--torch_compile: needs {lacks[0 if gpu else -1]}"):
                check_training(args, "pre-training from scratch")
        self.assertFalse(found.value)
        self.assertRegex(found.reason, f"compiling needs {lacks[0 if gpu else -1]}")

    def test_a_given_attention_wins(self):
        args = arguments(assume_gpu="h200")
        args.given |= {"attn_implementation"}
        found = choose_settings(find_gpu(args), TrainingJob(**JOB | dict(attention="eager")), args, Launcher())
        self.assertIn(SpeedChoice("attn_implementation", "eager", "given"), found)

    def test_longt5_keeps_its_own_attention(self):
        args = arguments({"per_device_train_batch_size": 32}, assume_gpu="h200")
        found = {
            c.name: c.value
            for c in choose_settings(find_gpu(args), TrainingJob(**JOB | dict(model=planned(LONGT5))), args, Launcher())
        }
        self.assertEqual((found["attn_implementation"], found["torch_compile"]), ("sdpa", False))

    @parameterized.parameters((None, (8, 4)), ("reduce-overhead", (32, 1)))
    def test_cuda_graphs_do_not_accumulate(self, mode, micro_batch):
        """They write a forward pass's gradients over those of the one before."""
        given = {"torch_compile_mode": mode} if mode else {}
        with mock.patch.object(StepMemory, "fitting", lambda *_: ((8, 4), 20e9)):
            args = FineTuningArguments(
                output_dir=str(self.folder), report_to="none", dry_run=True, assume_gpu="rtx3090", **given
            )
            args.optim, args.given = "adafactor", frozenset(given)
            found = {c.name: c for c in choose_settings(find_gpu(args), TrainingJob(**JOB), args, Launcher())}
        self.assertEqual(found["micro-batch"].value, micro_batch)
        self.assertEqual("cannot accumulate gradients" in found["micro-batch"].reason, mode is not None)

    @parameterized.parameters(
        ({"per_device_train_batch_size": 32}, {}, None),
        ({}, dict(per_device_train_batch_size=32, gradient_accumulation_steps=4), None),
        ({}, dict(per_device_train_batch_size=8, gradient_accumulation_steps=16), (8, 16)),
    )
    def test_a_cpu_keeps_a_micro_batch(self, given, earlier, micro_batch):
        """That is given, or that the resumed run had."""
        found = chosen(None, given, earlier=earlier).get("micro-batch")
        self.assertEqual(found and found.value, micro_batch)

    @parameterized.parameters(
        # (source tokens, steps, sequences of a step) -> attention, compiled
        (64, 7_200, "eager", True),
        (64, 2_400, "eager", False),  # make demo
        (64, -1, "eager", False),  # by epochs
        (512, 3_600, "sdpa", True),
        (512, 1, "sdpa", False),
    )
    def test_on_a_cpu(self, source, steps, attention, compiled):
        config = BASE if source == 512 else build_config("tiny", 4096)
        given = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
        with mock.patch.multiple(speed, bf16_units=lambda: None, missing_compiler=lambda *_: None):
            found = chosen(None, given, Launcher(cores=2), model=planned(config), source=source, target=34, steps=steps)
        self.assertEqual(list(found), ["bf16", "attn_implementation", "torch_compile"])
        self.assertEqual(found["attn_implementation"].value, attention)
        self.assertEqual(found["torch_compile"].value, compiled)

    @parameterized.parameters(
        # the CPU has AMX, AVX512-BF16, shape, sharding, flags of the resumed run -> bf16, why
        (True, True, "t5-v1_1-base", "ddp", {}, True, "AMX"),
        (False, True, "t5-v1_1-base", "ddp", {}, True, "AVX512-BF16"),
        (True, True, "mini", "ddp", {"bf16": True}, True, "resumed"),
        (True, True, "mini", "ddp", {"bf16": False}, False, "resumed"),
        (True, True, "tiny", "ddp", {}, False, "a width below 256"),
        (False, True, "tiny", "ddp", {}, True, "AVX512-BF16"),
        (True, True, "t5-v1_1-base", "zero2", {}, False, "float32"),
        (False, False, "t5-v1_1-base", "ddp", {}, False, "float32"),
    )
    def test_bf16_on_a_cpu(self, amx, avx512_bf16, shape, sharding, earlier, bf16, why):
        job, launcher = (
            dict(model=planned(build_config(shape, None)), earlier=earlier),
            Launcher(cores=2, sharding=sharding),
        )
        supported = dict(_is_amx_tile_supported=lambda: amx, _is_avx512_bf16_supported=lambda: avx512_bf16)
        with mock.patch.multiple(torch.cpu, **supported):
            found = chosen(None, None, launcher, **job)["bf16"]
        self.assertEqual(found.value, bf16)
        self.assertIn(why, found.reason)

    @parameterized.parameters(
        (True, None, "x86_64", True),
        (True, "AMX", "x86_64", False),
        (False, None, "x86_64", False),
        (True, None, "aarch64", False),
    )
    def test_bfloat16_that_is_slow(self, bf16, units, processor, told):
        args = PreTrainingArguments(output_dir=str(self.folder), report_to="none", use_cpu=True, bf16=bf16)
        here = dict(bf16_units=lambda: units, platform=mock.Mock(machine=lambda: processor))
        with mock.patch.multiple("foundry.common.machine", **here):
            self.assertEqual("leave --bf16 out" in described_device(args), told)

    def test_mini_on_a_cpu_with_amx_is_compiled_in_bfloat16_without_a_flag(self):
        config = build_config("mini", None)
        job = TrainingJob(**JOB | dict(model=planned(config), source=128, target=29))
        args = PreTrainingArguments(output_dir=str(self.folder), report_to="none", use_cpu=True)
        args.optim, args.given = "adamw_rms_scaled", frozenset()
        with (
            mock.patch.multiple(speed, bf16_units=lambda: "AMX", missing_compiler=lambda *_: None),
            mock.patch.object(speed, "find_launcher", lambda _: Launcher(cores=2)),
        ):
            decided = decide_speed(job, args)
        args = args.replaced(**decided.flags(args))
        self.assertEqual((decided.attention, decided.bf16, decided.torch_compile), ("eager", True, True))
        self.assertEqual((args.bf16, args.mixed_precision, args.torch_compile), (True, "bf16", True))
        self.assertTrue(args.bf16_residual)
        self.assertEqual(args.torch_compile_backend, "inductor")

    @parameterized.parameters(
        # the CPU's instructions, job, flags given -> bf16_residual, why
        ("AMX", dict(), {}, True, "three seeds"),
        ("AVX512-BF16", dict(), {}, None, ""),
        ("AMX", dict(earlier={"bf16": True}), {}, False, "resumed"),
        ("AVX512-BF16", dict(earlier={"bf16": True, "bf16_residual": True}), {}, True, "resumed"),
        ("AMX", dict(), dict(bf16_residual=False), False, "given"),
        ("AMX", dict(), dict(bf16=False), None, ""),
        ("AMX", dict(shapes=4), {}, None, ""),  # fine-tuning
    )
    def test_residual_stream_on_a_cpu(self, units, job, flags, value, why):
        with mock.patch.object(speed, "bf16_units", lambda: units):
            found = chosen(None, flags, Launcher(cores=2), **dict(model=planned(build_config("mini", None))) | job)
        self.assertEqual(found["bf16_residual"].value if "bf16_residual" in found else None, value)
        self.assertIn(why, found["bf16_residual"].reason if value is not None else "")

    @parameterized.parameters(
        # job, flags given or None -> packing, why
        (dict(), None, True, "less padding"),
        (dict(), dict(packing=False), False, "given"),
        (dict(shapes=4), None, False, "has another shape"),
        (dict(earlier={"packing": False}), None, False, "resumed"),
        (dict(model=planned(LONGT5)), None, False, "no mask"),
        (dict(packable=False), None, None, ""),  # a stream
        (dict(gpu="h200"), None, None, ""),
        (dict(gpu="h200", earlier={"packing": True}), None, True, "resumed"),
    )
    def test_fine_tuning_on_a_cpu_packs(self, job, flags, packing, why):
        gpu = dict(dry_run=True, assume_gpu=job.pop("gpu")) if "gpu" in job else {}
        args = FineTuningArguments(output_dir=str(self.folder), report_to="none", **gpu, **flags or {})
        args.optim, args.given = "adamw_rms_scaled", frozenset(flags or ())
        job = TrainingJob(**JOB | dict(shapes=0, packable=True) | job)
        found = {choice.name: choice for choice in choose_settings(find_gpu(args), job, args, Launcher(cores=2))}
        if packing is None:
            self.assertNotIn("packing", found)
        else:
            self.assertEqual(found["packing"].value, packing)
            self.assertIn(why, found["packing"].reason)

    def test_eager_and_sdpa_differ_by_rounding_alone(self):
        """The losses of an evaluation with padded sources: in float32 both are within 1e-6 of float64's. In bfloat16
        each is off by more than that: what a fine-tuning under --bf16 reports in eager attention, evaluate_t5.py
        repeats in sdpa to the rounding of bfloat16 only."""
        torch.manual_seed(0)
        model = create_model(build_config("tiny", 160, SHAPE)).eval()
        ids, labels = torch.randint(3, 160, (8, 9)), torch.randint(3, 160, (8, 5))
        for row in range(8):  # 2 to 9 tokens
            ids[row, 2 + row :] = 0
        inputs = dict(input_ids=ids, attention_mask=ids.ne(0).long(), decoder_input_ids=labels.roll(1, 1))

        def loss(attention: str, dtype: torch.dtype) -> float:
            set_attention(model, attention)
            model.to(torch.float64 if dtype is torch.float64 else torch.float32)
            mixed = torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16)
            with torch.no_grad(), mixed:
                logits = model(**inputs, use_cache=False).logits
            logits = logits if dtype is torch.float64 else logits.float()
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()

        exact = loss("sdpa", torch.float64)
        off = {
            (name, kind): abs(loss(name, kind) - exact)
            for name in ("eager", "sdpa")
            for kind in (torch.float32, torch.bfloat16)
        }
        for name in ("eager", "sdpa"):
            self.assertLess(off[name, torch.float32], 1e-6)
            self.assertBetween(off[name, torch.bfloat16], 1e-6, 5e-3)

    def test_names_of_gpus(self):
        self.assertEqual(list(GPUS), ["h200", "h100", "a100", "l40s", "rtx4090", "rtx3090", "l4", "t4"])
        for name, size in (("NVIDIA A100-SXM4-80GB", 80), ("Tesla T4", 16), ("NVIDIA L4", 24), ("NVIDIA L40S", 48)):
            self.assertEqual(peaks_of(name)["memory_gb"], size)
        self.assertIsNone(peaks_of("NVIDIA L40"))
        self.assertIsNone(peaks_of("NVIDIA T400"))


class AppliedTest(parameterized.TestCase):
    def flags(self, **changes) -> list[str]:
        text = self.folder / "text.txt"
        if not text.exists():
            text.write_text("\n".join(sentences(400)))
        return argv_of(
            dict(
                config_name="tiny",
                config_overrides=OVERRIDES,
                train_file=text,
                vocab_size=400,
                input_seq_length=32,
                output_dir=self.folder / "out",
                report_to="none",
                data_cache_dir=self.folder / "cache",
            )
            | changes
        )

    def test_a_plan_for_another_machine(self):
        words = [*self.flags(max_steps=65_536), "--plan", "full", "--dry_run", "--assume_gpu"]
        _, out, _ = run_main(pre_train_t5.main, *words, "h200", code=0)
        line = next(line for line in out.splitlines() if line.startswith("speed"))
        for part in (
            "bf16 on (the H200 computes in it)",
            "attn_implementation sdpa (",
            "torch_compile on (all batches have one shape)",
            "micro-batch 128 x 1 (",
            "float32 products high",
            "expandable segments on",
        ):
            self.assertIn(part, line)
        self.assertRegex(out, r"batch +128 sequences per step \(128 x 1 accumulated x 1 processes\)")
        self.assertRegex(out, r"device +h200, bfloat16 mixed precision")
        self.assertRegex(out, r"time +\d.* on paper, at 45% of the H200's peak; without evaluating and saving")
        _, out, _ = run_main(pre_train_t5.main, *words, "t4", "--speed", "plain", code=0)
        self.assertRegex(out, r"speed +plain: nothing is chosen")
        self.assertRegex(
            out, r"batch +128 sequences per step \(32 x 4 accumulated x 1 processes\); the learning rate is for 128"
        )
        _, _, err = run_main(pre_train_t5.main, *self.flags(assume_gpu="h200"), code=2)
        self.assertIn("--assume_gpu h200: only plans for another machine: add --dry_run", err)

    def test_what_is_chosen_reaches_model_and_flags(self):
        args = arguments(assume_gpu=None)
        model = mock.Mock()
        gpu = Gpu("NVIDIA H200", 141e9, (9, 0))
        with (
            mock.patch.object(speed, "find_gpu", lambda _: gpu),
            mock.patch.object(speed, "find_launcher", lambda _: Launcher(cores=6)),
            mock.patch.object(torch, "set_float32_matmul_precision") as precision,
            mock.patch.object(torch._C, "_accelerator_setAllocatorSettings") as allocator,
        ):
            before = vars(args).copy()
            decided = decide_speed(TrainingJob(**JOB), args)
            self.assertEqual(vars(args), before, "deciding changes nothing")
            use_speed(decided, model, args)
        args = args.replaced(**decided.flags(args))
        model.set_attn_implementation.assert_called_once_with("sdpa")
        self.assertTrue(args.torch_compile)
        self.assertEqual(args.torch_compile_backend, "inductor")
        self.assertEqual((args.per_device_train_batch_size, args.gradient_accumulation_steps), (128, 1))
        self.assertEqual((args.dataloader_num_workers, args.dataloader_prefetch_factor), (6, 4))
        precision.assert_called_once_with("high")
        allocator.assert_called_once_with("expandable_segments:True")
        self.assertIn("micro-batch 128 x 1", decided.described)

    def test_data_workers_live_as_long_as_the_run(self):
        """They ignore SIGTERM: kept for the next epoch, they would keep the process from ending."""
        seen = []

        def note(*_, **__):
            seen.append(sorted(child.pid for child in multiprocessing.active_children()))

        flags = self.flags(
            max_steps=-1,
            num_train_epochs=9,
            dataloader_num_workers=1,
            save_strategy="no",
            per_device_train_batch_size=16,
            eval_strategy="no",
            max_train_samples=100,
            warmup_steps=0,
        )
        with mock.patch("foundry.training.preemption.PreemptionCallback.on_step_end", note):
            run_main(pre_train_t5.main, *flags)
        self.assertGreater(len(seen), 3)
        self.assertLen(seen[0], 1)
        self.assertEqual(seen, [seen[0]] * len(seen), "one worker in all epochs")
        self.assertEmpty(multiprocessing.active_children())
        with self.assertRaises(ProcessLookupError):
            os.kill(seen[0][0], 0)
        arguments = read_json(self.folder / "out" / "run.json")["arguments"]
        self.assertEqual((arguments["speed"], arguments["attn_implementation"]), ("auto", "eager"))
