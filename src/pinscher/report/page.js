// Fills the page from the embedded data. Text is only ever set as text.

const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs;
const get = (id) => document.getElementById(id);
const hue = (place) => `--c${place % 14}`;
const colour = (place) => `var(${hue(place)})`;
const resolved = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const several = runs.length > 1;
const DASH = "5 4";

const MEASURES = {
  density: ["surviving weights", "The share of a matrix's weights that is kept."],
  rank: ["rank", "The numerical rank, as a share of the full one."],
  dead_rows: ["dead rows", "The share of rows without a single weight: outputs that have become constant."],
  dead_columns: ["dead columns", "The share of columns without a single weight: inputs that nobody reads."],
  gini_rows: ["concentration on rows", "Gini coefficient of the rows' densities: 0 if all rows keep the same, near 1 if a few keep all."],
  gini_columns: ["concentration on columns", "Gini coefficient of the columns' densities: 0 if all columns keep the same, near 1 if a few keep all."],
};
const OBJECTIVES = { loss: "whole", loss_er: "task", loss_sr: "teacher" };

// ---------------------------------------------------------------- what is shown

const state = { hidden: [], curve: "loss", score: null, smooth: 0, layer: null, kind: null, sorted: false, measure: "gini_rows", log: false, shape: null };
const box = { x0: 0, x1: 1, y0: 0, y1: 1 };
const memory = `pinscher-report:${location.pathname}`;
if (data.watching) { // the page is loaded anew while the run goes on: stay where the reader was
  try {
    const kept = JSON.parse(sessionStorage.getItem(memory)) || {};
    Object.assign(state, kept.state);
    Object.assign(box, kept.box);
    addEventListener("load", () => scrollTo(0, kept.scroll || 0));
    addEventListener("pagehide", () => sessionStorage.setItem(memory, JSON.stringify({ state, box, scroll: scrollY })));
  } catch { /* no storage: start afresh */ }
}
const printing = matchMedia("print"), dark = matchMedia("(prefers-color-scheme: dark)");
const isGini = (measure) => measure.startsWith("gini");
const visible = () => runs.map((run, place) => [run, place]).filter(([run]) => !state.hidden.includes(run.name));

function toggle(name) {
  state.hidden = state.hidden.includes(name) ? state.hidden.filter((one) => one !== name) : [...state.hidden, name];
  if (state.hidden.length === runs.length) state.hidden = []; // nothing at all would be a puzzle
  render();
}

function runButton(run, place) {
  const shown = !state.hidden.includes(run.name);
  return element("button", { type: "button", class: "run", "data-run": place, "aria-pressed": String(shown), onclick: () => toggle(run.name) }, swatch(colour(place)), run.name);
}

// A legend whose runs are switches, with keys for what dashes mean.
function legend(keys = []) {
  const parts = several ? runs.map(runButton) : [];
  for (const [text, dash, tint] of keys) {
    const line = drawn("svg", { width: 22, height: 8, "aria-hidden": "true" });
    line.append(drawn("line", { x1: 1, x2: 21, y1: 4, y2: 4, "stroke-width": 2, "stroke-dasharray": dash, style: `stroke: ${tint || "var(--soft)"}` }));
    parts.push(element("span", { class: "key" }, line, text));
  }
  return parts.length ? element("div", { class: "legend" }, ...parts) : null;
}

// ---------------------------------------------------------------- head and result

const duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${number(seconds / 60, 1)} min` : `${number(seconds / 3600, 1)} h`;
};
const megabytes = (bytes) => `${number(bytes / 1e6, 1)}\u00a0MB`;
const scoreOf = (scores, main) => (scores && main in scores ? scores[main] : null);

function fastest(run) { // the best engine of pinscher against PyTorch, where it was measured
  const shape = run.bench && Object.keys(run.bench.latency)[0];
  if (!shape) return null;
  const found = run.bench.latency[shape], ours = Object.keys(found).filter((name) => name.startsWith("pinscher"));
  if (!ours.length || !found.torch) return null;
  const best = ours.reduce((a, b) => (found[b].p50_ms < found[a].p50_ms ? b : a));
  return { shape, best, ms: found[best].p50_ms, gain: found.torch.p50_ms / found[best].p50_ms };
}

function figuresOf(run) {
  const pruned = scoreOf(run.pruned, run.main), dense = scoreOf(run.dense_scores, run.main), fast = fastest(run), { files } = run;
  const known = run.sparsity !== null && run.sparsity !== undefined;
  const found = [];
  if (pruned !== null) {
    const more = dense === null ? "on the test set" : `dense ${number(dense)}, keeps ${number((100 * pruned) / dense, 1)}\u00a0%`;
    found.push({ id: "score", what: run.main, value: number(pruned), more });
  }
  if (known) found.push({ id: "sparsity", what: "sparsity", value: number(100 * run.sparsity, 1), unit: "%", more: `asked ${percent(run.target)}` });
  if (known && run.weights) found.push({ id: "left", what: "weights left", value: whole((1 - run.sparsity) * run.weights), more: `of ${whole(run.weights)}` });
  if (files.export) {
    found.push({ id: "size", what: "stored", value: number(files.export / 1e6, 1), unit: "MB", more: files.model ? `${number(files.model / files.export, 1)} times smaller` : "" });
  }
  if (fast) found.push({ id: "latency", what: "latency", value: number(fast.ms, 1), unit: "ms", more: `${number(fast.gain, 1)} times as fast as PyTorch` });
  found.push({ id: "steps", what: "steps", value: whole(run.steps), more: run.seconds ? duration(run.seconds) : run.status });
  return found;
}

function tiles(run) {
  const made = figuresOf(run).map((one) => element("div", { class: "tile" },
    element("div", { class: "what" }, one.what),
    element("div", { class: "figure" }, element("span", { "data-figure": one.id, "data-run": 0 }, one.value), one.unit ? element("span", { class: "unit" }, `\u00a0${one.unit}`) : null),
    element("div", { class: "more" }, one.more)));
  return element("div", { class: "tiles" }, ...made);
}

function resultTable() {
  const main = runs[0].main, same = runs.every((run) => run.main === main);
  const columns = [
    ["run", null], ["method", (r) => r.method], ["status", runs.some((r) => r.status !== "finished") ? (r) => r.status : null],
    [same && main ? main : "score", (r) => { const v = scoreOf(r.pruned, r.main); return v === null ? "–" : number(v); }, "score"],
    ["dense", (r) => { const v = scoreOf(r.dense_scores, r.main); return v === null ? "–" : number(v); }, "dense"],
    ["sparsity", (r) => (r.sparsity === null ? "–" : percent(r.sparsity)), "sparsity"], ["asked", (r) => (r.target === null ? "–" : percent(r.target)), "target"],
    ["weights left", (r) => (r.sparsity === null || !r.weights ? "–" : whole((1 - r.sparsity) * r.weights)), "left"],
    ["stored", (r) => (r.files.export ? megabytes(r.files.export) : "–"), "size"],
    ["latency", runs.some(fastest) ? (r) => { const f = fastest(r); return f ? `${number(f.ms, 1)} ms` : "–"; } : null, "latency"],
    ["steps", (r) => whole(r.steps), "steps"], ["time", (r) => duration(r.seconds)],
  ].filter(([name, value, id]) => name === "run" || (value && (id === "score" || runs.some((run) => value(run) !== "–")))); // no empty columns
  const best = same ? Math.max(...runs.map((run) => scoreOf(run.pruned, run.main) ?? -Infinity)) : null;
  const rows = runs.map((run, place) => element("tr", {}, element("th", { scope: "row" }, swatch(colour(place)), run.name),
    ...columns.slice(1).map(([, value, id]) => element("td", { class: id === "score" && scoreOf(run.pruned, run.main) === best ? "best" : null },
      element("span", { "data-figure": id, "data-run": place }, value(run))))));
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, ...columns.map(([name]) => element("th", { scope: "col" }, name)))), element("tbody", {}, ...rows)));
}

function settingsTable() {
  const shown = (value) => (value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));
  const body = element("tbody");
  for (const [title, key] of [["Settings", "settings"], ["Rows", "rows"], ["Versions", "versions"]]) {
    body.append(element("tr", { class: "group" }, element("th", { colspan: runs.length + 1 }, title)));
    for (const name of new Set(runs.flatMap((run) => Object.keys(run[key])))) {
      const values = runs.map((run) => shown(run[key][name]));
      body.append(element("tr", { class: new Set(values).size > 1 ? "differs" : null }, element("th", { scope: "row" }, name), ...values.map((value) => element("td", {}, value))));
    }
  }
  const notes = [...new Set(runs.flatMap((run) => run.notes))].map((note) => element("li", {}, note));
  const head = element("tr", {}, element("td", {}), ...runs.map((run) => element("th", { scope: "col" }, run.name)));
  return [element("ul", { class: "notes" }, ...notes), element("table", {}, element("thead", {}, head), body)];
}

function head() {
  const unique = (name) => [...new Set(runs.map((run) => run[name]).filter(Boolean))].join(", ");
  const methods = [...new Set(runs.map((run) => run.method))];
  const pruning = methods.filter((name) => name !== "dense");
  const how = pruning.length ? `pruned by ${pruning.join(", ")} with ${unique("objective")}${pruning.length < methods.length ? ", beside dense fine-tuning" : ""}` : "fine-tuned, not pruned";
  get("lead").textContent = `${unique("model")} on ${unique("task")}, ${how}.`;
  for (const status of new Set(runs.map((run) => run.status))) if (status !== "finished") get("title").append(element("span", { class: "badge" }, status));
  get("result-figures").replaceChildren(several ? resultTable() : tiles(runs[0]));
  get("settings-table").replaceChildren(...settingsTable());
  get("teacher-note").hidden = !runs.some((run) => run.teachers.x.length);
  const remarks = runs.flatMap((run) => run.remarks.map((text) => (several ? `${run.name}: ${text}` : text)));
  get("notes").replaceChildren(...remarks.map((text) => element("li", {}, text)));
  get("made").textContent = `Made by pinscher ${data.version}, ${data.made}. This page is one file and loads nothing from a network.${data.watching ? " It is rewritten while the run goes on." : ""}`;
}

// ---------------------------------------------------------------- training

function smoothed(values, window_) {
  if (!window_) return values;
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  return values.map((_, place) => {
    const from = Math.max(0, place - window_), to = Math.min(values.length, place + window_ + 1);
    return (sums[to] - sums[from]) / (to - from);
  });
}

const teacherMarks = () => visible().flatMap(([run, place]) => run.teachers.x.map((x) => ({ x, colour: colour(place) })));
const curveOf = (run, place, points, more = {}) => ({ name: several ? run.name : more.label || run.name, key: `run-${place}`, colour: colour(place), x: points.x, y: points.y, ...more });

function training() {
  const right = visible().reduce((a, [run]) => Math.max(a, run.steps, ...Object.values(run.curves).map((c) => c.x.at(-1) || 0)), 1);
  const common = { xLabel: "step", marks: teacherMarks(), left: 0, right };
  const objective = visible().filter(([run]) => run.curves[state.curve]).map(([run, place]) => {
    const points = run.curves[state.curve];
    return curveOf(run, place, { x: points.x, y: smoothed(points.y, Math.round((state.smooth / 200) * points.x.length)) }, { label: "objective" });
  });
  curves(get("chart-objective"), { ...common, series: objective, label: "Learning objective over the steps", empty: "The log has no such figures." }, legend());

  const twin = visible().find(([run]) => run.dense && run.dense.scores[state.score]);
  const scores = visible().filter(([run]) => run.scores[state.score]).map(([run, place]) => curveOf(run, place, run.scores[state.score], { label: "pruned", dots: run.scores[state.score].x.length < 60 }));
  if (twin) scores.push({ name: "dense", key: "dense", colour: "var(--dense)", dash: "2 3", ...twin[0].dense.scores[state.score] });
  curves(get("chart-score"), { ...common, series: scores, label: `Validation ${state.score} over the steps`, tipFormat: (v) => number(v), empty: "No evaluation yet." }, legend(twin ? [["dense", "2 3", "var(--dense)"]] : []));

  const sparsity = visible().filter(([run]) => run.curves.reached).flatMap(([run, place]) => [
    curveOf(run, place, run.curves.reached, { label: "reached" }),
    { ...curveOf(run, place, run.curves.asked, { label: "asked" }), name: several ? `${run.name}, asked` : "asked", key: `asked-${place}`, dash: DASH },
  ]);
  curves(get("chart-sparsity"), { ...common, marks: [], series: sparsity, low: 0, high: 1, yFormat: (v) => percent(v, 0), tipFormat: (v) => percent(v, 2), label: "Sparsity asked and reached over the steps", empty: "A dense run has none." },
    legend([["reached", null, several ? null : colour(0)], ["asked", DASH, several ? null : colour(0)]]));

  const churn = visible().filter(([run]) => run.churn).map(([run, place]) => curveOf(run, place, run.churn, { label: "returned", area: !several }));
  curves(get("chart-churn"), { ...common, marks: [], series: churn, low: 0, high: churn.every((one) => one.y.every((y) => !y)) ? 0.01 : undefined, yFormat: (v) => `${plainly(100 * v)}\u00a0%`, tipFormat: (v) => `${plainly(100 * v)}\u00a0%`, label: "Weights that come back in a masking", empty: "The log does not count them." }, legend());
  const sums = visible().filter(([run]) => run.churn).map(([run]) => `${several ? `${run.name}: ` : ""}${whole(run.churn.returned)} returns in ${whole(run.churn.maskings)} maskings`);
  get("churn-sum").textContent = sums.length ? `Share of all prunable weights that a masking brought back. ${sums.join("; ")}.` : "";
}

// ---------------------------------------------------------------- pattern

const views = runs.map((run, place) => new PatternView(box, () => [resolved("--gone"), resolved("--kept"), resolved(hue(place))]));
for (const view of views) view.onmove = () => views.forEach((one) => one.draw());
const metaOf = (run) => run.matrices.findIndex((matrix) => matrix.layer === state.layer && matrix.kind === state.kind);

function matrixFacts(run, matrix) {
  const twin = run.dense && run.dense.matrices.find((one) => one.layer === matrix.layer && one.kind === matrix.kind);
  const lines = [["shape", `${whole(matrix.rows)} × ${whole(matrix.columns)}`], ...Object.entries(MEASURES).map(([name, [text]]) => [text, isGini(name) ? number(matrix[name]) : percent(matrix[name])])];
  if (twin) lines.splice(3, 0, ["rank of the dense twin", percent(twin.rank)]);
  return lines.flatMap(([what, value]) => [element("dt", {}, what), element("dd", {}, value)]);
}

function pattern() {
  const notes = new Set(), nodes = [];
  runs.forEach((run, place) => {
    const at = metaOf(run), source = get(`pattern-${place}-${at}`), view = views[place];
    if (state.hidden.includes(run.name) || at < 0 || !source) return;
    const matrix = run.matrices[at], meta = { ...matrix, factor: Number(source.dataset.factor) };
    view.title.replaceChildren(swatch(colour(place)), element("strong", {}, several ? run.name : matrix.tensor), ...(several ? [element("span", { class: "share" }, `${percent(matrix.density)} kept`)] : []));
    view.node.classList.toggle("alone", !several);
    view.facts.replaceChildren(...matrixFacts(run, matrix));
    view.canvas.setAttribute("aria-label", `Pattern of ${matrix.tensor}, ${matrix.rows} by ${matrix.columns}, ${percent(matrix.density)} kept. Arrow keys move, plus and minus zoom, 0 shows the whole.`);
    view.canvas.dataset.tensor = matrix.tensor;
    if (meta.factor > 1) notes.add(`Drawn in squares of ${meta.factor} × ${meta.factor} weights, darker where more are kept, to keep this page small.`);
    nodes.push(view.node);
    view.load(meta, source.textContent, state.sorted);
  });
  get("patterns").replaceChildren(...(nodes.length ? nodes : [element("p", { class: "empty" }, "No model yet: the patterns come when a run has finished.")]));
  views.forEach((view) => view.draw());
  notes.add("Drag to move; click, then scroll or press + − to zoom; 0 shows the whole. Bars are scaled to the largest density.");
  get("pattern-note").textContent = nodes.length ? [...notes].join(" ") : "";
}

// ---------------------------------------------------------------- layers

const layers = [...new Set(runs.flatMap((run) => run.matrices.map((matrix) => matrix.layer)))];
const kinds = [...new Set(runs.flatMap((run) => run.matrices.map((matrix) => matrix.kind)))];

function perLayer(matrices, measure) {
  const x = [], y = [];
  layers.forEach((layer, place) => {
    const mine = matrices.filter((matrix) => matrix.layer === layer), size = mine.reduce((sum, m) => sum + m.rows * m.columns, 0);
    if (size) { x.push(place); y.push(mine.reduce((sum, m) => sum + m[measure] * m.rows * m.columns, 0) / size); }
  });
  return { x, y };
}

function layerChart(id, measure, high) {
  const series = visible().filter(([run]) => run.matrices.length).map(([run, place]) => curveOf(run, place, perLayer(run.matrices, measure), { dots: true, label: MEASURES[measure][0] }));
  const twin = measure === "rank" && visible().find(([run]) => run.dense && run.dense.matrices.length);
  if (twin) series.push({ name: "dense", key: "dense", colour: "var(--dense)", dash: "2 3", ...perLayer(twin[0].dense.matrices, "rank") });
  const fits = measure === "density" || measure.startsWith("dead") ? undefined : high;
  curves(get(id), { series, names: layers, xLabel: "layer", low: 0, high: fits, yFormat: isGini(measure) ? plainly : (v) => percent(v, 0), tipFormat: isGini(measure) ? (v) => number(v) : (v) => percent(v), label: `${MEASURES[measure][0]} per layer`, empty: "No model yet." },
    legend(twin ? [["dense", "2 3", "var(--dense)"]] : []));
}

// A cell between the page's surface and its accent, with whichever of black and white reads better on it: always 4.5 to 1.
function shade(share, [from, to]) {
  const mixed = [0, 1, 2].map((i) => from[i] + (0.06 + 0.88 * share) * (to[i] - from[i]));
  const [red, green, blue] = mixed.map((v) => (v <= 10.3 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return { "--cell": `rgb(${mixed.map(Math.round).join(" ")})`, "--on": 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000" : "#fff" };
}

function heat(run, place, measure, ends) {
  const top = measure === "density" ? Math.max(0.01, ...runs.flatMap((one) => one.matrices.map((matrix) => matrix.density))) : 1;
  const mine = layers.filter((layer) => run.matrices.some((matrix) => matrix.layer === layer));
  const rows = mine.map((layer) => element("tr", {}, element("th", { scope: "row" }, layer), ...kinds.map((kind) => {
    const matrix = run.matrices.find((one) => one.layer === layer && one.kind === kind);
    if (!matrix) return element("td");
    const value = matrix[measure], share = Math.min(1, value / top), here = layer === state.layer && kind === state.kind;
    const style = shade(share, ends);
    const choose = () => { Object.assign(state, { layer, kind }); fillSelects(); render(); get("pattern").scrollIntoView(); };
    return element("td", {}, element("button", { type: "button", style, "data-value": value, "aria-current": here ? "true" : null, title: `Show the pattern of ${matrix.tensor}`, onclick: choose }, isGini(measure) ? number(value) : number(100 * value, value >= 0.9995 ? 0 : 1)));
  })));
  const header = element("tr", {}, element("th", {}, "layer"), ...kinds.map((kind) => element("th", { scope: "col" }, kind.replaceAll(".", " "))));
  const caption = element("caption", {}, several ? swatch(colour(place)) : null, `${several ? `${run.name}: ` : ""}${MEASURES[measure][0]}${isGini(measure) ? "" : ", %"}`);
  return element("div", { class: "heat" }, element("table", {}, caption, element("thead", {}, header), element("tbody", {}, ...rows)));
}

function layersSection() {
  layerChart("chart-density", "density");
  layerChart("chart-rank", "rank", 1.03);
  layerChart("chart-measure", state.measure, 1.03);
  get("measure-about").textContent = `${MEASURES[state.measure][1]} Choose a cell to see its pattern.`;
  const shown = printing.matches ? Object.keys(MEASURES) : [state.measure]; // paper has no controls
  const ends = ["--surface", "--accent"].map((name) => channels(resolved(name)));
  get("heats").replaceChildren(...shown.flatMap((measure) => visible().filter(([run]) => run.matrices.length).map(([run, place]) => heat(run, place, measure, ends))));
}

// ---------------------------------------------------------------- values

function values() {
  const bins = (shares) => ({ x: shares.map((_, place) => data.limit * ((2 * place + 1) / shares.length - 1)), y: shares });
  const series = visible().filter(([run]) => run.values).map(([run, place]) => curveOf(run, place, bins(run.values.shares), { area: !state.log, label: "pruned" }));
  const twin = visible().find(([run]) => run.dense && run.dense.values);
  if (twin) series.push({ name: "dense", key: "dense", colour: "var(--dense)", dash: "2 3", ...bins(twin[0].dense.values.shares) });
  curves(get("chart-values"), { series, xLabel: "value", low: state.log ? undefined : 0, log: state.log, height: 300, xFormat: plainly, tipX: plainly, yFormat: (v) => `${plainly(100 * v)}\u00a0%`, tipFormat: (v) => percent(v, 3), label: "Histogram of the values of surviving weights", empty: "No model yet." },
    legend(twin ? [["dense", "2 3", "var(--dense)"]] : []));
  const outside = visible().filter(([run]) => run.values).map(([run]) => `${several ? `${run.name}: ` : ""}${percent(run.values.outside, 2)}`);
  get("values-note").textContent = outside.length ? `Share of the surviving weights in each of ${(visible().find(([run]) => run.values))[0].values.shares.length} bins. Beyond the edges: ${outside.join("; ")}.` : "";
}

// ---------------------------------------------------------------- size and speed

function bar(name, amount, most, text, more, tint) {
  return [element("span", { class: "name" }, name), element("span", { class: "track" }, element("span", { class: "fill", style: { width: `${(60 * amount) / most}%`, "--colour": tint } }),
    element("span", { class: "amount" }, text, more ? element("small", {}, more) : null))];
}

function deployment() {
  const shown = visible(), most = Math.max(1, ...shown.map(([run]) => run.files.model || 0));
  const sizes = shown.flatMap(([run, place]) => {
    const { model, export: small, stored } = run.files, score = scoreOf(stored, run.main);
    const lines = several && (model || small) ? [element("span", { class: "group" }, swatch(colour(place)), run.name)] : [];
    if (model) lines.push(...bar("model", model, most, megabytes(model), "", "var(--dense)"));
    if (small) lines.push(...bar("stored small", small, most, megabytes(small), [model ? `${number(model / small, 1)}×` : "", score === null ? "" : `${run.main} ${number(score)}`].filter(Boolean).join(", "), colour(place)));
    return lines;
  });
  get("sizes").replaceChildren(sizes.length ? element("div", { class: "bars" }, ...sizes) : element("p", { class: "empty" }, "No model yet."));
  if (sizes.length && !shown.some(([run]) => run.files.export)) get("sizes").append(element("p", { class: "about" }, "Not exported: pinscher export RUN stores it small."));
  const timed = shown.filter(([run]) => run.bench && run.bench.latency[state.shape]);
  get("shape").parentElement.hidden = !timed.length;
  const slowest = Math.max(1e-9, ...timed.flatMap(([run]) => Object.values(run.bench.latency[state.shape]).map((one) => one.p50_ms)));
  const lines = timed.flatMap(([run, place]) => {
    const found = run.bench.latency[state.shape];
    return [...(several ? [element("span", { class: "group" }, swatch(colour(place)), run.name)] : []),
      ...Object.entries(found).flatMap(([engine, one]) => bar(engine, one.p50_ms, slowest, `${number(one.p50_ms, one.p50_ms < 10 ? 2 : 1)}\u00a0ms`, `${number(found.torch.p50_ms / one.p50_ms, 2)}×`, engine.startsWith("pinscher") ? colour(place) : "var(--dense)"))];
  });
  get("latency").replaceChildren(lines.length ? element("div", { class: "bars" }, ...lines) : element("p", { class: "empty" }, "Not measured: pinscher bench RUN times it in every engine."));
  get("engines").replaceChildren(...timed.map(([run]) => element("p", { class: "advice" }, `${several ? `${run.name}: ` : ""}${run.bench.advice}`)));
}

// ---------------------------------------------------------------- controls

function options(id, choices, chosen, change) {
  const node = get(id);
  node.replaceChildren(...choices.map(([value, text]) => element("option", { value }, text)));
  if (choices.some(([value]) => value === chosen)) node.value = chosen;
  node.onchange = () => change(node.value);
  node.disabled = choices.length < 2;
}

function fillSelects() {
  const known = (name, all) => { if (!all.includes(state[name])) state[name] = all[0] ?? null; };
  const scoreNames = [...new Set([...runs.map((run) => run.main).filter(Boolean), ...runs.flatMap((run) => Object.keys(run.scores))])].filter((name) => runs.some((run) => run.scores[name]));
  const shapes = [...new Set(runs.flatMap((run) => Object.keys((run.bench || { latency: {} }).latency)))];
  const parts = Object.keys(OBJECTIVES).filter((name) => runs.some((run) => run.curves[name]));
  if (state.layer === null && layers.length) state.layer = layers[Math.floor(layers.length / 2)];
  for (const [name, all] of [["score", scoreNames], ["shape", shapes], ["curve", parts], ["layer", layers], ["kind", kinds]]) known(name, all);
  const set = (name, draw) => (value) => { state[name] = value; draw(); };
  const same = (names) => names.map((name) => [name, name]);
  options("objective-curve", parts.map((name) => [name, OBJECTIVES[name]]), state.curve, set("curve", training));
  options("score-name", same(scoreNames), state.score, set("score", training));
  options("layer", same(layers), state.layer, set("layer", () => { pattern(); layersSection(); }));
  options("kind", same(kinds), state.kind, set("kind", () => { pattern(); layersSection(); }));
  options("measure", Object.entries(MEASURES).map(([name, [text]]) => [name, text]), state.measure, set("measure", layersSection));
  options("shape", same(shapes), state.shape, set("shape", deployment));
}

function listen() {
  get("smoothing").value = state.smooth;
  get("smoothing").oninput = (event) => { state.smooth = Number(event.target.value); training(); };
  get("sorted").checked = state.sorted;
  get("sorted").onchange = (event) => { state.sorted = event.target.checked; pattern(); };
  get("log-scale").checked = state.log;
  get("log-scale").onchange = (event) => { state.log = event.target.checked; values(); };
  const first = () => views.find((view) => view.pattern);
  get("zoom-in").onclick = () => first()?.zoom(1.6);
  get("zoom-out").onclick = () => first()?.zoom(1 / 1.6);
  get("zoom-reset").onclick = () => first()?.zoom(0);
  let seen = innerWidth, waiting = null;
  addEventListener("resize", () => {
    if (innerWidth === seen) return; // a phone's address bar comes and goes
    seen = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(render, 120);
  });
  const recolour = () => views.forEach((view) => { if (view.pattern) { view.paint(); view.draw(); } });
  dark.addEventListener("change", () => { layersSection(); recolour(); });
  printing.addEventListener("change", () => {
    if (printing.matches) get("settings").open = true;
    layersSection();
    recolour();
  });
}

function render() {
  get("runs").replaceChildren(...(several ? runs.map(runButton) : []));
  training();
  pattern();
  layersSection();
  values();
  deployment();
}

head();
fillSelects();
listen();
render();
document.documentElement.dataset.ready = "yes";
