// How the runs are, in ten seconds: a card for each, what differs between them, and the curves.

import {
  asText,
  formatCount,
  formatNumber,
  formatSeconds,
  formatShare,
  formatTime,
  h,
  isNumber,
  mean,
  redraw,
} from "./dom.js";
import { Chart, smoothed } from "./charts.js";
import { aboutMetric, attention, inSections } from "./metrics.js";
import { statusOf, swatch } from "./runs.js";
import { codeDifferences } from "./diff.js";
import { differences, optionTable } from "./options.js";
import { rewardMap } from "./reward_map.js";

export function mountOverview(root, app) {
  const { store } = app;
  const cards = h("section", { class: "cards", "aria-label": "State of the runs" });
  const different = h("section", { class: "panel", "aria-label": "Different options", hidden: true });
  const slider = h("input", {
    type: "range",
    min: "0",
    max: "0.98",
    step: "0.02",
    value: "0",
    id: "smooth",
    oninput: () => draw(),
  });
  const axis = h(
    "select",
    {
      id: "axis",
      onchange: () => {
        board.isTime = axis.value === "hours";
        board.setZoom(null);
        draw();
      },
    },
    h("option", { value: "step" }, "step"),
    h("option", { value: "hours" }, "hours of training"),
  );
  const zoomOut = h(
    "button",
    { type: "button", hidden: true, onclick: () => board.setZoom(null) },
    "Zoom out",
  );
  const pinned = h("p", { class: "pinned", role: "status", hidden: true });
  const controls = h(
    "div",
    { class: "controls" },
    h("label", {}, "Smooth ", slider),
    h("label", {}, "Over ", axis),
    zoomOut,
  );
  const body = h("div", {});
  root.append(cards, different, controls, pinned, body);

  const charts = new Map();
  const maps = new Map();
  let layout = "";
  let compared = "";
  const board = {
    key: "steps",
    zoom: null,
    isTime: false,
    get xLabel() {
      return this.isTime ? "hour" : "step";
    },
    setZoom(zoom) {
      this.zoom = zoom;
      zoomOut.hidden = !zoom;
      for (const chart of charts.values()) chart.zoom();
    },
    pin(x) {
      pinned.hidden = false;
      const runs = store.shown.filter((run) => run.num_rollouts);
      const stepOf = (run) => (this.isTime ? stepAtHour(store.metrics(run.name), x) : Math.round(x));
      pinned.replaceChildren(
        h("span", {}, this.isTime ? `Hour ${formatNumber(x)}: ` : `Step ${x}: `),
        ...(runs.length
          ? runs.map((run) =>
              h(
                "a",
                {
                  href: app.link("rollouts", { run: run.name, from_step: stepOf(run), to_step: stepOf(run) }),
                },
                `rollouts${runs.length > 1 ? ` of ${run.name}` : ""}`,
              ),
            )
          : [h("span", { class: "quiet" }, "no rollouts were written")]),
        h(
          "button",
          {
            type: "button",
            "aria-label": "Close",
            onclick: () => {
              pinned.hidden = true;
            },
          },
          "×",
        ),
      );
    },
  };

  function curvesOf(name) {
    const weight = Number(slider.value);
    return store.shown.flatMap((run) => {
      const { columns, hours } = store.metrics(run.name);
      const ys = columns[name];
      if (!ys || !ys.some(isNumber)) return [];
      const places = [...ys.keys()].filter((i) => isNumber(ys[i]));
      const xs = places.map((i) => (board.isTime ? hours[i] : columns.step[i]));
      const own = places.map((i) => ys[i]);
      const curve = { label: run.name, color: store.color(run.name), number: store.number(run.name) };
      if (weight && own.length > 2) {
        return [
          { ...curve, xs, ys: own, isFaint: true },
          { ...curve, xs, ys: smoothed(own, weight) },
        ];
      }
      return [{ ...curve, xs, ys: own }];
    });
  }

  function arrange() {
    const names = new Set();
    const zeros = new Set();
    for (const run of store.shown) {
      for (const [name, values] of Object.entries(store.metrics(run.name).columns)) {
        if (!values.some(isNumber)) continue;
        if (values.some((value) => value)) names.add(name);
        else zeros.add(name);
      }
    }
    // Shares of troubles that never came need no curve.
    const never = [...zeros].filter((name) => !names.has(name) && /_share(\/|$)/.test(name)).sort();
    for (const name of zeros) if (!never.includes(name)) names.add(name);
    const sections = inSections(names);
    const now = JSON.stringify([sections, never, store.shown.map((run) => [run.name, run.num_rollouts > 0])]);
    if (now === layout) return;
    layout = now;
    for (const chart of charts.values()) chart.destroy();
    charts.clear();
    maps.clear();
    const before = [...body.querySelectorAll(".section")].map((one) => [one.dataset.title, one.open]);
    const wasOpen = new Map(before);
    body.replaceChildren(
      ...sections.map(({ title, names: own, isOpen }) => {
        const grid = h("div", { class: "grid" });
        for (const name of own) {
          const chart = new Chart({ name, about: aboutMetric(name), board });
          charts.set(name, chart);
          grid.append(chart.element);
        }
        if (title === "Reward") {
          for (const run of store.shown.filter((one) => one.num_rollouts)) {
            const map = rewardMap(app, run);
            maps.set(run.name, map);
            grid.append(map.element);
          }
        }
        const open = wasOpen.get(title) ?? isOpen;
        const head = h("summary", {}, h("h2", {}, title));
        return h("details", { class: "section", open, "data-title": title }, head, grid);
      }),
    );
    if (never.length) body.append(h("p", { class: "quiet never" }, `Always 0: ${never.join(", ")}.`));
    if (!sections.length) body.append(emptyNote());
  }

  function emptyNote() {
    const text = !store.shown.length
      ? "No run is chosen."
      : store.source.isLive
        ? "There are no curves yet. They appear after the first line of metrics.jsonl; the page follows."
        : "There are no curves.";
    return h("p", { class: "panel quiet" }, text);
  }

  function draw() {
    for (const [name, chart] of charts) chart.set(curvesOf(name));
  }

  function update({ isTheme = false } = {}) {
    redraw(
      cards,
      store.shown.map((run) => card(app, run)),
    );
    const rows = differences(store.shown);
    const now = JSON.stringify([rows, store.shown.map((run) => run.name)]);
    different.hidden = store.shown.length < 2;
    if (!different.hidden && now !== compared) {
      compared = now;
      different.replaceChildren(
        h("h2", {}, "What differs"),
        rows.length
          ? h("div", {}, optionTable(app, rows, "Options that differ"), codeDifferences(app))
          : h("p", { class: "quiet" }, "No option differs between these runs."),
      );
    }
    arrange();
    draw();
    for (const run of store.shown) maps.get(run.name)?.update(run, isTheme);
    controls.hidden = !charts.size;
    if (isTheme) for (const chart of charts.values()) chart.redraw();
  }

  update();
  return {
    update,
    close() {
      for (const chart of charts.values()) chart.destroy();
    },
    onKey(event) {
      if (event.key !== "Escape" || !board.zoom) return false;
      board.setZoom(null);
      return true;
    },
  };
}

function stepAtHour({ columns, hours }, x) {
  const place = hours.findIndex((hour) => hour >= x);
  return columns.step[place < 0 ? hours.length - 1 : place];
}

// --- One run --------------------------------------------------------------------------------------

function card(app, run) {
  const { columns, notFinite } = app.store.metrics(run.name);
  const maxSteps = isNumber(run.run.max_steps) && run.run.max_steps > 0 ? run.run.max_steps : null;
  const seconds = mean((columns.step_s || []).slice(-20));
  const left = run.status === "running" && maxSteps && seconds ? (maxSteps - run.step) * seconds : null;
  const progress =
    maxSteps &&
    h("progress", {
      max: maxSteps,
      value: Math.min(run.step, maxSteps),
      "aria-label": `Step ${run.step} of ${maxSteps}`,
    });
  const steps =
    run.step || maxSteps
      ? `step ${run.step.toLocaleString("en")}${maxSteps ? ` of ${maxSteps.toLocaleString("en")}` : ""}`
      : null;
  const time = [
    left && left > 0 ? `about ${formatSeconds(left)} left` : null,
    ["running", "lost"].includes(run.status) && run.written_at ? `last written ${formatTime(run.written_at)}` : null,
  ]
    .filter(Boolean)
    .join(" · ");
  const facts = [
    fact("Reward", fromTo(columns, "reward")),
    fact("Evaluation", fromTo(columns, "eval_reward")),
    fact("A step", seconds === null ? null : formatSeconds(seconds)),
    fact("Waiting", waitingShare(columns)),
  ].filter(Boolean);
  return h(
    "article",
    { class: "card" },
    h("header", {}, swatch(app, run.name), h("h2", {}, run.name), statusOf(run)),
    h(
      "p",
      { class: "quiet" },
      [modelName(run.run.model), run.run.begun_at ? `begun ${formatTime(run.run.begun_at)}` : null]
        .filter(Boolean)
        .map(String)
        .join(" · "),
    ),
    progress,
    h("p", { class: "steps" }, [steps, time].filter(Boolean).join(" · ")),
    h("dl", { class: "facts" }, facts),
    troubles(app, run, attention(columns, notFinite)),
    run.num_rollouts
      ? h(
          "p",
          {},
          h("a", { href: app.link("rollouts", { run: run.name }) }, formatCount(run.num_rollouts, "rollout")),
        )
      : h(
          "p",
          { class: "quiet" },
          run.status === "empty" ? "" : "No rollouts on disk (log_rollouts = 0 writes none).",
        ),
  );
}

// The name on the hub, or the last part of a path.
function modelName(model) {
  const text = asText(model);
  return /^[./~]/.test(text) ? text.replace(/\/+$/, "").split("/").at(-1) : text;
}

function fact(name, value) {
  return value ? h("div", {}, h("dt", {}, name), h("dd", {}, value)) : null;
}

function fromTo(columns, name) {
  const known = (columns[name] || []).filter(isNumber);
  if (!known.length) return null;
  if (known.length === 1) return formatNumber(known[0]);
  return [h("span", { class: "quiet" }, `${rounded(known[0])} → `), rounded(known.at(-1))];
}

function rounded(value) {
  return Math.abs(value) < 100 ? value.toFixed(3) : formatNumber(value);
}

function waitingShare({ wait_s: wait, step_s: step }) {
  if (!wait || !step) return null;
  return `${formatShare(mean(wait.slice(-20)) / mean(step.slice(-20)))} of a step`;
}

const SHOWN_TROUBLES = 4;

function troubles(app, run, found) {
  const items = [
    ...run.problems.map((text) => h("li", {}, text)),
    ...found.map((what) => h("li", {}, trouble(app, run, what))),
  ];
  if (!items.length) return null;
  const rest = items.splice(SHOWN_TROUBLES);
  return h(
    "div",
    { class: "troubles" },
    h("h3", {}, "Look at"),
    h("ul", {}, items),
    rest.length ? h("details", {}, h("summary", {}, `${rest.length} more`), h("ul", {}, rest)) : null,
  );
}

function trouble(app, run, { name, text, value, isHigh, limit, hint, kind }) {
  if (text) return text;
  const show = /_share(\/|$)/.test(name) ? formatShare : formatNumber;
  const beyond = limit < 1e-6 && !isHigh ? "zero" : `${isHigh ? "above" : "below"} ${show(limit)}`;
  return [
    h("a", { href: app.link("overview"), onclick: (event) => toChart(event, name) }, name),
    ` is ${show(value)}, ${beyond}`,
    kind && run.num_rollouts
      ? [": ", h("a", { href: app.link("rollouts", { run: run.name, split: "train", kind }) }, "these rollouts")]
      : null,
    hint ? h("span", { class: "quiet" }, ` (${hint})`) : null,
  ];
}

function toChart(event, name) {
  const chart = document.getElementById(`chart-${name}`);
  event.preventDefault();
  event.stopPropagation();
  if (!chart) return;
  chart.closest("details").open = true;
  chart.scrollIntoView({ block: "center" });
  chart.querySelector(".plot").focus({ preventScroll: true });
}
