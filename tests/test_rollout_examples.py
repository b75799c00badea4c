"""The examples that use `rollout`, run small."""

import runpy
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_reward_rises():
    grpo = runpy.run_path(str(EXAMPLES / "grpo.py"))
    curve = grpo["train"](num_steps=80)
    first, *_, last = np.split(np.array(curve), 4)
    assert np.mean(last) > np.mean(first) + 0.3
    assert np.min(last) > np.mean(first) + 0.1  # and stays
    picture = grpo["draw"](curve)
    assert picture.startswith("<svg") and picture.count(",") == len(curve) + 2


def test_the_vote_beats_a_sample(capsys):
    best = runpy.run_path(str(EXAMPLES / "best_of_n.py"))
    first, voted = best["main"](num_questions=8)
    assert voted == 8 > first
    printed = capsys.readouterr().out
    assert "the vote right:   8 of 8" in printed
