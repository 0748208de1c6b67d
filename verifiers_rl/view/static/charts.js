// Curves over steps, drawn by uPlot: several runs in one chart, charts that point at the same step.

import { colorOf, formatNumber, formatSeconds, h, isNumber } from "./dom.js";

/* global uPlot */

export const RUN_COLORS = ["--run0", "--run1", "--run2", "--run3", "--run4", "--run5", "--run6", "--run7"];
const DASHES = [[], [8, 4], [2, 3]]; // for runs beyond the number of colors

// The mean over the past that forgets: 0 is the values themselves.
export function smoothed(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (!isNumber(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// Curves with their own x as one table: x of all, and for each curve its y or null.
export function joined(curves) {
  const xs = [...new Set(curves.flatMap((curve) => curve.xs))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const table = [xs];
  for (const curve of curves) {
    const ys = Array(xs.length).fill(null);
    curve.xs.forEach((x, i) => {
      if (isNumber(curve.ys[i])) ys[place.get(x)] = curve.ys[i];
    });
    table.push(ys);
  }
  return table;
}

// One chart. `curves`: {label, color (a style's variable), number (of the run), xs, ys, raw}.
// `board` connects charts: {key, zoom, setZoom, pin, xLabel}.
export class Chart {
  #plot = null;
  #table = [[]];
  #isShown = false;

  constructor({ name, title = name, about = {}, board, stacked = false }) {
    this.name = name;
    this.about = about;
    this.board = board;
    this.stacked = stacked;
    this.now = h("p", { class: "now" });
    this.area = h("div", { class: "plot", tabindex: "0", role: "img" });
    const info =
      about.text &&
      h(
        "details",
        { class: "info" },
        h("summary", { "aria-label": `What is ${title}?` }, "i"),
        h("p", {}, about.text),
      );
    this.element = h(
      "figure",
      { class: "chart", id: `chart-${name}` },
      h("figcaption", {}, h("h3", {}, title), info),
      this.now,
      this.area,
    );
    this.area.addEventListener("keydown", (event) => this.#onKey(event));
    this.area.addEventListener("blur", () => this.#plot?.setCursor({ left: -10, top: -10 }));
    // Charts below the screen are drawn when they come into sight.
    this.observer = new IntersectionObserver(
      (entries) => {
        this.#isShown = entries.at(-1).isIntersecting;
        if (this.#isShown && this.#isStale) this.#draw();
      },
      { rootMargin: "200px" },
    );
    this.observer.observe(this.area);
    this.resizes = new ResizeObserver(() => {
      if (this.#plot && this.area.clientWidth)
        this.#plot.setSize({ width: this.area.clientWidth, height: this.area.clientHeight });
    });
    this.resizes.observe(this.area);
  }

  #isStale = true;
  highest = null; // of stacks that are cut

  set(curves) {
    this.curves = curves;
    this.#table = joined(curves);
    this.#isStale = true;
    this.#say(null);
    this.area.setAttribute("aria-label", this.#summary());
    if (this.#isShown) this.#draw();
  }

  redraw() {
    this.#plot?.destroy();
    this.#plot = null;
    this.#isStale = true;
    if (this.#isShown) this.#draw();
  }

  zoom() {
    if (this.#plot) this.#plot.setScale("x", this.#xRange());
  }

  destroy() {
    this.observer.disconnect();
    this.resizes.disconnect();
    this.#plot?.destroy();
  }

  #xRange() {
    const xs = this.#table[0];
    const [min, max] = this.board.zoom || [xs[0] ?? 0, xs.at(-1) ?? 1];
    return min < max ? { min, max } : { min: min - 1, max: max + 1 };
  }

  #draw() {
    this.#isStale = false;
    if (!this.area.clientWidth) return;
    const signature = JSON.stringify(this.curves.map(({ label, color }) => [label, color]));
    if (this.#plot && this.signature === signature) {
      this.#plot.setData(this.#data(), false);
      this.#plot.setScale("x", this.#xRange());
      return;
    }
    this.signature = signature;
    this.#plot?.destroy();
    this.#plot = new uPlot(this.#options(), this.#data(), this.area);
    this.#plot.setScale("x", this.#xRange());
  }

  // Stacked curves are drawn as sums, the highest first.
  #data() {
    if (!this.stacked) return this.#table;
    const [xs, ...own] = this.#table;
    const sums = [];
    let below = xs.map(() => 0);
    for (const ys of own) {
      below = below.map((sum, i) => sum + (ys[i] ?? 0));
      sums.push(below);
    }
    return [xs, ...sums.reverse()];
  }

  #options() {
    const text = colorOf("--muted");
    const line = colorOf("--line");
    const curves = this.stacked ? this.curves.toReversed() : this.curves;
    const axis = {
      stroke: text,
      font: "11px system-ui, sans-serif",
      grid: { stroke: line, width: 1 },
      ticks: { show: false },
    };
    const yFormat = this.about.unit === "s" ? formatSeconds : formatNumber;
    return {
      width: this.area.clientWidth,
      height: this.area.clientHeight,
      legend: { show: false },
      padding: [8, 16, 0, 0],
      scales: {
        x: { time: false, range: (u, min, max) => (min < max ? [min, max] : [min - 1, max + 1]) },
        y: { range: (u, min, max) => (this.stacked ? this.#cutRange(u, max) : niceRange(min, max)) },
      },
      axes: [
        {
          ...axis,
          size: 26,
          gap: 3,
          grid: { show: false },
          values: (u, ticks) => ticks.map(formatNumber),
          incrs: this.board.isTime ? undefined : STEP_INCREMENTS,
        },
        { ...axis, size: 56, gap: 4, values: (u, ticks) => ticks.map(yFormat) },
      ],
      series: [
        {},
        ...curves.map(({ label, color, number, isFaint }) => {
          const stroke = colorOf(color);
          return {
            label,
            stroke,
            width: isFaint ? 1 : 1.8,
            alpha: isFaint ? 0.3 : 1,
            dash: DASHES[Math.floor((number || 0) / RUN_COLORS.length) % DASHES.length],
            fill: this.stacked ? stroke : undefined,
            spanGaps: true,
            points: { show: (u) => u.data[0].length < 40 && !isFaint && !this.stacked, size: 5 },
          };
        }),
      ],
      cursor: {
        sync: { key: this.board.key },
        drag: { x: true, y: false, setScale: false },
        bind: {
          dblclick: () => () => {
            this.board.setZoom(null);
            return null;
          },
        },
        points: { size: 7 },
      },
      hooks: {
        setCursor: [(u) => this.#say(u.cursor.idx)],
        setSelect: [(u) => this.#onSelect(u)],
        draw: [(u) => this.#onDraw(u)],
        ready: [(u) => u.over.addEventListener("click", () => this.#onClick(u))],
      },
    };
  }

  // A few very high stacks, such as the first step, would leave the others flat.
  #cutRange(u, max) {
    const [from, to] = [u.scales.x.min ?? -Infinity, u.scales.x.max ?? Infinity];
    const totals = u.data[1]
      .filter((_, i) => u.data[0][i] >= from && u.data[0][i] <= to)
      .sort((a, b) => a - b);
    const high = totals[Math.floor(0.97 * (totals.length - 1))] || 0;
    this.highest = high && max > 2 * high ? max : null;
    return [0, this.highest ? 1.3 * high : 1.06 * max || 1];
  }

  #lastDrag = 0;

  #onSelect(u) {
    const { left, width } = u.select;
    if (width > 4) {
      this.#lastDrag = performance.now();
      this.board.setZoom([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
    }
    if (width) u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  #onClick(u) {
    if (performance.now() - this.#lastDrag > 300 && isNumber(u.cursor.idx))
      this.board.pin(this.#table[0][u.cursor.idx]);
  }

  #onKey(event) {
    const u = this.#plot;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!u) return;
    const xs = this.#table[0];
    if (step) {
      const idx = Math.min(Math.max((u.cursor.idx ?? (step > 0 ? -1 : xs.length)) + step, 0), xs.length - 1);
      u.setCursor({ left: u.valToPos(xs[idx], "x"), top: 10 });
      event.preventDefault();
    } else if (event.key === "Enter" && isNumber(u.cursor.idx)) {
      this.board.pin(xs[u.cursor.idx]);
    } else if (event.key === "Escape") {
      this.board.setZoom(null);
    }
  }

  #saidHighest = null;

  #onDraw(u) {
    this.#drawLimit(u);
    if (this.#saidHighest === this.highest) return;
    this.#saidHighest = this.highest;
    this.#say(u.cursor.idx);
  }

  // A line where a value begins to be a reason to look.
  #drawLimit(u) {
    const limit = this.about.above;
    if (!limit || limit < u.scales.y.min || limit > u.scales.y.max) return;
    const y = Math.round(u.valToPos(limit, "y", true));
    u.ctx.save();
    u.ctx.strokeStyle = colorOf("--bad");
    u.ctx.setLineDash([4, 4]);
    u.ctx.beginPath();
    u.ctx.moveTo(u.bbox.left, y);
    u.ctx.lineTo(u.bbox.left + u.bbox.width, y);
    u.ctx.stroke();
    u.ctx.restore();
  }

  // The values at the cursor, or the last ones.
  #say(idx) {
    const format = this.about.unit === "s" ? formatSeconds : formatNumber;
    const [xs, ...own] = this.#table;
    const items = this.curves.map((curve, i) => {
      if (curve.isFaint) return null;
      const ys = own[i];
      let place = isNumber(idx) ? idx : ys.findLastIndex(isNumber);
      if (isNumber(idx) && ys[place] === null) place = nearest(ys, place);
      return h(
        "span",
        { class: "value" },
        h("i", { class: "swatch", css: { background: `var(${curve.color})` }, "aria-hidden": "true" }),
        this.stacked || this.curves.filter((c) => !c.isFaint).length > 1
          ? `${curve.short ?? curve.label} `
          : "",
        h("b", {}, format(ys[place])),
      );
    });
    const at = isNumber(idx)
      ? h("span", { class: "quiet" }, `${this.board.xLabel} ${formatNumber(xs[idx])}`)
      : null;
    const cut = this.highest
      ? h("span", { class: "quiet" }, `cut; the highest is ${format(this.highest)}`)
      : null;
    this.now.replaceChildren(...[...items, at, cut].filter(Boolean));
  }

  #summary() {
    return (
      this.curves
        .filter((c) => !c.isFaint)
        .map((curve) => {
          const known = curve.ys.filter(isNumber);
          if (!known.length) return `${this.name}, ${curve.label}: no values`;
          return `${this.name}, ${curve.label}: from ${formatNumber(known[0])} to ${formatNumber(known.at(-1))}`;
        })
        .join("; ") + ". Arrow keys move the cursor; Enter keeps a step."
    );
  }
}

const STEP_INCREMENTS = [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6];

function niceRange(min, max) {
  if (min === null || max === null || min === undefined) return [0, 1];
  if (min >= 0 && (min < 0.6 * max || max === 0)) return [0, max > 0 ? 1.06 * max : 1];
  const pad = max > min ? 0.06 * (max - min) : Math.abs(min) * 0.1 || 1;
  return [min - pad, max + pad];
}

function nearest(ys, place) {
  for (let d = 1; d < ys.length; d += 1) {
    if (isNumber(ys[place - d])) return place - d;
    if (isNumber(ys[place + d])) return place + d;
  }
  return place;
}
