"""One forward pass leaves what a plain transformers forward computes, and nobody changes it afterwards."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_lm
from transformers import DynamicCache

from cachecraft_lab.errors import InputError
from cachecraft_lab.features import attention_rows
from cachecraft_lab.policies import keep, make_policy, policy_names, register_policy
from cachecraft_lab.policies.base import _REGISTRY
from cachecraft_lab.prefill import prefill
from cachecraft_lab.select import kept_count

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral")
SMALL = {
    "frc": {"window": 16},
    "snapkv": {"window_size": 16},
    "pyramidkv": {"window_size": 16},
    "chunkkv": {"window_size": 16},
    "lagkv": {"lag_size": 16},
}
"""Every policy with windows that a context of some hundred tokens exceeds."""


def ids(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(10, 480, (1, n), generator=torch.Generator().manual_seed(seed))


def policies(*, eager: bool):
    for name in policy_names():
        policy = make_policy({"name": name, **SMALL.get(name, {})})
        if eager or "attentions" not in policy.needs:
            yield policy


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_cache_equals_a_plain_forward(arch):
    lm = tiny_lm(arch)
    full = prefill(lm, ids(70))
    cache = DynamicCache()
    with torch.no_grad():
        lm.model(ids(70), past_key_values=cache)
    assert len(full.layers) == 2 and full.n_tokens == 70 and full.forward_passes == 1
    for layer, theirs in zip(full.layers, cache.layers, strict=True):
        assert torch.equal(layer.keys, theirs.keys[0]) and torch.equal(layer.values, theirs.values[0])
        assert tuple(layer.keys.shape) == (2, 70, 16)  # 2 KV heads: never repeated to the 4 query heads
        assert (layer.n_kv_heads, layer.group_size) == (2, 2)
    assert full.nbytes == sum(t.numel() * 4 for layer in cache.layers for t in (layer.keys, layer.values))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_queries_are_those_that_the_model_attends_with(arch):
    """softmax(q.k) of the captured queries and keys is the attention that the eager model reports."""
    lm = tiny_lm(arch, "eager")
    if arch == "qwen3":  # a weight of ones would hide one left out
        for i, block in enumerate(lm.model.model.layers):
            block.self_attn.q_norm.weight.copy_(torch.linspace(0.5, 1.5 + i, 16))
    full = prefill(lm, ids(40))
    with torch.no_grad():
        attentions = lm.model(ids(40), output_attentions=True).attentions
    future = torch.ones(40, 40, dtype=torch.bool).triu(1)
    for layer, theirs in zip(full.layers, attentions, strict=True):
        keys = layer.keys.repeat_interleave(layer.group_size, dim=0)
        weights = (layer.queries() @ keys.transpose(1, 2) / 16**0.5).masked_fill(future, float("-inf")).softmax(-1)
        torch.testing.assert_close(weights, theirs[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(layer.queries(start=33), layer.queries()[:, 33:])


def test_capture_takes_what_is_asked_for(tiny_llama):
    bare = prefill(tiny_llama, ids(20), capture=frozenset()).layers[1]
    assert bare.hidden_states is None and bare.attentions is None
    with pytest.raises(InputError, match="capture="):
        bare.queries()
    hidden = prefill(tiny_llama, ids(20)).layers[1]
    assert tuple(hidden.hidden_states.shape) == (20, 64) and hidden.attentions is None
    eager = tiny_lm("llama", "eager")
    both = prefill(eager, ids(20), capture={"hidden_states", "attentions"}).layers[1]
    assert both.hidden_states is not None and tuple(both.attentions.shape) == (4, 20, 20)
    torch.testing.assert_close(both.attentions.sum(-1), torch.ones(4, 20))
    with pytest.raises(InputError, match="hidden_state'"):
        prefill(tiny_llama, ids(20), capture={"hidden_state"})


def test_attention_weights_of_another_kernel_are_refused(tiny_llama):
    """No silent fallback: the message names the kernel that runs and the remedy."""
    with pytest.raises(InputError, match=r"sdpa.*attn_implementation='eager'"):
        prefill(tiny_llama, ids(20), capture={"attentions"})


@pytest.mark.parametrize("chunk_size", [100, 64, 299, 1])
def test_prefill_in_chunks_equals_one_shot(tiny_llama, chunk_size):
    """300 tokens in chunks, cap 64: 64 pairs a head and layer in all, at the positions that one-shot prefill keeps."""
    n = 300 if chunk_size > 1 else 40
    ratio = 1 - 64 / 300
    whole, pieces = prefill(tiny_llama, ids(n)), prefill(tiny_llama, ids(n), chunk_size=chunk_size)
    assert pieces.forward_passes == -(-n // chunk_size) and pieces.n_tokens == n
    for a, b in zip(whole.layers, pieces.layers, strict=True):
        for name in ("keys", "values", "cos", "sin", "hidden_states"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), atol=1e-4, rtol=1e-4)
    for policy in policies(eager=False):
        one, other = keep(policy, whole, [ratio])[ratio], keep(policy, pieces, [ratio])[ratio]
        assert [tuple(layer.shape) for layer in one] == [tuple(layer.shape) for layer in other], policy.name
        assert sum(layer.shape[1] for layer in other) == 2 * kept_count(n, ratio)
        assert all(map(torch.equal, one, other)), policy.name
    if n == 300:
        assert kept_count(n, ratio) == 64


def test_chunks_without_meaning_are_refused():
    eager = tiny_lm("llama", "eager")
    for arguments in ({"chunk_size": 0}, {"chunk_size": 5, "capture": {"attentions"}}):
        with pytest.raises(InputError, match="chunk_size"):
            prefill(eager, ids(20), **arguments)


@pytest.mark.parametrize("shape", [(1, 0), (2, 5), (5,)])
def test_other_shapes_are_refused(tiny_llama, shape):
    with pytest.raises(InputError, match=r"\[1, n\]"):
        prefill(tiny_llama, torch.zeros(shape, dtype=torch.int64))


def test_context_over_the_models_limit_is_refused():
    lm = tiny_lm("llama", max_position_embeddings=128)
    lm.model.forward = lm.model.model.forward = None  # any model work would raise a TypeError
    with pytest.raises(InputError, match=r"129 tokens.*128 positions"):
        prefill(lm, ids(129))
    assert prefill(tiny_lm("llama", max_position_embeddings=128), ids(128)).n_tokens == 128


def test_a_config_that_scales_rope_raises_the_limit():
    """The override is the model's own config: it moves the limit, and describe() puts it into every record."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    lm = tiny_lm("llama", max_position_embeddings=256, rope_parameters=rope)
    assert prefill(lm, ids(129)).n_tokens == 129
    assert '"rope_type": "linear"' in lm.describe()["rope"] and '"factor": 2.0' in lm.describe()["rope"]


def test_hooks_are_gone_afterwards_also_after_an_error(tiny_llama):
    def hooks() -> int:
        return sum(len(block.self_attn._forward_hooks) for block in tiny_llama.model.model.layers)

    prefill(tiny_llama, ids(20))
    assert hooks() == 0
    with pytest.raises(IndexError):
        prefill(tiny_llama, torch.tensor([[1, 10**6]]))  # no such token
    assert hooks() == 0


def test_scoring_changes_no_tensor():
    """Every policy at three ratios, over one prefill: the bytes that they share are the same afterwards."""
    full = prefill(tiny_lm("llama", "eager"), ids(90), capture={"hidden_states", "attentions"})
    names = ("keys", "values", "cos", "sin", "hidden_states", "attentions")

    def content() -> list[bytes]:
        return [getattr(layer, name).numpy().tobytes() for layer in full.layers for name in names]

    before = content()
    for policy in policies(eager=True):
        keep(policy, full, [0.0, 0.5, 0.88])
        assert content() == before, policy.name


@pytest.mark.parametrize(
    "shared",
    [
        lambda layer: layer.keys,
        lambda layer: layer.values,
        lambda layer: layer.hidden_states,
        lambda layer: attention_rows(layer, 8),  # worked out once for all policies
    ],
    ids=["keys", "values", "hidden_states", "attention_rows"],
)
def test_a_policy_that_changes_a_shared_tensor_is_stopped(tiny_llama, monkeypatch, shared):
    monkeypatch.setattr("cachecraft_lab.policies.base._REGISTRY", dict(_REGISTRY))

    @register_policy("vandal")
    def vandal(layer):
        shared(layer).mul_(2)
        return layer.keys.norm(dim=-1)

    with pytest.raises(InputError, match=r"vandal, layer 0: .*in place"):
        keep(make_policy("vandal"), prefill(tiny_llama, ids(20)), [0.5])
