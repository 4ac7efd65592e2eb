"use strict";
// What happened to every draft of a trace: how many were accepted per position, and the text with its drafts.

let sequence = 0, stepsOfSequence = [];

function drawDrafts() {
  const trace = DATA.trace;
  if (!trace) {
    fill(byId("drafts-body"), el("p", { class: "hint" }, "This page was made without a trace. With trace=FILE, where FILE is what ",
      el("code", {}, "python -m specgraph generate ... trace=FILE"), " wrote, it shows what happened to every draft."));
    return;
  }
  const decoding = trace.steps.filter((step) => !step.prompt);
  const first = trace.steps.filter((step) => step.prompt).flatMap((step) => step.tokens);
  const emitted = decoding.reduce((sum, step) => sum + step.tokens.length, 0);
  fill(byId("drafts-body"),
    el("p", {}, `${plural(trace.prompts.length, "sequence")}, ${plural(emitted, "token")} in ${plural(decoding.length, "decode step")}`,
      trace.prompts.length > 1 ? " (a step counts once for every sequence in it): " : ": ",
      el("strong", {}, `${number(emitted / Math.max(decoding.length, 1), 2)} tokens per step`), `${errorOf(decoding)}. `,
      first.length ? `${plural(first.length, "token")} more came with the end of a prompt, before there were drafts.` : ""),
    el("p", {}, trace.why.about),
    el("p", { class: "hint" }, "Probabilities of drafts and tokens are those after the temperature, penalties and all other options of the request; of a greedy sequence, those at temperature 1. Ranks count the tokens whose logits are larger, before temperature and truncation, so that 1 is the greedy choice."),
    el("h3", {}, "Accepted per position"), drawAcceptance(trace.acceptance),
    el("p", { class: "hint" }, "Considered are the drafts of which all before them in the step were accepted. A sequence that is near its limit of tokens gets fewer drafts, or none."),
    el("h3", { id: "text-title" }, "Along the text"),
    el("div", { class: "toolbar" },
      el("label", {}, el("input", { type: "checkbox", id: "only-text", change: (event) => byId("text").classList.toggle("only-text", event.target.checked) }), " only what was emitted"),
      el("label", { for: "pick-sequence" }, "Sequence"),
      el("select", { id: "pick-sequence", change: (event) => {
        history.replaceState(null, "", "#drafts"); // A draft of another sequence is not what is shown.
        chooseSequence(Number(event.target.value));
      } },
        trace.prompts.map((prompt, index) => el("option", { value: String(index) }, `${index}: ${visible(prompt).slice(0, 60)}`)))),
    el("p", { id: "sampling" }),
    el("p", { class: "legend" }, el("span", { class: "swatch accepted" }, "accepted draft"), el("span", { class: "swatch own" }, "token of the target's own"),
      el("span", { class: "swatch rejected" }, "rejected draft"), el("span", { class: "swatch behind" }, "draft that was not considered"),
      " Point at a token, or go through them with Tab and the arrow keys, to read why."),
    el("div", { id: "text" }), el("div", { id: "why", "aria-live": "polite" }), 
    el("details", { id: "steps-box", toggle: drawSteps }, el("summary", {}, "Every step of this sequence as a table"), el("div", { class: "scroll tall" })));
  chooseSequence(0);
}

/** The standard error of the tokens per step, in words. */
function errorOf(steps) {
  if (steps.length < 2) return "";
  const counted = steps.map((step) => step.tokens.length), mean = counted.reduce((sum, count) => sum + count, 0) / counted.length;
  const variance = counted.reduce((sum, count) => sum + (count - mean) ** 2, 0) / (counted.length - 1);
  return ` (standard error ${number(Math.sqrt(variance / counted.length), 2)})`;
}

/** Bars: the share of steps that accepted the draft at each place, and of those steps that came so far. */
function drawAcceptance(rows) {
  const bar = (share) => el("span", { class: "bar" }, el("span", { class: "fill", style: `width:${(100 * share).toFixed(1)}%` }));
  return el("div", { class: "scroll" }, table(el("table", { id: "acceptance" }), ["draft", "", "share #", "accepted of those made #", "accepted of those considered #"],
    rows.map((row, place) => {
      const share = row.accepted / Math.max(row.verified, 1);
      return [String(place + 1), bar(share), number(share, 2), `${row.accepted} of ${row.verified}`,
        row.reached ? `${row.accepted} of ${row.reached}, ${number(row.accepted / row.reached, 2)}` : ""];
    })));
}

function chooseSequence(chosen) {
  sequence = chosen;
  byId("pick-sequence").value = String(chosen);
  const steps = DATA.trace.steps.map((step, index) => ({ step, index })).filter(({ step }) => step.sequence === chosen);
  const spans = steps.map(({ step, index }) => stepSpans(step, index));
  fill(byId("text"), el("span", { class: "prompt", dir: "auto" }, withBreaks(visible(DATA.trace.prompts[chosen]))), spans);
  fill(byId("sampling"), samplingOf(chosen));
  fill(byId("why"), el("p", { class: "hint" }, "Choose a token to keep its explanation here."));
  stepsOfSequence = steps;
  drawSteps();
  const first = byId("text").querySelector(".token");
  if (first) first.tabIndex = 0;
}

/** How the tokens of a sequence were chosen, if the trace says so. */
function samplingOf(chosen) {
  const temperature = (DATA.trace.about.temperatures || [])[chosen];
  if (temperature === undefined) return null;
  return temperature === 0 ? "Greedy: the target chooses the most probable token."
    : `Sampled at temperature ${temperature}: the target draws its tokens, with noise that the seed and the position of a token decide.`;
}

/** The tokens of one step: its accepted drafts, those that were not, and the target's own token. */
function stepSpans(step, index) {
  const accepted = step.drafts.filter((draft) => draft.verdict === "accepted").length;
  const spans = step.drafts.map((draft, place) => draftSpan(step, index, draft, place));
  step.tokens.slice(accepted).forEach((token, place) => spans.push(ownSpan(step, index, accepted + place)));
  // A line may end behind a token, and does so behind a line break, which its token shows as an escape.
  return el("span", { class: "step", "data-step": step.step },
    spans.map((span) => [span, span.textContent.includes("\\n") && !isUnwritten(span) ? "\n" : el("wbr", {})]));
}

/** Whether a token is a draft that the step did not emit. */
function isUnwritten(span) {
  return !span.classList.contains("accepted") && !span.classList.contains("own");
}

/** An escape for a line break, and a line break behind it. */
function withBreaks(text) {
  return text.replaceAll("\\n", "\\n\n");
}

function shownToken(token, text) {
  return text === null || text === undefined ? String(token) + " " : visibleToken(text);
}

/** A token that a step emitted. */
function emittedToken(step, place) {
  return shownToken(step.tokens[place], step.texts && step.texts[place]);
}

function draftSpan(step, index, draft, place) {
  const span = el("bdi", { class: `token ${draft.verdict}`, tabindex: "-1", role: "button", "data-draft": `${index}.${place}` },
    shownToken(draft.token, draft.text));
  span.addEventListener("click", () => { location.hash = hashOf({ draft: `${index}.${place}` }); });
  return tip.of(span, () => explainDraft(step, draft, place));
}

function ownSpan(step, index, place) {
  const span = el("bdi", { class: "token own", tabindex: "-1", role: "button" }, emittedToken(step, place));
  const explain = () => [el("strong", {}, "The target's own token: ", el("bdi", {}, emittedToken(step, place))),
    el("div", {}, originOf(step)),
    step.own === null ? null : el("div", {}, `Under the target, its probability was ${percent(step.own)}${ranked(step.own_rank)}.`),
    el("div", { class: "hint" }, `Token ${step.tokens[place]}. ${whereOf(step, place)}`), timeOf(step),
    step.why === null ? null : el("div", { class: "hint" }, `Why so many drafts: ${step.why}.`)];
  span.addEventListener("click", () => keep(span, explain()));
  return tip.of(span, explain);
}

/** How a step came to the token that the target chose by itself. */
function originOf(step) {
  if (step.prompt) return "It follows the prompt; no draft was verified.";
  if (!step.drafts.length) return "The step verified no drafts: the sequence had room for one token only, or no draft was found.";
  if (step.drafts.every((draft) => draft.verdict === "accepted")) {
    return "All drafts of the step were accepted, and the same run of the target gives one token more behind them.";
  }
  return "It takes the place of the draft that was rejected.";
}

/** Where a token is that a step emitted, or a draft that it verified, as the `place`th of its kind. */
function whereOf(step, place) {
  return `Step ${step.step}, sequence ${step.sequence}, text position ${step.position + place}.`;
}

function timeOf(step) {
  const ms = 1000 * step.seconds, usual = DATA.trace.times.median_ms;
  const first = usual !== null && ms > 20 * usual ? " The first steps of a process compile what they run." : "";
  return el("div", { class: "hint" }, `The step took ${number(ms, 2)} ms.${first}`);
}

const VERDICTS = { accepted: "accepted", rejected: "rejected", behind: "not considered", ended: "not considered", cut: "not needed" };

/** Why a draft was accepted or not, in sentences. */
function explainDraft(step, draft, place) {
  const known = (value) => (value === null ? "not known" : percent(value));
  const drawn = draft.draft === null ? "It was looked up, not drawn." : `With the drafter, its probability was ${percent(draft.draft)}.`;
  return [
    el("strong", {}, `Draft ${place + 1} of ${step.drafts.length} was ${VERDICTS[draft.verdict]}: `, el("bdi", {}, shownToken(draft.token, draft.text))),
    el("p", { class: "reason" }, reasonOf(step, draft)),
    el("div", {}, `Under the target, the probability of this token was ${known(draft.target)}${ranked(draft.rank)}. ${drawn}`, insteadOf(step, draft)),
    el("div", { class: "hint" }, `Token ${draft.token}. ${whereOf(step, place)}`),
  ];
}

/** How probable the token was that the target chose in the place of a rejected draft, if the trace says so. */
function insteadOf(step, draft) {
  if (draft.verdict !== "rejected" || step.own === null) return null;
  return [" \u201c", el("bdi", { class: "quoted" }, emittedToken(step, step.tokens.length - 1).trim()),
    `\u201d, which the target chose instead, had ${percent(step.own)} under the target${ranked(step.own_rank)}.`];
}

/** The rank of a token under the target, if the trace says so. */
function ranked(rank) {
  return rank === null ? "" : ` (rank ${rank})`;
}

function reasonOf(step, draft) {
  const accepted = step.drafts.filter((other) => other.verdict === "accepted").length;
  const place = draft.verdict === "accepted" ? step.drafts.indexOf(draft) : accepted;
  const own = place < step.tokens.length ? emittedToken(step, place).trim() : "";
  const ratio = draft.target === null ? "not known" : percent(Math.min(1, draft.target / (draft.draft === null ? 1 : draft.draft)));
  const parts = DATA.trace.why[draft.verdict].split(/(\{\w+\})/);
  const values = { "{own}": () => ["\u201c", el("bdi", { class: "quoted" }, own), "\u201d"], "{ratio}": () => ratio, "{p}": () => (draft.target === null ? "not known" : percent(draft.target)),
    "{q}": () => (draft.draft === null ? "1" : percent(draft.draft)), "{rule}": () => String(DATA.trace.about.rule) };
  return parts.map((part) => (Object.hasOwn(values, part) ? values[part]() : part));
}

/** A probability as two digits or more, without a power of ten unless it is tiny. */
function percent(value) {
  if (value > 0 && value < 1e-6) return `${(100 * value).toExponential(1)} %`;
  const digits = [0.1, 0.01, 0.001, 0.0001].findIndex((least) => value >= least);
  return `${number(100 * value, value === 0 ? 0 : digits < 0 ? 5 : digits)} %`;
}

/** The table of the steps of the sequence, once somebody wants to see it. */
function drawSteps() {
  if (!byId("steps-box").open) return;
  const rows = stepsOfSequence.map(({ step, index }) => [String(step.step), String(step.position),
    el("span", {}, step.drafts.map((draft, place) => el("a", { class: `token ${draft.verdict}`, href: hashOf({ draft: `${index}.${place}` }) },
      el("bdi", {}, shownToken(draft.token, draft.text))))),
    el("bdi", {}, step.tokens.map((token, place) => shownToken(token, step.texts && step.texts[place])).join("")), number(1000 * step.seconds, 2)]);
  fill(byId("steps-box").lastElementChild, table(el("table", {}), ["step #", "position #", "drafts", "emitted", "ms #"], rows));
}

/** Shows the explanation of a draft, which a link names as "place of the step in the trace.place of the draft". */
function chooseDraft(name) {
  const [index, place] = name.split(".").map(Number);
  const step = DATA.trace && DATA.trace.steps[index];
  if (!step || !step.drafts[place]) return;
  if (step.sequence !== sequence) chooseSequence(step.sequence);
  const span = byId("text").querySelector(`[data-draft="${index}.${place}"]`);
  keep(span, explainDraft(step, step.drafts[place], place));
  if (!span.matches(":hover")) span.scrollIntoView({ block: "center" }); // The page stays where somebody has just clicked.
}

/** Marks a token, and keeps its explanation below the text. */
function keep(span, explanation) {
  for (const old of document.querySelectorAll(".token.chosen")) old.classList.remove("chosen");
  span.classList.add("chosen");
  fill(byId("why"), explanation);
}

/** The arrow keys go from token to token, and Enter chooses one, so that Tab needs only one stop for the text. */
function walkTokens(event) {
  if (!event.target.classList.contains("token") || !byId("text").contains(event.target)) return;
  if (event.key === "Enter" || event.key === " ") {
    event.target.click();
    event.preventDefault();
  }
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (step === undefined) return;
  const tokens = [...byId("text").querySelectorAll(".token")];
  const next = tokens[tokens.indexOf(event.target) + step];
  if (!next) return;
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
  event.preventDefault();
}
