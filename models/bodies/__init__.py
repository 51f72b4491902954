"""Decoder bodies without a vocabulary, by kind: gpt2, llama, gemma3."""

from models.bodies.base import Body, BodyConfig
from models.bodies.cache import KVCache
from models.bodies.gemma3 import Gemma3Body, Gemma3Config
from models.bodies.gpt2 import GPT2Body, GPT2Config
from models.bodies.llama import LlamaBody, LlamaConfig

__all__ = ["BODIES", "Body", "BodyConfig", "KVCache"]

BODIES: dict[str, tuple[type[BodyConfig], type[Body]]] = {
    "gpt2": (GPT2Config, GPT2Body),
    "llama": (LlamaConfig, LlamaBody),
    "gemma3": (Gemma3Config, Gemma3Body),
}
