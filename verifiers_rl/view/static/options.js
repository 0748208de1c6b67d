// The options of the runs beside each other, as run.json has them: those that differ from their
// defaults.

import { asText, formatTime, h } from "./dom.js";
import { codeDifferences, codeOf } from "./diff.js";
import { swatch } from "./runs.js";

// Rows {name, values}: a text for each run, undefined where the option has its default.
export function optionRows(runs) {
  const argsOf = (run) => (run.run.args && typeof run.run.args === "object" ? run.run.args : {});
  const versionsOf = (run) =>
    run.run.versions && typeof run.run.versions === "object" ? run.run.versions : {};
  const names = (of) => [...new Set(runs.flatMap((run) => Object.keys(of(run))))].sort();
  const row = (name, of) => ({ name, values: runs.map((run) => optionText(of(run))) });
  return [
    row("model", (run) => run.run.model),
    row("max_steps", (run) => run.run.max_steps),
    ...names(argsOf)
      .filter((name) => !["max_steps", "output_dir", "run_name"].includes(name))
      .map((name) => row(name, (run) => argsOf(run)[name])),
    ...names(versionsOf).map((name) => row(`version of ${name}`, (run) => versionsOf(run)[name])),
    ...names(codeOf).map((name) => row(`code of ${name}`, (run) => short(codeOf(run)[name]))),
  ];
}

// The begin of a hash.
function short(value) {
  return typeof value === "string" && /^[0-9a-f]{64}$/.test(value) ? value.slice(0, 10) : value;
}

function optionText(value) {
  return value === undefined ? undefined : value === null ? "none" : asText(value);
}

export function differences(runs) {
  return optionRows(runs).filter(({ values }) => new Set(values).size > 1);
}

export function optionTable(app, rows, label) {
  const runs = app.store.shown;
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h(
      "table",
      { class: "options" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", { scope: "col" }, "Option"),
          runs.map((run) => h("th", { scope: "col" }, swatch(app, run.name), run.name)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map(({ name, values }) =>
          h(
            "tr",
            {},
            h("th", { scope: "row" }, name),
            values.map((value) =>
              h("td", {}, value === undefined ? h("span", { class: "quiet" }, "default") : value),
            ),
          ),
        ),
      ),
    ),
  );
}

// What the shown runs have changed where they were resumed.
function changesOf(runs) {
  const lines = runs.flatMap((run) =>
    (Array.isArray(run.run.changes) ? run.run.changes : []).map(({ step, name, before, now }) =>
      h(
        "li",
        {},
        `${run.name}, from step ${step} on: ${name} = ${asText(short(now) ?? "default")}; it was ${asText(short(before) ?? "default")}`,
      ),
    ),
  );
  return lines.length
    ? h("section", { class: "panel changes" }, h("h3", {}, "Changed when resumed"), h("ul", {}, lines))
    : "";
}

export function mountOptions(root, app) {
  const body = h("div", {});
  root.append(h("h2", { class: "part-title" }, "Options"), body);
  let signature = "";

  function update() {
    const { shown } = app.store;
    const now = JSON.stringify(shown.map((run) => [run.name, run.run]));
    if (now === signature) return;
    signature = now;
    const rows = optionRows(shown);
    const different = rows.filter(({ values }) => new Set(values).size > 1);
    const same = rows.filter((row) => !different.includes(row));
    const times = [
      { name: "begun", values: shown.map((run) => run.run.begun_at && formatTime(run.run.begun_at)) },
      { name: "ended", values: shown.map((run) => run.run.ended_at && formatTime(run.run.ended_at)) },
      { name: "environments", values: shown.map((run) => run.envs.join(", ")) },
    ].map((row) => ({ ...row, values: row.values.map((value) => value || "–") }));
    body.replaceChildren(
      h("p", { class: "quiet" }, "Options of RLConfig that differ from their defaults, versions and code, from run.json."),
      ...(shown.length > 1
        ? [
            h(
              "section",
              { class: "panel" },
              h("h3", {}, "What differs"),
              different.length
                ? [optionTable(app, different, "Options that differ"), codeDifferences(app)]
                : h("p", { class: "quiet" }, "No option differs between these runs."),
            ),
            h(
              "section",
              { class: "panel" },
              h("h3", {}, "Equal in all"),
              optionTable(app, same, "Options that are equal"),
            ),
          ]
        : [h("section", { class: "panel" }, optionTable(app, rows, "Options"))]),
      h("section", { class: "panel" }, h("h3", {}, "The runs"), optionTable(app, times, "The runs")),
      changesOf(shown),
    );
  }

  update();
  return { update, close() {} };
}
