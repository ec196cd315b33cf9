// Which view is shown: the part of the address after #, and what happens when a watched folder changes.

import { watch } from "./asking.js";
import { forget } from "./charts.js";
import { el, fill } from "./dom.js";
import * as federation from "./federation.js";
import * as planner from "./planner.js";
import * as run from "./run.js";
import * as runs from "./runs.js";
import * as studies from "./studies.js";

const main = document.getElementById("main");
const live = document.getElementById("live");
let shown = { refresh: null };
let pending = false;

const VIEWS = { runs, planner, studies, federation };

/** Read an address: `#/runs/a,b?x=y` is the view runs, of a and b. */
function place() {
  const [path, query = ""] = window.location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  return { name: name in VIEWS ? name : "runs", rest: rest.join("/"), query: new URLSearchParams(query) };
}

async function go() {
  const { name, rest, query } = place();
  for (const link of document.querySelectorAll("nav a")) {
    const here = link.getAttribute("href") === `#/${name}`;
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const view = name === "runs" && rest ? run : VIEWS[name];
  const body = el("div", { class: `view ${name}` });
  const current = { refresh: null };
  shown = current;
  fill(main, body);
  try {
    current.refresh = (await view.show(body, rest, query)) ?? null;
  } catch (error) {
    complain(body, error);
  }
  forget();
}

function complain(body, error) {
  body.prepend(el("p", { class: "problem", role: "alert" }, error.message));
}

async function changed() {
  if (pending || document.hidden || !shown.refresh) return;
  pending = true;
  try {
    await shown.refresh();
  } catch {
    // The next change asks again; a folder may be half written for a moment.
  } finally {
    pending = false;
  }
}

window.addEventListener("hashchange", go);
document.addEventListener("visibilitychange", changed);
watch(changed, (up) => {
  live.textContent = up ? "live" : "no answer";
  live.className = up ? "up" : "down";
});
go();
