"""Runs with --teacher: exact over the global batch, resumed, recorded, cached, refused; students of fewer layers."""

import contextlib
import itertools
import json
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torture
from absl.testing import parameterized
from helpers import OVERRIDES, argv_of, run_main, sentences, stopped_after, write_tiny_model
from safetensors.torch import load_file

import fine_tune_t5
import pre_train_t5
import predict_t5
from constants import IGNORE_INDEX
from features.distillation import Distillation, TaskDistillation, cached_teacher
from features.distillation.divergence import Divergence
from features.distillation.on_policy import OnPolicyCallback, is_on_policy
from features.distillation.teacher import load_teacher, loss_term
from foundry.model_t5 import load_model
from foundry.modeling.loss import compute_loss_in_forward
from foundry.trainer_t5 import T5Trainer
from foundry.training.drawn_answers import answers_of_draws, uniform_numbers

NEAR = dict(rtol=1e-4, atol=1e-6)


class TestCase(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        lines = sentences(200)
        rows = "".join(f"{text}\t{' '.join(text.split()[: 1 + n % 4])}\n" for n, text in enumerate(lines[:52]))
        (cls.folder / "pairs.tsv").write_text("long\tshort\n" + rows)
        (cls.folder / "text.txt").write_text("\n".join(lines))
        write_tiny_model(cls.folder / "student", lines, 300, num_layers=3, num_decoder_layers=3)
        write_tiny_model(cls.folder / "teacher", lines, 300, d_model=48, num_layers=2)
        write_tiny_model(cls.folder / "other", sentences(200, seed=1), 300)
        shutil.copytree(cls.folder / "teacher", cls.folder / "retrained")
        model = load_model(str(cls.folder / "teacher"))
        model.lm_head.weight.data[7] += 1
        model.save_pretrained(cls.folder / "retrained")
        cls.numbers = itertools.count()

    def flags(self, script: object, **changes) -> dict:
        """Six steps of eight rows, saved after each other one."""
        flags = dict(model_name_or_path=self.folder / "student", teacher=self.folder / "teacher", max_steps=6, seed=3)
        flags |= dict(data_cache_dir=self.folder / "cache", report_to="none", disable_tqdm="true", warmup_steps=0)
        flags |= dict(per_device_train_batch_size=8, gradient_accumulation_steps=1, dropout_rate=0.1, logging_steps=2)
        flags |= dict(eval_strategy="no", save_strategy="steps", save_steps=2, save_total_limit=9, learning_rate=1e-2)
        if script is pre_train_t5:
            flags |= dict(train_file=self.folder / "text.txt", input_seq_length=32)
        else:
            flags |= dict(train_file=self.folder / "pairs.tsv", source_column="long", target_column="short")
            flags |= dict(max_source_length=32, max_target_length=16, load_best_model_at_end="false")
        return flags | changes

    def run_script(self, script: object, code: int | None = None, **changes) -> tuple[Path, str, str]:
        """(the output folder, stdout, stderr)."""
        out = changes.pop("output_dir", self.folder / f"out_{next(self.numbers)}")
        _, printed, error = run_main(script.main, *argv_of(self.flags(script, output_dir=out, **changes)), code=code)
        return out, printed, error

    def weights(self, out: Path) -> dict:
        return load_file(out / "model.safetensors")


class OnPolicyTest(TestCase):
    """Steps whose targets are answers of the student."""

    def test_loss_and_gradient_of_a_step(self):
        """The divergence alone, over the tokens of answers that the student drew; those of the filling do not count."""
        student, teacher = (load_model(str(self.folder / name)).eval() for name in ("student", "teacher"))
        own_loss, flags = torch.tensor(0.3), TaskDistillation(teacher="x", distillation_weight=0.7, on_policy_share=1)
        how = flags.of_run()
        how.longest, args = 5, mock.Mock(device=torch.device("cpu"), seed=4, hf_deepspeed_config=None)
        term = loss_term(flags.divergence(teacher), load_teacher(str(self.folder / "teacher"), args))
        compute_loss_in_forward(student, terms=[term._replace(kept=own_loss)])
        trainer = mock.Mock(model=student, args=args)
        trainer.state.global_step, trainer.accelerator.reduce = 2, lambda values, _: values
        trainer.accelerator.autocast = contextlib.nullcontext
        sources = torch.tensor([[5, 6, 7, 1], [8, 9, 1, 0], [5, 6, 7, 1]])
        labels = torch.tensor([[20, 1], [21, 1], [IGNORE_INDEX, IGNORE_INDEX]])
        batch = dict(input_ids=sources, attention_mask=sources.ne(0).long(), labels=labels, row=torch.tensor([3, 5, 3]))
        batch["decoder_input_ids"] = labels.clamp(min=0)
        callback = OnPolicyCallback(trainer, how, own_loss)
        callback.change_batches([batch])
        tokens = callback.divisor([batch])
        draws = uniform_numbers(4, [(2, 3), (2, 5)], 1, 5)
        names = ("input_ids", "attention_mask")
        drawn = answers_of_draws(student, {name: batch[name][:2] for name in names}, draws)[:, 0]
        torch.testing.assert_close(batch["labels"][:2], drawn)
        self.assertTrue(bool(batch["labels"][2].eq(IGNORE_INDEX).all()))
        self.assertEqual(int(tokens), int(drawn.ne(IGNORE_INDEX).sum()))
        total = 0.0
        for source, mask, answer in zip(sources, batch["attention_mask"], drawn, strict=False):
            ids = answer[answer.ne(IGNORE_INDEX)]
            inputs = dict(
                input_ids=source[mask.bool()][None], decoder_input_ids=torch.cat([ids.new_zeros(1), ids])[None, :-1]
            )
            log_q, log_p = (
                forward(**inputs).logits[0].log_softmax(-1) for forward in (student.plain_forward, teacher.forward)
            )
            total = total + 0.7 * (log_p.exp() * (log_p - log_q)).sum() / tokens
        total.backward()
        wanted = {name: p.grad.clone() for name, p in student.named_parameters()}
        student.zero_grad()
        loss = student(**batch, num_items_in_batch=tokens).loss
        loss.backward()
        torch.testing.assert_close(loss, total, atol=1e-5, rtol=1e-4)
        for name, parameter in student.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], atol=1e-5, rtol=1e-3, msg=name)

    def test_its_share_of_the_steps_is_drawn(self):
        drawn = [is_on_policy(3, step, 0.3) for step in range(1000)]
        self.assertAlmostEqual(sum(drawn) / 1000, 0.3, delta=0.05)
        self.assertEqual({is_on_policy(3, step, share) for step in range(50) for share in (0, 1)}, {False, True})

    def test_a_resumed_run_and_micro_batches(self):
        how = dict(on_policy_share=0.5, dropout_rate=0)
        whole, printed, _ = self.run_script(fine_tune_t5, **how)
        self.assertRegex(printed, r"0.5 of the steps on answers of the student, of at most 16 tokens")
        parts, _, _ = self.run_script(
            fine_tune_t5, per_device_train_batch_size=2, gradient_accumulation_steps=4, save_strategy="no", **how
        )
        for name, tensor in self.weights(whole).items():
            torch.testing.assert_close(self.weights(parts)[name], tensor, **NEAR)
        expected, resumed = torture.outcome(whole), self.folder / f"out_{next(self.numbers)}"
        checkpoint = stopped_after(whole, resumed, "checkpoint-2")
        self.run_script(fine_tune_t5, output_dir=resumed, resume_from_checkpoint=checkpoint, **how)
        found = torture.outcome(resumed)
        for what in expected:
            self.assertEqual(found[what], expected[what], what)
        other, _, _ = self.run_script(fine_tune_t5, save_strategy="no", dropout_rate=0)
        self.assertNotEqual(
            [line["loss"] for line in torture.outcome(other)["metrics"] if "loss" in line],
            [line["loss"] for line in expected["metrics"] if "loss" in line],
        )

    @parameterized.parameters(
        (dict(teacher_top_k=4), "--on_policy_share 0.5"),
        (dict(packing="true"), "draws an answer of any length to each row"),
        (dict(teacher=None), "name one"),
    )
    def test_what_is_refused(self, changes, message):
        _, _, error = self.run_script(fine_tune_t5, 2, on_policy_share=0.5, **changes)
        self.assertIn(message, error)


class RunTest(TestCase):
    @parameterized.parameters(
        dict(packing="false"),
        dict(packing="false", loss_chunk_size=3, distillation_beta=1),
        dict(packing="true", distillation_beta=0.5, distillation_temperature=2),
        dict(packing="false", teacher_top_k=6),
        dict(packing="true", teacher_top_k=6),
    )
    def test_accumulated_micro_batches_are_one_batch(self, **changes):
        """Token by token, for targets of one to four words."""
        changes |= dict(dropout_rate=0, save_strategy="no", max_steps=2)
        whole, _, _ = self.run_script(fine_tune_t5, **changes)
        parts, _, _ = self.run_script(
            fine_tune_t5, per_device_train_batch_size=2, gradient_accumulation_steps=4, **changes
        )
        for name, tensor in self.weights(whole).items():
            torch.testing.assert_close(self.weights(parts)[name], tensor, **NEAR)

    @parameterized.product(script=(pre_train_t5, fine_tune_t5), more=({}, {"config_overrides": "num_decoder_layers=2"}))
    def test_a_resumed_run_is_the_uninterrupted_one(self, script, more):
        whole, printed, _ = self.run_script(script, **more)
        self.assertRegex(printed, r"teacher +\S+teacher \(t5, d_model 48, 2 \+ 1 layers\), run at every step; 0.5 of")
        self.assertEqual("decoder 1, 3 of 3" in printed, bool(more))
        expected, resumed = torture.outcome(whole), self.folder / f"out_{next(self.numbers)}"
        checkpoint = stopped_after(whole, resumed, "checkpoint-4")
        self.run_script(script, output_dir=resumed, resume_from_checkpoint=checkpoint, **more)
        found = torture.outcome(resumed)
        for what in expected:
            self.assertEqual(found[what], expected[what], what)
        saved = {*load_file(whole / "checkpoint-4" / "model.safetensors")}
        self.assertEqual(saved, {*load_file(whole / "model.safetensors")})
        self.assertEqual(sum("lm_head" in name for name in saved), 1, "the teacher is not saved")
        record = json.loads((whole / "run.json").read_text())
        self.assertEqual(record["teacher"]["name"], str(self.folder / "teacher"))
        self.assertEqual(record["arguments"]["distillation_weight"], 0.5)

    @parameterized.parameters(
        (pre_train_t5, {}),
        (pre_train_t5, dict(packing="documents")),
        (pre_train_t5, dict(objective="prefix_lm", attn_implementation="eager")),
        (pre_train_t5, dict(loss_chunk_size=0)),
        (pre_train_t5, dict(activation_checkpointing="true", lora_rank=2)),
        (pre_train_t5, dict(bf16="true"), 1e-3),
        (fine_tune_t5, dict(packing="true")),
        (fine_tune_t5, dict(packing="false", loss_chunk_size=0, distillation_beta=1)),
        (fine_tune_t5, dict(packing="false", torch_compile_backend="aot_eager", distillation_beta=0.3)),
    )
    def test_a_student_that_is_its_own_teacher_has_nothing_to_learn(self, script, changes, most=1e-6):
        """The divergence begins at 0, and so does its gradient, as the teacher has no dropout and sees the batch."""
        own = dict.fromkeys(("model_name_or_path", "teacher"), self.folder / "other")
        own |= dict(distillation_weight=1, dropout_rate=0, max_steps=1, logging_steps=1, save_strategy="no")
        out, _, _ = self.run_script(script, **own | changes)
        (line, *_) = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
        self.assertLess(line["loss"], most)
        self.assertLess(line["grad_norm"], 1000 * most)

    @parameterized.parameters(dict(loss_chunk_size=0), dict(packing="true"), dict(teacher_top_k=6))
    def test_its_divergence_is_logged(self, **changes):
        """With a weight of 1 it is the loss: the mean over steps, micro-batches and their tokens."""
        changes |= dict(distillation_weight=1, distillation_temperature=2, save_strategy="no")
        out, _, _ = self.run_script(fine_tune_t5, gradient_accumulation_steps=2, **changes)
        lines = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
        logged = [(line["distillation_loss"], line["loss"]) for line in lines if "grad_norm" in line]
        self.assertLen(logged, 3)
        for divergence, loss in logged:
            self.assertAlmostEqual(divergence, loss, delta=1e-4)

    def test_a_teacher_is_for_inference(self):
        args = mock.Mock(device=torch.device("cpu"), hf_deepspeed_config=None)
        teacher = load_teacher(str(self.folder / "teacher"), args)
        self.assertEqual(teacher.config.dropout_rate, 0.1)
        self.assertFalse(any(module.training for module in teacher.modules()))
        self.assertFalse(any(parameter.requires_grad for parameter in teacher.parameters()))

    def test_a_plan_for_a_gpu_names_and_counts_it(self):
        _, printed, _ = self.run_script(pre_train_t5, 0, dry_run="true", assume_gpu="h100")
        self.assertRegex(
            printed, "teacher +.*run at every step; 0.5 of the loss is KL.* at temperature 1, 1,024 target"
        )
        self.assertIn("(weights, gradients, optimizer, teacher), ", printed)

    def test_a_stream_has_a_teacher_too(self):
        stream = dict(streaming="true", shuffle_buffer_size=16, max_steps=2)
        for script, held_out in ((pre_train_t5, "text.txt"), (fine_tune_t5, "pairs.tsv")):
            out, _, _ = self.run_script(script, validation_file=self.folder / held_out, **stream)
            self.assertTrue((out / "model.safetensors").is_file())

    @parameterized.parameters(
        (dict(teacher="{folder}/retrained"), "the weights of --teacher: \\w{24} in its run, \\w{24} now"),
        (dict(teacher=None), "the weights of --teacher: \\w{24} in its run, None now"),
        (dict(distillation_temperature=2), "--distillation_temperature"),
        (dict(distillation_beta=1), "--distillation_beta"),
    )
    def test_another_teaching_is_not_resumed(self, changes, message):
        out = self.folder / "taught"
        if not out.exists():
            self.run_script(pre_train_t5, output_dir=out, max_steps=2)
        changes = {name: value and str(value).format(folder=self.folder) for name, value in changes.items()}
        _, _, error = self.run_script(
            pre_train_t5, 2, output_dir=out, resume_from_checkpoint=out / "checkpoint-2", max_steps=4, **changes
        )
        self.assertRegex(error, message)

    def test_what_is_cached_is_asked_once(self):
        cached = dict(teacher_top_k=4, max_steps=1, save_strategy="no", data_cache_dir=self.folder / "own_cache")
        said, calls = cached_teacher.said, []

        def counted(*args):
            calls.append(args)
            return said(*args)

        with mock.patch.object(cached_teacher, "said", counted):
            for changes, is_asked in (
                ({}, True),
                ({"distillation_beta": 1, "distillation_weight": 0.1, "packing": "true"}, False),
                ({"distillation_temperature": 3}, True),
                ({"teacher_top_k": 5}, True),
                ({"teacher": self.folder / "retrained"}, True),
                ({"max_train_samples": 20}, True),
                ({"teacher_top_k": 5}, False),
            ):
                calls.clear()
                self.run_script(fine_tune_t5, **cached | changes)
                self.assertEqual(bool(calls), is_asked, changes)

    def test_the_memory_of_a_teacher_is_counted(self):
        args, flags = mock.Mock(assume_gpu=None), TaskDistillation(str(self.folder / "teacher"))
        how = flags.of_run()
        args.device.type = "cpu"
        weights = load_model(flags.teacher).named_parameters()
        matrices = [p for name, p in weights if p.dim() == 2 and "relative_attention_bias" not in name]
        self.assertEqual(how.memory(args), {"teacher": 4 * sum(p.numel() for p in matrices)})
        args.assume_gpu = "h100"
        self.assertEqual(how.memory(args), {"teacher": 2 * sum(p.numel() for p in matrices)})
        flags.teacher_top_k = 4
        self.assertEqual(how.memory(args), {})

    def test_it_is_what_the_flags_say(self):
        how = TaskDistillation("x", teacher_top_k=3)
        self.assertTrue(how.is_on())
        self.assertEqual(how.divergence(None), Divergence(0.5, 1.0, 0.0, 3, None))
        self.assertFalse(Distillation().is_on())


class RefusedTest(TestCase):
    @parameterized.parameters(
        (dict(teacher="{folder}/nowhere"), "--teacher .*nowhere"),
        (dict(teacher="{folder}/other"), "--teacher .*other"),
        (dict(model_name_or_path=None, config_name="tiny"), "--teacher .*"),
        (dict(teacher=None, distillation_weight=0.2), "--distillation_weight 0.2"),
        (dict(teacher=None, teacher_top_k=2), "--teacher_top_k 2"),
        (dict(teacher_top_k=10_000), "--teacher_top_k 10000"),
        (dict(teacher_top_k=2, streaming="true", validation_file="{folder}/pairs.tsv"), "--teacher_top_k 2"),
        (dict(teacher_top_k=2, span_corruption_file="{folder}/text.txt"), "--teacher_top_k 2"),
        (dict(config_overrides="num_layers=4"), "--config_overrides num_layers=4"),
        (dict(config_overrides="num_layers=2", lora_rank=2), "--lora_rank 2"),
    )
    def test_in_one_line_before_any_training(self, changes, message):
        changes = {name: value and str(value).format(folder=self.folder) for name, value in changes.items()}
        with mock.patch.object(T5Trainer, "__init__", side_effect=AssertionError("training began")):
            _, _, error = self.run_script(fine_tune_t5, 2, **changes)
        self.assertRegex(error, message)
        self.assertEqual(error.strip().count("\n"), 0)

    def test_a_student_from_scratch_has_the_rows_of_its_teacher(self):
        new = dict(model_name_or_path=None, config_name="tiny", tokenizer_name=self.folder / "teacher", max_steps=1)
        self.run_script(pre_train_t5, config_overrides=OVERRIDES, **new)
        more = f"{OVERRIDES},vocab_size=1024"
        _, _, error = self.run_script(pre_train_t5, 2, config_overrides=more, **new)
        self.assertRegex(error, r"--teacher .*: has \d+ rows of embeddings, and the student 1,024: name another")

    def test_tokens_of_ul2_are_the_teachers_too(self):
        new = dict(model_name_or_path=None, config_name="tiny", tokenizer_name=self.folder / "teacher", objective="ul2")
        _, _, error = self.run_script(pre_train_t5, 2, config_overrides=OVERRIDES, input_seq_length=64, **new)
        self.assertRegex(error, "--teacher .*: .* other ids in the student's tokenizer")


class AnswersTest(TestCase):
    def test_a_student_with_another_tokenizer_learns_from_answers(self):
        """Sequence-level: the commands of recipes/distil_answers.yaml."""
        inputs, answers = self.folder / "inputs.tsv", self.folder / "answers.jsonl"
        shutil.copy(self.folder / "pairs.tsv", inputs)
        teacher, _, _ = self.run_script(fine_tune_t5, teacher=None, model_name_or_path=self.folder / "teacher")
        run_main(
            predict_t5.main,
            *argv_of(dict(model_name_or_path=teacher, input_file=inputs, output_file=answers, max_new_tokens=5)),
        )
        rows = [json.loads(line) for line in answers.read_text().splitlines()]
        self.assertLen(rows, 52)
        changes = dict(train_file=answers, target_column="prediction", model_name_or_path=self.folder / "other")
        out, printed, _ = self.run_script(fine_tune_t5, teacher=None, **changes)
        self.assertTrue((out / "model.safetensors").is_file(), printed)
