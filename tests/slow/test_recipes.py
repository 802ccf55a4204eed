"""Every recipe: it says what it is and costs, it runs for a few steps on local data of its layout with a tiny model,
and its real model has the size and shapes it should have (built on the meta device: no memory, no download).

A new recipe is one more entry of RECIPES, or has tests of its own as those of test_workflows.py.
"""

import json
import math
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import test_workflows
import torch
import yaml
from absl.testing import parameterized
from helpers import OVERRIDES, run_main, write_tiny_model
from transformers import MT5Config, T5Config

import fine_tune_t5
import foundry.corpora.sources
import pre_train_t5
import tasks.rows
from constants import MODEL_SHAPES, PACKAGE_TOPIC_LABELS
from foundry.model_t5 import build_config, count_parameters, create_model

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
TRANSLATION = dict(d_model=192, d_kv=48, d_ff=512, num_layers=3, num_decoder_layers=3)
V1_1 = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0)


@dataclass
class Recipe:
    """script: the one it is for. local: flags that put local data in place of what is downloaded, and a tiny model in
    place of the real one; {folder} is that of `write_data`. config: of the real model. parameters: it must have so many
    (for Hub models the number of their model card or of REFERENCE). lengths: tokens of source and target to try.
    """

    script: object
    local: str
    config: T5Config
    parameters: int
    lengths: tuple[int, int]
    steps: str = field(
        default="--max_steps 4 --eval_strategy steps --eval_steps 2 --save_strategy steps --save_steps 2"
    )


RECIPES = {
    "pre_train_installed_docs.yaml": Recipe(
        pre_train_t5,
        f"--vocab_size 400 --config_overrides {OVERRIDES}",
        build_config("tiny", 4096),
        1_935_104,  # 2 x 4096 x 128 of the vocabulary, 0.9M of four layers: README's 1.9M
        (64, 24),
    ),
    "fine_tune_installed_docs.yaml": Recipe(
        fine_tune_t5, "--model_name_or_path {folder}/model", build_config("tiny", 4096), 1_935_104, (128, 8)
    ),
    "pre_train_own_ids.yaml": Recipe(
        pre_train_t5,
        f"--train_file {{folder}}/series.npy --config_overrides {OVERRIDES}",
        build_config("tiny", 64 + 103),  # with pad, EOS, unk and the sentinels
        935_680,
        (64, 31),
    ),
    "distil_installed_docs.yaml": Recipe(
        fine_tune_t5,
        "--model_name_or_path {folder}/model --teacher {folder}/model",
        build_config("tiny", 4096, dict(num_layers=1, num_decoder_layers=1)),
        1_492_096,  # 2 x 4096 x 128 of the vocabulary, and half of the 0.9M of four layers
        (128, 8),
    ),
    "distil_answers.yaml": Recipe(
        fine_tune_t5,
        "--model_name_or_path {folder}/model --train_file {folder}/answers.jsonl --generation_max_length 9",
        MT5Config(vocab_size=250_112, **MODEL_SHAPES["t5-v1_1-small"] | dict(d_ff=1024, num_heads=6), **V1_1),
        300_176_768,  # its model card
        (512, 128),
    ),
    "flan_t5_base_preferences.yaml": Recipe(
        fine_tune_t5,
        "--model_name_or_path {folder}/model --train_file {folder}/pairs.jsonl --gradient_accumulation_steps 1 "
        "--generation_max_length 9",
        build_config("t5-v1_1-base"),
        247_577_856,  # Flan-T5 base has v1.1's shape
        (512, 256),
    ),
    "flan_t5_base_rewards.yaml": Recipe(
        fine_tune_t5,
        "--model_name_or_path {folder}/model --train_file {folder}/answers.jsonl --target_column prediction "
        "--gradient_accumulation_steps 1 --max_target_length 16",
        build_config("t5-v1_1-base"),
        247_577_856,
        (512, 64),
    ),
    "translation_pre_train.yaml": Recipe(
        pre_train_t5,
        f"--train_file {{folder}}/books --tokenizer_name {{folder}}/model --config_overrides {OVERRIDES}",
        build_config("tiny", 4001, TRANSLATION),
        4_648_384,  # 2 x 4,032 x 192 of the vocabulary, 3.1M of six layers
        (64, 40),
    ),
    "translation_fine_tune.yaml": Recipe(
        fine_tune_t5,
        "--model_name_or_path {folder}/model --train_file {folder}/answers.jsonl --source_column prompt "
        "--target_column prediction --generation_max_length 9",
        build_config("tiny", 4001, TRANSLATION),
        4_648_384,
        (128, 128),
    ),
    "translation_multi30k.yaml": Recipe(
        fine_tune_t5,
        "--tokenizer_name {folder}/model --train_file {folder}/answers.jsonl --source_column prompt --target_column "
        f"prediction --generation_max_length 9 --config_name tiny --config_overrides {OVERRIDES}",
        build_config("tiny", 4000, dict(d_ff=512, num_layers=3, num_decoder_layers=2)),
        2_476_032,  # 2 x 4,032 x 128 of the vocabulary, 1.4M of five layers
        (128, 128),
    ),
    "pronunciation.yaml": Recipe(
        fine_tune_t5,
        "--tokenizer_name {folder}/model --train_file {folder}/answers.jsonl --source_column prompt --target_column "
        f"prediction --generation_max_length 9 --config_name tiny --config_overrides {OVERRIDES}",
        build_config("tiny", 200),
        952_064,  # 2 x 256 x 128 of the vocabulary, 0.9M of four layers
        (64, 64),
    ),
    "sentence_embeddings.yaml": Recipe(
        fine_tune_t5,
        f"--tokenizer_name {{folder}}/model --train_file {{folder}}/answers.jsonl --source_column prompt "
        f"--target_column prediction --config_name tiny --config_overrides {OVERRIDES}",
        build_config("tiny", 4000),
        1_918_720,  # of which the encoder, 0.9M, is trained
        (48, 48),
    ),
    "encoder_pre_train.yaml": Recipe(
        pre_train_t5,
        f"--train_file {{folder}}/books --tokenizer_name {{folder}}/model --config_overrides {OVERRIDES}",
        build_config("tiny", 4000),
        1_918_720,  # 2 x 4,032 x 128 of the vocabulary, 0.9M of four layers
        (128, 40),
    ),
    "entities.yaml": Recipe(
        fine_tune_t5,
        "--model_name_or_path {folder}/model --train_file {folder}/tagged.jsonl --validation_split_percentage 20",
        build_config("tiny", 4000),
        1_918_720,  # of which the encoder, 0.9M, is trained
        (192, 8),
    ),
    "entities_as_text.yaml": Recipe(
        fine_tune_t5,
        "--model_name_or_path {folder}/model --train_file {folder}/answers.jsonl --source_column prompt "
        "--target_column prediction --generation_max_length 9",
        build_config("tiny", 4000),
        1_918_720,
        (192, 160),
    ),
    "residues.yaml": Recipe(
        fine_tune_t5,
        "--model_name_or_path {folder}/model --train_file {folder}/residues.jsonl --validation_split_percentage 20",
        build_config("tiny", 400),
        1_001_216,  # 2 x 448 x 128 of the vocabulary, 0.9M of four layers
        (128, 8),
    ),
    "mt5_base_romanian_diacritics.yaml": Recipe(
        fine_tune_t5,
        "--model_name_or_path {folder}/model --train_file {folder}/books --shuffle_buffer_size 60 "
        "--max_target_length 24",
        MT5Config(vocab_size=250_112, **MODEL_SHAPES["t5-v1_1-base"], **V1_1),
        582_401_280,  # v1.1-base with a larger vocabulary: 247,577,856 + 2 x 768 x (250,112 - 32,128)
        (256, 256),
    ),
}


def write_data(folder: Path) -> None:
    """Small data in the layouts that the recipes read, and a tiny model with its tokenizer."""
    chooser = random.Random(0)
    words = ["".join(chooser.choices("aeiouăîșțbcdlmnr", k=chooser.randint(2, 7))) for _ in range(300)]
    lines = [" ".join(chooser.choices(words, k=chooser.randint(8, 30))) + "." for _ in range(400)]

    def write_rows(path: Path, rows: list[dict]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    for split, part in (("train", lines), ("validation", lines[:80])):  # tools/installed_docs.py's layout
        write_rows(folder / "docs" / f"{split}.jsonl", [{"text": line} for line in part])
        topics = [{"text": text, "label": PACKAGE_TOPIC_LABELS[i % 10]} for i, text in enumerate(part)]
        write_rows(folder / "docs" / "package_topic" / f"{split}.jsonl", topics)
    answers = [{"prompt": text, "prediction": text[:40]} for text in lines]  # as predict_t5.py writes them
    write_rows(folder / "answers.jsonl", answers)
    pairs = [{"prompt": line, "chosen": line[:9], "rejected": line[9:18]} for line in lines]
    write_rows(folder / "pairs.jsonl", pairs)
    tagged = [{"words": line.split(), "tags": ["B-A"] + ["O"] * line.count(" ")} for line in lines]
    write_rows(folder / "tagged.jsonl", tagged)
    write_rows(folder / "residues.jsonl", [{"sequence": word, "tags": "HECHECH"[: len(word)]} for word in words])
    (folder / "books").mkdir()
    for book in range(4):
        (folder / "books" / f"{book}.txt").write_text("\n\n".join(lines[book * 100 : book * 100 + 100]))
    np.save(folder / "series.npy", np.random.default_rng(0).integers(0, 64, (40, 128)))
    write_tiny_model(folder / "model", lines, 400)


class RecipeTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        write_data(cls.folder)

    def test_every_recipe_is_tested(self):
        elsewhere = {f"{name}.yaml" for name in test_workflows.RECIPES}
        self.assertEqual({path.name for path in FOLDER.glob("*.yaml")}, {*RECIPES, *elsewhere})

    @parameterized.parameters(*RECIPES)
    def test_the_head_says_what_it_is_how_to_run_it_what_it_costs_and_what_to_expect(self, name):
        lines = (FOLDER / name).read_text().splitlines()
        self.assertRegex(lines[0], r"^# [A-Z].*\S")
        script = Path(RECIPES[name].script.__file__).name
        comments = "\n".join(line for line in lines if line.startswith("#"))
        self.assertRegex(comments, rf"(?m)^#   python {script} recipes/{name}")
        for word in ("Cost", "Expect"):
            self.assertRegex(comments, rf"(?s){word}\b.*[0-9]")

    @parameterized.parameters(*RECIPES)
    def test_it_trains_evaluates_and_saves_with_a_tiny_model(self, name):
        recipe = RECIPES[name]
        out = Path(self.enter_context(tempfile.TemporaryDirectory())) / "out"
        flags = f"{recipe.local} {recipe.steps} --per_device_train_batch_size 4 --per_device_eval_batch_size 8 "
        flags += "--max_eval_samples 16 --logging_steps 1 --warmup_steps 2 --dataloader_num_workers 0 --report_to none "
        flags += "--most_unknown 1 "
        flags += f"--disable_tqdm true --preprocessing_num_workers 1 --data_cache_dir {self.folder}/cache"
        argv = [str(FOLDER / name), *flags.format(folder=self.folder).split(), "--output_dir", str(out)]
        for module in (foundry.corpora.sources, tasks.rows):
            docs = mock.patch.object(module, "builtin_corpus", return_value=self.folder / "docs")
            self.enter_context(docs)
        results, *_ = run_main(recipe.script.main, *argv)
        self.assertTrue(math.isfinite(results["train_loss"]))
        self.assertTrue(math.isfinite(results["eval_loss"]))
        recorded = json.loads((out / "run.json").read_text())["arguments"]
        recorded["task"] = f"{recorded.get('benchmark')}/{recorded.get('dataset_name')}"
        for key, value in yaml.safe_load((FOLDER / name).read_text()).items():
            if f"--{key}" not in argv:  # all the rest was as the recipe has it
                self.assertEqual(recorded[key], value, key)
        self.assertTrue((out / "model.safetensors").is_file())
        self.assertLen(list(out.glob("checkpoint-*/trainer_state.json")), min(2, recorded["save_total_limit"] or 2))

    @parameterized.parameters(*RECIPES)
    def test_the_real_model_has_its_size_and_shapes(self, name):
        recipe = RECIPES[name]
        with torch.device("meta"):
            model = create_model(recipe.config)
            source, target = (torch.zeros(2, length, dtype=torch.long) for length in recipe.lengths)
            logits = model(input_ids=source, decoder_input_ids=target).logits
        self.assertEqual({parameter.device.type for parameter in model.parameters()}, {"meta"})
        self.assertEqual(count_parameters(model), recipe.parameters)
        self.assertEqual(tuple(logits.shape), (2, recipe.lengths[1], recipe.config.vocab_size))
