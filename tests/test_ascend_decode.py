"""A thousand random decode steps on the mock NPU, token for token as on the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ascend_device import mock_device, needs_mock

import pagedjax as pj
from ascend_bridge import ascend

pytestmark = needs_mock
LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 2, 1, 16, 12
SLOTS, PAGES, PAGE_SIZE, PER_SLOT = 4, 7, 16, 3


def make_params(seed: int) -> dict:
    """Draws a model whose attention is sharp, so that tokens depend on what is read."""
    rng = np.random.default_rng(seed)
    width = HEADS * HEAD_DIM

    def draw(scale, *shape):
        return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)

    return {
        "embed": draw(1.0, VOCAB, width),
        "place": draw(0.5, PER_SLOT * PAGE_SIZE, width),
        "q": draw(0.4, LAYERS, width, HEADS, HEAD_DIM),
        "k": draw(0.4, LAYERS, width, KV_HEADS, HEAD_DIM),
        "v": draw(0.3, LAYERS, width, KV_HEADS, HEAD_DIM),
        "head": draw(1.0, width, VOCAB),
    }


@jax.jit
def decode(params, pool, batch, plan, tokens):
    """Runs the copies of a plan, then one token of each slot; (pool, next tokens)."""
    pool = ascend.copy_pages(pool, plan.src_pages, plan.dst_pages)
    x = params["embed"][tokens] + params["place"][batch.positions]
    for layer in range(LAYERS):
        q, k, v = (
            jnp.einsum("te,ehd->thd", x, params[name][layer]).astype(jnp.float16)
            for name in "qkv"
        )
        pool, out = ascend.attend(
            pool,
            layer,
            q,
            k,
            v,
            batch.pages,
            batch.offsets,
            batch.page_indices,
            batch.seq_lens,
        )
        x = jnp.tanh(x + out.astype(jnp.float32).reshape(x.shape))
    return pool, jnp.argmax(x @ params["head"], axis=-1)


def open_on(executor: str) -> ascend.DevicePool:
    return ascend.open_pool(
        executor=executor,
        num_layers=LAYERS,
        num_pages=PAGES,
        page_size=PAGE_SIZE,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_heads=HEADS,
        max_slots=SLOTS,
        pages_per_slot=PER_SLOT,
    )


def mutate(rng, table: pj.PageTable, tokens: np.ndarray):
    """One random verb: fork, roll back or free; how often, in `seen`."""
    lens = np.asarray(table.seq_lens)
    live, empty = np.flatnonzero(lens), np.flatnonzero(lens == 0)
    choice = rng.random()
    if choice < 0.25 and live.size and empty.size:
        src, dst = rng.choice(live), rng.choice(empty)
        tokens[dst] = (tokens[src] + 1) % VOCAB  # or both would go on alike
        return "fork", verbs()["fork"](table, np.int32([src]), np.int32([dst]))
    if choice < 0.32 and live.size:
        slot = rng.choice(live)
        new = lens.copy()
        new[slot] = rng.integers(1, lens[slot] + 1)
        return "roll back", verbs()["truncate"](table, new)
    if choice < 0.40 and live.size:
        return "free", verbs()["free"](table, np.arange(SLOTS) == rng.choice(live))
    return "go on", table


@functools.cache
def verbs() -> dict:
    return {
        "append": jax.jit(functools.partial(pj.append, max_tokens=1)),
        "fork": jax.jit(pj.fork),
        "truncate": jax.jit(pj.truncate),
        "free": jax.jit(pj.free),
        "pack": jax.jit(pj.pack_decode),
    }


def run(steps: int, seed: int, mock) -> dict[str, int]:
    """Decodes on both executors side by side; counts what happened."""
    rng = np.random.default_rng(seed)
    params = make_params(seed)
    table = pj.init_page_table(
        num_pages=PAGES,
        page_size=PAGE_SIZE,
        max_slots=SLOTS,
        pages_per_slot=PER_SLOT,
    )
    pools = {name: open_on(name) for name in ("npu", "host")}
    tokens = rng.integers(0, VOCAB, SLOTS)
    seen: dict[str, int] = {"copies": 0, "refused": 0, "tokens": 0}
    spread = set()
    for step in range(steps):
        name, table = mutate(rng, table, tokens)
        seen[name] = seen.get(name, 0) + 1
        empty = np.asarray(table.seq_lens) == 0
        wants = (rng.random(SLOTS) < np.where(empty, 0.2, 0.9)).astype(np.int32)
        table, plan, ok = verbs()["append"](table, wants)
        active = np.asarray(ok) & (wants > 0)
        seen["refused"] += int((wants > 0).sum() - active.sum())
        seen["copies"] += int((np.asarray(plan.src_pages) < PAGES).sum())
        seen["tokens"] += int(active.sum())
        batch = verbs()["pack"](table, active)
        got = {}
        for name, pool in pools.items():
            pools[name], new = decode(params, pool, batch, plan, jnp.asarray(tokens))
            got[name] = np.asarray(new)
        np.testing.assert_array_equal(
            got["npu"][active], got["host"][active], f"step {step}"
        )
        tokens = np.where(active, got["npu"], tokens)
        spread.update(tokens[active].tolist())
        full = np.asarray(table.seq_lens) == PER_SLOT * PAGE_SIZE
        if full.any() or not active.any():  # nothing moves: make room
            seen["free"] = seen.get("free", 0) + 1
            rows = full if full.any() else np.arange(SLOTS) == rng.integers(SLOTS)
            table = verbs()["free"](table, rows)
    assert len(spread) > VOCAB // 2, "a model that says one thing tests nothing"
    assert pj.check_integrity(table) == []
    pages = jnp.arange(PAGES)
    for layer in range(LAYERS):
        held = {n: ascend.read_pages(p, layer, pages)[1:] for n, p in pools.items()}
        for npu_got, host_got in zip(held["npu"], held["host"], strict=True):
            np.testing.assert_allclose(npu_got, host_got, atol=2e-3, rtol=2e-3)
    assert int(pools["npu"].version) == steps * (1 + LAYERS)
    for pool in pools.values():
        ascend.close_pool(pool)
    assert mock.held() == (0, 0, 0, 0)
    return seen


def test_a_thousand_steps() -> None:
    with mock_device() as mock:
        seen = run(1000, 0, mock)
    for what in ("fork", "roll back", "free", "copies", "refused"):
        assert seen[what] >= 30, seen
    assert seen["tokens"] >= 1500, seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_more_seeds(seed: int) -> None:
    with mock_device() as mock:
        run(1000, seed, mock)


def test_the_environment_can_disturb_too() -> None:
    """Here, since it is read when the runtime starts: no other test may have begun."""
    with mock_device(PAGEDJAX_MOCK_ACL_FAIL="malloc:2"):
        with pytest.raises(MemoryError):
            open_on("npu")
        ascend.close_pool(open_on("npu"))
