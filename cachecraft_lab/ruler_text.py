"""The raw text of generated RULER samples: essay, noise and word pools, the same on every machine."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from itertools import accumulate, count, islice
from random import Random

from .errors import InputError

ESSAY_SHA256 = "56b773b1541347dfd869ad10fc60282db7906518356bf8bb29b0faee25ce2d0d"
WORDS_SHA256 = "e7f8676c17fc018c43a8fd957cb850cb8a2d61e19932821156a1d46b02599c99"

# A haystack unit of nothing: short plain sentences, repeated for as long as needed.
NOISE = (
    "The hills are quiet.",
    "The lake is still.",
    "The bread is warm.",
    "Off we walk.",
    "Up the path and down once more.",
)


@cache
def essay() -> tuple[str, ...]:
    """Sentences of English prose (``text/README.md`` says from where)."""
    raw = (files("cachecraft_lab") / "text" / "essay.txt").read_bytes()
    return tuple(_checked(raw, ESSAY_SHA256, "text/essay.txt differs from the shipped one: reinstall").splitlines())


@cache
def words() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(adjectives, nouns) of wonderwords: lower-case ASCII words of 3 to 10 letters, sorted, decent."""
    assets = files("wonderwords") / "assets"
    rude = set((assets / "profanitylist.txt").read_text("utf-8").split())
    adjectives, nouns = (
        sorted({w for w in (assets / name).read_text("utf-8").split("\n") if _plain(w)} - rude)
        for name in ("adjectivelist.txt", "nounlist.txt")
    )
    raw = " ".join([*adjectives, "|", *nouns]).encode()
    fix = f"wonderwords {version('wonderwords')} has other word lists: pip install wonderwords==3.0.1"
    _checked(raw, WORDS_SHA256, fix)
    return tuple(adjectives), tuple(nouns)


@cache
def key_words() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The (adjectives, nouns) of keys: no adjective ends in another and no noun begins with another.

    So no key adjective-noun lies inside another one, as red-cat would in bored-catfish.
    """
    adjectives, nouns = words()
    by_ending = _prefix_free(sorted(w[::-1] for w in adjectives))
    return tuple(sorted(w[::-1] for w in by_ending)), tuple(_prefix_free(nouns))


def essay_from(start: int) -> Iterator[str]:
    """Essay sentences without end, from sentence ``start`` on, back to the first after the last."""
    text = essay()
    return (text[i % len(text)] for i in count(start))


def noise() -> Iterator[str]:
    """Noise sentences without end."""
    return (NOISE[i % len(NOISE)] for i in count())


def word_keys(rng: Random, n: int) -> list[str]:
    """``n`` keys such as ``brave-lantern``, all different, none inside another."""
    adjectives, nouns = key_words()
    pairs = (divmod(i, len(nouns)) for i in rng.sample(range(len(adjectives) * len(nouns)), n))
    return [f"{adjectives[a]}-{nouns[b]}" for a, b in pairs]


def numbers(rng: Random, n: int, digits: int = 7) -> list[str]:
    """``n`` different numbers of ``digits`` digits, as text."""
    return [str(x) for x in rng.sample(range(10 ** (digits - 1), 10**digits), n)]


def uuids(rng: Random, n: int) -> list[str]:
    """``n`` UUIDs of version 4's form."""
    raw = (f"{rng.getrandbits(128):032x}" for _ in range(n))
    return [f"{h[:8]}-{h[8:12]}-4{h[13:16]}-{'89ab'[int(h[16], 16) % 4]}{h[17:20]}-{h[20:]}" for h in raw]


def take(sentences: Iterator[str], n_units: int, n_words: int) -> tuple[list[str], list[str]]:
    """The first ``n_units`` sentences, and the next ``n_words`` words as sentences, the last one cut short."""
    whole, rest = list(islice(sentences, n_units)), []
    while n_words > 0:
        start = next(sentences).split()[:n_words]
        rest.append(" ".join(start).rstrip(".,;:") + ".")
        n_words -= len(start)
    return whole, rest


def scatter(needles: Sequence[str], haystack: Sequence[str], seed: int, *, in_order: bool = False) -> list[str]:
    """Put needles between the sentences of a haystack, at different places, depth uniform over its length.

    A place is the sentence boundary nearest to a uniform position in characters: uniform over boundaries would
    favour the ends of a short haystack. ``haystack`` needs at least ``len(needles)`` sentences.
    """
    assert len(needles) <= len(haystack)
    rng = Random(seed)
    edges = [0, *accumulate(len(s) + 1 for s in haystack)]
    places: dict[int, None] = {}
    while len(places) < len(needles):
        at = rng.random() * edges[-1]
        right = bisect_left(edges, at)
        left = max(0, right - 1)
        places[left if at - edges[left] < edges[right] - at else right] = None
    chosen = sorted(places) if in_order else list(places)
    at_place = dict(zip(chosen, needles, strict=True))
    mixed = []
    for i, sentence in enumerate([*haystack, None]):
        mixed += [at_place[i]] if i in at_place else []
        mixed += [sentence] if sentence is not None else []
    return mixed


def letters(rng: Random, n: int, length: int, alphabet: str) -> list[str]:
    """``n`` different random strings of ``length`` letters."""
    found: dict[str, None] = {}
    while len(found) < n:
        found["".join(rng.choices(alphabet, k=length))] = None
    return list(found)


def invented_names(rng: Random) -> list[str]:
    """Nouns as stems of made-up names, capitalised and shuffled: none begins or ends with another; some 4000."""
    _, nouns = key_words()
    stems = sorted(w[::-1].capitalize() for w in _prefix_free(sorted(w[::-1] for w in nouns)))
    return rng.sample(stems, len(stems))


def _prefix_free(ordered: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for word in ordered:
        if not kept or not word.startswith(kept[-1]):
            kept.append(word)
    return kept


def _plain(word: str) -> bool:
    return word.isascii() and word.isalpha() and word.islower() and 3 <= len(word) <= 10


def _checked(raw: bytes, sha256: str, otherwise: str) -> str:
    if hashlib.sha256(raw).hexdigest() != sha256:
        raise InputError(otherwise)
    return raw.decode()
