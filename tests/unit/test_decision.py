"""foundry/runs/decision.py: a run is settled before text and weights are read, and nothing changes it later."""

import contextlib
import io
from unittest import mock

from absl.testing import parameterized
from helpers import OVERRIDES, argv_of, run_main, sentences, write_tiny_model
from zoo import FAMILIES, write_checkpoint

import fine_tune_t5
import pre_train_t5
from foundry.arguments.model import ModelArguments
from foundry.common.reports import read_metrics
from foundry.corpora.tokenizers import load_tokenizer
from foundry.model_t5 import dropout_of, get_model, planned_model
from foundry.runs.run import TrainingRun


class DecisionTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        (self.folder / "text.txt").write_text("\n".join(sentences(300)))
        rows = "".join(f"{text}\t{text.split()[0]}\n" for text in sentences(60))
        (self.folder / "pairs.tsv").write_text("long\tshort\n" + rows)

    def flags(self, script: object, **changes) -> list[str]:
        """A run of two steps of a tiny model."""
        flags = dict(config_name="tiny", config_overrides=OVERRIDES, vocab_size=300, max_steps=2, warmup_steps=0)
        flags |= dict(output_dir=self.folder / "out", data_cache_dir=self.folder / "cache", report_to="none")
        flags |= dict(per_device_train_batch_size=4, disable_tqdm="true", eval_strategy="no", save_strategy="no")
        if script is pre_train_t5:
            flags |= dict(train_file=self.folder / "text.txt", input_seq_length=32)
        else:
            flags |= dict(train_file=self.folder / "pairs.tsv", source_column="long", target_column="short")
            flags |= dict(load_best_model_at_end="false", max_source_length=32, max_target_length=8)
        return argv_of(flags | changes)

    @parameterized.parameters(pre_train_t5, fine_tune_t5)
    def test_nothing_changes_a_flag_after_the_decision(self, script):
        execute, seen = TrainingRun.execute, []

        def watched(run: TrainingRun, *args) -> dict:
            seen.append((run.decision, {name: repr(value) for name, value in vars(run.decision.args).items()}))
            return execute(run, *args)

        with mock.patch.object(TrainingRun, "execute", watched):
            run_main(script.main, *self.flags(script))
        ((decision, before),) = seen
        after = {name: repr(value) for name, value in vars(decision.args).items()}
        self.assertEqual(after, before)

    def test_the_evaluation_on_start_is_not_repeated_by_a_resume(self):
        changes = dict(eval_on_start="true", eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2)
        run_main(pre_train_t5.main, *self.flags(pre_train_t5, **changes))
        more = dict(max_steps=4, resume_from_checkpoint="true")
        run_main(pre_train_t5.main, *self.flags(pre_train_t5, **changes, **more))
        lines = [line for line in read_metrics(self.folder / "out" / "metrics.jsonl") if "eval_loss" in line]
        self.assertEqual([line["step"] for line in lines], [0, 2, 4])

    @parameterized.parameters(pre_train_t5, fine_tune_t5)
    def test_no_weight_is_read(self, script):
        """The folder has a configuration and a tokenizer, but no weights."""
        write_tiny_model(self.folder / "model", sentences(200), vocab_size=300)
        (self.folder / "model/model.safetensors").unlink()
        named = dict(config_name=None, config_overrides=None, vocab_size=None, model_name_or_path=self.folder / "model")
        argv = self.flags(script, **named)
        with contextlib.redirect_stdout(io.StringIO()):
            decided = script.decide(argv)
        decision = decided[0] if isinstance(decided, tuple) else decided
        self.assertEqual(decision.args.optim, "adamw_rms_scaled")
        self.assertGreater(decision.args.learning_rate, 0)
        _, _, err = run_main(script.main, *argv, "--overwrite_output_dir", code=2)
        self.assertIn("weights cannot be read", err)

    @parameterized.parameters(
        ("", None, 0.0, 0.1),
        ("dropout_rate=0.2", None, 0.2, 0.2),
        ("dropout_rate=0.2", 0.0, 0.0, 0.2),  # trained without, and to be fine-tuned with it
        ("", 0.3, 0.3, 0.1),
    )
    def test_dropout_of_pre_training(self, overrides, given, trained, saved):
        """A rate in --config_overrides is trained with, where --dropout_rate names no other."""
        args = ModelArguments(config_name="tiny", config_overrides=overrides, dropout_rate=given, vocab_size=300)
        model = planned_model(args, None, 0.0)
        self.assertEqual((dropout_of(model), model.config.dropout_rate), (trained, saved))

    @parameterized.parameters(*(name for name in FAMILIES if "longt5" not in name))  # which has no tokenizer there
    def test_the_planned_model_is_the_one_that_is_built(self, family):
        write_checkpoint(self.folder / "model", family)
        tokenizer = load_tokenizer(str(self.folder / "model"))
        for flags in ({}, {"train_only": "decoder"}, {"dropout_rate": 0.25}):
            args = ModelArguments(model_name_or_path=str(self.folder / "model"), **flags)
            planned, (model, _) = planned_model(args, tokenizer), get_model(args, tokenizer)
            shapes = [
                {name: tuple(p.shape) for name, p in each.named_parameters() if p.requires_grad}
                for each in (planned, model)
            ]
            self.assertEqual(*shapes, msg=flags)
            self.assertEqual(dropout_of(planned), dropout_of(model))
            self.assertEqual({p.device.type for p in planned.parameters()}, {"meta"})
