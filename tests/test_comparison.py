"""Paired statistics against published values, and what the sentences say."""

import pytest

from models.training.comparison import compare, compare_pairs, holm, paired_difference, t_quantile


def runs(**losses):
    """Records of arms with a loss per seed."""
    return [{"arm": arm, "seed": seed, "loss": loss} for arm, values in losses.items() for seed, loss in enumerate(values)]


@pytest.mark.parametrize("degrees, quantile", [(1, 12.706205), (2, 4.302653), (4, 2.776445), (9, 2.262157), (30, 2.042272)])
def test_quantiles_are_those_of_the_table_of_students_t(degrees, quantile):
    assert t_quantile(0.95, degrees) == pytest.approx(quantile, abs=1e-6)


def test_paired_difference_of_students_own_data():
    """Hours of sleep gained under two drugs (Student, "The probable error of a mean", 1908): t = 4.0621, p = 0.00283, 9 degrees."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    d = paired_difference(second, first)
    assert d.mean == pytest.approx(1.58)
    assert (d.low, d.high) == (pytest.approx(0.7001142, abs=1e-6), pytest.approx(2.4598858, abs=1e-6))
    assert d.p == pytest.approx(0.00283289, abs=1e-7)
    back = paired_difference(first, second)
    assert (back.mean, back.low, back.high, back.p) == pytest.approx((-d.mean, -d.high, -d.low, d.p))


def test_equal_differences_and_single_pairs():
    same, shifted = paired_difference([1.0, 2.0], [1.0, 2.0]), paired_difference([1.5, 2.5], [1.0, 2.0])
    one = paired_difference([3], [1])
    assert (same.low, same.high, same.p) == (0, 0, 1)
    assert (shifted.low, shifted.high, shifted.p) == (0.5, 0.5, 0)
    assert (one.mean, one.low, one.high, one.p) == (2, None, None, None)


def test_holm_on_a_worked_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_sentences_say_who_wins_by_how_much_and_whether_that_is_resolved():
    better, close = compare(runs(table=[5.0, 5.1, 5.2], kron=[4.5, 4.59, 4.71], tied=[5.02, 5.09, 5.2]), "table")
    assert better.resolved and not close.resolved
    sentence = "kron is 0.5000 nats better than table (95 % interval 0.4752 to 0.5248, 3 seeds, adjusted p 0.00027): resolved"
    assert better.sentence() == sentence
    assert close.sentence().startswith("tied is 0.0033 nats worse than table (95 % interval -0.0346 to 0.0413, 3 seeds")
    assert close.sentence().endswith(": not resolved")


def test_the_adjustment_counts_the_comparisons():
    losses = {"table": [5.0, 5.1, 5.2], "kron": [4.98, 5.07, 5.18]}
    alone = compare(runs(**losses), "table")[0]
    among = compare(runs(**losses, a=[5.0, 5.2, 5.1], b=[5.1, 5.0, 5.3], c=[5.2, 5.1, 5.0]), "table")[0]
    assert alone.resolved and alone.p_adjusted == alone.difference.p
    assert among.p_adjusted == pytest.approx(4 * alone.difference.p) and not among.resolved
    assert among.sentence().endswith("not resolved once adjusted for the number of comparisons")


def test_one_seed_resolves_nothing_and_only_shared_seeds_are_paired():
    (single,) = compare(runs(table=[5.0], kron=[4.0]), "table")
    assert "differences between seeds are not measured" in single.sentence() and not single.resolved
    (shared,) = compare(runs(table=[5.0, 5.1, 5.2], kron=[4.0, 4.1]), "table")
    assert shared.seeds == (0, 1)
    alone = [{"arm": "kron", "seed": 7, "loss": 1.0}]
    assert compare(runs(table=[5.0, 5.1]) + alone, "table") == []


def test_all_pairs_are_there_once():
    pairs = compare_pairs(runs(a=[1.0, 2.0], b=[1.5, 2.6], c=[1.1, 2.2]))
    assert [(pair.arm, pair.reference) for pair in pairs] == [("b", "a"), ("c", "a"), ("c", "b")]
    assert pairs[2].difference.mean == pytest.approx(-0.4)
