"""Shapes and options of the attention suite, and the arrays of one case.

The suite covers every pair of values of any two axes below (not the full product,
which has thousands), with all lengths of interest in one batch.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from oracles import attention_oracle

from pagedjax import paged_attention, ragged_paged_attention

AXES: dict[str, tuple] = {
    "page_size": (1, 2, 5, 8, 16, 32, 64, 100, 128, 256),
    "heads": ((4, 4), (8, 1), (8, 2), (6, 2), (9, 3), (32, 8)),
    "head_dim": (64, 128),
    "dtype": ("float32", "bfloat16", "float16"),
    "window": (None, 1, 7, 150),
    "soft_cap": (None, 2.5),
}


# What `run` and `attention_of` run; "xla" unless a test says otherwise.
IMPLEMENTATION = "xla"
# Relative rounding of the result's dtype: one unit in the last place.
ULP = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclasses.dataclass(frozen=True)
class Case:
    """One combination; `str` of it names the test."""

    page_size: int
    heads: tuple[int, int]
    head_dim: int
    dtype: str
    window: int | None
    soft_cap: float | None

    def __str__(self) -> str:
        return (
            f"page{self.page_size}-H{self.heads[0]}K{self.heads[1]}-D{self.head_dim}-"
            f"{self.dtype}-window{self.window}-cap{self.soft_cap}"
        )

    @property
    def options(self) -> dict:
        """The keyword options of the call."""
        return {"window": self.window, "soft_cap": self.soft_cap}


def pairwise_cases() -> list[Case]:
    """Return few cases in which every two values of two axes meet at least once."""
    names = list(AXES)
    spots = [(a, b) for a, b in itertools.combinations(range(len(names)), 2)]
    missing = {
        (a, b, x, y) for a, b in spots for x in AXES[names[a]] for y in AXES[names[b]]
    }
    everything = list(itertools.product(*AXES.values()))
    # A fixed order without structure, so that the first best is not always alike.
    np.random.default_rng(0).shuffle(everything := _as_objects(everything))
    chosen = []
    while missing:
        best = max(
            everything,
            key=lambda row: sum((a, b, row[a], row[b]) in missing for a, b in spots),
        )
        missing -= {(a, b, best[a], best[b]) for a, b in spots}
        chosen.append(Case(*best))
    return chosen


def _as_objects(rows: list[tuple]) -> np.ndarray:
    """Return a one-dimensional array of tuples, which NumPy shuffles as they are."""
    array = np.empty(len(rows), object)
    array[:] = rows
    return array


@dataclasses.dataclass
class Arrays:
    """The arguments of one call: NumPy on the host, NaN wherever nobody owns it."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_indices: np.ndarray
    seq_lens: np.ndarray
    cu_q_lens: np.ndarray | None

    def args(self) -> tuple[jax.Array, ...]:
        """Return the positional arguments of the attention function."""
        args = (self.q, self.k_pages, self.v_pages, self.page_indices, self.seq_lens)
        if self.cu_q_lens is not None:
            args = (*args, self.cu_q_lens)
        return tuple(jnp.asarray(x) for x in args)

    def owned(self) -> np.ndarray:
        """Return bool[pages, page_size]: the tokens that belong to some slot."""
        owned = np.zeros(self.k_pages.shape[:2], bool)
        page_size = owned.shape[1]
        for cells, length in zip(self.page_indices, self.seq_lens, strict=True):
            for position in range(length):
                owned[cells[position // page_size], position % page_size] = True
        return owned


def make_arrays(
    seq_lens: list[int],
    *,
    q_lens: list[int] | None = None,
    padding: int = 0,
    pages_per_slot: int | None = None,
    page_size: int = 4,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 8,
    dtype: str = "float32",
    seed: int = 0,
) -> Arrays:
    """Draw a pool in which slots own shuffled pages; all else is NaN or garbage.

    Args:
        seq_lens: tokens of each slot.
        q_lens: rows of each slot, or None for decode.
        padding: rows after the last slot's.
        pages_per_slot: width of the table; None for just enough.
        page_size: tokens in a page.
        heads: (H, K).
        head_dim: D.
        dtype: of queries and pages.
        seed: of every draw.
    """
    rng = np.random.default_rng(seed)
    num_slots = len(seq_lens)
    needs = [-(-n // page_size) for n in seq_lens]
    width = max([*needs, 1]) if pages_per_slot is None else pages_per_slot
    num_pages = sum(needs) + 3
    order = rng.permutation(num_pages).astype(np.int32)
    # Ids that no reader may follow: NULL, negative, far outside, and a real page.
    garbage = [num_pages, -1, num_pages + 5, 2**31 - 1, -(2**31), int(order[-1])]
    page_indices = rng.choice(np.array(garbage, np.int32), (num_slots, width))
    taken = 0
    for slot, need in enumerate(needs):
        page_indices[slot, :need] = order[taken : taken + need]
        taken += need
    num_rows = num_slots if q_lens is None else sum(q_lens) + padding
    shape = (num_pages, page_size, heads[1], head_dim)
    arrays = Arrays(
        q=rng.standard_normal((num_rows, heads[0], head_dim)).astype(jnp.dtype(dtype)),
        k_pages=rng.standard_normal(shape).astype(jnp.dtype(dtype)),
        v_pages=rng.standard_normal(shape).astype(jnp.dtype(dtype)),
        page_indices=page_indices,
        seq_lens=np.array(seq_lens, np.int32),
        cu_q_lens=None if q_lens is None else np.cumsum([0, *q_lens]).astype(np.int32),
    )
    unowned = ~arrays.owned()
    arrays.k_pages[unowned] = np.nan
    arrays.v_pages[unowned] = np.nan
    return arrays


def lengths_of_interest(page_size: int) -> list[int]:
    """Return 0, 1, around a page, several pages, around a block, and the maximum."""
    several = 2 * page_size + page_size // 2 + 1
    most = page_size * max(3, -(-290 // page_size))
    return [0, 1, page_size - 1, page_size, page_size + 1, several, 257, most]


def case_arrays(case: Case, *, ragged: bool) -> Arrays:
    """Return the arrays of one case of the suite."""
    seq_lens = lengths_of_interest(case.page_size)
    q_lens = None
    if ragged:
        # All rows, a few, one, none, more than a block of rows; 17 of padding.
        wanted = [0, 1, 3, case.page_size, 1, 20, 140, 2]
        q_lens = [min(q, n) for q, n in zip(wanted, seq_lens, strict=True)]
    return make_arrays(
        seq_lens,
        q_lens=q_lens,
        padding=17 if ragged else 0,
        page_size=case.page_size,
        heads=case.heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        seed=case.page_size,
    )


def attention_of(arrays: Arrays) -> Callable:
    """Return the function that the arrays are arguments of."""
    ragged = arrays.cu_q_lens is not None
    return partial(
        ragged_paged_attention if ragged else paged_attention,
        implementation=IMPLEMENTATION,
    )


@functools.cache
def compiled(ragged: bool, **options) -> Callable:
    """Return the jitted function; compiling is most of this suite's time."""
    attention = ragged_paged_attention if ragged else paged_attention
    return jax.jit(
        partial(attention, return_lse=True, **options),
        compiler_options={"xla_backend_optimization_level": 0},
    )


def run(arrays: Arrays, **options) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of a call as NumPy arrays."""
    options = {"implementation": IMPLEMENTATION, **options}
    call = compiled(arrays.cu_q_lens is not None, **options)
    out, lse = call(*arrays.args())
    return np.asarray(out), np.asarray(lse)


def oracle(arrays: Arrays, **options) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of the loop oracle."""
    return attention_oracle(
        arrays.q,
        arrays.k_pages,
        arrays.v_pages,
        arrays.page_indices,
        arrays.seq_lens,
        arrays.cu_q_lens,
        **options,
    )


def assert_matches_oracle(
    arrays: Arrays, out: np.ndarray, lse: np.ndarray, *, score: float = 8.0, **options
) -> None:
    """Compare with the oracle: within float32 sums and one rounding of the dtype.

    A score of size `score` has an absolute float32 error of a few times that in units
    of 2**-23, and the weights have it as a relative error.
    """
    expected, expected_lse = oracle(arrays, **options)
    atol = 4 * score * ULP["float32"]
    np.testing.assert_allclose(
        out.astype(np.float64), expected, rtol=ULP[out.dtype.name], atol=atol
    )
    np.testing.assert_allclose(lse, expected_lse, rtol=ULP["float32"], atol=atol)
    blind = np.isinf(expected_lse)
    assert np.all(out[blind] == 0)
    assert np.all(np.isneginf(lse[blind]))


def small_decode(**options) -> Arrays:
    """Decode with an empty slot, a full page, a partial page."""
    return make_arrays([0, 4, 7, 1, 12, 5], **options)


def small_ragged(**options) -> Arrays:
    """Prefill and decode mixed, idle slots, padding."""
    return make_arrays(
        [0, 4, 7, 9, 12, 30], q_lens=[0, 4, 3, 0, 1, 22], padding=5, **options
    )
