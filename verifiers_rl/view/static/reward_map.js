// How many rollouts had which reward at which time: a map, darker where more rollouts are. It shows
// what a mean hides, such as a run in which half of the rollouts get everything and half nothing.

import { colorOf, formatCount, formatNumber, h } from "./dom.js";

const MAP_HEIGHT = 150;

export function rewardMap(app, run) {
  const canvas = h("canvas", { class: "map", role: "img", height: MAP_HEIGHT });
  const now = h("p", { class: "now quiet" }, "");
  const low = h("span", {}, "");
  const high = h("span", {}, "");
  const title = app.store.shown.length > 1 ? `rewards of ${run.name}` : "rewards of all rollouts";
  const element = h(
    "figure",
    { class: "chart" },
    h(
      "figcaption",
      {},
      h("h3", {}, title),
      h(
        "details",
        { class: "info" },
        h("summary", { "aria-label": `What is ${title}?` }, "i"),
        h(
          "p",
          {},
          "Rows are rewards, columns are steps of training. A cell is darker the larger its share of the step's rollouts. Click one to see its rollouts.",
        ),
      ),
    ),
    now,
    h("div", { class: "map-box" }, h("div", { class: "map-y" }, high, low), canvas),
  );
  let data = null;
  let asked = -1;

  function cellAt(event) {
    const box = canvas.getBoundingClientRect();
    const { counts } = data;
    const column = Math.min(
      Math.max(Math.floor(((event.clientX - box.left) / box.width) * counts.length), 0),
      counts.length - 1,
    );
    const bins = counts[0].length;
    const bin = Math.min(
      Math.max(bins - 1 - Math.floor(((event.clientY - box.top) / box.height) * bins), 0),
      bins - 1,
    );
    const width = (data.high - data.low) / bins;
    const from = data.first + column * data.steps_of_column;
    return {
      count: counts[column][bin],
      params: {
        run: run.name,
        split: "train",
        from_step: from,
        to_step: Math.min(from + data.steps_of_column - 1, data.last),
        min_reward: data.low + bin * width,
        max_reward: bin + 1 < bins ? data.low + (bin + 1) * width : data.high,
      },
    };
  }

  canvas.addEventListener("pointermove", (event) => {
    if (!data?.counts) return;
    const { count, params } = cellAt(event);
    const steps =
      params.from_step === params.to_step
        ? `step ${params.from_step}`
        : `steps ${params.from_step} to ${params.to_step}`;
    now.textContent = `${steps}, reward ${formatNumber(params.min_reward)} to ${formatNumber(params.max_reward)}: ${formatCount(count, "rollout")}`;
  });
  canvas.addEventListener("pointerleave", say);
  canvas.addEventListener("click", (event) => {
    if (data?.counts) app.go(app.link("rollouts", cellAt(event).params));
  });

  function say() {
    if (!data?.counts) return;
    now.textContent = `steps ${data.first} to ${data.last}; darker: more rollouts`;
  }

  function draw() {
    if (!data?.counts) return;
    const { counts } = data;
    const bins = counts[0].length;
    canvas.width = counts.length;
    canvas.height = bins;
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = colorOf("--map");
    counts.forEach((column, x) => {
      const sum = column.reduce((a, b) => a + b, 0);
      column.forEach((count, bin) => {
        if (!count) return;
        context.globalAlpha = 0.12 + 0.88 * Math.sqrt(count / sum);
        context.fillRect(x, bins - 1 - bin, 1, 1);
      });
    });
    low.textContent = formatNumber(data.low);
    high.textContent = data.high > data.low ? formatNumber(data.high) : "";
    canvas.setAttribute(
      "aria-label",
      `Map of rewards from ${formatNumber(data.low)} to ${formatNumber(data.high)} over steps ${data.first} to ${data.last}`,
    );
    say();
  }

  async function update(state, isTheme) {
    if (isTheme) draw();
    if (state.num_rollouts === asked) return;
    asked = state.num_rollouts;
    try {
      data = await app.store.source.rewards(run.name);
    } catch (error) {
      asked = -1; // again with the next change
      now.textContent = error.message;
    }
    element.hidden = !data?.counts;
    draw();
  }

  return { element, update };
}
