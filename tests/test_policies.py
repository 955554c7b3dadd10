"""Policies keep what kvpress itself keeps, at our budget; the contract holds for any policy, budget and length."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import kvpress
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpress.utils import compute_n_kept
from tiny import tiny_lm
from transformers import DynamicCache

from cachecraft_lab import features
from cachecraft_lab.errors import InputError
from cachecraft_lab.policies import (
    FRC,
    Policy,
    PolicyPress,
    from_press,
    keep,
    keep_all,
    make_policy,
    policy_names,
    register_policy,
)
from cachecraft_lab.policies.base import _REGISTRY
from cachecraft_lab.policies.kvpress import check_kvpress, spread
from cachecraft_lab.prefill import Prefill, prefill
from cachecraft_lab.prompt import encode_prompt
from cachecraft_lab.select import chunk_topk, kept_count

N = 300
RATIOS = (0.5, 0.75, 0.88)
"""At 300 tokens our budget and kvpress's plain floor agree at these: 150, 75 and 36."""

PRESSES = {
    "random": lambda r, layer: kvpress.RandomPress(r, seed=7 + layer),
    "knorm": lambda r, layer: kvpress.KnormPress(r),
    "streaming_llm": lambda r, layer: kvpress.StreamingLLMPress(r, n_sink=4),
    "snapkv": lambda r, layer: kvpress.SnapKVPress(r, window_size=16, kernel_size=5),
    "tova": lambda r, layer: kvpress.TOVAPress(r),
    "keydiff": lambda r, layer: kvpress.KeyDiffPress(r),
    "lagkv": lambda r, layer: kvpress.LagKVPress(r, n_sink=4, lag_size=32),
    "expected_attention": lambda r, layer: kvpress.ExpectedAttentionPress(r),
    "observed_attention": lambda r, layer: kvpress.ObservedAttentionPress(r),
    "pyramidkv": lambda r, layer: kvpress.PyramidKVPress(r, window_size=16, beta=20),
    "chunkkv": lambda r, layer: kvpress.ChunkKVPress(kvpress.SnapKVPress(r, window_size=16), chunk_length=20),
}
PARAMETERS = {
    "frc": {"window": 16},
    "random": {"seed": 7},
    "snapkv": {"window_size": 16},
    "pyramidkv": {"window_size": 16},
    "chunkkv": {"window_size": 16},
    "lagkv": {"lag_size": 32},
}
"""The matrix that every test here walks: each registered policy with windows that short contexts exceed."""


def spec(name: str) -> dict:
    return {"name": name, **PARAMETERS.get(name, {})}


def ids(n: int, seed: int = 0) -> torch.Tensor:
    """No token twice: in the first layer equal tokens have keys of equal length, and K-norm would rank by rounding."""
    return 10 + torch.randperm(470, generator=torch.Generator().manual_seed(seed))[None, :n]


def kernel_of(name: str) -> str:
    return "eager" if "attentions" in make_policy(spec(name)).needs else "sdpa"


def captured(lm, tokens) -> Prefill:
    eager = lm.attn_implementation == "eager"
    return prefill(lm, tokens, capture={"hidden_states", "attentions"} if eager else {"hidden_states"})


@torch.no_grad()
def kvpress_kept(lm, tokens, press_of) -> list[torch.Tensor]:
    """Positions that kvpress's own run keeps, a layer an entry: each kept key is found among the full cache's."""
    full, kept = DynamicCache(), []
    lm.model.model(input_ids=tokens, past_key_values=full)
    for index, layer in enumerate(full.layers):
        cache = DynamicCache()
        with press_of(index)(lm.model):
            lm.model.model(input_ids=tokens, past_key_values=cache)
        same = (cache.layers[index].keys[0][:, :, None] == layer.keys[0][:, None]).all(-1)  # [kv_heads, kept, n]
        assert bool((same.sum(-1) == 1).all()), "a kept key must be one of the full cache's, once"
        kept.append(same.int().argmax(-1).sort(-1).values)
    return kept


# --- kept indices equal kvpress's own --------------------------------------------------------------------------------


def test_the_matrix_covers_every_registered_baseline():
    assert set(PRESSES) | {"frc"} == set(policy_names())


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("name", sorted(set(PRESSES) - {"pyramidkv", "chunkkv", "lagkv"}))
def test_kept_indices_equal_a_direct_kvpress_run(name, arch):
    lm = tiny_lm(arch, kernel_of(name))
    spread_key_norms(lm)
    policy, full = make_policy(spec(name)), captured(lm, ids(N))
    for ratio, kept in keep(policy, full, RATIOS).items():
        assert compute_n_kept(N, ratio) == kept_count(N, ratio)
        theirs = kvpress_kept(lm, ids(N), lambda index, r=ratio: PRESSES[name](r, index))
        for ours, reference in zip(kept, theirs, strict=True):
            assert ours.tolist() == reference.tolist()


def spread_key_norms(lm) -> None:
    """Random Qwen3 weights leave K-norm at ones, so all keys have one length and K-norm's ranking would be rounding."""
    for block in lm.model.model.layers:
        if hasattr(block.self_attn, "k_norm"):
            block.self_attn.k_norm.weight.copy_(torch.linspace(0.2, 3.0, 16))


def test_lagkv_equals_kvpress_up_to_its_ties(tiny_llama):
    """LagKV scores by rank within a partition, so partitions tie; we keep the earlier, topk whichever it likes."""
    policy, full = make_policy(spec("lagkv")), prefill(tiny_llama, ids(N))
    for ratio, kept in keep(policy, full, RATIOS).items():
        theirs = kvpress_kept(tiny_llama, ids(N), lambda index, r=ratio: PRESSES["lagkv"](r, index))
        for layer, ours, reference in zip(full.layers, kept, theirs, strict=True):
            for scores, a, b in zip(policy.score(layer, ratio), ours.tolist(), reference.tolist(), strict=True):
                assert sorted(scores[a].tolist()) == sorted(scores[b].tolist())
                assert len(set(scores[sorted(set(a) ^ set(b))].tolist())) <= 1  # only the score at the cut may swap
    assert len(set(policy.score(full.layers[0], 0.5)[0].tolist())) > 10  # the context was long enough to rank


@pytest.mark.parametrize("ratio", [0.2, 0.6])
def test_chunkkv_equals_kvpress_at_whole_chunks(tiny_llama, ratio):
    """15 chunks of 20: 12 or 6 of them."""
    kept = keep(make_policy(spec("chunkkv")), prefill(tiny_llama, ids(N)), [ratio])[ratio]
    theirs = kvpress_kept(tiny_llama, ids(N), lambda index: PRESSES["chunkkv"](ratio, index))
    assert [layer.tolist() for layer in kept] == [layer.tolist() for layer in theirs]


def test_chunkkv_differs_from_kvpress_where_kvpress_misses_the_budget(tiny_llama):
    """15 chunks at r = 0.75: kvpress keeps int(3.75) = 3 chunks, 60 pairs; the budget is 75: a fourth chunk, cut."""
    kept = keep(make_policy(spec("chunkkv")), prefill(tiny_llama, ids(N)), [0.75])[0.75]
    theirs = kvpress_kept(tiny_llama, ids(N), lambda index: PRESSES["chunkkv"](0.75, index))
    for ours, reference in zip(kept, theirs, strict=True):
        assert (ours.shape[1], reference.shape[1]) == (75, 60)
        for a, b in zip(ours.tolist(), reference.tolist(), strict=True):
            assert set(b) < set(a) and len({i // 20 for i in set(a) - set(b)}) == 1


def test_pyramidkv_equals_kvpress_where_its_layer_budgets_meet_the_total(tiny_llama):
    policy, full = make_policy(spec("pyramidkv")), prefill(tiny_llama, ids(N))
    kept = keep(policy, full, [0.5])[0.5]
    theirs = kvpress_kept(tiny_llama, ids(N), lambda index: PRESSES["pyramidkv"](0.5, index))
    assert [layer.shape[1] for layer in kept] == [284, 16]  # a pyramid, with 2 x 150 in all
    assert [layer.tolist() for layer in kept] == [layer.tolist() for layer in theirs]


# --- budgets ---------------------------------------------------------------------------------------------------------


def test_a_hundred_tokens_at_nine_tenths_keep_ten():
    """floor(100 * (1 - 0.9)) is 9 in floating point, which is what kvpress keeps; here every policy keeps 10."""
    assert compute_n_kept(100, 0.9) == 9 and kept_count(100, 0.9) == 10
    full = captured(tiny_lm("llama", "eager"), ids(100))
    for name in policy_names():
        settings = {"lag_size": 32} if name == "lagkv" else {}  # the rest as registered, with the default window of 64
        kept = keep(make_policy({"name": name, **settings}), full, [0.9])[0.9]
        assert [tuple(layer.shape) for layer in kept] == [(2, 10)] * 2, name


def test_streaming_llm_keeps_the_recent_tokens_of_our_budget(tiny_llama):
    """The pair that we keep and kvpress does not (10 of 100, not 9) is one more recent token, not one more sink."""
    kept = keep(make_policy("streaming_llm"), prefill(tiny_llama, ids(100)), [0.9, 0.0, 0.97])
    assert kept[0.9][0].tolist() == [[0, 1, 2, 3, 94, 95, 96, 97, 98, 99]] * 2
    assert kept[0.0][1].tolist() == [list(range(100))] * 2
    assert kept[0.97][0].tolist() == [[0, 1, 2]] * 2  # fewer than the sinks: the first of them


def test_two_tokens_at_six_tenths_keep_one(tiny_llama):
    full = prefill(tiny_llama, ids(2))
    assert math.floor(2 * (1 - 0.6)) == 0
    judged = [name for name in policy_names() if make_policy(name).min_tokens <= 2 and kernel_of(name) == "sdpa"]
    assert {"random", "knorm", "tova", "keydiff"} == set(judged)
    for name in judged:
        kept = keep(make_policy(name), full, [0.6])[0.6]
        assert [tuple(layer.shape) for layer in kept] == [(2, 1)] * 2, name
        with pytest.raises(InputError, match="outside"):
            keep(make_policy(name), full, [1.0])


EAGER = tiny_lm("llama", "eager")
TINY_WINDOWS = {
    "frc": {"window": 3, "pool": 3, "chunk_length": 4, "n_sink": 1, "n_recent": 1},
    "snapkv": {"window_size": 3, "kernel_size": 3},
    "pyramidkv": {"window_size": 3, "kernel_size": 3, "beta": 5},
    "chunkkv": {"window_size": 3, "kernel_size": 3, "chunk_length": 4},
    "lagkv": {"lag_size": 6, "n_sink": 2},
    "streaming_llm": {"n_sink": 2},
    "expected_attention": {"n_sink": 2, "n_future_positions": 8},
}


@settings(max_examples=25, deadline=None)
@given(n=st.integers(14, 70), ratios=st.lists(st.floats(0, 0.999), min_size=1, max_size=3, unique=True))
def test_every_policy_keeps_the_same_number_of_pairs(n, ratios):
    full = captured(EAGER, ids(n))
    for name in policy_names():
        policy = make_policy({"name": name, **TINY_WINDOWS.get(name, {})})
        for ratio, kept in keep(policy, full, ratios).items():
            budget = max(1, math.floor(n * (1 - ratio) + 1e-9))
            counts = [layer.shape[1] for layer in kept]
            assert sum(counts) == 2 * budget, name
            assert name == "pyramidkv" or counts == [budget] * 2, name
            for layer in kept:
                assert layer.dtype == torch.int64 and layer.shape[0] == 2
                assert int(layer.min()) >= 0 and int(layer.max()) < n and bool((layer.diff(dim=-1) > 0).all())


def of_layers(full: Prefill, n_layers: int, **config) -> Prefill:
    """The first layer ``n_layers`` times over, as a model of that depth would show them to PyramidKV."""
    layers = []
    for index in range(n_layers):
        module = copy.copy(full.layers[0].module)
        module.layer_idx, module.config = index, copy.copy(module.config)
        module.config.num_hidden_layers = n_layers
        layers.append(replace(full.layers[0], index=index, module=module))
    return replace(full, layers=tuple(layers))


@pytest.mark.parametrize("n_layers", [1, 2, 32])
@pytest.mark.parametrize("n", [65, 66, 100, 150, 300])
@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 0.75, 0.88, 0.96])
def test_pyramid_layer_budgets_sum_to_the_common_total(tiny_llama, n, ratio, n_layers):
    full = of_layers(prefill(tiny_llama, ids(n)), n_layers)
    for window in (64, 16, 4):
        policy = make_policy({"name": "pyramidkv", "window_size": window})
        budgets = policy.layer_budgets(full, ratio)
        assert sum(budgets) == n_layers * kept_count(n, ratio)
        assert all(1 <= b <= n for b in budgets)
        wished = [kvpress.PyramidKVPress(ratio, window).get_layer_budget(layer.module, n) for layer in full.layers]
        if n_layers > 1:  # of one layer kvpress makes the pyramid's base, up to twice the budget
            assert max(abs(a - b) for a, b in zip(budgets, wished, strict=True)) <= 1  # its own, rounding apart


def test_a_pyramid_of_ten_tokens_and_32_layers_empties_no_layer(tiny_llama):
    full = of_layers(prefill(tiny_llama, ids(10)), 32)
    assert [kvpress.PyramidKVPress(0.96).get_layer_budget(layer.module, 10) for layer in full.layers] == [1] * 32
    assert make_policy("pyramidkv").layer_budgets(full, 0.96) == [1] * 32
    assert spread([0] * 32, total=32, high=10) == [1] * 32
    assert spread([10, 0, 0, 0], total=4, high=10) == [1] * 4
    with pytest.raises(InputError, match="at least 65"):  # judged by its own window, ten tokens are too few
        keep(make_policy("pyramidkv"), full, [0.96])


def test_one_layer_makes_a_pyramid_of_one():
    full = prefill(tiny_lm("llama", num_hidden_layers=1), ids(N))
    for ratio in RATIOS:
        kept = keep(make_policy(spec("pyramidkv")), full, [ratio])[ratio]
        assert [layer.shape[1] for layer in kept] == [kept_count(N, ratio)]


def test_pyramid_gives_low_layers_more(tiny_llama):
    full = of_layers(prefill(tiny_llama, ids(N)), 8)
    budgets = make_policy({"name": "pyramidkv", "window_size": 4}).layer_budgets(full, 0.5)
    assert budgets == sorted(budgets, reverse=True) and budgets[0] > 150 > budgets[-1]


# --- FRC -------------------------------------------------------------------------------------------------------------


def test_frc_score_by_hand():
    """Attention received of two heads, pooling over 3, scale by the layer's maximum: the weighted sum."""
    received = torch.tensor([[0.0, 0.4, 0.2], [0.1, 0.0, 0.8]])
    policy = FRC(pool=3, scale="max", w_attention=1.0, w_density=2.0, w_salience=4.0)
    signals = policy.signals(received)
    attention = torch.tensor([[0.0, 0.5, 0.25], [0.125, 0.0, 1.0]])
    density = torch.tensor([[0.2, 0.2, 0.3], [0.05, 0.3, 0.4]]) / 0.4
    salience = torch.tensor([[0.125, 0.5, 1.0], [0.125, 0.5, 1.0]])
    for name, truth in (("attention", attention), ("density", density), ("salience", salience)):
        torch.testing.assert_close(signals[name], truth)
    torch.testing.assert_close(policy.score_of(received), attention + 2 * density + 4 * salience)


def test_frc_score_is_linear_in_its_weights(tiny_llama):
    layer = prefill(tiny_llama, ids(60)).layers[1]
    for reading in ("window", "local"):
        base = FRC(reading=reading, window=8)
        parts = [
            replace(base, **{**dict.fromkeys(("w_attention", "w_density", "w_salience"), 0.0), weight: 1.0})
            for weight in ("w_attention", "w_density", "w_salience")
        ]
        mixed = replace(base, w_attention=0.3, w_density=2.0, w_salience=0.7)
        truth = sum(w * part.score(layer, 0.5) for w, part in zip((0.3, 2.0, 0.7), parts, strict=True))
        torch.testing.assert_close(mixed.score(layer, 0.5), truth)
        assert not torch.allclose(parts[0].score(layer, 0.5), parts[2].score(layer, 0.5))


def test_frc_keeps_sinks_and_recent_tokens_and_whole_chunks(tiny_llama):
    full = prefill(tiny_llama, ids(200))
    policy = FRC(window=16, chunk_length=8, n_sink=5, n_recent=3)
    for ratio, kept in keep(policy, full, [0.5, 0.88]).items():
        for layer in kept:
            for head in layer.tolist():
                assert head[:5] == [0, 1, 2, 3, 4] and head[-3:] == [197, 198, 199]
                free = [i for i in head if 5 <= i < 197]
                cut = [c for c in {i // 8 for i in free} if sum(i // 8 == c for i in free) < members(c)]
                assert len(cut) <= 1, f"r={ratio}: more than one chunk is kept in part"


def members(chunk: int) -> int:
    """Tokens of a chunk of 8 that are neither of the 5 sinks nor of the 3 recent tokens of 200."""
    return sum(5 <= i < 197 for i in range(chunk * 8, chunk * 8 + 8))


def test_frc_is_deterministic_and_its_readings_differ(tiny_llama):
    full = prefill(tiny_llama, ids(200))
    for reading in ("window", "local"):
        first, second = (keep(FRC(reading=reading, window=16), full, [0.75])[0.75] for _ in range(2))
        assert all(map(torch.equal, first, second))
    window, local = (keep(FRC(reading=r, window=16), full, [0.75])[0.75] for r in ("window", "local"))
    assert not all(map(torch.equal, window, local))
    with pytest.raises(InputError, match="'far'"):
        FRC(reading="far")


# --- kernels, settings, determinism ----------------------------------------------------------------------------------


def test_eager_and_sdpa_keep_the_same_indices():
    eager, sdpa = (prefill(tiny_lm("llama", kernel), ids(N)) for kernel in ("eager", "sdpa"))
    for name in policy_names():
        if kernel_of(name) == "sdpa":
            a, b = (keep(make_policy(spec(name)), full, RATIOS) for full in (eager, sdpa))
            for ratio in RATIOS:
                assert all(map(torch.equal, a[ratio], b[ratio])), name


def test_observed_attention_is_the_brute_force_causal_sum():
    """n = 12: mean over the queries that see a key of the causal softmax, to 1e-5; key 11 is seen by query 11 only."""
    layer = captured(tiny_lm("llama", "eager"), ids(12)).layers[1]
    scores = make_policy("observed_attention").score(layer, 0.5)
    queries, keys = layer.queries(), layer.keys
    received = torch.zeros(4, 12)
    for head in range(4):
        for i in range(12):
            weights = (queries[head, i] @ keys[head // 2, : i + 1].T / 4.0).softmax(-1)
            received[head, : i + 1] += weights
            last = weights[-1]
        assert received[head, 11] == last
    truth = (received / torch.arange(12, 0, -1)).view(2, 2, 12).mean(1)
    torch.testing.assert_close(scores, truth, atol=1e-5, rtol=1e-5)


def test_observed_attention_without_weights_is_refused_with_the_remedy(tiny_llama):
    policy = make_policy("observed_attention")
    with pytest.raises(InputError, match=r"attn_implementation='eager'"):
        prefill(tiny_llama, ids(20), capture=policy.needs)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_hidden_question_changes_no_kept_index(arch):
    lm = tiny_lm(arch)
    spread_key_norms(lm)
    context = "The grass is green. One of the special magic numbers for quiet-river is: 7341908. " * 6
    questions = ("What is the number? ", "Who counted the lamps along the northern road? ")
    names = [name for name in policy_names() if kernel_of(name) == "sdpa"]

    def kept_of(question: str, query_aware: bool) -> dict[str, tuple]:
        full = prefill(lm, encode_prompt(lm, context, question, "It is", query_aware=query_aware).context_ids)
        return {name: keep(make_policy(spec(name)), full, [0.75])[0.75] for name in names}

    hidden = [kept_of(question, query_aware=False) for question in questions]
    shown = [kept_of(question, query_aware=True) for question in questions]
    for name in names:
        assert all(map(torch.equal, hidden[0][name], hidden[1][name])), name
        assert [a.tolist() for a in shown[0][name]] != [a.tolist() for a in shown[1][name]], name


def test_random_follows_its_seed_and_differs_from_layer_to_layer(tiny_llama):
    full = prefill(tiny_llama, ids(100))
    one, again, other = (keep(make_policy({"name": "random", "seed": s}), full, [0.5])[0.5] for s in (1, 1, 9))
    assert all(map(torch.equal, one, again))
    assert not torch.equal(one[0], other[0]) and not torch.equal(one[0], one[1])


# --- many policies at once, and ours inside kvpress ------------------------------------------------------------------


def test_scoring_together_equals_scoring_alone_and_shares_the_work(tiny_llama, monkeypatch):
    made = [make_policy(spec(name)) for name in policy_names() if kernel_of(name) == "sdpa"]
    alone = [keep(policy, prefill(tiny_llama, ids(N)), RATIOS) for policy in made]
    full, windows = prefill(tiny_llama, ids(N)), []
    compute = features._attention_rows
    monkeypatch.setattr(
        features, "_attention_rows", lambda layer, w: windows.append((layer.index, w)) or compute(layer, w)
    )
    together = keep_all(made, full, RATIOS)
    for policy, one, other in zip(made, alone, together, strict=True):
        for ratio in RATIOS:
            assert all(map(torch.equal, one[ratio], other[ratio])), policy.name
    assert sorted(windows) == [(0, 1), (0, 16), (1, 1), (1, 16)]  # four policies look through the window of 16
    assert all(layer.memo == {} for layer in full.layers)  # and nothing of it outlives its layer


@pytest.mark.parametrize("name", sorted(set(policy_names()) - {"pyramidkv"}))
def test_our_policies_run_inside_kvpress(name):
    lm = tiny_lm("llama", kernel_of(name))
    kept = keep(make_policy(spec(name)), captured(lm, ids(N)), [0.75])[0.75]
    theirs = kvpress_kept(lm, ids(N), lambda index: PolicyPress(spec(name), 0.75))
    assert [layer.tolist() for layer in kept] == [layer.tolist() for layer in theirs]


def test_a_pyramid_is_no_press_of_ours():
    with pytest.raises(InputError, match="pyramidkv gives layers budgets of their own"):
        PolicyPress("pyramidkv", 0.5)


# --- any kvpress press -----------------------------------------------------------------------------------------------

KNORM = kvpress.KnormPress(0.5)
REFUSED = {
    "AdaKVPress": (lambda: kvpress.AdaKVPress(KNORM), "budgets of their own"),
    "CriticalAdaKVPress": (lambda: kvpress.CriticalAdaKVPress(KNORM), "budgets of their own"),
    "CriticalKVPress": (lambda: kvpress.CriticalKVPress(KNORM), "press that it wraps"),
    "KVzipPress": (lambda: kvpress.KVzipPress(), "further passes"),
    "DuoAttentionPress": (lambda: kvpress.DuoAttentionPress(), "trained head patterns"),
    "ThinKPress": (lambda: kvpress.ThinKPress(), "channels"),
    "QFilterPress": (lambda: kvpress.QFilterPress(), "trained filters"),
    "FinchPress": (lambda: kvpress.FinchPress(), "re-rotates"),
    "SimLayerKVPress": (lambda: kvpress.SimLayerKVPress(), "not the common one"),
    "KeyRerotationPress": (lambda: kvpress.KeyRerotationPress(KNORM), "re-rotates"),
    "ChunkPress": (lambda: kvpress.ChunkPress(KNORM), "plain top-k"),
    "ComposedPress": (lambda: kvpress.ComposedPress([KNORM]), "plain top-k"),
    "EntropyGatedChunkKVPress": (lambda: kvpress.EntropyGatedChunkKVPress(kvpress.SnapKVPress()), "plain top-k"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_press_that_one_prefill_cannot_serve_is_refused_with_the_reason(name):
    make, reason = REFUSED[name]
    with pytest.raises(InputError, match=reason) as error:
        from_press(make())
    assert str(error.value).startswith(name) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "press",
    [
        kvpress.CURPress(),
        kvpress.NonCausalAttnPress(chunk_size=64),
        kvpress.LeverageScorePress(sketch_dimension=8),
        kvpress.CompactorPress(sketch_dimension=8, chunk_size=64),
        kvpress.CapPress(),
        kvpress.SnapKVPress(window_size=32),
        kvpress.KeyDiffPress(),
    ],
    ids=lambda press: type(press).__name__,
)
def test_any_plain_scorer_press_is_a_policy(tiny_llama, press):
    policy, full = from_press(press, "mine"), prefill(tiny_llama, ids(N))
    assert policy.name == "mine" and policy.params()["press"] == type(press).__name__
    assert "compression_ratio" not in policy.params()
    first = keep(policy, full, RATIOS)
    torch.rand(1)  # others draw from the global generator in between
    second = keep(policy, full, RATIOS)
    for ratio in RATIOS:
        assert [tuple(layer.shape) for layer in first[ratio]] == [(2, kept_count(N, ratio))] * 2
        assert all(map(torch.equal, first[ratio], second[ratio])), "a sketch must be drawn the same every time"
    assert press.compression_ratio == 0.0  # the caller's object is left alone


def test_a_wrapped_press_keeps_what_kvpress_keeps(tiny_llama):
    full = prefill(tiny_llama, ids(N))
    for press in (kvpress.CURPress, kvpress.CapPress):
        kept = keep(from_press(press()), full, [0.75])[0.75]
        theirs = kvpress_kept(tiny_llama, ids(N), lambda index, p=press: p(compression_ratio=0.75))
        assert [layer.tolist() for layer in kept] == [layer.tolist() for layer in theirs]


def test_presses_that_we_have_adapters_for_become_those(tiny_llama):
    pyramid = from_press(kvpress.PyramidKVPress(0.5, window_size=8, kernel_size=3, beta=9))
    assert pyramid == make_policy({"name": "pyramidkv", "window_size": 8, "kernel_size": 3, "beta": 9})
    chunks = from_press(kvpress.ChunkKVPress(kvpress.SnapKVPress(window_size=8), chunk_length=5))
    assert chunks == make_policy({"name": "chunkkv", "window_size": 8, "chunk_length": 5})
    observed = from_press(kvpress.ObservedAttentionPress())
    assert observed.needs == {"attentions"}


def test_a_wrapped_window_refuses_short_contexts_too(tiny_llama):
    with pytest.raises(InputError, match="at least 65"):
        keep(from_press(kvpress.SnapKVPress()), prefill(tiny_llama, ids(64)), [0.5])


# --- names, parameters, users' own policies --------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch):
    """A registry of its own: what a test registers is gone after it."""
    monkeypatch.setattr("cachecraft_lab.policies.base._REGISTRY", dict(_REGISTRY))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("snapvk", "did you mean 'snapkv'"),
        ("expected_atention", "did you mean 'expected_attention'"),
        ("zzz", "known are frc, random"),
        ({"window": 3}, "policy None is unknown"),
        ({"name": "snapkv", "window": 32}, "policy 'snapkv': .*'window'"),
        ({"name": "knorm", "seed": 1}, "policy 'knorm': .*'seed'"),
    ],
)
def test_unknown_names_and_parameters_are_refused(wrong, message):
    with pytest.raises(InputError, match=message) as error:
        make_policy(wrong)
    assert "\n" not in str(error.value)


def test_policies_are_made_fresh_and_immutable():
    settings = {"name": "snapkv", "window_size": 8}
    policy = make_policy(settings)
    assert settings == {"name": "snapkv", "window_size": 8}  # the caller's dict is not eaten
    assert policy.params() == {"window_size": 8, "kernel_size": 5}
    with pytest.raises(AttributeError):
        policy.window_size = 64
    assert make_policy(policy) is policy


def test_a_policy_of_ones_own_in_ten_lines(registry, tiny_llama):
    @register_policy("value_norm")
    def value_norm(layer):
        return layer.values.norm(dim=-1)

    full = prefill(tiny_llama, ids(40))
    kept = keep(make_policy("value_norm"), full, [0.5])[0.5]
    for layer, indices in zip(full.layers, kept, strict=True):
        assert indices.tolist() == layer.values.norm(dim=-1).topk(20).indices.sort(-1).values.tolist()
    assert "norm(dim=-1)" in make_policy("value_norm").params()["source"]  # the code is the policy's identity


def test_a_policy_class_brings_its_parameters_and_may_be_registered_again(registry, tiny_llama):
    from dataclasses import dataclass

    def make(sign: int):
        @register_policy("ends")
        @dataclass(frozen=True)
        class Ends(Policy):
            first: int = 1
            name = "ends"

            def score(self, layer, ratio):
                position = torch.arange(layer.n_tokens, dtype=torch.float32).expand(layer.n_kv_heads, -1)
                return torch.where(position < self.first, 1e9, sign * position)

    full = prefill(tiny_llama, ids(10))
    make(+1)
    assert keep(make_policy({"name": "ends", "first": 2}), full, [0.6])[0.6][0].tolist() == [[0, 1, 8, 9]] * 2
    make(-1)  # as a notebook cell that is run again
    assert keep(make_policy({"name": "ends", "first": 2}), full, [0.6])[0.6][0].tolist() == [[0, 1, 2, 3]] * 2


def with_nan(layer):
    scores = layer.keys.norm(dim=-1)
    scores[1, 3] = float("nan")
    return scores


@pytest.mark.parametrize(
    ("function", "expected", "got"),
    [
        (lambda layer: layer.keys.norm(dim=-1)[:, :-1], r"\[2, 40\]", r"\[2, 39\]"),
        (lambda layer: layer.keys.norm(dim=-1).repeat(2, 1), r"\[2, 40\]", r"\[4, 40\]"),
        (lambda layer: layer.keys.norm(dim=-1)[0], r"\[2, 40\]", r"\[40\]"),
        (with_nan, "without NaN", "1 NaN of 80"),
        (lambda layer: torch.ones(2, 40, dtype=torch.int64), "floating dtype", "torch.int64"),
        (lambda layer: [[0.0] * 40] * 2, "floating dtype", "list"),
        (lambda layer: None, "floating dtype", "NoneType"),
    ],
    ids=["short", "query-heads", "flat", "nan", "int", "list", "none"],
)
def test_a_broken_score_is_one_clear_error(registry, tiny_llama, function, expected, got):
    register_policy("mine")(function)
    with pytest.raises(InputError, match=f"policy mine, layer 0: expected .*{expected}.*got {got}") as error:
        keep(make_policy("mine"), prefill(tiny_llama, ids(40)), [0.5])
    assert "\n" not in str(error.value)


class Broken(Policy):
    """Sound scores, and an output that the test breaks."""

    name = "broken"

    def __init__(self, select=None, budgets=None):
        object.__setattr__(self, "_select", select)
        object.__setattr__(self, "_budgets", budgets)

    def score(self, layer, ratio):
        return layer.keys.norm(dim=-1)

    def select(self, scores, budget):
        return self._select(scores, budget) if self._select else super().select(scores, budget)

    def layer_budgets(self, prefill, ratio):
        return self._budgets or super().layer_budgets(prefill, ratio)


@pytest.mark.parametrize(
    ("select", "got"),
    [
        (lambda s, b: torch.arange(b + 1).expand(2, -1), r"got torch.int64 \[2, 21\]"),  # one pair over budget
        (lambda s, b: torch.arange(b).expand(4, -1), r"got torch.int64 \[4, 20\]"),
        (lambda s, b: torch.arange(b).flip(0).expand(2, -1), "unsorted or repeated"),
        (lambda s, b: torch.zeros(2, b, dtype=torch.int64), "unsorted or repeated"),
        (lambda s, b: torch.arange(b).expand(2, -1) - 1, r"values -1\.\.18"),
        (lambda s, b: torch.arange(b).expand(2, -1) + 25, r"values 25\.\.44"),
        (lambda s, b: torch.arange(b).expand(2, -1).float(), "got torch.float32"),
        (lambda s, b: [[0] * b] * 2, "got list"),
    ],
    ids=["over-budget", "query-heads", "unsorted", "repeated", "negative", "out-of-range", "float", "list"],
)
def test_broken_indices_are_one_clear_error(tiny_llama, select, got):
    with pytest.raises(InputError, match=got) as error:
        keep(Broken(select), prefill(tiny_llama, ids(40)), [0.5])
    message = str(error.value)
    assert message.startswith("policy broken, layer 0, r=0.5: ") and "\n" not in message and "[2, 20]" in message


@pytest.mark.parametrize("budgets", [[20, 21], [40], [41, -1], [0, 40]])
def test_a_budget_of_its_own_is_refused(tiny_llama, budgets):
    with pytest.raises(InputError, match=r"policy broken at r=0.5: expected 2 layer budgets .* sum 40"):
        keep(Broken(budgets=budgets), prefill(tiny_llama, ids(40)), [0.5])


# --- the installed kvpress -------------------------------------------------------------------------------------------


def test_the_canary_passes_with_what_is_installed():
    state = torch.get_rng_state()
    check_kvpress()
    assert torch.equal(torch.get_rng_state(), state)


def no_effect(self, module, input, kwargs, output):
    return output


def changed_cache(self, module, input, kwargs, output):
    raise AttributeError("'DynamicCache' object has no attribute 'key_cache'")


@pytest.mark.parametrize(
    ("hook", "symptom"), [(no_effect, r"kept \[64, 64\] of 64"), (changed_cache, "raised AttributeError.*key_cache")]
)
def test_the_canary_names_both_versions_when_kvpress_misbehaves(monkeypatch, hook, symptom):
    from importlib.metadata import version

    monkeypatch.setattr(kvpress.BasePress, "forward_hook", hook)
    with pytest.raises(InputError, match=symptom) as error:
        check_kvpress()
    message = str(error.value)
    assert f"kvpress {version('kvpress')}" in message and f"transformers {version('transformers')}" in message
    assert "\n" not in message


def test_chunks_are_ranked_in_float32_whatever_the_scores_are():
    """bfloat16 sums tie many chunks; the order must be that of the same scores in float32."""
    scores = torch.rand(2, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(chunk_topk(scores, 491, 20), chunk_topk(scores.float(), 491, 20))


def test_lagkv_refuses_a_context_in_which_it_would_score_by_position(tiny_llama):
    with pytest.raises(InputError, match="at least 260 tokens"):
        keep(make_policy("lagkv"), prefill(tiny_llama, ids(200)), [0.5])
    with pytest.raises(InputError, match="at least 260 tokens"):
        keep(from_press(kvpress.LagKVPress()), prefill(tiny_llama, ids(200)), [0.5])
