"""Runs benchmarks and rewrites `benchmarks/RESULTS.md`.

python -m benchmarks                   all of them
python -m benchmarks bench_generate    some; the other sections stay as they are
"""

import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from benchmarks._harness import Case, format_ratio

_BENCHMARKS = (
    "bench_page_table",
    "bench_attention",
    "bench_host_attention",
    "bench_generate",
    "bench_speculative",
    "bench_rollout",
    "bench_quantised",
    "bench_memory",
)
_RESULTS = Path(__file__).parent / "RESULTS.md"


def main() -> None:
    """Runs them one after the other, each in a process of its own."""
    chosen = sys.argv[1:] or list(_BENCHMARKS)
    unknown = set(chosen) - set(_BENCHMARKS)
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}; there are {', '.join(_BENCHMARKS)}")
    kept = {} if len(chosen) == len(_BENCHMARKS) else _read_sections()
    sections = [_head()]
    for name in _BENCHMARKS:
        if name not in chosen:
            sections += [kept[name]] if name in kept else []
            continue
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", "--json"],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        cases = [Case(**json.loads(line)) for line in done.stdout.splitlines()]
        sections.append(_section(name, cases))
        print(f"{name}: {len(cases)} cases, {time.perf_counter() - began:.0f} s")
    _RESULTS.write_text("\n".join(sections))
    print(f"wrote {_RESULTS}")


def _read_sections() -> dict[str, str]:
    """Gives the sections that are there, by the name of the benchmark."""
    text = _RESULTS.read_text() if _RESULTS.exists() else ""
    parts = text.split("\n## `")[1:]
    return {part.partition("`")[0]: "## `" + part.rstrip("\n") + "\n" for part in parts}


def _head() -> str:
    packages = ("jax", "jaxlib", "flax", "numpy")
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in packages)
    return f"""# Results

Written by `make bench` on {time.strftime("%Y-%m-%d")}: {_processor()},
{os.cpu_count()} cores, Python {platform.python_version()}, {versions}.

Absolute times belong to that machine on that day. What can be compared are the ratios:
both sides took turns in one process, and the medians are quoted. Not run on hardware:
TPU, GPU, Ascend.
"""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.machine()


def _section(name: str, cases: list[Case]) -> str:
    module = importlib.import_module(f"benchmarks.{name}")
    rows = "\n".join(
        f"| {case.case} | {case.value:.4g} {case.unit} | {format_ratio(case)} |"
        for case in cases
    )
    text = (module.__doc__ or "").strip()
    return f"## `{name}`\n\n{text}\n\n| case | value | ratio |\n|---|---|---|\n{rows}\n"


if __name__ == "__main__":
    main()
