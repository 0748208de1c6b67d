// The strip of runs: which there are, how each is, and which of them are shown.

import { formatCount, h } from "./dom.js";

export const STATUS = {
  running: { text: "running", sign: "●" },
  finished: { text: "finished", sign: "✓" },
  interrupted: { text: "interrupted", sign: "■" },
  failed: { text: "failed", sign: "✕" },
  lost: { text: "lost: its process is gone", sign: "✕" },
  unknown: { text: "status not known", sign: "?" },
  empty: { text: "no files yet", sign: "…" },
};

export function statusOf(run) {
  const { text, sign } = STATUS[run.status] || { text: run.status, sign: "?" };
  return h(
    "span",
    { class: `status is-${run.status}` },
    h("span", { "aria-hidden": "true" }, `${sign} `),
    text,
  );
}

export function swatch(app, name) {
  return h("i", {
    class: "swatch",
    css: { background: `var(${app.store.color(name)})` },
    "aria-hidden": "true",
  });
}

export function mountRuns(root, app) {
  const list = h("div", { class: "run-list" });
  const title = h("summary", {});
  const find = h("input", {
    type: "search",
    placeholder: "Filter runs",
    "aria-label": "Filter runs",
    oninput: () => filter(),
  });
  const box = h("details", { class: "run-box" }, title, find, list);
  root.append(box);
  let signature = "";

  function filter() {
    for (const item of list.children)
      item.hidden = !item.dataset.name.toLowerCase().includes(find.value.toLowerCase());
  }

  function toggle(name) {
    const { store } = app;
    const shown = store.shown.map((run) => run.name);
    const names = shown.includes(name) ? shown.filter((one) => one !== name) : [...shown, name];
    if (!names.length) return update();
    const params = Object.fromEntries([...app.params].filter(([key]) => key !== "runs"));
    const part = location.hash.replace(/^#\/?/, "").split("?")[0] || "overview";
    app.go(app.link(part, { ...params, runs: names }), { replace: true });
  }

  function update() {
    const { store } = app;
    root.hidden = store.runs.length < 2;
    const now = JSON.stringify(
      store.runs.map((run) => [run.name, run.status, run.step, store.isShown(run.name)]),
    );
    if (now === signature) return;
    if (!signature) box.open = store.runs.length <= 8 && matchMedia("(min-width: 800px)").matches;
    signature = now;
    title.textContent = `${formatCount(store.runs.length, "run")}, ${store.shown.length} shown`;
    find.hidden = store.runs.length <= 8;
    const focused = document.activeElement?.id;
    list.replaceChildren(
      ...store.runs.map((run, number) =>
        h(
          "label",
          { class: "run-item", "data-name": run.name },
          h("input", {
            type: "checkbox",
            id: `run-${number}`,
            checked: store.isShown(run.name),
            onchange: () => toggle(run.name),
          }),
          swatch(app, run.name),
          h("span", { class: "run-name" }, run.name),
          statusOf(run),
          run.step ? h("span", { class: "quiet" }, `step ${run.step}`) : null,
        ),
      ),
    );
    if (focused?.startsWith("run-")) document.getElementById(focused)?.focus();
    filter();
  }

  return { update };
}
