"""Which lines of a file the counter takes for code."""

from pathlib import Path

from benchmarks.count_lines import code_lines, count, table

SOURCE = '''"""A docstring
of two lines."""

# A comment.
NAME = """text that
is data
"""  # and a comment
"""The text below a constant
is a docstring."""


def double(x):
    """One line."""

    return (
        x
        # Comments inside of an expression are none, either.
        * 2
    )


class Empty:
    "A docstring without triple quotes."
'''


def test_blanks_comments_and_docstrings_are_no_code() -> None:
    # Three lines of NAME, one of def, four of the expression with its parentheses, and one of class.
    assert code_lines(SOURCE) == 9
    assert code_lines("") == 0
    assert code_lines('x = 1\n"""A field may have a docstring, too."""\n') == 1


def test_folders_are_summed_by_what_stands_directly_below(tmp_path: Path) -> None:
    for name in ("a/one.py", "a/inner/two.py", "a/inner/deep/three.py", "b/four.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    assert count(tmp_path, "a") == {"a": 1, "a/inner": 2}
    assert table(tmp_path, ("a", "b"), ("b",)) == [
        ("a", 1),
        ("a/inner", 2),
        ("a, sum", 3),
        ("b", 1),
        ("a + b", 4),
        ("b", 1),
    ]
