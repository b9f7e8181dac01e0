// A group, member beside member; and what a step learned from.
import { html, nothing } from "lit-html";
import { fmt, get, short, visible } from "view/api.js";
import { finish, rowsTable } from "view/trajectories.js";

const mean = xs => xs.length ? xs.reduce((a, b) => a + b, 0) / xs.length : null;
const known = (rows, name) => rows.map(row => row[name]).filter(x => x !== null);

export async function groupPage(at, state, draw) {
  const group = await get(`runs/${at.run}/groups/${at.id}`), rows = [...group.rows].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  const texts = rows.map(row => row.completion), most = Math.max(...rows.map(row => Math.abs(row.advantage ?? 0)), 1e-9);
  let same = 0;
  while (texts.length > 1 && same < texts[0].length && texts.every(text => text[same] === texts[0][same])) same++;
  draw(html`<h1>Group ${at.id}</h1><p class="facts"><span>${fmt(group.num)} members</span><span>mean reward <b>${fmt(group.reward_mean, 2)}</b></span>
      ${new Set(known(rows, "reward")).size === 1 ? html`<span class="chip">all equal: no advantage, nothing learned</span>` : nothing}</p>
    <div class="card text2" dir="auto">${visible(rows[0].prompt)}</div>
    <div class="members">${rows.map(row => { const a = row.advantage ?? 0; return html`<article class="card" aria-label="member ${short(row.id)}">
      <div class="cardhead"><h2><a class="row" href="#/${at.run}/t/${row.id}">${short(row.id)}</a></h2>${finish(row)}</div>
      <p class="facts"><span>reward <b>${fmt(row.reward, 2)}</b></span><span>advantage <b>${fmt(row.advantage, 2)}</b></span><span>version ${row.version ?? "–"}</span><span>${fmt(row.tokens)} tokens</span></p>
      <div class="adv" role="img" aria-label="advantage ${fmt(row.advantage, 2)}"><i .style=${`${a < 0 ? "right" : "left"}:50%;width:${Math.abs(a) / most * 50}%;background:var(--${a < 0 ? "cool" : "warm"})`}></i></div>
      <div class="text2 clip" tabindex="0" role="region" aria-label="completion" dir="auto"><span class="soft">${visible(row.completion.slice(0, same))}</span>${visible(row.completion.slice(same))}</div></article>`; })}</div>`);
}

const cell = (run, row, low, high) => {
  const share = row.reward === null ? 0 : high > low ? (row.reward - low) / (high - low) : 0.5;
  return html`<a class="cell ${row.reward === null ? "none" : ""}" href="#/${run}/t/${row.id}" aria-label="trajectory ${short(row.id)}, reward ${fmt(row.reward, 2)}" title="reward ${fmt(row.reward, 2)}"
    .style=${row.reward === null ? "" : `background:color-mix(in srgb, var(--good) ${Math.round(100 * share)}%, var(--line))`}></a>`;
};

export async function stepPage(at, state, draw) {
  const step = await get(`runs/${at.run}/steps/${at.id}`), groups = new Map(), rewards = known(step.rows, "reward");
  for (const row of step.rows) groups.set(row.group, [...groups.get(row.group) ?? [], row]);
  const low = Math.min(...rewards), high = Math.max(...rewards), id = step.step, last = step.last;
  const left = ["num_dropped", "num_too_old", "num_without_spread", "num_failed"].filter(name => step.metrics[name] ?? step.ledger[name]);
  draw(html`<h1>Step ${fmt(id)}</h1>
    <div class="bar"><span class="facts"><span>learned from <b>${fmt(step.num)}</b> trajectories of <b>${fmt(groups.size)}</b> groups</span>${step.rows.length < step.num - step.num_gone ? html`<span>${fmt(step.rows.length)} shown</span>` : nothing}
      ${step.num_gone ? html`<span>${fmt(step.num_gone)} evicted since</span>` : nothing}${left.map(name => html`<span>${name.replaceAll("_", " ")} ${fmt(step.metrics[name] ?? step.ledger[name])}</span>`)}</span><span class="push"></span>
      ${id > 1 ? html`<a class="b previous" href="#/${at.run}/step/${id - 1}">‹ ${id - 1}</a>` : nothing}${id < last ? html`<a class="b next" href="#/${at.run}/step/${id + 1}">${id + 1} ›</a>` : nothing}</div>
    <details ?open=${innerWidth > 860}><summary><h2>Figures</h2></summary><div class="figures">${Object.entries(step.metrics).filter(([name]) => !["time", "step"].includes(name)).map(([name, value]) =>
      html`<div class="card"><div class="soft">${name}</div><b class="num">${fmt(value)}</b></div>`)}</div></details>
    <h2>Groups</h2><div class="card scroll" tabindex="0" role="region" aria-label="Groups"><table><thead><tr><th>group</th><th class="l">members' rewards</th><th>mean</th><th>advantages</th><th class="l">prompt</th></tr></thead>
      <tbody>${[...groups].map(([group, rows]) => { const a = known(rows, "advantage"); return html`<tr><td>${group === null ? "–" : html`<a class="row" href="#/${at.run}/group/${group}">${group}</a>`}</td><td class="cells">${rows.map(row => cell(at.run, row, low, high))}</td>
      <td>${fmt(mean(known(rows, "reward")), 2)}</td><td>${a.length ? `${fmt(Math.min(...a), 2)} … ${fmt(Math.max(...a), 2)}` : "–"}</td><td class="text"><div dir="auto">${visible(rows[0].prompt)}</div></td></tr>`; })}</tbody></table></div>
    ${step.evaluations.map(one => html`<h2>Evaluation of the weights after this step: <a href="#/${parseInt(at.run)}~${one.store}/trajectories?where=version%3D%3D${id}">${one.store}</a></h2>
      <p class="facts">${Object.entries(one.figures).map(([name, value]) => html`<span>${name.replace("evaluation/", "").replaceAll("_", " ")} <b>${fmt(value)}</b></span>`)}</p>${rowsTable(`${parseInt(at.run)}~${one.store}`, one.rows)}`)}`);
}
