// A federation from one party's own folder: the server's, or a client's.

import { ask } from "./asking.js";
import { draw, line } from "./charts.js";
import { ago, el, fill, short, table } from "./dom.js";
import { badge } from "./runs.js";

const SIGNS = { heard: "●", absent: "○", unreached: "◌", rejected: "✕", late: "◔", "not asked": "–", "nothing yet": "–" };

export async function show(body, rest) {
  const list = el("ul", { class: "parties" });
  const view = el("div", {});
  fill(body, el("h1", {}, "Federation"), list, view);
  let chart = null;

  async function refresh() {
    const parties = await ask("/api/parties");
    if (!parties.length) {
      fill(view, el("p", { class: "empty" }, "No party’s folder is watched. Name one: trilemma page federation/server"));
      return;
    }
    const ordered = parties.sort((a, b) => (a.role === b.role ? a.name.localeCompare(b.name, "en", { numeric: true }) :
      a.role === "server" ? -1 : 1));
    const chosen = ordered.find((one) => one.id === rest) ?? ordered[0];
    fill(list, ordered.map((one) => el("li", {}, el("a", { href: `#/federation/${one.id}`,
      "aria-current": one === chosen ? "page" : null }, one.name))));
    if (chosen.problem) {
      fill(view, el("p", { class: "problem" }, chosen.problem));
      return;
    }
    const party = await ask(`/api/parties/${chosen.id}`);
    const open = view.querySelector("details")?.open;
    fill(view, el("p", {}, `${party.line.federation}, ${party.line.clients} clients, at ${party.address}`),
      party.account ? client(party.account) : party.runs.map(server),
      party.account || party.runs.length ? null : el("p", { class: "empty" }, "Nothing has run yet."),
      el("details", { open }, el("summary", {}, "Configuration"), table(["setting", "value"], Object.entries(party.config))));
    if (party.account?.spending.length) {
      chart = view.querySelector(".chart");
      draw(chart, () => spending(party.account));
    }
  }

  await refresh();
  return refresh;
}

function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function server(run) {
  const now = (state) => run.members.filter((one) => one.now === state).length;
  return el("section", {}, el("h2", {}, el("a", { href: `#/runs/${run.id}` }, `Run ${run.name}`)),
    facts([["state", badge(run.state)], ["round", `${run.round} of ${run.rounds}`], ["epoch", run.epoch === null ? "–" : String(run.epoch)],
      ["heard", `${now("heard")} of ${run.members.length}`], ["absent", String(now("absent"))],
      ["not reached", String(now("unreached"))], ["late", String(now("late"))],
      ["turned away", String(now("rejected"))], ["score", run.score || "–"], ["last commit", ago(run.changed)]]),
    table(["client", "in the newest round", "last heard", "answers in", { text: "absent", number: true },
      { text: "not reached", number: true }, { text: "late", number: true },
      { text: "turned away", number: true }, { text: "mean share", number: true }, "why"],
    run.members.map((one) => ({ class: one.now.replaceAll(" ", "-"), cells: [`client ${one.client}`, `${SIGNS[one.now]} ${one.now}`,
      heard(one), seconds(one), String(one.absent), String(one.unreached), String(one.late), String(one.rejected), one.weight.toFixed(4), why(one)] }))),
    run.statistics ? statistics(run.statistics) : null);
}

function statistics(told) {
  const most = Math.max(1, ...told.columns.flatMap((one) => one.cells.map((cell) => cell.count ?? 0)));
  return el("div", { class: "statistics" }, el("h3", {}, "Private statistics"),
    el("ul", { class: "log" }, told.lines.map((line) => el("li", {}, line))),
    told.columns.map((one) => el("details", {}, el("summary", {}, `Histogram of ${one.name}`),
      table(["", { text: "records", number: true }, "interval", ""], one.cells.map((cell) => ({ cells: [cell.name,
        cell.count === null ? "too few" : short(cell.count), cell.count === null ? "" : `${short(cell.low)} to ${short(cell.high)}`,
        cell.count === null ? "" : el("meter", { min: 0, max: most, value: cell.count, "aria-label": `records in ${cell.name}` })] }))))));
}

function heard(one) {
  if (one.heard === null) return "never";
  return one.heard_at === null ? `round ${one.heard}` : `round ${one.heard}, ${ago(one.heard_at)}`;
}

function seconds(one) {
  return one.took === null ? "–" : `${short(one.took)} s, usually ${short(one.usual)} s`;
}

function why(one) {
  return [one.expelled ? `expelled: ${one.expelled}` : "", one.outside ? `not in the epoch: ${one.outside}` : "",
    one.reason ? `last not heard: ${one.reason}` : ""].filter(Boolean).join("; ");
}

function client(account) {
  const known = account.budget !== null;
  const share = known ? Math.min(1, account.spent / account.budget) : 0;
  return el("section", {},
    account.problem ? el("p", { class: "problem" }, account.problem) : null,
    known ? [
      el("p", { class: share > 0.9 ? "big unheld" : "big held" }, el("strong", {}, `ε left: ${short(account.left)}`),
        ` of ${short(account.budget)} at δ = ${account.delta}`),
      el("meter", { min: 0, max: 1, value: share, "aria-label": "share of the budget that is spent" }),
      facts([["spent", account.accountant ? `${short(account.spent)} by ${account.accountant}` : "nothing"],
        ["protects", `one ${account.unit} (${account.adjacency})`],
        ...Object.entries(account.rounds).map(([run, count]) => [`releases in ${run}`, String(count)])]),
      el("figure", {}, el("figcaption", {}, "ε of all releases so far"), el("div", { class: "chart" })),
    ] : el("p", {}, "This client keeps no budget: its configuration guarantees nothing."),
    notes("Remarks in the ledger", account.remarks),
    notes("What this client refused, and why (its own log)", account.refusals));
}

function notes(title, texts) {
  return texts.length ? el("details", { open: true }, el("summary", {}, `${title} (${texts.length})`),
    el("ul", { class: "log" }, texts.slice().reverse().map((text) => el("li", {}, text)))) : null;
}

function spending(account) {
  const count = account.spending.map((_, place) => place + 1);
  return {
    traces: [
      { x: count, y: account.spending.map((one) => one.epsilon), type: "scatter", mode: "lines+markers", name: "spent",
        line: { ...line(0), width: 2 }, marker: { size: 5 },
        text: account.spending.map((one) => `round ${one.round}`), hovertemplate: "%{text}: ε = %{y:.4g}<extra></extra>" },
      { x: [1, Math.max(2, count.length)], y: [account.budget, account.budget], type: "scatter", mode: "lines", name: "budget",
        line: { ...line(1), dash: "dash", width: 2 } },
    ],
    layout: { xaxis: { title: { text: "release" } }, yaxis: { rangemode: "tozero", title: { text: "ε" } } },
  };
}
