"""Our answers are kvpress's own, token for token, and decoding together equals decoding one by one."""

from __future__ import annotations

import pytest
import torch
from reference import cut_at_first_eos, first_difference, kvpress_answer_ids, logit_gap, presses

from cachecraft_lab.compress import full_kept
from cachecraft_lab.decode import DecodeStats, decode, decode_one
from cachecraft_lab.policies import PolicyPress, keep, make_policy
from cachecraft_lab.policies.kvpress import press_score
from cachecraft_lab.prefill import prefill
from cachecraft_lab.prompt import encode_prompt
from cachecraft_lab.ruler import RulerSample, generate

RATIOS = (0.5, 0.88)


def check_against_kvpress(lm, samples, *, query_aware: bool, window: int, n_new: int) -> tuple[int, int]:
    """(sequences compared, greedy ties); anything else that differs fails."""
    compared = ties = 0
    for sample in samples:
        prompt = encode_prompt(lm, sample.context, sample.question, sample.answer_prefix, query_aware=query_aware)
        full = prefill(lm, prompt.context_ids)
        rows, labels = [full_kept(full)], [("full", 0.0)]
        for name in presses(0.5, window):
            policy = make_policy({"name": "snapkv", "window_size": window} if name == "snapkv" else name)
            for ratio, kept in keep(policy, full, RATIOS).items():
                rows.append(as_kvpress_breaks_ties(presses(ratio, window)[name], full, kept))
                labels.append((name, ratio))
        answers = decode(full, prompt.question_ids, rows, n_new)
        for (name, ratio), kept, answer in zip(labels, rows, answers, strict=True):
            press = None if name == "full" else presses(ratio, window)[name]
            theirs = kvpress_answer_ids(lm, sample, press, n_new, query_aware=query_aware)
            theirs, ours = cut_at_first_eos(theirs, lm.eos_ids), list(answer.token_ids)
            compared += 1
            at = first_difference(ours, theirs)
            if at is not None:
                gap = logit_gap(full, kept, prompt.question_ids, ours[:at], ours[at], theirs[at])
                assert gap < 1e-3, f"{name} r={ratio} {sample.id}: token {at} differs by {gap} in logits"
                ties += 1
    return compared, ties


@pytest.mark.parametrize("query_aware", [False, True])
def test_embedded_equals_kvpress(lm, query_aware):
    samples = generate("niah_multikey_1", 640, lm.tokenizer, n_samples=1, seed=11)
    compared, ties = check_against_kvpress(lm, samples, query_aware=query_aware, window=64, n_new=8)
    assert compared == 11 and ties <= 1


@pytest.mark.parametrize("query_aware", [False, True])
@pytest.mark.parametrize("arch", ["tiny_llama", "tiny_qwen3"])
def test_tiny_equals_kvpress(request, arch, query_aware):
    lm = request.getfixturevalue(arch)
    samples = [random_sample(i) for i in range(10)]
    compared, ties = check_against_kvpress(lm, samples, query_aware=query_aware, window=16, n_new=8)
    assert compared == 110 and ties <= 1


def as_kvpress_breaks_ties(press, full, kept):
    """``kept``, or kvpress's own pick where scores tie exactly at the budget's edge.

    Equal scores are common in layer 0, where a token's key norm depends on the token alone. We keep the earlier
    position, ``topk`` leaves the choice open; all that differs must be such ties.
    """
    theirs = []
    for layer, ours in zip(full.layers, kept, strict=True):
        scores = press_score(press, layer)
        pick = scores.topk(ours.shape[1], dim=-1).indices.sort(-1).values
        assert torch.equal(scores.gather(1, pick).sort(-1).values, scores.gather(1, ours).sort(-1).values)
        theirs.append(pick)
    return tuple(theirs)


def random_sample(seed: int) -> RulerSample:
    """Words without meaning: a random model has no use for it, and every layer sees varied tokens."""
    generator = torch.Generator().manual_seed(seed)
    letters = torch.randint(97, 123, (700,), generator=generator).tolist()
    text = "".join(" " if i % 6 == 5 else chr(c) for i, c in enumerate(letters))
    return RulerSample("niah_single_1", text + "\n", "What was said? ", "It was", ("x",), 16, f"random-{seed}")


@pytest.mark.parametrize("name", ["frc", "keydiff", "chunkkv"])
def test_our_policies_inside_kvpress(tiny_qwen3, name):
    """A policy as a press in kvpress's own pipeline answers as it does here."""
    for seed in range(3):
        sample = random_sample(seed)
        prompt = encode_prompt(tiny_qwen3, sample.context, sample.question, sample.answer_prefix)
        full = prefill(tiny_qwen3, prompt.context_ids)
        for ratio, kept in keep(make_policy(name), full, RATIOS).items():
            ours = list(decode(full, prompt.question_ids, [kept], 8)[0].token_ids)
            theirs = kvpress_answer_ids(tiny_qwen3, sample, PolicyPress(name, ratio), 8, query_aware=False)
            assert ours == cut_at_first_eos(theirs, tiny_qwen3.eos_ids)


@pytest.mark.parametrize("arch", ["tiny_llama", "tiny_qwen3", "tiny_qwen2", "tiny_mistral"])
def test_together_equals_one_by_one(request, arch):
    lm = request.getfixturevalue(arch)
    sample = random_sample(99)
    prompt = encode_prompt(lm, sample.context, sample.question, sample.answer_prefix)
    full = prefill(lm, prompt.context_ids)
    rows = [full_kept(full)]
    for name in ("random", "knorm", "streaming_llm", "tova", "keydiff", "lagkv", "expected_attention"):
        rows += keep(make_policy(name), full, [0.25, 0.5, 0.75, 0.88, 0.95]).values()
    together = decode(full, prompt.question_ids, rows, 24)
    for kept, answer in zip(rows, together, strict=True):
        alone = decode_one(full, prompt.question_ids, kept, 24)
        at = first_difference(list(answer.token_ids), list(alone.token_ids))
        assert at is None or min(answer.margins[at], alone.margins[at]) < 1e-3
        if at is None:
            assert answer.finish_reason == alone.finish_reason


def test_blocks_and_repeats_change_no_answer(tiny_llama):
    sample = random_sample(5)
    prompt = encode_prompt(tiny_llama, sample.context, sample.question, sample.answer_prefix)
    full = prefill(tiny_llama, prompt.context_ids)
    kept = list(keep(make_policy("knorm"), full, [0.25, 0.5, 0.75]).values())
    rows = [kept[2], kept[0], kept[2], kept[1], kept[0]]
    stats, blocks = DecodeStats(), DecodeStats()
    whole = decode(full, prompt.question_ids, rows, 10, stats=stats)
    pieces = decode(full, prompt.question_ids, rows, 10, memory_budget=1, stats=blocks)
    assert [a.token_ids for a in whole] == [a.token_ids for a in pieces]
    assert (stats.rows, stats.decoded_rows) == (5, 3)
    assert blocks.forward_passes > stats.forward_passes and blocks.peak_cache_bytes < stats.peak_cache_bytes


def test_unequal_layer_lengths_equal_a_masked_full_cache(tiny_llama):
    """Layers of 40 and 20 kept pairs: logits equal those of the full cache with evicted keys masked."""
    lm = tiny_llama
    context = torch.randint(5, 100, (1, 64), generator=torch.Generator().manual_seed(3))
    question = torch.randint(5, 100, (1, 5), generator=torch.Generator().manual_seed(4))
    full = prefill(lm, context)
    kept = tuple(
        torch.rand(layer.n_kv_heads, 64, generator=torch.Generator().manual_seed(layer.index))
        .argsort(-1)[:, :n]
        .sort(-1)
        .values
        for layer, n in zip(full.layers, (40, 20), strict=True)
    )
    answer = decode(full, question, [kept], 8)[0]
    ids = torch.cat([context, question, torch.tensor([answer.token_ids])], dim=1)
    logits = masked_logits(lm, ids, kept, n_context=64)[64 + 5 - 1 : -1]
    best = logits.topk(2).values
    assert logits.argmax(-1).tolist() == list(answer.token_ids)
    assert torch.allclose(best[:, 0] - best[:, 1], torch.tensor(answer.margins), atol=1e-4)


@torch.no_grad()
def masked_logits(lm, ids, kept, n_context):
    """One full forward in which tokens after the context see only kept context keys, head by head (own attention)."""
    n = ids.shape[1]
    causal = torch.ones(n, n, dtype=torch.bool).tril()

    def attention(module, query, key, value, attention_mask, *, scaling, **kwargs):
        group = query.shape[1] // key.shape[1]
        visible = causal.expand(key.shape[1], n, n).clone()
        seen = torch.zeros(key.shape[1], n_context, dtype=torch.bool).scatter_(1, kept[module.layer_idx], True)
        visible[:, n_context:, :n_context] &= seen[:, None]
        scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
        weights = scores.masked_fill(~visible.repeat_interleave(group, 0), float("-inf")).softmax(-1)
        return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2), None

    from transformers import AttentionInterface

    AttentionInterface.register("test_masked", attention)
    before = lm.model.config._attn_implementation
    lm.model.config._attn_implementation = "test_masked"
    try:
        return lm.model(input_ids=ids, use_cache=False).logits[0]
    finally:
        lm.model.config._attn_implementation = before
