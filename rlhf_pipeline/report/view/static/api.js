// Answers of the server; in a report, answers that were recorded in the page.
const recorded = document.getElementById("recorded");
const answers = recorded && JSON.parse(recorded.textContent);
export const isReport = answers !== null;

export async function get(path) {
  if (isReport) return fromReport(path);
  const reply = await fetch(`/api/${path}`, { headers: { accept: "application/json" } });
  const found = await reply.json().catch(() => ({ error: "The server did not respond." }));
  if (!reply.ok) throw new Error(found.error);
  return found;
}

// Whether a page is there: a report has a selection of a run, and links to nothing else.
export const there = (run, what, id) => !isReport || answers[`runs/${run}/${what}/${id}`] !== undefined;
export const recordedVersions = run => new Set(answers?.[`runs/${run}/trajectories`]?.rows.map(row => row.version));

function fromReport(path) {
  const [place, text] = path.split("?"), query = new URLSearchParams(text), [, , what, id] = place.split("/"), found = answers[place];
  if (what === "trajectories" && !id) return searched(found, query);
  if (what === "facets") return { kinds: counted(found.kinds, answers[place.replace("facets", "trajectories")].rows, query) };
  if (what === "lists" && found?.rows && query.get("cause")) return listed(found, query.get("cause"));
  if (what === "steps" && found) return { ...found, metrics: figuresOf(place, found.step) };
  if (found !== undefined) return found;
  throw new Error(`This report contains a selection of the run, without ${what?.replace(/s$/, "")} ${id ?? ""}. ` +
    "To see all: rlhf-pipeline view RUN");
}

function figuresOf(place, step) {
  const all = answers[place.replace(/steps\/.*/, "metrics")], at = all.step.indexOf(step);
  return Object.fromEntries(Object.entries(all.values).map(([name, values]) => [name, values[at] ?? null]).filter(([, value]) => value !== null));
}

function listed(found, cause) {
  const rows = found.rows.filter(row => row.cause === cause), kind = found.kinds.find(one => one.cause === cause);
  return { ...found, cause, rows, matched: kind?.num ?? rows.length };
}

// In a report: the same question as the server's, over the recorded rows.
const SHORT = { reward: "task_reward", version: "policy_version", group: "group_id", date: "created_at", tokens: "num_completion_tokens" };
const COMPARE = { ">=": (a, b) => a >= b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, "<": (a, b) => a < b };
const unquoted = text => {
  if (/^"[^]*"$/.test(text) && text.length > 1) { try { return JSON.parse(text); } catch { return text.slice(1, -1); } }
  return /^'[^]*'$/.test(text) && text.length > 1 ? text.slice(1, -1) : text;
};
const isNothing = value => value === null || value === undefined || value === "";
const TEXTS = { prompt: row => row.prompt, completion: row => row.completion };

function valueOf(name, rows) {
  const column = SHORT[name] ?? name;
  if (TEXTS[column]) return TEXTS[column];
  if (rows.length && !(column in rows[0].values)) {
    throw new Error(`This report has no column ${name}. Its columns: ${Object.keys(rows[0].values).join(", ")}.`);
  }
  return row => row.values[column];
}

function condition(text, rows) {
  const [, name, sign, said] = text.match(/^\s*([A-Za-z][\w./-]*)\s*(>=|<=|==|!=|>|<|=|~)\s*([^]+?)\s*$/) ?? [];
  if (!sign) throw new Error(`The filter ${text} is not valid. Give a column, an operator and a value: reward>=0.5`);
  const value = valueOf(name, rows), wanted = unquoted(said), range = said.match(/^(-?[\d.eE+-]*?)\.\.(-?[\d.eE+-]*)$/);
  const is = test => sign === "!=" ? row => !test(row) : test;
  if (sign === "~") return row => String(value(row) ?? "").toLowerCase().includes(wanted.toLowerCase());
  if (/^(null|none|nan)$/i.test(said)) return is(row => isNothing(value(row)));
  if (range) return is(row => value(row) !== null && (!range[1] || value(row) >= Number(range[1])) && (!range[2] || value(row) <= Number(range[2])));
  if (COMPARE[sign]) {
    if (Number.isNaN(Number(wanted))) throw new Error(`The filter ${text}: ${wanted} is not a number.`);
    return row => value(row) !== null && COMPARE[sign](value(row), Number(wanted));
  }
  return is(row => String(value(row)) === wanted || (typeof value(row) === "number" && value(row) === Number(wanted)));
}

function chosen(rows, query) {
  const tests = query.getAll("where").map(one => condition(one, rows)), text = (query.get("text") ?? "").toLowerCase();
  const column = query.get("in") ?? "completion";
  return rows.filter(row => tests.every(test => test(row)) && row[column].toLowerCase().includes(text));
}

function counted(kinds, rows, query) {
  const some = chosen(rows, query);
  return kinds.map(kind => ({ ...kind, num: some.filter(condition(kind.where, rows)).length })).filter(kind => kind.num);
}

function searched(all, query) {
  const sort = query.get("sort") ?? "-id", key = sort.replace("-", ""), sign = sort[0] === "-" ? -1 : 1;
  const offset = Number(query.get("offset") ?? 0), rows = chosen(all.rows, query), by = key === "id" ? row => row.id : valueOf(key, all.rows);
  const value = row => isNothing(by(row)) ? Infinity : sign * Number(by(row));
  rows.sort((a, b) => value(a) - value(b));
  return { ...all, of: all.total, total: all.rows.length, matched: rows.length, complete: true, offset, rows: rows.slice(offset, offset + 50) };
}

// Conditions that commas part; a comma in quotes or brackets is part of a value.
export const conditions = text => (text.match(/(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\([^()]*\)|[^,"'(]|["'(])+/g) ?? []).map(one => one.trim()).filter(Boolean);
export const quoted = value => /^[\w.:+-]+$/.test(value) && !/^(null|none|nan)$/i.test(value) && !value.includes("..") ? value : JSON.stringify(value);

// Small and large numbers with an exponent that is a multiple of three; what is only rounding is 0.
export function fmt(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (typeof x === "boolean") return x ? "yes" : "no";
  if (typeof x !== "number") return String(x);
  const size = Math.abs(x);
  if (size < 1e-12) return "0";
  if (Number.isInteger(x) && size < 1e15) return x.toLocaleString("en");
  if (size >= 1e6 || size < 5e-4) {
    const exponent = 3 * Math.floor(Math.log10(size) / 3), part = x / 10 ** exponent;
    return `${Number(part.toPrecision(3))}e${exponent}`;
  }
  if (size < 0.5 * 10 ** -digits) return String(Number(x.toPrecision(2)));
  return size >= 1000 ? Math.round(x).toLocaleString("en") : x.toFixed(digits);
}

export function ago(seconds) {
  const age = Math.max(0, Date.now() / 1000 - seconds);
  return age < 90 ? `${Math.round(age)} s ago` : age < 5400 ? `${Math.round(age / 60)} min ago`
    : age < 172800 ? `${Math.round(age / 3600)} h ago` : `${Math.round(age / 86400)} days ago`;
}

export const bytes = n => n >= 1e9 ? `${(n / 1e9).toFixed(1)} GB` : n >= 1e6 ? `${(n / 1e6).toFixed(1)} MB` : `${(n / 1e3).toFixed(0)} kB`;
export const count = (n, noun) => `${fmt(n)} ${n === 1 ? noun : noun.endsWith("y") ? `${noun.slice(0, -1)}ies` : `${noun}s`}`;

// A row's number: the second day's ids have ten digits, so segment and row are told apart.
export const short = id => { const n = BigInt(id); return n >> 32n ? `${n >> 32n}:${n & 0xffffffffn}` : id; };

// Text that is shown as it is, with what cannot be seen named.
const NAMES = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍", "\0": "␀", "\x1b": "␛" };
export const visible = text => text.replace(/[\u0000-\u001f\u007f\u202a-\u202e\u2066-\u2069]/g,
  c => c === "\n" || c === "\t" ? c : NAMES[c] ?? `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
export const named = piece => /^\s*$/.test(piece) ? [...piece].map(c => NAMES[c] ?? c).join("") || "∅" : visible(piece);

export const colors = ["#1f77d0", "#c2570c", "#178a64", "#a54fc4", "#957a00", "#d0217f"];
