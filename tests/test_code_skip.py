"""``python -m bench.code_skip``: its shares and errors against loops over tiles written out here."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from test_code_loss import problem

from bench import code_skip
from models.errors import UserError
from runs import train

CODES, TOKENS = 64, 4


def model_of(codes, prior):
    head = SimpleNamespace(prior_values=lambda: prior)
    return SimpleNamespace(codes=SimpleNamespace(words=codes, bits=64), head=head)


def test_shares_and_errors():
    hidden, signs, codes, prior, targets = problem(300, 64, 8, torch.float32)
    targets = targets.clamp_min(0)
    blocks = zip(hidden.split(TOKENS), targets.split(TOKENS), strict=True)
    rows = code_skip.measure(model_of(codes, prior), blocks, [0.05, 1e-9], CODES, TOKENS)
    assert [(row["order"], row["below"]) for row in rows] == [(o, b) for o in ("id", "prior") for b in (0.05, 1e-9)]
    scores = (hidden @ signs.float().t() / 8 + prior).double()
    share, mine = (scores.scatter(1, targets[:, None], -math.inf).softmax(1), scores.softmax(1).gather(1, targets[:, None]))
    exact = (1 - mine) * (share @ signs - signs[targets])
    order, skipped, left = prior.argsort(descending=True, stable=True), 0, torch.zeros_like(share)
    for a in range(0, 8, TOKENS):
        for b in range(0, 300, CODES):
            ids = order[b : b + CODES]
            tile = share[a : a + TOKENS][:, ids]
            if tile.max() <= 0.05 and not torch.isin(ids, targets[a : a + TOKENS]).any():
                skipped += 1
                left[a : a + TOKENS, ids] = tile
    assert 0 < skipped < 10
    error = (((1 - mine) * (left @ signs)).square().sum() / exact.square().sum()).sqrt()
    assert rows[2]["skipped"] == skipped / 10 and rows[2]["error"] == pytest.approx(error.item(), rel=1e-4)
    assert rows[2]["left_out"] == pytest.approx(left.sum().item() / 8, rel=1e-4)
    assert rows[3]["skipped"] == rows[3]["error"] == 0


def test_the_command_prints_a_table_and_keeps_its_rows(data_dir, tmp_path, capsys):
    train(data_dir, tmp_path / "run", "sign/code/fixed/float", train__steps=1)
    command = [str(tmp_path / "run"), "--tokens", "32", "--tile", "64x4", "--below", "1e-2", "--out", str(tmp_path)]
    assert code_skip.main(command) == 0
    by_id, by_prior = map(json.loads, (tmp_path / "code_skip.jsonl").read_text().splitlines())
    assert (by_id["order"], by_prior["order"]) == ("id", "prior") and by_id["tile"] == [64, 4] and by_id["step"] == 1
    assert f"| prior | 1e-02 | {by_prior['skipped']:7.1%} |" in capsys.readouterr().out


def test_too_little_text():
    _, _, codes, prior, _ = problem(300, 64, 8, torch.float32)
    with pytest.raises(UserError, match="no block of validation tokens is as long as a tile"):
        code_skip.measure(model_of(codes, prior), iter(()), [0.1], CODES, TOKENS)


@pytest.mark.parametrize("wrong", [["--below", "0"], ["--below", "x"], ["--tile", "64"], ["--tile", "0x32"]])
def test_flags_that_make_no_sense(wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        code_skip.build_parser().parse_args(["run", *wrong])
    assert stopped.value.code == 2 and "expected" in capsys.readouterr().err
