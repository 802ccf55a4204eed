"""Tests of the Triton kernels without a GPU: their values through the interpreter, and their machine code.

The second part has Triton compile what `bias_gradient_triton` would launch for T5's shapes, for
GPUs that need not be there, and looks at what came out: tensor cores, registers, shared memory.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from absl.testing import absltest, parameterized
from test_attention_strides import triton_error
from test_attention_t5 import eager, inputs, masks
from warm_python import warm_python

from experiments.fused_attention import library
from experiments.fused_attention.bias_gradient import Inputs
from experiments.fused_attention.kernel_choice import attention, triton_is_installed, use_attention_kernel

ROOT = Path(__file__).resolve().parents[3]
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB that a block may have, CUDA guide table 16
BF16, FLOAT32 = torch.bfloat16, torch.float32
needs_triton = absltest.skipUnless(triton_is_installed(), "triton is not installed (it exists for Linux)")


@needs_triton
class InterpreterTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        """What the functions below return in a process of their own, which imports Triton anew: the import counts."""
        super().setUpClass()
        code = f"import sys; sys.path[:0] = {sys.path!r}; old = [name for name in sys.modules if name[:6] == 'triton']"
        code += "; [sys.modules.pop(name) for name in old if name[:9] != 'triton._C']"
        code += "; import test_triton_kernel as t; t.print_all()"
        done = subprocess.run(
            [warm_python(), "-W", "ignore", "-c", code],
            env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        cls.interpreted = json.loads(done.stdout.splitlines()[-1])

    def test_it_takes_strides(self):
        errors = self.interpreted["triton_error"]
        self.assertEqual(errors["copies"], 0)  # the same program on the same numbers
        self.assertLess(errors["float64"], 1e-5)

    def test_values_equal_eager_attention_in_float64(self):
        errors = self.interpreted["compare_with_eager"]
        self.assertLen(errors, 9)
        for case, error in errors.items():
            self.assertLess(error, 2e-5, case)  # float32 steps by 8e-6 at scores of -100; NaN is not less


def print_all() -> None:
    """Prints {function: what it returns} as JSON."""
    functions = (compare_with_eager, triton_error)
    print(json.dumps({function.__name__: function() for function in functions}))


def compare_with_eager() -> dict[str, float]:
    """{case: largest error of Triton's d(bias) against float64, relative to the largest value}."""
    from experiments.fused_attention.triton_bias_gradient import bias_gradient_triton, tile_of

    errors = {}
    for queries, keys, width, causal, kind, parts, block in (
        (37, 37, 8, False, "none", 1, None),
        (70, 70, 16, True, "none", 2, (16, 32)),
        (17, 40, 16, False, "padding", 3, (16, 16)),
        (64, 64, 16, False, "documents", 1, None),
        (33, 33, 24, True, "additive", 1, (32, 16)),
        (130, 65, 64, False, "documents", 1, None),
        (1, 1, 8, False, "none", 1, None),
        (40, 40, 128, True, "padding", 1, (16, 16)),
    ):
        wide, grad = inputs(queries, keys, width=width)
        with torch.no_grad():
            wide[3] -= 100.0  # exp(-logsumexp) overflows beyond the edge of a block
        mask = masks(kind, 3, queries, keys)
        (expected,) = torch.autograd.grad(eager(*wide, mask, causal, 0.3), wide[3:], grad)
        q, k, v, bias = (t.detach().float() for t in wide)
        mask = mask.float().clamp(min=-1e30) if kind == "additive" else mask
        out, lse = attention(q, k, v, bias, mask, causal, 0.3)
        tile = tile_of(FLOAT32, queries, keys, width)
        tile |= dict(zip(("BLOCK_Q", "BLOCK_K"), block, strict=True)) if block else {}
        given = Inputs(q, k, v, library.aligned_rows(bias), mask, causal, 0.3)
        found = bias_gradient_triton(grad.float(), given, out, lse, parts, tile)
        error = (found - expected).abs().max() / expected.abs().max().clamp(min=1.0)
        errors[f"{queries} x {keys}, {width}, {kind}, {block}"] = float(error)

    tensors, grad = inputs(20, 20, dtype=torch.float32)  # as the operator calls it
    with use_attention_kernel(bias_gradient="triton"):
        (found,) = torch.autograd.grad(attention(*tensors, None, True, 1.0)[0], tensors[3:], grad)
    (expected,) = torch.autograd.grad(attention(*tensors, None, True, 1.0)[0], tensors[3:], grad)
    return errors | {"operator": float((found - expected).abs().max() / expected.abs().max())}


def compiled(
    architecture: int,
    dtype: torch.dtype,
    width: int,
    causal: bool,
    mask: torch.Tensor | None,
    length=512,
):
    """What a GPU of this architecture would be given for T5's attention over so many tokens: Triton's two kernels."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from experiments.fused_attention import triton_bias_gradient

    heads, found, run = 4, [], JITFunction.run
    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", architecture, 32),
        get_current_device=lambda: architecture,
        get_current_stream=lambda device: 0,  # noqa: ARG005
    )

    def compile_only(self, *args, warmup, **options):  # noqa: ARG001
        found.append(run(self, *args, warmup=True, **options))

    q, k, v, out, grad_out = (torch.zeros(2, length, heads, width, dtype=dtype) for _ in range(5))
    bias, lse = torch.zeros(1, heads, length, length, dtype=dtype), torch.zeros(2, heads, length)
    with (
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=f"{os.environ['TORCHINDUCTOR_CACHE_DIR']}/triton_kernel"),
        mock.patch.object(driver, "_active", gpu),
        mock.patch.object(JITFunction, "run", compile_only),
    ):
        triton_bias_gradient.bias_gradient_triton(grad_out, Inputs(q, k, v, bias, mask, causal), out, lse)
    return found


def resources(kernel) -> dict[str, int]:
    """{"REG": registers of a thread, "STACK": bytes that did not fit into them, ...} as the tools read them."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(size) for name, size in re.findall(r"([A-Z]+):(\d+)", told.stdout)}


PADDING = (torch.arange(512) < torch.tensor([[512], [300]]))[:, None, None]
DOCUMENTS = (torch.arange(512)[:, None] // 100 == torch.arange(512) // 100).expand(2, 1, -1, -1)


@needs_triton
class MachineCodeTest(parameterized.TestCase):
    @parameterized.product(
        numbers=((BF16, 64), (BF16, 128), (FLOAT32, 64)),
        attention=(
            ("encoder", False, None),
            ("padding", False, PADDING),
            ("documents", False, DOCUMENTS),
            ("decoder", True, None),
        ),
    )
    def test_on_hopper_all_stays_in_registers_and_bf16_runs_on_tensor_cores(self, numbers, attention):
        dtype, width = numbers
        _, causal, mask = attention
        for kernel in compiled(90, dtype, width, causal, mask):
            used = resources(kernel)
            self.assertEqual(used["STACK"], 0, f"{kernel.name} spills: {used}")
            self.assertLessEqual(kernel.metadata.shared, SHARED_MEMORY[90] * 1024)
            if kernel.name == "_bias_gradient" and dtype == BF16:
                self.assertIn("wgmma.mma_async", kernel.asm["ptx"])
                self.assertIn("cp.async", kernel.asm["ptx"])  # the next example's blocks arrive meanwhile

    @parameterized.product(
        place=[place for place in itertools.product(SHARED_MEMORY, (114, 512)) if place != (90, 512)],  # as above
        numbers=((BF16, 64), (BF16, 128), (FLOAT32, 64)),
    )
    def test_it_compiles_for_every_gpu_and_fits(self, place, numbers):
        (architecture, length), (dtype, width) = place, numbers
        kernels = compiled(architecture, dtype, width, True, None, length)
        self.assertEqual([kernel.name for kernel in kernels], ["_row_sums", "_bias_gradient"])
        for kernel in kernels:
            self.assertLessEqual(kernel.metadata.shared, SHARED_MEMORY[architecture] * 1024)
            self.assertLessEqual(resources(kernel)["STACK"], 256)  # bytes a thread; a block too large spills thousands
