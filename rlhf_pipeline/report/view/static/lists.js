// What needs a look: failures, untrusted rewards, drift, sampler gap; the processes; the definition.
import { html, nothing } from "lit-html";
import { ago, fmt, get, visible } from "view/api.js";
import { isFlat, plot } from "view/chart.js";
import { rowsTable } from "view/trajectories.js";

const LISTS = [["failed", "Failed rewards"], ["untrusted", "Untrusted rewards"], ["drift", "Drift over versions"], ["mismatch", "Sampler gap"]];

export async function listsPage(at, state, draw) {
  const found = await get(`runs/${at.run}/lists/${at.id ?? "failed"}`), box = () => document.getElementById("drift");
  const line = name => [{ xs: found.versions.map(v => v.version), ys: found.versions.map(v => v[name]), name }];
  draw(html`<h1>Lists</h1><div class="bar">${LISTS.map(([name, title]) => html`<a class="chip" href="#/${at.run}/lists/${name}" aria-current=${found.list === name ? "true" : nothing}>${title}</a>`)}</div>
    ${found.rows ? html`<p><b>${fmt(found.num)}</b> ${found.num === 1 ? "trajectory" : "trajectories"}</p>${found.kinds.map(([text, num]) => html`<p class="facts"><b>${fmt(num)}</b><span>${visible(text || "without a reason")}</span></p>`)}
      ${found.rows.length ? rowsTable(at.run, found.rows) : nothing}` : nothing}
    ${found.versions ? html`<section class="card"><h2>Mean reward by policy version</h2><div id="drift"></div></section><div class="card scroll gap" tabindex="0" role="region" aria-label="Versions"><table><thead><tr><th>version</th><th>trajectories</th><th>reward</th><th>tokens</th></tr></thead>
      <tbody>${found.versions.map(v => html`<tr><td><a class="row" href="#/${at.run}/trajectories?where=version%3D%3D${v.version}">${v.version}</a></td><td>${fmt(v.num)}</td><td>${fmt(v.reward)}</td><td>${fmt(v.tokens, 1)}</td></tr>`)}</tbody></table></div>` : nothing}
    ${found.steps ? html`<p class="soft">The steps at which sampler and learner disagree most about the same tokens (nats per token).</p><div class="card scroll" tabindex="0" role="region" aria-label="Steps"><table><thead><tr><th>step</th><th>sampler gap</th></tr></thead>
      <tbody>${found.steps.map(s => html`<tr><td><a class="row" href="#/${at.run}/step/${s.step}">${s.step}</a></td><td>${fmt(s.gap, 6)}</td></tr>`)}</tbody></table></div>` : nothing}`);
  if (!found.versions?.length || isFlat(line("reward"))) return null;
  let chart = plot(box(), line("reward"), { sync: "version", onPick: x => { location.hash = `/${at.run}/trajectories?where=version%3D%3D${x}`; } });
  const again = () => { chart.destroy(); chart = plot(box(), line("reward"), { sync: "version" }); };
  addEventListener("resize", again);
  return () => { removeEventListener("resize", again); chart.destroy(); };
}

export async function healthPage(at, state, draw) {
  const health = await get(`runs/${at.run}/health`);
  draw(html`<h1>Health</h1>${health.processes.length ? html`<div class="card scroll" tabindex="0" role="region" aria-label="Processes"><table><thead><tr><th class="l">process</th><th class="l">state</th><th>for</th><th>seen</th><th class="l">at</th></tr></thead>
      <tbody>${health.processes.map(p => html`<tr><td class="l">${p.name}</td><td class="l"><span class="chip ${p.alive ? "good" : "bad"}">${p.alive ? p.state : `not running (was ${p.state})`}</span></td><td>${p.since ? ago(p.since).replace(" ago", "") : "–"}</td><td>${p.seen ? ago(p.seen) : "–"}</td>
      <td class="l">${p.step !== undefined ? `step ${fmt(p.step)}` : p.rollouts !== undefined ? `${fmt(p.rollouts)} rollouts` : "–"}</td></tr>`)}</tbody></table></div>` : html`<p class="soft">This run has one process and keeps no heartbeats.</p>`}
    <h2>The end of its log</h2><pre class="card text2" tabindex="0" dir="auto">${visible(health.log || "empty")}</pre>`);
}

export async function definitionPage(at, state, draw) {
  const fields = Object.entries(await get(`runs/${at.run}/definition`));
  draw(html`<h1>Definition</h1>${fields.length ? html`<div class="card scroll" tabindex="0" role="region" aria-label="Fields"><table><tbody>${fields.map(([name, value]) => html`<tr><th class="l" scope="row">${name}</th><td class="text"><div>${value === null ? "none" : visible(String(value))}</div></td></tr>`)}</tbody></table></div>`
    : html`<p class="soft">A store alone has no definition.</p>`}`);
}
