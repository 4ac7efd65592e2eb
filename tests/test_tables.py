"""Tables as text: what is printed, to the space."""

from specgraph.tables import markdown_table, text_table

ROWS = [["tokens per step", "1.50 ± 0.10"], ["[48, 32]", ""], ["1e3", "0x10"]]


def test_text_keeps_every_cell_as_it_is_and_ends_no_line_with_spaces() -> None:
    assert text_table(ROWS).splitlines() == [
        "tokens per step  1.50 ± 0.10",
        "[48, 32]",
        "1e3              0x10",
    ]


def test_a_header_stands_over_its_column_on_either_side() -> None:
    assert text_table([["eagle3", "7"], ["-", "1,000"]], ["draft", "K"], align="right").splitlines() == [
        " draft      K",
        "eagle3      7",
        "     -  1,000",
    ]
    assert text_table([["draft=ngram", "2.00"]], ["", "tokens/s"]).splitlines() == [
        "             tokens/s",
        "draft=ngram  2.00",
    ]


def test_markdown_is_padded() -> None:
    assert markdown_table([["insert_draft", "0.01"]], ["pass", "seconds"]).splitlines() == [
        "| pass         | seconds   |",
        "|--------------|-----------|",
        "| insert_draft | 0.01      |",
    ]
