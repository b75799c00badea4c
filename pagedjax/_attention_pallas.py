"""What the Pallas implementations of attention share: handing over a described call."""

from types import ModuleType
from typing import Any

import jax

from pagedjax._attention_call import AttentionCall

Pair = tuple[jax.Array, jax.Array]


def attend_with(
    kernels: ModuleType,
    call: AttentionCall,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array | None,
    k_scales: jax.Array | None,
    v_scales: jax.Array | None,
) -> Pair:
    """Run the kernels of a module of `pallas_kernels`.

    Args:
        kernels: has `paged_attention` and `ragged_paged_attention`.
        call: the description; the arrays are those of the public functions.

    Returns:
        (out[T, H, D], lse[T, H]).
    """
    arrays = (q, k_pages, v_pages, page_indices, seq_lens)
    options: dict[str, Any] = dict(
        scale=call.scale,
        window=call.window,
        soft_cap=call.soft_cap,
        k_scales=k_scales,
        v_scales=v_scales,
    )
    if cu_q_lens is None:
        return kernels.paged_attention(*arrays, **options)
    return kernels.ragged_paged_attention(*arrays, cu_q_lens, **options)
