"""A host of raw files on loopback, with made prompts of the published baselines at their pinned commits."""

from __future__ import annotations

from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
import threading

from paravt.protocol.families import FAMILIES

# Made texts in the shapes of the real files.
FILES = {
    "paravt/eval/driver.py": """
import json
TOOL_SCHEMA = json.dumps({"name": "crop_video", "parameters": {"a": 1}})
DIRECT_SYSTEM = ("Say it. " "In tags.")
REASONING_SYSTEM = ("Think. " "Then say it.")
GENERAL_AGENTIC_SYSTEM = \"\"\"Tools: {tool_schema}
{{"name": "crop_video"}} go\"\"\"
MINIMAL_AGENTIC_SYSTEM = \"\"\"# {tool_schema} {{}}\"\"\"
OTHER = "FILL_FROM_OTHER"
""",
    "lmms_eval_tasks/videomme/utils.py": 'def f():\n    pass\n\nTOOL_PROMPT = ("Think, then "\n "call.")\n',
    "examples/eval/single_inference.py": (
        'CROP_VIDEO_TOOL = {"type": "function", "function": {"name": "crop_video"}}\n'
    ),
    "scripts/eval_video.sh": "python3 -m x \\\n    data.fps=0.5 \\\n    "
    "'data.system_prompt=\"Zoom by <video_zoom> "
    '{\\"segment\\": [a, b], \\"fps\\": n} </video_zoom>. Put it in \\\\boxed{{}}."\' \\\n    other=1\n',
    "sage/prompts/sage/context_vlm.txt": "Reply in JSON. Tools:\n<<<tools>>>\n",
    "sage/src/functions/tools/extract.py": (
        "def extract_parts_from_timestamp(\n    video_path: str,\n    timestamp_start: str,\n"
        '    timestamp_end: str,\n) -> dict:\n    """Extract frames.\n\n    Args: HH:MM:SS\n    """\n'
    ),
    "src/eval_bench.py": """
for path in ["a", "b"]:
    QUESTION_TEMPLATE = ("{Question}\\n" "Think hard.")
    TYPE_TEMPLATE = {"multiple choice": " One letter.", "free-form": " Some text."}
""",
    "src_eval/eval_prompts.py": (
        'QA_THINK = """Answer "[QUESTION]" from :[OPTION]."""\n'
        'GROUND_TEMPLATE_THINK = """Find "[EVENT]"."""\n'
        'CLS_QA_TEMPLATE = """[PROBLEM] Think."""\n'
    ),
    "src/vllm_inference/data/config.py": (
        'DEFAULT_MCQ_PROMPT = {"default": "d", "r1": """Best option.\nQuestion: {}\n{}"""}\n'
        'DEFAULT_TG_PROMPT = {"r1": """Find "{}" now."""}\n'
    ),
    "Conan-Eval/prompt_temp.py": (
        'Prompt_temp_init_mc="""\nScore. Question: {question}\nOption: {options}\n"""\n'
        'Prompt_temp_init_gen="""Answer with {type_fix}. Question: {question}"""\n'
    ),
}


class RawHost:
    """Serves `root`/OWNER/NAME/COMMIT/PATH at `url`; `asked` are the paths that were asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[str] = []
        for family in FAMILIES.values():
            for file in family.files:
                path = root / family.repository / family.commit / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(FILES[file], encoding="utf-8")

    def __enter__(self) -> RawHost:
        asked = self.asked

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, *words: object) -> None:
                pass

            def do_GET(self) -> None:
                asked.append(self.path)
                super().do_GET()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(self.root)))
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
