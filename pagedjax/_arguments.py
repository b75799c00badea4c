"""What `generate` and `rollout` are both given, completed and checked."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pagedjax import _options as options
from pagedjax import _page_ops as ops
from pagedjax._paged_model import PagedModel


def check_arguments(
    model: PagedModel,
    prompts: Any,
    prompt_lens: Any,
    key: jax.Array | None,
    seeds: Any,
    eos_ids: Sequence[int],
    *,
    max_new_tokens: int,
    num_samples: int,
    page_size: int,
    num_pages: int | None,
    chunk_size: int,
) -> tuple[tuple[jax.Array, ...], dict[str, int]]:
    """Completes and checks the arguments; gives the arrays and the static sizes."""
    check_model(model)
    prompts = ops.as_int32("prompts", prompts, (None, None))
    batch, length = prompts.shape
    for axis, size in enumerate(prompts.shape):
        ops.as_size(f"prompts.shape[{axis}]", size)
    max_new_tokens = ops.as_size("max_new_tokens", max_new_tokens)
    num_samples = ops.as_size("num_samples", num_samples)
    page_size = ops.as_size("page_size", page_size)
    chunk_size = ops.as_size("chunk_size", chunk_size)
    if prompt_lens is None:
        prompt_lens = np.full((batch,), length, np.int32)
    prompt_lens = ops.as_int32("prompt_lens", prompt_lens, (batch,))
    limit = model.max_seq_len
    if not isinstance(prompt_lens, jax.core.Tracer):
        # NumPy's: under an outer jit even a concrete array's min() is traced.
        lens = np.asarray(prompt_lens)
        low, high = int(lens.min()), int(lens.max())
        if low < 0 or high > length:
            raise ValueError(
                f"prompt_lens must be between 0 and {length}, got {low} to {high}"
            )
        if limit is not None and high > limit:
            raise ValueError(
                f"a prompt of {high} tokens is longer than the model's context of"
                f" {limit}"
            )
    seeds = np.arange(batch, dtype=np.int32) if seeds is None else seeds
    seeds = ops.as_int32("seeds", seeds, (batch,))
    key, ends = options.as_key(key), options.as_token_ids("eos_ids", eos_ids)
    longest = length + max_new_tokens
    longest = longest if limit is None else min(longest, max(limit, length))
    if num_pages is None:
        # A prompt's pages are shared; each sample adds its own tokens and, at the
        # seam, its copy of the prompt's last page.
        own = ops.num_pages_of(max_new_tokens, page_size) + 1
        num_pages = batch * (ops.num_pages_of(length, page_size) + num_samples * own)
    num_pages = ops.as_size("num_pages", num_pages)
    return (prompts, prompt_lens, key, seeds, ends), dict(
        max_new_tokens=max_new_tokens,
        num_samples=num_samples,
        page_size=page_size,
        num_pages=num_pages,
        pages_per_slot=ops.num_pages_of(longest, page_size),
        chunk_size=min(chunk_size, batch * length),
    )


def check_model(model: Any) -> None:
    """Raises TypeError unless it is a model that can generate."""
    if not isinstance(model, PagedModel):
        raise TypeError(
            f"model must be a PagedModel, as `paged` gives, got {type(model).__name__}"
        )
