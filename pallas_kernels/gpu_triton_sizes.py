"""What the Triton kernels can do, and the sizes they are compiled with."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

_HALVES = ("float16", "bfloat16")
# Bytes of keys and values in flight: what fits the smallest shared memory of Ampere
# and later (99 KiB a block on sm_86) next to everything else.
_SHARED_BYTES = 64 * 1024
NUM_STAGES = 2
# Of a block of keys whose products are float32's: those are multiplied by the threads,
# operands in registers, and more would spill them.
_FLOAT32_ELEMENTS = 2048
_QUERY_BYTES = 32 * 1024  # of a ragged block, all its query heads together
_MOST_ROWS = 64  # of a ragged block, query heads counted


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What a kernel is compiled for.

    Attributes:
        page_size: tokens in a page.
        num_pages: pages of the arrays.
        group: query heads per kv head, G.
        padded_group: the next power of two, at least what the products want.
        head_dim: D.
        padded_dim: the next power of two.
        block_tokens: keys per turn of the walk, a power of two.
        capacity: tokens that a row of the table can name.
        dot_dtype: what the products multiply.
        scale: factor of the scores.
        window: keys a token sees, or None.
        soft_cap: cap of the scores, or None.
    """

    page_size: int
    num_pages: int
    group: int
    padded_group: int
    head_dim: int
    padded_dim: int
    block_tokens: int
    capacity: int
    dot_dtype: str
    scale: float
    window: int | None
    soft_cap: float | None


def supports(
    *, kv_dtype: str, head_dim: int, pool_bytes: int, capability: tuple[int, int]
) -> tuple[bool, str]:
    """Return whether a call can be done, and the reason if it cannot.

    Args:
        kv_dtype: dtype name of the pages.
        head_dim: D.
        pool_bytes: size of `k_pages`.
        capability: compute capability of the GPU.

    Returns:
        (able, reason).

    Example:
        >>> from pallas_kernels import gpu_triton_sizes
        >>> gpu_triton_sizes.supports(
        ...     kv_dtype="int8", head_dim=512, pool_bytes=1, capability=(9, 0)
        ... )
        (False, 'head_dim 512 is over 256, the most its blocks have room for')
    """
    if head_dim > 256:
        return (
            False,
            f"head_dim {head_dim} is over 256, the most its blocks have room for",
        )
    if kv_dtype == "float8_e4m3fn" and capability < (8, 9):
        return (
            False,
            "float8_e4m3fn pages need compute capability 8.9, the GPU has "
            + ".".join(map(str, capability)),
        )
    if kv_dtype in ("int8", "float8_e4m3fn") and 2**31 <= pool_bytes <= 2**32:
        # Offsets are counted in elements, and take 64 bits from 2**32 bytes on.
        return (
            False,
            f"{kv_dtype} pages of {pool_bytes} bytes need offsets past 31 bits, which "
            "it has only from 2**32 bytes on",
        )
    return True, ""


def plan(
    q: jax.Array,
    k_pages: jax.Array,
    page_indices: jax.Array,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    block_tokens: int | None,
    k_scales: jax.Array | None,
) -> Geometry:
    """Choose the sizes of a call."""
    num_pages, page_size, kv_heads, head_dim = k_pages.shape
    names = {jnp.dtype(q.dtype).name}
    if k_scales is None:
        names.add(jnp.dtype(k_pages.dtype).name)
    # Halves of two kinds have no common product but float32's.
    half = len(names) == 1 and names <= set(_HALVES)
    dot_dtype = names.pop() if half else "float32"
    padded_dim = max(16, pl.next_power_of_2(head_dim))
    if block_tokens is None:
        token_bytes = 2 * padded_dim * jnp.dtype(dot_dtype).itemsize * NUM_STAGES
        most = _FLOAT32_ELEMENTS // padded_dim if dot_dtype == "float32" else 128
        block_tokens = max(min(_SHARED_BYTES // token_bytes, most), 16)
    if block_tokens & (block_tokens - 1):
        raise ValueError(f"block_tokens must be a power of two, got {block_tokens}")
    group = q.shape[1] // kv_heads
    return Geometry(
        page_size=page_size,
        num_pages=num_pages,
        group=group,
        padded_group=max(16, pl.next_power_of_2(group)),
        head_dim=head_dim,
        padded_dim=padded_dim,
        block_tokens=block_tokens,
        capacity=page_indices.shape[1] * page_size,
        dot_dtype=dot_dtype,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )


def num_warps_of_decode(geometry: Geometry) -> int:
    """Choose the warps of a decode program: more for operands in registers."""
    return 8 if geometry.dot_dtype == "float32" else 4


def rows_of_block(geometry: Geometry) -> int:
    """Choose how many queries of a slot a ragged block has."""
    row_bytes = geometry.padded_dim * jnp.dtype(geometry.dot_dtype).itemsize
    rows = min(_MOST_ROWS, _QUERY_BYTES // row_bytes) // geometry.padded_group
    return max(1, rows)
