"use strict";
// The list of stages, and what the pass of the chosen one did.

const SIGNS = { added: "+", moved: "\u2192", removed: "\u2212", changed: "~" };
const SAID = {
  added: "Added by this pass",
  moved: "Moved here from another graph",
  removed: "Removed",
  changed: "Changed",
  resized: "The same, with a value of another size",
};

function drawStageList(chosen) {
  const rows = DATA.stages.map((stage, index) => {
    const sum = counts(stage);
    const cells = Object.keys(SIGNS).map((kind) => (sum[kind] ? el("span", { class: kind }, SIGNS[kind] + sum[kind]) : ""));
    const misses = (stage.near_misses || []).length;
    return {
      attributes: { class: index === chosen ? "chosen" : null, "aria-current": index === chosen ? "true" : null },
      cells: [String(index), link({ stage: stage.name }, stage.name), ...(idle(stage) || cells), misses ? String(misses) : ""],
    };
  });
  table(byId("stage-list"), ["", "stage", "added #", "moved #", "removed #", "changed #", "near misses #"], rows);
}

/** In place of numbers, for a pass that changed no node: why, in its own words. */
function idle(stage) {
  if (stage.pass === undefined || Object.keys(stage.changes).length) return null;
  const said = (stage.notes || []).map(String).find((note) => note.length < 80);
  const text = stage.matches ? `${plural(stage.matches, "place")}, but no node changed` : `did nothing${said ? ": " + said : ""}`;
  return [{ span: Object.keys(SIGNS).length, value: el("span", { class: "hint idle" }, text) }];
}

function drawStage(index) {
  const stage = DATA.stages[index];
  const facts = [];
  if (stage.pass === undefined) {
    facts.push(el("p", {}, "This is the program as it was traced, before any pass."));
    if (DATA.about.notes) facts.push(el("ul", {}, DATA.about.notes.map((note) => el("li", {}, String(note)))));
  }
  else {
    if (stage.about) facts.push(el("p", {}, stage.about.replaceAll("``", "")));
    const expected = stage.expected === null || stage.expected === undefined ? "" : ` of ${stage.expected} expected`;
    facts.push(el("p", { class: "hint" },
      `It rewrote ${plural(stage.matches, "place")}${expected} in ${number(stage.seconds * 1000, 1)} ms`,
      stage.bytes_shared ? ` and saved ${bytes(stage.bytes_shared)} by sharing.` : "."));
  }
  const notes = [...(stage.notes || []).map((note) => el("li", {}, String(note))), ...nearMisses(stage.near_misses || [])];
  if (notes.length) facts.push(el("ul", {}, notes));
  const graphs = Object.entries(stage.changes);
  if (!graphs.length && stage.pass !== undefined) facts.push(el("p", {}, "It changed no node."));
  fill(byId("stage"), el("h3", {}, `${index} ${stage.name}`), facts,
    graphs.map(([name, changes]) => drawChanges(index, name, changes)));
}

function nearMisses(misses) {
  return misses.map((miss) => el("li", { class: "miss" }, "Near miss at ", el("code", {}, miss.where), ": " + miss.reason + "."));
}

/** The changes of one graph, as lists of links. A node that was removed is shown in the stage before. */
function drawChanges(index, graph, changes) {
  const before = DATA.stages[index].before;
  const gone = DATA.stages[index].graphs[graph] === undefined ? " (this graph is gone)" : "";
  const made = new Set(changes.added);
  const parts = [...Object.keys(SIGNS), "resized"].map((kind) => {
    const names = kind === "changed" ? rewritten(changes) : kind === "resized" ? resized(changes) : changes[kind];
    if (!names.length) return null;
    const at = kind === "removed" ? before : index;
    const items = names.map((name) => el("li", {},
      nodeLink(at, graph, name, { class: kind }),
      kind === "changed" ? el("span", { class: "hint" }, " " + changes.changed[name].join(", ")) : null,
      kind === "removed" && made.has(name) ? el("span", { class: "hint" }, " made anew") : null));
    return el("details", { open: names.length <= 24 && kind !== "resized" },
      el("summary", { class: kind }, `${SIGNS[kind] || ""} ${SAID[kind]}: ${plural(names.length, "node")}`),
      el("ul", { class: "names" }, items));
  });
  return el("div", { class: "changes" }, el("h4", {}, graph === "step" ? "step graph" : `module ${graph}`, gone), parts);
}

/** A link to a node, with its code and shape while it is pointed at. */
function nodeLink(stage, graph, name, attributes) {
  const node = nodeOf(stage, graph, name);
  const anchor = link({ stage: DATA.stages[stage].name, graph, node: name }, breakable(name), attributes);
  return node ? tip.of(anchor, () => nodeTip(node)) : anchor;
}

function nodeTip(node) {
  return [
    el("strong", {}, node.name),
    el("div", {}, `made by ${node.made_by || "nobody known"}`),
    el("div", {}, node.shape || ""),
    node.device === undefined ? "" : el("div", {}, `on device ${node.device} alone`),
    el("code", {}, node.code.length > 300 ? node.code.slice(0, 300) + "\u2026" : node.code),
  ];
}
