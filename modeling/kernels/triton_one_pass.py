"""The backward pass of T5's attention in one Triton kernel: the scores recomputed once for dq, dk, dv and d(bias).

bias_gradient.py makes a second pass over dS, after a library's backward pass that has had all of it in registers. Here
a program serves one example and head, and walks over blocks of keys and, within each, of queries. dk and dv of a block
stay in registers. dq is added up in the program's own rows of memory, which lie in the GPU's cache. Of d(bias) it keeps
only the sums of the diagonals, all that the gradient of T5's table needs: 2 numbers for each row of a block, in place
of all its scores. No two programs share anything, there are no atomics, and the order of additions is fixed: equal bits
in every run.

A candidate of `--kernel_timings`, not yet timed on any GPU. Runs on a CPU with TRITON_INTERPRET=1 set before Triton is
imported. To be imported only where triton is installed.
"""

import torch
import triton
import triton.language as tl

from modeling.kernels.triton_bias_gradient import log_weights, on_its_device, power, prepared, weight_gradients
from modeling.relative_bias import diagonal_sums, spread_sums


@triton.jit
def _one_pass(
    grad_out,
    q,
    k,
    v,
    bias,
    mask,
    lse,
    delta,
    dq,
    dk,
    dv,
    unfinished,
    sums,
    queries,
    keys,
    scale,
    heads: tl.constexpr,
    width: tl.constexpr,
    q_batch,
    q_row: tl.constexpr,
    q_head: tl.constexpr,
    k_batch,
    k_row: tl.constexpr,
    k_head: tl.constexpr,
    v_batch,
    v_row: tl.constexpr,
    v_head: tl.constexpr,
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
    """dq, dk, dv: [B, S, H, D], contiguous, as grad_out; unfinished: float32 [B, H, Q, WIDTH], dq between two blocks.

    A block of scores is [BLOCK_K, BLOCK_Q], so that P and dS go into dv and dk as they lie. Its squares of BLOCK_Q
    rows have 2 BLOCK_Q - 1 diagonals each: k - q = -x, and BLOCK_Q - x, for the x of a row of `turned`.
    sums: [B, H, query blocks, squares of keys, 2, BLOCK_Q] of these, zeros where no program comes.
    """
    SQUARES: tl.constexpr = BLOCK_K // BLOCK_Q
    head = tl.program_id(0)
    example = tl.program_id(1).to(tl.int64)
    pair = example * heads + head
    query_blocks = tl.cdiv(queries, BLOCK_Q)
    key_blocks = tl.cdiv(keys, BLOCK_K)
    d = tl.arange(0, WIDTH)
    r = tl.arange(0, BLOCK_Q)
    c = tl.arange(0, BLOCK_K)
    turn = (c[:, None] + r[None, :]) % BLOCK_Q
    before_turn = c[:, None] % BLOCK_Q + r[None, :] < BLOCK_Q
    across = heads * width  # from one token to the next
    q += example * q_batch + head * q_head
    k += example * k_batch + head * k_head
    v += example * v_batch + head * v_head
    bias += head.to(tl.int64) * bias_head
    grad_out += example * queries * across + head * width
    dq += example * queries * across + head * width
    dk += example * keys * across + head * width
    dv += example * keys * across + head * width
    unfinished += pair * queries * WIDTH

    for key_block in range(0, key_blocks):
        columns = key_block * BLOCK_K + c
        columns_in = (columns < keys)[:, None] & (d < width)[None, :]
        k_block = tl.load(k + columns[:, None] * k_row + d[None, :], mask=columns_in, other=0.0)
        v_block = tl.load(v + columns[:, None] * v_row + d[None, :], mask=columns_in, other=0.0)
        dk_block = tl.zeros((BLOCK_K, WIDTH), dtype=tl.float32)
        dv_block = tl.zeros((BLOCK_K, WIDTH), dtype=tl.float32)

        first = 0
        if CAUSAL:  # blocks of queries before all of these keys do not attend to them
            first = key_block * BLOCK_K // BLOCK_Q
        for query_block in range(first, query_blocks):
            rows = query_block * BLOCK_Q + r
            rows_in = (rows < queries)[:, None] & (d < width)[None, :]
            inside = (rows < queries)[None, :] & (columns < keys)[:, None]
            at_bias = bias + rows[None, :] * bias_query + columns[:, None]
            bias_block = tl.load(at_bias, mask=inside, other=0.0).to(tl.float32)
            if CAUSAL:
                inside &= rows[None, :] >= columns[:, None]
            at_rows = rows[:, None] * across + d[None, :]
            q_block = tl.load(q + rows[:, None] * q_row + d[None, :], mask=rows_in, other=0.0)
            grad_block = tl.load(grad_out + at_rows, mask=rows_in, other=0.0)
            logs, seen = log_weights(
                k_block,
                tl.trans(q_block),
                bias_block,
                mask,
                lse,
                inside,
                example,
                head,
                rows[None, :],
                columns[:, None],
                heads,
                queries,
                scale,
                mask_batch,
                mask_head,
                mask_query,
                mask_key,
                MASK,
                PRECISION,
            )
            change = weight_gradients(
                v_block, tl.trans(grad_block), delta, example, head, rows[None, :], heads, queries, PRECISION
            )
            weights = tl.where(seen, tl.exp(logs), 0.0)  # a choice, not a factor: outside, exp() may be inf
            change *= weights
            narrow = change.to(q_block.dtype)
            dv_block += tl.dot(weights.to(q_block.dtype), grad_block, input_precision=PRECISION)
            dk_block += tl.dot(narrow, q_block, input_precision=PRECISION)

            turned = tl.gather(change, turn, 1)
            lower = tl.sum(tl.reshape(tl.where(before_turn, turned, 0.0), (SQUARES, BLOCK_Q, BLOCK_Q)), 1)
            upper = tl.sum(tl.reshape(tl.where(before_turn, 0.0, turned), (SQUARES, BLOCK_Q, BLOCK_Q)), 1)
            square = (pair * query_blocks + query_block) * key_blocks * SQUARES + key_block * SQUARES
            of_sums = sums + (square + tl.arange(0, SQUARES)[:, None]) * 2 * BLOCK_Q + r[None, :]
            tl.store(of_sums, lower)
            tl.store(of_sums + BLOCK_Q, upper)

            # The first block of keys that a row sees finds nothing here; the last one leaves the result.
            end = keys
            if CAUSAL:
                end = tl.minimum(keys, query_block * BLOCK_Q + BLOCK_Q)
            last = key_block * BLOCK_K + BLOCK_K >= end
            rows_in = (rows < queries)[None, :] & (d < width)[:, None]
            between = unfinished + rows[None, :] * WIDTH + d[:, None]
            dq_block = tl.load(between, mask=rows_in & (key_block > 0), other=0.0)
            dq_block += tl.dot(tl.trans(k_block), narrow, input_precision=PRECISION)
            tl.store(between, dq_block, mask=rows_in & (last == 0))
            at_rows = dq + rows[None, :] * across + d[:, None]
            tl.store(at_rows, (dq_block * scale).to(q_block.dtype), mask=rows_in & last)

        at_columns = columns[:, None] * across + d[None, :]
        tl.store(dk + at_columns, (dk_block * scale).to(k_block.dtype), mask=columns_in)
        tl.store(dv + at_columns, dv_block.to(v_block.dtype), mask=columns_in)
        tl.debug_barrier()  # another thread may read what this one left in `unfinished`


def one_pass_triton(grad_out, q, k, v, bias, mask, out, lse, causal, scale, tile: dict | None = None):
    """(dq, dk, dv, d(bias) [1, H, Q, K] in float32, projected: `spread_sums`), the same bits in every run.

    Arguments as `modeling.kernels.bias_gradient.bias_gradient_torch`; tile (as `tile_of` answers): for benchmarks and
    tests. Rows that may attend to nothing have no part in any gradient.
    """
    (batch, queries, heads, width), keys = q.shape, k.shape[1]
    generation = torch.cuda.get_device_capability(q.device)[0] if q.is_cuda else 9
    tile = tile or tile_of(q.dtype, queries, keys, width, generation)
    block = tile["BLOCK_Q"]
    down, right = triton.cdiv(queries, block), triton.cdiv(keys, tile["BLOCK_K"]) * (tile["BLOCK_K"] // block)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    unfinished = q.new_empty(batch, heads, queries, power(width), dtype=torch.float32)
    sums = q.new_zeros(batch, heads, down, right, 2, block, dtype=torch.float32)
    with on_its_device(q):
        tensors, strides, constants = prepared(grad_out, q, k, v, bias, mask, out, lse)
        _one_pass[(heads, batch)](
            *tensors,
            dq,
            dk,
            dv,
            unfinished,
            sums,
            queries,
            keys,
            float(scale),
            heads,
            width,
            *strides,
            CAUSAL=causal,
            **constants,
            **tile,
        )
    diagonals = joined(sums.sum(0))[:, block * down - queries :][:, : queries + keys - 1]
    return dq, dk, dv, spread_sums(diagonals, keys)[None]


def joined(sums: torch.Tensor) -> torch.Tensor:
    """[H, I, J, 2, n], two diagonals of each square block (see `_one_pass`), -> [H, (I + J) n] sums of all diagonals,
    k - q = 1 - I n, ..., J n."""
    heads, down, right, _, block = sums.shape
    of_blocks = diagonal_sums(sums.permute(0, 3, 4, 1, 2).flatten(0, 2)).view(heads, 2, block, down + right - 1)
    lower, upper = of_blocks.unbind(1)
    both = torch.nn.functional.pad(lower, (0, 1)) + torch.nn.functional.pad(upper, (1, 0))  # [H, n, I + J]
    return both.flip(1).transpose(1, 2).flatten(1)


def tile_of(dtype: torch.dtype, queries: int, keys: int, width: int, generation: int = 9) -> dict[str, int]:
    """The blocks that a program walks over, and how it is compiled: `_one_pass`'s last arguments.

    generation: of the GPU, the first number of its compute capability. With these ptxas keeps all in registers on
    sm_80, 90, 100 and 120, but for d_kv 128: up to 112 bytes a thread in float32, 96 in bf16 on sm_80
    (tests/slow/test_triton_kernel.py compiles them). Larger blocks spill; so does loading ahead in bf16 on sm_100.
    """
    exact, warpgroups = dtype == torch.float32, generation in (9, 10, 11)
    largest = (16, 32) if exact else (32 if warpgroups else 16, 128 if width <= 64 else 64)
    block_q = min(largest[0], power(queries))
    block_k = max(block_q, min(largest[1], power(keys)))
    warps = 8 if exact or block_k >= 64 else 4
    stages = 1 if generation in (10, 11) and not exact else 2
    return dict(BLOCK_Q=block_q, BLOCK_K=block_k, num_warps=warps, num_stages=stages)
