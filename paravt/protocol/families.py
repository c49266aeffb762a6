"""The published baselines by name: where each one's prompt stands, and the question in its words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paravt.config import UPSTREAM
from paravt.protocol.prompts import answer_hint, plain_options, question_lines, video_name
from paravt.protocol.upstream import Family, Piece, Render, Texts, Upstream, UpstreamError, read_piece
from paravt.rollout import LETTERS, Sample

FOLDER = Path("data/upstream")


def family_of(mode: str) -> Family:
    """The family of a mode `upstream:NAME`. Raises UpstreamError that lists them."""
    name = mode.removeprefix(UPSTREAM)
    if name not in FAMILIES:
        raise UpstreamError(f"no published prompt is called {name!r}; use one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def load(mode: str, folder: Path = FOLDER) -> Upstream:
    """The texts of a mode out of the fetched files, `folder`/NAME/file. Raises UpstreamError."""
    family = family_of(mode)
    texts = {}
    for role, piece in family.pieces.items():
        path = folder / family.name / piece.file
        try:
            source = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UpstreamError(
                f"{path} is missing; run `paravt eval fetch --prompts {family.name}` with a network; in the "
                "pipeline, add it to data.hub.prompts"
            ) from None
        try:
            texts[role] = read_piece(source, piece)
        except UpstreamError as error:
            raise UpstreamError(f"{path}: {error}") from error
    return Upstream(family, texts)


# Questions in the words of each family.


def _lettered(sample: Sample) -> list[str]:
    return [f"{a}. {text}" for a, text in zip(LETTERS, plain_options(sample.options), strict=False)]


def _event(sample: Sample) -> str:
    return str(sample.meta.get("caption") or sample.question).strip()


def _with_path(sample: Sample) -> str:
    return f"{question_lines(sample)}\nThe video path for this video is: {video_name(sample.video)}"


def _paravt(texts: Texts, sample: Sample) -> tuple[str | None, str]:
    # the source is a format string: doubled braces are single ones
    parts = [part.replace("{{", "{").replace("}}", "}") for part in texts["system"].split("{tool_schema}")]
    return texts["tools"].join(parts), _with_path(sample)


def _paravt_system(texts: Texts, sample: Sample) -> tuple[str | None, str]:
    return texts["system"], question_lines(sample)


def _longvt(texts: Texts, sample: Sample) -> tuple[str | None, str]:
    return None, (
        f"{question_lines(sample)} {texts['suffix']} "
        f"The video path for this video is: {video_name(sample.video)}"
    )


def _zoomer(texts: Texts, sample: Sample) -> tuple[str | None, str]:
    return texts["system"], question_lines(sample)


def _sage(texts: Texts, sample: Sample) -> tuple[str | None, str]:
    video = f"Video path: {video_name(sample.video)}"
    return texts["system"].replace("<<<tools>>>", texts["tool"]), f"Query: {question_lines(sample)}\n{video}"


def _think_template(options_word: str) -> Render:
    """Video-R1 and VideoRFT: one template around the question, a sentence by the type of the answer."""

    def render(texts: Texts, sample: Sample) -> tuple[str | None, str]:
        question = sample.question.strip()
        if sample.question_type == "mcq":
            question = "\n".join([question + options_word, *_lettered(sample)]) + "\n"
        elif sample.question_type == "tvg":
            question = f"{question}\n{answer_hint('tvg')}"
        by_type = texts["mcq" if sample.question_type == "mcq" else "free"]
        return None, texts["template"].replace("{Question}", question) + by_type

    return render


def _chat_r1(texts: Texts, sample: Sample) -> tuple[str | None, str]:
    if sample.question_type == "tvg":
        return None, texts["ground"].replace("[EVENT]", _event(sample))
    if sample.question_type == "oe":
        return None, texts["open"].replace("[PROBLEM]", sample.question.strip())
    options = "\n".join(_lettered(sample))
    return None, texts["choice"].replace("[QUESTION]", sample.question.strip()).replace("[OPTION]", options)


def _time_r1(texts: Texts, sample: Sample) -> tuple[str | None, str]:
    if sample.question_type == "tvg":
        return None, texts["ground"].replace("{}", _event(sample), 1)
    options = "\n".join(
        f"({a}) {text}" for a, text in zip(LETTERS, plain_options(sample.options), strict=False)
    )
    head, middle, tail = texts["choice"].split("{}", 2)
    return None, f"{head}{sample.question.strip()}{middle}{options}{tail}"


def _conan(texts: Texts, sample: Sample) -> tuple[str | None, str]:
    if sample.question_type == "mcq":
        filled = texts["choice"].replace("{question}", sample.question.strip())
        return None, filled.replace("{options}", ", ".join(_lettered(sample)))
    hint = answer_hint("tvg") if sample.question_type == "tvg" else "text answer"
    filled = texts["open"].replace("{question}", sample.question.strip())
    return None, filled.replace("{type_fix}", hint)


def _clock(number: int, time_s: float) -> str:
    seconds = int(time_s)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _zoom_mark(number: int, time_s: float) -> str:
    return f"<frame{number}_time{time_s:.2f}s>"


_DRIVER = "paravt/eval/driver.py"
_SAGE_TEXTS, _SAGE_TOOLS = "sage/prompts/sage/", "sage/src/functions/tools/extract.py"
_R1_BENCH, _CHAT_R1 = "src/eval_bench.py", "src_eval/eval_prompts.py"
_OWN_QUESTION = "question, options and how to answer are in our words; the video's name follows them"
_PARAVT = ("EvolvingLMMs-Lab/ParaVT", "cf55249e391004b5aafea3f19cf5580d3517cb43")
_R1_PIECES = {
    "template": Piece(_R1_BENCH, "python", "QUESTION_TEMPLATE"),
    "mcq": Piece(_R1_BENCH, "python", "TYPE_TEMPLATE", "multiple choice"),
    "free": Piece(_R1_BENCH, "python", "TYPE_TEMPLATE", "free-form"),
}

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(
            "paravt",
            *_PARAVT,
            {
                "system": Piece(_DRIVER, "python", "GENERAL_AGENTIC_SYSTEM"),
                "tools": Piece(_DRIVER, "python", "TOOL_SCHEMA"),
            },
            _paravt,
            dialect="paravt_first",
            max_turns=3,
            max_calls=5,
            differs=(_OWN_QUESTION, "frames are PNG within visual.max_pixels, there JPEG without a limit"),
        ),
        Family(
            "paravt-minimal",
            *_PARAVT,
            {
                "system": Piece(_DRIVER, "python", "MINIMAL_AGENTIC_SYSTEM"),
                "tools": Piece(_DRIVER, "python", "TOOL_SCHEMA"),
            },
            _paravt,
            dialect="paravt_first",
            max_turns=3,
            max_calls=5,
            differs=(_OWN_QUESTION,),
        ),
        Family(
            "paravt-direct",
            *_PARAVT,
            {"system": Piece(_DRIVER, "python", "DIRECT_SYSTEM")},
            _paravt_system,
            dialect="plain_first",
        ),
        Family(
            "paravt-reasoning",
            *_PARAVT,
            {"system": Piece(_DRIVER, "python", "REASONING_SYSTEM")},
            _paravt_system,
            dialect="plain_first",
        ),
        Family(
            "longvt",
            "EvolvingLMMs-Lab/LongVT",
            "08d755b973e4ad990ac5cdd64fb992c804d840db",
            {
                "suffix": Piece("lmms_eval_tasks/videomme/utils.py", "python", "TOOL_PROMPT"),
                "schema": Piece("examples/eval/single_inference.py", "python", "CROP_VIDEO_TOOL"),
            },
            _longvt,
            dialect="paravt",
            max_turns=5,
            differs=(
                _OWN_QUESTION,
                "crops have at most visual.crop_max_frames frames, there 128",
                "the overview is a frame budget, there 1 fps up to 512",
            ),
        ),
        Family(
            "videozoomer",
            "zsgvivo/VideoZoomer",
            "56381538bbde43d6d3417b54f727784958a4e316",
            {"system": Piece("scripts/eval_video.sh", "shell", "data.system_prompt")},
            _zoomer,
            dialect="zoom",
            max_turns=4,
            mark=_zoom_mark,
            wrapped=False,
            differs=(
                "a turn is not stopped at the closing tag, its later calls are answered as past the limit",
                "the overview is a frame budget, there 0.5 fps up to 64",
                "the last turn is asked for in our words",
            ),
        ),
        Family(
            "sage",
            "allenai/SAGE",
            "b5d9c932b25fcbdbb80e7ae9ffb0cd741308bee8",
            {
                "system": Piece(_SAGE_TEXTS + "context_vlm.txt", "text"),
                "tool": Piece(_SAGE_TOOLS, "tool", "extract_parts_from_timestamp"),
            },
            _sage,
            dialect="sage",
            max_turns=10,
            mark=lambda number, time_s: f"{_clock(number, time_s)} ",
            differs=(
                "one tool of theirs is offered, extract_parts_from_timestamp; speech and web tools are not",
                "all turns are one conversation and show the extracted frames; there each later turn is a "
                "new prompt of text",
            ),
        ),
        Family(
            "video-r1",
            "tulerfeng/Video-R1",
            "59d65c347e44efa71be27abf9d89b4a2bb7d1c05",
            _R1_PIECES,
            _think_template("Options:"),
            dialect="plain_first",
        ),
        Family(
            "videorft",
            "QiWang98/VideoRFT",
            "bba609969e66c66e152b15399488f0ad94051e3a",
            _R1_PIECES,
            _think_template(""),
            dialect="plain_first",
        ),
        Family(
            "videochat-r1",
            "OpenGVLab/VideoChat-R1",
            "73b2ea9ac83ad5c0bcd893bffd1cbb2e7c167068",
            {
                "choice": Piece(_CHAT_R1, "python", "QA_THINK"),
                "ground": Piece(_CHAT_R1, "python", "GROUND_TEMPLATE_THINK"),
                "open": Piece(_CHAT_R1, "python", "CLS_QA_TEMPLATE"),
            },
            _chat_r1,
        ),
        Family(
            "time-r1",
            "xiaomi-research/time-r1",
            "7f2b5944a0c35993da80634a459d5a48a3a5431e",
            {
                "choice": Piece("src/vllm_inference/data/config.py", "python", "DEFAULT_MCQ_PROMPT", "r1"),
                "ground": Piece("src/vllm_inference/data/config.py", "python", "DEFAULT_TG_PROMPT", "r1"),
            },
            _time_r1,
            kinds=("mcq", "tvg"),
        ),
        Family(
            "conan",
            "OuyangKun10/Conan",
            "b4805ae8ae746dccf6d1aea7a2dc46d416368692",
            {
                "choice": Piece("Conan-Eval/prompt_temp.py", "python", "Prompt_temp_init_mc"),
                "open": Piece("Conan-Eval/prompt_temp.py", "python", "Prompt_temp_init_gen"),
            },
            _conan,
            dialect="clip",
            max_turns=3,
            max_calls=5,
            mark=_clock,
            wrapped=False,
            differs=("later rounds are asked in our words, and show the crop's frames, not 8 a round",),
        ),
    )
}
NOT_SUPPORTED = {
    "rewatch-r1": "its prompt stands in a README without a known commit",
    "video-thinker": "where its prompt stands could not be verified",
}
