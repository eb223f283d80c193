// The live part of the console: it draws what the JSON twin of the page says, and asks for what
// is new while somebody sees the page. Without it the page shows how things were when it was
// loaded.
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

// ask fetches this page: as it is, or as its JSON twin with what is new since a sample.
function ask(accept, since) {
  const url = new URL(location.href);
  url.searchParams.delete("done");
  if (since !== undefined) url.searchParams.set("since", since);
  return fetch(url, { headers: { Accept: accept }, signal: AbortSignal.timeout(10000) }).then((r) => r.ok ? r : Promise.reject(r));
}

const twin = (since) => ask("application/json", since).then((r) => r.json());

// reload takes over from the server what may change: all parts that are marked as live, or
// the whole page if none is. A part that somebody is filling in, or points at, stays.
async function reload() {
  const doc = new DOMParser().parseFromString(await (await ask("text/html")).text(), "text/html");
  const next = doc.getElementById("page"), now = document.getElementById("page");
  if (!next || !now) return;
  document.title = doc.title;
  document.getElementById("main").dataset.refresh = doc.getElementById("main").dataset.refresh || 0;
  swap(document.querySelector(".band"), doc.querySelector(".band"));
  const parts = [...next.querySelectorAll("[data-live]")];
  if (!parts.length) { swap(now, next); await draw(); return; }
  for (const part of parts) swap(now.querySelector(`[data-live="${part.dataset.live}"]`), part);
  const more = now.dataset.figures !== next.dataset.figures;
  now.dataset.shape = next.dataset.shape;
  now.dataset.figures = next.dataset.figures;
  if (more) await draw();
}

function swap(now, next) {
  if (!now || !next || now.outerHTML === next.outerHTML) return;
  if (now.matches(":hover") && now.querySelector("form")) return;
  if (now.contains(document.activeElement) && document.activeElement.matches("input, select, textarea, button")) return;
  if ([...now.querySelectorAll("input:not([type=hidden])")].some((i) => i.value)) return;
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

let cards = new Map(), tick = -1;

async function drawOverview() {
  const o = await twin();
  cards = new Map(o.policies.map((p) => [p.path, { spark: p.spark }]));
  for (const el of document.querySelectorAll("a.card")) {
    const c = cards.get(el.dataset.path);
    if (c) { c.el = el; drawSpark(el.querySelector(".spark"), c.spark); }
  }
  tick = o.tick;
}

const GAP = 5; // seconds without news, after which a page is drawn anew

async function followOverview() {
  const o = await twin(tick);
  if (String(o.shape) !== document.getElementById("page").dataset.shape) { await reload(); return; }
  if (o.tick - tick > GAP || o.tick < tick) { await drawOverview(); return; }
  const news = new Map((o.policies || []).map((p) => [p.path, p]));
  const steps = Math.floor(o.tick / STEP) - Math.floor(tick / STEP) + 1; // the first is one that is there
  for (const [path, c] of cards) {
    if (!c.el) continue;
    const p = news.get(path);
    const words = p ? p.words : { rate: "0", share: "idle" };
    text(c.el, "[data-rate]", words.rate); text(c.el, "[data-share]", words.share);
    text(c.el, "[data-since]", words.since); text(c.el, "[data-detail]", p && p.detail);
    const error = c.el.querySelector(".error");
    error.title = p && p.error && p.error !== "hidden" ? p.error : "";
    text(c.el, ".error", error.title);
    if (!p && steps === 1) continue;
    for (const key of ["calls", "bad"]) {
      const list = c.spark[key], more = p ? p.spark[key] : Array(steps).fill(0);
      list.splice(-1, 1, ...more);
      list.splice(0, list.length - KEPT / STEP);
    }
    drawSpark(c.el.querySelector(".spark"), c.spark);
  }
  tick = o.tick;
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
  const u = f.unit === "s" ? "s" : "";
  return f.counter ? (u + "/s").trim() : u.trim();
}

function nameOf(f) {
  const parts = Object.entries(f.attrs || {}).filter(([, v]) => v !== "").map(([, v]) => v.replaceAll("_", " "));
  return parts.length > 1 && parts[0] === "refused" ? parts[1] : parts.join(" ") || (f.counter ? "a second" : "now");
}

function color(f, i, taken) {
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
  all.forEach((f, i) => { f.color = color(f, i, c.taken); });
  c.rank = /\.(calls|requests)$|^saga\.step\.attempts$/.test(name) ? 0 : all.some(moves) ? 1 : 2;
  c.legend = html("ul", { class: "legend" });
  c.svg = svg("svg", { viewBox: "0 0 600 110", preserveAspectRatio: "none", role: "img", "aria-label": name + ", over the last ten minutes" });
  c.max = html("span", { class: "max" });
  c.el = html("figure", { class: "chart" },
    html("figcaption", {}, html("code", {}, name, c.max)),
    c.legend, c.svg);
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
  for (const f of shown) c.svg.append(svg("path", { class: "c" + f.color, d: line(f.points, W, H, max, KEPT) }));
  if (back !== null) c.svg.append(svg("line", { class: "cross", x1: W - back, x2: W - back, y1: 0, y2: H }));
  c.legend.replaceChildren(...(shown.length ? shown : c.all.slice(0, 1)).map((f) => {
    const i = f.points.length - 1 - (back || 0);
    const v = i >= 0 ? f.points[i] : NaN;
    const b = html("b", {}, Number.isNaN(v) ? "–" : short(v));
    return html("li", {}, html("i", { class: "c" + f.color }), nameOf(f) + " ", b, " " + unitOf(f));
  }));
  if (back !== null) c.legend.append(html("li", {}, back + " s ago"));
  c.max.textContent = shown.length ? "max " + short(most) + " " + unitOf(c.all[0]) : "";
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

async function followPolicy() {
  const page = document.getElementById("page");
  const p = await twin(shownPolicy.tick);
  const missed = p.tick - shownPolicy.tick;
  const step = (tick) => Math.floor(tick / STEP); // tables and errors are renewed once in a step
  if (String(p.shape) !== page.dataset.shape || step(p.tick) !== step(shownPolicy.tick)) await reload();
  if (missed > GAP || missed < 0 || p.figures.length !== shownPolicy.figures.length) { await drawPolicy(); return; }
  shownPolicy.figures.forEach((f, i) => {
    f.points.push(...p.figures[i].points);
    f.points.splice(0, Math.max(0, f.points.length - KEPT));
    f.value = p.figures[i].value;
  });
  shownPolicy.tick = p.tick;
  shownPolicy.states = p.states;
  text(page, "[data-rate]", p.words.rate); text(page, "[data-share]", p.words.share);
  text(page, "[data-since]", p.words.since); text(page, "[data-detail]", p.detail);
  if (page.querySelector(".all")?.open) page.querySelectorAll("[data-value]").forEach((el, i) => { el.textContent = short(p.figures[i].value); });
  charts.forEach(drawChart);
  drawStrip();
}

// What every page does.

const overviewHere = () => document.querySelector(".groups"), policyHere = () => document.getElementById("charts");

async function draw() {
  if (overviewHere()) await drawOverview();
  if (policyHere()) await drawPolicy();
}

async function follow() {
  if (overviewHere()) return tick < 0 ? draw() : followOverview();
  if (policyHere()) return shownPolicy ? followPolicy() : draw();
  return reload();
}

function mark(e) {
  if (e.target.matches(".fields input")) e.target.classList.toggle("changed", e.target.value !== e.target.nextElementSibling?.value);
}

const wait = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));

// seen waits until somebody sees the page: one that is hidden asks for nothing.
const seen = () => new Promise((done) => {
  if (!document.hidden) { done(); return; }
  document.addEventListener("visibilitychange", done, { once: true });
});

async function start() {
  const main = document.getElementById("main"), self = document.getElementById("page")?.dataset.self;
  // The answer to a form has an address at which there is no page, and where F5 would act again.
  if (self && location.pathname.endsWith("/act")) history.replaceState(null, "", self);
  document.addEventListener("input", mark);
  document.querySelectorAll(".fields input").forEach((i) => mark({ target: i }));
  for (let next = draw; ; next = follow) {
    let failed = false;
    try { await next(); } catch { failed = true; }
    const every = Number(main.dataset.refresh || 0);
    if (every || failed) say(!failed && every > 0, failed ? "not live" : "live");
    else live.hidden = true;
    if (!every) return;
    await wait(failed ? Math.max(every, 5) : every);
    if (document.hidden) { say(false, "not live"); await seen(); }
  }
}

start();
