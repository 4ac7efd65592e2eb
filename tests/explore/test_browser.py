"""The page in a browser: what a person reads, by mouse and by keyboard, and that no text becomes a script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specgraph import SpeculativeDecoder
from specgraph.explore.trace_file import why
from specgraph.ir.graphs import DEVICE
from specgraph.ir.shapes import items_of, shape_of
from tests.explore.browser import Browser, browser, find
from tests.explore.conftest import HOSTILE, Made

PROGRAM = find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def shown() -> Iterator[Browser]:
    assert PROGRAM is not None
    with browser(PROGRAM) as running:
        yield running


@pytest.fixture
def page(made: Made, shown: Browser) -> Iterator[Browser]:
    """The page, about which nothing is wrong before and after a test."""
    shown.open(made.page.as_uri())
    yield shown
    assert "[object" not in shown.text("body")
    assert shown.errors == [] and set(shown.requests) <= {"about:blank", made.page.as_uri()}
    assert shown.run("window.broken") is None


def go(page: Browser, place: str) -> None:
    """Follow a link within the page."""
    page.run(f"location.hash = {place!r}")
    page.wait(f"document.body.dataset.shown === {place!r}")


def arrive(page: Browser, part: str) -> None:
    """Wait until the page shows a place whose link contains a text."""
    page.wait(f"(document.body.dataset.shown || '').includes({part!r})")


def cells(page: Browser, selector: str) -> list[list[str]]:
    """The texts of a table, row by row."""
    rows = f"[...document.querySelectorAll('{selector} tbody tr')]"
    return list(page.run(f"{rows}.map((row) => [...row.cells].map((cell) => cell.textContent))"))


def percent(value: float) -> str:
    """A probability as the page writes it."""
    if 0 < value < 1e-6:
        return f"{100 * value:.1e} %".replace("e-0", "e-")
    digits = next((digits for digits in range(4) if value >= 10.0 ** -(digits + 1)), 5)
    return f"{100 * value:.{digits if value else 0}f} %"


def steps_with(made: Made, verdict: str) -> list[tuple[int, int, dict[str, Any]]]:
    """The places of the drafts of which this became, as a link names them, with their steps."""
    return [
        (index, place, step)
        for index, step in enumerate(made.data["trace"]["steps"])
        for place, draft in enumerate(step["drafts"])
        if draft["verdict"] == verdict
    ]


def test_the_page_says_which_pass_introduced_each_node(page: Browser, made: Made) -> None:
    program = made.decoder.stages["index_rows"]
    place = made.data["stages"].index(next(stage for stage in made.data["stages"] if stage["name"] == "index_rows"))
    for graph, nodes in {"step": program.graph.nodes, "target": program.modules["target"].graph.nodes}.items():
        every = f"graphOf({place}, '{graph}').nodes.map((node) => node.name)"
        said = page.run(f"{every}.map((name) => madeBy(historyOf({place}, '{graph}', name)).textContent)")
        for node, text in zip(nodes, said, strict=True):
            made_by = node.meta["pass_name"]
            traced = "tracing the model gave this node"
            assert (traced if made_by == "trace" else f"Introduced by the pass {made_by}.") in text
    # The panel shows these sentences, and says what the node reads and is read by.
    for made_by in {node.meta["pass_name"] for node in program.graph.nodes} - {"trace"}:
        node = next(node for node in program.graph.nodes if node.meta["pass_name"] == made_by and node.op != "output")
        go(page, f"#stage=index_rows&graph=step&node={node.name}")
        assert page.text("#node h3") == node.name and f"Introduced by the pass {made_by}." in page.text("#made-by")
        around = [*(read.name for read in node.all_input_nodes), *(user.name for user in node.users)]
        assert sorted(page.texts("#node ul.names:not(.before) a")) == sorted(around)
        assert shape_of(node) in page.texts("#node dd")


def test_the_panel_says_what_a_node_does_and_what_each_item_of_a_tuple_is(page: Browser, made: Made) -> None:
    go(page, "#stage=index_rows&graph=step&node=update")
    assert "Cut the verified tokens [B, T] behind an EOS" in page.text("#node dl")
    node = next(node for node in made.decoder.stages["index_rows"].graph.nodes if node.name == "update")
    takers = {user.args[1]: user.name for user in node.users}
    expected = [f"{shape} {takers.get(index, 'not read')}" for index, shape in enumerate(items_of(node) or ())]
    assert page.texts("#node .items li") == expected and len(expected) == 8
    assert "b: sequences of this call; T: rows of a sequence in this call" in page.text("#node dl")
    go(page, "#stage=index_rows&graph=step&node=seeds")
    assert "input" in page.texts("#node dt") and "code" not in page.texts("#node dt")


def test_the_graph_of_one_device_can_be_read(
    shown: Browser, shared: tuple[SpeculativeDecoder, Path], made: Made
) -> None:
    decoder, file = shared
    nodes = decoder.stages["shard"].modules.unchanged["target"].graph.nodes
    node = next(node for node in nodes if node.target is torch.ops.aten.linear.default and node.meta.get(DEVICE) == 1)
    shown.open(file.as_uri())
    go(shown, f"#stage=shard&graph=target&node={node.name}")
    shown.run("choose({ view: 'device 1', inputs: true })")
    assert shown.run("document.querySelector('#pick-view').selectedOptions[0].textContent") == "what device 1 runs"
    assert "device1 alone" in shown.text("#node dl").replace("\n", "")
    runs = {node.name for node in nodes if node.meta.get(DEVICE) in (None, 1)}
    assert {row[1] for row in cells(shown, "#node-table")} == runs
    assert shown.errors == [] and set(shown.requests) <= {"about:blank", made.page.as_uri(), file.as_uri()}
    shown.requests.clear()


def test_a_node_says_what_was_there_before_and_what_took_its_place(page: Browser, made: Made) -> None:
    stage = next(stage for stage in made.data["stages"] if stage["name"] == "insert_verify")
    removed = stage["changes"]["step"]["removed"]
    go(page, "#node=verification")
    assert page.texts("#node .before a") == removed and "verified_tokens" in removed
    go(page, "#node=verified_tokens")
    assert page.texts("#node .before a") == ["verified_tokens"]
    go(page, "#stage=insert_draft&graph=step&node=verified_tokens")
    assert "removed by insert_verify, which made verified_tokens anew: verification[0]" in page.texts("#node li")


def test_a_pass_that_did_nothing_says_why(page: Browser, made: Made) -> None:
    rows = {row[1]: row[2:] for row in cells(page, "#stage-list")}
    assert rows["insert_recurrent_state"][0] == "did nothing: no layer is recurrent"
    assert rows["insert_verify"][0].startswith("+")
    (idle,) = [stage for stage in made.data["stages"] if stage["name"] == "capture_cuda_graph"]
    assert rows["capture_cuda_graph"][0] == f"did nothing: {idle['notes'][0]}"


def test_nodes_whose_value_alone_has_another_size_count_as_the_same(page: Browser, made: Made) -> None:
    changes = next(stage for stage in made.data["stages"] if stage["name"] == "index_rows")["changes"]
    resized = {name for name, what in changes["target"]["changed"].items() if set(what) <= {"shape", "bytes"}}
    assert len(resized) > 20
    go(page, "#stage=index_rows")
    assert f"The same, with a value of another size: {len(resized)} nodes" in page.text("#stage")
    place = [stage["name"] for stage in made.data["stages"]].index("index_rows")
    assert page.run(f"[...statuses({place}, 'target').keys()]") == [
        name for name in changes["target"]["changed"] if name not in resized
    ]


def test_no_explanation_stays_when_the_page_goes_elsewhere(page: Browser) -> None:
    go(page, "#stage=index_rows&graph=step&node=update")
    page.point("#node ul.names a")
    page.wait("!document.querySelector('#tip').hidden")
    go(page, "#node=verification")
    assert page.run("document.querySelector('#tip').hidden")
    page.run("tip.show(['a'], 10, 10); byId('canvas').dispatchEvent(new MouseEvent('mouseleave'))")
    assert page.run("document.querySelector('#tip').hidden")


def test_a_traced_node_names_the_line_of_the_model(page: Browser, made: Made) -> None:
    nodes = made.decoder.stages["trace"].modules["target"].graph.nodes
    node = next(node for node in nodes if "embedding" in str(node.target))
    go(page, f"#stage=trace&graph=target&node={node.name}")
    line = page.text("#node #line")
    assert line.startswith("transformers/models/llama/modeling_llama.py:") and "self.embed_tokens(input_ids)" in line
    go(page, "#stage=insert_verify&graph=step&node=verification")
    assert page.run("document.querySelector('#node #line')") is None


def look_for(page: Browser, text: str) -> str:
    """What is found first for a text that is typed; Enter is pressed then."""
    page.run("document.querySelector('#search').focus()")
    page.write(text)
    page.wait("!document.querySelector('#found').hidden")
    first = page.texts("#found a")[0]
    page.key("Enter", 13, "\r")
    return first


def test_a_node_is_found_by_typing(page: Browser) -> None:
    assert look_for(page, "verification") == "verification"
    arrive(page, "node=verification")
    assert "Introduced by the pass insert_verify" in page.text("#made-by")
    assert page.text("#node ul:not(.names)").splitlines()[-1] in ("still there in the last stage",)


def test_another_search_begins_with_what_was_typed_last(page: Browser) -> None:
    assert look_for(page, "num_rows") == "num_rows"
    assert "Nodes that call it, read it or were made by it" in page.text("#found") or page.texts("#found .heading")
    page.run("document.querySelector('#search').blur()")
    assert look_for(page, "update") == "update"  # typing replaces the text, which is selected


def test_a_pass_is_found_by_typing(page: Browser) -> None:
    assert look_for(page, "insert_ver") == "insert_verify"
    arrive(page, "#stage=insert_verify")
    assert page.run("document.querySelector('#found').hidden")


def test_the_table_of_steps_is_that_of_the_chosen_sequence(page: Browser, made: Made) -> None:
    def expected(sequence: int) -> list[str]:
        return [str(step["step"]) for step in made.data["trace"]["steps"] if step["sequence"] == sequence]

    def shown() -> list[str]:
        return [row[0] for row in cells(page, "#steps-box")]

    page.run("chooseSequence(1)")
    assert shown() == []
    page.run("document.querySelector('#steps-box summary').focus()")
    page.key("Enter", 13, "\r")
    page.wait("document.querySelector('#steps-box tbody') !== null")
    assert page.run("document.activeElement === document.querySelector('#steps-box summary')")
    assert shown() == expected(1)
    page.run("chooseSequence(0)")
    assert shown() == expected(0)
    assert page.run("document.querySelectorAll('#steps-box table').length") == 1


def test_a_token_of_the_target_says_what_it_is_and_where(page: Browser, made: Made) -> None:
    step = next(step for step in made.data["trace"]["steps"] if step["drafts"] and step["sequence"] == 0)
    page.run("chooseSequence(0)")
    page.point(f'#text [data-step="{step["step"]}"] .own', click=True)
    place = len(step["tokens"]) - 1
    assert f"Token {step['tokens'][place]}." in page.text("#why")
    own = f"{percent(step['own'])} (rank {step['own_rank']})"
    assert f"Under the target, its probability was {own}." in page.text("#why")
    assert f"text position {step['position'] + place}." in page.text("#why") and "many" not in page.text("#why")
    # As where K was chosen for the step.
    page.run(f"DATA.trace.steps.find((step) => step.step === {step['step']}).why = 'K = 3 promises 2 <b>tokens'")
    page.point(f'#text [data-step="{step["step"]}"] .own', click=True)
    assert "Why so many drafts: K = 3 promises 2 <b>tokens." in page.text("#why")


def test_a_rejected_draft_says_how_probable_the_token_was_that_the_target_chose_instead(
    page: Browser, made: Made
) -> None:
    index, place, step = next(found for found in steps_with(made, "rejected") if found[2]["sequence"] == 0)
    page.run("chooseSequence(0)")
    page.point(f'[data-draft="{index}.{place}"]')
    page.wait("!document.querySelector('#tip').hidden")
    draft = step["drafts"][place]
    known = f"{percent(draft['target'])} (rank {draft['rank']})"
    assert f"Under the target, the probability of this token was {known}." in page.text("#tip")
    assert f"With the drafter, its probability was {percent(draft['draft'])}." in page.text("#tip")
    own = f"{percent(step['own'])} under the target (rank {step['own_rank']})"
    assert f"\u201d, which the target chose instead, had {own}." in page.text("#tip")
    # As in a trace of an earlier version.
    page.run(f"DATA.trace.steps[{index}].own = DATA.trace.steps[{index}].drafts[{place}].rank = null")
    page.point(f'[data-draft="{index}.{place}"]', click=True)
    assert all(word not in page.text("#why") for word in ("instead", "null", "rank"))


def test_what_a_pass_did_is_listed_and_leads_to_the_nodes(page: Browser, made: Made) -> None:
    go(page, "#stage=insert_verify")
    stage = next(stage for stage in made.data["stages"] if stage["name"] == "insert_verify")
    for kind in ("added", "removed"):
        assert page.texts(f"#stage a.{kind}") == stage["changes"]["step"][kind]
    page.point("#stage a.removed", click=True)
    arrive(page, f"node={stage['changes']['step']['removed'][0]}")
    assert "removed by insert_verify" in page.text("#node")


def test_the_drawing_has_the_nodes_of_the_table(page: Browser) -> None:
    for place in ("#stage=insert_verify&graph=step", "#stage=lower_kernels&graph=target"):
        go(page, place)
        drawn = page.run("drawing.nodes().map((node) => node.id()).sort()")
        assert drawn == sorted(page.texts("#node-table td:nth-child(2)")) and len(drawn) > 10
        assert page.run("drawing.edges().length") >= len(drawn) / 2
    page.run("document.querySelector('#pick-inputs').click()")
    assert page.run("drawing.nodes().length") == len(page.texts("#node-table tbody tr")) > len(drawn)


def test_a_node_of_the_drawing_can_be_clicked(page: Browser) -> None:
    go(page, "#stage=insert_verify&graph=step")
    page.run("document.querySelector('#canvas').scrollIntoView({block: 'center'})")
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")  # the drawing notes it
    box = "document.querySelector('#canvas').getBoundingClientRect()"
    x, y = page.run(f"[{box}.x, {box}.y]")
    at = page.run("drawing.nodes('.call_module').filter(isInView).first().renderedPosition()")
    page.click(x + at["x"], y + at["y"])
    arrive(page, "node=")
    assert page.text("#node h3") == page.run("drawing.nodes('.chosen').id()")


@pytest.mark.parametrize("verdict", ["rejected", "behind", "accepted"])
def test_the_reason_is_shown_to_a_mouse_a_keyboard_and_a_link(verdict: str, page: Browser, made: Made) -> None:
    index, place, step = steps_with(made, verdict)[0]
    expected = why("strict")[verdict].split("{own}")[0].strip()
    page.run(f"chooseSequence({step['sequence']})")
    name = f'[data-draft="{index}.{place}"]'
    page.point(f"#text {name}")
    page.wait("!document.querySelector('#tip').hidden")
    assert page.text("#tip .reason").startswith(expected)
    assert f"Token {step['drafts'][place]['token']}." in page.text("#tip")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert page.run("document.querySelector('#tip').hidden")

    # The same with the keyboard alone: Tab to the text, then the arrow keys.
    page.run("document.querySelector('#pick-sequence').focus()")
    page.key("Tab", 9)
    for _ in range(400):
        if page.run(f"document.activeElement.matches({name!r})"):
            break
        page.key("ArrowRight", 39)
    assert page.text("#tip .reason").startswith(expected)
    page.key("Escape", 27)
    assert page.run("document.querySelector('#tip').hidden")
    page.key("Enter", 13, "\r")
    page.wait(f"document.body.dataset.shown === '#draft={index}.{place}'")
    assert page.text("#why .reason").startswith(expected)

    page.open(f"{made.page.as_uri()}#draft={index}.{place}")
    assert page.text("#why .reason").startswith(expected)


def test_the_text_says_how_its_tokens_were_chosen(page: Browser, made: Made) -> None:
    assert made.data["trace"]["about"]["temperatures"] == [1.0, 1.0]
    assert page.text("#sampling").startswith("Sampled at temperature 1: the target draws its tokens")
    page.run("DATA.trace.about.temperatures = [0, 0]; chooseSequence(0)")
    assert page.text("#sampling") == "Greedy: the target chooses the most probable token."
    steps = [step for step in made.data["trace"]["steps"] if step["sequence"] == 0]
    every = next(
        place for place, step in enumerate(steps)
        if step["drafts"] and all(draft["verdict"] == "accepted" for draft in step["drafts"])
    )  # fmt: skip
    page.point(f"#text .step:nth-of-type({every + 2}) .own")
    page.wait("!document.querySelector('#tip').hidden")
    assert "gives one token more behind them" in page.text("#tip")


def test_drafts_that_were_not_emitted_can_be_hidden(page: Browser, made: Made) -> None:
    shown = "[...document.querySelectorAll('#text .token')].filter((e) => e.getClientRects().length).length"
    steps = [step for step in made.data["trace"]["steps"] if step["sequence"] == 0]
    page.run("document.querySelector('#only-text').click()")
    assert page.run(shown) == sum(len(step["tokens"]) for step in steps)
    page.run("document.querySelector('#only-text').click()")
    assert page.run(shown) > sum(len(step["tokens"]) for step in steps)


def test_the_token_that_the_target_chose_is_named(page: Browser, made: Made) -> None:
    for index, place, step in steps_with(made, "rejected"):
        go(page, f"#draft={index}.{place}")
        own = page.run(f"visibleToken({json.dumps(step['texts'][place])}).trim()")
        assert page.run("document.querySelector('#why .quoted').textContent") == own


@pytest.mark.parametrize("sequence", [0, 1])
def test_hostile_tokens_are_shown_as_text(sequence: int, page: Browser, made: Made) -> None:
    page.run(f"chooseSequence({sequence})")
    steps = [step for step in made.data["trace"]["steps"] if step["sequence"] == sequence]
    texts = [*(draft["text"] for step in steps for draft in step["drafts"]), *(t for s in steps for t in s["texts"])]
    assert len(set(texts) & set(HOSTILE)) > 10
    shown = "".join(page.texts("#text .token"))
    for character in {character for text in texts for character in text if not character.isprintable()}:
        escape = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(character, f"\\u{ord(character):04x}")
        assert escape in shown and (character == "\n" or character not in shown)
    assert page.run("document.querySelectorAll('#text img, #text script').length") == 0
    directions = page.run("[...document.querySelectorAll('#text .token')].map((e) => getComputedStyle(e).unicodeBidi)")
    assert set(directions) == {"isolate"}


def test_numbers_are_those_of_the_trace(page: Browser, made: Made) -> None:
    data = made.data["trace"]
    for row, counts in zip(cells(page, "#acceptance"), data["acceptance"], strict=True):
        assert row[2] == f"{counts['accepted'] / counts['verified']:.2f}"
        assert row[3] == f"{counts['accepted']} of {counts['verified']}"
    times = [(row[0], row[3].replace(",", "")) for row in cells(page, "#times")]
    assert times == [(str(row["step"]), f"{row['ms']:.3f}") for row in data["times"]["rows"]]
    assert page.run("document.querySelector('#plot canvas').width") > 500


def test_a_large_drawing_starts_readable_at_what_the_pass_touched(page: Browser, made: Made) -> None:
    """And one click fits all of it, and another one goes back."""
    for stage in ("insert_draft", "insert_verify"):
        go(page, f"#stage={stage}&graph=step")
        assert page.run("drawing.zoom()") == 1 and page.run("drawing.nodes()[0].numericStyle('font-size')") >= 11
        touched = "drawing.nodes('.added, .moved, .changed').sort((a, b) => a.position('y') - b.position('y'))"
        assert page.run(f"{touched}.length > 0 && isInView({touched}[0])")
        start = page.run("drawing.pan()")
        assert not page.run("drawing.nodes().every(isInView)")
        page.point("#fit", click=True)
        assert page.run("drawing.nodes().every(isInView)") and page.run("drawing.zoom()") < 1
        page.point("#readable", click=True)
        assert page.run("drawing.zoom()") == 1 and page.run("drawing.pan()") == start


@pytest.mark.parametrize(("width", "dark"), [(1200, True), (800, False), (600, False), (500, False), (360, True)])
def test_it_fits_narrow_windows_and_dark_ones(width: int, dark: bool, page: Browser, made: Made) -> None:
    page.open(f"{made.page.as_uri()}#stage=index_rows&graph=target", width=width, dark=dark)
    assert page.run("document.documentElement.scrollWidth") <= width
    page.run("document.querySelectorAll('#time details').forEach((box) => { box.open = true })")
    for table in ("stage-list", "node-table", "times"):
        box = f"document.querySelector('#{table}').parentElement"
        assert page.run(f"{box}.scrollWidth <= {box}.clientWidth") and len(cells(page, f"#{table}")) > 10
    shown = page.run("document.querySelector('#node-table tbody td:nth-child(4)').getBoundingClientRect().toJSON()")
    assert shown["width"] > 0 and shown["right"] <= width
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(22, 25, 29)") == dark


def test_it_can_be_printed(page: Browser) -> None:
    assert len(page.call("Page.printToPDF", paperWidth=8.3, paperHeight=11.7)["data"]) > 50_000


def test_nothing_else_can_be_loaded(made: Made, shown: Browser) -> None:
    shown.open(made.page.as_uri())
    load = "const image = new Image(); image.src = 'https://localhost/a.png'"
    refused = "document.addEventListener('securitypolicyviolation', () => done(true))"
    assert shown.run(f"new Promise((done) => {{ {refused}; {load}; setTimeout(() => done(false), 5000) }})")
    shown.open("about:blank")
    assert shown.errors and all("Content Security Policy" in error for error in shown.errors)
    shown.errors.clear()
    shown.requests.clear()


def test_pictures_can_be_taken(page: Browser, tmp_path: Path) -> None:
    page.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
