"""Single layers of transformers' T5 that are replaced or changed: names and weights stay as they are.

    fuse_activation(model)           # the feed-forward's GELU in one kernel: always on
    sum_bias_by_diagonals(model)     # the gradient of the relative biases, in a fixed order: T5Trainer asks for it
    checkpoint_blocks_only(model)    # --activation_checkpointing of whole blocks
    use_bf16_residual(model)         # --bf16_residual: activations between the layers in bfloat16

The bias of query q and key k depends on k - q alone: the Q x K places have only Q + K - 1 different values. torch's
embedding adds all Q x K x H gradients into the 32 rows of its table, on a GPU by atomic additions, whose order, and so
the last bits, change from run to run. Here gradients are first added along the diagonals of equal k - q, which gives
[H, Q + K - 1], and then into the rows.

Legend of shapes: N rows of the table of relative biases, Q queries, K keys, H heads.
"""

import math

import torch
from transformers.activations import NewGELUActivation

from foundry.modeling.families import stacks


class _TanhGELU(torch.nn.Module):
    """x (1 + tanh z) / 2 with z = sqrt(2 / pi) (x + 0.044715 x³) (Hendrycks and Gimpel 2016), of which torch has a
    kernel. Compiled for a CPU, the same as x sigmoid(2 z): torch's vector code of tanh takes twice as long."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() or x.device.type != "cpu":
            return torch.nn.functional.gelu(x, approximate="tanh")
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.sigmoid(math.sqrt(8 / math.pi) * (wide + 0.044715 * wide**3))).to(x.dtype)


def fuse_activation(model: torch.nn.Module) -> None:
    """Replaces transformers' tanh-GELU, eight operations, by one kernel; equal up to rounding.

    For the backward pass it keeps only its input, where the eight operations keep four intermediate results.
    """
    for module in model.modules():
        if isinstance(getattr(module, "act", None), NewGELUActivation):
            module.act = _TanhGELU()


def checkpoint_blocks_only(model: torch.nn.Module, reentrant: bool = False) -> None:
    """Limits `--activation_checkpointing` to whole blocks. reentrant: keeps the gradients of embedded tokens.

    transformers also makes two kinds of tensors require a gradient. For the attention modules' constant zeros that is
    useless. For the embedded tokens, reentrant checkpointing with frozen embeddings needs it; otherwise nothing uses
    it, and torch.compile refuses it.
    """
    for module in model.modules():
        if hasattr(module, "relative_attention_num_buckets"):
            module.gradient_checkpointing = False
    if not reentrant:
        model.disable_input_require_grads()


def as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor cast to autocast's type, as torch does for its own products; outside autocast as it is."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def use_bf16_residual(model: torch.nn.Module) -> None:
    """Gives the residual stream autocast's type, instead of float32, from the embedding on.

    Every layer then reads and writes half the bytes. T5's norms still compute in float32, as for all half types.
    """

    def to_autocast_dtype(_module, _args, embedded: torch.Tensor) -> torch.Tensor:
        return as_autocast(embedded)

    for stack in stacks(model):
        if not hasattr(stack, "residual_hook"):
            stack.residual_hook = stack.embed_tokens.register_forward_hook(to_autocast_dtype)


# ---------------------------------------------------------------- the relative biases
class _Biases(torch.autograd.Function):
    """The biases [Q, K, H], laid out in memory as [H, Q, K], from table [N, H] and buckets [Q, K], which are equal
    along diagonals."""

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
    """The embedding `relative_attention_bias`, whose gradient is added along diagonals first."""

    def forward(self, buckets):
        return _Biases.apply(self.weight, buckets) if buckets.dim() == 2 else super().forward(buckets)


def sum_bias_by_diagonals(model: torch.nn.Module) -> None:
    """Makes every `relative_attention_bias` of the model a `_BiasTable`; names and weights stay."""
    for module in model.modules():
        table = getattr(module, "relative_attention_bias", None)
        if isinstance(table, torch.nn.Embedding):
            table.__class__ = _BiasTable
