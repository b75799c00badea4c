"""The arithmetic of batches and pages behind the command line."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pagedjax import _cli_plan


@given(st.integers(1, 10**6), st.sampled_from([1, 2, 4]))
def test_round_up(value, steps):
    rounded = _cli_plan.round_up(value, steps=steps)
    assert value <= rounded <= max(value, value * (1 + 1 / steps))
    assert _cli_plan.round_up(rounded, steps=steps) == rounded
    assert _cli_plan.round_up(value + 1, steps=steps) >= rounded


@given(
    length=st.integers(1, 40),
    num_samples=st.integers(1, 4),
    max_new_tokens=st.integers(1, 20),
    page_size=st.integers(1, 9),
)
def test_pages_needed(length, num_samples, max_new_tokens, page_size):
    """Against a count of the distinct (owner, page) pairs that are written."""
    pages = {(None, i // page_size) for i in range(length)}
    if max_new_tokens > 1:
        full = length // page_size
        pages = {page for page in pages if page[1] < full}
        for sample in range(num_samples):
            last = length + max_new_tokens - 1
            written = range(full * page_size, last)
            pages |= {(sample, i // page_size) for i in written}
    assert _cli_plan.pages_needed(
        length,
        num_samples=num_samples,
        max_new_tokens=max_new_tokens,
        page_size=page_size,
    ) == len(pages)


@given(
    st.lists(st.integers(1, 99), min_size=1, max_size=20),
    st.integers(1, 6),
    st.none() | st.integers(25, 60),
)
def test_plan(lengths, batch_size, num_pages):
    plan = _cli_plan.make_plan(
        lengths,
        [str(i) for i in range(len(lengths))],
        num_samples=2,
        max_new_tokens=10,
        page_size=4,
        num_pages=num_pages,
        batch_size=batch_size,
        context=100,
    )
    order = list(itertools.chain(*plan.batches))
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[i] for i in order] == sorted(lengths, reverse=True)
    for batch in plan.batches:
        assert len(batch) <= min(batch_size, plan.rows)
        wanted = sum(
            _cli_plan.pages_needed(
                lengths[i],
                num_samples=2,
                max_new_tokens=min(10, 100 - lengths[i]),
                page_size=4,
            )
            for i in batch
        )
        assert wanted <= plan.num_pages or len(batch) == 1
    assert plan.rows < 2 * batch_size
    assert max(lengths) <= plan.length <= 100
    if num_pages is None:
        assert plan.pages_wanted <= plan.num_pages <= 1.25 * plan.pages_wanted
