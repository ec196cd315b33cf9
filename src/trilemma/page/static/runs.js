// The list of runs: search, choose some to compare, open one.

import { ask } from "./asking.js";
import { ago, el, fill, heldClass, table } from "./dom.js";

const PAGE = 50;
const MARKS = { finished: "✓", diverged: "✗", "under way": "▶", quiet: "", failed: "✗", broken: "!" }; // quiet: drawn by the style
const RESTS = "ε and what it rests on";
const chosen = new Set();

/** A state as a sign and a word. */
export function badge(state) {
  return el("span", { class: `badge ${state.replaceAll(" ", "-")}` }, `${MARKS[state] ?? "·"} ${state}`);
}

/** How far a run is. */
export function progress(line) {
  return el("span", { class: "progress" },
    el("progress", { max: line.rounds, value: line.done, "aria-label": "rounds" }), ` ${line.done} of ${line.rounds}`);
}

/** Who lies, of how many, and how. */
export function liars(line) {
  const count = line.byzantine === null ? "?" : line.byzantine;
  return `${count} of ${line.clients}${line.attack && line.attack !== "none" ? ` · ${line.attack}` : ""}`;
}

export async function show(body) {
  let search = "";
  let offset = 0;
  let order = { by: "changed", down: true };
  const list = el("div", {});
  const compare = el("button", { type: "button", on: { click: () => {
    window.location.hash = `#/runs/${[...chosen].join(",")}`;
  } } });
  const input = el("input", { type: "search", placeholder: "caf alie finished …", on: { input: () => {
    search = input.value;
    offset = 0;
    refresh();
  } } });
  fill(body, el("div", { class: "bar" }, el("h1", {}, "Runs"),
    el("label", { class: "search" }, el("span", {}, "Search"), input), compare), list);

  function count() {
    compare.textContent = chosen.size > 1 ? `Compare ${chosen.size} runs` : "Choose runs to compare";
    compare.disabled = chosen.size < 2;
  }

  function row(line) {
    const box = el("input", { type: "checkbox", checked: chosen.has(line.id), "aria-label": `choose ${line.title}`,
      disabled: line.state === "broken", on: { change: () => {
        if (box.checked) chosen.add(line.id);
        else chosen.delete(line.id);
        count();
      } } });
    const name = line.state === "broken" ? el("span", {}, line.title)
      : el("a", { href: `#/runs/${line.id}`, title: line.name }, line.title);
    if (line.state === "broken") {
      return [box, [name, el("small", {}, line.problem)], badge(line.state), "", "", "", "", "", ""];
    }
    return [
      box, [name, el("small", {}, `${line.data} · ${line.algorithm}${line.deployed ? " · federation" : ""}`)],
      badge(line.state), line.rule, liars(line), progress(line),
      line.shown ? `${line.score} ${line.shown}` : "–",
      [el("strong", {}, line.epsilon), line.guarantee.text === line.epsilon ? null :
        el("small", { class: heldClass(line.guarantee) }, line.guarantee.text)],
      ago(line.changed),
    ];
  }

  async function refresh() {
    const wanted = search;
    const sort = order.by === RESTS ? "ε" : order.by;
    const found = await ask("/api/runs", { search, offset, limit: PAGE, sort, down: order.down });
    if (wanted !== search) return;
    const active = document.activeElement?.getAttribute("aria-label");
    count();
    if (!found.total) {
      fill(list, el("p", { class: "empty" }, search ? "No run matches." :
        `No runs yet below ${found.watched.join(", ")}. Start one: trilemma run --out ${found.watched[0]}/first`));
      return;
    }
    fill(list, table(["", "run", "state", "rule", "liars", "rounds", { text: "score", number: true },
      RESTS, "changed"], found.runs.map(row), "cards", { ...order, change: (by, down) => {
      order = { by, down };
      offset = 0;
      refresh();
    } }), pages(found));
    if (active?.startsWith("choose ")) {
      [...list.querySelectorAll("input")].find((one) => one.getAttribute("aria-label") === active)?.focus();
    }
  }

  function pages(found) {
    if (found.total <= PAGE) return el("p", { class: "count" }, `${found.total} runs`);
    const turn = (by) => () => { offset = Math.max(0, offset + by); refresh(); };
    return el("div", { class: "pages" },
      el("button", { type: "button", disabled: offset === 0, on: { click: turn(-PAGE) } }, "Newer"),
      el("span", {}, `${offset + 1}–${offset + found.runs.length} of ${found.total} runs`),
      el("button", { type: "button", disabled: offset + PAGE >= found.total, on: { click: turn(PAGE) } }, "Older"));
  }

  await refresh();
  return refresh;
}
