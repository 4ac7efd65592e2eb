"use strict";
// The drawing of a graph, by cytoscape with the layout of dagre, and the table of the same nodes.

cytoscape.use(cytoscapeDagre);
const MOST_DRAWN = 80; // More nodes than this take dagre some seconds, so a part of the graph is chosen by default.
const READABLE = 1, MARGIN = 16; // The zoom at which labels have 11 pixels, and pixels around the drawing.
let drawing = null;

/** Whether a node is left out by default: an input, a weight, an item of a tuple, a size, or what gathers the state. */
function isMinor(node) {
  const size = node.op !== "output" && node.bytes === "0" && /^[\w*+?-]+$/.test(node.shape) && node.shape !== "None";
  return size || ["placeholder", "get_attr"].includes(node.op) || ["getitem", "gather_state"].includes(shortCall(node));
}

/** The views of a graph: all of it, what the pass changed, what is around the chosen node, what one device runs, or one layer. */
function viewsOf(stage, graph, name, inputs) {
  const count = graph.nodes.filter((node) => inputs || !isMinor(node)).length;
  const layers = [...new Set(graph.layers.filter((layer) => layer !== null))];
  const views = [["all", `the whole graph (${plural(count, "node")}${count > 4 * MOST_DRAWN ? ", slow" : ""})`]];
  if (statuses(stage, graph.name).size) views.push(["changes", "what this pass touched"]);
  if (name !== undefined) views.push(["around", `around ${name}`]);
  const devices = [...new Set(graph.nodes.map((node) => node.device).filter((device) => device !== undefined))].sort();
  views.push(...devices.map((device) => ["device " + device, `what device ${device} runs`]));
  return views.concat(layers.map((layer) => ["layer " + layer, "layer " + layer]));
}

function defaultView(graph, name, views) {
  const count = graph.nodes.filter((node) => !isMinor(node)).length;
  if (count <= MOST_DRAWN) return "all";
  const layer = name === undefined ? null : graph.named.get(name).layer;
  if (layer !== null) return "layer " + layer;
  if (name !== undefined) return "around";
  const first = views.find(([view]) => view.startsWith("layer"));
  return first ? first[0] : views.length > 1 ? "changes" : "all";
}

function nodesOfView(stage, graph, view, name) {
  if (view === "changes") return graph.nodes.filter((node) => statusOf(stage, graph.name, node.name) !== "");
  if (view === "around") {
    const near = around(graph, name, 2);
    return graph.nodes.filter((node) => near.has(node.name));
  }
  if (view.startsWith("device ")) return graph.nodes.filter((node) => node.device === undefined || "device " + node.device === view);
  if (view.startsWith("layer ")) {
    const layer = Number(view.slice("layer ".length));
    return graph.nodes.filter((node, index) => graph.layers[index] === layer);
  }
  return graph.nodes;
}

/** The names of the nodes at most so many edges away. */
function around(graph, name, distance) {
  let found = new Set([name]);
  for (let step = 0; step < distance; step += 1) {
    const next = new Set(found);
    for (const at of found) {
      if (!graph.named.has(at)) continue;
      for (const other of [...graph.named.get(at).node.inputs, ...graph.users.get(at)]) next.add(other);
    }
    found = next;
  }
  return found;
}

/** Draws the chosen graph. `place` is {stage, graph, node, view, inputs}, as `main.js` keeps it. */
function drawGraph(place, choose) {
  const stage = place.stage, graph = graphOf(stage, place.graph);
  const views = viewsOf(stage, graph, place.node, place.inputs);
  const view = views.some(([own]) => own === place.view) ? place.view : defaultView(graph, place.node, views);
  const shown = nodesOfView(stage, graph, view, place.node)
    .filter((node) => place.inputs || !isMinor(node) || node.name === place.node);
  drawTools(place, views, view, choose);
  drawNodeTable(stage, graph, shown, place.node);
  drawCanvas(stage, graph, shown, place.node);
}

function drawTools(place, views, view, choose) {
  const graphs = Object.keys(DATA.stages[place.stage].graphs);
  const pick = (label, id, options, value, key) => [el("label", { for: id }, label),
    el("select", { id, change: (event) => choose({ [key]: event.target.value }) },
      options.map(([own, text]) => el("option", { value: own, selected: own === value }, text)))];
  fill(byId("graph-tools"),
    pick("Stage", "pick-stage", DATA.stages.map((stage, index) => [String(index), `${index} ${stage.name}`]), String(place.stage), "stage"),
    pick("Graph", "pick-graph", graphs.map((name) => [name, name === "step" ? "step graph" : "module " + name]), place.graph, "graph"),
    pick("Show", "pick-view", views, view, "view"),
    el("label", {}, el("input", { type: "checkbox", id: "pick-inputs", checked: place.inputs, change: (event) => choose({ inputs: event.target.checked }) }),
      " inputs, weights, sizes and items of tuples"),
    el("button", { type: "button", id: "fit", title: "shows the whole drawing", click: () => drawing && drawing.fit(undefined, MARGIN) }, "Fit"),
    el("button", { type: "button", id: "readable", title: "shows labels in a size to be read", click: () => drawing && startReadable() }, "100 %"));
  fill(byId("legend"), "Colours: ", ["added", "moved", "changed"].map((kind) => el("span", { class: "swatch " + kind }, SAID[kind].toLowerCase())),
    el("span", { class: "swatch same" }, "not touched, or only of another size"), "In a thick frame: a call of a module. In a dashed oval: an input or a weight. Drag to move, scroll to zoom, click a node for details.");
}

function drawNodeTable(stage, graph, shown, name) {
  const minor = graph.nodes.filter(isMinor), left = minor.filter((node) => !shown.includes(node)).length;
  byId("node-table-title").textContent = `Nodes of this view: ${shown.length} of ${graph.nodes.length}`
    + (left ? ` (${left} inputs, weights, sizes and items of tuples are left out unless asked for above)` : "");
  const rows = shown.map((node) => {
    const status = statusOf(stage, graph.name, node.name);
    return {
      attributes: { class: node.name === name ? "chosen" : null },
      cells: [el("span", { class: status }, SIGNS[status] || ""), nodeLink(stage, graph.name, node.name), breakable(shortCall(node)),
        breakable(node.made_by || ""), node.shape || "", bytes(node.size), bytes(weightBytes(stage, graph.name, node))],
    };
  });
  table(byId("node-table"), ["", "node", "calls", "made by", "shape", "bytes #", "weights read #"], rows);
  const chosen = byId("node-table").querySelector("tr.chosen"), box = byId("node-table").parentElement;
  if (chosen) box.scrollTop = chosen.offsetTop - byId("node-table").tHead.offsetHeight;
}

let drawn = ""; // What the drawing shows; another node of it can be chosen without laying it out again.

function drawCanvas(stage, graph, shown, name) {
  const names = new Set(shown.map((node) => node.name));
  const key = JSON.stringify([stage, graph.name, [...names], colour("--page")]);
  if (key !== drawn) {
    layOut(stage, graph, shown, names);
    startReadable();
    drawn = key;
  }
  drawing.nodes().removeClass("chosen");
  if (name === undefined || !names.has(name)) return;
  const node = drawing.getElementById(name).addClass("chosen");
  if (!isInView(node)) drawing.center(node);
}

function isInView(node) {
  const box = node.renderedBoundingBox();
  return box.x1 > 0 && box.y1 > 0 && box.x2 < drawing.width() && box.y2 < drawing.height();
}

function layOut(stage, graph, shown, names) {
  if (drawing) drawing.destroy();
  tip.hide(); // That of a node which is no longer drawn would stay.
  const elements = shown.map((node) => ({
    data: { id: node.name, ...labelOf(node) },
    classes: [statusOf(stage, graph.name, node.name) || "same", node.op].join(" "),
  }));
  for (const node of shown) {
    for (const input of sourcesOf(graph, node, names)) {
      elements.push({ data: { id: `${input} ${node.name}`, source: input, target: node.name } });
    }
  }
  drawing = cytoscape({
    container: byId("canvas"), elements, style: looks(), minZoom: 0.05, maxZoom: 3,
    layout: { name: "dagre", rankDir: "TB", nodeSep: 18, rankSep: 34, edgeSep: 6, animate: false, fit: true, padding: MARGIN },
  });
  listen(stage, graph);
}

/** The nodes of the drawing that a node reads, directly or as items of a tuple that are not drawn themselves. */
function sourcesOf(graph, node, names) {
  const found = new Set();
  const walk = (input) => {
    const own = graph.named.get(input);
    if (names.has(input)) found.add(input);
    else if (own && shortCall(own.node) === "getitem") own.node.inputs.forEach(walk);
  };
  node.inputs.forEach(walk);
  return found;
}

function listen(stage, graph) {
  drawing.on("tap", "node", (event) => {
    location.hash = hashOf({ stage: DATA.stages[stage].name, graph: graph.name, node: event.target.id() });
  });
  drawing.on("mouseover", "node", (event) => {
    const box = byId("canvas").getBoundingClientRect(), at = event.target.renderedPosition();
    tip.show(nodeTip(graph.named.get(event.target.id()).node), box.left + at.x, box.top + at.y + 12);
  });
  drawing.on("mouseout", "node", () => tip.hide());
}

/** A graph that was fitted may be too small to read: then it starts at a readable size, at the first node that the pass touched. */
function startReadable() {
  if (drawing.zoom() >= READABLE) return;
  const touched = drawing.nodes(".added, .moved, .changed").min((node) => node.position("y")).ele;
  const box = drawing.elements().boundingBox(), at = touched ? touched.position() : { x: box.x1 + box.w / 2, y: box.y1 };
  drawing.viewport({ zoom: READABLE, pan: {
    x: shift(at.x, box.x1, box.x2, drawing.width(), 0.5), y: shift(at.y, box.y1, box.y2, drawing.height(), 0.3) } });
}

/** How far to move a drawing from `low` to `high`, so that `at` is at a share of the room and none of the room stays empty. */
function shift(at, low, high, room, share) {
  const first = MARGIN - READABLE * low, last = room - MARGIN - READABLE * high;
  return last > first ? (first + last) / 2 : Math.min(first, Math.max(last, share * room - READABLE * at));
}

/** The label of a node, and the size of its box. */
function labelOf(node) {
  const call = shortCall(node);
  const name = node.name.length > 28 ? node.name.slice(0, 27) + "\u2026" : node.name;
  const lines = call === node.name ? [name] : [name, call];
  return { label: lines.join("\n"), width: 16 + 6.2 * Math.max(...lines.map((line) => line.length)), height: 12 + 13 * lines.length };
}

function looks() {
  const fills = { same: "--same", added: "--added-fill", moved: "--moved-fill", changed: "--changed-fill" };
  return [
    { selector: "node", style: {
      label: "data(label)", "text-wrap": "wrap", "text-valign": "center", "font-size": 11, shape: "round-rectangle",
      "font-family": "system-ui, sans-serif", color: colour("--text"), width: "data(width)", height: "data(height)",
      "border-width": 1, "border-color": colour("--line"),
    } },
    ...Object.entries(fills).map(([kind, name]) => ({ selector: "node." + kind, style: { "background-color": colour(name) } })),
    { selector: "node.call_module", style: { "border-width": 2, "border-color": colour("--text") } },
    { selector: "node.placeholder, node.get_attr", style: { shape: "ellipse", "border-style": "dashed" } },
    { selector: "node.chosen", style: { "border-width": 3, "border-color": colour("--accent") } },
    { selector: "edge", style: {
      width: 1, "line-color": colour("--edge"), "curve-style": "bezier", "target-arrow-shape": "triangle",
      "target-arrow-color": colour("--edge"), "arrow-scale": 0.7,
    } },
  ];
}
