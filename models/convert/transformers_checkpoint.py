"""Loading a model with transformers, proving that ours computes the same, and writing the checkpoint."""

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.arm import LanguageModel, ModelDescription
from models.convert.transformers_models import describe_model, is_tied, model_weights
from models.errors import UserError
from models.files import recover
from models.packages import PACKAGED, need, packaged_gguf
from models.settings import DataSettings, RunSettings, TrainSettings
from models.training.checkpoint import Snapshot, blank_model, write_checkpoint
from models.vocab.tokenizer import Tokenizer, load_tokenizer

TOLERANCE = 1e-4  # of the spread of the logits; fp32 rounding over 30 layers stays below 1e-5
PROBE_TOKENS = 64


@dataclass(frozen=True)
class Source:
    """Where a model of transformers lies: a folder, and in it a GGUF file or None; what load_tokenizer takes."""

    folder: Path
    gguf: str | None
    tokenizer: str


def locate(name: str) -> Source:
    """What ``name`` means: a folder with config.json, a .gguf file, or a packaged model. Raises UserError."""
    if name in PACKAGED:
        path = packaged_gguf(name)
        return Source(path.parent, path.name, name)
    path = Path(name)
    if path.is_file() and path.suffix == ".gguf":
        return Source(path.parent, path.name, str(path))
    if (path / "config.json").is_file():
        return Source(path, None, str(path))
    packaged = ", ".join(PACKAGED)
    raise UserError(f"{name}: expected a folder with config.json, a .gguf file, or one of the packaged models ({packaged})")


def load_transformers(source: Source) -> nn.Module:
    """The model in fp32 on the CPU, in evaluation mode, from local files only.

    Raises UserError when transformers refuses it, and when its weights are not those of its configuration: transformers only warns
    of weights that are missing, and fills in random ones.
    """
    transformers = need("transformers", "a model of transformers")
    if source.gguf:
        need("gguf", "reading GGUF")
        need("accelerate", "loading a GGUF file")
    path = source.folder / (source.gguf or "")
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            source.folder, gguf_file=source.gguf, dtype=torch.float32, local_files_only=True, trust_remote_code=False,
            output_loading_info=True,
        )  # fmt: skip
    except MemoryError:
        raise
    except Exception as error:  # its checks of settings and files raise of many kinds
        raise UserError(f"{path}: transformers cannot load it ({' '.join(str(error).split())})") from error
    for what in ("missing", "unexpected"):
        if names := sorted(found[f"{what}_keys"]):
            raise UserError(f"{path}: its weights are not those of its config.json: {len(names)} {what}, such as {names[0]}")
    return model.eval()


def from_transformers(hf: nn.Module) -> LanguageModel:
    """Our model with the weights of a transformers causal language model (shared, not copied, where the layout allows).

    Raises UserError when our bodies compute something else.
    """
    tied = is_tied(hf)
    description = describe_model(hf.config, tied)
    model = blank_model(description)
    try:
        model.load_state_dict(model_weights(hf, tied), strict=True, assign=True)
    except RuntimeError as error:
        raise UserError(f"its weights do not fit the {description.kind} body ({error})") from error
    return model.eval()


@torch.inference_mode()
def difference(model: LanguageModel, hf: nn.Module, tokens: int = PROBE_TOKENS) -> float:
    """Largest difference of the logits on random ids over their standard deviation."""
    tokens = min(tokens, model.description.body.context)
    ids = torch.randint(model.description.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    expected = hf(ids).logits
    return ((model.logits(ids) - expected).abs().max() / expected.std()).item()


def convert(source: Source, tokenizer: str, out: Path) -> dict[str, Any]:
    """Write the model at ``source`` to the folder ``out`` as a checkpoint of ours; returns what a report says of it.

    Raises UserError, and writes nothing, when the model or its tokenizer is not supported or the logits differ.
    """
    text = load_tokenizer(tokenizer)
    hf = load_transformers(source)
    model = from_transformers(hf)
    description = model.description
    if text.vocab_size > description.vocab_size:
        sizes = f"has {text.vocab_size:,} tokens, the model only {description.vocab_size:,}"
        raise UserError(f"{tokenizer}: {sizes}; give the model's own with --tokenizer")
    largest = difference(model, hf)
    if not largest < TOLERANCE:
        raise UserError(f"{source.folder}: our logits differ from transformers' by {largest:.1e} of their spread: not converted")
    write(model, text, out)
    return {
        "parameters": sum(p.numel() for p in model.parameters()), "kind": description.kind, "head": description.arm.head,
        "vocab_size": description.vocab_size, "difference": largest, "tokens": min(PROBE_TOKENS, description.body.context),
    }  # fmt: skip


def write(model: LanguageModel, tokenizer: Tokenizer, out: Path) -> None:
    """Write ``model`` and its tokenizer as the checkpoint ``out``, without an optimizer."""
    state = {"step": 0, "tokens": 0, "data": "", "tokenizer": tokenizer.fingerprint, "codes": None}
    state["start_id"] = tokenizer.added_start()  # such models are trained, and asked, with what their tokenizer adds
    recover(out)  # what a killed process left of it
    with tempfile.TemporaryDirectory() as scratch:
        saved = tokenizer.save(Path(scratch) / "tokenizer.json")
        write_checkpoint(out, Snapshot(model, None, state, asdict(settings_of(model.description)), saved))


def settings_of(description: ModelDescription) -> RunSettings:
    """Settings under which evaluate.py scores the model: windows of up to 1,024 tokens, a few at a time."""
    return RunSettings(
        arm=description.arm, data=DataSettings(seq_len=min(1024, description.body.context)), train=TrainSettings(batch_size=4)
    )
