"""Tokenizers read from model directories agree with transformers, and a user's text never holds a
control token."""

from __future__ import annotations

import ctypes
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from octavo.errors import InvalidRequest, ModelError
from octavo.text import Tokenizer
from octavo.text.gguf_tokenizer import LLAMA3, META_SYMBOL
from tests.text.builders import KINDS, SPECIALS, TEXTS, byte_level, sentencepiece

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
}


def save(
    path: Path, tokenizer: tokenizers.Tokenizer | None, config: dict[str, Any], **files: Any
) -> Path:
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def auto_tokenizer(path: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(path)


def assert_agree(path: Path) -> Tokenizer:
    """Ours encodes and decodes as theirs does."""
    ours, theirs = Tokenizer.from_directory(path), auto_tokenizer(path)
    for text in TEXTS:
        for add in (True, False):
            ids = theirs(text, add_special_tokens=add).input_ids
            assert ours.encode(text, add_special_tokens=add) == ids
            assert ours.decode(ids, skip_special_tokens=add) == theirs.decode(
                ids, skip_special_tokens=add, clean_up_tokenization_spaces=False
            )
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_ids >= set(theirs.all_special_ids)
    assert ours.vocab_size == len(theirs)
    return ours


# ---- directories ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["byte-level", "llama-3"])
def test_a_tokenizer_json_is_read_as_transformers_reads_it(kind: str, tmp_path: Path) -> None:
    assert_agree(save(tmp_path, KINDS[kind](), CONFIG))


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_a_post_processor_has_the_last_word_on_bos_and_eos(
    bos: bool, eos: bool, tmp_path: Path
) -> None:
    says = {"add_bos_token": bos, "add_eos_token": eos}
    ours = assert_agree(save(tmp_path, byte_level(LLAMA3, bos=True), {**CONFIG, **says}))
    assert ours.encode("hi") == [0, *ours.encode("hi", add_special_tokens=False)]
    assert ours.with_special_tokens([7]) == [0, 7]


@pytest.mark.parametrize("bos", [None, True, False])
@pytest.mark.parametrize("eos", [None, True, False])
@pytest.mark.parametrize("processor", [None, processors.ByteLevel()])
def test_where_no_post_processor_speaks_of_bos_and_eos_the_config_does(
    bos: Any, eos: Any, processor: Any, tmp_path: Path
) -> None:
    t = byte_level()
    if processor:
        t.post_processor = processor
    ours = Tokenizer.from_directory(
        save(tmp_path, t, {**CONFIG, "add_bos_token": bos, "add_eos_token": eos})
    )
    text = ours.encode("hi", add_special_tokens=False)
    assert ours.encode("hi") == [*([1] if bos else []), *text, *([2] if eos else [])]


def test_a_llama_tokenizer_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "legacy": False,
    }
    t = sentencepiece()
    t.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    assert assert_agree(save(tmp_path, t, {**config, "add_bos_token": True})).encode("hi")[0] == 1


def test_tokens_declared_only_beside_tokenizer_json_are_known(tmp_path: Path) -> None:
    extra = {
        "content": "<extra>",
        "special": True,
        "normalized": False,
        "lstrip": False,
        "rstrip": False,
        "single_word": False,
    }
    t = byte_level()
    config = {
        **CONFIG,
        "added_tokens_decoder": {str(t.get_vocab_size()): extra},
        "pad_token": "<pad>",
    }
    ours = assert_agree(save(tmp_path, t, config))
    assert ours.backend.token_to_id("<extra>") in ours.special_ids
    assert (
        ours.specials["pad_token"] == "<pad>"
        and ours.backend.token_to_id("<pad>") in ours.special_ids
    )


def test_special_tokens_map_names_what_the_config_does_not(tmp_path: Path) -> None:
    names = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"}
    ours = Tokenizer.from_directory(save(tmp_path, byte_level(), {}, special_tokens_map=names))
    assert (ours.bos_token, ours.eos_token, ours.end_ids) == (
        "<|im_start|>",
        "<|im_end|>",
        frozenset([2]),
    )


def test_a_gpt2_directory_without_tokenizer_json_is_read(tmp_path: Path) -> None:
    model = json.loads(byte_level().to_str())["model"]
    save(tmp_path, None, {"tokenizer_class": "GPT2Tokenizer"}, vocab=model["vocab"])
    (tmp_path / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(" ".join(m) for m in model["merges"]) + "\n"
    )
    ours, theirs = Tokenizer.from_directory(tmp_path), auto_tokenizer(tmp_path)
    for text in TEXTS:
        text = text.replace("<|im_start|>", "").replace("<|im_end|>", "")
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.decode(ours.encode(text)) == text
    assert ours.eos_id == theirs.eos_token_id == 0


def test_truncation_and_padding_of_a_training_run_are_not_ours(tmp_path: Path) -> None:
    t = byte_level()
    t.enable_truncation(4)
    t.enable_padding(length=8)
    ours = Tokenizer.from_directory(save(tmp_path, t, CONFIG))
    assert ours.decode(ours.encode(TEXTS[0])) == TEXTS[0]


def test_chat_templates_are_found_wherever_they_are_kept(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), {**CONFIG, "chat_template": "from config"})
    assert Tokenizer.from_directory(tmp_path).chat_template == "from config"
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with tools"},
    ]
    save(tmp_path, None, {**CONFIG, "chat_template": named})
    assert Tokenizer.from_directory(tmp_path).chat_templates == {
        "default": "plain",
        "tool_use": "with tools",
    }
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert Tokenizer.from_directory(tmp_path).chat_templates == {
        "default": "from file",
        "tool_use": "with tools",
    }
    (tmp_path / "chat_template.jinja").unlink()
    save(tmp_path, None, CONFIG)
    assert Tokenizer.from_directory(tmp_path).chat_template is None


def test_what_cannot_be_read_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer: it needs tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x00")
    with pytest.raises(
        ModelError,
        match=r"only a SentencePiece tokenizer\.model\. Convert it once.*save_pretrained",
    ):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_directory(tmp_path)
    save(tmp_path, byte_level(), {"chat_template": [{"name": "default"}]})
    with pytest.raises(
        ModelError,
        match=r"tokenizer_config\.json is not a valid tokenizer configuration: KeyError\('template'\)",
    ):
        Tokenizer.from_directory(tmp_path)


# ---- special tokens in a user's text -------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_users_text_never_holds_a_special_token_and_is_kept(
    kind: str, data: st.DataObject
) -> None:
    t = TOKENIZERS[kind]
    specials = [t.token_str(id) for id in t.special_ids]
    text = "".join(
        data.draw(
            st.lists(st.sampled_from([*specials, "a", " ", "the", "<", "|", "\n", "é"]), max_size=8)
        )
    )
    ids = t.encode(text, add_special_tokens=False, parse_special=False)
    unknown = {t.backend.token_to_id(name) for name in ("<unk>", "[UNK]")}
    assert not (t.special_ids - unknown) & set(ids)
    if t.bytes_by_id.decoding == "bytes" or kind == "gemma":
        assert t.decode(ids, skip_special_tokens=False) == text


TOKENIZERS = {kind: Tokenizer(build()) for kind, build in KINDS.items()}
# older Llama files have their special tokens searched for after normalization
OLD = sentencepiece("legacy")
OLD.add_special_tokens(
    [AddedToken(token, normalized=True, special=True) for token in ("<s>", "</s>")]
)
TOKENIZERS["sentencepiece-old"] = Tokenizer(OLD)


@pytest.mark.parametrize(
    "kind",
    [
        "byte-level",
        "llama-3",
        "sentencepiece",
        "sentencepiece-legacy",
        "sentencepiece-old",
        "gemma",
    ],
)
@given(data=st.data())
def test_marked_special_tokens_are_text_and_all_others_count(
    kind: str, data: st.DataObject
) -> None:
    """With no mark the tokens are the library's own; with every special token marked they are the
    plain ones."""
    t = TOKENIZERS[kind]
    specials = [t.token_str(id) for id in t.special_ids]
    text = "".join(
        data.draw(
            st.lists(st.sampled_from([*specials, "a", " ", "the", "<", "|", "\n", "é"]), max_size=8)
        )
    )
    assert t.encode_marked(text, "\ufdd0") == t.encode(text, add_special_tokens=False)
    protected = t.protect(text, "\ufdd0")
    assert protected.replace("\ufdd0", "") == text
    plain = t.encode(text, add_special_tokens=False, parse_special=False)
    assert t.encode_marked(protected, "\ufdd0") == plain


def test_two_texts_cannot_join_into_a_special_token() -> None:
    t = TOKENIZERS["byte-level"]
    joined = t.protect("well <|im_", "\ufdd0") + t.protect("end|>", "\ufdd0")
    assert t.encode_marked(joined, "\ufdd0") == t.encode(
        "well <|im_end|>", add_special_tokens=False, parse_special=False
    )
    assert 2 not in t.encode_marked(joined, "\ufdd0")


def test_special_tokens_that_overlap_are_all_marked() -> None:
    t = Tokenizer(byte_level(specials=["<<", "<s>"]))
    assert t.protect("a<<s>", "\ufdd0") == "a\ufdd0<\ufdd0<s>"
    assert t.encode_marked(t.protect("a<<s>", "\ufdd0"), "\ufdd0") == t.encode(
        "a<<s>", parse_special=False
    )
    assert t.special_ids.isdisjoint(t.encode("a<<s>", parse_special=False))


def test_special_tokens_keep_their_appetite_for_white_space() -> None:
    backend = byte_level()
    backend.add_special_tokens(
        [AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False, special=True)]
    )
    t = Tokenizer(backend)
    text = "a  <mask>  b"
    assert t.encode_marked(text, "\ufdd0") == t.encode(text)
    assert len(t.encode(text)) == 3


CHAT_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
    "chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}


def test_a_tokenizer_answers_to_transformers_names(tmp_path: Path) -> None:
    path = save(tmp_path, byte_level(), CHAT_CONFIG)
    ours, theirs = Tokenizer.from_directory(path), auto_tokenizer(path)
    messages = [{"role": "user", "content": "the fox"}]
    pair = ["the<|im_end|>", "a longer fox"]
    ids = [[5, 6, 1], [7]]
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(ours, name) == getattr(theirs, name), name
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id"), name
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == ours.vocab == theirs.get_vocab()
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    assert sorted(ours.all_special_ids) == sorted(theirs.all_special_ids)
    assert sorted(ours.all_special_tokens) == sorted(theirs.all_special_tokens)
    assert ours.tokenize("the<|im_end|> fox") == theirs.tokenize("the<|im_end|> fox")
    for text in ("the<|im_end|>", pair):
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours(text)["attention_mask"] == theirs(text)["attention_mask"]
    assert ours.convert_tokens_to_ids("<|im_end|>") == theirs.convert_tokens_to_ids("<|im_end|>")
    assert ours.convert_ids_to_tokens([5, 6]) == theirs.convert_ids_to_tokens([5, 6])
    assert ours.decode(7) == theirs.decode(7)
    for skip in (True, False):
        assert ours.batch_decode(ids, skip) == theirs.batch_decode(ids, skip)
    for options in ({}, {"add_generation_prompt": True}, {"return_dict": False}):
        got = ours.apply_chat_template(messages, **options)
        want = theirs.apply_chat_template(messages, **options)
        assert (got if "return_dict" in options else got.input_ids) == (
            want if "return_dict" in options else want.input_ids
        )
        text = ours.apply_chat_template([messages, messages], tokenize=False, **options)
        assert text == theirs.apply_chat_template([messages, messages], tokenize=False, **options)


def test_options_of_transformers_that_would_have_no_effect_are_refused() -> None:
    t = TOKENIZERS["byte-level"]
    assert t("a", padding=False, truncation=None, return_tensors=None) == t("a")
    for option in ({"padding": True}, {"truncation": True}, {"return_tensors": "pt"}):
        with pytest.raises(InvalidRequest, match="this tokenizer does not support"):
            t("a", **option)


def test_special_tokens_are_recognised_unless_they_are_to_be_characters() -> None:
    t = TOKENIZERS["byte-level"]
    assert t.encode("<|im_start|>a<|im_end|>")[0::2] == [1, 2]
    assert 2 not in t.encode("<|im_end|>", parse_special=False)
    # an added token that controls nothing
    assert t.encode("x<think>y", parse_special=False)[1] == t.backend.token_to_id("<think>")


def test_a_special_token_that_merges_can_spell_is_spelled_out() -> None:
    tokens = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "<",
        "s",
        ">",
        "s>",
        META_SYMBOL,
    ]
    vocab = {token: id for id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("s", ">"), ("<", "s>")], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace(META_SYMBOL, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    t = Tokenizer(backend)
    ids = t.encode("s<s>s", parse_special=False)
    assert 1 not in ids and t.decode(ids) == "s<s>s"


def test_encoding_for_users_and_for_templates_does_not_interfere_across_threads() -> None:
    t = Tokenizer(byte_level())
    text = "<|im_start|>a<|im_end|>" * 20
    wrong: list[bool] = []

    def work(allow: bool) -> None:
        for _ in range(50):
            if (1 in t.encode(text, parse_special=allow)) != allow:
                wrong.append(allow)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- memory --------------------------------------------------------------------------------------


class MallocInfo(ctypes.Structure):
    """What mallinfo2() of glibc returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def allocated_mib() -> float:
    """The memory that is allocated in this process, whether Python or a library asked for it."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        pytest.skip("only glibc 2.33 and later has mallinfo2")
    mallinfo2.restype = MallocInfo
    info = mallinfo2()
    return (info.uordblks + info.hblkhd) / 2**20


def test_words_that_never_return_take_little_memory() -> None:
    t = Tokenizer(byte_level())
    generator = random.Random(0)
    before = allocated_mib()
    for _ in range(50):
        words = ["".join(generator.choices("abcdefgh", k=200)) for _ in range(100)]
        t.encode(" ".join(words))
    assert allocated_mib() - before < 16


# ---- the rest ------------------------------------------------------------------------------------


def test_tokens_have_a_spelling_and_bytes() -> None:
    t = TOKENIZERS["byte-level"]
    id = t.backend.token_to_id("Ġthe")
    assert (t.token_str(id), t.token_bytes(id)) == ("Ġthe", b" the")
    assert (t.token_str(10**6), t.token_bytes(10**6)) == ("", b"")
    assert [t.token_bytes(i) for i in range(3)] == [s.encode() for s in SPECIALS]
    s = TOKENIZERS["sentencepiece"]
    assert s.token_bytes(s.backend.token_to_id("<0xE4>")) == b"\xe4"


@pytest.mark.parametrize("text", ["lone \ud800 surrogate", None, 7, b"bytes"])
def test_what_is_not_unicode_text_is_refused(text: Any) -> None:
    with pytest.raises(InvalidRequest, match="valid Unicode"):
        TOKENIZERS["byte-level"].encode(text)


# ---- characters that a vocabulary lacks ----------------------------------------------------------


def lacking(kind: str) -> tokenizers.Tokenizer:
    """A vocabulary of the letters of <unk> and a, whose own file alone names the unknown token."""
    words = ["<unk>", "<", "u", "n", "k", ">", "a"]
    vocab = {word: i for i, word in enumerate(words)}
    if kind == "unigram":
        model = models.Unigram([(word, -1.0) for word in words], 0, False)
    elif kind == "wordlevel":
        model = models.WordLevel(vocab, unk_token="<unk>")
    else:
        model = models.BPE(vocab, [], unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    if kind == "wordlevel":
        backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens(["<unk>"])
    return backend


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordlevel"])
def test_a_character_that_the_vocabulary_lacks_is_the_unknown_token(
    kind: str, tmp_path: Path
) -> None:
    backend = lacking(kind)
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_directory(tmp_path)
    for parse in (True, False):
        assert ours.encode("a?a", parse_special=parse) == backend.encode("a?a").ids
        assert 0 in ours.encode("a?a", parse_special=parse)
    if kind != "unigram":  # whose vocabulary has a piece of that spelling
        written = ours.encode("a<unk>a", parse_special=False)
        assert 0 not in written, "what a user wrote is not a special token"
