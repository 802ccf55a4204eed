"""Distillation: divergences and their gradients by definition and as TRL's, the loss on models of every family, what is
cached of a teacher."""

import itertools
import unittest
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import zoo
from absl.testing import parameterized
from torch.distributions import Categorical, kl_divergence
from transformers import AutoConfig, AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq

from constants import IGNORE_INDEX
from features.distillation import Distillation
from features.distillation.cached_teacher import TaughtCollator, said
from features.distillation.divergence import Divergence, log_of_others
from features.distillation.teacher import load_teacher, loss_term
from foundry.corpora.tokenizers import load_tokenizer
from foundry.model_t5 import create_model, load_model
from foundry.modeling.families import output_head
from foundry.modeling.loss import compute_loss_in_forward
from foundry.modeling.segment_masks import enable_packing
from foundry.training.batching import OneShapeCollator, PackingCollator

WORDS = 300
EXACT = dict(rtol=1e-9, atol=1e-11)
FLAGS = tuple(itertools.product((0.0, 0.1, 0.5, 1.0), (0.7, 1.0, 3.0)))  # beta, temperature


def model_of(family: str, seed: int = 0, **changes) -> AutoModelForSeq2SeqLM:
    """In float64, without dropout."""
    torch.manual_seed(seed)
    model = create_model(AutoConfig.for_model(**zoo.config_of(family, WORDS) | changes)).double().eval()
    for parameter in model.parameters():  # fresh norms are all alike, and fresh logits near zero
        torch.nn.init.normal_(parameter, std=0.3) if parameter.requires_grad else None
    return model


def by_definition(student: torch.Tensor, teacher: torch.Tensor, beta: float, temperature: float) -> torch.Tensor:
    """[N] divergences of logits [N, O], from torch's distributions."""
    q, p = Categorical(logits=student / temperature), Categorical(logits=teacher / temperature)
    if beta in (0, 1):
        return kl_divergence(p, q) if beta == 0 else kl_divergence(q, p)
    m = Categorical(probs=beta * p.probs + (1 - beta) * q.probs)
    return beta * kl_divergence(p, m) + (1 - beta) * kl_divergence(q, m)


class DivergenceTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        torch.manual_seed(0)
        self.student = (3 * torch.randn(7, 50, dtype=torch.float64)).requires_grad_()
        self.teacher = 3 * torch.randn(7, 50, dtype=torch.float64)

    def found(self, beta: float, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        how = Divergence(1.0, temperature, beta)
        return how.of_chunk(self.student.detach(), slice(None), self.teacher, torch.eye(50, dtype=torch.float64))

    @parameterized.parameters(*FLAGS)
    def test_values_and_gradients_are_those_of_the_definition(self, beta, temperature):
        expected = temperature**2 * by_definition(self.student, self.teacher, beta, temperature)
        expected.sum().backward()
        values, gradient = self.found(beta, temperature)
        torch.testing.assert_close(values[:, 0], expected.detach(), **EXACT)
        torch.testing.assert_close(gradient, self.student.grad, **EXACT)

    @parameterized.parameters(*FLAGS)
    def test_values_and_gradients_are_trls(self, beta, temperature):
        """TRL's GKD, which leaves out temperature^2."""
        try:
            from trl.experimental.gkd import GKDTrainer
        except ImportError:
            raise unittest.SkipTest("trl is not installed") from None
        loss = GKDTrainer.generalized_jsd_loss(
            self.student, self.teacher, beta=beta, temperature=temperature, reduction="sum"
        )
        loss.backward()
        values, gradient = self.found(beta, temperature)
        self.assertAlmostEqual(values.sum().item() / temperature**2, loss.item(), delta=1e-6)
        torch.testing.assert_close(gradient / temperature**2, self.student.grad, rtol=0, atol=1e-6)

    @parameterized.product(flags=FLAGS, top_k=(1, 5, 49))
    def test_all_other_tokens_are_one_outcome(self, flags, top_k):
        beta, temperature = flags
        kept = self.teacher.topk(top_k).indices

        def merged(logits: torch.Tensor) -> torch.Tensor:
            """[7, top_k + 1] logits of the tokens that are kept and of all others together, at this temperature."""
            logits = logits / temperature
            other = torch.ones(7, 50, dtype=torch.bool).scatter(1, kept, False)
            rest = logits[other].view(7, -1).logsumexp(-1, keepdim=True)
            return torch.cat([logits.gather(1, kept), rest], dim=1)

        expected = by_definition(merged(self.student), merged(self.teacher), beta, 1.0)
        expected.sum().backward()
        log_p = torch.log_softmax(self.teacher / temperature, -1)
        given = kept, torch.cat([log_p.gather(1, kept), log_of_others(log_p, kept)], dim=1)
        values, gradient = Divergence(1.0, temperature, beta, top_k).of_chunk(
            self.student.detach(), slice(None), *given
        )
        torch.testing.assert_close(values[:, 0] / temperature**2, expected.detach(), **EXACT)
        torch.testing.assert_close(gradient / temperature**2, self.student.grad, **EXACT)
        exact = self.found(beta, temperature)[0]
        self.assertTrue((values <= exact + 1e-12).all())
        if top_k == 49:  # one other token is no group
            torch.testing.assert_close(values, exact, **EXACT)

    @parameterized.parameters(*FLAGS)
    def test_a_sure_teacher_and_a_sure_student_give_numbers(self, beta, temperature):
        sure = torch.tensor([[200.0, -200.0, 0.0]])
        for top_k, given in (
            (0, (sure.flip(0), torch.eye(3))),
            (1, (torch.tensor([[0]]), torch.tensor([[0.0, -100.0]]))),
        ):
            for logits in (sure, sure.flip(1)):
                values, gradient = Divergence(1.0, temperature, beta, top_k).of_chunk(logits, slice(None), *given)
                self.assertTrue(values.isfinite().all() and gradient.isfinite().all())


class LossTest(parameterized.TestCase):
    @parameterized.product(
        names=(("t5_v1_0", "t5_v1_1"), ("t5_v1_1", "t5_v1_0"), ("umt5", "umt5"), ("t5gemma", "t5gemma")),
        how=((0, 0.3, 2.0, 0.0), (5, 1.0, 1.0, 1.0), (5, 0.6, 0.7, 0.4)),
    )
    def test_loss_and_gradients_are_those_of_a_plain_loop(self, names, how):
        """Of whole logits, the pairs' own loss and the definition; with the caps of T5Gemma's logits."""
        chunk, weight, temperature, beta = how
        own = dict(label_smoothing=0.1, z_loss=1e-3)
        student, teacher = (model_of(name, seed) for seed, name in enumerate(names))
        torch.manual_seed(0)
        ids, labels = torch.randint(8, WORDS, (3, 12)), torch.randint(8, WORDS, (3, 9))
        labels[1, 6:], mask = IGNORE_INDEX, torch.ones_like(ids)
        mask[2, 7:] = 0
        started = student.prepare_decoder_input_ids_from_labels(labels)
        inputs = dict(input_ids=ids, attention_mask=mask, decoder_input_ids=started)
        logits, counted = student(**inputs).logits.flatten(0, 1), labels.flatten().ne(IGNORE_INDEX)
        expected = F.cross_entropy(logits[counted], labels.flatten()[counted], label_smoothing=0.1, reduction="sum")
        expected = (1 - weight) * (expected + 1e-3 * logits.logsumexp(-1).square()[counted].sum())
        with torch.no_grad():
            theirs = teacher(**inputs).logits.flatten(0, 1)
        divergences = by_definition(logits[counted], theirs[counted], beta, temperature)
        expected = (expected + weight * temperature**2 * divergences.sum()) / 40
        expected.backward()
        gradients = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
        student.zero_grad()
        compute_loss_in_forward(teacher, chunk=1)
        cap = 30.0 if "gemma" in names[1] else None
        compute_loss_in_forward(
            student, **own, chunk=chunk, terms=[loss_term(Divergence(weight, temperature, beta, 0, cap), teacher)]
        )
        del inputs["decoder_input_ids"]
        loss = student.train(False)(**inputs, labels=labels, num_items_in_batch=torch.tensor(40))["loss"]
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-8)
        for name, parameter in student.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-7, msg=name)
        self.assertTrue(all(p.grad is None for p in teacher.parameters()))
        self.assertFalse(any("teacher" in name for name in student.state_dict()))

    @parameterized.product(family=[name for name in zoo.FAMILIES if "longt5" not in name], low=(False, True))
    def test_every_family_teaches_packed_rows_in_bfloat16_too(self, family, low):
        """A checkpoint that is its own student: what is left of the divergence is bfloat16's rounding."""
        zoo.write_checkpoint(self.folder / family, family)
        how = Distillation(str(self.folder / family), distillation_weight=1.0, distillation_beta=0.5)
        student = load_model(how.teacher).eval()
        teacher = load_teacher(how.teacher, SimpleNamespace(device=torch.device("cpu")))
        teacher = teacher.to(torch.bfloat16) if low else teacher
        rows = [dict(input_ids=list(range(8, 8 + n)), labels=list(range(9, 9 + n))) for n in (5, 3, 4)]
        start = student.config.decoder_start_token_id
        batch = PackingCollator(student.config.pad_token_id, start, cost=lambda source, target: source + target)(rows)
        enable_packing(student)
        compute_loss_in_forward(student, chunk=5, terms=[loss_term(how.divergence(teacher), teacher)])
        loss = student(**batch)["loss"]
        loss.backward()
        self.assertLess(abs(loss.item()), 1e-3 if low else 1e-7)

    @parameterized.parameters((0, 0), (4, 0), (4, 3))
    def test_compiled_it_is_the_same(self, chunk, top_k):
        student, teacher = model_of("t5_v1_1"), model_of("t5_v1_1", 1)
        ids, labels = torch.randint(8, WORDS, (2, 12)), torch.randint(8, WORDS, (2, 9))
        inputs = dict(input_ids=ids, labels=labels)
        compute_loss_in_forward(teacher, chunk=1)
        if top_k:
            found = said(teacher, Divergence(0.5, 2.0, 0.5, top_k), ids.tolist(), labels.tolist())
            shape = (2, 9, -1)
            inputs |= {
                name: torch.stack([torch.tensor(row) for row in rows]).view(shape) for name, rows in found.items()
            }
            inputs["teacher_ids"] = inputs["teacher_ids"].long()
        results = []
        for options in (None, {"backend": "aot_eager"}):
            term = loss_term(Divergence(0.5, 2.0, 0.5, top_k), None if top_k else teacher)
            compute_loss_in_forward(student, chunk=chunk, compile_options=options, terms=[term])
            student.zero_grad()
            loss = student(**inputs)["loss"]
            loss.backward()
            results.append((loss.detach(), output_head(student).weight.grad.clone()))
        torch.testing.assert_close(*results, rtol=1e-8, atol=1e-10)


class CacheTest(parameterized.TestCase):
    ROWS = ((5, 3), (9, 4), (4, 7), (6, 2))  # source and target tokens

    def rows(self) -> list[dict]:
        torch.manual_seed(0)
        return [
            dict(
                input_ids=torch.randint(8, WORDS, (source,)).tolist(),
                attention_mask=[1] * source,
                labels=torch.randint(8, WORDS, (target,)).tolist(),
            )
            for source, target in self.ROWS
        ]

    @parameterized.parameters("padded", "one shape", "packed")
    def test_the_loss_is_that_of_the_running_teacher(self, kind):
        """All tokens but one are kept, so that nothing is lost; each collator puts the labels elsewhere."""
        zoo.write_checkpoint(self.folder / "model", "t5_v1_1")
        tokenizer = load_tokenizer(str(self.folder / "model"))
        student, teacher = model_of("t5_v1_1"), model_of("t5_v1_1", 1)
        for model in (student, teacher):
            enable_packing(model)
        collator = {
            "padded": DataCollatorForSeq2Seq(tokenizer, model=student, pad_to_multiple_of=8),
            "one shape": OneShapeCollator(0, 0, 16, 8, rows=6),
            "packed": PackingCollator(0, 0, cost=lambda source, target: source * target),
        }[kind]
        compute_loss_in_forward(teacher, chunk=1)
        rows, running = self.rows(), Divergence(0.7, 1.5, 0.0)
        cached = running._replace(top_k=output_head(teacher).weight.shape[0] - 1)
        losses = []
        for how, collate, each in (
            (running, collator, teacher),
            (cached, TaughtCollator(collator, cached.top_k), None),
        ):
            given = [dict(row) for row in rows]
            if each is None:
                found = said(teacher, how, *([row[name] for row in rows] for name in ("input_ids", "labels")))
                given = [row | {name: part[n] for name, part in found.items()} for n, row in enumerate(given)]
                given.append(
                    dict(given[0], labels=[IGNORE_INDEX], **{name: part[0][:1] for name, part in found.items()})
                )
            compute_loss_in_forward(student, chunk=5, terms=[loss_term(how, each)])
            losses.append(student(**collate(given))["loss"].item())
        self.assertAlmostEqual(*losses, delta=1e-6)

    def test_a_batch_of_nothing_but_filling(self):
        """As a rank has in the last step of an epoch."""
        blank = dict(
            input_ids=[5], attention_mask=[1], labels=[IGNORE_INDEX], teacher_ids=[7], teacher_log_probs=[-1.0]
        )
        batch = TaughtCollator(OneShapeCollator(0, 0, 8, 8, rows=2), 3)([blank, dict(blank)])
        self.assertEqual(batch["teacher_ids"].shape, (2, 8, 3))
        self.assertEqual(batch["teacher_log_probs"].shape, (2, 8, 4))
