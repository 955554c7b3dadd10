"""Model name -> a folder in hub layout whose config and files are known to be good, before weights are read."""

from __future__ import annotations

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import errors as hub
from huggingface_hub import hf_hub_download, snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .embedded import EMBEDDED, embedded_folder
from .errors import InputError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
HUB_SKIP = ["original/*", "consolidated*"]  # the same weights once more, in their maker's own layout


@dataclass(frozen=True)
class Source:
    """Where a model's files are.

    Attributes:
        name: as asked for.
        folder: config, safetensors weights and tokenizer.
        revision: hub commit, or ``sha256:`` and 12 hex digits of the weights.
        fix: what to do if the files turn out to be bad.
    """

    name: str
    folder: Path
    revision: str
    fix: str


def find_source(name: str, revision: str | None = None) -> Source:
    """Resolve the embedded name, a folder, or a hub id (downloaded if the hub's cache does not hold it).

    Raises:
        InputError: not found, not reachable, not supported, or with files missing or cut short.
    """
    path = Path(name).expanduser()
    is_hub_id = re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) is not None and not path.is_dir()
    if is_hub_id:
        source = _hub_source(name, revision)
    elif revision is not None:
        raise InputError(f"revision={revision!r} is for hub models, {name!r} is none: leave it out")
    elif name == EMBEDDED:
        folder, digest = embedded_folder()
        source = Source(name, folder, f"sha256:{digest[:12]}", f"delete {folder} and run again")
    elif path.is_dir():
        source = Source(name, path, "", "copy the model folder again")
    else:
        raise InputError(
            f"model {name!r}: no such folder, and neither a hub id (org/name) nor the embedded {EMBEDDED!r}: check it"
        )
    check_config(name, read_config(source))
    files = check_files(source)
    return source if source.revision else Source(name, path, weights_digest(files), source.fix)


def read_config(source: Source) -> PreTrainedConfig:
    """The folder's config; code that a repository ships is never run."""
    if not (source.folder / "config.json").is_file():
        raise InputError(f"{source.name}: no config.json in {source.folder}: give a folder in hub layout")
    try:
        return AutoConfig.from_pretrained(source.folder, trust_remote_code=False)
    except Exception as error:  # unreadable, or of a kind that this transformers does not know
        raise InputError(
            f"{source.name}: its config.json cannot be used ({first_line(error)}): {source.fix}"
        ) from error


def check_config(name: str, config: PreTrainedConfig) -> None:
    """Refuse an architecture whose attention we do not read, and active sliding windows.

    Raises:
        InputError: unsupported, by name and with the reason.
    """
    architecture = (config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)])[0]
    if architecture not in ARCHITECTURES:
        raise InputError(
            f"{name}: {architecture or config.model_type} is not supported: use one of {', '.join(ARCHITECTURES)}"
        )
    layer_types = getattr(config, "layer_types", None) or ()
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in layer_types or (config.model_type == "mistral" and window is not None):
        raise InputError(
            f"{name}: sliding-window attention (window {window}) already drops old KV pairs, so a compression ratio "
            "would not mean what it says: use a model with full attention in every layer"
        )


def check_files(source: Source) -> list[Path]:
    """The weights files, all there and whole, beside a tokenizer; safetensors only, as reading a pickle runs code."""
    folder = source.folder
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        files = [single]
    elif index.is_file():
        try:
            files = [folder / shard for shard in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, KeyError) as error:
            raise InputError(f"{source.name}: {index} does not list the weights: {source.fix}") from error
    else:
        raise InputError(f"{source.name}: no model.safetensors in {folder}: {source.fix}")
    for file in files:
        if not file.is_file():
            raise InputError(f"{source.name}: weights file {file.name} is missing in {folder}: {source.fix}")
        try:
            with safe_open(file, "pt"):  # reads the header and compares it with the file's length
                pass
        except SafetensorError as error:
            raise InputError(f"{source.name}: {file} is damaged or cut short: {source.fix}") from error
    # without one transformers makes an empty tokenizer and goes on
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise InputError(f"{source.name}: no tokenizer ({' or '.join(TOKENIZER_FILES)}) in {folder}: {source.fix}")
    return files


def weights_digest(files: list[Path]) -> str:
    """``sha256:`` and 12 hex digits over the content of the weights files."""

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(max_workers=4) as pool:
        return f"sha256:{short_hash(' '.join(pool.map(digest, files)))}"


def _hub_source(name: str, revision: str | None) -> Source:
    """Snapshot folder and commit of a hub model; its config is checked before its weights are downloaded."""
    fix = f"run `hf download {name} --force-download`"
    try:
        config = Path(hf_hub_download(name, "config.json", revision=revision))
        source = Source(name, config.parent, config.parent.name, fix)
        check_config(name, read_config(source))
        _complete(source)
    except InputError:
        raise
    except Exception as error:  # many kinds, those of the HTTP library among them
        raise InputError(_hub_message(name, revision, error)) from error
    return source


def _complete(source: Source) -> None:
    """Download what the snapshot lacks; offline, what is there may do."""
    try:
        snapshot_download(source.name, revision=source.revision, allow_patterns=HUB_FILES, ignore_patterns=HUB_SKIP)
    except Exception as error:
        try:
            check_files(source)
        except InputError:
            raise error from None


def _hub_message(name: str, revision: str | None, error: Exception) -> str:
    """One line for what went wrong, made from the kind of error, so that no header or token gets into it."""
    offline = f"use the embedded {EMBEDDED!r} or the path of a model folder"
    if isinstance(error, hub.GatedRepoError):
        return f"{name} is gated: accept its licence at https://huggingface.co/{name}, then run `hf auth login`"
    if isinstance(error, hub.RevisionNotFoundError):
        return f"{name}: the hub has no revision {revision!r}: check it"
    if isinstance(error, hub.RepositoryNotFoundError):
        return f"{name}: not on the hub, or private: check the name, or run `hf auth login`"
    if isinstance(error, (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled)):
        return f"{name}: the hub cannot be reached and its cache does not hold the whole model: {offline}"
    if isinstance(error, hub.EntryNotFoundError):
        return f"{name}: the hub's repository has no config.json, so it is no transformers model: check the name"
    detail = f", {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
    return f"{name}: download failed ({type(error).__name__}{detail}): try again, or {offline}"


def short_hash(text: str) -> str:
    """12 hex digits of a text's sha256."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def first_line(error: BaseException) -> str:
    """An error's first line, not longer than a line should be."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
