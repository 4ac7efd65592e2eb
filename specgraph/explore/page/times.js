"use strict";
// The time of every step beside its limit, drawn by uPlot.

let plot = null;

function drawTime() {
  const body = byId("time-body");
  if (!DATA.trace) {
    fill(body, el("p", { class: "hint" }, "Times of steps are in a trace, and this page was made without one."), readsTable());
    return;
  }
  const times = DATA.trace.times;
  const limit = times.bandwidth === null ? "No bandwidth is known, so there is no limit to compare with; give bandwidth=GB/s."
    : `The limit is the time in which a memory of ${number(times.bandwidth / 1e9, 1)} GB/s (${times.source}) delivers the bytes that the step must read: the weights of every call, and the keys and values of the context.`;
  fill(body, el("p", {}, sentence(times)), outside(times),
    el("p", { class: "hint" }, "Only whole steps are timed. What a call takes is not measured, but the last table of this page has what each call must read, and how long that takes at least."),
    el("p", { class: "hint" }, limit + " Steps that ended a prompt have no limit here. A step's time is that from the end of the step before it."),
    el("div", { id: "plot", role: "img", "aria-label": "Time of each step in milliseconds, and its limit. The table below has the numbers." }),
    el("details", {}, el("summary", {}, "Every step as a table"), el("div", { class: "scroll tall" }, timesTable(times))),
    readsTable());
  drawPlot();
}

function sentence(times) {
  if (times.median_ms === null) return "The trace has no steps that only decoded.";
  const ratio = times.median_ratio === null ? "" : `, where its limit is ${number(times.median_limit_ms, 3)} ms: ${number(times.median_ratio, 2)} times as long`;
  return `The median decode step took ${number(times.median_ms, 2)} ms${ratio}.`;
}

/** The plot leaves out what took many times the median, because the first steps of a process can be a hundred times as long. */
function highest(times) {
  const most = times.median_ms === null ? Infinity : 4 * Math.max(times.median_ms, times.median_limit_ms || 0);
  return Math.max(...times.rows.flatMap((row) => [row.ms, row.limit_ms || 0]).filter((value) => value <= most), 0);
}

function outside(times) {
  const most = highest(times), rows = times.rows.filter((row) => row.ms > most), few = rows.slice(0, 5);
  const named = few.map((row) => `${row.step} (${number(row.ms, 1)} ms)`).join(", ") + (rows.length > few.length ? ", ..." : "");
  return rows.length ? el("p", { class: "hint" }, `${plural(rows.length, "step")} took longer than the plot shows: ${named}. The first step of each kind prepares what it runs.`) : null;
}

/** Of the bytes that steps read, those kinds that this decoder has. */
function timesTable(times) {
  const kinds = Object.entries({ target: "weights of the target #", draft: "weights of the draft #", cache: "keys and values #", state: "recurrent state #" })
    .filter(([part]) => times.rows.some((row) => row.bytes && row.bytes[part]));
  return table(el("table", { id: "times", class: "stacked headed" }), ["step #", "sequences #", "tokens #", "ms #", "limit ms #", ...kinds.map(([, name]) => name)],
    times.rows.map((row) => [String(row.step), String(row.sequences), String(row.tokens), number(row.ms, 3), row.prompt ? "prompt" : number(row.limit_ms, 4),
      ...kinds.map(([part]) => (row.bytes ? bytes(row.bytes[part]) : ""))]));
}

/** What the calls of one step read, as the dump says it. */
function readsTable() {
  if (!DATA.calls.length) return null;
  const last = DATA.stages.length - 1;
  const bandwidth = DATA.trace && DATA.trace.times.bandwidth, all = (call) => call.reads.weights.reduce((sum, [size]) => sum + size, 0);
  const rows = DATA.calls.map((call) => [nodeLink(last, "step", call.node), call.module, bytes(all(call)), ...(bandwidth ? [number(1000 * all(call) / bandwidth, 3)] : []),
    call.reads.caches.map(([size, window]) => bytes(size) + (window === null ? "" : ` (window ${window})`)).join(", ")]);
  return el("div", {}, el("h3", {}, "What one step reads"),
    el("p", { class: "hint" }, "One row for each call of a module in the step graph."),
    el("div", { class: "scroll" }, table(el("table", {}), ["call", "module", "weights #", ...(bandwidth ? ["ms at least for these #"] : []), "keys and values per token of context #"], rows)));
}

function drawPlot() {
  if (plot) plot.destroy();
  plot = null;
  const rows = DATA.trace.times.rows;
  const decoding = rows.map((row) => (row.prompt ? null : row.ms)), prompts = rows.map((row) => (row.prompt ? row.ms : null));
  const limits = rows.map((row) => row.limit_ms);
  const axis = (label, more) => ({ label, stroke: colour("--text"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") }, ...more });
  const seen = (values) => values.some((value) => value !== null && value <= highest(DATA.trace.times));
  const whole = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000]; // Steps have no fractions.
  const points = (label, name) => ({ label, stroke: colour(name), width: 0, paths: () => null, points: { show: true, size: 5, fill: colour(name) } });
  const series = [
    [points("ms, decoding", "--accent"), decoding],
    seen(prompts) ? [points("ms, with a prompt", "--edge"), prompts] : null,
    [{ label: "limit, ms", stroke: colour("--rejected"), width: 2, points: { show: false } }, limits],
  ].filter((one) => one !== null);
  plot = new uPlot({
    width: byId("plot").clientWidth, height: 280,
    scales: { x: { time: false, range: (_, low, high) => [low - 0.5, high + 0.5] }, y: { range: [0, 1.15 * highest(DATA.trace.times)] } },
    axes: [axis("step", { incrs: whole }), axis("ms")],
    series: [{ label: "step" }, ...series.map(([look]) => look)],
  }, [rows.map((row) => row.step), ...series.map(([, values]) => values)], byId("plot"));
}
