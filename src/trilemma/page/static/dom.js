// Elements from plain values. Text only ever becomes text: nothing here reads it as HTML.

/** Make an element: `el("a", {href: "#/runs", class: "x", on: {click}}, "text", child, …)`. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") {
      for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    } else if (name === "value" || name === "checked" || name === "disabled" || name === "selected") {
      node[name] = value;
    } else {
      node.setAttribute(name, value === true ? "" : value);
    }
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Replace all that is in a node. */
export function fill(node, ...children) {
  node.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined));
}

/** A table; each heading is a text or {text, number}. In one of class `cards`, rows are cards on a narrow screen. */
export function table(headings, rows, kind) {
  const heads = headings.map((one) => (typeof one === "string" ? { text: one } : one));
  return el("div", { class: "scroll" }, el("table", { class: kind },
    el("thead", {}, el("tr", {}, heads.map((one) =>
      el("th", { scope: "col", class: one.number ? "number" : null }, one.text)))),
    el("tbody", {}, rows.map((row) => el("tr", { class: row.class }, (row.cells ?? row).map((cell, place) =>
      el("td", { class: heads[place].number ? "number" : null, "data-label": heads[place].text }, cell)))))));
}

/** A control with its label. */
export function field(label, control, hint) {
  return el("label", { class: "field" }, el("span", {}, label), control, hint ? el("small", {}, hint) : null);
}

/** A list to choose from; options are texts or [value, text]. */
export function choose(options, value, change, properties = {}) {
  const pairs = options.map((one) => (Array.isArray(one) ? one : [one, one]));
  return el("select", { ...properties, on: { change: (event) => change(event.target.value) } },
    pairs.map(([key, text]) => el("option", { value: key, selected: key === value }, text)));
}

/** How long ago something was, in words. */
export const heldClass = ({ held }) => (held === null ? "note" : held ? "held" : "unheld");

export function ago(seconds) {
  const passed = Math.max(0, Date.now() / 1000 - seconds);
  if (passed < 90) return `${Math.round(passed)} s ago`;
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  if (passed < 129600) return `${Math.round(passed / 3600)} h ago`;
  return `${Math.round(passed / 86400)} days ago`;
}

/** A number with four digits that count. */
export function short(value) {
  return value === null || value === undefined ? "∞" : String(Number(value.toPrecision(4)));
}

/** A number of bytes in words. */
export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  const place = count < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log10(count) / 3));
  return `${Number((count / 1000 ** place).toPrecision(3))} ${units[place]}`;
}
