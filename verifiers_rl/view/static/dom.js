// Elements and numbers. Elements are made by `h` alone: a text becomes a text node, never HTML, so
// nothing that a model wrote can become an element or a script.

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "css") for (const [k, v] of Object.entries(value)) element.style.setProperty(k, v);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

// Replace what is in an element. The focus and what is folded open stay at their places, because the
// page does this while a person reads.
export function redraw(root, children) {
  const placesOf = (selector) => [...root.querySelectorAll(selector)];
  const focusable = "a, button, input, summary";
  const focused = placesOf(focusable).indexOf(document.activeElement);
  const open = placesOf("details").map((details) => details.open);
  root.replaceChildren(...children);
  const details = placesOf("details");
  if (details.length === open.length) details.forEach((one, i) => (one.open = open[i]));
  if (focused >= 0) placesOf(focusable)[focused]?.focus({ preventScroll: true });
}

export function byId(id) {
  return document.getElementById(id);
}

// The address of a part of the page: #/rollouts?run=a&number=3
export function linkTo(view, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== "" && one !== null && one !== undefined) query.append(name, one);
    }
  }
  const text = query.toString();
  return `#/${view}${text ? `?${text}` : ""}`;
}

// --- Numbers as people read them ------------------------------------------------------------------

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

export function formatNumber(value) {
  if (!isNumber(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e12 || (size < 1e-4 && size > 0)) return value.toExponential(2);
  if (size >= 1e9) return `${trimmed(value / 1e9)} G`;
  if (size >= 1e6) return `${trimmed(value / 1e6)} M`;
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  return trimmed(value);
}

function trimmed(value) {
  return String(Number(value.toPrecision(4)));
}

export function formatCount(count, noun, plural = `${noun}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? noun : plural}`;
}

export function formatShare(share) {
  if (!isNumber(share)) return "–";
  return `${share > 0 && share < 0.01 ? (100 * share).toPrecision(1) : Math.round(100 * share)} %`;
}

export function formatSeconds(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 100) return `${trimmed(Number(seconds.toPrecision(3)))} s`;
  if (seconds < 600) return `${(seconds / 60).toFixed(1)} min`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

export function formatTime(unixSeconds) {
  if (!isNumber(unixSeconds)) return "–";
  return new Date(1000 * unixSeconds).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

export function signed(value) {
  return `${value > 0 ? "+" : ""}${formatNumber(Number(value.toFixed(4)))}`;
}

export function mean(values) {
  const known = values.filter(isNumber);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

// --- Texts ----------------------------------------------------------------------------------------

export function asText(value) {
  return typeof value === "string"
    ? value
    : value === null || value === undefined
      ? ""
      : JSON.stringify(value);
}

// The arguments of a tool call, in lines if they are JSON.
export function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return asText(text);
  }
}

// The color that a style's variable has now, as `rgb(...)`.
export function colorOf(variable) {
  const probe = h("span", { css: { color: `var(${variable})` }, hidden: true });
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

export function isDark() {
  const [r, g, b] = (getComputedStyle(document.body).backgroundColor.match(/[\d.]+/g) || [255, 255, 255]).map(
    Number,
  );
  return 0.299 * r + 0.587 * g + 0.114 * b < 128;
}

export function isTyping(target) {
  return target instanceof Element && target.closest("input, select, textarea, dialog") !== null;
}
