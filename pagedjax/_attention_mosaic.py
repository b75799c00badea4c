"""The Mosaic GPU kernels, for Hopper, as an implementation of attention.

Usable where an NVIDIA GPU is the device, or is compiled for ahead of time; otherwise
they are neither imported nor traced.
"""

from typing import Any

from pagedjax._attention_call import AttentionCall
from pagedjax._attention_pallas import Pair, attend_with
from pallas_kernels import gpu_mosaic_sizes, gpu_targets


def usable() -> tuple[bool, str]:
    """Return whether a Hopper GPU is traced for, and which, or why not."""
    gpu, reason = gpu_targets.target_gpu()
    if gpu is None:
        return False, reason
    reason = gpu_mosaic_sizes.lacks_hopper(gpu.capability)
    return (False, reason) if reason else (True, f"runs on {gpu.kind}")


def supports(call: AttentionCall) -> tuple[bool, str]:
    """Return whether the kernels can do a call, and the reason if they cannot."""
    able, reason = usable()
    if not able:
        return False, reason
    return gpu_mosaic_sizes.supports(
        q_dtype=call.q_dtype,
        kv_dtype=call.kv_dtype,
        kv_heads=call.num_kv_heads,
        group=call.group_size,
        head_dim=call.head_dim,
        page_size=call.page_size,
    )


def attend(call: AttentionCall, *arrays: Any) -> Pair:
    """Return (out[T, H, D], lse[T, H]); arguments as those of `_attention_xla`."""
    from pallas_kernels import gpu_mosaic_attention

    return attend_with(gpu_mosaic_attention, call, *arrays)
