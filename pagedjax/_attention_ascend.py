"""Attention by Ascend C kernels, on an NPU of the 910 family.

Two ways, by the platform that is lowered for. On a backend for the NPU ("npu",
"ascend") the arrays are in its memory, and the kernels run on the backend's stream. On
the cpu platform, with an NPU in the machine, the pages that are seen are sent there for
each call: for checking the kernels. A pool that stays on the NPU,
`ascend_bridge.ascend`, is what pays.
"""

from functools import partial
from typing import Any

import jax
from jax import lax

from ascend_bridge import ascend, npu
from pagedjax._attention_call import AttentionCall

Pair = tuple[jax.Array, jax.Array]


def usable() -> tuple[bool, str]:
    """Return whether an NPU is traced for or in this machine, or why there is none."""
    kind, _ = npu.target_npu()
    if kind is None:
        return ascend.usable()
    if not npu.arch_of(kind):
        return False, f"the kernels do not know {kind}"
    return True, f"runs on {kind}"


def supports(call: AttentionCall) -> tuple[bool, str]:
    """Return whether the kernels can do a call, and the reason if they cannot."""
    able, reason = usable()
    if not able:
        return False, reason
    kind, _ = npu.target_npu()
    if kind is None:
        return npu.supports(call, *ascend.npu_arch_and_cores())
    return npu.supports(call, npu.arch_of(kind))


def attend(
    call: AttentionCall,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    *_: Any,
) -> Pair:
    """Return (out[S, H, D], lse[S, H]); arguments as those of `_attention_xla`."""
    on_npu = partial(npu.attend, call)
    return lax.platform_dependent(
        q,
        k_pages,
        v_pages,
        page_indices,
        seq_lens,
        npu=on_npu,
        ascend=on_npu,
        cpu=partial(npu.attend, call, target="npu_paged_attention"),
    )
