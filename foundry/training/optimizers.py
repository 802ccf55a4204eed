"""Optimizers and schedules of T5: RMS-scaled AdamW, Muon, T5's Adafactor, and the usual learning-rate schedules."""

import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import get_scheduler
from transformers.optimization import Adafactor

from foundry.arguments.training import BY_METRIC
from foundry.common.errors import UserError
from foundry.common.machine import bf16_units
from foundry.common.terminal import print_once
from foundry.modeling.families import output_head

DECAYING = ("cosine", "linear")  # to their floor, at the end of the run
OWN_SCHEDULES = (*DECAYING, "inverse_sqrt", "constant", "constant_with_warmup")


class AdamWRMSScaled(torch.optim.Optimizer):
    """AdamW whose step on each tensor is multiplied by max(1e-3, rms(tensor)), as Adafactor's steps are.

    T5's weights differ in scale by orders of magnitude (embeddings of deviation 1, projections of 1/sqrt(d)). With this
    factor one learning rate means the same relative change for all of them, hence rates like 2e-2. The rule is
        p <- p - lr * max(min_rms, rms(p)) * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps) - lr * weight_decay * p
    (nanoT5's AdamWScale, which decays after the step; Adafactor's parameter scaling, Shazeer & Stern 2018, section 8).

    sliced: ZeRO-1 or 2 will replace each group's tensors by this rank's flat slice of them. Every tensor then gets a
    group of its own, and its RMS is taken from the model's tensor, which these stages keep whole.

    ValueError if lr, eps or betas are out of range.
    """

    together = 2**25  # numbers updated at a time on a GPU, where one kernel per tensor would be too many

    def __init__(self, params, lr=2e-2, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, min_rms=1e-3, sliced=False):
        if lr < 0 or eps <= 0 or not all(0 <= b < 1 for b in betas):
            raise ValueError(f"lr {lr}, eps {eps} and betas {betas} must be at least 0, above 0, and in [0, 1)")
        self._unsliced = None  # if sliced: the model's tensor of each group
        if sliced:
            self._unsliced = []
            groups = []
            # "whole" stands in the groups that a checkpoint saves: the number of the model's tensor.
            for group in _as_groups(params):
                for p in group["params"]:
                    groups.append(group | {"params": [p], "whole": len(self._unsliced)})
                    self._unsliced.append(p)
            params = groups
        super().__init__(params, dict(lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, min_rms=min_rms))

    @torch.no_grad()
    def step(self, closure=None):
        """One update of all parameters that have a gradient; returns the closure's loss, if one is given."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            self._update_group(group)
        return loss

    def _update_group(self, group: dict) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        tensors = [self._unsliced[group["whole"]]] if self._unsliced else params
        rates = _sizes(tensors, group["min_rms"])
        rates = [rate.to(p.device) for rate, p in zip(rates, params, strict=True)]
        torch._foreach_mul_(rates, group["lr"])
        if decay := group["lr"] * group["weight_decay"]:
            torch._foreach_mul_([_here(p) for p in params], 1 - decay)
        by_steps = {}  # {steps taken: places of the tensors}, nearly always one entry
        for place, p in enumerate(params):
            state = self.state[p]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
            by_steps.setdefault(state["step"], []).append(place)
        beta1, beta2 = group["betas"]
        together = self.together if params[0].is_cuda else 0
        for taken, places in by_steps.items():
            # torch's kernel adds eps to sqrt(v) after the bias correction, the class's rule before it.
            rule = dict(beta1=beta1, beta2=beta2, weight_decay=0.0, eps=group["eps"] / math.sqrt(1 - beta2**taken))
            rule |= dict(amsgrad=False, maximize=False)
            count = torch.full((), float(taken), device=params[0].device)
            for part in _parts([params[place].numel() for place in places], together):
                chosen = [places[i] for i in part]
                self._update([params[i] for i in chosen], [rates[i] for i in chosen], count, rule)

    def _update(self, params: list, rates: list, count: torch.Tensor, rule: dict) -> None:
        """Applies the rule with torch's fused AdamW kernel, which reads and writes every number once but takes one rate
        for all tensors. It updates a single tensor in place; for several it computes unscaled steps, which are then
        scaled and added."""
        weights = [_here(p) for p in params]
        gradients = [_here(p.grad) for p in params]
        means = [_here(self.state[p]["exp_avg"]) for p in params]
        squares = [_here(self.state[p]["exp_avg_sq"]) for p in params]
        counts = [count] * len(params)
        if len(params) == 1:
            torch._fused_adamw_(weights, gradients, means, squares, [], counts, lr=rates[0], **rule)
            return
        sizes = [w.numel() for w in weights]
        steps = torch.zeros(sum(sizes), dtype=weights[0].dtype, device=weights[0].device).split(sizes)
        steps = [step.view_as(w) for step, w in zip(steps, weights, strict=True)]
        torch._fused_adamw_(steps, gradients, means, squares, [], counts, lr=1.0, **rule)
        torch._foreach_addcmul_(weights, steps, rates)


def _parts(sizes: list[int], together: int) -> list[list[int]]:
    """Lists of the places of neighbouring tensors, which together have at most `together` numbers; a larger tensor is
    alone."""
    parts, room = [], 0
    for place, size in enumerate(sizes):
        if not parts or size > room:
            parts.append([])
            room = together
        parts[-1].append(place)
        room -= size
    return parts


def _as_groups(params) -> list[dict]:
    """Parameter groups, made from parameters or from groups of them."""
    groups = list(params)
    return groups if isinstance(groups[0], dict) else [{"params": groups}]


def _sizes(params: list[torch.Tensor], least: float) -> list[torch.Tensor]:
    """max(least, rms) of each tensor, as a tensor on its device: reading the value would make the CPU wait for the GPU
    at every tensor."""
    norms = torch._foreach_norm(params, dtype=torch.float32)  # params are bf16 under ZeRO
    rms = [_full_tensor(norm) for norm in norms]
    torch._foreach_mul_(rms, [p.numel() ** -0.5 for p in params])
    torch._foreach_clamp_min_(rms, least)
    return rms


def _full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; under FSDP2 the whole one, gathered from all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; under FSDP2 this rank's slice of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)  # a, b, c of a X + b (X X^T) X + c (X X^T)^2 X, from Jordan et al. 2024
_STACK = 2**25  # numbers orthogonalised at a time


def orthogonalised(matrices: torch.Tensor, dtype: torch.dtype, steps: int = 5, eps: float = 1e-7) -> torch.Tensor:
    """The matrices [N, m, n], m <= n, in `dtype`, with all singular values brought near 1 (0.7 to 1.2).

    The quintic Newton-Schulz iteration of torch.optim.Muon, on all matrices of a shape at once.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(dtype)
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _product_dtype(device: torch.device) -> torch.dtype:
    """The type in which `orthogonalised` is fastest: bfloat16, but float32 on a CPU without instructions for
    bfloat16."""
    return torch.float32 if device.type == "cpu" and not bf16_units() else torch.bfloat16


class MuonWithAdamW(AdamWRMSScaled):
    """Muon for the matrices of the layers, AdamW for all else, all steps scaled by the tensor's RMS.

        tensors                                            rule
        q, k, v, o, wi*, wo of all layers (`matrices`)     Muon: momentum 0.95, nesterov, 5 Newton-Schulz steps
        embedding, head, norms, relative position bias     AdamWRMSScaled

    Muon's step is its orthogonalised momentum times 0.2 sqrt(larger side), as torch.optim.Muon's ("match_rms_adamw"):
    it is as large as AdamW's, whatever the matrix's shape. Like all steps here it is multiplied by
    max(1e-3, rms(tensor)), so that one learning rate fits all tensors. Without this factor T5's query projections,
    which begin eight times smaller than the others, outgrow them (results/LOG.md). T5's hundreds of matrices have two
    shapes, so they are orthogonalised in stacks. Weight decay is decoupled. (Jordan et al. 2024; Liu et al. 2025, "Muon
    is scalable for LLM training".)
    """

    def __init__(self, params, matrices: set[int], lr=2e-2, momentum=0.95, **options):
        """matrices: id() of the tensors that Muon updates. Raises ValueError if none of `params` is among them."""
        rest, muon = [], []
        for group in _as_groups(params):
            others = [p for p in group["params"] if id(p) not in matrices]
            if others:
                rest.append(group | {"params": others, "muon": False})
            of_muon = [p for p in group["params"] if id(p) in matrices]
            if of_muon:
                muon.append(group | {"params": of_muon, "muon": True, "momentum": momentum})
        if not muon:
            raise ValueError("Muon is for matrices, and there is none among the parameters")
        super().__init__(rest + muon, lr=lr, **options)

    def _update_group(self, group: dict) -> None:
        if not group["muon"]:
            super()._update_group(group)
            return
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        gradients = [p.grad for p in params]
        momentum = group["momentum"]
        buffers = []
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            buffers.append(self.state[p]["momentum_buffer"])
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        directions = torch._foreach_lerp(gradients, buffers, momentum)  # Nesterov's
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        rates = _sizes(params, group["min_rms"])
        torch._foreach_mul_(rates, [group["lr"] * 0.2 * max(p.shape) ** 0.5 for p in params])
        wide = [direction if direction.shape[0] <= direction.shape[1] else direction.mT for direction in directions]
        dtype = _product_dtype(params[0].device)
        for stack in _stacks(wide):
            steps = orthogonalised(torch.stack([wide[i] for i in stack]), dtype).float()
            steps *= torch.stack([rates[i] for i in stack])[:, None, None]
            chosen = [params[i] for i in stack]
            turned = []
            for p, step in zip(chosen, steps, strict=True):
                turned.append(step if p.shape == step.shape else step.mT)
            torch._foreach_sub_(chosen, turned)


def _stacks(matrices: list[torch.Tensor]) -> list[list[int]]:
    """Lists of the places of matrices of one shape, which together have at most _STACK numbers; a larger matrix is
    alone."""
    by_shape = {}
    for place, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(place)
    stacks = []
    for shape, places in by_shape.items():
        together = max(1, _STACK // shape.numel())
        for start in range(0, len(places), together):
            stacks.append(places[start : start + together])
    return stacks


def layer_matrices(model: torch.nn.Module) -> set[int]:
    """id() of the weight of every linear layer except the head."""
    head = output_head(model)
    return {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head}


def check_muon(args, model: torch.nn.Module) -> None:
    """UserError if `--optim muon` would train no matrix of a layer."""
    matrices = layer_matrices(model)
    if args.optim == "muon" and not any(id(p) in matrices for p in model.parameters() if p.requires_grad):
        raise UserError(
            "--optim muon: is for the matrices of layers, and --train_only trains none: give another --optim"
        )


def optimizer_class_and_kwargs(args, model: torch.nn.Module | None = None) -> tuple[type, dict] | None:
    """(class, its arguments) of the optimizer for `args.optim`, as Trainer's `optimizer_cls_and_kwargs` takes them;
    None where Trainer itself builds the optimizer. model: needed for "muon", to find the matrices.
    """
    if args.optim in ("adamw_rms_scaled", "muon"):
        kwargs = dict(lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon)
        if args.optim == "muon":
            return MuonWithAdamW, kwargs | {"matrices": layer_matrices(model)}
        return AdamWRMSScaled, kwargs | {"sliced": bool(args.deepspeed)}
    if args.optim == "adafactor":
        # As T5 used it: factored second moments, steps scaled by the tensor's RMS, no momentum. Its own relative steps
        # are off, since our schedule sets the rate. Unlike here, T5X does not factor matrices with a side below 128,
        # which in T5 are the relative position biases.
        return Adafactor, dict(lr=args.learning_rate, scale_parameter=True, relative_step=False, warmup_init=False)
    return None


def learning_rate_factor(
    name: str, total_steps: float, warmup_steps: int, warmup_start: float = 0.0, floor: float = 0.0
) -> Callable[[float], float]:
    """A function from the step to the learning rate, as a fraction of the peak.

    warmup_start: fraction at step 0, from which the warm-up rises linearly to 1 (nanoT5: 0.5); floor: fraction at the
    last step of "cosine" and "linear". "inverse_sqrt" is T5's sqrt(w / max(step, w)) for w warm-up steps, with no rise
    from zero: with peak 0.01 and w 10,000 the rate is 1 / sqrt(max(step, 10^4)).
    """
    warmup = max(warmup_steps, 1)

    def factor(step: float) -> float:
        if name == "inverse_sqrt":
            return math.sqrt(warmup / max(step, warmup))
        if name == "constant":
            return 1.0
        if step < warmup_steps:
            return warmup_start + (1.0 - warmup_start) * step / warmup
        if name == "constant_with_warmup":
            return 1.0
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        shape = 1.0 - progress
        if name == "cosine":
            shape = 0.5 * (1.0 + math.cos(math.pi * progress))
        return floor + (1.0 - floor) * shape

    return factor


def least_greedy_rate(args) -> float:
    """The rate below which `--lr_scheduler_type greedy` does not go. transformers' 1e-3, whatever the rate is, would be
    at or above the rate of most runs, which then only rises."""
    least = args.learning_rate * args.final_learning_rate_factor
    return (args.lr_scheduler_kwargs or {}).get("min_lr", least)


def build_scheduler(args, optimizer: torch.optim.Optimizer, total_steps: int, reached: tuple[int, float] | None = None):
    """The schedule of `--lr_scheduler_type`: by `learning_rate_factor` if it is one of OWN_SCHEDULES, else, or if
    `--lr_scheduler_kwargs` are given, as transformers defines it.

    reached: (step, share of the run's rows that are read by then), where a run of epochs goes on with batches of
    another size: our schedules that decay to an end do so over the rows, of which a step reads another share now."""
    name, warmup_steps = args.lr_scheduler_type, args.get_warmup_steps(total_steps)
    if name not in OWN_SCHEDULES or args.lr_scheduler_kwargs:
        options: dict[str, Any] = {"mode": "max" if args.greater_is_better else "min"} if name in BY_METRIC else {}
        if name == "greedy":
            options["min_lr"] = least_greedy_rate(args)
        return get_scheduler(name, optimizer, warmup_steps, total_steps, options | (args.lr_scheduler_kwargs or {}))
    start, floor = args.warmup_start_factor, args.final_learning_rate_factor
    if reached is None or name not in DECAYING:
        factor = learning_rate_factor(name, total_steps, warmup_steps, start, floor)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    step_before, share = reached
    steps = (total_steps - step_before) / max(1e-9, 1 - share)  # steps of a run with these batches from the beginning
    factor = learning_rate_factor(name, steps, args.get_warmup_steps(round(steps)), start, floor)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(share * steps + step - step_before))


def restore_schedule(optimizer: torch.optim.Optimizer, schedule, saved: dict, before: list[dict]) -> None:
    """Sets the schedule to the checkpoint's step, and the optimizer to the rate that the flags given now ask for at
    that step; prints what they change. A schedule that follows the evaluations continues from the rate that it had
    reached.

    saved: the checkpoint's schedule. Its lists have an entry for each group of the optimizer and are not restored,
    since another sharding has other groups. before: the options of the checkpoint's groups.
    """
    now, reached = optimizer.param_groups, before[0]["lr"]
    by_step = isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
    place = {name: value for name, value in saved.items() if not isinstance(value, list)}
    schedule.load_state_dict(schedule.state_dict() | place)
    for index, group in enumerate(now):
        group["lr"] = reached
        if by_step:
            group["lr"] = schedule.base_lrs[index] * schedule.lr_lambdas[index](schedule.last_epoch)
    schedule._last_lr = [group["lr"] for group in now]
    if not by_step:
        print_once(f"--learning_rate is not used: the schedule continues from {reached:g}, its rate at the checkpoint")
        return
    for name, flag in (("initial_lr", "learning_rate"), ("weight_decay", "weight_decay")):
        had, has = (max(group.get(name, 0.0) for group in groups) for groups in (before, now))
        if had != has:
            print_once(f"--{flag} {has:g} from here on, {had:g} before")
    if not math.isclose(reached, now[0]["lr"], rel_tol=1e-6):
        print_once(f"learning rate: {now[0]['lr']:.4g} from here on, {reached:.4g} before")


def check_schedule(args, total_steps: int) -> None:
    """UserError if `--lr_scheduler_kwargs` lacks arguments that transformers' schedule needs, or has unknown or wrong
    ones."""
    try:
        if args.lr_scheduler_kwargs and args.lr_scheduler_type in ("constant", "constant_with_warmup"):
            raise ValueError("this schedule takes none")  # transformers drops them
        schedule = build_scheduler(args, torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate), total_steps)
        if isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
            for step in (total_steps // 2, total_steps):  # a wrong value shows only after the warm-up
                schedule.lr_lambdas[0](step)
    except (TypeError, ValueError, ArithmeticError) as error:
        given = json.dumps(args.lr_scheduler_kwargs or {})
        flags = f"--lr_scheduler_type {args.lr_scheduler_type} with --lr_scheduler_kwargs '{given}'"
        raise UserError(f"{flags}: {error}") from None
