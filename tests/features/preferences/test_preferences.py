"""Preferences: TRL's formulas, log-probabilities of answers read alone, records of all shapes, wrong flags."""

import contextlib
import importlib.util
import io
import json
import tempfile
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from unittest import mock, skipUnless

import numpy as np
import torch
from absl.testing import absltest, parameterized
from datasets import Dataset
from helpers import SHAPE
from transformers import ByT5Tokenizer
from zoo import write_checkpoint

from features.preferences import BETAS, OTHER_ANSWER, PREFERENCE_METRICS, reference
from features.preferences.losses import OF_PREFERENCE, Preference, evaluated, preference_loss, preference_metrics
from features.preferences.preference_rows import with_other_answers
from features.preferences.reference import PreferenceCallback, add_reference
from foundry.arguments.task import TaskArguments
from foundry.arguments.training import FineTuningArguments
from foundry.common.command_line import parse_arguments
from foundry.common.errors import UserError
from foundry.features import Features, features_of
from foundry.model_t5 import build_config, create_model, load_model
from foundry.modeling.loss import STATISTICS, compute_loss_in_forward
from foundry.modeling.training_method import TrainingMethod
from foundry.training.batching import FilledRows, padding_collator
from tasks.entry import TaskEntry
from tasks.mixture import TaskData, Tasks
from tasks.rows import load_rows
from tasks.task_records import recorded_flags
from tasks.transforms import TRANSFORMS

SOURCES = [[5, 6, 7, 8, 1], [9, 10, 1], [11, 12, 13, 14, 15, 16, 1]]
CHOSEN = [[20, 21, 1], [22, 1], [23, 24, 25, 26, 1]]
REJECTED = [[30, 1], [31, 32, 33, 34, 35, 1], [36, 37, 1]]
ROWS = [
    {"input_ids": source, "attention_mask": [1] * len(source), "labels": chosen, "rejected": rejected}
    for source, chosen, rejected in zip(SOURCES, CHOSEN, REJECTED, strict=True)
]
REFERENCE = torch.tensor([[-9.0, -8.0], [-7.5, -26.0], [-20.0, -11.0]])


def tiny(**changes):
    torch.manual_seed(0)
    return create_model(build_config("tiny", 64, SHAPE | changes))


def data_of(tasks: Tasks, args: FineTuningArguments) -> TaskData:
    """The rows, without the reference that starting weights make of them."""
    with contextlib.redirect_stdout(io.StringIO()), mock.patch.object(reference, "add_reference"):
        return TaskData(tasks, ByT5Tokenizer(), args)


def collated(rows: list[dict], model=None) -> dict[str, torch.Tensor]:
    return dict(padding_collator(ByT5Tokenizer(), model)(rows))


def one_by_one(model, sources: list, answers: list) -> torch.Tensor:
    """[B] log-probabilities: each answer read alone after its own encoding, without a token of padding."""
    found = []
    start = model.config.decoder_start_token_id
    for source, answer in zip(sources, answers, strict=True):
        read = torch.tensor([[start, *answer[:-1]]])
        logits = model(input_ids=torch.tensor([source]), decoder_input_ids=read).logits[0].double()
        found.append(sum(logits[place].log_softmax(-1)[token] for place, token in enumerate(answer)))
    return torch.stack(found)


class Gatherer(SimpleNamespace):
    """An accelerator of one process."""

    device = torch.device("cpu")
    gather = gather_for_metrics = staticmethod(lambda values: values)


def trl_trainer(**values) -> SimpleNamespace:
    """What TRL's methods read of their trainer."""
    self = SimpleNamespace(model=SimpleNamespace(training=True), accelerator=Gatherer(), aux_loss_enabled=False)
    more = dict(_metrics={"train": defaultdict(list)}, _total_train_tokens=0, _tp_size=1, precompute_ref_logps=True)
    more |= dict(ld_alpha=None, use_weighting=False, f_divergence_type="reverse_kl", loss_weights=[1.0])
    vars(self).update(more | values)
    return self


def read_by_trl(sums: torch.Tensor, tokens: torch.Tensor) -> tuple[dict, mock.Mock]:
    """A batch and a model of TRL whose answers have these log-probabilities [N] over so many tokens [N] after a prompt
    of one token: they are spread evenly."""
    places = torch.arange(int(tokens.max()) + 1)
    mask = ((places >= 1) & (places <= tokens[:, None])).long()
    spread = (sums / tokens)[:, None] * mask[:, 1:]
    zeros = torch.zeros_like(spread)
    outputs = SimpleNamespace(log_probs=spread, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    batch = {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    return batch, mock.Mock(return_value=outputs)


@skipUnless(importlib.util.find_spec("trl"), "trl is not installed (requirements/development.txt)")
class FormulasTest(parameterized.TestCase):
    """The losses beside TRL's own methods, on the same log-probabilities."""

    def setUp(self):
        super().setUp()
        draw = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(1, 12, (6, 2), generator=draw)
        self.log_probabilities, self.reference = -30 * torch.rand(2, 6, 2, generator=draw, dtype=torch.float64)

    @parameterized.product(kind=("dpo", "ipo"), beta=(0.1, 0.7))
    def test_pairs_with_a_reference(self, kind, beta):
        from trl.trainer.dpo_trainer import DPOTrainer

        sides = torch.cat([self.log_probabilities[:, 0], self.log_probabilities[:, 1]])  # chosen, then rejected
        batch, model = read_by_trl(sides, torch.cat([self.tokens[:, 0], self.tokens[:, 1]]))
        batch |= {"ref_chosen_logps": self.reference[:, 0], "ref_rejected_logps": self.reference[:, 1]}
        trainer = trl_trainer(beta=beta, loss_types=[{"dpo": "sigmoid"}.get(kind, kind)])
        wanted = DPOTrainer._compute_loss(trainer, model, batch, False)
        preference = Preference(kind, beta)
        scores = preference.scores(self.log_probabilities, self.tokens, self.reference)
        self.assertAlmostEqual(float(preference.losses(scores).mean()), float(wanted), delta=1e-6)
        if kind == "dpo":
            every = torch.ones(6, dtype=torch.bool)
            found = preference_metrics(preference.sums(self.log_probabilities, scores, every))
            theirs = {name: values[-1] for name, values in trainer._metrics["train"].items()}
            names = ("rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected")
            for ours, name in zip(PREFERENCE_METRICS, names, strict=False):
                self.assertAlmostEqual(found[ours], theirs[name], delta=1e-6, msg=name)

    @parameterized.parameters((2.0, 0.5), (2.5, 0.0))
    def test_pairs_without_one(self, beta, gamma):
        from trl.experimental.cpo.cpo_trainer import CPOTrainer

        trainer = trl_trainer(beta=beta, loss_type="simpo", simpo_gamma=gamma, alpha=0.0, label_smoothing=0.0)
        means = (self.log_probabilities / self.tokens).T
        wanted, *_ = CPOTrainer.cpo_loss(trainer, *means)
        preference = Preference("simpo", beta, gamma)
        found = preference.losses(preference.scores(self.log_probabilities, self.tokens, None))
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)

    @parameterized.parameters(0.9, -2.0)
    def test_single_answers(self, divergence):
        from trl.trainer.kto_trainer import KTOTrainer

        desirable = torch.tensor([1, 0, 0, 1, 1, 0])
        batch, model = read_by_trl(self.log_probabilities[:, 0], self.tokens[:, 0])
        batch |= {"label": desirable, "ref_logps": self.reference[:, 0], "ref_KL_logps": torch.zeros(6)}
        others = divergence + torch.tensor([0.5, -0.5, 0.1, -0.1, 0.2, -0.2])
        trainer = trl_trainer(beta=0.1, loss_type="kto", calculate_KL=True, desirable_weight=1, undesirable_weight=1)
        trainer._compute_kl_logps = lambda *_: others
        wanted = KTOTrainer._compute_loss(trainer, model, batch, False)
        preference = Preference("kto", 0.1)
        scores = preference.scores(self.log_probabilities[:, :1], self.tokens[:, :1], self.reference[:, :1])
        found = preference.losses(scores, desirable, others.mean().clamp(min=0)).mean()
        self.assertAlmostEqual(float(found), float(wanted), delta=1e-6)


class LogProbabilitiesTest(parameterized.TestCase):
    @parameterized.product(kind=("dpo", "ipo", "simpo"), chunk=(0, 3))
    def test_loss_and_gradient_are_those_of_answers_read_alone(self, kind, chunk):
        preference, model = Preference(kind, BETAS[kind]), tiny(dropout_rate=0.0)
        chosen, rejected = (one_by_one(model, SOURCES, answers) for answers in (CHOSEN, REJECTED))
        tokens = torch.tensor([[len(a), len(b)] for a, b in zip(CHOSEN, REJECTED, strict=True)])
        alone = torch.stack([chosen, rejected], dim=1)
        preference.losses(preference.scores(alone, tokens, REFERENCE.double())).mean().backward()
        wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        compute_loss_in_forward(model, chunk=chunk, loss_override=partial(preference_loss, preference))
        batch = collated([row | {"reference": values} for row, values in zip(ROWS, REFERENCE.tolist(), strict=True)])
        output = model(**batch)
        torch.testing.assert_close(output.log_probabilities.double(), alone.detach(), atol=1e-4, rtol=1e-5)
        output.loss.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], atol=1e-5, rtol=1e-3, msg=name)

    @parameterized.parameters("t5_v1_0", "longt5_tglobal", "t5gemma", "t5gemma2")
    def test_every_family_reads_both_answers_in_one_pass(self, name):
        """Rotary positions, a merged attention, an attention in blocks."""
        write_checkpoint(self.folder / name, name)
        model = load_model(str(self.folder / name)).eval()
        alone = torch.stack([one_by_one(model, SOURCES, answers) for answers in (CHOSEN, REJECTED)], dim=1)
        compute_loss_in_forward(model, loss_override=partial(preference_loss, Preference("simpo", 2.0)))
        batch = collated(ROWS)
        torch.testing.assert_close(model(**batch).log_probabilities.double(), alone.detach(), atol=1e-3, rtol=1e-3)

    def test_rows_that_fill_a_batch_count_nothing(self):
        preference, model = Preference("dpo", 0.1), tiny(dropout_rate=0.0)
        compute_loss_in_forward(model, loss_override=partial(preference_loss, preference))
        rows = [row | {"reference": values} for row, values in zip(ROWS, REFERENCE.tolist(), strict=True)]
        filled = FilledRows(rows, 2, torch.utils.data.SequentialSampler(rows))
        outputs = [model(**collated(list(some))) for some in (rows, [filled[n] for n in range(5)])]
        for name in ("loss", "sums"):
            torch.testing.assert_close(*(output[name] for output in outputs))

    @parameterized.parameters("dpo", "kto")
    def test_accumulated_micro_batches_are_one_batch(self, kind):
        """The rows of a step divide the loss, and its divergence is one for all micro-batches."""
        preference, found = Preference(kind, 0.1), []
        reference = REFERENCE - torch.tensor([0.0, 9.0])  # so that the divergence of kto is above 0
        known = [{"reference": values, "desirable": n % 2} for n, values in enumerate(reference.tolist())]
        rows = [row | more for row, more in zip(ROWS, known, strict=True)]
        for parts in ([rows], [rows[:1], rows[1:]]):
            model = tiny(dropout_rate=0.0)
            compute_loss_in_forward(model, loss_override=partial(preference_loss, preference))
            trainer = SimpleNamespace(model=model, model_wrapped=model, args=SimpleNamespace(device="cpu"))
            trainer.accelerator = SimpleNamespace(reduce=lambda values, _: values)
            trainer.compute_loss_context_manager = contextlib.nullcontext
            learning, batches = PreferenceCallback(trainer, preference), list(map(collated, parts))
            learning.change_batches(batches)
            total = learning.divisor(batches)
            losses = [model.train()(**batch, num_items_in_batch=total).loss for batch in batches]
            sum(losses).backward()
            divergence = batches[0].get("divergence", torch.zeros(()))
            gradients = [p.grad.flatten() for p in model.parameters()]
            found.append((sum(losses).detach(), divergence, learning.sums, torch.cat(gradients)))
        self.assertEqual(bool(found[0][1] > 0), kind == "kto")
        for whole, accumulated in zip(*found, strict=True):
            torch.testing.assert_close(accumulated, whole, atol=1e-5, rtol=1e-4)

    def test_metrics_of_an_evaluation(self):
        """Three pairs by hand: log-probabilities -2 -5, -4 -4, -6 -3 and a reference of -3 -4 for all: rewards' margins
        .2, -.1, -.4; and unpaired, of which the second is a bad answer, with those to other prompts behind."""
        nats, rejected, reference = [2, 4, 6], [5, 4, 3], [-3, -4]
        statistics = np.zeros((3, len(STATISTICS) + len(OF_PREFERENCE)))
        statistics[:, 0], statistics[:, 1], statistics[:, 5], statistics[:, 6] = nats, 2, rejected, 4
        statistics[:, 7:9], statistics[:, 9] = reference, 1
        found = evaluated(Preference("dpo", 0.1), statistics)
        log_sigmoids = [np.log1p(np.exp(-margin)) for margin in (0.2, -0.1, -0.4)]
        wanted = dict(preference_accuracy=1 / 3, reward_margin=-0.1, preference_loss=np.mean(log_sigmoids))
        wanted |= dict(chosen_log_probability=-4, rejected_log_probability=-4)
        self.assertSameElements(found, PREFERENCE_METRICS)
        for name, value in wanted.items():
            self.assertAlmostEqual(found[name], value, msg=name)
        statistics[1, 9] = 0
        statistics[:, 5] = [3, 1, 4]  # ratios to the reference 1, 3, 0: a divergence of 4 / 3
        found = evaluated(Preference("kto", 0.1), statistics)
        ahead = [1 - 4 / 3, 4 / 3 + 1, -3 - 4 / 3]
        losses = [1 - 1 / (1 + np.exp(-0.1 * gap)) for gap in ahead]
        wanted = dict(preference_accuracy=1 / 3, reward_margin=0.1 * ((1 - 3) / 2 + 1), preference_loss=np.mean(losses))
        wanted |= dict(chosen_log_probability=-4, rejected_log_probability=-4)
        for name, value in wanted.items():
            self.assertAlmostEqual(found[name], value, msg=name)
        statistics[:, 7:9] = np.nan
        self.assertSameElements(evaluated(Preference("ipo", 0.1), statistics), PREFERENCE_METRICS[2:4])


class ReferenceTest(absltest.TestCase):
    def test_it_is_the_starting_model_without_dropout_and_kept_for_the_same_weights(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        model, other = tiny(dropout_rate=0.5).train(), tiny(dropout_rate=0.5)
        with torch.no_grad():
            other.shared.weight[5] += 0.5
        args = FineTuningArguments(folder, use_cpu=True, report_to=[], per_device_eval_batch_size=2)
        task_args, rows = TaskArguments(data_cache_dir=f"{folder}/cache"), Dataset.from_list(ROWS)

        def scored_by(model: torch.nn.Module) -> list[list]:
            task = SimpleNamespace(data={"train": rows, "validation": rows})
            data = SimpleNamespace(tasks=[task], tokenizer=ByT5Tokenizer(), training_args=args, args=task_args)
            add_reference(data, model)
            self.assertEqual({data._fingerprint for data in task.data.values()}, {rows._fingerprint})
            return [data["reference"][:] for data in task.data.values()]

        with contextlib.redirect_stdout(io.StringIO()):
            for scored in (model, other):
                train, validation = scored_by(scored)
                self.assertTrue(scored.training)
                with torch.no_grad():
                    sides = [one_by_one(scored.eval(), SOURCES, answers) for answers in (CHOSEN, REJECTED)]
                wanted = torch.stack(sides, dim=1).float()
                torch.testing.assert_close(torch.tensor(train), wanted, atol=1e-4, rtol=1e-5)
                self.assertEqual(train, validation)
                scored.train()
            with mock.patch.object(reference, "_log_probabilities", side_effect=AssertionError("again")):
                self.assertEqual(scored_by(other), [train, train])
                torch.nn.init.zeros_(other.shared.weight.data[6])
                with self.assertRaisesRegex(AssertionError, "again"):
                    scored_by(other)


MESSAGES = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes. "}]
OTHER = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "No."}]
SYSTEM = {"role": "system", "content": "Be brief."}
TALK = "\n\nHuman: Hi?\n\nAssistant: Hm.\n\nHuman: So?\n\nAssistant:"


def gpt(text: str) -> dict[str, str]:
    return {"from": "gpt", "value": text}


class RecordsTest(parameterized.TestCase):
    HUMAN = {"from": "human", "value": "Hi?"}
    SO = dict(role="user", content="So?")
    TURNS = dict(prompt=[*MESSAGES, SO], chosen=MESSAGES[1:], rejected=OTHER[1:])

    @parameterized.parameters(
        (dict(prompt="Hi?", chosen="Yes.", rejected="No."), "Hi?"),
        (dict(prompt="Hi?", chosen=MESSAGES, rejected=OTHER, score_chosen=8.0), "Hi?"),  # UltraFeedback's
        (dict(prompt=MESSAGES[:1], chosen=MESSAGES[1:], rejected=OTHER[1:]), "Hi?"),  # TRL's, explicit and implicit
        (dict(chosen=MESSAGES, rejected=OTHER), "Hi?"),
        (
            dict(prompt=[*MESSAGES, SO], chosen=MESSAGES[1:], rejected=OTHER[1:]),
            "user: Hi?\nassistant: Yes.\nuser: So?",
        ),
        (dict(chosen=f"{TALK} Yes.", rejected=f"{TALK} No."), TALK.strip()),  # HH-RLHF's
        # A system turn in the prompt, in it alone, or in the dialogues alone.
        (dict(prompt=[SYSTEM, *MESSAGES[:1]], chosen=MESSAGES, rejected=OTHER), "system: Be brief.\nuser: Hi?"),
        (dict(prompt=[SYSTEM], chosen=MESSAGES, rejected=OTHER), "system: Be brief.\nuser: Hi?"),
        (dict(prompt="Hi?", chosen=[SYSTEM, *MESSAGES], rejected=[SYSTEM, *OTHER]), "system: Be brief.\nuser: Hi?"),
        # ShareGPT's
        (dict(chosen=[HUMAN, gpt("Yes.")], rejected=[HUMAN, gpt("No.")]), "Hi?"),
    )
    def test_pairs(self, record, source):
        made = TRANSFORMS["preference"](record)
        self.assertEqual((made["source"], made["target"], made["rejected"]), (source, "Yes.", "No."))

    @parameterized.parameters(
        (dict(chosen="a", rejected="b"), "no common beginning that ends in .* Give the rows a column prompt"),
        (dict(question="a"), "no column prompt, nor chosen and rejected"),
        (dict(chosen=MESSAGES, rejected=[dict(role="user", content="Ho?"), OTHER[1]]), "different prompts"),
    )
    def test_what_is_no_pair(self, record, message):
        with self.assertRaisesRegex(UserError, message):
            TRANSFORMS["preference"](record)

    def parsed(self, flags: str, records: list[dict] | None = None):
        file = self.folder / "rows.jsonl"
        one = [dict(prompt=f"a {n}", chosen=f"b {n}", rejected=f"c {n}", label=n % 2) for n in range(6)]
        file.write_text("".join(json.dumps(record) + "\n" for record in records or one))
        argv = [*f"--train_file {file} --validation_file {file} --data_cache_dir {self.folder}/cache".split()]
        kinds = [TaskArguments, FineTuningArguments, *features_of("fine_tune_t5")]
        task, args, *groups = parse_arguments(kinds, [*argv, *flags.split(), "--use_cpu", "true"])
        args = args.replaced(features=Features(groups))
        with contextlib.redirect_stdout(io.StringIO()):
            tasks = Tasks.of_flags(task)
            return tasks, args.replaced(**tasks.flags(args))

    @parameterized.parameters(
        ("--preference dpo", "dpo, beta 0.1: target is better than rejected; .* starting weights"),
        ("--preference ipo --preference_beta 0.3", "ipo, beta 0.3"),
        (
            "--preference simpo --source_column prompt --target_column rejected --rejected_column chosen",
            "simpo, beta 2: rejected is better than chosen; .* without a reference, gamma 0.5",
        ),
        (
            "--preference kto --source_column prompt --target_column chosen --desirable_column label",
            "kto, beta 0.1: chosen is good or bad, as label says",
        ),
    )
    def test_rows_and_plan(self, flags, plan):
        tasks, args = self.parsed(flags)
        data = data_of(tasks, args)
        (feature,) = (feature for feature in args.features if "preference" in feature.plan(args, None))
        self.assertRegex(feature.plan(args, None)["preference"], plan)
        self.assertFalse(tasks.packable)
        text, tokenizer = [], ByT5Tokenizer()
        for row in data.train:
            sides = (row[name] for name in ("input_ids", "labels", "rejected"))
            text.append(tuple(tokenizer.decode(ids, skip_special_tokens=True) for ids in sides))
        orders = {"simpo": "a {0},c {0},b {0}", "kto": "a {0},b {0},b {1}"}
        order = orders.get(feature.how.kind, "a {0},b {0},c {0}")
        wanted = [tuple(order.format(n, (n + 1) % 6).split(",")) for n in range(6)]  # kto: the answer to another prompt
        self.assertEqual(text, wanted)
        if feature.how.is_unpaired:
            self.assertEqual(data.train["desirable"], [0, 1, 0, 1, 0, 1])
        self.assertContainsSubset(PREFERENCE_METRICS, tasks.metric_names)
        self.assertEqual(args.metric_for_best_model, "eval_rougeL")

    @parameterized.parameters("abcdef", "aabbcc", "abababab", "aaabbbcc", "abbbbcbbdb", "aaab", "ab", "cabbage" * 5)
    def test_the_answer_to_another_prompt_has_another_source(self, sources):
        task = TaskEntry(inputs={"": "prompt"}, target="answer", further=dict(desirable="label"))
        rows = [dict(prompt=source, answer=f"{source} {n}", label=n % 2) for n, source in enumerate(sources)]
        made = with_other_answers(task, rows)
        others = [row[OTHER_ANSWER] for row in made]
        self.assertEqual([{**row, OTHER_ANSWER: None} for row in made], [{**row, OTHER_ANSWER: None} for row in rows])
        for row, other in zip(rows, others, strict=True):
            self.assertNotEqual(other[0], row["prompt"])
            self.assertIn(other, [each["answer"] for each in rows])
        most = max(map(sources.count, sources))
        if most <= len(sources) / 2:
            self.assertLen(set(others), len(sources), "each answer once")
        else:
            self.assertGreaterEqual(len(set(others)), 2 * (len(sources) - most), "all the answers that can be taken")

    @parameterized.parameters(
        ("dpo", "rejected answers", "3 of 4 pairs have two equal answers, 1 of them only as they are cut"),
        ("kto", "answers to other prompts", None),
    )
    def test_the_plan_counts_cut_and_equal_answers(self, kind, what, equal):
        pairs = (("same", "same "), ("long one", "long two"), ("a", "a"), ("a", "b long"))
        rows = [dict(prompt=f"p{n}", chosen=a, rejected=b, label=1) for n, (a, b) in enumerate(pairs)]
        flags = f"--preference {kind} --source_column prompt --target_column chosen --max_target_length 5 "
        flags += "--desirable_column label" if kind == "kto" else "--rejected_column rejected"
        tasks, args = self.parsed(flags, rows)
        plan = data_of(tasks, args).report(1).rows
        share = "25 %" if kind == "kto" else "50 %"  # "same" and "same " have five tokens with their EOS
        train = f"25 % of the targets at 5 tokens, {share} of the {what} at 5 tokens (train)"
        held_out = "25 % of the targets longer than max_target_length 5 (validation)"  # "long one", uncut
        self.assertEqual(plan["cut"], f"{train}; {held_out}")
        other = "; 2 of 4 pairs have two equal answers (validation)"
        self.assertEqual(plan.get("equal"), equal and f"{equal} (train){other}")

    def test_rows_with_one_source_alone_are_refused(self):
        flags = "--preference kto --source_column prompt --target_column chosen --desirable_column label"
        tasks, args = self.parsed(flags, [dict(prompt="a", chosen=f"b {n}", label=n % 2) for n in range(4)])
        message = "--preference kto: all 4 rows of a split have the same source, 'a', .* give rows with several sources"
        with self.assertRaisesRegex(UserError, message):
            data_of(tasks, args)

    @parameterized.parameters(
        ("--rejected_column rejected", "--rejected_column rejected"),
        ("--source_column prompt --target_column chosen --rejected_column rejected", "--rejected_column rejected"),
        ("--preference dpo --simpo_gamma 1", "--simpo_gamma 1.0"),
        ("--preference_beta 1", "--preference_beta 1.0"),
        (
            "--preference dpo --source_column prompt --target_column chosen",
            "worse answers with --rejected_column, or for kto",
        ),
        (
            "--preference kto --source_column prompt --target_column chosen --rejected_column rejected",
            "--rejected_column rejected",
        ),
        ("--preference kto", "and which answers are good with --desirable_column; the file has: prompt, chosen"),
        ("--preference dpo --target_type class", "--preference dpo"),
        ("--preference dpo --record_shape alpaca", "--record_shape alpaca has no answers"),
        ("--preference dpo --packing true", "--packing True"),
        ("--preference dpo --z_loss 0.1", "--z_loss 0.1"),
        ("--preference dpo --task glue/rte", "--preference dpo"),
        ("--preference dpo --metric_for_best_model rejected_log_probability", "nothing says which way it is better"),
    )
    def test_wrong_flags(self, flags, message):
        with self.assertRaisesRegex(UserError, message):
            self.parsed(flags)

    @parameterized.parameters(
        ("--rejected_column worse", "no column worse, which task pairs needs"),
        ("--rejected_column empty", "the column empty is empty"),
        ("--rejected_column several", "the column several has 2 texts"),
        ("--desirable_column prompt", "row 1: the column prompt has 'a': must be true or false, 1 or 0"),
    )
    def test_wrong_columns(self, flag, message):
        kind = "kto" if "desirable" in flag else "dpo"
        flags = f"--preference {kind} --source_column prompt --target_column chosen {flag}"
        record = dict(prompt="a", chosen="b", empty=None, several=["c", "d"])
        tasks, _ = self.parsed(flags, [record] * 3)
        (task,) = tasks
        with self.assertRaisesRegex(UserError, message):
            load_rows("pairs", task.entry, task.args, "train")

    def test_without_a_preference_the_good_answers_are_ordinary_targets(self):
        tasks, _ = self.parsed("--record_shape preference")
        (task,) = tasks
        rows = load_rows("pairs", task.entry, task.args, "train")
        self.assertEqual(rows[0], {"source": "a 0", "target": "b 0"})

    def shown(self, flags: str, records: list[dict]) -> dict[str, str]:
        """{name: text of each part of the preview}, of all rows that are kept for it."""
        tasks, args = self.parsed(flags, records)
        data = data_of(tasks, args)
        return {part.name: part.text(ByT5Tokenizer(), 999) for row in data.report(1).shown(True) for part in row}

    def test_the_preview_shows_both_answers(self):
        shown = self.shown(
            "--preference dpo", [dict(prompt=f"which {n}?", chosen=f"good {n}", rejected=f"bad {n}") for n in range(1)]
        )
        self.assertEqual(list(shown.values())[:3], ["which 0?</s>", "good 0</s>", "bad 0</s>"])
        self.assertEqual([name.split()[-1] for name in shown], ["source", "chosen", "rejected"] * 2)

    def test_the_preview_says_whether_an_unpaired_answer_is_good(self):
        rows = [dict(prompt=f"which {n}?", completion=f"answer {n}", label=n % 4 == 0) for n in range(8)]
        shown = self.shown("--preference kto", rows)
        self.assertEqual(shown["train target (bad)"][:6], "answer")
        self.assertIn("train target (good)", shown)
        self.assertIn("train other prompt's answer", shown)

    COLUMNS = dict(source_column=["q"], target_column=["a"])
    CLASSES = COLUMNS | dict(target_type="class", labels=["x", "y"], metrics=["f1"])
    PREFERRED = dict(record_shape="preference", preference="dpo", preference_beta=0.2)

    @parameterized.parameters(
        # what is recorded, what is given, which recorded flags stay
        (COLUMNS, dict(record_shape="alpaca"), ""),
        (dict(record_shape="alpaca"), COLUMNS, ""),
        (COLUMNS, dict(preference="dpo"), ""),
        (COLUMNS, dict(record_shape="preference", preference="dpo"), ""),
        (COLUMNS, dict(preference="dpo", rejected_column="b"), "source_column target_column"),
        (PREFERRED, dict(record_shape="alpaca"), ""),
        (PREFERRED, COLUMNS, ""),
        (PREFERRED, dict(record_shape="preference"), "preference preference_beta"),
        (PREFERRED, dict(preference="ipo"), ""),
        (CLASSES, dict(preference="dpo"), ""),
        (COLUMNS | dict(metrics=["bleu"]), dict(preference="dpo"), "metrics"),
    )
    def test_a_given_shape_or_preference_replaces_recorded_flags(self, recorded, given, stay):
        """The flags together are accepted: three refusals led in a circle."""
        folder = self.folder
        rows = [dict(prompt="p", chosen="c", rejected="r", instruction="i", output="o", q="q", a="x", b="b")]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        record = dict(benchmark="own", dataset_name="pairs", validation_file=[str(folder / "rows.jsonl")])
        (folder / "task.json").write_text(json.dumps(record | recorded))
        values = dict(benchmark=None, dataset_name=None, split=None, do_predict=False) | given
        flags = recorded_flags(str(folder), values, set(given))
        self.assertSameElements(flags.keys() - record.keys(), stay.split())
        Tasks.of_flags(TaskArguments(**flags, **given))

    def test_a_model_from_scratch_has_no_preferences(self):
        tasks, args = self.parsed("--preference dpo")
        learning = args.features.first(TrainingMethod)
        self.assertEqual(learning.job(tasks.job(True)), "learning preferences")
        with self.assertRaisesRegex(UserError, "--preference dpo: begins with a model that does the task already"):
            learning.job(tasks.job(False))
