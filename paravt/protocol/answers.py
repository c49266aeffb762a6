"""What an answer says: a choice, a span of time, or open text. One reader each, for rewards and benchmarks.

A reader takes the text of an answer and gives what it names, or None if it names nothing or more than one
thing. Hedging does not pay: every option listed is no choice, and two different spans are no span. No reader
raises on any text.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
import re
import unicodedata

from paravt.protocol.prompts import plain_options
from paravt.rollout import LETTERS
from paravt.times import TimeError, parse_time

# --- choices

_LEADING = re.compile(  # "B. circle", "(b) circle", "B - circle", "B circle"
    r"""^ [(\["'*]* (?P<letter>[A-Ja-j]) [)\]"'*]*
        (?: (?P<mark> \s*[.):] | (?<=[)\]])\s | \s+[-–—]\s ) \s* | \s+ ) (?=\S)""",
    re.VERBOSE,
)
_BRACKETED = re.compile(r"[(\[]\s*([A-Ja-j])\s*[)\]]")
_CAPITAL = re.compile(  # alone: not in a word, an abbreviation, a range or a list with slashes
    r"(?<![\w\-+/&.#]) (?<!\w['’]) ([A-J]) (?! [\w\-+/&#] | ['’]\w | \.\w )", re.VERBOSE
)
_CUED = re.compile(  # "the answer is b": a small letter counts only where nothing follows it
    r"""\b (?:answer|option|choice|letter) (?:\s+is)? \s*[:=]?\s* ["'*]*
        ([a-j]) (?= ["'*.,;:!)]* (?: \s*$ | [.,;:!]\s ) )""",
    re.VERBOSE | re.IGNORECASE,
)
_NEGATED = re.compile(
    r"(?:\b(?:not|never|neither|nor|except)|n['’]t)\s+(?:be\s+|option\s+)?[(\"'*\[]*$", re.IGNORECASE
)
_NEXT_WORD = re.compile(r"[\"'*]*\s+([A-Za-z][A-Za-z'’]+)")
_WORDS_AFTER_A = frozenset(
    ("and", "or", "nor", "but", "not", "is", "was", "are", "as", "so", "it", "because", "since", "which")
    + ("would", "seems", "appears", "looks", "matches", "fits", "then", "only", "instead")
)
_WORDS_AFTER_I = frozenset(("and", "or", "nor", "but", "is", "because"))
_LEAD_IN = re.compile(
    r"^(?:so,?\s|the\s|my\s|final\s|correct\s)*(?:answer|option|choice)(?:\s+is|:)+\s+", re.IGNORECASE
)


def read_choice(text: str | None, options: Sequence[str] = ()) -> str | None:
    """The letter of the option that `text` names, by letter or by the exact text of the option.

    With no `options`, the letters A to J are on offer. A letter inside a word is none, nor are the English
    words "A" and "I". Several different letters, or a letter beside another option's text: None.
    """
    text = " ".join((text or "").split())
    offered = LETTERS[: len(options)] if options else LETTERS
    texts = [_folded(option) for option in plain_options(options)][: len(LETTERS)]
    bare = text.strip(" \"'`*.,;:!?()[]{}")
    if len(bare) == 1 and bare.upper() in offered:
        return bare.upper()
    named = _named_by_text(text, texts)
    if not named:
        named = {match[1].upper() for match in _CUED.finditer(text)}
        named |= {match[1].upper() for match in _BRACKETED.finditer(text) if not _negated(text, match)}
        named |= {match[1] for match in _CAPITAL.finditer(text) if not _negated(text, match, word=True)}
        leading = _LEADING.match(text)
        if leading:
            letter, rest = leading["letter"].upper(), _named_by_text(text[leading.end() :], texts)
            if letter in rest and not _lists_letters(leading, text[leading.end() :], letter, offered):
                return letter
            if rest or leading["mark"]:
                named |= rest | {letter}
    return named.pop() if len(named) == 1 and named <= set(offered) else None


def _lists_letters(leading: re.Match, rest: str, letter: str, offered: str) -> bool:
    """Whether "(A) (B)" lists two letters, although the text of option A is "B"; "A. B" names option A."""
    bare = rest.strip(" \"'`*.,;:!?()[]{}").upper()
    written_out = (leading["mark"] or "").strip() in (".", ":") and not rest.lstrip().startswith(("(", "["))
    return bare != letter and len(bare) == 1 and bare in offered and not written_out


def _named_by_text(text: str, texts: Sequence[str]) -> set[str]:
    """The letters of the options whose text is `text`, or is all that follows "the answer is"."""
    said = {_folded(text), _folded(_LEAD_IN.sub("", text))} - {""}
    return {letter for letter, option in zip(LETTERS, texts, strict=False) if option in said}


def _folded(text: str) -> str:
    return " ".join(text.casefold().split()).lstrip("\"'`*([{“‘").rstrip("\"'`*.,;:!?)]}”’")


def _negated(text: str, match: re.Match, word: bool = False) -> bool:
    """Whether a letter is ruled out ("not B") or, where `word` is asked, is the English word "A" or "I"."""
    following = _NEXT_WORD.match(text, match.end())
    if word and following and match[1] in "AI":
        allowed = _WORDS_AFTER_A if match[1] == "A" else _WORDS_AFTER_I
        if following[1].casefold() not in allowed:
            return True
    return bool(_NEGATED.search(text[max(0, match.start() - 20) : match.start()]))


# --- spans

_TIME = r"(?:\d+(?::\d{1,2}){1,2}(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_UNIT = r"(?:\s*(?:seconds?|secs?|s)(?![a-z]))?"
# A hyphen before the first time is a sign, a hyphen after it a dash.
# A number with a comma in it, 12,5 or 1,200, is read by nobody alike: neither of its halves is a time.
_A = rf"(?P<a>[-−]{_TIME}|(?<![\w.\-−])(?<!\d[:,]){_TIME}){_UNIT}"
_B = rf"(?P<b>[-−]?{_TIME}){_UNIT}(?![\w:]|[.,]\d)"
_PAIRS = tuple(
    re.compile(pattern)
    for pattern in (
        # 12.5 to 17.8, 12.5-17.8, <12.5 seconds> to <17.8 seconds>
        rf"""{_A}["'*>)\]]*\s*(?:-->|->|→|–|—|-|~|\.\.\.?|\b(?:to|until|till|through)\b)\s*[<(\["'*]*{_B}""",
        rf"\bbetween\s+{_A}\s*(?:and|,)\s*{_B}",
        rf"[\[(]\s*{_A}\s*[,;]\s*{_B}\s*[\])]",
        rf"^{_A}\s*(?:[,;]|\band\b|\s)\s*{_B}\.?$",
        # start: 3 end: 7, starts at 3 s and ends at 7 s
        rf"\b(?:start|begin)[a-z]*(?:[ _]?time)?[^\d.]{{0,24}}?{_A}\D{{0,24}}?"
        rf"\b(?:end|finish|stop)[a-z]*(?:[ _]?time)?[^\d.]{{0,24}}?{_B}",
    )
)
_MINUTES = re.compile(
    r"(?<![\d.:])(\d{1,4})\s*(?:m|min|mins|minutes?)(?![a-z])"
    r"(?:\s*(?:and\s+)?(\d{1,2}(?:\.\d+)?)\s*(?:s|secs?|seconds?)(?![a-z])"
    r"|\s+([0-5]?\d(?:\.\d+)?)(?![\w:.]|\s*(?:m|mins?|minutes?)(?![a-z])))?"  # 1 minute 10
)
SAME_SPAN_S = 1.0  # two spans this close are one, said twice: "3.2 to 7.4 (0:03 to 0:07)"


def read_span(text: str | None) -> tuple[float, float] | None:
    """The (start_s, end_s) that `text` names, in seconds; None if it is negative, inverted or not one span.

    Read are "12.5 to 17.8", "12.5-17.8", "[12.5, 17.8]", "from 1:30 to 1:45", "start: 3 end: 7", and such a
    pair inside a sentence.
    """
    text = " ".join(unicodedata.normalize("NFKC", text or "").casefold().split())
    text = _MINUTES.sub(lambda match: f"{int(match[1]) * 60 + float(match[2] or match[3] or 0)} s", text)
    found = sorted((m.start(), m["a"], m["b"]) for pair in _PAIRS for m in pair.finditer(text))
    spans = [(_seconds(first), _seconds(second)) for _, first, second in found]
    if not spans or any(start is None or end is None or start > end for start, end in spans):
        return None
    start_s, end_s = spans[0]
    if any(abs(start - start_s) > SAME_SPAN_S or abs(end - end_s) > SAME_SPAN_S for start, end in spans):
        return None
    return start_s, end_s


def _seconds(token: str) -> float | None:
    try:
        value = parse_time(token)
    except TimeError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


# --- open text

_TOKEN = re.compile(
    r"""(?<![\w.]) [-+]? (?: \d{1,3} (?:,\d{3})+ | \d+ ) (?:\.\d+)? (?!\d) \w*
        | (?<![\w.]) [-+]? \.\d+
        | \w+""",
    re.VERBOSE,
)
_ARTICLES = frozenset(("a", "an", "the"))


def read_open(text: str | None) -> str:
    """Open text made comparable: lower case, no punctuation, no articles, single spaces.

    Numbers keep their sign and decimal point; "+3" and "3" are the same, and so are "1,000" and "1000". An
    answer that is nothing but an article keeps it, so that a gold "A" is not matched by an empty answer.
    """
    folded = unicodedata.normalize("NFKC", text or "").casefold().replace("−", "-")
    folded = re.sub(r"(?<=\w)['’](?=\w)", "", unicodedata.normalize("NFKC", folded))
    tokens = [token.replace(",", "").removeprefix("+") for token in _TOKEN.findall(folded.replace("_", " "))]
    return " ".join([token for token in tokens if token not in _ARTICLES] or tokens)
