"""The engine against PyTorch on validation text: a file's greedy tokens and loss are those of the run it was made from."""

import numpy as np
import pytest
import torch

from models.data.shards import TokenData
from models.engine.engine import Engine
from models.packed.__main__ import main as pack
from models.packed.load import PackedModel
from models.training.checkpoint import find_checkpoint
from runs import train

pytestmark = pytest.mark.slow
ROW, ROWS = 128, 16  # 2,048 tokens
# What the engine rounds and PyTorch does not: keys and values, after which a ternary layer may round an activation the other way.
DECLARED = {"float16": 0.05, "int8": 0.15}


@pytest.fixture(scope="module", params=["sign/code/fixed/bitnet", "table/tied/none/float", "kron/table/none/float"])
def packed(request, data_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("parity")
    train(data_dir, root / "run", request.param, train__steps=40, optim__lr=3e-3)
    pack(["export", str(root / "run"), str(root / "model.tfree")])
    return root


def text(data_dir) -> torch.Tensor:
    data = TokenData.open(data_dir, verify="quick")
    return torch.from_numpy(np.asarray(data.train[: ROW * ROWS + 1], dtype=np.int64))


def scores_of(engine: Engine, ids: list[int]) -> torch.Tensor:
    """[tokens, V], one token read after another."""
    found = []
    with engine.session() as session:
        for token in ids:
            engine.read([session], [[token]])
            found.append(session.scores())
    return torch.tensor(found)


@pytest.mark.parametrize("kv", ["float16", "int8"])
def test_greedy_tokens_and_loss_over_two_thousand_tokens(packed, data_dir, kv):
    ids = text(data_dir)
    inputs, targets = ids[:-1].view(ROWS, ROW), ids[1:]
    with torch.no_grad():
        theirs = PackedModel.open(packed / "model.tfree").load_model().logits(inputs).flatten(0, 1)
        trained = find_checkpoint(packed / "run").load_model().logits(inputs).flatten(0, 1)
    with Engine(packed / "model.tfree", kv=kv) as engine:
        ours = torch.cat([scores_of(engine, row) for row in inputs.tolist()])
    assert (ours - theirs).abs().max() < DECLARED[kv]
    best = theirs.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * DECLARED[kv]
    assert clear.float().mean() > 0.5 and torch.equal(ours.argmax(1)[clear], theirs.argmax(1)[clear])
    loss = [torch.nn.functional.cross_entropy(scores, targets).item() for scores in (ours, theirs, trained)]
    assert abs(loss[0] - loss[1]) < 0.01 and abs(loss[0] - loss[2]) < 0.01, loss
