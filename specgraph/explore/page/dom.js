"use strict";
// Builds the page. Texts become text nodes and attributes, never HTML, because tokens and names are not to be trusted.

/** An element with attributes and children; strings become text, and `null` is left out. */
function el(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

function byId(id) {
  return document.getElementById(id);
}

/** Replaces what an element contains. */
function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** A link to a place in this page, such as {stage: "insert_verify", node: "update"}. */
function link(place, text, attributes) {
  return el("a", { href: hashOf(place), ...attributes }, text);
}

/** A name whose line may end behind an underscore or a dot. */
function breakable(name) {
  return name.split(/(?<=[_.])/).map((part) => [part, el("wbr", {})]);
}

function hashOf(place) {
  return "#" + new URLSearchParams(place).toString();
}

/**
 * A table with a header row. Cells are strings or elements, or {span, value} for one below several headings; cells below a
 * heading that ends in " #" are numbers.
 */
function table(element, headings, rows) {
  const numeric = headings.map((heading) => heading.endsWith(" #"));
  const names = headings.map((heading) => heading.replace(/ #$/, ""));
  const cell = (tag, value, index) => el(tag, { class: numeric[index] ? "number" : null, scope: tag === "th" ? "col" : null,
    "data-heading": tag === "td" ? names[index] : null }, value);
  const head = el("tr", {}, names.map((name, index) => cell("th", name, index)));
  return fill(element, el("thead", {}, head), el("tbody", {}, rows.map((row) => {
    const [attributes, cells] = Array.isArray(row) ? [{}, row] : [row.attributes, row.cells];
    let at = 0;
    return el("tr", attributes, cells.map((value) => {
      const span = value && value.span, index = at;
      at += span || 1;
      return span ? el("td", { colspan: span }, value.value) : cell("td", value, index);
    }));
  })));
}

const CONTROL = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/gu;

/** A text of the model with everything that does not show, or that reorders what is around it, written as an escape. */
function visible(text) {
  return text.replace(CONTROL, (character) => {
    const known = { "\n": "\\n", "\t": "\\t", "\r": "\\r" }[character];
    return known || "\\u" + character.codePointAt(0).toString(16).padStart(4, "0");
  });
}

/** The same for one token, whose spaces matter. */
function visibleToken(text) {
  return text === "" ? "\u2205" : visible(text).replaceAll(" ", "\u00b7");
}

/** Bytes for a reader: 512 B, 1.5 kB, 25.2 MB. */
function bytes(count) {
  if (count === null || count === undefined) return "";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return (unit === 0 ? String(count) : count.toPrecision(3).replace(/e.*/, "")) + " " + units[unit];
}

function number(value, digits) {
  return value === null || value === undefined ? "" : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function plural(count, one, many) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many || one + "s"}`;
}

/** The value of a colour that the style sheet names. */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Shows a text beside an element or a point while it is pointed at or has the focus. */
const tip = {
  show(content, x, y) {
    const box = fill(byId("tip"), content);
    box.hidden = false;
    const room = document.documentElement.clientWidth;
    box.style.left = Math.max(4, Math.min(x, room - box.offsetWidth - 8)) + window.scrollX + "px";
    box.style.top = y + 6 + window.scrollY + "px";
  },
  hide() {
    byId("tip").hidden = true;
  },
  /** `content` is called when it is needed. */
  of(element, content) {
    const show = () => {
      const place = element.getBoundingClientRect();
      tip.show(content(), place.left, place.bottom);
      element.setAttribute("aria-describedby", "tip");
    };
    const hide = () => {
      tip.hide();
      element.removeAttribute("aria-describedby");
    };
    element.addEventListener("mouseenter", show);
    element.addEventListener("focus", show);
    element.addEventListener("mouseleave", hide);
    element.addEventListener("blur", hide);
    return element;
  },
};
