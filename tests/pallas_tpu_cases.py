"""Running the TPU kernels on CPU: both interpreters, and what they should give."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import Arrays, assert_matches_oracle, make_arrays
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu_attention
from pallas_kernels.tpu_chips import BlockSizes

# One page of 4 is half a block of 8 tokens; runs of 16 queries have a narrow form.
SIZES = BlockSizes(tokens=8, queries=16)
KERNELS = (tpu_attention.paged_attention, tpu_attention.ragged_paged_attention)
SEQ_LENS = [0, 4, 7, 1, 12, 5, 17, 0]
# A whole prompt, a chunk, one row, none, more than one run; an odd number of rows.
Q_LENS = [0, 4, 3, 1, 0, 1, 17, 0]


def arrays_of(*, ragged: bool, **options: Any) -> Arrays:
    """Return slots of mixed lengths: NaN and garbage wherever nobody may look."""
    q_lens = Q_LENS if ragged else None
    return make_arrays(SEQ_LENS, q_lens=q_lens, padding=3 * ragged, **options)


@functools.cache
def compiled(ragged: bool, **options: Any) -> Any:
    """Return the jitted kernel; compiling is most of the time of these tests."""

    def call(args: tuple, scales: dict) -> tuple:
        return KERNELS[ragged](*args, **scales, **options)

    return jax.jit(call)


def run(
    arrays: Arrays, *, interpret: Any = True, scales: dict | None = None, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of the kernel for these arrays."""
    options = {"block_sizes": SIZES, "interpret": interpret, **options}
    call = compiled(arrays.cu_q_lens is not None, **options)
    out, lse = call(arrays.args(), scales or {})
    return np.asarray(out), np.asarray(lse)


def check(arrays: Arrays, *, interpret: Any = True, **options: Any) -> None:
    """Run the kernel and compare with the oracle."""
    names = ("window", "soft_cap", "scale")
    wanted = {name: options[name] for name in names if name in options}
    out, lse = run(arrays, interpret=interpret, **options)
    assert_matches_oracle(arrays, out, lse, **wanted)


@contextlib.contextmanager
def simulated(mode: str, **options: Any) -> Iterator[pltpu.InterpretParams]:
    """Give the parameters of the TPU simulator; fail if it saw a race.

    It only prints what it finds, and after an exception it must be cleaned.

    Args:
        mode: when copies happen, "eager" or "on_wait".
        **options: further parameters.
    """
    interpret_pallas_call.races = None
    try:
        yield pltpu.InterpretParams(
            detect_races=True, dma_execution_mode=mode, **options
        )
    except BaseException:
        pltpu.reset_tpu_interpret_mode_state()
        raise
    assert interpret_pallas_call.races is not None, "nothing ran in the simulator"
    assert not interpret_pallas_call.races.races_found


def quantise(arrays: Arrays, dtype: Any) -> tuple[Arrays, dict[str, jax.Array]]:
    """Return float32 arrays that `dtype` holds exactly, and scales; NaN stays NaN.

    The pages given to the kernel are the quantised ones; `arrays` become what they
    stand for, for the oracle.
    """
    rng = np.random.default_rng(1)
    info = jnp.iinfo(dtype) if dtype == jnp.int8 else jnp.finfo(dtype)
    scales, held = {}, {}
    for name in ("k", "v"):
        pages = getattr(arrays, f"{name}_pages")
        scale = rng.uniform(0.5, 2.0, pages.shape[:3]).astype(np.float32) / 64
        with np.errstate(invalid="ignore"):
            exact = np.clip(pages / scale[..., None], float(info.min), float(info.max))
            held[name] = np.nan_to_num(np.round(exact), nan=77).astype(dtype)
        scale[np.isnan(pages).any(axis=(2, 3))] = np.nan
        scales[f"{name}_scales"] = jnp.asarray(scale)
        setattr(
            arrays, f"{name}_pages", held[name].astype(np.float32) * scale[..., None]
        )
    kernel_arrays = Arrays(
        arrays.q,
        held["k"],
        held["v"],
        arrays.page_indices,
        arrays.seq_lens,
        arrays.cu_q_lens,
    )
    return kernel_arrays, scales
