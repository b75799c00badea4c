"""Ascend C kernels, their host-side plans, and how to build them."""
