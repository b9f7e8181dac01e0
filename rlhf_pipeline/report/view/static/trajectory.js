// One trajectory: its facts, its turns, every token with its numbers.
import { html, nothing } from "lit-html";
import { count, fmt, get, isReport, named, short, visible } from "view/api.js";
import { isFlat, plot } from "view/chart.js";
import { rewardsOf } from "view/group.js";
import { markup } from "view/markup.js";
import { hasTools, message, withTools } from "view/tools.js";
import { finish, link } from "view/trajectories.js";

const WINDOW = 4096;
const both = (a, b, i) => a && b && a[i] !== null && b[i] !== null && a[i] !== undefined && b[i] !== undefined;
// What tokens can be coloured by: the value at a place, and its shade from -1 (cool) over 0 (none) to 1 (warm).
const MEASURES = {
  surprise: { title: "probability", of: (t, i) => t.log_probs[i] == null ? null : Math.exp(t.log_probs[i]), shade: v => 1 - v, ends: ["surprised", "sure"], flip: true },
  kl: { title: "policy − reference", of: (t, i) => both(t.log_probs, t.ref, i) ? t.log_probs[i] - t.ref[i] : null, shade: v => v / 1.5, ends: ["reference prefers", "policy prefers"] },
  advantage: { title: "advantage", of: (t, i) => t.mask[i] ? t.advantage : null, shade: v => v / 2, ends: ["worse than its group", "better"] },
  ratio: { title: "ratio, newest use", of: (t, i) => both(t.policy, t.log_probs, i) ? Math.exp(t.policy[i] - t.log_probs[i]) : null, shade: v => Math.log(v) / 0.5, ends: ["now less likely", "more likely"] },
  entropy: { title: "entropy, newest use", of: (t, i) => t.entropy?.[i] ?? null, shade: v => v / 3, ends: ["certain", "uncertain"] },
};
const tint = shade => { const s = Math.max(-1, Math.min(1, shade)); return `background:color-mix(in srgb, var(--${s < 0 ? "cool" : "warm"}) ${Math.round(Math.abs(s) * 55)}%, transparent)`; };

export async function trajectoryPage(at, state, draw) {
  const first = Number(at.query.get("first") ?? 0), t = await get(`runs/${at.run}/trajectories/${at.id}${first ? `?first=${first}` : ""}`);
  const noted = isReport ? { path: null, notes: {} } : await get(`runs/${at.run}/notes`), note = noted.notes[t.id] ?? { text: "", labels: [] };
  let saved = "";
  const save = async event => {
    event.preventDefault();
    const form = new FormData(event.target), labels = form.get("labels").split(",").map(label => label.trim()).filter(Boolean);
    const reply = await fetch(`/notes/${at.run}/${t.id}`, { method: "POST", body: JSON.stringify({ text: form.get("text"), labels }) });
    if (reply.ok) Object.assign(note, { text: form.get("text"), labels });
    saved = reply.ok ? "saved" : (await reply.json()).error; paint();
  };
  const usable = Object.entries(MEASURES).filter(([, m]) => t.ids.some((_, i) => m.of(t, i) !== null));
  let by = usable.some(([key]) => key === at.query.get("color")) ? at.query.get("color") : usable[0]?.[0] ?? "surprise";
  let here = Math.min(Math.max(Number(at.query.get("token") ?? t.prompt_tokens) - first, 0), Math.max(t.ids.length - 1, 0)), chart = null;
  let shown = at.query.get("as") === "markdown";
  const role = i => t.mask[i] === null ? "unknown" : t.mask[i] ? "assistant" : i + first < t.prompt_tokens ? "prompt" : "reply";
  const style = i => { const v = t.mask[i] !== 0 ? MEASURES[by].of(t, i) : null; return v === null ? "" : tint(MEASURES[by].shade(v)); };
  const address = change => `#/${at.run}/t/${at.id}?${new URLSearchParams({ color: by, token: here + first, ...(first ? { first } : {}), ...(shown ? { as: "markdown" } : {}), ...change })}`;
  const body = text => html`<div class=${shown ? "markup" : "text2"} dir="auto">${shown ? markup(visible(text)) : visible(text)}</div>`;
  const uses = t.uses.map(use => html`<span>${use.without_gradient?.length ? html`no gradient in ` : html`learned in `}${link(at.run, "steps", use.step, `step ${use.step}`)}</span>`);
  const turned = Object.entries(t.turn_rewards), parts = Object.entries(t.components);
  const pick = (i, move = true) => {
    here = Math.max(0, Math.min(t.ids.length - 1, i)); history.replaceState(null, "", address({})); paint();
    if (move) document.getElementById(`t${here}`)?.scrollIntoView({ block: "nearest" });
  };
  const keys = event => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -1e9, End: 1e9 }[event.key];
    if (by) { event.preventDefault(); pick(here + by); }
  };
  const click = event => { const token = event.target.closest("[role=option]"); if (token) pick(Number(token.id.slice(1)), false); };
  const turns = [];
  t.pieces.forEach((_, i) => { if (!i || role(i) !== role(i - 1)) turns.push({ role: role(i), places: [] }); turns.at(-1).places.push(i); });
  const numbers = i => [["place", i + first], ["id", t.ids[i]], ["by", role(i)], ["probability", MEASURES.surprise.of(t, i)], ["log-prob", t.log_probs[i] ?? null],
    ...(t.ref ? [["reference", t.ref[i]], ["k1", MEASURES.kl.of(t, i)]] : []), ...(t.policy ? [["policy, newest use", t.policy[i]], ["ratio", MEASURES.ratio.of(t, i)]] : []),
    ...(t.entropy ? [["entropy", t.entropy[i]]] : []), ["advantage", t.mask[i] ? t.advantage : null],
    ...(t.spans.length && t.mask[i] ? [["version", t.spans.findLast(([from]) => from <= i + first)?.[1] ?? null]] : [])];
  const windows = t.num_tokens > WINDOW ? html`<div class="bar"><a class="b" href=${first ? address({ first: Math.max(0, first - WINDOW), token: Math.max(0, first - WINDOW) }) : nothing} aria-disabled=${first ? nothing : "true"}>‹ earlier tokens</a>
    <span class="num">${fmt(first)}–${fmt(first + t.ids.length - 1)} of ${fmt(t.num_tokens)}</span><a class="b" href=${first + WINDOW < t.num_tokens ? address({ first: first + WINDOW, token: first + WINDOW }) : nothing}>later tokens ›</a></div>` : nothing;
  const paint = () => draw(html`<h1>Trajectory ${short(t.id)}</h1>
    <p class="facts">${t.group === null ? "" : html`<span>group ${link(at.run, "groups", t.group, t.group)}</span>`}<span>version ${t.version ?? "–"}${t.newest ? `–${t.newest}` : ""}</span>
      <span>reward <b>${fmt(t.reward, 2)}</b></span>${rewardsOf(t)}${t.return === null || t.return === t.reward ? "" : html`<span title="the sum of the rewards that the advantage compares, including the KL penalty">return <b>${fmt(t.return, 2)}</b></span>`}<span>advantage <b>${fmt(t.advantage, 2)}</b></span>
      <span>${count(t.tokens, "token")}</span><span>${finish(t)}</span>${t.spread === false ? html`<span class="chip">no spread in its group</span>` : ""}
      ${t.answer === null ? "" : html`<span>expected answer <b class="answer">${visible(t.answer)}</b></span>`}${t.engine ? html`<span>${t.engine}${t.temperature === null ? "" : `, temperature ${fmt(t.temperature, 2)}`}</span>` : ""}
      ${uses.length ? uses : html`<span>in no step</span>`}${isReport ? nothing : html`<a href="#/${at.run}/prompt/${t.id}">this prompt over time</a>`}</p>
    ${parts.length || turned.length ? html`<p class="facts">${parts.flatMap(([name, of]) => Object.entries(of).map(([part, value]) => html`<span>${visible(`${name}: ${part}`)} <b>${fmt(value, 2)}</b></span>`))}
      ${turned.map(([name, values]) => html`<span>${name === "turn_rewards" ? "reward by turn" : `${visible(name.replace("turn_reward_", ""))} by turn`} <b>${values.map(value => fmt(value, 2)).join(", ")}</b></span>`)}</p>` : nothing}
    ${t.mask_known ? nothing : html`<p class="card" role="note">No mask was stored, so it is unknown which tokens after the prompt the policy sampled.</p>`}
    ${t.error ? html`<p class="card bad" role="alert">This trajectory failed: ${visible(t.error)}</p>` : nothing}
    <div class="bar">${usable.length ? html`<label>colour by <select @change=${event => { by = event.target.value; history.replaceState(null, "", address({})); paint(); curve(); }}>${usable.map(([key, m]) => html`<option value=${key} ?selected=${key === by}>${m.title}</option>`)}</select></label>` : nothing}
      <label class="check"><input type="checkbox" .checked=${shown} @change=${event => { shown = event.target.checked; history.replaceState(null, "", address({})); paint(); }}> Markdown and maths</label>
      <span class="push"></span>${[["prev", "‹ previous", "previous"], ["next", "next ›", "next"]].map(([key, name, kind]) => t[key] ? html`<a class="b ${kind}" href="#/${at.run}/t/${t[key]}?color=${by}">${name}</a>` : nothing)}</div>
    ${windows}<div class="split"><div>
      ${t.ids.length ? html`<div class="card tokens" role="listbox" tabindex="0" aria-label="Tokens; arrow keys move" aria-activedescendant="t${here}" @keydown=${keys} @click=${click}>${turns.map(turn =>
        html`<div role="group" aria-label=${turn.role}><b class="turn" aria-hidden="true">${turn.role}</b>${turn.places.map(i => html`<span id="t${i}" role="option" aria-label=${named(t.pieces[i])} aria-selected=${i === here}
          class=${t.mask[i] === 0 ? "other" : ""} .style=${style(i)}>${visible(t.pieces[i])}</span>`)}</div>`)}</div>`
        : html`<div class="card"><h2>Prompt</h2>${body(t.prompt)}<h2>Completion</h2>${withTools(t.completion, body)}</div>`}
      ${usable.length ? html`<section class="card gap"><h2>${MEASURES[by].title} over the tokens</h2><div id="curve"></div></section>` : nothing}
      ${t.messages ? html`<details class="card gap" ?open=${shown || hasTools(t.messages)}><summary>The conversation as messages: ${fmt(t.messages.length)}</summary>${t.messages.map(m => message(m, t.messages, body))}</details>` : nothing}
      ${t.ids.length && !(shown && t.messages) ? html`<details class="card gap" ?open=${shown}><summary>Texts as stored</summary><h2>Prompt</h2>${body(t.prompt)}<h2>Completion</h2>${withTools(t.completion, body)}</details>` : nothing}
      ${noted.path ? html`<details class="card gap" ?open=${note.text || note.labels.length}><summary>Note${note.labels.map(label => html` <span class="chip">${visible(label)}</span>`)}</summary><form class="note" @submit=${save}>
        <label>labels, separated by commas <input name="labels" .value=${note.labels.join(", ")} autocomplete="off"></label><label>note <textarea name="text" rows="3" .value=${note.text}></textarea></label>
        <button class="b">Save</button> <span role="status">${visible(saved)}</span><p class="soft">stored in ${visible(noted.path)}</p></form></details>` : nothing}
    </div>${t.ids.length ? html`<aside class="card side" aria-label="The chosen token"><details open><summary><h2>Token <code dir="auto">${named(t.pieces[here])}</code></h2></summary>
      <div aria-live="polite"><dl>${numbers(here).map(([name, value]) => html`<dt>${name}</dt><dd>${fmt(value, 4)}</dd>`)}</dl></div>
      ${usable.length ? html`<div class="scale" .style=${`background:linear-gradient(to ${MEASURES[by].flip ? "left" : "right"}, ${["surprise", "entropy"].includes(by) ? "transparent" : "color-mix(in srgb, var(--cool) 55%, transparent), transparent"}, color-mix(in srgb, var(--warm) 55%, transparent))`}></div>
      <div class="ends"><span>${MEASURES[by].ends[0]}</span><span>${MEASURES[by].ends[1]}</span></div>` : nothing}</details></aside>` : nothing}</div>`);
  const curve = () => {
    chart?.destroy(); chart = null;
    const box = document.getElementById("curve"), places = t.ids.map((_, i) => i).filter(i => t.mask[i] !== 0);
    const line = { xs: places.map(i => i + first), ys: places.map(i => MEASURES[by].of(t, i)), name: MEASURES[by].title };
    if (!box) return;
    box.dataset.flat = isFlat([line]) ? fmt(line.ys.find(y => y !== null) ?? null) : "";
    if (!box.dataset.flat) chart = plot(box, [line], { height: 130, sync: "token", onPick: x => pick(x - first) });
  };
  paint(); curve(); addEventListener("resize", curve);
  return { leave: () => { removeEventListener("resize", curve); chart?.destroy(); } };
}
