"""Independent truth for the exactness tests: kvpress's own pipeline, as its users call it."""

from __future__ import annotations

import kvpress
import torch
from kvpress import KVPressTextGenerationPipeline

from cachecraft_lab.compress import compress
from cachecraft_lab.models import LoadedModel
from cachecraft_lab.policies import Kept
from cachecraft_lab.prefill import Prefill


class RecordingTokenizer:
    """A tokenizer that remembers the ids it was last asked to decode (the pipeline returns text only)."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer, self.ids = tokenizer, None

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def decode(self, ids, **kwargs):
        self.ids = [int(i) for i in ids]
        return self._tokenizer.decode(ids, **kwargs)


def kvpress_answer_ids(lm: LoadedModel, sample, press, max_new_tokens: int, *, query_aware: bool) -> list[int]:
    """Token ids of kvpress's pipeline; query-aware as kvpress's evaluation does it (question moved to the context)."""
    context, question = sample.context, sample.question
    if query_aware:
        context, question = context + question, ""
    pipe = KVPressTextGenerationPipeline(model=lm.model, tokenizer=lm.tokenizer)
    pipe.tokenizer = RecordingTokenizer(lm.tokenizer)
    pipe(
        context,
        question=question,
        answer_prefix=sample.answer_prefix,
        press=press,
        max_new_tokens=max_new_tokens,
    )
    return pipe.tokenizer.ids


def cut_at_first_eos(ids: list[int], eos_ids) -> list[int]:
    """kvpress looks for EOS from the second new token on; we stop at the first one wherever it is."""
    return ids[:1] if ids[0] in eos_ids else ids


def presses(ratio: float, window: int) -> dict[str, kvpress.ScorerPress]:
    return {
        "snapkv": kvpress.SnapKVPress(ratio, window_size=window),
        "knorm": kvpress.KnormPress(ratio),
        "streaming_llm": kvpress.StreamingLLMPress(ratio),
        "expected_attention": kvpress.ExpectedAttentionPress(ratio),
        "tova": kvpress.TOVAPress(ratio),
    }


@torch.no_grad()
def logit_gap(prefill: Prefill, kept: Kept, question_ids, before: list[int], a: int, b: int) -> float:
    """|logit(a) - logit(b)| after ``before`` new tokens, by one plain forward over the compressed cache."""
    ids = torch.cat([question_ids, torch.tensor([before], dtype=torch.int64).view(1, -1)], dim=1)
    positions = torch.arange(prefill.n_tokens, prefill.n_tokens + ids.shape[1])[None]
    logits = prefill.lm.model(input_ids=ids, past_key_values=compress(prefill, kept), position_ids=positions).logits
    return float((logits[0, -1, a] - logits[0, -1, b]).abs())


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    for i in range(max(len(ours), len(theirs))):
        if ours[i : i + 1] != theirs[i : i + 1]:
            return i
    return None
