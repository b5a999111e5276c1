"use strict";
/* Draws what Python computed. Text reaches the page through textContent alone, so no name can become markup. */

const D = JSON.parse(document.getElementById("data").textContent);
const FAMILY = [...D.families, "gone"];
const FAMILY_TEXT = { linear: "linear", attention: "attention", norm: "norm", rope: "RoPE, KV write", swiglu: "SwiGLU", sample: "sampling", loop: "fused pointwise", aten: "not fused", gone: "no longer there" };
const colour = (family) => `var(--f${family})`;

/* ---- building blocks ---- */

function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "class") node.className = value;
    else if (name === "on") for (const [event, run] of Object.entries(value)) node.addEventListener(event, run);
    else if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, props = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "on") for (const [event, run] of Object.entries(value)) node.addEventListener(event, run);
    else if (name === "fill") node.style.fill = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const $ = (id) => document.getElementById(id);
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

function scaled(value, units, base = 1000) {
  let unit = 0;
  while (Math.abs(value) >= base && unit < units.length - 1) { value /= base; unit += 1; }
  const digits = unit === 0 && Number.isInteger(value) ? 0 : value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return [value.toFixed(digits), units[unit]];
}
const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB"]).join(" ");
const flops = (value) => scaled(value, ["flop", "kflop", "Mflop", "Gflop", "Tflop"]).join(" ");
function time(seconds) {
  if (seconds === 0) return "0 s";
  if (seconds >= 119.5) return `${Math.floor(Math.round(seconds) / 60)} min ${Math.round(seconds) % 60} s`;
  if (seconds >= 100) return `${seconds.toFixed(0)} s`;
  if (seconds >= 1) return `${seconds.toFixed(seconds >= 10 ? 1 : 2)} s`;
  return scaled(seconds * 1e9, ["ns", "µs", "ms"]).join(" ");
}
function small(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  return value >= 0.001 && value < 1000 ? String(Number(value.toPrecision(3))) : value.toExponential(1).replace(".0e", "e");
}
/* So many decimals, or two digits that count where those would leave fewer: as console.number. */
function fixed(value, places) {
  const fewer = value !== 0 && Math.abs(value) < 10 ** (1 - places);
  return value.toFixed(fewer ? 1 - Math.floor(Math.log10(Math.abs(value))) : places);
}
function percent(share) {
  const value = 100 * share;
  if (value === 0) return "0 %";
  if (value < 0.01) return "< 0.01 %";
  if (value >= 1000) return `${share.toLocaleString("en", { maximumFractionDigits: 0 })} times`;
  return `${value < 1 ? value.toFixed(2) : value < 10 ? value.toFixed(1) : value.toFixed(0)} %`;
}

const tip = $("tip");
function hover(text) {
  return {
    mousemove(event) {
      tip.textContent = text();
      tip.hidden = false;
      const box = tip.getBoundingClientRect();
      tip.style.left = `${Math.min(event.clientX + 14, innerWidth - box.width - 8)}px`;
      tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18}px`;
    },
    mouseleave() { tip.hidden = true; },
  };
}

function choice(names, chosen, pick, label) {
  const buttons = names.map((name) => el("button", { type: "button", "aria-pressed": String(name === chosen), on: { click: () => {
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.textContent === name)));
    pick(name);
  } } }, name));
  return el("div", { class: "choice", role: "group", "aria-label": label }, buttons);
}

const lead = (title, ...text) => el("div", { class: "lead" }, el("h2", {}, title), text.length ? el("p", {}, ...text) : null);
const chip = (text, kind = "") => el("span", { class: `chip ${kind}` }, text);
const key = (families) => el("div", { class: "key" }, families.map((family) =>
  el("span", {}, el("i", { style: { background: colour(family) } }), FAMILY_TEXT[FAMILY[family]])));

function meter(share) {
  const kind = share > 1 ? "over" : share > 0.8 ? "high" : "";
  return el("div", { class: "meter" }, el("i", { class: kind, style: { width: `${Math.max(share > 0 ? 0.6 : 0, Math.min(100, 100 * share))}%` } }));
}

/* ---- theme and navigation ---- */

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
}
const wantsDark = matchMedia("(prefers-color-scheme: dark)");
setTheme(wantsDark.matches ? "dark" : "light");
wantsDark.addEventListener("change", () => setTheme(wantsDark.matches ? "dark" : "light"));
$("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
for (const name of ["overview", "pipeline", "graph", "roofline", "memory", "programs"])
  $("nav").append(el("a", { href: `#${name}` }, name[0].toUpperCase() + name.slice(1)));

/* ---- overview ---- */

function overview() {
  const h = D.head, speed = D.speed, measured = D.measured;
  const card = (label, big, unit, ...more) => el("div", { class: "card" }, el("div", { class: "label" }, label),
    el("div", { class: "big" }, big, unit ? el("small", {}, ` ${unit}`) : null), more.map((m) => typeof m === "string" ? el("div", { class: "more" }, m) : m));
  const cards = [];
  for (const kind of ["decode", "prefill"]) {
    const found = speed.filter((s) => s.kind === kind);
    if (found.length) cards.push(speedCard(found, measured, card));
  }
  if (!speed.length) cards.push(card("Speed", "–", "", D.no_roofline));
  const error = measured ? measured.golden.error : h.graph_error;
  cards.push(card(measured ? "Golden replay, largest error" : "Optimized graph, largest error", small(error), h.metric === "max_abs" ? "in logits" : "nats",
    h.bound ? meter(error / h.bound) : null, h.bound ? `${percent(error / h.bound)} of the bound ${small(h.bound)}` : "no golden cases",
    ...(measured ? [`same likeliest token at ${percent(measured.golden.top1)} of positions`] : [])));
  if (D.graph) {
    const before = D.graph.captured.calls, after = D.graph.final.calls, steps = D.buckets[0].steps;
    cards.push(card("Operators, captured to final", `${before.toLocaleString("en")} → ${after.toLocaleString("en")}`, "",
      `${steps} steps, ${D.buckets[0].kernels} unique kernels`, D.buckets.some((b) => b.aten) ? `${Math.max(...D.buckets.map((b) => b.aten))} steps fall back to ATen` : "no step falls back to ATen"));
  }
  cards.push(card("Artifact", ...scaled(h.size, ["B", "kB", "MB", "GB"]), `weights ${bytes(h.weights)}, code ${bytes(h.code)}`, `KV cache ${bytes(h.kv_token)} a token`));
  const facts = [
    ["Model", `${(h.parameters / 1e6).toFixed(h.parameters < 1e7 ? 2 : 0)} M parameters, ${plural(h.layers, "layer")}, vocabulary ${h.vocab.toLocaleString("en")}, ${h.positions.toLocaleString("en")} positions`],
    ["Contract", `${h.contract}: the weakest of any pass that fired`], ["License", h.license || "not stated"],
    ["Placement", `steps by backend: ${Object.entries(h.coverage.steps).map(([name, count]) => `${name} ${count}`).join(", ")}`],
    ["Target", `${h.target}${h.isa.length ? `: needs ${h.isa.join(" ")}` : ""}`], ["Source", h.source || "not recorded"],
    ["Made with", Object.entries(h.created_with).map(([name, version]) => `${name} ${version.split(" -")[0]}`).join(", ")],
    ["Version", h.version], ...(measured ? measured.findings : []).map((line) => ["Measured", line]),
  ];
  $("overview").append(
    el("div", { class: "title" }, el("h1", {}, h.name), chip(h.dtype), chip(h.target), chip(h.contract, h.contract)),
    el("div", { class: "cards" }, cards),
    el("div", { class: "panel" }, el("dl", { class: "facts" }, facts.map(([name, value]) =>
      el("div", { class: ["Version", "Source", "Target", "Made with"].includes(name) ? "whole" : "" }, el("dt", {}, name),
        el("dd", { class: name === "Version" ? "mono" : "" }, value))))),
  );
}

function speedCard(found, measured, card) {
  const real = (s) => (measured ? measured.phases[s.name] : s.seconds);
  const rate = (s, seconds) => (s.tokens / seconds).toLocaleString("en", { maximumFractionDigits: 0 });
  const said = (s) => s.words.replace("decode at ", "");
  const [first, ...others] = found;
  return card(`${first.kind === "decode" ? "Decode" : "Prefill"}, ${measured ? "measured" : "predicted"}`, rate(first, real(first)), "tokens/s",
    `${said(first)}: ${time(real(first))}${measured ? `, ${time(first.seconds)} predicted` : ""}`,
    ...others.map((s) => `${said(s)}: ${rate(s, real(s))} tokens/s`));
}

/* ---- pipeline ---- */

function pipeline() {
  const p = D.pipeline, total = p.phases.reduce((sum, [, seconds]) => sum + seconds, 0);
  const fired = p.passes.filter((one) => one.state === "fired").length;
  const checked = p.passes.filter((one) => one.state === "fired" && one.error !== null).length;
  const lost = p.passes.filter((one) => one.state === "dropped" || one.state === "skipped").length;
  const phases = el("div", { class: "phases" }, p.phases.map(([name, seconds]) => el("div", {
    class: name === "passes" ? "here" : "", style: { flex: `${Math.max(seconds, total * 0.004)} 1 0` }, on: hover(() => `${name}: ${time(seconds)}`) },
    seconds / total > 0.1 ? `${name} ${time(seconds)}` : seconds / total > 0.05 ? name : "")));
  const rows = p.passes.map((one, index) => passRow(one, index, p.seconds));
  $("pipeline").append(
    lead("Pipeline", `${fired} of ${p.passes.length} passes changed the graph`, lost ? `; ${lost} were dropped or skipped. ` : ". ",
      checked === fired ? "Each was checked against the model as captured" : checked ? `${checked} of them were checked against the model as captured` : "Their contracts were not checked",
      "; click one for what it refused and why."),
    el("div", { class: "panel" }, el("h3", {}, `Compile, ${time(total)}`), phases),
    el("div", { class: "panel" },
      el("div", { class: "pass-head" }, el("span"), el("span", {}, "pass"), el("span", {}, "contract"), el("span", { class: "num" }, "fired"),
        el("span", { class: "num" }, "refused"), el("span", {}, `when, of ${time(p.seconds)}`), el("span", { class: "num" }, "pass"),
        el("span", { class: "num" }, "check"), el("span", { class: "num" }, "error"), el("span", {}, "of its bound")),
      rows,
      el("div", { class: "key", style: { margin: "12px 8px 0" } },
        el("span", {}, el("i", { style: { background: "var(--accent)" } }), "the pass itself"),
        el("span", {}, el("i", { style: { background: "repeating-linear-gradient(135deg, var(--accent) 0 1.5px, transparent 1.5px 4px)" } }), "checking its contract"))),
    p.notes.length ? el("div", { class: "panel" }, el("h3", {}, "Notes"), p.notes.map((note) => el("div", {}, note))) : "",
  );
}

function passRow(one, index, total) {
  const refused = one.refused.reduce((sum, r) => sum + r.sites.length, 0);
  const bar = (from, seconds, kind) => el("i", { class: kind, style: { left: `${100 * from / total}%`, width: `${100 * seconds / total}%` } });
  const label = one.state === "dropped" || one.state === "skipped" ? one.state : one.contract;
  const row = el("button", { type: "button", class: `pass ${one.state}`, id: `pass-${index}`, "aria-expanded": "false" },
    el("span", { class: "mark" }, "▶"), el("span", { class: "mono" }, one.name),
    el("span", {}, chip(label, label)),
    el("span", { class: "num" }, one.fired ? one.fired.toLocaleString("en") : "–"), el("span", { class: "num" }, refused ? refused.toLocaleString("en") : "–"),
    el("span", { class: "track" }, bar(one.start, one.seconds, "work"), bar(one.start + one.seconds, one.check_seconds, "check")),
    el("span", { class: "num" }, time(one.seconds)), el("span", { class: "num" }, time(one.check_seconds)),
    el("span", { class: "num" }, one.error === null ? "–" : small(one.error)),
    one.error === null ? el("span", { class: "dim" }, one.state === "fired" ? "not measured" : "")
      : one.used === null ? el("span", { class: "dim" }, "not recorded") : el("span", { class: "budget" }, meter(one.used), el("span", { class: "num dim" }, percent(one.used))));
  let opened = null;
  row.addEventListener("click", () => {
    if (opened) { opened.remove(); opened = null; } else { opened = passDetail(one); row.after(opened); }
    row.setAttribute("aria-expanded", String(Boolean(opened)));
  });
  return row;
}

function passDetail(one) {
  const box = el("div", { class: "opened" });
  const verb = { fired: `Fired ${plural(one.fired, "time")}`, idle: "Had nothing to do", dropped: "Dropped", skipped: "Skipped" }[one.state];
  box.append(el("p", {}, verb, one.why ? `: ${one.why}` : one.error !== null ? `. Its largest error is ${small(one.error)}${one.bound ? `; allowed: ${small(one.bound)} ${one.promise}` : ""}.` : "."));
  for (const [title, found] of [["Refused", one.refused], ["Nearly matched", one.misses]]) {
    if (!found.length) continue;
    box.append(el("h3", {}, title), el("ul", {}, found.map((r) => el("li", {}, r.sites.length > 1 ? `${r.reason}, ${r.sites.length} times: ` : `${r.reason}: `,
      el("span", { class: "mono dim" }, r.sites.slice(0, 4).join(", "), r.sites.length > 4 ? ` and ${r.sites.length - 4} more` : "")))));
  }
  if (!one.refused.length && !one.misses.length) box.append(el("p", { class: "dim" }, "It refused nothing."));
  return box;
}

/* ---- the two graphs ---- */

const S = D.graph ? D.graph.strings : [];
const [NAME, KIND, TARGET, ARGS, TYPE, LINE, INPUTS, ORIGINS, PASSES, FAM] = Array.from({ length: 10 }, (_, i) => i);

class Side {
  constructor(graph, title, onPick) {
    this.nodes = graph.nodes;
    this.tree = graph.tree;
    this.rows = new Map();                            // node index -> its row, for the rows that were built
    this.openers = [];                                // [entry, open()] of every module row that was built
    this.onPick = onPick;
    this.text = this.nodes.map((n) => `${S[n[TARGET]]} ${S[n[NAME]]} ${n[ORIGINS].map((o) => S[o]).join(" ")}`.toLowerCase());
    this.body = el("div", { class: "tree", role: "tree", "aria-label": title });
    this.about = el("span", { class: "dim" });
    this.box = el("div", { class: "panel side" }, el("header", {}, el("b", {}, title), this.about), this.body);
    this.matches = null;
    this.show("");
  }

  show(query) {
    /* A number ends where it ends: layers.1 does not find layers.12. */
    const words = query.toLowerCase().split(/\s+/).filter(Boolean).map((word) => new RegExp(word.replace(/[^\w\s]/g, "\\$&") + (/\d$/.test(word) ? "(?!\\d)" : "")));
    this.matches = words.length ? new Set(this.text.keys()) : null;
    if (this.matches) this.text.forEach((text, i) => { if (!words.every((word) => word.test(text))) this.matches.delete(i); });
    this.rows.clear();
    this.openers = [];
    this.counts = new Map();
    const calls = this.nodes.filter((n, i) => S[n[KIND]] === "call" && (!this.matches || this.matches.has(i))).length;
    this.about.textContent = this.matches ? `${this.matches.size.toLocaleString("en")} found, ${plural(calls, "call")} among them` : `${plural(calls, "call")}, ${(this.nodes.length - calls).toLocaleString("en")} weights, inputs and results`;
    const rows = this.build(this.tree, 0);
    this.body.replaceChildren(...(rows.length ? rows : [el("div", { class: "none" }, `Nothing matches "${query}" on this side.`)]));
  }

  found(entry) {
    if (typeof entry === "number") return !this.matches || this.matches.has(entry) ? 1 : 0;
    if (!this.matches) return entry.t;
    if (!this.counts.has(entry)) this.counts.set(entry, entry.e.reduce((sum, inner) => sum + this.found(inner), 0));
    return this.counts.get(entry);
  }

  build(entries, depth) {
    return entries.filter((entry) => this.found(entry)).flatMap((entry) =>
      typeof entry === "number" ? this.node(entry) : entry.a ? this.fold(entry, depth) : this.module(entry, depth));
  }

  fold(entry, depth) {
    /* Equal layers are one row while all of them match alike; a search for one of them shows that one. */
    const counts = entry.e.map((layer) => this.found(layer));
    if (counts.some((count) => count !== counts[0])) return this.build(entry.e, depth);
    return this.module(entry, depth);
  }

  module(entry, depth) {
    const strip = el("span", { class: "strip" }, Object.entries(entry.f).map(([family, count]) => el("i", { style: { flex: count, background: colour(family) } })));
    const row = el("button", { type: "button", class: "row mod", role: "treeitem", "aria-expanded": "false", title: entry.p }, el("span", { class: "mark" }, "▶"),
      el("span", { class: "label" }, entry.l), entry.a ? el("span", { class: "alike" }, `${entry.a} alike`) : null, el("span", { class: "count" }, this.found(entry).toLocaleString("en")), strip);
    let kids = null;
    const open = () => {
      if (kids) return;
      kids = el("div", { class: "kids", role: "group" }, this.build(entry.e, depth + 1));
      row.after(kids);
      row.setAttribute("aria-expanded", "true");
    };
    row.addEventListener("click", () => {
      if (!kids) return open();
      kids.remove();
      kids = null;
      row.setAttribute("aria-expanded", "false");
    });
    this.openers.push([entry, open]);
    const block = el("div", {}, row);
    const few = !entry.a && (this.matches ? this.found(entry) <= 60 : depth < 2 && entry.e.some((inner) => typeof inner !== "number"));
    if (few) open();
    return [block];
  }

  node(index) {
    const n = this.nodes[index], kind = S[n[KIND]];
    const op = kind === "call" ? S[n[TARGET]] : kind === "return" ? "return" : S[n[NAME]];
    const row = el("button", { type: "button", class: `row node ${kind === "call" && S[n[TARGET]].startsWith("infc.") ? "" : "plain"}`, role: "treeitem", on: { click: () => this.onPick(this, index) } },
      el("span", { class: "dot", style: kind === "call" ? { background: colour(n[FAM]) } : { border: "1.5px solid var(--strong)" } }),
      el("span", { class: "op mono" }, op), el("span", { class: "type mono" }, S[n[TYPE]]));
    row.style.setProperty("--hit", colour(n[FAM]));
    this.rows.set(index, row);
    this.mark(index, row);
    return [row];
  }

  mark(index, row) {
    row.classList.toggle("hit", Boolean(this.hits && this.hits.has(index)));
    row.classList.toggle("picked", this.picked === index);
  }

  select(picked, hits) {
    this.picked = picked;
    this.hits = new Set(hits);
    const first = picked !== null ? picked : hits[0];
    if (first !== undefined) this.reveal(first);
    this.rows.forEach((row, index) => this.mark(index, row));
  }

  reveal(index) {
    if (this.matches && !this.matches.has(index)) return;
    const path = [];
    const walk = (entries) => entries.some((entry) => {
      if (entry === index) return true;
      if (typeof entry === "number") return false;
      path.push(entry);
      if (walk(entry.e)) return true;
      path.pop();
      return false;
    });
    if (!walk(this.tree)) return;
    for (const entry of path) {
      const opener = this.openers.findLast(([found]) => found === entry);
      if (opener) opener[1]();
    }
    const row = this.rows.get(index), box = this.body.getBoundingClientRect();
    if (!row) return;
    const at = row.getBoundingClientRect();
    if (at.top < box.top + 20 || at.bottom > box.bottom - 20) this.body.scrollTop += at.top - box.top - box.height / 3;
  }
}

function graph() {
  const section = $("graph");
  if (!D.graph) {
    section.append(lead("Graph"), el("div", { class: "panel dim" }, "This artifact holds no graphs; compile the model again to have them here."));
    return;
  }
  const detail = el("div", { class: "panel detail" }, el("span", { class: "dim" }, "Click a node of the final graph to see which captured nodes it stands for, or a captured one to see where it went."));
  const owners = D.graph.captured.nodes.map(() => []);
  D.graph.sources.forEach((from, index) => from.forEach((source) => owners[source].push(index)));
  const pick = (side, index) => {
    const other = side === after ? before : after;
    const hits = side === after ? D.graph.sources[index] : owners[index];
    side.select(index, []);
    other.select(null, hits);
    describe(detail, side, index, hits, side === after ? "stands for" : "went into", pick);
  };
  const before = new Side(D.graph.captured, "Captured", pick);
  const after = new Side(D.graph.final, "Final", pick);
  let wait = 0;
  const search = el("input", { type: "search", id: "search", placeholder: "Module path or operator: layers.3 rope", "aria-label": "search both graphs", on: { input: () => {
    clearTimeout(wait);
    wait = setTimeout(() => { before.show(search.value); after.show(search.value); }, 90);
  } } });
  const used = [...new Set([...D.graph.captured.nodes, ...D.graph.final.nodes].filter((n) => S[n[KIND]] === "call").map((n) => n[FAM]))].sort((a, b) => a - b);
  section.append(
    lead("Graph", "The model as captured and as it runs. A captured node has the colour of what it was fused into; equal layers are one row."),
    el("div", { class: "tools" }, search, key(used)), el("div", { class: "sides" }, before.box, after.box), detail);
}

function describe(box, side, index, hits, verb, pick) {
  const n = side.nodes[index], call = S[n[KIND]] === "call";
  const row = (name, ...value) => el("tr", {}, el("td", {}, name), el("td", {}, ...value));
  const inputs = n[INPUTS].slice(0, 12).flatMap((i) => [el("button", { type: "button", class: "link mono", on: { click: () => pick(side, i) } }, S[side.nodes[i][NAME]]), " "]);
  const kinds = new Map(), graph = verb === "stands for" ? D.graph.captured : D.graph.final;
  hits.forEach((i) => { const name = S[graph.nodes[i][TARGET]] || S[graph.nodes[i][KIND]]; kinds.set(name, (kinds.get(name) || 0) + 1); });
  const summary = [...kinds].map(([name, count]) => (count > 1 ? `${count} ${name}` : name)).join(", ");
  box.replaceChildren(
    el("div", { class: "head" }, el("b", { class: "mono" }, call ? S[n[TARGET]] : S[n[NAME]]), el("span", { class: "mono dim" }, S[n[TYPE]]), n[PASSES].map((p) => chip(S[p]))),
    el("table", {}, row("name", el("span", { class: "mono" }, S[n[NAME]])),
      n[ORIGINS].length ? row("module", el("span", { class: "mono" }, n[ORIGINS].map((o) => S[o]).join(", "))) : null,
      S[n[LINE]] ? row("source", el("span", { class: "mono" }, S[n[LINE]])) : null,
      S[n[ARGS]] ? row("arguments", el("span", { class: "mono" }, S[n[ARGS]])) : null,
      inputs.length ? row("reads", ...inputs) : null,
      row(verb, hits.length ? `${plural(hits.length, "node")}: ${summary}` : verb === "stands for" ? "nothing that was captured" : "nothing: no node of the final graph comes from this module path")));
}

/* ---- plots ---- */

const log = Math.log10;

function roofline() {
  const section = $("roofline"), r = D.roofline;
  if (!r) {
    section.append(lead("Roofline"), el("div", { class: "panel dim" }, D.no_roofline));
    return;
  }
  const names = r.phases.map((phase) => phase.name), plot = el("div");
  const draw = (chosen) => plot.replaceChildren(rooflinePlot(r, chosen === "all" ? r.phases : r.phases.filter((phase) => phase.name === chosen)));
  const used = [...new Set(r.phases.flatMap((phase) => phase.points.map((point) => point.family)))].sort((a, b) => a - b);
  section.append(lead("Roofline", `Every kernel of each phase on ${r.machine}, ${r.measured ? "as measured where the legend says so, else as predicted" : "as predicted"}. A larger mark takes a larger share of its phase.`),
    el("div", { class: "panel" }, el("div", { class: "tools" }, choice(["all", ...names], "all", draw, "phase"), key(used)), plot));
  draw("all");
  if (D.levers.length) section.append(levers());
}

/* Amdahl's bounds: one row a lever, one column a phase. */
function levers() {
  const columns = [...new Set(D.levers.map((l) => l.phase))], rows = [...new Set(D.levers.map((l) => (l.lever.startsWith("batch ") ? "larger batch" : l.lever)))];
  const at = (row, phase) => D.levers.find((l) => l.phase === phase && (l.lever === row || (row === "larger batch" && l.lever.startsWith("batch "))));
  const cell = (row, phase) => {
    const found = at(row, phase);
    return found ? el("span", { class: found.worth ? "worth" : "dim", on: hover(() => found.sentence) }, `${found.ratio.toFixed(2)} ×`) : el("span", { class: "dim" }, "–");
  };
  return el("div", { class: "panel" }, el("h3", {}, `At most this much faster, if what a change saves were gone and it cost nothing; below ${D.worth} × it is not worth the work`),
    dataTable([["change", (row) => row], ...columns.map((phase) => [phase, (row) => cell(row, phase), true])], rows));
}

function pointText(p) {
  const took = p.measured_s === null ? `${time(p.predicted_s)} predicted` : `${time(p.measured_s)} measured, ${time(p.predicted_s)} predicted`;
  return `${p.name}\n${p.phase}: ${p.calls > 1 ? `${p.calls} calls, each ` : ""}${took}, bound by ${p.bound}\n${flops(p.flops)}, ${bytes(p.bytes)}: ${small(p.intensity)} flops a byte, ${flops(p.rate)}/s\n${percent(p.share)} of the phase`;
}

const SHAPES = ["circle", "diamond", "square", "triangle"];

function rooflinePlot(r, phases) {
  const W = 1280, H = 520, L = 84, R = 20, T = 26, B = 46;
  const shape = (phase) => SHAPES[r.phases.indexOf(phase) % SHAPES.length];
  const all = phases.flatMap((phase) => phase.points.map((point) => ({ ...point, shape: shape(phase) })));
  const points = all.filter((point) => point.intensity > 0 && point.rate > 0);
  const top = Math.max(...r.peaks.map(([, rate]) => rate)), slow = Math.min(...r.memories.map(([, rate]) => rate));
  const xs = points.map((p) => p.intensity).concat(top / slow);
  const x0 = Math.floor(log(Math.min(...xs)) - 0.15), x1 = Math.ceil(log(Math.max(...xs)) + 0.1);
  const y1 = log(Math.max(top, ...points.map((p) => p.rate))) + 0.3, y0 = Math.floor(log(Math.min(...points.map((p) => p.rate))) - 0.1);
  const X = (v) => L + (log(v) - x0) / (x1 - x0) * (W - L - R), Y = (v) => H - B - (log(v) - y0) / (y1 - y0) * (H - T - B);
  const plot = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "roofline plot" });
  for (let p = x0; p <= x1; p += 1) plot.append(svg("line", { class: "grid", x1: X(10 ** p), x2: X(10 ** p), y1: T, y2: H - B }),
    svg("text", { x: X(10 ** p), y: H - B + 18, "text-anchor": "middle" }, p < 0 ? (10 ** p).toFixed(-p) : (10 ** p).toLocaleString("en")));
  for (let p = y0; p <= y1; p += 1) plot.append(svg("line", { class: "grid", x1: L, x2: W - R, y1: Y(10 ** p), y2: Y(10 ** p) }),
    svg("text", { x: L - 10, y: Y(10 ** p) + 4, "text-anchor": "end" }, `${scaled(10 ** p, ["flop", "kflop", "Mflop", "Gflop", "Tflop"]).map((t, i) => (i ? t : Number(t))).join(" ")}/s`));
  plot.append(svg("text", { x: (L + W - R) / 2, y: H - 8, "text-anchor": "middle" }, "arithmetic intensity, flops a byte"));
  r.memories.forEach(([name, rate], i) => {
    const from = Math.max(10 ** x0, 10 ** y0 / rate), to = Math.min(10 ** x1, top / rate);
    const angle = Math.atan2(Y(to * rate) - Y(from * rate), X(to) - X(from)) * 180 / Math.PI, at = 10 ** (log(from) + 0.07 * (log(to) - log(from)));
    plot.append(svg("line", { class: `roof${i ? " second" : ""}`, x1: X(from), y1: Y(from * rate), x2: X(to), y2: Y(to * rate) }),
      svg("text", { class: "strong", x: X(at), y: Y(at * rate) + (rate === slow ? 17 : -7), transform: `rotate(${angle} ${X(at)} ${Y(at * rate)})` }, `${name} ${bytes(rate)}/s`));
  });
  const fast = Math.max(...r.memories.map(([, rate]) => rate));
  r.peaks.forEach(([name, rate]) => plot.append(svg("line", { class: `roof${rate === top ? "" : " second"}`, x1: X(rate / fast), y1: Y(rate), x2: W - R, y2: Y(rate) }),
    svg("text", { class: "strong", x: W - R, y: Y(rate) + (rate === top ? -7 : 16), "text-anchor": "end" }, `${name} ${flops(rate)}/s`)));
  for (const p of points.sort((a, b) => b.share - a.share))
    plot.append(marker(p.shape, X(p.intensity), Y(p.rate), 4 + 15 * Math.sqrt(p.share), { class: "dot", fill: colour(p.family), on: hover(() => pointText(p)) }));
  const notes = phases.map((phase) => `${phase.words}: kernels ${phase.measured ? "took" : "should take"} ${time(phase.seconds)}`);
  const bare = new Set(all.filter((p) => !(p.intensity > 0)).map((p) => p.name)).size;
  if (bare) notes.push(`not shown: ${plural(bare, "kernel")} without arithmetic`);
  notes.forEach((note, i) => {
    const y = H - B - 14 - 21 * (notes.length - 1 - i);
    if (phases[i]) plot.append(marker(shape(phases[i]), W - R - 14, y - 4, 5.5, { fill: "var(--soft)" }));
    plot.append(svg("text", { class: phases[i] ? "strong" : "", x: W - R - 30, y, "text-anchor": "end" }, note));
  });
  return plot;
}

function marker(shape, x, y, size, props) {
  if (shape === "circle") return svg("circle", { cx: x, cy: y, r: size, ...props });
  const corners = { diamond: [[0, -1.2], [1.2, 0], [0, 1.2], [-1.2, 0]], square: [[-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]], triangle: [[0, -1.1], [1.1, 0.9], [-1.1, 0.9]] }[shape];
  return svg("polygon", { points: corners.map(([dx, dy]) => `${x + dx * size},${y + dy * size}`).join(" "), ...props });
}

function memory() {
  const names = Object.keys(D.memory), plot = el("div"), about = el("p");
  const draw = (name) => {
    const m = D.memory[name];
    plot.replaceChildren(memoryPlot(m));
    about.textContent = `The arena of ${name}: ${bytes(m.arena)} for ${plural(m.buffers.length, "buffer")} that would take ${bytes(m.buffers.reduce((sum, b) => sum + b[3], 0))} side by side. Each lies at a fixed offset from the step that writes it to the last that reads it.`;
  };
  const used = [...new Set(Object.values(D.memory).flatMap((m) => m.buffers.map((b) => b[6])))].sort((a, b) => a - b);
  $("memory").append(el("div", { class: "lead" }, el("h2", {}, "Memory"), about),
    el("div", { class: "panel" }, el("div", { class: "tools" }, choice(names, names[names.length - 1], draw, "bucket"), key(used)), plot));
  draw(names[names.length - 1]);
}

function memoryPlot(m) {
  const W = 1280, H = 430, L = 74, R = 24, T = 22, B = 44, steps = m.live.length, top = Math.max(m.arena, 1);
  const X = (step) => L + step / Math.max(steps, 1) * (W - L - R), Y = (offset) => H - B - offset / top * (H - T - B);
  const plot = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "memory map" });
  for (let i = 0; i <= 4; i += 1) plot.append(svg("line", { class: "grid", x1: L, x2: W - R, y1: Y(top * i / 4), y2: Y(top * i / 4) }),
    svg("text", { x: L - 10, y: Y(top * i / 4) + 4, "text-anchor": "end" }, bytes(top * i / 4)));
  const every = [1, 2, 5, 10, 20, 25, 50, 100, 200, 500].find((e) => steps / e <= 14) || 1000;
  for (let s = 0; s < steps; s += every) plot.append(svg("text", { x: X(s + 0.5), y: H - B + 18, "text-anchor": "middle" }, s));
  plot.append(svg("text", { x: (L + W - R) / 2, y: H - 6, "text-anchor": "middle" }, "step"));
  for (const [name, type, offset, size, first, last, family, origin] of m.buffers)
    plot.append(svg("rect", { class: "rect", x: X(first), y: Y(offset + size), width: Math.max(1, X(last + 1) - X(first)), height: Math.max(0.8, Y(offset) - Y(offset + size)), fill: colour(family),
      on: hover(() => `${name}  ${type}\n${bytes(size)} at offset ${bytes(offset)}\nwritten by step ${first} (${m.steps[first][0]}${origin ? `, ${origin}` : ""})\nlast read by step ${last} (${m.steps[last][0]})`) }));
  const x = X(m.peak.step + 0.5);
  plot.append(svg("line", { class: "peak", x1: x, x2: x, y1: T - 6, y2: H - B }),
    svg("text", { class: "peak-text", x: Math.min(x + 7, W - 330), y: T - 9 }, `peak: ${bytes(m.peak.bytes)} live at step ${m.peak.step}, ${percent(m.peak.bytes / top)} of the arena`));
  return plot;
}

/* ---- tables ---- */

function dataTable(columns, rows) {
  return el("div", { class: "scroll" }, el("table", { class: "data" },
    el("thead", {}, el("tr", {}, columns.map(([title, , right]) => el("th", { class: right ? "num" : "" }, title)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, columns.map(([, cell, right]) => el("td", { class: right ? "num" : "" }, cell(row))))))));
}

const cutTable = (rows) => dataTable([
  ["operator", (c) => el("span", { class: "mono dim" }, c.op)], ["calls", (c) => c.calls, true],
  ["cut", (c) => el(c.runs ? "strong" : "span", { class: "mono" }, c.runs ? `${c.name}, runs` : c.name)], ["registers", (c) => c.registers, true],
  ["programs/SM", (c) => c.programs_per_sm, true], ["waves", (c) => fixed(c.waves, 2), true], ["predicted µs", (c) => fixed(c.predicted_us, 2), true],
  ["measured µs", (c) => c.measured_us ? fixed(c.measured_us, 2) : "–", true]], rows);

const droppedTable = (rows) => dataTable([
  ["operator", (c) => el("span", { class: "mono dim" }, c.op)], ["cut", (c) => el("span", { class: "mono" }, c.candidate)], ["dropped because", (c) => c.reason]], rows);

function cuts({ kept, dropped }) {
  const part = (title, rows, table) => rows.length ? [el("h3", { style: { margin: "18px 0 10px" } }, title), table(rows)] : [];
  return [...part("Cuts on the shortlist, the likeliest of each call and its rule's; infc tune measures them", kept, cutTable),
    ...part("Cuts that were dropped", dropped, droppedTable)];
}

function programs() {
  const kernels = el("div"), names = Object.keys(D.kernels);
  const draw = (name) => {
    const rows = D.kernels[name], total = rows.reduce((sum, k) => sum + k.bytes, 0) || 1;
    kernels.replaceChildren(dataTable([
      ["kernel", (k) => el("span", { class: "mono" }, k.name, el("span", { class: "dim" }, ` ${k.hash}`))], ["operator", (k) => el("span", { class: "mono dim" }, k.op)], ["steps", (k) => k.steps, true],
      ["bytes", (k) => bytes(k.bytes), true], ["flops", (k) => flops(k.flops), true], ["flops a byte", (k) => k.bytes ? small(k.flops / k.bytes) : "–", true],
      ["share of bytes", (k) => el("span", {}, percent(k.bytes / total), el("span", { class: "share" }, el("i", { style: { width: `${100 * k.bytes / total}%`, background: colour(k.family) } }))), true],
    ], rows), ...cuts(D.choices[name]));
  };
  $("programs").append(lead("Programs", "One list of steps for each bucket, over shared kernels. Flops and bytes are counted at a bucket's maxima."),
    el("div", { class: "panel" }, el("h3", {}, "Buckets"), dataTable([
      ["bucket", (b) => el("span", { class: "mono" }, b.name)], ["tokens T", (b) => b.T, true], ["sequences N", (b) => b.N, true], ["rows sampled R", (b) => b.R, true],
      ["KV blocks M", (b) => b.M, true], ["steps", (b) => b.steps, true], ["kernels", (b) => b.kernels, true], ["ATen steps", (b) => b.aten, true],
      ["arena", (b) => bytes(b.arena), true], ["flops", (b) => flops(b.flops), true], ["bytes", (b) => bytes(b.bytes), true]], D.buckets)),
    el("div", { class: "panel" }, el("div", { class: "tools" }, el("h3", { style: { margin: "0" } }, "Kernels of"), choice(names, names[0], draw, "bucket")), kernels));
  draw(names[0]);
}

for (const part of [overview, pipeline, graph, roofline, memory, programs]) part();
document.documentElement.dataset.drawn = String(Math.round(performance.now()));
