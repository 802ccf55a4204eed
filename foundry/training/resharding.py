"""Checkpoints that any sharding can read: weights and optimizer states as whole tensors, by name.

    optimizer.pt    {"state": {"shared.weight": {"step": 40, "exp_avg": [V, D], ...}, ...}, "param_groups": [options]}

One process, DDP, FSDP2 and DeepSpeed's ZeRO all write this file, and a run of any of them can resume from it. To save,
all ranks gather one tensor at a time, and the first rank keeps it in CPU memory. To load, every rank maps the file into
memory and reads its own slices.

Legend of shapes: V vocabulary, D d_model.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from foundry.common.errors import UserError


def whole_state(model: nn.Module, optimizer: Optimizer, keep: bool) -> dict:
    """The content of optimizer.pt. All ranks must call this, since it gathers tensors. keep: whether this rank keeps
    them; otherwise "state" is empty."""
    states, zero = {}, _is_zero(optimizer)
    if zero:
        _link(optimizer)
    for name, p in model.named_parameters():
        if p.requires_grad:
            gathered = _gathered_by_zero(optimizer, p) if zero else _gathered(optimizer.state.get(p, {}))
            states |= {name: gathered} if keep else {}
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return {"state": states, "param_groups": groups}


def load_state(model: nn.Module, optimizer: Optimizer, path: Path) -> list[dict]:
    """Loads the states of optimizer.pt into an optimizer, whose options, such as the learning rate, stay as they are.
    Returns the file's options, one dictionary for each group. UserError unless the file has the states of the trained
    tensors and of no others."""
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    on_cpu = next(iter(names)).device.type == "cpu"  # on a CPU the states would remain views of the mapped file
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=not on_cpu)
    states, params = saved["state"], [p for group in optimizer.param_groups for p in group["params"]]
    if wrong := states.keys() ^ names.values():
        raise UserError(f"{path}: it was saved while other tensors were trained; compare {min(wrong)}")
    if _is_zero(optimizer):
        _load_into_zero(optimizer, names, states)
    else:
        own = {place: _sliced(states[names[p]], p) for place, p in enumerate(params)}
        optimizer.load_state_dict({"state": own, "param_groups": optimizer.state_dict()["param_groups"]})
    return saved["param_groups"]


@torch.no_grad()
def put_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copies these weights into the model, on each rank its slices, and into DeepSpeed's float32 copies of them. Names
    that the model lacks are ignored."""
    for name, p in model.named_parameters(remove_duplicate=False):
        if name in weights:
            _put(p, weights[name])


def float32_weights(model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
    """{name: the float32 copy of a trained weight that DeepSpeed's optimizer holds}. All ranks must call this, since it
    gathers tensors. keep: whether this rank keeps them; otherwise it gets {}."""
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            weight = safe_get_full_fp32_param(p)
            weights |= {name: weight.cpu()} if keep else {}
    return weights


# ---------------------------------------------------------------- one process, DDP and FSDP2
def _gathered(state: dict[str, Any]) -> dict[str, Any]:
    """The optimizer state of one tensor, whole: under FSDP2 it is gathered from all ranks."""
    return {key: v.full_tensor().cpu() if isinstance(v, DTensor) else v for key, v in state.items()}


def _sliced(state: dict[str, Any], p: nn.Parameter) -> dict[str, Any]:
    """The optimizer state of one tensor as this rank holds it: under FSDP2 its slices, else the whole state."""
    return {key: _slice(v, p) if torch.is_tensor(v) and v.shape == p.shape else v for key, v in state.items()}


def _slice(value: torch.Tensor, p: nn.Parameter) -> torch.Tensor:
    if not isinstance(p, DTensor):
        return value
    return distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)  # None: every rank has the value


# ---------------------------------------------------------------- ZeRO
def _is_zero(optimizer: Optimizer) -> bool:
    """Whether this is DeepSpeed's optimizer, which wraps torch's as its attribute `optimizer`."""
    return hasattr(optimizer, "optimizer")


def _is_zero3(p: nn.Parameter) -> bool:
    """Whether ZeRO-3 has cut the tensor."""
    return hasattr(p, "ds_id")


def _by_element(state: dict[str, Any]) -> list[str]:
    """The keys of a state whose values have one number for each number of the tensor: all but `step`."""
    return [key for key, value in state.items() if torch.is_tensor(value) and value.dim()]


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """The entries of a state that `_by_element` leaves out. Tensors are copied: `step` is counted in place, so tensors
    must not share it."""
    rest = state.keys() - _by_element(state)
    return {key: state[key].clone() if torch.is_tensor(state[key]) else state[key] for key in rest}


def _link(zero: Any) -> None:
    """Makes ZeRO-1 and 2 link each tensor to its part of their flat states. By themselves they do so after the first
    group's first step, when the other groups have no states yet."""
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _gathered_by_zero(zero: Any, p: nn.Parameter) -> dict[str, Any]:
    """The optimizer state of one tensor, whole, as one process would have it. ZeRO's own states belong to flat slices
    of many tensors, all with the same step."""
    from deepspeed.utils import safe_get_full_optimizer_state

    flat = next(iter(zero.optimizer.state.values()))
    return _copied(flat) | {key: safe_get_full_optimizer_state(p, key).cpu() for key in _by_element(flat)}


def _load_into_zero(zero: Any, names: dict[nn.Parameter, str], states: dict[str, dict]) -> None:
    """Creates the states of ZeRO's flat slices, which ZeRO itself would create in its first step, and fills in each
    tensor's part."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    base, has_slices = zero.optimizer, any(map(_is_zero3, names))
    if has_slices:  # ZeRO-3's groups are empty between steps
        zero._set_fp32_optimizer_param_groups()
    flats = [flat for group in base.param_groups for flat in group["params"]]
    example = next(iter(states.values()))
    empty = [_copied(example) | {key: torch.zeros_like(flat) for key in _by_element(example)} for flat in flats]
    base.load_state_dict({"state": dict(enumerate(empty)), "param_groups": base.state_dict()["param_groups"]})
    if has_slices:
        zero._clear_fp32_optimizer_param_groups()
    _link(zero)
    for p, name in names.items():
        for key in _by_element(states[name]):
            if has_slices:
                safe_set_local_optimizer_state(p, _slice_of_zero3(states[name][key], p), key)
            else:
                safe_set_full_optimizer_state(p, states[name][key], key)


def _slice_of_zero3(value: torch.Tensor, p: nn.Parameter) -> torch.Tensor:
    """This rank's slice of a whole tensor, as ZeRO-3 cuts it: flat, of the same size on all ranks, padded at the
    end."""
    size = p.ds_tensor.numel()
    part = value.flatten()[torch.distributed.get_rank() * size :][:size]
    return nn.functional.pad(part, (0, size - part.numel()))


def _put(p: nn.Parameter, value: torch.Tensor) -> None:
    if _is_zero3(p):
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_set_local_fp32_param

        safe_set_local_fp32_param(p, _slice_of_zero3(value, p))
        with GatheredParameters(p, modifier_rank=0):
            p.copy_(value)
        return
    if hasattr(p, "_hp_mapping"):  # ZeRO-1 and 2
        from deepspeed.utils import safe_set_full_fp32_param

        safe_set_full_fp32_param(p, value)
    p.copy_(_slice(value, p))
