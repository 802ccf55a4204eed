"""Ways of learning: what of them may be on together, and what a resumed run must keep of them."""

import dataclasses
import json

from absl.testing import parameterized
from transformers import T5Config

from foundry.common.errors import UserError
from foundry.features import Features
from foundry.modeling.loss import LossTerm
from foundry.modeling.training_method import TrainingMethod, losses_of
from foundry.training.checkpoints import check_resumed
from foundry.training.run_callback import RunCallback, callbacks_of


@dataclasses.dataclass
class Term(TrainingMethod):
    """A term of the loss of each token."""

    decisive = ("term",)
    term: float = 0.5

    def is_on(self) -> bool:
        return self.term > 0

    def loss(self, *_):
        return LossTerm(None, self.term)


@dataclasses.dataclass
class Override(TrainingMethod):
    """A loss in place of that of tokens."""

    def is_on(self) -> bool:
        return True

    def loss(self, *_):
        return print


class LossesTest(parameterized.TestCase):
    def test_terms_are_taken_in_turn_and_an_override_alone(self):
        terms, loss_override = losses_of(Features([Term(0.5), Term(0.25), Term(0.0)]), None, None)
        self.assertEqual([term.weight for term in terms], [0.5, 0.25])
        self.assertIsNone(loss_override)
        self.assertEqual(losses_of(Features([Override(), Term(0.0)]), None, None), ([], print))
        self.assertEqual(losses_of(Features(), None, None), ([], None))

    @parameterized.parameters((Term(), Override()), (Override(), Term()), (Override(), Override()))
    def test_a_loss_without_a_part_in_it_is_refused(self, one, other):
        with self.assertRaisesRegex(UserError, "one of them replaces the loss in which the others have a part"):
            losses_of(Features([one, other]), None, None)


class Counts(RunCallback):
    def divisor(self, batches):
        return len(batches)


@dataclasses.dataclass
class Dividing(Override):
    """A way of learning whose loss is divided by a count of its own."""

    def callbacks(self, _trainer):
        return [Counts(), RunCallback()]


class Rows(Dividing):
    __module__ = "features.rows"


class CallbacksTest(parameterized.TestCase):
    def test_one_feature_says_by_what_the_loss_is_divided(self):
        self.assertLen(callbacks_of(Features([Term(), Rows(), Override()]), None), 2)
        with self.assertRaisesRegex(UserError, "rows, test_learning: each"):
            callbacks_of(Features([Rows(), Dividing()]), None)


class ResumedTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"term": 0.5}, 0.5, False), ({"term": 0.5}, 0.25, True), ({}, 0.5, False), ({}, 0.25, True)
    )
    def test_a_run_from_before_a_feature_had_its_default(self, recorded, value, is_refused):
        checkpoint = self.folder / "checkpoint-1"
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps(T5Config().to_dict()))
        (self.folder / "run.json").write_text(json.dumps({"arguments": {"seed": 1, **recorded}}))
        if not is_refused:
            check_resumed(str(checkpoint), T5Config(), {}, Term(value))
            return
        with self.assertRaisesRegex(UserError, "--term: 0.5 in its run, 0.25 now"):
            check_resumed(str(checkpoint), T5Config(), {}, Term(value))

    def test_a_feature_whose_folder_has_been_deleted_since(self):
        checkpoint = self.folder / "checkpoint-1"
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps(T5Config().to_dict()))
        recorded = {"arguments": {"term": 0.5, "other": None}, "features": {"terms": ["other", "term"]}}
        (self.folder / "run.json").write_text(json.dumps(recorded))
        check_resumed(str(checkpoint), T5Config(), {}, Term(0.5))
        with self.assertRaisesRegex(UserError, "--term of features/terms: 0.5 in its run, no such flag now: resume"):
            check_resumed(str(checkpoint), T5Config(), {}, Override())
