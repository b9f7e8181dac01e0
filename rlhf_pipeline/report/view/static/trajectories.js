// All trajectories: search, filters, order, pages.
import { html, nothing } from "lit-html";
import { fmt, get, isReport, short, visible } from "view/api.js";

const LIMIT = 50;
const COLUMNS = [["id", "id"], ["reward", "reward"], ["advantage", "adv."], ["version", "version"], ["group", "group"]];

export function hit(text, wanted) {
  const at = wanted ? text.toLowerCase().indexOf(wanted.toLowerCase()) : -1;
  return at < 0 ? visible(text) : html`${visible(text.slice(0, at))}<mark>${visible(text.slice(at, at + wanted.length))}</mark>${visible(text.slice(at + wanted.length))}`;
}

export const finish = row => html`<span class="chip ${row.finish === "failed" || row.failure ? "bad" : ""}">${visible(row.failure ?? (row.finish || "–"))}</span>${
  row.evaluation ? html` <span class="chip">evaluation</span>` : nothing}${row.trusted === false ? html` <span class="chip bad">untrusted</span>` : nothing}`;

export const rowsTable = (run, rows, { head = null, text = "", column = "completion" } = {}) => html`
  <div class="card scroll" tabindex="0" role="region" aria-label="Trajectories"><table class="rows"><thead><tr>${head ?? COLUMNS.map(([, name]) => html`<th>${name}</th>`)}
    <th>tokens</th><th class="l">finish</th><th class="l">prompt and completion</th></tr></thead><tbody>${rows.map(row => html`<tr>
    <td data-l="id"><a class="row" href="#/${run}/t/${row.id}" aria-label="trajectory ${short(row.id)}">${short(row.id)}</a></td><td data-l="reward">${fmt(row.reward, 2)}</td>
    <td data-l="adv.">${fmt(row.advantage, 2)}</td><td data-l="version">${row.version ?? "–"}</td>
    <td data-l="group">${row.group === null ? "–" : html`<a href="#/${run}/group/${row.group}" aria-label="group ${row.group}">${row.group}</a>`}</td><td data-l="tokens">${fmt(row.tokens)}</td>
    <td class="l">${finish(row)}</td><td class="text"><div class="soft" dir="auto">${column === "prompt" ? hit(row.prompt, text) : visible(row.prompt)}</div>
    <div dir="auto">${column === "completion" ? hit(row.completion, text) : visible(row.completion)}${row.error ? html`<span class="bad"> ${visible(row.error)}</span>` : nothing}</div></td></tr>`)}</tbody></table></div>`;

export async function trajectoriesPage(at, state, draw) {
  const query = at.query, sort = query.get("sort") ?? "-id", offset = Number(query.get("offset") ?? 0);
  const text = query.get("text") ?? "", where = query.getAll("where"), column = query.get("in") ?? "completion";
  const to = change => {
    const next = new URLSearchParams(query);
    for (const key of ["offset", "snapshot", "all"]) next.delete(key);
    for (const [key, value] of Object.entries(change)) {
      next.delete(key);
      for (const one of [value].flat()) if (one !== "" && one !== null && one !== undefined) next.append(key, one);
    }
    return `#/${at.run}/trajectories?${next}`;
  };
  const asked = new URLSearchParams(where.map(one => ["where", one]));
  const [found, facets] = await Promise.all([get(`runs/${at.run}/trajectories?${query}`), get(`runs/${at.run}/facets${isReport ? "" : `?${asked}`}`)]);
  const go = event => {
    event.preventDefault();
    const form = new FormData(event.target), filters = form.get("where").split(",").map(one => one.trim()).filter(Boolean);
    location.hash = to({ text: form.get("text"), in: form.get("in") === "prompt" ? "prompt" : "", where: filters }).slice(1);
  };
  const head = COLUMNS.map(([key, name]) => {
    const down = sort === `-${key}`, up = sort === key;
    return html`<th aria-sort=${up ? "ascending" : down ? "descending" : "none"}><button @click=${() => { location.hash = to({ sort: down ? key : `-${key}` }).slice(1); }}>${name} ${up ? "▲" : down ? "▼" : ""}</button></th>`;
  });
  const chip = (name, filters, num) => html`<a class="chip" href=${to({ where: filters })} aria-current=${JSON.stringify(filters) === JSON.stringify(where) ? "true" : nothing}>${name}${
    num === null ? "" : html` <b>${fmt(num)}</b>`}</a>`;
  const older = offset + found.rows.length < found.matched;
  draw(html`<h1>Trajectories</h1>
    <form class="filters" role="search" @submit=${go}><input type="search" name="text" .value=${text} placeholder="search in texts" aria-label="Search in texts" autocomplete="off">
      <select name="in" aria-label="Search in"><option value="completion" ?selected=${column !== "prompt"}>completions</option><option value="prompt" ?selected=${column === "prompt"}>prompts</option></select>
      <input class="filter" name="where" .value=${where.join(", ")} placeholder="filter: reward<0.5, version>=100" aria-label="Filters, separated by commas" autocomplete="off"><button class="b">Search</button></form>
    <div class="bar">${chip("all", [], null)}${facets.kinds.map(kind => chip(visible(kind.name), [kind.where], kind.num))}
      <span class="push soft num" role="status">${found.complete ? "" : "at least "}${fmt(found.matched)} of ${fmt(found.total)}${
        found.complete ? "" : html` · <a href=${to({ all: "1" })}>search all</a>`}</span></div>
    ${found.rows.length ? rowsTable(at.run, found.rows, { head, text, column }) : html`<p class="card">None of ${fmt(found.total)} trajectories. <a href="#/${at.run}/trajectories">Show all</a></p>`}
    <div class="bar"><a class="b previous" href=${offset ? to({ offset: Math.max(0, offset - LIMIT) || "", snapshot: found.snapshot }) : nothing} aria-disabled=${offset ? nothing : "true"}>‹ before</a>
      <span class="num">${fmt(found.rows.length ? offset + 1 : 0)}–${fmt(offset + found.rows.length)}</span>
      <a class="b next" href=${older ? to({ offset: offset + LIMIT, snapshot: found.snapshot }) : nothing} aria-disabled=${older ? nothing : "true"}>after ›</a></div>`);
}
