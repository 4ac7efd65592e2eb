"use strict";
// The data of the page, and the questions that several parts of the page ask of it.

const DATA = JSON.parse(byId("data").textContent);
const STAGES = new Map(DATA.stages.map((stage, index) => [stage.name, index]));
const read = new Map();

/** A graph of a stage: its nodes in order, by name, and for each name the nodes that read it. */
function graphOf(stage, name) {
  const key = stage + " " + name;
  const stored = DATA.stages[stage].graphs[name];
  if (stored !== undefined && !read.has(key)) {
    const nodes = stored.nodes.map((place) => DATA.nodes[place]);
    const users = new Map(nodes.map((node) => [node.name, []]));
    for (const node of nodes) for (const input of node.inputs) if (users.has(input)) users.get(input).push(node.name);
    const named = new Map(nodes.map((node, index) => [node.name, { node, layer: stored.layers[index] }]));
    read.set(key, { name, nodes, named, users, layers: stored.layers });
  }
  return read.get(key);
}

function nodeOf(stage, graph, name) {
  const found = graphOf(stage, graph);
  return found && found.named.has(name) ? found.named.get(name).node : undefined;
}

/** What the pass of a stage did to a node: added, moved, changed, or nothing (""). */
function statusOf(stage, graph, name) {
  const sets = statuses(stage, graph);
  return sets.get(name) || "";
}

const known = new Map();
function statuses(stage, graph) {
  const key = stage + " " + graph;
  if (!known.has(key)) {
    const changes = DATA.stages[stage].changes[graph] || { added: [], moved: [], removed: [], changed: {} };
    const found = new Map(rewritten(changes).map((name) => [name, "changed"]));
    for (const name of changes.moved) found.set(name, "moved");
    for (const name of changes.added) found.set(name, "added");
    known.set(key, found);
  }
  return known.get(key);
}

/** The nodes of which a pass changed more than the size of their values. */
function rewritten(changes) {
  return Object.keys(changes.changed).filter((name) => changes.changed[name].some((what) => !["shape", "bytes"].includes(what)));
}

/** Those of which it changed that alone, since it changed what they read. */
function resized(changes) {
  const others = new Set(rewritten(changes));
  return Object.keys(changes.changed).filter((name) => !others.has(name));
}

/** How many nodes the pass of a stage added, moved, removed and changed, in all graphs. */
function counts(stage) {
  const sum = { added: 0, moved: 0, removed: 0, changed: 0 };
  for (const changes of Object.values(stage.changes)) {
    sum.added += changes.added.length;
    sum.moved += changes.moved.length;
    sum.removed += changes.removed.length;
    sum.changed += rewritten(changes).length;
  }
  return sum;
}

/** The stages from the first one to this one, each made from the one before it. */
function lineage(stage) {
  const found = [];
  for (let at = stage; at !== null && at !== undefined; at = DATA.stages[at].before) found.unshift(at);
  return found;
}

/** The last stage of the compilation in which a node is, or undefined. */
function lastStageWith(graph, name) {
  for (let stage = DATA.stages.length - 1; stage >= 0; stage -= 1) if (nodeOf(stage, graph, name)) return stage;
  return undefined;
}

/**
 * The life of a node: the stage in which it is first, those whose passes changed it, and the one whose pass removed it.
 * A node of the same name that another pass made is another node.
 */
function historyOf(stage, graph, name) {
  const made = nodeOf(stage, graph, name).made_by;
  const before = lineage(stage);
  let first = stage;
  for (const at of [...before].reverse()) {
    const node = nodeOf(at, graph, name);
    if (!node || node.made_by !== made) break;
    first = at;
  }
  const touches = (at) => Object.hasOwn((DATA.stages[at].changes[graph] || { changed: {} }).changed, name);
  const changed = before.filter((at) => at > first && touches(at));
  let at = stage;
  for (;;) {
    const next = DATA.stages.findIndex((other) => other.before === at);
    if (next < 0) return { made, first, changed, removed: null };
    const changes = DATA.stages[next].changes[graph];
    if (changes && changes.removed.includes(name)) return { made, first, changed, removed: next };
    if (changes && Object.hasOwn(changes.changed, name)) changed.push(next);
    at = next;
  }
}

/** The stage that a pass made, by the pass's name. */
function stageOfPass(name) {
  const found = DATA.stages.findIndex((stage) => stage.pass === name);
  return found < 0 ? STAGES.get(name) : found;
}

/** The short name of what a node calls: specgraph.linear.default is linear. */
function shortCall(node) {
  if (node.op === "placeholder") return "input";
  if (node.op === "output") return "output";
  if (node.op === "get_attr") return "weight";
  if (node.op === "call_module") return "module " + node.calls;
  const parts = node.calls.split(".");
  return parts.length > 2 ? parts[parts.length - 2] : parts[parts.length - 1];
}

/** The bytes of weights that a node reads: of a call of a module, what the module reads; else those of its inputs. */
function weightBytes(stage, graph, node) {
  if (node.op === "call_module") {
    const call = DATA.calls.find((other) => other.module === node.calls);
    return call ? call.reads.weights.reduce((sum, [size]) => sum + size, 0) : null;
  }
  const sizes = node.inputs.map((name) => nodeOf(stage, graph, name)).filter((other) => other && other.op === "get_attr");
  return sizes.length ? sizes.reduce((sum, other) => sum + (other.size || 0), 0) : null;
}
