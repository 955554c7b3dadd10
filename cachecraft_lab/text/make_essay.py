"""Rebuild essay.txt from the running CPython's own documentation: ``python make_essay.py > essay.txt``.

Kept: whole paragraphs of plain prose. Left out: headings, lists, code, grammar, tables, footnotes, and any
paragraph with code-like characters. ``pydoc_data.topics`` differs between Python versions, so the result is
shipped and its digest is tested; this script only shows where it came from (CPython 3.11).
"""

from __future__ import annotations

import re
from pydoc_data.topics import topics

ASCII = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": "-", "–": "-", "…": "..."})
CODE_LIKE = re.compile(r"[()_=<>{}\[\]\\|^%@#`~&+/]|::|\d{4}|\b0x|\)\.|\(\)|[a-z]\.[a-z]")
SENTENCE_END = re.compile(r"(?<=[a-z)][.!?]) (?=[A-Z])")


def clean(paragraph: str) -> str:
    """One line of plain ASCII: no emphasis, no quotes around names, no footnote marks."""
    text = " ".join(re.sub(r"(?<=\w)-\n", "-", paragraph.translate(ASCII)).split())
    text = re.sub(r"\s*\[\d+\]", "", text)
    text = re.sub(r"\*+", "", text)
    text = re.sub(r"'?\"([^\"]*)\"'?", r"\1", text)
    text = re.sub(r"\s*\([^()]*\)", "", text)
    return " ".join(text.split()).replace(" ,", ",").replace(" .", ".")


def is_prose(paragraph: str, text: str) -> bool:
    """Whether a paragraph is a run of ordinary sentences (judged raw for layout, cleaned for content)."""
    flush_left = not paragraph.startswith((" ", "\n", "*", "-", "[", "+", "|", "."))
    sentence_like = text[:1].isupper() and text.endswith(".") and len(text.split()) >= 12
    stray_quote = "'" in re.sub(r"(?<=\w)'(?=\w)|(?<=s)'(?= )", "", text)
    ordinary = text.isascii() and not CODE_LIKE.search(text) and not stray_quote
    short_words = max(map(len, text.split()), default=0) <= 16
    few_oddities = sum(not (c.isalpha() or c in " ,.'-;:") for c in text) <= 2
    return flush_left and sentence_like and ordinary and short_words and few_oddities


def keep(sentence: str) -> bool:
    """Whole sentences only, and no change notes."""
    return 4 <= len(sentence.split()) <= 40 and sentence[0].isupper() and " in version " not in sentence


def sentences() -> list[str]:
    """All kept sentences in topic order, each once, grouped as in their paragraphs."""
    kept: dict[str, None] = {}
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            text = clean(paragraph)
            if is_prose(paragraph, text):
                kept.update(dict.fromkeys(s for s in SENTENCE_END.split(text) if keep(s)))
    return list(kept)


if __name__ == "__main__":
    print("\n".join(sentences()))
