// The tokens of a rollout, colored by one of their numbers. The colors of a number are the same for
// all rollouts, so that two can be compared; what is beyond a scale's end has the end's color.

import { formatCount, formatNumber, h, isDark, isNumber } from "./dom.js";

// Colors from low to high, for pages with a light and with a dark background. They differ in
// lightness too, so that all eyes tell them apart.
const HEAT = {
  light: ["#ffffff", "#ffe9b8", "#fdb863", "#d9691c", "#7f2704"],
  dark: ["#16191d", "#4a3310", "#8f5a0c", "#e08f1c", "#ffe2a0"],
};
const TWO_SIDED = {
  light: ["#2166ac", "#9ecae1", "#ffffff", "#fdc38d", "#b35806"],
  dark: ["#7cc0ff", "#2a5378", "#16191d", "#704116", "#ffab5e"],
};
const STEPS = { light: ["#deebf7", "#08519c"], dark: ["#1d3a57", "#a8d4ff"] };

const COLORINGS = {
  logprob: {
    title: "Logprob",
    text: "of the server, which sampled the token; nats",
    value: (t, i) => (t.policy_versions[i] < 0 ? null : t.inference_logprobs[i]),
    low: -5,
    high: 0,
    colors: HEAT,
    isReversed: true,
    ends: ["-5 and less: surprising", "0: sure"],
  },
  trainer_logprob: {
    title: "Trainer's logprob",
    text: "before this step's update; nats",
    value: (t, i) => t.trainer_logprobs[i],
    low: -5,
    high: 0,
    colors: HEAT,
    isReversed: true,
    ends: ["-5 and less", "0"],
  },
  ratio: {
    title: "Ratio",
    text: "p of the trainer / p of the server",
    value: ratioOf,
    place: (value) => 0.5 + Math.log(value) / (2 * Math.log(2)),
    colors: TWO_SIDED,
    ends: ["1/2 and less", "2 and more"],
    middle: "1",
  },
  entropy: {
    title: "Entropy",
    text: "of the policy at this token; nats",
    value: (t, i) => t.entropy[i],
    low: 0,
    high: 3,
    colors: HEAT,
    ends: ["0", "3 and more"],
  },
  advantage: {
    title: "Advantage",
    text: "",
    value: (t, i) => (t.loss_mask[i] ? t.advantages[i] : null),
    most: (t) => t.max_advantage,
    colors: TWO_SIDED,
    middle: "0",
  },
  version: {
    title: "Policy version",
    text: "of the weights that sampled the token",
    value: (t, i) => (t.policy_versions[i] < 0 ? null : t.policy_versions[i]),
  },
  mask: { title: "Mask", text: "what counts in the loss" },
};
const MASKS = {
  loss: { text: "in the loss", is: (t, i) => t.loss_mask[i] && !t.is_masked[i] },
  masked: { text: "taken out by a gradient mask", is: (t, i) => t.loss_mask[i] && t.is_masked[i] },
  unused: { text: "sampled, not in the loss", is: (t, i) => !t.loss_mask[i] && t.policy_versions[i] >= 0 },
  given: { text: "not sampled: prompt, tools", is: (t, i) => !t.loss_mask[i] && t.policy_versions[i] < 0 },
};

// What `vf-rl replay` has written of the step: a column for each loss, whose name begins so.
const WEIGHT = "weight ";

function weightNames(t) {
  return Object.keys(t).filter((name) => name.startsWith(WEIGHT));
}

function scaleOf(name) {
  if (!name.startsWith(WEIGHT)) return COLORINGS[name];
  return {
    title: `Gradient weight under ${name.slice(WEIGHT.length)}`,
    text: "-dL / dlogprob of the token; above 0 the step makes it more likely",
    value: (t, i) => t[name][i],
    most: (t) => t.max_weight,
    colors: TWO_SIDED,
    middle: "0",
  };
}

function ratioOf(t, i) {
  const [ours, theirs] = [t.trainer_logprobs[i], t.inference_logprobs[i]];
  return isNumber(ours) && isNumber(theirs) ? Math.exp(ours - theirs) : null;
}

let coloring = "logprob"; // kept from one rollout to the next, which may not have this one

function coloringOf(t) {
  return COLORINGS[coloring] || t[coloring] ? coloring : "logprob";
}

export function mountTokens(root, app, { run, row }) {
  let tokens = null;
  let isClosed = false;
  let current = -1;
  const readout = h("p", { class: "readout", role: "status" });
  const legend = h("div", { class: "legend" });
  const box = h("div", {
    class: "tokens",
    tabindex: "0",
    role: "group",
    "aria-label": "Tokens. Arrow keys move from one to the next.",
  });
  const more = h("button", { type: "button", class: "more", hidden: true, onclick: () => extend() });
  const choiceOf = (legend, entries) =>
    h(
      "fieldset",
      { class: "choice" },
      h("legend", {}, legend),
      entries.map(([name, title]) =>
        h(
          "label",
          {},
          h("input", {
            type: "radio",
            name: "coloring",
            value: name,
            checked: name === coloring,
            onchange: () => {
              coloring = name;
              paint();
            },
          }),
          title,
        ),
      ),
    );
  const choice = choiceOf(
    "Color by",
    Object.entries(COLORINGS).map(([name, { title }]) => [name, title]),
  );
  if (!row.has_tokens) {
    root.append(
      h(
        "p",
        { class: "quiet" },
        app.store.source.isLive
          ? "The tokens of this rollout were not written. `log_rollouts` is the share of the groups whose tokens are."
          : "The tokens of this rollout are not in this page.",
      ),
      h(
        "p",
        {},
        h("a", { href: app.link("rollouts", { run, kind: "with_tokens" }) }, "Rollouts with tokens"),
      ),
    );
    return {};
  }
  root.append(choice, legend, readout, box, more);
  extend();

  async function extend() {
    more.hidden = true;
    try {
      const found = await app.store.source.tokens(run, row.number, tokens ? tokens.token_texts.length : 0);
      if (isClosed) return;
      if (!tokens) tokens = found;
      else
        for (const [name, values] of Object.entries(found))
          if (Array.isArray(values) && name !== "versions") tokens[name] = tokens[name].concat(values);
      const from = box.querySelectorAll(".token").length;
      add(from);
      paint(from);
      const left = tokens.num_tokens - tokens.token_texts.length;
      more.hidden = left <= 0;
      more.textContent = `More tokens (${left.toLocaleString("en")} left)`;
      if (!from) {
        offerWeights();
        say(-1);
      }
    } catch (error) {
      if (!isClosed) root.append(h("p", { class: "error" }, error.message));
    }
  }

  function offerWeights() {
    const losses = weightNames(tokens).map((name) => [name, name.slice(WEIGHT.length)]);
    if (losses.length) choice.after(choiceOf("Or by the gradient weight under", losses));
    for (const input of root.querySelectorAll("input[name=coloring]"))
      input.checked = input.value === coloringOf(tokens);
  }

  function add(from) {
    const parts = [];
    for (let i = from; i < tokens.token_texts.length; i += 1) {
      if (
        tokens.sample[i] !== (tokens.sample[i - 1] ?? -1) &&
        (i || tokens.sample.at(-1) !== tokens.sample[0])
      ) {
        parts.push(h("p", { class: "sequence" }, `Sequence ${tokens.sample[i] + 1}`));
      }
      parts.push(h("span", { class: "token", "data-i": i }, visible(tokens.token_texts[i])));
      if (tokens.token_texts[i].endsWith("\n")) parts.push(h("br"));
    }
    box.append(...parts);
  }

  function paint(from = 0) {
    if (!tokens) return;
    const theme = isDark() ? "dark" : "light";
    const spans = box.querySelectorAll(".token");
    for (let i = from; i < spans.length; i += 1) {
      const { background, text, kind } = lookOf(tokens, i, theme);
      spans[i].className = `token${kind ? ` token-${kind}` : ""}${i === current ? " is-current" : ""}`;
      spans[i].style.background = background || "";
      spans[i].style.color = text || "";
    }
    drawLegend(legend, tokens, theme);
    if (current >= 0) say(current);
  }

  function say(i) {
    if (i < 0) {
      const ratios = tokens.token_texts.map((_, n) => ratioOf(tokens, n)).filter(isNumber);
      readout.textContent =
        `${tokens.num_left_out ? "The first " : ""}${formatCount(tokens.num_tokens, "token")}` +
        (tokens.num_left_out ? ` (${tokens.num_left_out.toLocaleString("en")} more are not in this page)` : "") +
        "; point at one, or use the arrow keys." +
        (ratios.length
          ? ` Ratios from ${formatNumber(Math.min(...ratios))} to ${formatNumber(Math.max(...ratios))}.`
          : "");
      return;
    }
    const t = tokens;
    const mask = Object.values(MASKS).find(({ is }) => is(t, i))?.text;
    const values = [
      ["logprob", t.policy_versions[i] < 0 ? null : t.inference_logprobs[i]],
      ["trainer's", t.trainer_logprobs[i]],
      ["ratio", ratioOf(t, i)],
      ["entropy", t.entropy[i]],
      ["advantage", t.loss_mask[i] ? t.advantages[i] : null],
      ["policy", t.policy_versions[i] < 0 ? null : t.policy_versions[i]],
      ...weightNames(t).map((name) => [name, t[name][i]]),
    ].filter(([, value]) => value !== null && value !== undefined);
    readout.replaceChildren(
      h("b", {}, `${i + 1}: ${JSON.stringify(t.token_texts[i])}`),
      h("span", { class: "quiet" }, ` id ${t.token_ids[i]} `),
      ...values.flatMap(([name, value]) => [` ${name} `, h("b", {}, formatNumber(value))]),
      ` · ${mask}`,
    );
  }

  function moveTo(i) {
    const spans = box.querySelectorAll(".token");
    if (!spans[i]) return;
    spans[current]?.classList.remove("is-current");
    current = i;
    spans[i].classList.add("is-current");
    say(i);
  }

  box.addEventListener("pointerover", (event) => {
    const place = event.target.dataset?.i;
    if (place !== undefined) moveTo(Number(place));
  });
  box.addEventListener("keydown", (event) => {
    const step = {
      ArrowRight: 1,
      ArrowLeft: -1,
      ArrowDown: 10,
      ArrowUp: -10,
      Home: -Infinity,
      End: Infinity,
    }[event.key];
    if (!step || !tokens) return;
    event.preventDefault();
    event.stopPropagation();
    moveTo(Math.min(Math.max(current + step, 0), tokens.token_texts.length - 1));
    box.querySelectorAll(".token")[current].scrollIntoView({ block: "nearest" });
  });

  return {
    update({ isTheme }) {
      if (isTheme) paint();
    },
    close() {
      isClosed = true;
    },
  };
}

// A token that would not be seen has a sign.
function visible(text) {
  if (text === "") return "∅";
  const signs = text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/\r/g, "␍");
  return /^ +$/.test(signs) ? signs.replace(/ /g, "␣") : signs;
}

function lookOf(t, i, theme) {
  const name = coloringOf(t);
  if (name === "mask") return { kind: Object.keys(MASKS).find((mask) => MASKS[mask].is(t, i)) };
  const value = scaleOf(name).value(t, i);
  if (!isNumber(value)) return { kind: "none" };
  const color = colorAt(name, value, t, theme);
  return { background: `rgb(${color.join(" ")})`, text: luminance(color) > 0.18 ? "#000" : "#fff" };
}

function colorAt(name, value, t, theme) {
  const { low, high, place, most, colors, isReversed } = scaleOf(name);
  if (name === "version") {
    const [first, last] = [t.versions[0], t.versions.at(-1)];
    return between(STEPS[theme], last > first ? (value - first) / (last - first) : 1);
  }
  if (most) return between(colors[theme], 0.5 + value / (2 * (most(t) || 1)));
  const at = place ? place(value) : (value - low) / (high - low);
  return between(colors[theme], isReversed ? 1 - at : at);
}

// The color at a place from 0 to 1 of a scale.
function between(colors, at) {
  const place = Math.min(Math.max(at, 0), 1) * (colors.length - 1);
  const i = Math.min(Math.floor(place), colors.length - 2);
  const [from, to] = [colors[i], colors[i + 1]].map((color) =>
    [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16)),
  );
  return from.map((part, n) => Math.round(part + (to[n] - part) * (place - i)));
}

// Black on it has a contrast of more than 4.5 if this is above 0.18, white if it is below.
function luminance(color) {
  const [r, g, b] = color.map((part) =>
    part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4,
  );
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function drawLegend(root, t, theme) {
  const name = coloringOf(t);
  const { title, text, colors, ends, middle, most, isReversed } = scaleOf(name);
  root.replaceChildren(h("b", {}, title), h("span", { class: "quiet" }, ` ${text} `));
  if (name === "mask") {
    root.append(
      ...Object.entries(MASKS).map(([kind, mask]) => h("span", { class: `token token-${kind}` }, mask.text)),
    );
  } else if (name === "version") {
    const few = t.versions.length > 8 ? [t.versions[0], t.versions.at(-1)] : t.versions;
    root.append(
      ...few.map((version) => {
        const color = colorAt("version", version, t, theme);
        return h(
          "span",
          {
            class: "token",
            css: { background: `rgb(${color.join(" ")})`, color: luminance(color) > 0.18 ? "#000" : "#fff" },
          },
          version,
        );
      }),
    );
    if (!few.length) root.append("no token was sampled");
  } else {
    const [low, high] = ends || [`-${formatNumber(most(t))}`, `+${formatNumber(most(t))}`];
    const stops = isReversed ? colors[theme].toReversed() : colors[theme];
    root.append(
      h("span", {}, low),
      h(
        "span",
        {
          class: "scale",
          css: { background: `linear-gradient(to right, ${stops.join(", ")})` },
          "aria-hidden": "true",
        },
        middle ? h("i", {}, middle) : null,
      ),
      h("span", {}, high),
    );
  }
  if (name !== "mask") root.append(h("span", { class: "token token-none" }, "no value"));
}
