// Markdown and maths of a model's text, on request. Only text nodes and a fixed set of elements are made: no links, no
// images, no markup of the text itself. What is not known here is shown as it was written.
import { html } from "lit-html";

const INLINE = /(`+)([^]+?)\1|\*\*([^]+?)\*\*|__([^]+?)__|\*([^\s*][^*]*?)\*|\\\(([^]+?)\\\)|\$\$([^]+?)\$\$|\\\[([^]+?)\\\]|\$([^\s$][^$\n]*?)\$(?!\d)|!?\[([^\]]*)\]\(([^)\s]*)\)/g;

function inline(text) {
  const out = [];
  let from = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, , code, bold, strong, slanted, round, block, square, dollar, label, target] = found;
    const tex = round ?? block ?? square ?? dollar, heavy = bold ?? strong;
    out.push(text.slice(from, found.index));
    from = found.index + whole.length;
    if (code !== undefined) out.push(html`<code>${code}</code>`);
    else if (heavy !== undefined) out.push(html`<strong>${inline(heavy)}</strong>`);
    else if (slanted !== undefined) out.push(html`<em>${inline(slanted)}</em>`);
    else if (tex !== undefined) out.push(maths(tex, block !== undefined || square !== undefined));
    else out.push(html`${label} <span class="soft">(${target})</span>`);
  }
  return [...out, text.slice(from)];
}

const BLOCKS = [
  [/^ {0,3}(```+|~~~+)[^\n]*\n([^]*?)(?:\n {0,3}\1[^\n]*(?:\n|$)|$)/, m => html`<pre>${m[2]}</pre>`],
  [/^ {0,3}(#{1,6}) +([^\n]+)(?:\n|$)/, m => html`<p class="heading" data-level=${m[1].length}>${inline(m[2])}</p>`],
  [/^ {0,3}(?:[-*_] *){3,}(?:\n|$)/, () => html`<hr>`],
  [/^(?:\$\$([^]+?)\$\$|\\\[([^]+?)\\\])(?:\n|$)/, m => html`<p>${maths(m[1] ?? m[2], true)}</p>`],
  [/^(?: {0,3}[-*+] [^\n]+(?:\n|$)(?: {2,}[^\n]+(?:\n|$))*)+/, m => html`<ul>${items(m[0], /^ {0,3}[-*+] /m)}</ul>`],
  [/^(?: {0,3}\d+[.)] [^\n]+(?:\n|$)(?: {2,}[^\n]+(?:\n|$))*)+/, m => html`<ol start=${parseInt(m[0])}>${items(m[0], /^ {0,3}\d+[.)] /m)}</ol>`],
  [/^(?:> ?[^\n]*(?:\n|$))+/, m => html`<blockquote>${markup(m[0].replace(/^> ?/gm, ""))}</blockquote>`],
  [/^(\|?[^\n]*\|[^\n]*)\n\|?[ :|-]*-[ :|-]*\n((?:[^\n]*\|[^\n]*(?:\n|$))*)/, m => html`<div class="scroll" tabindex="0" role="region" aria-label="table"><table><thead><tr>${cells(m[1]).map(one => html`<th class="l">${inline(one)}</th>`)}</tr></thead>
    <tbody>${m[2].split("\n").filter(Boolean).map(row => html`<tr>${cells(row).map(one => html`<td class="l">${inline(one)}</td>`)}</tr>`)}</tbody></table></div>`],
];
const BEGINS = /^ {0,3}(?:```|~~~|#{1,6} |[-*+] |\d+[.)] |> |\$\$|\\\[|\|)/;
const cells = row => row.trim().replace(/^\||\|$/g, "").split("|").map(one => one.trim());
const items = (text, mark) => text.split(new RegExp(mark.source, "gm")).filter(one => one.trim()).map(one => html`<li>${inline(one.trim())}</li>`);

export function markup(text) {
  const out = [];
  let rest = text;
  while (rest) {
    const known = BLOCKS.map(([pattern, make]) => [rest.match(pattern), make]).find(([found]) => found);
    if (known) { out.push(known[1](known[0])); rest = rest.slice(known[0][0].length); continue; }
    const lines = rest.split("\n"), stop = lines.findIndex((line, i) => !line.trim() || (i && BEGINS.test(line)));
    const some = stop < 0 ? lines.length : Math.max(stop, 1), paragraph = lines.slice(0, some).join("\n");
    if (paragraph.trim()) out.push(html`<p>${inline(paragraph)}</p>`);
    rest = lines.slice(some).join("\n");
  }
  return out;
}

// TeX as MathML, which browsers draw themselves: fractions, roots, scripts, Greek letters, the usual signs.
const SIGNS = { times: "×", cdot: "·", div: "÷", pm: "±", mp: "∓", le: "≤", leq: "≤", ge: "≥", geq: "≥", ne: "≠", neq: "≠", approx: "≈", equiv: "≡", sim: "∼", to: "→", rightarrow: "→",
  Rightarrow: "⇒", implies: "⇒", iff: "⇔", leftarrow: "←", infty: "∞", sum: "∑", prod: "∏", int: "∫", partial: "∂", nabla: "∇", in: "∈", notin: "∉", subset: "⊂", subseteq: "⊆", cup: "∪", cap: "∩",
  emptyset: "∅", forall: "∀", exists: "∃", neg: "¬", land: "∧", lor: "∨", ldots: "…", dots: "…", cdots: "⋯", circ: "∘", degree: "°", angle: "∠", triangle: "△", mid: "|", "%": "%", $: "$", "&": "&", "#": "#", _: "_",
  "{": "{", "}": "}", ",": " ", ";": " ", ":": " ", "!": "", " ": " ", quad: " ", qquad: "  ", "\\": " ", langle: "⟨", rangle: "⟩", lfloor: "⌊", rfloor: "⌋", lceil: "⌈", rceil: "⌉" };
const GREEK = Object.fromEntries("alpha α beta β gamma γ delta δ epsilon ε varepsilon ε zeta ζ eta η theta θ iota ι kappa κ lambda λ mu μ nu ν xi ξ pi π rho ρ sigma σ tau τ phi φ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Phi Φ Psi Ψ Omega Ω"
  .split(" ").reduce((pairs, one, i, all) => i % 2 ? [...pairs, [all[i - 1], one]] : pairs, []));
const NAMES = new Set(["sin", "cos", "tan", "log", "ln", "exp", "max", "min", "lim", "gcd", "lcm", "det", "arg", "mod", "bmod"]);
const element = (name, ...children) => { const made = document.createElementNS("http://www.w3.org/1998/Math/MathML", name); made.append(...children); return made; };

function maths(tex, block) {
  const tokens = tex.match(/\\(?:text|mathrm|textbf|mathbf|operatorname|mathit|textit|mbox|mathbb|mathcal)\s*\{[^{}]*\}|\\[A-Za-z]+|\\.|\d+(?:[.,]\d+)*|[^\s]/gsu) ?? [];
  let at = 0;
  const row = end => { const parts = []; while (at < tokens.length && tokens[at] !== end) parts.push(scripted()); at++; return element("mrow", ...parts); };
  const argument = () => { if (tokens[at] === "{") { at++; return row("}"); } return at < tokens.length ? atom() : element("mrow"); };
  const scripted = () => {
    const base = atom();
    let below = null, above = null;
    while (tokens[at] === "_" || tokens[at] === "^") { if (tokens[at++] === "_") below = argument(); else above = argument(); }
    return below && above ? element("msubsup", base, below, above) : below ? element("msub", base, below) : above ? element("msup", base, above) : base;
  };
  function atom() {
    const token = tokens[at++], name = token.slice(1), words = token.match(/^\\\w+\s*\{([^]*)\}$/);
    if (words) return element("mtext", words[1]);
    if (token === "{") return row("}");
    if (/^\d/.test(token)) return element("mn", token);
    if (token[0] !== "\\" || token.length === 1) return element(/\p{L}/u.test(token) ? "mi" : "mo", token);
    if (["frac", "dfrac", "tfrac", "cfrac"].includes(name)) return element("mfrac", argument(), argument());
    if (name === "binom") return element("mrow", element("mo", "("), element("mfrac", argument(), argument()), element("mo", ")"));
    if (name === "sqrt") { if (tokens[at] !== "[") return element("msqrt", argument()); at++; const degree = row("]"); return element("mroot", argument(), degree); }
    if (name === "boxed" || name === "fbox") { const box = element("mrow", argument()); box.setAttribute("class", "boxed"); return box; }
    if (["overline", "bar", "hat", "vec", "tilde"].includes(name)) return element("mover", argument(), element("mo", { hat: "^", vec: "→", tilde: "~" }[name] ?? "‾"));
    if (["left", "right", "big", "Big", "bigg", "Bigg", "displaystyle"].includes(name)) { if (tokens[at] === "." && name !== "displaystyle") at++; return element("mrow"); }
    if (NAMES.has(name)) return element("mi", name);
    return GREEK[name] ? element("mi", GREEK[name]) : element("mo", SIGNS[name] ?? token);
  }
  const math = element("math", row(null));
  math.setAttribute("title", tex);
  if (block) math.setAttribute("display", "block");
  return math;
}
