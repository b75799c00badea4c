"""Which GPU is traced for, and what it lacks."""

import dataclasses

import jax

# Compute capability by the start of the name, for GPUs that are only compiled for.
_CAPABILITIES = {
    "NVIDIA A100": (8, 0),
    "NVIDIA A800": (8, 0),
    "NVIDIA A10": (8, 6),
    "NVIDIA A40": (8, 6),
    "NVIDIA L4": (8, 9),
    "NVIDIA L40": (8, 9),
    "NVIDIA H100": (9, 0),
    "NVIDIA H200": (9, 0),
    "NVIDIA GH200": (9, 0),
    "NVIDIA B200": (10, 0),
}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        kind: its name.
        capability: its compute capability, (major, minor).
    """

    kind: str
    capability: tuple[int, int]


def target_gpu() -> tuple[Gpu | None, str]:
    """Return the NVIDIA GPU that is traced for, or None and why there is none.

    That is the device of the current abstract mesh, as an ahead-of-time compile sets
    it, or else the first device of the process.

    Example:
        >>> from pallas_kernels import gpu_targets
        >>> gpu_targets.target_gpu()
        (None, 'no NVIDIA GPU: the device is cpu')
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.device_kind.startswith("NVIDIA"):
        kind, capability = abstract.device_kind, None
    else:
        device = jax.devices()[0]
        kind, capability = device.device_kind, _capability_of(device)
        if device.platform not in ("gpu", "cuda") or not kind.startswith("NVIDIA"):
            return None, f"no NVIDIA GPU: the device is {kind}"
    names = [name for name in _CAPABILITIES if kind.startswith(name)]
    if capability is None and not names:
        return None, f"the compute capability of {kind} is not known"
    gpu = Gpu(kind, capability or _CAPABILITIES[max(names, key=len)])
    if gpu.capability < (8, 0):
        return None, f"{kind} is older than Ampere, compute capability 8.0"
    return gpu, ""


def _capability_of(device: jax.Device) -> tuple[int, int] | None:
    """Return the compute capability that a device tells, if it does."""
    told = getattr(device, "compute_capability", None)
    if told is None:
        return None
    major, minor = str(told).split(".")
    return int(major), int(minor)
