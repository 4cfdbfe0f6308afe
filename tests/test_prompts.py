"""Rows to prompts: identity, forms, templates, tokens, per-row sampling, turns. A toy tokenizer of 48 words: ``wNN`` is id NN, 1 is BOS."""

import gzip
import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from specgen.config import DataConfig, SamplingConfig
from specgen.data.chat import describe_chat
from specgen.data.prompts import load_prompts, next_turn
from specgen.data.tokenizer import adds_bos, adds_eos, decode, load_tokenizer
from specgen.errors import CheckpointError, ConfigError, DataError

WORDS = ["<pad>", "<s>", "</s>", "<|eot|>", *(f"w{i:02d}" for i in range(4, 48))]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "{{ m['content'] }} {% if m['role'] == 'assistant' %}<|eot|> {% endif %}{% endfor %}{% if add_generation_prompt %}w04 {% endif %}"
)
OPEN_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ 'w20 ' if m['role'] == 'system' }}{{ m['content'] }} {% endfor %}"


def toy(template: str | None = TEMPLATE, bos: bool = True, eos: bool = False) -> PreTrainedTokenizerFast:
    """A word tokenizer whose ids are known by heart."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    words.add_special_tokens([AddedToken(word, special=True) for word in WORDS[:4]])
    single = ("<s> " if bos else "") + "$A" + (" </s>" if eos else "")
    words.post_processor = TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=[("<s>", 1), ("</s>", 2)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template, **names)


TOY = toy()


@pytest.fixture
def load(tmp_path):
    """load(rows or raw text, tokenizer=..., **data keys) -> list of prompts, through a JSON Lines file."""

    def run(rows, tokenizer=TOY, max_length=256, sampling=None, **keys):
        path = tmp_path / "in.jsonl"
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(text.encode())
        data = DataConfig(source="jsonl", path=str(path), **keys)
        return list(load_prompts(data, sampling or SamplingConfig(), tokenizer, max_length=max_length, vocab_size=48))

    return run


def says(prompt):
    """The row's error after file and line."""
    assert prompt.error is not None and prompt.error["type"] == "DataError" and prompt.token_ids == [] and prompt.turns == []
    return prompt.error["message"].split("in.jsonl ", 1)[1]


# ---- identity


def test_ids_keep_their_type_and_rows_without_one_get_their_index(load):
    prompts = load([{"id": 7, "prompt": "w10"}, {"id": "7", "prompt": "w10"}, {"prompt": "w10"}, {"id": None, "prompt": "w10"}])
    assert [(p.index, p.id, p.key) for p in prompts] == [(0, 7, 7), (1, "7", "7"), (2, 2, 2), (3, 3, 3)]


def test_a_repeated_id_is_a_row_error_naming_the_first_index(load):
    prompts = load([{"id": 1, "prompt": "w10"}, {"id": 2, "prompt": "w10"}, {"id": 1, "prompt": "w30"}, {"id": 1, "prompt": "w40"}])
    assert [p.token_ids for p in prompts] == [[1, 10], [1, 10], [], []]
    assert says(prompts[2]) == "line 3: id 1 repeats the id of row index 0; make ids unique or set data.on_duplicate_id=keep"
    assert [p.index for p in prompts] == [0, 1, 2, 3]


def test_kept_duplicates_have_the_same_id_and_keys_of_their_own(load):
    prompts = load([{"id": "a", "prompt": w} for w in ("w10", "w30", "w40")], on_duplicate_id="keep")
    assert [(p.id, p.key, p.text) for p in prompts] == [("a", "a", "w10"), ("a", ["a", 1], "w30"), ("a", ["a", 2], "w40")]


def test_equal_prompts_are_not_duplicates(load):
    assert [p.id for p in load([{"id": i, "prompt": "w30"} for i in range(6)])] == list(range(6))


def test_an_index_that_is_another_rows_id_is_a_repeat(load):
    prompts = load([{"id": 1, "prompt": "w10"}, {"prompt": "w30"}])
    assert says(prompts[1]).startswith("line 2: the row has no id, and its index 1 is the id of row index 0;")


@pytest.mark.parametrize(("value", "kind"), [(1.5, "a number"), (True, "true/false"), ([1], "a list"), ({"a": 1}, "an object")])
def test_an_id_is_text_or_an_integer(load, value, kind):
    assert says(load([{"id": value, "prompt": "w10"}])[0]) == f"line 1: field 'id': an id is a string or an integer, got {kind}"


def test_only_a_field_named_id_is_found_by_itself(load):
    rows = [{"uid": "a", "id": 5, "prompt": "w10"}, {"id": 6, "prompt": "w10"}]
    assert [(p.id, p.meta) for p in load(rows)] == [(5, {"uid": "a"}), (6, {})]
    named = load(rows, id_field="uid")
    assert (named[0].id, named[0].meta) == ("a", {"id": 5})
    assert says(named[1]) == "line 2: no id: field 'uid' (data.id_field) is missing"


def test_limit_then_shard_keeping_global_indices(load):
    rows = [{"id": f"r{i}", "prompt": "w10"} for i in range(10)]
    assert [p.index for p in load(rows, limit=7, shard="1/3")] == [1, 4]
    union = [p.id for part in range(3) for p in load(rows, shard=f"{part}/3")]
    assert sorted(union) == [f"r{i}" for i in range(10)]


def test_a_repeat_is_found_across_shards(load):
    rows = [{"id": "x", "prompt": "w10"}, {"id": "x", "prompt": "w30"}]
    assert [p.error for p in load(rows, shard="0/2")] == [None]
    assert "repeats the id of row index 0" in says(load(rows, shard="1/2")[0])


# ---- forms


def test_each_form_is_found_row_by_row(load, caplog):
    with caplog.at_level(logging.INFO, "specgen.data"):
        prompts = load(
            [
                {"prompt": "w10"},
                {"messages": [{"role": "user", "content": "w10"}]},
                {"turns": ["w10", "w30"]},
                {"token_ids": [5, 6]},
                {"prompt": None, "turns": ["w10"]},
            ]
        )
    assert [p.token_ids for p in prompts] == [[1, 10], [1, 10, 4], [1, 10, 4], [5, 6], [1, 10, 4]]
    assert [p.text for p in prompts] == ["w10", "<s>w10 w04 ", "<s>w10 w04 ", "w05 w06", "<s>w10 w04 "]
    assert [p.turns for p in prompts] == [[], [], ["w30"], [], []]
    said = [record.message for record in caplog.records]
    assert "prompts: field 'prompt' as prompt" in said and "prompts: field 'turns' as turns, through the chat template" in said
    assert sum(message.startswith("prompts: field 'turns'") for message in said) == 1


def test_the_first_form_wins_and_the_log_says_so(load, caplog):
    with caplog.at_level(logging.INFO, "specgen.data"):
        prompt = load([{"prompt": "w10", "messages": [{"role": "user", "content": "w30"}]}])[0]
    assert (prompt.token_ids, prompt.meta) == ([1, 10], {"messages": [{"role": "user", "content": "w30"}]})
    assert "rows carry both 'prompt' and 'messages': 'prompt' is used; data.prompt_field=messages takes the other" in caplog.text
    assert load([{"prompt": "w10", "messages": [{"role": "user", "content": "w30"}]}], prompt_field="messages")[0].token_ids == [1, 30, 4]


@pytest.mark.parametrize(
    ("value", "ids"), [("w10", [1, 10]), ([{"role": "user", "content": "w10"}], [1, 10, 4]), (["w10", "w30"], [1, 10, 4]), ([5, 6], [5, 6])]
)
def test_a_prompt_field_of_any_name_has_the_form_of_its_value(load, value, ids):
    assert load([{"q": value, "prompt": "w47"}], prompt_field="q")[0].token_ids == ids


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"ref": "w31"}, "field 'prompt' is missing (and no messages, turns or token_ids); the row has 'ref'"),
        ({"Prompt": "w10"}, "field 'prompt' is missing (and no messages, turns or token_ids); the row has 'Prompt'"),
        ({}, "field 'prompt' is missing (and no messages, turns or token_ids); the row has no fields"),
        ({"prompt": None}, "field 'prompt' is null"),
        ({"prompt": 7}, "field 'prompt': a prompt is text, got an integer"),
        ({"prompt": ["w10"]}, "field 'prompt': a prompt is text, got a list"),
        ({"prompt": "a\ud800b"}, "field 'prompt': the text holds a lone surrogate, which is not text"),
        ({"messages": []}, "field 'messages': messages are a non-empty list, got an empty list"),
        ({"messages": "w10"}, "field 'messages': messages are a non-empty list, got text"),
        ({"messages": [{"content": "w10"}]}, "field 'messages': message 1: 'role' must be text, got nothing"),
        ({"messages": [{"role": "user"}]}, "field 'messages': message 1: 'content' is missing"),
        ({"messages": [{"role": "user", "content": None}]}, "field 'messages': message 1: 'content' is null"),
        ({"messages": [{"role": "user", "content": 5}]}, "field 'messages': message 1: 'content' must be text, got an integer"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "field 'messages': message 1: 'content' holds a part of type 'image'; only text parts can be sent",
        ),
        ({"turns": []}, "field 'turns': turns are a non-empty list of texts, got an empty list"),
        ({"turns": ["w10", None]}, "field 'turns': turn 2 must be text, got null"),
        ({"token_ids": []}, "field 'token_ids': the prompt is empty (no token id)"),
        ({"token_ids": [1, 2.0]}, "field 'token_ids': item 2 must be an integer, got a number"),
        ({"token_ids": [1, 48]}, "token id 48 is outside the model's vocabulary of 48"),
        ({"token_ids": [1, -1]}, "token id -1 is outside the model's vocabulary of 48"),
    ],
)
def test_a_row_that_cannot_be_sent_says_which_field_and_line(load, row, message):
    good = {"prompt": "w10"}
    prompts = load([good, row, good])
    assert says(prompts[1]) == f"line 2: {message}"
    assert [p.token_ids for p in prompts] == [[1, 10], [], [1, 10]]


def test_a_missing_named_field_hints_at_its_near_name(load):
    assert says(load([{"Question ": "w10"}], prompt_field="question")[0]) == (
        "line 1: field 'question' (data.prompt_field) is missing; the row has 'Question '"
    )


def test_a_malformed_line_keeps_its_place_among_good_rows(load):
    prompts = load('\n{"id": 11, "prompt": "w10"}\n\n{"id": 12, "prompt": \n{"id": 13, "prompt": "w30"}\n')
    assert [(p.index, p.id, p.token_ids) for p in prompts] == [(0, 11, [1, 10]), (1, 1, []), (2, 13, [1, 30])]
    assert says(prompts[1]) == "line 4: not valid JSON: Expecting value (column 21)"


def test_a_faulty_row_keeps_its_other_fields(load):
    prompt = load([{"id": "a", "ref": "w31", "category": "easy"}])[0]
    assert (prompt.id, prompt.meta, prompt.category) == ("a", {"ref": "w31", "category": "easy"}, "easy")


def test_an_empty_prompt_is_bos_or_a_row_error(load):
    rows = [{"id": 1, "prompt": "w10"}, {"id": 2, "prompt": ""}, {"id": 3, "prompt": "   "}, {"id": 4, "prompt": "w30"}]
    assert [p.token_ids for p in load(rows)] == [[1, 10], [1], [1], [1, 30]]
    without = load(rows, tokenizer=toy(bos=False))
    assert [p.token_ids for p in without] == [[10], [], [], [30]]
    assert says(without[1]) == "line 2: field 'prompt': the prompt is empty and the tokenizer adds no BOS token"


def test_a_prompt_that_leaves_no_room_states_both_numbers(load):
    prompts = load([{"prompt": "w10 w11"}, {"prompt": "w10"}], max_length=3)
    assert says(prompts[0]) == "line 1: the prompt has 3 tokens and the context limit is 3: no room for an answer"
    assert (prompts[0].text, prompts[1].token_ids) == ("w10 w11", [1, 10])


def test_token_id_rows_need_no_tokenizer_and_text_rows_do(load):
    assert [(p.token_ids, p.text) for p in load([{"token_ids": [5, 6]}], tokenizer=None)] == [([5, 6], "")]
    with pytest.raises(ConfigError, match=r"in\.jsonl line 1: field 'prompt' is text, but the model has no tokenizer"):
        load([{"prompt": "w10"}], tokenizer=None)
    assert "the model has no tokenizer" in says(load([{"token_ids": [5]}, {"prompt": "w10"}], tokenizer=None)[1])


# ---- meta


def test_meta_is_the_other_fields_as_strict_json(load, caplog):
    with caplog.at_level(logging.WARNING, "specgen.data"):
        prompts = load(
            '{"id": 1, "prompt": "w10", "score": NaN, "deep": {"a": [1, -Infinity, 1e999]}, "max_tokens": 5}\n'
            '{"id": 2, "prompt": "w10", "text": "x\\ud800y", "kept": null}\n'
        )
    assert [p.meta for p in prompts] == [{"score": None, "deep": {"a": [1, None, None]}}, {"text": "x\ufffdy", "kept": None}]
    json.dumps([p.meta for p in prompts], allow_nan=False, ensure_ascii=False).encode("utf-8")
    assert "3 values of NaN or infinity in the input's other fields are written as null" in caplog.text
    assert "1 texts with lone surrogates in the input's other fields are written with U+FFFD" in caplog.text


def test_category_is_also_a_field_of_its_own(load):
    prompts = load([{"prompt": "w10", "category": "code"}, {"prompt": "w10", "category": 3}, {"prompt": "w10"}])
    assert [(p.category, p.meta) for p in prompts] == [("code", {"category": "code"}), (None, {"category": 3}), (None, {})]


def test_columns_become_json(tmp_path):
    import datetime
    import decimal

    path = tmp_path / "a.parquet"
    columns = {
        "prompt": ["w10"],
        "day": [datetime.date(2024, 5, 1)],
        "price": [decimal.Decimal("1.10")],
        "raw": [b"\x00\xff"],
        "score": [float("nan")],
    }
    pq.write_table(pa.table(columns), path)
    prompt = next(load_prompts(DataConfig(source="parquet", path=str(path)), SamplingConfig(), TOY, max_length=None, vocab_size=48))
    assert prompt.meta == {"day": "2024-05-01", "price": "1.10", "raw": "AP8=", "score": None}


# ---- chat


def test_messages_reach_the_template_with_their_own_keys_only(load, tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"q": 1}}}
    rows = [
        {"id": 1, "messages": [{"role": "user", "content": "w10"}]},
        {
            "id": 2,
            "messages": [
                {"role": "user", "content": "w10", "name": "ann"},
                {"role": "assistant", "content": "w11", "tool_calls": [call]},
                {"role": "tool", "content": "w12", "tool_call_id": "c1"},
            ],
        },
        {"id": 3, "messages": [{"role": "user", "content": "w30"}]},
    ]
    counting = toy("{% for m in messages %}{{ m['content'] }} {% endfor %}w0{{ messages[0].keys() | list | length }} ")
    assert [p.messages for p in load(rows)] == [row["messages"] for row in rows]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)  # the columns give every message every key
    found = list(load_prompts(DataConfig(source="parquet", path=str(path)), SamplingConfig(), counting, max_length=None, vocab_size=48))
    assert [p.messages for p in found] == [row["messages"] for row in rows]
    assert [p.text for p in found] == ["w10 w02 ", "w10 w11 w12 w03 ", "w30 w02 "]


def test_never_two_bos_tokens(load):
    rows = [{"messages": [{"role": "user", "content": "w10"}]}, {"prompt": "w10"}, {"prompt": "<s> w10"}, {"prompt": "<s>"}]
    assert [p.token_ids for p in load(rows, tokenizer=toy(OPEN_TEMPLATE))] == [[1, 10], [1, 10], [1, 10], [1]]


def test_a_template_error_is_a_row_error_that_quotes_it(load):
    rows = [
        {"messages": [{"role": "user", "content": "w10"}]},
        {"messages": [{"role": "system", "content": "w20"}, {"role": "user", "content": "w10"}]},
        {"messages": [{"role": "user", "content": "w30"}]},
    ]
    prompts = load(rows)
    assert [p.token_ids for p in prompts] == [[1, 10, 4], [], [1, 30, 4]]
    assert says(prompts[1]) == "line 2: the chat template refused the row: no system role here"


def test_a_last_assistant_message_is_continued(load):
    row = {"messages": [{"role": "user", "content": "w10"}, {"role": "assistant", "content": "w11 w12"}]}
    prompt = load([row])[0]
    assert (prompt.text, prompt.token_ids) == ("<s>w10 w11 w12", [1, 10, 11, 12])
    closed = {"messages": [*row["messages"], {"role": "user", "content": "w13"}]}
    assert load([closed])[0].token_ids == [1, 10, 11, 12, 3, 13, 4]


def test_as_chat_makes_a_prompt_one_user_turn(load):
    prompt = load([{"prompt": "w10"}], as_chat=True)[0]
    assert (prompt.token_ids, prompt.messages) == ([1, 10, 4], [{"role": "user", "content": "w10"}])


def test_the_system_prompt_goes_in_front_of_chat_rows(load):
    tokenizer = toy(OPEN_TEMPLATE)
    rows = [
        {"turns": ["w10", "w11"]},
        {"prompt": "w10"},
        {"messages": [{"role": "system", "content": "w33"}, {"role": "user", "content": "w10"}]},
    ]
    prompts = load(rows, tokenizer=tokenizer, system_prompt="w31")
    assert prompts[0].token_ids == [1, 20, 31, 10]
    assert says(prompts[1]) == "line 2: data.system_prompt cannot be added to a raw prompt row; set data.as_chat=true or drop it"
    assert says(prompts[2]) == "line 3: the row has a system message of its own and data.system_prompt is set; drop one of the two"
    assert load(rows[1:2], tokenizer=tokenizer, system_prompt="w31", as_chat=True)[0].token_ids == [1, 20, 31, 10]


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"prompt": "w10"}, {"system_prompt": "w31"}, "data.system_prompt cannot be added to a raw prompt row; set data.as_chat=true or drop it"),
        ({"prompt": "w10"}, {"chat_template_kwargs": {"a": 1}}, "data.chat_template_kwargs has no effect on a raw prompt row; set data.as_chat=true"),
        ({"turns": ["w10"]}, {"chat_template": "none"}, "a chat row, but data.chat_template=none; use data.chat_template=auto or a file"),
    ],
)
def test_chat_settings_that_cannot_be_honoured_stop_the_job_on_its_first_row(load, row, keys, message):
    with pytest.raises(ConfigError) as caught:
        load([row], **keys)
    assert f"in.jsonl line 1: {message}" in str(caught.value)


def test_a_tokenizer_without_a_template_stops_chat_jobs_but_not_mixed_ones(load):
    with pytest.raises(ConfigError, match=r"the tokenizer has no chat template; give one with data\.chat_template=FILE"):
        load([{"turns": ["w10"]}], tokenizer=toy(None))
    mixed = load([{"prompt": "w10"}, {"turns": ["w10"]}], tokenizer=toy(None))
    assert mixed[0].error is None and "the tokenizer has no chat template" in says(mixed[1])


def test_a_template_file_and_its_arguments(load, tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}{{ m['content'] }} {{ word }} {% endfor %}{% for t in tools or [] %}{{ t['name'] }} {% endfor %}")
    row = {"messages": [{"role": "user", "content": "w10"}], "tools": [{"name": "w40"}]}
    prompt = load([row], chat_template=str(file), chat_template_kwargs={"word": "w33"})[0]
    assert (prompt.text, prompt.token_ids, prompt.meta) == ("w10 w33 w40 ", [10, 33, 40], {})
    with pytest.raises(ConfigError, match="auto, none, or a readable template file"):
        load([row], chat_template=str(tmp_path / "no.jinja"))
    with pytest.raises(ConfigError, match=r"data\.chat_template_kwargs\.tokenize: is set by specgen itself"):
        load([row], chat_template_kwargs={"tokenize": True})
    file.write_text("{% for %}")
    with pytest.raises(ConfigError, match=r"the chat template is not valid: .* \(its line 1\)"):
        load([row], chat_template=str(file))


def test_text_parts_are_joined(load):
    parts = [{"type": "text", "text": "w10"}, {"type": "text", "text": "w11"}]
    assert load([{"messages": [{"role": "user", "content": parts}]}])[0].text == "<s>w10\nw11 w04 "


def test_the_template_choice_is_described(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("x")
    assert describe_chat(DataConfig(), TOY)["template"] == "tokenizer"
    assert describe_chat(DataConfig(), toy(None)) == {
        "template": "none",
        "file": None,
        "sha256": None,
        "as_chat": False,
        "system_prompt": None,
        "kwargs": {},
    }
    named = describe_chat(DataConfig(chat_template=str(file), as_chat=True), TOY)
    assert (named["template"], named["file"], named["as_chat"]) == ("file", str(file), True)
    assert named["sha256"] == "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"


# ---- turns


def test_turns_are_asked_one_after_another_with_the_answers_so_far(load):
    data = DataConfig()
    first = load([{"id": "t", "turns": ["w10", "w30", "w40"], "category": "math"}])[0]
    assert (first.token_ids, first.turns) == ([1, 10, 4], ["w30", "w40"])
    second = next_turn(first, "w11", TOY, data)
    assert (second.token_ids, second.turns, second.id, second.key, second.category) == ([1, 10, 11, 3, 30, 4], ["w40"], "t", "t", "math")
    third = next_turn(second, "w12", TOY, data)
    assert (third.token_ids, third.turns) == ([1, 10, 11, 3, 30, 12, 3, 40, 4], [])
    assert next_turn(third, "w13", TOY, data) is None
    assert (first.token_ids, first.turns) == ([1, 10, 4], ["w30", "w40"])  # the earlier prompts are not touched


def test_a_turn_that_cannot_run_is_an_error_of_that_turn(load):
    first = load([{"turns": ["w10", "w30"]}])[0]
    second = next_turn(first, "w11 w12", TOY, DataConfig(), max_length=5)
    assert second.error == {
        "type": "DataError",
        "message": "row index 0, turn 2: the prompt has 7 tokens and the context limit is 5: no room for an answer",
    }
    assert second.token_ids == []


# ---- per-row sampling


def test_rows_override_the_job_and_bad_values_are_row_errors(load, caplog):
    rows = [{"id": i, "prompt": "w30", **extra} for i, extra in enumerate([{"max_tokens": 0}, {"max_tokens": 1}, {}, {"max_tokens": -1}])]
    with caplog.at_level(logging.INFO, "specgen.data"):
        prompts = load(rows)
    assert [p.sampling.max_tokens for p in prompts] == [0, 1, 256, 256]
    assert says(prompts[3]) == "line 4: max_tokens must be between 0 and 2147483647, got -1"
    assert caplog.text.count("sampling: rows override max_tokens") == 1


def test_every_row_key(load):
    row = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "logit_bias": {"7": -2, "3": 1.5},
        "stop": "w31",
        "stop_token_ids": [3],
        "ignore_eos": True,
        "seed": -5,
        "n": 4,
    }
    prompt = load([{"prompt": "w10", **row}])[0]
    for name, value in row.items():
        expected = {"logit_bias": ((3, 1.5), (7, -2.0)), "stop": ("w31",), "stop_token_ids": (3,)}.get(name, value)
        assert getattr(prompt.sampling, name) == expected, name
    assert prompt.meta == {}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"max_tokens": "5"}, "max_tokens must be an integer, got '5'"),
        ({"max_tokens": 5.0}, "max_tokens must be an integer, got 5.0"),
        ({"max_tokens": True}, "max_tokens must be an integer, got True"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": -1}, "temperature must be 0 (greedy) or at least 1e-05, got -1.0"),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0.0"),
        ({"min_p": 1.5}, "min_p must be in [0, 1], got 1.5"),
        ({"top_k": -1}, "top_k must be 0 (off) or from 1 to 2147483647, got -1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0, got 0.0"),
        ({"temperature": 1e300}, "temperature must be at most 1e+30, got 1e+300"),
        ({"max_tokens": 10**400}, "max_tokens must be between 0 and 2147483647, got 1" + "0" * 56 + "..."),
        ({"temperature": 10**400}, "temperature must be finite, got 1" + "0" * 56 + "..."),
        ({"stop": ["a", ""]}, "stop holds an empty string, which would stop every row at once"),
        ({"stop": 5}, "stop must be a string or a list of strings, got 5"),
        ({"stop_token_ids": [99]}, "stop_token_ids holds 99, outside the vocabulary of 48; its ids are 0 to 47"),
        ({"logit_bias": {"99": 1}}, "logit_bias holds token 99, outside the vocabulary of 48; its ids are 0 to 47"),
        ({"logit_bias": {"w10": 1}}, "logit_bias must map token ids to finite numbers, got {'w10': 1}"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
        ({"n": 0}, "n must be between 1 and 2147483647, got 0"),
        ({"min_tokens": 10, "max_tokens": 5}, "min_tokens is 10, above max_tokens 5"),
    ],
)
def test_a_wrong_sampling_value_is_a_row_error(load, extra, message):
    assert says(load([{"prompt": "w10", **extra}])[0]) == f"line 1: {message}"


def test_nan_as_a_sampling_value_is_a_row_error(load):
    assert says(load('{"prompt": "w10", "temperature": NaN}\n')[0]) == "line 1: temperature must be finite, got nan"


def test_row_sampling_off_or_in_a_field_of_its_own(load):
    row = {"prompt": "w10", "max_tokens": 5, "sampling": {"max_tokens": 6, "seed": None}}
    off = load([row], row_sampling=False)[0]
    assert (off.sampling.max_tokens, off.meta) == (256, {"max_tokens": 5, "sampling": {"max_tokens": 6, "seed": None}})
    nested = load([row], row_sampling_field="sampling")[0]
    assert (nested.sampling.max_tokens, nested.meta) == (6, {"max_tokens": 5})
    assert says(load([{"prompt": "w10", "sampling": {"maxtokens": 6}}], row_sampling_field="sampling")[0]).startswith(
        "line 1: field 'sampling': 'maxtokens' is not one of max_tokens,"
    )
    assert says(load([{"prompt": "w10", "sampling": {"grammar": "x"}}], row_sampling_field="sampling")[0]) == (
        "line 1: field 'sampling': 'grammar' is set per job, not per row"
    )
    with pytest.raises(ConfigError, match="drop one of the two"):
        load([row], row_sampling=False, row_sampling_field="sampling")


def test_columns_and_cells_carry_overrides_in_their_own_types(tmp_path):
    path = tmp_path / "a.parquet"
    columns = {"prompt": ["w10", "w10"], "max_tokens": [5.0, float("nan")], "stop": [["w31"], None], "temperature": [0.5, None]}
    pq.write_table(pa.table(columns), path)
    found = list(load_prompts(DataConfig(source="parquet", path=str(path)), SamplingConfig(), TOY, max_length=None, vocab_size=48))
    assert [(p.sampling.max_tokens, p.sampling.stop, p.sampling.temperature) for p in found] == [(5, ("w31",), 0.5), (256, (), 0.0)]
    cells = tmp_path / "a.csv"
    cells.write_text('prompt,max_tokens,stop,ignore_eos,turns\nw10,5,w31,true,\n,,"[""a"",""b""]",,"[""w30""]"\nw10,five,,,\n')
    found = list(load_prompts(DataConfig(source="csv", path=str(cells)), SamplingConfig(), TOY, max_length=None, vocab_size=48))
    assert [(p.sampling.max_tokens, p.sampling.stop, p.sampling.ignore_eos) for p in found[:2]] == [(5, ("w31",), True), (256, ("a", "b"), False)]
    assert [p.token_ids for p in found] == [[1, 10], [1, 30, 4], []]
    assert found[2].error["message"] == f"{cells} line 4: max_tokens must be an integer, got 'five'"


def test_the_job_is_checked_like_a_row(load):
    with pytest.raises(ConfigError, match=r"^sampling\.top_p must be in \(0, 1\], got 2\.0$"):
        load([{"prompt": "w10"}], sampling=SamplingConfig(top_p=2.0))
    with pytest.raises(ConfigError, match=r"^sampling\.banned_token_ids holds 48, outside the vocabulary of 48; its ids are 0 to 47$"):
        load([{"prompt": "w10"}], sampling=SamplingConfig(banned_token_ids=[48]))


# ---- the whole input


def test_keys_are_checked_before_anything_is_read():
    for keys, message in (
        ({"shard": "4/4"}, "write i/N"),
        ({"limit": 0}, r"data\.limit=0"),
        ({"on_error": "skip"}, "record or stop"),
        ({"on_duplicate_id": "drop"}, "error or keep"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_prompts(DataConfig(**keys), SamplingConfig(), TOY, max_length=None, vocab_size=48)


def test_a_truncated_archive_ends_the_stream_with_an_error_and_not_with_fewer_rows(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "w10"}\n' * 4)[:-9])
    with pytest.raises(DataError, match="the gzip archive is truncated"):
        list(load_prompts(DataConfig(source="jsonl", path=str(path)), SamplingConfig(), TOY, max_length=None, vocab_size=48))


def test_null_and_plain_cells_of_parquet_prompts(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, 2, 3], "prompt": ["w10", None, "w30"]}), path)
    found = list(load_prompts(DataConfig(source="parquet", path=str(path)), SamplingConfig(), TOY, max_length=None, vocab_size=48))
    assert [p.token_ids for p in found] == [[1, 10], [], [1, 30]]
    assert found[1].error["message"] == f"{path} row 2: field 'prompt' is null"


def test_random_rows_become_prompts():
    data = DataConfig(source="random", rows=3, prompt_tokens=7, shard="1/2")
    found = list(load_prompts(data, SamplingConfig(), TOY, max_length=None, vocab_size=48))
    assert [(p.index, len(p.token_ids)) for p in found] == [(1, 7)]
    assert found[0].text == TOY.decode(found[0].token_ids)


def test_a_tokenizer_that_closes_every_prompt_is_warned_of(load, caplog):
    with caplog.at_level(logging.WARNING, "specgen.data"):
        assert load([{"prompt": "w10"}], tokenizer=toy(eos=True))[0].token_ids == [1, 10, 2]
    assert "the tokenizer ends every prompt with its EOS token" in caplog.text


# ---- tokenizers


def test_a_saved_tokenizer_loads_and_an_absent_one_says_so(tmp_path):
    TOY.save_pretrained(tmp_path / "with")
    loaded = load_tokenizer(str(tmp_path / "with"))
    assert (len(loaded), adds_bos(loaded), adds_eos(loaded)) == (48, True, False)
    assert decode(loaded, [1, 10, 11, 2]) == "w10 w11"
    assert decode(loaded, [1, 10, 2], skip_special_tokens=False) == "<s> w10 </s>"
    (tmp_path / "without").mkdir()
    with pytest.raises(CheckpointError, match="no tokenizer files"):
        load_tokenizer(str(tmp_path / "without"))
    (tmp_path / "without" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"the tokenizer, or config\.json, which is read with it, cannot be loaded"):
        load_tokenizer(str(tmp_path / "without"))
