"""Weights of a model with tied embeddings, written so that a server takes all of them when it reloads.

Such a checkpoint has no `lm_head.weight`. vLLM 0.32 on the CPU keeps a packed copy of the head from its first
load, and a reload without that name leaves the copy as it was: the head would stay behind with the old
weights, without an error. Where the name is there, the head is packed anew.
"""

from __future__ import annotations

import json
from pathlib import Path
import shutil

from paravt.engines.base import EngineError

HEAD, EMBEDDING = "lm_head.weight", "language_model.embed_tokens.weight"
INDEX, EXTRA = "model.safetensors.index.json", "lm_head.safetensors"


def with_head(folder: str | Path, aside: str | Path) -> Path:
    """`folder` if its embeddings are not tied; else `aside`, filled anew with links to its files, and a head.

    Raises EngineError if the folder has no weights, or no embedding among them.
    """
    folder, aside = Path(folder).resolve(), Path(aside).absolute()
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{folder} is not a model folder ({error})") from error
    text = config.get("text_config", {})
    if not text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)):
        return folder
    from safetensors import safe_open
    from safetensors.torch import save_file

    where: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            where |= {name: path.name for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    found = [name for name in where if name.endswith(EMBEDDING)]
    if HEAD in where:
        return folder
    if len(found) != 1:
        raise EngineError(f"{folder} holds no weights of a Qwen3-VL model")
    with safe_open(folder / where[found[0]], "pt") as file:
        embedding = file.get_tensor(found[0])
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    for path in folder.iterdir():
        if path.is_file() and path.name != INDEX:
            (aside / path.name).symlink_to(path)
    save_file({HEAD: embedding.clone()}, aside / EXTRA, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": where | {HEAD: EXTRA}}
    (aside / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return aside
