"""Rewards: gradients against the sum over all answers, advantages by hand, answers by definition, wrong flags."""

import contextlib
import dataclasses
import io
import itertools
import json
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from absl.testing import absltest, parameterized
from helpers import SHAPE
from transformers import ByT5Tokenizer
from zoo import write_checkpoint

from constants import DATASET_VALS, IGNORE_INDEX
from features.rewards.methods import SUMS, Method, reward_loss
from features.rewards.rewarded_steps import Reference, RewardCallback, reward_metrics
from features.rewards.scores import Reward
from foundry.arguments.model import ModelArguments
from foundry.arguments.task import TaskArguments
from foundry.arguments.training import FineTuningArguments
from foundry.common.command_line import parse_arguments
from foundry.common.errors import UserError
from foundry.common.flags import Flags
from foundry.features import Features, features_of
from foundry.model_t5 import build_config, create_model, load_model
from foundry.modeling.loss import compute_loss_in_forward
from foundry.trainer_t5 import T5Trainer
from foundry.training.drawn_answers import answers_of_draws, uniform_numbers
from tasks.entry import TaskEntry
from tasks.mixture import TaskData, Tasks
from tasks.row_source import tasks_of

EOS, LONGEST, TOKENS = 1, 3, 10
SOURCE = [5, 6, 7, EOS]
# All answers of at most three tokens: those that end, and those that are cut.
ANSWERS = [
    [*begin, *end]
    for length in range(LONGEST)
    for begin in itertools.product([token for token in range(TOKENS) if token != EOS], repeat=length)
    for end in ([[EOS]] if length < LONGEST - 1 else [[token] for token in range(TOKENS)])
]


def tiny(vocabulary: int = TOKENS, seed: int = 0):
    torch.manual_seed(seed)
    model = create_model(build_config("tiny", 64, SHAPE | dict(dropout_rate=0.0, vocab_size=vocabulary)))
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)  # probabilities that differ
    return model


def log_probability(model, source: list[int], answer: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Of each token of an answer, [T], which is read alone after its own encoding."""
    read = torch.tensor([[model.config.decoder_start_token_id, *answer[:-1]]])
    forward = getattr(model, "plain_forward", model)
    log_p = (forward(input_ids=torch.tensor([source]), decoder_input_ids=read).logits[0] / temperature).log_softmax(-1)
    return torch.stack([log_p[place, token] for place, token in enumerate(answer)])


def log_probabilities_of_all(model, temperature: float = 1.0) -> torch.Tensor:
    """[820] of ANSWERS to SOURCE."""
    padded = torch.full((len(ANSWERS), LONGEST), IGNORE_INDEX)
    for place, answer in enumerate(ANSWERS):
        padded[place, : len(answer)] = torch.tensor(answer)
    read = torch.cat([torch.zeros_like(padded[:, :1]), padded[:, :-1].clamp(min=0)], dim=1)
    sources = torch.tensor([SOURCE]).expand(len(ANSWERS), -1)
    log_p = (model.plain_forward(input_ids=sources, decoder_input_ids=read).logits / temperature).log_softmax(-1)
    each = log_p.gather(2, padded.clamp(min=0)[..., None])[..., 0]
    return each.where(padded.ne(IGNORE_INDEX), 0).sum(1)


def reward_of(answer: tuple[int, ...]) -> float:
    """A number between 0 and 1 that depends on every token, and on whether the answer ended."""
    return (sum((place + 2) * token for place, token in enumerate(answer)) * 7 % 23) / 23


def rows_of(answers: torch.Tensor) -> list[list[tuple[int, ...]]]:
    """The answers [B, K, T] as tuples without padding."""
    return [[tuple(ids[ids.ne(IGNORE_INDEX)].tolist()) for ids in row] for row in answers]


def batch_of(rows: int) -> dict[str, torch.Tensor]:
    sources = torch.tensor([SOURCE]).expand(rows, -1)
    return dict(input_ids=sources, attention_mask=torch.ones_like(sources), labels=torch.full((rows, 1), 4))


def drawn_batch(model, method: Method, step: int, rows: int, reference=None) -> dict[str, torch.Tensor]:
    """A batch with answers and rewards, made by the functions that a step calls."""
    batch, greedy = batch_of(rows), method.kind == "scst"
    draws = uniform_numbers(3, [(step, row) for row in range(rows)], method.samples, method.longest)
    draws = torch.cat([draws, torch.full_like(draws[:, :1], torch.nan)], dim=1) if greedy else draws
    sources = {name: batch[name] for name in ("input_ids", "attention_mask")}
    answers = answers_of_draws(model, sources, draws, method.temperature)
    rewards = torch.tensor([[reward_of(answer) for answer in row] for row in rows_of(answers)])
    batch |= dict(answers=answers[:, : method.samples], rewards=rewards[:, : method.samples])
    batch |= dict(greedy=rewards[:, -1]) if greedy else {}
    if reference is not None:
        with torch.no_grad():
            batch["reference"] = reference(**{n: v for n, v in batch.items() if n not in ("rewards", "greedy")})[
                "log_probabilities"
            ]
    return batch


def gradient(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


class GradientTest(parameterized.TestCase):
    @parameterized.parameters(
        (dict(kind="scst", samples=1),),
        (dict(kind="scst", samples=3, kl=0.4),),
        (dict(kind="rloo", samples=4),),
        (dict(kind="rloo", samples=2, kl=0.4, temperature=1.5),),
        (dict(kind="grpo", samples=4, unscaled=True),),
        (dict(kind="rloo", samples=4, supervised=0.3),),
    )
    def test_its_mean_is_that_of_the_sum_over_all_answers(self, how):
        """Mean of 40 steps of 64 groups, within three standard errors along the gradient and in other directions."""
        method, model, other = Method(longest=LONGEST, **how), tiny(), tiny(seed=1)
        for each in (model, other):
            compute_loss_in_forward(each, loss_override=partial(reward_loss, method))
        log_p = log_probabilities_of_all(model, method.temperature)
        self.assertAlmostEqual(float(log_p.detach().exp().sum()), 1.0, places=4)
        rewards = torch.tensor([reward_of(tuple(answer)) for answer in ANSWERS])
        value = (log_p.exp() * rewards).sum()
        if method.kl:
            value = (
                value
                - method.kl
                * (log_p.exp() * (log_p - log_probabilities_of_all(other, method.temperature).detach())).sum()
            )
        # The mean of grpo's group holds the answer itself, and its tokens count 1 / longest.
        factor = (method.samples - 1) / method.samples / LONGEST if method.kind == "grpo" else 1.0
        target = -log_probability(model, SOURCE, [4]).sum()
        (method.supervised * target - (1 - method.supervised) * factor * value).backward()
        exact, found, rewarded = gradient(model), [], []
        for step in range(40):
            model.zero_grad()
            batch = drawn_batch(model, method, step, 64, other.eval() if method.kl else None)
            output = model.train()(**batch)
            output.loss.backward()
            found.append(gradient(model))
            rewarded.append(float(batch["rewards"].mean()))
        draw = torch.Generator().manual_seed(0)
        directions = torch.stack([exact, *torch.randn(6, len(exact), generator=draw)])
        directions = directions / directions.norm(dim=1, keepdim=True)
        seen, wanted = torch.stack(found) @ directions.T, directions @ exact
        errors = seen.std(0) / len(found) ** 0.5
        self.assertGreater(float(wanted[0]), 5 * float(errors[0]), "the test could not tell it from nothing")
        for place, (mean, truth, error) in enumerate(zip(seen.mean(0), wanted, errors, strict=True)):
            self.assertLess(abs(float(mean - truth)), 3 * float(error), place)
        expected = float((log_p.detach().exp() * rewards).sum())
        self.assertLess(abs(np.mean(rewarded) - expected), 3 * np.std(rewarded, ddof=1) / len(rewarded) ** 0.5)

    @parameterized.product(chunk=(0, 3), method=(dict(kind="rloo", samples=2), dict(kind="grpo", samples=2, kl=0.3)))
    def test_loss_and_gradient_are_those_of_answers_read_alone(self, chunk, method):
        """Also of a second update, of a supervised share, and of a row that only fills the batch."""
        method = Method(longest=LONGEST, supervised=0.2, updates=2, clip=0.1, temperature=0.7, **method)
        model = tiny()
        answers = [[[4, 1], [2, 3, 5]], [[1], [0, 0, 1]]]
        rewards, labels = torch.tensor([[1.0, 0.2], [0.3, 0.0]]), [[7, 1], [8, 9, 1]]
        with torch.no_grad():
            alone = [[log_probability(model, SOURCE, a, 0.7) for a in row] for row in answers]
        reference = [[tokens - 0.5 for tokens in row] for row in alone]
        before = [[tokens + shift for tokens in row] for row, shift in zip(alone, (0.3, -0.05), strict=True)]
        total = 0.0
        if method.kind == "rloo":
            advantages = [[1.0 - 0.2, 0.2 - 1.0], [0.3, -0.3]]
        else:
            advantages = [[a / (2**0.5 * h + 1e-4) for a in (h, -h)] for h in (0.4, 0.15)]
        for row, of_row in enumerate(answers):
            for place, answer in enumerate(of_row):
                log_p = log_probability(model, SOURCE, answer, 0.7)
                weight = 1 / len(answer) if method.kind == "grpo" else 1.0
                for token in range(len(answer)):
                    q, a = (log_p[token] - before[row][place][token]).exp(), advantages[row][place]
                    gain = min(q * a, q.clamp(0.9, 1.1) * a)
                    if method.kind == "grpo":
                        away = reference[row][place][token] - log_p[token]
                        gain = gain - 0.3 * (away.exp() - away - 1)
                    total = total - 0.8 * weight * gain / 2 / 2
        total = total - 0.2 * sum(log_probability(model, SOURCE, target).sum() for target in labels) / 5
        total.backward()
        wanted = gradient(model)
        model.zero_grad()
        compute_loss_in_forward(model, chunk=chunk, loss_override=partial(reward_loss, method))
        batch = batch_of(3) | dict(labels=padded([*labels, []]), rewards=torch.cat([rewards, rewards[:1] + 5]))
        batch |= dict(
            answers=padded_groups([*answers, [[3], [4]]]), drawn_under=padded_groups([*before, before[0]], 0.0)
        )
        if method.kind == "grpo":
            batch["reference"] = padded_groups([*reference, reference[0]], 0.0)
        output = model.train()(**batch)
        output.loss.backward()
        torch.testing.assert_close(output.loss, total.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(gradient(model), wanted, atol=1e-5, rtol=1e-4)
        sums = dict(zip(SUMS, output.sums.tolist(), strict=True))
        self.assertEqual((sums["rows"], sums["supervised_tokens"], sums["equal"]), (2, 5, 0))
        self.assertAlmostEqual(sums["length"], 2.5 + 2)
        self.assertAlmostEqual(sums["reward"], 0.6 + 0.15, places=5)
        self.assertAlmostEqual(sums["spread"], 0.4 + 0.15, places=5)

    @parameterized.parameters(
        (dict(kind="scst"), [[0.5, -0.5, 0.0]]),
        (dict(kind="rloo"), [[0.75, -0.75, 0.0]]),
        (dict(kind="grpo"), [[0.5 / 0.5001, -0.5 / 0.5001, 0.0]]),
        (dict(kind="grpo", unscaled=True), [[0.5, -0.5, 0.0]]),
    )
    def test_advantages(self, how, wanted):
        """Of the rewards 1, 0, 0.5: the mean of the others is 0.25, 0.75, 0.5; their deviation is 0.5."""
        method = Method(samples=3, longest=8, **how)
        rewards = torch.tensor([[1.0, 0.0, 0.5]])
        found = method.advantages(rewards, torch.tensor([0.5]))
        torch.testing.assert_close(found, torch.tensor(wanted))
        shifted = method.advantages(rewards, torch.tensor([0.5]), torch.tensor([[2.0, 0.0, 0.0]]))
        torch.testing.assert_close(shifted, found, msg="a factor of 0")
        lengths = torch.tensor([[2.0, 4.0, 8.0]])
        weights = {"grpo": [[0.5, 0.25, 0.125]]}.get(method.kind, [[1.0, 1.0, 1.0]])
        weights = [[0.125] * 3] if method.unscaled else weights
        torch.testing.assert_close(method.weights(lengths), torch.tensor(weights))
        equal = method.advantages(torch.full((1, 3), 0.7), torch.tensor([0.7]))
        torch.testing.assert_close(equal, torch.zeros(1, 3))


def padded(rows: list, fill: float = IGNORE_INDEX) -> torch.Tensor:
    longest = max(map(len, rows))
    made = torch.full((len(rows), longest), fill, dtype=torch.long if fill == IGNORE_INDEX else torch.float)
    for place, row in enumerate(rows):
        made[place, : len(row)] = torch.as_tensor(row)
    return made


def padded_groups(groups: list, fill: float = IGNORE_INDEX) -> torch.Tensor:
    flat = padded([answer for group in groups for answer in group], fill)
    return flat.view(len(groups), len(groups[0]), -1)


class AnswersTest(parameterized.TestCase):
    @parameterized.parameters("t5_v1_0", "longt5_tglobal", "t5gemma", "t5gemma2", "umt5")
    def test_each_token_is_the_first_whose_cumulated_probability_is_larger(self, name):
        """By a plain loop without a cache, of sources of several lengths; the greedy answer too. In another batch, and
        while the random numbers of training are others, the answers are the same."""
        write_checkpoint(self.folder / name, name)
        model = load_model(str(self.folder / name)).train()
        model.generation_config.update(num_beams=3, repetition_penalty=2.0, length_penalty=0.5)
        sources, longest, temperature = [[5, 6, 7, 8, 9, 1], [10, 1], [11, 12, 13, 1]], 6, 1.3
        draws = uniform_numbers(7, [(2, 4), (2, 0), (2, 9)], 3, longest)
        draws[:, 2] = torch.nan
        batch = padded_sources(sources, model.config.pad_token_id)
        answers = answers_of_draws(model, batch, draws, temperature)
        self.assertTrue(model.training)
        ends = np.atleast_1d(model.generation_config.eos_token_id).tolist()
        model.eval()
        for source, numbers, found in zip(sources, draws, rows_of(answers), strict=True):
            for own, answer in zip(numbers.tolist(), found, strict=True):
                written = []
                while len(written) < longest and (not written or written[-1] not in ends):
                    read = torch.tensor([[model.config.decoder_start_token_id, *written]])
                    with torch.no_grad():
                        logits = model(input_ids=torch.tensor([source]), decoder_input_ids=read).logits[0, -1]
                    chances, at = (logits.double() / temperature).softmax(-1), own[len(written)]
                    place = int(torch.searchsorted(chances.cumsum(0), at, right=True))
                    written.append(int(logits.argmax()) if np.isnan(at) else place)
                self.assertEqual(answer, tuple(written))
        torch.manual_seed(5)
        one = answers_of_draws(model, padded_sources(sources[1:2], model.config.pad_token_id), draws[1:2], temperature)
        self.assertEqual(rows_of(one)[0], rows_of(answers)[1])
        with mock.patch("foundry.training.drawn_answers.rows_to_generate", return_value=1):
            apart = answers_of_draws(model, batch, draws, temperature)
        self.assertEqual(rows_of(apart), rows_of(answers))

    def test_numbers_of_a_row_depend_on_seed_step_and_row_alone(self):
        draws = uniform_numbers(1, [(2, 3), (2, 8)], 2, 4)
        torch.testing.assert_close(uniform_numbers(1, [(2, 8)], 2, 4)[0], draws[1], rtol=0, atol=0)
        for other in ((0, [(2, 3)]), (1, [(3, 3)]), (1, [(2, 4)])):
            self.assertFalse(torch.equal(uniform_numbers(*other, 2, 4)[0], draws[0]))

    def test_frequencies_are_the_model_s_probabilities(self):
        """20,000 answers: each of the 40 likeliest is within four standard errors."""
        model = tiny()
        compute_loss_in_forward(model)
        draws = uniform_numbers(0, [(0, row) for row in range(100)], 200, LONGEST)
        batch = {name: values for name, values in batch_of(100).items() if name != "labels"}
        found = [answer for row in rows_of(answers_of_draws(model, batch, draws)) for answer in row]
        chances = log_probabilities_of_all(model).exp().tolist()
        for chance, answer in sorted(zip(chances, map(tuple, ANSWERS), strict=True), reverse=True)[:40]:
            error = (chance * (1 - chance) / len(found)) ** 0.5
            self.assertLess(abs(found.count(answer) / len(found) - chance), 4 * error, answer)


def padded_sources(sources: list[list[int]], padding: int) -> dict[str, torch.Tensor]:
    ids = padded(sources)
    return dict(input_ids=ids.where(ids.ge(0), padding), attention_mask=ids.ge(0).long())


class StepTest(parameterized.TestCase):
    """What a step adds to its micro-batches."""

    def learning(self, how: dict, folder: str, model=None) -> tuple[RewardCallback, object]:
        model = model or tiny(384)
        method = Method(longest=5, **how)
        compute_loss_in_forward(model, loss_override=partial(reward_loss, method))
        args = SimpleNamespace(device=torch.device("cpu"), seed=1, world_size=1)
        accelerator = SimpleNamespace(reduce=lambda values, _: values, autocast=contextlib.nullcontext)
        trainer = SimpleNamespace(model=model, args=args, accelerator=accelerator, state=SimpleNamespace(global_step=0))
        trainer.compute_loss_context_manager = contextlib.nullcontext
        entry = TaskEntry(inputs={"": "q"}, target="a", metrics=["exact_match"])
        rows = [dict(q=f"question {n}", a="ab") for n in range(6)]
        feature = SimpleNamespace(method=method, entry=entry, tokenizer=ByT5Tokenizer(), train_rows=rows)
        feature.scorer = Reward("length", entry)
        return RewardCallback(trainer, feature), trainer

    def batches(self, sizes: list[int]) -> list[dict]:
        tokenizer, made, first = ByT5Tokenizer(), [], 0
        for size in sizes:
            rows = [tokenizer(f"question {n}" * (1 + n % 2))["input_ids"] for n in range(first, first + size)]
            batch = padded_sources(rows, 0)
            made.append(
                batch
                | dict(
                    labels=padded([[n + 5, 1] for n in range(first, first + size)]),
                    row=torch.arange(first, first + size),
                )
            )
            first += size
        return made

    @parameterized.parameters(
        (dict(kind="rloo", samples=3, kl=0.2, supervised=0.3),),
        (dict(kind="scst", samples=1),),
        (dict(kind="grpo", samples=2, kl=0.2),),
    )
    def test_micro_batches_are_one_batch(self, how):
        found = []
        for sizes in ([6], [2, 4], [1, 5]):
            learning, trainer = self.learning(how, "")
            batches = self.batches(sizes)
            learning.change_batches(batches)
            total = learning.divisor(batches)
            self.assertEqual(float(total), 6)
            losses = [trainer.model.train()(**batch, num_items_in_batch=total).loss for batch in batches]
            sum(losses).backward()
            answers = [answer for batch in batches for answer in rows_of(batch["answers"])]
            found.append((answers, sum(losses).detach(), learning.sums, gradient(trainer.model)))
        for answers, *tensors in found[1:]:
            self.assertEqual(answers, found[0][0])
            for tensor, wanted in zip(tensors, found[0][1:], strict=True):
                torch.testing.assert_close(tensor, wanted, atol=1e-5, rtol=1e-4)

    def test_the_reference_is_the_starting_model(self):
        learning, trainer = self.learning(dict(kind="rloo", samples=2, kl=0.2), "")
        (batch,) = batches = self.batches([4])
        learning.change_batches(batches)
        trainer.model.train()(**batch)
        metrics = reward_metrics(learning.method, learning.sums)
        self.assertAlmostEqual(metrics["reward_kl_nats"], 0.0, places=5)
        before = batch["reference"]
        with torch.no_grad():
            trainer.model.lm_head.weight.mul_(0.5)
        (again,) = batches = self.batches([4])
        learning.change_batches(batches)
        alone = padded_groups(
            [
                [log_probability(learning.reference.model, source, answer, 1.0) for answer in row]
                for source, row in zip(sources_of(again), rows_of(again["answers"]), strict=True)
            ],
            0.0,
        )
        torch.testing.assert_close(again["reference"], alone.detach(), atol=1e-4, rtol=1e-4)
        self.assertNotEqual(before.shape, None)

    def test_later_updates_see_the_same_answers(self):
        learning, trainer = self.learning(dict(kind="grpo", samples=2, updates=2), "")
        first = self.batches([2, 2])
        learning.change_batches(first)
        saved = json.loads(json.dumps(learning.state() | learning.texts()))
        trainer.state.global_step = 1
        other, _ = self.learning(dict(kind="grpo", samples=2, updates=2), "")
        other.trainer.state.global_step = 1
        other.restore(saved)
        for each in (learning, other):
            second = [dict(input_ids=torch.zeros(1, 1)) for _ in range(2)]
            each.change_batches(second)
            for one, two in zip(first, second, strict=True):
                self.assertSameElements(one, two)
                for name in one:
                    torch.testing.assert_close(two[name], one[name], rtol=0, atol=0, msg=name)
        other.restore(saved | {"answers": saved["answers"] | {"processes": 2}})
        self.assertEmpty(other.kept)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            self.learning(dict(kind="grpo", samples=2, updates=2), "")[0].restore(learning.state())
        self.assertIn("the checkpoint has no drawn answers (uploads leave them out)", printed.getvalue())


class ReferenceTest(absltest.TestCase):
    def test_the_copy_has_the_type_to_which_the_model_was_cast_later(self):
        model = tiny()
        reference = Reference(model, torch.device("cpu"))
        before = model.bfloat16().state_dict()
        with reference.ready() as starting:
            self.assertIsNot(starting, model)
            torch.testing.assert_close(starting.state_dict(), before, rtol=0, atol=0)

    def test_deepspeed_in_bfloat16_does_not_round_what_a_step_adds(self):
        """Of -70.3 nats bfloat16 would keep -70.5."""
        plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(dtype=lambda: torch.bfloat16))
        state = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
        trainer = SimpleNamespace(
            is_deepspeed_enabled=True, accelerator=state, args=SimpleNamespace(device=torch.device("cpu"))
        )
        trainer._prepare_input = partial(T5Trainer._prepare_input, trainer)
        batch = dict(reference=torch.tensor([-70.3]), input_ids=torch.tensor([3]))
        self.assertEqual(trainer._prepare_input(batch), batch)


def sources_of(batch: dict) -> list[list[int]]:
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


TEXT = dict(inputs={"": "q"}, target="a", target_type="text", metrics=["rougeL"])
CLASS = dict(inputs={"": "q"}, target="a", target_type="class", labels=["no", "yes"], metrics=["f1"])


def share_of_words(predictions: list[str], references: list[str]) -> float:
    """A mean over rows, as a task's entry may define one."""
    pairs = zip(predictions, references, strict=True)
    return float(np.mean([len({*one.split()} & {*of.split()}) / len(of.split()) for one, of in pairs]))


OWN_METRICS = dict(metrics=["words", "wer"], metric_functions={"words": share_of_words, "wer": share_of_words})
DISTANCE = dict(metrics=["off"], metric_functions={"off": lambda one, two: float(np.mean([one, two]))})


class ScoresTest(parameterized.TestCase):
    @parameterized.parameters(
        ("exact_match", TEXT, ["x y", "x"], [1.0, 0.0]),
        ("exact_match:0.8,length:0.2", TEXT, ["x y", "x"], [1.0, 0.2 / 3]),
        ("rougeL:2", TEXT, ["x y", "x"], [2.0, 4 / 3]),
        ("length:-1", TEXT, ["", "x y z "], [0.0, -0.5]),
        ("sentence_chrf", TEXT, ["x y", "z"], [1.0, 0.0]),
        ("sentence_bleu", TEXT | dict(target="long"), ["one two three four", "none"], [1.0, 0.0]),
        ("accuracy", CLASS, ["yes", "perhaps"], [1.0, 0.0]),
        ("words", TEXT | OWN_METRICS, ["x", "y x", ""], [0.5, 1.0, 0.0]),
        ("words:2,wer:-1", TEXT | OWN_METRICS, ["x", "y x"], [0.5, 1.0]),
        ("off", CLASS | DISTANCE, ["no", "yes"], [0.5, 1.0]),
        (
            "entry",
            TEXT | dict(further=dict(reward=lambda texts, _, rows: [len(text) + rows[0]["n"] for text in texts])),
            ["a", ""],
            [4, 3],
        ),
    )
    def test_rewards(self, text, entry, answers, wanted):
        row = dict(q="q", a="yes" if entry["target_type"] == "class" else "x y", n=3, long="one two three four")
        found = Reward(text, TaskEntry(**entry))(answers, [row] * len(answers))
        np.testing.assert_allclose(found, wanted, atol=1e-6)

    @parameterized.parameters(
        ("bleu", TEXT, "--reward bleu"),
        ("f1", CLASS, "f1 scores a set of rows.*: take accuracy"),
        ("rougeL:much", TEXT, "--reward rougeL:much: 'much' is no weight: give a number"),
        ("rougeL:0", TEXT, "'0' is no weight"),
        ("rougeL,rougeL", TEXT, "rougeL stands there twice"),
        ("rogueL", TEXT, "scores no single rows: take one of accuracy, exact_match"),
        ("accuracy", TEXT, "--reward accuracy"),
        ("entry", TEXT, "--reward entry"),
        ("wer", TEXT | OWN_METRICS, "--reward wer"),
    )
    def test_what_scores_no_rows(self, text, entry, message):
        with self.assertRaisesRegex(UserError, message):
            Reward(text, TaskEntry(**entry))

    def test_a_function_that_returns_too_few_numbers(self):
        reward = Reward("entry", TaskEntry(**TEXT, further=dict(reward=lambda *_: [1.0])))
        with self.assertRaisesRegex(UserError, "returned 1.0 for 2 answers: return a finite number for each"):
            reward(["a", "b"], [dict(q="q", a="a")] * 2)


class FlagsTest(parameterized.TestCase):
    def parsed(self, flags: str, rows: list[dict] | None = None):
        file, rows = self.folder / "rows.jsonl", rows or [dict(prompt=f"a {n}", answer=f"b {n}") for n in range(6)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        argv = [*f"--train_file {file} --validation_file {file} --data_cache_dir {self.folder}/cache".split()]
        argv += "--source_column prompt --target_column answer --use_cpu true".split()
        kinds = [TaskArguments, FineTuningArguments, *features_of("fine_tune_t5")]
        task, args, *groups = parse_arguments(kinds, [*argv, *flags.split()])
        args = args.replaced(features=Features(groups))
        with contextlib.redirect_stdout(io.StringIO()):
            tasks = tasks_of(args.features, task)
            return tasks, args.replaced(**tasks.flags(args))

    @parameterized.parameters(
        ("--reward bleu", "take sentence_bleu"),
        ("--reward rougeL --packing true", "--packing True"),
        ("--reward rougeL --z_loss 0.1", "--z_loss 0.1"),
        ("--reward rougeL --task glue/rte", "--reward rougeL"),
    )
    def test_wrong_flags(self, flags, message):
        with self.assertRaisesRegex(UserError, message):
            self.parsed(flags)

    @parameterized.parameters(
        ("--reward_kl 0.1", "--reward_kl 0.1"),
        ("--reward rougeL --reward_unscaled", "--reward_unscaled True"),
        ("--reward rougeL --reward_updates 2", "--reward_updates 2"),
        ("--reward rougeL --reward_method grpo --reward_clip 0.1", "--reward_clip 0.1"),
        ("--reward rougeL --reward_samples 1", "--reward_samples 1 draws one"),
    )
    def test_flags_that_do_not_go_together(self, flags, message):
        kinds = [ModelArguments, TaskArguments, FineTuningArguments, *features_of("fine_tune_t5")]
        groups = parse_arguments(kinds, [*flags.split(), "--use_cpu", "true"])
        with self.assertRaisesRegex(UserError, message):
            Features(groups[3:]).check_rules(Flags(*groups))

    @parameterized.parameters(
        ("--reward rougeL", "rougeL, rloo: less the mean of the other answers'; 4 answers to each source, 32 a step"),
        (
            "--reward exact_match:0.5,length --reward_method scst --reward_samples 1 --reward_kl 0.1",
            "0.5 exact_match \\+ length, scst: less the greedy answer's; 1 answers and the greedy one .* 16 a step",
        ),
        (
            "--reward rougeL --reward_method grpo --reward_updates 2 --supervised_share 0.1",
            "grpo: less the mean of the answers', divided by their deviation; .* every 2 steps.* 0.1 of the loss",
        ),
    )
    def test_rows_and_plan(self, flags, plan):
        tasks, args = self.parsed(f"{flags} --per_device_train_batch_size 8 --gradient_accumulation_steps 1")
        with contextlib.redirect_stdout(io.StringIO()):
            data = TaskData(tasks, ByT5Tokenizer(), args)
        (feature,) = (feature for feature in args.features if hasattr(feature, "scorer"))
        feature.reference = SimpleNamespace(shares_weights=False)
        self.assertRegex(feature.plan(args, None)["reward"], plan)
        self.assertEmpty(feature.repeated)
        self.assertEqual(data.train["row"], list(range(6)))
        self.assertEqual(feature.train_rows[3]["answer"], "b 3")
        self.assertNotIn("row", data.validation.column_names)
        self.assertFalse(tasks.packable)
        self.assertEqual(tasks.most_tokens(None)[1], 128 * feature.texts)
        self.assertEqual(feature.job(tasks.job(True)), "learning from rewards")
        with self.assertRaisesRegex(UserError, "begins with a model that does the task already"):
            feature.job(tasks.job(False))

    @parameterized.parameters(
        [[dict(prompt="p", answer=["x y", "z"]), dict(prompt="q", answer="v")]],
        [[dict(prompt="p", answer="x y"), dict(prompt="q", answer="v"), dict(prompt="p", answer=["z"])]],
    )
    def test_the_best_of_all_references_of_a_source_counts(self, rows):
        """As in evaluation, though training has one row for each reference."""
        tasks, args = self.parsed("--reward exact_match", rows)
        with contextlib.redirect_stdout(io.StringIO()):
            data = TaskData(tasks, ByT5Tokenizer(), args)
        (feature,) = (feature for feature in args.features if hasattr(feature, "scorer"))
        self.assertLen(data.train, 3)
        feature.reference = SimpleNamespace(shares_weights=False)
        said = "; 1 sources stand in 2 training rows, and the answers of all of these count"
        self.assertEndsWith(feature.plan(args, None)["reward"], said)
        rewards = {}
        for row in feature.train_rows:
            rewards.setdefault(row["prompt"], []).append(feature.scorer(["x y", "z", "v"], [row] * 3).tolist())
        self.assertEqual(rewards, {"p": [[1, 1, 0], [1, 1, 0]], "q": [[0, 0, 1]]})

    def test_a_function_of_an_entry_that_fails_shows_before_training(self):
        tasks, args = self.parsed("--reward rougeL")
        (task,) = tasks
        task.entry = dataclasses.replace(
            task.entry, further=dict(reward=lambda _p, _r, rows: [row["colour"] for row in rows])
        )
        (feature,) = (feature for feature in args.features if hasattr(feature, "scorer"))
        feature.scorer = Reward("entry", task.entry)
        with contextlib.redirect_stdout(io.StringIO()), self.assertRaisesRegex(UserError, "KeyError: 'colour'"):
            TaskData(tasks, ByT5Tokenizer(), args)

    def test_an_entry_may_have_the_function(self):
        entry = DATASET_VALS["glue"]["rte"] | dict(reward="short")
        with (
            mock.patch.dict(DATASET_VALS["glue"], rte=entry),
            self.assertRaisesRegex(UserError, "reward 'short': must be a function"),
        ):
            Tasks.of_flags(TaskArguments(benchmark="glue", dataset_name="rte"))
