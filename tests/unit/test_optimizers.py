"""foundry/training/optimizers.py: update rules against slow float64 ones written here, schedules against figures.

Hermetic; a few seconds.
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
from transformers import get_scheduler
from transformers.optimization import Adafactor

import foundry.training.optimizers
from foundry.arguments.training import PreTrainingArguments, check_training
from foundry.model_t5 import build_config, create_model
from foundry.modeling.layers import sum_bias_by_diagonals
from foundry.modeling.recomputed import recompute_cheap
from foundry.trainer_t5 import T5Trainer
from foundry.training.optimizers import (
    NEWTON_SCHULZ,
    AdamWRMSScaled,
    MuonWithAdamW,
    _product_dtype,
    build_scheduler,
    learning_rate_factor,
    optimizer_class_and_kwargs,
    orthogonalised,
)

SHAPES = [(7,), (5, 4), (3, 2, 6), (1,), (64, 33)]


def arguments(kind=PreTrainingArguments, job="pre-training from scratch", **flags):
    """Arguments as the scripts have them: parsed, then completed by check_training."""
    flags = dict(output_dir=tempfile.gettempdir() + "/never_written", report_to=["none"], use_cpu=True) | flags
    args = kind(**flags)
    check_training(args, job)
    return args


def random_parameters(seed: int, scale: float = 1.0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator) * scale) for shape in SHAPES]


def set_gradients(params, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for number, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** (number - 2)  # of very different sizes


class SlowRMSScaledAdamW:
    """The rule of the docstring, one number at a time, in float64."""

    def __init__(self, tensors, lr, betas, eps, weight_decay, min_rms):
        self.values = [t.detach().double().flatten().tolist() for t in tensors]
        self.first = [[0.0] * len(v) for v in self.values]
        self.second = [[0.0] * len(v) for v in self.values]
        self.steps = [0] * len(self.values)
        self.lr, self.betas, self.eps, self.weight_decay, self.min_rms = lr, betas, eps, weight_decay, min_rms

    def step(self, gradients):
        b1, b2 = self.betas
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            self.steps[i] += 1
            t, values = self.steps[i], self.values[i]
            rms = max(self.min_rms, math.sqrt(sum(v * v for v in values) / len(values)))
            for j, g in enumerate(gradient.double().flatten().tolist()):
                self.first[i][j] = b1 * self.first[i][j] + (1 - b1) * g
                self.second[i][j] = b2 * self.second[i][j] + (1 - b2) * g * g
                update = self.first[i][j] / (math.sqrt(self.second[i][j]) + self.eps)
                update *= math.sqrt(1 - b2**t) / (1 - b1**t)
                values[j] -= self.lr * rms * update + self.lr * self.weight_decay * values[j]

    def assert_equals(self, params):
        for values, p in zip(self.values, params, strict=True):
            expected = torch.tensor(values, dtype=torch.float64).view(p.shape)
            atol = 1e-6 * expected.abs().max().item()  # float32 against float64
            torch.testing.assert_close(p.detach().double(), expected, rtol=2e-5, atol=atol)


class AdamWRMSScaledTest(parameterized.TestCase):
    @parameterized.parameters(
        dict(),
        dict(weight_decay=0.1),
        dict(lr=1.0, betas=(0.5, 0.9), eps=1e-3),
        dict(min_rms=0.7),
        dict(scale=1e-5),  # all tensors below min_rms
        dict(scale=100.0),
    )
    def test_is_the_rule(self, scale=1.0, **options):
        options = dict(lr=2e-2, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, min_rms=1e-3) | options
        params = random_parameters(1, scale)
        slow = SlowRMSScaledAdamW(params, **options)
        optimizer = AdamWRMSScaled(params, **options)
        for step in range(6):
            set_gradients(params, step)
            slow.step([p.grad for p in params])
            optimizer.step()
            slow.assert_equals(params)

    @parameterized.parameters(1, 2, 3)
    def test_on_slices_of_the_tensors_it_is_the_same(self, ranks):
        """What ZeRO-2 does: every rank's optimizer has a flat slice of each group's tensors, and the model is whole."""
        params, reference = random_parameters(1), random_parameters(1)
        whole = AdamWRMSScaled(reference, weight_decay=0.1)
        optimizers = [AdamWRMSScaled(params, weight_decay=0.1, sliced=True) for _ in range(ranks)]
        for rank, optimizer in enumerate(optimizers):
            for group in optimizer.param_groups:
                flat = group["params"][0].detach().flatten()
                group["params"] = [
                    torch.nn.Parameter(slice_.clone()) for slice_ in flat.tensor_split(ranks)[rank : rank + 1]
                ]
        for step in range(4):
            for each in (params, reference):
                set_gradients(each, step)
            whole.step()
            for rank, optimizer in enumerate(optimizers):
                for group, p in zip(optimizer.param_groups, params, strict=True):
                    group["params"][0].grad = p.grad.flatten().tensor_split(ranks)[rank].clone()
                optimizer.step()
            for number, p in enumerate(params):  # the all-gather after the step
                slices = [optimizer.param_groups[number]["params"][0] for optimizer in optimizers]
                p.data.copy_(torch.cat([s.detach() for s in slices]).view(p.shape))
            for p, expected in zip(params, reference, strict=True):
                torch.testing.assert_close(p, expected, rtol=1e-6, atol=1e-9)

    def test_tensors_without_gradient_are_left_alone_and_count_no_step(self):
        params = random_parameters(3)
        slow = SlowRMSScaledAdamW(params, 0.02, (0.9, 0.999), 1e-6, 0.1, 1e-3)
        optimizer = AdamWRMSScaled(params, weight_decay=0.1)
        before = params[1].detach().clone()
        for step in range(4):
            set_gradients(params, step)
            if step < 2:
                params[1].grad = None  # joins later, with a bias correction of its own
            slow.step([p.grad for p in params])
            optimizer.step()
            if step < 2:
                torch.testing.assert_close(params[1].detach(), before, rtol=0, atol=0)
                self.assertNotIn(params[1], optimizer.state)
        slow.assert_equals(params)
        optimizer.zero_grad()
        optimizer.step()
        slow.assert_equals(params)

    @parameterized.parameters(dict(lr=-1.0), dict(eps=0.0), dict(betas=(0.9, 1.0)), dict(betas=(-0.1, 0.9)))
    def test_senseless_settings_are_refused(self, **options):
        with self.assertRaisesRegex(ValueError, "must"):
            AdamWRMSScaled(random_parameters(1), **options)


def plainly_orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """The formula, of one matrix in float64."""
    (a, b, c), x = NEWTON_SCHULZ, matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


class MuonTest(parameterized.TestCase):
    def optimizer(self, params, **options) -> MuonWithAdamW:
        return MuonWithAdamW(params, {id(p) for p in params if p.ndim == 2}, **options)

    def test_is_torchs_muon_scaled_and_our_adamw(self):
        params = random_parameters(0)
        optimizer = self.optimizer(params, lr=2e-2, weight_decay=0.1)
        copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
        muon = torch.optim.Muon(
            [p for p in copies if p.ndim == 2], lr=2e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
        )
        adamw = AdamWRMSScaled([p for p in copies if p.ndim != 2], lr=2e-2, weight_decay=0.1)
        for step in range(4):
            set_gradients(params, step)
            set_gradients(copies, step)
            before = [p.detach() * (1 - 2e-2 * 0.1) for p in copies]
            with mock.patch.object(
                foundry.training.optimizers, "_product_dtype", lambda _: torch.bfloat16
            ):  # as torch's
                for each in (optimizer, muon, adamw):
                    each.step()
            for p, old in zip(copies, before, strict=True):
                if p.ndim == 2:  # torch's step alone, on the decayed weights, times their size
                    update = p.detach() - old / (1 - 2e-2 * 0.1)
                    p.data = old + update * max(1e-3, old.square().mean().sqrt().item())
        for p, expected in zip(params, copies, strict=True):
            torch.testing.assert_close(p, expected, rtol=1e-5, atol=1e-6)

    @parameterized.parameters(1, 7)
    def test_products_are_counted_by_shapes_not_by_matrices(self, layers):
        """On a GPU a product of one small matrix takes as long to start as to compute."""
        sizes = [(8, 8), (20, 8), (8, 20)] * layers
        params = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
        set_gradients(params, 0)
        optimizer = self.optimizer(params)
        with torch.profiler.profile() as profile:
            optimizer.step()
        calls = {event.key: event.count for event in profile.key_averages()}
        self.assertEqual((calls["aten::bmm"], calls["aten::baddbmm"]), (2 * 5, 2 * 2 * 5))  # 8 x 8 and 8 x 20
        self.assertNotIn("aten::mm", calls)

    def test_matrices_beyond_a_stack_are_not_forgotten(self):
        params, copies = (
            [torch.nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(n))) for n in range(5)]
            for _ in range(2)
        )
        for stack, tensors in ((2**25, params), (50, copies)):
            set_gradients(tensors, 0)
            with mock.patch.object(foundry.training.optimizers, "_STACK", stack):
                self.optimizer(tensors).step()
        for p, expected in zip(copies, params, strict=True):
            torch.testing.assert_close(p, expected, rtol=1e-6, atol=1e-7)

    @parameterized.product(
        numbers=((torch.bfloat16, 3e-2), (torch.float32, 1e-5)),
        shape=((6, 8, 8), (3, 8, 20), (2, 33, 64), (1, 1, 5), (2, 128, 320)),
    )
    def test_the_iteration_is_the_formula_in_float64(self, numbers, shape):
        dtype, allowed = numbers
        matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-3
        matrices *= torch.logspace(0, -2, shape[1])[:, None]  # singular values of very different sizes
        found = orthogonalised(matrices, dtype)
        self.assertEqual(found.dtype, dtype)
        for one, matrix in zip(found, matrices, strict=True):
            expected = plainly_orthogonalised(matrix)
            self.assertLess((one - expected).norm() / expected.norm(), allowed)

    @parameterized.parameters(("AMX", 3e-2), (None, 1e-5))
    def test_a_step_is_the_rule_in_float64(self, units, allowed):
        """In bfloat16 where the CPU has units for it, in float32 where it would emulate them."""
        shapes, generator = [(24, 24), (40, 24), (24, 40), (24, 24)], torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.1) for shape in shapes]
        optimizer, momenta = self.optimizer(params, lr=3e-2, weight_decay=0.1), [0.0] * len(shapes)
        self.assertEqual(_product_dtype(torch.device("cuda")), torch.bfloat16)
        with mock.patch.object(foundry.training.optimizers, "bf16_units", lambda: units):
            for _ in range(3):
                before = [p.detach().double() for p in params]
                for p in params:
                    p.grad = torch.randn(p.shape, generator=generator)
                optimizer.step()
                for number, (p, old) in enumerate(zip(params, before, strict=True)):
                    gradient = p.grad.double()
                    momenta[number] = 0.95 * momenta[number] + 0.05 * gradient
                    step = plainly_orthogonalised(0.05 * gradient + 0.95 * momenta[number])
                    decayed = old * (1 - 3e-2 * 0.1)
                    rate = 3e-2 * 0.2 * max(p.shape) ** 0.5 * decayed.square().mean().sqrt()
                    moved = p.detach().double() - decayed
                    self.assertLess((moved + rate * step).norm() / (rate * step).norm(), allowed)

    def test_a_reloaded_state_goes_on_identically(self):
        params = random_parameters(0)
        optimizer = self.optimizer(params)
        for step in range(3):
            set_gradients(params, step)
            optimizer.step()
        copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
        other = self.optimizer(copies, lr=1.0)
        with tempfile.TemporaryDirectory() as folder:
            torch.save(optimizer.state_dict(), Path(folder) / "optimizer.pt")
            other.load_state_dict(torch.load(Path(folder) / "optimizer.pt", weights_only=True))
        for step in range(3, 5):
            for each, opt in ((params, optimizer), (copies, other)):
                set_gradients(each, step)
                opt.step()
        for p, expected in zip(copies, params, strict=True):
            torch.testing.assert_close(p, expected, rtol=0, atol=0)

    def test_without_matrices_it_is_refused(self):
        with self.assertRaisesRegex(ValueError, "none among the parameters"):
            MuonWithAdamW([torch.nn.Parameter(torch.ones(3))], set())


def _zero(stage: int) -> mock.Mock:
    """What Trainer's arguments hold under ZeRO of this stage, without its global registration."""
    return mock.Mock(get_value=lambda name, default=None: stage if name == "zero_optimization.stage" else default)


class ScheduleTest(parameterized.TestCase):
    def rates(self, steps, total=65_536, kind=PreTrainingArguments, reached=None, **flags) -> list[float]:
        """The learning rates at `steps` as a run with these flags would have them."""
        args = arguments(kind, **flags)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
        scheduler = build_scheduler(args, optimizer, total, reached)
        return [scheduler.base_lrs[0] * scheduler.lr_lambdas[0](step) for step in steps]

    def assert_rates(self, found, expected):
        for one, other in zip(found, expected, strict=True):
            self.assertAlmostEqual(one, other, delta=6e-7)

    @parameterized.parameters(0, 40, 0.1)
    def test_a_run_of_epochs_that_goes_on_with_twice_the_batch_decays_over_its_rows(self, warmup):
        """100 of 200 steps, then 50 of twice as many rows: the rates of half as many steps from the beginning."""
        flags = dict(learning_rate=1.0, final_learning_rate_factor=0.2, lr_scheduler_type="linear")
        found = self.rates((100, 125, 150), 150, reached=(100, 0.5), warmup_steps=warmup, **flags)
        self.assert_rates(found, self.rates((50, 75, 100), 100, warmup_steps=warmup, **flags))
        self.assertEqual(
            self.rates((100,), 150, reached=(100, 0.5), **flags | {"lr_scheduler_type": "constant"}), [1.0]
        )

    # A peak of 1, 10 steps of warm-up, a floor of a fifth.
    OWN = dict(learning_rate=1.0, warmup_steps=10, final_learning_rate_factor=0.2)
    T5 = dict(lr_scheduler_type="inverse_sqrt", optim="adafactor", warmup_steps=10_000, learning_rate=0.01)

    @parameterized.parameters(
        # the default is nanoT5's cosine
        ({}, 65_536, [0, 10_000, 20_000, 37_768, 65_536], [0.01, 0.02, 0.018443, 0.010005, 1e-5]),
        # T5's 1 / sqrt(max(step, 10^4)), where transformers' own would rise from zero
        (T5, 2**20, [0, 1, 9_999, 10_000, 20_000, 65_536], [0.01, 0.01, 0.01, 0.01, 0.007071, 0.003906]),
        # neither linear nor cosine rises again after the last step
        (OWN | {"lr_scheduler_type": "linear"}, 110, [0, 5, 10, 60, 110, 150], [0.5, 0.75, 1.0, 0.6, 0.2, 0.2]),
        (OWN | {"lr_scheduler_type": "cosine"}, 110, [0, 10, 60, 110, 150], [0.5, 1.0, 0.6, 0.2, 0.2]),
        (OWN | {"lr_scheduler_type": "constant"}, 110, [0, 5, 109], [1.0, 1.0, 1.0]),
        (OWN | {"lr_scheduler_type": "constant_with_warmup"}, 110, [0, 5, 10, 109], [0.5, 0.75, 1.0, 1.0]),
        (OWN | {"lr_scheduler_type": "linear", "warmup_start_factor": 0.0}, 110, [0, 5], [0.0, 0.5]),
        # a share of all steps, and no warm-up
        (dict(learning_rate=1.0, warmup_steps=0.1), 1_000, [0, 50, 100], [0.5, 0.75, 1.0]),
        (OWN | {"warmup_steps": 0}, 100, [0], [1.0]),
    )
    def test_rates_by_hand(self, flags, total, steps, expected):
        self.assert_rates(self.rates(steps, total=total, **flags), expected)

    @parameterized.parameters(5e-6, 1e-5)
    def test_the_floor_is_a_share_of_a_low_peak_too(self, peak):
        found = self.rates([50, 100], total=100, learning_rate=peak, warmup_steps=50)
        self.assertAlmostEqual(found[0] / peak, 1.0)
        self.assertAlmostEqual(found[1] / peak, 5e-4)

    @parameterized.parameters(2_000, 65_536)
    def test_the_warm_up_is_a_share_of_the_run(self, steps):
        """Whatever the length of the run, the rate reaches its peak and falls to the floor."""
        found = self.rates([0, math.ceil(steps * 10_000 / 65_536), steps], total=steps, max_steps=steps)
        self.assert_rates(found, [0.01, 0.02, 1e-5])

    @parameterized.parameters(
        ("polynomial", None),
        ("cosine_with_restarts", {"num_cycles": 2}),
        ("cosine", {"num_cycles": 1.5}),  # an argument of transformers' schedule asks for transformers' schedule
    )
    def test_other_schedules_are_transformers_own(self, name, kwargs):
        flags = dict(lr_scheduler_type=name, lr_scheduler_kwargs=kwargs, learning_rate=1.0, warmup_steps=4)
        reference = get_scheduler(
            name,
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0),
            num_warmup_steps=4,
            num_training_steps=40,
            scheduler_specific_kwargs=kwargs,
        )
        steps = range(0, 40, 3)
        self.assert_rates(self.rates(steps, total=40, **flags), [reference.lr_lambdas[0](step) for step in steps])

    @parameterized.parameters((None, "min"), (False, "min"), (True, "max"))
    def test_a_schedule_that_follows_the_main_metric_knows_its_direction(self, greater_is_better, mode):
        args = arguments(lr_scheduler_type="reduce_lr_on_plateau")
        self.assertEqual(args.metric_for_best_model, "loss")
        args.greater_is_better = greater_is_better
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        self.assertEqual(build_scheduler(args, optimizer, 9).mode, mode)

    @parameterized.product(rate=(1e-2, 1e-3, 1e-4), kwargs=(None, {"min_lr": 2e-5}))
    def test_the_greedy_schedule_can_lower_any_rate(self, rate, kwargs):
        """transformers' bound of 1e-3 is at T5's usual rates: these only rose."""
        args = arguments(lr_scheduler_type="greedy", learning_rate=rate, lr_scheduler_kwargs=kwargs)
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)
        schedule = build_scheduler(args, optimizer, 9)
        for _ in range(13):  # its patience is 10 evaluations
            schedule.step(1.0)
        self.assertAlmostEqual(optimizer.param_groups[0]["lr"], 0.95 * rate)
        for _ in range(8_000):
            schedule.step(1.0)
            self.assertGreaterEqual(optimizer.param_groups[0]["lr"], 2e-5 if kwargs else 5e-4 * rate)

    def test_factor_of_inverse_sqrt_without_warm_up(self):
        factor = learning_rate_factor("inverse_sqrt", 100, 0)
        self.assertEqual([factor(step) for step in (0, 1, 4)], [1.0, 1.0, 0.5])


class ChoiceTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        torch.manual_seed(0)
        shape = dict(d_model=16, d_kv=4, d_ff=24, num_heads=2, num_layers=1, num_decoder_layers=1, dropout_rate=0.0)
        self.model = create_model(build_config("tiny", 60, shape))

    def optimizer(self, **flags) -> torch.optim.Optimizer:
        """What T5Trainer trains with under these flags."""
        trainer = T5Trainer(model=self.model, args=arguments(eval_strategy="no", **flags))
        return trainer.create_optimizer()

    def test_default(self):
        optimizer = self.optimizer()
        self.assertIsInstance(optimizer, AdamWRMSScaled)
        for group in optimizer.param_groups:
            found = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "min_rms")}
            self.assertEqual(found, dict(lr=0.02, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, min_rms=1e-3))

    @parameterized.parameters("adamw_torch", "adamw_torch_fused")
    def test_torch_adamw(self, name):
        optimizer = self.optimizer(optim=name, learning_rate=3e-4, weight_decay=0.1, adam_beta1=0.8)
        self.assertIs(type(optimizer), torch.optim.AdamW)
        self.assertIsNone(optimizer_class_and_kwargs(arguments(optim=name)))
        self.assertEqual({group["lr"] for group in optimizer.param_groups}, {3e-4})
        self.assertEqual(optimizer.param_groups[0]["betas"], (0.8, 0.999))
        self.assertEqual(optimizer.param_groups[0]["eps"], 1e-6)
        self.assertEqual(bool(optimizer.param_groups[0].get("fused")), name.endswith("fused"))

    def test_flags_reach_the_optimizer_and_norms_do_not_decay(self):
        optimizer = self.optimizer(weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-5)
        decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
        self.assertLen(decays, len(list(self.model.parameters())))
        for name, p in self.model.named_parameters():
            self.assertEqual(decays[id(p)], 0.0 if "layer_norm" in name or "bias" in name else 0.1, name)
        self.assertEqual(optimizer.param_groups[0]["betas"], (0.8, 0.95))
        self.assertEqual(optimizer.param_groups[0]["eps"], 1e-5)

    def test_adafactor_is_transformers_with_t5s_settings(self):
        """T5: factored second moments, updates scaled by the tensor's RMS and clipped at 1, no momentum."""
        model = copy.deepcopy(self.model)
        sum_bias_by_diagonals(model)  # as T5Trainer does: in another order, the last bits differ
        recompute_cheap(model)
        optimizer = self.optimizer(optim="adafactor", learning_rate=1e-2)
        self.assertIs(type(optimizer), Adafactor)
        # Written out: transformers' defaults besides the three switches, and a learning rate.
        settings = dict(eps=(1e-30, 1e-3), clip_threshold=1.0, decay_rate=-0.8, beta1=None, weight_decay=0.0)
        settings |= dict(scale_parameter=True, relative_step=False, warmup_init=False)
        reference = Adafactor(model.parameters(), lr=1e-2, **settings)
        ids = torch.randint(2, 60, (4, 8))
        for _ in range(3):
            for each, opt in ((self.model, optimizer), (model, reference)):
                each.zero_grad()
                each(input_ids=ids, labels=ids).loss.backward()
                opt.step()
        for (name, p), expected in zip(self.model.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p, expected, rtol=0, atol=0, msg=name)
        state = optimizer.state[self.model.lm_head.weight]
        self.assertIn("exp_avg_sq_row", state)
        self.assertNotIn("exp_avg", state)

    def test_adafactor_and_inverse_sqrt_are_t5xs(self):
        """Expected: t5x/adafactor.py as t5_1_1/base.gin sets it, under `constant * rsqrt_decay` with warmup_steps 4."""
        expected = {
            (128, 160): [0.09548082, 0.12207250, 0.03398988, 0.07100567, 0.07808864, 0.04414907],
            (5,): [0.07646970, 0.15236191, 0.03794707, 0.07837892, 0.07837892, -0.15347740],
        }
        params = [torch.nn.Parameter(0.1 * torch.arange(1.0, math.prod(s) + 1).sin().view(s)) for s in expected]
        optimizer_class, options = optimizer_class_and_kwargs(arguments(optim="adafactor", learning_rate=0.5))
        optimizer = optimizer_class(params, **options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor("inverse_sqrt", 12, 4))
        for step in range(12):
            for p in params:
                waves = torch.arange(p.numel()).remainder(97) + 1.0
                p.grad = ((step + 1) * waves).cos().view_as(p) * 10.0 ** -(step % 3)
            optimizer.step()
            schedule.step()
        for p, wanted in zip(params, expected.values(), strict=True):
            found = torch.cat([p.detach().flatten()[:4], p.detach().flatten()[-2:]])
            torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-4, atol=1e-6)

    def test_muon_reaches_the_layers_matrices(self):
        optimizer = self.optimizer(optim="muon", weight_decay=0.1)
        self.assertIsInstance(optimizer, MuonWithAdamW)
        names = {id(p): name for name, p in self.model.named_parameters()}
        groups = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
        self.assertCountEqual(groups, names.values())
        for name, group in groups.items():
            matrix = name.rsplit(".", 2)[-2] in ("q", "k", "v", "o", "wi_0", "wi_1", "wo")
            self.assertEqual(group["muon"], matrix, name)
            self.assertEqual(group["lr"], 2e-2)
            self.assertEqual(group["weight_decay"], 0.0 if "layer_norm" in name or "bias" in name else 0.1, name)
        self.assertEqual(optimizer.param_groups[0]["lr"], 2e-2)  # the one that is logged

    @parameterized.parameters("adam", "sgd", "adamw_bnb_8bit", "")
    def test_other_optimizers_are_refused(self, name):
        with self.assertRaisesRegex(ValueError, f"--optim {name}: must be one of adamw_rms_scaled, adamw_torch, "):
            arguments(optim=name)

    @parameterized.parameters(
        ("zero2", {}, ("adamw_rms_scaled", 2e-2), ""),
        ("zero2", {"optim": "muon"}, None, "--optim muon: .* ZeRO-2's .* use --optim adamw_rms_scaled"),
        ("zero2", {"optim": "adafactor"}, None, "--optim adafactor: .* ZeRO-2's .* use --optim adamw_rms_scaled"),
        ("zero3", {}, ("adamw_torch", 1e-3), "ZeRO-3 does not support .*; --optim adamw_torch with its own"),
        ("zero3", {"learning_rate": 4e-2}, None, "--learning_rate 0.04: .*adamw_rms_scaled.* --optim adamw_torch"),
        ("zero3", {"optim": "adamw_rms_scaled"}, None, "--optim adamw_rms_scaled: .*--optim adamw_torch"),
        ("zero3", {"optim": "adamw_torch", "learning_rate": 4e-4}, ("adamw_torch", 4e-4), ""),
        ("fsdp", {}, ("adamw_rms_scaled", 2e-2), ""),
        ("fsdp", {"optim": "muon"}, None, "--optim muon: .* FSDP2's slices .* use --optim adamw_rms_scaled"),
        ("fsdp", {"optim": "adafactor"}, None, "--optim adafactor: .* FSDP2's slices"),
    )
    def test_what_sharding_does_to_the_optimizer(self, sharding, flags, taken, message):
        args = PreTrainingArguments(output_dir="never_written", report_to=["none"], use_cpu=True, **flags)
        if sharding == "fsdp":
            args.fsdp = True
        else:
            args.hf_deepspeed_config = _zero(int(sharding[-1]))
        printed = io.StringIO()
        with mock.patch.object(PreTrainingArguments, "world_size", 2), contextlib.redirect_stdout(printed):
            if taken is None:
                with self.assertRaisesRegex(ValueError, message):
                    check_training(args, "pre-training from scratch")
                return
            check_training(args, "pre-training from scratch")
        self.assertEqual((args.optim, args.learning_rate), taken)
        self.assertRegex(printed.getvalue(), message or "^$")
