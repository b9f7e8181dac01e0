// A group, member beside member; what a step learned from; a prompt over time and across runs.
import { html, nothing } from "lit-html";
import { count, fmt, get, isReport, short, there, visible } from "view/api.js";
import { plot } from "view/chart.js";
import { wordDiff } from "view/diff.js";
import { title } from "view/titles.js";
import { finish, link, rowsTable } from "view/trajectories.js";

const UNKNOWN = "the ledger does not record which trajectories had a gradient";
const LEFT_OUT = { failed: "without a reward", waiting: "of incomplete groups", too_old: "too old", lost_weights: "of weights that no longer exist" };

// What the ledger says of a group: nothing is derived from rewards here.
const learned = (group, run) => group.uses.length ? group.uses.map(use => html`<span>${link(run, "steps", use.step, `step ${use.step}`)}: ${
  use.taught === null ? UNKNOWN : use.taught ? html`learned from <b>${fmt(use.taught)}</b> of ${fmt(use.taught + use.without_gradient)}`
    : html`<span class="chip warn">not learned from: no member has a gradient</span>`}</span>`) : html`<span>in no step</span>`;

export const rewardsOf = row => Object.entries(row.values ?? {}).filter(([, value]) => value !== null).map(([name, value]) =>
  html`<span>${name.replace("reward_", "")} <b>${fmt(value, 2)}</b></span>`);

export async function groupPage(at, state, draw) {
  const group = await get(`runs/${at.run}/groups/${at.id}`), rows = [...group.rows].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  const texts = rows.map(row => row.completion), most = Math.max(...rows.map(row => Math.abs(row.advantage ?? 0)), 1e-9);
  const returned = rows.some(row => row.return !== null && row.reward !== null && Math.abs(row.return - row.reward) > 1e-6);
  const pair = ["a", "b"].map((key, i) => rows.find(row => row.id === at.query.get(key)) ?? (i ? rows.at(-1) : rows[0])), isCompared = at.query.has("a");
  const compare = event => { const form = new FormData(event.currentTarget.form ?? event.currentTarget); event.preventDefault?.(); location.hash = `/${at.run}/group/${at.id}?a=${form.get("a")}&b=${form.get("b")}`; };
  const choice = (key, row) => html`<select name=${key} aria-label="${key === "a" ? "First" : "Second"} member">${rows.map(one => html`<option value=${one.id} ?selected=${one.id === row.id}>${short(one.id)}, reward ${fmt(one.reward, 2)}</option>`)}</select>`;
  const difference = () => html`<section class="card text2 diff" aria-label="Difference of two members" dir="auto">${wordDiff(pair[0].completion, pair[1].completion).map(([kind, text]) =>
    kind < 0 ? html`<del>${visible(text)}</del>` : kind > 0 ? html`<ins>${visible(text)}</ins>` : visible(text))}</section>`;
  let same = 0;
  while (texts.length > 1 && same < texts[0].length && texts.every(text => text[same] === texts[0][same])) same++;
  draw(html`<h1>Group ${at.id}</h1><p class="facts"><span>${count(group.num, "member")}</span><span>mean reward <b>${fmt(group.reward_mean, 2)}</b></span>
      ${group.num_failed ? html`<span class="bad">${fmt(group.num_failed)} without a reward</span>` : nothing}
      ${group.spread === false ? html`<span class="chip">no spread in its returns</span>` : nothing}${learned(group, at.run)}
      ${there(at.run, "prompts", rows[0].id) && !isReport ? html`<a href="#/${at.run}/prompt/${rows[0].id}">this prompt over time</a>` : nothing}</p>
    <div class="card text2" dir="auto">${visible(rows[0].prompt)}</div>
    ${rows[0].answer === null ? nothing : html`<p class="facts"><span>expected answer <b class="answer">${visible(rows[0].answer)}</b></span></p>`}
    ${rows.length < group.num ? html`<p class="soft">${fmt(rows.length)} of ${fmt(group.num)} members below; counts and means are of all. <a href="#/${at.run}/trajectories?where=group%3D%3D${at.id}">All of them</a></p>` : nothing}
    ${rows.length > 1 ? html`<form class="bar" @submit=${compare}><span>word by word:</span> ${choice("a", pair[0])} <span>against</span> ${choice("b", pair[1])} <button class="b">Compare</button></form>${isCompared ? difference() : nothing}` : nothing}
    <div class="members">${rows.map(row => { const a = row.advantage ?? 0; return html`<article class="card" aria-label="member ${short(row.id)}">
      <div class="cardhead"><h2>${link(at.run, "trajectories", row.id, short(row.id), { row: true })}</h2>${finish(row)}</div>
      <p class="facts"><span>reward <b>${fmt(row.reward, 2)}</b></span>${rewardsOf(row)}${returned ? html`<span>return <b>${fmt(row.return, 2)}</b></span>` : nothing}
        <span>advantage <b>${fmt(row.advantage, 2)}</b></span><span>version ${row.version ?? "–"}</span><span>${count(row.tokens, "token")}</span></p>
      <div class="adv" role="img" aria-label="advantage ${fmt(row.advantage, 2)}"><i .style=${`${a < 0 ? "right" : "left"}:50%;width:${Math.abs(a) / most * 50}%;background:var(--${a < 0 ? "cool" : "warm"})`}></i></div>
      <div class="text2 clip" tabindex="0" role="region" aria-label="completion" dir="auto"><span class="soft">${visible(row.completion.slice(0, same))}</span>${row.completion ? visible(row.completion.slice(same)) : html`<span class="soft">no text is stored; the tokens are on the page of the trajectory</span>`}</div></article>`; })}</div>`);
}

// A member by its reward, on one scale for the page: 0 is empty and 1 full, also where all are equal.
const brief = reward => reward === null ? "" : reward === 0 ? "0" : Number(reward.toPrecision(2)).toString().replace("0.", ".").slice(0, 4);
function cell(run, id, reward, taught, [low, high]) {
  const share = reward === null ? 0 : (reward - low) / (high - low), name = `trajectory ${short(id)}, reward ${fmt(reward, 2)}${taught === 0 ? ", no gradient" : ""}`;
  const look = ["cell", reward === null ? "none" : "", taught === 0 ? "idle" : ""].join(" "), style = reward === null ? "" : `background:color-mix(in srgb, var(--good) ${Math.round(45 * share)}%, var(--card))`;
  return there(run, "trajectories", id) ? html`<a class=${look} href="#/${run}/t/${id}" aria-label=${name} title=${name} data-reward=${brief(reward)} .style=${style}></a>`
    : html`<span class=${look} role="img" aria-label=${name} title=${name} data-reward=${brief(reward)} .style=${style}></span>`;
}

const interval = figures => figures["evaluation/reward_low"] == null ? "" : ` (${fmt(figures["evaluation/reward_low"])} to ${fmt(figures["evaluation/reward_high"])})`;

function evaluation(run, id, one) {
  const store = `${parseInt(run)}~${one.store}`, all = `#/${store}/trajectories?where=version%3D%3D${id}`;
  const figures = Object.entries(one.figures).filter(([name, value]) => value !== null && !/reward_(low|high)$/.test(name));
  return html`<h2>Evaluation of the weights after this step: <a href=${all}>${visible(one.name ?? one.store)}</a></h2>
    <p class="facts">${figures.map(([name, value]) => html`<span>${name.replace("evaluation/", "").replaceAll("_", " ")} <b>${fmt(value)}</b>${name === "evaluation/reward" ? interval(one.figures) : ""}</span>`)}</p>
    <details><summary>${one.rows.length < one.num ? `the first ${fmt(one.rows.length)} of ` : ""}${count(one.num, "row")}</summary>${rowsTable(store, one.rows)}
    ${one.rows.length < one.num ? html`<p><a href=${all}>all ${fmt(one.num)}</a></p>` : nothing}</details>`;
}

export async function stepPage(at, state, draw) {
  const offset = Number(at.query.get("offset") ?? 0), step = await get(`runs/${at.run}/steps/${at.id}${offset ? `?offset=${offset}` : ""}`), id = step.step;
  const rewards = step.groups.flatMap(group => group.rewards).filter(x => x !== null), lowest = Math.min(0, ...rewards), highest = Math.max(...rewards, lowest);
  const scale = [lowest, lowest === 0 && highest <= 1 ? 1 : highest > lowest ? highest : lowest + 1], end = offset + step.groups.length;
  const units = state.units ??= (await get(`runs/${at.run}/metrics`)).units;
  draw(html`<h1>Step ${fmt(id)}</h1>
    <div class="bar"><span class="facts"><span>took <b>${count(step.num, "trajectory")}</b> of <b>${count(step.num_groups, "group")}</b></span>
      ${step.num_taught === null ? html`<span>${UNKNOWN}</span>` : step.num_taught === step.num ? html`<span>learned from all</span>` : step.num_taught ? html`<span>learned from <b>${fmt(step.num_taught)}</b>; <b>${fmt(step.num - step.num_taught)}</b> have no gradient</span>`
        : html`<span class="chip warn">not learned from: no trajectory has a gradient</span>`}
      ${step.num_gone ? html`<span>${fmt(step.num_gone)} evicted since</span>` : nothing}
      ${Object.entries(step.left_out).map(([why, num]) => html`<span>excluded: <b>${fmt(num)}</b> ${LEFT_OUT[why] ?? why.replaceAll("_", " ")}</span>`)}</span><span class="push"></span>
      ${step.prev ? html`<a class="b previous" href="#/${at.run}/step/${step.prev}">‹ ${step.prev}</a>` : nothing}${step.next ? html`<a class="b next" href="#/${at.run}/step/${step.next}">${step.next} ›</a>` : nothing}</div>
    ${step.checkpoint ? html`<p class="facts"><span>${step.checkpoint.step === id ? "weights" : `nearest saved weights, of step ${fmt(step.checkpoint.step)}`}: <code>${visible(step.checkpoint.path)}</code></span></p>` : nothing}
    <details ?open=${innerWidth > 860}><summary><h2>Figures</h2></summary><div class="figures">${Object.entries(step.metrics).filter(([name]) => !["time", "step"].includes(name)).map(([name, value]) =>
      html`<div class="card" title=${units?.[name]?.[1] ?? ""}><div class="soft">${title(name)}</div><b class="num">${fmt(value)}</b> <span class="soft">${units?.[name]?.[0] ?? ""}</span></div>`)}</div></details>
    ${step.groups.length ? html`<h2>Groups</h2><p class="soft">Each cell is a trajectory with its reward, from ${fmt(scale[0], 2)} (empty) to ${fmt(scale[1], 2)} (full); dashed: no gradient; striped: no reward.</p>
    <div class="card scroll" tabindex="0" role="region" aria-label="Groups"><table class="groups"><thead><tr><th>group</th><th class="l">members' rewards</th><th>mean</th><th>advantages</th><th>learned from</th><th class="l">prompt</th></tr></thead>
      <tbody>${step.groups.map(one => html`<tr><td data-l="group">${one.group === null ? "none" : link(at.run, "groups", one.group, one.group, { row: true })}</td>
      <td class="cells">${one.ids.map((member, i) => cell(at.run, member, one.rewards[i], one.taught?.[i], scale))}${one.num > one.ids.length ? html` and ${fmt(one.num - one.ids.length)} more` : nothing}</td>
      <td data-l="mean">${fmt(one.reward_mean, 2)}</td><td data-l="advantages">${one.advantages ? one.advantages[0] === one.advantages[1] ? fmt(one.advantages[0], 2) : `${fmt(one.advantages[0], 2)} … ${fmt(one.advantages[1], 2)}` : "–"}</td>
      <td data-l="learned from">${one.num_taught === null ? "?" : `${fmt(one.num_taught)} of ${fmt(one.num)}`}</td>
      <td class="text"><div dir="auto">${visible(one.prompt)}</div></td></tr>`)}</tbody></table></div>
    ${offset || end < step.num_groups_here ? html`<div class="bar">${offset ? html`<a class="b" href="#/${at.run}/step/${id}?offset=${Math.max(0, offset - 100)}">‹ before</a>` : nothing}<span class="num">groups ${fmt(offset + 1)}–${fmt(end)} of ${fmt(step.num_groups_here)}</span>
      ${end < step.num_groups_here && !isReport ? html`<a class="b" href="#/${at.run}/step/${id}?offset=${end}">after ›</a>` : nothing}${isReport ? html`<span class="soft">all groups: rlhf-pipeline view RUN</span>` : nothing}</div>` : nothing}`
      : isReport && step.num ? html`<p class="card">This report does not contain the groups of this step. It contains the groups of ${step.near?.map(near => html`<a href="#/${at.run}/step/${near}">step ${near}</a> `)}. To see all groups: rlhf-pipeline view RUN</p>` : nothing}
    ${step.evaluations.map(one => evaluation(at.run, id, one))}`);
}

export async function promptPage(at, state, draw) {
  const found = await get(`runs/${at.run}/prompts/${at.id}`), runs = found.runs.filter(run => run.num);
  const lines = runs.map(run => ({ name: run.name, xs: run.versions.map(v => v.version), ys: run.versions.map(v => v.reward) })), moves = new Set(lines.flatMap(line => line.xs)).size > 1;
  draw(html`<h1>A prompt over time</h1><div class="card text2" dir="auto">${visible(found.prompt)}</div>
    ${moves ? html`<section class="card gap"><h2>Mean reward by policy version</h2><div id="curve"></div></section>` : nothing}
    ${runs.map(run => html`<h2>${visible(run.name)}: ${count(run.num, "trajectory")}</h2><div class="card scroll" tabindex="0" role="region" aria-label="Versions of ${visible(run.name)}"><table><thead><tr><th>version</th><th>trajectories</th><th>reward</th><th>best</th></tr></thead>
      <tbody>${run.versions.slice(-50).map(v => html`<tr><td><a class="row" href="#/${run.key}/trajectories?prompt_of=${run.newest}&where=version%3D%3D${v.version}">${v.version}</a></td><td>${fmt(v.num)}</td><td>${fmt(v.reward)}</td><td>${fmt(v.best)}</td></tr>`)}</tbody></table></div>
      <p><a href="#/${run.key}/trajectories?prompt_of=${run.newest}">all ${fmt(run.num)}</a>${run.versions.length > 50 ? html` · the newest 50 of ${fmt(run.versions.length)} versions` : nothing}</p>`)}`);
  let chart = null;
  const again = () => { chart?.destroy(); chart = plot(document.getElementById("curve"), lines, { sync: "version", points: true }); };
  if (moves) { again(); addEventListener("resize", again); }
  return { leave: () => { removeEventListener("resize", again); chart?.destroy(); } };
}
