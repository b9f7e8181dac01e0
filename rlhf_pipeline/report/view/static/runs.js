// All runs in a table, what differs between them, and their curves.
import { html, nothing } from "lit-html";
import { colors, count, fmt, get, isReport, there, visible } from "view/api.js";
import { asTable, isFlat, plot, smoothed, summary } from "view/chart.js";
import { title } from "view/titles.js";

const SECTIONS = [
  ["Trajectories", ["completion_length", "num_failed", "flat_groups", "staleness", "cut_off", "advantage_std", "use_count", "num_trajectories", "num_taught"]],
  ["Learning", ["loss", "grad_norm", "entropy", "lr"]],
  ["Policy", ["kl_k1", "kl_approx", "clip_fraction", "ess", "sampler_gap"]],
  ["Speed", ["tokens_per_s", "update_tokens_per_s", "padding_efficiency", "rollout_s", "update_s", "peak_memory_mb"]],
  ["Failures", ["num_unscored_tokens"]],
];
// Of an evaluation the interval is the band of its mean, and no figure of its own.
const EDGE = /reward_(low|high)$/;

function differing(runs, definitions) {
  const names = [...new Set(definitions.flatMap(Object.keys))].filter(name => new Set(definitions.map(d => JSON.stringify(d[name]))).size > 1);
  if (runs.length < 2 || !names.length) return nothing;
  return html`<details ?open=${names.length <= 12}><summary><h2>What differs: ${count(names.length, "setting")}</h2></summary><div class="card scroll" tabindex="0" role="region" aria-label="Differing settings"><table><thead><tr><th class="l">setting</th>
    ${runs.map(run => html`<th class="l">${visible(run.name)}</th>`)}</tr></thead><tbody>${names.slice(0, 60).map(name => html`<tr><td class="l">${name}</td>
    ${definitions.map(d => html`<td class="l">${visible(fmt(d[name]))}</td>`)}</tr>`)}</tbody></table></div>
    ${names.length > 60 ? html`<p class="soft">60 of ${fmt(names.length)} settings that differ</p>` : nothing}</details>`;
}

export async function runsPage(at, state, draw) {
  const hide = new Set((at.query.get("hide") ?? "").split(",").filter(Boolean).map(Number));
  const smooth = Number(at.query.get("smooth") ?? 0), byTime = at.query.get("x") === "time";
  const every = (what, none) => Promise.all(state.runs.map((run, i) => run.error ? none : get(`runs/${i}/${what}`)));
  const all = await every("metrics", { num: 0, step: [], time: [], values: {}, units: {} }), evaluated = await every("evaluations", []), definitions = await every("definition", {});
  const to = change => {
    const next = new URLSearchParams(at.query);
    for (const [key, value] of Object.entries(change)) value ? next.set(key, value) : next.delete(key);
    return `#/runs?${next}`;
  };
  // Of an evaluation the steps that have one, each store a line: means over other prompts are not one curve.
  const several = evaluated.flat().length > 1;
  const evaluations = name => evaluated.flatMap((stores, i) => hide.has(i) ? [] : stores.filter(one => one.values[name]).map((one, n) => ({ run: i, store: one.store,
    name: several ? `${state.runs[i].name} ${one.name ?? one.store}` : state.runs[i].name, color: colors[(i + n) % 6], xs: byTime ? one.time : one.step, steps: one.step, ys: one.values[name],
    ...(one.values[`${name}_low`] ? { band: [one.values[`${name}_low`], one.values[`${name}_high`]] } : {}) })));
  const lines = name => name.startsWith("evaluation/") ? evaluations(name) : all.flatMap((m, i) => hide.has(i) || !m.values[name] ? [] : [{ run: i, name: state.runs[i].name, color: colors[i % 6],
    xs: byTime ? m.time : m.step, steps: m.step, ys: smoothed(m.values[name], smooth) }]);
  const figures = [...new Set(evaluated.flat().flatMap(one => Object.keys(one.values)))].filter(name => !EDGE.test(name));
  const units = state.units = Object.assign({}, ...all.map(m => m.units));
  const known = new Set([...all.flatMap(m => Object.keys(m.values)).filter(name => !name.startsWith("evaluation/")), ...figures]);
  const chosen = new Set(["task_reward", ...SECTIONS.flatMap(([, names]) => names), ...figures]);
  const sections = [["Evaluation", figures], ...SECTIONS, ["All others", [...known].filter(name => !chosen.has(name) && name !== "policy_version").sort()]];
  const card = (name, big) => {
    const mine = lines(name);
    if (!mine.some(line => line.ys.some(y => y !== null))) return nothing;
    if (isFlat(mine) && !big) return nothing;
    return html`<section class="card ${big ? "big" : ""}"><div class="cardhead"><h3 title=${units[name]?.[1] ?? ""}>${title(name)}${(units[name]?.[0] ?? "reward") !== "reward" ? html` <span class="soft unit">${units[name][0]}</span>` : nothing}</h3><div class="read" id="r-${name}">${summary(mine)}</div></div>
      ${isFlat(mine) ? nothing : html`<div class="plot" data-name=${name} data-big=${big ? "1" : nothing}></div>${asTable(byTime ? "time" : "step", mine)}`}</section>`;
  };
  const constants = names => {
    const flat = names.filter(name => { const mine = lines(name); return mine.some(line => line.ys.some(y => y !== null)) && isFlat(mine); });
    return flat.length ? html`<section class="card constants"><h3>Constant</h3><dl>${flat.map(name => html`<dt title=${units[name]?.[1] ?? ""}>${title(name)}</dt><dd>${summary(lines(name)).replace("constant: ", "")} <span class="soft">${units[name]?.[0] ?? ""}</span></dd>`)}</dl></section>` : nothing;
  };
  draw(html`<h1>Runs</h1>
    <div class="card scroll" tabindex="0" role="region" aria-label="Runs"><table class="runs"><thead><tr><th class="l">run</th><th class="l">definition</th><th>seed</th><th>step</th>
      <th>reward first</th><th>last</th><th class="l">evaluated</th><th>stored</th><th>failed</th><th class="l">processes</th></tr></thead><tbody>${state.runs.map((run, i) => html`<tr>
      <td class="l"><input type="checkbox" aria-label="show ${visible(run.name)}" .checked=${!hide.has(i)} @change=${e => {
        e.target.checked ? hide.delete(i) : hide.add(i); location.hash = to({ hide: [...hide].join(",") }).slice(1); }}>
        <i class="swatch" .style=${`background:${colors[i % 6]}`}></i><a href="#/${i}/trajectories">${visible(run.name)}</a></td>
      <td class="l" data-l="definition">${run.definition ?? "–"}</td><td data-l="seed">${fmt(run.seed)}</td><td data-l="step">${fmt(run.step)}${run.of ? html`<span class="soft"> / ${fmt(run.of)}</span>` : ""}</td>
      <td data-l="reward first">${fmt(run.reward_first)}</td><td data-l="last">${fmt(run.reward_last)}</td><td class="l" data-l="evaluated">${evaluated[i].map(one => html`<a href="#/${i}~${one.store}/trajectories" title="rows of evaluation ${one.name ?? one.store}">${fmt(one.values["evaluation/reward"]?.at(-1) ?? null)}</a> `)}</td><td data-l="stored">${fmt(run.stored)}</td><td data-l="failed" class=${run.failed ? "bad" : ""}>${run.failed ? html`<a class="bad" href="#/${i}/lists/failed">${fmt(run.failed)}</a>` : fmt(run.failed)}</td>
      <td class="l" data-l="processes">${run.processes.length ? run.processes.map(p => html`<a class="chip ${p.alive ? "good" : ""}" href="#/${i}/health">${p.name}: ${p.alive ? p.state ?? "?" : "not running"}</a> `)
        : html`<span class="soft">one process</span>`}</td></tr>`)}</tbody></table></div>
    ${state.runs.filter(run => run.error).map(run => html`<p class="card bad" role="alert">${visible(run.name)}: ${visible(run.error)}</p>`)}
    ${differing(state.runs, definitions)}
    ${known.size ? html`<div class="bar"><label>smoothing <select @change=${e => { location.hash = to({ smooth: e.target.value }).slice(1); }}>
        ${[["", "none"], [".6", "0.6"], [".9", "0.9"]].map(([v, n]) => html`<option value=${v} ?selected=${Number(v) === smooth}>${n}</option>`)}</select></label>
      <label>over <select @change=${e => { location.hash = to({ x: e.target.value }).slice(1); }}><option value="" ?selected=${!byTime}>steps</option>
        <option value="time" ?selected=${byTime}>time</option></select></label>
      ${state.runs.every(run => run.definition === null) ? nothing : html`<label>open step <input class="stepper" type="number" min="1" max=${state.runs[0]?.step ?? 1} placeholder=${state.runs[0]?.step ?? ""}
        @change=${e => { const step = Math.round(Number(e.target.value)); if (step > 0 && there(at.run, "steps", step)) location.hash = `/${at.run}/step/${step}`; }}></label>`}
      <span class="soft">a click on a curve opens its step or trajectories; a drag zooms, a double click zooms out${all.some(m => m.step.length < m.num) ? `; ${fmt(Math.max(...all.map(m => m.step.length)))} of ${count(Math.max(...all.map(m => m.num)), "step")} are drawn` : ""}</span></div>
      ${card("task_reward", true)}` : html`<p class="soft">The rows have no policy versions, so there are no curves. <a href="#/0/trajectories">Trajectories</a></p>`}
    ${sections.map(([name, names], n) => names.some(one => known.has(one)) ? html`<details ?open=${n <= SECTIONS.length}><summary><h2>${name}</h2></summary>
      <div class="grid">${names.map(one => card(one, false))}${constants(names)}</div></details>` : nothing)}`);
  let plots = [];
  const paint = () => {
    plots.forEach(one => one.destroy());
    plots = [...document.querySelectorAll(".plot")].map(box => {
      const name = box.dataset.name, mine = lines(name), read = document.getElementById(`r-${name}`), said = read.firstChild;
      const unit = name === "task_reward" && mine.every(l => l.ys.every(y => y === null || (y >= 0 && y <= 1)));
      return plot(box, mine, {
        height: box.dataset.big ? 260 : 170, time: byTime, target: name === "task_reward" ? state.runs[mine[0].run].target : null,
        min: unit ? 0 : null, max: unit ? 1 : null,
        onPick: (x, i) => { const line = mine[i], near = line.xs.reduce((a, b) => Math.abs(b - x) < Math.abs(a - x) ? b : a);
          const step = line.steps[line.xs.indexOf(near)];
          const rows = `trajectories?where=version%3D%3D${step}`;
          location.hash = line.store ? `/${line.run}~${line.store}/${rows}` : state.runs[line.run].definition === null ? `/${line.run}/${rows}` : `/${line.run}/step/${step}`; },
        onHover: (x, ys) => { const now = x === null ? summary(mine) : `${byTime ? new Date(x * 1000).toLocaleTimeString() : `step ${fmt(x)}`}: ${
          ys.slice(0, mine.length).map((y, i) => `${mine.length > 1 ? `${mine[i].name} ` : ""}${fmt(y)}`).join(", ")}`;
          const text = [...read.childNodes].find(node => node.nodeType === 3) ?? said; if (text) text.data = now; },
      });
    });
  };
  paint();
  const opened = e => { if (e.target.open) paint(); }, sized = () => paint();
  document.getElementById("main").addEventListener("toggle", opened, true);
  addEventListener("resize", sized);
  return { leave: () => { document.getElementById("main").removeEventListener("toggle", opened, true); removeEventListener("resize", sized); plots.forEach(one => one.destroy()); } };
}
