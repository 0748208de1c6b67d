// The rollouts of one group beside each other: what they all got to read once, then what each wrote,
// from the highest reward to the lowest, with the histogram of their rewards.

import { asText, formatCount, formatNumber, h, isNumber, mean, signed } from "./dom.js";
import { histogramOf } from "./source.js";
import { messageElement } from "./messages.js";

export function mountGroup(root, app, { run, row, href, text }) {
  let isClosed = false;
  root.append(h("p", { class: "quiet" }, "Reading the group …"));
  app.store.source
    .group(run, row.number)
    .then(({ rollouts, num_more: numMore }) => {
      if (!isClosed) show(rollouts, numMore);
    })
    .catch((error) => {
      if (!isClosed) root.replaceChildren(h("p", { class: "error" }, error.message));
    });

  function show(rollouts, numMore) {
    const numCommon = commonMessages(rollouts.map((one) => one.messages || []));
    const sorted = rollouts.toSorted(
      (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.number - b.number,
    );
    const prompt = (rollouts.find((one) => one.messages)?.messages || []).slice(0, numCommon);
    const rewards = rollouts.map((one) => one.reward).filter(isNumber);
    const failed = rollouts.length - rewards.length;
    const sum = [
      formatCount(rollouts.length + numMore, "rollout"),
      rewards.length ? `mean reward ${formatNumber(mean(rewards))}` : null,
      new Set(rewards).size === 1 && rewards.length > 1 && rollouts[0].split === "train"
        ? "all rewards are equal: nothing is learned from them"
        : null,
      failed ? `${failed} without reward` : null,
      numMore ? `${numMore} are not shown` : null,
    ]
      .filter(Boolean)
      .join(", ");
    root.replaceChildren(
      h("p", {}, sum),
      groupHistogram(rewards),
      prompt.length
        ? h(
            "details",
            { class: "branch", open: true },
            h("summary", {}, "What all of them read"),
            prompt.map((message) => messageElement(message)),
          )
        : "",
      h(
        "div",
        {
          class: `columns${isShort(sorted) ? " is-short" : ""}`,
          tabindex: "0",
          role: "region",
          "aria-label": "Rollouts of the group",
        },
        sorted.map((one) =>
          h(
            "section",
            {
              class: `column${one.number === row.number ? " is-chosen" : ""}`,
              "aria-label": `Rollout ${one.number}`,
            },
            h(
              "header",
              {},
              h("a", { href: href(one.number).replace(/([?&])tab=[^&]*&?/, "$1") }, `Rollout ${one.number}`),
              h(
                "span",
                { class: "reward" },
                isNumber(one.reward) ? formatNumber(Number(one.reward.toFixed(4))) : "no reward",
              ),
              isNumber(one.advantage)
                ? h("span", { class: "quiet" }, `advantage ${signed(one.advantage)}`)
                : null,
            ),
            one.error ? h("p", { class: "error" }, asText(one.error)) : null,
            (one.messages || []).slice(numCommon).map((message) => messageElement(message, one.turns, text)),
          ),
        ),
      ),
    );
  }

  return {
    close() {
      isClosed = true;
    },
  };
}

// Whether replies are so short that their boxes can stand in rows.
function isShort(rollouts) {
  return rollouts.every((one) => JSON.stringify(one.messages || []).length < 1500);
}

// How many messages all have in common before the first one that the policy wrote.
export function commonMessages(conversations) {
  const known = conversations.filter((messages) => messages.length);
  if (!known.length) return 0;
  const [first] = known;
  const knowsTurns = first.some((message) => isNumber(message.turn));
  const texts = known.map((messages) => messages.map((message) => JSON.stringify(message)));
  for (let place = 0; place < first.length; place += 1) {
    const isReply = knowsTurns ? isNumber(first[place].turn) : first[place].role === "assistant";
    if (isReply || texts.some((own) => own[place] !== texts[0][place])) return place;
  }
  return first.length;
}

function groupHistogram(rewards) {
  const found = histogramOf(rewards, 10);
  if (!found) return "";
  const { low, high, counts } = found;
  const width = (high - low) / counts.length;
  const most = Math.max(...counts);
  const text = (i) =>
    `${formatNumber(low + i * width)}${width ? ` to ${formatNumber(low + (i + 1) * width)}` : ""}: ${formatCount(counts[i], "rollout")}`;
  return h(
    "figure",
    { class: "group-histogram" },
    h(
      "div",
      {
        class: "histogram",
        role: "img",
        "aria-label": `Rewards. ${counts
          .map((n, i) => (n ? text(i) : null))
          .filter(Boolean)
          .join("; ")}`,
      },
      counts.map((n, i) =>
        h(
          "div",
          { class: "bin", title: text(i) },
          n ? h("b", {}, n) : null,
          h("span", { css: { height: `${(n / most) * 100}%` } }),
        ),
      ),
    ),
    h(
      "div",
      { class: "histogram-x" },
      h("span", {}, formatNumber(low)),
      h("span", { class: "quiet" }, "reward"),
      h("span", {}, high > low ? formatNumber(high) : ""),
    ),
  );
}
