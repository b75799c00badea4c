"""Check an Ascend NPU against the host, and print a report to send.

    python -m ascend_bridge.check_device > report.txt

    seeded numbers --> pool on the NPU  --> results --\\
                   \\-> pool on the host --> results ---> equal? --> one line a case

The host executor does the same calls by the same rules, and the tests compare it with
an oracle. Bits that are only moved must be equal; results of attention may differ by
the rounding of their dtype. Exit status: 0, 1 if a case is wrong, 77 where there is no
NPU.
"""

import contextlib
import dataclasses
import os
import pathlib
import platform
import sys
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from ascend_bridge import ascend

__all__ = ["CASES", "Case", "check", "main", "run"]

CANNOT = 77
_VARIABLES = ("ASCEND_HOME_PATH", "PAGEDJAX_ACL_LIBRARY", "PAGEDJAX_ASCEND_KERNELS")
# Of |npu - host| / max(1, |host|): some roundings of a result of about 1, as the
# vendor's own tests allow. An lse is float32, by the device's exponent and logarithm.
_OUT = {"float16": 2.0**-8, "bfloat16": 2.0**-7}
_LSE = 1e-3


@dataclasses.dataclass(frozen=True)
class Case:
    """One decode step on random pages.

    Attributes:
        name: what it is about, for the report.
        lens: tokens of each slot.
        heads: (query heads, kv heads).
        fault: "nan" makes a key of slot 0 NaN, "page" names a page that is not there,
            "length" gives slot 0 more tokens than its row of the table has.

    Example:
        >>> from ascend_bridge import check_device
        >>> check_device.Case("my shape", (300,), (32, 8), 128, 128).dtype
        'float16'
    """

    name: str
    lens: tuple[int, ...]
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "float16"
    window: int | None = None
    soft_cap: float | None = None
    fault: str = ""


# Small ones first: where one ends in an error of the device, later ones may as well.
CASES = (
    Case("one token", (1,), (1, 1), 16),
    Case("around a page", (0, 1, 15, 16, 17, 40), (4, 4)),
    Case("grouped heads, pages of 128", (127, 128, 129), (32, 8), 128, 128),
    Case("one kv head", (33, 70), (16, 1), 128),
    Case("head_dim 80", (45, 5), (6, 3), 80),
    Case("a window", (100, 20), window=37),
    Case("a soft cap", (50, 20), soft_cap=2.0),
    Case("a soft cap far above the scores", (50, 20), soft_cap=1e6),
    Case("splits", (2500,), (4, 1), 64, 128),
    Case("a visible NaN", (20, 20), fault="nan"),
    Case("a page that is not there", (20, 20), fault="page"),
    Case("a length past the table row", (32, 20), fault="length"),
    Case("bfloat16", (40, 129), (8, 2), 128, 128, "bfloat16"),
)


def main(cases: tuple[Case, ...] = CASES) -> int:
    """Print the report; 0, 1 if a case is wrong, 77 if there is no NPU to check."""
    able, text = ascend.usable()
    if not able:
        print(f"NOT DONE: no NPU to check: {text}", file=sys.stderr)
        return CANNOT
    for line in _about_the_machine():
        print(line, flush=True)
    arch, _ = ascend.npu_arch_and_cores()
    done = wrong = 0
    for case in cases:
        if case.dtype == "bfloat16" and arch == 1001:
            print(f"{case.name} ... not run: a 910A does not compute bfloat16")
            continue
        # Said before it is run: a device may hang, or take the process with it.
        print(f"{case.name} ...", end=" ", flush=True)
        started = time.perf_counter()
        problems = check(case)
        seconds = time.perf_counter() - started
        done += 1
        wrong += bool(problems)
        print(f"{'WRONG' if problems else 'right'} ({seconds:.2f} s)", flush=True)
        for problem in problems:
            print(f"    {problem}", flush=True)
    print(f"{wrong} of {done} cases are wrong")
    return int(wrong > 0)


def check(case: Case) -> list[str]:
    """Run a case on the NPU, twice, and on the host.

    Returns:
        What is wrong, a line each: nothing, if all is right.
    """
    try:
        want = run(case, "host")
        got, again = run(case, "npu"), run(case, "npu")
    except (RuntimeError, ValueError, MemoryError) as error:
        return [f"{type(error).__name__}: {error}"]
    problems = []
    for name in want:
        if not np.array_equal(_bits(got[name]), _bits(again[name])):
            problems.append(f"{name}: another result at the second time")
    for name in ("k", "v"):
        if count := int((_bits(got[name]) != _bits(want[name])).sum()):
            problems.append(f"{name} of the pages: {count} elements are not as written")
    for name, limit in (("out", _OUT[case.dtype]), ("lse", _LSE)):
        problems += _compare(name, got[name], want[name], limit)
    return problems


def run(case: Case, executor: str) -> dict[str, np.ndarray]:
    """Write, copy, attend and read on one executor.

    Args:
        case: what to do.
        executor: "npu" or "host".

    Returns:
        out [S, H, D] and lse [S, H], and all pages k and v, [N, page_size, K, D].

    Raises:
        RuntimeError: there is no such executor, or the device failed.

    Example:
        >>> from ascend_bridge import check_device
        >>> check_device.run(check_device.CASES[0], "host")["out"].shape
        (1, 1, 16)
    """
    rng = np.random.default_rng(7)
    heads, kv_heads = case.heads
    slots, size = len(case.lens), case.page_size
    width = -(-max(case.lens) // size)
    num_pages = slots * width + 1
    dtype = jnp.dtype(case.dtype)

    def draw(*shape: int) -> np.ndarray:
        return rng.uniform(-1, 1, shape).astype(dtype)

    table = rng.permutation(num_pages)[: slots * width].reshape(slots, width)
    tokens = [(s, t) for s, length in enumerate(case.lens) for t in range(length)]
    owners, places = np.array(tokens).T
    k, v = (draw(len(tokens), kv_heads, case.head_dim) for _ in "kv")
    q = draw(slots, heads, case.head_dim)
    pages, offsets = table[owners, places // size], places % size
    lens = np.array(case.lens)
    if case.fault == "nan":
        k[3] = np.nan
    if case.fault == "length":
        lens[0] = 10 * width * size
    seen = table.copy()
    if case.fault == "page":
        seen[0, 0] = num_pages
    free = np.setdiff1d(np.arange(num_pages), table)
    with _opened(
        num_layers=2,
        num_pages=num_pages,
        page_size=size,
        num_kv_heads=kv_heads,
        head_dim=case.head_dim,
        num_heads=heads,
        max_slots=slots,
        pages_per_slot=width,
        max_tokens=len(tokens),
        dtype=dtype,
        executor=executor,
    ) as pool:
        at = jnp.array(pages), jnp.array(offsets)
        pool = ascend.write_kv(pool, 1, jnp.array(k), jnp.array(v), *at)
        pool = ascend.copy_pages(pool, jnp.array(table[0, :1]), jnp.array(free[:1]))
        pool, (out, lse) = ascend.paged_attention(
            pool,
            1,
            jnp.array(q),
            jnp.array(seen),
            jnp.array(lens),
            window=case.window,
            soft_cap=case.soft_cap,
            return_lse=True,
        )
        _, held_k, held_v = ascend.read_pages(pool, 1, jnp.arange(num_pages))
        results = {"out": out, "lse": lse, "k": held_k, "v": held_v}
        return {name: np.asarray(x) for name, x in results.items()}


@contextlib.contextmanager
def _opened(**sizes: object) -> Iterator[ascend.DevicePool]:
    pool = ascend.open_pool(**sizes)  # type: ignore[arg-type]
    try:
        yield pool
    finally:
        ascend.close_pool(pool)


def _compare(name: str, got: np.ndarray, want: np.ndarray, limit: float) -> list[str]:
    """Return what is wrong with numbers that may differ by rounding."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    problems = []
    kinds = ("NaN", np.isnan), ("-inf", np.isneginf), ("inf", np.isposinf)
    for kind, has in kinds:
        if count := int((has(a) != has(b)).sum()):
            problems.append(f"{name}: {kind} in {count} other places than on the host")
    both = np.isfinite(a) & np.isfinite(b)
    error = np.abs(a[both] - b[both]) / np.maximum(1.0, np.abs(b[both]))
    worst = float(error.max(initial=0.0))
    if worst > limit:
        problems.append(f"{name}: error {worst:.3g}, more than {limit:.3g}")
    return problems


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def _about_the_machine() -> Iterator[str]:
    """Yield lines about versions, variables and what was found."""
    yield f"python {platform.python_version()}, jax {jax.__version__}"
    yield f"{platform.platform()}, {platform.machine()}"
    for name in _VARIABLES:
        yield f"{name}={os.environ.get(name, '(not set)')}"
    root = pathlib.Path(os.environ.get("ASCEND_HOME_PATH") or "/no/such/folder")
    for file in sorted(root.glob("*/*install.info")) + sorted(root.glob("version.*")):
        yield f"{file}: {' '.join(file.read_text(errors='replace').split())[:200]}"
    for name, text in ascend.diagnose().items():
        yield f"{name}: {text}"


if __name__ == "__main__":
    sys.exit(main())
