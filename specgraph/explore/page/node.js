"use strict";
// What is known of the chosen node.

function drawNode(stage, graph, name) {
  const node = name === undefined ? undefined : nodeOf(stage, graph, name);
  if (!node) {
    const text = name === undefined ? "Choose a node to see which pass made it, and what became of it."
      : `There is no node ${name} in ${graph} at this stage.`;
    fill(byId("node"), el("p", { class: "hint" }, text));
    return;
  }
  const history = historyOf(stage, graph, name);
  fill(byId("node"), el("h3", {}, node.name), madeBy(history), facts(stage, graph, node),
    insteadOfNodes(graph, node, history), life(graph, node, history), neighbours(stage, graph, node));
}

/** The sentence that answers which pass introduced the node. */
function madeBy(history) {
  const first = DATA.stages[history.first];
  if (history.made === "trace" || history.made === undefined) {
    const where = history.first === 0 ? "It is there from the beginning." : `It is in this graph since the stage ${first.name}.`;
    return el("p", { id: "made-by" }, "Not made by a pass: tracing the model gave this node. ", where);
  }
  const moved = first.pass === history.made ? null : el("span", {}, " It is in this graph since the stage ", link({ stage: first.name }, first.name), ".");
  const at = stageOfPass(history.made);
  const pass = at === undefined ? el("strong", {}, history.made) : link({ stage: DATA.stages[at].name }, el("strong", {}, history.made));
  return el("p", { id: "made-by" }, "Introduced by the pass ", pass, ".", moved);
}

function facts(stage, graph, node) {
  const weights = weightBytes(stage, graph, node);
  const rows = [
    [KINDS[node.op] || "calls", el("code", {}, node.calls)],
    doesOf(node) ? ["does", doesOf(node)] : null,
    node.op === "placeholder" ? null : ["code", el("code", {}, node.code)],
    node.line === undefined ? null : ["model's source", el("code", { id: "line" }, node.line)],
    node.device === undefined ? null : ["device", `${node.device} alone`],
    ["shape", node.shape ? el("code", {}, node.shape) : "not known"],
    itemsOf(stage, graph, node),
    lettersOf(node) ? ["letters", el("span", { class: "hint" }, lettersOf(node))] : null,
    ["bytes", node.bytes === undefined ? "not known" : bytesOf(node)],
    weights === null ? null : ["weights read", bytes(weights)],
  ].filter((row) => row !== null);
  return el("dl", {}, rows.map(([term, value]) => [el("dt", {}, term), el("dd", {}, value)]));
}

const KINDS = { placeholder: "input", get_attr: "weight", call_module: "calls the module", output: "output" };

/** What a node is for, by the text that documents its function. */
function doesOf(node) {
  if (node.op === "placeholder") return "A value that the step, or the module, is given: state of the sequences, or what an outer graph computed.";
  const functions = DATA.about.functions || {};
  return Object.hasOwn(functions, node.calls) ? functions[node.calls] : undefined;
}

/** The items of a tuple: the shape of each, and the node that takes it. */
function itemsOf(stage, graph, node) {
  if (!node.items || node.op === "placeholder") return null;
  const own = graphOf(stage, graph);
  const takers = (own.users.get(node.name) || []).map((name) => own.named.get(name).node).filter((user) => shortCall(user) === "getitem");
  const taker = (index) => takers.find((user) => user.code.endsWith(`[${index}]`));
  return ["items", el("ol", { class: "items", start: "0" }, node.items.map((shape, index) => el("li", {}, el("code", {}, shape), " ",
    taker(index) ? nodeLink(stage, graph, taker(index).name) : takers.length ? el("span", { class: "hint" }, "not read") : null)))];
}

const LETTERS = {
  B: "sequences whose state is kept (before index_rows, those of a call)", b: "sequences of this call",
  T: "rows of a sequence in this call: its last token and the drafts", S: "the longest sequence", N: "pages of the cache",
  M: "pages of a sequence", E: "EOS ids of a sequence", W: "tokens of the words that a sequence has biases for",
  R: "packed rows of all sequences",
};

/** What the letters of a node's shape stand for. */
function lettersOf(node) {
  const text = [node.shape, ...(node.items || [])].join(" ");
  const used = Object.keys(LETTERS).filter((letter) => new RegExp(`\\b${letter}\\b`).test(text));
  return used.map((letter) => `${letter}: ${LETTERS[letter]}`).join("; ");
}

function bytesOf(node) {
  return node.size === undefined || String(node.size) === node.bytes ? bytes(node.size) || node.bytes
    : [el("code", {}, node.bytes), ` = ${bytes(node.size)}`, el("span", { class: "hint" }, ` for ${sizesOf(node.bytes)}`)];
}

/** The letters of a formula with the sizes that stand for them. */
function sizesOf(formula) {
  return Object.entries(DATA.sizes).filter(([letter]) => formula.includes(letter)).map(([letter, size]) => `${letter} = ${size}`).join(", ");
}

/** The nodes that the pass removed from the graph when it made this one, which replaces some of them. */
function insteadOfNodes(graph, node, history) {
  const first = DATA.stages[history.first], changes = first.changes[graph];
  if (first.pass !== history.made || !changes || !changes.added.includes(node.name) || !changes.removed.length) return null;
  const same = changes.removed.includes(node.name), others = same ? [node.name] : changes.removed;
  return [el("h4", {}, "Before"), el("p", { class: "hint" }, same ? `The pass removed another node of this name:` : `The pass removed these nodes of the graph:`),
    el("ul", { class: "names before" }, others.map((name) => el("li", {}, nodeLink(first.before, graph, name))))];
}

/** By what pass a node was removed, and the node of the same name that this pass made. */
function removal(graph, node, removed) {
  const stage = DATA.stages[removed], again = statusOf(removed, graph, node.name) === "added";
  return el("li", {}, "removed by ", link({ stage: stage.name }, stage.name),
    again ? [", which made ", nodeLink(removed, graph, node.name), " anew: ", el("code", {}, nodeOf(removed, graph, node.name).code.slice(0, 80))] : null);
}

function life(graph, node, history) {
  const changed = history.changed.map((at) => el("li", {}, "changed by ", link({ stage: DATA.stages[at].name }, DATA.stages[at].name),
    el("span", { class: "hint" }, " (" + (DATA.stages[at].changes[graph].changed[node.name] || []).join(", ") + ")")));
  const removed = history.removed === null ? el("li", {}, "still there in the last stage")
    : removal(graph, node, history.removed);
  return [el("h4", {}, "Later"), el("ul", {}, changed, removed)];
}

function neighbours(stage, graph, node) {
  const users = graphOf(stage, graph).users.get(node.name) || [];
  const list = (title, names) => [el("h4", {}, title),
    names.length ? el("ul", { class: "names" }, names.map((name) => el("li", {}, nodeLink(stage, graph, name)))) : el("p", { class: "hint" }, "none")];
  const inside = node.op === "call_module" && graphOf(stage, node.calls)
    ? el("p", {}, link({ stage: DATA.stages[stage].name, graph: node.calls }, `Show the graph of ${node.calls}`)) : null;
  return [inside, list("Reads", node.inputs), list("Read by", users)];
}
