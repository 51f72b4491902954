"""What an op file declares to the frame: its axes, its inputs, and the providers that compute it.

A *provider* is one way to compute the op: our ``naive`` and ``eager``, or a peer (another library's function, or the layer that
the op replaces). Everything here is a plain description; nothing runs and nothing is allocated until ``Provider.build``.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

FORWARD, FORWARD_BACKWARD = "forward", "forward+backward"

Shape = Mapping[str, int]  # axis -> size, such as {"T": 1024, "V": 50257, "d": 768, "P": 16}
Inputs = Mapping[str, torch.Tensor]


@dataclass
class Prepared:
    """A provider bound to inputs and ready to run.

    forward      computes the output; called under no_grad for the forward direction
    leaves       tensors whose gradients the backward direction computes, by name
    constants    what the provider keeps between calls besides its leaves: codes, tables
    activations  names of leaves that are inputs of the call and not kept between calls
    transposed   names of two-dimensional leaves that this provider stores transposed
    """

    forward: Callable[[], torch.Tensor]
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)
    constants: tuple[torch.Tensor, ...] = ()
    activations: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()

    def held_bytes(self) -> int:
        """Bytes kept between calls: parameters, codes and tables."""
        kept = [*self.constants, *(t for n, t in self.leaves.items() if n not in self.activations)]
        return sum(storage.nbytes() for storage in {t.untyped_storage().data_ptr(): t.untyped_storage() for t in kept}.values())

    def gradients(self) -> dict[str, torch.Tensor]:
        """The leaves' gradients after a backward, in the layout of the op's own arguments."""
        return {name: leaf.grad.T if name in self.transposed else leaf.grad for name, leaf in self.leaves.items()}


@dataclass(frozen=True)
class Provider:
    """One way to compute an op.

    build          (inputs, shape) -> Prepared
    same_function  whether it computes the op's function (then the gate compares it with naive in fp64); a layer that the op
                   replaces, such as nn.Embedding, computes another function of the same shape
    peer           whether it runs only with --peers
    missing        device -> "" when the provider can run there, else one line that says why not, and what to install
    needs          shape -> bytes it needs at its peak in fp32 (roughly), so that a shape that does not fit is skipped
    refuses        shape -> "" or why it cannot run at that shape; only for a provider of another function
    trains         whether it has a backward; a provider of another function may compute the forward direction only
    """

    name: str
    build: Callable[[Inputs, Shape], Prepared]
    same_function: bool = True
    peer: bool = False
    missing: Callable[[str], str] = lambda device: ""
    needs: Callable[[Shape], int] = lambda shape: 0
    refuses: Callable[[Shape], str] = lambda shape: ""
    trains: bool = True


@dataclass(frozen=True)
class Op:
    """One op: its axes, shapes, inputs and providers.

    axes         axis -> what it counts, in the order shown
    default      the shape timed; sweeps vary one axis of it
    small        the shape of the gate, of the warm-up and of ``pytest bench``; odd sizes
    inputs       (shape, generator, ids) -> CPU tensors, floating ones in fp32; ids is "text" or "uniform"
    output_axes  the axes of the output (none for a scalar)
    fixed        names of floating inputs that keep fp32 whatever the dtype
    slack        rms error that the gate allows on top of three times naive's, in units of the dtype's epsilon
    papers       shapes that the papers train with, timed on a GPU (``python -m bench.gpu``)
    gathered     names of inputs [V, ...] of which a call reads the rows of its T ids at most
    flops        (shape, direction) -> floating-point operations of the matrix products it cannot do without
    """

    name: str
    axes: Mapping[str, str]
    default: Shape
    small: Shape
    sweeps: Mapping[str, tuple[int, ...]]
    inputs: Callable[[Shape, torch.Generator, str], dict[str, torch.Tensor]]
    providers: Mapping[str, Provider]
    output_axes: tuple[str, ...] = ()
    differentiable: bool = True
    fixed: tuple[str, ...] = ()
    slack: float = 2.0
    papers: tuple[Shape, ...] = ()
    gathered: tuple[str, ...] = ()
    flops: Callable[[Shape, str], int] = lambda shape, direction: 0

    @property
    def directions(self) -> tuple[str, ...]:
        return (FORWARD, FORWARD_BACKWARD) if self.differentiable else (FORWARD,)

    def directions_of(self, provider: Provider) -> tuple[str, ...]:
        return self.directions if provider.trains else (FORWARD,)

    def make_inputs(self, shape: Shape, setting: "Setting") -> dict[str, torch.Tensor]:
        """Seeded inputs of ``shape`` on the setting's device, floating ones in its dtype."""
        tensors = self.inputs(shape, torch.Generator().manual_seed(setting.seed), setting.ids)
        return {name: self.place(name, tensor, setting.device, setting.torch_dtype) for name, tensor in tensors.items()}

    def place(self, name: str, tensor: torch.Tensor, device: str, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(device=device, dtype=dtype if self.is_model_tensor(name, tensor) else tensor.dtype)

    def is_model_tensor(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether an input follows the dtype (and has a gradient, where the op has any)."""
        return tensor.is_floating_point() and name not in self.fixed

    def least_bytes(self, inputs: Inputs, output: torch.Tensor, direction: str) -> int:
        """Bytes that no implementation can avoid to move: each input read once, each result written once."""
        read = sum(self.bytes_read(name, inputs) for name in inputs)
        if direction == FORWARD:
            return read + output.nbytes
        gradients = sum(tensor.nbytes for name, tensor in inputs.items() if self.is_model_tensor(name, tensor))
        return read + 2 * output.nbytes + gradients

    def bytes_read(self, name: str, inputs: Inputs) -> int:
        tensor = inputs[name]
        if name not in self.gathered:
            return tensor.nbytes
        return min(tensor.shape[0], inputs["ids"].numel()) * tensor[:1].nbytes


@dataclass(frozen=True)
class Setting:
    """What one benchmark run fixes for all providers."""

    dtype: str = "float32"
    device: str = "cpu"
    ids: str = "text"
    threads: int = 1
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def load_op(name: str) -> Op:
    """The declaration in bench/NAME.py."""
    return importlib.import_module(f"bench.{name}").OP


def by_name(*providers: Provider) -> dict[str, Provider]:
    return {provider.name: provider for provider in providers}


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as a differentiable leaf that shares its memory (no provider may modify its inputs)."""
    return tensor.detach().requires_grad_(True)
