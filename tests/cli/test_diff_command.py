"""The command ``diff``: arguments without keys, and mistakes in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from specgraph.cli import main


@pytest.fixture(scope="module")
def graphs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diff") / "graphs"
    assert main(["dump", f"model={model}", f"out={folder}", "lowering=eager", "debug.self_check=false"]) == 0
    return folder


def test_two_stages_without_keys(graphs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = (str(next(graphs.glob(f"*_{name}"))) for name in ("insert_verify", "insert_processors"))
    assert main(["diff", old, new, "numerics=true"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("insert_verify -> insert_processors: step -0 +") and "equal in every bit" in shown
    assert main(["diff", f"new={new}", f"old={old}", "graph=target"]) == 0
    assert capsys.readouterr().out == "insert_verify -> insert_processors: equal\n"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "old is not set: python -m specgraph diff OLD NEW"),
        (["{graphs}"], "new is not set: python -m specgraph diff OLD NEW"),
        (["{graphs}", "no/such"], "no/such"),
        (["{graphs}", "{graphs}", "graph=tarjet"], "graph=tarjet: the stages have no such graph; they have step"),
        (["{graphs}", "{graphs}", "numeric=true"], "key 'numeric': did you mean 'numerics'?"),
    ],
)
def test_mistakes_are_one_sentence(
    graphs: Path, given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *(word.format(graphs=graphs) for word in given)]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1 and not shown.out
