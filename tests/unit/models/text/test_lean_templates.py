"""A process that works on texts imports of transformers what renders chat templates, which renders as the whole does;
and whoever wants the rest has it."""

import subprocess
import sys

RENDER = """
import json, sys
from aegis.models.text.lean_templates import import_templates

import_templates()
print("transformers" in sys.modules, "transformers.utils.hub" in sys.modules)
from transformers.utils.chat_template_utils import render_jinja_template as lean

template = "{%- for m in messages %}{% generation %}{{ m.role | upper }}: {{ m | tojson }}{% endgeneration %}"
template += "{% endfor %}{{ strftime_now('%Y') | length }}"
template += "{% for tool in tools or [] %}{{ tool | tojson(indent=2) }}{% endfor %}"
asked = {
    "conversations": [[{"role": "user", "content": "x < \\u00e9"}]],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "chat_template": template,
    "add_generation_prompt": True,
}
rendered = lean(**asked)

import transformers
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

print(transformers.__version__ != "" and AutoTokenizer.__name__)
print(chat_template_utils.render_jinja_template(**asked) == rendered)
"""


def test_what_renders_is_imported_alone_and_the_whole_is_there_for_who_asks() -> None:
    done = subprocess.run([sys.executable, "-c", RENDER], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("False False\nAutoTokenizer\nTrue\n", 0), done.stderr
