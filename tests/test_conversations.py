"""Which tokens of a row are in the loss, by hand-counted examples. The tokenizer has one token for
each byte and one for each special token, so positions can be counted in the text.
"""

import json

import numpy as np
import pytest

from tests.helpers import load_example
from verifiers_rl.sft.conversations import DatasetError, Tokenization, read_dataset

# What matters in Qwen3's: past turns lose their thinking, the last one always has some; tool
# results are of the user; a newline follows the end of a turn.
QWEN3 = (
    "{%- if tools -%}{{- '<|im_start|>system\n' -}}"
    "{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}{%- endif -%}"
    "{%- set seen = namespace(last=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set seen.last = loop.index0 -%}"
    "{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}{{- '<|im_start|>assistant\n' -}}"
    "{%- if loop.index0 > seen.last and (loop.last or m.reasoning_content) -%}"
    "{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' -}}{%- endif -%}"
    "{{- m.content -}}"
    "{%- for call in m.tool_calls or [] -%}"
    "{{- '<tool_call>\n' + call.function | tojson + '\n</tool_call>' -}}{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}"
    "{%- elif m.role == 'tool' -%}{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' -}}"
    "{%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
LLAMA = (
    "{{- bos_token -}}"
    "{%- for m in messages -%}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim -}}"
    "{{- '<|eot_id|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}"
)
# A turn ends where the next role begins, as in GLM-4's; `<|system|>` begins what a tool says.
GLM = (
    "{%- for m in messages -%}"
    "{{- '<|system|>' if m.role == 'tool' else '<|' + m.role + '|>' -}}"
    "{{- '\n' + m.content -}}{{- m.tool_calls[0].function.name if m.tool_calls -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"
)
SPECIAL = {
    QWEN3: ["<|im_start|>", "<|im_end|>"],
    LLAMA: ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
}
THINKS = "<think>\n\n</think>\n\n"  # 19 tokens
CALL = {
    "type": "function",
    "function": {"name": "times", "arguments": '{"a": 2, "b": 3}'},
}


def make_tokenizer(template=None):
    """The example's tokenizer, with its own template or with another one."""
    tokenizer = load_example("warm_start").make_tokenizer(SPECIAL.get(template, []))
    if template is not None:
        tokenizer.chat_template = template
        tokenizer.eos_token = SPECIAL[template][-1]
        tokenizer.bos_token = SPECIAL[template][0]
    return tokenizer


def chat(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]


def tokens_of(row, template=None, **options):
    """The tokenizer, and the samples of a row: ids, and positions of the loss tokens."""
    tokenizer = make_tokenizer(template)
    samples = Tokenization(tokenizer, **options).of_row(row)
    assert all(ids.dtype == np.int32 and len(ids) == len(mask) for ids, mask in samples)
    return tokenizer, [(ids, np.flatnonzero(mask).tolist()) for ids, mask in samples]


def said(row, template=None, **options):
    """The text of the loss tokens of each sample."""
    tokenizer, samples = tokens_of(row, template, **options)
    return [tokenizer.decode(ids[at]) for ids, at in samples]


def test_qwens_last_turn_is_in_the_loss_with_its_thinking_and_its_end():
    # <s>user\n2+2?<e>\n: 1 + 5 + 4 + 1 + 1; <s>assistant\n: 1 + 10; thinking 19, 4, <e>; newline
    _, [(ids, at)] = tokens_of({"messages": chat("2+2?", "4")}, QWEN3)
    assert at == [*range(23, 44)] and len(ids) == 45
    assert said({"messages": chat("2+2?", "4")}, QWEN3) == [THINKS + "4<|im_end|>"]


def test_qwens_earlier_turn_is_a_sample_of_its_own_as_it_is_when_it_is_said():
    tokenizer, samples = tokens_of({"messages": chat("a", "b", "c", "d")}, QWEN3)
    (first, at_first), (second, at_second) = samples
    assert at_first == [*range(20, 41)] and len(first) == 42
    # The first turn is now b<e>\n alone: 9 + 14, the second question 9, the beginning 11.
    assert at_second == [*range(43, 64)] and len(second) == 65
    assert tokenizer.decode(second[20:23]) == "b<|im_end|>\n"


def test_qwens_reasoning_is_kept_between_tool_calls():
    reply = {"role": "assistant", "content": "", "reasoning_content": "x", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "6"}
    messages = [*chat("2*3"), reply, result, {"role": "assistant", "content": "six"}]
    messages[-1]["reasoning_content"] = "y"
    call = '<tool_call>\n{"name": "times", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
    assert said({"messages": messages}, QWEN3) == [
        f"<think>\nx\n</think>\n\n{call}<think>\ny\n</think>\n\nsix<|im_end|>"
    ]
    # Without reasoning the template drops the empty one of the call, once it is a past turn.
    for message in messages:
        message.pop("reasoning_content", None)
    parts = said({"messages": messages}, QWEN3)
    assert parts == [THINKS + call, THINKS + "six<|im_end|>"]


def test_llamas_turns_are_one_sample():
    # <bos>; <sh>user<eh>\n\na<eot>: 10; <sh>assistant<eh>\n\n: 13; b<eot>; 10; 13; d<eot>
    _, [(ids, at)] = tokens_of({"messages": chat("a", "b", "c", "d")}, LLAMA)
    assert at == [24, 25, 49, 50] and len(ids) == 51


def test_a_tools_turn_is_not_in_the_loss():
    # <|user|>2*3<|end|><|assistant|>: 1 + 3 + 1 + 1
    call = '<tool_call>{"name": "times", "arguments": {"a": 2, "b": 3}}</tool_call><|end|>'
    reply = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    messages = [*chat("2*3"), reply, {"role": "tool", "content": "6"}, *chat("", "six")[1:]]
    _, [(ids, at)] = tokens_of({"messages": messages, "tools": None})
    # The tool's <|tool|>6<|end|> is 8 characters and 2, then <|assistant|>; six<|end|> ends it.
    start = 6 + len(call) - len("<|end|>") + 1
    assert at[: start - 6] == [*range(6, start)]
    assert at[start - 6 :] == [*range(len(ids) - 4, len(ids))]
    assert said({"messages": messages}) == [call + "six<|end|>"]


def test_tools_are_in_the_prompt_as_a_list_or_as_json():
    tool = {"type": "function", "function": {"name": "times", "parameters": {}}}
    row = {"messages": chat("a", "b"), "tools": [tool]}
    tokenizer, [(ids, at)] = tokens_of(row, QWEN3)
    assert tokenizer.decode(ids[: at[0]]).startswith(f"<|im_start|>system\n{json.dumps(tool)}\n")
    _, [(same, _)] = tokens_of(row | {"tools": json.dumps([tool])}, QWEN3)
    assert same.tolist() == ids.tolist()


def test_only_the_completion_is_in_the_loss():
    _, [(ids, at)] = tokens_of({"prompt": "2+2=", "completion": "4"})
    assert at == [4, 5] and len(ids) == 6  # with the end of a text
    _, [(ids, at)] = tokens_of({"prompt": "2+2=", "completion": "4<|end|>"})
    assert at == [4, 5] and len(ids) == 6
    row = {"prompt": chat("a", "b", "c"), "completion": chat("", "d")[1:]}
    for template, end in ((LLAMA, "<|eot_id|>"), (None, "<|end|>")):
        assert said(row, template) == [f"d{end}"]


@pytest.mark.parametrize("template", [LLAMA, None])
def test_a_message_of_weight_0_is_read_but_not_learned(template):
    messages = chat("a", "b", "c", "d")
    tokenizer, [(whole, _)] = tokens_of({"messages": messages}, template)
    messages[1]["weight"], messages[3]["weight"] = 0, 1
    end = tokenizer.decode(whole[-1:])
    _, [(ids, at)] = tokens_of({"messages": messages}, template)
    assert ids.tolist() == whole.tolist() and tokenizer.decode(ids[at]) == f"d{end}"


def test_a_text_is_in_the_loss_but_for_its_first_token():
    _, [(ids, at)] = tokens_of({"text": "abc"})
    assert at == [1, 2, 3] and len(ids) == 4


BOS, EOS = SPECIAL[LLAMA][0], SPECIAL[LLAMA][-1]


@pytest.mark.parametrize("around", [f"{BOS} $A", f"{BOS} $A {EOS}"])
@pytest.mark.parametrize(
    ("row", "at"),
    [
        ({"text": "abc"}, [1, 2, 3, 4]),
        ({"text": f"{BOS}abc"}, [1, 2, 3, 4]),
        ({"text": f"{BOS}abc{EOS}"}, [1, 2, 3, 4]),
        ({"prompt": "ab", "completion": "c"}, [3, 4]),
        ({"prompt": f"{BOS}ab", "completion": f"c{EOS}"}, [3, 4]),
    ],
)
def test_texts_have_what_the_tokenizer_puts_around_them_once(around, row, at):
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(LLAMA)
    ids = tokenizer.convert_tokens_to_ids([BOS, "a", "b", "c", EOS])
    known = [(BOS, ids[0]), (EOS, ids[-1])]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(around, special_tokens=known)
    assert tokenizer("a")["input_ids"][0] == ids[0]  # it does so
    [(found, mask)] = Tokenization(tokenizer).of_row(row)
    assert found.tolist() == ids and np.flatnonzero(mask).tolist() == at


def tokenization_of_glm():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = GLM
    return tokenizer, Tokenization(tokenizer)


def test_a_turn_without_an_end_ends_with_the_token_of_the_next_role():
    tokenizer, tokenization = tokenization_of_glm()
    [(ids, mask)] = tokenization.of_row({"messages": chat("a", "b", "c", "d")})
    assert tokenizer.decode(ids) == (
        "<|user|>\na<|assistant|>\nb<|user|>\nc<|assistant|>\nd<|user|>"
    )
    assert np.flatnonzero(mask).tolist() == [5, 6, 11, 12]  # b, d, each with <|user|>
    # A call is answered by a tool, also where the conversation ends with the call.
    reply = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    for more in ([], [{"role": "tool", "content": "6"}, *chat("", "six")[1:]]):
        [(ids, mask)] = tokenization.of_row({"messages": [*chat("a"), reply, *more]})
        text = "times<|system|>" + "six<|user|>" * bool(more)
        assert tokenizer.decode(ids[mask]) == text
    rows = tokenization.of_rows([{"messages": chat("a", "b")}], "some")
    assert tokenization.last_token(rows) == tokenizer.convert_tokens_to_ids("<|user|>")


def test_turns_that_no_token_ends_are_counted():
    tokenizer, lines = make_tokenizer(), []
    tokenizer.chat_template = GLM.replace("|", "!")
    rows = [{"messages": chat("a", "b")}, {"text": "a"}]
    Tokenization(tokenizer).of_rows(rows, "some", lines.append)
    assert lines[0].endswith("; 1 with a turn that no special token ends, so a server would go on")


def test_a_long_conversation_is_tokenized_in_linear_time():
    class Counting(Tokenization):
        num = 0

        def _encode(self, text):
            self.num += len(text)
            return super()._encode(text)

    for template in (LLAMA, None):
        tokenizer, nums = make_tokenizer(template), []
        for num_messages in (20, 80):
            messages = chat(*["a longer text"] * num_messages)
            tokenization = Counting(tokenizer)
            [(ids, _)] = tokenization.of_row({"messages": messages})
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            assert ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
            nums.append(tokenization.num)
        assert nums[1] < 4.5 * nums[0]


def test_variables_of_the_template_are_of_the_run_or_of_the_row():
    template = "{{- greeting -}}" + LLAMA
    SPECIAL[template] = SPECIAL[LLAMA]
    row = {"messages": chat("a", "b")}
    tokenizer = make_tokenizer(template)
    tokenization = Tokenization(tokenizer, template={"greeting": "hi"})
    assert tokenizer.decode(tokenization.of_row(row)[0][0][:2]) == "hi"
    row["chat_template_kwargs"] = {"greeting": "yo"}
    assert tokenizer.decode(tokenization.of_row(row)[0][0][:2]) == "yo"


def test_a_tokenizer_that_joins_the_turn_with_its_beginning_gives_what_a_model_would_write():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate([*alphabet, "ĊĊ"])}
    raw = Tokenizer(models.BPE(vocab, merges=[("Ċ", "Ċ")]))  # two newlines are one token
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    template = (
        "{%- for m in messages -%}{{- m.role + '\n' + m.content + '|' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- 'assistant\n' -}}{%- endif -%}"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=template)
    [(ids, mask)] = Tokenization(tokenizer).of_row({"messages": chat("a", "\nb")})
    assert tokenizer.decode(ids) == "user\na|assistant\n\nb|"
    assert vocab["ĊĊ"] not in ids and tokenizer.decode(ids[mask]) == "\nb|"


def of_rows(rows, template=None, **options):
    return Tokenization(make_tokenizer(template), **options).of_rows(rows, "some")


def test_rows_are_cut_counted_and_left_out():
    lines = []
    tokenization = Tokenization(make_tokenizer(), max_seq_len=9)
    rows = [{"messages": chat("a", "b")}, {"messages": chat("ab", "cdefghi")},
            {"messages": chat("abcdefgh", "b")}, {"messages": chat("a")}]  # fmt: skip
    result = tokenization.of_rows(rows, "some", lines.append)
    assert [[len(ids) for ids, _ in row] for row in result] == [[6], [9]]
    assert lines == [
        "data some: 2 rows with 15 tokens, 6 of them in the loss; 2 cut at max_seq_len; "
        "2 left out, without a loss token in max_seq_len"
    ]
    rows = [{"messages": chat("a", "b", "c", "d")}]
    Tokenization(make_tokenizer(QWEN3)).of_rows(rows, "some", lines.append)
    assert lines[1].endswith("; 1 conversations of several samples")


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "data some: it has no rows; look at the file and at its split"),
        ([{"messages": chat("a")}], "none of its 1 rows has a loss token"),
        ([{"text": "ab"}, {"question": "?"}], "row 1: has the columns question; it needs messages"),
        ([{"messages": [{"role": "bot", "content": ""}]}], r"messages\[0\] must be a message with"),
        ([{"messages": [{**chat("a")[0], "weight": 2}]}], r"\[0\]: weight must be 0 or 1, not 2"),
        ([{"messages": 3}], "row 0: messages must be a list of messages, not 3"),
        ([{"prompt": "a", "completion": chat("b")}], "must both be strings, or both messages"),
        ([{"messages": chat("a", "b"), "tools": "{"}], "row 0: tools: no JSON"),
        (iter([]), "cannot be counted and indexed"),
        (
            [{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]}],
            r"messages\[0\]: each of tool_calls must be",
        ),
        (
            [{"messages": [{"role": "user", "content": [{"type": "image"}]}]}],
            "has a part of the type 'image'",
        ),
        (
            [{"messages": [*chat("a", "b"), {"role": "tool", "content": {"a": 1}}]}],
            r"row 0: messages\[2\]: content must be a string, or a list of parts .* not {'a': 1}",
        ),
        (
            [{"messages": [{"role": "user", "content": ["a"]}]}],
            r"\[0\]: content must .* not \['a'\]",
        ),
        ([{"text": ["a"]}], r"row 0: text must be a string, not \['a'\]"),
        ([{"text": "a"}, {"text": "\ud83d"}], r"row 1: UnicodeEncodeError: .*'\\ud83d' in pos"),
        (
            [{"messages": chat("a", "\ud83d")}],
            r"row 0: UnicodeEncodeError: .*'\\ud83d' in .*; correct the row",
        ),
        ([{"messages": chat("a", "b"), "chat_template_kwargs": 3}], "row 0: TypeError: 'int'"),
        (
            [{"messages": chat("a", "b"), "tools": "[" * 9999 + "]" * 9999}],
            "row 0: tools: no JSON: maximum recursion",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_named(rows, problem):
    with pytest.raises(DatasetError, match=problem):
        of_rows(rows)


def test_a_template_that_does_not_continue_the_text_before_is_an_error():
    template = LLAMA.replace("assistant<|end_header_id|>", "assistant<|end_header_id|>!")
    SPECIAL[template] = SPECIAL[LLAMA]
    with pytest.raises(DatasetError) as error:
        of_rows([{"messages": chat("a", "b")}], template)
    text = str(error.value)
    assert text.startswith("data some, row 0: messages[1] (role 'assistant'): the chat template")
    assert "where that has '!" in text and "correct the template" in text


def test_a_template_that_refuses_a_conversation_says_so():
    template = "{{- raise_exception('no roles') -}}" + LLAMA
    SPECIAL[template] = SPECIAL[LLAMA]
    with pytest.raises(DatasetError, match=r"messages\[1\].*refuses the messages up to it: no rol"):
        of_rows([{"messages": chat("a", "b")}], template)
    template = "{{- 1 + messages[0].content -}}" + LLAMA
    SPECIAL[template] = SPECIAL[LLAMA]
    with pytest.raises(DatasetError, match=r"row 0: messages\[1\].*up to it: TypeError: unsupp"):
        of_rows([{"messages": chat("a", "b")}], template)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DatasetError, match="the tokenizer has no chat template"):
        Tokenization(tokenizer).of_rows([{"messages": chat("a", "b")}], "some")


def test_files_are_read_as_they_are(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"messages": chat("a", "b")}, {"messages": chat("c", "d"), "tools": [{"x": 1}]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:1]), tmp_path / "b.parquet")
    names = [str(tmp_path / name) for name in ("a.jsonl", "b.parquet")]
    assert read_dataset(names[:1]) == rows
    assert read_dataset(names) == [*rows, rows[0]]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.jsonl", '{"text": "a"}\n{', r"a.jsonl', .* line 2: no JSON"),
        ("a.parquet", "no table", "a.parquet': "),
        ("a.csv", "text\n", "neither .jsonl nor .parquet"),
        ("b.jsonl", None, "No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, text, problem):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(DatasetError, match=problem):
        read_dataset([str(tmp_path / name)])


def test_a_split_is_a_part_of_the_rows_of_a_file(tmp_path):
    rows = [{"text": str(number)} for number in range(10)]
    path = str(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_dataset([path], "train[:80%]") == rows[:8]
    assert read_dataset([path], "train[80%:]") == rows[8:]
    assert read_dataset([path], "train[-1:]+train[:2]") == [rows[9], *rows[:2]]
    assert read_dataset([path], None) == read_dataset([path]) == rows
    for split in ("test", "train[80%]", "train[:150%]"):
        with pytest.raises(DatasetError, match="A file has the split 'train' alone"):
            read_dataset([path], split)


def test_keys_that_only_other_rows_of_a_table_have_are_not_rendered():
    """A table gives each object of a column the keys of all rows, as None."""
    call = {"function": {"name": "times", "arguments": {"a": 2, "b": None, "c": [{"d": None}]}}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call], "name": None}
    kind = {"type": "integer", "enum": None}
    tool = {"function": {"name": "times", "parameters": {"properties": {"a": kind, "q": None}}}}
    template = "{{- mode | default('') -}}" + QWEN3
    SPECIAL[template] = SPECIAL[QWEN3]
    row = {"messages": [*chat("2"), reply], "tools": [tool], "chat_template_kwargs": {"mode": None}}
    tokenizer, [(ids, _)] = tokens_of(row, template)
    text = tokenizer.decode(ids)
    assert '"arguments": {"a": 2, "c": [{}]}' in text and '"a": {"type": "integer"}}' in text
    assert text.startswith("<|im_start|>") and "null" not in text and "None" not in text
    # What was said as JSON stays as it was said.
    call["function"]["arguments"] = '{"b": null}'
    assert '{"b": null}' in said(row, template)[0]


@pytest.mark.parametrize("template", [QWEN3, LLAMA, None])
def test_the_token_that_ends_replies_is_found(template):
    tokenizer = make_tokenizer(template)
    tokenization = Tokenization(tokenizer, max_seq_len=60)
    rows = [{"messages": chat("a", "b")}] * 2 + [{"messages": chat("a", "b" * 99)}] * 5
    end = (SPECIAL[template] if template else ["<|end|>"])[-1]
    # Those that are cut do not count.
    found = tokenization.last_token(tokenization.of_rows(rows[::-1], "some"))
    assert found == tokenizer.convert_tokens_to_ids(end)
    assert Tokenization(tokenizer).last_token([]) is None
    # A plain token at the end is none.
    template = LLAMA.replace("{{- '<|eot_id|>' -}}", "")
    SPECIAL[template] = SPECIAL[LLAMA]
    tokenization = Tokenization(make_tokenizer(template))
    assert tokenization.last_token(tokenization.of_rows(rows, "some")) is None
