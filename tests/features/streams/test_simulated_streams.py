"""What a stream reads, simulated, and the least text that this needs."""

import tempfile
from pathlib import Path

import numpy as np
from absl.testing import parameterized
from benchmarks.stream import BATCH, CHARACTERS, WINDOW, simulated

from foundry.common.errors import UserError


class SimulatedStreamsTest(parameterized.TestCase):
    def simulated(self, ranks: int, steps: float) -> dict:
        """The result for text of about this number of steps of all ranks."""
        with tempfile.TemporaryDirectory() as folder:
            return simulated(Path(folder), ranks, 1, 2, steps * WINDOW * BATCH * ranks * CHARACTERS / 1e6)

    @parameterized.parameters((1, 0.5), (4, 1.5), (4, 2.5))
    def test_too_little_text_is_refused(self, ranks, steps):
        with self.assertRaisesRegex(UserError, rf"--megabytes .*: is text for [012] steps of {ranks} ranks. Give at"):
            self.simulated(ranks, steps)

    def test_little_text_is_measured(self):
        found = self.simulated(2, 4.5)
        self.assertTrue(np.isfinite([found["rows_read"], found["characters_tokenised"]]).all())
        self.assertEqual(found["ranks_that_read_each_row"], 1)
