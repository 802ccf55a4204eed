"""The flags of evaluate_t5.py: those of a training are refused on the command line and left out of a recipe."""

import dataclasses
import json
import os
from unittest import mock

from absl.testing import parameterized
from helpers import run_main

import evaluate_t5
from foundry.arguments.evaluation import EvaluationRunArguments, parse_evaluation_flags
from foundry.arguments.training import T5TrainingArguments
from foundry.common.command_line import flag_table


def parsed(*argv) -> T5TrainingArguments:
    return parse_evaluation_flags(evaluate_t5.DATACLASSES, list(argv), lambda *_: {}, "")[2]


class EvaluationFlagsTest(parameterized.TestCase):
    def test_the_flags_that_help_shows(self):
        flags = flag_table(evaluate_t5.DATACLASSES)["flags"]
        self.assertLess(sum(not flag["is_hidden"] for flag in flags), 70)

    def test_every_flag_reaches_the_trainer_or_says_where_it_went(self):
        """So no flag of transformers, a new one either, is accepted without an effect."""
        trainers = {field.name for field in dataclasses.fields(T5TrainingArguments) if field.init}
        own = {field.name for field in dataclasses.fields(EvaluationRunArguments) if field.init}
        self.assertEmpty(own - trainers - {"local_rank"})
        self.assertEqual(EvaluationRunArguments._gone.keys(), trainers - own | {"comet_model", "comet_command"})

    @parameterized.parameters(
        ("--learning_rate", "1e-4", "for training"),
        ("--optim=adamw_torch", None, "for training"),
        ("--no_dataloader_pin_memory", None, "for training"),
        ("--push_to_hub", None, "export_checkpoint.py"),
        ("--fp16", None, "--bf16"),
        ("--fsdp", "full_shard", "--deepspeed"),
        ("--comet_model", "model.ckpt", "comet-score"),
        ("--per_device_train_batch_size", "8", "--per_device_eval_batch_size"),
    )
    def test_a_flag_of_a_training_says_where_it_went(self, flag, value, named):
        _, _, error = run_main(evaluate_t5.main, *filter(None, (flag, value)), code=2)
        self.assertIn(f"{flag.partition('=')[0]}: no flag of an evaluation: ", error)
        self.assertIn(named, error)

    def test_a_recipe_of_a_training_gives_its_other_flags(self):
        recipe = self.folder / "recipe.yaml"
        recipe.write_text("learning_rate: 0.1\nfp16: true\nper_device_eval_batch_size: 3\n")
        args = parsed(recipe, "--use_cpu")
        self.assertEqual((args.per_device_eval_batch_size, args.fp16), (3, False))
        self.assertEqual(args.given, {"per_device_eval_batch_size", "use_cpu"})

    def test_a_deepspeed_file_with_settings_of_a_training(self):
        content = dict(zero_optimization=dict(stage=3), gradient_accumulation_steps=4, gradient_clipping=0.5)
        content |= dict(bf16=dict(enabled=True), optimizer=dict(type="AdamW", params=dict(lr=0.1)))
        file = self.folder / "zero.json"
        file.write_text(json.dumps(content))
        with mock.patch.dict(os.environ, RANK="0"):
            args = parsed("--deepspeed", file, "--use_cpu")
        self.assertEqual((args.gradient_accumulation_steps, args.max_grad_norm, args.bf16), (4, 0.5, True))
