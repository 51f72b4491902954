"""Sign codes: what the paper's construction says, from matrices and from corpora, and a file that cannot go bad unnoticed."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kernels.sign_code import pack_sign_codes, unpack_sign_codes
from models.errors import UserError
from models.vocab import cooccurrence, sign_codes
from models.vocab.matrices import read_matrix
from models.vocab.sign_codes import SignCodes, from_corpus, from_embedding, random_codes


def embedding(rows: int = 300, width: int = 24, dtype=torch.float32) -> torch.Tensor:
    """Rows with a clear order of directions and a mean far from zero."""
    spread = torch.linspace(3, 0.2, width, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64))[0]
    return ((torch.randn(rows, width, dtype=torch.float64) * spread) @ turn + 5).to(dtype)


def signs(codes: SignCodes) -> torch.Tensor:
    return unpack_sign_codes(codes.words, codes.bits, torch.int64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_codes_are_the_signs_of_the_principal_components(dtype):
    matrix = embedding(dtype=dtype)
    codes = from_embedding(matrix, 10)
    centred = matrix.double() - matrix.double().mean(0)
    _, strength, directions = torch.linalg.svd(centred, full_matrices=False)
    directions = directions[:10].T * torch.where(directions[:10].gather(1, directions[:10].abs().argmax(1, True)) < 0, -1.0, 1.0).T
    assert torch.equal(signs(codes), torch.where(centred @ directions >= 0, 1, -1))
    assert codes.explained_variance == pytest.approx(float((strength[:10] ** 2).sum() / (strength**2).sum()), rel=1e-9)
    assert codes.words.dtype == torch.int32 and codes.words.shape == (300, 1)


def test_all_directions_explain_everything():
    assert from_embedding(embedding(), 24).explained_variance == pytest.approx(1, abs=1e-12)


def test_blocks_of_rows_change_nothing(monkeypatch):
    matrix = embedding(rows=301)
    whole = from_embedding(matrix.numpy(), 20)
    monkeypatch.setattr(sign_codes, "ROWS", 7)
    assert torch.equal(from_embedding(matrix, 20).words, whole.words)


def test_a_row_at_the_mean_has_all_bits_set():
    matrix = torch.tensor([[1.0, 0], [-1, 0], [0, 2], [0, -2], [0, 0]], dtype=torch.float64)
    assert signs(from_embedding(matrix, 2)).tolist() == [[1, 1], [1, -1], [1, 1], [-1, 1], [1, 1]]


def test_moving_all_rows_changes_nothing():
    matrix = embedding(dtype=torch.float64)
    assert torch.equal(from_embedding(matrix + 1000, 8).words, from_embedding(matrix, 8).words)


@pytest.mark.parametrize("matrix, bits, message", [
    (torch.zeros(4, 3).long(), 1, r"floating-point matrix \[V, D\]; got torch.int64"), (torch.zeros(4), 1, r"got .*\[4\]"),
    (torch.ones(9, 3), 4, r"\[1, 3\].*wide; got 4"), (torch.ones(9, 3), 0, "got 0"), (torch.eye(3, 8), 3, "only 2 directions"),
    (torch.ones(9, 3), 1, "only 0 directions"), (torch.arange(18.0).reshape(9, 2).sin()[:, [0, 1, 0]], 3, "only 2 directions"),
    (torch.tensor([[1.0, 2], [float("nan"), 1]]), 1, "not finite"),
    (torch.tensor([[1.0, 2], [float("inf"), 1]]), 1, "not finite")])  # fmt: skip
def test_matrices_that_cannot_be_coded(matrix, bits, message):
    with pytest.raises(UserError, match=message):
        from_embedding(matrix, bits)


def corpus(tokens: int = 6000, seed: int = 0) -> np.ndarray:
    """Ids below 60 in three topics of 20; documents (ended by id 60) keep to one topic; 61 to 63 never occur."""
    draw = np.random.default_rng(seed)
    documents = [np.append(20 * draw.integers(3) + draw.integers(0, 20, 29), 60) for _ in range(tokens // 30)]
    return np.concatenate(documents)


def brute_force(tokens: np.ndarray, size: int, window: int, boundary: int | None) -> np.ndarray:
    counts, document = np.zeros((size, size)), np.zeros(len(tokens), dtype=int)
    if boundary is not None:
        document[1:] = np.cumsum(tokens == boundary)[:-1]
    for i in range(len(tokens)):
        for j in range(max(0, i - window), min(len(tokens), i + window + 1)):
            if i != j and document[i] == document[j]:
                counts[tokens[i], tokens[j]] += 1
    return counts


@pytest.mark.parametrize("boundary", [None, 60])
@pytest.mark.parametrize("chunk, window", [(1 << 22, 3), (101, 3), (2, 5), (100, 1)])
def test_pairs_are_counted_as_by_hand(monkeypatch, chunk, window, boundary):
    monkeypatch.setattr(cooccurrence, "CHUNK", chunk)
    tokens = corpus(300)
    counts = cooccurrence.count_pairs(tokens, 64, window, boundary)
    assert np.array_equal(counts.toarray(), brute_force(tokens, 64, window, boundary))


def test_ppmi_is_its_formula():
    counts = cooccurrence.count_pairs(corpus(900), 64, 2)
    dense = counts.toarray()
    context = dense.sum(0) ** 0.75
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = np.log((dense / dense.sum()) / np.outer(dense.sum(1) / dense.sum(), context / context.sum()))
    expected = np.where(np.isfinite(expected) & (expected > 0), expected, 0)
    norms = np.linalg.norm(expected, axis=1, keepdims=True)
    expected = np.divide(expected, norms, out=np.zeros_like(expected), where=norms > 0)
    np.testing.assert_allclose(cooccurrence.ppmi(counts, 64).toarray(), expected, atol=1e-12)
    busiest = np.sort(np.argsort(-dense.sum(0), kind="stable")[:10])
    few = cooccurrence.ppmi(counts, 10).toarray()
    np.testing.assert_allclose(few * np.linalg.norm(expected[:, busiest], axis=1, keepdims=True), expected[:, busiest], atol=1e-12)


def test_corpus_codes_put_a_topic_together():
    codes = from_corpus(corpus(), 64, 2, window=4, boundary=60)
    topics = signs(codes)[:60].reshape(3, 20, 2)
    common = topics.mode(1).values
    assert len(torch.unique(common, dim=0)) == 3
    assert (topics == common[:, None]).double().mean() > 0.95
    assert codes.details["tokens"] == 6000 and codes.details["window"] == 4 and 0 < codes.explained_variance < 1


def test_corpus_codes_are_the_same_from_any_container_and_every_time():
    tokens = corpus()
    first = from_corpus(tokens, 64, 16)
    assert first.checksum == from_corpus(tokens.tolist(), 64, 16).checksum == from_corpus(tokens.astype(np.uint16), 64, 16).checksum
    assert first.checksum != from_corpus(corpus(seed=1), 64, 16).checksum


def test_tokens_without_company_keep_distinct_codes():
    codes = from_corpus(corpus(), 200, 16, seed=5)
    assert codes.details["random_rows"] == 200 - 61
    assert torch.equal(codes.words[61:], random_codes(200, 16, 5).words[61:])
    assert len(torch.unique(codes.words[61:])) > 130  # of 139; in 16 bits a few may meet


@pytest.mark.parametrize("arguments, message", [
    (([0, 1, 0, 1], 64, 16), r"bits must lie in \[1, 2\].*2 different tokens"), (([0, -1, 1], 64, 1), "from -1 to 1"),
    (([0, 64, 1], 64, 1), r"\[0, 64\); got values from 0 to 64"), (([0], 64, 1), "got 4 and 1"),
    (([0, 1], 64, 1, 0), "window of at least 1.*got 0")])  # fmt: skip
def test_corpora_that_cannot_be_coded(arguments, message):
    with pytest.raises(UserError, match=message):
        from_corpus(*arguments)


def test_random_codes():
    codes = random_codes(3000, 70, seed=1)
    assert codes.words.shape == (3000, 3) and not (codes.words[:, 2] & ~63).any()  # spare bits are clear
    assert codes.duplicates() == [] and codes.explained_variance is None
    low, high = codes.balance()
    assert 0.45 < low < high < 0.55
    matrix = signs(codes).double()
    covariance = matrix.T @ matrix / 3000 - torch.eye(70)
    assert covariance.abs().max() < 0.1  # 5.5 standard deviations of independent bits
    assert torch.equal(random_codes(10, 70, 1).words, codes.words[:10])
    assert not torch.equal(random_codes(3000, 70, 2).words, codes.words)


def test_random_codes_stay_what_they_are():
    """Hard values: any machine and numpy must give the same control. SplitMix64's first number from state 0 is published."""
    assert int(sign_codes._mix(np.array([0], dtype=np.uint64))[0]) == 0xE220A8397B1DCDAF
    assert random_codes(512, 96, 7).checksum == "7a8f80b4d6be8a62a12455d493c4b4a2a5f8a2ddf22f3f45e825b9f9a2519db2"


@pytest.mark.parametrize("arguments", [(0, 8, 0), (8, 0, 0), (8, 8, -1), (8, 8, 1 << 32)])
def test_bad_random_codes(arguments):
    with pytest.raises(UserError, match="random codes need"):
        random_codes(*arguments)


def test_duplicates_and_neighbours():
    bits = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    codes = SignCodes(pack_sign_codes(bits), 4, "by hand")
    assert codes.duplicates() == [(0, 2), (1, 4)]
    assert codes.neighbours(3, 3) == [(0, 1), (2, 1), (1, 3)]
    assert codes.neighbours(0, 10) == [(2, 0), (3, 1), (1, 4), (4, 4)]
    assert codes.balance() == pytest.approx((0.4, 0.6)) and "4 ids in 2 groups" in codes.report()


def test_neighbours_at_the_top_bit():
    codes = SignCodes(torch.tensor([[-(1 << 31)], [0], [-1]], dtype=torch.int32), 32, "by hand")
    assert codes.neighbours(0, 2) == [(1, 1), (2, 31)]


@pytest.fixture
def saved(tmp_path):
    codes = from_embedding(embedding(), 20, "m.safetensors:wte", tokenizer="ab" * 32)
    codes.save(tmp_path / "codes.safetensors")
    return codes, tmp_path / "codes.safetensors"


def test_file_round_trip(saved):
    codes, path = saved
    loaded = SignCodes.load(path, "ab" * 32)
    assert torch.equal(loaded.words, codes.words)
    assert (loaded.bits, loaded.source, loaded.details, loaded.explained_variance, loaded.tokenizer, loaded.checksum) == \
        (codes.bits, codes.source, codes.details, codes.explained_variance, codes.tokenizer, codes.checksum)  # fmt: skip
    again = path.with_name("again.safetensors")
    loaded.save(again)
    assert again.read_bytes() == path.read_bytes()
    assert sorted(p.name for p in path.parent.iterdir()) == ["again.safetensors", "codes.safetensors"]


def test_every_damaged_byte_of_the_codes_is_noticed(saved):
    _, path = saved
    content = path.read_bytes()
    for at in (-1, -600, -1200):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + (content[at + 1 :] if at + 1 else b""))
        with pytest.raises(UserError, match="codes.safetensors: damaged"):
            SignCodes.load(path)
    for length in (0, 5, 100, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(UserError, match="codes.safetensors: not a safetensors file, or cut short"):
            SignCodes.load(path)


def test_foreign_files_are_refused(tmp_path, saved):
    codes, path = saved
    about = {"format": "tablefree sign codes", "version": 1, "bits": 20}
    for text in (None, "{}", "[]", "{", json.dumps(about)):
        save_file({"codes": codes.words}, path, metadata=None if text is None else {"tablefree": text})
        with pytest.raises(UserError, match="not a file of sign codes"):
            SignCodes.load(path)
    save_file({"codes": codes.words}, path, metadata={"tablefree": json.dumps({**about, "version": 2})})
    with pytest.raises(UserError, match="version 2; this program reads version 1"):
        SignCodes.load(path)
    with pytest.raises(UserError, match="absent.safetensors: no such file"):
        SignCodes.load(tmp_path / "absent.safetensors")


def test_codes_of_another_tokenizer_are_refused(saved):
    with pytest.raises(UserError, match="for another tokenizer"):
        SignCodes.load(saved[1], "cd" * 32)


def test_checksum_sees_bits_and_codes():
    words = torch.zeros(4, 1, dtype=torch.int32)
    sums = {SignCodes(words, 20, "a").checksum, SignCodes(words, 21, "a").checksum, SignCodes(words[:3], 20, "a").checksum,
            SignCodes(words + 1, 20, "a").checksum}  # fmt: skip
    assert len(sums) == 4 and SignCodes(words, 20, "b", {"x": 1}, 0.5, "t").checksum in sums


def test_wrong_words_are_refused():
    words = torch.zeros(4, 1, dtype=torch.int32)
    for wrong, bits in ((words.float(), 20), (words, 33), (words[:, 0], 4), (words, 0)):
        with pytest.raises(UserError, match=r"must be int32 \[V, "):
            SignCodes(wrong, bits, "x")


def test_matrices_are_found_in_files(tmp_path):
    wte, other = torch.randn(9, 4).bfloat16(), torch.randn(30, 4)
    path = tmp_path / "m.safetensors"
    save_file({"model.embed_tokens.weight": wte, "lm": other, "norm": torch.ones(4)}, path)
    matrix, source = read_matrix(path)
    assert torch.equal(matrix, wte) and source == "m.safetensors:model.embed_tokens.weight"
    assert torch.equal(read_matrix(path, "lm")[0], other)
    save_file({"a": wte, "b": other, "norm": torch.ones(4)}, path)
    cases = {None: r"--tensor.*b \[30, 4\], a \[9, 4\]$", "norm": r"norm has shape \[4\]", "c": "unknown tensor 'c'"}
    for tensor, message in cases.items():
        with pytest.raises(UserError, match=message):
            read_matrix(path, tensor)
    save_file({"only": other, "norm": torch.ones(4)}, path)
    assert torch.equal(read_matrix(path)[0], other)
    np.save(tmp_path / "m.npy", other.numpy())
    assert torch.equal(read_matrix(tmp_path / "m.npy")[0], other)


def test_files_without_a_matrix_are_refused(tmp_path):
    for name, content, message in (("a.safetensors", b"xx", "not a safetensors file"), ("a.npy", b"xx", "not a .npy file"),
                                   ("a.txt", b"xx", "cannot read .txt"), ("b.npy", None, "no such file")):  # fmt: skip
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_matrix(tmp_path / name)
    np.save(tmp_path / "c.npy", np.zeros((2, 2)))
    with pytest.raises(UserError, match="has no name"):
        read_matrix(tmp_path / "c.npy", "wte")
