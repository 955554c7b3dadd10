"""Tiny random models and a small tokenizer, made in-process: what tests run when a trained model is not the point.

Two layers, 4 query heads, 2 KV heads of 16, float32, seeded. The weights are drawn wide (0.2, not 0.02) so that
attention is uneven and greedy decoding neither ties nor repeats one token.
"""

from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cachecraft_lab.models import LoadedModel, set_prompt_format

VOCABULARY = 480
MAX_LENGTH = 4096
ARCHITECTURES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}

LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA3_SYSTEM_TEMPLATE = (
    "{{ bos_token + '<|start_header_id|>system<|end_header_id|>\n\nToday<|eot_id|>' }}"
    + LLAMA3_TEMPLATE.removeprefix("{{ bos_token }}")
)
QWEN3_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
QWEN2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '[INST] ' + message['content'] + '[/INST]' }}{% endfor %}"
)

# template, BOS (None: the tokenizer has none, as Qwen's), EOS
CHAT = {
    "llama": (LLAMA3_TEMPLATE, "<|begin_of_text|>", "<|eot_id|>"),
    "qwen2": (QWEN2_TEMPLATE, None, "<|im_end|>"),
    "qwen3": (QWEN3_TEMPLATE, None, "<|im_end|>"),
    "mistral": (MISTRAL_TEMPLATE, "<|begin_of_text|>", "<|eot_id|>"),
}
SPECIAL = [
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "[INST]",
    "[/INST]",
]
TEXT = """
The harbour opened at six. Boats came in with the tide, and the clerks wrote down every crate, barrel and name.
One of the special magic numbers for quiet-river is: 7341908. Remember it. I will quiz you about the number later.
What is the special magic number for quiet-river mentioned in the provided text? The answer is 25 or 36 or 9081.
The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. A memory of snow, of salt
and of bread; nobody asked who had counted the lamps along the northern road, nor why the letters never arrived."""


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    return tokenizer.to_str()


def tiny_tokenizer(arch: str = "llama", *, template: str | None = "own") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the chat template of ``arch``.

    Where ``arch`` has a BOS, plain encoding adds it and the template writes it, as with Llama 3: the doubled-BOS trap.
    """
    own, bos, eos = CHAT[arch]
    tokenizer = Tokenizer.from_str(_trained())
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=eos,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=own if template == "own" else template,
    )


def tiny_model(
    arch: str = "llama", attn_implementation: str = "sdpa", *, seed: int = 0, **config_overrides
) -> PreTrainedModel:
    """A random model of ``arch`` in eval mode, float32 on the CPU; ``config_overrides`` go to its config."""
    config_class, model_class = ARCHITECTURES[arch]
    tokenizer = tiny_tokenizer(arch)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.2,
        "max_position_embeddings": MAX_LENGTH,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }
    if arch == "mistral":
        settings["sliding_window"] = None
    if arch == "qwen2":
        del settings["head_dim"]  # hidden_size / num_attention_heads, 16 too
    config = config_class(**(settings | config_overrides))
    config._attn_implementation = attn_implementation
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
    return model.eval().requires_grad_(False)


def tiny_lm(
    arch: str = "llama",
    attn_implementation: str = "sdpa",
    *,
    prompt_format: str | None = None,
    seed: int = 0,
    **config_overrides,
) -> LoadedModel:
    """A tiny model with its tokenizer, as ``load_model`` would return it."""
    tokenizer = tiny_tokenizer(arch)
    prompt_format = set_prompt_format(f"tiny-{arch}", tokenizer, prompt_format)
    model = tiny_model(arch, attn_implementation, seed=seed, **config_overrides)
    return LoadedModel(f"tiny-{arch}", model, tokenizer, prompt_format)


def save_tiny(folder: Path, arch: str = "llama", *, template: str | None = "own", **config_overrides) -> Path:
    """Write a tiny model and its tokenizer in hub layout; returns ``folder``."""
    tiny_model(arch, **config_overrides).save_pretrained(folder)
    tiny_tokenizer(arch, template=template).save_pretrained(folder)
    return folder
