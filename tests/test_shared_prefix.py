"""Shared-prefix attention is paged attention, whatever is shared."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import attention_oracle

import pagedjax as pj

pytestmark = pytest.mark.core

SIZE, PAGES, WIDTH, SLOTS, DIM = 4, 40, 6, 6, 8


def draw(
    shared: list[int], lens: list[int], *, heads: tuple[int, int] = (4, 2)
) -> tuple[np.ndarray, ...]:
    """Two groups of three slots that share their first `shared[g]` pages."""
    rng = np.random.default_rng(0)
    table = rng.permutation(PAGES)[: SLOTS * WIDTH].reshape(SLOTS, WIDTH)
    for group, count in enumerate(shared):
        table[3 * group : 3 * group + 3, :count] = table[3 * group, :count]
    for slot, length in enumerate(lens):
        table[slot, -(-length // SIZE) :] = PAGES
    shape = (PAGES, SIZE, heads[1], DIM)
    k, v = rng.standard_normal((2, *shape)).astype(np.float32)
    owned = np.zeros((PAGES, SIZE), bool)
    for slot, length in enumerate(lens):
        for i in range(length):
            owned[table[slot, i // SIZE], i % SIZE] = True
    k[~owned] = v[~owned] = np.nan
    q = rng.standard_normal((SLOTS, heads[0], DIM)).astype(np.float32)
    return q, k, v, table.astype(np.int32), np.array(lens, np.int32)


CASES = {
    "both groups share": ([2, 3], [9, 11, 12, 13, 14, 24]),
    "nothing is shared": ([0, 0], [9, 11, 12, 13, 14, 24]),
    "one group shares": ([0, 5], [1, 2, 3, 21, 24, 22]),
    "idle slots, first ones too": ([2, 2], [0, 11, 12, 9, 0, 0]),
    "all idle": ([2, 2], [0, 0, 0, 0, 0, 0]),
    "a row ends inside the prefix": ([3, 2], [12, 6, 13, 8, 8, 8]),
    "the last page is partial and shared": ([3, 1], [10, 10, 10, 2, 3, 4]),
}


@pytest.mark.parametrize("implementation", ["xla", None])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle(case: str, implementation: str | None) -> None:
    arrays = draw(*CASES[case])
    options: dict[str, Any] = dict(return_lse=True, implementation=implementation)
    out, lse = attend(arrays, 3, **options)
    want = attention_oracle(*arrays)
    np.testing.assert_allclose(out, want[0], rtol=3e-6, atol=3e-6)
    np.testing.assert_allclose(lse, want[1], rtol=3e-6, atol=3e-6)


def attend(arrays: tuple, group_size: int, **options: Any) -> Any:
    call = jax.jit(
        lambda *x: pj.shared_prefix_attention(*x, group_size=group_size, **options)
    )
    return call(*map(jnp.asarray, arrays))


@pytest.mark.parametrize("group_size", [1, 2, 6])
def test_any_group_size_gives_the_same(group_size: int) -> None:
    arrays = draw([2, 3], [9, 11, 12, 13, 14, 24], heads=(3, 1))
    options: dict[str, Any] = dict(soft_cap=1.5, scale=0.7)
    got = attend(arrays, group_size, **options)
    want = attention_oracle(*arrays, **options)[0]
    np.testing.assert_allclose(got, want, rtol=3e-6, atol=3e-6)


def test_the_prefix_is_read_once_per_group(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def spy(q: Any, k: Any, v: Any, table: Any, lens: Any, **options: Any) -> Any:
        calls.append((q.shape, lens.tolist()))
        return pj.paged_attention(q, k, v, table, lens, **options)

    monkeypatch.setattr("pagedjax._shared_prefix.paged_attention", spy)
    arrays = draw([2, 3], [9, 11, 12, 13, 14, 24])
    pj.shared_prefix_attention(*map(jnp.asarray, arrays), group_size=3)
    # 2 rows with the heads of 3 slots over the prefix, 6 over what is left.
    assert calls == [
        ((2, 12, DIM), [8, 12]),
        ((6, 4, DIM), [1, 3, 4, 1, 2, 12]),
    ]


def test_mistakes_are_named() -> None:
    q, *rest = map(jnp.asarray, draw([2, 3], [9, 11, 12, 13, 14, 24]))
    with pytest.raises(ValueError, match="group_size 4 does not divide the 6 slots"):
        pj.shared_prefix_attention(q, *rest, group_size=4)
    with pytest.raises(ValueError, match="group_size must be a whole number >= 1"):
        pj.shared_prefix_attention(q, *rest, group_size=0)
    with pytest.raises(ValueError, match="3 heads of q must be a multiple of the 2"):
        pj.shared_prefix_attention(q[:, :3], *rest, group_size=3)
    k_pages, v_pages, table, lens = rest
    for bad, error, message in (
        ((q[0], *rest), ValueError, "q must be"),
        ((q, k_pages, v_pages, table + 0.7, lens), TypeError, "page_indices must hold"),
        ((q, k_pages, v_pages, table, lens[:5]), ValueError, "seq_lens has 5 slots"),
    ):
        with pytest.raises(error, match=message):
            pj.shared_prefix_attention(*bad, group_size=3)
