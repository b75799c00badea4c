"""The Pallas Triton kernels as an implementation of attention.

Usable where an NVIDIA GPU is the device, or is compiled for ahead of time. Elsewhere
they are neither imported nor traced, which would cost every call time.
"""

import math
from typing import Any

import jax.numpy as jnp

from pagedjax._attention_call import AttentionCall
from pagedjax._attention_pallas import Pair, attend_with
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


def attend(call: AttentionCall, *arrays: Any) -> Pair:
    """Return (out[T, H, D], lse[T, H]); arguments as those of `_attention_xla`."""
    from pallas_kernels import gpu_triton_attention

    return attend_with(gpu_triton_attention, call, *arrays)
