// The suspicion map: clients × rounds, each client's share in the aggregate, and what happened to its answers.

import { ask } from "./asking.js";
import { draw, plain } from "./charts.js";
import { choose, el, fill, table } from "./dom.js";

/** A map in `section`; of several runs, one is chosen. */
export function trustMap(section, ids) {
  let run = ids[0];
  let seed = "";
  let order = "least trusted first";
  let views = [];
  const controls = el("div", { class: "bar" });
  const chart = el("div", { class: "chart map" });
  const remark = el("p", { class: "note" });
  const people = el("details", {});
  fill(section, el("h2", {}, "Whom the rule trusted"), controls, remark,
    el("figure", {}, el("figcaption", {}, "Share of each client in the aggregate",
      el("small", {}, "grey: not heard; ○ absent, ✕ turned away, ◆ expelled for good")), chart), people);

  function bar() {
    const view = views.find((one) => one.line.id === run);
    const again = () => refresh(views);
    fill(controls,
      ids.length > 1 ? el("label", {}, "run ", choose(views.map((one) => [one.line.id, one.line.name]), run,
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
    remark.textContent = found.remark;
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

const WORDS = { absent: "absent", unreached: "not reached", rejected: "turned away", expelled: "expelled" };

const happened = (event) => (event.reason ? `${WORDS[event.kind]}: ${event.reason}` : WORDS[event.kind]);

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
  return {
    traces: [
      { type: "heatmap", x: middle, y: names, z: clients.map((one) => found.shares[one.client]), text,
        hoverinfo: "text", zmin: 0, zmax: most, colorscale: "Cividis", hoverongaps: true,
        colorbar: { title: { text: "share" }, thickness: 12, outlinewidth: 0 } },
      marks("absent", "circle-open"), marks("unreached", "circle-x-open"), marks("rejected", "x"), marks("expelled", "diamond"),
    ],
    layout: {
      height: Math.min(900, 130 + Math.max(14, 26 - clients.length / 6) * clients.length),
      plot_bgcolor: "#8a8f98",
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
