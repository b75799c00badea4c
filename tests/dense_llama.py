"""An independent Llama: NumPy float64, no cache, loops over layers and heads.

It shares no code with the product: rotary positions are complex numbers, the matrices
are those of the checkpoint, and every call computes the whole sequence again.
"""

import math

import numpy as np


def dense_logits(config, weights, tokens):
    """Return float64[n, V], the logits after each of the n tokens.

    `weights` maps the names of `weight_shapes` to arrays.
    """
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    x = w["embed"][np.asarray(tokens)]
    group = config.num_heads // config.num_kv_heads
    for i in range(config.num_layers):
        y = _norm(x, w[f"{i}.attn_norm"], config.rms_eps)
        q, k, v = (
            _heads(y @ w[f"{i}.{n}"].T + w.get(f"{i}.{n}_bias", 0.0), config.head_dim)
            for n in "qkv"
        )
        mixed = [
            _attend(
                _turn(q[h], config),
                _turn(k[h // group], config),
                v[h // group],
                config.window,
            )
            for h in range(config.num_heads)
        ]
        x = x + np.concatenate(mixed, axis=1) @ w[f"{i}.out"].T
        y = _norm(x, w[f"{i}.ffn_norm"], config.rms_eps)
        gate = y @ w[f"{i}.gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w[f"{i}.up"].T)) @ w[f"{i}.down"].T
    return _norm(x, w["norm"], config.rms_eps) @ w.get("head", w["embed"]).T


def llama3_frequency(frequency, factor, low, high, original):
    """Stretch one rotary frequency as Llama 3.1 does, by its three cases."""
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) * weight


def _heads(y, head_dim):
    """Split [n, heads * D] into a list of [n, D]."""
    return np.split(y, y.shape[1] // head_dim, axis=1)


def _turn(x, config):
    """Rotate pair i = (x[i], x[i + D/2]) of token t by t * frequency i."""
    half = config.head_dim // 2
    frequencies = np.array(
        [config.rope_theta ** (-2 * i / config.head_dim) for i in range(half)]
    )
    if config.rope_divisors is not None:
        frequencies = frequencies / np.array(config.rope_divisors)
    angles = np.outer(np.arange(len(x)), frequencies)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=1)


def _attend(q, k, v, window):
    out = np.empty_like(q)
    for t in range(len(q)):
        first = 0 if window is None else max(0, t + 1 - window)
        scores = k[first : t + 1] @ q[t] / math.sqrt(q.shape[1])
        scores = np.exp(scores - scores.max())
        out[t] = scores @ v[first : t + 1] / scores.sum()
    return out
