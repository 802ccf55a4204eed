"""Single layers of transformers' T5 that are replaced or changed: names and weights stay as they are.

    fuse_activation(model)           # the feed-forward's GELU in one kernel: always on
    sum_bias_by_diagonals(model)     # the gradient of the relative biases, in a fixed order: T5Trainer asks for it
    checkpoint_blocks_only(model)    # --activation_checkpointing of whole blocks
    use_bf16_residual(model)         # --bf16_residual: activations between the layers in bfloat16

The bias of query q and key k depends on k - q alone: of Q x K places only Q + K - 1 differ. torch's embedding adds up
all Q x K x H gradients in the table's 32 rows, on a GPU by atomic additions, whose order and last bits change from run
to run. Here they are added along diagonals first, [H, Q + K - 1], then into the rows.

Legend of shapes: N rows of the table of biases, Q queries, K keys, H heads.
"""

import torch
from transformers.activations import NewGELUActivation

from modeling.families import stacks


def fuse_activation(model: torch.nn.Module) -> None:
    """Replaces transformers' tanh-GELU of eight operations by torch's, which is one kernel; equal up to rounding.

    For the backward pass it keeps its input alone, in place of four intermediate results.
    """
    for module in model.modules():
        if isinstance(getattr(module, "act", None), NewGELUActivation):
            module.act = torch.nn.GELU(approximate="tanh")


def checkpoint_blocks_only(model: torch.nn.Module, reentrant: bool = False) -> None:
    """Keeps `--activation_checkpointing` to whole blocks: in attention modules transformers would only make constant
    zeros ask for a gradient. It lets the embedded tokens ask for one too, which frozen embeddings need if checkpointing
    is reentrant. Else nothing uses these gradients, and torch.compile refuses them."""
    for module in model.modules():
        if hasattr(module, "relative_attention_num_buckets"):
            module.gradient_checkpointing = False
    if not reentrant:
        model.disable_input_require_grads()


def as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in autocast's type, as torch's own products get it; outside autocast as it is."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def use_bf16_residual(model: torch.nn.Module) -> None:
    """Under autocast the residual stream has autocast's type from the embedding on, instead of float32.

    Every layer then reads and writes half the bytes; norms are still computed in float32, as T5's do for half types.
    """

    def to_autocast_dtype(_module, _args, embedded: torch.Tensor) -> torch.Tensor:
        return as_autocast(embedded)

    for stack in stacks(model):
        if not hasattr(stack, "residual_hook"):
            stack.residual_hook = stack.embed_tokens.register_forward_hook(to_autocast_dtype)


# ---------------------------------------------------------------- the relative biases
class _Biases(torch.autograd.Function):
    """table [N, H], buckets [Q, K] (equal along diagonals) -> [Q, K, H], in memory [H, Q, K]."""

    @staticmethod
    def forward(ctx, table, buckets):
        queries, keys = buckets.shape
        of_diagonals = torch.cat([buckets[1:, 0].flip(0), buckets[0]])  # k - q from 1 - Q to K - 1
        ctx.save_for_backward(of_diagonals)
        ctx.rows = len(table)
        diagonals = table[of_diagonals].T.contiguous()
        return along_diagonals(diagonals, keys).contiguous().permute(1, 2, 0)

    @staticmethod
    def backward(ctx, grad):
        (of_diagonals,) = ctx.saved_tensors
        sums = diagonal_sums(grad.permute(2, 0, 1))
        chosen = of_diagonals == torch.arange(ctx.rows, device=grad.device)[:, None]  # [N, Q + K - 1]
        return torch.where(chosen[:, None], sums, 0).sum(-1), None


def diagonal_sums(matrices: torch.Tensor) -> torch.Tensor:
    """[H, Q, K] -> [H, Q + K - 1] sums of the places with k - q = 1 - Q, ..., K - 1: [[1, 2], [3, 4]] -> 3 5 2.

    With the rows reversed, zeros behind each, and each row shifted by one place, a diagonal is a column.
    """
    heads, queries, keys = matrices.shape
    padded = torch.nn.functional.pad(matrices.flip(1), (0, queries)).flatten(1)
    return padded[:, : queries * (queries + keys - 1)].unflatten(1, (queries, queries + keys - 1)).sum(1)


def along_diagonals(values: torch.Tensor, keys: int) -> torch.Tensor:
    """[H, Q + K - 1] -> [H, Q, K] with these values at k - q = 1 - Q, ..., K - 1: 3 5 2 -> [[5, 2], [3, 5]]."""
    return values.unfold(1, keys, 1).flip(1)


class _BiasTable(torch.nn.Embedding):
    """The embedding `relative_attention_bias`, with this gradient."""

    def forward(self, buckets):
        return _Biases.apply(self.weight, buckets) if buckets.dim() == 2 else super().forward(buckets)


def sum_bias_by_diagonals(model: torch.nn.Module) -> None:
    """Gives every `relative_attention_bias` of the model this gradient; names and weights stay."""
    for module in model.modules():
        table = getattr(module, "relative_attention_bias", None)
        if isinstance(table, torch.nn.Embedding):
            table.__class__ = _BiasTable
