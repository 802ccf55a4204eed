"""The Triton kernel of bias_gradient.py: one program for a head, a block of queries and a block of keys.

A program walks over its examples, recomputes their scores and adds up dS in registers. Nothing is shared between
programs, so there are no atomics and the order of additions is fixed. Where there are fewer blocks than the GPU has
processors (short targets), the batch is split and the parts are added up afterwards, again in a fixed order.

Runs on a CPU with TRITON_INTERPRET=1 set before Triton is imported. To be imported only where triton is installed.
"""

import contextlib

import torch
import triton
import triton.language as tl

from experiments.fused_attention.bias_gradient import MASKED, Inputs, rows_dense

_ROWS = 32  # rows that one program of `_row_sums` adds up
_LOWEST = tl.constexpr(MASKED / 2)


@triton.jit
def _row_sums(grad_out, out, delta, rows, queries, heads, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """delta[b, h, q] = sum over d of grad_out[b, q, h, d] * out[b, q, h, d], both contiguous."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    places = row[:, None] * width + column[None, :]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    product = tl.load(grad_out + places, mask=inside, other=0.0).to(tl.float32)
    product *= tl.load(out + places, mask=inside, other=0.0).to(tl.float32)
    head = row % heads
    query = (row // heads) % queries
    example = row // (heads * queries)
    tl.store(delta + (example * heads + head) * queries + query, tl.sum(product, axis=1), mask=row < rows)


@triton.jit
def _bias_gradient(
    grad_out,
    q,
    k,
    v,
    bias,
    mask,
    lse,
    delta,
    result,
    batch,
    heads,
    queries,
    keys,
    width,
    scale,
    examples,
    q_batch,
    q_row,
    q_head,
    k_batch,
    k_row,
    k_head,
    v_batch,
    v_row,
    v_head,
    bias_head,
    bias_query,
    mask_batch,
    mask_head,
    mask_query,
    mask_key,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """result[part, h, q, k] = the sum of dS over the `examples` examples of a part of the batch. MASK: 0 no mask,
    1 bool, 2 additive floats.

    q, k, v: [B, S, H, D] with dense rows of D; grad_out contiguous; lse and delta contiguous [B, H, Q]; result
    contiguous.
    """
    key_blocks = tl.cdiv(keys, BLOCK_K)
    query_block = tl.program_id(0) // key_blocks
    key_block = tl.program_id(0) % key_blocks
    head = tl.program_id(1)
    part = tl.program_id(2)

    rows = query_block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    columns = key_block * BLOCK_K + tl.arange(0, BLOCK_K)
    d = tl.arange(0, WIDTH)
    row_in, column_in, d_in = rows < queries, columns < keys, d < width
    inside = row_in[:, None] & column_in[None, :]
    if CAUSAL:
        inside &= rows[:, None] >= columns[None, :]

    total = tl.zeros((BLOCK_Q, BLOCK_K), dtype=tl.float32)
    places = head.to(tl.int64) * bias_head + rows[:, None].to(tl.int64) * bias_query + columns[None, :]
    bias_block = tl.load(bias + places, mask=row_in[:, None] & column_in[None, :], other=0.0).to(tl.float32)
    across = heads * width  # stride from one token to the next
    at_rows = rows[:, None] * across + head * width + d[None, :]
    of_q = rows[:, None] * q_row + head * q_head + d[None, :]
    of_k = columns[None, :] * k_row + head * k_head + d[:, None]
    of_v = columns[None, :] * v_row + head * v_head + d[:, None]
    of_mask = head.to(tl.int64) * mask_head + rows[:, None].to(tl.int64) * mask_query
    of_mask += columns[None, :].to(tl.int64) * mask_key
    rows_in = row_in[:, None] & d_in[None, :]
    columns_in = d_in[:, None] & column_in[None, :]

    first = part.to(tl.int64) * examples
    count = tl.minimum(examples, batch - part * examples)
    if CAUSAL:  # a block whose keys all come after its queries adds nothing
        count = tl.where(query_block * BLOCK_Q + BLOCK_Q > key_block * BLOCK_K, count, 0)
    for step in range(0, count):
        example = first + step
        q_block = tl.load(q + example * q_batch + of_q, mask=rows_in, other=0.0)
        k_block = tl.load(k + example * k_batch + of_k, mask=columns_in, other=0.0)
        scores = tl.dot(q_block, k_block, input_precision=PRECISION) * scale + bias_block
        seen = inside
        if MASK > 0:
            given = tl.load(mask + example * mask_batch + of_mask, mask=inside, other=0)
            if MASK == 1:
                seen &= given != 0
            else:
                additive = given.to(tl.float32)
                scores += additive
                seen &= additive > _LOWEST
        of_rows = (example * heads + head) * queries + rows[:, None]
        logs = scores - tl.load(lse + of_rows, mask=row_in[:, None], other=0.0)
        # dO and V are loaded after the scores: before them they spill in exact float32 (Triton 3.6, sm_90).
        grad_block = tl.load(grad_out + example * queries * across + at_rows, mask=rows_in, other=0.0)
        v_block = tl.load(v + example * v_batch + of_v, mask=columns_in, other=0.0)
        change = tl.dot(grad_block, v_block, input_precision=PRECISION)
        change -= tl.load(delta + of_rows, mask=row_in[:, None], other=0.0)
        # `where` comes last: for hidden keys exp() may be inf, and inf * 0 is NaN.
        total += tl.where(seen, tl.exp(logs) * change, 0.0)

    spot = (part * heads + head).to(tl.int64) * queries * keys + rows[:, None].to(tl.int64) * keys + columns[None, :]
    tl.store(result + spot, total, mask=row_in[:, None] & column_in[None, :])


def batch_parts(batch: int, programs: int, device: torch.device) -> int:
    """Into how many parts the batch is split: enough for four programs on each processor of the GPU; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(batch, -(-4 * processors // programs)))


def bias_gradient_triton(
    grad_out: torch.Tensor,
    given: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    parts: int | None = None,
    tile: dict | None = None,
) -> torch.Tensor:
    """d(bias), float32 [1, H, Q, K]. Arguments as `experiments.fused_attention.bias_gradient.bias_gradient_torch`.

    parts (of the batch), tile (as `tile_of` answers): for benchmarks and tests; not set, they follow from the shapes.
    """
    (batch, queries, heads, width), keys, device = given.q.shape, given.k.shape[1], given.q.device
    tile = tile or tile_of(given.q.dtype, queries, keys, width)
    tiles = triton.cdiv(queries, tile["BLOCK_Q"]) * triton.cdiv(keys, tile["BLOCK_K"])
    parts = parts or batch_parts(batch, tiles * heads, device)
    examples = triton.cdiv(batch, parts)
    parts = triton.cdiv(batch, examples)
    result = torch.empty(parts, heads, queries, keys, dtype=torch.float32, device=device)
    delta = torch.empty(batch, heads, queries, dtype=torch.float32, device=device)
    grad_out, out, lse = (x.contiguous() for x in (grad_out, out, lse))
    q, k, v, bias = (rows_dense(x) for x in given[:4])
    kind, mask, mask_strides = 0, q, (0, 0, 0, 0)
    if given.mask is not None:
        mask = given.mask.expand(batch, heads, queries, keys)
        kind, mask_strides = (1 if mask.dtype == torch.bool else 2), mask.stride()
        mask = mask.view(torch.uint8) if kind == 1 else mask
    is_exact = q.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    strides = [x.stride(i) for x in (q, k, v) for i in range(3)] + [*bias.stride()[1:3], *mask_strides]
    rows, of_width = batch * queries * heads, power(width)
    # Triton would start the kernels on the current GPU.
    with torch.cuda.device(device) if q.is_cuda else contextlib.nullcontext():
        _row_sums[(triton.cdiv(rows, _ROWS),)](
            grad_out, out, delta, rows, queries, heads, width, ROWS=_ROWS, WIDTH=of_width
        )
        _bias_gradient[(tiles, heads, parts)](
            *(grad_out, q, k, v, bias, mask, lse, delta, result),
            *(batch, heads, queries, keys, width, float(given.scale), examples),
            *strides,
            CAUSAL=given.causal,
            MASK=kind,
            PRECISION="ieee" if is_exact else "tf32",
            WIDTH=of_width,
            **tile,
        )
    return result if parts == 1 else result.sum(0, keepdim=True)


def tile_of(dtype: torch.dtype, queries: int, keys: int, width: int) -> dict[str, int]:
    """The last arguments of `_bias_gradient`: the block of the bias that a program adds up, and how it is compiled.

    With these sizes ptxas keeps everything in registers on sm_90a. 128 x 128 spills; exact float32 products, which
    tensor cores do not have, spill from 64 x 64 on (tests/slow/test_triton_kernel.py compiles them).
    """
    largest = (128, 64) if width <= 64 else (64, 64)
    if dtype == torch.float32:
        largest = (32, 32)
    block_q, block_k = min(largest[0], power(queries)), min(largest[1], power(keys))
    warps = 8 if block_q * block_k * power(width) >= 2**19 else 4
    return dict(BLOCK_Q=block_q, BLOCK_K=block_k, num_warps=warps, num_stages=2)


def power(size: int) -> int:
    """The next power of two, at least 16: the smallest block that `tl.dot` multiplies."""
    return max(16, triton.next_power_of_2(size))
