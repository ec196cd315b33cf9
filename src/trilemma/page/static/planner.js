// The planner: controls on one side, what `trilemma privacy` says on the other, and curves below.

import { ask } from "./asking.js";
import { draw, line, plain } from "./charts.js";
import { bytes, choose, el, field, fill, short, table } from "./dom.js";

const START = { mode: "noise", clients: 100, byzantine: 10, collusion: "", neighbours: "", threat: "secldp", rounds: 30, clip: 2.25,
  epsilon: 8, delta: 0.0001, sigma_ind: 4, sigma_cor: 2, unit: "user", batch: 50, examples: 600, sampling: "none",
  adjacency: "replace", accountant: "", rule: "caf", dim: 79510 };
const MODES = { noise: "What do I need for this ε?", epsilon: "What does this noise guarantee?",
  delta: "At which δ does this noise keep to ε?" };
const state = { ...START };

/** The question as the server is asked it: what is sought is left out. */
function question() {
  const { mode, ...given } = state;
  if (mode === "noise") {
    given.sigma_ind = "";
    given.sigma_cor = "";
  }
  if (mode === "epsilon") given.epsilon = "";
  if (mode === "delta") given.delta = "";
  if (given.unit === "user") {
    given.batch = 1;
    given.sampling = "none";
  }
  if (given.sampling === "none") given.examples = "";
  if (!["secldp", "byzldp"].includes(given.threat)) given.neighbours = "";
  return given;
}

export async function show(body) {
  const choices = await ask("/api/choices");
  const form = el("form", { class: "controls", on: { submit: (event) => event.preventDefault() } });
  const answer = el("div", { class: "answer", "aria-live": "polite" });
  const charts = el("div", { class: "grid" });
  fill(body, el("h1", {}, "Planner"), el("p", {}, "What privacy costs, before anything is run. Every figure is ",
    el("code", {}, "trilemma privacy"), "’s own."), el("div", { class: "sides" }, form, answer), charts);
  let asked = 0;
  let timer = 0;

  const later = () => {
    window.clearTimeout(timer);
    timer = window.setTimeout(update, 250);
  };

  function number(name, label, options = {}) {
    const control = el("input", { type: "number", value: state[name], step: "any", name, ...options, on: {
      input: (event) => { state[name] = event.target.value; later(); } } });
    return field(label, control, options.hint);
  }

  function pick(name, label, options, hint) {
    return field(label, choose(options, state[name], (value) => { state[name] = value; build(); later(); }, { name }), hint);
  }

  function build() {
    const focus = document.activeElement?.getAttribute("name");
    const example = state.unit === "example";
    const shares = ["secldp", "byzldp"].includes(state.threat);
    const group = (title, ...fields) => el("fieldset", {}, el("legend", {}, title), fields);
    fill(form,
      pick("mode", "Question", Object.entries(MODES)),
      group("Federation",
        number("clients", "clients n", { min: 1, step: 1 }), number("byzantine", "liars f", { min: 0, step: 1 }),
        state.threat === "secldp" ? number("collusion", "colluders q", { min: 0, step: 1, placeholder: "0" }) : null,
        shares ? number("neighbours", "secrets with k others", { min: 1, step: 1, placeholder: "all" }) : null,
        pick("threat", "threat model", Object.keys(choices.threats), choices.threats[state.threat])),
      group("What is released",
        number("rounds", "rounds", { min: 1, step: 1 }), number("clip", "clip C", { min: 0 }),
        pick("unit", "who is protected", choices.units),
        example ? number("batch", "batch", { min: 1, step: 1 }) : null,
        example ? pick("sampling", "batches are drawn", choices.schemes) : null,
        example && state.sampling !== "none" ?
          number("examples", "examples per client", { min: 1, step: 1 }) : null,
        pick("adjacency", "neighbouring data sets", choices.adjacencies)),
      group("Budget and noise",
        state.mode !== "epsilon" ? number("epsilon", "ε", { min: 0 }) : null,
        state.mode !== "delta" ? number("delta", "δ", { min: 0, max: 1 }) : null,
        state.mode !== "noise" ? number("sigma_ind", "own noise σ_ind", { min: 0 }) : null,
        state.mode !== "noise" ? number("sigma_cor", "shared noise σ_cor", { min: 0 }) : null,
        state.mode === "noise" ? pick("accountant", "calibrated by",
          [["", "the tightest"], ...Object.keys(choices.accountants)]) : null),
      group("Model and rule", number("dim", "parameters d", { min: 1, step: 1 }),
        pick("rule", "rule", choices.rules)),
      el("button", { type: "button", on: { click: () => { Object.assign(state, START); build(); update(); } } },
        "Start again"));
    if (focus) form.querySelector(`[name="${focus}"]`)?.focus();
  }

  async function update() {
    asked += 1;
    const mine = asked;
    if (!answer.childElementCount) {
      fill(answer, el("p", { class: "note" }, "Working it out: the first answer takes up to half a minute …"));
    }
    try {
      const plan = await ask("/api/plan", question());
      if (mine !== asked) return;
      fill(answer, ...told(plan));
      if (!plan.rule_problem) ask("/api/plan/seconds", question()).then((found) => {
        if (mine === asked) timed(answer.querySelector(".facts"), found);
      }, () => {});
    } catch (error) {
      if (mine === asked) {
        fill(answer, el("p", { class: "problem", role: "alert" }, error.message));
        fill(charts);
      }
      return;
    }
    if (state.mode === "delta") {
      fill(charts);
      return;
    }
    if (!charts.childElementCount) fill(charts, CHARTS.map((title) => card(title, "")));
    charts.setAttribute("aria-busy", "true");
    try {
      const curves = await ask("/api/plan/curves", question());
      if (mine === asked) pictures(charts, curves);
    } catch (error) {
      if (mine === asked) fill(charts, el("p", { class: "note" }, error.message));
    } finally {
      charts.removeAttribute("aria-busy");
    }
  }

  build();
  await update();
  return null;
}

function fact(name, value, hint) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, value, hint ? el("small", {}, hint) : null));
}

/** Seconds come later than the rest: they are measured. */
function timed(facts, found) {
  if (!facts || found.rule === null) return;
  facts.append(fact("server, seconds per round", `≈ ${found.rule.toPrecision(2)}`, " for the rule, on this machine"),
    fact("client, seconds per round", `≈ ${found.noise.toPrecision(2)}`, " for its noise; training comes on top"));
}

function told(plan) {
  const symbol = plan.asked === "epsilon" ? "ε" : "δ";
  // The first in the list is preferred; another is better only by more than rounding.
  const best = plan.figures.reduce((a, b) => ((b.value ?? Infinity) < (a.value ?? Infinity) * (1 - 1e-9) ? b : a));
  return [
    el("p", { class: plan.held ? "big held" : "big unheld" }, el("strong", {}, `${symbol} = ${short(best.value)}`),
      plan.held ? ` guaranteed, by ${best.accountant}` : ` printed, and no guarantee: ${plan.reason}`),
    table(["accountant", { text: symbol, number: true }, "assumes"],
      plan.figures.map((one) => [one.accountant, 
        one.value === null ? "∞" : el("span", { title: String(one.value) }, short(one.value)), one.assumes])),
    el("dl", { class: "facts" },
      fact("own noise σ_ind", short(plan.sigma_ind)), fact("shared noise σ_cor", short(plan.sigma_cor)),
      fact("noise multiplier", short(plan.multiplier)),
      fact("noise in the honest mean", short(plan.deviation), " per coordinate"),
      fact("its norm", short(plan.norm), " over all parameters"),
      fact("κ of the rule", plan.kappa === null ? "none proven" : short(plan.kappa), plan.rule_problem || plan.criterion),
      plan.hidden === null ? null : fact("what liars can hide", short(plan.hidden),
        ` in the mean, after ${state.rounds} rounds, whatever they send, before evidence has a proof`),
      fact("bytes per round, up", bytes(plan.up_bytes)), fact("down", bytes(plan.down_bytes))),
    plan.notes.map((note) => el("p", { class: "note" }, note)),
    copied("The command", plan.command),
    copied("As a configuration", plan.toml, plan.toml_problem),
  ];
}

function copied(title, text, problem) {
  const button = el("button", { type: "button", on: { click: async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    window.setTimeout(() => { button.textContent = "Copy"; }, 1500);
  } } }, "Copy");
  return el("details", { open: title === "The command" }, el("summary", {}, title), button, el("pre", { tabindex: "0" }, text),
    problem ? el("p", { class: "problem" }, problem) : null);
}

const CHARTS = ["ε over rounds", "ε over noise", "Noise over n"];

function card(title, note) {
  return el("figure", {}, el("figcaption", {}, title, el("small", {}, note)),
    el("div", { class: "chart" }, el("p", { class: "note" }, "Working it out …")));
}

function pictures(charts, curves) {
  const drawings = []; // after all cards stand: each is narrower than the first was alone
  const figure = (title, note, traces, xaxis, yaxis) => {
    const made = card(title, note);
    charts.append(made);
    drawings.push(() => draw(made.querySelector(".chart"),
      () => ({ traces: traces(), layout: { xaxis, yaxis: { rangemode: "tozero", ...yaxis } } })));
  };
  const trace = (one, place) => ({ x: one.x, y: one.y, name: plain(one.name), type: "scatter", mode: "lines+markers",
    marker: { size: 4 }, line: { ...line(place), width: 2 }, hovertemplate: "%{x:.6g}: %{y:.4g}<extra>%{fullData.name}</extra>" });
  fill(charts);
  figure(CHARTS[0], "by accountant", () => curves.over_rounds.map(trace), {}, { title: { text: "ε" } });
  figure(CHARTS[1], "all noise times this factor", () => [trace(curves.over_noise, 0)],
    { title: { text: "times the noise" } }, { title: { text: "ε" } });
  figure(CHARTS[2], `in the honest mean, for ε = ${short(curves.epsilon)}; f and q grow with n`,
    () => [trace(curves.over_clients, 0)], { title: { text: "clients n" } }, { title: { text: "standard deviation" } });
  for (const one of drawings) one();
}
