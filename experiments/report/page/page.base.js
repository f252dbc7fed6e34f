// What all charts of the page share: its data, light and dark, filters, and curves over the rounds.
// page.html puts this file and page.charts.js into one function.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const MOST_MARKED = 40;  // rounds; a longer line has few markers, to tell it apart
const GLYPHS = ["\u25cf", "\u25a0", "\u25c6", "\u25b2", "\u271a", "\u25bc", "\u2716", "\u2605", "\u2b22", "\u2b1f"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "x", "star", "hexagon", "pentagon"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const STROKES = ["", "7 4", "2 3", "7 3 2 3", "11 4", "11 4 2 4"];
const coarse = matchMedia("(pointer: coarse)").matches;
const narrow = () => innerWidth < 640;

// Light or dark: the reader's choice, or else the system's
const theme = {
  get: () => document.documentElement.dataset.theme,
  set(name) {
    document.documentElement.dataset.theme = name;
    byId("theme").textContent = name === "dark" ? "\u2600" : "\u263e";
  },
};
const system = matchMedia("(prefers-color-scheme: dark)");
theme.set(system.matches ? "dark" : "light");
system.addEventListener("change", (event) => { theme.set(event.matches ? "dark" : "light"); draw(); });
byId("theme").addEventListener("click", () => { theme.set(theme.get() === "dark" ? "light" : "dark"); draw(); });
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (index) => { const set = data.colours[theme.get()]; return set[index % set.length]; };
const faint = (hex) => {
  const number = parseInt(hex.slice(1), 16);
  return `rgba(${number >> 16},${(number >> 8) & 255},${number & 255},0.16)`;
};
const lineIndex = (name) => data.lines.indexOf(name);
// Colours repeat from the eleventh line on; symbols are shifted so that no pair of colour and symbol repeats
const symbolIndex = (name) => (lineIndex(name) + 3 * Math.floor(lineIndex(name) / 10)) % SYMBOLS.length;
const tone = (name) => name === "Centralized" ? css("--ink") : colour(lineIndex(name));
const panel = (run) => (data.studies.length > 1 ? `${run.study}: ` : "") + run.cell;
// Plotly reads some HTML in names, links among it
const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;" };
const plain = (text) => String(text).replace(/[&<>]/g, (sign) => ENTITIES[sign]);
const unique = (values) => [...new Set(values)];
const panels = unique(data.runs.map(panel));

// Filters
const anyDone = data.runs.some((run) => run.finished);
const state = (run) => run.finished ? "finished" : "unfinished";
const FILTERS = [
  ["Study", (run) => run.study],
  ["Method", (run) => run.line],
  ["Data", (run) => run.data],
  ["Overlap", (run) => `O=${run.overlap}`],
  ["Seed", (run) => String(run.seed)],
  ["Runs", state],
].map(([name, of]) => {
  const values = unique(data.runs.map(of));
  if (name === "Method") values.sort((one, other) => lineIndex(one) - lineIndex(other));
  const off = name === "Runs" && anyDone ? ["unfinished"] : [];
  return { name, of, values, on: new Set(values.filter((value) => !off.includes(value))) };
});
const chosen = () => data.runs.filter((run) => FILTERS.every((filter) => filter.on.has(filter.of(run))));

function makeFilters() {
  for (const filter of FILTERS) {
    if (filter.values.length < 2) continue;
    const group = document.createElement("div");
    group.className = "filter";
    group.setAttribute("role", "group");
    group.setAttribute("aria-label", filter.name);
    group.innerHTML = `<span>${filter.name}</span>`;
    for (const value of filter.values) {
      const chip = document.createElement("button");
      chip.type = "button";
      chip.className = "chip";
      chip.dataset.filter = filter.name;
      chip.dataset.value = value;
      if (filter.name === "Method") {
        const mark = document.createElement("i");
        mark.textContent = GLYPHS[symbolIndex(value)];
        chip.append(mark);
      }
      chip.append(value);
      chip.addEventListener("click", () => {
        filter.on.has(value) ? filter.on.delete(value) : filter.on.add(value);
        draw();
      });
      chip.addEventListener("dblclick", () => { filter.on = new Set([value]); draw(); });
      chip.title = "Click to show or hide. Double-click to show only this one.";
      group.append(chip);
    }
    byId("filters").append(group);
  }
  if (!byId("filters").children.length) byId("filters").hidden = true;
}

function paintFilters() {
  for (const chip of document.querySelectorAll(".chip")) {
    const filter = FILTERS.find((each) => each.name === chip.dataset.filter);
    chip.setAttribute("aria-pressed", filter.on.has(chip.dataset.value));
    const dot = chip.querySelector("i");
    if (dot) dot.style.color = tone(chip.dataset.value);
  }
}

// Plotly in the page's own colours
const axis = (more) => ({
  gridcolor: css("--grid"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true,
  tickfont: { size: 12 }, ...more,
});
const along = (traces, more) => {
  const last = Math.max(2, ...traces.flatMap((trace) => trace.x));
  return axis({ title: { text: "round", standoff: 6, font: { size: 12 } }, dtick: last <= 12 ? 1 : undefined, unifiedhovertitle: { text: "<b>round %{x}</b>" }, range: [1 - 0.02 * last, last + 0.02 * last], ...more });
};
// A short logarithmic axis has ticks at 1, 2 and 5, a long one at powers of ten
function logarithmic(traces) {
  const values = traces.flatMap((trace) => trace.y).filter((value) => value > 0);
  const low = Math.min(...values), high = Math.max(...values);
  if (high < 5 * low) return { rangemode: "normal" };  // too short for a logarithm
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const steps = Math.log10(high / low) <= 2.5 ? [1, 2, 5] : [1];
  const skip = steps.length > 1 ? 1 : Math.ceil((to - from) / 6);
  const ticks = [];
  for (let power = from; power <= to; power += skip) for (const step of steps) ticks.push(step * 10 ** power);
  const text = (value) => {
    if (value >= 0.01 && value < 1e5) return String(Number(value.toPrecision(2)));
    const power = Math.floor(Math.log10(value) + 1e-9), step = Math.round(value / 10 ** power);
    return `${step === 1 ? "" : `${step}\u00b7`}10<sup>${String(power).replace("-", "\u2212")}</sup>`;
  };
  const pad = Math.max(0.05 * Math.log10(high / low), 0.03);
  return { type: "log", tickvals: ticks, ticktext: ticks.map(text), range: [Math.log10(low) - pad, Math.log10(high) + pad] };
}
const layout = (more) => ({
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
  font: { family: getComputedStyle(document.body).fontFamily, color: css("--soft"), size: 13 },
  margin: { l: 52, r: 14, t: 8, b: 40 }, showlegend: false, hovermode: "x unified", dragmode: coarse ? false : "zoom",
  hoverlabel: { bgcolor: css("--paper"), bordercolor: css("--line"), font: { color: css("--ink"), size: 12 }, namelength: -1 },
  ...more,
});
const PLOT = { displaylogo: false, displayModeBar: false, doubleClick: "reset" };
const words = (id, text) => {
  const box = byId(id);
  if (box.classList.contains("js-plotly-plot")) Plotly.purge(box);
  box.innerHTML = `<div class="empty">${text}</div>`;
};
// A chart's box changes its width when a neighbour appears or disappears, which Plotly does not notice
const widths = new WeakMap();
const watcher = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const before = widths.get(target);
    widths.set(target, contentRect.width);
    if (contentRect.width && Math.abs(before - contentRect.width) > 1 && target.classList.contains("js-plotly-plot")) {
      Plotly.Plots.resize(target);
    }
  }
});
const plot = (id, traces, shape) => {
  const box = byId(id);
  if (!box.classList.contains("js-plotly-plot")) box.textContent = "";
  Plotly.react(box, traces, shape, PLOT);
  widths.set(box, box.clientWidth);
  watcher.observe(box);
};

// Means over the runs of one line and panel
const grouped = (runs, key) => {
  const groups = new Map();
  for (const run of runs) {
    const name = key(run);
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(run);
  }
  return [...groups.values()];
};
function over(runs, values) {
  const columns = new Map();
  for (const run of runs) {
    const series = values(run);
    if (!series) continue;
    run.rounds.forEach((round, index) => {
      const value = series[index];
      if (value === null || value === undefined) return;
      if (!columns.has(round)) columns.set(round, []);
      columns.get(round).push(value);
    });
  }
  const rounds = [...columns.keys()].sort((one, other) => one - other);
  const all = rounds.map((round) => columns.get(round));
  return {
    rounds, n: Math.max(0, ...all.map((each) => each.length)),
    mean: all.map((each) => each.reduce((sum, value) => sum + value, 0) / each.length),
    low: all.map((each) => Math.min(...each)), high: all.map((each) => Math.max(...each)),
  };
}
function curve(runs, values, { name, shade, symbol, dash = "solid", format, band = true }) {
  const mean = over(runs, values);
  if (!mean.rounds.length) return [];
  const wide = runs[0].method === "fedkace";
  const open = (runs.some((run) => run.interpolated) ? " (partly interpolated)" : "") + (runs[0].finished ? "" : " (unfinished)");
  const seeds = mean.n > 1 ? `, ${mean.n} seeds` : "";
  const line = {
    type: "scatter", mode: "lines+markers", x: mean.rounds, y: mean.mean, name: plain(name) + open,
    line: { color: shade, width: wide ? 3 : 1.8, dash }, opacity: runs[0].finished ? 1 : 0.55,
    marker: { symbol, size: wide ? 7 : 6, maxdisplayed: mean.rounds.length > MOST_MARKED ? 12 : 0, color: shade },
    hovertemplate: `%{y:${format}}${seeds}`,
  };
  if (mean.n < 2 || !band) return [line];
  const edge = { type: "scatter", mode: "lines", x: mean.rounds, line: { width: 0 }, hoverinfo: "skip" };
  return [
    { ...edge, y: mean.low },
    { ...edge, y: mean.high, fill: "tonexty", fillcolor: faint(shade.startsWith("#") ? shade : "#888888") },
    line,
  ];
}
const sameLine = (run) => `${run.line}|${panel(run)}|${run.finished}`;
const byLine = (runs) => grouped(runs, sameLine).sort((one, other) => lineIndex(other[0].line) - lineIndex(one[0].line));
