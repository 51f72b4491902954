"""The gate: no speed is reported for an op whose result is wrong.

Every provider that computes the op's function runs at the op's small shape (``python -m bench.gpu``: at the timed one too), forward
and backward, and is compared with ``naive`` in fp64 on the same (already rounded) inputs. The tolerance is three-way: at most three
times the error of ``naive`` in the provider's own dtype, plus a slack of a few units of that dtype's epsilon. Both the
root-mean-square and the largest error must hold: the first notices small errors everywhere, the second a few wrong elements.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from bench.case import FORWARD, FORWARD_BACKWARD, Inputs, Op, Provider, Setting, Shape
from bench.frame import output_gradient, run_once
from models.errors import UserError

FACTOR = 3.0


class Errors(NamedTuple):
    """Root-mean-square and largest absolute error, both relative to the root-mean-square of the true tensor."""

    rms: float
    largest: float


class GateError(UserError):
    """A provider's result is wrong; nothing was timed."""


def check(op: Op, providers: Sequence[Provider], setting: Setting, shape: Shape | None = None) -> dict[str, dict[str, Errors]]:
    """Compare ``providers`` with naive in fp64; return provider -> direction -> worst errors over output and gradients.

    At the op's small shape unless another is given. Providers that compute another function are only checked for their output's
    shape (not at a shape that they refuse) and get no error. Raises GateError.
    """
    shape = op.small if shape is None else shape
    inputs = op.make_inputs(shape, setting)
    exact = {name: op.place(name, tensor, setting.device, torch.float64) for name, tensor in inputs.items()}
    truth = results(op, op.providers["naive"], exact, setting, shape)
    plain = results(op, op.providers["naive"], inputs, setting, shape)
    found: dict[str, dict[str, Errors]] = {}
    for provider in providers:
        if provider.refuses(shape):
            found[provider.name] = {}
            continue
        ours = results(op, provider, inputs, setting, shape)
        found[provider.name] = compare(op, provider, ours, plain, truth, setting) if provider.same_function else {}
    return found


def compare(
    op: Op,
    provider: Provider,
    ours: Mapping[str, torch.Tensor],
    plain: Mapping[str, torch.Tensor],
    truth: Mapping[str, torch.Tensor],
    setting: Setting,
) -> dict[str, Errors]:
    slack = op.slack * torch.finfo(setting.torch_dtype).eps
    found = {}
    for name, expected in truth.items():
        rms, largest = found[name] = errors(ours[name], expected)
        base = errors(plain[name], expected)
        allowed = Errors(FACTOR * base.rms + slack, FACTOR * base.largest + 4 * slack)
        # Written so that NaN fails.
        if not (rms <= allowed.rms and largest <= allowed.largest):
            raise GateError(
                f"{op.name}: {provider.name} failed the gate: {name} differs from naive in fp64 by {rms:.2e} (rms) and "
                f"{largest:.2e} (largest), allowed {allowed.rms:.2e} and {allowed.largest:.2e}; nothing was timed"
            )
    worst = {FORWARD: found["output"], FORWARD_BACKWARD: Errors(*(max(values) for values in zip(*found.values(), strict=True)))}
    return {direction: worst[direction] for direction in op.directions}


def results(op: Op, provider: Provider, inputs: Inputs, setting: Setting, shape: Shape) -> dict[str, torch.Tensor]:
    """The output, and the gradient of every leaf. Raises GateError for an output of another shape."""
    prepared, gradient = provider.build(inputs, shape), output_gradient(op, shape, setting)
    output = run_once(prepared, FORWARD, gradient)
    if output.shape != gradient.shape:
        raise GateError(
            f"{op.name}: {provider.name} failed the gate: output has shape {list(output.shape)}, not {list(gradient.shape)}; "
            "nothing was timed"
        )
    output = run_once(prepared, op.directions_of(provider)[-1], gradient)
    return {"output": output.detach()} | {f"gradient of {n}": g for n, g in prepared.gradients().items()}


def errors(actual: torch.Tensor, expected: torch.Tensor) -> Errors:
    scale = expected.double().square().mean().sqrt().clamp_min(1e-30)
    difference = (actual.double() - expected.double()).abs()
    return Errors(float(difference.square().mean().sqrt() / scale), float(difference.max() / scale))
