"""Beam search in plain Python: every prefix is computed anew, without a cache."""

import math

import numpy as np


def search(
    logits_of,
    prompt,
    *,
    num_beams,
    max_new_tokens,
    eos_ids=(),
    length_penalty=1.0,
    early_stopping=False,
):
    """Gives the finished sequences of one prompt, best first.

    `logits_of(tokens)` gives the logits after a tuple of tokens. The result is a
    list of `(score, tokens, ends)`; `ends` is False where only the limit ended it.
    """

    def score(total, tokens):
        return total / len(tokens) ** length_penalty

    live, finished = [(0.0, ())], []
    for _ in range(max_new_tokens):
        grown = []
        for total, tokens in live:
            logits = logits_of((*prompt, *tokens))
            logprobs = logits - logits.max()
            logprobs = logprobs - math.log(np.exp(logprobs).sum())
            grown += [(total + lp, (*tokens, t)) for t, lp in enumerate(logprobs)]
        grown.sort(key=lambda pair: -pair[0])
        live = []
        for rank, (total, tokens) in enumerate(grown):
            if tokens[-1] not in eos_ids:
                live.append((total, tokens))
            elif rank < num_beams:
                finished.append((score(total, tokens), tokens, True))
            if len(live) == num_beams:
                break
        finished.sort(key=lambda entry: -entry[0])
        del finished[num_beams:]
        if len(finished) == num_beams:
            if early_stopping or finished[-1][0] >= score(*live[0]):
                return finished
    finished += [(score(total, tokens), tokens, False) for total, tokens in live]
    return sorted(finished, key=lambda entry: -entry[0])[:num_beams]
