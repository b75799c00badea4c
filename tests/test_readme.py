"""The README's figures are rows of `benchmarks/RESULTS.md`, to the letter."""

from pathlib import Path

_ROOT = Path(__file__).parents[1]


def _rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ")]


def test_figures_are_those_of_the_benchmarks():
    readme = (_ROOT / "README.md").read_text()
    section = readme.split("## How fast, how full", 1)[1].split("\n## ", 1)[0]
    quoted = _rows(section)
    measured = _rows((_ROOT / "benchmarks" / "RESULTS.md").read_text())
    assert len(quoted) > 1, "the table of figures is gone"
    assert [row for row in quoted if row not in measured] == []
