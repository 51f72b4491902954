"""Presets: bodies and recipes by name, and arms by name. `python -m models.presets` lists what each costs.

``tiny`` and ``small`` are for a CPU. The papers' own sizes carry the papers' numbers where those are known: 1.7B decoder (Bochkov),
Gemma-3-270M shape (Bathula), GPT-2 124M (Shravan).
"""

import argparse
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from models.cli import add_common_flags, run_cli
from models.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from models.arm import ModelDescription
    from models.settings import ArmSettings, RunSettings

# name -> interface/head/prior/linear
ARMS = {
    "table": "table/table/none/float",
    "tied": "table/tied/none/float",
    "binary": "binary/table/none/float",
    "gf2": "gf2/table/none/float",
    "sign": "sign/code/fixed/float",
    "sign-trained": "sign/code/trained/float",
    "sign-bitnet": "sign/code/fixed/bitnet",
    "kron": "kron/table/none/float",
}


@dataclass(frozen=True)
class Preset:
    """One body with its recipe. ``vocab_size`` and ``code_bits`` only serve the listing: a run takes those of its data."""

    kind: str
    body: dict[str, Any]
    seq_len: int
    about: str
    vocab_size: int = 4096
    code_bits: int = 256
    scale_table: bool = False  # Gemma multiplies a table's rows by sqrt(width)
    recipe: dict[str, Any] = field(default_factory=dict)
    arms: dict[str, str] = field(default_factory=lambda: ARMS)


_TINY, _SMALL = {"width": 128, "layers": 4, "heads": 4, "context": 128}, {"width": 256, "layers": 6, "heads": 8, "context": 256}
_GEMMA_TINY = {"width": 128, "layers": 6, "heads": 4, "head_dim": 32, "context": 128, "window": 32, "query_pre_attn_scalar": 32.0}
_GEMMA_SMALL = {"width": 256, "layers": 6, "heads": 4, "head_dim": 64, "context": 256, "window": 64, "query_pre_attn_scalar": 64.0}

PRESETS = {
    "gpt2-tiny": Preset("gpt2", _TINY | {"ffn": 512}, 128, "minutes on a CPU"),
    "gpt2-small": Preset("gpt2", _SMALL | {"ffn": 1024}, 256, "an hour on a CPU"),
    "llama-tiny": Preset("llama", _TINY | {"ffn": 352}, 128, "minutes on a CPU"),
    "llama-small": Preset("llama", _SMALL | {"ffn": 704}, 256, "an hour on a CPU"),
    "gemma3-tiny": Preset("gemma3", _GEMMA_TINY | {"ffn": 352}, 128, "minutes on a CPU", scale_table=True),
    "gemma3-small": Preset("gemma3", _GEMMA_SMALL | {"ffn": 704}, 256, "an hour on a CPU", scale_table=True),
    "gpt2-124m": Preset(
        "gpt2",
        {},
        1024,
        "Shravan, section on training: GPT-2 124M, kron with 16 byte positions",
        vocab_size=50_257,
        recipe={"train.steps": 4623, "train.batch_size": 512, "train.micro_batch_size": 16, "train.dtype": "bfloat16",
                "optim.lr": 6e-4, "optim.min_lr": 6e-5, "optim.warmup_steps": 250},
        arms={"tied": ARMS["tied"], "table": ARMS["table"], "kron": ARMS["kron"]},
    ),  # fmt: skip
    "smollm-1.7b": Preset(
        "llama",
        {},
        2048,
        "Bochkov, 1.7B: canonical and recoded 16-bit ids against a table",
        vocab_size=49_152,
        recipe={"train.steps": 382_500, "train.batch_size": 128, "train.micro_batch_size": 8, "train.dtype": "bfloat16",
                "train.activation_checkpointing": True, "optim.lr": 1.5e-4, "optim.min_lr": 1e-5, "optim.warmup_steps": 2000,
                "optim.weight_decay": 0.01},
        arms={name: ARMS[name] for name in ("table", "binary", "gf2")},
    ),  # fmt: skip
    "gemma3-270m": Preset(
        "gemma3",
        {},
        1024,
        "Bathula: learned table (A), frozen codes (B), frozen codes and ternary body (C)",
        vocab_size=262_144,
        code_bits=512,
        scale_table=True,
        recipe={"train.steps": 7820, "train.batch_size": 256, "train.micro_batch_size": 8, "train.dtype": "bfloat16"},
        arms={"A": ARMS["tied"], "B": ARMS["sign"], "C": "sign/code/trained/bitnet"},
    ),
}


def find_preset(name: str) -> Preset:
    """The preset called ``name``. Raises UsageError with near matches."""
    if name not in PRESETS:
        raise UsageError(unknown_name("preset", name, PRESETS))
    return PRESETS[name]


def preset_changes(name: str) -> dict[str, Any]:
    """What a preset changes in the settings, by dotted name."""
    preset = find_preset(name)
    return {"arm.preset": name, "data.seq_len": preset.seq_len, **preset.recipe}


def describe(settings: "RunSettings", vocab_size: int, code_bits: int) -> "ModelDescription":
    """The model that ``settings`` mean for a vocabulary. Raises UsageError when its body is impossible."""
    from models.arm import ModelDescription
    from models.bodies import BODIES

    arm, preset = settings.arm, find_preset(settings.arm.preset)
    config_type, _ = BODIES[preset.kind]
    body = config_type(
        **preset.body, linear=arm.linear, impl=arm.impl, activation_checkpointing=settings.train.activation_checkpointing
    )
    if settings.data.seq_len > body.context:
        raise UsageError(f"data.seq_len ({settings.data.seq_len}) exceeds the context of {arm.preset} ({body.context})")
    own_scale = math.sqrt(body.width) if preset.scale_table and arm.interface == "table" else 1.0
    return ModelDescription(arm, preset.kind, body, vocab_size, code_bits, input_scale=arm.input_scale or own_scale)


def parse_arm(name: str, base: "ArmSettings", arms: dict[str, str] = ARMS) -> "ArmSettings":
    """An arm by name, or spelled interface/head[/prior[/linear]] (the rest as in ``base``). Raises UsageError."""
    from models.settings import RunSettings, override

    parts = arms.get(name, name).split("/")
    if not 2 <= len(parts) <= 4:
        raise UsageError(unknown_name("arm", name, arms) + "; or spell it out as interface/head/prior/linear")
    changes = {f"arm.{part}": value for part, value in zip(("interface", "head", "prior", "linear"), parts, strict=False)}
    return override(RunSettings(arm=base), changes).arm


def list_presets(names: list[str]) -> list[dict[str, Any]]:
    """The account of every arm of the presets, counted on the meta device."""
    import torch

    from models.account import Account
    from models.arm import build_model
    from models.settings import ArmSettings, RunSettings
    from models.vocab.fixed_data import blank_data

    rows = []
    for name in names:
        preset = find_preset(name)
        for label, parts in preset.arms.items():
            arm = parse_arm(parts, ArmSettings(preset=name))
            fixed = blank_data(arm, preset.vocab_size, preset.code_bits)
            with torch.device("meta"):
                model = build_model(describe(RunSettings(arm=arm), preset.vocab_size, fixed.code_bits), fixed)
            account = Account.of(model, preset.seq_len).to_json()
            rows.append({"preset": name, "arm": label, "parts": arm.parts, "vocab_size": preset.vocab_size, **account})
    return rows


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models.presets", description="List presets and what each arm costs.")
    parser.add_argument("names", nargs="*", help="only these presets (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON with exact numbers")
    add_common_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    import json

    from models.tables import format_bytes, format_count, markdown_table

    names = arguments.names or list(PRESETS)
    rows = list_presets(names)
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return 0
    columns = (
        ("preset", lambda r: r["preset"]),
        ("arm", lambda r: r["arm"]),
        ("interface/head/prior/linear", lambda r: r["parts"]),
        ("vocabulary", lambda r: f"{r['vocab_size']:,}"),
        *((part, lambda r, k=f"{part}_parameters": format_count(r[k])) for part in ("interface", "body", "head", "prior")),
        ("trainable", lambda r: format_count(r["trainable_parameters"])),
        ("fixed buffers", lambda r: format_bytes(r["buffer_bytes"])),
        ("AdamW state", lambda r: format_bytes(r["optimizer_bytes"])),
        ("FLOP/token", lambda r: format_count(r["flops_per_token"])),
    )
    print(markdown_table(rows, columns), end="")
    print("\n" + "\n".join(f"{name}: {PRESETS[name].about}" for name in names))
    return 0


if __name__ == "__main__":
    run_cli(main)
