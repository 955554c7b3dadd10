"""Prompts are kvpress's own ids, and no template, thinking mode or BOS goes wrong in silence."""

from __future__ import annotations

import pytest
import torch
from kvpress import KVPressTextGenerationPipeline

from cachecraft_lab.errors import InputError
from cachecraft_lab.prompt import encode_prompt, whole_prompt_text
from cachecraft_lab.ruler import generate

MODELS = ["tiny_llama", "tiny_qwen2", "tiny_qwen3", "tiny_mistral"]
CONTEXT = "A special magic number is hidden here.\nThe number for quiet-river is: 7341908. ### The grass is green.\n"
QUESTION = "What is the number for quiet-river? "
PREFIX = "The number for quiet-river is"


def kvpress_ids(lm, context, question, answer_prefix, enable_thinking):
    """Token ids of the real pipeline, truncation off."""
    pipe = KVPressTextGenerationPipeline(model=lm.model, tokenizer=lm.tokenizer)
    out = pipe.preprocess(context, [question], answer_prefix, 10**9, enable_thinking=enable_thinking)
    return out["context_ids"], out["questions_ids"][0]


def text_of(lm, ids) -> str:
    return lm.tokenizer.decode(ids[0])


def check_equals_kvpress(lm, context, question, answer_prefix, query_aware, enable_thinking):
    prompt = encode_prompt(
        lm, context, question, answer_prefix, query_aware=query_aware, enable_thinking=enable_thinking
    )
    if query_aware:  # as kvpress's evaluation does it
        context, question = context + question, ""
    context_ids, question_ids = kvpress_ids(lm, context, question, answer_prefix, enable_thinking)
    assert prompt.context_ids.dtype == torch.int64 and prompt.context_ids.shape[0] == 1
    assert prompt.query_aware is query_aware
    assert torch.equal(prompt.context_ids, context_ids)
    assert torch.equal(prompt.question_ids, question_ids)


@pytest.mark.parametrize("enable_thinking", [False, True])
@pytest.mark.parametrize("query_aware", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_ids_equal_kvpress(request, name, query_aware, enable_thinking):
    lm = request.getfixturevalue(name)
    check_equals_kvpress(lm, CONTEXT, QUESTION, PREFIX, query_aware, enable_thinking)
    check_equals_kvpress(lm, f"  {CONTEXT}", "", "", query_aware, enable_thinking)


@pytest.mark.parametrize("query_aware", [False, True])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_ids_without_template_equal_kvpress(tiny_lm, arch, query_aware, monkeypatch):
    lm = tiny_lm(arch, prompt_format="none")
    prompt = encode_prompt(lm, CONTEXT, QUESTION, PREFIX)
    assert text_of(lm, prompt.context_ids) == (lm.tokenizer.bos_token or "") + CONTEXT
    assert text_of(lm, prompt.question_ids) == f"{QUESTION}\n{PREFIX}"
    if lm.tokenizer.bos_token is not None:  # kvpress 0.5.5 adds None to a text and fails
        check_equals_kvpress(lm, CONTEXT, QUESTION, PREFIX, query_aware, False)


@pytest.mark.parametrize("query_aware", [False, True])
@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_1", "niah_multivalue"])
def test_embedded_prompts_of_real_samples(lm, task, query_aware):
    for sample in generate(task, 512, lm.tokenizer, n_samples=2, seed=5):
        parts = sample.context, sample.question, sample.answer_prefix
        check_equals_kvpress(lm, *parts, query_aware, False)
        check_sums_to_the_whole(lm, *parts, query_aware)
        assert "system" not in text_of(lm, encode_prompt(lm, *parts).context_ids)[:40]


def check_sums_to_the_whole(lm, context, question, answer_prefix, query_aware):
    prompt = encode_prompt(lm, context, question, answer_prefix, query_aware=query_aware)
    text = whole_prompt_text(lm, context, question, answer_prefix)
    whole = lm.tokenizer.encode(text, add_special_tokens=False)
    assert prompt.context_ids[0].tolist() + prompt.question_ids[0].tolist() == whole
    by_template = lm.tokenizer.apply_chat_template(
        [{"role": "user", "content": context + question}],
        add_generation_prompt=True,
        tokenize=False,
        enable_thinking=False,
    )
    # templates such as Llama 3's trim the user's text; the question's own trailing space stays with us, as in kvpress
    assert text.replace(" <|eot_id|>", "<|eot_id|>") == by_template + answer_prefix


@pytest.mark.parametrize("query_aware", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_parts_sum_to_the_whole_prompt(request, name, query_aware):
    check_sums_to_the_whole(request.getfixturevalue(name), CONTEXT, QUESTION.strip(), PREFIX, query_aware)


@pytest.mark.parametrize("prompt_format", ["chat", "none"])
@pytest.mark.parametrize(("arch", "n_bos"), [("llama", 1), ("mistral", 1), ("qwen2", 0), ("qwen3", 0)])
def test_bos_is_at_index_zero_only(tiny_lm, arch, n_bos, prompt_format):
    """These tokenizers add a BOS to whatever they encode plainly, so each piece is a chance to double it."""
    lm = tiny_lm(arch, prompt_format=prompt_format)
    bos = lm.tokenizer.convert_tokens_to_ids("<|begin_of_text|>")
    assert lm.tokenizer.encode("x")[0] == bos or n_bos == 0
    for query_aware in (False, True):
        prompt = encode_prompt(lm, CONTEXT, QUESTION, PREFIX, query_aware=query_aware)
        ids = prompt.context_ids[0].tolist() + prompt.question_ids[0].tolist()
        assert [i for i, token in enumerate(ids) if token == bos] == [0] * n_bos


def test_bos_in_the_text_is_refused(tiny_lm):
    with pytest.raises(InputError, match=r"<\|begin_of_text\|>"):
        encode_prompt(tiny_lm("llama", prompt_format="none"), f"<|begin_of_text|>{CONTEXT}", QUESTION, PREFIX)


def test_thinking_mode_ends_as_the_template_does(tiny_qwen3):
    off = encode_prompt(tiny_qwen3, CONTEXT, QUESTION, "")
    on = encode_prompt(tiny_qwen3, CONTEXT, QUESTION, "", enable_thinking=True)
    turn = f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(tiny_qwen3, on.question_ids) == turn
    assert text_of(tiny_qwen3, off.question_ids) == f"{turn}<think>\n\n</think>\n\n"
    assert torch.equal(on.context_ids, off.context_ids)


def test_query_aware_puts_the_question_where_policies_see_it(tiny_qwen3):
    aware = encode_prompt(tiny_qwen3, CONTEXT, QUESTION, PREFIX, query_aware=True)
    agnostic = encode_prompt(tiny_qwen3, CONTEXT, QUESTION, PREFIX)
    assert text_of(tiny_qwen3, aware.context_ids).endswith(QUESTION)
    assert QUESTION not in text_of(tiny_qwen3, agnostic.context_ids)
    assert QUESTION not in text_of(tiny_qwen3, aware.question_ids)
    other = encode_prompt(tiny_qwen3, CONTEXT, "Which of them? ", PREFIX)
    assert torch.equal(agnostic.context_ids, other.context_ids)


@pytest.mark.parametrize("prompt_format", ["chat", "none"])
def test_context_that_ends_in_the_mark(tiny_lm, prompt_format):
    """kvpress cuts at the first run of '#', which moves the context's own into the question."""
    lm = tiny_lm("qwen3", prompt_format=prompt_format)
    prompt = encode_prompt(lm, "# Title #\nText ##", "Which? ", "")
    assert text_of(lm, prompt.context_ids).endswith("# Title #\nText ##")
    assert "#" not in text_of(lm, prompt.question_ids)


def test_empty_context_is_refused(tiny_llama):
    with pytest.raises(InputError, match="context is empty"):
        encode_prompt(tiny_llama, "", QUESTION, PREFIX)
    with pytest.raises(InputError, match="context is empty"):
        encode_prompt(tiny_llama, "", QUESTION, PREFIX, query_aware=True)


def test_template_that_hides_the_text_is_refused(tiny_lm):
    lm = tiny_lm("qwen3")
    lm.tokenizer.chat_template = "{{ messages[0]['content'] | upper | replace('#', '') }}"
    with pytest.raises(InputError, match="alters the user's text"):
        encode_prompt(lm, CONTEXT, QUESTION, PREFIX)
