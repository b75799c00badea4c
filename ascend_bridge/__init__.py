"""The custom call: attention over paged keys and values outside XLA.

Arrays in, arrays out; imports jax only. `ascend_bridge.host` runs on the processor,
from the sources in `host_executor`. `ascend_bridge.ascend` keeps pages on an Ascend
NPU, by `device_executor` and `kernels`. `ascend_bridge.build` compiles what the
processor needs of both.
"""
