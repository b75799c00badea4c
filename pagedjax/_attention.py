"""Attention over paged keys and values: the public functions.

What happens in a call, in order: the arguments are checked and described
(`_attention_call`), an implementation is chosen from the description, and the call
runs inside one `custom_vjp` whose backward pass is shared by every implementation.

    q[T, H, D]      page_indices[S, P]     k_pages, v_pages[pages, page_size, K, D]
        |               slot 0: 7 2 .          page 2: keys 16..31 of slot 0
        |               slot 1: 0 . .          page 7: keys  0..15 of slot 0
        v                    |                          |
     row of slot s  sees keys 0 .. its own position, page by page  ->  out[T, H, D]
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ascend_bridge import host, npu
from pagedjax import (
    _attention_ascend,
    _attention_mosaic,
    _attention_tpu,
    _attention_triton,
    _attention_xla,
    _attention_xla_grad,
)
from pagedjax import _checks as checks
from pagedjax._attention_call import (
    Arrays,
    AttentionCall,
    as_arrays,
    describe_call,
)

__all__ = [
    "available_implementations",
    "merge_attention",
    "paged_attention",
    "ragged_paged_attention",
]


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attend with one query per slot: the decode step.

    The query of slot s is the token at position `seq_lens[s] - 1`, whose own key is
    already in its page. Scores, softmax and sums are float32 whatever the dtypes.

    Gradients reach the queries and the pages; of quantised pages the scales, as whole
    numbers have none: train on pages of a float format.

    Args:
        q: queries, float[S, H, D].
        k_pages: keys, float[pages, page_size, K, D]; H must be a multiple of K, and
            query head h reads kv head `h // (H // K)`.
        v_pages: values, as `k_pages`.
        page_indices: int[S, P], the physical page of each logical page. Entries
            past the last live token may hold anything.
        seq_lens: int[S], tokens held by each slot. A slot of length 0 gives 0.
        scale: factor of the scores; None means 1/sqrt(D).
        window: how many keys a token sees, itself included; None means all.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None means no cap.
        k_scales: float32[pages, page_size, K], for quantised pages only.
        v_scales: as `k_scales`.
        return_lse: also return the logarithm of the softmax denominator.
        implementation: None for the best one of the platform that is lowered for, or
            a name from `available_implementations`, which never falls back.

    Returns:
        The output [S, H, D] in the dtype of `q`; with `return_lse` a pair of it and
        the log-sum-exp of the scores, float32[S, H]. A row that sees no key is
        exactly 0, with -inf.

    Raises:
        ValueError: a shape, an option or the name of the implementation is wrong.
        TypeError: a dtype is wrong.
        NotImplementedError: the named implementation does not support this call.

    Example:
        >>> import jax.numpy as jnp
        >>> from pagedjax import paged_attention
        >>> pages = jnp.ones((4, 2, 1, 8))  # 4 pages of 2 tokens, one kv head
        >>> table = jnp.array([[3, 1], [0, 4]])  # 4 means: no page
        >>> out = paged_attention(
        ...     jnp.ones((2, 2, 8)), pages, pages * 5, table, jnp.array([3, 0])
        ... )
        >>> out[:, 0, 0].tolist()  # three values of 5; an empty slot
        [5.0, 0.0]
    """
    return _attention(
        (q, k_pages, v_pages, page_indices, seq_lens, None, k_scales, v_scales),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        return_lse=return_lse,
        implementation=implementation,
    )


def ragged_paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attend with any number of queries per slot: prefill and decode mixed.

    The rows of slot s are `cu_q_lens[s]` to `cu_q_lens[s + 1]`; they are its last
    tokens, so row i of m rows sits at position `seq_lens[s] - m + i` and sees the
    keys up to and including that position:

        seq_lens = 7, 3 rows     key  0 1 2 3 4 5 6
                          row 0       x x x x x . .
                          row 1       x x x x x x .
                          row 2       x x x x x x x

    Args:
        q: queries in slot order without gaps, float[T, H, D].
        k_pages: keys, float[pages, page_size, K, D].
        v_pages: values, as `k_pages`.
        page_indices: int[S, P], as in `paged_attention`.
        seq_lens: int[S], tokens held by each slot, these rows included.
        cu_q_lens: int[S + 1], running sum of the rows per slot, from 0. Rows from
            `cu_q_lens[S]` on are padding and give 0.
        scale: as in `paged_attention`; so are the arguments below.
        window: see there.
        soft_cap: see there.
        k_scales: see there.
        v_scales: see there.
        return_lse: see there.
        implementation: see there.

    Returns:
        The output [T, H, D] in the dtype of `q`; with `return_lse` a pair of it and
        the log-sum-exp of the scores, float32[T, H]. A row that sees no key is
        exactly 0, with -inf.

    Raises:
        ValueError: a shape, an option or the name of the implementation is wrong.
        TypeError: a dtype is wrong.
        NotImplementedError: the named implementation does not support this call.

    Example:
        >>> import jax.numpy as jnp
        >>> from pagedjax import ragged_paged_attention
        >>> v_pages = jnp.arange(8.0).reshape(4, 2, 1, 1)  # page p holds 2p, 2p + 1
        >>> out = ragged_paged_attention(
        ...     jnp.zeros((4, 1, 1)),  # equal scores: each row averages its values
        ...     v_pages,
        ...     v_pages,
        ...     jnp.array([[1, 0], [3, 4]]),
        ...     jnp.array([3, 1]),
        ...     jnp.array([0, 2, 3]),  # two rows, one row, and one of padding
        ... )
        >>> [round(x, 4) for x in out[:, 0, 0].tolist()]
        [2.5, 1.6667, 6.0, 0.0]
    """
    return _attention(
        (q, k_pages, v_pages, page_indices, seq_lens, cu_q_lens, k_scales, v_scales),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        return_lse=return_lse,
        implementation=implementation,
    )


def merge_attention(
    *parts: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Merge attention over separate sets of keys into attention over their union.

    The sets must not overlap. The merge is associative and commutative up to
    rounding, and (0, -inf), the attention over no keys, is its exact identity: what
    is merged with it comes back bit for bit. The formula is that of section 2.2 of
    https://arxiv.org/abs/2501.01005.

    Args:
        *parts: one or more pairs (out, lse): float[..., D] and float32[...].

    Returns:
        The merged pair; `out` in the dtype of the first part, `lse` float32.

    Raises:
        ValueError: no part is given, or the shapes differ.

    Example:
        >>> import jax.numpy as jnp
        >>> from pagedjax import merge_attention
        >>> ones, zero = jnp.ones((1, 2)), jnp.zeros((1,))
        >>> out, lse = merge_attention((ones, zero), (3 * ones, zero))
        >>> out.tolist(), lse.tolist()  # the mean, and log(1 + 1)
        ([[2.0, 2.0]], [0.6931471824645996])
    """
    if not parts:
        raise ValueError("merge_attention needs at least one (out, lse) pair, got none")
    out_shape = parts[0][0].shape
    for i, (out, lse) in enumerate(parts):
        if out.shape != out_shape or lse.shape != out_shape[:-1]:
            raise ValueError(
                f"part {i} of merge_attention has out {out.shape} and lse "
                f"{lse.shape}; expected {out_shape} and {out_shape[:-1]}"
            )
    lses = jnp.stack([lse.astype(jnp.float32) for _, lse in parts])
    outs = jnp.stack([out.astype(jnp.float32) for out, _ in parts])
    peak = jnp.max(lses, axis=0)
    some = peak != -jnp.inf  # NaN is not nothing
    peak = lax.stop_gradient(jnp.where(some, peak, 0.0))
    live = lses != -jnp.inf
    # The inner `where` keeps exp and its gradient away from -inf.
    weights = jnp.exp(jnp.where(live, lses, 0.0) - peak[None])
    weights = jnp.where(live, weights, 0.0)
    total = jnp.where(some, jnp.sum(weights, axis=0), 1.0)
    out = jnp.sum(jnp.where(live[..., None], outs, 0.0) * weights[..., None], axis=0)
    out = out / total[..., None]
    lse = jnp.where(some, peak + jnp.log(total), -jnp.inf)
    return out.astype(parts[0][0].dtype), lse


def available_implementations() -> dict[str, tuple[bool, str]]:
    """Return each implementation with whether it is usable here, and why or why not.

    Returns:
        A dict from name to (usable, reason), best first.

    Example:
        >>> from pagedjax import available_implementations
        >>> available_implementations()["xla"]
        (True, 'runs on every platform')
    """
    return {name: entry.usable() for name, entry in _IMPLEMENTATIONS.items()}


# --- the call ------------------------------------------------------------------------

_Pair = tuple[jax.Array, jax.Array]


def _attention(
    arrays: Arrays,
    *,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
    return_lse: bool,
    implementation: str | None,
) -> jax.Array | _Pair:
    """Check, choose, run."""
    arrays = as_arrays(arrays)
    q, k_pages, v_pages, page_indices, seq_lens, cu_q_lens, k_scales, v_scales = arrays
    call = describe_call(
        q,
        k_pages,
        v_pages,
        page_indices,
        seq_lens,
        cu_q_lens,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        k_scales=k_scales,
        v_scales=v_scales,
    )
    chosen = _choose(call, implementation)
    _check_live_pages(call, page_indices, seq_lens)
    out, lse = _place_freely(partial(_run_compiled, call, chosen), arrays)
    return (out, lse) if return_lse else out


def _place_freely(run: Callable[..., _Pair], arrays: Arrays) -> _Pair:
    """Run, leaving to the compiler where intermediate arrays are on a mesh.

    Axes of the Explicit kind, which `jax.make_mesh` makes, have every operation say
    where its result is; here the results are where the queries are, and the rest is
    as on axes of the Auto kind.
    """
    held = [jax.typeof(x).sharding for x in arrays if x is not None]
    mesh = next((x.mesh for x in held if x.mesh.explicit_axes), None)
    if mesh is None:
        return run(*arrays)
    spec = (*(held[0].spec if held[0].mesh.explicit_axes else ()), None, None)[:2]
    where = (P(*spec, None), P(*spec))
    return jax.sharding.auto_axes(
        run,
        axes=mesh.explicit_axes,
        out_sharding=jax.tree.map(lambda x: NamedSharding(mesh, x), where),
    )(*arrays)


def _check_live_pages(
    call: AttentionCall, page_indices: jax.Array, seq_lens: jax.Array
) -> None:
    """Report, under `checkify`, live cells that name no page; else compute nothing.

    With a window, cells that no row of the call can see may be released.
    """
    if not checks.are_on():
        return
    first = jnp.arange(call.pages_per_slot, dtype=jnp.int32)[None] * call.page_size
    live = first < seq_lens[:, None]
    if call.window is not None:
        oldest = seq_lens - call.window - (call.num_tokens if call.ragged else 0)
        live &= first + call.page_size > oldest[:, None]
    bad = live & ((page_indices < 0) | (page_indices >= call.num_pages))
    where = jnp.argmax(bad)
    checks.check(
        ~jnp.any(bad),
        "page_indices: slot {slot} has page id {page} at logical page {column}, inside "
        f"its live length; the pool has pages 0 to {call.num_pages - 1}",
        slot=where // call.pages_per_slot,
        page=page_indices.reshape(-1)[where],
        column=where % call.pages_per_slot,
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(
    call: AttentionCall, chosen: tuple[tuple[str, str], ...], *arrays: jax.Array | None
) -> _Pair:
    """Run the chosen implementation; (platform, name) pairs, the default last."""
    branches = {
        platform: partial(_IMPLEMENTATIONS[name].attend, call)
        for platform, name in chosen
    }
    if len(branches) == 1:
        return branches[_ANY](*arrays)
    return lax.platform_dependent(*arrays, **branches)


def _run_forward(
    call: AttentionCall, chosen: tuple[tuple[str, str], ...], *arrays: jax.Array | None
) -> tuple[_Pair, tuple]:
    """Run and keep what the backward pass needs; never the scores."""
    out, lse = _run(call, chosen, *arrays)
    return (out, lse), (arrays, out, lse)


def _run_backward(
    call: AttentionCall,
    chosen: tuple[tuple[str, str], ...],
    saved: tuple,
    cotangents: _Pair,
) -> tuple:
    """Recompute the scores block by block from the saved log-sum-exp."""
    del chosen
    arrays, out, lse = saved
    d_out, d_lse = cotangents
    dq, dk, dv = _attention_xla_grad.attend_backward(
        call, arrays, out, lse, d_out, d_lse
    )
    if call.has_scales:
        return dq, *(None for _ in arrays[1:6]), dk, dv
    return dq, dk, dv, *(None for _ in arrays[3:])


_run.defvjp(_run_forward, _run_backward)
# Outside of jit a call is one cached program rather than a loop traced anew.
_run_compiled = jax.jit(_run, static_argnums=(0, 1), inline=True)


# --- the choice ----------------------------------------------------------------------

_ANY = "default"  # lax.platform_dependent's word for "every other platform"


@dataclasses.dataclass(frozen=True)
class _Implementation:
    """One way to compute attention.

    Attributes:
        platforms: lowering platforms it is the choice for; (_ANY,) for all, () for
            none.
        supports: whether it can do a call, and the reason if it cannot.
        usable: whether it can run in this installation, and why or why not.
        attend: `attend(call, *arrays) -> (out, lse)`.
    """

    platforms: tuple[str, ...]
    supports: Callable[[AttentionCall], tuple[bool, str]]
    usable: Callable[[], tuple[bool, str]]
    attend: Callable[..., _Pair]


# Best first. An implementation is added with one line here.
_IMPLEMENTATIONS: dict[str, _Implementation] = {
    "host": _Implementation(("cpu",), host.supports, host.usable, host.attend),
    "pallas_tpu": _Implementation(
        ("tpu",),
        _attention_tpu.supports,
        _attention_tpu.usable,
        _attention_tpu.attend,
    ),
    "pallas_triton": _Implementation(
        ("cuda",),
        _attention_triton.supports,
        _attention_triton.usable,
        _attention_triton.attend,
    ),
    "pallas_mosaic_gpu": _Implementation(
        (),  # only where it is named: nothing has measured it against Triton's yet
        _attention_mosaic.supports,
        _attention_mosaic.usable,
        _attention_mosaic.attend,
    ),
    "ascend": _Implementation(
        npu.PLATFORMS,
        _attention_ascend.supports,
        _attention_ascend.usable,
        _attention_ascend.attend,
    ),
    "xla": _Implementation(
        (_ANY,),
        _attention_xla.supports,
        _attention_xla.usable,
        _attention_xla.attend,
    ),
}


def _choose(
    call: AttentionCall, implementation: str | None
) -> tuple[tuple[str, str], ...]:
    """Return (platform, name) pairs for `_run`: one per platform, the default last.

    Raises:
        ValueError: no implementation has this name.
        NotImplementedError: the named one, or every one, does not support the call.
    """
    if implementation is not None:
        if implementation not in _IMPLEMENTATIONS:
            raise ValueError(
                f"unknown implementation {implementation!r}; "
                f"known: {', '.join(_IMPLEMENTATIONS)}"
            )
        entry = _IMPLEMENTATIONS[implementation]
        for able, reason in (entry.usable(), entry.supports(call)):
            if not able:
                raise NotImplementedError(
                    f"implementation {implementation!r} cannot run this call: {reason}"
                )
        return ((_ANY, implementation),)
    chosen: dict[str, str] = {}
    reasons = []
    for name, entry in _IMPLEMENTATIONS.items():
        verdicts = (entry.usable(), entry.supports(call))
        if all(able for able, _ in verdicts):
            for platform in entry.platforms:
                chosen.setdefault(platform, name)
        else:
            reasons += [f"{name}: {reason}" for able, reason in verdicts if not able]
    if _ANY not in chosen:
        raise NotImplementedError(
            f"no implementation can run this call on every platform: "
            f"{'; '.join(reasons)}"
        )
    default = chosen.pop(_ANY)
    return (*chosen.items(), (_ANY, default))
