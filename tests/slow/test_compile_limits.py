"""How many shapes and models --torch_compile takes. Hermetic; about 10 s."""

import torch
from absl.testing import parameterized
from test_step import batch, tiny

from foundry.modeling.loss import compute_loss_in_forward

SMALL = dict(num_layers=1, num_decoder_layers=1)


class ShapesTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        config = torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit)
        config.__enter__()
        self.addCleanup(config.__exit__, None, None, None)

    def test_more_models_in_a_process_than_one_may_have_shapes(self):
        """As the rungs of python -m benchmarks step, all of which are timed in turn."""
        torch._dynamo.config.recompile_limit = 1
        models = [tiny(**SMALL) for _ in range(2)]
        for model in models:
            compute_loss_in_forward(model, compile_options={"backend": "eager"})
        with torch.no_grad():
            for _ in range(2):
                self.assertLen({model(**batch()).loss.item() for model in models}, 1)
        self.assertEqual(torch._dynamo.config.recompile_limit, 1)

    def test_lengths_without_end_are_still_noticed(self):
        torch._dynamo.config.recompile_limit = 1
        model = tiny(**SMALL)
        compute_loss_in_forward(model, compile_options={"backend": "eager"})
        with torch.no_grad(), self.assertRaises(torch._dynamo.exc.FailOnRecompileLimitHit):
            for source in range(4, 8):
                model(**batch(source=source))
