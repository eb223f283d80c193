// The live part of the console: it draws the metrics that are in the page, and while somebody sees it
// fetches it again each second and takes over what is new. Without it the page shows how things were
// when it was loaded.
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

// renew fetches this page and takes over the parts that are marked as live. A part with a form that
// somebody fills in, or points at, stays as it is: a button must not change under the pointer.
async function renew() {
  const url = new URL(location.href);
  url.searchParams.delete("done");
  const answer = await fetch(url, { headers: { Accept: "text/html" }, signal: AbortSignal.timeout(10000) });
  if (!answer.ok) throw answer;
  const doc = new DOMParser().parseFromString(await answer.text(), "text/html");
  const focus = document.activeElement?.getAttribute("href");
  document.title = doc.title;
  document.getElementById("main").dataset.refresh = doc.getElementById("main").dataset.refresh || 0;
  for (const next of doc.querySelectorAll("[data-live]")) {
    const now = document.querySelector(`[data-live="${next.dataset.live}"]`);
    if (now && !busy(now)) morph(now, document.adoptNode(next));
  }
  if (focus && document.activeElement === document.body) {
    [...document.links].find((a) => a.getAttribute("href") === focus)?.focus({ preventScroll: true });
  }
}

function busy(part) {
  return part.querySelector("form") && (part.matches(":hover") || part.contains(document.activeElement)) ||
    [...part.querySelectorAll("input:not([type=hidden])")].some((i) => i.value);
}

// morph makes a node like another one, and touches only what differs. Elements of different keys are
// different things, and one takes the place of the other. What a script draws is drawn anew.
function morph(now, next) {
  if (now.nodeName !== next.nodeName || now.dataset?.key !== next.dataset?.key) {
    now.replaceWith(next);
    draw(next);
    return;
  }
  if (now.nodeType !== Node.ELEMENT_NODE) {
    if (now.data !== next.data) now.data = next.data;
    return;
  }
  for (const { name } of [...now.attributes]) if (!next.hasAttribute(name) && name !== "open") now.removeAttribute(name);
  for (const { name, value } of next.attributes) if (now.getAttribute(name) !== value) now.setAttribute(name, value);
  if (now.dataset.draw !== undefined) { drawOne(now); return; }
  const old = [...now.childNodes], fresh = [...next.childNodes];
  fresh.forEach((child, i) => {
    if (old[i]) morph(old[i], child); else { now.append(child); draw(child); }
  });
  old.slice(fresh.length).forEach((child) => child.remove());
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
  spark = { calls: spark.calls || [], bad: spark.bad || [] };
  const W = 120, H = 28, slots = KEPT / STEP, max = Math.max(1e-9, ...spark.calls) * 1.05;
  el.replaceChildren(svg("line", { class: "base", x1: 0, x2: W, y1: H, y2: H }));
  if (!spark.calls.some((v) => v > 0)) return;
  const bad = spark.bad.map((v) => Math.min(v, max));
  el.append(svg("path", { class: "under", d: area(spark.calls, W, H, max, slots) }));
  if (bad.some((v) => v > 0)) el.append(svg("path", { class: "bad", d: area(bad, W, H, max, slots) }));
  el.append(svg("path", { class: "calls", d: line(spark.calls, W, H, max, slots) }));
}

// The page of a policy.

const meaning = {
  success: 1, admitted: 1, hit: 1, first_try: 1, loaded: 1, accepted: 1, done: 1, first_won: 1, allowed: 1, elected: 1, closed: 5, completed: 5, started: 1,
  failure: 2, exhausted: 2, failed: 2, open: 2, stuck: 2, lost: 2, throttled: 2,
  refused: 3, stale: 3, recovered: 5, over_budget: 3, half_open: 3, compensated: 4, forced_open: 4, hedge_won: 4,
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

let charts = [];

function drawCharts(home, metrics) {
  const byName = new Map();
  for (const f of metrics) byName.set(f.name, [...(byName.get(f.name) || []), f]);
  if (document.getElementById("strip")) byName.delete([...byName.keys()].find((name) => name.endsWith(".state")));
  const known = new Map(charts.map((c) => [c.name, c]));
  charts = [...byName].map(([name, all]) => {
    const c = known.get(name) || newChart(name);
    c.all = all;
    const taken = new Set();
    all.forEach((f, i) => { f.color = color(f, i, taken); });
    // What moves comes first, what has stood still at zero is left to the table.
    c.rank = /\.(calls|requests)$|^saga\.step\.attempts$/.test(name) ? 0 : all.some(moves) ? 1 : 2;
    return c;
  }).sort((a, b) => a.rank - b.rank);
  const order = charts.map((c) => c.el);
  if (order.length !== home.children.length || order.some((el, i) => el !== home.children[i])) home.replaceChildren(...order);
  charts.forEach(drawChart);
}

function moves(f) { return f.points.some((v) => v !== 0); }

function newChart(name) {
  const c = { name };
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

// words returns a state as text: "forced open".
function words(state) { return state.replaceAll("_", " "); }

function drawStrip(el, runs) {
  const total = runs.reduce((n, r) => n + r.seconds, 0);
  let x = KEPT - total;
  el.replaceChildren(...runs.map((r) => {
    const rect = svg("rect", { class: r.state, x, y: 0, width: r.seconds, height: 18 });
    const title = svg("title", {});
    title.textContent = words(r.state) + " for " + r.seconds + " s";
    rect.append(title);
    x += r.seconds;
    return rect;
  }));
  el.parentElement.querySelector(".legend").replaceChildren(...[...new Set(runs.map((r) => r.state))].map((s) => {
    const n = runs.filter((r) => r.state === s).reduce((n, r) => n + r.seconds, 0);
    return html("li", {}, html("i", { class: s }), words(s) + " ", html("b", {}, n < 120 ? n + " s" : Math.round(n / 60) + " min"));
  }));
}

// What every page does.

function draw(root) {
  if (root.dataset?.draw) drawOne(root);
  for (const el of root.querySelectorAll?.("[data-draw]") || []) drawOne(el);
}

function drawOne(el) {
  if (!el.dataset.draw) return; // a part of another
  const data = JSON.parse(el.dataset.draw);
  if (el.matches(".spark")) drawSpark(el, data);
  if (el.id === "strip") drawStrip(el, data);
  if (el.id === "charts") drawCharts(el, data);
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
  draw(document);
  for (let failed = false; ;) {
    const every = Number(main.dataset.refresh || 0);
    if (every || failed) say(!failed, failed ? "not live" : "live"); else live.hidden = true;
    if (!every) return;
    await wait(failed ? Math.max(every, 5) : every);
    if (document.hidden) { say(false, "not live"); await seen(); }
    failed = false;
    try { await renew(); } catch { failed = true; }
  }
}

start();
