"""The page holds what the dump and the trace say, all of it, once, and as text."""

from __future__ import annotations

import configparser
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specgraph import SpeculativeDecoder
from specgraph.errors import ConfigError
from specgraph.explore import explore
from specgraph.explore.page import LIBRARIES, SCRIPTS, STYLES
from specgraph.ir.graphs import DEVICE
from specgraph.ir.traffic import step_traffic
from tests.explore.conftest import HOSTILE, SPEED, Made, Scripts, page_data

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "specgraph" / "explore"


def graphs_of(data: dict[str, Any], stage: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The nodes of a stage as the page holds them."""
    return {name: [data["nodes"][place] for place in graph["nodes"]] for name, graph in stage["graphs"].items()}


def test_every_node_of_every_stage_is_in_the_page_once(made: Made) -> None:
    data = made.data
    texts = [json.dumps(node, sort_keys=True) for node in data["nodes"]]
    assert len(set(texts)) == len(texts)
    folders = sorted(path.parent for path in made.dump.glob("*/nodes.json"))
    assert [stage["name"] for stage in data["stages"]] == [folder.name[3:] for folder in folders]
    used = set()
    for stage, folder in zip(data["stages"], folders, strict=True):
        listed = json.loads((folder / "nodes.json").read_text())
        shown = graphs_of(data, stage)
        assert shown.keys() == listed.keys()
        for name, nodes in listed.items():
            assert [node["name"] for node in shown[name]] == [node["name"] for node in nodes]
            for node, own in zip(shown[name], nodes, strict=True):
                said = {key: own["pass" if key == "made_by" else key] for key in node if key != "size"}
                assert node == said | ({"size": node["size"]} if "size" in node else {})
            used |= set(stage["graphs"][name]["nodes"])
    assert used == set(range(len(texts)))


def test_the_dump_lists_the_nodes_of_the_programs(made: Made) -> None:
    for stage, (name, program) in zip(made.data["stages"], made.decoder.stages.items(), strict=False):
        assert stage["name"] == name
        shown = graphs_of(made.data, stage) if name == "insert_verify" else {}
        for graph, nodes in shown.items():
            own = (program.graph if graph == "step" else program.modules[graph].graph).nodes
            assert [(node["name"], node["made_by"]) for node in nodes] == [(n.name, n.meta["pass_name"]) for n in own]


def test_a_node_of_one_device_alone_says_which(shared: tuple[SpeculativeDecoder, Path]) -> None:
    decoder, page = shared
    data, devices = page_data(page), set[int | None]()
    for stage in data["stages"]:
        shown = {node["name"]: node.get(DEVICE) for node in graphs_of(data, stage)["target"]}
        nodes = decoder.stages[stage["name"]].modules.unchanged["target"].graph.nodes
        assert shown == {node.name: node.meta.get(DEVICE) for node in nodes}
        devices |= {*shown.values()}
    assert devices == {None, 0, 1}


def test_provenance_is_what_a_pass_has_changed(made: Made) -> None:
    data, seen = made.data, set()
    for stage in data["stages"][1:]:
        before, after = graphs_of(data, data["stages"][stage["before"]]), graphs_of(data, stage)
        for name in before.keys() | after.keys():
            old = {node["name"]: node for node in before.get(name, [])}
            new = {node["name"]: node for node in after.get(name, [])}
            changes = stage["changes"].get(name, {"added": [], "moved": [], "removed": [], "changed": {}})
            added, moved, removed = (set(changes[kind]) for kind in ("added", "moved", "removed"))
            assert (old.keys() - removed) | added | moved == new.keys()
            assert not (old.keys() - removed) & (added | moved) and removed <= old.keys()
            assert all(new[node]["made_by"] == stage["pass"] for node in added)
            assert all(new[node]["made_by"] != stage["pass"] for node in moved)
            kept = old.keys() - removed
            assert {node for node in kept if old[node] != new[node]} == set(changes["changed"])
            assert all(what for what in changes["changed"].values())
            seen |= {kind for kind, found in changes.items() if found}
    assert seen == {"added", "moved", "removed", "changed"}


def test_what_is_said_of_passes_is_the_report(made: Made) -> None:
    reports = made.decoder._reports
    for stage, report in zip(made.data["stages"][1:], reports, strict=False):
        misses = [{"where": miss.where, "reason": miss.reason} for miss in report.result.near_misses]
        assert stage["pass"] == report.name and stage["matches"] == report.result.matches
        assert stage["near_misses"] == misses and stage["notes"] == [*report.result.notes]
        assert stage["about"] and not stage["about"].startswith(("Options", "No options"))
    assert made.data["weights"]["near_misses"] and made.data["weights"]["shared"]


def test_bytes_are_those_of_the_tensors(made: Made) -> None:
    data = made.data
    program = made.decoder.stages["share_weights"]
    sizes: dict[int, int] = {}
    for module in program.modules.values():
        for node in module.graph.find_nodes(op="get_attr"):
            tensor = module.get_parameter(node.target) if node.target in dict(module.named_parameters()) else None
            if tensor is not None:
                sizes[tensor.data_ptr()] = tensor.nbytes
    buffers = {name for t in data["weights"]["shared"] for name in t["names"]}
    assert buffers and data["weights"]["total"] >= sum(sizes.values())
    state = program_state(made, data["sizes"])
    last = graphs_of(data, data["stages"][-1])["step"]
    inputs = {node["name"]: node["size"] for node in last if node["op"] == "placeholder" and node["name"] != "window"}
    assert inputs == state


def program_state(made: Made, sizes: dict[str, int]) -> dict[str, int]:
    """The bytes of the inputs of the last stage, from allocating them."""
    from specgraph.ir.state import allocate, num_bytes

    program = made.decoder.stages["index_rows"]
    state = allocate(program, sizes, program.target.device)
    return {name: num_bytes(program, {name: value}) for name, value in state.items()}


def test_drafts_are_those_of_the_trace(made: Made) -> None:
    data = made.data["trace"]
    assert made.out.trace is not None
    for shown, step in zip(data["steps"], made.out.trace, strict=True):
        assert shown["tokens"] == [*step.tokens] and shown["seconds"] == step.seconds
        assert (shown["own"], shown["own_rank"]) == (step.own_probability, step.own_rank)
        assert [draft["rank"] for draft in shown["drafts"]] == [draft.target_rank for draft in step.drafts]
        assert [(d["token"], d["verdict"] == "accepted", d["target"], d["draft"]) for d in shown["drafts"]] == [
            (d.token, d.accepted, d.target_probability, d.draft_probability) for d in step.drafts
        ]
    verdicts = {draft["verdict"] for step in data["steps"] for draft in step["drafts"]}
    assert {"accepted", "rejected", "behind"} <= verdicts
    steps = [step for step in made.out.trace if not step.prompt]
    for place, row in enumerate(data["acceptance"]):
        drafts = [step.drafts[place] for step in steps if place < len(step.drafts)]
        assert row["verified"] == len(drafts) and row["accepted"] == sum(draft.accepted for draft in drafts)
        assert row["reached"] == sum(place <= step.num_accepted for step in steps if place < len(step.drafts))


def test_limits_are_those_of_the_bytes_of_a_step(made: Made) -> None:
    times = made.data["trace"]["times"]
    assert made.out.trace is not None and times["bandwidth"] == SPEED and times["source"] == "as the test says"
    program, compared = made.decoder.stages["insert_verify"], 0
    for row in times["rows"]:
        steps = [step for step in made.out.trace if step.step == row["step"]]
        assert row["ms"] == 1e3 * steps[0].seconds and row["sequences"] == len(steps)
        if row["prompt"]:
            assert row["limit_ms"] is None
            continue
        mean = sum(step.position for step in steps) / len(steps)
        traffic = step_traffic(program, len(steps), mean, 3)
        assert row["limit_ms"] == pytest.approx(1e3 * traffic.total / SPEED)
        assert sum(row["bytes"].values()) == traffic.total
        compared += 1
    assert compared > 4


def test_no_text_leaves_its_place(made: Made) -> None:
    text = made.page.read_text("utf-8")
    parsed = Scripts(text)
    expected = 1 + len(LIBRARIES) + len(SCRIPTS)
    assert parsed.tags.count("script") == parsed.tags.count("/script") == expected
    assert "img" not in parsed.tags and [tag for tag in parsed.tags if not tag.startswith("/")].count("title") == 1
    data = next(script for attributes, script in parsed.scripts if attributes.get("id") == "data")
    assert data.isascii() and not set(data) & set("<>&")
    texts = {text for step in made.data["trace"]["steps"] for text in step["texts"]}
    assert len(texts & set(HOSTILE)) > 10


def test_no_script_of_ours_writes_html() -> None:
    for name in SCRIPTS:
        text = (ROOM / "page" / name).read_text("utf-8")
        assert not any(word in text for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("))


def test_all_that_the_page_is_made_of_is_installed_with_its_licence() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    declared = setup["options.package_data"]["specgraph.explore"].split(", ")
    installed = {path.relative_to(ROOM).as_posix() for pattern in declared for path in ROOM.glob(pattern)}
    licences = [f"vendor/LICENSE-{licence}.txt" for licence in LIBRARIES.values()]
    files = [*STYLES, *licences, "page/page.html", *(f"page/{name}" for name in SCRIPTS)]
    assert {*files, *(f"vendor/{name}" for name in LIBRARIES)} <= installed
    about = (ROOM / "vendor" / "README.md").read_text("utf-8")
    for name in LIBRARIES:
        assert f"`{name}`" in about


def test_a_page_without_a_trace_and_of_a_dump_without_a_record(made: Made, tmp_path: Path) -> None:
    page = explore(made.dump, tmp_path / "page.html")
    assert page_data(page)["trace"] is None
    folder = copied(made, tmp_path)
    record = json.loads((folder / "compilation.json").read_text())
    (folder / "compilation.json").write_text(json.dumps({key: record[key] for key in ("format", "stages")}))
    data = page_data(explore(folder, page, trace=made.trace))
    assert data["calls"] == [] and data["trace"]["times"]["median_limit_ms"] is None
    assert all(stage["before"] is None for stage in data["stages"])


def copied(made: Made, to: Path) -> Path:
    """A copy of the dump without its weights, to be damaged."""
    return Path(shutil.copytree(made.dump, to / "graphs", ignore=shutil.ignore_patterns("*.safetensors", "*.py")))


@pytest.mark.parametrize("name", ["dump.json", "compilation.json", "00_trace/nodes.json", "00_trace/weights.json"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff\xfe", b'{"step": 3}', b'{"step": [{"name": 3}]}'])
def test_a_damaged_dump_is_refused_and_nothing_is_written(
    name: str, content: bytes | None, made: Made, tmp_path: Path
) -> None:
    folder = copied(made, tmp_path)
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        explore(folder, tmp_path / "page.html")
    assert folder.name in str(error.value) and "\n" not in str(error.value) and str(error.value).endswith(".")
    assert [path.name for path in tmp_path.iterdir()] == ["graphs"]


def test_what_is_no_dump_is_refused_by_what_it_is(made: Made, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    with pytest.raises(ConfigError, match="there is no such folder; give one that"):
        explore(tmp_path / "nothing", page)
    with pytest.raises(ConfigError, match=r"is no dump \(it has no dump\.json\)"):
        explore(tmp_path, page)
    with pytest.raises(ConfigError, match="is one stage of a dump; give the folder above it"):
        explore(made.dump / "00_trace", page)
    folder = copied(made, tmp_path)
    (folder / "dump.json").write_text('{"written_by": "specgraph", "format": 2, "files": []}')
    with pytest.raises(ConfigError, match="has format 2, this version reads 3; write the dump again"):
        explore(folder, page)
    (folder / "dump.json").write_text('{"written_by": "somebody", "format": 3}')
    with pytest.raises(ConfigError, match="was not written by specgraph"):
        explore(folder, page)
    assert not page.exists()


@pytest.mark.parametrize("place", ["no/such/folder/page.html", "."])
def test_a_place_that_cannot_be_written_is_refused(place: str, made: Made, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no file that can be written; give a file in a folder that exists"):
        explore(made.dump, tmp_path / place)


def test_a_page_is_replaced_only_when_it_is_complete(made: Made, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("before")
    with pytest.raises(ConfigError):
        explore(made.dump, page, trace=tmp_path / "nothing")
    assert page.read_text() == "before"
    explore(made.dump, page)
    assert page.read_text().startswith("<!doctype html>") and [p.name for p in tmp_path.iterdir()] == ["page.html"]
