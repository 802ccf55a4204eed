"""Tests of the relative position bias: what is added to the scores is laid out once for all layers.

Hermetic; about 20 s.
"""

from unittest import mock

import torch
from absl.testing import parameterized
from functorch.compile import make_boxed_func
from test_attention_t5 import batch, gradients, tiny
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition

import experiments.fused_attention.kernel_choice as kernels

FLOAT64 = torch.float64
ENCODER_INPUTS = ("input_ids", "attention_mask")


class OnceTest(parameterized.TestCase):
    @parameterized.parameters((False, 2), (True, 3))  # of the encoder, the decoder, and its cross-attention if masked
    def test_all_layers_share_what_is_added_to_the_scores(self, padded, expected):
        examples = batch(20, 9, padded=padded)
        examples.pop("decoder_attention_mask", None)
        model = tiny("t5_fused", num_layers=4, num_decoder_layers=4)
        gradients(model, model(**examples, use_cache=False).loss)  # the choice of the kernels makes some of its own
        made = mock.Mock(side_effect=kernels._added_scores)
        with mock.patch.object(kernels, "_added_scores", made):
            gradients(model, model(**examples, use_cache=False).loss)
        self.assertLen([c for c in made.call_args_list if c.args[2] is not None or c.args[3] is not None], expected)

    def test_another_step_makes_it_anew(self):
        model, losses = tiny("t5_fused"), []
        for _ in range(2):
            losses.append(model(**batch(12, 5, padded=True), use_cache=False).loss.item())
            with torch.no_grad():
                model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.add_(
                    torch.randn(32, 3, dtype=FLOAT64)
                )
        self.assertNotEqual(*losses)
        expected = tiny("eager")
        expected.load_state_dict(model.state_dict())
        loss = model(**batch(12, 5, padded=True), use_cache=False).loss.item()
        self.assertAlmostEqual(loss, expected(**batch(12, 5, padded=True), use_cache=False).loss.item(), delta=1e-10)

    def test_nothing_of_it_outlives_the_step(self):
        model = tiny("t5_fused")
        gradients(model, model(**batch(12, 5, padded=True), use_cache=False).loss)
        self.assertEmpty(kernels._known)

    def test_compiled_equal_layouts_are_made_once(self):
        """One cast to bfloat16 of the bias of a stack, whatever the number of layers."""
        counts = []
        for layers in (1, 2):
            torch._dynamo.reset()
            encoder, casts = tiny("t5_fused", num_layers=layers).float().encoder, []

            def count(graph, _, casts=casts):
                for node in graph.graph.nodes:
                    value = node.meta.get("val")
                    if "_to_copy" in str(node.target) and getattr(value, "shape", ()) == (1, 3, 16, 16):
                        casts.append(node)
                return make_boxed_func(graph.forward)

            backend = aot_autograd(
                fw_compiler=count,
                bw_compiler=nop,
                partition_fn=min_cut_rematerialization_partition,
            )
            compiled = torch.compile(encoder, fullgraph=True, backend=backend)
            inputs = {name: tensor for name, tensor in batch(16, 7, padded=False).items() if name in ENCODER_INPUTS}
            with torch.autocast("cpu", torch.bfloat16):
                compiled(**inputs).last_hidden_state.sum().backward()
            counts.append(len(casts))
        self.assertEqual(counts[0], counts[1])
        self.assertGreater(counts[0], 0)
