"""The recipes of whole workflows: understood by the real parsers, run for a few steps, their real models measured.

A run has the recipe's every flag; only where things are and how large they are is replaced. Models of real size are
built on the meta device, which holds shapes and no numbers.
"""

import functools
import importlib
import json
import re
import shlex
import tempfile
from pathlib import Path
from unittest import mock

import torch
import yaml
import zoo
from absl.testing import parameterized
from helpers import run_main, sentences
from test_export_checkpoint import SHAPE, TestCase, workspace
from transformers import T5Config, T5GemmaConfig

import constants
import create_tokenizer
import evaluate_t5
import export_checkpoint
import fine_tune_t5
import pre_train_t5
from foundry.arguments.text import check_pre_training_data
from foundry.common.command_line import parse_arguments
from foundry.model_t5 import build_config, count_parameters, create_model, flops_per_sequence, load_model
from foundry.modeling.families import shape_of

ROOT = Path(constants.__file__).parent
SMALL = dict(
    max_steps=2,
    warmup_steps=1,
    logging_steps=1,
    eval_steps=2,
    save_steps=2,
    max_eval_samples=4,
    seed=1,
    per_device_train_batch_size=2,
    per_device_eval_batch_size=2,
    preprocessing_num_workers=1,
    disable_tqdm="true",
    report_to="none",
    use_cpu="true",
    bf16="false",
)
T5_SMALL = dict(d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8)
T5_LARGE = dict(d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16)
GEMMA_BASE = dict(
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=12,
    head_dim=64,
    query_pre_attn_scalar=64,
)
# recipe -> (script, real configuration, its parameters, target length, and the source's if it is not 512)
RECIPES = {
    "italian_t5_base": (pre_train_t5, lambda: build_config("t5-v1_1-base", 32_000), 247_381_248, 114),
    "flan_t5_base_portuguese": (pre_train_t5, lambda: build_config("t5-v1_1-base", 32_000), 247_381_248, 114),
    "t5_small_cnn_dailymail": (fine_tune_t5, lambda: T5Config(**T5_SMALL), 60_506_624, 128),
    "t5_large_cnn_dailymail": (fine_tune_t5, lambda: T5Config(**T5_LARGE), 737_668_096, 128),
    "flan_t5_xxl_24gb": (fine_tune_t5, lambda: build_config("t5-v1_1-xxl"), 11_135_332_352, 128),
    # transformers' own sizes are those of 2B-2B
    "adapt_gemma2_2b": (pre_train_t5, T5GemmaConfig, 5_596_853_760, 287),
    "t5gemma_summarization": (
        fine_tune_t5,
        lambda: T5GemmaConfig(encoder=GEMMA_BASE, decoder=GEMMA_BASE),
        591_490_560,
        128,
        1024,
    ),
}
OF_GEMMA = ("adapt_gemma2_2b", "t5gemma_summarization")
CNN_DAILYMAIL = dict(
    prefix="summarize",
    inputs={"": "article"},
    target="highlights",
    target_type="text",
    metrics=["rougeL", "rouge1"],
    hub=("abisee/cnn_dailymail", "3.0.0"),
    max_source_length=512,
    max_target_length=128,
    files={"train": "train.jsonl", "validation": "validation.jsonl", "test": "test.jsonl"},
)


@functools.cache
def articles() -> Path:
    folder = Path(tempfile.mkdtemp())
    lines = sentences(60)
    for split in ("train", "validation", "test"):
        rows = [{"article": " ".join(lines[n : n + 3]), "highlights": lines[n]} for n in range(8)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@functools.cache
def gemma() -> Path:
    folder = Path(tempfile.mkdtemp()) / "t5gemma"
    zoo.write_checkpoint(folder, "t5gemma")
    return folder


def recipe_text(name: str) -> str:
    return (ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")


def commands(name: str) -> list[list[str]]:
    """The commands of a recipe's head, each on one line: [["python", "create_tokenizer.py", ...], ...]."""
    found = []
    for line in recipe_text(name).split("(each command on one line)")[0].splitlines():
        if re.match("#   (accelerate|python|torchrun) ", line):
            found.append(line[4:])
        elif line.startswith("#     --"):
            found[-1] += " " + line[6:]
    return [shlex.split(re.sub(r" \(.*\)$", "", re.sub("  +[(].*", "", text))) for text in found]


class RecipeTest(TestCase):
    def setUp(self):
        super().setUp()
        tasks = {"summarization": {"cnn_dailymail": CNN_DAILYMAIL} | constants.DATASET_VALS.get("summarization", {})}
        self.enterContext(mock.patch.dict(constants.DATASET_VALS, tasks))

    @parameterized.parameters(*[(name, command) for name in RECIPES for command in commands(name)])
    def test_commands_of_the_head(self, name, command):
        if command[1] == "-m":  # a script of a feature, which has its dataclasses in FLAGS
            self.assertNotEmpty(parse_arguments(importlib.import_module(command[2]).FLAGS, command[3:]))
            return
        words = command[command.index(next(word for word in command if word.endswith(".py"))) :]
        classes = {
            "create_tokenizer.py": create_tokenizer.FLAGS,
            "export_checkpoint.py": export_checkpoint.DATACLASSES,
            "evaluate_t5.py": evaluate_t5.DATACLASSES,
            "pre_train_t5.py": pre_train_t5.FLAGS,
            "fine_tune_t5.py": fine_tune_t5.FLAGS,
        }[words[0]]
        argv = [str(ROOT / word) if word.startswith("recipes/") else word for word in words[1:]]
        if "\nbf16: true" in recipe_text(name) and words[0] in ("pre_train_t5.py", "fine_tune_t5.py"):
            argv.append("--bf16=false")  # which a machine without a GPU refuses
        self.assertLen(parse_arguments(classes, argv), len(classes))

    def test_own_text_takes_the_place_of_the_italian_data_set(self):
        text = workspace() / "text.txt"
        (words,) = re.findall(r"(--train_file '.*)", recipe_text("italian_t5_base"))
        flags = shlex.split(words.replace("corpus/*.jsonl.gz", str(text)))
        argv = [str(ROOT / "recipes" / "italian_t5_base.yaml"), *flags]
        data = parse_arguments(pre_train_t5.FLAGS, argv)[1]
        check_pre_training_data(data)
        self.assertEqual(data.train_file, [str(text)])

    @parameterized.parameters(*RECIPES)
    def test_runs_for_a_few_steps(self, name):
        script = RECIPES[name][0]
        flags = SMALL | dict(output_dir=self.out, data_cache_dir=self.folder / "cache")
        recipe = yaml.safe_load(recipe_text(name))
        if script is pre_train_t5:
            folder = workspace() / "whole"
            flags |= dict(train_file=workspace() / "text.txt", dataset_name="", dataset_config_name="")
            flags |= dict(input_seq_length=48, validation_split_count=40)
            if name == "italian_t5_base":  # it makes its tokenizer itself
                flags |= dict(vocab_size=500, config_overrides="vocab_size=500")
            elif name not in OF_GEMMA:
                flags |= dict(tokenizer_name=workspace() / "tokenizer")
            flags |= dict(gradient_accumulation_steps=2)
            if "max_train_samples" in recipe:
                flags |= dict(max_train_samples=300)
        else:
            folder = workspace() / "tied"
            flags |= dict(data_dir=articles(), max_source_length=32, max_target_length=8, max_train_samples=8)
            flags |= dict(num_train_epochs=1, gradient_accumulation_steps=1)
            flags.pop("max_steps")
        if name in OF_GEMMA:
            folder = gemma()
        key = "config_name" if "config_name" in recipe else "model_name_or_path"
        given = [f"--{key}={folder}", *[f"--{flag}={value}" for flag, value in flags.items()]]
        results, _, _ = run_main(script.main, ROOT / "recipes" / f"{name}.yaml", *given)
        self.assertGreater(results["eval_loss"], 0)
        used = json.loads((self.out / "run.json").read_text())["arguments"]
        used["task"] = f"{used.get('benchmark')}/{used.get('dataset_name')}"
        for flag, value in recipe.items():
            if flag not in (*flags, key):
                self.assertEqual(used[flag], value, flag)
        width = 16 if name in OF_GEMMA else SHAPE["d_model"]
        self.assertEqual(shape_of(load_model(str(self.out)).config).decoder.width, width)

    @parameterized.parameters(*RECIPES)
    def test_the_real_model(self, name):
        _, config, parameters, target_length, *source_length = RECIPES[name]
        config = config()
        with torch.device("meta"):
            model = create_model(config)
        self.assertEqual(count_parameters(model), parameters)
        giga = flops_per_sequence(config, *(source_length or [512]), target_length) / 1e9
        said = re.search(r"x ([\d,]+) GFLOP", recipe_text(name))[1]
        self.assertAlmostEqual(float(said.replace(",", "")), giga, delta=0.005 * giga)

    @parameterized.parameters(*RECIPES)
    def test_the_estimate_follows_from_its_own_terms(self, name):
        head = " ".join(line.strip("# ") for line in recipe_text(name).splitlines() if line.startswith("#"))
        counts = re.search(
            r"estimated: ([\d.,kM]+) (?:steps|epochs) x ([\d,]+) (?:sequences|rows) x ([\d,]+) GFLOP", head
        )
        units = {"k": 1e3, "M": 1e6}
        numbers = [float(re.sub("[,kM]", "", text)) * units.get(text[-1], 1) for text in counts.groups()]
        total = numbers[0] * numbers[1] * numbers[2] * 1e9
        said = float(re.search(r"= ([\d.]+e\d+) FLOP", head)[1])
        self.assertAlmostEqual(said / total, 1, delta=0.05)
        value, unit = re.search(r"(\d+) (hours|minutes)", head.split("FLOP;")[1]).groups()
        seconds = float(value) * {"hours": 3600, "minutes": 60}[unit]
        self.assertAlmostEqual(seconds * 0.4 * constants.HARDWARE_PEAKS["H100"]["bf16"] * 1e12 / total, 1, delta=0.05)
