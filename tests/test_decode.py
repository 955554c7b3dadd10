"""Decoding from compressed caches: positions, ends, memory, and rows that leave while others go on."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import cut_at_first_eos, kvpress_answer_ids, presses
from tiny import tiny_lm

from cachecraft_lab.compress import compress, full_kept, gather, kept_bytes
from cachecraft_lab.decode import KERNEL, DecodeStats, RaggedCache, decode, decode_one, ragged_kernel
from cachecraft_lab.errors import InputError
from cachecraft_lab.policies import keep, make_policy
from cachecraft_lab.prefill import prefill
from cachecraft_lab.prompt import encode_prompt
from cachecraft_lab.ruler import RulerSample

QUESTION = torch.tensor([[31, 77, 205, 12, 90]])


def ids(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(10, 480, (1, n), generator=torch.Generator().manual_seed(seed))


def kept_of(full, *ratios: float) -> list:
    return list(keep(make_policy("knorm"), full, ratios).values())


def with_eos(lm, *eos: int):
    """The model with other EOS ids, as its generation config would list them."""
    model = lm.model
    model.generation_config.eos_token_id = list(eos)
    return replace(lm, model=model)


@contextmanager
def positions_seen(lm):
    """Position ids of each forward call of the model's decoder."""
    seen = []
    hook = lm.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"].clone()), with_kwargs=True
    )
    try:
        yield seen
    finally:
        hook.remove()


# --- positions -------------------------------------------------------------------------------------------------------


def test_the_question_goes_on_from_the_contexts_length(tiny_llama):
    """200 tokens, 50 kept: the question starts at 200, never at 50, in either way of decoding."""
    full = prefill(tiny_llama, ids(200))
    (kept,) = kept_of(full, 0.75)
    assert kept[0].shape[1] == 50
    for answer in (
        lambda: decode(full, QUESTION, [kept, full_kept(full)], 3),
        lambda: decode_one(full, QUESTION, kept, 3),
    ):
        with positions_seen(tiny_llama) as seen:
            answer()
        assert [p[0].tolist() for p in seen] == [[200, 201, 202, 203, 204], [205], [206]]
        assert all(bool((p == p[0]).all()) for p in seen)  # every row alike, however much it kept


def test_kept_keys_are_those_of_the_full_cache_never_rotated_again(tiny_llama):
    full = prefill(tiny_llama, ids(120))
    (kept,) = kept_of(full, 0.7)
    cache = compress(full, kept)
    for layer, small, indices in zip(full.layers, cache.layers, kept, strict=True):
        for head in range(2):
            assert torch.equal(small.keys[0, head], layer.keys[head, indices[head]])
            assert torch.equal(small.values[0, head], layer.values[head, indices[head]])


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_llama3_rope_scaling_goes_through_to_the_answer():
    """Keys keep the rotation that the model gave them, scaled frequencies included: the answer is kvpress's own."""
    lm, plain = tiny_lm("llama", rope_parameters=LLAMA3_ROPE), tiny_lm("llama")
    context = "One of the special magic numbers for quiet-river is: 7341908. The sky is blue. " * 8
    sample = RulerSample("niah_single_1", context + "\n", "What is the number? ", "It is", ("7",), 16, "rope-0")
    prompt = encode_prompt(lm, sample.context, sample.question, sample.answer_prefix)
    full = prefill(lm, prompt.context_ids)
    assert full.n_tokens > 128 and not torch.allclose(
        full.layers[0].cos, prefill(plain, ids(full.n_tokens)).layers[0].cos
    )
    for name in ("knorm", "snapkv", "expected_attention"):
        policy = make_policy({"name": name, "window_size": 16} if name == "snapkv" else name)
        kept = keep(policy, full, [0.5])[0.5]
        theirs = kvpress_answer_ids(lm, sample, presses(0.5, 16)[name], 10, query_aware=False)
        (answer,) = decode(full, prompt.question_ids, [kept], 10)
        assert list(answer.token_ids) == cut_at_first_eos(theirs, lm.eos_ids), name


# --- ends ------------------------------------------------------------------------------------------------------------


def test_any_of_the_models_eos_ids_ends_an_answer():
    lm = with_eos(tiny_lm("llama"))
    full = prefill(lm, ids(60))
    (kept,) = kept_of(full, 0.5)
    (free,) = decode(full, QUESTION, [kept], 12)
    assert len(free.token_ids) == len(free.margins) == 12 and free.finish_reason == "length"
    at = next(i for i in range(3, 12) if free.token_ids[i] not in free.token_ids[:i])
    never = next(i for i in range(10, 480) if i not in free.token_ids)
    for eos in ((never, free.token_ids[at]), (free.token_ids[at],)):
        full = replace(full, lm=with_eos(lm, *eos))
        for answer in (decode(full, QUESTION, [kept], 12)[0], decode_one(full, QUESTION, kept, 12)):
            assert answer.token_ids == free.token_ids[: at + 1]  # the EOS is part of it
            assert answer.finish_reason == "eos" and len(answer.margins) == at + 1


def test_eos_as_the_first_token():
    lm = tiny_lm("llama")
    full = prefill(lm, ids(60))
    (kept,) = kept_of(full, 0.5)
    first = decode(full, QUESTION, [kept], 1)[0].token_ids[0]
    full = replace(full, lm=with_eos(lm, first))
    stats = DecodeStats()
    for answer in (decode(full, QUESTION, [kept], 9, stats=stats)[0], decode_one(full, QUESTION, kept, 9)):
        assert answer.token_ids == (first,) and answer.finish_reason == "eos"
    assert stats.forward_passes == 1  # nothing is decoded after the last row's end


@pytest.mark.parametrize("hits_eos", [False, True])
def test_one_new_token(hits_eos):
    lm = with_eos(tiny_lm("llama"))
    full = prefill(lm, ids(60))
    (kept,) = kept_of(full, 0.5)
    (answer,) = decode(full, QUESTION, [kept], 1)
    assert len(answer.token_ids) == 1 and answer.finish_reason == "length"
    if hits_eos:
        full = replace(full, lm=with_eos(lm, *answer.token_ids))
        assert decode(full, QUESTION, [kept], 1)[0].finish_reason == "eos"


def test_rows_that_end_early_leave_the_others_as_they_are():
    """EOS ids are chosen so that rows of one group and whole groups leave at different steps."""
    lm = with_eos(tiny_lm("llama"))
    full = prefill(lm, ids(120))
    rows = [full_kept(full)]
    for name in ("knorm", "keydiff", "random", "tova"):
        rows += keep(make_policy(name), full, [0.5, 0.8, 0.95]).values()
    free = decode(full, QUESTION, rows, 14)
    tokens = [t for answer in free for t in answer.token_ids]
    eos = sorted(set(tokens), key=tokens.count, reverse=True)[:2]
    full = replace(full, lm=with_eos(lm, *eos))
    answers = decode(full, QUESTION, rows, 14)
    ends = {len(answer.token_ids) for answer in answers}
    assert len(ends) >= 4 and {"eos", "length"} == {answer.finish_reason for answer in answers}
    for answer, whole, kept in zip(answers, free, rows, strict=True):
        stop = next((i + 1 for i, t in enumerate(whole.token_ids) if t in eos), 14)
        assert answer.token_ids == whole.token_ids[:stop]
        assert answer.token_ids == decode_one(full, QUESTION, kept, 14).token_ids
        assert answer.margins == pytest.approx(whole.margins[:stop], abs=1e-4)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_logits_stop_the_run(value):
    """argmax would make an answer of them: an error instead, and the model attends through its own kernel again."""
    lm = tiny_lm("llama")
    full = prefill(lm, ids(40))
    before = lm.attn_implementation

    def poison(module, args, output):
        output[..., 7] = value
        return output

    hook = lm.model.lm_head.register_forward_hook(poison)
    for answer in (
        lambda: decode(full, QUESTION, [full_kept(full)], 3),
        lambda: decode_one(full, QUESTION, full_kept(full), 3),
    ):
        with pytest.raises(FloatingPointError, match="non-finite logits"):
            answer()
        assert lm.attn_implementation == before == "sdpa"
    hook.remove()
    assert decode(full, QUESTION, [full_kept(full)], 3)[0].token_ids


def test_overflowing_half_precision_keys_stop_the_run():
    lm = tiny_lm("llama")
    lm.model.to(torch.float16)
    full = prefill(lm, ids(30))
    huge = tuple(replace(layer, keys=layer.keys * 1e4, values=layer.values * 1e4) for layer in full.layers)
    with pytest.raises(FloatingPointError, match="non-finite logits"):
        decode(replace(full, layers=huge), QUESTION, [full_kept(full)], 3)


def test_the_kernel_is_put_back_also_after_an_error(tiny_llama):
    with pytest.raises(ZeroDivisionError), ragged_kernel(tiny_llama):
        assert tiny_llama.attn_implementation == KERNEL
        1 / 0  # noqa: B018
    assert tiny_llama.attn_implementation == "sdpa"


def test_bad_input_is_refused_before_the_model_runs():
    lm = tiny_lm("llama", max_position_embeddings=128)
    full = prefill(lm, ids(100))
    lm.model.forward = lm.model.model.forward = None  # any model work would raise a TypeError
    rows = [full_kept(full)]
    for arguments, message in (
        ((QUESTION[:, :0], rows, 5), "q >= 1"),
        ((QUESTION[0], rows, 5), "q >= 1"),
        ((QUESTION, rows, 0), "max_new_tokens must be >= 1, got 0"),
        ((QUESTION, rows, 24), "129 tokens"),  # 100 + 5 + 24
        ((QUESTION, [rows[0][:1]], 5), "expected 2 layers, got 1"),
        ((QUESTION, [tuple(layer.flip(-1) for layer in rows[0])], 5), "unsorted"),
        ((QUESTION, [tuple(layer + 1 for layer in rows[0])], 5), r"values 1\.\.100"),
        ((QUESTION, [tuple(layer.repeat(2, 1) for layer in rows[0])], 5), r"\[4, 100\]"),
    ):
        with pytest.raises(InputError, match=message):
            decode(full, *arguments)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_tensors_with_two_kv_heads(tiny_llama):
    """4 query heads share 2 KV heads: the cache holds 2, and that is what is counted."""
    full = prefill(tiny_llama, ids(100))
    (kept,) = kept_of(full, 0.75)
    cache = compress(full, kept)
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    assert {tuple(t.shape) for t in tensors} == {(1, 2, 25, 16)}
    assert kept_bytes(full, kept) == sum(t.numel() * t.element_size() for t in tensors) == 2 * 2 * 2 * 25 * 16 * 4
    ragged = RaggedCache(full, [kept, full_kept(full)], n_new=7)
    assert {tuple(t.shape) for layer in ragged.keys for t in layer} == {(1, 2, 32, 16), (1, 2, 107, 16)}
    assert ragged.nbytes == 2 * 2 * 2 * (32 + 107) * 16 * 4


def test_unequal_layers_are_counted_as_they_are(tiny_llama):
    full = prefill(tiny_llama, ids(300))
    kept = keep(make_policy({"name": "pyramidkv", "window_size": 16}), full, [0.5])[0.5]
    assert kept[0].shape[1] != kept[1].shape[1]
    cache = compress(full, kept)
    assert kept_bytes(full, kept) == sum(t.numel() * 4 for layer in cache.layers for t in (layer.keys, layer.values))


@pytest.mark.parametrize("rows_that_fit", [1, 2, 3])
def test_blocks_stay_within_the_memory_budget(tiny_llama, rows_that_fit):
    full = prefill(tiny_llama, ids(100))
    rows = [k for name in ("knorm", "keydiff", "tova") for k in keep(make_policy(name), full, [0.5, 0.75]).values()]
    one = RaggedCache(full, [rows[0]], n_new=QUESTION.shape[1] + 6).nbytes
    stats = DecodeStats()
    answers = decode(full, QUESTION, rows, 6, memory_budget=rows_that_fit * one, stats=stats)
    assert one <= stats.peak_cache_bytes <= rows_that_fit * one
    assert [a.token_ids for a in answers] == [a.token_ids for a in decode(full, QUESTION, rows, 6)]


def test_decoding_changes_nothing_that_others_read(tiny_llama):
    full = prefill(tiny_llama, ids(80))
    rows = [full_kept(full), *kept_of(full, 0.5, 0.9)]
    before = [t.clone() for layer in full.layers for t in (layer.keys, layer.values)]
    indices = [layer.clone() for kept in rows for layer in kept]
    decode(full, QUESTION, rows, 5)
    decode_one(full, QUESTION, rows[0], 5)
    assert all(map(torch.equal, before, [t for layer in full.layers for t in (layer.keys, layer.values)]))
    assert all(map(torch.equal, indices, [layer for kept in rows for layer in kept]))


# --- the ragged cache ------------------------------------------------------------------------------------------------

N, KV_HEADS, DIM, LAYERS = 9, 2, 4, 2


def fake_prefill() -> SimpleNamespace:
    generator = torch.Generator().manual_seed(1)
    layers = [
        SimpleNamespace(
            keys=torch.rand(KV_HEADS, N, DIM, generator=generator),
            values=torch.rand(KV_HEADS, N, DIM, generator=generator),
        )
        for _ in range(LAYERS)
    ]
    return SimpleNamespace(layers=layers)


@st.composite
def rows_and_drops(draw):
    """Rows of unequal lengths, layer by layer, and which of them stay after each of a few steps."""
    n_rows = draw(st.integers(1, 6))
    lengths = sorted(draw(st.lists(st.tuples(*[st.integers(1, 3)] * LAYERS), min_size=n_rows, max_size=n_rows)))
    rows = []
    for row in lengths:
        heads = [[sorted(draw(st.permutations(range(N)))[:m]) for _ in range(KV_HEADS)] for m in row]
        rows.append(tuple(torch.tensor(layer) for layer in heads))
    drops, left = [], n_rows
    while left:
        stay = draw(st.lists(st.integers(0, left - 1), max_size=left, unique=True).map(sorted))
        drops.append(stay)
        left = len(stay) if len(stay) < left else 0
    return rows, drops


@settings(max_examples=150, deadline=None)
@given(rows_and_drops())
def test_taking_rows_equals_gathering_them_anew(case):
    rows, drops = case
    full = fake_prefill()
    cache = RaggedCache(full, rows, n_new=len(drops) + 1)
    appended = {i: [] for i in range(len(rows))}  # new pairs of each row: known by row and step
    alive = list(range(len(rows)))
    for step, stay in enumerate([list(range(len(rows))), *drops]):
        cache.take(torch.tensor(stay, dtype=torch.int64))
        alive = [alive[i] for i in stay]
        if not alive:
            assert cache.groups == [] and cache.nbytes == 0
            return
        sizes = [group.stop - group.start for group in cache.groups]
        assert sum(sizes) == len(alive) and cache.groups[0].start == 0
        for layer in range(LAYERS):
            new = torch.stack([torch.full((KV_HEADS, 1, DIM), 100.0 * i + step) for i in alive])
            for g, group in enumerate(cache.groups):
                keys, values = cache.append(layer, g, new[group], -new[group])
                for row, key, value in zip(alive[group], keys, values, strict=True):
                    past = appended[row] + ([] if layer else [100.0 * row + step])
                    if layer == 0:
                        appended[row] = past
                    tail = torch.tensor(past)[None, :, None].expand(KV_HEADS, -1, DIM)
                    states = full.layers[layer]
                    assert torch.equal(key, torch.cat([gather(states.keys, rows[row][layer]), tail], dim=1))
                    assert torch.equal(value, torch.cat([gather(states.values, rows[row][layer]), -tail], dim=1))
        cache.length += 1
