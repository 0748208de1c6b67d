// One rollout: what it is, and in tabs its messages with a timeline, its tokens, its group.

import { asText, formatCount, formatNumber, formatSeconds, formatTime, h, isNumber, signed } from "./dom.js";
import { mountGroup } from "./group.js";
import { messageElement } from "./messages.js";
import { mountTokens } from "./tokens.js";

const TABS = { messages: "Messages", tokens: "Tokens", group: "Group" };

export function mountRollout(root, app, { close, neighbour }) {
  let shown = ""; // run and number of what is there
  let row = null;
  let asked = null; // what was asked for last
  let tabPart = null;

  function empty() {
    tabPart?.close();
    tabPart = null;
    shown = "";
    row = null;
    root.replaceChildren(h("p", { class: "quiet nothing" }, "Choose a rollout: click one, or press j."));
  }

  async function update(wanted) {
    asked = wanted;
    if (wanted.number === null) return empty();
    const key = `${wanted.run}\n${wanted.number}`;
    if (key === shown && row) {
      showTab(wanted);
      return;
    }
    shown = key;
    row = null;
    root.setAttribute("aria-busy", "true");
    try {
      const found = await app.store.source.rollout(wanted.run, wanted.number);
      if (shown !== key) return;
      row = found;
      showRow();
      showTab(asked);
    } catch (error) {
      if (shown === key) root.replaceChildren(backButton(), h("p", { class: "error" }, error.message));
      shown = "";
    } finally {
      if (shown === key) root.removeAttribute("aria-busy");
    }
  }

  function backButton() {
    return h("button", { type: "button", class: "back", onclick: close }, "← List");
  }

  const tabs = h("nav", { class: "tabs", "aria-label": "About this rollout" });
  const body = h("div", { class: "tab-body" });

  function showRow() {
    tabPart?.close();
    tabPart = null;
    const step = (by, text, label) =>
      h(
        "button",
        {
          type: "button",
          "aria-label": label,
          title: label,
          onclick: async () => {
            const number = await neighbour(by);
            if (number !== undefined) app.go(asked.href(number), { replace: true });
          },
        },
        text,
      );
    root.replaceChildren(
      h(
        "header",
        { class: "detail-head" },
        backButton(),
        h("h3", { tabindex: "-1" }, `Rollout ${row.number}`),
        h(
          "span",
          { class: "steps-buttons" },
          step(-1, "↑", "Previous rollout of the list (k)"),
          step(1, "↓", "Next rollout of the list (j)"),
        ),
      ),
      facts(row),
      tabs,
      body,
    );
  }

  function showTab({ tab, href, isTheme }) {
    const name = TABS[tab] ? tab : "messages";
    tabs.replaceChildren(
      ...Object.entries(TABS).map(([key, title]) => {
        const size = key === "group" ? ` (${row.group_numbers?.length ?? 0})` : "";
        return h(
          "a",
          { href: withTab(href(row.number), key), "aria-current": key === name ? "true" : null },
          `${title}${size}`,
        );
      }),
    );
    if (tabPart?.name === name && tabPart.number === row.number) {
      tabPart.update?.({ isTheme });
      return;
    }
    tabPart?.close();
    body.replaceChildren();
    const mount = { messages: mountMessages, tokens: mountTokens, group: mountGroup }[name];
    tabPart = { name, number: row.number, close() {}, ...mount(body, app, { ...asked, row }) };
  }

  function onKey(event) {
    if (!asked || asked.number === null) return false;
    const tab = { m: "messages", t: "tokens", g: "group" }[event.key];
    if (tab) app.go(withTab(asked.href(asked.number), tab), { replace: true });
    else if (!row)
      return false; // it is on its way
    else if (event.key === "[" || event.key === "]") {
      const numbers = row.group_numbers || [];
      const number = numbers[numbers.indexOf(row.number) + (event.key === "]" ? 1 : -1)];
      if (number !== undefined) app.go(asked.href(number), { replace: true });
    } else return false;
    return true;
  }

  empty();
  return { update, onKey };
}

function withTab(href, tab) {
  const [path, query] = href.split("?");
  const params = new URLSearchParams(query);
  params.set("tab", tab);
  return `${path}?${params}`;
}

function facts(row) {
  const versions = [...new Set([row.oldest_version, row.newest_version])].filter(isNumber).join(" to ");
  const items = [
    ["Reward", isNumber(row.reward) ? h("b", {}, formatNumber(row.reward)) : "none"],
    ["Advantage", isNumber(row.advantage) ? signed(row.advantage) : null],
    ["Step", h("span", {}, `${row.step}${row.split === "eval" ? " (evaluation)" : ""}`)],
    ["Environment", [row.env, row.role].filter(Boolean).join(", ")],
    ["Example", row.example],
    ["Group", row.group],
    ["Turns", row.num_turns],
    [
      "Tokens",
      isNumber(row.num_tokens)
        ? `${row.num_tokens.toLocaleString("en")}, ${row.num_sampled_tokens?.toLocaleString("en")} sampled`
        : null,
    ],
    ["Policy version", versions],
    ["Took", isNumber(row.generation_s) ? formatSeconds(row.generation_s) : null],
    ["Begun", isNumber(row.begun_at) ? formatTime(row.begun_at) : null],
    ["Trained on", row.split === "eval" ? null : row.in_loss ? "yes" : "no"],
    ["Truncated", row.is_truncated ? "a length limit cut a turn" : null],
  ];
  const parts = row.rewards && typeof row.rewards === "object" ? Object.entries(row.rewards) : [];
  return h(
    "div",
    {},
    row.error && h("p", { class: "error" }, asText(row.error)),
    h(
      "dl",
      { class: "facts" },
      items
        .filter(([, value]) => value !== null && value !== undefined && value !== "")
        .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
    ),
    parts.length
      ? h(
          "details",
          { class: "parts", open: parts.length <= 8 },
          h("summary", {}, "Parts of the reward, metrics"),
          h(
            "dl",
            { class: "facts" },
            parts.map(([name, value]) =>
              h(
                "div",
                {},
                h("dt", {}, name),
                h("dd", {}, isNumber(value) ? formatNumber(value) : asText(value)),
              ),
            ),
          ),
        )
      : null,
  );
}

// --- Messages -------------------------------------------------------------------------------------

function mountMessages(root, app, { row, text }) {
  const messages = Array.isArray(row.messages) ? row.messages : [];
  const branches = Array.isArray(row.other_branches) ? row.other_branches : [];
  const elements = messages.map((message) => messageElement(message, row.turns, text));
  root.append(
    timeline(row, messages, elements),
    ...(messages.length ? elements : [h("p", { class: "quiet" }, "There are no messages.")]),
    ...branches.map((branch, i) =>
      h(
        "details",
        { class: "branch" },
        h("summary", {}, `Other branch ${i + 1} (${formatCount(branch.length, "message")})`),
        branch.map((message) => messageElement(message, [], text)),
      ),
    ),
  );
  return {};
}

// Turns and tool calls over time. Without times: the turns and their tokens.
function timeline(row, messages, elements) {
  const turns = Array.isArray(row.turns) ? row.turns : [];
  if (!turns.length) return null;
  const spans = turns.map((turn, i) => ({
    kind: "turn",
    title: `turn ${i + 1}`,
    begin: turn.begin_s,
    end: turn.end_s,
    place: messages.findIndex((m) => m.turn === i),
    about: [
      isNumber(turn.num_prompt_tokens)
        ? `${turn.num_prompt_tokens.toLocaleString("en")} → ${formatCount(turn.num_sampled_tokens ?? 0, "token")}`
        : null,
      isNumber(turn.policy_version) ? `policy ${turn.policy_version}` : null,
      turn.finish_reason,
    ],
  }));
  const names = new Map(
    messages.flatMap((m) =>
      (Array.isArray(m.tool_calls) ? m.tool_calls : []).map((call) => [call?.id, call?.function?.name]),
    ),
  );
  messages.forEach((message, place) => {
    if (isNumber(message.turn) || !isNumber(message.begin_s)) return;
    const title =
      message.role === "tool" ? asText(names.get(message.tool_call_id)) || "tool" : asText(message.role);
    spans.push({
      kind: message.role === "tool" ? "tool" : "user",
      title,
      begin: message.begin_s,
      end: message.end_s,
      place,
      about: [],
    });
  });
  const timed = spans.filter(({ begin, end }) => isNumber(begin) && isNumber(end));
  const total = Math.max(...timed.map(({ end }) => end), 1e-9);
  const sorted = timed.length ? spans.toSorted((a, b) => (a.begin ?? 0) - (b.begin ?? 0)) : spans;
  const seconds = (kind) =>
    timed.filter((span) => span.kind === kind).reduce((sum, { begin, end }) => sum + end - begin, 0);
  const sum = timed.length
    ? `${formatSeconds(total)}: ${formatSeconds(seconds("turn"))} in ${formatCount(turns.length, "turn")}${seconds("tool") ? `, ${formatSeconds(seconds("tool"))} in tools` : ""}`
    : `${formatCount(turns.length, "turn")}; their times are not known`;
  return h(
    "details",
    { class: "timeline", open: turns.length <= 30 },
    h("summary", {}, "Timeline ", h("span", { class: "quiet" }, sum)),
    h(
      "ol",
      {},
      sorted.map(({ kind, title, begin, end, about, place }) => {
        const isTimed = isNumber(begin) && isNumber(end);
        const label = [isTimed ? formatSeconds(end - begin) : null, ...about.filter(Boolean).map(asText)]
          .filter(Boolean)
          .join(" · ");
        return h(
          "li",
          {},
          h(
            "button",
            {
              type: "button",
              class: `span span-${kind}`,
              title: label,
              disabled: place < 0,
              onclick: () => toMessage(elements[place]),
            },
            h("span", { class: "span-title" }, title),
            h(
              "span",
              { class: "track", "aria-hidden": "true" },
              isTimed
                ? h("span", {
                    css: {
                      left: `${(100 * begin) / total}%`,
                      width: `${Math.max((100 * (end - begin)) / total, 0.5)}%`,
                    },
                  })
                : null,
            ),
            h("span", { class: "span-about" }, label),
          ),
        );
      }),
    ),
  );
}

function toMessage(element) {
  element.scrollIntoView({ block: "start", behavior: "instant" });
  element.focus({ preventScroll: true });
}
