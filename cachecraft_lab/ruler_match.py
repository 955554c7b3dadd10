"""Prediction + references -> score, by RULER's two rules; and flags for matches that look wrong.

Both rules are lower-case substring tests. They are kept as RULER defines them, quirks included ("12" is found in
"3128"), and what looks like a quirk is flagged beside the score, never folded into it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .errors import InputError

CONTROL = re.compile(r"[\x00-\x1f]")
THINK = re.compile(r"<think>.*?</think>", re.DOTALL)


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """Share of the references found in the prediction, 0 to 100 (partial credit)."""
    found = _found(prediction, answers)
    return 100.0 * sum(found) / len(found)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """100 if any one of the references is found in the prediction, else 0."""
    return 100.0 * max(_found(prediction, answers))


def postprocess(prediction: str) -> str:
    """RULER's own clean-up before matching: strip, put a newline for each control character, strip."""
    return CONTROL.sub("\n", prediction.strip()).strip()


def visible_text(prediction: str) -> tuple[str, bool]:
    """What a reader sees: the prediction without its think text, and whether thinking was cut off.

    A closing tag without an opening one ends thinking that the prompt began. An opening tag without a closing
    one means that the answer never came: the text before it is returned, with True.
    """
    text = THINK.sub("", prediction)
    text = text.rpartition("</think>")[2]
    before, opened, _ = text.partition("<think>")
    return before, bool(opened)


def flags(prediction: str, answers: Sequence[str]) -> tuple[str, ...]:
    """Short warnings for a record, apart from its score.

    ``truncated-think``: thinking was cut off. ``empty``: nothing visible was said. ``repeated-token``: one word or
    piece over and over, as broken numerics give. ``embedded-match``: a reference is found only inside a longer
    run of letters or digits.
    """
    text, cut = visible_text(prediction)
    text = postprocess(text).lower()
    checks = {
        "truncated-think": cut,
        "empty": not text,
        "repeated-token": _repeats(text),
        "embedded-match": any(a.lower() in text and not _stands_alone(a.lower(), text) for a in answers),
    }
    return tuple(name for name, raised in checks.items() if raised)


def _found(prediction: str, answers: Sequence[str]) -> list[bool]:
    if isinstance(answers, str) or not answers:
        raise InputError(f"answers must be a non-empty sequence of strings, got {answers!r}")
    text = postprocess(prediction).lower()
    return [answer.lower() in text for answer in answers]


def _stands_alone(answer: str, text: str) -> bool:
    return re.search(rf"(?<![^\W_]){re.escape(answer)}(?![^\W_])", text) is not None


def _repeats(text: str) -> bool:
    """Four times the same word, the last perhaps cut short; or four times the same piece of up to 8 characters."""
    *full, last = text.split() or [""]
    same_word = len(full) >= 3 and len(set(full)) == 1 and full[0].startswith(last)
    return same_word or re.fullmatch(r"(.{1,8}?)\1{3,}", text, re.DOTALL) is not None
