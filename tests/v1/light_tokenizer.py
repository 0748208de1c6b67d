"""A tokenizer for tests that start many processes: transformers takes seconds to load in each."""

from types import SimpleNamespace

TURN, END = 256, 257  # after the 256 bytes


class LightTokenizer:
    """A token for each byte. A message is its role's first letter, TURN, its text, END."""

    name_or_path = "light"
    all_special_ids = (TURN, END)
    added_tokens_decoder = {TURN: "<turn>", END: "<end>"}  # noqa: RUF012
    eos_token_id = END

    def __call__(self, text, **options):
        return SimpleNamespace(input_ids=[*text.encode()])

    def __len__(self):
        return 258

    def decode(self, token_ids):
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")

    def apply_chat_template(self, messages, add_generation_prompt=False, **options):
        tokens = []
        for message in messages:
            text = [*(message.get("content") or "").encode()]
            tokens += [ord(message["role"][0]), TURN, *text, END]
        return [*tokens, ord("a"), TURN] if add_generation_prompt else tokens
