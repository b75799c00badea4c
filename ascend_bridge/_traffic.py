"""What a decode step sends over the bus, against what it reads on the NPU."""

import dataclasses

# What the executor packs pieces to, and the sizes of the two tilings (npu_store.cc).
_ALIGN = 512
_TILING_BYTES = 512


@dataclasses.dataclass(frozen=True)
class StepTraffic:
    """Bytes of one decode step, all layers together.

    Attributes:
        to_device: queries, new keys and values, page ids, lengths, tilings.
        from_device: outputs and log-sum-exps.
        kv_bytes: keys and values that attention reads in the memory of the NPU.
        exchanges: how often the host waits for the device: once a layer.
    """

    to_device: int
    from_device: int
    kv_bytes: int
    exchanges: int

    @property
    def bus_bytes(self) -> int:
        """Bytes that cross the bus, both ways."""
        return self.to_device + self.from_device

    @property
    def ratio(self) -> float:
        """Bytes read on the NPU for each byte that crosses the bus."""
        return self.kv_bytes / self.bus_bytes


def step_traffic(
    *,
    context: int,
    num_layers: int = 32,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 128,
    slots: int = 1,
    pages_per_slot: int | None = None,
) -> StepTraffic:
    """Count the bytes of one decode step with `attend` in each layer, 16-bit dtype.

    Args:
        context: tokens of each slot, the new one included.
        num_layers: L.
        num_heads: H.
        num_kv_heads: K.
        head_dim: D.
        page_size: tokens in a page.
        slots: sequences that decode together, S.
        pages_per_slot: columns of the table, P; None means as many as the context has.

    Returns:
        The bytes, exactly as the executor sends them, padding included.

    Example:
        >>> from ascend_bridge.ascend import step_traffic
        >>> traffic = step_traffic(context=4096)
        >>> traffic.bus_bytes, traffic.kv_bytes, round(traffic.ratio)
        (741376, 536870912, 724)
    """
    columns = -(-context // page_size) if pages_per_slot is None else pages_per_slot
    q = slots * num_heads * head_dim * 2
    new = slots * num_kv_heads * head_dim * 2
    ids = slots * 4
    pieces = (new, new, ids, _TILING_BYTES, q, slots * columns * 4, ids, _TILING_BYTES)
    return StepTraffic(
        to_device=num_layers * sum(_aligned(x) for x in pieces),
        from_device=num_layers * (_aligned(q) + slots * num_heads * 4),
        kv_bytes=num_layers * slots * context * 2 * num_kv_heads * head_dim * 2,
        exchanges=num_layers,
    )


def traffic_table(contexts: tuple[int, ...] = (128, 1024, 4096, 32768)) -> str:
    """Return the table of docs/ascend.md: one sequence of an 8-billion Llama shape.

    Args:
        contexts: tokens of the sequence, one row each.
    """
    lines = [
        "| context | over the bus | KV read on the NPU | ratio | waits |",
        "|---|---|---|---|---|",
    ]
    for context in contexts:
        t = step_traffic(context=context)
        lines.append(
            f"| {context:,} | {t.bus_bytes / 1e6:.2f} MB | {t.kv_bytes / 1e6:,.1f} MB "
            f"| {t.ratio:,.0f} | {t.exchanges} |"
        )
    return "\n".join(lines)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
