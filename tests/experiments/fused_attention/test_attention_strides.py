"""Tests that attention takes parts of a joined product as they lie, without copying them.

Hermetic; seconds.
"""

import torch
from absl.testing import parameterized

from experiments.fused_attention.kernel_choice import attention, use_attention_kernel

B, S, H, D = 3, 20, 2, 16


def parts(dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """(q, k, v as parts of one tensor, the same each on its own, bias)."""
    joined = torch.randn(B, S, 3 * H * D, generator=torch.Generator().manual_seed(0)).to(dtype)
    strided = [x.unflatten(-1, (H, D)) for x in joined.split(H * D, dim=-1)]
    bias = torch.randn(1, H, S, S, generator=torch.Generator().manual_seed(1))
    return strided, [x.clone(memory_format=torch.contiguous_format) for x in strided], bias


class StridesTest(parameterized.TestCase):
    @parameterized.product(kernel=("flash_cpu", "torch"), causal=(False, True))
    def test_parts_give_the_bits_of_copies(self, kernel, causal):
        strided, copies, bias = parts()
        self.assertFalse(any(x.is_contiguous() for x in strided))
        results = []
        for given in (strided, copies):
            leaves = [*(x.detach().requires_grad_() for x in given), bias.clone().requires_grad_()]
            with use_attention_kernel(kernel):
                out, lse = attention(*leaves, None, causal, 1.0)
                results.append([out, lse, *torch.autograd.grad(out.sin().sum(), leaves)])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
            self.assertTrue(ours.is_contiguous())

    def test_rows_with_gaps_are_copied(self):
        _, copies, bias = parts()
        gaps = [torch.stack([x, x], dim=-1)[..., 0] for x in copies]
        self.assertTrue(
            torch.equal(attention(*gaps, bias, None, False, 1.0)[0], attention(*copies, bias, None, False, 1.0)[0])
        )


def triton_error() -> dict[str, float]:
    """How far Triton's d(bias) of the parts is from that of copies, and from float64 (test_triton_kernel)."""
    from experiments.fused_attention.bias_gradient import Inputs, bias_gradient_torch
    from experiments.fused_attention.triton_bias_gradient import bias_gradient_triton

    strided, copies, bias = parts()
    grad = torch.randn(B, S, H, D, generator=torch.Generator().manual_seed(2))
    out, lse = attention(*copies, bias, None, True, 1.0)
    found, same = (bias_gradient_triton(grad, Inputs(*x, bias, causal=True), out, lse) for x in (strided, copies))
    wide = [x.double() for x in copies]
    truth = attention(*wide, bias.double(), None, True, 1.0)
    exact = bias_gradient_torch(grad.double(), Inputs(*wide, bias.double(), causal=True), *truth)
    return {"copies": (found - same).abs().max().item(), "float64": (found - exact).abs().max().item()}
