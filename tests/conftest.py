"""Fixtures that tests share. No test reaches a model hub; models are the embedded one and tiny random ones."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported, so before everything else
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import tiny
from transformers.utils import logging as transformers_logging

from cachecraft_lab.models import LoadedModel, load_model

transformers_logging.disable_progress_bar()


@pytest.fixture(scope="session")
def lm() -> LoadedModel:
    """The embedded model in float32 on the CPU; converted on a machine's first run."""
    return load_model("smollm2-135m", dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def tiny_lm():
    """``tiny.tiny_lm``: arch, attention kernel and config overrides -> LoadedModel around a random 2-layer model."""
    return tiny.tiny_lm


@pytest.fixture(scope="session")
def tiny_llama() -> LoadedModel:
    return tiny.tiny_lm("llama")


@pytest.fixture(scope="session")
def tiny_qwen2() -> LoadedModel:
    return tiny.tiny_lm("qwen2")


@pytest.fixture(scope="session")
def tiny_qwen3() -> LoadedModel:
    return tiny.tiny_lm("qwen3")


@pytest.fixture(scope="session")
def tiny_mistral() -> LoadedModel:
    return tiny.tiny_lm("mistral")
