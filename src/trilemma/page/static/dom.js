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

/**
 * A table; each heading is a text or {text, number}. In one of class `cards`, rows are cards on a narrow screen.
 * `elsewhere` {by, down, change} says who sorts it, if its rows are only some of all.
 */
export function table(headings, rows, kind, elsewhere) {
  const heads = headings.map((one) => (typeof one === "string" ? { text: one } : one));
  const made = el("table", { class: kind },
    el("thead", {}, el("tr", {}, heads.map((one) =>
      el("th", { scope: "col", class: one.number ? "number" : null }, one.text)))),
    el("tbody", {}, rows.map((row) => el("tr", { class: row.class }, (row.cells ?? row).map((cell, place) =>
      el("td", { class: heads[place].number ? "number" : null, "data-label": heads[place].text }, cell))))));
  sortable(made, elsewhere);
  return el("div", { class: "scroll" }, made);
}

const orders = new Map(); // of a table by its headings: the column it is sorted by, and whether downwards

/** Let a click on a heading sort a table's rows, or ask `elsewhere` to; a table that is made anew keeps its order. */
export function sortable(node, elsewhere) {
  const heads = [...node.tHead.rows[0].cells];
  const key = heads.map((one) => one.textContent).join("|");
  const texts = heads.map((one) => one.textContent);
  const order = () => elsewhere ? [texts.indexOf(elsewhere.by), elsewhere.down] : orders.get(key) ?? [-1, false];
  const apply = () => {
    const [by, down] = order();
    heads.forEach((one, place) => {
      if (place === by) one.setAttribute("aria-sort", down ? "descending" : "ascending");
      else one.removeAttribute("aria-sort");
    });
    if (by < 0 || elsewhere) return;
    const body = node.tBodies[0];
    body.append(...[...body.rows].sort((a, b) => compared(a.cells[by], b.cells[by], down)));
  };
  heads.forEach((head, place) => {
    if (!texts[place]) return;
    head.replaceChildren(el("button", { type: "button", class: "sort", on: { click: () => {
      const [by, down] = order();
      if (elsewhere) elsewhere.change(texts[place], by === place ? !down : false);
      else orders.set(key, [place, by === place ? !down : false]);
      apply();
    } } }, texts[place]));
  });
  apply();
}

/** Compare two cells: numbers by what they are, texts by their letters; what is empty comes last. */
function compared(one, other, down) {
  const [a, b] = [one, other].map((cell) => cell.textContent.trim());
  if (!a || !b) return (a ? 0 : 1) - (b ? 0 : 1);
  const [x, y] = [a, b].map(Number.parseFloat);
  const ahead = Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
  return down ? -ahead : ahead;
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
