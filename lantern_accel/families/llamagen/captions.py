"""Caption cleaning as LlamaGen's text encoder was fed in training (DeepFloyd's rules, applied twice).

The rules are those of ``language/t5.py`` in FoundationVision/LlamaGen, written as a table: what is
matched and what takes its place, in order. ``ftfy`` and ``bs4`` come with the extra ``text``.
"""

from __future__ import annotations

import html
import re
import warnings
from urllib.parse import unquote_plus

from lantern_accel.errors import RequestError

_ENDINGS = "com|co|ru|net|org|edu|gov|it"
_FILES = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"


def _url(scheme: str) -> str:
    host = rf"[a-zA-Z0-9.\-]+[.](?:{_ENDINGS})[\w/-]*\b/?(?!@)"
    return rf"\b((?:{scheme}:(?:/{{1,3}}|[a-zA-Z0-9%])|{host}))"


def _table(*rules: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern), instead) for pattern, instead in rules)


_BEFORE_MARKUP = _table(("<person>", "person"), (_url("https?"), ""), (_url("www"), ""))
_AFTER_MARKUP = _table(
    (r"@[\w\d]+\b", ""),  # nicknames
    # CJK strokes, Katakana extensions, enclosed and compatibility forms, ideographs.
    (r"[\u31c0-\u9fff]+", ""),
    # Every kind of dash.
    (
        r"[\u002D\u058A\u05BE\u1400\u1806\u2010-\u2015\u2E17\u2E1A\u2E3A\u2E3B\u2E40\u301C\u3030"
        r"\u30A0\uFE31\uFE32\uFE58\uFE63\uFF0D]+",
        "-",
    ),
    ("[`\u00b4\u00ab\u00bb\u201c\u201d\u00a8]", '"'),
    ("[\u2018\u2019]", "'"),
    (r"&quot;?", ""),
    (r"&amp", ""),
    (r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "),  # IP addresses
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"[\S]+\.(?:{_FILES})", ""),
    (r"[\"\']{2,}", '"'),
    (r"[\.]{2,}", " "),
    (r"[#®•©™&@·º½¾¿¡§~)(\]\[}{|\\/*]{1,}", " "),
    (r"\s+\.\s+", " "),
)
_JOINED = re.compile(r"[-_]")
_LAST = _table(
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(worldwide\s+)?(free\s+)?shipping", ""),
    (r"(free\s)?download(\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{_FILES})(\simage[s]?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    (r"\b\d+\.?\d*[x\u0445\u00d7]\d+\.?\d*\b", ""),  # sizes: Latin x, Cyrillic x, times
    (r"\b\s+\:\s+", ": "),
    (r"(\D[,\./])\b", r"\1 "),
    (r"\s+", " "),
    (r"^[\"\']([\w\W]+)[\"\']$", r"\1"),
    (r"^[\'\_,\-\:;]", ""),
    (r"[\'\_,\-\:\-\+]$", ""),
    (r"^\.\S+$", ""),
)


def _apply(rules: tuple[tuple[re.Pattern[str], str], ...], text: str) -> str:
    for pattern, instead in rules:
        text = pattern.sub(instead, text)
    return text


def _once(text: str) -> str:
    import ftfy
    from bs4 import BeautifulSoup

    text = unquote_plus(text).strip().lower()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a caption looks like a file name does not matter
        text = BeautifulSoup(_apply(_BEFORE_MARKUP, text), features="html.parser").text
    text = _apply(_AFTER_MARKUP, text)
    if len(_JOINED.findall(text)) > 3:  # this-is-my-cute-cat
        text = _JOINED.sub(" ", text)
    text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return _apply(_LAST, text).strip()


def clean_caption(text: str) -> str:
    """Return a caption as the official sampler feeds it to T5; needs the extra ``text``.

    Raises :class:`RequestError` where the extra is not installed.
    """
    try:
        return _once(_once(text))
    except ImportError as error:
        raise RequestError(
            f"captions for this model are cleaned with {error.name}, which is not installed: pip install "
            "'lantern-accel[text]', or give the prompts' features with --use embeddings=PATH"
        ) from None
