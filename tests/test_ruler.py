"""Generated RULER samples checked from their text alone, the match rules, and the hub's layout."""

import hashlib
import re
from collections import Counter
from functools import cache
from random import Random

import numpy as np
import pandas as pd
import pytest
from scipy.special import zeta
from scipy.stats import chisquare
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cachecraft_lab import ruler, ruler_text
from cachecraft_lab.errors import InputError
from cachecraft_lab.ruler import TASKS, RulerSample, generate, score, string_match_all, string_match_part

NIAH = [task for task in TASKS if task.startswith("niah")]
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUMBER, UUID = r"\b\d{7}\b", r"\b[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\b"


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE ("bytes" has no merges; "gpt2" and "llama3" split as those do), or one token a "word"."""
    if kind == "word":
        tok = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
        tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=tok, unk_token="?")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "bytes":
        tok = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(alphabet))}, []))
        tok.pre_tokenizer = byte_level
    else:
        first = pre_tokenizers.Digits(True) if kind == "gpt2" else pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated")
        tok = Tokenizer(models.BPE())
        tok.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level])
        trainer = trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
        tok.train_from_iterator([*ruler_text.essay(), *map(" ".join, ruler_text.words())], trainer)
    tok.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tok)


def ids(kind: str, text: str) -> list[int]:
    return tokenizer(kind)(text, add_special_tokens=False)["input_ids"]


@cache
def samples(task: str, n_tokens: int = 600, n_samples: int = 12, seed: int = 0) -> list[RulerSample]:
    return generate(task, n_tokens, tokenizer("gpt2"), n_samples=n_samples, seed=seed)


# --- length, boundaries, determinism ---


@pytest.mark.parametrize(
    "kind, n_tokens", [("gpt2", 512), ("gpt2", 1024), ("llama3", 700), ("bytes", 4000), ("word", 500)]
)
@pytest.mark.parametrize("task", TASKS)
def test_length_is_within_two_percent_and_never_above(task: str, kind: str, n_tokens: int) -> None:
    if kind == "word" and task in ("niah_multikey_2", "niah_multikey_3"):
        pytest.skip("a needle of 7 tokens, as no real tokenizer gives, is refused")
    for sample in generate(task, n_tokens, tokenizer(kind), n_samples=2):
        parts = [sample.context, sample.question, sample.answer_prefix]
        assert 0.98 * n_tokens <= sum(len(ids(kind, part)) for part in parts) <= n_tokens
        assert 0.98 * n_tokens <= len(ids(kind, "".join(parts))) <= n_tokens


@pytest.mark.parametrize("task", NIAH)
def test_short_samples_are_within_two_percent_too(task: str) -> None:
    n_tokens = 400
    for sample in generate(task, n_tokens, tokenizer("gpt2"), n_samples=8):
        total = len(ids("gpt2", sample.context + sample.question + sample.answer_prefix))
        assert 0.98 * n_tokens <= total <= n_tokens


@pytest.mark.parametrize("kind", ["gpt2", "llama3"])
@pytest.mark.parametrize("task", TASKS)
def test_context_and_question_tokenise_apart_as_together(task: str, kind: str) -> None:
    sample = generate(task, 800, tokenizer(kind), n_samples=1)[0]
    assert ids(kind, sample.context) + ids(kind, sample.question) == ids(kind, sample.context + sample.question)
    assert sample.context.endswith("\n") and not sample.context.endswith("\n\n")
    assert not sample.answer_prefix.endswith(" ")


def test_samples_are_the_same_byte_for_byte_on_any_machine() -> None:
    made = [generate(task, 3000, tokenizer("bytes"), n_samples=1, seed=3) for task in TASKS]
    assert hashlib.sha256(repr([list(vars(s).values()) for m in made for s in m]).encode()).hexdigest() == PINNED


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_depends_on_seed_and_index_only(task: str) -> None:
    assert generate(task, 600, tokenizer("gpt2"), n_samples=3) == samples(task)[:3]
    assert len({s.context for s in samples(task) + samples(task, n_samples=3, seed=1)}) == 15
    assert samples(task)[3].id == f"{task}-600-s0-0003" and samples(task)[3].task == task


def test_a_sample_takes_few_tokenisations() -> None:
    calls = Counter()

    class Counting:
        def __call__(self, text: str, **options: object) -> object:
            calls["n"] += 1
            return tokenizer("gpt2")(text, **options)

    for task in TASKS:
        generate(task, 1024, Counting(), n_samples=4)
    assert calls["n"] / (4 * len(TASKS)) < 30


# --- needles in a haystack ---

EXPECTED = {  # task: (what a value is, values in the context or None for as many as fit, answers)
    "niah_single_1": (NUMBER, 1, 1),
    "niah_single_2": (NUMBER, 1, 1),
    "niah_single_3": (UUID, 1, 1),
    "niah_multikey_1": (NUMBER, 4, 1),
    "niah_multikey_2": (NUMBER, None, 1),
    "niah_multikey_3": (UUID, None, 1),
    "niah_multivalue": (NUMBER, 4, 4),
    "niah_multiquery": (NUMBER, 4, 4),
}


def asked_keys(sample: RulerSample) -> list[str]:
    kind = UUID if sample.task == "niah_multikey_3" else r"\b[a-z]+-[a-z]+\b"
    return re.findall(kind, sample.question)


@pytest.mark.parametrize("task", NIAH)
def test_needles_are_as_many_and_as_unique_as_the_task_says(task: str) -> None:
    value, n_values, n_answers = EXPECTED[task]
    for sample in samples(task):
        found = re.findall(value, sample.context)
        if task == "niah_multikey_3":  # keys are UUIDs too, and come first
            found = found[1::2]
        assert len(found) == n_values if n_values else len(found) >= 4
        assert len(set(found)) == len(found)
        assert len(sample.answers) == n_answers and set(sample.answers) <= set(found)
        assert all(sample.context.count(answer) == 1 for answer in sample.answers)
        assert all(re.fullmatch(value, answer) for answer in sample.answers)
        assert sample.max_new_tokens == 128


@pytest.mark.parametrize("task", NIAH)
def test_each_answer_follows_the_key_asked_for(task: str) -> None:
    for sample in samples(task):
        keys = asked_keys(sample)
        assert len(keys) == (4 if task == "niah_multiquery" else 1)
        uses = 4 if task == "niah_multivalue" else 1
        assert all(sample.context.count(key) == uses for key in keys)
        assert all(key in sample.answer_prefix for key in keys)
        owners = keys if len(keys) > 1 else keys * len(sample.answers)
        for key, answer in zip(owners, sample.answers):
            between = re.search(rf"{key}([^.]*?){answer}", sample.context).group(1)
            assert len(between) < 20, "key and value stand in one sentence"


@pytest.mark.parametrize("task", NIAH)
def test_haystack_is_of_the_kind_that_the_task_names(task: str) -> None:
    for sample in samples(task)[:3]:
        n_essay = sum(sentence in sample.context for sentence in ruler_text.essay())
        n_noise = sample.context.count(ruler_text.NOISE[0])
        if task == "niah_single_1":
            assert n_essay == 0 and n_noise > 10
        elif "multikey_2" in task or "multikey_3" in task:
            assert n_essay == 0 and n_noise <= 6  # no more than fills the room of one needle
        else:
            assert n_essay >= 8 and n_noise == 0


def depths(task: str, n_samples: int) -> np.ndarray:
    """Where each answer's sentence begins: 0 is the haystack's start, 1 the last place that it could have."""
    found = []
    for sample in samples(task, 512, n_samples, seed=11):
        haystack = sample.context.split("\n", 1)[1]
        for answer in sample.answers:
            end = haystack.index(answer) + len(answer) + 1
            start = max(haystack.rfind(". ", 0, end - 2) + 2, 0) if ". " in haystack[: end - 2] else 0
            found.append(start / (len(haystack) - 1 - (end - start)))
    return np.array(found)


@pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2", "niah_multikey_2", "niah_multivalue"])
def test_depths_are_uniform(task: str) -> None:
    at = depths(task, 40 if task == "niah_multivalue" else 90)
    assert at.min() >= 0 and at.max() <= 1.001
    assert chisquare(np.histogram(at, bins=6, range=(0, 1.001))[0]).pvalue > 0.01


def test_depths_do_not_follow_the_order_of_the_answers() -> None:
    order = depths("niah_multivalue", 40).reshape(-1, 4).argsort(axis=1)
    assert chisquare(np.bincount(order[:, 0], minlength=4)).pvalue > 0.01


# --- the other families ---


def test_vt_is_one_chain_of_four_hops_in_noise_after_an_example() -> None:
    for sample in samples("vt"):
        value = re.search(r"\d{5}", sample.question).group()
        roots = re.findall(r"VAR ([A-Z]+) = (\d{5})\.", sample.context)
        assert [len(name) for name, _ in roots] == [3, 5], "the worked example, then the text"
        name, number = roots[1]
        assert number == value and sample.context.count(value) == 1
        copies = re.findall(r"VAR ([A-Z]{5}) = VAR ([A-Z]{5})\.", sample.context)
        chain = [name]
        for target, source in copies:  # each hop stands after the one that it reads
            assert source == chain[-1]
            chain.append(target)
        assert tuple(chain) == sample.answers and len(set(chain)) == 5
        assert not any(answer in sample.question + sample.answer_prefix for answer in chain)
        example = re.findall(r"VAR ([A-Z]{3})\b", sample.context)
        assert len(set(example)) == 5 and f": {', '.join(dict.fromkeys(example))}\n" in sample.context
        assert sample.max_new_tokens == 30


@pytest.mark.parametrize("n_tokens, often, seldom", [(600, 3, 1), (1024, 6, 1), (4096, 30, 3)])
def test_cwe_has_ten_words_that_come_up_more_often(n_tokens: int, often: int, seldom: int) -> None:
    for sample in samples("cwe", n_tokens, 3):
        example, listed = re.findall(r"^1\. .*$", sample.context, re.MULTILINE)
        entries = re.findall(r"(\d+)\. ([a-z]+)", listed)
        assert [int(i) for i, _ in entries] == list(range(1, len(entries) + 1))
        counts = Counter(word for _, word in entries)
        assert {word for word, n in counts.items() if n == often} == set(sample.answers)
        assert len(sample.answers) == 10 and len(set(sample.answers)) == 10
        assert all(n in (1, seldom) for word, n in counts.items() if word not in sample.answers)
        assert all(sample.context.count(word) == often for word in sample.answers), "nor inside other words"
        assert not set(re.findall(r"[a-z]+", example)) & set(counts)
        assert sample.max_new_tokens == 120


def test_cwe_example_answers_itself() -> None:
    for sample in samples("cwe", 1024, 3):
        example = re.search(r"^1\. .*$", sample.context, re.MULTILINE).group()
        counts = Counter(re.findall(r"[a-z]+", example))
        told = re.search(r"list are: (.*)\n", sample.context).group(1).split(", ")
        assert set(told) == {word for word, n in counts.items() if n == 3} and len(told) == 10


@pytest.mark.parametrize("n_tokens", [300, 1024])
def test_fwe_words_have_zeta_frequencies(n_tokens: int) -> None:
    for sample in samples("fwe", n_tokens, 4):
        text = sample.context.split("\n")[1].split()
        ranked = Counter(word for word in text if word != "...").most_common()
        assert tuple(word for word, _ in ranked[:3]) == sample.answers
        assert ranked[2][1] > ranked[3][1], "the third place is no tie"
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked)
        # some N gives all counts at once: floor(N k^-2 / zeta(2)) for ranks 2, 3, ...
        ranks = np.arange(2, len(ranked) + 3)
        expected = [np.floor(n * ranks**-2.0 / zeta(2.0)) for n in range(50, 4 * len(text))]
        assert any((counts == [n for _, n in ranked] + [0]).all() for counts in expected)
        assert text.count("...") > ranked[0][1]
        assert sample.max_new_tokens == 50


def test_qa_1_answer_stands_in_the_one_document_about_the_thing_asked_for() -> None:
    for sample in samples("qa_1_synthetic"):
        (name,) = re.findall(r"\b[A-Z]\w+ [A-Z]\w+\b", sample.question)
        documents = re.findall(r"^Document (\d+): (.*)$", sample.context, re.MULTILINE)
        assert [int(i) for i, _ in documents] == list(range(1, len(documents) + 1)) and len(documents) >= 4
        (holding,) = [text for _, text in documents if name in text]
        assert sample.answers[0] in holding and sample.context.count(sample.answers[0]) == 1


def test_qa_2_needs_two_documents() -> None:
    for sample in samples("qa_2_synthetic"):
        (name,) = re.findall(r"\b[A-Z]\w+ [A-Z]\w+\b", sample.question)
        documents = re.findall(r"^Document \d+: (.*)$", sample.context, re.MULTILINE)
        (first,) = [text for text in documents if name in text]
        person = re.search(r" by (\w+ \w+)\.", first).group(1)
        (second,) = [text for text in documents if person in text and text != first]
        assert sample.answers[0] in second and sample.answers[0] not in first
        assert sample.context.count(sample.answers[0]) == 1
        assert person not in sample.question + sample.answer_prefix


@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
def test_made_up_qa_says_so_in_every_name(task: str) -> None:
    sample = generate(task, 600, tokenizer("gpt2"), n_samples=1)[0]
    assert sample.task == f"{task}_synthetic" and sample.id == f"{task}_synthetic-600-s0-0000"
    assert TASKS[sample.task].synthetic and sample.max_new_tokens == 32
    assert score(task, "b!", ["a", "b"]) == score(sample.task, "b!", ["a", "b"]) == 100


# --- bad input, shipped text ---


def test_bad_input_is_one_clear_line() -> None:
    tok = tokenizer("gpt2")
    with pytest.raises(InputError, match=r"niah_single_9.*niah_single_1, niah_single_2"):
        generate("niah_single_9", 512, tok, n_samples=1)
    with pytest.raises(InputError, match="n_samples"):
        generate("vt", 512, tok, n_samples=0)
    for task in TASKS:
        with pytest.raises(InputError, match=rf"{task} needs at least \d+ tokens here, asked for 40") as error:
            generate(task, 40, tok, n_samples=1)
        assert "\n" not in str(error.value)


def test_the_minimum_that_the_error_names_is_enough() -> None:
    for task in NIAH:
        with pytest.raises(InputError) as error:
            generate(task, 40, tokenizer("bytes"), n_samples=1)
        least = int(re.search(r"least (\d+)", str(error.value)).group(1))
        generate(task, least + 400, tokenizer("bytes"), n_samples=1)


def test_running_out_of_words_is_an_error_and_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="niah_multikey_2 has too few different words for 500 tokens"):
        generate("niah_multikey_2", 500, tokenizer("word"), n_samples=1)
    few = [f"Name{i:03d}" for i in range(20)]
    monkeypatch.setattr("cachecraft_lab.ruler_tasks.invented_names", lambda rng: few)
    with pytest.raises(InputError, match="qa_1_synthetic has too few different words for 1024 tokens"):
        generate("qa_1", 1024, tokenizer("gpt2"), n_samples=1)


def test_repr_is_short() -> None:
    text = repr(samples("niah_multiquery")[0])
    assert len(text) < 500 and "niah_multiquery-600-s0-0000" in text


def test_shipped_text_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    essay = "\n".join(ruler_text.essay()) + "\n"
    assert hashlib.sha256(essay.encode()).hexdigest() == ruler_text.ESSAY_SHA256
    assert essay.isascii() and not re.search(r"\d{3}|[_<>{}\[\]=`*]", essay)
    adjectives, nouns = ruler_text.words()
    assert len(adjectives) > 500 and len(nouns) > 4000
    monkeypatch.setattr(ruler_text, "WORDS_SHA256", "0" * 64)
    ruler_text.words.cache_clear()
    with pytest.raises(InputError, match=r"wonderwords==3\.0\.1"):
        ruler_text.words()
    ruler_text.words.cache_clear()


def test_no_key_lies_inside_another() -> None:
    adjectives, nouns = ruler_text.key_words()
    assert not [a for a in adjectives for b in adjectives if a != b and a.endswith(b)]
    assert not [a for a, b in zip(nouns[1:], nouns) if a.startswith(b)]
    stems = {stem.lower() for stem in ruler_text.invented_names(Random(0))}
    assert len(stems) > 3000
    assert not [s for s in stems for i in range(1, len(s)) if s[:i] in stems or s[i:] in stems]


# --- match rules ---


@pytest.mark.parametrize(
    "prediction, answers, by_all, by_part",
    [
        ("Alpha.", ["alpha", "beta"], 50, 100),
        ("beta, then ALPHA", ["alpha", "beta"], 100, 100),
        ("3128", ["12"], 100, 100),  # RULER's rule is a substring test
        ("", ["12"], 0, 0),
        ("gamma", ["alpha", "beta"], 0, 0),
        ("one two three", ["one", "two", "three", "four"], 75, 100),
        ("\x00 Alpha \x1f", ["alpha"], 100, 100),
        ("al\x07pha", ["alpha"], 0, 0),  # a control character becomes a newline, it does not vanish
        ("a\tb", ["a\nb"], 100, 100),
        ("x", ["X", "X"], 100, 100),
    ],
)
def test_matches_equal_rulers_definition(prediction: str, answers: list[str], by_all: float, by_part: float) -> None:
    assert string_match_all(prediction, answers) == by_all
    assert string_match_part(prediction, answers) == by_part
    assert score("niah_multivalue", prediction, answers) == by_all
    assert score("qa_2_synthetic", prediction, answers) == by_part


@pytest.mark.parametrize("answers", [[], "12"])
def test_references_must_be_a_filled_sequence(answers: object) -> None:
    with pytest.raises(InputError, match="answers"):
        string_match_all("12", answers)


@pytest.mark.parametrize(
    "prediction, visible, cut",
    [
        ("12", "12", False),
        ("<think>12</think>34", "34", False),
        ("12</think>34", "34", False),
        ("<think>a</think>b<think>c</think>d", "bd", False),
        ("so <think>12", "so ", True),
    ],
)
def test_think_text_is_not_matched(prediction: str, visible: str, cut: bool) -> None:
    assert ruler.visible_text(prediction) == (visible, cut)
    assert score("niah_single_1", prediction, ["12"]) == (100 if "12" in visible else 0)
    assert ("truncated-think" in ruler.flags(prediction, ["12"])) == cut


@pytest.mark.parametrize(
    "prediction, answers, expected",
    [
        ("3128", ["12"], ("embedded-match",)),
        ("3128 or 12", ["12"], ()),
        ("it is 12.", ["12"], ()),
        ("13", ["12"], ()),
        ("", ["12"], ("empty",)),
        (" \x00\n", ["12"], ("empty",)),
        ("the the the the th", ["12"], ("repeated-token",)),
        ("!!!!!!!!", ["12"], ("repeated-token",)),
        ("the cat saw the cat", ["12"], ()),
        ("7777177", ["7777177"], ()),
    ],
)
def test_flags(prediction: str, answers: list[str], expected: tuple[str, ...]) -> None:
    assert ruler.flags(prediction, answers) == expected


# --- the hub's layout ---


@pytest.fixture
def rows() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "context": [f"context {i}\n" for i in range(30)],
            "question": "Which?",
            "answer_prefix": "It is",
            "answer": [[str(i), "x"] for i in range(30)],
            "task": ["vt"] * 10 + ["qa_1"] * 20,
            "max_new_tokens": [30] * 10 + [32] * 20,
        }
    )


def test_local_rows_become_samples(rows: pd.DataFrame, tmp_path) -> None:
    (tmp_path / "4096").mkdir()
    rows[:15].to_parquet(tmp_path / "4096" / "test-0.parquet")
    rows[15:].to_parquet(tmp_path / "4096" / "test-1.parquet")
    loaded = ruler.load_hub(4096, path=tmp_path)
    assert len(loaded) == 30 and len({s.id for s in loaded}) == 30
    assert loaded[12] == RulerSample("qa_1", "context 12\n", "Which?", "It is", ("12", "x"), 32, "qa_1-4096-local-0002")
    assert ruler.load_hub("4096", path=tmp_path / "4096" / "test-0.parquet") == loaded[:15]
    assert ruler.load_hub(4096, path=tmp_path / "4096") == loaded


def test_a_fraction_is_seeded_and_taken_of_each_task(rows: pd.DataFrame, tmp_path) -> None:
    rows.to_parquet(tmp_path / "all.parquet")
    some = ruler.load_hub(4096, path=tmp_path, fraction=0.2, seed=1)
    assert Counter(s.task for s in some) == {"vt": 2, "qa_1": 4}
    assert some == ruler.load_hub(4096, path=tmp_path, fraction=0.2, seed=1)
    assert some != ruler.load_hub(4096, path=tmp_path, fraction=0.2, seed=2)
    assert {s.id for s in some} <= {s.id for s in ruler.load_hub(4096, path=tmp_path)}, "ids stay with their rows"
    only = ruler.load_hub(4096, path=tmp_path, fraction=0.2, seed=1, tasks=["vt"])
    assert only == [s for s in some if s.task == "vt"]


def test_bad_hub_data_is_named(rows: pd.DataFrame, tmp_path) -> None:
    path = tmp_path / "rows.parquet"
    rows.drop(columns="answer_prefix").to_parquet(path)
    with pytest.raises(InputError, match=r"lacks the column\(s\) answer_prefix;"):
        ruler.load_hub(4096, path=path)
    rows.to_parquet(path)
    with pytest.raises(InputError, match="no task cwe; it has qa_1, vt"):
        ruler.load_hub(4096, path=path, tasks=["cwe"])
    with pytest.raises(InputError, match="no RULER parquet"):
        ruler.load_hub(4096, path=tmp_path / "nowhere")
    with pytest.raises(InputError, match="fraction"):
        ruler.load_hub(4096, path=path, fraction=0)


def test_no_hub_names_the_offline_choice() -> None:
    with pytest.raises(InputError, match=r"simonjegou/ruler config 4096.*generate") as error:
        ruler.load_hub(4096)
    assert "\n" not in str(error.value)


PINNED = "2ac08522128e8d89fb3f4e9de8e3fca4b4f96c6188be64bcf05627adfc3f8ea3"
