// State and its views: every control changes `state` and calls `update`. Text from the data is only set as textContent.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id), root = document.documentElement;
const families = new Map(data.families.map((family) => [family.name, family]));
const state = { challenge: 0, option: 0, rates: "best", run: 0, chosen: new Set(), rows: null };
const charts = new Map();
let listed = [];

const key = (label, lr) => JSON.stringify([label, Number(lr)]);
const dark = () => root.dataset.theme === "dark";
const challenge = () => data.challenges[state.challenge];
const isOn = (group) => (!state.chosen.size || state.chosen.has(group.family)) &&
  (!state.rows || state.rows.has(key(group.algorithm, group.lr)));

function style(name, on, opacity = 1) {
  const { colour, dark: light, shape, locality } = families.get(name);
  return { family: name, colour: dark() ? light : colour, shape, locality, opacity: on ? opacity : 0.07, band: on ? 0.15 : 0.02 };
}

const ofRun = (run, group, index) =>
  ({ name: run.name, algorithm: group.algorithm, lr: group.lr, seed: run.seed, index, ...style(group.family, isOn(group), 0.5) });
const ofGroup = (group, index) =>
  ({ algorithm: group.algorithm, lr: group.lr, seeds: group.seeds, series: index, ...style(group.family, isOn(group)) });
const bounds = ([mean, low, high]) => ({ mean, low, high });

function theme() {
  const css = getComputedStyle(root), [ink, faint, line] = ["--ink", "--faint", "--line"].map((name) => css.getPropertyValue(name).trim());
  const text = { labelColor: faint, titleColor: ink, labelFontSize: 11, titleFontSize: 12, titleFontWeight: "normal" };
  return {
    background: null, font: css.fontFamily, mark: { aria: false }, view: { stroke: null }, legend: { ...text, gradientLength: 160 },
    axis: { ...text, gridColor: line, domainColor: line, tickColor: line, gridOpacity: 0.7 },
    title: { anchor: "start", color: ink, subtitleColor: faint, fontSize: 14, subtitleFontSize: 11, offset: 12, subtitlePadding: 5 },
  };
}

function wrap(text, characters) {
  const lines = [""];
  for (const word of text.split(" ")) {
    if (lines.at(-1) && lines.at(-1).length + word.length >= characters) lines.push("");
    lines.push(`${lines.pop()} ${word}`.trim());
  }
  return lines;
}

// The range of an axis. Intervals of few seeds are long: they extend it by half, and not beyond what is possible.
function extent(rows, values, limits = [-Infinity, Infinity], scale = (x) => x, back = (x) => x) {
  const ends = (numbers) => [Math.min(...numbers), Math.max(...numbers)];
  const [low, high] = ends(values.map(scale)), half = (high - low) / 2;
  if (!(half > 0)) return undefined;
  const [least, most] = ends([low, high, ...rows.flatMap((row) => [row.low ?? row.mean, row.high ?? row.mean]).map(scale)]);
  const from = Math.max(least, low - half, Math.min(limits[0], low)), to = Math.min(most, high + half, Math.max(limits[1], high));
  return [from - 0.06 * half, to + 0.06 * half].map(back);
}

const limits = (name) => (challenge().largest === null || name === "distance" ? [0, Infinity] : name === "metric" ? [0, 100] : [-100, 100]);

// Draw a chart, or give new data to one that shows the same axes.
async function draw(id, name, sets, { texts = {}, signals = {}, ticks, domain } = {}) {
  const at = $(id), width = at.clientWidth;
  const drawn = JSON.stringify([name, texts, signals, ticks, domain, root.dataset.theme, width < 480]);
  const before = charts.get(id);
  if (before?.drawn === drawn) {
    const view = (await before.result).view;
    for (const [set, rows] of Object.entries(sets)) view.data(set, rows);
    return view.runAsync();
  }
  if (Object.values(sets).every((rows) => !rows.length)) {
    charts.delete(id);
    before?.result.then((old) => old.finalize());
    return at.replaceChildren("Nothing to draw: these runs diverged, have one task only, or have nothing in common.");
  }
  const clean = (text) => text.replace(/[\p{Cc}\u2028\u2029]/gu, " ");  // Vega puts titles into its own expressions
  const fill = (_, value) => (typeof value === "string" ? value.replace(/^@(\w+)/, (_, text) => clean(texts[text])) : value);
  const spec = JSON.parse(JSON.stringify(data.charts[name]), fill);
  spec.title.text = wrap(name === "matrix" ? spec.title.text : spec.title.text[0].toUpperCase() + spec.title.text.slice(1), width / 8);
  spec.title.subtitle = wrap(spec.title.subtitle, (width - 20) / 6.3);
  spec.params = (spec.params ?? []).map((param) => ({ ...param, value: signals[param.name] ?? param.value }));
  for (const { mark, encoding } of spec.layer) {
    if (ticks) encoding.x.axis = { ...encoding.x.axis, values: ticks };
    if (domain) encoding.y.scale = { ...encoding.y.scale, domain, nice: encoding.y.scale.type !== "log" };
    if (domain) mark.clip = true;
  }
  if (name === "change") spec.height = 40 + 18 * sets.means.length;
  const actions = { export: true, source: false, compiled: false, editor: false };
  const result = vegaEmbed(at, { ...spec, datasets: { ...spec.datasets, ...sets } }, { ast: true, renderer: "svg", logLevel: 1, config: theme(), actions, downloadFileName: id, tooltip: { theme: root.dataset.theme } });
  charts.set(id, { drawn, result });
  const { view } = await result;
  before?.result.then((old) => old.finalize());
  view.addEventListener("click", (_, item) => {
    if (item?.datum?.index !== undefined) state.run = item.datum.index;
    if (item?.datum?.family) choose(item.datum.family);
  });
}

function drawOver(name) {
  const option = data.options[state.option], here = (series) => series.challenges.includes(challenge().name);
  const on = option.series.map(() => false), runs = [], means = [];
  const ticks = [...new Set(option.series.filter(here).flatMap((series) => series.rows.map((row) => row.x)))];
  const names = [...new Set(option.series.filter(here).map((series) => series.family))];
  const low = Math.min(...ticks), high = Math.max(...ticks);  // algorithms stand a little apart, within their tick
  const scale = (x) => option.kind === "log" ? Math.log(x / low) / Math.log(high / low) : (x - low) / (high - low);
  const shares = high > low ? ticks.map(scale).sort((a, b) => a - b) : [0, 1];
  const room = Math.min(...shares.slice(1).map((share, i) => share - shares[i]));
  const step = Math.min(0.012, 0.4 * room / names.length);
  const dodge = (family, x) => {
    const share = step * (names.indexOf(family) - (names.length - 1) / 2);
    return option.kind === "log" ? x * (high / low) ** share : option.kind === "linear" ? x + (high - low) * share : x;
  };
  data.runs.forEach((run, i) => {
    const series = option.of[i], group = data.groups[run.group];
    if (series === null || !here(option.series[series])) return;
    on[series] ||= isOn(group);
    if (run[name] !== null) runs.push({ ...ofRun(run, group, i), x: option.x[i], at: dodge(group.family, option.x[i]), value: run[name] });
  });
  option.series.forEach((series, i) => {
    for (const row of here(series) ? series.rows : [])
      if (row[name][0] !== null)
        means.push({ algorithm: series.algorithm, x: row.x, at: dodge(series.family, row.x), seeds: row.seeds, series: i, ...bounds(row[name]), ...style(series.family, on[i]) });
  });
  const texts = { statistic: { ...challenge(), distance: "distance ‖θ_T − θ_0‖" }[name], option: option.name };
  return draw(`over-${name}`, `over-${option.kind}`, { runs, means }, {
    texts, ticks: option.kind !== "point" && ticks.length <= 10 ? ticks : undefined,
    domain: extent(means, runs.map((run) => run.value), name === "forgetting" && challenge().largest === null ? undefined : limits(name)),
  });
}

function drawGroups() {
  const all = data.groups.map((group, i) => ({ group, i })).filter(({ group }) => group.challenge === challenge().name);
  const shown = all.filter(({ group }) => group.best || state.rates === "all");
  const rows = (name) => shown.flatMap(({ group, i }) => group[name].map(([x, ...own]) => ({ x, ...bounds(own), ...ofGroup(group, i) })));
  const loss = rows("loss").filter((row) => row.mean !== null), values = loss.map((row) => row.mean);
  const wide = Math.min(...values) > 0 && Math.max(...values) > 20 * Math.min(...values);
  if (wide) for (const row of loss) row.low = row.low > 0 ? row.low : null;
  const means = all.filter(({ group }) => group.metric[0] !== null && group.forgetting[0] !== null)
    .map(({ group, i }) => ({ ...ofGroup(group, i), series: group.algorithm, order: group.lr, x: group.forgetting[0], mean: group.metric[0] }));
  const runs = data.runs.map((run, i) => ({ ...ofRun(run, data.groups[run.group], i), ...run }))
    .filter((run) => data.groups[run.group].challenge === challenge().name && run.metric !== null && run.forgetting !== null);
  const tasks = Math.max(...all.map(({ group }) => group.tasks.length)), every = Math.ceil(tasks / 10);
  const ticks = Array.from({ length: Math.ceil(tasks / every) }, (_, i) => 1 + i * every);
  const accuracy = rows("tasks"), curve = accuracy.map((row) => row.mean);
  return [
    draw("tasks", "tasks", { means: accuracy }, { texts: challenge(), ticks, domain: extent(accuracy, curve, limits("metric")) }),
    draw("loss", wide ? "loss-log" : "loss-linear", { means: loss }, { ticks, domain: wide ? extent(loss, values, undefined, Math.log, Math.exp) : extent(loss, values) }),
    draw("tradeoff", "tradeoff", { means, runs: runs.map(({ matrix, rows, columns, ...row }) => row) }, { texts: challenge() }),
  ];
}

function title(index) {
  const run = data.runs[index], group = data.groups[run.group];
  return `${group.algorithm}, lr ${group.lr}, seed ${run.seed}`;
}

function drawMatrix() {
  const mine = data.runs.map((_, i) => i).filter((i) => data.groups[data.runs[i].group].challenge === challenge().name);
  const on = mine.filter((i) => isOn(data.groups[data.runs[i].group]));
  const list = on.length ? on : mine;
  if (JSON.stringify(list) !== JSON.stringify(listed)) {
    listed = list;
    $("run-name").replaceChildren(...list.map((i) => new Option(`${title(i)} · ${data.runs[i].name}`, i)));
    $("run").max = list.length - 1;
  }
  if (!list.includes(state.run)) state.run = list[0];
  $("run").value = list.indexOf(state.run);
  $("run").setAttribute("aria-valuetext", title(state.run));
  $("run-name").value = state.run;
  const run = data.runs[state.run], exact = challenge().largest !== null;
  const cells = run.rows.flatMap((t, i) => run.columns.map((o, j) => ({ t, o, value: run.matrix[i][j] }))).filter((cell) => cell.value !== null);
  for (const cell of cells) cell.text = run.columns.length > 12 ? "" : exact ? cell.value.toFixed(0) : Number(cell.value.toPrecision(2));
  const largest = challenge().largest ?? Math.max(...cells.map((cell) => cell.value), 1e-9);
  $("matrix-about").textContent = `Run ${run.name}. Columns are tasks; row 0 is the initialisation.` + (cells.length ? "" : " It diverged.");
  return draw("matrix", "matrix", { cells }, { texts: { ...challenge(), run: title(state.run) }, signals: { largest } });
}

function drawChanges() {
  const titles = { metric: "accuracy or loss", forgetting: "forgetting", distance: "distance" };
  return Object.keys(titles).map((name) => {
    const rows = data.changes.filter((row) => row.statistic === name && row.mean !== null);
    return draw(`change-${name}`, "change", { means: rows.map((row) => ({ ...row, ...style(row.family, isOn(row)) })) }, { texts: { difference: `change in ${titles[name]}` } });
  });
}

function drawLens() {
  const [inside, outside, below] = ["M1,0A1,1,0,1,1,-1,0A1,1,0,1,1,1,0Z", "cross", "triangle-down"];
  const [cool, warm] = dark() ? ["#6bb8e8", "#f08a73"] : ["#0077BB", "#CC3311"];
  return data.lens.flatMap((examined, i) => {
    const pairs = examined.pairs.map((pair) => ({ ...pair, opacity: 1, shape: pair.inside ? inside : outside, colour: pair.inside ? cool : warm }));
    const eigenvalues = examined.eigenvalues.map((row) => ({ ...row, opacity: 1, size: Math.abs(row.value), shape: row.value < 0 ? below : inside, colour: row.value < 0 ? warm : cool }));
    return [draw(`region-${i}`, "region", { pairs }), draw(`predicted-${i}`, "predicted", { pairs }), draw(`spectrum-${i}`, "spectrum", { eigenvalues })];
  });
}

function update() {
  for (const button of $("families").children) button.setAttribute("aria-pressed", state.chosen.has(button.dataset.family));
  $("families").classList.toggle("some", state.chosen.size > 0);
  $("clear").hidden = !state.chosen.size && !state.rows;
  for (const row of document.querySelectorAll("tbody tr[data-family]"))
    row.classList.toggle("dim", state.chosen.size > 0 && !!row.dataset.family && !state.chosen.has(row.dataset.family));
  const jobs = ["forgetting", "metric", "distance"].map(drawOver).concat(drawGroups(), drawMatrix());
  if (data.changes) jobs.push(...drawChanges());
  if (data.lens) jobs.push(...drawLens());
  return Promise.all(jobs);
}

function choose(name) {
  if (!state.chosen.delete(name)) state.chosen.add(name);
  $("said").textContent = state.chosen.size ? `Highlighted: ${[...state.chosen].join(", ")}` : "All algorithms are shown";
  update();
}

function filter() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean), rows = [...$("result-table").tBodies[0].rows];
  for (const row of rows) row.classList.toggle("off", !words.every((word) => row.textContent.toLowerCase().includes(word)));
  const left = rows.filter((row) => !row.classList.contains("off"));
  state.rows = words.length ? new Set(left.map((row) => key(row.dataset.label, row.dataset.lr))) : null;
  $("said").textContent = words.length ? `${left.length} of ${rows.length} rows` : "";
  update();
}

function sort(header) {
  const table = header.closest("table"), column = header.cellIndex, up = header.getAttribute("aria-sort") !== "ascending";
  const value = (row) => {
    const text = row.cells[column].textContent.replace("−", "-").trim(), number = parseFloat(text);
    return /^[-–]?$/.test(text) || text === "diverged" ? null : Number.isNaN(number) ? text : number;
  };
  const order = (a, b) => (typeof a === typeof b && typeof a === "number" ? a - b : String(a).localeCompare(String(b)));
  const rows = [...table.tBodies[0].rows].map((row) => [value(row), row]);
  rows.sort(([a], [b]) => (a === null ? (b === null ? 0 : 1) : b === null ? -1 : up ? order(a, b) : order(b, a)));
  for (const other of table.querySelectorAll("[aria-sort]")) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", up ? "ascending" : "descending");
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

function paint(name) {
  root.dataset.theme = name;
  $("theme").setAttribute("aria-pressed", dark());
  $("families").replaceChildren(...data.families.map((family) => {
    const button = document.createElement("button"), { colour, shape, locality } = style(family.name, true);
    const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg"), make = (tag) => picture.appendChild(document.createElementNS(picture.namespaceURI, tag));
    const set = (node, values) => Object.entries(values).forEach(([name, value]) => node.setAttribute(name, value));
    set(picture, { viewBox: "-13 -6 26 12", "aria-hidden": true });
    set(make("path"), { d: "M-13,0H13", stroke: colour, "stroke-width": 2, "stroke-dasharray": locality === "local" ? "5 3" : "none" });
    set(make("path"), { d: shape, fill: colour, transform: "scale(5)" });
    button.type = "button";
    button.dataset.family = family.name;
    button.append(picture, family.name);
    button.onclick = () => choose(family.name);
    return button;
  }));
  for (const button of document.querySelectorAll(".pick")) button.style.setProperty("--colour", style(button.closest("tr").dataset.family, true).colour);
  return update();
}

function choice(id, names) {
  $(id).replaceChildren(...names.map((name, i) => new Option(name, i)));
  $(id).onchange = () => { state[id] = Number($(id).value); update(); };
}

choice("challenge", data.challenges.map((own) => own.name));
choice("option", data.options.map((option) => option.name));
$("rates").onchange = () => { state.rates = $("rates").value; update(); };
$("run").oninput = () => { state.run = listed[$("run").value]; update(); };
$("run-name").onchange = () => { state.run = Number($("run-name").value); update(); };
$("filter").oninput = filter;
$("clear").onclick = () => { state.chosen.clear(); $("filter").value = ""; filter(); };
$("theme").onclick = () => paint(dark() ? "light" : "dark");
for (const header of document.querySelectorAll("[aria-sort]")) header.firstElementChild.onclick = () => sort(header);
for (const button of document.querySelectorAll(".pick")) button.onclick = () => choose(button.closest("tr").dataset.family);
for (const button of document.querySelectorAll(".copy"))
  button.onclick = async () => {
    const code = button.parentElement.querySelector("code");
    getSelection().selectAllChildren(code);
    try { await navigator.clipboard.writeText(code.textContent); button.textContent = "Copied"; } catch { button.textContent = "Press Ctrl-C"; }
  };
const system = matchMedia("(prefers-color-scheme: dark)"), follow = () => paint(system.matches ? "dark" : "light");
system.onchange = follow;
addEventListener("resize", () => update());
follow().then(() => { root.dataset.ready = "true"; });
