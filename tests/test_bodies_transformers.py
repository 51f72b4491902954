"""The bodies against transformers' models: the same random weights give the same logits and gradients."""

import pytest
import torch
import transformers
from bodies_support import CONFIGS, plain
from torch import nn
from torch.nn import functional as F

from models.bodies import Body, BodyConfig
from models.bodies.gemma3 import Gemma3Config
from models.bodies.gpt2 import GPT2Config
from models.bodies.llama import LlamaConfig
from models.convert.transformers_models import body_weights

V = 97

def hf_gpt2(config: GPT2Config) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=V, n_embd=config.width, n_layer=config.layers, n_head=config.heads, n_inner=config.ffn,
            n_positions=config.context, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, layer_norm_epsilon=config.eps,
            attn_implementation="sdpa",
        )
    )  # fmt: skip


def common(config: BodyConfig) -> dict:
    return {
        "vocab_size": V, "hidden_size": config.width, "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "intermediate_size": config.ffn, "max_position_embeddings": config.context, "rms_norm_eps": config.eps,
        "num_key_value_heads": config.key_heads, "head_dim": config.head_width, "attn_implementation": "sdpa",
    }  # fmt: skip


def hf_llama(config: LlamaConfig) -> nn.Module:
    settings = transformers.LlamaConfig(**common(config), rope_theta=config.theta, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(settings)


def hf_gemma3(config: Gemma3Config) -> nn.Module:
    kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
    text = transformers.Gemma3TextConfig(
        **common(config), query_pre_attn_scalar=int(config.query_pre_attn_scalar), sliding_window=config.window, layer_types=kinds,
        rope_theta=config.theta, rope_local_base_freq=config.theta_local,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(text)


def pair(name: str) -> tuple[Body, nn.Module]:
    """Our body and transformers' model, sharing the same random weights."""
    config = CONFIGS[name]
    hf = {"gpt2": hf_gpt2, "llama": hf_llama, "gemma3": hf_gemma3}[name](config).eval()
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    body = plain(name)
    body.load_state_dict(body_weights(hf))
    return body, hf


def our_logits(name: str, body: Body, hf: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    table = hf.get_input_embeddings().weight
    scale = CONFIGS[name].width ** 0.5 if name == "gemma3" else 1.0
    return body(F.embedding(ids, table) * scale) @ hf.get_output_embeddings().weight.T


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_transformers_fp32(name):
    body, hf = pair(name)
    ids = torch.randint(V, (2, 33))  # longer than the window of 7
    expected = hf(ids).logits
    torch.testing.assert_close(our_logits(name, body, hf, ids), expected, atol=1e-5, rtol=1e-5)
    shorter = our_logits(name, body, hf, ids[:, :5])
    torch.testing.assert_close(shorter, expected[:, :5], atol=1e-5, rtol=1e-5)


def widen_transformers(hf: nn.Module, config: BodyConfig) -> None:
    """transformers computes its norms, rotary angles and embedding scale in fp32 whatever the model's dtype: use fp64 there."""

    def norm_forward(self, x):
        gain = 1 + self.weight if isinstance(config, Gemma3Config) else self.weight
        eps = self.eps if isinstance(config, Gemma3Config) else self.variance_epsilon
        return gain * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)

    def rotary_forward(self, x, position_ids, layer_type=None):
        theta = config.theta_local if layer_type == "sliding_attention" else config.theta
        i = torch.arange(config.head_width // 2, dtype=torch.float64)
        angles = position_ids[..., None].double() / theta ** (2 * i / config.head_width)
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()

    for module in hf.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = norm_forward.__get__(module)
        elif kind.endswith("RotaryEmbedding"):
            module.forward = rotary_forward.__get__(module)
        elif kind == "Gemma3TextScaledWordEmbedding":
            module.embed_scale = torch.tensor(config.width**0.5, dtype=torch.float64)


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_transformers_fp64(name):
    body, hf = (m.double() for m in pair(name))
    widen_transformers(hf, CONFIGS[name])
    ids = torch.randint(V, (2, 20))
    torch.testing.assert_close(our_logits(name, body, hf, ids), hf(ids).logits, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_equal_transformers(name):
    body, hf = pair(name)
    ids = torch.randint(V, (2, 12))
    table = hf.get_input_embeddings().weight.detach()
    scale = CONFIGS[name].width ** 0.5 if name == "gemma3" else 1.0
    x = (F.embedding(ids, table) * scale).requires_grad_()
    (body(x) @ hf.get_output_embeddings().weight.detach().T).square().mean().backward()
    hf(ids).logits.square().mean().backward()
    theirs = dict(hf.named_parameters())
    mapped_name = {
        "gpt2": ("position", "transformer.wpe.weight"),
        "llama": ("blocks.0.attention.k.weight", "model.layers.0.self_attn.k_proj.weight"),
        "gemma3": ("blocks.0.attention.q_norm.weight", "model.layers.0.self_attn.q_norm.weight"),
    }[name]
    ours = dict(body.named_parameters())[mapped_name[0]].grad
    torch.testing.assert_close(ours, theirs[mapped_name[1]].grad, atol=1e-6, rtol=1e-3)
