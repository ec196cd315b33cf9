// One run, or several over each other: curves with bands, cost, whom the rule trusted, what differs.

import { ask } from "./asking.js";
import { band, draw, line as lineOf, plain } from "./charts.js";
import { ago, choose, el, fill, heldClass, short, table } from "./dom.js";
import { badge, liars, progress } from "./runs.js";
import { trustMap } from "./trust.js";

export async function show(body, rest) {
  const ids = rest.split(",").filter(Boolean);
  const head = el("div", { class: "head" });
  const charts = el("div", { class: "grid" });
  const trust = el("section", { "aria-label": "Whom the rule trusted" });
  const beside = el("section", {});
  fill(body, head, charts, trust, beside);
  const cards = new Map();
  const map = trustMap(trust, ids);

  function card(title, note) {
    if (!cards.has(title)) {
      const chart = el("div", { class: "chart" });
      const small = el("small", {});
      charts.append(el("figure", {}, el("figcaption", {}, title, small), chart));
      cards.set(title, { chart, small });
    }
    cards.get(title).small.textContent = note ?? "";
    return cards.get(title).chart;
  }

  async function refresh() {
    const views = await Promise.all(ids.map((id) => ask(`/api/runs/${id}`)));
    heading(head, views);
    curves(card, views);
    await map.refresh(views);
    if (ids.length > 1) fill(beside, ...differing(await ask("/api/differences", { run: ids })));
    else if (!beside.hasChildNodes()) fill(beside, ...details(views[0]));
  }

  await refresh();
  return refresh;
}

function heading(head, views) {
  if (views.length > 1) {
    fill(head, el("h1", {}, `${views.length} runs over each other`), el("ol", { class: "legend" },
      views.map((view, place) => el("li", {}, swatch(place), el("a", { href: `#/runs/${view.line.id}` },
        view.line.title), ` ${view.line.score} ${view.line.shown}, ε ${view.line.epsilon}, liars ${liars(view.line)}`))));
    return;
  }
  const { line, notes } = views[0];
  const facts = [["state", badge(line.state)], ["rounds", progress(line)], ["data", line.data],
    ["algorithm", line.algorithm], ["rule", line.rule], ["liars", `${liars(line)}, f = ${line.tolerated}`],
    [line.score, line.shown || "–"], ["ε", line.epsilon], ["seeds", String(line.seeds)], ["changed", ago(line.changed)]];
  fill(head, el("h1", {}, line.title),
    el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    el("p", { class: heldClass(line.guarantee) }, el("strong", {}, heldWord(line.guarantee)), line.guarantee.text),
    [...new Set([...line.guarantee.assumptions, ...notes])].map((note) => el("p", { class: "note" }, note)));
}

const heldWord = ({ held }) => (held === null ? "ε is " : held ? "Guaranteed: " : "No guarantee: ");

function swatch(place) {
  const mark = el("span", { class: "swatch", "aria-hidden": "true" });
  mark.style.backgroundColor = lineOf(place).color;
  return mark;
}

const named = (list, name) => list.find((one) => one.name === name);

function curves(card, views) {
  const several = views.length > 1;
  const label = (view, what) => (several ? view.line.title : what);
  const quantity = (title, names, layout = {}, extra = () => []) => {
    const traces = [];
    let place = 0;
    for (const view of views) {
      for (const name of names) {
        const series = named(view.series, name);
        if (series) traces.push([series, label(view, name), several ? views.indexOf(view) : place++]);
      }
    }
    if (!traces.length) return;
    const seeds = Math.max(...traces.map(([series]) => series.seeds));
    draw(card(title, seeds > 1 ? `mean of ${seeds} seeds, one deviation to either side` : "one seed"), () => ({
      traces: [...traces.flatMap((one) => band(...one)), ...extra()],
      layout: { showlegend: several || traces.length + extra().length > 1, ...layout },
    }));
  };
  const score = views[0].line.score;
  const free = (name) => () => (several ? [] : views[0].baseline.filter((one) => one.name === name).flatMap((one) =>
    band({ ...one, seeds: 1 }, "nobody lies", 7, { dash: "dash" })));
  if (score !== "loss") quantity(`Test ${score}`, [score], {}, free(score));
  quantity("Loss", several ? ["loss"] : ["loss", "train_loss"], {}, free("loss"));
  quantity("ε spent", ["epsilon"], { yaxis: { rangemode: "tozero" } }, () => target(views));
  quantity("Attack strength", ["attack_strength"]);
  if (!several) seconds(card, views[0]);
  more(card, views, label);
}

function target(views) {
  const wanted = [...new Set(views.map((view) => view.target).filter((one) => one !== null))];
  return wanted.map((epsilon) => ({ x: [1, views[0].line.rounds], y: [epsilon, epsilon], type: "scatter",
    mode: "lines", name: `target ${short(epsilon)}`, line: { ...lineOf(7), dash: "dash", width: 1.5 } }));
}

function seconds(card, view) {
  if (!view.stages.length) return;
  draw(card("Seconds per stage", "of one round"), () => ({
    traces: view.stages.map((one, place) => ({ x: one.rounds, y: one.mean, type: "scatter", mode: "lines",
      stackgroup: "all", name: plain(one.name.replace(/ s$/, "")), line: { ...lineOf(place), width: 1 },
      hovertemplate: "round %{x}: %{y:.3g} s<extra>%{fullData.name}</extra>" })),
    layout: { yaxis: { ticksuffix: " s" }, hovermode: "x unified" },
  }));
}

const SHOWN = ["loss", "train_loss", "epsilon", "attack_strength"];
let wanted = "";

const MEANS = {
  clipped: "share of contributions that were shortened to the clip",
};

function more(card, views, label) {
  const names = [...new Set(views.flatMap((view) => view.series.map((one) => one.name)))]
    .filter((name) => !SHOWN.includes(name) && name !== views[0].line.score);
  if (!names.length) return;
  if (!names.includes(wanted)) wanted = names[0];
  const chart = card("Another quantity");
  const redraw = () => draw(chart, () => ({
    traces: views.flatMap((view, place) => view.series.filter((one) => one.name === wanted)
      .flatMap((one) => band(one, label(view, wanted), place))),
    layout: { showlegend: views.length > 1, xaxis: { title: { text: MEANS[wanted] ? `round (${wanted}: ${MEANS[wanted]})` : "round" } } },
  }));
  const caption = chart.previousElementSibling;
  if (!caption.querySelector("select")) {
    caption.append(choose(names, wanted, (name) => { wanted = name; redraw(); }, { "aria-label": "quantity" }));
  }
  redraw();
}

function differing(found) {
  return [el("h2", {}, "What differs"),
    found.rows.length ? table(["setting", ...found.names], found.rows.map((row) => [row.key, ...row.values])) :
      el("p", {}, "Their configurations are the same."),
    el("p", { class: "count" }, `${found.same} other settings are the same.`)];
}

function details(view) {
  const rows = Object.entries(view.config);
  return [el("details", {}, el("summary", {}, `Configuration (${rows.length} settings)`),
    table(["setting", "value"], rows))];
}
