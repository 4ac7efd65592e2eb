"use strict";
// Keeps what is chosen, which the address of the page names, and draws accordingly.

const place = { stage: DATA.stages.length - 1, graph: "step", node: undefined, view: undefined, inputs: false };

/** Changes what is chosen by the tools above the graph. */
function choose(change) {
  if ("stage" in change) location.hash = hashOf({ stage: DATA.stages[Number(change.stage)].name, graph: place.graph });
  else if ("graph" in change) location.hash = hashOf({ stage: DATA.stages[place.stage].name, graph: change.graph });
  else {
    Object.assign(place, change);
    drawGraph(place, choose);
  }
}

/** Follows the address: #stage=NAME, #stage=NAME&graph=NAME&node=NAME, #node=NAME, #draft=N.M, or a section. */
function follow() {
  tip.hide();
  show();
  document.body.dataset.shown = location.hash;
}

function show() {
  const named = new URLSearchParams(location.hash.slice(1));
  if (named.has("draft")) {
    chooseDraft(named.get("draft"));
    return;
  }
  if (!named.has("stage") && !named.has("node") && !named.has("graph")) {
    const section = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (section) section.scrollIntoView();
    return;
  }
  const before = place.stage;
  goTo(named);
  draw();
  if (named.has("node") || named.has("graph")) byId("graph").scrollIntoView();
  else if (before !== place.stage) byId("stage").scrollIntoView({ block: "nearest" });
}

/** The place that an address names. A node without a stage is meant in the last stage that has it. */
function goTo(named) {
  place.node = named.get("node") || undefined;
  place.graph = named.get("graph") || (place.node === undefined ? place.graph : graphWith(place.node)) || "step";
  const stage = STAGES.has(named.get("stage")) ? STAGES.get(named.get("stage")) : undefined;
  const last = place.node === undefined ? undefined : lastStageWith(place.graph, place.node);
  place.stage = stage !== undefined ? stage : last !== undefined ? last : place.stage;
  if (DATA.stages[place.stage].graphs[place.graph] === undefined) place.graph = "step";
  if (place.node !== undefined && !nodeOf(place.stage, place.graph, place.node)) place.node = undefined;
  place.view = undefined;
}

function graphWith(node) {
  const names = new Set(DATA.stages.flatMap((stage) => Object.keys(stage.graphs)));
  return ["step", ...names].find((name) => lastStageWith(name, node) !== undefined);
}

let drawnStage = null;

function draw() {
  if (drawnStage !== place.stage) {
    drawStageList(place.stage);
    drawStage(place.stage);
    drawnStage = place.stage;
  }
  drawGraph(place, choose);
  drawNode(place.stage, place.graph, place.node);
}

/** Nodes whose name, code or pass contains the text; each once, in the last stage that has it. */
function search(text) {
  const wanted = text.trim().toLowerCase();
  const found = new Map();
  if (!wanted) return [];
  for (let stage = DATA.stages.length - 1; stage >= 0; stage -= 1) {
    for (const graph of Object.keys(DATA.stages[stage].graphs)) {
      for (const node of graphOf(stage, graph).nodes) {
        const key = graph + " " + node.name;
        const texts = [node.name, node.code, node.made_by || ""];
        if (!found.has(key) && texts.some((own) => own.toLowerCase().includes(wanted))) found.set(key, { stage, graph, node });
      }
    }
  }
  const rank = ({ node }) => (node.name.toLowerCase() === wanted ? 0 : node.name.toLowerCase().includes(wanted) ? 1 : 2);
  return [...found.values()].sort((a, b) => rank(a) - rank(b));
}

/** What is said of a node that is last in a stage: by what pass it was removed. */
function goneAfter(stage) {
  const next = DATA.stages.find((other) => other.before === stage);
  return next ? `, removed by ${next.name}` : "";
}

function showFound() {
  const text = byId("search").value, found = search(text);
  const wanted = text.trim().toLowerCase(), named = ({ node }) => node.name.toLowerCase().includes(wanted);
  const item = ({ stage, graph, node }) => el("li", {}, nodeLink(stage, graph, node.name),
    el("span", { class: "hint" }, ` ${graph === "step" ? "step graph" : `module ${graph}`}, made by ${node.made_by || "nobody known"}${goneAfter(stage)}`));
  const first = found.slice(0, 40), items = first.filter(named).map(item), others = first.filter((one) => !named(one)).map(item);
  if (others.length) items.push(el("li", { class: "hint heading" }, "Nodes that call it, read it or were made by it"), ...others);
  const passes = DATA.stages.filter((stage) => wanted && stage.name.includes(wanted));
  const exact = found.length && found[0].node.name.toLowerCase() === wanted;
  items.splice(exact ? 1 : 0, 0, ...passes.map((stage) => el("li", {}, link({ stage: stage.name }, stage.name), el("span", { class: "hint" }, " what this pass did"))));
  if (found.length > 40) items.push(el("li", { class: "hint" }, `${found.length - 40} more`));
  if (!items.length && wanted) items.push(el("li", { class: "hint" }, "No node and no pass has that."));
  fill(byId("found"), items).hidden = !items.length;
}

function begin() {
  const about = DATA.about;
  byId("about").textContent = about.target === undefined ? "The dump does not say what was compiled."
    : `${about.num_speculative_tokens} drafts per step, verified by the rule ${about.rule}, on ${about.device}`;
  drawWeights();
  drawDrafts();
  drawTime();
  draw();
  byId("search").addEventListener("input", showFound);
  byId("search").addEventListener("focus", (event) => {
    event.target.select();
    showFound();
  });
  byId("canvas").addEventListener("mouseleave", tip.hide); // The drawing says nothing when the mouse leaves it from a node.
  byId("searching").addEventListener("submit", (event) => {
    event.preventDefault();
    const first = byId("found").querySelector("a");
    if (first) first.click();
  });
  document.addEventListener("click", (event) => { if (event.target !== byId("search")) byId("found").hidden = true; });
  document.addEventListener("keydown", (event) => {
    walkTokens(event);
    if (event.key === "Escape") {
      tip.hide();
      byId("found").hidden = true;
    }
  });
  window.addEventListener("hashchange", follow);
  window.addEventListener("resize", () => plot && plot.setSize({ width: byId("plot").clientWidth, height: 280 }));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    drawGraph(place, choose);
    if (DATA.trace) drawPlot();
  });
  follow();
}

begin();
