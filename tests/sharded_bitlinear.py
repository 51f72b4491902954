"""One process of tests/test_distributed.py: a BitLinear layer under FSDP2 or DDP must compute what the whole layer computes.

torchrun --nproc-per-node 2 tests/sharded_bitlinear.py fsdp|ddp
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from models.bodies.layers import BitLinear


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(kind: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layer = BitLinear(48, 30, True, "tensor", "eager")
    with torch.no_grad():
        layer.weight.normal_()
        layer.weight[:15] *= 50  # the first rank's shard alone has another mean than the whole
        layer.bias.zero_()
    x = torch.randn(8, 48)
    expected = layer(x)
    (expected.square().sum() / 2).backward()  # FSDP and DDP average over the two ranks
    expected_gradient, layer.weight.grad = layer.weight.grad, None
    layer.bias.grad = None
    if kind == "fsdp":
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        assert layer.weight.to_local().shape == (15, 48), "the weight is not sharded"
        model = layer
    else:
        model = DistributedDataParallel(layer)
    half = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    output = model(x[half])
    assert torch.equal(output, expected[half]), "another scale than the whole matrix's"
    output.square().sum().backward()
    difference = whole(layer.weight.grad) - expected_gradient
    assert difference.norm() <= 1e-6 * expected_gradient.norm(), "the gradient is not the whole batch's"
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
