from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_generator import sampled
from tiny_model import EOS, MAX_MODEL_LEN, ids_of, write_model
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from coordinator.chat_template import ChatTemplate, ChatTemplateError
from coordinator.choice_stream import ChoiceStream, Delta
from coordinator.detokenizer import Detokenizer
from coordinator.text_model import TextModel
from coordinator.token_bytes import UnsupportedTokenizer
from coordinator.tokenizer import Tokenizer
from wire.sequence import FinishReason, SampledToken


def pieces(text: TextModel, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(text.tokenizer.token_bytes, text.tokenizer.special_ids)
    return [detokenizer.push(token_id) for token_id in ids]


def stream(
    text: TextModel, *stops: str, include: bool = False, logprobs: bool = False, end_logprob: bool = False
) -> ChoiceStream:
    detokenizer = Detokenizer(text.tokenizer.token_bytes, text.tokenizer.special_ids)
    return ChoiceStream(detokenizer, stops, include, logprobs, end_logprob)


@pytest.mark.parametrize("char", ["😀", "🫠", "龜", "𝄞", "é", "👩‍💻", "🇺🇸"])
def test_A1_split_characters_come_whole(text: TextModel, char: str) -> None:
    ids = ids_of(text, f"ab{char}c")
    assert len(ids) >= len(f"ab{char}c".encode()) - 1, "the character is split over tokens"
    got = pieces(text, ids)
    assert "".join(got) == f"ab{char}c"
    assert not any("\ufffd" in piece for piece in got)
    assert "".join(got[: len(ids_of(text, "ab"))]) == "ab", "what stands in front is not delayed"


@given(data=st.data())
def test_A1_any_ids_decode_as_all_at_once(text: TextModel, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, text.vocab_size - 1), max_size=30))
    got = "".join(pieces(text, ids))
    whole = text.tokenizer.decode(ids, skip_special_tokens=True)
    # An incomplete character at the very end is the only difference.
    assert whole.startswith(got)
    assert set(whole[len(got) :]) <= {"\ufffd"}


def sentence_piece() -> Backend:
    vocab = {"<unk>": 0, "<s>": 1, "▁": 2, "▁leading": 3, "▁x": 4, "y": 5}
    vocab |= {f"<0x{byte:02X}>": 6 + byte for byte in range(256)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def test_A3_sentencepiece_keeps_every_space() -> None:
    tokenizer = Tokenizer(sentence_piece(), {"bos_token": "<s>"})
    detokenizer = Detokenizer(tokenizer.token_bytes, tokenizer.special_ids)
    face = [6 + byte for byte in "😀".encode()]
    got = [detokenizer.push(token_id) for token_id in [2, 3, 4, 5, 1, *face, 4]]
    assert got == [" ", " leading", " x", "y", "", "", "", "", "😀", " x"]
    assert tokenizer.token_text(face[0]) == ("bytes:\\xf0", b"\xf0")


def test_A3_first_generated_token_keeps_its_space(text: TextModel) -> None:
    prompt, output = ids_of(text, "the"), ids_of(text, " quick brown")
    both = text.tokenizer.decode(prompt + output, skip_special_tokens=True)
    assert "".join(pieces(text, output)) == both.removeprefix("the") == " quick brown"


def test_unknown_decoders_are_refused_by_name() -> None:
    backend = Backend(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedTokenizer, match="WordPiece"):
        Tokenizer(backend, {})


# -- one choice ---------------------------------------------------------------------------------------------------------


def feed(
    choice: ChoiceStream, ids: list[int], finish: FinishReason | None, size: int, logprobs: int | None = None
) -> list[Delta]:
    deltas = []
    for start in range(0, len(ids), size):
        last = start + size >= len(ids)
        delta = choice.push(
            tuple(sampled(token_id, logprobs) for token_id in ids[start : start + size]), finish if last else None
        )
        deltas.append(delta)
        if delta.finish is not None:
            break
    return deltas


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize("stop", [" a a a", "a a"])
def test_B1_B3_stop_over_tokens_cuts_text_logprobs_and_count(text: TextModel, size: int, stop: str) -> None:
    ids = ids_of(text, "x") + ids_of(text, " a") * 20
    choice = stream(text, stop, logprobs=True)
    deltas = feed(choice, ids, FinishReason.LENGTH, size, logprobs=1)
    assert "".join(delta.text for delta in deltas) == ("x" if stop.startswith(" ") else "x ")
    assert deltas[-1].finish == "stop"
    matching = 4 if stop.startswith(" ") else 3
    assert choice.num_tokens == matching, "tokens up to the one that completed the stop"
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.sampled.token_id for entry in entries] == ids[: 1 if stop.startswith(" ") else 2]


@pytest.mark.parametrize("size", [1, 3, 50])
def test_B3_include_stop_shows_it_and_nothing_behind(text: TextModel, size: int) -> None:
    choice = stream(text, " a a", include=True)
    deltas = feed(choice, ids_of(text, "x") + ids_of(text, " a") * 9, FinishReason.LENGTH, size)
    assert "".join(delta.text for delta in deltas) == "x a a"
    assert choice.num_tokens == 3


def test_B5_first_delta_carries_the_first_token(text: TextModel) -> None:
    choice = stream(text, "ZZZZZZZZZZZZZZZZZZZZ")
    assert choice.push((SampledToken(ids_of(text, "the")[0]),), None).text == text.tokenizer.decode(
        ids_of(text, "the")[:1], skip_special_tokens=True
    )


def test_held_text_comes_out_when_the_limit_ends_it(text: TextModel) -> None:
    choice = stream(text, "dogma")
    deltas = feed(choice, ids_of(text, "lazy dog"), FinishReason.LENGTH, 1)
    assert "".join(delta.text for delta in deltas) == "lazy dog"
    assert deltas[-1].finish == "length"


def test_F11_end_token_counts_but_is_not_shown(text: TextModel) -> None:
    choice = stream(text, logprobs=True)
    deltas = feed(choice, [*ids_of(text, "dog"), EOS], FinishReason.STOP, 1, logprobs=0)
    assert "".join(delta.text for delta in deltas) == "dog"
    assert deltas[-1] == Delta("", (), "stop")
    assert choice.num_tokens == len(ids_of(text, "dog")) + 1
    # Where it was asked for, its logprob comes last.
    choice = stream(text, logprobs=True, end_logprob=True)
    deltas = feed(choice, [*ids_of(text, "dog"), EOS], FinishReason.STOP, 1, logprobs=0)
    [ended] = deltas[-1].logprobs
    assert (ended.sampled.token_id, ended.text_offset, deltas[-1].text) == (EOS, 3, "")


@pytest.mark.parametrize("size", [1, 2, 7])
def test_E3_E7_offsets_and_bytes_of_split_characters(text: TextModel, size: int) -> None:
    ids = ids_of(text, "a😀b")
    deltas = feed(stream(text, logprobs=True), ids, FinishReason.LENGTH, size, logprobs=2)
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.sampled.token_id for entry in entries] == ids
    assert [entry.text_offset for entry in entries] == [0, 1, 1, 1, 1, 2]
    raw = b"".join(text.tokenizer.token_text(entry.sampled.token_id)[1] or b"" for entry in entries)
    assert raw.decode("utf-8") == "a😀b"
    assert text.tokenizer.token_text(ids[1])[0] == "bytes:\\xf0"


# -- model directories and templates ------------------------------------------------------------------------------------


def test_F11_all_end_tokens_of_the_configs_are_known(tmp_path: Path) -> None:
    assert TextModel.load(write_model(tmp_path / "a", eos_ids=[0, 2])).eos_token_ids == (0, 2)
    model = TextModel.load(write_model(tmp_path / "b"), max_model_len=64)
    assert (model.name, model.eos_token_ids, model.max_model_len) == ("b", (EOS,), 64)
    with pytest.raises(ValueError, match="max_model_len"):
        TextModel.load(tmp_path / "b", max_model_len=MAX_MODEL_LEN + 1)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        TextModel.load(tmp_path)
    (write_model(tmp_path / "m") / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        TextModel.load(tmp_path / "m")


def test_G1_beginning_token_follows_the_config(tmp_path: Path) -> None:
    with_bos = TextModel.load(write_model(tmp_path / "bos", add_bos_token=True)).tokenizer
    assert with_bos.encode("fox", add_special_tokens=True)[0] == 1
    assert with_bos.encode("fox", add_special_tokens=False)[0] != 1
    without = TextModel.load(write_model(tmp_path / "none")).tokenizer
    assert without.encode("fox", add_special_tokens=True) == without.encode("fox", add_special_tokens=False)


def test_long_texts_give_the_same_ids_as_short_ones(text: TextModel) -> None:
    line = "the quick brown fox 😀\n"
    assert text.tokenizer.encode(line * 500, False) == text.tokenizer.encode(line, False) * 500


def test_template_file_goes_before_the_config_and_override_before_both(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    (directory / "chat_template.jinja").write_text("FILE", "utf-8")
    from_file, override = TextModel.load(directory), TextModel.load(directory, chat_template="{{ bos_token }}OVER")
    assert from_file.chat_template is not None
    assert override.chat_template is not None
    assert from_file.chat_template.render([]) == "FILE"
    assert override.chat_template.render([]) == "<|im_start|>OVER"


def test_templates_see_what_transformers_gives_them() -> None:
    source = (
        "{% for m in messages %}\n    {% if loop.index > 2 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n{% endfor %}\n{{ strftime_now('%%') }}"
    )
    messages = [{"content": f"<{number} é>"} for number in range(4)]
    assert ChatTemplate(source, {}).render(messages) == '{"content": "<0 é>"}{"content": "<1 é>"}%'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].content + 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_G5_whatever_a_template_does_is_one_error(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="chat template"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])


def test_broken_templates_are_refused_when_loaded() -> None:
    with pytest.raises(ValueError, match="does not compile"):
        ChatTemplate("{% if %}", {})


def test_byte_level_inside_a_sequence_is_known() -> None:
    backend = Backend(models.BPE({"Ġa": 0, "b": 1}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    assert Tokenizer(backend, {}).token_bytes.of(0) == b" a"
