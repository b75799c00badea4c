"""Compiles every Pallas TPU kernel to machine code, without a TPU.

    python -m benchmarks.aot                     all chips; rewrites benchmarks/AOT.md
    python -m benchmarks.aot --chip v6e          one chip; the others as recorded
    python -m benchmarks.aot --select 'decode'   the cases whose name matches
    python -m benchmarks.aot --select '^$'       none: AOT.md from what is recorded

Needs the packages of `jax[tpu]` (`make aot` makes an environment for them). Exit
status: 0 when all that is claimed compiles, stays in the memory that was counted and
changes pools in place; 1 when something does not; 77 when nothing could be tried.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import aot_gpu

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "build" / "aot"
REPORT = Path(__file__).parent / "AOT.md"
INCOMPLETE = 77
# The largest temporary that a case may have, next to its pools.
_SMALL = 1 / 8


def main() -> int:
    """Compiles, records, writes the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chip", action="append", help="v5e, v5p, v6e or 7x")
    parser.add_argument("--select", default="", help="a regular expression")
    chosen = parser.parse_args()
    _set_environment()
    try:
        version = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        print("AOT: NOT COMPILED FOR TPU: the libtpu wheel is not installed.")
        print("AOT: this run is INCOMPLETE. `make aot` installs it.")
        return INCOMPLETE
    from benchmarks import aot_cases, aot_compile

    chips = chosen.chip or list(aot_compile.TOPOLOGIES)
    RECORDS.mkdir(parents=True, exist_ok=True)
    failed = 0
    for chip in chips:
        if chip not in aot_compile.TOPOLOGIES:
            parser.error(f"unknown chip {chip!r}")
        cases = list(aot_cases.cases_of(chip))
        path = RECORDS / f"tpu-{chip}.json"
        rows = aot_gpu.known_rows(path) if chosen.select else {}
        for case in cases:
            if re.search(chosen.select, case.name):
                rows[case.name] = _run(chip, case)
                failed += not rows[case.name]["ok"]
            # After each: what has been compiled is kept if the run is cut short.
            record = {
                "chip": chip,
                "compiler": f"libtpu {version}",
                "cases": len(cases),
                "rows": [rows[case.name] for case in cases if case.name in rows],
            }
            path.write_text(json.dumps(record, indent=1))
    REPORT.write_text(_report(aot_cases.refused()))
    print(f"AOT: {failed} cases failed" if failed else "AOT: all cases hold on TPU")
    return 1 if failed else 0


def _set_environment() -> None:
    """Keeps the process on the CPU and lets others compile at the same time."""
    os.environ.update(
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_ACCELERATOR_TYPE="v6e-1",
        TPU_WORKER_HOSTNAMES="localhost",
    )


def _run(chip: str, case: Any) -> dict[str, Any]:
    """Compiles one case and judges what it showed."""
    row: dict[str, Any] = {"name": case.name, "what": case.what}
    began = time.perf_counter()
    try:
        shown = case.compile()
    except Exception as error:  # whatever a compiler raises is a result here
        text = " ".join(str(error).split())
        row |= {"ok": False, "why": f"{type(error).__name__}: {text[:300]}"}
    else:
        row |= dataclasses.asdict(shown) | {"budget": case.budget}
        wrong = list(_wrong(case, shown))
        row |= {"ok": not wrong, "why": "; ".join(wrong)}
    row["wall"] = time.perf_counter() - began
    print(f"{chip} {case.name}: {'ok' if row['ok'] else row['why']}", flush=True)
    return row


def _wrong(case: Any, shown: Any) -> Iterator[str]:
    """Yields what a compiled case does not hold."""
    if case.budget and shown.vmem > case.budget:
        yield f"uses {shown.vmem} bytes of VMEM, {case.budget} were counted"
    if shown.pool_copies:
        yield f"copies a pool {shown.pool_copies} times"
    if shown.temporary > _SMALL * case.pool_bytes:
        yield f"temporaries of {shown.temporary} bytes, pools of {case.pool_bytes}"
    # With their padding; a step also returns a page table and tokens.
    if case.in_place and shown.aliased < 0.99 * shown.results:
        yield f"aliases {shown.aliased} bytes of {shown.results}"


# --- the report -----------------------------------------------------------------------


def _report(refused: list[tuple[str, str]]) -> str:
    """Renders all records."""
    records = [json.loads(path.read_text()) for path in sorted(RECORDS.glob("tpu-*"))]
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib")
    )
    compilers = ", ".join(sorted({record["compiler"] for record in records}))
    lines = [
        "# Compiled ahead of time",
        "",
        f"Written by `make aot` on {time.strftime('%Y-%m-%d')} with {versions}, "
        f"{compilers}.",
        "No TPU was there: the kernels are compiled to machine code for each chip, not "
        "run on it. What",
        "they compute is tested in the interpreters (`tests/test_pallas_tpu*.py`).",
        "**Not run on hardware.**",
        "",
        "- *VMEM*: what the compiler gave the kernel, and what `tpu_chips` had counted "
        "for it.",
        "- *temporary*: device memory beside arguments and results; *pools*: the pages "
        "of the case.",
        "- *in place*: results that are the donated pools themselves. *copies*: "
        "instructions that copy",
        "  a whole pool.",
        "- Pools are row-major on the device (`docs/kernels.md` says when that has to "
        "be asked for).",
        "",
    ]
    for record in records:
        rows = record["rows"]
        good = sum(row["ok"] for row in rows)
        lines += [
            f"## TPU {record['chip']}: {good} of {len(rows)} cases hold",
            "",
            *aot_gpu.untried(record["cases"] - len(rows)),
            "| case | holds | s | VMEM MiB | counted MiB | temporary KiB | pools MiB | "
            "in place MiB | copies |",
            "|---|---|---|---|---|---|---|---|---|",
            *map(_line, rows),
            "",
        ]
    lines += [
        "## Refused in Python, before the TPU compiler",
        "",
        "| what | the reason given |",
        "|---|---|",
        *(f"| {what} | {why} |" for what, why in refused),
        "",
        *aot_gpu.report(),
    ]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    """Renders one case."""
    if "seconds" not in row:
        return f"| {row['name']} | **no**: {row['why']} | | | | | | | |"
    holds = "yes" if row["ok"] else f"**no**: {row['why']}"
    mib = 2**20
    cells = [
        row["name"],
        holds,
        f"{row['seconds']:.1f}",
        f"{row['vmem'] / mib:.1f}" if row["budget"] else "",
        f"{row['budget'] / mib:.1f}" if row["budget"] else "",
        f"{row['temporary'] / 1024:.0f}",
        row["what"],
        f"{row['aliased'] / mib:.0f}",
        str(row["pool_copies"]),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
