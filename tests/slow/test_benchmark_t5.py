"""Tests of benchmarks/__main__.py: every command through main([...]) at a tiny size, and what its figures are made of.

No figure of speed is tested here: those of this project that are guaranteed have tests of their own.
"""

import contextlib
import io
import itertools
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from absl.testing import absltest, parameterized
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from warm_python import warm_python

from benchmarks import __main__ as benchmark_t5
from benchmarks import inputs, measure, scripts, step
from benchmarks.measure import bare_tokenizer, benchmark_config, random_batches
from constants import MODEL_SHAPES
from data_collator_t5 import T5DataCollator
from foundry.common import reports
from foundry.common.reports import environment_record
from foundry.runs.memory import matrix_parameters

ROOT = Path(__file__).resolve().parents[2]
MEASUREMENTS = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
TINY = dict(d_model=32, d_kv=8, d_ff=48, num_heads=2, num_layers=1, num_decoder_layers=1)
# What a GPU machine without data and tracking packages lacks.
NOT_NEEDED = "datasets wandb deepspeed absl sentencepiece evaluate optuna matplotlib sklearn sacrebleu psutil".split()
NOT_NEEDED += "pandas scipy peft bitsandbytes".split()

# Files as those of a checkout of nanoT5, of the same names.
NANOT5_UTILS = """
import numpy as np
import torch
from dataclasses import dataclass


@dataclass
class DataCollatorForT5MLM:
    tokenizer: object
    noise_density: float
    mean_noise_span_length: float
    input_length: int
    target_length: int
    pad_token_id: int

    def __call__(self, rows):
        assert self.input_length == 32 and len(self.tokenizer) == 32128
        return {"input_ids": np.array([row["input_ids"] for row in rows])}


class AdamWScale(torch.optim.SGD):
    pass
"""
NANOT5_MODEL = """
import torch
from types import SimpleNamespace


class MyT5(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.d_model == 32 and not config.is_bf16
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, input_ids, labels):
        assert input_ids.shape == (4, 20)
        return SimpleNamespace(loss=7.0 + self.weight.square().sum())
"""


class BenchmarkTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.dict(MODEL_SHAPES, {"tiny": TINY}))
        self.enter_context(mock.patch.dict(measure.MATRIX, cpu=64))
        self.enter_context(mock.patch.object(measure, "gc"))  # rungs this small leave little to be freed
        measure.peak_flops.cache_clear()

    def run_main(self, *argv: str) -> tuple[dict, str]:
        """(the last line's JSON, everything printed)."""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            result = benchmark_t5.main(list(argv))
        printed = out.getvalue()
        last = json.loads(printed.splitlines()[-1], parse_constant=lambda name: self.fail(f"{name} is not JSON"))
        self.assertEqual(last.keys(), result.keys())
        return last, printed


def arguments(*argv: str, **changes) -> Namespace:
    """What a command's function is handed; no time is up, however busy the machine."""
    args = benchmark_t5.resolved_part(benchmark_t5.parse_command([*argv, "--device", "cpu"]))
    return Namespace(**vars(args) | {"deadline": float("inf")} | changes)


class CommandsTest(BenchmarkTest):
    def test_step_reports_rates_that_fit_together_and_writes_them(self):
        output = self.folder / "new" / "step.json"
        flags = ["--batch", "2", "--source_length", "20", "--rounds", "2", "--steps", "2", "--minutes", "30"]
        found, _ = self.run_main("step", *flags, "--rows", "plain,dropout_0", "--output", str(output))
        self.assertEqual([row["name"] for row in found["rows"]], ["plain", "dropout_0"])
        for row in found["rows"]:
            self.assertNotIn("error", row)
            self.assertAlmostEqual(row["sequences_per_second"], 2 / np.median(row["seconds"]), places=3)
            raw = row["sequences_per_second"] * found["raw_tokens_per_sequence"]
            self.assertAlmostEqual(row["raw_tokens_per_second"] / raw, 1, places=6)
            tflops = row["sequences_per_second"] * found["gflops_per_sequence"] / 1000
            self.assertAlmostEqual(row["tflops"] / tflops, 1, places=6)
            self.assertAlmostEqual(row["mfu"], row["tflops"] / found["matrix_product_tflops"], places=6)
            self.assertNotIn("expected", row)  # predictions are for a GPU
        written = json.loads(output.read_text())
        self.assertEqual(written["rows"], found["rows"])
        self.assertContainsSubset(["started", "versions", "git", "hardware", "arguments", "seconds"], written)
        self.assertEqual(written["versions"]["torch"].split("+")[0], torch.__version__.split("+")[0])
        self.assertContainsSubset(["threads", "load_average", "cpus"], written["hardware"])
        self.assertEqual(written["arguments"]["model"], "tiny")

    def test_published_files_where_a_checkout_is_named(self):
        """A checkout with files as nanoT5's: its collator, model and optimizer are timed, and told by name."""
        file = self.folder / inputs.NANOT5_COLLATOR
        file.parent.mkdir(parents=True)
        file.write_text(NANOT5_UTILS)
        file.with_name("t5_model.py").write_text(NANOT5_MODEL)
        file.with_name("__init__.py").write_text("import a_package_of_tomorrow")
        checkout = ["--nanot5", str(self.folder), "--batch", "4", "--rounds", "2"]
        found, _ = self.run_main("collator", *checkout, "--source_length", "32")
        self.assertEqual(found["rows"][1]["what"], "nanoT5's own file")
        flags = ["--rows", "plain", "--steps", "1", "--source_length", "20"]
        executable = mock.patch.object(sys, "executable", warm_python())  # of the process that nanoT5's step runs in
        with executable, mock.patch.object(step, "PEERS", self.folder):
            found, _ = self.run_main("step", *checkout, *flags)
        plain, nanot5 = found["rows"]
        self.assertLen(nanot5["seconds"], 2)
        self.assertAlmostEqual(nanot5["sequences_per_second"], 4 / np.median(nanot5["seconds"]))
        self.assertIn("torch", nanot5["versions"])
        rates = {row["name"]: row["sequences_per_second"] for row in (plain, nanot5)}
        self.assertEqual(found["strongest_peer"], max(rates, key=rates.get))
        with mock.patch.object(step, "PEERS", self.folder / "none"):
            found, _ = self.run_main("step", *checkout, *flags)
        self.assertEqual(
            found["rows"][1]["error"], "not available: there is no out/peers: make peers puts transformers 4 there"
        )

    def test_memory_counts_what_each_way_keeps(self):
        """Recomputed blocks keep least, our layers less than transformers'; dropout adds to all."""
        flags = ["--device", "cpu", "--model", "tiny", "--source_length", "24"]
        found, printed = self.run_main("memory", *flags)
        kept = {row["name"]: row["kept_mib"] for row in found["rows"]}
        for case in ("eager 0", "eager 0.1", "sdpa 0", "sdpa 0.1"):
            self.assertLess(kept[f"ours {case}"], 0.8 * kept[f"transformers {case}"], case)
            self.assertLess(kept[f"ours {case}"], 0.85 * kept[f"plain {case}"], case)
            self.assertLess(kept[f"checkpointing {case}"], kept[f"transformers {case}"], case)
        for way in ("ours", "plain", "transformers", "checkpointing"):
            self.assertLess(kept[f"{way} eager 0"], kept[f"{way} eager 0.1"], way)
        copies = {row["name"]: row["weight_copies_mib"] for row in found["rows"]}
        self.assertEqual(copies["ours eager 0"], 0)
        # The weights of all matrices in bfloat16, the embedding's left out.
        config = benchmark_config("tiny")
        self.assertAlmostEqual(copies["transformers eager 0"], 2 * matrix_parameters(config) / 2**20, places=6)
        self.assertIn("weight copies mib", printed)

    def test_tokenise(self):
        found, _ = self.run_main("tokenise", "--megabytes", "0.05", "--source_length", "64", "--rounds", "2")
        ours, peer = found["rows"]
        self.assertGreater(ours["chunks"], 100)
        # Both join all documents; the peer loses the rest of every batch of a thousand.
        self.assertBetween(ours["chunks"] - peer["chunks"], 0, 3)
        self.assertAlmostEqual(found["ratio"], ours["megabytes_per_second"] / peer["megabytes_per_second"])

    def test_evaluation_lengths_are_skewed_as_stated(self):
        lengths = [len(source) for source in measure.random_sources(20_000, 128, 4096)]
        self.assertBetween(np.median(lengths), 35, 37)  # 0.28 * 128
        self.assertBetween(np.mean(lengths), 39, 42)  # times exp(0.5 ** 2 / 2), less what is cut off at 128
        self.assertEqual((min(lengths), max(lengths)), (8, 128))

    def test_a_classifier_trains_and_scores_the_same_rows_in_every_way(self):
        flags = ["--examples", "24", "--batch", "8", "--source_length", "32", "--rounds", "1"]
        found, printed = self.run_main("classifier", *flags)
        rows = {row["name"]: row for row in found["rows"]}
        trained = ["run_glue_like", "by_length", "packing", "dropout_0"]
        self.assertEqual(list(rows), [*trained, "generated_padded", "generated", "scored"])
        rates = {name: row["sequences_per_second"] for name, row in rows.items()}
        groups = {"training": (trained[:2], trained[2:]), "evaluation": (["generated_padded", "generated"], ["scored"])}
        for part, (peers, ours) in groups.items():
            strongest = max(peers, key=rates.__getitem__)
            self.assertEqual(found["strongest_peer"][part], strongest)
            self.assertAlmostEqual(found["ratio"][part], max(rates[name] for name in ours) / rates[strongest])
        for name in trained:  # dropout and the rows' order in an epoch leave nothing but noise between them
            self.assertAlmostEqual(rows[name]["training_loss"], rows["run_glue_like"]["training_loss"], delta=0.3)
        self.assertRegex(printed, r"strongest peer: training \w+, evaluation \w+")

    def test_time_that_is_left_and_packages_that_are_not(self):
        log = self.folder / "log"
        script = self.folder / "script.py"
        script.write_text("import a_package_of_tomorrow.part")
        with self.assertRaisesRegex(measure.NotAvailableError, "the package a_package_of_tomorrow is not installed"):
            scripts.run_logged(str(script), [], log)

    def test_needs_neither_data_nor_tracking_packages(self):
        """As on a GPU machine that has torch and transformers: the real command, with the others hidden."""
        hiding = f"import sys; sys.modules.update(dict.fromkeys({NOT_NEEDED!r}))"
        (self.folder / "sitecustomize.py").write_text(hiding)
        flags = "tokenise --megabytes 0.02 --source_length 64 --rounds 2 --output found.json".split()
        command = [sys.executable, "-m", "benchmarks", *flags]
        environment = os.environ | {"PYTHONPATH": f"{self.folder}:{ROOT}", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, cwd=self.folder)
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        self.assertIsNone(json.loads(done.stdout.splitlines()[-1])["ratio"])
        self.assertRegex(done.stdout, "not available: .*datasets")
        self.assertTrue((self.folder / "found.json").is_file())


class FlagsTest(BenchmarkTest):
    def refused(self, *argv: str) -> str:
        """The one line that refuses these flags."""
        with contextlib.redirect_stderr(io.StringIO()) as errors, self.assertRaises(SystemExit) as stopped:
            benchmark_t5.main(list(argv))
        self.assertEqual((stopped.exception.code, len(errors.getvalue().splitlines())), (2, 1))
        return errors.getvalue()

    @parameterized.parameters(
        # the command line -> what the message names
        ("stp", "stp: .*step"),
        ("", "a command"),
        ("step --rows plain,fusion", "--rows fusion: .*plain, dropout_0, compile"),
        ("step --model huge", r"--model huge: .*\(tiny, mini, small, base, large, xl, xxl\)"),
        ("step --bath 4", "--bath: .*--batch"),
        ("gpu --part steps", "--part steps: .*headline, trainer"),
        ("gpu --device cpu", "--device cpu: gpu"),
        ("step --part step", "--part step: .*gpu"),
        ("trainer --rows our", "--rows our: .*ours, compiled_eager"),
        ("collator --source_length 2", "--source_length 2: .*3"),
        ("collator --nanot5 .", r"--nanot5 \.: .*nanoT5/utils/copied_utils.py"),
        ("collator --output .", r"--output \.: "),
    )
    def test_refused(self, words, named):
        self.assertRegex(self.refused(*words.split()), named)

    @absltest.skipIf(torch.cuda.is_available(), "this machine has a GPU")
    def test_a_gpu_that_is_not_there_or_cannot_be_used(self):
        """torch sees it where it is too old, or its driver is, and its first operation fails."""
        output = self.folder / "gpu"
        self.assertIn("--device cuda: ", self.refused("step", "--device", "cuda"))
        self.assertIn("gpu: ", self.refused("gpu", "--output", str(output)))
        self.assertFalse(output.exists())
        with mock.patch.object(torch.cuda, "is_available", lambda: True):
            self.assertRegex(self.refused("gpu", "--output", str(output)), "gpu: .*(CUDA|NVIDIA)")

    def test_the_commit_without_git(self):
        for name, commit in (("abc123", "abc123"), (None, None)):
            environment = {} if name is None else {"T5_FOUNDRY_COMMIT": name}
            with mock.patch.object(reports, "_git", lambda *_: None), mock.patch.dict(os.environ, environment):
                self.assertEqual(environment_record()["git"], {"commit": commit, "dirty": None})


class LadderTest(BenchmarkTest):
    def measured(self, *names: str, batch: int = 2, **changes) -> dict[str, dict]:
        flags = ["--batch", str(batch), "--source_length", "20", "--rounds", "2", "--steps", "1"]
        args = arguments("step", *flags, "--rows", ",".join(names), **changes)
        with contextlib.redirect_stdout(io.StringIO()):
            return {row["name"]: row for row in step.measure_steps(args)["rows"]}

    def test_every_rung_runs(self):
        rungs = {rung.name: rung for rung in step.LADDER}
        found = self.measured(*rungs, rounds=1)
        for name, row in found.items():
            if {"compile", "compile_mode"} & rungs[name].adds.keys():
                self.assertEqual(row["error"], "not available: nothing is compiled here (--compile)")
                continue
            self.assertNotIn("error", row, name)
            self.assertGreater(row["sequences_per_second"], 0)

    def test_peers_get_what_ours_get(self):
        """Twice the batch, all modes of compilation, fused AdamW, no cache; TF32 for all."""
        settings = [step.settings_of_rung(name) for name in step.RUNGS]
        tops = [peer for peer in settings if not peer["ours"] and (peer["batch_factor"] > 1 or peer["compile_mode"])]
        for name in ("batch_factor", "compile_mode"):
            of_ours = {found[name] for found in settings if found["ours"]}
            self.assertContainsSubset(of_ours, {top[name] for top in tops} | {None, 1})
        for top in tops:
            self.assertFalse(top["use_cache"])
            self.assertTrue(top["compile"])
            self.assertEqual(top["optimizer"], "adamw_torch_fused")

    def test_missing_ingredients_and_failures_are_rows(self):
        def broken(self, count):  # noqa: ARG001
            raise ArithmeticError("the loss became nan at step 4")

        with mock.patch.object(measure, "new_model", side_effect=measure.NotAvailableError("no such kernel")):
            rows = self.measured("plain")
        self.assertEqual(rows["plain"]["error"], "not available: no such kernel")
        with mock.patch.object(step.TrainingStep, "run", broken):
            rows = self.measured("plain")
        self.assertEqual(rows["plain"]["error"], "ArithmeticError: the loss became nan at step 4")
        with mock.patch.object(step, "set_up_step", side_effect=measure.NotAvailableError("no such option")):
            rows = self.measured("plain", "our_step")
        self.assertEqual(rows["our_step"]["error"], "not available: no such option")
        self.assertIn("sequences_per_second", rows["plain"])

    def test_out_of_memory_takes_half_the_batch(self):
        tried = []
        real = step.TrainingStep.run

        def run(self, count):
            size = len(self.batches[0]["labels"])
            tried.append(size)
            if size > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(self, count)

        with mock.patch.object(step.TrainingStep, "run", run):
            rows = self.measured("plain", batch=8)
        self.assertEqual(tried[:3], [8, 4, 2])
        self.assertEqual(rows["plain"]["batch"], 2)
        with mock.patch.object(step.TrainingStep, "run", side_effect=torch.OutOfMemoryError("CUDA out of memory")):
            rows = self.measured("plain", batch=8)
        self.assertEqual((rows["plain"]["error"], rows["plain"]["batch"]), ("OutOfMemoryError: CUDA out of memory", 1))

    @parameterized.parameters("zero", "random")
    def test_wrong_attention_is_no_speed(self, kind):
        """Its first loss differs by 1.5 % and by 0.3 %, which a comparison of losses let pass."""

        def wrong(module, query, *_, **__):  # noqa: ARG001
            shape = query.transpose(1, 2).shape
            return (torch.zeros(shape) if kind == "zero" else torch.randn(shape)) + 0 * query.transpose(1, 2), None

        with mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {"sdpa": wrong}):
            rows = self.measured("dropout_0")
        self.assertRegex(rows["dropout_0"]["error"], r"ArithmeticError: the gradient of \S+ is off by \S+ of its norm")
        self.assertNotIn("sequences_per_second", rows["dropout_0"])

    def test_the_gate_is_twice_the_error_of_eager_bfloat16(self):
        args, config = arguments("step", "--batch", "4", "--source_length", "20", bf16=True), benchmark_config("tiny")
        right, tolerance = step.reference_of(config, args, 4)
        (first,) = random_batches(config, 4, 20, 1, args.device)
        settings = step.settings_of_rung("eager") | {"compile": False}
        eager = step.TrainingStep(settings, config, [first], args.device, bf16=True).gradients()
        worst = max(((eager[name] - right[name]).norm() / right[name].norm()).item() for name in right)
        self.assertAlmostEqual(tolerance / (2 * worst), 1, delta=0.3)  # the reference takes fewer rows at a time
        for factor, refused in ((1 + 0.9 * tolerance, False), (1 + 1.1 * tolerance, True), (float("nan"), True)):
            found = {name: tensor * factor for name, tensor in right.items()}
            with self.assertRaises(ArithmeticError) if refused else contextlib.nullcontext():
                step.check_gradients({}, found, right, tolerance)

    @parameterized.parameters(
        # GPU, shape, source length, batch, device -> what is expected of our step
        ("NVIDIA H100 80GB HBM3", "t5-v1_1-base", 512, 128, "cuda", "865-985"),
        ("NVIDIA H200", "t5-v1_1-base", 512, 128, "cuda", "865-985"),
        ("NVIDIA A100-SXM4-80GB", "t5-v1_1-base", 512, 128, "cuda", None),
        ("NVIDIA H100 80GB HBM3", "t5-v1_1-small", 512, 128, "cuda", None),
        ("NVIDIA H100 80GB HBM3", "t5-v1_1-base", 512, 64, "cuda", None),
        ("NVIDIA H100 80GB HBM3", "t5-v1_1-base", 512, 128, "cpu", None),
    )
    def test_only_figures_of_this_gpu_are_expected(self, gpu, model, length, batch, device, expected):
        args = Namespace(model=model, source_length=length, batch=batch, device=torch.device(device))
        args.environment = {"hardware": {"gpu_name": gpu}}
        self.assertEqual(step.expected_rates(args).get("ours"), expected)

    def test_results_are_written_after_every_rung(self):
        kept = []
        self.measured(
            "plain", "dropout_0", keep=lambda found: kept.append([len(r.get("seconds", ())) for r in found["rows"]])
        )
        self.assertEqual(kept, [[1, 0], [1, 1], [2, 1], [2, 2]])

    def test_a_rung_goes_on_for_a_while(self):
        rows = self.measured("dropout_0", sustained=0.3)
        self.assertGreater(rows["dropout_0"]["sustained_sequences_per_second"], 0)
        self.assertNotIn("sustained_sequences_per_second", self.measured("dropout_0")["dropout_0"])
        clock = itertools.count()  # a step takes a second
        with mock.patch.object(step.time, "perf_counter", lambda: float(next(clock))):
            for deadline, runs in ((float("inf"), 10), (time.monotonic() - 5, 1)):
                trained = mock.Mock()
                args = Namespace(sustained=10, steps=2, deadline=deadline)
                self.assertEqual(step.sustained_seconds(trained, args), 0.5)
                self.assertEqual(trained.run.call_count, runs)


class PartsTest(BenchmarkTest):
    @parameterized.named_parameters(
        # The order of the runs; a run fails from its second call on. -> what is kept of b
        ("round", None, "ababab", {"seconds": [1.0, 1.0]}),
        ("fails", ImportError("no b"), "ababa", {"error": "not available: no b"}),
    )
    def test_interleaved(self, error, order, kept):
        calls, rows = [], {"a": {}, "b": {}, "c": {"error": "it could not even be made"}}

        def run(name: str) -> float:
            calls.append(name)
            if error and name == "b" and len(calls) > 2:
                raise error
            return 1.0

        runs = {name: (lambda name=name: run(name)) for name in rows}
        measure.interleaved(rows, runs, rounds=2, warm_up=1)
        self.assertEqual("".join(calls), order)
        self.assertEqual(rows["a"], {"seconds": [1.0, 1.0]})
        self.assertEqual(rows["b"], kept)

    def test_memory_that_runs_out_later_leaves_what_was_measured(self):
        rows, answers = {"a": {}}, iter([1.0, torch.OutOfMemoryError("CUDA out of memory")])
        measure.interleaved(rows, {"a": mock.Mock(side_effect=answers)}, rounds=3)
        self.assertEqual(rows["a"], {"seconds": [1.0], "stopped": "OutOfMemoryError: CUDA out of memory"})

    def test_nothing_begins_after_the_deadline(self):
        """What has begun gets two rounds."""
        rows, now = {name: {} for name in "ab"}, time.monotonic()
        with mock.patch.object(measure.time, "monotonic", side_effect=[now, *[now + 9] * 9]):
            measure.interleaved(rows, dict.fromkeys("ab", lambda: 1.0), rounds=9, deadline=now + 5)
        self.assertEqual(rows, {"a": {"seconds": [1, 1]}, "b": {"error": f"not available: {measure.TIME_IS_UP}"}})

    def test_the_peer_collator_corrupts_as_t5_does(self):
        """Put together again, its inputs and targets are the tokens; lengths are those of our collator."""
        ours = T5DataCollator(bare_tokenizer(1000), 64)
        lengths = ours.inputs_length, ours.targets_length
        peer = inputs.per_example_collator(bare_tokenizer(1000))
        tokens = np.random.default_rng(0).integers(3, 800, size=(8, ours.tokens_length))
        batch = peer([{"input_ids": row} for row in tokens])
        self.assertEqual(tuple(batch["input_ids"].shape), (8, lengths[0]))
        self.assertEqual(tuple(batch["decoder_input_ids"].shape), (8, lengths[1]))
        for row, source, target in zip(tokens, batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            spans, sentinel = {}, None
            for token in target[:-1]:
                if token >= 900:
                    sentinel, spans[token] = token, []
                else:
                    spans[sentinel].append(token)
            self.assertEqual(list(spans), [999 - n for n in range(len(spans))])
            whole = [word for token in source[:-1] for word in (spans.get(token, []) if token >= 900 else [token])]
            self.assertEqual(whole, row.tolist())
            self.assertEqual((source[-1], target[-1]), (1, 1))

    def test_table(self):
        rows = [{"name": "one", "ratio": 1.25, "mfu": 0.5}, {"name": "second", "error": "it broke"}]
        rows.append({"name": "x", "ratio": 10})
        text = measure.rows_as_table(rows)
        self.assertEqual(text, "name  ratio  mfu\none   1.25   50.0%\nx     10.00\nsecond: it broke")
        self.assertEqual(measure.rows_as_table(rows[1:2]), "second: it broke")
