// Where the page's data come from: a server (`vf-rl view`), or the page itself (`vf-rl view -o`).
// Both answer the same questions.

import { asText, isNumber } from "./dom.js";

const DEADLINE_MS = 20000;

export class ServerSource {
  isLive = true;
  #tag = "";

  // The state of each run; null if nothing has changed since the last answer.
  async runs() {
    const response = await this.#ask("runs", {}, { "If-None-Match": this.#tag });
    if (response === null) return null;
    this.#tag = response.headers.get("ETag") || "";
    return response.json();
  }

  async metrics(run, generation, start) {
    return (await this.#ask("metrics", { run, generation, start })).json();
  }

  // The texts of a run's code, by name.
  async code(run) {
    return (await this.#ask("code", { run })).json();
  }

  // Pages of a list are of the first `upto` rollouts, those that were there at its first page.
  async rollouts(run, filter, start, upto, signal) {
    return (await this.#ask("rollouts", { run, ...filter, start, upto }, {}, signal)).json();
  }

  async rollout(run, number) {
    return (await this.#ask("rollout", { run, number })).json();
  }

  async group(run, number) {
    return (await this.#ask("group", { run, number })).json();
  }

  async tokens(run, number, start) {
    return (await this.#ask("tokens", { run, number, start })).json();
  }

  async rewards(run) {
    return (await this.#ask("rewards", { run })).json();
  }

  async #ask(what, params, headers = {}, signal = undefined) {
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(params)) {
      if (value !== "" && value !== null && value !== undefined) query.set(name, value);
    }
    const deadline = AbortSignal.timeout(DEADLINE_MS);
    const response = await fetch(`/api/${what}?${query}`, {
      headers,
      signal: signal ? AbortSignal.any([signal, deadline]) : deadline,
    });
    if (response.status === 304) return null;
    if (response.ok) return response;
    let text = await response.text();
    try {
      text = JSON.parse(text).error;
    } catch {
      // The server's own words.
    }
    throw new Error(text || `the server answered ${response.status}`);
  }
}

export class PageSource {
  isLive = false;
  #runs;
  #data;

  constructor(data) {
    this.#data = data;
    this.#runs = new Map(data.runs.map((part) => [part.state.name, part]));
  }

  // What is in the element with the data: gzip, in base64.
  static async read(element) {
    const bytes = Uint8Array.from(atob(element.textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new PageSource(await new Response(stream).json());
  }

  // When the page was made, and what it left out.
  get about() {
    const parts = this.#data.runs.map(({ state, rollouts, tokens, metrics }) => ({
      name: state.name,
      numRollouts: state.num_rollouts,
      numKept: rollouts.length,
      numTokens: Object.keys(tokens).length,
      rowsOfOne: metrics.rows_of_one,
    }));
    return { madeAt: this.#data.made_at, version: this.#data.version, parts };
  }

  async runs() {
    return { runs: this.#data.runs.map((part) => part.state), problem: "" };
  }

  async metrics(run) {
    return this.#runs.get(run).metrics;
  }

  async code(run) {
    return this.#runs.get(run).code;
  }

  async rewards(run) {
    return this.#runs.get(run).rewards;
  }

  async rollouts(run, filter, start) {
    const part = this.#runs.get(run);
    const chosen = inOrder(
      part.rollouts.filter((row) => isChosen(row, filter)),
      filter.order,
    );
    const next = start + 50;
    return {
      rows: chosen.slice(start, next),
      num_chosen: chosen.length,
      num_all: part.rollouts.length,
      envs: part.envs,
      start,
      next: next < chosen.length ? next : null,
      histogram: histogramOf(chosen.map((row) => row.reward)),
    };
  }

  async rollout(run, number) {
    const { rollouts } = this.#runs.get(run);
    const row = rollouts.find((one) => one.number === number);
    if (!row) throw new Error(`rollout ${number} is not in this page's sample`);
    return { ...row, group_numbers: groupOf(rollouts, row).map((one) => one.number) };
  }

  async group(run, number) {
    const { rollouts } = this.#runs.get(run);
    const row = rollouts.find((one) => one.number === number);
    if (!row) throw new Error(`rollout ${number} is not in this page's sample`);
    return { rollouts: groupOf(rollouts, row), num_more: 0 };
  }

  async tokens(run, number) {
    const found = this.#runs.get(run).tokens[number];
    if (!found) throw new Error("the tokens of this rollout are not in this page");
    return { ...found, num_left_out: found.num_tokens - found.token_ids.length, num_tokens: found.token_ids.length };
  }
}

function groupOf(rollouts, { step, split, group }) {
  return rollouts.filter((one) => one.step === step && one.split === split && one.group === group);
}

// The same choice as `select` in browse.py.
function isChosen(row, filter) {
  const is = {
    failed: () => Boolean(row.error),
    scored: () => !row.error,
    truncated: () => Boolean(row.is_truncated),
    in_loss: () => Boolean(row.in_loss),
    not_in_loss: () => !row.in_loss,
    with_tokens: () => Boolean(row.has_tokens),
  };
  const from = (value, low) => !low || (isNumber(value) && value >= Number(low));
  const to = (value, high) => !high || (isNumber(value) && value <= Number(high));
  return (
    from(row.step, filter.from_step) &&
    to(row.step, filter.to_step) &&
    from(row.reward, filter.min_reward) &&
    to(row.reward, filter.max_reward) &&
    (!filter.split || row.split === filter.split) &&
    (!filter.env || row.env === filter.env) &&
    (!filter.example || row.example === Number(filter.example)) &&
    (!filter.kind || is[filter.kind]()) &&
    (!filter.text || textOf(row).includes(filter.text.toLowerCase()))
  );
}

function textOf(row) {
  const messages = [row.messages, ...(row.other_branches || [])].flatMap((list) => list || []);
  const texts = messages.flatMap((m) => [
    m.content,
    m.reasoning_content,
    ...(m.tool_calls || []).flatMap((call) => [call.function.name, call.function.arguments]),
  ]);
  return [...texts, row.error].map(asText).join("\n").toLowerCase();
}

function inOrder(rows, order) {
  const reward = (row, otherwise) => (isNumber(row.reward) ? row.reward : otherwise);
  if (order === "oldest") return rows;
  if (order === "lowest") return rows.toSorted((a, b) => reward(a, Infinity) - reward(b, Infinity));
  if (order === "highest") return rows.toSorted((a, b) => reward(b, -Infinity) - reward(a, -Infinity));
  if (order === "longest") return rows.toSorted((a, b) => b.num_tokens - a.num_tokens);
  return rows.toReversed();
}

export function histogramOf(values, numBins = 20) {
  const known = values.filter(isNumber);
  if (!known.length) return null;
  const low = known.reduce((a, b) => Math.min(a, b));
  const high = known.reduce((a, b) => Math.max(a, b));
  const counts = Array(high > low ? numBins : 1).fill(0);
  for (const value of known) {
    counts[high > low ? Math.min(Math.floor(((value - low) / (high - low)) * numBins), numBins - 1) : 0] += 1;
  }
  return { low, high, counts };
}
