"""Numbers as text."""

from dynamix.cli.formatting import ranges, sizes_text


def test_consecutive_numbers_become_a_range() -> None:
    assert ranges([0, 4, 5, 6, 9, 10]) == "0, 4-6, 9-10"
    assert ranges([]) == ""


def test_sizes_of_more_than_eight_ranks_become_their_range_and_median() -> None:
    assert sizes_text((1, 2, 3)) == "1/2/3"
    assert sizes_text(range(9)) == "0...8 (4)"
    assert sizes_text(()) == "-"
