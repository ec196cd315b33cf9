// Charts by Plotly, in colours that colour-blind people can tell apart (Okabe and Ito).

const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d00", "#000000"];
const DARK = ["#56b4e9", "#e69f00", "#2fc79a", "#e59cc8", "#f0e442", "#5a9bd8", "#ff8a4c", "#ffffff"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const drawn = new Map();

// The script is large: the page does not wait for it, charts do.
const loaded = new Promise((found, lost) => {
  const script = document.createElement("script");
  script.src = "/plotly.js";
  script.addEventListener("load", found);
  script.addEventListener("error", () => lost(new Error("The charts’ script did not load: load the page again.")));
  document.head.append(script);
});

/** The colour of the line at a place, and its dashes: after eight lines colours come again with others. */
export function line(place) {
  const colours = dark.matches ? DARK : LIGHT;
  return { color: colours[place % colours.length], dash: DASHES[Math.floor(place / colours.length) % 5] };
}

/** A text as Plotly shows it: it reads tags, so there must be none. Of a long one the end is kept. */
export function plain(text, most = 200) {
  const kept = String(text);
  return (kept.length > most ? `…${kept.slice(-most)}` : kept).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function faint(colour) {
  const part = (start) => parseInt(colour.slice(start, start + 2), 16);
  return `rgba(${part(1)}, ${part(3)}, ${part(5)}, 0.16)`;
}

/** Traces of one quantity: its mean as a line, one deviation as a band. */
export function band(series, name, place, options = {}) {
  const { color, dash } = line(place);
  const single = series.rounds.length === 1;
  const mean = {
    x: series.rounds, y: series.mean, name: plain(name, 28), type: "scatter", mode: single ? "markers" : "lines",
    line: { color, dash: options.dash ?? dash, width: 2 }, marker: { color, size: 7 },
    legendgroup: String(place), hovertemplate: "round %{x}: %{y:.4g}<extra>%{fullData.name}</extra>",
  };
  if (series.seeds < 2) return [mean];
  const edge = { x: series.rounds, type: "scatter", mode: "lines", line: { width: 0, color },
    hoverinfo: "skip", showlegend: false, legendgroup: String(place) };
  return [{ ...edge, y: series.low }, { ...edge, y: series.high, fill: "tonexty", fillcolor: faint(color) }, mean];
}

// A chart is as wide as its card, which may grow or shrink when others come and go.
const sizes = new ResizeObserver((changes) => {
  for (const { target } of changes) {
    if (target.classList.contains("js-plotly-plot") && target.isConnected) Plotly.Plots.resize(target);
  }
});

/** Draw, or draw again, into a node; `make` is called anew when the colours change. */
export function draw(node, make) {
  if (!drawn.has(node)) sizes.observe(node);
  drawn.set(node, make);
  loaded.then(() => {
    if (drawn.get(node) === make && node.isConnected) render(node, make);
  }, (error) => { node.textContent = error.message; });
}

/** Rounds are whole: where there are few, every one has its mark. */
function marks(traces) {
  const places = traces.flatMap((one) => one.x);
  const span = places.length ? Math.max(...places) - Math.min(...places) : 0;
  return span <= 10 && places.every(Number.isInteger) ? { dtick: 1 } : {};
}

function render(node, make) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const { traces, layout = {} } = make();
  node.querySelector(".note")?.remove(); // what stood there until there was something to draw
  const axis = { gridcolor: colour("--line"), zeroline: false, automargin: true, linecolor: colour("--line") };
  Plotly.react(node, traces, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: 280,
    font: { color: colour("--ink"), family: "system-ui, sans-serif", size: 12 },
    margin: { l: 48, r: 12, t: 12, b: 40 }, hovermode: "closest",
    hoverlabel: { bgcolor: colour("--card"), font: { color: colour("--ink") }, align: "left" },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, uirevision: "stay",
    ...layout,
    xaxis: { ...axis, title: { text: "round" }, ...marks(traces), ...layout.xaxis },
    yaxis: { ...axis, ...layout.yaxis },
  }, { displaylogo: false, displayModeBar: false });
}

/** Forget charts whose nodes are gone; Plotly may still be at work on one, so it is told a while later. */
export function forget() {
  for (const node of [...drawn.keys()].filter((one) => !one.isConnected)) {
    drawn.delete(node);
    sizes.unobserve(node);
    if (node.classList.contains("js-plotly-plot")) window.setTimeout(() => Plotly.purge(node), 5000);
  }
}

dark.addEventListener("change", () => {
  forget();
  for (const [node, make] of drawn) render(node, make);
});
