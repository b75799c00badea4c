"""What the GPU kernels of both compilers share: blocks of rows, parts of a context."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_MIN_SPLIT_TOKENS = 256  # a split shorter than this costs more than it spreads


class Blocks(NamedTuple):
    """Runs of rows, each of one slot; some blocks at the end may have none.

    Attributes:
        slot: int32[B].
        start: int32[B], the first row.
        length: int32[B], its rows.
        position: int32[B], that of the first row in its sequence.
        first: int32[S], the first block of each slot.
    """

    slot: jax.Array
    start: jax.Array
    length: jax.Array
    position: jax.Array
    first: jax.Array


def cut_blocks(
    seq_lens: jax.Array, cu_q_lens: jax.Array, *, num_tokens: int, rows: int
) -> Blocks:
    """Cut the rows of every slot into blocks of at most `rows`.

    Args:
        seq_lens: int32[S].
        cu_q_lens: int32[S + 1].
        num_tokens: rows in all, T.
        rows: of a block.

    Returns:
        `num_tokens // rows + S` blocks: at least as many as there can be.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels import gpu_blocks
        >>> blocks = gpu_blocks.cut_blocks(
        ...     jnp.array([9, 1]), jnp.array([0, 5, 6]), num_tokens=6, rows=4
        ... )
        >>> blocks.start.tolist(), blocks.length.tolist(), blocks.position.tolist()
        ([0, 4, 5], [4, 1, 1], [4, 8, 0])
    """
    slots = seq_lens.shape[0]
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    counts = lax.div(q_lens + (rows - 1), jnp.int32(rows))
    ends = jnp.cumsum(counts).astype(jnp.int32)
    block = jnp.arange(num_tokens // rows + slots, dtype=jnp.int32)
    slot = jnp.sum((ends[None] <= block[:, None]).astype(jnp.int32), axis=1)
    real = slot < slots
    slot = jnp.minimum(slot, slots - 1)
    offset = (block - (ends - counts)[slot]) * rows
    return Blocks(
        slot=slot,
        start=cu_q_lens[slot] + offset,
        length=jnp.where(real, jnp.minimum(q_lens[slot] - offset, rows), 0),
        position=seq_lens[slot] - q_lens[slot] + offset,
        first=ends - counts,
    )


def num_splits_for(programs: int, capacity: int) -> int:
    """Choose into how many parts a context is cut: enough for two waves of 132 cores.

    From the width of the table, for the lengths are not known when compiling.

    Args:
        programs: how many there are without splits.
        capacity: tokens that a row of the table can name.

    Example:
        >>> from pallas_kernels import gpu_blocks
        >>> gpu_blocks.num_splits_for(64, 8192)
        5
    """
    wanted = -(-264 // programs)
    return max(1, min(wanted, capacity // _MIN_SPLIT_TOKENS, 32))


def merge_splits(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge the parts of each context by their log-sum-exp.

    As in https://arxiv.org/abs/2311.01282, section 3.

    Args:
        out: float32[parts, ..., D].
        lse: float32[parts, ...].

    Returns:
        float32[..., D] and float32[...]; 0 and -inf where no part saw a key.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels import gpu_blocks
        >>> out, lse = gpu_blocks.merge_splits(jnp.array([[1.0], [3.0]]), jnp.zeros(2))
        >>> out.tolist(), round(float(lse), 4)
        ([2.0], 0.6931)
    """
    if out.shape[0] == 1:
        return out[0], lse[0]
    peak = jnp.max(lse, axis=0)
    some = peak != -jnp.inf
    shift = jnp.where(some, peak, 0.0)
    weights = jnp.exp(lse - shift[None])
    total = jnp.where(some, jnp.sum(weights, axis=0), 1.0)
    merged = jnp.sum(out * weights[..., None], axis=0) / total[..., None]
    return merged, jnp.where(some, shift + jnp.log(total), -jnp.inf)
