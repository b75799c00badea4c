"""Who may import whom, read from the source: nothing is imported here."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("pagedjax", "pallas_kernels", "ascend_bridge")
    for path in (ROOT / folder).rglob("*.py")
)
MAX_LINES = 500

# The core from the bottom up: a file imports only what is on a line above its own. What
# attends and what makes tokens know arrays; what ties them together comes last.
CORE = [
    {"_checks"},
    {"_page_ops"},
    {"_page_table"},
    {"_capacity", "_kv_pool", "_integrity"},
    {"_attention_call"},
    {"_attention_pallas", "_attention_xla"},
    {
        "_attention_ascend",
        "_attention_mosaic",
        "_attention_tpu",
        "_attention_triton",
        "_attention_xla_grad",
    },
    {"_attention"},
    {"_ragged", "_shared_prefix"},
    {"_sampling"},
    {"_generation_state"},
    {"_generation"},
]
SELF_CONTAINED = next(i for i, level in enumerate(CORE) if "_attention" in level)


def imports_of(file: str) -> Iterator[str]:
    """Yields every module a file imports, absolute, wherever in the file it does."""
    tree = ast.parse((ROOT / file).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: line {node.lineno} is a relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def tops_of(file: str) -> set[str]:
    return {module.split(".")[0] for module in imports_of(file)}


def test_there_are_files_to_look_at() -> None:
    assert {"pagedjax/__init__.py", "pagedjax/_page_table.py"} <= set(FILES)
    assert "pagedjax._page_ops" in set(imports_of("pagedjax/_page_table.py"))


@pytest.mark.parametrize("file", FILES)
def test_imports_point_one_way(file: str) -> None:
    tops = tops_of(file)
    may_use_flax = file.startswith("pagedjax/models/") or file in (
        "pagedjax/nnx.py",
        "pagedjax/linen.py",
    )
    if not may_use_flax:
        assert "flax" not in tops
    if not file.startswith("pagedjax/"):
        assert "pagedjax" not in tops
    assert not tops & {"torch", "tensorflow", "transformers", "tests", "benchmarks"}
    assert "jax._src" not in {module[:8] for module in imports_of(file)}


def test_nothing_is_imported_in_a_circle() -> None:
    named = {file: file[:-3].replace("/", ".") for file in FILES}
    graph = {
        name: {module for module in imports_of(path) if module in named.values()}
        for path, name in named.items()
        if not path.endswith("__init__.py")
    }
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("level", range(len(CORE)))
def test_the_core_is_built_bottom_up(level: int) -> None:
    known = set().union(*CORE)
    for name in CORE[level]:
        inside = {
            module.split(".")[1]
            for module in imports_of(f"pagedjax/{name}.py")
            if module.startswith("pagedjax._")
        }
        assert inside & known <= set().union(*CORE[:level]), name
        # The table, the pool, the audit and attention know of nothing else at all.
        assert inside <= known or level > SELF_CONTAINED, name


@pytest.mark.parametrize("file", FILES)
def test_a_long_file_says_why(file: str) -> None:
    text = (ROOT / file).read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert docstring, f"{file} has no docstring"
    if len(text.splitlines()) > MAX_LINES:
        words = " ".join(docstring.split())
        assert "file is long because" in words, f"{file} is over {MAX_LINES} lines"
