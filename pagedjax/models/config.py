"""What a model of the Llama family looks like: its sizes and its rotary positions."""

import dataclasses
import math

import numpy as np

__all__ = ["CONFIGS", "LlamaConfig", "llama3_rope_divisors", "rope_frequencies"]

_INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Describe one model; hashable, so it can be a static argument of `jax.jit`.

    Attributes:
        num_layers: L, transformer layers.
        num_heads: H, query heads; a multiple of `num_kv_heads`.
        num_kv_heads: K, key and value heads.
        head_dim: D, even (rotary pairs).
        hidden_size: width of the residual stream.
        ffn_size: width of the SwiGLU layer.
        vocab_size: rows of the embedding.
        max_seq_len: positions the model was trained for, in tokens.
        rope_theta: base of the rotary frequencies.
        rope_divisors: D/2 numbers that divide the rotary frequencies (position
            scaling, see `llama3_rope_divisors`); None for plain RoPE.
        rms_eps: added to the mean square in RMSNorm.
        qkv_bias: whether q, k and v have a bias (Qwen2).
        tied_embeddings: whether the head is the embedding.
        window: keys a token sees, itself included (Mistral); None for all.

    Raises:
        ValueError: a size is out of range; the message names it.

    Example:
        >>> import dataclasses
        >>> from pagedjax.models import CONFIGS
        >>> small = dataclasses.replace(CONFIGS["smollm2-135m"], num_layers=2)
        >>> small.num_heads, small.num_kv_heads, small.head_dim
        (9, 3, 64)
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    ffn_size: int
    vocab_size: int
    max_seq_len: int
    rope_theta: float = 10_000.0
    rope_divisors: tuple[float, ...] | None = None
    rms_eps: float = 1e-5
    qkv_bias: bool = False
    tied_embeddings: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        sizes = (
            "num_layers num_heads num_kv_heads head_dim hidden_size ffn_size "
            "vocab_size max_seq_len"
        ).split()
        if self.window is not None:
            sizes.append("window")
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name} must be an int, got {value!r}")
            if not 0 < value <= _INT32_MAX:
                raise ValueError(f"{name} must be in 1..2**31-1, got {value}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} "
                f"and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        for name in ("rope_theta", "rms_eps"):
            value = getattr(self, name)
            # An int of a JSON file can be too large for a float.
            if not isinstance(value, (int, float)) or not 0 < value < 1e30:
                raise ValueError(f"{name} must be in 0..1e30, got {value!r}")
        divisors = self.rope_divisors
        if divisors is not None and (
            len(divisors) != self.head_dim // 2
            or not all(0 < d < math.inf for d in divisors)
        ):
            raise ValueError(
                f"rope_divisors must be {self.head_dim // 2} positive numbers "
                f"(head_dim / 2), got {len(divisors)}: {divisors[:4]}..."
            )


def rope_frequencies(config: LlamaConfig) -> np.ndarray:
    """Return the angle per position of each rotary pair, in radians.

    Source: https://arxiv.org/abs/2104.09864

    Args:
        config: uses `head_dim`, `rope_theta` and `rope_divisors`.

    Returns:
        float32[D/2], the fastest pair first.

    Example:
        >>> from pagedjax.models import CONFIGS, rope_frequencies
        >>> [round(float(f), 4) for f in rope_frequencies(CONFIGS["smollm2-135m"])[:2]]
        [1.0, 0.6978]
    """
    frequencies = _plain_frequencies(config.head_dim, config.rope_theta)
    if config.rope_divisors is not None:
        frequencies = frequencies / np.asarray(config.rope_divisors)
    return frequencies.astype(np.float32)


def llama3_rope_divisors(
    *,
    head_dim: int,
    rope_theta: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_seq_len: int,
) -> tuple[float, ...]:
    """Return the divisors of the rotary frequencies that Llama 3.1 stretches with.

    A pair that turns more than `high_freq_factor` times within the original context
    keeps its frequency, one that turns fewer than `low_freq_factor` times is slowed
    by `factor`, and between the two the frequency is interpolated.

    Source: https://github.com/meta-llama/llama-models (`apply_scaling` of Llama 3.1)

    Args:
        head_dim: D.
        rope_theta: base of the frequencies.
        factor: how much the slow pairs are slowed.
        low_freq_factor: turns below which a pair is slow.
        high_freq_factor: turns above which a pair is fast; larger than the former.
        original_max_seq_len: context length before stretching, in tokens.

    Returns:
        D/2 floats for `LlamaConfig.rope_divisors`.

    Raises:
        ValueError: a factor is not positive, or low is not below high.

    Example:
        >>> from pagedjax.models import llama3_rope_divisors
        >>> divisors = llama3_rope_divisors(
        ...     head_dim=64, rope_theta=5e5, factor=32.0, low_freq_factor=1.0,
        ...     high_freq_factor=4.0, original_max_seq_len=8192,
        ... )
        >>> divisors[0], divisors[-1]
        (1.0, 32.0)
    """
    if not (factor > 0 and 0 < low_freq_factor < high_freq_factor < math.inf):
        raise ValueError(
            "rope scaling needs factor > 0 and 0 < low_freq_factor < high_freq_factor, "
            f"got {factor}, {low_freq_factor} and {high_freq_factor}"
        )
    frequencies = _plain_frequencies(head_dim, rope_theta)
    turns = original_max_seq_len * frequencies / (2 * math.pi)
    smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return tuple((1 / ((1 - smooth) / factor + smooth)).tolist())


def _plain_frequencies(head_dim: int, rope_theta: float) -> np.ndarray:
    """Return float64[head_dim/2]: theta ** (-2i / head_dim)."""
    return float(rope_theta) ** (-np.arange(0, head_dim, 2) / head_dim)


def _llama31(head_dim: int, factor: float) -> tuple[float, ...]:
    """Return the published stretching of Llama 3.1 and 3.2."""
    return llama3_rope_divisors(
        head_dim=head_dim,
        rope_theta=500_000.0,
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_seq_len=8192,
    )


# Columns: layers, heads, kv heads, head dim, hidden, ffn, vocabulary, context.
CONFIGS: dict[str, LlamaConfig] = {
    "llama-2-7b": LlamaConfig(32, 32, 32, 128, 4096, 11008, 32000, 4096),
    "llama-2-13b": LlamaConfig(40, 40, 40, 128, 5120, 13824, 32000, 4096),
    "llama-2-70b": LlamaConfig(80, 64, 8, 128, 8192, 28672, 32000, 4096),
    "llama-3-8b": LlamaConfig(
        32, 32, 8, 128, 4096, 14336, 128256, 8192, rope_theta=500_000.0
    ),
    "llama-3.1-8b": LlamaConfig(
        32, 32, 8, 128, 4096, 14336, 128256, 131072, 500_000.0, _llama31(128, 8.0)
    ),
    "llama-3.2-1b": LlamaConfig(
        *(16, 32, 8, 64, 2048, 8192, 128256, 131072, 500_000.0, _llama31(64, 32.0)),
        tied_embeddings=True,
    ),
    "llama-3.2-3b": LlamaConfig(
        *(28, 24, 8, 128, 3072, 8192, 128256, 131072, 500_000.0, _llama31(128, 32.0)),
        tied_embeddings=True,
    ),
    "smollm2-135m": LlamaConfig(
        *(30, 9, 3, 64, 576, 1536, 49152, 8192, 100_000.0), tied_embeddings=True
    ),
    "smollm2-360m": LlamaConfig(
        *(32, 15, 5, 64, 960, 2560, 49152, 8192, 100_000.0), tied_embeddings=True
    ),
    "smollm2-1.7b": LlamaConfig(
        *(24, 32, 32, 64, 2048, 8192, 49152, 8192, 130_000.0), tied_embeddings=True
    ),
    "qwen2.5-0.5b": LlamaConfig(
        *(24, 14, 2, 64, 896, 4864, 151936, 32768, 1_000_000.0, None, 1e-6),
        qkv_bias=True,
        tied_embeddings=True,
    ),
    "qwen2.5-1.5b": LlamaConfig(
        *(28, 12, 2, 128, 1536, 8960, 151936, 131072, 1_000_000.0, None, 1e-6),
        qkv_bias=True,
        tied_embeddings=True,
    ),
    "qwen2-7b": LlamaConfig(
        *(28, 28, 4, 128, 3584, 18944, 152064, 131072, 1_000_000.0, None, 1e-6),
        qkv_bias=True,
    ),
    "mistral-7b-v0.1": LlamaConfig(
        32, 32, 8, 128, 4096, 14336, 32000, 32768, window=4096
    ),
    "mistral-7b-v0.3": LlamaConfig(
        32, 32, 8, 128, 4096, 14336, 32768, 32768, rope_theta=1_000_000.0
    ),
}
