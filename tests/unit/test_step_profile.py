"""Tests of the profile of a step and of attention's timings: what counts as what, and the least a step can take."""

import contextlib
import gzip
import io
import json
from argparse import Namespace
from unittest import mock

import torch
from absl.testing import parameterized
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import __main__ as benchmark_t5
from benchmarks import kernels, measure, step_profile
from benchmarks.step_profile import KINDS, kind_of, least_seconds, seconds_by_kind
from foundry.model_t5 import build_config, create_model


def arguments(*argv: str, **changes) -> Namespace:
    args = benchmark_t5.settled_part(benchmark_t5.parse_command([*argv, "--device", "cpu"]))
    return Namespace(**vars(args) | {"deadline": float("inf")} | changes)


class KindsTest(parameterized.TestCase):
    @parameterized.parameters(
        # names of kernels as profiles of others show them, and of operations
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", "matrix products"),
        ("aten::mm", "matrix products"),
        ("aten::bmm", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1", "attention forward"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_64x64x128", "attention backward"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16>", "attention backward"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "attention forward"),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_dropout_sm80(PyTorchMemEffAttention)", "attention backward"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention forward"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention backward"),
        ("_bias_gradient", "bias gradient"),
        ("_row_sums", "bias gradient"),
        ("triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_3", "norms and elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "norms and elementwise"),
        ("aten::gelu", "norms and elementwise"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...FusedAdamMathFunctor>", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("aten::copy_", "copies"),
    )
    def test_what_a_kernel_is(self, name, kind):
        self.assertEqual(kind_of(name), kind)

    def test_a_profile_of_a_gpu(self):
        """Kernels, one of them within the update; the span of the update itself and the host's operations are none."""

        def event(name, start, end, device="CUDA", note=False):
            span = Namespace(start=start, end=end, elapsed_us=lambda: end - start)
            kind = dict(device_type=Namespace(name=device), is_user_annotation=note)
            return Namespace(name=name, time_range=span, self_cpu_time_total=end - start, **kind)

        events = [event("aten::mm", 0, 500, "CPU"), event("nvjet_x", 0, 3e6), event("update", 3e6, 6e6, note=True)]
        events += [event("void elementwise_kernel", 4e6, 5e6), event("ProfilerStep", 0, 9e6, note=True)]
        events += [event("_bias_gradient", 7e6, 7.5e6), event("update", 3e6, 6e6, "CPU", note=True)]
        found = seconds_by_kind(events, on_gpu=True)
        wanted = {"matrix products": 3.0, "optimizer": 1.0, "bias gradient": 0.5}
        self.assertEqual(found, dict.fromkeys(KINDS, 0.0) | wanted)


class LeastTest(parameterized.TestCase):
    def test_operations_are_those_that_torch_counts(self):
        """Of the forward pass in eager attention: attention's own products, and three times all others."""
        shape = dict(d_model=32, d_kv=8, d_ff=48, num_heads=2, num_layers=2, num_decoder_layers=3)
        config = build_config("tiny", 256, shape)
        with torch.device("meta"):
            model = create_model(config, "eager")
            inputs = dict(input_ids=torch.ones(4, 64, dtype=torch.long), labels=torch.ones(4, 16, dtype=torch.long))
            with FlopCounterMode(display=False) as counter:
                model(**inputs)
        counts = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
        args = Namespace(source_length=64, batch=4, bf16=True)
        with mock.patch.object(step_profile, "compute_input_and_target_lengths", lambda *_: (0, 16)):
            least = least_seconds(config, args, 1.0, 1.0)
        self.assertEqual(least["attention forward"], counts["aten.bmm"])
        self.assertEqual(least["matrix products"], 3 * counts["aten.mm"])
        self.assertEqual(least["attention backward"], 2.5 * counts["aten.bmm"])  # five products of two
        self.assertEqual(least["bias gradient"], 4 * 4 * 16 * (2 * 64 * 64 + 3 * 16 * 16))

    def test_bytes_of_the_update(self):
        """AdamW: weight, gradient, two moments read and three written, 28 bytes; clipping reads, reads and writes."""
        config = build_config("tiny", 256)
        weights = sum(p.numel() for p in create_model(config).parameters() if p.dim() == 2) - 2 * 32 * config.num_heads
        least = least_seconds(config, Namespace(source_length=64, batch=4, bf16=False), 1.0, 2.0)
        self.assertEqual(least["optimizer"], 40 * weights / 2)


class MeasuredTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.dict(measure.MATRIX, cpu=64))
        self.enter_context(mock.patch.dict(measure.COPIED, cpu=2**12))
        self.enter_context(contextlib.redirect_stdout(io.StringIO()))
        measure.peak_flops.cache_clear()
        self.addCleanup(measure.peak_flops.cache_clear)

    def test_a_profile_on_a_cpu(self):
        output = self.folder / "profile.json"
        with mock.patch.object(step_profile, "STEPS", 2):
            flags = ["--batch", "2", "--source_length", "20", "--output", str(output)]
            found = step_profile.measure_profile(arguments("profile", *flags))
        rows = {row["name"]: row for row in found["rows"]}
        self.assertCountEqual(rows, [*KINDS, "step"])
        spent = [rows[kind]["milliseconds"] for kind in KINDS]
        self.assertAlmostEqual(sum(spent) / rows["step"]["milliseconds"], 1, places=2)
        for kind in ("matrix products", "norms and elementwise", "optimizer"):
            self.assertGreater(rows[kind]["milliseconds"], 0)
            self.assertGreater(rows[kind]["least_milliseconds"], 0)
        with gzip.open(output.with_suffix(".trace.json.gz")) as file:
            names = {event.get("name") for event in json.load(file)["traceEvents"]}
        self.assertContainsSubset(["update", "aten::mm"], names)

    def test_attention_is_timed_in_every_way(self):
        """On a CPU FlexAttention has no backward pass: its rows say so, the others have figures."""
        parity = {"name": "parity", "what": "", "ours": True, "checked": 1, "wrong": 0}
        with mock.patch.object(kernels, "parity_row", lambda _: parity):
            flags = ["--batch", "2", "--source_length", "20", "--rounds", "1"]
            found = kernels.measure_kernels(arguments("kernels", *flags))
        rows = {row["name"]: row for row in found["rows"]}
        self.assertLen(rows, 1 + 2 * len(kernels.WAYS))
        for stack in ("encoder", "decoder"):
            for name in ("t5_fused", "sdpa", "eager"):
                self.assertLess(rows[f"{stack} {name}"]["worst_error"], 1e-5)
                self.assertGreater(rows[f"{stack} {name}"]["milliseconds"], 0)
            self.assertIn("does not support backward on CPU", rows[f"{stack} flex"]["error"])

    @parameterized.parameters(False, True)
    def test_flex_attention_is_the_same_attention(self, causal):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, 20, 3, 16, generator=generator) for _ in "qkv")
        bias = torch.randn(1, 3, 20, 20, generator=generator)
        with torch.no_grad():
            found, expected = (way(q, k, v, bias, causal) for way in (kernels.flex, kernels.eager))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    def test_the_time_of_flex_attention_over_ours(self):
        times = {"flex": 3.0, "t5_fused": 2.0, "sdpa": 9.0, "eager": 8.0}

        def interleaved(rows, *_, **__):
            for name, row in rows.items():
                row["seconds"] = [times[name]]

        with (
            mock.patch.object(kernels, "parity_row", lambda _: {"name": "parity", "what": "", "ours": True}),
            mock.patch.object(kernels, "interleaved", interleaved),
        ):
            found = kernels.measure_kernels(arguments("kernels", "--batch", "2", "--source_length", "20"))
        self.assertEqual(found["flex_ratio"], {"encoder": 1.5, "decoder": 1.5})
