// All trajectories: search, filters, columns, order, pages, export.
import { html, nothing } from "lit-html";
import { conditions, count, fmt, get, isReport, quoted, short, there, visible } from "view/api.js";

const LIMIT = 50;
const BASIC = ["task_reward", "advantage", "policy_version", "group_id", "num_completion_tokens", "finish_reason"].map(name => ({ name,
  label: { task_reward: "reward", policy_version: "version", group_id: "group", num_completion_tokens: "tokens", finish_reason: "finish" }[name] ?? name }));

export function hit(text, wanted) {
  const at = wanted ? text.toLowerCase().indexOf(wanted.toLowerCase()) : -1;
  return at < 0 ? visible(text) : html`${visible(text.slice(0, at))}<mark>${visible(text.slice(at, at + wanted.length))}</mark>${visible(text.slice(at + wanted.length))}`;
}

export const finish = row => html`<span class="chip ${row.finish === "failed" || row.failure ? "bad" : ""}">${visible(row.failure ?? (row.finish || "–"))}</span>${
  row.evaluation ? html` <span class="chip">evaluation</span>` : nothing}${row.trusted === false ? html` <span class="chip bad">untrusted</span>` : nothing}`;

// A link, or the same as text where a report does not have the page.
export const link = (run, what, id, text, options = {}) => {
  const page = { trajectories: "t", groups: "group", steps: "step", prompts: "prompt" }[what];
  return there(run, what, id) ? html`<a class=${options.row ? "row" : nothing} href="#/${run}/${page}/${id}" aria-label=${options.label ?? nothing}>${text}</a>` : html`<span>${text}</span>`;
};

const date = seconds => seconds === null ? "–" : new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ");
const CELLS = {
  task_reward: (run, row) => fmt(row.reward, 2),
  advantage: (run, row) => fmt(row.advantage, 2),
  policy_version: (run, row) => row.version ?? "–",
  group_id: (run, row) => row.group === null ? "–" : link(run, "groups", row.group, row.group, { label: `group ${row.group}` }),
  num_completion_tokens: (run, row) => fmt(row.tokens),
  finish_reason: (run, row) => finish(row),
  created_at: (run, row) => date(row.at),
};
const cellOf = (run, row, name) => CELLS[name]?.(run, row) ?? (typeof row.values?.[name] === "string" ? visible(row.values[name]) || "–" : fmt(row.values?.[name], 3));

export const rowsTable = (run, rows, { head = null, fields = BASIC, text = "", column = "completion" } = {}) => html`
  <div class="card scroll" tabindex="0" role="region" aria-label="Trajectories"><table class="rows"><thead><tr>${head ?? html`<th>id</th>${fields.map(field => html`<th>${field.label}</th>`)}`}
    <th class="l">prompt and completion</th></tr></thead><tbody>${rows.map(row => html`<tr>
    <td data-l="id">${link(run, "trajectories", row.id, short(row.id), { row: true, label: `trajectory ${short(row.id)}` })}</td>${fields.map(field => html`<td data-l=${field.label}
      class=${field.name === "finish_reason" ? "l" : nothing}>${cellOf(run, row, field.name)}</td>`)}
    <td class="text"><div class="soft" dir="auto">${column === "prompt" ? hit(row.prompt, text) : visible(row.prompt)}</div>
    <div dir="auto">${column === "completion" ? hit(row.completion, text) : visible(row.completion)}${row.error ? html`<span class="bad"> ${visible(row.error)}</span>` : nothing}</div></td></tr>`)}</tbody></table></div>`;

export async function trajectoriesPage(at, state, draw) {
  const query = at.query, sort = query.get("sort") ?? "-id", offset = Number(query.get("offset") ?? 0), place = `runs/${at.run}`;
  const text = query.get("text") ?? "", where = query.getAll("where"), column = query.get("in") ?? "completion", prompt = query.get("prompt_of");
  const fields = await get(`${place}/fields`), cols = query.get("cols");
  const shown = cols === null ? fields.filter(field => field.shown) : fields.filter(field => cols.split(",").includes(field.name));
  let found = null, kinds = null, problem = null, stopped = false, alive = true;

  const to = change => {
    const next = new URLSearchParams(query);
    for (const key of ["offset", "snapshot"]) next.delete(key);
    for (const [key, value] of Object.entries(change)) {
      next.delete(key);
      for (const one of [value].flat()) if (one !== "" && one !== null && one !== undefined) next.append(key, one);
    }
    return `#/${at.run}/trajectories?${next}`;
  };
  const go = change => { location.hash = to(change).slice(1); };
  const question = (more = {}) => {
    const next = new URLSearchParams(query);
    next.delete("cols");
    for (const field of shown) next.append("columns", field.name);
    for (const [key, value] of Object.entries(more)) next.set(key, value);
    return next;
  };
  const submit = event => {
    event.preventDefault();
    const form = new FormData(event.target);
    go({ text: form.get("text"), in: form.get("in") === "prompt" ? "prompt" : "", where: conditions(form.get("where")) });
  };
  const add = event => {
    event.preventDefault();
    const form = new FormData(event.target), value = form.get("value").trim();
    const isText = ["prompt", "completion"].includes(form.get("field")) || fields.find(field => field.name === form.get("field"))?.kind === "text";
    if (value) go({ where: [...where, `${form.get("field")}${form.get("sign")}${isText && value !== "null" ? JSON.stringify(value) : quoted(value)}`] });
  };
  const head = [{ name: "id", label: "id", kind: "number" }, ...shown].map(field => {
    const key = { task_reward: "reward", policy_version: "version", group_id: "group" }[field.name] ?? field.name, down = sort === `-${key}`, up = sort === key;
    return html`<th class=${field.kind === "text" ? "l" : nothing} aria-sort=${up ? "ascending" : down ? "descending" : nothing}>${field.kind === "text" ? field.label
      : html`<button @click=${() => go({ sort: down ? key : `-${key}` })}>${field.label} ${up ? "▲" : down ? "▼" : ""}</button>`}</th>`;
  });
  const chip = (name, filters, num) => html`<a class="chip" href=${to({ where: filters })} aria-current=${JSON.stringify(filters) === JSON.stringify(where) ? "true" : nothing}>${name}${
    num === null ? "" : html` <b>${fmt(num)}</b>`}</a>`;
  const looked = () => found.complete ? nothing : html` · ${stopped ? "stopped: " : ""}searched the newest ${fmt(found.total - found.scanned_to)} of ${fmt(found.total)}${
    stopped ? html` · <button class="link" @click=${() => { stopped = false; search(); }}>continue</button>` : html` · <button class="link" @click=${stop}>stop (Esc)</button>`}`;
  const said = () => found === null ? (problem ? "" : "searching…") : html`${found.complete ? "" : "at least "}${fmt(found.matched)} of ${fmt(found.total)}${
    isReport ? html` in this report; the run has ${fmt(found.of)}` : looked()}`;
  const none = () => found.complete || stopped ? html`<p class="card">None of ${isReport ? `the ${count(found.total, "trajectory")} in this report (the run has ${fmt(found.of)}; rlhf-pipeline view RUN shows all)`
    : `${fmt(found.complete ? found.total : found.total - found.scanned_to)} trajectories`}. <a href="#/${at.run}/trajectories">Show all</a></p>` : html`<p class="card">No match yet; still searching…</p>`;
  const columns = () => html`<details class="menu"><summary class="b">columns</summary><fieldset class="card"><legend class="hidden">Columns of the table</legend>${fields.map(field =>
    html`<label><input type="checkbox" .checked=${shown.includes(field)} @change=${event => {
      const names = fields.filter(one => one === field ? event.target.checked : shown.includes(one)).map(one => one.name);
      go({ cols: names.join(",") || "none", offset: offset || "" }); }}> ${field.label}${field.label === field.name ? "" : html` <span class="soft">${field.name}</span>`}</label>`)}</fieldset></details>`;
  const builder = () => html`<details class="menu"><summary class="b">add a filter</summary><form class="card" @submit=${add}><select name="field" aria-label="Column">${
    [...fields.map(field => field.name), "prompt", "completion"].map(name => html`<option>${name}</option>`)}</select>
    <select name="sign" aria-label="Comparison">${["==", "!=", ">=", "<=", ">", "<", "~"].map(sign => html`<option>${sign}</option>`)}</select>
    <input name="value" placeholder="value" aria-label="Value" autocomplete="off"><button class="b">Add</button>
    <p class="soft">null: no value; 0.2..0.8: a range; ~: contains this text; enclose text with commas in quotes</p></form></details>`;
  const more = kind => `/export/${at.run}.${kind}?${new URLSearchParams([...question()].filter(([key]) => ["text", "in", "where", "prompt_of"].includes(key)))}`;
  const exports = () => isReport || !found?.matched ? nothing : html`<details class="menu"><summary class="b">export</summary><div class="card"><a href=${more("jsonl")} download>JSONL</a>
    <a href=${more("parquet")} download>Parquet</a><p class="soft">all matching rows with all columns and tokens</p></div></details>`;
  const paint = () => {
    if (!alive) return;
    const older = found && offset + found.rows.length < found.matched;
    draw(html`<h1>Trajectories</h1>
    <form class="filters" role="search" @submit=${submit}><input type="search" name="text" .value=${text} placeholder="search in texts" aria-label="Search in texts" autocomplete="off">
      <select name="in" aria-label="Search in"><option value="completion" ?selected=${column !== "prompt"}>completions</option><option value="prompt" ?selected=${column === "prompt"}>prompts</option></select>
      <input class="filter" name="where" .value=${where.join(", ")} placeholder="filter: reward<0.5, version>=100" aria-label="Filters, separated by commas" autocomplete="off"><button class="b">Search</button></form>
    ${problem ? html`<p class="card bad" role="alert">${problem}</p>` : nothing}
    ${prompt === null ? nothing : html`<p class="facts"><span>only the prompt of <a href="#/${at.run}/t/${prompt}">${short(prompt)}</a></span><a href=${to({ prompt_of: "" })}>all prompts</a></p>`}
    <div class="bar">${builder()}${columns()}${exports()}<span class="push soft num" role="status" aria-busy=${found || problem ? "false" : "true"}>${said()}</span></div>
    <div class="bar chips">${chip("all", [], null)}${kinds?.map(kind => chip(visible(kind.name), [kind.where], kind.num)) ?? html`<span class="soft">counting…</span>`}</div>
    ${found === null ? nothing : found.rows.length ? rowsTable(at.run, found.rows, { head, fields: shown, text, column }) : none()}
    ${found === null ? nothing : html`<div class="bar"><a class="b previous" href=${offset ? to({ offset: Math.max(0, offset - LIMIT) || "", snapshot: found.snapshot }) : nothing} aria-disabled=${offset ? nothing : "true"}>‹ before</a>
      <span class="num">${fmt(found.rows.length ? offset + 1 : 0)}–${fmt(offset + found.rows.length)}</span>
      <a class="b next" href=${older ? to({ offset: offset + LIMIT, snapshot: found.snapshot }) : nothing} aria-disabled=${older ? nothing : "true"}>after ›</a></div>`}`);
  };
  const tally = async () => {
    const chosen = new URLSearchParams([...query].filter(([key]) => ["text", "in", "where", "prompt_of"].includes(key)));
    if (found) chosen.set("snapshot", found.snapshot);
    try { kinds = (await get(`${place}/facets?${chosen}`)).kinds; } catch { kinds = []; }
    paint();
  };
  const search = async () => {
    try {
      found = await get(`${place}/trajectories?${question(found ? { snapshot: found.snapshot } : {})}`);
      while (alive && !stopped && !found.complete) {
        paint();
        found = await get(`${place}/trajectories?${question({ snapshot: found.snapshot, all: 1 })}`);
      }
    } catch (error) { problem = error.message; }
    paint();
    if (alive && !problem && (found.complete || stopped)) await tally();
    else if (alive && problem) { kinds = []; paint(); }
  };
  const stop = () => { stopped = true; paint(); };
  const onKey = event => { if (event.key === "Escape" && found && !found.complete) stop(); };
  addEventListener("keydown", onKey);
  paint();
  search();  // goes on while the page is looked at
  return { leave: () => { alive = false; removeEventListener("keydown", onKey); } };
}
