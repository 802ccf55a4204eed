"""Mixtures of tasks: rates and order by hand and as invariants, and a run of fine_tune_t5.py on three kinds of tasks.

Hermetic: tasks, tokenizer and a model of some thousand weights are made here.
"""

import contextlib
import io
import itertools
import json
import random
import shutil
import tempfile
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import datasets
import numpy as np
from absl.testing import parameterized
from helpers import OVERRIDES

import constants
import evaluate_t5
import fine_tune_t5
from foundry.common.reports import read_metrics
from foundry.corpora.tokenizers import train_tokenizer
from tasks.entry import TaskEntry
from tasks.mixture import Mixture, MixtureSampler, Tasks, mixing_rates, shares

TIMES = ("runtime", "per_second")
MACHINE = ("seconds", "seconds_left", "peak_memory_gib", "mfu")
FILES = {"train": "{}_train.jsonl", "validation": "{}_dev.jsonl"}


def entry(name: str, **fields) -> dict:
    files = {split: file.format(name) for split, file in FILES.items()}
    lengths = dict(max_source_length=32, max_target_length=16)
    return dict(prefix=name, inputs={"": "text"}, target="target", files=files) | lengths | fields


BENCHMARK = {  # labels of several tokens; two evaluation splits; a number; several references
    "colour": entry("colour", target_type="class", labels=["deep_red", "green"], metrics=["accuracy", "f1"])
    | dict(
        files=FILES | {"train": "colour_train.jsonl", "near": "colour_dev.jsonl", "far": "colour_far.jsonl"},
        eval_splits=["near", "far"],
    ),
    "size": entry("size", target_type="number", metrics=["pearson"]),
    "echo": entry("echo", target_type="text", metrics=["rouge1", "exact_match"]),
    "wrong_file": entry("nothing", target_type="text", metrics=["bleu"]),
}


class RatesTest(parameterized.TestCase):
    @parameterized.parameters(
        ([100, 10_000], "proportional", 65_536, 2.0, [100, 10_000]),
        ([100, 10_000], "proportional", 2_500, 2.0, [100, 2_500]),
        ([100, 10_000], "temperature", 2_500, 2.0, [10, 50]),
        ([100, 10_000], "temperature", 2_500, 1.0, [100, 2_500]),
        ([100, 10_000], "equal", 2_500, 2.0, [1, 1]),
    )
    def test_rates_by_hand(self, sizes, mixing, cap, temperature, expected):
        np.testing.assert_allclose(mixing_rates(sizes, mixing, cap, temperature), expected)

    def test_a_high_temperature_is_equal_mixing(self):
        rates = np.array(mixing_rates([10, 1_000, 100_000], "temperature", 10**9, 1e6))
        np.testing.assert_allclose(rates / rates.sum(), 1 / 3, rtol=1e-4)

    @parameterized.parameters(
        ([1, 1, 2], 6, [2, 1, 3]), ([1, 3], 4, [1, 3]), ([1, 1], 3, [2, 1]), ([1, 999], 5, [0, 5])
    )
    def test_shares_by_hand(self, rates, rows, expected):
        self.assertEqual(shares(rates, rows), expected)

    def test_shares_sum_up(self):
        chooser = np.random.default_rng(0)
        for _ in range(200):
            rates, rows = chooser.uniform(0.01, 9, chooser.integers(1, 9)), int(chooser.integers(1, 500))
            counts = shares(rates.tolist(), rows)
            self.assertEqual(sum(counts), rows)
            self.assertLess(np.abs(np.array(counts) - rates / rates.sum() * rows).max(), 1)


class SamplerTest(parameterized.TestCase):
    SIZES, COUNTS = [5, 40, 12], [7, 10, 12]

    def epochs(self, number: int, seed: int = 0) -> list[list[int]]:
        sampler = MixtureSampler(self.SIZES, self.COUNTS, seed)
        orders = []
        for epoch in range(number):
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
        return orders

    def tasks_of(self, numbers: list[int]) -> list[int]:
        return np.searchsorted(np.cumsum(self.SIZES), numbers, side="right").tolist()

    def test_every_epoch_has_each_tasks_share(self):
        for order in self.epochs(6):
            self.assertLen(order, 29)
            self.assertEqual(Counter(self.tasks_of(order)), {0: 7, 1: 10, 2: 12})

    def test_no_row_comes_again_before_all_have_come(self):
        seen = sum(self.epochs(12), [])
        for task, size in enumerate(self.SIZES):
            times = Counter(number for number in seen if self.tasks_of([number]) == [task])
            total = 12 * self.COUNTS[task]
            self.assertLen(times, size)
            self.assertEqual(set(times.values()), {total // size, -(-total // size)})

    def test_each_epoch_of_a_task_has_another_order(self):
        """Two tasks of 40 rows, of which an epoch takes ten: in four epochs each row comes once, and the ten of an
        epoch are others in the next four, and for the other task."""
        sampler, tens = MixtureSampler([40, 40], [10, 10], 0), []
        for epoch in range(12):
            sampler.set_epoch(epoch)
            numbers = list(sampler)
            tens.append([{n % 40 for n in numbers if n // 40 == task} for task in (0, 1)])
        for task in (0, 1):
            own_epochs = [[epoch[task] for epoch in tens[first : first + 4]] for first in (0, 4, 8)]
            for parts in own_epochs:
                self.assertCountEqual(sum(map(list, parts), []), range(40))
            for one, other in itertools.combinations(own_epochs, 2):
                self.assertNotEqual(one, other)
        self.assertNotEqual(*([epoch[task] for epoch in tens[:4]] for task in (0, 1)))

    def test_an_epoch_takes_little_memory(self):
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        numbers = iter(MixtureSampler([400_000], [400_000], 0))
        next(numbers)
        self.assertLess(tracemalloc.get_traced_memory()[0], 20 * 400_000)  # a list of them: 40 bytes each

    def test_an_epoch_is_a_function_of_seed_and_number(self):
        orders = self.epochs(5)
        alone = MixtureSampler(self.SIZES, self.COUNTS, 0)
        alone.set_epoch(3)  # as a resumed run does
        self.assertEqual(list(alone), orders[3])
        self.assertEqual(list(alone), orders[3])
        self.assertNotEqual(orders[2], orders[3])
        self.assertNotEqual(self.epochs(1, seed=1)[0], orders[0])

    def test_tasks_are_shuffled_together(self):
        tasks = self.tasks_of(sum(self.epochs(40), []))
        changes = sum(a != b for a, b in zip(tasks, tasks[1:], strict=False)) / (len(tasks) - 1)
        shares = np.array(self.COUNTS) / sum(self.COUNTS)
        self.assertAlmostEqual(changes, 1 - (shares**2).sum(), delta=0.05)  # as of independent draws


class MixtureTest(parameterized.TestCase):
    def parts(self) -> dict:
        return {
            name: datasets.Dataset.from_dict({"input_ids": [[i] for i in ids]})
            for name, ids in (("a", range(3)), ("b", range(10, 15)))
        }

    def test_rows_of_all_tasks(self):
        mixture = Mixture(self.parts(), [3, 5], rows_per_epoch=8)
        self.assertLen(mixture, 8)
        rows = mixture.__getitems__(list(mixture.sampler(0)))
        self.assertCountEqual([row["input_ids"][0] for row in rows], [0, 1, 2, 10, 11, 12, 13, 14])
        self.assertEqual(mixture[4], {"input_ids": [11]})
        self.assertEqual(mixture.described(), "8 rows an epoch: a 3 of 3 (37.5 %), b 5 of 5 (62.5 %)")

    def test_its_fingerprint_tells_rates_and_rows(self):
        prints = {Mixture(self.parts(), rates, 8)._fingerprint for rates in ([3, 5], [1, 1], [1.001, 1])}
        self.assertLen(prints, 2)
        self.assertNotIn(Mixture({"a": self.parts()["a"], "b": self.parts()["a"]}, [1, 1], 8)._fingerprint, prints)

    def test_a_task_without_rows_is_refused(self):
        with self.assertRaisesRegex(ValueError, "an epoch of 8 rows has none of the task a. Give --mixing equal"):
            Mixture(self.parts(), [1, 999], 8)

    def test_average(self):
        entries = {
            "a": TaskEntry(metrics=["f1"]),
            "b": TaskEntry(metrics=["bleu"], eval_splits=["validation", "test"]),
        }
        tasks = [SimpleNamespace(name=name, entry=entry, args=None) for name, entry in entries.items()]
        average = Tasks(tasks).summarise
        self.assertEqual(
            average({"eval_a_f1": 0.5, "eval_b_validation_bleu": 30.0, "eval_a_loss": 9.0}), {"eval_average": 0.4}
        )


class RunTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.enterClassContext(mock.patch.dict(constants.DATASET_VALS, {"mine": BENCHMARK}))
        chooser = random.Random(0)
        words = ["".join(chooser.choices("abcdefgh", k=4)) for _ in range(60)]

        def write(name: str, rows: list[dict]) -> None:
            (cls.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

        def text(number: int) -> str:
            return " ".join(chooser.choices(words, k=number))

        for split, number in (("train", 60), ("dev", 11), ("far", 6)):
            write(f"colour_{split}", [{"text": text(3), "target": i % 2} for i in range(number)])
            write(f"size_{split}", [{"text": text(3), "target": i % 6} for i in range(number // 2)])
            write(
                f"echo_{split}",
                [
                    {"text": words[i], "target": [words[i], text(1)][: 1 + (split != "train")]}
                    for i in range(number // 3)
                ],
            )
        lines = [text(8) + f" {i / 10:.1f} deep_red green colour: size: echo:" for i in range(200)]
        train_tokenizer(lines, cls.folder / "tokenizer", 200)
        (cls.folder / "text.txt").write_text("\n".join(text(9) for _ in range(300)))
        cls.results = cls.run_script("whole")

    @classmethod
    def flags(cls, name: str, *flags: str, tasks: str = "colour,size,echo") -> list[str]:
        argv = f"--benchmark mine --dataset_name {tasks} --data_dir {cls.folder} --output_dir {cls.folder}/{name} "
        argv += (
            f"--tokenizer_name {cls.folder}/tokenizer --config_name tiny --config_overrides {OVERRIDES} --use_cpu true "
        )
        argv += f"--data_cache_dir {cls.folder}/cache --report_to none --disable_tqdm true --dropout_rate 0.1 "
        argv += "--per_device_train_batch_size 16 --num_train_epochs 4 --mixing temperature --logging_steps 4 "
        argv += "--eval_strategy steps --eval_steps 8 --save_strategy steps --save_steps 8 --learning_rate 0.02 "
        argv += "--lr_scheduler_type constant_with_warmup --warmup_steps 0.05 "
        argv += f"--span_corruption_file {cls.folder}/text.txt --load_best_model_at_end false --save_total_limit 20"
        return [*argv.split(), *flags]

    @classmethod
    def run_script(cls, name: str, *flags: str, **options) -> dict:
        cls.printed = io.StringIO()
        with contextlib.redirect_stdout(cls.printed):
            return fine_tune_t5.main(cls.flags(name, *flags, **options))

    def without_times(self, record: dict) -> dict:
        return {name: value for name, value in record.items() if not name.endswith((*TIMES, *MACHINE))}

    def test_names_of_the_metrics(self):
        names = {name for name in self.results if name.startswith("eval_") and not name.endswith(TIMES)}
        common = {"loss", "token_accuracy"}
        expected = {
            f"eval_colour_{split}_{metric}"
            for split in ("near", "far")
            for metric in {"accuracy", "f1", "invalid_outputs"} | common
        }
        expected |= {f"eval_size_{metric}" for metric in {"pearson", "invalid_outputs"} | common}
        expected |= {f"eval_echo_{metric}" for metric in {"rouge1", "exact_match"} | common}
        self.assertEqual(names, expected | {"eval_average"})
        main = [self.results[f"eval_{name}"] for name in ("colour_near_accuracy", "size_pearson", "echo_rouge1")]
        self.assertAlmostEqual(self.results["eval_average"], np.mean(main))

    def test_each_task_is_judged_as_when_it_is_evaluated_alone(self):
        self.assertLess(self.results["eval_colour_near_invalid_outputs"], 11, "the model has learnt no label at all")
        for name in ("colour", "size", "echo"):
            flags = (
                f"--benchmark mine --dataset_name {name} --data_dir {self.folder} --use_cpu true --disable_tqdm true "
            )
            flags += f"--model_name_or_path {self.folder}/whole --output_dir {self.folder}/eval_{name} "
            flags += f"--data_cache_dir {self.folder}/cache --report_to none"
            with contextlib.redirect_stdout(io.StringIO()):
                alone = self.without_times(evaluate_t5.main(flags.split()))
            for key, value in alone.items():
                together = self.results[f"eval_{name}_{key.removeprefix('eval_')}"]
                self.assertAlmostEqual(together, value, places=5, msg=f"{name}: {key}")

    def test_what_the_run_says_and_keeps(self):
        record = json.loads((self.folder / "whole" / "run.json").read_text())
        self.assertEqual(record["examples"]["echo/train"], 20)
        self.assertEqual(record["arguments"]["mixing"], "temperature")
        state = json.loads((self.folder / "whole" / "trainer_state.json").read_text())
        self.assertEqual(state["max_steps"], 4 * 8)  # 60 + 30 + 20 rows an epoch and 12 of text, in batches of 16
        self.assertRegex(record["plan"]["mixture"], r"122 rows an epoch: .*, span_corruption 12 of \d+ \(9.8 %\)")
        averages = {
            line["step"]: line["eval_average"]
            for line in read_metrics(self.folder / "whole" / "metrics.jsonl")
            if "eval_average" in line
        }
        self.assertEqual(state["best_metric"], max(averages.values()))
        self.assertTrue((self.folder / "whole" / "loss.png").is_file())

    def test_resumed_within_an_epoch_it_ends_with_the_same_bits(self):
        shutil.copytree(self.folder / "whole", self.folder / "resumed")
        for step in (24, 32):
            shutil.rmtree(self.folder / "resumed" / f"checkpoint-{step}", ignore_errors=True)
        (self.folder / "resumed" / "model.safetensors").unlink()
        results = self.run_script("resumed", "--resume_from_checkpoint")  # from step 16, within the third epoch
        weights = [(self.folder / name / "model.safetensors").read_bytes() for name in ("whole", "resumed")]
        self.assertEqual(weights[0], weights[1])
        self.assertEqual(self.without_times(results), self.without_times(self.results))
        logged = [
            [self.without_times(line) for line in read_metrics(self.folder / name / "metrics.jsonl")]
            for name in ("whole", "resumed")
        ]
        self.assertEqual(logged[0], logged[1])

    def test_another_mixture_is_not_resumed(self):
        shutil.copytree(self.folder / "whole", self.folder / "other")
        flags = self.flags("other", "--resume_from_checkpoint")
        flags[flags.index("--mixing") + 1] = "equal"
        self.fails(flags, "the contents of train: .* in its run")

    def test_the_best_average_is_loaded_and_patience_ends_the_run(self):
        argv = self.flags("patient", "--early_stopping_patience", "1")
        for flag, value in (("--learning_rate", "0"), ("--load_best_model_at_end", "true")):
            argv[argv.index(flag) + 1] = value
        with contextlib.redirect_stdout(io.StringIO()):
            fine_tune_t5.main(argv)
        state = json.loads((self.folder / "patient" / "trainer_state.json").read_text())
        self.assertEqual(state["global_step"], 16)  # nothing is learnt, so the second evaluation is no better
        self.assertEqual(state["best_global_step"], 8)

    def fails(self, flags: list[str], message: str) -> None:
        with self.assertRaises(SystemExit) as stopped, contextlib.redirect_stderr(io.StringIO()) as errors:
            fine_tune_t5.main(flags)
        self.assertEqual(stopped.exception.code, 2)
        self.assertRegex(errors.getvalue(), message)

    @parameterized.named_parameters(
        ("twice", "size,size", [], "--task mine/size,mine/size: size occurs twice"),
        ("file_of_one", "size,echo", ["--train_file", "{}/size_dev.jsonl"], "--task mine/size,mine/echo names 2"),
        ("of_equal", "size,echo", ["--mixing_temperature", "3", "--mixing", "equal"], "_temperature 3.0: needs"),
        ("one_task", "size", [], "--mixing temperature: needs several tasks, and --task mine/size is one"),
        ("order", "size,echo", ["--train_sampling_strategy", "sequential"], "rows of a mixture come in random order"),
        ("metric", "size,echo", ["--metric_for_best_model", "pearson"], "no metric of this run.*echo_rouge1.*average"),
        ("all", "all", [], "no file nothing_train.jsonl, which task wrong_file reads as train"),
    )
    def test_refused(self, tasks, flags, message):
        flags = [flag.format(self.folder) for flag in flags]
        argv = self.flags("refused", tasks=tasks)
        for flag in flags[::2]:
            if flag in argv:
                del argv[argv.index(flag) : argv.index(flag) + 2]
        self.fails([*argv, *flags], message)
