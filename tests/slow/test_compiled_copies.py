"""Tests of compiled code that reads the bfloat16 copies of joined weights. Hermetic; about 20 s."""

import torch
from absl.testing import absltest, parameterized
from helpers import needs_newer_transformers
from test_step import batch
from test_weight_copies import CHANGES, assert_equal, gradients, in_place, loss_of, model
from torch._dynamo.utils import counters


class CompiledTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        counters.clear()

    def test_no_change_is_missed_and_code_is_compiled_once(self):
        """The last change gives the model another layer, of which new code is made."""
        one = dict(num_layers=1, num_decoder_layers=1)
        made, plain = model(backend="eager", **one), model(copies=False, **one)
        loss_of(made)
        changes = [name for name in CHANGES if name not in ("loaded_as_new_tensors", "other_layers")]
        for change in (*changes, "other_layers"):
            self.assertEqual(counters["stats"]["unique_graphs"], 1, change)
            CHANGES[change](made)
            plain.load_state_dict(made.state_dict())
            self.assertEqual(loss_of(made).item(), loss_of(plain).item(), change)
        found = gradients(made)
        self.assertEmpty(counters["graph_break"])
        needs_newer_transformers("leaves the layout of sdpa's bias open, by which its gradient is summed")
        assert_equal(found, gradients(plain))

    def test_code_of_a_part_of_the_model_reads_weights_not_copies(self):
        """Nothing looks at the weights before it."""
        made, plain = model(num_layers=1), model(copies=False, num_layers=1)
        loss_of(made)
        for each in (made, plain):
            in_place(each)
        encoders = (torch.compile(made.encoder, backend="eager"), plain.encoder)
        with torch.autocast("cpu", torch.bfloat16):
            self.assertTrue(torch.equal(*(encoder(batch()["input_ids"])[0] for encoder in encoders)))


if __name__ == "__main__":
    absltest.main()
