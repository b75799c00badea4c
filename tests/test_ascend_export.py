"""What is lowered for an NPU: target names, operands, layouts, attributes, aliasing."""

import contextlib
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import pagedjax as pj
from ascend_bridge import _device_library, _library, ascend, host, npu
from pagedjax import _cli_doctor

LIBRARY, REASON = _device_library.load()
needs_library = pytest.mark.skipif(LIBRARY is None, reason=REASON)
PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, HEADS, SLOTS, WIDTH = 8, 16, 2, 32, 4, 3, 4


@contextlib.contextmanager
def traced_for(kind: str = "Ascend910B3"):
    """Traces for a chip that is not here, as an ahead-of-time export does."""
    device = jax.sharding.AbstractDevice(kind, 1, "npu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def shapes(dtype=jnp.float16, heads: int = HEADS, page_size: int = PAGE_SIZE):
    """The arguments of a decode call."""

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    pages = array(PAGES, page_size, KV_HEADS, HEAD_DIM)
    table, lens = array(SLOTS, WIDTH, dtype=jnp.int32), array(SLOTS, dtype=jnp.int32)
    return array(SLOTS, heads, HEAD_DIM), pages, pages, table, lens


def stablehlo(call: Callable, *args, platform: str = "npu") -> str:
    """Exports for a platform; the text, and that nothing else was exported for."""
    exported = jax.export.export(
        jax.jit(call),
        platforms=[platform],
        disabled_checks=[
            jax.export.DisabledSafetyCheck.custom_call(_library.PREFIX + name)
            for name in _library.TARGETS
        ],
    )(*args)
    assert exported.platforms == (platform,)
    return exported.mlir_module()


def only_call(text: str) -> str:
    """The one custom call of a module, as one line."""
    calls = re.findall(r"stablehlo\.custom_call @pagedjax_\w+\(.*", text)
    assert len(calls) == 1, text
    return calls[0]


def layouts(*ranks: int) -> str:
    """How row-major layouts are printed."""
    each = ", ".join(
        f"dense<{list(reversed(range(n)))}> : tensor<{n}xindex>".replace("<[0]>", "<0>")
        for n in ranks
    )
    return f"[{each}]"


@needs_library
@pytest.mark.parametrize("platform", npu.PLATFORMS)
def test_attention(platform: str) -> None:
    """The same call as for the host, whichever name the backend has."""

    def decode(*args):
        return pj.paged_attention(
            *args, window=40, soft_cap=2.0, return_lse=True, implementation="ascend"
        )

    with traced_for():
        call = only_call(stablehlo(decode, *shapes(), platform=platform))
    assert call.startswith("stablehlo.custom_call @pagedjax_paged_attention(")
    assert "output_operand_aliases" not in call.replace(
        "output_operand_aliases = []", ""
    )
    assert f"operand_layouts = {layouts(3, 4, 4, 2, 1)}" in call
    assert f"result_layouts = {layouts(3, 2)}" in call
    config = re.search(r"mhlo\.backend_config = \{(.*?)\}", call)
    assert config is not None
    assert config[1] == (
        "scale = 0.176776692 : f32, share_prefixes = true, soft_cap = 2.000000e+00 : "
        "f32, window = 40 : i64"
    )
    assert (
        "(tensor<3x4x32xf16>, tensor<8x16x2x32xf16>, tensor<8x16x2x32xf16>, "
        "tensor<3x4xi32>, tensor<3xi32>) -> (tensor<3x4x32xf16>, tensor<3x4xf32>)"
    ) in call


@needs_library
def test_the_best_implementation_for_an_npu_is_this_one() -> None:
    with traced_for():
        assert pj.available_implementations()["ascend"] == (
            True,
            "runs on Ascend910B3",
        )
        assert "@pagedjax_paged_attention(" in stablehlo(pj.paged_attention, *shapes())
        # What the kernels cannot do is XLA's.
        wide = shapes(jnp.float32)
        assert "custom_call @pagedjax" not in stablehlo(pj.paged_attention, *wide)
        # And the same program for the processor does not name the NPU's kernels.
        text = stablehlo(pj.paged_attention, *shapes(), platform="cpu")
        assert "npu_paged_attention" not in text


def test_write_kv() -> None:
    """In place: results 0 and 1 are operands 0 and 1; places are spelled out before."""
    _, pages, *_ = shapes()
    rows = jax.ShapeDtypeStruct((5, KV_HEADS, HEAD_DIM), jnp.float16)
    ids = jax.ShapeDtypeStruct((5,), jnp.int32)
    text = stablehlo(npu.write_kv, pages, pages, rows, rows, ids, ids)
    call = only_call(text)
    assert call.startswith("stablehlo.custom_call @pagedjax_write_kv(")
    assert_in_place(call)
    assert f"operand_layouts = {layouts(4, 4, 3, 3, 1)}" in call
    assert f"result_layouts = {layouts(4, 4)}" in call
    assert "mhlo.backend_config = {}" in call


def test_copy_pages() -> None:
    _, pages, *_ = shapes()
    ids = jax.ShapeDtypeStruct((3,), jnp.int32)

    def copy(*args):
        return npu.copy_pages(*args, num_layers=2)

    call = only_call(stablehlo(copy, pages, pages, ids, ids))
    assert call.startswith("stablehlo.custom_call @pagedjax_copy_pages(")
    assert_in_place(call)
    assert f"operand_layouts = {layouts(4, 4, 1, 1, 1)}" in call
    assert "tensor<6xi32>, tensor<6xi32>, tensor<6xi32>) -> " in call  # 2 layers


def assert_in_place(call: str) -> None:
    aliases = re.search(r"output_operand_aliases = \[(.*)\], result_layouts", call)
    assert aliases is not None
    pairs = re.findall(
        r"output_tuple_indices = \[(\d)\],\s*operand_index = (\d)", aliases[0]
    )
    assert pairs == [("0", "0"), ("1", "1")]


def test_places_and_pairs_without_a_page() -> None:
    """What the kernels are handed: -1 or a page past the end, never a wrong page."""
    seen = {}

    def record(name: str):
        def call(*arrays):
            seen[name] = [x.tolist() for x in arrays if x.dtype == jnp.int32]
            return arrays[:2]

        return call

    pages = jnp.zeros((PAGES, PAGE_SIZE, 1, 16), jnp.float16)
    rows = jnp.zeros((5, 1, 16), jnp.float16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(npu._calls, "changing_pages", record)
        at = jnp.array([0, 7, 8, -1, 2]), jnp.array([3, 15, 0, 0, 16])
        npu.write_kv(pages, pages, rows, rows, *at)
        ids = jnp.array([0, 4, 2, -1]), jnp.array([3, 1, 2, 0])
        npu.copy_pages(pages, pages, *ids, num_layers=2)
    assert seen["write_kv"] == [[3, 127, -1, -1, -1]]
    # Layer 1 begins at page 4. Page 4 of a layer of 4 is NULL, not layer 1's first.
    assert seen["copy_pages"] == [
        [0, 8, 8, 8, 4, 8, 8, 8],
        [3, 8, 8, 8, 7, 8, 8, 8],
        [1, 2, 3, 4, 5, 6, 7, 8],
    ]


@needs_library
def test_a_whole_decode_step_is_lowered() -> None:
    """Page table, writes, attention and their debug checks, for a backend "npu"."""
    table = pj.init_page_table(
        num_pages=PAGES, page_size=PAGE_SIZE, max_slots=SLOTS, pages_per_slot=WIDTH
    )
    pool = pj.init_kv_pool(
        num_layers=1,
        num_pages=PAGES,
        page_size=PAGE_SIZE,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=jnp.float16,
    )

    def step(table, pool, q, kv):
        table, plan, ok = pj.append(table, jnp.ones(SLOTS, jnp.int32), max_tokens=1)
        pool = pj.copy_pages(pool, plan)
        batch = pj.pack_decode(table, ok)
        pool, out = pj.attend(pool, 0, q, kv, kv, batch, implementation="ascend")
        return table, pool, out

    q = jnp.zeros((SLOTS, HEADS, HEAD_DIM), jnp.float16)
    with traced_for():
        text = stablehlo(step, table, pool, q, q[:, :KV_HEADS])
    assert "@pagedjax_paged_attention(" in only_call(text)


@needs_library
@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("Ascend910B3", {"dtype": jnp.float32}, "float16 and bfloat16, not float32"),
        ("Ascend910B3", {"page_size": 24}, "page_size 24 is not a multiple of 16"),
        ("Ascend910B3", {"heads": 500}, "bytes of the unified buffer, arch 2201 has"),
        ("Ascend910A", {"dtype": jnp.bfloat16}, "bfloat16"),
        ("Ascend310P3", {}, "the kernels do not know Ascend310P3"),
    ],
)
def test_what_the_kernels_cannot_do_is_said(kind: str, options, reason: str) -> None:
    def decode(*args):
        return pj.paged_attention(*args, implementation="ascend")

    with traced_for(kind), pytest.raises(NotImplementedError, match=reason):
        stablehlo(decode, *shapes(**options))


@needs_library
def test_ragged_and_quantised_calls_are_refused() -> None:
    q, k_pages, v_pages, table, lens = shapes()
    cu_q_lens = jax.ShapeDtypeStruct((SLOTS + 1,), jnp.int32)

    def prefill(*args):
        return pj.ragged_paged_attention(*args, implementation="ascend")

    with traced_for(), pytest.raises(NotImplementedError, match="several queries"):
        jax.eval_shape(prefill, q, k_pages, v_pages, table, lens, cu_q_lens)
    scales = jax.ShapeDtypeStruct((PAGES, PAGE_SIZE, KV_HEADS), jnp.float32)
    int8 = jax.ShapeDtypeStruct(k_pages.shape, jnp.int8)

    def quantised(q, k, v, table, lens, k_scales, v_scales):
        return pj.paged_attention(
            q,
            k,
            v,
            table,
            lens,
            k_scales=k_scales,
            v_scales=v_scales,
            implementation="ascend",
        )

    with traced_for(), pytest.raises(NotImplementedError, match="no kernel for int8"):
        jax.eval_shape(quantised, q, int8, int8, table, lens, scales, scales)


@needs_library
def test_without_an_npu_the_reason_is_the_loader_s() -> None:
    able, reason = pj.available_implementations()["ascend"]
    assert not able and "libascendcl.so" in reason
    assert ascend.usable() == (False, reason)
    found = ascend.diagnose()
    assert list(found) == ["runtime", "kernels", "device"]
    assert dict(_cli_doctor._ascend()) == found
    assert found["runtime"].startswith("missing: libascendcl.so")
    assert "libpagedjax_ascend_kernels.so" in found["kernels"]
    with pytest.raises(NotImplementedError, match="libascendcl.so"):
        jax.eval_shape(
            lambda *args: pj.paged_attention(*args, implementation="ascend"), *shapes()
        )


@needs_library
def test_targets_are_registered_for_the_names_of_npu_backends() -> None:
    assert _device_library.NPU_PLATFORMS == ("ASCEND", "npu")
    assert set(_device_library.NPU_TARGETS) < set(_library.TARGETS)
    for name in _device_library.NPU_TARGETS:
        assert LIBRARY[f"{_library.PREFIX}on_npu_{name}"]
    # Registered twice under one name with another function, jax would refuse.
    other = LIBRARY[f"{_library.PREFIX}on_npu_write_kv"]
    with pytest.raises(Exception, match="(?i)already|differ|regist"):
        jax.ffi.register_ffi_target(
            f"{_library.PREFIX}paged_attention",
            jax.ffi.pycapsule(other),
            platform="cpu",
        )


def test_host_and_npu_have_the_same_target_names() -> None:
    """A program for the processor and one for the NPU differ in where they run."""
    if not host.usable()[0]:
        pytest.skip(host.usable()[1])
    _, pages, *_ = shapes()
    rows = jax.ShapeDtypeStruct((5, KV_HEADS, HEAD_DIM), jnp.float16)
    ids = jax.ShapeDtypeStruct((5,), jnp.int32)
    names = {
        re.search(r"@(pagedjax_\w+)\(", stablehlo(call, *args, platform=where))[1]
        for call, where in ((host.write_kv, "cpu"), (npu.write_kv, "npu"))
        for args in [(pages, pages, rows, rows, ids, ids)]
    }
    assert names == {"pagedjax_write_kv"}
