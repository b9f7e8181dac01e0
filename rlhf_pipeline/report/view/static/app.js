// The router, the header, and what keeps a page up to date. Pages are at hash addresses, so that a report has the same.
// A run is named by its place, and a store of its evaluations by 0~NAME.
import { html, render, nothing } from "lit-html";
import { ago, fmt, get, isReport, visible } from "view/api.js";
import { runsPage } from "view/runs.js";
import { trajectoriesPage } from "view/trajectories.js";
import { trajectoryPage } from "view/trajectory.js";
import { groupPage, promptPage, stepPage } from "view/group.js";
import { definitionPage, healthPage, listsPage } from "view/lists.js";

const root = document.getElementById("app");
const PAGES = { runs: runsPage, trajectories: trajectoriesPage, t: trajectoryPage, group: groupPage, step: stepPage,
  prompt: promptPage, lists: listsPage, health: healthPage, definition: definitionPage };
const KEYS = [["/", "search"], ["Esc", "stop a search"], ["j, k", "next, previous row"], ["Enter", "open the row"], ["← →", "previous, next token"],
  ["[ ]", "previous, next trajectory or step"], ["?", "this help"]];
const state = { runs: [], changes: [], seen: 0 };
let at = null, body = nothing, live = {}, visit = 0;

function route() {
  const [path, query] = location.hash.slice(2).split("?"), parts = path.split("/").filter(Boolean);
  const params = new URLSearchParams(query), place = parts.join("/") + (query ? `?${params}` : "");
  if (!parts.length || parts[0] === "runs") return { page: "runs", run: 0, query: params, place };
  return { place, run: parts[0].includes("~") ? parts[0] : Number(parts[0]), page: parts[1], id: parts[2], query: params };
}

function shell() {
  const here = parseInt(at.run), run = state.runs[here], changes = state.changes[here];
  const stored = changes?.watermark ?? run?.watermark, step = changes?.step ?? run?.step;
  const main = { t: "trajectories", group: "trajectories", prompt: "trajectories", step: "runs" }[at.page] ?? at.page;
  const links = [["runs", "Curves", "#/runs"], ["trajectories", "Trajectories"], ["lists", "Lists", `#/${at.run}/lists/failed`],
    ["health", "Health", `#/${here}/health`], ["definition", "Definition", `#/${here}/definition`]];
  return html`<a class="skip" href="#main" @click=${e => { e.preventDefault(); document.getElementById("main").focus(); }}>Skip to content</a>
    <header><strong>${visible(run?.name ?? "rlhf-pipeline")}</strong>
      <nav aria-label="Pages">${links.map(([page, name, to]) =>
        html`<a href=${to ?? `#/${at.run}/${page}`} aria-current=${main === page ? "page" : nothing}>${name}</a>`)}</nav>
      ${state.runs.length > 1 ? html`<label class="pick">run <select @change=${e => { location.hash = `/${e.target.value}/trajectories`; }}>
        ${state.runs.map((one, i) => html`<option value=${i} ?selected=${i === here}>${visible(one.name)}</option>`)}</select></label>` : nothing}
      <span class="live" id="live">${isReport ? html`report: a selection of ${fmt(stored)} trajectories` : html`<i class="dot"></i>${fmt(stored)} trajectories${
        step === null || step === undefined ? "" : `, step ${fmt(step)}`}${run?.updated ? `, ${ago(run.updated)}` : ""}`}</span>
      <span class="hidden" role="status" id="said"></span>
    </header><main id="main" tabindex="-1">${body}</main>
    <dialog id="help" aria-label="Keys"><h2>Keys</h2><dl>${KEYS.map(([key, what]) => html`<dt><kbd>${key}</kbd></dt><dd>${what}</dd>`)}</dl>
      <form method="dialog"><button class="b">Close</button></form></dialog>`;
}

// A page gives what ends it (`leave`) and what brings it up to date (`refresh`).
async function show() {
  const mine = ++visit, next = route();
  live.leave?.(); live = {};
  try {
    if (!state.runs.length) state.runs = await get("runs");
    if (!state.runs[parseInt(next.run)] || !PAGES[next.page]) throw new Error(`There is no page ${location.hash}.`);
    const draw = content => { if (mine === visit) { at = next; body = content; render(shell(), root); root.dataset.at = next.place; } };
    const found = await PAGES[next.page](next, state, draw) ?? {};
    if (mine !== visit) found.leave?.(); else live = found;
  } catch (error) {
    if (mine !== visit) return;
    at = next; body = html`<div class="card" role="alert"><h1>Error</h1><p>${error.message}</p><p><a href="#/runs">All runs</a></p></div>`;
    render(shell(), root); root.dataset.at = next.place;
  }
  document.title = [at.id, at.page, state.runs[parseInt(at.run)]?.name].filter(Boolean).join(" · ");
}

async function poll() {
  if (document.hidden || !at || !state.runs.length) return;
  try {
    const before = state.changes, mine = visit;
    const now = state.changes = await Promise.all(state.runs.map((run, i) => run.error ? {} : get(`runs/${i}/changes`)));
    const moved = before.length && now.some((one, i) => one.watermark !== before[i].watermark || one.step !== before[i].step || one.gone !== before[i].gone);
    if (moved) {
      state.runs = await get("runs");
      if (at.page === "runs" && !document.querySelector("#main :focus")) await show();
      const here = now[parseInt(at.run)];
      if (Date.now() - state.seen > 10000) {
        document.getElementById("said").textContent = `${fmt(here.watermark)} trajectories, step ${fmt(here.step)}`;
        state.seen = Date.now();
      }
    }
    if (mine === visit) await live.refresh?.();
    render(shell(), root);
  } catch { document.getElementById("live").textContent = "the server has stopped"; }
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
  const rows = [...document.querySelectorAll("a.row")], here = rows.indexOf(document.activeElement);
  const press = {
    "/": () => document.querySelector("input[type=search]")?.focus(),
    j: () => rows[Math.min(here + 1, rows.length - 1)]?.focus(),
    k: () => rows[Math.max(here - 1, 0)]?.focus(),
    "?": () => document.getElementById("help").showModal(),
    "[": () => document.querySelector("a.previous[href]")?.click(),
    "]": () => document.querySelector("a.next[href]")?.click(),
  }[event.key];
  if (press) { event.preventDefault(); press(); }
}

addEventListener("hashchange", () => { scrollTo(0, 0); show(); });
addEventListener("keydown", onKey);
if (!isReport) setInterval(poll, 2000);
show();
