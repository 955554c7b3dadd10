"""Budgets and selection: hand-computed cases, and properties over lengths, ratios, heads, ties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecraft_lab.errors import InputError
from cachecraft_lab.policies import policy_names
from cachecraft_lab.policies.kvpress import spread
from cachecraft_lab.select import check_kept, chunk_topk, kept_count, token_topk


@pytest.mark.parametrize(
    ("n", "ratio", "kept"),
    [(2, 0.6, 1), (100, 0.9, 10), (100, 0.88, 12), (1, 0.99, 1), (7, 0.0, 7), (1000, 0.95, 50), (3, 0.5, 1)],
)
def test_kept_count_by_hand(n, ratio, kept):
    assert kept_count(n, ratio) == kept


@pytest.mark.parametrize("ratio", [1.0, -0.1, 1.5, float("nan"), "0.5", None, True])
def test_ratio_outside_is_refused(ratio):
    with pytest.raises(InputError, match="outside"):
        kept_count(100, ratio)


def test_token_topk_by_hand():
    scores = torch.tensor([[0.1, 0.9, 0.9, 0.3, 0.9], [1.0, 1.0, 1.0, 1.0, 1.0]])
    assert token_topk(scores, 2).tolist() == [[1, 2], [0, 1]]  # ties: the earlier position
    assert token_topk(scores, 4).tolist() == [[1, 2, 3, 4], [0, 1, 2, 3]]


def test_chunk_topk_by_hand():
    # chunks of 3: means 1, 3, 2 and the short last one (single token) 2.5
    scores = torch.tensor([[1.0, 1.0, 1.0, 0.0, 9.0, 0.0, 2.0, 2.0, 2.0, 2.5]])
    assert chunk_topk(scores, 3, 3).tolist() == [[3, 4, 5]]
    assert chunk_topk(scores, 4, 3).tolist() == [[3, 4, 5, 9]]
    assert chunk_topk(scores, 6, 3).tolist() == [[3, 4, 5, 6, 7, 9]]  # the third chunk is cut, earlier tokens first
    assert chunk_topk(scores, 1, 3).tolist() == [[4]]  # of a chunk that does not fit, its best token
    assert chunk_topk(scores, 5, 3, n_sink=1, n_recent=1).tolist() == [[0, 3, 4, 5, 9]]


def brute_force_chunks(row: list[float], budget: int, length: int) -> list[int]:
    chunks = [list(range(i, min(i + length, len(row)))) for i in range(0, len(row), length)]
    chunks.sort(key=lambda c: (-sum(row[i] for i in c) / len(c), c[0]))
    kept: list[int] = []
    for chunk in chunks:
        room = budget - len(kept)
        kept += sorted(chunk, key=lambda i: (-row[i], i))[:room]
    return sorted(kept)


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    n=st.integers(1, 60),
    heads=st.integers(1, 3),
    ratio=st.floats(0, 0.999),
    length=st.integers(1, 20),
)
def test_selection_keeps_the_contract(data, n, heads, ratio, length):
    # few distinct values, so that ties are common; small integers, so that chunk means are exact
    values = data.draw(st.lists(st.integers(-3, 3), min_size=heads * n, max_size=heads * n))
    scores = torch.tensor(values, dtype=torch.float64).view(heads, n)
    budget = kept_count(n, ratio)
    assert budget == max(1, math.floor(n * (1 - ratio) + 1e-9))
    before = scores.clone()
    tokens, chunks = token_topk(scores, budget), chunk_topk(scores, budget, length)
    assert torch.equal(scores, before)
    for kept in (tokens, chunks):
        check_kept(kept, heads, n, budget)
    for row, token_row, chunk_row in zip(scores.tolist(), tokens.tolist(), chunks.tolist(), strict=True):
        assert token_row == sorted(sorted(range(n), key=lambda i: (-row[i], i))[:budget])
        assert chunk_row == brute_force_chunks(row, budget, length)
    assert torch.equal(chunk_topk(scores, budget, 1), tokens)


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 40), where=st.integers(0, 1000))
def test_nan_is_refused(n, where):
    scores = torch.zeros(2, n)
    scores.view(-1)[where % (2 * n)] = float("nan")
    for select in (token_topk, lambda s, b: chunk_topk(s, b, 4)):
        with pytest.raises(InputError, match="NaN"):
            select(scores, 1)


@pytest.mark.parametrize("budget", [0, 6])
def test_budget_outside_is_refused(budget):
    with pytest.raises(InputError, match="budget"):
        token_topk(torch.zeros(1, 5), budget)


@pytest.mark.parametrize(
    ("kept", "fault"),
    [
        ([[0, 2], [1, 3]], None),
        ([[2, 0], [1, 3]], "unsorted or repeated"),
        ([[2, 2], [1, 3]], "unsorted or repeated"),
        ([[0, 9], [1, 3]], "values 0..9"),
        ([[-1, 2], [1, 3]], "values -1..3"),
        ([[0, 1, 2], [1, 2, 3]], r"\[2, 3\]"),
    ],
)
def test_contract_is_checked(kept, fault):
    kept = torch.tensor(kept)
    if fault is None:
        assert check_kept(kept, 2, 5, 2) is kept
        return
    with pytest.raises(InputError, match=fault) as error:
        check_kept(kept, 2, 5, 2, who="mine")
    assert "mine" in str(error.value) and "expected" in str(error.value)


def test_contract_refuses_other_dtypes():
    with pytest.raises(InputError, match="float32"):
        check_kept(torch.zeros(1, 1), 1, 5, 1)


@settings(max_examples=200, deadline=None)
@given(
    wished=st.lists(st.integers(-5, 100), min_size=1, max_size=12),
    high=st.integers(1, 80),
    share=st.floats(0, 1),
)
def test_spread_meets_the_total(wished, high, share):
    total = len(wished) + round(share * (high - 1) * len(wished))
    budgets = spread(wished, total=total, high=high)
    assert sum(budgets) == total and all(1 <= b <= high for b in budgets)


def test_every_policy_is_known_by_name():
    wanted = {
        "frc", "random", "knorm", "streaming_llm", "snapkv", "tova", "keydiff", "lagkv", "expected_attention",
        "observed_attention", "pyramidkv", "chunkkv",
    }  # fmt: skip
    assert wanted <= set(policy_names())
