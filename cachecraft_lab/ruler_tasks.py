"""One function a RULER task family: random source -> a plan that can be filled to any length.

The structure (what is hidden, how often, how many hops, which limits) is that of RULER (Hsieh et al.,
arXiv:2404.06654); every sentence is our own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt
from random import Random
from string import ascii_lowercase, ascii_uppercase

from scipy.special import zeta

from .ruler_text import (
    essay,
    essay_from,
    invented_names,
    letters,
    noise,
    numbers,
    scatter,
    take,
    uuids,
    word_keys,
    words,
)


@dataclass(frozen=True)
class Plan:
    """A sample but for its length.

    Attributes:
        question, answer_prefix, answers: as in :class:`cachecraft_lab.ruler.RulerSample`.
        build: (whole units, words of the next unit) -> context. A unit is what the haystack is made of: a
            sentence, a needle, a list entry, a document. More units or words never give fewer tokens.
        min_units: fewest units that keep the structure.
        max_units: as many units as there are words for.
    """

    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    build: Callable[[int, int], str]
    min_units: int
    max_units: int = 1 << 40


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

NIAH_INTRO = "The text below hides access {noun}s. Remember them, you will be asked about them."
NIAH_NEEDLE = "The access {noun} for {key} is {value}."
NIAH_ASK_ONE = "What is the access {noun} for {keys}?"
NIAH_ASK_MANY = "What are the access {noun}s for {keys}?"
NIAH_PREFIX_ONE = "The access {noun} for {keys} is"
NIAH_PREFIX_MANY = "The access {noun}s for {keys} are"


def niah(spec: Niah, rng: Random, n_tokens: int) -> Plan:
    """Needles ``key -> value`` in a haystack; the question asks for all values of one or more keys."""
    noun = NOUN[spec.value]
    n_hay = n_tokens // 8 if spec.haystack == "needles" else 0  # a needle takes over 8 tokens
    keys = KINDS[spec.key](rng, spec.n_keys + n_hay)
    values = KINDS[spec.value](rng, spec.n_keys * spec.n_values + n_hay)
    owners = [key for key in keys[: spec.n_keys] for _ in range(spec.n_values)] + keys[spec.n_keys :]
    sentences = [NIAH_NEEDLE.format(noun=noun, key=k, value=v) for k, v in zip(owners, values, strict=True)]
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

    wording = {"noun": noun, "keys": _listed(asked)}
    one = len(answers) == 1
    return Plan(
        question=(NIAH_ASK_ONE if one else NIAH_ASK_MANY).format(**wording),
        answer_prefix=(NIAH_PREFIX_ONE if one else NIAH_PREFIX_MANY).format(**wording),
        answers=answers,
        build=build,
        min_units=max(2, len(needles)),
        max_units=len(hay) if spec.haystack == "needles" else Plan.max_units,
    )


VT_INTRO = "Variables get values in the text below, some of them from another variable. Follow every chain."
VT_ROOT, VT_COPY = "VAR {name} = {value}.", "VAR {name} = VAR {source}."
VT_ASK = "Which variables hold the value {value}? There are {n}."
VT_PREFIX = "The {n} variables that hold the value {value} are:"
VT_HOPS, VT_EXAMPLE_NOISE = 4, 6


def vt(rng: Random, n_tokens: int) -> Plan:
    """Variable tracking: one chain of four hops in noise; the question asks for all five variables of a value.

    As in RULER a worked example stands before the text: shorter names (3 letters for 5), a chain as long.
    """
    example, text = _vt_chain(rng, 3), _vt_chain(rng, 5)
    seeds = rng.getrandbits(64), rng.getrandbits(64)
    shown = scatter(example.statements, take(noise(), VT_EXAMPLE_NOISE, 0)[0], seeds[0], in_order=True)
    lesson = f"{VT_INTRO}\n{' '.join(shown)}\n{example.question}\n{example.prefix} {_commas(example.names)}\n"

    def build(n_units: int, n_words: int) -> str:
        whole, filler = take(noise(), n_units, n_words)
        body = scatter(text.statements, whole, seeds[1], in_order=True) + filler
        return f"{lesson}{VT_INTRO}\n{' '.join(body)}\n"

    return Plan(text.question, text.prefix, text.names, build, min_units=VT_HOPS + 1)


@dataclass(frozen=True)
class _Chain:
    names: tuple[str, ...]
    statements: list[str]
    question: str
    prefix: str


def _vt_chain(rng: Random, name_length: int) -> _Chain:
    names = letters(rng, VT_HOPS + 1, name_length, ascii_uppercase)
    value = numbers(rng, 1, digits=5)[0]
    copies = [VT_COPY.format(name=name, source=source) for source, name in pairwise(names)]
    wording = {"n": len(names), "value": value}
    return _Chain(
        names=tuple(names),
        statements=[VT_ROOT.format(name=names[0], value=value), *copies],
        question=VT_ASK.format(**wording),
        prefix=VT_PREFIX.format(**wording),
    )


CWE_INTRO = "Here is a numbered list of words. Some words come up more often than the others."
CWE_ASK = "Which {n} words come up most often in the list?"
CWE_PREFIX = "The {n} words that come up most often in the list are:"
CWE_COMMON = 10


@dataclass(frozen=True)
class CweSizes:
    """How often a common and an uncommon word come up, in the list and in the worked example."""

    common: int
    uncommon: int
    example_common: int
    example_uncommon: int
    example_words: int  # uncommon ones


# RULER's sizes from 4096 tokens on and below; its small ones take about 900 tokens, so ours go on from there.
CWE_SIZES = {4096: CweSizes(30, 3, 10, 3, 30), 1024: CweSizes(6, 1, 3, 1, 10), 0: CweSizes(3, 1, 2, 1, 5)}


def cwe(rng: Random, n_tokens: int) -> Plan:
    """Common words: a shuffled list in which ten words come up often; the question asks for the ten.

    As in RULER a worked example with other words stands before the list.
    """
    sizes = next(sizes for least, sizes in CWE_SIZES.items() if n_tokens >= least)
    pool = sorted({*words()[0], *words()[1]})
    common, others = _apart(rng.sample(pool, len(pool)), CWE_COMMON)
    example, uncommon = others[: CWE_COMMON + sizes.example_words], others[CWE_COMMON + sizes.example_words :]
    seeds = rng.getrandbits(64), rng.getrandbits(64)
    ask, prefix = CWE_ASK.format(n=CWE_COMMON), CWE_PREFIX.format(n=CWE_COMMON)
    shown, rare = example[:CWE_COMMON], example[CWE_COMMON:]
    listed = _word_list(shown * sizes.example_common + rare * sizes.example_uncommon, seeds[0])
    lesson = f"{CWE_INTRO}\n{listed}\n{ask}\n{prefix} {_commas(shown)}\n"

    def build(n_units: int, n_words: int) -> str:
        entries = common * sizes.common + uncommon[:n_units] * sizes.uncommon
        entries += uncommon[n_units : n_units + n_words]  # once each: fewer than any other, so no rule changes
        return f"{lesson}{CWE_INTRO}\n{_word_list(entries, seeds[1])}\n"

    return Plan(ask, prefix, tuple(common), build, min_units=1, max_units=len(uncommon))


def _apart(shuffled: list[str], n: int) -> tuple[list[str], list[str]]:
    """(``n`` words, the words that hold none of them): a substring match then means the word itself."""
    chosen: list[str] = []
    spoken = CWE_INTRO + CWE_ASK + CWE_PREFIX
    for word in shuffled:
        if len(chosen) < n and not any(word in c or c in word for c in [*chosen, spoken]):
            chosen.append(word)
    return chosen, [word for word in shuffled if not any(c in word for c in chosen)]


def _word_list(entries: list[str], seed: int) -> str:
    shuffled = Random(seed).sample(entries, len(entries))
    return " ".join(f"{i}. {word}" for i, word in enumerate(shuffled, 1))


FWE_INTRO = "The text below is in code. Count how often each coded word comes up, and pay no heed to the dots."
FWE_ASK = "Which three coded words come up most often in the text? Name only the words."
FWE_PREFIX = "The three coded words that come up most often in the text are:"
FWE_ALPHA, FWE_DOTS = 2.0, "..."


def fwe(rng: Random, n_tokens: int) -> Plan:
    """Frequent words: coded words with Zeta frequencies, alpha 2.0; the question asks for the top three.

    Of N words, the word of rank k comes up floor(N k^-alpha / zeta(alpha)) times. As in RULER the first rank is
    dots, which do not count, so the answers are ranks two to four.
    """
    coded = letters(rng, isqrt(n_tokens) + 8, 6, ascii_lowercase)  # rank k is there only if k^2 < N
    seed = rng.getrandbits(64)

    def build(n_units: int, n_words: int) -> str:
        counts = [int(n_units * k**-FWE_ALPHA / zeta(FWE_ALPHA)) for k in range(1, len(coded) + 2)]
        entries = [w for w, n in zip([FWE_DOTS, *coded], counts, strict=True) for _ in range(n)]
        entries += [FWE_DOTS] * n_words
        return f"{FWE_INTRO}\n{' '.join(Random(seed).sample(entries, len(entries)))}\n"

    # from 53 on, rank four always comes up more often than rank five
    return Plan(FWE_ASK, FWE_PREFIX, tuple(coded[:3]), build, min_units=53)


QA_INTRO = "Read the documents. All in them is invented. Answer the question from them, in a few words."
# (thing, what a person did to it, what else its document says): unlike topics, as real documents have
QA_TOPICS = (
    ("town of", "founded", "It stands in a green valley and lives on the trade in {craft}."),
    ("ship", "built", "It sailed for thirty years with a cargo of {craft}."),
    ("opera", "composed", "Its second act plays in a shop that sells {craft}."),
    ("novel", "written", "It tells of a family that lost its fortune in {craft}."),
    ("comet", "discovered", "It was first seen from the roof of a store for {craft}."),
    ("bridge", "designed", "Every spring it is hung with {craft} from end to end."),
    ("rose", "bred", "Its smell reminds many people of old {craft}."),
    ("festival", "started", "Visitors come for the music and go home with {craft}."),
    ("island of", "mapped", "Nobody lives there, but divers once found {craft} near its shore."),
    ("museum", "opened", "Its largest room shows nothing but {craft}."),
)
QA_DOCUMENT = "The {thing} {name} was {did} by {person}. {more}"
QA_PERSON = "{person} was born in the village of {birthplace} and learned there all about {craft}."
QA_ASK = {
    1: ("By whom was the {thing} {name} {did}?", "The {thing} {name} was {did} by"),
    2: ("Where was the person born by whom the {thing} {name} was {did}?", "That person was born in the village of"),
}
FIRST_NAMES = "Ada Bram Clara Dirk Edda Felix Greta Hugo Ida Jonas Karla Leo Mina Nils Olga Paul"
CRAFTS = "bells boats bread candles chairs cheese clocks cloth glass honey kites lace lamps paper pots rope"


def qa(rng: Random, n_tokens: int, *, hops: int) -> Plan:
    """Questions over numbered documents of invented facts, in place of SQuAD (one hop) and HotpotQA (two).

    One hop asks who made a thing that one document tells of; two ask where that person was born, which stands in
    a document of his or her own. The other documents say the same of other things and people.
    """
    facts = _qa_facts(rng, n_tokens // (24 * hops) + 12)  # a document takes about 24 tokens or more
    gold, *others = ([t.format(**fact) for t in (QA_DOCUMENT, QA_PERSON)[:hops]] for fact in facts)
    hay = [document for pair in others for document in rng.sample(pair, len(pair))]
    seed = rng.getrandbits(64)

    def build(n_units: int, n_words: int) -> str:
        placing, documents = Random(seed), hay[: n_units - hops]
        for document in gold:
            documents.insert(placing.randrange(len(documents) + 1), document)
        documents[-1] = " ".join([documents[-1], *take(noise(), 0, n_words)[1]])
        numbered = "\n".join(f"Document {i}: {document}" for i, document in enumerate(documents, 1))
        return f"{QA_INTRO}\n{numbered}\n"

    question, prefix = (text.format(**facts[0]) for text in QA_ASK[hops])
    answers = (facts[0]["person" if hops == 1 else "birthplace"],)
    return Plan(question, prefix, answers, build, min_units=hops + 1, max_units=hops + len(hay))


def _qa_facts(rng: Random, n: int) -> list[dict[str, str]]:
    """The facts of up to ``n`` documents or pairs; topics take turns, so that like ones stand far apart."""
    stems = invented_names(rng)
    n = min(n, len(stems) // 2)
    topics = rng.sample(QA_TOPICS, len(QA_TOPICS))
    facts = []
    for i, key in enumerate(word_keys(rng, n)):
        thing, did, more = topics[i % len(topics)]
        craft = rng.choice(CRAFTS.split())
        facts.append(
            {
                "thing": thing,
                "name": " ".join(part.capitalize() for part in key.split("-")),
                "did": did,
                "more": more.format(craft=craft),
                "person": f"{rng.choice(FIRST_NAMES.split())} {stems[2 * i]}son",
                "birthplace": f"{stems[2 * i + 1]}ton",
                "craft": craft,
            }
        )
    return facts


def _commas(names: Sequence[str]) -> str:
    return ", ".join(names)


def _listed(names: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([*filter(None, [", ".join(names[:-1])]), names[-1]])
