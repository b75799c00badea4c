"""The prefix index: which full pages hold the start of which prompts.

A pytree of `C` entries, one per full page that was once prefilled. Finding the
pages of a prompt, remembering them and forgetting the least recently used are
masked operations on whole arrays, so all of it runs inside a jitted loop::

    prompt   [ t0 .. t15 ][ t16 .. t31 ][ t32 .. ]     page_size 16
                   |             |
    hashes        h(t0..t15)    h(t0..t31)             of everything so far
                   |             |
    entries      #4 page 7 <--- #9 page 2              parent: the entry before

An entry is hit when its hash is that of the prompt so far, its own tokens are equal,
and its parent is the entry that the page before has hit. So the tokens of the whole
prefix are compared, not their hashes: a collision costs a hit and never gives a
page of another prompt.

The index owns its pages by `inc_ref`; a page that it alone owns may be evicted.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax import _page_ops as ops
from pagedjax._page_table import PageTable, dec_ref, inc_ref


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefixIndex:
    """Full pages by the tokens they and the pages before them hold.

    `C` entries. An unused entry has serial 0; its other fields mean nothing.

    Attributes:
      serials: int32[C]; the number of the entry, never used twice; 0 = unused.
      parents: int32[C]; serial of the entry of the page before; 0 = first page.
      hashes: uint32[C, 2]; hash of the prompt up to the end of the page.
      tokens: int32[C, page_size]; the tokens of the page itself.
      pages: int32[C]; where they are; the index owns it.
      depths: int32[C]; pages before it in the prompt.
      last_used: int32[C]; value of `clock` when it was last inserted or hit.
      clock: int32[]; counts calls and entries.
    """

    serials: jax.Array
    parents: jax.Array
    hashes: jax.Array
    tokens: jax.Array
    pages: jax.Array
    depths: jax.Array
    last_used: jax.Array
    clock: jax.Array

    @property
    def num_entries(self) -> int:
        """Pages that can be remembered at once, `C`."""
        return self.serials.shape[0]

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.tokens.shape[1]


def init_prefix_index(*, num_entries: int, page_size: int) -> PrefixIndex:
    """Makes an index that knows no prefix.

    Args:
      num_entries: pages that can be remembered at once, `C`.
      page_size: tokens in a page; that of the page table.

    Raises:
      ValueError: a size is below 1.

    Example:
      >>> import pagedjax as pj
      >>> pj.init_prefix_index(num_entries=8, page_size=4).tokens.shape
      (8, 4)
    """
    entries = ops.as_size("num_entries", num_entries)
    size = ops.as_size("page_size", page_size)

    def zeros() -> jax.Array:  # arrays of their own, so that all can be donated
        return jnp.zeros((entries,), jnp.int32)

    return PrefixIndex(
        serials=zeros(),
        parents=zeros(),
        hashes=jnp.zeros((entries, 2), jnp.uint32),
        tokens=jnp.zeros((entries, size), jnp.int32),
        pages=zeros(),
        depths=zeros(),
        last_used=zeros(),
        clock=jnp.zeros((), jnp.int32),
    )


def lookup_prefix(
    index: PrefixIndex, table: PageTable, tokens: jax.Array, num_tokens: jax.Array
) -> tuple[PrefixIndex, jax.Array, jax.Array]:
    """Finds the pages that already hold the start of a prompt.

    At least one token is always left to run through the model: its logits are
    what the prompt is fed for.

    Args:
      index: the index; donate it.
      table: the page table.
      tokens: int32[L]; the prompt, padded on the right.
      num_tokens: int32[]; its tokens.

    Returns:
      `(index, pages, num_found)`: the index, in which the pages count as just
      used; int32[P], NULL past the last, ready for `attach`; int32[], the tokens
      in them, a multiple of the page size.

    Raises:
      ValueError, TypeError: an array has the wrong shape or dtype.

    Example:
      One slot prefills seven tokens and ends; the next prompt starts alike:

      >>> import jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=8, page_size=2, max_slots=2, pages_per_slot=4
      ... )
      >>> index = pj.init_prefix_index(num_entries=8, page_size=2)
      >>> first, second = jnp.array([5, 6, 7, 8, 9, 1, 2]), jnp.array([5, 6, 7, 8, 3])
      >>> table, _, _ = pj.append(table, jnp.array([7, 0]))
      >>> index, table = pj.insert_prefix(index, table, 0, first, 7)
      >>> table = pj.free(table, jnp.array([True, False]))
      >>> index, pages, num_found = pj.lookup_prefix(index, table, second, 5)
      >>> pages.tolist(), int(num_found)
      ([0, 1, 8, 8], 4)
      >>> table = pj.attach(table, 1, pages, num_found)
      >>> table.seq_lens.tolist()
      [0, 4]
    """
    tokens = ops.as_int32("tokens", tokens, (None,))
    num_tokens = ops.as_int32("num_tokens", num_tokens, ())
    _check_page_size(index, table)
    entries, hits, _ = _find(index, tokens, num_tokens - 1)
    nth = jnp.arange(hits.shape[0], dtype=jnp.int32)
    hits &= nth < table.pages_per_slot
    pages = jnp.full((table.pages_per_slot,), table.num_pages, jnp.int32)
    pages = pages.at[jnp.where(hits, nth, table.pages_per_slot)].set(
        index.pages[entries], mode="drop"
    )
    num_found = jnp.sum(hits.astype(jnp.int32)) * index.page_size
    index = _touch(index, entries, hits)
    return dataclasses.replace(index, clock=index.clock + 1), pages, num_found


def insert_prefix(
    index: PrefixIndex,
    table: PageTable,
    slot: jax.Array | int,
    tokens: jax.Array,
    num_tokens: jax.Array,
) -> tuple[PrefixIndex, PageTable]:
    """Remembers the full pages of a prompt that a slot holds.

    Call it once their keys and values are written: from then on they can be hit.
    What is known already only counts as just used; the slot's own copy of such a
    page is not taken. If the index has too few entries left, the least recently
    used are evicted, and if that is not enough the prompt's first pages go in.

    Args:
      index: the index; donate it.
      table: the page table; donate it.
      slot: int32[]; the slot.
      tokens: int32[L]; the prompt, padded on the right.
      num_tokens: int32[]; its tokens, at most what the slot holds. A last page
        that they do not fill is left out.

    Returns:
      `(index, table)`; the index is one more owner of each page it took.

    Raises:
      ValueError, TypeError: an array has the wrong shape or dtype.

    Example:
      See `lookup_prefix`.

      >>> import jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=4, page_size=2, max_slots=1, pages_per_slot=2
      ... )
      >>> index = pj.init_prefix_index(num_entries=4, page_size=2)
      >>> table, _, _ = pj.append(table, jnp.array([3]))
      >>> index, table = pj.insert_prefix(index, table, 0, jnp.array([7, 8, 9]), 3)
      >>> table.refcounts.tolist()
      [2, 1, 0, 0]
    """
    slot = ops.as_int32("slot", slot, ())
    tokens = ops.as_int32("tokens", tokens, (None,))
    num_tokens = ops.as_int32("num_tokens", num_tokens, ())
    _check_page_size(index, table)
    held = ops.read(table.seq_lens, slot[None])[0]
    num_tokens = jnp.clip(num_tokens, 0, held)
    entries, hits, known = _find(index, tokens, num_tokens)
    index = _touch(index, entries, hits)
    # New ones follow the hits, up to the first whose hash another entry has.
    nth = jnp.arange(hits.shape[0], dtype=jnp.int32)
    full = nth < num_tokens // index.page_size
    new = _all_so_far(hits | (full & ~known)) & ~hits
    num_hits = jnp.sum(hits.astype(jnp.int32))
    num_new = jnp.sum(new.astype(jnp.int32))
    unused = jnp.sum((index.serials == 0).astype(jnp.int32))
    # What this prompt has just hit stays: the new entries are its children.
    keep = index.last_used == index.clock
    index, table = _evict(index, table, num_new - unused, keep)

    place = jnp.where(new, nth - num_hits, index.num_entries)
    target = _nth_unused(index, place)
    stored = target < index.num_entries
    serial = index.clock + 1 + place
    before = jnp.where(hits, index.serials[entries], serial)
    parents = jnp.concatenate([jnp.zeros((1,), jnp.int32), before])[:-1]
    pages = table.page_indices.at[slot, nth].get(
        mode="fill", fill_value=table.num_pages
    )
    hashes = _hash_prefixes(tokens, index.page_size)
    index = PrefixIndex(
        serials=index.serials.at[target].set(serial, mode="drop"),
        parents=index.parents.at[target].set(parents, mode="drop"),
        hashes=index.hashes.at[target].set(hashes, mode="drop"),
        tokens=index.tokens.at[target].set(_by_page(index, tokens), mode="drop"),
        pages=index.pages.at[target].set(pages, mode="drop"),
        depths=index.depths.at[target].set(nth, mode="drop"),
        last_used=index.last_used.at[target].set(index.clock, mode="drop"),
        clock=index.clock + 1 + num_new,
    )
    return index, inc_ref(table, jnp.where(stored, pages, table.num_pages))


def evict_prefixes(
    index: PrefixIndex, table: PageTable, num_pages: jax.Array | int
) -> tuple[PrefixIndex, PageTable]:
    """Forgets the least recently used pages and so makes them free.

    Only pages that nobody but the index owns are taken: one that a slot still
    names stays, and stays known. Of one prompt the last pages go first.

    Args:
      index: the index; donate it.
      table: the page table; donate it.
      num_pages: int32[]; how many to free, at most. `num_entries` for all.

    Returns:
      `(index, table)`.

    Example:
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=4, page_size=2, max_slots=1, pages_per_slot=2
      ... )
      >>> index = pj.init_prefix_index(num_entries=4, page_size=2)
      >>> table, _, _ = pj.append(table, jnp.array([4]))
      >>> index, table = pj.insert_prefix(
      ...     index, table, 0, jnp.array([7, 8, 9, 1]), 4
      ... )
      >>> table = pj.free(table, jnp.array([True]))
      >>> index, table = pj.evict_prefixes(index, table, 1)
      >>> table.refcounts.tolist()
      [1, 0, 0, 0]
    """
    num_pages = ops.as_int32("num_pages", num_pages, ())
    return _evict(index, table, num_pages, jnp.zeros((index.num_entries,), bool))


def count_evictable(index: PrefixIndex, table: PageTable) -> jax.Array:
    """Counts the pages that only the index owns, int32[].

    Args:
      index: the index.
      table: the page table.

    Example:
      >>> import pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=4, page_size=2, max_slots=1, pages_per_slot=2
      ... )
      >>> index = pj.init_prefix_index(num_entries=4, page_size=2)
      >>> int(pj.count_evictable(index, table))
      0
    """
    return jnp.sum(_evictable(index, table).astype(jnp.int32))


def prefix_pins(index: PrefixIndex, table: PageTable) -> jax.Array:
    """Counts the index's ownership of each page, int32[N], for `check_integrity`.

    Reads every page, unlike the rest.

    Args:
      index: the index.
      table: the page table.

    Example:
      >>> import pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=4, page_size=2, max_slots=1, pages_per_slot=2
      ... )
      >>> index = pj.init_prefix_index(num_entries=4, page_size=2)
      >>> pj.check_integrity(table, pj.prefix_pins(index, table))
      []
    """
    pages = jnp.where(index.serials > 0, index.pages, table.num_pages)
    return jnp.zeros_like(table.refcounts).at[pages].add(1, mode="drop")


def _find(
    index: PrefixIndex, tokens: jax.Array, num_tokens: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds the entry of each full page of a prompt.

    Returns:
      `(entries, hits, known)` for the `M` = `L // page_size` pages: int32[M], the
      entry with the page's hash; bool[M], it and all before it are hits; bool[M],
      there is an entry with that hash.
    """
    hashes = _hash_prefixes(tokens, index.page_size)
    used = (index.serials > 0)[None, :]
    same = used & jnp.all(hashes[:, None, :] == index.hashes[None, :, :], axis=-1)
    known = jnp.any(same, axis=1)
    entries = jnp.argmax(same, axis=1).astype(jnp.int32)
    equal = jnp.all(index.tokens[entries] == _by_page(index, tokens), axis=-1)
    serials = index.serials[entries]
    before = jnp.concatenate([jnp.zeros((1,), jnp.int32), serials])[:-1]
    nth = jnp.arange(known.shape[0], dtype=jnp.int32)
    full = nth < num_tokens // index.page_size
    hits = known & equal & (index.parents[entries] == before) & full
    return entries, _all_so_far(hits), known


def _hash_prefixes(tokens: jax.Array, page_size: int) -> jax.Array:
    """Hashes a prompt up to the end of each full page, uint32[M, 2].

    A sum over the tokens, so that one running sum gives all of them. Each summand
    is the token and its position, mixed by the finaliser of MurmurHash3
    (https://github.com/aappleby/smhasher).
    """
    num_pages = tokens.shape[0] // page_size
    tokens = tokens[: num_pages * page_size].astype(jnp.uint32)
    place = jnp.arange(tokens.shape[0], dtype=jnp.uint32)

    def mix(seed: int) -> jax.Array:
        x = tokens * jnp.uint32(0x9E3779B1) ^ (place * jnp.uint32(0x7FEB352D) + seed)
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        return x ^ (x >> 16)

    parts = jnp.stack([mix(1), mix(0x165667B1)], axis=-1)
    by_page = jnp.sum(parts.reshape(num_pages, page_size, 2), axis=1, dtype=jnp.uint32)
    return jnp.cumsum(by_page, axis=0, dtype=jnp.uint32)


def _evict(
    index: PrefixIndex, table: PageTable, count: jax.Array, keep: jax.Array
) -> tuple[PrefixIndex, PageTable]:
    """Frees up to `count` pages, least recently used first, without those to keep."""
    own = jnp.arange(index.num_entries, dtype=jnp.int32)

    def evict(state: tuple) -> tuple:
        serials, table, count = state
        can = _evictable(dataclasses.replace(index, serials=serials), table) & ~keep
        # A prompt's pages were last used together or the first ones later.
        *_, order = lax.sort(
            ((~can).astype(jnp.int32), index.last_used, -index.depths, own),
            num_keys=3,
        )
        taken = own < jnp.minimum(count, jnp.sum(can.astype(jnp.int32)))
        gone = jnp.zeros_like(can).at[order].set(taken)
        table = dec_ref(table, jnp.where(gone, index.pages, table.num_pages))
        return jnp.where(gone, 0, serials), table, jnp.zeros_like(count)

    # A loop that runs once or not at all: nothing is sorted where nothing is short.
    state = ops.vary_together((index.serials, table, count), index, keep)
    serials, table, _ = lax.while_loop(lambda state: state[2] > 0, evict, state)
    return dataclasses.replace(index, serials=serials), table


def _evictable(index: PrefixIndex, table: PageTable) -> jax.Array:
    return (index.serials > 0) & (ops.read(table.refcounts, index.pages) == 1)


def _touch(index: PrefixIndex, entries: jax.Array, hits: jax.Array) -> PrefixIndex:
    hit = jnp.where(hits, entries, index.num_entries)
    last_used = index.last_used.at[hit].set(index.clock, mode="drop")
    return dataclasses.replace(index, last_used=last_used)


def _nth_unused(index: PrefixIndex, nth: jax.Array) -> jax.Array:
    """Gives the nth unused entry for each number, `C` if there are not as many."""
    unused = index.serials == 0
    rank = jnp.cumsum(unused.astype(jnp.int32)) - 1
    own = jnp.arange(index.num_entries, dtype=jnp.int32)
    by_rank = jnp.full_like(own, index.num_entries)
    by_rank = by_rank.at[jnp.where(unused, rank, index.num_entries)].set(
        own, mode="drop"
    )
    return ops.read(by_rank, nth, index.num_entries)


def _all_so_far(flags: jax.Array) -> jax.Array:
    return lax.cummin(flags.astype(jnp.int32)) > 0


def _by_page(index: PrefixIndex, tokens: jax.Array) -> jax.Array:
    num_pages = tokens.shape[0] // index.page_size
    whole = tokens[: num_pages * index.page_size]
    return whole.reshape(num_pages, index.page_size)


def _check_page_size(index: PrefixIndex, table: PageTable) -> None:
    if index.page_size != table.page_size:
        raise ValueError(
            f"the index has pages of {index.page_size} tokens, but the table has"
            f" pages of {table.page_size}"
        )
