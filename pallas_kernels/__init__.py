"""Pallas kernels for paged attention: arrays in, arrays out.

    tpu_decode    one query per slot              tpu_pages   writing and copying pages
    tpu_ragged    any number of queries per slot  tpu_chips   what each chip can hold

A kernel knows no page table and no pool, only their arrays, in the layout of
`pagedjax`: pages [num_pages, page_size, K, D], ids int32[S, P]. `docs/kernels.md`
tells how they work.
"""
