// Draws both sides of the scenario, of the same height, twice a second.
"use strict";

const SVG = "http://www.w3.org/2000/svg", W = 600, H = 92;
const sides = ["plain", "resilient"];

const charts = [
  { name: "Answers per second", key: [["good", "fresh"], ["stale", "stale"], ["bad", "failed"]],
    layers: (s) => [["good", s.answered], ["stale", s.stale], ["bad", s.failed]], rate: true, least: 200 },
  { name: "p99 of the last second, ms", line: (s) => s.p99, least: 100 },
  { name: "Requests to the backend per second", line: (s) => s.backend, rate: true, least: 100 },
  { name: "In flight", line: (s) => s.in_flight, least: 10 },
];

function el(name, attrs, ...children) {
  const e = document.createElement(name);
  for (const k in attrs) e.setAttribute(k, attrs[k]);
  e.append(...children);
  return e;
}

function svg(name, attrs) {
  const e = document.createElementNS(SVG, name);
  for (const k in attrs) e.setAttribute(k, attrs[k]);
  return e;
}

for (const side of sides) {
  const home = document.getElementById(side);
  home.append(el("dl", { class: "totals" }, ...["answered", "failed", "worst p99", "most in flight"].map((t) => el("div", {}, el("dt", {}, t), el("dd", {}, "–")))));
  for (const c of charts) {
    const key = el("span", { class: "key" }, ...(c.key || []).map(([cls, text]) => el("span", {}, el("i", { class: cls }), text)), el("span", { class: "max" }));
    const drawing = svg("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", "aria-label": `${c.name}, ${side}` });
    (c.on ||= {})[side] = drawing;
    home.append(el("figure", {}, el("figcaption", {}, c.name, key), drawing));
  }
}

function steps(values, base, x, y) {
  // The area between two rows of values.
  let d = "";
  values.forEach((v, i) => { d += (i ? "L" : "M") + x(i) + " " + y(base[i] + v); });
  for (let i = values.length - 1; i >= 0; i--) d += "L" + x(i) + " " + y(base[i]);
  return d + "Z";
}

// smooth returns the means over a second, for what counts calls.
function smooth(rows, counts) {
  const over = 5;
  if (!counts) return rows;
  return rows.map((r, i) => r.map(([cls], k) => {
    const past = rows.slice(Math.max(0, i - over + 1), i + 1);
    return [cls, past.reduce((a, p) => a + p[k][1], 0) / past.length];
  }));
}

function draw(live) {
  const n = live.slices.length;
  const x = (i) => ((live.shown - n + i) * W / (live.shown - 1)).toFixed(1);
  const now = n ? live.slices[n - 1].phase : -1;
  const list = document.getElementById("phases");
  if (list.children.length !== live.phases.length) list.replaceChildren(...live.phases.map((p) => el("li", {}, p.name)));
  [...list.children].forEach((li, i) => { if (i === now) li.setAttribute("aria-current", "step"); else li.removeAttribute("aria-current"); });
  for (const c of charts) {
    const rate = (s, v) => c.rate ? v / s.seconds : v;
    const rows = (side) => live.slices.map((s) => (c.line ? [["line", c.line(s[side])]] : c.layers(s[side])).map(([cls, v]) => [cls, rate(s, v)]));
    const drawn = { plain: smooth(rows("plain"), c.rate), resilient: smooth(rows("resilient"), c.rate) };
    const max = Math.max(c.least, ...sides.flatMap((side) => drawn[side].map((r) => r.reduce((a, [, v]) => a + v, 0)))) * 1.05;
    const y = (v) => (H - v / max * H).toFixed(1);
    for (const side of sides) {
      const drawing = c.on[side];
      drawing.replaceChildren();
      live.slices.forEach((s, i) => { if (live.outages[s.phase]) drawing.append(svg("rect", { class: "outage", x: x(i), y: 0, width: W / (live.shown - 1) + 0.5, height: H })); });
      for (const at of [H - 0.5, H / 2, 0.5]) drawing.append(svg("line", { class: "grid", x1: 0, x2: W, y1: at, y2: at }));
      if (!n) continue;
      if (c.line) {
        drawing.append(svg("path", { class: "line", d: drawn[side].map((r, i) => (i ? "L" : "M") + x(i) + " " + y(r[0][1])).join("") }));
      } else {
        const base = drawn[side].map(() => 0);
        drawn[side][0].forEach(([cls], k) => {
          const values = drawn[side].map((r) => r[k][1]);
          drawing.append(svg("path", { class: cls, d: steps(values, base, x, y) }));
          values.forEach((v, i) => { base[i] += v; });
        });
      }
      drawing.parentElement.querySelector(".max").textContent = "0 – " + Math.round(max);
    }
  }
  const sums = Object.fromEntries(sides.map((side) => [side, live.slices.map((s) => s[side]).reduce((a, s) => ({
    good: a.good + s.answered + s.stale, failed: a.failed + s.failed, p99: Math.max(a.p99, s.p99), most: Math.max(a.most, s.in_flight),
  }), { good: 0, failed: 0, p99: 0, most: 0 })]));
  for (const side of sides) {
    const s = sums[side], o = sums[side === "plain" ? "resilient" : "plain"];
    const share = (t) => t.good / Math.max(1, t.good + t.failed);
    const values = [
      [n ? (share(s) * 100).toFixed(1) + " %" : "–", share(s) < share(o) - 0.005],
      [String(s.failed), s.failed > o.failed * 1.2],
      [Math.round(s.p99) + " ms", s.p99 > o.p99 * 1.2],
      [String(s.most), s.most > o.most * 1.2],
    ];
    document.querySelectorAll(`#${side} dd`).forEach((dd, i) => {
      dd.textContent = values[i][0];
      dd.className = values[i][1] ? "worse" : "";
    });
  }
  document.getElementById("last").textContent = live.last ? "The previous run: " + live.last : "";
}

async function tick() {
  try { draw(await (await fetch("live")).json()); } catch { /* the program has ended, or is about to start */ }
  setTimeout(tick, 500);
}
tick();
