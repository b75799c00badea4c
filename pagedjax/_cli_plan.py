"""How the command line cuts prompts into batches: arithmetic only.

Sizes of a compiled program are rounded up, so that other prompts find it in the
compilation cache. Rounding is nearly free: prompts are packed before they are
prefilled, a row without a prompt is skipped, and attention stops at the longest
live length.
"""

import dataclasses
from collections.abc import Sequence

from pagedjax._cli_prompts import CommandError

_MIN_LENGTH = 16
_CHUNK_SIZES = (16, 32, 64, 128, 256, 512)
_CHUNK_COST = 128  # of a forward pass besides its tokens, in tokens: reading weights


@dataclasses.dataclass(frozen=True)
class Plan:
    """One program for all batches.

    Attributes:
      batches: indices of the prompts of each batch, longest prompts first.
      length: tokens that a row of prompts has room for.
      longest: tokens that the longest sequence may reach.
      rows: prompts that a batch has room for.
      max_new_tokens: most tokens to produce.
      num_pages: pages in the pool.
      pages_wanted: pages with which no sample runs out.
      chunk_size: prompt tokens in one forward pass.
    """

    batches: list[list[int]]
    length: int
    longest: int
    rows: int
    max_new_tokens: int
    num_pages: int
    pages_wanted: int
    chunk_size: int


def make_plan(
    lengths: Sequence[int],
    names: Sequence[str],
    *,
    num_samples: int,
    max_new_tokens: int,
    page_size: int,
    num_pages: int | None,
    batch_size: int,
    context: int,
) -> Plan:
    """Plans the batches.

    Prompts of similar length go together; and so many that, whatever their samples
    turn out to be, the pool has pages for all. A prompt whose samples need more
    than the whole pool goes alone.

    Args:
      lengths: tokens of each prompt; at least 1.
      names: how to call each prompt in a message.
      num_samples: samples of each.
      max_new_tokens: most tokens to produce for a sample.
      page_size: tokens in a page.
      num_pages: pages in the pool; None: as many as the largest batch can need.
      batch_size: most prompts in a batch.
      context: most tokens of a sequence.

    Raises:
      CommandError: a prompt is longer than the context or the pool.

    Example:
      >>> from pagedjax._cli_plan import make_plan
      >>> plan = make_plan(
      ...     [5, 40, 6], "abc", num_samples=1, max_new_tokens=8, page_size=16,
      ...     num_pages=None, batch_size=2, context=100,
      ... )
      >>> plan.batches, plan.length, plan.rows, plan.num_pages
      ([[1, 2], [0]], 64, 2, 4)
    """

    def needs(i: int) -> int:
        return pages_needed(
            lengths[i],
            num_samples=num_samples,
            max_new_tokens=min(max_new_tokens, context - lengths[i]),
            page_size=page_size,
        )

    for length, name in zip(lengths, names, strict=True):
        if length >= context:
            raise CommandError(
                f"{name} has {length} tokens; the model's context is {context}, one"
                " of them at least for the answer"
            )
    wanted = [needs(i) for i in range(len(lengths))]
    if num_pages is not None:
        for length, name, most in zip(lengths, names, wanted, strict=True):
            own = -(-length // page_size)
            if own > num_pages:
                raise CommandError(
                    f"--num-pages {num_pages} holds {num_pages * page_size} tokens;"
                    f" {name} needs {length} ({own} pages of {page_size}): use"
                    f" --num-pages {most}"
                )
    batches: list[list[int]] = []
    used = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = num_pages is None or used + wanted[i] <= num_pages
        if not batches or len(batches[-1]) == batch_size or not fits:
            batches.append([])
            used = 0
        batches[-1].append(i)
        used += wanted[i]
    pages_wanted = max(sum(wanted[i] for i in batch) for batch in batches)
    tokens = [sum(lengths[i] for i in batch) for batch in batches]
    length = max(_MIN_LENGTH, round_up(max(lengths), steps=1))
    return Plan(
        batches=batches,
        length=min(length, context),
        longest=min(max(lengths) + max_new_tokens, context),
        rows=round_up(max(map(len, batches)), steps=2),
        max_new_tokens=min(max_new_tokens, context - min(lengths)),
        num_pages=num_pages or round_up(pages_wanted, steps=4),
        pages_wanted=pages_wanted,
        chunk_size=_choose_chunk_size(tokens),
    )


def pages_needed(
    length: int, *, num_samples: int, max_new_tokens: int, page_size: int
) -> int:
    """Gives the pages of a prompt and its samples when each is at its longest.

    ::

        prompt of 6, page size 4, 2 samples of 4 tokens (the last is not stored)
        [p p p p] shared   [p p a a] [a]   [p p b b] [b]      5 pages

    Args:
      length: tokens of the prompt.
      num_samples: samples of it.
      max_new_tokens: tokens of each sample.
      page_size: tokens in a page.

    Example:
      >>> from pagedjax._cli_plan import pages_needed
      >>> pages_needed(6, num_samples=2, max_new_tokens=4, page_size=4)
      5
    """
    if max_new_tokens == 1:
        return -(-length // page_size)
    shared = length // page_size
    each = -(-(length + max_new_tokens - 1) // page_size)
    return shared + num_samples * (each - shared)


def round_up(value: int, *, steps: int) -> int:
    """Rounds up to a power of two or, between two of them, to one of equal steps.

    Args:
      value: at least 1.
      steps: numbers kept in each octave.

    Example:
      >>> from pagedjax._cli_plan import round_up
      >>> [round_up(9, steps=steps) for steps in (1, 2, 4)]
      [16, 12, 10]
    """
    octave = 1 << (value - 1).bit_length() >> 1  # the octave is (octave, 2 * octave]
    step = max(1, octave // steps)
    return -(-value // step) * step


def _choose_chunk_size(tokens: Sequence[int]) -> int:
    """Chooses the chunk size with which all batches are prefilled soonest."""

    def cost(size: int) -> int:
        return sum(-(-n // size) for n in tokens) * (size + _CHUNK_COST)

    return min(_CHUNK_SIZES, key=cost)
