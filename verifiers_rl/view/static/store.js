// The runs, their curves, and which of them are shown. It follows runs that go on.

import { isNumber } from "./dom.js";
import { RUN_COLORS } from "./charts.js";

const SHOWN_AT_FIRST = 6;
const POLL_MS = 2000; // while a run goes on
const IDLE_POLL_MS = 10000;

export class Store {
  runs = [];
  problem = "";
  error = "";
  #metrics = new Map();
  #numbers = new Map();
  #chosen = null; // names; null: as `shown` says
  #timer = 0;

  constructor(source, onChange) {
    this.source = source;
    this.onChange = onChange;
  }

  run(name) {
    return this.runs.find((run) => run.name === name);
  }

  // The runs whose curves are drawn.
  get shown() {
    if (this.#chosen) return this.runs.filter((run) => this.#chosen.includes(run.name));
    if (this.runs.length <= SHOWN_AT_FIRST) return this.runs;
    const newest = this.runs.toSorted((a, b) => (b.written_at || 0) - (a.written_at || 0));
    const kept = new Set(newest.slice(0, SHOWN_AT_FIRST));
    return this.runs.filter((run) => kept.has(run));
  }

  // A choice in the address. Returns whether it is another one than before.
  choose(names) {
    const chosen = names.length ? names : null;
    const isSame = JSON.stringify(chosen) === JSON.stringify(this.#chosen);
    this.#chosen = chosen;
    return !isSame;
  }

  isShown(name) {
    return this.shown.some((run) => run.name === name);
  }

  // In the order in which the page came to know them, so that a run keeps its color.
  number(name) {
    if (!this.#numbers.has(name)) this.#numbers.set(name, this.#numbers.size);
    return this.#numbers.get(name);
  }

  color(name) {
    return RUN_COLORS[this.number(name) % RUN_COLORS.length];
  }

  // {generation, length, columns, notFinite} of a run; no columns before they have come.
  metrics(name) {
    return this.#metrics.get(name) || { generation: -1, length: 0, columns: {}, notFinite: {} };
  }

  async start() {
    await this.refresh();
    if (!this.source.isLive) return;
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.#schedule(0);
    });
    this.#schedule();
  }

  #schedule(delay = undefined) {
    clearTimeout(this.#timer);
    const goesOn =
      !this.error && this.runs.some((run) => ["running", "empty", "unknown"].includes(run.status));
    this.#timer = setTimeout(
      async () => {
        if (document.hidden) return; // it goes on when the page is looked at
        await this.refresh();
        this.#schedule();
      },
      delay ?? (goesOn ? POLL_MS : IDLE_POLL_MS),
    );
  }

  // Ask for what is new. An error stays on the page until the next answer.
  async refresh() {
    try {
      const answer = await this.source.runs();
      const isNew = answer !== null;
      if (isNew) {
        [this.runs, this.problem] = [answer.runs, answer.problem];
        for (const run of this.runs) this.number(run.name);
      }
      const hasMore = await this.load();
      const wasError = this.error;
      this.error = "";
      if (isNew || hasMore || wasError) this.onChange();
    } catch (error) {
      const isNewError = this.error !== error.message;
      this.error = error.message;
      if (isNewError) this.onChange();
    }
  }

  // Bring the curves of the shown runs up to date. Returns whether there was something new.
  async load() {
    const late = this.shown.filter((run) => {
      const { generation, length } = this.metrics(run.name);
      return run.generation !== generation || run.rows !== length;
    });
    await Promise.all(late.map((run) => this.#extend(run.name)));
    return late.length > 0;
  }

  async #extend(name) {
    const had = this.metrics(name);
    const answer = await this.source.metrics(name, had.generation, had.length);
    const isRest = answer.generation === had.generation && answer.start === had.length;
    const start = isRest ? had.length : 0;
    const columns = {};
    for (const [key, values] of Object.entries(answer.columns)) {
      const before = start ? (had.columns[key] ?? Array(start).fill(null)) : [];
      columns[key] = before.concat(values);
    }
    const length = start + (answer.columns.step?.length ?? 0);
    this.#metrics.set(name, {
      generation: answer.generation,
      length,
      columns,
      notFinite: answer.not_finite,
      hours: hoursOf(columns),
    });
  }
}

// Hours of training at each line: the sum of the steps' seconds. A line has the mean over the steps
// since the one before it.
function hoursOf({ step = [], step_s: seconds = [] }) {
  let sum = 0;
  let last = 0;
  return step.map((number, i) => {
    if (isNumber(seconds[i]) && number > last) {
      sum += (seconds[i] * (number - last)) / 3600;
      last = number;
    }
    return sum;
  });
}
