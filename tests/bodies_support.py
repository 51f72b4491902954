"""Tiny settings of each body, for the tests."""

import dataclasses

import torch

from models.bodies import BODIES, Body
from models.bodies.gemma3 import Gemma3Config
from models.bodies.gpt2 import GPT2Config
from models.bodies.llama import LlamaConfig

TINY = {"width": 48, "layers": 3, "heads": 4, "ffn": 80, "context": 40}
CONFIGS = {
    "gpt2": GPT2Config(**TINY),
    "llama": LlamaConfig(**TINY, kv_heads=2),
    "gemma3": Gemma3Config(**TINY, head_dim=16, window=7, global_every=3, query_pre_attn_scalar=20.0),
}


def plain(name: str, **changes) -> Body:
    """The tiny body called ``name`` with some settings changed, as it is initialised."""
    return BODIES[name][1](dataclasses.replace(CONFIGS[name], **changes))


def build(name: str, **changes) -> Body:
    """The same, with every parameter (norm gains and biases too) moved away from its neutral value."""
    body = plain(name, **changes)
    with torch.no_grad():
        for parameter in body.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return body
