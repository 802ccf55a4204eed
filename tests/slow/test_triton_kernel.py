"""Tests of the Triton kernels without a GPU: their values through the interpreter, and their machine code.

The second part has Triton compile what `bias_gradient_triton` and `one_pass_triton` would launch for T5's shapes, for
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

from modeling.kernels import library
from modeling.kernels.attention import attention, triton_is_installed, use_attention_kernel
from modeling.relative_bias import diagonal_sums, spread_sums

ROOT = Path(__file__).resolve().parents[2]
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
            cwd=ROOT / "tests" / "slow",
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

    def test_one_pass_equals_eager_attention_in_float64_and_itself_bit_by_bit(self):
        found = self.interpreted["compare_one_pass"]
        self.assertLen(found, len(ONE_PASS_CASES) + 1)
        for case, (errors, same_bits) in found.items():
            self.assertTrue(same_bits, case)
            self.assertLen(errors, 4)
            for gradient, error in errors.items():
                self.assertLess(error, 2e-5, f"{gradient} of {case}")


ONE_PASS_CASES = (  # queries, keys, d_kv, causal, mask, blocks
    (37, 37, 8, False, "none", (32, 32)),
    (70, 70, 16, True, "none", (32, 64)),  # three blocks of queries, two of keys
    (17, 40, 16, False, "padding", (16, 32)),
    (40, 40, 16, True, "documents", (16, 64)),
    (33, 33, 24, True, "additive", (32, 32)),
    (1, 50, 64, False, "none", None),
    (20, 20, 128, True, "padding", None),
)


def print_all() -> None:
    """Prints {function: what it returns} as JSON."""
    functions = (compare_with_eager, compare_one_pass, triton_error)
    print(json.dumps({function.__name__: function() for function in functions}))


def compare_one_pass() -> dict:
    """{case: ({gradient: largest error against float64, relative to the largest value}, same bits where it runs
    twice)}; q, k and v are parts of a joined product, which has NaN in the gaps."""
    from modeling.kernels.triton_one_pass import one_pass_triton, tile_of

    found = {}
    for queries, keys, width, causal, kind, block in ONE_PASS_CASES:
        wide, grad = inputs(queries, keys, width=width)
        with torch.no_grad():
            wide[3] -= 100.0
        mask = masks(kind, 3, queries, keys)
        *expected, of_bias = torch.autograd.grad(eager(*wide, mask, causal, 0.3), wide, grad)
        expected += [spread_sums(diagonal_sums(of_bias[0]), keys)[None]]
        q, k, v, bias = (t.detach().float() for t in wide)
        q, k, v = (torch.cat([x, torch.full_like(x, torch.nan)], 2)[:, :, : x.shape[2]] for x in (q, k, v))
        mask = mask.float().clamp(min=-1e30) if kind == "additive" else mask
        out, lse = attention(q, k, v, bias, mask, causal, 0.3)
        tile = tile_of(FLOAT32, queries, keys, width)
        tile |= dict(zip(("BLOCK_Q", "BLOCK_K"), block, strict=True)) if block else {}
        arguments = (grad.float(), q, k, v, library.aligned(bias), mask, out, lse, causal, 0.3, tile)
        ours = one_pass_triton(*arguments)
        again = one_pass_triton(*arguments) if block == (32, 64) else ours
        found[f"{queries} x {keys}, {width}, {kind}, {block}"] = errors_and_bits(ours, again, expected)

    tensors, grad = inputs(20, 20, dtype=torch.float32)  # as the operator calls it
    with use_attention_kernel(bias_gradient="one_pass"):
        ours, again = (torch.autograd.grad(attention(*tensors, None, True, 1.0)[0], tensors, grad) for _ in range(2))
    *expected, of_bias = torch.autograd.grad(attention(*tensors, None, True, 1.0)[0], tensors, grad)
    expected += [spread_sums(diagonal_sums(of_bias[0]), 20)[None]]
    return found | {"operator": errors_and_bits(ours, again, expected)}


def errors_and_bits(ours, again, expected) -> tuple[dict[str, float], bool]:
    errors = {
        name: float((x - y).abs().max() / y.abs().max().clamp(min=1.0))
        for name, x, y in zip(("dq", "dk", "dv", "dbias"), ours, expected, strict=True)
    }
    return errors, all(map(torch.equal, ours, again))


def compare_with_eager() -> dict[str, float]:
    """{case: largest error of Triton's d(bias) against float64, relative to the largest value}."""
    from modeling.kernels.triton_bias_gradient import bias_gradient_triton, tile_of

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
        found = bias_gradient_triton(
            grad.float(), q, k, v, library.aligned(bias), mask, out, lse, causal, 0.3, parts, tile
        )
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
    one_pass=False,
):
    """What a GPU of this architecture would be given for T5's attention over so many tokens: Triton's two kernels."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from modeling.kernels import triton_bias_gradient, triton_one_pass

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
        arguments = (grad_out, q, k, v, bias, mask, out, lse, causal, 1.0)
        if one_pass:
            tile = triton_one_pass.tile_of(dtype, length, length, width, architecture // 10)
            triton_one_pass.one_pass_triton(*arguments, tile)
        else:
            triton_bias_gradient.bias_gradient_triton(*arguments)
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

    @parameterized.product(
        architecture=(80, 90, 100),
        case=(
            (BF16, 64, False, None),
            (BF16, 64, False, PADDING),
            (BF16, 64, True, None),
            (BF16, 128, False, PADDING),
            (FLOAT32, 64, True, None),
        ),
    )
    def test_one_pass_stays_in_registers_and_fits(self, architecture, case):
        spilled = 128 if (architecture, *case[:2]) == (80, BF16, 128) else 0
        _, kernel = compiled(architecture, *case, one_pass=True)
        self.assertEqual(kernel.name, "_one_pass")
        self.assertLessEqual(resources(kernel)["STACK"], spilled)
        self.assertLessEqual(kernel.metadata.shared, SHARED_MEMORY[architecture] * 1024)
        if architecture >= 90 and case[0] == BF16:
            self.assertIn({90: "wgmma.mma_async", 100: "tcgen05.mma"}[architecture], kernel.asm["ptx"])
        self.assertLessEqual(getattr(kernel.metadata, "tmem_size", None) or 0, 512)  # columns that sm_100 has
        self.assertNotRegex(kernel.asm["ptx"], r"\batom\.|\bred\.global")  # whose order would change the bits
