// This script draws the page's metrics. While the page is visible, it requests the page again every few seconds and
// updates the parts that have changed. Without the script, the page shows the state at the time of its request.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
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

// showLive shows whether the page is updated: every so many seconds; 0 means it is not.
function showLive(every, failed) {
  const held = document.querySelector("input[name=ids]:checked"), on = !failed && !held;
  const text = failed ? "not live" : held ? "paused by the selection" : "live";
  live.hidden = !every && !failed;
  live.classList.toggle("on", on);
  if (live.textContent !== text) live.textContent = text;
}

// renew requests the page and updates the parts with data-live. It skips parts that are in use: a button must not
// change under the pointer, and a selection is about the sagas that the operator saw.
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
  countSelected();
  if (focus && document.activeElement === document.body) {
    [...document.links].find((a) => a.getAttribute("href") === focus)?.focus({ preventScroll: true });
  }
}

// A form in open details shows a saga as it was when it was opened, and is sent with that sequence number.
function busy(part) {
  return part.querySelector("form") && (part.matches(":hover") || part.contains(document.activeElement)) ||
    part.querySelector("details[open] form") || [...part.querySelectorAll("textarea")].some((t) => t.value !== t.defaultValue) ||
    [...part.querySelectorAll("input:not([type=hidden])")].some((i) => i.type === "checkbox" ? i.checked : i.value);
}

// morph changes a node into another one with as few changes as possible. An element with a different data-key is
// replaced. Elements that the script draws are drawn again.
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
  // The operator opens and closes details, and the script shows and disables controls.
  for (const { name } of [...now.attributes]) if (!next.hasAttribute(name) && !["open", "disabled"].includes(name)) now.removeAttribute(name);
  for (const { name, value } of next.attributes) if (now.getAttribute(name) !== value && name !== "open") now.setAttribute(name, value);
  if (now.dataset.draw !== undefined) { drawOne(now); return; }
  if (now.dataset.script !== undefined) { now.hidden = false; if (now.matches("output")) return; }
  const old = [...now.childNodes], fresh = [...next.childNodes];
  fresh.forEach((child, i) => {
    if (old[i]) morph(old[i], child); else { now.append(child); draw(child); }
  });
  old.slice(fresh.length).forEach((child) => child.remove());
}

// Paths of charts. Values are numbers from the server; nothing is ever set as HTML.

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
  const two = (values) => values?.length === 1 ? [values[0], values[0]] : values || []; // one value is a line, too
  spark = { calls: two(spark.calls), bad: two(spark.bad) };
  const W = 120, H = 28, slots = Math.max(spark.calls.length, 2), max = Math.max(1e-9, ...spark.calls) * 1.05;
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

let charts = [], span = 0; // span is the number of seconds that the charts show

function drawCharts(home, metrics) {
  const byName = new Map();
  for (const f of metrics) byName.set(f.name, [...(byName.get(f.name) || []), f]);
  if (document.getElementById("strip")) byName.delete([...byName.keys()].find((name) => name.endsWith(".state")));
  span = Math.max(2, ...metrics.map((f) => f.points.length));
  const known = new Map(charts.map((c) => [c.name, c]));
  charts = [...byName].map(([name, all]) => {
    const c = known.get(name) || newChart(name);
    c.all = all;
    const taken = new Set();
    all.forEach((f, i) => { f.color = color(f, i, taken); });
    // Calls come first. Metrics that were always zero are only in the table.
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
  c.svg = svg("svg", { viewBox: "0 0 600 110", preserveAspectRatio: "none", role: "img", "aria-label": name + " over time" });
  c.max = html("span", { class: "max" });
  c.axis = html("p", { class: "axis", "aria-hidden": "true" });
  c.el = html("figure", { class: "chart" },
    html("figcaption", {}, html("code", {}, name, c.max)),
    c.legend, c.svg, c.axis);
  c.svg.addEventListener("pointermove", (e) => {
    const box = c.svg.getBoundingClientRect();
    hover(Math.max(0, Math.min(span - 1, Math.round((1 - (e.clientX - box.left) / box.width) * (span - 1)))));
  });
  c.svg.addEventListener("pointerleave", () => hover(null));
  return c;
}

let back = null; // number of seconds before now at the pointer
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
  for (const f of shown) c.svg.append(svg("path", { class: "c" + f.color, d: line(f.points, W, H, max, span) }));
  if (back !== null) { const x = W - back * W / (span - 1); c.svg.append(svg("line", { class: "cross", x1: x, x2: x, y1: 0, y2: H })); }
  c.legend.replaceChildren(...(shown.length ? shown : c.all.slice(0, 1)).map((f) => {
    const i = f.points.length - 1 - (back || 0);
    const v = i >= 0 ? f.points[i] : NaN;
    const b = html("b", {}, Number.isNaN(v) ? "–" : short(v));
    return html("li", {}, html("i", { class: "c" + f.color }), nameOf(f) + " ", b, " " + unitOf(f));
  }));
  if (back !== null) c.legend.append(html("li", {}, back + " s ago"));
  c.axis.replaceChildren(...[duration(span) + " ago", duration(span / 2) + " ago", "now"].map((text) => html("span", {}, text)));
  c.max.textContent = shown.length ? "max " + short(most) + " " + unitOf(c.all[0]) : "";
}

// duration returns a number of seconds as text: "90 s", "10 min".
function duration(seconds) { return seconds < 120 ? Math.round(seconds) + " s" : Math.round(seconds / 60) + " min"; }

// words returns a state as text: "forced open".
function words(state) { return state.replaceAll("_", " "); }

function drawStrip(el, runs) {
  const total = runs.reduce((n, r) => n + r.seconds, 0);
  let x = 0;
  el.setAttribute("viewBox", `0 0 ${total} 18`);
  el.replaceChildren(...runs.map((r) => {
    const rect = svg("rect", { class: r.state, x, y: 0, width: r.seconds, height: 18 });
    const title = svg("title", {});
    title.textContent = words(r.state) + " for " + duration(r.seconds);
    rect.append(title);
    x += r.seconds;
    return rect;
  }));
  el.parentElement.querySelector(".legend").replaceChildren(...[...new Set(runs.map((r) => r.state))].map((s) => {
    const n = runs.filter((r) => r.state === s).reduce((n, r) => n + r.seconds, 0);
    return html("li", {}, html("i", { class: s }), words(s) + " ", html("b", {}, duration(n)));
  }));
}

// Selection of sagas in a list.

// countSelected shows the number of selected sagas, and enables the actions that at least one of them allows.
function countSelected() {
  const form = document.getElementById("many");
  if (!form) return;
  const all = [...document.querySelectorAll("input[name=ids]")], selected = all.filter((i) => i.checked);
  form.querySelector("output").textContent = selected.length + " selected";
  for (const b of form.querySelectorAll("button")) b.disabled = !selected.some((i) => i.dataset.can.split(" ").includes(b.value));
  for (const pick of document.querySelectorAll("[data-pick]")) {
    const of = picked(pick), n = of.filter((i) => i.checked).length;
    pick.checked = n > 0 && n === of.length;
    pick.indeterminate = n > 0 && n < of.length;
  }
}

// picked returns the check boxes that a check box for a group, or for all sagas, selects.
function picked(pick) {
  return [...(pick.dataset.pick === "group" ? pick.closest("li") : document).querySelectorAll("input[name=ids]")];
}

document.addEventListener("change", (e) => {
  if (e.target.matches("[data-pick]")) for (const i of picked(e.target)) i.checked = e.target.checked;
  if (!e.target.matches("[type=checkbox]")) return;
  countSelected();
  showLive(true, live.textContent === "not live");
});

// All pages.

function draw(root) {
  for (const el of [...(root.querySelectorAll?.("[data-script]") || [])]) el.hidden = false;
  if (root.dataset?.draw) drawOne(root);
  for (const el of root.querySelectorAll?.("[data-draw]") || []) drawOne(el);
}

function drawOne(el) {
  if (!el.dataset.draw) return; // another element draws it
  const data = JSON.parse(el.dataset.draw);
  if (el.matches(".spark")) drawSpark(el, data);
  if (el.id === "strip") drawStrip(el, data);
  if (el.id === "charts") drawCharts(el, data);
}

const wait = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));

// seen waits until the page is visible. A hidden page sends no requests.
const seen = () => new Promise((done) => {
  if (!document.hidden) { done(); return; }
  document.addEventListener("visibilitychange", done, { once: true });
});

async function start() {
  const main = document.getElementById("main"), self = document.getElementById("page")?.dataset.self;
  // The response to a form has the address of the action. A reload there would repeat the action.
  if (self && location.pathname.endsWith("/act")) history.replaceState(null, "", self);
  draw(document);
  countSelected();
  for (let failed = false; ;) {
    const every = Number(main.dataset.refresh || 0);
    showLive(every, failed);
    if (!every) return;
    await wait(failed ? Math.max(every, 5) : every);
    if (document.hidden) { showLive(every, true); await seen(); }
    failed = false;
    try { await renew(); } catch { failed = true; }
  }
}

start();
