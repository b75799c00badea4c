"""Slow and plain reference computations: float64 NumPy, one row and key at a time."""

import math

import numpy as np


def attention_oracle(
    q: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    page_indices: np.ndarray,
    seq_lens: np.ndarray,
    cu_q_lens: np.ndarray | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (out[T, H, D], lse[T, H]) in float64; touches owned tokens only.

    `cu_q_lens` None is decode: one row per slot, none for a slot of length 0.
    """
    q = np.asarray(q).astype(np.float64)
    num_rows, num_heads, head_dim = q.shape
    page_size, num_kv_heads = k_pages.shape[1:3]
    group = num_heads // num_kv_heads
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim)
    out = np.zeros(q.shape)
    lse = np.full(q.shape[:2], -np.inf)
    for slot, length in enumerate(int(n) for n in seq_lens):
        if cu_q_lens is None:
            rows = [slot] if length > 0 else []
        else:
            rows = list(range(int(cu_q_lens[slot]), int(cu_q_lens[slot + 1])))
        keys, values = [], []
        for position in range(length if rows else 0):
            page = page_indices[slot, position // page_size]
            keys.append(k_pages[page, position % page_size].astype(np.float64))
            values.append(v_pages[page, position % page_size].astype(np.float64))
        for i, row in enumerate(rows):
            place = length - len(rows) + i
            seen = [
                j
                for j in range(length)
                if j <= place and (window is None or j > place - window)
            ]
            for head in range(num_heads if seen else 0):
                scores = []
                for j in seen:
                    score = scale * float(q[row, head] @ keys[j][head // group])
                    if soft_cap is not None:
                        score = soft_cap * math.tanh(score / soft_cap)
                    scores.append(score)
                peak = max(scores)
                weights = [math.exp(score - peak) for score in scores]
                total = sum(weights)
                for weight, j in zip(weights, seen, strict=True):
                    out[row, head] += weight / total * values[j][head // group]
                lse[row, head] = peak + math.log(total)
    return out, lse
