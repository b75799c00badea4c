"""The steps inside the page-table verbs, on plain arrays.

Who is served, the free stack and the reference counts. Only `inc_ref` and
`dec_ref` change a count; only `take_pages` and `dec_ref` change the stack.
"""

import operator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pagedjax import _checks as checks

INT32_MAX = int(np.iinfo(np.int32).max)


def serve(
    num_new: jax.Array,
    shared: jax.Array,
    last_pages: jax.Array,
    owners: jax.Array,
    fits: jax.Array,
    num_free: jax.Array,
    priority: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Decides which slots get their pages, and which of them must copy.

    A page whose owners all write in this call needs one copy fewer: the lowest
    slot keeps it. But "all write" depends on who is served, and who is served
    depends on who needs a copy. So start from the hope that every such page has a
    keeper, and take the keeper away wherever one of its owners turns out to be
    refused, until nothing changes. Needs only rise and served slots only drop
    out, so this ends; usually at the first look.

    Args:
      num_new: int32[S]; new cells each slot wants.
      shared: bool[S]; the slot is about to write to a page with other owners.
      last_pages: int32[S]; that page.
      owners: int32[S]; its refcount.
      fits: bool[S]; False for a slot that is refused whatever is free.
      num_free: int32[]; free pages.
      priority: int32[S] or None; ascending order of service, default slot order.

    Returns:
      `(copies, ok)`: int32[S], 1 where the slot needs a copy; bool[S], served.
    """
    slots = num_new.shape[0]
    order = None if priority is None else jnp.argsort(priority, stable=True)
    group = _first_of_same(last_pages, shared)
    own = jnp.arange(slots, dtype=jnp.int32)
    writers = (
        jnp.zeros_like(num_new).at[group].add(shared.astype(jnp.int32), mode="drop")
    )

    # (has_keeper, copies, ok, settled); has_keeper is True at most at one slot of
    # each group, its lowest.
    State = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

    def decide(state: State) -> State:
        has_keeper = state[0]
        copies = (shared & ~has_keeper).astype(jnp.int32)
        need = num_new + copies
        if order is None:
            reach = jnp.cumsum(need)
        else:
            reach = jnp.zeros_like(need).at[order].set(jnp.cumsum(need[order]))
        ok = fits & ((need == 0) | (reach <= num_free))
        refused = jnp.zeros((slots,), bool).at[group].max(shared & ~ok, mode="drop")
        lost = has_keeper & refused
        return has_keeper & ~lost, copies, ok, ~jnp.any(lost)

    hope = shared & (group == own) & (writers == owners)
    # `zeros_like`, not a constant: under shard_map the carry varies as its inputs do.
    start = vary_together(
        (hope, jnp.zeros_like(num_new), fits, jnp.asarray(False)), num_new, num_free
    )
    _, copies, ok, _ = lax.while_loop(lambda state: ~state[3], decide, start)
    return copies, ok


def take_pages(
    free_pages: jax.Array, num_free: jax.Array, need: jax.Array, takes: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Pops pages off the free stack: `need[s]` for slot `s`, where `takes[s]`.

    Returns:
      `(pages, num_free)`: int32[S, k], NULL where `takes` is False; the new count.
    """
    null = free_pages.shape[0]
    start = jnp.cumsum(need) - need
    nth = jnp.arange(takes.shape[1], dtype=jnp.int32)[None, :]
    place = num_free - 1 - start[:, None] - nth
    pages = read(free_pages, jnp.where(takes, place, null), null)
    return pages, num_free - jnp.sum(need)


def inc_ref(
    refcounts: jax.Array, pages: jax.Array, *, first: bool = False
) -> jax.Array:
    """Adds an owner to each page that is not NULL.

    With `first` the pages come off the free stack: their count becomes 1 whatever
    a caller's bug made of it while they were free, so that the bug stays away
    from the slot that has the page now.
    """
    counts = refcounts.at[_no_wrap(pages, refcounts.shape[0])]
    return counts.set(1, mode="drop") if first else counts.add(1, mode="drop")


def dec_shared(refcounts: jax.Array, pages: jax.Array) -> jax.Array:
    """Takes an owner from each page that is not NULL; frees none.

    Enough by itself where every page keeps an owner; the first half of `dec_ref`.
    """
    return refcounts.at[_no_wrap(pages, refcounts.shape[0])].add(-1, mode="drop")


def dec_ref(
    refcounts: jax.Array, free_pages: jax.Array, num_free: jax.Array, pages: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Takes an owner from each page that is not NULL; frees those without one.

    Several owners may leave at once, and the page must be pushed on the free stack
    once. To find one entry per page without sorting and without an array of
    `num_pages`, the refcounts serve as scratch: each entry of a page that has come
    to 0 bids its index for the page's own count, the lowest bid stays, and its
    bidder puts the 0 back.

    Each write takes its indices from the read before it. That order is what keeps
    the writes in place: where XLA may move a read past a write, it keeps a copy of
    the whole array, a cost that grows with `num_pages`.

    A count that a caller's bug brings below 0 is left there, and the page off the
    stack, for `check_integrity` to name.

    Returns:
      `(refcounts, free_pages, num_free)`.
    """
    if not pages.shape[0]:
        return refcounts, free_pages, num_free
    null = refcounts.shape[0]
    entry = jnp.arange(pages.shape[0], dtype=jnp.int32)
    refcounts = dec_shared(refcounts, pages)
    ownerless = jnp.where(read(refcounts, pages, 1) == 0, pages, null)
    refcounts = refcounts.at[ownerless].set(INT32_MAX, mode="drop")
    refcounts = refcounts.at[ownerless].min(entry, mode="drop")
    wins = read(refcounts, ownerless, -1) == entry
    refcounts = refcounts.at[jnp.where(wins, ownerless, null)].set(0, mode="drop")

    # Pushed last entry first, so that the pages of a row come back in its order.
    count = jnp.cumsum(wins.astype(jnp.int32))
    place = jnp.where(wins, num_free + count[-1] - count, null)
    free_pages = free_pages.at[place].set(pages, mode="drop")
    return refcounts, free_pages, num_free + count[-1]


def read(array: jax.Array, indices: jax.Array, fill: int = 0) -> jax.Array:
    """Gathers from a 1-D array; `fill` where the index is out of range."""
    indices = _no_wrap(indices, array.shape[0])
    return array.at[indices].get(mode="fill", fill_value=fill)


def is_first(values: jax.Array, bound: int) -> jax.Array:
    """Marks the first occurrence of each value in `[0, bound)`; `bound` is small."""
    entry = jnp.arange(values.shape[0], dtype=jnp.int32)
    lowest = jnp.full((bound,), INT32_MAX, jnp.int32)
    lowest = lowest.at[_no_wrap(values, bound)].min(entry, mode="drop")
    return read(lowest, values) == entry


def num_pages_of(num_tokens: Any, page_size: int) -> Any:
    """Counts the pages that hold so many tokens, rounding up; ints or arrays."""
    return -(-num_tokens // page_size)


def vary_together(tree: Any, *others: Any) -> Any:
    """Marks arrays as varying over each mesh axis that any of the others vary over.

    Under `shard_map` a loop must carry the same types in and out. What starts equal
    on all devices, and meets data that is not, has to be marked before the loop.
    Nothing of it is left in the compiled program.
    """
    leaves = jax.tree.leaves((tree, others))
    axes = frozenset().union(*map(_varying, leaves))

    def mark(leaf: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - _varying(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def as_size(name: str, value: Any, low: int = 1) -> int:
    """Takes a static size as a Python int; use the result, not the argument.

    Numbers of NumPy, and arrays of one concrete whole number, are taken as that
    number: they are equal to it, but a jitted function that has them as static
    arguments compiles anew or does not take them, and their products overflow.

    Raises:
      ValueError: it is traced, not a whole number, or below `low`.
    """
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"{name} must be known when tracing, got {value!r}")
    try:
        size = low - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = low - 1
    if size < low:
        raise ValueError(f"{name} must be a whole number >= {low}, got {value!r}")
    return size


def set_sizes(record: Any, *names: str) -> None:
    """Takes fields of a frozen dataclass as static sizes, in its `__post_init__`."""
    for name in names:
        object.__setattr__(record, name, as_size(name, getattr(record, name)))


def as_int32(name: str, values: Any, shape: tuple[Any, ...]) -> jax.Array:
    """Takes an argument as an int32 array of the given shape (None: any size).

    Never of a weak type, which a jitted function would compile anew for.

    Raises:
      TypeError: it is not of a whole-number type that fits.
      ValueError: it has another shape, or a number that does not fit.
    """
    if not isinstance(values, jax.Array):
        try:
            values = np.asarray(values)
        except ValueError as error:
            raise ValueError(f"{name} has rows of several lengths: pad them") from error
        if values.size and np.issubdtype(values.dtype, np.integer):
            low, high = int(values.min()), int(values.max())
            if low < -INT32_MAX - 1 or high > INT32_MAX:
                raise ValueError(f"{name} must fit int32, got {low} to {high}")
    array = jnp.asarray(values)
    if array.dtype != jnp.int32:
        raise TypeError(f"{name} must be int32, got {array.dtype}")
    chex.assert_shape(array, shape, custom_message=name, exception_type=ValueError)
    return lax.convert_element_type(array, jnp.int32)


def check_each(ok: jax.Array, message: str, values: jax.Array) -> None:
    """Reports the first bad entry, as index `i` and value `v`, under checkify.

    Costs nothing otherwise: see `_checks`.
    """
    if ok.shape[0] and checks.are_on():
        worst = jnp.argmin(ok)
        checks.check(jnp.all(ok), message, i=worst, v=values[worst])


def _first_of_same(pages: jax.Array, mask: jax.Array) -> jax.Array:
    """Gives each masked slot the lowest masked slot with the same page, else `S`.

    Sorts the slots by page, so the cost does not depend on how many pages exist.
    """
    slots = pages.shape[0]
    own = jnp.arange(slots, dtype=jnp.int32)
    key, slot = lax.sort((jnp.where(mask, pages, INT32_MAX), own), num_keys=2)
    starts = jnp.concatenate([jnp.ones((1,), bool), key[1:] != key[:-1]])
    start = lax.cummax(jnp.where(starts, own, 0))
    first = jnp.zeros((slots,), jnp.int32).at[slot].set(slot[start])
    return jnp.where(mask, first, slots)


def _varying(leaf: jax.Array) -> frozenset[str]:
    return jax.typeof(leaf).manual_axis_type.varying


def _no_wrap(indices: jax.Array, bound: int) -> jax.Array:
    """Sends negative indices out of range: `mode="drop"` alone lets them wrap."""
    return jnp.where(indices >= 0, indices, bound)
