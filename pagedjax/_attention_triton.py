"""The Pallas Triton kernels as an implementation of attention.

Usable where an NVIDIA GPU is the device, or is compiled for ahead of time. Elsewhere
they are neither imported nor traced, which would cost every call time.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pagedjax._attention_call import AttentionCall
from pallas_kernels import gpu_targets, gpu_triton_sizes


def usable() -> tuple[bool, str]:
    """Return whether an NVIDIA GPU is traced for, and which, or why not."""
    gpu, reason = gpu_targets.target_gpu()
    return (False, reason) if gpu is None else (True, f"runs on {gpu.kind}")


def supports(call: AttentionCall) -> tuple[bool, str]:
    """Return whether the kernels can do a call, and the reason if they cannot."""
    gpu, reason = gpu_targets.target_gpu()
    if gpu is None:
        return False, reason
    shape = (call.num_pages, call.page_size, call.num_kv_heads, call.head_dim)
    return gpu_triton_sizes.supports(
        kv_dtype=call.kv_dtype,
        head_dim=call.head_dim,
        capability=gpu.capability,
        pool_bytes=math.prod(shape) * jnp.dtype(call.kv_dtype).itemsize,
    )


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
    from pallas_kernels import gpu_triton_attention

    arrays = (q, k_pages, v_pages, page_indices, seq_lens)
    options: dict[str, Any] = dict(
        scale=call.scale,
        window=call.window,
        soft_cap=call.soft_cap,
        k_scales=k_scales,
        v_scales=v_scales,
    )
    if cu_q_lens is None:
        return gpu_triton_attention.paged_attention(*arrays, **options)
    return gpu_triton_attention.ragged_paged_attention(*arrays, cu_q_lens, **options)
