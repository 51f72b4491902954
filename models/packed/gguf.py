"""A checkpoint as a GGUF file, for arms that llama.cpp can compute: ordinary tables, no prior, float linear layers.

Read off llama.cpp (ggml-org 0c1e57098, src/models/{llama,gemma3,gpt2}.cpp). Its graphs differ from our bodies in layout only:

* llama: it rotates neighbouring pairs (2i, 2i + 1) where ours rotates (i, i + h/2), so the rows of q and k change places;
* gemma3: it multiplies by the gain as it is, ours by 1 + weight; it scales the embedding by sqrt(width) and queries by 1/sqrt(h);
* gpt2: q, k and v are one matrix.

Where our scales are not its own, the tables and gains take up the quotient, so that the scores are the same numbers.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from models.errors import UserError
from models.files import new_file
from models.packages import need
from models.packed.export import require_new
from models.packed.gguf_tokenizer import tokenizer_fields

if TYPE_CHECKING:
    from torch import Tensor

    from models.arm import LanguageModel, ModelDescription
    from models.training.checkpoint import Checkpoint
    from models.vocab.tokenizer import Tokenizer

# Of matrices; vectors and GPT-2's positions are always F32, as llama.cpp wants them. int8: with a scale per 32 numbers of a row.
DTYPES = {"float32": "F32", "float16": "F16", "int8": "Q8_0"}
FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "int8": "MOSTLY_Q8_0"}
Q8_BLOCK = 32
LAYERS_OF_27B = 62  # by which llama.cpp knows Gemma 3 27B, whose queries it scales by the width of an average head
_BLOCK_NAMES = {
    "attention_norm": "attn_norm", "attention.q": "attn_q", "attention.k": "attn_k", "attention.v": "attn_v",
    "attention.o": "attn_output", "attention.q_norm": "attn_q_norm", "attention.k_norm": "attn_k_norm",
    "attention_post_norm": "post_attention_norm", "mlp_norm": "ffn_norm", "mlp.gate": "ffn_gate", "mlp.up": "ffn_up",
    "mlp.down": "ffn_down", "mlp_post_norm": "post_ffw_norm",
}  # fmt: skip


def export_gguf(checkpoint: "Checkpoint", out: Path, dtype: str) -> list[dict[str, Any]]:
    """Write ``checkpoint`` as the file ``out``, whole or not at all; returns a row of how many bytes it takes, trained and packed.

    ``dtype``: one of DTYPES. Raises UserError when llama.cpp cannot compute the arm or would split text otherwise than its
    tokenizer, when the package gguf is not installed, and when ``out`` exists; OSError when the disk refuses.
    """
    require_new(out)
    require_supported(checkpoint.description, dtype, str(checkpoint.path))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(checkpoint.load_model(), checkpoint.load_tokenizer(), out, dtype)
    return [{"what": "model", "trained": checkpoint.model_bytes, "packed": out.stat().st_size}]


def require_supported(description: "ModelDescription", dtype: str, name: str) -> None:
    """Raise UserError that begins with ``name`` and says everything that llama.cpp cannot compute."""
    if found := problems(description, dtype):
        raise UserError(f"{name}: llama.cpp cannot compute this arm: {'; '.join(found)}")


def problems(description: "ModelDescription", dtype: str) -> list[str]:
    """What of a model has no place in a GGUF file of llama.cpp, each as one phrase."""
    arm, body = description.arm, description.body
    found = []
    if arm.interface != "table":
        found.append(f"its input is the {arm.interface} code (only a table)")
    if arm.head not in ("table", "tied"):
        found.append(f"its output is the {arm.head} head (only table or tied)")
    if arm.prior != "none":
        found.append(f"its scores have a {arm.prior} prior (only none)")
    if body.linear != "float":
        found.append(f"its linear layers are {body.linear}, which round activations to int8 (only float)")
    if description.kind == "gpt2" and body.heads * body.head_width != body.width:
        found.append(f"its heads together are {body.heads * body.head_width} wide (only the width, {body.width})")
    widths = {"width": body.width, "ffn": body.ffn, "width of all heads": body.heads * body.head_width}
    if dtype == "int8" and (odd := [f"{name} {n}" for name, n in widths.items() if n % Q8_BLOCK]):
        found.append(f"int8 needs rows of a multiple of {Q8_BLOCK} numbers ({', '.join(odd)} is none): use --dtype float16")
    return found


def write_gguf(model: "LanguageModel", tokenizer: "Tokenizer", out: Path, dtype: str) -> None:
    """Write a supported model and its tokenizer to ``out``; errors as in ``export_gguf``."""
    gguf = need("gguf", "writing GGUF")
    fields = tokenizer_fields(tokenizer, model.description.vocab_size)
    with new_file(out) as file:
        writer = gguf.GGUFWriter(file.name, model.description.kind)  # opens the file once more, and closes that
        _add_sizes(writer, gguf, model.description, dtype)
        fields.add_to(writer)
        for name, tensor in model_tensors(model).items():
            _add_tensor(writer, gguf, name, tensor, dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add_sizes(writer: Any, gguf: Any, description: "ModelDescription", dtype: str) -> None:
    body, kind = description.body, description.kind
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[dtype]])
    writer.add_vocab_size(description.vocab_size)
    writer.add_context_length(body.context)
    writer.add_embedding_length(body.width)
    writer.add_block_count(body.layers)
    writer.add_feed_forward_length(body.ffn)
    writer.add_head_count(body.heads)
    writer.add_head_count_kv(body.key_heads)
    writer.add_key_length(body.head_width)
    writer.add_value_length(body.head_width)
    if kind == "gpt2":
        writer.add_layer_norm_eps(body.eps)
        return
    writer.add_layer_norm_rms_eps(body.eps)
    writer.add_rope_dimension_count(body.head_width)
    writer.add_rope_freq_base(body.theta)
    if kind == "gemma3":
        writer.add_rope_freq_base_swa(body.theta_local)
        writer.add_sliding_window(body.window)
        writer.add_sliding_window_pattern(body.global_every)


def _add_tensor(writer: Any, gguf: Any, name: str, tensor: "Tensor", dtype: str) -> None:
    array = tensor.detach().float().contiguous().numpy()
    if tensor.dim() == 1 or name == "position_embd.weight" or dtype == "float32":
        writer.add_tensor(name, array)
    else:
        kind = gguf.GGMLQuantizationType[DTYPES[dtype]]
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)


def model_tensors(model: "LanguageModel") -> dict[str, "Tensor"]:
    """llama.cpp's tensors by its names, from the weights of a supported model."""
    description, state = model.description, model.state_dict()
    tensors = {}
    for name, tensor in state.items():
        if name.startswith("body.blocks."):
            _, _, index, rest = name.split(".", 3)
            part, _, end = rest.rpartition(".")
            tensors[f"blk.{index}.{_BLOCK_NAMES[part]}.{end}"] = tensor
        elif name.startswith("body.final_norm."):
            tensors[f"output_norm.{name.rpartition('.')[2]}"] = tensor
    _LAYOUTS[description.kind](tensors, description)
    if description.kind == "gpt2":
        tensors["position_embd.weight"] = state["body.position"]
    quotient = description.input_scale / (description.body.width**0.5 if description.kind == "gemma3" else 1.0)
    tensors["token_embd.weight"] = state["interface.weight"] * quotient
    if description.arm.head == "table":
        tensors["output.weight"] = state["head.weight"]
    elif quotient != 1.0:  # the table is the output's too
        for name in tensors.keys() & {"output_norm.weight", "output_norm.bias"}:
            tensors[name] = tensors[name] / quotient
    return tensors


def _llama_layout(tensors: dict[str, "Tensor"], description: "ModelDescription") -> None:
    heads = {"attn_q": description.body.heads, "attn_k": description.body.key_heads}
    for name in tensors:
        if (part := name.split(".")[-2]) in heads:
            tensors[name] = tensors[name].unflatten(0, (heads[part], 2, -1)).transpose(1, 2).flatten(0, 2)


def _gemma3_layout(tensors: dict[str, "Tensor"], description: "ModelDescription") -> None:
    body = description.body
    divisor = body.width // body.heads if body.layers == LAYERS_OF_27B else body.head_width
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            gain = tensor.float() + 1
            tensors[name] = gain * (divisor / body.query_pre_attn_scalar) ** 0.5 if "attn_q_norm" in name else gain


def _gpt2_layout(tensors: dict[str, "Tensor"], description: "ModelDescription") -> None:
    for i in range(description.body.layers):
        for end in ("weight", "bias"):
            parts = [tensors.pop(f"blk.{i}.attn_{part}.{end}") for part in "qkv"]
            tensors[f"blk.{i}.attn_qkv.{end}"] = torch.cat(parts)


_LAYOUTS = {"llama": _llama_layout, "gemma3": _gemma3_layout, "gpt2": _gpt2_layout}
