"""The ops that have a benchmark, and every axis a shape can have. No torch here: --help must not wait for it."""

from pathlib import Path

OPS = ("kronecker", "binary_code", "sign_code", "code_loss", "bitlinear")
AXES = {"T": "tokens", "V": "vocabulary", "d": "width", "P": "byte positions", "K": "code bits or input width", "N": "output width"}
OUT = Path("runs/bench")
"""Where results go unless --out says otherwise; ``--out bench/results`` publishes them."""
