"""attention.py and its kernels: parity with eager, whole models, compilation, masks, equal bits.

Hermetic and on the CPU, in float64 where figures are compared; what needs a GPU skips itself by name. The kernel in
Triton has tests of its own, test_triton_kernel.py beside it.
"""

import contextlib
import io
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import torch
from absl.testing import absltest, parameterized
from transformers import MT5Config, T5Config, UMT5Config

import experiments.fused_attention.attention
import experiments.fused_attention.kernel_choice
from data_collator_t5 import shift_right
from experiments.fused_attention import bias_gradient, library
from experiments.fused_attention.kernel_choice import attention, use_attention_kernel
from foundry.model_t5 import build_config, create_model, load_model
from foundry.modeling.attentions import attention_names

ROOT = Path(__file__).resolve().parents[3]
SHAPES = dict(vocab_size=96, d_model=24, d_kv=8, d_ff=40, num_heads=3, num_layers=3, num_decoder_layers=2)
FLOAT64 = dict(dtype=torch.float64)


def documents(*lengths: list[int]) -> torch.Tensor:
    """Rows of document numbers, [B, length]: documents([2, 1], [3]) -> [[0, 0, 1], [0, 0, 0]]."""
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])


def masks(kind: str, batch: int, queries: int, keys: int) -> torch.Tensor | None:
    """A mask of this kind: none, padding [B, 1, 1, K], documents [B, 1, Q, K] or the same as additive floats."""
    if kind == "none":
        return None
    if kind == "padding":
        lengths = torch.tensor([keys, max(1, keys // 2), max(1, keys - 3)])[:batch]
        return (torch.arange(keys) < lengths[:, None])[:, None, None]
    cuts = torch.arange(1, batch + 1)[:, None]  # row b: documents of (length / (b + 1)) tokens
    of_query = torch.arange(queries) * cuts // queries
    of_key = torch.arange(keys) * cuts // keys
    allowed = (of_query[:, :, None] == of_key[:, None, :])[:, None]
    if kind == "documents":
        return allowed
    return torch.zeros(allowed.shape, **FLOAT64).masked_fill(~allowed, torch.finfo(torch.float64).min)


def eager(q, k, v, bias, mask, causal, scale):
    """The definition, as transformers' eager attention computes it."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    lowest = torch.finfo(scores.dtype).min
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(), lowest)
    if mask is not None:
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def inputs(queries: int, keys: int, batch: int = 3, heads: int = 2, width: int = 8, seed: int = 0, **options):
    """(q, k, v, bias) that require a gradient, and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, n, heads, width) for n in (queries, keys, keys)] + [(1, heads, queries, keys)]
    tensors = [torch.randn(shape, generator=generator, **FLOAT64).to(**options).requires_grad_() for shape in shapes]
    return tensors, torch.randn(batch, queries, heads, width, generator=generator, **FLOAT64).to(**options)


class OperatorTest(parameterized.TestCase):
    @parameterized.product(
        kernel=("flash_cpu", "torch"),
        shape=((1, 1), (5, 5), (7, 12), (33, 33), (64, 64), (70, 3)),
        kind=("none", "padding", "documents", "additive"),
    )
    def test_equals_eager_in_float64(self, kernel, shape, kind):
        causal = shape[0] == shape[1] and kind != "padding"
        tensors, grad = inputs(*shape)
        mask = masks(kind, 3, *shape)
        with use_attention_kernel(kernel), mock.patch.object(bias_gradient, "_CHUNK", 2 * 64 * 64):
            found, lse = attention(*tensors, mask, causal, 0.7)
            gradients = torch.autograd.grad(found, tensors, grad)
        expected = eager(*tensors, mask, causal, 0.7)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        self.assertEqual(lse.shape, (3, 2, shape[0]))
        for ours, theirs in zip(gradients, torch.autograd.grad(expected, tensors, grad), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)

    def test_gradcheck(self):
        tensors, _ = inputs(4, 5, batch=2, width=3)
        mask = masks("padding", 2, 4, 5)
        self.assertTrue(torch.autograd.gradcheck(lambda *t: attention(*t, mask, False, 1.0)[0], tensors))

    def test_without_a_bias(self):
        (q, k, v, _), grad = inputs(6, 9)
        mask = masks("padding", 3, 6, 9)
        found = torch.autograd.grad(attention(q, k, v, None, mask, False, 1.0)[0], (q, k, v), grad)
        expected = torch.autograd.grad(eager(q, k, v, None, mask, False, 1.0), (q, k, v), grad)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)

    def test_a_row_that_may_see_nothing_is_finite_and_gives_the_bias_nothing(self):
        tensors, grad = inputs(6, 6)
        mask = masks("documents", 3, 6, 6).clone()
        mask[1, :, 2] = False
        grad[1, 2] = 0.0  # as in training: a padded position has no loss
        out, lse = attention(*tensors, mask, False, 1.0)
        expected = eager(*tensors, mask, False, 1.0)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        self.assertTrue(torch.isfinite(lse).all())
        gradients = torch.autograd.grad(out, tensors, grad)
        for ours, theirs in zip(gradients, torch.autograd.grad(expected, tensors, grad), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)

    def test_the_operator_keeps_torchs_rules(self):
        tensors, _ = inputs(5, 7)
        for bias, mask in ((tensors[3], masks("padding", 3, 5, 7)), (None, None)):
            checks = torch.library.opcheck(attention, (*tensors[:3], bias, mask, False, 1.0))
            self.assertEqual(set(checks.values()), {"SUCCESS"})

    def test_two_runs_give_the_same_bits(self):
        def run():
            tensors, grad = inputs(40, 40, dtype=torch.float32)
            return torch.autograd.grad(attention(*tensors, None, True, 1.0)[0], tensors, grad)

        for first, second in zip(run(), run(), strict=True):
            self.assertTrue(torch.equal(first, second))

    def test_scores_of_the_whole_batch_are_never_held(self):
        (q, k, v, bias), grad = inputs(64, 64, batch=16, dtype=torch.float32)
        whole = 16 * 2 * 64 * 64 * 4

        class Largest(torch.utils._python_dispatch.TorchDispatchMode):
            size = 0

            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                result = function(*args, **(kwargs or {}))
                for tensor in torch.utils._pytree.tree_leaves(result):
                    if isinstance(tensor, torch.Tensor):
                        Largest.size = max(Largest.size, tensor.untyped_storage().nbytes())
                return result

        out, lse = attention(q, k, v, bias, None, False, 1.0)
        with Largest(), mock.patch.object(bias_gradient, "_CHUNK", 4 * 2 * 64 * 64):
            bias_gradient.bias_gradient_torch(grad, bias_gradient.Inputs(q, k, v, bias), out, lse)
        self.assertLess(Largest.size, whole)
        self.assertGreaterEqual(Largest.size, whole // 4)  # the measurement measures

    def test_below_autocast_sums_stay_in_float32(self):
        tensors, grad = inputs(48, 48, dtype=torch.bfloat16)
        plain = torch.autograd.grad(attention(*tensors, None, False, 1.0)[0], tensors, grad)
        with torch.autocast("cpu", dtype=torch.bfloat16), use_attention_kernel("torch"):
            out = attention(*tensors, None, False, 1.0)[0]
            below = torch.autograd.grad(out, tensors, grad)
        wide = [t.detach().double().requires_grad_() for t in tensors]
        exact = torch.autograd.grad(eager(*wide, None, False, 1.0), wide, grad.double())
        for first, second, truth in zip(plain, below, exact, strict=True):
            for ours in (first, second):
                self.assertLess((ours - truth).abs().max() / truth.abs().max(), 0.02)


class ChoiceTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        experiments.fused_attention.kernel_choice._choice.cache_clear()
        experiments.fused_attention.kernel_choice._say_once.cache_clear()
        self.addCleanup(experiments.fused_attention.kernel_choice._choice.cache_clear)

    def run_once(self) -> str:
        """What attention prints on one small problem."""
        tensors, grad = inputs(6, 6)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            torch.autograd.grad(attention(*tensors, None, False, 1.0)[0], tensors, grad)
        return printed.getvalue()

    def test_says_once_what_it_took(self):
        self.assertRegex(self.run_once(), "attention: flash_cpu on cpu float64, .*; gradient of the bias by torch\n")
        self.assertEqual(self.run_once(), "")

    @parameterized.named_parameters(
        ("not_a_number", lambda x: x * float("nan")), ("off", lambda x: x * 1.01), ("none", None)
    )
    def test_a_kernel_with_a_wrong_dq_is_passed_over(self, spoil):
        def backward(*args):
            if spoil is None:
                raise RuntimeError("no engine found\nmore")
            dq, dk, dv = library.KERNELS["torch"].backward(*args)
            return spoil(dq), dk, dv

        broken = library.KERNELS["flash_cpu"]._replace(backward=backward)
        with mock.patch.dict(library.KERNELS, flash_cpu=broken):
            said = self.run_once()
            self.assertRegex(said, "attention: torch on cpu .*passed over: flash_cpu: it")
            self.assertIn("no engine found)" if spoil is None else "its dq at 6 x 6 is off by", said)
            refusal = self.assertRaisesRegex(RuntimeError, "attention kernel flash_cpu cannot serve 6 x 6")
            with refusal, use_attention_kernel("flash_cpu"):
                self.run_once()

    def test_forcing(self):
        self.assertEqual(list(library.KERNELS), ["cudnn", "efficient", "flash_cpu", "torch"])
        with use_attention_kernel("torch"):
            self.assertIn("attention: torch on", self.run_once())
        with self.assertRaisesRegex(RuntimeError, "cudnn cannot serve .*needs a GPU"), use_attention_kernel("cudnn"):
            self.run_once()
        with self.assertRaisesRegex(ValueError, "'flash': must be one of cudnn, efficient"):
            use_attention_kernel("flash").__enter__()
        self.assertIn("flash_cpu", self.run_once())

    @parameterized.parameters((64, 64), (192, 128), (128, 704))
    def test_cudnn_is_not_trusted_where_it_gives_nan(self, queries, keys):
        q, k = (mock.Mock(is_cuda=True, shape=(2, n, 2, 64)) for n in (queries, keys))
        self.assertIn("n % 128 == 64", library.KERNELS["cudnn"].refuses(bias_gradient.Inputs(q, k, k)))

    def test_cudnn_is_not_deterministic(self):
        q = mock.Mock(is_cuda=True, shape=(2, 128, 2, 64))
        torch.use_deterministic_algorithms(True)
        self.addCleanup(torch.use_deterministic_algorithms, False)
        self.assertIn("not deterministic", library.KERNELS["cudnn"].refuses(bias_gradient.Inputs(q, q, q)))


def tiny(implementation: str, config: type = T5Config, **changes):
    """A model with fixed random weights in float64; every bias and every weight matters."""
    torch.manual_seed(0)
    values = SHAPES | dict(feed_forward_proj="gated-gelu", dropout_rate=0.0, decoder_start_token_id=0) | changes
    model = create_model(config(**values), implementation).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


def gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


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


def packed_loss(model) -> torch.Tensor:
    """A loss over rows of several documents, kept apart by 4-D masks in encoder, decoder and between them."""
    source, target = documents([5, 9, 3], [17]), documents([4, 2, 2], [8])
    examples = batch(17, 8, padded=False)
    ids, labels = examples["input_ids"][:2], examples["labels"][:2]
    inside = (source[:, :, None] == source[:, None, :])[:, None]
    across = (target[:, :, None] == source[:, None, :])[:, None]
    before = (target[:, :, None] == target[:, None, :])[:, None] & torch.ones(8, 8, dtype=torch.bool).tril()
    if model.config._attn_implementation == "eager":  # which adds its masks
        inside, across, before = (
            torch.zeros(m.shape, **FLOAT64).masked_fill(~m, torch.finfo(torch.float64).min)
            for m in (inside, across, before)
        )
    encoded = model.encoder(input_ids=ids, attention_mask=inside)
    decoder_ids = shift_right(labels, 0, 0)
    return model(
        encoder_outputs=encoded,
        attention_mask=across,
        decoder_attention_mask=before,
        decoder_input_ids=decoder_ids,
        labels=labels,
        use_cache=False,
    ).loss


class ModelTest(parameterized.TestCase):
    def assert_same(self, found, expected):
        self.assertEqual(found.keys(), expected.keys())
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")

    @parameterized.product(lengths=((12, 5), (33, 16), (64, 19)), padded=(False, True))
    def test_loss_and_all_gradients_equal_eagers(self, lengths, padded):
        examples = batch(*lengths, padded)
        results = []
        for implementation in ("eager", "t5_fused"):
            model = tiny(implementation)
            loss = model(**examples, use_cache=False).loss
            results.append((loss.item(), gradients(model, loss)))
        self.assertAlmostEqual(results[0][0], results[1][0], delta=1e-12)
        self.assert_same(results[1][1], results[0][1])
        bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        self.assertGreater(results[1][1][bias].abs().max(), 1e-6)  # and the comparison compares something

    def test_documents_packed_with_4d_masks(self):
        results = []
        for implementation in ("eager", "t5_fused"):
            model = tiny(implementation)
            loss = packed_loss(model)
            results.append((loss.item(), gradients(model, loss)))
        self.assertAlmostEqual(results[0][0], results[1][0], delta=1e-12)
        self.assert_same(results[1][1], results[0][1])

    @parameterized.named_parameters(("mt5", MT5Config), ("umt5", UMT5Config))
    def test_the_rest_of_the_family(self, config):
        examples = batch(12, 5, padded=True)
        results = []
        for implementation in ("eager", "sdpa", "t5_fused"):
            model = tiny(implementation, config, vocab_size=96)
            loss = model(**examples, use_cache=False).loss
            results.append((loss.item(), gradients(model, loss)))
        for loss, found in results[1:]:
            self.assertAlmostEqual(loss, results[0][0], delta=1e-12)
            self.assert_same(found, results[0][1])

    @parameterized.parameters(True, False)
    def test_gradient_checkpointing(self, use_reentrant):
        examples = batch(14, 6, padded=True)
        plain, saving = tiny("t5_fused"), tiny("t5_fused")
        saving.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        self.assert_same(
            gradients(saving, saving(**examples, use_cache=False).loss),
            gradients(plain, plain(**examples, use_cache=False).loss),
        )

    def test_compiles_into_one_graph(self):
        torch._dynamo.reset()
        examples = batch(14, 6, padded=True)
        plain, model = (tiny("t5_fused", num_layers=2, num_decoder_layers=1) for _ in range(2))
        graphs = []

        def backend(graph, example_inputs):
            graphs.append(graph)
            return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

        compiled = torch.compile(model, fullgraph=True, backend=backend)
        for _ in range(2):
            found = gradients(model, compiled(**examples, use_cache=False).loss)
        self.assertLen(graphs, 1)
        self.assert_same(found, gradients(plain, plain(**examples, use_cache=False).loss))

    def test_dropout_goes_to_sdpa_and_says_so_once(self):
        experiments.fused_attention.attention._handed_over.clear()
        examples = batch(9, 4, padded=False)
        results = []
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for implementation in ("sdpa", "t5_fused"):
                model = tiny(implementation, dropout_rate=0.1, num_layers=1, num_decoder_layers=1)
                torch.manual_seed(5)
                results.append(model(**examples, use_cache=False).loss.item())
            torch._dynamo.reset()
            experiments.fused_attention.attention._handed_over.clear()
            torch.compile(model, fullgraph=True, backend="eager")(**examples, use_cache=False)
        self.assertEqual(results[0], results[1])
        self.assertEqual(printed.getvalue().count("t5_fused does not support dropout of attention weights"), 2)

    @parameterized.parameters(1, 3)
    def test_generates_the_same_tokens(self, beams):
        examples = {k: v for k, v in batch(13, 4, padded=True).items() if k in ("input_ids", "attention_mask")}
        found = []
        for implementation in ("eager", "t5_fused"):
            model = tiny(implementation).eval()
            found.append(model.generate(**examples, num_beams=beams, do_sample=False, max_new_tokens=12, min_length=8))
        self.assertTrue(torch.equal(*found))
        self.assertGreater(len(found[0].unique()), 3)

    def test_loads_and_keeps_the_checkpoint(self):
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        model = create_model(build_config("tiny", 90, SHAPES), "t5_fused").eval()
        model.save_pretrained(folder)
        self.assertNotIn("t5_fused", (Path(folder) / "config.json").read_text())
        ids = torch.arange(2, 12)[None]
        with torch.no_grad():
            expected = model(input_ids=ids, decoder_input_ids=ids).logits
            for name in attention_names():
                again = load_model(folder, name).eval()
                self.assertEqual(again.config._attn_implementation, name)
                torch.testing.assert_close(again(input_ids=ids, decoder_input_ids=ids).logits, expected)


@absltest.skipUnless(torch.cuda.is_available(), "no GPU")
class GPUTest(absltest.TestCase):
    def test_every_kernel_against_float64_in_bfloat16_and_float32(self):
        """check_attention.py in this process: its table is printed, its verdict asserted."""
        from experiments.fused_attention import check_attention

        self.assertEqual(check_attention.main([]), 0)
