"""Breaks the Mosaic GPU kernels, one fault at a time, and expects the tests to notice.

    python tests/mutate_pallas_mosaic.py          all faults; about 10 s each
    python tests/mutate_pallas_mosaic.py wait     those with the word in their name

As `mutate_pallas_tpu.py`, whose runner it is; it wants a jax whose interpreter plays
these kernels, 0.11.2. What that cannot notice is in the list too, with the reason.
"""

import sys

from mutate_pallas_tpu import Fault, run

_KERNEL = "gpu_mosaic_kernel.py"
_PAGES = "gpu_mosaic_pages.py"
_WHOLE = "test_matches_oracle and not page_size and decode"
_WINDOW = "test_matches_oracle and window and soft_cap and decode"  # D = 128
_INT8 = "test_quantised_pages and int8 and decode"
_FLOAT8 = "test_quantised_pages and float8"
_DROPPED = "TMA writes nothing outside of an array, on the device too"
FAULTS = [
    # --- waiting, arriving, showing ---
    Fault(
        "no wait for the queries",
        _KERNEL,
        "    plgpu.barrier_wait(q_here)\n",
        "",
        _WHOLE,
    ),
    Fault(
        "no wait for the keys",
        _KERNEL,
        "        plgpu.barrier_wait(k_here.at[stage])\n",
        "",
        _WHOLE,
    ),
    Fault(
        "no wait for the values",
        _KERNEL,
        "        plgpu.barrier_wait(v_here.at[stage])\n",
        "",
        _WHOLE,
    ),
    Fault(
        "no wait for the scales",
        _KERNEL,
        "            plgpu.barrier_wait(scales_here.at[stage])\n",
        "",
        _INT8,
    ),
    Fault(
        "pages that are not copied do not arrive",
        _KERNEL,
        "                    plgpu.barrier_arrive(here.at[stage])\n",
        "                    pass\n",
        _WHOLE,
    ),
    Fault(
        "widened keys are not shown to wgmma",
        _KERNEL,
        "            plgpu.commit_smem()\n            keys = k_wide\n",
        "            keys = k_wide\n",
        _INT8,
    ),
    Fault(
        "weights are not shown to wgmma",
        _KERNEL,
        "        plgpu.commit_smem()\n        new_sums = []\n",
        "        new_sums = []\n",
        _WHOLE,
    ),
    Fault(
        "the result is not shown to TMA",
        _KERNEL,
        "        plgpu.commit_smem()\n        columns =",
        "        columns =",
        _WHOLE,
    ),
    Fault(
        "results are overwritten while they leave",
        _KERNEL,
        "        )\n        plgpu.wait_smem_to_gmem(0)\n",
        "        )\n",
        _WINDOW,
    ),
    Fault(
        "the block ends before its log-sum-exp has left",
        _KERNEL,
        "lse_ref.at[split, block, head])\n    plgpu.wait_smem_to_gmem(0)\n",
        "lse_ref.at[split, block, head])\n",
        _WHOLE,
    ),
    # --- which stage, which turn ---
    Fault(
        "the other stage is computed",
        _KERNEL,
        "stage = lax.rem(turn - low, geometry.stages)",
        "stage = lax.rem(turn - low + 1, geometry.stages)",
        _WHOLE,
    ),
    Fault(
        "stages are counted from the first turn of the slot",
        _KERNEL,
        "stage = lax.rem(turn - low, geometry.stages)",
        "stage = lax.rem(turn, geometry.stages)",
        _WINDOW,
    ),
    Fault(
        "a turn arrives in the stage of another",
        _KERNEL,
        "            fetch(turn + geometry.stages, stage)\n",
        "            fetch(turn + geometry.stages, geometry.stages - 1 - stage)\n",
        _WHOLE,
    ),
    Fault(
        "the turn after the next arrives",
        _KERNEL,
        "            fetch(turn + geometry.stages, stage)\n",
        "            fetch(turn + geometry.stages + 1, stage)\n",
        _WHOLE,
    ),
    Fault(
        "the last turn never comes",
        _KERNEL,
        "@pl.when(turn + geometry.stages < high)",
        "@pl.when(turn + geometry.stages + 1 < high)",
        _WHOLE,
    ),
    Fault(
        "a turn after the last is begun",
        _KERNEL,
        "pl.when(low + stage < high)(",
        "pl.when(low + stage <= high)(",
        _WHOLE,
    ),
    Fault(
        "the last part of a context is a turn short",
        _KERNEL,
        "share = _ceil_div(turns, out_ref.shape[0])",
        "share = lax.div(turns, out_ref.shape[0])",
        _WHOLE,
    ),
    # --- which tokens ---
    Fault(
        "a partly filled last page is left out",
        _KERNEL,
        "wanted = (start < end) &",
        "wanted = (start + geometry.chunk <= end) &",
        _WHOLE,
    ),
    Fault(
        "a page that the window cuts is left out",
        _KERNEL,
        "(start + geometry.chunk > oldest)",
        "(start >= oldest)",
        _WINDOW,
    ),
    Fault(
        "a query sees the next token",
        _KERNEL,
        "visible = token <= position",
        "visible = token <= position + 1",
        _WHOLE,
    ),
    Fault(
        "the window is one too wide",
        _KERNEL,
        "visible &= token > position - geometry.window",
        "visible &= token >= position - geometry.window",
        _WINDOW,
    ),
    Fault(
        "values past the end are multiplied",
        _KERNEL,
        "_clear_unseen(values, seen)",
        "_clear_unseen(values, (seen[0], BLOCK_TOKENS))",
        _WHOLE,
    ),
    Fault(
        "one value too many is multiplied",
        _KERNEL,
        "_clear_unseen(values, seen)",
        "_clear_unseen(values, (seen[0], seen[1] + 1))",
        _WHOLE,
    ),
    Fault(
        "values before the window are multiplied",
        _KERNEL,
        "_clear_unseen(values, seen)",
        "_clear_unseen(values, (jnp.int32(0), seen[1]))",
        _WINDOW,
    ),
    Fault(
        "widened values that nobody sees are multiplied",
        _KERNEL,
        "_widen(values, wide, seen)",
        "_widen(values, wide)",
        _FLOAT8,
    ),
    # --- numbers ---
    Fault(
        "no rescale of the sums of values",
        _KERNEL,
        "held * _across(decay, COLUMNS) + added",
        "held + added",
        _WHOLE,
    ),
    Fault(
        "no rescale of the sum of weights",
        _KERNEL,
        "total = total * decay +",
        "total = total +",
        _WHOLE,
    ),
    Fault(
        "the maximum is that before the turn",
        _KERNEL,
        "shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)",
        "shift = jnp.where(peak == -jnp.inf, 0.0, peak)",
        _WHOLE,
    ),
    Fault(
        "a row that has seen nothing is shifted by infinity",
        _KERNEL,
        "shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)",
        "shift = new_peak",
        "test_matches_oracle and window and not soft_cap and ragged",
    ),
    Fault(
        "weights are rounded",
        _KERNEL,
        "_multiply((high_smem, part), (low_smem, part))",
        "_multiply((high_smem, part))",
        _WHOLE,
    ),
    Fault(
        "a row that sees nothing is divided by its sum",
        _KERNEL,
        "        out = jnp.where(_across(some, COLUMNS), out, 0.0)\n",
        "",
        _WHOLE,
    ),
    Fault(
        "keys without their scales",
        _KERNEL,
        "scores *= _scales(row_smem.at[pl.ds(0, BLOCK_TOKENS)])",
        "pass",
        _INT8,
    ),
    Fault(
        "values with the scales of keys",
        _KERNEL,
        "_scales(row_smem.at[pl.ds(BLOCK_TOKENS, BLOCK_TOKENS)])",
        "_scales(row_smem.at[pl.ds(0, BLOCK_TOKENS)])",
        _INT8,
    ),
    Fault(
        "scales weigh in the sum of weights",
        _KERNEL,
        "        rounded = weights.astype(",
        "        total = carry[2] * decay + jnp.sum(weights, axis=1)\n"
        "        rounded = weights.astype(",
        _INT8,
    ),
    Fault(
        "scales that nobody sees are multiplied",
        _KERNEL,
        " & (token >= seen[0]) & (token < seen[1])\n",
        "\n",
        _INT8,
    ),
    Fault(
        "the scales of the next head",
        _KERNEL,
        "column = lax.rem(head, SCALE_HEADS)",
        "column = lax.rem(head + 1, SCALE_HEADS)",
        _INT8,
    ),
    Fault(
        "the scales of the first four heads",
        _KERNEL,
        "pl.ds(lax.div(head, SCALE_HEADS) * SCALE_HEADS, SCALE_HEADS)",
        "pl.ds(0, SCALE_HEADS)",
        "test_quantised_pages and float16",
    ),
    # --- pages ---
    Fault(
        "no wait for what is moved",
        _PAGES,
        "        plgpu.barrier_wait(here)\n",
        "",
        "test_tokens_are_written",
    ),
    Fault(
        "a row ends before it has left",
        _PAGES,
        "        plgpu.wait_smem_to_gmem(0)\n",
        "",
        "test_tokens_are_written",
    ),
    Fault(
        "offsets past the page are stored",
        _PAGES,
        "valid &= (offset >= 0) & (offset < page_size)",
        "valid &= offset >= 0",
        "test_tokens_are_written",
        unseen=_DROPPED,
    ),
    Fault(
        "the NULL page is stored",
        _PAGES,
        "valid = (page >= 0) & (page < num_pages)\n",
        "valid = (page >= 0) & (page <= num_pages)\n",
        "test_tokens_are_written",
        unseen=_DROPPED,
    ),
    Fault(
        "the NULL page is copied",
        _PAGES,
        "valid = (src >= 0) & (src < num_pages) &",
        "valid = (src >= 0) & (src <= num_pages) &",
        "test_pages_are_copied",
    ),
]


def main(words: list[str]) -> int:
    """Runs the faults whose name has the first word; all without one."""
    return run(FAULTS, ["test_pallas_mosaic.py"], words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
