"""A model description (models/arm.py, as JSON) in the engine's terms: its config, and where each tensor of a packed file belongs.

No torch here. The description may come from anywhere: every number is checked for what ctypes would cut off in silence; the library
checks the rest again (native/model.c).
"""

import ctypes
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from models.errors import UserError

# native/engine.h
NORM_RMS, NORM_LAYER = range(2)
GELU, SILU = range(2)
INTERFACES = {"table": 0, "binary": 1, "gf2": 1, "sign": 2, "kron": 3}
HEADS = {"table": 0, "tied": 1, "code": 2}
LIFTS = {"tile": 0, "interleave": 1}
PRIORS = {"none": 0, "fixed": 1, "trained": 1}
CODE_VALUES = {"01": (0.0, 1.0), "pm1": (-1.0, 1.0), "unit_rms": (0.0, 2**0.5)}  # kernels/binary_code
BODIES = ("gpt2", "llama", "gemma3")
MOST, MOST_LAYERS = 1 << 24, 4096
LAYER_PLACES = {
    name: place
    for place, name in enumerate(
        (
            "attention.q", "attention.k", "attention.v", "attention.o", "mlp.gate", "mlp.up", "mlp.down", "attention_norm.weight",
            "attention_norm.bias", "attention_post_norm.weight", "mlp_norm.weight", "mlp_norm.bias", "mlp_post_norm.weight",
            "attention.q_norm.weight", "attention.k_norm.weight",
        )
    )
}  # fmt: skip
_MODEL_PLACES = (
    "table", "output", "position", "lift", "code_map", "kron", "final_norm", "final_norm_bias", "codes", "prior", "token_bytes",
    "lengths", "gf2",
)  # fmt: skip
PLACES = {name: len(LAYER_PLACES) + place for place, name in enumerate(_MODEL_PLACES)}
SCALE_OF, BIAS_OF = 64, 128
MATRICES = 7  # the first of the layer's places


class Config(ctypes.Structure):
    """tf_config of native/engine.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("width", "layers", "heads", "kv_heads", "head_dim", "ffn", "context", "vocabulary")),
        *((name, ctypes.c_int32) for name in ("norm", "activation")),
        *((name, ctypes.c_int32) for name in ("gated", "query_key_norms", "post_norms", "learned_positions", "biases")),
        *((name, ctypes.c_int32) for name in ("interface", "head", "prior", "code_bits", "byte_positions")),
        *((name, ctypes.c_int32) for name in ("id_bits", "gf2", "lift")),
        *((name, ctypes.c_float) for name in ("clear", "set", "input_scale", "eps", "attention_scale")),
        ("windows", ctypes.POINTER(ctypes.c_int32)),
        ("thetas", ctypes.POINTER(ctypes.c_float)),
    )


@dataclass(frozen=True)
class Part:
    """Where a tensor belongs. ``offset`` is added to its values (a gain that is stored as 1 less)."""

    name: str
    layer: int
    place: int
    offset: float = 0.0


class Description:
    """What of a model description the engine needs. Raises UserError for one that no model of ours has."""

    def __init__(self, model: dict[str, Any]) -> None:
        try:
            self.kind, self.vocabulary = model["kind"], model["vocab_size"]
            self.body, self.arm = dict(model["body"]), dict(model["arm"])
            self.ternary = self.body["linear"] == "bitnet"
            if self.kind not in BODIES:
                raise UserError(f"body {self.kind!r:.40}; the engine knows {', '.join(BODIES)}")
            self._check_numbers(model)
            self.config = self._config(model)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"not a model description ({error!r:.100})") from error

    def parts(self) -> Iterator[Part]:
        """Every tensor that the model needs; a matrix before its scale, its bias last."""
        for layer in range(self.config.layers):
            for name, place in self._layer_places():
                yield from self._layer_parts(f"body.blocks.{layer}.{name}", layer, place)
        offset = self._gain_offset
        yield Part("body.final_norm.weight", 0, PLACES["final_norm"], offset)
        if self.config.norm == NORM_LAYER:
            yield Part("body.final_norm.bias", 0, PLACES["final_norm_bias"])
        for name, place in self._model_tensors():
            yield Part(name, 0, PLACES[place])

    @property
    def _gain_offset(self) -> float:
        return 1.0 if self.kind == "gemma3" else 0.0

    def _layer_places(self) -> Iterator[tuple[str, int]]:
        config = self.config
        absent = {"mlp.gate": not config.gated}
        absent |= dict.fromkeys(("attention.q_norm.weight", "attention.k_norm.weight"), not config.query_key_norms)
        absent |= dict.fromkeys(("attention_post_norm.weight", "mlp_post_norm.weight"), not config.post_norms)
        absent |= dict.fromkeys(("attention_norm.bias", "mlp_norm.bias"), config.norm != NORM_LAYER)
        return ((name, place) for name, place in LAYER_PLACES.items() if not absent.get(name))

    def _layer_parts(self, name: str, layer: int, place: int) -> Iterator[Part]:
        if place >= MATRICES:
            yield Part(name, layer, place, self._gain_offset if name.endswith(".weight") else 0.0)
            return
        yield Part(f"{name}.packed" if self.ternary else f"{name}.weight", layer, place)
        if self.config.biases:
            yield Part(f"{name}.bias", layer, place + BIAS_OF)

    def _model_tensors(self) -> Iterator[tuple[str, str]]:
        config, interface, head = self.config, self.arm["interface"], self.arm["head"]
        if config.learned_positions:
            yield "body.position", "position"
        if interface in ("table", "sign", "kron"):
            yield "interface.weight", {"table": "table", "sign": "lift", "kron": "kron"}[interface]
        if interface == "gf2":
            yield "interface.matrix", "gf2"
        if interface == "kron":
            yield "interface.token_bytes", "token_bytes"
            yield "interface.lengths", "lengths"
        if head != "tied":
            yield "head.weight", {"table": "output", "code": "code_map"}[head]
        if config.prior:
            yield "head.prior.values", "prior"
        if interface == "sign" or head == "code":  # after the prior, which orders them
            yield "codes.words", "codes"

    def _check_numbers(self, model: dict[str, Any]) -> None:
        body = self.body
        counts = {name: body[name] for name in ("width", "layers", "heads", "ffn", "context")} | {"vocab_size": self.vocabulary}
        counts |= {name: body[name] for name in ("kv_heads", "head_dim", "window", "global_every") if body.get(name) is not None}
        for name, value in counts.items():
            if type(value) is not int or not 1 <= value <= MOST:
                raise UserError(f"{name} must be a whole number from 1 to {MOST:,}, got {value!r:.40}")
        if body["layers"] > MOST_LAYERS:
            raise UserError(f"layers must be at most {MOST_LAYERS:,}, got {body['layers']:,}")
        for name, value in (("code_bits", model["code_bits"]), ("positions", self.arm["positions"])):
            if type(value) is not int or not 0 <= value < 1 << 31:
                raise UserError(f"{name} must be a whole number, got {value!r:.40}")
        floats = {name: body[name] for name in ("eps", "theta", "theta_local", "query_pre_attn_scalar") if name in body}
        for name, value in (floats | {"input_scale": model["input_scale"]}).items():
            if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:  # also a whole number may be larger
                raise UserError(f"{name} must be a finite number above 0, got {value!r:.40}")

    def _config(self, model: dict[str, Any]) -> Config:
        body, arm, kind = self.body, self.arm, self.kind
        head_dim = body["head_dim"] or body["width"] // body["heads"]
        if not head_dim:
            raise UserError(f"a width of {body['width']:,} has no room for {body['heads']:,} heads")
        scalar = body["query_pre_attn_scalar"] if kind == "gemma3" else head_dim
        clear, set_ = CODE_VALUES[arm["code_scale"]]
        windows, thetas = self._layers()
        return Config(
            width=body["width"], layers=body["layers"], heads=body["heads"], kv_heads=body["kv_heads"] or body["heads"],
            head_dim=head_dim, ffn=body["ffn"], context=body["context"], vocabulary=self.vocabulary,
            norm=NORM_LAYER if kind == "gpt2" else NORM_RMS, activation=SILU if kind == "llama" else GELU,
            gated=kind != "gpt2", query_key_norms=kind == "gemma3", post_norms=kind == "gemma3",
            learned_positions=kind == "gpt2", biases=kind == "gpt2",
            interface=INTERFACES[arm["interface"]], head=HEADS[arm["head"]], prior=PRIORS[arm["prior"]],
            code_bits=model["code_bits"],
            byte_positions=arm["positions"] if arm["interface"] == "kron" else 0,
            id_bits=max(1, (self.vocabulary - 1).bit_length()) if arm["interface"] in ("binary", "gf2") else 0,
            gf2=arm["interface"] == "gf2", lift=LIFTS[arm["lift"]], clear=clear, set=set_, input_scale=model["input_scale"],
            eps=body["eps"], attention_scale=scalar**-0.5,
            windows=(ctypes.c_int32 * len(windows))(*windows), thetas=(ctypes.c_float * len(thetas))(*thetas),
        )  # fmt: skip

    def _layers(self) -> tuple[list[int], list[float]]:
        """Of each layer its window (0: none) and the base of its rotary angles (0: none)."""
        body, layers = self.body, range(self.body["layers"])
        if self.kind == "gpt2":
            return [0 for _ in layers], [0.0 for _ in layers]
        if self.kind == "llama":
            return [0 for _ in layers], [body["theta"] for _ in layers]
        whole = [(layer + 1) % body["global_every"] == 0 for layer in layers]
        return [0 if w else body["window"] for w in whole], [body["theta"] if w else body["theta_local"] for w in whole]
