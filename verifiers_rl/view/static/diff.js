// What differs in the code of runs, line by line.

import { h } from "./dom.js";

const CONTEXT = 3; // equal lines around a difference
const MAX_CELLS = 4e6; // beyond, the lines between the first and the last difference are all shown

export function codeOf(run) {
  return run.run.code && typeof run.run.code === "object" ? run.run.code : {};
}

// The code that is not the same in all shown runs, each run against the first one.
export function codeDifferences(app) {
  const runs = app.store.shown;
  const names = [...new Set(runs.flatMap((run) => Object.keys(codeOf(run))))].sort();
  const different = names.filter((name) => new Set(runs.map((run) => codeOf(run)[name])).size > 1);
  const box = h("div", { class: "diffs" });
  if (different.length) fillIn(box, app, runs, different);
  return box;
}

async function fillIn(box, app, [first, ...others], names) {
  try {
    const before = await app.store.source.code(first.name);
    for (const run of others) {
      const after = await app.store.source.code(run.name);
      for (const name of names.filter((one) => codeOf(first)[one] !== codeOf(run)[one])) {
        const lines = hunks(diffLines(before[name] ?? "", after[name] ?? ""));
        box.append(
          h(
            "details",
            { class: "diff", open: lines.length <= 40 },
            h("summary", {}, `${name}: ${first.name} → ${run.name}`),
            lines.length
              ? h(
                  "pre",
                  { tabindex: "0" },
                  lines.map(([kind, text]) => h("span", { class: DIFF_CLASSES[kind] }, `${kind} ${text}`)),
                )
              : h("p", { class: "quiet" }, "It differs in what run.json does not keep: a secret, or behind its size."),
          ),
        );
      }
    }
  } catch (error) {
    box.replaceChildren(h("p", { class: "quiet" }, `The code cannot be shown: ${error.message}`));
  }
}

const DIFF_CLASSES = { "-": "diff-old", "+": "diff-new", "@": "quiet", " ": null };

// [kind, line] in order; the kind is "-", "+" or " ". By the longest common subsequence.
export function diffLines(before, after) {
  const [a, b] = [before.split("\n"), after.split("\n")];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a.at(-1 - end) === b.at(-1 - end)) end += 1;
  const [old, now] = [a.slice(start, a.length - end), b.slice(start, b.length - end)];
  const equal = (lines) => lines.map((line) => [" ", line]);
  return [...equal(a.slice(0, start)), ...changedLines(old, now), ...equal(a.slice(a.length - end))];
}

function changedLines(a, b) {
  const width = b.length + 1;
  if (a.length * b.length > MAX_CELLS) return [...a.map((line) => ["-", line]), ...b.map((line) => ["+", line])];
  const longest = new Uint32Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      longest[i * width + j] =
        a[i] === b[j]
          ? longest[(i + 1) * width + j + 1] + 1
          : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    }
  }
  const lines = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      lines.push([" ", a[i++]]);
      j += 1;
    } else if (j === b.length || (i < a.length && longest[(i + 1) * width + j] >= longest[i * width + j + 1])) {
      lines.push(["-", a[i++]]);
    } else {
      lines.push(["+", b[j++]]);
    }
  }
  return lines;
}

// Without the equal lines that are far from a difference.
function hunks(lines) {
  const isNear = lines.map((_, i) =>
    lines.slice(Math.max(i - CONTEXT, 0), i + CONTEXT + 1).some(([kind]) => kind !== " "),
  );
  return lines.flatMap((line, i) => (isNear[i] ? [line] : isNear[i - 1] ? [["@", "…"]] : []));
}
