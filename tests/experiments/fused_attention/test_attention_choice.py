"""Tests of which attention kernel is chosen on a GPU, without one: torch's rule is applied to what it would be asked.

Hermetic; seconds.
"""

import math
import sys
from unittest import mock

import torch
from absl.testing import parameterized
from test_host_waits import Calls
from transformers.masking_utils import bidirectional_mask_function

from experiments.fused_attention import check_attention, library
from experiments.fused_attention import kernel_choice as kernels
from experiments.fused_attention.attention import t5_fused_mask
from experiments.fused_attention.bias_gradient import MASKED, Inputs, bias_gradient_torch
from foundry.modeling.attentions import Case

BF16, CPU = torch.bfloat16, torch.device("cpu")
TRITON = "experiments.fused_attention.triton_bias_gradient"
# {what it is: (own, causal)} of Case
KINDS = {"encoder": ((False, True), False), "decoder": ((False, True), True), "padding": ((True, True), False)}
KINDS |= {"documents": ((True, True), True), "cross": (None, False)}


def torchs_rule(params) -> bool:
    """What torch 2.11 and 2.13 ask of layouts on a GPU before cuDNN may serve, and never on a CPU."""
    tensors = (params.query, params.key, params.value, params.attn_mask)
    return all(tensor is None or tensor.stride(-1) == 1 for tensor in tensors)


class ChoiceTest(parameterized.TestCase):
    @parameterized.product(kind=tuple(KINDS), lengths=((512, 512), (114, 114), (128, 512), (37, 37)))
    def test_cudnn_is_chosen_on_a_gpu(self, kind, lengths):
        own, causal = KINDS[kind]
        with (
            mock.patch.object(torch.Tensor, "is_cuda", True),
            mock.patch.object(torch.backends.cuda, "can_use_cudnn_attention", torchs_rule),
            mock.patch.object(kernels, "_probe", lambda *_: None),  # cuDNN's answers are right, say
        ):
            chosen = kernels._choice.__wrapped__(Case(CPU, BF16, (*lengths, 12, 64), own, causal), False)
        self.assertEqual(chosen.kernel, "cudnn")

    @parameterized.parameters(*KINDS)
    def test_the_probe_sees_what_training_adds_to_the_scores(self, kind):
        """Its layout and its hidden keys are those of the operator."""
        own, causal = KINDS[kind]
        problem, _ = kernels._problem(Case(CPU, torch.float32, (9, 9, 2, 8), own, causal), 2)
        q, k, bias = problem.q, problem.k, problem.added
        mask = torch.ones(2, 1, 1, 9, dtype=torch.bool).index_fill(3, torch.tensor([7, 8]), False)
        given = None if own is None else torch.zeros(1, 2, 9, 9)
        added = kernels._for_kernels(Inputs(q, k, k, given, mask if own and own[0] else None, causal)).added
        if added is None:
            self.assertIsNone(bias)
            return
        self.assertEqual((bias.shape, bias.stride()), (added.shape, added.stride()))
        self.assertTrue(torch.equal(bias == MASKED, added == MASKED))
        self.assertEqual(bool((bias == MASKED).any()), kind != "encoder")

    def test_a_kernel_that_is_wrong_only_where_the_future_is_hidden_is_found(self):
        def forward(given):
            out, lse = library.torch_forward(given)
            return (out * 1.1 if bool((given.added == MASKED).any()) else out), lse

        wrong = library.KERNELS["flash_cpu"]._replace(forward=forward)
        with mock.patch.dict(library.KERNELS, flash_cpu=wrong):
            found = [
                kernels._choice.__wrapped__(Case(CPU, torch.float64, (6, 6, 2, 8), *kind), False).kernel
                for kind in (KINDS["encoder"], KINDS["decoder"])
            ]
        self.assertEqual(found, ["flash_cpu", "torch"])

    @parameterized.parameters(
        # what d(bias) is multiplied by without a mask, under one -> which kernel is taken, why not Triton's
        (1, 1, "triton", ""),
        (0, 0, "torch", "triton: its d.bias. at 9 x 9 is off by 1"),
        (math.nan, 1, "torch", "triton: its d.bias. at 9 x 9 is off by nan"),
        (1, 1.1, "triton", ""),
        (None, None, "torch", "triton: it fails .no engine."),
    )
    def test_a_wrong_gradient_of_the_bias_is_found(self, plain, masked, taken, why):
        """The probe passed no bias and looked at dq, dk, dv alone: a miscompiled Triton kernel would have trained the
        bias wrongly in silence."""

        def gradient(grad_out, given, out, lse):
            if plain is None:
                raise RuntimeError("no engine\nmore")
            return bias_gradient_torch(grad_out, given, out, lse) * (plain if given.mask is None else masked)

        with (
            mock.patch.dict(sys.modules, {TRITON: mock.MagicMock(bias_gradient_triton=gradient)}),
            mock.patch.object(kernels, "choose_bias_gradient", lambda *_: "triton"),
        ):
            encoder, padding = (Case(CPU, torch.float32, (9, 9, 2, 8), *KINDS[kind]) for kind in ("encoder", "padding"))
            found = kernels._choice.__wrapped__(encoder, False)
            under_a_mask = kernels._choice.__wrapped__(padding, False)
            if taken == "torch":
                with self.assertRaisesRegex(RuntimeError, "bias gradient triton cannot serve 9 x 9"):
                    kernels._choice.__wrapped__(encoder, False, None, "triton")
        self.assertEqual(found.gradient, taken)
        self.assertRegex(" ".join(found.passed_over), f"^{why}$")
        self.assertEqual(under_a_mask.gradient, "triton" if masked == 1 else "torch")


class CheckTest(parameterized.TestCase):
    @parameterized.parameters(
        ("cudnn", BF16, (512, 512), (9, 0), True),
        ("cudnn", BF16, (114, 512), (9, 0), True),
        ("cudnn", BF16, (704, 704), (9, 0), False),
        ("cudnn", BF16, (512, 64), (9, 0), False),
        ("cudnn", BF16, (1, 9), (9, 0), False),
        ("cudnn", torch.float32, (512, 512), (9, 0), False),
        ("cudnn", BF16, (512, 512), (7, 5), False),
        ("efficient", BF16, (512, 512), (9, 0), False),
    )
    def test_check_attention_counts_a_refusal_as_a_fault(self, kernel, dtype, lengths, capability, fault):
        with mock.patch.object(torch.cuda, "get_device_capability", lambda _: capability):
            self.assertEqual(check_attention.must_serve(kernel, dtype, (*lengths, 64, False, "none"), CPU), fault)

    def test_without_a_compiler_the_gradient_is_torchs(self):
        with mock.patch.object(kernels, "triton_lacks", lambda: "gcc or clang"):
            self.assertEqual(kernels.choose_bias_gradient(torch.device("cuda"), BF16), "torch")

    def test_a_mask_on_a_gpu_is_not_asked_for_its_values(self):
        options = dict(attention_mask=torch.ones(2, 3, dtype=torch.bool), allow_is_bidirectional_skip=True)
        options |= dict(mask_function=bidirectional_mask_function)
        self.assertIsNone(t5_fused_mask(2, 3, 3, **options))
        with mock.patch.object(torch.Tensor, "is_cuda", True), Calls() as calls:
            self.assertEqual(t5_fused_mask(2, 3, 3, **options).shape, (2, 1, 1, 3))
        self.assertEqual(calls.reads, 0)
