"""Sample -> token ids: what is prefilled and may be evicted, and what comes after it.

The chat template is the tokenizer's own (``models.py`` has set it to the model's prompt format). As in kvpress's
pipeline the context sits in the user turn, and the question, the turn's end and the answer prefix follow it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .errors import InputError
from .models import LoadedModel


@dataclass(frozen=True, eq=False)
class Prompt:
    """Token ids of one sample.

    Attributes:
        context_ids: int64 ``[1, n]``; their KV pairs are what an eviction policy may evict.
        question_ids: int64 ``[1, q]``; question, end of the user turn and answer prefix, never evicted.
        query_aware: True if the question is part of the context, so that policies see it.
    """

    context_ids: Tensor
    question_ids: Tensor
    query_aware: bool


def encode_prompt(
    lm: LoadedModel,
    context: str,
    question: str,
    answer_prefix: str,
    *,
    query_aware: bool = False,
    enable_thinking: bool = False,
) -> Prompt:
    """Token ids of a sample, equal to those of kvpress's ``KVPressTextGenerationPipeline.preprocess``.

    Args:
        query_aware: put the question into the context; what follows is then the turn's end and the answer prefix.
        enable_thinking: handed to the chat template; Qwen3's closes the think block at once when it is False.

    Raises:
        InputError: empty context, a template that does not show the context, or a doubled BOS.
    """
    if not context:
        raise InputError("context is empty: there is no KV cache to compress")
    if query_aware:
        context, question = context + question, ""
    head, tail = split_template(lm, context, enable_thinking=enable_thinking)
    context_ids = _encode(lm, head)
    _check_bos(lm, context_ids)
    return Prompt(context_ids, _encode(lm, question + tail + answer_prefix), query_aware)


def whole_prompt_text(
    lm: LoadedModel, context: str, question: str, answer_prefix: str, *, enable_thinking: bool = False
) -> str:
    """The prompt as one text; its ids are those of context and question together wherever no token spans them."""
    head, tail = split_template(lm, context + question, enable_thinking=enable_thinking)
    return head + tail + answer_prefix


def split_template(lm: LoadedModel, context: str, *, enable_thinking: bool = False) -> tuple[str, str]:
    """The templated user turn, cut right after the context: ``(text up to there, rest of the turn)``.

    The mark is longer than any run of its character in the context, as in kvpress; cutting at its last
    occurrence also keeps a context that ends in that character in one piece.
    """
    tokenizer = lm.tokenizer
    if lm.prompt_format == "none":
        return (tokenizer.bos_token or "") + context, "\n"
    mark = "#" * (len(context) + 10)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": context + mark}],
        add_generation_prompt=True,
        tokenize=False,
        enable_thinking=enable_thinking,
    )
    head, found, tail = text.rpartition(mark)
    if not found:
        raise InputError(f"{lm.name}: its chat template alters the user's text: use prompt_format='none'")
    return head, tail


def _encode(lm: LoadedModel, text: str) -> Tensor:
    # the template has placed every special token already
    return lm.tokenizer.encode(text, return_tensors="pt", add_special_tokens=False)


def _check_bos(lm: LoadedModel, context_ids: Tensor) -> None:
    if context_ids[0, :2].tolist() == [lm.tokenizer.bos_token_id] * 2:
        raise InputError(f"context starts with {lm.tokenizer.bos_token}, which the prompt adds itself: remove it")
