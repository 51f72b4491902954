"""One process of tests/test_distributed.py: a BitLinear layer under FSDP2 must compute what the whole layer computes.

torchrun --nproc-per-node 2 tests/sharded_bitlinear.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from models.bodies.layers import BitLinear


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layer = BitLinear(48, 30, True, "tensor", "eager")
    with torch.no_grad():
        layer.weight.normal_()
        layer.weight[:15] *= 50  # the first rank's shard alone has another mean than the whole
        layer.bias.zero_()
    x = torch.randn(8, 48)
    expected = layer(x)
    (expected.square().sum() / 2).backward()  # FSDP averages over the two ranks
    expected_gradient, layer.weight.grad = layer.weight.grad, None
    layer.bias.grad = None
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    assert layer.weight.to_local().shape == (15, 48), "the weight is not sharded"
    half = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    output = layer(x[half])
    assert torch.equal(output, expected[half]), "another scale than the whole matrix's"
    output.square().sum().backward()
    difference = layer.weight.grad.full_tensor() - expected_gradient
    assert difference.norm() <= 1e-6 * expected_gradient.norm(), "the gradient is not the whole batch's"
    dist.barrier()  # a rank that leaves while the other still talks to it can hang both
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
