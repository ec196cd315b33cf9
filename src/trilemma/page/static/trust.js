// The suspicion map: clients × rounds, each client's share in the aggregate, and what happened to its answers.

import { ask } from "./asking.js";
import { draw, plain } from "./charts.js";
import { choose, el, fill, short, table } from "./dom.js";

// Red and blue, apart for colour-blind people too; none of the colours is grey.
const LESS = ["#a50026", "#f46d43"];
const EQUAL = "#ffffbf";
const MORE = ["#74add1", "#313695"];
const SILENT = "#8a8f98";

/** A map in `section`; of several runs, one is chosen. */
export function trustMap(section, ids) {
  let run = ids[0];
  let seed = "";
  let order = "least trusted first";
  let views = [];
  const controls = el("div", { class: "bar" });
  const chart = el("div", { class: "chart map" });
  const remark = el("p", {});
  const key = el("ul", { class: "key" });
  const people = el("details", {});
  const parts = [el("h2", {}, "Whom the rule trusted"), remark, controls,
    el("figure", {}, el("figcaption", {}, "Share of each client in the aggregate"), key, chart), people];

  function bar() {
    const view = views.find((one) => one.line.id === run);
    const again = () => refresh(views);
    fill(controls,
      ids.length > 1 ? el("label", {}, "run ", choose(views.map((one) => [one.line.id, one.line.title]), run,
        (value) => { run = value; seed = ""; again(); })) : null,
      view.seeds.length > 1 ? el("label", {}, "seed ", choose([["", "mean of all"], ...view.seeds.map(String)], seed,
        (value) => { seed = value; again(); })) : null,
      el("label", {}, "order ", choose(["least trusted first", "by number"], order,
        (value) => { order = value; again(); })));
  }

  async function refresh(latest) {
    views = latest;
    if (!controls.contains(document.activeElement)) bar();
    const found = await ask(`/api/runs/${run}/trust`, { seed });
    if (!found.shares.flat().some((share) => share !== null)) {
      fill(section);
      return;
    }
    if (!section.hasChildNodes()) fill(section, parts);
    const said = [found.verdict, found.remark].filter(Boolean).join("; ");
    remark.textContent = said ? `${said[0].toUpperCase()}${said.slice(1)}.` : "";
    fill(key, meanings(found));
    const clients = order === "by number" ? [...found.clients].sort((a, b) => a.client - b.client) : found.clients;
    draw(chart, () => picture(found, clients));
    fill(people, el("summary", {}, `${clients.length} clients, least trusted first`), table(
      ["client", { text: "mean share", number: true }, { text: "heard", number: true },
        { text: "absent", number: true }, { text: "not reached", number: true }, { text: "late", number: true },
        { text: "turned away", number: true }, "expelled"],
      found.clients.map((one) => [name(one), one.weight.toFixed(4), String(one.heard), String(one.absent),
        String(one.unreached), String(one.late), String(one.rejected), one.expelled])));
  }

  return { refresh };
}

const name = (one) => `${one.client}${one.lies ? " lies" : ""}`;

const SIGNS = { absent: "○", unreached: "⊗", rejected: "✕", expelled: "◆" };
const WORDS = { absent: "absent", unreached: "not reached", rejected: "turned away", expelled: "expelled" };

const happened = (event) => (event.reason ? `${WORDS[event.kind]}: ${event.reason}` : WORDS[event.kind]);

/** What colours and signs mean: those that are on the map. */
function meanings(found) {
  const colour = (background, text) => {
    const mark = el("span", { class: "swatch", "aria-hidden": "true" });
    mark.style.backgroundColor = background;
    return el("li", {}, mark, text);
  };
  const kinds = new Set(found.incidents.map((one) => one.kind));
  return [colour(LESS[0], "no share"), colour(EQUAL, `an equal share, ${short(found.equal)}`), colour(MORE[1], "more"),
    found.shares.flat().includes(null) ? colour(SILENT, "not heard") : null,
    Object.entries(SIGNS).filter(([kind]) => kinds.has(kind)).map(([kind, sign]) => el("li", {}, `${sign} ${WORDS[kind]}`))];
}

function picture(found, clients) {
  const names = clients.map(name);
  const spans = found.columns.map(([first, last]) => (first === last ? `round ${first}` : `rounds ${first}–${last}`));
  const middle = found.columns.map(([first, last]) => (first + last) / 2);
  const told = incidents(found);
  const text = clients.map((one) => found.columns.map((span, column) => {
    const share = found.shares[one.client][column];
    const what = share === null ? "not heard" : `share ${share.toFixed(4)}`;
    const events = (told.get(one.client) ?? []).filter((event) => event.round >= span[0] && event.round <= span[1]);
    const reasons = [...new Set(events.map(happened))];
    return plain(`client ${name(one)}, ${spans[column]}: ${[what, ...reasons].join("; ")}`);
  }));
  const marks = (kind, symbol) => {
    const some = found.incidents.filter((one) => one.kind === kind && one.client !== null);
    const place = new Map(clients.map((one) => [one.client, name(one)]));
    return { x: some.map((one) => one.round), y: some.map((one) => place.get(one.client)), type: "scatter",
      mode: "markers", hoverinfo: "text", showlegend: false,
      text: some.map((one) => plain(`client ${one.client}, round ${one.round}: ${happened(one)}`)),
      marker: { symbol, size: 9, color: "#ffffff", line: { color: "#000000", width: 1.5 } } };
  };
  const most = Math.max(2 * found.equal, ...found.shares.flat().filter((one) => one !== null));
  const even = found.equal / most;
  return {
    traces: [
      { type: "heatmap", x: middle, y: names, z: clients.map((one) => found.shares[one.client]), text,
        hoverinfo: "text", zmin: 0, zmax: most, hoverongaps: true,
        colorscale: [[0, LESS[0]], [even / 2, LESS[1]], [even, EQUAL], [(1 + even) / 2, MORE[0]], [1, MORE[1]]],
        colorbar: { title: { text: "share" }, thickness: 12, outlinewidth: 0,
          tickvals: [0, found.equal, most], ticktext: ["0", "equal", short(most)] } },
      marks("absent", "circle-open"), marks("unreached", "circle-x-open"), marks("rejected", "x"), marks("expelled", "diamond"),
    ],
    layout: {
      height: Math.min(900, 130 + Math.max(14, 26 - clients.length / 6) * clients.length),
      plot_bgcolor: SILENT,
      yaxis: { type: "category", range: [clients.length - 0.5, -0.5], title: { text: "client" }, showgrid: false },
      xaxis: { showgrid: false, range: found.columns.length ?
        [found.columns[0][0] - 0.5, found.columns[found.columns.length - 1][1] + 0.5] : undefined },
    },
  };
}

function incidents(found) {
  const told = new Map();
  for (const one of found.incidents) {
    if (!told.has(one.client)) told.set(one.client, []);
    told.get(one.client).push(one);
  }
  return told;
}
