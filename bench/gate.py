"""The gate: no speed is reported for an op whose result is wrong.

Every provider that computes the op's function runs at the op's small shape, forward and backward, and is compared with ``naive`` in
fp64 on the same (already rounded) inputs. The tolerance is three-way: at most three times the error of ``naive`` in the provider's
own dtype, plus a slack of a few units of that dtype's epsilon. Both the root-mean-square and the largest error must hold: the
first notices small errors everywhere, the second a few wrong elements.
"""

from collections.abc import Mapping, Sequence

import torch

from bench.case import FORWARD, FORWARD_BACKWARD, Inputs, Op, Provider, Setting
from bench.frame import output_gradient, run_once
from models.errors import UserError

FACTOR = 3.0


class GateError(UserError):
    """A provider's result is wrong; nothing was timed."""


def check(op: Op, providers: Sequence[Provider], setting: Setting) -> dict[str, dict[str, float]]:
    """Compare ``providers`` with naive in fp64; return provider -> direction -> largest error (relative, see ``errors``).

    Providers that compute another function are only checked for their output's shape and get no error. Raises GateError.
    """
    inputs = op.make_inputs(op.small, setting)
    exact = {name: op.place(name, tensor, setting.device, torch.float64) for name, tensor in inputs.items()}
    truth = results(op, op.providers["naive"], exact, setting)
    plain = results(op, op.providers["naive"], inputs, setting)
    found: dict[str, dict[str, float]] = {}
    for provider in providers:
        ours = results(op, provider, inputs, setting)
        found[provider.name] = compare(op, provider, ours, plain, truth, setting) if provider.same_function else {}
    return found


def compare(
    op: Op,
    provider: Provider,
    ours: Mapping[str, torch.Tensor],
    plain: Mapping[str, torch.Tensor],
    truth: Mapping[str, torch.Tensor],
    setting: Setting,
) -> dict[str, float]:
    slack = op.slack * torch.finfo(setting.torch_dtype).eps
    largest = {FORWARD: 0.0, FORWARD_BACKWARD: 0.0}
    for name, expected in truth.items():
        rms, worst = errors(ours[name], expected)
        plain_rms, plain_worst = errors(plain[name], expected)
        # Written so that NaN fails.
        if not (rms <= FACTOR * plain_rms + slack and worst <= FACTOR * plain_worst + 4 * slack):
            raise GateError(
                f"{op.name}: {provider.name} failed the gate: {name} differs from naive in fp64 by {rms:.2e} (rms) and {worst:.2e} "
                f"(largest), allowed {FACTOR * plain_rms + slack:.2e} and {FACTOR * plain_worst + 4 * slack:.2e}; nothing was timed"
            )
        largest[FORWARD_BACKWARD] = max(largest[FORWARD_BACKWARD], worst)
        if name == "output":
            largest[FORWARD] = worst
    return {direction: largest[direction] for direction in op.directions}


def results(op: Op, provider: Provider, inputs: Inputs, setting: Setting) -> dict[str, torch.Tensor]:
    """The output, and the gradient of every leaf, at the small shape. Raises GateError for an output of another shape."""
    prepared, gradient = provider.build(inputs, op.small), output_gradient(op, op.small, setting)
    output = run_once(prepared, FORWARD, gradient)
    if output.shape != gradient.shape:
        raise GateError(
            f"{op.name}: {provider.name} failed the gate: output has shape {list(output.shape)}, not {list(gradient.shape)}; "
            "nothing was timed"
        )
    output = run_once(prepared, op.directions[-1], gradient)
    return {"output": output.detach()} | {f"gradient of {n}": g for n, g in prepared.gradients().items()}


def errors(actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Root-mean-square and largest absolute error, both relative to the root-mean-square of ``expected``."""
    scale = expected.double().square().mean().sqrt().clamp_min(1e-30)
    difference = (actual.double() - expected.double()).abs()
    return float(difference.square().mean().sqrt() / scale), float(difference.max() / scale)
