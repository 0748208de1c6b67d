#!/bin/sh
# An agent in nine lines of shell: it asks with curl, and leaves the answer in a file.
#   OPENAI_BASE_URL=... OPENAI_API_KEY=... sh curl_agent.sh abc
set -eu
escaped=$(printf '%s' "$1" | sed 's/\\/\\\\/g; s/"/\\"/g')  # of a prompt of one line
curl --silent --show-error --fail "$OPENAI_BASE_URL/chat/completions" \
    --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \
    --data "{\"model\": \"any\", \"messages\": [{\"role\": \"user\", \"content\": \"$escaped\"}]}" |
    sed 's/.*"content":"\([^"]*\)".*/\1/' | tee answer.txt
