"""``python -m bench.code_int8``: a trained run's int8 errors, small and within their bound."""

import json

import pytest

from bench import code_int8
from models.errors import UsageError, UserError
from runs import train


@pytest.fixture(scope="module")
def trained(data_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("int8") / "sign"
    train(data_dir, out, "sign/code/fixed/float", train__steps=3, arm__scores="int8")
    return out


def test_errors_of_a_trained_run(trained, tmp_path, capsys):
    assert code_int8.main([str(trained), "--rows", "3", "--out", str(tmp_path)]) == 0
    exact, half, int8 = map(json.loads, (tmp_path / "code_int8.jsonl").read_text().splitlines())
    assert exact["arm"] == "sign/code/fixed/float" and exact["step"] == 3
    assert exact["tokens"] == 3 * 16 and f"mean loss in fp64: {exact['fp64_loss']:.6f}" in capsys.readouterr().out
    assert exact["largest_error"] < 1e-5 and exact["gradient_error"] < 1e-5 and exact["of_bound"] == 0
    assert 1e-5 < half["gradient_error"] < 1e-2 and 1e-4 < int8["gradient_error"] < 3e-2
    assert 0.02 < int8["of_bound"] < 1 and 0 < int8["mean_error"] < int8["largest_error"] < 2 * int8["score_error"]


def test_a_broken_bound_is_an_error(trained, tmp_path, monkeypatch):
    real = code_int8.score_bound
    monkeypatch.setattr(code_int8, "score_bound", lambda hidden: real(hidden) / 100)
    with pytest.raises(UserError, match="int8: a score is off by .* times its bound"):
        code_int8.main([str(trained), "--rows", "1", "--out", str(tmp_path)])


def test_only_code_heads(data_dir, tmp_path):
    train(data_dir, tmp_path / "run", train__steps=1)
    with pytest.raises(UsageError, match="its head is 'table'; int8 scores are for head 'code'"):
        code_int8.main([str(tmp_path / "run")])
    with pytest.raises(UsageError, match="--rows must be at least 1"):
        code_int8.main([str(tmp_path / "run"), "--rows", "0"])
