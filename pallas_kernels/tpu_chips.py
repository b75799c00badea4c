"""What a TPU chip can hold, and the block sizes that follow.

Everything a chip cannot do is found here, in Python and with numbers, before its
compiler sees a kernel. The memory of a kernel is counted as the compiler lays it out:
the last axis in whole lanes of 128, the one before in whole tiles.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

MIB = 2**20
_LANES, _SUBLANES = 128, 8
_FLOATS = ("float32", "bfloat16")
_QUANTISED = ("int8", "float8_e4m3fn")
_Q_DTYPES = ("float32", "bfloat16", "float16")
# Of SMEM, to the compiler and to the pipeline.
_SMEM_RESERVED = MIB // 4
# Of VMEM, to spilled registers and to what the compiler keeps beside the buffers.
_VMEM_RESERVED = 4 * MIB


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU generation as one program sees it.

    Attributes:
        name: as in `BLOCK_SIZES`.
        vmem: bytes of vector memory of a core.
        smem: bytes of scalar memory of a core.
        cores: TensorCores that one program runs on.
    """

    name: str
    vmem: int
    smem: int
    cores: int


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """How much a kernel computes at once.

    Attributes:
        tokens: keys and values of a block, rounded up to whole pages.
        queries: rows of a run in the ragged kernel, a power of 2.
    """

    tokens: int
    queries: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}")
        if self.queries < 1 or self.queries & (self.queries - 1):
            raise ValueError(f"queries must be a power of 2, got {self.queries}")


CHIPS = {
    "v5e": Chip("v5e", vmem=128 * MIB, smem=MIB, cores=1),
    "v5p": Chip("v5p", vmem=64 * MIB, smem=MIB, cores=2),
    "v6e": Chip("v6e", vmem=128 * MIB, smem=MIB, cores=1),
    "7x": Chip("7x", vmem=64 * MIB, smem=MIB, cores=1),
}
_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "7x",
}

# Where the search for sizes that fit begins; it halves what does not fit. Change an
# entry to tune: it is read whenever a call is traced. Not measured on hardware: a
# block of 256 tokens is 1 MiB of keys and values at 8 heads of 128 in bfloat16, enough
# to hide the latency of a copy; the wider matrix units of v6e and 7x take twice that.
BLOCK_SIZES = {
    "v5e": BlockSizes(tokens=256, queries=64),
    "v5p": BlockSizes(tokens=256, queries=64),
    "v6e": BlockSizes(tokens=512, queries=128),
    "7x": BlockSizes(tokens=512, queries=128),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """Sizes of one attention call.

    Attributes:
        num_tokens: query rows, T.
        num_slots: rows of the page table, S.
        pages_per_slot: columns of the page table, P.
        page_size: tokens in a page.
        num_heads: query heads, H.
        num_kv_heads: K.
        head_dim: D.
        q_dtype: dtype name of the queries.
        kv_dtype: dtype name of the pages.
        ragged: whether slots have any number of rows, not one each.
        has_scales: whether scales come with the pages.
    """

    num_tokens: int
    num_slots: int
    pages_per_slot: int
    page_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_dtype: str
    kv_dtype: str
    ragged: bool
    has_scales: bool


@dataclasses.dataclass(frozen=True)
class Fit:
    """How a call is run on a chip.

    Attributes:
        chip: the chip.
        pages_per_block: pages computed together.
        block_queries: rows of a run.
        vmem: bytes of VMEM that the kernel may use.
        slots_per_call: slots whose part of the page table fits SMEM.
    """

    chip: Chip
    pages_per_block: int
    block_queries: int
    vmem: int
    slots_per_call: int


def target_chip() -> tuple[Chip | None, str]:
    """Return the chip that is traced for, or None and why there is none.

    That is the device of the current abstract mesh, as an ahead-of-time compile sets
    it, or else the first device of the process.

    Example:
        >>> from pallas_kernels import tpu_chips
        >>> tpu_chips.target_chip()
        (None, 'no TPU: the device is cpu')
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.device_kind in _KINDS:
        return CHIPS[_KINDS[device.device_kind]], ""
    if jax.default_backend() != "tpu":
        return None, f"no TPU: the device is {jax.default_backend()}"
    kind = jax.devices()[0].device_kind
    if kind in _KINDS:
        return CHIPS[_KINDS[kind]], ""
    return None, f"TPU kind {kind!r} is not one of {', '.join(_KINDS)}"


def supports(call: Any, chip: Chip) -> tuple[bool, str]:
    """Return whether a call can be done on a chip, and the reason if it cannot.

    Args:
        call: a `Call`, or anything with its attributes.
        chip: the chip.

    Example:
        >>> from pallas_kernels import tpu_chips
        >>> call = tpu_chips.Call(
        ...     num_tokens=8, num_slots=8, pages_per_slot=400_000, page_size=16,
        ...     num_heads=32, num_kv_heads=8, head_dim=128, q_dtype="bfloat16",
        ...     kv_dtype="bfloat16", ragged=False, has_scales=False,
        ... )
        >>> tpu_chips.supports(call, tpu_chips.CHIPS["v6e"])[1]
        'a row of the page table, 400000 ids, takes 1600000 bytes of scalar memory; \
v6e has 786432 for it'
    """
    try:
        fit(call, chip)
    except NotImplementedError as error:
        return False, str(error)
    return True, ""


def fit(call: Any, chip: Chip, sizes: BlockSizes | None = None) -> Fit:
    """Choose how to run a call on a chip.

    Args:
        call: a `Call`, or anything with its attributes.
        chip: the chip.
        sizes: block sizes to use as they are; None for those of `BLOCK_SIZES`, halved
            until they fit.

    Returns:
        The choice.

    Raises:
        NotImplementedError: the chip cannot do the call; the message says why.
    """
    _check_dtypes(call)
    wanted = sizes or BLOCK_SIZES[chip.name]
    tokens, queries = wanted.tokens, wanted.queries
    if call.ragged:
        # No run is longer than all rows together.
        queries = min(queries, 1 << (call.num_tokens - 1).bit_length())
    budget = chip.vmem // 2
    while True:
        pages = _pages_per_block(call, tokens)
        need = _vmem_bytes(call, pages, queries)
        if need <= budget:
            break
        if sizes is None and call.ragged and queries > _SUBLANES:
            queries //= 2
        elif sizes is None and pages > _pages_per_block(call, 1):
            tokens //= 2
        else:
            raise NotImplementedError(
                f"blocks of {pages * call.page_size} tokens of {call.num_kv_heads} kv "
                f"heads of {call.head_dim} in {call.kv_dtype}"
                + (f" and {queries} queries" if call.ragged else "")
                + f" take {need} bytes of vector memory; {chip.name} has {budget} "
                "for them"
            )
    return Fit(chip, pages, queries, need, _slots_per_call(call, chip, queries))


def holds(dtype: Any) -> bool:
    """Return whether the kernels can read and change pages of a dtype.

    Example:
        >>> from pallas_kernels import tpu_chips
        >>> tpu_chips.holds("bfloat16"), tpu_chips.holds("float16")
        (True, False)
    """
    return jnp.dtype(dtype).name in _FLOATS + _QUANTISED


def require_pages(*arrays: jax.Array) -> None:
    """Raise NotImplementedError unless the kernels can hold pages of this dtype."""
    for x in arrays:
        if not holds(x.dtype):
            raise NotImplementedError(_no_such_pages(jnp.dtype(x.dtype).name))


def _check_dtypes(call: Any) -> None:
    if call.q_dtype not in _Q_DTYPES:
        raise NotImplementedError(f"queries of {call.q_dtype} are not supported")
    if not holds(call.kv_dtype):
        raise NotImplementedError(_no_such_pages(call.kv_dtype))
    if call.has_scales != (call.kv_dtype in _QUANTISED):
        raise NotImplementedError(
            f"scales go with {' and '.join(_QUANTISED)} pages, and only those"
        )
    if call.has_scales and call.page_size % _SUBLANES:
        raise NotImplementedError(
            f"quantised pages need a page_size that is a multiple of {_SUBLANES}, "
            f"a tile of scales; got {call.page_size}"
        )


def _no_such_pages(dtype: str) -> str:
    return (
        f"pages of {dtype} are not supported: the TPU compiler takes "
        f"{', '.join(_FLOATS + _QUANTISED)}"
    )


def _pages_per_block(call: Any, tokens: int) -> int:
    """Return how many pages a block of at least so many tokens has."""
    pages = max(1, min(-(-tokens // call.page_size), call.pages_per_slot))
    if call.has_scales:
        # Scales are read as whole pages: the block itself must be whole vectors.
        while pages * call.page_size % _LANES:
            pages += 1
    return pages


def _vmem_bytes(call: Any, pages_per_block: int, block_queries: int) -> int:
    """Count the vector memory of a kernel."""
    tokens = _up(pages_per_block * call.page_size, _LANES)
    group = call.num_heads // call.num_kv_heads
    kv = jnp.dtype(call.kv_dtype).itemsize
    dim = _up(call.head_dim, _LANES)
    buffers = 4 * tokens * _sublanes(call.num_kv_heads, kv) * dim * kv
    if call.has_scales:
        buffers += 4 * tokens * _up(call.num_kv_heads, _LANES) * 4
    width = group * (block_queries if call.ragged else 1)
    rows = call.num_kv_heads * _up(width, _SUBLANES)
    running = rows * (2 * _LANES + dim) * 4
    # One head at a time: its keys and values as they are, masked and split; scores,
    # weights and their parts.
    working = (8 * tokens * dim + 8 * _up(width, _SUBLANES) * (tokens + dim)) * 4
    if call.ragged:
        heads = block_queries * _up(call.num_heads, _SUBLANES)
        moving = heads * (2 * dim * 4 + dim * 4 + _LANES * 4) + rows * dim * 4
    else:
        moving = 2 * rows * (2 * dim + _LANES) * 4
    return buffers + running + working + moving + _VMEM_RESERVED


def _slots_per_call(call: Any, chip: Chip, block_queries: int) -> int:
    """Return how many slots' rows of the page table fit scalar memory."""
    room = chip.smem - _SMEM_RESERVED
    row = 4 * call.pages_per_slot
    if row > room:
        raise NotImplementedError(
            f"a row of the page table, {call.pages_per_slot} ids, takes {row} bytes of "
            f"scalar memory; {chip.name} has {room} for it"
        )
    # Beside its row a slot has up to five numbers per run.
    runs = call.num_tokens // block_queries + 1 if call.ragged else 0
    room -= 20 * runs
    slots = room // (row + 20)
    if slots < 1:
        raise NotImplementedError(
            f"{runs} runs of {block_queries} queries and a row of the page table, "
            f"{call.pages_per_slot} ids, take {row + 20 * (runs + 1)} bytes of scalar "
            f"memory; {chip.name} has {chip.smem - _SMEM_RESERVED} for them"
        )
    return min(slots, call.num_slots)


def _sublanes(rows: int, itemsize: int) -> int:
    """Return the rows that an axis before the last takes up."""
    packed = 4 // itemsize
    if rows >= _SUBLANES:
        return _up(rows, _SUBLANES)
    return max(packed, 1 << (rows - 1).bit_length())


def _up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
