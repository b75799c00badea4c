"""Asking the system to hold arrays in large pages."""

import ctypes
import sys

import jax

_LARGE = 2**21  # bytes of a large page on x86-64, and on aarch64 with 4 KiB pages
_HUGEPAGE, _COLLAPSE = 14, 25  # advice numbers of Linux's madvise


def use_large_pages(*arrays: jax.Array) -> int:
    """Ask the system to move arrays of the cpu platform into large pages, now.

    Attention over a pool reads pages in the order of the table, and each jump to
    another 4 KiB page of memory costs a walk of the system's tables. A pool that lives
    long, as an engine's does, is worth moving once: about 2 seconds a GiB, and decode
    then reads an eighth to a fifth faster (`benchmarks.bench_host_attention`). Values,
    addresses and the memory in use stay the same; donated steps keep the pages.

    A program that makes its pool inside `jit` can have the same from the start of the
    process: `GLIBC_TUNABLES=glibc.malloc.hugetlb=1` (glibc 2.35).

    Args:
        *arrays: such as `pool.k_pages, pool.v_pages`. What lies on another platform is
            left alone, and so are the ends of an array that fill no large page.

    Returns:
        Bytes now in large pages: 0 where the system has none (Linux before 6.1, other
        systems, transparent large pages switched off).

    Example:
        >>> import jax.numpy as jnp
        >>> from ascend_bridge import host
        >>> host.use_large_pages(jnp.zeros((16,)))  # smaller than a large page
        0
    """
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    for array in arrays:
        for shard in array.addressable_shards:
            if shard.device.platform != "cpu":
                continue
            pointer = shard.data.unsafe_buffer_pointer()
            begin = -(-pointer // _LARGE) * _LARGE
            size = (pointer + shard.data.nbytes) // _LARGE * _LARGE - begin
            if size <= 0 or madvise(begin, size, _HUGEPAGE) != 0:
                continue
            if madvise(begin, size, _COLLAPSE) == 0:
                moved += size
    return moved
