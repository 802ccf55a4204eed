"""Tests of --kernel_timings: the quickest right kernel is taken, timed once, the same for all processes of a job.

Kernels and clock are fakes: a call takes as long as the table says. Hermetic; seconds.
"""

import contextlib
import io
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from absl.testing import absltest, parameterized
from test_speed import arguments

from arguments.training import check_training
from model_t5 import build_config, create_model
from modeling.kernels import attention, library, timing
from modeling.kernels.attention import keep_kernel_timings, kernel_name
from modeling.kernels.bias_gradient import bias_gradient_torch
from modeling.relative_bias import diagonal_sums, spread_sums
from runs.speed import Job, make_fast

CPU = torch.device("cpu")
ENCODER = attention.Case(CPU, torch.float32, (6, 6, 2, 8), (False, True), False)


class TimingTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder, self.now, self.calls = Path(folder.name), 0.0, []
        self.addCleanup(attention._choice.cache_clear)
        self.addCleanup(attention._say_once.cache_clear)
        self.addCleanup(keep_kernel_timings, None)
        self.enter_context(mock.patch.object(timing.time, "perf_counter", lambda: self.now))

    def kernels(self, **seconds: float):
        """The kernels that there are: right ones, of which a forward pass takes so long; and "torch" after them."""

        def kernel(name: str) -> library.Kernel:
            def forward(q, *rest):
                self.now += seconds[name]
                self.calls.append((name, len(q)))
                return library.torch_forward(q, *rest)

            return library.Kernel(name, forward, library.torch_backward, lambda *_: None)

        found = {name: kernel(name) for name in seconds} | {"torch": library.KERNELS["torch"]}
        return mock.patch.object(attention, "KERNELS", found)

    def chosen(self) -> str:
        """What a process takes that starts now."""
        attention._choice.cache_clear()
        attention._say_once.cache_clear()
        return kernel_name(ENCODER)

    def test_the_quickest_is_taken_and_kept(self):
        keep_kernel_timings(self.folder)
        with self.kernels(first=0.003, second=0.002), contextlib.redirect_stdout(io.StringIO()) as said:
            self.assertEqual(self.chosen(), "second")
        self.assertIn(
            "attention: second on cpu float32 at 6 x 6, second; gradient of the bias by torch "
            "(timed: first 3 ms, second 2 ms)\n",
            said.getvalue(),
        )
        self.assertEqual(self.calls[-2:], [("second", attention.TIMED_ROWS)] * 2)
        self.calls.clear()
        with self.kernels(first=0.001, second=0.002):
            self.assertEqual(self.chosen(), "second", "as it is kept")
            self.assertEqual({rows for _, rows in self.calls}, {2}, "probed, not timed")
            with mock.patch.object(torch, "__version__", "9.9.9"):
                self.assertEqual(self.chosen(), "first", "another torch is timed anew")
            keep_kernel_timings(self.folder / "other")
            self.assertEqual(self.chosen(), "first")

    def one_pass(self, seconds: float, factor: float = 1.0):
        """One pass for all gradients, which takes so long on a GPU with Triton; factor: what d(bias) is off by."""
        whole = attention._gradients

        def gradients(name: str, *arguments):
            if not name.endswith(attention.ONE_PASS) or arguments[5] is None:
                return whole(name, *arguments)
            self.now += seconds
            *grads, of_bias = whole(name.removesuffix(attention.ONE_PASS), *arguments)
            return *grads, factor * spread_sums(diagonal_sums(of_bias[0]), of_bias.shape[-1])[None]

        self.enter_context(mock.patch.object(attention, "bias_gradient", self.second_pass))
        self.enter_context(mock.patch.object(attention, "choose_bias_gradient", lambda *_: "triton"))
        return mock.patch.object(attention, "_gradients", gradients)

    def second_pass(self, grad_out, q, k, v, *rest):
        self.now += 0.001
        return bias_gradient_torch(grad_out, q, k, v, *rest)

    @parameterized.parameters((0.0005, 1.0, "second+one_pass"), (0.0015, 1.0, "second"), (0.0005, 1.1, "second"))
    def test_one_pass_is_taken_where_it_is_right_and_the_quickest(self, seconds, factor, expected):
        """Beside a second pass of 1 ms, which is part of the fake's time too: it does what it replaces."""
        keep_kernel_timings(self.folder)
        with self.kernels(first=0.003, second=0.002), self.one_pass(seconds - 0.001, factor):
            with contextlib.redirect_stdout(io.StringIO()) as said:
                self.assertEqual(self.chosen(), expected)
            self.assertIn("timed: first 4 ms, second 3 ms" + ", first+one_pass" * (factor == 1), said.getvalue())
            if factor != 1:
                self.assertRegex(said.getvalue(), r"second\+one_pass: its dbias at 6 x 6 is off by 0.1")
            keep_kernel_timings(None)
            self.assertEqual(self.chosen(), "first", "without the flag")

    def test_without_the_flag_it_is_the_first(self):
        with self.kernels(first=0.003, second=0.002):
            self.assertEqual(self.chosen(), "first")
        self.assertEqual([name for name, _ in self.calls], ["first"], "and the second is not even probed")

    def test_a_wrong_kernel_is_not_taken_however_quick(self):
        keep_kernel_timings(self.folder)
        with self.kernels(wrong=0.001, first=0.003, second=0.002), contextlib.redirect_stdout(io.StringIO()) as said:
            plain = attention.KERNELS["wrong"].forward
            broken = attention.KERNELS["wrong"]._replace(forward=lambda *a: (2 * plain(*a)[0], plain(*a)[1]))
            with mock.patch.dict(attention.KERNELS, wrong=broken):
                self.assertEqual(self.chosen(), "second")
        self.assertRegex(said.getvalue(), r"\(timed: first 3 ms, second 2 ms; passed over: wrong: its output at 6 x 6")

    def test_of_two_ranks_the_first_answer_counts_for_both(self):
        """One rank ends its timing while the other, on a machine with other times, is in the midst of its own."""
        found = []

        def slow_here():
            self.now += 3
            if not found:
                found.append(timing.seconds_of_kernels(self.folder, {}, {"a": quick_there, "b": quick_there}, CPU))

        def quick_there():
            self.now += 1

        seconds = timing.seconds_of_kernels(self.folder, {}, {"a": slow_here, "b": quick_there}, CPU)
        self.assertEqual(seconds, {"a": 1.0, "b": 1.0})
        self.assertEqual(found, [seconds])

    def test_a_disk_that_takes_nothing_is_named(self):
        (self.folder / "file").touch()
        keep_kernel_timings(self.folder / "file" / "below")
        with self.kernels(first=0.003, second=0.002), contextlib.redirect_stdout(io.StringIO()) as said:
            self.assertEqual(self.chosen(), "first")
        self.assertRegex(said.getvalue(), r"attention: first on cpu .*\(not timed: .*Not a directory")

    def test_the_flag(self):
        (self.folder / "file").touch()
        with self.assertRaisesRegex(ValueError, "--kernel_timings .*/file: is a file, not a folder"):
            check_training(arguments(kernel_timings=str(self.folder / "file")), "pre-training from scratch")

    def test_the_plan_names_the_kernel(self):
        config = build_config("tiny", 90, dict(d_model=16, d_kv=8, d_ff=16, num_heads=2))
        job = Job(config, 6, 6, 1, 10, attention="t5_fused")
        model_args = SimpleNamespace(attn_implementation="t5_fused")
        with self.kernels(first=0.003, second=0.002):
            args = arguments(use_cpu=True, kernel_timings=str(self.folder))
            row = make_fast(create_model(config, "t5_fused"), job, model_args, args)
        self.assertIn("attn_implementation t5_fused (given; kernel second)", row)


if __name__ == "__main__":
    absltest.main()
