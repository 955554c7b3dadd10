"""Signals against brute force over the whole n x n matrix, and small cases by hand."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_lm

from cachecraft_lab.errors import InputError
from cachecraft_lab.features import (
    check_window,
    common_scale,
    group_reduce,
    key_norm,
    local_attention,
    max_salience,
    neighbourhood_density,
    value_norm,
    window_attention,
)
from cachecraft_lab.policies import keep, make_policy
from cachecraft_lab.prefill import PrefillLayer, prefill
from cachecraft_lab.select import token_topk

SIZES = [(12, 11), (5, 1), (33, 8), (40, 8), (17, 16), (9, 4), (50, 7), (31, 30)]


def ids(n: int) -> torch.Tensor:
    return torch.randint(10, 480, (1, n), generator=torch.Generator().manual_seed(n))


def softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    powers = [math.exp(s - top) for s in scores]
    return [p / sum(powers) for p in powers]


def brute_force(layer: PrefillLayer, sees) -> list[list[list[float]]]:
    """Attention ``[heads][query][key]`` by plain sums; ``sees(i, j)`` says which keys a query's softmax runs over."""
    queries, keys, n = layer.queries().double(), layer.keys.double(), layer.n_tokens
    weights = []
    for head, query in enumerate(queries):
        key = keys[head // (len(queries) // len(keys))]
        dots = (query @ key.T / math.sqrt(query.shape[-1])).tolist()
        rows = []
        for i in range(n):
            seen = [j for j in range(n) if sees(i, j)]
            row = dict(zip(seen, softmax([dots[i][j] for j in seen]), strict=True))
            rows.append([row.get(j, 0.0) for j in range(n)])
        weights.append(rows)
    return weights


def mean_received(weights, queries_of) -> torch.Tensor:
    """Mean attention that key ``j`` receives from the queries ``queries_of(j)``, a head a row."""
    n = len(weights[0])
    received = [[[rows[i][j] for i in queries_of(j)] for j in range(n)] for rows in weights]
    return torch.tensor([[sum(w) / len(w) for w in row] for row in received])


@pytest.mark.parametrize(("n", "window"), SIZES)
def test_window_attention_is_the_causal_softmax_of_the_last_queries(tiny_llama, n, window):
    for layer in prefill(tiny_llama, ids(n)).layers:
        weights = brute_force(layer, lambda i, j: j <= i)
        truth = mean_received(weights, lambda j: range(max(j, n - window), n))
        torch.testing.assert_close(window_attention(layer, window), truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("arch", ["qwen3", "mistral"])
def test_window_attention_is_what_the_eager_model_reports(arch):
    layer = prefill(tiny_lm(arch, "eager"), ids(30), capture={"hidden_states", "attentions"}).layers[1]
    counts = torch.full((30,), 8.0)
    counts[22:] = torch.arange(8.0, 0.0, -1.0)
    truth = layer.attentions[:, 22:].sum(dim=1) / counts
    torch.testing.assert_close(window_attention(layer, 8), truth, atol=1e-5, rtol=1e-5)


def test_the_last_key_gets_mass_from_the_last_query_only(tiny_llama):
    """n = 12: a causal mask that holds inside the window alone would let earlier queries see later keys."""
    layer = prefill(tiny_llama, ids(12)).layers[0]
    weights = brute_force(layer, lambda i, j: j <= i)
    got = window_attention(layer, 11)
    last = torch.tensor([rows[11][11] for rows in weights])
    torch.testing.assert_close(got[:, 11], last, atol=1e-5, rtol=1e-5)
    # every query gives away exactly 1: weigh the means back to sums
    counts = torch.tensor([min(11, 12 - j) for j in range(12)], dtype=torch.float32)
    torch.testing.assert_close((got * counts).sum(-1), torch.full((4,), 11.0))


@pytest.mark.parametrize(("n", "window"), SIZES)
def test_local_attention_is_a_banded_softmax(tiny_llama, n, window):
    for layer in prefill(tiny_llama, ids(n)).layers:
        weights = brute_force(layer, lambda i, j: i - window < j <= i)
        truth = mean_received(weights, lambda j: range(j, min(j + window, n)))
        torch.testing.assert_close(local_attention(layer, window), truth, atol=1e-5, rtol=1e-5)


def test_local_attention_reads_no_far_query(tiny_llama):
    """Other tokens after position 20 change nothing for keys whose window ends before it."""
    one, other = ids(40), ids(40).clone()
    other[:, 20:] = (other[:, 20:] + 7) % 400 + 10
    a, b = (local_attention(prefill(tiny_llama, tokens).layers[1], 6) for tokens in (one, other))
    torch.testing.assert_close(a[:, :15], b[:, :15])
    assert not torch.allclose(a[:, 15:20], b[:, 15:20])


def test_half_precision_is_summed_in_float32():
    layer = prefill(tiny_lm("llama"), ids(40)).layers[0]
    layer.module.to(torch.bfloat16)
    half = replace(
        layer,
        **{name: getattr(layer, name).bfloat16() for name in ("keys", "values", "cos", "sin", "hidden_states")},
    )
    for signal in (window_attention, local_attention):
        got = signal(half, 8)
        assert got.dtype == torch.float32 and bool(torch.isfinite(got).all())
    assert key_norm(half).dtype == value_norm(half).dtype == torch.float32


# --- grouped-query attention: heads (0, 1) share KV head 0, heads (2, 3) share KV head 1 ----------------------------


def looking_at(layer: PrefillLayer, head: int, key: int) -> PrefillLayer:
    """The layer with keys and queries of which one query head looks at one key, and all others look evenly."""
    n, module = layer.n_tokens, copy.deepcopy(layer.module)
    module.q_proj.weight.zero_()
    module.q_proj.weight[head * 16, 0] = 20.0
    hidden = torch.zeros(n, 64)
    hidden[:, 0] = 1.0
    keys = torch.zeros(2, n, 16)
    keys[:, key, 0] = 1.0
    layer = replace(
        layer,
        module=module,
        hidden_states=hidden,
        keys=keys,
        cos=torch.ones(n, 16),  # no rotation: the query is the same at every position
        sin=torch.zeros(n, 16),
        memo={},
    )
    scores = torch.einsum("hqd,hkd->hqk", layer.queries(), keys.repeat_interleave(2, dim=0)) / 4
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    return replace(layer, attentions=scores.masked_fill(future, float("-inf")).softmax(-1), memo={})


@pytest.mark.parametrize(("head", "kv_head"), [(0, 0), (1, 0), (2, 1), (3, 1)])
@pytest.mark.parametrize("how", ["mean", "max"])
def test_group_reduce_follows_the_models_grouping(head, kv_head, how):
    signal = torch.full((4, 10), 0.1)
    signal[head, 6] = 0.9
    reduced = group_reduce(signal, 2, how)
    assert reduced[kv_head, 6] == pytest.approx(0.5 if how == "mean" else 0.9)
    assert reduced[1 - kv_head].tolist() == pytest.approx([0.1] * 10)
    kept = token_topk(reduced, 1)
    assert kept[kv_head].tolist() == [6] and kept[1 - kv_head].tolist() == [0]


@pytest.mark.parametrize(("head", "kv_head"), [(0, 0), (1, 0), (2, 1), (3, 1)])
@pytest.mark.parametrize(
    "spec",
    ["observed_attention", {"name": "snapkv", "window_size": 3, "kernel_size": 1}],
    ids=lambda spec: spec if isinstance(spec, str) else spec["name"],
)
def test_only_the_kv_head_of_a_raised_query_head_keeps_the_key(tiny_llama, spec, head, kv_head):
    full = prefill(tiny_llama, ids(20))
    full = replace(full, layers=tuple(looking_at(layer, head, key=11) for layer in full.layers))
    kept = keep(make_policy(spec), full, [0.8])[0.8]  # 4 of 20
    for layer in kept:
        assert 11 in layer[kv_head].tolist() and 11 not in layer[1 - kv_head].tolist()


def test_group_reduce_refuses_other_ways():
    with pytest.raises(InputError, match="'sum'"):
        group_reduce(torch.zeros(4, 3), 2, "sum")


# --- pooling, salience, scales: by hand -----------------------------------------------------------------------------


def test_density_by_hand():
    signal = torch.tensor([[1.0, 2.0, 6.0, 4.0], [0.0, 0.0, 3.0, 0.0]])
    assert neighbourhood_density(signal, 3).tolist() == [[1.5, 3.0, 4.0, 5.0], [0.0, 1.0, 1.0, 1.5]]
    assert torch.equal(neighbourhood_density(signal, 1), signal)
    wide = neighbourhood_density(signal, 7)  # wider than the context: everyone sees the mean of what is there
    assert wide[0].tolist() == [3.25] * 4


@pytest.mark.parametrize("width", [0, 2, -3])
def test_density_refuses_other_widths(width):
    with pytest.raises(InputError, match="odd"):
        neighbourhood_density(torch.zeros(1, 4), width)


def test_salience_is_the_maximum_over_kv_heads_for_all_of_them():
    got = max_salience(torch.tensor([[1.0, 5.0, 0.0], [2.0, 4.0, -1.0]]))
    assert got.tolist() == [[2.0, 5.0, 0.0], [2.0, 5.0, 0.0]]


def test_scales_by_hand():
    signal = torch.tensor([[3.0, 1.0, 1.0, 2.0], [0.0, 4.0, 0.0, 4.0]])
    assert common_scale(signal, "max").tolist() == [[0.75, 0.25, 0.25, 0.5], [0.0, 1.0, 0.0, 1.0]]
    means = torch.tensor([[12 / 7, 4 / 7, 4 / 7, 8 / 7], [0.0, 2.0, 0.0, 2.0]])
    torch.testing.assert_close(common_scale(signal, "mean"), means)
    third = 1 / 3
    ranks = torch.tensor([[1.0, 0.0, third, 2 * third], [0.0, 2 * third, third, 1.0]])
    torch.testing.assert_close(common_scale(signal, "rank"), ranks)
    with pytest.raises(InputError, match=r"'std'.*'rank'"):
        common_scale(signal, "std")


@pytest.mark.parametrize("how", ["max", "mean", "rank"])
def test_scales_of_nothing_stay_finite(how):
    for signal in (torch.zeros(2, 5), torch.zeros(2, 1), torch.full((2, 5), 1e-44)):
        assert bool(torch.isfinite(common_scale(signal, how)).all())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=20), st.floats(0.01, 1000))
def test_scales_do_not_depend_on_the_signals_unit(values, factor):
    signal = torch.tensor([values, values[::-1]])
    for how in ("max", "mean"):
        if float(signal.max()) > 1e-3:
            torch.testing.assert_close(common_scale(signal, how), common_scale(signal * factor, how))


def test_norms_by_hand(tiny_llama):
    layer = prefill(tiny_llama, ids(3)).layers[0]
    pairs = torch.zeros(2, 3, 16)
    pairs[0, 1, :2] = torch.tensor([3.0, 4.0])
    pairs[1, 2, 0] = -2.0
    layer = replace(layer, keys=pairs, values=2 * pairs)
    assert key_norm(layer).tolist() == [[0.0, 5.0, 0.0], [0.0, 0.0, 2.0]]
    assert value_norm(layer).tolist() == [[0.0, 10.0, 0.0], [0.0, 0.0, 4.0]]


# --- contexts under the window --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [8, 32, 63, 64])
def test_a_context_under_the_window_is_refused(tiny_llama, n):
    """Never a shrunk window, nor a negative slice that selects everything."""
    full = prefill(tiny_llama, ids(n))
    for signal in (window_attention, local_attention):
        with pytest.raises(InputError, match=rf"{n} tokens.*window of 64"):
            signal(full.layers[0], 64)
    for spec in ("snapkv", "pyramidkv", "chunkkv", {"name": "frc", "window": 64}):
        with pytest.raises(InputError, match=rf"at least 65 tokens.*has {n}"):
            keep(make_policy(spec), full, [0.5])


def test_one_token_over_the_window_is_enough(tiny_llama):
    full = prefill(tiny_llama, ids(65))
    for signal in (window_attention, local_attention):
        assert tuple(signal(full.layers[0], 64).shape) == (4, 65)
    for spec in ("snapkv", "pyramidkv", "chunkkv", {"name": "frc", "window": 64}):
        kept = keep(make_policy(spec), full, [0.5])[0.5]
        assert [tuple(layer.shape) for layer in kept] == [(2, 32)] * 2  # half of the window's own tokens is evicted


@pytest.mark.parametrize("window", [0, -1])
def test_an_empty_window_is_refused(window):
    with pytest.raises(InputError, match=">= 1"):
        check_window(100, window)
