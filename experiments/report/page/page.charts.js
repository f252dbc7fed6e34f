// The charts of the page, section by section. page.html puts this file behind page.base.js in one function.
function drawAccuracy(runs) {
  const box = byId("accuracy-charts");
  const shown = unique(runs.map(panel)).sort((one, other) => panels.indexOf(one) - panels.indexOf(other));
  const ids = shown.map((name) => `accuracy-${panels.indexOf(name)}`);
  box.querySelectorAll(".empty").forEach((old) => old.remove());
  for (const old of [...box.children]) {
    if (ids.includes(old.dataset.id)) continue;
    Plotly.purge(old.querySelector(".chart"));
    old.remove();
  }
  if (!shown.length) { box.innerHTML = '<div class="empty" data-id="">No run matches the filters.</div>'; return; }
  shown.forEach((name, index) => {
    let figure = box.querySelector(`[data-id="${ids[index]}"]`);
    if (!figure) {
      figure = document.createElement("figure");
      figure.dataset.id = ids[index];
      figure.innerHTML = `<figcaption></figcaption><div class="chart" id="${ids[index]}"></div>`;
      figure.firstChild.textContent = name;
    }
    box.append(figure);
  });
  shown.forEach((name, index) => {  // a separate loop, because widths are final only once all figures are in place
    const own = runs.filter((run) => panel(run) === name);
    const traces = byLine(own).flatMap((group) => curve(group, (run) => run.accuracy, {
      name: group[0].line, shade: tone(group[0].line), symbol: SYMBOLS[symbolIndex(group[0].line)], format: ".1%",
    }));
    const chance = over(own, (run) => run.chance);
    traces.push({
      type: "scatter", mode: "lines", x: chance.rounds, y: chance.mean, name: "chance",
      line: { color: css("--soft"), dash: "dash", width: 1.4 }, hovertemplate: "%{y:.1%}",
    });
    plot(ids[index], traces, layout({
      xaxis: along(traces), yaxis: axis({ title: named("accuracy"), tickformat: ".0%", rangemode: "tozero" }),
    }));
  });
}

const named = (title) => ({ text: title, standoff: 4, font: { size: 12 } });
// One line per method and panel: colour and symbol show the method, the dash shows the panel
function drawTrajectory(id, runs, values, { title, log = false, format = ".3~g", empty }) {
  const groups = byLine(runs.filter(values));
  const several = unique(groups.map(([run]) => panel(run))).length > 1;
  const traces = groups.flatMap((group) => {
    const name = several ? `${group[0].line}, ${panel(group[0])}` : group[0].line;
    return curve(group, values, {
      name, shade: tone(group[0].line), symbol: SYMBOLS[symbolIndex(group[0].line)],
      dash: several ? DASHES[panels.indexOf(panel(group[0])) % DASHES.length] : "solid", format, band: groups.length <= 6,
    });
  });
  if (!traces.length) { words(id, empty); return false; }
  plot(id, traces, layout({
    xaxis: along(traces), yaxis: axis({ title: named(title), ...(log ? logarithmic(traces) : {}) }),
  }));
  return true;
}

// Show one setting at a time unless the reader asks for all: many settings in one chart are hard to read
let setting = null;
function settled(runs) {
  const shown = panels.filter((name) => runs.some((run) => panel(run) === name));
  if (setting !== "all" && !shown.includes(setting)) setting = shown.length > 2 ? shown[0] : "all";
  for (const select of document.querySelectorAll("select.setting")) {
    select.textContent = "";
    select.add(new Option("all", "all"));
    for (const name of shown) select.add(new Option(name, name));
    select.value = setting;
    select.closest(".pick").hidden = shown.length < 2;
  }
  return setting === "all" ? runs : runs.filter((run) => panel(run) === setting);
}

function drawInside(every) {
  const runs = settled(every);
  const none = "None of these runs recorded this.";
  const legend = byId("cells-legend");
  const shown = panels.filter((name) => runs.some((run) => panel(run) === name));
  legend.textContent = "";
  if (shown.length > 1) {
    for (const name of shown) {
      const dash = STROKES[panels.indexOf(name) % STROKES.length];
      const key = document.createElement("span");
      key.innerHTML = `<svg width="34" height="6" aria-hidden="true"><line x1="0" y1="3" x2="34" y2="3" stroke="${css("--soft")}" stroke-width="2.4" stroke-dasharray="${dash}"/></svg>`;
      key.append(name);
      legend.append(key);
    }
  }
  drawTrajectory("weight-chart", runs, (run) => run.weight && run.weight.mean, { title: "weight \u03bb", log: true, empty: "None of these runs computes a replay weight." });
  drawTrajectory("gap-chart", runs, (run) => run.gap && run.gap.mean, { title: "GAP", format: ".3f", empty: "None of these runs measures the gap." });
  drawTrajectory("condition-chart", runs, (run) => run.condition && run.condition.mean, { title: "condition number", log: true, empty: none });
  drawTrajectory("drift-chart", runs, (run) => run.drift, { title: "squared distance", log: true, empty: none });
}

function drawTheorem(runs) {
  const streams = grouped(runs.filter((run) => run.stream !== null), panel)
    .map((group) => grouped(group, (run) => run.stream).map(([run]) => ({ ...data.streams[run.stream], run })));
  const traces = streams.flatMap((group) => {
    const index = panels.indexOf(panel(group[0].run));
    const shade = css("--ink");
    const rows = group.map((stream) => ({ rounds: stream.rounds, method: "", finished: true, stream }));
    const style = { shade, symbol: SYMBOLS[index % SYMBOLS.length], dash: DASHES[index % DASHES.length], format: ".3f" };
    const name = panel(group[0].run);
    return [
      ...curve(rows, ({ stream }) => stream.largest.map((value) => value * stream.factor), { ...style, name: `${name}, most different pair` }),
      ...curve(rows, ({ stream }) => stream.average.map((value) => value * stream.factor), { ...style, name: `${name}, average pair` })
        .map((trace) => ({ ...trace, opacity: 0.45 })),
    ];
  });
  if (traces.length) plot("tv-chart", traces, layout({ xaxis: along(traces), yaxis: axis({ title: named("first term"), rangemode: "tozero" }) }));
  else words("tv-chart", "The number of classes is unknown without the data set's files.");
  const none = "None of these runs recorded client drift.";
  runs = settled(runs);
  drawTrajectory("second-chart", runs, (run) => run.drift, { title: "squared distance", log: true, empty: none });
  drawTrajectory("mu-chart", runs, (run) => {
    const stream = run.stream === null ? null : data.streams[run.stream];
    const at = stream && new Map(stream.rounds.map((round, index) => [round, stream.largest[index] * stream.factor]));
    return at && run.drift.map((drift, index) => (drift && at.get(run.rounds[index])) ? 2 * at.get(run.rounds[index]) / drift : null);
  }, { title: "\u03bc", log: true, empty: none });
  byId("lead-figure").hidden = !runs.some((run) => run.lead);
  if (!byId("lead-figure").hidden) {
    drawTrajectory("lead-chart", runs.filter((run) => run.lead), (run) => run.lead, { title: "lead in accuracy", format: ".1%", empty: none });
  }
}

// One run, client by client
function options(id, runs) {
  const select = byId(id);
  const before = select.value;
  select.textContent = "";
  for (const run of runs) {
    const option = new Option(`${run.line}, ${panel(run)}, seed ${run.seed}${run.finished ? "" : " (unfinished)"}`, data.runs.indexOf(run));
    select.add(option);
  }
  const values = runs.map((run) => String(data.runs.indexOf(run)));
  const own = runs.findIndex((run) => run.method === "fedkace");
  select.value = values.includes(before) ? before : values[Math.max(own, 0)];
  select.disabled = !runs.length;
  return runs.length ? data.runs[Number(select.value)] : null;
}
const present = (columns) => columns.some((column) => column.some((value) => value !== null));

function drawModels(runs) {
  const run = options("models-run", runs.filter((each) => each.detail !== null && (present(data.details[each.detail].local) || present(data.details[each.detail].global))));
  if (!run) { words("models-chart", "None of these runs has accuracies of single clients."); byId("models-note").textContent = ""; return; }
  const detail = data.details[run.detail];
  const count = detail.local.length;
  const columns = narrow() ? (count > 3 ? 2 : 1) : Math.min(count, count > 6 ? 5 : count === 4 ? 4 : 3);
  const rows = Math.ceil(count / columns);
  const traces = [], shapes = [], notes = [], axes = {};
  const gapX = narrow() ? 0.1 : 0.045, height = rows > 1 ? 200 : 240, top = 26;
  const full = rows * height + 16;
  const wide = (1 - gapX * (columns - 1)) / columns;
  for (let client = 0; client < count; client += 1) {
    const id = client ? String(client + 1) : "";
    const left = (client % columns) * (wide + gapX);
    const row = Math.floor(client / columns);
    const high = 1 - row / rows - top / (rows * height);
    const low = 1 - (row + 1) / rows + 26 / (rows * height);
    axes[`xaxis${id}`] = axis({ domain: [left, left + wide], anchor: `y${id}`, range: [0.5, run.rounds.at(-1) + 0.5], nticks: 5 });
    axes[`yaxis${id}`] = axis({ domain: [low, high], anchor: `x${id}`, matches: client ? "y" : undefined, tickformat: ".0%", rangemode: "tozero", showticklabels: client % columns === 0, nticks: 5 });
    const line = (series, name, shade) => traces.push({
      type: "scatter", mode: "lines+markers", x: run.rounds, y: series, name, xaxis: `x${id}`, yaxis: `y${id}`,
      line: { color: shade, width: 2 }, marker: { size: 4, maxdisplayed: 20, symbol: name === "local" ? "circle" : "square" },
      hovertemplate: "%{y:.1%}",
    });
    line(detail.local[client], "local", css("--local"));
    line(detail.global[client], "global", css("--global"));
    const at = detail.switched[client];
    if (at) shapes.push({ type: "line", xref: `x${id}`, yref: `y${id} domain`, x0: at, x1: at, y0: 0, y1: 1, line: { color: css("--soft"), width: 2, dash: "dot" } });
    notes.push({
      text: `client ${client}` + (at ? `, switched in ${at}` : ""), xref: "paper", yref: "paper", x: left, y: high,
      xanchor: "left", yanchor: "bottom", showarrow: false, font: { size: 12, color: css("--ink") },
    });
  }
  byId("models-chart").style.height = `${full}px`;
  plot("models-chart", traces, layout({ ...axes, shapes, annotations: notes, height: full, margin: { l: 46, r: 10, t: 8, b: 8 } }));
  byId("models-note").textContent = detail.both ? "" :
    "This run tested only the model that a client predicts with, so the blue line ends where the orange one begins. Runs with evaluate=both test both models in every round.";
}

const SCALE = { light: [[0, "#ffffff"], [0.15, "#dcecf8"], [1, "#08436f"]], dark: [[0, "#12171d"], [0.15, "#16344d"], [1, "#9fd3ff"]] };
function drawHeat(id, rounds, names, counts, words_, more = {}) {
  plot(id, [{
    type: "heatmap", x: rounds, y: names.map(plain), z: counts, colorscale: SCALE[theme.get()], zmin: 0, xgap: 1, ygap: 1,
    hovertemplate: `%{y}<br>${words_}<extra></extra>`, ...more,
    colorbar: { thickness: 10, outlinewidth: 0, tickfont: { size: 11 }, ...more.colorbar },
  }], layout({
    hovermode: "closest", margin: { l: 40, r: 4, t: 8, b: 40 },
    xaxis: axis({ title: { text: "round", font: { size: 12 } }, showgrid: false, dtick: rounds.length <= 10 ? 1 : undefined }),
    yaxis: axis({ type: "category", autorange: "reversed", showgrid: false, tickfont: { size: 10 }, nticks: 40 }),
  }));
}

// A class whose name is a number, such as a digit's, is called a class
const className = (detail, label) => {
  const known = String(detail.names[label] || label).replaceAll("_", " ");
  return /^\d+$/.test(known) ? `class ${known}` : known;
};
function pickClient(id, count) {
  const select = byId(id);
  const before = select.value;
  select.textContent = "";
  select.disabled = count === 0;
  for (let client = 0; client < count; client += 1) select.add(new Option(client, client));
  select.value = before !== "" && Number(before) < count ? before : "0";
  return Number(select.value);
}

function drawMatrix(runs) {
  const run = options("matrix-run", runs.filter((each) => each.detail !== null && data.details[each.detail].matrix.some((rows) => present(rows))));
  if (!run) { words("matrix-chart", "None of these runs recorded accuracies of single classes."); pickClient("matrix-client", 0); return; }
  const detail = data.details[run.detail];
  const client = pickClient("matrix-client", detail.matrix.length);
  const names = detail.orders[client].map((label) => className(detail, label));
  drawHeat("matrix-chart", run.rounds, names, detail.matrix[client], "round %{x}: %{z:.0%} right", {
    zmax: 1, hoverongaps: false, colorbar: { tickformat: ".0%" },
  });
}

function drawBuffers(runs) {
  const run = options("buffers-run", runs.filter((each) => each.detail !== null && data.details[each.detail].buffers.some((rows) => rows.length)));
  byId("arrivals-figure").hidden = byId("kept-figure").hidden = true;
  byId("buffers-note").textContent = "";
  if (!run) { words("classes-chart", "None of these runs recorded the classes in its buffers."); pickClient("buffers-client", 0); return; }
  const detail = data.details[run.detail];
  const client = pickClient("buffers-client", detail.buffers.length);
  const order = detail.orders[client];
  const name = (label) => className(detail, label);
  const names = order.map(name);
  const held = detail.held[client];
  byId("arrivals-figure").hidden = !held;  // before the other chart is drawn, whose width depends on it
  drawHeat("classes-chart", run.rounds, names, detail.buffers[client], "round %{x}: %{z} samples");
  if (!held) {
    byId("buffers-note").textContent = "The client's stored state is not available, so rounds of arrival and images cannot be shown.";
    return;
  }
  const all = held.arrivals[0].map((_, index) => index + 1);
  drawHeat("arrivals-chart", all, names, order.map((label) => held.arrivals[label]), `arrived in round %{x}: %{z} samples, in the buffer after round ${held.round}`);
  if (!held.strips.length) {
    byId("buffers-note").textContent = "The buffered images are not shown because the data set was not available or the page would have grown too large.";
    return;
  }
  byId("kept-figure").hidden = false;
  const box = byId("kept");
  box.textContent = "";
  const place = new Map(order.map((label, index) => [label, index]));
  for (const strip of [...held.strips].sort((one, other) => place.get(one.label) - place.get(other.label))) {
    const figure = document.createElement("figure");
    const n = strip.rounds.length;
    figure.innerHTML = `<figcaption></figcaption><img width="${n * 40}" height="40"><ol style="grid-template-columns:repeat(${n},40px)">${strip.rounds.map((round) => `<li>${round}</li>`).join("")}</ol>`;
    figure.querySelector("figcaption").textContent = name(strip.label);
    const rest = document.createElement("span");
    rest.textContent = n < strip.kept ? `: ${n} of ${strip.kept} images` : `: ${n} ${n === 1 ? "image" : "images"}`;
    figure.querySelector("figcaption").append(rest);
    const image = figure.querySelector("img");
    image.alt = `${n} buffered images of ${name(strip.label)}, from rounds ${strip.rounds.join(", ")}`;
    image.src = strip.source;
    box.append(figure);
  }
}

function draw() {
  paintFilters();
  const runs = chosen();
  drawAccuracy(runs);
  drawMatrix(runs);
  drawModels(runs);
  drawInside(runs);
  drawTheorem(runs);
  drawBuffers(runs);
  document.body.dataset.drawn = String(Number(document.body.dataset.drawn || 0) + 1);
}

makeFilters();
byId("matrix-run").addEventListener("change", () => drawMatrix(chosen()));
byId("matrix-client").addEventListener("change", () => drawMatrix(chosen()));
byId("models-run").addEventListener("change", () => drawModels(chosen()));
byId("buffers-run").addEventListener("change", () => drawBuffers(chosen()));
byId("buffers-client").addEventListener("change", () => drawBuffers(chosen()));
for (const select of document.querySelectorAll("select.setting")) {
  select.addEventListener("change", () => { setting = select.value; drawInside(chosen()); drawTheorem(chosen()); });
}
let width = narrow();
addEventListener("resize", () => { if (narrow() !== width) { width = narrow(); draw(); } });
draw();
