"""Tests of which attention kernel is chosen on a GPU, without one: torch's rule is applied to what it would be asked.

Hermetic; seconds.
"""

from unittest import mock

import check_attention
import torch
from absl.testing import absltest, parameterized

from modeling.kernels import attention, library
from modeling.kernels.bias_gradient import MASKED, Inputs

BF16, CPU = torch.bfloat16, torch.device("cpu")
# {what it is: (own, causal)} of modeling.kernels.attention.Case
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
            mock.patch.object(attention, "_probe", lambda *_: None),  # cuDNN's answers are right, say
        ):
            chosen = attention._choice.__wrapped__(attention.Case(CPU, BF16, (*lengths, 12, 64), own, causal), False)
        self.assertEqual(chosen, "cudnn")

    @parameterized.parameters(*KINDS)
    def test_the_probe_sees_what_training_adds_to_the_scores(self, kind):
        """Its layout and its hidden keys are those of the operator."""
        own, causal = KINDS[kind]
        problem, _ = attention._problem(attention.Case(CPU, torch.float32, (9, 9, 2, 8), own, causal), 2)
        q, k, bias = problem.q, problem.k, problem.added
        mask = torch.ones(2, 1, 1, 9, dtype=torch.bool).index_fill(3, torch.tensor([7, 8]), False)
        given = None if own is None else torch.zeros(1, 2, 9, 9)
        added = attention._for_kernels(Inputs(q, k, k, given, mask if own and own[0] else None, causal)).added
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
                attention._choice.__wrapped__(attention.Case(CPU, torch.float64, (6, 6, 2, 8), *kind), False)
                for kind in (KINDS["encoder"], KINDS["decoder"])
            ]
        self.assertEqual(found, ["flash_cpu", "torch"])


class CheckTest(parameterized.TestCase):
    @parameterized.parameters(
        ("cudnn", BF16, (512, 512), (9, 0), True),
        ("cudnn", BF16, (114, 512), (9, 0), True),
        ("cudnn", BF16, (704, 704), (9, 0), False),
        ("cudnn", BF16, (512, 64), (9, 0), False),
        ("cudnn", torch.float32, (512, 512), (9, 0), False),
        ("cudnn", BF16, (512, 512), (7, 5), False),
        ("efficient", BF16, (512, 512), (9, 0), False),
    )
    def test_check_attention_counts_a_refusal_as_a_fault(self, kernel, dtype, lengths, capability, fault):
        with mock.patch.object(torch.cuda, "get_device_capability", lambda _: capability):
            self.assertEqual(check_attention.must_serve(kernel, dtype, (*lengths, 64, False, "none"), CPU), fault)


if __name__ == "__main__":
    absltest.main()
