"""evaluate(): what a record says, what it costs, and that bad input never reaches the model."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from tiny import tiny_lm

from cachecraft_lab.compress import kept_bytes
from cachecraft_lab.decode import decode_one
from cachecraft_lab.errors import InputError
from cachecraft_lab.evaluate import Counts, evaluate
from cachecraft_lab.policies import keep, make_policy, register_policy
from cachecraft_lab.policies.base import _REGISTRY
from cachecraft_lab.prefill import prefill
from cachecraft_lab.prompt import encode_prompt
from cachecraft_lab.ruler import RulerSample, score
from cachecraft_lab.select import kept_count

SNAPKV = {"name": "snapkv", "window_size": 16}
FRC = {"name": "frc", "window": 60}
TIMES = ["sample_seconds"]


def sample(seed: int, letters: int = 300, **changes) -> RulerSample:
    """Words without meaning: every layer of a random model sees varied tokens."""
    drawn = torch.randint(97, 123, (letters,), generator=torch.Generator().manual_seed(seed)).tolist()
    text = "".join(" " if i % 6 == 5 else chr(c) for i, c in enumerate(drawn))
    made = RulerSample("niah_single_1", text + "\n", "What was said? ", "It was", ("x", "y"), 8, f"s-{seed}")
    return replace(made, **changes)


SAMPLES = [sample(0), sample(1, letters=200)]


@pytest.fixture(scope="module")
def llama():
    return tiny_lm("llama")


@pytest.fixture(scope="module")
def records(llama) -> pd.DataFrame:
    return evaluate(llama, SAMPLES, ["full", "knorm", SNAPKV], [0.5, 0.9])


# --- records ---------------------------------------------------------------------------------------------------------


def test_one_row_a_sample_policy_and_ratio_in_that_order(records):
    expected = [
        (s.id, policy, ratio)
        for s in SAMPLES
        for policy, ratio in [("full", 0.0), ("knorm", 0.5), ("knorm", 0.9), ("snapkv", 0.5), ("snapkv", 0.9)]
    ]
    assert list(zip(records["sample_id"], records["policy"], records["ratio"], strict=True)) == expected


def test_columns_are_those_that_the_docs_explain(records):
    page = (Path(__file__).parent.parent / "docs" / "records.md").read_text()
    first_cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    explained = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    of_the_grid = {"run", "git_commit", "length", "data"}
    assert set(records.columns) == explained - of_the_grid


def test_a_row_holds_what_one_answer_alone_gives(llama, records):
    for s in SAMPLES:
        prompt = encode_prompt(llama, s.context, s.question, s.answer_prefix)
        full = prefill(llama, prompt.context_ids)
        for spec in ("knorm", SNAPKV):
            policy = make_policy(spec)
            for ratio, kept in keep(policy, full, [0.5, 0.9]).items():
                row = records[
                    (records["sample_id"] == s.id) & (records["policy"] == policy.name) & (records["ratio"] == ratio)
                ].iloc[0]
                alone = decode_one(full, prompt.question_ids, kept, 8)
                text = llama.tokenizer.decode(alone.token_ids, skip_special_tokens=True)
                n = prompt.context_ids.shape[1]
                assert row["prediction"] == text
                assert (row["new_tokens"], row["finish_reason"]) == (len(alone.token_ids), alone.finish_reason)
                assert row["score"] == score(s.task, text, s.answers)
                assert json.loads(row["answers"]) == list(s.answers)
                assert row["kept"] == row["kept_min"] == row["kept_max"] == kept_count(n, ratio)
                assert row["cache_bytes"] == kept_bytes(full, kept) and row["full_cache_bytes"] == full.nbytes
                assert (row["context_tokens"], row["question_tokens"]) == (n, prompt.question_ids.shape[1])
                assert json.loads(row["policy_params"]) == policy.params()
                assert (row["storage"], row["positions"]) == ("removed", "original")


def test_a_row_says_how_the_model_ran(records):
    row = records.iloc[0]
    assert (row["model"], row["architecture"]) == ("tiny-llama", "LlamaForCausalLM")
    assert (row["dtype"], row["device"], row["attn_implementation"]) == ("float32", "cpu", "sdpa")
    assert (row["n_layers"], row["n_heads"], row["n_kv_heads"], row["head_dim"]) == (2, 4, 2, 16)
    assert row["prompt_format"] == "chat" and len(row["tokenizer_hash"]) >= 12 and len(row["template_hash"]) >= 12
    assert "rope_theta" in row["rope"]


def test_full_cache_rows_keep_everything(records):
    rows = records[records["policy"] == "full"]
    assert len(rows) == len(SAMPLES) and set(rows["ratio"]) == {0.0} and set(rows["policy_params"]) == {"{}"}
    assert (rows["kept"] == rows["context_tokens"]).all()
    assert (rows["cache_bytes"] == rows["full_cache_bytes"]).all()


def test_an_answer_that_the_limit_cut_off_says_so(llama):
    endless = replace(llama, model=llama.model)
    endless.__dict__["eos_ids"] = ()  # a model that never ends an answer
    rows = evaluate(endless, [sample(3)], ["full", "knorm"], [0.5])
    assert set(rows["finish_reason"]) == {"length"} and set(rows["new_tokens"]) == {8}
    ending = replace(llama, model=llama.model)
    ending.__dict__["eos_ids"] = tuple(range(480))  # one whose every token ends it
    rows = evaluate(ending, [sample(3)], ["full", "knorm"], [0.5])
    assert set(rows["finish_reason"]) == {"eos"} and set(rows["new_tokens"]) == {1}


def test_the_cap_only_shortens_a_tasks_own_limit(llama):
    samples = [sample(0, max_new_tokens=3), sample(1, max_new_tokens=9)]
    assert list(evaluate(llama, samples, ["full"], [])["max_new_tokens"]) == [3, 9]
    capped = evaluate(llama, samples, ["full"], [], max_new_tokens=5)
    assert list(capped["max_new_tokens"]) == [3, 5]
    assert (capped["new_tokens"] <= capped["max_new_tokens"]).all()


def test_pyramid_rows_give_the_real_counts(llama):
    row = evaluate(llama, [sample(0)], [{"name": "pyramidkv", "window_size": 4}], [0.5]).iloc[0]
    n = row["context_tokens"]
    assert row["kept"] == n // 2 and row["kept_min"] < n // 2 < row["kept_max"]
    assert row["cache_bytes"] == 2 * (n // 2) * row["full_cache_bytes"] // (2 * n)


def test_flags_stand_beside_the_score(llama, monkeypatch):
    """What a reader would see is scored; think text is not, and one that was cut off is flagged."""
    said = {0: "<think>the x is</think> 3128", 1: "<think>x y x y"}
    for i, (flags, points) in {0: ({"embedded-match"}, 50.0), 1: ({"truncated-think", "empty"}, 0.0)}.items():
        monkeypatch.setattr(type(llama.tokenizer), "decode", lambda self, ids, text=said[i], **kwargs: text)
        row = evaluate(llama, [sample(0, answers=("12", "x"))], ["full"], []).iloc[0]
        assert row["prediction"] == said[i]
        assert set(row["flags"].split(",")) == flags and row["score"] == points


def test_the_same_call_gives_the_same_records(llama, records):
    again = evaluate(llama, SAMPLES, ["full", "knorm", SNAPKV], [0.5, 0.9])
    pd.testing.assert_frame_equal(records.drop(columns=TIMES), again.drop(columns=TIMES))
    assert (records["sample_seconds"] > 0).all()


def test_a_sample_does_not_depend_on_its_neighbours_nor_a_policy_on_the_others(llama, records):
    alone = evaluate(llama, SAMPLES[1:], [SNAPKV], [0.9])
    same = records[(records["sample_id"] == "s-1") & (records["policy"] == "snapkv") & (records["ratio"] == 0.9)]
    pd.testing.assert_frame_equal(alone.drop(columns=TIMES), same.drop(columns=TIMES).reset_index(drop=True))


def test_settings_and_awareness_are_columns(llama):
    rows = [evaluate(llama, [sample(0)], ["knorm"], [0.5], query_aware=aware).iloc[0] for aware in (False, True)]
    assert [row["setting"] for row in rows] == ["query-agnostic", "query-aware"]
    assert rows[1]["context_tokens"] > rows[0]["context_tokens"]  # the question is in what is compressed
    assert rows[1]["question_tokens"] < rows[0]["question_tokens"]


def test_prefill_in_chunks_changes_no_answer(llama, records):
    pieces = evaluate(llama, SAMPLES, ["full", "knorm", SNAPKV], [0.5, 0.9], chunk_size=50, memory_budget=1)
    assert list(pieces["prediction"]) == list(records["prediction"])


# --- cost ------------------------------------------------------------------------------------------------------------


def test_ten_policies_at_five_ratios_cost_one_prefill_a_sample(llama):
    policies = [
        "random",
        "knorm",
        "streaming_llm",
        SNAPKV,
        "tova",
        "keydiff",
        {"name": "lagkv", "lag_size": 16},
        "expected_attention",
        {"name": "chunkkv", "window_size": 16},
        {"name": "frc", "window": 16},
    ]
    lengths = []  # tokens of each forward call, seen from outside
    hook = llama.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    counts, done = Counts(), []
    try:
        rows = evaluate(llama, SAMPLES, policies, [0.25, 0.5, 0.75, 0.88, 0.95], counts=counts, progress=done.append)
    finally:
        hook.remove()
    contexts = list(rows.drop_duplicates("sample_id")["context_tokens"])
    assert len(rows) == 2 * 50 and done == SAMPLES
    assert [n for n in lengths if n in contexts] == contexts  # one a sample, each of the whole context
    assert counts.prefill_forward_passes == 2
    assert counts.decode_forward_passes == len(lengths) - 2 <= 2 * 8
    assert (counts.samples, counts.records, counts.rows) == (2, 100, 100)
    assert counts.rows_decoded <= counts.rows
    assert all(seconds > 0 for seconds in counts.seconds.values())


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.fixture
def untouchable():
    """A model that may be asked for its settings and never to run."""

    def refuse(*args, **kwargs):
        raise AssertionError("the model ran")

    lm = tiny_lm("llama", max_position_embeddings=256)
    lm.model.forward = lm.model.model.forward = refuse
    return lm


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": []}, "samples is empty"),
        ({"policies": []}, "policies is empty"),
        ({"ratios": []}, "ratios is empty"),
        ({"ratios": [0.5, 1.0]}, r"1.0 is outside \[0, 1\)"),
        ({"ratios": [-0.1]}, r"-0.1 is outside \[0, 1\)"),
        ({"ratios": [float("nan")]}, r"nan is outside \[0, 1\)"),
        ({"ratios": [0.5, 0.5]}, "ratios repeat"),
        ({"policies": ["knorm", "snapvk"]}, "did you mean 'snapkv'"),
        ({"policies": [{"name": "snapkv", "window": 8}]}, "'window'"),
        ({"policies": ["knorm", "tova", "knorm"]}, "'knorm' is named twice"),
        ({"policies": [SNAPKV, {**SNAPKV, "kernel_size": 5}]}, "'snapkv' is named twice"),
        ({"policies": ["full", "full"]}, "'full' is named twice"),
        ({"policies": ["observed_attention"]}, "attn_implementation='eager'"),
        ({"samples": [sample(0, letters=60)], "policies": ["snapkv"]}, r"at least 65 tokens.* s-0 has \d+:"),
        ({"samples": [sample(0, letters=150), sample(1, letters=5)], "policies": [FRC]}, r"at least 61 .*s-1 has \d+:"),
        ({"samples": [sample(0), sample(1, letters=700)]}, "exceed the 256 positions"),
        ({"samples": [sample(0, max_new_tokens=500)]}, "exceed the 256 positions"),
        ({"samples": [sample(0), sample(0)]}, "ids repeat"),
        ({"samples": [sample(0, context="")]}, "context is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1"),
    ],
)
def test_bad_input_is_one_line_before_any_model_work(untouchable, changes, message):
    arguments = {"samples": [sample(0, letters=150)], "policies": ["knorm"], "ratios": [0.5], **changes}
    with pytest.raises(InputError, match=message) as error:
        evaluate(untouchable, **arguments)
    assert "\n" not in str(error.value)


def test_two_parameter_sets_of_one_policy_are_two_policies(llama):
    rows = evaluate(llama, [sample(0)], [SNAPKV, {**SNAPKV, "window_size": 8}], [0.5])
    assert [json.loads(p)["window_size"] for p in rows["policy_params"]] == [16, 8]


def test_a_policy_that_breaks_its_contract_gives_no_record(llama, monkeypatch):
    monkeypatch.setattr("cachecraft_lab.policies.base._REGISTRY", dict(_REGISTRY))
    register_policy("broken")(lambda layer: layer.keys.norm(dim=-1) * float("nan"))
    with pytest.raises(InputError, match=r"policy broken, layer 0: .* NaN"):
        evaluate(llama, SAMPLES, ["knorm", "broken"], [0.5])
