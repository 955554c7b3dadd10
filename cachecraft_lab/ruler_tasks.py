"""One function a RULER task family: random source -> a plan that can be filled to any length.

The structure (what is hidden, how often, how many hops, which limits) is that of RULER (Hsieh et al.,
arXiv:2404.06654); every sentence is our own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from .ruler_text import essay, essay_from, noise, numbers, scatter, take, uuids, word_keys


@dataclass(frozen=True)
class Plan:
    """A sample but for its length.

    Attributes:
        question, answer_prefix, answers: as in :class:`cachecraft_lab.ruler.RulerSample`.
        build: (whole units, words of the next unit) -> context. A unit is what the haystack is made of: a
            sentence, a needle, a list entry, a document. More units or words never give fewer tokens.
        min_units: fewest units that keep the structure.
    """

    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    build: Callable[[int, int], str]
    min_units: int


@dataclass(frozen=True)
class Niah:
    """Needle in a haystack: what the hay is, what keys and values are, and how many of each."""

    haystack: str  # "noise" | "essay" | "needles"
    key: str = "words"  # "words" | "uuids"
    value: str = "numbers"  # "numbers" | "uuids"
    n_keys: int = 1
    n_values: int = 1  # values a key
    n_asked: int = 1  # keys asked for


KINDS = {"words": word_keys, "numbers": numbers, "uuids": uuids}
NOUN = {"numbers": "number", "uuids": "UUID"}

NIAH_INTRO = "Special magic {noun}s are hidden in the text below. Remember them: you will be asked about them."
NIAH_NEEDLE = "The special magic {noun} for {key} is: {value}."
NIAH_ASK_ONE = "Which special magic {noun} does the text give for {keys}?"
NIAH_ASK_MANY = "Which special magic {noun}s does the text give for {keys}? List all {n}."
NIAH_PREFIX_ONE = "The special magic {noun} that the text gives for {keys} is:"
NIAH_PREFIX_MANY = "The {n} special magic {noun}s that the text gives for {keys} are:"


def niah(spec: Niah, rng: Random, n_tokens: int) -> Plan:
    """Needles ``key -> value`` in a haystack; the question asks for all values of one or more keys."""
    noun = NOUN[spec.value]
    n_hay = n_tokens // 8 if spec.haystack == "needles" else 0  # more than fit: a needle takes over 8 tokens
    keys = KINDS[spec.key](rng, spec.n_keys + n_hay)
    values = KINDS[spec.value](rng, spec.n_keys * spec.n_values + n_hay)
    sentences = [
        NIAH_NEEDLE.format(noun=noun, key=key, value=value)
        for key, value in zip(
            [k for k in keys[: spec.n_keys] for _ in range(spec.n_values)] + keys[spec.n_keys :], values, strict=True
        )
    ]
    n_needles = spec.n_keys * spec.n_values
    needles, hay = sentences[:n_needles], sentences[n_needles:]
    asked = keys[: spec.n_asked]
    answers = tuple(values[: spec.n_asked * spec.n_values])
    seed, start = rng.getrandbits(64), rng.randrange(len(essay()))

    def build(n_units: int, n_words: int) -> str:
        if spec.haystack == "needles":
            _, filler = take(noise(), 0, n_words)
            body = scatter(needles, hay[:n_units], seed)
            body = scatter([" ".join(filler)] if filler else [], body, seed + 1)  # in one place, anywhere
        else:
            whole, filler = take(noise() if spec.haystack == "noise" else essay_from(start), n_units, n_words)
            body = scatter(needles, whole, seed) + filler
        return f"{NIAH_INTRO.format(noun=noun)}\n{' '.join(body)}\n"

    wording = {"noun": noun, "keys": _listed(asked), "n": len(answers)}
    one = len(answers) == 1
    return Plan(
        question=(NIAH_ASK_ONE if one else NIAH_ASK_MANY).format(**wording),
        answer_prefix=(NIAH_PREFIX_ONE if one else NIAH_PREFIX_MANY).format(**wording),
        answers=answers,
        build=build,
        min_units=max(2, len(needles)),
    )


def _listed(names: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([*filter(None, [", ".join(names[:-1])]), names[-1]])
