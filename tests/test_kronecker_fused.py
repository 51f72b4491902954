"""The fused Kronecker op: the shared contract, the closed form at every length, the codec, hot rows, and strange inputs."""

import torch
from fused_contract import DEVICE, FusedContract
from test_kronecker import byte_buffer

from kernels.kronecker import kronecker_embedding
from kernels.kronecker import op as registered


class TestContract(FusedContract):
    vocabulary, positions, rows = 60, 3, 256 * 3

    def constants(self):
        return tuple(t.to(DEVICE) for t in byte_buffer(self.vocabulary, self.positions))

    def embed(self, ids, constants, weight, impl="fused"):
        return kronecker_embedding(ids, *constants, weight, impl=impl)

    def registered(self, ids, constants, weight):
        grad = torch.randn(*ids.shape, self.width, device=DEVICE, requires_grad=True)
        return [
            (registered.kronecker_embedding, (ids, *constants, weight, "fused")),
            (registered.kronecker_embedding_backward, (grad, ids, *constants, "fused")),
            (registered.kronecker_codec, (ids, *constants, True, torch.float32, "fused")),
        ]
