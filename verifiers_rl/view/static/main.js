// The page: its parts, its address (#/part?parameters), its keys. `mount` functions make a part and
// return {update, close}.

import { byId, formatCount, formatTime, h, isTyping, linkTo } from "./dom.js";
import { PageSource, ServerSource } from "./source.js";
import { Store } from "./store.js";
import { mountRuns } from "./runs.js";
import { mountOverview } from "./overview.js";
import { mountTime } from "./time.js";
import { mountOptions } from "./options.js";
import { mountRollouts } from "./rollouts.js";

const PARTS = {
  overview: { title: "Overview", mount: mountOverview },
  time: { title: "Time", mount: mountTime },
  rollouts: { title: "Rollouts", mount: mountRollouts },
  options: { title: "Options", mount: mountOptions },
};
const KEYS = [
  ["1 2 3 4", "overview, time, rollouts, options"],
  ["j k, arrows", "in a list: next and previous rollout"],
  ["Enter", "open what has the focus; on a chart: keep the step at the cursor"],
  ["m t g", "of a rollout: messages, tokens, group"],
  ["[ ]", "previous and next rollout of the group"],
  ["/", "search in texts"],
  ["arrows", "on a chart or on tokens: move the cursor"],
  ["Esc", "close; back to the list; zoom out"],
  ["?", "this help"],
];

let store;
let part = null; // {name, update, close, onKey}
let runsPanel = null;

// --- The address ----------------------------------------------------------------------------------

function readAddress() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const params = new URLSearchParams(query);
  return { name: PARTS[path] ? path : "overview", params };
}

// `app` is what a part sees of the page.
const app = {
  get store() {
    return store;
  },
  get params() {
    return readAddress().params;
  },
  // The address of a part. The choice of runs stays.
  link(name, params = {}) {
    return linkTo(name, { runs: this.params.getAll("runs"), ...params });
  },
  go(address, { replace = false } = {}) {
    if (address === location.hash) return;
    if (replace) history.replaceState(null, "", address);
    else history.pushState(null, "", address);
    show();
  },
};

async function show() {
  const { name, params } = readAddress();
  const isOther = store.choose(params.getAll("runs"));
  if (part?.name === name) {
    part.update({ isAddress: true });
  } else {
    part?.close();
    const main = byId("main");
    main.replaceChildren();
    main.dataset.part = name;
    part = { name, ...PARTS[name].mount(main, app) };
    document.title = titleOf(name);
  }
  showNav(name);
  runsPanel.update();
  if (isOther && (await store.load())) part.update({});
}

function showNav(name) {
  byId("nav").replaceChildren(
    ...Object.entries(PARTS).map(([key, { title }]) =>
      h("a", { href: app.link(key), "aria-current": key === name ? "page" : null }, title),
    ),
  );
}

function titleOf(name) {
  const runs = store.runs.map((run) => run.name);
  const what = runs.length === 1 ? runs[0] : formatCount(runs.length, "run");
  return `${what} · ${PARTS[name].title}`;
}

function onChange() {
  const { error, problem, source } = store;
  const banner = byId("banner");
  const text = error
    ? `No answer: ${error}. Is \`vf-rl view\` still running? The page tries again.`
    : problem;
  banner.hidden = !text;
  banner.classList.toggle("is-error", Boolean(error));
  banner.textContent = text;
  const title = store.runs.length === 1 ? store.runs[0].name : formatCount(store.runs.length, "run");
  byId("title").textContent = title;
  if (!part) {
    if (!error || store.runs.length) show();
    else byId("main").replaceChildren();
    return;
  }
  document.title = titleOf(part.name);
  runsPanel.update();
  part.update({});
  if (!source.isLive) return;
}

// --- Theme, help, keys ----------------------------------------------------------------------------

const THEMES = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };

function remembered(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null; // not in every browser for a file
  }
}

function setTheme(theme) {
  const { documentElement: root } = document;
  if (theme === "auto") delete root.dataset.theme;
  else root.dataset.theme = theme;
  byId("theme").textContent = THEMES[theme];
  try {
    localStorage.setItem("theme", theme);
  } catch {
    // It lasts as long as the page.
  }
}

function prepareTheme() {
  let theme = THEMES[remembered("theme")] ? remembered("theme") : "auto";
  setTheme(theme);
  byId("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    theme = names[(names.indexOf(theme) + 1) % names.length];
    setTheme(theme);
    part?.update({ isTheme: true });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    part?.update({ isTheme: true }),
  );
}

function prepareHelp() {
  const dialog = byId("help");
  const close = h("button", { type: "button", onclick: () => dialog.close() }, "Close");
  const about = store.source.about;
  dialog.append(
    h("h2", { id: "help-title" }, "Keys"),
    h(
      "table",
      {},
      h(
        "tbody",
        {},
        KEYS.map(([keys, what]) => h("tr", {}, h("th", { scope: "row" }, keys), h("td", {}, what))),
      ),
    ),
    h(
      "p",
      { class: "quiet" },
      "On a chart: drag to zoom all charts, double-click to zoom out, click to keep a step.",
    ),
    about &&
      h("p", { class: "quiet" }, `Written by verifiers_rl ${about.version}. Charts: uPlot (MIT licence).`),
    close,
  );
  byId("help-button").addEventListener("click", () => dialog.showModal());
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (isTyping(event.target)) {
    if (event.key === "Escape" && !event.target.closest("dialog")) event.target.blur();
    return;
  }
  const place = ["1", "2", "3", "4"].indexOf(event.key);
  if (event.key === "?") byId("help").showModal();
  else if (place >= 0) app.go(app.link(Object.keys(PARTS)[place]));
  else if (!part?.onKey?.(event)) return;
  event.preventDefault();
}

// What a page that stands alone has left out.
function sayWhatIsMissing({ madeAt, parts }) {
  const lines = parts.map(({ name, numKept, numRollouts, numTokens, rowsOfOne }) => {
    const rollouts = numRollouts
      ? `${numKept.toLocaleString("en")} of ${formatCount(numRollouts, "rollout")} (whole groups from all over the run), tokens of ${numTokens.toLocaleString("en")}`
      : "no rollouts";
    const curves = rowsOfOne > 1 ? `; each point of a curve is the mean of ${rowsOfOne} lines` : "";
    return `${parts.length > 1 ? `${name}: ` : ""}${rollouts}${curves}`;
  });
  byId("top").after(
    h(
      "p",
      { class: "banner", id: "sample" },
      `This page was written on ${formatTime(madeAt)}. It holds ${lines.join(". ")}.`,
    ),
  );
}

async function begin() {
  const holder = byId("data");
  const source = holder ? await PageSource.read(holder) : new ServerSource();
  holder?.remove();
  if (location.search) history.replaceState(null, "", location.pathname + location.hash); // the token
  store = new Store(source, onChange);
  if (source.about) sayWhatIsMissing(source.about);
  prepareTheme();
  prepareHelp();
  runsPanel = mountRuns(byId("runs"), app);
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault();
    byId("main").focus();
  });
  addEventListener("popstate", () => part && show());
  addEventListener("hashchange", () => part && show());
  document.addEventListener("keydown", onKey);
  // Links within the page change its address without loading it.
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.('a[href^="#/"]');
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    event.preventDefault();
    app.go(link.getAttribute("href"));
  });
  await store.start();
}

begin();
