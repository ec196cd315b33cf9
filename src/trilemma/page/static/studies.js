// Studies: many runs as a coloured table, the worst run of a cell first; a paper's figures below ours.

import { ask } from "./asking.js";
import { choose, el, fill, sortable } from "./dom.js";

// Cividis at nine places: dark blue to yellow, the same order for every kind of eye.
const COLOURS = [[0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115], [138, 134, 120],
  [165, 156, 116], [195, 179, 105], [254, 232, 56]];

export async function show(body, rest, query) {
  let name = decodeURIComponent(rest);
  let row = query.get("row") ?? "";
  let column = query.get("column") ?? "";
  let score = query.get("score") ?? "";
  const controls = el("div", { class: "bar" });
  const place = el("div", {});
  fill(body, el("h1", {}, "Studies"), controls, place);

  async function refresh() {
    const studies = (await ask("/api/studies")).sort((a, b) => b.changed - a.changed || a.runs - b.runs);
    if (!studies.length) {
      fill(place, el("p", { class: "empty" }, "A study is a folder with more than one run; there is none yet."));
      return;
    }
    if (!studies.some((one) => one.name === name)) name = studies[0].name;
    const view = await ask("/api/study", { name, row, column, score });
    const again = (set) => (value) => { set(value); refresh(); };
    fill(controls,
      el("label", {}, "study ", choose(studies.map((one) => [one.name, `${one.name} (${one.runs} runs)`]), name,
        again((value) => { name = value; row = ""; column = ""; }))),
      view.keys.length ? [
        el("label", {}, "rows ", choose(view.row ? view.keys : [["", "as printed"], ...view.keys], view.row,
          again((value) => { row = value; }))),
        el("label", {}, "columns ", choose(view.row ? view.keys : [["", "as printed"], ...view.keys], view.column,
          again((value) => { column = value; }))),
      ] : null,
      view.scores.length > 1 ? el("label", {}, "score ", choose(view.scores, view.score,
        again((value) => { score = value; }))) : null);
    fill(place, view.remark ? el("p", { class: "note" }, view.remark) : null, heat(view),
      el("p", { class: "count" }, `${view.score}, mean over seeds; of several finished runs in a cell the worst decides. `,
        "A cell opens its runs; a heading sorts."),
      el("p", { class: "count ramp" }, view.low_is_good ? "high, worst " : "low, worst ",
        el("span", { class: "colours", "aria-hidden": "true" }, COLOURS.map(tile)),
        view.low_is_good ? " low, best" : " high, best"));
  }

  await refresh();
  return refresh;
}

function tile([r, g, b]) {
  const made = el("span", {});
  made.style.backgroundColor = `rgb(${r}, ${g}, ${b})`;
  return made;
}

function heat(view) {
  const values = view.squares.flat().filter((one) => one && one.value !== null).map((one) => one.value);
  const low = Math.min(...values);
  const high = Math.max(...values);
  const made = el("table", { class: "heat" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, view.row ? `${view.row} \\ ${view.column}` : ""),
      view.columns.map((one) => el("th", { scope: "col" }, one || "–")))),
    el("tbody", {}, view.squares.map((squares, place) => el("tr", {},
      el("th", { scope: "row" }, view.rows[place] || "–"),
      squares.map((one) => cell(one, ...(view.low_is_good ? [high, low] : [low, high])))))));
  sortable(made);
  return el("div", { class: "scroll" }, made);
}

/** A cell of a study; its colour tells where it stands between the worst and the best. */
function cell(one, worst, best) {
  if (!one) return el("td", { class: "nothing" }, "");
  const link = el("a", { href: `#/runs/${one.runs.slice(0, 8).join(",")}` }, el("span", {}, one.shown),
    one.printed ? el("small", {}, `paper ${one.printed}`) : null,
    one.verdict ? el("small", {}, one.verdict) : null,
    one.runs.length - one.unfinished > 1 ? el("small", {}, `worst of ${one.runs.length - one.unfinished}`,
      one.differ.length ? ` that differ in ${one.differ.join(", ")}` : "") : null,
    one.unfinished && one.value !== null ? el("small", {}, `${one.unfinished} not finished`) : null);
  if (one.value !== null) {
    const share = best === worst ? 1 : (one.value - worst) / (best - worst);
    const [r, g, b] = colour(share);
    link.style.backgroundColor = `rgb(${r}, ${g}, ${b})`;
    link.style.color = share > 0.55 ? "#000" : "#fff";
  }
  return el("td", {}, link);
}

function colour(share) {
  const place = share * (COLOURS.length - 1);
  const below = Math.floor(place);
  const above = Math.min(below + 1, COLOURS.length - 1);
  return COLOURS[below].map((part, channel) => Math.round(part + (place - below) * (COLOURS[above][channel] - part)));
}
