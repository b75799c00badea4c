"""The public names: complete, sorted, documented, and with an example that runs."""

import doctest
import inspect
import re
import subprocess
import sys

import jax
import pytest

import pagedjax as pj

pytestmark = pytest.mark.core

CLASSES = ("CopyPlan", "KVPool", "PageTable", "RaggedBatch")
# What takes state, takes it first and by this name.
FIRST = {
    "table": (
        "append attach check_integrity dec_ref describe fork free grow inc_ref"
        " num_free_pages num_used_pages pack_decode pack_ragged reorder shrink"
        " translate truncate utilization"
    ),
    "pool": "attend copy_pages gather_kv resize_kv_pool scrub_pages write_kv",
}
# Static arguments that may only be named, never placed.
BY_NAME = {
    "append": ["max_tokens", "priority"],
    "init_kv_pool": [
        "num_layers",
        "num_pages",
        "page_size",
        "num_kv_heads",
        "head_dim",
        "dtype",
    ],
    "init_page_table": ["num_pages", "page_size", "max_slots", "pages_per_slot"],
    "layer_page_indices": ["num_pages", "num_layers"],
    "pack_ragged": ["num_tokens", "seq_lens"],
}


def test_all_is_sorted_and_complete() -> None:
    assert pj.__all__ == sorted(pj.__all__)
    assert len(set(pj.__all__)) == len(pj.__all__)
    public = {
        name
        for name, value in vars(pj).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(pj.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+", pj.__version__)


@pytest.mark.parametrize("name", pj.__all__)
def test_a_name_is_documented(name: str) -> None:
    value = getattr(pj, name)
    text = inspect.getdoc(value) or ""
    first = text.splitlines()[0]
    assert first.endswith("."), f"{name}: the first line is a sentence"
    if inspect.isclass(value):
        return
    assert doctest.DocTestParser().get_examples(text), f"{name} has no example"
    if len(inspect.signature(value).parameters) > 1:
        assert re.search(r"\b[Aa]rg(ument)?s\b", text), f"{name}: which arguments?"


@pytest.mark.parametrize("name", CLASSES)
def test_state_is_a_frozen_pytree(name: str) -> None:
    kind = getattr(pj, name)
    assert kind.__dataclass_params__.frozen
    fields = kind.__dataclass_fields__.values()
    state = kind(**{field.name: 1 for field in fields})
    static = sum(bool(field.metadata.get("static")) for field in fields)
    assert len(jax.tree.leaves(state)) == len(fields) - static


@pytest.mark.parametrize(
    ("name", "first"),
    [(name, first) for first, names in FIRST.items() for name in names.split()],
)
def test_state_comes_first(name: str, first: str) -> None:
    parameters = inspect.signature(getattr(pj, name)).parameters
    assert next(iter(parameters)) == first


@pytest.mark.parametrize("name", BY_NAME)
def test_static_arguments_go_by_name(name: str) -> None:
    parameters = inspect.signature(getattr(pj, name)).parameters.values()
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert named == BY_NAME[name]


def test_importing_the_library_imports_no_flax() -> None:
    """The core is for those who bring their own model."""
    code = "import sys, pagedjax; assert 'flax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
