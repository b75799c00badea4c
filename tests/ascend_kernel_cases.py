"""Small calls of the Ascend C kernels and what they must give, by the NumPy oracle."""

import dataclasses
import functools
import sys

import ascend_kernels
import numpy as np
from ascend_kernels import BFLOAT16, Library
from oracles import attention_oracle

# The rule of ATB's own tests, |out - ref| <= err * max(1, |ref|). ATB takes err = 2^-8
# for float16 (2^-7 for bfloat16) where head_dim * length < 2,044, twice that beyond.
# Here it is a quarter (a half) of the stricter one at any length: weights are float32.
TOLERANCE = {np.dtype(np.float16): 2.0**-10, BFLOAT16: 2.0**-8}
# lse is float32 of float32 sums of float16 products.
LSE_TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Attention:
    """One decode call on random pages.

    Attributes:
        lens: tokens of each slot.
        heads: (query heads, kv heads).
        bad: slot one of whose visible page ids is outside the pool, or -1.
        nan: slot whose last key is NaN, for kv head 0, or -1.
        below: all scores are far below 0.
        width: page ids of a slot, 0 for as many as the longest takes.
    """

    lens: tuple[int, ...]
    heads: tuple[int, int]
    dim: int = 64
    page_size: int = 16
    dtype: np.dtype = np.dtype(np.float16)
    scale: float | None = None
    window: int = 0
    soft_cap: float = 0.0
    splits: int = 0
    tile: int = 0
    bad: int = -1
    nan: int = -1
    below: bool = False
    width: int = 0
    pages: int = 0
    seed: int = 0

    def check(self, library: Library) -> None:
        """Run it and compare; AssertionError or KernelError if it is not right."""
        arrays = make_attention(self)
        # The kernels get copies, so that a fault cannot spoil the case.
        q, k, v, table, lens = (x.copy() for x in arrays)
        out, lse = library.attend(
            q,
            k,
            v,
            table,
            lens,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            splits=self.splits,
            tile=self.tile,
        )
        for now, before in zip((q, k, v), arrays, strict=False):
            assert _bits_equal(now, before), "an input was written"
        want, want_lse = expect_attention(self)
        assert_close(out, want)
        assert_lse_close(lse, want_lse, self.dtype)


def assert_close(out: np.ndarray, want: np.ndarray) -> None:
    """Compare results by the tolerance of their dtype; NaN equals NaN."""
    got = out.astype(np.float64)
    assert (np.isnan(got) == np.isnan(want)).all(), "NaN in the wrong places"
    error = np.abs(got - want) / np.maximum(1.0, np.abs(want))
    worst = np.nanmax(error, initial=0.0)
    assert worst <= TOLERANCE[out.dtype], f"error {worst} of out"


def assert_lse_close(lse: np.ndarray, want: np.ndarray, dtype: np.dtype) -> None:
    """Compare log-sum-exps; -inf where there is no key, and NaN, and only there."""
    assert lse.dtype == np.float32
    assert (np.isneginf(lse) == np.isneginf(want)).all(), "-inf in the wrong places"
    assert (np.isnan(lse) == np.isnan(want)).all(), "NaN of lse in the wrong places"
    some = np.isfinite(want)
    error = np.abs(lse[some] - want[some]) / np.maximum(1.0, np.abs(want[some]))
    assert error.max(initial=0.0) <= LSE_TOLERANCE, f"error {error.max()} of lse"


@functools.cache
def make_attention(case: Attention) -> tuple[np.ndarray, ...]:
    """Return (q, k, v, table, lens); page ids repeat, as in ATB's tests."""
    rng = np.random.default_rng(case.seed)
    heads, kv_heads = case.heads
    slots, longest = len(case.lens), max(case.lens)
    width = case.width or max(1, -(-longest // case.page_size))
    num_pages = case.pages or width * slots + 1
    shape = (num_pages, case.page_size, kv_heads, case.dim)
    q = rng.uniform(-1, 1, (slots, heads, case.dim)).astype(case.dtype)
    k = rng.uniform(-1, 1, shape).astype(case.dtype)
    v = rng.uniform(-1, 1, shape).astype(case.dtype)
    if case.below:
        q, k = -np.abs(q), np.abs(k)
    table = rng.integers(0, num_pages, (slots, width)).astype(np.int32)
    for slot, length in enumerate(case.lens):
        table[slot, -(-length // case.page_size) :] = num_pages
    if case.bad >= 0:
        table[case.bad, (case.lens[case.bad] - 1) // case.page_size] = num_pages
    if case.nan >= 0:
        last = case.lens[case.nan] - 1
        page = table[case.nan, last // case.page_size]
        k[page, last % case.page_size, 0] = np.nan
    return q, k, v, table, np.array(case.lens, np.int32)


@functools.cache
def expect_attention(case: Attention) -> tuple[np.ndarray, np.ndarray]:
    """Return the oracle's (out, lse); a row with a page outside the pool is empty."""
    q, k, v, table, lens = make_attention(case)
    lens = np.minimum(lens, table.shape[1] * case.page_size)
    if case.bad >= 0:
        lens[case.bad] = 0
    return attention_oracle(
        q,
        k,
        v,
        table,
        lens,
        scale=case.scale,
        window=case.window or None,
        soft_cap=case.soft_cap or None,
    )


@dataclasses.dataclass(frozen=True)
class Mean:
    """Two keys of equal weight: the mean of their values, rounded to nearest even."""

    dtype: np.dtype = np.dtype(np.float16)

    def check(self, library: Library) -> None:
        """Run it and compare bit for bit."""
        rng = np.random.default_rng(4)
        shape = (1, 16, 1, 64)
        k, v = (rng.uniform(-1, 1, shape).astype(self.dtype) for _ in "kv")
        v[0, 1] = np.nextafter(v[0, 0], self.dtype.type(4))  # the mean is a tie
        v[0, 1, :, ::2] = rng.uniform(-1, 1, 32)
        pair = v[0, :2, 0].astype(np.float64)
        q = np.zeros((1, 1, 64), self.dtype)
        lens = np.array([2], np.int32)
        out, _ = library.attend(q, k, v, lens[None] * 0, lens)
        want = (pair.sum(0) / 2).astype(np.float32).astype(self.dtype)
        assert _bits_equal(out[0, 0], want), "a result is not rounded to nearest even"


@dataclasses.dataclass(frozen=True)
class Write:
    """Rows at random places, two of them outside the pool."""

    tokens: int
    shape: tuple[int, int, int, int]  # of the pages

    def check(self, library: Library) -> None:
        """Run it and compare bit for bit."""
        rng = np.random.default_rng(1)
        pages, page_size, *row = self.shape
        k, v = _random_bits(rng, self.shape), _random_bits(rng, self.shape)
        k_new = _random_bits(rng, (self.tokens, *row))
        v_new = _random_bits(rng, (self.tokens, *row))
        places = pages * page_size
        slots = rng.permutation(places)[: self.tokens].astype(np.int32)
        slots[0], slots[-1] = -1, places
        want_k, want_v = k.copy(), v.copy()
        for token in range(1, self.tokens - 1):
            page, offset = divmod(int(slots[token]), page_size)
            want_k[page, offset] = k_new[token]
            want_v[page, offset] = v_new[token]
        library.write(k_new, v_new, k, v, slots)
        assert _bits_equal(k, want_k) and _bits_equal(v, want_v)


@dataclasses.dataclass(frozen=True)
class Copy:
    """One source to several pages, among them some that are outside the pool."""

    shape: tuple[int, int, int, int]

    def check(self, library: Library) -> None:
        """Run it and compare bit for bit."""
        rng = np.random.default_rng(2)
        k, v = _random_bits(rng, self.shape), _random_bits(rng, self.shape)
        null = self.shape[0]
        src = np.array([0, null, 1, -1], np.int32)
        dst = np.array([2, 3, 5, 4, null, 6], np.int32)
        cumsum = np.array([2, 3, 5, 6], np.int32)
        want_k, want_v = k.copy(), v.copy()
        for pool in (want_k, want_v):
            pool[2] = pool[3] = pool[0]
            pool[4] = pool[1]
        library.copy(k, v, src, dst, cumsum)
        assert _bits_equal(k, want_k) and _bits_equal(v, want_v)


# Together these reach every line of the kernels.
SMALL = (
    Attention((0, 1, 150, 48), (6, 2), dim=80, splits=2, bad=3),
    Attention((200, 128), (8, 1), dim=128, page_size=128, window=130, soft_cap=3.0),
    # Scores whose exponentials overflow unless the running maximum goes first.
    Attention((64, 200), (2, 2), page_size=32, scale=30.0, seed=3),
    Attention((70,), (8, 1), dim=256, page_size=48),
    # More rows than the cores take at once, a void one the first of a core, and a
    # length past the table row.
    Attention((17, 3, 33), (16, 2), dim=16, bad=0, width=2),
    # No weight is left if the running maximum starts at 0.
    Attention((40, 300), (2, 1), scale=30.0, below=True, splits=2),
    # A cap that is far above the scores; lengths whose keys are in several tiles.
    Attention((20, 130), (20, 2), dim=16, tile=5, soft_cap=1e6, nan=0, pages=40),
    Mean(),
    Write(13, (3, 16, 2, 64)),
    Write(3, (2, 16, 8, 2064)),
    Copy((7, 16, 2, 640)),
)


def _random_bits(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Any 16 bits, NaN patterns among them."""
    return rng.integers(0, 1 << 16, shape, dtype=np.uint16).view(np.float16)


def _bits_equal(a: np.ndarray, b: np.ndarray) -> bool:
    return bool((a.view(np.uint16) == b.view(np.uint16)).all())


def _main() -> None:
    """Run the small cases: ARCH, then flags that the library was built with."""
    library = ascend_kernels.load(int(sys.argv[1]), tuple(sys.argv[2:]))
    for seed in (0, 1, 2, 3):
        library.seed = seed
        for case in SMALL:
            case.check(library)
    print(f"{len(SMALL)} cases")


if __name__ == "__main__":
    _main()
