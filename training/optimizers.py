"""Optimizers and schedules of T5: RMS-scaled AdamW, Adafactor as T5 uses it, the field's learning-rate schedules."""

import math
from collections.abc import Callable

import torch
from transformers import get_scheduler
from transformers.optimization import Adafactor

OPTIMIZERS = ("adamw_rms_scaled", "adamw_torch", "adamw_torch_fused", "adafactor")
OWN_SCHEDULES = ("cosine", "inverse_sqrt", "linear", "constant", "constant_with_warmup")
# These two look at whole weight matrices; ZeRO hands an optimizer flat slices, on which they compute something else.
NEEDS_WHOLE_TENSORS = ("adamw_rms_scaled", "adafactor")
# FSDP2's slices know their whole: norms are right on them, but not the row and column means that Adafactor keeps.
NOT_UNDER_FSDP = ("adafactor",)


class AdamWRMSScaled(torch.optim.Optimizer):
    """AdamW whose step on each tensor is multiplied by max(1e-3, rms(tensor)), as Adafactor's steps are.

    T5's weights differ in scale by orders of magnitude (embeddings of deviation 1, projections of 1/sqrt(d)), and one
    learning rate then means the same relative change for all of them: hence learning rates like 2e-2. The rule is
        p <- p - lr * max(min_rms, rms(p)) * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps) - lr * weight_decay * p
    (nanoT5's AdamWScale; Adafactor's parameter scaling, Shazeer & Stern 2018, section 8).
    """

    def __init__(self, params, lr=2e-2, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, min_rms=1e-3):
        if lr < 0 or eps <= 0 or not all(0 <= b < 1 for b in betas):
            raise ValueError(f"lr {lr} and eps {eps} must not be negative, betas {betas} must lie in [0, 1)")
        super().__init__(params, dict(lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, min_rms=min_rms))

    @torch.no_grad()
    def step(self, closure=None):
        """One update of all parameters that have a gradient; returns the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(params, group)
        return loss

    def _update(self, params: list[torch.Tensor], group: dict) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p].update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            self.state[p]["step"] += 1
        grads = [p.grad for p in params]
        first = [self.state[p]["exp_avg"] for p in params]
        second = [self.state[p]["exp_avg_sq"] for p in params]
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        denominators = torch._foreach_sqrt(second)
        torch._foreach_add_(denominators, group["eps"])

        norms = torch._foreach_norm(params)
        for p, m, denominator, norm in zip(params, first, denominators, norms, strict=True):
            step = self.state[p]["step"]
            correction = math.sqrt(1 - beta2**step) / (1 - beta1**step)
            # The scale stays on the device: asking for its value would make the CPU wait for the GPU at every tensor.
            scale = (norm / math.sqrt(p.numel())).clamp_(min=group["min_rms"]) * (group["lr"] * correction)
            if group["weight_decay"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_(m.div(denominator).mul_(scale))


def optimizer_class_and_kwargs(args) -> tuple[type, dict] | None:
    """What Trainer's `optimizer_cls_and_kwargs` takes for `args.optim`; None leaves torch's AdamW to Trainer itself."""
    if args.optim == "adamw_rms_scaled":
        betas = (args.adam_beta1, args.adam_beta2)
        return AdamWRMSScaled, dict(lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)
    if args.optim == "adafactor":
        # T5's own use: factored second moments, steps scaled by the tensor's RMS, no momentum, our schedule.
        return Adafactor, dict(lr=args.learning_rate, scale_parameter=True, relative_step=False, warmup_init=False)
    return None


def learning_rate_factor(
    name: str,
    total_steps: int,
    warmup_steps: int,
    warmup_start: float = 0.0,
    floor: float = 0.0,
) -> Callable[[int], float]:
    """Returns step -> learning rate as a fraction of the peak.

    warmup_start: fraction at step 0, from which the warm-up rises linearly to 1 (nanoT5: 0.5); floor: fraction at the
    last step of "cosine" and "linear". "inverse_sqrt" is T5's sqrt(w / max(step, w)) for w warm-up steps, with no
    rise from zero: peak 0.01 and w 10,000 are 1 / sqrt(max(step, 10^4)).
    """
    warmup = max(warmup_steps, 1)

    def factor(step: int) -> float:
        if name == "inverse_sqrt":
            return math.sqrt(warmup / max(step, warmup))
        if name == "constant":
            return 1.0
        if step < warmup_steps:
            return warmup_start + (1.0 - warmup_start) * step / warmup
        if name == "constant_with_warmup":
            return 1.0
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        shape = 0.5 * (1.0 + math.cos(math.pi * progress)) if name == "cosine" else 1.0 - progress
        return floor + (1.0 - floor) * shape

    return factor


def scheduler_name(args) -> str:
    """`--lr_scheduler_type` as a plain word; transformers makes an enumeration of it."""
    return getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)


def build_scheduler(args, optimizer: torch.optim.Optimizer, total_steps: int):
    """The schedule of `--lr_scheduler_type`: ours above, every other name as transformers defines it."""
    name = scheduler_name(args)
    warmup_steps = args.get_warmup_steps(total_steps)
    if name not in OWN_SCHEDULES or args.lr_scheduler_kwargs:
        return get_scheduler(
            name,
            optimizer=optimizer,
            num_warmup_steps=warmup_steps,
            num_training_steps=total_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
    floor = args.final_learning_rate / args.learning_rate if args.learning_rate else 0.0
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, learning_rate_factor(name, total_steps, warmup_steps, args.warmup_start_factor, floor)
    )
