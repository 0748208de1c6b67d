"""Which tokens of a row are in the loss, by hand-counted examples. The tokenizer has one token for
each byte and one for each special token, so positions can be counted in the text.
"""

import json

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests import helpers
from tests.helpers import chat
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
# A turn has no end of its own, as in GLM-4's.
GLM = (
    "{%- for m in messages -%}{{- '<|' + m.role + '|>\n' + m.content -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"
)
SPECIAL = [
    ["<|im_start|>", "<|im_end|>"],
    ["<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>", "<|eot_id|>"],
]
THINKS = "<think>\n\n</think>\n\n"  # 19 tokens
CALL = {
    "type": "function",
    "function": {"name": "times", "arguments": '{"a": 2, "b": 3}'},
}


def make_tokenizer(template=None):
    """The example's tokenizer, with its own template or with another one."""
    special = next((tokens for tokens in SPECIAL if tokens[0] in (template or "")), [])
    tokenizer = helpers.make_tokenizer(*special)
    if template is not None:
        tokenizer.chat_template = template
    if special:
        tokenizer.bos_token, tokenizer.eos_token = special[-2], special[-1]
    return tokenizer


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


REPLY = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "6"}
SIX = {"role": "assistant", "content": "six"}
CALLED = '{"name": "times", "arguments": {"a": 2, "b": 3}}'
TOOL_TURN = [*chat("2*3"), REPLY, RESULT, SIX]
TURNS = chat("a", "b", "c", "d")
# Where the call of TOOL_TURN ends in the example's own template, with its <|end|>. It begins behind
# <|user|>2*3<|end|><|assistant|>: 1 + 3 + 1 + 1.
END = 6 + len(f"<tool_call>{CALLED}</tool_call>") + 1


@pytest.mark.parametrize(
    "row, template, samples",
    [
        # <s>user\n2+2?<e>\n: 1 + 5 + 4 + 1 + 1; <s>assistant\n: 1 + 10; thinking 19, 4, <e>
        ({"messages": chat("2+2?", "4")}, QWEN3, [(range(23, 44), 44)]),
        # An earlier turn is a sample of its own, as it is when it is said. Then it is b<e>\n alone:
        # 9 + 14, the second question 9, the beginning 11.
        ({"messages": TURNS}, QWEN3, [(range(20, 41), 41), (range(43, 64), 64)]),
        # <bos>; <sh>user<eh>\n\na<eot>: 10; <sh>assistant<eh>\n\n: 13; b<eot>; 10; 13; d<eot>
        ({"messages": TURNS}, LLAMA, [((24, 25, 49, 50), 51)]),
        # <|user|>\na<|assistant|>\nb<|user|>\nc<|assistant|>\nd: turns without an end
        ({"messages": TURNS}, GLM, [((5, 11), 12)]),
        # The tool's <|tool|>6<|end|> is 8 characters and 2, then <|assistant|>.
        ({"messages": TOOL_TURN}, None, [((*range(6, END), *range(END + 11, END + 15)), END + 15)]),
        ({"prompt": "2+2=", "completion": "4"}, None, [((4, 5), 6)]),  # with the end of a text
        ({"prompt": "2+2=", "completion": "4<|end|>"}, None, [((4, 5), 6)]),
        ({"prompt": TURNS[:3], "completion": TURNS[3:]}, LLAMA, [((49, 50), 51)]),
        ({"text": "abc"}, None, [((1, 2, 3), 4)]),
    ],
)
def test_loss_tokens_are_where_they_were_counted_by_hand(row, template, samples):
    _, found = tokens_of(row, template)
    assert [(at, len(ids)) for ids, at in found] == [([*at], num) for at, num in samples]


REASONED = [REPLY | {"reasoning_content": "x"}, RESULT, SIX | {"reasoning_content": "y"}]
QWEN3_CALL = f"<tool_call>\n{CALLED}\n</tool_call><|im_end|>"


@pytest.mark.parametrize(
    "row, template, texts",
    [
        (  # reasoning is kept between tool calls
            {"messages": [*chat("2*3"), *REASONED]},
            QWEN3,
            [f"<think>\nx\n</think>\n\n{QWEN3_CALL}<think>\ny\n</think>\n\nsix<|im_end|>"],
        ),
        # Without it the template drops the empty one of the call, once it is a past turn.
        ({"messages": TOOL_TURN}, QWEN3, [THINKS + QWEN3_CALL, f"{THINKS}six<|im_end|>"]),
    ],
)
def test_what_an_assistant_says_is_in_the_loss_with_its_end(row, template, texts):
    assert said(row, template) == texts


def test_tools_are_in_the_prompt_as_a_list_or_as_json():
    tool = {"type": "function", "function": {"name": "times", "parameters": {}}}
    for tools in ([tool], json.dumps([tool])):
        tokenizer, [(ids, at)] = tokens_of({"messages": chat("a", "b"), "tools": tools}, QWEN3)
        prompt = tokenizer.decode(ids[: at[0]])
        assert prompt.startswith(f"<|im_start|>system\n{json.dumps(tool)}\n")


def test_a_reply_of_weight_0_and_one_with_nothing_before_it_are_read_but_not_learned():
    one, reply, *rest = TURNS
    for messages in ([one, reply | {"weight": 0}, *rest], [reply, *rest]):
        tokenizer, [(ids, at)] = tokens_of({"messages": messages}, LLAMA)
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        assert tokenizer.decode(ids) == whole and tokenizer.decode(ids[at]) == f"d{EOS}"


BOS, EOS = SPECIAL[1][-2:]


@pytest.mark.parametrize(
    "around, row, at",
    [
        (f"{BOS} $A", {"text": f"{BOS}abc{EOS}"}, [1, 2, 3, 4]),
        (f"{BOS} $A {EOS}", {"text": "abc"}, [1, 2, 3, 4]),
        (f"{BOS} $A", {"prompt": "ab", "completion": "c"}, [3, 4]),
        (f"{BOS} $A {EOS}", {"prompt": f"{BOS}ab", "completion": f"c{EOS}"}, [3, 4]),
    ],
)
def test_texts_have_what_the_tokenizer_puts_around_them_once(around, row, at):
    tokenizer = make_tokenizer(LLAMA)
    ids = tokenizer.convert_tokens_to_ids([BOS, "a", "b", "c", EOS])
    known = [(BOS, ids[0]), (EOS, ids[-1])]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(around, special_tokens=known)
    assert tokenizer("a")["input_ids"][0] == ids[0]  # it does so
    [(found, mask)] = Tokenization(tokenizer).of_row(row)
    assert found.tolist() == ids and np.flatnonzero(mask).tolist() == at


@pytest.mark.parametrize("template", [LLAMA, None])
def test_a_long_conversation_is_tokenized_in_linear_time(template, monkeypatch):
    tokenizer, nums = make_tokenizer(template), []
    kind, call = type(tokenizer), type(tokenizer).__call__

    def counted(self, text, **options):
        nums[-1] += len(text)
        return call(self, text, **options)

    monkeypatch.setattr(kind, "__call__", counted)
    for num_messages in (20, 80):
        nums.append(0)
        row = {"messages": chat(*["a longer text"] * num_messages)}
        [(ids, _)] = Tokenization(tokenizer).of_row(row)
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
            row["messages"], tokenize=False
        )
    assert nums[1] < 4.5 * nums[0]


def test_variables_of_the_template_are_of_the_run_or_of_the_row():
    tokenizer = make_tokenizer("{{- greeting -}}" + LLAMA)
    tokenization = Tokenization(tokenizer, template={"greeting": "hi"})
    for own, greeting in (({}, "hi"), ({"chat_template_kwargs": {"greeting": "yo"}}, "yo")):
        [(ids, _)] = tokenization.of_row({"messages": chat("a", "b"), **own})
        assert tokenizer.decode(ids[:2]) == greeting


def test_a_tokenizer_that_joins_the_turn_with_its_beginning_gives_what_a_model_would_write():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate([*alphabet, "ĊĊ"])}
    raw = Tokenizer(models.BPE(vocab, merges=[("Ċ", "Ċ")]))  # two newlines are one token
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=GLM)
    [(ids, mask)] = Tokenization(tokenizer).of_row({"messages": chat("a", "\nb")})
    assert tokenizer.decode(ids) == "<|user|>\na<|assistant|>\n\nb"
    assert vocab["ĊĊ"] not in ids and tokenizer.decode(ids[mask]) == "\nb"


def of_rows(rows, template=None, **options):
    return Tokenization(make_tokenizer(template), **options).of_rows(rows, "some")


def test_rows_are_cut_counted_and_left_out(capsys):
    rows = [{"messages": chat("a", "b")}, {"messages": chat("ab", "cdefghi")},
            {"messages": chat("abcdefgh", "b")}, {"messages": chat("a")}]  # fmt: skip
    result = of_rows(rows, max_seq_len=9)
    assert [[len(ids) for ids, _ in row] for row in result] == [[6], [9]]
    of_rows([{"messages": chat("a", "b")}], GLM)
    lines = capsys.readouterr().out.splitlines()
    said = "2 rows with 15 tokens, 6 of them in the loss; 2 cut at max_seq_len; 2 left out"
    assert said in lines[0] and "; 1 with a turn that no special token ends" in lines[1]


def test_all_tokens_with_which_whole_turns_end_are_found():
    turn, text = "<|begin_of_text|>", "<|eot_id|>"
    tokenizer = make_tokenizer(LLAMA.replace(text, turn))
    tokenization = Tokenization(tokenizer)
    rows = [{"text": f"ab{text}\n"}, {"text": "ab"}, {"messages": chat("a", "b")}]
    rows = [*map(tokenization.of_row, rows)]
    assert rows[0][0][0].tolist() == rows[1][0][0].tolist()  # one end
    ends = tokenizer.convert_tokens_to_ids([turn, text])
    assert tokenization.end_tokens(rows) == sorted(ends)
    cut = Tokenization(tokenizer, max_seq_len=len(rows[2][0][0]))
    assert cut.end_tokens(rows[2:]) == []


@pytest.mark.parametrize(
    "rows, problem",
    [
        ([], "data some: it has no rows"),
        (DatasetDict(train=Dataset.from_list([{"text": "a"}])), "of a DatasetDict, one of its sp"),
        (pandas.DataFrame([{"text": "a"}]), r"DataFrame .*; of a frame, Dataset.from_pandas\(fr"),
        ([{"text": "ab"}, {"question": "?"}], "row 1: has the columns question; it needs messages"),
        ([{"text": "a"}, {"text": "\ud83d"}], r"row 1: UnicodeEncodeError: .*'\\ud83d' in pos"),
        ([{"messages": [{**chat("a")[0], "weight": 2}]}], r"\[0\]: weight must be 0 or 1, not 2"),
        ([{"messages": chat({"a": 1})}], r"\[0\]: content must be .* not {'a': 1}"),
        ([{"messages": chat("a", "b"), "tools": "[" * 9999}], "row 0: tools: no JSON"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(rows, problem):
    with pytest.raises(DatasetError, match=problem):
        of_rows(rows)


@pytest.mark.parametrize(
    "template, problem",
    [
        (
            LLAMA.replace("assistant<|end_header_id|>", "assistant<|end_header_id|>!"),
            r"messages\[1\] \(role 'assistant'\): the chat template.*that has '!.*correct the",
        ),
        ("{{- raise_exception('no roles') -}}" + LLAMA, r"messages\[1\].*up to it: no roles"),
        ("", "the tokenizer has no chat template"),
    ],
)
def test_a_template_that_cannot_be_used_is_an_error(template, problem):
    with pytest.raises(DatasetError, match=problem):
        of_rows([{"messages": chat("a", "b")}], template)


def test_files_and_splits_are_read_as_they_are_or_named(tmp_path):
    rows = [{"messages": chat("a", "b")}, {"messages": chat("c", "d"), "tools": [{"x": 1}]}]
    names = [f"{tmp_path}/{name}" for name in ("a.jsonl", "b.parquet")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:1]), names[1])
    assert read_dataset(names) == [*rows, rows[0]]
    (tmp_path / "c.jsonl").write_text('\ufeff{"text": "a"}')  # as some editors begin a file
    assert read_dataset([f"{tmp_path}/c.jsonl"]) == [{"text": "a"}]
    assert read_dataset(names[:1], "train[-1:]+train[:50%]") == rows[::-1]
    for split in ("test", "train[80%]", "train[:150%]"):
        with pytest.raises(DatasetError, match="A file has the split 'train' alone"):
            read_dataset(names[:1], split)
    for name, problem in zip(names, (r"a.jsonl', .* line 2: no JSON", "b.parquet': "), strict=True):
        (tmp_path / name).write_text('{"text": "a"}\n{')
        with pytest.raises(DatasetError, match=problem):
            read_dataset([name])
    latin = '{"text": "a"}\n\n{"text": "\xe9"}'.encode("latin-1")
    (tmp_path / "a.jsonl").write_bytes(latin)
    with pytest.raises(DatasetError, match=r"a.jsonl', .* line 3: no JSON: 'utf-8' codec"):
        read_dataset(names[:1])


def test_keys_that_only_other_rows_of_a_table_have_are_not_rendered():
    """A table gives each object of a column the keys of all rows, as None."""
    call = {"function": {"name": "times", "arguments": {"a": 2, "b": None, "c": [{"d": None}]}}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call], "name": None}
    tool = {"function": {"name": "times", "parameters": {"a": {"type": "integer", "enum": None}}}}
    row = {"messages": [*chat("2"), reply], "tools": [tool]}
    tokenizer, [(ids, _)] = tokens_of(row, QWEN3)
    text = tokenizer.decode(ids)
    assert '"arguments": {"a": 2, "c": [{}]}' in text and '"a": {"type": "integer"}}' in text
    assert "null" not in text and "None" not in text
    # What was said as JSON stays as it was said.
    call["function"]["arguments"] = '{"b": null}'
    assert '{"b": null}' in said(row, QWEN3)[0]
