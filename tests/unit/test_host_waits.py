"""Tests of what keeps a GPU busy: a step asks the device for one number, updates come in few calls, batches come early.

On a CPU, where a dispatch mode sees what would be a wait on a GPU. Hermetic; about 20 s.
"""

import contextlib
import copy
import io
import math
import tempfile
from pathlib import Path
from unittest import mock

import torch
from absl.testing import parameterized
from safetensors.torch import load_file
from test_optimizers import random_parameters, set_gradients
from test_trainer_t5 import make_trainer, weights
from torch.utils._python_dispatch import TorchDispatchMode

import foundry.arguments.training as training_arguments
from foundry.arguments.training import PreTrainingArguments
from foundry.trainer_t5 import T5Trainer
from foundry.training.optimizers import AdamWRMSScaled, _parts, _sizes


class Calls(TorchDispatchMode):
    """Counts the operations by name; `reads` are those that fetch a number from the device."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {}))

    @property
    def reads(self) -> int:
        return self.counts.get("_local_scalar_dense", 0)


def as_before(params, states: list[dict], lr, eps=1e-6, betas=(0.9, 0.999), weight_decay=0.0) -> None:
    """A step as it was made when each tensor had a call of its own, in place."""
    rates = _sizes(params, 1e-3)
    for p, state, rate in zip(params, states, rates, strict=True):
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        p.mul_(1 - lr * weight_decay)
        torch._fused_adamw_(
            [p],
            [p.grad],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [torch.full((), float(state["step"]))],
            lr=rate * lr,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=0.0,
            eps=eps / math.sqrt(1 - betas[1] ** state["step"]),
            amsgrad=False,
            maximize=False,
        )


class UpdateTest(parameterized.TestCase):
    @parameterized.parameters(0.0, 0.1)
    def test_on_a_cpu_the_weights_are_bit_for_bit_those_of_a_call_for_each_tensor(self, weight_decay):
        params, reference = random_parameters(1), random_parameters(1)
        optimizer, states = AdamWRMSScaled(params, lr=2e-2, weight_decay=weight_decay), [{} for _ in reference]
        for step in range(6):
            set_gradients(params, step)
            set_gradients(reference, step)
            optimizer.step()
            with torch.no_grad():
                as_before(reference, states, 2e-2, weight_decay=weight_decay)
        for p, expected, state in zip(params, reference, states, strict=True):
            self.assertTrue(torch.equal(p, expected))
            self.assertEqual(optimizer.state[p].keys(), state.keys())
            for name in ("exp_avg", "exp_avg_sq"):
                self.assertTrue(torch.equal(optimizer.state[p][name], state[name]))

    @parameterized.parameters((1, 0.0), (40, 0.1), (10**6, 0.1))
    def test_several_tensors_at_a_time_as_on_a_gpu(self, together, weight_decay):
        """The moments to the bit; the weights to the rounding of one product."""
        params, reference = random_parameters(1), random_parameters(1)
        optimizer, states = AdamWRMSScaled(params, lr=2e-2, weight_decay=weight_decay), [{} for _ in reference]
        sizes = [p.numel() for p in params]
        with mock.patch("foundry.training.optimizers._parts", lambda found, _: _parts(found, together)):
            for step in range(6):
                set_gradients(params, step)
                set_gradients(reference, step)
                before = [p.detach().clone() for p in reference]
                optimizer.step()
                with torch.no_grad():
                    as_before(reference, states, 2e-2, weight_decay=weight_decay)
                    for p, expected, old in zip(params, reference, before, strict=True):
                        # of the step's size, and the last bit of the weights themselves
                        allowed = 1e-6 * (expected - old).abs().max() + 1.2e-7 * expected.abs()
                        self.assertTrue(bool(((p - expected).abs() <= allowed).all()), sizes)
                        p.copy_(expected)
        for p, state in zip(params, states, strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                self.assertTrue(torch.equal(optimizer.state[p][name], state[name]))

    def test_parts(self):
        self.assertEqual(_parts([3, 9, 2, 2, 2, 7, 1], 6), [[0], [1], [2, 3, 4], [5], [6]])
        self.assertEqual(_parts([3, 1, 2], 6), [[0, 1, 2]])
        self.assertEqual(_parts([3, 1], 0), [[0], [1]])

    @parameterized.parameters(1, 12)
    def test_calls_on_a_gpu_do_not_grow_with_the_tensors(self, layers):
        params = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(23 * layers)]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = AdamWRMSScaled(params, weight_decay=0.1)
        optimizer.step()  # which makes the moments
        with mock.patch("foundry.training.optimizers._parts", lambda found, _: _parts(found, 2**25)), Calls() as calls:
            optimizer.step()
        views = {"view", "detach", "split", "split_with_sizes", "alias", "_to_copy"}
        self.assertLess(sum(count for name, count in calls.counts.items() if name not in views), 12, calls.counts)


class Poison:
    """T5Trainer.training_step that spoils the gradients of a step."""

    def __init__(self, step: int, value: float = float("nan")):
        self.step, self.value, self.plain, self.before = step, value, T5Trainer.training_step, None

    def __call__(self, trainer, model, inputs, *args, **kwargs):
        loss = self.plain(trainer, model, inputs, *args, **kwargs)
        if trainer.state.global_step == self.step:
            next(model.parameters()).grad[0, 0] = self.value
            inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
            self.before = weights(trainer), copy.deepcopy(inner.state_dict()), trainer.lr_scheduler.state_dict()
        return loss


class StepTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def ended(self, trainer, step) -> tuple[str, int]:
        """What a run that ends with this training_step says on stderr, and its exit code."""
        told = io.StringIO()
        with (
            mock.patch.object(T5Trainer, "training_step", step),
            contextlib.redirect_stderr(told),
            self.assertRaises(SystemExit) as end,
        ):
            trainer.train()
        return told.getvalue(), end.exception.code

    def reads_of_steps(self, **flags) -> list[int]:
        """How many numbers each of four steps reads from the device, from its first forward pass to its end."""
        flags |= dict(per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=4)
        trainer = make_trainer(self.folder, logging_steps=100, logging_first_step=False, **flags)
        plain_step, plain_end = T5Trainer.training_step, T5Trainer._maybe_log_save_evaluate
        watches, open_watches = {}, contextlib.ExitStack()

        def step(trainer, *args, **kwargs):
            if (number := trainer.state.global_step) not in watches:
                watches[number] = open_watches.enter_context(Calls())
            return plain_step(trainer, *args, **kwargs)

        def end(trainer, *args, **kwargs):
            open_watches.close()
            plain_end(trainer, *args, **kwargs)

        self.addCleanup(open_watches.close)
        with (
            mock.patch.object(T5Trainer, "training_step", step),
            mock.patch.object(T5Trainer, "_maybe_log_save_evaluate", end),
        ):
            trainer.train()
        return [watch.reads for watch in watches.values()]

    @parameterized.parameters("adamw_rms_scaled", "adamw_torch_fused", "muon")
    def test_a_step_reads_one_number_from_the_device_its_norm(self, optim):
        self.assertEqual(self.reads_of_steps(optim=optim), [1, 1, 1, 1])

    @parameterized.product(
        optim=("adamw_rms_scaled", "adamw_torch_fused", "adamw_torch", "muon", "adafactor"), logging_steps=(1, 100)
    )
    def test_a_non_finite_step_ends_the_run_with_the_weights_from_before_it(self, optim, logging_steps):
        flags = dict(save_strategy="steps", save_steps=100, logging_steps=logging_steps, weight_decay=0.1)
        trainer = make_trainer(self.folder, optim=optim, max_steps=6, **flags)
        poison = Poison(3)
        step = lambda *args, **kwargs: poison(*args, **kwargs)  # noqa: E731 (bound as a method)
        told, code = self.ended(trainer, step)
        self.assertEqual(code, 1)
        self.assertRegex(
            told,
            r"error: step 4: the gradient's norm is nan \(examples [0-9, ]+\); "
            r".*checkpoint-3 holds the weights from before this step",
        )
        self.assertEqual([path.name for path in self.folder.glob("checkpoint-*")], ["checkpoint-3"])
        before, state, schedule = poison.before
        for name, tensor in load_file(self.folder / "checkpoint-3" / "model.safetensors").items():
            self.assertTrue(torch.equal(tensor, before[name]), name)
        saved = torch.load(self.folder / "checkpoint-3" / "optimizer.pt", weights_only=False)
        names = {p: name for name, p in trainer.model.named_parameters()}
        trained = [p for group in trainer.optimizer.param_groups for p in group["params"]]
        expected = {names[trained[place]]: values for place, values in state["state"].items()}
        torch.testing.assert_close(saved["state"], expected, rtol=0, atol=0)
        self.assertEqual([g["lr"] for g in saved["param_groups"]], [g["lr"] for g in state["param_groups"]])
        found = torch.load(self.folder / "checkpoint-3" / "scheduler.pt", weights_only=False)
        self.assertEqual((found["last_epoch"], found["_last_lr"]), (schedule["last_epoch"], schedule["_last_lr"]))
        self.assertEqual(trainer.state.global_step, 3)

    def test_in_the_last_step(self):
        trainer, poison = make_trainer(self.folder, max_steps=3, logging_steps=100), Poison(2, float("inf"))
        step = lambda *args, **kwargs: poison(*args, **kwargs)  # noqa: E731
        told, _ = self.ended(trainer, step)
        self.assertRegex(told, r"step 3: the gradient's norm is (inf|nan).*nothing was saved")


class LoadingTest(parameterized.TestCase):
    @parameterized.parameters(
        # accelerator, flags -> non-blocking
        (True, {}, True),
        (True, dict(dataloader_pin_memory=False), False),
        (True, dict(accelerator_config={"non_blocking": False}), False),
        (True, dict(use_cpu=True), False),
        (False, {}, False),
    )
    def test_copies_are_not_waited_for(self, accelerator, flags, non_blocking):
        with mock.patch.object(training_arguments, "has_accelerator", lambda: accelerator):
            args = PreTrainingArguments(output_dir="never_written", report_to=["none"], **flags)
        self.assertEqual(args.accelerator_config.non_blocking, non_blocking)
