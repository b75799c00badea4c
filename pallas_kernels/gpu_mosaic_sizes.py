"""What the Mosaic GPU kernels can do, and the sizes they are compiled with."""

import dataclasses
import math

import jax
import jax.numpy as jnp

BLOCK_ROWS = 64  # rows of a block: what one warp group multiplies at a time
BLOCK_TOKENS = 64  # keys of a turn
COLUMNS = 64  # of values that are multiplied at a time
SCALE_HEADS = 4  # kv heads whose scales come together: the 16 bytes that TMA moves
_HALVES = ("bfloat16", "float16")
_QUANTISED = ("int8", "float8_e4m3fn")
# Two blocks of rows share the 227 KiB of a core; 1 KiB each is the system's.
_SHARED_BYTES = 112 * 1024
_MOST_STAGES = 4


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What a kernel is compiled for.

    Attributes:
        page_size: tokens in a page.
        num_pages: pages of the arrays.
        head_dim: D.
        quantised: whether pages are widened, and have scales.
        chunk: tokens that one copy brings: all of one page.
        stages: turns whose keys and values are on their way or in use.
        scale: factor of the scores.
        window: keys a token sees, or None.
        soft_cap: cap of the scores, or None.
    """

    page_size: int
    num_pages: int
    head_dim: int
    quantised: bool
    chunk: int
    stages: int
    scale: float
    window: int | None
    soft_cap: float | None


def lacks_hopper(capability: tuple[int, int]) -> str:
    """Return why a GPU cannot run the kernels, or nothing.

    Args:
        capability: compute capability of the GPU.

    Example:
        >>> from pallas_kernels import gpu_mosaic_sizes
        >>> gpu_mosaic_sizes.lacks_hopper((8, 0))
        'wgmma is of Hopper alone, compute capability 9.0; the GPU has 8.0'
    """
    if capability == (9, 0):
        return ""
    return "wgmma is of Hopper alone, compute capability 9.0; the GPU has " + ".".join(
        map(str, capability)
    )


def supports(
    *,
    q_dtype: str,
    kv_dtype: str,
    kv_heads: int,
    group: int,
    head_dim: int,
    page_size: int,
) -> tuple[bool, str]:
    """Return whether a call can be done, and the reason if it cannot.

    Args:
        q_dtype: dtype name of the queries.
        kv_dtype: dtype name of the pages.
        kv_heads: K.
        group: query heads per kv head, G.
        head_dim: D.
        page_size: tokens in a page.

    Returns:
        (able, reason).

    Example:
        >>> from pallas_kernels import gpu_mosaic_sizes
        >>> gpu_mosaic_sizes.supports(
        ...     q_dtype="bfloat16", kv_dtype="bfloat16", kv_heads=8, group=4,
        ...     head_dim=128, page_size=5,
        ... )
        (False, 'page_size 5 is no multiple of 8, the rows of a tile that TMA fills')
    """
    if q_dtype not in _HALVES:
        return False, (
            f"wgmma multiplies bfloat16 and float16, the queries are {q_dtype}"
        )
    if kv_dtype not in (q_dtype, *_QUANTISED):
        return False, (
            f"wgmma wants both of one dtype, the queries are {q_dtype} and the pages "
            f"{kv_dtype}"
        )
    if kv_dtype in _QUANTISED and kv_heads % SCALE_HEADS:
        return False, (
            f"the scales of {kv_heads} kv heads take {4 * kv_heads} bytes a token, TMA "
            "moves multiples of 16"
        )
    if head_dim % COLUMNS or head_dim > 256:
        return False, f"head_dim {head_dim} is none of 64, 128, 192 and 256"
    if page_size % 8:
        return False, (
            f"page_size {page_size} is no multiple of 8, the rows of a tile that TMA "
            "fills"
        )
    if group > BLOCK_ROWS:
        return False, (
            f"{group} query heads per kv head are over {BLOCK_ROWS}, the rows of "
            "a block"
        )
    return True, ""


def plan(
    q: jax.Array,
    k_pages: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    stages: int | None,
) -> Geometry:
    """Choose the sizes of a call.

    Args:
        q: [..., D].
        k_pages: [pages, page_size, K, D].
        scale: see `Geometry`, and so below.
        window: see there.
        soft_cap: see there.
        stages: None for as many as leave room for a second block, at least 2.
    """
    num_pages, page_size, _, head_dim = k_pages.shape
    size = jnp.dtype(k_pages.dtype).itemsize
    quantised = jnp.dtype(k_pages.dtype).name in _QUANTISED
    if stages is None:
        of_turn = 2 * BLOCK_TOKENS * (head_dim * size + 4 * SCALE_HEADS * quantised)
        # The queries; the weights in two halves; a part of the result in float32.
        rest = BLOCK_ROWS * (head_dim * 2 + 2 * BLOCK_TOKENS * 2 + COLUMNS * 4)
        if quantised:
            # Widened keys, then values in their place if those have the same dtype.
            tiles = 1 if jnp.dtype(q.dtype).name == "bfloat16" else 2
            rest += BLOCK_TOKENS * (head_dim * 2 * tiles + 2 * 4)
        stages = min(max((_SHARED_BYTES - rest) // of_turn, 2), _MOST_STAGES)
    return Geometry(
        page_size=page_size,
        num_pages=num_pages,
        head_dim=head_dim,
        quantised=quantised,
        chunk=math.gcd(page_size, BLOCK_TOKENS),
        stages=stages,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )
