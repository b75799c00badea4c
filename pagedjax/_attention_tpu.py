"""The Pallas TPU kernels as an implementation of attention.

The kernels are in `pallas_kernels`; this file hands them a described call. They are
usable where a TPU is the device, or is compiled for ahead of time. Elsewhere they are
neither imported, which takes half a second, nor traced, which takes each call a tenth.
"""

from typing import Any

import jax

from pagedjax._attention_call import AttentionCall
from pallas_kernels import tpu_chips


def usable() -> tuple[bool, str]:
    """Return whether a TPU is traced for, and which, or why not."""
    chip, reason = tpu_chips.target_chip()
    return (False, reason) if chip is None else (True, f"runs on TPU {chip.name}")


def supports(call: AttentionCall) -> tuple[bool, str]:
    """Return whether the chip can do a call, and the reason if it cannot."""
    chip, reason = tpu_chips.target_chip()
    return (False, reason) if chip is None else tpu_chips.supports(call, chip)


def attend(
    call: AttentionCall,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array | None,
    k_scales: jax.Array | None,
    v_scales: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return (out[T, H, D], lse[T, H]); arguments as those of the public functions."""
    from pallas_kernels import tpu_attention

    arrays = (q, k_pages, v_pages, page_indices, seq_lens)
    options: dict[str, Any] = dict(
        scale=call.scale,
        window=call.window,
        soft_cap=call.soft_cap,
        k_scales=k_scales,
        v_scales=v_scales,
    )
    if cu_q_lens is None:
        return tpu_attention.paged_attention(*arrays, **options)
    return tpu_attention.ragged_paged_attention(*arrays, cu_q_lens, **options)
