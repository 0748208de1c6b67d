// Where the time of a step went: for each run the shares of the whole, and each step as a stack.

import { formatSeconds, formatShare, h, isNumber } from "./dom.js";
import { Chart } from "./charts.js";
import { PHASES } from "./metrics.js";
import { statusOf, swatch } from "./runs.js";

// Seconds of each phase at each line that has a step's time: {steps, weights, phases: {name: []}}.
export function phasesOf(columns) {
  const total = columns.step_s || [];
  const places = [...total.keys()].filter((i) => isNumber(total[i]));
  const steps = places.map((i) => columns.step[i]);
  // A line has the mean over the steps since the one before it.
  const weights = steps.map((step, i) => Math.max(step - (steps[i - 1] ?? 0), 0) || 1);
  const phases = {};
  for (const { name } of PHASES.slice(0, -1)) phases[name] = places.map((i) => columns[name]?.[i] ?? 0);
  phases.other = places.map((i, n) =>
    Math.max(total[i] - PHASES.slice(0, -1).reduce((sum, { name }) => sum + phases[name][n], 0), 0),
  );
  return { steps, weights, phases };
}

export function totalsOf({ weights, phases }) {
  return Object.fromEntries(
    Object.entries(phases).map(([name, values]) => [
      name,
      values.reduce((sum, value, i) => sum + value * weights[i], 0),
    ]),
  );
}

// What the shares say, in one sentence.
export function verdict(totals) {
  const all = Object.values(totals).reduce((a, b) => a + b, 0);
  if (!all) return "No step has been timed yet.";
  const share = Object.fromEntries(Object.entries(totals).map(([name, value]) => [name, value / all]));
  if (share.sync_s > 0.25)
    return `Weight sync takes ${formatShare(share.sync_s)} of the time: send the adapter only, or use a faster transport.`;
  if (share.wait_s > 0.5)
    return `The trainer waits ${formatShare(share.wait_s)} of the time: generation is slower than training. More servers or shorter rollouts would help most.`;
  if (share.wait_s < 0.1)
    return `The trainer hardly waits (${formatShare(share.wait_s)}): training is slower than generation. More trainer GPUs or fewer tokens a step would help most.`;
  return `The trainer waits ${formatShare(share.wait_s)} and trains ${formatShare(share.train_s)} of the time.`;
}

export function mountTime(root, app) {
  const { store } = app;
  const body = h("div", {});
  root.append(h("h2", { class: "part-title" }, "Where did the step go?"), body);
  const charts = new Map();
  const board = {
    key: "time",
    zoom: null,
    xLabel: "step",
    setZoom(zoom) {
      this.zoom = zoom;
      for (const c of charts.values()) c.chart.zoom();
    },
    pin() {},
  };
  let layout = "";

  function update({ isTheme = false } = {}) {
    const now = JSON.stringify(store.shown.map((run) => run.name));
    if (now !== layout) {
      layout = now;
      for (const { chart } of charts.values()) chart.destroy();
      charts.clear();
      body.replaceChildren(
        ...store.shown.map((run) => {
          const chart = new Chart({
            name: `time-${run.name}`,
            title: "Seconds of a step",
            about: { unit: "s" },
            board,
            stacked: true,
          });
          const head = h("header", {});
          const bar = h("div", {});
          charts.set(run.name, { chart, head, bar });
          return h("article", { class: "panel time" }, head, bar, chart.element);
        }),
      );
      if (!store.shown.length) body.append(h("p", { class: "panel quiet" }, "No run is chosen."));
    }
    for (const run of store.shown) {
      const { chart, head, bar } = charts.get(run.name);
      const found = phasesOf(store.metrics(run.name).columns);
      const totals = totalsOf(found);
      head.replaceChildren(
        swatch(app, run.name),
        h("h3", {}, run.name),
        statusOf(run),
        h("p", { class: "verdict" }, verdict(totals)),
      );
      bar.replaceChildren(
        totalBar(
          totals,
          found.weights.reduce((a, b) => a + b, 0),
        ),
      );
      chart.element.hidden = !found.steps.length;
      chart.set(
        PHASES.map(({ name, title, color }) => ({
          label: title,
          short: title,
          color,
          xs: found.steps,
          ys: found.phases[name],
        })),
      );
      if (isTheme) chart.redraw();
    }
  }

  update();
  return {
    update,
    close() {
      for (const { chart } of charts.values()) chart.destroy();
    },
  };
}

function totalBar(totals, numSteps) {
  const all = Object.values(totals).reduce((a, b) => a + b, 0);
  if (!all) return "";
  const parts = PHASES.map(({ name, title, color, text }) => ({
    title,
    color,
    text,
    seconds: totals[name],
    share: totals[name] / all,
  }));
  return h(
    "div",
    {},
    h(
      "div",
      { class: "bar", "aria-hidden": "true" },
      parts.map(({ color, share }) =>
        h("span", { css: { background: `var(${color})`, "flex-grow": String(share) } }),
      ),
    ),
    h(
      "table",
      { class: "shares" },
      h("caption", {}, `${formatSeconds(all)} in ${numSteps.toLocaleString("en")} steps`),
      h(
        "tbody",
        {},
        parts.map(({ title, color, text, seconds, share }) =>
          h(
            "tr",
            {},
            h(
              "th",
              { scope: "row" },
              h("i", { class: "swatch", css: { background: `var(${color})` }, "aria-hidden": "true" }),
              title,
            ),
            h("td", {}, formatShare(share)),
            h("td", {}, `${formatSeconds(seconds / numSteps)} a step`),
            h("td", {}, formatSeconds(seconds)),
            h("td", { class: "quiet" }, text),
          ),
        ),
      ),
    ),
  );
}
