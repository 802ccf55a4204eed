"""Optimizers and schedules of T5: RMS-scaled AdamW, Adafactor as T5 uses it, the field's learning-rate schedules."""

import math
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor
from transformers import get_scheduler
from transformers.optimization import Adafactor

OPTIMIZERS = ("adamw_rms_scaled", "adamw_torch", "adamw_torch_fused", "adafactor", "muon")
OWN_SCHEDULES = ("cosine", "inverse_sqrt", "linear", "constant", "constant_with_warmup")
# These look at whole weight matrices; ZeRO hands an optimizer flat slices, on which they compute something else.
NEEDS_WHOLE_TENSORS = ("adamw_rms_scaled", "adafactor", "muon")
# FSDP2's slices know their whole: norms are right on them, but not the row and column means that Adafactor keeps, and
# Muon's products have not been tried on them.
NOT_UNDER_FSDP = ("adafactor", "muon")


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
            self._update_group(group)
        return loss

    def _update_group(self, group: dict) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        beta1, beta2 = group["betas"]
        # The rates stay on the device: asking for their values would make the CPU wait for the GPU at every tensor.
        rates = [_whole(norm).float() for norm in torch._foreach_norm(params)]
        torch._foreach_mul_(rates, [p.numel() ** -0.5 for p in params])
        torch._foreach_clamp_min_(rates, group["min_rms"])
        torch._foreach_mul_(rates, group["lr"])
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        steps = {}  # {steps taken: the same on the device}, nearly always one
        for p, rate in zip(params, rates, strict=True):
            state = self.state[p]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
            taken = state["step"]
            if taken not in steps:
                steps[taken] = torch.full((), float(taken), device=p.device)
            # torch's own kernel of AdamW, which reads and writes every number once, here with a rate for each tensor.
            # It adds eps to the corrected root of v, the rule above to the root itself.
            torch._fused_adamw_(
                [_here(p)],
                [_here(p.grad)],
                [_here(state["exp_avg"])],
                [_here(state["exp_avg_sq"])],
                [],
                [steps[taken]],
                lr=rate,
                beta1=beta1,
                beta2=beta2,
                weight_decay=0.0,
                eps=group["eps"] / math.sqrt(1 - beta2**taken),
                amsgrad=False,
                maximize=False,
            )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, under FSDP2 the one that all ranks make up together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, under FSDP2 this rank's slice of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class MuonWithAdamW(AdamWRMSScaled):
    """torch.optim.Muon for the matrices of the layers, AdamW for all else, all steps scaled by the tensor's RMS.

        tensors                                            rule
        q, k, v, o, wi*, wo of all layers (`matrices`)     Muon: momentum 0.95, nesterov, 5 Newton-Schulz steps
        embedding, head, norms, relative position bias     AdamWRMSScaled

    Muon's step is its orthogonalised momentum times 0.2 sqrt(larger side) ("match_rms_adamw"): of the size of AdamW's,
    whatever the shape. Times max(1e-3, rms(tensor)), as all steps here, one learning rate fits all tensors. Without
    that, T5's query projections, which begin eight times smaller than the others, outgrow them (results/LOG.md).
    Weight decay is decoupled. (Jordan et al. 2024; Liu et al. 2025, "Muon is scalable for LLM training".)
    """

    def __init__(self, params, matrices: set[int], lr=2e-2, **options):
        """matrices: id() of the tensors that Muon is for. Raises ValueError if none of `params` is among them."""
        groups = list(params)
        groups = groups if isinstance(groups[0], dict) else [{"params": groups}]
        rest = [g | {"params": [p for p in g["params"] if id(p) not in matrices], "muon": False} for g in groups]
        muon = [g | {"params": [p for p in g["params"] if id(p) in matrices], "muon": True} for g in groups]
        muon = [group for group in muon if group["params"]]
        if not muon:
            raise ValueError("Muon is for matrices, and there is none among the parameters")
        self._muon = torch.optim.Muon([p for group in muon for p in group["params"]], adjust_lr_fn="match_rms_adamw")
        settings = {name: self._muon.defaults[name] for name in self._muon.defaults.keys() - {"lr", "weight_decay"}}
        super().__init__([g for g in rest if g["params"]] + [settings | group for group in muon], lr=lr, **options)

    def _update_group(self, group: dict) -> None:
        if not group["muon"]:
            super()._update_group(group)
            return
        params = [p for p in group["params"] if p.grad is not None]
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        self._muon.state = self.state  # ours, so that saving and loading see one optimizer
        for p in params:
            # torch's Muon takes no rate that stays on the device. Its step depends on the gradient alone, so it is made
            # on zeros, and scaled before it is added.
            before, rate = p.clone(), (torch.linalg.vector_norm(p) * p.numel() ** -0.5).clamp_min(group["min_rms"])
            self._muon.param_groups = [group | {"params": [p.zero_()], "weight_decay": 0.0}]
            self._muon.step()
            p.mul_(rate).add_(before)


def layer_matrices(model: torch.nn.Module) -> set[int]:
    """id() of the weights of all linear layers but the head."""
    linears = (m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and not n.endswith("lm_head"))
    return {id(linear.weight) for linear in linears}


def optimizer_class_and_kwargs(args, model: torch.nn.Module | None = None) -> tuple[type, dict] | None:
    """What Trainer's `optimizer_cls_and_kwargs` takes for `args.optim`; None leaves torch's AdamW to Trainer itself.

    model: for "muon", whose matrices it names.
    """
    if args.optim in ("adamw_rms_scaled", "muon"):
        kwargs = dict(lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon)
        if args.optim == "muon":
            return MuonWithAdamW, kwargs | {"matrices": layer_matrices(model)}
        return AdamWRMSScaled, kwargs
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
