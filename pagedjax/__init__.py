"""A paged KV cache for JAX as pure functions."""

from pagedjax._attention import (
    merge_attention,
    paged_attention,
    ragged_paged_attention,
)
from pagedjax._capacity import (
    grow,
    num_free_pages,
    num_used_pages,
    shrink,
    utilization,
)
from pagedjax._kv_pool import (
    KVPool,
    copy_pages,
    gather_kv,
    init_kv_pool,
    layer_page_indices,
    resize_kv_pool,
    scrub_pages,
    write_kv,
)
from pagedjax._page_table import (
    CopyPlan,
    PageTable,
    append,
    attach,
    dec_ref,
    fork,
    free,
    inc_ref,
    init_page_table,
    reorder,
    translate,
    truncate,
)
from pagedjax._ragged import RaggedBatch, attend, pack_decode, pack_ragged

__version__ = "0.1.0"

__all__ = [
    "CopyPlan",
    "KVPool",
    "PageTable",
    "RaggedBatch",
    "append",
    "attach",
    "attend",
    "copy_pages",
    "dec_ref",
    "fork",
    "free",
    "gather_kv",
    "grow",
    "inc_ref",
    "init_kv_pool",
    "init_page_table",
    "layer_page_indices",
    "merge_attention",
    "num_free_pages",
    "num_used_pages",
    "pack_decode",
    "pack_ragged",
    "paged_attention",
    "ragged_paged_attention",
    "reorder",
    "resize_kv_pool",
    "scrub_pages",
    "shrink",
    "translate",
    "truncate",
    "utilization",
    "write_kv",
]
