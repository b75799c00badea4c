"""The Pallas TPU kernels as an implementation of attention.

The kernels are in `pallas_kernels`; this file hands them a described call. They are
usable where a TPU is the device, or is compiled for ahead of time. Elsewhere they are
neither imported, which takes half a second, nor traced, which takes each call a tenth.
"""

from typing import Any

from pagedjax._attention_call import AttentionCall
from pagedjax._attention_pallas import Pair, attend_with
from pallas_kernels import tpu_chips


def usable() -> tuple[bool, str]:
    """Return whether a TPU is traced for, and which, or why not."""
    chip, reason = tpu_chips.target_chip()
    return (False, reason) if chip is None else (True, f"runs on TPU {chip.name}")


def supports(call: AttentionCall) -> tuple[bool, str]:
    """Return whether the chip can do a call, and the reason if it cannot."""
    chip, reason = tpu_chips.target_chip()
    return (False, reason) if chip is None else tpu_chips.supports(call, chip)


def attend(call: AttentionCall, *arrays: Any) -> Pair:
    """Return (out[T, H, D], lse[T, H]); arguments as those of `_attention_xla`."""
    from pallas_kernels import tpu_attention

    return attend_with(tpu_attention, call, *arrays)
