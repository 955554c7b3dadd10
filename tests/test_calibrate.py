"""The calibration's stand-in measure, against a plain forward pass, and the rounds' fixed draws."""

from __future__ import annotations

import pytest
import torch

from cachecraft_lab.calibrate import candidates, forced_probability
from cachecraft_lab.compress import compress, full_kept
from cachecraft_lab.policies import keep, make_policy
from cachecraft_lab.prefill import prefill


@torch.no_grad()
def test_forced_probability_equals_a_plain_forward_a_row(tiny_llama):
    lm, generator = tiny_llama, torch.Generator().manual_seed(0)
    full = prefill(lm, torch.randint(20, 400, (1, 60), generator=generator))
    question = torch.randint(20, 400, (1, 4), generator=generator)
    rows = [full_kept(full), *keep(make_policy("tova"), full, [0.5, 0.8]).values()]
    answer = lm.tokenizer.encode(" green sky", add_special_tokens=False, return_tensors="pt")
    ids = torch.cat([question, answer], dim=1)
    positions = torch.arange(60, 60 + ids.shape[1])[None]
    expected = []
    for kept in rows:
        logits = lm.model(input_ids=ids, past_key_values=compress(full, kept), position_ids=positions).logits[0]
        likely = logits.softmax(-1)[3:-1].gather(1, answer[0][:, None])
        expected.append(float(likely.mean()))
    assert len(set(expected)) == 3
    assert forced_probability(full, question, " green sky", rows) == pytest.approx(expected, abs=1e-5)


def test_candidates_are_the_same_distinct_ones_for_a_seed():
    drawn = candidates(50)
    assert drawn == candidates(50) and len(set(drawn)) == 50
    assert candidates(50, seed=1) != drawn
