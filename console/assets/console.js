// The live part of the console: it draws what the JSON twin of the page says, and keeps the
// page up to date with the server's events. Without it the page shows how things were when
// it was loaded.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const KEPT = 600, STEP = 10;
const live = document.getElementById("live");

function svg(name, attrs) {
  const e = document.createElementNS(SVG, name);
  for (const k in attrs) e.setAttribute(k, attrs[k]);
  return e;
}

function html(name, attrs, ...children) {
  const e = document.createElement(name);
  for (const k in attrs) e.setAttribute(k, attrs[k]);
  e.append(...children);
  return e;
}

function say(on, text) {
  live.hidden = false;
  live.classList.toggle("on", on);
  if (live.textContent !== text) live.textContent = text;
}

function text(root, selector, value) {
  const e = root.querySelector(selector);
  if (e && e.textContent !== (value || "")) e.textContent = value || "";
}

const twin = () => fetch(location.href, { headers: { Accept: "application/json" } }).then((r) => r.ok ? r.json() : Promise.reject(r));

// reload takes over from the server what may change: all parts that are marked as live, or
// the whole page if none is. A part that somebody is filling in, or points at, stays.
let loading = false;
async function reload() {
  if (loading) return;
  loading = true;
  try {
    const url = new URL(location.href);
    for (const once of ["done", "n", "left"]) url.searchParams.delete(once);
    const r = await fetch(url, { headers: { Accept: "text/html" } });
    if (!r.ok) throw r;
    const doc = new DOMParser().parseFromString(await r.text(), "text/html");
    const next = doc.getElementById("page"), now = document.getElementById("page");
    if (!next || !now) return;
    document.title = doc.title;
    swap(document.querySelector(".band"), doc.querySelector(".band"));
    const parts = [...next.querySelectorAll("[data-live]")];
    if (!parts.length) { swap(now, next); await draw(); return; }
    for (const part of parts) swap(now.querySelector(`[data-live="${part.dataset.live}"]`), part);
    const more = now.dataset.figures !== next.dataset.figures;
    now.dataset.shape = next.dataset.shape;
    now.dataset.figures = next.dataset.figures;
    if (more) await draw();
  } finally {
    loading = false;
  }
}

function swap(now, next) {
  if (!now || !next || now.outerHTML === next.outerHTML) return;
  if (now.matches(":hover") && now.querySelector("form")) return;
  if (now.contains(document.activeElement) && document.activeElement.matches("input, select, textarea, button")) return;
  if ([...now.querySelectorAll("input:not([type=hidden])")].some((i) => i.value !== i.defaultValue)) return;
  const open = [...now.querySelectorAll("details")].map((d) => d.open);
  const focus = now.contains(document.activeElement) && document.activeElement.getAttribute("href");
  now.replaceWith(document.adoptNode(next));
  next.querySelectorAll("details").forEach((d, i) => { d.open = open[i]; });
  if (focus) [...next.querySelectorAll("a")].find((a) => a.getAttribute("href") === focus)?.focus({ preventScroll: true });
}

// Paths. Values are numbers that the server sent; nothing is ever set as HTML.

function line(values, width, height, max, slots) {
  const dx = width / (slots - 1), from = slots - values.length;
  let d = "";
  values.forEach((v, i) => { d += (i ? "L" : "M") + ((from + i) * dx).toFixed(1) + " " + (height - v / max * height).toFixed(1); });
  return d;
}

function area(values, width, height, max, slots) {
  if (!values.length) return "";
  const from = (slots - values.length) * width / (slots - 1);
  return line(values, width, height, max, slots) + `L${width} ${height}L${from.toFixed(1)} ${height}Z`;
}

function drawSpark(el, spark) {
  const W = 120, H = 28, slots = KEPT / STEP, max = Math.max(1e-9, ...spark.calls) * 1.05;
  el.replaceChildren(svg("line", { class: "base", x1: 0, x2: W, y1: H, y2: H }));
  if (!spark.calls.some((v) => v > 0)) return;
  const bad = spark.bad.map((v) => Math.min(v, max));
  el.append(svg("path", { class: "under", d: area(spark.calls, W, H, max, slots) }));
  if (bad.some((v) => v > 0)) el.append(svg("path", { class: "bad", d: area(bad, W, H, max, slots) }));
  el.append(svg("path", { class: "calls", d: line(spark.calls, W, H, max, slots) }));
}

// The overview.

let cards = new Map();

async function drawOverview() {
  const o = await twin();
  cards = new Map(o.policies.map((p) => [p.path, { spark: p.spark || { calls: [], bad: [] }, n: o.tick % STEP + 1 }]));
  for (const el of document.querySelectorAll("a.card")) {
    const c = cards.get(el.dataset.path);
    if (c) { c.el = el; drawSpark(el.querySelector(".spark"), c.spark); }
  }
  overviewTick = o.tick;
}

let overviewTick = -1;

const GAP = 5; // seconds without an event, after which a page is drawn anew

function onOverview(m) {
  if (overviewTick >= 0 && m.at - overviewTick > GAP) { overviewTick = -1; drawOverview().catch(() => {}); }
  const page = document.getElementById("page");
  if (String(m.shape) !== page.dataset.shape) reload().catch(() => {});
  for (; overviewTick >= 0 && overviewTick < m.at; overviewTick++) {
    for (const [path, c] of cards) push(c, overviewTick + 1, m.cards && m.cards[path]);
  }
  for (const [path, c] of cards) {
    if (!c.el) continue;
    const k = m.cards && m.cards[path];
    if (k) {
      text(c.el, "[data-rate]", k[0]); text(c.el, "[data-share]", k[1]); text(c.el, "[data-detail]", k[4]);
      c.quiet = false;
    } else if (!c.quiet) {
      text(c.el, "[data-rate]", "0"); text(c.el, "[data-share]", "idle"); text(c.el, "[data-detail]", "");
      c.quiet = true;
    }
    if (k || m.at % STEP === 0) drawSpark(c.el.querySelector(".spark"), c.spark);
  }
}

// push adds a second to a sparkline, whose last value is the mean of a step that goes on.
function push(c, at, k) {
  const values = [[c.spark.calls, k ? k[2] : 0], [c.spark.bad, k ? k[3] : 0]];
  if (at % STEP === 0) c.n = 0;
  for (const [list, v] of values) {
    if (at % STEP === 0 || !list.length) {
      list.push(v);
      if (list.length > KEPT / STEP) list.shift();
    } else {
      list[list.length - 1] = (list[list.length - 1] * c.n + v) / (c.n + 1);
    }
  }
  c.n++;
}

// The page of a policy.

let charts = [], shownPolicy = null;

const meaning = {
  success: 1, admitted: 1, hit: 1, first_try: 1, loaded: 1, accepted: 1, done: 1, first_won: 1, allowed: 1, elected: 1, closed: 5, completed: 5, started: 1,
  failure: 2, exhausted: 2, failed: 2, open: 2, stuck: 2, lost: 2, throttled: 2,
  refused: 3, stale: 3, recovered: 5, over_budget: 3, "half-open": 3, half_open: 3, compensated: 4, "forced-open": 4, forced_open: 4, hedge_won: 4,
  ignored: 6, disabled: 6, miss: 4, not_found: 6, canceled: 6,
};

function short(v) {
  const a = Math.abs(v);
  if (a === 0) return "0";
  if (a < 0.01) return v.toExponential(0);
  if (a < 10) return String(Math.round(v * 100) / 100);
  if (a < 100) return String(Math.round(v * 10) / 10);
  if (a < 1e4) return String(Math.round(v));
  if (a < 1e6) return Math.round(v / 100) / 10 + " k";
  return Math.round(v / 1e5) / 10 + " M";
}

function unitOf(f) {
  const m = /^\{(.*)\}$/.exec(f.unit), u = m ? "" : f.unit === "1" ? "" : " " + f.unit;
  return f.kind === "counter" ? (u + "/s").trim() : u.trim();
}

function nameOf(f) {
  const parts = Object.entries(f.attrs || {}).filter(([, v]) => v !== "").map(([, v]) => v.replaceAll("_", " "));
  return parts.length > 1 && parts[0] === "refused" ? parts[1] : parts.join(" ") || (f.kind === "counter" ? "a second" : "now");
}

function colour(f, i, taken) {
  const values = Object.values(f.attrs || {});
  const meant = values.map((v) => meaning[v]).find((c) => c);
  if (meant && !taken.has(meant)) { taken.add(meant); return meant; }
  for (const c of [1, 4, 5, 3, 2, 6]) if (!taken.has(c)) { taken.add(c); return c; }
  return i % 6 + 1;
}

async function drawPolicy() {
  const p = await twin();
  shownPolicy = p;
  const home = document.getElementById("charts");
  home.replaceChildren();
  charts = [];
  const byName = new Map();
  p.figures.forEach((f) => byName.set(f.name, [...(byName.get(f.name) || []), f]));
  for (const [name, all] of byName) {
    if (name === "breaker.state" && p.states) continue;
    charts.push(newChart(name, all));
  }
  // What moves comes first, what has stood still at zero is left to the table.
  charts.sort((a, b) => a.rank - b.rank);
  for (const c of charts) home.append(c.el);
  charts.forEach(drawChart);
  drawStrip();
}

function moves(f) { return f.points.some((v) => v !== 0); }

function newChart(name, all) {
  const c = { name, all, taken: new Set() };
  all.forEach((f, i) => { f.colour = colour(f, i, c.taken); });
  c.rank = /call|request|saga\.step/.test(name) ? 0 : all.some(moves) ? 1 : 2;
  c.legend = html("ul", { class: "legend" });
  c.svg = svg("svg", { viewBox: "0 0 600 110", preserveAspectRatio: "none", role: "img", "aria-label": all[0].help + " Over the last ten minutes." });
  c.max = html("span", { class: "max", "aria-hidden": "true" });
  c.el = html("figure", { class: "chart" },
    html("figcaption", {}, all[0].help.replace(/ Not to be added up\.$/, "").replace(/\.$/, ""), html("code", {}, name)),
    c.legend, html("div", { class: "plot" }, c.svg, c.max));
  c.svg.addEventListener("pointermove", (e) => {
    const box = c.svg.getBoundingClientRect();
    hover(Math.max(0, Math.min(KEPT - 1, Math.round((1 - (e.clientX - box.left) / box.width) * (KEPT - 1)))));
  });
  c.svg.addEventListener("pointerleave", () => hover(null));
  return c;
}

let back = null; // how many seconds before now the pointer is
function hover(seconds) {
  back = seconds;
  charts.forEach(drawChart);
}

function drawChart(c) {
  const W = 600, H = 110;
  const shown = c.all.filter(moves);
  c.el.hidden = !shown.length && c.rank > 0;
  if (c.el.hidden) return;
  const one = c.all[0].unit === "1";
  const most = Math.max(one ? 1 : 1e-9, ...shown.map((f) => Math.max(...f.points))), max = most * (one ? 1 : 1.08);
  c.svg.replaceChildren();
  for (const y of [0, H / 2, H]) c.svg.append(svg("line", { class: "grid", x1: 0, x2: W, y1: y, y2: y }));
  for (const f of shown) c.svg.append(svg("path", { class: "c" + f.colour, d: line(f.points, W, H, max, KEPT) }));
  if (back !== null) c.svg.append(svg("line", { class: "cross", x1: W - back, x2: W - back, y1: 0, y2: H }));
  c.max.textContent = shown.length ? "max " + short(most) + " " + unitOf(c.all[0]) : "";
  c.legend.replaceChildren(...(shown.length ? shown : c.all.slice(0, 1)).map((f) => {
    const i = f.points.length - 1 - (back || 0);
    const v = i >= 0 ? f.points[i] : NaN;
    const b = html("b", {}, Number.isNaN(v) ? "–" : short(v));
    return html("li", {}, html("i", { class: "c" + f.colour }), nameOf(f) + " ", b, " " + unitOf(f));
  }));
  if (back !== null) c.legend.append(html("li", {}, back + " s ago"));
}

function drawStrip() {
  const el = document.getElementById("strip");
  if (!el || !shownPolicy || !shownPolicy.states) return;
  const runs = shownPolicy.states, total = runs.reduce((n, r) => n + r.seconds, 0);
  let x = KEPT - total;
  el.replaceChildren(...runs.map((r) => {
    const rect = svg("rect", { class: r.state, x, y: 0, width: r.seconds, height: 18 });
    const title = svg("title", {});
    title.textContent = r.state + " for " + r.seconds + " s";
    rect.append(title);
    x += r.seconds;
    return rect;
  }));
  let legend = el.parentElement.querySelector(".legend");
  if (!legend) el.parentElement.append(legend = html("ul", { class: "legend" }));
  legend.replaceChildren(...[...new Set(runs.map((r) => r.state))].map((s) => {
    const n = runs.filter((r) => r.state === s).reduce((n, r) => n + r.seconds, 0);
    return html("li", {}, html("i", { class: s }), s + " ", html("b", {}, n < 120 ? n + " s" : Math.round(n / 60) + " min"));
  }));
}

function onPolicy(m) {
  const page = document.getElementById("page");
  if (String(m.shape) !== page.dataset.shape) reload().catch(() => {});
  if (!shownPolicy || !m.points || m.points.length !== shownPolicy.figures.length) return;
  if (m.at <= shownPolicy.tick) return;
  const missed = m.at - shownPolicy.tick;
  if (missed > GAP) { shownPolicy = null; drawPolicy().catch(() => {}); return; }
  shownPolicy.figures.forEach((f, i) => {
    for (let n = 0; n < missed; n++) f.points.push(m.points[i]);
    f.points.splice(0, Math.max(0, f.points.length - KEPT));
    f.value = m.values[i];
  });
  shownPolicy.tick = m.at;
  text(page, "[data-rate]", m.rate); text(page, "[data-share]", m.share); text(page, "[data-detail]", m.detail);
  if (page.querySelector(".all")?.open) page.querySelectorAll("[data-value]").forEach((el, i) => { el.textContent = short(m.values[i]); });
  if (shownPolicy.states) {
    const now = shownPolicy.figures.find((f) => f.name === "breaker.state" && f.value);
    const runs = shownPolicy.states, last = runs[runs.length - 1];
    const state = now && now.attrs.state.replaceAll("_", "-");
    if (now && last && state === last.state) last.seconds += missed;
    else if (now) runs.push({ state, seconds: missed });
    let total = runs.reduce((n, r) => n + r.seconds, 0);
    while (total > KEPT) { const cut = Math.min(runs[0].seconds, total - KEPT); runs[0].seconds -= cut; total -= cut; if (!runs[0].seconds) runs.shift(); }
  }
  charts.forEach(drawChart);
  drawStrip();
}

// What every page does.

async function draw() {
  if (document.querySelector(".groups")) await drawOverview();
  if (document.getElementById("charts")) await drawPolicy();
}

function mark(e) {
  if (e.target.matches(".fields input")) e.target.classList.toggle("changed", e.target.value !== e.target.nextElementSibling?.value);
}

async function start() {
  const refresh = document.getElementById("main").dataset.refresh;
  document.addEventListener("input", mark);
  document.querySelectorAll(".fields input").forEach((i) => mark({ target: i }));
  try { await draw(); } catch { say(false, "not live"); }
  if (!refresh) return;
  if (/^\d+$/.test(refresh)) {
    say(true, "live");
    setInterval(() => { if (!document.hidden) reload().then(() => say(true, "live"), () => say(false, "not live")); }, refresh * 1000);
    return;
  }
  connect(refresh);
}

function connect(url) {
  const source = new EventSource(url);
  let hiding;
  const hide = () => {
    clearTimeout(hiding);
    // A page that nobody sees for long leaves its place to another.
    if (document.hidden) { hiding = setTimeout(() => { source.close(); say(false, "not live"); }, 60000); return; }
    if (source.readyState === EventSource.CLOSED) again(0);
  };
  const again = (wait) => {
    source.close();
    document.removeEventListener("visibilitychange", hide);
    setTimeout(() => connect(url), wait);
  };
  source.onmessage = (e) => {
    say(true, "live");
    const m = JSON.parse(e.data);
    if (document.querySelector(".groups")) onOverview(m); else onPolicy(m);
  };
  source.onerror = () => {
    if (source.readyState !== EventSource.CLOSED) { say(false, "connecting"); return; }
    // The server has said no: it is closed, or enough others are watching.
    say(false, "not live");
    again(10000);
  };
  document.addEventListener("visibilitychange", hide);
}

start();
