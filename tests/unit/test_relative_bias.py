"""Tests of the relative position bias: its gradient by diagonals.

Hermetic; about 10 s.
"""

import torch
import torch.nn.functional as F
from absl.testing import parameterized
from test_host_waits import Calls
from transformers import T5Config, UMT5Config
from transformers.models.t5.modeling_t5 import T5Attention

from foundry.model_t5 import build_config, create_model
from foundry.modeling.layers import diagonal_sums, sum_bias_by_diagonals

FLOAT64 = torch.float64
SHAPES = dict(vocab_size=96, d_model=24, d_kv=8, d_ff=40, num_heads=3, num_layers=3, num_decoder_layers=2)


def tiny(implementation: str, config: type = T5Config, **changes):
    """A model with fixed random weights in float64; every bias and every weight matters."""
    torch.manual_seed(0)
    values = SHAPES | dict(feed_forward_proj="gated-gelu", dropout_rate=0.0, decoder_start_token_id=0) | changes
    model = create_model(config(**values), implementation).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


def batch(source: int, target: int, padded: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(source)
    result = dict(
        input_ids=torch.randint(2, 96, (3, source), generator=generator),
        labels=torch.randint(2, 96, (3, target), generator=generator),
    )
    if padded:
        result["attention_mask"] = (torch.arange(source) < torch.tensor([source, 3, source - 2])[:, None]).long()
        result["labels"][1, target // 2 :] = -100
        result["decoder_attention_mask"] = (
            torch.arange(target) < torch.tensor([target, target // 2, target])[:, None]
        ).long()
    return result


def gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def attention_modules(decoder: bool, dtype=FLOAT64) -> tuple[T5Attention, T5Attention]:
    """(transformers' own, ours) of the same weights."""
    config = build_config("tiny", 60, dict(num_heads=3, d_model=24, d_kv=8))
    config.is_decoder = decoder
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(T5Attention(config, has_relative_attention_bias=True, layer_idx=0).to(dtype))
    sum_bias_by_diagonals(modules[1])
    return modules


class GradientTest(parameterized.TestCase):
    @parameterized.product(decoder=(False, True), lengths=((1, 1), (1, 9), (7, 7), (40, 150), (200, 200), (9, 1)))
    def test_values_and_gradient_are_those_of_the_formula(self, decoder, lengths):
        plain, ours = attention_modules(decoder)
        grad = torch.randn(1, 3, *lengths, dtype=FLOAT64, generator=torch.Generator().manual_seed(1))
        results = []
        for module in (plain, ours):
            bias = module.compute_bias(*lengths)
            results.append((bias, *torch.autograd.grad(bias, module.relative_attention_bias.weight, grad)))
        self.assertTrue(torch.equal(results[0][0], results[1][0]))
        torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-12, atol=1e-12)
        self.assertTrue(results[1][0].is_contiguous())  # attention need not lay it out anew

    def test_a_step_of_generation(self):
        plain, ours = attention_modules(True)
        for past in (5, torch.tensor(5)):
            found, expected = (m.compute_bias(1, 9, past_seen_tokens=past) for m in (ours, plain))
            self.assertTrue(torch.equal(found, expected))

    def test_diagonal_sums(self):
        matrices = torch.arange(24.0).view(2, 3, 4)
        expected = [[torch.diagonal(m, offset).sum() for offset in range(-2, 4)] for m in matrices]
        self.assertEqual(diagonal_sums(matrices).tolist(), torch.tensor(expected).tolist())

    def test_nothing_is_scattered(self):
        """Scattered additions are atomic on a GPU: their order, and so the last bits, differ from run to run."""
        found = {}
        for name, module in zip(("plain", "ours"), attention_modules(False, torch.float32), strict=True):
            bias = module.compute_bias(64, 64)
            with Calls() as calls:
                bias.backward(torch.ones_like(bias))
            found[name] = {n for n in calls.counts if "embedding" in n or "index" in n or "scatter" in n}
        self.assertEqual(found["ours"], set())
        self.assertNotEqual(found["plain"], set())

    def test_other_shapes_are_looked_up_as_before(self):
        _, ours = attention_modules(False)
        buckets, table = torch.randint(0, 32, (2, 3, 4)), ours.relative_attention_bias
        self.assertTrue(torch.equal(table(buckets), F.embedding(buckets, table.weight)))

    @parameterized.parameters("eager", "sdpa")
    def test_whole_models(self, attention):
        examples, results = batch(33, 16, padded=True), []
        for change in (str, sum_bias_by_diagonals):  # `str` changes nothing
            for config in ({}, {"config": UMT5Config}):  # umT5's layers each have a table
                model = tiny(attention, vocab_size=96, **config)
                change(model)
                results.append(gradients(model, model(**examples, use_cache=False).loss))
        for ours, plain in zip(results[2:], results[:2], strict=True):
            self.assertEqual(ours.keys(), plain.keys())
            for name, gradient in plain.items():
                torch.testing.assert_close(ours[name], gradient, rtol=1e-10, atol=1e-11, msg=name)

    def test_it_compiles_into_one_graph(self):
        torch._dynamo.reset()
        examples = batch(14, 6, padded=False)
        plain, model = (tiny("sdpa", num_layers=2, num_decoder_layers=1) for _ in range(2))
        sum_bias_by_diagonals(model)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        found = gradients(model, compiled(**examples, use_cache=False).loss)
        for name, gradient in gradients(plain, plain(**examples, use_cache=False).loss).items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-11, msg=name)
