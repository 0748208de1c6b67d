// The browser of rollouts: a filter, a list, and the chosen rollout beside it. All of it is in the
// address, so that a view can be kept and the browser's "back" works.

import { formatCount, formatNumber, h, isNumber, isTyping } from "./dom.js";
import { mountRollout } from "./rollout.js";

const FIELDS = [
  "run",
  "split",
  "env",
  "kind",
  "min_reward",
  "max_reward",
  "from_step",
  "to_step",
  "example",
  "text",
  "order",
];
const KINDS = {
  "": "all states",
  scored: "scored",
  failed: "failed",
  truncated: "truncated",
  in_loss: "in the loss",
  not_in_loss: "not in the loss",
  with_tokens: "with tokens",
};
const ORDERS = {
  "": "newest first",
  oldest: "oldest first",
  highest: "highest reward",
  lowest: "lowest reward",
  longest: "longest",
};
const MAX_LIST = 500; // rows; then the list asks for a narrower filter

export function mountRollouts(root, app) {
  const { store } = app;
  const inputs = {};
  const form = h("form", {
    class: "filter",
    "aria-label": "Filter of rollouts",
    onsubmit: (event) => event.preventDefault(),
  });
  const histogram = h("div", { class: "histogram-box" });
  const count = h("p", { class: "count", role: "status" });
  const fresh = h("button", { type: "button", class: "fresh", hidden: true, onclick: () => reload() });
  const list = h("ol", { class: "rollouts", "aria-label": "Rollouts" });
  const more = h("button", { type: "button", class: "more", hidden: true, onclick: () => extend() });
  const left = h(
    "section",
    { class: "list-side", "aria-label": "List of rollouts" },
    histogram,
    count,
    fresh,
    list,
    more,
  );
  const right = h("section", { class: "detail-side", "aria-label": "Chosen rollout", tabindex: "-1" });
  const split = h("div", { class: "split" }, left, right);
  const filterBox = h(
    "details",
    { class: "panel filter-box", open: matchMedia("(min-width: 800px)").matches },
    h("summary", {}, "Filter"),
    form,
  );
  root.append(h("h2", { class: "part-title" }, "Rollouts"), filterBox, split);
  const detail = mountRollout(right, app, { close: closeDetail, neighbour });

  let rows = [];
  let next = null;
  let chosen = 0;
  let signature = null;
  let abort = null;
  let known = 0;
  let envs = [];
  let upto = null; // rollouts of the run at the list's first page: later pages are of these, too
  let extending = null;

  // --- The filter ---------------------------------------------------------------------------------

  function field(name, label, input) {
    inputs[name] = input;
    input.id = `filter-${name}`;
    return h("label", { class: `field field-${name}` }, h("span", {}, label), input);
  }

  function select(options) {
    return h(
      "select",
      { onchange: () => apply() },
      Object.entries(options).map(([value, text]) => h("option", { value }, text)),
    );
  }

  let typing = 0;
  function type(props) {
    return h("input", {
      ...props,
      oninput: () => {
        clearTimeout(typing);
        typing = setTimeout(apply, 300);
      },
    });
  }

  const number = { type: "number", step: "any", inputmode: "decimal" };
  const whole = { type: "number", min: "0", inputmode: "numeric" };
  form.append(
    field(
      "text",
      "Text",
      type({ type: "search", placeholder: "in messages, calls, errors", autocomplete: "off" }),
    ),
    field("run", "Run", select({})),
    field("split", "Split", select({ "": "all", train: "train", eval: "eval" })),
    field("env", "Environment", select({ "": "all" })),
    field("kind", "State", select(KINDS)),
    h(
      "fieldset",
      {},
      h("legend", {}, "Reward"),
      field("min_reward", "from", type({ ...number, placeholder: "from" })),
      field("max_reward", "to", type({ ...number, placeholder: "to" })),
    ),
    h(
      "fieldset",
      {},
      h("legend", {}, "Step"),
      field("from_step", "from", type({ ...whole, placeholder: "from" })),
      field("to_step", "to", type({ ...whole, placeholder: "to" })),
    ),
    field("example", "Example", type(whole)),
    field("order", "Order", select(ORDERS)),
    h(
      "button",
      { type: "button", class: "clear", onclick: () => app.go(app.link("rollouts", { run: current().run })) },
      "Clear",
    ),
  );

  function current() {
    const params = app.params;
    const filter = Object.fromEntries(FIELDS.map((name) => [name, params.get(name) || ""]));
    const withRollouts = store.runs.filter((run) => run.num_rollouts);
    if (!filter.run)
      filter.run =
        (store.shown.find((run) => run.num_rollouts) || withRollouts[0] || store.runs[0])?.name || "";
    return filter;
  }

  function apply() {
    const filter = Object.fromEntries(FIELDS.map((name) => [name, inputs[name].value]));
    app.go(app.link("rollouts", filter), { replace: true });
  }

  function fillForm(filter) {
    setOptions(inputs.run, Object.fromEntries(store.runs.map((run) => [run.name, run.name])));
    inputs.run.closest("label").hidden = store.runs.length < 2;
    setOptions(inputs.env, {
      "": "all",
      ...Object.fromEntries(envs.map((env) => [env, env])),
      ...(filter.env ? { [filter.env]: filter.env } : {}),
    });
    inputs.env.closest("label").hidden = envs.length < 2 && !filter.env;
    for (const name of FIELDS) if (document.activeElement !== inputs[name]) inputs[name].value = filter[name];
    const active = FIELDS.filter((name) => filter[name] && !["run", "order"].includes(name)).length;
    filterBox.querySelector("summary").textContent = active ? `Filter (${active})` : "Filter";
    form.querySelector(".clear").hidden = !active && !filter.order;
  }

  // --- The list -----------------------------------------------------------------------------------

  async function reload({ keepFocus = false } = {}) {
    abort?.abort();
    abort = new AbortController();
    rows = [];
    next = 0;
    upto = null;
    fresh.hidden = true;
    known = store.run(current().run)?.num_rollouts ?? 0;
    if (!keepFocus) list.replaceChildren();
    list.setAttribute("aria-busy", "true");
    await extend({ isFirst: true });
  }

  // Ask for the next page. A search goes on until a page is full, and can be stopped.
  async function extend({ isFirst = false } = {}) {
    const { signal } = abort;
    const { run, ...filter } = current();
    if (!run) return say("There is no run yet.");
    const wanted = rows.length + 50;
    more.hidden = true;
    try {
      do {
        const page = await store.source.rollouts(run, filter, next ?? 0, upto, signal);
        if (signal.aborted) return;
        if (page.num_all === undefined) {
          // the run has no rollouts
          histogram.replaceChildren();
          list.replaceChildren();
          return say(
            "This run has no rollouts on disk. `log_rollouts = 0` writes none; else they come with the first step.",
          );
        }
        if (isFirst) list.replaceChildren();
        isFirst = false;
        upto ??= page.num_all;
        [envs, next, chosen] = [page.envs || [], page.next, page.num_chosen];
        rows = rows.concat(page.rows);
        list.append(...page.rows.map(listItem));
        drawHistogram(page.histogram);
        sayCount(page, filter);
        fillForm(current());
        mark();
      } while (filter.text && next !== null && rows.length < wanted);
      more.hidden = next === null || rows.length >= MAX_LIST;
      more.textContent = filter.text ? "Search on" : `More (${(chosen - next).toLocaleString("en")} left)`;
    } catch (error) {
      if (!signal.aborted) say(error.message);
    } finally {
      list.removeAttribute("aria-busy");
    }
  }

  function say(text) {
    count.textContent = text;
    more.hidden = true;
  }

  function sayCount({ num_chosen: numChosen, num_all: numAll }, { text }) {
    const isAll = numChosen === numAll;
    let line = isAll
      ? formatCount(numAll, "rollout")
      : `${numChosen.toLocaleString("en")} of ${formatCount(numAll, "rollout")}`;
    if (text) {
      const looked = next ?? numChosen;
      line = `${formatCount(rows.length, "hit")} in ${looked.toLocaleString("en")} of ${line}`;
    }
    count.textContent = line;
    if (rows.length >= MAX_LIST && next !== null)
      count.textContent += `; ${MAX_LIST} are listed: narrow the filter for others`;
  }

  function listItem(row) {
    const flags = [
      row.split === "eval" && "eval",
      row.error && "failed",
      row.is_truncated && "truncated",
      row.split === "train" && !row.in_loss && !row.error && "not in loss",
      row.has_tokens && "tokens",
    ].filter(Boolean);
    const about = [
      row.env,
      `step ${row.step}`,
      `group ${row.group}`,
      row.num_turns > 1 && `${row.num_turns} turns`,
      isNumber(row.num_sampled_tokens) && `${row.num_sampled_tokens.toLocaleString("en")} tokens`,
    ];
    return h(
      "li",
      {},
      h(
        "a",
        { href: hrefOf(row.number), "data-number": row.number },
        h(
          "span",
          { class: "reward" },
          isNumber(row.reward) ? formatNumber(Number(row.reward.toFixed(3))) : "–",
        ),
        h(
          "span",
          { class: "about" },
          about.filter(Boolean).join(" · "),
          flags.map((flag) => h("em", { class: `flag flag-${flag.replace(/ /g, "-")}` }, flag)),
        ),
        h(
          "span",
          { class: "preview" },
          row.preview || "(no text)",
        ),
      ),
    );
  }

  function hrefOf(number) {
    const params = app.params;
    return app.link("rollouts", { ...current(), number, tab: params.get("tab") || "" });
  }

  function drawHistogram(found) {
    histogram.replaceChildren();
    if (!found) return;
    const { low, high, counts } = found;
    const most = Math.max(...counts);
    const width = (high - low) / counts.length;
    const bars = counts.map((n, i) => {
      const [from, to] = [low + i * width, i + 1 < counts.length ? low + (i + 1) * width : high];
      return h(
        "button",
        {
          type: "button",
          title: `${formatNumber(from)} to ${formatNumber(to)}: ${formatCount(n, "rollout")}`,
          "aria-label": `Reward ${formatNumber(from)} to ${formatNumber(to)}: ${formatCount(n, "rollout")}. Filter by it.`,
          disabled: !n || high === low,
          onclick: () => {
            inputs.min_reward.value = from; // not rounded: the outer ones are rewards of rollouts
            inputs.max_reward.value = to;
            apply();
          },
        },
        h("span", { css: { height: `${Math.max((n / most) * 100, n ? 4 : 0)}%` } }),
      );
    });
    histogram.append(
      h("div", { class: "histogram", role: "group", "aria-label": "Rewards of this choice" }, bars),
      h(
        "div",
        { class: "histogram-x" },
        h("span", {}, formatNumber(low)),
        h("span", { class: "quiet" }, "reward"),
        h("span", {}, formatNumber(high)),
      ),
    );
  }

  // Mark the rollout that is shown, and its place.
  function mark() {
    const number = app.params.get("number");
    for (const link of list.querySelectorAll("a")) {
      link.setAttribute("href", hrefOf(link.dataset.number));
      if (link.dataset.number === number) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }

  // The number of the row that is `step` rows away; it may have to be asked for.
  async function neighbour(step) {
    const at = rows.findIndex((row) => String(row.number) === app.params.get("number"));
    if (at + step >= rows.length && next !== null && rows.length < MAX_LIST) {
      extending ??= extend().finally(() => {
        extending = null;
      });
      await extending; // one page for all keys that are pressed meanwhile
    }
    return rows[Math.max(at + step, 0)]?.number;
  }

  async function move(step) {
    const number = await neighbour(step);
    if (number === undefined) return;
    app.go(hrefOf(number), { replace: true });
    const link = list.querySelector(`a[data-number="${number}"]`);
    link?.focus({ preventScroll: true });
    link?.scrollIntoView({ block: "nearest" });
  }

  function closeDetail() {
    const number = app.params.get("number");
    app.go(app.link("rollouts", current()), { replace: true });
    (list.querySelector(`a[data-number="${number}"]`) || list.querySelector("a"))?.focus();
  }

  // --- The part -----------------------------------------------------------------------------------

  function update({ isAddress = false, isTheme = false } = {}) {
    const filter = current();
    const now = JSON.stringify(filter);
    fillForm(filter);
    if (now !== signature) {
      signature = now;
      reload();
    } else if (!isAddress) {
      const run = store.run(filter.run);
      const added = (run?.num_rollouts ?? 0) - known;
      if (added && !known) reload();
      else {
        fresh.hidden = added === 0;
        fresh.textContent =
          added > 0
            ? `${formatCount(added, "new rollout")}: show`
            : "The run has removed rollouts: read again";
      }
    }
    mark();
    const number = app.params.get("number");
    split.classList.toggle("has-detail", number !== null);
    detail.update({
      run: filter.run,
      number: number === null ? null : Number(number),
      tab: app.params.get("tab") || "messages",
      text: filter.text,
      isTheme,
      href: hrefOf,
    });
  }

  update();
  return {
    update,
    close() {
      abort?.abort();
    },
    onKey(event) {
      if (event.key === "/") {
        filterBox.open = true;
        inputs.text.focus();
        return true;
      }
      const isList = !right.contains(document.activeElement);
      if (event.key === "j" || (event.key === "ArrowDown" && isList && list.contains(document.activeElement)))
        return (move(1), true);
      if (event.key === "k" || (event.key === "ArrowUp" && isList && list.contains(document.activeElement)))
        return (move(-1), true);
      if (event.key === "Escape" && app.params.get("number") !== null) return (closeDetail(), true);
      return !isTyping(event.target) && detail.onKey(event);
    },
  };
}

// Replace the options of a select, if they are others.
function setOptions(select, options) {
  const now = JSON.stringify(options);
  if (select.dataset.options === now) return;
  select.dataset.options = now;
  const { value } = select;
  select.replaceChildren(...Object.entries(options).map(([key, text]) => h("option", { value: key }, text)));
  select.value = value;
}
