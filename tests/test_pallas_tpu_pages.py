"""The TPU kernels that change pages, in both interpreters, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_tpu_cases import simulated

from pallas_kernels import tpu_pages

LAYERS, PAGES, PAGE_SIZE, ROW = 2, 6, 3, (2, 8)
MODES = pytest.mark.parametrize("mode", [None, "eager", "on_wait"])
NULL = LAYERS * PAGES


def draw(shape, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2)]


def in_mode(mode, run):
    """Call `run(interpret)` in the HLO interpreter, or in the simulator."""
    if mode is None:
        return run(True)
    with simulated(mode) as interpret:
        return jax.block_until_ready(run(interpret))


@MODES
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_write_puts_every_row_in_its_place_and_nothing_else(mode, dtype) -> None:
    tokens = 35  # more than one block of rows, the last one not full
    places = np.random.default_rng(1).permutation(NULL * PAGE_SIZE)[:tokens]
    pages, offsets = np.divmod(places, PAGE_SIZE)
    pages[[3, 30]] = NULL, -1  # two tokens without a page
    offsets[5] = PAGE_SIZE  # and one without a place
    held, new = draw((NULL, PAGE_SIZE, *ROW), dtype), draw((tokens, *ROW))
    want = [np.array(x) for x in held]
    kept = np.isin(np.arange(tokens), [3, 30, 5], invert=True)
    for array, rows in zip(want, new, strict=True):
        array[pages[kept], offsets[kept]] = np.asarray(rows.astype(dtype))[kept]
    write = jax.jit(tpu_pages.write_kv, static_argnames="interpret")
    args = (*new, jnp.asarray(pages), jnp.asarray(offsets))
    got = in_mode(mode, lambda interpret: write(*held, *args, interpret=interpret))
    for array, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(array), expected)


@MODES
def test_copies_in_every_layer_and_of_every_array(mode) -> None:
    held = [*draw((NULL, PAGE_SIZE, *ROW)), *draw((NULL, PAGE_SIZE, 2))]
    src, dst = jnp.array([1, PAGES, 0, 4, -1]), jnp.array([3, 2, 5, PAGES, 2])
    want = [np.array(x) for x in held]
    for array in want:
        for layer in range(LAYERS):
            array[layer * PAGES + 3] = array[layer * PAGES + 1]
            array[layer * PAGES + 5] = array[layer * PAGES]
    copy = jax.jit(tpu_pages.copy_pages, static_argnames=("num_layers", "interpret"))
    got = in_mode(
        mode,
        lambda interpret: copy(
            tuple(held), src, dst, num_layers=LAYERS, interpret=interpret
        ),
    )
    for array, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(array), expected)


def test_an_empty_plan_copies_nothing() -> None:
    (pages, _) = draw((NULL, PAGE_SIZE, *ROW))
    none = jnp.full((3,), PAGES)
    (got,) = tpu_pages.copy_pages(
        (pages,), none, none, num_layers=LAYERS, interpret=True
    )
    np.testing.assert_array_equal(got, pages)
    (got,) = tpu_pages.copy_pages((pages,), none[:0], none[:0], num_layers=LAYERS)
    assert got is pages


def test_what_does_not_fit_is_named() -> None:
    (pages, _), ids = draw((NULL, PAGE_SIZE, *ROW)), jnp.zeros((2,), jnp.int32)
    row = jnp.zeros((2, *ROW))
    with pytest.raises(
        ValueError, match=r"k must have shape \(2, 2, 8\), got \(2, 8\)"
    ):
        tpu_pages.write_kv(pages, pages, row[0], row, ids, ids)
    with pytest.raises(ValueError, match=r"offsets must have shape \(2,\), got \(1,\)"):
        tpu_pages.write_kv(pages, pages, row, row, ids, ids[:1])
    with pytest.raises(NotImplementedError, match="pages of float16"):
        half = pages.astype(jnp.float16)
        tpu_pages.write_kv(half, half, row, row, ids, ids)
    with pytest.raises(ValueError, match=r"num_layers=5; they have \[12\]"):
        tpu_pages.copy_pages((pages,), ids, ids, num_layers=5)
    with pytest.raises(ValueError, match=r"\(2,\) and dst_pages \(1,\) must be"):
        tpu_pages.copy_pages((pages,), ids, ids[:1])
