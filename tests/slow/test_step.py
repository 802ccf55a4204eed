"""Tests of the training step: each of its options alone gives the loss and gradients of transformers' plain model.

Hermetic; models of a few thousand weights in float64 on the CPU, and fake tensors for the real shape.
"""

import contextlib
import copy
import functools
import io
import math
import os
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from absl.testing import absltest, parameterized
from filelock import FileLock
from safetensors.torch import load_file
from test_trainer_t5 import arguments, curve, make_trainer
from torch._dynamo.utils import counters
from torch._inductor.codecache import get_lock_dir
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers.activations import NewGELUActivation

from constants import IGNORE_INDEX
from data_collator_t5 import shift_right
from foundry.arguments.training import check_training
from foundry.model_t5 import build_config, create_model, flops_per_sequence, load_model
from foundry.modeling.layers import checkpoint_blocks_only, use_bf16_residual
from foundry.modeling.loss import chunked_loss_sums, compute_loss_in_forward, discard_damaged_kernels, loss_sum

SHAPE = dict(d_model=16, d_kv=4, d_ff=24, num_heads=3, num_layers=2, num_decoder_layers=2, dropout_rate=0.0)
VOCABULARY = 64
OPTIONS = dict(residual=use_bf16_residual)
EXACT = dict(rtol=1e-10, atol=1e-12)  # float64, another order of summation


def tiny(dtype=torch.float64, attention: str | None = None, **overrides):
    torch.manual_seed(0)
    return create_model(build_config("tiny", VOCABULARY, SHAPE | overrides), attention).to(dtype).train()


def batch(rows: int = 3, source: int = 12, target: int = 7) -> dict[str, torch.Tensor]:
    """Padded sources and targets, among them a source that is mostly padding."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(2, VOCABULARY, (rows, source), generator=generator)
    labels = torch.randint(2, VOCABULARY, (rows, target), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 3:], labels[-1, 4:] = 0, IGNORE_INDEX
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


def plain_loss_and_gradients(model, inputs: dict, divisor: float, label_smoothing=0.0, z_loss=0.0):
    """As transformers' own forward pass and torch's cross-entropy have them, with the z-loss written out."""
    labels = inputs["labels"]
    sources = {name: tensor for name, tensor in inputs.items() if name != "labels"}
    logits = model(**sources, decoder_input_ids=shift_right(labels, 0, 0)).logits.flatten(0, 1)
    options = dict(ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=label_smoothing)
    loss = F.cross_entropy(logits, labels.flatten(), **options)
    log_z = logits.exp().sum(-1).log()[labels.flatten() != IGNORE_INDEX]
    loss = (loss + z_loss * (log_z**2).sum()) / divisor
    return loss, gradients(model, loss)


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


class ParityTest(parameterized.TestCase):
    def assert_same(self, found: dict, expected: dict, **tolerance):
        self.assertEqual(found.keys(), expected.keys())
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], **(tolerance or EXACT), msg=name)

    @parameterized.named_parameters(
        ("loss_in_forward", ()),
        ("chunked", (), 5),
        ("chunk_of_one", (), 1),
        ("chunk_larger_than_the_batch", (), 1000),
        ("all", ("residual",), 4),
    )
    def test_loss_and_gradients_are_the_plain_models(self, options, chunk=0):
        for attention in ("eager", "sdpa"):
            for settings in (dict(), dict(label_smoothing=0.1, z_loss=1e-2)):
                inputs, model = batch(), tiny(attention=attention)
                expected_loss, expected = plain_loss_and_gradients(model, inputs, 40.0, **settings)
                for name in options:
                    OPTIONS[name](model)
                compute_loss_in_forward(model, chunk=chunk, **settings)
                loss = model(**inputs, num_items_in_batch=torch.tensor(40)).loss
                torch.testing.assert_close(loss, expected_loss, **EXACT)
                self.assert_same(gradients(model, loss), expected)

    @parameterized.parameters(False, True)
    def test_the_activation_is_transformers_own(self, compiled):
        """Outputs and gradients of T5's formula; the models of create_model have no other. compiled: as when a step is
        compiled for a CPU."""
        states = torch.linspace(-6, 6, 1001, dtype=torch.float64, requires_grad=True)
        model = tiny()
        (act,) = {type(block.layer[-1].DenseReluDense.act) for block in (*model.encoder.block, *model.decoder.block)}
        self.assertNotEqual(act, NewGELUActivation)
        results = []
        for each in (act(), NewGELUActivation()):
            with mock.patch.object(torch.compiler, "is_compiling", lambda: compiled):
                result = each(states)
            results.append((result, *torch.autograd.grad(result.square().sum(), states)))
        torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)

    @parameterized.parameters((True, "relu"), (False, "relu"), (True, "gated-gelu"))
    def test_other_members_of_the_family(self, tie, act):
        """T5 v1.0: head tied to the embedding, outputs scaled, feed-forward without a gate."""
        config = build_config("tiny", VOCABULARY, SHAPE | dict(feed_forward_proj=act, scale_decoder_outputs=tie))
        torch.manual_seed(0)
        model, inputs = create_model(config).double().train(), batch()
        self.assertEqual(model.lm_head.weight is model.shared.weight, tie)
        expected_loss, expected = plain_loss_and_gradients(model, inputs, 40.0)
        for option in OPTIONS.values():
            option(model)
        compute_loss_in_forward(model, chunk=5)
        loss = model(**inputs, num_items_in_batch=40).loss
        torch.testing.assert_close(loss, expected_loss, **EXACT)
        self.assert_same(gradients(model, loss), expected)

    @parameterized.parameters(False, True)
    def test_gradient_checkpointing(self, fused):
        inputs, model = batch(), tiny()
        expected_loss, expected = plain_loss_and_gradients(model, inputs, 40.0)
        compute_loss_in_forward(model)
        for option in OPTIONS.values() if fused else ():
            option(model)
        calls = []
        model.encoder.block[0].layer[-1].register_forward_pre_hook(lambda *_: calls.append(1))
        model.gradient_checkpointing_enable()
        checkpoint_blocks_only(model)
        loss = model(**inputs, num_items_in_batch=40).loss
        torch.testing.assert_close(loss, expected_loss, **EXACT)
        self.assert_same(gradients(model, loss), expected)
        self.assertLen(calls, 2)  # it was computed again

    def test_without_z_loss_it_is_todays_loss_bit_for_bit(self):
        generator = torch.Generator().manual_seed(0)
        logits = (torch.randn(3, 7, 50, generator=generator) * 5).requires_grad_()
        labels = torch.randint(0, 50, (3, 7), generator=generator)
        labels[1, 3:] = IGNORE_INDEX
        for dtype in (torch.float32, torch.bfloat16):
            total = loss_sum(logits.to(dtype), labels)
            expected = F.cross_entropy(logits.to(dtype).float().flatten(0, 1), labels.flatten(), reduction="sum")
            self.assertTrue(torch.equal(total, expected))
            found, wanted = (torch.autograd.grad(each, logits)[0] for each in (total, expected))
            self.assertTrue(torch.equal(found, wanted))

    def test_z_loss_is_the_formula(self):
        logits = torch.tensor([[[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [9.0, 9.0, 9.0]]])
        labels = torch.tensor([[2, 0, IGNORE_INDEX]])
        z = loss_sum(logits, labels, z_loss=0.5) - loss_sum(logits, labels)
        e = math.e
        torch.testing.assert_close(
            z.item(), 0.5 * (math.log(e + e**2 + e**3) ** 2 + math.log(3) ** 2), rtol=1e-6, atol=0
        )

    @parameterized.parameters(
        (0.0, 0.01, 7.7211428, [0.036440, 0.454898, 0.557551, 0.055647, -0.996237]),
        (0.1, 0.0, 6.0226884, [0.007879, 0.385448, 0.478069, 0.025209, -0.896605]),
    )
    def test_loss_and_gradient_are_t5xs(self, smoothing, z_loss, expected, expected_gradient):
        """Expected: compute_weighted_cross_entropy of t5x/losses.py, which smooths over the other tokens alone and
        subtracts the entropy of the smoothed labels."""
        logits = (3 * torch.arange(15.0).sin() + 2).view(1, 3, 5).requires_grad_()
        labels = torch.tensor([[4, 2, IGNORE_INDEX]])
        entropy = -(1 - smoothing) * math.log(1 - smoothing)
        entropy -= smoothing * math.log(smoothing / 4) if smoothing else 0
        whole = loss_sum(logits, labels, smoothing * 5 / 4, z_loss)
        chunked, _ = chunked_loss_sums(logits, torch.eye(5), labels, smoothing * 5 / 4, z_loss, chunk=2)
        for total in (whole, chunked):
            self.assertAlmostEqual(total.item() - 2 * entropy, expected, places=5)
            (gradient,) = torch.autograd.grad(total, logits)
            torch.testing.assert_close(gradient[0, 0], torch.tensor(expected_gradient), rtol=0, atol=2e-6)
            self.assertFalse(gradient[0, 2].any())

    @parameterized.parameters(1, 2, 3, 21, 64)
    def test_chunked_loss_under_autocast_is_close(self, chunk):
        """bfloat16 products, whatever the chunk; the weight's gradient is summed in float32."""
        generator = torch.Generator().manual_seed(0)
        hidden, weight = torch.randn(3, 7, 16, generator=generator), torch.randn(50, 16, generator=generator)
        labels = torch.randint(0, 50, (3, 7), generator=generator)
        found = [t.clone().requires_grad_() for t in (hidden, weight)]
        wanted = [t.clone().requires_grad_() for t in (hidden, weight)]
        with torch.autocast("cpu", torch.bfloat16):
            total, _ = chunked_loss_sums(*found, labels, chunk=chunk)
            expected = loss_sum(F.linear(*wanted), labels)
        self.assertEqual(total.dtype, torch.float32)
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-3)
        for a, b in zip(torch.autograd.grad(total, found), torch.autograd.grad(expected, wanted), strict=True):
            self.assertEqual(a.dtype, torch.float32)
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)

    @parameterized.parameters((True, False), (False, True))
    def test_chunked_loss_makes_no_gradient_of_what_is_frozen(self, hidden_learns, weight_learns):
        """The vocabulary is the largest size of all: no tensor [V, D] exists beside the frozen head."""
        hidden = torch.randn(6, 4, requires_grad=hidden_learns)
        weight = torch.randn(5000, 4, requires_grad=weight_learns)
        labels, made = torch.arange(6), []

        class Made(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # noqa: ARG002
                outputs = function(*args, **(kwargs or {}))
                made.extend(t.shape for t in tree_leaves(outputs) if isinstance(t, torch.Tensor))
                return outputs

        with Made():
            total, _ = chunked_loss_sums(hidden, weight, labels, chunk=4)
            total.backward()
        self.assertEqual((5000, 4) in made, weight_learns)
        learning = hidden if hidden_learns else weight
        (expected,) = torch.autograd.grad(loss_sum(F.linear(hidden, weight), labels), learning)
        torch.testing.assert_close(learning.grad, expected)

    def test_after_an_error_in_the_forward_pass_logits_are_logits(self):
        model, inputs = tiny(), batch()
        sources = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        expected = model(**sources, decoder_input_ids=inputs["input_ids"]).logits
        compute_loss_in_forward(model, chunk=4)
        with mock.patch.object(model.decoder, "forward", side_effect=torch.OutOfMemoryError("out of memory")):
            self.assertRaises(torch.OutOfMemoryError, model, **inputs)
        self.assertTrue(torch.equal(model(**sources, decoder_input_ids=inputs["input_ids"]).logits, expected))

    def test_bf16_residual_stream(self):
        """Activations between layers are bfloat16 under autocast, and loss and gradients those of float32 within it."""
        inputs, model = batch(), tiny(torch.float32)
        expected_loss, expected = plain_loss_and_gradients(model, inputs, 40.0)
        compute_loss_in_forward(model)
        types = []
        model.decoder.block[1].register_forward_pre_hook(lambda _, args: types.append(args[0].dtype))
        with torch.autocast("cpu", torch.bfloat16):
            model(**inputs)
            use_bf16_residual(model)
            loss = model(**inputs, num_items_in_batch=40).loss
        model(**inputs)
        self.assertEqual(types, [torch.float32, torch.bfloat16, torch.float32])
        torch.testing.assert_close(loss, expected_loss, rtol=1e-2, atol=1e-2)
        for name, gradient in gradients(model, loss).items():
            error = (gradient - expected[name]).norm() / expected[name].norm()
            self.assertLess(error, 0.1, name)


class NamesTest(parameterized.TestCase):
    """What others see of a model is what it was."""

    def options(self, model):
        for option in OPTIONS.values():
            option(model)
        compute_loss_in_forward(model, chunk=4)
        return model

    def test_checkpoints_have_the_same_names_tensors_and_architecture(self):
        with tempfile.TemporaryDirectory() as folder:
            plain, changed = tiny(torch.float32), self.options(tiny(torch.float32))
            plain.save_pretrained(Path(folder) / "plain")
            changed.save_pretrained(Path(folder) / "changed")
            self.assertEqual(
                (Path(folder) / "plain/config.json").read_text(), (Path(folder) / "changed/config.json").read_text()
            )
            files = [load_file(Path(folder) / name / "model.safetensors") for name in ("plain", "changed")]
            self.assertEqual(files[0].keys(), files[1].keys())
            for name, tensor in files[0].items():
                self.assertTrue(torch.equal(tensor, files[1][name]), name)
            again = self.options(load_model(str(Path(folder) / "changed")))
            self.assertTrue(torch.equal(again(**batch()).loss, changed(**batch()).loss))
        self.assertEqual([n for n, _ in plain.named_parameters()], [n for n, _ in changed.named_parameters()])

    def test_logits_and_generated_tokens_stay(self):
        plain, changed = tiny().eval(), self.options(tiny().eval())
        sources = {name: batch()[name] for name in ("input_ids", "attention_mask")}
        decoder_inputs = batch()["labels"].clamp(min=0)
        logits = [model(**sources, decoder_input_ids=decoder_inputs).logits for model in (plain, changed)]
        torch.testing.assert_close(*logits, **EXACT)
        for beams in (1, 3):
            tokens = [m.generate(**sources, max_new_tokens=8, num_beams=beams) for m in (plain, changed)]
            self.assertTrue(torch.equal(*tokens))

    def test_a_copy_is_a_model_of_its_own(self):
        model = self.options(tiny())
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.lm_head.weight.zero_()
        torch.testing.assert_close(other(**batch()).loss.item(), torch.tensor(float(VOCABULARY)).log().item())
        self.assertNotAlmostEqual(model(**batch()).loss.item(), other(**batch()).loss.item(), places=2)

    def test_options_again_replace_the_former_ones(self):
        model = self.options(self.options(tiny()))
        self.assertIs(type(model).__base__, type(tiny()))
        self.assertLen(model.decoder.embed_tokens._forward_hooks, 1)
        before = model(**batch()).loss
        compute_loss_in_forward(model, z_loss=1e-2)
        self.assertGreater(model(**batch()).loss, before + 1e-3)

    def test_training_builds_no_cache(self):
        """transformers' decoder makes one in training too, a copy of all keys and values."""
        model = tiny()
        self.assertIsNotNone(
            model(input_ids=batch()["input_ids"], decoder_input_ids=batch()["input_ids"]).past_key_values
        )
        seen = []
        model.decoder.register_forward_hook(lambda *call: seen.append(call[2].past_key_values))
        compute_loss_in_forward(model)
        model(**batch())
        self.assertEqual(seen, [None])


class CompileTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        counters.clear()

    @parameterized.named_parameters(
        ("plain", ()),
        ("all_checkpointed", ("residual",), True),
        ("plain_checkpointed", (), True),
        ("chunked", (), False, 4),
    )
    def test_one_graph_with_head_and_loss(self, options, checkpointing=False, chunk=0):
        """fullgraph=True would raise at a graph break; batches of one shape are served by one graph."""
        model = tiny(num_layers=1, num_decoder_layers=1)
        expected_loss, expected = plain_loss_and_gradients(model, batch(), 40.0, z_loss=1e-2)
        for name in options:
            OPTIONS[name](model)
        compute_loss_in_forward(model, z_loss=1e-2, chunk=chunk, compile_options={"backend": "aot_eager"})
        if checkpointing:
            model.gradient_checkpointing_enable()
            checkpoint_blocks_only(model)
        for num_items in (40, 40, 7):
            loss = model(**batch(), num_items_in_batch=torch.tensor(num_items)).loss
            found = gradients(model, loss * num_items / 40)
        torch.testing.assert_close(loss * 7 / 40, expected_loss, **EXACT)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], **EXACT, msg=name)
        self.assertEqual(counters["stats"]["unique_graphs"], 1)
        self.assertEmpty(counters["graph_break"])

    def test_shapes_are_static_and_each_has_its_graph(self):
        model = tiny(num_layers=1, num_decoder_layers=1)
        compute_loss_in_forward(model, compile_options={"backend": "aot_eager"})
        for _ in range(2):
            for source in (8, 12):
                inputs = batch(source=source)
                torch.testing.assert_close(model(**inputs).loss, plain_loss_and_gradients(model, inputs, 18.0)[0])
        self.assertEqual(counters["stats"]["unique_graphs"], 2)


class DamagedCacheTest(absltest.TestCase):
    def test_what_a_killed_run_left_is_removed_and_named(self):
        """Whole files, and those that another process compiles right now, stay."""
        library = Path(torch._C.__file__).read_bytes()
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder),
            contextlib.redirect_stdout(io.StringIO()) as said,
        ):
            files = {"empty.main.so": b"", "cut.main.o": library[: len(library) // 2], "whole.main.so": library}
            files |= {"zeros.main.so": bytes(1000), "busy.main.so": b"", "code.main.cpp": b""}
            (Path(folder) / "ab").mkdir()
            for name, content in files.items():
                (Path(folder) / "ab" / name).write_bytes(content)
            with FileLock(Path(get_lock_dir()) / "busy.lock"):
                discard_damaged_kernels()
            left = {path.name for path in (Path(folder) / "ab").iterdir()}
        self.assertEqual(left, {"whole.main.so", "busy.main.so", "code.main.cpp"})
        for name in ("empty.main.so", "cut.main.o", "zeros.main.so"):
            self.assertIn(f"torch.compile: {folder}/ab/{name} is damaged", said.getvalue())


class RunTest(parameterized.TestCase):
    """The flags, through T5Trainer."""

    @staticmethod
    @functools.cache
    def curve(key: str = "loss", **flags) -> list[float]:
        trainer = make_trainer(tempfile.mkdtemp(), **dict(max_steps=3, gradient_accumulation_steps=2) | flags)
        trainer.train()
        return curve(trainer, key)

    @parameterized.parameters(
        dict(loss_chunk_size=7),
        dict(gradient_checkpointing=True),
        dict(gradient_checkpointing=True, torch_compile_backend="aot_eager"),
    )
    def test_options_change_no_curve(self, **flags):
        np.testing.assert_allclose(self.curve(**flags), self.curve(), rtol=1e-4)

    def test_z_loss_is_part_of_the_loss(self):
        self.assertGreater(self.curve(z_loss=1e-2)[0], self.curve()[0] + 1e-3)

    @parameterized.parameters(
        ("--bf16_residual True: needs --bf16", dict(bf16_residual=True)),
        ("--z_loss -1.0: must be at least 0", dict(z_loss=-1.0)),
        ("--loss_chunk_size -1: must be at least 0", dict(loss_chunk_size=-1)),
        ("--generation_cache quantized: must be one of dynamic, static", dict(generation_cache="quantized")),
    )
    def test_bad_flags(self, message, flags):
        with self.assertRaisesRegex(ValueError, message):
            arguments("never_written", **flags)

    def test_zero_3_and_fsdp_are_refused(self):
        args = arguments("never_written")
        args.optim, args.hf_deepspeed_config = "adamw_torch", mock.Mock(get_value=lambda *_: 3)
        for flag in ("torch_compile", "loss_chunk_size"):
            with mock.patch.object(args, flag, 1), self.assertRaisesRegex(ValueError, f"--{flag} 1: not with ZeRO-3"):
                check_training(args, "pre-training from scratch")


# ---------------------------------------------------------------- what a step costs
class Cost(TorchDispatchMode):
    """Counts the operations of a step that do work (no views, no single numbers), and the bytes they read and write."""

    def __init__(self):
        super().__init__()
        self.operations = self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, outputs)) if isinstance(t, torch.Tensor)]
        if function.namespace == "aten" and not function.is_view and any(t.numel() > 1 for t in tensors):
            self.operations += 1
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return outputs


@functools.cache
def cost_of_step(options=(), num_layers: int = 2, rows: int = 2, spoil=None, **settings) -> tuple[int, int, int, int]:
    """(FLOPs, FLOPs by flops_per_sequence, operations, bytes) of forward and backward pass on fake tensors: T5 v1.1
    base of so many layers each, 512 and 114 tokens, bfloat16 autocast, eager attention."""
    with FakeTensorMode():
        config = build_config("t5-v1_1-base", None, dict(num_layers=num_layers, num_decoder_layers=num_layers))
        config.dropout_rate = 0.0  # as in pre-training
        model = create_model(config, "eager").train()
        for name in options:
            OPTIONS[name](model)
        if spoil:
            spoil(model)
        compute_loss_in_forward(model, **settings)
        ids, labels = torch.ones(rows, 512, dtype=torch.long), torch.ones(rows, 114, dtype=torch.long)
        with FlopCounterMode(display=False) as flops, Cost() as cost, torch.autocast("cpu", torch.bfloat16):
            model(input_ids=ids, labels=labels, num_items_in_batch=torch.ones(())).loss.backward()
        formula = rows * flops_per_sequence(config, 512, 114)
        return flops.get_total_flops(), formula, cost.operations, cost.bytes


# {options: (operations, million bytes)} of cost_of_step, counted with torch 2.13. A step that does more fails. If what
# was added earns its time on a GPU, write the failure message's numbers here; and if a step does less, too, so that it
# stays so.
ALL = ("residual",)
BOUNDS = {(): (854, 5287), ALL: (884, 5272)}
SLACK = 1.002  # of other versions of torch


def over_budget(counted: tuple[int, int, int, int], bound: tuple[int, int]) -> str | None:
    """What a step does too much of, or None."""
    flops, formula, operations, size = counted
    if flops != formula:
        return f"{flops / formula:.4f} times the FLOPs of flops_per_sequence"
    if operations > SLACK * bound[0] or size > SLACK * bound[1] * 1e6:
        return f"({operations}, {size / 1e6:.0f}) operations and million bytes, the bound is {bound}"
    return None


class CostTest(parameterized.TestCase):
    """Guards on a CPU of what makes the step fast on a GPU: these counts know no noise."""

    @parameterized.parameters(*((options,) for options in BOUNDS))
    def test_a_step_does_no_more_than_it_did(self, options):
        self.assertIsNone(over_budget(cost_of_step(options), BOUNDS[options]))

    def test_flops_of_the_whole_model_are_the_formulas(self):
        flops, formula, *_ = cost_of_step(ALL, num_layers=12, rows=1)
        self.assertEqual(flops, formula)
        self.assertAlmostEqual(flops / 1e9, 425.9, places=1)  # T5 v1.1 base, as published figures have it

    def test_a_bf16_residual_stream_saves_bytes(self):
        self.assertLess(cost_of_step(ALL)[3], cost_of_step(())[3])

    def test_one_operation_more_is_noticed(self):
        """The guards can fail: a copy of each block's states, a cast to float32, and a product that is not needed."""

        def copies(model):
            model.encoder.block[1].register_forward_hook(lambda *call: (call[2][0] * 1.0, *call[2][1:]))

        def casts(model):
            for block in model.decoder.block:
                block.layer[2].DenseReluDense.wi_0.register_forward_hook(lambda *call: call[2].float())

        def products(model):
            head = torch.nn.Linear(768, 8)
            model.encoder.register_forward_hook(lambda *call: setattr(model, "seen", head(call[2][0])))

        for spoil in (copies, casts, products):
            self.assertIsNotNone(over_budget(cost_of_step((), spoil=spoil), BOUNDS[()]), spoil.__name__)
