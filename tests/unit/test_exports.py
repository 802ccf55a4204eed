"""foundry/publishing/exports.py: which answers of an engine are PyTorch's, near ties, or refused."""

import math

import numpy as np
from absl.testing import parameterized

from foundry.common.errors import UserError
from foundry.publishing.exports import Answers, compare, within

LOG_PROBS = np.log(np.array([[0.5, 0.4, 0.1], [0.05, 0.05, 0.9]]))  # PyTorch prefers 0, then 2


class CompareTest(parameterized.TestCase):
    def compared(self, tokens: list[int], off: float = 0.0, tolerance: float = 0.15) -> dict:
        wanted = Answers([[0, 2]], [LOG_PROBS])
        return compare("engine", wanted, Answers([tokens], [LOG_PROBS + off]), tolerance)

    def test_equal_tokens(self):
        found = self.compared([0, 2], off=0.1)
        self.assertEqual((found["texts"], found["same_tokens"], found["near_ties"]), (1, 1, 0))
        self.assertAlmostEqual(found["largest_difference"], 0.1)

    def test_another_token_within_twice_the_tolerance_is_a_near_tie(self):
        self.assertEqual(self.compared([1, 2])["near_ties"], 1)  # log(0.5 / 0.4) = 0.22

    @parameterized.parameters(([2, 2], 1, "1.61"), ([0, 1], 2, "2.89"), ([0], 2, "inf"))
    def test_other_tokens_are_refused(self, tokens, place, gap):
        message = rf"engine: text 1 .* from token {place} on \(PyTorch prefers its own by {gap} nats\): not written"
        with self.assertRaisesRegex(UserError, message):
            self.compared(tokens)

    @parameterized.parameters(0.2, math.nan, math.inf)
    def test_a_difference_that_is_too_large_or_no_number_is_refused(self, off):
        with self.assertRaisesRegex(UserError, "engine: .*0.15 are allowed: not written"):
            within("engine", off, 0.15, "off")
        if not math.isnan(off):
            with self.assertRaisesRegex(UserError, "nats off PyTorch's, 0.15 are allowed"):
                self.compared([0, 2], off)
