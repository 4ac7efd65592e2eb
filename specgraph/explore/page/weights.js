"use strict";
// Which weights are shared, and which are not although they almost equal one of the target's.

function drawWeights() {
  const weights = DATA.weights, sign = "shared while loading: ";
  const early = (DATA.about.notes || []).map(String).filter((note) => note.startsWith(sign)).map((note) => note.slice(sign.length));
  const saved = weights.bytes_shared ? ` The pass share_weights saved ${bytes(weights.bytes_shared)}.` : "";
  fill(byId("weights-body"),
    el("p", {}, `After the stage `, link({ stage: weights.stage }, weights.stage),
      `, the modules use ${bytes(weights.total)} of weights.${saved}`),
    el("h3", {}, "By module"),
    el("div", { class: "scroll" }, table(el("table", {}), ["module", "tensors #", "bytes #", "of these shared with another module #"],
      weights.modules.map((row) => [row.module, String(row.tensors), bytes(row.bytes), bytes(row.shared)]))),
    el("h3", {}, "Tensors with several names"),
    el("p", { class: "hint" }, "A weight that a module uses twice, such as an embedding that is the output layer, too, has one name in that module."),
    early.length ? [el("p", { class: "hint" }, "Shared already while the draft was loaded:"), el("ul", {}, early.map((note) => el("li", {}, note)))] : null,
    weights.shared.length ? el("div", { class: "scroll" }, table(el("table", {}), ["names", "shape", "bytes #"],
      weights.shared.map((tensor) => [el("ul", { class: "plain" }, tensor.names.map((name) => el("li", {}, el("code", {}, name)))),
        `${tensor.dtype} [${tensor.shape.join(", ")}]`, bytes(tensor.bytes)])))
      : el("p", { class: "hint" }, "No tensor has several names."),
    el("h3", {}, "Near misses"),
    el("p", { class: "hint" }, "A near miss is a weight of the draft that has the same name and shape as one of the target's, or almost the same elements. It is not equal, so it cannot be shared."),
    weights.near_misses.length ? el("ul", {}, nearMisses(weights.near_misses)) : el("p", { class: "hint" }, "There is none."));
}
