// A message of a rollout: its text, its reasoning, its tool calls.

import { asText, formatCount, formatSeconds, h, isNumber, prettyJson } from "./dom.js";

const LONG = 6000; // characters of a text that is shown at once

export function messageElement(message, turns = [], found = "") {
  const role = asText(message.role) || "?";
  const turn = isNumber(message.turn) ? turns?.[message.turn] : null;
  const about = [
    isNumber(message.turn) ? `turn ${message.turn + 1}` : null,
    turn && isNumber(turn.num_sampled_tokens) ? formatCount(turn.num_sampled_tokens, "token") : null,
    turn?.finish_reason && turn.finish_reason !== "stop" ? asText(turn.finish_reason) : null,
    isNumber(message.begin_s) && isNumber(message.end_s)
      ? formatSeconds(message.end_s - message.begin_s)
      : null,
  ]
    .filter(Boolean)
    .join(" · ");
  const known = ["system", "user", "assistant", "tool"].includes(role) ? role : "other";
  const calls = Array.isArray(message.tool_calls) ? message.tool_calls : [];
  return h(
    "article",
    { class: `message role-${known}`, tabindex: "-1" },
    h(
      "header",
      {},
      h("b", {}, role),
      message.tool_call_id ? h("span", { class: "quiet" }, ` to ${asText(message.tool_call_id)}`) : null,
      h("span", { class: "quiet" }, about),
    ),
    message.reasoning_content
      ? h(
          "details",
          { class: "reasoning", open: asText(message.reasoning_content).length < 600 },
          h("summary", {}, "Reasoning"),
          textElement(asText(message.reasoning_content), found),
        )
      : null,
    message.content
      ? textElement(asText(message.content), found)
      : calls.length || message.reasoning_content
        ? null
        : h("p", { class: "quiet" }, "(empty)"),
    calls.map((call) =>
      h(
        "div",
        { class: "call" },
        h(
          "header",
          {},
          h("b", {}, marked(asText(call?.function?.name) || "?", found)),
          h("span", { class: "quiet" }, ` call ${asText(call?.id)}`),
        ),
        textElement(prettyJson(asText(call?.function?.arguments)), found),
      ),
    ),
  );
}

// A text as it was written. Of a long one the beginning is shown, and what a search has found is
// marked.
function textElement(text, found) {
  const box = h("pre", { class: "text" });
  const show = (limit) => {
    box.replaceChildren(...marked(text.slice(0, limit), found));
    if (text.length > limit) {
      box.append(
        h(
          "button",
          { type: "button", class: "more", onclick: () => show(limit * 10) },
          `… ${(text.length - limit).toLocaleString("en")} more characters`,
        ),
      );
    }
  };
  const place = found ? text.toLowerCase().indexOf(found.toLowerCase()) : -1;
  show(Math.max(LONG, place + 1000));
  return box;
}

function marked(text, found) {
  if (!found) return [text];
  const parts = [];
  const [low, wanted] = [text.toLowerCase(), found.toLowerCase()];
  let at = 0;
  for (let place = low.indexOf(wanted); place >= 0 && parts.length < 400; place = low.indexOf(wanted, at)) {
    parts.push(text.slice(at, place), h("mark", {}, text.slice(place, place + wanted.length)));
    at = place + wanted.length;
  }
  return [...parts, text.slice(at)];
}
