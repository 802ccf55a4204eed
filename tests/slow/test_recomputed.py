"""foundry/modeling/recomputed.py: the values and gradients of the plain layers, in fewer bytes.

Functions are compared with finite differences in float64 and with torch's own operations; whole models of every T5
family with transformers' layers, for the same masks of dropout.
"""

import copy
import functools
import math
from unittest import mock

import torch
import zoo
from absl.testing import parameterized
from helpers import masked_by_bits
from torch.nn.functional import dropout, linear
from transformers import AutoConfig
from transformers.models.t5.modeling_t5 import T5LayerNorm, eager_attention_forward

from benchmarks.kept import kept_bytes
from features.lora.frozen import freeze
from features.lora.low_rank import add_low_rank
from foundry.model_t5 import create_model, set_attention, set_dropout
from foundry.modeling import recomputed
from foundry.modeling.layers import checkpoint_blocks_only, sum_bias_by_diagonals, use_bf16_residual
from foundry.modeling.loss import compute_loss_in_forward

T5_FAMILIES = tuple(name for name in zoo.FAMILIES if name not in zoo.GEMMA)
ONLY_EAGER = ("longt5_local", "longt5_tglobal")


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random float64 numbers that need a gradient."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def bits_of(*shape: int) -> torch.Tensor:
    torch.manual_seed(1)
    return recomputed.drawn_bits(shape, 0.3, torch.device("cpu"))


class FunctionsTest(parameterized.TestCase):
    @parameterized.parameters((1,), (8,), (3, 5, 7), (2, 4, 33, 9))
    def test_factors_are_those_of_torchs_dropout(self, *shape):
        bits = bits_of(*shape)
        self.assertEqual(bits.nbytes, -(-math.prod(shape) // 8))
        self.assertTrue(torch.equal(bits, bits_of(*shape)))  # of torch's generator
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            found = recomputed.dropped(torch.ones(shape, dtype=dtype), recomputed.kept_of(bits, shape), 0.3)
            (kept,) = dropout(torch.ones(64, dtype=dtype), 0.3).unique()[1:]
            self.assertTrue(torch.equal(found, torch.where(found > 0, kept, 0)))

    @parameterized.parameters(1e-4, 0.1, 0.3, 0.5, 0.999)
    def test_each_number_is_dropped_by_itself_at_the_rate(self, rate):
        """Within five standard deviations: how many are dropped, and how many together with the next ones."""
        count = 2**20
        bits = recomputed.drawn_bits((count,), rate, torch.device("cpu"))
        lost = recomputed.kept_of(bits, (count,)).eq(0).double()
        for apart, chance in ((0, rate), (1, rate**2), (2, rate**2), (3, rate**2), (4, rate**2), (8, rate**2)):
            share = (lost * lost.roll(apart)).mean().item()
            self.assertLess(abs(share - chance), 5 * math.sqrt(chance * (1 - chance) / count) + 2**-16)

    def test_norm(self):
        norm = T5LayerNorm(6).double()
        hidden, weight = numbers(2, 5, 6), numbers(6)
        found = recomputed._ScaledNorm.apply(hidden, weight, 1e-6)
        norm.weight.data = weight.detach()
        torch.testing.assert_close(found, norm(hidden), rtol=1e-6, atol=1e-6)  # transformers' variance is float32
        self.assertTrue(torch.autograd.gradcheck(recomputed._ScaledNorm.apply, (hidden, weight, 1e-6)))

    def test_product(self):
        hidden, weight = numbers(2, 5, 6), numbers(4, 6)

        def product(hidden, weight):
            return recomputed._Product.apply(hidden, recomputed.autocast_once(hidden), weight)

        torch.testing.assert_close(product(hidden, weight), linear(hidden, weight))
        self.assertTrue(torch.autograd.gradcheck(product, (hidden, weight)))
        self.assertTrue(torch.autograd.gradcheck(functools.partial(product, hidden.detach()), (weight,)))
        self.assertTrue(torch.autograd.gradcheck(lambda h: product(h, weight.detach()), (hidden,)))

    @parameterized.product(gated=(False, True), drops=(False, True), whole=(False, True))
    def test_feed_forward(self, gated, drops, whole):
        wide = [numbers(2, 3, 8, seed=seed) for seed in range(2 if gated else 1)]
        weight = numbers(5, 8) if whole else None
        bits = bits_of(2, 3, 8) if drops else None
        act = functools.partial(torch.nn.functional.gelu, approximate="tanh")

        def plain(weight, *wide):
            product = act(wide[0]) * wide[1] if gated else act(wide[0])
            if drops:
                product = recomputed.dropped(product, recomputed.kept_of(bits, product.shape), 0.3)
            return linear(product, weight) if whole else product

        def found(weight, *wide):
            return recomputed._ActedProduct.apply(act, 0.3, bits, weight, *wide)

        torch.testing.assert_close(found(weight, *wide), plain(weight, *wide))
        self.assertTrue(torch.autograd.gradcheck(found, (weight, *wide)))

    def test_dropout(self):
        hidden, bits = numbers(3, 7), bits_of(3, 7)
        self.assertTrue(torch.autograd.gradcheck(recomputed._Dropped.apply, (hidden, bits, 0.3)))

    @parameterized.product(
        block=(1, 4 * 4 * 6 * 2, 2**20),  # one head, two heads, all at once
        drops=(False, True),
        masked=(None, "keys", "all"),
        biased=(False, True),
        scaling=(1.0, 0.5),
    )
    def test_attention(self, block, drops, masked, biased, scaling):
        query, key, value = numbers(2, 3, 4, 5), numbers(2, 3, 6, 5), numbers(2, 3, 6, 5, seed=9)
        bias = numbers(1, 3, 4, 6) if biased else None
        mask = None
        if masked:
            mask = torch.zeros(2, 1, 4 if masked == "all" else 1, 6, dtype=torch.float64)
            mask[1, ..., 3:] = torch.finfo(torch.float32).min
        bits = bits_of(2, 3, 4, 6) if drops else None

        def found(query, key, value, bias):
            return recomputed._BlockedAttention.apply(query, key, value, bias, mask, bits, 0.3, scaling)

        def masked_dropout(weights, **_):
            return recomputed.dropped(weights, recomputed.kept_of(bits, weights.shape), 0.3) if drops else weights

        with mock.patch.dict(recomputed.BLOCK_BYTES, {"cpu": block}):
            output = found(query, key, value, bias)
            self.assertTrue(torch.autograd.gradcheck(found, (query, key, value, bias)))
        with mock.patch("torch.nn.functional.dropout", masked_dropout):
            module = torch.nn.Module()
            expected, _ = eager_attention_forward(module, query, key, value, mask, scaling, 0.3, bias)
        torch.testing.assert_close(output, expected)


def new_model(family: str, attention: str = "eager", rate: float = 0.0):
    torch.manual_seed(0)
    model = create_model(AutoConfig.for_model(**zoo.config_of(family, 96)), attention).train()
    set_dropout(model, rate)
    sum_bias_by_diagonals(model)
    compute_loss_in_forward(model)
    return model


def batch() -> dict[str, torch.Tensor]:
    """Padded sources and targets."""
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(3, 96, (3, length), generator=generator) for length in (24, 12))
    mask = torch.ones_like(ids)
    mask[1, 9:], labels[2, 5:] = 0, -100
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


def loss_of(model, bf16: bool = False) -> torch.Tensor:
    torch.manual_seed(7)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        return model(**batch())["loss"]


def learned(model, bf16: bool = False) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    """(loss, {parameter: gradient}, the next random number) of a step."""
    model.zero_grad()
    loss = loss_of(model, bf16)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients, torch.rand(1)


def worst_error(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest error of a gradient, relative to its norm; gradients near 0 are rounding alone, and left out."""
    largest = max(gradient.norm() for gradient in right.values())
    errors = [
        float((found[name] - gradient).norm() / gradient.norm())
        for name, gradient in right.items()
        if gradient.norm() > 1e-4 * largest
    ]
    return max(errors)


class ModelsTest(parameterized.TestCase):
    def setUp(self):
        self.enter_context(mock.patch("torch.nn.functional.dropout", masked_by_bits))

    def assert_same_step(self, plain, less, bf16=False, fewer=0.8, has_float32=True) -> None:
        """Loss, gradients and random numbers of both models are the same, and the second keeps fewer bytes.
        has_float32: whether the model can be trained without autocast."""
        kept, kept_of_less = (sum(kept_bytes(lambda m=m: loss_of(m, bf16), m.parameters())) for m in (plain, less))
        self.assertLess(kept_of_less, fewer * kept)
        (loss, expected, after), (found_loss, found, found_after) = learned(plain, bf16), learned(less, bf16)
        self.assertAlmostEqual(found_loss, loss, delta=2e-3 * loss if bf16 else 1e-6 * loss)
        self.assertEqual(found_after, after)
        self.assertEqual(found.keys(), expected.keys())
        if not has_float32:
            self.assertLess(worst_error(found, expected), 0.1)
        elif bf16:  # both are off from float32; ours by no more than autocast's rounding explains
            _, right, _ = learned(plain)
            self.assertLess(worst_error(found, right), 1.25 * worst_error(expected, right))
        else:
            self.assertLess(worst_error(found, expected), 5e-6)

    @parameterized.product(family=T5_FAMILIES, attention=("eager", "sdpa"), rate=(0.0, 0.2), bf16=(False, True))
    def test_a_step_of_every_family(self, family, attention, rate, bf16):
        if family in ONLY_EAGER and attention != "eager":
            self.skipTest("LongT5 has one attention")
        plain = new_model(family, "eager" if rate else attention, rate)  # sdpa draws masks within torch
        less = new_model(family, attention, rate)
        recomputed.recompute_cheap(less)
        recomputed.recompute_cheap(less)  # a second call changes nothing
        self.assertEqual([type(m).__name__ for m in less.modules()], [type(m).__name__ for m in plain.modules()])
        self.assert_same_step(plain, less, bf16, fewer=0.95)

    @parameterized.product(rate=(0.0, 0.2), bf16=(False, True), reentrant=(False, True))
    def test_checkpointing(self, rate, bf16, reentrant):
        models = [new_model("t5_v1_1", rate=rate) for _ in "ab"]
        for model in models:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            checkpoint_blocks_only(model, reentrant)
        recomputed.recompute_cheap(models[1])
        self.assert_same_step(*models, bf16=bf16, fewer=1.01)

    @parameterized.parameters("float32", "bfloat16", "int8")
    def test_lora(self, weight_format):
        """Frozen weights beside LoRA's matrices; those of fewer bytes."""
        models = [new_model("flan_t5", rate=0.2) for _ in "ab"]
        for model in models:
            torch.manual_seed(1)
            add_low_rank(model, 4, "google/flan-t5-small")
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.1)
            if weight_format != "float32":
                freeze(model, weight_format)
        recomputed.recompute_cheap(models[1])
        self.assert_same_step(*models, bf16=True, fewer=0.85, has_float32=weight_format == "float32")

    def test_bf16_residual(self):
        models = [new_model("t5_v1_1", rate=0.1) for _ in "ab"]
        for model in models:
            use_bf16_residual(model)
        recomputed.recompute_cheap(models[1])
        self.assert_same_step(*models, bf16=True)

    def test_frozen_weights(self):
        models = [new_model("t5_v1_1", rate=0.1) for _ in "ab"]
        for model in models:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("encoder" not in name and "relative" not in name and "shared" not in name)
        recomputed.recompute_cheap(models[1])
        self.assert_same_step(*models, bf16=True)

    def test_without_a_gradient_it_is_transformers(self):
        """Evaluation and answers; and whatever attention the model is given later."""
        plain, less = new_model("t5_v1_1").eval(), new_model("t5_v1_1").eval()
        recomputed.recompute_cheap(less)
        for attention in ("eager", "sdpa"):
            set_attention(plain, attention)
            set_attention(less, attention)
            with torch.no_grad():
                inputs = {name: batch()[name] for name in ("input_ids", "attention_mask")}
                self.assertTrue(torch.equal(loss_of(plain), loss_of(less)))
                self.assertTrue(torch.equal(plain.generate(**inputs), less.generate(**inputs)))
        copied = copy.deepcopy(less)  # as a moving average or a teacher is made
        self.assertEqual(learned(copied)[0], learned(less)[0])

    def test_compiled_it_steps_aside(self):
        model = new_model("t5_v1_1", rate=0.0)
        expected = learned(model)
        compiled = new_model("t5_v1_1", rate=0.0)
        recomputed.recompute_cheap(compiled)
        compute_loss_in_forward(compiled, compile_options=dict(backend="aot_eager"))
        loss, gradients, _ = learned(compiled)
        self.assertAlmostEqual(loss, expected[0], places=5)
        for name, gradient in expected[1].items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)
