"""Small random arms as packed files, for tests of the engine."""

import dataclasses
from pathlib import Path

import torch

from kernels.binary_code import pack_gf2_matrix
from kernels.sign_code import pack_sign_codes
from models.arm import LanguageModel, ModelDescription, build_model
from models.bodies import BODIES
from models.packed.export import pack_model
from models.packed.sections import Rounding, model_tensors
from models.packed.writing import NewTensor, write_file
from models.settings import ArmSettings
from models.vocab.fixed_data import FixedData, id_bits
from models.vocab.gf2 import matrix_for

TINY = {
    "gpt2": {"width": 64, "layers": 2, "heads": 4, "ffn": 96, "context": 192},
    "llama": {"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 88, "context": 192},
    "gemma3": {"width": 60, "layers": 3, "heads": 4, "kv_heads": 1, "head_dim": 18, "ffn": 100, "context": 320, "window": 40,
               "global_every": 3, "query_pre_attn_scalar": 18.0},
}  # fmt: skip
VOCABULARY, BITS = 1100, 96


def random_arm(
    kind: str, parts: str, *, vocabulary: int = VOCABULARY, bits: int = BITS, seed: int = 0, arm: dict | None = None, **body: object
) -> LanguageModel:
    """A model of interface/head/prior/linear in evaluation mode, bitnet layers packed, weights spread enough to decide clearly."""
    interface, head, prior, linear = parts.split("/")
    settings = ArmSettings(interface=interface, head=head, prior=prior, linear=linear, **(arm or {}))
    config = BODIES[kind][0](**TINY[kind] | {"linear": linear} | body)
    generator = torch.Generator().manual_seed(seed)
    coded = interface == "sign" or head == "code"
    description = ModelDescription(settings, kind, config, vocabulary, bits if coded else 0, input_scale=1.5)
    fixed = _fixed_data(settings, vocabulary, bits, generator)
    model = build_model(description, dataclasses.replace(fixed, code_bits=bits if coded else 0), seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.dim() < 2 else 1.5 / parameter.shape[-1] ** 0.5
            offset = 1.0 if name.endswith("norm.weight") and kind != "gemma3" else 0.0
            if name != "head.prior.values":
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread + offset)
    return pack_model(model) if linear == "bitnet" else model.eval()


def _fixed_data(arm: ArmSettings, size: int, bits: int, generator: torch.Generator) -> FixedData:
    kron = arm.interface == "kron"
    matrix = pack_gf2_matrix(matrix_for(id_bits(size), arm.gf2_seed)) if arm.interface == "gf2" else None
    return FixedData(
        size,
        words=pack_sign_codes(torch.randn(size, bits, generator=generator)),
        code_bits=bits,
        matrix=matrix,
        token_bytes=torch.randint(0, 256, (size, arm.positions), dtype=torch.uint8, generator=generator) if kron else None,
        lengths=torch.randint(0, arm.positions + 1, (size,), dtype=torch.uint8, generator=generator) if kron else None,
        prior=torch.randn(size, generator=generator) if arm.prior != "none" else None,
    )


def write_arm(model: LanguageModel, path: Path, dtype: str = "float32") -> Path:
    """The packed file of a model, matrices in ``dtype`` (float16: lift and map too); its tokens are their ids' decimal digits."""
    size = model.description.vocab_size
    words = [str(index).encode() for index in range(size)]
    ends = torch.tensor([len(word) for word in words]).cumsum(0).int().numpy().tobytes()
    about = {
        "model": model.description.to_json(),
        "context": model.description.body.context,
        "tokenizer": {"ids": size, "words": 0},
        "start_id": None,
        "eos_id": 0,
        "bos_id": None,
    }
    rounding = Rounding(dtype, map_dtype="float16" if dtype == "float16" else "float32")
    tokens = [
        NewTensor("tokenizer.json", "uint8", (2,), [b"{}"]),
        NewTensor("tokenizer.bytes", "uint8", (len(b"".join(words)),), [b"".join(words)]),
        NewTensor("tokenizer.ends", "uint32", (size,), [ends]),
    ]
    write_file(path, about, [*model_tensors(model.state_dict(), model.description.arm, rounding), *tokens])
    return path
