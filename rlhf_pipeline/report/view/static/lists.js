// What needs a look: failures by cause, untrusted rewards, drift, sampler gap; the processes and logs; the definition.
import { html, nothing } from "lit-html";
import { ago, bytes, count, fmt, get, isReport, recordedVersions, visible } from "view/api.js";
import { isFlat, plot } from "view/chart.js";
import { link, rowsTable } from "view/trajectories.js";

const LISTS = [["failed", "Failed rewards"], ["untrusted", "Untrusted rewards"], ["drift", "Drift over versions"], ["mismatch", "Sampler gap"]];

const causes = (at, found) => html`<div class="card scroll" tabindex="0" role="region" aria-label="Causes"><table class="causes"><thead><tr><th>trajectories</th><th class="l">cause (without numbers and quoted text)</th></tr></thead><tbody>${found.kinds.map(kind =>
  html`<tr aria-current=${kind.cause === found.cause ? "true" : nothing}><td class="num"><b>${fmt(kind.num)}</b></td><td class="text"><div><a href="#/${at.run}/lists/${found.list}?cause=${encodeURIComponent(kind.cause)}">${visible(kind.cause)}</a></div></td></tr>`)}</tbody></table></div>
  ${found.num_kinds > found.kinds.length ? html`<p class="soft">the ${fmt(found.kinds.length)} most frequent of ${fmt(found.num_kinds)} causes; the others: search for their text</p>` : nothing}`;

export async function listsPage(at, state, draw) {
  const query = new URLSearchParams(at.query), offset = Number(query.get("offset") ?? 0), found = await get(`runs/${at.run}/lists/${at.id ?? "failed"}?${query}`);
  const line = name => [{ xs: found.versions.map(v => v.version), ys: found.versions.map(v => v[name]), name }], versions = isReport ? recordedVersions(at.run) : null;
  const page = by => { query.set("offset", Math.max(0, offset + by)); return `#/${at.run}/lists/${found.list}?${query}`; }, box = () => document.getElementById("drift");
  draw(html`<h1>Lists</h1><div class="bar">${LISTS.map(([name, title]) => html`<a class="chip" href="#/${at.run}/lists/${name}" aria-current=${found.list === name ? "true" : nothing}>${title}</a>`)}</div>
    ${found.rows ? html`<p><b>${count(found.num, "trajectory")}</b>${found.num ? html` of ${count(found.num_kinds, "cause")}` : nothing}</p>${found.kinds.length ? causes(at, found) : nothing}
      ${found.cause ? html`<p class="facts gap"><span>${count(found.matched, "trajectory")} of one cause</span><a href="#/${at.run}/lists/${found.list}">of all causes</a></p>` : html`<div class="gap"></div>`}
      ${found.rows.length ? html`${rowsTable(at.run, found.rows)}<div class="bar">${offset ? html`<a class="b previous" href=${page(-100)}>‹ newer</a>` : nothing}<span class="num">${fmt(offset + 1)}–${fmt(offset + found.rows.length)} of ${fmt(found.matched)}</span>${
        isReport ? (found.rows.length < found.matched ? html`<span class="soft">the others: rlhf-pipeline view RUN</span>` : nothing) : offset + found.rows.length < found.matched ? html`<a class="b next" href=${page(100)}>older ›</a>` : nothing}</div>` : nothing}` : nothing}
    ${found.num_versions > found.versions?.length ? html`<p class="soft">${fmt(found.versions.length)} evenly spaced versions of ${fmt(found.num_versions)}</p>` : nothing}
    ${found.versions ? html`<section class="card"><h2>Mean reward by policy version</h2><div id="drift"></div></section><div class="card scroll gap" tabindex="0" role="region" aria-label="Versions"><table><thead><tr><th>version</th><th>trajectories</th><th>reward</th><th>tokens</th></tr></thead>
      <tbody>${found.versions.map(v => html`<tr><td>${!versions || versions.has(v.version) ? html`<a class="row" href="#/${at.run}/trajectories?where=version%3D%3D${v.version}">${v.version}</a>` : v.version}</td><td>${fmt(v.num)}</td><td>${fmt(v.reward)}</td><td>${fmt(v.tokens, 1)}</td></tr>`)}</tbody></table></div>` : nothing}
    ${found.steps ? html`<p class="soft">The steps at which sampler and learner disagree most about the same tokens (nats per token)${found.looked < found.num_steps ? `, of ${fmt(found.looked)} evenly spaced steps of ${fmt(found.num_steps)}` : ""}.</p><div class="card scroll" tabindex="0" role="region" aria-label="Steps"><table><thead><tr><th>step</th><th>sampler gap</th></tr></thead>
      <tbody>${found.steps.map(s => html`<tr><td>${link(at.run, "steps", s.step, s.step, { row: true })}</td><td>${fmt(s.gap, 6)}</td></tr>`)}</tbody></table></div>` : nothing}`);
  if (!found.versions?.length || isFlat(line("reward"))) return {};
  const pick = x => { if (!versions || versions.has(x)) location.hash = `/${at.run}/trajectories?where=version%3D%3D${x}`; };
  let chart = null;
  const again = () => { chart?.destroy(); chart = plot(box(), line("reward"), { sync: "version", onPick: pick }); };
  again(); addEventListener("resize", again);
  return { leave: () => { removeEventListener("resize", again); chart.destroy(); } };
}

const STATES = { running: "good", ended: "", stopped: "bad" };

export async function healthPage(at, state, draw) {
  const paint = health => draw(html`<h1>Health</h1>
    ${health.state ? html`<p class="facts"><span class="chip ${STATES[health.state] ?? ""}">${health.state}</span>${health.since ? html`<span>since ${ago(health.since).replace(" ago", "")}</span>` : nothing}${health.bytes ? html`<span>${bytes(health.bytes)} on disk${health.bytes_per_hour && health.state === "running" ? `, ${bytes(health.bytes_per_hour)} an hour` : ""}</span>` : nothing}
      ${health.waits_for?.map(what => html`<span>${visible(what)}</span>`)}</p>${health.alarms?.map(alarm => html`<p class=${alarm.severity === "page" ? "card bad" : "card"}>${alarm.severity === "page" ? "" : "note: "}${visible(alarm.text)}</p>`)}` : nothing}
    ${health.processes.length ? html`<div class="card scroll" tabindex="0" role="region" aria-label="Processes"><table><thead><tr><th class="l">process</th><th class="l">state</th><th>for</th><th>seen</th><th class="l">at</th></tr></thead>
      <tbody>${health.processes.map(p => html`<tr><td class="l">${p.name}</td><td class="l"><span class="chip ${p.alive ? "good" : health.state === "ended" ? "" : "bad"}">${p.alive ? p.state : health.state === "ended" ? "ended" : `not running (was ${p.state})`}</span></td><td>${p.since ? ago(p.since).replace(" ago", "") : "–"}</td><td>${p.seen ? ago(p.seen) : "–"}</td>
      <td class="l">${p.step !== undefined ? `step ${fmt(p.step)}` : p.rollouts !== undefined ? `${fmt(p.rollouts)} rollouts` : "–"}</td></tr>`)}</tbody></table></div>` : html`<p class="soft">This run has one process and keeps no heartbeats.</p>`}
    ${Object.entries(health.logs).map(([name, log]) => html`<h2>The end of ${name}</h2><pre class="card text2" tabindex="0" dir="auto" data-log=${name}>${visible(log || "empty")}</pre>`)}`);
  const bottom = () => document.querySelectorAll("pre[data-log]").forEach(log => { log.scrollTop = log.scrollHeight; });
  paint(await get(`runs/${at.run}/health`)); bottom();
  // A log that was read to its end stays at its end.
  const refresh = async () => {
    const ended = [...document.querySelectorAll("pre[data-log]")].every(log => log.scrollHeight - log.scrollTop - log.clientHeight < 40);
    paint(await get(`runs/${at.run}/health`));
    if (ended) bottom();
  };
  return { refresh };
}

export async function definitionPage(at, state, draw) {
  const fields = Object.entries(await get(`runs/${at.run}/definition`));
  draw(html`<h1>Definition</h1>${fields.length ? html`<div class="card scroll" tabindex="0" role="region" aria-label="Fields"><table class="fields"><tbody>${fields.map(([name, value]) => html`<tr><th class="l" scope="row">${name}</th><td class="text"><div>${value === null ? "none" : visible(String(value))}</div></td></tr>`)}</tbody></table></div>`
    : html`<p class="soft">A store without a run has no definition.</p>`}`);
}
